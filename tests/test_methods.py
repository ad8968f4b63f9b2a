"""What is true of every method file: settings with sources, presets that only set what exists, six parts under the same headings."""
import dataclasses
import importlib
import re
from pathlib import Path

import pytest

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


@every_method
def test_the_stop_rule_is_asked_for_in_the_same_words_and_a_stop_is_saved_first(path):
    text = path.read_text()
    line = '    stop_on_collapse: bool = setting(False, "save and stop at signs of collapse (common/health.py); they are always said", "ours")\n'
    assert re.search(r"^    resume: bool = .*\n" + re.escape(line), text, re.M)
    logged, saved, stopped = (text.rindex(part) for part in ("run.log_train(", "or run.signal:\n            run.save(", "run.stop_if_asked(step + 1)"))
    assert logged < saved < stopped
