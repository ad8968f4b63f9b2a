"""SWiRL: make trajectories once, cut them into single decisions, and reinforce each decision by what a judge says of it.

Paper: "Synthetic Data Generation & Multi-Step RL for Reasoning & Tool Use", arXiv 2504.04736. No official code.

The idea. A start model uses its tool on many questions, live and once. Every message it wrote there becomes a training item: the
conversation before it is the state, the message the action. Reinforcement learning then never runs a tool: it samples fresh actions in the
saved states, and a judge who sees the conversation, and no gold answer, says whether each is a good step.

The method, step by step:
  1. `PROMPTS` state the contract: one message is one query (search or calculator) or the answer; a result is the next user turn.
  2. `generate` lets the start model answer with live tools, several times a question; `cut` makes (state, action) items of it.
  3. `judge` labels every step GOOD or BAD; `keeps` filters whole trajectories: by their steps, by their outcome, by both or not at all.
  4. `train`: in each of some saved states a group of fresh actions is sampled, one message each; none is executed.
  5. `reward` of an action is the judge's word: 1 for GOOD, 0 for BAD or no verdict.
  6. Policy gradient with the group's mean as baseline over the action's tokens, with a small KL to the start model (`--kl`; 0 in the tiny preset).
  7. Evaluation runs the tools again, on the trained task or the other one (`--eval-task`).

Kept from the paper: tags, rules of the prompt, `query -> result`, at most 5 searches or 10 computations, the nearest passage as result, five
trajectories a question, questions marked easy left out, the four filters with as many trajectories each, a judge without gold answers, offline
steps, the supervised arm on the same items (`--algorithm sft`).
Changed, and why:
  - learning rate, KL, batch, steps, sampling and limits of tokens are not published: ours. Nor is the policy gradient ("as Gemma 2's"); ours is
    REINFORCE with the mean of a group of actions as baseline, or GRPO, which also divides by the deviation.
  - after the last query that is run one more message may answer; the paper limits queries in one place and steps in another.
  - a message that is neither ends the trajectory; one with a query and an answer counts as its answer (the paper forbids both).
  - in the tiny world the judge is a rule that knows what a question asks for and reads the conversation; elsewhere a model is asked
    (`--judge`). The outcome filter asks it too, and in the tiny world compares with the gold answer; the other parts never see that. The rule
    never errs, so there a trajectory of good steps also ends right, and the filters `process` and `both` are one; with the paper's judge they differ.
  - numbers are exact: the paper shows 24.0 for 48 / 2, ours is 24.

What to watch: `reward`, the share of GOOD actions, rises at once; `step_label` and `em` or `accuracy` on held-out questions follow.

    make swirl                                                # search, tiny model and world, a few minutes on two cores
    make swirl ARGS="--task math --eval-task both"            # train on the calculator, test on it and on search
    make swirl ARGS="--filter outcome --items runs/swirl/tiny-seed0/items.jsonl --name outcome"      # generated once, several arms
    make swirl ARGS="--algorithm sft --items runs/swirl/tiny-seed0/items.jsonl --name sft"
    make swirl ARGS="--preset smollm2 --task math --data gsm8k.jsonl --judge http://127.0.0.1:8000/v1 --judge-model name"
"""
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from common import UserError, losses, ranks, scoring
from common.chat import Ask, next_user_turn, open_chat
from common.data import Example, load_examples, order, training_and_held_out
from common.engine import make_engine
from common.maths import maths_equal, maths_self_test
from common.plan import print_plan
from common.policy import load_model, lr_at, make_optimizer, save_policy, shard
from common.report import write_report
from common.rollout import Budget, Call, End, Prompt, ToolPool, Trajectory, Turn, collate, fit, make_prompts, rollout
from common.run import (Clock, Run, eval_metrics, main, mean, parse_config, print_evaluation, read_template, saved_config, set_up_torch, setting,
                        write_atomic)
from common.search import Passage, neutralise
from common.tiny.oracle import good_step
from common.tiny.world import problems, questions
from common.tools import calculator_tool, search_tool
from common.update import Experience, policy_step, score, supervised_step

Task = Literal["search", "math"]


# ---- Config -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Config:
    """Defaults are the preset `tiny`. A source names where the published value (preset `paper`) stands, or says that it is ours."""
    preset: str = setting("tiny", "defaults for the other flags: tiny, smollm2 or paper", "ours")
    name: str = setting("", "name of the run's folder (default: preset and seed)", "ours")
    seed: int = setting(0, "seed of trajectories, their choice, data order and sampling", "ours")
    task: Task = setting("search", "tool and questions to learn from: a search engine, or a calculator", "paper §2.1")
    eval_task: Literal["", "search", "math", "both"] = setting("", "task to be tested on (default: the one trained on); both: that one and the other", "paper Tab. 2")
    steps: int = setting(30, "optimisation steps (one batch of saved states each)", "ours")
    resume: bool = setting(False, "go on with a run that was stopped or killed", "ours")
    stop_on_collapse: bool = setting(False, "save and stop at signs of collapse (common/health.py); they are always said", "ours")
    evaluate: str = setting("", "folder of a finished run: evaluate its model again instead of training", "ours")
    plan: bool = setting(False, "instead of training, print what these settings need: memory per GPU, tokens, disk; nothing is loaded", "ours")
    # model and data
    model: str = setting("tiny", "tiny, smollm2, a folder, or a hub id", "paper §2.1")
    dtype: Literal["float32", "bfloat16"] = setting("float32", "type of the weights", "ours")
    device: str = setting("cpu", "cpu or cuda", "ours")
    threads: int = setting(0, "CPU threads; 0: one per core", "ours")
    engine: Literal["hf", "vllm"] = setting("hf", "engine that samples: hf, or vllm (make setup_vllm)", "ours")
    data: str = setting("tiny", "training questions: tiny, a .jsonl, .json or .parquet file, or a hub data set id", "paper §2.1")
    corpus: str = setting("", "search: corpus.jsonl in Search-R1's format, or the URL of a retriever (needed unless data is tiny)", "paper §2.1")
    eval_data: str = setting("", "held-out questions, as --data (default: split off from the training questions)", "ours")
    transfer_data: str = setting("", "held-out questions of the other task (needed for it unless data is tiny)", "ours")
    eval_questions: int = setting(200, "held-out questions", "ours")
    eval_every: int = setting(10, "evaluate every so many steps, and before and after (greedy, live tools, same questions); 0: only before and after", "ours")
    save_every: int = setting(10, "checkpoint every so many steps", "ours")
    keep_trajectories: int = setting(4, "sampled actions a step that are written to trajectories.jsonl", "ours")
    template: str = setting("", "file with another prompt for the task; it must hold {question}, and may hold {budget}", "ours")
    # trajectories, made once
    items: str = setting("", "items.jsonl of an earlier run, in place of new trajectories", "ours")
    questions: int = setting(500, "questions that trajectories are made for", "paper §2.1")
    per_question: int = setting(5, "trajectories per question", "paper §2.1")
    filter: Literal["process", "outcome", "both", "none"] = setting("process", "keep trajectories: all steps good, answer right, both, or any", "paper §2.1")
    trajectories: int = setting(150, "trajectories used of those the filter keeps, so that filters can be compared; 0: all", "ours")
    max_queries: int = setting(0, "queries that are run; one more message may answer; 0: 5 for search, 10 for math", "paper §2.1")
    topk: int = setting(1, "passages per search", "paper §2.1")
    temperature: float = setting(1.0, "sampling temperature of trajectories and of actions, no top-p", "ours")
    prompt_tokens: int = setting(192, "longest prompt; longer ones are skipped and counted", "ours", "tokens")
    turn_tokens: int = setting(40, "longest model turn", "ours", "tokens")
    observation_tokens: int = setting(96, "longest tool result", "ours", "tokens")
    trajectory_tokens: int = setting(512, "longest trajectory after the prompt", "ours", "tokens")
    # judge
    judge: str = setting("oracle", "oracle (rules, tiny world), the URL of an OpenAI-compatible server (key in OPENAI_API_KEY), or a model as --model", "paper §2.2")
    judge_model: str = setting("", "name of the model the server shall answer with", "paper §2.2")
    judge_tokens: int = setting(512, "longest answer of a model that judges", "ours", "tokens")
    step_labels: bool = setting(True, "let the judge label the steps of evaluations too", "paper Tab. 3")
    # learning
    algorithm: Literal["reinforce", "grpo", "sft"] = setting("reinforce", "baseline alone, divided by the deviation too, or supervised on the items", "ours")
    prompts: int = setting(24, "saved states per step", "ours")
    samples: int = setting(8, "fresh actions per state (the group of the baseline)", "ours")
    aggregation: Literal["token", "sequence", "constant"] = setting("token", "mean of the loss over tokens, over actions, or Dr. GRPO's constant", "ours")
    lr: float = setting(1e-4, "learning rate of the policy (AdamW); it falls linearly to 0", "ours")
    warmup_steps: int = setting(3, "linear warm-up of the policy's rate", "ours", "steps")
    weight_decay: float = setting(0.01, "AdamW weight decay", "ours")
    max_grad_norm: float = setting(1.0, "gradient clipping", "ours")
    kl: float = setting(0.0, "KL coefficient: k3 in the loss", "ours")
    importance_cap: float = setting(0.0, "cap of the sampler/trainer importance correction; 0: off", "ours")
    micro_tokens: int = setting(12288, "padded tokens per micro-batch; the gradient does not depend on it", "ours", "tokens")
    gradient_checkpointing: bool = setting(False, "keep only every layer's input for the backward pass, and compute the rest again", "ours")
    optimizer_bf16: bool = setting(False, "keep AdamW's running means in bfloat16, rounded at random: half their memory", "ours")
    optimizer_offload: bool = setting(False, "keep AdamW's running means in the CPU's memory", "ours")


PRESETS = {
    "tiny": {},
    "smollm2": dict(  # a real 135 M model on a CPU: short everything
        model="smollm2", data="", judge="", questions=32, per_question=4, filter="none", trajectories=0, steps=20, prompts=8, samples=4,
        prompt_tokens=320, turn_tokens=96, observation_tokens=192, trajectory_tokens=768, lr=2e-5, eval_questions=24, eval_every=0, save_every=5, micro_tokens=2048),
    "paper": dict(  # HotpotQA; for GSM8K --task math --data openai/gsm8k:main --questions 7500. What is not published is ours.
        model="google/gemma-2-27b-it", device="cuda", data="hotpotqa/hotpot_qa:distractor", corpus="http://127.0.0.1:8000", questions=10000,
        trajectories=0, judge="https://generativelanguage.googleapis.com/v1beta/openai", judge_model="gemini-1.5-pro", steps=400, prompts=256, samples=4,
        prompt_tokens=512, turn_tokens=512, observation_tokens=512, trajectory_tokens=3072, lr=1e-6, warmup_steps=20, kl=0.01, eval_questions=300,
        eval_every=50, save_every=50, micro_tokens=8192, gradient_checkpointing=True),
}

# ---- Prompt -----------------------------------------------------------------------------------------------------------
# One user message (paper App. E); the paper's prompt for maths says "search query" in its last rule, ours says expression.
PROMPTS = {
    "search": (
        "Answer the question in a few words. You may look things up with <search_query> query </search_query>, one query a message, at "
        "most {budget}; do not repeat one. The result is shown as query -> result. When you are ready, use <answer> answer </answer>. "
        "A message is a query or an answer, never both. Question: {question}"),
    "math": (
        "Answer the question in a few words. You may compute with <math_exp> expression </math_exp>, one expression a message, at most "
        "{budget}; do not repeat one. The result is shown as query -> result. When you are ready, use <answer> answer </answer>. "
        "A message is an expression or an answer, never both. Question: {question}"),
}
QUERIES = {"search": 5, "math": 10}


def render(example: Example, tokenizer, template: str, queries: int) -> str:
    """The prompt text, through the chat template: SWiRL talks in turns."""
    text = template.replace("{budget}", str(queries)).replace("{question}", example.question.strip())
    return tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)


# ---- Environment ------------------------------------------------------------------------------------------------------
def parse_action(text: str) -> tuple[str | None, str]:
    """("search" | "math" | "answer" | None, content) of one message: an answer counts before a query, and the first pair of its kind."""
    for tag, kind in (("answer", "answer"), ("search_query", "search"), ("math_exp", "math")):
        if pair := re.search(rf"<{tag}>(.*?)</{tag}>", text, re.S):
            return kind, pair[1].strip()
    return None, ""


def render_passages(passages: list[Passage]) -> str:
    return "\n".join(p.text for p in passages)


def wrap_result(query: str, result: str, glue: tuple[str, str]) -> str:
    """The next user turn. `glue`: what the chat template puts before and after its text."""
    return f"{glue[0]}{neutralise(query)} -> {neutralise(result) or 'nothing found'}{glue[1]}"


def environment(turn: Turn, trajectory: Trajectory, task: Task, short: Callable[[str], str], glue: tuple[str, str]) -> Call | End:
    """One message: run the task's tool on a query, or end. `short` cuts a long query that is shown with its result."""
    kind, content = parse_action(turn.text)
    if kind == "answer" or turn.reason == "length":
        return End(kind if kind == "answer" else "length")
    return Call(task, content, partial(wrap_result, short(content), glue=glue)) if kind == task else End("no_action")


def offline(turn: Turn, trajectory: Trajectory, task: Task) -> End:
    """One fresh action in a saved state: nothing is run."""
    kind, _ = parse_action(turn.text)
    return End(kind if kind == "answer" else "length" if turn.reason == "length" else "query" if kind == task else "no_action")


# ---- Trajectories -----------------------------------------------------------------------------------------------------
History = list[tuple[str, str]]  # (model | tool, text) of earlier messages; results as the judge reads them, without the template's marks


@dataclass(frozen=True)
class Item:
    """One decision: a state, as ids and as messages, and the action the start model took there."""
    trajectory: int  # number of the trajectory it was cut from
    task: str
    example: Example
    ids: list[int]  # of the state: prompt, earlier actions and results
    history: History
    action_ids: list[int]
    action: str
    good: float  # what the judge said of the action
    right: float  # whether the trajectory's answer is right


def cut(trajectory: Trajectory, glue: tuple[str, str] = ("", "")) -> list[tuple[list[int], History, list[int], str]]:
    """(state's ids, history, action's ids, action) of every message the model wrote (paper §2.1)."""
    out, history = [], []
    for s in trajectory.segments:
        if s.author == "model":
            out.append((trajectory.prompt_ids + trajectory.ids[:s.start], list(history), trajectory.ids[s.start:s.end], s.text))
        history.append((s.author, s.text if s.author == "model" else s.text.removeprefix(glue[0]).removesuffix(glue[1])))
    return out


def keeps(good: Sequence[float], right: float, how: str) -> bool:
    """Whether a filter keeps a trajectory with these step labels and this outcome (paper §2.1, fig. 4)."""
    return (how in ("none", "outcome") or all(good)) and (how in ("none", "process") or bool(right))


def select(items: Sequence[Item], cfg: Config) -> tuple[list[Item], int, int]:
    """(items of the chosen trajectories, trajectories the filter keeps, trajectories in all); which are chosen depends on the seed only."""
    by_trajectory: dict[int, list[Item]] = {}
    for item in items:
        by_trajectory.setdefault(item.trajectory, []).append(item)
    kept = [own for own in by_trajectory.values() if keeps([i.good for i in own], own[0].right, cfg.filter)]
    if len(kept) < max(1, cfg.trajectories):
        raise UserError(f"--filter {cfg.filter} keeps {len(kept)} of {len(by_trajectory)} trajectories, and {max(1, cfg.trajectories)} are asked "
                        "for: raise --questions or --per-question, or lower --trajectories")
    chosen = order(cfg.seed, 0, len(kept), len(kept))[:cfg.trajectories or None]
    return [item for k in sorted(chosen) for item in kept[k]], len(kept), len(by_trajectory)


def read_items(path: Path, task: str) -> list[Item]:
    """Items as a run has written them; UserError naming file and line for anything else."""
    items = []
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            row = json.loads(line)
            row["example"] = Example(**{**row["example"], "answers": tuple(row["example"]["answers"])})
            items.append(Item(**row))
            if items[-1].task != task:
                raise UserError(f"--items {path}, line {number}: it was made for --task {items[-1].task}, not {task}")
    except OSError as error:
        raise UserError(f"--items {path}: cannot read it ({error.strerror}); give the items.jsonl of a run") from error
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"--items {path}, line {number}: not an item as a run writes it ({type(error).__name__}: {error}); make the file "
                        "again") from error
    if not items:
        raise UserError(f"--items {path}: the file is empty")
    return items


# ---- Reward -----------------------------------------------------------------------------------------------------------
JUDGE = (
    "You judge one step of an assistant that answers a question with a tool, one query a message.\n\nQuestion: {question}\n\nConversation so "
    "far:\n{history}\n\nLast message:\n{action}\n\nJudge the last message only. A query is good if it asks for something that helps with the "
    "question and was not asked before. An answer is good if it follows from the results above; where they do not suffice, it is bad. A message "
    "that is neither is bad. Give your reasons first, in a few sentences. Then end with one word: GOOD or BAD.")
OUTCOME = (
    "Question: {question}\nRight answer: {gold}\nGiven answer: {answer}\n\nDo the two answers mean the same? Other spellings, and other ways to write "
    "the same number (1/2, 0.5, 50 %), are the same. Give your reasons first, in a sentence. Then end with one word: YES or NO.")


def verdict(text: str, words: tuple[str, str] = ("GOOD", "BAD")) -> str | None:
    """The last of the two words that stands alone and in capitals; None without one."""
    found = re.findall(rf"(?<![A-Za-z])(?:{'|'.join(words)})(?![A-Za-z])", text)
    return found[-1] if found else None


def oracle(example: Example, history: History, action: str) -> str:
    """The judge of the tiny world: rules, in the place of a model that reads the conversation."""
    kind, content = parse_action(action)
    asked, results = ([text for author, text in history if author == who] for who in ("model", "tool"))
    return "GOOD" if good_step(example, kind, content, [parse_action(text)[1] for text in asked], results) else "BAD"


def judge(cases: Sequence[tuple[Example, History, str]], ask: Ask | None) -> list[str | None]:
    """The verdict on every (example, history, action): by the oracle, or by a model."""
    if ask is None:
        return [oracle(*case) for case in cases]
    said = lambda history: "\n".join(f"{'Assistant' if author == 'model' else 'Tool'}: {neutralise(text)}" for author, text in history) or "(none)"
    return [verdict(text) for text in ask([JUDGE.format(question=example.question, history=said(history), action=neutralise(action))
                                           for example, history, action in cases])]


def reward(found: str | None, stop: str) -> dict[str, float]:
    """Named parts of the reward of one action and their total (paper §2.2): 1 for GOOD; 0 for BAD, no verdict, or a message that was cut
    before it held a whole answer."""
    return {"query": float(stop == "query"), "answered": float(stop == "answer"), "judged": float(found is not None),
            "total": float(found == "GOOD" and stop != "length")}


def grade(trajectory: Trajectory, task: Task) -> dict[str, float]:
    """Whether the answer is right; scores the model's last message only."""
    kind, answer = parse_action(trajectory.segments[-1].text if trajectory.segments else "")
    gold, answered = trajectory.example.answers, kind == "answer"
    if task == "math":
        return {"accuracy": float(answered and any(maths_equal(pred=answer, gold=g) for g in gold)), "answered": float(answered)}
    return {"em": scoring.exact_match(pred=answer, gold=gold) if answered else 0.0, "f1": scoring.f1(pred=answer, gold=gold) if answered else 0.0,
            "answered": float(answered)}


def outcomes(trajectories: Sequence[Trajectory], task: Task, ask: Ask | None) -> list[float]:
    """For the outcome filter, which alone sees the gold answer: what the judge says of it, or in the tiny world equality."""
    if ask is None:
        return [grade(t, task)[METRIC[task]] for t in trajectories]
    answers = [parse_action(t.segments[-1].text) for t in trajectories]
    texts = ask([OUTCOME.format(question=t.example.question, gold=" or ".join(t.example.answers), answer=neutralise(answer))
                 for t, (_, answer) in zip(trajectories, answers)])
    return [float(kind == "answer" and verdict(text, ("YES", "NO")) == "YES") for (kind, _), text in zip(answers, texts)]


# ---- Train ------------------------------------------------------------------------------------------------------------
METRIC = {"search": "em", "math": "accuracy"}
AT_ONCE = 256  # trajectories between two saves of what is made


def load_data(cfg: Config, tested: Sequence[Task]) -> tuple[list[Example], dict[Task, list[Example]]]:
    """(training questions, held-out questions of every task that is tested)."""
    if cfg.data == "tiny":
        tiny = lambda task, *how: questions(*how) if task == "search" else problems(*how)
        return tiny(cfg.task, "train", 4096, cfg.seed), {task: tiny(task, "eval", cfg.eval_questions) for task in tested}
    if cfg.judge in ("", "oracle"):
        raise UserError("the oracle knows the tiny world only: give --judge (a server's URL, or a model) for other questions")
    if "search" in (cfg.task, *tested) and not cfg.corpus:
        raise UserError("questions other than the tiny world's need --corpus (a corpus.jsonl or a retriever's URL)")
    if tested != [cfg.task] and not cfg.transfer_data:
        raise UserError(f"--eval-task {cfg.eval_task} needs --transfer-data, the questions of the other task")
    train_set, held_out = training_and_held_out(cfg.data, cfg.eval_data, cfg.eval_questions, trains=not cfg.evaluate)
    return ([e for e in train_set if e.meta.get("level") != "easy"],
            {task: held_out if task == cfg.task else load_examples(cfg.transfer_data, split="test", limit=cfg.eval_questions) for task in tested})


def train(cfg: Config) -> None:
    cfg = saved_config(Config, cfg.evaluate, cfg) if cfg.evaluate else cfg
    if cfg.plan:
        return print_plan(cfg, response_tokens=cfg.trajectory_tokens + cfg.turn_tokens, turns=1, reference=cfg.kl > 0 and cfg.algorithm != "sft",
                          more=f"; and before them {cfg.questions * cfg.per_question:,} trajectories with tools, made once")
    other = {"search": "math", "math": "search"}[cfg.task]
    tested = {"": [cfg.task], "both": [cfg.task, other]}.get(cfg.eval_task, [cfg.eval_task])
    set_up_torch(cfg.seed, cfg.threads, cfg.device)
    scoring.self_test()
    if "math" in (cfg.task, *tested):
        maths_self_test()
    templates = PROMPTS | {cfg.task: read_template(cfg.template, PROMPTS[cfg.task], "{question}")}
    train_set, eval_sets = load_data(cfg, tested)
    ask = None if cfg.judge == "oracle" else open_chat(cfg.judge, model=cfg.judge_model, max_tokens=cfg.judge_tokens, device=cfg.device)
    model, tokenizer = load_model(cfg.model, cfg.dtype, cfg.device, cfg.gradient_checkpointing)
    group, n_prompts = cfg.samples, cfg.prompts
    reference = load_model(cfg.model, cfg.dtype, cfg.device)[0] if cfg.kl and cfg.algorithm != "sft" else None
    shard(model, reference)  # over the ranks, where there are several
    optimizer = make_optimizer(model.parameters(), cfg.lr, weight_decay=cfg.weight_decay, bf16=cfg.optimizer_bf16, offload=cfg.optimizer_offload)
    queries = {task: cfg.max_queries or n for task, n in QUERIES.items()}
    budgets = {task: Budget(cfg.prompt_tokens, cfg.turn_tokens, cfg.observation_tokens, cfg.trajectory_tokens, n) for task, n in queries.items()}
    engine = make_engine(cfg.engine, model, tokenizer, max_slots=max(n_prompts * group, min(cfg.eval_questions, 256)),
                         max_length=cfg.prompt_tokens + cfg.trajectory_tokens + cfg.turn_tokens)
    tools, pool = {"search": search_tool(cfg.corpus, cfg.topk, render_passages), "math": calculator_tool()}, ToolPool()
    glue = next_user_turn(tokenizer, engine.eos_ids)
    short = lambda query: fit(tokenizer, query, str, cfg.observation_tokens // 2)[1]
    prompts_of = lambda task, examples: make_prompts(examples, lambda e: render(e, tokenizer, templates[task], queries[task]), tokenizer,
                                                     budgets[task])
    play = lambda task, prompts, **how: rollout(engine, tokenizer, prompts, partial(environment, task=task, short=short, glue=glue), tools,
                                                budgets[task], pool, **how)
    eval_prompts = {task: prompts_of(task, examples)[0] for task, examples in eval_sets.items()}

    def label(trajectories: Sequence[Trajectory]) -> list[list[float]]:
        """What the judge says of every step of every trajectory: 1 or 0."""
        steps = [cut(t, glue) for t in trajectories]
        said = iter(judge([(t.example, history, action) for t, own in zip(trajectories, steps) for _, history, _, action in own], ask))
        return [[reward(next(said), t.stop if i == len(own) - 1 else "")["total"] for i in range(len(own))] for t, own in zip(trajectories, steps)]

    def answer_eval(task: Task) -> tuple[list[Trajectory], list[dict]]:
        """Greedy answers to the held-out questions of a task, with live tools, and their parts."""
        engine.sync(model)
        trajectories = play(task, eval_prompts[task], temperature=0.0)
        parts = [grade(t, task) for t in trajectories]
        if cfg.step_labels:
            parts = [{**p, "step_label": mean(good)} for p, good in zip(parts, label(trajectories))]
        return ranks.gather(trajectories), ranks.gather(parts)

    if cfg.evaluate:
        for task in tested:
            print_evaluation(cfg.evaluate, METRIC[task], replace(cfg, eval_data=f"{task}: {cfg.eval_data or cfg.data}"), *answer_eval(task))
        return
    run = Run(cfg, method="swirl", metric=METRIC[tested[0]], total_steps=cfg.steps, resume=cfg.resume, name=cfg.name)

    def evaluate(step: int) -> dict:
        """The evaluation on the first tested task, and under "transfer" that on the other."""
        found = run.log_eval(step, *answer_eval(tested[0]), tokenizer)
        for task in tested[1:]:
            found["transfer"] = eval_metrics(METRIC[task], *answer_eval(task))
            run.log("transfer", step, found["transfer"])
        return found

    def generate() -> list[Item]:
        """The start model's trajectories, labelled and cut; a file for every batch until all are there, so that --resume goes on between them."""
        path = run.folder / "items.jsonl"
        if not ranks.broadcast(path.exists()):
            chosen = [train_set[i] for i in order(cfg.seed, 0, len(train_set), min(cfg.questions, len(train_set)))]
            prompts, skipped = prompts_of(cfg.task, chosen)
            print(f"making {cfg.per_question} trajectories of {len(prompts)} questions ({skipped} skipped: longer than --prompt-tokens)", flush=True)
            size, parts = max(1, AT_ONCE // cfg.per_question), []
            for start in range(0, len(prompts), size):
                parts.append(run.folder / f"items-{start}.part")
                if ranks.broadcast(parts[-1].exists()):
                    continue
                engine.sync(model)
                trajectories = play(cfg.task, prompts[start:start + size], samples=cfg.per_question, temperature=cfg.temperature, seed=cfg.seed,
                                    step=-1 - start)
                scores = ranks.gather(list(zip(trajectories, label(trajectories), outcomes(trajectories, cfg.task, ask))))
                rows = [Item(start * cfg.per_question + k, cfg.task, t.example, ids, history, action_ids, action, good, right)
                        for k, (t, labels, right) in enumerate(scores) for (ids, history, action_ids, action), good in zip(cut(t, glue), labels)]
                write_atomic(parts[-1], "".join(json.dumps(asdict(row), allow_nan=False) + "\n" for row in rows))
                run.stop_if_asked(0)
            if ranks.rank() == 0:
                write_atomic(path, "".join(part.read_text(encoding="utf-8") for part in parts))
                for part in parts:
                    part.unlink()
        return ranks.broadcast(read_items(path, cfg.task) if ranks.rank() == 0 else [])

    items = read_items(Path(cfg.items), cfg.task) if cfg.items else generate()
    used, n_kept, n_all = select(items, cfg)
    longest = max(len(item.ids) for item in used)
    if longest > cfg.prompt_tokens + cfg.trajectory_tokens or not all(i.example.question.strip() in tokenizer.decode(i.ids) for i in used):
        raise UserError(f"--items {cfg.items}: its states are not this model's (the longest has {longest} tokens): make them with the same tokenizer, "
                        "--prompt-tokens and --trajectory-tokens")
    trained = {"model": model, "optimizer": optimizer}
    first = run.restore(trained) if cfg.resume else 0
    if run.before is None:
        run.log("items", 0, {"n": n_all, "kept": n_kept / n_all, "items": len(used), "calls": len(items) / n_all - 1,  # all but the last message
                             "sampled_tokens": sum(len(i.action_ids) for i in items)})
        run.before = evaluate(0)

    for step in range(first, cfg.steps):
        # 1. sample: fresh actions in saved states; a supervised step takes the saved ones
        clock = Clock()
        lr = lr_at(step, cfg.steps, cfg.lr, cfg.warmup_steps, schedule="linear")
        states = [used[i] for i in order(cfg.seed, step, len(used), n_prompts)]
        if cfg.algorithm == "sft":
            rows = [(s.ids + s.action_ids, [0] * len(s.ids) + [1] * len(s.action_ids)) for s in states]
            loss = supervised_step(model, optimizer, rows, lr=lr, micro_tokens=cfg.micro_tokens, max_grad_norm=cfg.max_grad_norm)
            run.log("sft", step + 1, {"loss": loss, "lr": lr, "step_s": clock.total})
        else:
            engine.sync(model)
            prompts = [Prompt(s.example, tokenizer.decode(s.ids), s.ids) for s in states]
            one_turn = Budget(max(len(s.ids) for s in states), cfg.turn_tokens, cfg.observation_tokens, cfg.turn_tokens, turns=0)
            trajectories = rollout(engine, tokenizer, prompts, partial(offline, task=cfg.task), {}, one_turn, pool, samples=group,
                                   temperature=cfg.temperature, seed=cfg.seed, step=step)
            clock.lap("sample_s")

            # 2. score
            said = judge([(t.example, states[t.group].history, t.model_text) for t in trajectories], ask)
            parts = [reward(found, t.stop) for t, found in zip(trajectories, said)]
            rewards_B = torch.tensor([p["total"] for p in parts], device=cfg.device)
            batch = collate(trajectories, cfg.device)
            nan_BT = torch.full_like(batch.sampler_BT, torch.nan)
            ref_BT = score(reference, batch.ids_BT, batch.lengths_B, batch.starts_B, batch.sampled_BT, temperature=cfg.temperature,
                           micro_tokens=cfg.micro_tokens) if reference else None

            # 3. advantages
            std = "unbiased" if cfg.algorithm == "grpo" else "none"
            advantages_BT = losses.group_advantages(rewards_B.view(-1, group), std).view(-1, 1).expand_as(nan_BT)
            clock.lap("logprob_s")

            # 4. update: one step a batch, so the ratio is 1 and nothing is clipped
            experience = Experience(batch.ids_BT, batch.lengths_B, batch.starts_B, batch.sampled_BT, batch.sampled_BT, batch.sampler_BT, nan_BT,
                                    advantages_BT, ref_BT)
            done = policy_step(
                model, optimizer, experience, range(len(trajectories)), lr=lr, clip_low=0.2, clip_high=0.2, aggregation=cfg.aggregation,
                budget_tokens=one_turn.sampled_tokens, temperature=cfg.temperature, kl=cfg.kl, kl_kind="k3", importance_cap=cfg.importance_cap,
                micro_tokens=cfg.micro_tokens, max_grad_norm=cfg.max_grad_norm)
            clock.lap("update_s")
            usable = mean(p["query"] for p in ranks.gather(parts) if not p["answered"])
            run.log_train(step + 1, trajectories, parts, experience, tokenizer, clock, engine, group, {**done, "valid_call_rate": usable})

        # 5. evaluate, save
        if cfg.eval_every and (step + 1) % cfg.eval_every == 0 and step + 1 < cfg.steps:
            evaluate(step + 1)
        if run.signal or (step + 1) % cfg.save_every == 0 or step + 1 == cfg.steps:
            run.save(step + 1, trained)
        run.stop_if_asked(step + 1)

    after = evaluate(cfg.steps)
    moved = {when: {task: found["transfer"][METRIC[task]] for task in tested[1:]} for when, found in (("before", run.before), ("after", after))}
    run.finish(after, {"transfer": moved} if tested[1:] else {})
    save_policy(run.folder / "model", model, tokenizer)
    print(run.closing_line(write_report(run.folder)))
    for task in tested[1:]:
        print(f"the other task, {task}: {METRIC[task]} {moved['before'][task]:.3f} -> {moved['after'][task]:.3f}")


if __name__ == "__main__":
    main(lambda: train(parse_config(Config, PRESETS)))
