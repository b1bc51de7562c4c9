"""Runs single instructions: assembled by LLVM, decoded and executed by the engine on registers that a test made."""

from __future__ import annotations

import functools
from dataclasses import fields

import numpy as np

from rocm_sd import arch
from rocm_sd.kernels.elf import Sections
from rocm_sd.verify.code_object import CodeObject, EntryState
from rocm_sd.verify.emulator.memory import Memory


@functools.cache
def machine_code(gfx: str, source: str) -> bytes:
    from triton.backends.amd.compiler import assemble_amdgcn

    return Sections(assemble_amdgcn(source + "\n", gfx, "")).section(".text")[1]


def code_object(gfx: str, text: bytes) -> CodeObject:
    gpu = arch.get(gfx)
    numbers = dict.fromkeys(
        ("text_address", "entry_offset", "vgpr_spills", "sgpr_spills", "scratch", "lds", "kernarg_size"), 0
    )
    return CodeObject(
        arch=gpu,
        name="one_instruction",
        elf=b"",
        assembly="",
        text=text,
        vgprs=256,
        agprs=256,
        sgprs=104,
        wave_size=gpu.wave_size,
        workgroup_size=gpu.wave_size,
        arguments=(),
        entry=EntryState(**dict.fromkeys((f.name for f in fields(EntryState)), 0)),
        **numbers,
    )


def execute(gfx: str, source: str, group) -> None:
    from rocm_sd.verify.emulator.machine import Machine

    code = code_object(gfx, machine_code(gfx, source))
    machine = Machine(code)
    offset = 0
    with machine.launched(Memory([], 8)), np.errstate(all="ignore"):
        while offset < len(code.text):
            operation = machine.operation(offset)
            operation.run(group)
            offset = operation.following
    assert offset == len(code.text), "the decoder and the assembler disagree about the length"
