"""One request of a client: the pictures it asks for, how far they are, and who listens."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rocm_sd.errors import first_line

if TYPE_CHECKING:
    from PIL.Image import Image

    from rocm_sd.integrations.diffusers import Drawing

__all__ = ["Busy", "Cancelled", "Event", "Job", "Lost", "NotDrawn", "State", "TooLate"]

State = Literal["queued", "drawing", "done", "failed", "cancelled"]
_OVER = frozenset({"done", "failed", "cancelled"})


class NotDrawn(Exception):
    """A request that is answered by an error which is nobody's fault. `status` and `kind` are those of the answer."""

    status: ClassVar[int]
    kind: ClassVar[str]
    retry_after: int | None = None


class Cancelled(NotDrawn):
    """The client asked for it, or is gone."""

    status, kind = 409, "cancelled"

    def __init__(self) -> None:
        super().__init__("The request was cancelled.")


class TooLate(NotDrawn):
    status, kind = 504, "timeout"

    def __init__(self) -> None:
        super().__init__("The time that a request has was over before its last picture.")


class Busy(NotDrawn):
    """The queue is full."""

    status, kind = 429, "busy"

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"The queue is full. Try again in {retry_after} s.")
        self.retry_after = retry_after


class Lost(NotDrawn):
    """What draws is gone, and this process with it; another one may be there soon."""

    status, kind, retry_after = 503, "server_error", 5

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"The server cannot draw any more ({first_line(error)}).")


@dataclass(frozen=True)
class Event:
    """`kind`: "state", "step", "picture" or "over"; `picture`: which one it is of."""

    kind: str
    picture: int = 0
    step: int = 0
    steps: int = 0
    image: Image | None = None


@dataclass(eq=False)
class Job:
    """`client`: whose it is; the queue takes turns among clients. `deadline` by `time.monotonic`."""

    model: str
    drawings: tuple[Drawing, ...]
    client: str = ""
    api: str = ""
    deadline: float = float("inf")
    id: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    created: float = field(default_factory=time.monotonic)
    started: float | None = None
    ended: float | None = None
    state: State = "queued"
    error: BaseException | None = None
    images: list[Image | None] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    preview: Image | None = None
    _listeners: list[tuple[asyncio.AbstractEventLoop, asyncio.Queue[Event]]] = field(default_factory=list)
    _cancelled: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _order: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.images = [None] * len(self.drawings)
        self.steps = [0] * len(self.drawings)

    @property
    def is_over(self) -> bool:
        return self.state in _OVER

    @property
    def progress(self) -> float:
        total = sum(drawing.drawn_steps for drawing in self.drawings)
        return min(1.0, sum(self.steps) / total) if total else 0.0

    def cancel(self) -> None:
        self._cancelled = True

    def stop(self) -> BaseException | None:
        """Why no further step is to be drawn."""
        if self._cancelled:
            return Cancelled()
        if self.error is not None:
            return Cancelled()
        return TooLate() if time.monotonic() > self.deadline else None

    def begin(self) -> None:
        with self._lock:
            if self.state == "queued":
                self.state, self.started = "drawing", time.monotonic()
        self._tell(Event("state"))

    def step(self, picture: int, step: int, image: Image | None) -> None:
        self.steps[picture] = step
        if image is not None:
            self.preview = image
        self._tell(Event("step", picture, step, self.drawings[picture].drawn_steps, image))

    def finish(self, picture: int, image: Image) -> None:
        # Two that end at once are told one after the other: whoever listens leaves at the last one's "over".
        with self._order:
            with self._lock:
                self.images[picture] = image
                self.steps[picture] = self.drawings[picture].drawn_steps
                whole = all(each is not None for each in self.images)
                if whole and not self.is_over:
                    self.state, self.ended = "done", time.monotonic()
            self._tell(Event("picture", picture, image=image))
            if whole:
                self._tell(Event("over"))

    def fail(self, error: BaseException) -> bool:
        """The first error is the job's; whether this is it."""
        with self._lock:
            if self.is_over:
                return False
            self.state = "cancelled" if isinstance(error, Cancelled) else "failed"
            self.error, self.ended = error, time.monotonic()
        self._tell(Event("over"))
        return True

    def listen(self) -> asyncio.Queue[Event]:
        """Events from now on, for the running loop; one that is over tells so at once."""
        queue: asyncio.Queue[Event] = asyncio.Queue()
        with self._lock:
            self._listeners.append((asyncio.get_running_loop(), queue))
            if self.is_over:
                queue.put_nowait(Event("over"))
        return queue

    def leave(self, queue: asyncio.Queue[Event]) -> None:
        with self._lock:
            self._listeners = [(loop, other) for loop, other in self._listeners if other is not queue]

    def _tell(self, event: Event) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for loop, queue in listeners:
            # The loop may be gone with its server.
            if not loop.is_closed():
                loop.call_soon_threadsafe(queue.put_nowait, event)

    async def over(self) -> None:
        """Wait until it is; raises its error."""
        queue = self.listen()
        try:
            while not self.is_over:
                await queue.get()
        finally:
            self.leave(queue)
        if self.error is not None:
            raise self.error

    def describe(self) -> dict[str, Any]:
        return {"id": self.id, "model": self.model, "state": self.state, "pictures": len(self.drawings)}
