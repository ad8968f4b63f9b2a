"""The memory-mapped index against the one in memory, and what happens when files change, break, or a build is stopped."""
import json
import os
import random
import subprocess
import sys
import tempfile
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import UserError, bm25, corpus
from common.bm25 import BM25
from common.corpus import Passage, read_corpus

WORDS = [f"w{i}" for i in range(300)]
WEIGHTS = [1 / (i + 2) for i in range(300)]


@pytest.fixture(autouse=True)
def fresh_process_cache():
    bm25._loaded.clear()


def write(path: Path, contents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"id": str(i), "contents": c}) + "\n" for i, c in enumerate(contents)))
    return path


def zipf(n: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, WEIGHTS, k=rng.randint(1, 40))) for _ in range(n)]


def part_of(path: Path) -> Path:
    return Path(f"{path}.bm25") / ".part"


# the same hits ------------------------------------------------------------------------------------------------------------------------

texts = st.lists(st.sampled_from("a b c d é ß 1 İ x\u0301 Ⅷ - 上海 \U0001d53e".split()), min_size=1, max_size=8).map(" ".join)


@settings(max_examples=60, deadline=None)
@given(st.lists(texts, min_size=1, max_size=30), st.lists(texts, max_size=6), st.integers(1, 12), st.sampled_from([1, 7, 1 << 23]))
def test_mapped_equals_in_memory(contents, queries, k, block_words):
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(bm25, "BLOCK_WORDS", block_words)
        patch.setattr(os, "fsync", lambda descriptor: None)  # slow where other work writes too
        mapped = BM25.from_file(write(Path(folder) / "c.jsonl", contents))
        inside = BM25([Passage(str(i), c) for i, c in enumerate(contents)])
        assert mapped.search(queries, k) == inside.search(queries, k)  # passages, scores to the bit, order of ties
        assert list(mapped.passages) == inside.passages and type(mapped._index) is bm25.MappedIndex


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """(mapped, in memory) over 4,000 passages, in blocks of a few hundred."""
    path = write(tmp_path_factory.mktemp("large") / "c.jsonl", zipf(4000))
    normal, bm25.BLOCK_WORDS = bm25.BLOCK_WORDS, 5000
    try:
        return BM25.from_file(path), BM25(read_corpus(path))
    finally:
        bm25.BLOCK_WORDS = normal


@pytest.mark.parametrize("k", [1, 3, 10, 100, 5000])
def test_larger_mapped_index_equals_in_memory(large, k):
    rng = random.Random(k)
    queries = [" ".join(rng.choices(WORDS + ["nothing-here"], WEIGHTS + [0.05], k=rng.choice((1, 2, 5, 12)))) for _ in range(60)]
    queries += ["w0 " * 500, " ".join(rng.choices(WORDS, k=900))]  # derailed models write such
    assert large[0].search(queries, k) == large[1].search(queries, k)


def test_frequent_words_are_not_read_where_rare_ones_decide(large):
    class Counted(np.ndarray):
        written = 0

        def __setitem__(self, places, value):
            Counted.written += len(places)
            super().__setitem__(places, value)

    mapped, inside = large
    index, sums = mapped._index, mapped._index._sums
    holders = lambda word: len(index._list(next(i for i in range(len(index._caps)) if index._word(i) == word))[0])
    index._sums = sums.view(Counted)
    try:
        hits = mapped.search(["w0 w1 w290"], 3)
    finally:
        index._sums = sums
    assert hits == inside.search(["w0 w1 w290"], 3) and not sums.any()
    assert holders(b"w290") <= Counted.written / 2 < holders(b"w290") + holders(b"w1") < 4000  # each is written once more, to clear it


def test_threads_share_a_mapped_index(large):
    queries = zipf(20, seed=5)
    expected = large[1].search(queries, 3)
    with ThreadPoolExecutor(8) as pool:
        assert all(result == expected for result in pool.map(lambda _: large[0].search(queries, 3), range(24)))


def test_an_interrupted_query_leaves_no_trace(large, monkeypatch):
    mapped, inside = large
    calls = iter(range(100))

    def stop(word, read=mapped._index._list):
        if next(calls) == 2:
            raise KeyboardInterrupt
        return read(word)

    with monkeypatch.context() as patch:
        patch.setattr(mapped._index, "_list", stop)
        with pytest.raises(KeyboardInterrupt):
            mapped.search(["w9 w8 w7 w6"], 3)
    assert mapped.search(["w9 w8 w7 w6", "w7"], 3) == inside.search(["w9 w8 w7 w6", "w7"], 3)


def test_passages_stay_on_disk(tmp_path):
    path = tmp_path / "c.jsonl"
    rows = ['{"id": 7, "contents": "\\"A\\"\\ntext"}', "", "   ", '{"id": "8", "title": "B", "text": "more"}', '{"id": "9", "contents": "\\ud800 last"}']
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(rows).encode())
    passages = BM25.from_file(path).passages
    assert type(passages) is corpus.MappedPassages and list(passages) == read_corpus(path) and len(passages) == 3
    assert passages[-1] == passages[np.int32(2)] == Passage("9", "? last")
    for wrong in (3, -4):
        with pytest.raises(IndexError):
            passages[wrong]


def test_a_corpus_without_words(tmp_path):
    path = write(tmp_path / "c.jsonl", ["...", "?!"])
    assert BM25.from_file(path).search(["x", ""], 2) == [[], []]


def peak_bytes(path: Path) -> int:
    tracemalloc.start()
    try:
        BM25.from_file(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(bm25, "BLOCK_WORDS", 5000)
    small, big = (peak_bytes(write(tmp_path / f"{n}.jsonl", zipf(n))) for n in (500, 6000))
    size = (tmp_path / "6000.jsonl").stat().st_size
    assert big - small < 40 * 5500 < size / 2  # some bytes per passage: length, offsets, checksum


# files that change or break, builds that are stopped ------------------------------------------------------------------------------------

def test_a_corpus_changed_under_our_feet_is_not_read_wrongly(tmp_path):
    path = write(tmp_path / "c.jsonl", ["red apple", "green pear"])
    index = BM25.from_file(path)
    path.write_text(path.read_text().replace("green pear", "green plum"))
    assert index.search(["apple"], 1)[0][0].passage.id == "0"
    with pytest.raises(UserError, match=r"is not what was indexed \(row 2 differs\); start again"):
        index.search(["pear"], 1)
    assert [len(hits) for hits in BM25.from_file(path).search(["pear", "plum"], 1)] == [0, 1]


def test_a_corpus_changed_while_it_is_indexed_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path / "c.jsonl", ["one", "two"])

    def append(text, tokenise=bm25.tokenise):
        with open(path, "a") as file:
            file.write("\n")
        return tokenise(text)

    monkeypatch.setattr(bm25, "tokenise", append)
    with pytest.raises(UserError, match="was changed while it was being indexed"):
        BM25.from_file(path)
    assert not part_of(path).exists() and not (part_of(path).parent / "index").exists()


def test_a_bad_row_leaves_nothing_behind(tmp_path):
    path = write(tmp_path / "c.jsonl", ["one", "two"])
    path.write_text(path.read_text() + "{}\n")
    with pytest.raises(UserError, match="c.jsonl, line 3: needs 'contents'"):
        BM25.from_file(path)
    assert [p.name for p in part_of(path).parent.iterdir()] == ["lock"]


@pytest.mark.parametrize("where", ["_spill", "_join"])
def test_a_killed_build_is_never_used(tmp_path, where):
    path = write(tmp_path / "c.jsonl", zipf(50))
    code = (f"import os, signal\nfrom common import bm25\nwork = bm25.{where}\n"
            f"def killed(*args):\n    work(*args)\n    os.kill(os.getpid(), signal.SIGKILL)\nbm25.{where} = killed\nbm25.BM25.from_file({str(path)!r})")
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == -9
    assert part_of(path).exists()
    assert BM25.from_file(path).search(["w3", "w1 w2"], 3) == BM25(read_corpus(path)).search(["w3", "w1 w2"], 3)
    assert not part_of(path).exists()


def test_another_version_is_indexed_again(tmp_path, monkeypatch, capsys):
    path = write(tmp_path / "c.jsonl", ["one", "two"])
    BM25.from_file(path)
    bm25._loaded.clear()
    monkeypatch.setattr(bm25, "K1", 0.9)
    assert BM25.from_file(path).search(["one"], 1) == BM25(read_corpus(path)).search(["one"], 1) != []
    assert "was made with other settings or by another version; building it again" in capsys.readouterr().err


def test_large_files_are_known_by_size_and_time(tmp_path, monkeypatch, capsys):
    path = write(tmp_path / "c.jsonl", ["one", "two"])
    BM25.from_file(path)
    monkeypatch.setattr(corpus, "TRUSTED_BYTES", 0)
    digests, digest = [], corpus.hashlib.file_digest
    monkeypatch.setattr(corpus.hashlib, "file_digest", lambda file, kind: digests.append(file.name) or digest(file, kind))

    def open_again():
        digests.clear()
        bm25._loaded.clear()
        return BM25.from_file(path)

    open_again()
    assert digests == []
    os.utime(path, ns=(1, 1))
    open_again()
    assert digests == [str(path)] and "has another time of change; reading it" in capsys.readouterr().err
    path.write_text(path.read_text().replace("two", "six"))
    assert len(open_again().search(["six"], 1)[0]) == 1
    assert "has changed since" in capsys.readouterr().err


def test_a_large_corpus_needs_room_for_its_index(tmp_path, monkeypatch):
    path = write(tmp_path / "c.jsonl", ["one", "two"])
    monkeypatch.setattr(bm25, "TRUSTED_BYTES", 0)
    Path(f"{path}.bm25").write_text("a file where the folder should be")
    with pytest.raises(UserError, match="cannot keep the search index in .* make room there"):
        BM25.from_file(path)
