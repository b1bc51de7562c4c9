"""What both halves of guidance have in common is computed once: `sample` may have half the pictures that the text has.

Guidance hands a UNet each picture twice, with the text and without it. Until the first value that depends on the text
(or on SDXL's added conditions), both halves compute the same. There what they share is repeated along the batch, as
often as the text has more rows than the sample: once, where a call has as many of both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from rocm_sd.onnx.fusions.editing import Editor, dims
from rocm_sd.onnx.layout import GUIDED_BATCH

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["NAME", "fuse"]

NAME = "SharedGuidance"
_SAMPLE, _TEXT, _SHARED = "sample", "encoder_hidden_states", {"sample", "timestep"}


def fuse(editor: Editor) -> None:
    inputs = {value.name: value for value in editor.graph.inputs}
    if not editor.ops.shared_guidance or not {_SAMPLE, _TEXT} <= inputs.keys():
        return
    sample, text = inputs[_SAMPLE], inputs[_TEXT]
    batch = dims(sample)[:1]
    guided = _reached(editor, [value for name, value in inputs.items() if name not in _SHARED])
    border = _border(editor, guided, _reached(editor, [sample], but_sizes_of_rows=True))
    if not isinstance(batch[0], str) or any(dims(value)[:1] != batch for value in border):
        return
    first = editor.graph[0]
    rows = [editor.add(first, "Shape", [value], {"start": 0, "end": 1}).outputs[0] for value in (text, sample)]
    times = editor.add(first, "Div", rows).outputs[0]
    for value in border:
        _repeat(editor, value, times, guided)
    _rename(guided, batch[0])
    editor.count(NAME)
    editor.clean()


def _reached(editor: Editor, begin: Iterable[ir.Value], *, but_sizes_of_rows: bool = False) -> dict[ir.Value, None]:
    """What is computed from these values; with `but_sizes_of_rows`, not by way of heights, widths and channels."""
    found = dict.fromkeys(begin)
    for node in editor.graph:
        if but_sizes_of_rows and node.op_type == "Shape" and node.attributes.get_int("start", 0) > 0:
            continue
        if any(value in found for value in node.inputs if value is not None):
            found.update(dict.fromkeys(node.outputs))
    return found


def _border(editor: Editor, guided: dict[ir.Value, None], carried: dict[ir.Value, None]) -> list[ir.Value]:
    """Values of the sample's batch that meet values of the text's."""
    met = (
        value
        for node in editor.graph
        if any(value in guided for value in node.inputs)
        for value in node.inputs
        if value in carried and value not in guided
    )
    return [value for value in dict.fromkeys(met) if value is not None]


def _repeat(editor: Editor, value: ir.Value, times: ir.Value, guided: dict[ir.Value, None]) -> None:
    users = [(user, index) for user, index in value.uses() if any(output in guided for output in user.outputs)]
    before, ones = users[0][0], np.ones(len(dims(value)) - 1, np.int64)
    repeats = editor.add(before, "Concat", [times, editor.constant("ones", ones)], {"axis": 0}).outputs[0]
    repeated = editor.add(before, "Tile", [value, repeats], like=value).outputs[0]
    guided[repeated] = None
    for user, index in users:
        user.replace_input_with(index, repeated)


def _rename(guided: Iterable[ir.Value], batch: str) -> None:
    """A runtime that takes two batches of one name for one size would put the larger where the smaller fits."""

    def renamed(size: int | str | None) -> int | str | None:
        if size == batch:
            return GUIDED_BATCH
        return None if isinstance(size, str) and batch in size else size

    for value in guided:
        if value.shape is not None:
            value.shape = ir.Shape([renamed(size) for size in dims(value)])
