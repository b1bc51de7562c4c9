"""The fastest approximation of a pipeline within a budget, found on its own pictures.

Candidates leave out steps, or compute more coarsely (quality_methods.py), or both. They are tried in the order of what
a picture would take, reckoned from how long a shallow step and each method takes here, or measured where a
transformer's first block decides which steps are shallow. One that is far outside after two prompts is not drawn any
further, and one with such a part is not drawn at all. The first that is within the budget is timed against the exact
pipeline in turns, and taken if it is faster beyond doubt.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rocm_sd import arch, measuring
from rocm_sd.bench.quality_methods import TIMED, combinations, is_part, parts, timed_alone, why_not_at_work
from rocm_sd.engine import Approximation, Skipping, captured_models, optimize, report
from rocm_sd.engine.approximation import can_be_approximated, evenly_changed, feature_changes, has_halves
from rocm_sd.integrations import diffusers as host
from rocm_sd.quality import similarity
from rocm_sd.quality.budget import Scores

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from PIL.Image import Image

    from rocm_sd.bench.quality_methods import Method
    from rocm_sd.quality.budget import Budget
    from rocm_sd.quality.prompt_match import Interval

    Matched = Callable[[Sequence[Image], Sequence[Image]], Interval]

__all__ = ["SHOWN", "Found", "Searcher", "approximated_model", "candidates"]

_DEPTHS = (1, 3)
_EVERY = (2, 3, 4, 6, 8)
# The share of the steps after which guidance may be left out.
_GUIDANCE_END = (0.6, 0.8)
# Of a transformer's first block: by how much it may have changed.
_FIRST_BLOCK = (0.05, 0.08, 0.12, 0.2, 0.3)
# Of the budget's PSNR: whoever is further away after two prompts is not drawn for all.
_FAR_DB = 6.0
_SCREENED = 2
_TURNS = measuring.LEAST_TURNS
# After so many that are within the budget and not faster, the search is over: those that follow are reckoned to take
# longer still.
_MOST_NOT_FASTER = 4
# So many pictures of a setting are kept to be looked at.
SHOWN = 8


def approximated_model(pipe: Any) -> Any | None:
    """The UNet or the transformer whose steps are approximated; None of a pipeline that has none of a known kind."""
    return next((model for model in captured_models(pipe) if can_be_approximated(model)), None)


def candidates(
    steps: int,
    shallow: Mapping[int, float],
    first_block: Mapping[float, float] | None = None,
    *,
    halves: bool = True,
    methods: Mapping[Approximation, float] | None = None,
    schedules: Mapping[tuple[int, int], tuple[float, ...]] | None = None,
) -> list[tuple[float, Approximation]]:
    """With the share of an exact picture's time that each would take, the least first. `shallow`: the share of a whole
    call that a shallow one takes, by depth; `first_block`: that of a picture, by threshold; `methods`: that of a
    picture, by what else than steps is left out. `schedules`: by depth and one of how many steps is whole, where these
    are best. `halves`: whether guidance can be reused, or end early. Steps that compute it for others are whole ones:
    shallow ones cost quality.
    """
    steps_of = [(cost, Skipping(first_block=share)) for share, cost in (first_block or {}).items()]
    # Of few steps none may lie behind the end.
    ends = [end for end in _GUIDANCE_END if halves and end * steps <= steps - 1]
    guidance = [*([(True, 1.0)] if halves else []), (False, 1.0), *((False, end) for end in ends)]
    for depth, every, order, (reused, end) in itertools.product(shallow, _EVERY, (0, 1), guidance):
        if every * 2 > steps:
            continue
        skipping = Skipping(depth, every, order=order, guided_every=every if reused else 1, guidance_end=end)
        steps_of.append((_cost(skipping, steps, shallow[depth]), skipping))
        whole = (schedules or {}).get((depth, every))
        if whole:
            skipping = Skipping(depth, order=order, guided_every=2 if reused else 1, guidance_end=end, whole=whole)
            steps_of.append((_cost(skipping, steps, shallow[depth]), skipping))
    ended = [Skipping(guidance_end=end) for end in ends]
    steps_of += [(_cost(skipping, steps, 1.0), skipping) for skipping in ended]
    found = [
        (with_it(cost), replace(together, skipping=skipping))
        for with_it, together in combinations(methods or {})
        for cost, skipping in (*steps_of, (1.0, Skipping()))
    ]
    left_out = [(cost, one) for cost, one in found if not one.is_exact]
    return sorted(left_out, key=lambda each: (each[0], each[1].skipping.order))


def _cost(skipping: Skipping, steps: int, shallow: float) -> float:
    taken = [skipping.step(number, 0, steps) for number in range(steps)]
    return sum((1 if step.whole else shallow) * (1 if step.guided else 0.5) for step in taken) / steps


@dataclass(frozen=True)
class Found:
    """`approximation`: None where nothing was within the budget and faster. `speedup`: over exact, and its interval.
    `tried`: how many settings were drawn; `ruled_out`: how many were not, because a part of them is outside.
    """

    approximation: Approximation | None
    scores: Scores | None
    speedup: tuple[float, float, float] | None
    tried: int
    ruled_out: int = 0


class Searcher:
    """Of one pipeline, whose exact pictures are drawn once. `on_step(what)` is called before each picture. `methods`:
    what each took by itself, or why it takes no part; `schedules`: by depth and one of how many steps is whole,
    where these are best, and `notes` why not there; `pictures`: the first ones of each setting that drew all prompts.
    """

    def __init__(
        self, pipe: Any, requests: Sequence[host.Request], match: Matched | None, on_step: Callable[[str], None]
    ) -> None:
        self._pipe, self._requests, self._match, self._on_step = pipe, requests, match, on_step
        self._near: dict[Approximation, Scores] = {}
        self._scored: dict[Approximation, Scores] = {}
        # Of the setting that the pipeline has now.
        self._drawn: tuple[Approximation, list[Image]] | None = None
        # Before a level may move it.
        model = approximated_model(pipe)
        facts = arch.detect("cpu" if model is None else next(model.parameters()).device)
        optimize(pipe)
        self._draw(requests[:1], "warming up")
        self.exact = self._draw(requests, "exact")
        seconds = self._exact_seconds()
        self._shallow = self._measured_shallow(seconds)
        self._first_block = self._measured_first_block(seconds)
        self.notes: list[str] = []
        self.schedules = {} if model is None else self._best_schedules(model)
        self.methods: list[Method] = timed_alone(self._seconds_alone, self._why_not, facts)
        self.pictures: dict[Approximation, list[Image]] = {}

    def _take(self, quality: str | Skipping | Approximation) -> None:
        optimize(self._pipe, quality=quality)
        self._drawn = None

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
        self._take(skipping)
        self._draw([request, request], f"warming up, {what}")
        self._on_step(f"timing, {what}")
        seconds = self._seconds(request)
        return seconds if any(" shallow" in note for note in report(self._pipe).approximations) else None

    def _best_schedules(self, model: Any) -> dict[tuple[int, int], tuple[float, ...]]:
        """Of one exact picture for each depth: as many whole steps as with `every`, where the same change of the deep
        features adds up between them. None where that is what `every` does, a step is more than one call, or it is no
        nearer to exact than even ones on the first prompts: `notes` say so.
        """
        kept: dict[tuple[int, int], tuple[float, ...]] = {}
        for depth in self._shallow:
            self._take(Skipping(depth, 2))
            what = f"observing how features change, depth {depth}"
            changes = feature_changes(model, depth, partial(self._draw, self._requests[:1], what))
            steps = len(changes) + 1
            if steps != len(self._pipe.scheduler.timesteps):
                self.notes.append(f"depth {depth}: whole steps lie evenly: a step is more than one call")
                continue
            found = {}
            for every in (each for each in _EVERY if each * 2 <= steps):
                even = tuple(range(0, steps, every))
                whole = evenly_changed(changes, len(even))
                if whole and whole != even:
                    # So that it is the same step again, and a number that can be read.
                    found[depth, every] = tuple(round(number / steps, 4) for number in whole)
            middle = list(found)[len(found) // 2 :][:1]
            if any(self._is_nearer(*at, found[at]) for at in middle):
                kept |= found
        return kept

    def _is_nearer(self, depth: int, every: int, whole: tuple[float, ...]) -> bool:
        guided = has_halves(self._pipe)
        even = self._screened(Approximation(Skipping(depth, every, guided_every=every if guided else 1)))
        own = self._screened(Approximation(Skipping(depth, guided_every=2 if guided else 1, whole=whole)))
        is_nearer = own.median_psnr > even.median_psnr
        self.notes.append(
            f"depth {depth}, {len(whole)} whole steps: {own.median_psnr:.1f} dB where features change, "
            f"{even.median_psnr:.1f} dB evenly: {'both are tried' if is_nearer else 'they lie evenly'}"
        )
        return is_nearer

    def _seconds_alone(self, method: Approximation) -> list[float]:
        """Of some pictures, after two that are thrown away."""
        request = self._requests[0]
        self._take(method)
        self._draw([request, request], f"warming up, {method}")
        taken = []
        for _ in range(TIMED):
            self._on_step(f"timing, {method}")
            taken.append(self._seconds(request))
        return taken

    def _why_not(self, method: Approximation) -> str | None:
        return why_not_at_work(method, report(self._pipe).approximations)

    def search(self, budget: Budget) -> Found:
        steps, halves = self._requests[0].steps, has_halves(self._pipe)
        shares = {method.approximation: method.share for method in self.methods if method.why_not is None}
        outside: list[Approximation] = []
        drawn: set[Approximation] = set()
        ruled_out = not_faster = 0
        for _, candidate in candidates(
            steps, self._shallow, self._first_block, halves=halves, methods=shares, schedules=self.schedules
        ):
            if self._is_ruled_out(candidate, budget, outside, drawn):
                ruled_out += 1
                continue
            drawn.add(candidate)
            scores = self._scores(candidate, budget)
            if scores is None or not budget.holds(scores):
                outside.append(candidate)
                continue
            speedup = self._speedup(candidate)
            if speedup[1] > 1:
                return Found(candidate, scores, speedup, len(drawn), ruled_out)
            not_faster += 1
            if not_faster == _MOST_NOT_FASTER:
                break
        return Found(None, None, None, len(drawn), ruled_out)

    def _is_ruled_out(
        self, candidate: Approximation, budget: Budget, outside: list[Approximation], drawn: set[Approximation]
    ) -> bool:
        """Whether it leaves out all that one does which is outside, or its methods are too far from exact together: of
        each one the first prompts are drawn, once, and their errors are added up as if they had nothing in common.
        """
        errors = 0.0
        for part in parts(candidate):
            if any(is_part(one, part) for one in outside):
                return True
            near = self._screened(part)
            drawn.add(part)
            if not self._is_near(near, budget):
                outside.append(part)
                return True
            errors += 10 ** (-near.median_psnr / 10)
        together = -10 * math.log10(errors) if errors else math.inf
        return together < budget.psnr - _FAR_DB or any(is_part(one, candidate) for one in outside)

    def _is_near(self, near: Scores, budget: Budget) -> bool:
        return near.median_psnr >= budget.psnr - _FAR_DB

    def _screened(self, candidate: Approximation) -> Scores:
        """Of the first prompts."""
        if candidate not in self._near:
            self._take(candidate)
            images = self._draw(self._requests[:_SCREENED], str(candidate))
            self._near[candidate], self._drawn = self._nearness(images), (candidate, images)
        return self._near[candidate]

    def _scores(self, candidate: Approximation, budget: Budget) -> Scores | None:
        """None where the first prompts are far outside."""
        if candidate in self._scored:
            return self._scored[candidate]
        if not self._is_near(self._screened(candidate), budget):
            return None
        if self._drawn is not None and self._drawn[0] == candidate:
            images = list(self._drawn[1])
        else:
            self._take(candidate)
            images = []
        images += self._draw(self._requests[len(images) :], str(candidate))
        self.pictures[candidate] = images[:SHOWN]
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
                self._take(quality)
                self._draw([request, request], "timing")
                times.append(self._seconds(request))
        return statistics.median(exact) / statistics.median(ours), *measuring.interval(ours, exact)
