"""Advantages, policy losses, KL estimators and the value loss: pure functions on tensors.

Shape suffixes, the same in the whole project: B rows (one trajectory each), T tokens of a row, P prompts, G samples of one prompt,
V vocabulary, H hidden size, N tokens picked out of a batch. `x_BT[b, t]` always belongs to token t of row b: its log-prob, its reward,
the value of the state it was sampled in. Masks are bool.

Three policies, three names: `sampler` drew the tokens (the engine), `old` is the policy before the first update on them, `logp` is the
policy that is being trained. Where a token was not sampled its log-prob is NaN. Every function here selects with `torch.where` *before*
any arithmetic that could spread a NaN: `exp(NaN) * 0` is NaN, in the value and in the gradient.

One denominator per optimiser step: compute `denominator` on the whole mini-batch, before the micro-batch loop, and hand it to every
loss. Then the sum of the micro-batch losses is the loss of the mini-batch, however it was split:
    sum over micro-batches of (sum of x over its tokens) / n  =  (sum of x over all tokens) / n
A mean inside each micro-batch, averaged over micro-batches, is not that: it weighs a token by the company it happens to keep.
With several ranks a batch lies spread over them: `denominator` and `whiten` count and average over all ranks (`common.ranks`).

| aggregation | loss of a mini-batch                                        | found in                           |
|-------------|-------------------------------------------------------------|------------------------------------|
| token       | sum of x over trained tokens / number of trained tokens     | DAPO, verl "token-mean"            |
| sequence    | mean over rows of (mean of x over the row's trained tokens) | GRPO paper, verl "seq-mean-token-mean" |
| constant    | sum of x over trained tokens / (rows * token budget)        | Dr. GRPO                           |
"""

from typing import Literal

import torch
from torch import Tensor

from common import ranks

Aggregation = Literal["token", "sequence", "constant"]


# ---- advantages ----------------------------------------------------------------------------------------------------------------------


def group_advantages(rewards_PG: Tensor, std: Literal["unbiased", "none"] = "unbiased", eps: float = 1e-6) -> Tensor:
    """GRPO: how much better a sample is than the other samples of its prompt. Returns advantages_PG, float32.

    `std="unbiased"` divides by the group's standard deviation (ddof=1) + eps, `std="none"` does not (Dr. GRPO, arXiv 2503.20783).
    Equal rewards give exactly zero: they are compared, because the rounding error of a mean divided by eps is not small.
    A group of one keeps its reward (mean 0, deviation 1), as in verl `core_algos.compute_grpo_outcome_advantage`.
    Raises ValueError if a reward is not finite.
    """
    rewards_PG = rewards_PG.to(torch.float32)
    if not bool(rewards_PG.isfinite().all()):
        raise ValueError(f"rewards must be finite, got {rewards_PG.tolist()}")
    if rewards_PG.shape[1] == 1:
        return rewards_PG / (1 + eps) if std == "unbiased" else rewards_PG
    advantages_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
    if std == "unbiased":
        advantages_PG = advantages_PG / (rewards_PG.std(1, keepdim=True) + eps)
    all_equal_P1 = (rewards_PG == rewards_PG[:, :1]).all(1, keepdim=True)
    return torch.where(all_equal_P1, 0.0, advantages_PG)


def rewards_at_end(rewards_B: Tensor, steps_BT: Tensor) -> Tensor:
    """Each trajectory's reward placed on its last step; a row without a step gets none. Returns rewards_BT, float32."""
    rewards_BT = torch.zeros(steps_BT.shape, dtype=torch.float32, device=steps_BT.device)
    rows = steps_BT.any(1).nonzero().squeeze(1)
    last = steps_BT.shape[1] - 1 - steps_BT[rows].flip(1).int().argmax(1)
    rewards_BT[rows, last] = rewards_B[rows].to(rewards_BT)
    return rewards_BT


@torch.no_grad()
def gae(rewards_BT: Tensor, values_BT: Tensor, steps_BT: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438). Returns advantages_BT and returns_BT (for the critic), 0 outside the steps.

        delta_t = r_t + gamma * V_next - V_t          A_t = delta_t + gamma * lam * A_next

    `steps_BT` says which tokens are time steps; between two steps the next value and advantage pass through untouched.
    All response tokens, tool results included: what Search-R1's code does. Only the model's own tokens: later verl, which skips
    observations, so that neither discounting nor the critic's guesses inside a document reach the model's tokens.
    Raises ValueError for a reward outside the steps, which would be lost without a word.
    """
    if bool(((rewards_BT != 0) & ~steps_BT).any()):
        raise ValueError("a reward lies on a token that is not a step: it would be lost")
    values_BT = torch.where(steps_BT, values_BT, 0.0)
    advantages_BT = torch.zeros_like(values_BT)
    next_value_B = next_advantage_B = torch.zeros_like(values_BT[:, 0])
    for t in reversed(range(steps_BT.shape[1])):
        delta_B = rewards_BT[:, t] + gamma * next_value_B - values_BT[:, t]
        next_advantage_B = torch.where(steps_BT[:, t], delta_B + gamma * lam * next_advantage_B, next_advantage_B)
        next_value_B = torch.where(steps_BT[:, t], values_BT[:, t], next_value_B)
        advantages_BT[:, t] = next_advantage_B
    return torch.where(steps_BT, advantages_BT, 0.0), torch.where(steps_BT, advantages_BT + values_BT, 0.0)


def returns(rewards_BT: Tensor, steps_BT: Tensor, gamma: float) -> Tensor:
    """REINFORCE: discounted sum of the rewards from each step on, 0 outside the steps, which do not discount either. Returns returns_BT."""
    return gae(rewards_BT, torch.zeros_like(rewards_BT), steps_BT, gamma, 1.0)[1]


def whiten(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the masked tokens of the whole batch (ddof=1, as verl `masked_whiten`), 0 elsewhere.

    Raises ValueError if fewer than two tokens are masked.
    """
    picked_N = x_BT[mask_BT]
    if (n := ranks.all_sum(len(picked_N))) < 2:
        raise ValueError(f"whitening needs at least two tokens, got {n}")
    mean, variance = ranks.mean_and_variance(picked_N)
    return torch.where(mask_BT, (x_BT - mean) * torch.rsqrt(variance + 1e-8), 0.0)


def reinforce_plus_plus(rewards_PG: Tensor, penalty_BT: Tensor, steps_BT: Tensor, scale: Literal["batch", "group"] = "batch") -> Tensor:
    """REINFORCE++ with a group's mean as its baseline (arXiv 2501.03262). Returns advantages_BT, float32, 0 outside the steps.

    R is a trajectory's reward, penalty_s what step s costs (a KL coefficient times k1), both sums over the group's rows or the row's steps:
        batch:  G_t = R - mean(R) - sum over s >= t of penalty_s          A_t = (G_t - mean(G)) / sqrt(var(G) + 1e-8) over all steps of the batch
        group:  A_t = (R - mean(R)) / (std(R) + 1e-6) - sum over s >= t of penalty_s
    as OpenRLHF's `reinforce_baseline` and `group_norm`. A group of one keeps its R, as in `group_advantages`. Rows are trajectories, the
    samples of a prompt next to each other. With "batch" a group of equal rewards has G = 0 but not always A = 0: it lies above or below the
    batch's mean over tokens, which long rows pull.
    Raises ValueError if a reward is not finite, if rows and rewards do not match, or, with "batch", if there are fewer than two steps.
    """
    if rewards_PG.numel() != len(steps_BT):
        raise ValueError(f"{rewards_PG.numel()} rewards for {len(steps_BT)} trajectories")
    centred_PG = group_advantages(rewards_PG, std="none" if scale == "batch" else "unbiased")
    rewards_BT = rewards_at_end(centred_PG.flatten(), steps_BT) - torch.where(steps_BT, penalty_BT, 0.0)
    returns_BT = returns(rewards_BT, steps_BT, gamma=1.0)
    return whiten(returns_BT, steps_BT) if scale == "batch" else returns_BT


# ---- losses --------------------------------------------------------------------------------------------------------------------------


def denominator(mask_BT: Tensor, how: Aggregation, budget_tokens: int | None = None) -> float:
    """What the losses of one optimiser step are divided by; `mask_BT` holds the trained tokens of the *whole* mini-batch.

    `budget_tokens`, for `how="constant"` only: the sampled tokens a whole trajectory may have, all its turns together.
    Raises ValueError if nothing is trained.
    """
    if how == "token":
        count = int(mask_BT.sum())
    elif how == "sequence":
        count = int(mask_BT.any(1).sum())
    elif how == "constant":
        if budget_tokens is None:
            raise ValueError("how='constant' needs budget_tokens")
        count = mask_BT.shape[0] * budget_tokens
    else:
        raise ValueError(f"unknown aggregation {how!r}: token, sequence or constant")
    count = ranks.all_sum(count)
    if count <= 0:
        raise ValueError(f"nothing to train in a mini-batch of shape {tuple(mask_BT.shape)}")
    return float(count)


def aggregate(x_BT: Tensor, mask_BT: Tensor, how: Aggregation, denominator: float) -> Tensor:
    """One number from per-token terms (a loss, a KL, an entropy): this micro-batch's share of the mini-batch. See the table above."""
    x_BT = torch.where(mask_BT, x_BT, 0.0)
    if how == "sequence":
        x_BT = x_BT / mask_BT.sum(1, keepdim=True).clamp(min=1)
    return x_BT.sum() / denominator


def policy_loss(
    logp_BT: Tensor,
    old_BT: Tensor,
    adv_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    aggregation: Aggregation,
    denominator: float,
    weight_BT: Tensor | None = None,
    dual_clip: float | None = None,
) -> Tensor:
    """PPO's clipped surrogate (arXiv 1707.06347): the mean of max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(logp - old).

    `adv_BT` may be (B, 1). `dual_clip` c > 1 bounds the loss of a bad token by -A c (arXiv 1912.09729). `weight_BT` multiplies each token's
    loss (`importance_weights`). Gradient flows into `logp_BT` only.

    Why is the loss 0? At logp = old every r is 1 and the advantages of a group sum to zero, so with rows of equal length the *value* is 0.
    The gradient is not: d r / d logp = r = 1, which leaves -A * d logp, the plain REINFORCE gradient.
    """
    # +-20 as in verl: far outside any clip range, and exp stays finite.
    ratio_BT = torch.where(mask_BT, logp_BT - old_BT.detach(), 0.0).clamp(-20, 20).exp()
    adv_BT = adv_BT.detach()
    loss_BT = torch.maximum(-adv_BT * ratio_BT, -adv_BT * ratio_BT.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is not None:
        loss_BT = torch.where(adv_BT < 0, torch.minimum(loss_BT, -adv_BT * dual_clip), loss_BT)
    if weight_BT is not None:
        loss_BT = loss_BT * weight_BT.detach()
    return aggregate(loss_BT, mask_BT, aggregation, denominator)


def value_loss(
    values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor, *, clip: float | None, denominator: float
) -> Tensor:
    """Squared error of the critic: half the token mean of max((V - R)^2, (V_clipped - R)^2), V_clipped within `clip` of the old value.

    The clip of OpenAI's ppo2 and of verl `compute_value_loss`; None is the plain squared error.
    """
    error_BT = torch.where(mask_BT, values_BT - returns_BT, 0.0).square()
    if clip is not None:
        moved_BT = torch.where(mask_BT, values_BT - old_values_BT, 0.0).clamp(-clip, clip)
        error_BT = torch.maximum(error_BT, torch.where(mask_BT, old_values_BT + moved_BT - returns_BT, 0.0).square())
    return 0.5 * aggregate(error_BT, mask_BT, "token", denominator)


def kl(logp_BT: Tensor, ref_BT: Tensor, mask_BT: Tensor, kind: Literal["k1", "k2", "k3"]) -> Tensor:
    """Per-token estimate of KL(policy || reference) (J. Schulman, "Approximating KL divergence", 2020). Returns kl_BT, 0 outside the mask.

    With d = logp - ref: k1 = d (unbiased, high variance; for use in the reward: as a loss its expected gradient is zero), k2 = d^2 / 2,
    k3 = exp(-d) + d - 1 (unbiased, never negative; the usual loss term), d clamped to +-20 and the result to 10 as in verl's `low_var_kl`.
    """
    d_BT = torch.where(mask_BT, logp_BT - ref_BT, 0.0)
    if kind == "k1":
        return d_BT
    if kind == "k2":
        return 0.5 * d_BT.square()
    if kind == "k3":
        d_BT = d_BT.clamp(-20, 20)
        return (torch.exp(-d_BT) + d_BT - 1).clamp(max=10)
    raise ValueError(f"unknown KL estimator {kind!r}: k1, k2 or k3")


def entropy(logp_NV: Tensor) -> Tensor:
    """Entropy in nats of each row of log-probabilities (normalised, finite). Returns entropy_N."""
    return -(logp_NV.exp() * logp_NV).sum(-1)


# ---- sampler against trainer ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def importance_weights(old_BT: Tensor, sampler_BT: Tensor, mask_BT: Tensor, cap: float) -> Tensor:
    """Truncated importance correction for an engine that samples from slightly other probabilities: min(exp(old - sampler), cap) per token.

    Returns weight_BT for `policy_loss`, 1 outside the mask. Source: F. Yao et al., "Your efficient RL framework secretly brings you
    off-policy RL training", 2025.
    """
    return torch.where(mask_BT, old_BT - sampler_BT, 0.0).exp().clamp(max=cap)


@torch.no_grad()
def ratio_stats(new_BT: Tensor, base_BT: Tensor, mask_BT: Tensor) -> dict[str, float]:
    """Mean, min and max of exp(new - base) over the masked tokens, raw: before any clip or cap. For old/sampler and for logp/old."""
    ratio_N = (new_BT[mask_BT] - base_BT[mask_BT]).exp()
    return {"mean": float(ratio_N.mean()), "min": float(ratio_N.min()), "max": float(ratio_N.max())}


@torch.no_grad()
def clip_fraction(logp_BT: Tensor, old_BT: Tensor, adv_BT: Tensor, mask_BT: Tensor, clip_low: float, clip_high: float) -> float:
    """Share of the masked tokens whose gradient the clip removes: above 1 + clip_high with A > 0, or below 1 - clip_low with A < 0."""
    ratio_BT = torch.where(mask_BT, logp_BT - old_BT, 0.0).exp()
    clipped_BT = ((ratio_BT > 1 + clip_high) & (adv_BT > 0)) | ((ratio_BT < 1 - clip_low) & (adv_BT < 0))
    return float(clipped_BT[mask_BT].float().mean())
