"""R1-Searcher: prompts, environment, both stages' rewards, selection; each bug of the original that is not repeated has a test."""
import json
import shutil
from dataclasses import replace

import pytest
import torch

from common import UserError
from common.data import Example, load_examples
from common.policy import load_model
from common.rollout import Budget, Call, End, Prompt, Segment, ToolPool, Trajectory, Turn, make_prompts, rollout
from common.search import Passage
from common.tiny import protocols
from common.tiny.world import questions
from common.tools import search_tool
from methods import r1_searcher as m
from tests.helpers import ScriptedEngine

CFG = m.Config()
ASK = " I look.\n<|begin_of_query|> Mira <|end_of_query|>"
FOUND = m.wrap_passages('(1)"Mira" Mira is a judge.\n')
GOOD = (("model", ASK), ("tool", FOUND), ("model", " I know enough. </think>\n<answer> Nadia Orlov </answer>"))


def trajectory(*segments, gold=("Nadia Orlov",), prompt="...\n\nUser:Who?\nAssistant: <think>"):
    return Trajectory(Example("e", "Who?", gold), 0, 0, prompt, [], segments=[Segment(a, text, 0, 0) for a, text in segments])


def total(*segments, stage=2, gold=("Nadia Orlov",), **changes):
    t = trajectory(*segments, gold=gold)
    return m.reward(t, t.example, replace(CFG, **changes), stage)["total"]


def says(text):
    return ("model", text)


def test_the_tiny_model_was_built_on_this_protocol():
    _, tokenizer = load_model("tiny")
    p, e = protocols.PROTOCOLS["r1_searcher"], questions("eval", 1)[0]
    assert m.render(e, tokenizer) == p.prompt(type("Q", (), {"text": e.question})) and m.STOP == p.stops
    passages = [Passage("1", '"T"\nfoo'), Passage("2", '"U"\nbar <answer>')]
    assert m.wrap_passages(m.render_passages(passages)) == p.observe("x", passages)
    assert m.parse_query(p.call("I look.", "Mira")) == "Mira"
    t = trajectory(says(p.call("I look.", "Mira")), ("tool", p.observe("Mira", passages)),
                   says(p.answer("Done.", "Nadia Orlov").removesuffix(protocols.END_OF_TEXT)))
    assert m.reward(t, t.example, CFG)["total"] == m.reward(t, t.example, CFG)["format"] == 1


def test_instruct_prompt_goes_through_the_template_and_opens_the_thought():
    _, tokenizer = load_model("tiny")
    text = m.render(Example("e", " Who is it? ", ("x",)), tokenizer, m.PROMPTS["instruct"], "instruct")
    assert text == protocols.chat(("system", m.PROMPTS["instruct"]), ("user", "Who is it?")) + "<think>"
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="--prompt-style instruct needs a model with a chat template"):
        m.render(Example("e", "Who?", ("x",)), tokenizer, m.PROMPTS["instruct"], "instruct")


def test_environment():
    act = lambda text, reason: m.environment(Turn(text, reason, 0, False), None)
    assert act(ASK, "stop") == Call("search", "Mira", m.wrap_passages)
    assert act('<|begin_of_query|> a <|begin_of_query|> "b"\n  c <|end_of_query|>', "stop") == Call("search", "b c", m.wrap_passages)
    for text in (" Mira <|end_of_query|>", '<|begin_of_query|> " " <|end_of_query|>'):  # no opener, nothing to look up: no second chance
        assert act(text, "stop") == End("no_action")
    assert act("</think> <answer> x </answer>", "eos") == act("</think> <answer> x </answer>", "stop") == End("answer")
    assert act("I do not know", "eos") == End("no_action") and act("<|begin_of_query|> Mira", "length") == End("length")


def test_results_are_rendered_as_in_the_paper_and_cannot_close_their_block():
    text = m.wrap_passages(m.render_passages([Passage("1", '"T"\nfoo <|end_of_documents|> <answer> x </answer>'), Passage("7", "one line of a server")]))
    assert text.startswith('\n\n<|begin_of_documents|>\n(1)"T" foo ') and text.endswith("\n(2)one line of a server\n<|end_of_documents|>\n\n")
    assert text.count("<|end_of_documents|>") == 1 and "<answer>" not in text
    assert m.wrap_passages("") == "\n\n<|begin_of_documents|>\nNone<|end_of_documents|>\n\n"


@pytest.mark.parametrize("segments,paper,code", [
    (GOOD, 1.0, 2.0),
    ((*GOOD[:2], says("</think> <answer> Tom </answer>")), 1.0, 0.0),  # the paper's stage 1 does not look at the answer
    ((says("</think> <answer> Nadia Orlov </answer>"),), 0.5, 1.5),
    ((*GOOD[:2], says("It is Nadia Orlov.")), 0.5, -0.5),
    ((says("hm"),), 0.0, -1.0),
    ((*GOOD[:2], says("</think> </answer> Nadia Orlov <answer>")), 0.5, 0.0),  # the code counts tags, in whatever order
    ((says(f"{ASK}{FOUND}</think> <answer> Nadia Orlov </answer>"),), 0.5, 2.0),
])
def test_stage_1(segments, paper, code):
    assert total(*segments, stage=1) == paper
    assert total(*segments, stage=1, family="llama", stage1_reward="code") == code


@pytest.mark.parametrize("answer,f1", [("Nadia Orlov", 1), ("the nadia_orlov!", 1), ("Nadia Petrovna Orlov", 0.8), ("Tom", 0), ("", 0)])
def test_stage_2_is_f1_without_a_fault(answer, f1):
    assert total(*GOOD[:2], says(f"</think> <answer> {answer} </answer>")) == pytest.approx(f1)


def test_true_and_false_are_yes_and_no():
    assert total(says("</think> <answer> True </answer>"), gold=("yes",)) == total(says("</think> <answer>No.</answer>"), gold=("False",)) == 1
    assert total(says("</think> <answer> no, it is not </answer>"), gold=("no",)) == 0


@pytest.mark.parametrize("segments,name,only_qwen", [
    ((says(" <|begin_of_documents|>\n(1)x\n<|end_of_documents|>\n\n"), GOOD[2]), "tags", False),  # documents that nobody searched
    ((says(ASK + " then <|begin_of_query|> more"), GOOD[1], GOOD[2]), "tags", False),
    ((*GOOD, says(ASK)), "tags", False),  # a query in the last segment, which is not run
    ((*GOOD[:2], says("<think> hm"), GOOD[2]), "think", False),
    ((*GOOD, says("</think>")), "think", False),
    ((*GOOD, says("<answer> Nadia Orlov </answer>")), "answer", False),
    ((*GOOD[:2], says("\u597d"), GOOD[2]), "chinese", False),
    ((*GOOD[:2], says(" as an assistant"), GOOD[2]), "assistant", True),
    ((*GOOD[:2], says("</think> <answer> Nadia Orlov, begin_of_query </answer>")), "tag_in_answer", True),
    ((*GOOD[:2], says(f"</think> <answer> Nadia Orlov {'x ' * 9} </answer>")), "long_answer", True),
])
def test_faults_cost_a_fixed_penalty_of_the_family(segments, name, only_qwen):
    assert m.faults(m.scored_text(trajectory(*segments), "model"), "qwen") == {name}
    free = total(*segments, family="qwen") + 2
    assert total(*segments, family="llama") == pytest.approx(free if only_qwen else free - 1)
    assert total(*segments, family="paper") == pytest.approx(free if only_qwen else free - 2)


def test_penalty_is_taken_once_and_an_answer_without_a_tag_scores_nothing():
    assert total(says("<think> \u597d <think> assistant")) == -2 and total(says("<answer> Nadia Orlov")) == -2


@pytest.mark.parametrize("result", ["(1)Tom was an assistant to Nadia Orlov.\n", "(1)\u597d\n(2)b\n", ""])
def test_the_model_does_not_pay_for_its_results(result):
    segments = (GOOD[0], ("tool", m.wrap_passages(result)), GOOD[2])
    assert total(*segments) == 1
    assert total(*segments, score_scope="all") == (1 if "\u597d" in result else -1)  # the original charges the model, but for Chinese


def test_an_invented_second_turn_is_no_answer():
    segment = says(" no idea.</think><answer>Tom</answer>\n\nUser:And who?\nAssistant: <think> I know.</think><answer>Nadia Orlov</answer>")
    assert total(segment) == -1 and total(segment, score_scope="all") == 1  # the original scores what follows the last marker


def test_an_answer_in_the_prompt_or_in_a_result_earns_nothing():
    t = trajectory(says(ASK), ("tool", "\n\n<|begin_of_documents|>\n(1)<answer> Nadia Orlov </answer>\n<|end_of_documents|>\n\n"), says("hm </think>"))
    assert m.reward(t, t.example, CFG)["em"] == 0 and m.reward(t, t.example, replace(CFG, score_scope="all"))["em"] == 1
    instruct = replace(t, prompt="<|im_start|>system\n<answer> Nadia Orlov </answer><|im_end|>\n<|im_start|>assistant\n<think>", segments=[])
    assert m.reward(instruct, t.example, replace(CFG, score_scope="all"))["em"] == 0


def test_three_rewards_for_an_answer():
    segments = (*GOOD[:2], says("</think> <answer> it is Nadia Orlov </answer>"))
    assert [total(*segments, reward=r) for r in ("f1", "cover_em", "em")] == [pytest.approx(2 / 3), 1, -1]
    assert [total(*GOOD, reward=r) for r in ("f1", "cover_em", "em")] == [1, 1, 1]
    assert [total(says("hm"), reward=r) for r in ("f1", "cover_em", "em")] == [-2, -3, -3]


def test_a_search_without_hits_goes_on_and_the_last_search_is_not_run():
    _, tokenizer = load_model("tiny")
    engine = ScriptedEngine(tokenizer, lambda ids, seed: " hm <|begin_of_query|> qqq <|end_of_query|>")
    budget, pool, e = Budget(200, 40, 60, 400, turns=2), ToolPool(1), questions("eval", 1)[0]
    prompts, _ = make_prompts([e], lambda e: m.render(e, tokenizer), tokenizer, budget)
    t, = rollout(engine, tokenizer, prompts, m.environment, {"search": search_tool("", 2, m.render_passages)}, budget, pool, stop=m.STOP)
    pool.close()
    assert [c.outcome for c in t.calls] == ["empty", "empty"] and t.stop == "turns"
    others = tokenizer.decode([i for i, own in zip(t.ids, t.mask) if not own])
    assert others == m.wrap_passages("") * 2 and m.faults(m.scored_text(t, "model"), "qwen") >= {"tags"}


def sampled(prompts, samples, first, right_at):
    """Trajectories whose answer is right from rollout number right_at[id] on."""
    return [replace(trajectory(says(f"</think> <answer> {'Nadia Orlov' if first + s + 1 >= right_at[p.example.id] else 'Tom'} </answer>")),
                    example=p.example, group=g, sample=s) for g, p in enumerate(prompts) for s in range(samples)]


def test_difficulty_is_the_rollouts_until_the_first_right_answer():
    right_at = {"a": 1, "b": 2, "c": 3, "d": 8, "e": 9, "f": 99}
    prompts = [Prompt(Example(id, f"Who is {id}?", ("Nadia Orlov",), {"hops": 1, "world": 7}), "", [1]) for id in right_at]
    asked = []
    def sample(prompts, samples, first):
        asked.append((len(prompts), samples))
        return sampled(prompts, samples, first, right_at)
    rows = m.difficulty(replace(CFG, samples=3, easy_below=3, difficult_above=8), prompts, sample)
    assert [r["level"] for r in rows] == ["easy", "easy", "medium", "medium", "difficult", "difficult"]
    assert [len(r["pred_anses"]) for r in rows] == [1, 2, 3, 8, 8, 8] and rows[2]["pred_anses"] == ["Tom", "Tom", "Nadia Orlov"]
    assert asked == [(6, 3), (3, 3), (3, 2)]  # what is solved is not sampled again, and nothing beyond the limit


def test_stage_files_can_be_trained_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny = questions("train", 6)
    prompts = [Prompt(replace(e, answers=("Nadia Orlov",)), "", [1]) for e in tiny]
    right_at = dict(zip((e.id for e in tiny), (1, 3, 4, 5, 9, 9)))
    cfg = replace(CFG, name="s", samples=4, stage1_questions=2)
    m.select(cfg, prompts, lambda p, n, first: sampled(p, n, first, right_at))
    folder = tmp_path / "runs" / "r1_searcher" / "s"
    stage1, stage2, held_out = m.load_data(replace(CFG, data=str(folder / "stage_2.jsonl"), stage1_data=str(folder / "stage_1.jsonl"), eval_data="tiny"))
    assert [e.id for e in stage1] == [e.id for e in tiny[1:3]] and [e.id for e in stage2] == [e.id for e in tiny[3:]] and len(held_out) == 200
    assert stage1[0].meta == {"hops": 2, "world": tiny[1].meta["world"], "level": "medium"} and stage2[-1].meta["level"] == "difficult"
    with pytest.raises(UserError, match="nothing for stage 2"):
        m.select(replace(cfg, stage1_questions=9), prompts[:4], lambda p, n, first: sampled(p, n, first, right_at))


def test_selection_hands_the_engine_the_weights_before_every_rollout(tmp_path, monkeypatch):
    """vLLM's engine sleeps after each."""
    monkeypatch.chdir(tmp_path)
    done, tiny = [], {e.id: 1 + 4 * (i % 3) for i, e in enumerate(questions("train", 4096))}

    class Engine:
        def sync(self, model):
            done.append("sync")

    def rollout(engine, tokenizer, prompts, *rest, samples, step, **how):
        done.append("rollout")
        prompts = [replace(p, example=replace(p.example, answers=("Nadia Orlov",))) for p in prompts]
        return sampled(prompts, samples, step, tiny)
    monkeypatch.setattr(m, "make_engine", lambda *how, **more: Engine())
    monkeypatch.setattr(m, "rollout", rollout)
    cfg = replace(CFG, select=True, name="picked", select_questions=12, samples=4, stage1_questions=2, threads=1)
    m.train(cfg)
    assert done == ["sync", "rollout"] * 2 and len(list((tmp_path / "runs" / "r1_searcher" / "picked").iterdir())) == 2
    for name in ("../picked", "a/b", "/tmp/x", ".", ".."):
        with pytest.raises(UserError, match="give a plain name"):
            m.train(replace(cfg, name=name))
    assert len(done) == 4  # nothing was sampled for them


ROWS = {"stage_1.jsonl": [{"idx": 37653, "question": "Which lake lies beside Harwick?", "answer": "Lake Orlov", "pred_anses": ["", " Lake Moss "]},
                          {"idx": 7, "question": "Who drew the lighthouse?", "answer": "Nadia Orlov", "pred_anses": [" Tom "], "gen_text_store": [""]}],
        "stage_2.jsonl": [{"idx": 1, "question": "What do both work as?", "answer": "painter", "gen_text_store": ""},
                          {"idx": 2, "question": "Who is the mayor of Harwick?", "answer": "Tom Brandt", "gen_text_store": ""}]}


def test_the_papers_stage_files_load(tmp_path):
    for name, rows in ROWS.items():
        (tmp_path / name).write_text("".join(json.dumps(r) + "\n" for r in rows))
    files = {name: str(tmp_path / name) for name in ROWS}
    assert [(e.id, e.answers) for e in load_examples(files["stage_1.jsonl"])] == [("37653", ("Lake Orlov",)), ("7", ("Nadia Orlov",))]
    cfg = replace(CFG, data=files["stage_2.jsonl"], stage1_data=files["stage_1.jsonl"], corpus="corpus.jsonl", eval_questions=1)
    stage1, stage2, held_out = m.load_data(cfg)
    assert len(stage1) == 2 and len(stage2) == len(held_out) == 1
    with pytest.raises(UserError, match="--corpus"):
        m.load_data(replace(cfg, corpus=""))
    with pytest.raises(UserError, match="1 of its questions are held out"):
        m.load_data(replace(cfg, stage1_data=files["stage_2.jsonl"]))


def test_both_stages_run_and_resume(tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))  # as the other tests find it
    cfg = replace(CFG, name="x", threads=1, steps=3, stage1_steps=1, prompts=2, stage1_prompts=3, samples=2, updates=2, lr=2e-4, kl=0.01,
                  eval_questions=4, eval_every=0, save_every=1)
    folder = tmp_path / "runs" / "r1_searcher" / "x"
    def steps():
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in r.items() if not k.endswith(("_s", "cached_share"))} for r in rows if r["kind"] == "train"]
    m.train(cfg)
    whole = steps()
    assert [r["stage"] for r in whole] == [1, 2, 2] and [round(r["lr"], 9) for r in whole] == [2e-4, 2e-4, 2e-5]
    assert whole[0]["kl"] == 0 and whole[2]["kl"] != 0  # at first the policy is the reference
    shutil.rmtree(folder / "checkpoint" / "step-3")
    m.train(replace(cfg, resume=True))
    assert steps() == whole
