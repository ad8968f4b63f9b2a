"""--plan: shapes, what each switch and each GPU changes, and the plan beside what is really used."""
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from common import UserError, ranks
from common.engine import make_engine
from common.plan import SHAPES, Size, memory, model_shape
from common.policy import TINY_FOLDER, load_model
from methods import search_r1, toolrl
from tests import peak_memory

PUBLISHED = {  # parameters, as the weight files on huggingface.co have them
    "smollm2": 134_515_008, "Qwen/Qwen2.5-0.5B": 494_032_768, "Qwen/Qwen2.5-1.5B": 1_543_714_304, "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512, "Qwen/Qwen2.5-14B": 14_770_033_664, "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-Math-1.5B": 1_543_714_304, "Qwen/Qwen2.5-Math-7B": 7_615_616_512, "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.2-3B": 3_212_749_824, "google/gemma-2-2b": 2_614_341_888, "google/gemma-2-9b": 9_241_705_984, "google/gemma-2-27b": 27_227_128_320}
CFG = replace(search_r1.Config(), model="Qwen/Qwen2.5-7B", device="cuda", prompt_tokens=512, trajectory_tokens=1536, micro_tokens=8192)
HOW = dict(response_tokens=1536, prompts=64, group=8, reference=True, critic=False)
SIZE = Size.of(model_shape(CFG.model))


# ---- shapes -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_published_number_of_parameters(name):
    assert Size.of(model_shape(name)).parameters == PUBLISHED[name]


def test_a_folders_own_config_comes_first():
    model, _ = load_model("tiny")
    for name in ("tiny", str(TINY_FOLDER)):
        size = Size.of(model_shape(name))
        assert size.parameters == sum(p.numel() for p in model.parameters()) and size.vocabulary == model.config.vocab_size and size.tied
    assert model_shape("Qwen/Qwen2.5-7B-Instruct") == model_shape("Qwen/Qwen2.5-7B") and model_shape("google/gemma-2-27b-it").model_type == "gemma2"


def test_an_unknown_model_and_a_broken_config_are_said(tmp_path):
    with pytest.raises(UserError, match="'some/Model-7B' is not known.*config.json into a folder.*--model"):
        model_shape("some/Model-7B")
    (tmp_path / "config.json").write_text('{"model_type": "nothing known"}')
    with pytest.raises(UserError, match="is no model's config"):
        model_shape(str(tmp_path))


# ---- what changes what ------------------------------------------------------------------------------------------------
def need(gpus: int = 1, how: dict = HOW, **changes) -> dict[str, int]:
    parts = memory(SIZE, replace(CFG, **changes), **how, gpus=gpus)
    assert parts["all"] == sum(v for k, v in parts.items() if k != "all")
    return parts


def test_each_switch_changes_its_own_part():
    plain, weights = need(), 4 * PUBLISHED[CFG.model]
    assert plain["weights"] == plain["gradients"] == plain["reference"] == weights and plain["optimiser"] == 2 * weights and not plain["critic"]
    changed = lambda **c: {k for k, v in need(**c).items() if v != plain[k]} - {"all"}
    assert changed(optimizer_bf16=True) == changed(optimizer_offload=True) == {"optimiser"}
    assert need(optimizer_bf16=True)["optimiser"] == weights and need(optimizer_offload=True)["optimiser"] == 0
    assert changed(gradient_checkpointing=True) == {"activations"} and need(gradient_checkpointing=True)["activations"] < plain["activations"] / 8
    assert need(micro_tokens=4096)["activations"] < 0.6 * plain["activations"]
    with_critic = need(how=HOW | dict(critic=True, reference=False, group=1, prompts=512))
    body = weights - 4 * 152064 * 3584  # without the head, which is not tied
    assert with_critic["critic"] == body and with_critic["optimiser"] == 2 * (weights + body) and with_critic["reference"] == 0


def test_on_a_cpu_a_checkpoint_needs_memory_too():
    small = dict(device="cpu", gradient_checkpointing=True, micro_tokens=2048)
    parts, weights = need(**small), 4 * PUBLISHED[CFG.model]
    assert parts["checkpoint"] == 3 * weights and parts["gradients"] == parts["activations"] == parts["logits"] == 0
    assert "checkpoint" not in need(**{**small, "device": "cuda"}) and "checkpoint" not in need(device="cpu", micro_tokens=16384)
    assert need(**small, optimizer_offload=True)["optimiser"] == 2 * weights  # where everything is the CPU's memory, nothing is gained
    assert need(gpus=4, **small)["checkpoint"] == 2 * parts["checkpoint"]  # rank 0 puts whole tensors together, then writes them


def test_capped_attention_holds_its_scores():
    """Gemma 2: in every layer, or, where layers are computed again, in one of them."""
    capped = Size.of(model_shape("google/gemma-2-2b"))
    plain, how, row = replace(capped, scored=0), dict(response_tokens=1536, prompts=8, group=8, reference=False, critic=False), 2048
    more = lambda **c: memory(capped, replace(CFG, **c), **how)["activations"] - memory(plain, replace(CFG, **c), **how)["activations"]
    assert capped.scored == 8 and SIZE.scored == 0
    assert more() == pytest.approx(27 * 8 * 8 * 4 * row ** 2, rel=0.1) and 0 < more(gradient_checkpointing=True) <= 2 * 8 * 8 * 4 * row ** 2


def test_gpus_share_the_work():
    one, four = need(), need(gpus=4)
    for part in ("weights", "gradients", "reference", "optimiser"):
        assert four[part] == one[part] / 4
    assert (one["engine's weights"], four["engine's weights"]) == (0, one["weights"])  # sampling needs the weights whole
    assert four["KV cache"] == pytest.approx(one["KV cache"] / 4, rel=0.01) and four["activations"] == one["activations"]


@pytest.mark.parametrize("gpus, prompts", [(1, 1), (2, 2), (2, 1)])
def test_the_cache_is_the_engines_to_the_byte(monkeypatch, gpus, prompts):
    """Of several ranks each has slots for its share, rounded up."""
    model, tokenizer = load_model("tiny")
    cfg = replace(search_r1.Config(), prompt_tokens=30, trajectory_tokens=100, prompts=prompts, samples=3, eval_questions=1)
    with monkeypatch.context() as several:
        several.setattr(ranks, "world", lambda: gpus)
        engine = make_engine("hf", model, tokenizer, max_slots=3 * prompts, max_length=130)
    engine.eos_ids = frozenset()
    for seed in range(3):
        engine.submit(range(5, 35), max_new_tokens=100, seed=seed)
    while engine.busy:
        engine.step()
    planned = memory(Size.of(model_shape("tiny")), cfg, response_tokens=100, prompts=prompts, group=3, reference=False, critic=False, gpus=gpus)["KV cache"]
    assert engine.max_slots == -(-3 * prompts // gpus)
    assert sum(t.nbytes for layer in engine._cache.layers.values() for t in layer) == planned


def test_what_is_printed(capsys):
    toolrl.train(replace(toolrl.Config(), plan=True, device="cuda", algorithm="ppo", steps=50, eval_every=10, optimizer_offload=True))
    shown = capsys.readouterr().out
    assert "ToolRL, preset tiny: tiny" in shown and "\ncritic " in shown and "\noptimiser " not in shown and "MB per GPU" in shown
    assert "96 generations (96 questions x 1), 96 turns, 0 tool calls, 9,216 sampled tokens" in shown
    assert "50 steps, 4,800 questions, 4,800 generations, 460,800 sampled tokens; 6 evaluations of 200 questions" in shown
    assert "in the CPU's memory: 41.4 MB while a checkpoint is written (rank 0 of several: 82.7 MB), 27.6 MB of the optimiser's running means" in shown


# ---- the plan beside the truth ----------------------------------------------------------------------------------------
FLAGS = ["", "--algorithm ppo", "--gradient-checkpointing --optimizer-bf16"]


@pytest.fixture(scope="module")
def peaks():
    """By flags, what is planned and what measured, in one process: with a malloc of its own (see tests/peak_memory.py)."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of resident memory is read from /proc")
    sizes = "--prompts 1 --samples 8 --eval-questions 1 --prompt-tokens 109 --turn-tokens 145 --trajectory-tokens 145 --micro-tokens 2048 --updates 2"
    lists = [[*sizes.split(), "--kl", "0.001", "--entropy", "0.001", *flags.split()] for flags in FLAGS]
    script = f"from tests import peak_memory\nfor flags in {lists}: peak_memory.main('search_r1', flags)"
    p = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=600,
                       env={**os.environ, **peak_memory.THRESHOLD, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    assert p.returncode == 0, p.stderr
    return dict(zip(FLAGS, (json.loads(line) for line in p.stdout.splitlines() if line.startswith("{")), strict=True))


@pytest.mark.parametrize("flags", FLAGS)
def test_measured_peaks_are_within_15_percent(peaks, flags):
    """Sizes at which every part counts; trajectories of full length."""
    assert peaks[flags]["planned"] / peaks[flags]["measured"] == pytest.approx(1, abs=0.15), peaks[flags]
