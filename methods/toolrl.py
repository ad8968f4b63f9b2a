"""ToolRL: reward is all tool learning needs, or: a graded reward for how nearly right a tool call is.

Paper: "ToolRL: Reward is All Tool Learning Needs", arXiv 2504.13958 (v1). Code: github qiancheng0/ToolRL (commit 8cee13ec).

The idea. A model that is given a set of tools and a dialogue writes the next calls; nothing is run. Instead of asking whether they are right,
the reward says how nearly: names, parameter names and values each count, so that a wrong value costs little, a missing parameter more and a
wrong tool most. A second, smaller part pays for the form of the reply. The paper finds that with that, RL from a cold start beats RL after
supervised training.

The method, step by step:
  1. `PROMPT` numbers the tools and states the form: <think>, then <tool_call> with a JSON object a line, <response>, or both; `history` writes
     the dialogue so far as one text.
  2. `environment` takes one model turn as the whole reply; its calls are noted, none is run.
  3. `well_formed` asks for the shape that the ground truth has; `call_score` pairs the calls with the gold ones and counts what agrees.
  4. `ranges` says what both are worth at a step: format 0 to 1, correctness -3 to 3, or one of the paper's other scales.
  5. `reward` adds them up, with the length of the thought where asked for.
  6. `train`: advantages from the group (GRPO) or from a critic (PPO), clipped policy gradient over the sampled tokens, no KL.

Kept from the paper: form of prompt, history and reply, both rewards with their ranges, every ablation (--length, --scale, --granularity), SFT
start, all hyper-parameters in the preset `paper`. Where paper and code differ:
  - calls are paired greedily in the order of the gold ones, as the code does (its numbers come from that); `--matching optimal` is the paper's.
    They differ only where a tool is called twice. Repeated names count (multisets, code rlla.py; the paper writes sets).
  - scales that change with training follow the paper's formulas, which end with the run; `--schedule code` has the code's fixed denominators.
  - no KL, as the paper says; `--kl 0.001` is the code's penalty in the reward (k1, before the group is normalised). In a group of equal
    rewards it is then the noise of that penalty which is blown up to unit size; without it such a group teaches nothing.
Changed, and why:
  - a prompt that is too long is skipped and counted; the original cuts it from the left and loses the tools (rl_dataset.py).
  - the ground truth of every row is read when it is loaded; in the original one that is no JSON stops the run in the middle (rlla.py).
  - the scorer gives every malformed reply the minimum, however it is malformed (numbers of thousands of digits, brackets without end).
  - GRPO and PPO have the same limits of length; the original halves PPO's.

What to watch: `format` is learned first, then `names`, then `accuracy` (exact calls); `irrelevance` can suffer, as a missing call costs more
than a needless one (the tiny model's dips in the first steps and comes back to 1).

    make toolrl                                               # tiny model and world, a few minutes on two cores
    make toolrl ARGS="--granularity coarse"                   # also: finegrained, intermediate
    make toolrl ARGS="--scale dynamic"                        # also: equal, two_stage
    make toolrl ARGS="--length fixed"                         # also: dynamic
    make toolrl ARGS="--sft-steps 20"                         # SFT start
    make toolrl ARGS="--reward binary"                        # Tool-N1's reward, everything else equal
    make toolrl ARGS="--algorithm ppo"
    make toolrl ARGS="--preset smollm2 --data rlla_4k/train.parquet"
"""
import functools
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from common import losses, ranks, scoring
from common.calls import canonical, load_requests, loads, print_benchmark, read_gold
from common.data import Example, order, training_and_held_out
from common.engine import make_engine
from common.plan import print_plan
from common.policy import Critic, load_model, lr_at, make_optimizer, save_policy, shard
from common.report import write_report
from common.rollout import Budget, End, ToolCall, ToolPool, Trajectory, Turn, collate, make_prompts, rollout
from common.run import Clock, Run, main, parse_config, print_evaluation, read_template, saved_config, set_up_torch, setting
from common.search import neutralise
from common.tiny.world import requests
from common.update import Experience, critic_step, joined, mini_batches, policy_step, score, supervised_step, values


# ---- Config -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Config:
    """Defaults are the preset `tiny`. A source names where the published value (preset `paper`) stands, or says that it is ours."""
    preset: str = setting("tiny", "defaults for the other flags: tiny, smollm2 or paper", "ours")
    name: str = setting("", "name of the run's folder (default: preset and seed)", "ours")
    seed: int = setting(0, "seed of data order and sampling", "ours")
    steps: int = setting(60, "optimisation steps (one rollout batch each)", "code run_grpo.sh")
    resume: bool = setting(False, "go on with a run that was stopped or killed", "ours")
    stop_on_collapse: bool = setting(False, "save and stop at signs of collapse (common/health.py); they are always said", "ours")
    evaluate: str = setting("", "folder of a finished run: evaluate its model again instead of training", "ours")
    plan: bool = setting(False, "instead of training, print what these settings need: memory per GPU, tokens, disk; nothing is loaded", "ours")
    # model and data
    model: str = setting("tiny", "tiny, smollm2, a folder, or a hub id", "paper §4.2")
    dtype: Literal["float32", "bfloat16"] = setting("float32", "type of the weights", "ours")
    device: str = setting("cpu", "cpu or cuda", "ours")
    threads: int = setting(0, "CPU threads; 0: one per core", "ours")
    engine: Literal["hf", "vllm"] = setting("hf", "engine that samples: hf, or vllm (make setup_vllm)", "ours")
    data: str = setting("tiny", "training questions: tiny, or files and hub data sets (ToolRL's, xLAM, ToolACE) with commas between them", "paper §4.1")
    eval_data: str = setting("", "held-out questions, as --data; also bfcl:CATEGORIES or api_bank:FOLDER (default: split off from the training questions)", "ours")
    eval_questions: int = setting(200, "held-out questions", "ours")
    eval_every: int = setting(20, "evaluate every so many steps, and before and after (greedy, same questions); 0: only before and after", "code run_grpo.sh")
    save_every: int = setting(20, "checkpoint every so many steps", "code run_grpo.sh")
    keep_trajectories: int = setting(4, "trajectories a step that are written to trajectories.jsonl", "ours")
    template: str = setting("", "file with another system prompt; it must hold {tools}", "ours")
    # rollout
    prompts: int = setting(12, "questions per step", "paper App. B")
    samples: int = setting(8, "trajectories per question (GRPO's group size; PPO uses 1)", "paper App. B")
    temperature: float = setting(1.0, "sampling temperature, no top-p", "paper App. B")
    prompt_tokens: int = setting(384, "longest prompt; longer ones are skipped and counted", "paper App. B", "tokens")
    turn_tokens: int = setting(96, "longest model turn", "paper App. B", "tokens")
    # reward
    reward: Literal["graded", "binary"] = setting("graded", "the paper's, or Tool-N1's: 1 for a thought and exactly the right calls, else 0", "paper §3.3")
    granularity: Literal["original", "finegrained", "intermediate", "coarse"] = setting(
        "original", "what of a call counts: its parts; parts, but names and parameter names all or nothing; whole calls; all calls or nothing", "paper §5.3")
    matching: Literal["greedy", "optimal"] = setting("greedy", "how calls are paired with gold calls of the same tool", "code rlla.py")
    scale: Literal["fixed", "equal", "two_stage", "dynamic"] = setting(
        "fixed", "correctness -3 to 3; -1 to 1; the latter at first, then half of format; or from format to correctness bit by bit", "paper §5.2")
    two_stage_step: int = setting(30, "two_stage: first step of the second stage", "paper §5.2", "steps")
    schedule: Literal["paper", "code"] = setting("paper", "dynamic scale and length: the paper's formulas, or the code's fixed denominators", "paper §5.1")
    length: Literal["off", "fixed", "dynamic"] = setting("off", "length reward, 0 to 1; dynamic: its target grows with training", "paper §5.1")
    length_target: int = setting(16, "length reward: thought that earns it in full", "paper §5.1", "words")
    # learning
    algorithm: Literal["grpo", "ppo"] = setting("grpo", "group-relative advantages, or a critic", "paper §3.4")
    aggregation: Literal["token", "sequence", "constant"] = setting("token", "mean of the loss over tokens, over sequences, or Dr. GRPO's constant", "code dp_actor.py")
    updates: int = setting(1, "optimiser steps per rollout batch", "paper App. B")
    lr: float = setting(4e-4, "learning rate of the policy (AdamW)", "paper App. B")
    warmup_steps: int = setting(3, "linear warm-up of the policy's rate", "code ppo_trainer.yaml", "steps")
    critic_lr: float = setting(1e-3, "learning rate of the critic", "code run_ppo.sh")
    critic_warmup_steps: int = setting(0, "linear warm-up of the critic's rate", "code ppo_trainer.yaml", "steps")
    weight_decay: float = setting(0.01, "AdamW weight decay", "code ppo_trainer.yaml")
    max_grad_norm: float = setting(1.0, "gradient clipping", "code ppo_trainer.yaml")
    clip: float = setting(0.2, "clip range of the policy ratio, both sides", "code ppo_trainer.yaml")
    value_clip: float = setting(0.5, "clip range of the critic", "code ppo_trainer.yaml")
    gamma: float = setting(1.0, "discount", "code ppo_trainer.yaml")
    lam: float = setting(1.0, "GAE lambda", "code ppo_trainer.yaml")
    kl: float = setting(0.0, "KL coefficient: k1 in the reward (the code's: 0.001)", "paper §3.4")
    entropy: float = setting(0.0, "entropy bonus", "code ppo_trainer.yaml")
    importance_cap: float = setting(0.0, "cap of the sampler/trainer importance correction; 0: off", "ours")
    micro_tokens: int = setting(12288, "padded tokens per micro-batch; the gradient does not depend on it", "ours", "tokens")
    gradient_checkpointing: bool = setting(False, "keep only every layer's input for the backward pass, and compute the rest again", "ours")
    optimizer_bf16: bool = setting(False, "keep AdamW's running means in bfloat16, rounded at random: half their memory", "ours")
    optimizer_offload: bool = setting(False, "keep AdamW's running means in the CPU's memory", "ours")
    # supervised start
    sft_steps: int = setting(0, "supervised steps on the gold replies before RL; 0: none", "paper §4.2")
    sft_batch: int = setting(16, "replies per supervised step", "code issue 42")
    sft_lr: float = setting(4e-4, "peak learning rate of the supervised steps: a tenth of them up to it, then a cosine", "code issue 42")


PRESETS = {
    "tiny": {},
    "smollm2": dict(  # a real 135 M model on a CPU: short everything, and a supervised start, as it never keeps to the form by itself
        model="smollm2", data="", steps=30, prompts=4, samples=4, prompt_tokens=1024, turn_tokens=160, length_target=64, lr=2e-5, sft_steps=12,
        sft_batch=8, sft_lr=1e-4, eval_questions=24, eval_every=0, save_every=5, micro_tokens=2048),
    "paper": dict(  # 3B, GRPO from a cold start as run_grpo.sh; for PPO add --algorithm ppo --samples 1; SFT4k is --sft-steps 735
        model="Qwen/Qwen2.5-3B-Instruct", device="cuda", data="emrecanacikgoz/ToolRL", steps=105, prompts=512, samples=4, prompt_tokens=2048,
        turn_tokens=1024, length_target=512, updates=4, lr=1e-6, warmup_steps=0, critic_lr=1e-5, entropy=0.001, sft_lr=1e-5, eval_questions=80,
        eval_every=5, save_every=15, micro_tokens=16384, gradient_checkpointing=True),
}

# ---- Prompt -----------------------------------------------------------------------------------------------------------
# A system message with the tools and the contract, a user message with the whole dialogue (code benchmarks/BFCL/rlla_qwen.py).
PROMPT = (
    "You are a multi-turn dialogue assistant. You may call tools and you give structured replies.\n\n**Available Tools**\n{tools}\n\n"
    "**Steps for Each Turn**\n1. Think about the context.\n2. Decide on tool usage.\n3. Respond.\n\n**Output Format**\n```plaintext\n"
    "<think> thoughts </think>\n<tool_call>\n{\"name\": \"tool name\", \"parameters\": {\"parameter\": \"value\"}}\n</tool_call>\n"
    "<response> reply </response>\n```\n\n**Notes**\n1. Always think. Then call tools, or respond, or both.\n2. Several calls go into "
    "one block, one JSON object a line, each with name and parameters ({} if there are none).\n3. Look at the history.")
STOP = ()


def list_tools(tools: list[dict]) -> str:
    """Numbered tools with their parameters as a map from name to description, type and default; what else a schema says follows."""
    return "\n".join(f"{i}. Name: {t['name']}\nDescription: {t['description']}\nParameters: " + json.dumps(
        {name: {key: p.get(key, "") for key in ("description", "type", "default")} | p for name, p in t["parameters"]["properties"].items()})
        for i, t in enumerate(tools, 1))


def write_reply(calls: list[dict], response: str = "I have no tool for that.") -> str:
    """A reply in the form the prompt asks for, from gold calls or from an earlier turn; its thought only names the tools, as the paper's data do."""
    if not calls:
        return f"<think> No tool fits. </think>\n<response> {response} </response>"
    lines = "\n".join(json.dumps({"name": c["name"], "parameters": c["arguments"]}) for c in calls)
    return f"<think> I need {' and '.join(c['name'] for c in calls)}. </think>\n<tool_call>\n{lines}\n</tool_call>"


def history(messages: list[dict]) -> str:
    """The dialogue so far as one text; API-Bank's rows bring it written out."""
    turns, spoken = [], [m for m in messages if m["role"] != "system"]
    if spoken[0]["content"].startswith("**Dialogue Record"):
        return spoken[0]["content"]
    for m in spoken:
        if m["role"] == "tool":
            turns[-1] += f"\n<obs> {neutralise(m['content'])} </obs>"
        elif m["role"] == "user":
            turns.append(f"<user> {m['content']} </user>")
        else:
            try:
                turns.append(write_reply(read_gold(m["content"]), m["content"]))
            except ValueError:
                turns.append(write_reply([], m["content"]))
    return "**Dialogue Record History**\n" + "\n\n".join(turns)


def render(example: Example, tokenizer, template: str = PROMPT) -> str:
    """The prompt text, through the chat template if the tokenizer has one; rows that come with a finished prompt keep it."""
    system = "".join(m["content"] + "\n\n" for m in example.meta.get("messages", ()) if m["role"] == "system")
    messages = example.meta.get("prompt") or [
        {"role": "system", "content": system + template.replace("{tools}", list_tools(example.meta["tools"]))},
        {"role": "user", "content": history(example.meta["messages"])}]
    if tokenizer.chat_template is None:
        return "\n\n".join(m["content"] for m in messages) + "\n"
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


# ---- Environment ------------------------------------------------------------------------------------------------------
def parse_block(text: str) -> list:
    """What stands in the first <tool_call> block, one JSON value a line (code rlla.py). ValueError if there is none, or a line is no JSON."""
    if "<tool_call>" not in text or "</tool_call>" not in text:
        raise ValueError("no <tool_call> block")
    return [loads(line) for line in text.split("<tool_call>")[1].split("</tool_call>")[0].strip().split("\n")]


def read_calls(text: str) -> list[tuple[str, str]] | None:
    """(name, parameters as JSON text) of the calls in a reply; [] if it responds without any, None if neither can be read."""
    if "<tool_call>" not in text:
        return [] if "<response>" in text else None
    try:
        return canonical(parse_block(text), "parameters")
    except ValueError:
        return None


def environment(turn: Turn, trajectory: Trajectory) -> End:
    """One model turn is the whole reply: its calls are noted, none is run."""
    trajectory.calls += [ToolCall(name, parameters, trajectory.example, "not_run") for name, parameters in read_calls(turn.text) or []]
    return End("answer" if turn.reason == "eos" else "length")


# ---- Reward -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Truth:
    calls: list[dict]  # {"name", "parameters"}
    tags: tuple[str, ...]  # of tool_call and response, those that the reply must have


def read_truth(answer: str) -> Truth:
    """The gold of an example: a JSON list of calls, or ToolRL's own text, whose tags say which form is asked for. ValueError says what is
    wrong with it."""
    if answer.lstrip().startswith("["):
        calls = [{"name": c["name"], "parameters": c["arguments"]} for c in read_gold(answer)]
        tags = ("tool_call",) if calls else ("response",)
    else:
        tags = tuple(tag for tag in ("tool_call", "response") if f"<{tag}>" in answer)
        calls = parse_block(answer) if "tool_call" in tags else []
    canonical(calls, "parameters")
    if not all(isinstance(c["name"], str) and isinstance(c["parameters"], dict) for c in calls):
        raise ValueError("a gold call's name is no text, or its parameters are no object")
    return Truth(calls, tags)


def truth_calls(example: Example) -> list[dict]:
    """The gold calls of a row that is being loaded. ValueError if they cannot be scored, or if its prompt asks for another method's form."""
    if ("prompt" in example.meta) == example.answers[0].lstrip().startswith("["):
        raise ValueError("a finished prompt goes with ToolRL's tagged ground truth, messages and tools with a JSON list of calls")
    try:
        return read_truth(example.answers[0]).calls
    except ValueError as error:
        raise ValueError(f"its ground truth cannot be read: {error}") from None


SHAPES = {  # tags of the ground truth -> shape of the whole reply (code rlla.py)
    (): r"<think>.*?</think>",
    ("response",): r"<think>.*?</think>\n<response>.*?</response>",
    ("tool_call",): r"<think>.*?</think>\n<tool_call>\n.*?\n</tool_call>",
    ("tool_call", "response"): r"<think>.*?</think>\n<tool_call>\n.*?\n</tool_call>\n<response>.*?</response>",
}


def well_formed(text: str, tags: tuple[str, ...]) -> bool:
    """Whether a reply has the shape, with each of the tags once; other tags may stand inside."""
    return all(text.count(f"<{tag}>") == text.count(f"</{tag}>") == 1 for tag in tags) and re.fullmatch(SHAPES[tags], text, re.S) is not None


def overlap(a: list, b: list) -> float:
    """Multiset Jaccard: what two lists share, over what either has."""
    if a == b:
        return 1.0
    shared = (Counter(a) & Counter(b)).total()
    return shared / max(1, len(a) + len(b) - shared)


def call_score(text: str, gold: list[dict], cfg: Config) -> float:
    """How nearly the calls of a reply are the gold ones, 0 to 1 (paper §3.3, code rlla.py); 0 where they cannot be read."""
    same = overlap if cfg.granularity != "finegrained" else lambda a, b: float(a == b)

    def pair(g: dict, p: dict) -> float:
        if p["name"] != g["name"]:
            return 0.0
        if cfg.granularity == "intermediate":
            return float(p == g)
        want, got = g["parameters"], p["parameters"]
        return same(list(want), list(got.keys())) + sum(key in got and got[key] == value for key, value in want.items())

    try:
        found = parse_block(text)
        if found == gold:
            return 1.0
        if cfg.granularity == "coarse":
            return 0.0
        names = same([g["name"] for g in gold], [p["name"] for p in found])
        scores_GP = [[pair(g, p) for p in found] for g in gold]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # no JSON, no call, or nested too deep to compare
        return 0.0
    pairing = scoring.greedy_pairing if cfg.matching == "greedy" else scoring.best_pairing
    most = 1 + sum(1 if cfg.granularity == "intermediate" else 1 + len(g["parameters"]) for g in gold)
    return (names + pairing(scores_GP)) / most


def ranges(cfg: Config, step: int) -> tuple[float, float, float, float]:
    """(lowest, highest) of format and of correctness at a step, which counts from 1 (paper §5.2)."""
    if cfg.scale == "equal":
        return 0.0, 1.0, -1.0, 1.0
    if cfg.scale == "two_stage":
        return (0.0, 1.0, -1.0, 1.0) if step < cfg.two_stage_step else (0.0, 0.5, -3.0, 3.0)
    if cfg.scale == "dynamic":
        if cfg.schedule == "paper":
            p = step / max(1, cfg.steps)
            return -2 + p, 2 - p, -2 - p, 2 + p
        p = step / 150
        return min(-2 + 2 * p, -1.0), max(2 - p, 1.0), max(-2 - p, -3.0), min(2 + p, 3.0)
    return 0.0, 1.0, -3.0, 3.0


def length_reward(text: str, cfg: Config, step: int) -> float:
    """Words of the last thought over their target, 0 to 1 (paper §5.1); 0 without both tags."""
    if "<think>" not in text or "</think>" not in text:
        return 0.0
    target = cfg.length_target
    if cfg.length == "dynamic":
        target = target * (1 + step / max(1, cfg.steps)) if cfg.schedule == "paper" else target / 2 * step / 105 + target * 3 / 4
    return min(round(len(text.rpartition("<think>")[2].partition("</think>")[0].split()) / target, 2), 1.0)


def reward(trajectory: Trajectory, example: Example, cfg: Config, step: int) -> dict[str, float]:
    """Named parts of the reward and their total; accuracy (exactly the right calls), names and irrelevance are for the metrics."""
    text, truth = trajectory.model_text.strip(), read_truth(example.answers[0])
    calls, gold = read_calls(text), canonical(truth.calls, "parameters")
    right = calls is not None and Counter(calls) == Counter(gold)
    names = calls is not None and Counter(name for name, _ in calls) == Counter(name for name, _ in gold)
    parts = {"accuracy": float(right), "names": float(names), "format": float(well_formed(text, truth.tags))}
    if not gold:
        parts["irrelevance"] = float(not calls)
    if cfg.reward == "binary":
        return {**parts, "total": float(right and "<think>" in text and "</think>" in text)}
    format_low, format_high, low, high = ranges(cfg, step)
    parts["correctness"] = (high - low) * call_score(text, truth.calls, cfg) + low if "tool_call" in truth.tags else 0.0
    total = (format_high if parts["format"] else format_low) + parts["correctness"]
    if cfg.length != "off":
        parts["length"] = length_reward(text, cfg, step)
        total += parts["length"]
    return {**parts, "total": total}


# ---- Supervised start -------------------------------------------------------------------------------------------------
def gold_reply(example: Example) -> str:
    """The reply to learn from: ToolRL's own text, or one written around the gold calls."""
    answer = example.answers[0]
    return write_reply(read_gold(answer)) if answer.lstrip().startswith("[") else answer.strip()


def supervised_start(cfg: Config, model, tokenizer, train_set: list[Example], prompts_of: Callable, run: Run) -> None:
    """Supervised steps on the gold replies of the training requests (paper §4.2)."""
    optimizer = make_optimizer(model.parameters(), cfg.sft_lr, bf16=cfg.optimizer_bf16, offload=cfg.optimizer_offload)
    for step in range(cfg.sft_steps):
        rows = []
        for p in prompts_of([train_set[i] for i in order(cfg.seed, step, len(train_set), cfg.sft_batch)])[0]:
            ids = tokenizer.encode(gold_reply(p.example) + tokenizer.eos_token, add_special_tokens=False)
            rows.append((p.ids + ids, [0] * len(p.ids) + [1] * len(ids)))
        loss = supervised_step(model, optimizer, rows, lr=lr_at(step, cfg.sft_steps, cfg.sft_lr, cfg.sft_steps // 10, schedule="cosine"),
                               micro_tokens=cfg.micro_tokens, max_grad_norm=cfg.max_grad_norm)
        run.log("warmup", 0, {"loss": loss})
        run.stop_if_asked(0)


# ---- Train ------------------------------------------------------------------------------------------------------------
def load_data(cfg: Config) -> tuple[list[Example], list[Example]]:
    """(training questions, held-out questions)."""
    load = functools.partial(load_requests, gold_calls=truth_calls)
    if cfg.data == "tiny":
        held_out = load(cfg.eval_data, split="test", limit=cfg.eval_questions) if cfg.eval_data else requests("eval", cfg.eval_questions)
        return requests("train", 4096, cfg.seed), held_out
    return training_and_held_out(cfg.data, cfg.eval_data, cfg.eval_questions, load, trains=not cfg.evaluate)


def train(cfg: Config) -> None:
    cfg = saved_config(Config, cfg.evaluate, cfg) if cfg.evaluate else cfg
    if cfg.plan:
        return print_plan(cfg, response_tokens=cfg.turn_tokens, turns=1, reference=cfg.kl > 0, critic=cfg.algorithm == "ppo")
    set_up_torch(cfg.seed, cfg.threads, cfg.device)
    template = read_template(cfg.template, PROMPT, "{tools}")
    train_set, eval_set = load_data(cfg)
    model, tokenizer = load_model(cfg.model, cfg.dtype, cfg.device, cfg.gradient_checkpointing)
    group = cfg.samples if cfg.algorithm == "grpo" else 1
    n_prompts = cfg.prompts * cfg.samples // group
    reference = load_model(cfg.model, cfg.dtype, cfg.device)[0] if cfg.kl else None
    critic = Critic(model) if cfg.algorithm == "ppo" else None
    shard(model, reference, critic)  # over the ranks, where there are several
    optimizer = make_optimizer(model.parameters(), cfg.lr, weight_decay=cfg.weight_decay, bf16=cfg.optimizer_bf16, offload=cfg.optimizer_offload)
    critic_optimizer = make_optimizer(critic.parameters(), cfg.critic_lr, weight_decay=cfg.weight_decay, bf16=cfg.optimizer_bf16,
                                      offload=cfg.optimizer_offload) if critic else None
    budget = Budget(cfg.prompt_tokens, cfg.turn_tokens, 0, cfg.turn_tokens, turns=0)
    engine = make_engine(cfg.engine, model, tokenizer, max_slots=max(n_prompts * group, min(cfg.eval_questions, 256)),
                         max_length=cfg.prompt_tokens + cfg.turn_tokens)
    tools, pool = {}, ToolPool(workers=0)
    prompts_of = lambda examples: make_prompts(examples, lambda e: render(e, tokenizer, template), tokenizer, budget)
    eval_prompts, _ = prompts_of(eval_set)

    def answer_eval() -> tuple[list[Trajectory], list[dict]]:
        """Greedy answers to the held-out questions, and their reward parts, on the scale of the last step."""
        engine.sync(model)
        trajectories = rollout(engine, tokenizer, eval_prompts, environment, tools, budget, pool, temperature=0.0, stop=STOP)
        return ranks.gather(trajectories), ranks.gather([reward(t, t.example, cfg, cfg.steps) for t in trajectories])

    if cfg.evaluate:
        trajectories, parts = answer_eval()
        print_benchmark([(t.example, read_calls(t.model_text)) for t in trajectories], asked=len(eval_set))
        return print_evaluation(cfg.evaluate, "accuracy", cfg, trajectories, parts)
    run = Run(cfg, method="toolrl", metric="accuracy", total_steps=cfg.steps, resume=cfg.resume, name=cfg.name)
    trained = {"model": model, "optimizer": optimizer, **({"critic": critic, "critic_optimizer": critic_optimizer} if critic else {}),
               **({"reference": reference} if reference and cfg.sft_steps else {})}
    first = run.restore(trained) if cfg.resume else 0
    if run.before is None:
        run.before = run.log_eval(0, *answer_eval(), tokenizer)
        if cfg.sft_steps:
            supervised_start(cfg, model, tokenizer, train_set, prompts_of, run)
            run.log_eval(0, *answer_eval(), tokenizer)
            if reference:  # RL starts here, and stays near here
                reference.load_state_dict(model.state_dict())
            if critic:  # it starts where RL starts
                critic.body.load_state_dict(model.base_model.state_dict())

    for step in range(first, cfg.steps):
        # 1. sample
        clock = Clock()
        engine.sync(model)
        prompts, skipped = prompts_of([train_set[i] for i in order(cfg.seed, step, len(train_set), n_prompts)])
        trajectories = rollout(engine, tokenizer, prompts, environment, tools, budget, pool, samples=group, temperature=cfg.temperature,
                               stop=STOP, seed=cfg.seed, step=step)
        clock.lap("sample_s")

        # 2. score
        parts = [reward(t, t.example, cfg, step + 1) for t in trajectories]
        rewards_B = torch.tensor([p["total"] for p in parts], device=cfg.device)
        batch = collate(trajectories, cfg.device)
        trained_BT = batch.sampled_BT
        nan_BT = torch.full_like(batch.sampler_BT, torch.nan)
        score_with = lambda m: score(m, batch.ids_BT, batch.lengths_B, batch.starts_B, trained_BT, temperature=cfg.temperature, micro_tokens=cfg.micro_tokens)
        old_BT = score_with(model) if cfg.updates > 1 or cfg.kl else nan_BT
        rewards_BT = losses.rewards_at_end(rewards_B, trained_BT)
        if reference:  # k1 in the reward, for GRPO too
            rewards_BT = rewards_BT - cfg.kl * losses.kl(old_BT, score_with(reference), trained_BT, "k1")

        # 3. advantages
        if cfg.algorithm == "grpo":
            advantages_BT = losses.group_advantages(rewards_BT.sum(1).view(-1, group)).view(-1, 1).expand_as(nan_BT)
        else:
            values_BT = values(critic, batch.ids_BT, batch.lengths_B, micro_tokens=cfg.micro_tokens)
            advantages_BT, returns_BT = losses.gae(rewards_BT, values_BT, trained_BT, cfg.gamma, cfg.lam)
            advantages_BT = losses.whiten(advantages_BT, trained_BT)
        clock.lap("logprob_s")

        # 4. update
        experience = Experience(batch.ids_BT, batch.lengths_B, batch.starts_B, trained_BT, batch.sampled_BT, batch.sampler_BT, old_BT, advantages_BT)
        done = []
        for rows in mini_batches(len(trajectories), cfg.updates, seed=cfg.seed, step=step):
            done.append(policy_step(
                model, optimizer, experience, rows, lr=lr_at(step, cfg.steps, cfg.lr, cfg.warmup_steps), clip_low=cfg.clip, clip_high=cfg.clip,
                aggregation=cfg.aggregation, budget_tokens=budget.sampled_tokens, temperature=cfg.temperature,
                entropy=cfg.entropy, importance_cap=cfg.importance_cap, micro_tokens=cfg.micro_tokens, max_grad_norm=cfg.max_grad_norm))
            if critic:
                done[-1] |= critic_step(critic, critic_optimizer, experience, rows, values_BT, returns_BT, trained_BT, value_clip=cfg.value_clip,
                                        lr=lr_at(step, cfg.steps, cfg.critic_lr, cfg.critic_warmup_steps), micro_tokens=cfg.micro_tokens,
                                        max_grad_norm=cfg.max_grad_norm)
        clock.lap("update_s")

        # 5. log, evaluate, save
        run.log_train(step + 1, trajectories, parts, experience, tokenizer, clock, engine, group,
                      {**joined(done), "skipped_prompts": skipped})
        if cfg.eval_every and (step + 1) % cfg.eval_every == 0 and step + 1 < cfg.steps:
            run.log_eval(step + 1, *answer_eval(), tokenizer)
        if run.signal or (step + 1) % cfg.save_every == 0 or step + 1 == cfg.steps:
            run.save(step + 1, trained)
        run.stop_if_asked(step + 1)

    run.finish(run.log_eval(cfg.steps, *answer_eval(), tokenizer))
    save_policy(run.folder / "model", model, tokenizer)
    print(run.closing_line(write_report(run.folder)))


if __name__ == "__main__":
    main(lambda: train(parse_config(Config, PRESETS)))
