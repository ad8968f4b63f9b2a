"""The web: searching it, fetching pages from servers that nobody vouches for, reading them in portions, and a small web of our own.

    search = WebSearch("https://google.serper.dev")        # or any server that speaks Serper's protocol
    pages = Fetcher(allow=("127.0.0.1:8001",))             # what is not public is refused, unless listed
    page = pages.fetch(search.search("who wrote Dune?", 10)[0].id)
    notes = read(by_rule, "who wrote Dune?", page.text, [], portion_chars=40_960, max_portions=10)

A page that cannot be had is a PageFailure: a value, which the model is shown. A search server or a chat server that does not answer is a
UserError: the run stops rather than learn from a web that is not there.

    python -m common.web --corpus corpus.jsonl             # serves a corpus as a small web: pages, and Serper's protocol, on 127.0.0.1:8001
"""
import hashlib
import html
import http.client
import http.server
import ipaddress
import json
import os
import queue
import random
import re
import resource
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote, urljoin, urlsplit

from common import UserError
from common.net import TooLarge, endpoint, exchange
from common.search import BM25, Hit, Passage, RemoteRetriever, RetrieverDown, neutralise
from common.tiny.world import world

SERPER = "https://google.serper.dev/search"
USER_AGENT = "Mozilla/5.0 (compatible; page reader of a research agent)"


class PageFailure(Exception):
    """What was asked for could not be had. `outcome` says why: refused, unreachable, timeout, redirects, http_<status>, content_type,
    encoding, too_large, empty; of a search: bad_query."""

    def __init__(self, message: str, outcome: str):
        super().__init__(message)
        self.outcome = outcome


# ---- results kept on disk ---------------------------------------------------------------------------------------------
class DiskCache:
    """Values (what JSON can hold) by key, in a folder, for so many days. A file is whole or not there; threads and processes may share it."""

    def __init__(self, folder: str | Path, days: float):
        self.folder, self.seconds = Path(folder), days * 86400

    def _path(self, key: str) -> Path:
        name = hashlib.sha256(key.encode()).hexdigest()
        return self.folder / name[:2] / f"{name}.json"

    def get(self, key: str):
        """The value, or None if there is none, or only one that is too old or damaged."""
        try:
            row = json.loads(self._path(key).read_bytes())
            return row["value"] if row["key"] == key and 0 <= time.time() - row["at"] <= self.seconds else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, key: str, value) -> None:
        """UserError if it cannot be written."""
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, part = tempfile.mkstemp(dir=path.parent, suffix=".part")
            try:
                with open(descriptor, "w") as file:
                    json.dump({"key": key, "at": time.time(), "value": value}, file)
                os.replace(part, path)
            except BaseException:
                os.unlink(part)
                raise
        except OSError as error:
            raise UserError(f"cannot keep web results in {self.folder} ({error.strerror or error}); make room there or give another --cache") from error


# ---- search -----------------------------------------------------------------------------------------------------------
class WebSearch:
    """Web search over Serper's protocol: POST {"q", "num"} with X-API-KEY -> {"organic": [{"title", "link", "snippet"}]}.

    The key is read from the environment, SERPER_API_KEY for Serper itself and SEARCH_API_KEY for any other server, and never shown.
    Further options are RemoteRetriever's. Threads may share one."""

    def __init__(self, url: str = SERPER, cache: DiskCache | None = None, **options):
        host = endpoint(url, "").host
        ours = host == "serper.dev" or host.endswith(".serper.dev")
        key = os.environ.get("SERPER_API_KEY" if ours else "SEARCH_API_KEY", "")
        if ours and not key:
            raise UserError("web search through Serper needs its key in the environment variable SERPER_API_KEY (from serper.dev); "
                            "or give the address of another server that speaks its protocol")
        self.cache, self.remote = cache, RemoteRetriever(url, "serper", headers={"X-API-KEY": key} if key else {}, **options)

    def search(self, query: str, k: int) -> list[Hit]:
        """At most k hits, best first; a passage's id is the page's address, its title and text are title and snippet. PageFailure if the
        server finds the query bad, RetrieverDown (a UserError) if it does not answer."""
        key = json.dumps(["search", self.remote.url, query, k])
        rows = self.cache.get(key) if self.cache else None
        if rows is None:
            try:
                rows = [[h.passage.id, h.passage.contents] for h in self.remote.search([query], k)[0]]
            except RetrieverDown as down:
                if down.status not in (400, 422):
                    raise
                raise PageFailure("the search engine does not take this query", "bad_query") from down
            if self.cache:
                self.cache.put(key, rows)
        return [Hit(Passage(*row), None) for row in rows]


# ---- which addresses may be asked -------------------------------------------------------------------------------------
_NAT64, _LOCAL_NAT64 = ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("64:ff9b:1::/48")


def _unwrapped(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The address that is reached in the end: some IPv6 addresses stand for an IPv4 one."""
    ip = ipaddress.ip_address(address)
    if ip.version == 6:
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is None and (ip in _NAT64 or int(ip) >> 32 == 0 and int(ip) > 1):
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        ip = inner or ip
    return ip


def is_public(address: str) -> bool:
    """Whether an address belongs to the public internet: neither private, loopback, link-local (where clouds keep their secrets), shared,
    multicast, reserved nor unspecified."""
    ip = _unwrapped(address)
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified or getattr(ip, "is_site_local", False) or ip in _LOCAL_NAT64)


def _allowed_entry(text: str) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, int | None]:
    """(network, port or None for all) of an entry such as 10.1.2.3, 10.0.0.0/8, 127.0.0.1:8001 or [::1]:8001."""
    match = re.fullmatch(r"\[([^\]]+)\](?::(\d+))?|([^:]+):(\d+)", text)
    name, port = (match[1] or match[3], match[2] or match[4]) if match else (text, None)
    try:
        return ipaddress.ip_network(name), int(port) if port else None
    except ValueError as error:
        raise UserError(f"{text!r} is no address that can be allowed ({error}); write it as 10.1.2.3, 10.0.0.0/8 or 127.0.0.1:8001") from error


def _look_up(host: str, port: int, seconds: float) -> list[tuple[int, tuple]]:
    """(family, socket address) of a host, by the system's resolver, which knows no time limit: so in a thread of its own."""
    out: list = []
    try:  # a number is no question for a name server, in whatever way it is written (127.1, 2130706433)
        out.append(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST))
    except (OSError, UnicodeError):
        pass

    def ask() -> None:
        try:
            out.append(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            out.append(error)

    if not out:
        thread = threading.Thread(target=ask, daemon=True, name="look-up")
        thread.start()
        thread.join(max(0.0, seconds))
    if not out:
        raise PageFailure(f"no address for {host} in time", "timeout")
    if isinstance(out[0], Exception):
        raise PageFailure(f"there is no host {host}", "unreachable")
    return list(dict.fromkeys((family, address) for family, _, _, _, address in out[0]))


# ---- pages ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Page:
    url: str  # where it was in the end, after redirects
    text: str


class Fetcher:
    """Fetches pages over HTTP and HTTPS and takes their text out. Every way in which a page can fail is a PageFailure.

    allow: addresses that may be asked although they are not public. A host is looked up once for each request and the connection goes to
    the address that was checked, so a name that points elsewhere a moment later gains nothing; every redirect is checked like the first.
    page_s: seconds for one page, redirects and looking up included, whatever the server does; connect_s: for one connection. max_bytes: of
    a page, as sent and unpacked. connect_to: {"host:port" in an address: "address:port" to connect to}, as curl's option of that name.
    Threads may share one. Proxy variables and robots.txt are not read.
    """

    def __init__(self, allow: Sequence[str] = (), *, page_s: float = 20, connect_s: float = 5, max_bytes: int = 4 << 20, max_redirects: int = 5,
                 connect_to: dict[str, str] | None = None, cache: DiskCache | None = None, extractor: "Extractor | None" = None):
        self.allow = [_allowed_entry(entry) for entry in allow]
        self.page_s, self.connect_s, self.max_bytes, self.max_redirects = page_s, connect_s, max_bytes, max_redirects
        self.connect_to, self.cache, self.extractor = connect_to or {}, cache, extractor or Extractor()

    def fetch(self, url: str) -> Page:
        """The page behind an address, from the cache if it is there and young enough. PageFailure if it cannot be had."""
        key = json.dumps(["page", url])
        row = self.cache.get(key) if self.cache else None
        if row is None:
            row = self._fetch(url)
            if self.cache:
                self.cache.put(key, row)
        return Page(*row)

    def _fetch(self, url: str) -> tuple[str, str]:
        end, asked = time.monotonic() + self.page_s, []
        while True:
            if url in asked or len(asked) > self.max_redirects:
                raise PageFailure("it redirects in a circle" if url in asked else f"it redirects more than {self.max_redirects} times", "redirects")
            asked.append(url)
            answer = self._ask(url, end)
            target = answer.headers.get("Location")
            if answer.status not in (301, 302, 303, 307, 308) or not target:
                break
            try:
                url = urljoin(url, target.encode("latin-1", "replace").decode("utf-8", "replace"))
            except ValueError as error:
                raise PageFailure("it redirects to something that is no address", "refused") from error
        if not 200 <= answer.status < 300:
            raise PageFailure(f"its server answers with HTTP status {answer.status}", f"http_{answer.status}")
        body = self._unpack(answer.body, answer.headers.get("Content-Encoding", ""))
        if not body.strip():
            raise PageFailure("it is empty", "empty")
        is_html, charset = _kind(answer.headers, body)
        text = decode(body, charset)
        text = self.extractor.text(text) if is_html else text.strip()
        if not text:
            raise PageFailure("it holds no text", "empty")
        return url, text

    def _ask(self, url: str, end: float):
        """One request to an address that may be asked."""
        scheme, host, port, target = _split(url)
        to_host, to_port = host, port
        if other := self.connect_to.get(f"{host}:{port}"):
            to_host, _, to_port = other.rpartition(":")
        addresses = [a for a in _look_up(to_host, int(to_port), end - time.monotonic()) if self.may_ask(a[1][0], a[1][1])]
        if not addresses:
            raise PageFailure(f"{host} is not on the public internet", "refused")
        for address in addresses:
            try:
                return exchange("GET", scheme, host, port, target, headers={"User-Agent": USER_AGENT, "Accept": "text/html, text/plain;q=0.9",
                                "Accept-Encoding": "gzip, deflate", "Connection": "close"}, end=end, max_bytes=self.max_bytes,
                                connect_s=self.connect_s, address=address, want_body=_wanted)
            except TimeoutError:
                failure = PageFailure("its server takes too long", "timeout")
            except TooLarge as error:
                raise PageFailure(f"it is larger than {self.max_bytes:,} bytes", "too_large") from error
            except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: a header that is no HTTP
                failure = PageFailure(f"its server cannot be reached ({type(error).__name__})", "unreachable")
            if time.monotonic() >= end:
                break
        raise failure

    def may_ask(self, address: str, port: int) -> bool:
        ip = _unwrapped(address.partition("%")[0])
        return is_public(address.partition("%")[0]) or any(ip in network and one in (None, port) for network, one in self.allow)

    def _unpack(self, body: bytes, packing: str) -> bytes:
        packing = packing.strip().lower()
        if packing in ("", "identity"):
            return body
        if packing not in ("gzip", "x-gzip", "deflate"):
            raise PageFailure("it is packed in a way that was not asked for", "encoding")
        try:
            return self._inflate(body, 47)  # gzip or zlib, as its first bytes say
        except zlib.error:
            try:
                return self._inflate(body, -15)  # what some servers take deflate for
            except zlib.error as error:
                raise PageFailure("it is packed in a broken way", "encoding") from error

    def _inflate(self, body: bytes, kind: int) -> bytes:
        out = b""
        while body:  # gzip may hold several members
            unpacker = zlib.decompressobj(kind)
            out += unpacker.decompress(body, self.max_bytes + 1 - len(out))
            if len(out) > self.max_bytes:
                raise PageFailure(f"it is larger than {self.max_bytes:,} bytes when unpacked", "too_large")
            if not unpacker.eof:
                raise zlib.error("cut off")
            body = unpacker.unused_data.lstrip(b"\0")
        return out


def _split(url: str) -> tuple[str, str, int, str]:
    """(scheme, host, port, path and query) of a page's address; PageFailure for anything but plain http and https."""
    try:
        parts = urlsplit(url.strip())
        host = (parts.hostname or "").encode("idna").decode() if not (parts.hostname or "").isascii() else parts.hostname
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        if not host or len(url) > 4000 or not re.fullmatch(r"[\w.:%-]+", host) or re.search(r"[@\\]", parts.netloc):
            raise ValueError
        target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~") + (f"?{quote(parts.query, safe='/%:@!$&()*+,;=~?')}" if parts.query else "")
    except (ValueError, KeyError) as error:
        raise PageFailure("that is not the address of a web page", "refused") from error
    return parts.scheme, host, port, target if target.startswith("/") else f"/{target}"


_HTML, _PLAIN = ("text/html", "application/xhtml+xml"), ("text/plain", "text/markdown")


def _wanted(status: int, headers) -> bool:
    """Whether to read the body: only of pages, and only of text."""
    if 200 <= status < 300 and headers.get("Content-Type") and headers.get_content_type() not in _HTML + _PLAIN:
        raise PageFailure(f"it is no text but {ascii(headers.get_content_type())[1:-1][:60]}", "content_type")
    return 200 <= status < 300


def _kind(headers, body: bytes) -> tuple[bool, str]:
    """(is it HTML, the character set it claims)."""
    claimed = headers.get_content_charset("") or ""
    if headers.get("Content-Type"):
        is_html = headers.get_content_type() in _HTML
    elif b"\0" in body[:1024] and body[:2] not in (b"\xff\xfe", b"\xfe\xff"):
        raise PageFailure("it is no text", "content_type")
    else:
        is_html = body.lstrip()[:1] == b"<"
    return is_html, claimed


_CHARSETS = re.compile(r"utf-?(8|16|32)([lb]e)?|(us-)?ascii|iso-?8859-?\d+|latin-?\d+|windows-?\d+|cp\d+|koi8-[rut]|gb(k|2312|18030)|big5(-?hkscs)?|"
                       r"euc-?(jp|kr)|(x-)?s(hift)?[-_]?jis|iso-2022-(jp|kr)|macintosh|tis-?620|hz")


def decode(body: bytes, claimed: str = "") -> str:
    """Text of a page whose claims about its character set may be wrong: a byte order mark, then UTF-8 if the bytes are that, then what the
    header and the page itself claim, then the commonest guess. Never fails."""
    for mark, name in ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16")):
        if body.startswith(mark):
            return body.removeprefix(b"\xef\xbb\xbf").decode(name, "replace")
    found = re.search(rb"<meta[^>]{0,200}charset\s*=\s*[\"']?\s*([\w.:-]+)", body[:4096], re.I)
    claims = [name for name in (claimed.strip().lower(), found[1].decode().lower() if found else "") if _CHARSETS.fullmatch(name)]
    plain = b"\0" not in body and b"\x1b" not in body  # else UTF-8 would also take UTF-16, or Japanese in seven bits
    for name in ["utf-8"] * plain + claims:
        try:
            return body.decode(name)
        except (UnicodeDecodeError, LookupError):
            continue
    text = body.decode("utf-8", "replace")
    return text if text.count("\N{REPLACEMENT CHARACTER}") * 100 < len(text) else body.decode("cp1252", "replace")


class Extractor:
    """The text of HTML pages, by trafilatura, in processes that can be killed: there are pages that take its parser minutes, and a fault in
    a parser must not end the run. cpu_s: seconds of computing for one page. workers: processes at most; one starts when it is needed."""

    def __init__(self, cpu_s: float = 10, workers: int = 2):
        self.cpu_s = cpu_s
        self._free: queue.LifoQueue = queue.LifoQueue()
        for _ in range(workers):
            self._free.put(None)

    def text(self, page: str) -> str:
        """The main text; "" if there is none. PageFailure (timeout) if it takes too long."""
        process = self._free.get()
        try:
            for attempt in range(2):  # one that ended between two pages is no fault of this page
                if process is None or process.poll() is not None:
                    process = self._start()
                try:
                    process.stdin.write(_block(page))
                    process.stdin.flush()
                    break
                except BrokenPipeError:
                    process = None
            else:
                raise UserError("the process that takes the text out of pages ends at once; is trafilatura installed? (pip install -r requirements.txt)")
            answer = _read_block(process.stdout.fileno(), time.monotonic() + 5 * self.cpu_s + 30)
            if answer is None:
                process.kill()
                if process.wait() in (-signal.SIGPROF, -signal.SIGKILL):
                    raise PageFailure("its text takes too long to find", "timeout")
                raise PageFailure("its text cannot be found", "empty")
            return answer
        finally:
            self._free.put(process)

    def _start(self) -> subprocess.Popen:
        environment = {k: os.environ[k] for k in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HOME", "LANG") if k in os.environ}  # keys stay here
        process = subprocess.Popen([sys.executable, "-m", "common.web", "--extract", str(self.cpu_s)], cwd=Path(__file__).parents[1], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True, env=environment | {"OMP_NUM_THREADS": "1"})
        if _read_block(process.stdout.fileno(), time.monotonic() + 120) != "ready":
            process.kill()
            process.wait()
            raise UserError("the process that takes the text out of pages does not start; is trafilatura installed? (pip install -r requirements.txt)")
        return process


def _block(text: str) -> bytes:
    content = text.encode("utf-8", "replace")
    return struct.pack(">Q", len(content)) + content


def _read_block(descriptor: int, end: float) -> str | None:
    """The next block of a pipe; None if it ends, or does not come in time."""
    content, size = bytearray(), 8
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while len(content) < size:
            if not selector.select(max(0.0, end - time.monotonic())) or not (chunk := os.read(descriptor, 1 << 16)):
                return None
            content += chunk
            if size == 8 and len(content) >= 8:
                size = 8 + struct.unpack(">Q", content[:8])[0]
    return content[8:].decode()


def _serve_extraction(cpu_s: float) -> None:
    """The extracting process: a block of HTML in, a block of text out. Too long a computation ends it (SIGPROF)."""
    import logging

    import trafilatura
    from trafilatura.settings import use_config
    logging.disable(logging.CRITICAL)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not stand among the answers
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    settings = use_config()
    settings.set("DEFAULT", "MIN_EXTRACTED_SIZE", "1")  # a page of one sentence is a page

    def say(text: str) -> None:
        out.write(_block(text))
        out.flush()

    say("ready")
    while head := sys.stdin.buffer.read(8):
        page = sys.stdin.buffer.read(struct.unpack(">Q", head)[0]).decode()
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        text = trafilatura.extract(page, config=settings, include_comments=False) or ""
        signal.setitimer(signal.ITIMER_PROF, 0)
        say("".join(c for c in text if c.isprintable() or c in "\n\t").strip())


# ---- reading ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Note:
    """What a reader takes from one portion of a page, and whether it wants to see the next one."""
    info: str
    go_on: bool


# (question, portion, its number from 1, number of portions, what is known so far) -> a note
Reader = Callable[[str, str, int, int, Sequence[str]], Note]


def read(reader: Reader, question: str, text: str, known: Sequence[str], *, portion_chars: int, max_portions: int) -> list[tuple[int, str]]:
    """[(number of a portion, what it says)] of a page that is read portion by portion, until the reader has enough. What it noted is in
    its memory, after what was `known`, when it comes to the next portion. Portions of which nothing was noted are left out."""
    notes: list[tuple[int, str]] = []
    total = -(-len(text) // portion_chars)
    for number in range(1, min(total, max_portions) + 1):
        note = reader(question, text[(number - 1) * portion_chars:number * portion_chars], number, total, [*known, *(info for _, info in notes)])
        if note.info:
            notes.append((number, note.info))
        if not note.go_on:
            break
    return notes


def by_rule(question: str, portion: str, number: int, total: int, known: Sequence[str]) -> Note:
    """The reader that passes every page on as it is."""
    return Note(portion.strip(), True)


TASK = ("Read a part of a web page for somebody who has this question: {question}\nKnown so far:\n{known}\nPart {number} of {total} of the page:\n")
FORM = ("\nWrite what this part says that helps with the question and is not known yet between <extracted_info> and </extracted_info>; leave "
        "it empty if there is nothing. Then write yes or no between <page_down> and </page_down>: yes if the next part should be read too, no "
        "if enough is known or the page is of no use.")


def by_model(ask: Callable[[str, str, str], str], memory_chars: int = 8000) -> Reader:
    """The reader that asks a model: ask(text before, portion, text after) -> its answer. The last `memory_chars` of what is known are shown."""
    def reader(question: str, portion: str, number: int, total: int, known: Sequence[str]) -> Note:
        before = TASK.format(question=question, known=neutralise("\n".join(known)[-memory_chars:]) or "nothing", number=number, total=total)
        answer = ask(before, neutralise(portion), FORM)
        part = lambda tag: m[1].strip() if (m := re.search(rf"<{tag}>(.*?)</{tag}>", answer, re.S)) else ""
        return Note(part("extracted_info"), "yes" in part("page_down").lower())
    return reader


class LocalModel:
    """A model of this process that is asked through an engine of its own, greedily, one question at a time. The policy can be it: its
    weights are shared, so `sync` after every update is all it needs. A portion that does not fit is cut. Threads may share one."""

    def __init__(self, model, tokenizer, *, max_length: int, max_tokens: int):
        from common.engine import HFEngine
        self.tokenizer, self.room, self.max_tokens = tokenizer, max_length - max_tokens, max_tokens
        self.engine, self.lock = HFEngine(model, tokenizer, max_slots=1, max_length=max_length), threading.Lock()

    def sync(self, model) -> None:
        self.engine.sync(model)

    def ask(self, before: str, portion: str, after: str) -> str:
        left, right = before, after
        if self.tokenizer.chat_template is not None:
            message = [{"role": "user", "content": f"{before}\N{OBJECT REPLACEMENT CHARACTER}{after}"}]
            left, _, right = self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True).partition("\N{OBJECT REPLACEMENT CHARACTER}")
        left, middle, right = (self.tokenizer.encode(t, add_special_tokens=False) for t in (left, portion, right))
        room = self.room - len(left) - len(right)
        if room < 1:
            raise UserError(f"the reader's question alone has {len(left) + len(right)} tokens; raise --reader-tokens (now {self.room + self.max_tokens})")
        with self.lock:
            self.engine.submit(left + middle[:room] + right, max_new_tokens=self.max_tokens, temperature=0.0)
            while True:
                for done in self.engine.step():
                    self.engine.release(done.rid)
                    return done.text


def open_reader(who: str, model, tokenizer, *, endpoint_model: str = "", max_length: int, max_tokens: int) -> tuple[Reader, LocalModel | None]:
    """(the reader, and the engine to `sync` after updates if it is the policy that reads). who: text (by rule), policy (`model` itself), the
    address of an OpenAI-compatible endpoint, or another model's folder or hub id."""
    if who == "text":
        return by_rule, None
    if who.startswith(("http://", "https://")):
        from common.chat import open_chat
        chat = open_chat(who, model=endpoint_model, max_tokens=max_tokens)
        return by_model(lambda *parts: chat(["".join(parts)])[0]), None
    if who != "policy":
        from common.policy import load_model
        model, tokenizer = load_model(who, "float32" if model.device.type == "cpu" else "bfloat16", model.device.type)
    local = LocalModel(model, tokenizer, max_length=max_length, max_tokens=max_tokens)
    return by_model(local.ask), local if who == "policy" else None


# ---- a small web of our own -------------------------------------------------------------------------------------------
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>article p {{ margin: 1em }}</style></head>
<body><header><h1>{title}</h1><nav><a href="/">Home</a> <a href="/wiki">All pages</a></nav></header>
<main><article>{paragraphs}</article></main>
<footer><p>Pages of a small web.</p></footer><script>var visits = 1;</script></body></html>
"""


def first_words(passage: Passage, length: int = 200) -> str:
    return passage.text if len(passage.text) <= length else f"{passage.text[:length].rsplit(' ', 1)[0]} ..."


class LocalWeb:
    """A web server on loopback: GET /wiki/<id> gives a passage as a page of HTML, POST /search speaks Serper's protocol.

    sites: {"host:port" as it stands in the addresses of its pages: its passages}. A server can so hold several small webs that know nothing
    of each other; a client reaches them through Fetcher's `connect_to`. With the name "" it is the server's own address.
    """

    def __init__(self, sites: dict[str, BM25], *, port: int = 0, snippet: Callable[[Passage], str] = first_words):
        web = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                index = web.sites.get(self.headers.get("Host", ""))
                passage = index and web.pages[id(index)].get(unquote(self.path.removeprefix("/wiki/")))
                if not passage:
                    return self.send_error(404)
                paragraphs = "".join(f"<p>{html.escape(line)}</p>" for line in passage.text.split("\n"))
                self.reply("text/html; charset=utf-8", PAGE.format(title=html.escape(passage.title.strip('"')), paragraphs=paragraphs).encode())

            def do_POST(self):
                site = unquote(self.path.removesuffix("/search").removeprefix("/")) or web.address
                index = web.sites.get(site)
                try:
                    asked = json.loads(self.rfile.read(min(int(self.headers["Content-Length"]), 1 << 20)))
                    query, num = asked["q"], asked.get("num", 10)
                    if not self.path.endswith("/search") or index is None:
                        return self.send_error(404)
                    if not isinstance(query, str) or type(num) is not int or not 1 <= num <= 100:
                        return self.send_error(400)
                except (ValueError, KeyError, TypeError, AttributeError):
                    return self.send_error(400)
                hits = [h.passage for h in index.search([query], num)[0]]
                rows = [{"title": p.title.strip('"'), "link": f"http://{site}/wiki/{quote(p.id, safe='')}", "snippet": web.snippet(p), "position": i}
                        for i, p in enumerate(hits, 1)]
                self.reply("application/json", json.dumps({"searchParameters": {"q": query}, "organic": rows}).encode())

            def reply(self, kind: str, content: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args):
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads, request_queue_size = True, 128

        try:
            self.server = Server(("127.0.0.1", port), Handler)
        except (OSError, OverflowError) as error:
            raise UserError(f"cannot serve on 127.0.0.1, port {port} ({getattr(error, 'strerror', None) or error}); stop what uses it or choose another --port") from error
        self.address, self.snippet = f"127.0.0.1:{self.server.server_port}", snippet
        self.sites = {name or self.address: index for name, index in sites.items()}
        self.pages = {id(index): {p.id: p for p in index.passages} for index in self.sites.values()}
        threading.Thread(target=self.server.serve_forever, args=(0.1,), daemon=True, name="local web").start()

    def search_url(self, site: str = "") -> str:
        return f"http://{self.address}/{f'{site}/' if site else ''}search"

    @property
    def connect_to(self) -> dict[str, str]:
        """For Fetcher: where the sites are in truth."""
        return {name: self.address for name in self.sites}

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def tiny_web(worlds: Sequence[int]) -> tuple[LocalWeb, dict[int, str]]:
    """A web for each of these tiny worlds on one server, and their names by world. Snippets name a page only, so that a fact has to be read
    in it. The addresses of a world's pages follow from its seed, whatever port the server got: a run repeats to the letter."""
    names: dict[int, str] = {}
    for seed in sorted(set(worlds), reverse=True):  # the held-out worlds, which every run has, first
        rng = random.Random(f"web {seed}")
        while (name := f"127.0.0.1:{rng.randrange(1024, 65536)}") in names.values():
            pass
        names[seed] = name
    sites = {name: world(seed).index for seed, name in names.items()}
    return LocalWeb(sites, snippet=lambda p: f"A page about {p.title[1:-1]}."), names


@dataclass(frozen=True)
class Serve:
    """Serve a corpus as a small web on this machine: every passage a page, and web search in Serper's protocol."""

    corpus: str
    """Corpus file: JSON lines with "id" and "contents" (title in quotation marks, newline, text)."""
    port: int = 8001
    """Port to listen on; 0 takes any free one."""


def main(args: list[str] | None = None) -> int:
    import tyro

    options = tyro.cli(Serve, prog="python -m common.web", args=args)
    try:
        web = LocalWeb({"": BM25.from_file(options.corpus)}, port=options.port)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(web.sites[web.address]):,} pages; use --search {web.search_url()} --allow {web.address} (Ctrl-C ends)", flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        web.close()
    return 130


if __name__ == "__main__":
    if sys.argv[1:2] == ["--extract"]:
        _serve_extraction(float(sys.argv[2]))
    else:
        sys.exit(main())
