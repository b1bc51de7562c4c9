"""What is read from an ELF, and that damaged or foreign files are refused with a reason."""

from __future__ import annotations

import pytest
from hand_assembly import kernel

pytest.importorskip("triton")

from rocm_sd.errors import InvalidCodeObject, RocmSdError
from rocm_sd.verify.code_object import CodeObject


@pytest.fixture(scope="module")
def elf() -> bytes:
    return kernel("s_nop 0\n s_endpgm", pointers=3, waves=4, lds=1024, scratch=64, vgprs=40).elf


def test_everything_that_is_read(elf):
    code = CodeObject.from_elf(elf, "text")
    assert code.arch.name == "gfx1100"
    assert (code.name, code.assembly, code.wave_size, code.workgroup_size) == ("kernel", "text", 32, 128)
    assert (code.vgprs, code.sgprs, code.agprs, code.lds, code.scratch) == (40, 64, 0, 1024, 64)
    assert (code.vgpr_spills, code.sgpr_spills, code.kernarg_size) == (0, 0, 24)
    assert [(a.name, a.offset, a.size, a.is_pointer) for a in code.arguments] == [
        ("a0", 0, 8, True),
        ("a1", 8, 8, True),
        ("a2", 16, 8, True),
    ]
    assert code.text[code.entry_offset : code.entry_offset + 8] == bytes.fromhex("000080bf0000b0bf")
    assert code.entry.kernarg_segment_ptr
    assert code.entry.user_sgprs == 2
    assert code.entry.workgroup_id == (True, True, False)


@pytest.mark.parametrize("gfx", ["gfx942", "gfx1201", "gfx1103", "gfx1151"])
def test_the_architecture_is_that_of_the_file(gfx):
    assert kernel("s_endpgm", gfx).arch.name == gfx


def test_another_file_is_refused():
    with pytest.raises(InvalidCodeObject, match="does not begin as an ELF"):
        CodeObject.from_elf(b"PK\x03\x04" + bytes(100))
    with pytest.raises(InvalidCodeObject, match="does not begin as an ELF"):
        CodeObject.from_elf(b"")


def test_an_elf_for_another_machine(elf):
    with pytest.raises(InvalidCodeObject, match="machine 62, not for an AMD GPU"):
        CodeObject.from_elf(elf[:18] + (62).to_bytes(2, "little") + elf[20:])


def test_a_32_bit_elf(elf):
    with pytest.raises(InvalidCodeObject, match="64-bit"):
        CodeObject.from_elf(elf[:4] + b"\x01" + elf[5:])


def test_an_architecture_that_is_not_in_the_table(elf):
    with pytest.raises(InvalidCodeObject, match="gfx9900") as caught:
        CodeObject.from_elf(elf.replace(b"--gfx1100", b"--gfx9900"))
    assert "gfx1100" in caught.value.hint


def test_a_file_cut_anywhere_is_refused_with_a_reason(elf):
    for length in range(0, len(elf) - 1, 97):
        with pytest.raises(InvalidCodeObject):
            CodeObject.from_elf(elf[:length])


def test_damage_is_never_a_python_error(elf):
    # One bad byte either changes nothing that is read or is refused; IndexError and its kin would be a bug here.
    for place in range(0, len(elf), 41):
        damaged = bytearray(elf)
        damaged[place] ^= 0xFF
        try:
            CodeObject.from_elf(bytes(damaged))
        except RocmSdError as error:
            assert error.exit_code == 9  # noqa: PT017 - reading may as well succeed


def test_a_kernel_that_is_not_there(elf):
    with pytest.raises(InvalidCodeObject, match="no kernel 'other'") as caught:
        CodeObject.from_elf(elf, name="other")
    assert "kernel" in caught.value.hint
