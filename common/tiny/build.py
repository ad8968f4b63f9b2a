"""Rebuild the tiny model: tokenizer, pre-training on sloppy traces, success rate per protocol before any RL.

    python -m common.tiny.build              # everything (about 50 minutes on two quiet cores, an estimate), writes common/tiny/weights/

The first phase teaches copying: random spans of tokens, repeated in shuffled order; without it the model takes many times longer
before it copies a name from a result. The second is plain language modelling on sloppy traces (common/tiny/traces.py). The others add
reading comprehension to them; the last of them dwells on professions, the one kind of word the model had learned to guess, not to read.
"""
import argparse
import json
import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from common.policy import load_model
from common.tiny.measure import success_rates
from common.tiny.protocols import END_OF_TEXT, IM_END, TAGS
from common.tiny.traces import trace
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
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
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


def encode_trace(tokenizer, seed: int, number: int, phase: str) -> tuple[list[int], list[int]]:
    """Ids and loss mask of one trace: everything but the prompt and the notices."""
    ids, mask = [], []
    for author, text in trace(seed, number, phase=phase)[1]:
        piece = tokenizer.encode(text, add_special_tokens=False)
        ids += piece
        mask += [int(author in ("model", "tool"))] * len(piece)
    return ids, mask


@dataclass(frozen=True)
class Phase:
    """A part of pre-training; each starts from the float16 weights the one before has saved, with a fresh optimiser."""
    name: str
    steps: int
    lr: float  # peak; 50 or 100 steps of warm-up, then a cosine that reaches its end after `horizon` steps
    horizon: int
    seed: int
    rows: int


PHASES = (Phase("copying", 450, 1.5e-3, 0, 0, 48), Phase("traces", 1000, 1.5e-3, 4000, 1, 16), Phase("reading", 1600, 1.2e-3, 1600, 2, 16),
          Phase("polish", 1400, 1e-3, 1400, 3, 16), Phase("professions", 450, 1e-3, 450, 4, 16))


def train(model, tokenizer, phase: Phase, log) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=phase.lr, betas=(0.9, 0.98), weight_decay=0.01)
    rng, start = torch.Generator().manual_seed(phase.seed), time.monotonic()
    for step in range(phase.steps):
        if phase.name == "copying":
            batches, rate = [copying_batch(rng, len(tokenizer), phase.rows, 96)], phase.lr * min(1, (step + 1) / 50)
        else:
            rows = [encode_trace(tokenizer, phase.seed, step * phase.rows + i, phase.name) for i in range(phase.rows)]
            rows = sorted((r for r in rows if len(r[0]) <= 900), key=lambda r: len(r[0]))
            batches = []
            for part in (rows[i:i + 4] for i in range(0, len(rows), 4)):
                width = max(len(r[0]) for r in part)
                batches.append((torch.tensor([r[0] + [0] * (width - len(r[0])) for r in part]),
                                torch.tensor([r[1] + [0] * (width - len(r[1])) for r in part], dtype=torch.float32)))
            rate = phase.lr * min(1, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / phase.horizon)))
        weight, total = sum(float(m[:, 1:].sum()) for _, m in batches), 0.0
        for ids, mask in batches:
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(input_ids=ids, use_cache=False).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
            loss = (loss * mask[:, 1:].flatten()).sum() / weight
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
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
        train(model, tokenizer, phase, log)
        save(model, tokenizer, PART)
    shutil.rmtree(WEIGHTS, ignore_errors=True)
    PART.rename(WEIGHTS)
    rates = success_rates(WEIGHTS)
    (WEIGHTS / "success.json").write_text(json.dumps(rates, indent=1))


if __name__ == "__main__":
    main()
