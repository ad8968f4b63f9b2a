"""HFEngine against plain forward passes, and what a request may run into: stops, EOS, budgets, eviction, broken weights."""

import copy
import random

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from common import UserError
from common.engine import HFEngine

VOCAB = 60
SHAPE = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=512, eos_token_id=None, bos_token_id=None, pad_token_id=None, initializer_range=0.3)


def make_model(family="qwen2", seed=0, **changes):
    torch.manual_seed(seed)
    config, cls = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM),
                   "llama": (LlamaConfig, LlamaForCausalLM), "mistral": (MistralConfig, MistralForCausalLM),
                   "gemma2": (Gemma2Config, Gemma2ForCausalLM)}[family]
    more = {"qwen2": dict(tie_word_embeddings=True), "qwen3": dict(head_dim=16), "llama": {}, "mistral": {},
            "gemma2": dict(head_dim=16, query_pre_attn_scalar=16, attn_logit_softcapping=1.0, sliding_window=200)}[family]
    model = cls(config(**{**SHAPE, **more, **changes})).eval()
    model.set_attn_implementation("eager" if family == "gemma2" else "sdpa")   # as load_model chooses
    return model


def make_tokenizer(pieces=None, decoder=None):
    pieces = pieces or [chr(ord("A") + i) for i in range(VOCAB)]
    core = Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token=pieces[0]))
    core.decoder = decoder or decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def make_engine(model=None, tokenizer=None, max_slots=4, max_length=200, **kwargs):
    return HFEngine(model or make_model(), tokenizer or make_tokenizer(), max_slots=max_slots, max_length=max_length, **kwargs)


def prompt(seed, length):
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def drain(engine, keep=False):
    out = {}
    while engine.busy:
        for done in engine.step():
            out[done.rid] = done
            if not keep:
                engine.release(done.rid)
    return out


def plain_logprobs(model, ids, temperature=1.0):
    """log softmax(logits / temperature) of ids[1:] from the model's own forward pass."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def assert_parity(model, ids, done, temperature, atol=2e-5):
    want = plain_logprobs(model, ids + done.ids, temperature or 1.0)[-len(done.ids):]
    torch.testing.assert_close(torch.tensor(done.logprobs), want, atol=atol, rtol=0)


def play(engine, model, jobs, turns=3, check=True, order=None):
    """Run jobs [(ids, new, temperature, seed)] over several turns; a finished one waits a few steps for its 'tool', then resumes with an
    observation. Returns {(job, turn): Finished} and the number of ids submitted; log-probs are compared with a plain forward pass."""
    rng, waiting_for_tool, owner, results, submitted = random.Random(order), [], {}, {}, 0
    for j, (ids, new, temperature, seed) in enumerate(jobs):
        owner[engine.submit(ids, max_new_tokens=new, temperature=temperature, seed=seed)] = (j, 0, ids)
        submitted += len(ids)
    while engine.busy or waiting_for_tool:
        for done in engine.step():
            j, turn, ids = owner[done.rid]
            results[j, turn] = done
            if check:
                assert_parity(model, ids, done, jobs[j][2])
            if turn + 1 < turns:
                waiting_for_tool.append((rng.randint(0, 6), done, j, turn, ids))
            else:
                engine.release(done.rid)
        rows = engine._rows[:engine._n]
        assert all(r.state != "waiting" for r in rows if r) and all(r.state != "running" for r in engine._rows[engine._n:] if r)
        later = []
        for wait, done, j, turn, ids in waiting_for_tool:
            if wait:
                later.append((wait - 1, done, j, turn, ids))
                continue
            ids = ids + done.ids + prompt(1000 + 10 * j + turn, 1 + (3 * j + turn) % 7)
            _, new, temperature, seed = jobs[j]
            rid = engine.submit(ids, max_new_tokens=new, temperature=temperature, seed=seed + 1000 * (turn + 1), resume=done.rid)
            owner[rid] = (j, turn + 1, ids)
            submitted += len(ids)
        waiting_for_tool = later
    return results, submitted


JOBS = [(prompt(j % 4, (3, 17, 8, 30)[j % 4]), 2 + 3 * j % 8, (1.0, 0.6, 0.0)[j % 3], j) for j in range(10)]


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "gemma2"])
@pytest.mark.parametrize("max_slots", [3, 16])
def test_logprobs_equal_a_plain_forward_pass(family, max_slots):
    """Ragged batches, shared prompts, three turns with observations, three temperatures; with 3 slots also evictions."""
    model = make_model(family)
    engine = make_engine(model, max_slots=max_slots)
    results, submitted = play(engine, model, JOBS)
    assert len(results) == 30
    count = engine.counters
    assert count["sampled_tokens"] == sum(len(d.ids) for d in results.values()) == sum(len(d.logprobs) for d in results.values())
    assert count["prefilled_tokens"] + count["shared_prefill_tokens"] + count["cached_tokens"] == submitted
    assert (count["evictions"] > 0) == (max_slots == 3)
    assert count["cached_tokens"] > 0 and (max_slots == 3 or count["shared_prefill_tokens"] > 0)
    assert not engine._requests and engine._rows == [None] * max_slots


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_bfloat16(family):
    model = make_model(family, initializer_range=0.05).bfloat16()
    engine = make_engine(model)
    ids = prompt(1, 20)
    engine.submit(ids, max_new_tokens=10)
    (done,) = drain(engine).values()
    assert_parity(model, ids, done, 1.0, atol=0.1)


def test_capped_attention_scores():
    """Gemma 2, on a step's own path on a CPU and on that of a prefill or a GPU; the probe sees a trainer that leaves the cap out."""
    model, ids = make_model("gemma2", initializer_range=0.6), prompt(3, 40)
    engine = make_engine(model)
    uncapped = copy.deepcopy(model)
    uncapped.set_attn_implementation("sdpa")
    assert (plain_logprobs(uncapped, ids) - plain_logprobs(model, ids)).abs().max() > 0.1
    with pytest.raises(RuntimeError, match="disagree"):
        engine.probe(uncapped)
    engine._cache.plan_ragged = lambda *_: None
    torch.testing.assert_close(torch.tensor(engine.score(ids)), plain_logprobs(model, ids), atol=1e-5, rtol=0)
    with pytest.raises(UserError, match="gemma2 attends only to the last 64 tokens.*set max_length .now 200. to at most 64"):
        make_engine(make_model("gemma2", sliding_window=64))


def test_score_equals_a_plain_forward_pass():
    model = make_model("qwen3")
    engine = make_engine(model)
    for length in (1, 2, 9, 40):
        ids = prompt(length, length)
        torch.testing.assert_close(torch.tensor(engine.score(ids)), plain_logprobs(model, ids), atol=1e-5, rtol=0)


def test_samples_follow_the_softmax_at_the_temperature():
    model, n = make_model(initializer_range=0.1), 4000
    engine = make_engine(model, max_slots=500)
    for seed in range(n):
        engine.submit([5, 7, 9], max_new_tokens=1, temperature=0.6, seed=seed)
    counts = np.bincount([d.ids[0] for d in drain(engine).values()], minlength=VOCAB)
    with torch.no_grad():
        p = (model(input_ids=torch.tensor([[5, 7, 9]])).logits[0, -1].double() / 0.6).softmax(-1).numpy()
    chi2 = ((counts - n * p) ** 2 / (n * p)).sum()
    assert chi2 < 59 + 5 * np.sqrt(2 * 59)                  # 59 degrees of freedom, five standard deviations
    assert engine.counters["prefilled_tokens"] + engine.counters["shared_prefill_tokens"] == 3 * n


def test_greedy_takes_the_argmax():
    model = make_model()
    engine = make_engine(model)
    ids = prompt(3, 9)
    engine.submit(ids, max_new_tokens=6, temperature=0)
    (done,) = drain(engine).values()
    for i, token in enumerate(done.ids):
        with torch.no_grad():
            assert model(input_ids=torch.tensor([ids + done.ids[:i]])).logits[0, -1].argmax() == token


def test_same_seed_same_ids_whatever_else_runs():
    model = make_model()
    alone = {}
    for j, (ids, new, temperature, seed) in enumerate(JOBS):
        engine = make_engine(model, max_slots=1)
        engine.submit(ids, max_new_tokens=new, temperature=temperature, seed=seed)
        alone[j, 0] = drain(engine)[0].ids
    for order, max_slots in ((0, 3), (1, 16)):
        together, _ = play(make_engine(model, max_slots=max_slots), model, JOBS, turns=1, check=False, order=order)
        assert {k: d.ids for k, d in together.items()} == alone


def test_same_calls_give_the_same_bits():
    model = make_model()
    (a, _), (b, _) = (play(make_engine(model, max_slots=3), model, JOBS, check=False, order=5) for _ in range(2))
    assert {k: (d.ids, d.logprobs) for k, d in a.items()} == {k: (d.ids, d.logprobs) for k, d in b.items()}


def test_a_group_shares_its_prompt():
    model, ids = make_model(), prompt(9, 40)
    shared, separate = make_engine(model, max_slots=8), make_engine(model, max_slots=8)
    for seed in range(8):
        shared.submit(ids, max_new_tokens=12, seed=seed)
    a = [d.ids for _, d in sorted(drain(shared).items())]
    b = []
    for seed in range(8):
        separate.submit(ids, max_new_tokens=12, seed=seed)
        b += [d.ids for d in drain(separate).values()]
    assert a == b and len(set(map(tuple, a))) > 1
    assert (shared.counters["prefilled_tokens"], shared.counters["shared_prefill_tokens"]) == (40, 280)
    assert (separate.counters["prefilled_tokens"], separate.counters["shared_prefill_tokens"]) == (320, 0)


def test_late_members_of_a_group_share_a_prompt_that_is_still_in_a_slot():
    engine, ids = make_engine(max_slots=2), prompt(9, 40)
    for seed in range(6):
        engine.submit(ids, max_new_tokens=3 + seed, seed=seed)     # ends differ, so that one is always alive
    drain(engine)
    assert engine.counters["prefilled_tokens"] == 40


# -------------------------------------------------------------------- stops: the model is replaced by a script

def follow(engine, script, start, monkeypatch):
    """Make the engine sample `script` after `start` prompt ids."""
    def forward(ids, positions, rows, view, last):
        logits = torch.full((len(ids), 1, VOCAB), -50.0)
        for row, position in zip(logits, positions[:, -1]):
            row[0, script[min(position + 1 - start, len(script) - 1)]] = 50.0
        return logits
    monkeypatch.setattr(engine, "_forward", forward)


def byte_level(data: bytes) -> str:
    return "".join(bytes_to_unicode()[b] for b in data)


PIECES = ["a", "b", " ", "</", "se", "arch", ">", ">x", "</s", "ea", "rch>\n\n", "</search>", "yz</search>tail", "<", "/", "s", "e", "!",
          "stop!"]
PIECES += [f"[{i}]" for i in range(len(PIECES), VOCAB)]
BYTES = [byte_level(b) for b in (b"a", b"b", b" ", b">", "é".encode()[:1], "é".encode()[1:], "→".encode()[:2], "→".encode()[2:],
                                  "→".encode()[2:] + b"x", b"<", "→>".encode(), b"\xff")]
BYTES += [f"[{i}]" for i in range(len(BYTES), VOCAB)]
SENTENCE = ["a", "▁a", "▁stop", "▁", "<0x3E>", "<0xE2>", "<0x86>", "<0x92>", "stop"] + [f"[{i}]" for i in range(9, VOCAB)]
SP_DECODER = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
WORDS, BYTE, SP = (PIECES, None), (BYTES, decoders.ByteLevel()), (SENTENCE, SP_DECODER)


@pytest.mark.parametrize("tokenizer, script, stop, used, text, overshoot", [
    (WORDS, [0, 3, 4, 5, 6, 1], "</search>", 5, "a</search>", 0),                       # split over tokens
    (WORDS, [0, 8, 9, 10, 1], "</search>", 4, "a</search>", 2),                         # completed inside a token
    (WORDS, [0, 3, 4, 5, 7, 1], "</search>", 5, "a</search>", 1),
    (WORDS, [12, 1], "</search>", 1, "yz</search>", 4),                                 # all inside one token, the first
    (WORDS, [0, 13, 13, 14, 15, 16, 0, 11, 1], "</search>", 8, "a<</sea</search>", 0),  # a near miss before it
    (WORDS, [0, 18, 1], "stop", 2, "astop", 1),
    (WORDS, [17, 0], "!", 1, "!", 0),
    (BYTE, [0, 4, 5, 1], "é", 3, "aé", 0),                                              # one character over two tokens
    (BYTE, [0, 6, 7, 3, 1], "→>", 4, "a→>", 0),
    (BYTE, [0, 6, 8, 1], "→", 3, "a→", 1),
    (BYTE, [6, 11, 10, 0], "→>", 3, "\ufffd\ufffd→>", 0),                               # after bytes that are no text
    (BYTE, [0, 11, 3, 0], ">", 3, "a\ufffd>", 0),
    (SP, [2, 0], " stop", 1, " stop", 0),                                               # SentencePiece: the leading space stays
    (SP, [0, 3, 8, 0], " stop", 3, "a stop", 0),
    (SP, [0, 5, 6, 7, 4, 0], "→>", 5, "a→>", 0),                                        # byte fallback
])
def test_stop_strings(tokenizer, script, stop, used, text, overshoot, monkeypatch):
    engine = make_engine(tokenizer=make_tokenizer(*tokenizer))
    follow(engine, script, 2, monkeypatch)
    engine.submit([0, 1], max_new_tokens=len(script), stop=("never", stop))
    (done,) = drain(engine).values()
    assert (done.ids, done.text, done.reason, done.overshoot) == (script[:used], text, "stop", overshoot)
    for budget, reason in ((used - 1, "length"), (used, "stop"), (used + 1, "stop")):      # a stop at the last allowed token counts
        if budget:
            engine.submit([0, 1], max_new_tokens=budget, stop=stop)
            (done,) = drain(engine).values()
            assert done.reason == reason and done.ids == script[:min(budget, used)]


def test_a_stop_string_in_the_prompt_or_across_its_end_does_not_count(monkeypatch):
    engine = make_engine(tokenizer=make_tokenizer(PIECES))
    follow(engine, [5, 6, 0, 1], 3, monkeypatch)
    engine.submit([11, 3, 4], max_new_tokens=4, stop=("</search>",))
    (done,) = drain(engine).values()
    assert (done.reason, done.text) == ("length", "arch>ab")


def test_the_earliest_of_several_stops_wins(monkeypatch):
    engine = make_engine(tokenizer=make_tokenizer(PIECES))
    follow(engine, [0, 12], 1, monkeypatch)
    engine.submit([0], max_new_tokens=5, stop=("tail", "</search>", "z<"))
    (done,) = drain(engine).values()
    assert (done.text, done.overshoot) == ("ayz<", 12)


def test_text_is_decoded_only_when_a_stop_is_in_sight(monkeypatch):
    engine, calls = make_engine(tokenizer=make_tokenizer(PIECES)), []
    plain = engine.texts.plain
    monkeypatch.setattr(engine.texts, "plain", lambda ids: calls.append(len(ids)) or plain(ids))
    engine.submit([0], max_new_tokens=150, stop=("no such text",), seed=1)
    drain(engine)
    assert len([c for c in calls if c > 2]) == 1            # the final text; the others fill the table of pieces


def test_eos_is_kept_and_wins_and_pad_may_equal_it(monkeypatch):
    model = make_model(eos_token_id=[6, 9], pad_token_id=6)
    engine = make_engine(model, make_tokenizer(PIECES))
    assert engine.eos_ids == {6, 9}
    follow(engine, [0, 3, 6, 1], 2, monkeypatch)
    engine.submit([6, 6], max_new_tokens=8, stop=(">",))
    (done,) = drain(engine).values()
    assert (done.ids, done.text, done.reason, len(done.logprobs)) == ([0, 3, 6], "a</", "eos", 3)


@pytest.mark.parametrize("generation, config, tokenizer, given, want", [
    ([1, 2], 3, "b", None, {1, 2}), (None, 3, "b", None, {3}), (None, None, "b", None, {1}), (None, None, None, None, set()),
    ([1, 2], 3, "b", 5, {5}), ([1, 2], 3, "b", (), set())])
def test_eos_ids_come_from_the_first_place_that_names_them(generation, config, tokenizer, given, want):
    model, words = make_model(), make_tokenizer(PIECES)
    model.generation_config.eos_token_id, model.config.eos_token_id = generation, config
    if tokenizer:
        words.eos_token = tokenizer
    assert make_engine(model, words, eos_ids=given).eos_ids == want


def test_generation_config_is_ignored():
    model = make_model()
    before = make_engine(model)
    model.generation_config.update(top_k=1, top_p=0.1, temperature=0.1, repetition_penalty=5.0, do_sample=False)
    after = make_engine(model)
    for engine in (before, after):
        engine.submit([1, 2, 3], max_new_tokens=20, seed=3)
    assert [d.ids for d in drain(before).values()] == [d.ids for d in drain(after).values()]


# -------------------------------------------------------------------- budgets and wrong use

@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_max_length_is_exact(extra):
    engine = make_engine(max_length=30)
    if extra == 1:
        with pytest.raises(UserError, match=r"21 ids \+ 10 new tokens = 31 exceed the engine's max_length 30"):
            engine.submit(prompt(0, 20 + extra), max_new_tokens=10)
        assert not engine.busy
        return
    engine.submit(prompt(0, 20 + extra), max_new_tokens=10)
    (done,) = drain(engine).values()
    assert len(done.ids) == 10 and done.reason == "length"


@pytest.mark.parametrize("ids, kwargs, message", [
    ([], dict(max_new_tokens=4), "0 ids"), ([1], dict(max_new_tokens=0), "max_new_tokens >= 1"), ([VOCAB], dict(max_new_tokens=1), "0..59"),
    ([-1], dict(max_new_tokens=1), "0..59"), ([1], dict(max_new_tokens=1, temperature=-1), "temperature"),
    ([1], dict(max_new_tokens=1, temperature=float("nan")), "temperature"), ([1], dict(max_new_tokens=1, stop=("",)), "stop"),
    ([1], dict(max_new_tokens=1, resume=77), "77")])
def test_wrong_requests(ids, kwargs, message):
    engine = make_engine()
    with pytest.raises(ValueError, match=message):
        engine.submit(ids, **kwargs)
    assert not engine.busy


def test_resume_and_release_are_checked():
    engine = make_engine()
    ids = prompt(0, 5)
    first = engine.submit(ids, max_new_tokens=3)
    with pytest.raises(ValueError, match="not a finished request"):
        engine.submit(ids, max_new_tokens=3, resume=first)
    done = drain(engine, keep=True)[first]
    with pytest.raises(ValueError, match="7 cached ids are not a proper prefix of the 7 given"):
        engine.submit(ids + done.ids[:2], max_new_tokens=3, resume=first)
    with pytest.raises(ValueError, match="not a proper prefix"):
        engine.submit([(ids[0] + 1) % VOCAB] + ids[1:] + done.ids, max_new_tokens=3, resume=first)
    second = engine.submit(ids + done.ids, max_new_tokens=3, resume=first)       # nothing new but the last sampled id
    with pytest.raises(ValueError, match="cannot release"):
        engine.release(first)
    drain(engine)
    assert engine.counters["cached_tokens"] == 7 and engine.counters["prefilled_tokens"] == 6
    with pytest.raises(ValueError, match="cannot release"):
        engine.release(second)


def test_release_gives_up_waiting_and_running_requests():
    engine = make_engine(max_slots=2)
    rids = [engine.submit(prompt(i, 6), max_new_tokens=9, seed=i) for i in range(4)]
    engine.step()
    engine.release(rids[0])
    engine.release(rids[3])
    assert set(drain(engine)) == {rids[1], rids[2]} and not engine.busy and engine.step() == []


def test_kept_slots_are_evicted_oldest_first_and_resume_all_the_same():
    model = make_model()
    engine = make_engine(model, max_slots=3)
    ids = [prompt(i, 6 + i) for i in range(3)]
    rids = [engine.submit(p, max_new_tokens=2 + i, seed=i) for i, p in enumerate(ids)]
    done = drain(engine, keep=True)
    late = engine.submit(prompt(7, 5), max_new_tokens=4)
    drain(engine)
    assert engine.counters["evictions"] == 1 and late not in engine._requests
    assert [engine._kept[r].row is None for r in rids] == [True, False, False]
    before = engine.counters["prefilled_tokens"]
    for i, rid in enumerate(rids):
        again = ids[i] + done[rid].ids + [3, 4]
        engine.submit(again, max_new_tokens=5, seed=9, resume=rid)
        (new,) = drain(engine).values()
        assert_parity(model, again, new, 1.0)
    assert engine.counters["prefilled_tokens"] - before == (6 + 2 + 2) + 3 + 3


def test_a_running_batch_is_not_starved_by_evictions():
    """While at least half of the slots run, kept slots stay: their tools answer soon."""
    engine = make_engine(max_slots=4)
    short = [engine.submit(prompt(i, 5), max_new_tokens=2, seed=i) for i in range(2)]
    [engine.submit(prompt(5 + i, 5), max_new_tokens=30, seed=i) for i in range(3)]
    for _ in range(3):
        engine.step()
    assert engine.counters["evictions"] == 0 and all(engine._kept[r].row is not None for r in short)


# -------------------------------------------------------------------- weights

@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_weights_stop_the_run_and_a_sync_mends_it(value):
    model = make_model("llama")
    engine = make_engine(model)
    weight = model.lm_head.weight if value == float("inf") else model.model.layers[0].mlp.up_proj.weight
    good = weight.detach().clone()
    rid = engine.submit([1, 2, 3], max_new_tokens=4)
    with torch.no_grad():
        weight[3] = value
    with pytest.raises(RuntimeError, match="NaN or infinite logits for 1 of 1"):
        engine.step()
    with pytest.raises(RuntimeError, match="finish or release"):
        engine.sync(model)
    engine.release(rid)
    with pytest.raises(RuntimeError, match="disagree"):
        engine.sync(model)
    with torch.no_grad():
        weight.copy_(good)
    engine.sync(model)
    engine.submit([1, 2, 3], max_new_tokens=4)
    (done,) = drain(engine).values()
    assert_parity(model, [1, 2, 3], done, 1.0)


@pytest.mark.parametrize("family", ["qwen2", "llama"])     # tied and untied head
def test_the_engine_shares_the_trainer_storage_and_sees_its_updates(family):
    model = make_model(family)
    engine = make_engine(model)
    own = dict(engine.model.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert own[name].data_ptr() == parameter.data_ptr(), name
    assert model.config._attn_implementation != "slots"
    before = engine.score(prompt(2, 12))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(input_ids=torch.tensor([prompt(2, 12)]), labels=torch.tensor([prompt(2, 12)])).loss.backward()
    optimizer.step()
    engine.sync(model)
    after = torch.tensor(engine.score(prompt(2, 12)))
    assert (after - torch.tensor(before)).abs().max() > 1e-3
    torch.testing.assert_close(after, plain_logprobs(model, prompt(2, 12)), atol=1e-5, rtol=0)


def test_the_probe_catches_stale_weights_and_sync_mends_them():
    model = make_model()
    engine = make_engine(model)
    other = copy.deepcopy(model)
    assert engine.probe(other) < 1e-4
    with torch.no_grad():
        other.model.layers[1].self_attn.v_proj.weight.mul_(1.2)
    with pytest.raises(RuntimeError, match=r"log-probs differ by up to .* allowed 0.001"):
        engine.probe(other)
    engine.sync(other)
    ids = prompt(4, 10)
    engine.submit(ids, max_new_tokens=5)
    (done,) = drain(engine).values()
    assert_parity(other, ids, done, 1.0)


def test_the_probe_leaves_the_training_mode_alone():
    model = make_model().train()
    engine = make_engine(model)
    assert model.training and not engine.model.training


def test_sync_drops_kept_slots_and_shared_prompts():
    model = make_model()
    engine = make_engine(model)
    ids = prompt(1, 20)
    rid = engine.submit(ids, max_new_tokens=5)
    done = drain(engine, keep=True)[rid]
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1.5)
    engine.sync(model)
    engine.submit(ids, max_new_tokens=5)
    new = engine.submit(ids + done.ids + [1], max_new_tokens=5, resume=rid)
    out = drain(engine)
    assert engine.counters["cached_tokens"] == engine.counters["shared_prefill_tokens"] == 0
    assert_parity(model, ids + done.ids + [1], out[new], 1.0)


def test_sync_refuses_while_requests_run():
    model = make_model()
    engine = make_engine(model)
    engine.submit([1], max_new_tokens=3)
    with pytest.raises(RuntimeError, match="finish or release"):
        engine.sync(model)


def test_sliding_windows_are_refused_only_when_they_would_matter():
    model = make_model("mistral", sliding_window=64)
    with pytest.raises(UserError, match="set max_length .now 200. to at most 64"):
        make_engine(model)
    engine = make_engine(model, max_length=64)
    engine.submit(prompt(1, 50), max_new_tokens=14)
    (done,) = drain(engine).values()
    assert_parity(model, prompt(1, 50), done, 1.0)
