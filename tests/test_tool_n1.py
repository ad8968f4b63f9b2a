"""Tool-N1: prompt, the block that is read, the binary reward and its variants, and the supervised arms."""
import json
from dataclasses import replace

import pytest

from common.data import Example
from common.policy import load_model
from common.rollout import Segment, Trajectory, Turn
from common.tiny import protocols
from common.tiny.world import EVAL, request, requests
from methods import tool_n1 as m

CFG = m.Config()
F, G = {"name": "f", "arguments": {"a": 1, "b": {"c": 2, "d": 3}}}, {"name": "g", "arguments": {}}
VARIANTS = ("binary", "no_think", "partial", "partial_names", "lexicographic", "llama")
THINK = "<think> x </think>\n"


def text_of(*calls, think=THINK):
    return f"{think}<tool_call>\n{json.dumps(list(calls))}\n</tool_call>"


def score(text, gold, **changes):
    e = Example("e", "?", (json.dumps(gold),))
    return m.reward(Trajectory(e, 0, 0, "", [], segments=[Segment("model", text, 0, 0)]), e, replace(CFG, **changes))


def totals(text, gold):
    return [score(text, gold, reward=r)["total"] for r in VARIANTS]


def test_the_tiny_model_was_built_on_this_protocol():
    _, tokenizer = load_model("tiny")
    p = protocols.PROTOCOLS["tool_n1"]
    for e in requests("eval", 40):
        r = request(EVAL, int(e.id.split("-")[1]))
        assert m.render(e, tokenizer) == p.prompt(r) and m.STOP == p.stops
        thought = f"I need {' and '.join(name for name, _ in r.calls)}." if r.calls else "No tool fits."
        assert m.write_reply(json.loads(e.answers[0])) + tokenizer.eos_token == p.answer(thought, r.calls)


def test_the_dialogue_stays_a_dialogue_and_a_schema_is_written_whole():
    tools = [{"name": "f", "description": "d", "parameters": {"type": "dict", "required": ["x"], "properties": {"x": {"type": "string"}}}}]
    messages = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "[]"}, {"role": "tool", "content": "1 </tool_call>"}]
    tokenizer = type("T", (), {"chat_template": "x", "apply_chat_template": lambda self, messages, **_: messages})()
    got = m.render(Example("e", "Go.", ("[]",), {"messages": messages, "tools": tools}), tokenizer)
    assert [g["role"] for g in got] == ["system", "user", "assistant", "tool"] and got[3]["content"] == "1 [/tool_call>"
    assert ('<tools>\n{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "dict", "required": ["x"], '
            '"properties": {"x": {"type": "string"}}}}}\n</tools>') in got[0]["content"]


def test_environment_notes_the_calls():
    t = Trajectory(Example("e", "?", ("[]",)), 0, 0, "", [])
    assert m.environment(Turn(text_of(F, G), "eos", 0, True), t).reason == "answer" and [c.name for c in t.calls] == ["f", "g"]
    assert m.environment(Turn("<tool_call>", "length", 0, True), t).reason == "length" and len(t.calls) == 2


def test_binary_reward():
    assert score(text_of(F, G), [F, G])["total"] == score(text_of(G, F), [F, G])["total"] == 1
    assert score(text_of({"arguments": {"b": {"d": 3, "c": 2}, "a": 1}, "name": "f"}), [F])["total"] == 1
    for wrong in ([F, F], [], [F, G], [F | {"name": "F"}], [{"name": "f", "arguments": {"a": 1.0, "b": {"c": 2, "d": 3}}}], [{"name": "f"}], ["f"]):
        assert score(text_of(*wrong), [F])["total"] == 0
    assert score(text_of(F, think=""), [F])["total"] == 0 and score(text_of(), [])["total"] == 1 and score(THINK + "No tool fits.", [])["total"] == 0
    assert score(f"{THINK}<tool_call>{json.dumps(json.dumps([F]))}</tool_call>", [F])["total"] == 1  # JSON in JSON text
    assert score(f"{THINK}<tool_call>{json.dumps(F)}</tool_call>", [F])["total"] == 1  # one object
    assert score(f"{THINK}<tool_call>{json.dumps(F)}\n{json.dumps(G)}</tool_call>", [F, G])["total"] == 0  # ToolRL's form


def test_the_last_block_is_read_and_the_transcript_is_not():
    assert m.last_block("<tool_call>1</tool_call> <tool_call>2</tool_call> <tool_call>3") == "2" and m.last_block("</tool_call><tool_call>") is None
    assert m.last_block("<tool_call>a<tool_call>b</tool_call>c</tool_call>") == "a<tool_call>b"
    assert score(text_of(G) + text_of(F, think=""), [F])["total"] == 1 and score(text_of(F) + text_of(think=""), [F])["total"] == 0
    e = Example("e", "?", (json.dumps([F]),))
    t = Trajectory(e, 0, 0, text_of(F), [], segments=[Segment("tool", text_of(F), 0, 0), Segment("model", "hm", 0, 0)])
    assert m.reward(t, e, CFG)["total"] == 0


def test_variants():  # binary, no_think, partial, partial_names, lexicographic, llama
    assert totals(text_of(F), [F]) == [1, 1, 1, 1, 1.2, 1]
    assert totals(text_of(F, think=""), [F]) == [0, 1, 0.8, 0.8, 1, 0]
    assert totals(text_of(F | {"arguments": {}}), [F]) == [0, 0, 0.2, 0.4, -0.2, 0]
    assert totals(text_of(G), [F]) == totals(text_of({"name": "f"}), [F]) == [0, 0, 0.2, 0.2, -0.2, 0]
    assert totals(text_of(G, think=""), [F]) == [0, 0, 0, 0, 0, 0]
    assert totals(THINK + "hm", [F]) == [0, 0, 0.2, 0.2, 0, 0]
    assert totals("hm", []) == [0, 0, 0, 0, 0, 1] and totals(text_of(), []) == [1, 1, 1, 1, 1.2, 1]


@pytest.mark.parametrize("block", ["7", "true", '"7"', "[" * 100_000, "9" * 5000])
def test_a_reply_on_which_the_original_crashes_earns_nothing(block):
    assert totals(f"{THINK}<tool_call>{block}</tool_call>", [F]) == totals(f"{THINK}<tool_call>{block}</tool_call>", []) == [0] * 6


@pytest.mark.parametrize("text,strict", [
    (text_of(F), 1), ("\n" + text_of(F) + "\n", 1), (text_of(F, think="") + THINK, 0), (text_of(F) + "Done.", 0), ("So: " + text_of(F), 0),
    (text_of(G) + text_of(F, think=""), 0), (THINK + text_of(F), 0)])
def test_strict_asks_for_a_thought_then_one_block(text, strict):
    assert score(text, [F])["total"] == 1 and score(text, [F], strict=True)["total"] == strict == score(text, [F], strict=True)["format"]


def test_metrics_are_apart():
    got = score(text_of(F | {"arguments": {}}), [F])
    assert (got["accuracy"], got["names"], got["format"]) == (0, 1, 1) and "irrelevance" not in got
    assert [score(text, [])["irrelevance"] for text in (text_of(F), text_of(), "hm")] == [0, 1, 1]
    assert [score(text, [])["accuracy"] for text in (text_of(F), text_of(), "hm")] == [0, 1, 0]
    assert score("hm", [], reward="llama")["accuracy"] == 1  # for Llama silence is an empty list


def test_gold_replies_earn_everything():
    for e in requests("train", 50):
        gold = json.loads(e.answers[0])
        assert score(m.gold_reply(e), gold, strict=True)["total"] == 1
        assert totals(m.gold_reply(e, think=False), gold)[:2] == [0, 1]


@pytest.mark.parametrize("no_call", [False, True])
def test_held_out_rows_are_read_like_those_that_are_trained_on(tmp_path, no_call):
    """Also where the training requests are the tiny world's: without --no-call-turns ToolACE's turns that do not call are no requests."""
    path = tmp_path / "toolace.jsonl"
    path.write_text(json.dumps({"system": '[{"name": "f", "parameters": {"type": "dict", "properties": {"x": {"type": "int"}}}}]', "conversations": [
        {"from": "user", "value": "Go."}, {"from": "assistant", "value": "[f(x=1)]"}, {"from": "tool", "value": "1"}, {"from": "assistant", "value": "Done."}]}))
    _, held_out = m.load_data(replace(CFG, eval_data=str(path), no_call_turns=no_call))
    assert [e.answers[0][:2] for e in held_out] == ["[{", "[]"][:1 + no_call]
