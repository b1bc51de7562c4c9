"""`quality` of the hosts: what its text says, and what of it is known for a UNet of theirs.

What was measured with Diffusers' UNet holds for the host's of the same weights: both compute the same function, and
leave out the same layers at the same depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rocm_sd.engine import QUALITIES, Skipping, require_quality
from rocm_sd.engine.approximation import known
from rocm_sd.errors import InvalidOption

if TYPE_CHECKING:
    from torch import nn

__all__ = ["HostSetting", "in_words", "quality_of", "settings_for"]

_BUDGET = ("psnr", "ssim", "match")
_OF_A_SETTING = ("depth", "every", "whole_first", "whole_last", "order")
# Known, and not done here.
_OF_GUIDANCE = ("guided_every", "guided_first", "guidance_end")
_HINT = (
    f"Use one of: {', '.join(QUALITIES)}; a budget, such as psnr=32,ssim=0.97; or a setting of your own, such as "
    f"depth=1,every=3,order=1 ({', '.join(_OF_A_SETTING)})."
)


@dataclass(frozen=True)
class HostSetting:
    """Which layers are left out from so many steps on, and why. `notes`: what of the setting is not done."""

    from_steps: int
    skipping: Skipping
    why: str
    notes: tuple[str, ...] = ()

    @property
    def caches(self) -> bool:
        return self.skipping.caches


def in_words(quality: str, in_numbers: str = "") -> str:
    """What counts of a host's two controls, as it is written down: the numbers, where there are any."""
    return "".join(str(in_numbers or quality).split())


def quality_of(text: str) -> str | Skipping:
    """A name or a budget as it is, or the setting that the text spells. Raises InvalidOption."""
    text = in_words(text)
    parts = [part.partition("=") for part in text.split(",")]
    names = [name for name, _, _ in parts]
    if "=" not in text or all(name in _BUDGET for name in names):
        try:
            require_quality(text)
        except InvalidOption:
            raise InvalidOption("quality", text, [], hint=_HINT) from None
        return text
    types = {name: float if name == "guidance_end" else int for name in (*_OF_A_SETTING, *_OF_GUIDANCE)}
    unknown = next((name for name in names if name not in types), None)
    if unknown is not None or len(set(names)) < len(names):
        what = f"{unknown!r} is no part of it" if unknown is not None else "a name comes twice"
        raise InvalidOption("quality", text, [], hint=f"As a setting, {what}. {_HINT}")
    try:
        given: dict[str, Any] = {name: types[name](value) for name, _, value in parts}
    except ValueError as error:
        raise InvalidOption("quality", text, [], hint=f"It takes numbers ({error}). {_HINT}") from None
    skipping = Skipping(**given)
    if not HostSetting(1, _layers(skipping), "").caches:
        hint = f"It leaves nothing out here: give a depth of 1 or more and every of 2 or more. {_HINT}"
        raise InvalidOption("quality", text, [], hint=hint)
    return skipping


def settings_for(unet: nn.Module, quality: str) -> tuple[list[HostSetting], str | None]:
    """Those for this UNet, the one with the most steps last; where there are none, why all is exact, in words."""
    asked = quality_of(quality)
    if asked == "exact":
        return [], None
    if isinstance(asked, Skipping):
        return [HostSetting(1, _layers(asked), "as given", tuple(_not_done(asked)))], None
    found = [_of_engine(setting) for setting in _known(unet, asked)]
    if any(setting.caches for setting in found):
        return found, None
    if found:
        return [], f"all is exact: what quality {asked} allows for it leaves out no layers ({found[-1].why})"
    search = "rocm-sd tune --quality MODEL" + (f" --within {asked}" if "=" in asked else "")
    return [], f"all is exact: nothing was measured for it that quality {asked} allows; type: {search}"


def _known(unet: Any, quality: str) -> list[Any]:
    try:
        stand_in = UNet2DConditionModel(unet)
    except (AttributeError, IndexError, KeyError, TypeError):
        return []
    return known(stand_in, quality)


def _of_engine(setting: Any) -> HostSetting:
    """The one place that reads the engine's settings."""
    skipping = setting.approximation.skipping
    notes = list(_not_done(skipping))
    others = setting.approximation.to_dict().keys() - {"skipping"}
    notes += [f"{name.replace('_', ' ')} of the setting is not done here" for name in sorted(others)]
    why = f"its own schedule of whole steps is not done here; {setting.why}" if skipping.whole else setting.why
    return HostSetting(setting.from_steps, _layers(skipping), why, tuple(notes))


def _layers(skipping: Skipping) -> Skipping:
    """What of it is about a UNet's layers."""
    return Skipping(**{name: getattr(skipping, name) for name in _OF_A_SETTING})


def _not_done(skipping: Skipping) -> list[str]:
    return ["guidance is computed in every step"] if skipping.skips_guidance else []


class UNet2DConditionModel:
    """What the engine looks at to know a UNet again, of ldm's. The class's name is part of it: these are the weights
    that Diffusers' class of this name has, under other names.
    """

    def __init__(self, unet: Any) -> None:
        self.conv_in, self.conv_out = unet.input_blocks[0][0], unet.out[-1]
        seen = (module for name, module in unet.named_modules() if name.endswith(".attn2"))
        width = getattr(getattr(next(seen, None), "to_k", None), "in_features", None)
        self.config = SimpleNamespace(cross_attention_dim=width, block_out_channels=(unet.model_channels,))
