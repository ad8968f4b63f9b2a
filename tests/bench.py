"""Speed of the engine, as ratios measured in one run on the same model, prompts and sampled tokens (greedy, so that they are the same).

    make bench                         # the tiny model
    make bench ARGS="--model smollm2 --prompts 2"
    make bench ENGINE=vllm ARGS="--part engines"       # both engines, 1 to 256 trajectories at once, with fast and slow tools

The tiny model guesses before it is trained; here it first gets a few supervised steps on right traces, so that it uses its tool.
The other side is what a plain training loop does: `model.generate` over the left-padded batch, one turn after the other, all rows
waiting for the longest turn and the slowest tool, the whole history computed again each turn.
"""
import argparse
import importlib.util
import statistics
import time

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from common.engine import HFEngine, make_engine
from common.policy import load_model
from common.rollout import Budget, Call, End, Tool, ToolCall, ToolPool, Turn, make_prompts, rollout
from common.tiny.build import Phase, train
from common.tiny.world import questions
from common.tools import search_tool
from methods import search_r1


def tool_user(protocol: str):
    """(model, tokenizer): the tiny model after 40 supervised steps on right traces of a protocol."""
    model, tokenizer = load_model("tiny")
    train(model, tokenizer, Phase(name="tool user", steps=40, lr=4e-4, seed=9, mixture={protocol: 1}), log=lambda line: None)
    return model, tokenizer


class StopAtText(StoppingCriteria):
    """Row by row, on the text of its last few tokens."""

    def __init__(self, tokenizer, stops, start):
        self.tokenizer, self.stops, self.start = tokenizer, stops, start

    def __call__(self, ids, scores, **kwargs):
        texts = self.tokenizer.batch_decode(ids[:, max(self.start, ids.shape[1] - 4):])
        return torch.tensor([any(s in t for s in self.stops) for t in texts])


@torch.no_grad()
def synchronous(model, tokenizer, prompts, budget: Budget, act, search, stops, slow_s) -> tuple[list[list[int]], int]:
    """Turn-synchronous rollouts with `generate`: (ids after the prompt of each row, sampled tokens)."""
    pad = tokenizer.pad_token_id
    ends = model.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else set(ends or [])
    rows = [{"prompt": p.ids, "ids": [], "turn": 0, "example": p.example} for p in prompts]
    active, sampled = list(rows), 0
    while active:
        context = [r["prompt"] + r["ids"] for r in active]
        width = max(map(len, context))
        ids = torch.tensor([[pad] * (width - len(c)) + c for c in context])
        mask = torch.tensor([[0] * (width - len(c)) + [1] * len(c) for c in context])
        out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=budget.turn_tokens, do_sample=False, pad_token_id=pad,
                             stopping_criteria=StoppingCriteriaList([StopAtText(tokenizer, stops, width)]) if stops else None)
        waiting = []
        for row, new in zip(active, out[:, width:].tolist()):
            text, keep, reason = "", [], "length"
            for token in new:
                keep.append(token)
                if token in ends:
                    reason = "eos"
                    break
                text = tokenizer.decode(keep)
                if any(s in text for s in stops):
                    reason = "stop"
                    break
            sampled += len(keep)
            row["ids"] += keep
            action = act(Turn(text, reason, row["turn"], row["turn"] >= budget.turns), None)
            row["turn"] += 1
            if not isinstance(action, End) and row["turn"] <= budget.turns:
                waiting.append((row, action))
        calls = [(row, a) for row, a in waiting if isinstance(a, Call)]
        if calls:
            time.sleep(max(slow_s(a.argument) for _, a in calls))  # tools run side by side; the turn waits for the slowest
            results = iter(search([ToolCall("search", a.argument, row["example"]) for row, a in calls]))
        for row, action in waiting:
            text = action.wrap(next(results)) if isinstance(action, Call) else action.text
            row["ids"] += tokenizer.encode(text, add_special_tokens=False)
        active = [row for row, _ in waiting if len(row["ids"]) < budget.trajectory_tokens]
    return [r["ids"] for r in rows], sampled


def seconds(ours, theirs, repeats: int) -> tuple[float, object, float, object]:
    """Median seconds and last result of each side. They take turns, so that a busy moment of the machine slows both; the first pair warms up."""
    times: dict = {ours: [], theirs: []}
    results = {}
    for _ in range(repeats + 1):
        for work in (ours, theirs):
            started = time.perf_counter()
            results[work] = work()
            times[work].append(time.perf_counter() - started)
    return statistics.median(times[ours][1:]), results[ours], statistics.median(times[theirs][1:]), results[theirs]


def side_by_side(model, tokenizer, prompts, budget: Budget, numbers: list[int], repeats: int, slow_s: float) -> None:
    """Each engine on n greedy trajectories of different questions at once, with tools that answer at once and after `slow_s` seconds.

    waiting: share of the wall time in which the engine did nothing. With slow tools no engine can be faster than its longest trajectory run
    alone, nor than all of them with instant tools; `x bound` is the wall time over the larger of the two."""
    names = ["hf"] + ["vllm"] * (importlib.util.find_spec("vllm") is not None)
    engines = {name: make_engine(name, model, tokenizer, max_slots=max(numbers), max_length=budget.prompt_tokens + budget.trajectory_tokens) for name in names}
    if len(names) == 1:
        print("vLLM is not installed here: HFEngine alone (make bench ENGINE=vllm for both)")
    tool, busy = search_tool("", search_r1.Config().topk, search_r1.render_passages), dict.fromkeys(names, 0.0)

    def measured(name, step):
        def timed():
            started = time.perf_counter()
            done = step()
            busy[name] += time.perf_counter() - started
            return done
        return timed
    for name, engine in engines.items():
        engine.step = measured(name, engine.step)

    results: dict = {}  # by query: a search must not take the processor from the engine, as no service elsewhere would

    def play(name, chosen, delay) -> tuple[float, float, list]:
        """(wall seconds, share of them outside the engine, trajectories)."""
        def search(calls):
            time.sleep(delay)
            if unknown := [c for c in calls if c.argument not in results]:
                results.update(zip((c.argument for c in unknown), tool.run(unknown)))
            return [results[c.argument] for c in calls]
        pool, engine = ToolPool(workers=len(chosen) if delay else 1), engines[name]
        engine.sync(model)                                 # empties the cache
        busy[name], started = 0.0, time.perf_counter()
        rows = rollout(engine, tokenizer, chosen, search_r1.environment, {"search": Tool(search, batch=1 if delay else 256)}, budget, pool,
                       temperature=0.0, stop=search_r1.STOP, tool_lag=0 if delay else 2)
        wall = time.perf_counter() - started
        pool.close()
        return wall, 1 - busy[name] / wall, rows

    print("| trajectories | tools | engine | sampled tokens/s | waiting | wall s | bound s | x bound |\n|---|---|---|---|---|---|---|---|")
    for n in numbers:
        runs: dict = {(name, delay): [] for delay in (0.0, slow_s) for name in names}
        for repeat in range(repeats + 1):                  # the engines take turns; the first round warms up
            for key in runs:
                runs[key].append(play(key[0], prompts[:n], key[1]))
        for (name, delay), played in runs.items():
            wall, waiting, rows = sorted(played[1:], key=lambda p: p[0])[(len(played) - 1) // 2]
            tokens = sum(sum(t.mask) for t in rows)
            bound = ""
            if delay:
                longest = max(range(n), key=lambda i: (len(rows[i].calls), sum(rows[i].mask)))
                alone = statistics.median(play(name, [prompts[longest]], delay)[0] for _ in range(repeats))
                compute = statistics.median(p[0] for p in runs[name, 0.0][1:])
                bound = f"{max(alone, compute):.2f} ({'longest' if alone > compute else 'compute'}) | {wall / max(alone, compute):.2f}"
            print(f"| {n} | {f'{delay:g} s' if delay else 'instant'} | {name} | {tokens / wall:.0f} | {waiting:.0%} | {wall:.2f} | {bound or '– | –'} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--part", choices=["all", "generate", "engines"], default="all", help="generate: against generate; engines: side by side")
    parser.add_argument("--concurrent", type=int, nargs="+", default=[1, 8, 64, 256], help="trajectories at once, for the engines side by side")
    parser.add_argument("--slow", type=float, default=0.5, help="seconds of a slow tool, for the engines side by side")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = tool_user("search_r1") if args.model == "tiny" else load_model(args.model)
    cfg = search_r1.Config()
    budget = Budget(cfg.prompt_tokens if args.model == "tiny" else 400, cfg.turn_tokens, 400, 1200, cfg.max_turns)
    if args.part != "generate":
        many, _ = make_prompts(questions("eval", max(args.concurrent)), lambda e: search_r1.render(e, tokenizer), tokenizer, budget)
        print(f"{args.model}, {args.threads} threads, engines side by side, greedy, median of {args.repeats}", flush=True)
        side_by_side(model, tokenizer, many, budget, args.concurrent, args.repeats, args.slow)
    if args.part == "engines":
        return
    tool = search_tool("", cfg.topk, search_r1.render_passages)
    prompts, _ = make_prompts(questions("eval", args.prompts), lambda e: search_r1.render(e, tokenizer), tokenizer, budget)
    n = len(prompts) * args.samples
    engine = HFEngine(model, tokenizer, max_slots=n, max_length=1600)
    print(f"{args.model}, {args.threads} threads, {len(prompts)} prompts x {args.samples} samples, median of {args.repeats}")

    for name, latency in (("multi-turn, instant tool", 0.0), ("multi-turn, tools of 0 to 200 ms", 0.2)):
        slow_s = lambda argument: latency * (sum(argument.encode()) % 97) / 96
        def search(calls):
            time.sleep(max(slow_s(c.argument) for c in calls))
            return tool.run(calls)
        pool = ToolPool(workers=16)
        def ours():
            engine.sync(model)
            return rollout(engine, tokenizer, prompts, search_r1.environment, {"search": Tool(search, batch=1 if latency else 256)}, budget, pool,
                           samples=args.samples, temperature=0.0, stop=search_r1.STOP, tool_lag=0 if latency else 2)
        repeated = [p for p in prompts for _ in range(args.samples)]
        theirs = lambda: synchronous(model, tokenizer, repeated, budget, search_r1.environment, tool.run, search_r1.STOP, slow_s)
        our_s, trajectories, their_s, (rows, sampled) = seconds(ours, theirs, args.repeats)
        same = sum(t.ids == r for t, r in zip(trajectories, rows)) / n
        our_tokens = sum(sum(t.mask) for t in trajectories)
        calls = sum(len(t.calls) for t in trajectories) / n
        print(f"{name}: {their_s / our_s:.2f} x  (engine {our_s:.2f} s, generate {their_s:.2f} s; {our_tokens} and {sampled} sampled tokens, "
              f"{calls:.2f} calls a trajectory, {same:.0%} of the trajectories identical)", flush=True)
        pool.close()

    words = tokenizer.encode(search_r1.render(questions("eval", 1)[0], tokenizer), add_special_tokens=False)[:64]
    ends, engine.eos_ids = engine.eos_ids, set()
    for name, different in (("64 prompts", 64), ("8 prompts x 8", 8)):
        batch = [[(t + 7 * (i % different)) % 1000 + 5 for t in words] for i in range(64)]
        def ours():
            engine.sync(model)
            for ids in batch:
                engine.submit(ids, max_new_tokens=64, temperature=0.0)
            out = []
            while engine.busy:
                out += engine.step()
            for f in out:
                engine.release(f.rid)
            return sum(len(f.ids) for f in out)
        theirs = lambda: model.generate(input_ids=torch.tensor(batch), attention_mask=torch.ones(64, len(words), dtype=torch.long), max_new_tokens=64,
                                        min_new_tokens=64, do_sample=False, pad_token_id=tokenizer.pad_token_id).shape[0] * 64
        our_s, our_tokens, their_s, their_tokens = seconds(ours, theirs, 2 * args.repeats)
        print(f"single turn, {name}, 64 + 64 tokens each: {their_s / our_s:.2f} x  (engine {our_tokens / our_s:.0f} tokens/s, generate "
              f"{their_tokens / their_s:.0f} tokens/s)", flush=True)
    engine.eos_ids = ends


if __name__ == "__main__":
    main()
