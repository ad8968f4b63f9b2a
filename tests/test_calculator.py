"""The calculator: exact values, errors as sentences, and no expression that takes long."""
import random
import time
from fractions import Fraction

import pytest

from common.calculator import CalculatorError, calculate, value_of
from common.rollout import ToolCall, ToolPool
from common.tools import calculator_tool


@pytest.mark.parametrize("expression,value", [
    ("48 / 2", "24"), ("0.1 + 0.2", "0.3"), ("1/3 + 1/6", "0.5"), ("1/3", "1/3"), ("-1/8", "-0.125"), ("2^10", "1024"), ("2**-1", "0.5"),
    ("-2**2", "-4"), ("2^3^2", "512"), ("10 - 4 - 3", "3"), ("100 / 5 / 2", "10"), ("-7 // 2", "-4"), ("-7 % 3", "2"), ("(1 + 2) * -3", "-9"),
    ("5!", "120"), ("sqrt(49) + 4**0.5", "9"), ("max(1,200)", "200"), ("1,000 * 2", "2000"), ("Rational(1, 3) * 3", "1"), ("round(2.345, 2)", "2.34"),
    ("floor(-0.5) + ceiling(0.5)", "0"), ("gcd(12, 18) * lcm(4, 6)", "72"), ("1.5e3", "1500"), ("2 × 3 − 1 ÷ 2", "5.5"), ("0**0", "1"), (".5", "0.5"),
])
def test_values(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize("expression,reason", [
    ("", "number is missing"), ("1 +", "number is missing"), ("1 2", "operator is missing"), ("(1 + 2", "closing bracket"), ("1)", "operator is missing"),
    ("1/0", "division by zero"), ("5 % 0", "division by zero"), ("0**-1", "division by zero"), ("x + 1", "not known"), ("sqrt", "brackets"),
    ("sqrt(2)", "not a fraction"), ("sqrt(-1)", "not a fraction"), ("2**(1/3)", "exponent"), ("gcd(1.5, 2)", "whole numbers"), ("abs(1, 2)", "takes 1"),
    ("__import__('os').system('x')", "not arithmetic"), ("1 = 1", "not arithmetic"), ("'a' * 9", "not arithmetic"), ("(-3)!", "from 0"),
    ("9**9**9", "too many digits"), ("1e9999", "too many digits"), ("3000!", "from 0"), ("1" * 2_000, "longer"), ("(" * 100 + "1" + ")" * 100, "nested"),
    ("-" * 100 + "1", "nested"), ("2**" * 60 + "2", "nested"), ("round(1, 1000)", "at most"),
])
def test_errors_are_sentences(expression, reason):
    with pytest.raises(CalculatorError, match=reason):
        calculate(expression)


def test_agrees_with_python_on_random_expressions():
    rng, checked = random.Random(0), 0
    def build(depth):
        if depth == 0 or rng.random() < 0.2:
            return str(rng.randrange(0, 50))
        left, right, mark = build(depth - 1), build(depth - 1), rng.choice(["+", "-", "*", "/", "//", "%"])
        text = f"{left} {mark} {right}"
        return f"({text})" if rng.random() < 0.5 else f"-{text}" if rng.random() < 0.2 else text
    for _ in range(500):
        text = build(4)
        exact = __import__("re").sub(r"\d+", lambda m: f"F({m[0]})", text)
        try:
            expected = Fraction(eval(exact, {"F": Fraction}))
        except ZeroDivisionError:
            with pytest.raises(CalculatorError, match="division by zero"):
                value_of(text)
            continue
        assert value_of(text) == expected, text
        checked += 1
    assert checked > 300


def test_nothing_takes_long():
    start = time.monotonic()
    for text in ("9**99999", "7**4000", "*".join(["9**4000"] * 80), "1000!*" * 100 + "1", "(" * 45 + "9**4000" + ")**2" * 45, "max(" + ",".join(["9**4000"] * 50) + ")",
                 "1/" * 400 + "3", "1e3000*" * 100 + "1", "round(1/3**2000, 100)", "0" * 999, "!" * 900, "5" + "!" * 900):
        try:
            calculate(text)
        except CalculatorError:
            pass
    assert time.monotonic() - start < 5


def test_as_a_tool_a_bad_expression_is_a_failed_call():
    pool = ToolPool(1)
    calls = [ToolCall("math", text, None) for text in ("6 * 7", "6 * x")]
    results = pool.finish(pool.start(calculator_tool(), calls))
    pool.close()
    assert results == ["42", "error: the name 'x' is not known"] and [c.outcome for c in calls] == ["ok", "error"]
