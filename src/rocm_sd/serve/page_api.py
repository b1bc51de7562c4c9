"""What the server's own page calls: jobs whose steps can be watched, and how the server is doing.

POST /api/jobs puts a job into the queue, GET /api/jobs/ID/events tells of it (server-sent events), DELETE ends it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from rocm_sd import __version__
from rocm_sd.integrations.diffusers import SCHEDULERS
from rocm_sd.serve.jobs import Event
from rocm_sd.serve.pictures import encode, from_base64
from rocm_sd.serve.requests import Asked, client_of, facts_of, server_of, submit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rocm_sd.serve.jobs import Job
    from rocm_sd.serve.requests import Server

__all__ = ["router"]

router = APIRouter(prefix="/api", tags=["page"])
_KEEP_ALIVE_S = 15.0


class Wanted(BaseModel):
    """What POST /api/jobs takes. `preview_every`: after how many steps a preview is sent, 0 for none."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    prompt: Annotated[str, Field(min_length=1)]
    negative: str = ""
    model: str | None = None
    n: Annotated[int, Field(ge=1, le=64)] = 1
    steps: Annotated[int, Field(ge=1, le=1000)] = 20
    guidance: Annotated[float, Field(ge=0, le=100)] | None = None
    seed: Annotated[int, Field(ge=0, le=2**53)] | None = None
    width: Annotated[int, Field(ge=8, le=65536)] | None = None
    height: Annotated[int, Field(ge=8, le=65536)] | None = None
    scheduler: str | None = None
    quality: str = "exact"
    preview_every: Annotated[int, Field(ge=0, le=1000)] = 1
    image: str | None = None
    strength: Annotated[float, Field(gt=0, le=1)] = 0.75
    lora: dict[str, Annotated[float, Field(ge=-10, le=10)]] = {}


@router.get("/info")
async def info(request: Request) -> dict[str, Any]:
    """Models with what they can be had with, schedulers, and the limits of a request."""
    server = server_of(request)
    known = server.ready.drawer.models()
    limits = server.config.limits
    return {
        "version": __version__,
        "models": [
            {
                "name": facts.name, "width": facts.width, "height": facts.height, "guidance": facts.guidance,
                "qualities": list(facts.qualities), "loras": list(facts.loras),
            }
            for facts in known.values()
        ],
        "schedulers": list(SCHEDULERS),
        "limits": {
            "pictures": limits.pictures, "steps": limits.steps, "pixels": limits.pixels, "prompt": limits.prompt,
            "in_flight": limits.in_flight, "queue": limits.queue, "input_pixels": limits.input_pixels,
            "body_bytes": limits.body_bytes,
        },
    }  # fmt: skip


@router.get("/status")
async def status(request: Request) -> dict[str, Any]:
    """How many wait, how many are drawn, and how fast."""
    service = server_of(request).ready
    return {
        "queued": service.queued, "drawing": service.in_flight, "pictures": service.drawn,
        "seconds_a_picture": service.seconds_a_picture(), "pictures_a_minute": service.pictures_a_minute(),
        "batch": service.metrics.last_batch,
    }  # fmt: skip


@router.post("/jobs", status_code=202)
async def begin(request: Request, body: Wanted) -> dict[str, Any]:
    limits = server_of(request).config.limits
    image = body.image
    asked = Asked(
        body.prompt, body.negative, body.model, body.n, body.steps, body.guidance, body.seed, body.width, body.height,
        body.scheduler, body.quality, None, None, body.strength, tuple(sorted(body.lora.items())),
    )  # fmt: skip
    given = asked if image is None else lambda: replace(asked, image=from_base64(image, limits))
    job = await submit(request, given, "page", preview_every=body.preview_every, for_later=True)
    return job.describe() | {"seeds": [drawing.seed for drawing in job.drawings]}


def _own(request: Request, job_id: str) -> Job:
    job = server_of(request).ready.jobs.get(job_id)
    if job is None or job.client != client_of(request):
        raise HTTPException(404, "There is no such job any more.")
    return job


@router.get("/jobs/{job_id}")
async def look(request: Request, job_id: str) -> dict[str, Any]:
    job = _own(request, job_id)
    return job.describe() | {"progress": job.progress, "error": _words(server_of(request), job)}


@router.delete("/jobs/{job_id}")
async def end(request: Request, job_id: str) -> dict[str, Any]:
    job = _own(request, job_id)
    server_of(request).ready.cancel(job)
    return job.describe()


@router.get("/jobs/{job_id}/events")
async def events(request: Request, job_id: str) -> StreamingResponse:
    """state, step (with a preview), picture (with its address) and over, as they come."""
    return StreamingResponse(_events(request, _own(request, job_id)), media_type="text/event-stream")


async def _events(request: Request, job: Job) -> AsyncIterator[str]:
    server, queue, told = server_of(request), job.listen(), set[int]()
    is_over = False
    try:
        yield _sse("state", {"state": job.state})
        # Who listens late, or again, is told how far it is.
        preview = job.preview if len(job.drawings) == 1 else None
        for number, step in enumerate(job.steps):
            if step and number not in job.finished:
                yield _sse("step", await _step(Event("step", number, step, job.drawn_steps[number], preview)))
        while True:
            for number in sorted(job.finished - told):
                told.add(number)
                picture = await _picture(server, job, number)
                if picture is not None:
                    yield _sse("picture", picture)
            if is_over:
                break
            try:
                event = await asyncio.wait_for(queue.get(), _KEEP_ALIVE_S)
            except (TimeoutError, asyncio.TimeoutError):
                yield ": still here\n\n"
                continue
            is_over = event.kind == "over"
            if event.kind == "step":
                yield _sse("step", await _step(event))
            elif event.kind == "state":
                yield _sse("state", {"state": job.state})
        took = (job.ended or time.monotonic()) - job.created
        yield _sse("over", {"state": job.state, "error": _words(server, job), "seconds": round(took, 3)})
    finally:
        job.leave(queue)


async def _step(event: Event) -> dict[str, Any]:
    said: dict[str, Any] = {"picture": event.picture, "step": event.step, "steps": event.steps}
    if event.image is not None:
        raw = await asyncio.to_thread(encode, event.image, "webp", None, 70)
        said["preview"] = "data:image/webp;base64," + base64.b64encode(raw).decode()
    return said


async def _picture(server: Server, job: Job, number: int) -> dict[str, Any] | None:
    """With its address, which is the same for all who listen; None of one that is not kept any more."""
    drawing, image = job.drawings[number], job.images[number]
    if image is not None:
        raw = await asyncio.to_thread(encode, image, "png", facts_of(server, job, number))
        # Another one who listens may have been quicker.
        if job.images[number] is not None:
            job.names[number], job.images[number] = server.kept.put(raw), None
    name = job.names.get(number)
    if name is None or server.kept.get(name) is None:
        return None
    return {
        "picture": number, "url": f"/pictures/{name}", "seed": drawing.seed,
        "width": drawing.width, "height": drawing.height, "quality": drawing.quality,
    }  # fmt: skip


def _words(server: Server, job: Job) -> str | None:
    return None if job.error is None else server.words_of(job.error)


def _sse(kind: str, said: dict[str, Any]) -> str:
    return f"event: {kind}\ndata: {json.dumps(said)}\n\n"
