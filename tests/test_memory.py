"""Memory switches: gradient checkpointing, AdamW's running means in bfloat16 or off the GPU. They save memory and leave the result as it is."""
import copy
import json
from dataclasses import replace

import pytest
import torch

from common import UserError
from common.policy import Critic, LeanAdamW, load_model, make_optimizer, recompute_layers, token_logprobs
from methods import search_r1
from tests.helpers import tiny_random_model
from tests.test_update import experience, gradient

torch.set_num_threads(1)
OPTIONS = dict(aggregation="token", micro_tokens=45)


# ---- gradient checkpointing -------------------------------------------------------------------------------------------
def kept_bytes(compute) -> int:
    """What autograd keeps for the backward pass of `compute()`, each storage once."""
    kept = {}

    def keep(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        result = compute()
    del result
    return sum(kept.values())


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("extra", [{}, {"kl": 0.1, "entropy": 0.05}])
def test_checkpointing_gives_the_same_gradient(kind, extra):
    plain, model = tiny_random_model(kind=kind), tiny_random_model(kind=kind)
    recompute_layers(model)
    make = lambda: experience(reference=tiny_random_model(seed=1, kind=kind))
    want, got = (gradient(m, make(), range(6), **OPTIONS, **extra) for m in (plain, model))
    assert float((got - want).norm()) <= 1e-6 * float(want.norm()) > 0
    assert not model.training  # with dropout, old and new log-probs of the same weights would differ


def test_checkpointing_keeps_the_layers_inputs_only():
    plain, x = tiny_random_model(), experience()
    model = copy.deepcopy(plain)
    recompute_layers(model)
    forward = lambda m: token_logprobs(m, x.ids_BT, x.sampled_BT, 1.0, starts_B=x.starts_B)[0]
    kept, recomputing = (kept_bytes(lambda: forward(m)) - sum(p.nbytes for p in m.parameters()) for m in (plain, model))
    assert 0 < recomputing < kept / 3
    with torch.no_grad():  # prompts are still shared where nothing is to be computed again
        torch.testing.assert_close(forward(model)[x.sampled_BT], forward(plain)[x.sampled_BT], rtol=1e-6, atol=1e-6)


def test_a_critic_recomputes_its_own_layers():
    model, x = tiny_random_model(), experience()
    want = Critic(model)
    recompute_layers(model)
    critic = Critic(model)
    for c in (want, critic):
        torch.nn.init.ones_(c.head.weight)
        c(x.ids_BT)[:, 1:].sum().backward()
    for (name, a), (_, b) in zip(want.named_parameters(), critic.named_parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-6, atol=1e-6, msg=name)
    assert all(p.grad is None for p in model.parameters())  # its layers are copies, not the policy's


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(UserError, match="Linear has no layers.*--gradient-checkpointing"):
        recompute_layers(torch.nn.Linear(2, 2))


# ---- AdamW's running means --------------------------------------------------------------------------------------------
def trained(steps: int = 12, resume_at: int | None = None, weight_decay: float = 0.1, **switches):
    """Weights after `steps` of AdamW on gradients from a seed; `resume_at`: another optimiser takes over there, from its state on disk."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(7, 5)), torch.nn.Parameter(torch.randn(11))]
    make = lambda: make_optimizer(params, 1e-2, weight_decay=weight_decay, **switches)
    optimizer, g = make(), torch.Generator().manual_seed(1)
    for step in range(steps):
        if step == resume_at:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = make()
            optimizer.load_state_dict(saved)
        for p in params:
            p.grad = torch.randn(p.shape, generator=g)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in params]), optimizer


def test_offloaded_means_give_the_same_bits_and_lie_on_the_cpu():
    want, plain = trained()
    got, optimizer = trained(offload=True)
    assert type(plain) is torch.optim.AdamW and type(optimizer) is LeanAdamW
    assert torch.equal(got, want)
    assert all(state[name].device.type == "cpu" for state in optimizer.state.values() for name in LeanAdamW.MEANS)


def test_means_in_bfloat16_take_half_and_give_nearly_the_same_weights():
    want, plain = trained()
    got, optimizer = trained(bf16=True)
    size = lambda o: sum(o.state[p][name].nbytes for p in o.state for name in LeanAdamW.MEANS)
    assert 2 * size(optimizer) == size(plain)
    start, _ = trained(steps=0)
    assert 0 < float((got - want).norm()) < 0.02 * float((want - start).norm())


def test_a_mean_of_squares_in_bfloat16_falls_as_it_should():
    """It falls by a thousandth a step, and neighbouring numbers of bfloat16 lie a 256th apart: rounded to nearest it would stand still."""
    p = torch.nn.Parameter(torch.zeros(4096))
    optimizer = make_optimizer([p], 0.0, bf16=True)
    for step in range(400):
        p.grad = torch.full_like(p, float(step == 0))
        optimizer.step()
    want = 0.001 * 0.999 ** 399
    assert float(optimizer.state[p]["exp_avg_sq"].float().mean()) == pytest.approx(want, rel=0.01)
    assert torch.tensor(0.001).bfloat16() * 0.999 == torch.tensor(0.001).bfloat16()  # what would have happened


@pytest.mark.parametrize("switches", [dict(bf16=True), dict(offload=True), dict(bf16=True, offload=True)], ids=lambda s: "+".join(s))
def test_resumed_means_give_the_same_bits(switches):
    assert torch.equal(trained(resume_at=5, **switches)[0], trained(**switches)[0])


# ---- a whole run ------------------------------------------------------------------------------------------------------
SMALL = replace(search_r1.Config(), steps=2, prompts=2, samples=4, eval_questions=2, eval_every=0, save_every=1, threads=1, keep_trajectories=1,
                trajectory_tokens=96, warmup_steps=0, entropy=0.01)


def test_a_run_with_every_switch_learns_the_same_and_resumes_to_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = lambda name: torch.load(f"runs/search_r1/{name}/checkpoint/step-2/state.pt")
    search_r1.train(replace(SMALL, name="plain"))
    search_r1.train(replace(SMALL, name="offload", optimizer_offload=True))
    assert all(torch.equal(a, b) for a, b in zip(state("plain")["model"].values(), state("offload")["model"].values(), strict=True))

    lean = replace(SMALL, name="lean", gradient_checkpointing=True, optimizer_bf16=True, optimizer_offload=True)
    search_r1.train(lean)
    whole = state("lean")
    assert all(x.dtype == torch.bfloat16 for s in whole["optimizer"]["state"].values() for x in s.values() if isinstance(x, torch.Tensor))
    start = load_model("tiny")[0].state_dict()
    moved = lambda found: torch.cat([(found["model"][k] - start[k]).flatten() for k in start])
    a, b = moved(state("plain")), moved(whole)
    assert float(a.norm()) > 0 and float((a - b).norm()) < 0.1 * float(a.norm())
    (tmp_path / "runs/search_r1/lean/checkpoint/step-2/state.pt").unlink()  # as if it had been killed in its second step
    search_r1.train(replace(lean, resume=True))
    assert all(torch.equal(whole["model"][k], x) for k, x in state("lean")["model"].items())
    fields = json.loads((tmp_path / "runs/search_r1/lean/config.json").read_text())["fields"]
    assert fields["gradient_checkpointing"]["value"] is True and fields["optimizer_bf16"]["source"] == "ours"
