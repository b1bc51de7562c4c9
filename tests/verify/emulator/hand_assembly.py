"""Kernels of a few instructions, assembled into whole code objects: the text of a body in, a CodeObject out."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from rocm_sd.verify.compiler import assemble

if TYPE_CHECKING:
    from rocm_sd.verify.code_object import CodeObject

HEADER = """\
.text
.globl kernel
.p2align 8
.type kernel,@function
kernel:
{body}
.Lend:
.size kernel, .Lend-kernel
.rodata
.p2align 6
.amdhsa_kernel kernel
  .amdhsa_group_segment_fixed_size {lds}
  .amdhsa_private_segment_fixed_size {scratch}
  .amdhsa_kernarg_size {kernarg}
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_user_sgpr_count 2
  .amdhsa_system_sgpr_workgroup_id_x 1
  .amdhsa_system_sgpr_workgroup_id_y 1
  .amdhsa_system_sgpr_workgroup_id_z 0
  .amdhsa_next_free_vgpr {all_vgprs}
  .amdhsa_next_free_sgpr 64
{special}
.end_amdhsa_kernel
.amdgpu_metadata
---
amdhsa.kernels:
  - .args:
{arguments}
    .group_segment_fixed_size: {lds}
    .kernarg_segment_align: 8
    .kernarg_segment_size: {kernarg}
    .max_flat_workgroup_size: {threads}
    .name: kernel
    .private_segment_fixed_size: {scratch}
    .sgpr_count: 64
    .symbol: kernel.kd
    .vgpr_count: {all_vgprs}
    .agpr_count: {agprs}
    .wavefront_size: {wave}
amdhsa.target: amdgcn-amd-amdhsa--{gfx}
amdhsa.version:
  - 1
  - 2
...
.end_amdgpu_metadata
"""

SPECIAL = {
    "gfx95": "  .amdhsa_accum_offset {vgprs}",
    "gfx94": "  .amdhsa_accum_offset {vgprs}",
    "gfx11": "  .amdhsa_wavefront_size32 1",
    "gfx12": "  .amdhsa_wavefront_size32 1",
}


@lru_cache(maxsize=256)
def kernel(
    body: str,
    gfx: str = "gfx1100",
    pointers: int = 1,
    *,
    waves: int = 1,
    lds: int = 0,
    scratch: int = 0,
    vgprs: int = 32,
    agprs: int = 0,
) -> CodeObject:
    """A kernel with s[0:1] as its argument pointer, s2 and s3 as workgroup numbers (not on gfx12), v0 as work item."""
    wave = 64 if gfx.startswith("gfx9") else 32
    arguments = "\n".join(
        f"      - .address_space: global\n        .name: a{place}\n        .offset: {8 * place}\n        .size: 8\n"
        "        .value_kind: global_buffer"
        for place in range(pointers)
    )
    text = HEADER.format(
        body=body,
        gfx=gfx,
        lds=lds,
        scratch=scratch,
        kernarg=8 * pointers,
        vgprs=vgprs,
        agprs=agprs,
        all_vgprs=vgprs + agprs,
        special=SPECIAL[gfx[:5]].format(vgprs=vgprs),
        arguments=arguments,
        threads=waves * wave,
        wave=wave,
    )
    return assemble(gfx, text)
