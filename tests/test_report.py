"""The report page: holds the run, is one closed file, and survives hostile texts, half-written files and long runs."""

import base64
import hashlib
import json
import re
import xml.etree.ElementTree as ElementTree
from fnmatch import fnmatchcase
from html.parser import HTMLParser

import pytest

from common import UserError, report, run

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)><!-- {{data}} {{csp}} & \"' \u2028\u2029 \ud800 \x00 \u202e ]]>"


def trajectory(step=1, split="train", group=0, sample=0, total=1.0, tokens=("<answer>", " Quell", "</answer>"), **changes):
    n = len(tokens)
    row = {
        **{"step": step, "split": split, "example": "q1", "question": "Where?", "answers": ["Quell"], "group": group, "sample": sample},
        **{"prompt": "Answer: Where?", "reward": {"em": total, "total": total}, "advantage": 0.5, "stop": "answer"},
        "calls": [{"name": "search", "arguments": "Quell", "outcome": "ok", "wait_s": 0.0, "run_s": 0.001}],
        **{"tokens": list(tokens), "author": "M" * n, "mask": "1" * n, "logprob": [-0.25] * n, "ratio": [1.0] * n},
    }
    return row | changes


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


SUMMARY = {
    **{"method": "search_r1", "preset": "tiny", "seed": 0, "steps": 3, "wall_s": 90.0, "metric": "em", "before": 0.125, "after": 0.9375},
    **{"interval_before": [0.1, 0.15], "interval_after": [0.91, 0.96], "calls_before": 0.5, "calls_after": 1.5, "n": 200},
}
METRIC_LINES = [
    {"kind": "warmup", "step": 0, "wall_s": 0.5, "loss": 2.0},
    {"kind": "eval", "step": 0, "wall_s": 1.0, "n": 200, "em": 0.125, "em_1hop": 0.2, "calls": 0.5},
    *({"kind": "train", "step": s, "wall_s": 20.0 * s, "reward": s / 4, "reward_em": s / 4, "calls": 1.0, "lr": 3e-4} for s in (1, 2, 3)),
    {"kind": "eval", "step": 3, "wall_s": 85.0, "n": 200, "em": 0.9375, "em_1hop": 0.99, "calls": 1.5},
]


@pytest.fixture
def run_dir(tmp_path):
    field = {"value": 3e-4, "unit": "", "source": "code train_grpo.sh", "help": "learning rate"}
    config = {"method": "search_r1", "preset": "tiny", "seed": 0, "fields": {"lr": field}}
    config |= {"versions": {"torch": "2.13.0"}, "argv": ["--seed", "0"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    (tmp_path / "metrics.jsonl").write_text(lines(METRIC_LINES))
    (tmp_path / "trajectories.jsonl").write_text(lines(trajectory(step=s, sample=k) for s in (1, 2, 3) for k in range(2)))
    return tmp_path


class Tags(HTMLParser):
    """Collects tags with attributes, and the text of script and style."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.tags, self.raw, self.text = [], {}, ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.cdata_elem:
            tag, attrs = self.tags[-1]
            key = attrs.get("id", tag)
            self.raw[key] = self.raw.get(key, "") + data
        else:
            self.text += data


def build(run_dir):
    page = report.write_report(run_dir).read_text(encoding="utf-8")
    tags = Tags(page)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return page, tags, json.loads(tags.raw["data"], parse_constant=refuse)


def test_page_holds_the_run(run_dir):
    _, tags, data = build(run_dir)
    assert "search_r1, preset tiny, seed 0: em on held-out questions went from 0.125 to 0.938" in tags.text
    assert "(95 % interval 0.91 to 0.96), in 3 steps and 1.5 minutes." in tags.text
    assert data["cards"][0] == {
        **{"label": "held-out em, 200 questions", "value": "0.125 → 0.938"},
        "note": "95 % interval: before 0.1 to 0.15; after 0.91 to 0.96",
    }
    assert {"label": "held-out calls", "value": "0.5 → 1.5", "note": run.METRICS["calls"]} in data["cards"]
    assert data["notices"] == []
    assert data["config"]["fields"]["lr"]["source"] == "code train_grpo.sh"
    assert data["arguments"] == "--seed 0"
    row = data["trajectories"][0]
    assert [data["pieces"][i] for i in row["tokens"]] == ["<answer>", " Quell", "</answer>"]
    assert data["prompts"][row["prompt"]] == "Answer: Where?"
    assert (row["logprob"], row["ratio"], row["advantage"], row["author"], row["mask"]) == ([-0.25] * 3, [1] * 3, 0.5, "MMM", "111")
    assert row["counts"] == {"M": 3, "T": 0, "N": 0}
    assert data["shown"] == "6 of 6 trajectories in trajectories.jsonl are shown."


def test_plots_pair_training_with_held_out_and_keep_what_they_do_not_know(run_dir):
    extra = {"kind": "train", "step": 4, "wall_s": 88.0, "brand_new": 1, "sample_s": 1.0, "update_s": 2.0}
    extra |= {"words": "no number", "flag": True}
    (run_dir / "metrics.jsonl").write_text(lines([*METRIC_LINES, extra]))
    _, _, data = build(run_dir)
    groups = {group["title"]: {plot["title"]: plot for plot in group["plots"]} for group in data["plots"]}
    headline = groups["Learning"]["em"]
    assert next(iter(groups["Learning"])) == "em"
    assert [(s["kind"], s["name"], s["label"]) for s in headline["series"]] == [("train", "em", "training"), ("eval", "em", "held-out")]
    assert data["curves"]["train"]["values"]["em"][:3] == [0.25, 0.5, 0.75]  # logged as reward_em
    assert headline["intervals"] == [{"end": 0, "low": 0.1, "high": 0.15}, {"end": -1, "low": 0.91, "high": 0.96}]
    assert headline["meanings"] == [{"names": "", "text": run.METRICS["em"]}]
    assert [s["name"] for s in groups["Time"]["seconds per step"]["series"]] == ["sample_s", "update_s"]
    assert groups["More"]["brand_new"]["meanings"][0]["text"] == "(not described)"
    assert "loss" in groups["warmup"]
    assert "words" not in json.dumps(data["plots"]) and "flag" not in json.dumps(data["plots"])


def test_plotted_names_are_names_that_runs_log():
    for entry in (entry for entries in report.PLOTS.values() for entry in entries):
        for pattern in entry[1:] if isinstance(entry, tuple) else (entry,):
            assert any(fnmatchcase(name, pattern) or fnmatchcase(pattern, name) for name in run.METRICS), pattern


def test_hostile_text_stays_text(run_dir):
    config = json.loads((run_dir / "config.json").read_text())
    config["method"] = config["fields"]["lr"]["help"] = config["argv"][0] = HOSTILE
    (run_dir / "config.json").write_text(json.dumps(config))
    (run_dir / "summary.json").write_text(json.dumps(SUMMARY | {"method": HOSTILE, "preset": HOSTILE}))
    call = {"name": HOSTILE, "arguments": HOSTILE, "outcome": HOSTILE, "wait_s": 0.0, "run_s": 0.0}
    texts = dict.fromkeys(("question", "prompt", "stop", "example", "split"), HOSTILE)
    row = trajectory(tokens=[HOSTILE, "b"], answers=[HOSTILE], calls=[call], **texts)
    row["reward"][HOSTILE] = 1.0
    (run_dir / "trajectories.jsonl").write_text(lines([row]))
    (run_dir / "metrics.jsonl").write_text(lines([*METRIC_LINES, {"kind": HOSTILE, "step": 1, "wall_s": 1.0, HOSTILE: 1.0}]))
    page, tags, data = build(run_dir)
    assert [tag for tag, _ in tags.tags].count("script") == 2 and "img" not in [tag for tag, _ in tags.tags]
    assert page.count("<script") == page.count("</script") == 2 and "<!--" not in page
    assert HOSTILE.replace("\ud800", "�").replace("\x00", "�") in tags.text.replace("\x00", "�").replace("\ud800", "�")
    shown = data["trajectories"][0]
    assert data["pieces"][shown["tokens"][0]] == shown["question"] == shown["answers"][0] == shown["calls"][0]["arguments"] == HOSTILE
    assert data["prompts"] == [HOSTILE] and data["curves"][HOSTILE]["values"][HOSTILE] == [1.0]


def test_page_loads_nothing_and_its_policy_allows_only_its_own_code(run_dir):
    page, tags, _ = build(run_dir)
    assert not re.search(r"https?:(?!//www\.w3\.org/2000/svg)|@import|url\(|fetch\(|XMLHttpRequest|innerHTML|document\.write|eval\(", page)
    for tag, attrs in tags.tags:
        assert not any(name.startswith("on") or name == "style" for name in attrs), (tag, attrs)
        assert "src" not in attrs and attrs.get("href", "#").startswith(("#", "data:,")), (tag, attrs)
    policy = next(attrs["content"] for tag, attrs in tags.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy
    for kind in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(tags.raw[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy


def test_run_that_is_still_going_on(run_dir):
    for name in ("summary.json", "trajectories.jsonl"):
        (run_dir / name).unlink()
    _, tags, data = build(run_dir)
    assert "em on held-out questions went from 0.125 to 0.938, in 3 steps and 1.42 minutes so far." in tags.text
    assert data["trajectories"] == [] and data["metric"] == "em"
    assert any("No summary.json yet" in notice for notice in data["notices"])
    (run_dir / "metrics.jsonl").unlink()
    _, tags, data = build(run_dir)
    assert "no evaluation yet" in tags.text and data["plots"] == []
    (run_dir / "metrics.jsonl").write_text("")
    assert build(run_dir)[2]["plots"] == []


def test_unreadable_lines_are_left_out_and_named(run_dir):
    for name in ("metrics.jsonl", "trajectories.jsonl"):
        with (run_dir / name).open("ab") as file:
            file.write('{"step": 4, "kind": "träin'.encode()[:-3])
    _, _, data = build(run_dir)
    assert data["notices"] == [
        f"{name}: the last line ({n}) is incomplete, as when a run is writing or was killed; left out."
        for name, n in (("metrics.jsonl", 7), ("trajectories.jsonl", 7))
    ]
    rows = [trajectory(), trajectory(mask="1"), trajectory(calls=None)]
    (run_dir / "trajectories.jsonl").write_text(lines(rows[:1]) + "[]\n" + lines(rows[1:]))
    (run_dir / "metrics.jsonl").write_text(lines([{"step": 1}, *METRIC_LINES, METRIC_LINES[-1]]))
    _, _, data = build(run_dir)
    assert data["notices"] == [
        "metrics.jsonl: line 1 is without step or kind, left out.",
        "metrics.jsonl: 1 lines repeat a step, as after a resume; the last line of a step is drawn.",
        "trajectories.jsonl: line 2 is not a JSON object, left out.",
        "trajectories.jsonl: lines 3, 4 are without a needed field, or with lists of different lengths; left out.",
    ]
    assert len(data["trajectories"]) == 1


def test_values_that_are_not_finite_become_null(run_dir):
    nan, inf = float("nan"), float("inf")
    last = {"kind": "train", "step": 4, "wall_s": nan, "reward": inf, "lr": 1e-4, "kl": nan}
    (run_dir / "metrics.jsonl").write_text(lines([*METRIC_LINES, last]))
    row = trajectory(logprob=[nan, -inf, -1.0], ratio=[nan, inf, None], advantage=nan, reward={"total": nan})
    (run_dir / "trajectories.jsonl").write_text(lines([row]))
    (run_dir / "summary.json").write_text(json.dumps(SUMMARY | {"after": nan, "interval_after": [nan, nan]}))
    config = json.loads((run_dir / "config.json").read_text())
    config["fields"]["lr"]["value"] = [nan, {"a": inf}]
    (run_dir / "config.json").write_text(json.dumps(config))
    _, tags, data = build(run_dir)  # build refuses NaN in the page's JSON
    train, row = data["curves"]["train"], data["trajectories"][0]
    assert train["values"]["reward"][-1] is None and train["wall_s"][-1] is None and "kl" not in train["values"]
    assert (row["logprob"], row["ratio"], row["advantage"], row["reward"]) == ([None, None, -1], [None] * 3, None, {"total": None})
    assert data["config"]["fields"]["lr"]["value"] == [None, {"a": None}]
    assert "went from 0.125 to none, in 3 steps" in tags.text
    assert [bar["end"] for bar in data["plots"][0]["plots"][0]["intervals"]] == [0]


def test_long_run_keeps_a_bounded_page_with_the_telling_rows(run_dir):
    def rows():
        for step in range(41):
            for sample in range(24):
                pieces = [f" word{step}-{sample}-{i % 97}" for i in range(600)]
                numbers = {"logprob": [-i / 7 for i in range(600)], "ratio": [1 + i / 1e3 for i in range(600)]}
                yield trajectory(step=step, sample=sample, total=sample / 23, tokens=pieces, **numbers)

    (run_dir / "trajectories.jsonl").write_text(lines(rows()))
    steps = [{"kind": "train", "step": s, "wall_s": s / 3, **{f"metric_{i}": s / 7 + i for i in range(40)}} for s in range(3000)]
    (run_dir / "metrics.jsonl").write_text(lines(steps))
    page, _, data = build(run_dir)
    assert len(page.encode()) < 5_000_000
    rows = data["trajectories"]
    assert 41 * 2 < len(rows) < 41 * 24
    assert data["shown"].startswith(f"{len(rows)} of 984 trajectories in trajectories.jsonl are shown: as many as fit")
    for step in range(41):  # of every step at least the best and the worst
        assert {0.0, 1.0} <= {row["reward"]["total"] for row in rows if row["step"] == step}
    assert all(sum(row["step"] == step for row in rows) == 24 for step in (0, 40))  # the ends in full
    assert len(data["curves"]["train"]["step"]) == report.CURVE_ROWS
    assert data["curves"]["train"]["step"][0] == 0 and data["curves"]["train"]["step"][-1] == 2999
    assert any("1,500 of 3,000 steps are drawn" in notice for notice in data["notices"])


def test_long_texts_are_cut_and_say_so(run_dir):
    n = 9000
    row = trajectory(tokens=[f"t{i}" for i in range(n)], prompt="p" * 30_000, advantage=[i / n for i in range(n)])
    row["calls"][0]["arguments"] = "x" * 10_000
    (run_dir / "trajectories.jsonl").write_text(lines([row]))
    _, _, data = build(run_dir)
    shown = data["trajectories"][0]
    assert shown["cut"] == {"at": 4000, "count": 3000} and shown["counts"]["M"] == n
    assert {len(shown[key]) for key in ("tokens", "author", "mask", "logprob", "ratio", "advantage")} == {6000}
    assert [data["pieces"][shown["tokens"][i]] for i in (3999, 4000, 5999)] == ["t3999", "t7000", "t8999"]
    assert data["prompts"][0].endswith("… [10,000 more characters not shown]")
    assert shown["calls"][0]["arguments"].endswith("… [6,000 more characters not shown]")


def test_order_begins_with_the_ends(run_dir):
    index = [{"offset": 10 * step + k, "split": "train", "step": step, "total": k % 3} for step in range(9) for k in range(4)]
    order = list(report._order(index))
    assert sorted(order) == sorted(row["offset"] for row in index)
    assert order[:3] == [0, 80, 2]  # first step, last step, best of the first step
    assert [report._level(i, 9) for i in range(9)] == [0, 3, 2, 3, 1, 3, 2, 3, 0]


def test_folders_that_are_no_run_are_refused(run_dir, tmp_path, capsys):
    with pytest.raises(UserError, match=r"nowhere/config.json is missing: .*nowhere is not the folder of a run"):
        report.write_report(tmp_path / "nowhere")
    (run_dir / "summary.json").write_text('{"method": ')
    with pytest.raises(UserError, match=r"summary.json is not JSON .*delete it"):
        report.write_report(run_dir)
    assert not (run_dir / "report.html").exists()
    for arguments, message in (([], "usage: python -m common.report RUN_DIR"), ([str(tmp_path / "nowhere")], "config.json is missing")):
        with pytest.raises(SystemExit) as stop:
            run.main(lambda arguments=arguments: report._command(arguments))
        assert stop.value.code == 2 and message in capsys.readouterr().err


def seeds(tmp_path, curves):
    for i, points in enumerate(curves):
        folder = tmp_path / f"seed{i}"
        folder.mkdir()
        rows = [{"kind": "eval", "step": s, "wall_s": 60.0 * s, "em": v} for s, v in points]
        (folder / "metrics.jsonl").write_text(lines([*rows, {"kind": "train", "step": 1, "wall_s": 1.0, "reward": 0.5}]))
        yield folder


def test_compare_curves_draws_mean_and_band(tmp_path):
    a, b, c = seeds(tmp_path, [[(0, 0.0), (10, 1.0)], [(0, 0.0), (5, 0.0), (10, 0.5)], [(0, 0.5), (10, float("nan")), (20, 0.5)]])
    out = report.compare_curves([("masked <b>", a), ("masked <b>", b), ("not \x00 masked", c)], "em", tmp_path / "out.svg", x="steps")
    svg = ElementTree.parse(out).getroot()
    paths = {path.get("class"): path.get("d") for path in svg.iter("{http://www.w3.org/2000/svg}path") if "h24" not in path.get("d")}
    # x: 0..20 on 56..704; y: 0..1 on 340..40. At step 5 seed a is interpolated to 0.5: mean 0.25, band 0 to 0.5. The runs end at 10.
    assert paths["l c0"] == "M56.0 340.0L218.0 265.0L380.0 115.0"
    assert paths["b c0"] == "M56.0 340.0L218.0 190.0L380.0 40.0L380.0 190.0L218.0 340.0L56.0 340.0Z"
    assert paths["l c1"] == "M56.0 190.0L704.0 190.0" and "b c1" not in paths
    texts = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert "masked <b> (2 seeds, band: lowest to highest)" in texts and "not � masked (1 seed)" in texts and "steps" in texts
    assert "script" not in out.read_text() and not re.search(r"https?://(?!www\.w3\.org/2000/svg)", out.read_text())


def test_compare_curves_refuses_what_it_cannot_draw(tmp_path):
    a, b = seeds(tmp_path, [[(0, 0.0), (10, 1.0)], [(20, 0.0), (30, 0.5)]])
    for arguments, message in (
        (dict(runs=[("a", a)], metric="f1"), r'metrics.jsonl has no "f1" in its "eval" lines; it has: em\.'),
        (dict(runs=[("a", a)], metric="em", kind="train"), r'has no "em" in its "train" lines; it has: reward\.'),
        (dict(runs=[("a", a)], metric="em", x="hours"), r'x is "hours"; use "minutes" or "steps"'),
        (dict(runs=[("a", a), ("a", b)], metric="em"), r'The runs of "a" have no minutes in common'),
        (dict(runs=[("a", tmp_path / "none")], metric="em"), r'has no "em" in its "eval" lines; it has: none\.'),
    ):
        with pytest.raises(UserError, match=message):
            report.compare_curves(out_svg=tmp_path / "out.svg", **arguments)
    assert not (tmp_path / "out.svg").exists()
