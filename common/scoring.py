"""Text scores of an answer against its gold answers: exact match, cover match, word F1, and an interval for their mean.

The papers' scores differ only in details, and the details move the numbers. Here they are switches:

    Search-R1, ReSearch   normalise_answer(text)                                         F1 counts repeated words
    R1-Searcher           normalise_answer(text, punctuation_as=" ", extra_punctuation=CURLY_QUOTES)         "
    DeepResearcher        normalise_answer(text, punctuation_as=" ", drop_articles=False)  F1 on sets, no yes/no rule

Prediction and gold are keyword-only (`pred=`, `gold=`): swapped by position, substring and cover match would still run and be wrong.
`gold` is one string or several; the score is the best one. Every score is a float in [0, 1].

Two edges are the originals' own, kept because they are part of what was trained: accents are not folded, and a gold that is only
articles and punctuation ("A", "The") normalises to nothing, so an empty answer matches it exactly and any answer contains it.
"""

import functools
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

CURLY_QUOTES = "\u2018\u2019\u00b4"  # the non-ASCII marks that R1-Searcher also treats as punctuation
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CLOSED = ("yes", "no", "noanswer")


@functools.cache
def _punctuation_table(replacement: str, extra: str) -> dict[int, str]:
    return {ord(mark): replacement for mark in string.punctuation + extra}


def normalise_answer(text: str, *, punctuation_as: str = "", extra_punctuation: str = "", drop_articles: bool = True) -> str:
    """Lower case, ASCII punctuation replaced, articles dropped, whitespace squeezed. Source: SQuAD's script, as in Search-R1 `qa_em.py`.

    `punctuation_as`: "" joins the parts ("well-known" -> "wellknown"), " " separates them. `extra_punctuation`: further marks."""
    text = text.lower().translate(_punctuation_table(punctuation_as, extra_punctuation))
    if drop_articles:
        text = _ARTICLES.sub(" ", text)
    return " ".join(text.split())


def _best(score: Callable[[str, str], float], pred: str, gold: str | Iterable[str], normalise: Callable[[str], str]) -> float:
    golds = [gold] if isinstance(gold, str) else list(gold)
    if not golds:
        raise ValueError("no gold answer to compare with: every example needs at least one")
    pred = normalise(pred)
    return max(float(score(pred, normalise(one))) for one in golds)


def exact_match(*, pred: str, gold: str | Iterable[str], normalise: Callable[[str], str] = normalise_answer) -> float:
    """1 if the normalised texts are equal, else 0. Source: Search-R1 `qa_em.py`. ValueError without a gold."""
    return _best(lambda p, g: p == g, pred, gold, normalise)


def substring_match(*, pred: str, gold: str | Iterable[str], normalise: Callable[[str], str] = normalise_answer) -> float:
    """1 if the normalised gold occurs anywhere in the prediction, inside a word too. Source: Search-R1 `qa_em.py`, "subem"."""
    return _best(lambda p, g: g in p, pred, gold, normalise)


def cover_exact_match(*, pred: str, gold: str | Iterable[str], normalise: Callable[[str], str] = normalise_answer) -> float:
    """1 if every word of the gold is a word of the prediction, in any order. Source: R1-Searcher `reward_server_llama_stage1.py`.

    Splits on single spaces, so that a gold of no words is covered by an answer of no words only, as in the original."""
    return _best(lambda p, g: set(g.split(" ")) <= set(p.split(" ")), pred, gold, normalise)


def f1(*, pred: str, gold: str | Iterable[str], normalise: Callable[[str], str] = normalise_answer,
       as_sets: bool = False, yes_no_rule: bool = True) -> float:
    """Word F1 = 2 * common / (words of pred + words of gold); 0 when there is no common word. Source: ReSearch `re_search.py`.

    `as_sets`: a repeated word counts once (DeepResearcher). `yes_no_rule`: yes, no and noanswer score 1 when equal and 0 otherwise, so that
    "no, it is not" earns nothing for "no"."""
    def score(p: str, g: str) -> float:
        if yes_no_rule and p != g and (p in _CLOSED or g in _CLOSED):
            return 0.0
        bag = (lambda words: Counter(set(words))) if as_sets else Counter
        p_words, g_words = bag(p.split()), bag(g.split())
        common = (p_words & g_words).total()
        return 2 * common / (p_words.total() + g_words.total()) if common else 0.0
    return _best(score, pred, gold, normalise)


def greedy_pairing(scores: Sequence[Sequence[float]]) -> float:
    """The sum when every row in turn takes the best column that is left: the first of equals, and none for a score of 0. Source: ToolRL `rlla.py`."""
    total, taken = 0.0, set()
    for row in scores:
        best = max((i for i in range(len(row)) if i not in taken), key=lambda i: row[i], default=None)
        if best is not None and row[best] > 0:
            taken.add(best)
            total += row[best]
    return total


def best_pairing(scores: Sequence[Sequence[float]]) -> float:
    """The largest sum when rows are paired with columns, each used at most once; scores are at least 0. Kuhn-Munkres: O(rows^2 * columns)
    for the fewer as rows."""
    if scores and len(scores) > len(scores[0]):
        scores = list(zip(*scores))
    n_columns = len(scores[0]) if scores else 0
    row_price, column_price = [0.0] * (len(scores) + 1), [0.0] * (n_columns + 1)
    owner = [0] * (n_columns + 1)  # of each column, the row paired with it; rows and columns count from 1
    for row in range(1, len(scores) + 1):
        owner[0], column = row, 0
        slack, came_from, done = [math.inf] * (n_columns + 1), [0] * (n_columns + 1), [False] * (n_columns + 1)
        while owner[column]:  # the cheapest way from this row to a free column
            done[column] = True
            step, following = math.inf, 0
            for j in range(1, n_columns + 1):
                if not done[j]:
                    cost = -scores[owner[column] - 1][j - 1] - row_price[owner[column]] - column_price[j]
                    if cost < slack[j]:
                        slack[j], came_from[j] = cost, column
                    if slack[j] < step:
                        step, following = slack[j], j
            for j in range(n_columns + 1):
                if done[j]:
                    row_price[owner[j]] += step
                    column_price[j] -= step
                else:
                    slack[j] -= step
            column = following
        while column:
            owner[column], column = owner[came_from[column]], came_from[column]
    return sum(scores[owner[j] - 1][j - 1] for j in range(1, n_columns + 1) if owner[j])


def bootstrap_interval(values: Sequence[float], seed: int = 0, resamples: int = 10_000, level: float = 0.95) -> tuple[float, float]:
    """(low, high) of the mean of `values` (n,) by the percentile bootstrap; (nan, nan) when there is no value.

    It speaks about sampling of questions, not of training seeds, and has no width where all values are equal: show n beside it."""
    if resamples < 1 or not 0 < level < 1:
        raise ValueError(f"resamples must be at least 1 and level between 0 and 1, got {resamples} and {level}")
    values_n = np.sort(np.asarray(values, dtype=np.float64))  # sorted: the order in which answers were scored does not matter
    if values_n.ndim != 1:
        raise ValueError(f"values must be one row of numbers, got shape {values_n.shape}")
    if len(values_n) == 0:
        return float("nan"), float("nan")
    rng = np.random.default_rng(seed)
    rows = max(1, 1_000_000 // len(values_n))  # at most about a million draws (8 MB) at a time
    means = np.concatenate([values_n[rng.integers(0, len(values_n), (min(rows, resamples - done), len(values_n)))].mean(axis=1)
                            for done in range(0, resamples, rows)])
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def self_test() -> None:
    """Score known pairs; RuntimeError naming those that differ. Methods call it at start-up (under a millisecond): a grader that
    silently returns 0 looks exactly like a policy that does not learn."""
    r1_searcher = functools.partial(normalise_answer, punctuation_as=" ", extra_punctuation=CURLY_QUOTES)
    deep_researcher = functools.partial(normalise_answer, punctuation_as=" ", drop_articles=False)
    by_sets = functools.partial(f1, normalise=deep_researcher, as_sets=True, yes_no_rule=False)
    known = [
        (exact_match, "Nadia Orlov", "Nadia Orlov", 1.0),
        (exact_match, "the NADIA  Orlov.", "nadia orlov", 1.0),
        (exact_match, "Orlov", ["Nadia Orlov", "Orlov"], 1.0),
        (exact_match, "Tom Brandt", ["Nadia Orlov", "Orlov"], 0.0),
        (exact_match, "", "Nadia Orlov", 0.0),
        (exact_match, "portselby", "Port-Selby", 1.0),
        (exact_match, "port selby", "Port-Selby", 0.0),
        (exact_match, "another", "other", 0.0),
        (substring_match, "it was Nadia Orlovsky", "Nadia Orlov", 1.0),
        (substring_match, "Orlov, Nadia", "Nadia Orlov", 0.0),
        (cover_exact_match, "Orlov, Nadia", "Nadia Orlov", 1.0),
        (cover_exact_match, "Nadia Orlovsky", "Nadia Orlov", 0.0),
        (functools.partial(cover_exact_match, normalise=r1_searcher), "nadia_orlov\u2019s", "Nadia Orlov", 1.0),
        (f1, "Nadia Petrovna Orlov", "Nadia Orlov", 0.8),
        (f1, "Tom Brandt", "Nadia Orlov", 0.0),
        (f1, "", "Nadia Orlov", 0.0),
        (f1, "yes, it is", "yes", 0.0),
        (f1, "Yes.", "yes", 1.0),
        (f1, "Berlin Berlin", "Berlin", 2 / 3),
        (f1, "Tom", ["Nadia Orlov", "Tom Brandt"], 2 / 3),
        (by_sets, "Berlin Berlin", "Berlin", 1.0),
        (by_sets, "the Port-Selby", "Port Selby", 0.8),
        (by_sets, "yes it is", "yes", 0.5),
    ]
    wrong = [f"{getattr(score, 'func', score).__name__}(pred={pred!r}, gold={gold!r}) gave {got}, expected {want}"
             for score, pred, gold, want in known if abs((got := score(pred=pred, gold=gold)) - want) > 1e-12]
    if wrong:
        raise RuntimeError(f"the grader fails its self-test in {len(wrong)} of {len(known)} pairs: " + "; ".join(wrong))
