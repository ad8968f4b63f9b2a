"""The web client against servers that mean harm or are merely broken: never a hang, never a crash, always the right outcome, and soon."""
import gzip
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from common import UserError, net, web
from common.policy import load_model
from common.search import BM25, Passage, RetrieverDown
from common.tiny.world import world
from common.web import (DiskCache, Extractor, Fetcher, LocalModel, LocalWeb, Note, PageFailure, WebSearch, by_model, by_rule, decode,
                        is_public, read, tiny_web)

EXTRACTOR = Extractor()  # its process starts once for all tests
HTML = b"<html><head><title>T</title></head><body><p>Ada wrote it in 1843.</p></body></html>"


@contextmanager
def raw_server(behave):
    """A loopback server; `behave(connection, path)` says what it does after it has read a request. Yields "127.0.0.1:port"."""
    listener = socket.create_server(("127.0.0.1", 0))
    done = threading.Event()

    def serve(connection):
        with connection:
            try:
                asked = b""
                while b"\r\n\r\n" not in asked and (more := connection.recv(65536)):
                    asked += more
                length = int((re.search(rb"(?i)content-length: (\d+)", asked) or [0, 0])[1])
                while len(asked.partition(b"\r\n\r\n")[2]) < length and (more := connection.recv(65536)):
                    asked += more
                behave(connection, asked.decode("latin-1"))
            except OSError:
                return  # the client has left, as it should

    def accept():
        while not done.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        done.set()
        listener.shutdown(socket.SHUT_RDWR)  # close alone would leave the other thread waiting, and the port open
        listener.close()


def reply(body=HTML, status="200 OK", **headers):
    """A whole answer; underscores in the names of headers stand for dashes."""
    headers = {"Content-Type": "text/html; charset=utf-8", "Content-Length": len(body)} | {k.replace("_", "-"): v for k, v in headers.items()}
    lines = "".join(f"{k}: {v}\r\n" for k, v in headers.items() if v is not None)
    return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode("latin-1") + body


def fetcher(*allow, **options):
    return Fetcher(allow, **({"page_s": 5, "extractor": EXTRACTOR} | options))


def outcome_of(answer, **options):
    """("ok", text) or (outcome, message) of fetching a page whose server sends these bytes, or behaves so."""
    behave = answer if callable(answer) else lambda connection, path: connection.sendall(answer)
    with raw_server(behave) as address:
        try:
            return "ok", fetcher(address, **options).fetch(f"http://{address}/page").text
        except PageFailure as failure:
            return failure.outcome, str(failure)


# pages that can be had ----------------------------------------------------------------------------------------------------------------

def test_a_page():
    assert outcome_of(reply()) == ("ok", "Ada wrote it in 1843.")
    assert outcome_of(reply(b"plain <b>words</b>\n", Content_Type="text/plain")) == ("ok", "plain <b>words</b>")
    assert outcome_of(reply(Content_Type=None)) == ("ok", "Ada wrote it in 1843.")  # no type: looked at
    assert outcome_of(reply(b"no markup", Content_Type=None)) == ("ok", "no markup")
    assert outcome_of(reply(Content_Length=None)) == ("ok", "Ada wrote it in 1843.")  # ends with the connection
    chunked = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (HTML[:10], HTML[10:])) + b"0\r\n\r\n"
    assert outcome_of(reply(chunked, Content_Length=None, Transfer_Encoding="chunked")) == ("ok", "Ada wrote it in 1843.")


def test_only_the_text_of_a_page():
    page = (b"<html><head><style>p {}</style><script>alert('x')</script></head><body><nav><a href=/>Home</a></nav><article><h1>Engines</h1>"
            b"<p>Ada wrote &amp; thought.</p><p>She was born in London.</p></article><footer>Imprint</footer></body></html>")
    kind, text = outcome_of(reply(page))
    assert kind == "ok" and "Ada wrote & thought." in text and "She was born in London." in text
    assert not any(word in text for word in ("alert", "Imprint", "Home", "<p>"))


@pytest.mark.parametrize("packed, how", [
    (gzip.compress(HTML, mtime=0), "gzip"), (gzip.compress(HTML[:20], mtime=0) + gzip.compress(HTML[20:], mtime=0), "x-gzip"), (zlib.compress(HTML), "deflate"),
    (zlib.compressobj(wbits=-15).compress(b"") + (lambda c: c.compress(HTML) + c.flush())(zlib.compressobj(wbits=-15)), "deflate"), (HTML, "identity")])
def test_packed_pages(packed, how):
    assert outcome_of(reply(packed, Content_Encoding=how)) == ("ok", "Ada wrote it in 1843.")


def test_redirects_are_followed():
    def behave(connection, asked):
        path = asked.split()[1]
        target = {"/page": "/b?x=1", "/b?x=1": "//{host}/c".format(host=re.search(r"Host: (\S+)", asked)[1]), "/c": "caf\u00e9 \u00fc".encode().decode("latin-1")}.get(path)
        connection.sendall(reply(b"", "302 Found", Location=target) if target else reply(HTML.replace(b"1843", path.encode())))
    kind, text = outcome_of(behave)
    assert kind == "ok" and text == "Ada wrote it in /caf%C3%A9%20%C3%BC."


# pages that cannot be had -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("status, outcome", [("429 Too Many Requests", "http_429"), ("500 Oops", "http_500"), ("404 Not Found", "http_404"), ("301 Gone away", "http_301"),
                                             ("401 No", "http_401"), ("204 No Content", "empty")])
def test_status(status, outcome):
    assert outcome_of(reply(b"" if "204" in status else HTML, status, Content_Length=None if "204" in status else len(HTML)))[0] == outcome


@pytest.mark.parametrize("answer, outcome", [
    (reply(b""), "empty"), (reply(b"  \n "), "empty"), (reply(b"<html><body><script>x()</script></body></html>"), "empty"),
    (reply(b"%PDF-1.7", Content_Type="application/pdf"), "content_type"), (reply(b"\x89PNG\0\0", Content_Type="image/png"), "content_type"),
    (reply(b"\x89PNG\0\0", Content_Type=None), "content_type"), (reply(b"{}", Content_Type="application/json"), "content_type"),
    (reply(HTML, Content_Encoding="br"), "encoding"), (reply(HTML, Content_Encoding="gzip, gzip"), "encoding"),
    (reply(b"\x1f\x8b not gzip", Content_Encoding="gzip"), "encoding"), (reply(gzip.compress(HTML * 50, mtime=0)[:-30], Content_Encoding="gzip"), "encoding"),
    (reply(HTML, Content_Length=len(HTML) + 10), "unreachable"),  # cut off
    (b"", "unreachable"), (b"220 ESMTP ready\r\n", "unreachable"), (b"\x15\x03\x01\0\x02\x02\x50", "unreachable"), (b"HTTP/1.1 abc\r\n\r\n", "unreachable"),
    (reply(b"zz\r\n", Content_Length=None, Transfer_Encoding="chunked"), "unreachable"),
    (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000, "unreachable"), (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000, "unreachable"),
])
def test_broken_answers(answer, outcome):
    assert outcome_of(answer)[0] == outcome


def test_any_bytes_are_an_outcome():
    rng = random.Random(0)
    good = reply(gzip.compress(HTML, mtime=0), Content_Encoding="gzip")
    for _ in range(40):
        answer = bytearray(good if rng.random() < 0.7 else rng.randbytes(rng.randrange(300)))
        for _ in range(rng.randrange(1, 6)):
            if answer:
                answer[rng.randrange(len(answer))] = rng.randrange(256)
        assert outcome_of(bytes(answer), page_s=2)[0]


def sends(*parts, every=0.02):
    """Behaviour: these parts at once, then the last one over and over."""
    def behave(connection, path):
        connection.sendall(b"".join(parts[:-1]))
        while True:
            time.sleep(every)
            connection.sendall(parts[-1])
    return behave


@pytest.mark.parametrize("behave", [
    lambda connection, path: time.sleep(3),  # accepts, and says nothing
    sends(b"HTTP/1.1 200 OK\r\nX-A", b"a"), sends(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n", every=0.05), sends(b"HT", b"T"),  # drips headers
    sends(reply(b"<html>", Content_Length=10_000), b" "), sends(reply(b"", Content_Length=None), b" "),  # drips the body, with and without a length
    sends(reply(b"", Content_Length=None, Transfer_Encoding="chunked"), b"1\r\nx\r\n"),
    sends(reply(b"0\r\n", Content_Length=None, Transfer_Encoding="chunked"), b"X: y\r\n"),  # endless trailers
    sends(b"HTTP/1.1 100 Continue\r\n\r\n"),  # never comes to the point
    sends(reply(b"", "302 Found", Location="/elsewhere", Content_Length=9)[:-3], b"x"),  # a redirect that never ends its headers
], ids=range(10))
def test_stalling_and_dripping_servers_meet_the_deadline(behave):
    start = time.monotonic()
    assert outcome_of(behave, page_s=0.4)[0] == "timeout"
    assert time.monotonic() - start < 5


def test_the_deadline_covers_all_redirects_together():
    def behave(connection, asked):
        time.sleep(0.15)
        connection.sendall(reply(b"", "302 Found", Location=f"/{time.monotonic()}"))
    start = time.monotonic()
    assert outcome_of(behave, page_s=0.4, max_redirects=50)[0] == "timeout" and time.monotonic() - start < 5


def test_a_server_that_does_not_accept_and_one_that_is_not_there():
    full = socket.create_server(("127.0.0.1", 0), backlog=0)
    address = f"127.0.0.1:{full.getsockname()[1]}"
    waiting = [socket.socket() for _ in range(3)]
    for s in waiting:  # fill the queue, so that the next connection hangs
        s.setblocking(False)
        s.connect_ex(full.getsockname())
    start = time.monotonic()
    with pytest.raises(PageFailure) as caught:
        fetcher(address, connect_s=0.3).fetch(f"http://{address}/")
    assert caught.value.outcome == "timeout" and time.monotonic() - start < 5
    for s in [*waiting, full]:
        s.close()
    with pytest.raises(PageFailure) as caught:
        fetcher(address).fetch(f"http://{address}/")
    assert caught.value.outcome == "unreachable"


def test_tls():
    assert outcome_of(reply())[0] == "ok"
    for behave, outcome in ((lambda c, path: c.sendall(reply()), "unreachable"), (lambda c, path: time.sleep(3), "timeout")):
        listener = socket.create_server(("127.0.0.1", 0))  # speaks no TLS: answers in the clear, or says nothing
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def serve():
            connection, _ = listener.accept()
            connection.recv(65536)
            behave(connection, "")
            connection.close()
        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(PageFailure) as caught:
            fetcher(address, page_s=0.5).fetch(f"https://{address}/")
        assert caught.value.outcome == outcome
        listener.close()


@pytest.mark.parametrize("behave", [
    lambda c, asked: c.sendall(reply(b"", "302 Found", Location="/page")),
    lambda c, asked: c.sendall(reply(b"", "301 Moved", Location="/b" if "/page" in asked.split()[1] else "/page")),
    lambda c, asked: c.sendall(reply(b"", "307 Go", Location=asked.split()[1] + "x")),
])
def test_redirects_in_a_circle_and_without_end(behave):
    assert outcome_of(behave)[0] == "redirects"


def test_large_pages():
    big = b"<html><body>" + b"<p>" + b"word " * 2_000_000 + b"</p></body></html>"  # 10 MB
    assert outcome_of(reply(big))[0] == "too_large"
    assert outcome_of(reply(big, Content_Length=None))[0] == "too_large"  # not announced
    assert outcome_of(reply(big[:100], Content_Length=10 ** 15))[0] == "too_large"
    assert outcome_of(reply(big[:200_000]), max_bytes=100_000)[0] == "too_large"
    kind, text = outcome_of(reply(big[:1_000_000]))
    assert kind == "ok" and len(text) > 900_000


def test_gzip_bombs():
    layer = zlib.compressobj(9, wbits=31)
    bomb = b"".join(layer.compress(bytes(10_000_000)) for _ in range(30)) + layer.flush()  # 300 MB in 300 kB
    assert len(bomb) < 400_000
    members = gzip.compress(bytes(1_000_000)) * 300
    tracemalloc.start()
    assert outcome_of(reply(bomb, Content_Encoding="gzip"))[0] == "too_large"
    assert outcome_of(reply(members, Content_Encoding="gzip"))[0] == "too_large"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60e6  # gzip.decompress(bomb): over 600


def test_pages_that_take_a_parser_too_long(monkeypatch):
    slow = Extractor(cpu_s=0.5, workers=1)
    page = "<div " + " ".join(f"a{i}=1" for i in range(100_000)) + ">x</div>"
    with pytest.raises(PageFailure) as caught:
        slow.text(page)
    assert caught.value.outcome == "timeout"
    assert slow.text(HTML.decode()) == "Ada wrote it in 1843."  # and the next page is read as if nothing had been


def test_the_extractor_gets_no_keys(monkeypatch):
    for name in ("SERPER_API_KEY", "SEARCH_API_KEY", "OPENAI_API_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "very-secret")
    own = Extractor(workers=1)
    assert own.text(HTML.decode()) == "Ada wrote it in 1843."
    process = own._free.get()
    environment = Path(f"/proc/{process.pid}/environ").read_bytes()
    process.kill()
    process.wait()
    assert b"PATH=" in environment and b"very-secret" not in environment


def test_a_dead_extractor_is_replaced():
    mortal = Extractor(workers=1)
    assert mortal.text(HTML.decode()) == "Ada wrote it in 1843."
    process = mortal._free.get()
    process.kill()
    process.wait()
    mortal._free.put(process)
    assert mortal.text(HTML.decode()) == "Ada wrote it in 1843."


@pytest.mark.parametrize("page", ["<div>" * 50_000 + "x", "<" * 100_000, "\0" * 1000, "<p>&#xD800;&#0;\x1b[31m</p>", "<table>" * 5000, "<!--" * 5000, "\ud800"])
def test_odd_markup(page):
    text = EXTRACTOR.text(page)
    text.encode()
    assert all(c.isprintable() or c in "\n\t" for c in text)


def test_threads_may_share_one():
    pages = [f"<html><body><p>Number {i} is here.</p></body></html>" for i in range(60)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(EXTRACTOR.text, pages)) == [f"Number {i} is here." for i in range(60)]


# character sets -----------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("body, claimed, text", [
    ("Zürich".encode(), "utf-8", "Zürich"), ("Zürich".encode(), "iso-8859-1", "Zürich"), ("Zürich".encode("latin-1"), "utf-8", "Zürich"),
    ("Zürich".encode("latin-1"), "iso-8859-1", "Zürich"), ("Zürich".encode(), "klingon", "Zürich"), ("Zürich".encode(), "punycode", "Zürich"),
    ("東京".encode("shift_jis"), "Shift_JIS", "東京"), ("東京".encode("iso-2022-jp"), "iso-2022-jp", "東京"), ("東京".encode("utf-16"), "", "東京"),
    ("Tokyo".encode("utf-16-le"), "utf-16le", "Tokyo"), (b"\xef\xbb\xbf" + "Zürich".encode(), "latin-1", "Zürich"),
    ('<meta charset="koi8-r">'.encode() + "Москва".encode("koi8-r"), "", '<meta charset="koi8-r">Москва'),
    ("Zürich ".encode() * 50 + b"\xff", "utf-8", "Zürich " * 50 + "\N{REPLACEMENT CHARACTER}"),  # one broken byte does not spoil the rest
    (b"\x93quoted\x94", "", "\u201cquoted\u201d"), (b"", "utf-8", ""),
])
def test_wrong_character_sets(body, claimed, text):
    assert decode(body, claimed) == text


def test_a_page_in_another_character_set_than_it_claims():
    page = "<html><body><p>Die größte Stadt heißt Zürich.</p></body></html>"
    for encoding in ("utf-8", "latin-1", "utf-16"):
        assert outcome_of(reply(page.encode(encoding))) == ("ok", "Die größte Stadt heißt Zürich.")


# what may be asked --------------------------------------------------------------------------------------------------------------------

PRIVATE = ["127.0.0.1", "127.8.9.10", "10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "0.1.2.3",
           "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "::1", "::", "fe80::1", "fc00::1", "fd12::1", "ff02::1",
           "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:0:0", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::7f00:1", "2002:7f00:1::",
           "2002:a00:1::", "2001:db8::1", "fec0::1"]


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_that_are_not_public(address):
    assert not is_public(address)
    url = f"http://[{address}]/" if ":" in address else f"http://{address}/"
    with pytest.raises(PageFailure) as caught:
        fetcher().fetch(url)
    assert caught.value.outcome == "refused"


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.216.34", "172.32.0.1", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"])
def test_public_addresses(address):
    assert is_public(address)


@pytest.mark.parametrize("url", ["http://localhost/", "http://LOCALHOST:80/", "http://localhost./", "http://127.1/", "http://2130706433/", "http://0x7f000001/",
                                 "http://0177.0.0.1/", "http://127.0.0.1#@1.1.1.1/", "http://127.0.0.1:80?x@1.1.1.1/", "http://①②⑦.⓪.⓪.①/", "http://[::1]/",
                                 "https://[::ffff:7f00:1]/", "http://[fe80::1%25lo]/", "http://127.0.0.1\\@1.1.1.1/", "http://a@127.0.0.1/", "http://1.1.1.1@127.0.0.1/"])
def test_disguised_addresses_are_never_asked(url, monkeypatch):
    monkeypatch.setattr(web, "exchange", lambda *a, **k: pytest.fail("asked"))
    with pytest.raises(PageFailure) as caught:
        fetcher(page_s=1).fetch(url)
    assert caught.value.outcome in ("refused", "unreachable")


@pytest.mark.parametrize("url", ["", "x", "/wiki/1", "file:///etc/passwd", "ftp://1.1.1.1/", "gopher://1.1.1.1/", "javascript:alert(1)", "http://", "http:///x", "http://1.1.1.1:99999/",
                                 "http://1.1.1.1:x/", "http://a b/", "http://[::1/", "http://" + "a" * 5000, "http://a\r\nHost: b/", "http://x/\ud800", "http://a..b/"])
def test_what_is_no_address_of_a_page(url, monkeypatch):
    monkeypatch.setattr(web, "exchange", lambda *a, **k: pytest.fail("asked"))
    with pytest.raises(PageFailure) as caught:
        fetcher(page_s=1).fetch(url)
    assert caught.value.outcome in ("refused", "unreachable")


def test_redirects_to_private_addresses_are_refused():
    with raw_server(lambda c, asked: c.sendall(reply(b"the secrets of another service", Content_Type="text/plain"))) as secret:
        for target in (f"http://{secret}/", "http://169.254.169.254/latest", "http://localhost/", "file:///etc/passwd", "//10.0.0.1/x", "http://[::1]/"):
            assert outcome_of(reply(b"", "302 Found", Location=target))[0] == "refused", target


def test_only_what_is_listed_is_allowed():
    with raw_server(lambda c, asked: c.sendall(reply())) as address:
        url, port = f"http://{address}/", int(address.partition(":")[2])
        for allowed in (address, "127.0.0.1", "127.0.0.0/8", f"127.0.0.0/8:{port}"):
            assert fetcher(allowed).fetch(url).text == "Ada wrote it in 1843."
        for allowed in ((), (f"127.0.0.1:{port % 65535 + 1}",), ("127.0.0.2",), ("10.0.0.0/8",), (f"[::1]:{port}",)):
            with pytest.raises(PageFailure) as caught:
                fetcher(*allowed).fetch(url)
            assert caught.value.outcome == "refused"
    for bad in ("localhost", "127.0.0.1:x", "10.0.0.1/8", "http://10.0.0.1", "1.2.3"):
        with pytest.raises(UserError, match="write it as"):
            fetcher(bad)


@pytest.fixture
def names(monkeypatch):
    """A name server: {host: [addresses of the first question], [of the second], ...}; and what was connected to."""
    table, connected, asked = {}, [], []

    def getaddrinfo(host, port, type=0, flags=0, **_):
        if flags & socket.AI_NUMERICHOST:
            return real(host, port, type=type, flags=flags)
        asked.append(host)
        if host not in table:
            raise socket.gaierror(-2, "Name or service not known")
        answers = table[host]
        return [(socket.AF_INET6 if ":" in a else socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port)) for a in (answers.pop(0) if len(answers) > 1 else answers[0])]

    def exchange(method, scheme, host, port, path, **options):
        connected.append((host, options["address"][1][0]))
        return net.Answer(*pages[host])
    real, pages = socket.getaddrinfo, {}
    monkeypatch.setattr(web.socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(web, "exchange", exchange)
    from email.message import Message

    def page(host, *addresses, status=200, **headers):
        table[host], message = [list(a) for a in addresses], Message()
        for name, value in {"Content-Type": "text/plain", **headers}.items():
            message[name] = value
        pages[host] = (status, message, b"hello")
    return page, connected, asked


def test_names_are_looked_up_once_and_the_checked_address_is_used(names):
    page, connected, asked = names
    page("rebind.example", ["93.184.216.34"], ["127.0.0.1"])  # public when checked, loopback a moment later
    assert fetcher().fetch("http://rebind.example/").text == "hello"
    assert asked == ["rebind.example"] and connected == [("rebind.example", "93.184.216.34")]
    with pytest.raises(PageFailure):  # the next question is checked again
        fetcher().fetch("http://rebind.example/")
    assert len(connected) == 1


def test_names_of_private_addresses(names):
    page, connected, asked = names
    page("inside.example", ["10.0.0.5"])
    page("both.example", ["10.0.0.5", "fd00::1", "93.184.216.34"])
    page("go.example", ["93.184.216.34"], status=302, Location="http://inside.example/")
    for host in ("inside.example", "go.example"):
        with pytest.raises(PageFailure) as caught:
            fetcher().fetch(f"http://{host}/")
        assert caught.value.outcome == "refused"
    assert connected == [("go.example", "93.184.216.34")]
    fetcher().fetch("http://both.example/")
    assert connected[-1] == ("both.example", "93.184.216.34")
    fetcher("10.0.0.0/8").fetch("http://inside.example/")
    assert connected[-1] == ("inside.example", "10.0.0.5")
    with pytest.raises(PageFailure) as caught:
        fetcher().fetch("http://nowhere.example/")
    assert caught.value.outcome == "unreachable"


def test_a_name_server_that_does_not_answer(monkeypatch):
    real = socket.getaddrinfo
    monkeypatch.setattr(web.socket, "getaddrinfo", lambda host, *a, flags=0, **k: real(host, *a, flags=flags, **k) if flags else time.sleep(3))
    start = time.monotonic()
    with pytest.raises(PageFailure) as caught:
        fetcher(page_s=0.3).fetch("http://slow.example/")
    assert caught.value.outcome == "timeout" and time.monotonic() - start < 5


# the cache ----------------------------------------------------------------------------------------------------------------------------

def test_pages_and_searches_are_kept_for_a_while(tmp_path, monkeypatch):
    seen = []
    with raw_server(lambda c, asked: (seen.append(asked.split()[1]), c.sendall(reply(b"" if "none" in asked else HTML)))) as address:
        pages = fetcher(address, cache=DiskCache(tmp_path, 7))
        for _ in range(3):
            assert pages.fetch(f"http://{address}/a").text == "Ada wrote it in 1843."
        for _ in range(2):
            with pytest.raises(PageFailure):
                pages.fetch(f"http://{address}/none")
        assert seen == ["/a", "/none", "/none"]  # failures are not kept
        now = time.time()
        monkeypatch.setattr(web.time, "time", lambda: now + 6.9 * 86400)
        pages.fetch(f"http://{address}/a")
        assert len(seen) == 3
        monkeypatch.setattr(web.time, "time", lambda: now + 7.1 * 86400)
        pages.fetch(f"http://{address}/a")
        assert len(seen) == 4


def test_a_damaged_entry_is_made_anew(tmp_path):
    cache = DiskCache(tmp_path, 1)
    cache.put("k", ["v"])
    path, = tmp_path.glob("*/*.json")
    assert cache.get("k") == ["v"] and cache.get("other") is None
    for damage in (b"", b"{", b"[1]", b'{"key": "another", "at": 9e99, "value": 1}', path.read_bytes().replace(b'"k"', b'"j"')):
        path.write_bytes(damage)
        assert cache.get("k") is None
    cache.put("k", ["w"])
    assert cache.get("k") == ["w"] and [p.suffix for p in path.parent.iterdir()] == [".json"]


def test_entries_are_whole_under_many_writers(tmp_path):
    cache = DiskCache(tmp_path, 1)
    value = ["x" * 50_000]
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda i: (cache.put("k", value), cache.get("k"))[1], range(80)))
    assert all(g == value for g in got)


def test_a_full_disk_ends_the_run_with_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot keep web results in .*file .*make room there or give another --cache"):
        DiskCache(tmp_path / "file", 1).put("k", 1)
    monkeypatch.setattr(web.os, "replace", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UserError, match="No space left on device"):
        DiskCache(tmp_path, 1).put("k", 1)
    assert not list(tmp_path.rglob("*.part"))


# search -------------------------------------------------------------------------------------------------------------------------------

def serper(answer, status="200 OK"):
    seen = []

    def behave(connection, asked):
        head, _, body = asked.partition("\r\n\r\n")
        seen.append((head, json.loads(body)))
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        connection.sendall(reply(content, status, Content_Type="application/json"))
    return behave, seen


ORGANIC = {"organic": [{"title": "Ada", "link": "https://a.example/1", "snippet": "On\nAda", "position": 1}, {"title": "No address"}, {"link": "https://b.example", "position": 2}],
           "knowledgeGraph": {"title": "x"}}


def test_search_speaks_serpers_protocol(monkeypatch, tmp_path):
    monkeypatch.setenv("SEARCH_API_KEY", "key-of-this-server")
    monkeypatch.setenv("SERPER_API_KEY", "key-of-serper")
    behave, seen = serper(ORGANIC)
    with raw_server(behave) as address:
        search = WebSearch(f"http://{address}", DiskCache(tmp_path, 7))
        hits = search.search("who?", 2)
        assert [(h.passage.id, h.passage.title, h.passage.text) for h in hits] == [("https://a.example/1", "Ada", "On Ada"), ("https://b.example", "", "")]
        assert search.search("who?", 2) == hits and len(seen) == 1  # kept
        search.search("who?", 1), search.search("who else?", 2)
        assert [body for _, body in seen] == [{"q": "who?", "num": 2}, {"q": "who?", "num": 1}, {"q": "who else?", "num": 2}]
        assert seen[0][0].startswith("POST /search ") and "X-API-KEY: key-of-this-server" in seen[0][0]
        assert "key-of" not in "".join(p.read_text() for p in tmp_path.glob("*/*"))
        assert search.search("", 2) == [] and len(seen) == 3  # empty queries are not sent


def test_serper_needs_its_key(monkeypatch):
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    with pytest.raises(UserError, match="SERPER_API_KEY"):
        WebSearch()


@pytest.mark.parametrize("url, key", [("https://google.serper.dev", "serper"), ("https://SERPER.dev/search", "serper"), ("https://evilserper.dev", "other"),
                                      ("https://serper.dev.evil.example", "other"), ("https://evil.example/serper.dev", "other")])
def test_serpers_key_goes_to_serper_alone(monkeypatch, url, key):
    monkeypatch.setenv("SERPER_API_KEY", "serper")
    monkeypatch.setenv("SEARCH_API_KEY", "other")
    assert WebSearch(url).remote._headers == {"X-API-KEY": key}
    with pytest.raises(UserError, match="is not an address"):
        WebSearch("http://[::1")


def test_the_key_is_never_shown(monkeypatch):
    monkeypatch.setenv("SEARCH_API_KEY", "very-secret")
    behave, _ = serper(b'{"message": "' + b" " * 185 + b'no such key very-secret"}', "403 Forbidden")
    with raw_server(behave) as address, pytest.raises(RetrieverDown) as caught:
        WebSearch(f"http://{address}").search("who?", 2)
    assert "403" in str(caught.value) and "very" not in str(caught.value)


def test_a_query_that_the_server_refuses_is_the_models_mistake():
    with raw_server(serper({"message": "Query pattern not allowed"}, "400 Bad Request")[0]) as address, pytest.raises(PageFailure) as caught:
        WebSearch(f"http://{address}").search("site:", 2)
    assert caught.value.outcome == "bad_query"


@pytest.mark.parametrize("answer, status", [(ORGANIC, "500 Oops"), (ORGANIC, "429 Slow down"), (b"<html>", "200 OK"), ([], "200 OK"), ({"organic": "x"}, "200 OK"),
                                            ({"organic": [5]}, "200 OK"), (ORGANIC, "302 Found")])
def test_a_search_server_that_does_not_work_stops_the_run(answer, status):
    with raw_server(serper(answer, status)[0]) as address, pytest.raises(RetrieverDown):
        WebSearch(f"http://{address}", retries=1, backoff_s=0.01).search("who?", 2)


def test_a_search_server_that_drips_or_is_gone_stops_the_run():
    start = time.monotonic()
    with raw_server(sends(b"HTTP/1.1 200 OK\r\nX-A", b"a")) as address:
        with pytest.raises(RetrieverDown, match="no full answer"):
            WebSearch(f"http://{address}", retries=0, timeout_s=0.4).search("who?", 2)
    with pytest.raises(RetrieverDown, match="make web"):
        WebSearch(f"http://{address}", retries=1, backoff_s=0.01).search("who?", 2)
    assert time.monotonic() - start < 5


# reading ------------------------------------------------------------------------------------------------------------------------------

def test_pages_are_read_in_portions_until_enough_is_known():
    seen = []

    def reader(question, portion, number, total, known):
        seen.append((question, portion, number, total, list(known)))
        return Note("" if number == 1 else f"note {number}", number < 3)
    assert read(reader, "who?", "aaabbbcccddde", ["before"], portion_chars=3, max_portions=10) == [(2, "note 2"), (3, "note 3")]
    assert seen == [("who?", "aaa", 1, 5, ["before"]), ("who?", "bbb", 2, 5, ["before"]), ("who?", "ccc", 3, 5, ["before", "note 2"])]
    assert read(by_rule, "who?", "aaabbbcccd", [], portion_chars=3, max_portions=3) == [(1, "aaa"), (2, "bbb"), (3, "ccc")]
    assert read(by_rule, "who?", "short", [], portion_chars=3000, max_portions=3) == [(1, "short")]


@pytest.mark.parametrize("answer, note", [
    ("<extracted_info> Ada </extracted_info> <page_down>yes</page_down>", Note("Ada", True)), ("<extracted_info>Ada</extracted_info><page_down> No.</page_down>", Note("Ada", False)),
    ("<extracted_info></extracted_info><page_down>YES</page_down>", Note("", True)), ("I do not know.", Note("", False)), ("", Note("", False)),
])
def test_a_model_as_reader(answer, note):
    asked = []
    reader = by_model(lambda *parts: asked.append(parts) or answer, memory_chars=20)
    assert reader("who wrote it?", "a </tool_response> part", 2, 3, ["forgotten, as it is long ago", "Ada wrote it."]) == note
    before, portion, after = asked[0]
    assert "who wrote it?" in before and "Ada wrote it." in before and "forgotten" not in before and portion == "a [/tool_response> part"
    assert "<extracted_info>" in after and "<page_down>" in after


def test_an_endpoint_as_reader(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "key-1")
    text = "<extracted_info>Ada</extracted_info><page_down>no</page_down>"
    behave, seen = serper({"choices": [{"message": {"role": "assistant", "content": text}}]})
    with raw_server(behave) as address:
        reader, local = web.open_reader(f"http://{address}/v1", None, None, endpoint_model="reader-7b", max_length=0, max_tokens=99)
        assert local is None and reader("who?", "the page", 1, 1, []) == Note("Ada", False)
    head, body = seen[-1]
    assert head.startswith("POST /v1/chat/completions ") and "Authorization: Bearer key-1" in head
    assert (body["model"], body["max_tokens"]) == ("reader-7b", 99) and "the page" in body["messages"][0]["content"]


def test_who_reads():
    model, tokenizer = load_model("tiny")
    assert web.open_reader("text", model, tokenizer, max_length=300, max_tokens=8) == (by_rule, None)
    reader, local = web.open_reader("policy", model, tokenizer, max_length=300, max_tokens=8)
    assert local is not None and isinstance(reader("who?", "Ada wrote it.", 1, 1, []), Note)
    reader, local = web.open_reader("tiny", model, tokenizer, max_length=300, max_tokens=8)  # a second model, which no update reaches
    assert local is None and isinstance(reader("who?", "Ada wrote it.", 1, 1, []), Note)


def test_a_local_model_as_reader():
    model, tokenizer = load_model("tiny")
    local = LocalModel(model, tokenizer, max_length=400, max_tokens=12)
    first = local.ask("Question: who? ", "Ada wrote it. " * 5, " Answer.")
    assert local.ask("Question: who? ", "Ada wrote it. " * 5, " Answer.") == first  # greedy
    assert isinstance(local.ask("Question: who? ", "Ada wrote it. " * 5000, " Answer."), str)  # cut to what fits
    local.sync(model)
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: local.ask("Question: who? ", "Ada wrote it. " * 5, " Answer."), range(8))) == {first}
    with pytest.raises(UserError, match="--reader-tokens"):
        local.ask("Question: who? " * 100, "x", "y")


# a small web of our own ---------------------------------------------------------------------------------------------------------------

def test_a_corpus_as_a_small_web():
    passages = [Passage("1", '"Ada & Co"\nAda <b>wrote</b> it.\nIn 1843.'), Passage("a/b?c", '"Lima"\nLima is in Peru. ' + "It is large. " * 30)]
    server = LocalWeb({"": BM25(passages)})
    search, pages = WebSearch(server.search_url()), fetcher(server.address)
    hit, = search.search("Ada", 5)
    assert (hit.passage.title, hit.passage.text) == ("Ada & Co", "Ada <b>wrote</b> it. In 1843.")
    assert pages.fetch(hit.passage.id).text == "Ada <b>wrote</b> it.\nIn 1843."
    hit, = search.search("Lima", 5)
    assert hit.passage.text.endswith(" ...") and len(hit.passage.text) < 210 and "Lima is in Peru." in pages.fetch(hit.passage.id).text
    for path in ("/", "/wiki/2", "/wiki/%00", "/search"):
        with pytest.raises(PageFailure) as caught:
            pages.fetch(f"http://{server.address}{path}")
        assert caught.value.outcome == "http_404"
    for body in (b"{", b"[]", b"{}", b'{"q": 1}', b'{"q": "x", "num": 0}', b'{"q": "x", "num": true}'):
        host, _, port = server.address.partition(":")
        answer = net.exchange("POST", "http", host, int(port), "/search", body, end=time.monotonic() + 5, max_bytes=10 ** 6)
        assert answer.status == 400
    server.close()


def test_the_tiny_web_says_what_the_worlds_say():
    server, names = tiny_web([3, 4, 3])
    pages = fetcher(server.address, connect_to=server.connect_to)
    assert sorted(names) == [3, 4] and len(set(names.values())) == 2
    for seed in (3, 4):
        search = WebSearch(server.search_url(names[seed]))
        for p in world(seed).passages[::7]:
            hits = [h.passage for h in search.search(p.title[1:-1], 2)]
            expected = [h.passage for h in world(seed).index.search([p.title[1:-1]], 2)[0]]
            assert [(h.title, h.text) for h in hits] == [(e.title[1:-1], f"A page about {e.title[1:-1]}.") for e in expected]
            assert [pages.fetch(h.id).text for h in hits] == [e.text for e in expected]
    with pytest.raises(PageFailure) as caught:  # the addresses are open only to a client that was told where they lead
        fetcher(server.address).fetch(f"http://{names[3]}/wiki/1")
    assert caught.value.outcome == "refused"
    server.close()
    again, same = tiny_web([4, 3])
    assert same == names  # whatever port the server has
    again.close()


def test_command(tmp_path):
    (tmp_path / "corpus.jsonl").write_text('{"id": "1", "contents": "\\"Ada\\"\\nAda wrote it."}\n')
    command = [sys.executable, "-m", "common.web", "--port", "0", "--corpus", str(tmp_path / "corpus.jsonl")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
        line = process.stdout.readline()
        url, address = re.fullmatch(r"1 pages; use --search (\S+) --allow (\S+) \(Ctrl-C ends\)\n", line).groups()
        hit, = WebSearch(url).search("Ada", 3)
        assert fetcher(address).fetch(hit.passage.id).text == "Ada wrote it."
        process.send_signal(2)
        assert process.wait(10) == 130
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert web.main(["--corpus", str(tmp_path / "corpus.jsonl"), "--port", str(taken.getsockname()[1])]) == 2
    assert web.main(["--corpus", str(tmp_path / "none.jsonl")]) == 2
