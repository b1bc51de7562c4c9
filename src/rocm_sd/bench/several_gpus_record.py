"""What a benchmark of several GPUs leaves behind: one JSON file with the plan, every turn and the bytes that were sent.

Only what was measured is stored. Medians, ratios and efficiency are computed from the turns wherever they are shown, so
a record cannot contradict itself. `GpusRecord.load` refuses what is not such a record, and one that has times of a
result that was wrong.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rocm_sd.bench.records import OURS, STOCK, Machine, UnreadableRecord, WorkloadFacts, keep_older, read_record
from rocm_sd.bench.records import RULES as RECORD_RULES
from rocm_sd.files import write_text
from rocm_sd.plain_json import read_json

if TYPE_CHECKING:
    from pathlib import Path

    from rocm_sd.typed_json import Rules

__all__ = ["FORMAT", "TOGETHER", "WAYS", "GpusRecord", "Way", "record_file"]

FORMAT = "rocm-sd-bench-gpus/1"
TOGETHER = "rocm-sd, all ranks"
WAYS = STOCK, OURS, TOGETHER
_COUNT, _NOT_NEGATIVE = {"minimum": 1, "maximum": 10**9}, {"minimum": 0, "maximum": 1e18}
# What the types of the dataclasses below do not say of their values.
RULES: Rules = {
    **{name: rule for name, rule in RECORD_RULES.items() if name.startswith(("Machine.", "WorkloadFacts."))},
    "GpusRecord.when": RECORD_RULES["Record.when"],
    "GpusRecord.pictures": _COUNT,
    "GpusRecord.link": _NOT_NEGATIVE,
    "Way.name": {"enum": list(WAYS)},
    "Way.ranks": _COUNT,
    "Way.ms": RECORD_RULES["Measurement.ms"],
    "Way.error": _NOT_NEGATIVE,
    "Way.stock_error": _NOT_NEGATIVE,
}


@dataclass(frozen=True)
class Way:
    """Who draws, on how many ranks. `ms`: each turn, in order; empty where `left_out` says why.

    `error` is the root of the mean square of the latents' difference from float64's; `stock_error` is stock's.
    """

    name: str
    ranks: int
    ms: tuple[float, ...] = ()
    error: float | None = None
    stock_error: float | None = None
    left_out: str | None = None


@dataclass(frozen=True)
class GpusRecord:
    """`machine` is that of rank 0, and `cards` has the device of each rank. A turn draws so many `pictures`.

    `link`: bytes a second, where it was measured; `sent`: bytes a picture that all ranks sent, by strategy.
    """

    workload: WorkloadFacts
    machine: Machine
    command: str
    when: str
    cards: tuple[str, ...]
    plan: str
    why: str
    link: float | None
    pictures: int
    ways: tuple[Way, ...]
    sent: dict[str, float]

    @property
    def ranks(self) -> int:
        return len(self.cards)

    def way(self, name: str) -> Way | None:
        return next((way for way in self.ways if way.name == name), None)

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    def save(self, path: Path) -> None:
        """Measurements are never overwritten: an older record is renamed after its time."""
        keep_older(path, GpusRecord.load)
        write_text(path, json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> GpusRecord:
        # NaN comes through to where its place in the record is named.
        return cls.from_dict(read_json(path, partial(UnreadableRecord, path), finite=False), path)

    @classmethod
    def from_dict(cls, values: Any, path: Path) -> GpusRecord:
        """What `to_dict` gave; `path` is the file that it was read from."""
        found = read_record(cls, values, path, FORMAT, RULES)
        for way in found.ways:
            if bool(way.ms) == (way.left_out is not None):
                why = "has times and was left out" if way.ms else "has no times, and nothing says why"
                raise UnreadableRecord(path, f"{way.name} {why}")
        return found


def record_file(out: Path, workload: str, ranks: int) -> Path:
    return out / f"{workload}-{ranks}-gpus.json"
