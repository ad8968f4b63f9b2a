"""`--plan`: what a run needs, from its settings alone: memory per GPU, tokens and generations per step, data over the run.

No weight is loaded, no data set is read and no network is used. Every number is the most the settings allow, every trajectory at its full
length. The formulas describe this project's own code in float32 (policy.py, update.py, HFEngine) and are held against measured peaks in
tests/test_plan.py, on a CPU. Not in them: the interpreter, the CUDA context, what the allocator loses, FSDP's buffers, a local reader or judge.
"""
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from common import UserError
from common.engine import PREFILL_TOKENS, PROBE_TOKENS, grown
from common.policy import TINY_FOLDER, chunk_rows

# Shapes of the models that presets and help texts name, as their public config.json on huggingface.co says. Checked in tests/test_plan.py
# against the published numbers of parameters.
_QWEN = dict(model_type="qwen2", vocab_size=151936, tie_word_embeddings=True)
_QWEN_LARGE = dict(model_type="qwen2", vocab_size=152064, tie_word_embeddings=False)
_LLAMA = dict(model_type="llama", vocab_size=128256)
_GEMMA = dict(model_type="gemma2", vocab_size=256000, tie_word_embeddings=True)


def _shape(family: dict, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **more) -> dict:
    return {**family, "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, **more}


SHAPES = {
    "smollm2": _shape(dict(model_type="llama", vocab_size=49152, tie_word_embeddings=True), 576, 1536, 30, 9, 3),
    "Qwen/Qwen2.5-0.5B": _shape(_QWEN, 896, 4864, 24, 14, 2),
    "Qwen/Qwen2.5-1.5B": _shape(_QWEN, 1536, 8960, 28, 12, 2),
    "Qwen/Qwen2.5-3B": _shape(_QWEN, 2048, 11008, 36, 16, 2),
    "Qwen/Qwen2.5-7B": _shape(_QWEN_LARGE, 3584, 18944, 28, 28, 4),
    "Qwen/Qwen2.5-14B": _shape(_QWEN_LARGE, 5120, 13824, 48, 40, 8),
    "Qwen/Qwen2.5-32B": _shape(_QWEN_LARGE, 5120, 27648, 64, 40, 8),
    "Qwen/Qwen2.5-Math-1.5B": _shape(_QWEN, 1536, 8960, 28, 12, 2),
    "Qwen/Qwen2.5-Math-7B": _shape(_QWEN_LARGE, 3584, 18944, 28, 28, 4),
    "meta-llama/Llama-3.1-8B": _shape(_LLAMA, 4096, 14336, 32, 32, 8, tie_word_embeddings=False),
    "meta-llama/Llama-3.2-3B": _shape(_LLAMA, 3072, 8192, 28, 24, 8, tie_word_embeddings=True),
    "google/gemma-2-2b": _shape(_GEMMA, 2304, 9216, 26, 8, 4, head_dim=256),
    "google/gemma-2-9b": _shape(_GEMMA, 3584, 14336, 42, 16, 8, head_dim=256),
    "google/gemma-2-27b": _shape(_GEMMA, 4608, 36864, 46, 32, 16, head_dim=128),
}
GPUS = (1, 2, 4, 8, 16, 32, 64)
TRAJECTORY_BYTES = 40  # a token in trajectories.jsonl


def model_shape(name_or_path: str) -> PretrainedConfig:
    """The config of a model as `load_model` takes it: a folder's own, the tiny model's, or from the table. UserError if there is none."""
    folder = TINY_FOLDER if name_or_path == "tiny" else Path(name_or_path).expanduser()
    if (folder / "config.json").is_file():
        try:
            return AutoConfig.from_pretrained(str(folder)).get_text_config()
        except (OSError, ValueError) as error:
            raise UserError(f"--plan: {folder / 'config.json'} is no model's config ({str(error).strip().splitlines()[0]}): copy it again") from error
    known = SHAPES.get(name_or_path.removesuffix("-Instruct").removesuffix("-it"))
    if known is None:
        raise UserError(f"--plan: the shape of {name_or_path!r} is not known here: download its config.json into a folder and give that folder "
                        f"as --model, or add it to SHAPES in common/plan.py; known are tiny, {', '.join(SHAPES)} and their -Instruct and -it models")
    return AutoConfig.for_model(**known)


@dataclass(frozen=True)
class Size:
    """What memory depends on, in elements."""
    parameters: int
    layers: int
    hidden: int
    intermediate: int
    queries: int  # query heads * head dimension
    keys: int  # key heads * head dimension
    vocabulary: int
    kept: int  # activations that a layer keeps for the backward pass, a token
    tied: bool
    scored: int = 0  # heads whose attention scores are held: none in fused attention, all where they are capped (Gemma 2, eager)

    @classmethod
    def of(cls, config: PretrainedConfig) -> "Size":
        with torch.device("meta"):  # counted, not allocated
            model = AutoModelForCausalLM.from_config(config)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        norms = sum(p.numel() for name, p in model.base_model.layers[0].named_parameters() if name.endswith("norm.weight"))
        # A norm keeps its input, what it normalised and its output; attention q, k, v and its output; the gated MLP its gate, the gate's
        # activation, the other half and their product.
        scored = config.num_attention_heads if getattr(config, "attn_logit_softcapping", None) else 0  # then keys and values for every head, too
        kept = 3 * norms + 2 * queries + 2 * (queries if scored else keys) + 4 * config.intermediate_size
        return cls(sum(p.numel() for p in model.parameters()), config.num_hidden_layers, config.hidden_size, config.intermediate_size, queries, keys,
                   config.vocab_size, kept, model.get_output_embeddings().weight is model.get_input_embeddings().weight, scored)


def memory(size: Size, cfg, *, response_tokens: int, prompts: int, group: int, reference: bool, critic: bool, gpus: int = 1) -> dict[str, int]:
    """Name -> bytes on each of `gpus` GPUs. "all" is the sum of the others, in the moment of a step in which most is in use.

    Every GPU samples and trains its share of the trajectories; FSDP divides weights, gradients, optimiser state, reference and critic, and
    the engine then samples from a gathered copy of the weights.
    """
    item, share = {"float32": 4, "bfloat16": 2}[cfg.dtype], lambda n: -(-n // gpus)
    head = size.vocabulary * size.hidden
    body = size.parameters - (0 if size.tied else head)  # what the critic copies
    row, trajectories = cfg.prompt_tokens + response_tokens, share(prompts * group)

    # Sampling: slots for all trajectories at once. The cache grows by quarters; what draws a token is 16 bytes a logit.
    slots = max(trajectories, share(min(cfg.eval_questions, 256))) + 1  # the engine's probe has its own
    capacity = grown(0, PROBE_TOKENS)
    if capacity <= cfg.prompt_tokens:
        capacity = grown(capacity, cfg.prompt_tokens)
    while capacity <= row:
        capacity = grown(capacity, capacity)
    sampling = 16 * slots * size.vocabulary + 4 * share(prompts) * size.vocabulary + 8 * size.scored * max(PREFILL_TOKENS, row) * row

    # Update: what one micro-batch keeps of every layer; then, in the backward pass, first the head (three copies of a chunk of logits, and
    # a gradient as large as the head), after it the layers.
    in_a_step = -(-trajectories // getattr(cfg, "updates", 1))
    rows = min(max(1, cfg.micro_tokens // row), in_a_step)
    tokens = max(row, min(cfg.micro_tokens, rows * row))
    kept = tokens * (3 * size.hidden + size.layers * (size.hidden if cfg.gradient_checkpointing else size.kept))
    pairs = tokens * row  # of a query and a key
    few = 2 * share(prompts) <= rows  # so few prompts that every micro-batch shares some; else one may, if its rows are of whole groups
    same = share(prompts) if few else -(-rows // group)
    if 2 * same <= rows and not cfg.gradient_checkpointing:  # computed once; but keys and values once for every head, and masks in every layer
        computed, response = same * cfg.prompt_tokens + rows * response_tokens, rows * response_tokens
        a_layer = computed * (size.kept - 2 * (size.queries if size.scored else size.keys)) + 2 * rows * row * size.queries + response * row
        shared = computed * 3 * size.hidden + size.layers * a_layer
        kept = shared if few else max(kept, shared)
        pairs = same * cfg.prompt_tokens**2 + response * row if few else pairs
    scores = 8 * size.scored * pairs  # in bytes: capped, and after the softmax; in the backward pass as much again
    learned = -(-tokens * response_tokens // row)
    at_head = 12 * min(chunk_rows(size.vocabulary, size.hidden), learned) * size.vocabulary + 4 * head + 2 * item * learned * size.hidden
    in_layer = item * tokens * (2 * size.intermediate + 2 * size.hidden + (size.kept if cfg.gradient_checkpointing else 0))
    in_layer += scores * (2 if cfg.gradient_checkpointing else 1)
    activations = item * kept + (0 if cfg.gradient_checkpointing else scores * size.layers) + max(0, in_layer - at_head)
    update = {"gradients": item * share(size.parameters), "activations": activations, "logits": at_head}
    if rows == in_a_step:  # no second micro-batch finds gradients of the first: they come as activations go
        update["gradients"] = max(0, update["gradients"] - update["activations"])
    means = 2 * (2 if cfg.optimizer_bf16 else item) * share(size.parameters + critic * body)
    out = {"weights": item * share(size.parameters), "critic": item * share(critic * body), "reference": item * share(reference * size.parameters),
           "optimiser": 0 if cfg.optimizer_offload and cfg.device != "cpu" else means, "engine's weights": item * size.parameters * (gpus > 1),
           "KV cache": item * slots * capacity * size.layers * 2 * size.keys, "rollout batch": 40 * trajectories * row}

    # Of the three moments the one that needs most: a checkpoint is put together in the CPU's memory, of several ranks by the first.
    whole = (item + 2 * (2 if cfg.optimizer_bf16 else item)) * (size.parameters + critic * body)
    saving = whole * (1 if gpus == 1 else 2) if cfg.device == "cpu" else 0
    most = max(sum(update.values()), sampling, saving)
    if most == saving:
        update = {"gradients": 0, "activations": 0, "logits": 0, "checkpoint": saving}
    elif most == sampling:
        update = {"gradients": 0, "activations": 0, "logits": sampling}
    out |= update
    return {**out, "all": sum(out.values())}


def with_vllm(parts: dict[str, int], whole: int) -> int:
    """The least an engine needs that sleeps during the update and keeps a short cache: the larger of the update without an engine, and its
    weights, whole, beside what the trainer keeps while it samples."""
    trainer = sum(parts[k] for k in ("weights", "critic", "reference", "optimiser", "rollout batch"))
    return trainer + max(whole, parts["gradients"] + parts["activations"] + parts["logits"])


def print_plan(cfg, *, response_tokens: int, turns: int, reference: bool = False, critic: bool = False, prompts: int = 0, more: str = "") -> None:
    """Print what the settings need. `response_tokens`: longest trajectory after the prompt; `turns`: most model turns in it; `prompts`: most
    questions a step, where that is not cfg.prompts; `more`: what else a method has to say."""
    size = Size.of(model_shape(cfg.model))
    group = 1 if critic else cfg.samples
    prompts = (prompts or cfg.prompts) * cfg.samples // group
    trajectories, row = prompts * group, cfg.prompt_tokens + response_tokens
    columns = [memory(size, cfg, response_tokens=response_tokens, prompts=prompts, group=group, reference=reference, critic=critic, gpus=n)
               for n in GPUS]
    unit, name = (1e9, "GB") if columns[0]["all"] >= 1e10 else (1e6, "MB")
    number = lambda n: f"{n / unit:10,.1f}"
    print(f"{sys.modules[type(cfg).__module__].__doc__.partition(':')[0]}, preset {cfg.preset}: {cfg.model}, {_count(size.parameters)} weights in "
          f"{cfg.dtype}, data {cfg.data or 'of your own (--data)'}\n")
    print(f"{name + ' per GPU, at most':22}" + "".join(f"{n} GPU{'s' * (n > 1)}".rjust(10) for n in GPUS))
    for part in columns[0]:
        if any(c[part] for c in columns):
            print(f"{part:22}" + "".join(number(c[part]) for c in columns))
    fits = lambda need: next((f"from {n} GPU{'s' * (n > 1)} on" for n, c in zip(GPUS, columns) if need(c) <= 80e9), "on none of these")
    print(f"fits 80 GB a GPU {fits(lambda c: c['all'])}; with vLLM, which sleeps during the update and cuts its cache to what is left, "
          f"{fits(lambda c: with_vllm(c, columns[0]['weights']))}\n")

    sampled, calls = min(response_tokens, turns * cfg.turn_tokens), turns - 1
    passes = 1 + (getattr(cfg, "updates", 1) > 1) + reference
    evaluations = 2 + ((cfg.steps - 1) // cfg.eval_every if cfg.eval_every else 0)
    print(f"a step, at most: {_count(trajectories)} generations ({_count(prompts)} questions x {group}), {_count(trajectories * turns)} turns, "
          f"{_count(trajectories * calls)} tool calls, {_count(trajectories * sampled)} sampled tokens;\n  {_count(trajectories * row)} tokens through "
          f"the model {passes} time{'s' * (passes > 1)} forwards and once backwards, in {getattr(cfg, 'updates', 1)} optimiser step(s)")
    print(f"the run, at most: {_count(cfg.steps)} steps, {_count(cfg.steps * prompts)} questions, {_count(cfg.steps * trajectories)} generations, "
          f"{_count(cfg.steps * trajectories * sampled)} sampled tokens; {evaluations} evaluations of {cfg.eval_questions} questions{more}")
    item = {"float32": 4, "bfloat16": 2}[cfg.dtype]
    weights = item * size.parameters
    means = 2 * (2 if cfg.optimizer_bf16 else item) * (weights + columns[0]["critic"]) // item
    stored = weights + columns[0]["critic"] + means
    logged = TRAJECTORY_BYTES * row * (cfg.steps * cfg.keep_trajectories + 20 * evaluations)
    print(f"on disk, at most: {_bytes(3 * stored)} of checkpoints (two are kept while a third is written), {_bytes(weights)} of weights at the end, "
          f"{_bytes(logged)} of trajectories;\n  in the CPU's memory: {_bytes(stored)} while a checkpoint is written (rank 0 of several: {_bytes(2 * stored)})"
          + f", {_bytes(means)} of the optimiser's running means" * cfg.optimizer_offload)


def _count(n: int) -> str:
    for size, letter in ((10**12, "T"), (10**9, "G"), (10**6, "M")):
        if n >= size:
            return f"{n / size:.3g} {letter}"
    return f"{n:,}"


def _bytes(n: int) -> str:
    return f"{n / 1e9:,.1f} GB" if n >= 1e9 else f"{n / 1e6:,.1f} MB"
