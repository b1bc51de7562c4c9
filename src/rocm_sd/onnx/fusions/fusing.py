"""fuse(model, ops): all fusions that suit a provider, in their order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_sd.onnx.fusions import (
    attention,
    bias_add,
    bias_split_gelu,
    channels_last,
    constant_shapes,
    group_norm,
    quick_gelu,
    shared_guidance,
    skip_layer_norm,
    upsample_conv,
)
from rocm_sd.onnx.fusions.editing import Editor

if TYPE_CHECKING:
    import onnx_ir as ir

    from rocm_sd.onnx.fusions.providers import Ops

__all__ = ["fuse"]

# Sums that a norm follows are taken before those that stand alone.
_ORDER = (
    attention,
    group_norm,
    skip_layer_norm,
    bias_split_gelu,
    bias_add,
    quick_gelu,
    upsample_conv,
    channels_last,
    constant_shapes,
    shared_guidance,
)


def fuse(model: ir.Model, ops: Ops, *, half: bool = False) -> dict[str, int]:
    """The model is changed in place; found sites by the name of the fusion. `half`: the weights will be float16."""
    editor = Editor(model, ops, half)
    for each in _ORDER:
        each.fuse(editor)
    return editor.found
