"""torch's attention as the probes call it: by a backend of one's choice, and asked what it would choose itself."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from rocm_sd.doctor.probing.common import Place

__all__ = ["FUSED", "attention", "chosen_backend", "says_it_can", "why_not"]

FUSED = ("flash", "efficient", "cudnn")


def attention(inputs: Sequence[torch.Tensor], backend: str | None = None) -> torch.Tensor:
    """softmax(q k^T / sqrt(head)) v by "math", "flash", "efficient" or "cudnn"; None leaves the choice to torch."""
    from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: PLC0415 -- in the process that needs it
    from torch.nn.functional import scaled_dot_product_attention  # noqa: PLC0415 -- as above

    q, k, v = inputs
    if backend is None:
        return scaled_dot_product_attention(q, k, v)
    name = "MATH" if backend == "math" else f"{backend.upper()}_ATTENTION"
    with sdpa_kernel([getattr(SDPBackend, name)]):
        return scaled_dot_product_attention(q, k, v)


def chosen_backend(inputs: Sequence[torch.Tensor]) -> str:
    import torch  # noqa: PLC0415 -- as above
    from torch.nn.attention import SDPBackend  # noqa: PLC0415 -- as above

    q, k, v = inputs
    # torch has no public word for it.
    name = SDPBackend(torch._fused_sdp_choice(q, k, v)).name  # noqa: SLF001
    return str(name).lower().removesuffix("_attention")


def says_it_can(backend: str, where: Place, inputs: Sequence[torch.Tensor], *, aloud: bool = False) -> bool:
    """`aloud`: torch gives its reasons as warnings."""
    import torch  # noqa: PLC0415 -- as above

    if not where.is_gpu:
        # CPUs have one fused kernel, and torch's choice is the only place where it says whether that can run.
        return backend == "flash" and chosen_backend(inputs) == backend
    cuda: Any = torch.backends.cuda
    parameters = cuda.SDPAParams(*inputs, None, 0.0, False, False)
    return bool(getattr(cuda, f"can_use_{backend}_attention")(parameters, aloud))


def why_not(where: Place, inputs: Sequence[torch.Tensor]) -> list[str]:
    """torch's own reasons for taking no fused kernel."""
    if not where.is_gpu:
        return []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for backend in ("flash", "efficient"):
            says_it_can(backend, where, inputs, aloud=True)
    sentences = [str(warning.message).split(" (Triggered internally")[0] for warning in caught]
    return list(dict.fromkeys(sentences))
