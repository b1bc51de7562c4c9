"""One worker process: holds one call, checks candidates against float64, and times them beside stock. See `process`.

Requests and answers are lines of JSON. Whatever a candidate raises is its answer; what it does to the process (a crash,
a hang) is seen by the process that asked.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.bench.measuring import Stopwatch, interleaved
from rocm_sd.errors import RocmSdError
from rocm_sd.search.calls import Call, make
from rocm_sd.search.candidates import operation
from rocm_sd.search.pipeline import Prepared
from rocm_sd.verify import numerics
from rocm_sd.verify.ladder import in_float64, outputs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["OK", "Bench", "main"]

OK = "ok"
_IMPLAUSIBLE = 0.1  # of the size of the exact result: no rounding of any dtype in use errs so much


class Unchecked(Exception):
    """No candidate can be checked at this call; its text is the reason."""


def _plausible(stock: torch.Tensor, exact: torch.Tensor) -> bool:
    if not exact.numel():
        return True
    error = (stock.double() - exact).square().mean().sqrt()
    return bool(error <= _IMPLAUSIBLE * exact.square().mean().sqrt())


class Bench:
    """One call with its arguments, its exact result and stock's. What a candidate returned last is checked again."""

    def __init__(self, call: Call, device: torch.device) -> None:
        self.op, self.device = operation(call.op), device
        self.arguments = make(call, device)
        self.stopwatch = Stopwatch(device, cold=device.type != "cpu", queued=True)
        self._exact: tuple[torch.Tensor, ...] | None = None
        self._yardstick: tuple[torch.Tensor, ...] = ()
        self._timed_stock: _Timed | None = None

    def call(self, implementation: str, values: Mapping[str, int]) -> Callable[[], Any]:
        found = self.op.implementation(implementation)
        config = found.config_from(values)
        arguments = found.prepare(self.arguments) if isinstance(found, Prepared) else self.arguments
        return lambda: found(*arguments, config=config)

    def prepare_check(self) -> None:
        """The exact result, and one in the call's dtype whose error is the yardstick: stock's, unless it is wrong."""
        if self._exact is not None:
            return
        assert self.op.verification is not None
        reference = self.op.verification.reference
        try:
            exact = outputs(reference(*in_float64(self.arguments)))
            stock = outputs(self.stock()())
            # Torch's own attention is known to be wrong on some cards, and must not excuse others.
            if not all(_plausible(*each) for each in zip(stock, exact, strict=True)):
                stock = outputs(reference(*self.arguments))
        except torch.OutOfMemoryError as error:
            raise Unchecked("there is too little memory for its exact result") from error
        self._yardstick, self._exact = stock, exact

    def check(self, result: Any, what: str) -> str:
        """OK, or the reason that the result is wrong."""
        self.prepare_check()
        assert self._exact is not None
        results = outputs(result)
        if len(results) != len(self._exact):
            return f"{what}: {len(results)} results instead of {len(self._exact)}"
        for ours, exact, stock in zip(results, self._exact, self._yardstick, strict=True):
            if ours.dtype != stock.dtype:
                return f"{what}: {ours.dtype} instead of {stock.dtype}"
            if ours.shape != exact.shape:
                return f"{what}: shape {tuple(ours.shape)} instead of {tuple(exact.shape)}"
            compared = numerics.compare(ours, exact, stock)
            if not compared.ok:
                return f"{what}: {compared}"
        return OK

    def stock(self) -> Callable[[], Any]:
        return self.call(self.op.implementations[0].name, {})

    def compile(self, implementation: str, config: Mapping[str, int]) -> dict[str, Any]:
        """Once, so that a compiler's cache has it when it is timed."""
        self.call(implementation, config)()
        self._synchronize()
        return {}

    def measure(self, implementation: str, config: Mapping[str, int], turns: int) -> dict[str, Any]:
        """Right first, then milliseconds in turns with stock, then right still: a race may show under load only."""
        call = self.call(implementation, config)
        self.prepare_check()
        self._poison()
        wrong = self.check(call(), "wrong")
        if wrong != OK:
            return {"numerics": wrong}
        stock = self._stock_timed()
        if implementation == self.op.implementations[0].name:
            interleaved({"ours": stock.call}, self.stopwatch, repeats=2)
            times = interleaved({"ours": stock.call}, self.stopwatch, repeats=turns)
            return {"numerics": OK, "ours": times["ours"], "stock": times["ours"]}
        ours = _Timed(call, self.device, captured=stock.captured)
        both = {"stock": stock.call, "ours": ours.call}
        interleaved(both, self.stopwatch, repeats=1)
        times = interleaved(both, self.stopwatch, repeats=turns)
        self._synchronize()
        still = self.check(ours.last(), "wrong after it was timed")
        return {"numerics": still, "ours": times["ours"], "stock": times["stock"]}

    def _poison(self) -> None:
        """What a candidate leaves unwritten must not be what stock left there: its memory is handed out again."""
        left = [torch.full_like(each, float("nan")) for each in self._yardstick for _ in range(2)]
        self._synchronize()
        left.clear()

    def _stock_timed(self) -> _Timed:
        if self._timed_stock is None:
            stock = self.stock()
            try:
                self._timed_stock = _Timed(stock, self.device, captured=self.device.type == "cuda")
            except RuntimeError:
                # Where graphs cannot be captured at all, every candidate is launched as it is.
                self._timed_stock = _Timed(stock, self.device, captured=False)
        return self._timed_stock

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class _Timed:
    """A call as it is timed: on a GPU a captured graph, since the engine replays graphs and launches do not count."""

    def __init__(self, call: Callable[[], Any], device: torch.device, *, captured: bool) -> None:
        self.captured = captured
        self._result: Any = None
        if not captured:
            self.call: Callable[[], Any] = self._keep(call)
            self.call()
            return
        call()
        stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(device), torch.cuda.stream(stream):
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), torch.cuda.graph(graph):
            self._result = call()
        self.call = graph.replay

    def _keep(self, call: Callable[[], Any]) -> Callable[[], Any]:
        def kept() -> None:
            self._result = call()

        return kept

    def last(self) -> Any:
        return self._result


def _die_with_parent() -> None:
    """A worker that hangs would outlive a tuner that was killed, and hold the card."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
    if prctl is not None:
        prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _is_broken(device: torch.device) -> bool:
    """After an access outside of its memory, a GPU gives every later call of the process the same error."""
    if device.type != "cuda":
        return False
    try:
        torch.zeros(8, device=device).sum().item()
    except RuntimeError:
        return True
    return False


class _Worker:
    def __init__(self) -> None:
        self._call: Call | None = None
        self._bench: Bench | None = None

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        for place in request.get("path", ()):
            if place not in sys.path:
                sys.path.append(place)
        try:
            bench = self._opened(Call.from_dict(request["call"]), torch.device(request["device"]))
            with torch.no_grad():
                if request["do"] == "compile":
                    return bench.compile(request["implementation"], request["config"])
                return bench.measure(request["implementation"], request["config"], request["turns"])
        except Unchecked as reason:
            return {"unchecked": str(reason)}
        except RocmSdError as error:
            return {"failed": error.message}
        except Exception as error:  # noqa: BLE001 -- whatever a candidate raises is the answer, and the worker lives on
            traceback.print_exc()
            text = str(error).strip().splitlines()
            failed = f"{type(error).__name__}: {text[0][:200] if text else ''}"
            return {"failed": failed, "broken": _is_broken(torch.device(request["device"]))}

    def _opened(self, call: Call, device: torch.device) -> Bench:
        if self._bench is None or call != self._call:
            self._bench = None  # its memory first
            if device.type == "cuda":
                torch.cuda.empty_cache()
            self._call, self._bench = call, Bench(call, device)
        return self._bench


def main() -> None:
    _die_with_parent()
    # Ctrl-C is for the tuner, which then ends this process; else it would look as if the candidate had crashed.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Compilers write to standard output from C++; answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker = _Worker()
    # All is imported: what a candidate is given time for is its own.
    answers.write('{"ready": true}\n')
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(worker.answer(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
