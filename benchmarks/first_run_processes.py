"""The processes of first_run.py: each draws with a workload, and writes a line of JSON.

python benchmarks/first_run_processes.py FUNCTION '{"workload": "sd15-512", "batch": 1, ...}' ANSWER.json
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch

import rocm_sd
from rocm_sd import measuring
from rocm_sd.bench import workloads
from rocm_sd.bench.gate import PictureGate
from rocm_sd.bench.machine import machine
from rocm_sd.engine import calibration
from rocm_sd.engine.calibration import calibrating, progress
from rocm_sd.engine.capture import captured
from rocm_sd.engine.convolutions import answers_channels_last
from rocm_sd.engine.optimization import optimize_with
from rocm_sd.engine.parts import Parts
from rocm_sd.ops import OPS
from rocm_sd.tuning.resolve import user_database

FAULTS = ("wrong_in_one_value", "slow", "aborts", "hangs")


class Drawing:
    """What a child process draws with."""

    def __init__(self, workload, batch, *, tiny, turns):

        self.batch, self.turns = batch, turns
        self.device = torch.device("cpu" if tiny or not torch.cuda.is_available() else "cuda")
        self.made = workloads.make(workload, self.device, tiny=tiny)
        self.done, measure = [], calibration.measure_with_progress

        def noted(*arguments, **named):
            began = time.monotonic()
            try:
                self.done.append(measure(*arguments, **named))
            finally:
                self.attempts += 1
                self.seconds += time.monotonic() - began
            return self.done[-1]

        self.attempts, self.seconds = 0, 0.0
        if tiny:
            # A host that runs tests is busy with others.
            calibrating.BUDGET_S = 300.0
        calibration.measure_with_progress = noted

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def timed(self, pipe, **how):
        self.synchronize()
        began = time.perf_counter()
        self.made.picture(pipe, self.batch, **how)
        self.synchronize()
        return (time.perf_counter() - began) * 1e3

    def gate(self, pipe):
        """None, or why its pictures are wrong."""
        return PictureGate(self.made, self.batch).check(pipe).wrong

    def calibration(self):
        phases = {}
        for each in self.done:
            for name, seconds in each.phases.items():
                phases[name] = round(phases.get(name, 0.0) + seconds, 2)
        plans = {f"{key} {plan}": ms for each in self.done for (key, _, plan), ms in each.plans.items()}
        return {
            "calibrations": self.attempts, "calibration_s": round(self.seconds, 1), "phases": phases,
            "plans_ms": plans, "ops": [_outcome(result) for each in self.done for result in each.ops],
        }  # fmt: skip

    def measured_notes(self, pipe):
        return [note for note in rocm_sd.report(pipe).notes if "measured here" in note]

    def machine(self):

        return asdict(machine(self.device))


def _outcome(result):
    """What was found for a problem, in a line: `64x64 ...: triton 12.3 us, stock 20.1, 9 of 31 candidates`."""
    problem = " ".join(f"{name}={value}" for name, value in result.problem.items())
    us = " ".join("?" if each is None else f"{each:.1f}" for each in (result.us, result.stock_us))
    chosen = f"{result.chosen} {us} us"
    return f"{result.count} x {result.op} {problem}: {chosen}, {result.measured} of {result.candidates} candidates"


def first(drawing):
    """A first picture, which is measured; the gate; and pictures in turns with stock."""
    pipe = drawing.made.pipeline()
    drawing.synchronize()
    began = time.perf_counter()
    rocm_sd.optimize(pipe)
    optimized = time.perf_counter() - began
    early = [drawing.timed(pipe) for _ in range(3)]
    wrong = drawing.gate(pipe)
    engines, times = {"stock": drawing.made.pipeline(), "rocm-sd": pipe}, {"stock": [], "rocm-sd": []}
    drawing.timed(engines["stock"])
    for number in range(drawing.turns):
        for name in measuring.turn(list(engines), number):
            times[name].append(drawing.timed(engines[name]))
    compared = measuring.compare("rocm-sd", "stock", drawing.batch, times["rocm-sd"], times["stock"])
    return {
        **drawing.calibration(),
        "optimize_s": round(optimized, 2),
        "first_pictures_ms": [round(each, 1) for each in early],
        "gate": wrong,
        "ours_ms": round(median(times["rocm-sd"]), 1),
        "stock_ms": round(median(times["stock"]), 1),
        "ratio": compared.ratio,
        "interval": [compared.low, compared.high],
        "times_ms": times,
        "plans": drawing.measured_notes(pipe),
        "machine": drawing.machine(),
    }


def again(drawing):
    """As a second process has it: the model is loaded, and optimize is called."""
    pipe = drawing.made.pipeline()
    drawing.synchronize()
    began = time.perf_counter()
    rocm_sd.optimize(pipe)
    drawing.timed(pipe)
    taken = time.perf_counter() - began
    early = [drawing.timed(pipe) for _ in range(3)]
    return {
        **drawing.calibration(), "first_picture_s": round(taken, 2), "next_pictures_ms": [round(e, 1) for e in early],
        "plans": drawing.measured_notes(pipe),
    }  # fmt: skip


def with_faulty_candidates(drawing):
    """`longest_step_s`: between two things that the progress line says; a hang is one of them."""
    steps, calibrate = [], progress.calibrate

    def noted(*arguments, **named):
        shown = named.pop("progress")

        def show(what, spent, of):
            steps.append((time.monotonic(), what))
            shown(what, spent, of)

        return calibrate(*arguments, **named, progress=show)

    progress.calibrate = noted
    pipe = rocm_sd.optimize(drawing.made.pipeline())
    drawing.timed(pipe)
    said, adopted = {}, {}
    for entry in user_database().all("group_norm_silu"):
        if entry.candidate in FAULTS:
            share = entry.median_us / entry.stock_us if entry.stock_us else None
            reason = entry.numerics if share is None else f"{share:.1f} of stock's time"
            if "another size" not in reason:
                said.setdefault(entry.candidate, reason)
            chosen = OPS["group_norm_silu"].choose(entry.problem, drawing.device).implementation
            adopted[chosen] = adopted.get(chosen, 0) + 1
    waits = [(after - before, what) for (before, what), (after, _) in itertools.pairwise(steps) if "hangs" in what]
    return {
        **drawing.calibration(), "said": said, "adopted": adopted, "gate": drawing.gate(pipe),
        "longest_step_s": round(max(waits, default=(0.0, ""))[0], 1),
    }  # fmt: skip


def with_a_stale_input(drawing):
    """Graphs that are captured whole read at their third replay what was there before the last write."""
    capture = captured.capture_graph

    def faulty(function, device):
        graph, held, replays = capture(function, device), function.__self__.inputs[0], []
        before = [held.clone()]

        def replay():
            replays.append(1)
            now = held.clone()
            if len(replays) == 3:
                held.copy_(before[-1])
            graph.replay()
            held.copy_(now)
            before[:] = [now]

        return captured.Graph(graph.outputs, replay, graph.memory, graph.blocks)

    captured.capture_graph = faulty
    # By a plan that captures, whichever is the fastest here.
    pipe = optimize_with(drawing.made.pipeline(), "performance", "exact", Parts(plan="channels_last"))
    for _ in range(3):
        drawing.timed(pipe)
    said = [note for note in rocm_sd.report(pipe).notes if "replay" in note or "block" in note]
    rungs = {"captured in blocks, because": "blocks", "is not captured": "none"}
    rung = next((name for word, name in rungs.items() if any(word in note for note in said)), "whole")
    return {**drawing.calibration(), "notes": said, "rung": rung, "gate": drawing.gate(pipe)}


def each_plan(drawing):
    """Which plan is chosen, and how long a picture takes with each of them, in turns."""
    assert not answers_channels_last(drawing.device, drawing.made.dtype), "convolutions are not patched"
    pipe = rocm_sd.optimize(drawing.made.pipeline())
    drawing.timed(pipe)
    graphs = any(graphs for each in drawing.done for (_, graphs, _) in each.plans)
    key = calibration.model_key(pipe.unet)
    chosen = calibration.measured(key, drawing.device, graphs=graphs).plan.name
    wrong = drawing.gate(pipe)
    pipes = {
        plan.name: optimize_with(drawing.made.pipeline(), "performance", "exact", Parts(plan=plan.name))
        for plan in calibration.PLANS
    }
    steps = min(20, drawing.made.facts.steps)
    for each in pipes.values():
        for _ in range(3):
            drawing.timed(each, steps=steps)
    times = {name: [] for name in pipes}
    for number in range(drawing.turns):
        for name in measuring.turn(list(pipes), number):
            times[name].append(drawing.timed(pipes[name], steps=steps))
    by = {}
    for problem in {json.dumps(entry.problem, sort_keys=True) for entry in user_database().all("conv2d")}:
        name = OPS["conv2d"].choose(json.loads(problem), drawing.device).implementation
        by[name] = by.get(name, 0) + 1
    return {
        **drawing.calibration(), "chosen": chosen, "gate": wrong, "steps": steps, "convolutions": by, "times_ms": times,
        "ms": {name: round(median(taken), 1) for name, taken in times.items()}, "plans": drawing.measured_notes(pipe),
    }  # fmt: skip


CHILDREN = {each.__name__: each for each in (first, again, with_faulty_candidates, with_a_stale_input, each_plan)}


def main(function, given, answer):
    logging.basicConfig(format="%(relativeCreated)7.0f ms %(message)s")
    logging.getLogger("rocm_sd").setLevel(logging.INFO)
    Path(answer).write_text(json.dumps(CHILDREN[function](Drawing(**json.loads(given)))))


if __name__ == "__main__":
    main(*sys.argv[1:])
