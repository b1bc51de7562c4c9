"""All that is approximated in a pipeline, together: which steps leave what out, and what is computed more coarsely."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rocm_sd.engine.approximation.skipping import Skipping
from rocm_sd.errors import InvalidOption, require_one_of

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["EIGHT_BITS", "NOTHING", "Approximation"]

EIGHT_BITS = ("int8", "fp8")
_METHODS = ("merged", "eight_bits", "eight_bit_decoder", "eight_bit_encoder", "small_decoder", "stale_after")


@dataclass(frozen=True)
class Approximation:
    """`skipping`: which steps leave what out. `merged`: of the outermost blocks' tokens three in four may be taken
    together with others by attention, and this share of them is. `eight_bits`: what the denoiser's products are
    computed in, or None for their own dtype; `eight_bit_decoder` and `eight_bit_encoder`: likewise those of the VAE's
    two halves. `small_decoder`: whether the small decoder draws the picture. `stale_after`: where several GPUs have
    rows of a picture, steps after the first so many compute with what the others sent a step before; 0 for none.
    """

    skipping: Skipping = field(default_factory=Skipping)
    merged: float = 0.0
    eight_bits: str | None = None
    small_decoder: bool = False
    eight_bit_decoder: str | None = None
    stale_after: int = 0
    eight_bit_encoder: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.merged < 1:
            raise InvalidOption("merged", self.merged, [], hint="It takes a share of the tokens, from 0 to below 1.")
        for name in ("eight_bits", "eight_bit_decoder", "eight_bit_encoder"):
            if getattr(self, name) is not None:
                require_one_of(name, getattr(self, name), EIGHT_BITS)
        stale = self.stale_after
        if isinstance(stale, bool) or not isinstance(stale, int) or stale < 0:
            raise InvalidOption("stale_after", stale, [], hint="It takes a number of steps, 1 or more; 0 for none.")
        if stale and not self.skipping.is_exact:
            hint = "Leave out one of the two: what a step does not compute, it has not sent to the step after it."
            raise InvalidOption("stale_after", stale, [], hint=hint)
        halves = {self.eight_bit_decoder, self.eight_bit_encoder} - {None}
        if len(halves) > 1:
            hint = "Give both halves of the VAE the same: it is one model, and saved as one file."
            raise InvalidOption("eight_bit_encoder", self.eight_bit_encoder, [str(self.eight_bit_decoder)], hint=hint)
        if self.small_decoder and self.eight_bit_decoder:
            hint = "Leave out one of the two: with the small decoder, the VAE's own draws nothing."
            raise InvalidOption("eight_bit_decoder", self.eight_bit_decoder, [], hint=hint)

    @property
    def is_exact(self) -> bool:
        return self.skipping.is_exact and not any(getattr(self, name) for name in _METHODS)

    def to_dict(self) -> dict[str, Any]:
        """What differs from no approximation at all."""
        said: dict[str, Any] = {} if self.skipping.is_exact else {"skipping": self.skipping.to_dict()}
        return said | {name: getattr(self, name) for name in _METHODS if getattr(self, name)}

    @classmethod
    def from_dict(cls, said: Mapping[str, Any]) -> Approximation:
        """Raises TypeError for a name that there is not."""
        return cls(**{**said, "skipping": Skipping(**said.get("skipping", {}))})

    def __str__(self) -> str:
        said = [] if self.skipping.is_exact else [str(self.skipping)]
        if self.merged:
            said.append(f"{self.merged:.0%} of three in four outermost tokens merged")
        if self.eight_bits:
            said.append(f"products in {self.eight_bits}")
        if self.eight_bit_decoder:
            said.append(f"decoder in {self.eight_bit_decoder}")
        if self.eight_bit_encoder:
            said.append(f"encoder in {self.eight_bit_encoder}")
        if self.small_decoder:
            said.append("small decoder")
        if self.stale_after:
            steps = "the first step" if self.stale_after == 1 else f"the first {self.stale_after} steps"
            said.append(f"rows of other GPUs a step old after {steps}")
        return ", ".join(said) or "nothing left out"


NOTHING = Approximation()
