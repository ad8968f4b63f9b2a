"""The fault list: whatever dies, fills up or is stopped, nothing hangs, no failure becomes an observation, and a resume gives the run that
nobody disturbed. Runs are real ones (tiny model, 3 steps) inside this process, so that a fault strikes at a chosen call."""
import http.server
import itertools
import json
import os
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import common.run
import common.tools
import common.update
import common.warmup
from common import UserError
from common.engine import HFEngine
from common.policy import Critic, make_optimizer
from common.rollout import InfrastructureFailure, Tool, ToolCall, ToolPool
from common.run import Interrupted, Run
from common.sandbox import Limits, SandboxDown, open_sandbox
from common.search import RemoteRetriever
from common.update import critic_step, joined, policy_step, supervised_step, values
from methods import search_r1, torl
from tests.helpers import command, tiny_random_model
from tests.test_update import OPTIONS, experience

ROOT = Path(__file__).parent.parent
DEADLINE_S = 300  # generous: the machine may be busy
CONFIG = search_r1.Config(steps=3, prompts=2, samples=4, eval_questions=2, eval_every=2, save_every=3, threads=1, warmup=3, warmup_traces=2,
                          turn_tokens=24, trajectory_tokens=72, reward="format", lr=1e-3, entropy=0.01)  # the entropy term: a gradient in every step
# what a run calls, in order: evaluation, 3 warm-up steps, evaluation, steps 1 and 2, evaluation, step 3, evaluation
EVAL_0, EVAL_WARM, STEP_1, STEP_2, EVAL_2, STEP_3, EVAL_3 = range(1, 8)  # calls of rollout


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """Handlers, current run and torch's switches as they were, and an end to whatever hangs."""
    def hung(*_):
        raise AssertionError(f"hung for {DEADLINE_S} s")
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(Run, "current", None)
    signal.signal(signal.SIGALRM, hung)
    signal.alarm(DEADLINE_S)
    yield
    signal.alarm(0)
    for n, handler in handlers.items():
        signal.signal(n, handler)
    torch.use_deterministic_algorithms(False)


def go(capsys, config, method=search_r1) -> tuple[int, str]:
    """Exit code and output of a command."""
    return command(capsys, lambda: method.train(config))


def on_call(monkeypatch, where, name: str, number: int, do) -> None:
    """`do()` just before the call with this number (from 1) of a function, or before every one of several numbers."""
    real, count = getattr(where, name), itertools.count(1)
    numbers = [number] if isinstance(number, int) else number

    def called(*args, **kwargs):
        if next(count) in numbers:
            do()
        return real(*args, **kwargs)
    monkeypatch.setattr(where, name, called)


def in_rollout(monkeypatch, rollout: int, do, method=search_r1) -> None:
    """`do()` before the third engine step of the rollout with this number."""
    on_call(monkeypatch, method, "rollout", rollout, lambda: on_call(monkeypatch, HFEngine, "step", 3, do))


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def lines(folder: Path) -> list[dict]:
    """metrics.jsonl without what a clock says."""
    return [{k: v for k, v in json.loads(line).items() if not k.endswith("_s")} for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_same_run(folder: Path, whole: Path) -> None:
    assert (folder / "model/model.safetensors").read_bytes() == (whole / "model/model.safetensors").read_bytes()
    assert lines(folder) == lines(whole)
    assert {p.name for p in folder.iterdir()} == {p.name for p in whole.iterdir()}  # nothing half-written is left
    rows = [[json.loads(line) for line in (f / "trajectories.jsonl").read_text().splitlines()] for f in (folder, whole)]
    assert [(r["step"], r["split"], r["tokens"], r["advantage"]) for r in rows[0]] == [(r["step"], r["split"], r["tokens"], r["advantage"]) for r in rows[1]]


def undisturbed(tmp_path_factory, config, method) -> Path:
    cwd, here = tmp_path_factory.mktemp("whole"), os.getcwd()
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        os.chdir(cwd)
        method.train(config)
    finally:
        os.chdir(here)
        for n, handler in handlers.items():
            signal.signal(n, handler)
    return cwd / "runs" / method.__name__.split(".")[-1] / "tiny-seed0"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = undisturbed(tmp_path_factory, CONFIG, search_r1)
    learned = torch.load(folder / "checkpoint/step-3/state.pt", weights_only=True)["optimizer"]["state"]
    assert any(float(s["exp_avg"].abs().max()) > 0 for s in learned.values())  # or the same weights would mean nothing
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Path("runs/search_r1/tiny-seed0")


def assert_resumes(capsys, monkeypatch, folder: Path, whole: Path, config=CONFIG, method=search_r1) -> str:
    monkeypatch.setattr(Run, "current", None)
    code, output = go(capsys, replace(config, resume=True), method)
    assert code == 0, output
    assert_same_run(folder, whole)
    return output


# ---- SIGTERM in each phase --------------------------------------------------------------------------------------------
PHASES = {  # how the signal comes, the step that is saved (None: before the first)
    "first evaluation": (lambda m: in_rollout(m, EVAL_0, terminate), None),
    "warm-up": (lambda m: on_call(m, common.warmup, "supervised_step", 2, terminate), None),
    "rollout": (lambda m: in_rollout(m, STEP_2, terminate), 2),
    "scoring": (lambda m: on_call(m, search_r1, "reward", 2 + 2 + 8 + 3, terminate), 2),
    "update": (lambda m: on_call(m, common.update, "optimizer_step", 3 + 2, terminate), 2),
    "evaluation": (lambda m: in_rollout(m, EVAL_2, terminate), 2),
    "saving": (lambda m: on_call(m, torch, "save", 1, terminate), 3),
}


@pytest.mark.parametrize("phase", PHASES)
def test_sigterm_in_each_phase_saves_and_a_resume_gives_the_run_that_nobody_stopped(phase, whole, folder, monkeypatch, capsys):
    strike, saved = PHASES[phase]
    with monkeypatch.context() as m:
        strike(m)
        code, output = go(capsys, CONFIG)
    assert code == 130 and "SIGTERM: finishing this step" in output and "--resume goes on" in output, output
    assert (f"is saved at step {saved};" if saved else "was before its first step;") in output
    steps = [r["step"] for r in lines(folder) if r["kind"] == "train"]
    assert steps == list(range(1, (saved or 0) + 1)) and not (folder / "summary.json").exists()
    assert_resumes(capsys, monkeypatch, folder, whole)


def test_sigterm_after_the_last_step_lets_the_run_end(whole, folder, monkeypatch, capsys):
    in_rollout(monkeypatch, EVAL_3, terminate)
    code, output = go(capsys, CONFIG)
    assert code == 0 and "SIGTERM" in output
    assert_same_run(folder, whole)


def test_a_second_signal_leaves_at_once(whole, folder, monkeypatch, capsys):
    with monkeypatch.context() as m:
        on_call(m, common.update, "optimizer_step", 3 + 2, lambda: (terminate(), terminate()))
        code, output = go(capsys, replace(CONFIG, save_every=1))
    assert code == 130 and output.strip().endswith(f"stopped at once; {folder} is saved at step 1: the same command with --resume goes on")
    assert_resumes(capsys, monkeypatch, folder, whole)


def test_a_signal_between_the_decision_to_save_and_the_stop_is_not_called_saved(folder):
    run = Run(CONFIG, method="search_r1", metric="em", total_steps=3, resume=False)
    layer = torch.nn.Linear(2, 2)
    run.save(1, {"model": layer})
    run.asked = "SIGTERM"
    run.stop_if_asked(2)  # step 2 is not on the disk: the run goes on to the next step, which is
    run.save(3, {"model": layer})
    with pytest.raises(Interrupted, match="is saved at step 3"):
        run.stop_if_asked(3)


def test_sigterm_while_loading_leaves_nothing(tmp_path):
    program = ("import os, signal\nfrom methods import search_r1\nsearch_r1.load_model = lambda *a: os.kill(os.getpid(), signal.SIGTERM)\n"
               "search_r1.main(lambda: search_r1.train(search_r1.Config()))")
    p = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, timeout=DEADLINE_S)
    assert p.returncode == -signal.SIGTERM and not list(tmp_path.iterdir())


# ---- the engine dies --------------------------------------------------------------------------------------------------
def fail():
    raise RuntimeError("device-side assert triggered")


@pytest.mark.parametrize("where", ["step", "sync"])
def test_an_engine_that_dies_ends_the_run_with_its_reason_and_a_resume_goes_on(where, whole, folder, monkeypatch, capsys):
    with monkeypatch.context() as m:
        if where == "step":
            in_rollout(m, STEP_2, fail)
        else:
            on_call(m, HFEngine, "sync", 1 + STEP_2, fail)  # the first is the constructor's
        code, output = go(capsys, replace(CONFIG, save_every=1))
    assert code == 1 and "RuntimeError: device-side assert triggered" in output and "Traceback" in output  # not the user's mistake
    assert output.strip().endswith(f"error: RuntimeError, see above; {folder} is saved at step 1: the same command with --resume goes on")
    assert_resumes(capsys, monkeypatch, folder, whole)


def test_an_engine_that_dies_before_the_first_checkpoint(whole, folder, monkeypatch, capsys):
    with monkeypatch.context() as m:
        in_rollout(m, STEP_1, fail)
        code, output = go(capsys, CONFIG)
    assert code == 1 and f"{folder} has no checkpoint yet: the same command with --resume goes on" in output
    assert "has no usable checkpoint; starting at step 0" in assert_resumes(capsys, monkeypatch, folder, whole)


# ---- the retriever dies, and returns ----------------------------------------------------------------------------------
class Retriever:
    """A server of Search-R1's protocol that can be ill. What it finds depends on the query alone."""

    def __init__(self):
        self.asked, self.ill, self.port = 0, [], 0
        self.start()

    def start(self) -> None:
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                outer.asked += 1
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                illness = outer.ill.pop(0) if outer.ill else None
                if illness == "reset":
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return self.connection.close()
                rows = [[{"document": {"id": str(i), "contents": f'"Page {i}"\n{q[::-1][:20]} is {len(q)}.'}} for i in range(body["topk"])] for q in body["queries"]]
                answer = json.dumps({"result": rows}).encode()
                self.send_response(503 if illness == "503" else 200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer[:len(answer) // 2] if illness == "cut" else answer)

            def log_message(self, *args):
                pass

            def handle(self):
                try:
                    super().handle()
                except (OSError, ValueError):  # it closed the connection itself
                    self.close_connection = True

            def finish(self):
                try:
                    super().finish()
                except (OSError, ValueError):
                    self.close_connection = True
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture(scope="module")
def retriever():
    server = Retriever()
    yield server
    server.stop()


def patient(monkeypatch, deadline_s: float) -> None:
    """The client of a run, with short pauses."""
    monkeypatch.setattr(common.tools, "open_retriever", lambda url: RemoteRetriever(url, backoff_s=0.01, deadline_s=deadline_s))


REMOTE = replace(CONFIG, warmup=0, save_every=1)
REMOTE_STEP_2 = 3  # number of its rollout without a warm-up


@pytest.fixture(scope="module")
def whole_remote(tmp_path_factory, retriever):
    folder = undisturbed(tmp_path_factory, replace(REMOTE, corpus=retriever.url), search_r1)
    assert retriever.asked > 5
    return folder


@pytest.mark.parametrize("illness", ["503", "reset", "cut", "refused"])
def test_a_retriever_that_returns_in_time_leaves_no_trace(illness, retriever, whole_remote, folder, monkeypatch, capsys):
    patient(monkeypatch, deadline_s=60)

    def fall_ill():
        if illness == "refused":  # the process is gone, and started again
            retriever.stop()
            threading.Timer(0.3, retriever.start).start()
        else:
            retriever.ill = [illness] * 4
    on_call(monkeypatch, search_r1, "rollout", REMOTE_STEP_2, fall_ill)
    asked = retriever.asked
    code, output = go(capsys, replace(REMOTE, corpus=retriever.url))
    assert code == 0, output
    assert not retriever.ill and retriever.asked > asked + 4
    assert_same_run(folder, whole_remote)  # not one observation is different


def test_a_retriever_that_stays_away_stops_the_run_and_a_resume_goes_on(retriever, whole_remote, folder, monkeypatch, capsys):
    config = replace(REMOTE, corpus=retriever.url)
    with monkeypatch.context() as m:
        patient(m, deadline_s=1)
        on_call(m, search_r1, "rollout", REMOTE_STEP_2, lambda: setattr(retriever, "ill", ["503"] * 10_000))
        started = time.monotonic()
        code, output = go(capsys, config)
    retriever.ill = []
    assert code == 2 and "Traceback" not in output and output.count("\nerror: ") == 1, output
    last = output.strip().splitlines()[-1]
    assert last.startswith(f"error: the retriever {retriever.url}/retrieve does not answer (HTTP 503; ")
    assert re.search(rf"; {folder} is saved at step [12]: the same command with --resume goes on$", last), last
    assert time.monotonic() - started < DEADLINE_S / 2
    patient(monkeypatch, deadline_s=60)
    assert_resumes(capsys, monkeypatch, folder, whole_remote, config)


def test_pauses_between_tries_are_bounded_by_a_longest_one_and_the_deadline(retriever, monkeypatch):
    now, pauses = [0.0], []
    monkeypatch.setattr("common.search.time.monotonic", lambda: now[0])
    monkeypatch.setattr("common.search.time.sleep", lambda s: (pauses.append(s), now.__setitem__(0, now[0] + s)))
    patience = RemoteRetriever("http://127.0.0.1:9")
    monkeypatch.setattr(patience, "_post", lambda body, end: (_ for _ in ()).throw(common.search._Transient("Connection refused")))
    with pytest.raises(UserError, match=r"does not answer \(Connection refused; \d+ tries in [78]\d\.\d s\)"):
        patience.search(["a"], 1)
    assert len(pauses) > 8 and max(pauses) < 15 and sum(pauses) < 90
    pauses.clear()
    now[0] += 1000
    with pytest.raises(UserError, match=r"does not answer \(Connection refused; 5 tries in"):  # at the start the address may be wrong
        patience.check()
    assert sum(pauses) < 12


# ---- tool processes ---------------------------------------------------------------------------------------------------
PROGRAMS = replace(torl.Config(), steps=2, prompts=2, samples=4, trajectory_tokens=128, eval_questions=2, eval_every=0, save_every=1, threads=1, lr=1e-3)


def sandboxed(config=PROGRAMS):
    try:
        open_sandbox("isolated", Limits(wall_s=1), workers=1).close()
    except UserError as error:
        pytest.skip(f"no isolation on this machine: {error}")
    return config


def test_a_sandbox_server_that_is_killed_stops_the_run_and_a_resume_goes_on(tmp_path_factory, tmp_path, monkeypatch, capsys):
    config, opened = sandboxed(), []
    whole = undisturbed(tmp_path_factory, config, torl)
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/torl/tiny-seed0")
    with monkeypatch.context() as m:
        m.setattr(torl, "open_sandbox", lambda *a: opened.append(open_sandbox(*a)) or opened[-1])
        in_rollout(m, 3, lambda: opened[0]._server.kill(), torl)  # evaluation, step 1, step 2
        code, output = go(capsys, config, torl)
    assert code == 2 and "Traceback" not in output and output.count("\nerror: ") == 1, output
    assert "error: the sandbox's server has ended" in output and re.search("is saved at step [12]: the same command with --resume goes on$", output.strip()), output
    opened[0].close()
    assert_resumes(capsys, monkeypatch, folder, whole, config, torl)


def test_a_sandbox_killed_while_a_program_runs_gives_no_outcome():
    sandboxed()
    with open_sandbox("isolated", Limits(wall_s=60), workers=2) as sandbox:
        outcomes, errors = [], []

        def ask():
            try:
                outcomes.extend(sandbox.run(["import time; time.sleep(50)"] * 2))
            except SandboxDown as error:
                errors.append(str(error))
        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(0.5)
        sandbox._server.kill()
        thread.join(60)
        assert not thread.is_alive() and not outcomes and "has ended" in errors[0]


def test_a_tool_that_leaves_its_thread_is_a_failure_and_not_a_wait_for_the_deadline():
    pool = ToolPool(workers=1)
    tool = Tool(lambda calls: sys.exit(3), deadline_s=60)
    started = time.monotonic()
    with pytest.raises(InfrastructureFailure, match="failed 3 times: SystemExit: 3"):
        pool.finish(pool.start(tool, [ToolCall("t", "", None)]))
    fine = pool.start(Tool(lambda calls: ["fine"]), [ToolCall("t", "", None)])
    assert fine.done.wait(30) and fine.results == ["fine"]  # the one worker is still there
    assert time.monotonic() - started < 30


# ---- the disk fills up ------------------------------------------------------------------------------------------------
def full(path: Path, kept: dict) -> None:
    """From now on every write to `path` fails with ENOSPC (the kernel's own: /dev/full), what stands in it is kept."""
    if path.exists():
        kept[path] = path.rename(path.with_name("kept"))
    path.symlink_to("/dev/full")


def small_files() -> None:
    """From now on no file of this process may grow beyond 1 MB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


DISK = {  # what fills up, and when; the file that is named; the reason; the step that stays
    "metrics": (lambda m, f, kept: on_call(m, search_r1, "rollout", STEP_2, lambda: full(f / "metrics.jsonl", kept)), "metrics.jsonl", 1),
    "trajectories": (lambda m, f, kept: on_call(m, search_r1, "rollout", STEP_2, lambda: full(f / "trajectories.jsonl", kept)), "trajectories.jsonl", 1),
    "checkpoint": (lambda m, f, kept: on_call(m, torch, "save", 2, small_files), "state.pt", 1),
    "summary": (lambda m, f, kept: on_call(m, search_r1, "rollout", EVAL_3, lambda: full(f / ".summary.json.part", kept)), "summary.json", 3),
    "model": (lambda m, f, kept: on_call(m, search_r1, "save_policy", 1, small_files), "model", 3),
    "report": (lambda m, f, kept: on_call(m, search_r1, "write_report", 1, lambda: full(f / ".report.html.part", kept)), "report.html", 3),
}


@pytest.mark.parametrize("what", DISK)
def test_a_disk_that_fills_up_is_said_in_one_sentence_and_a_resume_goes_on(what, whole, folder, monkeypatch, capsys):
    strike, name, stays = DISK[what]
    limits, kept = resource.getrlimit(resource.RLIMIT_FSIZE), {}
    try:
        with monkeypatch.context() as m:
            strike(m, folder, kept)
            code, output = go(capsys, replace(CONFIG, save_every=1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2 and "Traceback" not in output and output.count("\nerror: ") == 1, output
    last = output.strip().splitlines()[-1]
    assert name in last and ("No space left on device" in last or "File too large" in last)
    assert last.endswith(f"{folder} is saved at step {stays}: the same command with --resume goes on")
    for path, old in kept.items():  # room again
        path.unlink()
        old.rename(path)
    assert not [p for p in folder.rglob(".*")], "something half-written is left"
    assert_resumes(capsys, monkeypatch, folder, whole, replace(CONFIG, save_every=1))


def test_a_file_system_that_is_full_and_then_grows(whole, tmp_path):
    """The whole command on a small file system of its own: one checkpoint fits, two do not."""
    flags = [f"--{k.replace('_', '-')}={getattr(CONFIG, k)}" for k in ("steps", "prompts", "samples", "eval_questions", "eval_every", "threads", "warmup", "warmup_traces",
                                                                     "turn_tokens", "trajectory_tokens", "reward", "lr", "entropy")] + ["--save-every=1"]
    checkpoint = sum(p.stat().st_size for p in (whole / "checkpoint/step-3").iterdir())
    script = ('mount -t tmpfs -o size=$1 none . || exit 77; cd "$PWD"; shift; big=$1; shift\n'
              '"$@"; echo "exit $?"; ls -A runs/search_r1/tiny-seed0/checkpoint; mount -o remount,size=$big . && "$@" --resume; echo "exit $?"; cp -r runs ../out')
    command = [sys.executable, "-m", "methods.search_r1", *flags]
    (tmp_path / "small").mkdir()
    p = subprocess.run(["unshare", "-rm", "sh", "-c", script, "sh", str(int(1.5 * checkpoint)), str(10 * checkpoint), *command], cwd=tmp_path / "small", text=True,
                       env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}, capture_output=True, timeout=DEADLINE_S)
    if p.returncode == 77 or "unshare" in p.stderr:
        pytest.skip(f"no file system of our own on this machine: {p.stderr.strip()}")
    assert "exit 2\nstep-1\n" in p.stdout, p.stdout + p.stderr
    assert "No space left on device" in p.stderr and p.stderr.count("\nerror: ") == 1 and "Traceback" not in p.stderr
    assert p.stdout.strip().endswith("exit 0") and "after step 1" in p.stdout
    assert_same_run(tmp_path / "out/search_r1/tiny-seed0", whole)


# ---- a gradient that is not finite ------------------------------------------------------------------------------------
def spoil(monkeypatch, numbers) -> None:
    """NaN in one entry of the policy's gradient, in the optimiser steps with these numbers (the first three are the warm-up's)."""
    real, count = common.update.optimizer_step, itertools.count(1)

    def step(model, *args):
        if next(count) in numbers:
            next(model.parameters()).grad[0, 0] = torch.nan
        return real(model, *args)
    monkeypatch.setattr(common.update, "optimizer_step", step)


def test_a_nan_gradient_is_skipped_counted_and_its_batch_kept(folder, monkeypatch, capsys):
    spoil(monkeypatch, {3 + 2})
    code, output = go(capsys, replace(CONFIG, save_every=1, steps=2))
    assert code == 0 and "step 2: the gradient was not finite and changed nothing" in output, output
    train = [r for r in lines(folder) if r["kind"] == "train"]
    assert [r["skipped_steps"] for r in train] == [0, 1] and train[0]["grad_norm"] > 0 and train[1]["grad_norm"] is None
    one, two = (torch.load(folder / f"checkpoint/step-{n}/state.pt", weights_only=True) for n in (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one["model"].values(), two["model"].values()))
    for a, b in zip(one["optimizer"]["state"].values(), two["optimizer"]["state"].values()):
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    kept = torch.load(folder / "skipped/step-2.pt", weights_only=True)
    assert kept["step"] == 2 and kept["metrics"]["skipped_steps"] == 1 and len(kept["responses"]) == len(kept["rewards"]) == 8
    assert kept["ids_BT"].shape == kept["trained_BT"].shape == kept["advantages_BT"].shape and kept["trained_BT"].any()


def test_three_nan_gradients_in_a_row_stop_the_run_also_across_a_resume(folder, monkeypatch, capsys):
    with monkeypatch.context() as m:
        spoil(m, {3 + 1, 3 + 2})
        on_call(m, search_r1, "reward", 2 + 2 + 8 + 3, terminate)  # saved at step 2
        code, output = go(capsys, CONFIG)
    assert code == 130 and [r["skipped_steps"] for r in lines(folder) if r["kind"] == "train"] == [1, 1]
    spoil(monkeypatch, {1})
    code, output = go(capsys, replace(CONFIG, resume=True))
    assert code == 2 and "Traceback" not in output and output.count("\nerror: ") == 1, output
    assert f"the gradient was not finite in 3 steps in a row, up to step 3; the batches are in {folder}/skipped" in output
    assert sorted(p.name for p in (folder / "skipped").iterdir()) == ["step-1.pt", "step-2.pt", "step-3.pt"]


def state(model, optimizer) -> list[torch.Tensor]:
    return [t.detach().clone() for t in (*model.parameters(), *(v for s in optimizer.state.values() for v in s.values()))]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_skipped_policy_step_leaves_weights_and_optimiser_alone(bad):
    model, options = tiny_random_model(), {**OPTIONS, "lr": 1e-2, "aggregation": "token", "micro_tokens": 45}
    optimizer = make_optimizer(model.parameters(), 1e-2)
    assert policy_step(model, optimizer, experience(), range(6), **options)["skipped_steps"] == 0
    before = state(model, optimizer)
    out = policy_step(model, optimizer, experience(advantages=[1.0, -1.0, bad, 0.0, 0.5, 0.0]), range(6), **options)
    assert out["skipped_steps"] == 1 and all(torch.equal(a, b) for a, b in zip(before, state(model, optimizer)))
    out = policy_step(model, optimizer, experience(), range(6), **options)  # nothing of the bad gradient is left
    assert out["skipped_steps"] == 0 and 0 < out["grad_norm"] < float("inf")
    assert not all(torch.equal(a, b) for a, b in zip(before, state(model, optimizer)))


def test_a_skipped_critic_step_leaves_critic_and_optimiser_alone():
    x, critic = experience(), Critic(tiny_random_model())
    optimizer = make_optimizer(critic.parameters(), 1e-2)
    old = values(critic, x.ids_BT, x.lengths_B, micro_tokens=45)
    returns = torch.where(x.sampled_BT, (x.ids_BT % 2).float(), 0.0)
    step = lambda returns: critic_step(critic, optimizer, x, range(6), old, returns, x.sampled_BT, lr=1e-2, value_clip=None, micro_tokens=45, max_grad_norm=1.0)
    assert step(returns)["value_skipped_steps"] == 0
    before = state(critic, optimizer)
    assert step(returns.masked_fill(x.sampled_BT, torch.nan))["value_skipped_steps"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, state(critic, optimizer)))


def test_a_supervised_step_with_a_nan_gradient_stops():
    model = tiny_random_model()
    optimizer = make_optimizer(model.parameters(), 1e-2)
    with torch.no_grad():
        model.get_input_embeddings().weight[2] = torch.nan
    before = state(model, optimizer)
    with pytest.raises(UserError, match="the gradient of a supervised step is not finite"):
        supervised_step(model, optimizer, [([1, 2, 3, 4], [0, 1, 1, 1])], lr=1e-2, micro_tokens=20, max_grad_norm=1.0)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, state(model, optimizer)))


def test_skipped_steps_of_one_batch_are_added_up():
    assert joined([{"skipped_steps": 1, "value_skipped_steps": 0}, {"skipped_steps": 1, "value_skipped_steps": 1}]) == {"skipped_steps": 2, "value_skipped_steps": 1}
