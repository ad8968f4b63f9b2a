"""Experiments of many runs: start them, one per core, go on where they stopped, and put side by side what they measured.

    python -m common.experiments fork torl my_idea                    a new method file, to change
    python -m common.experiments sweep torl max_turns 0,1,2           one setting, several values, several seeds
    python -m common.experiments compare search                       the methods of a family on equal terms
    python -m common.claims                                           what the papers claim: common/claims.py

A run is a program of its own, `python -m methods.<method> --threads 1`; nothing in methods/ knows of this file. Beside the folder of a run stand
`<name>.log`, what it printed, and `<name>.experiment.json`, what was asked for: a finished run is used again only if that is the same,
base model included, and an unfinished one goes on from its checkpoint. `--fresh` starts all of them anew, as after a change of the code.
"""
import argparse
import base64
import difflib
import fcntl
import hashlib
import html
import importlib
import json
import keyword
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path

from common import UserError
from common.policy import TINY_FOLDER
from common.report import curves_svg
from common.run import Interrupted, main, parse_config, write_atomic

ROOT = Path(__file__).resolve().parents[1]


# ---- many runs --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Job:
    """One run. In a flag's text {seed} is the seed, {needs} the folder of the run that must have ended before."""
    method: str
    name: str
    seed: int
    flags: dict[str, object] = field(default_factory=dict)
    needs: "Job | None" = None

    @property
    def folder(self) -> Path:
        return Path("runs") / self.method / self.name

    @property
    def record(self) -> Path:
        return self.folder.with_name(f"{self.name}.experiment.json")

    def argv(self) -> list[str]:
        filled = {k: v.replace("{seed}", str(self.seed)).replace("{needs}", str(self.needs.folder) if self.needs else "{needs}")
                  if isinstance(v, str) else v for k, v in self.flags.items()}
        return ["--name", self.name, "--seed", str(self.seed), "--threads", "1", *flags_of(filled)]


def flags_of(settings: dict[str, object]) -> list[str]:
    """{"max_turns": 2, "browse": False} -> ["--max-turns", "2", "--no-browse"]."""
    out = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        out += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return out


def config_of(method: str) -> tuple[type, dict[str, dict]]:
    """The Config and the presets of methods/<method>.py."""
    if not re.fullmatch(r"\w+", method) or not (Path("methods") / f"{method}.py").is_file():
        raise UserError(f"there is no methods/{method}.py{nearest(method, [p.stem for p in Path('methods').glob('[a-z]*.py')])}")
    module = importlib.import_module(f"methods.{method}")
    return module.Config, module.PRESETS


def nearest(word: str, words: Sequence[str]) -> str:
    """"; did you mean ...?" for the end of an error, and nothing where no word is near."""
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.4)
    return f"; did you mean {close[0]}?" if close else ""


def settings_of(job: Job) -> dict:
    """Every setting of the run, as its config.json will hold it. Flags that the method does not have end the program (exit code 2)."""
    return {**_settings(job.method, *job.argv()[4:]), "name": job.name, "seed": job.seed}


@lru_cache(maxsize=None)
def _settings(method: str, *argv: str) -> dict:
    config_class, presets = config_of(method)
    cfg = parse_config(config_class, presets, argv)
    return {f.name: json.loads(json.dumps(getattr(cfg, f.name))) for f in fields(cfg)}


@lru_cache(maxsize=None)
def base_model(model: str) -> str:
    """What tells two base models of one name apart: a digest of the shipped weights; others are told by their name."""
    return hashlib.blake2b((TINY_FOLDER / "model.safetensors").read_bytes(), digest_size=8).hexdigest() if model == "tiny" else model


def asked(job: Job) -> dict:
    """What a result depends on."""
    settings = settings_of(job)
    return {"settings": settings, "base": base_model(settings["model"]), "needs": asked(job.needs) if job.needs else None}


def state(job: Job) -> str:
    """"done", "started" (a run with these settings that can go on) or "new"."""
    try:
        record = json.loads(job.record.read_text())
    except (OSError, ValueError):
        return "new"
    if {k: record.get(k) for k in ("settings", "base", "needs")} != asked(job):
        return "new"
    if record.get("done") and (job.folder / "summary.json").exists():
        return "done"
    return "started" if (job.folder / "config.json").exists() else "new"


def start(job: Job, fresh: bool = False) -> tuple[subprocess.Popen, float]:
    """The run's process, in a session of its own: Ctrl-C reaches this program only, which then stops its runs in order. The lock is on the
    log, which the process keeps open, so a run cannot be started twice, not even after this program was killed."""
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    goes_on = state(job) == "started" and not fresh
    with job.folder.with_name(f"{job.name}.log").open("a") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{job.folder} is being run by another program; wait for it, or stop it") from None
        if not goes_on:
            log.truncate(0)
            write_atomic(job.record, json.dumps(asked(job)))
        argv = [sys.executable, "-m", f"methods.{job.method}", *job.argv(), *(["--resume"] if goes_on else [])]
        environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environ, start_new_session=True)
    return process, time.monotonic()


def finish(job: Job, code: int, keep_model: bool) -> str:
    """"" and the record of a run that ended well, or what went wrong, with the last line it printed."""
    if code or not (job.folder / "summary.json").exists():
        lines = job.folder.with_name(f"{job.name}.log").read_text(errors="replace").split("\n")
        said = next((line for line in reversed(lines) if line.strip()), "nothing")
        return f"exit code {code}; it said: {said.strip()[:300]}"
    shutil.rmtree(job.folder / "checkpoint", ignore_errors=True)  # a finished run needs none, and hundreds of runs would fill a disk
    if not keep_model:
        shutil.rmtree(job.folder / "model", ignore_errors=True)
    write_atomic(job.record, json.dumps({**asked(job), "done": True}))
    return ""


def run_all(jobs: Sequence[Job], workers: int = 0, fresh: bool = False, keep_models: bool = True, longest_s: float = 3600) -> list[str]:
    """Run all that are not done, `workers` at a time (0: one per core), each after the one it needs. Returns a line for every run that
    failed; the others go on. A run that takes longer than `longest_s` is stopped, and counts as failed; its checkpoint stays. Ctrl-C or
    SIGTERM lets every run save, and raises Interrupted: the same command goes on."""
    jobs = list({j.folder: j for job in jobs for j in chain(job)}.values())
    needed = {j.needs.folder for j in jobs if j.needs}
    workers = workers or len(os.sched_getaffinity(0))
    todo = [j for j in jobs if fresh or state(j) != "done"]
    print(f"{len(jobs)} runs, {len(jobs) - len(todo)} of them done before; {workers} at a time", flush=True)
    waiting, running, failed, ended, began = list(todo), {}, {}, 0, time.monotonic()
    old = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while waiting or running:
            for job in [j for j in waiting if j.needs and j.needs.folder in failed]:
                waiting.remove(job)
                failed[job.folder] = f"{job.folder}: not run, since {job.needs.folder} failed"
            open_ = {j.folder for j in waiting} | set(running)
            ready = [j for j in waiting if not j.needs or j.needs.folder not in open_]
            for job in ready[:workers - len(running)]:
                waiting.remove(job)
                running[job.folder] = job, *start(job, fresh)
            time.sleep(0.2)
            for folder, (job, process, since) in list(running.items()):
                took = time.monotonic() - since
                if process.poll() is None and took <= longest_s:
                    continue
                wrong = finish(job, stop([process])[0], keep_models or folder in needed)
                del running[folder]
                ended += 1
                if wrong:
                    failed[folder] = f"{folder}: {wrong}" if took <= longest_s else f"{folder}: longer than {longest_s:.0f} s; {wrong}"
                left = (time.monotonic() - began) / ended * (len(waiting) + len(running))
                print(f"[{len(jobs) - len(todo) + ended}/{len(jobs)}] {folder}: {wrong or f'{took:.0f} s'}; about {left / 60:.0f} min left",
                      flush=True)
    except KeyboardInterrupt:
        print(f"\nletting {len(running)} runs save (once more to leave at once)", file=sys.stderr, flush=True)
        raise Interrupted("every finished run is kept; the same command goes on") from None
    finally:
        stop([process for _, process, _ in running.values()])
        signal.signal(signal.SIGTERM, old)
    return list(failed.values())


def chain(job: Job) -> list[Job]:
    """The run and those it needs, in the order in which they must be made."""
    return [*(chain(job.needs) if job.needs else []), job]


def stop(processes: Sequence[subprocess.Popen], patience_s: float = 120) -> list[int]:
    """Ask all that still run to save and end, wait, and in the end kill; returns the exit codes."""
    for p in processes:
        if p.poll() is None:
            p.terminate()
    until = time.monotonic() + patience_s
    for p in processes:
        try:
            p.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(p.pid, signal.SIGKILL)
    return [p.wait() for p in processes]


# ---- what a run measured ----------------------------------------------------------------------------------------------
Rows = dict[str, dict[int, dict]]  # kind -> step -> the line of metrics.jsonl; of several lines of one step the last


def read_rows(folder: Path) -> Rows:
    rows: Rows = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(row["kind"], {})[row["step"]] = row
    return {kind: dict(sorted(own.items())) for kind, own in rows.items()}


def t_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and its 95 % interval by Student's t over the values (one for each seed); without bounds for a single one."""
    mean, n = statistics.fmean(values), len(values)
    if n < 2:
        return mean, -math.inf, math.inf
    half = t_quantile(n - 1) * statistics.stdev(values) / math.sqrt(n)
    return mean, mean - half, mean + half


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t: a table, then Cornish and Fisher's series (off by less than 0.002)."""
    table = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
    z, v = 1.959964, freedom
    return table[v - 1] if v <= len(table) else z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)


def made(rows: Rows, what: str) -> float:
    """What trajectories cost that were made before the first step (SWiRL)."""
    return sum(row["sampled_tokens"] if what == "tokens" else row["calls"] * row["n"] for row in rows.get("items", {}).values())


def spent(rows: Rows, what: str) -> dict[int, float]:
    """Step -> "tokens" sampled, or tool "calls" made, in training up to there, with what was made before the first step; evaluations do not
    count, and step 0, the model as it came, has cost nothing."""
    total, out = made(rows, what), {0: 0.0}
    for row in rows.get("train", {}).values():
        trajectories = round(row["sampled_tokens"] / row["response_tokens"]) if row["response_tokens"] else 0
        total += row["sampled_tokens"] if what == "tokens" else row["calls"] * trajectories
        out[row["step"]] = total
    return out


def against(rows: Rows, metric: str, what: str) -> list[tuple[float, float]]:
    """(spent, value) of every held-out evaluation; of several at one cost the last. While trajectories are made nothing is learned: until then the
    first value stays, where learning costs something too (tokens, not calls)."""
    cost, before = spent(rows, what), made(rows, what)
    points = sorted({cost[step]: row[metric] for step, row in rows["eval"].items()}.items())
    return [points[0], *([(before, points[0][1])] if 0 < before < points[-1][0] else []), *points[1:]]


def at(points: Sequence[tuple[float, float]], x: float) -> float:
    """Linear between the points, and the nearest end beyond them."""
    for (x0, y0), (x1, y1) in zip(points, points[1:]):
        if x0 <= x <= x1 and x1 > x0:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[0][1] if x < points[0][0] else points[-1][1]


# ---- pages ------------------------------------------------------------------------------------------------------------
STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --line: #d5d9df; --text: #1b2027; --quiet: #59626e; --good: #17692d; --bad: #b02a2a;
  --warn: #7a5200; --ink: #1f66c9; }
@media (prefers-color-scheme: dark) { :root { --page: #0e1217; --card: #171c23; --line: #343c47; --text: #e5e9ee; --quiet: #a3adb9; --good: #6fd389;
  --bad: #ff8f88; --warn: #f2c46a; --ink: #6cb0ff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1000px; margin: 0 auto; padding: 20px 16px 60px; }
h1 { font-size: 1.5rem; margin: 0 0 8px; } h2 { font-size: 1.2rem; margin: 36px 0 8px; } h3 { font-size: 1rem; margin: 0 0 6px; }
p, li, summary, code { overflow-wrap: anywhere; } p { margin: 0 0 8px; max-width: 80ch; }
.quiet { color: var(--quiet); font-size: 13.5px; }
article { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px; margin: 12px 0; }
.verdict { display: inline-block; border: 1.5px solid currentColor; border-radius: 99px; padding: 0 9px; font-size: 13px; font-weight: 600;
  margin-right: 6px; }
.holds { color: var(--good); } .fails { color: var(--bad); } .undecided { color: var(--warn); } .not-run { color: var(--quiet); }
.arm { display: grid; grid-template-columns: 13rem minmax(0, 1fr) 14rem; gap: 0 12px; align-items: center; padding: 3px 0;
  border-top: 1px solid var(--line); }
.arm b { font-weight: 600; overflow-wrap: anywhere; } .arm span { font-variant-numeric: tabular-nums; }
.arm svg { display: block; width: 100%; height: 26px; overflow: visible; }
line { stroke: var(--ink); stroke-width: 2.5; } line.zero { stroke: var(--quiet); stroke-width: 1; stroke-dasharray: 3 3; }
line.axis { stroke: var(--line); stroke-width: 1; } circle { fill: var(--ink); } circle.seed { opacity: .35; } rect.region { fill: var(--good); opacity: .13; }
figure { margin: 8px 0; overflow-x: auto; } figure img { display: block; width: 100%; min-width: 34rem; height: auto; }
.table { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 4px 10px 4px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td { white-space: nowrap; } td.text { white-space: normal; min-width: 11rem; }
details { margin: 8px 0; } summary { cursor: pointer; padding: 4px 0; }
code { font: 13px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
@media (max-width: 640px) { .arm { grid-template-columns: minmax(0, 1fr); } main { padding: 14px 12px 40px; } }
"""
escape = html.escape


def page(title: str, body: str) -> str:
    """One file that opens without a network: its own style, pictures inside, no script."""
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    return (f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n'
            f"<style>{STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{escape(title)}</h1>\n{body}\n</main>\n</body>\n</html>\n")


def figure(svg: str) -> str:
    """A picture with a style of its own, which must not meet the page's."""
    words = re.search(r"<title>(.*?)</title>", svg, re.S)[1]
    return f'<figure><img src="data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}" alt="{words}"></figure>'


def bars(arms: Sequence[tuple[str, Sequence[float], str]], region: tuple[float, float] | None = None) -> str:
    """One line for each (label, a value for each seed, text behind): the seeds, their mean and its interval on a common axis. With
    `region` zero is marked, and where the interval must lie is shaded."""
    if not arms:
        return ""
    ends = [x for _, values, _ in arms for x in (*values, *t_interval(values)[1:]) if math.isfinite(x)]
    ends += [0.0, *(x for x in region if math.isfinite(x))] if region else []
    low, high = min(ends), max(ends)
    room = (high - low) * 0.06 or 0.05
    low, high = low - room, high + room
    px = lambda x: f"{100 * (min(max(x, low), high) - low) / (high - low):.2f}%"
    out = []
    for label, values, text in arms:
        mean, lower, upper = t_interval(values)
        drawn = '<line class="axis" x1="0" x2="100%" y1="13" y2="13"/>'
        if region:
            width = 100 * (min(region[1], high) - max(region[0], low)) / (high - low)
            drawn += f'<rect class="region" x="{px(region[0])}" width="{width:.2f}%" y="0" height="26"/>'
            drawn += f'<line class="zero" x1="{px(0)}" x2="{px(0)}" y1="0" y2="26"/>'
        drawn += "".join(f'<circle class="seed" cx="{px(v)}" cy="13" r="3"/>' for v in values)
        drawn += f'<line x1="{px(lower)}" x2="{px(upper)}" y1="13" y2="13"/>' if len(values) > 1 else ""
        drawn += f'<circle cx="{px(mean)}" cy="13" r="5"/>'
        out.append(f'<div class="arm"><b>{escape(label)}</b><svg role="img" aria-label="{escape(text)}">{drawn}</svg><span>{escape(text)}</span></div>')
    return "".join(out)


def said(values: Sequence[float], digits: int = 3) -> str:
    """"0.912 (0.871 to 0.953)" """
    mean, low, high = t_interval(values)
    return f"{mean:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})" if len(values) > 1 else f"{mean:.{digits}f} (one seed)"


def html_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Short cells stay on one line; a table that is too wide for the screen can be moved by itself."""
    cell = lambda text: f'<td{" class=text" * (len(text) > 32)}>{escape(text)}</td>'
    rows = "".join(f"<tr>{''.join(map(cell, line))}</tr>" for line in lines)
    return f'<div class="table"><table><tr>{"".join(f"<th>{escape(h)}</th>" for h in head)}</tr>{rows}</table></div>'


def markdown_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    clean = lambda cell: cell.replace("|", "\\|").replace("\n", " ")
    return "".join(f"| {' | '.join(map(clean, line))} |\n" for line in (head, ["---"] * len(head), *lines))


def write_pages(folder: Path, name: str, title: str, body: str, markdown: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"{name}.html", page(title, body))
    write_atomic(folder / f"{name}.md", markdown)
    print(f"{markdown}\nopen {folder / name}.html (the table: {folder / name}.md)")


def tell(failed: Sequence[str]) -> None:
    if failed:
        raise UserError(f"{len(failed)} runs failed, and are missing above: {'; '.join(failed[:5])}{' ...' if failed[5:] else ''}; the same command tries "
                        "again")


# ---- fork -------------------------------------------------------------------------------------------------------------
def fork(source: str, name: str, folder: Path = Path("methods")) -> Path:
    """methods/<name>.py, a copy of methods/<source>.py that runs under its own name: other first line, other run folder, other commands."""
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name) or keyword.iskeyword(name):
        raise UserError(f"NAME={name}: a method's name has lower-case letters, digits and _, begins with a letter and is no word of Python; try "
                        "my_idea")
    path, target = folder / f"{source}.py", folder / f"{name}.py"
    if not re.fullmatch(r"\w+", source) or not path.is_file():
        raise UserError(f"FROM={source}: there is no {path}{nearest(source, [p.stem for p in folder.glob('[a-z]*.py')])}")
    text = path.read_text(encoding="utf-8")
    title, rest = text.removeprefix('"""').split("\n", 1)
    if f'method="{source}"' not in rest:
        raise UserError(f'FROM={source}: {path} has no Run(..., method="{source}", ...), so its runs cannot be given another folder')
    for place in ('method="{}"', 'Path("runs") / "{}"', "runs/{}/"):
        rest = rest.replace(place.format(source), place.format(name))
    rest = re.sub(rf"\bmake {source}\b", f"make run METHOD={name}", rest)
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(f'"""{name}: a fork of {source}. Say here what it changes, and why.\n\n{title}\n{rest}')
    except FileExistsError:
        raise UserError(f"NAME={name}: {target} is there already, and stays as it is; choose another name") from None
    print(f"{target}\n  run it:                make run METHOD={name}\n  test it:               make test ARGS=\"-k {name}\"\n"
          f"  see what you changed:  make diff A={source} B={name}")
    return target


# ---- sweep ------------------------------------------------------------------------------------------------------------
def sweep(method: str, flag: str, values: Sequence[str], seeds: int, flags: dict[str, object], **how) -> None:
    """One setting at several values: a table and a picture, runs/sweep/<method>-<flag>.html and .md."""
    config_class, _ = config_of(method)
    settings, flag = {f.name: f.type for f in fields(config_class)}, flag.replace("-", "_")
    if flag not in settings:
        raise UserError(f"FLAG={flag}: methods/{method}.py has no such setting{nearest(flag, list(settings))}")
    if settings[flag] is bool and not {v.lower() for v in values} <= {"true", "false"}:
        raise UserError(f"VALUES={','.join(values)}: --{flag.replace('_', '-')} is a switch; its values are true and false")
    swept = lambda v: v.lower() == "true" if settings[flag] is bool else v
    if len(set(values)) < len(values) or not values:
        raise UserError(f"VALUES={','.join(values)}: give every value once, with commas between them")
    plain = lambda v: re.sub(r"[^\w.-]", "_", v)
    jobs = {v: [Job(method, f"sweep-{flag}-{plain(v)}-seed{s}", s, {**flags, flag: swept(v)}) for s in range(seeds)] for v in values}
    failed = run_all([own[s] for s in range(seeds) for own in jobs.values()], **how)
    lines, arms, ends = [], {}, []
    for value, own in jobs.items():
        own = [job for job in own if state(job) == "done"]
        if not own:
            continue
        summaries, label = [json.loads((job.folder / "summary.json").read_text()) for job in own], f"{flag} = {value}"
        metric, after = summaries[0]["metric"], [s["after"] for s in summaries]
        lines.append([value, str(len(own)), said([s["before"] for s in summaries]), said(after), said([s["calls_after"] for s in summaries], 2),
                      f"{statistics.fmean(s['wall_s'] for s in summaries) / 60:.1f}"])
        ends.append((label, after, said(after)))
        arms[label] = [[(step, row[metric]) for step, row in read_rows(job.folder)["eval"].items()] for job in own]
    if not lines:
        tell(failed)
    head = [flag, "seeds", f"{metric} before", f"{metric} after", "calls after", "minutes a run"]
    title = f"{method}: {flag}"
    note = ("Means over seeds with 95 % intervals (Student's t), on held-out questions, greedy. Settings besides: "
            f"{' '.join(flags_of(flags)) or 'the preset tiny'}.")
    steps = {max(x for x, _ in points) for points in (p for own in arms.values() for p in own)}
    picture = figure(curves_svg(arms, "steps", f"{metric}, held-out questions")) if min(steps) > 0 else ""
    body = f'<p class="quiet">{escape(note)}</p>{picture}<article><h3>{metric} after training</h3>{bars(ends)}</article>{html_table(head, lines)}'
    write_pages(Path("runs/sweep"), f"{method}-{flag}", title, body, f"{note}\n\n{markdown_table(head, lines)}")
    tell(failed)


# ---- compare ----------------------------------------------------------------------------------------------------------
# The methods of a family, their common measure, and the flags that put them on the same questions: the same held-out ones, and training
# questions of the same worlds. Everything else is each method's own preset.
FAMILIES = {
    "search": ("em", {"search_r1": {}, "research": {}, "r1_searcher": {}, "deep_researcher": {},
                      "otc": {"train_questions": 4096, "zero_hop": False}, "swirl": {}}),
    "code": ("accuracy", {"torl": {}, "retool": {}, "otc": {"task": "code", "train_questions": 4096, "turn_tokens": 64}, "swirl": {"task": "math"}}),
    "tools": ("accuracy", {"toolrl": {}, "tool_n1": {}}),
}
SUPERVISED = ("warmup", "cold_start", "sft_steps", "over_caller")  # settings that count supervised steps before RL


def compare(task: str, seeds: int, tokens: float, flags: dict[str, object], **how) -> None:
    """The methods of a family (or of all) on the same base model, questions, evaluation and budget of sampled tokens: runs/compare/<task>.*"""
    if task not in (*FAMILIES, "all"):
        raise UserError(f"TASK={task}: choose one of {', '.join(FAMILIES)}, all")
    jobs = {t: {m: [Job(m, f"compare-{t}-seed{s}", s, {"eval_every": 5, **own, **flags}) for s in range(seeds)] for m, own in FAMILIES[t][1].items()}
            for t in FAMILIES if task in (t, "all")}
    failed = run_all([js[s] for s in range(seeds) for own in jobs.values() for js in own.values()], **how)
    body, markdown = [], []
    for family, own in jobs.items():
        done = {m: [j for j in js if state(j) == "done"] for m, js in own.items()}
        if found := compared(family, {m: js for m, js in done.items() if js}, tokens):
            body.append(found[0]), markdown.append(found[1])
    if not body:
        tell(failed)
    note = ("The tiny model and world: a picture of mechanisms, not a benchmark. All methods of a family start from the same weights, learn from questions "
            "of the same training worlds and answer the same held-out questions (greedy); what is left, batch size included, is each method's preset. "
            "Sampled tokens and tool calls are those of training, trajectories that SWiRL makes beforehand included (they are all its calls, so there its "
            "curve is a straight line to the end); supervised steps are not sampled, and their number is given. Intervals: 95 %, Student's t over seeds. "
            "Curves: mean over seeds, and a band from the lowest to the highest.")
    title, text = f"Methods on equal terms: {task}", f"{note}\n\n{''.join(markdown)}"
    write_pages(Path("runs/compare"), task, title, f"<p>{escape(note)}</p>{''.join(body)}", text)
    tell(failed)


def compared(family: str, done: dict[str, list[Job]], tokens: float) -> tuple[str, str] | None:
    """(HTML, Markdown) of one family. The budget is `tokens`, or 0: what the thriftiest run sampled in all, so that every run reaches it."""
    if not done:
        return None
    metric = FAMILIES[family][0]
    rows = {m: [read_rows(j.folder) for j in own] for m, own in done.items()}
    whole = {m: [max(spent(r, "tokens").values()) for r in own] for m, own in rows.items()}
    budget = tokens or min(total for own in whole.values() for total in own)
    thousands = lambda x: f"{x / 1000:.3g} k"
    head = ["method", "seeds", "supervised steps", f"{metric} before RL", f"at {thousands(budget / 4)} tokens", f"at {thousands(budget / 2)}",
            f"at {thousands(budget)}", "tool calls in training, to there", "calls per question, at the end", "minutes a run"]
    lines, ends = [], []
    for m, own in rows.items():
        settings = settings_of(done[m][0])
        curves = [against(r, metric, "tokens") for r in own]
        values = lambda share: [at(c, budget * share) for c in curves]
        calls = [at(sorted((t, spent(r, "calls")[s]) for s, t in spent(r, "tokens").items()), budget) for r in own]
        short = "" if min(whole[m]) >= budget else f" (ended at {thousands(min(whole[m]))})"
        last = [r["eval"][max(r["eval"])] for r in own]
        three = [statistics.fmean(v) for v in ([c[0][1] for c in curves], values(0.25), values(0.5))]
        lines.append([m, str(len(own)), str(sum(settings.get(name, 0) for name in SUPERVISED)), *(f"{v:.3f}" for v in three), said(values(1)) + short,
                      f"{statistics.fmean(calls):,.0f}", said([row["calls"] for row in last], 2), f"{statistics.fmean(row['wall_s'] for row in last) / 60:.1f}"])
        ends.append((m, values(1), said(values(1)) + short))
    cost = {"tokens": "sampled tokens, thousands", "calls": "tool calls in training, thousands"}
    arms = lambda what: {m: [[(x / 1000, y) for x, y in against(r, metric, what)] for r in own] for m, own in rows.items()}
    pictures = [figure(curves_svg(arms(what), name, f"{family}: {metric} against {name.split(',')[0]}")) for what, name in cost.items()
                if all(points[-1][0] > points[0][0] for own in arms(what).values() for points in own)]
    missing = "" if len(pictures) == 2 else '<p class="quiet">A picture is left out: a method has spent nothing on its axis.</p>'
    if family == "tools":
        missing += '<p class="quiet">Tool calls are those written; neither method runs any.</p>'
    after = f"<article><h3>{metric} after {thousands(budget)} sampled tokens</h3>{bars(ends)}</article>"
    return f"<h2>{family}</h2>{''.join(pictures)}{missing}{after}{html_table(head, lines)}", f"{family}\n\n{markdown_table(head, lines)}\n"


# ---- commands ---------------------------------------------------------------------------------------------------------
def parse(parser: argparse.ArgumentParser, argv: Sequence[str], seeds: int = 3) -> tuple[argparse.Namespace, dict[str, object], dict]:
    """The parsed command with --seeds, the method's flags among what is left, and how to run."""
    parser.add_argument("--seeds", type=int, default=seeds, help="runs of every arm, with seeds 0, 1, ...")
    parser.add_argument("--jobs", type=int, default=0, help="runs at a time; 0: one per core")
    parser.add_argument("--fresh", action="store_true", help="run everything anew")
    parser.add_argument("--longest", type=float, default=60, help="minutes after which a run is stopped, and counts as failed")
    known, others = parser.parse_known_args(argv)
    if known.seeds < 1 or known.jobs < 0:
        raise UserError(f"--seeds {known.seeds} --jobs {known.jobs}: at least one seed, and no fewer than 0 jobs")
    flags: dict[str, object] = {}
    for word in others:
        if word.startswith("--"):
            name, given, value = word[2:].partition("=")
            off = name.startswith("no-") and not given
            last = name.removeprefix("no-" if off else "").replace("-", "_")
            flags[last] = value if given else not off
        elif flags and flags[last] is True:
            flags[last] = word
        else:
            raise UserError(f"{word}: not understood; flags of a method look like --steps 20")
    return known, flags, {"workers": known.jobs, "fresh": known.fresh, "longest_s": 60 * known.longest}


def command(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m common.experiments", description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    if argv[:1] == ["fork"]:
        parser.add_argument("source"), parser.add_argument("name")
        known = parser.parse_args(argv[1:])
        fork(known.source, known.name)
    elif argv[:1] == ["sweep"]:
        for name in ("method", "flag", "values"):
            parser.add_argument(name)
        known, flags, how = parse(parser, argv[1:])
        sweep(known.method, known.flag, known.values.split(","), known.seeds, flags, **how)
    elif argv[:1] == ["compare"]:
        parser.add_argument("task")
        parser.add_argument("--tokens", type=float, default=0, help="budget of sampled tokens; 0: what the thriftiest run sampled")
        known, flags, how = parse(parser, argv[1:])
        compare(known.task, known.seeds, known.tokens, flags, **how)
    else:
        raise UserError("give one of fork, sweep, compare: python -m common.experiments fork torl my_idea")


if __name__ == "__main__":
    main(lambda: command(sys.argv[1:]))
