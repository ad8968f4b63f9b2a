"""Function-calling examples: dialogues with tools and gold calls, from the data sets that ToolRL and Tool-N1 train on.

    Example.question  the first thing the user says; turns of one dialogue share it, so they stay on one side of a split
    Example.answers   one text: the gold calls as a JSON list of {"name", "arguments"}, "[]" where no call is right; in rows that bring a
                      finished prompt, the ground truth as it was published
    meta["messages"]  the dialogue so far: {"role": user | assistant | tool, "content": text}; an assistant's calls are such a JSON list too
    meta["tools"]     the tools: {"name", "description", "parameters": JSON schema}
    meta["prompt"]    in the place of these two: a finished prompt, as chat messages
    meta["kind"]      none, single or parallel: how many calls are right

Understood, told apart by their columns, in every file or hub data set that common/data.py opens:
    query, tools, answers               xLAM-60k (tools and answers are JSON in text; parameters without an outer schema)
    system, conversations               ToolACE (tools stand in the system text, calls are written `[name(key=value)]`); one example for
                                        every assistant turn that calls, and with `no_call` for every other one
    prompt, reward_model.ground_truth   what ToolRL and Tool-N1 publish
    messages, tools, answers            rows in the form above
and, to evaluate on, `bfcl:CATEGORIES` and `api_bank:FOLDER` (common/bfcl.py).
"""
import ast
import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence

from common import UserError
from common.bfcl import load_benchmark, print_summary, summary
from common.data import Example, read_rows

SHOWN = 5
KINDS = ("none", "single", "parallel")
ROLES = {"user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "function_call": "assistant", "tool": "tool", "observation": "tool"}


# ---- calls as text ----------------------------------------------------------------------------------------------------
def loads(text: str):
    """json.loads that fails in one way only, by ValueError: brackets nested thousands deep raise RecursionError otherwise."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("brackets nested too deep") from None


def canonical(calls, arguments: str = "arguments") -> list[tuple[str, str]]:
    """(name, arguments as JSON text with sorted keys) of each call: what two calls share if they are the same. So the order of keys does not
    matter, that of a list does, and 3, 3.0, "3" and true are four values. ValueError unless `calls` is a list of objects with both keys."""
    if not isinstance(calls, list) or not all(isinstance(c, dict) and "name" in c and arguments in c for c in calls):
        raise ValueError(f"not a list of objects with name and {arguments}")
    try:
        return [(c["name"] if isinstance(c["name"], str) else f"(not a name: {json.dumps(c['name'])})", json.dumps(c[arguments], sort_keys=True))
                for c in calls]
    except RecursionError:
        raise ValueError("brackets nested too deep") from None


def read_gold(text: str) -> list[dict]:
    """The gold calls of an example from their JSON list, which may be in JSON text once more. ValueError says what is wrong with it."""
    try:
        calls = loads(text)
        calls = loads(calls) if isinstance(calls, str) else calls
        canonical(calls)
    except ValueError as error:
        raise ValueError(f"the gold is no JSON list of calls: {error}") from None
    return calls


def parse_bracket_calls(text: str) -> list[dict]:
    """ToolACE's `[name(key=value, ...), ...]` as a list of {"name", "arguments"}.

    A value is a Python or JSON literal, else its bare text; `)`, commas and brackets inside quotes or inner brackets belong to it.
    ValueError where the text is no such list."""
    text = text.strip()
    if not (text.startswith("[") and text.endswith("]")):
        raise ValueError("calls do not stand in square brackets")
    calls, at = [], 1
    while not calls or text[at:].strip() != "]":
        if calls:
            comma = re.match(r"\s*,", text[at:])
            if not comma:
                raise ValueError("something else than a comma stands between two calls")
            at += comma.end()
        opened = text.find("(", at)
        name = text[at:opened].strip()
        if opened < 0 or not name:
            raise ValueError("a call has no name or no brackets")
        arguments = {}
        pieces, at = _split_arguments(text, opened + 1)
        for piece in pieces:
            key, equals, value = piece.partition("=")
            if not equals or not key.strip() or key.strip() in arguments:
                raise ValueError("an argument has no name, or the same one as another")
            arguments[key.strip()] = _literal(value.strip())
        calls.append({"name": name, "arguments": arguments})
    return calls


def _split_arguments(text: str, start: int) -> tuple[list[str], int]:
    """The arguments from `start` to the bracket that closes the call, and the place behind it."""
    pieces, depth, quote, before, at = [], 0, "", "(", start
    while at < len(text):
        c = text[at]
        if quote:
            if c == "\\":
                at += 1
            elif c == quote:
                quote = ""
        elif c in "'\"" and before in "(,=[{:":  # elsewhere it is an apostrophe in bare text
            quote = c
        elif c in "([{":
            depth += 1
        elif c in ")]}" and depth:
            depth -= 1
        elif c in "]}":
            raise ValueError("a bracket in a call is closed that was not opened")
        elif c in ",)" and not depth:
            pieces.append(text[start:at])
            start = at + 1
            if c == ")":
                return ([] if len(pieces) == 1 and not pieces[0].strip() else pieces), start
        if not c.isspace():
            before = c
        at += 1
    raise ValueError("a call is not closed")


def _literal(text: str):
    for read in (ast.literal_eval, json.loads):
        try:
            return json.loads(json.dumps(read(text)))  # tuples become lists; what JSON cannot hold is no value
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def print_benchmark(answers: Sequence[tuple[Example, list[tuple[str, str]] | None]], asked: int) -> None:
    """The table of BFCL's and API-Bank's own graders for (example, calls read from the reply); nothing for other examples."""
    if "category" in answers[0][0].meta:
        print_summary(summary([(e, None if calls is None else [{"name": name, "arguments": json.loads(arguments)} for name, arguments in calls])
                               for e, calls in answers]))
        if len(answers) < asked:
            print(f"{asked - len(answers)} of {asked} requests are not in it: their prompts are longer than --prompt-tokens")


# ---- loading ----------------------------------------------------------------------------------------------------------
class BadRow(ValueError):
    """Why a row, or one turn of it, cannot be used."""


def load_requests(spec: str, *, split: str = "train", limit: int | None = None, no_call: bool = True,
                  gold_calls: Callable[[Example], list] = lambda e: read_gold(e.answers[0])) -> list[Example]:
    """All examples of a file or hub data set, or of several with commas between them.

    `gold_calls` is how a method reads the gold of an example: a ValueError of it, or a broken row, raises one UserError that names the first
    rows and what is wrong. In xLAM and ToolACE, which are raw, such rows and turns are left out, and a warning counts them by reason."""
    if (benchmark := load_benchmark(spec, limit)) is not None:
        for e in benchmark:  # the system message of API-Bank's rows is ToolRL's prompt once more
            e.meta["messages"] = [m for m in e.meta["messages"] if not (m["role"] == "system" and e.meta["source"] == "api_bank")]
            e.meta["kind"] = KINDS[min(2, len(read_gold(e.answers[0])))]
        return benchmark
    examples, bad, left_out, seen = [], [], {}, 0
    for part, place, row in ((part.strip(), *found) for part in spec.split(",") for found in read_rows(part.strip(), split)):
        if limit and len(examples) >= limit:
            break
        seen += 1
        name = part.rsplit("/", 1)[-1].split(".")[0]
        for found in _read(row, f"{name}/{place.split()[-1]}", no_call):
            try:
                if isinstance(found, BadRow):
                    raise found
                calls = gold_calls(found)
            except ValueError as error:
                if "query" in row or "conversations" in row:
                    left_out.setdefault(str(error), []).append(place)
                else:
                    bad.append(f"{place}: {error}")
                continue
            examples.append(found)
            found.meta.update(source=name, kind=KINDS[min(2, len(calls))])
    if bad:
        more = f"; and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        raise UserError(f"{len(bad)} of {seen} rows of {spec!r} cannot be used (rows count from 0): {'; '.join(bad[:SHOWN])}{more}. Mend or delete them")
    if left_out:
        warnings.warn(f"{spec!r}: of {seen} rows were left out " + "; ".join(
            f"{len(places)} rows or turns as {reason} (first: {places[0]})" for reason, places in left_out.items()), stacklevel=2)
    if not examples:
        raise UserError(f"{spec!r} holds no row that can be used; it needs columns as xLAM, ToolACE, ToolRL or Tool-N1, or messages, tools and answers")
    return examples[:limit]


def _read(row: dict, key: str, no_call: bool) -> list[Example | BadRow]:
    """What one row holds, by its columns."""
    try:
        if "conversations" in row:
            return list(_toolace(row, key, no_call))
        if "prompt" in row and isinstance(row.get("reward_model"), dict):
            prompt = _messages(row["prompt"], ("system", "user", "assistant", "tool"))
            return [Example(key, prompt[-1]["content"], (_text(row["reward_model"].get("ground_truth"), "ground_truth"),), {"prompt": prompt})]
        if "query" in row and "tools" in row and "answers" in row:
            messages = [{"role": "user", "content": _text(row["query"], "query")}]
        elif "messages" in row and "tools" in row and "answers" in row:
            messages = _messages(row["messages"], ("user", "assistant", "tool"))
        else:
            raise BadRow(f"its columns ({', '.join(map(str, row))[:120]}) are those of no data set known here")
        answers = row["answers"] if isinstance(row["answers"], str) else json.dumps(row["answers"])
        return [_example(key, messages, _tools(row["tools"]), answers)]
    except BadRow as error:
        return [error]


def _toolace(row: dict, key: str, no_call: bool) -> Iterator[Example | BadRow]:
    """One example for every assistant turn that calls, and one for every other one if `no_call`; the turns before it are its dialogue."""
    tools = _tools(_tools_in(_text(row.get("system"), "system")))
    offered, messages = {t["name"] for t in tools}, []
    for i, turn in enumerate(row["conversations"] or []):
        role = ROLES.get(turn.get("from")) if isinstance(turn, dict) else None
        if role is None:
            raise BadRow("a turn is by nobody known")
        text, calls = _text(turn.get("value"), "value"), []
        if role == "assistant":
            bracketed = text.strip().startswith("[") and text.strip().endswith("]")
            try:
                calls = parse_bracket_calls(text) if bracketed else []
            except ValueError:
                yield BadRow("a turn in square brackets is no list of calls")
            if not messages:
                raise BadRow("the dialogue does not begin with the user")
            if not offered >= {c["name"] for c in calls}:
                yield BadRow("a call names a tool that is not offered")
            elif calls or (no_call and not bracketed):
                yield _example(f"{key}-{i}", list(messages), tools, json.dumps(calls))
        messages.append({"role": role, "content": json.dumps(calls) if calls else text})


def _example(key: str, messages: list[dict], tools: list[dict], answers: str) -> Example:
    if messages[0]["role"] != "user":
        raise BadRow("the dialogue does not begin with the user")
    return Example(key, messages[0]["content"], (answers,), {"messages": messages, "tools": tools})


def _tools_in(text: str) -> list:
    """The first JSON list of objects in a text."""
    for found in re.finditer(r"\[\s*\{", text):
        try:
            return json.JSONDecoder().raw_decode(text, found.start())[0]
        except (ValueError, RecursionError):
            continue
    raise BadRow("the system text holds no JSON list of tools")


def _tools(value) -> list[dict]:
    """Tools with their parameters as JSON schema; xLAM's are bare maps from a name to its description."""
    try:
        listed = loads(value) if isinstance(value, str) else value
    except ValueError:
        raise BadRow("tools are not JSON") from None
    listed = [t["function"] if isinstance(t, dict) and isinstance(t.get("function"), dict) else t for t in listed or []]
    if not all(isinstance(t, dict) and isinstance(t.get("name"), str) for t in listed):
        raise BadRow("tools are not a list of objects with a name")
    out = []
    for t in listed:
        parameters = t.get("parameters") or {}
        if not isinstance(parameters, dict):
            raise BadRow("a tool's parameters are not an object")
        schema = parameters if isinstance(parameters.get("type"), str) else {"type": "object", "properties": parameters}
        properties = schema.get("properties") or {}
        if not isinstance(properties, dict) or not all(isinstance(p, dict) for p in properties.values()):
            raise BadRow("a tool's parameters are not each an object")
        out.append({"name": t["name"], "description": str(t.get("description") or ""), "parameters": {**schema, "properties": properties}})
    return out


def _messages(value, roles: tuple[str, ...]) -> list[dict]:
    if not isinstance(value, list) or not value or not all(isinstance(m, dict) and m.get("role") in roles for m in value):
        raise BadRow(f"messages are not a list of {{role, content}} with the roles {', '.join(roles)}")
    return [{"role": m["role"], "content": _text(m.get("content"), "content")} for m in value]


def _text(value, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise BadRow(f"{name} is no text, or empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # JSON can spell half a surrogate pair; tokenizers fail on it much later
        raise BadRow(f"{name} holds half a character") from None
    return value
