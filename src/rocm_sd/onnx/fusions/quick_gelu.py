"""x * sigmoid(1.702 * x), by com.microsoft's QuickGelu: the activation of CLIP's text encoders."""

from __future__ import annotations

from rocm_sd.onnx.fusions.editing import Editor, made_by, number, only_user

__all__ = ["NAME", "fuse"]

NAME = "QuickGelu"


def fuse(editor: Editor) -> None:
    for sigmoid in editor.nodes("Sigmoid"):
        scaled = made_by(sigmoid.inputs[0], "Mul")
        alpha = number(scaled.inputs[1]) if scaled is not None else None
        product = only_user(sigmoid.outputs[0], "Mul")
        if scaled is None or alpha is None or product is None or scaled.inputs[0] not in product.inputs:
            continue
        out = product.outputs[0]
        made = editor.fused(product, "QuickGelu", [scaled.inputs[0]], {"alpha": alpha}, like=out)
        editor.replace(out, made.outputs[0])
        editor.count(NAME)
    editor.clean()
