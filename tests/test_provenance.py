"""Every setting names its source, in words that can be checked, and the tables made of them are current."""
from pathlib import Path

import pytest

from common import UserError, provenance as p
from common.side_by_side import load, names

METHODS = {name: load(name) for name in names()}
AGAIN = "the method files have changed since: run make settings_table ARGS=--write"


@pytest.mark.parametrize("source, kind", [
    ("ours", "ours"), ("paper §4.3", "paper"), ("paper §2.2.1", "paper"), ("paper Tab. 1", "paper"), ("paper Fig. 6", "paper"), ("paper App. B", "paper"), ("paper eq. 5", "paper"),
    ("paper (training curves)", "paper"), ("code train_grpo.sh", "code"), ("code scripts/nq_hotpotqa/v0.2/", "code"), ("code issue 24", "code"),
    ("code recipe run_qwen2-32b_dapo.sh; paper §2.3", "code"), ("code generation.py (rag)", "code")])
def test_sources(source, kind):
    assert p.source_kind(source) == kind


@pytest.mark.parametrize("source", ["", "paper", "code", "unknown", "paper 4.3", "paper §", "paper table 2", "code reading agent", "code", "ours, too", "paper §4.1,", "code a.py and b.py",
                                    "paper §4.1; ", "Paper §4.1", "code train_grpo.sh;paper §2", "paper ()"])
def test_what_is_no_source(source):
    with pytest.raises(ValueError, match="is no source"):
        p.source_kind(source)


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_names_its_source(name):
    m, bad = METHODS[name], []
    for field, d in m.settings.items():
        try:
            kind = p.source_kind(d["source"])
        except ValueError as error:
            bad.append(f"{name}.{field}: {error}")
            continue
        if "published" in d and (kind == "ours" or d["published"] == m.presets["paper"][field]):
            bad.append(f"{name}.{field}: `published` says nothing that the preset `paper` and the source do not say")
    assert not bad, "\n".join(bad)


def test_the_table_says_what_is_published_and_what_is_ours():
    rows = {cells[0]: cells[1:] for cells in ([c.strip() for c in line.strip("|").split("|")] for line in p.method_table(METHODS["search_r1"]).splitlines()[2:])}
    assert rows["`prompts`"] == ["512 (§4.3)", "", "12", "4", "="] and rows["`updates`"] == ["", "10 (train_grpo.sh)", "1", "1", "="]
    assert rows["`clip`"] == ["0.2 (App. B)", "", "=", "=", "="] and rows["`seed`"] == ["", "", "0", "0", "0"]
    assert rows["`score_scope`"] == ["", "all (qa_em.py)", "model", "model", "model"]
    assert set(rows) == {f"`{f}`" + (f", {d['unit']}" if d["unit"] else "") for f, d in METHODS["search_r1"].settings.items()} - {"`preset`", "`name`", "`resume`", "`evaluate`"}
    assert p.table(["a"], [["x|y\nz"]]) == "| a |\n| --- |\n| x\\|y z |"


def test_the_written_tables_are_current():
    assert Path("docs/settings.md").read_text() == p.whole(list(METHODS.values())), f"docs/settings.md: {AGAIN}"
    readme = Path("README.md").read_text()
    assert readme == p.with_table(readme, list(METHODS.values())), f"README.md: {AGAIN}"


def test_a_readme_without_marks_is_refused():
    with pytest.raises(UserError, match="lacks the lines"):
        p.with_table("# A readme", [])
    with pytest.raises(UserError, match="unknown arguments --wirte"):
        p.command(["--wirte"])
