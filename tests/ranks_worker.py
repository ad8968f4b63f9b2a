"""What tests/test_ranks.py runs, in one process and in several: python -m tests.ranks_worker WHAT [OUT]."""
import math
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch.distributed.tensor import DTensor

from common import UserError, losses, ranks
from common.engine import HFEngine
from common.policy import Critic, load_model, make_optimizer, recompute_layers, save_policy, shard
from common.rollout import Budget, End, ToolPool, rollout
from common.run import main, set_up_torch
from common.update import Experience, critic_step, joined, mini_batches, policy_step, score, supervised_step, values
from tests.helpers import ScriptedEngine, byte_tokenizer, prompt, tiny_random_model

GROUP, WIDTH, TEMPERATURE = 2, 24, 0.7
LENGTHS = [14, 9, 24, 11, 17, 8, 21, 13, 10, 12]  # five groups of two: three for rank 1, two for rank 0


def batch() -> dict:
    """This rank's rows of a batch, prompts of a group alike."""
    g = torch.Generator().manual_seed(0)
    ids, lengths = torch.randint(0, 256, (len(LENGTHS), WIDTH), generator=g), torch.tensor(LENGTHS)
    ids[1::2, :4] = ids[::2, :4]
    response = (torch.arange(WIDTH) >= 4) & (torch.arange(WIDTH) < lengths[:, None])
    sampled = response.clone()
    sampled[:, 6:8] = False  # an observation
    rewards = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 0.2, 0.0, 1.0, 0.3, 0.1])  # nothing to learn from groups 0 and 1, so from all of rank 0
    sampler = torch.where(sampled, -torch.rand(ids.shape, generator=g) - 4, math.nan)
    groups = ranks.share(len(LENGTHS) // GROUP)
    mine = slice(groups.start * GROUP, groups.stop * GROUP)
    return {k: x[mine] for k, x in dict(ids=ids, lengths=lengths, response=response, sampled=sampled, rewards=rewards, sampler=sampler,
                                        starts=torch.full_like(lengths, 4)).items()}


def watched(module, lr: float, seen: dict, name: str) -> torch.optim.Optimizer:
    """An optimiser that notes the gradients it is handed, put together."""
    optimizer = make_optimizer(module.parameters(), lr)
    whole = lambda t: t.full_tensor() if hasattr(t, "full_tensor") else t
    optimizer.register_step_pre_hook(lambda *a: seen.update({f"{name} gradient {len(seen)}": torch.cat([whole(p.grad).flatten().clone() for p in module.parameters()])}))
    return optimizer


def train(algorithm: str, aggregation: str, updates: int = 1, recompute: bool = False, dtype: str = "float32", **extra) -> dict:
    """Two steps of an algorithm: every gradient, the metrics of each step and the weights at the end, of all ranks together."""
    b, seen, out = batch(), {}, {}
    model, reference = (tiny_random_model(seed=seed).to(getattr(torch, dtype)) for seed in (0, 1))
    if recompute:
        recompute_layers(model)
    critic = Critic(model) if algorithm == "ppo" else None
    shard(model, reference, critic)
    optimizer = watched(model, 1e-3, seen, "policy")
    critic_optimizer = watched(critic, 1e-3, seen, "critic") if critic else None
    for step in range(2):
        old = score(model, b["ids"], b["lengths"], b["starts"], b["sampled"], temperature=TEMPERATURE, micro_tokens=30)
        ref = score(reference, b["ids"], b["lengths"], b["starts"], b["sampled"], temperature=TEMPERATURE, micro_tokens=30)
        rewards_PG = b["rewards"].view(-1, GROUP)
        if algorithm == "grpo":
            advantages = losses.group_advantages(rewards_PG).view(-1, 1).expand_as(old)
        elif algorithm == "reinforce++":
            advantages = losses.reinforce_plus_plus(rewards_PG, 0.1 * losses.kl(old, ref, b["sampled"], "k1"), b["sampled"])
        else:
            steps = b["response"]
            values_BT = values(critic, b["ids"], b["lengths"], micro_tokens=30)
            advantages, returns = losses.gae(losses.rewards_at_end(b["rewards"], steps), values_BT, steps, 1.0, 0.95)
            advantages = losses.whiten(advantages, steps)
        x = Experience(b["ids"], b["lengths"], b["starts"], b["sampled"], b["sampled"], b["sampler"], old, advantages, ref)
        done = []
        for rows in mini_batches(len(b["ids"]), updates, seed=0, step=step):
            done.append(policy_step(model, optimizer, x, rows, lr=1e-3, clip_low=0.2, clip_high=0.2, aggregation=aggregation, budget_tokens=20,
                                    temperature=TEMPERATURE, micro_tokens=30, max_grad_norm=1.0, **extra))
            if critic:
                done[-1] |= critic_step(critic, critic_optimizer, x, rows, values_BT, returns, steps, lr=1e-3, value_clip=0.5, micro_tokens=30, max_grad_norm=1.0)
        out |= {f"{k} {step}": torch.tensor(float(v)) for k, v in joined(done).items()}
    out |= seen
    state = ranks.whole_state(model)
    if ranks.rank() == 0:
        out["weights"] = torch.cat([v.flatten() for v in state.values()])
    return out


def supervised() -> dict:
    seen, model = {}, tiny_random_model()
    shard(model)
    optimizer = watched(model, 1e-3, seen, "policy")
    rows = [(list(range(n)), [0, 0] + [1] * (n - 2)) for n in (9, 3, 12, 20, 5)]
    loss = supervised_step(model, optimizer, rows, lr=1e-3, micro_tokens=20, max_grad_norm=1.0)
    few = supervised_step(model, optimizer, rows[:1], lr=1e-3, micro_tokens=20, max_grad_norm=1.0)  # one rank has no row at all
    return {"loss": torch.tensor(loss), "few": torch.tensor(few), **seen}


def sampled() -> dict:
    """Trajectories by a scripted engine that says what a request's seed tells it to."""
    tokenizer = byte_tokenizer()
    engine = ScriptedEngine(tokenizer, lambda ids, seed: f"{seed}")
    prompts = [prompt(tokenizer, f"question {i}", i) for i in range(5)]
    trajectories = rollout(engine, tokenizer, prompts, lambda turn, t: End("answer"), {}, Budget(50, 50, 10, 100, 0), ToolPool(0), samples=2, seed=3, step=4)
    return {"trajectories": [(t.example.id, t.group, t.sample, t.model_text) for t in ranks.gather(trajectories)]}


def engine() -> dict:
    """An engine over weights that may be sharded: as good as new after an update, in the same memory, tied weights held once."""
    model = tiny_random_model()
    shard(model)
    engine = HFEngine(model, byte_tokenizer(), max_slots=2, max_length=40)
    optimizer, rows = make_optimizer(model.parameters(), 1e-2), [([1, 2, 3, 4], [0, 1, 1, 1])] * 2
    held = lambda: {name: p.data_ptr() for name, p in engine.model.named_parameters(remove_duplicate=False)}
    before, scores = held(), [engine.score([1, 2, 3, 4])]
    supervised_step(model, optimizer, rows, lr=1e-2, micro_tokens=20, max_grad_norm=1.0)
    engine.sync(model)
    assert held() == before and before["lm_head.weight"] == before["model.embed_tokens.weight"] and len(set(before.values())) == len(before) - 1
    return {"scores": torch.tensor([*scores, engine.score([1, 2, 3, 4])])}


def refreshed() -> dict:
    """A critic that begins anew from the body of a model that learned after it was copied."""
    model = tiny_random_model()
    critic = Critic(model)
    shard(model, critic)
    supervised_step(model, make_optimizer(model.parameters(), 1e-2), [([1, 2, 3, 4], [0, 1, 1, 1])] * 2, lr=1e-2, micro_tokens=20, max_grad_norm=1.0)

    def apart() -> float:
        a, b = ranks.whole_state(critic.body), ranks.whole_state(model.base_model)
        return math.nan if ranks.rank() else sum(float((a[name] - b[name]).abs().sum()) for name in a)
    before = apart()
    critic.body.load_state_dict(model.base_model.state_dict())
    return {"before": before, "after": apart()}


def pinned() -> list:
    """Which tensors are pinned of a mean that AdamW keeps off the GPU (here by way of a stand-in): a DTensor cannot be, its shard can."""
    model, seen = tiny_random_model(), []
    shard(model)
    p = next(model.parameters())
    optimizer, there = make_optimizer([p], 1e-3, offload=True), SimpleNamespace(is_cuda=True, device="cpu", dtype=torch.float32)
    with mock.patch.object(torch.Tensor, "pin_memory", lambda t: seen.append(type(t)) or t.clone()):
        mean = optimizer._keep(torch.ones_like(p), there)
    whole = mean.full_tensor() if isinstance(mean, DTensor) else mean
    assert isinstance(mean, DTensor) == (ranks.world() > 1) and torch.equal(whole, torch.ones(p.shape))
    return [kind.__name__ for kind in seen]


def states(out: Path, bf16: bool) -> dict:
    """A model and its optimiser through a checkpoint's state, and as a saved model."""
    model = tiny_random_model(seed=2)
    shard(model)
    optimizer = make_optimizer(model.parameters(), 1e-3, bf16=bf16, offload=bf16)
    supervised_step(model, optimizer, [([1, 2, 3, 4], [0, 1, 1, 1])] * 2, lr=1e-3, micro_tokens=20, max_grad_norm=1.0)
    first = ranks.whole_state(model), ranks.whole_state(optimizer)
    save_policy(out / "model", model, byte_tokenizer())
    other = tiny_random_model(seed=3)
    shard(other)
    other_optimizer = make_optimizer(other.parameters(), 1e-3, bf16=bf16, offload=bf16)
    ranks.load_whole_state(other, first[0] if ranks.rank() == 0 else None)
    ranks.load_whole_state(other_optimizer, first[1] if ranks.rank() == 0 else None)
    second = ranks.whole_state(other), ranks.whole_state(other_optimizer)
    if ranks.rank():
        return {}
    saved = load_model(str(out / "model"))[0].state_dict()
    assert all(torch.equal(first[0][k], second[0][k]) and torch.equal(first[0][k], saved[k]) for k in first[0]) and set(saved) == set(first[0])
    assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(second[1]["state"][i][k])) for i, entry in first[1]["state"].items() for k, v in entry.items())
    assert first[1]["state"][0]["exp_avg"].abs().sum() > 0 and first[1]["param_groups"] == second[1]["param_groups"]
    return {"names": sorted(first[0]), "means": [(tuple(e["exp_avg"].shape), e["exp_avg"].dtype) for e in first[1]["state"].values()]}


CASES = {f"{algorithm} {aggregation} {extra}": (algorithm, aggregation, extra) for algorithm, aggregation, extra in [
    *(("grpo", aggregation, {}) for aggregation in ("token", "sequence", "constant")),
    ("grpo", "token", {"kl": 0.1, "entropy": 0.05, "importance_cap": 1.5}), ("grpo", "token", {"updates": 3}),
    ("ppo", "token", {"recompute": True}), ("ppo", "token", {"dtype": "bfloat16"}),
    *(("ppo", aggregation, {"updates": 2}) for aggregation in ("token", "sequence", "constant")),
    *(("reinforce++", aggregation, {"updates": 2}) for aggregation in ("token", "sequence", "constant"))]}


def everything(out: Path) -> dict:
    numbers = torch.tensor([[1.0, 2.0, 4.0], [8.0]][ranks.rank()]) if ranks.world() > 1 else torch.tensor([1.0, 2.0, 4.0, 8.0])
    return {"cases": {name: train(algorithm, aggregation, **extra) for name, (algorithm, aggregation, extra) in CASES.items()},
            "supervised": supervised(), "sampled": sampled(), "engine": engine(), "pinned": pinned(), "refreshed": refreshed(),
            "states": states(out, bf16=False), "bf16": states(out, bf16=True),
            "numbers": [ranks.mean(numbers), *map(float, ranks.mean_and_variance(numbers)), *ranks.spread(numbers).values()],
            "nothing": [ranks.spread(numbers[:0]), str(ranks.mean(numbers[:0]))]}


def run(what: str, out: str = "") -> None:
    set_up_torch(0, 1, "cpu")
    if what == "everything":
        found = everything(Path(out))
        if ranks.rank() == 0:
            torch.save(found, Path(out) / f"{ranks.world()}.pt")
        return
    ranks.all_sum(1)
    if ranks.rank() == 1:
        if what == "mistake":
            raise UserError("the corpus is not there; bring it back")
        if what == "bug":
            raise RuntimeError("something broke in the second rank")
        if what == "killed":
            os.kill(os.getpid(), 9)
        if what == "hangs":
            time.sleep(1000)
    ranks.all_sum(1)  # rank 0 waits here


if __name__ == "__main__":
    main(lambda: run(*sys.argv[1:]))
