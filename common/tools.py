"""The tools that methods share: a search engine, a Python interpreter, a calculator. What a result looks like to the model is each method's own."""
import math
from collections.abc import Callable

from common.calculator import CalculatorError, calculate
from common.rollout import Tool, ToolCall, ToolFailure
from common.sandbox import Outcome
from common.search import Passage, open_retriever
from common.tiny.world import world


def search_tool(corpus: str, topk: int, render: Callable[[list[Passage]], str]) -> Tool:
    """The best `topk` passages of a corpus file or a retrieval server, rendered; with "", of the tiny world that the question is about."""
    retriever = open_retriever(corpus) if corpus else None

    def search(calls: list[ToolCall]) -> list[str]:
        sources = [retriever or world(c.example.meta["world"]).index for c in calls]
        results = [""] * len(calls)
        for source in {id(x): x for x in sources}.values():
            mine = [i for i, x in enumerate(sources) if x is source]
            for i, hits in zip(mine, source.search([calls[i].argument for i in mine], topk)):
                results[i] = render([h.passage for h in hits])
        return results

    return Tool(search, batch=256, deadline_s=600)


def python_tool(sandbox, show: Callable[[Outcome], str | ToolFailure]) -> Tool:
    """Programs run in a sandbox of common/sandbox.py, each a process of its own: no call sees what another one defined.

    The sandbox ends every program itself; the deadline is for a sandbox that hangs. It lies beyond what eight full batches take (as many as a ToolPool
    runs at once) if every program uses all its seconds, so no program is late because others are slow."""
    batch = 64
    return Tool(lambda calls: [show(outcome) for outcome in sandbox.run([c.argument for c in calls])], batch=batch,
                deadline_s=60 + math.ceil(8 * batch / sandbox.workers) * (sandbox.limits.wall_s + 1))


def calculator_tool() -> Tool:
    """Exact arithmetic; an expression that has no value fails with the reason."""
    def compute(call: ToolCall) -> str | ToolFailure:
        try:
            return calculate(call.argument)
        except CalculatorError as error:
            return ToolFailure(f"error: {error}")
    return Tool(lambda calls: [compute(c) for c in calls], batch=256, deadline_s=60)
