"""Token ids in, token ids and log-probs out: continuous batching over a slot-based key/value cache.

    engine = HFEngine(model, tokenizer, max_slots=96, max_length=1024)
    rid = engine.submit(prompt_ids, max_new_tokens=64, stop=("</search>",), temperature=1.0, seed=7)
    while engine.busy:
        for done in engine.step():
            ...                                    # done.ids, done.logprobs, done.text, done.reason
    engine.submit(prompt_ids + done.ids + observation_ids, max_new_tokens=64, resume=done.rid)   # prefills the observation only
    engine.sync(model)                             # before every rollout: re-link the weights, forget the cache, compare log-probs

How it works. The cache has `max_slots` rows. Running requests sit in rows 0..n-1, so that a decode step reads one contiguous view; finished
requests that wait for a tool are moved behind them and cost nothing. Equal prompts (the samples of a group) are prefilled once: their keys,
values and last logits are copied. The engine runs a second module over the trainer's own weight storage, with its own attention function,
and leaves the trainer's module alone. `common/vllm_engine.py` has a second engine with the same contract. Sampling uses temperature only, and nothing from `generation_config` but the EOS ids. A request's
tokens depend on its seed and not on what else is in the batch (up to rounding: another batch shape may change the last bits of a logit).
"""

import copy
import inspect
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.functional import embedding_bag, scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM

from common import UserError, ranks

PREFILL_TOKENS = 4096    # most tokens (padding included) in one prefill forward; bounds its attention mask
PROBE_TOKENS = 24
MIN_TEMPERATURE = 0.01   # vLLM silently raises a lower one to this
DECODED_IN_SCORE = 3     # `score` feeds its last tokens one by one, so that it also checks the decode path


def grown(capacity: int, length: int) -> int:
    """The next capacity of a cache that must hold `length` tokens: by a quarter at least, in multiples of 64."""
    return -(-max(length + 1, capacity * 5 // 4) // 64) * 64


def cache_name(model) -> str:
    """What the model's forward calls its cache: `past_key_values`, and `cache` from transformers 5.40 on."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def make_engine(name: str, model, tokenizer, *, max_slots: int, max_length: int):
    """The engine of `--engine`: "hf" or "vllm". `max_slots`: most requests that run at once, on all ranks together; `max_length`: most tokens
    of one sequence."""
    max_slots = -(-max_slots // ranks.world())             # a rank samples its share; what is more only queues
    if name == "hf":
        return HFEngine(model, tokenizer, max_slots=max_slots, max_length=max_length)
    from common.vllm_engine import VLLMEngine              # here, because vLLM is an environment of its own
    return VLLMEngine(model, tokenizer, max_slots=max_slots, max_length=max_length)


@dataclass
class Finished:
    rid: int
    ids: list[int]            # sampled ids as sampled, including the token that completed a stop string, or EOS
    logprobs: list[float]     # log softmax(logits / temperature)[id] in float32; temperature 0 (greedy): at temperature 1
    text: str                 # decoded sampled text without EOS, cut right after the stop string
    reason: str               # "stop" | "eos" | "length"
    overshoot: int            # characters of the last token beyond the stop string


@dataclass(eq=False)
class _Request:
    rid: int
    ids: list[int]            # the whole sequence: what was submitted, then what was sampled
    start: int                # number of submitted ids
    uniforms: np.ndarray      # [max_new_tokens] float64 in [0, 1): token t is drawn with uniforms[t]
    temperature: float
    stop: tuple[str, ...]
    state: str = "waiting"    # "waiting" | "running" | "kept" (finished, its slot may be resumed)
    row: int | None = None
    cached: int = 0           # leading ids whose keys and values are in the row
    prompt: bytes | None = None              # the ids first prefilled in this row, and the logits [vocab] after them: other requests
    prompt_logits: torch.Tensor | None = None     # with the same prompt copy both
    logprobs: list[float] = field(default_factory=list)
    tail: str = ""            # the last few characters sampled, from the piece table


def find_eos(model, tokenizer, given=None) -> frozenset[int]:
    """The EOS ids: `given`, else the first that names any of the model's generation_config, its config and the tokenizer."""
    sources = (getattr(model, "generation_config", None), model.config.get_text_config(), tokenizer)
    ids = given if given is not None else next((e for s in sources if (e := getattr(s, "eos_token_id", None)) is not None), ())
    return frozenset([ids] if isinstance(ids, int) else ids)


def checked(ids, max_new_tokens: int, stop, temperature: float, engine) -> tuple[list[int], tuple[str, ...]]:
    """Ids and stop strings of a request that `engine` can run; ValueError or UserError otherwise."""
    ids, stop = [int(i) for i in ids], (stop,) if isinstance(stop, str) else tuple(stop)
    if not ids or max_new_tokens < 1:
        raise ValueError(f"a request needs at least one id and max_new_tokens >= 1, got {len(ids)} ids and {max_new_tokens}")
    if min(ids) < 0 or max(ids) >= engine.vocab:
        raise ValueError(f"ids must be in 0..{engine.vocab - 1}, got {min(ids)}..{max(ids)}")
    if not (temperature == 0 or MIN_TEMPERATURE <= temperature < float("inf")) or "" in stop:
        raise ValueError(f"temperature must be 0 or at least {MIN_TEMPERATURE}, and stop strings not empty; got {temperature} and {stop}")
    if len(ids) + max_new_tokens > engine.max_length:
        raise UserError(f"{len(ids)} ids + {max_new_tokens} new tokens = {len(ids) + max_new_tokens} exceed the engine's max_length "
                        f"{engine.max_length}: shorten the prompt, lower the turn budget or raise max_length")
    return ids, stop


def resumable(kept: dict, rid: int, ids: list[int]):
    """The finished request `rid`, whose ids (all but the last sampled one, which was never fed to the model) begin `ids`; else ValueError."""
    if rid not in kept:
        raise ValueError(f"cannot resume request {rid}: it is not a finished request that is still kept")
    old = kept[rid]
    cached = len(old.ids) - 1
    if len(ids) <= cached or ids[:cached] != old.ids[:cached]:
        raise ValueError(f"cannot resume request {rid}: its {cached} cached ids are not a proper prefix of the {len(ids)} given")
    return old


class Texts:
    """The text of sampled ids, and when it ends a request: at EOS, at a stop string or at its last allowed token."""

    def __init__(self, tokenizer):
        self.tokenizer, self.pieces = tokenizer, {}
        special = set(getattr(tokenizer, "all_special_ids", ()))
        self.anchor = next(i for i in range(len(tokenizer)) if i not in special and (text := self.plain([i])) and "\ufffd" not in text
                           and self.plain([i, i]).startswith(text))
        self.anchor_text = self.plain([self.anchor])

    def append(self, request, token: int, logprob: float, max_new_tokens: int, eos_ids: frozenset[int]) -> Finished | None:
        """Add a sampled token to a request (its ids, start, logprobs, stop and tail); the result if that ends it."""
        request.ids.append(token)
        request.logprobs.append(logprob)
        done = lambda text, reason, overshoot=0: Finished(request.rid, request.ids[request.start:], request.logprobs, text, reason, overshoot)
        if token in eos_ids:
            return done(self.text(request.ids[request.start:-1]), "eos")
        if request.stop:
            piece = self.pieces.get(token)
            if piece is None:
                piece = self.pieces[token] = self.text([token])
            window = 4 * max(map(len, request.stop))       # 4: a character may be spread over as many tokens as it has bytes
            request.tail = tail = request.tail[-window:] + piece
            # the pieces only say when to look (a part of a character shows as U+FFFD in them); the text of all sampled ids decides
            if any(s in tail or (not s.isascii() and "\ufffd" in tail) for s in request.stop):
                text = self.text(request.ids[request.start:])
                if ends := [text.find(s) + len(s) for s in request.stop if s in text]:
                    return done(text[:min(ends)], "stop", len(text) - min(ends))
        return done(self.text(request.ids[request.start:]), "length") if len(request.logprobs) == max_new_tokens else None

    def plain(self, ids) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def text(self, ids) -> str:
        """Text of ids in the middle of a sequence: SentencePiece tokenizers drop a leading space at the beginning of one."""
        return self.plain([self.anchor, *ids])[len(self.anchor_text):]


def probe_ids(vocab: int) -> list[int]:
    return [(7919 * i * i + 104729 * i + 13) % vocab for i in range(PROBE_TOKENS)]


@torch.no_grad()
def plain_logprobs(model, ids: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probs of ids[1:] at `temperature`, from a forward pass of the trainer's model."""
    training, ids = model.training, torch.tensor([ids], device=model.device)
    model.eval()
    logprobs = (model(input_ids=ids, use_cache=False).logits[0, :-1].float() / temperature).log_softmax(-1)
    model.train(training)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()


def agreement(engine: list[float], plain: list[float], dtype) -> float:
    """Largest difference of two lists of log-probs. RuntimeError above 1e-3 (float32) or 0.5 (lower precision)."""
    gap = (torch.tensor(engine) - torch.tensor(plain)).abs().max().item()
    limit = 1e-3 if dtype == torch.float32 else 0.5
    if not gap <= limit:                                   # also when it is NaN
        raise RuntimeError(f"engine and model disagree: log-probs differ by up to {gap:.3g} on the probe, allowed {limit:g} for "
                           f"{dtype}. Call sync(model) after changing weights; if sync itself says this, the weights are broken "
                           "(NaN) or the model's attention is not supported")
    return gap


def broken_weights(bad: list[int], n: int) -> RuntimeError:
    return RuntimeError(f"the model returned NaN or infinite logits for {len(bad)} of {n} requests (ids {bad[:8]}): "
                        "the weights are broken, probably by the last update; stop and look at its gradient norm")


def _attend(module, query, key, value, attention_mask, scaling, slots, softcap=None, **_):
    """Attention for transformers' interface. query [B, heads, Q, D]; key, value [B, kv_heads, L, D]; mask [B, 1, group * Q, L], additive.

    The query heads that share a key head are folded into the query length, so keys and values are read once and never repeated.
    `softcap` (Gemma 2) bounds the scores, which torch's fused attention cannot."""
    batch, heads, length, dim = query.shape
    query = query.reshape(batch, key.shape[1], -1, dim)
    if slots.ragged is None and softcap is None:
        out = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    else:
        weights = torch.matmul(query * scaling, key.transpose(2, 3))
        if softcap is not None:
            weights = weights.div_(softcap).tanh_().mul_(softcap)
        weights = weights.add_(attention_mask).softmax(-1, dtype=torch.float32).to(value.dtype)
        out = torch.matmul(weights, value) if slots.ragged is None else slots.weighted_values(weights, module.layer_idx)
    return out.view(batch, heads, length, -1).transpose(1, 2), None


AttentionInterface.register("slots", _attend)


class _SlotCache:
    """Keys and values of all slots, per layer two tensors [rows, kv_heads, capacity, head_dim]; the model sees it as its cache.

    Before each forward the engine sets where new tokens are written (`rows` [B, 1], `at` [B, Q]) and what is read (`view`: rows, `length`).
    The last column is a bin for padding: it is written and never read."""

    def __init__(self, rows: int):
        self.n_rows, self.capacity, self.layers, self.ragged = rows, 0, {}, None

    def update(self, key, value, layer_idx, *_args, **_kwargs):
        if layer_idx not in self.layers:     # zeros, not empty: a masked weight of 0 times a NaN left in memory would be NaN
            self.layers[layer_idx] = [t.new_zeros(self.n_rows, t.shape[1], self.capacity, t.shape[3]) for t in (key, value)]
        keys, values = self.layers[layer_idx]
        keys[self.rows, :, self.at] = key.transpose(1, 2)
        values[self.rows, :, self.at] = value.transpose(1, 2)
        return keys[:, :, :self.length][self.view], values[:, :, :self.length][self.view]

    def plan_ragged(self, visible, first_row: int) -> None:
        """For a decode step on CPU: which attention weights count (`visible` [n, kv_heads, group, L]) and their value-table rows."""
        n, kv_heads, _, length = visible.shape
        flat = visible.reshape(-1).nonzero()[:, 0]
        first = (first_row * kv_heads + torch.arange(n * kv_heads)).view(n, kv_heads, 1, 1) * self.capacity
        index = (first + torch.arange(length)).expand(visible.shape).reshape(-1)[flat].int()
        counts = visible.sum(-1).view(-1)
        self.ragged = flat, index, (counts.cumsum(0) - counts).int()

    def weighted_values(self, weights, layer_idx):
        """weights @ values over the visible positions only. A weighted sum of table rows takes about half the time of a batched product of
        such thin matrices, and rows shorter than the longest cost less."""
        flat, index, offsets = self.ragged
        table = self.layers[layer_idx][1].flatten(0, 2)    # [rows * kv_heads * capacity, head_dim], a view
        return embedding_bag(index, table, offsets, mode="sum", per_sample_weights=weights.view(-1)[flat])

    def reserve(self, length: int) -> None:
        """Grow in steps, so that short runs stay small."""
        if length < self.capacity:
            return
        self.capacity = grown(self.capacity, length)
        for tensors in self.layers.values():
            for i, old in enumerate(tensors):
                tensors[i] = old.new_zeros(*old.shape[:2], self.capacity, old.shape[3])
                tensors[i][:, :, :old.shape[2]] = old

    def copy_rows(self, source: list[int], target: list[int], length: int) -> None:
        """Copy the first `length` positions of rows; any permutation, since the right side is gathered first."""
        for tensors in self.layers.values():
            for t in tensors:
                t[target, :, :length] = t[source, :, :length]


class HFEngine:
    """Continuous batching for any `AutoModelForCausalLM` with rotary positions and full attention. See the module's docstring.

    `max_slots`: rows of the cache, the largest decode batch. `max_length`: most tokens of one sequence. `eos_ids`: default from the model's
    generation_config, else its config, else the tokenizer. `counters`: totals since the last sync, so of one step of a run."""

    def __init__(self, model, tokenizer, *, max_slots: int, max_length: int, eos_ids=None):
        if max_slots < 1 or max_length < 2:
            raise ValueError(f"max_slots must be at least 1 and max_length at least 2, got {max_slots} and {max_length}")
        config = model.config.get_text_config()
        window, layer_types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None) or ["sliding_attention"]
        if window and window < max_length and "sliding_attention" in layer_types:
            raise UserError(f"{config.model_type} attends only to the last {window} tokens; HFEngine has full attention only: "
                            f"set max_length (now {max_length}) to at most {window}")
        self.eos_ids = find_eos(model, tokenizer, eos_ids)
        self.texts, self.max_slots, self.max_length = Texts(tokenizer), max_slots, max_length
        self.vocab = config.vocab_size
        self._kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self._group = config.num_attention_heads // self._kv_heads
        # transformers 5.40 renames this argument; nothing else here depends on the name
        self._cache_name = cache_name(model)
        self.model = self.device = self.dtype = None
        self._broken = False                               # NaN may be in the cache
        self._next_rid = 0
        self._requests: dict[int, _Request] = {}           # everything not yet released
        self._waiting: list[_Request] = []
        self._kept: dict[int, _Request] = {}               # finished, oldest first; row None once evicted
        self._rows: list[_Request | None] = [None] * max_slots
        self._n = 0                                        # rows 0.._n-1 are decoded
        self._moved = False                                # a request left the running rows: tidy up before the next decode
        self.sync(model)

    # ---------------------------------------------------------------- requests

    @property
    def busy(self) -> bool:
        """Whether something is waiting or running."""
        return len(self._requests) > len(self._kept)

    def submit(self, ids, *, max_new_tokens: int, stop=(), temperature: float = 1.0, seed: int = 0, resume: int | None = None) -> int:
        """Queue a request and return its id. `ids`: the whole sequence so far. `resume`: id of a finished request that was not released;
        this request takes over its slot and only what follows its cached ids is prefilled (everything, if the slot was evicted meanwhile).
        The sampled ids of `resume` but the last are cached."""
        ids, stop = checked(ids, max_new_tokens, stop, temperature, self)
        uniforms = np.random.Generator(np.random.PCG64(seed)).random(max_new_tokens)
        request = _Request(self._next_rid, ids, len(ids), uniforms, float(temperature), stop)
        if resume is not None:
            old = resumable(self._kept, resume, ids)
            del self._kept[resume], self._requests[resume]
            if old.row is not None:
                request.row, request.cached, request.prompt, request.prompt_logits = old.row, old.cached, old.prompt, old.prompt_logits
                self._rows[old.row] = request
        self._next_rid += 1
        self._requests[request.rid] = request
        self._waiting.append(request)
        return request.rid

    def release(self, rid: int) -> None:
        """Forget a request and free its slot: a finished one, or one to give up. A finished request keeps its slot until then or resume."""
        if rid not in self._requests:
            raise ValueError(f"cannot release request {rid}: unknown, released before, or resumed")
        request = self._requests.pop(rid)
        if request.state == "waiting":
            self._waiting.remove(request)
        self._kept.pop(rid, None)
        self._vacate(request)

    def _vacate(self, request) -> None:
        if request.row is not None:
            self._rows[request.row] = None
            self._moved |= request.row < self._n
        request.row = request.prompt = request.prompt_logits = None

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Admit waiting requests (prefill, first token), then decode one token for every running request; returns those that finished."""
        done = []
        if self._waiting or self._moved:
            self._admit(done)
        batch = self._rows[:self._n]
        if any(r.state == "running" for r in batch):       # rows that finished just now are decoded once more, unread
            ids, positions = np.array([[r.ids[-1]] for r in batch]), np.array([[len(r.ids) - 1] for r in batch])
            logits = self._forward(ids, positions, range(self._n), slice(0, self._n), last=1)[:, 0]
            running = [i for i, r in enumerate(batch) if r.state == "running"]
            for i in running:
                batch[i].cached = len(batch[i].ids)
            self._sample([batch[i] for i in running], logits if len(running) == len(batch) else logits[running], done)
            self.counters["decode_steps"] += 1
        return done

    # ---------------------------------------------------------------- slots and prefill

    def _admit(self, done) -> None:
        """Give waiting requests a slot, prefill what is not cached, sample their first token. Kept slots are evicted, oldest first, but
        only while less than half of all slots would run: a tool usually answers sooner than an eviction pays."""
        admitted = [r for r in self._waiting if r.row is not None]      # they resume their own slot
        fresh = [r for r in self._waiting if r.row is None]
        running = len(admitted) + sum(r is not None and r.state == "running" for r in self._rows)
        free = self._rows.count(None)
        evictable = [r for r in self._kept.values() if r.row is not None]
        while free < len(fresh) and evictable and 2 * (running + free) < self.max_slots:
            self._vacate(evictable.pop(0))
            self.counters["evictions"] += 1
            free += 1
        new, self._waiting = fresh[:free], fresh[free:]
        admitted += new
        for request in admitted:
            request.state = "running"
        self._place(new)

        known = {r.prompt: r for r in self._rows if r is not None and r.prompt}
        prefill, copies = [r for r in admitted if r.cached], []
        self.counters["cached_tokens"] += sum(r.cached for r in prefill)
        for request in new:
            request.prompt = np.array(request.ids).tobytes()
            source = known.setdefault(request.prompt, request)
            if source is request:
                prefill.append(request)
            else:
                copies.append((request, source))
        last = {}                                          # request -> logits [vocab] after its last id
        for bucket in self._buckets(prefill):
            self._prefill(bucket, last)
        if copies:
            self._cache.copy_rows([s.row for _, s in copies], [r.row for r, _ in copies], max(len(r.ids) for r, _ in copies))
        for request, source in copies:
            request.prompt_logits = last[request] = source.prompt_logits
            request.cached = len(request.ids)
            self.counters["shared_prefill_tokens"] += request.cached
        if admitted:
            self._sample(admitted, torch.stack([last[r] for r in admitted]), done)

    def _place(self, new) -> None:
        """Give rows to new requests and move others so that exactly the running ones are in rows 0..n-1."""
        rows = self._rows
        running = [r for r in rows if r is not None and r.state == "running"]
        self._n = n = len(running) + len(new)
        places = [i for i in range(n) if rows[i] is None or rows[i].state != "running"]
        behind = [i for i in range(n, self.max_slots) if rows[i] is None or rows[i].state == "running"]
        inward = [r for r in running if r.row >= n]
        outward = [rows[i] for i in places if rows[i] is not None]
        moves = list(zip(inward, places)) + list(zip(outward, behind))
        if moves:
            source = [r.row for r, _ in moves]
            self._cache.copy_rows(source, [i for _, i in moves], max(r.cached for r, _ in moves))
            for i in source:
                rows[i] = None
        for request, i in moves + list(zip(new, places[len(inward):])):
            request.row, rows[i] = i, request
        self._moved = False

    @staticmethod
    def _buckets(requests):
        """Split into batches of similar new length: a batch ends when its padding would outgrow a quarter of its tokens (plus 64, about
        what one more forward costs) or at PREFILL_TOKENS."""
        bucket, real = [], 0
        for request in sorted(requests, key=lambda r: r.cached - len(r.ids)):     # longest new part first
            new = len(request.ids) - request.cached
            if bucket:
                padded = (len(bucket[0].ids) - bucket[0].cached) * (len(bucket) + 1)
                if padded > PREFILL_TOKENS or padded - real - new > 64 + (real + new) // 4:
                    yield bucket
                    bucket, real = [], 0
            bucket.append(request)
            real += new
        if bucket:
            yield bucket

    def _prefill(self, requests, last) -> None:
        width = max(len(r.ids) - r.cached for r in requests)
        ids, positions = np.zeros((len(requests), width), np.int64), np.full((len(requests), width), -1)
        for i, r in enumerate(requests):                   # padding in front: the last column is the last token of every row
            new = len(r.ids) - r.cached
            ids[i, width - new:] = r.ids[r.cached:]
            positions[i, width - new:] = range(r.cached, len(r.ids))
            self.counters["prefilled_tokens"] += new
            r.cached = len(r.ids)
        rows = [r.row for r in requests]
        logits = self._forward(ids, positions, rows, torch.tensor(rows, device=self.device), last=1)[:, 0]
        for r, row in zip(requests, logits):
            last[r] = row
            if r.prompt_logits is None:
                r.prompt_logits = row

    def _forward(self, ids, positions, rows, view, last: int):
        """ids, positions: [B, Q] arrays, position -1 for padding; rows: where they are written; view: what is read (slice or index tensor).
        Returns the logits [B, last, vocab] of the last columns (0: of all)."""
        cache, length = self._cache, int(positions.max()) + 1
        cache.reserve(length)
        ids, positions = torch.from_numpy(ids).to(self.device), torch.from_numpy(positions).to(self.device)
        cache.rows, cache.view, cache.length = torch.tensor(rows, device=self.device)[:, None], view, length
        cache.at = torch.where(positions < 0, cache.capacity - 1, positions)
        positions = positions.clamp(min=0)
        visible = torch.arange(length, device=self.device) <= positions[:, :, None]           # [B, Q, L]
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=self.device).masked_fill_(~visible, float("-inf"))
        batch, width = ids.shape
        mask = mask[:, None, None].expand(batch, 1, self._group, width, length).reshape(batch, 1, -1, length)
        cache.ragged = None
        if isinstance(view, slice) and self.device.type == "cpu" and self.dtype == torch.float32:
            cache.plan_ragged(visible[:, None].expand(batch, self._kv_heads, self._group, length), view.start)
        # a 4-D mask is passed through untouched: transformers builds none of its own
        return self.model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=last,
                          slots=cache, **{self._cache_name: cache}).logits

    # ---------------------------------------------------------------- sampling and stopping

    def _sample(self, requests, logits, done) -> None:
        """Draw one token per request by the inverse of its cumulative distribution, log it and see whether it ends the request."""
        temperature = torch.tensor([[r.temperature or 1.0] for r in requests], device=self.device)
        uniform = torch.tensor([[r.uniforms[len(r.logprobs)]] for r in requests], dtype=torch.float64, device=self.device)
        probs = (logits.float() / temperature).softmax(-1)
        greedy = [not r.temperature for r in requests]
        if any(greedy):
            ids = best = logits.argmax(-1, keepdim=True)
        if not all(greedy):
            cumulative = probs.cumsum(-1, dtype=torch.float64)
            # the first id whose cumulative exceeds u, so never one of probability 0
            ids = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True).clamp_(max=self.vocab - 1)
            if any(greedy):
                ids = torch.where(torch.tensor(greedy, device=self.device)[:, None], best, ids)
        chosen = torch.cat((ids.double(), probs.gather(1, ids).log().double()), 1).tolist()   # the one synchronisation of a step
        if bad := [r.rid for r, (_, p) in zip(requests, chosen) if not p > float("-inf")]:    # one NaN or inf makes its whole row NaN
            self._broken = True
            raise broken_weights(bad, len(requests))
        self.counters["sampled_tokens"] += len(requests)
        for request, (token, logprob) in zip(requests, chosen):
            self._append(request, int(token), logprob, done)

    def _append(self, request, token: int, logprob: float, done) -> None:
        if finished := self.texts.append(request, token, logprob, len(request.uniforms), self.eos_ids):
            request.state = "kept"
            self._kept[request.rid] = request
            self._moved = True
            done.append(finished)

    # ---------------------------------------------------------------- weights

    @torch.no_grad()
    def sync(self, model) -> None:
        """Take over the weights of `model`: by sharing their storage or, where they are sharded, as a gathered copy. Kept slots are dropped
        (their requests can still be resumed, by a full prefill). Raises RuntimeError if engine and model then disagree on a probe."""
        if self.busy:
            raise RuntimeError("sync while requests are waiting or running: finish or release them first")
        self.counters = dict(sampled_tokens=0, prefilled_tokens=0, shared_prefill_tokens=0, cached_tokens=0, decode_steps=0, evictions=0)
        if self.model is None:                             # built without memory, on the meta device
            with torch.device("meta"):
                self.model = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), attn_implementation="slots").eval()
        own, whole = self.model.state_dict(), {}
        ids = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
        tied = {}                                          # gathered tensors; a tied one has several names
        for name, t in model.state_dict().items():
            if hasattr(t, "full_tensor"):                  # one at a time, into the copy of the last sync
                same = ids.get(name, name)
                if same not in tied:
                    tied[same] = t.full_tensor() if own[name].is_meta else own[name].copy_(t.full_tensor())
                t = tied[same]
            whole[name] = t
        self.model.load_state_dict(whole, assign=True)
        for name, buffer in model.named_buffers():         # rotary frequencies are in no state dict
            owner, _, leaf = name.rpartition(".")
            self.model.get_submodule(owner)._buffers[leaf] = buffer
        weight = next(self.model.parameters())
        for request in self._kept.values():
            self._vacate(request)
        if self._broken or (self.device, self.dtype) != (weight.device, weight.dtype):
            self.device, self.dtype, self._broken = weight.device, weight.dtype, False
            self._cache = _SlotCache(self.max_slots + 1)   # one more row for `score`
        self.probe(model)

    @torch.inference_mode()
    def score(self, ids) -> list[float]:
        """Log-probs of ids[1:] at temperature 1 through the engine's path: one prefill, then the last few ids fed one by one."""
        ids, row, out = np.asarray(ids)[None], self.max_slots, []
        first = max(1, ids.shape[1] - DECODED_IN_SCORE)
        for a, b in [(0, first), *((i, i + 1) for i in range(first, ids.shape[1] - 1))]:
            view = slice(row, row + 1) if a else torch.tensor([row], device=self.device)
            logprobs = self._forward(ids[:, a:b].copy(), np.arange(a, b)[None], [row], view, last=0)[0].float().log_softmax(-1)
            targets = torch.from_numpy(ids[0, a + 1:b + 1].copy()).to(self.device)
            out += logprobs[:len(targets)].gather(1, targets[:, None])[:, 0].tolist()
        return out

    def probe(self, model) -> float:
        """Largest difference between the log-probs of a fixed sequence from the engine and from a forward pass of `model`.
        Raises RuntimeError above 1e-3 (float32) or 0.5 (lower precision): stale weights, or a model whose attention this engine lacks."""
        ids = probe_ids(self.vocab)
        return agreement(self.score(ids), plain_logprobs(model, ids), self.dtype)
