"""A modelled time for machine code that was never run, and the order of candidates by it.

One launch, from what the compiler made (`Code`), what one workgroup does (`Program`) and the architecture's figures:

    busiest  = ceil(workgroups / units)                a unit is a CU, on RDNA a WGP; the fullest one ends last
    together = min(busiest, workgroups that fit on a unit at once)
    trips    = matrix operations, else bytes loaded, of a workgroup / those of the main loop
    pipes    = cycles of a workgroup on the matrix, vector, LDS and memory pipes of its unit
    compute  = busiest x (longest pipe + other pipes / waves a SIMD) / clock       waves hide one pipe behind another
    latency  = ceil(busiest / together) x (LATENCY + trips x (a wave's own cycles + what prefetching leaves of LATENCY))
    memory   = bytes / (bandwidth x (1 - exp(-bytes in flight / (bandwidth x LATENCY))))      Little's law, softened
    caches   = workgroups x bytes a workgroup moves / second-level bandwidth
    time     = LAUNCH + longest of the four + OVERLAP x the other three

Tiles that reach over the edge count in full, in `workgroups` and in the dots, so padding costs what it costs. Where
the table of architectures lacks a figure, the terms that need it are skipped, and `Modelled.not_modelled` names them.
It is a model: it ranks configs of one kernel on one architecture, forecasts no time, and was compared with no card.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rocm_sd.arch import Arch
    from rocm_sd.kernels.config import Config

__all__ = [
    "Code", "CodePart", "Modelled", "Program", "RatedConfig", "model", "rank", "seconds_at_least", "static_choice",
]  # fmt: skip

LAUNCH_S = 3e-6  # between two kernels of one stream, in a captured graph less
LATENCY_S = 6e-7  # of a load from memory with the caches cold
OVERLAP = 0.1  # of what could be hidden behind the longest term, and is not
LDS_BYTES_PER_CLOCK = 128  # a CU: 32 banks of 4 bytes
L1_BYTES_PER_CLOCK = 64  # a CU
L2_BYTES_PER_CLOCK = 32  # a CU's share; AMD's papers give 54 for CDNA3, and less is reported for RDNA
ADDRESSES_PER_CLOCK = 16  # lanes of one memory instruction
TILE = 16  # the smallest side of a matrix instruction's result in use

# 16-bit matrix operations a clock and CU, by AMD's tables; the peak rate of a product divided by them is its clock.
# Without a matrix unit they are those of the dot products of two pairs.
_FLOPS_PER_CLOCK = {
    "gcn5": 256, "rdna2": 256, "cdna1": 1024, "cdna2": 1024, "cdna3": 2048, "cdna4": 4096,
    "rdna3": 512, "rdna3.5": 512, "rdna4": 1024,
}  # fmt: skip
# Issue cycles of a wave's instruction: a SIMD of CDNA has 16 lanes for 64, one of RDNA 32 for 32; transcendental
# functions run at a quarter of that.
_ISSUE = {64: 4, 32: 1}


@dataclass(frozen=True)
class CodePart:
    """What one wave executes in a stretch of code.

    `vector` instructions are neither matrix nor transcendental; bytes are a lane's, `global_widths` of each access.
    """

    vector: int
    transcendental: int
    matrix_flops: int
    lds_bytes: int
    load_bytes: int
    global_widths: tuple[int, ...]


@dataclass(frozen=True)
class Code:
    """`resident` workgroups of `waves` waves fit on a unit at once; `main` is the main loop, `rest` all but it.

    `ahead`: the loop loads its next turns whatever it multiplies with; else it does where a matrix unit multiplies.
    """

    waves: int
    wave_size: int
    resident: int
    stages: int
    main: CodePart
    rest: CodePart
    has_loop: bool
    ahead: bool = False


@dataclass(frozen=True)
class Program:
    """What one workgroup does: bytes moved, (m, n, k, how many) of its matrix products, bytes of all tensors given.

    `flops` are the operations of the matrix unit where they were counted, which leaves nothing to derive from `dots`.
    """

    loaded: int
    stored: int
    dots: tuple[tuple[int, int, int, int], ...]
    tensors: int
    flops: int | None = None

    def matrix_flops(self, waves: int) -> float:
        """Operations, sides rounded up to the unit's; where waves outnumber tiles they repeat one another's work."""
        if self.flops is not None:
            return float(self.flops)
        total = 0.0
        for m, n, k, count in self.dots:
            rows, columns, depth = (math.ceil(side / TILE) for side in (m, n, k))
            total += 2.0 * TILE**3 * depth * count * max(rows * columns, waves)
        return total


@dataclass(frozen=True)
class Modelled:
    """Seconds by term, and why a term is missing."""

    seconds: float
    terms: Mapping[str, float]
    not_modelled: tuple[str, ...]


def _clock(arch: Arch) -> float | None:
    """Hertz at which the named product reaches its peak."""
    peak, flops = arch.peak("float16"), _FLOPS_PER_CLOCK.get(arch.family)
    return None if not (peak and flops and arch.compute_units) else peak * 1e12 / (flops * arch.compute_units)


def _trips(code: Code, program: Program) -> float:
    if not code.has_loop:
        return 1.0
    flops = program.matrix_flops(code.waves)
    if code.main.matrix_flops and flops:
        return max(1.0, flops / (code.main.matrix_flops * code.waves))
    if code.main.load_bytes:
        return max(1.0, program.loaded / (code.main.load_bytes * code.waves * code.wave_size))
    return 1.0


def _pipes(arch: Arch, code: Code, part: CodePart) -> dict[str, float]:
    """Cycles of one wave that has one SIMD, and one CU's LDS and cache, to itself."""
    issue = _ISSUE[code.wave_size] if arch.wave_size == code.wave_size else code.wave_size // 32
    flops = _FLOPS_PER_CLOCK.get(arch.family, 0) / (arch.simds_per_cu or 1)
    lanes = code.wave_size
    return {
        "matrix": part.matrix_flops / flops if flops else 0.0,
        "vector": float(issue * (part.vector + 4 * part.transcendental)),
        "lds": part.lds_bytes * lanes / LDS_BYTES_PER_CLOCK,
        "global": sum(max(w * lanes / L1_BYTES_PER_CLOCK, lanes / ADDRESSES_PER_CLOCK) for w in part.global_widths),
    }


def model(arch: Arch, workgroups: int, code: Code, program: Program) -> Modelled:
    """One launch of `workgroups` programs. What cannot be modelled, for want of a figure of `arch`, is named."""
    not_modelled = []
    clock, bandwidth = _clock(arch), arch.bandwidth_gbps
    cus_in_unit = arch.cus_per_wgp or 1
    cus = arch.compute_units or cus_in_unit
    units = max(1, cus // cus_in_unit)
    simds = (arch.simds_per_cu or 1) * cus_in_unit
    busiest = math.ceil(workgroups / units)
    together = max(1, min(busiest, code.resident))
    trips = _trips(code, program)
    moved = float(workgroups * (program.loaded + program.stored))
    terms: dict[str, float] = {}

    once, main = _pipes(arch, code, code.rest), _pipes(arch, code, code.main)
    if clock is None:
        not_modelled.append(f"compute, latency, caches: the clock of {arch.name} is not known")
    else:
        total = {pipe: once[pipe] + trips * main[pipe] for pipe in main}
        simds_in_use = min(simds, together * code.waves)
        on_unit = {
            pipe: cycles * code.waves / (simds_in_use if pipe in {"matrix", "vector"} else cus_in_unit)
            for pipe, cycles in total.items()
        }
        longest = max(on_unit.values())
        waves_per_simd = max(1.0, together * code.waves / simds)
        hidden = (sum(on_unit.values()) - longest) / waves_per_simd
        terms["compute"] = busiest * (longest + hidden) / clock

        alone = sum(main.values()) / clock
        ahead = code.stages - 1 if code.main.matrix_flops or code.ahead else 0
        wait = max(0.0, LATENCY_S - ahead * alone) if code.main.load_bytes and code.has_loop else 0.0
        own = LATENCY_S + sum(once.values()) / clock + trips * (alone + wait)
        terms["latency"] = math.ceil(busiest / max(1, code.resident)) * own
        terms["caches"] = moved / (L2_BYTES_PER_CLOCK * cus * clock)
    if bandwidth is None:
        not_modelled.append(f"memory: the bandwidth of {arch.name} is not known")
    else:
        rate = bandwidth * 1e9
        a_lane = code.main.load_bytes or code.rest.load_bytes or sum(code.main.global_widths) or 1
        in_flight = min(workgroups, units * code.resident) * code.waves * code.wave_size * a_lane
        kept_busy = -math.expm1(-in_flight / (rate * LATENCY_S))
        terms["memory"] = min(moved, float(program.tensors)) / (rate * kept_busy)
    longest_term = max(terms.values(), default=0.0)
    seconds = LAUNCH_S + longest_term + OVERLAP * (sum(terms.values()) - longest_term)
    return Modelled(seconds, terms, tuple(not_modelled))


def seconds_at_least(arch: Arch, workgroups: int, cycles: float, moved: float) -> float | None:
    """Of a launch whose work was counted: `cycles` if one CU did all of it, `moved` bytes of tensors.

    CUs share the workgroups, the fullest one ends last, and memory is as fast as its data sheet: latency, occupancy and
    caches are not in it. None where a figure of `arch` is not known.
    """
    clock, bandwidth = _clock(arch), arch.bandwidth_gbps
    if clock is None or bandwidth is None or not arch.compute_units:
        return None
    share = math.ceil(workgroups / arch.compute_units) / max(workgroups, 1)
    return LAUNCH_S + max(cycles * share / clock, moved / (bandwidth * 1e9))


@dataclass(frozen=True)
class RatedConfig:
    """A config with what was found. `dropped` says why it cannot be used; `blemishes` are gates that it fails."""

    config: Config
    modelled_us: float | None = None
    dropped: str | None = None
    blemishes: tuple[str, ...] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)


def _key(candidate: RatedConfig) -> tuple[Any, ...]:
    figures = candidate.figures
    return (
        len(candidate.blemishes) > 0,
        round(candidate.modelled_us or 0.0, 3),
        -figures.get("waves_per_simd", 0),
        figures.get("vgprs", 0),
        figures.get("lds", 0),
        tuple(candidate.config.to_dict().values()),
    )


def rank(candidates: Iterable[RatedConfig]) -> list[RatedConfig]:
    """Sort those that can be used, best first.

    Before the time comes whether every gate is passed. Ties, at a nanosecond: more waves a SIMD, then fewer registers,
    less LDS, and last the smaller values in the config, in the order of its fields.
    """
    return sorted((c for c in candidates if c.dropped is None), key=_key)


def static_choice(buckets: Iterable[Iterable[RatedConfig]]) -> tuple[RatedConfig, int] | None:
    """For problems outside of all buckets: the config that is valid in most buckets, nearest to the best of each.

    Nearness is the geometric mean of its time over the best one's. With the config comes the number of buckets in which
    it is valid; None where no bucket has a valid config.
    """
    found: dict[Config, list[tuple[RatedConfig, float]]] = {}
    for bucket in buckets:
        ranked = rank(bucket)
        best = min((c.modelled_us or 0.0 for c in ranked), default=0.0)
        for candidate in ranked:
            ratio = (candidate.modelled_us or 0.0) / best if best else 1.0
            found.setdefault(candidate.config, []).append((candidate, ratio))
    if not found:
        return None

    def key(served: list[tuple[RatedConfig, float]]) -> tuple[Any, ...]:
        blemished = sum(1 for candidate, _ in served if candidate.blemishes)
        mean = sum(math.log(ratio) for _, ratio in served) / len(served)
        return (-len(served), blemished, round(mean, 6), _key(served[0][0])[2:])

    chosen = min(found.values(), key=key)
    return chosen[0][0], len(chosen)
