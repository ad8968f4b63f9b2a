"""Loading examples from every schema met in the wild, what is said about bad files, order, split and seeds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common import UserError
from common.data import Example, load_examples, order, shared_questions, split_examples, training_and_held_out, trajectory_seed

MANY = settings(max_examples=100, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])


def write(path: Path, rows) -> Path:
    """Rows as JSON Lines, JSON or Parquet, by the suffix; raw bytes and text as they are."""
    if isinstance(rows, bytes):
        path.write_bytes(rows)
    elif isinstance(rows, str):
        path.write_text(rows, encoding="utf-8")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def message(spec, **kwargs) -> str:
    with pytest.raises(UserError) as error:
        load_examples(spec, **kwargs)
    return str(error.value)


def search_r1_row(source: str, index: int, question: str, golds: list[str]) -> dict:
    return {"id": f"train_{index}", "question": question, "golden_answers": golds, "data_source": source,
            "prompt": [{"role": "user", "content": f"Answer in <answer> and </answer>, as <answer> Beijing </answer>. {question}"}],
            "ability": "fact-reasoning", "reward_model": {"style": "rule", "ground_truth": {"target": golds}},
            "extra_info": {"split": "train", "index": index},
            "metadata": {"type": "bridge", "level": "hard", "context": {"title": ["T"], "sentences": [["long text"]]}}}


# --- schemas ---

@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_search_r1_schema(tmp_path, suffix):
    rows = [search_r1_row("nq", 0, "who drew it", ["Nadia Orlov", "N. Orlov"]), search_r1_row("hotpotqa", 0, "where is it", ["Harwick"])]
    first, second = load_examples(write(tmp_path / f"train{suffix}", rows))
    assert first == Example("nq/train_0", "who drew it", ("Nadia Orlov", "N. Orlov"), {"source": "nq", "type": "bridge", "level": "hard"})
    assert second.id == "hotpotqa/train_0"  # the same index in another set is another question


def test_search_r1_rows_without_the_plain_columns(tmp_path):
    row = search_r1_row("nq", 7, "who drew it", ["Nadia Orlov"])
    for key in ("id", "golden_answers"):
        del row[key]
    assert load_examples(write(tmp_path / "a.parquet", [row]))[0] == Example(
        "nq/7", "who drew it", ("Nadia Orlov",), {"source": "nq", "type": "bridge", "level": "hard"})
    del row["question"]
    assert "prompt already holds a method's instructions" in message(write(tmp_path / "b.parquet", [row]))


def test_deep_researcher_schema(tmp_path):
    schema = pa.schema([("data_source", pa.string()),
                        ("prompt", pa.list_(pa.struct([("content", pa.string()), ("role", pa.string())]))),
                        ("ability", pa.string()),
                        ("reward_model", pa.struct([("ground_truth", pa.string()), ("style", pa.string())])),
                        ("extra_info", pa.struct([("index", pa.string()), ("split", pa.string())]))])
    row = {"data_source": "tq", "prompt": [{"content": "Which country?", "role": "user"}], "ability": "search & question answering",
           "reward_model": {"ground_truth": "Türkiye<|answer_split|>Turkey<|answer_split|>Turkey", "style": "unknown"},
           "extra_info": {"index": "tq_qg_3477", "split": "dev"}}
    pq.write_table(pa.Table.from_pylist([row], schema=schema), tmp_path / "dev.parquet")
    assert load_examples(tmp_path / "dev.parquet") == [Example("tq/tq_qg_3477", "Which country?", ("Türkiye", "Turkey"), {"source": "tq"})]


def test_other_schemas(tmp_path):
    rows = [
        {"idx": 37653, "question": "Which road?", "answer": "U.S. Route 22", "pred_anses": ["", "Route 22"]},  # R1-Searcher
        {"data_source": "musique", "question": "Who?", "reward_model": {"style": "rule", "ground_truth": ["Tom"]},
         "extra_info": {"id": "2hop_1"}},  # ReSearch
        {"question": "How much?", "answer": "9 * 2 = 18\n#### 18"},  # GSM8K
        {"input": "Find the sum.", "output": "70"},  # AIME as in ReTool
        {"problem": "1+1?", "answer": 2},
        {"prompt": [{"role": "system", "content": "tools"}, {"role": "user", "content": "ask"}], "reward_model": {"ground_truth": "call"}},
        {"question": "two hops?", "answer": ["a", "b"], "hops": 2, "metadata": None, "data_source": None},
    ]
    got = load_examples(write(tmp_path / "mix.jsonl", rows))
    assert [e.answers for e in got] == [("U.S. Route 22",), ("Tom",), ("18",), ("70",), ("2",), ("call",), ("a", "b")]
    assert [e.id for e in got] == ["37653", "musique/2hop_1", "mix/3", "mix/4", "mix/5", "mix/6", "mix/7"]
    assert got[2].meta == {"solution": "9 * 2 = 18\n#### 18"} and got[5].meta["messages"][0]["content"] == "tools"
    assert got[5].question == "ask" and got[6].meta == {"hops": 2}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_musique(tmp_path, suffix):
    """As FlashRAG serves it, as ReSearch prepares it, and as it was published: golds, aliases, and the look-ups that its ids name."""
    steps = [{"id": 1, "question": "Green >> performer", "answer": "Steve", "paragraph_support_idx": 10}]
    flashrag = [{"id": "2hop__482757_12019", "question": "When?", "golden_answers": ["1952", "in 1952"],
                 "metadata": {"answerable": True, "type": "bridge", "question_decomposition": steps}}]
    prepared = [{"data_source": "musique", "question": "Who?", "ability": "qa", "reward_model": {"style": "rule", "ground_truth": ["Tom", "Thomas"]},
                 "extra_info": {"id": "3hop1__9285_5188_23307"}}]
    published = [{"id": "4hop2__71753_648517_70784_79935", "paragraphs": [{"idx": 0, "title": "T", "paragraph_text": "t", "is_supporting": False}],
                  "question": "Where?", "question_decomposition": steps, "answer": "London", "answer_aliases": ["London, England"], "answerable": True},
                 {"id": "2hop__1_2", "paragraphs": [], "question": "Why?", "question_decomposition": steps, "answer": "love", "answer_aliases": [],
                  "answerable": True}]
    load = lambda name, rows: load_examples(write(tmp_path / f"{name}{suffix}", rows))
    assert load("flashrag", flashrag) == [
        Example("2hop__482757_12019", "When?", ("1952", "in 1952"), {"answerable": True, "type": "bridge", "hops": 2})]
    assert load("prepared", prepared) == [Example("musique/3hop1__9285_5188_23307", "Who?", ("Tom", "Thomas"), {"source": "musique", "hops": 3})]
    assert [(e.answers, e.meta) for e in load("published", published)] == [(("London", "London, England"), {"hops": 4}), (("love",), {"hops": 2})]


def gsm8k_row(solution: str) -> dict:
    return {"question": "How many?", "answer": solution}


@pytest.mark.parametrize("solution, answer", [
    ("He buys 9 * 2 = <<9*2=18>>18.\n#### 18", "18"),
    ("One.\n#### 2,125", "2125"),
    ("One.\n#### 1,450,000\n", "1450000"),
    ("One.\n#### -3", "-3"),
    ("One.\n####72", "72"),
    ("#### 72", "72"),
    ("No. #### is no end\n#### 5,5", "5,5"),  # not a thousands separator
    ("a\n#### 1\nb\n#### 2", "2"),
])
def test_gsm8k_takes_the_number_behind_the_marks(tmp_path, solution, answer):
    example = load_examples(write(tmp_path / "train.jsonl", [gsm8k_row(solution)]))[0]
    assert example == Example("train/1", "How many?", (answer,), {"solution": solution})


def test_gsm8k_rows_without_a_number_are_named_by_their_line(tmp_path):
    rows = [gsm8k_row("One.\n#### 1"), gsm8k_row("One.\n#### "), gsm8k_row("He buys 9 * 2 = <<9*2=18>>18.")]
    text = message(write(tmp_path / "train.jsonl", rows))
    assert "line 2: answer has nothing behind its ####" in text and "line 3: answer is a worked solution without its last line" in text


@pytest.mark.parametrize("style", ["stype", "style"])
def test_torl_schema(tmp_path, style):
    text = pa.string()
    schema = pa.schema([("data_source", text), ("prompt", pa.list_(pa.struct([("content", text), ("role", text)]))), ("ability", text),
                        ("reward_model", pa.struct([("ground_truth", text), (style, text)])),
                        ("extra_info", pa.struct([("id", pa.int64()), ("split", text)]))])
    rows = [{"data_source": "aime24", "ability": "other", "reward_model": {"ground_truth": "\\frac{3}{4}", style: "rule"},
             "prompt": [{"content": "Reason, then box the answer.", "role": "system"}, {"content": "What is $x$?", "role": "user"}],
             "extra_info": {"id": 60, "split": "test"}} for _ in range(2)]
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), tmp_path / "test.parquet")
    first, copy = load_examples(tmp_path / "test.parquet")
    assert (first.id, first.question, first.answers, first.meta["source"]) == ("aime24/60", "What is $x$?", ("\\frac{3}{4}",), "aime24")
    assert copy.id == "aime24/60#1"  # each AIME problem is in the file four times

    rows[1]["prompt"].reverse()
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), tmp_path / "turned.parquet")
    assert "row 1: prompt must be text or a list of messages that ends with the user's" in message(tmp_path / "turned.parquet")
    rows[1]["prompt"].reverse()
    rows[1]["reward_model"] = {"ground_truth": None, style: "rule"}
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), tmp_path / "bare.parquet")
    assert "row 1: no answer" in message(tmp_path / "bare.parquet")


def test_aime_input_and_output(tmp_path):
    rows = [{"input": "Find $m+n$.", "output": "045"}, {"input": "Find it.", "output": 204}]
    assert [(e.id, e.question, e.answers) for e in load_examples(write(tmp_path / "aime24.jsonl", rows))] == [
        ("aime24/1", "Find $m+n$.", ("045",)), ("aime24/2", "Find it.", ("204",))]
    rows += [{"input": "Find it.", "output": 0.5}, {"input": " ", "output": "1"}, {"input": "?"}]
    text = message(write(tmp_path / "bad.jsonl", rows))
    assert "line 3: output is a decimal number, expected text" in text and "line 4: input is empty" in text and "line 5: no answer" in text


def test_text_is_kept_as_it_is(tmp_path):
    question = "  who\u2028drew it \u00e9"
    got = load_examples(write(tmp_path / "a.jsonl", json.dumps({"question": question, "answer": " The X "}, ensure_ascii=False) + "\n"))
    assert got[0].question == question and got[0].answers == (" The X ",)


def test_colliding_ids_get_their_row_number_and_a_prefix_keeps_its_ids(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"id": i, "question": f"q{i}{n}", "answer": "a"} for n, i in enumerate(["x", "x", "x#2", 5, "5"])])
    ids = [e.id for e in load_examples(path)]
    assert ids == ["x", "x#2", "x#2#3", "5", "5#5"]
    assert [e.id for e in load_examples(path, limit=3)] == ids[:3]


def test_limit_does_not_look_further(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"question": "q", "answer": "a"}\nbroken\n')
    assert len(load_examples(path, limit=1)) == 1
    assert "line 2" in message(path)
    assert "at least 1, got 0" in message(path, limit=0)


def test_byte_order_mark_windows_line_ends_and_blank_lines(tmp_path):
    text = b'\xef\xbb\xbf{"question": "q", "answer": "a"}\r\n\r\n{"question": "r", "answer": "b"}'
    assert [e.question for e in load_examples(write(tmp_path / "a.jsonl", text))] == ["q", "r"]
    assert len(load_examples(write(tmp_path / "a.json", b'\xef\xbb\xbf[{"question": "q", "answer": "a"}]'))) == 1


# --- bad rows ---

@pytest.mark.parametrize("row, expected", [
    ({"answer": "a"}, "no question (its columns: answer)"),
    ({"question": "q", "id": 1}, "no answer (its columns: question, id)"),
    ({"question": None, "answer": "a"}, "no question"),
    ({"question": "  ", "answer": "a"}, "question is empty"),
    ({"question": ["q"], "answer": "a"}, "question is a list, expected text"),
    ({"question": "q", "answer": ""}, "answer is empty"),
    ({"question": "q", "answer": []}, "answer is an empty list"),
    ({"question": "q", "golden_answers": ["a", None]}, "golden_answers is null, expected text"),
    ({"question": "q", "answer": True}, "answer is true/false, expected text"),
    ({"question": "q", "answer": 0.5}, "answer is a decimal number, expected text"),
    ({"question": "q", "answer": {"text": "a"}}, "answer is an object, expected text"),
    ({"question": "q", "reward_model": {"ground_truth": {"target": [""]}}}, "reward_model.ground_truth is empty"),
    ({"question": "q", "answer": "a", "id": [1]}, "the id is a list"),
    ({"question": "q\ud800", "answer": "a"}, "half a character (\\ud800)"),
    ({"prompt": [{"role": "assistant", "content": "x"}], "answer": "a"}, "ends with the user's"),
    ({"prompt": [], "answer": "a"}, "ends with the user's"),
    (["q", "a"], "expected an object with named columns, found a list"),
    (7, "found an integer"),
])
def test_bad_row_is_named_by_its_line(tmp_path, row, expected):
    path = write(tmp_path / "a.jsonl", [{"question": "q", "answer": "a"}, row])
    assert f"1 of 2 rows of {str(path)!r} cannot be used: line 2: " in (text := message(path)) and expected in text


@pytest.mark.parametrize("line, expected", [
    (b'{"question": "q", "answer": "a"', "not JSON (Expecting ',' delimiter, column 32)"),
    (b'{"question": "caf\xe9", "answer": "a"}', "not UTF-8 (byte 17): save the file as UTF-8"),
    (b"\xff\xfe{\x00", "it looks like UTF-16"),
    (b'{"question": "q", "answer": ' + b"9" * 5000 + b"}", "a number too long"),
    (b"[" * 100_000, "nested too deep"),
])
def test_broken_line(tmp_path, line, expected):
    text = message(write(tmp_path / "a.jsonl", line + b"\n"))
    assert "cannot be used: line 1: not " in text and expected in text


def test_rows_of_json_and_parquet_count_from_0(tmp_path):
    rows = [{"question": "q", "answer": "a"}, {"question": "", "answer": "b"}]
    for suffix in (".json", ".parquet"):
        text = message(write(tmp_path / f"a{suffix}", rows))
        assert "row 1: question is empty (rows count from 0)" in text


def test_five_bad_rows_are_shown_and_all_are_counted(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"question": "q", "answer": "a"}] + [{"question": f"q{i}"} for i in range(8)])
    text = message(path)
    assert text.startswith("8 of 9 rows") and "line 6:" in text and "line 7:" not in text and "and 3 more" in text
    assert text.endswith("mend or delete these")
    with pytest.warns(UserWarning, match="8 of 9 rows .* left out"):
        assert len(load_examples(path, strict=False)) == 1


def test_nothing_usable_is_an_error_even_when_not_strict(tmp_path):
    assert "1 of 1 rows" in message(write(tmp_path / "a.jsonl", [{"question": "q"}]), strict=False)


def test_hostile_text_does_not_reach_the_terminal(tmp_path):
    text = message(write(tmp_path / "a.jsonl", [{"\x1b[2Jclear" + "x" * 500: 1}]))
    assert "\x1b" not in text and len(text) < 500


# --- bad files ---

def test_missing_file_names_the_nearest(tmp_path):
    write(tmp_path / "questions.jsonl", [{"question": "q", "answer": "a"}])
    assert f"did you mean {str(tmp_path / 'questions.jsonl')!r}?" in message(tmp_path / "quesions.jsonl")
    assert f"did you mean {str(tmp_path / 'questions.jsonl')!r}?" in message(tmp_path / "questions.json")
    (tmp_path / "questions.parquet").touch()
    assert f"did you mean {str(tmp_path / 'questions.jsonl')!r}?" in message(tmp_path / "question.jsnl")
    (tmp_path / "questions.parquet").unlink()
    assert "its folder holds questions.jsonl" in message(tmp_path / "zzz.parquet")
    assert "folder" in (text := message(tmp_path / "nowhere" / "a.jsonl")) and "does not exist" in text
    assert f"{str(tmp_path)!r} is a folder: give one file of it (questions.jsonl)" in message(tmp_path)
    assert "written owner/name" in message("questions")


def test_relative_path_close_to_a_real_file_is_not_taken_for_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "questions.jsonl", [{"question": "q", "answer": "a"}])
    assert "did you mean 'data/questions.jsonl'?" in message("data/questions")


@pytest.mark.parametrize("name, content, expected", [
    ("a.csv", "question,answer\n", "has the suffix '.csv'; data files are .jsonl, .json, .parquet"),
    ("a.jsonl.gz", "x", "has the suffix '.gz'"),
    ("a.jsonl", "", "is empty (0 bytes)"),
    ("a.parquet", "", "is empty (0 bytes)"),
    ("a.jsonl", "\n \n", "holds no rows"),
    ("a.json", "[]", "holds no rows"),
    ("a.json", '{"data": []}', "must be a list of objects, one for each question; it is an object"),
    ("a.json", '[{"question": "q"', "is not JSON (Expecting ',' delimiter, column 18)"),
    ("a.json", '{"question": "q"}\n{"question": "r"}', "name the file .jsonl"),
    ("a.json", b'["\xe9"]', "is not UTF-8 (byte 2)"),
    ("a.parquet", "not parquet at all", "is no complete Parquet file"),
])
def test_bad_file(tmp_path, name, content, expected):
    path = write(tmp_path / name, content)
    text = message(path)
    assert expected in text and repr(str(path)) in text


def test_truncated_and_damaged_parquet(tmp_path):
    whole = write(tmp_path / "a.parquet", [search_r1_row("nq", i, f"who {i}", ["x"]) for i in range(50)]).read_bytes()
    assert "is no complete Parquet file" in message(write(tmp_path / "cut.parquet", whole[:-100]))
    damaged = bytearray(whole)
    damaged[4:40] = bytes(36)  # the first page header
    assert "is no complete Parquet file" in message(write(tmp_path / "bad.parquet", bytes(damaged)))


def test_parquet_text_that_is_not_utf8(tmp_path):
    column = pa.StringArray.from_buffers(1, pa.py_buffer(b"\x00\x00\x00\x00\x02\x00\x00\x00"), pa.py_buffer(b"\xe9\xe9"))
    pq.write_table(pa.table({"question": column, "answer": ["a"]}), tmp_path / "a.parquet")
    assert "is no complete Parquet file" in message(tmp_path / "a.parquet")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_refused_instead_of_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    assert "is not a regular file" in message(tmp_path / "a.jsonl")


def test_name_too_long():
    assert "File name too long" in message("a" * 300 + ".jsonl")


# --- the hub ---

def test_hub_id_config_and_split(monkeypatch):
    import datasets
    calls = []

    def load_dataset(name, config, *, split):
        calls.append((name, config, split))
        return datasets.Dataset.from_list([search_r1_row("nq", 0, "who drew it", ["Nadia Orlov"])])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_examples("own/name")[0].id == "nq/train_0"
    assert load_examples("own/name:main", split="test")[0].answers == ("Nadia Orlov",)
    assert calls == [("own/name", None, "train"), ("own/name", "main", "test")]


@pytest.mark.parametrize("error", [ValueError("Unknown split 'dev'"), ConnectionError("no route"), FileNotFoundError("no such data set")])
def test_hub_failure_says_what_to_do(monkeypatch, error):
    import datasets

    def load_dataset(*args, **kwargs):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    text = message("own/name:main", split="dev")
    assert "cannot load 'own/name:main' (split 'dev') from the hub" in text and str(error) in text and "download the file" in text


def test_hub_without_network(tmp_path):
    """The real library, told that there is no network."""
    code = "from common.data import load_examples; load_examples('own/name')"
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "UserError: cannot load 'own/name' (split 'train') from the hub" in done.stderr


# --- order ---

def test_order_has_not_changed():
    """Stored values: a numpy whose permutations differ would silently change every resumed run."""
    assert [order(0, step, 7, 3) for step in range(3)] == [[2, 4, 3], [6, 5, 0], [1, 1, 3]]
    assert trajectory_seed(0, 3, "nq/train_0", 2, 1) == 5340169652257680831


@MANY
@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 100), st.integers(1, 12))
def test_every_epoch_is_a_permutation_and_no_tail_is_dropped(seed, n, batch, steps):
    stream = [i for step in range(steps) for i in order(seed, step, n, batch)]
    assert len(stream) == steps * batch
    for start in range(0, len(stream) - n + 1, n):
        assert sorted(stream[start:start + n]) == list(range(n))
    rest = stream[len(stream) // n * n:]
    assert len(set(rest)) == len(rest)


@MANY
@given(st.integers(0, 99), st.integers(0, 50), st.integers(1, 40), st.integers(1, 90))
def test_order_is_pure_and_batch_size_only_cuts_the_stream(seed, step, n, batch):
    assert order(seed, step, n, batch) == order(seed, step, n, batch)
    assert order(seed, step, n, batch) == [order(seed, step * batch + i, n, 1)[0] for i in range(batch)]


def test_order_depends_on_seed_and_epoch_and_refuses_nonsense():
    assert order(0, 0, 100, 100) != order(1, 0, 100, 100) and order(0, 0, 100, 100) != order(0, 1, 100, 100)
    assert order(0, 0, 3, 7)[:3] == order(0, 0, 3, 3)
    for bad in ((-1, 0, 5, 2), (0, -1, 5, 2), (0, 0, 0, 2), (0, 0, 5, 0)):
        with pytest.raises(ValueError, match="at least"):
            order(*bad)


# --- split ---

def examples_of(questions) -> list[Example]:
    return [Example(f"e{i}", question, ("a",)) for i, question in enumerate(questions)]


@MANY
@given(st.lists(st.integers(0, 30), min_size=2, max_size=40, unique=True), st.data(), st.integers(0, 5))
def test_split_is_exact_disjoint_and_free_of_order(numbers, data, seed):
    examples = examples_of(f"question {i}" for i in numbers)
    n_eval = data.draw(st.integers(0, len(examples) - 1))
    train, held_out = split_examples(examples, n_eval, seed)
    assert len(held_out) == n_eval and sorted(e.id for e in train + held_out) == sorted(e.id for e in examples)
    again = split_examples(data.draw(st.permutations(examples)), n_eval, seed)
    assert {e.id for e in again[1]} == {e.id for e in held_out}
    assert [e for e in examples if e in train] == train  # in the order given


def test_copies_of_a_question_stay_on_one_side():
    examples = examples_of(f"{'Who' if i % 2 else 'who '} drew {i // 2}{'?' * (i % 2)}" for i in range(40))
    for seed in range(5):
        train, held_out = split_examples(examples, 10, seed)
        assert len(held_out) == 10 and not shared_questions(train, held_out)
    assert split_examples(examples, 10, 0) != split_examples(examples, 10, 1)
    with pytest.raises(UserError, match="cannot hold out exactly 9 of 40 examples as questions repeat: ask for 8"):
        split_examples(examples, 9, 0)


def test_split_leaves_something_to_train_on():
    with pytest.raises(UserError, match="cannot hold out 3 of 3"):
        split_examples(examples_of("abc"), 3, 0)


def test_shared_questions_between_two_files():
    assert shared_questions(examples_of(["Who  drew it?", "3 - 4"]), examples_of(["who drew it", "3 / 4"])) == ["Who  drew it?"]


def test_what_two_sources_share_is_not_trained_on(tmp_path, capsys):
    row = lambda q: {"question": q, "answer": "a"}
    data = write(tmp_path / "train.jsonl", map(row, ["Who?", "who  ", "Where?", "When?"]))
    test = write(tmp_path / "test.jsonl", map(row, ["Who", "Why?", "When"]))
    train, held_out = training_and_held_out(str(data), str(test), 2)
    assert [e.question for e in train] == ["Where?", "When?"] and [e.question for e in held_out] == ["Who", "Why?"]  # "When" is not held out
    assert capsys.readouterr().out == (f"2 of 4 questions of --data {data} are also in --eval-data {test}, and are not trained on\n")
    other = write(tmp_path / "other.jsonl", [row("What?")])
    assert len(training_and_held_out(str(data), str(other), 5)[0]) == 4 and capsys.readouterr().out == ""
    with pytest.raises(UserError, match="all 4 questions .* give other --eval-data, or fewer --eval-questions"):
        training_and_held_out(str(data), str(data), 9)
    assert len(training_and_held_out(str(data), str(data), 9, trains=False)[1]) == 4 and capsys.readouterr().out == ""  # --evaluate on what was trained on


# --- seeds ---

def test_trajectory_seed_is_stable_distinct_and_63_bits():
    seeds = {trajectory_seed(run, step, f"e{e}", sample)
             for run in range(3) for step in range(10) for e in range(10) for sample in range(8)}
    assert len(seeds) == 3 * 10 * 10 * 8 and all(0 <= s < 2**63 for s in seeds)
    assert len({trajectory_seed("a", 1), trajectory_seed("a1"), trajectory_seed("a", "1"), trajectory_seed(1, "a")}) == 4
    assert trajectory_seed(np.int64(1), "\ud800") == trajectory_seed(1, "\ud800")  # any integer, any string
    with pytest.raises(TypeError):
        trajectory_seed(0.5)
