"""AMD's pseudocode of an instruction, as its ISA guides print it, evaluated for one lane.

The text is read as it stands and computed with Python's integers and fractions: nothing here is shared with the
emulator. A value is a pattern of bits with a type; integers wrap at the width of the wider operand, floats round once
to nearest even. Powers of two are exact until they are multiplied, so that scaling by them rounds once as well.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any

from plain import decode, encode, fma, is_nan, is_signalling, quiet, sign_of, signed
from pseudocode_reader import Node, read


@dataclass(frozen=True)
class Value:
    """`kind`: U, I, F or B. `exact`: a float not rounded yet. `free`: a NaN whose bits nothing prescribes."""

    bits: int
    size: int
    kind: str
    exact: Fraction | None = None
    free: bool = False

    def __int__(self) -> int:
        return signed(self.bits, self.size) if self.kind == "I" else self.bits

    def __bool__(self) -> bool:
        return self.bits != 0

    @property
    def format(self) -> str:
        return f"f{self.size}"

    @property
    def real(self) -> float | Fraction:
        return decode(self.bits, self.format) if self.exact is None else self.exact


def integer(value: int, size: int, kind: str = "U") -> Value:
    return Value(value & (1 << size) - 1, size, kind)


def real(value: float | Fraction, size: int, *, negative_zero: bool = False) -> Value:
    bits = encode(value, f"f{size}", negative_zero=negative_zero)
    return Value(bits, size, "F", free=is_nan(bits, f"f{size}"))


def truth(value: object) -> Value:
    return Value(int(bool(value)), 1, "U")


def as_type(value: Value, name: str) -> Value:
    """`.u32` and the like: the same bits, fewer of them or with zeros before them."""
    size = int(name[1:])
    kept = {"free": value.free} if name[0] == "f" and value.kind == "F" else {}
    return Value(value.bits & (1 << size) - 1, size, name[0].upper(), **kept)


def cast(value: Value, size: int, kind: str) -> Value:
    """`32'U(...)` and the like: the same number, except that an integer is the pattern of a float."""
    if kind != "F" or value.kind != "F":
        return integer(int(value), size, kind)
    if value.exact is not None or not is_nan(value.bits, value.format):
        negative = value.exact is None and bool(sign_of(value.bits, value.format))
        return replace(real(value.real, size, negative_zero=negative), free=False)
    # NaNs keep their sign, whether they signal, and as much of their payload as there is room for.
    places = {16: 10, 32: 23, 64: 52}
    top = sign_of(value.bits, value.format) << size - 1 | encode(math.inf, f"f{size}")
    payload = value.bits & (1 << places[value.size]) - 1
    shift = places[size] - places[value.size]
    return Value(top | (payload << shift if shift > 0 else payload >> -shift), size, "F", free=value.free)


@cache
def literal(word: str) -> Value:
    size, _, word = word.rpartition("'")
    if "." in word:
        return replace(real(float(word.rstrip("F")), int(size or (32 if word.endswith("F") else 64))), free=False)
    number = word.rstrip("UL")
    return integer(int(number, 0), int(size or (64 if "LL" in word else 32)), "U" if "U" in word else "I")


def _sum(a: Value, b: Value) -> Value:
    one = encode(1.0, a.format)
    return _free(fma(a.bits, one, b.bits, a.format), a.size)


def _free(bits: int, size: int) -> Value:
    return Value(bits, size, "F", free=is_nan(bits, f"f{size}"))


def _negated(value: Value) -> Value:
    if value.kind != "F":
        return integer(-int(value), value.size, value.kind)
    return replace(value, bits=value.bits ^ 1 << value.size - 1)


def _product(a: Value, b: Value) -> Value:
    if a.exact is None and b.exact is None:
        return _free(fma(a.bits, b.bits, (a.bits ^ b.bits) & 1 << a.size - 1, a.format), a.size)
    factor, other = (a, b) if a.exact is not None else (b, a)
    assert factor.exact is not None
    if not math.isfinite(decode(other.bits, other.format)) or other.real == 0:
        return replace(other, free=is_nan(other.bits, other.format))
    return real(factor.exact * Fraction(other.real), other.size)


def _quotient(a: Value, b: Value) -> Value:
    x, y = a.real, b.real
    sign = sign_of(a.bits, a.format) ^ sign_of(b.bits, b.format)
    if math.isnan(x) or math.isnan(y) or (x == 0 and y == 0) or (math.isinf(x) and math.isinf(y)):
        return real(math.nan, a.size)
    if math.isinf(x) or y == 0:
        return real(-math.inf if sign else math.inf, a.size)
    return real(Fraction(0) if math.isinf(y) else Fraction(x) / Fraction(y), a.size, negative_zero=bool(sign))


def _power(base: Value, power: Value) -> Value:
    # Far beyond every format, and no number of a million digits.
    limited = max(-5000, min(5000, int(power)))
    return Value(0, base.size, "F", exact=Fraction(base.real) ** limited)


FLOATS = {"+": _sum, "-": lambda a, b: _sum(a, _negated(b)), "*": _product, "/": _quotient}
INTEGERS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "&": operator.and_, "|": operator.or_,
            "^": operator.xor}  # fmt: skip


def less_or_greater(a: Any, b: Any) -> bool:
    """Of a NaN false, as the guide's note on NEQ implies: that is the one with NaN, and "not the same operation"."""
    return bool(a < b or a > b)


COMPARISONS = {"==": operator.eq, "!=": operator.ne, "<>": less_or_greater, "<": operator.lt, "<=": operator.le,
               ">": operator.gt, ">=": operator.ge}  # fmt: skip


def binary(sign: str, a: Value, b: Value) -> Value:
    if sign in COMPARISONS:
        floats = a.kind == "F"
        return truth(COMPARISONS[sign](a.real if floats else int(a), b.real if floats else int(b)))
    if sign == "**":
        return _power(a, b)
    if sign in ("<<", ">>"):
        shifted = int(a) << b.bits if sign == "<<" else int(a) >> b.bits
        return integer(shifted, a.size, a.kind)
    if a.kind == "F" or b.kind == "F":
        return FLOATS[sign](a, b)
    wider = a if (a.size, a.kind == "U") >= (b.size, b.kind == "U") else b
    return integer(INTEGERS[sign](int(a), int(b)), wider.size, wider.kind)


def exponent(value: Value) -> Value:
    """As it stands in the pattern, with its bias."""
    place, mask = {16: (10, 31), 32: (23, 255), 64: (52, 2047)}[value.size]
    return integer(value.bits >> place & mask, 32, "I")


def _signext_from_bit(value: Value, count: Value) -> Value:
    places = min(count.bits, value.size)
    return integer(signed(value.bits, places) if places else 0, value.size, "I")


def _to_integer(value: Value, size: int, kind: str) -> Value:
    low, high = (0, (1 << size) - 1) if kind == "U" else (-(1 << size - 1), (1 << size - 1) - 1)
    number = value.real
    if math.isnan(number):
        return integer(0, size, kind)
    return integer(int(max(low, min(high, number))), size, kind)


def _pow(base: Value, power: Value) -> Value:
    x = float(power.real)
    return real(math.nan if math.isnan(x) else float(base.real) ** x if x < 1000 else math.inf, base.size)


def _sqrt(value: Value) -> Value:
    x = float(value.real)
    return value if x == 0 else real(math.nan if math.isnan(x) or x < 0 else math.sqrt(x), value.size)


FUNCTIONS = {
    "fma": lambda a, b, c: _free(fma(a.bits, b.bits, c.bits, a.format), a.size),
    "isNAN": lambda a: truth(is_nan(a.bits, a.format)),
    "isSignalNAN": lambda a: truth(is_signalling(a.bits, a.format)),
    "cvtToQuietNAN": lambda a: replace(a, bits=quiet(a.bits, a.format)),
    "abs": lambda a: replace(a, bits=a.bits & ~(1 << a.size - 1)),
    "sign": lambda a: truth(sign_of(a.bits, a.format)),
    "exponent": exponent,
    "ldexp": lambda a, n: _product(a, _power(real(2.0, a.size), n)),
    "sqrt": _sqrt,
    "pow": _pow,
    "signext": lambda a: integer(signed(a.bits, a.size), 64, "I"),
    "signext_from_bit": _signext_from_bit,
    "f32_to_f16": lambda a: replace(cast(a, 16, "F"), free=is_nan(a.bits, a.format)),
    "f16_to_f32": lambda a: replace(cast(a, 32, "F"), free=is_nan(a.bits, a.format)),
    "i32_to_f32": lambda a: real(Fraction(int(a)), 32),
    "u32_to_f32": lambda a: real(Fraction(int(a)), 32),
    "f32_to_u32": lambda a: _to_integer(a, 32, "U"),
    "f32_to_i32": lambda a: _to_integer(a, 32, "I"),
}  # fmt: skip
NAMED = {
    ("NAN", "f32"): Value(0x7FC00000, 32, "F", free=True),
    ("INF", "f32"): Value(0x7F800000, 32, "F"),
}
CONSTANTS = {
    "INF": Value(0x7FF << 52, 64, "F"),
    # What rounding to nearest gives where a result is too small or too large.
    "UNDERFLOW_F32": Value(0, 32, "F"),
    "OVERFLOW_F32": Value(0x7F800000, 32, "F"),
}


class _Return(Exception):
    """Carries a value out of a function; no error."""


class Pseudocode:
    """`others`: the pseudocode of every instruction by its name in lower case, which some refer to."""

    def __init__(self, others: dict[str, str]) -> None:
        self.others = others

    def run(self, text: str, state: dict[str, Any]) -> dict[str, Any]:
        """The variables afterwards: registers are values of type B, S a list of them.

        `free D0` has the bits of D0 that are a NaN whose bits nothing prescribes.
        """
        state = dict(state)
        self._all(read(text), state)
        return state

    def _all(self, statements: list[Node], state: dict[str, Any]) -> None:
        for what, parts in statements:
            if what == "assign":
                self._assign(parts[0], self._value(parts[1], state), state)
            elif what == "if":
                branches, otherwise = parts
                chosen = next((body for test, body in branches if self._value(test, state)), otherwise)
                self._all(chosen, state)
            elif what == "for":
                name, first, last, body = parts
                for number in range(int(self._value(first, state)), int(self._value(last, state)) + 1):
                    state[name] = integer(number, 32, "I")
                    self._all(body, state)
            elif what == "declare":
                name, size, count = parts
                if name not in state:
                    state[name] = [Value(0, size, "B")] * count if count else Value(0, size, "B")
            elif what == "lambda":
                state[parts[0]] = parts[1:]
            else:
                raise _Return(self._value(parts[0], state))

    def _value(self, node: Node, state: dict[str, Any]) -> Any:
        return getattr(self, f"_{node.what}")(state, *node.parts)

    def _number(self, _state: dict[str, Any], word: str) -> Value:
        return literal(word)

    def _name(self, state: dict[str, Any], name: str) -> Any:
        return state[name] if name in state else CONSTANTS[name]

    def _type(self, state: dict[str, Any], inner: Node, name: str) -> Value:
        if inner.what == "name" and (inner.parts[0], name) in NAMED:
            return NAMED[inner.parts[0], name]
        return as_type(self._value(inner, state), name)

    def _cast(self, state: dict[str, Any], size: int, kind: str, inner: Node) -> Value:
        return cast(self._value(inner, state), size, kind)

    def _choice(self, state: dict[str, Any], condition: Node, yes: Node, no: Node) -> Any:
        return self._value(yes if self._value(condition, state) else no, state)

    def _join(self, state: dict[str, Any], parts: list[Node]) -> Value:
        joined = Value(0, 0, "U")
        for each in parts:
            more = self._value(each, state)
            joined = Value(joined.bits << more.size | more.bits, joined.size + more.size, "U")
        return joined

    def _binary(self, state: dict[str, Any], sign: str, left: Node, right: Node) -> Value:
        if sign == "==" and right.what == "type" and right.parts[0] == Node("name", ("DENORM",)):
            value = self._value(left, state)
            return truth(value.bits << 1 & (1 << value.size) - 1 and not exponent(value))
        if sign in ("&&", "||"):
            first = bool(self._value(left, state))
            return truth(first if first == (sign == "||") else self._value(right, state))
        return binary(sign, self._value(left, state), self._value(right, state))

    def _unary(self, state: dict[str, Any], sign: str, inner: Node) -> Value:
        value = self._value(inner, state)
        if sign == "!":
            return truth(not value)
        if sign == "~":
            return integer(~value.bits, value.size, value.kind)
        return _negated(value) if sign == "-" else value

    def _bits(self, state: dict[str, Any], of: Node, first: Node, last: Node | None) -> Value:
        value, high = self._value(of, state), int(self._value(first, state))
        if isinstance(value, list):
            return value[high]
        if last is None:
            return Value(value.bits >> high & 1, 1, "U")
        low = int(self._value(last, state))
        if high < low:
            mirrored = int(f"{value.bits:0{value.size}b}"[::-1], 2)
            return integer(mirrored >> value.size - 1 - low, low - high + 1)
        return integer(value.bits >> low, high - low + 1)

    def _call(self, state: dict[str, Any], name: str, nodes: list[Node]) -> Value:
        arguments = [self._value(each, state) for each in nodes]
        if name in FUNCTIONS:
            return FUNCTIONS[name](*arguments)
        if name in state:
            names, body = state[name]
            try:
                self._all(body, state | dict(zip(names, arguments, strict=True)))
            except _Return as result:
                return result.args[0]
        sources = {f"S{place}": replace(each, kind="B") for place, each in enumerate(arguments)}
        after = self.run(self.others[name], sources | {"D0": Value(0, 32, "B"), "TRAPSTS": Value(0, 32, "B")})
        return replace(after["D0"], kind=arguments[0].kind)

    def _assign(self, target: Node, value: Value, state: dict[str, Any]) -> None:
        what, parts = target
        if what == "join":
            for each in reversed(parts[0]):
                size = int(each.parts[1][1:])
                self._assign(each, integer(value.bits, size), state)
                value = integer(value.bits >> size, value.size)
            return
        if what == "name":
            fixed = parts[0] in ("D0", "VCC", "SCC") and state[parts[0]]
            state[parts[0]] = replace(value, size=fixed.size) if fixed else value
            return
        root, low, size = self._place(target, state)
        before = state.get(root)
        if isinstance(before, list):
            state[root] = [value if place == low else each for place, each in enumerate(before)]
            return
        before = Value(0, 64, "B") if before is None else before
        mask = (1 << size) - 1 << low & (1 << before.size) - 1
        state[root] = Value(before.bits & ~mask | value.bits << low & mask, before.size, "B")
        free = state.get(f"free {root}", 0) & ~mask
        state[f"free {root}"] = free | mask if value.free else free

    def _place(self, node: Node, state: dict[str, Any]) -> tuple[str, int, int]:
        """Whose bits, from which on, how many."""
        what, parts = node
        if what == "name":
            return parts[0], 0, 64
        root, low, _ = self._place(parts[0], state)
        if what == "type":
            return root, low, int(parts[1][1:]) if parts[1][1:].isdigit() else 32
        first = int(self._value(parts[1], state))
        if parts[2] is None:
            return root, low + first, 1
        last = int(self._value(parts[2], state))
        return root, low + min(first, last), abs(first - last) + 1
