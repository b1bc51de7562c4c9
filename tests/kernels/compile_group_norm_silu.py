"""Compile the kernels for each gfx and print what came out; a process of its own, without Triton's interpreter."""

from __future__ import annotations

import json
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rocm_sd import arch
from rocm_sd.kernels.triton import group_norm_silu as kernels
from rocm_sd.tuning import lookup

HALF = ("x", "y", "weight", "bias", "add")
FLOAT = ("means", "m2s", "group_means", "scales")
ALIGNED = ["tt.divisibility", 16]


def compile_one(kernel, constants: dict[str, object], gfx: str, warps: int) -> dict[str, object]:
    signature: dict[str, str] = {}
    for name in kernel.arg_names:
        pointer = "*fp16" if name in HALF else "*fp32" if name in FLOAT else None
        scalar = "fp32" if name == "eps" else "i32"
        signature[name] = "constexpr" if name in constants else pointer or scalar
    # Real channel counts and allocations are multiples of 16; Triton specialises on that at launch.
    attributes = {(place,): [ALIGNED] for place, name in enumerate(kernel.arg_names) if name in (*HALF, *FLOAT, "C")}
    source = ASTSource(
        kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs=attributes,
    )
    target = GPUTarget("hip", gfx, arch.get(gfx).wave_size)
    text = triton.compile(source, target=target, options={"num_warps": warps}).asm["amdgcn"]

    def count(field: str) -> int:
        return int(re.search(rf"\.{field}:\s+(\d+)", text)[1])

    return {
        "vgprs": count("vgpr_count"),
        "spills": count("vgpr_spill_count") + count("sgpr_spill_count"),
        "scratch": count("private_segment_fixed_size"),
        "lds": count("group_segment_fixed_size"),
        "wide_loads": len(re.findall(r"(?:global|buffer)_load_(?:b128|dwordx4)", text)),
        "wide_stores": len(re.findall(r"(?:global|buffer)_store_(?:b128|dwordx4)", text)),
    }


def main(names: list[str]) -> None:
    results = {}
    for gfx in names:
        config = kernels.GroupNormSiluConfig.from_mapping(lookup("group_norm_silu", gfx, {}).config)
        tile = {"BLOCK_C": config.block_c}
        results[gfx] = {
            "moments": compile_one(kernels._moments, tile | {"ROWS": config.moments_rows}, gfx, config.moments_warps),
            "fold": compile_one(
                kernels._fold, {"HAS_WEIGHT": True, "HAS_ADD": True, "BLOCK_S": 16, "BLOCK_G": 128}, gfx, 4
            ),
            "apply": compile_one(
                kernels._apply,
                tile | {"HAS_BIAS": True, "HAS_ADD": True, "SILU": True, "ROWS": config.apply_rows},
                gfx,
                config.apply_warps,
            ),
        }
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
