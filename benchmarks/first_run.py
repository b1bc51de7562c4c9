"""A first run on a card that nobody has timed: what `optimize` finds by itself, and what it does with faults.

    python benchmarks/first_run.py --out results [--steps plans,eager,faults,contiguous,tune,shipped,fuzz]
                                   [--only sd15-512:1] [--before FOLDER] [--turns 8] [--tune-budget 2m]
                                   [--fuzz-seconds 520]

Each step has processes of its own, with empty caches of rocm-sd and of Triton and with the shipped data hidden, but for
`shipped`. No time is given on a red numerics gate, and stock is timed in turns with rocm-sd.

plans       SD 1.5 at batch 1 and 8 and SDXL: the calibration's seconds by phase, pictures from the second on, and a
            second process, which measures nothing (about 5 minutes)
eager       the same with ROCM_SD_STEP_GRAPH=0 (3 minutes)
faults      candidates that are wrong in one value, slow, abort or hang; a graph that reads a stale input at its third
            replay (2 minutes)
contiguous  convolutions that answer contiguous, as ROCm's do: which plan is chosen, how fast each is (2 minutes)
tune        `rocm-sd tune sd15-512` once, and the pictures after it (4 minutes)
shipped     with shipped data, beside the version in the folder --before (3 minutes)
fuzz        tools/fuzz_ops.py (as long as --fuzz-seconds)

results/first-run.json has all of it with machine, versions and command; a step that is run again replaces its own part.
The exit status is 1 where a line is not met. `--tiny` tries the command on a CPU with small models: no time counts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROCESSES = ROOT / "benchmarks" / "first_run_processes.py"
TUNE = """
import logging, sys
logging.basicConfig(format="%(relativeCreated)7.0f ms %(message)s")
logging.getLogger("rocm_sd").setLevel(logging.INFO)
from rocm_sd.cli.main import run
sys.exit(run())
"""
STEPS = ("plans", "eager", "faults", "contiguous", "tune", "shipped", "fuzz")
# Milliseconds of a picture at most, by workload and batch.
PICTURES = {("sd15-512", 1): 300, ("sd15-512", 8): 1700, ("sdxl-mlperf", 1): 660}
EAGER = {("sd15-512", 1): 1.00, ("sd15-512", 8): 1.13}
EQUAL = 0.98
CALIBRATION_S, FIRST_PICTURE_S, TUNED_MS, HANG_S = 30.0, 2.5, 279, 10.0
# A process that takes longer hangs: the whole of a step takes minutes.
PROCESS_S = 540.0
FAULTS = ("wrong_in_one_value", "slow", "aborts", "hangs")

# A package of candidates for an op that every model has. A graph has launches alone, so what is slow computes more.
CANDIDATES = """
import os, time
from rocm_sd.ops import OPS
from rocm_sd.ops.definition import Implementation
from rocm_sd.ops.plugins import PlugIn

stock = OPS["group_norm_silu"].implementations[0].run

def wrong_in_one_value(*arguments, config):
    y = stock(*arguments)
    y[-1, -1, -1, -1] += 1 + y.abs().max()
    return y

def slow(*arguments, config):
    for _ in range(8):
        y = stock(*arguments)
    return y

def aborts(*arguments, config):
    os.abort()

def hangs(*arguments, config):
    time.sleep(1000)

def candidates():
    return [
        PlugIn("group_norm_silu", Implementation(run.__name__, run, lambda problem, device: None), version="1")
        for run in (wrong_in_one_value, slow, aborts, hangs)
    ]
"""
# Python imports it at each start, in workers, too. Torch is patched when it is imported, by whoever does.
CONTIGUOUS = """
import importlib.abc, importlib.machinery, sys

class Patched(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name != "torch.nn.functional":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        self.run = spec.loader.exec_module
        spec.loader.exec_module = self.patched
        return spec

    def patched(self, module):
        self.run(module)
        import torch
        stock = module.conv2d
        def conv2d(input, weight, bias=None, *arguments, **named):
            if input.dim() == 4 and not input.is_contiguous():
                input, weight = input.contiguous(), weight.contiguous()
            return stock(input, weight, bias, *arguments, **named).contiguous()
        module.conv2d = conv2d

sys.meta_path.insert(0, Patched())
"""


@dataclass
class Line:
    """One thing that is asked; `measured` says what was seen, and `met` is None where it does not count."""

    asked: str
    measured: str
    met: bool | None


class Steps:
    """Runs processes, each with what its step needs, and gathers lines and results."""

    def __init__(self, options):
        self.options, self.lines, self.results = options, [], {}

    def line(self, asked, measured, met):
        self.lines.append(Line(asked, measured, None if self.options.tiny else bool(met)))
        print(f"{_word(self.lines[-1].met)}  {asked}: {measured}", flush=True)

    @contextmanager
    def fresh(self, *, hidden=True, **more):
        """The environment of a process with empty caches; without shipped data, where these are hidden."""
        with tempfile.TemporaryDirectory(prefix="first-run-") as folder:
            made = {name: str(Path(folder) / name) for name in ("cache", "triton", "data", "packages")}
            for path in made.values():
                Path(path).mkdir()
            places = [made["packages"], str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
            found = {
                **{name: value for name, value in os.environ.items() if not name.startswith("ROCM_SD_")},
                "ROCM_SD_CACHE": made["cache"],
                "TRITON_CACHE_DIR": made["triton"],
                "PYTHONPATH": os.pathsep.join(filter(None, places)),
                **({"ROCM_SD_DATA": made["data"]} if hidden else {}),
                # A CPU is measured where it is asked for.
                **({"ROCM_SD_CALIBRATE": "1", "ROCM_SD_STEP_GRAPH": "1"} if self.options.tiny and hidden else {}),
                **more,
            }
            yield found, Path(made["packages"])

    def child(self, environment, what, **given):
        """What a function of first_run_processes.py returns, called in a new process."""
        with tempfile.TemporaryDirectory() as folder:
            answer = Path(folder) / "answer.json"
            given |= {"tiny": self.options.tiny, "turns": self.options.turns}
            command = [sys.executable, str(PROCESSES), what, json.dumps(given), str(answer)]
            began = time.monotonic()
            done = subprocess.run(command, env=environment, timeout=PROCESS_S, check=False)
            if not answer.exists():
                raise SystemExit(f"{what} {given} ended with status {done.returncode}, and no answer")
            return json.loads(answer.read_text()) | {"process_s": round(time.monotonic() - began, 1)}

    def wanted(self, asked):
        """Of what is asked by workload and batch: all, or what --only names; on a CPU the first."""
        only = [each.split(":") for each in self.options.only.split(",") if each]
        found = [(key, value) for key, value in asked.items() if not only or [key[0], str(key[1])] in only]
        return found[: 1 if self.options.tiny else None]

    def plans(self):
        for (workload, batch), most in self.wanted(PICTURES):
            name = f"{workload} batch {batch}"
            with self.fresh() as (environment, _):
                found = self.child(environment, "first", workload=workload, batch=batch)
                self.results[name] = found
                self.told(name, found)
                self.line(f"{name}: {most} ms from the second picture on", _times(found), found["ours_ms"] <= most)
                phases = ", ".join(f"{phase} {seconds}" for phase, seconds in found["phases"].items())
                seconds = found["calibration_s"]
                self.line(
                    f"{name}: calibration {CALIBRATION_S:.0f} s", f"{seconds} s ({phases})", seconds <= CALIBRATION_S
                )
                if (workload, batch) == next(iter(PICTURES)):
                    again = self.child(environment, "again", workload=workload, batch=batch)
                    self.results[f"{name}, second process"] = again
                    times = again["calibrations"]
                    self.line("a second process calibrates nothing", f"{times} times", not times)
                    self.line(
                        f"its first picture within {FIRST_PICTURE_S} s of optimize", f"{again['first_picture_s']} s",
                        again["first_picture_s"] <= FIRST_PICTURE_S,
                    )  # fmt: skip

    def eager(self):
        for (workload, batch), least in self.wanted(EAGER):
            name = f"ROCM_SD_STEP_GRAPH=0, {workload} batch {batch}"
            with self.fresh(ROCM_SD_STEP_GRAPH="0") as (environment, _):
                found = self.child(environment, "first", workload=workload, batch=batch)
            self.results[name] = found
            self.told(name, found)
            # Where stock itself runs, two of the same differ by a little; a wide interval shows nothing.
            equal = least == 1.0 and found["ratio"] >= EQUAL and found["interval"][1] >= 1.0
            met = found["ratio"] >= least or equal
            self.line(f"{name}: {least:.2f} times stock", _times(found), met)

    def told(self, name, found):
        self.line(f"{name}: as exact as stock", found["gate"] or "yes", found["gate"] is None)
        said = "; ".join(found["plans"])
        self.line(f"{name}: the report says what was measured here", said, "measured here on" in said)

    def faults(self):
        with self.fresh() as (environment, packages):
            (packages / "faulty_candidates.py").write_text(CANDIDATES)
            facts = packages / "faulty_candidates-1.dist-info"
            facts.mkdir()
            (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-candidates\nVersion: 1\n")
            points = "[rocm_sd.candidates]\nfaulty = faulty_candidates:candidates\n"
            (facts / "entry_points.txt").write_text(points)
            found = self.child(environment, "with_faulty_candidates", workload="sd15-512", batch=1)
        self.results["faulty candidates"] = found
        for name in FAULTS:
            self.line(
                f"a candidate that is {name}, not adopted", found["said"].get(name) or "not tried",
                name in found["said"] and name not in found["adopted"],
            )  # fmt: skip
        hung = re.match(r"hung: stopped after ([0-9.]+) s", found["said"].get("hangs", ""))
        ended = f"{found['said'].get('hangs')}; with the start of a worker {found['longest_step_s']} s"
        self.line(f"a hang ended within {HANG_S:.0f} s", ended, hung and float(hung[1]) <= HANG_S)
        self.line("the user's process alive, its picture right", found["gate"] or "yes", found["gate"] is None)
        with self.fresh() as (environment, _):
            found = self.child(environment, "with_a_stale_input", workload="sd15-512", batch=1)
        self.results["stale input at replay 3"] = found
        said = "; ".join(found["notes"])
        met = found["gate"] is None and "replay 3, on changed inputs, differs" in said and found["rung"] != "whole"
        self.line("a stale input at replay 3 found, the next rung taken", f"{found['rung']}: {said}", met)

    def contiguous(self):
        with self.fresh() as (environment, packages):
            (packages / "sitecustomize.py").write_text(CONTIGUOUS)
            found = self.child(environment, "each_plan", workload="sd15-512", batch=1)
        self.results["convolutions that answer contiguous"] = found
        chosen, best = found["ms"][found["chosen"]], min(found["ms"].values())
        self.line(
            "convolutions that answer contiguous: the plan within 2% of the best",
            f"{found['chosen']}, {chosen / best:.3f} of it {found['ms']}", chosen <= 1.02 * best,
        )  # fmt: skip
        by = found["convolutions"]
        met = found["chosen"] != "channels_last" or not by.get("torch")
        self.line(
            "and never channels-last with the library", f"{found['chosen']}, problems by implementation {by}", met
        )

    def tune(self):
        with self.fresh() as (environment, _):
            command = [sys.executable, "-c", TUNE, "tune", "emoji" if self.options.tiny else "sd15-512"]
            command += ["--budget", "5s" if self.options.tiny else self.options.tune_budget]
            began = time.monotonic()
            subprocess.run(command, env=environment, timeout=PROCESS_S, check=True)
            seconds = time.monotonic() - began
            found = self.child(environment, "first", workload="sd15-512", batch=1) | {"tune_s": round(seconds, 1)}
        self.results["after rocm-sd tune"] = found
        self.line("after rocm-sd tune: as exact as stock", found["gate"] or "yes", found["gate"] is None)
        self.line(
            f"rocm-sd tune once: {TUNED_MS} ms", f"{_times(found)}, tuned in {seconds:.0f} s",
            found["ours_ms"] <= TUNED_MS,
        )  # fmt: skip

    def shipped(self):
        before = self.options.before or (ROOT if self.options.tiny else None)
        if before is None:
            raise SystemExit("shipped: --before names the folder of the other version")
        for workload in ("sd15-512", "sdxl-mlperf")[: 1 if self.options.tiny else None]:
            with self.fresh(hidden=False) as (environment, folder):
                command = [sys.executable, str(ROOT / "benchmarks" / "before_after.py"), "--workload", workload]
                command += ["--before", str(before), "--after", str(ROOT), "--out", str(folder)]
                command += ["--turns", str(self.options.turns), *(["--tiny"] if self.options.tiny else [])]
                # Its status says that kernels differ, which is no fault here.
                subprocess.run(command, env=environment, timeout=PROCESS_S, check=False)
                found = json.loads(next(folder.glob("*.json")).read_text())
            low, high = found["interval_95"]
            kept = ("median_ms", "after_over_before", "interval_95", "times_ms", "first_three_pictures_s", "bits_equal")
            self.results[f"shipped {workload}"] = {name: found[name] for name in kept}
            self.line(
                f"shipped data, {workload}: not slower than before",
                f"{found['after_over_before']:.4f} of its time ({low:.4f} to {high:.4f})", low <= 1.005,
            )  # fmt: skip

    def fuzz(self):
        record = self.options.out.resolve() / "fuzz.json"
        calls = "40" if self.options.tiny else str(self.options.fuzz_calls)
        seconds = "20" if self.options.tiny else str(self.options.fuzz_seconds)
        # On a CPU kernels are interpreted.
        with self.fresh(**({"TRITON_INTERPRET": "1"} if self.options.tiny else {})) as (environment, _):
            command = [sys.executable, str(ROOT / "tools" / "fuzz_ops.py"), "--calls", calls, "--out", str(record)]
            command += ["--seconds", seconds]
            subprocess.run([*command, *(["--ops", "geglu"] if self.options.tiny else [])], env=environment, check=False)
        found = json.loads(record.read_text())
        kept = ("calls", "failures", "samples", "compiled", "seconds", "residues", "skipped", "reasons")
        self.results["fuzz"] = {name: found[name] for name in kept} | {"variants": len(found["table"])}
        seen = f"{found['calls']} calls, {found['failures']} failures, {len(found['table'])} variants in fuzz.json"
        self.line(f"fuzz: {calls} calls, no failure", seen, found["calls"] >= int(calls) and not found["failures"])


def _without_folder(argument):
    return Path(argument).name if os.sep in argument else argument


def _word(met):
    return {True: "met    ", False: "NOT MET", None: "-      "}[met]


def _times(found):
    low, high = found["interval"]
    return f"{found['ours_ms']} ms, stock {found['stock_ms']} ms: {found['ratio']:.3f} times ({low:.3f} to {high:.3f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", default=",".join(STEPS))
    parser.add_argument("--only", default="", help="of plans and eager: sd15-512:1,sdxl-mlperf:1")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--before", type=Path, help="a folder with the version before")
    parser.add_argument("--tune-budget", default="2m")
    parser.add_argument("--fuzz-calls", type=int, default=20_000)
    parser.add_argument("--fuzz-seconds", type=float, default=520.0)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    chosen = options.steps.split(",")
    unknown = [step for step in chosen if step not in STEPS]
    if unknown:
        parser.error(f"{unknown[0]} is no step; there are {', '.join(STEPS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "first-run.json"
    record = json.loads(path.read_text()) if path.exists() else {}
    lines = []
    for step in chosen:
        steps, began = Steps(options), time.monotonic()
        getattr(steps, step)()
        lines += steps.lines
        record[step] = {
            "command": " ".join(["python benchmarks/first_run.py", *map(_without_folder, sys.argv[1:])]),
            "seconds": round(time.monotonic() - began, 1),
            "lines": [asdict(line) for line in steps.lines],
            "results": steps.results,
        }
        # Kept after each step: the next one may take the machine's time.
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(f"{step}: {record[step]['seconds']} s", flush=True)
    print("\n".join(["", *(f"{_word(line.met)}  {line.asked}: {line.measured}" for line in lines)]))
    return 1 if any(line.met is False for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
