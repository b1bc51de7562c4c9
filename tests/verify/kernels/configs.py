"""`KernelConfig` by names, for kernels that a test compiles without launching them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_sd.verify.compiler import KernelConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rocm_sd.verify.compiler import Constant


def config_of(
    signature: Mapping[str, str],
    constants: Mapping[str, Constant],
    *,
    divisible_by_16: Iterable[str] = (),
    num_warps: int = 4,
    num_stages: int = 2,
) -> KernelConfig:
    """Pointers count as 16-byte aligned tensors below 2 GB."""
    divisible = set(divisible_by_16)
    attributes = {n: "DS" if t.startswith("*") else "D" for n, t in signature.items() if t[0] == "*" or n in divisible}
    return KernelConfig(
        tuple(signature.items()), tuple(constants.items()), tuple(attributes.items()), num_warps, num_stages
    )
