"""Write the tiles of the HIP kernels for the CMake build and for C++, from those of the Python launchers.

python tools/hip_tiles.py          rewrites library/tiles.cmake and include/rocm_sd/tile_table.hpp of the HIP kernels
python tools/hip_tiles.py --check  changes nothing, and fails when a file is not what the launchers say
"""

from __future__ import annotations

import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rocm_sd import arch
from rocm_sd.arch import MatrixUnit
from rocm_sd.kernels.hip import (
    attention,
    conv2d,
    linear_geglu,
    linear_moments,
    linear_residual,
    norm_geglu,
    norm_linear,
    toolchain,
    upsample_conv2d,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rocm_sd.arch import Arch
    from rocm_sd.kernels.hip.gemm import GemmConfig

__all__ = ["FILE", "HEADER", "header", "main", "text"]

FILE = toolchain.SOURCES.parent / "library" / "tiles.cmake"
HEADER = toolchain.INCLUDE / "rocm_sd" / "tile_table.hpp"
_DOT_WAVE64 = "dot_wave64"
T = TypeVar("T")


def _by_name(tiles: Mapping[MatrixUnit, T], dot_wave64: T) -> Mapping[str, T]:
    return {**{unit.name.lower(): found for unit, found in tiles.items()}, _DOT_WAVE64: dot_wave64}


# For a library the first and the last: the largest tile, and the one for what does not fill a card with it.
PRODUCTS: Mapping[str, Mapping[str, tuple[GemmConfig, ...]]] = {
    family: _by_name(module.TILES, module.DOT_WAVE64)
    for family, module in {
        "linear_residual": linear_residual,
        "batched_linear": linear_residual,
        "linear_geglu": linear_geglu,
        "linear_moments": linear_moments,
        "norm_linear": norm_linear,
        "norm_geglu": norm_geglu,
        "conv2d": conv2d,
        "upsample_conv2d": upsample_conv2d,
    }.items()
}
_ABOUT = """\
# Written by tools/hip_tiles.py from the tiles of the Python launchers; a test holds the two together.
#
# The matrix unit of each architecture, with waves of 64 if it is none; by unit and family a large and a small tile, and
# by the size of a head that of attention, each in the words that the source is compiled with.
"""


_ABOUT_HEADER = """\
// Written by tools/hip_tiles.py from the tiles of the Python launchers; a test holds the two together. tiles.hpp, which
// alone includes it, tells what the numbers are.
#pragma once

namespace rocm_sd {

"""


def text() -> str:
    """The whole of the file for CMake."""
    lines = [f"set(ROCM_SD_UNIT_{name} {_name(found)})" for name, found in _tagged().items()]
    for family, tiles in PRODUCTS.items():
        for unit, configs in tiles.items():
            for size, config in (("large", configs[0]), ("small", configs[-1])):
                lines.append(_line(unit, family, size, config.parameters))
    of_heads = _by_name(attention.TILES, attention.DOT_WAVE64)
    heads = sorted({head for by_head in of_heads.values() for head in by_head})
    lines.append(f"set(ROCM_SD_HEADS {' '.join(map(str, heads))})")
    for unit, by_head in of_heads.items():
        for head, choices in by_head.items():
            names = [field.name for field in fields(choices[0])]
            lines.append(_line(unit, "attention", head, [(name, getattr(choices[0], name)) for name in names]))
    return _ABOUT + "\n".join(lines) + "\n"


def header() -> str:
    """The whole of the file for C++."""
    archs = [f'{{"{name}", {_unit(_name(found))}, {found.compute_units}}}' for name, found in _tagged().items()]
    products = [
        f'{{{_unit(unit)}, "{family}", {_numbers(configs[0].parameters)}, {_numbers(configs[-1].parameters)}}}'
        for family, tiles in PRODUCTS.items()
        for unit, configs in tiles.items()
    ]
    heads = [
        f"{{{_unit(unit)}, {head}, {_numbers(asdict(choices[0]).items())}}}"
        for unit, by_head in _by_name(attention.TILES, attention.DOT_WAVE64).items()
        for head, choices in by_head.items()
    ]
    tables = (("architecture", "architecture_table", archs), ("tiles_of_product", "product_table", products))
    parts = [
        f"inline constexpr {kind} {name}[] = {{\n" + "".join(f"    {row},\n" for row in rows) + "};\n"
        for kind, name, rows in (*tables, ("tile_of_attention", "attention_table", heads))
    ]
    return _ABOUT_HEADER + "\n".join(parts) + "\n}  // namespace rocm_sd\n"


def _tagged() -> dict[str, Arch]:
    """Those that arch.hpp has a tag for."""
    tags = (toolchain.INCLUDE / "rocm_sd" / "arch.hpp").read_text(encoding="utf-8")
    return {name: found for name, found in arch.ARCHS.items() if found.matrix_unit and f"defined(__{name}__)" in tags}


def _unit(name: str) -> str:
    """As C++ has it: the kind, and the lanes of a wave."""
    kind = name.removesuffix("_wave64")
    return f"matrix_kind::{kind}, {64 if name in (_DOT_WAVE64, 'mfma') else 32}"


def _numbers(words: Iterable[tuple[str, int | str]]) -> str:
    return f"{{{', '.join(str(int(value)) for _, value in words)}}}"


def _name(of: Arch) -> str:
    unit = of.matrix_unit or MatrixUnit.NONE
    return _DOT_WAVE64 if unit is MatrixUnit.DOT and of.wave_size == 64 else unit.name.lower()


def _line(unit: str, family: str, which: str | int, words: Iterable[tuple[str, object]]) -> str:
    return f'set(ROCM_SD_TILE_{unit}_{family}_{which} "{" ".join(f"{key}={value}" for key, value in words)}")'


def main(arguments: list[str]) -> int:
    stale = [
        (file, wanted)
        for file, wanted in ((FILE, text()), (HEADER, header()))
        if not file.is_file() or file.read_text(encoding="utf-8") != wanted
    ]
    for file, wanted in stale:
        if "--check" in arguments:
            print(f"{file.name} is out of date. Type: python tools/{Path(__file__).name}")
        else:
            file.write_text(wanted, encoding="utf-8")
            print(f"rewrote {file.name}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
