"""Is a run healthy? Signs of collapse in the training lines of metrics.jsonl: pure functions, for a run that goes on, its report, and the stop rule.

A sign is judged on means over WINDOW steps, against the run's own beginning or best, and warns when it has been bad for PATIENCE steps in a row.
Only the present training stage counts (metric `stage`): a stage may pay for something else. What is normal in a run that learns (entropy falls,
groups become equal, replies get short) warns only while the reward has not risen. Each rule names the report or paper it stands on.

`--stop-on-collapse` stops a run at a sign that alone is a collapse, or at any two that are bad at once and were not from the beginning.
"""
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WINDOW = 5  # steps of a mean
PATIENCE = 3  # steps in a row that a sign must be bad
IDLE_STEPS = 20  # steps without any gradient


@dataclass(frozen=True)
class Rule:
    """One sign. `bad` maps the training lines to one bool a line; `stops`: alone it is a collapse."""
    name: str
    metric: str  # shown as first mean -> last mean
    warning: str
    meaning: str
    advice: str
    source: str
    bad: Callable[[Sequence[dict]], list[bool]]
    stops: bool = False


@dataclass(frozen=True)
class Sign:
    """What a rule says of a run: fine (since is None), bad since a step, or bad from a step until another. The last bad stretch counts."""
    rule: Rule
    first: float | None  # mean of the first WINDOW steps of its metric; None where there is no number
    last: float | None  # mean of the last WINDOW steps
    since: int | None = None
    until: int | None = None  # last bad step; None while it lasts
    arose: bool = False  # not there from the beginning: the run was well before

    @property
    def warns(self) -> bool:
        return self.since is not None and self.until is None

    def __str__(self) -> str:
        r, numbers = self.rule, " -> ".join("no number" if x is None else f"{x:.3g}" for x in (self.first, self.last))
        return f"since step {self.since}: {r.warning} ({r.metric} {numbers}). {r.meaning} {r.advice}"


def check(rows: Sequence[dict]) -> list[Sign]:
    """Every rule's verdict on a run's training lines (dicts of metrics with `step`, in order; None or missing where there is no number)."""
    stage = next((row["stage"] for row in reversed(rows) if row.get("stage") is not None), None)
    start = next((i + 1 for i in reversed(range(len(rows))) if rows[i].get("stage") not in (None, stage)), 0)
    rows = rows[start:]
    signs = []
    for rule in RULES:
        streak, begun, since, until = 0, 0, None, None
        for i, bad in enumerate(rule.bad(rows)):
            streak = streak + 1 if bad else 0
            if streak >= PATIENCE:
                begun, since, until = i - streak + 1, rows[i - streak + 1]["step"], rows[i]["step"]
        means = _means(_column(rows, rule.metric)) or [None]
        signs.append(Sign(rule, next((m for m in means if m is not None), None), means[-1], since, None if streak >= PATIENCE else until, begun >= 2 * WINDOW))
    return signs


def collapse(signs: Sequence[Sign]) -> str:
    """Why a run should stop, in one line; empty if it should not."""
    hard = [sign for sign in signs if sign.warns and sign.rule.stops]
    bad = [sign for sign in signs if sign.warns and sign.arose]
    return "; ".join(f"{s.rule.warning} since step {s.since}" for s in hard or bad) if hard or len(bad) > 1 else ""


# ---- numbers ----------------------------------------------------------------------------------------------------------
def _column(rows: Sequence[dict], name: str) -> list[float | None]:
    return [row.get(name) for row in rows]


def _means(values: Sequence[float | None]) -> list[float | None]:
    """Mean of the last WINDOW values at each step; None where fewer than half of them are known, and at the first WINDOW - 1 steps."""
    out = []
    for i in range(len(values)):
        known = [v for v in values[max(0, i + 1 - WINDOW):i + 1] if v is not None]
        out.append(sum(known) / len(known) if i + 1 >= WINDOW and 2 * len(known) > WINDOW else None)
    return out


def _judge(rows: Sequence[dict], name: str, bad: Callable[[float, float, float, float], bool]) -> list[bool]:
    """bad(mean, first mean, lowest mean so far, highest mean so far) at every step where the metric has a mean."""
    out, first, low, high = [], None, math.inf, -math.inf
    for m in _means(_column(rows, name)):
        if m is None:
            out.append(False)
            continue
        first, low, high = m if first is None else first, min(low, m), max(high, m)
        out.append(bad(m, first, low, high))
    return out


def _noise(rows: Sequence[dict]) -> float:
    """By how much two means of the reward differ by chance: four standard deviations, from the differences of neighbouring steps."""
    rewards = [r for r in _column(rows, "reward") if r is not None]
    squares = [(b - a) ** 2 for a, b in zip(rewards, rewards[1:])]
    return 4 * math.sqrt(sum(squares) / len(squares) / 2) * math.sqrt(2 / WINDOW) if squares else 0.0


def _not_learning(rows: Sequence[dict]) -> list[bool]:
    """Where the reward has not risen above its beginning by more than chance."""
    noise = _noise(rows)
    return _judge(rows, "reward", lambda m, first, low, high: m - first <= noise)


def _both(*columns: Sequence[bool]) -> list[bool]:
    return [all(row) for row in zip(*columns)]


# ---- rules ------------------------------------------------------------------------------------------------------------
def _reward_lost(rows):
    noise = _noise(rows)  # three quarters of what was gained, or half of what was there at the beginning
    return _judge(rows, "reward", lambda m, first, low, high: (high - first > noise and m < first + 0.25 * (high - first))
                  or m < first - max(noise, 0.5 * abs(first)))


def _equal_groups(rows):
    return _both(_judge(rows, "zero_variance_groups", lambda m, *_: m >= 0.9), _not_learning(rows))


def _no_gradient(rows):
    idle, out = 0, []
    for row in rows:
        idle = idle + 1 if row.get("grad_norm") == 0 else 0
        out.append(idle >= IDLE_STEPS)
    return _both(out, _not_learning(rows))


def _low_entropy(rows):
    return _both(_judge(rows, "entropy", lambda m, first, *_: m < 0.1 * first), _not_learning(rows))


def _high_entropy(rows):
    return _judge(rows, "entropy", lambda m, first, low, high: m > 1.0 and m > 2 * low and m > low + 0.5)


def _calls_broken(rows):
    wasted = [{"x": None if row.get("turns") is None or row.get("calls") is None else row["turns"] - row["calls"] - (row.get("stop_answer") or 0.0)} for row in rows]
    many = _judge(wasted, "x", lambda m, *_: m >= 0.25)  # a rate over a handful of turns says nothing
    return _both(_judge(rows, "valid_call_rate", lambda m, first, low, high: m < 0.5 and m < 0.5 * high), many)


def _tools_failing(rows):
    fine = [{"x": None if row.get("call_ok") is None else row["call_ok"] + (row.get("call_empty") or 0.0)} for row in rows]
    fewer = _judge(fine, "x", lambda m, first, low, high: m < 0.5 * high)
    late = _judge([{"x": row.get("call_timeout") or 0.0} for row in rows], "x", lambda m, *_: m >= 0.2)
    return [a or b for a, b in zip(fewer, late)]


def _ratio_off(rows, name, mean_off, least, most):
    def off(row):
        if f"{name}_mean" not in row:  # nothing was trained in this step
            return False
        mean, low, high = (row.get(f"{name}_{k}") for k in ("mean", "min", "max"))
        return None in (mean, low, high) or abs(mean - 1) > mean_off or low < least or high > most
    odd = [off(row) for row in rows]
    return [sum(odd[max(0, i + 1 - WINDOW):i + 1]) > WINDOW / 2 for i in range(len(odd))]


RULES = (
    Rule("reward", "reward", "the reward has been lost",
         "Most of what was learned is gone, or the run is far below its own beginning; runs do not come back from this.",
         "Go back to a checkpoint before it and try a smaller --lr, a KL term, or PPO in place of GRPO.",
         "Search-R1 issues #88 and #186, ZeroSearch issue #23, ConvSearch-R1 issue #6", _reward_lost, stops=True),
    Rule("groups", "zero_variance_groups", "nearly all groups have equal rewards and nothing is being learned",
         "Without a difference inside a group there is no advantage. All 0: too hard, cut off before the answer, or a grader that always fails; all 1: too easy.",
         "Read a few trajectories in the report; look at answered, f1 and the stop reasons; try other questions, more samples or a softer reward.",
         "Search-R1 issue #75, autocontext pull request #1067, DAPO (arXiv 2503.14476) §3.2", _equal_groups),
    Rule("gradient", "grad_norm", f"no gradient at all for {IDLE_STEPS} steps",
         "Every advantage was exactly zero: the weights have not changed.",
         "As for equal groups; a run cannot leave this state by itself.",
         "autocontext pull request #1067, verl pull request #5635", _no_gradient, stops=True),
    Rule("entropy falls", "entropy", "the entropy is gone before anything was learned",
         "The policy says one thing only, so its samples no longer differ and there is nothing to compare.",
         "Try a smaller --lr, a wider upper clip or an entropy bonus; check that training samples at temperature 1.",
         "DAPO (arXiv 2503.14476) §3.1, verl issue #5953", _low_entropy),
    Rule("entropy rises", "entropy", "the entropy has more than doubled",
         "The policy is becoming random: updates too large, tokens trained that the model did not write, or a KL term with the wrong sign.",
         "Try a smaller --lr; look at the mask in the trajectory viewer and at kl.",
         "rllm issue #116, verl issue #2738, ToolRL issue #52", _high_entropy),
    Rule("calls", "valid_call_rate", "calls can no longer be used",
         "The model has unlearned the form of a call; turns without an action are the usual way into a multi-turn collapse.",
         "Read the notices in the trajectories; try a format reward, a smaller --lr, or dropping trajectories with void turns.",
         "SimpleTIR (arXiv 2509.02479), verifiers issue #315", _calls_broken),
    Rule("tools", "call_ok", "calls fail that used to run",
         "Either the model writes worse programs or queries, or the tool is ill: time-outs mostly mean an overloaded server, not bad code.",
         "Read the observations; run the tool's own check (make sandbox_check); fewer workers or a longer time limit.",
         "ToRL issue #27 (61.7 % of its executions failed unseen), verl-tool issue #136", _tools_failing),
    Rule("sampler ratio", "sampler_ratio_mean", "sampler and trainer disagree",
         "The engine samples from another distribution than the one that is trained: stale weights, temperature or top-p on one side, tokens that were re-tokenised, or a shifted mask.",
         "In float32 all three ratios are 1 but for rounding; in bfloat16 single tokens stray, the mean does not. Look for the first step where they are off.",
         "trl issues #4159 (temperature), #5312 (stale weights), #6789 (top-p), verl issue #3720 (re-tokenised)",
         lambda rows: _ratio_off(rows, "sampler_ratio", 0.01, 0.25, 4)),
    Rule("policy ratio", "policy_ratio_mean", "single updates move the policy too far",
         "Between the first and the last update on a batch some probabilities changed a hundredfold; a clip bounds that only on one side.",
         "Try a smaller --lr, fewer --updates, or a dual clip.",
         "trl issue #5231, dual-clip PPO (arXiv 1912.09729)", lambda rows: _ratio_off(rows, "policy_ratio", 0.5, 0.01, 100)),
    Rule("right answers", "good_logprob", "right trajectories have become much less likely",
         "Lazy likelihood displacement: wrong samples that resemble right ones push both down. It comes before the reward falls.",
         "Try a smaller --lr, a KL term, or fewer updates on wrong samples; keep a checkpoint now.",
         "Search-R1 issue #186", lambda rows: _judge(rows, "good_logprob", lambda m, first, low, high: m < high - max(0.2, abs(high)))),
    Rule("repetition", "repetition", "the text goes in circles",
         "Turns repeat the same few tokens: what a policy does after it has broken (!!!!!!), or shortly before.",
         "Go back to a checkpoint before it; look at grad_norm and entropy around that step.",
         "RAGEN issue #52, SPG issue #2", lambda rows: _judge(rows, "repetition", lambda m, first, *_: m >= 0.3 and m >= first + 0.2), stops=True),
    Rule("cut off", "response_tokens", "half of the trajectories run out of tokens or turns",
         "They end before they answer, so they earn nothing; gibberish grows to the limit too.",
         "Read what they end in. Text that makes sense needs a larger budget (--trajectory-tokens, --turn-tokens), gibberish a checkpoint from before it.",
         "autocontext pull request #1067, trl pull request #3138", lambda rows: _judge(
             [{"x": sum(row.get(f"stop_{k}") or 0.0 for k in ("tokens", "length", "turns"))} for row in rows], "x", lambda m, first, *_: m >= 0.5 and m >= first + 0.25)),
    Rule("length falls", "response_tokens", "replies have shrunk to almost nothing",
         "The model has found that saying little costs nothing, and it is not right more often.",
         "Look at what is still rewarded: a format or length reward, or a price on calls, can pay for silence.",
         "ours", lambda rows: _both(_judge(rows, "response_tokens", lambda m, first, *_: m < 0.25 * first), _not_learning(rows))),
)
