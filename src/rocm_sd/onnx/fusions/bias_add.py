"""x + bias + skip, by com.microsoft's BiasAdd: the residual at the end of a transformer, after which no norm stands."""

from __future__ import annotations

from rocm_sd.onnx.fusions.editing import Editor, alike, dims
from rocm_sd.onnx.fusions.skip_layer_norm import biased

__all__ = ["NAME", "fuse"]

NAME = "BiasAdd"


def fuse(editor: Editor) -> None:
    """After skip_layer_norm, which takes the sums that a norm follows."""
    for add in editor.nodes("Add"):
        first, second = add.inputs
        if len(dims(first)) != 3 or not alike(first, second):
            continue
        for one, skip in ((first, second), (second, first)):
            x, bias = biased(one)
            if bias is not None:
                native = dims(bias)[0] in editor.ops.bias_add
                made = editor.fused(add, "BiasAdd", [x, bias, skip], native=native, like=add.outputs[0])
                editor.replace(add.outputs[0], made.outputs[0])
                editor.count(NAME)
                break
    editor.clean()
