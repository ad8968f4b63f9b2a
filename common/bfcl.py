"""Evaluation of function calls on two public benchmarks: BFCL, the Berkeley Function Calling Leaderboard, and API-Bank as ToolRL prepares it.

BFCL's data, loader and AST checker are those of the package `bfcl-eval`; `make setup_bfcl` puts it into `.bfcl/` without its dependencies.
A method evaluates like this, with calls as [{"name": ..., "arguments": {...}}, ...], or None where its parser could not read the reply:

    examples = load_benchmark("bfcl:simple_python,irrelevance", limit=100)  # or "api_bank:benchmarks/API-Bank"
    results = [(example, parse(reply(example))) for example in examples]    # [] is the explicit "no call"
    print_summary(summary(results))

Only the single-turn categories are here. Every category has two scores. `score` is the original's. `strict` differs in two places: on
irrelevance only an explicit empty list is right (the original takes every reply that it cannot parse for abstaining, so a model that
writes nonsense abstains perfectly), and on API-Bank the gold call must be the only one (the original's soft score wants it among the calls).
"""

import ast
import contextlib
import difflib
import functools
import importlib
import json
import re
import signal
import sys
import types
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import UserError
from common.data import Example

VERSION = "2026.3.23"
FOLDER = Path(__file__).parents[1] / ".bfcl"

SIMPLE = ("simple_python", "simple_java", "simple_javascript")
LIVE_AST = ("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple")
ROWS = {  # category -> its rows in this version, which are also its weight in pooled averages
    "simple_python": 400, "simple_java": 100, "simple_javascript": 50, "multiple": 200, "parallel": 200, "parallel_multiple": 200, "irrelevance": 240,
    "live_simple": 258, "live_multiple": 1053, "live_parallel": 16, "live_parallel_multiple": 24, "live_irrelevance": 884, "live_relevance": 16,
    "api_bank_1": 399, "api_bank_2": 67, "api_bank_3": 131}
API_BANK = tuple(c for c in ROWS if c.startswith("api_bank"))
GROUPS = {"non_live": tuple(ROWS)[:7], "live": tuple(ROWS)[7:13], "single_turn": tuple(ROWS)[:13]}  # the package's own names

_NON_LIVE = (("mean", SIMPLE), "multiple", "parallel", "parallel_multiple")
AVERAGES = {  # name -> ("mean" of the parts, or "pooled" by rows; the parts)
    "v4-style non-live": ("mean", _NON_LIVE),
    "v4-style live": ("pooled", LIVE_AST),
    "v4-style irrelevance": ("mean", ("irrelevance", "live_irrelevance")),
    "v3-style non-live": ("mean", (*_NON_LIVE, "irrelevance")),
    "v3-style live": ("pooled", (*LIVE_AST, "live_irrelevance", "live_relevance")),
    "mean of v4-style non-live and live": (  # the average of Tool-N1's tables
        "mean", (("mean", _NON_LIVE), ("pooled", LIVE_AST))),
    "API-Bank, all levels": ("pooled", API_BANK),
}
JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}  # as the package tells models that take JSON schemas
PYTHON_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "list": "array", "dict": "object"}  # API-Bank's


@functools.cache
def _package() -> tuple:
    """The package's (loader module, AST checker, languages). UserError when it is not installed.

    The checker looks one flag up in a table of all models, which imports every vendor's client: that table is replaced by one entry."""
    hint = "run `make setup_bfcl` (2 MB to download, 14 MB on disk)"
    if not (FOLDER / f"bfcl_eval-{VERSION}.dist-info").is_dir():
        raise UserError(f"evaluation on BFCL needs bfcl-eval {VERSION} in {str(FOLDER)!r}, which is not there: {hint}")
    table = types.ModuleType("bfcl_eval.constants.model_config")
    table.MODEL_CONFIG_MAPPING = {"local": types.SimpleNamespace(underscore_to_dot=False)}  # False: names keep their dots
    sys.path.insert(0, str(FOLDER))
    sys.modules[table.__name__] = table
    try:
        checker = importlib.import_module("bfcl_eval.eval_checker.ast_eval.ast_checker").ast_checker
        return importlib.import_module("bfcl_eval.utils"), checker, importlib.import_module("bfcl_eval.constants.enums").Language
    except (ImportError, OSError) as error:  # OSError: it makes folders of its own beside itself
        raise UserError(f"bfcl-eval in {str(FOLDER)!r} cannot be used ({error}): {hint}") from error
    finally:
        sys.path.remove(str(FOLDER))
        del sys.modules[table.__name__]


def load_benchmark(spec: str, limit: int | None = None) -> list[Example] | None:
    """Examples of `bfcl:CATEGORY,CATEGORY` or `api_bank:FILE-OR-FOLDER`; None for any other data source. `limit` counts for each category."""
    kind, _, rest = spec.partition(":")
    return load_bfcl(rest, limit) if kind == "bfcl" else load_api_bank(rest, limit) if kind == "api_bank" else None


def _spread(rows: list, limit: int | None) -> list:
    """At most `limit` rows, evenly spaced: neighbours share their functions or their dialogue."""
    if limit is not None and limit < 1:
        raise UserError(f"the number of examples to load must be at least 1, got {limit}")
    count = min(limit or len(rows), len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


# ---- BFCL's rows --------------------------------------------------------------------------------------------------------

def load_bfcl(categories: str | Sequence[str], limit: int | None = None) -> list[Example]:
    """Examples of single-turn categories (names of `ROWS` or `GROUPS`, a sequence or comma-separated), in BFCL's order.

    `limit`: at most that many of **each** category, evenly spaced. In `meta`: `category`;
    `messages` [{role, content}] (some rows bring a system message); `tools` [{name, description, parameters: JSON schema}] for the prompt,
    with the package's language hints, empty in four rows of live_irrelevance; `functions` and `possible`, the originals for the checker.
    `answers` is one JSON list of {name, arguments}: first accepted values, "[]" for irrelevance, some call for relevance (any is right).
    UserError on an unknown category, or without the package."""
    names = [n.strip() for n in (categories.split(",") if isinstance(categories, str) else categories)]
    known = [*GROUPS["single_turn"], *GROUPS]
    if unknown := next((n for n in names if n not in known), None):
        close = difflib.get_close_matches(unknown, known, 1)
        raise UserError(f"there is no BFCL category {unknown!r}{f' (did you mean {close[0]!r}?)' if close else ''}: choose among {', '.join(known)}")
    utils, examples = _package()[0], []
    for category in dict.fromkeys(c for n in names for c in GROUPS.get(n, (n,))):
        shown, original = (utils.load_dataset_entry(category, include_language_specific_hint=hint) for hint in (True, False))
        possible = [None] * len(shown) if "relevance" in category else [row["ground_truth"] for row in utils.load_ground_truth_entry(category)]
        examples += [_example(category, *row) for row in _spread(list(zip(shown, original, possible, strict=True)), limit)]
    return examples


def _example(category: str, shown: dict, original: dict, possible: list | None) -> Example:
    """One row: as the model sees it (hints added), as the checker sees it, and the accepted calls [{name: {parameter: [values]}}]."""
    messages, functions = shown["question"][0], original["function"]
    tools = [{"name": f["name"], "description": f["description"], "parameters": _json_schema(f["parameters"])} for f in shown["function"]]
    if possible is not None:
        calls = [_gold(category, functions, name, accepted) for call in possible for name, accepted in call.items()]
    else:
        calls = [] if category.endswith("irrelevance") else [{"name": tools[0]["name"], "arguments": {}}]
    meta = {"source": "bfcl", "category": category, "messages": messages, "tools": tools, "functions": functions, "possible": possible}
    return Example(shown["id"], messages[-1]["content"], (json.dumps(calls),), meta)


def _json_schema(schema: dict) -> dict:
    """The same schema with JSON schema's names of the types, at every depth."""
    out = dict(schema)
    if "type" in schema:
        out["type"] = JSON_TYPES.get(schema["type"], schema["type"])
    if "properties" in schema:  # never taken for a schema itself: a parameter may be called "type"
        out["properties"] = {name: _json_schema(inner) for name, inner in schema["properties"].items()}
    if "items" in schema:
        out["items"] = _json_schema(schema["items"])
    return out


def _gold(category: str, functions: list[dict], name: str, accepted: dict) -> dict:
    """The call with the first accepted values, without what may be left out ("" among the values)."""
    parameters = next((f["parameters"] for f in functions if f["name"] == name), {"properties": {}, "required": []})
    call = {k: _first(v) for k, v in accepted.items() if k in parameters["required"] or "" not in v}
    if category in SIMPLE[1:]:
        call = {k: _source_text(v, parameters["properties"].get(k, {}), category == "simple_java") for k, v in call.items()}
    return {"name": name, "arguments": call}


def _first(accepted: list):
    return _plain(next((v for v in accepted if v != ""), ""))


def _plain(value):
    """An accepted value without the lists of alternatives inside dictionaries."""
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {k: _first(v) if isinstance(v, list) else v for k, v in value.items() if not (isinstance(v, list) and "" in v)}
    return value


def _source_text(value, details: dict, java: bool) -> str:
    """A value as Java or JavaScript text, which is what these two categories want. The quotes are as the package's converters take them."""
    kind, item = details.get("type"), details.get("items", {})
    if isinstance(value, str):
        return value
    if java and isinstance(value, list):
        quoted = [json.dumps(v) if kind == "ArrayList" and item.get("type") == "String" else _source_text(v, item, java) for v in value]
        return f"new ArrayList<>(Arrays.asList({', '.join(quoted)}))" if kind == "ArrayList" else f"new Object[]{{{', '.join(quoted)}}}"
    if java and isinstance(value, dict):
        return "new HashMap<>() {{ " + " ".join(f"put({json.dumps(k)}, {json.dumps(v)});" for k, v in value.items()) + " }}"
    return json.dumps(value) + ("L" if java and kind == "long" else "")


# ---- API-Bank in ToolRL's format ------------------------------------------------------------------------------------------

_TOOL = re.compile(r"^\d+\. (?:Name: (?P<name>.+)\nDescription: |(?P<short>[^\s:]+): )(?P<text>[\s\S]*?)\nParameters: (?P<parameters>\{.*\})$", re.M)


def load_api_bank(path: str | Path, limit: int | None = None) -> list[Example]:
    """Examples of `level-1-api_processed.json` and its like, or of all levels in a folder; `limit` counts for each level.

    Rows are {system, user, answer, other}, answer {name, parameters} or a list with one such. `meta["messages"]` is the row's own system and
    user message as ToolRL wrote them (history as text), `meta["tools"]` its tools read out of the former, for other prompts."""
    path = Path(path)
    files = sorted(path.glob("level-[123]*.json")) if path.is_dir() else [path]
    if not files:
        raise UserError(f"the folder {str(path)!r} holds no level-1, level-2 or level-3 file of API-Bank (level-1-api_processed.json and so on)")
    examples = []
    for file in files:
        level = re.match(r"level-([123])", file.name)
        if not level:
            raise UserError(f"{str(file)!r}: the level is read from the file's name, which must begin with level-1, level-2 or level-3")
        try:
            rows = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{str(file)!r} cannot be read as JSON ({error})") from error
        if not (isinstance(rows, list) and rows):
            raise UserError(f"{str(file)!r} must be a list of at least one row")
        for number, row in _spread(list(enumerate(rows)), limit):
            try:
                answer = row["answer"][0] if isinstance(row["answer"], list) else row["answer"]
                gold = [{"name": answer["name"], "arguments": answer["parameters"]}]
                tools = [_api_bank_tool(found) for found in _TOOL.finditer(row["system"])]
                messages = [{"role": role, "content": row[role]} for role in ("system", "user")]
                if not (tools and isinstance(row["user"], str) and isinstance(answer["name"], str) and isinstance(answer["parameters"], dict)):
                    raise ValueError("no tools, or a user, name or parameters of another type")
            except (KeyError, IndexError, TypeError, ValueError, SyntaxError, AttributeError) as error:
                raise UserError(f"row {number} of {str(file)!r} (from 0) does not have API-Bank's form as ToolRL prepares it: system with numbered "
                                f"tools, user, and an answer with name and parameters ({type(error).__name__}: {error})") from error
            meta = {"source": "api_bank", "category": f"api_bank_{level[1]}", "messages": messages, "tools": tools, "gold": gold[0]}
            examples.append(Example(f"api_bank_{level[1]}_{number}", row["user"], (json.dumps(gold),), meta))
    return examples


def _api_bank_tool(found: re.Match) -> dict:
    properties = {name: {**details, "type": PYTHON_TYPES.get(details["type"], "string")}
                  for name, details in ast.literal_eval(found["parameters"]).items()}  # printed as Python, with single quotes
    return {"name": found["name"] or found["short"], "description": found["text"], "parameters": {"type": "object", "properties": properties}}


# ---- Grading ------------------------------------------------------------------------------------------------------------

def grade(example: Example, calls: list[dict] | None, strict: bool = False) -> bool:
    """Whether the calls are right; None means that the reply could not be parsed. `strict`: see the head of this file."""
    return not verdict(example, calls, strict)


def verdict(example: Example, calls: list[dict] | None, strict: bool = False) -> str:
    """"" where the calls are right, else why not, in a few words (the checker's error type where it decides)."""
    category = example.meta["category"]
    if category in API_BANK:
        return _api_bank_verdict(example.meta["gold"], calls, strict)
    if not (isinstance(calls, list) and all(isinstance(c, dict) and isinstance(c.get("name"), str) and isinstance(c.get("arguments"), dict)
                                            for c in calls)):
        calls = None  # as in the original, what is not a list of calls was not parsed
    if category.endswith("irrelevance"):
        return "calls a tool" if calls else "no explicit empty list" if strict and calls is None else ""
    if category.endswith("relevance"):
        return "" if calls else "calls no tool"
    if calls is None:
        return "not parsed"
    _, checker, languages = _package()
    language = {"simple_java": languages.JAVA, "simple_javascript": languages.JAVASCRIPT}.get(category, languages.PYTHON)
    outputs = [{c["name"]: c["arguments"]} for c in calls]
    with contextlib.nullcontext() if language is languages.PYTHON else _cpu_limit(2):
        try:
            result = checker(example.meta["functions"], outputs, example.meta["possible"], language, category, "local")
        except Exception as error:  # it raises of every kind on odd values, as on text in a list of dictionaries; such a call is never right
            return f"checker failed: {type(error).__name__}"
    return "" if result["valid"] else result["error_type"]


def _api_bank_verdict(gold: dict, calls: list[dict] | None, strict: bool) -> str:
    if not isinstance(calls, list):
        return "not parsed"
    wanted = gold["name"], gold["arguments"]
    found = [isinstance(c, dict) and (c.get("name"), c.get("arguments")) == wanted for c in calls]
    # the soft score takes an object that is no call for the arguments of the right tool
    bare = any(isinstance(c, dict) and not c.keys() >= {"name", "arguments"} and c == gold["arguments"] for c in calls)
    if found == [True] if strict else any(found) or bare:
        return ""
    return "not exactly the gold call" if strict else "gold call not among the calls"


@contextlib.contextmanager
def _cpu_limit(seconds: float):
    """TimeoutError inside after so much processor time. The patterns that read Java and JavaScript take exponential time on some texts, as on "[[],[],[],".

    Main thread only. The timer repeats: a converter swallows the first error and goes on."""
    def stop(number, frame):
        raise TimeoutError
    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


# ---- Summary ------------------------------------------------------------------------------------------------------------

def summary(results: Sequence[tuple[Example, list[dict] | None]]) -> dict:
    """{"categories": {name: {n, rows, score, strict, unparsed, errors}}, "averages": {name: {score, strict, complete, missing}}}, JSON-ready.

    `rows` is what a full run has; `errors` counts the reasons of `verdict`. An average is None while a category of it is missing, and
    `complete` only when every row was graded; pooled ones weigh by the full counts. Neither style's overall score is here: both need the
    multi-turn categories, and v3's non-live average also had executable ones for most of its time."""
    categories: dict[str, dict] = {}
    for example, calls in results:
        name = example.meta["category"]
        cell = categories.setdefault(name, {"n": 0, "rows": ROWS[name], "score": 0, "strict": 0, "unparsed": 0, "errors": Counter()})
        why = verdict(example, calls)
        cell["n"] += 1
        cell["score"] += not why
        cell["strict"] += not (verdict(example, calls, strict=True) if name in API_BANK or "relevance" in name else why)
        cell["unparsed"] += calls is None
        cell["errors"].update([why] if why else [])
    for cell in categories.values():
        cell |= {"score": cell["score"] / cell["n"], "strict": cell["strict"] / cell["n"], "errors": dict(cell["errors"].most_common())}
    averages = {name: {"score": _average(node, categories, "score"), "strict": _average(node, categories, "strict"),
                       "missing": [c for c in _leaves(node) if c not in categories],
                       "complete": all(c in categories and categories[c]["n"] == ROWS[c] for c in _leaves(node))} for name, node in AVERAGES.items()}
    return {"categories": {c: categories[c] for c in ROWS if c in categories}, "averages": averages}


def _leaves(node) -> list[str]:
    return [node] if isinstance(node, str) else [leaf for part in node[1] for leaf in _leaves(part)]


def _average(node, categories: dict, key: str) -> float | None:
    if isinstance(node, str):
        return categories[node][key] if node in categories else None
    how, parts = node
    values = [_average(part, categories, key) for part in parts]
    weights = [ROWS[part] if how == "pooled" else 1 for part in parts]
    return None if None in values else sum(v * w for v, w in zip(values, weights)) / sum(weights)


def print_summary(results: dict) -> None:
    """The table of `summary`: every category apart, then the averages that can be formed."""
    print(f"{'':36}{'score':>7}{'strict':>8}{'n':>7}{'unparsed':>10}")
    for name, cell in results["categories"].items():
        of = "" if cell["n"] == cell["rows"] else f" of {cell['rows']}"
        print(f"{name:36}{cell['score']:7.3f}{cell['strict']:8.3f}{cell['n']:7}{cell['unparsed']:10}{of}")
    for name, cell in results["averages"].items():
        if cell["score"] is not None:
            print(f"{name:36}{cell['score']:7.3f}{cell['strict']:8.3f}{'' if cell['complete'] else '   (from a part of the rows)'}")


# ---- A check of the path -----------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Check:
    """Grade the benchmarks' own gold answers through this file's path, and show those that are refused."""

    golden: bool = False
    """Do it; without this flag nothing happens."""
    categories: str = "single_turn"
    """BFCL's categories, comma-separated, or non_live, live, single_turn."""
    api_bank: str = ""
    """API-Bank's rows as well: the file of a level or the folder of all."""


def main(args: list[str] | None = None) -> int:
    import tyro

    options = tyro.cli(Check, prog="python -m common.bfcl", args=args)
    if not options.golden:
        print("nothing to do: give --golden to check the path")
        return 0
    try:
        examples = load_bfcl(options.categories) + (load_api_bank(options.api_bank) if options.api_bank else [])
        results = [(example, json.loads(example.answers[0])) for example in examples]
        refused = [(example.id, why) for example, calls in results if (why := verdict(example, calls))]
        print_summary(summary(results))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, why in refused:
        print(f"gold answer refused: {name}: {why}")
    print(f"{len(results) - len(refused):,} of {len(results):,} gold answers are right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
