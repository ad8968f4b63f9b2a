"""The papers' own settings: what they say, that --plan works for each without a network, and one step of each on rows of the same schema.

The step exercises everything but the downloads and the size: a small model from a folder, rows as the data set has them, servers on loopback
that speak the protocols of the retrievers, the judge and the reading agent.
"""
import http.server
import importlib
import json
import socket
import threading
from pathlib import Path

import pytest

from common.plan import _count
from common.policy import TINY_FOLDER
from common.run import parse_config
from common.search import BM25, Passage
from common.web import LocalWeb

SEARCH_R1 = dict(model="Qwen/Qwen2.5-7B", data="PeterJinGo/nq_hotpotqa_train", steps=1005, prompts=512, samples=5, updates=10, max_turns=4, topk=3,
                 prompt_tokens=2048, turn_tokens=500, observation_tokens=500, trajectory_tokens=4096, temperature=1.0, lr=1e-6, warmup_steps=286,
                 critic_lr=1e-5, critic_warmup_steps=15, clip=0.2, value_clip=0.5, kl=0.001, entropy=0.001, gamma=1.0, lam=1.0, weight_decay=0.01,
                 max_grad_norm=1.0, mask_observations=True, algorithm="grpo", aggregation="token", dtype="float32")
R1_SEARCHER = dict(model="Qwen/Qwen2.5-7B", data="XXsongLALA/RAG-RL-Hotpotqa-with-2wiki", steps=119, stage1_steps=0, prompts=64, samples=16, updates=4,
                   max_turns=8, topk=3, turn_tokens=512, temperature=1.0, lr=2e-6, warmup_steps=0, clip=0.2, kl=0.0, weight_decay=0.0, reward="f1",
                   aggregation="sequence", family="qwen", prompt_style="base", easy_below=10, difficult_above=20, stage1_questions=350, dtype="float32")
PUBLISHED = {  # (method, preset) -> what its paper or code says; learning rates stay constant after their warm-up, R1-Searcher's cosine apart
    ("search_r1", "paper"): SEARCH_R1 | dict(reward="em"),
    ("otc", "paper"): SEARCH_R1 | dict(task="search", tool_reward="multiply", alpha=1.0, c=0.0),
    ("research", "paper"): dict(
        model="Qwen/Qwen2.5-7B", data="RUC-NLPIR/FlashRAG_datasets:musique", steps=154, prompts=256, samples=5, updates=1, topk=5, prompt_tokens=512,
        trajectory_tokens=8192, temperature=1.0, lr=1e-6, warmup_steps=0, clip=0.2, kl=0.001, entropy=0.001, weight_decay=0.01, max_grad_norm=1.0,
        reward="f1", floor=0.1, format_rule="code", prompt_style="base", aggregation="token", dtype="float32"),
    ("r1_searcher", "paper"): R1_SEARCHER,
    ("r1_searcher", "paper_llama"): R1_SEARCHER | dict(
        model="meta-llama/Llama-3.1-8B-Instruct", data="stage_2.jsonl", stage1_data="stage_1.jsonl", steps=140, stage1_steps=23, prompts=65,
        stage1_prompts=15, kl=1e-4, stage1_scale="group", stage1_reward="code", family="llama", prompt_style="instruct"),
    ("deep_researcher", "paper"): dict(
        model="Qwen/Qwen2.5-7B-Instruct", data="train.parquet", steps=34, prompts=256, samples=16, updates=1, max_turns=10, answer_turn=False, topk=10,
        queries=3, turn_tokens=2000, temperature=1.0, lr=1e-6, warmup_steps=0, clip=0.2, kl=0.001, entropy=0.001, portion_chars=40960, cache_days=7.0,
        reader_model="qwen-plus", reward="f1", warmup=0, aggregation="token", dtype="float32"),
    ("torl", "paper"): dict(
        model="Qwen/Qwen2.5-Math-1.5B", data="GAIR/ToRL", steps=1000, prompts=128, samples=16, updates=1, max_turns=1, run_timeout=10.0, prompt_tokens=400,
        turn_tokens=3072, trajectory_tokens=3072, observation_chars=256, temperature=1.0, lr=1e-6, warmup_steps=0, clip=0.2, entropy=0.0,
        weight_decay=0.01, max_grad_norm=1.0, reward="answer", execution_penalty=0.0, eval_every=4, save_every=20, dtype="float32"),
    ("retool", "paper"): dict(
        model="Qwen/Qwen2.5-32B-Instruct", data="BytedTsinghua-SIA/DAPO-Math-17k", steps=400, prompts=512, samples=16, updates=8, max_turns=8,
        run_timeout=30.0, prompt_tokens=2048, trajectory_tokens=16384, observation_chars=400, temperature=1.0, lr=1e-6, warmup_steps=0, clip_low=0.2,
        clip_high=0.28, dual_clip=10.0, critic_lr=2e-6, policy_from_step=20, reward="answer", cold_start=372, cold_start_data="JoeYing/ReTool-SFT",
        cold_start_traces=2000, cold_start_batch=32, cold_start_lr=1e-5, eval_every=10, save_every=30, dtype="float32"),
    ("swirl", "paper"): dict(  # optimiser, rates, batch and KL are not published
        model="google/gemma-2-27b-it", data="hotpotqa/hotpot_qa:distractor", questions=10000, per_question=5, filter="process", trajectories=0,
        max_queries=0, topk=1, judge_model="gemini-1.5-pro", eval_questions=300, dtype="float32"),
    ("toolrl", "paper"): dict(
        model="Qwen/Qwen2.5-3B-Instruct", data="emrecanacikgoz/ToolRL", steps=105, prompts=512, samples=4, updates=4, prompt_tokens=2048, turn_tokens=1024,
        temperature=1.0, lr=1e-6, warmup_steps=0, critic_lr=1e-5, clip=0.2, value_clip=0.5, kl=0.0, entropy=0.001, weight_decay=0.01, max_grad_norm=1.0,
        reward="graded", granularity="original", matching="greedy", scale="fixed", length="off", length_target=512, two_stage_step=30, sft_steps=0,
        sft_batch=16, sft_lr=1e-5, eval_every=5, save_every=15, dtype="float32"),
    ("tool_n1", "paper"): dict(
        model="Qwen/Qwen2.5-7B-Instruct", data="Salesforce/xlam-function-calling-60k,Team-ACE/ToolACE", steps=150, prompts=1024, samples=5, updates=4,
        prompt_tokens=4096, turn_tokens=8192, temperature=0.7, lr=1e-6, warmup_steps=0, clip=0.2, kl=0.001, entropy=0.0, weight_decay=0.01,
        max_grad_norm=1.0, reward="binary", sft_batch=32, sft_lr=2e-5, eval_every=10, save_every=10, dtype="float32"),
}
every_preset = pytest.mark.parametrize("name,preset", PUBLISHED, ids=["-".join(key) for key in PUBLISHED])


def config(name: str, preset: str, *flags: str):
    method = importlib.import_module(f"methods.{name}")
    return method, parse_config(method.Config, method.PRESETS, ["--preset", preset, *flags])


@every_preset
def test_what_the_paper_says(name, preset):
    _, cfg = config(name, preset)
    assert {k: getattr(cfg, k) for k in PUBLISHED[name, preset]} == PUBLISHED[name, preset]


@every_preset
def test_plan_without_a_network(name, preset, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for call in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, call, lambda *_: pytest.fail("the plan asked the network"))
    method, cfg = config(name, preset, "--plan")
    monkeypatch.setattr(method, "load_model", lambda *_: pytest.fail("the plan loaded a model"))
    method.train(cfg)
    shown = capsys.readouterr().out
    assert f"preset {preset}: {cfg.model}" in shown and f"{cfg.steps:,} steps" in shown
    generations = max(cfg.prompts, getattr(cfg, "stage1_prompts", 0)) * cfg.samples
    assert f"{_count(generations)} generations (" in shown and f"{_count(cfg.steps * generations)} generations," in shown and "GB per GPU" in shown
    assert ("reference" in shown) == bool(getattr(cfg, "kl", 0)) and "critic" not in shown
    assert not list(tmp_path.iterdir())


# ---- one step on rows of the same schema ------------------------------------------------------------------------------
def maths_row(i: int) -> dict:
    return {"data_source": "x", "prompt": [{"role": "system", "content": "Please reason."}, {"role": "user", "content": f"What is {i} + 1?"}],
            "ability": "other", "reward_model": {"ground_truth": str(i + 1), "stype": "rule"}, "extra_info": {"id": i, "split": "train"}}


def dapo_row(i: int) -> dict:
    text = (f"Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer (without quotes) "
            f"where $Answer is the answer to the problem.\n\nWhat is {i % 6} + 1?\n\nRemember to put your answer on its own line after \"Answer:\".")
    return {"data_source": "math_dapo", "prompt": [{"content": text, "role": "user"}], "ability": "MATH",
            "reward_model": {"ground_truth": str(i % 6 + 1), "style": "rule-lighteval/MATH_v2"}, "extra_info": {"index": f"id-{i % 6}"}}


SEARCH_R1_ROW = lambda i: {
    "id": f"train_{i}", "question": f"who wrote book {i}", "golden_answers": [f"Author {i}"], "data_source": "nq" if i % 2 else "hotpotqa",
    "prompt": [{"role": "user", "content": f"Answer the given question ... <answer> Beijing </answer>. Question: who wrote book {i}?\n"}],
    "ability": "fact-reasoning", "reward_model": {"style": "rule", "ground_truth": {"target": [f"Author {i}"]}}, "extra_info": {"split": "train", "index": i // 2}}
TOOLS = '**Available Tools**\n1. Name: f\nDescription: Adds.\nParameters: {"x": {"description": "a number", "type": "int", "default": ""}}'
ROWS = {  # name of the file -> its rows, as the data set of the preset has them
    "search_r1": {"data.jsonl": SEARCH_R1_ROW},
    "otc": {"data.jsonl": SEARCH_R1_ROW},
    "research": {"data.jsonl": lambda i: {"id": f"2hop__{i}_{i}", "question": f"Who wrote book {i}?", "golden_answers": [f"Author {i}"],
                                          "metadata": {"answerable": True, "question_decomposition": [{"id": i, "question": "q"}]}}},
    "r1_searcher": {"data.jsonl": lambda i: {"idx": i, "question": f"Who wrote book {i}?", "answer": f"Author {i}", "gen_text_store": ""},
                    "stage_1.jsonl": lambda i: {"idx": 100 + i, "question": f"Who read book {i}?", "answer": f"Reader {i}", "pred_anses": ["", "A"]}},
    "deep_researcher": {"data.jsonl": lambda i: {
        "data_source": "nq", "prompt": [{"content": f"who wrote book {i}?", "role": "user"}], "ability": "search & question answering",
        "reward_model": {"ground_truth": f"Author {i}<|answer_split|>A. {i}", "style": "unknown"}, "extra_info": {"index": f"nq_{i}", "split": "train"}}},
    "torl": {"data.jsonl": maths_row},
    "retool": {"data.jsonl": dapo_row, "sft.jsonl": lambda i: {"messages": [
        {"role": "user", "content": f"Solve the problem.\n*user question:*\nWhat is {i} + 1?"},
        {"role": "assistant", "content": f"I compute.\n<code>\n```python\nprint({i} + 1)\n```\n</code>\n<interpreter>\n{i + 1}\n</interpreter>\n"
                                         f"<answer>\n\\boxed{{{i + 1}}}\n</answer>"}]}},
    "swirl": {"data.jsonl": lambda i: {"id": f"5a{i}", "question": f"Who wrote book {i}?", "answer": f"Author {i}", "type": "bridge",
                                       "level": "easy" if i % 4 == 0 else "hard", "supporting_facts": {"title": ["Book"], "sent_id": [0]},
                                       "context": {"title": ["Book"], "sentences": [["A book."]]}}},
    "toolrl": {"data.jsonl": lambda i: {
        "data_source": "rlla", "prompt": [{"content": TOOLS, "role": "system"}, {"content": f"**Dialogue Records History**\n<user> Add {i}. </user>", "role": "user"}],
        "ability": "math", "extra_info": {"index": i, "split": "train", "input": "", "instruction": "", "output": ""}, "reward_model": {"style": "rule",
            "ground_truth": f'<think> I use f. </think>\n<tool_call>\n{{"name": "f", "parameters": {{"x": {i}}}}}\n</tool_call>'}}},
    "tool_n1": {
        "data.jsonl": lambda i: {"id": i, "query": f"Add {i}.", "answers": json.dumps([{"name": "f", "arguments": {"x": i}}]), "tools": json.dumps([
            {"name": "f", "description": "Adds.", "parameters": {"x": {"description": "a number", "type": "int", "default": ""}}}])},
        "toolace.jsonl": lambda i: {"system": 'You are an expert in composing functions. Here is a list of functions in JSON format that you can invoke:\n'
            '[{"name": "g", "description": "Adds.", "parameters": {"type": "dict", "properties": {"x": {"type": "int"}}}}]. \nUse [g(x=1)].',
            "conversations": [{"from": "user", "value": f"Add {i} with g."}, {"from": "assistant", "value": f"[g(x={i})]"}]}},
}
LOOPBACK = {  # flags that put a server, a file or a smaller number in the place of the preset's
    "search_r1": ["--corpus", "{url}"], "otc": ["--corpus", "{url}"], "research": ["--corpus", "research+{url}"], "r1_searcher": ["--corpus", "r1_searcher+{url}"],
    "deep_researcher": ["--search", "{web}/search", "--allow", "{web_address}", "--reader", "{url}/v1"],
    "torl": ["--sandbox", "unsafe"], "retool": ["--sandbox", "unsafe", "--cold-start", "1", "--cold-start-data", "sft.jsonl"],
    "swirl": ["--corpus", "{url}", "--judge", "{url}/v1", "--questions", "2"],
    "toolrl": [], "tool_n1": [],
}
SMALL = {"steps": 1, "prompts": 2, "samples": 2, "eval_questions": 1, "eval_every": 0, "threads": 1, "prompt_tokens": 1900, "turn_tokens": 24,
         "observation_tokens": 64, "trajectory_tokens": 96, "micro_tokens": 2048}


class Answers(http.server.BaseHTTPRequestHandler):
    """The three retrievers' protocols, and a chat model that finds everything good."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(self.path)
        document = {"id": "1", "contents": '"Book 1"\nBook 1 was written by Author 1.'}
        answer = {"/retrieve": lambda: {"result": [[{"document": document, "score": 1.0}] for _ in body["queries"]]},
                  "/batch_search": lambda: [[document] for _ in body["query"]],
                  "/queries": lambda: {"queries": body["queries"], "answers": [["1\tTitle: Book 1 Text: Book 1 was written by Author 1."] for _ in body["queries"]]},
                  "/v1/chat/completions": lambda: {"choices": [{"message": {"role": "assistant", "content": "GOOD"}}]}}[self.path]()
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def servers():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.asked = []
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    web = LocalWeb({"": BM25([Passage(str(i), f'"Book {i}"\nBook {i} was written by Author {i}.') for i in range(9)])})
    yield {"url": f"http://127.0.0.1:{server.server_port}", "web": web.search_url().removesuffix("/search"), "web_address": web.address}, server.asked
    web.close()
    server.shutdown()
    server.server_close()


@every_preset
def test_one_step_of_the_preset(name, preset, servers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    for file, row in ROWS[name].items():
        Path(file).write_text("".join(json.dumps(row(i)) + "\n" for i in range(12)))
    where, asked = servers
    asked.clear()
    data = "data.jsonl,toolace.jsonl" if name == "tool_n1" else "data.jsonl"
    method, _ = config(name, preset)
    flags = [f"--model={TINY_FOLDER}", "--device=cpu", f"--data={data}", "--name=small", *(f.format(**where) for f in LOOPBACK[name])]
    flags += [f"--{k.replace('_', '-')}={v}" for k, v in SMALL.items() if k in method.Config.__dataclass_fields__]
    if preset == "paper_llama":
        flags += ["--stage1-steps=1", "--stage1-prompts=2", "--steps=2"]
    _, cfg = config(name, preset, *flags)
    assert cfg.gradient_checkpointing
    loaded, load = [], method.load_model
    monkeypatch.setattr(method, "load_model", lambda *how: loaded.append(how) or load(*how))
    method.train(cfg)
    assert [len(how) for how in loaded] == [4, 3][:1 + bool(getattr(cfg, "kl", 0))]  # a reference only where a KL term needs it
    rows = [json.loads(line) for line in Path(f"runs/{name}/small/metrics.jsonl").read_text().splitlines()]
    steps = [r for r in rows if r["kind"] == "train"]
    assert [r["step"] for r in steps] == list(range(1, cfg.steps + 1)) and rows[-1]["kind"] == "eval"
    assert all(r["sampled_tokens"] > 0 and r.get("skipped_prompts", 0) == 0 for r in steps)
    assert steps[0]["grad_norm"] > 0 or not (getattr(cfg, "kl", 0) or getattr(cfg, "entropy", 0))  # with either, every row is trained on
    expected = {"search_r1": "/retrieve", "otc": "/retrieve", "research": "/batch_search", "r1_searcher": "/queries", "swirl": "/v1/chat/completions"}
    assert name not in expected or expected[name] in asked


def test_dapo_problems_come_bare_and_once(tmp_path):
    from methods.retool import load_problems
    path = tmp_path / "dapo.jsonl"
    path.write_text("".join(json.dumps(dapo_row(i)) + "\n" for i in range(30)) + json.dumps({"problem": "Solve x = 1.\n\nShow it.", "answer": "1"}) + "\n")
    assert [e.question for e in load_problems(str(path))] == [f"What is {i} + 1?" for i in range(6)] + ["Solve x = 1.\n\nShow it."]
