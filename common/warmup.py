"""Supervised warm-up before RL (ours, no paper's): for models that never follow a protocol on their own, traces built by rule from the run's
questions and its search engine, or from worked solutions. How a trace is worded is each method's own."""
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from common import UserError
from common.data import Example, order
from common.policy import lr_at, make_optimizer
from common.rollout import Tool, ToolCall, ToolFailure, fit
from common.run import Run
from common.scoring import normalise_answer
from common.update import demonstration_row, supervised_step


def as_shown(tool: Tool, tokenizer, wrap: Callable[[str], str], observation_tokens: int) -> Tool:
    """The tool with its results cut as a rollout cuts them: a trace must not know what the model cannot see."""
    def cut(text: str) -> str:
        tried = []
        fit(tokenizer, text, lambda inner: tried.append(inner) or wrap(inner), observation_tokens)
        return tried[-1]  # what fitted
    said = lambda result: str(result) or type(result).__name__ if isinstance(result, ToolFailure) else result or ""
    return replace(tool, run=lambda calls: [cut(said(result)) for result in tool.run(calls)])


def gold_in(example: Example, text: str) -> str | None:
    """The first gold answer that stands in a text, as whole words; None without one."""
    words = lambda x: f" {normalise_answer(x, punctuation_as=' ')} "
    return next((g for g in example.answers if words(g).strip() and words(g) in words(text)), None)


def found_by_rule(example: Example, search: Tool) -> tuple[str, str, str] | None:
    """(query, result, gold answer that stands in the result), searching the two longest names of the question, then the question; None
    where no result holds an answer."""
    names = re.findall(r"(?:[A-Z][\w'.-]*)(?: (?:of|the|and|de|in|[A-Z0-9][\w'.-]*))*", example.question.split(" ", 1)[-1])
    for query in sorted(names, key=len, reverse=True)[:2] + [example.question.rstrip("?")]:
        text = search.run([ToolCall("search", query, example)])[0]
        if gold := gold_in(example, text):
            return query, text, gold
    return None


def program_by_rule(example: Example) -> str | None:
    """A program that prints the answer: from the tiny world's expression, or from the marked sums of a GSM8K solution (<<48/2=24>>), in which
    a number that an earlier sum gave is called by its name. None where a solution has no marks, or one that Python cannot read."""
    if "expression" in example.meta:
        return f"print({example.meta['expression']})"
    lines, names = [], {}
    for expression, value in re.findall(r"<<([^<>=]+)=([^<>=]+)>>", example.meta.get("solution", "")):
        expression = re.sub(r"\d+(?:\.\d+)?", lambda m: names.get(m[0], m[0]), expression.replace(",", "").replace("%", "/100").strip())
        try:
            compile(expression, "", "eval")
        except SyntaxError:  # such as 2x=10, or 007
            return None
        names[value.replace(",", "").strip()] = name = f"x{len(lines) + 1}"
        lines.append(f"{name} = {expression}")
    return "\n".join([*lines, f"print(x{len(lines)})"]) if lines else None


def warm_up(cfg, model, tokenizer, train_set: Sequence[Example], render: Callable[[Example], str],
            demonstrate: Callable[[Example], list[tuple[str, str]] | None], wrap: Callable[[str], str], run: Run) -> None:
    """`cfg.warmup` supervised steps on the first `cfg.warmup_traces` questions for which `demonstrate` finds a trace: (author, text)
    segments, of which the model's are learned. UserError if there is none."""
    rows = []
    for i in order(cfg.seed, 0, len(train_set), len(train_set)):
        if len(rows) < cfg.warmup_traces and (segments := demonstrate(train_set[i])):
            rows.append(demonstration_row(render(train_set[i]), segments, tokenizer, wrap, cfg.observation_tokens))
    if not rows:
        raise UserError(f"--warmup: no question of {cfg.data} could be answered by rule; use --warmup 0")
    optimizer = make_optimizer(model.parameters(), cfg.warmup_lr, bf16=cfg.optimizer_bf16, offload=cfg.optimizer_offload)
    for step in range(cfg.warmup):
        picked = [rows[i] for i in order(cfg.seed, step, len(rows), min(8, len(rows)))]
        loss = supervised_step(model, optimizer, picked, lr=lr_at(step, cfg.warmup, cfg.warmup_lr, schedule="cosine"),
                               micro_tokens=cfg.micro_tokens, max_grad_norm=cfg.max_grad_norm)
        run.log("warmup", 0, {"loss": loss})
        run.stop_if_asked(0)
