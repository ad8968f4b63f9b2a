"""ReTool: environment, rewards and the cold start."""
import json
from dataclasses import replace
from pathlib import Path

import pytest

from common import UserError
from common.data import Example, read_messages
from common.policy import load_model
from common.rollout import Call, End, Segment, Tool, ToolCall, ToolFailure, Trajectory, Turn
from common.sandbox import Outcome
from common.tiny import protocols
from common.tiny.world import problem, problems, run_program
from common.update import demonstration_row
from methods import retool as m

CFG = m.Config()
SNIPPET = "I compute it.\n<code>\n```python\nprint(6 * 7)\n```\n</code>"


def trajectory(*segments, gold="42", calls=0):
    t = Trajectory(Example("e", "6 * 7?", (gold,)), 0, 0, "", [], segments=[Segment(a, text, 0, 0) for a, text in segments])
    t.calls = [ToolCall("python", "", t.example, "ok")] * calls
    return t


def total(t, **changes):
    return m.reward(t, t.example, replace(CFG, **changes))["total"]


def test_the_tiny_model_was_built_on_this_protocol():
    _, tokenizer = load_model("tiny")
    p, task = protocols.PROTOCOLS["retool"], problem(3, 1)
    assert m.render(Example("x", task.text, (task.answer,)), tokenizer) == p.prompt(task) and m.STOP == p.stops
    assert m.wrap_output("42").split() == p.observe("", "42").replace("42\n", "42").split()  # the official code has no line break before the end tag
    assert m.extract_program(p.call("I compute it.", "x = 1\nprint(x)")) == "x = 1\nprint(x)"


def test_environment():
    act = lambda text, reason: m.environment(Turn(text, reason, 0, False), None)
    assert act(SNIPPET, "stop") == Call("python", "print(6 * 7)", m.wrap_output)
    assert act("<answer>\n\\boxed{42}\n</answer>", "eos") == End("answer") and act("and so on", "length") == End("length")


def test_observation():
    assert m.observe(Outcome("ok", "42\n")) == "42" and m.observe(Outcome("ok", "a" * 400)) == "a" * 400
    assert m.observe(Outcome("ok", "a" * 300 + "b" * 300)) == "a" * 200 + "..." + "b" * 200
    failed = m.observe(Outcome("error", "1\n", "...", "ZeroDivisionError: division by zero"))
    assert isinstance(failed, ToolFailure) and str(failed) == "ZeroDivisionError: division by zero"


def test_rewards_of_paper_and_recipe():
    right, wrong = [("model", "\\boxed{42.0}")], [("model", "\\boxed{41}")]
    assert total(trajectory(*right)) == 1.0 and total(trajectory(*wrong, calls=3)) == -1.0
    assert total(trajectory(*right), reward="recipe") == -1.0  # the recipe wants the same characters
    assert [total(trajectory(*wrong, calls=k), reward="recipe") for k in range(6)] == pytest.approx([-1, -0.9, -0.8, -0.7, -0.6, -0.6])
    assert total(trajectory(("model", SNIPPET), ("tool", "\n<interpreter>\n\\boxed{42}</interpreter>\n\n"), ("model", "no"))) == -1.0


def test_a_cold_start_trains_the_models_words_and_not_the_interpreters():
    _, tokenizer = load_model("tiny")
    train_set = problems("train", 8)
    python = Tool(lambda calls: [run_program(c.argument) for c in calls])
    (prompt, segments), *_ = m.demonstrations(replace(CFG, cold_start_traces=8), train_set, tokenizer, m.PROMPT, python)
    ids, mask = demonstration_row(prompt, segments, tokenizer, m.wrap_output, 64)
    assert [a for a, _ in segments] == ["model", "tool", "model"]
    learned = tokenizer.decode([i for i, own in zip(ids, mask) if own])
    context = tokenizer.decode([i for i, own in zip(ids, mask) if not own])
    assert learned.startswith("I compute it.\n<code>") and learned.endswith("</answer><|im_end|>") and "interpreter" not in learned
    assert context == prompt + m.wrap_output(segments[1][1])
    (prompt, segments), *_ = m.demonstrations(replace(CFG, cold_start_traces=8, text_only=True), train_set, tokenizer, m.TEXT_PROMPT, python)
    assert [a for a, _ in segments] == ["model"] and "<code>" not in prompt + segments[0][1]
    worked = Example("g", "How many?", ("3",), {"solution": "It takes 2/2=<<2/2=1>>1 bolt.\n2+1=<<2+1=3>>3 in all.\n#### 3"})
    (_, segments), = m.demonstrations(replace(CFG, text_only=True), [worked], tokenizer, m.TEXT_PROMPT, Tool(lambda calls: ["3"] * len(calls)))
    assert segments == [("model", "It takes 2/2=1 bolt.\n2+1=3 in all.\nNow I can answer.\n<answer>\n\\boxed{3}\n</answer><|im_end|>")]


def test_traces_of_messages(tmp_path):
    file = tmp_path / "sft.jsonl"
    said = "First\n<code>\n```python\nprint(1)\n```\n</code>\n<interpreter>\n1\n</interpreter>\nso <answer>\n\\boxed{1}\n</answer>"
    row = {"messages": [{"role": "user", "content": "one?"}, {"role": "assistant", "content": said}]}
    file.write_text(json.dumps(row) + "\n" + json.dumps({"messages": [{"role": "user", "content": "two?"}]}) + "\n")
    assert len(read_messages(file, 1)) == 1
    with pytest.raises(UserError, match="line 2 of .*a user's and an assistant's message"):
        read_messages(file, 2)
    assert m.split_trace(said) == [("model", said[:said.index("\n<interpreter>")]), ("tool", "1"), ("model", said[said.index("so <answer>"):])]


QUESTION = "What is 1 + 1?\n\nGive a number."
SFT = ("Solve the following problem step by step. You may write code.\n<answer>\n\\boxed{'The final answer goes here.'}\n</answer>\n\n*user question:*\n"
       "Answer the following Math Problem and put the answer in the format of \\boxed{answer}\n\n" + QUESTION + "\n\n\n"
       "Remember to place the final answer in the last part using the format: \n<answer>\n\\boxed{'The final answer goes here.'}\n</answer>")


@pytest.mark.parametrize("user", [SFT, f"Solve it.\n*user question:*\n{QUESTION}", QUESTION])
def test_the_cold_start_asks_its_questions_with_the_prompt_of_rl(tmp_path, user):
    file = tmp_path / "sft.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": "<answer>\n\\boxed{2}\n</answer>"}]}))
    _, tokenizer = load_model("tiny")
    ask = lambda: m.demonstrations(replace(CFG, cold_start_data=str(file)), [], tokenizer, m.PROMPT, None)[0][0]
    assert ask() == m.render(Example("e", QUESTION, ("2",)), tokenizer) and "<|im_start|>" in ask()
    tokenizer.chat_template = None
    assert ask() == m.PROMPT.replace("{question}", QUESTION)


def small(**changes):
    return replace(CFG, prompts=2, samples=2, eval_questions=2, eval_every=0, trajectory_tokens=128, threads=1, sandbox="unsafe", **changes)


def metrics(kind="train"):
    return [r for r in map(json.loads, Path("runs/retool/tiny-seed0/metrics.jsonl").read_text().splitlines()) if r["kind"] == kind]


def test_at_first_only_the_critic_learns(tmp_path, monkeypatch):
    """trainer.critic_warmup=N: the first step in which the policy is updated is N, counted from 1. Here observations are trained on as well."""
    monkeypatch.chdir(tmp_path)
    step, critic_step, seen = m.policy_step, m.critic_step, []
    monkeypatch.setattr(m, "policy_step", lambda model, optimizer, x, *rest, **more: seen.append(x) or step(model, optimizer, x, *rest, **more))
    rates = []
    monkeypatch.setattr(m, "critic_step", lambda *args, **more: rates.append(more["lr"]) or critic_step(*args, **more))
    m.train(small(algorithm="ppo", steps=2, policy_from_step=2, cold_start=3, cold_start_traces=8, mask_observations=False))
    rows = metrics()
    assert len(rows) == 2 and len(seen) == 1 and rates == [CFG.critic_lr] * 2
    assert [("grad_norm" in r, "value_loss" in r) for r in rows] == [(False, True), (True, True)]
    x, = seen
    observed = x.trained_BT & ~x.sampled_BT
    assert observed.any() and bool((x.advantages_BT[observed] != 0).all())  # else they would only enlarge the denominator of the loss


def test_in_text_alone_nobody_speaks_of_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sample, asked = m.rollout, []
    monkeypatch.setattr(m, "rollout", lambda engine, tokenizer, prompts, *rest, **more: asked.append((prompts[0].text, more["stop"])) or sample(engine, tokenizer, prompts, *rest, **more))
    m.train(small(text_only=True, steps=1, cold_start_traces=16))
    assert all(stop == () and "code" not in text and "Python" not in text and "\\boxed{the answer}\n</answer>" in text for text, stop in asked) and len(asked) == 4
    assert metrics("eval")[-1]["answered"] == 1 and metrics()[0]["calls"] == 0


def test_in_text_alone_traces_with_code_are_refused():
    with pytest.raises(UserError, match="--text-only: the traces in --cold-start-data sft.jsonl hold code; give --cold-start 0"):
        m.train(small(text_only=True, cold_start_data="sft.jsonl"))
