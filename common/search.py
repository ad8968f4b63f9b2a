"""Search: BM25 over a corpus file, clients for three retrieval servers, a server of our own, and text made safe to insert.

Everything that searches has one method, `search(queries, k) -> one list of Hit per query, best first`, so a rollout does not care where
the passages live. The protocols are those of the papers' code: Search-R1 `search_r1/search/retrieval_server.py`, ReSearch
`scripts/serving/retriever_serving.py`, R1-Searcher `train/wiki_corpus_load.py`.

    python -m common.search --corpus corpus.jsonl        # serves POST /retrieve (Search-R1's protocol) and GET /health on 127.0.0.1:8000
"""

import fcntl
import hashlib
import http.client
import json
import logging
import os
import random
import re
import shutil
import socket
import sys
import threading
import time
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import bm25s
import numpy as np

from common import UserError
from common.net import TooLarge, endpoint, exchange, hidden

logging.getLogger("bm25s").setLevel(logging.WARNING)  # the library sets DEBUG on import

MAX_QUERY_CHARS = 4_000  # longer queries are cut: only a derailed model writes them, and no retriever reads that far
WORD = re.compile(r"\w+")


class RetrieverDown(UserError):
    """The retriever did not answer, or answered something else: the run must stop instead of learning from empty results."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status  # HTTP status of a refusal


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


@dataclass(frozen=True, slots=True)
class Hit:
    passage: Passage
    score: float | None  # None where the server sends none


def _passage(id: object, contents: str) -> Passage:
    # JSON may hold lone surrogates, which no tokenizer and no HTTP answer can encode
    return Passage(str(id), contents.encode("utf-8", "replace").decode("utf-8"))


def _queries(queries: list[str]) -> list[str]:
    if isinstance(queries, str):
        raise TypeError("search() takes a list of queries, not one string")
    return [q.strip()[:MAX_QUERY_CHARS] for q in queries]


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------------------------------- corpus

def read_corpus(path: str | Path) -> list[Passage]:
    """Passages of a corpus.jsonl: one `{"id", "contents": "\\"Title\\"\\ntext"}` per line, or `title` and `text` in place of `contents`.

    Raises UserError naming file and line for anything else. Blank lines are skipped.
    """
    passages = []
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if line.strip():
                    passages.append(_corpus_row(line, f"{path}, line {number}"))
    except OSError as error:
        raise UserError(f"cannot read the corpus {path} ({error.strerror}); give the path of a corpus.jsonl") from error
    if not passages:
        raise UserError(f'the corpus {path} holds no passages; it needs lines such as {{"id": "0", "contents": "\\"Title\\"\\ntext"}}')
    return passages


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
    return _passage(row["id"], contents)


# ------------------------------------------------------------------------------------------------------------------------------ BM25

# Lucene's defaults. On 327 HotpotQA questions over 7,351 passages the usual settings (also Pyserini's 0.9 / 0.4) and an English stop
# list all find as much within noise, so there is no stop list and no stemmer: nothing here is particular to English.
K1, B = 1.2, 0.75


def tokenise(text: str) -> list[str]:
    """Lower-cased runs of letters, digits and underscores, after NFKC (so that composed and decomposed accents agree)."""
    return WORD.findall(unicodedata.normalize("NFKC", text).lower())


class BM25:
    """BM25 (Lucene's variant) over passages, by bm25s. Reading only after construction, so threads may share one."""

    def __init__(self, passages: list[Passage], index: bm25s.BM25 | None = None):
        """`index`: a ready index of these very passages; built here if not given."""
        self.passages = passages
        self._index = _build_index(passages) if index is None else index

    def __len__(self) -> int:
        return len(self.passages)

    @classmethod
    def from_file(cls, corpus_path: str | Path) -> "BM25":
        """Load a corpus once per process, with its index cached in the folder `<corpus>.bm25/` beside it."""
        path = Path(corpus_path).resolve()
        with _loaded_lock:
            stamp = (path.stat().st_size, path.stat().st_mtime_ns) if path.is_file() else None
            if path not in _loaded or _loaded[path][0] != stamp:
                passages = read_corpus(path)
                _loaded[path] = stamp, cls(passages, _cached_index(path, passages))
            return _loaded[path][1]

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        """At most k hits per query, best first, equal scores in corpus order. Passages without a word of the query are never hits."""
        if k < 1:
            raise UserError(f"top-k is {k}; it must be at least 1")
        return [self._search_one(query, k) for query in _queries(queries)]

    def _search_one(self, query: str, k: int) -> list[Hit]:
        word_ids = [self._index.vocab_dict[w] for w in tokenise(query) if w in self._index.vocab_dict]
        if not word_ids:
            return []
        scores = self._index.get_scores_from_ids(word_ids)
        found = np.flatnonzero(scores > 0)
        if len(found) > k:  # keep everything that ties with the k-th, so that the order below is the same on every machine
            found = found[scores[found] >= np.partition(scores[found], -k)[-k]]
        best = found[np.argsort(-scores[found], kind="stable")][:k]
        return [Hit(self.passages[i], float(scores[i])) for i in best]


_loaded: dict[Path, tuple[tuple[int, int] | None, BM25]] = {}
_loaded_lock = threading.Lock()


def _build_index(passages: list[Passage]) -> bm25s.BM25:
    vocabulary: dict[str, int] = {}
    ids = [[vocabulary.setdefault(word, len(vocabulary)) for word in tokenise(passage.contents)] for passage in passages]
    index = bm25s.BM25(k1=K1, b=B, method="lucene", backend="numpy", csc_backend="numpy")
    if vocabulary:
        index.index((ids, vocabulary), create_empty_token=False, show_progress=False)
    else:
        index.vocab_dict = vocabulary  # nothing to find; bm25s cannot index an empty vocabulary
    return index


def _cached_index(corpus: Path, passages: list[Passage]) -> bm25s.BM25:
    """The index from `<corpus>.bm25/<key>/`, made there first if absent.

    The key covers contents, library version and settings; the files carry checksums.
    """
    key = hashlib.sha256(f"bm25s {bm25s.__version__}, words {WORD.pattern}, k1 {K1}, b {B}".encode())
    for passage in passages:
        key.update(passage.contents.encode() + b"\0")
    folder = Path(f"{corpus}.bm25")
    entry = folder / key.hexdigest()[:16]
    if _intact(entry):  # no lock: an entry appears whole, by one rename, and may lie in a folder that cannot be written
        return _read_index(entry)
    index = None
    try:
        folder.mkdir(exist_ok=True)
        with open(folder / "lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the ranks of one run start together: one builds, the others wait and read
            if _intact(entry):
                return _read_index(entry)
            if entry.exists():
                _say(f"the search index {entry} is damaged; building it again")
            if len(passages) > 100_000:
                _say(f"indexing {len(passages):,} passages of {corpus} (once; kept in {folder})")
            index = _build_index(passages)
            if index.vocab_dict:
                _write_index(index, entry)
                index = _read_index(entry)  # memory-mapped: shared between processes, evicted when memory is short
    except OSError as error:
        _say(f"cannot keep the search index in {folder} ({error.strerror or error}); it stays in memory, to be built again next time")
        index = index or _build_index(passages)
    return index


def _checksums(folder: Path) -> dict[str, str]:
    sums = {}
    for path in sorted(folder.iterdir()):
        if path.name != "sums.json":
            with open(path, "rb") as file:
                sums[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


def _intact(entry: Path) -> bool:
    try:
        return json.loads((entry / "sums.json").read_text()) == _checksums(entry)
    except (OSError, ValueError):
        return False


def _read_index(entry: Path) -> bm25s.BM25:
    index = bm25s.BM25.load(entry, mmap=True, show_progress=False)
    for name in ("data", "indices", "indptr"):
        index.scores[name] = np.asarray(index.scores[name])  # still the mapped file, without memmap's cost per slice
    return index


def _write_index(index: bm25s.BM25, entry: Path) -> None:
    """Write beside, sync, rename. The caller holds the lock, so any other entry is outdated and any `.tmp-` folder was left by a crash."""
    for old in entry.parent.iterdir():
        if old.name.startswith(".tmp-") or re.fullmatch(r"[0-9a-f]{16}", old.name):
            shutil.rmtree(old)
    temporary = entry.parent / f".tmp-{os.getpid()}"
    temporary.mkdir()
    try:
        index.save(temporary, show_progress=False)
        (temporary / "sums.json").write_text(json.dumps(_checksums(temporary)))
        for path in [*temporary.iterdir(), temporary]:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        os.rename(temporary, entry)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


# ------------------------------------------------------------------------------------------------------------------ remote retrievers

def _documents(rows: list) -> list[Hit]:
    """`[{"document": {"id", "contents"}, "score"}]` or, without scores, `[{"id", "contents"}]`."""
    hits = []
    for row in rows:
        document = row.get("document", row)
        score = row.get("score")
        score = float(score) if isinstance(score, (int, float)) else None
        hits.append(Hit(_passage(document.get("id", ""), document["contents"]), score))
    return hits


def _tsv_lines(lines: list) -> list[Hit]:
    """Raw rows of R1-Searcher's corpus, each a number, a tab and the text."""
    hits = []
    for line in lines:
        id, contents = re.fullmatch(r"\ufeff?(?:(\d+)\s+)?(.*)", line.rstrip("\n"), re.DOTALL).groups()
        hits.append(Hit(_passage(id or "", contents), None))
    return hits


def _organic(rows: list) -> list[Hit]:
    """Serper's `[{"title", "link", "snippet"}]`; a passage's id is the address of its page. Rows without an address are left out."""
    line = lambda text: " ".join(text.split()) if isinstance(text, str) else ""
    return [Hit(_passage(row["link"], f"{line(row.get('title'))}\n{line(row.get('snippet'))}"), None) for row in rows if isinstance(row.get("link"), str)]


@dataclass(frozen=True)
class Protocol:
    endpoint: str
    request: Callable[[list[str], int], dict]  # (queries, k) -> JSON body
    results: Callable[[object], object]        # answer -> one list of rows per query
    hits: Callable[[list], list[Hit]]          # rows of one query -> hits
    most: int = 128                            # queries a request
    mend: str = "start it (`make retriever CORPUS=corpus.jsonl` serves a corpus) or give another address"


PROTOCOLS = {
    "search_r1": Protocol("/retrieve", lambda q, k: {"queries": q, "topk": k, "return_scores": True}, lambda a: a["result"], _documents),
    "research": Protocol("/batch_search", lambda q, k: {"query": q, "top_n": k, "return_score": False}, lambda a: a, _documents),
    "r1_searcher": Protocol("/queries", lambda q, k: {"queries": q, "k": k}, lambda a: a["answers"], _tsv_lines),
    "serper": Protocol("/search", lambda q, k: {"q": q[0], "num": k}, lambda a: [a.get("organic", [])], _organic, 1,
                       "check the network or give another address (`make web CORPUS=corpus.jsonl` serves a corpus as a small web)"),
}


LONGEST_PAUSE_S = 10  # between two tries, on average


class _Transient(Exception):
    """A failure worth another try."""


class RemoteRetriever:
    """Client of a retrieval server. Redirects and proxy variables are not followed: the address given is the one asked.

    url: `http(s)://host:port`, with or without the protocol's endpoint.
    timeout_s: one try. deadline_s: one call of search() with all its tries. retries: further tries after a refused or broken connection, a
    timeout, 408, 429 or 5xx, with pauses of backoff_s, doubled each time up to LONGEST_PAUSE_S, times a random 0.5-1.5 (from seed); by default
    the deadline comes first, so that a server may be restarted under a run. headers: further ones, such as a key; their values are never shown.
    break_after: after so many failed calls in a row further calls fail at once, except one trial call every cooldown_s.
    Every failure is a RetrieverDown. Threads may share one.
    """

    def __init__(self, url: str, protocol: str = "search_r1", *, timeout_s: float = 30, deadline_s: float = 90, retries: int = 100,
                 backoff_s: float = 0.5, break_after: int = 3, cooldown_s: float = 30, max_answer_bytes: int = 64 << 20,
                 queries_per_request: int = 128, headers: dict[str, str] | None = None, seed: int = 0):
        if protocol not in PROTOCOLS:
            raise UserError(f"unknown retriever protocol {protocol!r}; choose one of {', '.join(PROTOCOLS)}")
        self.protocol = PROTOCOLS[protocol]
        self._endpoint, self._headers = endpoint(url, self.protocol.endpoint), headers or {}
        self.url = self._endpoint.url
        self.timeout_s, self.deadline_s, self.retries, self.backoff_s = timeout_s, deadline_s, retries, backoff_s
        self.break_after, self.cooldown_s = break_after, cooldown_s
        self.max_answer_bytes, self.queries_per_request = max_answer_bytes, min(queries_per_request, self.protocol.most)
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._failed_calls, self._next_trial = 0, 0.0

    def check(self, query: str = "Who was the first president of the United States?") -> int:
        """Ask one question at start-up; returns the number of hits. A server that is not there fails after a few seconds: the address may
        be wrong. One that finds nothing at all is reported, not refused."""
        found = len(self.search([query], 1, retries=min(self.retries, 4))[0])
        if not found:
            _say(f"the retriever {self.url} answers, but found nothing for the trial question {query!r}: is it the right corpus?")
        return found

    def search(self, queries: list[str], k: int, retries: int | None = None) -> list[list[Hit]]:
        """At most k hits per query, best first as the server ranks them. Empty queries are not sent and find nothing."""
        if k < 1:
            raise UserError(f"top-k is {k}; it must be at least 1")
        queries = _queries(queries)
        asked = [i for i, query in enumerate(queries) if query]
        results: list[list[Hit]] = [[] for _ in queries]
        if not asked:
            return results
        self._breaker_before()
        try:
            end = time.monotonic() + self.deadline_s
            for start in range(0, len(asked), self.queries_per_request):
                part = asked[start:start + self.queries_per_request]
                for i, hits in zip(part, self._ask([queries[i] for i in part], k, end, self.retries if retries is None else retries), strict=True):
                    results[i] = hits
        except RetrieverDown:
            self._breaker_after(failed=True)
            raise
        self._breaker_after(failed=False)
        return results

    def _breaker_before(self) -> None:
        with self._lock:
            if self._failed_calls >= self.break_after:
                wait_s = self._next_trial - time.monotonic()
                if wait_s > 0:
                    raise RetrieverDown(f"the retriever {self.url} failed {self._failed_calls} calls in a row and is left alone for "
                                        f"another {wait_s:.0f} s; mend or restart it")
                self._next_trial = time.monotonic() + self.cooldown_s  # this call is the trial; the others keep failing at once

    def _breaker_after(self, failed: bool) -> None:
        with self._lock:
            self._failed_calls = self._failed_calls + 1 if failed else 0
            self._next_trial = time.monotonic() + self.cooldown_s

    def _ask(self, queries: list[str], k: int, end: float, retries: int) -> list[list[Hit]]:
        body = json.dumps(self.protocol.request(queries, k)).encode()
        start = time.monotonic()
        for attempt in range(retries + 1):
            try:
                return self._parse(self._post(body, end), len(queries), k)
            except _Transient as error:
                reason, tries = str(error), attempt + 1
            pause_s = min(self.backoff_s * 2 ** attempt, LONGEST_PAUSE_S) * (0.5 + self._random.random())
            if tries > retries or time.monotonic() + pause_s >= end:
                break
            time.sleep(pause_s)
        raise RetrieverDown(f"the retriever {self.url} does not answer ({reason}; {tries} {'try' if tries == 1 else 'tries'} in "
                            f"{time.monotonic() - start:.1f} s); {self.protocol.mend}")

    def _post(self, body: bytes, end: float) -> bytes:
        """One request; the answer's body. Raises _Transient or RetrieverDown."""
        start, e = time.monotonic(), self._endpoint
        try:
            answer = exchange("POST", e.scheme, e.host, e.port, e.path, body, {"Content-Type": "application/json", "Accept": "application/json", **self._headers},
                              end=min(end, start + self.timeout_s), max_bytes=self.max_answer_bytes)
        except TooLarge:
            raise RetrieverDown(f"the retriever {self.url} sent more than {self.max_answer_bytes:,} bytes; ask for a smaller top-k "
                                "or raise max_answer_bytes") from None
        except TimeoutError:
            raise _Transient(f"no full answer within {time.monotonic() - start:.1f} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise _Transient(getattr(error, "strerror", None) or str(error) or type(error).__name__) from error
        if answer.status in (408, 429) or answer.status >= 500:
            raise _Transient(f"HTTP {answer.status}")
        if answer.status != 200:
            said = ascii(hidden(answer.body.decode("utf-8", "replace"), *self._headers.values())[:200])
            raise RetrieverDown(f"the retriever {self.url} refused the request (HTTP {answer.status}, {said}); "
                                "check address, protocol and key", answer.status)
        return answer.body

    def _parse(self, answer: bytes, n: int, k: int) -> list[list[Hit]]:
        try:
            results = self.protocol.results(json.loads(answer))
            if not isinstance(results, list) or not all(isinstance(rows, list) for rows in results):
                raise TypeError("not a list of lists")
            hits = [self.protocol.hits(rows)[:k] for rows in results]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise RetrieverDown(f"the retriever {self.url} sent something else than {self.protocol.endpoint} answers "
                                f"({type(error).__name__}: {ascii(str(error))[:120]}); check address and protocol") from error
        if len(hits) != n:
            raise RetrieverDown(f"the retriever {self.url} sent {len(hits)} result lists for {n} queries; check address and protocol")
        return hits


def open_retriever(spec: str) -> BM25 | RemoteRetriever:
    """A path -> BM25 over that corpus.jsonl. `http(s)://...` -> a server of Search-R1's protocol, `research+http://...` and
    `r1_searcher+http://...` -> the other two; the server is asked once, and RetrieverDown raised if it does not answer."""
    scheme, separator, _ = spec.partition("://")
    if not separator:
        return BM25.from_file(spec)
    protocol, plus, _ = scheme.rpartition("+")
    retriever = RemoteRetriever(spec[len(protocol) + len(plus):], protocol or "search_r1")
    retriever.check()
    return retriever


# ----------------------------------------------------------------------------------------------------------------------- untrusted text

# Every tag that one of the ten methods, or a chat template they are used with, gives a meaning to.
TAGS = ("think", "answer",                                                              # most of them
        "search", "information", "result", "documents", "document",                     # Search-R1, ReSearch
        "tool_call", "tool_calls", "tool_response", "tool", "tools", "function_call",   # DeepResearcher, Tool-N1, ToolRL, OTC
        "extracted_info", "page_down", "short_summary",                                 # DeepResearcher's page reader
        "code", "interpreter", "output", "python",                                      # ReTool, ToRL
        "response", "obs", "observation", "user", "assistant", "system",                # ToolRL
        "search_query", "math_exp",                                                     # SWiRL
        "start_of_turn", "end_of_turn")                                                 # Gemma's chat markers
_MARKUP = re.compile(
    rf"<(?=[\s/\\]*+(?:{'|'.join(TAGS)})\b"  # <answer>, </ Answer >, <search q="x">, also unclosed
    r"|\s*+[|｜]"                            # <|im_start|>, <|begin_of_query|>, every other marker of this shape
    r"|/?(?:s|bos|eos|pad|unk)>)",           # sentencepiece's control symbols
    re.IGNORECASE)


def neutralise(text: str) -> str:
    """Text from outside, made safe to put between tags: it can neither close its block, nor open one, nor end a turn.

    The `<` of anything that looks like one of the methods' tags or a chat marker becomes `[`, and three backticks become three
    apostrophes. Everything else (`a < b`, `<b>`) stays; the length never changes; applying it twice changes nothing more.
    """
    return _MARKUP.sub("[", text).replace("```", "'''")


# ------------------------------------------------------------------------------------------------------------------------------ server

MAX_QUERIES, MAX_TOPK, MAX_REQUEST_BYTES = 1_024, 100, 8 << 20


def make_app(bm25: BM25):
    """ASGI app: POST /retrieve `{"queries": [str], "topk": 3, "return_scores": false}` -> `{"result": [...]}`; GET /health.

    With scores a result is `{"document": {"id", "contents"}, "score"}`, without `{"id", "contents"}`. A bad request gets 400, 413 or 422
    and `{"error": one sentence}`.
    """
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    def refuse(status: int, message: str) -> JSONResponse:
        return JSONResponse({"error": message}, status)

    async def retrieve(request):
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_REQUEST_BYTES:
                return refuse(413, f"the request is larger than {MAX_REQUEST_BYTES:,} bytes; send fewer queries at once")
        try:
            asked = json.loads(bytes(body))
        except (ValueError, RecursionError):
            return refuse(400, "the request body is not JSON")
        if not isinstance(asked, dict):
            return refuse(422, "the request body must be a JSON object with 'queries'")
        queries, topk, scores = asked.get("queries"), asked.get("topk"), asked.get("return_scores", False)
        topk = 3 if topk is None else topk  # Search-R1's default
        if not isinstance(queries, list) or not all(isinstance(q, str) for q in queries) or not 1 <= len(queries) <= MAX_QUERIES:
            return refuse(422, f"'queries' must be a list of 1 to {MAX_QUERIES:,} texts")
        if type(topk) is not int or not 1 <= topk <= MAX_TOPK:
            return refuse(422, f"'topk' must be a whole number from 1 to {MAX_TOPK}")
        if not isinstance(scores, bool):
            return refuse(422, "'return_scores' must be true or false")
        found = await run_in_threadpool(bm25.search, queries, topk)

        def row(hit: Hit) -> dict:
            document = {"id": hit.passage.id, "contents": hit.passage.contents}
            return {"document": document, "score": hit.score} if scores else document

        return JSONResponse({"result": [[row(hit) for hit in hits] for hits in found]})

    async def health(request):
        return JSONResponse({"status": "ok", "passages": len(bm25)})

    return Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"]), Route("/health", health, methods=["GET"])])


def make_server(bm25: BM25):
    """uvicorn.Server for make_app; run it with `.run(sockets=[bind(host, port)])`."""
    import uvicorn

    return uvicorn.Server(uvicorn.Config(make_app(bm25), loop="asyncio", http="h11", ws="none", lifespan="off",
                                         log_level="warning", access_log=False))


def bind(host: str, port: int) -> socket.socket:
    """A bound socket (port 0: any free one). Raises UserError if the address cannot be had."""
    if not 0 <= port <= 65535:
        raise UserError(f"port {port} does not exist; choose one from 1 to 65535, or 0 for any free one")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind)
    except (OSError, UnicodeError) as error:
        raise UserError(f"cannot serve on host {host!r} ({error}); use 127.0.0.1") from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart need not wait for old connections to time out
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise UserError(f"cannot serve on {host}, port {port} ({error.strerror}); stop what uses it or choose another --port") from error
    return listener


@dataclass(frozen=True)
class Serve:
    """Serve a corpus over Search-R1's retrieval protocol: POST /retrieve, and GET /health."""

    corpus: str
    """Corpus file: JSON lines with "id" and "contents" (title in quotation marks, newline, text). The index is cached beside it."""
    host: str = "127.0.0.1"
    """Address to listen on. The default is this machine only; there is no password."""
    port: int = 8000
    """Port to listen on; 0 takes any free one."""


def main(args: list[str] | None = None) -> int:
    import tyro

    options = tyro.cli(Serve, prog="python -m common.search", args=args)
    try:
        with bind(options.host, options.port) as listener:  # before the corpus is read: a taken port shows at once
            bm25 = BM25.from_file(options.corpus)
            host, port = listener.getsockname()[:2]
            if not (host.startswith("127.") or host == "::1"):
                _say(f"warning: listening on {host}: everyone who reaches this machine can read the corpus; the default is 127.0.0.1")
            try:
                listener.listen(2048)
            except OSError as error:
                raise UserError(f"cannot serve on {options.host}, port {port} ({error.strerror}); choose another --port") from error
            print(f"{len(bm25):,} passages at http://{f'[{host}]' if ':' in host else host}:{port}/retrieve (Ctrl-C ends)", flush=True)
            make_server(bm25).run(sockets=[listener])
    except UserError as error:
        _say(f"error: {error}")
        return 2
    except KeyboardInterrupt:  # uvicorn has closed its connections and raises the signal again
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
