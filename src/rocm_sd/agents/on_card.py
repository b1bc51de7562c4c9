"""Rung 5 in a walled-in process that may use the GPU: what a proposal computes there, and its time.

Small calls come first, against float64 on the CPU: a card whose libraries are broken would be its own judge. Then each
call that is timed is compared, too: in memory full of NaN, and once more as it was timed. The times are those of whole
turns, in which the proposal, the shipped kernel and stock torch follow one another as graphs, with the caches cold.
"""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd import arch as archs
from rocm_sd.agents.trying import Tried, attempt, poisoned, worded
from rocm_sd.errors import RocmSdError
from rocm_sd.measuring import interleaved
from rocm_sd.numerics import compare, in_float64, outputs
from rocm_sd.tuning.search.calls import argument_names, describe
from rocm_sd.tuning.search.candidates import Candidate
from rocm_sd.tuning.search.halving import strategy
from rocm_sd.tuning.search.workbench import OK, Timed, Workbench

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_sd.agents.trying import Found, Job
    from rocm_sd.kernels.config import Config
    from rocm_sd.ops.samples import Sample
    from rocm_sd.verify.ladder import RungResult

    Call = Callable[[], Any]

__all__ = ["climb", "ready", "search"]

_WARM_UP = 2
_LONGEST = 300


class _Wrong(RocmSdError):
    """What a call computes is not right; its text is the reason."""


def ready(job: Job) -> Found:
    """What a card is, once it has done something."""
    device = torch.device(job["device"])
    torch.zeros(8, device=device).sum().item()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"arch": archs.detect(device).name, "name": name}


def climb(job: Job) -> Found:
    """The rung with what it found, and milliseconds by call: of ours, of the shipped kernel, of stock torch."""
    tried, device = Tried(job), torch.device(job["device"])
    times: list[Found] = []

    def right_and_timed() -> RungResult:
        with torch.no_grad():
            result = _small_calls(tried, job["card"], device)
            if result[0] == "passed":
                for sample in tried.modelled:
                    beside = _Beside(tried, sample, job["card"], device)
                    ours = beside.right(tried.config_at(job["card"], sample))
                    times.append({"call": sample.name, **beside.times(ours, job["turns"])})
        return result

    rung = attempt(5, job["card"], right_and_timed)
    return {"rungs": [rung], "times": times if rung["state"] == "passed" else []}


def search(job: Job) -> Found:
    """Configs of the op's own kernel, timed beside the shipped one in the order that a strategy of the tuner has."""
    tried, device = Tried({**job, "config": {}}), torch.device(job["device"])
    name = tried.implementation.name
    candidates = [Candidate(name, tried.implementation.config_from(config)) for config in job["configs"]]
    with torch.no_grad():
        measure = _Measure(_Beside(tried, tried.modelled[0], job["card"], device), job["seconds"])
        strategy(job["strategy"]).search(candidates, measure)
    found = [{"config": each.config.to_dict(), "share": share} for each, share in measure.shares.items()]
    return {"found": found, "faults": measure.faults}


def _small_calls(tried: Tried, arch: str, device: torch.device) -> RungResult:
    verification, own = tried.verification, tried.op.implementation
    worst, sentence, count = -1.0, "", 0
    figures: dict[str, Any] = {}
    for name, sample in verification.calls(arch=archs.get(arch)):
        arguments = sample.make(device)
        problem = verification.problem(*arguments)
        if own(name).why_not(problem, device) is not None:
            continue
        on_cpu = tuple(each.cpu() if isinstance(each, torch.Tensor) else each for each in arguments)
        exact = outputs(verification.reference(*in_float64(on_cpu)))
        stock = outputs(tried.op.implementations[0](*on_cpu))
        config = tried.config if name == tried.implementation.name else None
        config = config or tried.op.config_of(name, tried.op.lookup(arch, problem))
        with tried.launched(), poisoned():
            ours = [each.cpu() for each in outputs(own(name)(*arguments, config=config))]
        count += 1
        for three in zip(ours, exact, stock, strict=True):
            found = compare(*three)
            # A NaN error compares as nothing does, so a failed sample counts as the worst by itself.
            bad = found.largest / (found.allowed_largest or 1.0) if found.ok else float("inf")
            if bad > worst:
                worst, sentence = bad, f"{sample.name}: {found}"
                figures = {"largest_error": found.largest, "allowed": found.allowed_largest}
    if not count:
        return "failed", "no small call of it can be made on this card, so nothing could be compared", {}
    return ("failed" if worst == float("inf") else "passed"), sentence, {**figures, "samples": count}


class _Beside:
    """One call on the card, with the shipped kernel and stock torch ready to be timed."""

    def __init__(self, tried: Tried, sample: Sample, arch: str, device: torch.device) -> None:
        assert tried.op.verification is not None
        self._tried, self._device = tried, device
        self._run = tried.implementation
        arguments = sample.make(device)
        problem = tried.op.verification.problem(*arguments)
        why_not = self._run.why_not(problem, device)
        if why_not is not None:
            raise RocmSdError(f"{sample.name} is no call for {self._run.name} on this card: {why_not}.")
        stock = tried.op.implementations[0]
        self.bench = Workbench(describe(tried.op.name, problem, arguments, argument_names(stock.run)), device)
        # The op's own sample has values that mean something to it, where a call from a trace has random ones.
        self.bench.arguments = arguments
        self.bench.prepare_check()
        self._stock = self.bench.stock_timed()
        shipped = tried.op.config_of(self._run.name, tried.op.lookup(arch, problem))
        self._shipped = Timed(partial(self._run, *arguments, config=shipped), device, captured=self._stock.captured)

    def right(self, config: Config) -> Timed:
        """Ready to be timed, where it is right; raises _Wrong."""

        def call() -> Any:
            with self._tried.launched():
                return self._run(*self.bench.arguments, config=config)

        with poisoned():
            self._require(call(), "wrong")
        return Timed(call, self._device, captured=self._stock.captured)

    def times(self, ours: Timed, turns: int) -> dict[str, list[float]]:
        """Raises _Wrong where it is not right any more: a race may show under load only."""
        calls = {"stock": self._stock.call, "shipped": self._shipped.call, "ours": ours.call}
        interleaved(calls, self.bench.stopwatch, repeats=_WARM_UP)
        found = interleaved(calls, self.bench.stopwatch, repeats=turns)
        self._require(ours.last(), "wrong after it was timed")
        self._poison(ours.last())
        ours.call()
        self._require(ours.last(), "wrong when it was made once more")
        return found

    def _require(self, result: Any, what: str) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        found = self.bench.check(result, what)
        if found != OK:
            raise _Wrong(found)

    def _poison(self, result: Any) -> None:
        """A graph writes where it wrote before: what it leaves out would be right from the turn before."""
        given = {each.untyped_storage().data_ptr() for each in self.bench.arguments if isinstance(each, torch.Tensor)}
        for each in outputs(result):
            if each.untyped_storage().data_ptr() not in given:
                each.fill_(float("nan") if each.is_floating_point() else 77)


class _Measure:
    """What a strategy asks: the share of the shipped kernel's time that a config needs, or None where it is wrong."""

    def __init__(self, beside: _Beside, seconds: float) -> None:
        self._beside, self._seconds, self._begun = beside, seconds, time.monotonic()
        self._ready: dict[Candidate, Timed] = {}
        self.shares: dict[Candidate, float] = {}
        self.faults: list[str] = []

    def __call__(self, candidate: Candidate, turns: int) -> float | None:
        if self.left() <= 0:
            return None
        try:
            if candidate not in self._ready:
                self._ready[candidate] = self._beside.right(candidate.config)
            times = self._beside.times(self._ready[candidate], turns)
        except Exception as error:  # noqa: BLE001 -- a config that cannot be launched is out, and the others are not
            self.faults.append(f"{candidate.config}: {worded(error)}"[:_LONGEST])
            self.shares.pop(candidate, None)
            return None
        self.shares[candidate] = median(
            our / shipped for our, shipped in zip(times["ours"], times["shipped"], strict=True)
        )
        return self.shares[candidate]

    def left(self) -> float:
        return 1.0 - (time.monotonic() - self._begun) / self._seconds
