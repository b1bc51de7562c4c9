"""layer_norm(x + skip) and x + skip itself, by com.microsoft's SkipLayerNormalization; with the bias of x's linear.

x, skip: [batch, sequence, width], of one shape: a sum that broadcasts (the embeddings of a text encoder) is none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_sd.onnx.fusions.editing import Editor, alike, dims, made_by, weight

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["NAME", "biased", "fuse"]

NAME = "SkipLayerNorm"


def fuse(editor: Editor) -> None:
    for norm in editor.nodes("LayerNormalization"):
        add = made_by(norm.inputs[0], "Add")
        if add is not None and _is_residual(add) and len(norm.inputs) == 3:
            _replace(editor, norm, add)
            editor.count(NAME)
    editor.clean()


def _is_residual(add: ir.Node) -> bool:
    first, second = add.inputs
    return len(dims(first)) == 3 and alike(first, second) and first is not second


def _replace(editor: Editor, norm: ir.Node, add: ir.Node) -> None:
    first, second = add.inputs
    x, skip, bias = first, second, None
    for one, other in ((first, second), (second, first)):
        product, found = biased(one)
        if found is not None:
            x, skip, bias = product, other, found
            break
    gamma, beta = norm.inputs[1:]
    attributes = {"epsilon": norm.attributes["epsilon"].as_float()}
    total = add.outputs[0]
    native = "SkipLayerNormalization" in editor.ops.native
    inputs = [x, skip, gamma, beta] + ([bias] if bias is not None else [])
    # The kernel's second and third outputs, mean and deviation, are left out: only training has them.
    made = editor.fused(
        norm,
        "SkipLayerNormalization",
        inputs,
        attributes,
        function="SkipLayerNormalization" if bias is None else "SkipBiasLayerNormalization",
        outputs=4 if native else 2,
        like=norm.outputs[0],
    )
    for unused in made.outputs[1:-1]:
        unused.name = ""
    made.outputs[-1].type, made.outputs[-1].shape = total.type, total.shape
    editor.replace(norm.outputs[0], made.outputs[0])
    editor.replace(total, made.outputs[-1])


def biased(value: ir.Value | None) -> tuple[ir.Value | None, ir.Value | None]:
    """x and bias of x @ weights + bias, which nobody else takes; else the value and None."""
    add = made_by(value, "Add")
    if add is None or value is None or len(value.uses()) != 1 or value.is_graph_output():
        return value, None
    for one, other in (tuple(add.inputs), tuple(add.inputs)[::-1]):
        if made_by(one, "MatMul") is not None and weight(other) is not None and len(dims(other)) == 1:
            return one, other
    return value, None
