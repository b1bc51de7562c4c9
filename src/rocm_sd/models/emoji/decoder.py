"""A small decoder of emoji-sd's latents: what its VAE's decoder draws, with a quarter of the multiplications.

Distilled from the VAE by training/emoji_sd/train_decoder.py; 0.80 million parameters, stored as fp16. The VAE works
at 32x32, 64x64 and 128x128 in turn; here nearly all is done at 32x32, and the pixels of a place are channels of it
until the end.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle, silu

from rocm_sd.errors import CorruptModel, ModelNotFound
from rocm_sd.models.emoji import REINSTALL

__all__ = ["DECODER_FILE", "EmojiDecoder", "load_decoder", "teacher_of", "weights_of"]

DECODER_FILE = Path(__file__).with_name("decoder.safetensors")
_TEACHER = "teacher"


class ResidualBlock(nn.Module):
    """y = x + conv(silu(norm(conv(silu(norm(x)))))); x: [B, C, H, W]. Named as the VAE's are: they begin as those."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, channels, eps=1e-6)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = nn.GroupNorm(groups, channels, eps=1e-6)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv1(silu(self.norm1(x)))
        y = self.conv2(silu(self.norm2(y)))
        return x + y


class EmojiDecoder(nn.Module):
    """latents [B, 4, H, W] as the VAE's `decode` takes them -> pictures [B, 3, 4H, 4W] in -1..1."""

    def __init__(self, channels: int = 96, blocks: int = 4, groups: int = 16, fine: int = 32) -> None:
        super().__init__()
        self.quant = nn.Conv2d(4, 4, 1)
        self.conv_in = nn.Conv2d(4, channels, 3, padding=1)
        self.blocks = nn.ModuleList(ResidualBlock(channels, groups) for _ in range(blocks))
        self.norm_out = nn.GroupNorm(groups, channels, eps=1e-6)
        self.to_fine = nn.Conv2d(channels, 4 * fine, 3, padding=1)
        self.fine1 = nn.Conv2d(fine, fine, 3, padding=1)
        self.fine2 = nn.Conv2d(fine, fine, 3, padding=1)
        self.to_pixels = nn.Conv2d(fine, 4 * 3, 3, padding=1)

    def forward(self, latents: Tensor) -> Tensor:
        x = self.conv_in(self.quant(latents))
        for block in self.blocks:
            x = block(x)
        x = pixel_shuffle(self.to_fine(silu(self.norm_out(x))), 2)
        x = x + self.fine2(silu(self.fine1(silu(x))))
        return pixel_shuffle(self.to_pixels(silu(x)), 2)


def teacher_of(vae: Any) -> str:
    """What a decoder's file says of the VAE that it was distilled from: a hash of both ends of its decoder, whatever
    dtype and device they have now.
    """
    told = hashlib.sha256()
    for layer in (vae.decoder.conv_in, vae.decoder.conv_out):
        # As the shortest that models come in has them.
        told.update(layer.weight.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
    return told.hexdigest()[:24]


def weights_of(decoder: EmojiDecoder, teacher: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What is written to a file, and its metadata."""
    state = {name: value.detach().cpu().half().contiguous() for name, value in decoder.state_dict().items()}
    shape = {
        "channels": decoder.conv_in.out_channels,
        "blocks": len(decoder.blocks),
        "groups": decoder.norm_out.num_groups,
        "fine": decoder.fine1.out_channels,
    }
    return state, {"format": "pt", _TEACHER: teacher, **{name: str(value) for name, value in shape.items()}}


def load_decoder(path: str | Path | None = None) -> tuple[EmojiDecoder, str]:
    """The shipped decoder, or the one in `path` (.safetensors), in float32, and which VAE it was distilled from."""
    file = Path(path) if path is not None else DECODER_FILE
    if not file.is_file():
        hint = "In a checkout of rocm-sd, python -m training.emoji_sd.train_decoder makes it."
        raise ModelNotFound(f"The small decoder is missing: {file}.", hint=hint)
    try:
        with safe_open(file, framework="pt") as opened:
            told = opened.metadata() or {}
            # A safetensors file is no mapping: it is asked for its keys.
            state = {name: opened.get_tensor(name).float() for name in opened.keys()}  # noqa: SIM118
        decoder = EmojiDecoder(**{name: int(told[name]) for name in ("channels", "blocks", "groups", "fine")})
        decoder.load_state_dict(state)
        teacher = told[_TEACHER]
    except (SafetensorError, KeyError, ValueError, RuntimeError, OSError) as error:
        raise CorruptModel(f"The small decoder cannot be read: {file} ({error}).", hint=REINSTALL) from error
    return decoder.eval().requires_grad_(requires_grad=False), teacher
