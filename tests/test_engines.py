"""What both engines promise, as common/rollout.py and the methods use it: the same tests on HFEngine and VLLMEngine.

The vLLM half needs vLLM: `make test ENGINE=vllm ARGS="-k engines"` (see README, Engines); elsewhere it is skipped and says so."""
import copy
import dataclasses
import importlib
import importlib.util
import random
import re
import sys
from pathlib import Path

import bm25s  # noqa: F401  imports numba where vLLM is installed, as every method that searches does; vLLM once failed at that
import numpy as np
import pytest
import torch

from common import UserError
from common.data import Example
from common.engine import make_engine, plain_logprobs
from common.rollout import Budget, Call, End, Tool, ToolPool, make_prompts, rollout
from common.run import parse_config
from tests.helpers import byte_tokenizer

VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not VLLM, reason="vllm is not installed here: make setup_vllm, then make test ENGINE=vllm")
both = pytest.mark.parametrize("name", ["hf", pytest.param("vllm", marks=needs_vllm)])
TOKENIZER, VOCAB, END = byte_tokenizer(), 257, 256
SLOTS, LENGTH = 16, 320


def make_model(family="qwen2", seed=0):
    """A random model far from uniform; vLLM's CPU attention has no heads of less than 32."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config
    torch.manual_seed(seed)
    config = {"qwen2": Qwen2Config, "llama": LlamaConfig}[family](
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=512, tie_word_embeddings=family == "qwen2", bos_token_id=None, eos_token_id=END, pad_token_id=END,
        initializer_range=0.2)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


MODELS = {family: make_model(family) for family in ("qwen2", "llama")}     # tied and untied head
_engines: dict = {}


def engine_of(name, family="qwen2"):
    """One engine for all tests (vLLM's takes seconds to build), as new: nothing kept, counters at zero, weights as at first."""
    if (name, family) not in _engines:
        _engines[name, family] = make_engine(name, copy.deepcopy(MODELS[family]), TOKENIZER, max_slots=SLOTS, max_length=LENGTH)
    engine = _engines[name, family]
    for rid in list(engine._requests):
        engine.release(rid)
    engine.sync(MODELS[family])
    engine.counters.update(dict.fromkeys(engine.counters, 0))
    return engine


def prompt(seed, length):
    return np.random.default_rng(seed).integers(0, 250, length).tolist()


def drain(engine, keep=False):
    out = {}
    while engine.busy:
        for done in engine.step():
            out[done.rid] = done
            if not keep:
                engine.release(done.rid)
    return out


def assert_parity(model, ids, done, temperature):
    want = plain_logprobs(model, ids + done.ids, temperature or 1.0)[-len(done.ids):]
    torch.testing.assert_close(torch.tensor(done.logprobs), torch.tensor(want), atol=1e-4, rtol=0)


def play(engine, jobs, order=0):
    """Three turns of jobs [(ids, new tokens, temperature, seed)]; a finished turn waits a few steps for its 'tool' and resumes with an
    observation. Returns {(job, turn): (submitted ids, Finished)}."""
    rng, waiting, owner, results = random.Random(order), [], {}, {}
    for j, (ids, new, temperature, seed) in enumerate(jobs):
        owner[engine.submit(ids, max_new_tokens=new, temperature=temperature, seed=seed)] = (j, 0, ids)
    while engine.busy or waiting:
        for done in engine.step():
            j, turn, ids = owner[done.rid]
            results[j, turn] = ids, done
            if turn < 2:
                waiting.append([rng.randint(0, 4), done, j, turn, ids])
            else:
                engine.release(done.rid)
        for entry in list(waiting):
            entry[0] -= 1
            if entry[0] < 0:
                waiting.remove(entry)
                _, done, j, turn, ids = entry
                ids = ids + done.ids + prompt(1000 + 10 * j + turn, 1 + (3 * j + turn) % 7)
                _, new, temperature, seed = jobs[j]
                owner[engine.submit(ids, max_new_tokens=new, temperature=temperature, seed=seed + 1000 * turn + 1000, resume=done.rid)] = (j, turn + 1, ids)
    return results


JOBS = [(prompt(j % 3, (3, 40, 70)[j % 3]), 2 + 5 * j % 17, (1.0, 0.6, 0.0)[j % 3 if j < 6 else 0], j) for j in range(12)]


@both
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_logprobs_equal_a_plain_forward_pass_over_several_turns(name, family):
    """Ragged batches, shared prompts, observations between turns, three temperatures in one batch; and every id is accounted for."""
    engine = engine_of(name, family)
    results = play(engine, JOBS)
    assert len(results) == 36
    for (j, _), (ids, done) in results.items():
        assert_parity(MODELS[family], ids, done, JOBS[j][2])
    count = engine.counters
    assert count["sampled_tokens"] == sum(len(d.ids) for _, d in results.values()) == sum(len(d.logprobs) for _, d in results.values())
    assert count["prefilled_tokens"] + count["shared_prefill_tokens"] + count["cached_tokens"] == sum(len(ids) for ids, _ in results.values())
    assert count["cached_tokens"] > 500 and count["shared_prefill_tokens"] > 200
    assert not engine.busy and not engine._requests


@both
def test_same_calls_give_the_same_bits(name):
    a, b = ({k: (d.ids, d.logprobs) for k, (_, d) in play(engine_of(name), JOBS, order=5).items()} for _ in range(2))
    assert a == b


@both
def test_tokens_depend_on_the_seed_and_not_on_the_company(name):
    engine, ids = engine_of(name), prompt(3, 20)
    alone = []
    for seed in (5, 6, 2**62 + 1):
        engine.submit(ids, max_new_tokens=12, seed=seed)
        alone += [d.ids for d in drain(engine).values()]
    rids = [engine.submit(ids, max_new_tokens=12, seed=seed) for seed in (5, 6, 2**62 + 1, 7, 8)]
    engine.submit(prompt(4, 30), max_new_tokens=20, seed=5)
    together = drain(engine)
    assert [together[r].ids for r in rids[:3]] == alone and len({tuple(together[r].ids) for r in rids}) == 5


@both
def test_samples_follow_the_softmax_at_the_temperature(name):
    engine, n = engine_of(name), 3000
    for seed in range(n):
        engine.submit([5, 7, 9], max_new_tokens=1, temperature=1.5, seed=seed * 7919)
    counts = np.bincount([d.ids[0] for d in drain(engine).values()], minlength=VOCAB)
    with torch.no_grad():
        p = (MODELS["qwen2"](input_ids=torch.tensor([[5, 7, 9]])).logits[0, -1].double() / 1.5).softmax(-1).numpy()
    often = p * n >= 5                                     # the rest is one cell
    seen, want = np.append(counts[often], counts[~often].sum()), np.append(p[often], p[~often].sum()) * n
    assert often.sum() > 10 and ((seen - want) ** 2 / want).sum() < often.sum() + 5 * np.sqrt(2 * often.sum())


@both
def test_nothing_comes_from_generation_config(name):
    engine, model = engine_of(name), copy.deepcopy(MODELS["qwen2"])
    engine.submit([1, 2, 3], max_new_tokens=20, seed=3)
    (before,) = drain(engine).values()
    model.generation_config.update(top_k=1, top_p=0.1, temperature=0.1, repetition_penalty=5.0, do_sample=False, max_new_tokens=2)
    engine.sync(model)
    engine.submit([1, 2, 3], max_new_tokens=20, seed=3)
    (after,) = drain(engine).values()
    assert after.ids == before.ids


def greedy(engine, ids, new=40):
    engine.submit(ids, max_new_tokens=new, temperature=0.0)
    (done,) = drain(engine).values()
    return done


def long_prompt(engine):
    """A prompt whose greedy continuation is long and of more than a few different tokens, so that it can be cut anywhere."""
    for seed in range(100):
        ids = prompt(seed, 10)
        done = greedy(engine, ids)
        if done.reason == "length" and len(set(done.ids)) > 8:
            return ids, done
    raise AssertionError("no such prompt")


@both
def test_greedy_takes_the_argmax(name):
    engine = engine_of(name)
    ids, done = long_prompt(engine)
    with torch.no_grad():
        logits = MODELS["qwen2"](input_ids=torch.tensor([ids + done.ids])).logits[0]
    for i, token in enumerate(done.ids):
        assert logits[len(ids) + i - 1].argmax() == token


@both
def test_stop_strings_keep_the_token_that_completes_them(name):
    engine = engine_of(name)
    ids, whole = long_prompt(engine)
    for cut in (6, 12, 20):                                # a stop string made of the bytes of a few sampled tokens
        text = engine.texts.text(whole.ids[:cut])
        stop = text[-3:]
        if "\ufffd" in stop:
            continue
        first = next(n for n in range(1, len(whole.ids) + 1) if stop in engine.texts.text(whole.ids[:n]))
        rid = engine.submit(ids, max_new_tokens=40, stop=("never this", stop), temperature=0.0)
        (done,) = drain(engine).values()
        assert (done.rid, done.ids, done.reason) == (rid, whole.ids[:first], "stop")
        assert done.text == engine.texts.text(whole.ids[:first])[:len(done.text)] and done.text.endswith(stop) and done.overshoot == 0
        assert len(done.logprobs) == first
        for budget, reason in ((first - 1, "length"), (first, "stop")):       # a stop at the last allowed token counts
            if budget:
                engine.submit(ids, max_new_tokens=budget, stop=stop, temperature=0.0)
                (done,) = drain(engine).values()
                assert (done.reason, len(done.ids)) == (reason, budget)


@both
def test_a_stop_string_completed_inside_a_token(name, monkeypatch):
    engine = engine_of(name)
    ids, whole = long_prompt(engine)
    at = next(i for i in range(5, 40) if whole.ids[i] not in whole.ids[:i])
    texts = copy.copy(engine.texts)                        # in which one token is six characters
    texts.pieces, texts.plain = {}, lambda token_ids: "".join("A!tail" if i == whole.ids[at] else "x" for i in token_ids)
    texts.anchor_text = texts.plain([texts.anchor])
    monkeypatch.setattr(engine, "texts", texts)
    engine.submit(ids, max_new_tokens=40, stop="xA!", temperature=0.0)
    (done,) = drain(engine).values()
    assert (done.ids, done.text, done.reason, done.overshoot) == (whole.ids[:at + 1], "x" * at + "A!", "stop", 4)


@both
def test_eos_is_kept_and_is_not_text(name, monkeypatch):
    engine = engine_of(name)
    assert engine.eos_ids == {END}
    ids, whole = long_prompt(engine)
    at = next(i for i in range(5, 40) if whole.ids[i] not in whole.ids[:i])
    monkeypatch.setattr(engine, "eos_ids", frozenset({whole.ids[at], END}))
    done = greedy(engine, ids)
    assert (done.ids, done.reason, len(done.logprobs)) == (whole.ids[:at + 1], "eos", at + 1)
    assert done.text == engine.texts.text(whole.ids[:at])
    monkeypatch.setattr(engine, "eos_ids", frozenset())    # then nothing ends it, whatever the model's config calls EOS
    assert greedy(engine, ids).ids == whole.ids


@both
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_max_length_is_exact(name, extra, monkeypatch):
    engine = engine_of(name)
    monkeypatch.setattr(engine, "eos_ids", frozenset())
    if extra == 1:
        with pytest.raises(UserError, match=rf"{LENGTH - 9} ids \+ 10 new tokens = {LENGTH + 1} exceed the engine's max_length {LENGTH}"):
            engine.submit(prompt(0, LENGTH - 9), max_new_tokens=10)
        assert not engine.busy
        return
    engine.submit(prompt(0, LENGTH - 10 + extra), max_new_tokens=10)
    (done,) = drain(engine).values()
    assert len(done.ids) == 10 and done.reason == "length"


@both
@pytest.mark.parametrize("ids, kwargs, message", [
    ([], dict(max_new_tokens=4), "0 ids"), ([1], dict(max_new_tokens=0), "max_new_tokens >= 1"), ([VOCAB], dict(max_new_tokens=1), "0..256"),
    ([-1], dict(max_new_tokens=1), "0..256"), ([1], dict(max_new_tokens=1, temperature=-1), "temperature"),
    ([1], dict(max_new_tokens=1, temperature=0.005), "at least 0.01"), ([1], dict(max_new_tokens=1, temperature=float("nan")), "temperature"),
    ([1], dict(max_new_tokens=1, stop=("",)), "stop"), ([1], dict(max_new_tokens=1, resume=77777), "77777")])
def test_wrong_requests(name, ids, kwargs, message):
    engine = engine_of(name)
    with pytest.raises(ValueError, match=message):
        engine.submit(ids, **kwargs)
    assert not engine.busy


@both
def test_resume_and_release_are_checked(name):
    engine, ids = engine_of(name), prompt(0, 5)
    first = engine.submit(ids, max_new_tokens=3)
    with pytest.raises(ValueError, match="not a finished request"):
        engine.submit(ids, max_new_tokens=3, resume=first)
    done = drain(engine, keep=True)[first]
    with pytest.raises(ValueError, match="7 cached ids are not a proper prefix of the 7 given"):
        engine.submit(ids + done.ids[:2], max_new_tokens=3, resume=first)
    with pytest.raises(ValueError, match="not a proper prefix"):
        engine.submit([(ids[0] + 1) % VOCAB] + ids[1:] + done.ids, max_new_tokens=3, resume=first)
    second = engine.submit(ids + done.ids, max_new_tokens=3, resume=first)
    with pytest.raises(ValueError, match="cannot release"):
        engine.release(first)
    assert set(drain(engine)) == {second}
    with pytest.raises(ValueError, match="cannot release"):
        engine.release(second)


@both
def test_release_gives_up_waiting_and_running_requests(name):
    engine = engine_of(name)
    rids = [engine.submit(prompt(i, 6), max_new_tokens=40, seed=i) for i in range(2 * SLOTS)]     # half of them wait
    engine.step()
    gone = {rids[0], rids[3], rids[-1]}
    for rid in gone:
        engine.release(rid)
    done = drain(engine)
    assert set(done) == set(rids) - gone and not engine.busy and engine.step() == []
    for rid, d in done.items():
        assert_parity(MODELS["qwen2"], prompt(rids.index(rid), 6), d, 1.0)


# ---- weights

@both
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_sync_takes_new_weights_and_forgets_the_cache(name, family):
    """Every kind of tensor changes (a stale tied head would show), and a prompt that was cached is computed anew."""
    engine, model = engine_of(name, family), copy.deepcopy(MODELS[family])
    ids = prompt(1, 70)
    rid = engine.submit(ids, max_new_tokens=5)
    done = drain(engine, keep=True)[rid]
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    engine.sync(model)
    engine.counters.update(dict.fromkeys(engine.counters, 0))
    engine.submit(ids, max_new_tokens=5, seed=1)
    new = engine.submit(ids + done.ids + [1], max_new_tokens=5, resume=rid)
    out = drain(engine)
    assert_parity(model, ids + done.ids + [1], out[new], 1.0)
    assert engine.counters["prefilled_tokens"] >= 70
    with pytest.raises(RuntimeError, match=r"log-probs differ by up to .* allowed 0.001"):
        engine.probe(MODELS[family])                       # the weights it had before


@both
def test_each_kind_of_stale_weight_is_seen_by_the_probe(name):
    engine = engine_of(name)
    for part in ("embed_tokens", "q_proj", "o_proj", "down_proj", "input_layernorm", "model.norm"):
        other = copy.deepcopy(MODELS["qwen2"])
        with torch.no_grad():
            for key, p in other.named_parameters():
                if part in key:
                    p.mul_(1.3)
        with pytest.raises(RuntimeError, match="disagree"):
            engine.probe(other)


@both
def test_sync_refuses_while_requests_run(name):
    engine = engine_of(name)
    engine.submit([1], max_new_tokens=3)
    with pytest.raises(RuntimeError, match="finish or release"):
        engine.sync(MODELS["qwen2"])


@both
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_weights_stop_the_run_and_do_not_last(name, value):
    engine, model = engine_of(name), copy.deepcopy(MODELS["qwen2"])
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3] = value
    with pytest.raises(RuntimeError, match="disagree"):
        engine.sync(model)
    engine.submit([1, 2, 3], max_new_tokens=4)
    with pytest.raises(RuntimeError, match="NaN or infinite logits for 1 of 1"):
        while engine.busy:
            engine.step()
    for rid in list(engine._requests):
        engine.release(rid)
    engine.sync(MODELS["qwen2"])
    engine.submit([1, 2, 3], max_new_tokens=4)
    (done,) = drain(engine).values()
    assert_parity(MODELS["qwen2"], [1, 2, 3], done, 1.0)


@both
def test_the_probe_leaves_the_training_mode_alone(name):
    engine, model = engine_of(name), copy.deepcopy(MODELS["qwen2"]).train()
    engine.sync(model)
    assert model.training


# ---- in a rollout

@both
def test_a_rollout_with_tools_adds_up(name):
    """Turns, notices and results through common/rollout.py, whose token accounting raises on any loss; log-probs as the trainer's."""
    engine = engine_of(name)
    prompts, _ = make_prompts([Example(f"e{i}", chr(65 + i) * (20 + 9 * i), ("gold",), {}) for i in range(3)], lambda e: e.question, TOKENIZER,
                              Budget(100, 16, 40, 200, 2))
    act = lambda turn, t: Call("echo", turn.text, lambda text: f"[{text}]") if turn.reason == "stop" else End("done")
    pool = ToolPool(workers=2)
    stops = tuple(chr(c) for c in range(64, 127))          # most letters: nearly every turn calls
    try:
        rows = rollout(engine, TOKENIZER, prompts, act, {"echo": Tool(lambda calls: [c.argument[:9] for c in calls])}, Budget(100, 16, 40, 200, 2), pool,
                       samples=4, stop=stops, seed=1, step=2)
    finally:
        pool.close()
    assert len(rows) == 12 and sum(len(t.calls) for t in rows) > 5 and not engine._requests
    for t in rows:
        want = plain_logprobs(MODELS["qwen2"], t.prompt_ids + t.ids)[-len(t.ids):]
        gaps = [abs(a - b) for a, b, m in zip(t.logprobs, want, t.mask) if m]
        assert max(gaps) < 1e-4


class NoVLLM:
    """What VLLMEngine asks of vLLM on a GPU when it sleeps and wakes, noted down."""

    def __init__(self):
        self.said = []
        self.llm_engine = self

    def __getattr__(self, name):
        return lambda *args, **how: self.said.append((name, *how.get("tags", args[:1]))) or True


def test_a_sleeping_engine_is_woken_by_a_sync_only(monkeypatch):
    """Without vLLM or a GPU: a sync from submit would set the counters to zero in a rollout, and wait for ranks that submit nothing."""
    from types import SimpleNamespace

    from common.vllm_engine import VLLMEngine
    engine, llm = VLLMEngine.__new__(VLLMEngine), NoVLLM()
    vars(engine).update(llm=llm, vocab=VOCAB, max_length=LENGTH, device=SimpleNamespace(type="cuda"), _requests={}, _kept={}, _next_rid=0,
                        _asleep=False, _broken=False, eos_ids=frozenset(), _sampling=lambda **fields: fields, _delta=None, probe=lambda model: 0.0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: llm.said.append(("empty_cache",)))
    load = [("collective_rpc", "load_named"), ("reset_prefix_cache",)]
    engine.sync(MODELS["qwen2"])
    assert llm.said == load
    rid = engine.submit([1, 2], max_new_tokens=1)
    engine.counters["sampled_tokens"], llm.said[:] = 5, []
    engine.release(rid)
    assert llm.said[-1][0] == "sleep" and engine._asleep
    with pytest.raises(RuntimeError, match=r"call sync\(model\) before every rollout"):
        engine.submit([1, 2], max_new_tokens=1)
    assert engine.counters["sampled_tokens"] == 5 and not engine.busy and llm.said[-1][0] == "sleep"
    llm.said.clear()
    engine.sync(MODELS["qwen2"])
    assert llm.said == [("empty_cache",), ("wake_up", "weights"), load[0], ("empty_cache",), ("wake_up", "kv_cache"), load[1],
                        ("collective_rpc", "clear_cache")]
    engine.submit([1, 2], max_new_tokens=1)


@needs_vllm
def test_every_setting_that_changes_a_sample_is_given(monkeypatch):
    """A field that a new vLLM adds is looked at by someone before it is trusted."""
    from vllm import SamplingParams
    engine, given = engine_of("vllm"), {}
    monkeypatch.setattr(engine, "_sampling", lambda **fields: given.update(fields) or SamplingParams(**fields))
    engine._params(5, 0.7, 3)
    only_what_is_returned = {
        "prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids", "flat_logprobs", "skip_special_tokens", "spaces_between_special_tokens",
        "include_stop_str_in_output", "stream_interval", "skip_clone", "output_text_buffer_length", "skip_reading_prefix_cache",
        "routed_experts_prompt_start", "trace_decode_token_ids"}
    assert {f for f in SamplingParams.__struct_fields__ if not f.startswith("_")} - set(given) == only_what_is_returned


# ---- methods

@pytest.mark.parametrize("path", sorted(p for p in Path("methods").glob("*.py") if p.stem != "__init__"), ids=lambda p: p.stem)
def test_every_method_offers_both_engines(path):
    module = importlib.import_module(f"methods.{path.stem}")
    names = [f.name for f in dataclasses.fields(module.Config)]
    assert names[names.index("threads") + 1] == "engine" and module.Config().engine == "hf"
    assert "make_engine(cfg.engine, model, tokenizer" in path.read_text() and "HFEngine" not in path.read_text()
    assert parse_config(module.Config, module.PRESETS, ["--engine", "vllm"]).engine == "vllm"


# ---- installation

def test_an_environment_without_vllm_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)         # import raises ImportError
    with pytest.raises(UserError, match="make setup_vllm"):
        make_engine("vllm", MODELS["qwen2"], TOKENIZER, max_slots=2, max_length=64)


def test_another_version_is_refused(monkeypatch):
    from types import SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.99.1+cpu"))
    with pytest.raises(UserError, match=r"vLLM 0.99.1\+cpu is installed; this code knows 0.32.0: run `make setup_vllm`"):
        make_engine("vllm", MODELS["qwen2"], TOKENIZER, max_slots=2, max_length=64)


def test_the_makefile_installs_a_version_the_code_knows():
    from common.vllm_engine import VERSIONS
    pinned = {v for line in Path("Makefile").read_text().splitlines() if line.startswith("VLLM =") for v in re.findall(r"==([\d.]+)", line)}
    assert len(pinned) == 1 and pinned <= set(VERSIONS)


def test_vllm_is_named_in_one_file_only():
    users = [p for p in [*Path("common").rglob("*.py"), *Path("methods").glob("*.py")] if re.search(r"^\s*(import|from) vllm\b", p.read_text(), re.M)]
    assert users == [Path("common/vllm_engine.py")]
