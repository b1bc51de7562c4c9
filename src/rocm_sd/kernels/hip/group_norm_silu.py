"""y = silu(group_norm(x + add)), x: [N, C, H, W] channels-last: one pass where a group fits a workgroup, else two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rocm_sd.kernels.config import Config
from rocm_sd.kernels.hip.launch import Kernel, access_width, ceil_div, element_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rocm_sd.kernels.hip.launch import Launcher

__all__ = ["GroupNormSiluConfig", "launch"]

_SHEET_THREADS = 256  # of the kernels for large maps, as in group_norm_silu.hip
_APPLY_ROWS = 4  # that one thread of `apply` takes
_LINE = 128  # bytes; threads side by side along the channels read one
_MOST_THREADS = 1024


@dataclass(frozen=True)
class GroupNormSiluConfig(Config):
    """A lane of `whole` holds at most `whole_values`; `slices_per_cu` of `moments` are wanted for each compute unit."""

    whole_values: int = 32
    slices_per_cu: int = 4


def launch(
    x: torch.Tensor,
    out: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    add: torch.Tensor | None,
    eps: float,
    silu: bool,
    config: GroupNormSiluConfig,
    compute_units: int,
    launcher: Launcher,
) -> None:
    """Fill `out`, which may be x; both are dense channels-last, `add` is dense [N, C]. All are of one dtype."""
    N, C, H, W = x.shape
    HW, group_width = H * W, C // groups
    common: dict[str, int | str] = {
        "element": element_of(x),
        "has_weight": int(weight is not None),
        "has_bias": int(bias is not None),
        "has_add": int(add is not None),
        "silu": int(silu),
    }
    share = 1.0 / (HW * group_width)
    tensors = (x, out, weight, bias, add)

    width = access_width(x.element_size(), group_width, tensors=tensors)
    vectors = HW * (group_width // width)
    chunks_at_most = config.whole_values // width
    if vectors <= _MOST_THREADS * chunks_at_most:
        threads = max(64, 1 << (ceil_div(vectors, chunks_at_most) - 1).bit_length())
        whole = {"width": width, "threads": threads, "chunks": ceil_div(vectors, threads), "group_width": group_width}
        kernel = _kernel("whole", {**common, **whole, "columns": 8})
        launcher.launch(kernel, (groups, N, 1), (x, out, weight, bias, add, C, HW, share, eps))
        return

    width = access_width(x.element_size(), C, tensors=tensors)
    columns = _LINE // (width * x.element_size())
    common |= {"width": width, "columns": columns, "threads": 64, "chunks": 1, "group_width": width}
    rows, c_blocks = _SHEET_THREADS // columns, ceil_div(C, columns * width)
    wanted = max(1, compute_units * config.slices_per_cu // (N * c_blocks))
    rows_per_slice = max(rows, ceil_div(HW, wanted))
    slices = ceil_div(HW, rows_per_slice)
    means, m2s = x.new_empty((2, N, slices, C), dtype=torch.float32)
    group_means, scales = x.new_empty((2, N, C), dtype=torch.float32)
    launcher.launch(_kernel("moments", common), (slices, c_blocks, N), (x, means, m2s, C, HW, rows_per_slice, slices))
    launcher.launch(
        _kernel("fold", common),
        (groups, N, 1),
        (means, m2s, weight, add, group_means, scales, C, HW, group_width, slices, rows_per_slice, share, eps),
    )
    blocks = ceil_div(HW, rows * _APPLY_ROWS)
    launcher.launch(
        _kernel("apply", common), (blocks, c_blocks, N), (x, out, group_means, scales, bias, add, C, HW, blocks)
    )


def _kernel(name: str, parameters: Mapping[str, int | str]) -> Kernel:
    return Kernel("group_norm_silu", f"group_norm_silu_{name}", tuple(parameters.items()))
