"""ReTool: a cold start on traces with code, then reinforcement learning with an interpreter in the loop.

Paper: "ReTool: Reinforcement Learning for Strategic Tool Use in LLMs", arXiv 2504.11536 (v2). Code: github ReTool-RL/ReTool (commit
8407e139, evaluation only); training recipe: verl-recipe `retool/` (commit 48ea0a79).

The idea. Text reasoning whose computations were replaced by code and its real output teaches a model, by plain supervised learning, how to
use an interpreter. Reinforcement learning on the final answer alone then teaches it when to. The interpreter's words are left out of the
loss. The paper finds that it needs far fewer steps than reinforcement learning in text alone.

The method, step by step:
  1. `PROMPT`: reason, write snippets between <code> and </code>, read <interpreter>, end with \\boxed{} between <answer> and </answer>.
  2. `cold_start`: supervised steps on traces with code; the interpreter's words are context, not targets.
  3. `environment` reads one model turn: it stops at </code>, and the program after the last fence is run.
  4. `observe` turns what happened into text: output, or the last line of an error, never more than 400 characters.
  5. `reward` compares the last \\boxed{} with the gold answer: +1 or -1.
  6. `train`: a critic and GAE (PPO, paper) or group advantages (GRPO with an asymmetric clip, recipe), over the tokens the model sampled.

Kept from the paper: tags, cold start, masking, +1/-1 without any bonus for code that runs, KL 0, both the paper's PPO and the recipe's GRPO
(clip 0.2/0.28, dual clip 10).
Changed, and why:
  - the recipe writes tool calls as JSON and edits the last line of a program into a print (which breaks loops and comments); here the
    paper's tags stay and a program is run as it was written; one that prints nothing is answered with a note.
  - a snippet without a fence is the text after <code>; the evaluation code runs it with the tag in it (eval.py).
  - the answer is compared by equality of maths; the recipe asks for the same characters (`--reward recipe` does that, with its graded
    punishment).
  - the problems' own instructions, another answer format, are taken off (the recipe leaves them in); the cold start's questions are asked
    with the prompt that RL uses.
  - calls, output and time are limited: the paper states no limits; the recipe has 8 turns and the evaluation code 400 characters.
  - tags and fences in output are made harmless: a program cannot end the interpreter's block.

What to watch: `accuracy` and `code`; with the cold start both begin high; `response_tokens`, which falls in the paper, grows a little on the
tiny model.

    make retool                                               # tiny model and world, a few minutes on two cores
    make retool ARGS="--cold-start 0"                         # reinforcement learning alone
    make retool ARGS="--text-only"                            # no interpreter, prompt and cold start in text
    make retool ARGS="--algorithm ppo"
"""
import re
from dataclasses import dataclass, replace
from typing import Literal

import torch

from common import UserError, losses, ranks
from common.data import Example, load_examples, order, read_messages, training_and_held_out
from common.engine import make_engine
from common.maths import last_boxed, maths_equal, maths_self_test
from common.plan import print_plan
from common.policy import Critic, load_model, lr_at, make_optimizer, save_policy, shard
from common.report import write_report
from common.rollout import Budget, Call, End, Tool, ToolCall, ToolFailure, ToolPool, Trajectory, Turn, collate, make_prompts, rollout
from common.run import Clock, Run, main, parse_config, print_evaluation, read_template, saved_config, set_up_torch, setting
from common.sandbox import Limits, Outcome, open_sandbox
from common.search import neutralise
from common.tiny.world import problems
from common.tools import python_tool
from common.update import Experience, critic_step, demonstration_row, joined, mini_batches, policy_step, score, supervised_step, values
from common.warmup import program_by_rule


# ---- Config -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Config:
    """Defaults are the preset `tiny`. A source names where the published value (preset `paper`) stands, or says that it is ours."""
    preset: str = setting("tiny", "defaults for the other flags: tiny, smollm2 or paper", "ours")
    name: str = setting("", "name of the run's folder (default: preset and seed)", "ours")
    seed: int = setting(0, "seed of data order and sampling", "ours")
    steps: int = setting(40, "optimisation steps (one rollout batch each)", "paper Tab. 1")
    resume: bool = setting(False, "go on with a run that was stopped or killed", "ours")
    stop_on_collapse: bool = setting(False, "save and stop at signs of collapse (common/health.py); they are always said", "ours")
    evaluate: str = setting("", "folder of a finished run: evaluate its model again instead of training", "ours")
    plan: bool = setting(False, "instead of training, print what these settings need: memory per GPU, tokens, disk; nothing is loaded", "ours")
    # model and data
    model: str = setting("tiny", "tiny, smollm2, a folder, or a hub id", "paper §3.1")
    dtype: Literal["float32", "bfloat16"] = setting("float32", "type of the weights", "ours")
    device: str = setting("cpu", "cpu or cuda", "ours")
    threads: int = setting(0, "CPU threads; 0: one per core", "ours")
    engine: Literal["hf", "vllm"] = setting("hf", "engine that samples: hf, or vllm (make setup_vllm)", "ours")
    data: str = setting("tiny", "training questions: tiny, a .jsonl, .json or .parquet file, or a hub data set id", "code recipe retool.py")
    eval_data: str = setting("", "held-out questions, as --data (default: split off from the training questions)", "ours")
    eval_questions: int = setting(200, "held-out questions", "ours")
    eval_every: int = setting(15, "evaluate every so many steps, and before and after (greedy, same questions); 0: only before and after", "code recipe run_qwen2-32b_dapo.sh")
    save_every: int = setting(15, "checkpoint every so many steps", "code recipe run_qwen2-32b_dapo.sh")
    keep_trajectories: int = setting(4, "trajectories a step that are written to trajectories.jsonl", "ours")
    template: str = setting("", "file with another prompt; it must hold {question}", "ours")
    # rollout
    prompts: int = setting(12, "questions per step", "code recipe run_qwen2-32b_dapo.sh")
    samples: int = setting(8, "trajectories per question (GRPO's group size; PPO uses 1)", "code recipe run_qwen2-32b_dapo.sh")
    max_turns: int = setting(3, "turns whose call is run; one more turn may answer", "code recipe run_qwen2-32b_dapo.sh")
    text_only: bool = setting(False, "no interpreter, prompt and cold start in text: the paper's baseline", "paper Tab. 1")
    sandbox: str = setting("isolated", "where programs run: isolated, unsafe, or the URL of a SandboxFusion server", "ours")
    run_timeout: float = setting(5.0, "longest run of a program", "code recipe sandbox_fusion_tool_config.yaml", "seconds")
    temperature: float = setting(1.0, "sampling temperature, no top-p", "code ppo_trainer.yaml")
    prompt_tokens: int = setting(224, "longest prompt; longer ones are skipped and counted", "code recipe run_qwen2-32b_dapo.sh", "tokens")
    turn_tokens: int = setting(64, "longest model turn", "code scripts/eval.sh", "tokens")
    observation_tokens: int = setting(64, "longest tool result", "ours", "tokens")
    observation_chars: int = setting(400, "longer output keeps its first and last half only", "code executor.py", "characters")
    trajectory_tokens: int = setting(320, "longest trajectory after the prompt", "paper §3.1", "tokens")
    # reward
    reward: Literal["answer", "recipe"] = setting(
        "answer", "+1 or -1; recipe: the same characters in a box near the end, wrong answers 0.1 less bad per call, up to -0.6", "paper §2.3.1")
    # learning
    algorithm: Literal["grpo", "ppo"] = setting("grpo", "group-relative advantages, or a critic", "code recipe run_qwen2-32b_dapo.sh; paper §2.3")
    mask_observations: bool = setting(True, "leave what the model did not write (results, notices) out of the policy's loss", "paper §2.3.2")
    aggregation: Literal["token", "sequence", "constant"] = setting("token", "mean of the loss over tokens, over sequences, or Dr. GRPO's constant", "code recipe run_qwen2-32b_dapo.sh")
    updates: int = setting(1, "optimiser steps per rollout batch", "code recipe run_qwen2-32b_dapo.sh")
    lr: float = setting(4e-4, "learning rate of the policy (AdamW)", "paper §2.3.2")
    warmup_steps: int = setting(3, "linear warm-up of the policy's rate", "ours", "steps")
    critic_lr: float = setting(1e-3, "learning rate of the critic", "code recipe run_qwen2-32b_ppo.sh")
    policy_from_step: int = setting(1, "PPO: first step in which the policy learns too, counted from 1; before it the critic alone", "code recipe run_qwen2-32b_ppo.sh", "steps")
    weight_decay: float = setting(0.01, "AdamW weight decay", "code ppo_trainer.yaml")
    max_grad_norm: float = setting(1.0, "gradient clipping", "code ppo_trainer.yaml")
    clip_low: float = setting(0.2, "clip range of the policy ratio below 1", "code recipe run_qwen2-32b_dapo.sh")
    clip_high: float = setting(0.28, "clip range of the policy ratio above 1", "code recipe run_qwen2-32b_dapo.sh")
    dual_clip: float = setting(10.0, "lower bound of the loss where the advantage is negative", "code recipe run_qwen2-32b_dapo.sh")
    value_clip: float = setting(0.5, "clip range of the critic", "code ppo_trainer.yaml")
    gamma: float = setting(1.0, "discount", "code recipe run_qwen2-32b_ppo.sh")
    lam: float = setting(1.0, "GAE lambda", "code recipe run_qwen2-32b_ppo.sh")
    entropy: float = setting(0.0, "entropy bonus", "code ppo_trainer.yaml")
    importance_cap: float = setting(0.0, "cap of the sampler/trainer importance correction; 0: off", "ours")
    micro_tokens: int = setting(12288, "padded tokens per micro-batch; the gradient does not depend on it", "ours", "tokens")
    gradient_checkpointing: bool = setting(False, "keep only every layer's input for the backward pass, and compute the rest again", "ours")
    optimizer_bf16: bool = setting(False, "keep AdamW's running means in bfloat16, rounded at random: half their memory", "ours")
    optimizer_offload: bool = setting(False, "keep AdamW's running means in the CPU's memory", "ours")
    # supervised cold start
    cold_start: int = setting(6, "supervised steps before RL; 0: none", "code recipe run_qwen2-32b_sft.sh")
    cold_start_data: str = setting("", "file of {\"messages\"} rows as ReTool-SFT (default: traces built from the tiny world's expressions or GSM8K's solutions)", "paper §2.2")
    cold_start_traces: int = setting(48, "traces of the cold start", "code recipe run_qwen2-32b_sft.sh")
    cold_start_batch: int = setting(16, "traces per supervised step", "code recipe run_qwen2-32b_sft.sh")
    cold_start_lr: float = setting(4e-4, "peak learning rate of the cold start: a tenth of the steps up to it, then a cosine", "code recipe run_qwen2-32b_sft.sh")


PRESETS = {
    "tiny": {},
    "smollm2": dict(  # a real 135 M model on a CPU: short everything
        model="smollm2", data="", steps=30, prompts=4, samples=4, max_turns=2, prompt_tokens=384, turn_tokens=128, observation_tokens=64,
        trajectory_tokens=384, lr=2e-5, cold_start_lr=1e-4, eval_questions=24, eval_every=0, save_every=5, micro_tokens=2048),
    "paper": dict(  # 32B; GRPO as the recipe, for the paper's PPO add --algorithm ppo --prompts 1024 --samples 1 --updates 4
        model="Qwen/Qwen2.5-32B-Instruct", device="cuda", data="BytedTsinghua-SIA/DAPO-Math-17k", cold_start_data="JoeYing/ReTool-SFT",
        steps=400, prompts=512, samples=16, max_turns=8, run_timeout=30.0, prompt_tokens=2048, turn_tokens=16384, observation_tokens=512,
        trajectory_tokens=16384, updates=8, lr=1e-6, warmup_steps=0, critic_lr=2e-6, policy_from_step=20, cold_start=372, cold_start_traces=2000,
        cold_start_batch=32, cold_start_lr=1e-5, eval_every=10, save_every=30, micro_tokens=16384, gradient_checkpointing=True),
}

# ---- Prompt -----------------------------------------------------------------------------------------------------------
# One user message, no system message, no example (code evaluation/prompt_template.json, paper Fig. 7)
PROMPT = (
    "Solve the problem step by step. You may write Python that a sandbox runs; its output comes between <interpreter> and "
    "</interpreter>. Scripts are complete, with imports. Each snippet is\n<code>\n```python\ncode\n```\n</code>\nThe last part of the "
    "response is\n<answer>\n\\boxed{the answer}\n</answer>\n*user question:*\nSolve this problem and put the answer in \\boxed{}. "
    "{question}\nRemember to end with the answer in its tags.")
TEXT_PROMPT = (  # --text-only
    "Solve the problem step by step. The last part of the response is\n<answer>\n\\boxed{the answer}\n</answer>\n*user question:*\nSolve this "
    "problem and put the answer in \\boxed{}. {question}\nRemember to end with the answer in its tags.")
STOP = ("</code>",)


def render(example: Example, tokenizer, template: str = PROMPT) -> str:
    """The prompt text: through the chat template if the tokenizer has one, raw otherwise."""
    text = template.replace("{question}", example.question.strip())
    if tokenizer.chat_template is None:
        return text
    return tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)


# ---- Environment ------------------------------------------------------------------------------------------------------
NO_OUTPUT = "[no output]"


def extract_program(text: str) -> str:
    """What stands behind the last ```python of a turn, or behind its last <code>, without fences (code evaluation/eval.py)."""
    text = text.removesuffix("</code>")
    text = text.rpartition("```python")[2] if "```python" in text else text.rpartition("<code>")[2]
    return text.replace("```", "").strip()


def observe(outcome: Outcome, limit: int = 400) -> str | ToolFailure:
    """What the model is shown of a program that ran: its output, or the last line of its error (code evaluation/executor.py)."""
    ran = outcome.kind in ("ok", "ok_empty")
    text = (outcome.stdout if ran else outcome.exception).strip()
    if len(text) > limit:
        text = text[:limit // 2] + "..." + text[-(limit // 2):]
    return neutralise(text) if ran else ToolFailure(neutralise(text), outcome.kind)


def wrap_output(text: str) -> str:
    return f"\n<interpreter>\n{text or NO_OUTPUT}</interpreter>\n\n"


def environment(turn: Turn, trajectory: Trajectory) -> Call | End:
    """One model turn: run the program of its last snippet, or end."""
    if turn.reason != "stop":
        return End("answer" if turn.reason == "eos" else "length")
    return Call("python", extract_program(turn.text), wrap_output)


# ---- Reward -----------------------------------------------------------------------------------------------------------
def strict_box(text: str) -> str | None:
    """The content of a box that begins within the last 100 characters (code math_dapo.py)."""
    start = text.rfind("\\boxed{", max(0, len(text) - 100))
    return last_boxed(text[start:]) if start >= 0 else None


def reward(trajectory: Trajectory, example: Example, cfg: Config) -> dict[str, float]:
    """Named parts of the reward and their total (paper §2.3.1; recipe: code retool.py)."""
    answer = last_boxed(trajectory.model_text)
    right = answer is not None and maths_equal(pred=answer, gold=example.answers[0])
    parts = {"accuracy": float(right), "answered": float(answer is not None), "code": float("<code>" in trajectory.model_text)}
    if cfg.reward == "answer":
        return {**parts, "total": 1.0 if right else -1.0}
    if strict_box(trajectory.model_text) == example.answers[0]:
        return {**parts, "total": 1.0}
    return {**parts, "total": min(-0.6, -1.0 + 0.1 * len(trajectory.calls))}


# ---- Cold start -------------------------------------------------------------------------------------------------------
def demonstrations(cfg: Config, train_set: list[Example], tokenizer, template: str, python: Tool) -> list[tuple[str, list[tuple[str, str]]]]:
    """(prompt, segments by author) of the supervised traces: from a file of messages, or built from the tiny world's expressions or GSM8K's solutions."""
    if cfg.cold_start_data:
        rows = [(messages[0]["content"], messages[1]["content"]) for messages in read_messages(cfg.cold_start_data, cfg.cold_start_traces)]
        return [(render(Example("", bare_question(user), ()), tokenizer, template), split_trace(said.rstrip() + tokenizer.eos_token)) for user, said in rows]
    out = []
    for e in (train_set[i] for i in order(cfg.seed, 0, len(train_set), len(train_set))):
        if len(out) == cfg.cold_start_traces:
            break
        program = program_by_rule(e)
        printed = python.run([ToolCall("python", program, e)])[0] if program else None
        if not isinstance(printed, str) or not maths_equal(pred=printed, gold=e.answers[0]):
            continue
        if cfg.text_only:  # a worked solution's own words; the tiny world has none
            said = re.sub(r"<<.*?>>", "", e.meta.get("solution", "").rpartition("####")[0])
        else:
            said = f"I compute it.\n<code>\n```python\n{program}\n```\n</code>" + wrap_output(printed)
        said += f"Now I can answer.\n<answer>\n\\boxed{{{e.answers[0]}}}\n</answer>{tokenizer.eos_token}"
        out.append((render(e, tokenizer, template), split_trace(said)))
    if not out:
        raise UserError(f"--cold-start {cfg.cold_start}: {cfg.data} has no worked solutions; give --cold-start-data (a file of messages as ReTool-SFT; not with "
                        "--text-only), or --cold-start 0")
    return out


def bare_question(text: str) -> str:
    """The question in a user's message of ReTool-SFT, which wraps it in its own prompt (code evaluation/prompt_template.json)."""
    asked = re.compile(r"(?:Answer the following Math Problem[^\n]*\n)?(.*?)(?:\nRemember to place the final answer in the last part.*)?", re.S)
    return asked.fullmatch(text.rpartition("*user question:*")[2].strip())[1].strip()


def split_trace(text: str) -> list[tuple[str, str]]:
    """Segments by author: what the interpreter wrote is the tool's, the rest the model's."""
    parts = re.split(r"\s*<interpreter>\n?(.*?)\s*</interpreter>\s*", text, flags=re.S)
    return [("tool" if i % 2 else "model", part) for i, part in enumerate(parts) if part or i % 2]


def cold_start(cfg: Config, model, tokenizer, template: str, train_set: list[Example], python: Tool, run: Run) -> None:
    """Supervised steps on traces with code, or in text (paper §2.2): the interpreter's words are context."""
    rows = [demonstration_row(prompt, segments, tokenizer, wrap_output, cfg.observation_tokens)
            for prompt, segments in demonstrations(cfg, train_set, tokenizer, template, python)]
    rows = [r for r in rows if len(r[0]) <= cfg.prompt_tokens + cfg.trajectory_tokens]
    if not rows:
        raise UserError(f"--cold-start: every trace is longer than {cfg.prompt_tokens + cfg.trajectory_tokens} tokens; raise --trajectory-tokens")
    optimizer = make_optimizer(model.parameters(), cfg.cold_start_lr, bf16=cfg.optimizer_bf16, offload=cfg.optimizer_offload)
    for step in range(cfg.cold_start):
        picked = [rows[i] for i in order(cfg.seed, step, len(rows), min(cfg.cold_start_batch, len(rows)))]
        loss = supervised_step(model, optimizer, picked, lr=lr_at(step, cfg.cold_start, cfg.cold_start_lr, cfg.cold_start // 10, schedule="cosine"),
                               micro_tokens=cfg.micro_tokens, max_grad_norm=cfg.max_grad_norm)
        run.log("warmup", 0, {"loss": loss})
        run.stop_if_asked(0)


# ---- Train ------------------------------------------------------------------------------------------------------------
def load_data(cfg: Config) -> tuple[list[Example], list[Example]]:
    """(training questions, held-out questions)."""
    if cfg.data == "tiny":
        return problems("train", 4096, cfg.seed), problems("eval", cfg.eval_questions)
    return training_and_held_out(cfg.data, cfg.eval_data, cfg.eval_questions, load_problems, trains=not cfg.evaluate)


def load_problems(spec: str, **which) -> list[Example]:
    """Every problem once, without the instructions around it: DAPO-Math's file repeats each a hundred times, and asks for "Answer: ..."."""
    asked = re.compile(r'Solve the following math problem step by step\..*?\n\n(.*)\n\nRemember to put your answer on its own line after "Answer:"\.?', re.S)
    bare = (replace(e, question=m[1].strip()) if (m := asked.fullmatch(e.question.strip())) else e for e in load_examples(spec, **which))
    return list({e.question: e for e in bare}.values())


def train(cfg: Config) -> None:
    cfg = saved_config(Config, cfg.evaluate, cfg) if cfg.evaluate else cfg
    if cfg.plan:
        return print_plan(cfg, response_tokens=cfg.trajectory_tokens, turns=1 if cfg.text_only else cfg.max_turns + 1, critic=cfg.algorithm == "ppo")
    if cfg.text_only and cfg.cold_start and cfg.cold_start_data and not cfg.evaluate:
        raise UserError(f"--text-only: the traces in --cold-start-data {cfg.cold_start_data} hold code; give --cold-start 0, or --cold-start-data \"\" for traces "
                        "made of worked solutions")
    prompt, stop = (TEXT_PROMPT, ()) if cfg.text_only else (PROMPT, STOP)
    sandbox = open_sandbox(cfg.sandbox, Limits(wall_s=cfg.run_timeout))  # first: its server is forked before torch has threads
    set_up_torch(cfg.seed, cfg.threads, cfg.device)
    maths_self_test()
    template = read_template(cfg.template, prompt, "{question}")
    train_set, eval_set = load_data(cfg)
    model, tokenizer = load_model(cfg.model, cfg.dtype, cfg.device, cfg.gradient_checkpointing)
    group = cfg.samples if cfg.algorithm == "grpo" else 1
    n_prompts = cfg.prompts * cfg.samples // group
    critic = Critic(model) if cfg.algorithm == "ppo" else None
    shard(model, critic)  # over the ranks, where there are several
    optimizer = make_optimizer(model.parameters(), cfg.lr, weight_decay=cfg.weight_decay, bf16=cfg.optimizer_bf16, offload=cfg.optimizer_offload)
    critic_optimizer = make_optimizer(critic.parameters(), cfg.critic_lr, weight_decay=cfg.weight_decay, bf16=cfg.optimizer_bf16,
                                      offload=cfg.optimizer_offload) if critic else None
    budget = Budget(cfg.prompt_tokens, cfg.turn_tokens, cfg.observation_tokens, cfg.trajectory_tokens, 0 if cfg.text_only else cfg.max_turns)
    engine = make_engine(cfg.engine, model, tokenizer, max_slots=max(n_prompts * group, min(cfg.eval_questions, 256)),
                         max_length=cfg.prompt_tokens + cfg.trajectory_tokens)
    tools, pool = {"python": python_tool(sandbox, lambda outcome: observe(outcome, cfg.observation_chars))}, ToolPool()
    prompts_of = lambda examples: make_prompts(examples, lambda e: render(e, tokenizer, template), tokenizer, budget)
    eval_prompts, _ = prompts_of(eval_set)

    def answer_eval() -> tuple[list[Trajectory], list[dict]]:
        """Greedy answers to the held-out questions, and their reward parts."""
        engine.sync(model)
        trajectories = rollout(engine, tokenizer, eval_prompts, environment, tools, budget, pool, temperature=0.0, stop=stop)
        return ranks.gather(trajectories), ranks.gather([reward(t, t.example, cfg) for t in trajectories])

    if cfg.evaluate:
        return print_evaluation(cfg.evaluate, "accuracy", cfg, *answer_eval())
    run = Run(cfg, method="retool", metric="accuracy", total_steps=cfg.steps, resume=cfg.resume, name=cfg.name)
    trained = {"model": model, "optimizer": optimizer, **({"critic": critic, "critic_optimizer": critic_optimizer} if critic else {})}
    first = run.restore(trained) if cfg.resume else 0
    if run.before is None:
        run.before = run.log_eval(0, *answer_eval(), tokenizer)
        if cfg.cold_start:
            cold_start(cfg, model, tokenizer, template, train_set, tools["python"], run)
            run.log_eval(0, *answer_eval(), tokenizer)
            if critic:  # it starts where RL starts
                critic.body.load_state_dict(model.base_model.state_dict())

    for step in range(first, cfg.steps):
        # 1. sample
        clock = Clock()
        engine.sync(model)
        prompts, skipped = prompts_of([train_set[i] for i in order(cfg.seed, step, len(train_set), n_prompts)])
        trajectories = rollout(engine, tokenizer, prompts, environment, tools, budget, pool, samples=group, temperature=cfg.temperature,
                               stop=stop, seed=cfg.seed, step=step)
        clock.lap("sample_s")

        # 2. score
        parts = [reward(t, t.example, cfg) for t in trajectories]
        rewards_B = torch.tensor([p["total"] for p in parts], device=cfg.device)
        batch = collate(trajectories, cfg.device)
        trained_BT = batch.sampled_BT if cfg.mask_observations else batch.response_BT
        nan_BT = torch.full_like(batch.sampler_BT, torch.nan)
        score_with = lambda m: score(m, batch.ids_BT, batch.lengths_B, batch.starts_B, trained_BT, temperature=cfg.temperature, micro_tokens=cfg.micro_tokens)
        old_BT = score_with(model) if cfg.updates > 1 else nan_BT

        # 3. advantages
        if cfg.algorithm == "grpo":
            advantages_BT = losses.group_advantages(rewards_B.view(-1, group)).view(-1, 1).expand_as(nan_BT)
        else:
            steps_BT = trained_BT
            rewards_BT = losses.rewards_at_end(rewards_B, steps_BT)
            values_BT = values(critic, batch.ids_BT, batch.lengths_B, micro_tokens=cfg.micro_tokens)
            advantages_BT, returns_BT = losses.gae(rewards_BT, values_BT, steps_BT, cfg.gamma, cfg.lam)
            advantages_BT = losses.whiten(advantages_BT, steps_BT)
        clock.lap("logprob_s")

        # 4. update
        experience = Experience(batch.ids_BT, batch.lengths_B, batch.starts_B, trained_BT, batch.sampled_BT, batch.sampler_BT, old_BT, advantages_BT)
        done = []
        for rows in mini_batches(len(trajectories), cfg.updates, seed=cfg.seed, step=step):
            done.append({} if critic and step + 1 < cfg.policy_from_step else policy_step(
                model, optimizer, experience, rows, lr=lr_at(step, cfg.steps, cfg.lr, cfg.warmup_steps), clip_low=cfg.clip_low, clip_high=cfg.clip_high,
                aggregation=cfg.aggregation, budget_tokens=budget.sampled_tokens, temperature=cfg.temperature, dual_clip=cfg.dual_clip,
                entropy=cfg.entropy, importance_cap=cfg.importance_cap, micro_tokens=cfg.micro_tokens, max_grad_norm=cfg.max_grad_norm))
            if critic:
                done[-1] |= critic_step(critic, critic_optimizer, experience, rows, values_BT, returns_BT, steps_BT, value_clip=cfg.value_clip,
                                        lr=cfg.critic_lr, micro_tokens=cfg.micro_tokens, max_grad_norm=cfg.max_grad_norm)
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
    sandbox.close()


if __name__ == "__main__":
    main(lambda: train(parse_config(Config, PRESETS)))
