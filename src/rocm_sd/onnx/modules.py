"""What is exported of a Diffusers pipeline: each part as a module whose inputs and outputs have Optimum's names.

text_encoder    input_ids -> last_hidden_state, pooler_output, hidden_states.N
text_encoder_2  input_ids -> text_embeds, last_hidden_state, hidden_states.N
unet            sample, timestep, encoder_hidden_states (text_embeds, time_ids; timestep_cond) -> out_sample
vae_decoder     latent_sample -> sample
vae_encoder     sample -> latent_parameters, the mean and the logarithm of the variance
safety_checker  clip_input, images -> out_images, has_nsfw_concepts
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rocm_sd.errors import Unsupported
from rocm_sd.onnx.layout import PARTS

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FLAVOURS", "ExportedModule", "Sizes", "exported_modules", "flavour"]

# By the class of the pipeline: which of the two families its parts are of.
FLAVOURS = {
    "StableDiffusionPipeline": "sd",
    "StableDiffusionImg2ImgPipeline": "sd",
    "StableDiffusionXLPipeline": "sdxl",
    "StableDiffusionXLImg2ImgPipeline": "sdxl",
}
_VAE = "AutoencoderKL"
# A score is compared with its threshold after three decimals, as Diffusers' own checker does.
_DECIMALS = 3
_SPECIAL_CARE = 0.01

Dims = dict[str, dict[int, str]]


@dataclass(frozen=True)
class Sizes:
    """Of a call: latents of `height` times `width` steps of the UNet's coarsest level, and so many tokens."""

    batch: int
    height: int
    width: int
    tokens: int


@dataclass(frozen=True)
class ExportedModule:
    """`module.forward` takes `inputs(sizes)` by name; `dims`: which of their dimensions vary, and by which name."""

    name: str
    module: nn.Module
    owner: Any
    inputs: Callable[[Sizes], dict[str, torch.Tensor]]
    dims: Dims
    outputs: tuple[str, ...]

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.module.parameters() if p.is_floating_point())

    @property
    def size(self) -> int:
        """Bytes of its weights, each counted once."""
        tensors = {id(t): t for t in (*self.module.parameters(), *self.module.buffers())}
        return sum(t.numel() * t.element_size() for t in tensors.values())


def flavour(pipe: Any) -> str:
    """One of FLAVOURS; raises Unsupported of any other pipeline."""
    name = type(pipe).__name__
    if name not in FLAVOURS:
        raise Unsupported("rocm-sd onnx export", f"a {name}", hint="Give Stable Diffusion 1.x or 2.x, or SDXL.")
    if type(pipe.vae).__name__ != _VAE:
        raise Unsupported("rocm-sd onnx export", f"the VAE {type(pipe.vae).__name__}", hint=f"It takes {_VAE}.")
    return FLAVOURS[name]


def exported_modules(pipe: Any) -> dict[str, ExportedModule]:
    """The parts that the pipeline has, in the order of PARTS. A part that is None in it is left out."""
    flavour(pipe)
    encoders = {name: getattr(pipe, name, None) for name in ("text_encoder", "text_encoder_2")}
    found = [_text_encoder(name, encoder) for name, encoder in encoders.items() if encoder is not None]
    found += [_unet(pipe.unet), _decoder(pipe.vae), _encoder(pipe.vae)]
    if getattr(pipe, "safety_checker", None) is not None:
        found.append(_safety_checker(pipe.safety_checker))
    by_name = {each.name: each for each in found}
    return {name: by_name[name] for name in PARTS if name in by_name}


class _TextEncoder(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = self.encoder(input_ids, output_hidden_states=True, return_dict=True)
        projected = getattr(found, "text_embeds", None)
        first = (
            (found.last_hidden_state, found.pooler_output)
            if projected is None
            else (projected, found.last_hidden_state)
        )
        # A tensor that is handed over twice would be one output under two names.
        return (*first, *(each.clone() for each in found.hidden_states))


def _text_encoder(name: str, encoder: Any) -> ExportedModule:
    config = encoder.config
    projected = hasattr(encoder, "text_projection")

    def inputs(sizes: Sizes) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(sizes.tokens)
        tokens = min(sizes.tokens, config.max_position_embeddings)
        ids = torch.randint(0, config.vocab_size, (sizes.batch, tokens), generator=random)
        # Where a text ends is what is pooled.
        ids[:, -1] = min(max(config.eos_token_id, 0), config.vocab_size - 1)
        return {"input_ids": ids}

    first = ("text_embeds", "last_hidden_state") if projected else ("last_hidden_state", "pooler_output")
    hidden = tuple(f"hidden_states.{number}" for number in range(config.num_hidden_layers + 1))
    dims = {"input_ids": {0: "batch", 1: "sequence"}}
    return ExportedModule(name, _TextEncoder(encoder), encoder, inputs, dims, (*first, *hidden))


class _UNet(nn.Module):
    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.unet = unet

    def forward(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        text_embeds: torch.Tensor | None = None,
        time_ids: torch.Tensor | None = None,
        timestep_cond: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if text_embeds is not None and text_embeds.dtype is torch.float16:
            # Diffusers joins it with sines in float32 and rounds both: torch widens it there by itself, ONNX does not.
            text_embeds = text_embeds.float()
        added = None if text_embeds is None else {"text_embeds": text_embeds, "time_ids": time_ids}
        result: torch.Tensor = self.unet(
            sample, timestep, encoder_hidden_states,
            timestep_cond=timestep_cond, added_cond_kwargs=added, return_dict=False,
        )[0]  # fmt: skip
        return result


def _unet(unet: Any) -> ExportedModule:
    config = unet.config
    if config.addition_embed_type not in {None, "text_time"} or config.class_embed_type is not None:
        raise Unsupported("rocm-sd onnx export", "a UNet that is told more than text, time and the picture's size")
    coarsest = 2 ** (len(config.block_out_channels) - 1)
    dims: Dims = {
        "sample": {0: "batch", 2: "height", 3: "width"},
        "timestep": {},
        "encoder_hidden_states": {0: "batch", 1: "sequence"},
    }
    if config.addition_embed_type == "text_time":
        dims |= {"text_embeds": {0: "batch"}, "time_ids": {0: "batch"}}
    if config.time_cond_proj_dim is not None:
        dims["timestep_cond"] = {0: "batch"}

    def inputs(sizes: Sizes) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(sizes.tokens)
        numbers = _numbers_of_the_picture(unet)
        shapes = {
            "sample": (config.in_channels, coarsest * sizes.height, coarsest * sizes.width),
            "encoder_hidden_states": (sizes.tokens, config.cross_attention_dim),
            "text_embeds": (numbers[0],),
            "time_ids": (numbers[1],),
            "timestep_cond": (config.time_cond_proj_dim,),
        }
        drawn = {
            name: torch.randn(sizes.batch, *shape, generator=random).to(unet.dtype)
            for name, shape in shapes.items()
            if name in dims
        }
        # Float32 has every step exactly, and Diffusers computes its sines in float32 whatever the model's dtype.
        drawn["timestep"] = torch.tensor(500.0 + sizes.tokens)
        if "time_ids" in drawn:
            drawn["time_ids"] = (drawn["time_ids"] * 100).round()
        return {name: drawn[name] for name in dims}

    return ExportedModule("unet", _UNet(unet), unet, inputs, dims, ("out_sample",))


def _numbers_of_the_picture(unet: Any) -> tuple[int, int]:
    """Of SDXL: the width of its pooled text, and how many numbers about the picture's size stand beside it.

    The base has six numbers and the refiner five; the pooled text of both has 1280 values. Of another model, six.
    """
    config = unet.config
    if config.addition_embed_type != "text_time":
        return 0, 0
    width, each = config.projection_class_embeddings_input_dim, config.addition_time_embed_dim
    count = next((n for n in (6, 5) if width - n * each == 1280), 6)
    return width - count * each, count


class _Decoder(nn.Module):
    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.post_quant_conv, self.decoder = vae.post_quant_conv, vae.decoder

    def forward(self, latent_sample: torch.Tensor) -> torch.Tensor:
        taken = latent_sample if self.post_quant_conv is None else self.post_quant_conv(latent_sample)
        picture: torch.Tensor = self.decoder(taken)
        return picture


class _Encoder(nn.Module):
    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.encoder, self.quant_conv = vae.encoder, vae.quant_conv

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        encoded: torch.Tensor = self.encoder(sample)
        moments: torch.Tensor = encoded if self.quant_conv is None else self.quant_conv(encoded)
        return moments


def _decoder(vae: Any) -> ExportedModule:
    def inputs(sizes: Sizes) -> dict[str, torch.Tensor]:
        return {"latent_sample": _drawn(vae, sizes, vae.config.latent_channels, 4)}

    dims = {"latent_sample": {0: "batch", 2: "height", 3: "width"}}
    return ExportedModule("vae_decoder", _Decoder(vae), vae, inputs, dims, ("sample",))


def _encoder(vae: Any) -> ExportedModule:
    side = 4 * 2 ** (len(vae.config.block_out_channels) - 1)

    def inputs(sizes: Sizes) -> dict[str, torch.Tensor]:
        return {"sample": _drawn(vae, sizes, vae.config.in_channels, side)}

    dims = {"sample": {0: "batch", 2: "height", 3: "width"}}
    return ExportedModule("vae_encoder", _Encoder(vae), vae, inputs, dims, ("latent_parameters",))


def _drawn(model: Any, sizes: Sizes, channels: int, side: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(sizes.tokens)
    shape = (sizes.batch, channels, side * sizes.height, side * sizes.width)
    return torch.randn(shape, generator=random).to(model.dtype)


class _SafetyChecker(nn.Module):
    """has = any of round(cos(picture, concept) - threshold, 3) > 0; a special concept makes all others more likely.

    Pictures that have one are black.
    """

    def __init__(self, checker: nn.Module) -> None:
        super().__init__()
        self.checker = checker

    def forward(self, clip_input: torch.Tensor, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        checker: Any = self.checker
        seen = checker.visual_projection(checker.vision_model(clip_input)[1])
        special = self._scores(seen, checker.special_care_embeds, checker.special_care_embeds_weights)
        more = _SPECIAL_CARE * self._rounded(special).gt(0).any(dim=1, keepdim=True).float()
        concepts = self._scores(seen, checker.concept_embeds, checker.concept_embeds_weights)
        has = self._rounded(concepts + more).gt(0).any(dim=1)
        return torch.where(has[:, None, None, None], torch.zeros_like(images), images), has

    @staticmethod
    def _scores(seen: torch.Tensor, embeds: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
        cosines = nn.functional.normalize(seen) @ nn.functional.normalize(embeds).T
        return cosines.float() - thresholds.float()

    @staticmethod
    def _rounded(scores: torch.Tensor) -> torch.Tensor:
        rounded: torch.Tensor = (scores * 10**_DECIMALS).round()
        return rounded


def _safety_checker(checker: Any) -> ExportedModule:
    vision = checker.config.vision_config

    def inputs(sizes: Sizes) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(sizes.tokens)
        seen = torch.randn(sizes.batch, vision.num_channels, vision.image_size, vision.image_size, generator=random)
        images = torch.randn(sizes.batch, 3, 8 * sizes.height, 8 * sizes.width, generator=random)
        return {"clip_input": seen.to(checker.dtype), "images": images.to(checker.dtype)}

    dims = {"clip_input": {0: "batch"}, "images": {0: "batch", 2: "height", 3: "width"}}
    outputs = ("out_images", "has_nsfw_concepts")
    return ExportedModule("safety_checker", _SafetyChecker(checker), checker, inputs, dims, outputs)
