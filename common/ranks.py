"""Several processes, one run. With one process every function here gives back what it got, and no process group exists.

    torchrun --nproc_per_node=8 -m methods.search_r1 --preset paper        (or: make search_r1 RANKS=8 ARGS="--preset paper")

Every rank loads data and tools, makes the same prompts and samples its share of them, whole groups, with an engine that holds all weights
(gathered once per sync). A trajectory's seed comes from the number of its group in the whole step, so it is the same on any number of
ranks, up to rounding. Parameters, gradients and optimiser state are sharded (FSDP2, `common.policy.shard`), on GPUs over NCCL and on CPUs
over gloo. Gradients of ranks are added up, not averaged: each loss is divided by what is counted over all ranks.

What all ranks must do alike is to take part: a collective waits for everyone. So all ranks run the same number of micro-batches (those
without rows run an empty one, `common.update.micro_batches`), and every decision that leads to a collective is made from numbers that are
the same everywhere. Only rank 0 prints and writes. A rank that fails says why and leaves at once; torchrun then ends the others.
"""
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.tensor import DTensor, distribute_tensor

from common import UserError

LAUNCHED = dist.is_torchelastic_launched()  # by torchrun, which sets RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE
# The longest that a rank waits for the others, for instance for one whose tools are slow. Then the run ends, rather than hang.
TIMEOUT_S = float(os.environ.get("TOOL_RL_RANK_TIMEOUT_S", 3600))


# ---- beginning and end ------------------------------------------------------------------------------------------------
def world() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """The number of this one, from 0."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"]) if LAUNCHED else 0


def on_this_machine() -> int:
    """How many ranks share this machine."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if LAUNCHED else 1


def start(device: str) -> None:
    """Meet the other ranks, if torchrun started several; on GPUs each takes the one with its local number."""
    if not LAUNCHED or int(os.environ["WORLD_SIZE"]) == 1 or dist.is_initialized():
        return
    if device.startswith("cuda"):
        local, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if device != "cuda" or local >= there:
            raise UserError(f"--device {device} with {on_this_machine()} ranks on {socket.gethostname()}, which has {there} GPUs: use --device cuda "
                            "and at most one rank per GPU")
        torch.cuda.set_device(local)
    if os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: nothing need listen outside it
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo", timeout=timedelta(seconds=TIMEOUT_S))


def stop() -> None:
    """The end of a body that went well. Several ranks wait for each other, as rank 0 still writes, and leave without tidying up: gloo's threads
    now and then abort a process that takes its group down, and torchrun would end rank 0 for it."""
    if world() == 1:
        return
    all_sum(0)
    sys.stdout.flush(), sys.stderr.flush()
    if rank():
        time.sleep(0.5)  # until rank 0 has heard the last message
    os._exit(0)


def quiet() -> None:
    """Only rank 0 prints; errors go to stderr, from any rank."""
    if rank():
        sys.stdout = open(os.devnull, "w")


def leave(code: int, reason: str, error: Exception | None = None) -> None:
    """End this process with a message on stderr. With several ranks at once: to tidy up may mean to wait for ranks that are gone."""
    if not LAUNCHED:
        print(reason, file=sys.stderr)
        sys.exit(code)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if rank() and (error is None or code == 2):
        time.sleep(2)  # what all ranks have to say is said by rank 0, whose end makes torchrun end the others meanwhile
    if error is not None and "by peer" in str(error):  # gloo's words
        reason = f"the connection to another rank is gone; it says why itself, above or below ({str(error).splitlines()[0]})"
    elif error is not None:
        get_error_handler().record_exception(error)  # for torchrun's own summary
    if error is not None or rank() == 0:
        print(f"rank {rank()}: {reason.strip()}" if error is not None else reason, file=sys.stderr)
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


# ---- sharing out ------------------------------------------------------------------------------------------------------
def share(n: int) -> range:
    """Which of n things are this rank's: one stretch, as long as the others' or one longer."""
    return range(n * rank() // world(), n * (rank() + 1) // world()) if world() > 1 else range(n)


def before(n: int) -> int:
    """With n things here: how many the ranks before this one have."""
    return sum(gather([n])[:rank()]) if world() > 1 else 0


def gather(items: list) -> list:
    """The items of all ranks, in the order of ranks, on every rank."""
    if world() == 1:
        return items
    found: list = [None] * world()
    dist.all_gather_object(found, items)
    return [item for part in found for item in part]


def broadcast(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    if world() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


# ---- adding up --------------------------------------------------------------------------------------------------------
def _reduce(value: float, how: dist.ReduceOp) -> float:
    if world() == 1:
        return value
    box = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(box, how)
    return type(value)(box.item())


def all_sum(value: float) -> float:
    """Sum over the ranks; like `all_min` and `all_max` of a number, an int stays one."""
    return _reduce(value, dist.ReduceOp.SUM)


def all_min(value: float) -> float:
    return _reduce(value, dist.ReduceOp.MIN)


def all_max(value: float) -> float:
    return _reduce(value, dist.ReduceOp.MAX)


def mean(x_N: torch.Tensor) -> float:
    """Mean of the numbers of all ranks; NaN if there are none."""
    if world() == 1:
        return float(x_N.mean())
    n = all_sum(len(x_N))
    return all_sum(float(x_N.double().sum())) / n if n else float("nan")


def mean_and_variance(x_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and unbiased variance of the numbers of all ranks, as scalar tensors of x's type."""
    if world() == 1:
        return x_N.mean(), x_N.var()
    centre = mean(x_N)
    squares = all_sum(float((x_N.double() - centre).square().sum()))
    count = all_sum(len(x_N)) - 1
    return x_N.new_tensor(centre), x_N.new_tensor(squares / count if count > 0 else float("nan"))


def spread(x_N: torch.Tensor) -> dict[str, float]:
    """Mean, min and max of the numbers of all ranks; empty if there are none."""
    if not all_sum(len(x_N)):
        return {}
    low, high = (float(x_N.min()), float(x_N.max())) if len(x_N) else (float("inf"), float("-inf"))
    return {"mean": mean(x_N), "min": all_min(low), "max": all_max(high)}


# ---- states of sharded things -----------------------------------------------------------------------------------------
def whole_state(x) -> dict:
    """x.state_dict() without shards: rank 0 gets whole tensors, on the CPU, the others None in their place, but all must take part.

    So a checkpoint does not say how many ranks wrote it, and any number can read it. It must fit into the memory of rank 0."""
    state = x.state_dict()
    if world() == 1:
        return state
    names: dict[int, str] = {}  # tied weights have several names: gathered once
    first = {name: names.setdefault(id(p), name) for name, p in x.named_parameters(remove_duplicate=False)} if isinstance(x, torch.nn.Module) else {}
    out = {}
    for name, value in state.items():
        out[name] = out[first[name]] if first.get(name, name) != name else _whole(value)
    return out


def _whole(value):
    """Put together for rank 0, and on the CPU: a CUDA tensor that is sent on as an object would take memory of GPU 0 in every rank."""
    if isinstance(value, dict):
        return {k: _whole(v) for k, v in value.items()}
    if isinstance(value, DTensor):
        value = value.full_tensor()
        return value.cpu() if rank() == 0 else None
    return value.cpu() if isinstance(value, torch.Tensor) else value


def load_whole_state(x, state: dict | None) -> None:
    """x.load_state_dict(state), where rank 0 alone has a state and x, a module or an optimiser, may be sharded."""
    if world() == 1:
        return x.load_state_dict(state)
    module = isinstance(x, torch.nn.Module)
    if not module and not isinstance(x, torch.optim.Optimizer):
        return x.load_state_dict(broadcast(_whole(state)))
    targets = x.state_dict() if module else dict(enumerate(p for group in x.param_groups for p in group["params"]))
    whole: list[torch.Tensor] = []  # rank 0's tensors that are sent one by one, each cut as the weight it belongs to

    def outline(value, target):
        if isinstance(value, dict):
            return {k: outline(v, target) for k, v in value.items()}
        if not isinstance(value, torch.Tensor) or not isinstance(target, DTensor) or value.shape != target.shape:
            return _whole(value)  # a count of steps, for instance
        whole.append(value)
        return _Sent(len(whole) - 1, value.shape, value.dtype)

    def receive(value, target):
        if isinstance(value, dict):
            return {k: receive(v, target) for k, v in value.items()}
        if not isinstance(value, _Sent):
            return value
        here = whole[value.number].to(target.device) if rank() == 0 else torch.empty(value.shape, dtype=value.dtype, device=target.device)
        return distribute_tensor(here.contiguous(), target.device_mesh, target.placements)

    entries = (state if module else state["state"]) if rank() == 0 else {}
    plan = broadcast({k: outline(v, targets.get(k)) for k, v in entries.items()})
    entries = {k: receive(v, targets.get(k)) for k, v in plan.items()}
    x.load_state_dict(entries if module else {"state": entries, "param_groups": broadcast(state and state["param_groups"])})


@dataclass(frozen=True)
class _Sent:
    """Stands for a tensor of rank 0 that is sent by itself."""
    number: int
    shape: torch.Size
    dtype: torch.dtype
