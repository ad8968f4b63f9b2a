"""Reward and parser vectors: inputs with the values that the papers' original functions returned.

    make vectors                 # the ones in tests/vectors/
    make vectors DIR=folder      # any folder with files of the same format

Prints, per file, what passed, what deviates on purpose (id and reason) and what failed; exit code 1 on a failure.
"""
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from common.data import Example
from common.rollout import Segment, ToolCall, Trajectory
from common.run import rollout_metrics
from common.search import Passage


@dataclass
class Check:
    id: str
    column: str
    expected: object
    got: object
    deviation: str = ""  # why a difference is meant

    @property
    def passed(self) -> bool:
        if isinstance(self.expected, float) and isinstance(self.got, (int, float)):
            return abs(self.expected - self.got) < 1e-5
        return self.expected == self.got


def as_trajectory(prompt: str, response: str, blocks: str, question: str = "?", gold: tuple[str, ...] = ("",)) -> Trajectory:
    """A trajectory without tokens: text that matches `blocks` was written by the tool, the rest by the model."""
    segments, end = [], 0
    for m in re.finditer(blocks, response, re.S):
        segments += [Segment("model", response[end:m.start()], 0, 0), Segment("tool", m[0], 0, 0)]
        end = m.end()
    segments.append(Segment("model", response[end:], 0, 0))
    return Trajectory(Example("vector", question, gold), 0, 0, prompt, [], segments=[s for s in segments if s.text])


def search_r1(data: dict) -> Iterator[Check]:
    from methods import search_r1 as m
    results = r"\s*<information>.*?</information>\s*|\nThat action was not usable;[^\n]*\n"  # results, and the notice of the vectors
    base = m.Config()
    for case in data.get("search_r1", {}).get("cases", []):
        target = case["ground_truth"]["target"]
        t = as_trajectory(case["prompt"], case["response"], results, gold=(target,) if isinstance(target, str) else tuple(target))
        score = lambda **changes: m.reward(t, t.example, replace(base, **changes))["total"]
        columns = {
            "expected_em": lambda: score(score_scope="all"),
            "expected_subem": lambda: score(score_scope="all", reward="subem"),
            "expected_format_02_01_00": lambda: score(score_scope="all", reward="format"),
            "expected_format_02_01_01": lambda: score(score_scope="all", reward="format", retrieval_score=0.1),
            "expected_valid_structure": lambda: m.valid_structure(t, "all"),
            "response_only_em": lambda: score(score_scope="response"),
            "model_text_only_em": lambda: score(score_scope="model"),
        }
        for column, value in columns.items():
            if column in case:
                reason = ""
                if column == "expected_format_02_01_01" and isinstance(target, str):
                    reason = "a gold given as one string is one gold; the original looks for each of its characters in the results"
                yield Check(case["id"], column, case[column], value(), reason)
    for case in data.get("rollout_search_r1", []):
        yield Check(case["id"], "kept_text, action, content", (case["kept_text"], case["action"], case["content"]), m.parse_action(case["generated"]))
    for i, case in enumerate(data.get("rollout_search_r1_passages", [])):
        passages = [Passage(str(r["document"]["id"]), r["document"]["contents"]) for r in case["retrieved"]]
        yield Check(f"passages-{i}", "rendered", case["rendered"], m.render_passages(passages))


def from_sandbox(response: dict):
    """The outcome a SandboxFusion server's answer stands for; an exception where it is no answer."""
    from common.sandbox import HttpSandbox, Limits
    if response.get("status") == "SandboxError":
        raise ValueError("sandbox error")
    return HttpSandbox("http://127.0.0.1:1", Limits(), 1)._judge(response["run_result"], 0.0, 0.0)


def torl(data: dict) -> Iterator[Check]:
    from common.losses import group_advantages
    from methods import torl as m
    base = m.Config()
    for case in data.get("answer_reward", []):
        t = as_trajectory("", case["response"], r"```output\n.*?\n```\n?", gold=(case["gold"],))
        got = m.reward(t, t.example, replace(base, reward="format" if case["reward_type"] == "v2.wformat" else "answer"))["total"]
        reason = ""
        if re.search("false (positive|negative)", case.get("note", ""), re.I):
            reason = "answers are compared as LaTeX; the original reads an undelimited formula up to its leading number"
        elif any("\\boxed" in s.text for s in t.segments if s.author == "tool"):
            reason = "a box that a program printed is not the model's answer"
        yield Check(case["id"], "reward", case["expected"], got, reason)
        if reason:
            yield Check(case["id"], "the other verdict", -case["expected"], got)
    for case in data.get("total_reward", []):
        code = "```python\nprint(1)\n```\n" if case["contains_code"] else ""
        t = as_trajectory("", f"{code}\\boxed{{{1 if case['correct'] else 2}}}", "$^", gold=("1",))
        if case["tool_was_executed"]:
            t.calls = [ToolCall("python", "", t.example, "ok" if case["execution_pass_last_round"] else "error")]
        penalty = replace(base, execution_penalty=0.5 if case["execution_error_penalty"] else 0.0)
        yield Check(case["id"], "code", case["expected_code"], m.reward(t, t.example, replace(penalty, penalty_without_code=True))["total"])
        yield Check(case["id"], "paper", case["expected_paper"], m.reward(t, t.example, penalty)["total"])
    for case in data.get("observation", []):
        run = case["sandbox_response"].get("run_result") or {}
        out = run.get("stdout") or ""
        reason = ("a sandbox that fails stops the run" if "expected_raises" in case or case["sandbox_response"]["status"] == "SandboxError" else
                  "a time-out is a failure and says so, whatever was printed before" if run["status"] == "TimeLimitExceeded" else
                  "a program that fails has failed, whatever it printed before" if run["return_code"] else
                  "a program that prints nothing is answered with a note, not with a time-out that did not happen" if not out.strip() else
                  "the word Error in ordinary output changes nothing" if "Error" in out else "")
        try:
            outcome = from_sandbox(case["sandbox_response"])
        except (ValueError, KeyError) as error:
            yield Check(case["id"], "text", case.get("expected_text", case.get("expected_raises")), f"the run stops: {error}", reason)
            continue
        shown = m.observe(outcome)
        yield Check(case["id"], "text", case.get("expected_text"), "```output" + m.wrap_output(str(shown)), reason)
        yield Check(case["id"], "pass", case.get("expected_pass"), int(isinstance(shown, str)), reason)
    for case in data.get("extract_program", []):
        yield Check(case["id"], "program", case["expected_program"], m.extract_program(case["segment"]) or "")
    for case in data.get("grpo_advantage", []):
        got = group_advantages(torch.tensor([case["group_rewards"]]))[0].tolist()
        yield Check(case["id"], "advantages", [round(x, 4) for x in case["expected_advantages"]], [round(x, 4) for x in got])


def retool(data: dict) -> Iterator[Check]:
    from methods import retool as m
    base = m.Config()
    for case in data.get("recipe_reward", []):
        t = as_trajectory("", case["solution"], "$^", gold=(case["gold"],))
        t.calls = [ToolCall("python", "", t.example, "ok")] * case["tool_calls"]
        yield Check(case["id"], "recipe", case["expected_recipe"], m.reward(t, t.example, replace(base, reward="recipe"))["total"])
        yield Check(case["id"], "pred", case["pred"], m.strict_box(case["solution"]) or "")
    for case in data.get("paper_reward", []):
        said = "" if case["predicted"] is None else f"\\boxed{{{case['predicted']}}}"
        t = as_trajectory("", said, "$^", gold=(case["gold"],))
        yield Check(case["id"], "reward", case["expected"], m.reward(t, t.example, base)["total"])
    for case in data.get("slime_port_reward", []):
        t = as_trajectory("", f"\\boxed{{{1 if case['correct'] else 2}}}", "$^", gold=("1",))
        t.calls = [ToolCall("python", "", t.example, "ok")] * case["tool_calls"]
        yield Check(case["id"], "reward", case["expected"], m.reward(t, t.example, replace(base, reward="recipe"))["total"],
                    "the port counts calls where the recipe counts turns; ours is the recipe's")
    for case in data.get("eval_code_extraction", []):
        fenced = "```python" in case["text_before_close_tag"]
        yield Check(case["id"], "code", case["expected_code"], m.extract_program(case["text_before_close_tag"] + "</code>"),
                    "" if fenced else "a snippet without a fence does not contain its own tag")
    for case in data.get("eval_observation", []):
        nothing = case.get("no_code") or not (case["stdout"] or case["report"] != "Done")
        shown = "" if nothing else case["stdout"].strip() if case["report"] == "Done" else case["report"]
        yield Check(case["id"], "injected", case["expected_injected"], "</code>" + m.wrap_output(shown),
                    "a program that prints nothing is answered with a note" if nothing else "")
    for case in data.get("recipe_print_rewrite", []):
        got = m.extract_program(f"<code>\n{case['code']}\n</code>")
        yield Check(case["id"], "code", case["expected_code_sent"], got,
                    "a program is run as the model wrote it: the recipe's added print breaks loops and comments")
        yield Check(case["id"], "as written", case["code"].removeprefix("```python").removesuffix("```").strip(), got)


def otc(data: dict) -> Iterator[Check]:
    from common.losses import group_advantages
    from methods import otc as m
    base = m.Config()
    for case in data.get("ppo_r_tool", []):
        yield Check(case["id"], "r_tool", case["expected_r_tool"], round(m.tool_reward(case["m"], None, case["c"]), 6))
    for case in data.get("grpo_r_tool", []):
        yield Check(case["id"], "r_tool", case["expected_r_tool"], round(m.tool_reward(case["m"], case["n"], case["c"]), 6))
    for case in data.get("grpo_group", []):
        fewest, e = m.FewestCalls(), Example("e", "?", ("",))
        if case["stored_n"] is not None:
            fewest.n["e"] = case["stored_n"]
        for calls, right in zip(case["calls"], case["correct"]):
            if right:
                fewest.see(e, calls)
        yield Check(case["id"], "n", case["expected_n_after"], fewest.n.get("e"))
        rewards = [m.reward({"em": float(right)}, calls, fewest.n.get("e"), replace(base, c=float(case["c"]), alpha=case["alpha"]))["total"]
                   for calls, right in zip(case["calls"], case["correct"])]
        yield Check(case["id"], "reward", [round(x, 5) for x in case["expected_reward"]], [round(x, 5) for x in rewards])
        got = group_advantages(torch.tensor([rewards], dtype=torch.float64))[0].tolist()
        yield Check(case["id"], "advantages", [round(x, 4) for x in case["expected_advantage_std_norm"]], [round(x, 4) for x in got])
    for case in data.get("tool_productivity", []):
        e = Example("e", "?", ("",))
        rows = [Trajectory(e, 0, i, "", [], calls=[ToolCall("search", "", e, "ok")] * n) for i, n in enumerate(case["calls"])]
        got = rollout_metrics(rows, [{"em": float(right)} for right in case["correct"]], "em")["productivity"]
        yield Check(case["id"], "productivity", case["expected_tp"], None if got != got else got)


def deep_researcher(data: dict) -> Iterator[Check]:
    from methods import deep_researcher as m
    base = m.Config()
    results = r"(?:<\|im_end\|>)?\n<\|im_start\|>user\n<tool_response>.*?</tool_response><\|im_end\|>\n<\|im_start\|>assistant\n(?:<think>)?"
    for case in data.get("deepresearcher", {}).get("cases", []):
        response = case["response"]
        prompt = m.THINK if response.startswith(m.THINK) else ""  # the tag that is glued to the prompt
        t = as_trajectory(prompt, response.removeprefix(prompt), results, gold=tuple(case["ground_truth"].split("<|answer_split|>")))
        for column, kind in (("expected_f1", "f1"), ("expected_em", "em")):
            if column not in case:
                continue
            score = lambda scope: m.reward(t, t.example, replace(base, reward=kind, score_scope=scope))["total"]
            tagged = any(re.search(r"</?(?:think|answer|tool_call)>", s.text.removesuffix(m.THINK), re.I) for s in t.segments if s.author == "tool")
            yield Check(case["id"], column, case[column], score("model"), "a tag in a tool result is not the model's" if tagged else "")
            yield Check(case["id"], f"{column}, results read too", case[column], score("response"))
    kinds = {"answer": True, "": True, "call": False}
    for case in data.get("rollout_deepresearcher_turn", []):
        kind, thought, payload = m.parse_turn(m.THINK + case["generated_after_prefix"])
        yield Check(case["id"], "stop, think, payload", (case["stop"], case["think"], case["payload"]), (kinds[kind], thought, payload))
    for n, case in enumerate(data.get("rollout_deepresearcher_batch_quirk", [])):
        spoilt = False
        for i, (text, expected) in enumerate(zip(case["generated_after_prefix"], case["results"])):
            kind, thought, payload = m.parse_turn(m.THINK + text)
            yield Check(f"batch-{n}-{i}", "stop, think, payload", tuple(expected), (kinds[kind], thought, payload),
                        "a turn is read by itself, whatever stands before it in the batch" if spoilt else "")
            spoilt = spoilt or not expected[1]


ADAPTERS = {"search_r1": search_r1, "torl": torl, "retool": retool, "otc": otc, "deep_researcher": deep_researcher}  # file name -> its checks; a method's file has its own


def run_folder(folder: Path) -> tuple[list[str], int]:
    """(lines to print, number of failures)."""
    lines, failures = [], 0
    for path in sorted(folder.glob("*.json")):
        if path.stem not in ADAPTERS:
            lines.append(f"{path.name}: no method {path.stem} yet, not run")
            continue
        checks = list(ADAPTERS[path.stem](json.loads(path.read_text(encoding="utf-8"))))
        differ = [c for c in checks if not c.passed]
        meant, failed = [c for c in differ if c.deviation], [c for c in differ if not c.deviation]
        failures += len(failed)
        lines.append(f"{path.name}: {len(checks) - len(differ)} passed, {len(meant)} intended deviations, {len(failed)} failed")
        lines += [f"  deviation {c.id} {c.column}: original {c.expected!r}, ours {c.got!r}: {c.deviation}" for c in meant]
        lines += [f"  FAILED {c.id} {c.column}: expected {c.expected!r}, got {c.got!r}" for c in failed]
    if not lines:
        lines, failures = [f"error: no .json files in {folder}"], 1
    return lines, failures


if __name__ == "__main__":
    output, failed = run_folder(Path(sys.argv[1] if len(sys.argv) > 1 else "tests/vectors"))
    print("\n".join(output))
    sys.exit(1 if failed else 0)
