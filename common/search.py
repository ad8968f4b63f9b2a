"""Search: BM25 or a dense index over a corpus file, clients for three retrieval servers, a server of our own, and text made safe to insert.

Everything that searches has one method, `search(queries, k) -> one list of Hit per query, best first`, so a rollout does not care where
the passages live. The protocols are those of the papers' code: Search-R1 `search_r1/search/retrieval_server.py`, ReSearch
`scripts/serving/retriever_serving.py`, R1-Searcher `train/wiki_corpus_load.py`.

    python -m common.search --corpus corpus.jsonl        # serves POST /retrieve (Search-R1's protocol) and GET /health on 127.0.0.1:8000
    python -m common.search --corpus corpus.jsonl --index dense --encoder intfloat/e5-base-v2
"""

import http.client
import json
import random
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

from common import UserError
from common.bm25 import BM25
from common.corpus import Hit, Passage, clean_queries, say
from common.net import TooLarge, endpoint, exchange, hidden


class RetrieverDown(UserError):
    """The retriever did not answer, or answered something else: the run must stop instead of learning from empty results."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status  # HTTP status of a refusal


# ------------------------------------------------------------------------------------------------------------------ remote retrievers

def _documents(rows: list) -> list[Hit]:
    """`[{"document": {"id", "contents"}, "score"}]` or, without scores, `[{"id", "contents"}]`."""
    hits = []
    for row in rows:
        document = row.get("document", row)
        score = row.get("score")
        score = float(score) if isinstance(score, (int, float)) else None
        hits.append(Hit(Passage.of(document.get("id", ""), document["contents"]), score))
    return hits


def _tsv_lines(lines: list) -> list[Hit]:
    """Raw rows of R1-Searcher's corpus, each a number, a tab and the text."""
    hits = []
    for line in lines:
        id, contents = re.fullmatch(r"\ufeff?(?:(\d+)\s+)?(.*)", line.rstrip("\n"), re.DOTALL).groups()
        hits.append(Hit(Passage.of(id or "", contents), None))
    return hits


def _organic(rows: list) -> list[Hit]:
    """Serper's `[{"title", "link", "snippet"}]`; a passage's id is the address of its page. Rows without an address are left out."""
    line = lambda text: " ".join(text.split()) if isinstance(text, str) else ""
    return [Hit(Passage.of(row["link"], f"{line(row.get('title'))}\n{line(row.get('snippet'))}"), None) for row in rows if isinstance(row.get("link"), str)]


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
            say(f"the retriever {self.url} answers, but found nothing for the trial question {query!r}: is it the right corpus?")
        return found

    def search(self, queries: list[str], k: int, retries: int | None = None) -> list[list[Hit]]:
        """At most k hits per query, best first as the server ranks them. Empty queries are not sent and find nothing."""
        queries = clean_queries(queries, k)
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


def make_app(index):
    """ASGI app over anything with search() and a length: POST /retrieve `{"queries": [str], "topk": 3, "return_scores": false}` -> `{"result": [...]}`; GET /health.

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
        found = await run_in_threadpool(index.search, queries, topk)

        def row(hit: Hit) -> dict:
            document = {"id": hit.passage.id, "contents": hit.passage.contents}
            return {"document": document, "score": hit.score} if scores else document

        return JSONResponse({"result": [[row(hit) for hit in hits] for hits in found]})

    async def health(request):
        return JSONResponse({"status": "ok", "passages": len(index)})

    return Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"]), Route("/health", health, methods=["GET"])])


def make_server(index):
    """uvicorn.Server for make_app; run it with `.run(sockets=[bind(host, port)])`."""
    import uvicorn

    return uvicorn.Server(uvicorn.Config(make_app(index), loop="asyncio", http="h11", ws="none", lifespan="off",
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
    index: Literal["bm25", "dense"] = "bm25"
    """What searches: words (BM25), or vectors of an encoder (dense). The flags below are of the dense index."""
    encoder: str = ""
    """Folder or hub id of a text encoder such as intfloat/e5-base-v2, BAAI/bge-large-en-v1.5 or sentence-transformers/all-MiniLM-L6-v2."""
    pooling: Literal["auto", "mean", "cls"] = "auto"
    """How the vectors of tokens become one; auto: as the encoder's own 1_Pooling/config.json says."""
    query_prefix: str | None = None
    """What a query is preceded by; default: by the encoder's name, "query: " for E5, the English instruction for BGE, else nothing."""
    passage_prefix: str | None = None
    """What a passage is preceded by; default: by the encoder's name, "passage: " for E5, else nothing."""
    max_tokens: int = 256
    """Most tokens of a query or passage that the encoder reads; what is longer is cut."""
    device: str = "cpu"
    """Where the encoder runs: cpu, cuda, cuda:1."""
    faiss: str = ""
    """Description of a faiss index, such as Flat, IVF4096,SQ8 or IVF16384,PQ64 (needs faiss-cpu); empty: exact search in memory-mapped vectors."""
    nprobe: int = 32
    """Of an IVF index: cells searched for a query. More find more and take longer."""


def open_index(options: Serve):
    """The index that the options ask for, built beside the corpus if there is none. UserError for options that do not fit each other."""
    if options.index == "bm25":
        given = [f.name for f in fields(Serve) if f.name not in ("corpus", "host", "port", "index") and getattr(options, f.name) != f.default]
        if given:
            raise UserError(f"--{given[0].replace('_', '-')} is of the dense index: add --index dense, or leave it out")
        return BM25.from_file(options.corpus)
    if not options.encoder:
        raise UserError("--index dense needs --encoder: a folder or hub id of a text encoder such as intfloat/e5-base-v2")
    from common.dense import Dense, Encoder

    encoder = Encoder(options.encoder, pooling=options.pooling, query_prefix=options.query_prefix, passage_prefix=options.passage_prefix,
                      max_tokens=options.max_tokens, device=options.device)
    say(str(encoder))
    return Dense.from_file(options.corpus, encoder, faiss=options.faiss, nprobe=options.nprobe)


def main(args: list[str] | None = None) -> int:
    import tyro

    options = tyro.cli(Serve, prog="python -m common.search", args=args)
    try:
        with bind(options.host, options.port) as listener:  # before the corpus is read: a taken port shows at once
            index = open_index(options)
            host, port = listener.getsockname()[:2]
            if not (host.startswith("127.") or host == "::1"):
                say(f"warning: listening on {host}: everyone who reaches this machine can read the corpus; the default is 127.0.0.1")
            try:
                listener.listen(2048)
            except OSError as error:
                raise UserError(f"cannot serve on {options.host}, port {port} ({error.strerror}); choose another --port") from error
            print(f"{len(index):,} passages at http://{f'[{host}]' if ':' in host else host}:{port}/retrieve (Ctrl-C ends)", flush=True)
            make_server(index).run(sockets=[listener])
    except UserError as error:
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt:  # uvicorn has closed its connections and raises the signal again
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
