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
from common.run import eval_metrics, mean, rollout_metrics
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


def research(data: dict) -> Iterator[Check]:
    from methods import research as m
    base = m.Config()
    for case in data.get("research", {}).get("cases", []):
        gold, end = case["ground_truth"], next((e for e in ("<|im_end|>", "<|endoftext|>") if case["response"].endswith(e)), "")
        t = as_trajectory(case["prompt"], case["response"].removesuffix(end), r"(?<=</search>)\s*<result>.*?</result>",
                          gold=(gold,) if isinstance(gold, str) else tuple(gold))
        t.stop = "answer" if end else "tokens"  # the engine's text has no end token
        score = lambda **changes: m.reward(t, t.example, replace(base, **changes))
        other_end = "any end token of the model ends its text; the original accepts the tokenizer's only" if end and end != case["eos"] else ""
        original = score(score_scope="response")
        yield Check(case["id"], "expected", case["expected"], original["total"], other_end)
        outcome = ("bad format" if not original["valid"] else "over length" if not original["finished"] else
                   "find box error" if not original["answered"] else "wrong answer but good format" if original["floor"] else
                   "correct answer, get f1 score")
        yield Check(case["id"], "expected_reason_class", case["expected_reason_class"], outcome, other_end)
        results = "".join(re.sub(r"^\s*<result>|</result>$", "", s.text) for s in t.segments if s.author == "tool")
        ours = ("what a search found has no say in the form of the answer" if re.search("</?(think|search|result|answer)>|Assistant:", results) else
                "a result that the model made up is no result" if "<result>" in t.model_text else other_end)
        yield Check(case["id"], "expected, default scope", case["expected"], score()["total"], ours)
        if ours and "paper_expected" in case and "<result>" not in t.model_text:
            yield Check(case["id"], "the value meant", case["paper_expected"], score()["total"])
        if "paper_expected" in case:
            yield Check(case["id"], "paper_expected", case["paper_expected"], score(format_rule="paper")["total"])
    for case in data.get("rollout_research_query", []):
        yield Check(case["id"], "query", case["query"], m.parse_query(case["segment"]))


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


def swirl(data: dict) -> Iterator[Check]:
    from common.tiny.world import questions
    from methods import swirl as m
    kinds = {"search_query": "search", "math_exp": "math", "calculator": "math", "none": None, "": None}  # other names for what we call so
    for case in data.get("action_parse", []):
        kind, content = m.parse_action(case["text"])
        yield Check(case["id"], "kind", kinds.get(case["expected_kind"], case["expected_kind"]), kind)
        yield Check(case["id"], "argument", case["expected_arg"] or "", content)
    for case in data.get("observation", []):
        yield Check(case["id"], "user turn", case["expected_user_turn"], m.wrap_result(case["query"], case["result"], ("", "")))
    for case in data.get("judge_verdict", []):
        found = m.verdict(case["judge_text"])
        yield Check(case["id"], "verdict", case["expected_verdict"], found)
        yield Check(case["id"], "label", case["expected_step_label"], m.reward(found, "answer")["total"])
    for case in data.get("filters", []):
        got = {name: m.keeps(case["step_labels"], case["final_correct"], {"process_and_outcome": "both"}.get(name, name)) for name in case["keep"]}
        yield Check(case["id"], "keep", case["keep"], got)
        t = Trajectory(Example("vector", "?", ("",)), 0, 0, "", [], segments=[Segment(a, "x", 0, 0) for _ in case["step_labels"] for a in ("model", "tool")][:-1])
        yield Check(case["id"], "items", case["n_subtrajectories"], len(m.cut(t)))
    for case in data.get("mean_process_label", []):
        e = questions("eval", 1)[0]
        rows = [Trajectory(e, 0, i, "", [], turns=1) for i, _ in enumerate(case["trajectories"])]
        parts = [{"em": 0.0, "step_label": mean(labels)} for labels in case["trajectories"]]
        yield Check(case["id"], "mean", float(case["expected_mean_process_label"]), eval_metrics("em", rows, parts)["step_label"])
    for case in data.get("decomposition", []):
        given, said = case["trajectory"], case["trajectory"]["actions"]
        t, texts = Trajectory(Example("vector", "?", ("",)), 0, 0, given["prompt"], [0]), [given["prompt"]]
        for i, action in enumerate(said):
            for author, text in [("model", action), *(("tool", o) for o in given["observations"][i:i + 1])]:
                t.append(author, text, [len(texts)], [-1.0])  # one id for each text
                texts.append(text)
        states = m.cut(t)
        yield Check(case["id"], "states", case["expected_states"], [[texts[i] for i in ids] for ids, _, _, _ in states])
        yield Check(case["id"], "histories", [x[1:] for x in case["expected_states"]], [[text for _, text in history] for _, history, _, _ in states])
        yield Check(case["id"], "actions", case["expected_actions"], [action for _, _, _, action in states])
        yield Check(case["id"], "trained", case["expected_actions"], [texts[ids[0]] for _, _, ids, _ in states])
    for case in data.get("stopping", []):
        query, done = "<search_query> {} </search_query>", case["queries_done"]
        ran = play_swirl([query.format(i) for i in range(done)] + ["<answer> x </answer>" if case["answered"] else query.format("one more")], case["max_queries"])
        yield Check(case["id"], "stop", case["expected_stop"], len(ran) == done)  # nothing more is run


def play_swirl(messages: list[str], limit: int) -> list[str]:
    """The queries that are run when a model says these messages, and the last one for ever."""
    from functools import partial

    from common.rollout import Budget, Tool, ToolPool, rollout
    from methods import swirl as m
    from tests.helpers import ScriptedEngine, byte_tokenizer, prompt
    tokenizer, ran, pool = byte_tokenizer(), [], ToolPool(1)
    engine = ScriptedEngine(tokenizer, lambda ids, seed: messages[min(tokenizer.decode(ids).count("[shown]"), len(messages) - 1)])
    tool = Tool(lambda calls: [ran.append(c.argument) or "[shown]" for c in calls])
    rollout(engine, tokenizer, [prompt(tokenizer, "P")], partial(m.environment, task="search", short=str, glue=("", "")), {"search": tool},
            Budget(10, 100, 100, 5000, limit), pool)
    pool.close()
    return ran


def r1_searcher(data: dict) -> Iterator[Check]:
    from common.rollout import Call, Turn
    from methods import r1_searcher as m
    base = m.Config()
    results = r"(?<=<\|end_of_query\|>)\s*<\|begin_of_documents\|>.*?<\|end_of_documents\|>\s*"  # what follows a query; other blocks are invented
    stages = {"r1_searcher_llama_stage1": (1, "llama"), "r1_searcher_llama_stage2": (2, "llama"), "r1_searcher_qwen_zero": (2, "qwen")}
    for name, (stage, family) in stages.items():
        for case in data.get(name, {}).get("cases", []):
            eos = data[name]["eos"]
            response = case["response"]
            while response.endswith(eos):
                response = response.removesuffix(eos)
            as_scored = as_trajectory(case["prompt"], response + eos, results, gold=(case["ground_truth"],))  # the original appends one end token
            original = replace(base, family=family, stage1_reward="code", score_scope="all")
            yield Check(case["id"], f"stage {stage}, {family}", case["expected"], m.reward(as_scored, as_scored.example, original, stage)["total"])
            if "paper_expected" in case:  # stage 1: the paper's own rule, of what the model wrote; stage 2: the code's with the paper's penalty
                t = as_trajectory(case["prompt"], response, results, gold=(case["ground_truth"],)) if stage == 1 else as_scored
                paper = replace(base, family="paper", stage1_reward="paper", score_scope="model" if stage == 1 else "all")
                yield Check(case["id"], f"stage {stage}, paper", case["paper_expected"], m.reward(t, t.example, paper, stage)["total"])
    for case in data.get("rollout_r1_searcher_query", []):
        text = case["generated_without_stop"] + (case["stop_reason"] or "")
        action = m.environment(Turn(text, "stop" if case["stop_reason"] else "eos", 0, False), None)
        searches = isinstance(action, Call)
        yield Check(case["id"], "action, query", (case["action"], case["query"]), ("search" if searches else "finish", action.argument if searches else None))



def toolrl(data: dict) -> Iterator[Check]:
    from methods import toolrl as m
    switches = {"WITHLENGTH": {"length": "fixed"}, "CORRECTMAX1": {"scale": "equal"}, "MAX1STEP30MAX3": {"scale": "two_stage"},
                "SCHEDULEREWARD": {"scale": "dynamic"}, "REFINEDREWARD": {"granularity": "finegrained"},
                "INTERMEDIATEREWARD": {"granularity": "intermediate"}, "COARSEREWARD": {"granularity": "coarse"}, "SCHEDULELENGTH": {}}
    base = m.Config(schedule="code", length_target=512)
    for case in data.get("vectors", []):
        cfg = replace(base, **{k: v for switch in case["switches"] for k, v in switches[switch].items()})
        if {"WITHLENGTH", "SCHEDULELENGTH"} <= set(case["switches"]):
            cfg = replace(cfg, length="dynamic")
        t = as_trajectory("", case["response"], "$^", gold=(case["ground_truth"],))
        expected = case["expected"]
        try:
            got = m.reward(t, t.example, cfg, case["step"])
        except ValueError as error:
            yield Check(case["id"], "raises", expected.get("raises"), type(error).__name__,
                        "" if "raises" in expected else "a ground truth that is no list of calls is named when it is loaded")
            continue
        yield Check(case["id"], "total", expected.get("total", expected.get("raises")), got["total"])
        yield Check(case["id"], "correctness", expected.get("correctness"), got["correctness"])
        yield Check(case["id"], "length", expected.get("length"), got.get("length", 0.0))
        yield Check(case["id"], "format", expected.get("format"), got["total"] - got["correctness"] - got.get("length", 0.0))


def tool_n1(data: dict) -> Iterator[Check]:
    from methods import tool_n1 as m
    variants = {"v0": "binary", "v1": "lexicographic", "v2": "no_think", "v3": "partial", "v4": "partial_names", "llama": "llama"}
    for case in data.get("vectors", []):
        t = as_trajectory("", case["response"], "$^", gold=(json.dumps(case["ground_truth"]),))
        for column, name in variants.items():
            got = m.reward(t, t.example, m.Config(reward=name))["total"]
            crash = str(case["expected"][column]).startswith("raises")
            yield Check(case["id"], column, case["expected"][column], got, "a reply on which the original crashes earns 0" if crash else "")
            if crash:
                yield Check(case["id"], f"{column} earns nothing", 0.0, got)



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


# file name -> its checks; a method's file has its own
ADAPTERS = {f.__name__: f for f in (search_r1, research, r1_searcher, deep_researcher, torl, retool, otc, swirl, toolrl, tool_n1)}


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
