"""`ROCmSDProfiler` and `profiler`: profile whatever runs between two lines of a program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocm_sd import arch
from rocm_sd.bench.profiling import flame, tables
from rocm_sd.bench.profiling.analysis import Analysis, analyse
from rocm_sd.bench.profiling.capture import Recording
from rocm_sd.bench.profiling.findings import findings
from rocm_sd.bench.profiling.trace import Trace, read
from rocm_sd.errors import Unsupported
from rocm_sd.files import write_text

if TYPE_CHECKING:
    from rich.console import Console
    from typing_extensions import Self

__all__ = ["ROCmSDProfiler", "profiler"]


class ROCmSDProfiler:
    """with ROCmSDProfiler(pipe) as profile: pipe("a frog")
    profile.print_stats(); profile.export("flame.html")

    With a model or a pipeline its modules are told apart. Shares are of the time under the profiler.
    """

    def __init__(self, model: Any = None) -> None:
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

    def stats(self) -> Analysis:
        trace = self._trace()
        facts = arch.device_facts()
        told = analyse(trace, facts.arch, device=facts.name)
        nameless = trace.ops and not trace.has_modules and not told.graph_share
        notes = ["no modules were recorded: give the model or the pipeline, profiler.enable(pipe)"] if nameless else []
        return tables.annotated(told, findings(told), notes)

    def print_stats(self, console: Console | None = None, *, rows: int = 15) -> None:
        tables.show(self.stats(), console, rows=rows)

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
