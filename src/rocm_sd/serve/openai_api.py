"""OpenAI's Images API: /v1/images/generations and /v1/images/edits, /v1/models.

Their `quality` says how good a picture is to be: auto, standard, hd and high are exact pictures; medium and low are the
budgets "high" and "balanced", where the model has them. Beyond the API, a request may have negative_prompt, steps,
guidance, seed, scheduler, strength and lora.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, File, Form, Request, UploadFile
from fastapi.responses import StreamingResponse
from PIL import Image as Images
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from rocm_sd.errors import InvalidOption
from rocm_sd.serve.pictures import FORMATS, BadPicture, encode, read
from rocm_sd.serve.requests import Asked, facts_of, files_of, prepared, server_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from PIL.Image import Image
    from starlette.types import Receive, Scope, Send

    from rocm_sd.serve.jobs import Event, Job

__all__ = ["router"]

router = APIRouter(prefix="/v1", tags=["OpenAI"])

_QUALITIES = {"medium": "high", "low": "balanced", "balanced": "balanced"}
Quality = Literal["auto", "standard", "hd", "high", "medium", "low", "exact", "balanced"]
Format = Literal["png", "jpeg", "webp"]
Background = Literal["auto", "opaque", "transparent"]
Loras = dict[str, Annotated[float, Field(ge=-10, le=10)]]
_LORAS: TypeAdapter[dict[str, float]] = TypeAdapter(Loras)
_Count = Annotated[int, Field(ge=1, le=10)]
_Steps = Annotated[int, Field(ge=1, le=1000)]
_Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]


class Generation(BaseModel):
    """What /v1/images/generations takes. Fields of other models of OpenAI's are taken and do nothing."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    prompt: Annotated[str, Field(min_length=1)]
    model: str | None = None
    n: _Count | None = 1
    size: str | None = "auto"
    quality: Quality | None = "auto"
    response_format: Literal["url", "b64_json"] | None = None
    output_format: Format | None = "png"
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = 90
    background: Background | None = None
    stream: bool | None = False
    partial_images: Annotated[int, Field(ge=0, le=3)] | None = 0
    user: str | None = None
    negative_prompt: str = ""
    steps: _Steps = 20
    guidance: Annotated[float, Field(ge=0, le=100)] | None = None
    seed: _Seed | None = None
    scheduler: str | None = None
    lora: Loras = {}

    @property
    def compression(self) -> int:
        return 90 if self.output_compression is None else self.output_compression

    def asked(self, **more: Any) -> Asked:
        if self.background == "transparent":
            raise InvalidOption("background", "transparent", ["auto", "opaque"])
        width, height = size_of(self.size)
        quality = _QUALITIES.get(self.quality or "auto", "exact")
        return Asked(
            self.prompt, self.negative_prompt, self.model, self.n or 1, self.steps, self.guidance, self.seed,
            width, height, self.scheduler, quality, loras=tuple(sorted(self.lora.items())), **more,
        )  # fmt: skip


class Picture(BaseModel):
    b64_json: str | None = None
    url: str | None = None
    revised_prompt: str | None = None


class Pictures(BaseModel):
    created: int
    data: list[Picture]
    background: str = "opaque"
    output_format: str = "png"
    quality: str | None = None
    size: str | None = None


def size_of(text: str | None) -> tuple[int | None, int | None]:
    """Numbers of a text such as "512x768"; "auto" is the model's own."""
    if text in {None, "auto", ""}:
        return None, None
    width, by, height = str(text).partition("x")
    if not by or not all(part.isascii() and part.isdecimal() and len(part) <= 5 for part in (width, height)):
        raise InvalidOption("size", text, [], hint='It takes "auto" or WIDTHxHEIGHT, such as "512x512".')
    return int(width), int(height)


@router.post("/images/generations", response_model=Pictures)
async def generations(request: Request, body: Generation) -> Any:
    """Pictures from a text."""
    return await _drawn(request, body, "openai generations", body.asked())


@router.post("/images/edits", response_model=Pictures)
async def edits(
    request: Request,
    prompt: Annotated[str, Form(min_length=1)],
    image: Annotated[list[UploadFile] | None, File()] = None,
    images: Annotated[list[UploadFile] | None, File(alias="image[]")] = None,
    mask: Annotated[UploadFile | None, File()] = None,
    model: Annotated[str | None, Form()] = None,
    n: Annotated[int, Form(ge=1, le=10)] = 1,
    size: Annotated[str | None, Form()] = None,
    quality: Annotated[Quality | None, Form()] = None,
    response_format: Annotated[Literal["url", "b64_json"] | None, Form()] = None,
    output_format: Annotated[Format | None, Form()] = None,
    output_compression: Annotated[int | None, Form(ge=0, le=100)] = None,
    stream: Annotated[bool, Form()] = False,
    partial_images: Annotated[int, Form(ge=0, le=3)] = 0,
    negative_prompt: Annotated[str, Form()] = "",
    steps: Annotated[int, Form(ge=1, le=1000)] = 20,
    guidance: Annotated[float | None, Form(ge=0, le=100)] = None,
    seed: Annotated[int | None, Form(ge=0, le=2**63 - 1)] = None,
    scheduler: Annotated[str | None, Form()] = None,
    strength: Annotated[float, Form(gt=0, le=1)] = 0.75,
    background: Annotated[Background | None, Form()] = None,
    lora: Annotated[str | None, Form(description='As JSON, such as {"name": 0.8}.')] = None,
) -> Any:
    """A picture drawn anew: where the mask, or the picture itself, is transparent; or all of it, by `strength`."""
    limits = server_of(request).config.limits
    given = [*(image or ()), *(images or ())]
    if len(given) != 1:
        raise BadPicture(f"{len(given)} pictures were sent: it takes one.", hint="Send one, as `image`.")
    source, drawn_anew = await given[0].read(), None if mask is None else await mask.read()
    body = Generation(
        prompt=prompt, model=model, n=n, size=size, quality=quality, response_format=response_format,
        output_format=output_format, output_compression=output_compression, stream=stream,
        partial_images=partial_images, negative_prompt=negative_prompt, steps=steps, guidance=guidance, seed=seed,
        scheduler=scheduler, background=background, lora=_loras(lora, await request.form()),
    )  # fmt: skip

    def asked() -> Asked:
        image = read(source, limits)
        hole = _transparent(image, False) if drawn_anew is None else _transparent(read(drawn_anew, limits), True)
        return body.asked(image=image, mask=hole, strength=strength)

    return await _drawn(request, body, "openai edits", asked)


def _loras(text: str | None, form: Mapping[str, Any]) -> dict[str, float]:
    """Of JSON; or of fields such as `lora[name]`, which is how OpenAI's client sends it."""
    found = {name[5:-1]: value for name, value in form.items() if name.startswith("lora[") and name.endswith("]")}
    try:
        return _LORAS.validate_json(text) if text else _LORAS.validate_python(found)
    except ValidationError as error:
        hint = 'It takes JSON, such as {"name": 0.8}, with numbers from -10 to 10.'
        raise InvalidOption("lora", text or next(iter(found)), [], hint=hint) from error


def _transparent(image: Image, asked_for: bool) -> Image | None:
    """White where it is transparent; None of a picture that has no such part, unless it was sent as a mask."""
    if image.mode not in {"RGBA", "LA", "PA"} and "transparency" not in image.info:
        if not asked_for:
            return None
        raise BadPicture(
            "The mask has no transparent part.", hint="It is transparent where the picture is to be drawn anew."
        )
    alpha = image.convert("RGBA").getchannel("A")
    if not asked_for and alpha.getextrema()[0] == 255:
        return None
    return alpha.point(lambda value: 255 if value < 128 else 0)


@router.get("/models")
async def list_models(request: Request) -> dict[str, Any]:
    known = server_of(request).ready.drawer.models()
    return {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "rocm-sd"} for name in known]}


async def _drawn(request: Request, body: Generation, api: str, asked: Asked | Callable[[], Asked]) -> Any:
    # So that the last of the partial pictures is still one.
    every = max(1, body.steps // (body.partial_images + 1)) if body.stream and body.partial_images else 0
    job = await prepared(request, asked, api, preview_every=every)
    queue = job.listen() if body.stream else None
    server_of(request).ready.submit(job)
    if queue is not None:
        kind = "image_edit" if api.endswith("edits") else "image_generation"
        return _Stream(_events(request, body, job, queue, kind), partial(_leave, request, job, queue))
    files = await files_of(request, job, body.output_format or "png", body.compression)
    return Pictures(created=int(time.time()), data=[_picture(request, body, raw) for raw in files], **_said(body, job))


def _picture(request: Request, body: Generation, raw: bytes) -> Picture:
    if body.response_format != "url":
        return Picture(b64_json=base64.b64encode(raw).decode())
    name = server_of(request).kept.put(raw, body.output_format or "png")
    return Picture(url=str(request.url_for("picture", name=name)))


def _said(body: Generation, job: Job) -> dict[str, Any]:
    drawing = job.drawings[0]
    size = f"{drawing.width}x{drawing.height}"
    return {"output_format": body.output_format or "png", "quality": body.quality or "auto", "size": size}


async def _events(
    request: Request, body: Generation, job: Job, queue: asyncio.Queue[Event], kind: str
) -> AsyncIterator[str]:
    server, shown = server_of(request), 0
    media = body.output_format or "png"
    assert media in FORMATS
    # Until it is told, which comes last: a job is over a moment before its last picture is in the queue.
    while True:
        event = await queue.get()
        common = {**_said(body, job), "background": "opaque", "created_at": int(time.time())}
        if event.kind == "step" and event.image is not None and shown < (body.partial_images or 0):
            raw = await asyncio.to_thread(encode, event.image, media)
            yield _sse(f"{kind}.partial_image", raw, common | {"partial_image_index": shown})
            shown += 1
        elif event.kind == "picture" and event.image is not None:
            facts = facts_of(server, job, event.picture)
            raw = await asyncio.to_thread(encode, event.image, media, facts, body.compression)
            none = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
            usage = none | {"input_tokens_details": {"image_tokens": 0, "text_tokens": 0}}
            yield _sse(f"{kind}.completed", raw, common | {"usage": usage})
        elif event.kind == "over":
            break
    if job.error is not None:
        said = {"type": "error", "error": {"message": server.words_of(job.error), "type": job.state}}
        yield f"event: error\ndata: {json.dumps(said)}\n\n"


class _Stream(StreamingResponse):
    """`leave` is called at its end, also where the client is gone before the first event."""

    def __init__(self, events: AsyncIterator[str], leave: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()


def _leave(request: Request, job: Job, queue: asyncio.Queue[Event]) -> None:
    job.leave(queue)
    job.let_go_of_images()
    if not job.is_over:
        server_of(request).ready.cancel(job)


def _sse(kind: str, raw: bytes, more: dict[str, Any]) -> str:
    said = {"type": kind, "b64_json": base64.b64encode(raw).decode(), **more}
    return f"event: {kind}\ndata: {json.dumps(said)}\n\n"


# Pillow registers its formats at the first use: not while a client waits.
Images.preinit()
