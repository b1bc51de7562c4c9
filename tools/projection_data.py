"""Gather what the projection is made of: src/rocm_sd/bench/data/work.json, from benchmarks/ and the architectures.

python tools/projection_data.py          writes it anew
python tools/projection_data.py --check  changes nothing, and fails when it is not what the records say
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocm_sd.bench.records import Record
from rocm_sd.bench.workloads import WORKLOADS
from rocm_sd.ops import OPS
from work_items import count

if TYPE_CHECKING:
    from rocm_sd.bench.projection import WorkItem

__all__ = ["gather", "main", "picture", "timed_calls"]

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "src/rocm_sd/bench/data/work.json"
# The card that ops were timed on. Another one is another set of efficiencies: they are never mixed.
CARD = "h200"
PROJECTED = ("sd15-512", "sdxl-mlperf")
# A bias or a residual in the epilogue changes a product's time less than its shape does.
_EPILOGUE = {"bias", "residual"}

Timed = tuple[str, dict[str, Any], float, float, float]


def timed_calls(folder: Path) -> list[Timed]:
    """(op, problem, flops, bytes, us) of every recorded call, with what dispatch chooses there; copies as an op."""
    found: list[Timed] = []
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        op = OPS[record["op"]]
        if op.tuning is None:
            raise ValueError(f"{path.name} is of {op.name}, which has no workload")
        # Pictures are projected exact: rates of 8 bits are not theirs.
        if not op.differentiable:
            continue
        samples = {s.name: s for s in (*(bucket.sample for bucket in op.tuning.buckets), *op.tuning.timed)}
        for row in record["rows"]:
            if row["call"] not in samples:
                continue  # a workload that was changed since: its bytes are not known any more
            work = op.tuning.work(*samples[row["call"]].make(filled=False))
            us = row["us"].get(row["implementation"], row["us"]["stock"])
            found.append((op.name, row["problem"], work.flops, work.bytes, round(us, 3)))
            found.append(("copy", {}, 0.0, work.bytes, round(row["us"]["copy"], 3)))
    return found


def picture(workload: str, benchmarks: Path) -> dict[str, Any] | None:
    """The recorded time of a whole picture by rocm-sd at batch 1."""
    for path in sorted((benchmarks / f"engine-{CARD}").glob("*.json")):
        record = Record.load(path)
        ours = record.measurement("rocm-sd", 1)
        if record.workload.name == workload and ours is not None and ours.ms:
            return {"ms": round(ours.p50_ms, 3), "source": str(path.relative_to(benchmarks.parent))}
    return None


def _shape(problem: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted((name, value) for name, value in problem.items() if name not in _EPILOGUE))


def _item(item: WorkItem, timings: dict[tuple[str, tuple[tuple[str, Any], ...]], float]) -> dict[str, Any]:
    us = timings.get((item.op, _shape(dict(item.problem))))
    return {**asdict(item), "us": us}


def gather(root: Path = ROOT) -> dict[str, Any]:
    benchmarks = root / "benchmarks"
    calls = timed_calls(benchmarks / f"ops-{CARD}")
    timings = {(op, _shape(problem)): us for op, problem, _, _, us in calls if op != "copy"}
    first = json.loads(next(iter(sorted((benchmarks / f"ops-{CARD}").glob("*.json")))).read_text(encoding="utf-8"))
    workloads = {}
    for name in PROJECTED:
        workloads[name] = {
            "model": WORKLOADS[name].family,
            "side": WORKLOADS[name].side,
            "steps": WORKLOADS[name].steps,
            "picture": picture(name, benchmarks),
            "items": [_item(item, timings) for item in count(name)],
        }
    return {
        "about": "Made by tools/projection_data.py; do not edit",
        "arch": first["machine"]["arch"],
        "device": first["machine"]["gpu"],
        "source": f"benchmarks/ops-{CARD}",
        "timed": [[op, flops, moved, us] for op, _, flops, moved, us in calls],
        "workloads": workloads,
    }


def _rows(items: list[dict[str, Any]]) -> list[str]:
    return [f"    {json.dumps(item)}{',' if item is not items[-1] else ''}" for item in items]


def text(data: dict[str, Any]) -> str:
    """A line for each row, so that a change can be read."""
    lines = json.dumps({**data, "timed": [], "workloads": {}}, indent=1).splitlines()[:-3]
    lines.append(' "timed": [')
    lines += [f"  {json.dumps(row)}," for row in data["timed"]]
    lines[-1] = lines[-1].rstrip(",")
    lines += [" ],", ' "workloads": {']
    for name, workload in data["workloads"].items():
        head = {key: value for key, value in workload.items() if key not in {"items", "picture"}}
        lines.append(f"  {json.dumps(name)}: {json.dumps(head)[:-1]},")
        lines += ['   "items": [', *_rows(workload["items"]), "   ],"]
        lines += [f'   "picture": {json.dumps(workload["picture"])}', "  },"]
    lines[-1] = lines[-1].rstrip(",")
    return "\n".join([*lines, " }", "}"]) + "\n"


def main(arguments: list[str]) -> int:
    right = text(gather())
    if DATA.is_file() and DATA.read_text(encoding="utf-8") == right:
        return 0
    if "--check" in arguments:
        print(f"{DATA.relative_to(ROOT)} is not what the records say. Type: python tools/projection_data.py")
        return 1
    DATA.parent.mkdir(parents=True, exist_ok=True)
    DATA.write_text(right, encoding="utf-8")
    print(f"rewrote {DATA.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
