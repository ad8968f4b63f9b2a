"""One run as one web page, and curves of several runs as one picture.

`write_report(run_dir)` turns a run folder into `report.html`: a single file that opens without a network, while the run is
still going on too. `python -m common.report RUN_DIR` does the same. `compare_curves` draws mean and spread over seeds as SVG.
The page itself (style, drawing, viewer) is `report_template.html`; here is what goes into it.

What a run wrote is not trusted: it reaches the page as JSON with `<` escaped, the page puts it in as text only, and its
content security policy allows nothing but the page's own script and style.
"""

import base64
import bisect
import hashlib
import html
import json
import math
import re
import shlex
import statistics
import sys
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from itertools import chain, zip_longest
from pathlib import Path

from common import UserError, health, ranks
from common.run import METRICS, main, write_atomic

TEMPLATE = Path(__file__).with_name("report_template.html")
TRAJECTORY_BYTES = 3_500_000  # JSON of all trajectories in a page, so that a page stays below about 5 MB
CURVE_ROWS = 1_500  # per kind; longer runs are thinned evenly
HEAD_TOKENS, TAIL_TOKENS = 4_000, 2_000  # of a longer response, the part that is shown
PROMPT_CHARS, TEXT_CHARS = 20_000, 4_000  # longer prompts, questions, answers and call arguments are cut, and say so

# Heading -> plots in their order: a metric, or (title, pattern, ..) where several share a plot. A metric is drawn once, where it
# matches first; what matches nothing comes last, under "More". Before them comes the plot of the run's own metric.
PLOTS = {
    "Learning": (
        *("reward", ("parts of the reward", "reward_*"), "f1", "answered", "calls", ("calls by kind of question", "calls_*"), "turns"),
        *("valid_call_rate", "call_ok", "zero_variance_groups"),
    ),
    "Responses": (("tokens per response", "response_tokens", "tool_tokens"), ("why responses ended", "stop_*"), "repetition", "skipped_prompts"),
    "Update": (
        *("entropy", "good_logprob", "kl", "clip_fraction", ("policy ratio", "policy_ratio_*")),
        *(("trainer / sampler ratio", "sampler_ratio_*"), "grad_norm", ("steps skipped: gradient not finite", "skipped_steps", "value_skipped_steps"), "value_loss", "value_explained", "lr"),
    ),
    "Time": ("tokens_per_s", "sampled_tokens", "cached_share", ("seconds per step", "*_s")),
}
NOT_PLOTTED = {"kind", "step", "wall_s", "n"}
STEP_TIMES = {"sample_s": "sampling and tools", "logprob_s": "log-probs", "update_s": "update"}


def write_report(run_dir: str | Path, meanings: dict[str, str] = METRICS) -> Path:
    """Write `run_dir/report.html` from the run's files and return its path.

    Only `config.json` must be there. Lines that cannot be read (a run killed while writing leaves half a line) are left out
    and named on the page. `meanings`: metric name, or pattern such as `stop_*`, -> one line.
    """
    run_dir = Path(run_dir)
    if ranks.rank():  # only the first one has these files
        return run_dir / "report.html"
    notices: list[str] = []
    config, summary = _read_json(run_dir / "config.json"), {}
    if (run_dir / "summary.json").exists():
        summary = _read_json(run_dir / "summary.json")
    else:
        notices.append(f"No summary.json yet: the run goes on, or stopped early. For a newer page: python -m common.report {run_dir}")
    curves = _read_curves(run_dir / "metrics.jsonl", notices)
    evals = curves.get("eval", {"values": {}})["values"]
    metric = summary.get("metric") or next(iter(evals), None)
    title, sentence, cards = _headline(config, summary, curves, metric, meanings)
    data = {
        "config": _finite(config),
        "arguments": shlex.join(map(str, config.get("argv", []))),
        "notices": notices,
        "metric": metric,
        "cards": cards,
        "health": _health(run_dir / "metrics.jsonl"),
        "curves": curves,
        "plots": _plots(curves, metric, summary, meanings),
        **_read_trajectories(run_dir / "trajectories.jsonl", notices),
    }
    template = TEMPLATE.read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", template, re.S).group(1)
    style = re.search(r"<style>(.*?)</style>", template, re.S).group(1)
    policy = f"default-src 'none'; script-src {_csp_hash(script)}; style-src {_csp_hash(style)}; img-src data:"
    policy += "; base-uri 'none'; form-action 'none'"
    title, sentence = (html.escape(text).encode("ascii", "xmlcharrefreplace").decode() for text in (title, sentence))
    fill = {"csp": policy, "title": title, "sentence": sentence, "data": _embed(data)}
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: fill[match[1]], template)  # one pass: texts of the run are never expanded
    write_atomic(run_dir / "report.html", page)
    return run_dir / "report.html"


def compare_curves(
    runs: list[tuple[str, str | Path]], metric: str, out_svg: str | Path, *, x: str = "minutes", kind: str = "eval", title: str = ""
) -> Path:
    """Draw `metric` of several runs as a static SVG: per label the mean line and a band from the lowest to the highest seed.

    `runs`: (label, run folder); runs with one label are seeds of one arm. `x`: "minutes" or "steps". `kind`: "eval" for the
    held-out evaluations or "train" for training samples, which get a running mean. Between its measurements a run is
    interpolated linearly; a mean is drawn only where all its seeds have data.
    """
    if x not in ("minutes", "steps"):
        raise UserError(f'compare_curves: x is "{x}"; use "minutes" or "steps".')
    arms: dict[str, list[list[tuple[float, float]]]] = {}
    for label, run_dir in runs:
        path = Path(run_dir) / "metrics.jsonl"
        curve = _read_curves(path, [], thin=False).get(kind, {"values": {}})
        if metric not in curve["values"]:
            names = ", ".join(sorted(curve["values"])) or "none"
            raise UserError(f'{path} has no "{metric}" in its "{kind}" lines; it has: {names}.')
        at = curve["step"] if x == "steps" else [None if s is None else s / 60 for s in curve["wall_s"]]
        points = sorted((a, v) for a, v in zip(at, curve["values"][metric], strict=True) if a is not None and v is not None)
        if not points:
            raise UserError(f'{path}: "{metric}" has no finite value in its "{kind}" lines; nothing to draw.')
        arms.setdefault(label, []).append(points if kind == "eval" else _running_mean(points))
    title = title or f"{metric}, {'held-out questions' if kind == 'eval' else 'training samples (running mean)'}"
    write_atomic(Path(out_svg), curves_svg(arms, x, title))
    return Path(out_svg)


# ------------------------------------------------------------------------------------------------------------ reading


def _read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing: {path.parent} is not the folder of a run; give one such as runs/search_r1/<name>.") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); restore it, or delete it if it is summary.json.") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object; restore it, or delete it if it is summary.json.")
    return value


def _read_jsonl(path: Path, notices: list[str]) -> Iterator[tuple[int, int, dict]]:
    """Yield (byte offset, line number, object). Lines that are no object are left out and named in `notices` at the end."""
    bad, torn, offset = [], False, 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            start, offset = offset, offset + len(line)
            try:
                row = json.loads(line.decode("utf-8", "replace"))
            except ValueError:
                row = None
            if isinstance(row, dict):
                yield start, number, row
            elif line.endswith(b"\n"):
                bad.append(number)
            else:
                torn = True
    if bad:
        notices.append(f"{path.name}: {_lines(bad)} not a JSON object, left out.")
    if torn:
        notices.append(f"{path.name}: the last line ({number}) is incomplete, as when a run is writing or was killed; left out.")


def _lines(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:5])) + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")
    return f"line {shown} is" if len(numbers) == 1 else f"lines {shown} are"


def _number(value: object, digits: int = 6) -> float | None:
    """A finite number, shortened to `digits` significant digits; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        return None
    return value if isinstance(value, int) else float(f"{value:.{digits}g}")


def _text(value: object, limit: int = TEXT_CHARS) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= limit else f"{text[:limit]}… [{len(text) - limit:,} more characters not shown]"


def _read_curves(path: Path, notices: list[str], thin: bool = True) -> dict[str, dict]:
    """kind -> {"step": [..], "wall_s": [..], "values": {metric: [number or None, ..]}}, all lists of one length, by step."""
    if not path.exists():
        notices.append(f"There is no {path.name} yet: no curves.")
        return {}
    kinds: dict[str, dict[int, dict]] = {}
    repeated, no_step = 0, []
    for _, number, row in _read_jsonl(path, notices):
        step = row.get("step")
        if not isinstance(step, int) or not isinstance(row.get("kind"), str):
            no_step.append(number)
            continue
        rows = kinds.setdefault(row["kind"], {})
        repeated += step in rows
        rows[step] = row  # a resumed run repeats the steps after its last checkpoint: the last one counts
    if no_step:
        notices.append(f"{path.name}: {_lines(no_step)} without step or kind, left out.")
    if repeated:
        notices.append(f"{path.name}: {repeated} lines repeat a step, as after a resume; the last line of a step is drawn.")
    curves = {}
    for kind, by_step in kinds.items():
        steps = sorted(by_step)
        if thin and len(steps) > CURVE_ROWS:
            notices.append(f"{kind} curves: {CURVE_ROWS:,} of {len(steps):,} steps are drawn, evenly chosen.")
            steps = [steps[i * (len(steps) - 1) // (CURVE_ROWS - 1)] for i in range(CURVE_ROWS)]
        names = dict.fromkeys(name for row in by_step.values() for name in row if name not in NOT_PLOTTED)
        columns = {name: [_number(by_step[step].get(name)) for step in steps] for name in names}
        curves[kind] = {
            "step": steps,
            "wall_s": [_number(by_step[step].get("wall_s")) for step in steps],
            "values": {name: column for name, column in columns.items() if any(value is not None for value in column)},
        }
    return curves


# ------------------------------------------------------------------------------------------------------ head and plots


def _health(path: Path) -> dict:
    """{"said": one line, "signs": every sign of collapse that is looked for, the bad ones first}."""
    by_step = {row["step"]: row for _, _, row in _read_jsonl(path, []) if row.get("kind") == "train" and isinstance(row.get("step"), int)} if path.exists() else {}
    rows = [{name: _number(value) for name, value in by_step[step].items()} for step in sorted(by_step)]
    signs = sorted(health.check(rows), key=lambda sign: (not sign.warns, sign.since is None))
    bad, past = sum(sign.warns for sign in signs), sum(sign.until is not None for sign in signs)
    said = f"{bad or 'No'} sign{'' if bad == 1 else 's'} of collapse after {len(rows):,} training steps" + (f"; {past} passed" if past else "") + "."
    if len(rows) < health.WINDOW + health.PATIENCE:
        said = f"{len(rows)} training steps so far: signs of collapse are looked for from step {health.WINDOW + health.PATIENCE} on."
    if why := health.collapse(signs):
        said += f" The stop rule would end the run: {why}."
    return {"said": said, "signs": [{
        **{key: getattr(sign.rule, key) for key in ("name", "metric", "warning", "meaning", "advice", "source")},
        "value": "no number" if sign.first is None else f"{_show(sign.first)} → {_show(sign.last)}", "known": sign.first is not None,
        "when": "" if sign.since is None else f"since step {sign.since}" if sign.warns else f"steps {sign.since} to {sign.until}", "warns": sign.warns,
    } for sign in signs]}


def _show(value: object) -> str:
    number = _number(value)
    return "none" if number is None else f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def _interval(bounds: object) -> str:
    is_whole = isinstance(bounds, list) and len(bounds) == 2 and None not in map(_number, bounds)
    return f"{_show(bounds[0])} to {_show(bounds[1])}" if is_whole else ""


def _headline(config: dict, summary: dict, curves: dict, metric: str | None, meanings: dict[str, str]) -> tuple[str, str, list[dict]]:
    """Title, the run in one sentence, and the cards [{label, value, note}]. Without a summary, from the evaluations so far."""
    method, preset, seed = (summary.get(key, config.get(key)) for key in ("method", "preset", "seed"))
    if seed is None:
        seed = config.get("fields", {}).get("seed", {}).get("value", "?")
    train, evals = (curves.get(kind, {"values": {}, "step": []}) for kind in ("train", "eval"))

    def change(name: str | None, before: str, after: str) -> tuple[str, str]:
        values = [value for value in evals["values"].get(name, []) if value is not None] or [None]
        return (_show(summary.get(before)), _show(summary[after])) if after in summary else (_show(values[0]), _show(values[-1]))

    before, after = change(metric, "before", "after")
    clock = [s for curve in curves.values() for s in curve["wall_s"] if s is not None]
    steps, wall_s = summary.get("steps", max(train["step"], default=0)), summary.get("wall_s", max(clock, default=0.0))
    intervals = {"before": _interval(summary.get("interval_before")), "after": _interval(summary.get("interval_after"))}
    sentence = f"{method}, preset {preset}, seed {seed}: "
    sentence += f"{metric} on held-out questions went from {before} to {after}" if metric else "no evaluation yet"
    sentence += f" (95 % interval {intervals['after']})" if intervals["after"] else ""
    sentence += f", in {_show(steps)} steps and {_show(wall_s / 60)} minutes" + ("." if summary else " so far.")

    cards = []
    if metric:
        n = f", {_show(summary['n'])} questions" if "n" in summary else ""
        note = "; ".join(f"{name} {text}" for name, text in intervals.items() if text)
        note = f"95 % interval: {note}" if note else "no interval yet"
        cards.append({"label": f"held-out {metric}{n}", "value": f"{before} → {after}", "note": note})
    for name in ("calls", "valid_call_rate"):
        if name in evals["values"]:
            value = " → ".join(change(name, f"{name}_before", f"{name}_after"))
            cards.append({"label": f"held-out {name}", "value": value, "note": _meaning(name, meanings)})
    times = {text: sum(v for v in train["values"].get(name, []) if v is not None) for name, text in STEP_TIMES.items()}
    whole = sum(times.values())
    note = " · ".join(f"{text} {time / whole:.0%}" for text, time in times.items() if whole and time)
    cards.append({"label": "time", "value": f"{_show(steps)} steps, {_show(wall_s / 60)} min", "note": note})
    speeds = [v for v in train["values"].get("tokens_per_s", []) if v is not None]
    if speeds:
        memory = f"; peak memory {_show(summary['peak_memory_mb'])} MB" if "peak_memory_mb" in summary else ""
        cards.append({"label": "sampling", "value": f"{_show(statistics.median(speeds))} tokens/s", "note": f"median over steps{memory}"})
    title = f"{method} · {preset} · seed {seed}" + (f" · {metric} {before} → {after}" if metric else "")
    return title, sentence, cards


def _meaning(name: str, meanings: dict[str, str]) -> str:
    return meanings.get(name) or next((text for pattern, text in meanings.items() if fnmatchcase(name, pattern)), "(not described)")


def _plots(curves: dict, metric: str | None, summary: dict, meanings: dict[str, str]) -> list[dict]:
    """The plots, grouped: [{"title", "plots": [{"title", "series": [{kind, name, label, color}], "meanings", "intervals"}]}]."""
    columns = {kind: curves[kind]["values"] for kind in ("train", "eval") if kind in curves}
    for name in columns.get("eval", {}):  # what training logs as a part of the reward and evaluation by its own name is one metric
        if f"reward_{name}" in columns.get("train", {}) and name not in columns["train"]:
            columns["train"][name] = columns["train"].pop(f"reward_{name}")
    left = list(dict.fromkeys(name for values in columns.values() for name in values))

    def plot(title: str, names: list[str], kinds: Iterable[str] = tuple(columns)) -> dict:
        pairs = [(kind, name) for name in names for kind in kinds if name in curves[kind]["values"]]
        series = [{"kind": kind, "name": name, "color": names.index(name)} for kind, name in pairs]
        for i, s in enumerate(series):
            who = {"train": "training", "eval": "held-out"}.get(s["kind"], s["kind"])
            second = i > 0 and series[i - 1]["name"] == s["name"]
            s["label"] = who if len(names) == 1 or second else s["name"]
            s["color"] = i if len(names) == 1 else s["color"]
        texts: dict[str, list[str]] = {}
        for name in names:
            texts.setdefault(_meaning(name, meanings), []).append(name)
        described = [{"names": ", ".join(group) if len(texts) > 1 else "", "text": text} for text, group in texts.items()]
        return {"title": title, "series": series, "intervals": [], "meanings": described}

    groups = {heading: [] for heading in [*PLOTS, "More"]}
    patterns = dict(PLOTS)
    if metric in left:
        left.remove(metric)
        groups["Learning"].append(plot(metric, [metric]))
        ends = [("interval_before", 0), ("interval_after", -1)]
        groups["Learning"][0]["intervals"] = [{"end": i, "low": b[0], "high": b[1]} for key, i in ends if _interval(b := summary.get(key))]
        patterns["Learning"] = ((f"{metric} in detail", f"{metric}_*"), *PLOTS["Learning"])
    for heading, entries in patterns.items():
        for entry in entries:
            title, *mine = entry if isinstance(entry, tuple) else (entry, entry)
            names = [name for name in left if any(fnmatchcase(name, pattern) for pattern in mine)]
            left = [name for name in left if name not in names]
            if names:
                kinds = ["train"] if heading == "Time" and "train" in columns else columns
                groups[heading].append(plot(names[0] if len(names) == 1 else title, names, kinds))
    groups["More"] = [plot(name, [name]) for name in left]
    for kind in (kind for kind in curves if kind not in columns):  # a warm-up, for example: it has steps of its own
        groups.setdefault(kind, []).extend(plot(name, [name], [kind]) for name in curves[kind]["values"])
    shown = {heading: [plot for plot in plots if plot["series"]] for heading, plots in groups.items()}
    return [{"title": heading, "plots": plots} for heading, plots in shown.items() if plots]


# -------------------------------------------------------------------------------------------------------- trajectories


def _read_trajectories(path: Path, notices: list[str]) -> dict:
    """{"trajectories", "pieces", "prompts", "shown"}: a selection of rows within TRAJECTORY_BYTES, texts stored once.

    The file is read twice, first for an index (it may be larger than memory), then for the chosen rows.
    """
    rows: list[dict] = []
    pieces: dict[str, int] = {}
    prompts: dict[str, int] = {}
    if not path.exists():
        notices.append(f"There is no {path.name} yet: no trajectories.")
        return {"trajectories": [], "pieces": [], "prompts": [], "shown": ""}
    index, bad = [], []
    for offset, number, row in _read_jsonl(path, notices):
        if _is_whole(row):
            total = _number(row["reward"].get("total"))
            index.append({"offset": offset, "split": row["split"], "step": row["step"], "total": -math.inf if total is None else total})
        else:
            bad.append(number)
    if bad:
        notices.append(f"{path.name}: {_lines(bad)} without a needed field, or with lists of different lengths; left out.")
    used = missed = 0
    chosen: list[int] = []
    with path.open("rb") as file:
        for offset in _order(index):
            file.seek(offset)
            row = _compact(json.loads(file.readline().decode("utf-8", "replace")))
            new_pieces = dict.fromkeys(piece for piece in row["tokens"] if piece not in pieces)
            row_bytes = len(_json(row | {"tokens": [len(pieces)] * len(row["tokens"]), "prompt": len(prompts)}))
            row_bytes += len(_json(list(new_pieces))) + (0 if row["prompt"] in prompts else len(_json(row["prompt"])))
            if used + row_bytes > TRAJECTORY_BYTES:
                missed += 1
                if missed > 20:  # full: the small rows that might still fit are not worth reading the rest
                    break
                continue
            used += row_bytes
            row["tokens"] = [pieces.setdefault(piece, len(pieces)) for piece in row["tokens"]]
            row["prompt"] = prompts.setdefault(row["prompt"], len(prompts))
            rows.append(row)
            chosen.append(offset)
    order = sorted(range(len(rows)), key=lambda i: (rows[i]["step"], rows[i]["split"], rows[i]["group"] or 0, chosen[i]))
    shown = f"{len(rows):,} of {len(index):,} trajectories in {path.name} are shown"
    if len(rows) < len(index):
        shown += ": as many as fit, in turn from the first and last step of each split and the best and worst of every step"
    return {"trajectories": [rows[i] for i in order], "pieces": list(pieces), "prompts": list(prompts), "shown": shown + "."}


def _is_whole(row: dict) -> bool:
    kinds = {"step": int, "split": str, "question": str, "answers": list, "prompt": str, "reward": dict, "calls": list, "tokens": list}
    kinds |= {"author": str, "mask": str, "logprob": list, "ratio": list, "stop": str}
    if not all(isinstance(row.get(key), kind) for key, kind in kinds.items()) or not all(isinstance(call, dict) for call in row["calls"]):
        return False
    per_token = [row[key] for key in ("tokens", "author", "mask", "logprob", "ratio")]
    return len({len(values) for values in per_token}) == 1


def _order(index: list[dict]) -> Iterator[int]:
    """Offsets of all rows, the most telling first: whole first and last steps of each split, and best and worst of the others."""
    steps: dict[tuple[str, int], list[dict]] = {}
    for row in index:
        steps.setdefault((row["split"], row["step"]), []).append(row)
    queues = []
    for split in sorted({split for split, _ in steps}):
        mine = sorted(step for name, step in steps if name == split)
        queues += [steps[split, mine[0]], steps[split, mine[-1]]]
        spread = sorted(range(len(mine)), key=lambda i: (_level(i, len(mine)), i))  # ends, middle, quarters, eighths, ..
        extremes = [sorted(steps[split, mine[i]], key=lambda row: row["total"]) for i in spread]
        queues.append([row for rows in extremes for row in (rows[-1], rows[0])])
    turns = chain.from_iterable(zip_longest(*queues))  # one of each queue in turn
    return iter(dict.fromkeys(row["offset"] for row in chain(turns, index) if row))


def _level(i: int, n: int) -> int:
    """Depth at which position i of n appears when a range is halved again and again, beginning with its ends."""
    low, high, depth = 0, n - 1, 0
    while i not in (low, high):
        middle, depth = (low + high) // 2, depth + 1
        low, high = (low, middle) if i <= middle else (middle, high)
    return depth


def _compact(row: dict) -> dict:
    """The part of a trajectory that a page shows, texts and lists bounded in size. Tokens and prompt are still texts."""
    out = {key: _number(row.get(key)) for key in ("step", "group", "sample")}
    out |= {key: _text(row[key]) for key in ("split", "question", "stop")}
    out["example"] = _text(row.get("example", ""))
    out["answers"] = [_text(answer) for answer in row["answers"][:20]]
    out["prompt"] = _text(row["prompt"], PROMPT_CHARS)
    out["reward"] = {_text(name): _number(value) for name, value in row["reward"].items()}
    times = ("wait_s", "run_s")
    out["calls"] = [
        {key: _text(call.get(key, "")) for key in ("name", "arguments", "outcome")} | {key: _number(call.get(key), 3) for key in times}
        for call in row["calls"]
    ]
    n = len(row["tokens"])
    out["counts"] = {letter: row["author"].count(letter) for letter in "MTN"}
    keep = range(n)
    if n > HEAD_TOKENS + TAIL_TOKENS:
        keep = [*range(HEAD_TOKENS), *range(n - TAIL_TOKENS, n)]
        out["cut"] = {"at": HEAD_TOKENS, "count": n - len(keep)}
    out["tokens"] = [_text(row["tokens"][i]) for i in keep]
    for key in ("author", "mask"):
        out[key] = "".join(row[key][i] for i in keep)
    for key in ("logprob", "ratio"):
        out[key] = [_short(row[key][i]) for i in keep]
    advantage = row.get("advantage")  # one number per trajectory, or one per token (GAE)
    if isinstance(advantage, list):
        out["advantage"] = [_short(advantage[i]) for i in keep] if len(advantage) == n else None
    else:
        out["advantage"] = _number(advantage)
    return out


def _short(value: object) -> float | None:
    number = _number(value, 4)
    return number if number is None or number % 1 else int(number)  # "1" instead of "1.0": most ratios of a page are 1


# ------------------------------------------------------------------------------------------------------------- writing


def _csp_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _finite(value: object) -> object:
    """`value` with NaN and infinities as None, which JSON and browsers understand."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _json(value: object) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII: lone surrogates and U+2028 become \\uXXXX


def _embed(value: object) -> str:
    """JSON that cannot end or comment out the script tag it stands in."""
    return _json(value).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# --------------------------------------------------------------------------------------------------------- comparison


def _running_mean(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    width = max(1, round(len(points) / 40))
    return [(x, statistics.fmean(y for _, y in points[max(0, i - width) : i + width + 1])) for i, (x, _) in enumerate(points)]


def _at(points: list[tuple[float, float]], x: float) -> float:
    """Linear interpolation in points sorted by x; x lies within them."""
    i = bisect.bisect_left(points, (x, -math.inf))
    if points[i][0] == x:
        return points[i][1]
    (x0, y0), (x1, y1) = points[i - 1 : i + 1]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _ticks(low: float, high: float, count: int) -> list[float]:
    raw = (high - low) / count
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10, 20) if m * power >= raw)
    return [i * step for i in range(math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6) + 1)]


def curves_svg(arms: dict[str, list[list[tuple[float, float]]]], x_name: str, title: str) -> str:
    """A picture of {label: for every seed its points (x, y), sorted by x}: per label the mean and a band from the lowest to the highest."""
    everything = [point for seeds in arms.values() for points in seeds for point in points]
    x0, x1 = min(x for x, _ in everything), max(x for x, _ in everything)
    y0, y1 = min(y for _, y in everything), max(y for _, y in everything)
    y0, y1 = (0.0, 1.0) if 0 <= y0 and 0.25 < y1 <= 1 else (min(y0, 0.0) if y0 < 0.6 * y1 else y0, y1)
    x1, y1 = (x1 if x1 > x0 else x0 + 1), (y1 if y1 > y0 else y0 + 1)
    width, left, right, top = 720, 56, 704, 40
    bottom = top + 300
    height = bottom + 48 + 20 * len(arms)

    def px(x: float) -> float:
        return round(left + (x - x0) / (x1 - x0) * (right - left), 1)

    def py(y: float) -> float:
        return round(bottom - (y - y0) / (y1 - y0) * (bottom - top), 1)

    out = [f'<text x="{left}" y="24" class="t">{_xml(title)}</text>']
    for y in _ticks(y0, y1, 5):
        out.append(f'<path class="g" d="M{left} {py(y)}H{right}"/><text x="{left - 8}" y="{py(y) + 4}" text-anchor="end">{y:.4g}</text>')
    for x in _ticks(x0, x1, 7):
        out.append(f'<text x="{px(x)}" y="{bottom + 18}" text-anchor="middle">{x:.4g}</text>')
    out.append(f'<text x="{right}" y="{bottom + 36}" text-anchor="end">{x_name}</text>')
    for number, (label, seeds) in enumerate(arms.items()):
        color = f"c{number % 6}"
        low, high = max(points[0][0] for points in seeds), min(points[-1][0] for points in seeds)
        grid = sorted({x for points in seeds for x, _ in points if low <= x <= high})
        columns = [[_at(points, x) for points in seeds] for x in grid]
        if not grid:
            raise UserError(f'The runs of "{label}" have no {x_name} in common, so there is no mean to draw; compare longer runs.')
        if len(seeds) > 1:
            edge = [f"{px(x)} {py(max(ys))}" for x, ys in zip(grid, columns, strict=True)]
            edge += [f"{px(x)} {py(min(ys))}" for x, ys in reversed(list(zip(grid, columns, strict=True)))]
            out.append(f'<path class="b {color}" d="M{"L".join(edge)}Z"/>')
        line = "L".join(f"{px(x)} {py(statistics.fmean(ys))}" for x, ys in zip(grid, columns, strict=True))
        out.append(f'<path class="l {color}" d="M{line}"/>')
        y = bottom + 56 + 20 * number
        seeds_text = f"{len(seeds)} seeds, band: lowest to highest" if len(seeds) > 1 else "1 seed"
        out.append(f'<path class="l {color}" d="M{left} {y - 4}h24"/><text x="{left + 32}" y="{y}">{_xml(label)} ({seeds_text})</text>')
    light = ("#1f66c9", "#b45309", "#17803a", "#7c3fc4", "#b3266e", "#0b7a82")
    dark = ("#6cb0ff", "#f2a65a", "#63c97c", "#c19bff", "#f58abb", "#55c7cf")

    def rules(colors: tuple[str, ...]) -> str:
        return "".join(f".l.c{i}{{stroke:{color}}}.b.c{i}{{fill:{color}}}" for i, color in enumerate(colors))

    style = (
        "rect{fill:#fff}text{font:13px system-ui,sans-serif;fill:#444c56}.t{font-size:15px;font-weight:600;fill:#1b2027}.g{stroke:#d5d9df}"
        f".l{{fill:none;stroke-width:2.5}}.b{{stroke:none;opacity:.2}}{rules(light)}@media(prefers-color-scheme:dark){{"
        f"rect{{fill:#171c23}}text{{fill:#a3adb9}}.t{{fill:#e5e9ee}}.g{{stroke:#343c47}}{rules(dark)}}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">'
        f"<title>{_xml(title)} against {x_name}</title><style>{style}</style>"
        f'<rect width="{width}" height="{height}" rx="6"/>{"".join(out)}</svg>\n'
    )


def _xml(text: str) -> str:
    return html.escape(re.sub(r"[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "�", text))


def _command(arguments: list[str]) -> None:
    if len(arguments) != 1:
        raise UserError("usage: python -m common.report RUN_DIR (it writes RUN_DIR/report.html)")
    print(write_report(arguments[0]))


if __name__ == "__main__":
    main(lambda: _command(sys.argv[1:]))
