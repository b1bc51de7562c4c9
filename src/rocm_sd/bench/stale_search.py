"""How many steps must wait for other GPUs' rows, so that pictures are within a budget of quality: `patch` on a job.

    StaleSearcher(pipe, "patch", requests, subject.match, on_step).search(BUDGETS["high"])

Every rank calls it alike, and each draws every picture with the others. The fewest waiting steps come first: they take
the least time, and are the least exact. The first setting within the budget is timed against pictures whose every step
waits, in turns, and taken if it is faster beyond doubt.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from rocm_sd import measuring
from rocm_sd.bench.quality_search import SHOWN, Found
from rocm_sd.bench.several_gpus import JobStopwatch
from rocm_sd.engine import Approximation
from rocm_sd.errors import Unsupported
from rocm_sd.integrations import diffusers as host
from rocm_sd.parallel import parallel_report, parallelize
from rocm_sd.parallel.sharing import everybody
from rocm_sd.quality import similarity
from rocm_sd.quality.budget import Scores

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from PIL.Image import Image

    from rocm_sd.bench.quality_methods import Method
    from rocm_sd.bench.quality_search import Matched
    from rocm_sd.quality.budget import Budget

__all__ = ["StaleSearcher", "waiting_steps"]

_WAITING = (1, 2, 4, 6, 8, 12, 16, 24, 32)


def waiting_steps(steps: int) -> list[int]:
    """Of a picture of so many steps: at least a third of them is to gain from it."""
    return [count for count in _WAITING if count * 3 <= steps * 2]


class StaleSearcher:
    """`plan`: as it was parsed. `pictures`: the first ones of each setting; `notes`: nothing, as `methods`."""

    def __init__(
        self, pipe: Any, plan: str, requests: Sequence[host.Request], match: Matched | None,
        on_step: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._pipe, self._requests, self._match, self._on_step = pipe, requests, match, on_step
        self._asked = plan
        self._world = everybody()
        self._scored: dict[int, Scores] = {}
        self._stopwatch = JobStopwatch(pipe.unet.device, self._world)
        parallelize(pipe, plan)
        chosen = parallel_report(pipe).plan
        if "patch" not in chosen.dims:
            raise Unsupported("tune --quality --gpus", f"the plan {chosen}", hint="Add --parallel patch.")
        self.plan = str(chosen)
        self._draw(requests[:1], "warming up")
        self.exact = self._draw(requests, "exact")
        self.pictures: dict[Approximation, list[Image]] = {}
        self.methods: list[Method] = []
        self.notes: list[str] = []

    def search(self, budget: Budget) -> Found:
        for tried, after in enumerate(waiting_steps(self._requests[0].steps), 1):
            scores = self._scores(after)
            if not budget.holds(scores):
                continue
            candidate = Approximation(stale_after=after)
            speedup = self._speedup(candidate)
            # Whoever waits longer is not faster.
            return Found(candidate, scores, speedup, tried) if speedup[1] > 1 else Found(None, None, None, tried)
        return Found(None, None, None, len(waiting_steps(self._requests[0].steps)))

    def _scores(self, after: int) -> Scores:
        if after not in self._scored:
            candidate = Approximation(stale_after=after)
            parallelize(self._pipe, self._asked, quality=candidate)
            images = self._draw(self._requests, str(candidate))
            self.pictures[candidate] = images[:SHOWN]
            near = similarity.similarity(*(similarity.as_tensor(each) for each in (self.exact, images)))
            match = None if self._match is None else self._match(images, self.exact)
            # One rank's word: what follows must be the same on all of them.
            self._scored[after] = self._world.agree(Scores(near.psnr, near.ssim, match))[0]
        return self._scored[after]

    def _speedup(self, candidate: Approximation) -> tuple[float, float, float]:
        request = self._requests[0]
        waiting: list[float] = []
        ours: list[float] = []
        for _ in range(measuring.LEAST_TURNS):
            for quality, times in (("exact", waiting), (candidate, ours)):
                parallelize(self._pipe, self._asked, quality=quality)
                self._draw([request], "timing")
                times.append(self._stopwatch.milliseconds(lambda: host.generate(self._pipe, request)))
        return statistics.median(waiting) / statistics.median(ours), *measuring.interval(ours, waiting)

    def _draw(self, requests: Sequence[host.Request], what: str) -> list[Image]:
        images: list[Image] = []
        for request in requests:
            self._on_step(f"{what}: {request.prompt}")
            images += host.generate(self._pipe, request).images
        return images
