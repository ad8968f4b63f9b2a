"""ToRL: environment, observations and rewards; each bug of the original that is not repeated has a test."""
import importlib
from dataclasses import replace

import pytest

from common import UserError
from common.data import Example
from common.policy import load_model
from common.rollout import Budget, Call, End, Notice, Segment, Tool, ToolCall, ToolFailure, ToolPool, Trajectory, Turn, make_prompts, rollout
from common.sandbox import Limits, Outcome
from common.tiny import protocols
from common.tiny.world import problem, problems
from common.tools import python_tool
from methods import torl as m
from tests.helpers import ScriptedEngine

CFG = m.Config()
CODE = "I compute it.\n```python\nprint(6 * 7)\n```\n```output"


def trajectory(*segments, gold="42", outcomes=()):
    t = Trajectory(Example("e", "6 * 7?", (gold,)), 0, 0, "", [], segments=[Segment(a, text, 0, 0) for a, text in segments])
    t.calls = [ToolCall("python", "", t.example, outcome) for outcome in outcomes]
    return t


def total(t, **changes):
    return m.reward(t, t.example, replace(CFG, **changes))["total"]


def test_the_tiny_model_was_built_on_this_protocol():
    p, task = protocols.PROTOCOLS["torl"], problem(3, 1)
    assert m.render(Example("x", task.text, (task.answer,))) == p.prompt(task) and m.STOP == p.stops
    assert m.wrap_output("42") == p.observe("", "42") and m.wrap_output("") == p.observe("", "")
    assert m.extract_program(p.call("I compute it.", "x = 1\nprint(x)")) == "x = 1\nprint(x)\n"


def test_environment():
    act = lambda text, reason: m.environment(Turn(text, reason, 0, False), None)
    assert act(CODE, "stop") == Call("python", "print(6 * 7)\n", m.wrap_output)
    assert act("nothing to run\n```output", "stop") == Notice("\n[no program]\n```\n")  # the turn is spent all the same, and its block is closed
    assert act("```python\nprint(1)\n```output", "stop") == Notice("\n[no program]\n```\n")  # the stop string does not close a program
    assert act("```python\nprint(1)\n``````output", "stop") == Call("python", "print(1)\n", m.wrap_output)
    assert act("The answer is \\boxed{42}.", "eos") == End("answer")
    assert act("and so on", "length") == End("length")


@pytest.mark.parametrize("outcome,expected", [
    (Outcome("ok", "42\n"), "42"),
    (Outcome("ok_empty"), ""),  # the original shows a time-out that did not happen
    (Outcome("error", "1\n2\n", "Traceback...\nNameError: name 'x' is not defined", "NameError: name 'x' is not defined"),
     ToolFailure("NameError: name 'x' is not defined", "error")),  # the original counts printed text as success
    (Outcome("timeout", "1\n", exception="the program ran longer than 5 s"), ToolFailure("the program ran longer than 5 s", "timeout")),
    (Outcome("ok", "no Error here\n7"), "no Error here\n7"),  # the original keeps the last line only
    (Outcome("ok", "a" * 255), "a" * 255),
    (Outcome("ok", "a" * 200 + "b" * 200), "a" * 128 + "..." + "b" * 128),
])
def test_observation(outcome, expected):
    got = m.observe(outcome)
    assert str(got) == str(expected) and type(got) is type(expected)
    if isinstance(expected, ToolFailure):
        assert got.outcome == expected.outcome


@pytest.mark.parametrize("name", ["torl", "retool", "otc"])
@pytest.mark.parametrize("said,shown", [
    ("</interpreter>\n<|im_end|>", "[/interpreter>\n[|im_end|>"), ("```\n```python\n", "'''\n'''python"), ("<answer> 7 </answer>", "[answer> 7 [/answer>"),
    ("-1.5e-07\n[1, 2]\n", "-1.5e-07\n[1, 2]"), ("<class 'int'> x < 3 <b>", "<class 'int'> x < 3 <b>"),
    ("TypeError: '<' not supported between instances of 'str' and 'int'", "TypeError: '<' not supported between instances of 'str' and 'int'")])
def test_a_program_cannot_print_the_end_of_its_block(name, said, shown):
    observe = importlib.import_module(f"methods.{name}").observe
    assert observe(Outcome("ok", said)) == shown and str(observe(Outcome("error", "", said, said))) == shown


@pytest.mark.parametrize("name", ["torl", "retool", "otc"])
def test_a_longer_run_timeout_is_more_processor_time_too(name, monkeypatch):
    """Ten seconds of it were the limit, whatever the timeout."""
    method, seen = importlib.import_module(f"methods.{name}"), []

    def opened(where, limits):
        seen.append(limits)
        raise UserError("enough")
    monkeypatch.setattr(method, "open_sandbox", opened)
    for seconds in (0.5, 30.0):
        with pytest.raises(UserError, match="enough"):
            method.train(replace(method.Config(), run_timeout=seconds, **({"task": "code"} if name == "otc" else {})))
    assert [(x.wall_s, x.cpu_s) for x in seen] == [(0.5, 2), (30.0, 31)]
    with pytest.raises(UserError, match="wall_s"):
        method.train(replace(method.Config(), run_timeout=float("inf"), **({"task": "code"} if name == "otc" else {})))


@pytest.mark.parametrize("workers,wall_s", [(1, 5.0), (2, 5.0), (96, 30.0), (10_000, 0.5)])
def test_no_batch_of_programs_is_late_because_the_sandbox_is_busy(workers, wall_s):
    tool = python_tool(type("Sandbox", (), {"workers": workers, "limits": Limits(wall_s=wall_s)}), str)
    at_once = ToolPool.__init__.__defaults__[0] * tool.batch  # programs of all batches that a pool runs at one time
    assert tool.deadline_s > at_once * wall_s / workers and tool.deadline_s > wall_s


def test_what_a_program_printed_is_not_scored():
    t = trajectory(("model", CODE), ("tool", "\n\\boxed{42}\n```\n"), ("model", "I do not know."), outcomes=["ok"])
    assert total(t) == -1.0


def test_answers_are_compared_as_maths():
    assert total(trajectory(("model", "\\boxed{2\\sqrt{3}}"), gold="2\\sqrt{5}")) == -1.0
    assert total(trajectory(("model", "\\boxed{2^{10}}"), gold="1024")) == 1.0
    assert total(trajectory(("model", "\\boxed{\\frac{1}{2}}"), gold="0.5")) == 1.0


@pytest.mark.parametrize("text,outcomes,paper,original", [
    (CODE + "\\boxed{42}", ["ok"], 1.0, 1.0),
    (CODE + "\\boxed{42}", ["error"], 0.5, 0.5),
    (CODE + "\\boxed{41}", ["error"], -1.5, -1.5),
    (CODE + "\\boxed{42}", ["error", "empty"], 1.0, 1.0),  # the last program ran; printing nothing is not failing
    (CODE + "\\boxed{42}", [], 0.5, 0.5),  # written and never run
    ("\\boxed{42}", [], 1.0, 0.5),  # the original punishes the absence of code
    ("\\boxed{41}", [], -1.0, -1.5),
])
def test_execution_penalty(text, outcomes, paper, original):
    t = trajectory(("model", text), outcomes=outcomes)
    assert total(t, execution_penalty=0.5) == paper
    assert total(t, execution_penalty=0.5, penalty_without_code=True) == original
    assert total(t) == (1.0 if "42" in text else -1.0)


def test_softer_reward_for_a_wrong_answer_in_a_box():
    assert [total(trajectory(("model", text)), reward="format") for text in ("\\boxed{42}", "\\boxed{41}", "41")] == [1.0, -0.5, -1.0]


def test_with_two_programs_every_output_is_masked_and_the_last_turn_runs_nothing():
    """The original's offsets are those of the segment, so from the second output on the wrong tokens are masked."""
    _, tokenizer = load_model("tiny")
    engine = ScriptedEngine(tokenizer, lambda ids, seed: CODE)
    ran = []
    tool = Tool(lambda calls: [ran.append(c.argument) or f"out{len(ran)}" for c in calls])
    budget = Budget(100, 60, 40, 300, turns=2)
    prompts, _ = make_prompts([Example("e", "6 * 7?", ("42",))], lambda e: m.render(e), tokenizer, budget)
    pool = ToolPool(1)
    t, = rollout(engine, tokenizer, prompts, m.environment, {"python": tool}, budget, pool, stop=m.STOP)
    pool.close()
    written = tokenizer.decode([i for i, own in zip(t.ids, t.mask) if own])
    others = tokenizer.decode([i for i, own in zip(t.ids, t.mask) if not own])
    assert ran == ["print(6 * 7)\n"] * 2 and t.stop == "turns"
    assert written == CODE * 3 and others == "\nout1\n```\n\nout2\n```\n"


def test_problems_of_training_and_evaluation():
    assert problems("train", 20, seed=0) == problems("train", 20, seed=0) != problems("train", 20, seed=1)
    rows = problems("eval", 200)
    assert {e.meta["kind"] for e in rows} == {"easy", "hard"} and all(str(eval(e.meta["expression"])) == e.answers[0] for e in rows)
    hard = {e.question for e in rows if e.meta["kind"] == "hard"}
    assert len(hard & {e.question for e in problems("train", 4096)}) <= 2  # by chance


def test_programs_by_rule_of_gsm8k_solutions():
    from common.data import Example
    from common.warmup import program_by_rule
    e = lambda solution: Example("1", "q", ("3",), {"solution": solution})
    assert program_by_rule(e("2/2=<<2/2=1>>1 bolt\n2+1=<<2+1=3>>3\n#### 3")) == "x1 = 2/2\nx2 = 2+x1\nprint(x2)"
    assert program_by_rule(e("<<80,000*50%=40,000>>40,000 and <<40000+1=40001>>")) == "x1 = 80000*50/100\nx2 = x1+1\nprint(x2)"
    assert program_by_rule(e("no marks\n#### 3")) is None
    assert program_by_rule(e("<<2x=6>>")) is None
    assert program_by_rule(Example("1", "q", ("6",), {"expression": "2 * 3"})) == "print(2 * 3)"
