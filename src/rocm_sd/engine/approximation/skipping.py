"""Which steps of a picture leave what out.

Deep-feature caching: what the deep layers of a UNet hand upwards changes little from one step to the next, so that some
steps compute the shallow layers alone (DeepCache, arXiv 2312.00858). In a transformer that is what all blocks but the
first ones add; how much the first ones add tells how much it will have changed (first-block cache). Guidance: the
difference that a prompt makes changes little, too, so that some steps compute the half of a batch that has the prompt
and take the difference from an earlier step; towards the end it may be left out.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from rocm_sd.errors import InvalidOption

__all__ = ["EXACT", "Skipping", "Step"]


class Step(NamedTuple):
    """`whole`: all layers are computed; otherwise, where `first_block` is given, the first blocks tell. `guided`: both
    halves of the batch are; otherwise the half with the prompt. `difference`: whether such a step has the difference of
    an earlier one, or none.
    """

    whole: bool = True
    guided: bool = True
    difference: bool = True


@dataclass(frozen=True)
class Skipping:
    """`depth`: how many layers of the way up a shallow step of a UNet computes, and how many blocks of a transformer's
    first ones; 0 for no shallow steps. `every`: one of so many steps is whole, and so are the first `whole_first` and
    the last `whole_last`. `order`: 0 to take the deep features as they were, 1 to go on in the direction in which they
    changed.

    `first_block`: of a transformer, a step is shallow where what the first block adds (the first `depth`, if that is
    more) has changed by less than this share since the last whole step; 0 for steps by `every` alone. With both, steps
    that `every` makes whole are whole in any case.

    `whole`: in place of `every`, where whole steps are, each as a share of the schedule: of 20 steps 0.25 is the sixth.

    `guided_every`: one of so many steps computes both halves, and so do the first `guided_first`; from the share
    `guidance_end` of the steps on, no step has guidance. With `whole` and any number above 1, whole steps compute both
    halves, and no others.
    """

    depth: int = 0
    every: int = 1
    whole_first: int = 1
    whole_last: int = 0
    order: int = 0
    guided_every: int = 1
    guided_first: int = 1
    guidance_end: float = 1.0
    first_block: float = 0.0
    whole: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        least = {"depth": 0, "every": 1, "whole_first": 1, "whole_last": 0, "guided_every": 1, "guided_first": 1}
        for name, lowest in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise InvalidOption(name, value, [], hint=f"It takes a whole number of {lowest} or more.")
        if self.order not in {0, 1}:
            raise InvalidOption("order", self.order, ["0", "1"])
        share = self.first_block
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < math.inf:
            hint = "It takes a share of change, such as 0.1; 0 for none."
            raise InvalidOption("first_block", share, [], hint=hint)
        if not 0 <= self.guidance_end <= 1:
            raise InvalidOption("guidance_end", self.guidance_end, [], hint="It takes a share of the steps, 0 to 1.")
        self._check_whole()

    def _check_whole(self) -> None:
        given: Any = self.whole
        if isinstance(given, list):
            # As JSON has it.
            given = tuple(given)
            object.__setattr__(self, "whole", given)
        if not isinstance(given, tuple) or not all(_is_share(value) for value in given):
            hint = "It takes shares of the schedule from 0 to below 1, such as (0, 0.1, 0.4)."
            raise InvalidOption("whole", given, [], hint=hint)
        if any(later <= earlier for earlier, later in pairwise(given)):
            raise InvalidOption("whole", given, [], hint="Each share is to be larger than the one before.")
        if given and (self.every > 1 or self.first_block or not self.depth):
            hint = "It stands in place of every and first_block, and needs a depth of 1 or more."
            raise InvalidOption("whole", given, [], hint=hint)

    @property
    def caches(self) -> bool:
        return self.first_block > 0 or (self.depth > 0 and (self.every > 1 or bool(self.whole)))

    @property
    def head(self) -> int:
        """How many of a transformer's blocks every step computes."""
        return max(self.depth, 1)

    @property
    def skips_guidance(self) -> bool:
        return self.guided_every > 1 or self.guidance_end < 1

    @property
    def is_exact(self) -> bool:
        return not self.caches and not self.skips_guidance

    def step(self, number: int, first: int, count: int) -> Step:
        """Of step `number` of a picture's, which begins at step `first` of `count`."""
        since = number - first
        whole = not self.caches or since < self.whole_first or number >= count - self.whole_last
        whole = whole or (self.every > 1 and (since - self.whole_first + 1) % self.every == 0)
        whole = whole or any(number == math.floor(share * count + 0.5) for share in self.whole)
        if number >= self.guidance_end * count:
            return Step(whole, guided=False, difference=False)
        if self.whole and self.guided_every > 1:
            return Step(whole, guided=whole or since < self.guided_first)
        guided = since < self.guided_first or (since - self.guided_first + 1) % self.guided_every == 0
        return Step(whole, guided)

    def to_dict(self) -> dict[str, Any]:
        """What differs from no approximation at all."""
        return {name: value for name, value in asdict(self).items() if value != getattr(EXACT, name)}

    def __str__(self) -> str:
        said = []
        taken = "extrapolated" if self.order else "reused"
        if self.first_block:
            first = f"the first {self.depth} blocks change" if self.depth > 1 else "the first block changes"
            often = f", one step of {self.every} computes all of them" if self.every > 1 else ""
            said.append(f"later blocks {taken} where {first} by less than {self.first_block:g}{often}")
        elif self.whole:
            at = ", ".join(f"{share:.0%}" for share in self.whole)
            said.append(f"deep features {taken}, steps at {at} of the schedule compute all layers (depth {self.depth})")
        elif self.caches:
            said.append(f"deep features {taken}, one step of {self.every} computes all layers (depth {self.depth})")
        if self.guided_every > 1 and self.whole:
            said.append("guidance reused, the same steps compute it")
        elif self.guided_every > 1:
            said.append(f"guidance reused, one step of {self.guided_every} computes it")
        if self.guidance_end < 1:
            said.append(f"no guidance after {self.guidance_end:.0%} of the steps")
        return ", ".join(said) or "nothing left out"


def _is_share(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1


EXACT = Skipping()
