"""Fused ops as functions of the model: standard ops that every runtime executes, under the name of what they compute.

A provider without a kernel for an op inlines its function. So the model runs everywhere, and a reader still sees the
site by its name. `{to_float}` and `{to_half}` are casts in float16 models, whose sums overflow in half precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx.parser
import onnx_ir as ir

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DOMAIN", "OPSETS", "declared", "require"]

DOMAIN = "rocm_sd"
# ops.onnx.ai of these versions are what the patterns and the bodies are written in.
OPSETS = range(18, 23)

# Scale and shift of a channel are a batch norm of mean 0 and variance 1: one pass over the picture in place of two.
_NORM = """
    shape = Shape (S)
    first = Constant <value_ints = [0]> ()
    rest = Constant <value_ints = [-1]> ()
    number = Constant <value_ints: ints = @groups> ()
    grouping = Concat <axis = 0> (first, number, rest)
    ones = ConstantOfShape <value = float[1] {{1.0}}> (number)
    zeros = ConstantOfShape <value = float[1] {{0.0}}> (number)
    full = {to_float} (S)
    grouped = Reshape (full, grouping)
    normed = InstanceNormalization <epsilon: float = @epsilon> (grouped, ones, zeros)
    restored = Reshape (normed, shape)
    channels = Shape (gamma)
    means = ConstantOfShape <value = float[1] {{0.0}}> (channels)
    variances = ConstantOfShape <value = float[1] {{1.0}}> (channels)
    shifted = BatchNormalization <epsilon = 0.0> (restored, gamma, beta, means, variances)
"""
_SILU = "    activated = {silu} (shifted)\n"
_TO_NHWC = "    Y = Transpose <perm = [0, 2, 3, 1]> (result)\n"
_FROM_NHWC = "    S = Transpose <perm = [0, 3, 1, 2]> ({of})\n"


def _group_norm(*, silu: bool, channels_last: bool) -> str:
    before = _FROM_NHWC.format(of="X") if channels_last else "    S = Identity (X)\n"
    last = "activated" if silu else "shifted"
    result = f"    {'result' if channels_last else 'Y'} = {{to_half}} ({last})\n"
    after = _TO_NHWC if channels_last else ""
    return (
        "<groups, epsilon> (X, gamma, beta) => (Y) {{\n"
        + before
        + _NORM
        + (_SILU if silu else "")
        + result
        + after
        + "}}"
    )


def _skip_group_norm(*, silu: bool) -> str:
    last = "activated" if silu else "shifted"
    return (
        "<groups, epsilon> (X, gamma, beta, skip) => (Y, T) {{\n"
        "    axes = Constant <value_ints = [1, 2]> ()\n"
        "    skips = Unsqueeze (skip, axes)\n"
        "    T = Add (X, skips)\n"
        + _FROM_NHWC.format(of="T")
        + _NORM
        + (_SILU if silu else "")
        + f"    result = {{to_half}} ({last})\n"
        + _TO_NHWC
        + "}}"
    )


_CONV = "pads = {pads}, kernel_shape = [2, 2], strides = [1, 1], dilations = [1, 1]"
_PARITY_PADS = ("[1, 1, 0, 0]", "[1, 0, 0, 1]", "[0, 1, 1, 0]", "[0, 0, 1, 1]")


def _upsample_conv(*, channels_last: bool) -> str:
    op = "{conv}" if channels_last else "Conv"
    convolved = "".join(
        f"    Y{index} = {op} <{_CONV.format(pads=pads)}> (X, W{index}, B)\n" for index, pads in enumerate(_PARITY_PADS)
    )
    if channels_last:
        # Rows of pairs of columns: what lies in memory is the picture already, and no value is moved twice.
        woven = """
    upper = Concat <axis = 3> (Y0, Y1)
    lower = Concat <axis = 3> (Y2, Y3)
    both = Concat <axis = 2> (upper, lower)
    small = Shape <start = 0, end = 3> (X)
    twice = Constant <value_ints = [1, 2, 2]> ()
    large = Mul (small, twice)
    channels = Constant <value_ints = [-1]> ()
    size = Concat <axis = 0> (large, channels)
    Y = Reshape (both, size)
"""
    else:
        # DepthToSpace does the same in 2.1 ms where these take 0.6 (64 channels, 64x64 to 128x128, one core).
        woven = """
    inner = Constant <value_ints = [4]> ()
    Z0 = Unsqueeze (Y0, inner)
    Z1 = Unsqueeze (Y1, inner)
    Z2 = Unsqueeze (Y2, inner)
    Z3 = Unsqueeze (Y3, inner)
    upper = Concat <axis = 4> (Z0, Z1)
    lower = Concat <axis = 4> (Z2, Z3)
    both = Concat <axis = 3> (upper, lower)
    small = Shape (Y0)
    twice = Constant <value_ints = [1, 1, 2, 2]> ()
    large = Mul (small, twice)
    Y = Reshape (both, large)
"""
    return "(X, W0, W1, W2, W3, B) => (Y) {{\n" + convolved + woven + "}}"


def _unpacked(split: str, query: str) -> str:
    return f"""<num_heads, scale> {query} {{{{
    {split}
    flat = Constant <value_ints = [0, 0, -1]> ()
    q = Reshape (q5, flat)
    k = Reshape (k5, flat)
    v = Reshape (v5, flat)
    Y = com.microsoft.MultiHeadAttention <num_heads: int = @num_heads, scale: float = @scale> (q, k, v)
}}}}"""


_BODIES = {
    "GroupNorm": _group_norm(silu=False, channels_last=False),
    "GroupNormSiLU": _group_norm(silu=True, channels_last=False),
    "GroupNormNhwc": _group_norm(silu=False, channels_last=True),
    "GroupNormSiLUNhwc": _group_norm(silu=True, channels_last=True),
    "SkipGroupNormNhwc": _skip_group_norm(silu=False),
    "SkipGroupNormSiLUNhwc": _skip_group_norm(silu=True),
    "UpsampleConv": _upsample_conv(channels_last=False),
    "UpsampleConvNhwc": _upsample_conv(channels_last=True),
    "BiasSplitGelu": """(X, bias) => (Y) {{
    biased = Add (X, bias)
    value, gate = Split <axis = -1, num_outputs = 2> (biased)
    root = Constant <value = float {{1.4142135623730951}}> ()
    one = Constant <value = float {{1.0}}> ()
    half = Constant <value = float {{0.5}}> ()
    full = {to_float} (gate)
    scaled = Div (full, root)
    error = Erf (scaled)
    above = Add (error, one)
    weighed = Mul (full, half)
    gelu = Mul (weighed, above)
    opened = {to_half} (gelu)
    Y = Mul (value, opened)
}}""",
    # Half of the weights each: no product is copied to be split, and the gate's bias is added on the way.
    "MatMulBiasSplitGelu": """(X, W_value, W_gate, bias_value, bias_gate) => (Y) {{
    value = MatMul (X, W_value)
    shifted = Add (value, bias_value)
    gate = MatMul (X, W_gate)
    opened = com.microsoft.BiasGelu (gate, bias_gate)
    Y = Mul (shifted, opened)
}}""",
    "BiasAdd": """(X, bias, skip) => (Y) {{
    biased = Add (X, bias)
    Y = Add (biased, skip)
}}""",
    "SkipLayerNormalization": """<epsilon> (X, skip, gamma, beta) => (Y, T) {{
    T = Add (X, skip)
    Y = LayerNormalization <epsilon: float = @epsilon> (T, gamma, beta)
}}""",
    "SkipBiasLayerNormalization": """<epsilon> (X, skip, gamma, beta, bias) => (Y, T) {{
    biased = Add (X, bias)
    T = Add (biased, skip)
    Y = LayerNormalization <epsilon: float = @epsilon> (T, gamma, beta)
}}""",
    "QuickGelu": """<alpha> (X) => (Y) {{
    alpha = Constant <value_float: float = @alpha> ()
    alike = CastLike (alpha, X)
    scaled = Mul (X, alike)
    opened = Sigmoid (scaled)
    Y = Mul (X, opened)
}}""",
    "NhwcConv": """<pads, strides, dilations, kernel_shape> (X, W, B) => (Y) {{
    x = Transpose <perm = [0, 3, 1, 2]> (X)
    w = Transpose <perm = [0, 3, 1, 2]> (W)
    y = Conv <pads: ints = @pads, strides: ints = @strides, dilations: ints = @dilations,
              kernel_shape: ints = @kernel_shape> (x, w, B)
    Y = Transpose <perm = [0, 2, 3, 1]> (y)
}}""",
    "PackedQKV": _unpacked("q5, k5, v5 = Split <axis = 3, num_outputs = 3> (QKV)", "(QKV) => (Y)"),
    "PackedKV": _unpacked("q5 = Identity (Q)\n    k5, v5 = Split <axis = 3, num_outputs = 2> (KV)", "(Q, KV) => (Y)"),
}


def require(model: ir.Model, name: str, *, half: bool, native: frozenset[str]) -> ir.Function:
    """The function of that name, which the model has from now on."""
    key = (DOMAIN, name, "")
    if key in model.functions:
        return model.functions[key]
    body = _BODIES[name].format(
        to_float="Cast <to = 1>" if half else "Identity",
        to_half="Cast <to = 10>" if half else "Identity",
        silu="com.microsoft.QuickGelu <alpha = 1.0>" if "QuickGelu" in native else f"{DOMAIN}.Silu",
        conv="com.microsoft.NhwcConv" if "NhwcConv" in native else f"{DOMAIN}.PlainNhwcConv",
    )
    opset = model.graph.opset_imports[""]
    text = f'<domain: "{DOMAIN}", opset_import: ["": {opset}, "com.microsoft": 1, "{DOMAIN}": 1]>\n{name} {body}'
    made = ir.serde.deserialize_function(onnx.parser.parse_function(text))
    model.functions[key] = made
    model.graph.opset_imports.setdefault(DOMAIN, 1)
    for needed in ("Silu", "PlainNhwcConv"):
        if f"{DOMAIN}.{needed} " in body:
            require(model, needed, half=half, native=native)
    return made


_BODIES["Silu"] = """(X) => (Y) {{
    opened = Sigmoid (X)
    Y = Mul (X, opened)
}}"""
_BODIES["PlainNhwcConv"] = _BODIES["NhwcConv"]


def declared(function: ir.Function, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Of an op's attributes, those that the function has; the number of groups is a list there, part of a shape."""
    kept = {name: value for name, value in attributes.items() if name in function.attributes}
    if isinstance(groups := kept.get("groups"), int):
        kept["groups"] = [groups]
    return kept
