"""What a check measures, each in a process of its own: python -m rocm_sd.doctor.probing NAME '{"quick": true}'.

One module per probe, with a function `answer(*, device=None, quick=False)`. It gives one JSON object, in which `device`
says where it ran; `{"cannot": reason}` is said instead where there is nothing to run on. A driver's fault or an endless
search ends a process: what may do that runs in a further process (`isolated`), so that the probe lives to tell.
"""

from __future__ import annotations

__all__ = ["NAMES"]

NAMES = (
    "smoke",
    "sdpa_numerics",
    "sdpa_backend",
    "first_convolution",
    "convolution_library",
    "convolution_layout",
    "gemm_library",
    "half_precision",
    "mapped_weights",
    "graph_capture",
    "scaled_product",
    "triton_compile",
)
