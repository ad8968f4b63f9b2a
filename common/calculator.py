"""A calculator: exact arithmetic on whole numbers and fractions, written as SymPy or Python would have it.

    calculate("48 / 2")             -> "24"
    calculate("(0.1 + 0.2) * 3")    -> "0.9"
    calculate("1/3 + 1/6")          -> "0.5"
    calculate("2^10 + sqrt(49)")    -> "1031"

Nothing is executed: a text is read by the grammar below, and every number stays within a limit of digits, so that no expression takes long.
    + - * / // % ** ^ !    ( )    abs ceiling factorial floor gcd lcm max min Rational round sqrt    1,000 where no function is called
"""
import math
import re
from fractions import Fraction

MAX_CHARS, MAX_DEPTH = 1_000, 50
MAX_BITS = 13_000  # of a numerator or denominator: about 3,900 digits
_TOKEN = re.compile(r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|(?P<name>[A-Za-z_]\w*)|(?P<mark>\*\*|//|[-+*/%^(),!]))", re.A)
_SAME = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})
_BINARY = {"+": 1, "-": 1, "*": 2, "/": 2, "//": 2, "%": 2}


class CalculatorError(ValueError):
    """What is wrong with an expression, in words that can be shown to the model."""


def calculate(expression: str) -> str:
    """The value as text: a whole number, a decimal number where it ends, else a fraction in lowest terms. Raises CalculatorError."""
    return show(value_of(expression))


def value_of(expression: str) -> Fraction:
    """The exact value. Raises CalculatorError."""
    if len(expression) > MAX_CHARS:
        raise CalculatorError(f"longer than {MAX_CHARS:,} characters")
    text = expression.translate(_SAME).strip()
    if not re.search("[A-Za-z_]", text):
        text = re.sub(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?![\d,])", lambda m: m[0].replace(",", ""), text)
    return _Reader(text).whole()


def show(value: Fraction) -> str:
    """A value as `calculate` writes it; at most 12 digits behind the point, else a fraction."""
    if value.denominator == 1:
        return str(value.numerator)
    if 10**12 % value.denominator:
        return f"{value.numerator}/{value.denominator}"
    whole, rest = divmod(abs(value), 1)
    return f"{'-' if value < 0 else ''}{whole}.{int(rest * 10**12):012d}".rstrip("0")


def _limited(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise CalculatorError("a number has too many digits")
    return value


def _integer(value: Fraction, what: str) -> int:
    if value.denominator != 1:
        raise CalculatorError(f"{what} needs whole numbers")
    return value.numerator


def _divide(a: Fraction, b: Fraction) -> Fraction:
    if b == 0:
        raise CalculatorError("division by zero")
    return a / b


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        if exponent.denominator != 2:
            raise CalculatorError("the exponent must be a whole number or a half")
        base, exponent = _sqrt(base), exponent * 2
    n = exponent.numerator
    if n < 0 and base == 0:
        raise CalculatorError("division by zero")
    if base not in (-1, 0, 1) and max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(n) > MAX_BITS:
        raise CalculatorError("a number has too many digits")
    return base ** n if base not in (-1, 0, 1) else Fraction(1) if n == 0 else base if n % 2 else base * base


def _sqrt(x: Fraction) -> Fraction:
    if x >= 0:
        root = Fraction(math.isqrt(x.numerator), math.isqrt(x.denominator))
        if root * root == x:
            return root
    raise CalculatorError("the square root is not a fraction")


def _factorial(x: Fraction) -> Fraction:
    n = _integer(x, "factorial")
    if not 0 <= n <= 1_000:
        raise CalculatorError("factorial needs a number from 0 to 1,000")
    return Fraction(math.factorial(n))


def _round(x: Fraction, digits: Fraction = Fraction(0)) -> Fraction:
    n = _integer(digits, "round")
    if abs(n) > 100:
        raise CalculatorError("round takes at most 100 digits")
    return Fraction(round(x, n))


_FUNCTIONS = {  # name -> how many arguments at least and at most, and what to do with them
    "abs": (1, 1, abs), "floor": (1, 1, lambda x: Fraction(math.floor(x))), "ceiling": (1, 1, lambda x: Fraction(math.ceil(x))),
    "factorial": (1, 1, _factorial), "sqrt": (1, 1, _sqrt), "round": (1, 2, _round), "rational": (1, 2, lambda a, b=Fraction(1): _divide(a, b)),
    "min": (1, 50, lambda *x: min(x)), "max": (1, 50, lambda *x: max(x)),
    "gcd": (1, 50, lambda *x: Fraction(math.gcd(*(_integer(n, "gcd") for n in x)))),
    "lcm": (1, 50, lambda *x: Fraction(math.lcm(*(_integer(n, "lcm") for n in x)))),
}
_FUNCTIONS["ceil"] = _FUNCTIONS["ceiling"]


class _Reader:
    """One expression, read from left to right by the strength of its marks."""

    def __init__(self, text: str):
        self.tokens, self.at, self.depth, end = [], 0, 0, 0
        while end < len(text):
            m = _TOKEN.match(text, end)
            if m is None:
                raise CalculatorError(f"{text[end:].strip()[:20]!r} is not arithmetic")
            self.tokens.append((m.lastgroup, m[m.lastgroup]))
            end = m.end()

    def whole(self) -> Fraction:
        value = self.expression(0)
        if self.at < len(self.tokens):
            raise CalculatorError(f"an operator is missing before {self.tokens[self.at][1][:20]!r}")
        return value

    def peek(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) and self.tokens[self.at][0] == "mark" else ""

    def take(self, mark: str) -> bool:
        found = self.peek() == mark
        self.at += found
        return found

    def expression(self, above: int) -> Fraction:
        """As far as the operators are stronger than `above`."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise CalculatorError("nested too deep")
        left = self.signed()
        while _BINARY.get(self.peek(), 0) > above:
            mark = self.peek()
            self.at += 1
            right = self.expression(_BINARY[mark])
            if mark in ("/", "//", "%"):
                quotient = _divide(left, right)
                left = quotient if mark == "/" else Fraction(math.floor(quotient)) if mark == "//" else left - right * math.floor(quotient)
            else:
                left = left + right if mark == "+" else left - right if mark == "-" else left * right
            left = _limited(left)
        self.depth -= 1
        return left

    def signed(self) -> Fraction:
        """A power with its signs: -2^2 is -4, 2^-1 is a half, 2^3^2 is 2^9."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise CalculatorError("nested too deep")
        if self.take("-"):
            value = -self.signed()
        elif self.take("+"):
            value = self.signed()
        else:
            value = self.atom()
            while self.take("!"):
                value = _limited(_factorial(value))
            if self.take("**") or self.take("^"):
                value = _power(value, self.signed())
        self.depth -= 1
        return value

    def atom(self) -> Fraction:
        if self.take("("):
            value = self.expression(0)
            if not self.take(")"):
                raise CalculatorError("a closing bracket is missing")
            return value
        kind, text = self.tokens[self.at] if self.at < len(self.tokens) else ("", "")
        self.at += 1
        if kind == "number":
            digits, _, exponent = text.lower().partition("e")
            if len(exponent) > 5 or abs(int(exponent or 0)) > 3_000:
                raise CalculatorError("a number has too many digits")
            return _limited(Fraction(digits) * Fraction(10) ** int(exponent or 0))
        if kind != "name":
            raise CalculatorError(f"a number is missing {f'before {text!r}' if text else 'at the end'}")
        if text.lower() not in _FUNCTIONS:
            raise CalculatorError(f"the name {text[:20]!r} is not known")
        if not self.take("("):
            raise CalculatorError(f"{text} needs its arguments in brackets")
        values = [self.expression(0)]
        while self.take(","):
            values.append(self.expression(0))
        if not self.take(")"):
            raise CalculatorError("a closing bracket is missing")
        least, most, function = _FUNCTIONS[text.lower()]
        if not least <= len(values) <= most:
            raise CalculatorError(f"{text} takes {least if least == most else f'{least} to {most}'} arguments, not {len(values)}")
        return _limited(function(*values))
