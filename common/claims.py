"""What the ten papers claim, each claim an experiment of one or two arms on the tiny model: `make claims [METHOD=otc] [SEEDS=5]`.

    python -m common.claims otc --seeds 5        run what is missing, then write runs/claims/claims.html, .md and .json
    python -m common.claims --plan               what would be run, and how long that takes
    python -m common.claims --table              write the pages from what is there
    python -m common.claims --table --write      and keep it: docs/claims.json and .md, and the README's table

A claim that was not run here shows the values of docs/claims.json, as long as they are of the same weights and the same flags.

An arm is a method with some flags, run with several seeds; claims of one method share arms. A claim measures one number in every run. With two
arms it is the difference, first less second, of runs of one seed, which see the same questions; with one arm it is a change within the run.
The rule: Student's 95 % interval of that number over the seeds lies inside the region that the paper's direction allows: the claim holds; it
lies outside: it fails; else it is undecided. "More" and "less" mean above and below 0; "same", "no more" and "no less" leave a margin, which is ours.
"""
import argparse
import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from common import UserError
from common.experiments import (Job, Rows, bars, base_model, chain, escape, flags_of, html_table, markdown_table, nearest, parse, read_rows, run_all,
                                said, state, t_interval, tell, write_pages)
from common.provenance import between
from common.run import main, write_atomic
from common.tiny.world import questions, world

DATA = Path("runs/claims")  # files that some arms read: write_data
RECORD, RECORD_PAGE, README = Path("docs/claims.json"), Path("docs/claims.md"), Path("README.md")
MARKS = "<!-- claims: written by make claims -->", "<!-- end of claims -->"


# ---- what is measured -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Measure:
    """One number of a run: what it is, and how it is read from the lines of metrics.jsonl. NaN where the run has no such value."""
    text: str
    of: Callable[[Rows], float]


def _mean(rows: Rows, metric: str, first: int, last: int) -> float:
    if missing := [s for s in (first, last) if s not in rows.get("train", {})]:
        raise UserError(f"a run has no training step {missing[0]}, which a claim measures ({metric}, steps {first} to {last})")
    values = [v for s in range(first, last + 1) if (v := rows["train"][s].get(metric)) is not None]
    return statistics.fmean(values) if values else math.nan


def _held_out(rows: Rows, metric: str, last: bool = True, kind: str = "eval") -> float:
    value = rows[kind][(max if last else min)(rows[kind])].get(metric)
    return math.nan if value is None else value


def samples(metric: str, first: int, last: int) -> Measure:
    return Measure(f"{metric} of the training samples, mean of steps {first} to {last}", lambda rows: _mean(rows, metric, first, last))


def held_out(metric: str) -> Measure:
    return Measure(f"{metric} on held-out questions after training", lambda rows: _held_out(rows, metric))


def course(metric: str) -> Measure:
    def of(rows: Rows) -> float:
        values = [rows["eval"][s].get(metric) for s in sorted(rows["eval"])[1:]]
        return math.nan if None in values else statistics.fmean(values)
    return Measure(f"{metric} on held-out questions, mean of the evaluations after step 0: earlier learning counts", of)


def rise(metric: str, steps: int, width: int = 4) -> Measure:
    return Measure(f"{metric} of the training samples, mean of the last {width} of {steps} steps less that of the first {width}",
                   lambda rows: _mean(rows, metric, steps - width + 1, steps) - _mean(rows, metric, 1, width))


def gain(metric: str, kind: str = "eval") -> Measure:
    where = "held-out questions" + (" of the other task" if kind == "transfer" else "")
    return Measure(f"{metric} on {where}, after RL less before it",
                   lambda rows: _held_out(rows, metric, kind=kind) - _held_out(rows, metric, False, kind))


def gap(a: str, b: str) -> Measure:
    return Measure(f"{a} less {b} on held-out questions after training", lambda rows: _held_out(rows, a) - _held_out(rows, b))


def sample_gap(a: str, b: str, first: int, last: int) -> Measure:
    return Measure(f"{a} less {b}, training samples, means of steps {first} to {last}",
                   lambda rows: _mean(rows, a, first, last) - _mean(rows, b, first, last))


def steps_until(metric: str, level: float, steps: int) -> Measure:
    def of(rows: Rows) -> float:
        return next((float(s) for s in range(3, steps + 1) if _mean(rows, metric, s - 2, s) >= level), steps + 1.0)
    return Measure(f"steps until the mean {metric} of three steps is {level:g} or more ({steps + 1} where it never is)", of)


def unsteady(metric: str, first: int, last: int) -> Measure:
    def of(rows: Rows) -> float:
        return statistics.stdev(_mean(rows, metric, s, s) - _mean(rows, metric, s - 1, s - 1) for s in range(first + 1, last + 1))
    return Measure(f"standard deviation of the change of {metric} from step to step, steps {first} to {last}", of)


# ---- claims and arms --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Arm:
    """Flags of a method's runs. `needs`: the arm whose run of the same seed must have ended before; {needs} in a flag is its folder."""
    flags: dict[str, object] = field(default_factory=dict)
    needs: str = ""


@dataclass(frozen=True)
class Claim:
    id: str
    method: str
    says: str  # the claim in one sentence
    paper: str  # its numbers
    source: str
    arms: tuple[str] | tuple[str, str]
    measure: Measure
    expects: Literal["more", "less", "same", "no more", "no less"]
    margin: float = 0.0
    note: str = ""

    @property
    def region(self) -> tuple[float, float]:
        """Where the difference must lie."""
        m, inf = self.margin, math.inf
        return {"more": (0.0, inf), "less": (-inf, 0.0), "same": (-m, m), "no more": (-inf, m), "no less": (-m, inf)}[self.expects]


# Core minutes of all arms with five seeds, on cores of a laptop. All ten: 5.9 core hours, so just under three hours on two cores.
MINUTES = {"search_r1": 57, "research": 12, "r1_searcher": 53, "deep_researcher": 30, "torl": 19, "retool": 13, "otc": 43, "swirl": 31, "toolrl": 62,
           "tool_n1": 37}

ENDS = {"eval_every": 0}  # held-out questions before and after only
SR1 = {**ENDS, "steps": 12}
R1S = {**ENDS, "steps": 20, "stage1_steps": 5}
DR = {**ENDS, "steps": 20}
OTC = {**ENDS, "steps": 20, "model": "{needs}/model"}
SWIRL = {**ENDS, "steps": 20, "trajectories": 100}
MADE = {**SWIRL, "items": "{needs}/items.jsonl"}
EARLY = {**MADE, "steps": 10, "eval_every": 2}  # after 20 steps every arm has learned all there is
TR = {**ENDS, "steps": 16}

ARMS: dict[str, dict[str, Arm]] = {
    "search_r1": {
        "GRPO": Arm({**SR1, "steps": 16}),
        "not masked": Arm({**SR1, "steps": 16, "mask_observations": False}),
        "PPO": Arm({**SR1, "steps": 10, "algorithm": "ppo"}),
        "groups of 1": Arm({**SR1, "steps": 10, "prompts": 96, "samples": 1}),
        "format reward": Arm({**SR1, "reward": "format"}),
        "format and retrieval reward": Arm({**SR1, "reward": "format", "retrieval_score": 0.1}),
        "1 passage": Arm({**SR1, "topk": 1}),
        "4 passages": Arm({**SR1, "topk": 4}),
        "wrong passages": Arm({**SR1, "corpus": str(DATA / "wrong.jsonl")}),
        "nothing found": Arm({**SR1, "corpus": str(DATA / "nothing.jsonl")}),
    },
    "research": {"floor 0.1": Arm({**ENDS, "steps": 16}), "no floor": Arm({**ENDS, "steps": 16, "floor": 0.0})},
    "r1_searcher": {
        "F1": Arm(R1S),
        "without stage 1": Arm({**R1S, "stage1_steps": 0}),
        "cover EM": Arm({**R1S, "reward": "cover_em"}),
        "EM": Arm({**R1S, "reward": "em"}),
        "one look-up": Arm({**R1S, "data": str(DATA / "one_hop-seed{seed}.jsonl"), "eval_data": "tiny"}),
        "two look-ups": Arm({**R1S, "data": str(DATA / "two_hop-seed{seed}.jsonl"), "eval_data": "tiny"}),
    },
    "deep_researcher": {
        "search and pages": Arm(DR),
        "search alone": Arm({**DR, "browse": False}),
    },
    "torl": {
        "C = 1": Arm({**ENDS, "steps": 20}),
        "C = 0": Arm({**ENDS, "steps": 20, "max_turns": 0}),
        "C = 2": Arm({**ENDS, "steps": 20, "max_turns": 2}),
        "penalty 0.5": Arm({**ENDS, "steps": 20, "execution_penalty": 0.5}),
    },
    "retool": {
        "cold start, interpreter": Arm({**ENDS, "steps": 16}),
        "interpreter alone": Arm({**ENDS, "steps": 16, "cold_start": 0}),
        "cold start, text": Arm({**ENDS, "steps": 16, "text_only": True}),
    },
    "otc": {
        "start": Arm({**ENDS, "over_caller": 160, "steps": 0}),
        "without OTC": Arm({**OTC, "tool_reward": "off"}, "start"),
        "OTC": Arm(OTC, "start"),
        "added": Arm({**OTC, "tool_reward": "add"}, "start"),
        "without OTC, C = 6": Arm({**OTC, "tool_reward": "off", "max_turns": 6, "trajectory_tokens": 1024}, "start"),
        "OTC, C = 6": Arm({**OTC, "max_turns": 6, "trajectory_tokens": 1024}, "start"),
    },
    "swirl": {
        "process filter": Arm({**SWIRL, "eval_task": "both"}),
        "no filter": Arm({**MADE, "filter": "none"}, "process filter"),
        "supervised": Arm({**MADE, "algorithm": "sft"}, "process filter"),
        "10 trajectories": Arm({**MADE, "trajectories": 10}, "process filter"),
        "process filter, early": Arm(EARLY, "process filter"),
        "no filter, early": Arm({**EARLY, "filter": "none"}, "process filter"),
        "outcome filter, early": Arm({**EARLY, "filter": "outcome"}, "process filter"),
        "supervised, early": Arm({**EARLY, "algorithm": "sft"}, "process filter"),
    },
    "toolrl": {
        "original": Arm(TR),
        "finegrained": Arm({**TR, "granularity": "finegrained"}),
        "intermediate": Arm({**TR, "granularity": "intermediate"}),
        "coarse": Arm({**TR, "granularity": "coarse"}),
        "equal scale": Arm({**TR, "scale": "equal"}),
        "two stages": Arm({**TR, "scale": "two_stage", "two_stage_step": 5}),
        "dynamic scale": Arm({**TR, "scale": "dynamic"}),
        "length reward": Arm({**TR, "length": "fixed"}),
        "binary": Arm({**TR, "reward": "binary"}),
        "supervised": Arm({**TR, "steps": 0, "sft_steps": 20}),
        "supervised, then RL": Arm({**TR, "sft_steps": 20}),
    },
    "tool_n1": {
        "binary": Arm(TR),
        "no thought asked": Arm({**TR, "reward": "no_think"}),
        "partial": Arm({**TR, "reward": "partial"}),
        "partial, names too": Arm({**TR, "reward": "partial_names"}),
        "supervised": Arm({**TR, "steps": 0, "sft_steps": 20}),
        "supervised without thoughts": Arm({**TR, "steps": 0, "sft_steps": 20, "sft_think": False}),
        "supervised, then RL": Arm({**TR, "sft_steps": 20}),
    },
}

CLAIMS = [
    # Search-R1
    Claim("mask", "search_r1", "Leaving retrieved tokens out of the loss makes answers better.",
          "average EM 0.431 masked, 0.343 not (7B); 0.303, 0.262 (3B)", "arXiv 2503.09516 v5, masking ablation", ("GRPO", "not masked"),
          samples("reward_em", 7, 16), "more"),
    Claim("mask_steady", "search_r1", "Leaving retrieved tokens out of the loss makes training steadier.",
          "no number; curves", "arXiv 2503.09516 v5, §3.2", ("GRPO", "not masked"), unsteady("reward_em", 7, 16), "less"),
    Claim("grpo_fast", "search_r1", "GRPO learns faster than PPO.",
          "no number; curves. In the end PPO 0.431, GRPO 0.350 (7B base)", "arXiv 2503.09516 v5, comparison of PPO and GRPO", ("GRPO", "PPO"),
          samples("reward_em", 3, 10), "more", note="R1-Searcher (arXiv 2503.05592) finds GRPO and REINFORCE++ alike: 59.0 and 58.9."),
    Claim("group_of_one", "search_r1", "Groups of one, with no baseline, beat larger ones at as many samples.",
          "average EM 0.410, 0.363, 0.350 with groups of 1, 3, 5", "arXiv 2503.09516 v5, group size ablation", ("groups of 1", "GRPO"),
          samples("reward_em", 3, 10), "more", note="Here against groups of 8; both sample 96 trajectories a step."),
    Claim("format_reward", "search_r1", "A reward for the form helps a base model to answer.",
          "most for base models; no number checked", "arXiv 2505.15117", ("format reward", "GRPO"), samples("reward_em", 5, 12), "more"),
    Claim("retrieval_reward", "search_r1", "A reward for having retrieved the answer adds little.",
          "little, or worse; no number checked", "arXiv 2505.15117", ("format and retrieval reward", "format reward"), samples("reward_em", 5, 12),
          "no more", 0.03),
    Claim("passages_few", "search_r1", "One passage a search is too few.",
          "average EM 0.375 with one, 0.431 with three", "arXiv 2503.09516 v5, top-k ablation", ("GRPO", "1 passage"), samples("reward_em", 5, 12),
          "more", note="Here two passages are the default; every fact stands in one."),
    Claim("passages_many", "search_r1", "Too many passages a search do harm.",
          "average EM 0.431 with three, 0.400 with five", "arXiv 2503.09516 v5, top-k ablation", ("GRPO", "4 passages"),
          samples("reward_em", 5, 12), "more", note="Here two against four."),
    Claim("wrong_engine", "search_r1", "With an engine that returns wrong passages, searching dies out.",
          "no search after about 150 steps", "arXiv 2505.15117; blog jinyansu1, 2026-05", ("wrong passages", "GRPO"), samples("calls", 9, 12),
          "less", note="Here the engine knows another world: same names, other facts."),
    Claim("empty_engine", "search_r1", "With an engine that finds nothing, the model searches more.",
          "more searches (PPO); no number", "blog jinyansu1, 2026-05", ("nothing found", "GRPO"), samples("calls", 9, 12), "more",
          note="Here with GRPO."),
    # ReSearch
    Claim("early_jump", "research", "The reward jumps within the first twenty steps.",
          "curves", "arXiv 2503.19470, training curves", ("floor 0.1",), rise("reward", 16), "more"),
    Claim("more_searches", "research", "Searches grow during training.",
          "curves", "arXiv 2503.19470, training curves", ("floor 0.1",), rise("calls", 16), "more"),
    Claim("hops_searches", "research", "Questions of more hops get more searches.",
          "no number", "arXiv 2503.19470; arXiv 2504.03160", ("floor 0.1",), gap("calls_2hop", "calls_1hop"), "more"),
    Claim("floor_silent", "research", "For a small model the floor of 0.1 makes more groups teach nothing.",
          "88 to 94 % of the samples of a 0.6B model sit on the floor", "a third party's report on a 0.6B model, not published as a paper",
          ("floor 0.1", "no floor"), samples("zero_variance_groups", 1, 16), "more", note="The paper itself keeps the floor, for models of 7B and 32B."),
    Claim("floor_slow", "research", "For a small model the floor of 0.1 slows learning.",
          "a 0.6B model does not learn", "a third party's report on a 0.6B model, not published as a paper", ("floor 0.1", "no floor"),
          samples("reward_f1", 5, 16), "less"),
    # R1-Searcher
    Claim("stage1_searches", "r1_searcher", "Without stage 1 the model does not come to search.",
          "Llama-3.1-8B never searches", "arXiv 2503.05592, §4.2", ("F1", "without stage 1"), held_out("calls"), "more"),
    Claim("stage1_answers", "r1_searcher", "Stage 1 makes the answers better in the end.",
          "the two stages are the method", "arXiv 2503.05592, §2.2", ("F1", "without stage 1"), held_out("em"), "more",
          note="As many steps in all: what stage 1 takes, stage 2 has not."),
    Claim("f1_cover", "r1_searcher", "F1 is the better reward than covering the answer.",
          "average cover EM 60.6 and 59.5", "arXiv 2503.05592, reward ablation", ("F1", "cover EM"), held_out("em"), "more"),
    Claim("cover_em", "r1_searcher", "Covering the answer is the better reward than exact match.",
          "average cover EM 59.5 and 39.7", "arXiv 2503.05592, reward ablation", ("cover EM", "EM"), held_out("em"), "more"),
    Claim("f1_em", "r1_searcher", "F1 is the better reward than exact match.",
          "average cover EM 60.6 and 39.7", "arXiv 2503.05592, reward ablation", ("F1", "EM"), held_out("em"), "more",
          note="The opposite in Search-R1++ (arXiv 2602.19526): F1 0.391, EM 0.403, as the model stops answering unless actions are punished."),
    Claim("cover_long", "r1_searcher", "Rewarding covered answers makes answers longer.",
          "no number", "arXiv 2503.05592, §4.2", ("cover EM", "F1"), held_out("answer_words"), "more"),
    Claim("mixed", "r1_searcher", "Mixed training questions beat two-hop questions alone.",
          "60.6 mixed, 43.6 on 2Wiki alone", "arXiv 2503.05592, data ablation", ("F1", "two look-ups"), held_out("em"), "more"),
    Claim("mixed_one", "r1_searcher", "Mixed training questions beat one-hop questions alone.",
          "60.6 mixed, 54.6 on HotpotQA alone", "arXiv 2503.05592, data ablation", ("F1", "one look-up"), held_out("em"), "more",
          note="HotpotQA's questions are two-hop; here the other half is one-hop."),
    Claim("harder_searches", "r1_searcher", "Harder training questions lead to more searches.",
          "no number", "arXiv 2503.05592, data ablation", ("two look-ups", "one look-up"), held_out("calls"), "more"),
    # DeepResearcher
    Claim("dr_learns", "deep_researcher", "F1 rises within some 34 steps.",
          "training F1 from 0.375 to about 0.55", "arXiv 2504.03160, training curves", ("search and pages",), gain("f1"), "more"),
    Claim("dr_calls", "deep_researcher", "Tool calls grow during training.",
          "curves", "arXiv 2504.03160, training curves", ("search and pages",), rise("calls", 20), "more"),
    Claim("dr_hops", "deep_researcher", "Questions of more hops get more calls.",
          "curves by hops", "arXiv 2504.03160, training curves", ("search and pages",), gap("calls_2hop", "calls_1hop"), "more"),
    Claim("dr_length", "deep_researcher", "Responses grow longer during training.",
          "curves", "arXiv 2504.03160, training curves", ("search and pages",), rise("response_tokens", 20), "more"),
    Claim("dr_pages", "deep_researcher", "Reading pages gives better answers than search results alone.",
          "ahead of search-only methods on most sets (F1)", "arXiv 2504.03160, table of results", ("search and pages", "search alone"),
          held_out("f1"), "more", note="The paper compares with other methods; here one switch differs."),
    # ToRL
    Claim("torl_tool", "torl", "With programs RL gets further than without.",
          "1.5B: 48.5 against 41.3 (average of five sets)", "arXiv 2503.23383, tables 3 and 4", ("C = 1", "C = 0"), held_out("accuracy"), "more",
          note="The paper's 41.3 is the instruct model with the tool; C = 0 is in its ablation of time."),
    Claim("torl_two", "torl", "Two programs are better than one.",
          "about 2 points (1.5B, 200 steps)", "arXiv 2503.23383, §3.3", ("C = 2", "C = 1"), held_out("accuracy"), "more",
          note="A sum of the tiny world needs one program."),
    Claim("torl_time_two", "torl", "Two programs cost time.",
          "237 and 288 s a step with C = 1 and C = 2", "arXiv 2503.23383, §3.3", ("C = 2", "C = 1"), samples("step_s", 5, 20), "more"),
    Claim("torl_time_one", "torl", "One program costs time.",
          "118 and 237 s a step with C = 0 and C = 1", "arXiv 2503.23383, §3.3", ("C = 1", "C = 0"), samples("step_s", 5, 20), "more",
          note="With C = 0 nearly every group here is all wrong and no update is computed, which is the larger part."),
    Claim("torl_penalty", "torl", "A penalty for programs that fail does not raise accuracy.",
          "no gain; curves", "arXiv 2503.23383, §3.3", ("penalty 0.5", "C = 1"), held_out("accuracy"), "no more", 0.02),
    Claim("torl_code", "torl", "More and more answers contain a program.",
          "from 40 to 80 % in 100 steps", "arXiv 2503.23383, §3.3.1", ("C = 1",), rise("reward_code", 20), "more"),
    Claim("torl_pass", "torl", "More and more programs run.",
          "from about 0.76 to 0.84 (read off a plot)", "arXiv 2503.23383, §3.3.1", ("C = 1",), rise("call_ok", 20), "more"),
    Claim("torl_pass_right", "torl", "Programs in right answers run more often than those in wrong ones.",
          "curves", "arXiv 2503.23383, §3.3.1", ("C = 1",), sample_gap("pass_right", "pass_wrong", 1, 20), "more"),
    # ReTool
    Claim("retool_text", "retool", "With an interpreter RL gets further than in text alone.",
          "AIME24 67.0 after 400 steps; in text 40.0 after 1,080", "arXiv 2504.11536 v2, table 1", ("cold start, interpreter", "cold start, text"),
          held_out("accuracy"), "more", note="Here both have 16 steps."),
    Claim("retool_rl", "retool", "RL goes well beyond the cold start.",
          "AIME24 40.9 after the cold start, 67.0 after RL", "arXiv 2504.11536 v2, table 1", ("cold start, interpreter",), gain("accuracy"),
          "more", note="Here the cold start alone brings nearly all that can be reached."),
    Claim("retool_cold", "retool", "A cold start saves RL steps.",
          "RL without one is not reported", "arXiv 2504.11536 v2, §2.2", ("cold start, interpreter", "interpreter alone"),
          steps_until("reward_accuracy", 0.7, 16), "less"),
    Claim("retool_short", "retool", "Responses become shorter.",
          "from 10k to 6k tokens", "arXiv 2504.11536 v2, §3.3", ("cold start, interpreter",), rise("response_tokens", 16), "less"),
    Claim("retool_code", "retool", "More and more answers contain code.",
          "up to about 98 %", "arXiv 2504.11536 v2, §3.3", ("cold start, interpreter",), rise("reward_code", 16), "more"),
    Claim("retool_pass", "retool", "Code in right answers runs more often than code in wrong ones.",
          "nearly 100 % in right ones, falling in wrong ones", "arXiv 2504.11536 v2, §3.3", ("cold start, interpreter",),
          sample_gap("pass_right", "pass_wrong", 1, 16), "more"),
    # OTC
    Claim("otc_calls", "otc", "OTC needs fewer calls.",
          "7B on NQ: 3.28 and 1.04 calls (PPO), 1.70 and 0.99 (GRPO)", "arXiv 2504.14870 v2, table 1", ("OTC", "without OTC"),
          samples("calls", 5, 20), "less", note="From a start that calls too much, which the papers' models do by themselves."),
    Claim("otc_right", "otc", "OTC answers as well.",
          "EM 0.449 and 0.446 (PPO), 0.399 and 0.444 (GRPO)", "arXiv 2504.14870 v2, table 1", ("OTC", "without OTC"), held_out("em"), "same", 0.03,
          note="Not in all of the paper's rows: 3B OTC-PPO loses 4.8 points, 1.5B on code 3.3."),
    Claim("otc_productivity", "otc", "OTC gives more right answers per call.",
          "0.136 and 0.429 (PPO), 0.235 and 0.448 (GRPO)", "arXiv 2504.14870 v2, table 1", ("OTC", "without OTC"), samples("productivity", 5, 20),
          "more"),
    Claim("otc_multiply", "otc", "Multiplying the two rewards is better than adding them.",
          "adding is unstable and can be gamed; no number", "arXiv 2504.14870 v2, §3.3, note 6", ("OTC", "added"), samples("reward_em", 5, 20),
          "more"),
    Claim("otc_limit_off", "otc", "Without OTC calls grow with their limit.",
          "0.9, 1.4, 2.1 calls with C = 1, 2, 3 (7B, AIME24)", "arXiv 2504.14870 v2, table 7", ("without OTC, C = 6", "without OTC"),
          samples("calls", 5, 20), "more", note="The paper's is on code; here on search, with C = 3 and 6."),
    Claim("otc_limit", "otc", "With OTC calls do not grow with their limit.",
          "0.8, 1.0, 0.7 calls with C = 1, 2, 3 (7B, AIME24)", "arXiv 2504.14870 v2, table 7", ("OTC, C = 6", "OTC"), samples("calls", 5, 20),
          "no more", 0.1, note="The paper's is on code; here on search, with C = 3 and 6."),
    # SWiRL
    Claim("swirl_labels", "swirl", "More of the steps become good ones.",
          "mean step label 82.5 to 91.0 (HotpotQA)", "arXiv 2504.04736, table 3", ("process filter",), gain("step_label"), "more"),
    Claim("swirl_base", "swirl", "Even unfiltered trajectories improve the start model.",
          "all filters, and none, beat the base model", "arXiv 2504.04736, fig. 4", ("no filter",), gain("em"), "more"),
    Claim("swirl_process", "swirl", "Filtering by process is better than not filtering.",
          "process alone is best; figure", "arXiv 2504.04736, fig. 4", ("process filter, early", "no filter, early"), course("em"),
          "more"),
    Claim("swirl_outcome", "swirl", "Filtering by outcome is worse than not filtering.",
          "below unfiltered but for MuSiQue; figure", "arXiv 2504.04736, fig. 4", ("outcome filter, early", "no filter, early"),
          course("em"), "less"),
    Claim("swirl_transfer", "swirl", "Training on search improves calculation.",
          "GSM8K 0.65 to 0.76 by training on HotpotQA", "arXiv 2504.04736, table 2", ("process filter",), gain("accuracy", "transfer"), "more"),
    Claim("swirl_sft", "swirl", "RL beats supervised learning on the same items.",
          "figure", "arXiv 2504.04736, fig. 5", ("process filter, early", "supervised, early"), course("em"), "more"),
    Claim("swirl_sft_base", "swirl", "Supervised learning on the items makes the start model worse.",
          "below the base model; best with both filters; figure", "arXiv 2504.04736, fig. 5", ("supervised",), gain("em"), "less",
          note="The judge of the tiny world never errs, so filtered items here are flawless."),
    Claim("swirl_more", "swirl", "More trajectories give better answers.",
          "100 are not enough, 1,000 good, 10,000 better", "arXiv 2504.04736, scaling", ("process filter", "10 trajectories"), held_out("em"),
          "more", note="Here 100 against 10."),
    # ToolRL
    Claim("length_longer", "toolrl", "A reward for length makes replies longer.",
          "curves", "arXiv 2504.13958, §5.1", ("length reward", "original"), held_out("response_tokens"), "more"),
    Claim("length_better", "toolrl", "A reward for length does not make calls better.",
          "BFCL 33.23 against 46.20 (1.5B), 48.89, 52.98 (3B), 44.98, 44.10 (Llama)", "arXiv 2504.13958, §5.1", ("length reward", "original"),
          held_out("accuracy"), "no more", 0.02),
    Claim("equal_scale", "toolrl", "Equal weight for form and correctness is worse.",
          "39.47 against 46.20 (1.5B), 51.76, 52.98 (3B), 42.47, 44.10 (Llama)", "arXiv 2504.13958, §5.2", ("equal scale", "original"),
          held_out("accuracy"), "less"),
    Claim("two_stages", "toolrl", "An abrupt change of the scale is worse.",
          "38.85 against 46.20 (1.5B), 50.66, 52.98 (3B), 41.33, 44.10 (Llama)", "arXiv 2504.13958, §5.2", ("two stages", "original"),
          held_out("accuracy"), "less"),
    Claim("dynamic_scale", "toolrl", "A gradual change of the scale is as good, or better.",
          "45.71 against 46.20 (1.5B), 53.81, 52.98 (3B), 46.85, 44.10 (Llama)", "arXiv 2504.13958, §5.2", ("dynamic scale", "original"),
          held_out("accuracy"), "no less", 0.02),
    Claim("finer", "toolrl", "Partial names pay: the original reward beats the finegrained one.",
          "46.20, 40.71 (1.5B); 52.98, 52.06 (3B); 44.10, 39.82 (Llama)", "arXiv 2504.13958, §5.3", ("original", "finegrained"),
          held_out("accuracy"), "more"),
    Claim("coarse", "toolrl", "A reward for exactly right calls only is worse.",
          "36.72 against 46.20 (1.5B), 51.40, 52.98 (3B), 35.95, 44.10 (Llama)", "arXiv 2504.13958, §5.3", ("coarse", "original"),
          held_out("accuracy"), "less", note="A reproduction with 1.5B agrees. Tool-N1 reports the opposite of graded rewards: see below."),
    Claim("intermediate", "toolrl", "Rewarding whole calls is much like rewarding all calls or nothing.",
          "37.65, 36.72 (1.5B); 51.36, 51.40 (3B); 38.62, 35.95 (Llama)", "arXiv 2504.13958, §5.3", ("intermediate", "coarse"),
          held_out("accuracy"), "same", 0.03),
    Claim("coarse_reward", "toolrl", "A coarser reward is lower during training.",
          "curves", "arXiv 2504.13958, §5.3", ("coarse", "original"), samples("reward", 5, 16), "less"),
    Claim("graded_binary", "toolrl", "A graded reward beats a binary one.",
          "finer is better, with one reward family", "arXiv 2504.13958, §5.3", ("original", "binary"), held_out("accuracy"), "more",
          note="Tool-N1 (arXiv 2505.00024) reports the opposite: binary 84.82, partial credit 83.74 and 82.58. Here both rewards train the "
          "same model on the same requests."),
    Claim("cold_sft", "toolrl", "RL from a cold start beats supervised learning.",
          "46.20 against 40.67 (1.5B, SFT4k), 52.98, 41.97 (3B), 58.38, 36.53 (7B)", "arXiv 2504.13958, table 1", ("original", "supervised"),
          held_out("accuracy"), "more"),
    Claim("cold_sft_rl", "toolrl", "RL from a cold start beats RL after supervised learning.",
          "46.20 against 40.93 (1.5B, SFT400), 52.98, 46.42 (3B), 58.38, 39.25 (7B)", "arXiv 2504.13958, table 1",
          ("original", "supervised, then RL"), held_out("accuracy"), "more"),
    Claim("sft_reward", "toolrl", "After supervised learning the training reward is higher all the same.",
          "curves", "arXiv 2504.13958, training curves", ("supervised, then RL", "original"), samples("reward", 5, 16), "more"),
    # Tool-N1
    Claim("binary_partial", "tool_n1", "A binary reward beats partial credit for the form.",
          "84.82 and 83.74 (BFCL, 7B)", "arXiv 2505.00024, table 4", ("binary", "partial"), held_out("accuracy"), "more",
          note="ToolRL (arXiv 2504.13958) reports the opposite of graded rewards: see above."),
    Claim("binary_names", "tool_n1", "A binary reward beats partial credit for names.",
          "84.82 and 82.58", "arXiv 2505.00024, table 4", ("binary", "partial, names too"), held_out("accuracy"), "more",
          note="ToolRL reports the opposite of graded rewards: see above."),
    Claim("think", "tool_n1", "Asking for a thought makes calls better.",
          "84.82 with, 81.94 without", "arXiv 2505.00024, table 4", ("binary", "no thought asked"), held_out("accuracy"), "more"),
    Claim("rl_sft", "tool_n1", "RL beats supervised learning with thoughts.",
          "83.24 and 82.71, on as many examples", "arXiv 2505.00024, table 3", ("binary", "supervised"), held_out("accuracy"), "more"),
    Claim("rl_sft_rl", "tool_n1", "RL alone is as good as supervised learning and then RL.",
          "83.24 and 83.17", "arXiv 2505.00024, table 3", ("binary", "supervised, then RL"), held_out("accuracy"), "no less", 0.02,
          note="A gap of 0.07 points in single runs. Here the second arm has as many RL steps as the first."),
    Claim("sft_think", "tool_n1", "Supervised learning with thoughts beats that without.",
          "82.71 and 81.47", "arXiv 2505.00024, table 3", ("supervised", "supervised without thoughts"), held_out("accuracy"), "more"),
    Claim("flat_length", "tool_n1", "Replies do not grow longer during RL.",
          "curves", "arXiv 2505.00024, fig. 6", ("binary",), rise("response_tokens", 16), "no more", 5.0),
]

# What the papers also claim, and why it is not tested here.
UNTESTED = {
    "search_r1": ["GRPO collapses after some hundred steps and PPO does not: a matter of hundreds of steps.",
                  "Instruct models start faster and end alike; general models beat reasoning-distilled ones: there is one tiny model.",
                  "Responses first get shorter, then longer with the searches: a matter of hundreds of steps."],
    "research": ["The instruct model ends higher than the base model, and 32B higher than 7B: there is one tiny model."],
    "r1_searcher": ["GRPO and REINFORCE++ end alike: the file's switch between them is for stage 1 only.",
                    "RL beats supervised learning: the file has no supervised arm; SWiRL's has.",
                    "Difficult questions help: left out for time (`--select` sorts questions by difficulty)."],
    "deep_researcher": ["Training in the real web beats training on a local corpus: there is no web here."],
    "torl": ["Self-correction and cross-checking appear: shown in the paper as cases, to be read in a run's report.html."],
    "retool": ["Code gets longer, and is called earlier: no metric for it is logged.", "A stronger backbone goes further: there is one tiny model."],
    "otc": ["alpha above 1 is worse (EM 0.446, 0.354, 0.389): the advantages of a group are divided by their deviation, which removes any constant "
            "factor, so with GRPO alpha changes nothing; the paper's numbers are of PPO.", "The same savings with PPO and with programs: left out for time.",
            "GRPO collapses earlier with more calls allowed; larger models call more: a matter of steps and sizes."],
    "swirl": ["Both filters together are below the process filter alone: in the tiny world the judge never errs, and they are the same.",
              "Gains remain without the tool; models of 2B and 9B gain in their own task only: no switch, one tiny model."],
    "toolrl": ["A length target that grows is no better: left out for time.",
               "GRPO beats PPO from a cold start (46.20, 38.32), which a reproduction finds fragile: left out for time.",
               "Without dividing by the deviation the form is not learned (GDPO, arXiv 2601.05242): no switch; a fork of one word, std=\"none\" for "
               "group_advantages."],
    "tool_n1": ["Larger models gain more; Qwen gains more than Llama; all data beat parts of them: one tiny model, one tiny data set."],
}


# ---- runs -------------------------------------------------------------------------------------------------------------
def job(method: str, arm: str, seed: int) -> Job:
    own = ARMS[method][arm]
    name = "".join(c if c.isalnum() else "_" for c in arm.lower())
    return Job(method, f"claims-{name}-seed{seed}", seed, own.flags, job(method, own.needs, seed) if own.needs else None)


def write_data(seeds: int) -> None:
    """The files that some arms read, made of the tiny world: questions of one kind for each seed, and two corpora that do not help."""
    def lines(path: str, rows: list[dict]) -> None:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        if not (DATA / path).exists() or (DATA / path).read_text() != text:  # a corpus keeps its index as long as it is not written again
            write_atomic(DATA / path, text)

    DATA.mkdir(parents=True, exist_ok=True)
    for hops, name in ((1, "one_hop"), (2, "two_hop")):
        for seed in range(seeds):
            rows = [{"id": q.id, "question": q.question, "answer": q.answers[0], **q.meta} for q in questions("train", 1024, seed, (hops,))]
            lines(f"{name}-seed{seed}.jsonl", rows)
    lines("wrong.jsonl", [{"id": p.id, "contents": p.contents} for p in world(-10**6).passages])
    lines("nothing.jsonl", [{"id": "0", "contents": '"Nothing"\nNothing was found.'}])


# ---- verdicts ---------------------------------------------------------------------------------------------------------
def verdict(values: Sequence[float], region: tuple[float, float]) -> str:
    """holds, fails or undecided: where the 95 % interval of the values lies; with no values, not run."""
    if not values:
        return "not run"
    _, low, high = t_interval(values)
    if region[0] < low and high < region[1]:
        return "holds"
    return "fails" if high < region[0] or low > region[1] else "undecided"


@dataclass(frozen=True)
class Result:
    claim: Claim
    arms: dict[str, dict[int, float]]  # arm -> seed -> what was measured
    differences: dict[int, float]  # seed -> first arm less second; with one arm, what was measured
    verdict: str


def recorded() -> dict:
    """docs/claims.json: {"base": digest of the weights, "arms": {"method / arm": {"flags": text, "minutes": {seed: core minutes}}}, "claims":
    {id: {"measured": text, "arms": {arm: {seed: value}}}}}. Of other weights than the shipped ones it counts for nothing."""
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    return record if record.get("base") == base_model("tiny") else {"base": base_model("tiny"), "arms": {}, "claims": {}}


def flag_text(method: str, arm: str) -> str:
    own = ARMS[method][arm]
    return " ".join(flags_of(own.flags)) + (f" (after {flag_text(method, own.needs)})" if own.needs else "")


def result(claim: Claim, seeds: int) -> Result:
    """From the runs that are done, and from the record where there are none."""
    record = recorded()
    kept = record["claims"].get(claim.id, {})
    arms: dict[str, dict[int, float]] = {}
    for arm in claim.arms:
        done = {s: j for s in range(seeds) if state(j := job(claim.method, arm, s)) == "done"}
        measured = {s: claim.measure.of(read_rows(j.folder)) for s, j in done.items()}
        if kept.get("measured") == claim.measure.text and record["arms"].get(f"{claim.method} / {arm}", {}).get("flags") == flag_text(claim.method, arm):
            measured = {int(s): v for s, v in kept["arms"].get(arm, {}).items() if int(s) < seeds} | measured
        arms[arm] = {s: v for s, v in sorted(measured.items()) if math.isfinite(v)}
    first, second = arms[claim.arms[0]], arms[claim.arms[-1]] if claim.arms[1:] else {}
    differences = {s: v - second[s] for s, v in first.items() if s in second} if claim.arms[1:] else first
    return Result(claim, arms, differences, verdict(list(differences.values()), claim.region))


def meaning(claim: Claim) -> str:
    """The region in words."""
    m = f"{claim.margin:g}"
    return {"more": "above 0", "less": "below 0", "same": f"between -{m} and {m}", "no more": f"below {m}", "no less": f"above -{m}"}[claim.expects]


# ---- pages ------------------------------------------------------------------------------------------------------------
def article(r: Result) -> str:
    c, values = r.claim, list(r.differences.values())
    badge = f'<span class="verdict {r.verdict.replace(" ", "-")}">{r.verdict}</span>'
    out = f"<article><h3>{badge}{escape(c.says)}</h3><p>Paper: {escape(c.paper)} <span class=\"quiet\">({escape(c.source)})</span></p>"
    if c.note:
        out += f'<p class="quiet">{escape(c.note)}</p>'
    out += f'<p class="quiet">Measured: {escape(c.measure.text)}.</p>'
    if c.arms[1:]:
        out += bars([(arm, list(own.values()), said(list(own.values()))) for arm, own in r.arms.items() if own])
    if values:
        label = "first less second" if c.arms[1:] else c.arms[0]
        out += bars([(label, values, said(values))], c.region)
        out += f'<p class="quiet">Holds if the interval lies {escape(meaning(c))} (shaded). Seeds: {", ".join(map(str, r.differences))}.</p>'
    return out + "</article>"


def minutes_of(method: str, arm: str, seeds: int) -> dict[int, float]:
    """Seed -> core minutes that the run of an arm took: the finished ones, and those of the record."""
    kept = recorded()["arms"].get(f"{method} / {arm}", {})
    minutes = {int(s): m for s, m in kept.get("minutes", {}).items() if int(s) < seeds} if kept.get("flags") == flag_text(method, arm) else {}
    done = {s: j for s in range(seeds) if state(j := job(method, arm, s)) == "done"}
    return minutes | {s: round(json.loads((j.folder / "summary.json").read_text())["wall_s"] / 60, 2) for s, j in done.items()}


def write_record(seeds: int) -> None:
    """docs/claims.json: the finished runs beside what it held. Then docs/claims.md and the README's table from it."""
    seeds = max(seeds, most_seeds())
    record = recorded()
    record["arms"] = {f"{m} / {arm}": {"flags": flag_text(m, arm), "minutes": minutes} for m in ARMS for arm in ARMS[m] if (minutes := minutes_of(m, arm, seeds))}
    record["claims"] = {r.claim.id: {"measured": r.claim.measure.text, "arms": r.arms} for r in [result(c, seeds) for c in CLAIMS] if any(r.arms.values())}
    write_atomic(RECORD, json.dumps(record, indent=1) + "\n")
    write_atomic(RECORD_PAGE, record_page())
    write_atomic(README, with_table(README.read_text(encoding="utf-8")))
    print(f"written: {RECORD}, {RECORD_PAGE} and the table in {README}")


def most_seeds() -> int:
    return 1 + max((int(s) for arm in recorded()["arms"].values() for s in arm["minutes"]), default=0)


def record_page() -> str:
    """docs/claims.md: the whole table, from the record alone."""
    results = [result(c, most_seeds()) for c in CLAIMS]
    return f"# Claims in miniature\n\nWritten by `make claims ARGS=\"--table --write\"`; not to be edited.\n\n{lead_and_rule(results)}\n\n{tables(results)}"


def with_table(readme: str) -> str:
    """The README with its table of claims made anew."""
    results = [result(c, most_seeds()) for c in CLAIMS]
    lines = []
    for r in results:
        if r.differences:
            here = f"{r.claim.measure.text}: {arms_text(r)}".removesuffix(": ")
            lines.append([r.claim.method, r.claim.says, r.claim.paper, here, *outcome(r)])
    table = markdown_table(["method", "claim", "paper", "here", *OUTCOME], lines)
    rest = f"\n{len(results) - len(lines)} more claims are listed and not run on these weights yet.\n" if len(lines) < len(results) else ""
    return between(readme, MARKS, f"{table}{rest}")


def lead_and_rule(results: Sequence[Result]) -> str:
    tally = Counter(r.verdict for r in results)
    words = {"holds": "hold", "fails": "fail", "undecided": "are undecided", "not run": "are not run"}
    return (f"{len(results)} claims of the ten papers and of later reports on them, each as an experiment on the tiny model: "
            f"{', '.join(f'{tally[v]} {words[v]}' for v in words if tally[v])}. "
            "The tiny model is a teaching instrument: a result on it shows a mechanism in miniature, and does not confirm or refute a paper.\n\n"
            "Every arm is run with several seeds. A claim measures one number in every run; with two arms it is the difference between runs of one seed. "
            "The interval is the 95 % interval of its mean over the seeds (Student's t). The claim holds if the "
            "interval lies inside the region that the claim allows (the column \"holds if\"; \"as good\", \"no more\" and the like have a margin, which is "
            "ours), fails if it lies outside, and is undecided otherwise. Each claim is judged "
            "by itself: of forty that were pure chance two would seem to hold or to fail.")


def arms_text(r: Result) -> str:
    """The mean and interval of each of two arms; nothing for one, whose number is the change itself."""
    return "; ".join(f"{arm} {said(list(v.values()))}" for arm, v in r.arms.items() if v and r.claim.arms[1:])


OUTCOME = "difference or change", "holds if", "seeds", "verdict"


def outcome(r: Result) -> list[str]:
    return [said(list(r.differences.values())) if r.differences else "–", meaning(r.claim), str(len(r.differences)), r.verdict]


def tables(results: Sequence[Result]) -> str:
    """A table for every method, with notes and sources, and what is claimed and not tested here."""
    out = []
    for method in ARMS:
        lines = [[f"{r.claim.says} {r.claim.note}".strip(), f"{r.claim.paper} ({r.claim.source})", r.claim.measure.text,
                  arms_text(r) or "–", *outcome(r)] for r in results if r.claim.method == method]
        if lines:
            out.append(f"## {method}\n\n{markdown_table(['claim', 'the numbers it rests on', 'measured', 'arms', *OUTCOME], lines)}\n"
                       f"Also claimed, not tested here:\n\n{''.join(f'- {text}{chr(10)}' for text in UNTESTED[method])}")
    return "\n".join(out)


def write_claims(seeds: int) -> None:
    """runs/claims/claims.html, .md and .json from the runs that are done, and from the record."""
    results = [result(c, seeds) for c in CLAIMS]
    lead, rule = lead_and_rule(results).split("\n\n")
    body = [f"<p>{escape(lead)}</p><p class=\"quiet\">{escape(rule)} In the pictures the bar is the interval, the large dot the mean, each small dot a seed.</p>"]
    verdicts = html_table(["verdict", "method", "claim"], [[r.verdict, r.claim.method, r.claim.says] for r in results])
    body.append(f"<details><summary>All verdicts in one table</summary>{verdicts}</details>")
    measured = {r.claim.method for r in results if r.differences}
    for method in sorted(ARMS, key=lambda m: m not in measured):  # what was run comes first
        took = sum(sum(minutes_of(method, arm, seeds).values()) for arm in ARMS[method])
        arms = "".join(f"<li>{escape(name)}: <code>{escape(' '.join(flags_of(arm.flags)))}</code></li>" for name, arm in ARMS[method].items())
        untested = "".join(f"<li>{escape(text)}</li>" for text in UNTESTED[method])
        body.append(f'<h2>{method}</h2><p class="quiet">{len(ARMS[method])} arms; planned {MINUTES[method]} core minutes with five seeds, the finished runs '
                    f"took {took:.0f}.</p>{''.join(article(r) for r in results if r.claim.method == method)}<details><summary>Arms and their flags</summary>"
                    f"<ul>{arms}</ul></details><details><summary>Also claimed, not tested here</summary><ul>{untested}</ul></details>")
    DATA.mkdir(parents=True, exist_ok=True)
    numbers = [{"id": r.claim.id, "method": r.claim.method, "says": r.claim.says, "measured": r.claim.measure.text, "expects": r.claim.expects,
                "margin": r.claim.margin, "arms": r.arms, "differences": r.differences, "verdict": r.verdict} for r in results]
    write_atomic(DATA / "claims.json", json.dumps(numbers, indent=1))
    write_pages(DATA, "claims", "Claims in miniature", "".join(body), f"{lead}\n\n{rule}\n\n{tables(results)}")


def plan(methods: Sequence[str], seeds: int) -> str:
    lines = []
    for m in methods:
        jobs = {j.folder: j for arm in ARMS[m] for s in range(seeds) for j in chain(job(m, arm, s))}.values()
        states = Counter(state(j) for j in jobs)
        lines.append([m, sum(c.method == m for c in CLAIMS), len(ARMS[m]), len(jobs), states["done"], round(MINUTES[m] * seeds / 5)])
    total = ["all", *(sum(column) for column in list(zip(*lines))[1:])]
    return markdown_table(["method", "claims", "arms", "runs", "done", "core minutes in all"], [list(map(str, line)) for line in (*lines, total)])


def command(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m common.claims", description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("method", nargs="?", default="", help="one method (default: all ten)")
    parser.add_argument("--plan", action="store_true", help="say what would be run, and end")
    parser.add_argument("--table", action="store_true", help="run nothing, write the pages from what is there")
    parser.add_argument("--missing", action="store_true", help="run only what docs/claims.json lacks")
    parser.add_argument("--write", action="store_true", help="keep what was measured: docs/claims.json, docs/claims.md, the table in README.md")
    known, others, how = parse(parser, argv, seeds=5)
    if others:
        raise UserError(f"--{next(iter(others)).replace('_', '-')}: no such flag; an arm's flags stand in common/claims.py")
    if known.method not in ("", *ARMS):
        raise UserError(f"METHOD={known.method}: no claims about it{nearest(known.method, list(ARMS))}")
    methods = [known.method] if known.method else list(ARMS)
    if known.plan:
        return print(plan(methods, known.seeds))
    write_data(known.seeds)
    jobs = [job(m, arm, s) for s in range(known.seeds) for m in methods for arm in ARMS[m] if not known.missing or s not in minutes_of(m, arm, known.seeds)]
    failed = [] if known.table else run_all(jobs, keep_models=False, **how)
    write_claims(known.seeds)
    if known.write:
        write_record(known.seeds)
    tell(failed)


if __name__ == "__main__":
    main(lambda: command(sys.argv[1:]))
