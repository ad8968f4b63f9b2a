"""A judge of single steps in the tiny world: it knows what a question asks for, and reads the rest off the conversation.

It is not given the gold answer. What it says of an answer is whether the results in the conversation give it, so a right guess is not good.
"""
import ast
import itertools
import re
from collections.abc import Sequence
from fractions import Fraction

from common.calculator import CalculatorError, value_of
from common.data import Example
from common.maths import maths_equal
from common.scoring import exact_match
from common.search import neutralise
from common.tiny.world import eval_int, world


def good_step(example: Example, kind: str | None, content: str, asked: Sequence[str], results: Sequence[str]) -> bool:
    """Whether a message ("search", "math", "answer" or None, with its content) is a good step after the queries `asked` and their `results`.

    A query is good if it asks, for the first time, for the next thing that is missing; an answer is good if it says what the results
    say, and they are enough.
    """
    return (good_search if "world" in example.meta else good_sum)(example, kind, content, asked, results)


def good_search(example: Example, kind: str | None, content: str, asked: Sequence[str], results: Sequence[str]) -> bool:
    here, chain = world(example.meta["world"]), chain_of(example)
    missing = [entity for entity, _ in chain if not any(neutralise(here.page(entity).text) in text for text in results)]
    if kind == "answer":
        return not missing and exact_match(pred=content, gold=chain[-1][1]) == 1
    named = {name for name in here.facts if re.search(rf"\b{re.escape(name)}\b", content)}
    return kind == "search" and missing[:1] != [] and missing[0] in named and named <= {e for e, _ in chain} and content not in asked


def good_sum(example: Example, kind: str | None, content: str, asked: Sequence[str], results: Sequence[str]) -> bool:
    """What a query would find, and what earlier ones have found, is computed here."""
    known, total = [_value(x) for x in asked], value_of(example.meta["expression"])
    if kind == "answer":
        return (total in known or example.meta["kind"] == "easy") and maths_equal(pred=content, gold=str(total))  # one-digit sums need no tool
    found = _value(content) if kind == "math" else None
    return found is not None and abs(found) in partial_results(example.meta["expression"]) and found not in known and total not in known


def chain_of(example: Example) -> tuple[tuple[str, str], ...]:
    """The look-ups behind a question of the tiny world, as Question.hops has them: (entity to look up, value found there), in order."""
    return world(example.meta["world"]).question(int(example.id.rpartition("-")[2]), example.meta["hops"]).hops


def partial_results(expression: str) -> set[int]:
    """What a useful computation for an expression such as `c - a * 3` may find, but for its sign: its products, and sums of some of its terms."""
    def terms(node, sign: int = 1) -> list[tuple[int, bool]]:
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
            return terms(node.left, sign) + terms(node.right, -sign if isinstance(node.op, ast.Sub) else sign)
        return [(sign * eval_int(ast.unparse(node)), isinstance(node, ast.BinOp))]
    found = terms(ast.parse(expression, mode="eval").body)
    sums = {abs(sum(v for v, _ in some)) for n in range(2, len(found) + 1) for some in itertools.combinations(found, n)}
    return sums | {abs(v) for v, product in found if product}


def _value(expression: str) -> Fraction | None:
    try:
        return value_of(expression)
    except CalculatorError:
        return None
