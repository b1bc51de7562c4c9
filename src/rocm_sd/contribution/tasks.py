"""What the processes of a contribution run on the device: the kernels' self-tests, numerics, calibration and bench.

Each function gives a `Found`; what it raises is a failure of its unit (attempts.py).
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import torch

import rocm_sd
from rocm_sd import arch
from rocm_sd.bench import runner, submission, workloads
from rocm_sd.bench.card_report import FAILED, PASSED, SKIPPED, Item
from rocm_sd.bench.engines import chosen
from rocm_sd.bench.machine import machine
from rocm_sd.bench.records import OURS, STOCK
from rocm_sd.contribution import attempts
from rocm_sd.contribution.attempts import OUT_OF_TIME
from rocm_sd.contribution.device import Device
from rocm_sd.contribution.keeping import Found
from rocm_sd.engine import calibration, free_memory
from rocm_sd.integrations.diffusers.loading import default_device, default_dtype, hush
from rocm_sd.ops import OPS, self_test, trials
from rocm_sd.tuning import environment
from rocm_sd.tuning.entries import now
from rocm_sd.tuning.resolve import user_database
from rocm_sd.verify import on_card

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rocm_sd.bench.records import Record
    from rocm_sd.bench.workloads import Workload
    from rocm_sd.tuning.entries import Entry

__all__ = ["bench", "calibrate", "judge", "look", "self_test_of"]

# What calibration searches is thousands of entries on some cards; the fastest and stock's of each problem say it all.
_MOST_PROBLEMS = 300
# Turns of each engine: eight are the first to give a 95% interval, four the least that tell a difference from chance.
_TURNS, _LEAST_TURNS = 8, submission.LEAST_TURNS
# Pictures besides the turns: two first ones and the warm-up of each engine, and the gate's.
_OTHER_PICTURES = 8
_PROBED_STEPS = 2


def look(asked: str | None) -> Device:
    """The device that is asked for, or that is there. In a process of its own: to open a card may be its end."""
    device = default_device(asked)
    return Device(
        str(device), machine(device), free_memory(device), free_memory(torch.device("cpu")),
        str(default_dtype(device)).removeprefix("torch."), calibration.kernels_hash(),
        tuple(
            (op.name, each.name)
            for op in OPS.values()
            if op.verification is not None
            for each in op.implementations
            if on_card.runs_here(op, each.name, device) is None
        ),
    )  # fmt: skip


def self_test_of(op: str, candidate: str, dtype: str, device: str) -> Found:
    """What dispatch asks before the first call of a candidate."""
    name, subject, on = f"{op} {candidate}", OPS[op], torch.device(device)
    sample = next(
        filter(None, (trials.sample(subject, candidate, dtype, on, real=real) for real in (True, False))), None
    )
    if sample is None or subject.verification is None:
        return Found((Item(name, SKIPPED, f"it takes none of the op's calls in {dtype}"),))
    problem = subject.verification.problem(*sample.make(filled=False))
    config = subject.config_at(candidate, subject.lookup(arch.detect(on).name, problem), problem, on)
    verdict = self_test.verdict(subject, candidate, problem, on, config)
    state = PASSED if verdict.state == "passed" else FAILED
    return Found((Item(name, state, verdict.reason, figures={"dtype": dtype, "call": sample.name[:200]}),))


def judge(op: str, implementation: str, device: str) -> Found:
    """Its numerics on the device, and the time of a real call of it beside stock's."""
    found = on_card.judge(OPS[op], implementation, torch.device(device))
    state = SKIPPED if found.right is None else PASSED if found.right else FAILED
    return Found((Item(f"{op} {implementation}", state, found.sentence, figures=found.figures),))


def calibrate(workload: str, device: str) -> Found:
    """Which plan and which ops are the fastest here for a model, as at its first picture."""
    os.environ["ROCM_SD_CALIBRATE"] = "1"
    hush()
    on, begun = torch.device(device), now()
    made = workloads.make(workload, on)
    pipe = rocm_sd.optimize(made.pipeline())
    made.picture(pipe, 1, steps=1)
    key = calibration.model_key(pipe.unet)
    # Graphs are not for a card that is nearly full.
    plan = next(filter(None, (calibration.measured(key, on, graphs=graphs) for graphs in (True, False))), None)
    if plan is None:
        why = next(iter(reversed(attempts.warnings())), "no plan was measured, and nothing says why")
        # That a host is slow, or busy, is no fault.
        return Found((Item(workload, SKIPPED if "time was over" in why else FAILED, why),))
    figures: dict[str, float | str] = {"plan": plan.plan.name, "ms": plan.ms, "stock_ms": plan.stock_ms}
    entries = [each for each in user_database().all(environment=environment.current(on)) if each.when >= begun]
    return Found((Item(workload, PASSED, str(plan), figures=figures),), data={"entries": {workload: _best(entries)}})


def _best(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Of each problem the fastest that is right, and what was wrong."""
    fastest: dict[str, Entry] = {}
    wrong = []
    for entry in entries:
        known_as = f"{entry.op} {sorted(entry.problem.items())}"
        if entry.numerics != "ok":
            wrong.append(entry)
        elif known_as not in fastest or entry.median_us < fastest[known_as].median_us:
            fastest[known_as] = entry
    return [
        {
            "op": entry.op, "problem": dict(entry.problem), "candidate": entry.candidate, "config": dict(entry.config),
            **({"us": entry.median_us, "stock_us": entry.stock_us} if entry.numerics == "ok" else {}),
            "numerics": entry.numerics[:200],
        }
        for entry in [*fastest.values(), *wrong][:_MOST_PROBLEMS]
    ]  # fmt: skip


def bench(workload: str, device: str) -> Found:
    """Stock and rocm-sd in turns, right first. What would not fit into the time is not begun."""
    hush()
    on = torch.device(device)
    attempts.progress(0.0, "making it")
    made = workloads.make(workload, on)
    turns, picture_s = _TURNS, None
    if on.type != "cpu":
        picture_s = _picture_s(made)
        turns = next((n for n in (_TURNS, _LEAST_TURNS) if _seconds(picture_s, n) < attempts.seconds_left()), 0)
    if not turns:
        needed = _seconds(picture_s or 0.0, _LEAST_TURNS)
        why = f"{OUT_OF_TIME}: a picture takes stock {picture_s:.0f} s here, and all of it about {needed / 60:.0f} min"
        return Found((Item(workload, SKIPPED, why, figures={"stock_picture_s": round(picture_s or 0.0, 2)}),))
    engines = (STOCK, OURS)
    record = runner.run(
        made, chosen(engines, on), [1], out=attempts.folder("bench"), repeats=turns,
        command=f"rocm-sd bench {workload} --engines {','.join(engines)} --repeats {turns}",
        progress=lambda done, total, what: attempts.progress(done / total, what),
    )  # fmt: skip
    problems = submission.implausible(record, known_arch=False)
    item = _item(workload, record, problems)
    return Found((item,), records=() if problems else (record.to_dict(),))


def _picture_s(made: Workload) -> float:
    """Of stock, from two of its steps: the first ones, for which a library searches, do not count."""
    pipe = made.pipeline()
    attempts.progress(0.02, "stock's first steps")
    made.picture(pipe, 1, steps=1)
    taken = []
    for steps in (1, 1 + _PROBED_STEPS):
        begun = time.perf_counter()
        made.picture(pipe, 1, steps=steps).cpu()
        taken.append(time.perf_counter() - begun)
    a_step = max(0.0, taken[1] - taken[0]) / _PROBED_STEPS
    return taken[0] + a_step * (made.facts.steps - 1)


def _seconds(picture_s: float, turns: int) -> float:
    """Of both engines; ours is not counted on to be faster."""
    return 2 * (turns + _OTHER_PICTURES) * picture_s


def _item(workload: str, record: Record, problems: tuple[str, ...]) -> Item:
    compared = next((one for one in record.comparisons if (one.engine, one.against) == (OURS, STOCK)), None)
    left_out = [f"{one.engine}: {one.left_out}" for one in record.measurements if one.left_out]
    figures: dict[str, float | str] = {
        f"{'ours' if one.engine == OURS else one.engine}_ms": round(one.p50_ms, 3)
        for one in record.measurements
        if one.ms
    }
    if compared is None or left_out or problems:
        return Item(workload, FAILED, "; ".join([*left_out, *problems]) or "nothing was compared", figures=figures)
    return attempts.compared_item(workload, "", compared, figures)
