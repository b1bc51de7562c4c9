"""One request of a client: the pictures it asks for, how far they are, and who listens."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rocm_sd.errors import first_line

if TYPE_CHECKING:
    from PIL.Image import Image

    from rocm_sd.integrations.diffusers import Drawing

__all__ = ["Busy", "Cancelled", "Ending", "Event", "Job", "Lost", "NotDrawn", "State", "TooLate"]

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


class Ending(NotDrawn):
    """The server takes nothing new; another one may be there soon."""

    status, kind, retry_after = 503, "not_ready", 5

    def __init__(self) -> None:
        super().__init__("The server ends: it takes no more requests.")


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
    """`client`: whose it is; the queue takes turns among clients. `deadline` by `time.monotonic`. `for_later`: its
    pictures are for whoever asks for them; those of others are let go of by whoever waits. `names`: by picture, under
    which one its file is kept. `request`: the id of the call that asked for it.
    """

    model: str
    drawings: tuple[Drawing, ...]
    client: str = ""
    api: str = ""
    deadline: float = float("inf")
    for_later: bool = False
    request: str = ""
    id: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    created: float = field(default_factory=time.monotonic)
    started: float | None = None
    ended: float | None = None
    state: State = "queued"
    error: BaseException | None = None
    images: list[Image | None] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    preview: Image | None = None
    names: dict[int, str] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    _listeners: list[tuple[asyncio.AbstractEventLoop, asyncio.Queue[Event]]] = field(default_factory=list)
    _cancelled: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _order: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.images = [None] * len(self.drawings)
        self.steps = [0] * len(self.drawings)
        # They are told of when the image that it is from is no longer there.
        self.drawn_steps = tuple(drawing.drawn_steps for drawing in self.drawings)
        self.is_from_image = any(drawing.image is not None for drawing in self.drawings)

    @property
    def is_over(self) -> bool:
        return self.state in _OVER

    @property
    def progress(self) -> float:
        total = sum(self.drawn_steps)
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
        self._tell(Event("step", picture, step, self.drawn_steps[picture], image))

    def finish(self, picture: int, image: Image) -> bool:
        """Whether the job is done by it."""
        # Two that end at once are told one after the other: whoever listens leaves at the last one's "over".
        with self._order:
            with self._lock:
                # Nobody fetches it where another one of the job's has failed.
                self.images[picture] = None if self.is_over else image
                self.steps[picture] = self.drawn_steps[picture]
                self.finished.add(picture)
                is_done = len(self.finished) == len(self.drawings) and not self.is_over
                if is_done:
                    self.state, self.ended = "done", time.monotonic()
            self._tell(Event("picture", picture, image=image))
            if is_done:
                self._tell(Event("over"))
        return is_done

    def fail(self, error: BaseException) -> bool:
        """The first error is the job's; whether this is it."""
        with self._lock:
            if self.is_over:
                return False
            self.state = "cancelled" if isinstance(error, Cancelled) else "failed"
            self.error, self.ended = error, time.monotonic()
        self._tell(Event("over"))
        return True

    @property
    def image_bytes(self) -> int:
        """Of its pictures, as they lie in memory."""
        return sum(image.width * image.height * len(image.getbands()) for image in self.images if image is not None)

    @property
    def is_watched(self) -> bool:
        return bool(self._listeners)

    def let_go_of_inputs(self) -> None:
        """What it was drawn from is not needed once it is over."""
        self.preview = None
        if self.is_from_image:
            self.drawings = tuple(replace(drawing, image=None, mask=None) for drawing in self.drawings)

    def let_go_of_images(self) -> None:
        self.images = [None] * len(self.images)

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

    async def over(self) -> list[Image]:
        """Its pictures, when it is; raises its error."""
        queue = self.listen()
        try:
            while not self.is_over:
                await queue.get()
            images = list(self.images)
        finally:
            self.leave(queue)
        if self.error is not None:
            raise self.error
        return [image for image in images if image is not None]

    def describe(self) -> dict[str, Any]:
        return {"id": self.id, "model": self.model, "state": self.state, "pictures": len(self.drawings)}
