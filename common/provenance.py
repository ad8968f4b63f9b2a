"""Where every setting of every method comes from: paper, official code, or this project.

    python -m common.provenance            prints the settings of all methods as Markdown
    python -m common.provenance --write    writes docs/settings.md, and the table in README.md between its two marks

Everything is read from the `Config` and `PRESETS` of the method files: the published value is the one in the preset `paper`, or what the setting
gives as `published` where that preset departs from it; its place is the setting's source. A setting whose source is "ours" has no published value.
"""
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from common import UserError
from common.run import main, write_atomic
from common.side_by_side import Method, load, names, shown

SETTINGS, README = Path("docs/settings.md"), Path("README.md")
MARKS = ("<!-- settings: written by make settings_table -->", "<!-- end of settings -->")
README_SETTINGS = ("model", "prompts", "samples", "updates", "steps", "lr", "kl", "clip", "temperature", "max_turns", "aggregation")

# A source is one or more places with "; " between them, the one that decides first.
PLACE = r"""
    ours
  | paper[ ] (?: (?:§|Tab\.[ ]|Fig\.[ ]|App\.[ ]|eq\.[ ]) [A-Z0-9][\d.]* | \([^()]+\) )    # a numbered place, or in brackets what the place is
  | code[ ] (?:recipe[ ])? (?: [\w./-]+\.(?:py|sh|yaml|json) | [\w./-]+/ | issue[ ]\d+ ) (?:[ ]\([^()]+\))?    # a file, a folder/, an issue; a note
"""
SOURCE = re.compile(rf"(?:{PLACE})(?:;[ ](?:{PLACE}))*", re.X)


def source_kind(source: str) -> str:
    """"paper", "code" or "ours". ValueError for a source that names no place."""
    if not SOURCE.fullmatch(source):
        raise ValueError(f'{source!r} is no source: give "ours", "paper §4.1" (or Tab., Fig., App., eq., or the place in brackets), or "code" with a file, a '
                         'folder/ or an issue; several with "; " between them')
    return source.split()[0]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cell = lambda text: text.replace("|", "\\|").replace("\n", " ")
    return "\n".join(["| " + " | ".join(map(cell, row)) + " |" for row in (head, ["---"] * len(head), *rows)])


def published(m: Method, name: str) -> object:
    """The published value: that of the preset `paper`, unless the setting says that the preset departs from it."""
    return m.settings[name].get("published", m.presets["paper"][name])


def method_table(m: Method) -> str:
    """One method: what the paper or its code says, and what we set. "=" is the published value."""
    rows = []
    for name, d in m.settings.items():
        if name in ("preset", "name", "resume", "evaluate"):  # of a command, not of a method
            continue
        kind, found = source_kind(d["source"]), published(m, name)
        place = d["source"].removeprefix(f"{kind} ").removeprefix("(").removesuffix(")" if d["source"].startswith(f"{kind} (") else "")
        paper, code = (f"{shown(found)} ({place})" if kind == k else "" for k in ("paper", "code"))
        ours = [shown(values[name]) if kind == "ours" or values[name] != found else "=" for values in m.presets.values()]
        rows.append([f"`{name}`" + (f", {d['unit']}" if d["unit"] else ""), paper, code, *ours])
    return table(["setting", "paper", "official code", *(f"ours: {p}" for p in m.presets)], rows)


def whole(methods: Sequence[Method]) -> str:
    """docs/settings.md."""
    out = ["# Every setting of every method", "Written by `make settings_table ARGS=--write` from the method files; not to be edited. The published value stands under *paper* or *official "
           "code* (for OTC, which has none, Search-R1's and ToRL's), with its place in brackets; where both cells are empty nothing is published, or nothing that could be. "
           "*ours* are our presets: `=` where they have the published value. What a setting means: `make search_r1 ARGS=\"--help\"`, and so for every method."]
    for m in methods:
        out += [f"## {m.title}", method_table(m)]
    return "\n\n".join(out) + "\n"


def short(methods: Sequence[Method]) -> str:
    """The README's table: the preset `paper` of all methods."""
    def value(m: Method, name: str) -> str:
        if name == "clip" and "clip_low" in m.settings:
            return f"{shown(m.presets['paper']['clip_low'])}, {shown(m.presets['paper']['clip_high'])}"
        if name not in m.settings:
            return "–"
        return shown(m.presets["paper"][name]).rpartition("/")[2] + (" *" if source_kind(m.settings[name]["source"]) == "ours" else "")
    return table(["method", *(f"`{name}`" for name in README_SETTINGS)], [[m.title, *(value(m, name) for name in README_SETTINGS)] for m in methods])


def between(readme: str, marks: tuple[str, str], text: str) -> str:
    """The README with `text` in place of what stands between its two marks. UserError if these are not there."""
    before, mark, rest = readme.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not mark or not end:
        raise UserError(f"README.md lacks the lines {marks[0]!r} and {marks[1]!r}, between which a table stands that is written by a command")
    return f"{before}{mark}\n{text}\n{end}{after}"


def with_table(readme: str, methods: Sequence[Method]) -> str:
    """The README with its table of settings made anew."""
    return between(readme, MARKS, short(methods))


def command(arguments: Sequence[str]) -> None:
    methods = [load(name) for name in names()]
    if arguments == ["--write"]:
        write_atomic(SETTINGS, whole(methods))
        write_atomic(README, with_table(README.read_text(encoding="utf-8"), methods))
        print(f"written: {SETTINGS}, and the table in {README}")
    elif not arguments:
        print(whole(methods))
    else:
        raise UserError(f"unknown arguments {' '.join(arguments)}; there is only --write")


if __name__ == "__main__":
    main(lambda: command(sys.argv[1:]))
