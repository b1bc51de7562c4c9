"""The parts of a Diffusers pipeline, computed by ONNX Runtime: what Diffusers asks of each is here, and no weights."""

from __future__ import annotations

from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from diffusers.configuration_utils import FrozenDict
from diffusers.models.autoencoders.vae import DecoderOutput, DiagonalGaussianDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput
from safetensors.torch import load_file
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.clip.modeling_clip import CLIPTextModelOutput

from rocm_sd.errors import Unsupported
from rocm_sd.onnx.layout import GUIDED_BATCH

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from rocm_sd.onnx.sessions import Session

__all__ = ["SafetyCheckerPart", "TextEncoderPart", "UNetPart", "VaePart"]


class _Part(nn.Module):
    """`config`, `dtype` and `device` as a model of torch has them; it moves nowhere, and has no other dtype."""

    def __init__(self, session: Session, config: Any) -> None:
        super().__init__()
        self.session, self.config = session, config
        self.eval()

    @property
    def dtype(self) -> torch.dtype:
        return self.session.dtype

    @property
    def device(self) -> torch.device:
        return self.session.device

    def _refuse(self, options: Mapping[str, Any]) -> None:
        given = [name for name, value in options.items() if value is not None]
        if given:
            raise Unsupported("A model exported to ONNX", f"{given[0]}", hint="Leave it out, or run it with torch.")


class UNetPart(_Part):
    def __init__(self, session: Session, config: Mapping[str, Any]) -> None:
        super().__init__(session, FrozenDict(config))
        width = self.config.get("projection_class_embeddings_input_dim")
        # SDXL asks for the width of its added embedding by the layer that takes it.
        self.add_embedding = SimpleNamespace(linear_1=SimpleNamespace(in_features=width))
        text = session.inputs.get("encoder_hidden_states")
        self._shares_guidance = text is not None and text.shape[0] == GUIDED_BATCH

    def forward(
        self,
        sample: torch.Tensor,
        timestep: torch.Tensor | float,
        encoder_hidden_states: torch.Tensor,
        *,
        timestep_cond: torch.Tensor | None = None,
        cross_attention_kwargs: dict[str, Any] | None = None,
        added_cond_kwargs: dict[str, torch.Tensor] | None = None,
        return_dict: bool = True,
        **others: Any,
    ) -> Any:
        self._refuse({"cross_attention_kwargs": cross_attention_kwargs or None, **others})
        given = {
            "sample": sample,
            "timestep": torch.as_tensor(timestep),
            "encoder_hidden_states": encoder_hidden_states,
        }
        if self._halves_are_one(given):
            given["sample"] = sample[: len(sample) // 2]
        given |= added_cond_kwargs or {}
        if timestep_cond is not None:
            given["timestep_cond"] = timestep_cond
        found = self.session(given, ["out_sample"])["out_sample"].to(sample.dtype)
        return UNet2DConditionOutput(sample=found) if return_dict else (found,)

    def _halves_are_one(self, given: Mapping[str, torch.Tensor]) -> bool:
        """Whether guidance has doubled the sample, and the model repeats it where the text comes in."""
        sample, text = given["sample"], given["encoder_hidden_states"]
        if not self._shares_guidance or len(sample) % 2 or len(text) != len(sample) or given["timestep"].numel() != 1:
            return False
        return torch.equal(*sample.chunk(2))


class TextEncoderPart(_Part):
    """`final_norm`: the file of its last layer, with which Diffusers normalises what clip_skip chose."""

    def __init__(self, session: Session, config: Any, final_norm: Path) -> None:
        super().__init__(session, config)
        self._final_norm = final_norm
        self._hidden = sorted((name for name in session.outputs if name.startswith("hidden_states.")), key=_number)

    @cached_property
    def text_model(self) -> Any:
        if not self._final_norm.is_file():
            raise Unsupported("This export", "clip_skip", hint="Export the model with: rocm-sd onnx export")
        weights = load_file(self._final_norm, device=str(self.device))

        def normalised(hidden: torch.Tensor) -> torch.Tensor:
            eps = self.config.layer_norm_eps
            scale, shift = (weights[name].to(hidden.dtype) for name in ("weight", "bias"))
            return nn.functional.layer_norm(hidden, hidden.shape[-1:], scale, shift, eps)

        return SimpleNamespace(final_layer_norm=normalised)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        output_hidden_states: bool = False,
        return_dict: bool = True,
    ) -> Any:
        self._refuse({"attention_mask": attention_mask})
        first = ["text_embeds"] if "text_embeds" in self.session.outputs else ["last_hidden_state", "pooler_output"]
        wanted = [name for name in (*first, "last_hidden_state") if name in self.session.outputs]
        hidden = self._hidden if output_hidden_states else []
        if output_hidden_states and not hidden:
            raise Unsupported("This export", "hidden states", hint="Export the model with: rocm-sd onnx export")
        found = self.session({"input_ids": input_ids}, list(dict.fromkeys([*wanted, *hidden])))
        states = tuple(found[name] for name in hidden) or None
        if "text_embeds" in found:
            result: Any = CLIPTextModelOutput(
                text_embeds=found["text_embeds"], last_hidden_state=found["last_hidden_state"], hidden_states=states
            )
        else:
            result = BaseModelOutputWithPooling(
                last_hidden_state=found["last_hidden_state"],
                pooler_output=found.get("pooler_output"),
                hidden_states=states,
            )
        return result if return_dict else result.to_tuple()


def _number(name: str) -> int:
    return int(name.rpartition(".")[2])


class VaePart(_Part):
    """The decoder, and the encoder where it was exported: its file is opened when a picture is first encoded."""

    def __init__(self, decoder: Session, encoder: Callable[[], Session], config: Mapping[str, Any]) -> None:
        super().__init__(decoder, FrozenDict(config))
        self._open_encoder = encoder

    @cached_property
    def encoder_session(self) -> Session:
        return self._open_encoder()

    def decode(self, z: torch.Tensor, *, return_dict: bool = True, **_generator: Any) -> Any:
        picture = self.session({"latent_sample": z}, ["sample"])["sample"]
        return DecoderOutput(sample=picture) if return_dict else (picture,)

    def encode(self, x: torch.Tensor, *, return_dict: bool = True) -> Any:
        moments = self.encoder_session({"sample": x}, ["latent_parameters"])["latent_parameters"]
        latents = DiagonalGaussianDistribution(moments)
        return AutoencoderKLOutput(latent_dist=latents) if return_dict else (latents,)


class SafetyCheckerPart(_Part):
    def forward(self, clip_input: torch.Tensor, images: Any) -> tuple[Any, list[bool]]:
        pictures = torch.as_tensor(images)
        found = self.session({"clip_input": clip_input, "images": pictures}, ["out_images", "has_nsfw_concepts"])
        cleared = found["out_images"].to(pictures.dtype)
        # Diffusers hands over arrays at some places and tensors at others, and takes back the same.
        as_given = cleared if isinstance(images, torch.Tensor) else cleared.cpu().numpy()
        return as_given, [bool(one) for one in found["has_nsfw_concepts"].reshape(-1)]
