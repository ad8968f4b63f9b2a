"""ToolRL: prompt, history, the graded reward with every switch, and that no reply can break or beat it."""
import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common import UserError, scoring
from common.data import Example
from common.policy import load_model
from common.rollout import Budget, Segment, ToolPool, Trajectory, make_prompts, rollout
from common.run import eval_metrics
from common.tiny import protocols
from common.tiny.world import EVAL, request, requests
from methods import tool_n1
from methods import toolrl as m
from tests.helpers import ScriptedEngine

CFG = m.Config()
MANY = settings(max_examples=300, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
GRANULARITY = ("original", "finegrained", "intermediate", "coarse")
F, G = {"name": "f", "parameters": {"a": 1, "b": 2}}, {"name": "g", "parameters": {"c": "x"}}
ANSWER, CHAT = "<think> p </think>\n<response> hello </response>", "<think> x </think>\n<response> Hi. </response>"


def text_of(*calls, think="<think> x </think>\n"):
    return think + "<tool_call>\n" + "\n".join(json.dumps(c) for c in calls) + "\n</tool_call>"


def score(text, gold, step=1, **changes):
    e = Example("e", "?", (gold if isinstance(gold, str) else text_of(*gold),))
    return m.reward(Trajectory(e, 0, 0, "", [], segments=[Segment("model", text, 0, 0)]), e, replace(CFG, **changes), step)


def total(text, gold, step=1, **changes):
    return score(text, gold, step, **changes)["total"]


# --- prompt ---

def test_the_tiny_model_was_built_on_this_protocol():
    _, tokenizer = load_model("tiny")
    p = protocols.PROTOCOLS["toolrl"]
    for e in requests("eval", 40):
        r = request(EVAL, int(e.id.split("-")[1]))
        assert m.render(e, tokenizer) == p.prompt(r) and m.STOP == p.stops
        thought = f"I need {' and '.join(name for name, _ in r.calls)}." if r.calls else "No tool fits."
        assert m.write_reply(json.loads(e.answers[0])) + tokenizer.eos_token == p.answer(thought, r.calls)


def test_history_is_one_text():
    calls = [{"name": "f", "arguments": {"a": 1}}]
    assert m.history([{"role": "user", "content": "Go."}, {"role": "assistant", "content": json.dumps(calls)},
                      {"role": "tool", "content": "[1] </obs>"}, {"role": "assistant", "content": "Done."}, {"role": "user", "content": "Again?"}]) == (
        "**Dialogue Record History**\n<user> Go. </user>\n\n<think> I need f. </think>\n<tool_call>\n{\"name\": \"f\", \"parameters\": {\"a\": 1}}\n"
        "</tool_call>\n<obs> [1] [/obs> </obs>\n\n<think> No tool fits. </think>\n<response> Done. </response>\n\n<user> Again? </user>")


def test_tools_are_numbered_and_say_all_their_schema_says():
    tools = [{"name": "f", "description": "d", "parameters": {"type": "object", "required": ["x"], "properties": {"x": {"type": "string", "enum": ["a"]}}}},
             {"name": "g", "description": "", "parameters": {"type": "object", "properties": {}}}]
    assert m.list_tools(tools) == ('1. Name: f\nDescription: d\nParameters: {"x": {"description": "", "type": "string", "default": "", "enum": ["a"]}}\n'
                                   "2. Name: g\nDescription: \nParameters: {}")


def test_held_out_rows_are_read_like_those_that_are_trained_on(tmp_path):
    """Also where the training requests are the tiny world's: else the evaluation stops on what it cannot read."""
    path = tmp_path / "held_out.jsonl"
    path.write_text(json.dumps({"prompt": [{"role": "user", "content": "Hi"}], "reward_model": {"ground_truth": "<tool_call>\nnot json\n</tool_call>"}}))
    for data in ("tiny", str(path)):
        with pytest.raises(UserError, match="1 of 1 rows .*its ground truth cannot be read"):
            m.load_data(replace(CFG, data=data, eval_data=str(path)))


# --- environment ---

def test_one_turn_is_the_reply_and_its_calls_are_noted():
    _, tokenizer = load_model("tiny")
    said = {0: text_of(F, G), 1: CHAT, 2: "<think> x </think>\n<tool_call>\n{\n</tool_call>", 3: text_of(*[F] * 9)}
    examples, budget = requests("eval", 4), Budget(400, 90, 0, 90, turns=0)
    prompts, _ = make_prompts(examples, lambda e: m.render(e, tokenizer), tokenizer, budget)
    number = {tuple(p.ids): i for i, p in enumerate(prompts)}
    engine = ScriptedEngine(tokenizer, lambda ids, seed: said[number[tuple(ids)]])
    rows = rollout(engine, tokenizer, prompts, m.environment, {}, budget, ToolPool(workers=0), stop=m.STOP)
    assert [[c.name for c in t.calls] for t in rows[:3]] == [["f", "g"], [], []]
    assert rows[0].calls[0].argument == '{"a": 1, "b": 2}' and rows[0].calls[0].outcome == "not_run"
    assert [t.stop for t in rows] == ["answer", "answer", "answer", "length"] and {t.turns for t in rows} == {1}


# --- reward ---

def test_graded_reward():
    assert total(text_of(F), [F]) == 4
    assert total(text_of({"name": "f", "parameters": {"a": 1, "b": 9}}), [F]) == 2.5  # a wrong value
    assert total(text_of({"name": "f", "parameters": {"a": 1}}), [F]) == 1.75  # a missing parameter
    assert total(text_of(F | {"name": "h"}), [F]) == -2  # a wrong tool
    assert total(text_of(F, G), [F]) == 3.25 and total(text_of(F), [F, G]) == pytest.approx(1 + 6 * 3.5 / 6 - 3)
    assert total(text_of(F, think=""), [F]) == 3 and total(text_of(F) + "\nDone.", [F]) == 3  # format and correctness are apart
    assert total(text_of(G, F), [F, G]) == 4 and total("\n" + text_of(F) + " ", [F]) == 4
    assert total("<think> I write <tool_call> </think>\n" + text_of(F, think=""), [F]) == -3  # the first block is read
    assert total(text_of(F) + "\n" + text_of(G, think=""), [F]) == 3


def test_where_no_call_is_right_only_the_form_pays():
    assert total(CHAT, ANSWER) == 1 and total(text_of(F), ANSWER) == 0 and total(CHAT, [F]) == -3
    assert total(text_of(F), "[]") == 0 and total(CHAT, "[]") == 1  # a JSON list as gold: the same
    assert total(text_of(F) + "\n<response> Soon. </response>", text_of(F) + "\n<response> r </response>") == 4
    assert total(text_of(F), text_of(F) + "\n<response> r </response>") == 3 and total("<think> x </think>", "<think> p </think>") == 1


def test_granularity():
    wrong = {"name": "f", "parameters": {"a": 1, "b": 9}}
    assert [score(text_of(wrong), [F], granularity=g)["correctness"] for g in GRANULARITY] == [1.5, 1.5, 0, -3]
    assert [score(text_of(G, F), [F, G], granularity=g)["correctness"] for g in GRANULARITY] == [3, 2, 3, -3]  # order of calls
    extra = {"name": "f", "parameters": {**F["parameters"], "z": 0}}
    assert [score(text_of(extra), [F], granularity=g)["correctness"] for g in GRANULARITY] == pytest.approx([2.5, 1.5, 0, -3])
    again = {"name": "f", "parameters": {"b": 9, "a": 1}}  # finegrained compares lists of keys
    assert score(text_of(again), [F], granularity="finegrained")["correctness"] == 0
    assert score(text_of(F | {"id": 7}), [F], granularity="intermediate")["correctness"] == 0 and score(text_of(F | {"id": 7}), [F])["correctness"] == 3


def test_greedy_and_optimal_matching_differ_where_a_tool_is_called_twice():
    gold = [{"name": "f", "parameters": {"a": 1, "b": 2}}, {"name": "f", "parameters": {"a": 1, "b": 2, "c": 3}}]
    said = text_of({"name": "f", "parameters": {"a": 1, "b": 2, "c": 3}}, {"name": "f", "parameters": {"a": 1, "b": 9}})
    assert score(said, gold)["correctness"] == pytest.approx(1.0) and score(said, gold, matching="optimal")["correctness"] == pytest.approx(2.25)


@pytest.mark.parametrize("schedule,step,steps,low,high,least,most", [
    ("code", 75, 40, -1, 1.5, -2.5, 2.5), ("code", 105, 40, -1, 1.3, -2.7, 2.7), ("code", 300, 40, -1, 1, -3, 3),
    ("paper", 20, 40, -1.5, 1.5, -2.5, 2.5), ("paper", 40, 40, -1, 1, -3, 3)])
def test_dynamic_scale(schedule, step, steps, low, high, least, most):
    changes = dict(scale="dynamic", schedule=schedule, steps=steps)
    assert total(text_of(F), [F], step, **changes) == pytest.approx(high + most)
    assert total("{", [F], step, **changes) == pytest.approx(low + least) and total("{", ANSWER, step, **changes) == pytest.approx(low)


def test_other_scales():
    assert total(text_of(F), [F], scale="equal") == 2 and total("{", [F], scale="equal") == -1
    assert [total(text_of(F), [F], step, scale="two_stage") for step in (29, 30)] == [2, 3.5]


@pytest.mark.parametrize("changes,words,expected", [
    ({}, 200, None), ({"length": "fixed"}, 200, 0.39), ({"length": "fixed"}, 2000, 1.0), ({"length": "dynamic", "schedule": "code"}, 200, 0.39),
    ({"length": "dynamic", "steps": 104}, 200, 0.26)])
def test_length(changes, words, expected):
    got = score(text_of(F, think=f"<think> {'so ' * words}</think>\n"), [F], step=52, length_target=512, **changes)
    assert got.get("length") == expected and got["total"] == pytest.approx(4 + (expected or 0))
    assert score(text_of(F, think="so"), [F], length="fixed")["length"] == 0


def test_binary_reward_is_tool_n1s():
    for calls, think in itertools.product(([F], [G, F], [F, F], [F | {"parameters": {"a": 1.0, "b": 2}}], [7]), ("<think> x </think>\n", "")):
        e = Example("e", "?", (json.dumps([{"name": c["name"], "arguments": c["parameters"]} for c in (F, G)]),))
        other = think + "<tool_call>" + json.dumps([{"name": c["name"], "arguments": c["parameters"]} if c != 7 else 7 for c in calls]) + "</tool_call>"
        theirs = tool_n1.reward(Trajectory(e, 0, 0, "", [], segments=[Segment("model", other, 0, 0)]), e, tool_n1.Config())
        ours = score(text_of(*calls, think=think), e.answers[0], reward="binary")
        assert (ours["total"], ours["accuracy"], ours["names"]) == (theirs["total"], theirs["accuracy"], theirs["names"])
    assert total(CHAT, "[]", reward="binary") == 1 and total("No.", "[]", reward="binary") == 0


def test_metrics_are_apart():
    got = score(text_of(F | {"parameters": {"a": 1, "b": 9}}, think=""), [F])
    assert (got["accuracy"], got["names"], got["format"]) == (0, 1, 0) and "irrelevance" not in got
    parts = [score(text_of(F), "[]"), score(CHAT, "[]"), score("hm", "[]"), score(text_of(F), [F])]
    assert [p.get("irrelevance") for p in parts] == [0, 1, 1, None] and [p["accuracy"] for p in parts] == [0, 1, 0, 1]
    rows = [Trajectory(Example("e", "?", ("",), {"kind": "none"}), 0, 0, "", [], turns=1, stop="answer") for _ in parts]
    assert eval_metrics("accuracy", rows, parts)["irrelevance"] == pytest.approx(2 / 3)


def test_gold_replies_earn_everything():
    for e in requests("train", 50):
        assert total(m.gold_reply(e), e.answers[0]) == (4 if e.meta["kind"] != "none" else 1)
    assert m.gold_reply(Example("e", "?", (ANSWER + "\n",))) == ANSWER


# --- nothing breaks or beats it ---

VALUES = st.recursive(st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.sampled_from(["x", "y", "\ud800", ""]),
                      lambda x: st.lists(x, max_size=2) | st.dictionaries(st.sampled_from("ab"), x, max_size=2), max_leaves=4)
CALLS = st.fixed_dictionaries({"name": st.sampled_from("fg"), "parameters": st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3)})
GOLD = st.lists(CALLS, min_size=1, max_size=3)


@st.composite
def near(draw, gold):
    """Calls that are the gold ones, or nearly: shuffled, one changed, one left out, one more."""
    calls = draw(st.permutations(gold))
    change = draw(st.sampled_from(["none", "none", "one", "drop", "more"]))
    at = draw(st.integers(0, len(calls) - 1))
    if change == "drop":
        return calls[:at] + calls[at + 1:]
    return calls[:at] + ([draw(CALLS)] if change != "none" else []) + calls[at + (change == "one"):]


def full_match(gold, calls, granularity):
    """By trying every pairing: whether the calls are the gold ones under the rules of a granularity."""
    if gold == calls:
        return True
    if granularity == "coarse" or len(gold) != len(calls):
        return False
    if granularity == "finegrained" and [c["name"] for c in gold] != [c["name"] for c in calls]:
        return False

    def equal(g, c):
        if g["name"] != c["name"] or granularity == "intermediate":
            return g == c
        keys = list if granularity == "finegrained" else set
        return keys(g["parameters"]) == keys(c["parameters"]) and all(c["parameters"][k] == v for k, v in g["parameters"].items())
    return any(all(map(equal, gold, order)) for order in itertools.permutations(calls))


@MANY
@given(GOLD.flatmap(lambda gold: st.tuples(st.just(gold), near(gold))), st.sampled_from(GRANULARITY), st.sampled_from(["greedy", "optimal"]))
def test_the_maximum_is_reached_by_a_full_match_and_by_nothing_else(both, granularity, matching):
    gold, calls = (json.loads(json.dumps(x)) for x in both)
    got = score(text_of(*calls) if calls else "", gold, granularity=granularity, matching=matching)
    assert -3 <= got["correctness"] <= 3 and -3 <= got["total"] <= 4
    assert (got["correctness"] == 3) == full_match(gold, calls, granularity)


@MANY
@given(GOLD, st.lists(CALLS, min_size=1, max_size=4))
def test_optimal_matching_is_the_best_of_all(gold, calls):
    gold, calls = json.loads(json.dumps([gold, calls]))
    greedy, optimal = (score(text_of(*calls), gold, matching=how)["correctness"] for how in ("greedy", "optimal"))
    assert optimal >= greedy - 1e-9


@MANY
@given(st.lists(st.lists(st.floats(0, 9, width=16), min_size=3, max_size=3), max_size=4))
def test_best_pairing(scores):
    columns = list(range(3)) + [None] * len(scores)
    best = max(sum(row[c] for row, c in zip(scores, order) if c is not None) for order in itertools.permutations(columns, len(scores)))
    assert scoring.best_pairing(scores) == pytest.approx(best)


NASTY = {
    "nested": '{"name": "f", "parameters": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested object": '{"parameters": ' * 50_000 + "1" + "}" * 50_000,
    "as deep as JSON goes": '{"name": "f", "parameters": {"a": ' + "[" * 900 + "]" * 900 + ', "b": 2}}', "many digits": '{"name": "f", "parameters": {"a": ' + "9" * 5000 + "}}",
    "huge float": '{"name": "f", "parameters": {"a": 1e99999, "b": -1e99999}}', "NaN": '{"name": "f", "parameters": {"a": NaN, "b": 2}}',
    "two keys": '{"name": "g", "name": "f", "parameters": {"a": 0, "a": 1, "b": 2}}', "surrogate": '{"name": "f\\ud800", "parameters": {"\\udfff": 1}}',
    "null": "null", "number": "7", "text": '"f"', "list": '[{"name": "f", "parameters": {}}]', "name is a list": '{"name": ["f"], "parameters": {}}',
    "no parameters": '{"name": "f", "parameters": null}', "parameters are text": '{"name": "f", "parameters": "a"}', "nothing": "", "open": '{"name": "f"',
}


@pytest.mark.parametrize("method", [m, tool_n1], ids=["toolrl", "tool_n1"])
@pytest.mark.parametrize("line", NASTY.values(), ids=NASTY)
def test_no_json_breaks_it(method, line):
    think = "<think> x </think>\n<tool_call>\n"
    for block in (line, f"[{line}]", f"{json.dumps(F)}\n{line or '-'}"):
        text = f"{think}{block}\n</tool_call>"
        t = Trajectory(Example("e", "?", ('[{"name": "f", "arguments": {"a": 1, "b": 2}}]',)), 0, 0, "", [], segments=[Segment("model", text, 0, 0)])
        method.environment(type("Turn", (), {"text": text, "reason": "eos"}), t)
        if method is m:
            for granularity, matching in itertools.product(GRANULARITY, ("greedy", "optimal")):
                got = m.reward(t, t.example, replace(CFG, granularity=granularity, matching=matching), 1)
                assert -2 <= got["total"] <= 4 and (got["correctness"] < 3 or line == NASTY["two keys"])
        else:
            assert all(-0.2 <= method.reward(t, t.example, tool_n1.Config(reward=r))["total"] <= 0.4 for r in (
                "binary", "no_think", "partial", "partial_names", "lexicographic", "llama"))


@pytest.mark.parametrize("text", [
    text_of({"name": "f", "parameters": {"a": "x" * 10_000_000}}), "<think> x </think>\n<tool_call>\n" + (json.dumps({"name": "f", "parameters": {"a": "x" * 360}}) + "\n") * 25_000 + "</tool_call>",
    "</think>\n<tool_call>\n" * 450_000, "<think>" * 1_400_000, "<tool_call>" * 900_000, "</tool_call>" * 800_000], ids=["value", "calls", "shape", "think", "open", "closed"])
def test_ten_megabytes_take_seconds_at_most(text):
    assert len(text) > 9_000_000
    for gold in ([F, {"name": "f", "parameters": {"c": 3}}], ANSWER, text_of(F) + "\n<response> r </response>"):
        assert total(text, gold, matching="optimal", length="fixed") <= 2
    e = Example("e", "?", ("[]",))
    assert tool_n1.reward(Trajectory(e, 0, 0, "", [], segments=[Segment("model", text, 0, 0)]), e, tool_n1.Config(strict=True))["total"] == 0


@MANY
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), lambda x: st.lists(x, max_size=3)
                    | st.dictionaries(st.sampled_from(["name", "parameters", "arguments", "a", ""]), x, max_size=3), max_leaves=8), GOLD, st.sampled_from(GRANULARITY))
def test_any_json_stays_within_the_range(value, gold, granularity):
    got = score(f"<think> x </think>\n<tool_call>\n{json.dumps(value)}\n</tool_call>", gold, granularity=granularity)
    assert -3 <= got["correctness"] <= 3 and got["total"] == 1 + got["correctness"]
