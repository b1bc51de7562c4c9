"""What a compiled HIP source holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_sd.kernels.elf import Sections
from rocm_sd.verify.code_object import CodeObject

if TYPE_CHECKING:
    from rocm_sd.kernels.hip.toolchain import Compiled


def kernels_of(compiled: Compiled) -> dict[str, CodeObject]:
    """Every kernel by its name."""
    names = [kernel[".name"] for kernel in Sections(compiled.elf).metadata()["amdhsa.kernels"]]
    return {name: CodeObject.from_elf(compiled.elf, compiled.assembly, name) for name in names}
