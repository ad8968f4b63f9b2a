"""Passages of a corpus file: read and checked, or left on disk and reached through an offset table; and the folder that keeps an index of them.

An index lies beside its corpus, in `<corpus>.<kind>/index/`, with a manifest: the settings it was made with, and size, time of change and
sha256 of the corpus and of each of its own files. It is written beside, synced, and appears by one rename, so a half-written one is never used.
"""
import fcntl
import hashlib
import json
import operator
import os
import shutil
import sys
import time
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from common import UserError

MAX_QUERY_CHARS = 4_000  # longer queries are cut: only a derailed model writes them, and no retriever reads that far
TRUSTED_BYTES = 1 << 28  # a larger file is taken for unchanged if its size and time of change are; smaller ones are read and checksummed every time


@dataclass(frozen=True, slots=True)
class Passage:
    id: str
    contents: str  # Search-R1's form: the title in quotation marks, a newline, the text

    @property
    def title(self) -> str:
        """First line of the contents; its quotation marks stay, as in Search-R1's rendering."""
        return self.contents.split("\n", 1)[0]

    @property
    def text(self) -> str:
        """Contents after the first line; empty if there is only one."""
        return self.contents.partition("\n")[2]

    @classmethod
    def of(cls, id: object, contents: str) -> "Passage":
        # JSON may hold lone surrogates, which no tokenizer and no HTTP answer can encode
        return cls(str(id), contents.encode("utf-8", "replace").decode("utf-8"))


@dataclass(frozen=True, slots=True)
class Hit:
    passage: Passage
    score: float | None  # None where the server sends none


def clean_queries(queries: list[str], k: int) -> list[str]:
    """What every search() does first."""
    if k < 1:
        raise UserError(f"top-k is {k}; it must be at least 1")
    if isinstance(queries, str):
        raise TypeError("search() takes a list of queries, not one string")
    return [q.strip()[:MAX_QUERY_CHARS] for q in queries]


def best_first(scores: np.ndarray, k: int) -> np.ndarray:
    """Places of the k highest scores, highest first, equal ones in their order."""
    places = np.arange(len(scores))
    if len(scores) > k:  # keep everything that ties with the k-th, so that the order below is the same on every machine
        places = np.flatnonzero(scores >= np.partition(scores, -k)[-k])
    return places[np.argsort(-scores[places], kind="stable")][:k]


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


# ---- the file ------------------------------------------------------------------------------------------------------------------------

def read_corpus(path: str | Path) -> list[Passage]:
    """Passages of a corpus.jsonl: one `{"id", "contents": "\\"Title\\"\\ntext"}` per line, or `title` and `text` in place of `contents`.

    Raises UserError naming file and line for anything else. Blank lines are skipped.
    """
    with _open(path) as file:
        return [passage for _, _, passage in _rows(file, path)]


def _open(path: str | Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise UserError(f"cannot read the corpus {path} ({error.strerror}); give the path of a corpus.jsonl") from error


def _rows(file: BinaryIO, path: str | Path, digest=None) -> Iterator[tuple[int, bytes, Passage]]:
    """(byte offset, line, passage) of every row; `digest` sees every byte."""
    offset, found = 0, False
    for number, line in enumerate(file, 1):
        if digest:
            digest.update(line)
        start, offset = offset, offset + len(line)
        if number == 1 and line.startswith(b"\xef\xbb\xbf"):
            start, line = 3, line[3:]
        if line.strip():
            found = True
            yield start, line, _corpus_row(line, f"{path}, line {number}")
    if not found:
        raise UserError(f'the corpus {path} holds no passages; it needs lines such as {{"id": "0", "contents": "\\"Title\\"\\ntext"}}')


def _corpus_row(line: bytes, where: str) -> Passage:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError also covers bad UTF-8
        raise UserError(f"{where}: not one JSON object in UTF-8 ({error}); mend or remove the line") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected an object with 'id' and 'contents', found {type(row).__name__}")
    contents = row.get("contents")
    if contents is None and isinstance(row.get("title"), str) and isinstance(row.get("text"), str):
        title = " ".join(row["title"].split()).strip('"')
        contents = f'"{title}"\n{row["text"]}'
    if not isinstance(contents, str) or not contents.strip():
        raise UserError(f"{where}: needs 'contents' (or 'title' and 'text') as non-empty text; the keys here are {sorted(row)}")
    if isinstance(row.get("id"), bool) or not isinstance(row.get("id"), (str, int)):
        raise UserError(f"{where}: needs an 'id' that is text or a whole number")
    return Passage.of(row["id"], contents)


# ---- passages on disk ------------------------------------------------------------------------------------------------------------------

def map_array(path: Path, kind: type) -> np.ndarray:
    """The numbers of a raw file, memory-mapped for reading: shared between processes, evicted when memory is short."""
    return np.asarray(np.memmap(path, kind, "r")) if path.stat().st_size else np.empty(0, kind)  # asarray: without memmap's cost per slice


class MappedPassages(Sequence):
    """Passages that stay in their corpus file and are read one by one. Threads may share one.

    folder: holds what write_offsets wrote. Each row's checksum is compared, so a corpus that is changed under our feet is a UserError, not a wrong passage.
    """

    def __init__(self, corpus: Path, folder: Path):
        self._path, self._folder, self._file = corpus, folder, _open(corpus)
        self._offsets, self._crcs = map_array(folder / "offsets.i64", np.int64), map_array(folder / "crcs.u32", np.uint32)

    def __len__(self) -> int:
        return len(self._offsets) // 2

    def __getitem__(self, index: int) -> Passage:
        i = operator.index(index)
        i = i + len(self) if i < 0 else i
        if not 0 <= i < len(self):
            raise IndexError(f"passage {index} of {len(self)}")
        start, end = self._offsets[2 * i:2 * i + 2].tolist()
        line = os.pread(self._file.fileno(), end - start, start)
        if zlib.crc32(line) != self._crcs[i]:
            raise UserError(f"the corpus {self._path} is not what was indexed (row {i + 1} differs); start again, and if this stays, "
                            f"remove {self._folder} to have it indexed anew")
        return _corpus_row(line, f"{self._path}, row {i + 1}")


def write_offsets(corpus: Path, folder: Path, record: dict) -> Iterator[Passage]:
    """Read a corpus once, front to back: yields its passages, writes where each row begins and ends and its CRC into `folder`, and in the end
    puts size, time of change and sha256 of the file into `record`. Memory does not grow with the corpus."""
    offsets, crcs, digest, shown = array("q"), array("I"), hashlib.sha256(), time.monotonic()
    with _open(corpus) as file, open(folder / "offsets.i64", "wb") as offsets_file, open(folder / "crcs.u32", "wb") as crcs_file:
        before = os.fstat(file.fileno())
        for n, (start, line, passage) in enumerate(_rows(file, corpus, digest), 1):
            offsets.extend((start, start + len(line)))
            crcs.append(zlib.crc32(line))
            yield passage
            if n % 4096 == 0:
                for numbers, out in ((offsets, offsets_file), (crcs, crcs_file)):
                    numbers.tofile(out)
                    del numbers[:]
                if time.monotonic() > shown + 30:
                    shown = time.monotonic()
                    say(f"  {n:,} passages, {start / before.st_size:.0%} of {corpus}")
        offsets.tofile(offsets_file)
        crcs.tofile(crcs_file)
        after = os.fstat(file.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise UserError(f"the corpus {corpus} was changed while it was being indexed; start again when it is complete")
    record.update(bytes=after.st_size, mtime_ns=after.st_mtime_ns, sha256=digest.hexdigest())


# ---- the folder of an index ------------------------------------------------------------------------------------------------------------

def kept_index(corpus: Path, kind: str, settings: dict, build: Callable[[Path], dict], resumable: bool = False) -> Path:
    """The folder of a whole index of this very corpus, made with these settings; built first if there is none, or if it is stale or damaged.

    build(folder): writes the index's files and returns the corpus's record (write_offsets). resumable: what a build that was stopped has written
    stays, and the next one finds it in its folder. settings: as JSON keeps them. Raises OSError where the folder cannot be written.
    """
    home = Path(f"{corpus}.{kind}")
    entry, part = home / "index", home / ".part"
    if _fault(entry, corpus, settings) is None:  # no lock: an index appears whole, by one rename, and may lie where nothing can be written
        return entry
    home.mkdir(exist_ok=True)
    with open(home / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the ranks of one run start together: one builds, the others wait and read
        fault = _fault(entry, corpus, settings)
        if fault is None:
            return entry
        if fault:
            say(f"{fault}; building it again")
        if part.exists() and not resumable:
            shutil.rmtree(part)  # left by a build that was killed
        part.mkdir(exist_ok=True)
        try:
            source = build(part)
            files = {path.name: _record(path) for path in sorted(part.iterdir()) if path.name != "manifest.json"}  # one left from a failed sync
            (part / "manifest.json").write_text(json.dumps({"settings": settings, "corpus": source, "files": files}, indent=1))
            for path in [*part.iterdir(), part]:
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            shutil.rmtree(entry, ignore_errors=True)  # whoever has it mapped keeps it
            os.rename(part, entry)
        except BaseException:
            if not resumable:
                shutil.rmtree(part)
            raise
    return entry


def _fault(entry: Path, corpus: Path, settings: dict) -> str | None:
    """Why the index cannot be used; "" if there is none, None if it can."""
    if not entry.exists():
        return ""
    try:
        manifest = json.loads((entry / "manifest.json").read_text())
        if manifest["settings"] != settings:
            return f"the search index {entry} was made with other settings or by another version"
        if not all(_unchanged(entry / name, record) for name, record in manifest["files"].items()):
            return f"the search index {entry} is damaged"
        if not _unchanged(corpus, manifest["corpus"]):
            return f"the corpus {corpus} has changed since the search index {entry} was made"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"the search index {entry} is damaged"
    return None


def _record(path: Path) -> dict:
    stat = path.stat()
    with open(path, "rb") as file:
        return {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _unchanged(path: Path, record: dict) -> bool:
    stat = path.stat()
    if stat.st_size != record["bytes"]:
        return False
    if stat.st_size > TRUSTED_BYTES:
        if stat.st_mtime_ns == record["mtime_ns"]:
            return True
        say(f"{path} ({stat.st_size / 1e9:.1f} GB) has another time of change; reading it to see whether it is the same")
    return _record(path)["sha256"] == record["sha256"]
