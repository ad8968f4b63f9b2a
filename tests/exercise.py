"""Planted bugs to find, and the proof that the tests find every one. `tests/exercises/NN.toml` holds one bug each, drawn from a real report.

    python -m tests.exercise                plant each in a copy of the repository: its tests pass there before and must fail after
    python -m tests.exercise apply [3]      plant number 3, or any, here, and do not say what it is
    python -m tests.exercise hint           of the planted bug: what the curves show, and where to look
    python -m tests.exercise solution       of the planted bug: what it is, who met it, which test finds it
    python -m tests.exercise undo           take it out again

A bug is one or more pairs of texts (file, old, new), and not a diff: lines around it may change, as long as `old` stands in its file exactly once.
"""
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from common import UserError

ROOT = Path(__file__).parent.parent
FOLDER = Path(__file__).parent / "exercises"
TIMEOUT_S = 300  # for the tests of one exercise


@dataclass(frozen=True)
class Edit:
    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Exercise:
    number: int
    run: str  # command whose curves show it
    symptom: str  # what they show
    hint: str
    title: str
    solution: str
    reports: tuple[str, ...]  # owner/repository#number: what
    tests: tuple[str, ...]  # pytest ids; every one must fail
    edits: tuple[Edit, ...]


def read(folder: Path = FOLDER) -> list[Exercise]:
    """All exercises, by number. UserError for a file that is not one."""
    out = []
    for path in sorted(folder.glob("*.toml")):
        try:
            fields = tomllib.loads(path.read_text(encoding="utf-8"))
            edits = tuple(Edit(**edit) for edit in fields.pop("edit"))
            lists = {name: tuple(fields.pop(name)) for name in ("reports", "tests")}
            out.append(Exercise(number=int(path.stem), edits=edits, **lists, **{k: " ".join(v.split()) for k, v in fields.items()}))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{path} is not an exercise: {error}") from None
    return out


def plant(exercise: Exercise, root: Path) -> None:
    """Replace every `old` by its `new` under `root`. UserError, before anything is written, if one does not stand there exactly once."""
    _replace(exercise, root, [(e.file, e.old, e.new) for e in exercise.edits])


def undo(exercise: Exercise, root: Path) -> None:
    """The reverse of `plant`."""
    _replace(exercise, root, [(e.file, e.new, e.old) for e in exercise.edits])


def is_planted(exercise: Exercise, root: Path) -> bool:
    """Whether every `new` stands in its file: what is left when a learner has mended a part is no longer this bug."""
    return all(e.new in _text(root / e.file) for e in exercise.edits)


def _replace(exercise: Exercise, root: Path, triples: Sequence[tuple[str, str, str]]) -> None:
    texts = {file: _text(root / file) for file, _, _ in triples}
    for file, before, after in triples:
        if (n := texts[file].count(before)) != 1:
            raise UserError(f"exercise {exercise.number} no longer fits: its text stands {n} times in {file}, not once; bring "
                            f"tests/exercises/{exercise.number:02d}.toml up to date with:\n{before}")
        texts[file] = texts[file].replace(before, after)
    for file, text in texts.items():
        (root / file).write_text(text, encoding="utf-8")


def _text(path: Path) -> str:
    if not path.is_file():
        raise UserError(f"{path}: no such file; an exercise names it")
    return path.read_text(encoding="utf-8")


# ---- the proof --------------------------------------------------------------------------------------------------------
def prove(exercises: Sequence[Exercise], root: Path = ROOT) -> bool:
    """Print a table of the exercises; True if the named tests pass without any bug, and every one fails with its own."""
    if any(is_planted(e, root) for e in exercises):
        raise UserError("a bug is planted here: take it out first (make exercises ARGS=undo)")
    jobs = [None, *exercises]  # first: every named test, without a bug
    named = list(dict.fromkeys(test for e in exercises for test in e.tests))
    good = True
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for exercise, (seconds, verdicts) in zip(jobs, pool.map(lambda e: _try(e, e.tests if e else named, root), jobs)):
            want = "passed" if exercise is None else "failed"
            wrong = [f"{test.split('::')[-1]} {verdict}" for test, verdict in verdicts.items() if verdict != want]
            title = f"{exercise.number:2}  {exercise.title}" if exercise else "    no bug: all named tests"
            print(f"{title:58.58} {seconds:5.0f} s  " + ("; ".join(wrong) + "  <- WRONG" if wrong else "pass" if exercise is None else
                                                         "caught by " + ", ".join(test.split("::")[-1] for test in exercise.tests)), flush=True)
            good = good and not wrong
    return good


def _try(exercise: Exercise | None, tests: Sequence[str], root: Path) -> tuple[float, dict[str, str]]:
    """Seconds, and test -> passed, failed, or what else happened, in a copy of the repository with the bug planted."""
    with tempfile.TemporaryDirectory(prefix="exercise-") as folder:
        copy, report = Path(folder) / "copy", Path(folder) / "report.xml"
        shutil.copytree(root, copy, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__"))
        if exercise:
            plant(exercise, copy)
        started = time.monotonic()
        try:
            done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests], cwd=copy, timeout=TIMEOUT_S,
                                  env={**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        except subprocess.TimeoutExpired:
            return TIMEOUT_S, dict.fromkeys(tests, f"not over after {TIMEOUT_S} s")
        cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
        found = [(f"{case.get('classname')}::{case.get('name')}", {child.tag for child in case}) for case in cases]
        verdicts = {}
        for test in tests:
            name = test.replace(".py::", "::").replace("/", ".")
            mine = [tags for case, tags in found if case == name or case.startswith(name + "[")]
            verdicts[test] = ("did not run: " + " ".join((done.stdout + done.stderr).split())[-300:] if not mine else "failed" if any("failure" in tags for tags in mine) else
                              "passed" if not any(mine) else "raised an error outside the test, or was skipped")
        return time.monotonic() - started, verdicts


# ---- the learner ------------------------------------------------------------------------------------------------------
def command(words: Sequence[str], exercises: Sequence[Exercise], root: Path = ROOT) -> None:
    """One of the commands in the module's text. UserError for what is none."""
    what, numbers = (words[0] if words else "check"), words[1:]
    known = {str(e.number): e for e in exercises}
    if what not in ("check", "apply", "hint", "solution", "undo") or any(n not in known for n in numbers):
        raise UserError(f"'{' '.join(words)}': give check, apply, hint, solution or undo, and numbers from 1 to {len(exercises)}")
    chosen = [known[n] for n in numbers]
    if what == "check":
        if not prove(chosen or exercises, root):
            sys.exit(1)
        return
    planted = [e for e in exercises if is_planted(e, root)]
    if what == "apply":
        if planted:
            raise UserError("a bug is planted already: find it, or take it out (make exercises ARGS=undo)")
        exercise = chosen[0] if chosen else random.choice(list(exercises))
        plant(exercise, root)
        print(f"One bug is planted. Run:  {exercise.run}\nand the same without it, in another folder; compare the curves of the two reports, then read the code.\n"
              "make exercises ARGS=hint says more, ARGS=solution everything, ARGS=undo takes it out. (git diff would show it.)")
    elif not planted:
        print("No planted bug is here: none was applied, or you have mended it.")
    for e in planted if what != "apply" else ():
        if what == "hint":
            print(f"The curves of {e.run}: {e.symptom}\nWhere to look: {e.hint}")
        elif what == "solution":
            print(f"{e.title}. {e.solution}\nMet in: {'; '.join(e.reports)}\nFound by: {', '.join(e.tests)}\nChanged: {', '.join(dict.fromkeys(x.file for x in e.edits))}")
        else:
            undo(e, root)
            print("The bug is taken out.")


if __name__ == "__main__":
    try:
        command(sys.argv[1:], read())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
