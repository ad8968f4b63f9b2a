"""OTC: both environments, the tool reward, n over epochs and checkpoints, and where RL starts."""
import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

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
    for text in ("nothing to run\n```output", "```python\nprint(1)\n```output"):  # the stop string does not close a program
        assert act(m.code_environment, text) == Notice("\n[no program]\n```\n")


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
    assert graded(("model", "<answer> velmora. </answer>")) == {"em": 1, "f1": 1, "answered": 1}
    assert graded(("model", "<answer> in Velmora, </answer>")) == {"em": 0, "f1": pytest.approx(2 / 3), "answered": 1}
    assert graded(("model", "hm"), ("notice", m.NOTICE), ("model", "hm")) == {"em": 0, "f1": 0, "answered": 0}
    assert graded(("model", "hm"), ("tool", "<answer> Velmora </answer>"))["em"] == 0
    assert graded(("model", "\\boxed{Velmora}"), task="code")["accuracy"] == 1
    assert graded(("model", "hm"), ("tool", "\\boxed{Velmora}"), task="code")["accuracy"] == 0


@pytest.mark.parametrize("name,start,changes", [
    ("otc", "learn_to_over_call", dict(over_caller=1, kl=0.01, gae_over_documents=False)),
    ("toolrl", "supervised_start", dict(sft_steps=1, sft_batch=2, kl=0.01)),
    ("retool", "cold_start", dict(cold_start=1, cold_start_traces=4, sandbox="unsafe"))])
def test_rl_starts_where_the_supervised_steps_end(name, start, changes, tmp_path, monkeypatch):
    """Critic and reference are copies of the model that were made before them."""
    monkeypatch.chdir(tmp_path)
    method, models, critics, differs = importlib.import_module(f"methods.{name}"), [], [], []
    load, steps, value, critic = method.load_model, getattr(method, start), method.values, method.Critic
    same = lambda a, b: all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))

    def loaded(*how):
        models.append(load(*how))
        return models[-1]

    def supervised(cfg, model, *rest):
        steps(cfg, model, *rest)
        differs.append(not any(same(model, r) for r, _ in models[1:]) and not same(critics[0].body, model.base_model))

    def first_values(*args, **more):
        if len(differs) == 1:
            model = models[0][0]
            assert same(critics[0].body, model.base_model) and all(same(model, r) for r, _ in models[1:])
            differs.append(True)
        return value(*args, **more)
    for attribute, new in (("load_model", loaded), (start, supervised), ("values", first_values), ("Critic", lambda model: critics.append(critic(model)) or critics[0])):
        monkeypatch.setattr(method, attribute, new)
    method.train(replace(method.Config(), algorithm="ppo", steps=1, prompts=2, samples=2, eval_questions=2, eval_every=0, threads=1, name="x", **changes))
    assert differs == [True, True] and len(models) == 1 + ("kl" in changes)
    state = torch.load(next(Path(f"runs/{name}/x/checkpoint").glob("*/state.pt")), weights_only=True)
    assert ("reference" in state) == ("kl" in changes)  # else a resumed run would be held near the model from before the supervised steps


def test_a_run_in_which_observations_are_trained_on_values_them_too(tmp_path, monkeypatch):
    """Without it they would have an advantage of 0, and only enlarge the denominator of the loss."""
    monkeypatch.chdir(tmp_path)
    step, seen = m.policy_step, []
    monkeypatch.setattr(m, "policy_step", lambda model, optimizer, x, *rest, **more: seen.append(x) or step(model, optimizer, x, *rest, **more))
    m.train(replace(CFG, algorithm="ppo", steps=1, prompts=4, samples=4, eval_questions=2, eval_every=0, threads=1, trajectory_tokens=128, mask_observations=False, gae_over_documents=False))
    x, = seen
    observed = x.trained_BT & ~x.sampled_BT
    assert observed.any() and bool((x.advantages_BT[observed] != 0).all())
    assert json.loads(Path("runs/otc/tiny-seed0/metrics.jsonl").read_text().splitlines()[1])["reward_f1"] >= 0
