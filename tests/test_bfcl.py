"""BFCL and API-Bank: rows to examples, grading, averages. What needs the package is skipped without it; the rest always runs."""
import json
import time
from collections import Counter

import pytest

from common import UserError
from common import bfcl as m
from common.data import Example

needs_package = pytest.mark.skipif(not (m.FOLDER / f"bfcl_eval-{m.VERSION}.dist-info").is_dir(),
                                   reason=f"bfcl-eval {m.VERSION} is not installed: make setup_bfcl")
call = lambda name, **arguments: {"name": name, "arguments": arguments}

# ---- rows written in the schema of BFCL ----

FUNCTION = {"name": "shop.order", "description": "Order food.", "parameters": {"type": "dict", "required": ["dish", "price"], "properties": {
    "dish": {"type": "string", "description": "the dish", "enum": ["soup", "rice"]},
    "price": {"type": "float", "description": "in euros"},
    "box": {"type": "tuple", "items": {"type": "float"}, "description": "width and depth"},
    "extra": {"type": "any", "description": "anything"},
    "type": {"type": "string", "description": "a parameter that is called type"},
    "address": {"type": "dict", "description": "where to", "properties": {"zip": {"type": "integer", "description": "code"}}},
    "people": {"type": "array", "items": {"type": "dict", "properties": {"age": {"type": "float", "description": "in years"}}}, "description": "who"}}}}
ACCEPTED = [{"shop.order": {"dish": ["soup", "a soup"], "price": [3.5], "box": ["", [1.0, 2.0]], "extra": [""], "type": ["hot"],
                            "address": [{"zip": [123, 456], "street": ["", "Elm"]}], "people": [[{"age": [4.0]}, {"age": [""]}]]}}]


def row(number=0, messages=({"role": "user", "content": "Soup, please."},), functions=(FUNCTION,)):
    return {"id": f"simple_python_{number}", "question": [list(messages)], "function": json.loads(json.dumps(functions))}


def example(category, possible=None, functions=(FUNCTION,)):
    return m._example(category, row(functions=functions), row(functions=functions), possible)


def test_a_row_becomes_an_example_with_json_schema_for_the_prompt_and_the_original_for_the_checker():
    system = {"role": "system", "content": "Be brief."}
    shown = row(messages=(system, {"role": "user", "content": "Soup, please."}))
    shown["function"][0]["description"] += " A hint."
    e = m._example("simple_python", shown, row(), ACCEPTED)
    assert (e.id, e.question) == ("simple_python_0", "Soup, please.") and e.meta["messages"] == [system, {"role": "user", "content": e.question}]
    assert e.meta["functions"] == [FUNCTION] and e.meta["possible"] == ACCEPTED and e.meta["category"] == "simple_python"
    (tool,) = e.meta["tools"]
    assert tool["name"] == "shop.order" and tool["description"] == "Order food. A hint."
    schema = tool["parameters"]
    kinds = {name: p["type"] for name, p in schema["properties"].items()}
    assert schema["type"] == "object" and schema["required"] == ["dish", "price"] and schema["properties"]["dish"]["enum"] == ["soup", "rice"]
    assert kinds == {"dish": "string", "price": "number", "box": "array", "extra": "string", "type": "string", "address": "object",
                     "people": "array"}
    assert schema["properties"]["box"]["items"] == {"type": "number"} and schema["properties"]["address"]["properties"]["zip"]["type"] == "integer"
    assert schema["properties"]["people"]["items"]["properties"]["age"]["type"] == "number"


def test_the_gold_answer_takes_first_values_at_every_depth_and_leaves_out_what_may_be():
    (answer,) = example("simple_python", ACCEPTED).answers
    assert json.loads(answer) == [call("shop.order", dish="soup", price=3.5, type="hot", address={"zip": 123}, people=[{"age": 4.0}, {}])]
    assert json.loads(example("irrelevance").answers[0]) == []
    assert json.loads(example("live_relevance").answers[0]) == [call("shop.order")]  # there, any call is right


def test_gold_values_as_source_text_for_java_and_javascript():
    java = lambda value, **details: m._source_text(value, details, java=True)
    assert [java(True, type="boolean"), java(5, type="long"), java(0.5, type="double"), java("new X()", type="any")] == ["true", "5L", "0.5", "new X()"]
    assert java([1, 2], type="ArrayList", items={"type": "long"}) == "new ArrayList<>(Arrays.asList(1L, 2L))"
    assert java(["a"], type="ArrayList", items={"type": "String"}) == 'new ArrayList<>(Arrays.asList("a"))'
    assert java(["a", "b"], type="Array", items={"type": "String"}) == "new Object[]{a, b}"
    assert java({"k": 1}, type="HashMap") == 'new HashMap<>() {{ put("k", 1); }}'
    assert [m._source_text(v, {}, java=False) for v in ([1, "a"], {"k": True}, False, 4.0)] == ['[1, "a"]', '{"k": true}', "false", "4.0"]


def test_irrelevance_has_two_scores_and_relevance_wants_any_call():
    e = example("live_irrelevance")
    scores = lambda calls: (m.grade(e, calls), m.grade(e, calls, strict=True))
    assert scores([]) == (True, True) and scores([call("f")]) == (False, False)
    assert scores(None) == (True, False)  # nonsense abstains perfectly in the original
    for malformed in ([1], [{"name": "f"}], [{"name": 3, "arguments": {}}], [{"name": "f", "arguments": []}], {"name": "f"}, "f", [call("f"), None]):
        assert scores(malformed) == (True, False)  # no list of calls is a failed parse
    assert [m.grade(example("live_relevance"), calls) for calls in ([call("f")], [], None, [1])] == [True, False, False, False]
    assert m.verdict(example("parallel", ACCEPTED), None) == "not parsed"  # decided without the checker


def test_averages_are_those_of_the_two_styles():

    def results(**scores):  # category -> right answers of two
        out = []
        for name, n in scores.items():
            e = Example(name, "q", ("[]",), {"category": name, "gold": call("f")})
            good, bad = ([call("f")], []) if name in ("live_relevance", *m.API_BANK) else ([], [call("f")])
            out += [(e, good if i < n else bad) for i in range(2)]
        return out

    s = m.summary(results(irrelevance=1, live_irrelevance=2, api_bank_1=2, api_bank_2=1, api_bank_3=0))
    assert s["categories"]["irrelevance"] == {"n": 2, "rows": 240, "score": 0.5, "strict": 0.5, "unparsed": 0, "errors": {"calls a tool": 1}}
    a = s["averages"]
    assert a["v4-style irrelevance"] == {"score": 0.75, "strict": 0.75, "complete": False, "missing": []}
    assert a["API-Bank, all levels"]["score"] == pytest.approx((399 + 67 / 2) / 597)  # pooled by rows, not by what was tried
    assert a["v3-style non-live"]["score"] is None and a["v3-style non-live"]["missing"][:2] == ["simple_python", "simple_java"]
    assert a["v3-style live"]["missing"] == ["live_simple", "live_multiple", "live_parallel", "live_parallel_multiple", "live_relevance"]
    json.dumps(s)

    cells = {c: {"score": x} for c, x in {
        "simple_python": 0.9, "simple_java": 0.6, "simple_javascript": 0.3, "multiple": 0.8, "parallel": 0.4, "parallel_multiple": 0.2,
        "irrelevance": 0.1, "live_simple": 1.0, "live_multiple": 0.5, "live_parallel": 0.0, "live_parallel_multiple": 0.25,
        "live_irrelevance": 0.75, "live_relevance": 1.0}.items()}
    value = lambda name: m._average(m.AVERAGES[name], cells, "score")
    assert value("v4-style non-live") == pytest.approx((0.6 + 0.8 + 0.4 + 0.2) / 4)
    assert value("v3-style non-live") == pytest.approx((0.6 + 0.8 + 0.4 + 0.2 + 0.1) / 5)
    live = 258 + 0.5 * 1053 + 0.25 * 24
    assert value("v4-style live") == pytest.approx(live / 1351)
    assert value("v3-style live") == pytest.approx((live + 0.75 * 884 + 16) / 2251)
    assert value("mean of v4-style non-live and live") == pytest.approx((0.5 + live / 1351) / 2)


def test_the_summary_counts_what_was_not_parsed_and_prints(capsys):
    e = example("irrelevance")
    s = m.summary([(e, None)] * 3 + [(e, [])])
    assert s["categories"]["irrelevance"] == {"n": 4, "rows": 240, "score": 1.0, "strict": 0.25, "unparsed": 3, "errors": {}}
    m.print_summary(s)
    out = capsys.readouterr().out
    assert "1.000   0.250      4         3 of 240" in out and "style" not in out  # no average can be formed


def test_a_missing_package_is_one_kind_sentence(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(m, "FOLDER", tmp_path / "none")
    m._package.cache_clear()
    try:
        for ask in (lambda: m.load_bfcl("multiple"), lambda: m.load_benchmark("bfcl:live"), lambda: m.grade(example("parallel", ACCEPTED), [])):
            with pytest.raises(UserError, match="make setup_bfcl"):
                ask()
        assert m.main(["--golden"]) == 2 and "make setup_bfcl" in capsys.readouterr().err
    finally:
        m._package.cache_clear()


def test_bad_requests():
    with pytest.raises(UserError, match="did you mean 'simple_python'"):
        m.load_bfcl("multiple,simple_pyton")
    with pytest.raises(UserError, match="no BFCL category 'multi_turn_base'"):
        m.load_bfcl(["multi_turn_base"])
    assert m.load_benchmark("questions.jsonl") is None and m.load_benchmark("owner/name:config") is None
    assert m._spread(list(range(10)), 4) == [0, 2, 5, 7] and m._spread([1, 2], 5) == [1, 2] == m._spread([1, 2], None)
    with pytest.raises(UserError, match="at least 1"):
        m._spread([1], 0)


# ---- rows written in the schema of API-Bank as ToolRL has it ----

LEVEL_1 = {"system": "You assist.\n\n**Available Tools**\nUse these:\n1. Name: AddAlarm\nDescription: Adds an alarm. Note: one\nat a time.\n"
                     "Parameters: {'time': {'type': 'str', 'description': \"The alarm's time: {H:M}\"}, 'loud': {'type': 'bool', 'description': 'x'}}\n"
                     "2. Name: Stop\nDescription: Stops.\nParameters: {}\n\n**Steps**\n1. **Think:** first.\n2. Name: no tool\n",
           "user": "**History**\n<user>Wake me at 7.</user>\n", "other": {"id": 0},
           "answer": [{"name": "AddAlarm", "parameters": {"time": "07:00", "loud": True}}]}
LEVEL_3 = {"system": "**Available Tools**\n1. Geocoding: Place to coordinates: both.\nParameters: {'place': {'type': 'str', 'description': 'p'}}\n\n**Steps**",
           "user": "**History**\n<user>Where is Lunde?</user>", "answer": {"name": "Geocoding", "parameters": {"place": "Lunde"}}, "other": {}}


@pytest.fixture
def bank(tmp_path):
    for level, rows in ((1, [LEVEL_1, LEVEL_1 | {"user": "again"}]), (3, [LEVEL_3])):
        (tmp_path / f"level-{level}-api_processed.json").write_text(json.dumps(rows))
    return tmp_path


def test_api_bank_rows(bank):
    first, second, third = m.load_benchmark(f"api_bank:{bank}")
    assert [e.id for e in (first, second, third)] == ["api_bank_1_0", "api_bank_1_1", "api_bank_3_0"] and second.question == "again"
    assert first.meta["messages"] == [{"role": "system", "content": LEVEL_1["system"]}, {"role": "user", "content": LEVEL_1["user"]}]
    assert json.loads(first.answers[0]) == [call("AddAlarm", time="07:00", loud=True)]
    assert json.loads(third.answers[0]) == [call("Geocoding", place="Lunde")]
    assert first.meta["tools"] == [
        {"name": "AddAlarm", "description": "Adds an alarm. Note: one\nat a time.", "parameters": {"type": "object", "properties": {
            "time": {"type": "string", "description": "The alarm's time: {H:M}"}, "loud": {"type": "boolean", "description": "x"}}}},
        {"name": "Stop", "description": "Stops.", "parameters": {"type": "object", "properties": {}}}]
    assert [(t["name"], t["description"]) for t in third.meta["tools"]] == [("Geocoding", "Place to coordinates: both.")]
    assert [e.id for e in m.load_api_bank(bank, limit=1)] == ["api_bank_1_0", "api_bank_3_0"]
    assert len(m.load_api_bank(bank / "level-1-api_processed.json")) == 2


def test_api_bank_has_a_soft_and_an_exact_score(bank):
    e, gold, other = m.load_api_bank(bank)[0], call("AddAlarm", time="07:00", loud=True), call("Stop")
    scores = lambda calls: (m.grade(e, calls), m.grade(e, calls, strict=True))
    assert scores([gold]) == scores([gold | {"id": 4}]) == (True, True)
    assert scores([other, gold]) == (True, False)  # soft: among others
    assert scores([gold["arguments"]]) == (True, False)  # soft: the arguments alone
    for wrong in (None, [], [other], [call("AddAlarm", time="07:00")], [call("AddAlarm", time="07:00", loud=True, x=1)],
                  [call("AddAlarm", time="7:00", loud=True)], [call("Stop", time="07:00", loud=True)], [3, "x", None], gold, "x"):
        assert scores(wrong) == (False, False), wrong


def test_api_bank_files_that_cannot_be_used(bank):
    def refused(match, path=bank / "level-2-x.json", text=None):
        if text is not None:
            path.write_text(text)
        with pytest.raises(UserError, match=match):
            m.load_api_bank(path)
    refused("no level-1, level-2 or level-3 file", (bank / "empty").mkdir() or bank / "empty")
    refused("cannot be read as JSON", text="[{]")
    refused("cannot be read as JSON", bank / "level-2-none.json")
    refused("must begin with level-1", bank / "x.json", "[]")
    refused("at least one row", text="{}")
    for changes in ({"answer": []}, {"answer": [{"name": "f"}]}, {"answer": 3}, {"system": "no tools"}, {"system": 3}, {"user": None},
                    {"answer": [{"name": "f", "parameters": 3}]}, {"system": LEVEL_3["system"].replace("{'place'", "{place")}):
        refused("row 1 of", text=json.dumps([LEVEL_3, LEVEL_3 | changes]))


# ---- with the package ----

@pytest.fixture(scope="module")
def everything():
    return m.load_bfcl("single_turn")


@needs_package
def test_every_category_is_there_whole(everything):
    assert Counter(e.meta["category"] for e in everything) == {c: n for c, n in m.ROWS.items() if c not in m.API_BANK}
    assert len({e.id for e in everything}) == len(everything) == 3641
    assert all(e.meta["messages"][-1] == {"role": "user", "content": e.question} and e.question.strip() for e in everything)
    assert sum(not e.meta["tools"] for e in everything) == 4
    assert {message["role"] for e in everything for message in e.meta["messages"]} == {"system", "user", "assistant"}


@needs_package
def test_prompts_speak_json_schema_and_carry_the_packages_hints(everything):
    def kinds(schema):
        yield schema.get("type")
        for inner in [*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else [])]:
            yield from kinds(inner)
    shown = Counter(k for e in everything for tool in e.meta["tools"] for k in kinds(tool["parameters"]))
    assert shown.keys() <= {"object", "string", "integer", "number", "boolean", "array"}
    hint = {"simple_java": "Java 8 SDK syntax.", "simple_javascript": "JavaScript syntax."}
    assert all(tool["description"].endswith(hint.get(e.meta["category"], "Python 3 syntax.")) for e in everything for tool in e.meta["tools"])
    java = [p for e in everything if e.meta["category"] in hint for t in e.meta["tools"] for p in t["parameters"]["properties"].values()]
    assert java and all(p["type"] == "string" and "string representation" in p["description"] for p in java)
    assert not any("syntax." in f["description"][-16:] for e in everything for f in e.meta["functions"])  # the checker's copy is without


@needs_package
def test_gold_answers_are_right_but_for_seven_rows_that_nobody_can_answer(everything):
    refused = {e.id: why for e in everything if (why := m.verdict(e, json.loads(e.answers[0])))}
    assert refused == {
        "simple_java_36": "value_error:list/tuple", "simple_java_65": "value_error:list/tuple",  # wants 42, its converter gives "42"
        "simple_java_64": "value_error:dict_value",  # the accepted text is read letter by letter
        "live_simple_106-63-0": "type_error:simple", "live_simple_112-68-0": "type_error:simple",  # required, and no value is accepted
        "live_multiple_862-181-3": "simple_function_checker:unexpected_param",  # the accepted call has a parameter that the function lacks,
        "live_multiple_964-207-0": "simple_function_checker:missing_required"}  # or lacks one that is required
    s = m.summary([(e, json.loads(e.answers[0])) for e in everything])
    assert all(s["categories"][c]["score"] == 1 for c in ("simple_python", "multiple", "parallel", "parallel_multiple"))
    assert all(a["complete"] and a["score"] > 0.99 for name, a in s["averages"].items() if "API-Bank" not in name)


def wrong_answers(e):
    """Replies that must score 0: each spoils the gold answer in one place."""
    gold = json.loads(e.answers[0])
    if e.meta["category"].endswith("irrelevance"):
        yield [call(tool["name"]) for tool in e.meta["tools"][:1]] or [call("f")]
        return
    yield from (None, [])
    if e.meta["category"] == "live_relevance":
        return
    yield gold[:-1]
    yield [*gold, gold[0]]
    for i, one in enumerate(gold):
        spoil = lambda **changes: [*gold[:i], one | changes, *gold[i + 1:]]
        yield spoil(name=one["name"] + "_x")
        yield spoil(arguments=one["arguments"] | {"no_such_parameter": 1})
        for name, value in one["arguments"].items():
            yield spoil(arguments=one["arguments"] | {name: spoilt(value)})


def spoilt(value):
    """Another value, of the same type unless it is null."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 987_654
    if isinstance(value, list):
        return [*value, *(value[-1:] or ["zq"])]
    return {**value, "zq": 1} if isinstance(value, dict) else "zq"


@needs_package
def test_wrong_answers_score_nothing_in_every_category(everything):
    tried, taken = Counter(), []
    for e in everything:
        for calls in wrong_answers(e):
            tried[e.meta["category"]] += 1
            taken += [(e.id, calls)] if m.grade(e, calls) or m.grade(e, calls, strict=True) else []
    assert taken == [] and len(tried) == 13 and tried.total() > 20_000


@needs_package
def test_limit_is_for_each_category_and_spread_over_it():
    some = m.load_bfcl(["live_multiple", " irrelevance"], limit=3)
    assert [e.id.rsplit("_", 1)[0] for e in some] == ["live_multiple"] * 3 + ["irrelevance"] * 3
    assert some[1].id.startswith("live_multiple_351-")
    assert m.load_benchmark("bfcl:irrelevance", limit=1)[0] == some[3] and len(m.load_bfcl("live,live_simple")) == 2251  # once each


@needs_package
def test_order_and_leniency_are_the_checkers():
    parallel = m.load_bfcl("parallel", limit=1)[0]
    assert m.grade(parallel, json.loads(parallel.answers[0])[::-1])  # order-free
    e = example("simple_python", ACCEPTED)
    gold = json.loads(e.answers[0])[0]["arguments"]
    right = lambda **changes: m.grade(e, [{"name": "shop.order", "arguments": gold | changes}])
    assert right() and right(dish="A  Soup.") and right(box=[1.0, 2.0])  # case, spaces and marks do not count
    assert not right(price="3.5") and not right(dish="rice") and not right(box=[2.0, 1.0]) and not right(price=True)
    whole = example("simple_python", [{"shop.order": ACCEPTED[0]["shop.order"] | {"price": [3.0]}}])
    assert m.grade(whole, [{"name": "shop.order", "arguments": gold | {"price": 3}}])  # an integer where a float is due


@needs_package
def test_what_breaks_the_checker_is_wrong_and_is_named():
    e = example("simple_python", [{"shop.order": {"dish": ["soup"], "price": [3.5], "people": ["", [{"age": [4.0]}]]}}])
    assert m.verdict(e, [call("shop.order", dish="soup", price=3.5, people=["me"])]) == "checker failed: AttributeError"
    assert m.verdict(e, [call("shop.order", dish="soup", price=10**400)]) == "checker failed: OverflowError"


@needs_package
def test_a_text_that_the_javascript_patterns_cannot_finish_is_wrong_in_seconds():
    function = {"name": "f", "description": "d", "parameters": {"type": "dict", "required": ["x"], "properties": {
        "x": {"type": "array", "items": {"type": "float"}, "description": "d"}}}}
    e = example("simple_javascript", [{"f": {"x": [[1.0]]}}], (function,))
    start = time.process_time()
    assert not m.grade(e, [call("f", x="[" + "[]," * 60)]) and 1 < time.process_time() - start < 20
    assert m.grade(e, [call("f", x="[1.0]")])


@needs_package
def test_a_call_list_is_what_the_package_takes_for_one():
    utils = m._package()[0]
    for calls in ([], None, [call("f")], [call("f", x=1), call("g")], [1], "f", [{"name": "f", "arguments": [1]}]):
        decoded = [{c["name"]: c["arguments"]} if isinstance(c, dict) else c for c in calls] if isinstance(calls, list) else calls
        assert m.grade(example("irrelevance"), calls) == utils.is_empty_output(decoded)


@needs_package
def test_source_text_is_graded_in_the_main_thread_only():
    """Elsewhere there is no limit of time, and saying so beats a verdict that might never come."""
    from concurrent.futures import ThreadPoolExecutor
    e = m.load_bfcl("simple_java", limit=1)[0]
    with ThreadPoolExecutor() as pool, pytest.raises(ValueError, match="main thread"):
        pool.submit(m.grade, e, json.loads(e.answers[0])).result()
