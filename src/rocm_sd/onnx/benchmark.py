"""ONNX Runtime's benchmark of Stable Diffusion, by its own flags, timed as rocm-sd bench times.

    python -m rocm_sd.onnx.benchmark -e onnxruntime -p ./sd15-onnx -r migraphx -b 1 -v 1.5

It adds a row to benchmark_result.csv, with the columns of that benchmark. Nothing is compared with torch here: an
export was, and `rocm-sd bench --engines stock,onnxruntime` times engines in turns of one run.
"""

from __future__ import annotations

import argparse
import csv
import io
import logging
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.bench import engines
from rocm_sd.bench.machine import PeakMemory
from rocm_sd.bench.subjects import PROMPTS
from rocm_sd.cli.terminal import bar
from rocm_sd.errors import INTERRUPTED, InvalidOption, RocmSdError, Unsupported, explained, first_line
from rocm_sd.files import write_text
from rocm_sd.integrations.diffusers import load_pipeline, set_scheduler
from rocm_sd.integrations.diffusers.loading import default_device, default_dtype, hush
from rocm_sd.measuring import Stopwatch
from rocm_sd.models import EMBEDDED, resolve
from rocm_sd.onnx.pipeline import ROCmOnnxPipeline
from rocm_sd.onnx.providers import AUTO, CAPTURING, PROVIDERS, TUNABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["COLUMNS", "MODELS", "benchmark", "main", "parsed"]

log = logging.getLogger("rocm_sd")
MODELS = {
    "1.4": "CompVis/stable-diffusion-v1-4",
    "1.5": "stable-diffusion-v1-5/stable-diffusion-v1-5",
    "2.0": "stabilityai/stable-diffusion-2",
    "2.1": "stabilityai/stable-diffusion-2-1",
    "xl-1.0": "stabilityai/stable-diffusion-xl-base-1.0",
    "xl-base-1.0": "stabilityai/stable-diffusion-xl-base-1.0",
    EMBEDDED: EMBEDDED,
}
COLUMNS = (
    "model_name", "directory", "engine", "version", "provider", "disable_safety_checker", "height", "width", "steps",
    "batch_size", "batch_count", "num_prompts", "average_latency", "median_latency", "first_run_memory_MB",
    "second_run_memory_MB", "enable_cuda_graph",
)  # fmt: skip
_ENGINES = ("onnxruntime", "torch", "rocm-sd", "tensorrt")
# Who heeds a flag: an engine, and of ONNX Runtime's flags the providers.
_ENGINE_OF = {
    "use_xformers": "torch", "enable_torch_compile": "torch",
    "tuning": "onnxruntime", "enable_cuda_graph": "onnxruntime",
}  # fmt: skip
_PROVIDERS_OF = {"tuning": TUNABLE, "enable_cuda_graph": tuple(CAPTURING)}
_GUIDANCE = 7.5
_SAMPLED_EVERY_S = 0.002


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rocm_sd.onnx.benchmark",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("-e", "--engine", choices=_ENGINES, default="onnxruntime", help="who computes (default: onnxruntime)")
    add("-r", "--provider", choices=(AUTO, *PROVIDERS), default=AUTO, help="of onnxruntime (default: what is there)")
    add("-v", "--version", choices=tuple(MODELS), default="1.5", help="the model, for -e torch and rocm-sd")
    add("-p", "--pipeline", help="a folder: of ONNX models for onnxruntime, of Diffusers for torch")
    add("-b", "--batch_size", type=_count, default=1, help="pictures a call (default: 1)")
    add("-c", "--batch_count", type=_count, default=5, help="calls a prompt (default: 5)")
    add("-n", "--num_prompts", type=_count, default=1, help="prompts (default: 1)")
    add("-s", "--steps", type=_count, default=50, help="denoising steps (default: 50)")
    add("--height", type=_count, default=512)
    add("--width", type=_count, default=512)
    add("--seed", type=int, default=0, help="of the first picture (default: 0)")
    add("-t", "--tuning", action="store_true", help="tune the tunable ops of the providers cuda and rocm")
    add("-g", "--enable_cuda_graph", action="store_true", help="capture the UNet's calls as graphs, on AMD cards too")
    add("--use_xformers", action="store_true", help="-e torch: its memory-efficient attention")
    add("--enable_torch_compile", action="store_true", help="-e torch: compiled by inductor")
    checked = parser.add_mutually_exclusive_group()
    checked.add_argument("--enable_safety_checker", action="store_true", help="where the model has one")
    checked.add_argument("--disable_safety_checker", action="store_true", help="as it is by default")
    add("-m", "--max_trt_batch_size", type=_count, default=None, help="taken and not needed: sizes are free")
    add("--result", type=Path, default=Path("benchmark_result.csv"), help="the file (default: benchmark_result.csv)")
    return parser.parse_args(arguments)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text[:9]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text[:9])


@dataclass
class _Subject:
    """A pipeline that is ready, and what the row says of it."""

    pipe: Any
    model: str
    version: str
    provider: str
    graphs: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


def benchmark(asked: argparse.Namespace, progress: Callable[[int, int, str], None]) -> dict[str, Any]:
    """The row. Two pictures come first, whose memory is noted; then `num_prompts * batch_count` that are timed."""
    for sentence in _without_effect(asked):
        sys.stderr.write(f"{sentence}\n")
    if asked.engine == "tensorrt":
        raise Unsupported("-e tensorrt", "this benchmark", hint="Type: -e onnxruntime -r tensorrt")
    total = 2 + asked.num_prompts * asked.batch_count
    with _memory(asked) as memory:
        progress(0, total, "loading")
        subject = _onnx(asked) if asked.engine == "onnxruntime" else _torch(asked)
        _prepare(subject.pipe, checked=asked.enable_safety_checker)
        watch = Stopwatch(subject.device)
        progress(0, total, "first picture")
        _drawn(subject, asked, 0, 0)
        first = memory()
        progress(1, total, "second picture")
        _drawn(subject, asked, 0, 0)
        second = memory()
        seconds: list[float] = []
        for number in range(asked.num_prompts):
            for turn in range(asked.batch_count):
                progress(2 + len(seconds), total, f"prompt {number + 1}, call {turn + 1}")
                call = partial(_drawn, subject, asked, number, turn)
                seconds.append(watch.milliseconds(call) / 1000)
    return {
        "model_name": subject.model,
        # Nothing of a person's folders: the last part of a path.
        "directory": Path(asked.pipeline).resolve().name if asked.pipeline else None,
        "engine": asked.engine,
        "version": subject.version,
        "provider": subject.provider,
        "disable_safety_checker": not asked.enable_safety_checker,
        "height": asked.height,
        "width": asked.width,
        "steps": asked.steps,
        "batch_size": asked.batch_size,
        "batch_count": asked.batch_count,
        "num_prompts": asked.num_prompts,
        "average_latency": round(fmean(seconds), 4),
        "median_latency": round(median(seconds), 4),
        "first_run_memory_MB": None if first is None else round(first, 1),
        "second_run_memory_MB": None if second is None else round(second, 1),
        "enable_cuda_graph": subject.graphs,
    }


def _without_effect(asked: argparse.Namespace) -> Iterator[str]:
    """A sentence for each flag that does nothing in this combination: none is passed over in silence."""
    of_onnxruntime = asked.engine == "onnxruntime"
    for name, engine in _ENGINE_OF.items():
        if getattr(asked, name) and asked.engine != engine:
            yield f"--{name} has no effect on {asked.engine}: it is for -e {engine}."
    if asked.provider != AUTO and not of_onnxruntime:
        yield f"--provider has no effect on {asked.engine}: it is for -e onnxruntime."
    for name, providers in _PROVIDERS_OF.items():
        # Of auto it is known when the provider is.
        if getattr(asked, name) and of_onnxruntime and asked.provider not in {AUTO, *providers}:
            yield f"--{name} has no effect on {asked.provider}: it is for {', '.join(providers)}."
    if asked.max_trt_batch_size is not None:
        yield "--max_trt_batch_size has no effect: engines are built for the sizes that come."


def _onnx(asked: argparse.Namespace) -> _Subject:
    if asked.pipeline is None:
        raise InvalidOption(
            "--pipeline", "", [],
            hint=f"It takes a folder, which is made by: rocm-sd onnx export {MODELS[asked.version]} FOLDER --float16",
        )  # fmt: skip
    automatic = asked.provider == AUTO
    pipe = ROCmOnnxPipeline.from_pretrained(
        asked.pipeline, asked.provider,
        graphs=asked.enable_cuda_graph and (automatic or asked.provider in CAPTURING),
        tuning=asked.tuning and (automatic or asked.provider in TUNABLE),
    )  # fmt: skip
    runtime = metadata.version("onnxruntime")
    name = PROVIDERS[pipe.provider.name].removesuffix("ExecutionProvider")
    return _Subject(pipe, MODELS[asked.version], runtime, name, pipe.provider.graphs, pipe.provider.device)


def _torch(asked: argparse.Namespace) -> _Subject:
    if asked.use_xformers and asked.enable_torch_compile:
        raise InvalidOption("--use_xformers", "with --enable_torch_compile", [], hint="Give one of the two.")
    device = default_device()
    wanted = "compile" if asked.enable_torch_compile else "xformers" if asked.use_xformers else "channels_last"
    (engine,) = engines.chosen(["rocm-sd" if asked.engine == "rocm-sd" else wanted], device)
    pipe = load_pipeline(resolve(asked.pipeline or MODELS[asked.version]), device, default_dtype(device))
    provider = {"compile": "compile", "xformers": "xformers"}.get(engine.name, "default")
    version = engine.version().partition(" ")[2]
    return _Subject(engine.prepare(pipe), MODELS[asked.version], version, provider, device=device)


def _prepare(pipe: Any, *, checked: bool) -> None:
    """DDIM, as that benchmark has it for Stable Diffusion; SDXL keeps its own scheduler."""
    if getattr(pipe, "tokenizer_2", None) is None:
        set_scheduler(getattr(pipe, "pipe", pipe), "ddim")
    if not checked and getattr(pipe, "safety_checker", None) is not None:
        pipe.safety_checker = None
    elif checked and getattr(pipe, "safety_checker", None) is None:
        raise Unsupported("--enable_safety_checker", "this model, which has none", hint="Leave it out.")
    pipe.set_progress_bar_config(disable=True)


def _drawn(subject: _Subject, asked: argparse.Namespace, prompt: int, turn: int) -> None:
    seed = asked.seed + prompt * asked.batch_count + turn
    subject.pipe(
        PROMPTS[prompt % len(PROMPTS)], height=asked.height, width=asked.width, num_inference_steps=asked.steps,
        guidance_scale=_GUIDANCE, num_images_per_prompt=asked.batch_size,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip


@contextmanager
def _memory(asked: argparse.Namespace) -> Iterator[Callable[[], float | None]]:
    """A function with the peak, in MB, since it was last called, above what was in use before anything was loaded.

    Of a GPU what its driver has given to all processes, since torch does not know of ONNX Runtime's; of a CPU the
    resident set.
    """
    on_gpu = torch.cuda.is_available() and asked.provider != "cpu"
    if not on_gpu:
        resident = PeakMemory(torch.device("cpu"))
        yield resident.mib
        return
    free, _ = torch.cuda.mem_get_info()
    lowest, ended = [free], threading.Event()

    def sample() -> None:
        while not ended.wait(_SAMPLED_EVERY_S):
            lowest[0] = min(lowest[0], torch.cuda.mem_get_info()[0])

    def peak() -> float:
        torch.cuda.synchronize()
        found = (free - min(lowest[0], torch.cuda.mem_get_info()[0])) / 2**20
        lowest[0] = free
        return found

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield peak
    finally:
        ended.set()
        sampler.join()


def append(row: dict[str, Any], file: Path) -> None:
    """One more row, under a header that stands there once."""
    before = rows_of(file)
    text = io.StringIO()
    csv.DictWriter(text, COLUMNS, lineterminator="\n").writerow(row)
    write_text(file, f"{before}\n{text.getvalue()}")


def rows_of(file: Path) -> str:
    """What is there already, or else the header. A file that cannot be read or has other columns is left as it is."""
    other = "Give another file with --result."
    header = ",".join(COLUMNS)
    try:
        before = file.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return header
    except (OSError, UnicodeError) as error:
        raise RocmSdError(f"{file} cannot be read ({first_line(error)}).", hint=other) from error
    if before and before.splitlines()[0] != header:
        raise RocmSdError(f"{file} has other columns.", hint=other)
    return before or header


def main(arguments: Sequence[str] | None = None) -> int:
    asked = parsed(arguments)
    hush()
    try:
        # Before minutes are spent on a row that has no place.
        rows_of(asked.result)
        with bar("starting") as update:
            row = benchmark(asked, lambda done, total, what: update(completed=done, total=total, description=what))
        append(row, asked.result)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 -- a sentence and what to type next, as of rocm-sd itself
        known = explained(error)
        sys.stderr.write(f"error: {known.message} {known.hint or ''}\n")
        return known.exit_code
    width = max(map(len, COLUMNS))
    for name in COLUMNS:
        sys.stdout.write(f"{name:{width}}  {'' if row[name] is None else row[name]}\n")
    sys.stdout.write(f"added to {asked.result}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
