"""common/losses.py against values of TRL's and verl's own functions, and the properties a training step rests on."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common import losses

torch.set_num_threads(1)
STORED = json.loads((Path(__file__).parent / "data" / "loss_values.json").read_text())
EXPECTED = STORED["expected"]
IN = {key: torch.tensor(value) for key, value in STORED["inputs"].items() if key != "budget_tokens"}
BUDGET = STORED["inputs"]["budget_tokens"]
MASK, RESPONSE = IN["mask"].bool(), IN["response"].bool()
AGGREGATIONS = ("token", "sequence", "constant")
NAN = math.nan


def close(got, want):
    torch.testing.assert_close(torch.as_tensor(got, dtype=torch.float32), torch.as_tensor(want, dtype=torch.float32), rtol=1e-5, atol=1e-5)


def names(prefix):
    found = [name for name in EXPECTED if name.startswith(prefix)]
    assert found, prefix
    return found


def loss_and_grad(case, logp_BT=None, mask_BT=MASK, hole=None, **extra):
    """Loss and gradient of the stored inputs; `hole` is written into every per-token input outside the mask."""
    fill = (lambda x: x) if hole is None else (lambda x: torch.where(mask_BT, x, hole))
    logp_BT = fill(IN["logp"] if logp_BT is None else logp_BT).clone().requires_grad_()
    n = losses.denominator(mask_BT, case["aggregation"], BUDGET)
    adv_BT = fill(IN["adv"][:, None].expand_as(logp_BT))
    loss = losses.policy_loss(
        logp_BT, fill(IN["old"]), adv_BT, mask_BT, clip_low=case["clip_low"], clip_high=case["clip_high"],
        aggregation=case["aggregation"], denominator=n, dual_clip=case.get("dual_clip"), **extra,
    )
    if case.get("beta"):
        kl_BT = losses.kl(logp_BT, fill(IN["ref"]), mask_BT, "k3")
        loss = loss + case["beta"] * losses.aggregate(kl_BT, mask_BT, case["aggregation"], n)
    loss.backward()
    return loss.detach(), logp_BT.grad


# ---- other people's numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hole", [None, NAN])
@pytest.mark.parametrize("name", [*names("trl_"), *names("verl_token_dual"), *names("verl_sequence"), *names("verl_constant")])
def test_policy_loss_equals_trl_and_verl(name, hole):
    loss, grad_BT = loss_and_grad(EXPECTED[name], hole=hole)
    close(loss, EXPECTED[name]["loss"])
    close(grad_BT, EXPECTED[name]["grad"])


def test_truncated_importance_weights_equal_verl():
    case, tis = EXPECTED["verl_token_tis"], EXPECTED["verl_tis"]
    weight_BT = losses.importance_weights(IN["old"], torch.where(MASK, IN["sampler"], NAN), MASK, tis["cap"])
    close(weight_BT[MASK], torch.tensor(tis["weight"])[MASK])
    assert (weight_BT[~MASK] == 1).all() and (weight_BT == tis["cap"]).any(), "the cap must bite in this case"
    loss, grad_BT = loss_and_grad(case, weight_BT=weight_BT)
    close(loss, case["loss"])
    close(grad_BT, case["grad"])
    adv_BT = IN["adv"][:, None].expand_as(IN["logp"])
    close(losses.clip_fraction(IN["logp"], IN["old"], adv_BT, MASK, 0.2, 0.28), case["clip_fraction"])


@pytest.mark.parametrize("name", names("verl_grpo"))
def test_group_advantages_equal_verl(name):
    case = EXPECTED[name]
    rewards_PG = torch.tensor([[0.7], [-1.0]]) if "single" in name else IN["group_rewards"]
    close(losses.group_advantages(rewards_PG, case["std"]), case["advantages"])


@pytest.mark.parametrize("name", names("verl_gae"))
def test_gae_equals_verl(name):
    case = EXPECTED[name]
    steps_BT = {"mask": MASK, "response": RESPONSE}[case["steps"]]
    values_BT = torch.where(steps_BT, IN["values"], NAN)
    advantages_BT, returns_BT = losses.gae(IN[case["rewards"]], values_BT, steps_BT, case["gamma"], case["lam"])
    close(losses.whiten(advantages_BT, steps_BT), case["whitened"])
    close(returns_BT, case["returns"])


def test_reinforce_plus_plus_composed_equals_verl():
    case = EXPECTED["verl_reinforce_pp"]
    kl_BT = losses.kl(IN["old"], IN["ref"], MASK, "k1")
    last_BT = losses.rewards_at_end(IN["token_rewards"].sum(1), MASK)
    close(last_BT, IN["token_rewards"])
    returns_BT = losses.returns(last_BT - 0.1 * kl_BT, MASK, case["gamma"])
    torch.testing.assert_close(returns_BT, torch.tensor(case["returns"]), atol=2e-4, rtol=0)  # its input was rounded to 4 digits
    torch.testing.assert_close(losses.whiten(returns_BT, MASK), torch.tensor(case["whitened"]), atol=2e-4, rtol=0)


def test_value_loss_equals_verl():
    case = EXPECTED["verl_value"]
    values_BT = torch.where(MASK, IN["values"], NAN).requires_grad_()
    old_BT, returns_BT = torch.where(MASK, IN["old_values"], NAN), torch.where(MASK, IN["returns"], NAN)
    loss = losses.value_loss(values_BT, old_BT, returns_BT, MASK, clip=case["clip"], denominator=losses.denominator(MASK, "token"))
    loss.backward()
    close(loss.detach(), case["loss"])
    close(values_BT.grad, case["grad"])


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_equals_verl(kind):
    case = EXPECTED[f"verl_{kind}"]
    logp_BT = IN["far_logp"].clone().requires_grad_()
    kl_BT = losses.kl(logp_BT, torch.where(MASK, IN["ref"], NAN), MASK, kind)
    kl_BT.sum().backward()
    close(kl_BT.detach(), case["kl"])
    close(logp_BT.grad, case["grad"])
    if kind == "k3":
        assert kl_BT.max() == 10 and kl_BT.min() >= 0


def test_entropy_equals_verl():
    logits = torch.tensor(EXPECTED["verl_entropy"]["logits"])
    close(losses.entropy(logits.log_softmax(-1)), EXPECTED["verl_entropy"]["entropy"])


# ---- advantages ----------------------------------------------------------------------------------------------------------------------


@given(st.floats(-10, 10, width=32), st.integers(2, 17))
@settings(max_examples=200, deadline=None)
def test_equal_rewards_give_exactly_zero(reward, group):
    rewards_PG = torch.tensor([[reward] * group, [0.0] * (group - 1) + [1.0]])
    for std in ("unbiased", "none"):
        advantages_PG = losses.group_advantages(rewards_PG, std)
        assert (advantages_PG[0] == 0).all() and advantages_PG[1, -1] > 0


def test_equal_fractional_rewards_are_zero_where_the_plain_formula_is_not():
    rewards_PG = torch.full((1, 8), 5 / 7)
    plain_PG = (rewards_PG - rewards_PG.mean(1, keepdim=True)) / (rewards_PG.std(1, keepdim=True) + 1e-6)
    assert plain_PG.abs().max() > 0.01, "pick another number: no rounding error in this case"
    assert (losses.group_advantages(rewards_PG) == 0).all()


def test_rewards_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="finite"):
        losses.group_advantages(torch.tensor([[1.0, NAN]]))


def test_reinforce_plus_plus_by_hand():
    # Two prompts, two samples. Rewards less the group's mean: 0.5, -0.5 and 0, 0. Row 0 has an observation in the middle, row 3 a penalty
    # of 0.3 on its second step, which its first step pays for too. G = 0.5, 0.5 | -0.5 | 0, 0, 0 | -0.3, -0.3: mean -0.0125.
    rewards_PG = torch.tensor([[1.0, 0.0], [5 / 7, 5 / 7]])
    steps_BT = torch.tensor([[0, 1, 0, 1], [0, 1, 0, 0], [0, 1, 1, 1], [0, 1, 1, 0]]).bool()
    penalty_BT = torch.full((4, 4), NAN).masked_fill(steps_BT, 0.0)
    penalty_BT[3, 2] = 0.3
    by_hand_N = torch.tensor([0.5, 0.5, -0.5, 0, 0, 0, -0.3, -0.3])
    close(losses.reinforce_plus_plus(rewards_PG, penalty_BT, steps_BT)[steps_BT], (by_hand_N + 0.0125) / (by_hand_N.var() + 1e-8).sqrt())
    by_group_BT = losses.reinforce_plus_plus(rewards_PG, penalty_BT, steps_BT, "group")
    close(by_group_BT[steps_BT], torch.cat((losses.group_advantages(rewards_PG).flatten()[[0, 0, 1]], by_hand_N[3:])))
    assert (by_group_BT[~steps_BT] == 0).all() and (losses.reinforce_plus_plus(rewards_PG, penalty_BT, steps_BT)[~steps_BT] == 0).all()


def test_reinforce_plus_plus_of_a_batch_without_a_difference_is_exactly_zero():
    rewards_PG, steps_BT = torch.tensor([[5 / 7] * 3, [-2.0] * 3]), torch.ones(6, 4, dtype=torch.bool)
    for scale in ("batch", "group"):
        assert (losses.reinforce_plus_plus(rewards_PG, torch.zeros(6, 4), steps_BT, scale) == 0).all()
    with pytest.raises(ValueError, match="6 rewards for 5 trajectories"):
        losses.reinforce_plus_plus(rewards_PG, torch.zeros(5, 4), steps_BT[:5])


def test_rewards_at_end_allows_a_row_without_steps():
    steps_BT = torch.tensor([[False, True, False], [False, False, False]])
    assert losses.rewards_at_end(torch.tensor([2.0, 5.0]), steps_BT).tolist() == [[0.0, 2.0, 0.0], [0.0, 0.0, 0.0]]


@given(st.integers(0, 10**6), st.integers(1, 12), st.floats(0.5, 1), st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_gae_that_skips_observations_is_gae_of_the_compacted_row(seed, length, gamma, lam):
    g = torch.Generator().manual_seed(seed)
    steps_BT = torch.rand(1, length, generator=g) < 0.6
    values_BT, rewards_BT = torch.randn(1, length, generator=g), torch.where(steps_BT, torch.randn(1, length, generator=g), 0.0)
    advantages_BT, returns_BT = losses.gae(rewards_BT, torch.where(steps_BT, values_BT, NAN), steps_BT, gamma, lam)
    short = [x[steps_BT][None] for x in (rewards_BT, values_BT, steps_BT)]
    if short[0].numel():
        short_advantages_BT, short_returns_BT = losses.gae(*short, gamma, lam)
        torch.testing.assert_close(advantages_BT[steps_BT][None], short_advantages_BT)
        torch.testing.assert_close(returns_BT[steps_BT][None], short_returns_BT)
    assert (advantages_BT[~steps_BT] == 0).all() and (returns_BT[~steps_BT] == 0).all()


def test_gae_by_hand():
    # Two steps around one observation, gamma = lam = 0.5. A_2 = 1 - 0.2 = 0.8; skipping, A_0 = (0.5 * 0.2 - 0.4) + 0.25 * 0.8 = -0.1.
    rewards_BT, values_BT = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.4, 9.0, 0.2]])
    skip_BT, _ = losses.gae(rewards_BT, values_BT, torch.tensor([[True, False, True]]), 0.5, 0.5)
    close(skip_BT, [[-0.1, 0.0, 0.8]])
    # With the observation as a step, the critic's guess of 9 inside it reaches the first token.
    all_BT, _ = losses.gae(rewards_BT, values_BT, torch.ones(1, 3, dtype=torch.bool), 0.5, 0.5)
    close(all_BT, [[0.5 * 9 - 0.4 + 0.25 * (0.1 - 9 + 0.25 * 0.8), 0.1 - 9 + 0.25 * 0.8, 0.8]])


def test_a_reward_outside_the_steps_is_refused():
    with pytest.raises(ValueError, match="lost"):
        losses.gae(torch.tensor([[0.0, 1.0]]), torch.zeros(1, 2), torch.tensor([[True, False]]), 1.0, 1.0)


def test_whiten_has_mean_zero_and_deviation_one_over_the_mask():
    x_BT = losses.whiten(torch.where(MASK, IN["logp"], NAN), MASK)
    assert abs(float(x_BT[MASK].mean())) < 1e-6 and abs(float(x_BT[MASK].std()) - 1) < 1e-4 and (x_BT[~MASK] == 0).all()
    with pytest.raises(ValueError, match="two tokens"):
        losses.whiten(torch.zeros(1, 2), torch.tensor([[True, False]]))


# ---- losses --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", AGGREGATIONS)
@given(cuts=st.lists(st.integers(1, 4), max_size=4), order=st.permutations(range(5)))
@settings(max_examples=25, deadline=None)
def test_gradient_does_not_depend_on_the_micro_batches(how, cuts, order):
    mask_BT = MASK.clone()
    mask_BT[3] = False  # a row without a trained token changes nothing, wherever it falls
    case = {"aggregation": how, "clip_low": 0.2, "clip_high": 0.28, "beta": 0.04}
    whole, whole_grad_BT = loss_and_grad(case, mask_BT=mask_BT)
    n = losses.denominator(mask_BT, how, BUDGET)
    logp_BT = IN["logp"].clone().requires_grad_()
    bounds = [0, *sorted(set(cuts)), 5]
    total = 0.0
    for start, stop in zip(bounds, bounds[1:]):
        rows = torch.tensor(order[start:stop])
        part = losses.policy_loss(
            logp_BT[rows], IN["old"][rows], IN["adv"][rows, None], mask_BT[rows],
            clip_low=0.2, clip_high=0.28, aggregation=how, denominator=n,
        ) + 0.04 * losses.aggregate(losses.kl(logp_BT[rows], IN["ref"][rows], mask_BT[rows], "k3"), mask_BT[rows], how, n)
        part.backward()
        total += float(part.detach())
    close(total, whole)
    close(logp_BT.grad, whole_grad_BT)


def test_aggregations_by_hand():
    x_BT, mask_BT = torch.tensor([[1.0, 2.0, NAN], [6.0, NAN, NAN], [NAN] * 3]), torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]]).bool()
    got = {how: float(losses.aggregate(x_BT, mask_BT, how, losses.denominator(mask_BT, how, 4))) for how in AGGREGATIONS}
    assert got == {"token": 9 / 3, "sequence": (1.5 + 6) / 2, "constant": 9 / 12}


def test_denominator_refuses_what_has_no_meaning():
    with pytest.raises(ValueError, match="nothing to train"):
        losses.denominator(torch.zeros(2, 3, dtype=torch.bool), "token")
    with pytest.raises(ValueError, match="budget_tokens"):
        losses.denominator(MASK, "constant")
    with pytest.raises(ValueError, match="unknown aggregation"):
        losses.denominator(MASK, "mean")


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_at_the_old_policy_the_gradient_is_reinforce(how):
    logp_BT = IN["old"].clone().requires_grad_()
    n = losses.denominator(MASK, how, BUDGET)
    losses.policy_loss(logp_BT, IN["old"], IN["adv"][:, None], MASK, clip_low=0.2, clip_high=0.2, aggregation=how, denominator=n).backward()
    plain_BT = IN["old"].clone().requires_grad_()
    losses.aggregate(-IN["adv"][:, None] * plain_BT, MASK, how, n).backward()
    torch.testing.assert_close(logp_BT.grad, plain_BT.grad)
    assert logp_BT.grad.abs().sum() > 0


def test_the_clip_is_asymmetric_and_one_sided():
    """Gradient at ratios around the bounds 1 - 0.2 and 1 + 0.28: it vanishes only where the move already went too far the right way."""
    ratio_N = torch.tensor([0.5, 0.79, 0.81, 1.0, 1.25, 1.29, 2.0])
    for sign, alive in ((1.0, [1, 1, 1, 1, 1, 0, 0]), (-1.0, [0, 0, 1, 1, 1, 1, 1])):
        logp_BT = ratio_N.log()[None].requires_grad_()
        mask_BT = torch.ones_like(logp_BT, dtype=torch.bool)
        args = (torch.zeros_like(logp_BT), torch.full_like(logp_BT, sign), mask_BT)
        losses.policy_loss(logp_BT, *args, clip_low=0.2, clip_high=0.28, aggregation="token", denominator=1.0).backward()
        close(logp_BT.grad, -sign * ratio_N[None] * torch.tensor(alive, dtype=torch.float32))
        close(losses.clip_fraction(logp_BT, *args, 0.2, 0.28), alive.count(0) / 7)


@pytest.mark.parametrize("target", ["adv", "old", "weight", "logp"])
def test_nan_outside_the_mask_leaks_nowhere(target):
    clean = {"logp": IN["logp"], "old": IN["old"], "adv": IN["adv"][:, None].expand(5, 9), "weight": torch.full((5, 9), 0.5)}

    def run(x):
        logp_BT = x["logp"].clone().requires_grad_()
        loss = losses.policy_loss(
            logp_BT, x["old"], x["adv"], MASK,
            clip_low=0.2, clip_high=0.2, aggregation="token", denominator=22.0, weight_BT=x["weight"], dual_clip=3.0,
        )
        loss.backward()
        return loss.detach(), logp_BT.grad

    loss, grad_BT = run({**clean, target: torch.where(MASK, clean[target], NAN)})
    want, want_grad_BT = run(clean)
    assert loss == want and torch.equal(grad_BT, want_grad_BT) and (grad_BT[~MASK] == 0).all()


def test_a_nan_at_a_trained_token_is_not_hidden():
    old_BT = IN["old"].clone()
    old_BT[0, 0] = NAN
    loss = losses.policy_loss(
        IN["logp"], old_BT, IN["adv"][:, None], MASK, clip_low=0.2, clip_high=0.2, aggregation="token", denominator=1.0
    )
    assert loss.isnan()
    assert math.isnan(losses.ratio_stats(IN["logp"], old_BT, MASK)["mean"])


def test_ratio_stats_are_raw():
    new_BT, base_BT = torch.tensor([[0.0, -1.0, NAN, 3.0]]), torch.tensor([[0.0, 1.0, 0.0, -2.0]])
    stats = losses.ratio_stats(new_BT, base_BT, torch.tensor([[True, True, False, True]]))
    ratios = [1.0, math.exp(-2), math.exp(5)]
    assert stats == pytest.approx({"mean": sum(ratios) / 3, "min": ratios[1], "max": ratios[2]}, rel=1e-5)


def test_value_clip_stops_the_gradient_of_a_value_that_ran_ahead():
    mask_BT = torch.ones(1, 3, dtype=torch.bool)
    values_BT = torch.tensor([[1.0, 0.3, -1.0]], requires_grad=True)  # moved by +1.0, +0.3, -1.0 from 0, towards, towards and away from 2
    args = (torch.zeros(1, 3), torch.full((1, 3), 2.0), mask_BT)
    losses.value_loss(values_BT, *args, clip=0.5, denominator=3.0).backward()
    close(values_BT.grad, [[0.0, (0.3 - 2) / 3, (-1 - 2) / 3]])
    values_BT.grad = None
    losses.value_loss(values_BT, *args, clip=None, denominator=3.0).backward()
    close(values_BT.grad, [[(1 - 2) / 3, (0.3 - 2) / 3, (-1 - 2) / 3]])


def test_a_bandit_learns():
    """Two arms, group of eight, reward for arm 1: one step raises its probability, fifty make it likely."""
    torch.manual_seed(0)
    logits_V = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([logits_V], lr=0.5)
    chances = [0.5]
    for _ in range(50):
        arms_B1 = torch.multinomial(logits_V.detach().softmax(0), 8, replacement=True)[:, None]
        mask_B1 = torch.ones_like(arms_B1, dtype=torch.bool)
        advantages_B1 = losses.group_advantages(arms_B1.T.float()).T
        logp_B1 = logits_V.log_softmax(0)[arms_B1]
        n = losses.denominator(mask_B1, "token")
        loss = losses.policy_loss(
            logp_B1, logp_B1, advantages_B1, mask_B1, clip_low=0.2, clip_high=0.2, aggregation="token", denominator=n
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        chances.append(float(logits_V.detach().softmax(0)[1]))
    assert chances[1] > 0.5 and chances[-1] > 0.9
