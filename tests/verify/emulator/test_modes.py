"""Registers of modes: those that kernels set are known, and every other one is refused."""

from __future__ import annotations

import pytest
from one_instruction import machine_code

from rocm_sd import arch
from rocm_sd.verify.emulator.decode import Decoder
from rocm_sd.verify.emulator.errors import UnknownInstruction
from rocm_sd.verify.emulator.scalar import bind_scalar

MODES = {"gfx1100": "HW_REG_MODE", "gfx1201": "HW_REG_WAVE_MODE", "gfx942": "HW_REG_MODE"}


def decoded(gfx, field, value):
    text = machine_code(gfx, f"s_setreg_imm32_b32 hwreg({MODES[gfx]}, {field}), {value}")
    return Decoder(arch.get(gfx), text, 0).at(0)


@pytest.mark.parametrize("gfx", MODES)
@pytest.mark.parametrize(("field", "value"), [("23, 1", 1), ("2, 2", 0)], ids=["saturate", "to nearest"])
def test_eight_bit_floats_saturate_and_halves_are_rounded_to_the_nearest(gfx, field, value):
    run, touched = bind_scalar(decoded(gfx, field, value))
    assert run(None) is None
    assert touched == 0


@pytest.mark.parametrize("gfx", MODES)
@pytest.mark.parametrize(("field", "value"), [("23, 1", 0), ("4, 2", 3), ("0, 4", 1), ("23, 2", 1), ("2, 2", 3)])
def test_other_modes_are_not_known(gfx, field, value):
    with pytest.raises(UnknownInstruction, match="a mode that is not modelled"):
        bind_scalar(decoded(gfx, field, value))
