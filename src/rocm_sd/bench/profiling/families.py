"""What kind of work a kernel or a torch op does, by its name: one table of rules, each with its reason.

The first rule that fits decides. What no rule knows is `OTHER`, and is listed by name wherever families are shown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rocm_sd.ops.registry import Op

__all__ = [
    "ATTENTION", "BOOKKEEPING", "CONVOLUTION", "COPIES", "ELEMENTWISE", "FAMILIES", "GEMM", "IDLE", "KERNEL_RULES",
    "MEMSET", "NORM", "OP_RULES", "OTHER", "TRANSFERS", "Rule", "kernel_family", "op_family",
]  # fmt: skip

CONVOLUTION, GEMM, ATTENTION, NORM = "convolution", "GEMM", "attention", "norm"
ELEMENTWISE, COPIES, TRANSFERS, MEMSET = "elementwise", "layout copies", "host transfers", "memset"
BOOKKEEPING, OTHER, IDLE = "views", "other", "idle"
FAMILIES = (CONVOLUTION, GEMM, ATTENTION, NORM, ELEMENTWISE, COPIES, TRANSFERS, MEMSET, BOOKKEEPING, OTHER, IDLE)


@dataclass(frozen=True)
class Rule:
    """`pattern` is searched in the name, upper and lower case alike."""

    pattern: str
    family: str
    reason: str

    def fits(self, name: str) -> bool:
        return re.search(self.pattern, name, re.IGNORECASE) is not None


# Device kernels. Order matters: a copy inside a library's convolution must be met before the word "conv" is.
KERNEL_RULES = (
    Rule(r"^triton_poi_fused_(clone|cat|_to_copy|_)+\d+$", COPIES, "Inductor's copies, with nothing else fused in"),
    Rule(r"^triton_poi_", ELEMENTWISE, "Inductor names a kernel after all that it fuses; the prefix says what it is"),
    Rule(r"^triton_(red|per)_(?!.*softmax)", NORM, "Inductor's reductions: those of norms"),
    Rule(r"mem(cpy|ory copy).*(htod|dtoh|host)", TRANSFERS, "the runtime's copies between host and device"),
    Rule(r"^(__amd_rocclr_)?copybuffer", COPIES, "ROCm's runtime copies device memory with this kernel"),
    Rule(r"mem(cpy|ory copy)", COPIES, "the runtime's copies on the device"),
    Rule(r"memset|memory set|__amd_rocclr_fillbuffer", MEMSET, "the runtime's fills"),
    Rule(r"batched_transpose|nchw.?to.?nhwc|nhwc.?to.?nchw|tensortransform|transpose_(packed|nchw|cnhw)|cnhw2nchw|nchw2cnhw",
         COPIES, "MIOpen and cuDNN change the layout around a convolution that wants the other one"),
    Rule(r"nhwcaddpadding|im2col|col2im|im2d2col|subsample|unsample|winograd.*transform|xform_(data|filter|out)",
         CONVOLUTION, "data made ready for a convolution by its library: part of its cost"),
    Rule(r"(fort_native_)?sdpa|fmha|flash|attn_fwd|attention|ck_tile.*fmha", ATTENTION,
         "fused attention of cuDNN, CUTLASS, AOTriton, CK and the Triton kernels of others"),
    Rule(r"softmax", ATTENTION, "in a diffusion model a softmax stands in attention only"),
    Rule(r"group_?norm|layer_?norm|rms_?norm|batch_?norm|welford|rowwisemoments|computefusedparams|gammabeta|moments",
         NORM, "norms of torch, MIOpen, CK and Inductor (welford: their variances)"),
    Rule(r"naive_conv|igemm_(fwd|bwd|wrw)|gridwise.*conv|miopensp3asm|miopenconv|miopengcn|conv1x1u|convasm|winograd|"
         r"grouped_conv|conv_?fwd|device_?conv|kernel_batched_gemm.*conv",
         CONVOLUTION, "MIOpen: direct, implicit GEMM, Winograd and CK convolutions"),
    Rule(r"implicit_gemm|implicit_convolve|xmma_fprop|fprop|dgrad|cudnn.*conv|conv2d|convolve|depthwise|convolution|conv_",
         CONVOLUTION, "cuDNN and CUTLASS convolutions, and torch's own"),
    Rule(r"init_device_workspace_kernel", CONVOLUTION, "cuDNN prepares a split convolution with it"),
    Rule(r"Cijk_|hipblaslt|tensile|rocblas", GEMM, "Tensile kernels of rocBLAS and hipBLASLt"),
    Rule(r"nvjet|cublas|cutlass|gemm|gemv|splitk|matmul|_mm_|\bmm\b|wgrad|dot_kernel", GEMM,
         "cuBLAS, CUTLASS and CK products, and Inductor's Triton ones; convolutions were met above"),
    Rule(r"cat(array)?batchedcopy|direct_copy|copy_kernel|copy_device|contiguous|transpose|permute|layout",
         COPIES, "torch's copies: another layout, another dtype, or several tensors made one"),
    Rule(r"fillfunctor|subtensorop", MEMSET, "fills of torch and MIOpen"),
    Rule(r"reduce_|reduction|scan|sort|cumsum", NORM,
         "reductions: outside of norms a diffusion model has none; the partial sums of a GEMM were met above"),
    Rule(r"elementwise|functor|upsample|gelu|silu|sigmoid|pointwise|arange|distribution|index|gather|"
         r"scatter|embedding|compare|where|clamp|scale_?bias|op_?tensor|bias",
         ELEMENTWISE, "one value read, one written: torch's, MIOpen's OpTensor and Inductor's pointwise kernels"),
)  # fmt: skip

# Host ops of torch: what runs on a CPU, and what a kernel was launched for. The ops of this project say themselves what
# they are.
OP_RULES = (
    Rule(r"convolution|conv[123]d|conv_transpose", CONVOLUTION, "every backend's convolution: mkldnn, cudnn, miopen"),
    Rule(r"scaled_dot_product|flash_attention|efficient_attention|_softmax|softmax", ATTENTION,
         "every backend's attention, and its parts"),
    Rule(r"::(_?addmm|mm|bmm|baddbmm|linear|matmul|_?addmm_activation|mv|addmv|dot|_scaled_mm|_int_mm)$|mkldnn_linear",
         GEMM, "products"),
    Rule(r"group_norm|layer_norm|rms_norm|batch_norm|::(var|std|mean|sum|norm|amax|max|min|var_mean|argmax|cumsum)"
         r"(_out)?$|linalg_vector_norm", NORM, "norms, and the reductions that norms are made of"),
    Rule(r"::(copy_|clone|contiguous|cat|stack|repeat|_to_copy|to|roll|pad|constant_pad_nd|flip|_reshape_copy)$|"
         r"_copy$|pin_memory", COPIES, "a tensor written again in another layout, dtype or place"),
    Rule(r"::(fill_|zero_|zeros|ones|full|zeros_like|ones_like|full_like)$", MEMSET, "fills"),
    Rule(r"::(add|sub|rsub|mul|div|pow|sqrt|rsqrt|exp|log|sin|cos|tanh|sigmoid|silu|gelu|glu|relu|hardtanh|neg|abs|"
         r"clamp|clamp_min|clamp_max|addcmul|addcdiv|lerp|where|eq|ne|lt|le|gt|ge|reciprocal|round|floor|masked_fill|"
         r"bitwise_\w+|logical_\w+|remainder|floor_divide|arange|linspace|randn|normal|rand|uniform|embedding|index|"
         r"index_select|gather|scatter|triu|tril|dropout|native_dropout|upsample_\w+|_upsample_\w+|interpolate)_?$",
         ELEMENTWISE, "one value read, one written, whatever is done to it"),
)  # fmt: skip
# Views, allocations and questions: they take the family of the op that asked, or `BOOKKEEPING` where none did.
_BOOKKEEPING = re.compile(
    r"::(empty\w*|resize_?|as_strided_?|view|reshape|_unsafe_view|_reshape_alias|transpose|t|permute|expand(_as)?|"
    r"unsqueeze_?|squeeze_?|select|slice|narrow|split\w*|chunk|unbind|unfold|flatten|unflatten|alias|detach_?|"
    r"lift_fresh|resolve_\w+|result_type|item|_local_scalar_dense|is_nonzero|_nnpack_available|set_|numpy_T|movedim)$|"
    r"^detach_?$"
)


def kernel_family(name: str, previous: str | None = None) -> str:
    """`previous` is the family of the kernel that ran before it, which settles a name that two of our ops use."""
    own = _own_kernels().get(_plain(name))
    if own:
        return own[0] if len(own) == 1 else (previous if previous in own else OTHER)
    return _by_rules(name)


@lru_cache(maxsize=4096)
def op_family(name: str) -> str | None:
    """None for views, allocations and the like, which belong to whatever op calls them."""
    namespace, _, own = name.partition("::")
    if namespace == "rocm_sd" and own in _ops():
        return _ops()[own].family or OTHER
    return None if _BOOKKEEPING.search(name) else _first(OP_RULES, name)


@lru_cache(maxsize=8192)
def _by_rules(name: str) -> str:
    return _first(KERNEL_RULES, name)


def _first(rules: tuple[Rule, ...], name: str) -> str:
    return next((rule.family for rule in rules if rule.fits(name)), OTHER)


def _plain(name: str) -> str:
    """rocprofv3 writes `_attend.kd`, the name of the kernel's descriptor."""
    return name.removesuffix(".kd").strip()


def _ops() -> Mapping[str, Op]:
    from rocm_sd.ops import OPS  # noqa: PLC0415 -- importing torch is left until there is something to name

    return OPS


@lru_cache(maxsize=1)
def _own_kernels() -> dict[str, tuple[str, ...]]:
    """The Triton kernels of the ops, from `Verification.promises`."""
    found: dict[str, tuple[str, ...]] = {}
    for op in _ops().values():
        family = op.family or OTHER
        for kernel in op.verification.promises if op.verification else ():
            found[kernel] = tuple(dict.fromkeys((*found.get(kernel, ()), family)))
    return found
