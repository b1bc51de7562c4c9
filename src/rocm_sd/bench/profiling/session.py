"""Profile whatever runs between two lines of a program, or one picture.

`ROCmSDProfiler` and `profiler` do the former. `profile_picture` warms up, times the picture and records it; and once
more, eagerly, where a graph hides the modules.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocm_sd import arch
from rocm_sd.bench.profiling import flame, tables
from rocm_sd.bench.profiling.analysis import Analysis, analyse, family_work
from rocm_sd.bench.profiling.calls import attention_call
from rocm_sd.bench.profiling.findings import findings
from rocm_sd.bench.profiling.recording import Recording, synchronize
from rocm_sd.bench.profiling.trace import Trace, read
from rocm_sd.engine import Parts, optimize_with
from rocm_sd.errors import Unsupported
from rocm_sd.files import write_text
from rocm_sd.measuring import Stopwatch
from rocm_sd.rewrite import RULES, RULES_FOR_GRAPHS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from rich.console import Console
    from typing_extensions import Self

    from rocm_sd.bench.engines import Engine

__all__ = ["STAGES", "Profiled", "ROCmSDProfiler", "profile_picture", "profiler"]

# Stages of the longest way: a GPU, and an engine that replays graphs.
STAGES = 5
# Engines that run the model's own modules one by one, so that ranges can be put around them.
_EAGER_ENGINES = ("stock", "channels_last", "xformers")
# All that a graph replays, called from Python.
_WITHOUT_GRAPHS = Parts(
    rules=frozenset(rule.name for rule in (*RULES, *RULES_FOR_GRAPHS)), hoisted=False, captured=False
)
_EAGER = (
    "modules are those of a second picture, drawn eagerly: kernels are launched one by one, and what graphs have once "
    "a picture is computed at every step"
)
_COUNTED = (
    "FLOPs and floors of convolution, GEMM and attention are the stock model's; the bytes that fusing saves are not "
    "known, so that other families have no floor"
)


class ROCmSDProfiler:
    """with ROCmSDProfiler(pipe) as profile: pipe("a frog")
    profile.print_stats(); profile.export("flame.html")

    With a model or a pipeline its modules have times of their own. Shares are of the time under the profiler.
    `timings`: by name, the milliseconds of each call that `profile_attention` has timed.
    """

    def __init__(self, model: Any = None) -> None:
        self.timings: dict[str, list[float]] = {}
        self._model = model
        self._recording: Recording | None = None

    def enable(self, model: Any = None) -> None:
        """Start afresh; while it runs already, nothing changes."""
        if self._recording is None or not self._recording.is_running:
            self._recording = Recording(self._model if model is None else model)
            self._recording.start()

    def disable(self) -> None:
        if self._recording is not None:
            self._recording.stop()

    def __enter__(self) -> Self:
        self.enable()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.disable()

    def profile_attention(self, *arguments: Any, **named: Any) -> Any:
        """What attention gives, timed once, with its milliseconds added to `timings`.

        Given as query, key, value and what else `optimized_attention` takes; as the sizes of a call, batch_size,
        seq_len, d_model and num_heads; or as a function of your own and its arguments, whose name then stands there.
        """
        name, call, device = attention_call(*arguments, **named)
        results: list[Any] = []
        ms = Stopwatch(device).milliseconds(lambda: results.append(call()))
        self.timings.setdefault(name, []).append(ms)
        return results[-1]

    def stats(self) -> Analysis:
        trace = self._trace()
        facts = arch.device_facts()
        found = analyse(trace, facts.arch, device=facts.name)
        nameless = trace.ops and not trace.has_modules and not found.graph_share
        notes = ["no modules were recorded: give the model or the pipeline, profiler.enable(pipe)"] if nameless else []
        return tables.annotated(found, findings(found), notes)

    def print_stats(self, console: Console | None = None, *, rows: int = 15) -> None:
        # Where only single calls were timed, there is no recording.
        if self._recording is not None or not self.timings:
            tables.show(self.stats(), console, rows=rows)
        if self.timings:
            tables.show_timings(self.timings, console)

    def export(self, path: str | Path) -> Path:
        """By its ending: .html is the flame chart, .json the Chrome trace."""
        path = Path(path)
        trace, values = self._trace(), self._values()
        if path.suffix == ".html":
            flame.write(trace, path, title="rocm-sd profile")
        elif path.suffix == ".json":
            write_text(path, json.dumps(values))
        else:
            raise Unsupported("export", f"the ending {path.suffix!r}", hint="Use .html or .json.")
        return path

    def _values(self) -> dict[str, Any]:
        # Asking ends it: `profiler.enable(); ...; profiler.print_stats()` is how it is promised.
        self.disable()
        if self._recording is None or self._recording.trace is None:
            raise Unsupported(
                "The profiler", "statistics of nothing", hint="Call profiler.enable(), then run what is to be profiled."
            )
        return self._recording.trace

    def _trace(self) -> Trace:
        return read(self._values())


# One for the program, as the founding documents promise: profiler.enable(); ...; profiler.print_stats().
profiler = ROCmSDProfiler()


@dataclass(frozen=True)
class Profiled:
    """`chart` is the trace that the flame chart shows; `trace` is the Chrome trace of the picture itself."""

    analysis: Analysis
    trace: dict[str, Any]
    chart: Trace


def profile_picture(
    pipeline: Callable[[], Any],
    draw: Callable[[Any], object],
    engine: Engine,
    device: torch.device,
    *,
    subject: Mapping[str, Any],
    on_stage: Callable[[str], None] = lambda _stage: None,
) -> Profiled:
    """`pipeline()` makes a stock pipeline; `draw(pipe)` draws the picture, the same every time."""
    facts, on_gpu = arch.device_facts(device), device.type != "cpu"
    on_stage("loading")
    pipe = pipeline()
    on_stage("first picture")
    reference = None
    if on_gpu and engine.name not in _EAGER_ENGINES:
        draw(pipe)
        reference = family_work(read(_recorded(pipe, draw)))
    pipe = engine.prepare(pipe)
    draw(pipe)
    on_stage("timed pictures")
    # On a GPU the first of three does not count: a graph may be captured in it.
    plain_ms = statistics.median([_milliseconds(lambda: draw(pipe)) for _ in range(3 if on_gpu else 1)][-2:])
    on_stage("profiled picture")
    eager = engine.name in _EAGER_ENGINES or (engine.name == "rocm-sd" and not on_gpu)
    values = _recorded(pipe, draw, modules=eager)
    trace, modules, notes = read(values), None, []
    if not eager and engine.name == "rocm-sd":
        on_stage("its modules")
        try:
            modules = _drawn_eagerly(pipe, draw)
            notes.append(_EAGER)
        except KeyboardInterrupt:
            notes.append("interrupted before its modules were known")
    elif not eager:
        notes.append(f"modules have no times of their own: {engine.name} does not run the model module by module")
    if reference is not None:
        notes.append(_COUNTED)
    found = analyse(trace, facts.arch, device=facts.name, plain_ms=plain_ms, reference=reference, modules=modules)
    found = tables.annotated(found, findings(found, engine.name), notes, plain_ms)
    return Profiled(replace(found, subject=dict(subject)), values, modules or trace)


def _recorded(pipe: Any, draw: Callable[[Any], object], *, modules: bool = True) -> dict[str, Any]:
    with Recording(pipe if modules else None) as recording:
        draw(pipe)
    assert recording.trace is not None
    return recording.trace


def _drawn_eagerly(pipe: Any, draw: Callable[[Any], object]) -> Trace:
    pipe = optimize_with(pipe, "auto", "exact", _WITHOUT_GRAPHS)
    draw(pipe)
    return read(_recorded(pipe, draw))


def _milliseconds(call: Callable[[], object]) -> float:
    """Of the host's clock, to the end of the device's work: what the wall time of a trace is, too."""
    synchronize()
    started = time.perf_counter()
    call()
    synchronize()
    return (time.perf_counter() - started) * 1e3
