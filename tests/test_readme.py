"""What README and docstrings name is there: make targets, methods, flags and their values, metrics, files, modules."""
import functools
import importlib
import importlib.util
import re
import shlex
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from common.run import METRICS, parse_config

README = Path("README.md").read_text()
EXAMPLES = {"my_idea"}  # the README's name for a method that a reader will write
METHODS = sorted(p.stem for p in Path("methods").glob("*.py") if p.stem != "__init__")
MAKEFILE = Path("Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z_0-9]+):", MAKEFILE, re.M))
SOURCES = {p: p.read_text() for folder in ("common", "methods", "tests") for p in Path(folder).rglob("*.py") if p.name not in ("test_readme.py", "test_provenance.py")}
SOURCE = "\n".join([*SOURCES.values(), MAKEFILE, Path("requirements.txt").read_text(), Path(".gitignore").read_text()])
WORDS = set(re.findall(r"\w+", SOURCE))
FLAGS = set(re.findall(r"--[a-z][a-z0-9_-]+", "\n".join(t for p, t in SOURCES.items() if p.parts[0] == "common" or "bench" in p.name or "check" in p.name)))


@functools.cache
def method(name):
    m = importlib.import_module(f"methods.{name}")
    fields = {f.replace("_", "-") for f in m.Config.__dataclass_fields__}
    return m, {f"--{f}" for f in fields} | {f"--no-{f}" for f in fields}


@functools.cache
def torchrun_help() -> str:
    from torch.distributed.run import get_args_parser
    return get_args_parser().format_help()


def is_metric(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in METRICS) or name in METRICS


def spans(text: str) -> list[str]:
    """What stands in backticks, and the lines of fenced blocks; a span may go on over a line's end."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return [" ".join(x.split()) for x in re.findall(r"`([^`]+)`", rest)] + [line.split("  #")[0] for block in fenced for line in block.splitlines()]


def wrong_commands(text: str) -> list[str]:
    """Commands that could not be given: unknown target, method, module, variable, flag or value."""
    out, own = [], set()
    for target, variables in re.findall(r"\bmake ([a-z_0-9]+)((?: +[A-Z]+=(?:\"[^\"]*\"|\S+))*)", text):
        if target not in TARGETS:
            out.append(f"make {target}: no such target")
            continue
        given = dict(word.split("=", 1) for word in shlex.split(variables))
        out += [f"make {target}: the Makefile does not know {v}" for v in given if not re.search(rf"\$\({v}\b", MAKEFILE)]
        if target in METHODS and "ARGS" in given:
            m, flags = method(target)
            words = [re.sub(r"^N$", "1", w) for w in shlex.split(given["ARGS"])]
            own |= set(words)
            out += [f"make {target}: it has no flag {w}" for w in words if w.startswith("--") and w.split("=")[0] not in flags | {"--help"}]
            if "--help" not in words and not out:
                try:
                    parse_config(m.Config, m.PRESETS, words)
                except SystemExit:
                    out.append(f"make {target} ARGS={given['ARGS']!r}: refused")
        if target == "diff":
            out += [f"make diff: there is no method {given[v]}" for v in ("A", "B") if given.get(v) not in METHODS]
    for name in re.findall(r"python -m ([\w.]+)", text):
        if name.split(".")[0] in ("methods", "common", "tests") and name.split(".")[-1] not in EXAMPLES and not importlib.util.find_spec(name):
            out.append(f"python -m {name}: no such module")
    every = FLAGS.union(*(method(name)[1] for name in METHODS))
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]+", text)) - every - own - {"--help"}
    return out + [f"{flag}: no method and no command has this flag" for flag in sorted(flags) if flag not in torchrun_help()]


def wrong_names(span: str) -> list[str]:
    """A single word in backticks that is no file, target, method, setting, metric or name in the sources."""
    if "/" in span and re.fullmatch(r"[\w./*-]+", span) or re.fullmatch(r"[\w-]+\.(py|md|svg|html|jsonl?|parquet|txt)", span):
        if span.startswith(("runs/", "/")) or Path(span).stem in EXAMPLES or any(list(Path(folder).glob(span)) for folder in (".", "common", "tests", "docs")):
            return []
        ours = span.startswith(("methods/", "common/", "tests/", "docs/")) or span.endswith(".py")  # others are what a command writes, or a reader brings
        return [f"{span}: no such file"] if ours or not all(word in WORDS for word in re.findall(r"\w+", span)) else []
    if re.fullmatch(r"[A-Za-z_][\w.*]*", span):
        known = is_metric(span) or span in TARGETS or all(part in WORDS for part in re.findall(r"\w+", span))
        return [] if known else [f"{span}: neither a metric nor anything else in the sources"]
    return []


def problems(text: str) -> list[str]:
    found = [f"{link}: no such file" for link in re.findall(r"\]\(([^)#:]+)\)", text) if not Path(link).exists()]
    return found + [x for span in spans(text) for x in wrong_commands(span) + wrong_names(span)]


def test_everything_named_in_the_readme_is_there():
    assert not problems(README), "\n".join(problems(README))


def test_the_readme_names_every_method():
    assert sorted(re.findall(r"\]\(methods/(\w+)\.py\)", README)) == METHODS


@pytest.mark.parametrize("name", METHODS)
def test_the_commands_and_metrics_of_a_docstring_are_there(name):
    text = method(name)[0].__doc__
    commands = [line.split("  #")[0] for line in text.splitlines() if re.match(r"    (?:\w+=\S+ )?make ", line)]
    assert commands and all(f"make {name}" in c for c in commands)
    assert not [x for c in commands for x in wrong_commands(c)]
    watched = re.search(r"^What to watch: (.*?)\n\n", text, re.M | re.S)[1]
    unknown = [w for w in re.findall(r"`([\w*]+)`", watched) if not is_metric(w)]
    assert not unknown, f"methods/{name}.py, What to watch: {unknown} are no metrics"


def test_the_table_of_curves_says_what_the_metrics_say():
    table = README.split("\n## What each curve means\n")[1].split("\n## ")[0]
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) == 10
    for name, meaning, *_ in rows:
        assert METRICS[name.strip("`")] == meaning, f"README, {name}: the meaning in common.run.METRICS is {METRICS.get(name.strip('`'))!r}"


@pytest.mark.parametrize("text, problem", [
    ("`make serch_r1`", "make serch_r1: no such target"),
    ("```\nmake torl ARGS=\"--max-truns 0\"  # none\n```", "make torl: it has no flag --max-truns"),
    ("`make search_r1 ARGS=\"--algorithm\nreinforce\"`", "refused"),
    ("`make torl ARGS=\"--algorithm ppo\"`", "make torl: it has no flag --algorithm"),
    ("`make diff A=search_r1 B=serch`", "make diff: there is no method serch"),
    ("`make report FOLDER=x`", "make report: the Makefile does not know FOLDER"),
    ("`python -m common.reprot RUN`", "python -m common.reprot: no such module"),
    ("(`--mask-observation`)", "--mask-observation: no method and no command has this flag"),
    ("watch `zero_varianze_groups`", "zero_varianze_groups: neither a metric"),
    ("`common/looses.py`", "common/looses.py: no such file"),
    ("`looses.py`", "looses.py: no such file"),
    ("[here](methods/serch_r1.py)", "methods/serch_r1.py: no such file"),
    ("`sumary.json`", "sumary.json: no such file"),
])
def test_what_is_not_there_is_found(text, problem):
    assert any(problem in x for x in problems(text)), problems(text)
    right = {"serch": "search", "truns": "turns", "reinforce": "grpo", "FOLDER": "RUN", "reprot": "report", "observation`": "observations`", "varianze": "variance", "looses": "losses", "sumary": "summary"}
    for old, new in right.items():
        text = text.replace(old, new)
    text = text.replace("B=search`", "B=research`").replace('make torl ARGS="--algorithm', 'make retool ARGS="--algorithm')
    assert not problems(text)
