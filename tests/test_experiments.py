"""Many runs, with a method that does nothing but write what a run writes; and one real run of a fork."""
import difflib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import methods
from common import UserError, claims, experiments as x
from common.run import Interrupted
from tests import test_methods

REPO = Path(__file__).resolve().parents[1]
FAKE = '''
import json, os, signal, sys, time
from pathlib import Path
if __name__ != "__main__":
    from dataclasses import dataclass
    from common.run import setting
    @dataclass(frozen=True)
    class Config:
        preset: str = setting("tiny", "p", "ours")
        name: str = setting("", "n", "ours")
        seed: int = setting(0, "s", "ours")
        threads: int = setting(0, "t", "ours")
        model: str = setting("tiny", "m", "ours")
        steps: int = setting(3, "s", "ours")
        eval_every: int = setting(1, "e", "ours")
        level: float = setting(0.5, "l", "ours")
        hurdle: bool = setting(True, "h", "ours")
        wait: float = setting(0.0, "w", "ours")
        resume: bool = setting(False, "r", "ours")
    PRESETS = {"tiny": {}}
else:
    words = dict(zip(sys.argv, sys.argv[1:] + [""]))
    get = lambda flag, default: type(default)(words.get(flag, default))
    seed, steps, level, wait = get("--seed", 0), get("--steps", 3), get("--level", 0.5), get("--wait", 0.0)
    folder = Path("runs/fake") / words["--name"]
    model = get("--model", "tiny")
    if model != "tiny" and not (Path(model) / "weights").exists():
        print("no model in", model); sys.exit(2)
    if get("--level", 0.5) < 0:
        print("level must be positive"); sys.exit(2)
    (folder / "checkpoint").mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    done = int((folder / "checkpoint/step").read_text()) if "--resume" in sys.argv else 0
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    def log(kind, step, **values):
        with open(folder / "metrics.jsonl", "a") as f:
            f.write(json.dumps({"kind": kind, "step": step, "wall_s": 1.0 * step, **values}) + "\\n")
    if not done:
        (folder / "metrics.jsonl").unlink(missing_ok=True)
        log("eval", 0, em=0.1, calls=1.0)
    for step in range(done + 1, steps + 1):
        time.sleep(wait)
        log("train", step, reward=level * step, calls=2.0, sampled_tokens=1000, response_tokens=100.0, resumed="--resume" in sys.argv)
        log("eval", step, em=min(1.0, level + 0.01 * seed + 0.001 * step), calls=2.0)
        (folder / "checkpoint/step").write_text(str(step))
        if asked:
            print("saved"); sys.exit(130)
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model/weights").write_text(str(os.environ["OMP_NUM_THREADS"]))
    (folder / "summary.json").write_text(json.dumps({"metric": "em", "before": 0.1, "after": level + 0.01 * seed, "calls_before": 1.0, "calls_after": 2.0, "wall_s": 60.0}))
'''


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with one more method, `fake`, in which runs can be made."""
    (tmp_path / "methods").mkdir()
    (tmp_path / "methods/__init__.py").write_text("")
    (tmp_path / "methods/fake.py").write_text(FAKE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS")  # of the tests; runs are to be told their own
    monkeypatch.setattr(methods, "__path__", [str(tmp_path / "methods"), *methods.__path__])
    x._settings.cache_clear()
    yield tmp_path
    for name in ("fake", "my_idea"):
        sys.modules.pop(f"methods.{name}", None)
    x._settings.cache_clear()


def train_rows(job):
    return x.read_rows(job.folder)["train"]


# ---- many runs --------------------------------------------------------------------------------------------------------
def test_runs_are_made_once_and_again_when_something_else_is_asked(here, capsys, monkeypatch):
    jobs = [x.Job("fake", f"a-seed{s}", s, {"level": 0.5}) for s in range(3)]
    assert x.run_all(jobs, workers=2) == [] and [x.state(j) for j in jobs] == ["done"] * 3
    assert "3 runs, 0 of them done before" in capsys.readouterr().out
    assert [x.read_rows(j.folder)["eval"][3]["em"] for j in jobs] == pytest.approx([0.503, 0.513, 0.523])
    assert not (jobs[0].folder / "checkpoint").exists() and (jobs[0].folder / "model/weights").read_text() == "1"  # one thread each
    when = [(j.folder / "summary.json").stat().st_mtime_ns for j in jobs]
    assert x.run_all(jobs, workers=2) == [] and "3 runs, 3 of them done before" in capsys.readouterr().out
    assert when == [(j.folder / "summary.json").stat().st_mtime_ns for j in jobs]
    other = x.Job("fake", "a-seed0", 0, {"level": 0.7})
    assert x.state(other) == "new" and x.run_all([other], keep_models=False) == []
    assert x.read_rows(other.folder)["eval"][3]["em"] == pytest.approx(0.703) and x.state(jobs[0]) == "new" and not (other.folder / "model").exists()
    monkeypatch.setattr(x, "base_model", lambda model: "rebuilt")  # the same settings on another base model
    assert x.state(other) == "new"


def test_a_run_waits_for_the_one_it_needs(here):
    first = x.Job("fake", "start-seed1", 1, {"steps": 1})
    second = x.Job("fake", "b-seed1", 1, {"model": "{needs}/model"}, needs=first)
    assert second.argv()[-2:] == ["--model", "runs/fake/start-seed1/model"]
    assert x.run_all([second], workers=4, keep_models=False) == []  # the needed run is added, goes first, and keeps its model
    assert x.state(second) == "done" and (first.folder / "model/weights").exists()
    longer = x.Job("fake", "start-seed1", 1, {"steps": 2})
    assert x.state(x.Job("fake", "b-seed1", 1, {"model": "{needs}/model"}, needs=longer)) == "new"  # another start: another run


def test_a_failed_run_is_said_and_the_others_go_on(here, capsys):
    bad, good = x.Job("fake", "bad", 0, {"level": -1.0}), x.Job("fake", "good", 0)
    failed = x.run_all([bad, x.Job("fake", "after", 0, needs=bad), good], workers=1)
    assert failed == ["runs/fake/bad: exit code 2; it said: level must be positive", "runs/fake/after: not run, since runs/fake/bad failed"]
    assert x.state(good) == "done" and x.state(bad) == "new"
    with pytest.raises(UserError, match="2 runs failed, and are missing above: runs/fake/bad: exit code 2"):
        x.tell(failed)
    with pytest.raises(SystemExit):  # a flag that the method does not have is found before anything is run
        x.run_all([x.Job("fake", "c", 0, {"levle": 1.0})], fresh=True)
    assert not Path("runs/fake/c").exists()


def test_a_stopped_run_goes_on(here, capsys):
    job = x.Job("fake", "slow", 0, {"steps": 8, "wait": 0.25})

    def stop_after_two_steps():
        while not (job.folder / "checkpoint/step").exists() or (job.folder / "checkpoint/step").read_text() < "2":
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_after_two_steps, daemon=True).start()
    with pytest.raises(Interrupted, match="the same command goes on"):
        x.run_all([job])
    assert x.state(job) == "started" and 2 <= len(train_rows(job)) < 8
    before = dict(train_rows(job))
    assert x.run_all([job]) == [] and x.state(job) == "done"
    after = train_rows(job)
    assert list(after) == list(range(1, 9)) and {k: after[k] for k in before} == before  # no step was made again
    assert not after[len(before)]["resumed"] and after[8]["resumed"]
    assert x.run_all([job], fresh=True) == [] and not train_rows(job)[8]["resumed"]


def test_a_run_that_takes_too_long_is_stopped_and_keeps_its_checkpoint(here):
    job = x.Job("fake", "slow", 0, {"steps": 100, "wait": 0.2})
    failed, = x.run_all([job], longest_s=3.0)
    assert failed == "runs/fake/slow: longer than 3 s; exit code 130; it said: saved" and x.state(job) == "started"


def test_a_run_is_not_started_twice(here):
    job = x.Job("fake", "slow", 0, {"steps": 100, "wait": 0.2})
    process, _ = x.start(job)
    try:
        with pytest.raises(UserError, match="runs/fake/slow is being run by another program"):
            x.run_all([job])
    finally:
        x.stop([process])
    assert process.poll() is not None


# ---- numbers ----------------------------------------------------------------------------------------------------------
def test_intervals():
    assert [x.t_quantile(v) for v in (1, 4, 9)] == [12.706, 2.776, 2.262]
    assert x.t_quantile(11) == pytest.approx(2.201, abs=0.003) and x.t_quantile(30) == pytest.approx(2.042, abs=0.001) and x.t_quantile(10**6) == pytest.approx(1.960, abs=1e-3)
    mean, low, high = x.t_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert mean == 3 and high - mean == pytest.approx(2.776 * statistics.stdev([1, 2, 3, 4, 5]) / 5**0.5) == pytest.approx(mean - low)
    assert x.t_interval([2.0]) == (2.0, float("-inf"), float("inf")) and x.t_interval([2.0, 2.0]) == (2.0, 2.0, 2.0)
    assert x.said([0.5]) == "0.500 (one seed)" and x.said([1.0, 1.0], 1) == "1.0 (1.0 to 1.0)"


def test_what_was_spent():
    train = {s: {"kind": "train", "step": s, "sampled_tokens": 1000, "response_tokens": 50.0, "calls": 1.5} for s in (1, 2)}
    rows = {"train": train, "eval": {s: {"em": e} for s, e in ((0, 0.1), (1, 0.2), (2, 0.6))}}
    assert x.spent(rows, "tokens") == {0: 0, 1: 1000, 2: 2000} and x.spent(rows, "calls") == {0: 0, 1: 30, 2: 60}
    assert x.against(rows, "em", "tokens") == [(0, 0.1), (1000, 0.2), (2000, 0.6)]
    items = {"items": {0: {"kind": "items", "sampled_tokens": 500, "n": 10, "calls": 2.0}}}  # SWiRL: made once, before; no tool runs in training
    offline = {"train": {s: {**row, "calls": 0.0} for s, row in train.items()}, "eval": rows["eval"], **items}
    assert x.spent(offline, "tokens") == {0: 0, 1: 1500, 2: 2500} and x.against(offline, "em", "calls") == [(0, 0.1), (20, 0.6)]
    assert x.against(offline, "em", "tokens")[:2] == [(0, 0.1), (500, 0.1)]  # nothing is learned while trajectories are made
    points = [(0.0, 0.0), (10.0, 1.0), (20.0, 0.0)]
    assert [x.at(points, v) for v in (-1, 0, 5, 10, 12.5, 20, 30)] == [0, 0, 0.5, 1, 0.75, 0, 0]


def test_intervals_are_drawn_where_they_are():
    drawn = x.bars([("a <b>", [0.0, 1.0], "text")])
    low, high = x.t_interval([0.0, 1.0])[1:]
    place = lambda v: 100 * (v - low + 0.06 * (high - low)) / (1.12 * (high - low))  # an axis from end to end, and 6 % beyond
    assert f'<circle cx="{place(0.5):.2f}%"' in drawn and f'<line x1="{place(low):.2f}%" x2="{place(high):.2f}%"' in drawn
    assert drawn.count('class="seed"') == 2 and "a &lt;b&gt;" in drawn and "region" not in drawn
    shaded = x.bars([("d", [1.0, 2.0], "")], (0.0, float("inf")))
    assert 'class="region"' in shaded and 'class="zero"' in shaded


def test_flags():
    assert x.flags_of({"max_turns": 2, "browse": False, "resume": True, "kl": 0.1}) == ["--max-turns", "2", "--no-browse", "--resume", "--kl", "0.1"]
    read = lambda *words: x.parse(x.argparse.ArgumentParser(allow_abbrev=False), words)
    known, flags, how = read("--seeds", "2", "--max-turns", "2", "--no-browse", "--data=a-b.jsonl", "--kl", "-0.1", "--seed-of-it", "7")
    assert known.seeds == 2 and flags == {"max_turns": "2", "browse": False, "data": "a-b.jsonl", "kl": "-0.1", "seed_of_it": "7"}
    assert how == {"workers": 0, "fresh": False, "longest_s": 3600}
    for words, message in ((("--seeds", "0"), "at least one seed"), (("20", "--steps"), "20: not understood")):
        with pytest.raises(UserError, match=message):
            read(*words)


# ---- sweep and compare ------------------------------------------------------------------------------------------------
def test_a_sweep_makes_a_table_and_a_page(here, capsys):
    x.command(["sweep", "fake", "level", "0.2,0.6", "--seeds", "2", "--jobs", "2", "--steps", "2"])
    text = Path("runs/sweep/fake-level.md").read_text()
    assert "| level | seeds | em before | em after | calls after | minutes a run |" in text
    assert "| 0.2 | 2 | 0.100 (0.100 to 0.100) | 0.205 (0.141 to 0.269) | 2.00 (2.00 to 2.00) | 1.0 |" in text and "--steps 2" in text
    page = Path("runs/sweep/fake-level.html").read_text()
    assert "level = 0.6" in page and page.count("data:image/svg+xml") == 1 and "<script" not in page and "http" not in page.split("</head>")[1]
    assert sorted(p.name for p in Path("runs/fake").iterdir() if p.is_dir()) == [f"sweep-level-{v}-seed{s}" for v in ("0.2", "0.6") for s in (0, 1)]
    x.command(["sweep", "fake", "hurdle", "true,false", "--seeds", "1"])
    assert "| false | 1 | 0.100 (one seed)" in Path("runs/sweep/fake-hurdle.md").read_text()


@pytest.mark.parametrize("words,message", [
    (["sweep", "torll", "max_turns", "0,1"], r"there is no methods/torll.py; did you mean torl\?"),
    (["sweep", "fake", "levels", "0,1"], r"FLAG=levels: methods/fake.py has no such setting; did you mean level\?"),
    (["sweep", "fake", "hurdle", "0,1"], r"--hurdle is a switch; its values are true and false"),
    (["sweep", "fake", "level", "1,1"], r"VALUES=1,1: give every value once"),
    (["compare", "everything"], r"TASK=everything: choose one of search, code, tools, all"),
    (["swepe"], r"give one of fork, sweep, compare"),
])
def test_what_cannot_be_run_is_said(here, words, message):
    Path("methods/torl.py").write_text("")
    with pytest.raises(UserError, match=message):
        x.command(words)
    assert not Path("runs").exists()


def test_a_comparison_makes_a_page_of_every_family(here, monkeypatch):
    monkeypatch.setattr(x, "FAMILIES", {"search": ("em", {"fake": {"steps": 2}}), "code": ("em", {"fake": {"level": 0.3}})})
    x.command(["compare", "all", "--seeds", "1"])
    text, page = (Path(f"runs/compare/all.{kind}").read_text() for kind in ("md", "html"))
    assert text.count("| fake | 1 | 0 | 0.100 | 0.") == 2 and "<h2>search</h2>" in page and "<h2>code</h2>" in page
    assert x.state(x.Job("fake", "compare-code-seed0", 0, {"eval_every": 5, "level": 0.3})) == "done"
    with pytest.raises(UserError, match="1 runs failed"):
        x.command(["compare", "code", "--seeds", "1", "--level", "-1"])


def test_the_table_of_a_comparison(here, monkeypatch):
    monkeypatch.setattr(x, "FAMILIES", {"search": ("em", {"fake": {}})})
    jobs = {name: [x.Job("fake", f"{name}-seed{s}", s, {"steps": steps, "level": level}) for s in (0, 1)] for name, steps, level in (("thrifty", 4, 0.2), ("lavish", 8, 0.6))}
    assert x.run_all([j for own in jobs.values() for j in own], workers=2) == []
    body, text = x.compared("search", jobs, 0)  # 1,000 tokens and 20 calls a step: the thrifty ends at 4,000, the other is read there
    assert "| thrifty | 2 | 0 | 0.100 | 0.206 | 0.207 | 0.209 (0.145 to 0.273) | 80 |" in text and "at 4 k" in text
    row = next(line for line in text.split("\n") if line.startswith("| lavish"))
    assert "0.609 (0.545 to 0.673)" in row and "| 80 |" in row and row.count("|") == 11  # em at step 4 of 8: 0.604 and 0.614
    assert body.count("data:image/svg+xml") == 2 and "ended at" not in text
    assert "0.209 (0.145 to 0.273) (ended at 4 k)" in x.compared("search", jobs, 6000)[1]


def test_families_name_methods_and_settings_that_exist():
    for metric, own in x.FAMILIES.values():
        assert metric in ("em", "accuracy")
        for method, flags in own.items():
            assert x.settings_of(x.Job(method, "n", 0, {"eval_every": 5, **flags}))["eval_every"] == 5
    assert {m for _, own in x.FAMILIES.values() for m in own} == set(claims.ARMS)  # all ten


def test_every_search_method_answers_the_same_held_out_questions_and_logs_em():
    """What `compare TASK=search` rests on; a method whose evaluation has other questions would be compared on another task."""
    from importlib import import_module
    held_out = {}
    for method, flags in x.FAMILIES["search"][1].items():
        module = import_module(f"methods.{method}")
        cfg = module.Config(**{k: v for k, v in flags.items()})
        found = module.load_data(cfg, ["search"])[1]["search"] if method == "swirl" else module.load_data(cfg)[-1]
        held_out[method] = [(e.question, e.answers) for e in found]
    assert len(held_out["search_r1"]) == 200 and all(rows == held_out["search_r1"] for rows in held_out.values())


# ---- fork -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("source", sorted(p.stem for p in test_methods.FILES))
def test_a_fork_differs_in_its_name_only(source, tmp_path):
    (tmp_path / f"{source}.py").write_text((REPO / f"methods/{source}.py").read_text())
    target = x.fork(source, "my_idea", tmp_path)
    a, b = (tmp_path / f"{source}.py").read_text().split("\n"), target.read_text().split("\n")
    changed = [line for line in difflib.unified_diff(a, b, lineterm="", n=0) if line[0] in "+-" and line[:3] not in ("+++", "---")]
    added = [line[1:] for line in changed if line[0] == "+"]
    assert b[0] == f'"""my_idea: a fork of {source}. Say here what it changes, and why.' and b[1:3] == ["", a[0].removeprefix('"""')]
    assert sum('method="my_idea"' in line for line in added) == 1 and f'method="{source}"' not in target.read_text()
    assert all("my_idea" in line for line in added if line and line != b[2]) and len(changed) < 40
    compile(target.read_text(), str(target), "exec")
    test_methods.test_six_parts_in_the_same_order(target)
    test_methods.test_a_method_stands_alone(target)


@pytest.mark.parametrize("source,name,message", [
    ("torl", "torl", r"NAME=torl: .*torl.py is there already, and stays as it is"),
    ("torl", "My Idea", r"NAME=My Idea: a method's name has lower-case letters"),
    ("torl", "../idea", r"a method's name has"), ("torl", "class", r"is no word of Python"), ("torl", "", r"a method's name has"),
    ("trol", "my_idea", r"FROM=trol: there is no .*trol.py; did you mean torl\?"), ("", "my_idea", r"FROM=: there is no"),
    ("../torl", "my_idea", r"FROM=../torl: there is no"), ("none", "my_idea", r"has no Run\(..., method=\"none\""),
])
def test_a_fork_that_cannot_be_is_refused(source, name, message, tmp_path):
    (tmp_path / "torl.py").write_text('"""ToRL: t.\n"""\nRun(method="torl")\n')
    (tmp_path / "none.py").write_text('"""N: n.\n"""\n')
    with pytest.raises(UserError, match=message):
        x.fork(source, name, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["none.py", "torl.py"] and "ToRL" in (tmp_path / "torl.py").read_text()


def test_a_fork_is_swept_in_a_real_run(here):
    """End to end: fork, a run of one step on the tiny model, its table and page."""
    (here / "methods/tool_n1.py").write_text((REPO / "methods/tool_n1.py").read_text())
    x.command(["fork", "tool_n1", "my_idea"])
    x.command(["sweep", "my_idea", "reward", "partial", "--seeds", "1", *x.flags_of(test_methods.small(x.config_of("my_idea")[0]))])
    job = x.Job("my_idea", "sweep-reward-partial-seed0", 0)
    saved = json.loads((job.folder / "config.json").read_text())
    assert saved["method"] == "my_idea" and saved["fields"]["reward"]["value"] == "partial" and saved["threads"] == 1
    rows = x.read_rows(job.folder)
    assert set(rows["eval"]) == {0, 1} and x.spent(rows, "tokens")[1] == rows["train"][1]["sampled_tokens"] > 0
    assert rows["train"][1]["sampled_tokens"] == pytest.approx(4 * rows["train"][1]["response_tokens"])  # 2 prompts, 2 samples
    assert "| partial | 1 | " in Path("runs/sweep/my_idea-reward.md").read_text()


def test_make_targets_say_what_is_missing(here):
    make = lambda *words: subprocess.run(["make", "-s", "-C", str(REPO), f"V={sys.executable}", "-o", "setup", *words], capture_output=True, text=True, timeout=120)
    done = make("run", "METHOD=none")
    assert done.returncode == 2 and "there is no methods/none.py; name a method" in done.stderr
