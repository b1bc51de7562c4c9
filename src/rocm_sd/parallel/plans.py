"""Which strategy on how many ranks: as the user says it, or by what is there, with the reason in words.

A plan is a name (`patch`: all ranks by rows) or a mesh (`cfg=2,patch=2`: the halves of guidance, each on two ranks by
rows). Dimensions stand in one order, from the one that sends least to the one that sends most: ranks of the last are
neighbours on the machine.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from rocm_sd.errors import InvalidOption, Unsupported

__all__ = ["STRATEGIES", "Facts", "Plan", "choose", "parse"]

STRATEGIES = ("data", "cfg", "pipeline", "patch", "tensor")
# Sums of every layer take longer than its products below it: PCIe 4.0 x16 has about 25 in each direction, Infinity
# Fabric between MI300X 50 and more.
_FAST_LINK = 40e9
# Of a card's memory; pictures and the libraries have the rest.
_SHARE_OF_WEIGHTS = 0.8


@dataclass(frozen=True)
class Plan:
    """`dims`: the size of each strategy that is used; `why`: in a sentence."""

    dims: dict[str, int]
    why: str

    @property
    def ranks(self) -> int:
        return math.prod(self.dims.values())

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.dims.items()) or "one rank alone"


@dataclass(frozen=True)
class Facts:
    """What a choice depends on. `weights`: of the whole pipeline, in bytes; `by_tensor` and `by_pipeline`: what of them
    is on the fullest rank then, None where the model has no such plan. `free`: bytes on the fullest card, without the
    pipeline; `link`: bytes a second between two ranks, as measured. `served`: pictures of several requests share each
    call. `guided`: a step computes one half with the prompt and one without.
    """

    ranks: int
    weights: int
    free: int | None
    link: float | None
    is_unet: bool
    pictures: int = 1
    served: bool = False
    guided: bool = True
    by_tensor: int | None = None
    by_pipeline: int | None = None

    @property
    def crowded(self) -> bool:
        return self.free is not None and not self.fits(self.weights)

    def fits(self, weights: int) -> bool:
        """Beside pictures."""
        return self.free is None or weights <= _SHARE_OF_WEIGHTS * self.free


def parse(text: str, ranks: int) -> Plan:
    """A plan by name or as a mesh. Raises InvalidOption, or Unsupported where it does not have so many ranks."""
    dims: dict[str, int] = {}
    for part in text.replace(" x ", ",").split(","):
        name, _, size = part.strip().partition("=")
        if name not in STRATEGIES or name in dims or (size and not re.fullmatch(r"[1-9][0-9]{0,5}", size)):
            hint = f"Use auto, one of {', '.join(STRATEGIES)}, or a mesh such as cfg=2,patch=2."
            raise InvalidOption("plan", text, list(STRATEGIES), hint=hint)
        dims[name] = int(size) if size else 0
    open_ones = [name for name, size in dims.items() if not size]
    known = math.prod(size for size in dims.values() if size)
    if len(open_ones) == 1 and ranks % known == 0:
        dims[open_ones[0]] = ranks // known
    if any(not size for size in dims.values()) or math.prod(dims.values()) != ranks:
        hint = f"Its sizes, multiplied, are to be {ranks}. A name alone takes all of them: {next(iter(dims))}."
        raise Unsupported("plan", f"{text!r} on {ranks} ranks", hint=hint)
    ordered = {name: dims[name] for name in STRATEGIES if dims.get(name, 1) > 1}
    return Plan(ordered, "it was asked for")


def choose(facts: Facts) -> Plan:
    """The plan for what is there. Each of them draws the same picture."""
    ranks = facts.ranks
    fast = facts.link is not None and facts.link >= _FAST_LINK
    link = "whose speed is not known" if facts.link is None else f"with {facts.link / 1e9:.1f} GB/s"
    halved = facts.is_unet and facts.guided
    alone = facts.pictures == 1
    choices: tuple[tuple[bool, dict[str, int], str], ...] = (
        (ranks == 1, {}, "there is one rank"),
        (facts.crowded, *_divided(facts, link, fast=fast)),
        (facts.served, {"cfg": ranks}, "pictures that are drawn at once share a call, and each rank has some of them"),
        (facts.pictures >= ranks, {"data": ranks}, f"{facts.pictures} pictures are drawn, and nothing has to be sent"),
        (halved and ranks == 2, {"cfg": 2}, "each half of guidance has a rank, and one answer a step is sent"),
        # Rows of a picture are sent for every operation: by the model of `scaling`, four MI300X draw SD 1.5 slower then
        # than two with half of guidance each, and three draw it slower than one.
        (
            halved and ranks % 2 == 0,
            {"data": ranks // 2, "cfg": 2},
            "halves of guidance send one answer a step, and pictures nothing",
        ),
        (
            halved and alone,
            {"cfg": ranks},
            "each half of guidance has a rank, and a picture by itself has no third part",
        ),
        (facts.is_unet and alone, {"patch": ranks}, "without guidance a picture by itself has no parts but its rows"),
        (True, {"data": ranks}, "its pictures can be shared out, and nothing else is faster"),
    )
    return next(Plan(dims, why) for holds, dims, why in choices if holds)


def _divided(facts: Facts, link: str, *, fast: bool) -> tuple[dict[str, int], str]:
    """Where the whole is too large for a card: by the link, unless the other plan alone fits."""
    gb = f"{facts.weights / 1e9:.1f} GB of weights do not fit beside pictures into {(facts.free or 0) / 1e9:.1f} GB"
    held = {"tensor": facts.by_tensor, "pipeline": facts.by_pipeline}
    by_link = "tensor" if fast else "pipeline"
    order = sorted(held, key=lambda name: name != by_link)
    known = {name: size for name in order if (size := held[name]) is not None}
    if not known:
        return {by_link: facts.ranks}, f"{gb}, and the link {link} is {'fast' if fast else 'no fast one'}"
    fitting = [name for name, size in known.items() if facts.fits(size)]
    name = fitting[0] if fitting else min(known, key=known.__getitem__)
    has = f"the fullest rank has {known[name] / 1e9:.1f} GB by {name}"
    if not fitting:
        return {name: facts.ranks}, f"{gb}; {has}, the least, and that may not fit either: take more GPUs"
    if name == by_link:
        return {name: facts.ranks}, f"{gb}, and the link {link} is {'fast' if fast else 'no fast one'}; {has}"
    other = "cannot be" if held[by_link] is None else "has more"
    return {name: facts.ranks}, f"{gb}; {has}, and by {by_link} it {other}"
