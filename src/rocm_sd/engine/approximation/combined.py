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


@dataclass(frozen=True)
class Approximation:
    """`skipping`: which steps leave what out. `merged`: of the outermost blocks' tokens three in four may be taken
    together with others by attention, and this share of them is. `eight_bits`: what the denoiser's products are
    computed in, or None for their own dtype. `small_decoder`: whether the small decoder draws the picture.
    """

    skipping: Skipping = field(default_factory=Skipping)
    merged: float = 0.0
    eight_bits: str | None = None
    small_decoder: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.merged < 1:
            raise InvalidOption("merged", self.merged, [], hint="It takes a share of the tokens, from 0 to below 1.")
        if self.eight_bits is not None:
            require_one_of("eight_bits", self.eight_bits, EIGHT_BITS)

    @property
    def is_exact(self) -> bool:
        return self.skipping.is_exact and not (self.merged or self.eight_bits or self.small_decoder)

    def to_dict(self) -> dict[str, Any]:
        """What differs from no approximation at all."""
        said: dict[str, Any] = {} if self.skipping.is_exact else {"skipping": self.skipping.to_dict()}
        names = ("merged", "eight_bits", "small_decoder")
        return said | {name: getattr(self, name) for name in names if getattr(self, name)}

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
        if self.small_decoder:
            said.append("small decoder")
        return ", ".join(said) or "nothing left out"


NOTHING = Approximation()
