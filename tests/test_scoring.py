"""Scores: the originals' values, their edges, and properties that hold for any text."""

import functools
import json
import math
import string
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common import scoring
from common.scoring import (CURLY_QUOTES, bootstrap_interval, cover_exact_match, exact_match, f1, normalise_answer, self_test,
                            substring_match)

R1_SEARCHER = functools.partial(normalise_answer, punctuation_as=" ", extra_punctuation=CURLY_QUOTES)
DEEP_RESEARCHER = functools.partial(normalise_answer, punctuation_as=" ", drop_articles=False)
TEXT = st.text(st.sampled_from("aAbtheTHEnyesNO .,-_'é1\t\n\u2019"), max_size=30)
MANY = settings(max_examples=150, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("text, expected", [
    ("The  Quick, Brown\tFox!", "quick brown fox"),
    ("a An THE", ""),
    ("another theatre", "another theatre"),
    ("the-end", "theend"),  # punctuation goes before articles: no article is left to drop
    ("U.S.A.", "usa"),
    ("Zürich\u2019s", "zürich\u2019s"),
    ("", ""),
])
def test_normalise_as_search_r1(text, expected):
    assert normalise_answer(text) == expected


def test_normalise_as_the_other_papers():
    assert R1_SEARCHER("nadia_orlov\u2019s U.S.") == "nadia orlov s u s"
    assert R1_SEARCHER("the-end") == "end"
    assert DEEP_RESEARCHER("The Port-Selby") == "the port selby"
    assert DEEP_RESEARCHER("Port\u2013Selby\u2019s") == "port\u2013selby\u2019s"  # non-ASCII marks stay


def test_arguments_are_keyword_only():
    for score in (exact_match, substring_match, cover_exact_match, f1):
        with pytest.raises(TypeError):
            score("a", "b")


def test_no_gold_is_an_error():
    for score in (exact_match, substring_match, cover_exact_match, f1):
        with pytest.raises(ValueError, match="no gold answer"):
            score(pred="x", gold=[])


def test_gold_may_be_string_list_or_tuple_and_the_best_counts():
    assert exact_match(pred="x", gold="X") == exact_match(pred="x", gold=["y", "X"]) == exact_match(pred="x", gold=("y", "X")) == 1.0
    assert exact_match(pred="h", gold="Harwick") == 0.0  # a string is one gold, not a list of letters
    assert f1(pred="tom", gold=["nadia orlov", "tom brandt"]) == pytest.approx(2 / 3)


def test_match_kinds_differ():
    assert substring_match(pred="about Nadia Orlovsky", gold="Nadia Orlov") == 1.0
    assert cover_exact_match(pred="about Nadia Orlovsky", gold="Nadia Orlov") == 0.0
    assert substring_match(pred="Orlov, N. (Nadia)", gold="Nadia Orlov") == 0.0
    assert cover_exact_match(pred="Orlov, N. (Nadia)", gold="Nadia Orlov") == 1.0


def test_gold_of_only_articles_keeps_the_originals_behaviour():
    assert exact_match(pred="", gold="The") == 1.0
    assert cover_exact_match(pred="", gold="The") == 1.0 and cover_exact_match(pred="Nadia", gold="The") == 0.0
    assert substring_match(pred="anything", gold="A") == 1.0
    assert f1(pred="", gold="The") == 0.0


def test_f1_counts_or_sets():
    assert f1(pred="Berlin Berlin", gold="Berlin") == pytest.approx(2 / 3)
    assert f1(pred="Berlin Berlin", gold="Berlin", as_sets=True) == 1.0
    words = " ".join(f"w{i}" for i in range(29)) + " Orlov"
    assert f1(pred=words, gold="Orlov") == pytest.approx(2 / 31)  # below ReSearch's floor of 0.1, and returned as it is
    assert f1(pred="\\text{Nadia Orlov}", gold="Nadia Orlov") == 0.5


def test_f1_yes_no_rule():
    assert f1(pred="yes, it is", gold="yes") == 0.0 == f1(pred="yes", gold="yes it is")
    assert f1(pred="noanswer", gold="noanswer") == f1(pred="The: yes!", gold="Yes") == 1.0
    assert f1(pred="yes it is", gold="yes", yes_no_rule=False) == 0.5
    assert f1(pred="no", gold=["yes", "no"]) == 1.0


@MANY
@given(TEXT, TEXT)
def test_case_and_punctuation_never_matter_for_exact_match(pred, gold):
    noisy = "".join(c + mark for c, mark in zip(pred.swapcase(), string.punctuation * 2))
    assert exact_match(pred=noisy, gold=gold) == exact_match(pred=pred, gold=gold)
    assert exact_match(pred=pred, gold=gold) == exact_match(pred=gold, gold=pred)


@MANY
@given(TEXT, TEXT, st.booleans())
def test_f1_is_bounded_symmetric_and_1_only_for_equal_words(pred, gold, as_sets):
    switches = {"as_sets": as_sets, "yes_no_rule": not as_sets}  # as the papers pair them: with both, "yes yes" against "yes" is 0
    value = f1(pred=pred, gold=gold, **switches)
    assert 0.0 <= value <= 1.0
    assert value == f1(pred=gold, gold=pred, **switches)
    bags = [(set if as_sets else Counter)(normalise_answer(t).split()) for t in (pred, gold)]
    assert (value == 1.0) == (bags[0] == bags[1] and bool(bags[0]))


@MANY
@given(TEXT, st.lists(TEXT, min_size=1, max_size=4))
def test_several_golds_score_as_the_best_of_them_and_kinds_are_ordered(pred, golds):
    for score in (exact_match, substring_match, cover_exact_match, f1):
        assert score(pred=pred, gold=golds) == max(score(pred=pred, gold=g) for g in golds)
    assert exact_match(pred=pred, gold=golds) <= substring_match(pred=pred, gold=golds)
    assert exact_match(pred=pred, gold=golds) <= cover_exact_match(pred=pred, gold=golds)


@MANY
@given(TEXT)
def test_normalising_twice_changes_nothing_more_when_marks_become_spaces(text):
    for normalise in (R1_SEARCHER, DEEP_RESEARCHER):
        assert normalise(normalise(text)) == normalise(text)


def test_bootstrap_edges():
    assert all(math.isnan(v) for v in bootstrap_interval([]))
    assert bootstrap_interval([0.3]) == (0.3, 0.3)
    assert bootstrap_interval([1.0] * 9) == (1.0, 1.0)
    with pytest.raises(ValueError, match="level"):
        bootstrap_interval([1.0], level=95)
    with pytest.raises(ValueError, match="shape"):
        bootstrap_interval([[1.0, 0.0]])


def test_bootstrap_is_reproducible_and_free_of_order():
    values = [0.0, 1.0, 1.0, 0.25, 0.5] * 8
    assert bootstrap_interval(values, seed=3) == bootstrap_interval(values[::-1], seed=3)
    assert bootstrap_interval(values, seed=3) != bootstrap_interval(values, seed=4)


def test_bootstrap_agrees_with_the_normal_interval_on_many_values():
    values = np.random.default_rng(0).random(400) < 0.7
    low, high = bootstrap_interval(values)
    half = 1.96 * math.sqrt(values.mean() * (1 - values.mean()) / 400)
    assert (low, high) == (pytest.approx(values.mean() - half, abs=0.006), pytest.approx(values.mean() + half, abs=0.006))
    inner = bootstrap_interval(values, level=0.5)
    assert low < inner[0] < inner[1] < high


def test_bootstrap_draws_in_pieces(monkeypatch):
    """1,500 values: 666 resamples a piece. All 10,000 must be drawn, in small arrays."""
    sizes, real = [], np.random.default_rng

    class Watched:
        def __init__(self, seed):
            self.rng = real(seed)

        def integers(self, low, high, size):
            sizes.append(size)
            return self.rng.integers(low, high, size)

    monkeypatch.setattr(scoring.np.random, "default_rng", Watched)
    bootstrap_interval([0.0, 1.0, 1.0] * 500)
    assert sum(rows for rows, _ in sizes) == 10_000 and max(rows * n for rows, n in sizes) <= 1_000_000


def test_self_test_passes_and_a_broken_grader_is_named(monkeypatch):
    self_test()
    monkeypatch.setattr(scoring, "_ARTICLES", scoring.re.compile("(?!)"))  # never matches: articles stay
    with pytest.raises(RuntimeError, match=r"self-test.*exact_match\(pred='the NADIA  Orlov\.'"):
        self_test()


# The text scores inside the published reward functions; their format gates belong to the method files.
VECTORS = Path(__file__).parent / "vectors"


@pytest.mark.skipif(not (VECTORS / "search_r1.json").exists(), reason="no vectors here")
def test_vectors_of_search_r1():
    cases = json.loads((VECTORS / "search_r1.json").read_text())["search_r1"]["cases"]
    for case in cases:
        pairs = scoring.re.findall(r"<answer>(.*?)</answer>", case["prompt"] + case["response"], scoring.re.DOTALL)
        pred, gold = pairs[-1].strip() if len(pairs) > 1 else None, case["ground_truth"]["target"]
        got = [0.0 if pred is None else score(pred=pred, gold=gold) for score in (exact_match, substring_match)]
        assert got == [case["expected_em"], case["expected_subem"]], case["id"]
