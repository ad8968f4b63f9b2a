"""Chat models: the text between two turns of a dialogue, and a second model that is asked things (a server, or a folder).

    before, after = next_user_turn(tokenizer, engine.eos_ids)
    ask = open_chat("http://127.0.0.1:8000/v1", model="some-model")     # an OpenAI-compatible server; its key from $OPENAI_API_KEY
    ask = open_chat("folder/with/a/model")
    ask(["Is water wet?", "Is fire?"])                                  # -> two texts, greedy
"""
import http.client
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import parse_qsl

from common import UserError
from common.engine import HFEngine
from common.net import TooLarge, endpoint, exchange, hidden
from common.policy import load_model

Ask = Callable[[Sequence[str]], list[str]]  # one user message each -> one answer each
KEY = "OPENAI_API_KEY"


# ---- turns ------------------------------------------------------------------------------------------------------------
def next_user_turn(tokenizer, eos_ids: Iterable[int], role: str = "user", thought: str = "") -> tuple[str, str]:
    """What stands before and after the text of a user's turn (or that of another role, such as "tool") that follows a turn the model has ended
    itself (its end token is there). thought: what the model's turns begin with, where a template could take it out later.

    Found once by rendering a dialogue of three turns. UserError where there is no template, where it changes what was said before (then what
    the model sampled would no longer be what it is shown), or where it ends a turn with something the model cannot sample.
    """
    if tokenizer.chat_template is None:
        raise UserError("this method talks in turns, and the model's tokenizer has no chat template: use an instruction-tuned model")
    said = [f"{thought if i % 2 else ''}This is message {word}." for i, word in enumerate(("one", "two", "three", "four", "five"))]
    dialogue = [{"role": "assistant" if i % 2 else role if i else "user", "content": text} for i, text in enumerate(said)]
    texts = [tokenizer.apply_chat_template(dialogue[:n], tokenize=False, add_generation_prompt=True) for n in (1, 3, 5)]
    glue = []
    for i, (shorter, longer) in enumerate(zip(texts, texts[1:])):
        if not longer.startswith(shorter + said[2 * i + 1]):
            raise UserError("the chat template renders earlier turns anew when a later one is added, so tokens could not be kept as sampled: "
                            "use a template that only appends")
        glue.append(longer[len(shorter + said[2 * i + 1]):].split(said[2 * i + 2]))
    ends = [end for end in (tokenizer.decode([i]) for i in eos_ids) if end and glue[0][0].startswith(end)]
    if glue[0] != glue[1] or len(glue[0]) != 2 or not ends:
        raise UserError(f"the chat template puts {glue[0][0][:40]!r} behind a turn, which does not begin with an end token of the model: mend "
                        "its template or the eos_token_id of its generation_config")
    before, after = glue[0]
    return before.removeprefix(max(ends, key=len)), after


# ---- asking another model ---------------------------------------------------------------------------------------------
def open_chat(spec: str, *, model: str = "", max_tokens: int = 512, dtype: str = "float32", device: str = "cpu") -> Ask:
    """`http(s)://…/v1` -> a server that speaks OpenAI's chat completions, asked for `model`; anything else -> a model as `load_model` takes it."""
    if not spec.startswith(("http://", "https://")):
        return Local(spec, max_tokens, dtype, device)
    server = Server(spec, model, max_tokens)
    server(["Say yes."])  # address, model name and key, before anything is built on them
    return server


class _Transient(Exception):
    """A failure worth another try."""


class Server:
    """An OpenAI-compatible server. Every failure is one UserError; the first of a batch ends it. Neither redirects nor proxies are followed.

    timeout_s: one try. retries: further tries after a broken connection, a time-out, 408, 429 or 5xx, with pauses of backoff_s, doubled
    each time. The key is read from the environment and never written anywhere.
    """

    def __init__(self, url: str, model: str, max_tokens: int, *, timeout_s: float = 120, retries: int = 4, backoff_s: float = 0.5, at_once: int = 16,
                 max_answer_bytes: int = 4 << 20):
        self._endpoint = endpoint(url, "/chat/completions")
        self.url, self.model, self.max_tokens = self._endpoint.url, model, max_tokens  # without its query, which may hold a key
        if not model:
            raise UserError(f"the chat server {self.url} may serve several models: name the one that shall answer")
        self.timeout_s, self.retries, self.backoff_s, self.at_once, self.max_answer_bytes = timeout_s, retries, backoff_s, at_once, max_answer_bytes

    def __call__(self, messages: Sequence[str]) -> list[str]:
        failures: list[Exception] = []
        stop = threading.Event()

        def one(message: str) -> str:
            try:
                return "" if stop.is_set() else self._ask(message, stop)
            except Exception as error:
                failures.append(error)
                stop.set()  # the others give up before their next try
                return ""

        with ThreadPoolExecutor(max(1, min(self.at_once, len(messages)))) as pool:
            answers = list(pool.map(one, messages))
        if failures:
            raise failures[0]
        return answers

    def _ask(self, message: str, stop: threading.Event) -> str:
        body = json.dumps({"model": self.model, "messages": [{"role": "user", "content": message}], "temperature": 0, "max_tokens": self.max_tokens})
        for attempt in range(self.retries + 1):
            try:
                return self._answer(self._post(body.encode()))
            except _Transient as error:
                reason = str(error)
            if attempt < self.retries and stop.wait(self.backoff_s * 2 ** attempt * (0.5 + random.random())):
                break
        raise UserError(f"the chat server {self.url} does not answer ({reason}; {attempt + 1} tries): start it, or give another address")

    def _post(self, body: bytes) -> bytes:
        key = os.environ.get(KEY, "")
        headers = {"Content-Type": "application/json", "Accept": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        e = self._endpoint
        try:
            answer = exchange("POST", e.scheme, e.host, e.port, e.path, body, headers, end=time.monotonic() + self.timeout_s, max_bytes=self.max_answer_bytes)
        except TooLarge:
            raise UserError(f"the chat server {self.url} sent more than {self.max_answer_bytes:,} bytes for one answer: check the address") from None
        except TimeoutError:
            raise _Transient(f"no full answer within {self.timeout_s:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise _Transient(getattr(error, "strerror", None) or str(error) or type(error).__name__) from error
        if answer.status in (408, 429) or answer.status >= 500:
            raise _Transient(f"HTTP {answer.status}")
        if answer.status != 200:
            raise UserError(f"the chat server {self.url} refused the request (HTTP {answer.status}, {self._said(answer.body)}): check address, model name "
                            f"{self.model!r} and the key in ${KEY}")
        return answer.body

    def _answer(self, raw: bytes) -> str:
        try:
            content = json.loads(raw)["choices"][0]["message"]["content"]
            if content is not None and not isinstance(content, str):
                raise TypeError("the content is no text")
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise UserError(f"the chat server {self.url} sent something else than a chat completion ({type(error).__name__}: {self._said(raw)}): check "
                            "the address") from error
        return content or ""

    def _said(self, raw: bytes) -> str:
        """The beginning of an answer, without the secrets of the request that it may quote."""
        query = self._endpoint.path.partition("?")[2]
        return _clip(hidden(raw.decode("utf-8", "replace"), os.environ.get(KEY, ""), query, *(value for _, value in parse_qsl(query))).encode())


def _clip(raw: bytes) -> str:
    return ascii(bytes(raw[:200]).decode("utf-8", "replace"))


class Local:
    """A model of its own in this process, greedy, through its chat template where it has one."""

    def __init__(self, model: str, max_tokens: int, dtype: str = "float32", device: str = "cpu", slots: int = 32):
        self.name, self.max_tokens = model, max_tokens
        self.model, self.tokenizer = load_model(model, dtype, device)
        self.limit = self.model.config.get_text_config().max_position_embeddings
        self.engine = HFEngine(self.model, self.tokenizer, max_slots=slots, max_length=self.limit)

    def __call__(self, messages: Sequence[str]) -> list[str]:
        prompts = [self.tokenizer.encode(self._render(m), add_special_tokens=False) for m in messages]
        longest = max(map(len, prompts), default=0)
        if longest + self.max_tokens > self.limit:
            raise UserError(f"a question of {longest} tokens and an answer of {self.max_tokens} are more than the {self.limit} that {self.name} can "
                            "read: shorten the trajectories, or use another model")
        order = [self.engine.submit(p, max_new_tokens=self.max_tokens, temperature=0.0) for p in prompts]
        texts = {}
        while self.engine.busy:
            for done in self.engine.step():
                texts[done.rid] = done.text
                self.engine.release(done.rid)
        return [texts[rid] for rid in order]

    def _render(self, message: str) -> str:
        if self.tokenizer.chat_template is None:
            return message
        return self.tokenizer.apply_chat_template([{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True)
