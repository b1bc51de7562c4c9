"""Kernels and configs that are made of others by one small change: what is proposed where no language model is asked.

    kernel_mutations(text)                  # of functions of Triton: (what was changed, the new text)
    config_mutations(op, bucket, config)    # of numbers: (what was changed, the new config)

A change is made on the syntax tree and written back into the text at its place, so that all else stays as somebody
wrote it. Nobody claims that a change is right or faster: the proof ladder and the model say so, or refuse it.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rocm_sd.kernels.config import Config

__all__ = ["KINDS", "config_mutations", "kernel_mutations"]

_LOOPS = {"range", "tl.range", "tl.static_range"}


@dataclass(frozen=True)
class _Edit:
    """Replace the text of a node."""

    node: ast.AST
    text: str


def kernel_mutations(text: str) -> Iterator[tuple[str, str]]:
    """Every single change of every kind, in the order of the text, kind by kind."""
    tree = ast.parse(text)
    for name, kind in KINDS.items():
        for function in tree.body:
            if not isinstance(function, ast.FunctionDef):
                continue
            for edits in kind(function, text):
                changed = _applied(text, edits)
                if changed != text:
                    yield f"{name}: {function.name}, line {_line(edits, function)}", changed


def config_mutations(config: Config) -> Iterator[tuple[str, dict[str, int]]]:
    """Each number doubled and halved; those from 0 to 3 are switches and counts, and go up and down by one."""
    values = config.to_dict()
    for name, value in values.items():
        for changed in sorted({value * 2, value // 2} if value > 3 else {value + 1, value - 1}):
            if changed >= 0 and changed != value:
                yield f"config: {name} {value} to {changed}", {**values, name: changed}
    # A tile that changes its shape and keeps its size.
    names = [each.name for each in fields(config) if values[each.name] > 3]
    for one in names:
        for other in names:
            if one != other and values[other] % 2 == 0:
                yield (
                    f"config: {one} doubled, {other} halved",
                    {**values, one: values[one] * 2, other: values[other] // 2},
                )


def _line(edits: tuple[_Edit, ...], function: ast.FunctionDef) -> int:
    return int(getattr(edits[0].node, "lineno", function.lineno)) - function.lineno + 1


def _applied(text: str, edits: tuple[_Edit, ...]) -> str:
    given = text
    for edit in sorted(edits, key=lambda each: (-each.node.lineno, -each.node.col_offset)):  # type: ignore[attr-defined]
        first, last = _place(edit.node, given)
        text = text[:first] + edit.text + text[last:]
    return text


def _source(node: ast.AST, text: str) -> str:
    first, last = _place(node, text)
    return text[first:last]


def _place(node: Any, text: str) -> tuple[int, int]:
    """Where the text of a node begins and ends."""
    lines, starts = _lines(text)

    def at(line: int, column: int) -> int:
        # Columns of a syntax tree are bytes of UTF-8.
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    return at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)


@lru_cache(maxsize=4)
def _lines(text: str) -> tuple[list[str], list[int]]:
    """The lines, and where each begins."""
    lines = text.split("\n")
    return lines, list(accumulate((len(line) + 1 for line in lines), initial=0))


def _named(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == name


def _loops(function: ast.FunctionDef, text: str) -> Iterator[tuple[_Edit, ...]]:
    """Unrolled where the compiler may know the count, kept as loops, unrolled by two, or with more stages under way."""
    for node in ast.walk(function):
        if not isinstance(node, ast.For) or not isinstance(node.iter, ast.Call):
            continue
        called, bounds = ast.unparse(node.iter.func), ", ".join(_source(each, text) for each in node.iter.args)
        if called not in _LOOPS:
            continue
        forms = {
            "tl.static_range": f"tl.static_range({bounds})", "range": f"range({bounds})",
            "stages": f"tl.range({bounds}, num_stages=3)", "unroll": f"tl.range({bounds}, loop_unroll_factor=2)",
        }  # fmt: skip
        forms.pop(called, None)
        for form in forms.values():
            yield (_Edit(node.iter, form),)


def _nested(function: ast.FunctionDef, text: str) -> Iterator[tuple[_Edit, ...]]:
    """A loop within a loop, and nothing beside it: which of them is the outer one."""
    for node in ast.walk(function):
        if isinstance(node, ast.For) and len(node.body) == 1 and isinstance(inner := node.body[0], ast.For):
            yield (
                _Edit(node.target, _source(inner.target, text)), _Edit(node.iter, _source(inner.iter, text)),
                _Edit(inner.target, _source(node.target, text)), _Edit(inner.iter, _source(node.iter, text)),
            )  # fmt: skip


def _masks(function: ast.AST, text: str) -> Iterator[tuple[_Edit, ...]]:
    """A load or a store of all lanes: right only where none lies outside, which rung 4 sees."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"tl.load", "tl.store"}:
            kept = [_source(each, text) for each in node.args]
            kept += [
                f"{each.arg}={_source(each.value, text)}" for each in node.keywords if each.arg not in {"mask", "other"}
            ]
            if len(kept) < len(node.args) + len(node.keywords):
                yield (_Edit(node, f"{_source(node.func, text)}({', '.join(kept)})"),)


def _split(function: ast.FunctionDef, text: str) -> Iterator[tuple[_Edit, ...]]:
    """A loop in two: all turns but the last one, or but the rest of a step, without masks, and then that one with them.

    It is right where masks of the loop are for its end alone.
    """
    for node in ast.walk(function):
        if not isinstance(node, ast.For) or not isinstance(node.iter, ast.Call) or node.orelse:
            continue
        # An unrolled loop has nothing to split: its compiler sees each turn.
        called = ast.unparse(node.iter.func)
        if called not in {"range", "tl.range"} or not 1 <= len(node.iter.args) <= 3:
            continue
        unmasked = [edit for edits in _masks(ast.Module(node.body, []), text) for edit in edits]
        if not unmasked or _are_nested(unmasked):
            continue
        bounds = [_source(each, text) for each in node.iter.args]
        begin, end, step = ["0", *bounds, "1"] if len(bounds) == 1 else [*bounds, "1"][:3]
        more = "".join(f", {each.arg}={_source(each.value, text)}" for each in node.iter.keywords)
        middle = f"tl.maximum(({end}) - 1, {begin})"
        if step != "1":
            middle = f"({begin}) + (({end}) - ({begin})) // ({step}) * ({step})"
        # Where it is all one step: nothing stands before the last turn.
        whole = _Edit(node.iter, f"{called}({begin}, {middle}, {step}{more})")
        rest = _Edit(node.iter, f"{called}({middle}, {end}, {step}{more})")
        before, after = (_edited(node, text, edits) for edits in ((whole, *unmasked), (rest,)))
        yield (_Edit(node, f"{before}\n{' ' * node.col_offset}{after}"),)


def _are_nested(edits: list[_Edit]) -> bool:
    """A load whose address is another load: one would be written over the other."""
    return any(one.node is not other.node and other.node in ast.walk(one.node) for one in edits for other in edits)


def _edited(node: ast.AST, text: str, edits: tuple[_Edit, ...]) -> str:
    """The node's text, with edits within it."""
    changed = _applied(text, edits)
    first, last = _place(node, text)
    return changed[first : last + len(changed) - len(text)]


def _hints(function: ast.FunctionDef, text: str) -> Iterator[tuple[_Edit, ...]]:
    """What the compiler may take for granted of indices: wider accesses, where it did not find out by itself."""
    for node in ast.walk(function):
        if _named(node, "tl.arange") and isinstance(node, ast.Call):
            inner, size = _source(node, text), _source(node.args[1], text)
            yield (_Edit(node, f"tl.max_contiguous(tl.multiple_of({inner}, {size}), {size})"),)


def _arithmetic(function: ast.FunctionDef, text: str) -> Iterator[tuple[_Edit, ...]]:
    """The same value by other instructions, rounded otherwise: the gate of numbers says whether that is as exact."""
    for node in ast.walk(function):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and isinstance(node.left, ast.BinOp):
            if isinstance(node.left.op, ast.Mult):
                factors = f"{_source(node.left.left, text)}, {_source(node.left.right, text)}"
                yield (_Edit(node, f"tl.fma({factors}, {_source(node.right, text)})"),)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            numerator, denominator = _source(node.left, text), _source(node.right, text)
            if _named(node.right, "tl.sqrt") and isinstance(node.right, ast.Call):
                yield (_Edit(node, f"({numerator} * tl.rsqrt({_source(node.right.args[0], text)}))"),)
            yield (_Edit(node, f"({numerator} * (1.0 / ({denominator})))"),)
        elif _named(node, "tl.div_rn") and isinstance(node, ast.Call):
            yield (_Edit(node, f"(({_source(node.args[0], text)}) / ({_source(node.args[1], text)}))"),)
        elif _named(node, "tl.sqrt") and isinstance(node, ast.Call):
            yield (_Edit(node, f"tl.sqrt_rn({_source(node.args[0], text)})"),)


def _order(function: ast.FunctionDef, text: str) -> Iterator[tuple[_Edit, ...]]:
    """Two neighbours neither of which uses what the other makes change places: loads begin earlier."""
    for block in ast.walk(function):
        body = getattr(block, "body", None)
        for one, other in pairwise(body if isinstance(body, list) else []):
            if not all(isinstance(each, (ast.Assign, ast.AugAssign)) for each in (one, other)):
                continue
            if one.end_lineno == other.lineno or one.col_offset != other.col_offset:
                continue
            if _written(one).isdisjoint(_used(other)) and _written(other).isdisjoint(_used(one)):
                yield _Edit(one, _source(other, text)), _Edit(other, _source(one, text))


def _written(statement: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _used(statement: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}


KINDS: Mapping[str, Callable[[ast.FunctionDef, str], Iterator[tuple[_Edit, ...]]]] = {
    "loop": _loops,
    "loop order": _nested,
    "split": _split,
    "mask": _masks,
    "hint": _hints,
    "arithmetic": _arithmetic,
    "order": _order,
}
