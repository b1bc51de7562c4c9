"""group_norm(x), and silu of it where that follows; x: [N, C, H, W] or, in the VAE's attention, [N, C, H * W].

The exporter writes it as an instance norm over groups, two shapes, a product and a sum. With kernels that want the
channels last, `channels_last` turns it round; until then it is a node of its own in NCHW.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from rocm_sd.onnx.fusions.editing import Editor, dims, is_filled_with, lazy, made_by, only_user, through, weight

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["NAME", "fuse", "vector"]

NAME = "GroupNorm"


def fuse(editor: Editor) -> None:
    for node in editor.nodes("InstanceNormalization", "GroupNormalization"):
        if _fuse_one(editor, node):
            editor.count(NAME)
    editor.clean()


def _fuse_one(editor: Editor, norm: ir.Node) -> bool:
    found = _by_group(norm) if norm.op_type == "InstanceNormalization" else _direct(norm)
    if found is None:
        return False
    x, gamma, beta, groups, out = found
    silu = _silu_of(out)
    last = out if silu is None else silu
    before = last.producer()
    assert before is not None
    # Per group the order of the pixels is all the same: the norm moves before the reshape to [N, C, H * W].
    flat = made_by(x, "Reshape") if len(dims(x)) == 3 else None
    source = flat.inputs[0] if flat is not None else x
    if flat is not None and (source is None or len(dims(source)) != 4 or dims(source)[1] != dims(x)[1]):
        return False
    assert source is not None
    attributes = {
        "groups": groups,
        "epsilon": norm.attributes["epsilon"].as_float(),
        "activation": int(silu is not None),
        "channels_last": 0,
    }
    vectors = [vector(editor, value) for value in (gamma, beta)]
    # The kernels take NHWC; channels_last.py makes theirs of this one.
    name = "GroupNormSiLU" if silu is not None else "GroupNorm"
    made = editor.fused(
        before, "GroupNorm", [source, *vectors], attributes, function=name, native=False, like=source
    ).outputs[0]
    if flat is not None:
        made = editor.add(before, "Reshape", [made, flat.inputs[1]], {"allowzero": 1}, like=x).outputs[0]
    editor.replace(last, made)
    return True


_Found = tuple[ir.Value, ir.Value, ir.Value, int, ir.Value]


def _by_group(norm: ir.Node) -> _Found | None:
    grouped = made_by(through(norm.inputs[0], "Cast"), "Reshape")
    groups = dims(norm.inputs[0])
    if grouped is None or len(groups) != 3 or not isinstance(groups[1], int):
        return None
    if not is_filled_with(norm.inputs[1], 1) or not is_filled_with(norm.inputs[2], 0):
        return None
    value = _after(norm.outputs[0], "Reshape")
    scaled = _after(value, "Mul")
    shifted = _after(scaled, "Add")
    x = through(grouped.inputs[0], "Cast")
    if x is None or scaled is None or shifted is None:
        return None
    gamma, beta = _constant_of(scaled), _constant_of(shifted)
    if gamma is None or beta is None:
        return None
    return x, gamma, beta, groups[1], _uncast(shifted)


def _direct(norm: ir.Node) -> _Found | None:
    x, gamma, beta = norm.inputs
    if x is None or gamma is None or beta is None or weight(gamma) is None or weight(beta) is None:
        return None
    return x, gamma, beta, norm.attributes["num_groups"].as_int(), norm.outputs[0]


def _after(value: ir.Value | None, op: str) -> ir.Value | None:
    """The output of the op that alone takes the value, casts left out."""
    if value is None:
        return None
    node = only_user(_uncast(value), op)
    return node.outputs[0] if node is not None else None


def _uncast(value: ir.Value) -> ir.Value:
    cast = only_user(value, "Cast")
    return value if cast is None else cast.outputs[0]


def _constant_of(value: ir.Value) -> ir.Value | None:
    node = value.producer()
    assert node is not None
    return next((each for each in node.inputs if each is not None and each.const_value is not None), None)


def _silu_of(value: ir.Value) -> ir.Value | None:
    """x * sigmoid(x), where nobody takes x besides."""
    users = [user for user, _ in value.uses()]
    sigmoid = next((user for user in users if user.op_type == "Sigmoid"), None)
    product = only_user(sigmoid.outputs[0], "Mul") if sigmoid is not None else None
    if product is None or {sigmoid, product} != set(users) or value.is_graph_output():
        return None
    return product.outputs[0]


def vector(editor: Editor, value: ir.Value) -> ir.Value:
    """Of one element a channel, and in float32, which is what the kernels take beside half activations, too."""
    tensor = value.const_value
    assert tensor is not None

    def flat() -> NDArray[Any]:
        return np.asarray(tensor.numpy()).reshape(-1).astype(np.float32)

    name = editor.fresh(f"{value.name}_channels")
    return editor.initializer(lazy(flat, ir.DataType.FLOAT, [tensor.size], name))
