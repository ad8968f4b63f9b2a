"""Questions with their gold answers: reading them, splitting them, the order of a run, and seeds.

Understood, in JSON Lines, JSON, Parquet or a data set on the hub (first column present wins):
    question   `question`, `problem`, `input`, or the last user message of `prompt`
    answers    `golden_answers`, `reward_model.ground_truth` (or its `.target`), `answers`, `answer` (and its `answer_aliases`), `output`;
               a string or a list
    identity   `id`, `idx`, `extra_info.index`, `extra_info.id`; `data_source`
    meta       `hops` (or what MuSiQue's ids begin with), `level`, `type`, `world` and the plain values of `metadata`
which covers Search-R1, ReSearch, FlashRAG and MuSiQue itself, R1-Searcher, DeepResearcher, ToolRL, ToRL (whose `reward_model` spells `style`
as `stype`; neither is read), GSM8K (the number behind `####`, without thousands separators; the solution goes to `meta`), AIME as
`{input, output}` and the usual maths sets. Text is kept as it is: what a method does to a question (Search-R1 appends a missing "?") stands
in the method.
"""

import difflib
import hashlib
import json
import math
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from common import UserError

SUFFIXES = (".jsonl", ".json", ".parquet")
_BAD_ROWS_SHOWN = 5
_GSM8K_END = re.compile(r"^####", re.M)


@dataclass(frozen=True)
class Example:
    """One question with its gold answers. `id` is unique in its data set."""
    id: str
    question: str
    answers: tuple[str, ...]  # at least one; all are right
    meta: dict = field(default_factory=dict)  # source, hops, level, type, world, ... where the data have them


class _BadRow(ValueError):
    """What is wrong with one row, without its place."""


def load_examples(spec: str | Path, *, split: str = "train", limit: int | None = None, strict: bool = True) -> list[Example]:
    """All examples of a local file (.jsonl, .json, .parquet) or of a hub data set `owner/name` or `owner/name:config`.

    `split` names the hub's split (a local file has none). `limit` stops after that many examples; the rows behind it are not looked at.
    Bad rows raise one UserError that shows the first five; `strict=False` leaves them out with a warning instead."""
    if limit is not None and limit < 1:
        raise UserError(f"the number of examples to load must be at least 1, got {limit}")
    rows, name = _open(spec, split)
    examples, taken, bad, seen = [], set(), [], 0
    for seen, (place, row) in enumerate(rows, start=1):
        try:
            if isinstance(row, _BadRow):
                raise row
            example = _example(row, taken, place, name)
        except _BadRow as error:
            bad.append(f"{place}: {error}")
            continue
        taken.add(example.id)
        examples.append(example)
        if len(examples) == limit:
            break
    if bad:
        more = f"; and {len(bad) - _BAD_ROWS_SHOWN} more" if len(bad) > _BAD_ROWS_SHOWN else ""
        counted = "" if bad[0].startswith("line") else " (rows count from 0)"
        text = f"{len(bad)} of {seen} rows of {str(spec)!r} cannot be used: {'; '.join(bad[:_BAD_ROWS_SHOWN])}{more}{counted}"
        if strict or not examples:
            raise UserError(f"{text}. Each row needs a question and at least one answer, as text: mend or delete these")
        warnings.warn(f"{text}. They were left out", stacklevel=2)
    if not examples:
        raise UserError(f"{str(spec)!r} holds no rows: give a data set with at least one question")
    return examples


def read_messages(spec: str | Path, limit: int) -> list[list[dict]]:
    """The `messages` of the first `limit` rows of a file of dialogues, as ReTool-SFT has them: a user's message, then an assistant's."""
    out = []
    for place, row in _open(spec, "train")[0]:
        if isinstance(row, _BadRow):
            raise UserError(f"{place} of {str(spec)!r}: {row}")
        messages = row.get("messages") if isinstance(row, dict) else None
        if not (isinstance(messages, list) and [m.get("role") if isinstance(m, dict) else None for m in messages] == ["user", "assistant"]
                and all(isinstance(m.get("content"), str) for m in messages)):
            raise UserError(f"{place} of {str(spec)!r}: messages must be a user's and an assistant's message, as {{role, content}}")
        out.append(messages)
        if len(out) == limit:
            break
    if not out:
        raise UserError(f"{str(spec)!r} holds no rows: give a file with at least one dialogue")
    return out


def read_rows(spec: str | Path, split: str = "train") -> Iterator[tuple[str, dict]]:
    """(place, row) of every row, for readers of other schemas. UserError at the first that is no object."""
    for place, row in _open(spec, split)[0]:
        if not isinstance(row, dict):
            raise UserError(f"{place} of {str(spec)!r}: " + (str(row) if isinstance(row, _BadRow) else f"expected an object with named columns, found {_kind(row)}"))
        yield place, row


# --- from one row to one example ------------------------------------------------------------------------------------------------------

def _example(row, taken: set[str], place: str, name: str) -> Example:
    if not isinstance(row, dict):
        raise _BadRow(f"expected an object with named columns, found {_kind(row)}")
    question, meta = _question(row)
    answers, more = _answers(row)
    meta.update(more)
    for key in ("hops", "level", "type", "world"):
        if row.get(key) is not None:
            meta[key] = row[key]
    if isinstance(row.get("metadata"), dict):  # HotpotQA's holds whole articles beside type and level: keep the plain values only
        meta = {k: v for k, v in row["metadata"].items() if isinstance(v, (str, int, float))} | meta
    source = row.get("data_source")
    if source is not None:
        meta["source"] = source = _text(source, "data_source")
    extra = row["extra_info"] if isinstance(row.get("extra_info"), dict) else {}
    key = next((k for k in (row.get("id"), row.get("idx"), extra.get("index"), extra.get("id")) if k is not None), None)
    if key is not None and (isinstance(key, bool) or not isinstance(key, (str, int))):
        raise _BadRow(f"the id is {_kind(key)}, expected text or an integer")
    if "hops" not in meta and (hops := re.match(r"(\d)hop\d?__", str(key))):  # 2hop__482757_12019, 3hop1__...: MuSiQue
        meta["hops"] = int(hops[1])
    # Search-R1 groups samples by the bare index, which its merged NQ + HotpotQA file has twice: two questions then share a baseline.
    # The source makes it unique; what still collides gets its row number.
    number = place.split()[-1]
    unique = _text(str(key), "id") if key is not None else number
    if source is not None or key is None:
        unique = f"{source or name}/{unique}"
    while unique in taken:
        unique += f"#{number}"
    return Example(unique, question, answers, meta)


def _question(row: dict) -> tuple[str, dict]:
    for key in ("question", "problem", "input"):
        if row.get(key) is not None:
            return _text(row[key], key), {}
    prompt = row.get("prompt")
    if prompt is None:
        raise _BadRow(f"no question (its columns: {_clip(', '.join(map(str, row)))})")
    meta = {}
    if isinstance(prompt, list):
        if not prompt or not all(isinstance(message, dict) for message in prompt) or prompt[-1].get("role") != "user":
            raise _BadRow("prompt must be text or a list of messages that ends with the user's")
        if len(prompt) > 1:
            meta["messages"] = prompt  # function-calling data: the tools stand in the system message
        prompt = prompt[-1].get("content")
    text = _text(prompt, "prompt")
    if "<answer>" in text:  # a finished Search-R1 prompt; wrapped in a second template it would train on two contradicting instructions
        raise _BadRow("prompt already holds a method's instructions (<answer>); add a question column with the bare question")
    return text, meta


def _answers(row: dict) -> tuple[tuple[str, ...], dict]:
    reward_model = row["reward_model"] if isinstance(row.get("reward_model"), dict) else {}
    truth = reward_model.get("ground_truth")
    if isinstance(truth, dict):
        truth = truth.get("target")
    candidates = {"golden_answers": row.get("golden_answers"), "reward_model.ground_truth": truth,
                  "answers": row.get("answers"), "answer": row.get("answer"), "output": row.get("output")}
    key, value = next(((k, v) for k, v in candidates.items() if v is not None), (None, None))
    if key is None:
        raise _BadRow(f"no answer (its columns: {_clip(', '.join(map(str, row)))})")
    meta = {}
    if isinstance(value, str) and "<|answer_split|>" in value:  # DeepResearcher joins its golds
        value = value.split("<|answer_split|>")
    elif key == "answer" and isinstance(value, str) and _GSM8K_END.search(value):  # GSM8K: a worked solution, the number on its last line
        meta["solution"], value = value, re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", _GSM8K_END.split(value)[-1].strip())
        if not value:
            raise _BadRow(f"{key} has nothing behind its ####")
    elif key == "answer" and isinstance(value, str) and re.search(r"<<[^<>\n]*=[^<>\n]*>>", value):  # its calculator marks
        raise _BadRow(f"{key} is a worked solution without its last line, #### and the number")
    values = value if isinstance(value, list) else [value]
    if key == "answer" and isinstance(row.get("answer_aliases"), list):  # MuSiQue's other ways to say it
        values = values + row["answer_aliases"]
    if not values:
        raise _BadRow(f"{key} is an empty list")
    texts = [_text(str(v) if isinstance(v, int) and not isinstance(v, bool) else v, key) for v in values]
    return tuple(dict.fromkeys(texts)), meta


def _text(value, name: str) -> str:
    if not isinstance(value, str):
        raise _BadRow(f"{name} is {_kind(value)}, expected text")
    if not value.strip():
        raise _BadRow(f"{name} is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair; tokenizers and hashes fail on it much later
        raise _BadRow(f"{name} holds half a character (\\u{ord(value[error.start]):04x}), which is not valid Unicode") from error
    return value


def _kind(value) -> str:
    names = {type(None): "null", bool: "true/false", int: "an integer", float: "a decimal number", str: "text", list: "a list"}
    return "an object" if isinstance(value, dict) else names.get(type(value), type(value).__name__)


def _clip(text: str) -> str:
    """Foreign text for a message: short, and printable so that it cannot drive a terminal."""
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= 120 else text[:117] + "..."


# --- from a place to rows: each reader yields (place, row or _BadRow) -------------------------------------------------------------------

def _open(spec: str | Path, split: str) -> tuple[Iterator, str]:
    path, spec = Path(spec).expanduser(), str(spec)
    try:
        if path.is_dir():
            raise UserError(f"{spec!r} is a folder: give one file of it ({_listing(path)})")
        if path.exists():
            return _local_rows(path, spec), path.stem
        folder = path.parent if path.parent.is_dir() else None
        names = _data_files(folder) if folder else []
        alike = difflib.get_close_matches(path.stem, [Path(name).stem for name in names])  # without suffixes: they are alike anyway
        near = difflib.get_close_matches(path.name, [name for name in names if Path(name).stem in alike], n=1, cutoff=0)
    except OSError as error:
        raise UserError(f"cannot read {_clip(spec)!r}: {error.strerror}") from error
    is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", spec) and not spec.startswith(".") and path.suffix.lower() not in SUFFIXES
    if is_hub_id and not near:
        return _hub_rows(spec, split), spec.partition(":")[0]
    if folder is None:
        hint = f"its folder {_clip(str(path.parent))!r} does not exist"
    else:
        hint = f"did you mean {str(folder / near[0])!r}?" if near else f"its folder holds {_listing(folder)}"
    raise UserError(f"there is no data file {_clip(spec)!r}: {hint} (a data set on the hub is written owner/name)")


def _data_files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.suffix.lower() in SUFFIXES)


def _listing(folder: Path) -> str:
    return _clip(", ".join(_data_files(folder))) or "no " + ", ".join(SUFFIXES)


def _local_rows(path: Path, spec: str) -> Iterator:
    readers = {".jsonl": _jsonl_rows, ".json": _json_rows, ".parquet": _parquet_rows}
    if path.suffix.lower() not in readers:
        raise UserError(f"{spec!r} has the suffix {path.suffix!r}; data files are {', '.join(SUFFIXES)}: convert or rename it")
    if not path.is_file():
        raise UserError(f"{spec!r} is not a regular file: save its content to a file with the suffix {path.suffix}")
    if path.stat().st_size == 0:
        raise UserError(f"{spec!r} is empty (0 bytes): download or write it again")
    try:
        yield from readers[path.suffix.lower()](path)
    except OSError as error:
        raise UserError(f"cannot read {spec!r}: {error.strerror or error}") from error


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig")  # -sig: a byte order mark at the start is no part of the text
    except UnicodeDecodeError as error:
        utf16 = "; it looks like UTF-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        raise _BadRow(f"not UTF-8 (byte {error.start}{utf16}): save the file as UTF-8") from error


def _parse(text: str):
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, " if "\n" in text.strip() else ""
        raise _BadRow(f"not JSON ({error.msg}, {where}column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; brackets nested thousands deep
        raise _BadRow("not usable JSON (a number too long or brackets nested too deep)") from error


def _jsonl_rows(path: Path) -> Iterator:
    with path.open("rb") as file:  # bytes: lines end at \n only, never at the other marks str.splitlines knows
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            try:
                row = _parse(_decode(raw.rstrip()))  # without its end, so that a cut line is faulted where it was cut
            except _BadRow as error:
                row = error
            yield f"line {number}", row


def _json_rows(path: Path) -> Iterator:
    try:
        rows = _parse(_decode(path.read_bytes()))
    except _BadRow as error:
        hint = "; if every line is an object of its own, name the file .jsonl" if "Extra data" in str(error) else ""
        raise UserError(f"{str(path)!r} is {error}{hint}") from error
    if not isinstance(rows, list):
        raise UserError(f"{str(path)!r} must be a list of objects, one for each question; it is {_kind(rows)}")
    for number, row in enumerate(rows):
        yield f"row {number}", row


def _parquet_rows(path: Path) -> Iterator:
    import pyarrow
    import pyarrow.parquet
    try:
        file = pyarrow.parquet.ParquetFile(path)
        paths = [file.schema.column(i).path for i in range(len(file.schema))]
        columns = [p for p in paths if not (p.startswith("metadata.") and p.count(".") > 1)]  # see _example: not the whole articles
        number = 0
        for batch in file.iter_batches(batch_size=1024, columns=columns):
            for row in batch.to_pylist():
                yield f"row {number}", row
                number += 1
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{str(path)!r} is no complete Parquet file ({_clip(str(error))}): download or write it again") from error


def _hub_rows(spec: str, split: str) -> Iterator:
    import datasets  # here: it takes a second to import, and local files do without
    name, _, config = spec.partition(":")
    try:
        rows = datasets.load_dataset(name, config or None, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = _clip(f"{type(error).__name__}: {error}")
        raise UserError(f"cannot load {spec!r} (split {split!r}) from the hub ({reason}): check owner, name, config, split and network, "
                        f"or download the file and give its path (there is no local file {spec!r} either)") from error
    for number, row in enumerate(rows):
        yield f"row {number}", row


# --- order, split, seeds: pure functions, so that a resumed run goes on as if it had never stopped ----------------------------------------

def order(seed: int, step: int, n: int, batch: int) -> list[int]:
    """Indices (batch,) of step `step` (from 0) over n examples, in O(n + batch).

    Every epoch is its own permutation of range(n); batches run through the epochs laid end to end, so no tail is dropped. A batch
    across the end of an epoch can hold an example twice: tell groups and their seeds apart by the position in the batch."""
    if min(seed, step) < 0 or min(n, batch) < 1:
        raise ValueError(f"seed and step must be at least 0, n and batch at least 1: got {seed=} {step=} {n=} {batch=}")
    first, last = step * batch, (step + 1) * batch  # positions in the endless row of epochs
    indices = []
    for epoch in range(first // n, math.ceil(last / n)):
        shuffled = np.random.default_rng(np.random.SeedSequence([seed, epoch])).permutation(n)
        indices += shuffled[max(first - epoch * n, 0):last - epoch * n].tolist()
    return indices


def split_examples(examples: Sequence[Example], n_eval: int, seed: int) -> tuple[list[Example], list[Example]]:
    """(train, held out): the latter exactly `n_eval`, both in the order given. Which ones depends on the questions and the seed only.

    Decided by a hash of the question, not of the id: data sets repeat questions under other ids, and copies must stay on one side."""
    if not 0 <= n_eval < len(examples):
        raise UserError(f"cannot hold out {n_eval} of {len(examples)} examples: at least one must remain for training")
    copies: dict[str, list[int]] = {}
    for i, example in enumerate(examples):
        copies.setdefault(_question_key(example.question), []).append(i)
    held_out: set[int] = set()
    for key in sorted(copies, key=lambda k: (trajectory_seed(seed, k), k)):
        if len(held_out) + len(copies[key]) <= n_eval:
            held_out.update(copies[key])
    if len(held_out) < n_eval:
        raise UserError(f"cannot hold out exactly {n_eval} of {len(examples)} examples as questions repeat: ask for {len(held_out)}")
    parts = ([e for i, e in enumerate(examples) if i not in held_out], [e for i, e in enumerate(examples) if i in held_out])
    if common := shared_questions(*parts):
        raise RuntimeError(f"{len(common)} questions are on both sides of the split, such as {common[0]!r}")
    return parts


def training_and_held_out(data: str, eval_data: str, n_eval: int, load: Callable[..., list[Example]] = load_examples, trains: bool = True) -> tuple[
        list[Example], list[Example]]:
    """(training questions, held-out questions) of a run: `n_eval` from another source if one is given, else split off. No question is on both
    sides: of two sources, what they share is not trained on (without `trains` only the held-out questions are wanted)."""
    if not data:
        raise UserError("this preset needs --data (questions: a .jsonl, .json or .parquet file, or a hub data set id)")
    if eval_data:
        train, held_out = load(data), load(eval_data, split="test", limit=n_eval)
        shared = set(shared_questions(train, held_out))
        kept = [e for e in train if e.question not in shared]
        if trains and not kept:
            raise UserError(f"all {len(train)} questions of --data {data} are among the held-out ones of --eval-data {eval_data}: give other --eval-data, or "
                            "fewer --eval-questions")
        if trains and shared:
            print(f"{len(train) - len(kept)} of {len(train)} questions of --data {data} are also in --eval-data {eval_data}, and are not trained on", flush=True)
        return kept, held_out
    return split_examples(load(data), n_eval, seed=0)


def shared_questions(a: Sequence[Example], b: Sequence[Example]) -> list[str]:
    """Questions of `a` that are also in `b`, up to case, spacing and end marks: for training and test sets from separate files."""
    known = {_question_key(example.question) for example in b}
    return [example.question for example in a if _question_key(example.question) in known]


def _question_key(question: str) -> str:
    return " ".join(question.lower().split()).rstrip(" ?.!")  # other punctuation stays: "3 - 4" and "3 / 4" are two questions


def trajectory_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) from parts such as (run seed, step, position in batch, sample, turn), the same on every machine."""
    text = json.dumps([part if isinstance(part, str) else operator.index(part) for part in parts])  # tells ("a", 1) from ("a1",)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
