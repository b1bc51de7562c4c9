"""Convolutions and group norms with the channels last: NhwcConv, GroupNorm and SkipGroupNorm of com.microsoft.

Each node that can be computed in NHWC is: it takes the NHWC form of its inputs, and gives its result back by a
transpose. A node after it takes what stands before that transpose. Transposes that nobody takes are removed, so they
remain only where a layout is really needed; those that the model itself had around its attention vanish, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from rocm_sd.onnx.fusions import functions
from rocm_sd.onnx.fusions.editing import Editor, dims, made_by, only_user, small_array, static_shape, weight

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["CONV", "SKIP", "fuse"]

CONV, SKIP = "NhwcConv", "SkipGroupNorm"
_TO_LAST, _TO_FIRST = (0, 2, 3, 1), (0, 3, 1, 2)
_NORMS = ("GroupNorm", "GroupNormSiLU")
_ELEMENTWISE = ("Add", "Mul", "Sigmoid")


def fuse(editor: Editor) -> None:
    """After group_norm and upsample_conv, whose nodes it turns."""
    if not editor.ops.channels_last:
        return
    turning = _Turning(editor)
    for node in list(editor.graph):
        turning.visit(node)
    editor.clean()
    for node in editor.nodes("GroupNorm", "GroupNormNhwc", "GroupNormSiLUNhwc"):
        _take_in_sum(editor, node)
    editor.clean()


@dataclass
class _Turning:
    editor: Editor
    # NHWC by the value in NCHW.
    last: dict[ir.Value, ir.Value] = field(default_factory=dict)

    def visit(self, node: ir.Node) -> None:
        op = node.op_type
        if op == "Conv" and _is_plain(node):
            self._conv(node)
        elif op in _NORMS and node.domain == functions.DOMAIN:
            self._norm(node)
        elif op == "UpsampleConv":
            self._upsample(node)
        elif op == "Concat" and len(dims(node.outputs[0])) == 4 and node.attributes["axis"].as_int() == 1:
            self._turned(node, "Concat", [self.of(each, node) for each in node.inputs], {"axis": 3})
        elif op in _ELEMENTWISE and any(each in self.last for each in node.inputs) and _is_4d(node):
            self._turned(node, op, [self.of(each, node) for each in node.inputs])
        elif op == "Transpose":
            self._transpose(node)
        elif op == "Reshape":
            self._unflatten(node)

    def of(self, value: ir.Value | None, before: ir.Node) -> ir.Value:
        assert value is not None
        if value not in self.last:
            sizes = dims(value)
            shape = [sizes[axis] for axis in _TO_LAST]
            unsqueezed = made_by(value, "Unsqueeze")
            axes = small_array(unsqueezed.inputs[1]) if unsqueezed is not None else None
            if unsqueezed is not None and axes is not None and axes.tolist() == [2, 3]:
                # The time's embedding, one value a channel: it is never transposed.
                inner = self.editor.constant("axes", np.asarray([1, 2], np.int64))
                op, inputs, attributes = "Unsqueeze", [unsqueezed.inputs[0], inner], {}
            else:
                op, inputs, attributes = "Transpose", [value], {"perm": list(_TO_LAST)}
            made = self.editor.add(before, op, inputs, attributes, like=value, shape=shape)
            self.last[value] = made.outputs[0]
        return self.last[value]

    def _turned(
        self, node: ir.Node, op: str, inputs: list[ir.Value], attributes: dict[str, Any] | None = None, **fused: Any
    ) -> None:
        old = node.outputs[0]
        shape = [dims(old)[axis] for axis in _TO_LAST]
        add = self.editor.fused if fused else self.editor.add
        made = add(node, op, inputs, attributes, like=old, shape=shape, **fused).outputs[0]
        back = self.editor.add(node, "Transpose", [made], {"perm": list(_TO_FIRST)}, like=old).outputs[0]
        self.last[back] = made
        self.editor.replace(old, back)

    def _conv(self, node: ir.Node) -> None:
        x, kernel, *bias = node.inputs
        wanted = ("pads", "strides", "dilations", "kernel_shape")
        attributes = {name: list(node.attributes[name].as_ints()) for name in wanted if name in node.attributes}
        inputs = [
            self.of(x, node),
            self._kernel(kernel),
            bias[0] if bias and bias[0] is not None else self._zeros(kernel),
        ]
        self._turned(node, "NhwcConv", inputs, attributes, native=True)
        self.editor.count(CONV)

    def _zeros(self, kernel: ir.Value | None) -> ir.Value:
        """The bias of a convolution that has none."""
        tensor = weight(kernel)
        assert tensor is not None
        return self.editor.constant("no_bias", np.zeros(tensor.shape.numpy()[0], tensor.dtype.numpy()))

    def _kernel(self, value: ir.Value | None) -> ir.Value:
        """[O, I, H, W] -> [O, H, W, I]"""
        assert value is not None
        tensor, shape = weight(value), static_shape(value)
        assert tensor is not None
        assert shape is not None

        def moved(kernel: NDArray[Any]) -> NDArray[Any]:
            return np.transpose(kernel, _TO_LAST)

        return self.editor.derived(f"{value.name}_nhwc", [tensor], moved, [shape[axis] for axis in _TO_LAST])

    def _norm(self, node: ir.Node) -> None:
        x, gamma, beta = node.inputs
        assert gamma is not None
        assert beta is not None
        silu = node.op_type == "GroupNormSiLU"
        attributes = {
            "groups": int(node.attributes["groups"].as_ints()[0]),
            "epsilon": node.attributes["epsilon"].as_float(),
            "activation": int(silu),
            "channels_last": 1,
        }
        function = f"{node.op_type}Nhwc"
        self._turned(node, "GroupNorm", [self.of(x, node), gamma, beta], attributes, function=function)

    def _upsample(self, node: ir.Node) -> None:
        x, *kernels, bias = node.inputs
        assert bias is not None
        inputs = [self.of(x, node), *(self._kernel(each) for each in kernels), bias]
        self._turned(node, "UpsampleConvNhwc", inputs, native=False)

    def _transpose(self, node: ir.Node) -> None:
        (x,), out = node.inputs, node.outputs[0]
        assert x is not None
        perm = tuple(node.attributes["perm"].as_ints())
        if perm == _TO_LAST and x in self.last:
            self.editor.replace(out, self.last[x])
        elif perm == _TO_FIRST:
            self.last[out] = x
        elif perm == (0, 2, 1) and (flat := made_by(x, "Reshape")) is not None and flat.inputs[0] in self.last:
            # [N, C, H, W] -> [N, C, H * W] -> [N, H * W, C] of the VAE's attention
            source = flat.inputs[0]
            channels = dims(source)[1] if len(dims(source)) == 4 else None
            if isinstance(channels, int) and dims(x)[1:2] == [channels]:
                sizes = self.editor.constant("sizes", np.asarray([0, -1, channels], np.int64))
                made = self.editor.add(node, "Reshape", [self.of(source, node), sizes], like=out)
                self.editor.replace(out, made.outputs[0])

    def _unflatten(self, node: ir.Node) -> None:
        """[N, H * W, C] -> [N, C, H * W] -> [N, C, H, W], the way back from it."""
        turn = made_by(node.inputs[0], "Transpose")
        out = node.outputs[0]
        sizes = dims(out)
        if turn is None or len(sizes) != 4 or tuple(turn.attributes["perm"].as_ints()) != (0, 2, 1):
            return
        if dims(turn.outputs[0])[1:2] != sizes[1:2] or not isinstance(sizes[1], int):
            return
        order = self.editor.constant("order", np.asarray(_TO_LAST, np.int64))
        shape = self.editor.add(node, "Gather", [node.inputs[1], order], {"axis": 0}, like=node.inputs[1]).outputs[0]
        last = [sizes[axis] for axis in _TO_LAST]
        made = self.editor.add(node, "Reshape", [turn.inputs[0], shape], like=out, shape=last)
        self.last[out] = made.outputs[0]


def _is_plain(conv: ir.Node) -> bool:
    group = conv.attributes.get("group")
    padded = conv.attributes.get("auto_pad")
    return (
        len(dims(conv.inputs[1])) == 4
        and weight(conv.inputs[1]) is not None
        and (group is None or group.as_int() == 1)
        and (padded is None or padded.as_string() == "NOTSET")
    )


def _is_4d(node: ir.Node) -> bool:
    return all(len(dims(value)) == 4 for value in (*node.inputs, *node.outputs))


def _take_in_sum(editor: Editor, norm: ir.Node) -> None:
    """group_norm(x + time's embedding) as one node, where nobody takes the sum besides."""
    x, gamma, beta = norm.inputs
    add = made_by(x, "Add")
    if add is None or only_user(add.outputs[0], norm.op_type) is None:
        return
    for one, other in (tuple(add.inputs), tuple(add.inputs)[::-1]):
        embedding = made_by(other, "Unsqueeze")
        if embedding is None or dims(other)[1:3] != [1, 1]:
            continue
        silu = norm.op_type == "GroupNormSiLUNhwc" or (
            "activation" in norm.attributes and norm.attributes["activation"].as_int()
        )
        groups = norm.attributes["groups"]
        attributes = {
            "groups": groups.as_int() if groups.type == ir.AttributeType.INT else int(groups.as_ints()[0]),
            "epsilon": norm.attributes["epsilon"].as_float(),
            "activation": int(bool(silu)),
            "channels_last": 1,
        }
        function = "SkipGroupNormSiLUNhwc" if silu else "SkipGroupNormNhwc"
        made = editor.fused(
            norm,
            "SkipGroupNorm",
            [one, gamma, beta, embedding.inputs[0]],
            attributes,
            function=function,
            outputs=2,
            like=norm.outputs[0],
        )
        made.outputs[1].type, made.outputs[1].shape = add.outputs[0].type, add.outputs[0].shape
        editor.replace(norm.outputs[0], made.outputs[0])
        editor.count(SKIP)
        return
