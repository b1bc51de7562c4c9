"""WholePicture: one model of a whole picture, called as Diffusers' text-to-image pipeline is."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.stable_diffusion.pipeline_output import StableDiffusionPipelineOutput
from diffusers.utils.torch_utils import randn_tensor

from rocm_sd.errors import InvalidOption, Unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rocm_sd.onnx.sessions import Session

__all__ = ["WholePicture"]

log = logging.getLogger("rocm_sd")
_PARTS_HINT = "Export the model without --single."


class WholePicture:
    """`facts`: of the manifest: `channels`, `scale`, `side`, `dtype`, `guidance` and `train_steps`.

    Its scheduler is DDIM, and stands in the model. Noise is drawn as Diffusers draws it: a seed gives the same picture.
    """

    def __init__(self, session: Session, tokenizers: Sequence[Any], facts: Mapping[str, Any]) -> None:
        self.session, self.tokenizers, self.facts = session, tokenizers, facts
        self._images = VaeImageProcessor(vae_scale_factor=facts["scale"])

    def __call__(
        self,
        prompt: str | list[str],
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 50,
        guidance_scale: float | None = None,
        negative_prompt: str | list[str] | None = None,
        num_images_per_prompt: int = 1,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: torch.Tensor | None = None,
        output_type: str = "pil",
        *,
        return_dict: bool = True,
        **others: Any,
    ) -> Any:
        asked = [name for name, value in others.items() if value is not None]
        if asked:
            raise Unsupported("One model of a whole picture", asked[0], hint=f"Leave it out. {_PARTS_HINT}")
        most = self.facts["train_steps"]
        if not 1 <= num_inference_steps <= most:
            raise InvalidOption("num_inference_steps", num_inference_steps, [], hint=f"Give 1 to {most}.")
        texts = [prompt] if isinstance(prompt, str) else list(prompt)
        negative = [negative_prompt or ""] * len(texts) if not isinstance(negative_prompt, list) else negative_prompt
        if len(negative) != len(texts):
            raise InvalidOption("negative_prompt", len(negative), [], hint=f"Give {len(texts)}, one a prompt.")
        noise = self._noise(len(texts) * num_images_per_prompt, height, width, generator, latents)
        guidance = self.facts["guidance"] if guidance_scale is None else guidance_scale
        given = {"noise": noise, "steps": torch.tensor(num_inference_steps), "guidance": torch.tensor(float(guidance))}
        for tokenizer, end in zip(self.tokenizers, ("", "_2"), strict=False):
            given[f"input_ids{end}"] = _ids(tokenizer, texts, num_images_per_prompt)
            given[f"negative_ids{end}"] = _ids(tokenizer, negative, num_images_per_prompt)
        found = self.session(given, ["images"])["images"]
        images = found
        if output_type != "pt":
            images = self._images.postprocess(found, output_type, do_denormalize=[False] * len(found))
        return StableDiffusionPipelineOutput(images, None) if return_dict else (images, None)

    def _noise(
        self, count: int, height: int | None, width: int | None, generator: Any, latents: torch.Tensor | None
    ) -> torch.Tensor:
        scale, side, dtype = self.facts["scale"], self.facts["side"], getattr(torch, self.facts["dtype"])
        sizes = {name: side if value is None else value for name, value in (("height", height), ("width", width))}
        for name, value in sizes.items():
            if value <= 0 or value % 8:
                raise InvalidOption(name, value, [], hint="Give a multiple of 8.")
        shape = (count, self.facts["channels"], sizes["height"] // scale, sizes["width"] // scale)
        if latents is None:
            drawn: torch.Tensor = randn_tensor(shape, generator=generator, device=torch.device("cpu"), dtype=dtype)
            return drawn.float()
        if latents.shape != shape:
            raise InvalidOption("latents", tuple(latents.shape), [], hint=f"Give {shape}.")
        return latents.float()

    def set_progress_bar_config(self, **_options: Any) -> None:
        """There is no bar: the steps are within the one call."""

    @property
    def scheduler(self) -> Any:
        raise Unsupported("One model of a whole picture", "a scheduler: DDIM stands in it", hint=_PARTS_HINT)

    @scheduler.setter
    def scheduler(self, _other: Any) -> None:
        raise Unsupported("One model of a whole picture", "another scheduler than its DDIM", hint=_PARTS_HINT)


def _ids(tokenizer: Any, texts: Sequence[str], times: int) -> torch.Tensor:
    most = tokenizer.model_max_length
    for text in texts:
        count = len(tokenizer(text).input_ids)
        if count > most:
            log.warning("%d of the text's %d tokens are left out: the model takes %d.", count - most, count, most)
    ids = tokenizer(list(texts), padding="max_length", max_length=most, truncation=True, return_tensors="pt").input_ids
    repeated: torch.Tensor = ids.repeat_interleave(times, dim=0)
    return repeated
