"""The fastest approximation of a pipeline within a budget, found on its own pictures.

Candidates are tried in the order of what a picture would take, reckoned from how long a shallow step takes here, or
measured where a transformer's first block decides which steps are shallow. One that is far outside after two prompts is
not drawn any further. The first that is within the budget is timed against the exact pipeline in turns, and taken if it
is faster beyond doubt.
"""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rocm_sd import measuring
from rocm_sd.engine import Approximation, Skipping, captured_models, optimize, report
from rocm_sd.engine.approximation import can_be_approximated, has_halves
from rocm_sd.integrations import diffusers as host
from rocm_sd.quality import similarity
from rocm_sd.quality.budget import Scores

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from PIL.Image import Image

    from rocm_sd.quality.budget import Budget
    from rocm_sd.quality.prompt_match import Interval

    Matched = Callable[[Sequence[Image], Sequence[Image]], Interval]

__all__ = ["Found", "Searcher", "approximated_model", "candidates"]

_DEPTHS = (1, 3)
_EVERY = (2, 3, 4, 6, 8)
# Of a transformer's first block: by how much it may have changed.
_FIRST_BLOCK = (0.05, 0.08, 0.12, 0.2, 0.3)
# Of the budget's PSNR: whoever is further away after two prompts is not drawn for all.
_FAR_DB = 6.0
_SCREENED = 2
_TURNS = measuring.LEAST_TURNS


def approximated_model(pipe: Any) -> Any | None:
    """The UNet or the transformer whose steps are approximated; None of a pipeline that has none of a known kind."""
    return next((model for model in captured_models(pipe) if can_be_approximated(model)), None)


def candidates(
    steps: int, shallow: Mapping[int, float], first_block: Mapping[float, float] | None = None, *, halves: bool = True
) -> list[tuple[float, Approximation]]:
    """With the share of an exact picture's time that each would take, the least first. `shallow`: the share of a whole
    call that a shallow one takes, by depth; `first_block`: that of a picture, by threshold. `halves`: whether guidance
    can be reused. Steps that compute guidance are whole ones: others cost quality.
    """
    found = [(cost, Approximation(Skipping(first_block=share))) for share, cost in (first_block or {}).items()]
    for depth, every, order, guided in itertools.product(
        shallow, _EVERY, (0, 1), (True, False) if halves else (False,)
    ):
        if every * 2 > steps:
            continue
        skipping = Skipping(depth, every, order=order, guided_every=every if guided else 1)
        found.append((_cost(skipping, steps, shallow[depth]), Approximation(skipping)))
    return sorted(found, key=lambda each: (each[0], each[1].skipping.order))


def _cost(skipping: Skipping, steps: int, shallow: float) -> float:
    taken = [skipping.step(number, 0, steps) for number in range(steps)]
    return sum((1 if step.whole else shallow) * (1 if step.guided else 0.5) for step in taken) / steps


@dataclass(frozen=True)
class Found:
    """`approximation`: None where nothing was within the budget and faster. `speedup`: over exact, and its interval."""

    approximation: Approximation | None
    scores: Scores | None
    speedup: tuple[float, float, float] | None
    tried: int


class Searcher:
    """Of one pipeline, whose exact pictures are drawn once. `on_step(what)` is called before each picture."""

    def __init__(
        self, pipe: Any, requests: Sequence[host.Request], match: Matched | None, on_step: Callable[[str], None]
    ) -> None:
        self._pipe, self._requests, self._match, self._on_step = pipe, requests, match, on_step
        self._scored: dict[Approximation, Scores | None] = {}
        optimize(pipe)
        self._draw(requests[:1], "warming up")
        self.exact = self._draw(requests, "exact")
        seconds = self._exact_seconds()
        self._shallow = self._measured_shallow(seconds)
        self._first_block = self._measured_first_block(seconds)
        self.pictures: dict[Approximation, list[Image]] = {}

    def _draw(self, requests: Sequence[host.Request], what: str) -> list[Image]:
        images = []
        for request in requests:
            self._on_step(f"{what}: {request.prompt}")
            images += host.generate(self._pipe, request).images
        return images

    def _seconds(self, request: host.Request) -> float:
        began = time.perf_counter()
        host.generate(self._pipe, request)
        return time.perf_counter() - began

    def _exact_seconds(self) -> float:
        self._on_step("timing")
        return self._seconds(self._requests[0])

    def _measured_shallow(self, exact: float) -> dict[int, float]:
        """By depth: of a picture with one whole step and else shallow ones, what it takes beside an exact one."""
        steps, shares = self._requests[0].steps, {}
        for depth in _DEPTHS:
            seconds = self._approximated_seconds(Skipping(depth, steps), f"depth {depth}")
            share = 1 if seconds is None else (seconds / exact * steps - 1) / max(steps - 1, 1)
            if share < 1:
                shares[depth] = max(share, 0.01)
        return shares

    def _measured_first_block(self, exact: float) -> dict[float, float]:
        """By threshold: what a picture takes beside an exact one, where the model is a transformer."""
        if getattr(self._pipe, "unet", None) is not None:
            return {}
        taken = {
            share: self._approximated_seconds(Skipping(first_block=share), f"first block {share:g}")
            for share in _FIRST_BLOCK
        }
        return {share: seconds / exact for share, seconds in taken.items() if seconds is not None and seconds < exact}

    def _approximated_seconds(self, skipping: Skipping, what: str) -> float | None:
        """Of a picture, after two that are thrown away; None where it has no shallow step."""
        request = self._requests[0]
        optimize(self._pipe, quality=skipping)
        self._draw([request, request], f"warming up, {what}")
        self._on_step(f"timing, {what}")
        seconds = self._seconds(request)
        return seconds if any(" shallow" in note for note in report(self._pipe).approximations) else None

    def search(self, budget: Budget) -> Found:
        tried = 0
        steps, halves = self._requests[0].steps, has_halves(self._pipe)
        for _, candidate in candidates(steps, self._shallow, self._first_block, halves=halves):
            tried += 1
            scores = self._scores(candidate, budget)
            if scores is None or not budget.holds(scores):
                continue
            speedup = self._speedup(candidate)
            if speedup[1] > 1:
                return Found(candidate, scores, speedup, tried)
        return Found(None, None, None, tried)

    def _scores(self, candidate: Approximation, budget: Budget) -> Scores | None:
        """None where the first prompts are far outside."""
        if candidate in self._scored:
            return self._scored[candidate]
        optimize(self._pipe, quality=candidate)
        images = self._draw(self._requests[:_SCREENED], str(candidate))
        near = self._nearness(images)
        if near.median_psnr < budget.psnr - _FAR_DB:
            return None
        images += self._draw(self._requests[_SCREENED:], str(candidate))
        self.pictures[candidate] = images
        near = self._nearness(images)
        match = None if self._match is None else self._match(images, self.exact)
        scores = self._scored[candidate] = Scores(near.psnr, near.ssim, match)
        return scores

    def _nearness(self, images: Sequence[Image]) -> Scores:
        found = similarity.similarity(*(similarity.as_tensor(each) for each in (self.exact[: len(images)], images)))
        return Scores(found.psnr, found.ssim)

    def _speedup(self, candidate: Approximation) -> tuple[float, float, float]:
        """Over the exact pipeline: pictures in turns, each after one that is thrown away."""
        exact: list[float] = []
        ours: list[float] = []
        request = self._requests[0]
        for _ in range(_TURNS):
            for quality, times in (("exact", exact), (candidate, ours)):
                optimize(self._pipe, quality=quality)
                self._draw([request, request], "timing")
                times.append(self._seconds(request))
        return statistics.median(exact) / statistics.median(ours), *measuring.interval(ours, exact)
