"""Which fused ops an execution provider of ONNX Runtime has, and which layout it computes in."""

from __future__ import annotations

from dataclasses import dataclass

from rocm_sd.errors import require_one_of
from rocm_sd.onnx.providers import AUTO, automatic

__all__ = ["PROVIDERS", "Ops", "ops_of", "resolve"]


@dataclass(frozen=True)
class Ops:
    """`native`: ops of com.microsoft with a kernel. `packed`: half attention takes Q, K and V as one tensor.

    `channels_last`: convolutions and group norms are computed NHWC. `split_gelu`, `bias_add`: the widths that these two
    kernels take; others are left to functions. `split_weights`: a gated feed-forward is two products.
    `masked`: its attention hides what a mask hides. `qkv_bias`: it adds the biases of Q, K and V. `shared_guidance`: a
    UNet repeats what both halves of guidance share; of values on a card nobody can tell that they are equal without
    waiting for it. `slower`: ops with a kernel that takes longer than their function. `note`: who chooses the layout of
    convolutions, where it is not chosen here.
    """

    name: str
    session_name: str
    native: frozenset[str]
    packed: bool = False
    masked: bool = False
    qkv_bias: bool = False
    channels_last: bool = False
    split_gelu: frozenset[int] = frozenset()
    bias_add: frozenset[int] = frozenset()
    split_weights: bool = False
    shared_guidance: bool = False
    slower: frozenset[str] = frozenset()
    note: str = ""

    def runs(self, fused: Ops) -> bool:
        """Whether it computes graphs that were fused for another provider, to the same result."""
        kernels = fused.native <= self.native | self.slower
        widths = fused.split_gelu <= self.split_gelu and fused.bias_add <= self.bias_add
        heeded = (self.masked or not fused.masked) and (self.qkv_bias or not fused.qkv_bias)
        return kernels and widths and heeded

    def why_not(self, fusion: str, part: str) -> str:
        """Why this provider has none of a fusion in a part; "" of one that it should have."""
        if fusion == "Attention" and part.startswith("text_encoder") and not self.masked:
            return f"the attention of {self.name} would lose the mask of a text encoder"
        if fusion in {"NhwcConv", "SkipGroupNorm"} and not self.channels_last:
            return self.note
        if fusion == "SharedGuidance" and not self.shared_guidance:
            return "on a card, comparing the halves of guidance would wait for it"
        return ""


_SKIP_NORM = frozenset({"MultiHeadAttention", "SkipLayerNormalization"})
# PackedQKV and PackedKV are no ops, but forms in which MultiHeadAttention takes its inputs.
_PACKED = frozenset({"PackedQKV", "PackedKV"})
_GPU = _SKIP_NORM | _PACKED | {"QuickGelu", "GroupNorm", "SkipGroupNorm", "BiasSplitGelu", "BiasAdd", "NhwcConv"}
# The widths of Stable Diffusion's three levels, which onnxruntime's bias_split_gelu_impl.cu and bias_add_impl.cu switch
# over; both refuse others.
_SPLIT_GELU = frozenset({2560, 5120, 10240})
_BIAS_ADD = frozenset({320, 640, 1280})

PROVIDERS = {
    # Tried with onnxruntime 1.31: it refuses packed Q, K and V, and has no kernels for the others. It has one for
    # SkipLayerNormalization, but 20 of them take 6.9 ms in emoji-sd's UNet, where sums and norms take 2.1.
    "cpu": Ops(
        "cpu",
        "CPUExecutionProvider",
        frozenset({"MultiHeadAttention", "QuickGelu"}),
        masked=True,
        qkv_bias=True,
        slower=frozenset({"SkipLayerNormalization"}),
        split_weights=True,
        shared_guidance=True,
        note="the CPU provider lays convolutions out itself (NCHWc)",
    ),
    # What the parser of AMDMIGraphX knows (src/onnx, May 2026). It compiles what it took, and chooses layouts itself.
    # Of MultiHeadAttention it never reads `unidirectional`, and what it adds to the scores is scaled as they are.
    "migraphx": Ops(
        "migraphx",
        "MIGraphXExecutionProvider",
        _SKIP_NORM,
        qkv_bias=True,
        note="MIGraphX chooses the layout of convolutions when it compiles",
    ),
    # Its MultiHeadAttention (contrib_ops/rocm/bert, up to 1.22) never reads `unidirectional`, and refuses a qkv_bias.
    "rocm": Ops(
        "rocm",
        "ROCMExecutionProvider",
        _GPU,
        packed=True,
        channels_last=True,
        split_gelu=_SPLIT_GELU,
        bias_add=_BIAS_ADD,
    ),
    "cuda": Ops(
        "cuda",
        "CUDAExecutionProvider",
        _GPU,
        packed=True,
        masked=True,
        qkv_bias=True,
        channels_last=True,
        split_gelu=_SPLIT_GELU,
        bias_add=_BIAS_ADD,
    ),
}


def resolve(provider: str) -> str:
    """The name of a provider; of "auto", the one by which a pipeline is run first."""
    require_one_of("--provider", provider, (AUTO, *PROVIDERS))
    return provider if provider != AUTO else next(iter(automatic()), "cpu")


def ops_of(provider: str) -> Ops:
    return PROVIDERS[resolve(provider)]
