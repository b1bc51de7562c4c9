"""A model in half precision, but for what overflows or loses its meaning there.

In float32 stay: sines and cosines with all before them (a timestep times a frequency has more digits than half holds),
softmax that no kernel computes within, random numbers and constants of computed shapes, and the vectors of group norms.
`widen_attention` computes attention in float32 where a model's config asks for it: the scores of SD 2.1 pass 65504.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass

from rocm_sd.onnx.fusions.editing import Editor, array, lazy

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["BLOCKED", "to_half", "widen_attention"]

BLOCKED = ("Sin", "Cos", "Softmax", "Exp", "Pow", "ReduceMean", "ReduceSum", "RandomNormalLike", "ConstantOfShape")
_WITH_ORIGIN = ("Sin", "Cos")
# Of an op's inputs, those that are float32 in a half model, too.
_WIDE_INPUTS = {"Resize": (1, 2), "Upsample": (1,)}
_ATTENTION = ("MultiHeadAttention", "PackedQKV", "PackedKV")
_FLOAT, _HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16
_LARGEST = float(np.finfo(np.float16).max)


def to_half(editor: Editor) -> None:
    """Inputs and outputs are half, too, but for inputs that only blocked nodes take."""
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(editor.model)
    blocked = _blocked(editor.graph)
    _Conversion(editor, blocked).run()
    editor.clean()


def _blocked(graph: ir.Graph) -> set[ir.Node]:
    found = {node for node in graph if node.op_type in BLOCKED and node.domain == ""}
    waiting = [node for node in found if node.op_type in _WITH_ORIGIN]
    while waiting:
        for before in waiting.pop().predecessors():
            if before not in found:
                found.add(before)
                waiting.append(before)
    return found


class _Conversion:
    def __init__(self, editor: Editor, blocked: set[ir.Node]) -> None:
        self.editor, self.blocked = editor, blocked
        self.cast: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}

    def run(self) -> None:
        graph = self.editor.graph
        for value in graph.inputs:
            takers = [node for node, _ in value.uses()]
            if value.dtype == _FLOAT and any(node not in self.blocked for node in takers):
                value.type = ir.TensorType(_HALF)
        for node in list(graph):
            self._convert(node)
        for value in graph.outputs:
            if value.dtype == _FLOAT and value.producer() is not None:
                self._output_as_half(value)

    def _convert(self, node: ir.Node) -> None:
        wide = node in self.blocked
        for index, value in enumerate(node.inputs):
            if value is None or value.dtype not in {_FLOAT, _HALF}:
                continue
            wanted = _FLOAT if wide or index in _wide_inputs(node) else _HALF
            if value.dtype != wanted:
                node.replace_input_with(index, self._as(value, wanted, node))
        if wide:
            return
        if node.op_type == "Cast" and node.attributes["to"].as_int() == _FLOAT:
            node.attributes["to"] = ir.AttrInt64("to", int(_HALF))
        for value in node.outputs:
            if value.dtype == _FLOAT:
                value.type = ir.TensorType(_HALF)

    def _as(self, value: ir.Value, dtype: ir.DataType, before: ir.Node) -> ir.Value:
        key = (value, dtype)
        if key not in self.cast:
            if value.const_value is not None and value.producer() is None:
                self.cast[key] = self._weight(value, dtype)
            else:
                made = self.editor.add(before, "Cast", [value], {"to": int(dtype)}).outputs[0]
                made.type, made.shape = ir.TensorType(dtype), value.shape
                self.cast[key] = made
        return self.cast[key]

    def _weight(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        tensor = value.const_value
        assert tensor is not None

        def converted() -> NDArray[Any]:
            # A mask's lowest float32 would be infinite, and a row of infinities has no softmax.
            return np.asarray(np.clip(array(tensor), -_LARGEST, _LARGEST), dtype.numpy())

        name = self.editor.fresh(f"{value.name}_as")
        return self.editor.initializer(lazy(converted, dtype, tensor.shape.numpy(), name))

    def _output_as_half(self, value: ir.Value) -> None:
        node = value.producer()
        assert node is not None
        made = self.editor.add(node, "Cast", [value], {"to": int(_HALF)}).outputs[0]
        made.type, made.shape = ir.TensorType(_HALF), value.shape
        _hand_out(self.editor, value, made)


def _hand_out(editor: Editor, wide: ir.Value, half: ir.Value) -> None:
    """Where `wide` is an output of the model, `half` is in its place, by its name."""
    outputs = editor.graph.outputs
    for index, each in enumerate(outputs):
        if each is wide:
            wide.name, half.name = editor.fresh("wide"), wide.name
            outputs[index] = half


def _wide_inputs(node: ir.Node) -> tuple[int, ...]:
    if "GroupNorm" in node.op_type and node.domain:
        return (1, 2)
    return _WIDE_INPUTS.get(node.op_type, ())


def widen_attention(editor: Editor) -> int:
    """Attention of a half model in float32; how many there are."""
    nodes = [node for node in editor.nodes(*_ATTENTION) if node.outputs[0].dtype == _HALF]
    for node in nodes:
        for index, value in enumerate(node.inputs):
            if value is not None and value.dtype == _HALF:
                made = editor.add(node, "Cast", [value], {"to": int(_FLOAT)}).outputs[0]
                made.type, made.shape = ir.TensorType(_FLOAT), value.shape
                node.replace_input_with(index, made)
        out = node.outputs[0]
        back = editor.add(node, "Cast", [out], {"to": int(_HALF)}).outputs[0]
        back.type, back.shape = ir.TensorType(_HALF), out.shape
        users = [(user, index) for user, index in out.uses() if user is not back.producer()]
        for user, index in users:
            user.replace_input_with(index, back)
        _hand_out(editor, out, back)
        out.type = ir.TensorType(_FLOAT)
    editor.clean()
    return len(nodes)
