import http.client
import http.server
import json
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import UserError, search
from common import bm25 as bm25_module
from common.bm25 import BM25, tokenise
from common.corpus import MAX_QUERY_CHARS, Hit, Passage, read_corpus
from common.search import RemoteRetriever, RetrieverDown, neutralise, open_retriever

ROWS = [
    ("0", '"Ada Lovelace"\nAda Lovelace was an English mathematician who wrote about the Analytical Engine.'),
    ("1", '"Charles Babbage"\nCharles Babbage designed the Difference Engine and the Analytical Engine in London.'),
    ("2", '"Zürich"\nZürich is the largest city of Switzerland; founded 15 BC.'),
    ("3", '"Beijing"\nBeijing is the capital of China.'),
    ("4", '"Lima"\nLima is the capital of Peru.'),
]
PASSAGES = [Passage(*row) for row in ROWS]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"id": i, "contents": c}) + "\n" for i, c in ROWS))
    return path


@pytest.fixture(autouse=True)
def fresh_process_cache():
    bm25_module._loaded.clear()


def ids(hits):
    return [hit.passage.id for hit in hits]


# corpus ---------------------------------------------------------------------------------------------------------------------------

def test_passage_parts():
    assert PASSAGES[3].title == '"Beijing"'
    assert PASSAGES[3].text == "Beijing is the capital of China."
    assert Passage("x", "only one line").title == "only one line" and Passage("x", "only one line").text == ""
    assert Passage("x", "t\na\nb").text == "a\nb"


def test_read_corpus_formats(tmp_path):
    path = tmp_path / "c.jsonl"
    lines = ['{"id": 7, "contents": "\\"A\\"\\ntext"}', "", '{"id": "8", "title": "\\"B C\\"", "text": "more"}',
             '{"id": "9", "title": "D\\nE", "text": "x"}', '{"id": "10", "contents": "\\ud800 lone"}']
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    assert read_corpus(path) == [Passage("7", '"A"\ntext'), Passage("8", '"B C"\nmore'), Passage("9", '"D E"\nx'), Passage("10", "? lone")]


@pytest.mark.parametrize("line, message", [
    ('{"id": "1", "contents"', "line 2: not one JSON object"),
    ("[1]", "line 2: expected an object"),
    ('{"id": "1"}', "line 2: needs 'contents' .* keys here are \\['id'\\]"),
    ('{"id": "1", "contents": 5}', "line 2: needs 'contents'"),
    ('{"id": "1", "contents": "  "}', "line 2: needs 'contents'"),
    ('{"id": "1", "title": "t"}', "line 2: needs 'contents'"),
    ('{"contents": "x"}', "line 2: needs an 'id'"),
    ('{"id": true, "contents": "x"}', "line 2: needs an 'id'"),
    ("[" * 100_000, "line 2: not one JSON object"),
])
def test_bad_rows_are_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"id": "0", "contents": "good"}\n' + line + "\n")
    with pytest.raises(UserError, match=re.escape(str(path)) + ", " + message):
        read_corpus(path)


def test_unreadable_corpora(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        open_retriever(str(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match="directory"):
        read_corpus(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(UserError, match="holds no passages"):
        read_corpus(tmp_path / "empty.jsonl")
    (tmp_path / "latin.jsonl").write_bytes('{"id": "0", "contents": "Zürich"}'.encode("latin-1"))
    with pytest.raises(UserError, match="line 1: not one JSON object in UTF-8"):
        read_corpus(tmp_path / "latin.jsonl")


# BM25 -----------------------------------------------------------------------------------------------------------------------------

def test_titles_are_found():
    bm25 = BM25(PASSAGES)
    for passage in PASSAGES:
        hits = bm25.search([passage.title], 3)[0]
        assert hits[0].passage is passage
        assert [h.score for h in hits] == sorted((h.score for h in hits), reverse=True)


def test_words_are_normalised():
    bm25 = BM25(PASSAGES)
    assert ids(bm25.search(["ZU\u0308RICH"], 1)[0]) == ["2"]  # decomposed and upper-case
    assert ids(bm25.search(["15"], 1)[0]) == ["2"]


def test_scores_are_lucenes():
    """One value worked out by hand: idf ln(1 + (N - df + 0.5)/(df + 0.5)), tf / (tf + k1 (1 - b + b L / mean L))."""
    import math
    bm25 = BM25(PASSAGES)
    lengths = [len(tokenise(p.contents)) for p in PASSAGES]
    idf = math.log(1 + (5 - 1 + 0.5) / 1.5)
    tf = tokenise(PASSAGES[3].contents).count("beijing")
    expected = idf * tf / (tf + 1.2 * (1 - 0.75 + 0.75 * lengths[3] / (sum(lengths) / 5)))
    assert bm25.search(["beijing"], 1)[0][0].score == pytest.approx(expected, rel=1e-5)


def test_nothing_in_common_is_no_hit():
    bm25 = BM25(PASSAGES)
    assert bm25.search(["", "   ", "?!", "xylophone"], 3) == [[], [], [], []]
    assert ids(bm25.search(["capital"], 5)[0]) == ["4", "3"] or ids(bm25.search(["capital"], 5)[0]) == ["3", "4"]
    assert len(bm25.search(["capital"], 5)[0]) == 2
    assert bm25.search([], 3) == []


def test_ties_keep_corpus_order():
    bm25 = BM25([Passage(str(i), "same words here") for i in range(50)])
    assert ids(bm25.search(["words"], 4)[0]) == ["0", "1", "2", "3"]
    assert len(bm25.search(["words"], 100)[0]) == 50


def test_wrong_arguments():
    with pytest.raises(TypeError):
        BM25(PASSAGES).search("a string", 3)
    with pytest.raises(UserError, match="top-k"):
        BM25(PASSAGES).search(["x"], 0)
    assert BM25([Passage("0", "...")]).search(["x"], 1) == [[]]
    assert BM25([]).search(["x"], 1) == [[]]


words = st.text(alphabet="abcdeé1 -", max_size=12)


@settings(max_examples=40, deadline=None)
@given(st.lists(words.filter(str.strip), min_size=1, max_size=12), st.lists(words, max_size=5), st.integers(1, 15))
def test_batch_equals_single(contents, queries, k):
    bm25 = BM25([Passage(str(i), c) for i, c in enumerate(contents)])
    batch = bm25.search(queries, k)
    assert batch == [bm25.search([q], k)[0] for q in queries]
    for query, hits in zip(queries, batch, strict=True):
        found = {i for i, c in enumerate(contents) if set(tokenise(c)) & set(tokenise(query))}
        assert len(hits) == min(k, len(found)) and {int(i) for i in ids(hits)} <= found
        assert hits == sorted(hits, key=lambda h: (-h.score, int(h.passage.id)))


def test_small_corpora_build_fast():
    import random
    rng = random.Random(0)
    passages = [Passage(str(i), " ".join(f"w{rng.randrange(600)}" for _ in range(25))) for i in range(300)]
    best = min(_seconds(lambda: BM25(passages)) for _ in range(5))
    assert best < 0.1  # measured 0.014 s; the margin is for busy machines


def _seconds(call):
    start = time.process_time()  # not the clock: another process may hold the core
    call()
    return time.process_time() - start


def test_threads_agree():
    bm25 = BM25(PASSAGES)
    queries = ["analytical engine", "capital of Peru", "largest city", "London"] * 5
    expected = bm25.search(queries, 3)
    with ThreadPoolExecutor(8) as pool:
        assert all(result == expected for result in pool.map(lambda _: bm25.search(queries, 3), range(40)))


# the index on disk ------------------------------------------------------------------------------------------------------------------

def count_builds(monkeypatch):
    builds, build = [], bm25_module._build
    monkeypatch.setattr(bm25_module, "_build", lambda *folders: builds.append(1) or build(*folders))
    return builds


def entries(corpus):
    return [p for p in Path(f"{corpus}.bm25").iterdir() if p.name != "lock"]


QUERIES = ["analytical engine", "capital", "Zürich", "nothing-here"]


def test_index_is_reused(corpus, monkeypatch, capsys):
    builds = count_builds(monkeypatch)
    first = BM25.from_file(corpus)
    assert BM25.from_file(str(corpus)) is first  # once per process
    bm25_module._loaded.clear()
    second = BM25.from_file(corpus)
    assert len(builds) == 1 and len(entries(corpus)) == 1
    assert first.search(QUERIES, 3) == second.search(QUERIES, 3) == BM25(PASSAGES).search(QUERIES, 3)
    assert capsys.readouterr() == ("", "")


def test_changed_corpus_is_indexed_again(corpus, monkeypatch, capsys):
    builds = count_builds(monkeypatch)
    BM25.from_file(corpus)
    left = Path(f"{corpus}.bm25") / ".part"
    (left / "spill").mkdir(parents=True)  # as after a kill in mid-write
    corpus.write_text(corpus.read_text() + '{"id": "5", "contents": "\\"Quito\\"\\nQuito is in Ecuador."}\n')
    assert ids(BM25.from_file(corpus).search(["Ecuador"], 3)[0]) == ["5"]
    assert len(builds) == 2 and len(entries(corpus)) == 1 and not left.exists()
    assert f"the corpus {corpus} has changed since the search index {corpus}.bm25/index was made; building it again" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest"])
def test_damaged_index_is_rebuilt_and_said(corpus, damage, monkeypatch, capsys):
    BM25.from_file(corpus)
    bm25_module._loaded.clear()
    builds = count_builds(monkeypatch)
    entry, = entries(corpus)
    data = entry / "scores.f32"
    if damage == "flip":
        content = bytearray(data.read_bytes())
        content[-1] ^= 1
        data.write_bytes(content)
    elif damage == "truncate":
        data.write_bytes(data.read_bytes()[:-20])
    elif damage == "remove":
        data.unlink()
    else:
        (entry / "manifest.json").write_text("{")
    assert BM25.from_file(corpus).search(QUERIES, 3) == BM25(PASSAGES).search(QUERIES, 3)
    assert "is damaged; building it again" in capsys.readouterr().err
    bm25_module._loaded.clear()
    BM25.from_file(corpus)
    assert len(builds) == 1  # the mended index was read


def test_unwritable_folder_keeps_the_index_in_memory(corpus, capsys):
    Path(f"{corpus}.bm25").write_text("a file where the folder should be")
    assert ids(BM25.from_file(corpus).search(["Peru"], 3)[0]) == ["4"]
    assert "it stays in memory" in capsys.readouterr().err


def test_full_disk_keeps_the_index_in_memory(corpus, capsys, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "fsync", full)
    assert ids(BM25.from_file(corpus).search(["Peru"], 3)[0]) == ["4"]
    assert "No space left on device" in capsys.readouterr().err
    assert entries(corpus) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_folder(corpus, capsys, monkeypatch):
    BM25.from_file(corpus)
    bm25_module._loaded.clear()
    builds = count_builds(monkeypatch)
    for folder in (Path(f"{corpus}.bm25"), corpus.parent):
        folder.chmod(0o555)
    BM25.from_file(corpus)
    assert not builds and capsys.readouterr().err == ""
    for folder in (corpus.parent, Path(f"{corpus}.bm25")):
        folder.chmod(0o755)


def test_processes_starting_together_build_once(corpus):
    code = f"from common.search import BM25; print(len(BM25.from_file({str(corpus)!r}).search(['capital'], 3)[0]))"
    runs = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    assert [run.communicate(timeout=60) for run in runs] == [("2\n", "")] * 2
    assert len(entries(corpus)) == 1


# remote retrievers ------------------------------------------------------------------------------------------------------------------

@contextmanager
def fake_server(answer):
    """A loopback server; `answer(path, body) -> (status, JSON-able or bytes)`. Yields its address and the list of requests seen."""
    seen = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.path, body))
            status, content = answer(self.path, body)
            content = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()


def document(i):
    return {"id": ROWS[i][0], "contents": ROWS[i][1]}


def client(url, protocol="search_r1", **options):
    return RemoteRetriever(url, protocol, **({"backoff_s": 0.01, "timeout_s": 5, "deadline_s": 10} | options))


def test_search_r1_protocol():
    def answer(path, body):
        return 200, {"result": [[{"document": document(i), "score": 2.5 - i} for i in range(3)] for _ in body["queries"]]}
    with fake_server(answer) as (url, seen):
        results = client(url).search(["a", "", "b"], 3)
        assert seen == [("/retrieve", {"queries": ["a", "b"], "topk": 3, "return_scores": True})]  # empty queries are not sent
        assert results == [[Hit(PASSAGES[i], 2.5 - i) for i in range(3)], [], [Hit(PASSAGES[i], 2.5 - i) for i in range(3)]]
        assert ids(client(url + "/retrieve/").search(["a"], 2)[0]) == ["0", "1"]  # more than asked for is cut
        client(url + "/wiki").search(["a"], 1)
        assert [path for path, _ in seen[1:]] == ["/retrieve", "/wiki/retrieve"]
        assert client(url).search(["", " "], 3) == [[], []] and len(seen) == 3


def test_search_r1_without_ids_and_scores():
    with fake_server(lambda path, body: (200, {"result": [[{"document": {"contents": "t\nx"}}, document(1)]]})) as (url, _):
        assert client(url).search(["a"], 3) == [[Hit(Passage("", "t\nx"), None), Hit(PASSAGES[1], None)]]


def test_research_protocol():
    with fake_server(lambda path, body: (200, [[document(i) for i in range(body["top_n"])] for _ in body["query"]])) as (url, seen):
        assert client(url, "research").search(["a", "b"], 2) == [[Hit(PASSAGES[0], None), Hit(PASSAGES[1], None)]] * 2
        assert seen == [("/batch_search", {"query": ["a", "b"], "top_n": 2, "return_score": False})]


def test_r1_searcher_protocol():
    lines = ["\ufeff12\tTitle: Lima Text: Lima is in Peru.\n", "13\tQuito   42 streets", "no number", ""]
    def answer(path, body):
        return 200, {"queries": body["queries"], "answers": [lines[:body["k"]] for _ in body["queries"]]}
    with fake_server(answer) as (url, seen):
        hits, = client(url, "r1_searcher").search(["a"], 4)
        assert [(h.passage.id, h.passage.contents, h.score) for h in hits] == [
            ("12", "Title: Lima Text: Lima is in Peru.", None), ("13", "Quito   42 streets", None), ("", "no number", None), ("", "", None)]
        assert seen == [("/queries", {"queries": ["a"], "k": 4})]


def test_open_retriever_chooses_and_asks_once():
    with fake_server(lambda path, body: (200, {"answers": [["1\tx"]]} if path == "/queries" else [[document(0)]])) as (url, seen):
        assert open_retriever("r1_searcher+" + url).protocol is search.PROTOCOLS["r1_searcher"]
        assert open_retriever("research+" + url).url == url + "/batch_search"
        assert [path for path, _ in seen] == ["/queries", "/batch_search"]
    with pytest.raises(UserError, match="unknown retriever protocol 'grpc'; choose one of search_r1, research, r1_searcher"):
        open_retriever("grpc+http://127.0.0.1:1")


def test_a_server_that_finds_nothing_is_reported(capsys):
    with fake_server(lambda path, body: (200, {"result": [[]]})) as (url, _):
        assert client(url).check() == 0
    assert "found nothing for the trial question" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://h:99999", "http://a b", "http://[::1", "http://a..b", "http://x/\u00e4"])
def test_bad_addresses(url):
    with pytest.raises(UserError, match="is not an address"):
        RemoteRetriever(url)


@pytest.mark.parametrize("url", ["http://me:secret@host:1", "http://me:secret@host:1x", "ftp://me:secret@host", "http://host:1x?key=secret", "http://host/a b?key=secret"])
def test_passwords_are_not_taken_nor_shown(url):
    with pytest.raises(UserError, match="host") as caught:
        RemoteRetriever(url)
    assert "secret" not in str(caught.value)


def test_big_batches_are_split():
    def answer(path, body):
        return 200, {"result": [[{"document": {"id": q, "contents": q}, "score": 1}] for q in body["queries"]]}
    with fake_server(answer) as (url, seen):
        results = client(url, queries_per_request=4).search([f"q{i}" if i % 3 else "" for i in range(15)], 1)
        assert [ids(r) for r in results] == [[f"q{i}"] if i % 3 else [] for i in range(15)]
        assert [len(body["queries"]) for _, body in seen] == [4, 4, 2]
        client(url).search(["x" * 100_000], 1)
        assert len(seen[-1][1]["queries"][0]) == MAX_QUERY_CHARS


@pytest.mark.parametrize("status", [503, 500, 429])
def test_flaky_server_is_asked_again(status):
    def answer(path, body):
        return (status, b"busy") if len(seen) < 3 else (200, {"result": [[{"document": document(0), "score": 1}]]})
    with fake_server(answer) as (url, seen):
        assert ids(client(url).search(["a"], 1)[0]) == ["0"]
        assert len(seen) == 3


def test_retries_are_bounded():
    with fake_server(lambda path, body: (503, b"busy")) as (url, seen):
        with pytest.raises(RetrieverDown, match="does not answer \\(HTTP 503; 3 tries in"):
            client(url, retries=2).search(["a"], 1)
        assert len(seen) == 3


def test_refusal_is_not_asked_again():
    with fake_server(lambda path, body: (422, b"topk \x1b[31m too large")) as (url, seen):
        with pytest.raises(RetrieverDown, match="refused the request \\(HTTP 422, 'topk .x1b.31m too large'\\)"):
            client(url).search(["a"], 1)
        assert len(seen) == 1


def test_redirects_are_not_followed():
    with fake_server(lambda path, body: (302, b"")) as (url, seen):
        with pytest.raises(RetrieverDown, match="HTTP 302"):
            client(url).search(["a"], 1)


def test_dead_server_message():
    port = search.bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{port.getsockname()[1]}"  # bound, not listening: connections are refused
    with pytest.raises(UserError) as caught:
        client(url, retries=1).search(["a"], 1)
    port.close()
    assert re.fullmatch(re.escape(f"the retriever {url}/retrieve does not answer (Connection refused; 2 tries in ") + r"\d\.\d s\); "
                        r"start it \(`make retriever CORPUS=corpus.jsonl` serves a corpus\) or give another address", str(caught.value))


def test_proxy_variables_are_ignored(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with fake_server(lambda path, body: (200, {"result": [[]]})) as (url, _):
        assert client(url).search(["a"], 1) == [[]]


def test_slow_server_meets_the_deadline():
    release = threading.Event()
    with fake_server(lambda path, body: (release.wait(30), (200, {"result": [[]]}))[1]) as (url, seen):
        start = time.monotonic()
        with pytest.raises(RetrieverDown, match="no full answer within"):
            client(url, timeout_s=0.2, deadline_s=1, retries=10).search(["a"], 1)
        assert time.monotonic() - start < 5 and len(seen) >= 2
        release.set()


def test_trickling_server_meets_the_time_limit():
    listener = search.bind("127.0.0.1", 0)
    listener.listen()
    done = threading.Event()

    def trickle():
        connection, _ = listener.accept()
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        while not done.wait(0.05):
            connection.sendall(b" ")
        connection.close()
    thread = threading.Thread(target=trickle, daemon=True)
    thread.start()
    start = time.monotonic()
    with pytest.raises(RetrieverDown, match="no full answer"):
        client(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.3, retries=0).search(["a"], 1)
    assert time.monotonic() - start < 5
    done.set()
    thread.join()
    listener.close()


@pytest.mark.parametrize("protocol, content, message", [
    ("search_r1", b"<html>", "JSONDecodeError"),
    ("search_r1", {"results": [[]]}, "KeyError"),
    ("search_r1", [[]], "TypeError"),
    ("search_r1", {"result": {}}, "not a list of lists"),
    ("search_r1", {"result": [None]}, "not a list of lists"),
    ("search_r1", {"result": [["x"]]}, "AttributeError"),
    ("search_r1", {"result": [[{"document": {"id": 1}}]]}, "KeyError"),
    ("search_r1", {"result": [[{"document": {"id": 1, "contents": 5}}]]}, "AttributeError"),
    ("search_r1", {"result": [[], []]}, "2 result lists for 1 queries"),
    ("search_r1", {"result": []}, "0 result lists for 1 queries"),
    ("search_r1", b"[" * 200_000, "RecursionError"),
    ("research", {"result": [[]]}, "not a list of lists"),
    ("r1_searcher", {"answers": ["1\tx"]}, "not a list of lists"),
    ("r1_searcher", {"answers": [[5]]}, "AttributeError"),
])
def test_malformed_answers(protocol, content, message):
    with fake_server(lambda path, body: (200, content)) as (url, seen):
        with pytest.raises(RetrieverDown, match=message):
            client(url, protocol).search(["a"], 1)
        assert len(seen) == 1


def test_answer_size_is_limited():
    with fake_server(lambda path, body: (200, b" " * 2_000_000)) as (url, seen):
        with pytest.raises(RetrieverDown, match="more than 1,000,000 bytes"):
            client(url, max_answer_bytes=1_000_000).search(["a"], 1)


def test_cut_off_answer_is_asked_again():
    listener = search.bind("127.0.0.1", 0)
    listener.listen()
    good = json.dumps({"result": [[]]}).encode()

    def serve():
        for sent in (good[:-3], good):
            connection, _ = listener.accept()
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(good) + sent)
            connection.close()
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert client(f"http://127.0.0.1:{listener.getsockname()[1]}").search(["a"], 1) == [[]]
    thread.join()
    listener.close()


def test_circuit_breaker():
    healthy = threading.Event()

    def answer(path, body):
        return (200, {"result": [[]]}) if healthy.is_set() else (500, b"")
    with fake_server(answer) as (url, seen):
        retriever = client(url, retries=0, break_after=2, cooldown_s=60)
        for _ in range(2):
            with pytest.raises(RetrieverDown, match="HTTP 500"):
                retriever.search(["a"], 1)
        with pytest.raises(RetrieverDown, match="failed 2 calls in a row"):
            retriever.search(["a"], 1)
        assert len(seen) == 2  # not asked
        retriever._next_trial = 0  # as if the cooldown were over
        with pytest.raises(RetrieverDown, match="HTTP 500"):
            retriever.search(["a"], 1)  # the trial call
        with pytest.raises(RetrieverDown, match="failed 3 calls in a row"):
            retriever.search(["a"], 1)
        healthy.set()
        retriever._next_trial = 0  # as if the cooldown were over
        assert retriever.search(["a"], 1) == retriever.search(["a"], 1) == [[]]
        assert len(seen) == 5


def test_pauses_depend_on_the_seed_only(monkeypatch):
    pauses = []
    monkeypatch.setattr(search.time, "sleep", pauses.append)
    with fake_server(lambda path, body: (500, b"")) as (url, _):
        for seed in (1, 1, 2):
            with pytest.raises(RetrieverDown):
                client(url, retries=3, backoff_s=0.1, seed=seed).search(["a"], 1)
    assert pauses[:3] == pauses[3:6] != pauses[6:]
    assert all(0.05 * 2 ** i <= pause <= 0.15 * 2 ** i for i, pause in enumerate(pauses[:3]))


# the server -------------------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def server():
    listener = search.bind("127.0.0.1", 0)
    listener.listen()
    server = search.make_server(BM25(PASSAGES))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join(5)
    listener.close()


def ask(port, method, path, body=b""):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request(method, path, body if isinstance(body, bytes) else json.dumps(body).encode())
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, json.loads(content) if content[:1] in b"{[" else content


def test_client_and_server_agree(server):
    queries = ["analytical engine", "", "capital of Peru", "xylophone", "Zürich \ud83d", "15"]
    remote = open_retriever(f"http://127.0.0.1:{server}")
    assert remote.search(queries, 2) == BM25(PASSAGES).search(queries, 2)
    with ThreadPoolExecutor(8) as pool:
        assert all(r == BM25(PASSAGES).search(queries, 2) for r in pool.map(lambda _: remote.search(queries, 2), range(24)))


def test_server_without_scores_and_defaults(server):
    assert ask(server, "POST", "/retrieve", {"queries": ["Peru"], "return_scores": False}) == (200, {"result": [[document(4)]]})
    status, answer = ask(server, "POST", "/retrieve", {"queries": ["the"], "topk": None, "return_scores": True})
    assert status == 200 and len(answer["result"][0]) == 3 and answer["result"][0][0].keys() == {"document", "score"}
    assert ask(server, "GET", "/health") == (200, {"status": "ok", "passages": 5})


@pytest.mark.parametrize("body, status, message", [
    (b"{", 400, "not JSON"), (b"\xff", 400, "not JSON"), (b"[" * 100_000, 400, "not JSON"), (b"", 400, "not JSON"),
    ([], 422, "JSON object"), ({}, 422, "'queries'"), ({"queries": "x"}, 422, "'queries'"), ({"queries": [1]}, 422, "'queries'"),
    ({"queries": []}, 422, "'queries'"), ({"queries": ["x"] * 1025}, 422, "'queries'"),
    ({"queries": ["x"], "topk": 0}, 422, "'topk'"), ({"queries": ["x"], "topk": 101}, 422, "'topk'"),
    ({"queries": ["x"], "topk": "3"}, 422, "'topk'"), ({"queries": ["x"], "topk": True}, 422, "'topk'"),
    ({"queries": ["x"], "return_scores": 1}, 422, "'return_scores'"), ({"queries": ["x" * (8 << 20)]}, 413, "8,388,608 bytes"),
])
def test_server_refuses_bad_requests(server, body, status, message):
    got, answer = ask(server, "POST", "/retrieve", body)
    assert got == status and message in answer["error"]
    assert ask(server, "GET", "/health")[0] == 200


def test_server_knows_two_paths(server):
    assert ask(server, "GET", "/retrieve")[0] == 405 and ask(server, "POST", "/nothing")[0] == 404


def test_command(corpus):
    command = [sys.executable, "-m", "common.search", "--corpus", str(corpus), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        url = re.fullmatch(r"5 passages at (http://127\.0\.0\.1:\d+)/retrieve \(Ctrl-C ends\)\n", line).group(1)
        assert ids(open_retriever(url).search(["Peru"], 1)[0]) == ["4"]
        process.send_signal(2)
        assert process.communicate(timeout=10) == ("", "") and process.returncode == 130


def test_command_refuses_with_one_sentence(corpus, tmp_path, capsys):
    with search.bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        assert search.main(["--corpus", str(corpus), "--port", str(port)]) == 2
        assert f"error: cannot serve on 127.0.0.1, port {port} (Address already in use); stop what uses it" in capsys.readouterr().err
    assert search.main(["--corpus", str(tmp_path / "none.jsonl"), "--port", "0"]) == 2
    assert "cannot read the corpus" in capsys.readouterr().err
    assert search.main(["--corpus", str(corpus), "--port", "70000"]) == 2
    assert "port 70000 does not exist" in capsys.readouterr().err
    assert search.main(["--corpus", str(corpus), "--host", "no.such.host.invalid"]) == 2
    assert "cannot serve on host 'no.such.host.invalid'" in capsys.readouterr().err


def test_other_hosts_are_warned_about(corpus, capsys, monkeypatch):
    class Stub:
        def run(self, sockets):
            pass
    monkeypatch.setattr(search, "make_server", lambda bm25: Stub())
    assert search.main(["--corpus", str(corpus), "--host", "0.0.0.0", "--port", "0"]) == 0
    assert "warning: listening on 0.0.0.0" in capsys.readouterr().err
    assert search.main(["--corpus", str(corpus), "--port", "0"]) == 0
    assert capsys.readouterr().err == ""


# untrusted text -----------------------------------------------------------------------------------------------------------------------

NAMES = ("search information result answer think observation tool_call tool_response interpreter code response obs search_query math_exp "
         "tools user output").split()
PARSERS = [re.compile(rf"<\s*/?\s*{name}(\s[^>]*)?/?\s*>", re.IGNORECASE) for name in NAMES] + [
    re.compile(pattern) for pattern in (r"<\|[^>]*\|>", r"<\s*\|", "<｜", "```", "</?s>", "<eos>", "<end_of_turn>")]


@pytest.mark.parametrize("text, safe", [
    ("</information>", "[/information>"), ("<answer>Beijing</answer>", "[answer>Beijing[/answer>"), ("< / Answer >", "[ / Answer >"),
    ('<search q="x">', '[search q="x">'), ("<\nTHINK\t>", "[\nTHINK\t>"), ("<tool_call", "[tool_call"), ("<<answer>>", "<[answer>>"),
    ("<|im_start|>assistant", "[|im_start|>assistant"), ("<|begin_of_query|>", "[|begin_of_query|>"), ("<|endoftext|>", "[|endoftext|>"),
    ("<｜end▁of▁sentence｜>", "[｜end▁of▁sentence｜>"), ("```output\n4\n```", "'''output\n4\n'''"), ("</s>", "[/s>"),
    ("<result/>", "[result/>"), ("<answer><|im_end|>", "[answer>[|im_end|>"),
    ("<thin\u212a>", "[thin\u212a>"),  # the Kelvin sign: lower-cased it is a k
])
def test_tags_are_neutralised(text, safe):
    assert neutralise(text) == safe


@pytest.mark.parametrize("text", [
    "a < b", "x<y>z", "<b>bold</b>", "<br/>", "<i>Code</i>", "1 <= 2 || 3 > 2", "answer>", "search", "", "``x``", "<answering>",
    "<searches>", "<span class='answer'>", "the <resulting> set", "->|x|<-", "Zürich “quoted” \U0001f600"])
def test_ordinary_text_stays(text):
    assert neutralise(text) == text


pieces = st.one_of(
    st.sampled_from(["<", "</", "< ", "<\n/", "<|", "|>", ">", "/>", " ", "\n", "\t", "`", "``", "```", "[", "|", "/", "<s>", " x='1'"]),
    st.sampled_from(NAMES + [name.upper() for name in NAMES]), st.characters())


@settings(max_examples=200, deadline=None)
@given(st.lists(pieces, max_size=25).map("".join))
def test_no_parser_matches_neutralised_text(text):
    safe = neutralise(text)
    assert not [p.pattern for p in PARSERS if p.search(safe)]
    assert neutralise(safe) == safe
    assert len(safe) == len(text) and all(a == b or (a, b) in {("<", "["), ("`", "'")} for a, b in zip(text, safe))
    assert not [p.pattern for p in PARSERS if p.search(safe.lower())]


@settings(max_examples=100, deadline=None)
@given(st.lists(pieces, max_size=10).map("".join))
def test_a_passage_cannot_leave_its_block(text):
    block = f"<information>Doc 1 {neutralise(text)}\n</information>"
    assert re.findall(r"<information>(.*?)</information>", block, re.DOTALL) == [block[13:-14]]
    assert not re.search(r"<answer>|<search>|</think>", block)


def test_neutralise_is_linear():
    for text in ("<" * 200_000, "< " * 100_000, "<" + " " * 200_000, "</" * 100_000, "`" * 200_000, "<answer" * 30_000):
        assert _seconds(lambda: neutralise(text)) < 1


# real data, only where someone points to it: SEARCH_CORPUS=corpus.jsonl ---------------------------------------------------------------

@pytest.mark.skipif("SEARCH_CORPUS" not in os.environ, reason="set SEARCH_CORPUS to a corpus.jsonl to try it")
def test_real_corpus_finds_its_own_titles():
    passages = read_corpus(os.environ["SEARCH_CORPUS"])
    bm25 = BM25(passages)
    sample = passages[::max(1, len(passages) // 200)]
    found = [p in [h.passage for h in hits] for p, hits in zip(sample, bm25.search([p.contents[:200] for p in sample], 3))]
    assert sum(found) >= 0.95 * len(found)
