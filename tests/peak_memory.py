"""Peak memory of one step of a method beside what --plan says: python -m tests.peak_memory search_r1 --kl 0.001 --entropy 0.001 ...

Every trajectory is as long as the settings allow (no end token, no stop string), and KL and entropy terms keep rows that teach nothing from
being skipped. Measured is how far the resident memory rises above that of the process after a small step, by which all libraries are loaded;
freed tensors go back to the system at once (MALLOC_MMAP_THRESHOLD_, set before the interpreter starts). CHECKPOINT=0 in the environment
leaves out the checkpoint, which otherwise can need more than the update. Prints both numbers, in bytes.
"""
import dataclasses
import gc
import importlib
import json
import os
import re
import sys
import tempfile
from functools import partial
from pathlib import Path

THRESHOLD = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
SMALL = dict(steps=1, prompts=1, samples=2, eval_questions=1, turn_tokens=8, trajectory_tokens=8, micro_tokens=512)


def memory_kb(what: str) -> int:
    return int(re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def main(name: str, flags: list[str]) -> None:
    from common import plan
    from common.engine import HFEngine
    from common.run import Run, parse_config
    method = importlib.import_module(f"methods.{name}")
    without = os.environ.get("CHECKPOINT") == "0"
    cfg = parse_config(method.Config, method.PRESETS, [*flags, "--steps", "1", "--eval-every", "0", "--keep-trajectories", "1", "--threads", "1"])
    asked = {}
    method.print_plan = lambda cfg, **how: asked.update(how)
    method.train(dataclasses.replace(cfg, plan=True))
    critic = asked.pop("critic", False)
    group = 1 if critic else cfg.samples
    if without:
        Run.save = lambda self, step, trained: None
    seen = dataclasses.replace(cfg, device="cuda") if without else cfg  # a plan for a GPU counts no checkpoint
    planned = plan.memory(plan.Size.of(plan.model_shape(cfg.model)), seen, response_tokens=asked["response_tokens"],
                          prompts=cfg.prompts * cfg.samples // group, group=group, reference=asked.get("reference", False), critic=critic)
    method.STOP, method.HFEngine = (), partial(HFEngine, eos_ids=())
    method.make_engine = lambda name, *what, **how: HFEngine(*what, eos_ids=(), **how)  # where methods choose their engine by name
    os.chdir(tempfile.mkdtemp())
    method.train(dataclasses.replace(cfg, **{k: v for k, v in SMALL.items() if hasattr(cfg, k)}))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = memory_kb("VmRSS")
    method.train(cfg)
    print(json.dumps({"measured": (memory_kb("VmHWM") - before) * 1024, "planned": planned["all"], "parts": planned}))


if __name__ == "__main__":
    if THRESHOLD.items() - os.environ.items():
        os.execve(sys.executable, [sys.executable, "-m", "tests.peak_memory", *sys.argv[1:]], {**os.environ, **THRESHOLD})
    main(sys.argv[1], sys.argv[2:])
