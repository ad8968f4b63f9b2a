"""From a batch of trajectories to one optimiser step: log-probs in micro-batches, the loss of a mini-batch, its gradient.

What a paper decides (advantages, which tokens are trained, clip ranges, aggregation, where the KL goes) comes in as arguments; what
never differs stands here.
"""
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common import UserError, losses, ranks
from common.policy import Critic, optimizer_step, pack, token_logprobs
from common.rollout import fit


@dataclass
class Experience:
    """What an update needs to know of every token. [B, T] tensors, NaN where there is no such number.

    `old_BT` are log-probs under the policy before the first update on this batch. Where a batch gets one update only, they are the
    log-probs of that update's own forward pass, so they may start as NaN: `policy_step` fills them in.
    """
    ids_BT: Tensor
    lengths_B: Tensor
    starts_B: Tensor  # length of each row's prompt: equal prompts are computed once
    trained_BT: Tensor  # bool: in the policy loss
    sampled_BT: Tensor  # bool: written by the model
    sampler_BT: Tensor  # log-probs of the engine
    old_BT: Tensor
    advantages_BT: Tensor
    ref_BT: Tensor | None = None  # log-probs of the reference model; only where a KL term needs it

    def cut(self, rows: Sequence[int], *tensors: Tensor) -> list[Tensor]:
        """Rows of [B, T] tensors, without the padding they do not need."""
        width = int(self.lengths_B[list(rows)].max())
        return [x[list(rows), :width] for x in tensors]


def micro_batches(lengths_B: Tensor, rows: Sequence[int], micro_tokens: int) -> Iterator[list[int]]:
    """`rows` in groups of at most `micro_tokens` padded tokens; with several ranks equally many on each, those too few made up by empty ones."""
    groups = pack(lengths_B[list(rows)].tolist(), micro_tokens)
    groups += [[]] * (ranks.all_max(len(groups)) - len(groups))
    for group in groups:
        yield [rows[i] for i in group]


def empty_pass(model, prompts: bool = True) -> None:
    """What a rank does in an empty micro-batch: other ranks' passes, forward and backward, wait for its shards of the weights. `prompts`: they
    compute prompts apart from responses."""
    ids = torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device)
    nothing, starts = ids.bool(), torch.ones_like(ids[:, 0]) if prompts else None
    out = model(ids) if isinstance(model, Critic) else token_logprobs(model, ids, nothing, 1.0, starts_B=starts)[0]
    if torch.is_grad_enabled():
        torch.where(nothing, out, 0.0).sum().backward()


def mini_batches(n: int, updates: int, *, seed: int, step: int) -> list[list[int]]:
    """Row numbers of the optimiser steps on one rollout batch: shuffled, a pure function of (seed, step), when there are several. `updates`
    of them, as even as can be, or as many as there are rows.

    With several ranks, of n rows here, the batch of all of them is shuffled and cut, and each takes part with its own rows."""
    total, first = ranks.all_sum(n), ranks.before(n)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed * 1_000_003 + step)) if updates > 1 else torch.arange(total)
    return [[i - first for i in part.tolist() if first <= i < first + n] for part in order.tensor_split(updates) if len(part)]


@torch.no_grad()
def score(model, ids_BT: Tensor, lengths_B: Tensor, starts_B: Tensor, mask_BT: Tensor, *, temperature: float, micro_tokens: int) -> Tensor:
    """logp_BT of the masked tokens, no gradient."""
    out_BT = torch.full(ids_BT.shape, math.nan, device=ids_BT.device)
    for rows in micro_batches(lengths_B, range(len(ids_BT)), micro_tokens):
        if not rows:
            empty_pass(model)
            continue
        width = int(lengths_B[rows].max())
        out_BT[rows, :width] = token_logprobs(model, ids_BT[rows, :width], mask_BT[rows, :width], temperature, starts_B=starts_B[rows])[0]
    return out_BT


@torch.no_grad()
def values(critic: Critic, ids_BT: Tensor, lengths_B: Tensor, *, micro_tokens: int) -> Tensor:
    """values_BT of the critic, no gradient; NaN on padding and first tokens."""
    out_BT = torch.full(ids_BT.shape, math.nan, device=ids_BT.device)
    for rows in micro_batches(lengths_B, range(len(ids_BT)), micro_tokens):
        if not rows:
            empty_pass(critic)
            continue
        width = int(lengths_B[rows].max())
        out_BT[rows, :width] = critic(ids_BT[rows, :width])
    return out_BT


def policy_step(model, optimizer, x: Experience, rows: Sequence[int], *, lr: float, clip_low: float, clip_high: float,
                aggregation: losses.Aggregation, budget_tokens: int, temperature: float, micro_tokens: int, max_grad_norm: float,
                kl: float = 0.0, kl_kind: str = "k3", entropy: float = 0.0, importance_cap: float = 0.0,
                dual_clip: float | None = None) -> dict[str, float]:
    """One optimiser step on some rows of a batch; returns its metrics. `kl` is the coefficient of a KL term in the loss.

    The denominator is computed once for all rows, before the micro-batches, so the gradient does not depend on how they are cut.
    Rows whose advantages are all exactly zero add nothing to the gradient and are skipped, unless a KL or entropy term needs them.
    A gradient that is not finite changes nothing but the metric skipped_steps; `Run.log_train` keeps the batch.
    """
    denominator = losses.denominator(x.trained_BT[list(rows)], aggregation, budget_tokens)
    needed = [b for b in rows if kl or entropy or bool((x.advantages_BT[b] != 0).any())]
    tokens, sums = 0, {"entropy": 0.0, "kl": 0.0, "clip_fraction": 0.0, "policy_ratio_mean": 0.0}
    low, high = math.inf, -math.inf
    for part in micro_batches(x.lengths_B, needed, micro_tokens):
        if not part:
            empty_pass(model)
            continue
        ids, mask, sampled, sampler, old, adv = x.cut(part, x.ids_BT, x.trained_BT, x.sampled_BT, x.sampler_BT, x.old_BT, x.advantages_BT)
        logp, entropy_BT = token_logprobs(model, ids, mask, temperature, starts_B=x.starts_B[part], entropy=True)
        if bool(old[mask].isnan().any()):  # first and only update: this is the old policy
            old = logp.detach()
            x.old_BT[part, :ids.shape[1]] = old
        weight = losses.importance_weights(old, sampler, mask & sampled, importance_cap) if importance_cap else None
        loss = losses.policy_loss(logp, old, adv, mask, clip_low=clip_low, clip_high=clip_high, aggregation=aggregation,
                                  denominator=denominator, weight_BT=weight, dual_clip=dual_clip)
        n = int(mask.sum())
        if kl:
            kl_BT = losses.kl(logp, x.cut(part, x.ref_BT)[0], mask, kl_kind)
            loss = loss + kl * losses.aggregate(kl_BT, mask, aggregation, denominator)
            sums["kl"] += float(kl_BT.detach().sum())
        if entropy:
            loss = loss - entropy * losses.aggregate(entropy_BT, mask, aggregation, denominator)
        loss.backward()
        ratio = losses.ratio_stats(logp, old, mask)
        low, high, tokens = min(low, ratio["min"]), max(high, ratio["max"]), tokens + n
        sums["entropy"] += float(entropy_BT.detach()[mask].sum())
        sums["clip_fraction"] += n * losses.clip_fraction(logp, old, adv, mask, clip_low, clip_high)
        sums["policy_ratio_mean"] += n * ratio["mean"]
    if not ranks.all_sum(len(needed)):
        return {"grad_norm": 0.0, "lr": lr, "skipped_steps": 0}
    tokens = ranks.all_sum(tokens)
    out = {k: ranks.all_sum(v) / tokens for k, v in sums.items() if k != "kl" or kl}
    norm = optimizer_step(model, optimizer, max_grad_norm, lr)
    return {**out, "policy_ratio_min": ranks.all_min(low), "policy_ratio_max": ranks.all_max(high), "grad_norm": norm, "lr": lr,
            "skipped_steps": int(not math.isfinite(norm))}


def critic_step(critic: Critic, optimizer, x: Experience, rows: Sequence[int], values_BT: Tensor, returns_BT: Tensor, steps_BT: Tensor, *,
                lr: float, value_clip: float | None, micro_tokens: int, max_grad_norm: float) -> dict[str, float]:
    """One optimiser step of the critic on some rows; `steps_BT` are the tokens whose value is learned."""
    denominator, total = losses.denominator(steps_BT[list(rows)], "token"), 0.0
    for part in micro_batches(x.lengths_B, rows, micro_tokens):
        if not part:
            empty_pass(critic)
            continue
        ids, mask, old, returns = x.cut(part, x.ids_BT, steps_BT, values_BT, returns_BT)
        loss = losses.value_loss(critic(ids), old, returns, mask, clip=value_clip, denominator=denominator)
        loss.backward()
        total += float(loss.detach())
    norm = optimizer_step(critic, optimizer, max_grad_norm, lr)
    picked, old = returns_BT[steps_BT], values_BT[steps_BT]
    (_, error), (_, variance) = ranks.mean_and_variance(picked - old), ranks.mean_and_variance(picked)
    return {"value_loss": ranks.all_sum(total), "value_explained": float(1 - error / variance.clamp(min=1e-8)), "value_skipped_steps": int(not math.isfinite(norm))}


def supervised_step(model, optimizer, rows: Sequence[tuple[list[int], list[int]]], *, lr: float, micro_tokens: int, max_grad_norm: float) -> float:
    """One step of plain language modelling on (ids, mask) rows, mean over their masked tokens; returns that loss in nats per token.
    Several ranks are handed the same rows, and each takes its share. UserError if the
    gradient is not finite: nothing random was sampled, so the next step would hardly be better."""
    tokens, total, rows = sum(sum(mask) for _, mask in rows), 0.0, [rows[b] for b in ranks.share(len(rows))]
    lengths_B = torch.tensor([len(ids) for ids, _ in rows])
    pad = lambda row, n: row + [0] * (n - len(row))
    device = next(model.parameters()).device
    for part in micro_batches(lengths_B, range(len(rows)), micro_tokens):
        if not part:
            empty_pass(model, prompts=False)
            continue
        width = int(lengths_B[part].max())
        ids = torch.tensor([pad(rows[b][0], width) for b in part], device=device)
        mask = torch.tensor([pad(rows[b][1], width) for b in part], dtype=torch.bool, device=device)
        loss = -torch.where(mask, token_logprobs(model, ids, mask, 1.0)[0], 0.0).sum() / tokens
        loss.backward()
        total += float(loss.detach())
    norm, total = optimizer_step(model, optimizer, max_grad_norm, lr), ranks.all_sum(total)
    if not math.isfinite(norm):
        raise UserError(f"the gradient of a supervised step is not finite (norm {norm}, loss {total:.3g}, learning rate {lr:.3g}): lower its learning rate")
    return total


def demonstration_row(prompt: str, segments: Sequence[tuple[str, str]], tokenizer, wrap, observation_tokens: int) -> tuple[list[int], list[int]]:
    """Ids and loss mask of a trace: prompt and tool results are context, the model's turns are learned."""
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    mask = [0] * len(ids)
    for author, text in segments:
        piece = fit(tokenizer, text, wrap, observation_tokens)[0] if author == "tool" else tokenizer.encode(text, add_special_tokens=False)
        ids += piece
        mask += [int(author == "model")] * len(piece)
    return ids, mask


def joined(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics of several optimiser steps as one: means, the extremes of minima and maxima, and the number of skipped steps."""
    out = {}
    for key in dict.fromkeys(k for s in steps for k in s):
        found = [s[key] for s in steps if key in s]
        out[key] = (min(found) if key.endswith("_min") else max(found) if key.endswith("_max") else sum(found) if key.endswith("skipped_steps") else
                    sum(found) / len(found))
    return out
