"""A small image embedding trained on emoji: which emoji does a picture show, and on which background?

Trained along with emoji-sd by training/emoji_sd/train_embedding.py; about 1.7 million parameters, shipped as fp16.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import interpolate, normalize, relu

from rocm_sd.errors import CorruptModel, ModelNotFound
from rocm_sd.models.emoji import EMBEDDING_FILE, EMOJI, REINSTALL, nearest_colour

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["EMBEDDING_SIZE", "IMAGE_SIZE", "EmojiEmbedding", "background_colour", "load_embedding", "look_ids"]

IMAGE_SIZE = 128
EMBEDDING_SIZE = 128


def look_ids() -> list[int]:
    """The ids of emoji that look different: class c of the embedding is look_ids()[c]."""
    return [emoji.id for emoji in EMOJI if emoji.look == emoji.id]


class _Residual(nn.Module):
    """y = relu(x' + bn(conv(relu(bn(conv(x)))))); x' is x, or its strided 1x1 projection where the shape changes."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        same = channels_in == channels_out and stride == 1
        self.skip: nn.Module = nn.Identity() if same else nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(relu(self.norm1(self.conv1(x)))))
        return relu(y + self.skip(x))


class EmojiEmbedding(nn.Module):
    """images [B, 3, H, W] in 0..1 -> unit vectors [B, 128]; `prototypes` [C, 128] hold one direction per look."""

    prototypes: Tensor
    classes: Tensor

    def __init__(self, classes: Sequence[int] | None = None) -> None:
        super().__init__()
        ids = look_ids() if classes is None else list(classes)
        self.stem = nn.Conv2d(3, 32, 5, 2, 2, bias=False)
        self.stem_norm = nn.BatchNorm2d(32)
        self.blocks = nn.Sequential(
            _Residual(32, 48, 2),
            _Residual(48, 96, 2),
            _Residual(96, 96, 1),
            _Residual(96, 160, 2),
            _Residual(160, 160, 1),
        )
        self.head = nn.Linear(2 * 160, EMBEDDING_SIZE)
        self.prototypes = nn.Parameter(torch.randn(len(ids), EMBEDDING_SIZE) * EMBEDDING_SIZE**-0.5)
        self.register_buffer("classes", torch.tensor(ids, dtype=torch.int32))

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[-2:] != (IMAGE_SIZE, IMAGE_SIZE):
            images = interpolate(images, size=(IMAGE_SIZE, IMAGE_SIZE), mode="bilinear", antialias=True)
        features = self.blocks(relu(self.stem_norm(self.stem(images * 2 - 1))))
        # The mean says what colours there are, the maximum whether a part (a moustache, a crown) is there at all.
        pooled = torch.cat([features.mean((2, 3)), features.amax((2, 3))], dim=1)
        return normalize(self.head(pooled).float(), dim=1)

    def cosines(self, vectors: Tensor) -> Tensor:
        """[B, 128] unit vectors -> [B, C]: the cosine with every prototype."""
        return vectors @ normalize(self.prototypes.float(), dim=1).T

    @torch.no_grad()
    def embed(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] in 0..1 -> unit vectors [B, 128], on the model's device."""
        weight = self.head.weight
        vectors: Tensor = self(images.to(weight.device, weight.dtype))
        return vectors

    @torch.no_grad()
    def retrieve(self, images: Tensor, k: int = 5) -> Tensor:
        """[B, k] ids of the emoji most like each picture, best first; compare with EMOJI[id].look."""
        best = self.cosines(self.embed(images)).topk(k, dim=1).indices
        return self.classes.long()[best].cpu()


def load_embedding(path: str | Path | None = None, device: str | torch.device = "cpu") -> EmojiEmbedding:
    """The shipped embedding, or the one in `path` (.safetensors), ready for use in float32."""
    file = Path(path) if path is not None else EMBEDDING_FILE
    if not file.is_file():
        raise ModelNotFound(f"The image embedding is missing: {file}.", hint=REINSTALL)
    try:
        state = {name: tensor if name == "classes" else tensor.float() for name, tensor in load_file(file).items()}
        model = EmojiEmbedding(classes=state["classes"].tolist())
        model.load_state_dict(state)
    except (SafetensorError, KeyError, RuntimeError, OSError) as error:
        raise CorruptModel(f"The image embedding cannot be read: {file} ({error}).", hint=REINSTALL) from error
    return model.to(device).eval().requires_grad_(requires_grad=False)


def background_colour(image: Tensor) -> str:
    """The named colour nearest to the median of the border pixels; image [3, H, W] in 0..1."""
    width = max(1, image.shape[-1] // 32)
    pixels = image.detach().float().cpu()
    border = torch.cat(
        [
            pixels[:, :width].flatten(1),
            pixels[:, -width:].flatten(1),
            pixels[:, :, :width].flatten(1),
            pixels[:, :, -width:].flatten(1),
        ],
        dim=1,
    )
    return nearest_colour((border.median(dim=1).values * 255).tolist())
