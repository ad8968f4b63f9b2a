"""Rebuild the tiny model: tokenizer, pre-training, success rate per protocol before any RL.

    python -m common.tiny.build              # everything (about 40 minutes on two quiet cores with AVX-512), writes common/tiny/weights/

Copying comes first: random spans of tokens, repeated in shuffled order; without it the model takes many times longer before it copies
a name from a result. Then the abilities: traces of all protocols in which everything is done right, with plain reading and plain writing
of calls beside them (the phases ability, reading, protocols and calls differ in their shares). Last the habits: sloppy traces, which
spoil the policy and leave the abilities (common/tiny/traces.py), at the end with calls for requests again.
"""
import argparse
import json
import math
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from common.policy import load_model
from common.tiny.measure import success_rates
from common.tiny.protocols import END_OF_TEXT, IM_END, TAGS
from common.tiny.traces import CALLING_KINDS, MIXTURE, trace
from common.tiny.world import ADJECTIVE, CITY, DAY, DISH, FIRST, ITEM, JOB, LAST, NOUN, RIVER

WEIGHTS = Path(__file__).parent / "weights"
PART = WEIGHTS.with_name("weights.part")  # between phases
VOCABULARY = 2048
CHAT_TEMPLATE = (
    "{%- for m in messages %}"
    "{%- set role = 'user' if m['role'] == 'tool' else m['role'] %}"
    "{{- '<|im_start|>' + role + '\\n' }}"
    "{%- if m['role'] == 'tool' %}{{- '<tool_response>\\n' + m['content'] + '\\n</tool_response>' }}{%- else %}{{- m['content'] }}{%- endif %}"
    "{%- if loop.first and tools %}{{- '\\n\\n# Tools\\n<tools>' }}"
    "{%- for t in tools %}{{- '\\n' + t | tojson }}{%- endfor %}"
    "{{- '\\n</tools>\\nCall a function with its JSON between <tool_call> and </tool_call>.' }}{%- endif %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}")


def build_tokenizer(n_traces: int = 6000) -> PreTrainedTokenizerFast:
    """Byte-level BPE; digits one by one; every tag one ordinary entry; two end tokens as in Qwen."""
    pieces = Regex(r"""[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(pieces, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    specials = [END_OF_TEXT, "<|im_start|>", IM_END]
    tags = [AddedToken(t, normalized=False, special=False) for t in TAGS]
    names = " ".join(FIRST + LAST + CITY + RIVER + ADJECTIVE + NOUN + JOB + ITEM + DAY + DISH)
    # names in both forms, after a space and after a quotation mark, so that each becomes one entry
    text = ["".join(s for _, s in trace(0, i)[1]) for i in range(n_traces)] + [names, '"' + '" "'.join(names.split())] * 300
    for tag in TAGS:
        text = [t.replace(tag, "\n") for t in text]
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY - len(tags), special_tokens=specials, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.add_tokens(tags)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=IM_END, pad_token=END_OF_TEXT, chat_template=CHAT_TEMPLATE,
                                   clean_up_tokenization_spaces=False, model_max_length=2048)


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=192, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None, eos_token_id=[tokenizer.convert_tokens_to_ids(IM_END), tokenizer.pad_token_id], pad_token_id=tokenizer.pad_token_id)
    model = Qwen2ForCausalLM(config)
    # "Mira" after a quotation mark and " Mira" after a space are two entries of one name: start them near each other
    vocabulary = tokenizer.get_vocab()
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        offset = torch.randn(table.shape[1]) * 0.01
        for piece, i in vocabulary.items():
            j = vocabulary.get("Ġ" + piece)
            if j is not None and len(piece) > 2:
                table[i] = table[j] + offset
    return model


def tie_forms(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Put every name's form after a quotation mark ("Sable") beside its form after a space (" Sable") again: that vector plus what sets the two
    forms apart on average. Earlier phases pull them asunder; then a head that finds a name cannot write it into JSON, and as nothing is gained by
    finding it, that is not learned either (120 steps of the exercise taught it with this, and nothing of it without)."""
    vocabulary = tokenizer.get_vocab()
    pairs = torch.tensor([(i, vocabulary["Ġ" + piece]) for piece, i in vocabulary.items() if piece.isalpha() and len(piece) > 2 and "Ġ" + piece in vocabulary])
    names = {vocabulary.get(name) for name in FIRST + LAST + CITY + RIVER + ADJECTIVE + NOUN + JOB + ITEM + DAY + DISH}
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        offset = (table[pairs[:, 0]] - table[pairs[:, 1]]).mean(0)
        quoted, spaced = pairs[[int(i) in names for i in pairs[:, 0]]].T
        table[quoted] = table[spaced] + offset


def copying_batch(rng: torch.Generator, vocabulary: int, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, length] ids: spans of 2-6 random tokens, then the same spans in shuffled order, again and again; mask of what can be predicted."""
    ids, mask = torch.zeros(rows, length, dtype=torch.long), torch.zeros(rows, length)
    for r in range(rows):
        spans = [torch.randint(3, vocabulary, (int(torch.randint(2, 7, (), generator=rng)),), generator=rng) for _ in range(6)]
        out, known, first = [], [], True
        while len(out) < length:
            for s in torch.randperm(6, generator=rng).tolist():
                out += spans[s].tolist()
                known += [0.0] + [0.0 if first else 1.0] * (len(spans[s]) - 1)
            first = False
        ids[r], mask[r] = torch.tensor(out[:length]), torch.tensor(known[:length])
    return ids, mask


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of pre-training; each starts from the float16 weights the one before has saved, with a fresh optimiser."""
    name: str
    steps: int
    lr: float  # peak, after 50 steps of warm-up
    seed: int
    rows: int = 16
    decay: bool = True  # a cosine down to 5 % of the peak at the last step; else constant
    reading: float = 0  # share of plain reading among the traces
    calling: float = 0  # share of plain writing of calls
    calling_kinds: tuple[float, float, float] = CALLING_KINDS  # of which calls for requests, calls for pages, records
    tie_forms: bool = False  # start with names' two forms side by side
    sloppy: float = 0  # share of the other traces whose author is sloppy
    results: float = 0  # loss weight of a token of a tool's result: most cannot be foreseen, so they drown what is to be learned
    mixture: dict[str, int] = field(default_factory=lambda: MIXTURE)  # weights of the protocols


PHASES = (
    Phase(name="copying", steps=340, lr=2e-3, seed=0, rows=48, decay=False),
    Phase(name="ability", steps=1200, lr=1.8e-3, seed=1, reading=0.4, calling=0.2, results=0.1),
    Phase(name="reading", steps=600, lr=1.5e-3, seed=2, reading=0.5, calling=0.2),
    Phase(name="protocols", steps=500, lr=1.3e-3, seed=4, reading=0.2, calling=0.2),
    # names, numbers and addresses inside JSON come last
    Phase(name="calls", steps=700, lr=1e-3, seed=5, tie_forms=True, reading=0.1, calling=0.5, mixture={**MIXTURE, "deep_researcher": 60, "toolrl": 36, "tool_n1": 36}),
    Phase(name="habits", steps=400, lr=8e-4, seed=3, reading=0.15, calling=0.15, sloppy=0.9, results=0.1, mixture={**MIXTURE, "deep_researcher": 16}),
    # requests for two calls, of which RL did not learn the values (exact calls stayed at 0.86-0.89); beside the habits, so that these stay
    Phase(name="pairs", steps=450, lr=8e-4, seed=6, reading=0.05, calling=0.5, calling_kinds=(0.8, 0.1, 0.1), sloppy=0.9, results=0.1,
          mixture={**MIXTURE, "deep_researcher": 16}),
)
LONGEST = 900  # tokens; longer traces are left out


def encode_trace(tokenizer, phase: Phase, number: int) -> tuple[list[int], list[float]]:
    """Ids and loss weights of one trace: prompts and notices count nothing."""
    ids, weights = [], []
    for author, text in trace(phase.seed, number, reading=phase.reading, calling=phase.calling, sloppy=phase.sloppy, mixture=phase.mixture,
                              calling_kinds=phase.calling_kinds)[1]:
        piece = tokenizer.encode(text, add_special_tokens=False)
        ids += piece
        weights += [{"model": 1.0, "form": 0.1, "tool": phase.results}.get(author, 0.0)] * len(piece)
    return ids, weights


def batches(phase: Phase, step: int, tokenizer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches of (ids, loss weights) [rows, length] for a step: a function of the phase and the step."""
    if phase.name == "copying":
        return [copying_batch(torch.Generator().manual_seed(phase.seed + 1000 * step), len(tokenizer), phase.rows, 96)]
    rows = [encode_trace(tokenizer, phase, step * phase.rows + i) for i in range(phase.rows)]
    rows = sorted((r for r in rows if len(r[0]) <= LONGEST), key=lambda r: len(r[0]))
    out = []
    for part in (rows[i:i + 4] for i in range(0, len(rows), 4)):
        pad = lambda values: torch.tensor([v + [0] * (len(part[-1][0]) - len(v)) for v in values])
        out.append((pad([r[0] for r in part]), pad([r[1] for r in part])))
    return out


def train(model, tokenizer, phase: Phase, log) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=phase.lr, betas=(0.9, 0.98), weight_decay=0.01)
    half = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # emulated bfloat16 is far slower than float32
    start = time.monotonic()
    for step in range(phase.steps):
        parts = batches(phase, step, tokenizer)
        whole, total = sum(float(w[:, 1:].sum()) for _, w in parts), 0.0
        for ids, weights in parts:
            predicted = weights[:, 1:] > 0  # the vocabulary is worked out for these positions only
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1][predicted]
                logits = model.lm_head(hidden)
            loss = F.cross_entropy(logits.float(), ids[:, 1:][predicted], reduction="none") @ weights[:, 1:][predicted] / whole
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        decay = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / phase.steps)) if phase.decay else 1
        for group in optimizer.param_groups:
            group["lr"] = phase.lr * min(1, (step + 1) / 50) * decay
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == phase.steps - 1:
            log(f"{phase.name} {step}/{phase.steps} loss {total:.3f} {time.monotonic() - start:.0f} s")


def save(model, tokenizer, folder: Path) -> None:
    """Float16 weights (half the size; loaded back to float32) and the tokenizer, replaced as a whole."""
    part = folder.with_suffix(".tmp")
    shutil.rmtree(part, ignore_errors=True)
    half = Qwen2ForCausalLM(model.config).half()
    half.load_state_dict({k: v.half() for k, v in model.state_dict().items()})
    half.save_pretrained(part)
    tokenizer.save_pretrained(part)
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--from-phase", choices=[p.name for p in PHASES], default=PHASES[0].name, help="go on with weights.part of the phase before")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    log = lambda line: print(line, flush=True)
    first = [p.name for p in PHASES].index(args.from_phase)
    if first == 0:
        tokenizer = build_tokenizer()
        save(build_model(tokenizer), tokenizer, PART)
    for phase in PHASES[first:]:
        model, tokenizer = load_model(str(PART))
        if phase.tie_forms:
            tie_forms(model, tokenizer)
        train(model, tokenizer, phase, log)
        save(model, tokenizer, PART)
    shutil.rmtree(WEIGHTS, ignore_errors=True)
    PART.rename(WEIGHTS)
    rates = success_rates(WEIGHTS)
    (WEIGHTS / "success.json").write_text(json.dumps(rates, indent=1))


if __name__ == "__main__":
    main()
