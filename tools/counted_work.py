"""Count the work of a picture's kernels on AMD cards: src/rocm_sd/bench/data/counted.json, by the emulator.

python tools/counted_work.py                           all workloads, cards and plans: about 15 minutes
python tools/counted_work.py sd15-512 --arch gfx1100   some; the others stay as they are

The real architecture runs at its real size on an emulated card (rocm_sd.verify.emulated): every launch is compiled for
it, and one workgroup in the middle of its grid is executed and counts for all. What stock torch would compute is
counted by its inputs and results, and not computed. Two plans: `every`, all rules with this project's kernels, and
`shipped`, what the card does before anything was measured on it.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd import arch as archs
from rocm_sd.bench import architectures
from rocm_sd.bench.emulated_picture import PLANS
from rocm_sd.bench.workloads import WORKLOADS
from rocm_sd.engine import optimize_with, restore
from rocm_sd.files import write_text
from rocm_sd.verify import emulated
from rocm_sd.verify.proofs import EMULATED
from rocm_sd.verify.stock_work import ATTENTION, StockWork

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from rocm_sd.verify.device import EmulatedCard, Launch

__all__ = ["count", "main", "text"]

DATA = Path(__file__).resolve().parents[1] / "src/rocm_sd/bench/data/counted.json"
COUNTED = ("sd15-512", "sdxl-mlperf")
PLANS_COUNTED = ("every", "shipped")
DTYPE = torch.float16
# Stock's ops by the family whose timings they are most like; all others are passes over memory.
_FAMILIES = {
    "convolution": "conv2d",
    "addmm": "linear_residual",
    "mm": "linear_residual",
    "bmm": "linear_residual",
    "baddbmm": "linear_residual",
    "native_group_norm": "group_norm_silu",
    "native_layer_norm": "layer_norm_residual",
}


def count(workload: str, gfx: str, plan: str) -> dict[str, list[list[Any]]]:
    """By part, rows of [family, ours or not, count, workgroups, cycles on one CU, FLOPs, bytes, waves a SIMD]."""
    recipe = WORKLOADS[workload]
    pipe = architectures.random_pipeline(
        recipe.family, recipe.scheduler, recipe.prediction, torch.device("meta"), DTYPE
    )
    side = recipe.side // 8
    latents = torch.zeros(1, 4, side, side, dtype=DTYPE)
    inputs = architectures.unet_inputs(pipe.unet.config, 2, side, side, DTYPE)
    parts: dict[str, tuple[nn.Module, Callable[[nn.Module], object]]] = {
        "step": (pipe.unet, lambda unet: unet(**inputs)),
        "decode": (pipe.vae.decoder, lambda decoder: decoder(latents)),
    }
    found = {}
    for part, (model, call) in parts.items():
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            # A picture of zeros overflows nowhere.
            parameter.data.zero_()
        found[part] = _counted(model, call, gfx, plan)
        model.to("meta")
    return found


def _counted(model: nn.Module, call: Callable[[nn.Module], object], gfx: str, plan: str) -> list[list[Any]]:
    chosen = PLANS[plan]
    with torch.no_grad(), emulated(gfx, prefer=chosen.prefer, one_only=True) as card:
        optimize_with(model, "performance", "exact", chosen.parts)
        # Weights that belong together are packed in the first call.
        with StockWork(card.arch, compute=False):
            call(model)
        before = len(card.launches)
        with StockWork(card.arch, compute=False) as stock:
            call(model)
        restore(model)
    return sorted(_ours(card, before) + _stocks(stock))


def _ours(card: EmulatedCard, first: int) -> list[list[Any]]:
    rows: Counter[tuple[Any, ...]] = Counter()
    for launch in card.launches[first:]:
        counters = launch.counters
        moved = min(launch.tensors, counters.bytes_loaded + counters.bytes_stored)
        cycles = round(counters.modelled_cycles())
        rows[launch.op, 1, counters.workgroups, cycles, counters.matrix_flops, moved, _waves(card.arch, launch)] += 1
    return [[*row[:2], number, *row[2:]] for row, number in rows.items()]


def _waves(arch: archs.Arch, launch: Launch) -> int:
    code = launch.code
    waves = max(1, code.workgroup_size // code.wave_size)
    return archs.occupancy(arch, code.vgprs, code.lds, waves, wave_size=code.wave_size, agprs=code.agprs).waves_per_simd


def _stocks(stock: StockWork) -> list[list[Any]]:
    rows: Counter[tuple[Any, ...]] = Counter()
    for call, number in stock.by_call.items():
        family = "attention" if call.name.startswith(ATTENTION) else _FAMILIES.get(call.name, "copy")
        rows[family, 0, 0, 0, call.flops, call.bytes, 0] += number
    return [[*row[:2], number, *row[2:]] for row, number in rows.items()]


def text(data: dict[str, Any]) -> str:
    """One row a line: a change of one kernel is one line of a diff."""
    # Rows are the innermost lists, of words and numbers alone.
    lines = json.dumps(data, indent=1)
    return re.sub(r"\[\s+([^\[\]{}]+?)\s+\]", lambda row: f"[{' '.join(row[1].split())}]", lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=[], help=", ".join(COUNTED))
    parser.add_argument("--arch", default=",".join(EMULATED))
    parser.add_argument("--plan", default=",".join(PLANS_COUNTED))
    options = parser.parse_args()
    data: dict[str, Any] = {"about": "Made by tools/counted_work.py; do not edit", "workloads": {}}
    if DATA.is_file():
        data = json.loads(DATA.read_text(encoding="utf-8"))
    for workload in options.workloads or COUNTED:
        for gfx in options.arch.split(","):
            for plan in options.plan.split(","):
                made = count(workload, gfx, plan)
                data["workloads"].setdefault(workload, {}).setdefault(gfx, {})[plan] = made
                write_text(DATA, text(data))
                calls = ", ".join(f"{part} {sum(row[2] for row in rows)}" for part, rows in made.items())
                print(f"{workload} {gfx} {plan}: calls in {calls}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
