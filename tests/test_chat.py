"""Chat turns from a template, and a second model that is asked: a server that behaves, and servers that do not."""
import contextlib
import http.server
import json
import socket
import threading
import time

import pytest

from common import UserError
from common.chat import Local, Server, next_user_turn, open_chat
from common.policy import load_model


@contextlib.contextmanager
def serving(answer):
    """`answer(number, headers, body)` -> (status, body): bytes, or what becomes JSON; None: say nothing for a while."""
    seen = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.path, dict(self.headers), body))
            status, content = answer(len(seen), self.headers, body)
            if content is None:
                time.sleep(1)
                return
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
        yield f"http://127.0.0.1:{server.server_port}/v1", seen
    finally:
        server.shutdown()
        server.server_close()


def said(text):
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}


def test_answers_come_back_in_order_and_the_key_only_in_the_header(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "k-123")
    def answer(n, headers, body):
        time.sleep(0.01 * (n % 3))
        return said(body["messages"][0]["content"].upper())
    with serving(answer) as (url, seen):
        ask = open_chat(url, model="m", max_tokens=7)
        assert ask([f"q{i}" for i in range(40)]) == [f"Q{i}" for i in range(40)] and ask([]) == []
    path, headers, body = seen[-1]
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer k-123"
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0, 7)
    assert "k-123" not in repr(vars(ask))


def test_a_failure_that_passes_is_tried_again():
    with serving(lambda n, h, b: said("yes") if n > 2 else (503 if n == 1 else 429, b"busy")) as (url, seen):
        assert Server(url, "m", 5, backoff_s=0.001)(["?"]) == ["yes"] and len(seen) == 3


@pytest.mark.parametrize("answer,reason", [
    (lambda n, h, b: (500, b"oh"), "does not answer .HTTP 500; 3 tries"),
    (lambda n, h, b: (401, b"no key"), "refused the request .HTTP 401.*key in .OPENAI_API_KEY"),
    (lambda n, h, b: (302, b""), "refused the request .HTTP 302"),
    (lambda n, h, b: (200, b"<html>"), "something else than a chat completion"),
    (lambda n, h, b: (200, {"choices": []}), "something else than a chat completion"),
    (lambda n, h, b: (200, {"choices": [{"message": {"content": [1]}}]}), "something else than a chat completion"),
    (lambda n, h, b: (200, b"x" * 5_000), "more than 4,000 bytes"),
    (lambda n, h, b: (200, None), "does not answer .*3 tries"),
])
def test_a_server_that_fails_ends_in_one_sentence(answer, reason):
    with serving(answer) as (url, _), pytest.raises(UserError, match=reason) as caught:
        Server(url, "m", 5, timeout_s=0.3, retries=2, backoff_s=0.001, max_answer_bytes=4_000)(["a", "b"])
    assert "\n" not in str(caught.value)


def test_a_server_that_sends_the_key_back_or_drips_its_headers(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "k-123")
    with serving(lambda n, h, b: (403, b" " * 190 + b"not your key: k-123")) as (url, _), pytest.raises(UserError, match="refused") as caught:
        Server(url, "m", 5)(["?"])
    assert "k-1" not in str(caught.value)
    listener = socket.create_server(("127.0.0.1", 0))

    def drip():
        connection, _ = listener.accept()
        with contextlib.suppress(OSError):  # the client leaves
            connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
            while True:
                time.sleep(0.02)
                connection.sendall(b"y")
    threading.Thread(target=drip, daemon=True).start()
    start = time.monotonic()
    with pytest.raises(UserError, match="no full answer within 0.3 s"):
        Server(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", "m", 5, timeout_s=0.3, retries=0)(["?"])
    assert time.monotonic() - start < 5
    listener.close()


def test_no_server_no_model_no_address():
    with pytest.raises(UserError, match="does not answer"):
        Server("http://127.0.0.1:9/v1", "m", 5, retries=1, backoff_s=0.001)(["?"] * 50)
    with pytest.raises(UserError, match="name the one"):
        Server("http://127.0.0.1:9/v1", "", 5)
    with pytest.raises(UserError, match="holds a user name or password.*a key comes from the environment"):
        Server("http://me:secret@127.0.0.1:9/v1", "m", 5)


@pytest.mark.parametrize("url", ["http://me:secret@127.0.0.1:9/v1", "http://me:secret@/v1", "http://me:secret@h:9x/v1", "http://127.0.0.1:9x/v1?api_key=secret",
                                 "http://127.0.0.1:secret", "http://me:secret\u2100@h/", "http://[::1/v1?api_key=secret", "http://h/v1?api_key=secret word"])
def test_an_address_that_is_refused_is_not_shown_whole(url):
    with pytest.raises(UserError, match="address") as caught:
        Server(url, "m", 5)
    assert "secret" not in str(caught.value)


def test_a_key_in_an_address_is_sent_and_not_shown():
    with serving(lambda n, h, b: (403, b"GET /v1/chat/completions?api_key=secret is not allowed")) as (url, seen), pytest.raises(UserError, match="refused") as caught:
        Server(f"{url}?api_key=secret", "m", 5)(["?"])
    assert seen[0][0] == "/v1/chat/completions?api_key=secret" and "secret" not in str(caught.value) and f"{url}/chat/completions" in str(caught.value)
    for status in (403, 200):
        with serving(lambda n, h, b: (status, b"invalid key: secret")) as (url, seen), pytest.raises(UserError) as caught:
            Server(f"{url}?api_key=secret", "m", 5)(["?"])
        assert "secret" not in str(caught.value) and "invalid key" in str(caught.value)
    for model, options in (("m", dict(retries=0)), ("", {})):
        with pytest.raises(UserError, match="the chat server http://127.0.0.1:9/v1") as caught:
            Server("http://127.0.0.1:9/v1?api_key=secret", model, 5, **options)(["?"])
        assert "secret" not in str(caught.value)


def test_one_failure_ends_the_batch():
    with serving(lambda n, h, b: (400, b"bad")) as (url, seen), pytest.raises(UserError):
        Server(url, "m", 5, at_once=2)([str(i) for i in range(200)])
    assert len(seen) <= 4


def test_a_model_of_its_own():
    ask = Local("tiny", 6)
    once = ask(["What is 3 + 4?", "Who?"])
    assert ask(["Who?"]) == once[1:] and len(once) == 2
    with pytest.raises(UserError, match="more than the"):
        ask(["word " * 5_000])


def test_next_user_turn_of_a_template():
    _, tokenizer = load_model("tiny")
    assert next_user_turn(tokenizer, [tokenizer.eos_token_id], role="tool") == ("\n<|im_start|>user\n<tool_response>\n",
                                                                               "\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert next_user_turn(tokenizer, [tokenizer.eos_token_id]) == ("\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(UserError, match="end token"):
        next_user_turn(tokenizer, [tokenizer.encode("a")[0]])
    template = tokenizer.chat_template
    tokenizer.chat_template = "{% for m in messages %}{% if m['role'] == 'user' or loop.last %}<{{ m['role'] }}>{{ m['content'] }}{% endif %}{% endfor %}<assistant>"
    with pytest.raises(UserError, match="only appends"):  # earlier replies are dropped, as thoughts are by some templates
        next_user_turn(tokenizer, [tokenizer.eos_token_id])
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        next_user_turn(tokenizer, [tokenizer.eos_token_id])
    tokenizer.chat_template = template


def test_a_template_that_drops_thoughts_is_refused_where_turns_have_thoughts():
    _, tokenizer = load_model("tiny")
    tokenizer.chat_template = ("{% for m in messages %}<{{ m['role'] }}>{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}<|im_end|>"
                               "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}")
    end = [tokenizer.eos_token_id]
    assert next_user_turn(tokenizer, end, role="tool") == ("<tool>", "<|im_end|><assistant>")
    with pytest.raises(UserError, match="only appends"):
        next_user_turn(tokenizer, end, role="tool", thought="<think> a </think>")
