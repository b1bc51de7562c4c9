"""Good files made bad, as a stranger or a failing disk would: a strategy of bytes for each reader of files."""

from __future__ import annotations

import copy
import json
from contextlib import contextmanager
from typing import Any

from hypothesis import strategies as st

from rocm_sd.errors import RocmSdError

__all__ = ["broken", "broken_bytes", "evil", "one_sentence", "sentence"]

# What stands for nesting that Python's own writer could not write.
_DEEP = "@deep@"
_ABYSS = 20_000
_TEXTS = (
    "", " ", "x" * 5000, "\x00", "a\x00b", "\n", "\x1b[31m", "\ud800", "\udfff\ud800", "\u202e", "é", "NaN", "1e999",
    "-1", "../../etc/passwd", "/etc/passwd", "C:\\Windows", "..", ".", "<script>alert(1)</script>", "[x](javascript:y)",
    "a|b", "`", "{{ x }}", "'; DROP TABLE measurements; --", "2026-13-45", "0001-01-01T00:00:00+23:59",
    "9999-12-31T23:59:59-23:59", "2099-01-01T00:00:00+00:00", "gfx1100\n", "ann@example.org", "/home/ann/x", "cpu",
    "op", "stock", "torch", "float16", "9" * 400, "\u0663", _DEEP,
)  # fmt: skip
_NUMBERS = (
    0, -1, 1, 2, -0.0, 0.5, 1e-320, 5e-324, 1e-9, 1e12, 1e30, 1e300, 1.7e308, 2**31, 2**53 + 1, 2**63, -(2**63) - 1,
    2**64, 10**400, -(10**400), float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
_OTHERS = (None, True, False, [], {}, [[]], [None], {"": ""}, {"a": {"b": [1]}}, [[1, 2]] * 50, [0] * 3000)
evil = st.sampled_from((*_TEXTS, *_NUMBERS, *_OTHERS)) | st.text(max_size=8) | st.floats() | st.integers()


@st.composite
def broken(draw: st.DrawFn, values: Any) -> Any:
    """The values with one to four of them dropped, replaced, doubled, negated or moved."""
    values = copy.deepcopy(values)
    for _ in range(draw(st.integers(1, 4))):
        holders = [each for each in _holders(values) if each]
        if not holders:
            return copy.deepcopy(draw(evil))
        holder = holders[draw(st.integers(0, len(holders) - 1))]
        places = list(holder) if isinstance(holder, dict) else range(len(holder))
        place = places[draw(st.integers(0, len(places) - 1))]
        kind = draw(st.integers(0, 7))
        old = holder[place]
        if kind == 0:
            del holder[place]
        elif kind == 1 and isinstance(holder, list):
            holder.insert(place, copy.deepcopy(old))
        elif kind == 1:
            holder[draw(st.sampled_from([each for each in _TEXTS if each != _DEEP]))] = copy.deepcopy(old)
        elif kind == 2 and isinstance(old, (int, float)):
            holder[place] = -old
        elif kind == 3 and isinstance(old, (int, float)) and abs(old) < 1e300:
            holder[place] = old * draw(st.sampled_from([1e-300, 1e-6, 1e6, 1e300]))
        elif kind == 4:
            holder[place] = copy.deepcopy(holders[draw(st.integers(0, len(holders) - 1))])
        else:
            holder[place] = copy.deepcopy(draw(evil))
    return values


def broken_bytes(values: Any, change: Any = lambda made: made) -> st.SearchStrategy[bytes]:
    """A file with such values, and in one of three its bytes cut, changed or mixed; `change` is applied before that."""
    whole = broken(values).map(change).map(_written)
    return st.one_of(
        whole, whole, st.tuples(whole, st.integers(0, 7), st.floats(0, 1), st.binary(max_size=4)).map(_cut)
    )


def _holders(values: Any) -> Any:
    """Every object and list, the outer ones first."""
    level = [values]
    while level:
        below = []
        for each in level:
            if isinstance(each, (dict, list)):
                yield each
                below += each.values() if isinstance(each, dict) else each
        level = below


def _written(values: Any) -> bytes:
    text = json.dumps(values)
    # Half a surrogate pair stays an escape; the rest is as good as any editor's.
    return text.replace(f'"{_DEEP}"', "[" * _ABYSS + "]" * _ABYSS).encode()


def _cut(given: tuple[bytes, int, float, bytes]) -> bytes:
    raw, kind, share, noise = given
    place = int(share * len(raw))
    ways = (
        raw[:place], raw[:place] + noise + raw[place + len(noise) :], raw[:place] + noise + raw[place:],
        b"\xef\xbb\xbf" + raw, raw + raw, raw.decode().encode("utf-16"), b"", noise,
    )  # fmt: skip
    return ways[kind]


def sentence(error: object) -> None:
    """One line that can be printed, whatever was in the file, and that nobody has to scroll through."""
    text = str(error)
    text.encode()
    assert text
    assert len(text) < 3000


@contextmanager
def one_sentence():
    """What a reader may say of a file in place of taking it; anything else is a failure."""
    try:
        yield
    except RocmSdError as error:
        sentence(error)
