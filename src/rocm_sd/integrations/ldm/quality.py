"""`quality` of the hosts: what its text says, and what of it is known for a UNet of theirs.

What was measured with Diffusers' UNet holds for the host's of the same weights: both compute the same function, and
leave out the same layers at the same depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rocm_sd.engine import QUALITIES, Approximation, Skipping, require_quality
from rocm_sd.engine.approximation import Setting, known, why_none
from rocm_sd.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

__all__ = ["HostSetting", "in_words", "quality_of", "settings_for"]

_BUDGET = ("psnr", "ssim", "match")
_OF_A_SETTING = ("depth", "every", "whole_first", "whole_last", "order")
_OF_GUIDANCE = ("guided_every", "guided_first", "guidance_end")
# Of what else a setting may say, why these hosts leave no room for it.
_WHY_NOT = {
    "guidance": "guidance is computed in every step: the host joins and splits the prompts of a batch by itself",
    "merged": "tokens are not merged: the host patches its attention by itself for that",
    "eight_bits": "products keep the model's dtype: the host moves, casts and patches a layer's weight as it likes, "
    "which one in 8 bits could not follow",
    "eight_bit_decoder": "the decoder keeps its dtype: the host moves, casts and patches a layer's weight as it likes, "
    "which one in 8 bits could not follow",
    "small_decoder": "the VAE draws the picture: which one does is the host's choice",
    "stale_after": "no rows are a step old: one GPU draws here",
}
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
    not_here = next((name for name in names if name in _WHY_NOT), None)
    if not_here is not None:
        raise InvalidOption("quality", text, [], hint=f"Leave out {not_here}: {_WHY_NOT[not_here]}. {_HINT}")
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


def settings_for(
    unet: nn.Module, quality: str, ways: Mapping[str, str] | None = None, *, guides: bool = False
) -> tuple[list[HostSetting], str | None]:
    """Those for this UNet, the one with the most steps last; where there are none, why all is exact, in words. `ways`:
    by what is not done here, where the host has it itself. `guides`: whether guidance is left out by the caller.
    """
    asked, ways = quality_of(quality), ways or {}
    if asked == "exact":
        return [], None
    if isinstance(asked, Skipping):
        return [_of_engine(Setting(1, Approximation(asked), "as given"), ways, guides=guides)], None
    found = [_of_engine(setting, ways, guides=guides) for setting in _known(unet, asked)]
    if any(not setting.skipping.is_exact for setting in found):
        return found, None
    if found:
        last = found[-1]
        others = "".join(f"; {note}" for note in last.notes)
        return [], f"all is exact: what quality {asked} allows for it leaves out no layers ({last.why}){others}"
    return [], f"all is exact: {why_none(_stand_in(unet), asked)}"


def _known(unet: Any, quality: str) -> list[Setting]:
    stand_in = _stand_in(unet)
    return [] if stand_in is None else known(stand_in, quality)


def _stand_in(unet: Any) -> UNet2DConditionModel | None:
    try:
        return UNet2DConditionModel(unet)
    except (AttributeError, IndexError, KeyError, TypeError):
        return None


def _of_engine(setting: Setting, ways: Mapping[str, str], *, guides: bool) -> HostSetting:
    """The one place that reads the engine's settings."""
    skipping = setting.approximation.skipping
    # With a schedule of its own, guidance goes by that.
    guides = guides and not skipping.whole
    notes = _not_done(setting.approximation, ways, guides=guides)
    why = f"its own schedule of whole steps is not done here; {setting.why}" if skipping.whole else setting.why
    return HostSetting(setting.from_steps, _layers(skipping, guides=guides), why, tuple(notes))


def _layers(skipping: Skipping, *, guides: bool = False) -> Skipping:
    """What of it is about a UNet's layers, and about guidance where that is left out."""
    names = (*_OF_A_SETTING, *(_OF_GUIDANCE if guides else ()))
    return Skipping(**{name: getattr(skipping, name) for name in names})


def _not_done(approximation: Approximation, ways: Mapping[str, str], *, guides: bool) -> Iterator[str]:
    guided = guides or not approximation.skipping.skips_guidance
    said = [*([] if guided else ["guidance"]), *sorted(approximation.to_dict())]
    for name in said:
        if name in _WHY_NOT:
            yield _WHY_NOT[name] + (f" ({ways[name]})" if name in ways else "")


class UNet2DConditionModel:
    """What the engine looks at to know a UNet again, of ldm's. The class's name is part of it: these are the weights
    that Diffusers' class of this name has, under other names.
    """

    def __init__(self, unet: Any) -> None:
        self.conv_in, self.conv_out = unet.input_blocks[0][0], unet.out[-1]
        seen = (module for name, module in unet.named_modules() if name.endswith(".attn2"))
        width = getattr(getattr(next(seen, None), "to_k", None), "in_features", None)
        self.config = SimpleNamespace(cross_attention_dim=width, block_out_channels=(unet.model_channels,))
