"""One loaded pipeline for many callers at once: texts, steps and decodes of their pictures are run together.

Each picture is drawn on its caller's thread, by Diffusers' own loop over a pipeline of its own, which shares the models
and has its own scheduler. The models' calls meet in the engine (rocm_sd.engine.batching).
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from diffusers import AutoPipelineForImage2Image, AutoPipelineForInpainting

from rocm_sd.engine import EVERYTHING, graphs_wanted, optimize_with, report
from rocm_sd.engine.approximation import known
from rocm_sd.engine.batching import Gathering
from rocm_sd.engine.capture import running
from rocm_sd.engine.schedule import hook
from rocm_sd.errors import InvalidOption, Unsupported
from rocm_sd.integrations.diffusers.generation import SCHEDULERS, Request, require_drawable, scheduler_like
from rocm_sd.integrations.diffusers.previewing import Preview

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from PIL.Image import Image

    from rocm_sd.engine.batching import StepBatcher

__all__ = ["UNCALIBRATED", "Drawing", "SharedPipeline", "load_loras", "use_loras"]

# What was measured counts, and nothing is measured while somebody waits.
UNCALIBRATED = replace(EVERYTHING, calibrated=False)

# Pictures of a decode, texts of an encode: both are small beside the steps.
_MOST_DECODED, _MOST_TEXTS = 4, 16
_TEXTS_KEPT = 256
_LOOK_S = 0.1
# What `encode_prompt` gives first, and third, by what a pipeline's call takes.
_EMBEDDINGS = ("prompt_embeds", "pooled_prompt_embeds")


@dataclass(frozen=True)
class Drawing(Request):
    """A request for one picture. With an image it is image to image, with a mask as well it is inpainting: white is
    drawn anew. `strength`: how much of the image is drawn anew, of 1. `loras`: names and weights. `preview_every`:
    after how many steps somebody wants to look, 0 for never.
    """

    scheduler: str | None = None
    quality: str = "exact"
    image: Image | None = None
    mask: Image | None = None
    strength: float = 0.75
    loras: tuple[tuple[str, float], ...] = ()
    preview_every: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch != 1:
            raise Unsupported("A drawing", f"{self.batch} pictures: it is of one")
        if not 0 < self.strength <= 1:
            raise InvalidOption("strength", self.strength, [], hint="It takes more than 0, and 1 at most.")
        if self.drawn_steps < 1:
            hint = "Give more steps, or more strength."
            raise Unsupported(
                "Image to image", f"{self.steps} steps of strength {self.strength}: that is none", hint=hint
            )
        if self.mask is not None and self.image is None:
            raise Unsupported("Inpainting", "a mask without an image", hint="Give the image that it is of.")
        if self.loras and self.quality != "exact":
            # What a quality leaves out was measured for the model as it is.
            raise Unsupported(f"Quality {self.quality}", "LoRAs", hint="Ask for exact, or leave the LoRAs out.")
        if self.scheduler is not None and self.scheduler not in SCHEDULERS:
            raise InvalidOption("scheduler", self.scheduler, list(SCHEDULERS))

    @property
    def task(self) -> str:
        return "text" if self.image is None else "image" if self.mask is None else "inpaint"

    @property
    def drawn_steps(self) -> int:
        """From an image only its last ones are drawn."""
        return self.steps if self.image is None else min(self.steps, int(self.steps * self.strength))

    def wants_preview(self, step: int) -> bool:
        """After the last step there is the picture itself."""
        return bool(self.preview_every) and step % self.preview_every == 0 and step < self.drawn_steps


class SharedPipeline:
    """`pipe` is optimised by its owner, and drawn with by nobody else meanwhile. `qualities`: those that may be asked
    for beside exact; what was not measured for the model is left out, and `why_not` says so. `on_loras`: called before
    the UNet's first call with other LoRAs. `name`: what the batcher calls the UNet. `on_step(n, preview)` of `draw` is
    called after the n-th step, and may ask for a preview.
    """

    def __init__(
        self,
        pipe: Any,
        batcher: StepBatcher,
        loras: Mapping[str, str] | None = None,
        qualities: Sequence[str] = (),
        on_loras: Callable[[tuple[tuple[str, float], ...]], None] = lambda _loras: None,
        name: str | None = None,
    ) -> None:
        if not hasattr(pipe, "unet") or not hasattr(pipe, "encode_prompt"):
            kinds = "Stable Diffusion 1.x, 2.x and SDXL"
            raise Unsupported("Serving", f"a {type(pipe).__name__}: it takes {kinds}")
        self.pipe = pipe
        self._batcher = batcher
        self._preview = Preview(pipe)
        self._tasks = {
            "text": pipe,
            "image": AutoPipelineForImage2Image.from_pipe(pipe),
            "inpaint": AutoPipelineForInpainting.from_pipe(pipe),
        }
        for each in self._tasks.values():
            each.set_progress_bar_config(disable=True)
        # The VAE's own dtype is changed around its calls by some pipelines.
        self._vae = threading.Lock()
        self.loras = load_loras(pipe, loras or {})
        self._on_loras = on_loras
        self._kept: OrderedDict[Any, tuple[torch.Tensor, ...]] = OrderedDict()
        self._texts: Gathering[Any, tuple[torch.Tensor, ...]] = Gathering(
            "rocm-sd texts", self._encode, most=_MOST_TEXTS
        )
        self._decodes: Gathering[torch.Tensor, Any] = Gathering("rocm-sd decodes", self._decode, most=_MOST_DECODED)
        self._stream: Any = torch.cuda.Stream(pipe.device) if pipe.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        # One that leaves steps out remembers the steps before: a picture at a time. What picks its steps lies inside of
        # what shares them, so it comes first.
        self._qualities = {
            (task, quality): self._of_quality(task, quality)
            for quality in qualities
            if quality != "exact" and self._why_not(quality) is None
            for task in self._tasks
        }
        self._one_at_a_time = {quality: threading.Lock() for _, quality in self._qualities}
        self._release = batcher.take(pipe.unet, self._use_loras if self.loras else None, name)

    def close(self) -> None:
        self._release()
        self._texts.close()
        self._decodes.close()

    def why_not(self, quality: str) -> str | None:
        """Why the quality cannot be had here, in words."""
        if quality == "exact" or quality in self._one_at_a_time:
            return None
        return self._why_not(quality) or "it was not asked for when the pipeline was shared"

    def _why_not(self, quality: str) -> str | None:
        settings = known(self.pipe.unet, quality)
        if not settings:
            return f"nothing was measured for this model that quality {quality} allows"
        others = {name for one in settings for name in one.approximation.to_dict()} - {"skipping"}
        if others:
            return f"its setting has {', '.join(sorted(others))}, which would change exact pictures of others, too"
        return None

    def draw(
        self,
        drawing: Drawing,
        on_step: Callable[[int, Callable[[], Image]], None] | None = None,
        stop: Callable[[], BaseException | None] = lambda: None,
    ) -> Image:
        """`stop()`: an error that ends it at the next step, or None."""
        unknown = [name for name, _ in drawing.loras if name not in self.loras]
        if unknown:
            raise InvalidOption("lora", unknown[0], sorted(self.loras))
        reason = self.why_not(drawing.quality)
        if reason is not None:
            raise Unsupported(f"Quality {drawing.quality}", f"this model here: {reason}")
        with self._own_pipeline(drawing, stop) as pipe:
            require_drawable(pipe, drawing)
            named = self._arguments(pipe, drawing)
            _raise(stop())
            group = drawing.loras if drawing.quality == "exact" else None
            with self._batcher.member(group, stop) as member:

                def after_step(_pipe: Any, step: int, _time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
                    if step + 1 == _pipe.num_timesteps:
                        self._batcher.rest(member)
                    if on_step is not None:
                        on_step(step + 1, lambda: self._previewed(tensors["latents"]))
                    return tensors

                latents = pipe(**named, output_type="latent", callback_on_step_end=after_step).images
        _raise(stop())
        image: Image = self._decodes.ask(latents, (latents.shape[1:], latents.dtype))
        return image

    @contextmanager
    def _own_pipeline(self, drawing: Drawing, stop: Callable[[], BaseException | None]) -> Iterator[Any]:
        if drawing.quality != "exact":
            with _turn(self._one_at_a_time[drawing.quality], stop):
                pipe = self._qualities[drawing.task, drawing.quality]
                pipe.scheduler = scheduler_like(self.pipe.scheduler, drawing.scheduler)
                yield pipe
            return
        pipe = copy.copy(self._tasks[drawing.task])
        pipe.scheduler = scheduler_like(self.pipe.scheduler, drawing.scheduler)
        if drawing.image is not None:
            for name in ("prepare_latents", "prepare_mask_latents"):
                if hasattr(pipe, name):
                    setattr(pipe, name, self._alone_with_the_vae(getattr(pipe, name)))
        hooked = hook(pipe.scheduler) if graphs_wanted(pipe.device) else None
        try:
            yield pipe
        finally:
            if hooked is not None:
                hooked.unhook()

    def _of_quality(self, task: str, quality: str) -> Any:
        pipe = copy.copy(self._tasks[task])
        pipe.scheduler = scheduler_like(self.pipe.scheduler)
        return optimize_with(pipe, "auto", quality, UNCALIBRATED)

    def approximations(self, quality: str) -> tuple[str, ...]:
        """What the report says of pictures in that quality so far."""
        return tuple(
            note for (_, own), pipe in self._qualities.items() if own == quality for note in report(pipe).approximations
        )

    def _arguments(self, pipe: Any, drawing: Drawing) -> dict[str, Any]:
        named: dict[str, Any] = {
            "num_inference_steps": drawing.steps,
            "guidance_scale": drawing.guidance,
            "generator": torch.Generator("cpu").manual_seed(drawing.seed),
        }
        guided = drawing.guidance > 1 and pipe.unet.config.time_cond_proj_dim is None
        for prefix, text in (("", drawing.prompt), *((("negative_", drawing.negative),) if guided else ())):
            parts = self._text(text, drawing.loras)
            named |= {f"{prefix}{name}": part for name, part in zip(_EMBEDDINGS[: len(parts)], parts, strict=True)}
        if drawing.image is None:
            return named | {"width": drawing.width, "height": drawing.height}
        size = drawing.width or drawing.image.width, drawing.height or drawing.image.height
        named |= {"image": drawing.image.convert("RGB").resize(size), "strength": drawing.strength}
        if drawing.mask is not None:
            named |= {"mask_image": drawing.mask.convert("L").resize(size), "width": size[0], "height": size[1]}
        return named

    def _text(self, text: str, loras: tuple[tuple[str, float], ...]) -> tuple[torch.Tensor, ...]:
        found = self._kept.get((text, loras))
        return self._texts.ask((text, loras), loras) if found is None else found

    @torch.no_grad()
    def _encode(self, asked: list[tuple[str, Any]]) -> list[tuple[torch.Tensor, ...]]:
        """Texts of one set of LoRAs. Those of late are kept: most pictures share what they are not to show."""
        new = list(dict.fromkeys(one for one in asked if one not in self._kept))
        if new:
            if self.loras:
                self._use_loras_for_texts(new[0][1])
            with running(self.pipe.device), _on(self._stream):
                given = self.pipe.encode_prompt(
                    prompt=[text for text, _ in new],
                    device=self.pipe.device,
                    num_images_per_prompt=1,
                    do_classifier_free_guidance=False,
                )
            for number, one in enumerate(new):
                self._kept[one] = tuple(part[number : number + 1] for part in given[::2])
        answers = []
        for one in asked:
            self._kept.move_to_end(one)
            answers.append(self._kept[one])
        while len(self._kept) > _TEXTS_KEPT:
            self._kept.popitem(last=False)
        return answers

    def _previewed(self, latents: torch.Tensor) -> Image:
        with running(self.pipe.device):
            return self._preview(latents)

    @torch.no_grad()
    def _decode(self, latents: list[torch.Tensor]) -> list[Image]:
        """As the pipelines do it."""
        pipe, vae = self.pipe, self.pipe.vae
        with self._vae, running(pipe.device), _on(self._stream, *latents):
            z = torch.cat(latents)
            upcast = hasattr(pipe, "upcast_vae") and vae.dtype == torch.float16 and vae.config.force_upcast
            if upcast:
                pipe.upcast_vae()
                z = z.to(next(vae.post_quant_conv.parameters()).dtype)
            mean, deviation = (getattr(vae.config, name, None) for name in ("latents_mean", "latents_std"))
            if mean is not None and deviation is not None:
                mean, deviation = (torch.tensor(each).view(1, -1, 1, 1).to(z) for each in (mean, deviation))
                z = z * deviation / vae.config.scaling_factor + mean
            else:
                z = z / vae.config.scaling_factor
            pictures = vae.decode(z, return_dict=False)[0]
            if upcast:
                vae.to(dtype=torch.float16)
            unsafe = None
            if getattr(pipe, "safety_checker", None) is not None:
                pictures, unsafe = pipe.run_safety_checker(pictures, pipe.device, latents[0].dtype)
            if getattr(pipe, "watermark", None) is not None:
                pictures = pipe.watermark.apply_watermark(pictures)
            shown = [True] * len(z) if unsafe is None else [not one for one in unsafe]
            images: list[Image] = pipe.image_processor.postprocess(pictures, output_type="pil", do_denormalize=shown)
        return images

    def _alone_with_the_vae(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def alone(*args: Any, **kwargs: Any) -> Any:
            with self._vae, running(self.pipe.device):
                return method(*args, **kwargs)

        return alone

    def _use_loras(self, loras: Any) -> None:
        self._on_loras(loras or ())
        use_loras(self.pipe.unet, loras or ())

    def _use_loras_for_texts(self, loras: tuple[tuple[str, float], ...]) -> None:
        for name in ("text_encoder", "text_encoder_2"):
            encoder = getattr(self.pipe, name, None)
            if encoder is not None and getattr(encoder, "peft_config", None):
                use_loras(encoder, [(lora, weight) for lora, weight in loras if lora in encoder.peft_config])


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error


@contextmanager
def _turn(lock: threading.Lock, stop: Callable[[], BaseException | None]) -> Iterator[None]:
    """Whoever is to stop does not wait for it any longer."""
    while not lock.acquire(timeout=_LOOK_S):
        _raise(stop())
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _on(stream: Any, *tensors: torch.Tensor) -> Iterator[None]:
    """On a stream of its own, beside the steps; at the end what was computed there is ready."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    for tensor in tensors:
        tensor.record_stream(stream)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def load_loras(pipe: Any, loras: Mapping[str, str]) -> frozenset[str]:
    """Have these adapters loaded from their files, none of them in use; those that are there stay. Their names."""
    there = {name for part in pipe.components.values() for name in getattr(part, "peft_config", None) or ()}
    for name, path in loras.items():
        if name not in there:
            pipe.load_lora_weights(path, adapter_name=name)
    if loras:
        pipe.disable_lora()
    return frozenset(loras)


def use_loras(model: Any, loras: Any) -> None:
    """Of the adapters that a model has, these with these weights, and no other."""
    from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: PLC0415 -- whoever has LoRAs has it

    names = [name for name, _ in loras]
    layers: list[Any] = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        own = [name for name in names if name in layer.lora_A]
        layer.enable_adapters(enabled=bool(own))
        if own:
            layer.set_adapter(own)
            for name, weight in loras:
                if name in own:
                    layer.set_scale(name, weight)
