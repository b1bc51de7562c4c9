"""Automatic1111's API, as far as its clients need it: txt2img, img2img, progress, interrupt, samplers and models.

What changes a picture and is not there (hires fix, refiner, faces, tiling, scripts, variations) is refused and not left
out. Clients send a value for everything: those that ask for nothing pass, and so do those of masks that webui has if
nothing is said, although a mask is neither blurred nor drawn at a higher resolution here. `<lora:NAME:WEIGHT>` in a
prompt is a LoRA that the server has.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import re
import time
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from rocm_sd.errors import InvalidOption, Unsupported
from rocm_sd.serve.pictures import BadPicture, encode, from_base64
from rocm_sd.serve.requests import Asked, client_of, files_of, server_of, submit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rocm_sd.serve.jobs import Job

__all__ = ["router"]

router = APIRouter(prefix="/sdapi/v1", tags=["Automatic1111"])
_API = "a1111"

SAMPLERS = {
    "Euler a": "euler-a",
    "Euler": "euler",
    "DPM++ 2M": "dpm++2m",
    "DPM++ 2M Karras": "dpm++2m-karras",
    "UniPC": "unipc",
    "DDIM": "ddim",
    "PLMS": "pndm",
    "LCM": "lcm",
}
_KARRAS = {"karras"}
_AUTOMATIC = {"", "automatic", "uniform", "normal"}
# What asks for nothing, by field: webui's own defaults, those of its clients, and 0 and none where they mean the same.
_OFF: tuple[Any, ...] = (None, False, 0, "", [], {})
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "eta": (None, 0, 1), "s_churn": _OFF, "s_tmin": _OFF, "s_tmax": (*_OFF, math.inf), "s_noise": (None, 1),
    "s_min_uncond": _OFF, "refiner_checkpoint": (*_OFF, "None"), "seed_resize_from_h": (*_OFF, -1),
    "seed_resize_from_w": (*_OFF, -1), "firstphase_width": _OFF, "firstphase_height": _OFF,
    "initial_noise_multiplier": (None, 1), "resize_mode": _OFF, "inpainting_fill": (None, 0, 1),
    "mask_blur": (None, 0, 4), "mask_blur_x": (None, 0, 4), "mask_blur_y": (None, 0, 4),
}  # fmt: skip
_SETTINGS: dict[str, tuple[Any, ...]] = {
    "CLIP_stop_at_last_layers": (None, 1), "sd_vae": (*_OFF, "Automatic", "None"), "eta_noise_seed_delta": _OFF,
    "samples_format": (None, "png"), "samples_save": (None, True, False), "grid_save": (None, True, False),
}  # fmt: skip
_MODEL = "sd_model_checkpoint"
_NETWORK = re.compile(r"<(\w+):([^>]*)>")


class _Common(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())

    prompt: str = ""
    negative_prompt: str = ""
    seed: Annotated[int, Field(ge=-1, le=2**63 - 1)] = -1
    sampler_name: str | None = None
    sampler_index: str | None = None
    scheduler: str | None = None
    steps: Annotated[int, Field(ge=1, le=1000)] = 50
    cfg_scale: Annotated[float, Field(ge=0, le=100)] = 7.0
    width: Annotated[int, Field(ge=8, le=65536)] = 512
    height: Annotated[int, Field(ge=8, le=65536)] = 512
    batch_size: Annotated[int, Field(ge=1, le=64)] = 1
    n_iter: Annotated[int, Field(ge=1, le=64)] = 1
    send_images: bool = True
    override_settings: dict[str, Any] | None = None
    # Refused where they would change the picture.
    enable_hr: bool = False
    restore_faces: bool | None = False
    tiling: bool | None = False
    subseed_strength: float = 0
    script_name: str | None = None
    styles: list[str] | None = None
    alwayson_scripts: dict[str, Any] | None = None

    def unsupported(self) -> Iterator[str]:
        for name in ("enable_hr", "restore_faces", "tiling", "subseed_strength", "script_name", "styles"):
            if getattr(self, name):
                yield name
        yield from (f"the script {name}" for name in self.alwayson_scripts or {})
        yield from _beyond(self.model_extra or {}, _NEUTRAL)
        settings = {name: value for name, value in (self.override_settings or {}).items() if name != _MODEL}
        yield from (name for name in settings if name not in _SETTINGS)
        yield from _beyond(settings, _SETTINGS)
        if (self.model_extra or {}).get("eta") == 0 and "a" in (self.sampler or "").lower().split():
            yield f"eta 0 with {self.sampler}"
        yield from (f"{found[0]} in a negative prompt" for found in _NETWORK.finditer(self.negative_prompt))

    @property
    def sampler(self) -> str | None:
        return self.sampler_name or self.sampler_index

    def asked(self, **more: Any) -> Asked:
        refused = next(self.unsupported(), None)
        if refused is not None:
            raise Unsupported("This server", refused, hint="Leave it out of the request.")
        model = (self.override_settings or {}).get(_MODEL)
        prompt, loras = _with_loras(self.prompt)
        return Asked(
            prompt, self.negative_prompt, None if model is None else str(model), self.batch_size * self.n_iter,
            self.steps, self.cfg_scale, None if self.seed == -1 else self.seed, self.width, self.height,
            _sampler(self.sampler, self.scheduler), loras=loras, **more,
        )  # fmt: skip


class TextToImage(_Common):
    """What /sdapi/v1/txt2img takes."""


class ImageToImage(_Common):
    """What /sdapi/v1/img2img takes: pictures as base64."""

    init_images: Annotated[list[str], Field(max_length=16)] | None = None
    mask: str | None = None
    denoising_strength: Annotated[float, Field(gt=0, le=1)] = 0.75
    inpainting_mask_invert: Annotated[int, Field(ge=0, le=1)] = 0
    include_init_images: bool = False


class Drawn(BaseModel):
    images: list[str] | None
    parameters: dict[str, Any]
    info: str


def _beyond(given: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> Iterator[str]:
    for name, passes in neutral.items():
        if given.get(name) not in passes:
            yield f"{name} {ascii(given[name])[:40]}"


def _with_loras(prompt: str) -> tuple[str, tuple[tuple[str, float], ...]]:
    """The prompt without its `<lora:NAME:WEIGHT>`, and what they say."""
    found: dict[str, float] = {}
    for kind, rest in _NETWORK.findall(prompt):
        name, _, weight = rest.partition(":")
        try:
            number = float(weight or 1)
        except ValueError:
            number = math.nan
        if kind != "lora" or name in found or not -10 <= number <= 10:
            hint = "It takes <lora:NAME:WEIGHT>, each name once, with a weight from -10 to 10."
            raise InvalidOption("prompt", f"<{kind}:{rest}>", [], hint=hint)
        found[name] = number
    return (_NETWORK.sub("", prompt).strip() if found else prompt), tuple(sorted(found.items()))


def _sampler(name: str | None, scheduler: str | None) -> str | None:
    if name is None:
        if (scheduler or "").lower() not in _AUTOMATIC:
            raise InvalidOption("scheduler", scheduler, ["Automatic"], hint="Give a sampler with it.")
        return None
    known = {each.lower(): short for each, short in SAMPLERS.items()}
    found = known.get(name.lower())
    if found is None:
        raise InvalidOption("sampler", name, list(SAMPLERS))
    asked = (scheduler or "").lower()
    if found == "dpm++2m" and asked in _KARRAS:
        return "dpm++2m-karras"
    if asked not in _AUTOMATIC and not (asked in _KARRAS and found.endswith("karras")):
        raise InvalidOption("scheduler", scheduler, ["Automatic", "Karras"])
    return found


@router.post("/txt2img", response_model=Drawn)
async def txt2img(request: Request, body: TextToImage) -> Drawn:
    return await _drawn(request, body, body.asked())


@router.post("/img2img", response_model=Drawn)
async def img2img(request: Request, body: ImageToImage) -> Drawn:
    limits = server_of(request).config.limits
    if not body.init_images or len(body.init_images) != 1:
        raise BadPicture(f"{len(body.init_images or ())} pictures were sent: it takes one.", hint="Send init_images.")
    (text,) = body.init_images

    def asked() -> Asked:
        image, mask = from_base64(text, limits), None
        if body.mask:
            mask = from_base64(body.mask, limits).convert("L")
            if body.inpainting_mask_invert:
                mask = mask.point(lambda value: 255 - value)
        return body.asked(image=image, mask=mask, strength=body.denoising_strength)

    return await _drawn(request, body, asked)


async def _drawn(request: Request, body: _Common, asked: Asked | Callable[[], Asked]) -> Drawn:
    job = await submit(request, asked, _API, preview_every=max(1, body.steps // 8))
    files = await files_of(request, job)
    pictures = [base64.b64encode(raw).decode() for raw in files] if body.send_images else None
    # Pictures are not sent back, nor is what nobody here knows.
    parameters = body.model_dump(include={*type(body).model_fields} - {"init_images", "mask"})
    return Drawn(images=pictures, parameters=parameters, info=json.dumps(_info(body, job)))


def _info(body: _Common, job: Job) -> dict[str, Any]:
    seeds = [drawing.seed for drawing in job.drawings]
    first = job.drawings[0]
    sampler = body.sampler or "Automatic"
    texts = [
        f"{body.prompt}\nNegative prompt: {first.negative}\nSteps: {first.steps}, Sampler: {sampler}, "
        f"CFG scale: {first.guidance:g}, Seed: {seed}, Size: {first.width}x{first.height}, Model: {job.model}"
        for seed in seeds
    ]
    return {
        "prompt": body.prompt, "all_prompts": [body.prompt] * len(seeds), "negative_prompt": first.negative,
        "all_negative_prompts": [first.negative] * len(seeds), "seed": seeds[0], "all_seeds": seeds,
        "width": first.width, "height": first.height, "sampler_name": sampler, "cfg_scale": first.guidance,
        "steps": first.steps, "batch_size": body.batch_size, "sd_model_name": job.model, "infotexts": texts,
        "index_of_first_image": 0, "job_timestamp": "", "styles": [], "extra_generation_params": {},
    }  # fmt: skip


def _own_jobs(request: Request) -> list[Job]:
    return server_of(request).ready.jobs_of(client_of(request), _API)


@router.get("/progress")
async def progress(request: Request, skip_current_image: bool = False) -> dict[str, Any]:
    """Of this client's oldest request that is not over."""
    jobs = _own_jobs(request)
    state = {
        "skipped": False, "interrupted": False, "job": "", "job_count": 0, "job_timestamp": "0", "job_no": 0,
        "sampling_step": 0, "sampling_steps": 0,
    }  # fmt: skip
    if not jobs:
        return {"progress": 0.0, "eta_relative": 0.0, "state": state, "current_image": None, "textinfo": None}
    job = jobs[0]
    state |= {
        "job": job.id, "job_count": len(jobs), "sampling_step": max(job.steps),
        "sampling_steps": job.drawings[0].drawn_steps,
    }  # fmt: skip
    left = 0.0
    if job.started is not None and 0 < job.progress < 1:
        left = (time.monotonic() - job.started) * (1 - job.progress) / job.progress
    preview, shown = job.preview, None
    if preview is not None and not skip_current_image:
        shown = base64.b64encode(await asyncio.to_thread(encode, preview)).decode()
    return {
        "progress": round(job.progress, 4), "eta_relative": round(left, 2), "state": state, "current_image": shown,
        "textinfo": "waiting" if job.state == "queued" else None,
    }  # fmt: skip


@router.post("/interrupt")
async def interrupt(request: Request) -> dict[str, Any]:
    """All of this client's requests of this API."""
    for job in _own_jobs(request):
        server_of(request).ready.cancel(job)
    return {}


@router.get("/samplers")
async def samplers() -> list[dict[str, Any]]:
    return [{"name": name, "aliases": [short], "options": {}} for name, short in SAMPLERS.items()]


@router.get("/schedulers")
async def schedulers() -> list[dict[str, Any]]:
    common = {"aliases": None, "default_rho": -1, "need_inner_model": False}
    return [{"name": name.lower(), "label": name, **common} for name in ("Automatic", "Karras")]


@router.get("/sd-models")
async def sd_models(request: Request) -> list[dict[str, Any]]:
    known = server_of(request).ready.drawer.models()
    return [
        {"title": name, "model_name": name, "hash": None, "sha256": None, "filename": name, "config": None}
        for name in known
    ]


@router.get("/options")
async def options(request: Request) -> dict[str, Any]:
    return {"sd_model_checkpoint": next(iter(server_of(request).ready.drawer.models()))}
