"""Records of a card that does not exist, for tests of the page: no figure of them is one of a machine."""

from __future__ import annotations

import random

from rocm_sd.bench.records import OURS, STOCK, Machine, Measurement, Record, WorkloadFacts
from rocm_sd.bench.several_gpus_record import TOGETHER, GpusRecord, Way
from rocm_sd.measuring import compare

CARD = Machine(
    device="Test Card",
    arch="gfx1100",
    compute_units=96,
    memory_mib=24576,
    driver="6.4.0",
    system="Linux",
    versions={"python": "3.11.2", "torch": "2.13.0", "diffusers": "0.42.1", "rocm-sd": "0.1.0"},
)
WORKLOAD = WorkloadFacts("sd15-512", "sd15", "random", 512, 512, 50, "DDIM", 7.5, "float16")


def timings(middle: float, turns: int = 20, spread: float = 0.02, seed: int = 0) -> tuple[float, ...]:
    random_ = random.Random(seed)
    return tuple(middle * (1 + random_.uniform(-spread, spread)) for _ in range(turns))


def measurement(engine: str, batch: int, ms: float, **more: object) -> Measurement:
    given = {
        "version": "1.0",
        "provider": "torch",
        "steps": 50,
        "warm_up_s": 3.0,
        "first_run_mib": 2400.0,
        "second_run_mib": 2200.0,
        "power_watt": 300.0,
        "floor_ms": 100.0 * batch,
        "error": 0.0014,
        "stock_error": 0.0022,
    } | more
    return Measurement(engine=engine, batch=batch, ms=timings(ms, seed=len(engine) + batch), **given)


def engines(*, batches: tuple[int, ...] = (1, 8), **more: object) -> Record:
    """stock, compile, rocm-sd, one that is no different from stock and one that was wrong."""
    rows, comparisons = [], []
    for batch in batches:
        here = [
            measurement("stock", batch, 1690.0 * batch**0.8),
            measurement("channels_last", batch, 1688.0 * batch**0.8),
            measurement("compile", batch, 404.0 * batch**0.8, warm_up_s=64.0, first_run_mib=2600.0),
            measurement("rocm-sd", batch, 280.0 * batch**0.8, warm_up_s=11.0),
        ]
        stock = here[0]
        comparisons += [compare(m.engine, "stock", batch, m.ms, stock.ms) for m in here[1:]]
        comparisons.append(compare("rocm-sd", "compile", batch, here[3].ms, here[2].ms))
        wrong = "its latents are 9 times as far from float32 as stock's"
        rows += [*here, Measurement("xformers", "1.0", "torch", batch, (), 50, left_out=wrong)]
    given = {"when": "2026-01-02T03:04:05+00:00", "command": "rocm-sd bench sd15-512 --batch 1,8"} | more
    return Record("engines", WORKLOAD, CARD, measurements=tuple(rows), comparisons=tuple(comparisons), **given)


def ablation() -> Record:
    rows = {"stock": 1690.0, "channels-last": 1400.0, "GroupNorm": 1402.0, "GEGLU": 1430.0, "step graph": 280.0}
    rows["compile"] = 410.0
    found = [measurement(name, batch, ms * batch**0.8) for batch in (1, 8) for name, ms in rows.items()]
    return Record("ablation", WORKLOAD, CARD, "rocm-sd bench sd15-512 --ablation", "2026-01-02T03:04:05", tuple(found))


def op() -> Record:
    cases = ("conv2d 2x320x64x64 to 4, 3x3, bias add residual, float16", "geglu 512x5120, float16")
    found = [
        Measurement(engine, "1.0", provider, case, timings(ms), 1)
        for case in (1, 2)
        for engine, provider, ms in (("stock", "torch", 0.034), ("rocm-sd", "triton (exact)", 0.016))
    ]
    facts = WorkloadFacts("ops", "ops", "random", 0, 0, 1, "", 0.0, "float16")
    return Record("op", facts, CARD, "rocm-sd bench ops", "2026-01-02T03:04:05", tuple(found), op_cases=cases)


def gpus(ranks: int = 2, plan: str = "cfg=2", **more: object) -> GpusRecord:
    """stock and rocm-sd on one rank, and all ranks, at eight tenths of what so many could do."""
    ways = (
        Way(STOCK, 1, timings(1690.0, seed=1), 1e-3, 1e-3),
        Way(OURS, 1, timings(280.0, seed=2), 9e-4, 1e-3),
        Way(TOGETHER, ranks, timings(280.0 / (0.8 * ranks), seed=3), 9e-4, 1e-3),
    )
    given = {
        "command": f"rocm-sd bench sd15-512 --gpus {ranks}", "when": "2026-01-02T03:04:05+00:00",
        "cards": ("Test Card",) * ranks, "plan": plan, "why": "it was asked for", "link": 24e9, "pictures": 1,
        "ways": ways, "sent": {"cfg": 3.2e4, "vae": 1.5e6},
    } | more  # fmt: skip
    return GpusRecord(WORKLOAD, CARD, **given)
