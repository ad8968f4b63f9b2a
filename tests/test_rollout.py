import math
import random
import time

import pytest
import torch
from hypothesis import given, settings, strategies as st

from common import UserError
from common.engine import HFEngine
from common.rollout import (AccountingError, Budget, Call, End, InfrastructureFailure, Notice, Tool, ToolFailure, ToolPool, check_accounting, collate,
                            fit, make_prompts, rollout)
from tests.helpers import ScriptedEngine, byte_tokenizer, prompt, tiny_random_model

TOKENIZER = byte_tokenizer()
BUDGET = Budget(prompt_tokens=64, turn_tokens=30, observation_tokens=40, trajectory_tokens=200, turns=3)
WRAP = lambda text: f"<r>{text}</r>"


def ask_then_answer(turn, trajectory):
    if "!" in turn.text:
        return End("answer")
    if turn.reason == "stop":
        return Call("tool", turn.text, WRAP)
    return Notice("(no)")


def run(say, act=ask_then_answer, tool=None, budget=BUDGET, n=1, samples=1, pool=None, at_once=False, **options):
    engine = ScriptedEngine(TOKENIZER, say, at_once)
    tools = {"tool": tool or Tool(lambda calls: [f"r:{c.argument}" for c in calls])}
    pool = pool or ToolPool(workers=2)
    prompts = [prompt(TOKENIZER, f"question {i}", i) for i in range(n)]
    trajectories = rollout(engine, TOKENIZER, prompts, act, tools, budget, pool, samples=samples, stop=("?",), **options)
    pool.close()
    return trajectories, engine


def scripted(*turns):
    """Says the turns in order, by how many results stand in the context."""
    return lambda ids, seed: turns[min(TOKENIZER.decode(ids).count("</r>") + TOKENIZER.decode(ids).count("(no)"), len(turns) - 1)]


def test_turns_results_and_answer_are_appended_in_order_with_their_authors():
    (t,), _ = run(scripted("one?", "two?", "done!"))
    assert [(s.author, s.text) for s in t.segments] == [
        ("model", "one?"), ("tool", "<r>r:one?</r>"), ("model", "two?"), ("tool", "<r>r:two?</r>"), ("model", "done!")]
    assert t.stop == "answer" and t.turns == 3 and t.model_text == "one?two?done!"
    assert TOKENIZER.decode(t.ids[:-1]) == t.response and t.ids[-1] == TOKENIZER.eos_token_id
    for s in t.segments:
        assert set(t.mask[s.start:s.end]) == {int(s.author == "model")}
        assert all(math.isnan(x) == (s.author != "model") for x in t.logprobs[s.start:s.end])
    assert t.mask[-1] == 1  # the end token the model sampled is trained


def test_every_turn_continues_the_tokens_that_stand():
    """Token in, token out, also where the text does not show it: an end token that was sampled before a notice stays in the history."""
    (t,), engine = run(scripted("hm", "one?", "done!"))
    assert [s.author for s in t.segments] == ["model", "notice", "model", "tool", "model"]
    starts = [s.start for s in t.segments if s.author == "model"]
    assert [ids for ids, _ in engine.submitted] == [t.prompt_ids + t.ids[:start] for start in starts]


def test_trajectories_come_back_by_question_and_then_by_sample():
    trajectories, _ = run(scripted("done!"), n=3, samples=2)  # advantages are computed over neighbours
    assert [(t.example.id, t.group, t.sample) for t in trajectories] == [(f"e{g}", g, s) for g in range(3) for s in range(2)]


def test_budget_of_turns_then_one_last_turn_whose_call_is_not_run():
    (t,), _ = run(scripted("a?"))
    assert t.stop == "turns" and t.turns == 4 and len(t.calls) == 3
    assert t.segments[-1].author == "model" and t.segments[-1].text == "a?"
    (t,), _ = run(scripted("a?"), budget=Budget(64, 30, 40, 200, 3, final_turn=False))
    assert t.stop == "turns" and t.turns == 3 and len(t.calls) == 3


def test_a_turn_cut_at_its_limit_runs_no_tool():
    seen = []
    def act(turn, trajectory):
        seen.append(turn.reason)
        return Call("tool", "x", WRAP) if turn.reason == "stop" else End("length")
    (t,), _ = run(lambda ids, seed: "x" * 50 + "?", act)
    assert seen == ["length"] and t.calls == [] and len(t.ids) == BUDGET.turn_tokens and t.stop == "length"
    with pytest.raises(AssertionError, match="cut at its token limit"):
        run(lambda ids, seed: "x" * 50 + "?", lambda turn, t: Call("tool", "x", WRAP))


@pytest.mark.parametrize("change,appended,sampled_again", [(-1, False, False), (0, True, False), (1, True, True)])
def test_an_observation_that_exactly_fits_is_kept(change, appended, sampled_again):
    observation = WRAP("r:a?")
    budget = Budget(64, 30, 40, len("a?") + len(observation) + change, 3)
    (t,), _ = run(scripted("a?", "b"), budget=budget)
    assert (observation in t.response) is appended
    assert (t.segments[-1].author == "model" and t.turns == 2) is sampled_again
    assert len(t.ids) <= budget.trajectory_tokens
    if not sampled_again:
        assert t.stop == "tokens"


@pytest.mark.parametrize("limit", [19, 20, 21, 40])
def test_a_cut_observation_keeps_its_closing_tag_and_shows_the_cut(limit):
    text = "abcdefghijklm"
    whole = WRAP(text)  # 20 tokens
    ids, shown = fit(TOKENIZER, text, WRAP, limit)
    assert len(ids) <= limit and shown.startswith("<r>") and shown.endswith("</r>") and TOKENIZER.decode(ids) == shown
    assert (shown == whole) is (limit >= 20) and ("[cut]" in shown) is (limit < 20)


def test_an_observation_limit_without_room_for_the_tags_is_refused():
    with pytest.raises(UserError, match="no room for its own tags"):
        fit(TOKENIZER, "abc" * 20, WRAP, 5)


def test_prompts_are_never_cut_but_skipped_and_counted():
    examples = [prompt(TOKENIZER, "q" * n, n).example for n in (63, 64, 65)]
    kept, skipped = make_prompts(examples, lambda e: e.question, TOKENIZER, BUDGET)
    assert [len(p.ids) for p in kept] == [63, 64] and skipped == 1


@pytest.mark.parametrize("result,outcome,shown", [("", "empty", "<r></r>"), (None, "empty", "<r></r>"), ("</r><a>fake", "ok", "<r></r><a>fake</r>")])
def test_a_tool_that_returns_nothing_or_tags(result, outcome, shown):
    (t,), _ = run(scripted("a?", "done!"), tool=Tool(lambda calls: [result] * len(calls)))
    assert t.calls[0].outcome == outcome and t.segments[1].text == shown
    assert t.mask[t.segments[1].start:t.segments[1].end] == [0] * len(shown)  # whatever it says, it is not the model's


def test_a_tool_failure_is_an_observation():
    def fail(calls):
        raise ToolFailure("NameError: x")
    (t,), _ = run(scripted("a?", "done!"), tool=Tool(fail))
    assert t.calls[0].outcome == "error" and t.segments[1].text == "<r>NameError: x</r>" and t.stop == "answer"


def test_a_broken_tool_stops_the_run_and_is_no_observation():
    def broken(calls):
        raise ConnectionError("no route")
    with pytest.raises(InfrastructureFailure, match="'tool' failed 3 times: ConnectionError: no route"):
        run(scripted("a?", "done!"), tool=Tool(broken))
    def short(calls):
        return []
    with pytest.raises(InfrastructureFailure, match="gave 0 results for 1"):
        run(scripted("a?", "done!"), tool=Tool(short))


def test_a_rare_infrastructure_failure_is_mended_by_trying_again_and_counted():
    state = {"left": 2}
    def flaky(calls):
        if state["left"]:
            state["left"] -= 1
            raise ConnectionError("blip")
        return ["fine"]
    pool = ToolPool(workers=1)
    (t,), _ = run(scripted("a?", "done!"), tool=Tool(flaky), pool=pool)
    assert t.segments[1].text == "<r>fine</r>" and pool.infrastructure_failures == 2


def test_more_than_one_percent_of_infrastructure_failures_stops_the_run():
    state = {"n": 0}
    def flaky(calls):
        state["n"] += 1
        if state["n"] % 2:
            raise ConnectionError("every other time")
        return ["fine"]
    with pytest.raises(InfrastructureFailure, match="more than 1 %"):
        run(scripted("a?", "b?", "c?", "done!"), tool=Tool(flaky), n=4, pool=ToolPool(workers=1))


def test_a_tool_that_hangs_is_abandoned_and_the_others_go_on():
    def slow(calls):
        if calls[0].example.id == "e0":
            time.sleep(3)
        return ["fine"]
    started = time.monotonic()
    trajectories, _ = run(scripted("a?", "done!"), tool=Tool(slow, deadline_s=0.2), n=3, pool=ToolPool(workers=1))
    assert time.monotonic() - started < 2.5
    assert trajectories[0].calls[0].outcome == "timeout" and "[no result within 0.2 s]" in trajectories[0].response
    assert [t.segments[1].text for t in trajectories[1:]] == ["<r>fine</r>"] * 2 and all(t.stop == "answer" for t in trajectories)


def test_a_tool_that_hangs_with_several_calls_stops_the_run():
    """Nobody knows whose fault it is, so it becomes nobody's result."""
    def slow(calls):
        time.sleep(3)
        return ["fine"] * len(calls)
    with pytest.raises(InfrastructureFailure, match="2 calls of tool 'tool' had no result within 0.2 s"):
        run(scripted("a?", "done!"), tool=Tool(slow, batch=2, deadline_s=0.2), n=2, pool=ToolPool(workers=1), at_once=True)


def test_waiting_for_a_worker_is_not_a_timeout():
    tool = Tool(lambda calls: time.sleep(0.15) or ["fine"], deadline_s=0.4)
    trajectories, _ = run(scripted("a?", "done!"), tool=tool, n=5, pool=ToolPool(workers=1), at_once=True)
    assert [t.calls[0].outcome for t in trajectories] == ["ok"] * 5
    assert max(t.calls[0].wait_s for t in trajectories) > 0.4 > max(t.calls[0].run_s for t in trajectories)


def test_calls_of_one_step_are_batched_and_know_their_example():
    sizes = []
    def tool(calls):
        sizes.append(len(calls))
        return [c.example.id for c in calls]
    trajectories, _ = run(scripted("a?", "done!"), tool=Tool(tool, batch=3), n=5, at_once=True)
    assert sorted(sizes) == [2, 3] and [t.segments[1].text for t in trajectories] == [f"<r>e{i}</r>" for i in range(5)]


def test_accounting_refuses_a_mask_that_is_off_by_one():
    (t,), engine = run(scripted("a?", "done!"))
    total = engine.counters["sampled_tokens"]
    check_accounting([t], total, TOKENIZER)
    with pytest.raises(AccountingError, match="the engine sampled"):
        check_accounting([t], total + 1, TOKENIZER)
    t.mask[t.segments[1].start] = 1
    with pytest.raises(AccountingError, match="trajectory e0#0"):
        check_accounting([t], total, TOKENIZER)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(5, 60), st.integers(14, 50), st.integers(10, 150), st.integers(0, 4), st.booleans(), st.integers(0, 3))
def test_accounting_holds_in_random_environments(seed, turn_tokens, observation_tokens, trajectory_tokens, turns, final_turn, lag):
    rng = random.Random(seed)
    words = ["a?", "bc?", "done!", "", "xyz" * 10, "d?e?", "é?", "<r>?"]
    def act(turn, trajectory):
        choice = rng.random()
        if choice < 0.2:
            return End("answer")
        if choice < 0.6 and turn.reason == "stop":
            return Call("tool", turn.text, WRAP)
        return Notice(rng.choice(["(no)", "", "try again"]))
    budget = Budget(64, turn_tokens, observation_tokens, trajectory_tokens, turns, final_turn)
    tool = Tool(lambda calls: [rng.choice(["", None, "r" * 80, "</r>", "ü"]) for _ in calls], batch=2)
    trajectories, engine = run(lambda ids, s: random.Random(s).choice(words), act, tool, budget, n=2, samples=2, tool_lag=lag)
    for t in trajectories:  # rollout itself has checked the masks against the engine's count
        assert len(t.ids) <= trajectory_tokens and t.turns <= turns + final_turn and t.stop
        assert all(s.end - s.start <= observation_tokens for s in t.segments if s.author == "tool")
        assert sum(s.author == "model" for s in t.segments) == t.turns
        assert sum(s.author == "tool" for s in t.segments) <= len(t.calls) <= turns
    assert not engine.kept and not engine.waiting  # no slot is left behind
    starts = {tuple(ids) for ids, o in engine.submitted if o["resume"] is None}
    assert all(any(tuple(ids[:len(s)]) == s for s in starts) for ids, _ in engine.submitted)


def test_seeds_tell_step_group_sample_and_turn_apart():
    _, engine = run(scripted("a?", "b?", "done!"), n=2, samples=3)
    seeds = [o["seed"] for _, o in engine.submitted]
    assert len(set(seeds)) == len(seeds) == 18
    _, again = run(scripted("a?", "b?", "done!"), n=2, samples=3)
    assert sorted(seeds) == sorted(o["seed"] for _, o in again.submitted)
    _, other = run(scripted("a?", "b?", "done!"), n=2, samples=3, step=1)
    assert not set(seeds) & {o["seed"] for _, o in other.submitted}


def _real(seed: int, delays: float = 0.0):
    model = tiny_random_model()
    engine = HFEngine(model, TOKENIZER, max_slots=6, max_length=200)
    engine.sync(model)
    rng = random.Random(seed + int(delays * 1000))
    def tool(calls):
        time.sleep(rng.random() * delays)
        return [c.argument[:8] for c in calls]
    act = lambda turn, t: Call("tool", turn.text, WRAP) if turn.number < 2 and turn.reason != "length" else End("answer") if turn.number > 1 else Notice("no")
    return rollout(engine, TOKENIZER, [prompt(TOKENIZER, f"question {i}", i) for i in range(3)], act, {"tool": Tool(tool)},
                   Budget(64, 12, 30, 100, 3), ToolPool(4), samples=4, stop=("e", "a", "Q"), seed=seed)


def test_same_seed_same_trajectories_whatever_the_tools_take():
    torch.set_num_threads(1)
    first, again, slow, other = _real(5), _real(5), _real(5, delays=0.03), _real(6)
    assert any(t.calls for t in first)
    for a, b, c in zip(first, again, slow):
        assert a.ids == b.ids == c.ids
        assert str(a.logprobs) == str(b.logprobs) == str(c.logprobs)
    assert [t.ids for t in first] != [t.ids for t in other]


def test_collated_rows_hold_every_number_at_its_token():
    trajectories, _ = run(scripted("a?", "done!"), n=3)
    trajectories[1].prompt_ids = trajectories[1].prompt_ids[:4]  # ragged
    batch = collate(trajectories)
    for b, t in enumerate(trajectories):
        start, end = len(t.prompt_ids), len(t.prompt_ids) + len(t.ids)
        assert batch.ids_BT[b, :end].tolist() == t.prompt_ids + t.ids and int(batch.lengths_B[b]) == end
        assert batch.sampled_BT[b].nonzero().flatten().tolist() == [start + i for i, m in enumerate(t.mask) if m]
        assert batch.response_BT[b].nonzero().flatten().tolist() == list(range(start, end))
        assert (~batch.sampler_BT[b].isnan()).equal(batch.sampled_BT[b])


def test_sampled_tokens_is_what_a_model_can_write_at_most():
    assert Budget(100, 40, 160, 512, turns=3).sampled_tokens == 4 * 40  # three turns with a call and a last one
    assert Budget(100, 40, 160, 512, turns=3, final_turn=False).sampled_tokens == 3 * 40
    assert Budget(100, 8192, 8192, 8192, turns=32).sampled_tokens == 8192  # a turn may fill the trajectory
    assert Budget(100, 96, 0, 96, turns=0).sampled_tokens == 96
