"""Two method files beside each other, and how far all of them are apart.

    python -m common.side_by_side search_r1 research    writes runs/diff/search_r1-research.html
    python -m common.side_by_side                       writes a page for every pair, and runs/diff/index.html with the table of distances

A method file has the same parts in the same order (README, "How to read a method file"). So what a difference *is* follows from where it
stands: the heading of its section, the group comment of its setting, the number of its step in the training loop. Nothing is listed by hand.
The pages are single files without scripts, open without a network, and hold the two files whole: what is alike is folded.
"""
import ast
import base64
import dataclasses
import difflib
import hashlib
import html
import importlib
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations, groupby
from pathlib import Path

from common import UserError
from common.run import describe, main, write_atomic

METHODS, OUT = Path("methods"), Path("runs/diff")
CONTEXT = 2  # lines that are alike and stay open around a difference

# What a difference is, by the heading of its section, and in the training loop by the first word of the step's comment. A section under
# another heading (a cold start, a selection of data) is named by that heading.
KIND_OF_PART = {"Docstring": "description", "Imports": "infrastructure", "Config": "setting", "Prompt": "prompt", "Environment": "environment",
                "Reward": "reward"}
KIND_OF_STEP = {"sample": "sampling", "score": "reward", "advantages": "advantage", "update": "loss", "log": "infrastructure",
                "evaluate": "infrastructure"}
PARTS = (*KIND_OF_PART, "Train")


# ---- reading ----------------------------------------------------------------------------------------------------------
@dataclass
class Place:
    """A stretch of a file in which every difference is of one kind."""
    part: str  # heading of the section, or Docstring, Imports
    title: str  # in Config the group comment, in Train the function or the step; else empty
    kind: str
    lines: list[tuple[int, str]] = field(default_factory=list)  # (line number from 1, text)

    @property
    def key(self) -> tuple[str, str]:
        """What two files have in common: a step is known by its number, whatever its comment says."""
        return self.part, self.title[:2] if self.title[:1].isdigit() else self.title


def places(text: str) -> list[Place]:
    """The places of a method file, in order; together they hold every line that is not blank."""
    end_of_docstring = ast.parse(text).body[0].end_lineno
    part, title, out = "Docstring", "", {}
    for number, line in enumerate(text.splitlines(), 1):
        if number == end_of_docstring + 1:
            part, title = "Imports", ""
        if heading := re.match(r"# ---- (.+?) -{3,}$", line):
            part, title = heading[1], ""
        elif line.startswith("if __name__"):
            part, title = "Train", "end"
        elif part == "Config":
            group = re.match(r"    # (.+)$", line)
            title = group[1] if group else "presets" if re.match(r"[A-Z_]+ = ", line) else title
        elif part == "Train":
            function, step = re.match(r"def (\w+)", line), re.match(r"\s+# (\d\. \w+)", line)
            if function:
                title = "set-up" if function[1] == "train" else function[1]
            elif step:
                title = step[1]
            elif title[:1].isdigit() and re.match(r"    \S", line):
                title = "end"
        if part == "Train":
            kind = KIND_OF_STEP.get(title[3:], "infrastructure") if title[:1].isdigit() else "data" if title == "load_data" else "infrastructure"
        else:
            kind = KIND_OF_PART.get(part, part.removesuffix(" (ours)").lower())
        place = Place(part, title, kind)
        out.setdefault(place.key, place).lines.append((number, line))
    for place in out.values():
        while place.lines and not place.lines[-1][1].strip():
            place.lines.pop()
    return [place for place in out.values() if place.lines]


def merged(a: Iterable, b: Iterable) -> list:
    """Both orders in one: what only `b` has stands behind what stands before it there."""
    out, at = list(a), 0
    for x in b:
        if x in out:
            at = out.index(x) + 1
        else:
            out.insert(at, x)
            at += 1
    return out


# ---- comparing --------------------------------------------------------------------------------------------------------
def align(a: Sequence[str], b: Sequence[str]) -> list[tuple[int | None, int | None]]:
    """Pairs of line indices, None where a line has no partner: the alignment in which partners share the most words, in all."""
    words = lambda line: Counter(re.findall(r"\w+|[^\w\s]", line))
    counts_a, counts_b = [words(x) for x in a], [words(x) for x in b]
    sizes_a, sizes_b = [c.total() for c in counts_a], [c.total() for c in counts_b]

    def likeness(i: int, j: int) -> float:
        if a[i] == b[j]:
            return 1.0 if a[i].strip() else 0.1
        n = sizes_a[i] + sizes_b[j]
        if 2 * min(sizes_a[i], sizes_b[j]) < 0.5 * n:
            return 0.0
        shared = sum(min(n, counts_b[j][word]) for word, n in counts_a[i].items())
        same_name = a[i].split(":")[0] == b[j].split(":")[0]  # the same setting, or the same key
        return 2 * shared / n if 2 * shared >= 0.5 * n or same_name else 0.0

    best = [[0.0] * (len(b) + 1) for _ in range(len(a) + 1)]  # of the rest from line i and line j on
    pair = [[0.0] * len(b) for _ in a]
    for i in reversed(range(len(a))):
        for j in reversed(range(len(b))):
            pair[i][j] = likeness(i, j)
            best[i][j] = max(best[i + 1][j], best[i][j + 1], pair[i][j] + best[i + 1][j + 1])
    out, i, j = [], 0, 0
    while i < len(a) or j < len(b):
        if i < len(a) and j < len(b) and pair[i][j] and best[i][j] == pair[i][j] + best[i + 1][j + 1]:
            out.append((i, j))
            i, j = i + 1, j + 1
        elif i < len(a) and (j == len(b) or best[i][j] == best[i + 1][j]):
            out.append((i, None))
            i += 1
        else:
            out.append((None, j))
            j += 1
    return out


def loosened(pairs: list[tuple[int | None, int | None]], a: Sequence[str]) -> list[tuple[int | None, int | None]]:
    """The alignment without blank lines that are partners in the midst of lines without one: they would only tear these apart."""
    alone = lambda k: 0 <= k < len(pairs) and None in pairs[k]
    out = []
    for k, (i, j) in enumerate(pairs):
        out += [(i, None), (None, j)] if None not in (i, j) and not a[i].strip() and alone(k - 1) and alone(k + 1) else [(i, j)]
    return out


@dataclass(frozen=True)
class Row:
    """One line of the page: (number, text) in each file, None where it has none; and the function or constant it belongs to."""
    a: tuple[int, str] | None
    b: tuple[int, str] | None
    within: str = ""

    @property
    def alike(self) -> bool:
        return self.a is not None and self.b is not None and self.a[1] == self.b[1]

    @property
    def changed_lines(self) -> int:
        """How many lines of the two files stand here that the other has not; blank ones do not count."""
        return 0 if self.alike else sum(bool(side and side[1].strip()) for side in (self.a, self.b))


@dataclass(frozen=True)
class Pair:
    """What two files have at one place."""
    part: str
    title: str
    kind: str
    rows: list[Row]

    @property
    def changed_lines(self) -> int:
        return sum(row.changed_lines for row in self.rows)


def compare(text_a: str, text_b: str) -> list[Pair]:
    """Two method files, place by place in the order of reading."""
    left, right = ({place.key: place for place in places(text)} for text in (text_a, text_b))
    order = [key for part in merged(dict.fromkeys(k[0] for k in left), dict.fromkeys(k[0] for k in right))
             for key in merged([k for k in left if k[0] == part], [k for k in right if k[0] == part])]
    out = []
    for key in order:
        a, b = (side[key].lines if key in side else [] for side in (left, right))
        rows, within = [], ""
        for i, j in loosened(align([text for _, text in a], [text for _, text in b]), [text for _, text in a]):
            row = Row(a[i] if i is not None else None, b[j] if j is not None else None)
            for _, text in filter(None, (row.b, row.a)):
                name = re.match(r"(?:def|class) (\w+)|([A-Z_]{3,})\b.* = ", text)
                within = (name[1] or name[2]) if name else within
            rows.append(dataclasses.replace(row, within=within))
        place = left.get(key) or right[key]
        out.append(Pair(place.part, place.title, place.kind, rows))
    return out


def total(pairs: Sequence[Pair], by: str) -> dict[str, int]:
    """Changed lines by "kind" or by "part", most telling order: that of the file."""
    out: dict[str, int] = {}
    for pair in pairs:
        out[getattr(pair, by)] = out.get(getattr(pair, by), 0) + pair.changed_lines
    return out


@dataclass(frozen=True)
class Method:
    """A method file and its settings."""
    name: str
    text: str
    title: str  # as its docstring begins
    sentence: str
    settings: dict[str, dict]  # field -> help, source, unit
    presets: dict[str, dict]  # preset -> field -> value


def names() -> list[str]:
    return sorted(path.stem for path in METHODS.glob("*.py") if path.stem != "__init__")


def load(name: str) -> Method:
    """UserError, with the nearest name, if there is no such method."""
    if name not in names():
        near = difflib.get_close_matches(name, names(), 1)
        raise UserError(f"there is no method {name!r}{f'; did you mean {near[0]}?' if near else ''} There are {', '.join(names())}")
    module = importlib.import_module(f"methods.{name}")
    title, _, sentence = module.__doc__.split("\n", 1)[0].partition(": ")
    defaults = {f.name: f.default for f in dataclasses.fields(module.Config)}
    return Method(name, (METHODS / f"{name}.py").read_text(encoding="utf-8"), title, sentence, describe(module.Config),
                  {preset: {**defaults, **changes} for preset, changes in module.PRESETS.items()})


def different_settings(a: Method, b: Method) -> list[str]:
    """Fields with another value in some preset, or that only one of the two has."""
    fields, presets = merged(a.settings, b.settings), merged(a.presets, b.presets)
    return [f for f in fields if f not in a.settings or f not in b.settings
            or any(p in a.presets and p in b.presets and a.presets[p][f] != b.presets[p][f] for p in presets)]


# ---- pages ------------------------------------------------------------------------------------------------------------
def page(title: str, body: str) -> str:
    """A closed HTML file: its own style, no script, nothing from outside."""
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    return (f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
            f'style-src \'sha256-{digest}\'; img-src data:; base-uri \'none\'; form-action \'none\'">\n<meta name="viewport" content="width=device-width, '
            f'initial-scale=1">\n<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n<title>{html.escape(title)}</title>\n'
            f'<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n')


def marked(a: str, b: str) -> tuple[str, str]:
    """Two lines as HTML, what only one of them has marked, word by word."""
    words_a, words_b = (re.findall(r"\w+|\s+|[^\w\s]", x) for x in (a, b))
    out_a, out_b = [], []
    for op, i0, i1, j0, j1 in difflib.SequenceMatcher(None, words_a, words_b, autojunk=False).get_opcodes():
        for out, piece in ((out_a, "".join(words_a[i0:i1])), (out_b, "".join(words_b[j0:j1]))):
            out.append(html.escape(piece) if op == "equal" or not piece else f"<mark>{html.escape(piece)}</mark>")
    return "".join(out_a), "".join(out_b)


def cell(side: tuple[int, str] | None, text: str) -> str:
    indent = min(40, len(side[1]) - len(side[1].lstrip())) if side else 0
    return f'<i>{side[0] if side else ""}</i><code class="n{indent}">{text}</code>'


def row_html(row: Row) -> str:
    """Two partners, alike or not."""
    texts = (html.escape(row.a[1]),) * 2 if row.alike else marked(row.a[1], row.b[1])
    return f'<div class="row {"same" if row.alike else "both"}">{cell(row.a, texts[0])}{cell(row.b, texts[1])}</div>'


def changed_html(rows: Sequence[Row]) -> str:
    """A difference: partners in one row; lines without one in two columns, which a narrow screen shows one after the other."""
    out = []
    for paired, group in groupby(rows, key=lambda row: bool(row.a and row.b)):
        group = list(group)
        if paired:
            out += map(row_html, group)
        else:
            columns = ([(row.a, row.b)[k] for row in group if (row.a, row.b)[k]] for k in (0, 1))
            out.append('<div class="apart">' + "".join(f'<div class="only-{side}">{"".join(cell(x, html.escape(x[1])) for x in own)}</div>'
                                                       for side, own in zip("ab", columns)) + "</div>")
    return "".join(out)


def rows_html(pair: Pair) -> str:
    """The rows of a place: each difference under its label, what is alike folded but for a few lines around it."""
    rows, out, i, last = pair.rows, [], 0, None
    changed = [not row.alike for row in rows]
    while i < len(rows):
        n = next((k for k in range(i, len(rows)) if changed[k] != changed[i]), len(rows)) - i
        if changed[i]:
            where = pair.title or rows[i].within
            if where != last:
                out.append(f'<p class="label {css(pair.kind)}"><b>{html.escape(pair.kind)}</b> {html.escape(where)}</p>')
            out.append(changed_html(rows[i:i + n]))
            last = where
        else:
            head, tail = CONTEXT if i else 0, CONTEXT if i + n < len(rows) else 0
            if n - head - tail < 4:
                head, tail = n, 0
            last = last if n <= 2 * CONTEXT else None  # far from the difference before: label the next one again
            out += map(row_html, rows[i:i + head])
            if folded := rows[i + head:i + n - tail]:
                out.append(f'<details><summary>{len(folded)} lines alike</summary>{"".join(map(row_html, folded))}</details>')
            out += map(row_html, rows[i + n - tail:i + n])
        i += n
    return "\n".join(out)


def css(kind: str) -> str:
    """The class of a label; kinds of one file alone share a colour."""
    return f"k-{kind}" if kind in {*KIND_OF_PART.values(), *KIND_OF_STEP.values(), "data"} else "k-own"


def settings_html(a: Method, b: Method) -> str:
    """The settings that differ: value in each preset, and source."""
    presets = merged(a.presets, b.presets)
    sides = [(m, html.escape(m.title)) for m in (a, b)]
    head = "".join(f'<th colspan="2" scope="colgroup">{p}</th>' for p in presets) + '<th colspan="2" scope="colgroup">source</th>'
    twice = "".join(f'<th scope="col">{title}</th>' for _ in range(len(presets) + 1) for _, title in sides)
    body = []
    for f in different_settings(a, b):
        own = next(m for m in (b, a) if f in m.settings) if f not in a.settings else a
        cells = []
        for p in presets:
            values = [m.presets[p][f] if p in m.presets and f in m.settings else None for m in (a, b)]
            there = [p in m.presets and f in m.settings for m in (a, b)]
            other = ' class="other"' if there[0] != there[1] or values[0] != values[1] else ""
            cells += [f'<td{other} data-label="{p}, {title}">{html.escape(shown(v)) if yes else "–"}</td>' for v, yes, (_, title) in zip(values, there, sides)]
        cells += [f'<td class="source" data-label="source, {title}">{html.escape(m.settings[f]["source"]) if f in m.settings else "–"}</td>' for m, title in sides]
        body.append(f'<tr><th scope="row"><code>{f}</code> <small>{html.escape(own.settings[f]["help"])}</small></th>{"".join(cells)}</tr>')
    return (f'<div class="wide"><table class="settings"><thead><tr><th rowspan="2">setting</th>{head}</tr><tr>{twice}</tr></thead>'
            f'<tbody>{"".join(body)}</tbody></table></div>')


def shown(value: object) -> str:
    """A setting's value in a table."""
    if isinstance(value, float):
        return f"{value:g}".replace("e-0", "e-")
    return "on" if value is True else "off" if value is False else str(value) if value != "" else "(none)"


def pair_page(a: Method, b: Method, pairs: Sequence[Pair]) -> str:
    kinds, parts = total(pairs, "kind"), {}
    for pair in pairs:
        parts.setdefault(pair.part, []).append(pair)
    first = {}
    for pair in pairs:
        if pair.changed_lines:
            first.setdefault(pair.kind, pair)
    chips = "".join(f'<a class="label {css(kind)}" href="#{anchor(first[kind])}"><b>{html.escape(kind)}</b> {n}</a>' for kind, n in kinds.items() if n)
    body = [f'<header><h1>{html.escape(a.title)} <span>beside</span> {html.escape(b.title)}</h1>',
            f'<div class="two"><p><b>{html.escape(a.title)}</b>: {html.escape(a.sentence)}</p><p><b>{html.escape(b.title)}</b>: {html.escape(b.sentence)}</p></div>',
            f'<p class="quiet">{sum(kinds.values())} lines stand in one of the two files only. By what they are:</p><p class="chips">{chips}</p></header>',
            f'<section><h2 id="settings">Settings that differ <small>{len(different_settings(a, b))}</small></h2>{settings_html(a, b)}</section>']
    for part, own in parts.items():
        n = sum(pair.changed_lines for pair in own)
        body.append(f'<section><h2>{html.escape(part)} <small>{f"{n} lines differ" if n else "alike"}</small></h2><div class="names"><span>methods/{a.name}.py</span>'
                    f'<span>methods/{b.name}.py</span></div>')
        body += [f'<div id="{anchor(pair)}">{rows_html(pair)}</div>' for pair in own]
        body.append("</section>")
    return page(f"{a.title} beside {b.title}", "\n".join(body))


def anchor(pair: Pair) -> str:
    return re.sub(r"\W+", "-", f"{pair.part} {pair.title}".strip().lower())


def table_page(methods: Sequence[Method], distance: dict[tuple[str, str], dict[str, int]]) -> str:
    """The ten-by-ten tables: all lines, then part by part."""
    def table(part: str | None) -> str:
        of = lambda x, y: sum(distance[x, y].values()) if part is None else distance[x, y].get(part, 0)
        most = max((of(x.name, y.name) for x in methods for y in methods if x is not y), default=0) or 1
        rows = []
        for x in methods:
            cells = []
            for y in methods:
                if x is y:
                    cells.append("<td></td>")
                    continue
                n, by_part = of(x.name, y.name), ", ".join(f"{k} {v}" for k, v in distance[x.name, y.name].items() if v)
                cells.append(f'<td class="h{round(9 * n / most)}"><a href="{file_name(x.name, y.name)}" title="{html.escape(f"{x.title}, {y.title}: {by_part}")}">{n}</a></td>')
            rows.append(f'<tr><th scope="row">{html.escape(x.title)}</th>{"".join(cells)}</tr>')
        head = "".join(f'<th scope="col"><span>{html.escape(y.title)}</span></th>' for y in methods)
        return f'<div class="wide"><table class="distance"><thead><tr><th></th>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'

    own = sorted({part for d in distance.values() for part, n in d.items() if n and part not in PARTS})
    parts = "".join(f"<details><summary>{html.escape(part)}</summary>{table(part)}</details>" for part in (*PARTS, *own))
    return page("How far the methods are apart", f'<header><h1>How far the methods are apart</h1><p class="quiet">Lines that stand in one of the two files only (blank ones '
                f'not counted). A number leads to the two files side by side.</p></header><section>{table(None)}</section><section><h2>Part by part</h2>{parts}</section>')


def table_text(methods: Sequence[Method], distance: dict[tuple[str, str], dict[str, int]]) -> str:
    """The same as text: all lines, then the parts that every file has."""
    out, width = [], max(len(m.name) for m in methods)
    for part in (None, *PARTS):
        out += ["" if part is None else f"\n{part}", " " * width + "".join(f"{m.name[:8]:>9}" for m in methods)]
        for x in methods:
            n = [None if x is y else sum(distance[x.name, y.name].values()) if part is None else distance[x.name, y.name].get(part, 0) for y in methods]
            out.append(f"{x.name:{width}}" + "".join(f"{'·' if k is None else k:>9}" for k in n))
    return "\n".join(["lines that stand in one of the two files only", *out[1:]])


def file_name(a: str, b: str) -> str:
    return "-".join(sorted((a, b))) + ".html"


def write_pair(a: str, b: str) -> Path:
    """One page, A on the left."""
    if a == b:
        raise UserError(f"{a} beside itself: give two methods, as in make diff A=search_r1 B=research")
    left, right = load(a), load(b)
    path = OUT / f"{a}-{b}.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, pair_page(left, right, compare(left.text, right.text)))
    return path


def write_table() -> tuple[Path, str]:
    """The table as a page and as text; and the page of every pair, to which it leads."""
    methods, distance = [load(name) for name in names()], {}
    OUT.mkdir(parents=True, exist_ok=True)
    for a, b in combinations(methods, 2):
        pairs = compare(a.text, b.text)
        distance[a.name, b.name] = distance[b.name, a.name] = total(pairs, "part")
        write_atomic(OUT / file_name(a.name, b.name), pair_page(a, b, pairs))
    write_atomic(OUT / "index.html", table_page(methods, distance))
    return OUT / "index.html", table_text(methods, distance)


STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --line: #d5d9df; --text: #1b2027; --quiet: #59626e; --link: #0b5cc4;
  --a: #fdecea; --a-mark: #f6b7b0; --b: #e6f4ea; --b-mark: #a5dcb4; --heat: 31 102 201;
  --prompt: #7c3fc4; --environment: #0b7a82; --reward: #a8650a; --advantage: #b3266e; --loss: #b02a2a; --data: #17692d; --setting: #1f66c9; --rest: #59626e; }
@media (prefers-color-scheme: dark) { :root { --page: #0e1217; --card: #171c23; --line: #343c47; --text: #e5e9ee; --quiet: #a3adb9; --link: #7db7ff;
  --a: #351a1b; --a-mark: #7a2f30; --b: #14301d; --b-mark: #22663a; --heat: 108 176 255;
  --prompt: #c19bff; --environment: #55c7cf; --reward: #e0a63c; --advantage: #f58abb; --loss: #ff8f88; --data: #6fd389; --setting: #6cb0ff; --rest: #a3adb9; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1760px; padding: 20px 16px 80px; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 8px; } h1 span { color: var(--quiet); font-weight: 400; }
h2 { font-size: 1.2rem; margin: 36px 0 8px; } h2 small, .quiet { color: var(--quiet); font-size: 13px; font-weight: 400; }
p { margin: 0 0 8px; } a { color: var(--link); }
.two { display: grid; grid-template-columns: 1fr 1fr; gap: 0 24px; }
code { font: 12px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.chips { display: flex; flex-wrap: wrap; gap: 6px; } .chips .label { margin: 0; text-decoration: none; background: var(--card); border: 1px solid var(--line); border-left-width: 4px; }
.label { --k: var(--rest); font-size: 13px; margin: 10px 0 4px; padding: 1px 10px; border-left: 4px solid var(--k); color: var(--quiet); overflow-wrap: anywhere; }
.label.label { border-left-color: var(--k); } .label b { color: var(--k); }
.k-prompt { --k: var(--prompt) !important; } .k-environment { --k: var(--environment) !important; } .k-reward { --k: var(--reward) !important; }
.k-advantage { --k: var(--advantage) !important; } .k-loss { --k: var(--loss) !important; } .k-data, .k-own { --k: var(--data) !important; }
.k-setting { --k: var(--setting) !important; }
.names, .row { display: grid; grid-template-columns: 3.2em minmax(0, 1fr) 3.2em minmax(0, 1fr); }
.names { position: sticky; top: 0; z-index: 1; background: var(--page); border-bottom: 1px solid var(--line); padding: 4px 0; font-size: 13px; color: var(--quiet); }
.names span { grid-column: span 2; padding-left: 3.2em; }
.row { background: var(--card); } i { color: var(--quiet); font: 11px/1.65 ui-monospace, Menlo, Consolas, monospace; text-align: right; padding-right: 8px; user-select: none; }
.row code, .apart code { --n: 0; display: block; white-space: pre-wrap; overflow-wrap: anywhere; padding-left: calc((var(--n) + 2) * 1ch); text-indent: calc((var(--n) + 2) * -1ch); padding-right: 8px; min-height: 18px; }
.both code:nth-of-type(1), .only-a { background: var(--a); } .both code:nth-of-type(2), .only-b { background: var(--b); }
.apart { display: grid; grid-template-columns: 1fr 1fr; background: var(--card); } .apart > div { display: grid; grid-template-columns: 3.2em minmax(0, 1fr); align-content: start; align-self: start; }
mark { color: inherit; border-radius: 2px; } .both code:nth-of-type(1) mark { background: var(--a-mark); } .both code:nth-of-type(2) mark { background: var(--b-mark); }
details { background: var(--card); } summary { cursor: pointer; color: var(--quiet); font-size: 13px; padding: 2px 12px; background: var(--page); border: dashed var(--line); border-width: 1px 0; }
.wide { width: fit-content; max-width: 100%; overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: collapse; font-size: 13px; } th, td { text-align: left; vertical-align: top; padding: 4px 10px; border-bottom: 1px solid var(--line); font-weight: 400; }
thead th { color: var(--quiet); vertical-align: bottom; } .settings { width: 100%; } .settings td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; min-width: 5.8em; }
.settings td:nth-child(even), .settings thead th[colspan] { border-left: 1px solid var(--line); } .settings tbody th { min-width: 15em; }
.settings small { color: var(--quiet); display: block; max-width: 40ch; } .other { background: color-mix(in srgb, var(--setting) 16%, transparent); } .source { color: var(--quiet); }
.distance { font-variant-numeric: tabular-nums; } .distance td { text-align: right; padding: 6px 10px; } .distance a { color: inherit; text-decoration: none; } .distance a:hover { text-decoration: underline; }
.distance tbody th { white-space: nowrap; position: sticky; left: 0; background: var(--card); } .distance thead span { writing-mode: vertical-rl; transform: rotate(180deg); }
@media (max-width: 760px) {
  body { padding: 12px 8px 60px; } .two { grid-template-columns: 1fr; } .names { display: none; } code { font-size: 11px; }
  .row, .apart > div { grid-template-columns: 2.6em minmax(0, 1fr); } .apart { grid-template-columns: 1fr; } i { font-size: 10px; padding-right: 6px; } .same i:nth-of-type(2), .same code:nth-of-type(2) { display: none; }
  .settings, .settings tbody, .settings tr, .settings th, .settings td { display: block; border: 0 !important; } .settings thead { display: none; }
  .settings tr { padding: 8px 10px; border-bottom: 1px solid var(--line) !important; display: grid; grid-template-columns: 1fr 1fr; gap: 2px 8px; }
  .settings th { grid-column: span 2; padding: 0; } .settings td:not(.other):not(.source) { display: none; } .settings td { padding: 2px 6px; border-radius: 4px; } .settings td::before { content: attr(data-label); display: block; color: var(--quiet); font-size: 11px; }
  .distance td { padding: 6px; } }
""" + "".join(f".n{n} {{ --n: {n} !important; }} " for n in range(1, 41)) + "".join(
    f".h{n} {{ background: rgb(var(--heat) / {n * 0.06:.2f}); }} " for n in range(10)) + "\n"


def command(arguments: Sequence[str]) -> None:
    if not arguments:
        path, text = write_table()
        print(f"{text}\n\nopen {path}")
    elif len(arguments) == 2 and all(arguments):
        a, b = arguments
        pairs = compare(load(a).text, load(b).text)
        print(f"{a} and {b}: " + ", ".join(f"{kind} {n}" for kind, n in total(pairs, "kind").items() if n) + " lines in one of the two only")
        print(f"open {write_pair(a, b)}")
    else:
        raise UserError("give two methods, as in make diff A=search_r1 B=research, or none for the table")


if __name__ == "__main__":
    main(lambda: command(sys.argv[1:]))
