"""BM25: in memory for small corpora (by bm25s), memory-mapped for corpora of any size. Both find the same passages with the same scores, bit for bit.

The mapped index is what `BM25.from_file` makes beside a corpus file. It holds, raw and little-endian, for V words and P postings (a posting: a
passage that holds a word) of N passages:

    words.utf8     the words, sorted, end to end           word_starts.i64   V + 1, where each begins
    docs.i32       P passage numbers, ascending per word   list_starts.i64   V + 1, where each word's list begins
    scores.f32     P, what the word adds to that passage   caps.f32          V, the highest of its scores
    offsets.i64, crcs.u32: common/corpus.py

Building it takes memory for one block of the corpus and a few bytes per passage and word (see _spill), and twice the index's space on disk.
"""
import bisect
import heapq
import logging
import math
import mmap
import re
import shutil
import threading
import unicodedata
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path

import bm25s
import numpy as np

from common import UserError
from common.corpus import TRUSTED_BYTES, Hit, MappedPassages, Passage, best_first, clean_queries, kept_index, map_array, read_corpus, say, write_offsets

logging.getLogger("bm25s").setLevel(logging.WARNING)  # the library sets DEBUG on import

WORD = re.compile(r"\w+")
# Lucene's defaults. On 327 HotpotQA questions over 7,351 passages the usual settings (also Pyserini's 0.9 / 0.4) and an English stop
# list all find as much within noise, so there is no stop list and no stemmer: nothing here is particular to English.
K1, B = 1.2, 0.75
EPSILON = float(np.finfo(np.float32).eps)


def tokenise(text: str) -> list[str]:
    """Lower-cased runs of letters, digits and underscores, after NFKC (so that composed and decomposed accents agree)."""
    return WORD.findall(unicodedata.normalize("NFKC", text).lower())


class BM25:
    """BM25 (Lucene's variant) over passages. Reading only after construction, so threads may share one."""

    def __init__(self, passages: Sequence[Passage], index: "MappedIndex | None" = None):
        """`index`: a ready index of these very passages; built here, in memory, if not given."""
        self.passages = passages
        self._index = MemoryIndex(passages) if index is None else index

    def __len__(self) -> int:
        return len(self.passages)

    @classmethod
    def from_file(cls, corpus_path: str | Path) -> "BM25":
        """Open a corpus once per process, memory-mapped with its index, which is kept in the folder `<corpus>.bm25/` beside it."""
        path = Path(corpus_path).resolve()
        with _loaded_lock:
            stamp = (path.stat().st_size, path.stat().st_mtime_ns) if path.is_file() else None
            if path not in _loaded or _loaded[path][0] != stamp:
                _loaded[path] = stamp, cls(*_open_mapped(path))
            return _loaded[path][1]

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        """At most k hits per query, best first, equal scores in corpus order. Passages without a word of the query are never hits."""
        results = []
        for query in clean_queries(queries, k):
            docs, scores = self._index.candidates(tokenise(query), k)
            results.append([Hit(self.passages[int(docs[i])], float(scores[i])) for i in best_first(scores, k)])
        return results


_loaded: dict[Path, tuple[tuple[int, int] | None, BM25]] = {}
_loaded_lock = threading.Lock()


def _open_mapped(corpus: Path) -> tuple[Sequence[Passage], "MappedIndex | None"]:
    if not corpus.is_file():
        return read_corpus(corpus), None  # says what is wrong, or reads a pipe
    settings = {"format": 1, "words": WORD.pattern, "unicode": unicodedata.unidata_version, "k1": K1, "b": B}
    try:
        folder = kept_index(corpus, "bm25", settings, lambda folder: _build(corpus, folder))
    except OSError as error:
        reason = f"cannot keep the search index in {corpus}.bm25 ({error.strerror or error})"
        if corpus.stat().st_size > TRUSTED_BYTES:
            raise UserError(f"{reason}; make room there for about three times the {corpus.stat().st_size / 1e9:.1f} GB of the corpus, "
                            "or move the corpus to where there is") from error
        say(f"{reason}; it stays in memory, to be built again next time")
        return read_corpus(corpus), None
    return MappedPassages(corpus, folder), MappedIndex(folder)


# ---- in memory -------------------------------------------------------------------------------------------------------------------------

class MemoryIndex:
    """bm25s over passages: the fast way to index a few hundred."""

    def __init__(self, passages: Sequence[Passage]):
        vocabulary: dict[str, int] = {}
        ids = [[vocabulary.setdefault(word, len(vocabulary)) for word in tokenise(passage.contents)] for passage in passages]
        self._bm25s = bm25s.BM25(k1=K1, b=B, method="lucene", backend="numpy", csc_backend="numpy")
        if vocabulary:
            self._bm25s.index((ids, vocabulary), create_empty_token=False, show_progress=False)
        self._vocabulary = vocabulary

    def candidates(self, words: list[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        """Passages that hold any of the words, ascending, and their scores (float32)."""
        word_ids = [self._vocabulary[w] for w in words if w in self._vocabulary]
        if not word_ids:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        scores = self._bm25s.get_scores_from_ids(word_ids)
        docs = np.flatnonzero(scores > 0)
        return docs, scores[docs]


# ---- on disk ---------------------------------------------------------------------------------------------------------------------------

class MappedIndex:
    """The files above, memory-mapped. In memory of its own: one float32 per passage, shared by all queries."""

    def __init__(self, folder: Path):
        self._docs, self._scores = map_array(folder / "docs.i32", np.int32), map_array(folder / "scores.f32", np.float32)
        self._starts, self._caps = map_array(folder / "list_starts.i64", np.int64), map_array(folder / "caps.f32", np.float32)
        self._word_starts = map_array(folder / "word_starts.i64", np.int64)
        with open(folder / "words.utf8", "rb") as file:
            self._words = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if len(self._caps) else b""
        self._sums = np.zeros(len(map_array(folder / "crcs.u32", np.uint32)), np.float32)  # all zero between queries
        self._lock = threading.Lock()

        self._number = lru_cache(1 << 16)(self._find)  # the words of queries repeat

    def _find(self, word: str) -> int:
        """A word's number, -1 if no passage holds it."""
        wanted = word.encode("utf-8", "surrogatepass")
        number = bisect.bisect_left(range(len(self._caps)), wanted, key=self._word)
        return number if number < len(self._caps) and self._word(number) == wanted else -1

    def _word(self, number: int) -> bytes:
        return self._words[self._word_starts[number]:self._word_starts[number + 1]]

    def _list(self, word: int) -> tuple[np.ndarray, np.ndarray]:
        part = slice(self._starts[word], self._starts[word + 1])
        return self._docs[part], self._scores[part]

    def _gains(self, word: int, docs: np.ndarray) -> np.ndarray:
        """What a word adds to each of these passages (int32, the lists' type: searchsorted would copy a list of another)."""
        in_list, scores = self._list(word)
        places = np.searchsorted(in_list, docs).clip(max=len(in_list) - 1)
        return np.where(in_list[places] == docs, scores[places], np.float32(0))

    def candidates(self, words: list[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        """Passages among which are the k best (and all that tie with the k-th), ascending, and their scores as MemoryIndex's, bit for bit.

        Words are taken in the order of the most they can add to a score. Once all that is left to add is less than the k-th best sum so far, a
        passage not met yet cannot be a hit, and those that were met drop out one by one as the bar rises; the lists left, the longest, are only
        looked up for them (MaxScore; Turtle and Flood 1995).
        """
        numbers = [number for word in words if (number := self._number(word)) >= 0]  # repeated and in order as in the query: float32 sums depend on it
        times = Counter(numbers)
        caps = {word: float(self._caps[word]) * n for word, n in times.items()}
        left = sum(caps.values())
        slack = 2 * len(numbers) * EPSILON * left  # the sums below are rounded, and in another order
        read: list[np.ndarray] = []  # passages of the lists read so far
        docs, bar = None, 0.0  # docs: the candidates, once there can be no others; bar: k passages have at least this sum

        def drop(docs: np.ndarray) -> tuple[np.ndarray, float]:
            """Those of the candidates that can still be hits, and the bar that says so."""
            sums = self._sums[docs]
            raised = max(bar, float(np.partition(sums, -k)[-k])) if len(sums) > k else bar
            return docs[sums >= raised - left - slack], raised

        def met() -> np.ndarray:
            docs = np.concatenate([places[self._sums[places] >= bar - left - slack] for places in read] or [np.empty(0)]).astype(np.int32)
            docs.sort()
            return docs[np.diff(docs, prepend=np.int32(-1)) > 0]

        with self._lock:
            try:
                for word in sorted(caps, key=lambda w: (-caps[w], w)):
                    if docs is None and left + slack < bar:
                        docs, bar = drop(met())
                    in_list, scores = self._list(word)
                    if docs is None or 8 * len(docs) > len(in_list):
                        read.append(in_list.astype(np.intp))
                        sums = self._sums[read[-1]] + scores * np.float32(times[word])
                        self._sums[read[-1]] = sums
                        above = sums[sums > bar]
                        if len(above) >= k:
                            bar = float(np.partition(above, -k)[-k])
                    else:
                        self._sums[docs] += self._gains(word, docs) * np.float32(times[word])
                    left -= caps[word]
                    if docs is not None:
                        docs, bar = drop(docs)
                docs, bar = drop(met() if docs is None else docs)
            finally:
                for places in read:
                    self._sums[places] = 0
        exact = np.zeros(len(docs), np.float32)
        for word in numbers:
            exact += self._gains(word, docs)
        return docs, exact


BLOCK_WORDS = 1 << 23  # running words sorted at once, about 40 bytes each: 340 MB
BUFFER = 1 << 16


def _build(corpus: Path, folder: Path) -> dict:
    """Fill the folder with the index of a corpus; returns the corpus's record."""
    if corpus.stat().st_size > 1 << 26:
        say(f"indexing {corpus}, {corpus.stat().st_size / 1e9:.2f} GB (once; the index is kept beside it)")
    spill, record = folder / "spill", {}
    spill.mkdir()
    lengths, blocks = _spill(write_offsets(corpus, folder, record), spill)
    _join(spill, folder, lengths, blocks)
    shutil.rmtree(spill)
    return record


def _spill(passages: Iterable[Passage], spill: Path) -> tuple[np.ndarray, list[tuple[int, int, int]]]:
    """Write the postings block by block, each with its own sorted vocabulary. Returns every passage's length in words and, per block, where in
    words.txt it begins, how many words and how many postings it has."""
    numbers: dict[str, int] = defaultdict()
    numbers.default_factory = numbers.__len__  # a new word gets the next number
    ids, lengths, blocks = array("i"), array("i"), []
    with open(spill / "words.txt", "wb") as words_file, open(spill / "counts.i32", "wb") as counts_file, \
            open(spill / "docs.i32", "wb") as docs_file, open(spill / "times.i32", "wb") as times_file:

        def write(first: int) -> None:
            """The block of passages `first` and on. A posting is sorted as one number: its word's rank, then its passage."""
            words = sorted(numbers)  # by code points, as their UTF-8 is
            rank = np.empty(len(words), np.int64)
            rank[np.fromiter((numbers[word] for word in words), np.int64, len(words))] = np.arange(len(words))
            postings = rank[np.frombuffer(ids, np.int32)]
            postings <<= 32
            postings |= np.repeat(np.arange(first, len(lengths)), np.frombuffer(lengths, np.int32)[first:])
            postings.sort()
            starts = np.flatnonzero(np.concatenate(([True], postings[1:] != postings[:-1])))
            times = np.diff(starts, append=len(postings))
            postings = postings[starts]
            blocks.append((words_file.tell(), len(words), len(postings)))
            words_file.writelines(word.encode() + b"\n" for word in words)
            np.bincount(postings >> 32, minlength=len(words)).astype(np.int32).tofile(counts_file)
            postings.astype(np.int32).tofile(docs_file)  # the lower half
            times.astype(np.int32).tofile(times_file)

        first = 0
        for passage in passages:
            words = tokenise(passage.contents)
            ids.extend(map(numbers.__getitem__, words))
            lengths.append(len(words))
            if len(ids) >= BLOCK_WORDS:
                write(first)
                numbers.clear()
                del ids[:]
                first = len(lengths)
        if ids:
            write(first)
    return np.array(lengths), blocks


def _block_words(spill: Path, block: int, at: int, first: int, n: int) -> Iterator[tuple[bytes, int, int]]:
    """(word, block, how many postings) of a block, in the order of its words."""
    counts = map_array(spill / "counts.i32", np.int32)
    with open(spill / "words.txt", "rb") as file:
        file.seek(at)
        for start in range(first, first + n, 4096):
            part = counts[start:min(start + 4096, first + n)].tolist()
            for line, count in zip(islice(file, len(part)), part, strict=True):
                yield line[:-1], block, count


def _join(spill: Path, folder: Path, lengths: np.ndarray, blocks: list[tuple[int, int, int]]) -> None:
    """Join the blocks: first their vocabularies, word by word, then the postings in that order, a buffer at a time."""
    per_word, parts, word_starts, size = array("q"), array("i"), array("q", [0]), 0  # parts: (word, block, postings), three numbers each
    firsts = np.cumsum([0, *(n for _, n, _ in blocks)]).tolist()
    merged = heapq.merge(*(_block_words(spill, b, at, firsts[b], n) for b, (at, n, _) in enumerate(blocks)))
    with open(spill / "parts.i32", "wb") as parts_file, open(folder / "words.utf8", "wb") as words_file, \
            open(folder / "word_starts.i64", "wb") as starts_file:
        for number, (word, same) in enumerate(groupby(merged, key=itemgetter(0))):
            total = 0
            for _, block, count in same:
                parts.extend((number, block, count))
                total += count
            per_word.append(total)
            words_file.write(word)
            size += len(word)
            word_starts.append(size)
            if len(word_starts) >= BUFFER:
                for buffer, file in ((parts, parts_file), (word_starts, starts_file)):
                    buffer.tofile(file)
                    del buffer[:]
        parts.tofile(parts_file)
        word_starts.tofile(starts_file)
    holders = np.array(per_word)  # V, passages that hold the word
    np.concatenate(([0], np.cumsum(holders))).astype(np.int64).tofile(folder / "list_starts.i64")

    # score = idf * tf / (tf + k1 (1 - b + b length / mean length)), in the types and in the order in which bm25s computes it
    distinct, which = np.unique(holders, return_inverse=True)
    idf = np.array([math.log(1 + (len(lengths) - n + 0.5) / (n + 0.5)) for n in distinct.tolist()], np.float32)[which]
    mean, caps = lengths.mean(), np.zeros(len(holders), np.float32)
    table = map_array(spill / "parts.i32", np.int32).reshape(-1, 3)
    read = np.cumsum([0, *(n for _, _, n in blocks)])[:-1]  # per block: the posting that comes next
    with open(spill / "docs.i32", "rb") as docs_in, open(spill / "times.i32", "rb") as times_in, \
            open(folder / "docs.i32", "wb") as docs_out, open(folder / "scores.f32", "wb") as scores_out:
        at = 0
        while at < len(table):
            word, block, count = table[at:at + max(1, BLOCK_WORDS // 4)].T.astype(np.int64)
            end = max(1, int(np.searchsorted(np.cumsum(count), BLOCK_WORDS // 2, "right")))
            word, block, count, at = word[:end], block[:end], count[:end], at + end
            begin = np.cumsum(count) - count  # where each part goes
            order = np.argsort(block, kind="stable")  # as the parts come from the blocks: each block's lie one behind the other there
            n = count[order]
            place = np.repeat(begin[order] - (np.cumsum(n) - n), n) + np.arange(n.sum())
            postings = np.bincount(block, count, len(blocks)).astype(np.int64)
            columns = []
            for file in (docs_in, times_in):
                column = np.empty(len(place), np.int32)
                column[place] = np.concatenate([_read(file, read[b], postings[b]) for b in np.flatnonzero(postings)])
                columns.append(column)
            read += postings
            docs, tf = columns
            scores = (np.repeat(idf[word], count) * (tf / (K1 * ((1 - B) + B * lengths[docs] / mean) + tf))).astype(np.float32)
            np.maximum.at(caps, word, np.maximum.reduceat(scores, begin))
            docs.tofile(docs_out)
            scores.tofile(scores_out)
    caps.tofile(folder / "caps.f32")


def _read(file, first: int, n: int) -> np.ndarray:
    file.seek(4 * int(first))
    return np.fromfile(file, np.int32, int(n))
