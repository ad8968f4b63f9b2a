"""What several tests need: commands, a tokenizer of bytes, an engine that says what it is told, and a small random model."""
import multiprocessing
import os
import random
import runpy
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from common import ranks
from common.data import Example
from common.rollout import Prompt
from common.run import main


def command(capsys, body) -> tuple[int, str]:
    """Exit code and output of a command, run in this process: one of its own needs five seconds to begin."""
    code = 0
    try:
        main(body)
    except SystemExit as leave:
        code = leave.code
    seen = capsys.readouterr()
    return code, seen.out + seen.err


class Forked:
    """`python -m module flags` in a process of its own that is forked from one in which torch and transformers are imported already: to import
    them takes five seconds of a core, every time. With "RANK" in the environment, a process as torchrun starts it. What is read at import, such as
    OMP_NUM_THREADS, is the tests' own."""
    _context = multiprocessing.get_context("forkserver")

    def __init__(self, module: str, *flags: str, cwd: Path, env: dict[str, str]):
        self.returncode = None
        self._output = Path(tempfile.mkdtemp(prefix="output-", dir=cwd)) / "all"
        self._context.set_forkserver_preload(["methods.search_r1"])
        self._process = self._context.Process(target=_run_module, args=(module, flags, str(cwd), env, str(self._output)))
        self._process.start()

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def finish(self, seconds: float) -> str:
        """What it has printed, when it has ended; a process that does not end in time fails the test."""
        self._process.join(seconds)
        if self._process.exitcode is None:
            self._process.kill()
            raise AssertionError(f"still running after {seconds} s:\n{self._output.read_text()}")
        self.returncode = self._process.exitcode
        return self._output.read_text()


def _run_module(module: str, flags: tuple[str, ...], cwd: str, env: dict[str, str], output: str) -> None:
    os.chdir(cwd), os.environ.clear(), os.environ.update(env)
    with open(output, "w") as f:
        os.dup2(f.fileno(), 1), os.dup2(f.fileno(), 2)
    ranks.LAUNCHED = "RANK" in env
    sys.argv = [module, *flags]
    sys.modules.pop(module, None)  # it runs once more, as __main__
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and an end token."""
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")


@dataclass
class Finished:
    rid: int
    ids: list[int]
    logprobs: list[float]
    text: str
    reason: str
    overshoot: int = 0


class ScriptedEngine:
    """Speaks the engine's contract; `say(ids, seed)` gives the text of a turn. One request finishes a step, in a seeded order,
    or all of them with `at_once`."""

    def __init__(self, tokenizer, say, at_once: bool = False):
        self.tokenizer, self.say, self.at_once = tokenizer, say, at_once
        self.counters = {"sampled_tokens": 0, "prefilled_tokens": 0, "shared_prefill_tokens": 0, "cached_tokens": 0}
        self.waiting, self.kept, self.next, self.rng = {}, {}, 0, random.Random(0)
        self.submitted: list[tuple[list[int], dict]] = []

    def submit(self, ids, *, max_new_tokens, stop=(), temperature=1.0, seed=0, resume=None):
        assert max_new_tokens >= 1 and len(ids) > 0
        if resume is not None:  # the prefix property: what the slot holds is the beginning of what comes back
            held = self.kept.pop(resume)
            assert list(ids[:len(held)]) == held, "history was rewritten"
        self.next += 1
        self.waiting[self.next] = (list(ids), max_new_tokens, stop, seed)
        self.submitted.append((list(ids), dict(max_new_tokens=max_new_tokens, stop=stop, seed=seed, resume=resume)))
        return self.next

    def step(self):
        return [self._finish_one() for _ in range(len(self.waiting) if self.at_once else min(1, len(self.waiting)))]

    def _finish_one(self):
        rid = self.rng.choice(sorted(self.waiting))
        ids, room, stop, seed = self.waiting.pop(rid)
        text = self.say(ids, seed)
        ends = [text.index(s) + len(s) for s in stop if s in text]
        reason = "eos"
        if ends:
            text, reason = text[:min(ends)], "stop"
        new = self.tokenizer.encode(text, add_special_tokens=False) + ([self.tokenizer.eos_token_id] if reason == "eos" else [])
        if len(new) > room:
            new, reason = new[:room], "length"
            text = self.tokenizer.decode(new)
        self.counters["sampled_tokens"] += len(new)
        self.kept[rid] = ids + new
        return Finished(rid, new, [-1.0] * len(new), text, reason)

    def release(self, rid):
        self.kept.pop(rid, None)

    @property
    def busy(self):
        return bool(self.waiting)


def prompt(tokenizer, text: str, number: int = 0, **meta) -> Prompt:
    return Prompt(Example(f"e{number}", text, ("gold",), meta), text, tokenizer.encode(text, add_special_tokens=False))


def tiny_random_model(vocabulary: int = 257, seed: int = 0, kind: str = "qwen2"):
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config
    shape = dict(vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                 max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=None, eos_token_id=256, pad_token_id=256)
    config = {"qwen2": Qwen2Config, "llama": LlamaConfig, "qwen3": lambda **k: Qwen3Config(head_dim=8, **k)}[kind](**shape)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3.0)  # far from uniform, so that a mistake shows
    return model
