"""From what a client asks for to a job in the queue, within the server's limits; and the wait for it."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rocm_sd.errors import InvalidOption, RocmSdError, first_line, require_known, require_one_of
from rocm_sd.integrations.diffusers import Drawing
from rocm_sd.serve.jobs import Job, NotDrawn
from rocm_sd.serve.pictures import Kept, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi import Request as HttpRequest
    from PIL.Image import Image

    from rocm_sd.serve.config import ServeConfig
    from rocm_sd.serve.keys import Keys
    from rocm_sd.serve.metrics import Metrics
    from rocm_sd.serve.service import Service

__all__ = [
    "Asked", "BeyondLimits", "NotReady", "Server", "client_of", "facts_of", "files_of", "finished", "prepared",
    "server_of", "submit",
]  # fmt: skip

_LOOK_S = 0.5  # for a client that is gone
_READ_AT_ONCE = 2


class NotReady(NotDrawn):
    """The models are being loaded, or could not be."""

    status, kind, retry_after = 503, "not_ready", 5


class BeyondLimits(RocmSdError):
    """More than the server takes in one request."""


@dataclass
class Server:
    """What every endpoint asks. `service` is there as soon as the models are; `failed`: why they never will be, or are
    gone.
    """

    config: ServeConfig
    metrics: Metrics
    keys: Keys | None
    kept: Kept
    service: Service | None = None
    failed: BaseException | None = None
    reading: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_READ_AT_ONCE))

    @property
    def ready(self) -> Service:
        if self.service is None:
            raise NotReady(
                f"No model could be loaded: {self.failed}" if self.failed else "The models are being loaded."
            )
        return self.service

    def words_of(self, error: BaseException) -> str:
        """As a client is told. The words of an error that nobody foresaw may be of the server's insides: they are for
        whoever is at this machine, as all callers are where there are no keys.
        """
        if isinstance(error, (RocmSdError, NotDrawn)):
            return str(error)
        return f"The server failed ({first_line(error)})." if self.keys is None else "The server failed: see its log."


def server_of(request: HttpRequest) -> Server:
    found: Server = request.app.state.server
    return found


def client_of(request: HttpRequest) -> str:
    """Whose request it is: the name of the key, or the address where there are no keys."""
    found: str = request.scope.get("rocm_sd_client", "")
    return found


@dataclass(frozen=True)
class Asked:
    """What all APIs have in common. None is the model's own."""

    prompt: str
    negative: str = ""
    model: str | None = None
    count: int = 1
    steps: int = 20
    guidance: float | None = None
    seed: int | None = None
    width: int | None = None
    height: int | None = None
    scheduler: str | None = None
    quality: str = "exact"
    image: Image | None = None
    mask: Image | None = None
    strength: float = 0.75
    loras: tuple[tuple[str, float], ...] = ()


async def submit(
    request: HttpRequest,
    asked: Asked | Callable[[], Asked],
    api: str,
    *,
    preview_every: int = 0,
    for_later: bool = False,
) -> Job:
    """The job, in the queue; raises a RocmSdError for what cannot be drawn, and Busy."""
    job = await prepared(request, asked, api, preview_every=preview_every)
    job.for_later = for_later
    return server_of(request).ready.submit(job)


async def prepared(
    request: HttpRequest, asked: Asked | Callable[[], Asked], api: str, *, preview_every: int = 0
) -> Job:
    """The job, to be put into the queue: whoever listens before that misses nothing. A function reads pictures: that
    is done beside the event loop, and for few requests at once, since each may have as many pixels as are taken.
    """
    if isinstance(asked, Asked):
        return _job(request, asked, api, preview_every)
    read, server = asked, server_of(request)
    async with server.reading:
        return await asyncio.to_thread(lambda: _job(request, read(), api, preview_every))


def _job(request: HttpRequest, asked: Asked, api: str, preview_every: int) -> Job:
    server = server_of(request)
    limits, known = server.config.limits, server.ready.drawer.models()
    name = next(iter(known)) if asked.model is None else asked.model
    require_one_of("model", name, known)
    facts = known[name]
    if asked.quality not in facts.qualities:
        raise InvalidOption("quality", asked.quality, list(facts.qualities))
    require_known("lora", (lora for lora, _ in asked.loras), facts.loras)
    for what, value, most in (
        ("pictures", asked.count, limits.pictures),
        ("steps", asked.steps, limits.steps),
        ("characters of a prompt", max(len(asked.prompt), len(asked.negative)), limits.prompt),
    ):
        if value > most:
            raise BeyondLimits(f"The request has {value} {what}: this server takes {most}.")
    if asked.count < 1:
        raise InvalidOption("n", asked.count, [], hint="It takes 1 or more.")
    own = (facts.width, facts.height) if asked.image is None else tuple(side - side % 8 for side in asked.image.size)
    width = own[0] if asked.width is None else asked.width
    height = own[1] if asked.height is None else asked.height
    if width * height > limits.pixels:
        raise BeyondLimits(f"A picture of {width}x{height} was asked for: this server takes {limits.pixels} pixels.")
    seed = secrets.randbelow(2**32) if asked.seed is None else asked.seed
    first = Drawing(
        asked.prompt, asked.negative, asked.steps, facts.guidance if asked.guidance is None else asked.guidance,
        seed, 1, width, height, asked.scheduler, asked.quality, asked.image, asked.mask, asked.strength, asked.loras,
        preview_every,
    )  # fmt: skip
    # As it is drawn from: what is kept while it waits is no larger than its picture.
    image = None if asked.image is None else asked.image.convert("RGB").resize((width, height))
    mask = None if asked.mask is None else asked.mask.convert("L").resize((width, height))
    drawings = tuple(replace(first, seed=seed + number, image=image, mask=mask) for number in range(asked.count))
    return Job(name, drawings, client_of(request), api, request=request.scope.get("rocm_sd_request", ""))


async def finished(request: HttpRequest, job: Job) -> list[Image]:
    """Its pictures; cancelled where the client is gone before that."""
    over = asyncio.ensure_future(job.over())
    try:
        while not over.done():
            await asyncio.wait({over}, timeout=_LOOK_S)
            if not over.done() and await request.is_disconnected():
                server_of(request).ready.cancel(job)
        return over.result()
    finally:
        if not over.done():
            over.cancel()
            server_of(request).ready.cancel(job)
        job.let_go_of_images()


def facts_of(server: Server, job: Job, picture: int) -> dict[str, Any] | None:
    """What a picture was drawn from, for its file; None where that is switched off."""
    if not server.config.metadata:
        return None
    drawing = job.drawings[picture]
    said = {name: getattr(drawing, name) for name in ("prompt", "negative", "steps", "guidance", "seed", "quality")}
    said |= {"size": f"{drawing.width}x{drawing.height}", "model": job.model, "scheduler": drawing.scheduler}
    said |= {"loras": dict(drawing.loras)} if drawing.loras else {}
    return said | ({"strength": drawing.strength} if job.is_from_image else {})


async def files_of(request: HttpRequest, job: Job, kind: str = "png", quality: int = 90) -> list[bytes]:
    """Its pictures as files, encoded beside the event loop."""
    server = server_of(request)
    images = await finished(request, job)
    encoded = (
        asyncio.to_thread(encode, image, kind, facts_of(server, job, number), quality)
        for number, image in enumerate(images)
    )
    return list(await asyncio.gather(*encoded))
