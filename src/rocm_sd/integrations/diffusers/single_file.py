"""A Stable Diffusion 1.x pipeline as one checkpoint in the layout of the original code, which every UI reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file

from rocm_sd.errors import Unsupported
from rocm_sd.models.single_file import Component, checkpoint_weights

if TYPE_CHECKING:
    from pathlib import Path

    import torch

__all__ = ["save_single_file", "single_file_weights"]


def save_single_file(pipe: Any, file: Path) -> None:
    save_file(single_file_weights(pipe), file)


def single_file_weights(pipe: Any) -> dict[str, torch.Tensor]:
    if getattr(pipe, "text_encoder_2", None) is not None or not hasattr(pipe, "unet"):
        raise Unsupported("A checkpoint of one file", f"a {type(pipe).__name__}: it takes Stable Diffusion 1.x")
    return checkpoint_weights(*(Component(p.config, p.state_dict()) for p in (pipe.unet, pipe.vae, pipe.text_encoder)))
