"""Tool-N1: tool calls learned from a binary reward, or: the calls are exactly right, or they earn nothing.

Paper: "Nemotron-Research-Tool-N1: Exploring Tool-Using Language Models with Reinforced Reasoning", arXiv 2505.00024. Code: github
NVlabs/Tool-N1 (commit f9b48492).

The idea. A model that is given a set of tools and a dialogue reasons in words and then writes a list of calls; nothing is run. It earns 1 if
there is a thought and the calls are exactly the right ones, in any order, and 0 otherwise: no teacher shows how to think, and no partial
credit teaches the surface of a call. The paper finds that it does better than imitating a stronger model's reasoning first, and better than
partial rewards.

The method, step by step:
  1. `PROMPT` lists the tools and states the form: <think>, then one JSON list of calls in <tool_call>, the empty list for no call. The
     dialogue follows as chat messages.
  2. `environment` takes one model turn as the whole reply; its calls are noted, none is run.
  3. `read_block` reads the last <tool_call> block; calls are equal if their names are, and their arguments as JSON text with sorted keys.
  4. `reward` is binary; the paper's other variants pay for the thought, or for the right names, apart.
  5. `train`: advantages from the group (GRPO), clipped policy gradient over the sampled tokens, a small KL to the start model.

Kept from the paper: form of prompt and reply, the binary reward and its variants (--reward), how calls are compared, temperature 0.7, k3 in
the loss, SFT and SFT-then-RL arms, how examples are made from xLAM and ToolACE, all hyper-parameters in the preset `paper`.
Changed, and why:
  - one prompt for training and evaluation, with the rule of the empty list: the original has it in its evaluation only (bfcl_handler.py), and
    never trains on a request that no tool serves. Our tiny world has such requests; ToolACE's are let in by --no-call-turns.
  - replies on which the original's scorer crashes (a block that holds a number, numbers of thousands of digits) earn 0.
  - ToolACE's calls are read with a parser that knows quotes; the original's cuts a value at the first `)` (tool_utils.py).
  - earlier calls in the dialogue are one JSON text; the original encodes them twice (verl_toolcall_preprocess.py).
  - tags count wherever they stand, as in the code (--strict asks for one thought, then one block, and nothing else).

What to watch: `accuracy` (exact calls) is the reward but for the thought; `names` runs ahead of it; `format` has to be learned by a model
that does not know the form (the tiny one does); `irrelevance` shows whether the model still abstains; `zero_variance_groups` starts high,
as a binary reward is silent where all fail.

    make tool_n1                                              # tiny model and world, a few minutes on two cores
    make tool_n1 ARGS="--reward partial_names"                # also: partial, no_think, lexicographic, llama
    make tool_n1 ARGS="--sft-steps 40 --steps 0"              # SFT alone; --no-sft-think learns the calls without a thought
    make tool_n1 ARGS="--sft-steps 20"                        # SFT, then RL
    make tool_n1 ARGS="--strict"
    make tool_n1 ARGS="--preset smollm2 --data Team-ACE/ToolACE"
"""
import functools
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from common import losses, ranks
from common.calls import canonical, load_requests, loads, print_benchmark, read_gold
from common.data import Example, order, training_and_held_out
from common.engine import make_engine
from common.plan import print_plan
from common.policy import load_model, lr_at, make_optimizer, save_policy, shard
from common.report import write_report
from common.rollout import Budget, End, ToolCall, ToolPool, Trajectory, Turn, collate, make_prompts, rollout
from common.run import Clock, Run, main, parse_config, print_evaluation, read_template, saved_config, set_up_torch, setting
from common.search import neutralise
from common.tiny.world import requests
from common.update import Experience, joined, mini_batches, policy_step, score, supervised_step


# ---- Config -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Config:
    """Defaults are the preset `tiny`. A source names where the published value (preset `paper`) stands, or says that it is ours."""
    preset: str = setting("tiny", "defaults for the other flags: tiny, smollm2 or paper", "ours")
    name: str = setting("", "name of the run's folder (default: preset and seed)", "ours")
    seed: int = setting(0, "seed of data order and sampling", "ours")
    steps: int = setting(60, "optimisation steps (one rollout batch each)", "paper Fig. 6")
    resume: bool = setting(False, "go on with a run that was stopped or killed", "ours")
    stop_on_collapse: bool = setting(False, "save and stop at signs of collapse (common/health.py); they are always said", "ours")
    evaluate: str = setting("", "folder of a finished run: evaluate its model again instead of training", "ours")
    plan: bool = setting(False, "instead of training, print what these settings need: memory per GPU, tokens, disk; nothing is loaded", "ours")
    # model and data
    model: str = setting("tiny", "tiny, smollm2, a folder, or a hub id", "paper §5.1")
    dtype: Literal["float32", "bfloat16"] = setting("float32", "type of the weights", "ours")
    device: str = setting("cpu", "cpu or cuda", "ours")
    threads: int = setting(0, "CPU threads; 0: one per core", "ours")
    engine: Literal["hf", "vllm"] = setting("hf", "engine that samples: hf, or vllm (make setup_vllm)", "ours")
    data: str = setting("tiny", "training questions: tiny, or files and hub data sets (Tool-N1's, xLAM, ToolACE) with commas between them", "paper Tab. 1")
    no_call_turns: bool = setting(False, "ToolACE: turns without a call are requests too, with the empty list", "code raw_data_process.py")
    eval_data: str = setting("", "held-out questions, as --data; also bfcl:CATEGORIES or api_bank:FOLDER (default: split off from the training questions)", "ours")
    eval_questions: int = setting(200, "held-out questions", "ours")
    eval_every: int = setting(20, "evaluate every so many steps, and before and after (greedy, same questions); 0: only before and after", "code qwen.sh")
    save_every: int = setting(20, "checkpoint every so many steps", "code qwen.sh")
    keep_trajectories: int = setting(4, "trajectories a step that are written to trajectories.jsonl", "ours")
    template: str = setting("", "file with another system prompt; it must hold {tools}", "ours")
    # rollout
    prompts: int = setting(12, "questions per step", "paper App. B")
    samples: int = setting(8, "trajectories per question (GRPO's group size)", "paper App. B")
    temperature: float = setting(0.7, "sampling temperature, no top-p", "paper App. B")
    prompt_tokens: int = setting(384, "longest prompt; longer ones are skipped and counted", "paper App. B", "tokens")
    turn_tokens: int = setting(96, "longest model turn", "paper App. B", "tokens")
    # reward
    reward: Literal["binary", "no_think", "partial", "partial_names", "lexicographic", "llama"] = setting(
        "binary", "thought and exactly the right calls; calls alone; 0.2 for the thought, 0.8 for the calls; and 0.2 for the names alone; the code's v1; "
        "or its rule for Llama, in which no block is an empty list", "paper Tab. 4")
    strict: bool = setting(False, "the thought must come first, then one block, and nothing else", "code toolcall.py")
    # learning
    aggregation: Literal["token", "sequence", "constant"] = setting("token", "mean of the loss over tokens, over sequences, or Dr. GRPO's constant", "code dp_actor.py")
    updates: int = setting(1, "optimiser steps per rollout batch", "code qwen.sh")
    lr: float = setting(4e-4, "learning rate of the policy (AdamW)", "paper App. B")
    warmup_steps: int = setting(3, "linear warm-up of the policy's rate", "code qwen.sh", "steps")
    weight_decay: float = setting(0.01, "AdamW weight decay", "code ppo_trainer.yaml")
    max_grad_norm: float = setting(1.0, "gradient clipping", "code ppo_trainer.yaml")
    clip: float = setting(0.2, "clip range of the policy ratio, both sides", "code ppo_trainer.yaml")
    kl: float = setting(0.0, "KL coefficient: k3 in the loss", "paper App. B")
    entropy: float = setting(0.0, "entropy bonus", "paper App. B")
    importance_cap: float = setting(0.0, "cap of the sampler/trainer importance correction; 0: off", "ours")
    micro_tokens: int = setting(12288, "padded tokens per micro-batch; the gradient does not depend on it", "ours", "tokens")
    gradient_checkpointing: bool = setting(False, "keep only every layer's input for the backward pass, and compute the rest again", "ours")
    optimizer_bf16: bool = setting(False, "keep AdamW's running means in bfloat16, rounded at random: half their memory", "ours")
    optimizer_offload: bool = setting(False, "keep AdamW's running means in the CPU's memory", "ours")
    # supervised start
    sft_steps: int = setting(0, "supervised steps on the gold replies before RL; 0: none", "paper Tab. 3")
    sft_batch: int = setting(16, "replies per supervised step", "code qwen_sft.yaml")
    sft_lr: float = setting(4e-4, "peak learning rate of the supervised steps: a tenth of them up to it, then a cosine", "code qwen_sft.yaml")
    sft_think: bool = setting(True, "learn the thought too", "paper Tab. 3")


PRESETS = {
    "tiny": {},
    "smollm2": dict(  # a real 135 M model on a CPU: short everything, and a supervised start, as it never keeps to the form by itself
        model="smollm2", data="", steps=30, prompts=4, samples=4, prompt_tokens=1024, turn_tokens=160, lr=2e-5, sft_steps=12, sft_batch=8,
        sft_lr=1e-4, eval_questions=24, eval_every=0, save_every=5, micro_tokens=2048),
    "paper": dict(  # 7B, as qwen.sh; its 7 epochs would be 427 steps, but every curve of the paper ends near 150
        model="Qwen/Qwen2.5-7B-Instruct", device="cuda", data="Salesforce/xlam-function-calling-60k,Team-ACE/ToolACE", steps=150, prompts=1024,
        samples=5, prompt_tokens=4096, turn_tokens=8192, updates=4, lr=1e-6, warmup_steps=0, kl=0.001, sft_batch=32, sft_lr=2e-5,
        eval_questions=1000, eval_every=10, save_every=10, micro_tokens=16384, gradient_checkpointing=True),
}

# ---- Prompt -----------------------------------------------------------------------------------------------------------
# A system message with the tools and the contract, then the dialogue as it is (code verl_toolcall_preprocess.py).
PROMPT = (
    "You are an expert in composing functions. Make one or more function calls for the request; if none fits, or parameters are "
    "missing, make no call.\n# Tool\n<tools>\n{tools}\n</tools>\nReason between <think> and </think>. Then give the calls as a JSON "
    "list between <tool_call> and </tool_call>; the empty list for no call. Do both in one reply. For example:\n<think> I need two "
    "calls. </think>\n<tool_call>\n[{\"name\": \"f\", \"arguments\": {\"x\": 1}}, {\"name\": \"g\", \"arguments\": {\"y\": "
    "\"b\"}}]\n</tool_call>\nMind the types of the arguments.")
STOP = ()


def list_tools(tools: list[dict]) -> str:
    """One JSON object a line; a schema that says nothing beside its properties is written as these, which is how xLAM has it."""
    bare = lambda schema: schema["properties"] if set(schema) <= {"type", "properties"} else schema
    return "\n".join(json.dumps({"type": "function", "function": {**t, "parameters": bare(t["parameters"])}}) for t in tools)


def write_reply(calls: list[dict], think: bool = True) -> str:
    """A reply in the form the prompt asks for, from gold calls; its thought only names the tools."""
    thought = f"I need {' and '.join(c['name'] for c in calls)}." if calls else "No tool fits."
    return f"<think> {thought} </think>\n" * think + f"<tool_call>\n{json.dumps(calls)}\n</tool_call>"


def render(example: Example, tokenizer, template: str = PROMPT) -> str:
    """The prompt text, through the chat template if the tokenizer has one; rows that come with a finished prompt keep it."""
    system = "".join(m["content"] + "\n\n" for m in example.meta.get("messages", ()) if m["role"] == "system")
    messages = example.meta.get("prompt") or [
        {"role": "system", "content": system + template.replace("{tools}", list_tools(example.meta["tools"]))},
        *({**m, "content": neutralise(m["content"])} if m["role"] == "tool" else m
          for m in example.meta["messages"] if m["role"] != "system")]
    if tokenizer.chat_template is None:
        return "\n\n".join(m["content"] for m in messages) + "\n"
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


# ---- Environment ------------------------------------------------------------------------------------------------------
def last_block(text: str) -> str | None:
    """The text of the last <tool_call> block; None if there is none."""
    block, at = None, text.find("<tool_call>")
    while at >= 0 and (end := text.find("</tool_call>", at)) >= 0:
        block, at = text[at + len("<tool_call>"):end].strip(), text.find("<tool_call>", end)
    return block


def read_block(text: str) -> tuple[list | None, bool]:
    """(the list in the last block, None if none can be read; whether the original's scorer crashes on it). An object is a list of one, and
    JSON in a JSON string is decoded once more (code toolcall.py)."""
    try:
        found = loads(last_block(text) or "")
        found = loads(found) if isinstance(found, str) else found
    except json.JSONDecodeError:
        return None, False
    except ValueError:  # a number of thousands of digits; brackets nested thousands deep
        return None, True
    found = [found] if isinstance(found, dict) else found
    return (found, False) if found is None or isinstance(found, list) else (None, True)


def read_calls(text: str) -> list[tuple[str, str]] | None:
    """(name, arguments as JSON text) of the calls in a reply; None if they cannot be read."""
    try:
        return canonical(read_block(text)[0])
    except ValueError:
        return None


def environment(turn: Turn, trajectory: Trajectory) -> End:
    """One model turn is the whole reply: its calls are noted, none is run."""
    trajectory.calls += [ToolCall(name, arguments, trajectory.example, "not_run") for name, arguments in read_calls(turn.text) or []]
    return End("answer" if turn.reason == "eos" else "length")


# ---- Reward -----------------------------------------------------------------------------------------------------------
STRICT = re.compile(r"<think>.*?</think>\s*<tool_call>.*?</tool_call>", re.S)
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def has_thought(text: str, strict: bool) -> bool:
    """Both tags occur, wherever (code toolcall.py); strict: a thought, then one block, and nothing else."""
    if strict:
        return all(text.count(tag) == 1 for tag in TAGS) and STRICT.fullmatch(text) is not None
    return "<think>" in text and "</think>" in text


def truth_calls(example: Example) -> list[dict]:
    """The gold calls of a row that is being loaded. ValueError if they cannot be scored."""
    return read_gold(example.answers[0])


def reward(trajectory: Trajectory, example: Example, cfg: Config) -> dict[str, float]:
    """Named parts of the reward and their total (code toolcall.py); accuracy (exactly the right calls), names and irrelevance are for the metrics."""
    text, gold = trajectory.model_text.strip(), canonical(read_gold(example.answers[0]))
    block, crash = read_block(text)
    silent = cfg.reward == "llama" and last_block(text) is None
    calls = [] if silent else read_calls(text)
    right = calls is not None and Counter(calls) == Counter(gold)
    names = calls is not None and Counter(name for name, _ in calls) == Counter(name for name, _ in gold)
    thought = has_thought(text, cfg.strict)
    parts = {"accuracy": float(right), "names": float(names), "format": float(thought and calls is not None)}
    if not gold:
        parts["irrelevance"] = float(not calls)
    if cfg.reward == "no_think":
        total = right
    elif cfg.reward == "partial":
        total = 0.2 * thought + 0.8 * right
    elif cfg.reward == "partial_names":
        total = 0.2 * thought + (0.8 if right else 0.2 * names)
    elif cfg.reward == "lexicographic":
        total = 1.0 + 0.2 * thought if right else -0.2 * (thought and block is not None)
    else:
        total = right and (thought or silent)
    return {**parts, "total": 0.0 if crash else float(total)}


# ---- Supervised start -------------------------------------------------------------------------------------------------
def gold_reply(example: Example, think: bool = True) -> str:
    """The reply to learn from, written around the gold calls."""
    return write_reply(read_gold(example.answers[0]), think)


def supervised_start(cfg: Config, model, tokenizer, train_set: list[Example], prompts_of: Callable, run: Run) -> None:
    """Supervised steps on the gold replies of the training requests (paper Tab. 3; the whole model, where the paper trains adapters)."""
    optimizer = make_optimizer(model.parameters(), cfg.sft_lr, bf16=cfg.optimizer_bf16, offload=cfg.optimizer_offload)
    for step in range(cfg.sft_steps):
        rows = []
        for p in prompts_of([train_set[i] for i in order(cfg.seed, step, len(train_set), cfg.sft_batch)])[0]:
            ids = tokenizer.encode(gold_reply(p.example, cfg.sft_think) + tokenizer.eos_token, add_special_tokens=False)
            rows.append((p.ids + ids, [0] * len(p.ids) + [1] * len(ids)))
        loss = supervised_step(model, optimizer, rows, lr=lr_at(step, cfg.sft_steps, cfg.sft_lr, cfg.sft_steps // 10, schedule="cosine"),
                               micro_tokens=cfg.micro_tokens, max_grad_norm=cfg.max_grad_norm)
        run.log("warmup", 0, {"loss": loss})
        run.stop_if_asked(0)


# ---- Train ------------------------------------------------------------------------------------------------------------
def load_data(cfg: Config) -> tuple[list[Example], list[Example]]:
    """(training questions, held-out questions)."""
    load = functools.partial(load_requests, no_call=cfg.no_call_turns, gold_calls=truth_calls)
    if cfg.data == "tiny":
        held_out = load(cfg.eval_data, split="test", limit=cfg.eval_questions) if cfg.eval_data else requests("eval", cfg.eval_questions)
        return requests("train", 4096, cfg.seed), held_out
    return training_and_held_out(cfg.data, cfg.eval_data, cfg.eval_questions, load, trains=not cfg.evaluate)


def train(cfg: Config) -> None:
    cfg = saved_config(Config, cfg.evaluate, cfg) if cfg.evaluate else cfg
    if cfg.plan:
        return print_plan(cfg, response_tokens=cfg.turn_tokens, turns=1, reference=cfg.kl > 0)
    set_up_torch(cfg.seed, cfg.threads, cfg.device)
    template = read_template(cfg.template, PROMPT, "{tools}")
    train_set, eval_set = load_data(cfg)
    model, tokenizer = load_model(cfg.model, cfg.dtype, cfg.device, cfg.gradient_checkpointing)
    group, n_prompts = cfg.samples, cfg.prompts
    reference = load_model(cfg.model, cfg.dtype, cfg.device)[0] if cfg.kl else None
    shard(model, reference)  # over the ranks, where there are several
    optimizer = make_optimizer(model.parameters(), cfg.lr, weight_decay=cfg.weight_decay, bf16=cfg.optimizer_bf16, offload=cfg.optimizer_offload)
    budget = Budget(cfg.prompt_tokens, cfg.turn_tokens, 0, cfg.turn_tokens, turns=0)
    engine = make_engine(cfg.engine, model, tokenizer, max_slots=max(n_prompts * group, min(cfg.eval_questions, 256)),
                         max_length=cfg.prompt_tokens + cfg.turn_tokens)
    tools, pool = {}, ToolPool(workers=0)
    prompts_of = lambda examples: make_prompts(examples, lambda e: render(e, tokenizer, template), tokenizer, budget)
    eval_prompts, _ = prompts_of(eval_set)

    def answer_eval() -> tuple[list[Trajectory], list[dict]]:
        """Greedy answers to the held-out questions, and their reward parts."""
        engine.sync(model)
        trajectories = rollout(engine, tokenizer, eval_prompts, environment, tools, budget, pool, temperature=0.0, stop=STOP)
        return ranks.gather(trajectories), ranks.gather([reward(t, t.example, cfg) for t in trajectories])

    if cfg.evaluate:
        trajectories, parts = answer_eval()
        print_benchmark([(t.example, read_calls(t.model_text)) for t in trajectories], asked=len(eval_set))
        return print_evaluation(cfg.evaluate, "accuracy", cfg, trajectories, parts)
    run = Run(cfg, method="tool_n1", metric="accuracy", total_steps=cfg.steps, resume=cfg.resume, name=cfg.name)
    trained = {"model": model, "optimizer": optimizer, **({"reference": reference} if reference and cfg.sft_steps else {})}
    first = run.restore(trained) if cfg.resume else 0
    if run.before is None:
        run.before = run.log_eval(0, *answer_eval(), tokenizer)
        if cfg.sft_steps:
            supervised_start(cfg, model, tokenizer, train_set, prompts_of, run)
            run.log_eval(0, *answer_eval(), tokenizer)
            if reference:  # RL starts here, and stays near here
                reference.load_state_dict(model.state_dict())

    for step in range(first, cfg.steps):
        # 1. sample
        clock = Clock()
        engine.sync(model)
        prompts, skipped = prompts_of([train_set[i] for i in order(cfg.seed, step, len(train_set), n_prompts)])
        trajectories = rollout(engine, tokenizer, prompts, environment, tools, budget, pool, samples=group, temperature=cfg.temperature,
                               stop=STOP, seed=cfg.seed, step=step)
        clock.lap("sample_s")

        # 2. score
        parts = [reward(t, t.example, cfg) for t in trajectories]
        rewards_B = torch.tensor([p["total"] for p in parts], device=cfg.device)
        batch = collate(trajectories, cfg.device)
        trained_BT = batch.sampled_BT
        nan_BT = torch.full_like(batch.sampler_BT, torch.nan)
        score_with = lambda m: score(m, batch.ids_BT, batch.lengths_B, batch.starts_B, trained_BT, temperature=cfg.temperature, micro_tokens=cfg.micro_tokens)
        old_BT = score_with(model) if cfg.updates > 1 else nan_BT
        ref_BT = score_with(reference) if reference else None

        # 3. advantages
        advantages_BT = losses.group_advantages(rewards_B.view(-1, group)).view(-1, 1).expand_as(nan_BT)
        clock.lap("logprob_s")

        # 4. update
        experience = Experience(batch.ids_BT, batch.lengths_B, batch.starts_B, trained_BT, batch.sampled_BT, batch.sampler_BT, old_BT, advantages_BT, ref_BT)
        done = []
        for rows in mini_batches(len(trajectories), cfg.updates, seed=cfg.seed, step=step):
            done.append(policy_step(
                model, optimizer, experience, rows, lr=lr_at(step, cfg.steps, cfg.lr, cfg.warmup_steps), clip_low=cfg.clip, clip_high=cfg.clip,
                aggregation=cfg.aggregation, budget_tokens=budget.sampled_tokens, temperature=cfg.temperature, kl=cfg.kl, kl_kind="k3",
                entropy=cfg.entropy, importance_cap=cfg.importance_cap, micro_tokens=cfg.micro_tokens, max_grad_norm=cfg.max_grad_norm))
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
