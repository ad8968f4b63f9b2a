"""The planted bugs: every one still fits the code, is taken out again without a trace, and names tests that exist. `make exercises` runs the tests."""
import ast
import re
import subprocess

import pytest

from common import UserError
from common.run import METRICS
from tests import exercise as m

EXERCISES = m.read()
every_exercise = pytest.mark.parametrize("e", EXERCISES, ids=lambda e: str(e.number))


@pytest.fixture
def tree(tmp_path):
    """The files that exercises touch."""
    for file in {edit.file for e in EXERCISES for edit in e.edits}:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes((m.ROOT / file).read_bytes())
    return tmp_path


def contents(tree):
    return {p: p.read_bytes() for p in tree.rglob("*.py")}


def test_there_are_a_dozen():
    assert [e.number for e in EXERCISES] == list(range(1, len(EXERCISES) + 1)) and len(EXERCISES) >= 12


@every_exercise
def test_it_fits_the_code_and_leaves_no_trace(e, tree):
    clean = contents(tree)
    assert not m.is_planted(e, m.ROOT), "a bug is planted here: make exercises ARGS=undo"
    m.plant(e, tree)
    changed = {p: text for p, text in contents(tree).items() if text != clean[p]}
    assert len(changed) == len({edit.file for edit in e.edits}) and m.is_planted(e, tree)
    for path, text in changed.items():
        ast.parse(text, path)
    assert not any(m.is_planted(other, tree) for other in EXERCISES if other is not e)
    m.undo(e, tree)
    assert contents(tree) == clean


@every_exercise
def test_it_says_what_a_learner_needs_and_names_tests_that_exist(e):
    for test in e.tests:
        file, name = test.split("::")
        functions = {node.name for node in ast.parse((m.ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}
        assert name.split("[")[0] in functions, test
    assert e.reports and all(re.match(r"[\w.-]+/[\w.-]+(#\d+|,? )", report) for report in e.reports)
    assert min(map(len, (e.title, e.symptom, e.hint, e.solution))) > 20
    target = re.fullmatch(r'make (\w+)( ARGS="[^"]+")?', e.run)[1]
    assert (m.ROOT / "methods" / f"{target}.py").exists()
    metrics = {name.rstrip("*") for name in METRICS}
    for name in re.findall(r"`([a-z]\w+)", e.symptom):
        assert any(name.startswith(known) for known in metrics), name


# ---- a small repository, in which every outcome of the proof can be seen ------------------------------------------------
@pytest.fixture
def small(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "sums.py").write_text("def double(x):\n    return 2 * x\n\n\ndef idle():\n    return 1\n")
    (tmp_path / "tests/test_code.py").write_text(
        "import pytest\nimport sums as c\n\n\ndef test_double():\n    assert c.double(3) == 6\n\n\n@pytest.mark.parametrize('x', [0, 1])\n"
        "def test_each(x):\n    assert c.double(x) == x + x\n\n\ndef test_broken():\n    assert False\n")
    (tmp_path / "tests/conftest.py").write_text("import sys, pathlib\nsys.path.insert(0, str(pathlib.Path(__file__).parent.parent))\n")
    return tmp_path


def bug(number, old, new, *tests):
    return m.Exercise(number, "make it", "s", "h", f"bug {number}", "x", ("a/b#1",), tuple(f"tests/test_code.py::{t}" for t in tests), (m.Edit("sums.py", old, new),))


def test_the_proof_is_good_where_every_bug_is_caught(small, capsys):
    before = contents(small)
    assert m.prove([bug(1, "2 * x", "3 * x", "test_double", "test_each")], small)
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("pass") and second.endswith("caught by test_double, test_each")
    assert contents(small) == before  # all of it happened in copies


def test_the_proof_fails_where_one_is_not_caught_or_a_test_proves_nothing(small, capsys):
    assert not m.prove([bug(1, "2 * x", "3 * x", "test_double"), bug(2, "return 1", "return 7", "test_double"), bug(3, "2 * x", "2 * * x", "test_each"),
                        bug(4, "2 * x", "4 * x", "test_broken")], small)
    clean, caught, missed, never_ran, fails_anyway = capsys.readouterr().out.splitlines()
    assert clean.endswith("test_broken failed  <- WRONG")  # it fails without any bug
    assert caught.endswith("caught by test_double") and missed.endswith("test_double passed  <- WRONG")
    assert "test_each did not run: " in never_ran and never_ran.endswith("<- WRONG")


def test_a_text_that_has_moved_is_named(small):
    with pytest.raises(UserError, match=r"exercise 7 no longer fits: its text stands 0 times in sums.py.*exercises/07.toml"):
        m.plant(bug(7, "4 * x", "3 * x", "test_double"), small)
    with pytest.raises(UserError, match="stands 2 times"):
        m.plant(bug(7, "return", "yield", "test_double"), small)
    with pytest.raises(UserError, match="nofile.py: no such file"):
        m.plant(m.Exercise(1, "", "", "", "", "", (), (), (m.Edit("nofile.py", "a", "b"),)), small)


def test_a_learner_plants_one_without_being_told_which(small, capsys):
    one, two = bug(1, "2 * x", "3 * x", "test_double"), bug(2, "return 1", "return 7", "test_double")
    both, clean = [one, two], contents(small)
    m.command(["apply"], both, small)
    said = capsys.readouterr().out
    assert "bug 1" not in said and "bug 2" not in said and "make it" in said
    (planted,) = [e for e in both if m.is_planted(e, small)]
    with pytest.raises(UserError, match="already"):
        m.command(["apply", "1"], both, small)
    with pytest.raises(UserError, match="take it out first"):
        m.prove(both, small)
    m.command(["hint"], both, small)
    assert planted.title not in capsys.readouterr().out
    m.command(["solution"], both, small)
    assert planted.title in capsys.readouterr().out
    m.command(["undo"], both, small)
    assert contents(small) == clean
    m.command(["hint"], both, small)
    assert "No planted bug" in capsys.readouterr().out.splitlines()[-1]
    for words in (["aply"], ["apply", "3"], ["apply", "x"]):
        with pytest.raises(UserError, match="numbers from 1 to 2"):
            m.command(words, both, small)


def test_a_file_that_is_no_exercise_is_named(tmp_path):
    (tmp_path / "01.toml").write_text("title = 'x'\n")
    with pytest.raises(UserError, match="01.toml is not an exercise"):
        m.read(tmp_path)


def test_the_command_ends_in_one_sentence():
    done = subprocess.run([m.sys.executable, "-m", "tests.exercise", "aply"], cwd=m.ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("error: 'aply'") and "Traceback" not in done.stderr
