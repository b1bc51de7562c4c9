"""Two versions of rocm-sd in one run: the same kernels in the same order, the same bits, and times in turns.

    git worktree add ../before v1
    python benchmarks/before_after.py --before ../before --after . --out results [--workload sd15-512] [--turns 30]

Each version has a process of its own with an empty cache. Both draw the same picture from the same weights; then each
is profiled once, and they are timed in turns. results/WORKLOAD.json has the kernels by name and count, whether order
and bits agree, and the ratio of the medians with its interval. The exit status is 1 where kernels or bits differ.
`--tiny` tries the command on a CPU, where torch's own operations stand in for kernels.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

_DEVICE_EVENTS = {"kernel", "gpu_memcpy", "gpu_memset"}
# A first picture compiles and captures; the second replays; after the third nothing is done for the first time.
_WARM_UP = 3
_DRAWS = 4000


def serve(workload: str, *, tiny: bool) -> None:
    """Answer requests, a line of JSON each: `draw` gives milliseconds, `kernels` names in order, `bits` a hash."""
    # Libraries print; answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    import rocm_sd  # noqa: PLC0415 -- the version that this process was started for
    from rocm_sd.bench import workloads  # noqa: PLC0415 -- as above

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made = workloads.make(workload, device, tiny=tiny)
    pipe = rocm_sd.optimize(made.pipeline())
    started = time.perf_counter()
    for _ in range(_WARM_UP):
        drawn = made.picture(pipe, 1)
    ready = time.perf_counter() - started

    def timed() -> float:
        synchronize()
        begin = time.perf_counter()
        made.picture(pipe, 1)
        synchronize()
        return (time.perf_counter() - begin) * 1e3

    def bits() -> str:
        return hashlib.sha256(made.picture(pipe, 1, seed=1).float().cpu().numpy().tobytes()).hexdigest()

    requests = {"draw": timed, "bits": bits, "kernels": lambda: kernels_of(lambda: made.picture(pipe, 1))}
    source = Path(rocm_sd.__file__).resolve().parents[2]
    answers.write(json.dumps({"source": str(source), "ready_s": ready, "shape": list(drawn.shape)}) + "\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(requests[json.loads(line)]()) + "\n")
        answers.flush()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def kernels_of(work) -> list[str]:
    """Names in the order in which they started."""
    on_gpu = torch.cuda.is_available()
    synchronize()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as recorded:
        work()
        synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    wanted = _DEVICE_EVENTS if on_gpu else {"cpu_op"}
    found = [event for event in events if event.get("cat") in wanted]
    return [event["name"] for event in sorted(found, key=lambda event: float(event["ts"]))]


class Version:
    """One version's process."""

    def __init__(self, name: str, root: Path, options: argparse.Namespace, cache: str) -> None:
        self.name, self.root = name, root.resolve()
        paths = [str(self.root / "src"), os.environ.get("PYTHONPATH", "")]
        command = [sys.executable, __file__, "--serve", "--workload", options.workload]
        self._process = subprocess.Popen(
            [*command, "--tiny"] if options.tiny else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "ROCM_SD_CACHE": cache},
        )

    def answer(self):
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with status {self._process.wait()}")
        return json.loads(line)

    def ask(self, request: str):
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def package_version(package: str) -> str | None:
    try:
        return installed_version(package)
    except PackageNotFoundError:
        return None


def interval(before: list[float], after: list[float]) -> tuple[float, float]:
    """95%, of the ratio of medians, by resampling turns in pairs."""
    random = np.random.default_rng(20260101)
    picks = random.integers(0, len(before), (_DRAWS, len(before)))
    ratios = np.median(np.array(after)[picks], axis=1) / np.median(np.array(before)[picks], axis=1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return float(low), float(high)


def first_difference(before: list[str], after: list[str]) -> str | None:
    for number, (old, new) in enumerate(zip(before, after, strict=False)):
        if old != new:
            return f"kernel {number}: {old} before, {new} after"
    return None if len(before) == len(after) else f"{len(before)} kernels before, {len(after)} after"


def compare(options: argparse.Namespace, caches: str) -> dict:
    with ExitStack() as stack:
        versions = {}
        for name in ("before", "after"):
            versions[name] = Version(name, getattr(options, name), options, f"{caches}/{name}")
            stack.callback(versions[name].close)
            # One after the other: first pictures are timed, too.
            versions[name].facts = versions[name].answer()
        for version in versions.values():
            if Path(version.facts["source"]) != version.root:
                raise SystemExit(f"{version.name} ran {version.facts['source']} and not {version.root}")
        bits = {name: version.ask("bits") for name, version in versions.items()}
        kernels = {name: version.ask("kernels") for name, version in versions.items()}
        times = {name: [] for name in versions}
        for turn in range(options.turns):
            for name in list(versions) if turn % 2 else list(reversed(versions)):
                times[name].append(versions[name].ask("draw"))
        ready = {name: version.facts["ready_s"] for name, version in versions.items()}
    medians = {name: median(found) for name, found in times.items()}
    return {
        "workload": options.workload + ("-tiny" if options.tiny else ""),
        "command": "python benchmarks/before_after.py " + f"--workload {options.workload} --turns {options.turns}",
        "machine": {
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "torch": torch.__version__,
            "python": platform.python_version(),
            **{name: package_version(name) for name in ("triton", "diffusers", "transformers")},
        },
        "bits_equal": bits["before"] == bits["after"],
        "picture_sha256": bits,
        "kernels_equal": kernels["before"] == kernels["after"],
        "first_difference": first_difference(kernels["before"], kernels["after"]),
        "launches": {name: len(found) for name, found in kernels.items()},
        "kernels": {name: dict(Counter(found).most_common()) for name, found in kernels.items()},
        "first_three_pictures_s": ready,
        "median_ms": medians,
        "after_over_before": medians["after"] / medians["before"],
        "interval_95": interval(times["before"], times["after"]),
        "times_ms": times,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--after", type=Path, default=Path())
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--workload", default="sd15-512")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.workload, tiny=options.tiny)
        return 0
    if options.before is None:
        parser.error("--before names the folder of the other version")
    with tempfile.TemporaryDirectory() as caches:
        found = compare(options, caches)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{found['workload']}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    same = found["bits_equal"] and found["kernels_equal"]
    low, high = found["interval_95"]
    print(
        f"{found['workload']}: bits {'equal' if found['bits_equal'] else 'DIFFER'}, "
        f"{found['launches']['after']} kernels {'the same in order' if found['kernels_equal'] else 'DIFFER'}, "
        f"{found['median_ms']['before']:.1f} ms before, {found['median_ms']['after']:.1f} ms after: "
        f"{found['after_over_before']:.4f} ({low:.4f} to {high:.4f})"
    )
    if found["first_difference"]:
        print(found["first_difference"])
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
