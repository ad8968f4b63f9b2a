import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from common import UserError
from common.run import METRICS, Run, parse_config, write_atomic
from methods.search_r1 import PRESETS, Config, train
from tests.helpers import command

ROOT = Path(__file__).parent.parent
SMALL = ["--steps", "6", "--prompts", "2", "--samples", "4", "--eval-questions", "6", "--eval-every", "0", "--save-every", "1", "--threads", "1"]
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def search_r1(cwd, *flags, **popen):
    return subprocess.Popen([sys.executable, "-m", "methods.search_r1", *flags], cwd=cwd, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            text=True, **popen)


@pytest.fixture
def here(capsys, monkeypatch):
    """The same command in this process."""
    def run(cwd, *flags) -> tuple[int, str]:
        monkeypatch.chdir(cwd)
        return command(capsys, lambda: train(parse_config(Config, PRESETS, ["--threads", "1", *flags])))
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(Run, "current", None)
    yield run
    for n, handler in handlers.items():
        signal.signal(n, handler)
    torch.use_deterministic_algorithms(False)


def steps_logged(folder: Path) -> list[int]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [r["step"] for r in map(json.loads, lines) if r["kind"] == "train"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody interrupts."""
    cwd = tmp_path_factory.mktemp("whole")
    p = search_r1(cwd, *SMALL)
    output = p.communicate(timeout=200)[0]
    assert p.returncode == 0, output
    return cwd / "runs/search_r1/tiny-seed0", output


def same_weights(a: Path, b: Path) -> bool:
    return (a / "model/model.safetensors").read_bytes() == (b / "model/model.safetensors").read_bytes()


def test_a_run_leaves_everything_behind(whole):
    folder, output = whole
    assert {"config.json", "metrics.jsonl", "trajectories.jsonl", "summary.json", "report.html", "checkpoint", "model"} <= {p.name for p in folder.iterdir()}
    summary = json.loads((folder / "summary.json").read_text())
    assert {"method", "preset", "seed", "steps", "wall_s", "metric", "before", "after", "interval_after", "calls_before", "calls_after"} <= set(summary)
    assert summary["steps"] == 6 and steps_logged(folder) == [1, 2, 3, 4, 5, 6]
    config = json.loads((folder / "config.json").read_text())
    assert config["fields"]["clip"] == {"value": 0.2, "help": config["fields"]["clip"]["help"], "source": "paper App. B", "unit": ""}
    assert f"em {summary['before']:.3f} -> {summary['after']:.3f}" in output
    train = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(abs(r["sampler_ratio_mean"] - 1) < 1e-3 for r in train if r.get("sampler_ratio_mean") is not None)
    for row in map(json.loads, (folder / "trajectories.jsonl").read_text().splitlines()):
        assert len(row["tokens"]) == len(row["author"]) == len(row["mask"]) == len(row["logprob"]) == len(row["ratio"])


def test_two_threads_give_the_same_bits_each_time(tmp_path):
    """A real step's size: with small ones the threads have nothing to race for."""
    flags = ["--steps", "2", "--eval-questions", "4", "--eval-every", "0", "--threads", "2"]
    norms = []
    for name in "ab":
        p = search_r1(tmp_path, *flags, "--name", name)
        output = p.communicate(timeout=200)[0]
        assert p.returncode == 0, output
        rows = map(json.loads, (tmp_path / f"runs/search_r1/{name}/metrics.jsonl").read_text().splitlines())
        norms.append([r["grad_norm"] for r in rows if r["kind"] == "train"])
    assert norms[0] == norms[1] and len(norms[0]) == 2
    assert same_weights(tmp_path / "runs/search_r1/a", tmp_path / "runs/search_r1/b")


def test_kill_9_at_a_random_point_then_resume_gives_the_same_bits(whole, tmp_path):
    folder = tmp_path / "runs/search_r1/tiny-seed0"
    p = search_r1(tmp_path, *SMALL)
    end = time.monotonic() + 120
    while not steps_logged(folder) and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(random.Random().random() * 1.5)
    p.send_signal(signal.SIGKILL)
    p.wait()
    p = search_r1(tmp_path, *SMALL, "--resume")
    output = p.communicate(timeout=200)[0]
    assert p.returncode == 0, output
    assert "resuming" in output and steps_logged(folder) == [1, 2, 3, 4, 5, 6]
    assert same_weights(folder, whole[0])
    strip = lambda f: [{k: v for k, v in json.loads(line).items() if not k.endswith("_s")} for line in (f / "metrics.jsonl").read_text().splitlines()]
    assert strip(folder) == strip(whole[0])


def test_sigterm_saves_and_a_corrupt_checkpoint_falls_back_to_the_one_before(whole, tmp_path):
    folder = tmp_path / "runs/search_r1/tiny-seed0"
    p = search_r1(tmp_path, *SMALL)
    end = time.monotonic() + 120
    while len(steps_logged(folder)) < 3 and time.monotonic() < end:
        time.sleep(0.02)
    p.send_signal(signal.SIGTERM)
    output = p.communicate(timeout=60)[0]
    if p.returncode == 0:
        pytest.skip("the run was over before the signal came")
    assert p.returncode == 130 and "--resume goes on" in output
    newest = max((folder / "checkpoint").glob("step-*"), key=lambda f: int(f.name[5:]))
    raw = bytearray((newest / "state.pt").read_bytes())
    raw[len(raw) // 2] ^= 1
    (newest / "state.pt").write_bytes(raw)
    p = search_r1(tmp_path, *SMALL, "--resume")
    output = p.communicate(timeout=200)[0]
    assert p.returncode == 0 and "its checksum differs" in output, output
    assert same_weights(folder, whole[0])


def test_resume_refuses_other_settings_and_a_missing_run(whole, here, tmp_path):
    code, output = here(whole[0].parents[2], *SMALL, "--resume", "--lr", "0.5")
    assert code == 2 and output.strip().endswith("give the same ones, or another --name"), output
    code, output = here(tmp_path, *SMALL, "--resume")
    assert code == 2 and "start it without --resume" in output, output


def test_a_saved_run_is_evaluated_again_to_the_same_score(whole, here):
    folder, _ = whole
    code, output = here(folder.parents[2], "--evaluate", str(folder))
    assert code == 0, output
    assert f"em {json.loads((folder / 'summary.json').read_text())['after']:.3f}" in output
    assert json.loads((folder / "evaluations.jsonl").read_text().splitlines()[-1])["n"] == 6


@pytest.mark.parametrize("flags,message", [
    (["--learning-rate", "1"], "--learning-rate"),
    (["--tempratur", "1"], "--temperature"),
    (["--promts", "3"], "--prompts"),
    (["--preset", "huge"], "there are tiny, smollm2, paper"),
    (["--model", "nowhere/at/all"], "no model at nowhere/at/all"),
    (["--template", "nofile.txt"], "--template nofile.txt: no such file"),
    (["--data", "nofile.jsonl", "--corpus", "c.jsonl"], "nofile.jsonl"),
    (["--data", "bad.jsonl", "--corpus", "c.jsonl"], "'bad.jsonl' cannot be used: line 2"),
    (["--data", "good.jsonl"], "--corpus"),
    (["--data", "good.jsonl", "--corpus", "nocorpus.jsonl", "--eval-questions", "1"], "nocorpus.jsonl"),
    (["--data", "good.jsonl", "--corpus", "http://127.0.0.1:9", "--eval-questions", "1"], "http://127.0.0.1:9"),
    (["--template", "empty.txt"], "lacks the placeholder {question}"),
    (["--device", "cuda"], "no GPU"),
    (["--evaluate", "runs/search_r1/none"], "no finished run there"),
])
def test_bad_input_is_one_sentence_and_exit_code_2(here, tmp_path, flags, message):
    if "cuda" in flags and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    (tmp_path / "good.jsonl").write_text('{"question": "a?", "answer": "b"}\n{"question": "c?", "answer": "d"}\n')
    (tmp_path / "bad.jsonl").write_text('{"question": "a?", "answer": "b"}\n{"question": ""}\n')
    (tmp_path / "empty.txt").write_text("no place for it")
    code, output = here(tmp_path, *flags)
    assert code == 2 and message in output and "Traceback" not in output, output
    assert not (tmp_path / "runs").exists()  # nothing half-written


def test_help_shows_every_flag_with_default_and_source(here):
    code, output = here(ROOT, "--help")
    output = " ".join(output.replace("│", " ").split())
    assert code == 0
    for name in Config.__dataclass_fields__:
        assert "--" + name.replace("_", "-") in output, name
    assert "[paper §3.2]" in output and "default: 0.2" in output


def test_atomic_write_keeps_the_old_file_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_atomic(path, "old")
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UserError, match="No space left on device"):
        write_atomic(path, "new")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_full_disk_is_said_and_the_last_checkpoint_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = Run(Config(), method="m", metric="em", total_steps=3, resume=False)
    layer = torch.nn.Linear(2, 2)
    run.before = {"em": 0.0}
    run.save(1, {"model": layer})
    monkeypatch.setattr("common.run.write_atomic", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UserError, match="step-2 .No space left on device.*saved before has stayed"):
        run.save(2, {"model": layer})
    assert run.checkpoints() == [1] and not list((run.folder / "checkpoint").glob(".*"))


def test_unknown_metrics_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = Run(Config(), method="m", metric="em", total_steps=3, resume=False)
    with pytest.raises(KeyError, match="bananas"):
        run.log("eval", 0, {"bananas": 1.0})
    assert all(isinstance(v, str) and v for v in METRICS.values())
