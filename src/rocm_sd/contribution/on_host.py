"""What needs no process of its own in a contribution, since it starts some: the doctor's checks, and ComfyUI."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rocm_sd.bench.card_report import FAILED, PASSED, SKIPPED, Item
from rocm_sd.comparison import Comparison
from rocm_sd.contribution import attempts
from rocm_sd.contribution.keeping import Found
from rocm_sd.doctor import recording
from rocm_sd.doctor.check import CannotRun, Status
from rocm_sd.doctor.examination import chosen_checks, examine
from rocm_sd.doctor.probes import LiveProbes, answer_of
from rocm_sd.doctor.reading import gather
from rocm_sd.errors import RocmSdError
from rocm_sd.integrations import installing

if TYPE_CHECKING:
    from rocm_sd.doctor.facts import Facts

__all__ = ["COMFYUI", "comfyui", "examined", "facts", "find_comfyui"]

COMFYUI = "comfyui"
# Half of what the doctor waits for by itself: there are other parts.
_PATIENCE_S = 90.0
_STATES = {Status.OK: PASSED, Status.PROBLEM: FAILED, Status.UNKNOWN: FAILED, Status.NOT_HERE: SKIPPED}


@cache
def _facts() -> Facts:
    return gather()


@cache
def _probes() -> LiveProbes:
    return LiveProbes(patience=_PATIENCE_S)


def facts() -> Found:
    """The machine as it is, with nothing personal; the doctor can read it again."""
    found = _facts()
    words = f"{len(found.gpus)} GPU(s), torch {found.torch.version}"
    return Found((Item("facts", PASSED, words),), data={"facts": recording.without_names(asdict(found))})


def examined(check: str) -> Found:
    """One check; what its probe answered is kept with it."""
    probes = _probes()
    (one,) = examine(_facts(), probes, chosen_checks([check]))
    finding, probe = one.finding, one.check.probe
    answered: dict[str, Any] = {}
    if probe is not None and probe.name in probes.answers:
        answered = {"probes": {probe.name: recording.without_names(json.loads(json.dumps(probes.answers[probe.name])))}}
    figures: dict[str, float | str] = {"status": finding.status.value}
    return Found((Item(check, _STATES[finding.status], finding.says, figures=figures),), data=answered)


def find_comfyui(asked: Path | None) -> installing.Host | None:
    """The one that is asked for, which must be one; else the first of the usual places."""
    if asked is not None:
        return installing.recognise(COMFYUI, asked)
    home, started = Path.home(), Path(sys.prefix)
    # rocm-sd may be in the host's own environment, which lies in the host's folder or beside it.
    places = (
        Path("ComfyUI"), Path(), home / "ComfyUI", home / "comfy" / "ComfyUI", home / "Documents" / "ComfyUI",
        started.parent, started.parent / "ComfyUI",
    )  # fmt: skip
    return next(filter(None, map(_recognised, places)), None)


def _recognised(place: Path) -> installing.Host | None:
    try:
        return installing.recognise(COMFYUI, place)
    except (RocmSdError, OSError):
        return None


def comfyui(folder: str, cpu: bool) -> Found:
    """ComfyUI's own sampling, stock and optimised in turns, by the Python that runs it."""
    host = installing.recognise(COMFYUI, Path(folder))
    title = f"ComfyUI {host.version or ''}".strip()
    python, _ = installing.host_python(host)
    try:
        missing = installing.what_to_type(installing.examine(python, host.root))
    except installing.HostNotReady as error:
        missing = [error.message]
    if missing:
        # What is to be typed names folders: those are for the user's eyes, and the doctor of that host says it again.
        return Found((Item(COMFYUI, SKIPPED, f"{title} cannot use rocm-sd yet: {' '.join(missing)}"),))
    if not (host.root / "main.py").is_file():
        return Found((Item(COMFYUI, SKIPPED, f"{title} is the desktop app, whose code lies elsewhere"),))
    asked_for = ["rocm_sd.integrations.comfyui.standalone", str(host.root), *(["--cpu"] if cpu else [])]
    limit = max(60.0, attempts.seconds_left())
    try:
        answer = answer_of(title, asked_for, limit, python=os.fspath(python), folder=host.root)
        return _timed(title, answer)
    except CannotRun as reason:
        return attempts.failed(COMFYUI, str(reason))


def _timed(title: str, answer: dict[str, Any]) -> Found:
    if "error" in answer:
        return attempts.failed(COMFYUI, f"{title}: {answer['error']}", {"tracebacks": {COMFYUI: answer["lines"]}})
    ours, stock = (1e3 * median(answer[name]) for name in ("optimized", "stock"))
    figures: dict[str, float | str] = {
        "ours_ms": round(ours, 3), "stock_ms": round(stock, 3), "distance": answer["distance"],
        "allowed": answer["allowed"],
    }  # fmt: skip
    item = attempts.compared_item(COMFYUI, f"{title}, {answer['model']}: ", Comparison(**answer["compared"]), figures)
    return Found((item,), data={COMFYUI: answer})
