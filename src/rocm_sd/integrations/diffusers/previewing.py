"""What a picture looks like while it is drawn: by the small decoder where there is one, otherwise by colours alone.

Colours are a linear function of the latents, which is fitted to the model's own VAE: it takes no time beside a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from rocm_sd.engine import preview
from rocm_sd.engine.approximation import has_small_decoder

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Preview"]

_SAMPLES, _SIDE = 16, 8


class Preview:
    """preview(latents) -> picture; a small one where it is of colours alone."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._colours = None if has_small_decoder(pipe.vae) else _fitted(pipe.vae)

    def __call__(self, latents: torch.Tensor) -> Image:
        if self._colours is None:
            return preview(self._pipe, latents)
        from PIL import Image as Images  # noqa: PLC0415 -- needed here alone

        weight, bias = self._colours
        tones = F.conv2d(latents[:1].float().cpu(), weight[:, :, None, None], bias).clamp(0, 1)
        pixels = tones[0].mul(255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
        small = Images.fromarray(pixels)
        return small.resize((small.width * 4, small.height * 4), Images.Resampling.BICUBIC)


@torch.no_grad()
def _fitted(vae: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """([3, channels], [3]): of random latents, the nearest linear function to the mean colours that the VAE gives."""
    weight = next(vae.parameters())
    random = torch.Generator().manual_seed(0)
    shape = (_SAMPLES, vae.config.latent_channels, _SIDE, _SIDE)
    # Blurred, as the latents of pictures are: those of noise alone say little of colours.
    latents = F.avg_pool2d(torch.randn(shape, generator=random), 3, 1, 1) * 3
    z = (latents / vae.config.scaling_factor).to(weight.device, weight.dtype)
    pictures = torch.cat([vae.decode(one, return_dict=False)[0] for one in z.split(4)])
    colours = F.adaptive_avg_pool2d(pictures.float().cpu() / 2 + 0.5, _SIDE).clamp(0, 1)
    given = latents.permute(0, 2, 3, 1).reshape(-1, shape[1])
    given = torch.cat([given, torch.ones(len(given), 1)], 1)
    found = torch.linalg.lstsq(given, colours.permute(0, 2, 3, 1).reshape(-1, 3)).solution
    return found[:-1].T.contiguous(), found[-1].contiguous()
