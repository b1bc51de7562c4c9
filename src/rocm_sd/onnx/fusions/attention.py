"""softmax(scale * Q K^T + mask) V over heads, as com.microsoft's MultiHeadAttention.

Q, K and V: [batch, sequence, heads * head]. A causal mask becomes `unidirectional`; another one is the attention bias.
Where the provider heeds no mask, attention with one stays as it is; where it adds no biases of Q, K and V, they
are added before it. Where the provider takes them packed, the weights of Q, K and V (or of K and V, in cross-attention)
become one matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rocm_sd.onnx.fusions.editing import CONTRIB, Editor, dims, made_by, number, only_user, small_array, through, weight

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray

__all__ = ["NAME", "fuse"]

NAME = "Attention"
_HEADS_FIRST = [0, 2, 1, 3]


@dataclass
class _Linear:
    """x @ weights + bias"""

    x: ir.Value
    weights: ir.Value
    bias: ir.Value | None


@dataclass
class _Site:
    q: ir.Value
    k: ir.Value
    v: ir.Value
    heads: int
    head: int
    scale: float
    mask: ir.Value | None
    out: ir.Value


def fuse(editor: Editor) -> None:
    for node in editor.nodes("MatMul"):
        site = _site(node)
        if site is not None and (site.mask is None or editor.ops.masked):
            _replace(editor, site)
            editor.count(NAME)
    editor.clean()


def _site(weigh: ir.Node) -> _Site | None:
    """The attention whose last product, probabilities by values, is this node."""
    probabilities, values = weigh.inputs
    softmax = made_by(_unguarded(through(probabilities, "Cast")), "Softmax")
    v = _heads(values)
    out = _merged(weigh.outputs[0])
    if softmax is None or v is None or out is None:
        return None
    scores, mask = _unmasked(through(softmax.inputs[0], "Cast"))
    scores, outer = _unscaled(scores)
    product = made_by(scores, "MatMul")
    if product is None:
        return None
    q_scaled, q_scale = _unscaled(product.inputs[0])
    k_scaled, k_scale = _unscaled(product.inputs[1])
    q, k = _heads(q_scaled), _heads(_untransposed(k_scaled))
    heads, head = _sizes(q_scaled)
    if q is None or k is None or heads is None or head is None:
        return None
    return _Site(q, k, v, heads, head, _exact_scale(outer * q_scale * k_scale, head), mask, out)


def _exact_scale(scale: float, head: int) -> float:
    """Its square root was rounded, twice where the model is in half precision."""
    usual = head**-0.5
    return usual if abs(scale / usual - 1) < 2**-9 else scale


def _unguarded(value: ir.Value | None) -> ir.Value | None:
    """The exporter's guard of rows that are masked whole: where(is_nan(p), 0, p)."""
    guard = made_by(value, "Where")
    return guard.inputs[2] if guard is not None and made_by(guard.inputs[0], "IsNaN") is not None else value


def _unmasked(value: ir.Value | None) -> tuple[ir.Value | None, ir.Value | None]:
    add = made_by(value, "Add")
    return (value, None) if add is None else (add.inputs[0], add.inputs[1])


def _unscaled(value: ir.Value | None) -> tuple[ir.Value | None, float]:
    scale = 1.0
    value = through(value, "Cast")
    while (node := made_by(value, "Mul", "Div")) is not None:
        by = number(node.inputs[1])
        if by is None:
            break
        scale *= by if node.op_type == "Mul" else 1 / by
        value = through(node.inputs[0], "Cast")
    return value, scale


def _untransposed(value: ir.Value | None) -> ir.Value | None:
    """K of K^T: [batch, heads, sequence, head]."""
    outer = made_by(value, "Reshape")
    node = made_by(outer.inputs[0] if outer is not None else value, "Transpose")
    if node is None:
        return None
    perm = node.attributes["perm"].as_ints()
    if list(perm) == [0, 1, 3, 2]:
        return node.inputs[0]
    inner = made_by(node.inputs[0], "Reshape")
    return inner.inputs[0] if outer is not None and list(perm) == [0, 2, 1] and inner is not None else None


def _heads(value: ir.Value | None) -> ir.Value | None:
    """[batch, sequence, width] of what was split into heads."""
    node = made_by(through(value, "Cast"), "Transpose")
    if node is None or list(node.attributes["perm"].as_ints()) != _HEADS_FIRST:
        return None
    split = made_by(node.inputs[0], "Reshape")
    return split.inputs[0] if split is not None and len(dims(split.inputs[0])) == 3 else None


def _sizes(value: ir.Value | None) -> tuple[int | None, int | None]:
    sizes = dims(value)
    heads, head = (sizes[1], sizes[3]) if len(sizes) == 4 else (None, None)
    return heads if isinstance(heads, int) else None, head if isinstance(head, int) else None


def _merged(value: ir.Value) -> ir.Value | None:
    """[batch, sequence, width] into which the heads are put together again."""
    cast = only_user(value, "Cast")
    node = only_user(cast.outputs[0] if cast is not None else value, "Transpose")
    if node is None or list(node.attributes["perm"].as_ints()) != _HEADS_FIRST:
        return None
    merge = only_user(node.outputs[0], "Reshape")
    return merge.outputs[0] if merge is not None and len(dims(merge.outputs[0])) == 3 else None


def _replace(editor: Editor, site: _Site) -> None:
    before = site.out.producer()
    assert before is not None
    attributes: dict[str, Any] = {"num_heads": site.heads, "scale": site.scale}
    linears = [_linear(value) for value in (site.q, site.k, site.v)]
    q, k, v = linears
    bias = None
    if site.mask is not None:
        if _is_causal(site.mask):
            attributes["unidirectional"] = 1
        else:
            bias = site.mask
    elif editor.ops.packed and editor.half and q is not None and k is not None and v is not None and k.x is v.x:
        if q.x is k.x:
            packed = _packed(editor, site, before, [q, k, v])
            node = _attend(editor, "PackedQKV", before, [packed], attributes, site.out)
        else:
            packed = _packed(editor, site, before, [k, v])
            node = _attend(editor, "PackedKV", before, [site.q, packed], attributes, site.out)
        editor.replace(site.out, node.outputs[0])
        return
    inputs: list[ir.Value | None] = [site.q, site.k, site.v]
    biases = [each.bias.const_value if each is not None and each.bias is not None else None for each in linears]
    if editor.ops.qkv_bias and all(each is not None for each in biases):
        inputs = [_product(value) for value in inputs]
        width = site.heads * site.head
        inputs.append(editor.derived("qkv_bias", [b for b in biases if b is not None], _joined, [3 * width]))
    if bias is not None:
        inputs += [None] * (5 - len(inputs)) + [bias]
    node = editor.add(before, "MultiHeadAttention", inputs, attributes, domain=CONTRIB, like=site.out)
    editor.replace(site.out, node.outputs[0])


def _joined(*arrays: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([each.reshape(-1) for each in arrays])


def _attend(
    editor: Editor, packing: str, before: ir.Node, inputs: list[ir.Value], attributes: dict[str, Any], like: ir.Value
) -> ir.Node:
    if packing in editor.ops.native:
        return editor.add(before, "MultiHeadAttention", inputs, attributes, domain=CONTRIB, like=like)
    return editor.fused(before, packing, inputs, attributes, like=like)


def _product(value: ir.Value | None) -> ir.Value | None:
    """What stands before the bias."""
    add = made_by(value, "Add")
    if add is None:
        return value
    return add.inputs[0] if made_by(add.inputs[0], "MatMul") is not None else add.inputs[1]


def _linear(value: ir.Value) -> _Linear | None:
    add = made_by(value, "Add")
    bias = None
    if add is not None:
        bias = next((each for each in add.inputs if weight(each) is not None), None)
        value = _product(value) or value
    product = made_by(value, "MatMul")
    if product is None or product.inputs[0] is None or (add is not None and bias is None):
        return None
    weights = product.inputs[1]
    if weights is None or weight(weights) is None or len(dims(weights)) != 2:
        return None
    return _Linear(product.inputs[0], weights, bias)


def _packed(editor: Editor, site: _Site, before: ir.Node, linears: list[_Linear]) -> ir.Value:
    """x @ [heads, 2 or 3, head] at once, as [batch, sequence, heads, 2 or 3, head]."""
    heads, head, many = site.heads, site.head, len(linears)

    def interleaved(*arrays: NDArray[Any]) -> NDArray[Any]:
        by_head = [each.reshape(*each.shape[:-1], heads, 1, head) for each in arrays]
        joined = np.concatenate(by_head, axis=-2)
        return joined.reshape(*arrays[0].shape[:-1], many * heads * head)

    sources = [linear.weights.const_value for linear in linears]
    width = many * heads * head
    rows = dims(linears[0].weights)[0]
    assert isinstance(rows, int)
    weights = editor.derived("packed", [s for s in sources if s is not None], interleaved, [rows, width])
    x = linears[0].x
    shape = [*dims(x)[:2], width]
    value = editor.add(before, "MatMul", [x, weights], like=x, shape=shape).outputs[0]
    biases = [linear.bias.const_value for linear in linears if linear.bias is not None]
    if len(biases) == many:
        bias = editor.derived("packed_bias", [b for b in biases if b is not None], interleaved, [width])
        value = editor.add(before, "Add", [value, bias], like=value).outputs[0]
    sizes = editor.constant("heads", np.asarray([0, 0, heads, many, head], np.int64))
    return editor.add(before, "Reshape", [value, sizes], like=value, shape=[*shape[:2], heads, many, head]).outputs[0]


def _is_causal(mask: ir.Value) -> bool:
    """Whether it lets each position see itself and those before it, and hides the others."""
    value = through(mask, "Cast", "Expand", "Identity")
    where = made_by(value, "Where")
    if where is not None:
        if number(where.inputs[1]) == 0 and (number(where.inputs[2]) or 0) <= -1e4 and _orders(where.inputs[0]):
            return True
        allowed = small_array(through(where.inputs[0], "Cast", "Expand", "Identity"))
        hidden = number(where.inputs[2])
        if allowed is None or hidden is None or number(where.inputs[1]) != 0 or hidden > -1e4:
            return False
        visible = allowed.astype(bool)
    else:
        added = small_array(value)
        if added is None or not bool(((added == 0) | (added <= -1e4)).all()):
            return False
        visible = added == 0
    if visible.ndim < 2 or visible.size != visible.shape[-1] * visible.shape[-2]:
        return False
    square = visible.reshape(visible.shape[-2:])
    return bool((square == np.tril(np.ones_like(square))).all())


def _orders(value: ir.Value | None) -> bool:
    """Whether it is key <= query, of positions that are counted from 0 when the model runs."""
    compared = made_by(through(value, "Cast", "Expand", "Identity"), "LessOrEqual")
    if compared is None:
        return False
    key, query = compared.inputs
    positions = made_by(through(key, "Unsqueeze", "Reshape"), "Range")
    if positions is None or positions is not made_by(through(query, "Unsqueeze", "Reshape"), "Range"):
        return False
    counted = number(positions.inputs[0]) == 0 and number(positions.inputs[2]) == 1
    return counted and dims(key)[-2:-1] == [1] and dims(query)[-1:] == [1]
