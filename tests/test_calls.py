"""Function-calling rows of every source as examples, and ToolACE's way of writing calls."""
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import UserError, bfcl
from common.calls import canonical, load_requests, parse_bracket_calls, print_benchmark, read_gold
from common.data import training_and_held_out
from common.tiny.world import CHAT, requests
from methods import tool_n1, toolrl

XLAM = {"id": 0, "query": "Where can I find live giveaways for beta access?", "answers": json.dumps([
    {"name": "live_giveaways_by_type", "arguments": {"type": "beta"}}, {"name": "live_giveaways_by_type", "arguments": {"type": "game"}}]),
    "tools": json.dumps([{"name": "live_giveaways_by_type", "description": "Live giveaways.", "parameters": {
        "type": {"description": "Type of giveaway.", "type": "str, optional", "default": "game"}}}])}
TOOLACE = {
    "system": "You are an expert in composing functions. Here is a list of functions in JSON format that you can invoke:\n"
              '[{"name": "Market Trends API", "description": "Trends [of a day]", "parameters": {"type": "dict", "properties": {"kind": '
              '{"type": "string", "description": "which"}}, "required": ["kind"]}, "required": null}]. \nShould you decide to call, use [f(x=1)].',
    "conversations": [{"from": "user", "value": "What is new?"}, {"from": "assistant", "value": '[Market Trends API(kind="index (EU)", n=[1, 2])]'},
                      {"from": "tool", "value": '[{"name": "Market Trends API", "results": {}}]'}, {"from": "assistant", "value": "Nothing is."},
                      {"from": "user", "value": "And now?"}, {"from": "assistant", "value": "[Other API(x=1)]"}]}
TOOLRL = {"data_source": "rlla", "prompt": [{"content": "**Available Tools** ...", "role": "system"}, {"content": "<user> Hi </user>", "role": "user"}],
          "ability": "math", "reward_model": {"ground_truth": '<think> p </think>\n<tool_call>\n{"name": "f", "parameters": {"x": 1}}\n</tool_call>',
                                              "style": "rule"}, "extra_info": {"index": 0, "split": "test"}}
TOOL_N1 = {"data_source": "toolcall", "prompt": [{"role": "system", "content": "# Tool ..."}, {"role": "user", "content": "Hi"}], "ability": "tool",
           "reward_model": {"style": "rule", "ground_truth": json.dumps([{"name": "f", "arguments": {"x": 1}}])},
           "extra_info": {"split": "train", "index": 3, "prompt_type": "qwen", "tools": "[]", "raw_system": "..."}}


def write(path, rows):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# --- calls as text ---

@pytest.mark.parametrize("text,expected", [
    ('[f()]', [("f", {})]),
    ('[get.news(page=1), Market Trends API(kind="a", on=True)]', [("get.news", {"page": 1}), ("Market Trends API", {"kind": "a", "on": True})]),
    ('[f(a="1) and (2", b=\'x), g(y=1\')]', [("f", {"a": "1) and (2", "b": "x), g(y=1"})]),  # the original cuts at the first )
    ('[f(a=[1, "b, c"], b={"k": (1, 2), "s": ")"})]', [("f", {"a": [1, "b, c"], "b": {"k": [1, 2], "s": ")"}})]),
    ('[f(a=true, b=null, c=-1.5, d="it\'s", e=it\'s, f="say \\"hi\\"")]',
     [("f", {"a": True, "b": None, "c": -1.5, "d": "it's", "e": "it's", "f": 'say "hi"'})]),
    ('[f(a=2024-01-05, b=New York, c=007, d="x=y", e=)]', [("f", {"a": "2024-01-05", "b": "New York", "c": "007", "d": "x=y", "e": ""})]),
    ('[f(a="1_0", b={1, 2})]', [("f", {"a": "1_0", "b": "{1, 2}"})]),
    (' [ f ( a = 1 ) , g ( ) ] ', [("f", {"a": 1}), ("g", {})]),
])
def test_bracket_calls(text, expected):
    assert [(c["name"], c["arguments"]) for c in parse_bracket_calls(text)] == expected


@pytest.mark.parametrize("text", ["", "f(x=1)", "[]", "[f]", "[f(x=1]", "[f(1)]", "[f(x=1, x=2)]", "[f(x=1) g()]", "[f(x=1),]", "[(x=1)]", "[I think (so) too]",
                                  '[f(x="1)]', "[f(x=1])]"])
def test_what_is_no_list_of_calls_is_refused(text):
    with pytest.raises(ValueError):
        parse_bracket_calls(text)


VALUES = st.recursive(st.none() | st.booleans() | st.integers(-10**9, 10**9) | st.text(max_size=12), lambda x: st.lists(x, max_size=3)
                      | st.dictionaries(st.text(max_size=5), x, max_size=3), max_leaves=6)


@settings(max_examples=200, deadline=None, database=None)
@given(st.lists(st.tuples(st.sampled_from(["f", "a.b", "Get It"]), st.dictionaries(st.sampled_from(["x", "from", "is_new"]), VALUES, max_size=3)), min_size=1,
                max_size=3))
def test_what_python_would_write_is_read_back(calls):
    text = "[" + ", ".join(f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for name, arguments in calls) + "]"
    assert [(c["name"], c["arguments"]) for c in parse_bracket_calls(text)] == calls


def test_calls_are_compared_as_json_text():
    same = lambda a, b: canonical([{"name": "f", "arguments": a}]) == canonical([{"name": "f", "arguments": b}])
    assert same({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1}) and same({"a": "é"}, json.loads('{"a": "\\u00e9"}'))
    assert not any(same({"a": x}, {"a": y}) for x, y in [(3, 3.0), (3, "3"), (1, True), ([1, 2], [2, 1])])
    assert canonical([{"name": ["f"], "arguments": {}}]) != canonical([{"name": '["f"]', "arguments": {}}])
    for bad in (7, {"name": "f"}, [{"name": "f"}], ["f"], None):
        with pytest.raises(ValueError):
            canonical(bad)
    with pytest.raises(ValueError):
        read_gold('{"name": "f", "arguments": {}}')


# --- loading ---

def test_xlam(tmp_path):
    e, = load_requests(write(tmp_path / "xlam.jsonl", [XLAM]))
    assert e.question == XLAM["query"] and e.meta["messages"] == [{"role": "user", "content": XLAM["query"]}]
    assert read_gold(e.answers[0])[1] == {"name": "live_giveaways_by_type", "arguments": {"type": "game"}} and e.meta["kind"] == "parallel"
    assert e.meta["tools"][0]["parameters"] == {"type": "object", "properties": {
        "type": {"description": "Type of giveaway.", "type": "str, optional", "default": "game"}}}


def test_toolace_gives_one_example_for_every_turn_that_calls(tmp_path):
    path = write(tmp_path / "toolace.jsonl", [TOOLACE, {"system": "no tools", "conversations": []}])
    with pytest.warns(UserWarning) as told:
        rows = load_requests(path, no_call=False)
    assert [json.loads(e.answers[0]) for e in rows] == [[{"name": "Market Trends API", "arguments": {"kind": "index (EU)", "n": [1, 2]}}]]
    assert "of 2 rows were left out 1 rows or turns as a call names a tool that is not offered (first: line 1)" in str(told[0].message)
    assert "1 rows or turns as the system text holds no JSON list of tools (first: line 2)" in str(told[0].message)
    assert rows[0].meta["tools"][0]["parameters"]["required"] == ["kind"]
    with pytest.warns(UserWarning):
        rows = load_requests(path, no_call=True)
    assert [(e.id, e.answers[0][:2], e.meta["kind"], len(e.meta["messages"])) for e in rows] == [
        ("toolace/1-1", "[{", "single", 1), ("toolace/1-3", "[]", "none", 3)]
    assert json.loads(rows[1].meta["messages"][1]["content"])[0]["name"] == "Market Trends API"  # earlier calls are JSON
    assert {e.question for e in rows} == {"What is new?"}  # so that no split parts the turns of a dialogue


@pytest.mark.parametrize("change,reason", [
    ({"tools": "not json"}, "tools are not JSON"), ({"answers": "[{"}, "no JSON list of calls"), ({"answers": '[{"name": "f"}]'}, "no JSON list of calls"),
    ({"query": " "}, "query is no text"), ({"query": "\ud800"}, "half a character"), ({"tools": '[{"x": 1}]'}, "objects with a name"),
    ({"tools": '[{"name": "f", "parameters": [1]}]'}, "parameters are not an object"),
    ({"tools": '[{"name": "f", "parameters": {"x": "the x"}}]'}, "parameters are not each an object"),
    ({"tools": '[{"name": "f", "parameters": {"type": "object", "properties": {"x": true}}}]'}, "parameters are not each an object"),
    ({"tools": '[{"name": "f", "parameters": {"type": "dict", "properties": ["x"]}}]'}, "parameters are not each an object")])
def test_raw_rows_that_cannot_be_used_are_counted(tmp_path, change, reason):
    with pytest.warns(UserWarning, match=reason):
        assert len(load_requests(write(tmp_path / "xlam.jsonl", [XLAM, XLAM | change]))) == 1
    with pytest.raises(UserError, match="no row that can be used"), pytest.warns(UserWarning):
        load_requests(write(tmp_path / "xlam.jsonl", [XLAM | change]))


@pytest.mark.parametrize("method,row,kinds", [(toolrl, TOOLRL, "single"), (tool_n1, TOOL_N1, "single")])
def test_rows_with_a_finished_prompt_keep_it(tmp_path, method, row, kinds):
    e, = load_requests(write(tmp_path / "train.parquet", [row]), gold_calls=method.truth_calls)
    assert e.meta["prompt"] == row["prompt"] and e.answers == (row["reward_model"]["ground_truth"],) and e.meta["kind"] == kinds
    tokenizer = type("T", (), {"chat_template": "x", "apply_chat_template": lambda self, messages, **_: messages})()
    assert method.render(e, tokenizer) == row["prompt"]


@pytest.mark.parametrize("truth,reason", [
    ("<think> p </think>\n<tool_call>\nnot json\n</tool_call>", "Expecting value"), ("<think> p </think>\n<tool_call>\n", "no <tool_call> block"),
    ('<think> p </think>\n<tool_call>\n{"name": "f"}\n</tool_call>', "name and parameters"),
    ('<think> p </think>\n<tool_call>\n{"name": "f", "parameters": [1]}\n</tool_call>', "no object"),
    ('<think> p </think>\n<tool_call>\n{"name": "f", "parameters": ' + "[" * 100_000 + "}\n</tool_call>", "nested too deep"),
    ('[{"name": "f", "arguments": {}}]', "tagged ground truth")])
def test_a_ground_truth_that_cannot_be_read_is_named_when_it_is_loaded(tmp_path, truth, reason):
    bad = TOOLRL | {"reward_model": {"ground_truth": truth, "style": "rule"}}
    with pytest.raises(UserError, match=f"1 of 3 rows .*row 1: .*{reason}"):
        load_requests(write(tmp_path / "train.parquet", [TOOLRL, bad, TOOLRL]), gold_calls=toolrl.truth_calls)


def test_a_methods_rows_are_refused_by_the_other(tmp_path):
    with pytest.raises(UserError, match="tagged ground truth"):
        load_requests(write(tmp_path / "n1.parquet", [TOOL_N1]), gold_calls=toolrl.truth_calls)
    with pytest.raises(UserError, match="no JSON list of calls"):
        load_requests(write(tmp_path / "tr.parquet", [TOOLRL]), gold_calls=tool_n1.truth_calls)


def test_several_sources_plain_rows_limit_and_split(tmp_path):
    plain = [{"messages": [{"role": "user", "content": f"Request {i}"}], "tools": [{"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {}}}}], "answers": [{"name": "f", "arguments": {}}] if i % 2 else []} for i in range(6)]
    both = write(tmp_path / "plain.jsonl", plain) + "," + write(tmp_path / "xlam.jsonl", [XLAM])
    rows = load_requests(both)
    assert len({e.id for e in rows}) == 7 and [e.meta["kind"] for e in rows] == ["none", "single"] * 3 + ["parallel"] and rows[-1].meta["source"] == "xlam"
    assert len(load_requests(both, limit=3)) == 3 and rows[0].meta["tools"][0]["name"] == "f"
    train, held_out = training_and_held_out(both, "", 2, load_requests)
    assert len(train) == 5 and len(held_out) == 2
    with pytest.raises(UserError, match="line 1: its columns .question. are those of no data set known here"):
        load_requests(write(tmp_path / "other.jsonl", [{"question": "?"}]))
    with pytest.raises(UserError, match="role"):
        load_requests(write(tmp_path / "roles.jsonl", [plain[0] | {"messages": [{"role": "robot", "content": "x"}]}]))
    with pytest.raises(UserError, match="begin with the user"):
        load_requests(write(tmp_path / "first.jsonl", [plain[0] | {"messages": [{"role": "tool", "content": "x"}]}]))


def test_tiny_requests():
    assert requests("train", 20, seed=0) == requests("train", 20, seed=0) != requests("train", 20, seed=1)
    rows = requests("eval", 200)
    assert {e.meta["kind"] for e in rows} == {"none", "single", "parallel"}
    for e in rows:
        gold, tools = read_gold(e.answers[0]), {t["name"]: t["parameters"]["properties"] for t in e.meta["tools"]}
        assert e.meta["kind"] == ("none", "single", "parallel")[len(gold)] and e.meta["messages"] == [{"role": "user", "content": e.question}]
        assert all(set(c["arguments"]) == set(tools[c["name"]]) and all(str(v) in e.question for v in c["arguments"].values()) for c in gold)
    shared = {e.question for e in rows} & {e.question for e in requests("train", 4096)}
    assert shared <= set(CHAT) and 150 < len({e.question for e in rows} - set(CHAT))


needs_package = pytest.mark.skipif(not bfcl.FOLDER.is_dir(), reason="bfcl-eval is not installed: make setup_bfcl")


@needs_package
@pytest.mark.parametrize("method", [toolrl, tool_n1], ids=["toolrl", "tool_n1"])
def test_gold_replies_of_the_leaderboard_pass_through_prompt_reply_and_grader(method, capsys):
    """What a method would write for the gold calls is read back and graded as right, and every prompt can be rendered."""
    tokenizer = type("T", (), {"chat_template": "x", "apply_chat_template": lambda self, messages, **_: messages})()
    examples = load_requests("bfcl:simple_python,parallel_multiple,irrelevance,live_multiple", limit=40)
    for e in examples:
        messages = method.render(e, tokenizer)
        assert [x["role"] for x in messages][:2] == ["system", "user"] and all(t["name"] in messages[0]["content"] for t in e.meta["tools"])
    answers = [(e, method.read_calls(method.gold_reply(e))) for e in examples]
    got = bfcl.summary([(e, [{"name": n, "arguments": json.loads(a)} for n, a in calls]) for e, calls in answers])["categories"]
    assert {name: cell["strict"] for name, cell in got.items()} == dict.fromkeys(("simple_python", "parallel_multiple", "irrelevance", "live_multiple"), 1.0)
    print_benchmark(answers[:-1] + [(examples[-1], None)], asked=161)
    shown = capsys.readouterr().out
    assert "live_multiple" in shown and "1 of 161 requests are not in it" in shown


def test_api_bank_rows_keep_their_history_and_take_our_prompt(tmp_path):
    row = {"system": "**Available Tools**\n1. Name: Ping\nDescription: d\nParameters: {'host': {'description': 'h', 'type': 'str'}}\n\n**Steps**",
           "user": "**Dialogue Records History**\n<user> Ping a. </user>", "answer": {"name": "Ping", "parameters": {"host": "a"}}, "other": {}}
    (tmp_path / "level-1-api_processed.json").write_text(json.dumps([row]))
    e, = load_requests(f"api_bank:{tmp_path}")
    tokenizer = type("T", (), {"chat_template": "x", "apply_chat_template": lambda self, messages, **_: messages})()
    for method in (toolrl, tool_n1):
        system, user = method.render(e, tokenizer)
        assert user["content"] == row["user"] and "Ping" in system["content"] and "**Steps**" not in system["content"]
