"""Maths answers: the last box, what is equal and what only looks so, and the grader process when it is killed, dies or hangs."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common import UserError, maths
from common.maths import GraderError, MathsGrader, equal_here, last_boxed, maths_equal, maths_equal_all, maths_self_test

MANY = settings(max_examples=150, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])


# --- the last box ---

@pytest.mark.parametrize("text, expected", [
    (r"so \boxed{42}.", "42"),
    (r"first \boxed{7}, then \boxed{9}", "9"),
    (r"\boxed{\frac{\sqrt{\frac{a}{\sqrt{b}}}}{2^{{3}}}}", r"\frac{\sqrt{\frac{a}{\sqrt{b}}}}{2^{{3}}}"),
    (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    (r"\boxed {3}", "3"),
    (r"\\boxed{4}", "4"),  # escaped twice, as in a Python string
    (r"\boxed{x=\boxed{5}}", r"x=\boxed{5}"),
    (r"\boxed{1 \\ {2}}", r"1 \\ {2}"),
    (r"}} \boxed{6} {", "6"),
    (r"{ \boxed{8}", "8"),
    (r"\boxed{9} and \boxed{42", "9"),  # the last one that is closed
    (r"\boxed{42 then \boxed{7}", "7"),
    (r"\boxed{}", ""),
    (r"The value is \boxed{42", None),
    ("The total is 42.", None),
    (r"\boxed 5", None),
    ("", None),
])
def test_last_boxed(text, expected):
    assert last_boxed(text) == expected


@MANY
@given(st.recursive(st.text("ab12\\,^_ ", max_size=4).filter(lambda t: not t.endswith("\\") and "\\\\" not in t),
                    lambda inner: st.lists(inner, max_size=3).map(lambda parts: "".join("{" + p + "}" for p in parts))),
       st.text("abc $\\}", max_size=20))
def test_last_boxed_takes_any_nesting(content, before):
    if content.startswith("boxed") or "\\{" in content or "\\}" in content:
        return
    assert last_boxed(before.rstrip("\\") + r"\boxed{" + content + "} end") == content


def test_last_boxed_of_a_hostile_text_is_quick():
    started = time.perf_counter()
    assert last_boxed("\\boxed{" * 100_000) is None
    assert last_boxed("\\boxed{" * 100_000 + "1" + "}" * 100_000)[:7] == "\\boxed{"
    assert time.perf_counter() - started < 20


# --- equality: the rule itself, in this process ---

EQUAL = r"""
\frac{1}{2} = 0.5 ; 12,345 = 12345 ; 12{,}345 = 12345 ; 12\,345 = 12345 ; 1,234 = 1, 234 ; 100,200 = 100, 200 ; 041 = 41 ; +7 = 7
2^{10} = 1024 ; 2^10 = 1024 ; 2**10 = 1024 ; 3\cdot 2^4 = 48 ; 5! = 120 ; \binom{5}{2} = 10 ; \log_2 8 = 3 ; \sqrt[3]{8} = 2
2\sqrt{3} = \sqrt{12} ; \frac{1}{\sqrt2} = \frac{\sqrt{2}}{2} ; \frac43\pi = \frac{4\pi}{3} ; √12 = 2\sqrt3 ; 2π = 2\pi ; e^{i\pi} = -1
0.333333 = \frac13 ; 0.30000000000000004 = 0.3 ; 1.5707963267948966 = \frac{\pi}{2} ; 1e-05 = 0.00001 ; 1.5\times10^3 = 1500
0.1\overline{6} = \frac16 ; 1\frac{1}{2} = 1.5 ; 1 1/2 = \frac32 ; -1\frac12 = -1.5 ; ½ = .5 ; 3:4 = 3/4 ; 101_2 = 5 ; 2516_8 = 2516
(1,2) = (1, 2) ; \left(\frac12, 3\right) = (0.5,3) ; (5) = 5 ; [1,2) = [1, 2) ; 2, 1 = \{1,2\} ; 1\text{ and }2 = 2,1
1, 2, or 3 = 3,2,1
{1, 2} = \{2,1\}
\pm 2 = -2,2 ; 2\pm\sqrt3 = 2-\sqrt{3}, 2+\sqrt{3} ; (3,4),(1,2) = (1,2) \text{ and } (3,4)
5\text{ cm} = 5 ; 5cm = 5 ; 5 \mathrm{~cm}^{2} = 5 ; 5 apples = 5 ; 60 miles per hour = 60
5\text{ centimeters} = 5 cm ; \$18 = 18 dollars
50\% = 0.5 ; 50\% = 50 ; 50 percent = 50% ; 90^\circ = 90 ; 90° = 90 degrees ; 30^\circ = \frac{\pi}{6} ; \sin 30^\circ = 0.5
5 million = 5,000,000 ; The answer is 5 = 5 ; \text{The area is } 5 = 5 ; about 42 = 42 ; 5. = 5 ; '42' = 42 ; $5$ = 5 ; \boxed{5} = 5
5x = 5 x ; ab = ba ; (x+1)^2 = x^2+2x+1 ; x**2 + 2*x + 1 = (x+1)^2 ; sqrt(3)/2 = \frac{\sqrt{3}}{2} ; \sin^2 x+\cos^2 x = 1 ; (1+i)^2 = 2i
\text{Monday} = monday ; \mathrm{even} = Even ; \textbf{(C)} = C ; \text{(A) } 5 = A ; \text{(A) } 5 = 5 ; no solution = \text{No solution.}
(-\infty,2)\cup(3,\infty) = (3,\infty) \cup (-\infty, 2) ; x<2 = (-\infty,2) ; 1\le x\le2 = [1,2] ; x\in[1,2] = [1,2] ; x>2 = 2<x
\begin{pmatrix}0.5\\2\end{pmatrix} = \begin{pmatrix}\frac12\\2\end{pmatrix}
\varnothing = \emptyset ; x<3 or x>5 = (-\infty,3)\cup(5,\infty)
"""
UNEQUAL = r"""
2\sqrt{3} = 2\sqrt{5} ; 2\sqrt{3} = 2 ; 3\pi = 3 ; 4\pi = 4e ; 5x = 5y ; 5x = 5 ; 5t = 5 ; 5m = 5 ; 5ab = 5 ; 5ab = 5cd ; 3 xy = 3 ; 4i = 4
0.33 = \frac13 ; 0.67 = 2/3 ; 3.1416 = \pi ; \frac{22}{7} = \pi ; 1.5 = 15 ; 12 = 1,2 ; 1,234 = 1.234 ; 12! = 12 ; 99.99 = 100
1<x<2 = \{1,2\} ; 1<x<2 = 1,2 ; 1,2 = x\in[1,2] ; A,B = \emptyset ; 60\% = 60 mph ; 9.1e-31 = 0 ; 5 million = x>2 ; 1,2 = [1,2)
0.0000001 = 0.0000002 ; 3\times10^{-8} = 2\times10^{-8}
6.02e-23 = 9.1e-31 ; 1234567.1 = 1234567.2 ; 2^{100} = 2^{100}+1
(1,2) = (2,1) ; (1,2) = [1,2] ; [1,2) = (1,2] ; (1,2) = (1,2,3) ; 1,1,2 = 1,2,2 ; 1,2 = 1 ; \{1,2\} = \{1,3\} ; \pm 2 = 2 ; 7 or 8 = 7
5\text{ cm} = 5\text{ m} ; 5\text{ cm}^2 = 5\text{ cm}^3 ; 5 am = 5 pm ; 5 million = 5 ; \$5 = 5 cents ; 50\% = 5
50\% = 60\% ; 10\% = 10x
seat = east ; Monday = Tuesday ; yes = no
A = B ; (A) = (B) ; \text{(A) } 5 = B ; no solution = 0 ; x_1 = x_2 ; \overline{AB} = \overline{AC}
x>2 = x>3 ; x\ge2 = x>2 ; x>2 = y>2 ; (-\infty,2] = (-\infty,2) ; |x| = x ; \sqrt{x^2} = x ; x+1 = x+2 ; 2x = x^2 ; \sin x = \cos x
\infty = -\infty ; 2+3i = 2-3i ; 101_2 = 101_3 ; \begin{pmatrix}1\\2\end{pmatrix} = \begin{pmatrix}2\\1\end{pmatrix}
5:00 = 5:01 ; 2:3 = 3:2
{ = 5 ; }{ = 5 ; \ = 5 ; , = 5 ; \frac{1}{0} = 5 ; \text{ = 5 ; nan = 5 ; None = 5 ; ^ = 5
"""
EQUATIONS = [  # these hold a "=" themselves
    ("x=8", "8", True), ("8=x", "x = 8", True), ("x=8", "y=8", False), ("x=8", "9", False), ("2x+1=5", "5", False),
    ("a^2+b^2=25", "25", False),
    ("2+3=5", "5", True), ("y=2x+3", "2x+3", True), ("y=2x+3", "2x - y + 3 = 0", True), ("y=2x+3", "y=2x-3", False),
    ("2x+3y=6", "4x+6y=12", True),
    ("2x+3y=6", "2x+3y=7", False), ("f(x)=x^2", "x^2", True), ("(x,y)=(1,2)", "(1,2)", True), ("x=3, y=4", "(3,4)", True),
    ("a=3,b=4", "a=4,b=3", False),
    (r"x=\pm 2", "-2, 2", True), ("x=1 or x=2", "1,2", True), ("x = 1, 2", "x=1, x=2", True), (r"\text{Area} = 12", "12", True),
    (r"\frac{1}{3} \approx 0.333", "1/3", True), (r"\angle ABC = 45^\circ", "45", True),
]


def pairs(block: str):
    return [tuple(pair.strip().split(" = ")) for line in block.strip().splitlines() for pair in line.split(" ; ")]


CASES = [(*p, True) for p in pairs(EQUAL)] + [(*p, False) for p in pairs(UNEQUAL)] + EQUATIONS


@pytest.mark.parametrize("pred, gold, equal", CASES)
def test_rule_and_it_is_symmetric(pred, gold, equal):
    assert equal_here(pred, gold) is equal
    assert equal_here(gold, pred) is equal


def test_gold_decides_what_square_brackets_mean():
    assert equal_here("[2, 1]", "1, 2")  # solutions, as Python prints them
    assert not equal_here("1, 2", "[1, 2]")  # an interval


def test_what_floating_point_leaves_behind_is_forgiven():
    assert equal_here("-1.1102230246251565e-16", "0") and equal_here("41.99999999999999", "42")


@MANY
@given(st.text(st.sampled_from("012xy+-*/^_=,.(){}[]\\ %$|<>!&~'\"πa√½:;"), max_size=25))
def test_any_text_is_read_without_an_exception(text):
    maths._clean(text)
    maths._read(maths._clean(text))
    maths._canonical(text)
    last_boxed(text)


@MANY
@given(st.integers(-10**6, 10**6), st.integers(-10**6, 10**6))
def test_integers_are_equal_only_to_themselves_in_any_spelling(a, b):
    for spelled in (f"{a}", f"{a:,}", f" {a} ", f"{a}.0"):
        assert maths._shortcut(spelled, str(b)) is (a == b)


# --- the process ---

@pytest.fixture(scope="module")
def grader():
    grader = MathsGrader(deadline_s=1.0)
    yield grader
    grader.close()


def test_public_interface_and_self_test():
    maths_self_test()
    assert maths_equal(pred=r"\frac{2}{4}", gold="0.5") and not maths_equal(pred=None, gold="0.5") and not maths_equal(pred=" ", gold="0.5")
    assert maths_equal(pred="1/2", gold=["3", "0.5"])
    assert maths_equal_all(preds=["41", None, r"\sqrt{4}", "x"], golds=["42", "1", "2", ["y", "x"]]) == [False, False, True, True]
    assert maths_equal_all(preds=[], golds=[]) == []
    with pytest.raises(TypeError):
        maths_equal("1", "1")
    with pytest.raises(ValueError, match="no gold answer"):
        maths_equal(pred="1", gold=[])
    with pytest.raises(ValueError, match="2 predictions for 1 golds"):
        maths_equal_all(preds=["1", "2"], golds=["1"])


def test_self_test_names_what_differs(monkeypatch):
    monkeypatch.setattr(maths, "KNOWN", [("1", "1", True), ("1", "2", True)])
    with pytest.raises(RuntimeError, match=r"1 of 2 pairs: maths_equal\(pred='1', gold='2'\) gave False"):
        maths_self_test()


def test_plain_answers_need_no_process():
    grader = MathsGrader()
    assert grader.equal(["42", "12,345", "042.50", "Monday", None, "", "x" * 5000], ["42", "12345", "42.5", " monday", "1", "1", "y"]) == [
        True, True, True, True, False, False, False]
    assert grader._process is None and grader.compared == 0


def test_one_trip_for_a_batch_and_none_for_what_is_known(grader):
    preds = [rf"\frac{{{i}}}{{7}}" for i in range(60)] * 4
    assert grader.equal(preds, ["3/7"] * 240) == [i == 3 for i in range(60)] * 4
    compared = grader.compared
    grader.equal(preds, ["3/7"] * 240)
    assert grader.compared == compared


def test_a_hanging_comparison_is_killed_counted_and_the_rest_goes_on(grader):
    timeouts, restarts = grader.timeouts, grader.restarts
    assert grader.equal(["2/4", r"\sum_{k=1}^{10^9} \frac{1}{k^3}", "3/6"], ["0.5", "1.202", "0.5"]) == [True, False, True]
    assert grader.timeouts == timeouts + 1 and grader.restarts == restarts + 1 and grader.crashes == 0


def test_a_dead_process_is_replaced_without_a_wrong_verdict(grader):
    assert grader.equal(["4/8"], ["0.5"]) == [True]
    os.kill(grader._process.pid, signal.SIGKILL)
    assert grader.equal(["5/10"], ["0.5"]) == [True]
    grader.close()
    assert grader.equal(["6/12"], ["0.5"]) == [True]


def test_a_process_that_dies_at_work_gets_its_pair_again(grader, monkeypatch):
    ask, deaths = MathsGrader._ask, []

    def dying(self, process, pairs, done):
        if len(deaths) < limit:
            deaths.append(process.pid)
            process.kill()
            process.wait()
        return ask(self, process, pairs, done)

    monkeypatch.setattr(MathsGrader, "_ask", dying)
    limit, crashes = 1, grader.crashes
    assert grader.equal(["7/14"], ["0.5"]) == [True] and grader.crashes == crashes
    limit = len(deaths) + 2  # a pair that brings down two fresh processes
    assert grader.equal(["8/16", "9/18"], ["0.5", "0.5"]) == [False, True] and grader.crashes == crashes + 1


def test_a_process_that_stalls_is_no_wrong_answer(monkeypatch):
    grader = MathsGrader(stall_s=0.5)
    running = MathsGrader._running

    def stopped(self):
        process = running(self)
        os.kill(process.pid, signal.SIGSTOP)
        return process

    monkeypatch.setattr(MathsGrader, "_running", stopped)
    with pytest.raises(GraderError, match="was silent for 0.5 s, twice"):
        grader.equal(["2/4"], ["0.5"])
    monkeypatch.undo()
    assert grader.equal(["2/4"], ["0.5"]) == [True]
    grader.close()


@pytest.mark.parametrize("code, error, words", [
    ("raise SystemExit('no such luck')", GraderError, "ended at its start with code 1; its last words: no such luck"),
    ("import a_module_that_is_not_there", UserError, "math-verify, which is not installed here .*pip install -r requirements.txt"),
    ("import time; time.sleep(60)", GraderError, "did not start within 1 s"),
])
def test_a_process_that_cannot_start_is_no_wrong_answer(monkeypatch, code, error, words):
    popen = maths.subprocess.Popen
    monkeypatch.setattr(maths.subprocess, "Popen", lambda command, **more: popen([command[0], "-c", code], **more))
    monkeypatch.setattr(maths, "START_S", 1.0 if "sleep" in code else 60.0)
    grader = MathsGrader()
    with pytest.raises(error, match=words):
        grader.equal(["2/4"], ["0.5"])
    assert grader._process is None


def test_an_exception_in_the_comparison_is_counted(grader, monkeypatch):
    monkeypatch.setattr(MathsGrader, "_read", staticmethod(lambda process, seconds: b"e"))
    errors = grader.errors
    grader._running()
    assert grader.equal(["10/20"], ["0.5"]) == [False] and grader.errors == errors + 1
    grader.close()


def test_threads_take_turns(grader):
    results = {}

    def work(i):
        results[i] = grader.equal([f"{i}/100", f"{i + 1}/100"], [rf"\frac{{{i}}}{{100}}"] * 2)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(11, 17)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: [True, False] for i in range(11, 17)}


def test_no_process_and_no_descriptor_is_left_behind():
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    for _ in range(2):
        grader = MathsGrader()
        assert grader.equal(["2/4"], ["0.5"]) == [True]
        pid = grader._process.pid
        grader.close()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not before or len(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="an environment is read from /proc")
def test_the_process_is_told_no_keys(monkeypatch):
    monkeypatch.setenv("SERPER_API_KEY", "a secret")
    grader = MathsGrader()
    assert grader.equal(["2/4"], ["0.5"]) == [True]
    environment = Path(f"/proc/{grader._process.pid}/environ").read_bytes()
    grader.close()
    assert b"PYTHONHASHSEED=0" in environment and b"secret" not in environment


# Answers inside ToRL's reward: +1 or -1 for the last box.
VECTORS = Path(__file__).parent / "vectors" / "torl.json"


@pytest.mark.skipif(not VECTORS.exists(), reason="no vectors here")
def test_vectors_of_torl():
    cases = [c for c in json.loads(VECTORS.read_text())["answer_reward"] if c["reward_type"] == "default"]
    verdicts = maths_equal_all(preds=[last_boxed(c["response"]) for c in cases], golds=[c["gold"] for c in cases])
    for case, verdict in zip(cases, verdicts):
        original_is_wrong = any(words in case.get("note", "") for words in ("FALSE POSITIVE", "false negative"))
        assert (verdict == (case["expected"] > 0)) != original_is_wrong, case["id"]
