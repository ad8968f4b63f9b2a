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

from common.data import Example
from common.rollout import Segment, Trajectory
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


ADAPTERS = {"search_r1": search_r1}  # file name -> its checks; a method's file has its own


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
