"""ToRL: scaling tool-integrated RL, or: a base model learns by itself when to write a program and when to think.

Paper: "ToRL: Scaling Tool-Integrated RL", arXiv 2503.23383. Code: github GAIR-NLP/ToRL (commit cb78cf1c).

The idea. A base model solves maths in plain text and may write Python between its sentences; each program is run and its output is put
behind it. Nothing but the final answer is rewarded, there is no supervised stage and no KL: when to compute, when to reason and how to mend
a failing program are left to reinforcement learning.

The method, step by step:
  1. `PROMPT` is a dialogue in plain text, no chat template: reason in words and programs, end with \\boxed{}.
  2. `environment` reads one model turn: it stops at ```output; the last ```python block of the turn is run.
  3. `observe` turns what happened into text: standard output, or only the last line of an error, never more than 256 characters.
  4. `rollout` samples trajectories: at most `max_turns` (C) turns whose program is run, then a last one in which none is.
  5. `reward` compares the last \\boxed{} with the gold answer: +1 or -1; optionally 0.5 less where the code does not run.
  6. `train`: advantages from the group (GRPO), clipped policy gradient over the tokens the model sampled, no KL.

Kept from the paper: plain prompt, fences, C = 1, free last turn, last error line, cut of long output, +1/-1, the executability ablation, GRPO
with one update per batch and neither KL nor entropy bonus.
Changed, and why:
  - token in, token out: the original tokenises the finished text again and finds outputs by character offsets, which point to the wrong
    place from the second program on (vllm_rollout_spmd.py), so with C = 2 it trains on outputs. Here the mask is written with the tokens.
  - the last turn keeps the stop string: the original lets the model write its own ```output block there and trains on it.
  - what a program printed is not scored: in the original a box printed by a program counts (math_verifier.py).
  - a program that prints nothing is answered with a note; the original shows a time-out that did not happen. A program that prints and then
    fails has failed; the original counts it as run. The word Error in ordinary output changes nothing. Tags and fences in output are harmless.
  - a turn that asks for output without a program is answered with a note too, in the block it has opened; the original goes on after a
    line break.
  - answers are compared as LaTeX: the original compares the leading number only, so that 2\\sqrt{3} equals 2\\sqrt{5}.
  - a sandbox that does not work stops the run: the original shows "UnknownError" and trains on it.

What to watch: `code` (share of answers with a program) rises with `accuracy`; `pass_right` stays above `pass_wrong`; `call_error` falls.

    make torl                                                 # tiny model and world, a few minutes on two cores
    make torl ARGS="--max-turns 0"                            # no tool: the paper's C = 0
    make torl ARGS="--execution-penalty 0.5"                  # the paper's ablation
    make torl ARGS="--preset smollm2 --data gsm8k.jsonl"
"""
from dataclasses import dataclass
from typing import Literal

import torch

from common import losses, ranks
from common.data import Example, order, training_and_held_out
from common.engine import make_engine
from common.maths import last_boxed, maths_equal, maths_self_test
from common.plan import print_plan
from common.policy import load_model, lr_at, make_optimizer, save_policy, shard
from common.report import write_report
from common.rollout import Budget, Call, End, Notice, Tool, ToolCall, ToolFailure, ToolPool, Trajectory, Turn, collate, make_prompts, rollout
from common.run import Clock, Run, main, parse_config, print_evaluation, read_template, saved_config, set_up_torch, setting
from common.sandbox import Limits, Outcome, open_sandbox
from common.search import neutralise
from common.tiny.world import problems
from common.tools import python_tool
from common.update import Experience, joined, mini_batches, policy_step, score
from common.warmup import program_by_rule, warm_up


# ---- Config -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Config:
    """Defaults are the preset `tiny`. A source names where the published value (preset `paper`) stands, or says that it is ours."""
    preset: str = setting("tiny", "defaults for the other flags: tiny, smollm2 or paper", "ours")
    name: str = setting("", "name of the run's folder (default: preset and seed)", "ours")
    seed: int = setting(0, "seed of data order and sampling", "ours")
    steps: int = setting(45, "optimisation steps (one rollout batch each)", "code issue 24")
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
    data: str = setting("tiny", "training questions: tiny, a .jsonl, .json or .parquet file, or a hub data set id", "paper §2.1")
    eval_data: str = setting("", "held-out questions, as --data (default: split off from the training questions)", "ours")
    eval_questions: int = setting(200, "held-out questions", "ours")
    eval_every: int = setting(15, "evaluate every so many steps, and before and after (greedy, same questions); 0: only before and after", "code torl_1.5b.sh")
    save_every: int = setting(15, "checkpoint every so many steps", "code torl_1.5b.sh")
    keep_trajectories: int = setting(4, "trajectories a step that are written to trajectories.jsonl", "ours")
    template: str = setting("", "file with another prompt; it must hold {question}", "ours")
    # rollout
    prompts: int = setting(12, "questions per step", "paper §3.1")
    samples: int = setting(8, "trajectories per question (GRPO's group size)", "paper §3.1")
    max_turns: int = setting(1, "turns whose call is run (the paper's C); one more turn may answer", "paper §3.1")
    sandbox: str = setting("isolated", "where programs run: isolated, unsafe, or the URL of a SandboxFusion server", "ours")
    run_timeout: float = setting(5.0, "longest run of a program", "code sandbox/server/sandbox_api.py (SandboxFusion)", "seconds")
    temperature: float = setting(1.0, "sampling temperature, no top-p", "code torl_1.5b.sh")
    prompt_tokens: int = setting(160, "longest prompt; longer ones are skipped and counted", "code torl_1.5b.sh", "tokens")
    turn_tokens: int = setting(64, "longest model turn", "code torl_1.5b.sh", "tokens")
    observation_tokens: int = setting(64, "longest tool result", "ours", "tokens")
    observation_chars: int = setting(256, "output of this length or more keeps its first and last half only", "code vllm_rollout_spmd.py", "characters")
    trajectory_tokens: int = setting(256, "longest trajectory after the prompt", "code torl_1.5b.sh", "tokens")
    # reward
    reward: Literal["answer", "format"] = setting("answer", "+1 or -1; format: -0.5 for a wrong answer in a box", "paper §2.3.3")
    execution_penalty: float = setting(0.0, "taken off where the answer has code and the last program that was run failed, or none was run (ablation: 0.5)", "paper §2.3.3")
    penalty_without_code: bool = setting(False, "take it off without any code too, as the original does", "code naive.py", published=True)
    # learning
    mask_observations: bool = setting(True, "leave what the model did not write (results, notices) out of the policy's loss", "paper §2.3.1")
    aggregation: Literal["token", "sequence", "constant"] = setting("token", "mean of the loss over tokens, over sequences, or Dr. GRPO's constant", "code dp_actor.py")
    updates: int = setting(1, "optimiser steps per rollout batch", "code torl_1.5b.sh")
    lr: float = setting(4e-4, "learning rate of the policy (AdamW)", "code torl_1.5b.sh")
    warmup_steps: int = setting(3, "linear warm-up of the policy's rate", "code torl_1.5b.sh", "steps")
    weight_decay: float = setting(0.01, "AdamW weight decay", "code ppo_trainer.yaml")
    max_grad_norm: float = setting(1.0, "gradient clipping", "code ppo_trainer.yaml")
    clip: float = setting(0.2, "clip range of the policy ratio, both sides", "code ppo_trainer.yaml")
    entropy: float = setting(0.0, "entropy bonus", "code torl_1.5b.sh")
    importance_cap: float = setting(0.0, "cap of the sampler/trainer importance correction; 0: off", "ours")
    micro_tokens: int = setting(12288, "padded tokens per micro-batch; the gradient does not depend on it", "ours", "tokens")
    gradient_checkpointing: bool = setting(False, "keep only every layer's input for the backward pass, and compute the rest again", "ours")
    optimizer_bf16: bool = setting(False, "keep AdamW's running means in bfloat16, rounded at random: half their memory", "ours")
    optimizer_offload: bool = setting(False, "keep AdamW's running means in the CPU's memory", "ours")
    # supervised warm-up (not part of the paper)
    warmup: int = setting(0, "supervised steps on traces built by rule, before RL", "ours")
    warmup_traces: int = setting(48, "traces for the warm-up", "ours")
    warmup_lr: float = setting(1e-4, "learning rate of the warm-up", "ours")


PRESETS = {
    "tiny": {},
    "smollm2": dict(  # a real 135 M model on a CPU: short everything
        model="smollm2", data="", steps=30, prompts=4, samples=4, prompt_tokens=320, turn_tokens=128, observation_tokens=64, trajectory_tokens=320,
        lr=2e-5, warmup=12, eval_questions=24, eval_every=0, save_every=5, micro_tokens=2048),
    "paper": dict(  # 1.5B, as torl_1.5b.sh; the 7B settings are not published
        model="Qwen/Qwen2.5-Math-1.5B", device="cuda", data="GAIR/ToRL", steps=1000, prompts=128, samples=16, run_timeout=10.0, prompt_tokens=400,
        turn_tokens=3072, observation_tokens=256, trajectory_tokens=3072, lr=1e-6, warmup_steps=0, eval_every=4, save_every=20, micro_tokens=32768,
        gradient_checkpointing=True),
}

# ---- Prompt -----------------------------------------------------------------------------------------------------------
# Plain text for base models, no chat template and no example (code rl_dataset.py, tir_base_0309)
PROMPT = ("A dialogue in which the User asks and the Assistant solves the problem.\nUser: Combine reasoning in words with Python programs. "
          "Put the final answer in \\boxed{}.\n{question}\nAssistant:\n")
STOP = ("```output",)


def render(example: Example, template: str = PROMPT) -> str:
    """The prompt text: raw, whatever the tokenizer's chat template (code dataset/rl_dataset.py)."""
    return template.replace("{question}", example.question.strip())


# ---- Environment ------------------------------------------------------------------------------------------------------
NO_OUTPUT, NO_PROGRAM = "[no output]", "[no program]"


def extract_program(text: str) -> str | None:
    """The last block of a turn that opens with a line beginning or ending with ```python and is closed by a line beginning with ```;
    None if there is none (code vllm_rollout_spmd.py). ```py does not open a block, an indented fence does not close one."""
    program, lines = None, None
    for line in text.removesuffix("```output").split("\n"):  # the stop string closes nothing
        if lines is None:
            if line.strip().startswith("```python") or line.rstrip().endswith("```python"):
                lines = []
        elif line.startswith("```"):
            program, lines = "".join(x + "\n" for x in lines), None
        else:
            lines.append(line)
    return program


def observe(outcome: Outcome, limit: int = 256) -> str | ToolFailure:
    """What the model is shown of a program that ran: its output, or the last line of its error (code vllm_rollout_spmd.py)."""
    ran = outcome.kind in ("ok", "ok_empty")
    text = (outcome.stdout if ran else outcome.exception).strip()
    if len(text) >= limit:
        text = text[:limit // 2] + "..." + text[-(limit // 2):]
    return neutralise(text) if ran else ToolFailure(neutralise(text), outcome.kind)


def wrap_output(text: str) -> str:
    return f"\n{text or NO_OUTPUT}\n```\n"


def environment(turn: Turn, trajectory: Trajectory) -> Call | Notice | End:
    """One model turn: run its last program; without one, a note closes the output block (which costs a turn like a program does)."""
    if turn.reason != "stop":
        return End("answer" if turn.reason == "eos" else "length")
    program = extract_program(turn.text)
    return Notice(wrap_output(NO_PROGRAM)) if program is None else Call("python", program, wrap_output)


# ---- Reward -----------------------------------------------------------------------------------------------------------
def reward(trajectory: Trajectory, example: Example, cfg: Config) -> dict[str, float]:
    """Named parts of the reward and their total (paper §2.3.3, code naive.py and math_verifier.py)."""
    answer = last_boxed(trajectory.model_text)
    right = answer is not None and maths_equal(pred=answer, gold=example.answers[0])
    code = "```python" in trajectory.model_text
    ran = bool(trajectory.calls) and trajectory.calls[-1].outcome in ("ok", "empty")
    total = 1.0 if right else -0.5 if cfg.reward == "format" and answer is not None else -1.0
    if cfg.execution_penalty and not ran and (code or cfg.penalty_without_code):
        total -= cfg.execution_penalty
    return {"accuracy": float(right), "answered": float(answer is not None), "code": float(code), "total": total}


# ---- Train ------------------------------------------------------------------------------------------------------------
def load_data(cfg: Config) -> tuple[list[Example], list[Example]]:
    """(training questions, held-out questions)."""
    if cfg.data == "tiny":
        return problems("train", 4096, cfg.seed), problems("eval", cfg.eval_questions)
    return training_and_held_out(cfg.data, cfg.eval_data, cfg.eval_questions, trains=not cfg.evaluate)


def train(cfg: Config) -> None:
    cfg = saved_config(Config, cfg.evaluate, cfg) if cfg.evaluate else cfg
    if cfg.plan:
        return print_plan(cfg, response_tokens=cfg.trajectory_tokens, turns=cfg.max_turns + 1)
    sandbox = open_sandbox(cfg.sandbox, Limits(wall_s=cfg.run_timeout))  # first: its server is forked before torch has threads
    set_up_torch(cfg.seed, cfg.threads, cfg.device)
    maths_self_test()
    template = read_template(cfg.template, PROMPT, "{question}")
    train_set, eval_set = load_data(cfg)
    model, tokenizer = load_model(cfg.model, cfg.dtype, cfg.device, cfg.gradient_checkpointing)
    group, n_prompts = cfg.samples, cfg.prompts
    shard(model)  # over the ranks, where there are several
    optimizer = make_optimizer(model.parameters(), cfg.lr, weight_decay=cfg.weight_decay, bf16=cfg.optimizer_bf16, offload=cfg.optimizer_offload)
    budget = Budget(cfg.prompt_tokens, cfg.turn_tokens, cfg.observation_tokens, cfg.trajectory_tokens, cfg.max_turns)
    engine = make_engine(cfg.engine, model, tokenizer, max_slots=max(n_prompts * group, min(cfg.eval_questions, 256)),
                         max_length=cfg.prompt_tokens + cfg.trajectory_tokens)
    tools, pool = {"python": python_tool(sandbox, lambda outcome: observe(outcome, cfg.observation_chars))}, ToolPool()
    prompts_of = lambda examples: make_prompts(examples, lambda e: render(e, template), tokenizer, budget)
    eval_prompts, _ = prompts_of(eval_set)

    def answer_eval() -> tuple[list[Trajectory], list[dict]]:
        """Greedy answers to the held-out questions, and their reward parts."""
        engine.sync(model)
        trajectories = rollout(engine, tokenizer, eval_prompts, environment, tools, budget, pool, temperature=0.0, stop=STOP)
        return ranks.gather(trajectories), ranks.gather([reward(t, t.example, cfg) for t in trajectories])

    if cfg.evaluate:
        return print_evaluation(cfg.evaluate, "accuracy", cfg, *answer_eval())
    run = Run(cfg, method="torl", metric="accuracy", total_steps=cfg.steps, resume=cfg.resume, name=cfg.name)
    trained = {"model": model, "optimizer": optimizer}
    first = run.restore(trained) if cfg.resume else 0
    if run.before is None:
        run.before = run.log_eval(0, *answer_eval(), tokenizer)
        if cfg.warmup:
            warm_up(cfg, model, tokenizer, train_set, lambda e: render(e, template),
                    lambda e: demonstration(e, tools["python"], tokenizer.eos_token), wrap_output, run)
            run.log_eval(0, *answer_eval(), tokenizer)

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
        trained_BT = batch.sampled_BT if cfg.mask_observations else batch.response_BT
        nan_BT = torch.full_like(batch.sampler_BT, torch.nan)
        score_with = lambda m: score(m, batch.ids_BT, batch.lengths_B, batch.starts_B, trained_BT, temperature=cfg.temperature, micro_tokens=cfg.micro_tokens)
        old_BT = score_with(model) if cfg.updates > 1 else nan_BT

        # 3. advantages
        advantages_BT = losses.group_advantages(rewards_B.view(-1, group)).view(-1, 1).expand_as(nan_BT)
        clock.lap("logprob_s")

        # 4. update
        experience = Experience(batch.ids_BT, batch.lengths_B, batch.starts_B, trained_BT, batch.sampled_BT, batch.sampler_BT, old_BT, advantages_BT)
        done = []
        for rows in mini_batches(len(trajectories), cfg.updates, seed=cfg.seed, step=step):
            done.append(policy_step(
                model, optimizer, experience, rows, lr=lr_at(step, cfg.steps, cfg.lr, cfg.warmup_steps), clip_low=cfg.clip, clip_high=cfg.clip,
                aggregation=cfg.aggregation, budget_tokens=budget.sampled_tokens, temperature=cfg.temperature,
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
    sandbox.close()


# ---- Supervised warm-up (ours) ----------------------------------------------------------------------------------------
def demonstration(example: Example, python: Tool, end: str) -> list[tuple[str, str]] | None:
    """A trace built by rule: a program, what it prints, the answer. (author, text) segments, or None where there is no program or it fails."""
    program = program_by_rule(example)
    printed = python.run([ToolCall("python", program, example)])[0] if program else None
    if not isinstance(printed, str) or not maths_equal(pred=printed, gold=example.answers[0]):
        return None
    return [("model", f"I compute it.\n```python\n{program}\n```\n```output"), ("tool", printed),
            ("model", f"The answer is \\boxed{{{example.answers[0]}}}.{end}")]


if __name__ == "__main__":
    main(lambda: train(parse_config(Config, PRESETS)))
