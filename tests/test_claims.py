"""The list of claims, and what is said of them from fake runs whose numbers are known."""
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from common import UserError, claims as c, experiments as x
from common.claims import Arm, Claim, held_out, samples
from common.run import METRICS
from tests.test_methods import FILES

INF = math.inf


def fake_run(job, train=(), evals=(), **more):
    """A finished run: `train` and `evals` are the metrics of its steps, from 1 and from 0 on."""
    job.folder.mkdir(parents=True)
    rows = [{"kind": "train", "step": s, "wall_s": s, **values} for s, values in enumerate(train, 1)]
    rows += [{"kind": "eval", "step": s, "wall_s": s, **values} for s, values in enumerate(evals)]
    rows += [{"kind": kind, "step": s, "wall_s": s, **values} for kind, steps in more.items() for s, values in enumerate(steps)]
    (job.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (job.folder / "summary.json").write_text(json.dumps({"wall_s": 90.0}))
    job.record.write_text(json.dumps({**x.asked(job), "done": True}))


@pytest.fixture
def two_arms(tmp_path, monkeypatch):
    """Claims of a world with two arms, five seeds each, in which the first is better by 0.1, give or take."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "methods").symlink_to(Path(c.__file__).parents[1] / "methods")
    monkeypatch.setattr(c, "ARMS", {"torl": {"with": Arm({"steps": 3}), "without": Arm({"steps": 3, "max_turns": 0})}})
    for seed, (a, b) in enumerate([(0.80, 0.70), (0.85, 0.74), (0.78, 0.69), (0.90, 0.79), (0.82, 0.73)]):
        fake_run(c.job("torl", "with", seed), [{"calls": 1.0 + 0.1 * s, "step_s": 2.0} for s in range(3)], [{"accuracy": 0.2}, {"accuracy": a}])
        fake_run(c.job("torl", "without", seed), [{"calls": None, "step_s": 1.0}] * 3, [{"accuracy": 0.2}, {"accuracy": b}])

    def claim(arms=("with", "without"), measure=held_out("accuracy"), expects="more", margin=0.0, **more):
        return Claim("id", "torl", "A <b> is better & so on.", "12 and 7", "arXiv 1234.56789", arms, measure, expects, margin, **more)
    return claim


# ---- the rule ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("values,region,expected", [
    ([0.1, 0.11, 0.09], (0, INF), "holds"), ([-0.1, -0.11, -0.09], (0, INF), "fails"), ([-0.1, 0.2, 0.0], (0, INF), "undecided"),
    ([-0.1, -0.11, -0.09], (-INF, 0), "holds"), ([0.1, 0.11, 0.09], (-INF, 0), "fails"),
    ([0.01, -0.01, 0.0], (-0.05, 0.05), "holds"), ([0.1, 0.11, 0.09], (-0.05, 0.05), "fails"), ([0.05, 0.04, 0.06], (-0.05, 0.05), "undecided"),
    ([-0.5, -0.51, -0.49], (-INF, 0.05), "holds"), ([0.2, 0.21, 0.19], (-INF, 0.05), "fails"), ([0.2, 0.21, 0.19], (-0.05, INF), "holds"),
    ([0.3], (0, INF), "undecided"), ([], (0, INF), "not run"),  # one seed has no interval
    ([0.0, 0.0, 0.0], (0, INF), "undecided"), ([0.0, 0.0], (-0.05, 0.05), "holds"), ([0.1, 0.1], (0, INF), "holds"),  # no spread at all
])
def test_verdicts(values, region, expected):
    assert c.verdict(values, region) == expected


def test_the_region_is_that_of_the_claim(two_arms):
    assert [two_arms(expects=e, margin=0.03).region for e in ("more", "less", "same", "no more", "no less")] == [
        (0, INF), (-INF, 0), (-0.03, 0.03), (-INF, 0.03), (-0.03, INF)]
    assert [c.meaning(two_arms(expects=e, margin=0.03)) for e in ("more", "less", "same", "no more", "no less")] == [
        "above 0", "below 0", "between -0.03 and 0.03", "below 0.03", "above -0.03"]


# ---- what is measured -------------------------------------------------------------------------------------------------
ROWS = {"train": {s: {"em": e, "calls": calls} for s, (e, calls) in enumerate([(0.0, 1.0), (0.2, None), (0.5, 2.0), (0.8, 2.0), (0.9, 3.0), (0.9, None)], 1)},
        "eval": {0: {"em": 0.1, "calls_1hop": 1.0, "calls_2hop": 1.0}, 6: {"em": 0.7, "calls_1hop": 1.0, "calls_2hop": 1.8, "f1": None}},
        "transfer": {0: {"accuracy": 0.2}, 6: {"accuracy": 0.3}}}


@pytest.mark.parametrize("measure,expected", [
    (samples("em", 3, 5), (0.5 + 0.8 + 0.9) / 3), (samples("calls", 1, 4), 5 / 3), (held_out("em"), 0.7),  # a step without a value does not count
    (c.rise("em", 6, 2), 0.9 - 0.1), (c.gain("em"), 0.6), (c.gain("accuracy", "transfer"), 0.1), (c.gap("calls_2hop", "calls_1hop"), 0.8),
    (c.sample_gap("calls", "em", 3, 5), 7 / 3 - 2.2 / 3), (c.steps_until("em", 0.5, 6), 4.0), (c.steps_until("em", 0.95, 6), 7.0),
    (c.unsteady("em", 3, 6), 0.15275252316519466),  # of 0.3, 0.1, 0.0
])
def test_measures(measure, expected):
    assert measure.of(ROWS) == pytest.approx(expected) and measure.text


def test_the_course_leaves_out_the_start_and_counts_every_later_evaluation():
    rows = {"eval": {0: {"em": 1.0, "f1": 0.5}, 2: {"em": 0.1, "f1": 0.5}, 4: {"em": 0.6, "f1": None}, 10: {"em": 0.8, "f1": 0.5}}}
    assert c.course("em").of(rows) == pytest.approx(0.5)
    assert c.course("f1").of(rows) != c.course("f1").of(rows)  # NaN: one evaluation lacks it


def test_a_missing_value_is_no_number_and_a_missing_step_an_error():
    assert math.isnan(samples("calls", 6, 6).of(ROWS)) and math.isnan(held_out("f1").of(ROWS)) and math.isnan(held_out("none").of(ROWS))
    with pytest.raises(UserError, match=r"a run has no training step 7, which a claim measures \(em, steps 5 to 7\)"):
        samples("em", 5, 7).of(ROWS)


# ---- the list ---------------------------------------------------------------------------------------------------------
def test_the_list_covers_ten_methods_and_names_what_exists():
    assert {claim.method for claim in c.CLAIMS} == set(c.ARMS) == set(c.MINUTES) == set(c.UNTESTED) <= {p.stem for p in FILES} and len(c.ARMS) == 10
    assert len(c.CLAIMS) >= 20 and len({claim.id for claim in c.CLAIMS}) == len(c.CLAIMS) and sum(c.MINUTES.values()) <= 360
    for claim in c.CLAIMS:
        assert set(claim.arms) <= set(c.ARMS[claim.method]) and 1 <= len(set(claim.arms)) == len(claim.arms) <= 2, claim.id
        assert claim.says.endswith(".") and claim.paper and claim.source, claim.id
        assert (claim.margin > 0) == (claim.expects in ("same", "no more", "no less")), claim.id
    for method, arms in c.ARMS.items():
        used = {name for claim in c.CLAIMS if claim.method == method for name in claim.arms} | {arm.needs for arm in arms.values()}
        assert set(arms) == used - {""} and all(arm.needs in ("", *arms) for arm in arms.values()), method
        assert len({c.job(method, name, 0).folder for name in arms}) == len(arms), method


@pytest.mark.parametrize("method", c.ARMS)
def test_every_arm_has_flags_that_its_method_has_and_differs_from_the_others(method):
    seen = {}
    for name in c.ARMS[method]:
        job = c.job(method, name, 3)
        settings = x.settings_of(job)  # an unknown flag ends this
        assert settings["preset"] == "tiny" and settings["threads"] == 1 and settings["seed"] == 3 and settings["name"].startswith("claims-")
        assert not any("{" in str(v) for v in job.argv()), name
        own = json.dumps({k: v for k, v in settings.items() if k != "name"}, sort_keys=True)
        assert own not in seen, (name, seen.get(own))
        seen[own] = name


def test_every_measure_fits_into_the_steps_of_its_arms():
    """A window that begins after an arm's last step would be found only hours later."""
    for claim in c.CLAIMS:
        for arm in claim.arms:
            steps = x.settings_of(c.job(claim.method, arm, 0))["steps"]

            class AnyRow(dict):
                def get(self, name, default=None):
                    plain = name.removeprefix("reward_")
                    assert name in METRICS or plain in METRICS or any(plain.startswith(k[:-1]) for k in METRICS if k.endswith("*")), (claim.id, name)
                    return 0.5
            rows = {"train": {s: AnyRow() for s in range(1, steps + 1)}, **{kind: {0: AnyRow(), steps: AnyRow()} for kind in ("eval", "transfer")}}
            assert math.isfinite(claim.measure.of(rows)), claim.id


# ---- results and pages ------------------------------------------------------------------------------------------------
def test_differences_are_taken_seed_by_seed(two_arms):
    r = c.result(two_arms(), 5)
    assert r.arms["with"] == {0: 0.80, 1: 0.85, 2: 0.78, 3: 0.90, 4: 0.82} and list(r.differences.values()) == pytest.approx([0.10, 0.11, 0.09, 0.11, 0.09])
    assert r.verdict == "holds" and c.result(two_arms(expects="less"), 5).verdict == "fails" and c.result(two_arms(expects="same", margin=0.1), 5).verdict == "undecided"
    assert c.result(two_arms(), 1).verdict == "undecided"
    change = c.result(two_arms(arms=("with",), measure=c.rise("calls", 3, 1)), 5)
    assert list(change.differences.values()) == pytest.approx([0.2] * 5) and change.verdict == "holds"
    assert c.result(two_arms(measure=samples("calls", 1, 3)), 5).verdict == "not run"  # the second arm makes no calls: nothing to subtract
    c.job("torl", "without", 2).record.unlink()  # as a run that is not finished
    assert list(c.result(two_arms(), 5).differences) == [0, 1, 3, 4]


def test_the_pages(two_arms, monkeypatch, capsys):
    monkeypatch.setattr(c, "CLAIMS", [two_arms(), two_arms(expects="same", margin=0.02, note="Another <i>paper</i> says no."), two_arms(measure=samples("calls", 1, 3))])
    monkeypatch.setattr(c, "MINUTES", {"torl": 1}), monkeypatch.setattr(c, "UNTESTED", {"torl": ["Too <large>."]})
    c.command(["--table"])
    page, text, numbers = Path("runs/claims/claims.html").read_text(), Path("runs/claims/claims.md").read_text(), json.loads(Path("runs/claims/claims.json").read_text())
    assert "1 hold, 1 fail, 1 are not run" in page and page.count('<span class="verdict holds">holds</span>') == 1
    assert "<script" not in page and "<b> is" not in page and "A &lt;b&gt; is better &amp; so on." in page and "Too &lt;large&gt;." in page and "&lt;i&gt;paper" in page
    assert "http" not in page.split("</head>")[1] and "planned 1 core minutes with five seeds, the finished runs took 15" in page
    for arm in ("with", "without"):
        for seed in range(5):
            c.job("torl", arm, seed).record.unlink()
    c.command(["--table"])  # nothing is finished: a page all the same
    assert "3 are not run" in Path("runs/claims/claims.html").read_text()
    (first, second, *_) = [line for line in text.split("\n") if line.startswith("| A <b>")]
    assert first.startswith("| A <b> is better & so on. | 12 and 7 (arXiv 1234.56789) | accuracy on held-out questions after training | with 0.830 (0.772 to 0.888); without 0.730 (")
    assert first.endswith("| 0.100 (0.088 to 0.112) | above 0 | 5 | holds |")
    assert "so on. Another <i>paper</i> says no. |" in second and second.endswith("| between -0.02 and 0.02 | 5 | fails |")
    assert text.endswith("Also claimed, not tested here:\n\n- Too <large>.\n")
    assert numbers[0]["differences"]["3"] == pytest.approx(0.11) and [n["verdict"] for n in numbers] == ["holds", "fails", "not run"]
    assert "open runs/claims/claims.html" in capsys.readouterr().out


def test_what_was_measured_is_kept_and_shown_where_nothing_was_run(two_arms, monkeypatch):
    monkeypatch.setattr(c, "CLAIMS", [two_arms(), replace(two_arms(measure=samples("calls", 1, 3)), id="none")])
    monkeypatch.setattr(c, "MINUTES", {"torl": 1}), monkeypatch.setattr(c, "UNTESTED", {"torl": []})
    Path("docs").mkdir()
    with pytest.raises(UserError, match="README.md lacks the lines"):
        Path("README.md").write_text("no marks")
        c.command(["--table", "--write"])
    Path("README.md").write_text(f"before\n{c.MARKS[0]}\nstale\n{c.MARKS[1]}\nafter\n")
    c.command(["--table", "--write"])
    readme, record, whole = Path("README.md").read_text(), json.loads(Path("docs/claims.json").read_text()), Path("docs/claims.md").read_text()
    assert readme.startswith(f"before\n{c.MARKS[0]}\n| method |") and readme.endswith(f"{c.MARKS[1]}\nafter\n") and "stale" not in readme
    assert "| torl | A <b> is better & so on. | 12 and 7 | accuracy on held-out questions after training: with 0.830 (0.772 to 0.888); without 0.730 (" in readme and "1 hold, 1 are not run." in whole
    assert "0.100 (0.088 to 0.112) | above 0 | 5 | holds |\n\n1 more claims are listed and not run on these weights yet.\n" in readme
    assert record["arms"]["torl / without"] == {"flags": "--steps 3 --max-turns 0", "minutes": {str(s): 1.5 for s in range(5)}}
    before = c.result(two_arms(), 5)
    for arm in ("with", "without"):  # a clone of the repository: no runs
        for seed in range(5):
            c.job("torl", arm, seed).record.unlink()
    assert c.result(two_arms(), 5) == before and list(c.result(two_arms(), 2).differences) == [0, 1] and c.minutes_of("torl", "with", 5)[4] == 1.5
    asked = []
    monkeypatch.setattr(c, "run_all", lambda jobs, **how: asked.append([(j.name, j.seed) for j in jobs]) or [])
    monkeypatch.setattr(c, "write_data", lambda seeds: None)
    c.command(["torl", "--missing", "--seeds", "6"]), c.command(["torl", "--seeds", "1"])
    assert asked == [[("claims-with-seed5", 5), ("claims-without-seed5", 5)], [("claims-with-seed0", 0), ("claims-without-seed0", 0)]]
    c.command(["--table", "--write", "--seeds", "1"])  # nothing kept is lost
    assert json.loads(Path("docs/claims.json").read_text()) == record and Path("README.md").read_text() == readme
    assert c.result(two_arms(measure=held_out("em")), 5).verdict == "not run"  # another measure
    monkeypatch.setitem(c.ARMS["torl"], "without", Arm({"steps": 3, "max_turns": 0, "lr": 1e-3}))
    assert c.result(two_arms(), 5).arms["without"] == {}  # other flags
    monkeypatch.undo(), monkeypatch.chdir(Path(c.__file__).parents[1])
    monkeypatch.setattr(c, "base_model", lambda model: "other weights")
    assert c.recorded() == {"base": "other weights", "arms": {}, "claims": {}}


def test_the_tables_of_the_repository_are_those_of_the_record(monkeypatch):
    monkeypatch.setattr(c, "state", lambda job: "new")  # whatever runs lie here besides
    assert c.with_table(Path("README.md").read_text()) == Path("README.md").read_text(), 'make claims ARGS="--table --write"'
    assert Path("docs/claims.md").read_text() == c.record_page()


def test_the_plan_counts_runs_and_commands_are_checked(two_arms, monkeypatch, capsys):
    monkeypatch.setattr(c, "MINUTES", {"torl": 10}), monkeypatch.setattr(c, "CLAIMS", [two_arms()])
    c.command(["torl", "--seeds", "10", "--plan"])
    assert "| torl | 1 | 2 | 20 | 10 | 20 |" in capsys.readouterr().out  # five seeds of each are there
    for words, message in ((["troll"], r"METHOD=troll: no claims about it; did you mean torl\?"), (["--lr", "1"], r"--lr: no such flag")):
        with pytest.raises(UserError, match=message):
            c.command(words)
    assert not Path("runs/claims").exists()


def test_the_files_that_arms_read(tmp_path, monkeypatch):
    from common.data import load_examples
    from common.search import open_retriever
    from common.tiny.world import questions
    monkeypatch.chdir(tmp_path)
    c.write_data(2)
    one, two = load_examples("runs/claims/one_hop-seed1.jsonl"), load_examples("runs/claims/two_hop-seed1.jsonl")
    assert Counter(e.meta["hops"] for e in one + two) == {1: 1024, 2: 1024} and {e.meta["world"] for e in one} == {e.meta["world"] for e in questions("train", 64, 1)}
    assert not {e.meta["world"] for e in one} & {e.meta["world"] for e in questions("eval", 64)}
    when = Path("runs/claims/wrong.jsonl").stat().st_mtime_ns
    c.write_data(2)
    assert Path("runs/claims/wrong.jsonl").stat().st_mtime_ns == when
    found = open_retriever("runs/claims/nothing.jsonl").search(["Who wrote The Garden?"], 2)
    assert all("Nothing was found" in hit.passage.text for hit in found[0])
    assert open_retriever("runs/claims/wrong.jsonl").search([two[0].question], 2)[0]
