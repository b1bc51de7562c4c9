"""A 3x3 convolution of a picture that was enlarged twofold by repeating pixels, as four 2x2 ones of the small picture.

A row of the large picture that is even sees the small rows i - 1, i, i, an odd one i, i, i + 1: two of the three taps
fall on one pixel, and their weights add up. So it is for columns. Each of the four parities has a kernel of 2x2, four
ninths of the multiplications in all; their results are interleaved. The algebra is exact, and sums of weights are
taken in float64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rocm_sd.onnx.fusions.editing import Editor, only_user, small_array, static_shape, weight

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray

__all__ = ["NAME", "fuse", "parity_kernel"]

NAME = "UpsampleConv"
# By parity: which of the three taps fall on the first pixel, and which on the second.
_TAPS = (((0,), (1, 2)), ((0, 1), (2,)))


def fuse(editor: Editor) -> None:
    for resize in editor.nodes("Resize"):
        conv = only_user(resize.outputs[0], "Conv")
        if conv is not None and _doubles(resize) and _fits(conv):
            _replace(editor, resize, conv)
            editor.count(NAME)
    editor.clean()


def _doubles(resize: ir.Node) -> bool:
    scales = small_array(resize.inputs[2]) if len(resize.inputs) > 2 else None
    if scales is None or scales.tolist() != [1, 1, 2, 2]:
        return False
    ways = {"mode": "nearest", "nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}
    return all(name in resize.attributes and resize.attributes[name].as_string() == way for name, way in ways.items())


def _fits(conv: ir.Node) -> bool:
    shape = static_shape(conv.inputs[1])
    if shape is None or shape[2:] != (3, 3) or len(conv.inputs) != 3 or weight(conv.inputs[1]) is None:
        return False
    wanted = {"pads": (1, 1, 1, 1), "strides": (1, 1), "dilations": (1, 1)}
    ints = all(name in conv.attributes and tuple(conv.attributes[name].as_ints()) == w for name, w in wanted.items())
    return ints and ("group" not in conv.attributes or conv.attributes["group"].as_int() == 1)


def parity_kernel(kernel: NDArray[Any], rows: int, columns: int) -> NDArray[Any]:
    """[O, I, 3, 3] -> [O, I, 2, 2], of the rows and columns of this parity (0 even, 1 odd)."""
    exact = kernel.astype(np.float64)
    by_rows = np.stack([exact[:, :, list(taps)].sum(2) for taps in _TAPS[rows]], axis=2)
    return np.stack([by_rows[:, :, :, list(taps)].sum(3) for taps in _TAPS[columns]], axis=3)


def _replace(editor: Editor, resize: ir.Node, conv: ir.Node) -> None:
    kernel, bias = conv.inputs[1:]
    assert kernel is not None
    tensor, shape = kernel.const_value, static_shape(kernel)
    assert tensor is not None
    assert shape is not None
    kernels = []
    for rows in (0, 1):
        for columns in (0, 1):

            def of_parity(whole: NDArray[Any], rows: int = rows, columns: int = columns) -> NDArray[Any]:
                return parity_kernel(whole, rows, columns)

            kernels.append(editor.derived(f"{kernel.name}_parity", [tensor], of_parity, (*shape[:2], 2, 2)))
    out = conv.outputs[0]
    made = editor.fused(conv, NAME, [resize.inputs[0], *kernels, bias], like=out)
    editor.replace(out, made.outputs[0])
