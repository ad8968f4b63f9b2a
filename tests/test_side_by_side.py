"""Two files beside each other: every line is there, and what a difference is follows from where it stands."""
import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from common import UserError, side_by_side as s

TEXT = Path("methods/search_r1.py").read_text()


def changed(old: str, new: str, text: str = TEXT) -> list[tuple[str, str]]:
    """(kind, title) of the places in which a planted change is found."""
    assert text.count(old) == 1
    return [(p.kind, p.title) for p in s.compare(text, text.replace(old, new)) if p.changed_lines]


@pytest.mark.parametrize("name", s.names())
def test_places_hold_every_line_once_and_in_order(name):
    text = (s.METHODS / f"{name}.py").read_text()
    lines = [line for place in s.places(text) for line in place.lines]
    assert sorted(n for n, t in lines if t.strip()) == [n for n, t in enumerate(text.splitlines(), 1) if t.strip()]
    assert all(text.splitlines()[n - 1] == t for n, t in lines)
    assert {p.part for p in s.places(text)} >= set(s.PARTS)
    assert [p.title for p in s.places(text) if p.part == "Train" and p.title[:1].isdigit()][:4] == ["1. sample", "2. score", "3. advantages", "4. update"]


@pytest.mark.parametrize("old, new, kind, title", [
    ("Both PPO and", "Either PPO or", "description", ""),
    ("import re\nfrom dataclasses", "import re\nimport json\nfrom dataclasses", "infrastructure", ""),
    ('topk: int = setting(2, "passages per search"', 'topk: int = setting(5, "passages per search"', "setting", "rollout"),
    ("    # reward\n", "    # reward\n    bonus: float = setting(0.0, \"a bonus\", \"ours\")\n", "setting", "reward"),
    ("updates=10, lr=1e-6", "updates=1, lr=1e-6", "setting", "presets"),
    ("For example, <answer> Beijing </answer>.", "For example, <answer> Rome </answer>.", "prompt", ""),
    ('NOTICE = ("\\nThat was', 'NOTICE = ("\\nThis was', "environment", ""),
    ("total = cfg.structure_score + cfg.retrieval_score * retrieved", "total = cfg.structure_score", "reward", ""),
    ('return questions("train", 4096, cfg.seed)', 'return questions("train", 512, cfg.seed)', "data", "load_data"),
    ("tools, pool = {\"search\": ", "tools, pool = {\"find\": ", "infrastructure", "set-up"),
    ("pool, samples=group, temperature=cfg.temperature,", "pool, samples=group, temperature=0.7,", "sampling", "1. sample"),
    ('rewards_B = torch.tensor([p["total"] for p in parts]', 'rewards_B = torch.tensor([p["em"] for p in parts]', "reward", "2. score"),
    ("advantages_BT = losses.whiten(advantages_BT, steps_BT)", "pass", "advantage", "3. advantages"),
    ("clip_low=cfg.clip, clip_high=cfg.clip,", "clip_low=0.2, clip_high=0.28,", "loss", "4. update"),
    ('{**joined(done), "skipped_prompts": skipped})', "joined(done))", "infrastructure", "5. log"),
    ("    run.finish(", "    run.end(", "infrastructure", "end"),
    ("The results give the answer.", "Now I know.", "supervised warm-up", ""),
], ids=lambda x: x if isinstance(x, str) and len(x) < 20 and "\n" not in x else "")
def test_a_planted_difference_is_found_and_named(old, new, kind, title):
    assert changed(old, new) == [(kind, title)]


def test_a_file_beside_itself_has_no_difference():
    assert s.total(s.compare(TEXT, TEXT), "kind").keys() >= {"prompt", "reward", "loss"} and not any(s.total(s.compare(TEXT, TEXT), "kind").values())


def test_lines_find_the_partner_that_shares_most_of_their_words():
    a = ["lr: float = 1", "", "clip: float = 2  # both sides", "only here"]
    b = ["clip: float = 3  # both sides", "", "lr: float = 1"]
    assert s.align(["x", *a], ["x", *b]) == [(0, 0), (None, 1), (None, 2), (1, 3), (2, None), (3, None), (4, None)]  # the line that is alike, not the one that is like it
    assert s.align(a[2:], b[:2]) == [(0, 0), (1, None), (None, 1)]
    assert s.align([], ["x"]) == [(None, 0)] and s.align(["x"], []) == [(0, None)] and s.align([], []) == []
    assert s.marked("a = f(x, 1)", "a = g(x, 1)") == ("a = <mark>f</mark>(x, 1)", "a = <mark>g</mark>(x, 1)")
    assert s.marked("<b>", "<i>") == ("&lt;<mark>b</mark>&gt;", "&lt;<mark>i</mark>&gt;")


def test_counts_are_the_same_from_both_sides_and_blank_lines_do_not_count():
    other = (s.METHODS / "torl.py").read_text()
    assert sum(s.total(s.compare(TEXT, other), "part").values()) == sum(s.total(s.compare(other, TEXT), "part").values()) > 100
    assert s.Row((1, "  "), None).changed_lines == 0 and s.Row((1, "x"), (1, "y")).changed_lines == 2 and s.Row((1, "x"), (7, "x")).changed_lines == 0


class Shown(HTMLParser):
    """Text of the code cells, line numbers, labels; tags and addresses."""

    def __init__(self, page):
        super().__init__()
        self.cells, self.labels, self.tags, self.links, self.inside = [], [], set(), [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        attributes = dict(attributes)
        self.links += [attributes[a] for a in ("href", "src") if a in attributes]
        if tag in ("i", "code") or (tag == "p" and "label" in (attributes.get("class") or "")):
            self.inside = tag
            (self.labels if tag == "p" else self.cells).append([tag, ""])

    def handle_endtag(self, tag):
        self.inside = "" if tag == self.inside else self.inside

    def handle_data(self, data):
        if self.inside:
            (self.labels if self.inside == "p" else self.cells)[-1][1] += data


@pytest.fixture
def pages(tmp_path, monkeypatch):
    monkeypatch.setattr(s, "OUT", tmp_path / "diff")
    return tmp_path / "diff"


def test_the_page_is_one_closed_file_that_holds_both_files_whole(pages):
    path = s.write_pair("search_r1", "research")
    page = path.read_text()
    shown = Shown(page)
    assert path == pages / "search_r1-research.html" and not shown.tags & {"script", "iframe", "img", "object", "base"}
    assert all(link.startswith(("#", "data:,")) for link in shown.links) and {link[1:] for link in shown.links if link[0] == "#"} <= set(re.findall(r'id="([^"]+)"', page))
    style = re.search(r"<style>(.*?)</style>", page, re.S)[1]
    assert f"'sha256-{base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()}'" in page and ' style="' not in page and "url(" not in style
    lines = [(number, text) for (tag, number), (_, text) in zip(shown.cells, shown.cells[1:]) if tag == "i" and number]
    for name in ("search_r1", "research"):
        for number, text in enumerate((s.METHODS / f"{name}.py").read_text().splitlines(), 1):
            assert not text.strip() or (str(number), text) in lines
    kinds = {text.split()[0] for _, text in shown.labels}
    assert kinds >= {"setting", "prompt", "environment", "reward", "advantage", "loss", "infrastructure"}
    assert "setting rollout" in {text.strip() for _, text in shown.labels} and "reward reward" in {text.strip() for _, text in shown.labels}


def test_the_table_of_settings_holds_what_differs_and_nothing_else():
    a, b = s.load("search_r1"), s.load("r1_searcher")
    found = s.different_settings(a, b)
    assert {"clip_low", "seed", "micro_tokens", "keep_trajectories"}.isdisjoint(found) and {"lam", "stage1_reward", "weight_decay", "updates", "aggregation"} <= set(found)
    for f in set(a.settings) & set(b.settings):
        assert (f in found) == any(a.presets[p][f] != b.presets[p][f] for p in ("tiny", "smollm2", "paper"))
    table = s.settings_html(a, b)
    row = re.search(r"<tr><th scope=\"row\"><code>updates</code>.*?</tr>", table)[0]
    cells = re.findall(r'<td( class="\w+")? data-label="([^"]+)">([^<]*)</td>', row)
    assert [(label, value) for _, label, value in cells] == [
        ("tiny, Search-R1", "1"), ("tiny, R1-Searcher", "4"), ("smollm2, Search-R1", "1"), ("smollm2, R1-Searcher", "2"), ("paper, Search-R1", "10"),
        ("paper, R1-Searcher", "4"), ("paper_llama, Search-R1", "–"), ("paper_llama, R1-Searcher", "4"),
        ("source, Search-R1", a.settings["updates"]["source"]), ("source, R1-Searcher", b.settings["updates"]["source"])]


def test_the_distances_as_page_and_text(pages, monkeypatch):
    monkeypatch.setattr(s, "names", lambda: ["research", "search_r1", "torl"])
    path, text = s.write_table()
    n = sum(s.total(s.compare(TEXT, (s.METHODS / "research.py").read_text()), "part").values())
    first = text.split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in first[2:]] == ["research", "search_r1", "torl"] and first[2].split()[1:3] == ["·", str(n)] and first[3].split()[1] == str(n)
    page = path.read_text()
    assert f'href="research-search_r1.html" title="ReSearch, Search-R1: ' in page and f">{n}</a>" in page
    assert {p.name for p in pages.iterdir()} == {"index.html", "research-search_r1.html", "research-torl.html", "search_r1-torl.html"}


def test_a_wrong_name_is_answered_with_the_nearest():
    with pytest.raises(UserError, match="'serch_r1'; did you mean search_r1"):
        s.command(["serch_r1", "research"])
    with pytest.raises(UserError, match="beside itself"):
        s.command(["torl", "torl"])
    with pytest.raises(UserError, match="give two methods"):
        s.command(["torl"])
    with pytest.raises(UserError, match="give two methods"):  # make diff A=torl
        s.command(["torl", ""])


SAME = [("Train", "1."), ("Train", "5."), ("Train", "end")]


@pytest.mark.parametrize("name", ["otc", "torl", "retool", "toolrl", "tool_n1", "research", "deep_researcher"])
def test_where_no_paper_differs_the_files_do_not(name):
    """Sampling, logging and the end are the same words. What a method has to add there is one line, and each is named here."""
    own = {("otc", "1."): ["stop=stop"], ("retool", "1."): ["stop=stop"], ("otc", "end"): ["if sandbox:", "sandbox.close()"], ("torl", "end"): ["sandbox.close()"], ("retool", "end"): ["sandbox.close()"],
           ("research", "5."): ["floor_PG = ", "floor_groups"], ("deep_researcher", "1."): ["sync()", "pool, samples", "seed=cfg.seed"]}
    left, right = ({p.key: p for p in s.places((s.METHODS / f"{m}.py").read_text())} for m in ("search_r1", name))
    for key in SAME:
        a, b = ([text for _, text in side[key].lines] for side in (left, right))
        for i, j in s.align(a, b):
            if j is None or i is None or a[i] != b[j]:
                line = (b[j] if j is not None else a[i]).strip()
                assert not line or any(word in line for word in own.get((name, key[1]), [])), f"methods/{name}.py, {key[1]}: {line}"
