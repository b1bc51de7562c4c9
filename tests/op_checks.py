"""What every op is held to, whatever it computes: by the contract suite over all of them, and by an op's own tests."""

from __future__ import annotations

from dataclasses import replace

import torch

from rocm_sd import ops
from rocm_sd.numerics import in_float64, outputs, require


def dtype_id(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def shape_id(shape) -> str:
    return "x".join(shape_id(part) if isinstance(part, tuple) else str(part) for part in shape)


def call(op, arguments, implementation=None):
    """The public function, which has `implementation` among its arguments."""
    names = [each.name for each in op.signature.arguments]
    return getattr(ops, op.name)(**dict(zip(names, arguments, strict=False)), implementation=implementation)


def layout(tensor):
    """Sides and strides; that of a side of one says nothing."""
    return [(side, step) for side, step in zip(tensor.shape, tensor.stride(), strict=True) if side > 1]


def gate(op, arguments, result, name=""):
    """Of stock's dtype and layout, and as near to float64 as stock torch is."""
    exact = outputs(op.verification.reference(*in_float64(arguments)))
    stock = outputs(call(op, arguments, op.implementations[0].name))
    for number, (ours, right, theirs) in enumerate(zip(outputs(result), exact, stock, strict=True)):
        assert ours.dtype == theirs.dtype
        assert layout(ours) == layout(theirs)
        require(f"{op.name} ({name}), result {number}", ours, right, theirs)
    return result


def check(op, arguments, implementation, config=None):
    """Through the public function, or with a config of one's own."""
    if config is None:
        return gate(op, arguments, call(op, arguments, implementation), implementation)
    return gate(op, arguments, op.implementation(implementation)(*arguments, config=config), implementation)


def configured(op, **changes):
    """The default config of the op's kernel, changed."""
    return replace(op.implementation(op.verification.implementation).default, **changes)


def floats(op, arguments):
    """The places of what can have a gradient: floating tensors that do not follow from others."""
    names = [each.name for each in op.signature.arguments]
    return [
        place
        for place, (name, value) in enumerate(zip(names, arguments, strict=False))
        if isinstance(value, torch.Tensor) and value.is_floating_point() and name not in op.derived
    ]


def changed(arguments, places, values):
    """The arguments with other values at these places."""
    new = list(arguments)
    for place, value in zip(places, values, strict=True):
        new[place] = value
    return tuple(new)
