"""The queue before the models: who is next, how many at once, and what becomes of a request that fails or is late.

Clients take turns; each one's requests come in their order, and those that have to wait for their like let others pass.
A picture is drawn on a thread of its own by a `Drawer`:
the models of this process, whose calls are shared, or replicas on other machines.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from rocm_sd.errors import RocmSdError
from rocm_sd.serve.jobs import Busy, Cancelled, Ending, Job, Lost, NotDrawn, TooLate
from rocm_sd.serve.logs import log

if TYPE_CHECKING:
    from collections.abc import Callable

    from PIL.Image import Image

    from rocm_sd.integrations.diffusers import Drawing
    from rocm_sd.serve.config import Limits
    from rocm_sd.serve.metrics import Metrics

__all__ = ["Drawer", "Laned", "Losable", "ModelFacts", "Service"]

# Of how many pictures the time of late is known by, for those who have to wait.
_REMEMBERED = 32
_GUESS_S = 5.0


@dataclass(frozen=True)
class ModelFacts:
    """What clients are told of a model: its name, its own size, the guidance that suits it, and what it can be had
    with.
    """

    name: str
    width: int
    height: int
    guidance: float
    qualities: tuple[str, ...]
    loras: tuple[str, ...] = ()


class Drawer(Protocol):
    """`draw` is called by several threads at once."""

    def models(self) -> dict[str, ModelFacts]: ...

    def draw(
        self,
        model: str,
        drawing: Drawing,
        on_step: Callable[[int, Callable[[], Image]], None],
        stop: Callable[[], BaseException | None],
    ) -> Image: ...

    def close(self) -> None: ...


@runtime_checkable
class Laned(Protocol):
    """A drawer that draws pictures of some qualities only one after the other. `lanes(model, quality)`: how many at
    once; None: as many as come.
    """

    def lanes(self, model: str, quality: str) -> int | None: ...


@runtime_checkable
class Losable(Protocol):
    """A drawer whose models lie in other processes. `when_lost(tell)`: have `tell(error)` called once, before any
    `draw` fails of it, where nothing can be drawn any more.
    """

    def when_lost(self, tell: Callable[[BaseException], None]) -> None: ...

    def close(self) -> None: ...


class Service:
    def __init__(self, drawer: Drawer, limits: Limits, metrics: Metrics) -> None:
        self.drawer, self.limits, self.metrics = drawer, limits, metrics
        self.jobs: OrderedDict[str, Job] = OrderedDict()
        # By client, in the order of their turns: (job, which of its pictures).
        self._waiting: OrderedDict[str, deque[tuple[Job, int]]] = OrderedDict()
        self._in_flight = 0
        self._in_lane: Counter[tuple[str, str]] = Counter()
        self._draining = False
        self._lost: BaseException | None = None
        self._changed = threading.Condition()
        # When a picture ended and how long it took, of late.
        self._ended: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)
        self.drawn = 0
        self._threads = ThreadPoolExecutor(limits.in_flight, "rocm-sd picture")
        self._dispatcher = threading.Thread(target=self._dispatch, name="rocm-sd queue", daemon=True)
        self._dispatcher.start()
        metrics.watch(self)

    @property
    def queued(self) -> int:
        with self._changed:
            return sum(len(waiting) for waiting in self._waiting.values())

    def jobs_of(self, client: str, api: str) -> list[Job]:
        """Those that are not over, the oldest first."""
        with self._changed:
            return [job for job in self.jobs.values() if job.api == api and job.client == client and not job.is_over]

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @property
    def draining(self) -> bool:
        return self._draining

    def submit(self, job: Job) -> Job:
        """Put it into the queue; raises Busy where there is no room for all of its pictures."""
        job.deadline = min(job.deadline, job.created + self.limits.seconds)
        with self._changed:
            if self._lost is not None:
                raise Lost(self._lost)
            if self._draining:
                raise Ending
            if self.queued + len(job.drawings) > self.limits.queue:
                self.metrics.refused.inc()
                raise Busy(self.retry_after())
            self._waiting.setdefault(job.client, deque()).extend((job, i) for i in range(len(job.drawings)))
            self.jobs[job.id] = job
            self._forget_old_ones()
            self._changed.notify_all()
        facts = {"job": job.id, "request": job.request, "model": job.model, "pictures": len(job.drawings)}
        log.info("queued", extra=facts | {"api": job.api})
        return job

    def cancel(self, job: Job) -> None:
        """At its next step; what waits never begins."""
        job.cancel()
        with self._changed:
            self._changed.notify_all()

    def lose(self, error: BaseException) -> None:
        """Nothing is drawn any more: what waits, what is drawn and what comes is answered so."""
        with self._changed:
            self._lost = error
            self._changed.notify_all()

    def retry_after(self) -> int:
        """Seconds until there is room, by how long pictures of late took."""
        each = self.seconds_a_picture() or _GUESS_S
        return max(1, math.ceil(each * max(1, self.queued) / self.limits.in_flight))

    def seconds_a_picture(self) -> float | None:
        """From its start to its end, of late."""
        taken = [seconds for _, seconds in list(self._ended)]
        return round(sum(taken) / len(taken), 3) if taken else None

    def pictures_a_minute(self) -> float | None:
        """Of late, while there was something to draw; None before there are two."""
        ends = [end for end, _ in list(self._ended)]
        return round(60 * (len(ends) - 1) / (ends[-1] - ends[0]), 2) if len(ends) > 1 and ends[-1] > ends[0] else None

    def close(self, drain_s: float = 0.0) -> None:
        """Take nothing new, let what was taken come to its end for so long, and cancel the rest."""
        with self._changed:
            self._draining = True
            self._changed.notify_all()
            ends = time.monotonic() + drain_s
            while (self.queued or self._in_flight) and time.monotonic() < ends:
                self._changed.wait(ends - time.monotonic())
            for job in self.jobs.values():
                job.cancel()
            self._changed.notify_all()
        self._dispatcher.join()
        self._threads.shutdown(wait=True)
        self.drawer.close()

    def _dispatch(self) -> None:
        while True:
            with self._changed:
                self._fail_what_ended()
                found = self._next() if self._in_flight < self.limits.in_flight else None
                if found is None:
                    if self._draining and not self.queued:
                        return
                    self._changed.wait(self._until_next_deadline())
                    continue
                self._in_flight += 1
            self._threads.submit(self._draw, *found)

    def _next(self) -> tuple[Job, int] | None:
        """The first that can be drawn of the client whose turn it is, who is last from then on."""
        for client, waiting in self._waiting.items():
            place = next((place for place, one in enumerate(waiting) if self._has_room(*one)), None)
            if place is None:
                continue
            job, picture = waiting[place]
            del waiting[place], self._waiting[client]
            if waiting:
                self._waiting[client] = waiting
            self._in_lane[_lane(job, picture)] += 1
            return job, picture
        return None

    def _has_room(self, job: Job, picture: int) -> bool:
        """Not where it would wait in a place that another picture could be drawn in."""
        if not isinstance(self.drawer, Laned):
            return True
        lane = _lane(job, picture)
        most = self.drawer.lanes(*lane)
        return most is None or self._in_lane[lane] < most

    def _fail_what_ended(self) -> None:
        """What was cancelled or is too late leaves the queue."""
        for client, waiting in list(self._waiting.items()):
            left: deque[tuple[Job, int]] = deque()
            for job, picture in waiting:
                error = job.stop() if self._lost is None else Lost(self._lost)
                if error is None:
                    left.append((job, picture))
                elif job.fail(error):
                    self._note(job)
            if left:
                self._waiting[client] = left
            else:
                del self._waiting[client]

    def _until_next_deadline(self) -> float | None:
        deadlines = [job.deadline for waiting in self._waiting.values() for job, _ in waiting]
        return max(0.0, min(deadlines) - time.monotonic()) + 0.001 if deadlines else None

    def _draw(self, job: Job, picture: int) -> None:
        began = time.monotonic()
        job.begin()
        drawing = job.drawings[picture]
        self.metrics.waited.observe(began - job.created)

        def on_step(step: int, preview: Callable[[], Image]) -> None:
            job.step(picture, step, preview() if drawing.wants_preview(step) else None)

        try:
            image = self.drawer.draw(job.model, drawing, on_step, job.stop)
        except BaseException as error:  # noqa: BLE001 -- it is the job's, and the next one is drawn
            if job.fail(error if self._lost is None or isinstance(error, NotDrawn) else Lost(self._lost)):
                self._note(job)
        else:
            with self._changed:
                self._ended.append((time.monotonic(), time.monotonic() - began))
                self.drawn += 1
            self.metrics.pictures.labels(job.model).inc()
            if job.finish(picture, image):
                self._note(job)
        finally:
            with self._changed:
                self._in_flight -= 1
                self._in_lane[_lane(job, picture)] -= 1
                self._forget_old_ones()
                self._changed.notify_all()

    def _note(self, job: Job) -> None:
        """Once, when it is over."""
        job.let_go_of_inputs()
        if job.state != "done" and not job.for_later:
            job.let_go_of_images()
        took = (job.ended or job.created) - job.created
        self.metrics.requests.labels(job.api, job.state).inc()
        if job.state == "done":
            self.metrics.latency.labels(job.model).observe(took)
        facts = {
            "job": job.id, "request": job.request, "model": job.model, "api": job.api, "state": job.state,
            "seconds": round(took, 3),
        }  # fmt: skip
        if job.error is None or isinstance(job.error, (Cancelled, TooLate)):
            log.info("over", extra=facts)
        elif isinstance(job.error, (RocmSdError, Lost)):
            log.warning("refused", extra=facts | {"error": str(job.error)})
        else:
            log.error("failed", extra=facts, exc_info=job.error)

    def _forget_old_ones(self) -> None:
        """Jobs that are over are kept for those who ask what became of them, and not for ever; their pictures only as
        far as there is room, the latest ones.
        """
        over = [job for job in self.jobs.values() if job.is_over]
        too_many = max(0, len(self.jobs) - self.limits.kept)
        for job in over[:too_many]:
            del self.jobs[job.id]
        unfetched = [job for job in over[too_many:] if job.for_later and not job.is_watched]
        held = sum(job.image_bytes for job in unfetched)
        for job in unfetched:
            if held <= self.limits.kept_bytes:
                break
            held -= job.image_bytes
            job.let_go_of_images()


def _lane(job: Job, picture: int) -> tuple[str, str]:
    return job.model, job.drawings[picture].quality
