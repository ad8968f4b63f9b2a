"""OTC: both environments, the tool reward, and n over epochs and checkpoints."""
from dataclasses import replace

import pytest

from common.data import Example
from common.policy import load_model
from common.rollout import Call, End, Notice, Segment, Trajectory, Turn
from common.tiny import protocols
from common.tiny.world import problem, questions
from methods import otc as m

CFG = m.Config()
E = Example("q1", "Where?", ("Velmora",))


def test_the_tiny_model_was_built_on_these_protocols():
    _, tokenizer = load_model("tiny")
    p, e = protocols.PROTOCOLS["otc"], questions("eval", 1)[0]
    assert m.render(e, tokenizer, m.PROMPTS["search"], "search") == p.prompt(type("Q", (), {"text": e.question})) and m.STOPS["search"] == p.stops
    assert m.NOTICE == protocols.NOTICE
    p, task = protocols.PROTOCOLS["torl"], problem(3, 1)
    assert m.render(Example("x", task.text, (task.answer,)), tokenizer, m.PROMPTS["code"], "code") == p.prompt(task) and m.STOPS["code"] == p.stops
    assert m.wrap_output("42") == p.observe("", "42")


def test_two_environments():
    act = lambda f, text, reason="stop": f(Turn(text, reason, 0, False), None)
    assert act(m.search_environment, "<think> a </think>\n<search> Velmora </search>") == Call("search", "Velmora", m.wrap_passages)
    assert act(m.search_environment, "<answer> x </answer>") == End("answer") and act(m.search_environment, "hm", "eos") == Notice(m.NOTICE)
    assert m.wrap_passages("Doc 1") == "\n\n<observation>Doc 1</observation>\n\n"
    assert act(m.code_environment, "```python\nprint(1)\n```\n```output") == Call("python", "print(1)\n", m.wrap_output)
    assert act(m.code_environment, "\\boxed{1}", "eos") == End("answer")


def total(right, calls, n, **changes):
    return m.reward({"em": float(right)}, calls, n, replace(CFG, max_turns=4, **changes))["total"]


def test_a_wrong_answer_is_worth_nothing_and_a_right_one_most_with_the_fewest_calls():
    assert [total(False, calls, 1) for calls in (0, 1, 4)] == [0, 0, 0]
    best = [total(True, calls, 2) for calls in (1, 2, 3, 6)]
    assert best[1] == max(best) == pytest.approx(1) and best[1] > best[2] > best[3] > 0
    assert total(True, 0, 0) == 1 and total(True, 1, 0) == pytest.approx(0.866025, abs=1e-6)
    assert total(True, 1, None, c=1.0) < total(True, 1, None, c=4.0)  # a smaller c punishes calls sooner
    assert total(False, 0, None, tool_reward="add") == 1 and total(True, 3, 1, tool_reward="off") == 1  # additive: thrift pays without being right


def test_fewest_calls_only_fall_and_survive_a_checkpoint():
    fewest = m.FewestCalls()
    for calls in (3, 1, 2):
        fewest.see(E, calls)
    again = m.FewestCalls()
    again.load_state_dict(fewest.state_dict())
    assert again.n == {"q1": 1}


def test_only_the_models_words_are_graded():
    def graded(*segments, **changes):
        t = Trajectory(E, 0, 0, "", [], segments=[Segment(a, text, 0, 0) for a, text in segments])
        return m.grade(t, E, replace(CFG, **changes))
    assert graded(("model", "<answer> velmora. </answer>"))["em"] == 1
    assert graded(("model", "hm"), ("tool", "<answer> Velmora </answer>"))["em"] == 0
    assert graded(("model", "\\boxed{Velmora}"), task="code")["accuracy"] == 1
    assert graded(("model", "hm"), ("tool", "\\boxed{Velmora}"), task="code")["accuracy"] == 0
