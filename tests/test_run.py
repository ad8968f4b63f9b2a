import json
import math
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from common import UserError
from common.data import Example
from common.rollout import ToolCall, Trajectory
from common.run import METRICS, Run, eval_metrics, parse_config, saved_config, write_atomic
from methods.search_r1 import PRESETS, Config, train
from tests.helpers import Forked, command

ROOT = Path(__file__).parent.parent
SMALL = ["--steps", "6", "--prompts", "2", "--samples", "4", "--eval-questions", "6", "--trajectory-tokens", "160", "--eval-every", "0", "--save-every", "1", "--threads", "1"]
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def search_r1(cwd, *flags) -> Forked:
    return Forked("methods.search_r1", *flags, cwd=cwd, env=ENV)


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
    output = p.finish(200)
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
    """As many rows as in a real step: with fewer or much shorter ones the threads have nothing to race for, and this shows nothing."""
    flags = ["--steps", "1", "--eval-questions", "4", "--eval-every", "0", "--trajectory-tokens", "96", "--threads", "2"]
    norms = []
    for name in "ab":
        p = search_r1(tmp_path, *flags, "--name", name)
        output = p.finish(200)
        assert p.returncode == 0, output
        rows = map(json.loads, (tmp_path / f"runs/search_r1/{name}/metrics.jsonl").read_text().splitlines())
        norms.append([r["grad_norm"] for r in rows if r["kind"] == "train"])
    assert norms[0] == norms[1] and len(norms[0]) == 1
    assert same_weights(tmp_path / "runs/search_r1/a", tmp_path / "runs/search_r1/b")


def test_kill_9_at_a_random_point_then_resume_gives_the_same_bits(whole, tmp_path):
    folder = tmp_path / "runs/search_r1/tiny-seed0"
    p = search_r1(tmp_path, *SMALL)
    end = time.monotonic() + 120
    while not steps_logged(folder) and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(random.Random().random() * 1.5)
    p.send_signal(signal.SIGKILL)
    p.finish(60)
    saved = any((folder / "checkpoint").glob("step-*/checksum"))  # else it was killed between its first step and the save
    p = search_r1(tmp_path, *SMALL, "--resume")
    output = p.finish(200)
    assert p.returncode == 0, output
    assert ("resuming" if saved else "has no usable checkpoint; starting at step 0") in output and steps_logged(folder) == [1, 2, 3, 4, 5, 6]
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
    output = p.finish(60)
    if p.returncode == 0:
        pytest.skip("the run was over before the signal came")
    assert p.returncode == 130 and "--resume goes on" in output
    newest = max((folder / "checkpoint").glob("step-*"), key=lambda f: int(f.name[5:]))
    raw = bytearray((newest / "state.pt").read_bytes())
    raw[len(raw) // 2] ^= 1
    (newest / "state.pt").write_bytes(raw)
    p = search_r1(tmp_path, *SMALL, "--resume")
    output = p.finish(200)
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
def test_bad_input_is_one_sentence_and_exit_code_2(here, tmp_path, monkeypatch, flags, message):
    monkeypatch.setattr("common.search.LONGEST_PAUSE_S", 0.01)
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


def new_run(name="", **options) -> Run:
    return Run(Config(), method="m", metric="em", total_steps=3, resume=False, name=name, **options)


@pytest.mark.parametrize("name", ["..", ".", "../..", "a/b", "a/", "{absolute}"])
def test_a_name_that_is_no_plain_folder_deletes_nothing(tmp_path, monkeypatch, name):
    """Nothing is deleted even where the check is missing: rmtree is stubbed first, and no name here leads out of tmp_path."""
    removed = []
    monkeypatch.setattr("common.run.shutil.rmtree", lambda path, *a, **k: removed.append(path))
    monkeypatch.chdir(tmp_path)
    Path("runs/m").mkdir(parents=True)
    Path("other").mkdir()
    with pytest.raises(UserError, match="--name .* is one folder in runs/m; give a plain name"):
        new_run(name.format(absolute=tmp_path / "other"))
    assert not removed


def test_only_a_folder_that_holds_a_run_is_begun_anew(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/m/a").mkdir(parents=True)
    folder = new_run("a").folder  # it was empty
    (folder / "model").mkdir()
    new_run("a")
    assert [f.name for f in folder.iterdir()] == ["config.json"]
    Path("runs/m/b").mkdir()
    Path("runs/m/b/thesis.tex").write_text("years")
    with pytest.raises(UserError, match="runs/m/b holds something else than a run .* give another --name"):
        new_run("b")
    assert Path("runs/m/b/thesis.tex").read_text() == "years"


def test_a_checkpoint_of_a_gpu_is_read_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, layer = new_run(), torch.nn.Linear(2, 2)
    run.before = {"em": 0.0}
    with monkeypatch.context() as m:
        m.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        run.save(1, {"model": layer})
    with monkeypatch.context() as m:  # "cuda:0" is what stands in the file, and a machine without a GPU refuses it
        m.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(RuntimeError, match="CUDA"):
            torch.load(run.folder / "checkpoint/step-1/state.pt")
    there = torch.nn.Linear(2, 2)
    assert run.restore({"model": there}) == 1 and torch.equal(there.weight, layer.weight)
    assert run._read_checkpoint()["model"]["weight"].device.type == "cpu"


def finished_run(folder: Path, *flags) -> str:
    """The folder of a run with these flags, as far as --evaluate reads it."""
    cfg = parse_config(Config, PRESETS, flags)
    (folder / "model").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"fields": {k: {"value": getattr(cfg, k)} for k in Config.__dataclass_fields__}}))
    return str(folder)


def evaluated(folder: str, *flags) -> Config:
    cfg = parse_config(Config, PRESETS, ["--evaluate", folder, *flags])
    return saved_config(Config, cfg.evaluate, cfg)


def test_evaluate_takes_the_runs_settings_but_for_the_flags_that_are_given(tmp_path):
    folder = finished_run(tmp_path, "--preset", "paper", "--stop-on-collapse", "--eval-questions", "500", "--threads", "3")
    saved, default = evaluated(folder), Config()
    assert (saved.preset, saved.device, saved.eval_questions, saved.threads, saved.stop_on_collapse) == ("paper", "cuda", 500, 3, True)
    assert saved.model == str(tmp_path / "model") and saved.evaluate == folder and saved.lr != default.lr
    cfg = evaluated(folder, "--device", default.device, f"--eval-questions={default.eval_questions}", "--no-stop-on-collapse", "--eval_data", "q.jsonl")
    assert (cfg.device, cfg.eval_questions, cfg.stop_on_collapse, cfg.eval_data) == ("cpu", default.eval_questions, False, "q.jsonl")
    assert (cfg.preset, cfg.threads, cfg.lr) == ("paper", 3, saved.lr)
    built = saved_config(Config, folder, Config(evaluate=folder, seed=7))  # in Python
    assert (built.seed, built.device) == (7, "cuda")


def test_evaluate_refuses_another_preset_or_model(tmp_path):
    folder = finished_run(tmp_path, "--preset", "paper", "--threads", "3")
    assert evaluated(folder, "--preset", "paper").threads == 3
    for flag in (["--preset", "tiny"], ["--model", "tiny"]):
        with pytest.raises(UserError, match=f"it was trained with {flag[0]} .*leave out {flag[0]}"):
            evaluated(folder, *flag)


@pytest.mark.parametrize("method", sorted(p.stem for p in (ROOT / "methods").glob("*.py") if p.stem != "__init__"))
def test_no_flag_looks_like_the_opposite_of_another(method):
    """`parse_config` takes --no-x for x."""
    names = set(__import__(f"methods.{method}", fromlist=["Config"]).Config.__dataclass_fields__)
    assert not [n for n in names if f"no_{n}" in names] and "given" not in names


def replies(outcome: str, counts: list[int], stop: str = "length") -> list[Trajectory]:
    """Trajectories of one turn with so many calls each."""
    example = Example("e", "?", ("gold",), {})
    return [Trajectory(example, i, 0, "", [], turns=1, stop=stop, calls=[ToolCall("f", "{}", example, outcome)] * n) for i, n in enumerate(counts)]


def test_no_rate_of_usable_calls_where_calls_are_only_compared():
    parts = [{"accuracy": 1.0, "names": 1.0, "format": 1.0, "total": 1.0}, {"accuracy": 0.0, "names": 0.0, "format": 0.0, "total": 0.0}]
    for counts in ([20, 0], [0, 0]):
        assert math.isnan(eval_metrics("accuracy", replies("not_run", counts), parts)["valid_call_rate"])
    run = [{"accuracy": 1.0, "total": 1.0}] * 2
    assert eval_metrics("accuracy", replies("ok", [1, 0]), run)["valid_call_rate"] == 0.5


def test_right_calls_among_the_replies_in_the_asked_form():
    form = lambda accuracy, form, **more: {"accuracy": accuracy, "names": 1.0, "format": form, "total": 0.0, **more}
    metrics = lambda parts: eval_metrics("accuracy", replies("not_run", [1] * len(parts)), parts)
    assert metrics([form(1.0, 1.0), form(0.0, 1.0), form(0.0, 1.0), form(1.0, 0.0)])["accuracy_if_format"] == pytest.approx(1 / 3)
    assert math.isnan(metrics([form(1.0, 0.0)])["accuracy_if_format"]) and "accuracy_if_format" in METRICS
    both = metrics([form(1.0, 1.0, answered=1.0)])  # R1-Searcher has both
    assert "accuracy_if_answered" in both and "accuracy_if_format" not in both


@pytest.mark.parametrize("target", [["run", "METHOD=torl"], ["eval", "RUN=runs/torl/x"]])
def test_make_run_and_eval_take_engine_and_ranks(target):
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "ENGINE", "RANKS", "ARGS", "V", "VENV")}  # what a `make test ENGINE=vllm` hands on
    said = lambda *words: subprocess.run(["make", "-n", "-o", "setup", "-C", str(ROOT), *target, *words], capture_output=True, text=True, check=True, env=env).stdout
    assert "torch.distributed.run --standalone --nproc_per_node=2 -m methods." in said("RANKS=2")
    assert "--seed 1 --engine vllm" in said("ENGINE=vllm", "ARGS=--seed 1") and ".vllm-venv/bin/python" in said("ENGINE=vllm")
    assert "torch.distributed" not in said() and "--engine" not in said()
