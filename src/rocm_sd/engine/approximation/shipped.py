"""Settings that come with rocm-sd, by family of models and number of steps, each with where it was measured."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from rocm_sd.engine.approximation.combined import NOTHING, Approximation

if TYPE_CHECKING:
    from rocm_sd.engine.approximation.skipping import Skipping

__all__ = [
    "Setting",
    "are_about_steps",
    "as_given",
    "cost_in_words",
    "costs",
    "family",
    "of_steps",
    "shipped",
    "why_none",
]

_FILE = "shipped.json"
# By the width of the text that a UNet sees, and of its outermost blocks.
_FAMILIES: dict[Any, str] = {(192, 64): "emoji-sd", (768, 320): "SD 1.5", (1024, 320): "SD 2.1", (2048, 320): "SDXL"}


@dataclass(frozen=True)
class Setting:
    """What is approximated from so many steps on, and why it may be. `cost`: how far pictures are from exact ones, in
    a few words; empty where nobody measured that.
    """

    from_steps: int
    approximation: Approximation
    why: str
    cost: str = ""

    @property
    def skipping(self) -> Skipping:
        return self.approximation.skipping


def family(unet: Any) -> str | None:
    config = getattr(unet, "config", None)
    width = getattr(config, "cross_attention_dim", None)
    channels = getattr(config, "block_out_channels", None) or (None,)
    return _FAMILIES.get((width, channels[0]) if isinstance(width, int) else (None, None))


def shipped(unet: Any, quality: str) -> list[Setting]:
    """The one with the most steps last; none where nothing was measured for such a model."""
    kind = family(unet)
    found = [
        Setting(
            entry["from_steps"],
            Approximation.from_dict(entry["approximation"]),
            _in_words(kind, entry["measured"]),
            cost_in_words(entry["measured"]["psnr"], entry["measured"]["ssim"]),
        )
        for entry in _entries()
        if entry["family"] == kind and entry["quality"] == quality
    ]
    return sorted(found, key=lambda setting: setting.from_steps)


def why_none(model: Any, quality: str) -> str:
    """Of a model that no setting is known for: why that is, and the command that finds one, in words."""
    in_numbers = "=" in quality
    what = "a budget in numbers" if in_numbers else family(model) or "models like it"
    search = "rocm-sd tune --quality MODEL" + (f" --within {quality}" if in_numbers else "")
    return (
        f"nothing was measured for it that quality {quality} allows, and no setting for {what} comes with rocm-sd, "
        f"because how near pictures stay hangs on a model's weights; type: {search}"
    )


def as_given(quality: Skipping | Approximation) -> Setting:
    return Setting(1, quality if isinstance(quality, Approximation) else Approximation(quality), "as given")


def of_steps(settings: list[Setting], steps: int) -> Setting:
    """The setting for a picture of so many steps."""
    fitting = [setting for setting in settings if setting.from_steps <= steps]
    return fitting[-1] if fitting else Setting(0, NOTHING, f"nothing was measured for {steps} steps")


def are_about_steps(settings: list[Setting]) -> bool:
    """Whether one of them leaves out steps, or all say why nothing is approximated: steps are counted for either."""
    return any(not setting.skipping.is_exact for setting in settings) or all(
        setting.approximation.is_exact for setting in settings
    )


def cost_in_words(psnr: float, ssim: float) -> str:
    """`psnr`: the median in dB; `ssim`: the mean."""
    return f"PSNR {psnr:.1f} dB, SSIM {ssim:.3f}"


def costs(settings: list[Setting]) -> str:
    """What is known of those that approximate; the first of them that has any."""
    return next((one.cost for one in settings if one.cost and not one.approximation.is_exact), "")


def _in_words(kind: str | None, measured: dict[str, Any]) -> str:
    match = "{:+.1f} points ({:+.1f} to {:+.1f})".format(*measured["match"])
    return (
        f"{kind}, {measured['steps']} steps, {measured['prompts']} prompts on one {measured['on']}: median PSNR "
        f"{measured['psnr']:.1f} dB, SSIM {measured['ssim']:.3f}, prompt match {match}"
    )


@cache
def _entries() -> list[dict[str, Any]]:
    text = resources.files(__package__).joinpath(_FILE).read_text(encoding="utf-8")
    entries: list[dict[str, Any]] = json.loads(text)["settings"]
    return entries
