"""What the compiler made of a kernel: registers, spills, LDS, waves, instructions, loops and the width of its accesses.

Read from the code object's metadata and from its assembly text. A loop is what leads back to itself, in whatever order
its blocks stand in the text; the main loop is the innermost one with the most matrix instructions, then the most global
loads.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rocm_sd import arch as archs
from rocm_sd.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from rocm_sd.verify.code_object import CodeObject

__all__ = ["Instruction", "IsaReport", "Loop", "MemoryAccess", "access", "instructions", "report"]

_LABEL = re.compile(r"^(?P<name>[.\w$]+):")
_INSTRUCTION = re.compile(
    r"^\s+(?P<mnemonic>(?:s|v|ds|global|buffer|flat|scratch|tensor|image|exp)_\w+)(?P<rest>[^;]*)"
)
_MEMORY = re.compile(r"^(?P<space>global|buffer|flat|scratch|ds)_(?P<kind>load|store|read|write)(?P<type>\w*)$")
_BITS = re.compile(
    r"_(?P<two>2addr_|2st64_|2_)?(?:stride64_)?(?:tr\d*_)?(?:lds_)?[buif](?P<bits>8|16|32|64|96|128)(?:_|$)"
)
_OLD_NAMES = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "short": 2, "ushort": 2, "sshort": 2}
_OLD_NAMES |= {"byte": 1, "ubyte": 1, "sbyte": 1}
_MATRIX = ("v_wmma_", "v_swmmac_", "v_mfma_", "v_smfmac_")
_MATRIX_SHAPE = re.compile(r"_(?P<m>\d+)x(?P<n>\d+)x(?P<k>\d+)(?:_(?P<blocks>\d+)b)?")
_TRANSCENDENTAL = ("v_exp_", "v_log_", "v_rcp_", "v_rsq_", "v_sqrt_", "v_sin_", "v_cos_", "v_s_exp_", "v_s_rcp_")
_SPACES = {"global": "global", "buffer": "global", "flat": "global", "scratch": "scratch", "ds": "lds"}


@dataclass(frozen=True)
class Instruction:
    """`labels` stand right before it; `target` is the label that a branch goes to."""

    mnemonic: str
    operands: str
    labels: tuple[str, ...] = ()

    @property
    def is_matrix(self) -> bool:
        return self.mnemonic.startswith(_MATRIX)

    @property
    def matrix_flops(self) -> int:
        """Operations of one wave: v_wmma_f32_16x16x16_f16 does 2 x 16 x 16 x 16. Names of gfx908 hide 4x4's blocks."""
        shape = _MATRIX_SHAPE.search(self.mnemonic) if self.is_matrix else None
        if shape is None:
            return 0
        m, n, k = (int(shape[side]) for side in "mnk")
        return 2 * m * n * k * int(shape["blocks"] or (16 if m == 4 else 1))

    @property
    def is_transcendental(self) -> bool:
        return self.mnemonic.startswith(_TRANSCENDENTAL)

    @property
    def is_vector(self) -> bool:
        """Takes a turn of the SIMD's vector unit; two operations of one dual instruction take one."""
        return self.mnemonic.startswith("v_") and not self.is_matrix

    @property
    def target(self) -> str | None:
        return self.operands if self.mnemonic.startswith(("s_branch", "s_cbranch")) else None


@dataclass(frozen=True)
class MemoryAccess:
    """One memory instruction: which memory, which way, and bytes a lane."""

    space: str
    is_load: bool
    width: int


@dataclass(frozen=True)
class Loop:
    """`places` of its instructions, in the order of the text; `depth` 1 is outermost."""

    places: tuple[int, ...]
    depth: int
    innermost: bool


@dataclass(frozen=True)
class IsaReport:
    """The figures of one kernel; `main` covers the main loop, or the whole kernel where there is no loop.

    `workgroups` of `waves` waves fit on a unit (a CU, or a WGP) at once; operations and instructions are a wave's.
    `vector` counts every vector instruction but the matrix ones, `transcendental` those among them.
    """

    kernel: str
    arch: str
    vgprs: int
    agprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    scratch: int
    lds: int
    waves_per_simd: int
    limited_by: str
    instructions: int
    histogram: tuple[tuple[str, int], ...]
    loops: tuple[Loop, ...]
    has_main_loop: bool
    matrix_in_main: int
    matrix: int
    accesses_in_main: tuple[MemoryAccess, ...]
    accesses: tuple[MemoryAccess, ...]
    waves: int
    wave_size: int
    workgroups: int
    matrix_flops_in_main: int
    matrix_flops: int
    vector_in_main: int
    vector: int
    transcendental_in_main: int
    transcendental: int

    @property
    def spills(self) -> int:
        return self.vgpr_spills + self.sgpr_spills

    def widths(self, space: str, *, loads: bool, main: bool = False) -> dict[int, int]:
        """How many instructions of each width in bytes, e.g. {16: 4, 2: 1}."""
        wanted = self.accesses_in_main if main else self.accesses
        counted = Counter(a.width for a in wanted if a.space == space and a.is_load == loads)
        return dict(sorted(counted.items(), reverse=True))

    def share_of_wide_loads(self, width: int = 16) -> float | None:
        """Of the bytes loaded from global memory in the main loop, the share by loads of `width`; None without any."""
        loads = self.widths("global", loads=True, main=True)
        total = sum(each * count for each, count in loads.items())
        return loads.get(width, 0) * width / total if total else None

    def to_dict(self) -> dict[str, Any]:
        figures = {
            name: getattr(self, name)
            for name in (
                "kernel", "arch", "vgprs", "agprs", "sgprs", "vgpr_spills", "sgpr_spills", "scratch", "lds",
                "waves_per_simd", "limited_by", "instructions", "has_main_loop", "matrix", "matrix_in_main",
                "matrix_flops_in_main", "vector_in_main", "transcendental_in_main",
            )
        }  # fmt: skip
        figures["loops"] = len(self.loops)
        figures["histogram"] = dict(self.histogram)
        for space in ("global", "lds"):
            for loads, word in ((True, "loads"), (False, "stores")):
                figures[f"{space}_{word}"] = self.widths(space, loads=loads)
                figures[f"{space}_{word}_in_main"] = self.widths(space, loads=loads, main=True)
        return figures


def instructions(assembly: str, kernel: str) -> list[Instruction]:
    """The instructions of one kernel in order, each with the labels in front of it."""
    found: list[Instruction] = []
    labels: list[str] = []
    inside = False
    for line in assembly.splitlines():
        label = _LABEL.match(line)
        if label:
            inside = inside or label["name"] == kernel
            if label["name"].startswith(".Lfunc_end") and inside:
                break
            labels.append(label["name"])
            continue
        match = _INSTRUCTION.match(line) if inside else None
        if match:
            found.append(Instruction(match["mnemonic"], match["rest"].strip(), tuple(labels)))
            labels = []
    if not found:
        raise Unsupported("The ISA report", f"an assembly text without the kernel {kernel!r}")
    return found


def access(mnemonic: str) -> MemoryAccess | None:
    """global_load_b128 and buffer_load_dwordx4 load 16 bytes, ds_read2_b64 too; None for what is not an access."""
    match = _MEMORY.match(mnemonic)
    if match is None:
        return None
    width = _width(match["type"])
    if width is None:
        raise Unsupported("The ISA report", f"the memory instruction {mnemonic}, whose width it does not know")
    return MemoryAccess(_SPACES[match["space"]], match["kind"] in {"load", "read"}, width)


def _width(type_: str) -> int | None:
    for name, width in _OLD_NAMES.items():
        if f"_{name}_" in f"{type_}_":
            return width
    if "d16" in type_ and "_b16" not in type_ and not re.search(r"[ui]8", type_):
        return 2
    match = _BITS.search("_" + type_.lstrip("_"))
    return None if match is None else int(match["bits"]) // 8 * (2 if match["two"] else 1)


_Graph = dict[int, set[int]]


def _loops(code: Sequence[Instruction]) -> list[Loop]:
    blocks, after = _blocks(code)
    return sorted(_nested(blocks, after, after, 1), key=lambda loop: (loop.places[0], loop.depth))


def _blocks(code: Sequence[Instruction]) -> tuple[dict[int, range], _Graph]:
    """Runs of instructions by their first, and where each goes on. What `s_endpgm` ends has nothing after it."""
    places = {label: index for index, instruction in enumerate(code) for label in instruction.labels}
    begins = [
        index
        for index, instruction in enumerate(code)
        if index == 0 or instruction.labels or _ends_block(code[index - 1])
    ]
    blocks = {first: range(first, end) for first, end in zip(begins, [*begins[1:], len(code)], strict=True)}
    after: _Graph = {}
    for first, block in blocks.items():
        last = code[block[-1]]
        goes_on = block.stop < len(code) and not last.mnemonic.startswith(("s_branch", "s_endpgm"))
        target = places.get(last.target or "")
        after[first] = {place for place in (target, block.stop if goes_on else None) if place is not None}
    return blocks, after


def _ends_block(instruction: Instruction) -> bool:
    return instruction.target is not None or instruction.mnemonic.startswith("s_endpgm")


def _nested(blocks: Mapping[int, range], after: _Graph, whole: _Graph, depth: int) -> Iterator[Loop]:
    """The loops of `after`; those within a loop are what still leads back when no way to its entries is left.

    Compilers turn a loop so that it is entered in its middle, and branches to several of its blocks all go back: from
    one label to its last branch there may be a part of it, the one without the loads say.
    """
    import networkx as nx  # noqa: PLC0415 -- 150 ms, and whoever only imports this module has no loops

    # Of such a set each block leads to all others.
    for component in nx.strongly_connected_components(nx.DiGraph(after)):
        if not any(component & after[block] for block in component):
            continue
        entries = {to for block in whole.keys() - component for to in whole[block] & component} or {min(component)}
        inner = {block: (after[block] & component) - entries for block in component}
        within = list(_nested(blocks, inner, whole, depth + 1))
        places = tuple(place for block in sorted(component) for place in blocks[block])
        yield Loop(places, depth, not within)
        yield from within


def _histogram(code: Iterable[Instruction]) -> Counter[str]:
    counted: Counter[str] = Counter()
    for instruction in code:
        counted[_short(instruction.mnemonic)] += 1
        second = instruction.operands.partition("::")[2].strip()
        if second:
            counted[_short(second.split()[0])] += 1
    return counted


def _short(mnemonic: str) -> str:
    return re.sub(r"_(e32|e64|dpp|sdwa|e64_dpp)$", "", mnemonic)


def _accesses(code: Iterable[Instruction]) -> tuple[MemoryAccess, ...]:
    return tuple(found for instruction in code if (found := access(instruction.mnemonic)))


def _main(code: list[Instruction], loops: Iterable[Loop]) -> list[Instruction] | None:
    bodies = [[code[place] for place in loop.places] for loop in loops if loop.innermost]
    if not bodies:
        return None

    def weight(body: list[Instruction]) -> tuple[int, int, int]:
        loads = [a for a in _accesses(body) if a.is_load and a.space == "global"]
        return sum(i.is_matrix for i in body), sum(a.width for a in loads), len(body)

    return max(bodies, key=weight)


def report(code: CodeObject) -> IsaReport:
    """The figures of a code object that has its assembly text."""
    body = instructions(code.assembly, code.name)
    loops = _loops(body)
    main = _main(body, loops)
    waves = -(-code.workgroup_size // code.wave_size)
    # In a unified file the metadata's VGPR count is the sum of both kinds: head size 512 needs 479 on gfx942.
    agprs = 0 if code.arch.agprs_unified else code.agprs
    fits = archs.occupancy(
        code.arch, code.vgprs, code.lds, waves, wave_size=code.wave_size, sgprs=code.sgprs, agprs=agprs
    )
    in_main = {f"{name}_in_main": value for name, value in _work(main or body).items()}
    return IsaReport(
        kernel=code.name,
        arch=code.arch.name,
        waves_per_simd=fits.waves_per_simd,
        limited_by=fits.limited_by,
        instructions=len(body),
        histogram=tuple(sorted(_histogram(body).items(), key=lambda entry: (-entry[1], entry[0]))),
        loops=tuple(loops),
        has_main_loop=main is not None,
        waves=waves,
        workgroups=fits.workgroups,
        **{name: getattr(code, name) for name in _OF_THE_METADATA},
        **_work(body),
        **in_main,
    )


_OF_THE_METADATA = ("vgprs", "agprs", "sgprs", "vgpr_spills", "sgpr_spills", "scratch", "lds", "wave_size")


def _work(code: Sequence[Instruction]) -> dict[str, Any]:
    counted = {name: sum(getattr(i, f"is_{name}") for i in code) for name in ("matrix", "vector", "transcendental")}
    return {**counted, "matrix_flops": sum(i.matrix_flops for i in code), "accesses": _accesses(code)}
