"""Reshapes whose target is known but for one size: [0, -1, 320] in place of shapes that are computed at every call.

Of a target with more unknown sizes, those that an axis keeps are 0: a batch that stays is asked for nowhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from rocm_sd.onnx.fusions.editing import Editor, dims, made_by

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["fuse"]

_Size = int | str | None


def fuse(editor: Editor) -> None:
    """It is no fusion that is counted: it clears what a fused graph has no need of."""
    known: dict[tuple[int, ...], ir.Value] = {}

    def constant(*sizes: int) -> ir.Value:
        if sizes not in known:
            known[sizes] = editor.constant("sizes", np.asarray(sizes, np.int64))
        return known[sizes]

    for node in editor.nodes("Reshape"):
        target = _target(dims(node.inputs[0]), dims(node.outputs[0]))
        shape = node.inputs[1]
        if not target or shape is None or shape.const_value is not None:
            continue
        if target.count(-1) <= 1:
            sizes = constant(*target)
        else:
            joined = made_by(shape, "Concat")
            if joined is None or len(joined.inputs) != len(target) or 0 not in target:
                continue
            parts = [constant(0) if size == 0 else part for part, size in zip(joined.inputs, target, strict=True)]
            sizes = editor.add(node, "Concat", parts, {"axis": 0}, like=shape).outputs[0]
        node.replace_input_with(1, sizes)
        node.attributes["allowzero"] = ir.AttrInt64("allowzero", 0)
    editor.clean()


def _target(before: Sequence[_Size], after: Sequence[_Size]) -> tuple[int, ...]:
    """0: the size of the same axis before. -1: any."""
    found = []
    for axis, size in enumerate(after):
        if isinstance(size, int) and size > 0:
            found.append(size)
        elif size is not None and axis < len(before) and before[axis] == size:
            found.append(0)
        else:
            found.append(-1)
    return tuple(found)
