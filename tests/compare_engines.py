"""One method, seed and data with both engines: learning side by side, and what the trainer thinks of the sampler's log-probs.

    make compare_engines                                        # Search-R1 on the tiny model, 8 steps
    make compare_engines METHOD=torl ARGS="--steps 20 --seed 1"

The engines draw other tokens from the same seed, so curves agree up to noise; the log-probs of the drawn tokens must agree with the trainer's.
"""
import json
import subprocess
import sys
from pathlib import Path


def table(folders: dict[str, Path]) -> str:
    """Markdown: reward and headline metric by step, then log-prob differences, raw ratios and speed, one column an engine."""
    rows = {name: [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] for name, folder in folders.items()}
    train = {name: [r for r in found if r["kind"] == "train"] for name, found in rows.items()}
    metric = json.loads((next(iter(folders.values())) / "summary.json").read_text())["metric"]
    lines = ["| | " + " | ".join(folders) + " |", "|---" * (len(folders) + 1) + "|"]
    line = lambda label, cells: lines.append(f"| {label} | " + " | ".join(cells) + " |")
    line(f"{metric}, greedy, at step " + " / ".join(str(r["step"]) for r in next(iter(rows.values())) if r["kind"] == "eval"),
         [" / ".join(f"{r[metric]:.3f}" for r in found if r["kind"] == "eval") for found in rows.values()])
    line("reward of the samples by step", [" ".join(f"{r['reward']:.2f}" for r in found) for found in train.values()])
    line("calls by step", [" ".join(f"{r['calls']:.2f}" for r in found) for found in train.values()])
    over = lambda found, key, pick: pick([r[key] for r in found if r.get(key) is not None])
    average = lambda values: sum(values) / len(values)
    for label, key, pick in (("log-prob difference: mean", "sampler_gap_mean", average), ("99th percentile, largest step", "sampler_gap_p99", max),
                             ("largest", "sampler_gap_max", max), ("raw ratio: smallest", "sampler_ratio_min", min), ("mean", "sampler_ratio_mean", average),
                             ("largest", "sampler_ratio_max", max)):
        line(label, [f"{over(found, key, pick):.7f}" if "ratio" in key else f"{over(found, key, pick):.1e}" for found in train.values()])
    line("sampled tokens/s, all steps but the first", [f"{sum(r['sampled_tokens'] for r in found[1:]) / sum(r['sample_s'] for r in found[1:]):.0f}" for found in train.values()])
    line("seconds a step: sampling, all", [f"{average([r['sample_s'] for r in found[1:]]):.2f}, {average([r['step_s'] for r in found[1:]]):.2f}" for found in train.values()])
    line("share of prompt and observation tokens not computed again, last step", [f"{found[-1]['cached_share']:.2f}" for found in train.values()])
    return "\n".join(lines)


def main() -> None:
    method, args = sys.argv[1], sys.argv[2:] if "--steps" in sys.argv else ["--steps", "8", *sys.argv[2:]]
    for engine in ("hf", "vllm"):
        subprocess.run([sys.executable, "-m", f"methods.{method}", *args, "--engine", engine, "--name", f"engine-{engine}"], check=True)
    print(table({engine: Path("runs") / method / f"engine-{engine}" for engine in ("hf", "vllm")}))


if __name__ == "__main__":
    main()
