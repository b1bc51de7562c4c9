"""value * gelu(gate), [value, gate] = x + bias, by com.microsoft's BiasSplitGelu; x: [batch, sequence, 2 * width]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocm_sd.onnx.fusions.editing import Editor, made_by, number, only_user, static_shape, weight
from rocm_sd.onnx.fusions.skip_layer_norm import biased

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["NAME", "fuse"]

NAME = "BiasSplitGelu"


def fuse(editor: Editor) -> None:
    for node in editor.nodes("Gelu", "Erf"):
        site = _site(node)
        if site is not None:
            editor.replace(site.out, _fused(editor, site))
            editor.count(NAME)
    editor.clean()


@dataclass
class _Site:
    x: ir.Value
    bias: ir.Value
    out: ir.Value


def _site(node: ir.Node) -> _Site | None:
    gate, opened = _exact(node) if node.op_type == "Gelu" else _by_erf(node)
    split = made_by(gate, "Split")
    product = only_user(opened, "Mul") if opened is not None else None
    if split is None or product is None or len(split.outputs) != 2 or gate is not split.outputs[1]:
        return None
    if split.outputs[0] not in product.inputs:
        return None
    x, bias = biased(split.inputs[0])
    return None if x is None or bias is None else _Site(x, bias, product.outputs[0])


def _exact(gelu: ir.Node) -> tuple[ir.Value | None, ir.Value | None]:
    way = gelu.attributes.get("approximate")
    return (gelu.inputs[0], gelu.outputs[0]) if way is None or way.as_string() == "none" else (None, None)


def _by_erf(erf: ir.Node) -> tuple[ir.Value | None, ir.Value | None]:
    """x and x * 0.5 * (1 + erf(x / sqrt(2))), as it is exported before opset 20."""
    scaled = made_by(erf.inputs[0], "Div")
    above = only_user(erf.outputs[0], "Add")
    halved = only_user(above.outputs[0], "Mul") if above is not None else None
    product = only_user(halved.outputs[0], "Mul") if halved is not None else None
    if scaled is None or halved is None or product is None:
        return None, None
    x, root, half = scaled.inputs[0], number(scaled.inputs[1]), [number(each) for each in halved.inputs]
    if root is None or abs(root - 2**0.5) > 1e-3 or 0.5 not in half or x not in product.inputs:
        return None, None
    return x, product.outputs[0]


def _fused(editor: Editor, site: _Site) -> ir.Value:
    before, width = site.out.producer(), static_shape(site.bias)
    assert before is not None
    assert width is not None
    project = made_by(site.x, "MatMul")
    assert project is not None
    weights, shape = weight(project.inputs[1]), static_shape(project.inputs[1])
    if not editor.ops.split_weights or weights is None or shape is None:
        native = width[0] in editor.ops.split_gelu
        return editor.fused(before, NAME, [site.x, site.bias], native=native, like=site.out).outputs[0]
    half, biases = width[0] // 2, weight(site.bias)
    assert biases is not None
    inputs = [
        project.inputs[0],
        editor.derived("value", [weights], lambda both: both[:, :half], [shape[0], half]),
        editor.derived("gate", [weights], lambda both: both[:, half:], [shape[0], half]),
        editor.derived("value_bias", [biases], lambda both: both[:half], [half]),
        editor.derived("gate_bias", [biases], lambda both: both[half:], [half]),
    ]
    return editor.fused(before, "MatMulBiasSplitGelu", inputs, like=site.out).outputs[0]
