import math

import pytest
import torch

from common import losses
from common.policy import Critic, make_optimizer, token_logprobs
from common.update import Experience, critic_step, joined, mini_batches, policy_step, score, supervised_step, values
from tests.helpers import tiny_random_model

LENGTHS = [14, 9, 20, 11, 17, 8]
OPTIONS = dict(lr=0.0, clip_low=0.2, clip_high=0.2, budget_tokens=10, temperature=0.7, max_grad_norm=1e9)


def experience(seed: int = 0, advantages=None, reference=None, model=None) -> Experience:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 256, (6, 20), generator=g)
    lengths = torch.tensor(LENGTHS)
    sampled = (torch.arange(20) >= 4) & (torch.arange(20) < lengths[:, None])
    sampled[:, 6:8] = False  # an observation
    advantages = torch.randn(6, 1, generator=g) if advantages is None else torch.tensor(advantages)[:, None]
    sampler = torch.where(sampled, -torch.rand(6, 20, generator=g) - 4, math.nan)
    ids[2:4, :4] = ids[1, :4]  # three samples of one prompt
    x = Experience(ids, lengths, torch.full((6,), 4), sampled, sampled, sampler, torch.full((6, 20), math.nan), advantages.expand(6, 20))
    if reference is not None:
        x.ref_BT = score(reference, ids, lengths, x.starts_B, sampled, temperature=0.7, micro_tokens=100)
    return x


def gradient(model, x, rows, **options) -> torch.Tensor:
    seen = {}
    optimizer = make_optimizer(model.parameters(), 0.0)
    optimizer.register_step_pre_hook(lambda *a: seen.update(g=torch.cat([p.grad.flatten() for p in model.parameters()])))
    policy_step(model, optimizer, x, rows, **{**OPTIONS, **options})
    return seen["g"]


def assert_same(a: torch.Tensor, b: torch.Tensor) -> None:
    """Equal but for the rounding of float32 sums in another order."""
    assert float((a - b).norm()) <= 1e-5 * float(b.norm()), float((a - b).norm() / b.norm())


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("extra", [{}, {"kl": 0.1}, {"entropy": 0.05}, {"importance_cap": 1.5}])
def test_the_gradient_does_not_depend_on_the_micro_batches(aggregation, extra):
    model = tiny_random_model()
    make = lambda: experience(reference=tiny_random_model(seed=1))
    whole = gradient(model, make(), range(6), aggregation=aggregation, micro_tokens=10**6, **extra)
    for micro_tokens in (1, 25, 45):
        assert_same(gradient(model, make(), range(6), aggregation=aggregation, micro_tokens=micro_tokens, **extra), whole)
    assert float(whole.norm()) > 0


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_shared_prompts_give_the_same_log_probs_and_gradient(kind):
    model, x = tiny_random_model(kind=kind), experience()
    x.ids_BT[:, :4] = x.ids_BT[0, :4]
    x.ids_BT[3:, :3] = x.ids_BT[5, :3] = torch.tensor([7, 8, 9])
    starts = torch.tensor([4, 4, 4, 3, 3, 3])  # prompts of unequal length
    mask = x.sampled_BT.clone()
    mask[3:, 3] = True
    plain, _ = token_logprobs(model, x.ids_BT, mask, 0.7)
    shared, _ = token_logprobs(model, x.ids_BT, mask, 0.7, starts_B=starts)
    torch.testing.assert_close(shared[mask], plain[mask], rtol=1e-4, atol=1e-5)
    weights = torch.linspace(-1, 1, int(mask.sum()))
    gradients = [torch.cat([g.flatten() for g in torch.autograd.grad((weights * logp[mask]).sum(), list(model.parameters()))]) for logp in (plain, shared)]
    assert_same(*gradients)


def test_the_gradient_is_the_policy_gradient_by_hand():
    model, x = tiny_random_model(), experience()
    logp, _ = token_logprobs(model, x.ids_BT, x.sampled_BT, 0.7)
    loss = -(x.advantages_BT[x.sampled_BT] * logp[x.sampled_BT]).sum() / x.sampled_BT.sum()
    loss.backward()
    by_hand = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    assert_same(gradient(model, x, range(6), aggregation="token", micro_tokens=45), by_hand)


@pytest.mark.parametrize("n", [6, 7, 12, 96])
@pytest.mark.parametrize("updates", [1, 2, 4, 10])
def test_there_are_as_many_mini_batches_as_asked_for(n, updates):
    parts = mini_batches(n, updates, seed=1, step=2)
    assert len(parts) == min(n, updates) and sorted(i for part in parts for i in part) == list(range(n))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    if n % updates == 0:  # nothing depends on which of torch's ways cuts them
        assert parts == [part.tolist() for part in torch.tensor([i for part in parts for i in part]).chunk(updates)]


def test_rows_without_advantage_are_left_out_and_change_nothing_but_the_denominator():
    model = tiny_random_model()
    some = gradient(model, experience(advantages=[1.0, 0.0, -1.0, 0.0, 0.5, 0.0]), range(6), aggregation="token", micro_tokens=45)
    x = experience(advantages=[1.0, 0.0, -1.0, 0.0, 0.5, 0.0])
    alone = gradient(model, x, [0, 2, 4], aggregation="token", micro_tokens=45)
    share = float(x.sampled_BT[[0, 2, 4]].sum() / x.sampled_BT.sum())
    assert_same(some, alone * share)


def test_equal_rewards_leave_the_weights_alone():
    model = tiny_random_model()
    before = [p.clone() for p in model.parameters()]
    advantages = losses.group_advantages(torch.full((2, 3), 0.1)).flatten().tolist()
    out = policy_step(model, make_optimizer(model.parameters(), 1.0), experience(advantages=advantages), range(6),
                      **{**OPTIONS, "lr": 1.0}, aggregation="token", micro_tokens=45)
    assert out["grad_norm"] == 0.0 and all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_the_end_token_receives_gradient_and_an_observation_none():
    model, x = tiny_random_model(), experience(advantages=[1.0, 0, 0, 0, 0, 0])
    table = model.get_input_embeddings().weight
    last = int(x.lengths_B[0]) - 1
    x.ids_BT[0, last] = 256  # pad and end token at once
    assert bool(x.sampled_BT[0, last]) and 256 not in x.ids_BT[0, :last]
    logp, _ = token_logprobs(model, x.ids_BT[:1], x.sampled_BT[:1], 1.0)
    (g,) = torch.autograd.grad(logp[0, last], table)
    assert float(g[256].abs().sum()) > 0
    assert bool(logp[0, 6:8].isnan().all())  # what a tool wrote has no log-prob to learn from


def test_the_end_token_is_trained_although_it_is_the_padding_token():
    model, x = tiny_random_model(), experience(advantages=[1.0, 0, 0, 0, 0, 0])
    x.ids_BT[0, int(x.lengths_B[0]) - 1] = model.config.pad_token_id
    logp, _ = token_logprobs(model, x.ids_BT, x.sampled_BT, 0.7)
    (-logp[0][x.sampled_BT[0]].sum() / x.sampled_BT.sum()).backward()
    by_hand = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    assert_same(gradient(model, x, range(6), aggregation="token", micro_tokens=45), by_hand)


@pytest.mark.parametrize("term,way", [("kl", -1), ("entropy", 1)])
def test_the_kl_term_pulls_towards_the_reference_and_the_entropy_term_towards_chance(term, way):
    model, x = tiny_random_model(), experience(advantages=[0.0] * 6, reference=tiny_random_model(seed=1))
    optimizer = make_optimizer(model.parameters(), 1e-3)
    step = lambda: policy_step(model, optimizer, x, range(6), **{**OPTIONS, "lr": 1e-3}, aggregation="token", micro_tokens=45, **{term: 1.0})[term]
    before, after = step(), step()
    assert way * (after - before) > 0.01


def test_the_old_policy_is_filled_in_by_the_first_update_and_kept_for_the_next():
    model, x = tiny_random_model(), experience()
    want = score(model, x.ids_BT, x.lengths_B, x.starts_B, x.sampled_BT, temperature=0.7, micro_tokens=45)
    optimizer = make_optimizer(model.parameters(), 1e-2)
    first = policy_step(model, optimizer, x, range(6), **{**OPTIONS, "lr": 1e-2}, aggregation="token", micro_tokens=45)
    torch.testing.assert_close(x.old_BT[x.sampled_BT], want[x.sampled_BT], rtol=1e-5, atol=1e-5)
    assert first["policy_ratio_min"] == first["policy_ratio_max"] == 1.0
    second = policy_step(model, optimizer, x, range(6), **{**OPTIONS, "lr": 1e-2}, aggregation="token", micro_tokens=45)
    assert second["policy_ratio_max"] > 1.0 > second["policy_ratio_min"]


def test_mini_batches_cover_every_row_once_and_are_a_function_of_seed_and_step():
    parts = mini_batches(10, 3, seed=1, step=2)
    assert sorted(sum(parts, [])) == list(range(10)) and len(parts) == 3
    assert parts == mini_batches(10, 3, seed=1, step=2) != mini_batches(10, 3, seed=1, step=3)
    assert mini_batches(4, 1, seed=1, step=2) == [[0, 1, 2, 3]]


def test_a_critic_learns_the_return():
    model, x = tiny_random_model(), experience()
    critic = Critic(model)
    optimizer = make_optimizer(critic.parameters(), 1e-2)
    returns = torch.where(x.sampled_BT, (x.ids_BT % 2).float(), 0.0)
    first = last = None
    for _ in range(30):
        old = values(critic, x.ids_BT, x.lengths_B, micro_tokens=45)
        out = critic_step(critic, optimizer, x, range(6), old, returns, x.sampled_BT, lr=1e-2, value_clip=None, micro_tokens=45, max_grad_norm=1.0)
        first, last = first or out, out
    assert last["value_loss"] < 0.5 * first["value_loss"] and last["value_explained"] > 0.3


def test_supervised_steps_raise_the_likelihood_of_the_rows():
    model = tiny_random_model()
    rows = [([1, 2, 3, 4, 5], [0, 0, 1, 1, 1]), ([9, 8, 7], [0, 1, 1])]
    optimizer = make_optimizer(model.parameters(), 1e-2)
    losses_seen = [supervised_step(model, optimizer, rows, lr=1e-2, micro_tokens=6, max_grad_norm=1.0) for _ in range(15)]
    assert losses_seen[-1] < 0.5 * losses_seen[0]


def test_metrics_of_several_updates_are_joined():
    assert joined([{"a": 1.0, "x_min": 0.5, "x_max": 2.0}, {"a": 3.0, "x_min": 0.1, "x_max": 1.0}]) == {"a": 2.0, "x_min": 0.1, "x_max": 2.0}
