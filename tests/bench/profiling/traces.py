"""Chrome traces and rocprofv3 files of a GPU, written by hand in the shape that the profilers give them."""

from __future__ import annotations

from itertools import count
from typing import Any

from rocm_sd.bench.profiling.trace import MODULE, REGION

__all__ = ["GpuTrace"]


class GpuTrace:
    """Host ranges with `host`, kernels with `kernel`, which also writes the launch that caused it."""

    def __init__(self, region: tuple[float, float] | None = (0, 1000)) -> None:
        self.events: list[dict[str, Any]] = []
        self._numbers = count(1)
        if region:
            self.host(REGION, *region, cat="user_annotation")

    def host(self, name: str, start: float, end: float, cat: str = "cpu_op", **args: Any) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": start, "dur": end - start}
        self.events.append({**event, "args": args})

    def module(self, name: str, start: float, end: float, kind: str = "Module") -> None:
        self.host(f"{MODULE}{name} ({kind})", start, end, cat="user_annotation")

    def conv(self, start: float, end: float, x: list[int], w: list[int], kind: str = "c10::Half") -> None:
        types = [kind, kind, "", "ScalarList", "ScalarList", "ScalarList", "Scalar"]
        values = ["", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "1"]
        shapes = {"Input Dims": [x, w, [], [], [], [], []], "Input type": types, "Concrete Inputs": values}
        self.host("aten::conv2d", start, end, **shapes)

    def kernel(
        self,
        name: str,
        launched: float,
        start: float,
        end: float,
        launch: str = "hipLaunchKernel",
        cat: str = "kernel",
        stream: int = 7,
    ) -> None:
        number = next(self._numbers)
        self.host(launch, launched, launched + 1, cat="cuda_runtime", correlation=number)
        event = {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "ts": start, "dur": end - start}
        self.events.append({**event, "args": {"correlation": number, "stream": stream, "device": 0}})

    @property
    def values(self) -> dict[str, Any]:
        return {"traceEvents": self.events}
