"""The multi-turn loop: trajectories advance on their own; while one waits for a tool, the others decode.

Token in, token out: a prompt is tokenised once, sampled ids are appended as sampled, an observation is tokenised once and appended,
and nothing is ever decoded and encoded again. The mask is written at that moment, by the part that knows who wrote the token.

The rollout knows no method, no reward and no tool. A method hands it
    act(turn, trajectory) -> Call | Notice | End     what one model turn means
    tools {name: Tool}                               what can be called
"""
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from common import UserError, ranks
from common.data import Example, trajectory_seed


# ---- what a method's environment says about one model turn -----------------------------------------------------------
@dataclass(frozen=True)
class Call:
    """Run a tool. `wrap` puts its result text between the method's tags; it is called again with a shorter text when it does not fit."""
    tool: str
    argument: str
    wrap: Callable[[str], str]


@dataclass(frozen=True)
class Notice:
    """Text inserted after an action that could not be used; the model goes on after it."""
    text: str


@dataclass(frozen=True)
class End:
    """The trajectory is over; `reason` is counted in the metrics (stop_<reason>)."""
    reason: str


@dataclass(frozen=True)
class Turn:
    """One model turn as the environment sees it: text up to the stop string, why it ended ("stop", "eos", "length"), its number from 0."""
    text: str
    reason: str
    number: int
    last: bool


# ---- tools ------------------------------------------------------------------------------------------------------------
class ToolFailure(Exception):
    """The tool ran and failed (a program raised, a page does not exist): its message is the observation. Raised, it fails a whole
    batch; returned in the place of one result, that call. `outcome` is what the metrics count: error, timeout, memory, ..."""

    def __init__(self, message: str, outcome: str = "error"):
        super().__init__(message)
        self.outcome = outcome


class InfrastructureFailure(UserError):
    """The tool could not run at all (server gone, sandbox broken). Never shown to the model as if it were a result."""


@dataclass(frozen=True)
class Tool:
    """`run` maps a batch of calls to result texts ("" or None: empty) or, where a call failed, to a ToolFailure.

    batch: most calls it is handed at once; deadline_s: wall seconds a running batch may take, waiting in the queue not counted. A call that is
    handed over alone (batch 1) and is late has timed out. A tool that takes several at once ends each of them itself; if it is late it hangs, which
    says nothing about any call, and the run stops.
    """
    run: Callable[[list["ToolCall"]], list["str | None | ToolFailure"]]
    batch: int = 1
    deadline_s: float = 30.0


@dataclass
class ToolCall:
    name: str
    argument: str
    example: Example  # whose trajectory it belongs to
    outcome: str = ""  # ok | empty | error | timeout, or what a ToolFailure says
    wait_s: float = 0.0  # waiting for a free worker
    run_s: float = 0.0
    trajectory: "Trajectory | None" = field(default=None, repr=False, compare=False)  # to read only: what was said and found so far


class ToolPool:
    """Daemon threads that run tool batches. A batch past its deadline is abandoned with its thread, and a new thread takes over."""
    ATTEMPTS = 3  # of a batch that fails for infrastructure reasons

    def __init__(self, workers: int = 8, max_abandoned: int = 32):
        self.jobs: queue.Queue = queue.Queue()
        self.max_abandoned, self.abandoned = max_abandoned, 0
        self.calls = self.infrastructure_failures = 0
        self.lock = threading.Lock()
        for _ in range(workers):
            self._add_worker()

    def _add_worker(self) -> None:
        threading.Thread(target=self._work, daemon=True, name="tool").start()

    def _work(self) -> None:
        while True:
            job = self.jobs.get()
            if job is None:
                return
            job.started = time.monotonic()
            job.running.set()
            for attempt in range(1, self.ATTEMPTS + 1):
                job.results = job.error = None
                try:
                    job.results = job.tool.run(job.calls)
                    if len(job.results) != len(job.calls):
                        raise RuntimeError(f"tool '{job.calls[0].name}' gave {len(job.results)} results for {len(job.calls)} arguments")
                except ToolFailure as failure:
                    job.results = [failure] * len(job.calls)
                except BaseException as error:  # whatever else goes wrong, sys.exit() too, is infrastructure: tried again, counted, and raised by finish()
                    job.error = error
                    with self.lock:
                        self.infrastructure_failures += len(job.calls)
                if job.error is None or isinstance(job.error, UserError):
                    break
                time.sleep(0.05 * 4 ** (attempt - 1))
            job.ended = time.monotonic()
            job.done.set()
            if job.late:  # another thread has taken this one's place
                return

    def start(self, tool: Tool, calls: list[ToolCall]) -> "Job":
        job = Job(tool, calls)
        self.calls += len(calls)
        self.jobs.put(job)
        return job

    def finish(self, job: "Job") -> list[str]:
        """Result texts of a job, waiting for it; fills in the outcome and seconds of its calls."""
        job.running.wait()
        if not job.done.wait(max(0.0, job.started + job.tool.deadline_s - time.monotonic())):
            job.late = True
            self.abandoned += 1
            if job.tool.batch > 1 or self.abandoned > self.max_abandoned:
                late = len(job.calls) if job.tool.batch > 1 else self.abandoned
                raise InfrastructureFailure(f"{late} calls of tool '{job.calls[0].name}' had no result within {job.tool.deadline_s:g} s; "
                                            "mend the tool, or raise its deadline_s")
            self._add_worker()
            results = [ToolFailure(f"[no result within {job.tool.deadline_s:g} s]", "timeout")] * len(job.calls)
        elif job.error is not None:
            if isinstance(job.error, UserError):
                raise job.error
            raise InfrastructureFailure(f"tool '{job.calls[0].name}' failed {self.ATTEMPTS} times: {type(job.error).__name__}: {job.error}; "
                                        "the run stops rather than train on missing results") from job.error
        else:
            results = job.results
        ended = time.monotonic() if job.late else job.ended
        texts = [str(r) or type(r).__name__ if isinstance(r, ToolFailure) else r or "" for r in results]
        for call, result, text in zip(job.calls, results, texts):
            call.outcome = result.outcome if isinstance(result, ToolFailure) else "ok" if text else "empty"
            call.wait_s, call.run_s = job.started - job.queued, (ended - job.started) / len(job.calls)  # its share of a batch
        if self.infrastructure_failures > max(3, 0.01 * self.calls):
            raise InfrastructureFailure(f"{self.infrastructure_failures} of {self.calls} tool calls failed for reasons outside the model "
                                        f"(last: {job.error or 'mended by trying again'}); more than 1 % is not training data")
        return texts

    def close(self) -> None:
        for _ in range(threading.active_count()):
            self.jobs.put(None)


class Job:
    """A batch of calls on its way through the pool."""

    def __init__(self, tool: Tool, calls: list[ToolCall]):
        self.tool, self.calls = tool, calls
        self.queued = time.monotonic()
        self.started = self.ended = 0.0
        self.running, self.done = threading.Event(), threading.Event()
        self.results = self.error = None
        self.late = False


# ---- trajectories -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Budget:
    """Limits, all in tokens except `turns`. None is ever infinite; a prompt is never cut (too long: skipped and counted).

    turns: model turns whose call is executed. With `final_turn` one more turn is sampled and its call is not executed.
    """
    prompt_tokens: int
    turn_tokens: int
    observation_tokens: int
    trajectory_tokens: int  # everything after the prompt, observations included
    turns: int
    final_turn: bool = True

    @property
    def sampled_tokens(self) -> int:
        """The most tokens that a model can write in one trajectory; what Dr. GRPO's constant aggregation divides by."""
        return min(self.trajectory_tokens, self.turn_tokens * (self.turns + self.final_turn))


@dataclass
class Segment:
    author: str  # model | tool | notice
    text: str
    start: int  # offsets into Trajectory.ids
    end: int


@dataclass
class Trajectory:
    example: Example
    group: int  # made when sampled, never rebuilt from text
    sample: int
    prompt: str
    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)  # everything after the prompt
    mask: list[int] = field(default_factory=list)  # 1 where the model sampled the token
    logprobs: list[float] = field(default_factory=list)  # the sampler's; NaN where not sampled
    segments: list[Segment] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    turns: int = 0
    stop: str = ""  # the environment's reason, or turns | tokens

    @property
    def response(self) -> str:
        return "".join(s.text for s in self.segments)

    @property
    def model_text(self) -> str:
        """What the model itself wrote: results and notices left out."""
        return "".join(s.text for s in self.segments if s.author == "model")

    def append(self, author: str, text: str, ids: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        self.segments.append(Segment(author, text, len(self.ids), len(self.ids) + len(ids)))
        self.ids += ids
        self.mask += [int(author == "model")] * len(ids)
        self.logprobs += logprobs if author == "model" else [float("nan")] * len(ids)


@dataclass(frozen=True)
class Prompt:
    example: Example
    text: str
    ids: list[int]


def make_prompts(examples: Sequence[Example], render: Callable[[Example], str], tokenizer, budget: Budget) -> tuple[list[Prompt], int]:
    """Prompts tokenised once, and how many were skipped because they are longer than budget.prompt_tokens. UserError if none is left."""
    prompts = [Prompt(e, text, tokenizer.encode(text, add_special_tokens=False)) for e in examples for text in [render(e)]]
    kept = [p for p in prompts if 0 < len(p.ids) <= budget.prompt_tokens]
    if not kept:
        raise UserError(f"all {len(prompts)} prompts are longer than --prompt-tokens {budget.prompt_tokens} (the shortest: "
                        f"{min(len(p.ids) for p in prompts)}); raise it")
    return kept, len(prompts) - len(kept)


def rollout(engine, tokenizer, prompts: Sequence[Prompt], act, tools: dict[str, Tool], budget: Budget, pool: ToolPool, *, samples: int = 1,
            temperature: float = 1.0, stop: tuple[str, ...] = (), last_stop: tuple[str, ...] | None = None, seed: int = 0, step: int = 0,
            tool_lag: int = 2) -> list[Trajectory]:
    """Sample `samples` trajectories of every prompt; they come back in the order (prompt, sample). With several ranks, of this rank's share
    of the prompts; seeds go by a prompt's number among all of them.

    last_stop: stop strings of the final turn, when they differ. tool_lag: decode steps between a call and its result joining the
    batch; being fixed, it makes the batch, and so every bit, a function of the seed alone. 0: results join as they arrive.
    """
    trajectories = [Trajectory(prompts[g].example, g, s, prompts[g].text, prompts[g].ids) for g in ranks.share(len(prompts)) for s in range(samples)]
    running: dict[int, Trajectory] = {}
    jobs: list[tuple[int, Job, list[tuple[Trajectory, Call, int]]]] = []  # due step, job, what waits for it
    clock, sampled_before = 0, engine.counters["sampled_tokens"]

    def submit(t: Trajectory, resume: int | None = None) -> None:
        last = t.turns >= budget.turns
        room = min(budget.turn_tokens, budget.trajectory_tokens - len(t.ids))
        if room < 1 or (last and not budget.final_turn):
            t.stop = "tokens" if room < 1 else "turns"
            if resume is not None:
                engine.release(resume)
            return
        rid = engine.submit(t.prompt_ids + t.ids, max_new_tokens=room, stop=last_stop if last and last_stop is not None else stop,
                            temperature=temperature, seed=trajectory_seed(seed, step, t.group, t.sample, t.turns), resume=resume)
        running[rid] = t

    def observe(t: Trajectory, author: str, text: str, wrap: Callable[[str], str], rid: int) -> None:
        ids, text = fit(tokenizer, text, wrap, budget.observation_tokens)
        if len(t.ids) + len(ids) > budget.trajectory_tokens:
            t.stop = "tokens"
            engine.release(rid)
            return
        t.append(author, text, ids)
        submit(t, resume=rid)

    def admit(job: Job, waiting: list[tuple[Trajectory, Call, int]]) -> None:
        for (t, call, rid), text in zip(waiting, pool.finish(job)):
            observe(t, "tool", text, call.wrap, rid)

    for t in trajectories:
        submit(t)
    while running or jobs:
        issued: dict[str, list[tuple[Trajectory, Call, int]]] = {}
        for done in engine.step() if running else ():
            t = running.pop(done.rid)
            t.append("model", done.text, done.ids, done.logprobs)
            turn = Turn(done.text, done.reason, t.turns, last=t.turns >= budget.turns)
            action = act(turn, t)
            t.turns += 1
            if isinstance(action, End):
                t.stop = action.reason
            elif turn.last:
                t.stop = "turns"
            elif isinstance(action, Notice):
                observe(t, "notice", action.text, str, done.rid)
                continue
            elif turn.reason == "length":
                raise AssertionError(f"act() asked for tool '{action.tool}' after a turn that was cut at its token limit")
            elif action.tool not in tools:
                raise AssertionError(f"act() asked for tool '{action.tool}'; there are {sorted(tools)}")
            else:
                issued.setdefault(action.tool, []).append((t, action, done.rid))
                continue
            engine.release(done.rid)
        clock += 1
        for name, waiting in issued.items():
            for i in range(0, len(waiting), tools[name].batch):
                part = waiting[i:i + tools[name].batch]
                calls = [ToolCall(name, call.argument, t.example, trajectory=t) for t, call, _ in part]
                for (t, _, _), call in zip(part, calls):
                    t.calls.append(call)
                jobs.append((clock + tool_lag, pool.start(tools[name], calls), part))
        if tool_lag:
            while jobs and (jobs[0][0] <= clock or not running):
                _, job, waiting = jobs.pop(0)
                admit(job, waiting)
        else:
            ready = [j for j in jobs if j[1].done.is_set()] or (jobs[:1] if jobs and not running else [])
            jobs = [j for j in jobs if j not in ready]
            for _, job, waiting in ready:
                admit(job, waiting)
    check_accounting(trajectories, engine.counters["sampled_tokens"] - sampled_before, tokenizer)
    return trajectories


def fit(tokenizer, text: str, wrap: Callable[[str], str], limit: int) -> tuple[list[int], str]:
    """Ids and text of wrap(text), cut inside the wrapping so that closing tags stay and the cut shows."""
    encode = lambda t: tokenizer.encode(t, add_special_tokens=False)
    whole = wrap(text)
    ids = encode(whole)
    if len(ids) <= limit:
        return ids, whole
    inner = encode(text)
    keep = min(len(inner), limit)
    while keep >= 0:
        whole = wrap(tokenizer.decode(inner[:keep]).rstrip("\N{REPLACEMENT CHARACTER}") + " [cut]")
        ids = encode(whole)
        if len(ids) <= limit:
            return ids, whole
        keep -= max(1, len(ids) - limit)
    raise UserError(f"an observation limit of {limit} tokens has no room for its own tags; raise --observation-tokens")


class AccountingError(AssertionError):
    """Tokens were lost, doubled or given to the wrong author."""


def check_accounting(trajectories: Sequence[Trajectory], engine_sampled: int, tokenizer) -> None:
    """Sampled tokens counted by the engine = mask sum; every list as long as the ids; a log-prob exactly where the mask is 1."""
    for t in trajectories:
        known = [int(x == x) for x in t.logprobs]
        ends = [s.end for s in t.segments]
        if not (len(t.ids) == len(t.mask) == len(t.logprobs) and known == t.mask and ends == sorted(ends) and (not ends or ends[-1] == len(t.ids))):
            raise AccountingError(f"trajectory {t.example.id}#{t.sample}: {len(t.ids)} ids, {len(t.mask)} mask entries, "
                                  f"{len(t.logprobs)} log-probs\n" + picture(t, tokenizer))
        if t.turns and not sum(t.mask):
            raise AccountingError(f"trajectory {t.example.id}#{t.sample} had {t.turns} turns and no sampled token\n" + picture(t, tokenizer))
    total = sum(sum(t.mask) for t in trajectories)
    if total != engine_sampled:
        raise AccountingError(f"the engine sampled {engine_sampled} tokens, the masks hold {total}\n" + picture(trajectories[0], tokenizer))


def picture(t: Trajectory, tokenizer) -> str:
    """A row as text: every token with its mask, for error messages."""
    return " ".join(f"{m}:{tokenizer.decode([i])!r}" for i, m in zip(t.ids, t.mask))


# ---- trajectories as tensors ------------------------------------------------------------------------------------------
@dataclass
class Batch:
    """Rows of prompt + response, padded on the right. Position t of every [B, T] tensor speaks of token ids_BT[:, t]."""
    ids_BT: torch.Tensor
    lengths_B: torch.Tensor
    starts_B: torch.Tensor  # length of the prompt
    sampled_BT: torch.Tensor  # bool: the model wrote it
    response_BT: torch.Tensor  # bool: anything after the prompt
    sampler_BT: torch.Tensor  # float32 log-probs, NaN where not sampled


def collate(trajectories: Sequence[Trajectory], device: str = "cpu") -> Batch:
    if not trajectories:
        raise UserError(f"rank {ranks.rank()} of {ranks.world()} has no prompt in this step: raise --prompts, or use fewer ranks")
    lengths = [len(t.prompt_ids) + len(t.ids) for t in trajectories]
    width = max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.long)  # what stands in the padding does not matter: masks go by length
    sampled, response = torch.zeros(len(lengths), width, dtype=torch.bool), torch.zeros(len(lengths), width, dtype=torch.bool)
    sampler = torch.full((len(lengths), width), float("nan"))
    for b, t in enumerate(trajectories):
        start = len(t.prompt_ids)
        ids[b, :lengths[b]] = torch.tensor(t.prompt_ids + t.ids)
        sampled[b, start:lengths[b]] = torch.tensor(t.mask, dtype=torch.bool)
        response[b, start:lengths[b]] = True
        sampler[b, start:lengths[b]] = torch.tensor(t.logprobs)
    starts = torch.tensor([len(t.prompt_ids) for t in trajectories])
    return Batch(*(x.to(device) for x in (ids, torch.tensor(lengths), starts, sampled, response, sampler)))
