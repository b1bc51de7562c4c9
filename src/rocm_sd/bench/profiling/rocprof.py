"""What rocprofv3 recorded, as a `Trace`: `rocprofv3 --kernel-trace --output-format csv|json -- python script.py`."""

from __future__ import annotations

import csv
import io
import json
from typing import TYPE_CHECKING, Any

from rocm_sd.bench.profiling.trace import Kernel, Trace, UnreadableTrace

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

__all__ = ["read_rocprof"]

_HINT = "Record one with: rocprofv3 --kernel-trace --output-format csv -- python SCRIPT"
_NEEDED = ("Kernel_Name", "Start_Timestamp", "End_Timestamp")


def read_rocprof(path: Path) -> Trace:
    """Kernels only: rocprofv3 knows no modules and no torch ops. Its timestamps are nanoseconds."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UnreadableTrace(path, "there is no such file", hint=_HINT) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableTrace(path, str(error), hint=_HINT) from error
    kernels = sorted(
        _from_json(path, text) if text.lstrip().startswith("{") else _from_csv(path, text), key=lambda k: k.start
    )
    if not kernels:
        raise UnreadableTrace(path, "no kernel ran while it was recorded", hint=_HINT)
    return Trace((), kernels, kernels[0].start, max(kernel.end for kernel in kernels))


def _from_csv(path: Path, text: str) -> Iterator[Kernel]:
    rows = csv.DictReader(io.StringIO(text, newline=""))
    missing = [name for name in _NEEDED if name not in (rows.fieldnames or ())]
    if missing:
        raise UnreadableTrace(path, f"it has no column {', '.join(missing)}", hint=_HINT)
    for row in rows:
        stream = f"{row.get('Agent_Id') or 0}/{row.get('Queue_Id') or 0}"
        yield _kernel(path, f"line {rows.line_num}", row["Kernel_Name"], row, stream, _NEEDED[1:])


def _from_json(path: Path, text: str) -> Iterator[Kernel]:
    """Names stand in `kernel_symbols` by id, and each dispatch in `buffer_records.kernel_dispatch`."""
    try:
        tools = json.loads(text)["rocprofiler-sdk-tool"]
        for tool in tools if isinstance(tools, list) else [tools]:
            names = {symbol["kernel_id"]: _symbol(symbol) for symbol in tool["kernel_symbols"]}
            for number, record in enumerate(tool["buffer_records"]["kernel_dispatch"]):
                told = record["dispatch_info"]
                stream = f"{told['agent_id']['handle']}/{told.get('queue_id', {}).get('handle', 0)}"
                name = names.get(told["kernel_id"], f"kernel {told['kernel_id']}")
                yield _kernel(path, f"dispatch {number}", name, record, stream, ("start_timestamp", "end_timestamp"))
    except (ValueError, KeyError, TypeError) as error:
        raise UnreadableTrace(
            path, f"it is not rocprofv3's JSON ({type(error).__name__}: {error})", hint=_HINT
        ) from error


def _symbol(symbol: Mapping[str, Any]) -> str:
    # Readable first; `kernel_name` is mangled, and ends in .kd.
    keys = ("formatted_kernel_name", "demangled_kernel_name", "truncated_kernel_name", "kernel_name")
    return next((str(symbol[key]) for key in keys if symbol.get(key)), f"kernel {symbol['kernel_id']}")


def _kernel(path: Path, where: str, name: str, row: Mapping[str, Any], stream: str, times: tuple[str, ...]) -> Kernel:
    try:
        start, end = (int(row[key]) / 1e3 for key in times)
    except (TypeError, ValueError) as error:
        raise UnreadableTrace(path, f"{where} has no whole timestamps", hint=_HINT) from error
    if end < start:
        raise UnreadableTrace(path, f"{where} ends before it starts", hint=_HINT)
    return Kernel(name, start, end, stream)
