"""Speed of the sandbox beside `subprocess.run([python, "-c", …])` in the same run, and what thousands of calls leave behind.

    python -m tests.bench_sandbox                      # 2,000 calls for the speed, then 10,000 of which 1 % are hostile
    python -m tests.bench_sandbox --calls 200 --soak 0
"""
import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.sandbox import Limits, open_sandbox
from tests.test_sandbox import descendants

TRIVIAL = "print(6 * 7)"
WITH_SYMPY = "import sympy; x = sympy.Symbol('x'); print(sympy.expand((x + 1) ** 2))"
HOSTILE = ("import os\nwhile True:\n    try: os.write(1, b'x' * 65536)\n    except OSError: pass", "import os; os._exit(9)",
           "x = bytearray(1 << 40)", "keep = []\nwhile True: keep.append(bytes(1 << 22))", "import ctypes; ctypes.string_at(0)",
           "for i in range(10**5): open(str(i), 'w').close()",
           "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()", "while True: pass",
           "import os\nwhile True: os.fork()", "import os, signal\nfor fd in range(100):\n    try: os.write(fd, bytes(64)); os.close(fd)\n"
           "    except OSError: pass\nos.kill(-1, 9)")


def row(name: str, seconds: list[float], wall_s: float) -> float:
    """Print a line of the table; calls per second."""
    ordered = sorted(1000 * s for s in seconds)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    rate = len(seconds) / wall_s
    print(f"{name:52} {rate:8.1f} calls/s   median {statistics.median(ordered):7.2f} ms   p99 {p99:7.2f} ms", flush=True)
    return rate


def cold(program: str) -> float:
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=True)
    return time.monotonic() - started


def memory_mb(pids: list[int]) -> float:
    """Proportional memory of processes, shared pages counted once."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        except (OSError, StopIteration):
            continue
    return total / 1024


def speed(sandbox, calls: int, cold_calls: int) -> None:
    for name, program in (("trivial program", TRIVIAL), ("import sympy, expand", WITH_SYMPY)):
        n = max(1, cold_calls if program is TRIVIAL else cold_calls // 4)
        with ThreadPoolExecutor(sandbox.workers) as pool:
            started = time.monotonic()
            times = list(pool.map(cold, [program] * n))
            theirs = row(f"subprocess.run, {name}", times, time.monotonic() - started)
        started = time.monotonic()
        outcomes = sandbox.run([program] * calls)
        ours = row(f"sandbox, {name}", [o.run_s for o in outcomes], time.monotonic() - started)
        assert all(o.kind == "ok" for o in outcomes)
        print(f"    ratio {ours / theirs:.1f} x")
    started = time.monotonic()
    alone = []
    for _ in range(calls // 4):  # one call at a time, seen from the caller
        t = time.monotonic()
        sandbox.run([TRIVIAL])
        alone.append(time.monotonic() - t)
    row("sandbox, trivial program, one at a time, round trip", alone, time.monotonic() - started)


def soak(sandbox, calls: int) -> bool:
    """`calls` programs, 1 % of them hostile. True if no process, descriptor, file or memory is left."""
    def state():
        time.sleep(0.5)  # the next programs' processes are made ahead
        below = descendants()
        files = sum(name.startswith("sandbox-") for name in os.listdir(tempfile.gettempdir()))
        return len(below), len(os.listdir("/proc/self/fd")), files, memory_mb([os.getpid(), *below])

    sandbox.run([TRIVIAL] * min(200, calls) + list(HOSTILE))  # whatever grows once has grown
    before, started, kinds = state(), time.monotonic(), {}
    for start in range(0, calls, 500):
        programs = [HOSTILE[(start + i) // 100 % len(HOSTILE)] if i % 100 == 50 else TRIVIAL for i in range(min(500, calls - start))]
        for program, outcome in zip(programs, sandbox.run(programs)):
            assert outcome.stdout == "42\n" if program is TRIVIAL else outcome.kind not in ("ok", "ok_empty"), (program, outcome)
            kinds[outcome.kind] = kinds.get(outcome.kind, 0) + 1
    after = state()
    print(f"{calls:,} calls, 1 % hostile, in {time.monotonic() - started:.1f} s: {kinds}")
    for name, a, b in zip(("processes", "descriptors", "files", "memory, MB"), before, after):
        print(f"    {name:12} {a:8.1f} before {b:8.1f} after")
    return before[:3] == after[:3] and after[3] < before[3] + 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--cold", type=int, default=40)
    parser.add_argument("--soak", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--backend", default="isolated")
    args = parser.parse_args()
    outside = len(descendants()), len(os.listdir("/proc/self/fd"))
    started = time.monotonic()
    clean = True
    with open_sandbox(args.backend, Limits(wall_s=5, cpu_s=1, memory_mb=256), args.workers) as sandbox:
        print(f"{args.backend}, {sandbox.workers} workers, started in {time.monotonic() - started:.2f} s (load {os.getloadavg()[0]:.1f})")
        if args.calls:
            speed(sandbox, args.calls, args.cold)
        if args.soak:
            clean = soak(sandbox, args.soak)
    left = len(descendants()), len(os.listdir("/proc/self/fd"))
    print(f"after close: {left[0] - outside[0]} processes and {left[1] - outside[1]} descriptors more than before")
    return int(not clean or left != outside)


if __name__ == "__main__":
    sys.exit(main())
