"""A Chrome trace of torch.profiler as values: nested ranges of the host, and kernels with the range that launched them.

The trace file is read, and not the profiler's own objects: its format is documented and the same for CUDA and ROCm, and
a file can come from another machine. What rocprofv3 recorded becomes the same values:
`rocprofv3 --kernel-trace --output-format csv|json -- python script.py`.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from rocm_sd.bench.profiling.work import OpWork, op_work
from rocm_sd.errors import RocmSdError
from rocm_sd.files import text_of
from rocm_sd.plain_json import parsed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = [
    "MODULE",
    "REGION",
    "KernelSpan",
    "Span",
    "Trace",
    "UnreadableTrace",
    "load",
    "read",
    "read_rocprof",
    "union",
]

# Names of the ranges that `recording` puts into a trace.
MODULE = "rocm_sd.module:"
REGION = "rocm_sd.region"
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCHES = {"cuda_runtime", "cuda_driver"}
_ROCPROF_HINT = "Record one with: rocprofv3 --kernel-trace --output-format csv -- python SCRIPT"
# A trace has half a kilobyte a kernel: of some millions of them.
_MOST_CHARACTERS = 2**31
_ROCPROF_COLUMNS = ("Kernel_Name", "Start_Timestamp", "End_Timestamp")


class UnreadableTrace(RocmSdError):
    """A file that holds no kernels that this version can read."""

    def __init__(self, path: object, why: str, *, hint: str | None = None) -> None:
        super().__init__(
            f"{path} is not a trace that can be read: {why}.",
            hint=hint or "Traces are written by: rocm-sd profile --trace FILE",
        )


@dataclass(eq=False)
class Span:
    """A range of time on a thread of the host: a torch op, or a module. Times in microseconds."""

    name: str
    start: float
    end: float
    parent: Span | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict)
    # Time in ops directly below, which is not its own.
    below: float = 0.0

    @property
    def is_module(self) -> bool:
        return self.name.startswith(MODULE)

    @property
    def own(self) -> float:
        return max(0.0, self.end - self.start - self.below)

    @cached_property
    def path(self) -> tuple[Span, ...]:
        """From the outermost range to this one."""
        return (self,) if self.parent is None else (*self.parent.path, self)

    @cached_property
    def counted(self) -> tuple[Span, OpWork] | None:
        """The outermost op around it whose work is known, and that work: linear's, and not the addmm's inside."""
        above = None if self.parent is None else self.parent.counted
        work = op_work(self.name, self.inputs) if above is None and not self.is_module else None
        return above if work is None else (self, work)


@dataclass(frozen=True)
class KernelSpan:
    """`launched_in` is the innermost range of the host at its launch; `graph`: it came from the replay of a graph."""

    name: str
    start: float
    end: float
    stream: str = "0"
    launched_in: Span | None = None
    graph: bool = False


@dataclass(frozen=True)
class Trace:
    """`ops` are those of the host in order; `kernels` is empty where there is no GPU. `wall` in microseconds."""

    ops: Sequence[Span]
    kernels: Sequence[KernelSpan]
    start: float
    end: float

    @property
    def wall(self) -> float:
        return self.end - self.start

    @property
    def has_modules(self) -> bool:
        places = (kernel.launched_in for kernel in self.kernels) if self.kernels else iter(self.ops)
        return any(span.is_module for place in places if place for span in place.path)


def load(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if path.suffix == ".gz" else raw
        values = json.loads(text)
    except FileNotFoundError:
        raise UnreadableTrace(path, "there is no such file") from None
    except (OSError, ValueError) as error:
        raise UnreadableTrace(path, str(error)) from error
    if not isinstance(values, dict) or not isinstance(values.get("traceEvents"), list):
        raise UnreadableTrace(path, "it has no traceEvents")
    return values


def read(values: Mapping[str, Any]) -> Trace:
    """What lies in the range `REGION`, or all of it where there is none."""
    events = [e for e in values["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    threads: dict[tuple[Any, Any], list[Span]] = {}
    region: tuple[float, float] | None = None
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        kind, name = event.get("cat"), str(event.get("name", ""))
        if kind == "user_annotation" and name == REGION:
            region = (float(event["ts"]), float(event["ts"] + event["dur"]))
        elif kind == "cpu_op" or (kind == "user_annotation" and name.startswith(MODULE)):
            _nest(threads.setdefault((event.get("pid"), event.get("tid")), []), event, name)
    kernels = list(_kernels(events, threads))
    ops = sorted((span for spans in threads.values() for span in spans), key=lambda span: span.start)
    if region:
        ops = [span for span in ops if region[0] <= span.start <= region[1]]
        kernels = [kernel for kernel in kernels if kernel.start >= region[0]]
    edges = [(span.start, span.end) for span in ops] + [(kernel.start, kernel.end) for kernel in kernels]
    if not edges:
        return Trace((), (), *(region or (0.0, 0.0)))
    start = region[0] if region else min(edge[0] for edge in edges)
    # The region ends after the device was waited for; a kernel that ends later was not waited for, and counts too.
    end = max(region[1] if region else 0.0, *(edge[1] for edge in edges))
    return Trace([span for span in ops if not span.is_module], kernels, start, end)


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """The time in which at least one was under way."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


def _nest(spans: list[Span], event: Mapping[str, Any], name: str) -> None:
    start, end = float(event["ts"]), float(event["ts"] + event["dur"])
    parent = spans[-1] if spans else None
    # A parent's end may be a rounding earlier than its child's.
    while parent is not None and start >= parent.end:
        parent = parent.parent
    arguments = event.get("args", {})
    inputs = {key: arguments[key] for key in ("Input Dims", "Input type", "Concrete Inputs") if key in arguments}
    span = Span(name, start, end, parent, inputs)
    if not span.is_module:
        above = parent
        while above is not None and above.is_module:
            above = above.parent
        if above is not None:
            above.below += end - start
    spans.append(span)


def _kernels(events: Sequence[Mapping[str, Any]], threads: Mapping[Any, list[Span]]) -> Iterator[KernelSpan]:
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    starts = {thread: [span.start for span in spans] for thread, spans in threads.items()}
    for event in sorted((e for e in events if str(e.get("cat")).lower() in _DEVICE), key=lambda e: float(e["ts"])):
        arguments = event.get("args", {})
        launch = launches.get(arguments.get("correlation"))
        place, graph = None, False
        if launch is not None:
            graph = "graphlaunch" in str(launch.get("name")).lower()
            thread = (launch.get("pid"), launch.get("tid"))
            place = _innermost(threads.get(thread, []), starts.get(thread, []), float(launch["ts"]))
        start = float(event["ts"])
        stream = f"{arguments.get('device', 0)}/{arguments.get('stream', 0)}"
        yield KernelSpan(str(event["name"]), start, start + float(event["dur"]), stream, place, graph)


def _innermost(spans: list[Span], starts: list[float], moment: float) -> Span | None:
    at = bisect_right(starts, moment) - 1
    span = spans[at] if at >= 0 else None
    while span is not None and span.end < moment:
        span = span.parent
    return span


def read_rocprof(path: Path) -> Trace:
    """Kernels only: rocprofv3 knows no modules and no torch ops. Its timestamps are nanoseconds."""
    text = text_of(path, partial(UnreadableTrace, path, hint=_ROCPROF_HINT), most=_MOST_CHARACTERS)
    try:
        found = _from_json(path, text) if text.lstrip().startswith("{") else _from_csv(path, text)
        kernels = sorted(found, key=lambda kernel: kernel.start)
    except csv.Error as error:
        raise UnreadableTrace(path, str(error), hint=_ROCPROF_HINT) from error
    if not kernels:
        raise UnreadableTrace(path, "no kernel ran while it was recorded", hint=_ROCPROF_HINT)
    return Trace((), kernels, kernels[0].start, max(kernel.end for kernel in kernels))


def _from_csv(path: Path, text: str) -> Iterator[KernelSpan]:
    rows = csv.DictReader(io.StringIO(text, newline=""))
    missing = [name for name in _ROCPROF_COLUMNS if name not in (rows.fieldnames or ())]
    if missing:
        raise UnreadableTrace(path, f"it has no column {', '.join(missing)}", hint=_ROCPROF_HINT)
    for row in rows:
        stream = f"{row.get('Agent_Id') or 0}/{row.get('Queue_Id') or 0}"
        yield _kernel(path, f"line {rows.line_num}", row["Kernel_Name"], row, stream, _ROCPROF_COLUMNS[1:])


def _from_json(path: Path, text: str) -> Iterator[KernelSpan]:
    """Names stand in `kernel_symbols` by id, and each dispatch in `buffer_records.kernel_dispatch`."""
    try:
        tools = parsed(text, most=_MOST_CHARACTERS)["rocprofiler-sdk-tool"]
        for tool in tools if isinstance(tools, list) else [tools]:
            names = {symbol["kernel_id"]: _symbol(symbol) for symbol in tool["kernel_symbols"]}
            for number, record in enumerate(tool["buffer_records"]["kernel_dispatch"]):
                dispatch = record["dispatch_info"]
                stream = f"{dispatch['agent_id']['handle']}/{dispatch.get('queue_id', {}).get('handle', 0)}"
                name = names.get(dispatch["kernel_id"], f"kernel {dispatch['kernel_id']}")
                yield _kernel(path, f"dispatch {number}", name, record, stream, ("start_timestamp", "end_timestamp"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableTrace(
            path, f"it is not rocprofv3's JSON ({type(error).__name__}: {error})", hint=_ROCPROF_HINT
        ) from error


def _symbol(symbol: Mapping[str, Any]) -> str:
    # Readable first; `kernel_name` is mangled, and ends in .kd.
    keys = ("formatted_kernel_name", "demangled_kernel_name", "truncated_kernel_name", "kernel_name")
    return next((str(symbol[key]) for key in keys if symbol.get(key)), f"kernel {symbol['kernel_id']}")


def _kernel(
    path: Path, where: str, name: str, row: Mapping[str, Any], stream: str, times: tuple[str, ...]
) -> KernelSpan:
    try:
        start, end = (int(row[key]) / 1e3 for key in times)
    except (TypeError, ValueError, OverflowError) as error:
        raise UnreadableTrace(path, f"{where} has no whole timestamps", hint=_ROCPROF_HINT) from error
    if end < start:
        raise UnreadableTrace(path, f"{where} ends before it starts", hint=_ROCPROF_HINT)
    return KernelSpan(name, start, end, stream)
