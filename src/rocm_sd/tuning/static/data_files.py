"""The files of tuning data that a static search writes: the same search gives the same bytes."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rocm_sd.errors import RocmSdError
from rocm_sd.files import write_text
from rocm_sd.tuning.choice import STOCK
from rocm_sd.tuning.ranking import rank, static_choice

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rocm_sd.tuning.ranking import RatedConfig

__all__ = ["ArchBucket", "BucketResult", "require_writable", "write", "write_others"]

NEVER_TIMED = "never on this architecture: every time here is modelled, see docs/tuning.md"


@dataclass(frozen=True)
class ArchBucket:
    """One bucket on one architecture; `implementation` is one with kernels of its own, and None means the op's."""

    op: str
    arch: str
    when: Mapping[str, Any]
    implementation: str | None = field(default=None, kw_only=True)

    @property
    def name(self) -> str:
        return f"{self.op}:{self.implementation}" if self.implementation else self.op

    @property
    def file(self) -> tuple[str, str | None, str]:
        """Buckets that are written together."""
        return self.op, self.implementation, self.arch


@dataclass(frozen=True)
class BucketResult(ArchBucket):
    """What a search found for one bucket; candidates are in the order of the space."""

    sample: str
    candidates: tuple[RatedConfig, ...]

    @property
    def ranked(self) -> list[RatedConfig]:
        return rank(self.candidates)

    @property
    def dropped(self) -> dict[str, int]:
        """The number of configs by the reason that they were dropped, e.g. {"spills": 3}."""
        return dict(sorted(Counter(c.dropped.partition(":")[0] for c in self.candidates if c.dropped).items()))

    @property
    def error(self) -> str | None:
        """Why the bucket has no config, or None where it has one."""
        if self.ranked:
            return None
        where = f"{self.name} on {self.arch}, {json.dumps(dict(self.when))}"
        if not self.candidates:
            return f"{where}: its space has no config"
        reasons = dict.fromkeys(c.dropped or "" for c in self.candidates)
        shown = "; ".join(list(reasons)[:3]) + (f"; and {len(reasons) - 3} more reasons" if len(reasons) > 3 else "")
        return f"{where}: all {len(self.candidates)} configs were dropped: {shown}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "op": self.op,
            **({"implementation": self.implementation} if self.implementation else {}),
            "arch": self.arch,
            "when": dict(self.when),
            "call": self.sample,
            "compiled": len(self.candidates),
            "dropped": self.dropped,
            "error": self.error,
            "ranked": [
                {
                    "config": c.config.to_dict(),
                    "modelled_us": c.modelled_us,
                    "fails": list(c.blemishes),
                    "figures": dict(c.figures),
                }
                for c in self.ranked
            ],
            "unusable": [{"config": c.config.to_dict(), "because": c.dropped} for c in self.candidates if c.dropped],
        }


def write(
    found: Sequence[BucketResult], folder: Path, implementation: str, version: str, *, compiler: str = "Triton"
) -> Path | None:
    """The file of one (op, architecture), from all of its buckets; entries that were measured stay.

    Where no bucket has a usable config nothing is written: the op runs as stock torch there, or as the file says that
    is there already.
    """
    first = found[0]
    path = folder / first.arch / f"{first.op}.json"
    static = static_choice([each.candidates for each in found])
    if static is None:
        return None
    existing = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    measured = [entry for entry in existing.get("bucket", ()) if entry.get("source") == "measured"]
    taken = [entry["when"] for entry in measured]
    with_ = f"{compiler} {version}"
    table: dict[str, Any] = {"op": first.op, "arch": first.arch}
    if existing.get("static", {}).get("source") == "measured":
        table["static"] = existing["static"]
    else:
        table["static"] = {"implementation": implementation, **_static(*static, len(found), with_)}
    if "exact" in existing:
        table["exact"] = existing["exact"]
    table["bucket"] = measured + [_entry(each, implementation, with_) for each in found if each.when not in taken]
    table["searched"] = _searched(found, compiler, version)
    if "others" in existing:
        table["others"] = existing["others"]
    write_text(path, json.dumps(table, indent=2) + "\n")
    return path


def write_others(found: Sequence[BucketResult], folder: Path, version: str) -> Path | None:
    """The configs of an implementation that is not chosen, into the file that says what is.

    The choice and the configs of the op's own kernels stay as they are; without a file the op runs as stock torch.
    """
    first = found[0]
    path = folder / first.arch / f"{first.op}.json"
    static = static_choice([each.candidates for each in found])
    if static is None or first.implementation is None:
        return None
    if path.is_file():
        table = json.loads(path.read_text(encoding="utf-8"))
    else:
        why = "no config of the op's own kernel was searched here"
        table = {"op": first.op, "arch": first.arch, "static": {"implementation": STOCK, "why": why}}
    with_ = f"clang {version}"
    buckets = [_entry(each, first.implementation, with_) for each in found]
    for entry in buckets:
        # It stands under its name, and is no choice.
        del entry["implementation"]
    part = {"static": _static(*static, len(found), with_), "bucket": buckets}
    part["searched"] = _searched(found, "clang", version)
    table["others"] = dict(sorted({**table.get("others", {}), first.implementation: part}.items()))
    write_text(path, json.dumps(table, indent=2) + "\n")
    return path


def _static(chosen: RatedConfig, served: int, buckets: int, with_: str) -> dict[str, Any]:
    why = f"nearest to the best in {served} of {buckets} buckets, by modelled times"
    return {"config": chosen.config.to_dict(), "why": f"{why}; compiled by {with_} without spills, never timed"}


def _searched(found: Sequence[BucketResult], compiler: str, version: str) -> dict[str, Any]:
    first = found[0]
    searched: dict[str, Any] = {
        "command": f"rocm-sd tune --static {first.name} --arch {first.arch}",
        **({"implementation": first.implementation} if first.implementation else {}),
        compiler.lower(): version,
        "timed": NEVER_TIMED,
        "compiled": sum(len(each.candidates) for each in found),
        "dropped": dict(sorted(sum((Counter(each.dropped) for each in found), Counter()).items())),
    }
    skipped = dict.fromkeys(term for each in found for c in each.ranked for term in c.figures.get("left_out", ()))
    if skipped:
        searched["left_out"] = list(skipped)
    return searched


def _entry(found: BucketResult, implementation: str, with_: str) -> dict[str, Any]:
    if found.error:
        return {"when": dict(found.when), "implementation": STOCK, "why": found.error}
    ranked = found.ranked
    best, runner_up = ranked[0], ranked[1] if len(ranked) > 1 else None
    figures = {name: value for name, value in best.figures.items() if name != "left_out"}
    figures["modelled_us"] = best.modelled_us
    figures["runner_up_modelled_us"] = None if runner_up is None else runner_up.modelled_us
    figures["modelled_for"] = found.sample
    if best.blemishes:
        figures["fails"] = list(best.blemishes)
    behind = "no other is usable" if runner_up is None else f"the next best {runner_up.modelled_us:.1f} us"
    return {
        "when": dict(found.when),
        "implementation": implementation,
        "config": best.config.to_dict(),
        "why": (
            f"modelled {best.modelled_us:.1f} us, {behind}, of {_number(len(found.candidates))} compiled by {with_}; "
            f"{figures['vgprs']} VGPRs, no spills, {figures['waves_per_simd']} waves a SIMD; never timed"
        ),
        "figures": figures,
    }


def _number(configs: int) -> str:
    return f"{configs} config{'s' if configs > 1 else ''}"


def require_writable(folder: Path) -> None:
    """Raise before the hours of a search, and not after them."""
    existing = next(place for place in (folder, *folder.resolve().parents) if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise RocmSdError(f"Nothing can be written to {folder}.", hint="Choose another folder with --out.")
