"""What the worker processes of a search run: one call, candidates checked against float64 and timed beside stock.

Whatever a candidate raises is its answer; what it does to the process (a crash, a hang) is seen by the one that asked.
"""

from __future__ import annotations

import math
import traceback
from contextlib import suppress
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd import numerics
from rocm_sd.errors import RocmSdError
from rocm_sd.measuring import Stopwatch, as_graph, interleaved, interval
from rocm_sd.numerics import in_float64, outputs
from rocm_sd.ops.registry import forget_choices
from rocm_sd.tuning.search.calls import OpCall, make
from rocm_sd.tuning.search.candidates import Candidate, operation
from rocm_sd.tuning.search.pipeline_settings import PreparedImplementation
from rocm_sd.workers import OutOfTime, WorkerFailed, WorkerLost

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rocm_sd.workers import Worker

__all__ = [
    "HUNG", "OK", "Answer", "Timed", "Workbench", "ask", "measure_candidate", "open_call", "times_of", "variants_of",
]  # fmt: skip

Answer = dict[str, Any]  # of a worker process, about one candidate
OK = "ok"
HUNG = "hung"  # how the reason of one that did not answer in time begins
_IMPLAUSIBLE = 0.1  # of the size of the exact result: no rounding of any dtype in use errs so much


class Unchecked(Exception):
    """No candidate can be checked at this call; its text is the reason."""


def _plausible(stock: torch.Tensor, exact: torch.Tensor) -> bool:
    if not exact.numel():
        return True
    error = (stock.double() - exact).square().mean().sqrt()
    return bool(error <= _IMPLAUSIBLE * exact.square().mean().sqrt())


class Workbench:
    """One call with its arguments, its exact result and stock's. What a candidate returned last is checked again."""

    def __init__(self, call: OpCall, device: torch.device) -> None:
        self.op, self.device = operation(call.op), device
        if self.op.composed or any(each.composed for each in self.op.implementations):
            forget_choices()
        self.arguments = make(call, device)
        self.stopwatch = Stopwatch(device, cold=device.type != "cpu", queued=True)
        self._exact: tuple[torch.Tensor, ...] | None = None
        self._yardstick: tuple[torch.Tensor, ...] = ()
        self._timed_stock: Timed | None = None

    def call(self, candidate: Candidate) -> Callable[[], Any]:
        found = self.op.implementation(candidate.implementation)
        arguments = found.prepare(self.arguments) if isinstance(found, PreparedImplementation) else self.arguments
        return lambda: found(*arguments, config=candidate.config)

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
        return self.call(Candidate(self.op.implementations[0].name))

    def measure(self, candidate: Candidate, turns: int) -> Answer:
        """Right first, then milliseconds in turns with stock, then right still: a race may show under load only."""
        call = self.call(candidate)
        self.prepare_check()
        self.poison()
        wrong = self.check(call(), "wrong")
        if wrong != OK:
            return {"numerics": wrong}
        stock = self.stock_timed()
        if candidate.is_stock:
            interleaved({"ours": stock.call}, self.stopwatch, repeats=2)
            times = interleaved({"ours": stock.call}, self.stopwatch, repeats=turns)
            return {"numerics": OK, "ours": times["ours"], "stock": times["ours"]}
        ours = Timed(call, self.device, captured=stock.captured)
        both = {"stock": stock.call, "ours": ours.call}
        interleaved(both, self.stopwatch, repeats=1)
        times = interleaved(both, self.stopwatch, repeats=turns)
        self._synchronize()
        still = self.check(ours.last(), "wrong after it was timed")
        return {"numerics": still, "ours": times["ours"], "stock": times["stock"]}

    def poison(self) -> None:
        """What a candidate leaves unwritten must not be what stock left there: its memory is handed out again."""
        left = [torch.full_like(each, float("nan")) for each in self._yardstick for _ in range(2)]
        self._synchronize()
        left.clear()

    def stock_timed(self) -> Timed:
        if self._timed_stock is None:
            stock = self.stock()
            try:
                self._timed_stock = Timed(stock, self.device, captured=self.device.type == "cuda")
            except RuntimeError:
                # Where graphs cannot be captured at all, every candidate is launched as it is.
                self._timed_stock = Timed(stock, self.device, captured=False)
        return self._timed_stock

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Timed:
    """A call as it is timed: on a GPU `as_graph`."""

    def __init__(self, call: Callable[[], Any], device: torch.device, *, captured: bool) -> None:
        self.captured = captured
        self._result: Any = None
        if not captured:
            self.call: Callable[[], Any] = self._keep(call)
            self.call()
            return
        self.call, self._result = as_graph(call, device)

    def _keep(self, call: Callable[[], Any]) -> Callable[[], Any]:
        def kept() -> None:
            self._result = call()

        return kept

    def last(self) -> Any:
        return self._result


def _is_broken(device: torch.device) -> bool:
    """After an access outside of its memory, a GPU gives every later call of the process the same error."""
    if device.type != "cuda":
        return False
    try:
        torch.zeros(8, device=device).sum().item()
    except RuntimeError:
        return True
    return False


_kept: list[tuple[OpCall, Workbench]] = []  # of this process, at most one


def _opened(call: OpCall, device: torch.device) -> Workbench:
    if not _kept or _kept[0][0] != call:
        _kept.clear()  # its memory first
        if device.type == "cuda":
            torch.cuda.empty_cache()
        _kept.append((call, Workbench(call, device)))
    return _kept[0][1]


def open_call(call: OpCall, device: torch.device) -> Answer:
    """Its arguments, its exact result, and stock's, which is timed once: a library searches at its first calls."""

    def prepare(bench: Workbench) -> Answer:
        bench.prepare_check()
        bench.stock_timed()
        return {"opened": True}

    return _answer(call, device, prepare)


def times_of(answer: Mapping[str, Any]) -> tuple[float, float, float, float | None]:
    """Median, its interval, and stock's median, in microseconds.

    The interval is that of the ratio to stock, turn by turn, at stock's median: what slows both is not in it, so it is
    below stock's time exactly where the candidate is faster beyond doubt.
    """
    if answer.get("numerics") != OK:
        return math.inf, math.inf, math.inf, None
    ours, stock = ([1e3 * ms for ms in answer[who]] for who in ("ours", "stock"))
    if ours == stock:
        return median(ours), min(ours), max(ours), median(ours)
    least, most = interval(ours, stock)
    middle = median(stock)
    return median(ours), middle / most, middle / least, middle


def variants_of(
    groups: Sequence[tuple[OpCall, Sequence[Candidate]]], device: torch.device
) -> list[tuple[int, int, list[dict[str, Any]]]]:
    """(group, place, variants that are to be compiled) of each candidate that can be launched.

    Nothing that this process has not loaded before runs, and the tensors of one group are there at a time: the user's
    own process may ask.
    """
    from rocm_sd.kernels.triton import precompile  # noqa: PLC0415 -- needs Triton

    found = []
    with torch.no_grad(), precompile.noting() as questions:
        for number, (call, candidates) in enumerate(groups):
            op = operation(call.op)
            with suppress(Exception):  # there may be no memory for it
                arguments = _empty(make(call, torch.device("meta")), device)
                for place, candidate in enumerate(candidates):
                    questions.clear()
                    with suppress(Exception):
                        op.implementation(candidate.implementation)(*arguments, config=candidate.config)
                        found.append((number, place, list(questions)))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _empty(arguments: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
    """What decides how a kernel is compiled are strides and where a tensor begins. Integers are 0: what this process
    has loaded before does run, and they are indices.
    """

    def like(argument: Any) -> Any:
        if not isinstance(argument, torch.Tensor):
            return argument
        made = torch.empty_strided(argument.shape, argument.stride(), dtype=argument.dtype, device=device)
        return made if argument.is_floating_point() else made.zero_()

    return tuple(map(like, arguments))


def measure_candidate(call: OpCall, device: torch.device, candidate: Candidate, turns: int) -> Answer:
    return _answer(call, device, lambda bench: bench.measure(candidate, turns))


def _answer(call: OpCall, device: torch.device, use: Callable[[Workbench], Answer]) -> Answer:
    try:
        with torch.no_grad():
            return use(_opened(call, device))
    except Unchecked as reason:
        return {"unchecked": str(reason)}
    except RocmSdError as error:
        return {"failed": error.message}
    except Exception as error:  # noqa: BLE001 -- whatever a candidate raises is the answer, and the process lives on
        traceback.print_exc()
        text = str(error).strip().splitlines()
        failed = f"{type(error).__name__}: {text[0][:200] if text else ''}"
        return {"failed": failed, "broken": _is_broken(device)}


def ask(worker: Worker, function: Callable[..., Answer], *arguments: Any, timeout: float, within: float) -> Answer:
    """What one of the two functions above answers in a worker process: {"failed": reason} also where it was lost.

    `timeout` seconds are the candidate's; `within`, all that there are: where they were over, the answer is empty.
    """
    try:
        answer = worker.call(function, *arguments, timeout=timeout, within=within)
    except OutOfTime:
        return {}
    except WorkerLost as lost:
        return {"failed": lost.message}
    except WorkerFailed as failed:
        return {"unchecked": f"a worker could not be started: {failed.message}"}
    if answer.get("broken"):
        worker.stop()
    return answer
