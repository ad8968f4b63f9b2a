r"""Equality of maths answers, decided by math-verify's parser in a process of its own that can be killed.

Three layers, from cheap to dear:

    1. equal strings and plain numbers are decided here, without the process;
    2. the other answers of a batch go to the grader process together, each under a limit of CPU time (wall time would make verdicts depend
       on how busy the machine is). A comparison that hits the limit kills the process, counts as unequal and shows in `timeouts`;
    3. a process that dies otherwise is replaced and its pair is tried once more. A pair that brings down a second, fresh process is
       unequal (`crashes`); a process that does not start, or stalls, raises GraderError: a failure of ours must never become a reward.

The comparison reads both sides as structures (lists, tuples, intervals, sets, equations, numbers with units) and compares those. Handed
over undelimited, as in ToRL's `math_verifier.py`, math-verify reads only the leading number of `2\sqrt{3}`; with its own clean-up, it takes
the `t` of `5t` for a unit. So the clean-up is ours, the parser and the comparison of relations and sets are math-verify's, and numbers are
compared exactly (to 40 digits where they are irrational) instead of after rounding to six decimals.

No answer is ever evaluated as Python: only LaTeX's grammar reads it. Source of the task: ToRL §2.3.3, ReTool eq. 2.
"""

import atexit
import contextlib
import functools
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path

from common import UserError

MAX_CHARS = 2_000  # a longer answer is unequal to everything but itself
MEMORY_BYTES = 2 << 30
INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")  # no keys: it reads what a model wrote
START_S = 120.0  # wall time for importing sympy on a busy machine


class GraderError(UserError):
    """The grader process cannot do its work; no verdict was made."""


# --- the last box -----------------------------------------------------------------------------------------------------------------------

_BOX_TOKEN = re.compile(r"\\+boxed\s*\{|\\.|[{}]", re.S)


def last_boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}` that is closed, braces nested to any depth; None without one. Of nested boxes, the outer one.

    Escaped braces (`\{`) do not count. One pass, so a text of thousands of open boxes costs no more than any other."""
    open_braces, last = [], None
    for token in _BOX_TOKEN.finditer(text):
        if token[0] == "}":
            if open_braces and (start := open_braces.pop()) is not None and (last is None or start > last[1] or start < last[0]):
                last = (start, token.start())
        elif token[0][-1] == "{" and (token[0] == "{" or "boxed" in token[0]):
            open_braces.append(token.end() if "boxed" in token[0] else None)
    return None if last is None else text[last[0]:last[1]]


# --- decided without the process --------------------------------------------------------------------------------------------------------

_PLAIN_NUMBER = re.compile(r"[+-]?(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d{0,5})?", re.A)  # longer decimals have a tolerance


def _shortcut(pred: str | None, gold: str) -> bool | None:
    """The verdict where reading is enough, else None."""
    if pred is None:
        return False
    p, g = " ".join(pred.split()), " ".join(gold.split())
    if not p or not g:
        return False
    if p.casefold() == g.casefold():
        return True
    if max(len(p), len(g)) > MAX_CHARS:
        return False
    if _PLAIN_NUMBER.fullmatch(p) and _PLAIN_NUMBER.fullmatch(g):
        return Decimal(p.replace(",", "")) == Decimal(g.replace(",", ""))
    return None


# --- the grader process, seen from here -------------------------------------------------------------------------------------------------

@dataclass
class MathsGrader:
    """One grader process, started when first needed, and what happened to it. May be called from several threads, one at a time goes."""
    deadline_s: float = 5.0  # CPU seconds for one comparison
    stall_s: float = 150.0  # wall seconds for one comparison, after which the machine and not the answer is to blame
    compared: int = 0  # pairs that needed the process
    timeouts: int = 0  # comparisons killed at the deadline, counted as unequal
    crashes: int = 0  # comparisons that brought down two processes, counted as unequal
    errors: int = 0  # comparisons that raised an exception, counted as unequal
    restarts: int = 0  # processes started after the first
    _process: subprocess.Popen | None = field(default=None, repr=False)
    _errors: object = field(default=None, repr=False)
    _pid: int = 0  # of the process that owns the pipes: a fork must not share them
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _verdicts: dict = field(default_factory=dict, repr=False)  # samples of one question repeat each other

    def equal(self, preds: Sequence[str | None], golds: Sequence[str | Iterable[str]]) -> list[bool]:
        """For each prediction: does it equal its gold, or one of its golds? None (no answer) is never equal. GraderError: see there."""
        if len(preds) != len(golds):
            raise ValueError(f"{len(preds)} predictions for {len(golds)} golds: each prediction needs its own")
        rows = [[(pred, one) for one in ([gold] if isinstance(gold, str) else gold)] for pred, gold in zip(preds, golds)]
        if not all(rows):
            raise ValueError("no gold answer to compare with: every example needs at least one")
        with self._lock:
            known = {pair: _shortcut(*pair) for row in rows for pair in row}
            asked = [pair for pair, verdict in known.items() if verdict is None and pair not in self._verdicts]
            if len(self._verdicts) > 100_000:
                self._verdicts.clear()
                asked = [pair for pair, verdict in known.items() if verdict is None]
            self._verdicts.update(self._compare(asked))
            return [any(self._verdicts[pair] if known[pair] is None else known[pair] for pair in row) for row in rows]

    def self_test(self) -> None:
        """Compare known pairs; RuntimeError naming those that differ. UserError if math-verify is missing, GraderError if it cannot run."""
        verdicts = self.equal([pred for pred, _, _ in KNOWN], [gold for _, gold, _ in KNOWN])
        wrong = [f"maths_equal(pred={p!r}, gold={g!r}) gave {got}, expected {want}"
                 for (p, g, want), got in zip(KNOWN, verdicts) if got != want]
        if wrong:
            raise RuntimeError(f"the maths grader fails its self-test in {len(wrong)} of {len(KNOWN)} pairs: " + "; ".join(wrong))

    def close(self) -> None:
        """End the process; the next comparison starts another."""
        process, self._process = self._process, None
        if process is not None and self._pid == os.getpid():
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, self._errors):
                with contextlib.suppress(OSError):  # what a dead process did not read any more
                    pipe.close()

    def _compare(self, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], bool]:
        done: dict[tuple[str, str], bool] = {}
        troubles, at = [], -1  # what went wrong with the pair at index `at`
        while len(done) < len(pairs):
            rest = pairs[len(done):]
            process = self._running()
            outcome = self._ask(process, rest, done)
            if outcome == "done":
                break
            self.close()
            troubles, at = (troubles if at == len(done) else []) + [outcome], len(done)
            if outcome == "deadline":
                self.timeouts += 1
            elif outcome == "died" and len(troubles) > 1:
                self.crashes += 1
            elif outcome == "stalled" and len(troubles) > 1:
                raise GraderError(f"the maths grader was silent for {self.stall_s:g} s, twice, with CPU time left for its "
                                  "comparison: is the machine overloaded or suspended?")
            else:
                continue  # once more, in a fresh process
            done[pairs[len(done)]] = False
        self.compared += len(pairs)
        return done

    def _ask(self, process: subprocess.Popen, pairs: list, done: dict) -> str:
        """Fill `done` with verdicts in order; "done", or why it ended early: "deadline", "died", "stalled"."""
        waiting = list(pairs)
        try:
            process.stdin.write(json.dumps({"deadline_s": self.deadline_s, "pairs": waiting}).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            return "died"
        while waiting:
            verdicts = self._read(process, self.stall_s)
            if verdicts is None:
                return "stalled"
            if not verdicts:
                return "deadline" if process.wait() == -signal.SIGPROF else "died"
            for verdict in verdicts.decode():
                done[tuple(waiting.pop(0))] = verdict == "1"
                self.errors += verdict == "e"
        return "done"

    @staticmethod
    def _read(process: subprocess.Popen, seconds: float) -> bytes | None:
        """What the process wrote, b"" at its end, None if nothing came in time."""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            return os.read(process.stdout.fileno(), 65536) if selector.select(seconds) else None

    def _running(self) -> subprocess.Popen:
        if self._process is not None and self._pid == os.getpid() and self._process.poll() is None:
            return self._process
        self.restarts += self._pid == os.getpid()
        self.close()
        if self._pid != os.getpid():
            atexit.register(self.close)
        self._errors, self._pid = tempfile.TemporaryFile(), os.getpid()
        # its own session: a Ctrl-C is ours to handle. A fixed hash seed: sympy's order of terms, and so its verdicts, repeat.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "common.maths"], cwd=Path(__file__).parents[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._errors, start_new_session=True,
            env={k: os.environ[k] for k in INHERITED if k in os.environ} | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"})
        greeting = self._read(self._process, START_S)
        if greeting != b"ready\n":
            process = self._process
            if greeting is not None:
                process.wait()
            self._errors.seek(0)
            said = (self._errors.read().decode(errors="replace").strip().splitlines() or ["nothing"])[-1]
            self.close()
            if "No module named" in said:
                raise UserError(f"maths answers need math-verify, which is not installed here ({said}): pip install -r requirements.txt")
            why = f"did not start within {START_S:.0f} s" if greeting is None else f"ended at its start with code {process.returncode}"
            raise GraderError(f"the maths grader {why}; its last words: {said}")
        return self._process


_GRADER = MathsGrader()


def maths_grader() -> MathsGrader:
    """The grader behind `maths_equal`, for its counters and its deadline."""
    return _GRADER


def maths_equal(*, pred: str | None, gold: str | Iterable[str]) -> bool:
    """Is `pred` the same answer as `gold` (one or several)? None, no answer, is never equal.

    Units, a percent sign, degrees and `x =` may be left out on one side but must agree where both sides have them. Decimals are exact up to
    five places; from six on, 1e-6 and a relative 1e-5 are forgiven. ValueError without a gold; GraderError when the grader cannot run."""
    return maths_equal_all(preds=[pred], golds=[gold])[0]


def maths_equal_all(*, preds: Sequence[str | None], golds: Sequence[str | Iterable[str]]) -> list[bool]:
    """`maths_equal` of many pairs in one trip to the grader process: score a whole rollout with one call."""
    return _GRADER.equal(preds, golds)


def maths_self_test() -> None:
    """Start the grader and compare known pairs; RuntimeError, UserError or GraderError if it does not work. Takes about two seconds."""
    _GRADER.self_test()


KNOWN = [  # (pred, gold, equal?)
    ("42", "42", True), ("41", "42", False), ("12,345", "12345", True), ("041", "41", True), ("42.0", "42", True),
    (r"\frac{1}{2}", "0.5", True), ("0.333333", r"\frac13", True), ("0.33", r"\frac13", False), (r"2\sqrt{3}", r"2\sqrt{5}", False),
    (r"2\sqrt{3}", r"\sqrt{12}", True), (r"3\pi", "3", False), ("5x", "5y", False), ("5t", "5", False), ("(x+1)^2", "x^2+2x+1", True),
    ("(1,2)", "(1, 2)", True), ("(2,1)", "(1,2)", False), ("[1,2]", "(1,2)", False), ("2, 1", r"\{1,2\}", True), (r"\pm 2", "2,-2", True),
    (r"2^{10}", "1024", True), ("2**10", "1024", True), ("x=8", "8", True), ("x=8", "y=8", False), (r"5\text{ cm}", "5", True),
    (r"5\text{ cm}", r"5\text{ m}", False), (r"50\%", "0.5", True), (r"1\frac{1}{2}", "3/2", True), (r"\text{Monday}", "monday", True),
    ("seat", "east", False), ("x>2", "2<x", True), (r"x\ge 2", "x>2", False), (r"3\times10^{-8}", r"2\times10^{-8}", False),
]


# --- notation: one dialect of LaTeX out of many spellings ---------------------------------------------------------------------------------

_MARKS = {"−": "-", "–": "-", "×": r"\times ", "⋅": r"\cdot ", "·": r"\cdot ", "∗": "*", "÷": r"\div ", "π": r"\pi ", "∞": r"\infty ",
          "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "≈": r"\approx ", "°": r"^{\circ}", "º": r"^{\circ}", "∪": r"\cup ",
          "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda ",
          "φ": r"\phi ", "∠": r"\angle ", "⟨": r"\langle ", "⟩": r"\rangle ", "€": r"\text{euro}", "£": r"\text{gbp}"}
_SYNONYMS = {r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac", r"\varnothing": r"\emptyset", r"\lvert": "|", r"\rvert": "|",
             r"\lbrace": r"\{", r"\rbrace": r"\}", r"\geq": r"\ge", r"\leq": r"\le", r"\geqslant": r"\ge", r"\leqslant": r"\le",
             r"\neq": r"\ne", "<=": r"\le ", ">=": r"\ge ", "!=": r"\ne ", "==": "=", r"\degree": r"^{\circ}", r"\textdegree": r"^{\circ}"}
_SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_FONT = r"\\(?:text|textbf|textit|textrm|textnormal|textsf|texttt|mathrm|mathbf|mathit|mathsf|mathtt|mbox|hbox|operatorname|emph|rm)\s*\{"
_SPACE = re.compile(r"(?<!\\)\\(?:[,;:! ]|(?:quad|qquad|thinspace|displaystyle|textstyle|limits)(?![a-zA-Z]))|~")
_SIZE = re.compile(r"\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])\.?")
_FUNCTIONS = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp sqrt".split()
_CALLS = "min max gcd lcm det floor ceil".split()  # functions where a bracket follows


def _group_end(text: str, start: int, opening: str = "{", closing: str = "}") -> int:
    """Index of the mark that closes the one at `start`, or -1."""
    depth = 0
    for i in range(start, len(text)):
        if text[i] in (opening, closing) and (i == 0 or text[i - 1] != "\\"):
            depth += 1 if text[i] == opening else -1
            if depth == 0:
                return i
    return -1


def _rewrite(text: str, pattern: str, replace, opening: str = "{", closing: str = "}") -> str:
    """Each match of `pattern`, which ends at an opening mark, becomes replace(match, what stands between the marks)."""
    out, at = "", 0
    while match := re.compile(pattern).search(text, at):
        end = _group_end(text, match.end() - 1, opening, closing)
        if end < 0:
            out, at = out + text[at:match.end()], match.end()
            continue
        inner = _rewrite(text[match.end():end], pattern, replace, opening, closing)
        out, at = out + text[at:match.start()] + replace(match, inner), end + 1
    return out + text[at:]


def _upright(match: re.Match, inner: str) -> str:
    if re.fullmatch(r"\s*[a-zA-Z]\s*", inner) and "text" not in match[0] and "box" not in match[0] and inner.strip() not in _LETTER_UNITS:
        return inner  # \mathrm{e}, \mathbf{v}: a symbol
    if re.search(r"\d", inner) or inner.strip() in _FUNCTIONS or re.fullmatch(r"\s*\([A-Za-z]\)\s*", inner):
        return inner  # \text{5 cm}, \operatorname{lcm}, \textbf{(C)}
    return r"\text{" + inner + "}"


def _repeating(match: re.Match) -> str:
    whole, fixed, period = match[1] or "0", match[2], match[3]
    return rf"\frac{{{int(whole + fixed + period) - int(whole + fixed)}}}{{{10 ** len(fixed) * (10 ** len(period) - 1)}}}"


@functools.lru_cache(4096)
def _clean(text: str) -> str:
    """The text in plain LaTeX: without delimiters, sizes and spacing, Unicode marks and Python's operators spelled as commands."""
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda m: "^{" + m[0].translate(_SUPERSCRIPT) + "}", text)
    text = re.sub(r"√\s*(\d+|[a-zA-Z])", r"\\sqrt{\1}", text).replace("√(", "sqrt(").replace("√", r"\sqrt")
    halves = lambda m: r"\frac{%s}{%s}" % tuple(unicodedata.normalize("NFKC", m[0]).split("\u2044"))
    text = re.sub("[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]", halves, text)
    text = "".join(_MARKS.get(c, c) for c in text)
    text = unicodedata.normalize("NFKC", text).strip()
    text = re.sub(r"\\\\(?=[a-zA-Z])", r"\\", text) if r"\begin" not in text else text  # \\frac: backslashes escaped twice
    text = re.sub(r"(?<=\d)(?:\{,\}|,?\\[,!;: ]|,\s?\\!)(?=\d{3}(?!\d))", "", text)  # 12{,}345, 12\,345
    text = re.sub(r"\\\(|\\\)|\\\[|\\\]|(?<!\\)\$|\*\*(?=[A-Za-z ]*$)|^\*\*|`", "", text)
    text = _SPACE.sub(" ", _SIZE.sub("", text))
    text = re.sub(r"""^(['"])(.*)\1$""", r"\2", text.strip())  # quoted, as Python prints a string and a prompt may show it
    text = re.sub(r"\\[a-zA-Z]+|[<>!=]=", lambda m: _SYNONYMS.get(m[0], m[0]), text)
    text = _rewrite(text, r"\\+f?boxed\s*\{", lambda m, inner: inner)
    text = _rewrite(text, _FONT, _upright)
    text = re.sub(r"\{([^{}]*)\\choose\s*([^{}]*)\}", r"\\binom{\1}{\2}", text)
    text = re.sub(r"\\frac\s*(\d)\s*([\da-zA-Z])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*(\d|[a-zA-Z])\s*\{", r"\\frac{\1}{", text)
    text = re.sub(r"\\frac\s*\{", r"\\frac{", text)
    text = re.sub(r"(\\frac\{[^{}]*\})\s*([\da-zA-Z])", r"\1{\2}", text)
    text = re.sub(r"\\sqrt\s*(\d|[a-zA-Z])", r"\\sqrt{\1}", text)
    text = re.sub(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{(\d+)\}", _repeating, text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", r"^{\\circ}", text)
    text = re.sub(r"(?<=\d)\s*(?:\bpercent\b|\\text\{\s*percent\s*\})", r"\\%", text)
    text = re.sub(r"(?<!\\)%", r"\\%", text)
    # Python's and sympy's notation
    text = text.replace("**", "^")
    text = re.sub(r"(?<![\w.])(\d+\.?\d*)[eE]([+-]?\d+)(?!\w)", r"(\1 \\cdot 10^{\2})", text)
    for name, latex in (("sqrt", r"\sqrt{%s}"), ("exp", r"e^{%s}"), ("abs|Abs", "|%s|"), ("Rational|Fraction", r"\frac{%s}")):
        text = _rewrite(text, rf"(?<![\\a-zA-Z])(?:{name})\s*\(", lambda m, inner: latex % (
            "}{".join(inner.split(",")) if "frac" in latex else inner), "(", ")")
    text = _rewrite(text, r"\^\s*\(", lambda m, inner: "^{" + inner + "}", "(", ")")
    text = re.sub(r"(?<![\\a-zA-Z])log(?=\s*\()", r"\\ln", text)
    text = re.sub(r"(?<![\\a-zA-Z])a(sin|cos|tan)(?=\s*\()", r"\\arc\1", text)
    text = re.sub(rf"(?<![\\a-zA-Z])(?:({'|'.join(_FUNCTIONS)})(?![a-zA-Z])|({'|'.join(_CALLS)})(?=\s*\())", r"\\\1\2", text)
    text = re.sub(r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi ", text)
    text = re.sub(r"(?<![\\a-zA-Z])(?:oo|infinity|inf)(?![a-zA-Z])", r"\\infty ", text).replace("*", r" \cdot ")
    text = re.sub(r"(?:[\s.,;:]|\\\\)+$", "", " ".join(text.split()))
    text = re.sub(r"^(?:=|\\approx|(?:about|approximately|USD|Rs)\b(?=.*\d))[\s.]*", "", text)
    return r"\emptyset" if re.fullmatch(r"\\\{\s*\\\}", text) else text


# --- structure: lists, brackets, names, units ---------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Answer:
    """What one side says."""
    text: str  # the whole, cleaned
    kind: str = "atom"  # atom, list (bare), {} (set), or a pair of brackets such as [)
    items: tuple["Answer", ...] = ()
    name: str = ""  # the x of "x = 8"
    body: str = ""  # of an atom: without name and unit
    units: frozenset[str] = frozenset()
    mark: str = ""  # percent or degree
    scale: int = 1  # of "5 million"


_OPEN = {"(": "(", "[": "[", r"\{": "{", r"\langle": "(", r"\lbrack": "["}
_CLOSE = {")": ")", "]": "]", r"\}": "}", r"\rangle": ")", r"\rbrack": "]"}
_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|.", re.S)
_NAME = re.compile(  # what may stand before "=": x, x_1, f(x), Area, \angle ABC, |AB|, (x, y), m + n, m/n
    r"\\?[a-zA-Z]+(?:_\{?\w+\}?)?'*(?:\([^()]*\))?|\\text\{[^{}]*\}|\|?(?:\\(?:angle|overline|vec|hat|triangle)\s*)?\{?[A-Za-z]+\}?\|?"
    r"|\(\s*[a-zA-Z](?:\s*,\s*[a-zA-Z])*\s*\)|[a-zA-Z](?:\s*[,+]\s*[a-zA-Z])+|\\frac\{[a-zA-Z]\}\{[a-zA-Z]\}|[a-zA-Z]/[a-zA-Z]")
_LETTER_UNITS = frozenset("m g s h L l N J W V A K C F".split())  # upright, or after a number and a space
_UNITS = frozenset("cm mm km kg mg ml mL ft in mi yd lb lbs oz hr hrs min mins sec secs mph kph rpm pm am day men gal sq cu deg rad USD "
                   "usd Hz kHz nm Pa mol kW per of the cup cc gbp units".split())
_NEEDS_SPACE = frozenset("in mi am pm per of the day men min cup deg rad mol sec gal".split())  # 5in could be 5 * i * n
_NOT_UNITS = set(_FUNCTIONS) | set("alpha beta gamma delta theta lambda sigma omega infty sqrt frac".split())
_ALIASES = dict(pair.split(":") for pair in (
    "centimeter:cm centimetre:cm millimeter:mm kilometer:km kilometre:km meter:m metre:m inche:in inch:in foot:ft feet:ft yard:yd mile:mi "
    "gram:g kilogram:kg pound:lb lbs:lb ounce:oz hour:h hr:h hrs:h minute:min mins:min second:s sec:s secs:s liter:l litre:l usd:dollar "
    "degree:deg euros:euro km/h:kph units:unit sq:square").split())
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_MEASURES = frozenset("cm mm km m in ft yd mi g kg mg lb oz h min s l ml day week month year dollar cent euro gbp am pm mph kph square "
                      "cubic".split())
_PREFACE = re.compile(r"(?:\\text\{)?\s*(?:[A-Za-z ]*\b(?:is|are|equals?|answer)\b|[A-Za-z][A-Za-z ]+:)\s*:?\}?\s*(?=.)", re.I)


def _tokens(text: str) -> list[tuple[str, int, int]]:
    """(token, its place, depth in brackets, braces and environments before it)."""
    depth, found = 0, []
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token in _CLOSE or token in ("}", r"\end"):
            depth -= 1
        found.append((token, match.start(), depth))
        if token in _OPEN or token in ("{", r"\begin"):
            depth += 1
    return found


def _split(text: str, separators: tuple[str, ...]) -> list[str]:
    """The parts between separators that stand outside all brackets."""
    parts, start = [], 0
    for token, place, depth in _tokens(text):
        if depth == 0 and token in separators:
            parts.append(text[start:place])
            start = place + len(token)
    return [part.strip() for part in parts + [text[start:]]]


def _brackets(text: str) -> tuple[str, str] | None:
    """(kind, inside) where one pair of brackets encloses the whole text."""
    tokens = [t for t in _tokens(text) if not t[0].isspace()]
    if len(tokens) < 3:
        return None
    first, last = tokens[0][0], tokens[-1][0]
    python_set = (first, last) == ("{", "}")
    if not python_set and (first not in _OPEN or last not in _CLOSE):
        return None
    if tokens[-1][2] != 0 or any(depth < 1 for _, _, depth in tokens[1:-1]):
        return None
    kind = "{}" if python_set else _OPEN[first] + _CLOSE[last]
    return (kind, text[len(first):tokens[-1][1]].strip()) if kind in ("{}", "()", "[]", "(]", "[)") else None


def _canonical(text: str) -> str:
    """For comparing as strings: no case, no upright marks, no spaces but between two digits."""
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)
    return re.sub(r"([_^])\{(\w)\}", r"\1\2", text).casefold()


@functools.lru_cache(4096)
def _read(text: str) -> Answer:
    """Structure of a cleaned text."""
    text = text.strip()
    if (preface := _PREFACE.match(text)) and re.search(r"\d", text[preface.end():]):
        text = text[preface.end():].strip()
    if enclosed := _brackets(text):
        kind, inside = enclosed
        parts = [part for part in _split(inside, (",", ";")) if part]
        if len(parts) > 1:
            return Answer(text, kind, _items(parts, flat=kind == "{}"))
        if parts and not (kind == "{}" and re.search(r":|\\mid|\|", inside)):
            return _read(parts[0])
    joined = re.sub(r"(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|\\text\{\s*,?\s*(?:and|or)\s*\}", ",", text)
    joined = _join_thousands(re.sub(r"[,;]\s*,", ",", joined))
    parts = [part for part in _split(joined, (",", ";")) if part]
    if len(parts) > 1:
        if len(names := _split(parts[0], ("=",))) == 2 and _NAME.fullmatch(names[0]) and all("=" not in p for p in parts[1:]):
            parts[0] = names[1]  # x = 1, 2
        return Answer(text, "list", _items(parts, flat=True))
    text = parts[0] if parts else ""
    if re.search(r"\\(?:pm|mp)(?![a-z])", text):
        signs = [re.sub(r"\\pm(?![a-z])", a, re.sub(r"\\mp(?![a-z])", b, text)) for a, b in ("+-", "-+")]
        return Answer(text, "list", _items(signs, flat=True))
    sides = _split(text, ("=", r"\in", r"\approx", ":="))
    if len(sides) > 1 and all(sides):
        if _NAME.fullmatch(sides[0]):
            value = _read(sides[-1] if r"\approx" not in text else sides[1])
            return Answer(text, value.kind, value.items, sides[0], value.body, value.units, value.mark, value.scale)
        if _NAME.fullmatch(sides[-1]):
            value = _read(sides[0])
            return Answer(text, value.kind, value.items, sides[-1], value.body, value.units, value.mark, value.scale)
        if not re.search(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", text)):  # 2 + 3 = 5; an exact value before its approximation
            return _read(sides[-1] if r"\approx" not in text else sides[0])
        return Answer(text, body=text)
    return _atom(text)


def _join_thousands(text: str) -> str:
    """1,234 is a number where no bracket makes it a pair."""
    depth, shielded = 0, set()  # places in round, square and set brackets; LaTeX's own braces shield nothing
    for match in _TOKEN.finditer(text):
        depth += (match[0] in _OPEN) - (match[0] in _CLOSE)
        if depth > 0:
            shielded.add(match.start())
    text = re.sub(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])", lambda m: m[0] if m.start() in shielded else m[0].replace(",", ""), text)
    return re.sub(r"^([+-]?\d{1,3})((?: \d{3})+)$", lambda m: m[1] + m[2].replace(" ", ""), text)


def _items(parts: list[str], flat: bool) -> tuple[Answer, ...]:
    read = [_read(part) for part in parts]
    return tuple(one for item in read for one in (item.items if flat and item.kind == "list" else [item]))


def _atom(text: str) -> Answer:
    """One value: what is measured, the units behind it, a percent or degree sign."""
    body, units, mark, scale = text, [], "", 1
    if r"\$" in body:
        body, units = body.replace(r"\$", "").strip(), ["dollar"]
    while True:
        body = body.strip()
        if match := re.search(r"\^\{\\circ\}$|\\%$", body):
            if re.search(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)", body):
                break  # the degrees of an angle, not of the answer
            mark = mark or ("percent" if "%" in match[0] else "degree")
            words = []
        elif match := re.search(r"\\text\{([^{}]*)\}(?:\^\{?(\d)\}?)?$", body):
            words = re.findall(r"[A-Za-z/]+", match[1])
        elif match := re.search(r"(?<![\\A-Za-z/])([A-Za-z]+(?:/[A-Za-z]+)?)(?:\^\{?(\d)\}?)?$", body):
            word, spaced = match[1], match.start() > 0 and body[match.start() - 1] == " "
            halves = word.split("/")
            known = all(half in _UNITS or half in _LETTER_UNITS for half in halves) if len(halves) == 2 else word in _UNITS
            after_number = re.fullmatch(r"[+-]?[\d,]*\.?\d+ ", body[:match.start()]) is not None  # "5 m", but not "2 x m"
            if not (known and (spaced or word not in _NEEDS_SPACE and len(halves) == 1) or word in _LETTER_UNITS and after_number
                    or len(word) >= 4 and "/" not in word and word not in _NOT_UNITS):
                break
            words = [word]
        else:
            break
        rest = body[:match.start()].strip()
        if not re.search(r"\d|\\(?:pi|sqrt|frac)|^[+-]?[a-zA-Z]$", rest):  # only words: an answer in itself
            break
        body = rest
        power = match[2] if match.re.groups > 1 and match[2] else ""
        for i, word in enumerate(words):
            if word.lower() in _SCALES:
                scale *= _SCALES[word.lower()]
            elif word.lower() not in ("of", "the", "a"):
                units.append(_unit(word) + ("^" + power if power and i == len(words) - 1 else ""))
    body = re.sub(r"(?<![\d.])(\d+)\s+(\d+)\s*/\s*(\d+)$", r"\1\\frac{\2}{\3}", _join_thousands(body))  # 1 1/2
    if mark and "deg" in units:
        units.remove("deg")
    if units == ["deg"]:
        units, mark = [], "degree"
    return Answer(text, body=body, units=frozenset(units), mark=mark, scale=scale)


def _unit(word: str) -> str:
    word = word.lower() if len(word) > 1 else word
    if word in _ALIASES:
        return _ALIASES[word]
    single = word[:-1] if len(word) > 3 and word.endswith("s") else word
    return _ALIASES.get(single, single)


def _is_words(body: str) -> bool:
    """An answer in words: its letters are no product of symbols."""
    plain = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", body)
    if not re.fullmatch(r"[A-Za-zÀ-ÿ' .\-,]+", plain):
        return False
    return body.startswith(r"\text") or any(word.lower() not in _NOT_UNITS for word in re.findall(r"[A-Za-zÀ-ÿ]{4,}", plain))


# --- comparison, in the grader process ----------------------------------------------------------------------------------------------------

_LABELLED = re.compile(r"\(([A-E])\)\s+([\w\\(\-].*)")  # (B) 12: a choice and what it says


def equal_here(pred: str, gold: str) -> bool:
    """The rule itself, without limits on time or memory. For the grader process and for tests."""
    p, g = _clean(pred), _clean(gold)
    if not p or not g:
        return False
    if _canonical(p) == _canonical(g):
        return True
    if _equal(_read(p), _read(g)):
        return True
    if any(labels := [_LABELLED.fullmatch(text) for text in (p, g)]):
        if all(labels):
            return labels[0][1] == labels[1][1]
        label, other = (labels[0], g) if labels[0] else (labels[1], p)
        return _canonical(other).strip("()") == label[1].casefold() or equal_here(label[2], other)
    pairs = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+")  # 1,234 can also be the list of 1 and 234
    as_list = lambda text: Answer(text, "list", tuple(_atom(part) for part in text.split(",")))
    return any(pairs.fullmatch(a) and _read(b).kind == "list" and _equal(as_list(a), _read(b)) for a, b in ((p, g), (g, p)))


def _equal(p: Answer, g: Answer) -> bool:
    if p.kind == g.kind == "atom":
        return _atoms_equal(p, g)
    if p.items and g.items:
        if len(p.items) != len(g.items) or (p.name and g.name and _canonical(p.name) != _canonical(g.name)):
            return False
        interval = any(r"\in" in side.text for side in (p, g))
        if {p.kind, g.kind} <= {"list", "{}"} or (p.kind, g.kind) == ("[]", "list") and not interval:  # Python prints solutions as a list
            left = list(g.items)
            for item in p.items:  # in any order, each used once
                at = next((i for i, other in enumerate(left) if _equal(item, other)), None)
                if at is None:
                    return False
                del left[at]
            return True
        kinds = {p.kind, g.kind}  # one side may leave out the brackets, where they cannot be an interval's
        left_out = not interval and (kinds == {"list", "()"} or kinds == {"list", "[]"} and len(g.items) > 2)
        return (p.kind == g.kind or left_out) and all(map(_equal, p.items, g.items))
    return _verified(_as_object(p), _as_object(g))  # an interval and an inequality, a union and a list, ...


def _atoms_equal(p: Answer, g: Answer) -> bool:
    if p.name and g.name and _canonical(p.name) != _canonical(g.name):
        return _same_equation(p.text, g.text)
    if bool(p.name) != bool(g.name) and "=" in (p.body if g.name else g.body):
        return _same_equation(p.text, g.text)
    if not _units_agree(p.units, g.units) or (p.mark and g.units) or (g.mark and p.units):
        return False
    if _canonical(p.body) == _canonical(g.body) and (p.mark == g.mark or not (p.mark and g.mark)) and p.scale == g.scale and g.body:
        return True
    if _is_words(p.body) or _is_words(g.body):
        letters = lambda a: "".join(c for c in _canonical(a.text) if c.isalnum())
        return letters(p) == letters(g) != ""
    bases = [re.fullmatch(r"([0-9A-Za-z]+)_\{?(\d+)\}?", a.body) for a in (p, g)]
    if any(b and b[1][0].isdigit() for b in bases):
        return _numerals_equal(p, g, bases)
    if p.mark and g.mark and p.mark != g.mark:
        return False
    import sympy
    ours, theirs = _parse(p.body), _parse(g.body)
    if ours is None or theirs is None:
        return False
    if not (isinstance(ours, sympy.Expr) and isinstance(theirs, sympy.Expr)) and (p.scale, p.mark) != (g.scale, g.mark):
        return False
    if p.scale != g.scale:
        ours, theirs = ours * p.scale, theirs * g.scale
    lenient = any(re.search(r"\.\d{6,}", a.body) for a in (p, g))
    if p.mark == g.mark:
        return _expressions_equal(ours, theirs, lenient, p.body, g.body)
    factor = sympy.Rational(1, 100) if "percent" in (p.mark, g.mark) else sympy.pi / 180
    marked, other = (ours, theirs) if p.mark else (theirs, ours)
    return any(_expressions_equal(marked * f, other, lenient, p.body, g.body) for f in (1, factor))


def _units_agree(p: frozenset, g: frozenset) -> bool:
    """One side may leave its unit out; "calendar days" are days, but a cm is no m and no cm^2."""
    differ = p ^ g
    return not (p and g and differ) or bool(p & g) and not any(unit in _MEASURES or "^" in unit for unit in differ)


def _numerals_equal(p: Answer, g: Answer, bases) -> bool:
    r"""101_2: the same numeral, the base left out, or the same value."""
    if all(bases) and bases[0][2] == bases[1][2]:
        return bases[0][1].lower().lstrip("0") == bases[1][1].lower().lstrip("0")
    def value(answer, base):
        try:
            return int(base[1], int(base[2])) if base else int(answer.body)
        except ValueError:
            return None
    if value(p, bases[0]) is not None and value(p, bases[0]) == value(g, bases[1]):
        return True
    return not all(bases) and (bases[0] or [p.body] * 2)[1] == (bases[1] or [g.body] * 2)[1]


@functools.lru_cache(4096)
def _parse(latex: str):
    """A sympy object with exact numbers, or None where the grammar does not fit."""
    import sympy
    from latex2sympy2_extended import latex2sympy  # math-verify's parser
    latex = re.sub(r"(\d+(?:\.\d+)?)\^\{\\circ\}", r"{(\1 \\cdot \\frac{\\pi}{180})}", latex.strip().lstrip("+"))
    try:
        parsed = latex2sympy(latex, normalization_config=None)
        if isinstance(parsed, (sympy.Basic, sympy.MatrixBase)):
            parsed = parsed.xreplace({f: sympy.Rational(str(f)) for f in parsed.atoms(sympy.Float)} | {sympy.Symbol("i"): sympy.I})
        return parsed
    except Exception:  # the grammar's errors are bare exceptions, and sympy raises of every kind
        return None


def _expressions_equal(p, g, lenient: bool, p_text: str, g_text: str) -> bool:
    import sympy
    if isinstance(p, sympy.MatrixBase) and isinstance(g, sympy.MatrixBase):
        return p.shape == g.shape and all(_expressions_equal(a, b, lenient, "", "") for a, b in zip(p, g))
    if isinstance(p, sympy.logic.boolalg.Boolean) or isinstance(g, sympy.logic.boolalg.Boolean):
        if isinstance(p, sympy.Eq) and isinstance(g, sympy.Eq) and _same_equation(p_text, g_text):
            return True
        return _verified(p, g)
    if not (isinstance(p, sympy.Expr) and isinstance(g, sympy.Expr)):
        return _verified(p, g)
    try:
        p, g = p.doit(), g.doit()
    except Exception:  # no value, such as an integral sympy cannot do: equal to nothing
        return False
    if p == g:
        return True
    if p.is_Rational and g.is_Rational:
        return lenient and _close(p, g)
    if p.is_infinite or g.is_infinite:
        return False  # equal ones were met above
    symbols = sorted(p.free_symbols | g.free_symbols, key=str)
    pairs = _values([p, g], symbols)
    if pairs:
        return all(_same_number(a, b) or (lenient and _close(a, b)) for a, b in pairs)
    return p.free_symbols == g.free_symbols and sympy.simplify(p - g) == 0


def _values(expressions: list, symbols: list) -> list[list]:
    """The expressions' values (to 50 digits) at a few points of both signs; [] where they have none."""
    import sympy
    points = [(7, 3), (-11, 5), (13, -17), (-19, -23)] if symbols else [(0, 0)]
    rows = []
    for a, b in points:
        at = {s: sympy.Rational(a + b * k * (-1) ** k, 29 + 2 * k) for k, s in enumerate(symbols)}
        try:
            row = [sympy.N(e.xreplace(at), 50) for e in expressions]
        except Exception:  # no value at this point; too few points mean none at all, below
            continue
        if all(v.is_number and v.is_finite and not v.has(sympy.nan, sympy.zoo) for v in row):
            rows.append(row)
    return rows if len(rows) >= min(2, len(points)) else []


def _size(value):
    import sympy
    return sympy.Abs(sympy.N(value, 50))


def _same_number(a, b) -> bool:
    larger = max(_size(a), _size(b))
    return bool(larger < 1e-100 or _size(a - b) <= larger * 10.0**-40)


def _close(a, b) -> bool:
    """For decimals of six places and more: as far as their digits can tell, and free of what floating point left behind."""
    gap, larger = _size(a - b), max(_size(a), _size(b))
    return bool(gap <= 1e-6 and gap <= larger * 1e-5 or 1e-20 < gap < 1e-12 and min(_size(a), _size(b)) == 0)


def _same_equation(p_text: str, g_text: str) -> bool:
    """left - right of one is a constant multiple of left - right of the other."""
    import sympy
    sides = []
    for text in (p_text, g_text):
        parts = _split(text, ("=",))
        left, right = (_parse(parts[0]), _parse(parts[1])) if len(parts) == 2 else (None, None)
        if not (isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr)):
            return False
        sides.append(left - right)
    symbols = sorted(sides[0].free_symbols | sides[1].free_symbols, key=str)
    ratios = [a / b for a, b in _values(sides, symbols) if _size(b) > 0 and _size(a) > 0] if symbols else []
    return len(ratios) >= 2 and all(_same_number(ratio, ratios[0]) for ratio in ratios)


def _as_object(answer: Answer):
    """The whole answer parsed; "x < 3 or x > 5" as the union it means."""
    import sympy
    parts = [_parse(item.text) for item in answer.items] if answer.kind == "list" else []
    if parts and all(isinstance(part, sympy.logic.boolalg.Boolean) for part in parts):
        return _as_set(sympy.Or(*(sympy.And(*part.args) if part.func.__name__ == "And" else part for part in parts)))
    return _parse(answer.text)


def _as_set(relation):
    """The numbers that fulfil a relation of one unknown; the relation itself where sympy cannot tell."""
    import sympy
    try:
        return (sympy.And(*relation.args) if relation.func.__name__ == "And" else relation).as_set()  # the parser has an And of its own
    except Exception:  # several unknowns, or a relation sympy cannot solve
        return relation


def _verified(p, g) -> bool:
    """math-verify's own comparison, for relations, intervals, unions and other sets; never for two plain expressions."""
    import sympy
    from math_verify import verify
    if p is None or g is None or isinstance(p, sympy.Expr) or isinstance(g, sympy.Expr):
        return False
    if isinstance(p, sympy.Set) != isinstance(g, sympy.Set):
        p, g = (_as_set(side) if isinstance(side, sympy.logic.boolalg.Boolean) else side for side in (p, g))
    if isinstance(p, sympy.Set) and isinstance(g, sympy.Set) and (
            isinstance(p, sympy.FiniteSet) != isinstance(g, sympy.FiniteSet) or sympy.S.EmptySet in (p, g)):
        return bool(p == g)  # math-verify would take the ends of an open interval for a pair
    return bool(verify(g, p, allow_set_relation_comp=True, timeout_seconds=None))


def _serve() -> None:
    """The grader process: a line of JSON with pairs in, one character for each pair out, in order: 1, 0, or e for an exception."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # it may have been inherited as ignored
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # a library that prints must not speak among the verdicts
    if sys.platform == "linux":  # elsewhere the kernel does not know this limit
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    import logging
    import sympy
    import math_verify  # noqa: F401  here, so that its absence shows at the start
    logging.disable(logging.WARNING)
    if not equal_here(r"2^{10}", "1024") or equal_here(r"2\sqrt{3}", r"2\sqrt{5}"):
        raise SystemExit("the maths grader does not know 2^{10} = 1024")
    out.write(b"ready\n")
    for line in sys.stdin.buffer:
        order = json.loads(line)
        for pred, gold in order["pairs"]:
            sympy.core.random.seed(0)  # sympy tries random points: the same ones each time
            signal.setitimer(signal.ITIMER_PROF, order["deadline_s"])  # at the end SIGPROF ends the process, wherever it is
            try:
                verdict = b"1" if equal_here(pred, gold) else b"0"
            except Exception:  # sympy raises of every kind, and too much nesting or memory ends here too
                verdict = b"e"
            signal.setitimer(signal.ITIMER_PROF, 0)
            out.write(verdict)


if __name__ == "__main__":
    _serve()
