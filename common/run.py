"""One run: its settings, folder, metrics, progress line, checkpoints and end.

    runs/<method>/<name>/  config.json  metrics.jsonl  trajectories.jsonl  summary.json  report.html  checkpoint/

`python -m common.run RUN...` prints the summaries of finished runs as a Markdown table.
"""
import dataclasses
import hashlib
import io
import json
import math
import os
import platform
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from common import UserError, health, ranks
from common.rollout import Trajectory
from common.scoring import bootstrap_interval
from common.update import Experience

# Every metric a method may log, the same name in all of them, with its meaning in one line. `*` stands for the rest of a name.
METRICS = {
    "reward": "mean training reward of the sampled trajectories",
    "reward_*": "mean of one part of the reward",
    "accuracy": "share of answers that are right",
    "accuracy_*": "share of right answers among the answers given, or on one kind of problem",
    "em": "share of answers that equal a gold answer after normalisation (exact match)",
    "em_*hop": "exact match on questions that need this many look-ups",
    "f1": "word F1 between answer and gold answer",
    "f1_*hop": "word F1 on questions that need this many look-ups",
    "accuracy_if_format": "share of right calls among the replies in the form the method asks for",
    "f1_if_answered": "word F1 among the trajectories that gave an answer in its tags",
    "valid": "share of trajectories whose blocks stand in the order the protocol asks for",
    "finished": "share of trajectories that the model ended itself, within its budgets",
    "floor": "share of trajectories in good form with a wrong answer: they get the floor",
    "cover_em": "share of answers that hold every word of a gold answer, in any order",
    "answer_words": "mean words between the answer tags, 0 where there is no answer",
    "well_formed": "share of trajectories in which every tag has its partner",
    "retrieved": "share of trajectories in which a search result held a gold answer",
    "answered": "share of trajectories with an answer between its tags",
    "format": "share of replies in the form the method asks for",
    "names": "share of replies that call exactly the right tools, whatever their arguments",
    "correctness": "graded score of the calls, on the scale of the reward",
    "length": "length reward: words of the thought over their target, at most 1",
    "irrelevance": "of the requests that no tool serves, the share answered without a call that can be read, as BFCL counts it",
    "em_if_answered": "exact match among the trajectories that gave an answer in its tags",
    "calls": "mean tool calls per trajectory",
    "calls_*": "mean tool calls on questions that need this many look-ups, or problems of this kind",
    "valid_call_rate": "share of model turns, other than answers, that were a usable tool call; no number where calls are only compared",
    "call_*": "share of tool calls with this outcome: ok, empty, error, timeout, memory, or why a web page could not be read; not_run where the method runs none",
    "code": "share of trajectories that hold a program",
    "pass_right": "share of tool calls that ran without an error, in trajectories with a right answer",
    "pass_wrong": "share of tool calls that ran without an error, in trajectories with a wrong answer",
    "productivity": "right answers per tool call",
    "turns": "mean model turns per trajectory",
    "response_tokens": "mean tokens per trajectory that the model sampled",
    "tool_tokens": "mean tokens per trajectory that tools and notices wrote",
    "repetition": "share of the sampled 4-grams of tokens that stood earlier in the same turn: towards 1 when the text goes in circles",
    "stop_*": "share of trajectories that ended for this reason",
    "skipped_prompts": "prompts left out because they are longer than the prompt budget",
    "zero_variance_groups": "share of groups whose samples all got the same reward: they teach nothing",
    "floor_groups": "share of groups whose samples all got the floor: these are among the zero-variance groups",
    "entropy": "mean entropy of the policy at its sampled tokens, in nats",
    "kl": "mean estimated KL divergence from the reference model, per token",
    "clip_fraction": "share of trained tokens whose gradient the clip removed",
    "sampler_ratio_*": "raw probability ratio of trainer to sampler on the sampled tokens: 1 when both agree",
    "sampler_gap_*": "difference of the log-probs of trainer and sampler on the sampled tokens, without sign: mean, 99th percentile, largest",
    "policy_ratio_*": "raw probability ratio of the policy to the one that was there before the first update on this batch",
    "good_logprob": "mean log-prob of the sampled tokens of trajectories with a reward above 0: falling is an early sign of collapse",
    "grad_norm": "norm of the policy gradient before clipping",
    "skipped_steps": "optimiser steps of the policy that were left out because the gradient was NaN or infinite: they changed nothing",
    "value_skipped_steps": "optimiser steps of the critic that were left out for the same reason (PPO)",
    "lr": "learning rate of the policy",
    "stage": "training stage, for methods with several",
    "value_loss": "loss of the critic (PPO)",
    "value_explained": "share of the returns' variance that the critic explains (PPO)",
    "loss": "loss of the supervised warm-up, in nats per token",
    "sampled_tokens": "tokens the engine sampled in this step",
    "cached_share": "share of this step's prompt and observation tokens that were not computed again, thanks to shared prompts and kept slots",
    "tokens_per_s": "sampled tokens per second of sampling",
    "sample_s": "seconds spent sampling, tools included",
    "tools_s": "seconds tools ran, summed over batches of calls (they overlap with sampling)",
    "logprob_s": "seconds spent on log-probs of the old and the reference policy and on values",
    "update_s": "seconds spent on the update",
    "step_s": "seconds of the whole step",
    "n": "trajectories evaluated",
    "step_label": "share of a trajectory's messages that the judge calls good: the mean inside each trajectory, then over trajectories",
    "kept": "share of the saved trajectories that the filter keeps",
    "items": "saved (state, action) items of the trajectories that are trained on",
}


# ---- settings ---------------------------------------------------------------------------------------------------------
def setting(default: Any, help: str, source: str, unit: str = "", published: Any = None) -> Any:
    """A Config field with its help text, unit and source: "paper §…", "code <file>" (where the published value stands) or "ours" (grammar: provenance.py).
    `published`: the value that stands there, if the preset `paper` has another one on purpose."""
    return dataclasses.field(default=default, metadata={"help": help, "source": source, "unit": unit, **({} if published is None else {"published": published})})


def describe(config_class: type) -> dict[str, dict]:
    """Name -> help, unit and source of every field. Raises TypeError for a field without them."""
    missing = [f.name for f in dataclasses.fields(config_class) if not {"help", "source", "unit"} <= set(f.metadata)]
    if missing:
        raise TypeError(f"{config_class.__module__}.{config_class.__name__}: no source for {', '.join(missing)}")
    return {f.name: dict(f.metadata) for f in dataclasses.fields(config_class)}


def parse_config(config_class: type, presets: dict[str, dict], argv: Sequence[str] | None = None):
    """Flags -> Config. `--preset` chooses the defaults, other flags change them. Errors and --help leave by SystemExit (tyro)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    name = config_class.__dataclass_fields__["preset"].default
    for i, word in enumerate(argv):
        if word == "--preset" and i + 1 < len(argv):
            name = argv[i + 1]
        elif word.startswith("--preset="):
            name = word.split("=", 1)[1]
    if name not in presets:
        raise UserError(f"--preset {name}: there is no such preset; there are {', '.join(presets)}")
    described = describe(config_class)
    unknown = set(presets[name]) - set(described)
    if unknown:
        raise TypeError(f"preset {name} sets {sorted(unknown)}, which {config_class.__name__} does not have")
    fields = []
    for f in dataclasses.fields(config_class):
        d = described[f.name]
        unit = f", in {d['unit']}" if d["unit"] else ""
        note = f"{d['help']}{unit} [{d['source']}]"
        fields.append((f.name, Annotated[f.type, tyro.conf.arg(help=note.replace("%", "%%"))],
                       dataclasses.field(default=name if f.name == "preset" else presets[name].get(f.name, f.default))))
    shown = dataclasses.make_dataclass(config_class.__name__, fields, frozen=True)
    module = sys.modules[config_class.__module__]
    parsed = tyro.cli(shown, args=argv, description=(module.__doc__ or "").strip(), prog=f"python -m {_module_name(module)}")
    config = config_class(**{f.name: getattr(parsed, f.name) for f in dataclasses.fields(config_class)})
    words = [word[2:].split("=")[0].replace("-", "_") for word in argv if word.startswith("--")]
    object.__setattr__(config, "given", {name for word in words for name in (word, word.removeprefix("no_")) if name in described})  # for saved_config
    return config


def _module_name(module) -> str:
    return module.__spec__.name if module.__spec__ else module.__name__


def main(body: Callable[[], Any]) -> None:
    """Run a command's body. A mistake the user can mend becomes one sentence and exit code 2; whatever else fails keeps its traceback (exit
    code 1). Either way the last words say where the run stands."""
    ranks.quiet()
    try:
        body()
    except UserError as error:
        ranks.leave(2, f"error: {error}{_where_it_stands()}", error)
    except Interrupted as stop:
        ranks.leave(stop.code, f"\nstopped: {stop}")
    except KeyboardInterrupt:
        ranks.leave(130, f"\nstopped at once{_where_it_stands()}")
    except Exception as error:
        ranks.leave(1, f"{traceback.format_exc()}error: {type(error).__name__}, see above{_where_it_stands()}", error)
    ranks.stop()


def _where_it_stands() -> str:
    """"; <folder> is saved at step 3; ..." if this process has begun a run."""
    if Run.current is None:
        return ""
    done = max(Run.current.checkpoints(), default=0)
    return f"; {Run.current.folder} {f'is saved at step {done}' if done else 'has no checkpoint yet'}: the same command with --resume goes on"


class Interrupted(Exception):
    """The run was saved and can be resumed: after Ctrl-C or SIGTERM (exit code 130), or a collapse (3)."""

    def __init__(self, message: str, code: int = 130):
        super().__init__(message)
        self.code = code


def read_template(path: str, default: str, *placeholders: str) -> str:
    """The text of --template FILE, or the method's own; it must hold the placeholders."""
    if not path:
        return default
    if not Path(path).is_file():
        raise UserError(f"--template {path}: no such file")
    text = Path(path).read_text(encoding="utf-8")
    missing = [p for p in placeholders if p not in text]
    if missing:
        raise UserError(f"--template {path}: it lacks the placeholder {', '.join(missing)}")
    return text


class Clock:
    """Seconds of the parts of a step."""

    def __init__(self):
        self.started = self.last = time.monotonic()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name], self.last = round(now - self.last, 4), now

    @property
    def total(self) -> float:
        return round(time.monotonic() - self.started, 4)


# ---- the run folder ---------------------------------------------------------------------------------------------------
def folder_of(method: str, name: str, root: str | Path = "runs") -> Path:
    """Where a run lies. What was there before is deleted, so it must be one folder of the method's."""
    if Path(name).name != name or name == "..":
        raise UserError(f"--name {name}: a run is one folder in {Path(root) / method}; give a plain name, without / and not . or ..")
    return Path(root) / method / name


class Run:
    """The folder of one run. Writes are atomic or append-only; a killed run loses at most the steps since its last checkpoint."""
    current: "Run | None" = None  # the run of this process: signals and last words are about it

    def __init__(self, config, *, method: str, metric: str, total_steps: int, resume: bool, name: str = "", root: str = "runs"):
        self.config, self.method, self.metric, self.total = config, method, metric, total_steps
        self.folder = folder_of(method, name or f"{config.preset}-seed{config.seed}", root)
        self.started = time.monotonic()
        self.earlier_s = 0.0  # wall seconds of the sessions this one continues
        self.before: dict | None = None  # the evaluation at step 0
        self.asked: str | None = None  # the signal that this rank has got
        self.saved = -1  # step of the newest checkpoint of this process
        self.train_lines: list[dict] = []  # what metrics.jsonl says of training
        self.warned: set[str] = set()
        self.collapse = ""  # why --stop-on-collapse ends the run
        described = describe(type(config))
        settings = {"method": method, "preset": config.preset, "seed": config.seed, "argv": sys.argv[1:],
                    "fields": {k: {"value": getattr(config, k), **described[k]} for k in described},
                    "versions": {"python": platform.python_version(), **{p: version(p) for p in ("torch", "transformers", "numpy")}},
                    "threads": torch.get_num_threads(), "ranks": ranks.world()}
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        if ranks.rank():
            return
        if resume:
            if not (self.folder / "config.json").exists():
                raise UserError(f"--resume: there is no run in {self.folder}; start it without --resume")
            before = json.loads((self.folder / "config.json").read_text())["fields"]
            changed = [k for k, v in settings["fields"].items() if k in before and before[k]["value"] != json.loads(json.dumps(v["value"]))
                       and k not in RESUME_MAY_CHANGE]
            if changed:
                raise UserError(f"--resume: {self.folder} was started with other values of {', '.join('--' + c.replace('_', '-') for c in changed)}; "
                                "give the same ones, or another --name")
        else:
            with disk(self.folder):
                if self.folder.exists():
                    if any(self.folder.iterdir()) and not (self.folder / "config.json").exists():
                        raise UserError(f"{self.folder} holds something else than a run (no config.json), and stays as it is: move it away, or give another --name")
                    shutil.rmtree(self.folder)
                self.folder.mkdir(parents=True)
            write_atomic(self.folder / "config.json", json.dumps(settings, indent=1, allow_nan=False))
        Run.current = self

    def _on_signal(self, number, frame) -> None:
        several = ranks.world() > 1
        if self.asked and not self.collapse and not several:  # a second Ctrl-C does not wait; torchrun repeats what its workers have got already
            raise KeyboardInterrupt
        self.asked = signal.Signals(number).name
        if not several or ranks.rank() == 0:
            print(f"\n{self.asked}: finishing this step, then saving{'' if several else ' (once more to leave at once)'}", file=sys.stderr, flush=True)

    @property
    def signal(self) -> str | None:
        """The signal that asks the run to stop. Ranks agree each time this is read: once a step, by all of them."""
        return next(filter(None, ranks.gather([self.asked])), None)

    @property
    def wall_s(self) -> float:
        return self.earlier_s + time.monotonic() - self.started

    # -- metrics
    def log(self, kind: str, step: int, metrics: dict[str, float]) -> None:
        """Append one line to metrics.jsonl; unknown names are refused, so that every name has a meaning."""
        unknown = [k for k in metrics if k not in METRICS and not any(fnmatchcase(k, p) for p in METRICS)]
        if unknown:
            raise KeyError(f"metrics without a meaning in common.run.METRICS: {unknown}")
        if ranks.rank():
            return
        line = {"kind": kind, "step": step, "wall_s": round(self.wall_s, 3), **{k: _finite(v) for k, v in metrics.items()}}
        append(self.folder / "metrics.jsonl", [line])
        if kind == "train":
            self.train_lines.append(line)
            self._progress(line)
        else:
            shown = " ".join(f"{k} {line[k] if isinstance(line[k], int) else format(line[k], '.3g')}" for k in metrics if line[k] is not None and k in HEADLINES)
            print(f"{_clear()}{kind} at step {step}: {shown}", flush=True)

    def _progress(self, line: dict) -> None:
        done = line["step"]
        left = (self.total - done) * line.get("step_s", 0)
        text = (f"step {done}/{self.total} reward {line['reward']:.3f} calls {line['calls']:.2f} "
                f"{line.get('tokens_per_s') or 0:.0f} tokens/s, {left / 60:.1f} min left")
        if sys.stdout.isatty():
            print(f"{_clear()}{text}", end="", flush=True)
        elif done % 10 == 0 or done == 1:
            print(text, flush=True)

    def log_train(self, step: int, trajectories: Sequence[Trajectory], parts: Sequence[dict], x: Experience, tokenizer, clock: Clock, engine,
                  group: int, more: dict) -> None:
        """The metrics of one step, and a few of its trajectories (those of one group after another, so that siblings can be compared).

        With several ranks each hands over its own trajectories; the numbers are those of all, the seconds those of the slowest."""
        first, everyones = ranks.before(len(trajectories)), ranks.gather(list(parts))
        everyone = ranks.gather([outline(t) for t in trajectories]) if ranks.world() > 1 else trajectories
        totals = torch.tensor([p["total"] for p in everyones]).view(-1, group)
        known = x.sampled_BT & ~x.old_BT.isnan()
        good = torch.tensor([p["total"] > 0 for p in parts], device=known.device)[:, None] & x.sampled_BT
        ratio = ranks.spread((x.old_BT[known] - x.sampler_BT[known]).exp())
        gap = sorted(ranks.gather((x.old_BT[known] - x.sampler_BT[known]).abs().tolist()))
        sampled, laps = ranks.all_sum(int(x.sampled_BT.sum())), {k: ranks.all_max(v) for k, v in clock.laps.items()}
        reused = ranks.all_sum(engine.counters["shared_prefill_tokens"] + engine.counters["cached_tokens"])
        self.log("train", step, {
            "reward": float(totals.mean()), **{f"reward_{k}": v for k, v in part_means(everyones).items()},
            **rollout_metrics(everyone, everyones, self.metric), "zero_variance_groups": float((totals == totals[:, :1]).all(1).float().mean()) if group > 1 else math.nan,
            **{f"sampler_ratio_{k}": v for k, v in ratio.items()},
            **({"sampler_gap_mean": mean(gap), "sampler_gap_p99": gap[int(0.99 * (len(gap) - 1))], "sampler_gap_max": gap[-1]} if gap else {}),
            "good_logprob": ranks.mean(x.sampler_BT[good]),
            **more, "sampled_tokens": sampled, "tokens_per_s": sampled / laps["sample_s"],
            "cached_share": reused / max(1, reused + ranks.all_sum(engine.counters["prefilled_tokens"])), **laps, "step_s": ranks.all_max(clock.total)})
        start = (step * self.config.keep_trajectories) % len(everyone) // group * group
        rows = []
        for b in range(start - first, min(start + self.config.keep_trajectories, len(everyone)) - first):
            if 0 <= b < len(trajectories):
                t = trajectories[b]
                span = slice(len(t.prompt_ids), len(t.prompt_ids) + len(t.ids))
                rows.append(trajectory_row(
                    t, step=step, split="train", parts=parts[b], tokenizer=tokenizer, advantage=_per_token(x.advantages_BT[b, span], x.trained_BT[b, span]),
                    ratio=(x.old_BT[b, span] - x.sampler_BT[b, span]).exp().tolist(), trained=x.trained_BT[b, span].tolist()))
        append(self.folder / "trajectories.jsonl", ranks.gather(rows))
        self.watch()
        if more.get("skipped_steps") or more.get("value_skipped_steps"):
            self._keep_skipped(step, trajectories, parts, x, more)

    def _keep_skipped(self, step: int, trajectories: Sequence[Trajectory], parts: Sequence[dict], x: Experience, more: dict) -> None:
        """skipped/step-N.pt: the batch whose gradient was not finite, for `torch.load`; of several ranks, a file each. UserError if that has
        happened in STOP_AFTER_SKIPPED steps in a row."""
        tensors = {f.name: getattr(x, f.name) for f in dataclasses.fields(x) if getattr(x, f.name) is not None}
        buffer = io.BytesIO()
        torch.save({"step": step, "metrics": more, "prompts": [t.prompt for t in trajectories], "responses": [t.response for t in trajectories],
                    "rewards": list(parts), **{k: v.detach().cpu().clone() for k, v in tensors.items()}}, buffer)
        folder, batches = self.folder / "skipped", ranks.gather([buffer.getvalue()])
        if ranks.rank():
            return
        with disk(folder):
            folder.mkdir(exist_ok=True)
        for r, batch in enumerate(batches):
            write_atomic(folder / (f"step-{step}-rank{r}.pt" if r else f"step-{step}.pt"), batch)
        rows = [r for r in map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines()) if r["kind"] == "train"][-STOP_AFTER_SKIPPED:]
        print(f"{_clear()}step {step}: the gradient was not finite and changed nothing; its batch is in {folder / f'step-{step}.pt'}", file=sys.stderr, flush=True)
        if len(rows) == STOP_AFTER_SKIPPED and all(r.get("skipped_steps") or r.get("value_skipped_steps") for r in rows):
            raise UserError(f"the gradient was not finite in {STOP_AFTER_SKIPPED} steps in a row, up to step {step}; the batches are in {folder}: look "
                            "at them, and try a lower --lr under another --name")

    def watch(self) -> None:
        """Say every new sign of collapse once. With --stop-on-collapse a collapse is like a signal: the method saves, then stops."""
        if ranks.rank():  # the first one keeps the metrics; the others learn of a stop as of a signal
            return
        signs = health.check(self.train_lines)
        for sign in signs:
            if sign.warns and sign.rule.name not in self.warned:
                self.warned.add(sign.rule.name)
                print(f"{_clear()}warning, {sign}", file=sys.stderr, flush=True)
        if self.config.stop_on_collapse and self.train_lines[-1]["step"] < self.total and (why := health.collapse(signs)):
            self.collapse, self.asked = why, self.asked or "collapse"

    def log_eval(self, step: int, trajectories: Sequence[Trajectory], parts: Sequence[dict], tokenizer) -> dict:
        """Log an evaluation, of all ranks; returns its metrics with "scores", the run's own metric for each question."""
        metrics = eval_metrics(self.metric, trajectories, parts)
        self.log("eval", step, metrics)
        append(self.folder / "trajectories.jsonl", (trajectory_row(t, step=step, split="eval", parts=p, tokenizer=tokenizer)
                                                    for t, p in list(zip(trajectories, parts))[:20]))
        return {**metrics, "scores": [float(p[self.metric]) for p in parts]}

    # -- checkpoints
    def save(self, step: int, trained: dict) -> None:
        """checkpoint/step-N/: state.pt (state_dicts of `trained`) and its checksum, complete or not there; the two newest are kept.

        With several ranks the first one writes whole tensors, so that any number of ranks can go on."""
        states = {k: ranks.whole_state(v) for k, v in trained.items()}
        if ranks.rank() == 0:
            self._write_checkpoint(step, states)
        ranks.broadcast(None)  # nobody goes on, or ends, before it is on the disk
        self.saved = step

    def _write_checkpoint(self, step: int, states: dict) -> None:
        folder = self.folder / "checkpoint"
        part, target = folder / f".step-{step}.part", folder / f"step-{step}"
        for left in folder.glob(".step-*.part"):  # by a process that was killed while it saved
            shutil.rmtree(left)
        buffer = io.BytesIO()
        torch.save({"step": step, "wall_s": self.wall_s, "before": self.before, **states}, buffer)
        try:
            with disk(target):
                part.mkdir(parents=True)
                write_atomic(part / "state.pt", buffer.getvalue())
                write_atomic(part / "checksum", hashlib.blake2b(buffer.getbuffer()).hexdigest())
                shutil.rmtree(target, ignore_errors=True)
                os.replace(part, target)
                fsync_folder(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        for old in sorted(self.checkpoints(), reverse=True)[2:]:
            shutil.rmtree(folder / f"step-{old}")

    def checkpoints(self) -> list[int]:
        return [int(p.name[5:]) for p in (self.folder / "checkpoint").glob("step-*")]

    def restore(self, trained: dict) -> int:
        """Load the newest checkpoint that is whole into `trained`; returns the steps done. What was logged after it is taken back, since
        those steps will be run again. With several ranks the first one reads and hands out."""
        state = self._read_checkpoint() if ranks.rank() == 0 else None
        step = ranks.broadcast(state["step"] if state else -1)
        if step >= 0:
            self.before = ranks.broadcast(state and state["before"])
            for name, x in trained.items():
                ranks.load_whole_state(x, state and state[name])
        return max(step, 0)

    def _read_checkpoint(self) -> dict | None:
        state = None
        for step in sorted(self.checkpoints(), reverse=True):
            folder = self.folder / "checkpoint" / f"step-{step}"
            try:
                raw = (folder / "state.pt").read_bytes()
                if hashlib.blake2b(raw).hexdigest() != (folder / "checksum").read_text():
                    raise ValueError("its checksum differs")
                state = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)  # whoever loads it brings it to its own device
                break
            except (OSError, ValueError, RuntimeError) as error:
                print(f"checkpoint {folder} cannot be used ({error}); trying the one before", file=sys.stderr, flush=True)
        step = state["step"] if state else -1
        if state:
            self.earlier_s = state["wall_s"]
        # the last evaluation comes after the last checkpoint
        again = lambda row: row["step"] == self.total and (row.get("kind") in ("eval", "transfer") or row.get("split") == "eval")
        for name in ("metrics.jsonl", "trajectories.jsonl"):
            path = self.folder / name
            if path.exists():
                kept = [line for line in path.read_text().splitlines() if _is_json(line) and (row := json.loads(line))["step"] <= step and not again(row)]
                write_atomic(path, "".join(line + "\n" for line in kept))
                self.train_lines += [row for row in map(json.loads, kept) if row.get("kind") == "train"]
        print(f"resuming {self.folder} after step {step}" if state else f"{self.folder} has no usable checkpoint; starting at step 0", flush=True)
        return state

    def stop_if_asked(self, step: int) -> None:
        """Raise Interrupted after a signal or a collapse, if step `step` is saved (a signal may come just after the decision to save) or is 0:
        before the first step there is nothing to save, and a run that goes on begins anew."""
        if step not in (0, self.saved) or not self.signal:
            return
        if not step:
            raise Interrupted(f"{self.folder} was before its first step; the same command with --resume goes on")
        if self.collapse:
            raise Interrupted(f"{self.folder} has collapsed ({self.collapse}) and is saved at step {step}. See make report RUN={self.folder}; "
                              "the same command with --resume --no-stop-on-collapse goes on all the same", code=3)
        raise Interrupted(f"{self.folder} is saved at step {step}; the same command with --resume goes on")

    # -- end
    def finish(self, after: dict, more: dict | None = None) -> None:
        """Write summary.json: the run's own metric before and after, with bootstrap intervals over the held-out questions; and what else a method says."""
        before, metric = self.before, self.metric
        scores = {"interval_before": bootstrap_interval(before["scores"]), "interval_after": bootstrap_interval(after["scores"])}
        self.summary = {"method": self.method, "preset": self.config.preset, "seed": self.config.seed, "steps": self.total, "wall_s": round(self.wall_s, 1),
                        "metric": metric, "before": before[metric], "after": after[metric], "n": after["n"], **scores, "calls_before": before["calls"],
                        "calls_after": after["calls"], "valid_call_rate_before": before["valid_call_rate"], "valid_call_rate_after": after["valid_call_rate"],
                        "peak_memory_mb": round(peak_memory_mb()), **(more or {})}
        write_atomic(self.folder / "summary.json", json.dumps({k: _finite(v) for k, v in self.summary.items()}, indent=1, allow_nan=False))

    def closing_line(self, report: Path) -> str:
        s = self.summary
        return (f"{s['metric']} {s['before']:.3f} -> {s['after']:.3f} (95 % interval {s['interval_after'][0]:.3f} to {s['interval_after'][1]:.3f}, "
                f"{s['n']} held-out questions), calls {s['calls_before']:.2f} -> {s['calls_after']:.2f}, {s['wall_s'] / 60:.1f} minutes\n"
                f"open {report}")


HEADLINES = ("em", "accuracy", "names", "format", "irrelevance", "f1", "em_1hop", "em_2hop", "f1_1hop", "f1_2hop", "calls", "code", "productivity",
             "answered", "valid_call_rate", "step_label", "loss", "kept", "items", "n")
STOP_AFTER_SKIPPED = 3  # steps in a row whose gradient was not finite
RESUME_MAY_CHANGE = ("resume", "stop_on_collapse", "steps", "save_every", "eval_every", "threads", "keep_trajectories")


def outline(t: Trajectory) -> Trajectory:
    """What the metrics read of a trajectory: its tokens and who wrote them, no text."""
    return dataclasses.replace(t, prompt="", prompt_ids=[], logprobs=[], segments=[dataclasses.replace(s, text="") for s in t.segments],
                               calls=[dataclasses.replace(c, trajectory=None) for c in t.calls])


def trajectory_row(t: Trajectory, *, step: int, split: str, parts: dict[str, float], tokenizer, advantage: float | list | None = None,
                   ratio: Sequence[float] | None = None, trained: Sequence[int] | None = None) -> dict:
    """One line of trajectories.jsonl: what the report's viewer shows. `ratio` and `trained` are aligned with t.ids."""
    letter = {"model": "M", "tool": "T", "notice": "N"}
    return {"step": step, "split": split, "example": t.example.id, "question": t.example.question, "answers": list(t.example.answers),
            "group": t.group, "sample": t.sample, "prompt": t.prompt, "reward": parts, "advantage": _finite(advantage), "stop": t.stop,
            "calls": [{"name": c.name, "arguments": c.argument, "outcome": c.outcome, "wait_s": round(c.wait_s, 4), "run_s": round(c.run_s, 4)}
                      for c in t.calls],
            "tokens": pieces(tokenizer, t.ids), "author": "".join(letter[s.author] * (s.end - s.start) for s in t.segments),
            "mask": "".join(str(int(m)) for m in (trained if trained is not None else t.mask)),
            "logprob": [_finite(round(x, 4)) for x in t.logprobs],
            "ratio": [_finite(round(float(x), 4)) for x in ratio] if ratio is not None else [None] * len(t.ids)}


def pieces(tokenizer, ids: Sequence[int]) -> list[str]:
    """The text each token adds; a character split over tokens appears with its last one."""
    out = []
    for i in range(len(ids)):
        text = tokenizer.decode(ids[max(0, i - 8):i + 1])
        before = tokenizer.decode(ids[max(0, i - 8):i])
        out.append(text[len(before):] if text.startswith(before) else text[-1:])
    return out


def rollout_metrics(trajectories: Sequence[Trajectory], parts: Sequence[dict], metric: str) -> dict[str, float]:
    """Calls, lengths and ends; with `metric`, the part of the reward that says whether an answer is right, also right answers per call
    and, for programs, how many of them ran."""
    n = max(1, len(trajectories))
    calls = [(c, p) for t, p in zip(trajectories, parts) for c in t.calls]
    sampled = sum(sum(t.mask) for t in trajectories)
    compared = parts and "names" in parts[0] or calls and all(c.outcome == "not_run" for c, _ in calls)  # written, not run: none is unusable
    not_answers = 0 if compared else sum(t.turns - (t.stop == "answer") for t in trajectories)
    out = {"calls": len(calls) / n, "turns": sum(t.turns for t in trajectories) / n, "response_tokens": sampled / n,
           "tool_tokens": (sum(len(t.ids) for t in trajectories) - sampled) / n, "repetition": repetition(trajectories),
           **{f"call_{kind}": mean(c.outcome == kind for c, _ in calls) for kind in sorted({"ok", *(c.outcome for c, _ in calls)})},
           "productivity": sum(p[metric] for p in parts) / len(calls) if calls else math.nan,
           "valid_call_rate": len(calls) / not_answers if not_answers else math.nan, "tools_s": sum(c.run_s for c, _ in calls)}
    if "code" in parts[0]:
        out["pass_right"] = mean(c.outcome in ("ok", "empty") for c, p in calls if p[metric] == 1)
        out["pass_wrong"] = mean(c.outcome in ("ok", "empty") for c, p in calls if p[metric] < 1)
    for t in trajectories:
        out[f"stop_{t.stop}"] = out.get(f"stop_{t.stop}", 0.0) + 1 / n
    return out


def repetition(trajectories: Sequence[Trajectory], n: int = 4) -> float:
    """Share of n-grams of sampled tokens that stood earlier in the same turn; NaN where no turn has n tokens."""
    grams = [list(zip(*(t.ids[s.start + i:s.end] for i in range(n)))) for t in trajectories for s in t.segments if s.author == "model"]
    total = sum(map(len, grams))
    return 1 - sum(len(set(g)) for g in grams) / total if total else math.nan


def part_means(parts: Sequence[dict]) -> dict[str, float]:
    """Mean of every named part of the reward over the trajectories that have it."""
    return {k: mean(p[k] for p in parts if k in p) for k in dict.fromkeys(k for p in parts for k in p) if k != "total"}


def eval_metrics(metric: str, trajectories: Sequence[Trajectory], parts: Sequence[dict]) -> dict[str, float]:
    """Means of the reward's parts, in all and by number of look-ups or kind of problem where the data say it."""
    out = {"n": len(parts), **part_means(parts), **rollout_metrics(trajectories, parts, metric)}
    if "answered" in parts[0]:
        out[f"{metric}_if_answered"] = mean(p[metric] for p in parts if p["answered"])
    elif "format" in parts[0]:
        out[f"{metric}_if_format"] = mean(p[metric] for p in parts if p["format"])
    for name in ("hops", "kind"):
        for value in sorted({t.example.meta[name] for t in trajectories if name in t.example.meta}):
            rows = [(t, p) for t, p in zip(trajectories, parts) if t.example.meta.get(name) == value]
            label = f"{value}hop" if name == "hops" else value
            out[f"{metric}_{label}"] = mean(p[metric] for _, p in rows)
            out[f"calls_{label}"] = mean(len(t.calls) for t, _ in rows)
    return out


def saved_config(config_class: type, folder: str, flags):
    """The Config of a finished run, with its trained model; the flags that were given (in a Config that no command line made: what differs from
    its default) take the place of the run's own."""
    path = Path(folder) / "config.json"
    if not path.exists() or not (Path(folder) / "model").exists():
        raise UserError(f"--evaluate {folder}: no finished run there (it needs config.json and model/)")
    saved = {k: v["value"] for k, v in json.loads(path.read_text())["fields"].items()}
    names = {f.name: f.default for f in dataclasses.fields(config_class)}
    given = getattr(flags, "given", {k for k, default in names.items() if getattr(flags, k) != default})
    for name in ("preset", "model"):
        if name in given and getattr(flags, name) != saved[name]:
            raise UserError(f"--evaluate {folder}: it was trained with --{name} {saved[name]}, and is evaluated with its own {name}; leave out --{name}")
    return config_class(**{**{k: v for k, v in saved.items() if k in names}, **{k: getattr(flags, k) for k in given}, "model": str(Path(folder) / "model")})


def print_evaluation(folder: str, metric: str, config, trajectories: Sequence[Trajectory], parts: Sequence[dict]) -> None:
    """Print the metrics of --evaluate with an interval, and add them to the run's evaluations.jsonl."""
    metrics = {k: _finite(v) for k, v in eval_metrics(metric, trajectories, parts).items()}
    low, high = bootstrap_interval([p[metric] for p in parts])
    append(Path(folder) / "evaluations.jsonl", [{"data": config.eval_data or config.data, **metrics, "interval": [low, high]}])
    print(f"{metric} {metrics[metric]:.3f} (95 % interval {low:.3f} to {high:.3f}), greedy, {metrics['n']} questions of {config.eval_data or config.data}")
    for name, value in metrics.items():
        print(f"  {name:20} {'-' if value is None else format(value, '.3f')}")


# ---- small things -----------------------------------------------------------------------------------------------------
def _finite(value):
    """Numbers JSON can hold: NaN and infinities become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else math.nan


def _per_token(values: torch.Tensor, trained: torch.Tensor) -> float | list[float | None] | None:
    """One number where a trajectory has a single advantage (GRPO), else one for each token (GAE), None where none is trained."""
    if not trained.any():
        return None
    if len(values[trained].unique()) == 1:
        return float(values[trained][0])
    return [round(float(v), 4) if t else None for v, t in zip(values, trained)]


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
        return True
    except json.JSONDecodeError:
        return False


def _clear() -> str:
    return "\r\x1b[K" if sys.stdout.isatty() else ""


@contextmanager
def disk(path: Path):
    """A disk that is full, read-only or gone becomes one sentence about `path`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror or error}): free or mend the disk; what was saved before has stayed") from error


def append(path: Path, rows: Iterable[dict]) -> None:
    """Add lines to a file of JSON lines. UserError if the disk does not take them; half a line is dropped by the next --resume."""
    if ranks.rank():  # the first rank writes
        return
    with disk(path), path.open("a", encoding="utf-8") as f:
        for row in rows:
            f.write(json.dumps(row, allow_nan=False) + "\n")


def write_atomic(path: Path, content: str | bytes) -> None:
    """Temp file in the same folder, fsync, rename: the old content or the new, never half. UserError if the disk does not take it."""
    if ranks.rank():
        return
    part = path.with_name(f".{path.name}.part")
    with disk(path):
        try:
            with part.open("wb") as f:
                f.write(content.encode() if isinstance(content, str) else content)
                f.flush()
                os.fsync(f.fileno())
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
        fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def peak_memory_mb() -> float:
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def set_up_torch(seed: int, threads: int, device: str) -> None:
    """Seed and CPU threads (0: one per core). On a CPU only operations that add up in a fixed order: by default the gradients of a prompt
    that a group shares are summed in whatever order the threads come, and two runs of one seed drift apart from the last bit on. Where torchrun
    started several ranks, they meet here."""
    ranks.start(device)
    torch.manual_seed(seed)
    torch.set_num_threads(threads or max(1, os.cpu_count() // ranks.on_this_machine()))
    torch.use_deterministic_algorithms(device == "cpu")
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs time


def summary_table(folders: Sequence[str]) -> str:
    lines = ["| run | metric | before | after | 95 % interval | calls | steps | minutes |", "|---|---|---|---|---|---|---|---|"]
    for folder in folders:
        path = Path(folder) / "summary.json"
        if not path.exists():
            raise UserError(f"{path}: no such file; has the run finished?")
        s = json.loads(path.read_text())
        lines.append(f"| {Path(folder).name} | {s['metric']} | {s['before']:.3f} | {s['after']:.3f} | {s['interval_after'][0]:.3f}–"
                     f"{s['interval_after'][1]:.3f} | {s['calls_before']:.2f} → {s['calls_after']:.2f} | {s['steps']} | {s['wall_s'] / 60:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(lambda: print(summary_table(sys.argv[1:])))
