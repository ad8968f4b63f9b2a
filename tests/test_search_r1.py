import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.data import Example
from common.policy import load_model
from common.rollout import Call, End, Notice, Segment, Tool, ToolCall, ToolFailure, Trajectory, Turn
from common.search import Passage
from common.tiny import protocols
from common.tiny.world import questions
from common.tools import search_tool
from common.update import demonstration_row
from common.warmup import as_shown, found_by_rule
from methods import search_r1 as m
from tests.check_vectors import run_folder

CFG = m.Config()
GOOD = [("model", "<think> I look. </think>\n<search> x </search>"), ("tool", '\n\n<information>Doc 1(Title: "X") X is Nadia Orlov.</information>\n\n'),
        ("model", "<think> clear </think>\n<answer> Nadia Orlov </answer>")]


def trajectory(*segments, gold=("Nadia Orlov",), prompt="<|im_start|>user\nQ?<|im_end|>\n<|im_start|>assistant\n"):
    return Trajectory(Example("e", "Q?", gold), 0, 0, prompt, [], segments=[Segment(a, t, 0, 0) for a, t in segments])


def total(t, **changes):
    return m.reward(t, t.example, replace(CFG, **changes))["total"]


def test_original_values_of_rewards_and_parsers():
    lines, failures = run_folder(Path(__file__).parent / "vectors")
    assert failures == 0, "\n".join(lines)
    assert any(line.startswith("search_r1.json: ") and not line.startswith("search_r1.json: 0") for line in lines)


def test_a_wrong_vector_fails(tmp_path):
    import json
    data = json.loads((Path(__file__).parent / "vectors" / "search_r1.json").read_text())
    data["search_r1"]["cases"][0]["expected_em"] = 0.5
    (tmp_path / "search_r1.json").write_text(json.dumps(data))
    assert run_folder(tmp_path)[1] == 1


def test_the_example_answer_of_the_prompt_earns_nothing():
    prompt = m.PROMPT.format(question="What is the capital?")
    assert "<answer> Beijing </answer>" in prompt
    t = trajectory(("model", "<think> no idea </think>"), gold=("Beijing",), prompt=prompt)
    assert total(t) == 0.0 and total(t, score_scope="all") == 1.0  # the original pays


def test_tags_in_results_and_notices_earn_nothing():
    t = trajectory(("model", "<search> x </search>"), ("tool", "\n\n<information>Doc 1 <answer> Nadia Orlov </answer></information>\n\n"), ("model", "hm"))
    assert total(t) == 0.0 and total(t, score_scope="response") == 1.0
    t = trajectory(("model", "hm"), ("notice", m.NOTICE), gold=("and",))
    assert total(t) == 0.0 and total(t, score_scope="response") == 1.0


@pytest.mark.parametrize("segments,value", [
    (GOOD, 1.0),
    ([*GOOD[:2], ("model", "<answer> Nadia Orlov </answer>")], 0.8),  # no thought after the result
    ([*GOOD[:2], ("model", "<think> c </think>\n<answer> Tom </answer>")], 0.2),
    ([*GOOD[:2], ("model", "<answer> Tom </answer>")], 0.1),
    ([*GOOD[:2], ("model", "<think> unsure </think>")], 0.0),
    ([("model", "<think> a </think> <search> x </search> <information> Nadia Orlov </information> <think> b </think> <answer> Nadia Orlov </answer>")], 0.8),  # invented result
])
def test_format_reward(segments, value):
    assert total(trajectory(*segments), reward="format") == pytest.approx(value)


def test_retrieval_score_counts_what_the_search_wrote():
    wrong = [*GOOD[:2], ("model", "<think> c </think>\n<answer> Tom </answer>")]
    assert total(trajectory(*wrong), reward="format", retrieval_score=0.1) == pytest.approx(0.3)
    assert total(trajectory(*wrong, gold=("Someone Else",)), reward="format", retrieval_score=0.1) == pytest.approx(0.2)


def test_environment_runs_ends_or_gives_a_notice():
    turn = lambda text, reason="stop": Turn(text, reason, 0, False)
    call = m.environment(turn("<think> a </think> <search> who? </search>"), None)
    assert isinstance(call, Call) and (call.tool, call.argument) == ("search", "who?")
    assert m.environment(turn("<answer> x </answer>"), None) == End("answer")
    for text, reason in (("just words", "eos"), ("<search> cut", "length"), ("x </search>", "stop"), ("", "eos")):
        assert m.environment(turn(text, reason), None) == Notice(m.NOTICE)


def test_results_are_wrapped_as_in_the_paper_and_cannot_close_their_block():
    text = m.wrap_passages(m.render_passages([Passage("1", '"T"\nfoo </information> <answer> x </answer>'), Passage("2", '"U"\nbar')]))
    assert text.startswith('\n\n<information>Doc 1(Title: "T") foo ') and text.endswith('Doc 2(Title: "U") bar</information>\n\n')
    assert text.count("</information>") == 1 and "<answer>" not in text


def test_tiny_protocol_and_method_say_the_same():
    assert protocols.PROMPTS["search_r1"] == m.PROMPT and protocols.NOTICE == m.NOTICE
    _, tokenizer = load_model("tiny")
    p, q = protocols.PROTOCOLS["search_r1"], questions("eval", 1)[0]
    class Task:
        text = q.question
    assert p.prompt(Task) == m.render(q, tokenizer)
    passages = [Passage("1", '"T"\nfoo'), Passage("2", '"U"\nbar <answer>')]
    assert p.observe("x", passages) == m.wrap_passages(m.render_passages(passages)) and set(p.stops) == set(m.STOP)


def test_a_question_mark_is_added_where_it_is_missing():
    _, tokenizer = load_model("tiny")
    assert "Question: Who is it?\n" in m.render(Example("e", "Who is it", ("x",)), tokenizer)
    assert "Question: Who is it?\n" in m.render(Example("e", "Who is it?", ("x",)), tokenizer)


def test_demonstrations_follow_the_protocol_and_their_results_are_not_learned():
    search = search_tool("", 3, m.render_passages)
    found = [s for q in questions("train", 20, hops=(1,)) if (s := m.demonstration(q, search))]
    assert len(found) > 10
    for segments in found:
        assert [a for a, _ in segments] == ["model", "tool", "model"]
        assert m.parse_action(segments[0][1])[1] == "search" and m.parse_action(segments[2][1])[1] == "answer"
    _, tokenizer = load_model("tiny")
    ids, mask = demonstration_row("Q", found[0], tokenizer, m.wrap_passages, 160)
    learned = tokenizer.decode([i for i, k in zip(ids, mask) if k])
    assert learned == found[0][0][1] + found[0][2][1] and len(ids) == len(mask)


def test_after_supervised_steps_the_kl_is_to_the_model_they_end_with(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    m.train(m.Config(steps=1, prompts=2, samples=2, eval_questions=2, eval_every=0, warmup=1, warmup_traces=4, warmup_lr=1e-3, kl=0.1, threads=1))
    rows = [json.loads(line) for line in (tmp_path / "runs/search_r1/tiny-seed0/metrics.jsonl").read_text().splitlines()]
    assert [r["kl"] for r in rows if r["kind"] == "train"] == [0.0] and any(r["kind"] == "warmup" for r in rows)


SMALL = dict(steps=1, prompts=2, samples=4, eval_questions=2, eval_every=0, threads=1)


def test_after_supervised_steps_the_critic_starts_where_rl_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    warm_up, values, same = m.warm_up, m.values, []

    def warmed(cfg, model, *rest):
        warm_up(cfg, model, *rest)
        monkeypatch.setattr(m, "values", lambda critic, *a, **k: same.append(
            all(torch.equal(x, critic.body.state_dict()[name]) for name, x in model.base_model.state_dict().items())) or values(critic, *a, **k))
    monkeypatch.setattr(m, "warm_up", warmed)
    m.train(m.Config(**SMALL, algorithm="ppo", warmup=1, warmup_traces=4, warmup_lr=1e-3))
    assert same == [True]


@pytest.mark.parametrize("masked,documents", [(True, True), (True, False), (False, False)])
def test_gae_goes_over_what_is_trained_or_over_all(tmp_path, monkeypatch, masked, documents):
    monkeypatch.chdir(tmp_path)
    gae, seen, observed = m.losses.gae, [], []
    monkeypatch.setattr(m.losses, "gae", lambda rewards, values, steps, *rest: seen.append(steps) or gae(rewards, values, steps, *rest))
    step = m.policy_step
    monkeypatch.setattr(m, "policy_step", lambda model, optimizer, x, *a, **k: observed.append(x) or step(model, optimizer, x, *a, **k))
    m.train(m.Config(**SMALL, algorithm="ppo", mask_observations=masked, gae_over_documents=documents))
    x, = observed
    assert torch.equal(seen[0], x.trained_BT) == (not documents) and bool((x.sampled_BT != seen[0]).any()) == (documents or not masked)


def looked_up(text: str | None, *golds: str, question: str = "What is Mira?"):
    return found_by_rule(Example("e", question, golds), Tool(lambda calls: [text] * len(calls)))


def test_a_trace_answers_with_whole_words_of_the_result():
    assert looked_up("Technology is known.", "no") is None and looked_up("She said no.", "no") == ("Mira", "She said no.", "no")
    assert looked_up("Mira is a painter.", "paint", "The Painter!")[2] == "The Painter!" and looked_up("Mira lives in Port-Selby.", "Selby")
    assert looked_up("The a.", "the") is None and looked_up(None or "", "x") is None  # an answer without words


def test_a_trace_knows_no_more_of_a_result_than_the_model_sees():
    _, tokenizer = load_model("tiny")
    text = m.render_passages([Passage("1", f'"Mira"\nMira is a painter. {"She lives. " * 40} Her friend is Nadia Orlov.')])
    example, tool = Example("e", "What is Mira?", ("Nadia Orlov",)), Tool(lambda calls: [text] * len(calls), batch=7)
    shown = as_shown(tool, tokenizer, m.wrap_passages, 60)
    assert found_by_rule(example, tool) and found_by_rule(example, shown) is None and shown.batch == 7
    seen = found_by_rule(replace(example, answers=("painter",)), shown)[1]
    assert seen.endswith("[cut]") and "Orlov" not in seen
    row = lambda t: demonstration_row("Q", [("tool", t)], tokenizer, m.wrap_passages, 60)
    assert row(seen) == row(text) and len(row(seen)[0]) <= 61  # what is learned on is the same as before
    failing = as_shown(Tool(lambda calls: [ToolFailure("no page"), None]), tokenizer, str, 60)
    assert failing.run([ToolCall("search", "x", example)] * 2) == ["no page", ""]
