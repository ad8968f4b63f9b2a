"""SWiRL: turns, items, filters, judges, and that offline steps run no tool."""
import json
import shutil
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from common import UserError
from common.chat import next_user_turn
from common.data import Example
from common.engine import HFEngine
from common.policy import load_model
from common.rollout import Budget, Call, End, Prompt, Segment, ToolPool, Trajectory, Turn, rollout
from common.run import Interrupted
from common.search import Passage
from common.tiny import protocols
from common.tiny.oracle import chain_of, partial_results
from common.tiny.world import problem, problems, questions, world
from common.tools import search_tool
from methods import swirl as m
from tests.helpers import ScriptedEngine

CFG = m.Config()
GLUE = ("\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")
TWO_HOPS = next(e for e in questions("eval", 40) if e.meta["hops"] == 2)
HARD = next(e for e in problems("eval", 40) if e.meta["expression"].count("*") and "+" in e.meta["expression"])
EASY = next(e for e in problems("eval", 200) if e.meta["kind"] == "easy")


@pytest.fixture(scope="module")
def tokenizer():
    return load_model("tiny")[1]


def test_the_tiny_model_was_built_on_these_protocols(tokenizer):
    q, task = questions("eval", 1)[0], problem(3, 1)
    search, maths = protocols.PROTOCOLS["swirl"], protocols.PROTOCOLS["swirl_math"]
    assert m.render(q, tokenizer, m.PROMPTS["search"], m.QUERIES["search"]) == search.prompt(type("Q", (), {"text": q.question}))
    assert m.render(Example("x", task.text, ("?",)), tokenizer, m.PROMPTS["math"], m.QUERIES["math"]) == maths.prompt(task)
    glue = next_user_turn(tokenizer, [tokenizer.eos_token_id])
    passages = [Passage("1", '"T"\nfoo <answer> x </answer>'), Passage("2", '"U"\nbar')]
    assert m.wrap_result("T", m.render_passages(passages[:1]), glue) == search.observe("T", passages) and "<answer>" not in search.observe("T", passages)
    assert m.wrap_result("T", m.render_passages([]), glue) == search.observe("T", [])
    assert m.wrap_result("6 * 7", "42", glue) == maths.observe("6 * 7", "42")
    assert search.stops == maths.stops == ()  # messages end with the model's own end token
    assert m.wrap_result("a<|im_end|>", "error: '<|im_end|>' is not arithmetic", GLUE).count("<|im_end|>") == 1  # the template's own
    for p, kind in ((search, "search"), (maths, "math")):
        turn = p.call("I look.", "6 * 7").removesuffix(p.end)
        assert m.parse_action(turn) == (kind, "6 * 7") and m.parse_action(p.answer("So.", "42")) == ("answer", "42")


def test_environment():
    act = lambda text, reason="eos", task="search": m.environment(Turn(text, reason, 0, False), None, task, str.upper, GLUE)
    call = act("I look. <search_query> Velmora </search_query>")
    assert isinstance(call, Call) and (call.tool, call.argument) == ("search", "Velmora") and call.wrap("x") == f"{GLUE[0]}VELMORA -> x{GLUE[1]}"
    assert act("<math_exp> 1 + 1 </math_exp>", task="math").argument == "1 + 1"
    assert act("<math_exp> 1 + 1 </math_exp>") == End("no_action")  # the other task's tool
    assert act("So <answer></answer>") == End("answer") and act("hm") == End("no_action") and act("<search_query> cut") == End("no_action")
    assert act("<search_query> a </search_query> so <answer> b </answer>") == End("answer")
    assert act("<search_query> a </search_query> and", "length") == End("length") and act("<answer> b </answer> and", "length") == End("answer")


def play(tokenizer, say, example=TWO_HOPS, task="search", turns=5, samples=1, engine=None):
    budget, pool = Budget(192, 60, 96, 512, turns), ToolPool(1)
    text = m.render(example, tokenizer, m.PROMPTS[task], turns)
    prompts = [Prompt(example, text, tokenizer.encode(text, add_special_tokens=False))]
    found = rollout(engine or ScriptedEngine(tokenizer, say), tokenizer, prompts, partial(m.environment, task=task, short=str, glue=GLUE),
                    {"search": search_tool("", 1, m.render_passages)}, budget, pool, samples=samples)
    pool.close()
    return found


def test_an_empty_search_counts_as_empty_and_says_so(tokenizer):
    t, = play(tokenizer, lambda ids, seed: "<search_query> qqq </search_query>", turns=1)
    assert [c.outcome for c in t.calls] == ["empty"] and t.segments[1].text == f"{GLUE[0]}qqq -> nothing found{GLUE[1]}"


def talker(tokenizer, *messages):
    """Says the messages in turn, whatever it is shown."""
    return lambda ids, seed: messages[min(tokenizer.decode(ids).count("<|im_start|>assistant") - 1, len(messages) - 1)]


def test_queries_are_capped_and_one_more_message_may_answer(tokenizer):
    first = chain_of(TWO_HOPS)[0][0]
    ask = f"<search_query> {first} </search_query>"
    t, = play(tokenizer, talker(tokenizer, ask), turns=2)
    assert (len(t.calls), t.turns, t.stop) == (2, 3, "turns")
    t, = play(tokenizer, talker(tokenizer, ask, ask, "<answer> x </answer>"), turns=2)
    assert (len(t.calls), t.stop) == (2, "answer")


def test_cut_gives_every_message_its_state_token_for_token(tokenizer):
    (a, middle), (b, answer) = chain_of(TWO_HOPS)
    messages = [f"I look. <search_query> {a} </search_query>", f"Next. <search_query> {b} </search_query>", f"So. <answer> {answer} </answer>"]
    t, = play(tokenizer, talker(tokenizer, *messages))
    cut = m.cut(t, GLUE)
    assert [action for _, _, _, action in cut] == messages
    for state, _, action_ids, _ in cut:
        assert (t.prompt_ids + t.ids)[:len(state) + len(action_ids)] == state + action_ids and tokenizer.eos_token_id == action_ids[-1]
    page = world(TWO_HOPS.meta["world"]).page
    assert cut[0][1] == [] and cut[2][1] == [("model", messages[0]), ("tool", f"{a} -> {page(a).text}"), ("model", messages[1]), ("tool", f"{b} -> {page(b).text}")]
    assert m.grade(t, "search") == {"em": 1.0, "f1": 1.0, "answered": 1.0}
    assert [v for v in m.judge([(t.example, h, action) for _, h, _, action in cut], None)] == ["GOOD"] * 3


def test_offline_steps_sample_one_message_in_the_saved_state_and_run_nothing(tokenizer):
    state = [5, 6, 7, 8]  # ids that no text needs to give
    engine = ScriptedEngine(tokenizer, lambda ids, seed: "<search_query> a </search_query>")
    pool = ToolPool(1)
    found = rollout(engine, tokenizer, [Prompt(TWO_HOPS, "", state)], partial(m.offline, task="search"), {}, Budget(4, 30, 30, 30, turns=0), pool, samples=3)
    pool.close()
    assert [ids for ids, _ in engine.submitted] == [state] * 3 and [(t.turns, t.calls, t.stop) for t in found] == [(1, [], "query")] * 3
    ends = lambda text, reason="eos": m.offline(Turn(text, reason, 0, True), None, "search").reason
    assert [ends("<answer> x </answer>"), ends("hm"), ends("<math_exp> 1 </math_exp>"), ends("<search_query> a </search_query>", "length")] == [
        "answer", "no_action", "no_action", "length"]
    assert ends("<answer> x </answer> and", "length") == "answer"  # cut, but the answer is whole: the judge decides


def test_filters():
    keep = lambda good, right: [how for how in ("none", "process", "outcome", "both") if m.keeps(good, right, how)]
    assert keep([1, 1], 1) == ["none", "process", "outcome", "both"] and keep([1, 1], 0) == ["none", "process"]
    assert keep([1, 0], 1) == ["none", "outcome"] and keep([0], 0) == ["none"]


def saved(*kinds):
    """Items of trajectories written as (labels, right)."""
    return [m.Item(k, "search", TWO_HOPS, [1], [], [2], "a", float(good), right) for k, (labels, right) in enumerate(kinds) for good in labels]


def test_every_filter_gives_the_same_number_of_trajectories_or_says_that_it_cannot():
    items = saved(*[([1, 1], 1.0)] * 4, *[([1, 1], 0.0)] * 2, *[([1, 0, 1], 1.0)] * 3, *[([0], 0.0)] * 9)
    for how, kept in (("none", 18), ("process", 6), ("outcome", 7), ("both", 4)):
        cfg = replace(CFG, filter=how, trajectories=4)
        used, n_kept, n_all = m.select(items, cfg)
        assert (n_kept, n_all, len({i.trajectory for i in used})) == (kept, 18, 4) and used == m.select(items, cfg)[0]
        assert all(sum(i.trajectory == j.trajectory for i in items) == sum(i.trajectory == j.trajectory for i in used) for j in used)  # whole ones
    assert {i.trajectory for i in m.select(items, replace(CFG, filter="none", trajectories=4))[0]} != {
        i.trajectory for i in m.select(items, replace(CFG, filter="none", trajectories=4, seed=1))[0]}
    assert len(m.select(items, replace(CFG, filter="both", trajectories=0))[0]) == 8
    with pytest.raises(UserError, match="keeps 4 of 18 trajectories, and 5 are asked for"):
        m.select(items, replace(CFG, filter="both", trajectories=5))


def test_verdict():
    assert [m.verdict(x) for x in ("so GOOD", "GOOD? No: BAD.", "**GOOD**", "_BAD_", "good", "GOODNESS", "", "BAD idea? GOOD\n")] == [
        "GOOD", "BAD", "GOOD", "BAD", None, None, None, "GOOD"]
    assert m.verdict("NO, YES", ("YES", "NO")) == "YES"
    assert [m.reward(x, "query")["total"] for x in ("GOOD", "BAD", None)] == [1, 0, 0] and m.reward("GOOD", "length")["total"] == 0


def word(example, action, *history):
    return m.oracle(example, list(history), action)


def test_oracle_on_searches():
    (a, b), (_, answer) = chain_of(TWO_HOPS)
    here = world(TWO_HOPS.meta["world"])
    other = next(name for name in here.facts if name not in (a, b))
    ask = lambda text: f"I look. <search_query> {text} </search_query>"
    found = lambda name: [("model", ask(name)), ("tool", f"{name} -> {here.page(name).text}")]
    assert word(TWO_HOPS, ask(a)) == word(TWO_HOPS, ask(f"the birthplace of {a}")) == "GOOD"
    assert word(TWO_HOPS, ask(b)) == "BAD"  # nobody could know yet
    assert word(TWO_HOPS, ask(other)) == word(TWO_HOPS, ask(f"{a} {other}")) == word(TWO_HOPS, ask("the mayor")) == word(TWO_HOPS, ask("")) == "BAD"
    assert word(TWO_HOPS, ask(a), *found(a)) == word(TWO_HOPS, ask(f"{a} again"), *found(a)) == "BAD"
    assert word(TWO_HOPS, ask(b), *found(a)) == word(TWO_HOPS, ask(b), *found(other), *found(a)) == "GOOD"
    assert word(TWO_HOPS, ask(a), ("model", ask(a)), ("tool", f"{a} -> nothing found")) == "BAD"  # the same once more
    said = lambda x: f"So. <answer> {x} </answer>"
    assert word(TWO_HOPS, said(answer)) == word(TWO_HOPS, said(answer), *found(a)) == "BAD"  # right, and a guess
    assert word(TWO_HOPS, said(answer), *found(a), *found(b)) == "GOOD" and word(TWO_HOPS, said(other), *found(a), *found(b)) == "BAD"
    assert word(TWO_HOPS, f"So. {answer}", *found(a), *found(b)) == word(TWO_HOPS, ask(b), *found(a), *found(b)) == "BAD"
    assert word(TWO_HOPS, f"<math_exp> {a} </math_exp>") == "BAD"


def test_oracle_on_sums():
    ask = lambda text: f"I compute it. <math_exp> {text} </math_exp>"
    done = lambda text: [("model", ask(text)), ("tool", f"{text} -> ?")]
    product, rest = HARD.meta["expression"].split(" + ")
    x, y = product.split(" * ")
    said = lambda v: f"<answer> {v} </answer>"
    assert word(HARD, ask(HARD.meta["expression"])) == word(HARD, ask(product)) == word(HARD, ask(f"{rest} + {y}*{x}")) == "GOOD"
    assert word(HARD, ask(f"{x} + {y}")) == word(HARD, ask(product + " +")) == word(HARD, f"<search_query> {product} </search_query>") == "BAD"
    assert word(HARD, ask(f"{y} * {x}"), *done(product)) == "BAD" and word(HARD, ask(f"{int(x) * int(y)} + {rest}"), *done(product)) == "GOOD"
    assert word(HARD, ask(product), *done(HARD.meta["expression"])) == "BAD"  # nothing is missing any more
    assert word(HARD, said(HARD.answers[0])) == word(HARD, said(HARD.answers[0]), *done(product)) == "BAD"
    assert word(HARD, said(HARD.answers[0]), *done(HARD.meta["expression"])) == "GOOD" and word(HARD, said("7"), *done(HARD.meta["expression"])) == "BAD"
    assert word(EASY, said(EASY.answers[0])) == word(EASY, ask(EASY.meta["expression"])) == "GOOD"  # one-digit sums need no tool
    assert partial_results("500 - 20 * 3") == {440, 60} and partial_results("500 - 20 - 30") == {450, 480, 470, 50}


def test_no_judge_of_steps_sees_the_gold_answer():
    (a, b), (_, answer) = chain_of(TWO_HOPS)
    here = world(TWO_HOPS.meta["world"])
    history = [("model", f"<search_query> {n} </search_query>") if who == "model" else ("tool", f"{n} -> {here.page(n).text}") for n in (a, b) for who in ("model", "tool")]
    blind = replace(TWO_HOPS, answers=("something else",))
    assert word(blind, f"<answer> {answer} </answer>", *history) == "GOOD" and word(blind, "<answer> something else </answer>", *history) == "BAD"
    asked = []
    def ask(messages):
        asked.extend(messages)
        return ["It helps. GOOD", "I cannot say."]
    told = [("model", "<search_query> x </search_query>"), ("tool", "x -> <|im_end|> y")]
    assert m.judge([(Example("e", "Who {is} it?", ("Secret",)), told, "<answer> y </answer>"), (Example("f", "Why?", ("Secret",)), [], "hm")], ask) == ["GOOD", None]
    assert "Who {is} it?" in asked[0] and "x -> " in asked[0] and "answer> y" in asked[0] and "(none)" in asked[1] and "hm" in asked[1]
    assert not any("Secret" in text or "<|im_end|>" in text for text in asked)


def test_the_outcome_filter_does_see_it():
    t = lambda last: Trajectory(Example("e", "How many?", ("Secret",)), 0, 0, "", [], segments=[Segment("model", last, 0, 0)])
    assert m.outcomes([t("<answer> secret. </answer>"), t("<answer> 7 </answer>"), t("Secret")], "search", None) == [1.0, 0.0, 0.0]
    ask = lambda messages: ["the same: YES" if "Secret" in text and "Given answer: 7" in text else "NO" for text in messages]
    assert m.outcomes([t("<answer> 7 </answer>"), t("<answer> 8 </answer>"), t("7")], "search", ask) == [1.0, 0.0, 0.0]


def test_only_the_last_message_is_graded():
    t = Trajectory(replace(HARD, answers=("42",)), 0, 0, "", [], segments=[
        Segment("model", "<math_exp> 6 * 7 </math_exp>", 0, 0), Segment("tool", "<answer> 42 </answer>", 0, 0), Segment("model", "hm", 0, 0)])
    assert m.grade(t, "math") == {"accuracy": 0.0, "answered": 0.0}
    t.segments[-1] = Segment("model", "<answer> 42.0 </answer>", 0, 0)
    assert m.grade(t, "math") == {"accuracy": 1.0, "answered": 1.0}


def test_items_files_are_checked(tmp_path):
    path, items = tmp_path / "items.jsonl", saved(([1, 0], 1.0))
    path.write_text("".join(json.dumps(asdict(i)) + "\n" for i in items))
    assert m.read_items(path, "search") == items
    with pytest.raises(UserError, match="line 1: it was made for --task search, not math"):
        m.read_items(path, "math")
    for text, reason in (("", "empty"), (path.read_text() + "{", "line 3"), ('{"a": 1}', "line 1"), ("[1]", "line 1")):
        path.write_text(text)
        with pytest.raises(UserError, match=reason):
            m.read_items(path, "search")
    with pytest.raises(UserError, match="cannot read it"):
        m.read_items(tmp_path / "none.jsonl", "search")


def test_settings_that_do_not_fit_are_refused():
    data = lambda **changes: m.load_data(replace(CFG, data="q.jsonl", **changes), ["search"])
    with pytest.raises(UserError, match="the oracle knows the tiny world only"):
        data()
    with pytest.raises(UserError, match="--corpus"):
        data(judge="tiny")
    with pytest.raises(UserError, match="--transfer-data"):
        m.load_data(replace(CFG, data="q.jsonl", judge="tiny", corpus="c", eval_task="math"), ["math"])


SMALL = replace(CFG, threads=1, questions=12, per_question=4, filter="none", trajectories=12, prompts=4, samples=4, steps=2, save_every=1, eval_every=0,
                eval_questions=4)


def test_a_run_goes_on_with_the_same_bits_after_a_stop_in_generation_and_in_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(m, "AT_ONCE", 16)
    whole = replace(SMALL, name="whole", eval_task="both")
    with monkeypatch.context() as patched, pytest.raises(Interrupted):
        patched.setattr(m.Run, "stop_if_asked", lambda self, step: (_ for _ in ()).throw(Interrupted("now")))
        m.train(whole)
    assert [p.name for p in tmp_path.glob("runs/swirl/whole/items*")] == ["items-0.part"]
    m.train(replace(whole, resume=True))
    weights = lambda: torch.load("runs/swirl/whole/checkpoint/step-2/state.pt")["model"]
    found, start = weights(), load_model("tiny")[0].state_dict()
    shutil.rmtree("runs/swirl/whole/checkpoint/step-2")  # as if it had been killed in its second step
    m.train(replace(whole, resume=True))
    assert all(torch.equal(found[k], x) for k, x in weights().items()) and any(not torch.equal(found[k], start[k]) for k in found)
    rows = [json.loads(line) for line in open("runs/swirl/whole/metrics.jsonl")]
    assert [(r["kind"], r["step"]) for r in rows] == [("items", 0), ("eval", 0), ("transfer", 0), ("train", 1), ("train", 2), ("eval", 2), ("transfer", 2)]
    assert rows[3]["calls"] == 0 and rows[0]["n"] == 48
    summary = json.load(open("runs/swirl/whole/summary.json"))
    assert summary["metric"] == "em" and set(summary["transfer"]["after"]) == {"math"}

    m.train(replace(SMALL, name="sft", steps=1, algorithm="sft"))  # nobody stopped this one
    assert [p.name for p in tmp_path.glob("runs/swirl/sft/items*")] == ["items.jsonl"]
    assert len({Path(f"runs/swirl/{name}/items.jsonl").read_bytes() for name in ("whole", "sft")}) == 1
    losses = [json.loads(line)["loss"] for line in open("runs/swirl/sft/metrics.jsonl") if '"sft"' in line]
    assert len(losses) == 1 and losses[0] > 0
    with pytest.raises(UserError, match="not this model's"):
        m.train(replace(SMALL, name="other", items="runs/swirl/whole/items.jsonl", prompt_tokens=100, trajectory_tokens=5))


def test_generation_hands_the_engine_the_weights_before_every_batch(tmp_path, monkeypatch):
    """vLLM's engine sleeps after each."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(m, "AT_ONCE", 8)
    done, sync, rollout = [], HFEngine.sync, m.rollout
    monkeypatch.setattr(HFEngine, "sync", lambda self, model: done.append("sync") or sync(self, model))
    monkeypatch.setattr(m, "rollout", lambda *a, **k: done.append("rollout") or rollout(*a, **k))

    def stop(items, cfg):
        raise Interrupted("enough")
    monkeypatch.setattr(m, "select", stop)
    with pytest.raises(Interrupted):
        m.train(replace(SMALL, name="synced", questions=6, per_question=4))
    assert done[-6:] == ["sync", "rollout"] * 3 and done.count("rollout") == 3
