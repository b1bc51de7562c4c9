"""Take measurements of a card into the data that are shipped: python tools/ship_measurements.py EXPORT...

EXPORT is what `rocm-sd tune --export FILE` wrote. Each problem that was measured becomes an entry for that very shape
in src/rocm_sd/tuning/data/<arch>/<op>.json, with the fastest candidate that is right and faster than stock torch beyond
doubt, or with stock torch. An entry that is there already stays unless the new measurements contradict it beyond doubt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rocm_sd.tuning.choice import STOCK, entry_for

DATA = Path(__file__).parents[1] / "src" / "rocm_sd" / "tuning" / "data"
KERNEL = "triton"  # whose config an entry has, whoever is chosen

Measured = dict[str, Any]


def shares(measured: Measured) -> tuple[float, float]:
    """Of stock's time, from and to."""
    return measured["low_us"] / measured["stock_us"], measured["high_us"] / measured["stock_us"]


def fastest(candidates: list[Measured]) -> Measured | None:
    """The fastest that is faster than stock beyond doubt."""
    return min((one for one in candidates if shares(one)[1] < 1), key=lambda one: one["median_us"], default=None)


def contradicted(entry: Measured, candidates: list[Measured], best: Measured | None) -> bool:
    """Whether what the data name is slower than stock, or than the best, beyond doubt."""
    named = entry["implementation"]
    if named == STOCK:
        return best is not None
    own = [one for one in candidates if one["candidate"] == named and one["config"] in ({}, entry.get("config", {}))]
    if not own:
        return False
    least = shares(own[0])[0]
    return least > 1 or (best is not None and shares(best)[1] < least)


def entry_of(problem: dict[str, Any], candidates: list[Measured], best: Measured | None, before: Measured) -> Measured:
    kernels = [one for one in candidates if one["candidate"] == KERNEL]
    kernel = min(kernels, key=lambda one: one["median_us"], default=None)
    config = before.get("config", {}) if kernel is None else kernel["config"]
    if best is None:
        near = min(candidates, key=lambda one: shares(one)[1])
        why = f"measured: {near['stock_us']:.1f} us, {near['candidate']} {near['median_us']:.1f} us: no clear gain"
        return {"when": problem, "implementation": STOCK, "config": config, "why": why}
    config = best["config"] or config
    why = f"measured: {best['median_us']:.1f} us, stock {best['stock_us']:.1f} us"
    return {"when": problem, "implementation": best["candidate"], "config": config, "why": why}


def taken_in(table: dict[str, Any], measurements: list[Measured]) -> int:
    """How many entries are new or other ones; `measurements` are of the table's op and architecture."""
    by_problem: dict[str, list[Measured]] = {}
    for one in measurements:
        by_problem.setdefault(json.dumps(one["problem"], sort_keys=True), []).append(one)
    changed = 0
    for candidates in by_problem.values():
        right = [one for one in candidates if one["numerics"] == "ok" and one["stock_us"] and one["candidate"] != STOCK]
        if not right:
            continue
        source, before = entry_for(table, candidates[0]["problem"])
        best = fastest(right)
        if source == "exact" and not contradicted(before, right, best):
            continue
        if best is None and before["implementation"] == STOCK:
            continue
        problem = {name: candidates[0]["problem"][name] for name in _order(table, candidates[0]["problem"])}
        exact = table.setdefault("exact", [])
        exact[:] = [entry for entry in exact if entry["when"] != problem]
        exact.append(entry_of(problem, right, best, before))
        changed += 1
    return changed


def _order(table: dict[str, Any], problem: dict[str, Any]) -> list[str]:
    """Names as in the entries that are there: an export has them by the alphabet."""
    known = next((entry["when"] for entry in table.get("exact", ()) if entry["when"].keys() == problem.keys()), problem)
    return list(known)


def main(exports: list[str]) -> None:
    measurements = [one for export in exports for one in json.loads(Path(export).read_text())["measurements"]]
    for arch, op in sorted({(one["environment"]["arch"], one["op"]) for one in measurements}):
        file = DATA / arch / f"{op}.json"
        if not file.is_file():
            print(f"{op} on {arch}: no data to add to; skipped")
            continue
        table = json.loads(file.read_text(encoding="utf-8"))
        own = [one for one in measurements if (one["environment"]["arch"], one["op"]) == (arch, op)]
        changed = taken_in(table, own)
        if changed:
            file.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
        print(f"{op} on {arch}: {changed} entries taken in")


if __name__ == "__main__":
    if len(sys.argv) < 2 or "--help" in sys.argv:
        sys.exit(__doc__)
    main(sys.argv[1:])
