"""A graph that is rewritten: what stands before and after a value, and new nodes in place of old ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedNodesPass, RemoveUnusedOpsetsPass

from rocm_sd.onnx.fusions import functions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from rocm_sd.onnx.fusions.providers import Ops

__all__ = [
    "CONTRIB",
    "Editor",
    "alike",
    "array",
    "dims",
    "is_filled_with",
    "lazy",
    "made_by",
    "number",
    "only_user",
    "small_array",
    "static_shape",
    "through",
    "weight",
]

CONTRIB = "com.microsoft"
# What a pattern looks into: masks and scales. Weights are larger, and are read when they are written.
_SMALL = 2**20


def made_by(value: ir.Value | None, *ops: str) -> ir.Node | None:
    """The node of one of these ops whose only output the value is."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type in ops and node.domain in {"", CONTRIB} else None


def only_user(value: ir.Value, *ops: str) -> ir.Node | None:
    """The one node that takes it, where it is one of these ops, and nobody outside asks for the value."""
    users = [user for user, _ in value.uses()]
    if len(users) != 1 or value.is_graph_output():
        return None
    (user,) = users
    return user if user.op_type in ops else None


def through(value: ir.Value | None, *ops: str) -> ir.Value | None:
    """What stands before nodes of these ops that take one tensor."""
    while (node := made_by(value, *ops)) is not None:
        value = node.inputs[0]
    return value


def weight(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of an initializer, which nobody has read yet."""
    return value.const_value if value is not None and value.producer() is None else None


def array(tensor: ir.TensorProtocol) -> NDArray[Any]:
    return np.asarray(tensor.numpy())


def small_array(value: ir.Value | None) -> NDArray[Any] | None:
    """The numbers of a constant, unless they are many."""
    tensor = value.const_value if value is not None else None
    return None if tensor is None or tensor.size > _SMALL else array(tensor)


def number(value: ir.Value | None) -> float | None:
    """Of a constant of one element."""
    found = small_array(value)
    return float(found.reshape(-1)[0]) if found is not None and found.size == 1 else None


def is_filled_with(value: ir.Value | None, what: float) -> bool:
    found = small_array(value)
    return found is not None and bool((found == what).all())


def dims(value: ir.Value | None) -> list[int | str | None]:
    """Its sizes: numbers, the expressions of those that vary, or None; [] where not even the rank is known."""
    if value is None or value.shape is None:
        return []
    return [dim if isinstance(dim, int) else dim.value for dim in value.shape]


def alike(first: ir.Value | None, second: ir.Value | None) -> bool:
    """Whether they are of one shape: two sizes that vary are one, though the exporter writes them in two ways."""
    sizes = [[size if isinstance(size, int) else None for size in dims(value)] for value in (first, second)]
    return bool(sizes[0]) and sizes[0] == sizes[1]


def static_shape(value: ir.Value | None) -> tuple[int, ...] | None:
    sizes = dims(value)
    known = tuple(size for size in sizes if isinstance(size, int))
    return known if sizes and len(known) == len(sizes) else None


def lazy(make: Callable[[], NDArray[Any]], dtype: ir.DataType, shape: Iterable[int], name: str) -> ir.LazyTensor:
    """Weights that are computed when they are written, and forgotten then: a part never lies in memory whole."""
    return ir.LazyTensor(lambda: ir.tensor(np.ascontiguousarray(make())), dtype=dtype, shape=ir.Shape(shape), name=name)


@dataclass
class Editor:
    """`ops`: what the provider has. `half`: the weights will be float16. `found`: sites by the name of the fusion."""

    model: ir.Model
    ops: Ops
    half: bool = False
    found: dict[str, int] = field(default_factory=dict)
    _number: int = 0

    @property
    def graph(self) -> ir.Graph:
        return self.model.graph

    def count(self, name: str) -> None:
        self.found[name] = self.found.get(name, 0) + 1

    def nodes(self, *ops: str) -> list[ir.Node]:
        """Those of these ops as they are now; what is inserted meanwhile is not among them."""
        return [node for node in self.graph if node.op_type in ops]

    def fresh(self, base: str) -> str:
        self._number += 1
        return f"{base}_{self._number}"

    def add(
        self,
        before: ir.Node,
        op: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any] | None = None,
        *,
        domain: str = "",
        outputs: int = 1,
        like: ir.Value | None = None,
        shape: Sequence[int | str | None] | None = None,
    ) -> ir.Node:
        """A node of ONNX's own ops, or of `domain`. Its first output is typed as `like`; shaped so, or as `shape`."""
        made = ir.node(op, inputs, attributes or {}, domain=domain, num_outputs=outputs, name=self.fresh(op))
        for index, value in enumerate(made.outputs):
            value.name = self.fresh(f"{op}_out{index}" if index else op)
        if like is not None:
            made.outputs[0].type = like.type
            made.outputs[0].shape = like.shape if shape is None else ir.Shape(shape)
        self.graph.insert_before(before, made)
        if domain:
            self.graph.opset_imports.setdefault(domain, 1)
        return made

    def fused(
        self,
        before: ir.Node,
        op: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, Any] | None = None,
        *,
        function: str | None = None,
        native: bool = True,
        outputs: int = 1,
        like: ir.Value | None = None,
        shape: Sequence[int | str | None] | None = None,
    ) -> ir.Node:
        """A fused op: the provider's own where it has one that takes it (`native`), else `function` of standard ops"""
        given = attributes or {}
        domain = CONTRIB
        if not native or op not in self.ops.native:
            domain, op = functions.DOMAIN, function or op
            body = functions.require(self.model, op, half=self.half, native=self.ops.native)
            given = functions.declared(body, given)
        return self.add(before, op, inputs, given, domain=domain, outputs=outputs, like=like, shape=shape)

    def replace(self, old: ir.Value, new: ir.Value) -> None:
        """Whoever takes `old` takes `new`; an output of the model keeps its name."""
        if new.type is None:
            new.type, new.shape = old.type, old.shape
        if old.is_graph_output():
            old.name, new.name = self.fresh("replaced"), old.name
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)

    def constant(self, base: str, values: NDArray[Any]) -> ir.Value:
        """Small numbers, known now."""
        return self.initializer(ir.tensor(values, name=self.fresh(base)))

    def derived(
        self, base: str, sources: Sequence[ir.TensorProtocol], make: Callable[..., NDArray[Any]], shape: Iterable[int]
    ) -> ir.Value:
        """Weights made of others when they are written: make(*arrays), in the dtype of the first."""
        dtype = sources[0].dtype

        def now() -> NDArray[Any]:
            made = make(*(array(source) for source in sources))
            return made.astype(dtype.numpy())

        return self.initializer(lazy(now, dtype, shape, self.fresh(base)))

    def initializer(self, tensor: ir.TensorProtocol) -> ir.Value:
        value = ir.Value(
            name=tensor.name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()), const_value=tensor
        )
        self.graph.register_initializer(value)
        return value

    def clean(self) -> None:
        """Nodes and weights that nobody takes are gone, and the rest stands in the order in which it is computed."""
        RemoveUnusedNodesPass()(self.model)
        RemoveUnusedFunctionsPass()(self.model)  # type: ignore[no-untyped-call]
        RemoveUnusedOpsetsPass()(self.model)
        self.graph.sort()
