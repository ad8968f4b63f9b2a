"""A whole GRPO step (sample, tools, score, update) against TRL's GRPOTrainer with `use_vllm=False`, as ratios measured in one run.

    make bench_trl                                        # about ten minutes, and a few more to fill .trl-venv the first time
    make bench_trl ARGS="--steps 4 --parts single-turn"

Both sides have the same weights (the tiny model after a few supervised steps, so that it uses its tools), prompts, tools, limits, number
of completions, loss, optimiser and number of threads. They take turns, step by step, each in its own process, so that a busy machine
slows both. Sampled texts differ, and so do their lengths; therefore the ratio of seconds per sampled token stands beside the ratio of
seconds per step. With a learning rate of 1e-6 and a noisy reward the policy stays where it is and no group ties: every step is the same
kind of work, and none of it can be skipped.

What TRL is spared: gradient checkpointing and bfloat16 (its defaults), writing logs, and turns that run on to the end of the whole budget
(its own limit is for the trajectory; here each turn has one, as ours has). The size of its micro-batches is chosen by trying.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from common import losses
from common.data import Example
from common.engine import HFEngine
from common.policy import load_model, make_optimizer, save_policy
from common.rollout import Budget, Call, End, Tool, ToolPool, Trajectory, Turn, collate, make_prompts, rollout
from common.tiny.world import EVAL, world
from common.update import Experience, policy_step
from tests import bench_trl_task as task
from tests.bench import tool_user

ROOT = Path(__file__).parent.parent
VENV = ROOT / ".trl-venv"
REQUIREMENTS = ("trl==1.16.0", "torch==2.13.0", "transformers==5.19.0", "tokenizers==0.23.3", "accelerate==1.15.0", "datasets==5.2.0",
                "numpy==2.3.5", "bm25s==0.3.16")
LR, CLIP, MICRO_TOKENS = 1e-6, 0.2, 8192
SINGLE_TOKENS = 64  # of the prompt, and of the completion


def trl_python() -> str:
    """The interpreter of TRL's environment, which is filled first if need be."""
    python, current = VENV / "bin" / "python", VENV / "current"
    if not current.exists() or current.read_text() != "\n".join(REQUIREMENTS):
        print(f"installing {REQUIREMENTS[0]} and what it needs into {VENV.name} (1.5 GB, a few minutes)", flush=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *REQUIREMENTS]
        for command in ([sys.executable, "-m", "venv", VENV], pip):
            if subprocess.run(command).returncode:
                sys.exit(f"error: cannot fill {VENV} (the reason stands above); remove that folder and try again")
        current.write_text("\n".join(REQUIREMENTS))
    return str(python)


class Trl:
    """TRL's trainer in its own process, held at the beginning of each step."""

    def __init__(self, job: dict, folder: Path, threads: int):
        (folder / "job.json").write_text(json.dumps(job))
        self.log = folder / "trl.log"
        command = [trl_python(), "-m", "tests.bench_trl_trainer", str(folder / "job.json")]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                                            text=True)
        self.hear()

    def hear(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"TRL's side ended with code {self.process.wait()}:\n" + "\n".join(self.log.read_text().splitlines()[-20:]))
        return json.loads(line)

    def step(self, last: bool) -> dict[str, float]:
        print("go", file=self.process.stdin, flush=True)
        done = self.hear()
        self.process.wait() if last else self.hear()  # ready for the next one
        return done


def fastest_micro_batch(job: dict, folder: Path, threads: int) -> int:
    """Completions per forward and backward pass of TRL: what is fastest depends on machine and lengths, so it is tried, two steps each."""
    cost, n = {}, job["n_prompts"] * job["samples"]
    for micro_batch in sorted({n, max(1, n // 4), max(1, n // 8)}):
        trl = Trl({**job, "micro_batch": micro_batch, "steps": 2}, folder, threads)
        done = [trl.step(last=False), trl.step(last=True)][1]
        cost[micro_batch] = done["seconds"] / (n * done["length"])
    print("  TRL, ms a sampled token by size of micro-batch: " + ", ".join(f"{m}: {1000 * c:.2f}" for m, c in cost.items()), flush=True)
    return min(cost, key=cost.get)


def act(turn: Turn, trajectory: Trajectory) -> Call | End:
    """One model turn of the multi-turn part: a whole message, which calls a tool or is the last."""
    call = task.parse_call(turn.text) if turn.reason == "eos" else None
    return Call("web", call, lambda text: task.PROTOCOL.observe("", text)) if call else End("answer")


class Ours:
    """The step of methods/search_r1.py (GRPO, one update per batch), on the task at hand."""

    def __init__(self, model, tokenizer, budget: Budget, examples: list[Example], n_prompts: int, samples: int, tools: bool):
        self.model, self.tokenizer, self.budget, self.examples = model, tokenizer, budget, examples
        self.n_prompts, self.samples = n_prompts, samples
        self.act = act if tools else lambda turn, trajectory: End("length")
        self.engine = HFEngine(model, tokenizer, max_slots=n_prompts * samples, max_length=budget.prompt_tokens + budget.trajectory_tokens,
                               eos_ids=None if tools else ())
        self.optimizer = make_optimizer(model.parameters(), LR)
        self.pool = ToolPool()
        self.web = {"web": Tool(lambda calls: [task.run_call(c.argument) for c in calls], batch=256)}

    def step(self, step: int) -> dict[str, float]:
        started = time.perf_counter()
        self.engine.sync(self.model)
        examples = self.examples[step * self.n_prompts:(step + 1) * self.n_prompts]
        prompts, _ = make_prompts(examples, lambda e: e.meta["prompt"], self.tokenizer, self.budget)
        trajectories = rollout(self.engine, self.tokenizer, prompts, self.act, self.web, self.budget, self.pool, samples=self.samples,
                               temperature=1.0, step=step)
        sampled = time.perf_counter()
        rewards_B = torch.tensor([task.reward(t.segments[-1].text, t.example.meta["answer"]) for t in trajectories])
        batch = collate(trajectories)
        nan_BT = torch.full_like(batch.sampler_BT, torch.nan)
        advantages_BT = losses.group_advantages(rewards_B.view(-1, self.samples)).view(-1, 1).expand_as(nan_BT)
        experience = Experience(batch.ids_BT, batch.lengths_B, batch.starts_B, batch.sampled_BT, batch.sampled_BT, batch.sampler_BT, nan_BT,
                                advantages_BT)
        policy_step(self.model, self.optimizer, experience, range(len(trajectories)), lr=LR, clip_low=CLIP, clip_high=CLIP,
                    aggregation="token", budget_tokens=self.budget.trajectory_tokens, temperature=1.0, micro_tokens=MICRO_TOKENS,
                    max_grad_norm=1.0)
        seconds, lengths = time.perf_counter() - started, [sum(t.mask) for t in trajectories]
        return {"seconds": seconds, "sample_s": sampled - started, "length": statistics.mean(lengths), "longest": max(lengths),
                "calls": statistics.mean(len(t.calls) for t in trajectories)}


def single_prompts(tokenizer, n: int) -> list[Example]:
    """Prompts of plain text, SINGLE_TOKENS long: the beginning of a few passages of the tiny world."""
    out = []
    for i in range(n):
        words = " ".join(p.text for p in world(EVAL).passages[i % 100:i % 100 + 8]).split(" ")
        length = lambda k: len(tokenizer.encode(" ".join(words[:k]), add_special_tokens=False))
        count = next(k for k in range(1, len(words)) if length(k + 1) > SINGLE_TOKENS)
        out.append(Example(str(i), "", ("",), {"prompt": " ".join(words[:count]), "answer": None}))
    return out


def compare(name: str, args, folder: Path) -> None:
    tools, steps = name == "multi-turn", args.warmup + args.steps
    model, tokenizer = tool_user("deep_researcher") if args.model == "tiny" else load_model(args.model)
    save_policy(folder / "model", model, tokenizer)
    if tools:
        asked = [world(EVAL).question(i, 1 + i % 2) for i in range(steps * args.prompts)]
        budget = Budget(512, turn_tokens=128, observation_tokens=512, trajectory_tokens=1024, turns=4)
        examples = [Example(q.id, q.text, (q.answer,), {"prompt": task.PROTOCOL.prompt(q), "answer": q.answer}) for q in asked]
        prompts = [task.messages(q) for q in asked]
    else:
        budget = Budget(SINGLE_TOKENS, turn_tokens=SINGLE_TOKENS, observation_tokens=0, trajectory_tokens=SINGLE_TOKENS, turns=0)
        examples = single_prompts(tokenizer, steps * args.prompts)
        prompts = [e.meta["prompt"] for e in examples]
    ids = [tokenizer.encode(e.meta["prompt"], add_special_tokens=False) for e in examples]
    job = dict(
        model=str(folder / "model"), scratch=str(folder / "trl"), threads=args.threads, steps=steps, tools=tools, prompts=prompts,
        answers=[e.meta["answer"] for e in examples], first_ids=ids[0], n_prompts=args.prompts, samples=args.samples, lr=LR, clip=CLIP,
        turn_tokens=budget.turn_tokens, trajectory_tokens=budget.trajectory_tokens, turns=budget.turns)
    n, rows = args.prompts * args.samples, []
    print(f"{name}: {args.prompts} prompts of {min(map(len, ids))} to {max(map(len, ids))} tokens x {args.samples} samples, at most "
          f"{budget.turn_tokens} tokens a turn and {budget.turns} tool rounds, {args.threads} threads, {args.steps} steps after "
          f"{args.warmup} to warm up", flush=True)
    job["micro_batch"] = args.trl_micro_batch or fastest_micro_batch(job, folder, args.threads)
    ours, trl = Ours(model, tokenizer, budget, examples, args.prompts, args.samples, tools), Trl(job, folder, args.threads)
    for step in range(steps):
        rows.append((ours.step(step), trl.step(last=step == steps - 1)))
        print("  step " + "; ".join(f"{who} {r['seconds']:.2f} s ({r['sample_s']:.2f} sampling), {n * r['length']:.0f} tokens"
                                    for who, r in zip(("ours", "TRL"), rows[-1])), file=sys.stderr, flush=True)
    ours.pool.close()
    rows = rows[args.warmup:]
    for who, side in zip(("ours", "TRL"), zip(*rows)):
        middle = {k: statistics.median(r[k] for r in side) for k in side[0]}
        print(f"  {who:4}  {middle['seconds']:6.2f} s a step ({middle['sample_s']:.2f} sampling); {n * middle['length']:.0f} sampled "
              f"tokens a step, {middle['length']:.1f} each (longest {middle['longest']:.0f}); {middle['calls']:.2f} tool calls each",
              flush=True)
    for label, cost in (("step", lambda r: r["seconds"]), ("sampled token", lambda r: r["seconds"] / r["length"])):
        ratios = [cost(theirs) / cost(own) for own, theirs in rows]
        whole = statistics.median(cost(r) for _, r in rows) / statistics.median(cost(r) for r, _ in rows)
        print(f"  {whole:.2f} x in seconds per {label} (medians; single steps {min(ratios):.2f} to {max(ratios):.2f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="tiny", help="tiny, or a folder with a model of the same tokenizer")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each side")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them, not measured")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trl-micro-batch", type=int, default=0,
                        help="completions in one forward and backward pass of TRL; 0: the fastest of three")
    parser.add_argument("--parts", nargs="+", default=["multi-turn", "single-turn"], choices=["multi-turn", "single-turn"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    trl_python()
    for name in args.parts:
        with tempfile.TemporaryDirectory() as folder:
            compare(name, args, Path(folder))


if __name__ == "__main__":
    main()
