"""Where a record lies, whether an interrupted one can be continued, and what becomes of an older one."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from rocm_sd.bench.records import Record, UnreadableRecord

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["continued", "now", "record_file"]

log = logging.getLogger("rocm_sd")


def record_file(out: Path, workload: str, kind: str = "engines") -> Path:
    """sd15-512.json, sd15-512-ablation.json, op-conv2d.json."""
    stem = workload.replace(":", "-")
    return out / (f"{stem}-ablation.json" if kind == "ablation" else f"{stem}.json")


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def continued(file: Path, wanted: Record, *, resume: bool) -> Record:
    """The record of an interrupted run that is the same as `wanted`; otherwise that one, and an older one is kept."""
    found = _unfinished(file, wanted) if resume else None
    if found is None:
        _keep_older(file)
    return found or wanted


def _unfinished(file: Path, wanted: Record) -> Record | None:
    """The record of an interrupted run that is the same as `wanted`; otherwise None, and the reason is said."""
    if not file.exists():
        return None
    try:
        found = Record.load(file)
    except UnreadableRecord as error:
        log.warning("%s Starting anew.", error.message)
        return None
    if found.complete:
        return None
    reason = _other_run(found, wanted)
    if reason:
        log.warning("%s is of another run, with %s: starting anew", file, reason)
        return None
    # What was planned may have grown: more repeats continue a run just as well.
    return replace(found, extra=found.extra | wanted.extra)


def _other_run(found: Record, wanted: Record) -> str | None:
    if found.kind != wanted.kind:
        return f"the kind {found.kind!r}"
    if found.workload != wanted.workload or found.op_cases != wanted.op_cases:
        return "another workload"
    if found.machine != wanted.machine:
        return "another machine or other versions"
    before, now = found.extra.get("planned", {}), wanted.extra.get("planned", {})
    for name in now:
        if name != "repeats" and before.get(name) != now[name]:
            return f"{name} {before.get(name)} and not {now[name]}"
    return None


def _keep_older(file: Path) -> None:
    """Measurements are never overwritten: an older record is renamed after its time."""
    if not file.exists():
        return
    try:
        stamp = Record.load(file).when.split("+")[0].replace(":", "").replace("-", "")
    except UnreadableRecord:
        stamp = "unreadable"
    aside, number = file.with_name(f"{file.stem}-{stamp}{file.suffix}"), 1
    while aside.exists():
        number += 1
        aside = file.with_name(f"{file.stem}-{stamp}-{number}{file.suffix}")
    file.rename(aside)
