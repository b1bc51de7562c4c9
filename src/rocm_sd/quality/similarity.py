"""Nearness of two pictures (PSNR, SSIM) and of two sets of them (Frechet distance). Images are [B, 3, H, W] in 0..1."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rocm_sd.errors import MissingDependency, Unsupported, optional_module

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from PIL.Image import Image
    from torch import Tensor, nn

__all__ = ["Similarity", "as_tensor", "clip_score", "fid", "frechet_distance", "similarity"]

_WINDOW = 7  # of scikit-image's SSIM


@dataclass(frozen=True)
class Similarity:
    """Per pair of pictures; PSNR in dB is infinite for equal ones."""

    psnr: list[float]
    ssim: list[float]

    @property
    def worst_psnr(self) -> float:
        return min(self.psnr)

    @property
    def mean_ssim(self) -> float:
        return sum(self.ssim) / len(self.ssim)


def as_tensor(images: Sequence[Image]) -> Tensor:
    """[B, 3, H, W] in 0..1 of pictures of one size."""
    sizes = {image.size for image in images}
    if len(sizes) > 1:
        raise Unsupported("quality", f"pictures of different sizes {sorted(sizes)}")
    arrays = np.stack([np.asarray(image.convert("RGB")) for image in images])
    return torch.from_numpy(arrays).permute(0, 3, 1, 2).float() / 255


def similarity(first: Tensor, second: Tensor) -> Similarity:
    """PSNR = 10 log10(1 / mse) and SSIM of each pair."""
    if first.shape != second.shape:
        raise Unsupported("similarity", f"pictures of different shapes {tuple(first.shape)} and {tuple(second.shape)}")
    if min(first.shape[-2:]) < _WINDOW:
        width, height = first.shape[-1], first.shape[-2]
        raise Unsupported(
            "similarity", f"pictures of {width}x{height}: SSIM looks at {_WINDOW}x{_WINDOW} pixels at once"
        )
    structural_similarity = optional_module("skimage.metrics", "scikit-image", "quality").structural_similarity
    psnr, ssim = [], []
    for one, other in zip(first.double().cpu(), second.double().cpu(), strict=True):
        mse = float((one - other).square().mean())
        psnr.append(math.inf if mse == 0 else -10 * math.log10(mse))
        ssim.append(float(structural_similarity(one.numpy(), other.numpy(), channel_axis=0, data_range=1.0)))
    return Similarity(psnr, ssim)


def frechet_distance(first: Tensor, second: Tensor, features: nn.Module, size: int) -> float:
    """|m1 - m2|^2 + tr(c1 + c2 - 2 (c1 c2)^1/2) of the features of two sets; `features`: [B, 3, size, size] -> [B, D].

    The distance of small sets is biased upwards: compare only distances of sets of equal size.
    """
    if min(len(first), len(second)) < 2:
        raise Unsupported("frechet_distance", "fewer than two pictures in a set")
    return _frechet(first, second, feature=features, input_img_size=(3, size, size))


def fid(first: Tensor, second: Tensor, weights: Path) -> float:
    """The usual FID, on the Inception weights that the user has."""
    return _frechet(first, second, feature=2048, feature_extractor_weights_path=str(weights))


def _frechet(first: Tensor, second: Tensor, **options: Any) -> float:
    try:
        from torchmetrics.image.fid import FrechetInceptionDistance  # noqa: PLC0415 -- optional

        metric = FrechetInceptionDistance(normalize=True, **options)
    except ModuleNotFoundError as error:
        raise MissingDependency(error.name or "torchmetrics", "quality") from error
    for real, images in ((True, first), (False, second)):
        for start in range(0, len(images), 64):
            metric.update(images[start : start + 64], real=real)
    # A distance of nearly nothing comes out of the eigenvalues as small a number below zero.
    return max(0.0, float(metric.compute()))


def clip_score(images: Tensor, prompts: list[str], load: Callable[[], tuple[Any, Any]]) -> float:
    """Mean CLIP score, 0 to 100; `load` gives the CLIP model and its processor."""
    try:
        from torchmetrics.multimodal.clip_score import CLIPScore  # noqa: PLC0415 -- optional
    except ModuleNotFoundError as error:
        raise MissingDependency(error.name or "torchmetrics", "quality") from error
    metric = CLIPScore(model_name_or_path=load)
    for start in range(0, len(prompts), 32):
        part = (images[start : start + 32] * 255).round().to(torch.uint8)
        metric.update(part, prompts[start : start + 32])
    return float(metric.compute())
