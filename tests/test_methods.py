"""What is true of every method file: settings with sources, presets that only set what exists, six parts under the same headings."""
import dataclasses
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from common.experiments import flags_of
from common.rollout import ToolCall
from common.run import describe

FILES = sorted(p for p in Path("methods").glob("*.py") if p.stem != "__init__")
every_method = pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)


@every_method
def test_settings_have_sources_and_presets_set_what_exists(path):
    m = importlib.import_module(f"methods.{path.stem}")
    described = describe(m.Config)
    assert set(described) == {f.name for f in dataclasses.fields(m.Config)}
    bad = {k: d["source"] for k, d in described.items() if not (d["source"] == "ours" or d["source"].startswith(("paper ", "code ")))}
    assert not bad
    assert m.PRESETS["tiny"] == {} and "paper" in m.PRESETS
    assert all(set(preset) <= set(described) for preset in m.PRESETS.values())


@every_method
def test_six_parts_in_the_same_order(path):
    text = path.read_text()
    headings = re.findall(r"^# ---- (\w+)", text, re.M)
    parts = ["Config", "Prompt", "Environment", "Reward", "Train"]
    assert text.startswith('"""') and [h for h in headings if h in parts] == parts


@every_method
def test_a_method_stands_alone(path):
    assert not re.search(r"^\s*(from|import) methods\b", path.read_text(), re.M)


def small(config_class) -> dict:
    """Settings of a run of one step that ends in seconds, for any method."""
    smallest = dict(steps=1, prompts=2, samples=2, eval_questions=4, eval_every=0, threads=1, cold_start=1, cold_start_traces=4, warmup=0,
                    questions=8, per_question=2, trajectories=0, filter="none")
    return {k: v for k, v in smallest.items() if k in config_class.__dataclass_fields__}


@pytest.mark.parametrize("path", [p for p in FILES if not Path(f"tests/test_{p.stem}.py").exists()], ids=lambda p: p.stem)
def test_a_method_without_tests_of_its_own_runs(path):
    """A fork: one step, its evaluations and its end."""
    flags = flags_of(small(importlib.import_module(f"methods.{path.stem}").Config))
    done = subprocess.run([sys.executable, "-m", f"methods.{path.stem}", "--name", "test-of-one-step", *flags], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    summary = json.loads((Path("runs") / path.stem / "test-of-one-step" / "summary.json").read_text())
    assert summary["method"] == path.stem and summary["steps"] == 1


@every_method
def test_the_stop_rule_is_asked_for_in_the_same_words_and_a_stop_is_saved_first(path):
    text = path.read_text()
    line = '    stop_on_collapse: bool = setting(False, "save and stop at signs of collapse (common/health.py); they are always said", "ours")\n'
    assert re.search(r"^    resume: bool = .*\n" + re.escape(line), text, re.M)
    logged, saved, stopped = (text.rindex(part) for part in ("run.log_train(", "        if run.signal or ", "run.stop_if_asked(step + 1)"))
    assert logged < saved < text.index("run.save(step + 1, trained)", saved) < stopped


@pytest.mark.parametrize("name", ["search_r1", "research", "r1_searcher", "deep_researcher"])
def test_a_trace_built_by_rule_is_given_results_as_the_model_sees_them(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    m = importlib.import_module(f"methods.{name}")

    class Seen(Exception):
        pass

    def look(example, tools, *end):
        search = tools["web_search"] if isinstance(tools, dict) else tools
        raise Seen(search.run([ToolCall("search", json.dumps([example.question]), example)])[0])
    monkeypatch.setattr(m, "demonstration", look)
    with pytest.raises(Seen, match=r"\[cut\]$"):
        m.train(m.Config(steps=1, prompts=2, samples=2, eval_questions=2, eval_every=0, threads=1, warmup=1, observation_tokens=36))
