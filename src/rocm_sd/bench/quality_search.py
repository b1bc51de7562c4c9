"""The fastest approximation of a pipeline within a budget, found on its own pictures.

Candidates are tried in the order of what a picture would take, reckoned from how long a shallow step takes here. One
that is far outside after two prompts is not drawn any further. The first that is within the budget is timed against the
exact pipeline in turns, and taken if it is faster beyond doubt.
"""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rocm_sd import measuring
from rocm_sd.engine import Approximation, Skipping, optimize
from rocm_sd.integrations import diffusers as host
from rocm_sd.quality import similarity
from rocm_sd.quality.budget import Scores

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from PIL.Image import Image

    from rocm_sd.quality.budget import Budget
    from rocm_sd.quality.prompt_match import Interval

    Matched = Callable[[Sequence[Image], Sequence[Image]], Interval]

__all__ = ["Found", "Searcher", "candidates"]

_DEPTHS = (1, 3)
_EVERY = (2, 3, 4, 6, 8)
# Of the budget's PSNR: whoever is further away after two prompts is not drawn for all.
_FAR_DB = 6.0
_SCREENED = 2
_TURNS = measuring.LEAST_TURNS


def candidates(steps: int, shallow: Mapping[int, float]) -> list[tuple[float, Approximation]]:
    """With the share of an exact picture's time that each would take, the least first. `shallow`: the share of a whole
    call that a shallow one takes, by depth. Steps that compute guidance are whole ones: others cost quality.
    """
    found = []
    for depth, every, order, guided in itertools.product(shallow, _EVERY, (0, 1), (True, False)):
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
        self._shallow = self._measured_shallow()
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

    def _measured_shallow(self) -> dict[int, float]:
        """By depth: of a picture with one whole step and else shallow ones, what it takes beside an exact one."""
        steps, request = self._requests[0].steps, self._requests[0]
        self._on_step("timing")
        exact = self._seconds(request)
        shares = {}
        for depth in _DEPTHS:
            optimize(self._pipe, quality=Skipping(depth, steps))
            self._draw([request], f"warming up, depth {depth}")
            self._on_step(f"timing, depth {depth}")
            share = (self._seconds(request) / exact * steps - 1) / max(steps - 1, 1)
            if share < 1:
                shares[depth] = max(share, 0.01)
        return shares

    def search(self, budget: Budget) -> Found:
        tried = 0
        for _, candidate in candidates(self._requests[0].steps, self._shallow):
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
