"""R1-Searcher: first learn to call the search engine at all, then learn to answer with it.

Paper: "R1-Searcher: Incentivizing the Search Capability in LLMs via Reinforcement Learning", arXiv 2503.05592. Code: github
RUCAIBox/R1-Searcher (commit 631167c, a fork of OpenRLHF).

The idea. Training has two stages. The first pays for searching and for the right format, whatever the answer, on questions of medium
difficulty; the second pays for the answer (word F1) and takes a fixed penalty off for a format fault, on medium and difficult ones. There is
no critic and no supervised start: REINFORCE++ with a group's mean as the baseline, its advantages whitened over the whole batch.

The method, step by step:
  1. `select` (`--select`) samples every question until its first right answer; the number of rollouts says how difficult it is.
  2. `PROMPTS` states the contract and ends in an opened <think>: queries and documents come in the middle of the thought.
  3. `environment` reads one segment: a closed query is run, anything else ends the trajectory. There is no second chance.
  4. `reward`, stage 1: 0.5 for a search, 0.5 for the format. Stage 2: F1, less 2 (Qwen) or 1 (Llama) for any of the `faults`.
  5. `train`: reward less the group's mean, less a k1 KL on every token (Llama), summed from the end, then whitened over all tokens that are
     no documents; Llama's stage 1 divides by the group's deviation instead.
  6. The clipped policy gradient runs over the tokens the model sampled, several updates a batch; every trajectory weighs the same.

Kept from the paper: tags, rendering of documents, both prompts, selection by rollouts needed, both stages' rewards (as the paper or as the
code, which adds +1 or -1 for the answer to stage 1), both families' penalties, estimator, KL placement, cosine schedule down to 10 %.
Changed, and why:
  - token in, token out: the original strips and glues text after every segment and tokenises it all again (ppo_utils/experience_maker.py),
    so the tokens it trains are not always those it sampled. We keep the ids; the mask comes from who wrote a token, not from a search for
    the ids of document tags, which also masks documents that the model invents.
  - the reward reads only what the model wrote (`score_scope`). The original counts tags and looks for the word "assistant" in the retrieved
    text too, so the model pays for its documents, and for a search that finds nothing; and it scores only what follows the last
    "Assistant: <think>", so an invented second turn replaces the answer (train/reward_server_qwen_zero.py).
  - a trajectory carries its gold answer and its group; the original looks the answer up by the question's words and sorts samples by idx.
  - temperature 1 without the code's top-p of 0.95: the trainer's log-probs are those of the whole distribution.
  - both stages are one run; each has its own cosine, as if it were a run of its own, but optimiser and KL reference stay.
  - the preset `paper` starts at stage 2, as the released script for Qwen does; `paper_llama` has both stages.

What to watch: `calls` rises in stage 1; `format` rises and `em` follows in stage 2; `answer_words` tells whether answers grow to please the
reward. The run's metric is `em`, the strictest of the three measures: whatever is rewarded, longer answers do not raise it.

    make r1_searcher                                          # tiny model and world, a few minutes on two cores
    make r1_searcher ARGS="--stage1-steps 0"                  # without stage 1
    make r1_searcher ARGS="--reward cover_em"                 # or em: the paper's comparison
    make r1_searcher ARGS="--select --name stages"            # stage_1.jsonl and stage_2.jsonl in runs/r1_searcher/stages/
    make r1_searcher ARGS="--stage1-data runs/r1_searcher/stages/stage_1.jsonl --data runs/r1_searcher/stages/stage_2.jsonl --eval-data tiny"
    make r1_searcher ARGS="--preset smollm2 --data questions.jsonl --corpus corpus.jsonl"
"""
import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from common import UserError, losses, ranks, scoring
from common.data import Example, load_examples, order, shared_questions, training_and_held_out
from common.engine import make_engine
from common.plan import print_plan
from common.policy import load_model, lr_at, make_optimizer, save_policy, shard
from common.report import write_report
from common.rollout import Budget, Call, End, Prompt, Tool, ToolPool, Trajectory, Turn, collate, make_prompts, rollout
from common.run import Clock, Run, folder_of, main, parse_config, print_evaluation, read_template, saved_config, set_up_torch, setting, write_atomic
from common.search import Passage, neutralise
from common.tiny.world import questions
from common.tools import search_tool
from common.update import Experience, joined, mini_batches, policy_step, score
from common.warmup import as_shown, found_by_rule, warm_up


# ---- Config -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Config:
    """Defaults are the preset `tiny`. A source names where the published value (preset `paper`) stands, or says that it is ours."""
    preset: str = setting("tiny", "defaults for the other flags: tiny, smollm2, paper (Qwen) or paper_llama", "ours")
    name: str = setting("", "name of the run's folder (default: preset and seed)", "ours")
    seed: int = setting(0, "seed of data order and sampling", "ours")
    steps: int = setting(36, "optimisation steps (one rollout batch each), stage 1 included", "paper §3.3")
    stage1_steps: int = setting(8, "how many of them, the first ones, are stage 1; 0: without stage 1", "code scripts/")
    resume: bool = setting(False, "go on with a run that was stopped or killed", "ours")
    stop_on_collapse: bool = setting(False, "save and stop at signs of collapse (common/health.py); they are always said", "ours")
    evaluate: str = setting("", "folder of a finished run: evaluate its model again instead of training", "ours")
    plan: bool = setting(False, "instead of training, print what these settings need: memory per GPU, tokens, disk; nothing is loaded", "ours")
    # model and data
    model: str = setting("tiny", "tiny, smollm2, a folder, or a hub id", "paper §3.3")
    dtype: Literal["float32", "bfloat16"] = setting("float32", "type of the weights", "ours")
    device: str = setting("cpu", "cpu or cuda", "ours")
    threads: int = setting(0, "CPU threads; 0: one per core", "ours")
    engine: Literal["hf", "vllm"] = setting("hf", "engine that samples: hf, or vllm (make setup_vllm)", "ours")
    data: str = setting("tiny", "training questions: tiny, a .jsonl, .json or .parquet file, or a hub data set id", "paper §2.1")
    stage1_data: str = setting("", "questions of stage 1, as --data (default: the same)", "paper §2.1")
    corpus: str = setting("", "corpus.jsonl in Search-R1's format, or the URL of a retriever (the tiny world needs none)", "paper §3.3")
    eval_data: str = setting("", "held-out questions, as --data (default: split off from the training questions)", "ours")
    eval_questions: int = setting(200, "held-out questions", "ours")
    eval_every: int = setting(12, "evaluate every so many steps, and before and after (greedy, same questions); 0: only before and after", "ours")
    save_every: int = setting(12, "checkpoint every so many steps", "ours")
    keep_trajectories: int = setting(4, "trajectories a step that are written to trajectories.jsonl", "ours")
    prompt_style: Literal["base", "instruct"] = setting("base", "plain dialogue, or system and user message through the chat template", "paper §2.2.2")
    template: str = setting("", "file with another prompt; base: it must hold {question}; instruct: the system message", "ours")
    # data selection
    select: bool = setting(False, "instead of training, sort questions by difficulty and write stage_1.jsonl and stage_2.jsonl", "paper §2.1")
    select_questions: int = setting(256, "training questions that are sorted", "ours")
    easy_below: int = setting(3, "easy: the first right answer took fewer rollouts than this", "paper §2.1", "rollouts")
    difficult_above: int = setting(8, "difficult: it took more than this; between the two: medium", "paper §2.1", "rollouts")
    stage1_questions: int = setting(48, "medium questions that go to stage 1; the others and the difficult ones go to stage 2", "paper §2.1")
    # rollout
    prompts: int = setting(12, "questions per step", "code scripts/")
    stage1_prompts: int = setting(0, "questions per step in stage 1; 0: as many", "code scripts/")
    samples: int = setting(8, "trajectories per question (the group of the baseline)", "code scripts/")
    max_turns: int = setting(3, "turns whose call is run; one more turn may answer", "code experience_maker.py")
    topk: int = setting(2, "passages per search", "code experience_maker.py")
    temperature: float = setting(1.0, "sampling temperature, no top-p", "paper §3.3")
    prompt_tokens: int = setting(256, "longest prompt; longer ones are skipped and counted", "ours", "tokens")
    turn_tokens: int = setting(40, "longest model turn", "code experience_maker.py", "tokens")
    observation_tokens: int = setting(160, "longest tool result", "ours", "tokens")
    trajectory_tokens: int = setting(512, "longest trajectory after the prompt", "ours", "tokens")
    # reward
    stage1_reward: Literal["paper", "code"] = setting("paper", "search and format; or these and +1 or -1 for covering the answer", "paper §2.2.1")
    reward: Literal["f1", "cover_em", "em"] = setting("f1", "stage 2: word F1; or +1 or -1 for covering or matching the answer", "paper §4.2")
    family: Literal["qwen", "llama", "paper"] = setting("qwen", "whose format rules and penalty: -2, -1, or the paper's -2 with Llama's rules", "code train/")
    score_scope: Literal["model", "all"] = setting(
        "model", "text the reward reads: what the model wrote; all of it, as the original (tags in results are harmless either way)",
        "code train/", published="all")
    # learning
    stage1_scale: Literal["batch", "group"] = setting("batch", "stage 1: whiten over the batch, or divide by the group's deviation", "code scripts/")
    mask_observations: bool = setting(True, "leave what the model did not write (results, notices) out of the policy's loss, KL and whitening", "paper §2.2.2")
    aggregation: Literal["token", "sequence", "constant"] = setting("sequence", "mean of the loss over tokens, over sequences, or Dr. GRPO's constant", "code OpenRLHF-RAG/")
    updates: int = setting(4, "optimiser steps per rollout batch", "code scripts/")
    lr: float = setting(3e-4, "learning rate of the policy (AdamW); in each stage a cosine down to a tenth", "code scripts/")
    warmup_steps: int = setting(0, "linear warm-up of the policy's rate", "code scripts/", "steps")
    weight_decay: float = setting(0.0, "AdamW weight decay; betas are 0.9 and 0.95", "code OpenRLHF-RAG/")
    max_grad_norm: float = setting(1.0, "gradient clipping", "code OpenRLHF-RAG/")
    clip: float = setting(0.2, "clip range of the policy ratio, both sides", "code OpenRLHF-RAG/")
    kl: float = setting(0.0, "KL coefficient: k1 in the reward (Llama: 1e-4)", "code scripts/")
    importance_cap: float = setting(0.0, "cap of the sampler/trainer importance correction; 0: off", "ours")
    micro_tokens: int = setting(12288, "padded tokens per micro-batch; the gradient does not depend on it", "ours", "tokens")
    gradient_checkpointing: bool = setting(False, "keep only every layer's input for the backward pass, and compute the rest again", "ours")
    optimizer_bf16: bool = setting(False, "keep AdamW's running means in bfloat16, rounded at random: half their memory", "ours")
    optimizer_offload: bool = setting(False, "keep AdamW's running means in the CPU's memory", "ours")
    # supervised warm-up (not part of the paper)
    warmup: int = setting(0, "supervised steps on traces built by rule, before RL", "ours")
    warmup_traces: int = setting(48, "traces for the warm-up", "ours")
    warmup_lr: float = setting(1e-4, "learning rate of the warm-up", "ours")


PAPER = dict(  # Qwen2.5-7B base, one epoch, as the released script, which starts at stage 2; a stage 1 needs --stage1-steps and --stage1-data
    model="Qwen/Qwen2.5-7B", device="cuda", data="XXsongLALA/RAG-RL-Hotpotqa-with-2wiki", corpus="r1_searcher+http://127.0.0.1:5004",
    steps=119, stage1_steps=0, select_questions=20000, easy_below=10, difficult_above=20, stage1_questions=350, prompts=64, samples=16,
    max_turns=8, topk=3, prompt_tokens=1024, turn_tokens=512, observation_tokens=1024, trajectory_tokens=12800, lr=2e-6,
    eval_questions=500, eval_every=25, save_every=25, micro_tokens=16384, gradient_checkpointing=True)
PRESETS = {
    "tiny": {},
    "smollm2": dict(  # a real 135 M model on a CPU: short everything
        model="smollm2", data="", prompt_style="instruct", family="llama", stage1_reward="code", steps=30, stage1_steps=10, prompts=4, samples=4,
        max_turns=2, prompt_tokens=320, turn_tokens=64, observation_tokens=192, trajectory_tokens=512, updates=2, lr=2e-5, warmup=12,
        eval_questions=24, eval_every=0, save_every=5, micro_tokens=2048),
    "paper": PAPER,
    "paper_llama": PAPER | dict(  # both stages on the released files, one epoch each: 350 questions, and 8,148 less the held-out ones
        model="meta-llama/Llama-3.1-8B-Instruct", data="stage_2.jsonl", stage1_data="stage_1.jsonl", prompt_style="instruct", family="llama",
        steps=140, stage1_steps=23, stage1_reward="code", stage1_scale="group", stage1_prompts=15, prompts=65, kl=1e-4),
}

# ---- Prompt -----------------------------------------------------------------------------------------------------------
# Base: plain text. Instruct: a system message and the bare question, through the chat template (code prompts_dataset.py).
PROMPTS = {
    "base": (
        "The User asks a question and the Assistant solves it: it thinks first and answers afterwards, as <think> reasoning </think> "
        "<answer> answer </answer>. When unsure, it may search while thinking with <|begin_of_query|> keywords <|end_of_query|>, one "
        "fact a query; the results come as <|begin_of_documents|> documents <|end_of_documents|>.\n\nUser:{question}\nAssistant: <think>"),
    "instruct": (
        "Think about the question first and answer it afterwards, as <think> reasoning </think> <answer> answer </answer>. When you are "
        "unsure, search while thinking with <|begin_of_query|> keywords <|end_of_query|>; the results come as <|begin_of_documents|> "
        "documents <|end_of_documents|>."),
}
BEGIN_QUERY, END_QUERY, BEGIN_DOCUMENTS, END_DOCUMENTS = "<|begin_of_query|>", "<|end_of_query|>", "<|begin_of_documents|>", "<|end_of_documents|>"
STOP = (END_QUERY,)
EVAL_STOP = (END_QUERY, "</answer>")  # in evaluation an answer ends the trajectory too (code evaluation/eval_search_loacl.py)


def render(example: Example, tokenizer, template: str = PROMPTS["base"], style: str = "base") -> str:
    """The prompt text: raw, or through the chat template; either way it ends in <think>, so the model never opens its thought itself."""
    if style == "base":
        return template.replace("{question}", example.question.strip())
    if tokenizer.chat_template is None:
        raise UserError("--prompt-style instruct needs a model with a chat template, and this one has none; use --prompt-style base")
    messages = [{"role": "system", "content": template}, {"role": "user", "content": example.question.strip()}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + "<think>"


# ---- Environment ------------------------------------------------------------------------------------------------------
def parse_query(text: str) -> str | None:
    """The query of one segment: what stands between its last opener and the closer, without double quotes, white space squeezed
    (code experience_maker.py). None where a tag is missing or nothing is left."""
    head, closer, _ = text.partition(END_QUERY)
    if not closer or BEGIN_QUERY not in head:
        return None
    return " ".join(head.rpartition(BEGIN_QUERY)[2].replace('"', "").split()) or None


def render_passages(passages: list[Passage]) -> str:
    return "".join(f"({i}){neutralise(p.title)} {neutralise(p.text)}".rstrip() + "\n" for i, p in enumerate(passages, 1))


def wrap_passages(text: str) -> str:
    documents = text.strip() + "\n" if text.strip() else "None"
    return f"\n\n{BEGIN_DOCUMENTS}\n{documents}{END_DOCUMENTS}\n\n"


def environment(turn: Turn, trajectory: Trajectory) -> Call | End:
    """One segment: run its search; whatever else it is ends the trajectory."""
    query = parse_query(turn.text)
    if query and turn.reason == "stop":
        return Call("search", query, wrap_passages)
    return End("length" if turn.reason == "length" else "answer" if "<answer>" in turn.text else "no_action")


# ---- Reward -----------------------------------------------------------------------------------------------------------
NORMALISE = functools.partial(scoring.normalise_answer, punctuation_as=" ", extra_punctuation=scoring.CURLY_QUOTES)
MEASURES = {"em": scoring.exact_match, "f1": scoring.f1, "cover_em": scoring.cover_exact_match}
PENALTY = {"qwen": 2.0, "llama": 1.0, "paper": 2.0}
EMPTY_RESULT = wrap_passages("(1)")
MARKER = re.compile(r"(?:\nAssistant: |<\|start_header_id\|>assistant<\|end_header_id\|>\s*|<\|im_start\|>assistant\s*)<think>")


def scored_text(trajectory: Trajectory, scope: str) -> str:
    """What the reward reads. "model": the model's words, and in the place of each result an empty one in good form, so that counts of tags
    say whether a search ran. "all": what follows the last marker of an assistant's turn, results included, as the original."""
    if scope == "all":
        return MARKER.split(trajectory.prompt + trajectory.response)[-1]
    return "".join(s.text if s.author == "model" else EMPTY_RESULT for s in trajectory.segments)


def extract_answer(text: str) -> str | None:
    """What stands between the last <answer> and the next </answer>; None unless both tags occur somewhere (code train/)."""
    if "<answer>" not in text or "</answer>" not in text:
        return None
    return text.split("<answer>")[-1].split("</answer>")[0].replace(EMPTY_RESULT, " ").strip()


def faults(text: str, family: str) -> set[str]:
    """The format faults of a completion, by name; the prompt has opened the thought (code train/reward_server_*.py)."""
    tags = (BEGIN_DOCUMENTS + "\n", END_DOCUMENTS + "\n\n", BEGIN_QUERY, END_QUERY, BEGIN_DOCUMENTS, END_DOCUMENTS, BEGIN_DOCUMENTS + "\n(1)")
    own = re.sub(rf"{re.escape(BEGIN_DOCUMENTS)}.*?{re.escape(END_DOCUMENTS)}", "", text, flags=re.S)
    answer = extract_answer(text) or ""
    found = {"tags": len({text.count(tag) for tag in tags}) > 1,  # all alike, which zero is too
             "think": text.count("<think>") != 0 or text.count("</think>") != 1,
             "answer": text.count("<answer>") != 1 or text.count("</answer>") != 1,
             "chinese": re.search("[\u4e00-\u9fff]", own) is not None}
    if family == "qwen":
        found |= {"assistant": "Assistant" in text or "assistant" in text,
                  "tag_in_answer": "begin_of_query" in answer or "begin_of_documents" in answer,
                  "long_answer": len(answer.split()) > 10}
    return {name for name, there in found.items() if there}


def reward(trajectory: Trajectory, example: Example, cfg: Config, stage: int = 2) -> dict[str, float]:
    """Named parts of the reward and their total (paper §2.2.1, code train/). Only the total depends on the stage."""
    text = scored_text(trajectory, cfg.score_scope)
    answer, wrong = extract_answer(text), faults(text, cfg.family)
    yes_no = lambda words: {"True": "yes", "False": "no"}.get(words, words)
    match = {name: 0.0 if answer is None else measure(pred=yes_no(answer), gold=[yes_no(g) for g in example.answers], normalise=NORMALISE)
             for name, measure in MEASURES.items()}
    if stage == 2:
        total = (match["f1"] if cfg.reward == "f1" else 2 * match[cfg.reward] - 1) - PENALTY[cfg.family] * bool(wrong)
    elif cfg.stage1_reward == "paper":
        searched = any(s.author == "tool" for s in trajectory.segments)
        total = 0.5 * searched + 0.5 * (not wrong and text.index("<answer>") < text.index("</answer>"))
    else:
        total = 2 * match["cover_em"] - 1 + 0.5 * (END_QUERY in text and "tags" not in wrong) + 0.5 * (not wrong & {"think", "answer"})
    return {**match, "answered": float(answer is not None), "format": float(not wrong), "answer_words": float(len((answer or "").split())), "total": total}


# ---- Train ------------------------------------------------------------------------------------------------------------
def load_data(cfg: Config) -> tuple[list[Example], list[Example], list[Example]]:
    """(questions of stage 1, questions of stage 2, held-out questions)."""
    if "tiny" in (cfg.data, cfg.eval_data):  # stage files of the tiny world have no held-out questions of their own
        train_set = questions("train", 4096, cfg.seed) if cfg.data == "tiny" else load_examples(cfg.data)
        eval_set = questions("eval", cfg.eval_questions)
    else:
        train_set, eval_set = training_and_held_out(cfg.data, cfg.eval_data, cfg.eval_questions, trains=not cfg.evaluate)
    stage1_set = load_examples(cfg.stage1_data) if cfg.stage1_data else train_set
    if not cfg.corpus and not all(isinstance(e.meta.get("world"), int) for e in stage1_set + train_set + eval_set):
        raise UserError("questions other than the tiny world's need --corpus (a corpus.jsonl or a retriever's URL)")
    if cfg.stage1_data and cfg.corpus and (shared := shared_questions(stage1_set, eval_set)):  # tiny worlds share questions, not answers
        raise UserError(f"--stage1-data {cfg.stage1_data}: {len(shared)} of its questions are held out, such as {shared[0]!r}; give other "
                        "--eval-data, or leave them out")
    return stage1_set, train_set, eval_set


def train(cfg: Config) -> None:
    cfg = saved_config(Config, cfg.evaluate, cfg) if cfg.evaluate else cfg
    if cfg.plan:
        return print_plan(cfg, response_tokens=cfg.trajectory_tokens, turns=cfg.max_turns + 1, reference=cfg.kl > 0,
                          prompts=max(cfg.prompts, cfg.stage1_prompts))
    set_up_torch(cfg.seed, cfg.threads, cfg.device)
    scoring.self_test()
    template = read_template(cfg.template, PROMPTS[cfg.prompt_style], *(["{question}"] if cfg.prompt_style == "base" else []))
    stage1_set, train_set, eval_set = load_data(cfg)
    model, tokenizer = load_model(cfg.model, cfg.dtype, cfg.device, cfg.gradient_checkpointing)
    group, n_prompts = cfg.samples, {1: cfg.stage1_prompts or cfg.prompts, 2: cfg.prompts}
    reference = load_model(cfg.model, cfg.dtype, cfg.device)[0] if cfg.kl else None
    shard(model, reference)  # over the ranks, where there are several
    optimizer = make_optimizer(model.parameters(), cfg.lr, betas=(0.9, 0.95), weight_decay=cfg.weight_decay, bf16=cfg.optimizer_bf16, offload=cfg.optimizer_offload)
    budget = Budget(cfg.prompt_tokens, cfg.turn_tokens, cfg.observation_tokens, cfg.trajectory_tokens, cfg.max_turns)
    engine = make_engine(cfg.engine, model, tokenizer, max_slots=max(max(n_prompts.values()) * group, min(cfg.eval_questions, 256)),
                         max_length=cfg.prompt_tokens + cfg.trajectory_tokens)
    tools, pool = {"search": search_tool(cfg.corpus, cfg.topk, render_passages)}, ToolPool()
    prompts_of = lambda examples: make_prompts(examples, lambda e: render(e, tokenizer, template, cfg.prompt_style), tokenizer, budget)
    if cfg.select:
        def sample(prompts: list[Prompt], samples: int, step: int) -> list[Trajectory]:
            engine.sync(model)
            return rollout(engine, tokenizer, prompts, environment, tools, budget, pool, samples=samples, temperature=cfg.temperature, stop=STOP,
                           seed=cfg.seed, step=step)

        picked = order(cfg.seed, 0, len(train_set), min(cfg.select_questions, len(train_set)))
        return select(cfg, prompts_of([train_set[i] for i in picked])[0], sample)
    eval_prompts, _ = prompts_of(eval_set)

    def answer_eval() -> tuple[list[Trajectory], list[dict]]:
        """Greedy answers to the held-out questions, and their reward parts."""
        engine.sync(model)
        trajectories = rollout(engine, tokenizer, eval_prompts, environment, tools, budget, pool, temperature=0.0, stop=EVAL_STOP)
        return ranks.gather(trajectories), ranks.gather([reward(t, t.example, cfg) for t in trajectories])

    if cfg.evaluate:
        return print_evaluation(cfg.evaluate, "em", cfg, *answer_eval())
    run = Run(cfg, method="r1_searcher", metric="em", total_steps=cfg.steps, resume=cfg.resume, name=cfg.name)
    trained = {"model": model, "optimizer": optimizer, **({"reference": reference} if reference and cfg.warmup else {})}
    first = run.restore(trained) if cfg.resume else 0
    if run.before is None:
        run.before = run.log_eval(0, *answer_eval(), tokenizer)
        if cfg.warmup:
            search = as_shown(tools["search"], tokenizer, wrap_passages, cfg.observation_tokens)
            warm_up(cfg, model, tokenizer, stage1_set, lambda e: render(e, tokenizer, template, cfg.prompt_style),
                    lambda e: demonstration(e, search, tokenizer.eos_token), wrap_passages, run)
            run.log_eval(0, *answer_eval(), tokenizer)
            if reference:  # RL starts here, and stays near here
                reference.load_state_dict(model.state_dict())

    for step in range(first, cfg.steps):
        # 1. sample
        clock = Clock()
        engine.sync(model)
        stage, k, of, data = (1, step, cfg.stage1_steps, stage1_set) if step < cfg.stage1_steps else \
            (2, step - cfg.stage1_steps, cfg.steps - cfg.stage1_steps, train_set)
        prompts, skipped = prompts_of([data[i] for i in order(cfg.seed, k, len(data), n_prompts[stage])])
        trajectories = rollout(engine, tokenizer, prompts, environment, tools, budget, pool, samples=group, temperature=cfg.temperature,
                               stop=STOP, seed=cfg.seed, step=step)
        clock.lap("sample_s")

        # 2. score
        parts = [reward(t, t.example, cfg, stage) for t in trajectories]
        rewards_B = torch.tensor([p["total"] for p in parts], device=cfg.device)
        batch = collate(trajectories, cfg.device)
        trained_BT = batch.sampled_BT if cfg.mask_observations else batch.response_BT
        nan_BT = torch.full_like(batch.sampler_BT, torch.nan)
        score_with = lambda m: score(m, batch.ids_BT, batch.lengths_B, batch.starts_B, trained_BT, temperature=cfg.temperature, micro_tokens=cfg.micro_tokens)
        old_BT = score_with(model) if cfg.updates > 1 or reference else nan_BT
        kl_BT = losses.kl(old_BT, score_with(reference), trained_BT, "k1") if reference else torch.zeros_like(nan_BT)

        # 3. advantages
        advantages_BT = losses.reinforce_plus_plus(rewards_B.view(-1, group), cfg.kl * kl_BT, trained_BT, cfg.stage1_scale if stage == 1 else "batch")
        clock.lap("logprob_s")

        # 4. update
        experience = Experience(batch.ids_BT, batch.lengths_B, batch.starts_B, trained_BT, batch.sampled_BT, batch.sampler_BT, old_BT, advantages_BT)
        done = []
        for rows in mini_batches(len(trajectories), cfg.updates, seed=cfg.seed, step=step):
            done.append(policy_step(
                model, optimizer, experience, rows, lr=lr_at(k, of, cfg.lr, cfg.warmup_steps, "cosine", 0.1), clip_low=cfg.clip, clip_high=cfg.clip,
                aggregation=cfg.aggregation, budget_tokens=budget.sampled_tokens, temperature=cfg.temperature,
                importance_cap=cfg.importance_cap, micro_tokens=cfg.micro_tokens, max_grad_norm=cfg.max_grad_norm))
        clock.lap("update_s")

        # 5. log, evaluate, save
        run.log_train(step + 1, trajectories, parts, experience, tokenizer, clock, engine, group,
                      {**joined(done), **({"kl": ranks.mean(kl_BT[trained_BT])} if reference else {}), "stage": stage, "skipped_prompts": skipped})
        if cfg.eval_every and (step + 1) % cfg.eval_every == 0 and step + 1 < cfg.steps:
            run.log_eval(step + 1, *answer_eval(), tokenizer)
        if run.signal or (step + 1) % cfg.save_every == 0 or step + 1 == cfg.steps:
            run.save(step + 1, trained)
        run.stop_if_asked(step + 1)

    run.finish(run.log_eval(cfg.steps, *answer_eval(), tokenizer))
    save_policy(run.folder / "model", model, tokenizer)
    print(run.closing_line(write_report(run.folder)))


# ---- Data selection ---------------------------------------------------------------------------------------------------
def difficulty(cfg: Config, prompts: list[Prompt], sample: Callable) -> list[dict]:
    """Stage-file rows {idx, question, answer, pred_anses, level}: a question is sampled until its first right answer, or
    `difficult_above` times. Right is what covers the gold answer, as in the released rows. Names are those of the original's files."""
    answers, found = [[] for _ in prompts], [False] * len(prompts)
    while left := [i for i, a in enumerate(answers) if not found[i] and len(a) < cfg.difficult_above]:  # all of the same length
        tried = len(answers[left[0]])
        for t in ranks.gather(sample([prompts[i] for i in left], min(cfg.samples, cfg.difficult_above - tried), tried)):
            i = left[t.group]
            if not found[i]:
                answers[i].append(extract_answer(t.model_text) or "")
                found[i] = reward(t, t.example, cfg)["cover_em"] == 1
    level = lambda i: "difficult" if not found[i] else "easy" if len(answers[i]) < cfg.easy_below else "medium"
    return [{"idx": p.example.id, "question": p.example.question, "answer": p.example.answers[0] if len(p.example.answers) == 1 else p.example.answers,
             "pred_anses": answers[i], "level": level(i), **{k: p.example.meta[k] for k in ("hops", "type", "world") if k in p.example.meta}}
            for i, p in enumerate(prompts)]


def select(cfg: Config, prompts: list[Prompt], sample: Callable) -> None:
    """Write stage_1.jsonl (medium) and stage_2.jsonl (the other medium questions, and the difficult ones); easy ones are left out."""
    folder = folder_of("r1_searcher", cfg.name or f"select-{cfg.preset}-seed{cfg.seed}")
    rows = difficulty(cfg, prompts, sample)
    of = {level: [r for r in rows if r["level"] == level] for level in ("easy", "medium", "difficult")}
    stages = {1: of["medium"][:cfg.stage1_questions], 2: of["medium"][cfg.stage1_questions:] + of["difficult"]}
    print(f"{len(rows)} questions: {len(of['easy'])} easy (fewer than {cfg.easy_below} rollouts), {len(of['medium'])} medium, "
          f"{len(of['difficult'])} difficult (more than {cfg.difficult_above})")
    if empty := [stage for stage, picked in stages.items() if not picked]:
        raise UserError(f"--select: nothing for stage {empty[0]}; change --easy-below, --difficult-above, --stage1-questions or --select-questions")
    folder.mkdir(parents=True, exist_ok=True)
    for stage, picked in stages.items():
        write_atomic(folder / f"stage_{stage}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in picked))
        print(f"{folder / f'stage_{stage}.jsonl'}: {len(picked)} questions, for {'--stage1-data' if stage == 1 else '--data'}"
              f"{' with --eval-data tiny' if cfg.data == 'tiny' and stage == 2 else ''}")


# ---- Supervised warm-up (ours) ----------------------------------------------------------------------------------------
def demonstration(example: Example, search: Tool, end: str) -> list[tuple[str, str]] | None:
    """A trace built by rule: search, then answer with the gold answer that a passage holds, and the end token. (author, text) segments, or
    None where the rule finds nothing."""
    found = found_by_rule(example, search)
    if found is None:
        return None
    query, text, gold = found
    return [("model", f" I should look up {query}.\n{BEGIN_QUERY} {query} {END_QUERY}"), ("tool", text),
            ("model", f"The results give the answer. </think>\n<answer> {gold} </answer>{end}")]


if __name__ == "__main__":
    main(lambda: train(parse_config(Config, PRESETS)))
