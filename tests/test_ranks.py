"""One process against two gloo ranks, and what becomes of a run when a rank ends. Where one ends too early torchrun starts them, as a user
does; else they are forked, with what torchrun tells its processes."""
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common import ranks
from tests import ranks_worker
from tests.helpers import Forked

ROOT = Path(__file__).parent.parent
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
SMALL = ["--prompts", "3", "--samples", "4", "--eval-questions", "5", "--eval-every", "0", "--save-every", "1", "--threads", "1"]


def start(module: str, *flags, cwd=ROOT, **env) -> subprocess.Popen:
    """Two ranks, by torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    return subprocess.Popen([sys.executable, *launcher, "-m", module, *flags], cwd=cwd, env={**ENV, **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(p: subprocess.Popen, seconds: float = 600) -> str:
    """Its output; a run that does not end in time fails the test."""
    try:
        return p.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        p.terminate()
        raise AssertionError(f"still running after {seconds} s:\n" + p.communicate()[0])


def run(n: int, module: str, *flags, cwd: Path, codes: set[int] = {0}) -> str:
    """The output of a command in n ranks, and the codes they leave with."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    told = lambda r: {"RANK": f"{r}", "LOCAL_RANK": f"{r}", "WORLD_SIZE": f"{n}", "LOCAL_WORLD_SIZE": f"{n}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    processes = [Forked(module, *flags, cwd=cwd, env=ENV | (told(r) if n > 1 else {})) for r in range(n)]
    output = "".join([p.finish(600) for p in processes])
    assert {p.returncode for p in processes} == codes, output
    return output


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """What one process and two ranks find for the same batch."""
    folders = [tmp_path_factory.mktemp(f"ranks{n}") for n in (1, 2)]
    for n, folder in zip((1, 2), folders):
        run(n, "tests.ranks_worker", "everything", str(folder), cwd=folder)
    return [torch.load(folder / f"{n}.pt") for n, folder in zip((1, 2), folders)]


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-12))


@pytest.mark.parametrize("case", ranks_worker.CASES)
def test_two_ranks_take_the_steps_of_one_process(both, case):
    one, two = (x["cases"][case] for x in both)
    assert set(one) == set(two) and {"policy gradient 0", "weights", "grad_norm 1"} <= set(one)
    assert ("critic gradient 1" in one) == case.startswith("ppo")
    if "bfloat16" in case:  # the critic's head stays float32 beside a body that is not; all else is rounding
        assert all(apart(two[name], one[name]) <= 0.05 for name in ("policy gradient 0", "critic gradient 1", "weights")), case
        return
    for name in one:  # after a step of Adam, which divides small gradients by small numbers, rounding errors are larger
        first = name in ("policy gradient 0", "critic gradient 1") or name.endswith(" 0")
        assert apart(two[name], one[name]) <= (1e-5 if first else 1e-4), (name, apart(two[name], one[name]))
    assert float(one["policy gradient 0"].norm()) > 0


def test_the_ranks_of_that_comparison_are_unequal(monkeypatch):
    """It would show little if both had the same work: rank 0 has fewer rows, and no row with an advantage."""
    monkeypatch.setattr(ranks, "world", lambda: 2)
    monkeypatch.setattr(ranks, "rank", lambda: 0)
    b = ranks_worker.batch()
    assert b["rewards"].tolist() == [0.0] * 4 and len(ranks_worker.LENGTHS) == 10


def test_supervised_rows_are_shared_even_when_there_are_too_few(both):
    one, two = (x["supervised"] for x in both)
    assert set(one) == set(two) == {"loss", "few", "policy gradient 0", "policy gradient 1"}
    assert apart(two["policy gradient 0"], one["policy gradient 0"]) <= 1e-5 and all(apart(two[k], one[k]) <= 1e-4 for k in one)


def test_trajectories_do_not_depend_on_the_number_of_ranks(both):
    one, two = (x["sampled"]["trajectories"] for x in both)
    assert one == two and [(group, sample) for _, group, sample, _ in one] == [(g, s) for g in range(5) for s in range(2)]
    assert len({text for *_, text in one}) == 10  # every trajectory has a seed of its own


def test_means_and_variances_are_those_of_all_ranks(both):
    for x in both:
        assert x["numbers"] == pytest.approx([3.75, 3.75, 115 / 12, 3.75, 1.0, 8.0]) and x["nothing"] == [{}, "nan"]


def test_states_are_whole_whatever_the_number_of_ranks(both):
    for kind, dtype in (("states", torch.float32), ("bf16", torch.bfloat16)):
        assert both[0][kind] == both[1][kind] and [t for _, t in both[0][kind]["means"]] == [dtype] * 26


def test_an_engine_holds_one_copy_of_sharded_weights(both):
    one, two = (x["engine"]["scores"] for x in both)
    assert apart(two, one) <= 1e-5 and apart(one[0], one[1]) > 1e-3


def test_a_critic_begins_anew_from_sharded_weights(both):
    for x in both:
        assert x["refreshed"]["before"] > 0.1 and x["refreshed"]["after"] == 0


def test_offloaded_means_are_pinned_shard_by_shard(both):
    assert both[0]["pinned"] == both[1]["pinned"] == ["Tensor"]


def test_only_tensors_on_the_cpu_are_sent_as_objects(monkeypatch):
    """A pickled CUDA tensor would come out on GPU 0 in every rank. Here a tensor that notes that it was brought to the CPU."""
    class There(torch.Tensor):
        def cpu(self):
            return torch.full((), 7.0)

    sent = []
    monkeypatch.setattr(ranks, "world", lambda: 2)
    monkeypatch.setattr(ranks, "rank", lambda: 0)
    monkeypatch.setattr(ranks, "broadcast", lambda value: sent.append(value) or value)
    step, p = torch.zeros(()).as_subclass(There), torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([p])
    ranks.load_whole_state(optimizer, {"state": {0: {"step": step, "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}},
                                       "param_groups": optimizer.state_dict()["param_groups"]})
    assert type(sent[0][0]["step"]) is torch.Tensor and float(optimizer.state[p]["step"]) == 7
    ranks.load_whole_state(SimpleNamespace(load_state_dict=sent.append), {"means": {"of": step}})
    assert [type(x["means"]["of"]) for x in sent[-2:]] == [torch.Tensor] * 2
    assert type(ranks.whole_state(SimpleNamespace(state_dict=lambda: {"step": step}))["step"]) is torch.Tensor


def test_shares_cover_everything_once_and_are_even(monkeypatch):
    for world in (2, 3, 8):
        monkeypatch.setattr(ranks, "world", lambda: world)
        for n in (0, 1, 7, 12):
            parts = []
            for r in range(world):
                monkeypatch.setattr(ranks, "rank", lambda: r)
                parts.append(ranks.share(n))
            assert [i for part in parts for i in part] == list(range(n)) and max(map(len, parts)) - min(map(len, parts)) <= 1


# ---- a whole run --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def one_step(tmp_path_factory):
    """A run of one process, one step long."""
    cwd = tmp_path_factory.mktemp("run")
    run(1, "methods.search_r1", *SMALL, "--steps", "1", cwd=cwd)
    return cwd


def copy_of(run: Path, to: Path) -> Path:
    shutil.copytree(run / "runs", to / "runs")
    return to / "runs/search_r1/tiny-seed0"


def lines(folder: Path, kind: str) -> list[dict]:
    return [r for r in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if r["kind"] == kind]


def test_two_ranks_go_on_from_a_checkpoint_of_one_and_one_from_theirs(one_step, tmp_path):
    paths = [tmp_path / name for name in ("one", "two")]
    folders = [copy_of(one_step, path) for path in paths]
    for n, path in zip((1, 2), paths):
        output = run(n, "methods.search_r1", *SMALL, "--steps", "3", "--resume", cwd=path)
        assert output.count("resuming") == 1 and output.count("open runs/") == 1, output
    one, two = (lines(folder, "train") for folder in folders)
    assert [r["step"] for r in one] == [r["step"] for r in two] == [1, 2, 3]  # nothing is written twice
    for a, b in zip(one, two):
        assert set(a) == set(b)
        same = [k for k in a if isinstance(a[k], (int, float)) and not k.endswith(("_s", "cached_share"))]
        assert {k: b[k] for k in same} == pytest.approx({k: a[k] for k in same}, rel=1e-3, abs=1e-4)
    assert lines(folders[0], "eval")[-1]["n"] == lines(folders[1], "eval")[-1]["n"] == 5
    rows = [[json.loads(line) for line in (folder / "trajectories.jsonl").read_text().splitlines()] for folder in folders]
    assert [(r["step"], r["split"], r["group"], r["sample"], r["tokens"]) for r in rows[0]] == [(r["step"], r["split"], r["group"], r["sample"], r["tokens"]) for r in rows[1]]
    output = run(1, "methods.search_r1", *SMALL, "--steps", "4", "--resume", cwd=paths[1])
    assert "after step 3" in output and len(lines(folders[1], "train")) == 4, output


def test_a_signal_to_one_rank_stops_all_after_a_save(one_step, tmp_path):
    folder = copy_of(one_step, tmp_path)
    p = start("methods.search_r1", *SMALL, "--steps", "500", "--resume", cwd=tmp_path)
    end = time.monotonic() + 200
    while len(lines(folder, "train")) < 2 and time.monotonic() < end and p.poll() is None:
        time.sleep(0.1)
    children = {pid: Path(f"/proc/{pid}/environ").read_bytes() for pid in Path(f"/proc/{p.pid}/task/{p.pid}/children").read_text().split()}
    (second,) = [int(pid) for pid, environ in children.items() if b"\0RANK=1\0" in environ]
    os.kill(second, signal.SIGTERM)
    output = finish(p, 240)
    (stopped,) = re.findall(r"stopped: .* is saved at step (\d+); the same command with --resume goes on", output)
    assert p.returncode != 0 and "Traceback" not in output.split("stopped:")[0], output
    assert len(lines(folder, "train")) == int(stopped) < 500 and (folder / f"checkpoint/step-{stopped}/checksum").exists()


def test_more_ranks_than_prompts_is_a_mistake_that_is_told(tmp_path):
    output = run(2, "methods.search_r1", *SMALL, "--prompts", "1", cwd=tmp_path, codes={1, 2})  # rank 1 finds its connection gone
    assert output.count("error: rank 0 of 2 has no prompt in this step: raise --prompts, or use fewer ranks") == 1, output


@pytest.mark.parametrize("what,reason,code", [
    ("mistake", "rank 1: error: the corpus is not there; bring it back", 2),
    ("bug", "RuntimeError: something broke in the second rank", 1)])
def test_a_rank_that_fails_ends_the_other_and_says_why(tmp_path, what, reason, code):
    output = run(2, "tests.ranks_worker", what, cwd=tmp_path, codes={1, code})
    assert output.count(reason) == 1 and output.count("rank 0: the connection to another rank is gone; it says why itself") == 1, output


@pytest.mark.parametrize("what,reason", [("killed", "SIGKILL"), ("hangs", "Timed out waiting 5000ms")])
def test_a_rank_that_is_killed_or_hangs_ends_the_run_with_its_reason(what, reason):
    begun = time.monotonic()
    p = start("tests.ranks_worker", what, TOOL_RL_RANK_TIMEOUT_S="5")
    output = finish(p, 240)
    assert p.returncode == 1 and reason in output, output
    assert time.monotonic() - begun < 240
