"""Signs of collapse: runs that learn give none, each kind of collapse gives its own, and the stop rule saves, says why and can be resumed."""
import json
import random
import re
from pathlib import Path

import pytest
import torch

from common import health, report
from common.run import METRICS, Interrupted, Run, repetition
from common.rollout import Trajectory
from methods.search_r1 import Config

DATA = Path(__file__).parent / "data"


def real(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def learning(seed=0, steps=60, low=0.1, high=0.9, rate=0.1, noise=0.05, scale=1.0, offset=0.0) -> list[dict]:
    """Training lines that look like those of a run that learns: from `low` to `high` with `rate` of the rest a step, rewards times `scale` plus `offset`."""
    rng = random.Random(seed)
    jitter = lambda x, share=0.1: x * (1 + rng.gauss(0, share))
    rows = []
    for step in range(1, steps + 1):
        p = high - (high - low) * (1 - rate) ** (step - 1)
        share = (p - low) / max(1e-9, high - low)
        answered = min(1.0, 0.8 + 0.2 * share)
        calls = 1.0 + 0.5 * share
        rows.append({
            "kind": "train", "step": step, "reward": offset + scale * min(1.0, max(0.0, p + rng.gauss(0, noise))), "zero_variance_groups": p ** 8 + (1 - p) ** 8,
            "grad_norm": jitter(0.25), "entropy": jitter(0.5 - 0.42 * share), "good_logprob": -jitter(0.3 - 0.24 * share, 0.2), "repetition": max(0.0, rng.gauss(0.01, 0.01)),
            "calls": calls, "turns": calls + answered + 0.1, "stop_answer": answered, "valid_call_rate": min(1.0, jitter(0.85 + 0.12 * share, 0.05)),
            "call_ok": min(1.0, jitter(0.95, 0.03)), "response_tokens": jitter(25 + 15 * share), "stop_tokens": 0.0, "sampler_ratio_mean": 1.0,
            "sampler_ratio_min": 0.9999, "sampler_ratio_max": 1.0001, "policy_ratio_mean": 1.0, "policy_ratio_min": jitter(0.8, 0.05), "policy_ratio_max": jitter(1.3, 0.05)})
    return rows


def bad(rows) -> dict[str, int]:
    """Rule -> step since when it warns."""
    return {sign.rule.name: sign.since for sign in health.check(rows) if sign.warns}


def changed(rows, start: int, **changes) -> list[dict]:
    """The lines with metrics replaced from step `start` on: by a value, or by a function of (steps since then, old value)."""
    return [row if row["step"] < start else {**row, **{k: v(row["step"] - start, row.get(k)) if callable(v) else v for k, v in changes.items()}} for row in rows]


# ---- runs that are well -----------------------------------------------------------------------------------------------
def test_a_real_run_that_learned_is_well_at_every_step():
    rows = real("health_search_r1")
    assert len(rows) > 30 and rows[-1]["reward"] > 0.8 > 0.2 > rows[0]["reward"]
    for n in range(len(rows) + 1):
        assert bad(rows[:n]) == {}


@pytest.mark.parametrize("kind", [
    dict(), dict(noise=0.12), dict(rate=0.3, noise=0.03), dict(low=0.3, high=0.4, steps=300, rate=0.01), dict(low=0.5, high=0.5, steps=200), dict(low=0.9, high=0.98),
    dict(scale=2.0, offset=-1.0), dict(scale=7.0, offset=-3.0, low=0.3, high=0.8), dict(low=0.02, high=0.3, rate=0.02, steps=200, noise=0.02)])
def test_runs_that_learn_fast_slowly_or_hardly_are_well(kind):
    for seed in range(8):
        rows = learning(seed, **kind)
        for n in range(len(rows) // 4, len(rows) + 1, len(rows) // 4):
            assert bad(rows[:n]) == {}, (seed, n)
        assert not any(sign.until for sign in health.check(rows))


def test_what_goes_with_learning_is_no_sign():
    rows = learning(steps=100, high=1.0, rate=0.2, noise=0.0)  # all right at last: no differences, no gradient, no entropy
    rows = changed(rows, 50, zero_variance_groups=1.0, grad_norm=0.0, entropy=0.001)
    assert bad(rows) == {}
    fewer = lambda i, old: max(0.0, 1.5 - 0.05 * i)  # calls become superfluous: a rate over the few turns that are left means nothing
    assert bad(changed(learning(), 20, calls=fewer, turns=lambda i, old: fewer(i, old) + 1.05, stop_answer=1.0, valid_call_rate=0.1)) == {}
    assert bad(changed(learning(), 20, calls=0.0, turns=1.0, stop_answer=1.0, valid_call_rate=None, call_ok=None)) == {}
    assert bad(changed(learning(), 10, response_tokens=lambda i, old: 40 + 20 * i)) == {}  # longer thoughts
    assert bad([{**row, "call_ok": 0.0, "call_not_run": 1.0} for row in learning()]) == {}  # a method that runs no calls
    assert bad([{k: v for k, v in row.items() if k not in ("zero_variance_groups", "valid_call_rate", "call_ok", "entropy")} for row in learning()]) == {}


def test_a_new_stage_starts_afresh():
    first = [{**row, "stage": 1, "reward": row["reward"] + 0.5} for row in learning(steps=30)]
    second = [{**row, "stage": 2, "step": row["step"] + 30} for row in learning(steps=30)]
    assert bad(first + second) == {}
    assert "reward" in bad([{**row, "stage": 1} for row in first + second])  # as one stage it would be a loss


def test_a_few_steps_are_too_few_to_judge():
    rows = changed(learning(steps=7), 1, repetition=1.0, sampler_ratio_mean=None, reward=0.0)
    assert bad([]) == bad(rows[:2]) == {}
    assert set(bad(rows)) <= {"sampler ratio"}


# ---- collapses --------------------------------------------------------------------------------------------------------
def test_a_real_collapse_is_seen():
    rows = real("health_kl_sign")  # exercise 9: the reward rises to 0.65 at step 7 and is 0.02 from step 11 on
    for n in range(len(rows) - 2):
        assert bad(rows[:n]) == {}
    assert bad(rows)["reward"] == 11 and "the reward has been lost since step 11" in health.collapse(health.check(rows))


@pytest.mark.parametrize("rule,changes", [
    ("reward", dict(reward=lambda i, old: max(0.0, old - 0.1 * i))),
    ("entropy rises", dict(entropy=lambda i, old: min(5.0, old + 0.3 * i))),
    ("calls", dict(calls=0.2, turns=3.0, stop_answer=0.1, valid_call_rate=0.07)),
    ("tools", dict(call_ok=0.3, call_error=0.7)),
    ("tools", dict(call_timeout=0.25, call_ok=0.75)),
    ("sampler ratio", dict(sampler_ratio_mean=0.9)),
    ("sampler ratio", dict(sampler_ratio_mean=0.97, sampler_ratio_min=0.8)),  # as measured with top-p 0.8
    ("sampler ratio", dict(sampler_ratio_mean=0.992, sampler_ratio_max=9.2)),  # as measured with a forgotten temperature of 0.6
    ("sampler ratio", dict(sampler_ratio_min=3e-7)),
    ("sampler ratio", dict(sampler_ratio_mean=None, sampler_ratio_min=None, sampler_ratio_max=None)),
    ("policy ratio", dict(policy_ratio_max=500.0)),
    ("right answers", dict(good_logprob=lambda i, old: old - 0.1 * i)),
    ("repetition", dict(repetition=lambda i, old: min(0.99, 0.2 * i))),
    ("cut off", dict(stop_tokens=0.7, stop_answer=0.3, turns=2.3)),
    ("cut off", dict(stop_length=0.7, stop_answer=0.3, turns=2.3)),
    ("cut off", dict(stop_turns=0.9, stop_answer=0.1, turns=2.1)),
])
def test_each_collapse_is_named_soon_after_it_begins(rule, changes):
    for seed in range(5):
        rows = changed(learning(seed, steps=60), 40, **changes)
        assert bad(rows[:39]) == {}
        warned = bad(rows)
        assert set(warned) == {rule} and 40 <= warned[rule] <= 52, warned


@pytest.mark.parametrize("rule,changes", [
    ("groups", dict(zero_variance_groups=1.0)),
    ("entropy falls", dict(entropy=lambda i, old: 0.5 * 0.7 ** i)),
    ("length falls", dict(response_tokens=lambda i, old: max(2.0, 25 - 2 * i))),
])
def test_what_is_normal_in_learning_warns_where_nothing_is_learned(rule, changes):
    rows = learning(low=0.1, high=0.1, noise=0.02)
    assert bad(rows) == {}
    assert set(bad(changed(rows, 20, **changes))) == {rule}


def test_no_gradient_for_long_is_a_collapse_by_itself():
    rows = [{**row, "zero_variance_groups": 1.0, "grad_norm": 0.0, "reward": 0.0} for row in learning(steps=40)]
    assert health.collapse(health.check(rows[:health.IDLE_STEPS])) == ""
    assert bad(rows) == {"groups": 5, "gradient": health.IDLE_STEPS}
    assert health.collapse(health.check(rows)).startswith(f"no gradient at all for {health.IDLE_STEPS} steps since step")


def test_a_sign_that_has_passed_is_kept_but_warns_no_more():
    rows = changed(changed(learning(), 20, sampler_ratio_mean=0.8), 30, sampler_ratio_mean=1.0)
    (sign,) = [s for s in health.check(rows) if s.since is not None]
    assert (sign.rule.name, sign.since, sign.until, sign.warns) == ("sampler ratio", 22, 31, False)


def test_the_stop_rule_wants_one_hard_sign_or_two():
    one, two = dict(entropy=5.0), dict(entropy=5.0, sampler_ratio_mean=0.8)
    assert health.collapse(health.check(learning())) == ""
    assert bad(changed(learning(), 40, **one)) and health.collapse(health.check(changed(learning(), 40, **one))) == ""
    assert "entropy" in (why := health.collapse(health.check(changed(learning(), 40, **two)))) and "sampler and trainer" in why
    assert health.collapse(health.check(changed(learning(), 1, sampler_ratio_mean=0.8, policy_ratio_max=900.0))) == ""  # ill from the beginning: no collapse
    assert health.collapse(health.check(changed(learning(), 40, **one, reward=0.0))).startswith("the reward has been lost since step ")


def test_every_rule_speaks_of_a_metric_and_says_where_it_is_from():
    assert len({rule.name for rule in health.RULES}) == len(health.RULES)
    for rule in health.RULES:
        assert rule.metric in METRICS or rule.metric.rsplit("_", 1)[0] + "_*" in METRICS
        assert all(len(text) > 20 for text in (rule.warning, rule.meaning, rule.advice)) and rule.source


def test_repetition_counts_within_a_turn_and_only_what_the_model_wrote():
    def trajectory(*segments):
        t = Trajectory(None, 0, 0, "", [])
        for author, ids in segments:
            t.append(author, "", ids, [-1.0] * len(ids))
        return t
    assert repetition([trajectory(("model", list(range(10))))]) == 0.0
    assert repetition([trajectory(("model", [7] * 103))]) == 0.99  # 100 4-grams, one of them new
    assert repetition([trajectory(("model", [1, 2, 3, 4]), ("tool", [9] * 50), ("model", [1, 2, 3, 4]))]) == 0.0  # the same call again is no circle
    assert repetition([trajectory(("model", [1, 2, 3, 4])), trajectory(("model", [5] * 6))]) == 0.5
    assert torch.isnan(torch.tensor(repetition([trajectory(("model", [1, 2, 3]))])))


# ---- a run that is watched --------------------------------------------------------------------------------------------
def play(run: Run, rows: list[dict]) -> int:
    """Log the lines as a method does, and save when it would; returns the step at which the run stopped, or 0."""
    weights = torch.nn.Linear(2, 2)
    for row in rows:
        run.log("train", row["step"], {k: v for k, v in row.items() if k not in ("kind", "step")})
        run.watch()
        if run.signal:
            run.save(row["step"], {"model": weights})
        try:
            run.stop_if_asked(row["step"])
        except Interrupted as stop:
            assert stop.code == 3
            print(stop)
            return row["step"]
    return 0


def test_a_collapse_stops_a_run_that_asked_for_it_and_it_can_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = changed(learning(), 30, repetition=1.0)
    run = Run(Config(stop_on_collapse=True), method="m", metric="em", total_steps=60, resume=False)
    run.before = {"em": 0.0}
    stopped = play(run, rows)
    said = capsys.readouterr()
    assert 30 < stopped < 40 and run.checkpoints() == [stopped]
    assert f"has collapsed (the text goes in circles since step 3" in said.out and f"saved at step {stopped}" in said.out and "--resume --no-stop-on-collapse" in said.out
    assert said.err.count("warning, since step 3") == 1  # once, not at every step
    again = Run(Config(), method="m", metric="em", total_steps=60, resume=True)
    assert again.restore({"model": torch.nn.Linear(2, 2)}) == stopped and len(again.train_lines) == stopped
    assert play(again, rows[stopped:]) == 0 and again.signal is None
    assert capsys.readouterr().err.count("warning, since step 3") == 1


def test_a_run_that_did_not_ask_or_is_at_its_end_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = changed(learning(), 30, repetition=1.0)
    assert play(Run(Config(), method="m", metric="em", total_steps=60, resume=False), rows) == 0
    assert "the text goes in circles" in capsys.readouterr().err
    run = Run(Config(stop_on_collapse=True), method="m", metric="em", total_steps=33, resume=False)
    assert play(run, rows[:33]) == 0 and run.signal is None


# ---- the report -------------------------------------------------------------------------------------------------------
def panel(folder: Path, lines: list[dict]) -> dict:
    (folder / "config.json").write_text(json.dumps({"method": "m", "preset": "tiny", "seed": 0, "fields": {}}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = report.write_report(folder).read_text(encoding="utf-8")
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])["health"]


def test_the_report_shows_every_sign_the_bad_ones_first(tmp_path):
    found = panel(tmp_path, [{"kind": "eval", "step": 0, "em": 0.1}, *learning()])
    assert found["said"] == "No signs of collapse after 60 training steps." and len(found["signs"]) == len(health.RULES)
    assert not any(sign["warns"] or sign["when"] for sign in found["signs"])
    found = panel(tmp_path, changed(changed(learning(), 40, repetition=1.0), 20, sampler_ratio_mean=lambda i, old: 0.5 if i < 8 else 1.0))
    assert found["said"] == "1 sign of collapse after 60 training steps; 1 passed. The stop rule would end the run: the text goes in circles since step 41."
    first, second, *others = found["signs"]
    assert first["name"] == "repetition" and first["when"] == "since step 41" and first["warns"]
    assert second["name"] == "sampler ratio" and second["when"] == "steps 22 to 29" and not second["warns"] and not any(sign["when"] for sign in others)


def test_the_report_of_a_run_that_has_just_begun(tmp_path):
    assert panel(tmp_path, learning(steps=3))["said"] == "3 training steps so far: signs of collapse are looked for from step 8 on."
    (tmp_path / "metrics.jsonl").unlink()
    page = report.write_report(tmp_path).read_text(encoding="utf-8")
    assert "0 training steps so far" in page


def test_a_lost_number_is_a_sign_and_a_missing_one_is_not(tmp_path):
    """A mask that is off by one makes ratios NaN, which metrics.jsonl holds as null; a step that trained nothing has none."""
    lost = changed(learning(), 30, sampler_ratio_mean=None, sampler_ratio_min=None, sampler_ratio_max=None)
    assert [sign["value"] for sign in panel(tmp_path, lost)["signs"] if sign["warns"]] == ["1 → none"]
    gone = [{k: v for k, v in row.items() if row["step"] < 30 or not k.startswith("sampler_ratio")} for row in learning()]
    assert not any(sign["warns"] for sign in panel(tmp_path, gone)["signs"])
