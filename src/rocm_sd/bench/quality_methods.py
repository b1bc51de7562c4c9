"""What else than steps can be left out: each method timed by itself, and the combinations of those that are faster.

A method is what one field of an `Approximation` beside `skipping` says. It takes part in the search where this model on
this machine can have it, and where pictures take less time by it beyond doubt; otherwise it is listed with the reason.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rocm_sd import measuring
from rocm_sd.bench.turns import failure_line, without_folders
from rocm_sd.engine import Approximation, Skipping

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rocm_sd.arch import Arch

__all__ = [
    "METHODS",
    "TIMED",
    "Method",
    "combinations",
    "is_part",
    "parts",
    "timed_alone",
    "why_not_at_work",
    "why_not_here",
]

METHODS = (
    *(Approximation(merged=share) for share in (0.3, 0.5, 0.8)),
    Approximation(eight_bits="int8"),
    Approximation(eight_bits="fp8"),
    Approximation(eight_bit_decoder="int8"),
    Approximation(eight_bit_decoder="fp8"),
    Approximation(small_decoder=True),
)
# Each is made ready so often, in turns with exact, and so many of its pictures are timed then.
_ROUNDS = 2
TIMED = measuring.LEAST_TURNS // _ROUNDS
# Of a picture; what is reckoned from shares is not less.
_LEAST_COST = 0.01


@dataclass(frozen=True)
class Method:
    """`speedup`: over exact with its interval, None where it was not timed. `why_not`: why it takes no part in the
    search, or None.
    """

    approximation: Approximation
    speedup: tuple[float, float, float] | None
    why_not: str | None = None

    @property
    def share(self) -> float:
        """Of an exact picture's time, that one of this takes."""
        return 1.0 if self.speedup is None else 1 / self.speedup[0]

    def to_dict(self) -> dict[str, Any]:
        said = {"method": self.approximation.to_dict(), "speedup": None if self.speedup is None else list(self.speedup)}
        return said | ({} if self.why_not is None else {"why_not": self.why_not})

    def __str__(self) -> str:
        took = "" if self.speedup is None else "{:.2f} ({:.2f} to {:.2f}) times exact by itself".format(*self.speedup)
        not_in = "" if self.why_not is None else f"no part of the search: {self.why_not}"
        return f"{self.approximation}: {', '.join(filter(None, (took, not_in)))}"


def why_not_here(method: Approximation, facts: Arch) -> str | None:
    """Why it need not be tried on such a device, in words."""
    formats = ("float8_e4m3fn", "float8_e4m3fnuz")
    if "fp8" in {method.eight_bits, method.eight_bit_decoder} and not any(facts.multiplies(each) for each in formats):
        return f"{facts.name} has no instructions that multiply fp8"
    return None


def why_not_at_work(method: Approximation, notes: Sequence[str]) -> str | None:
    """Why nothing came of it, by what the report says after a picture; None where it was at work."""
    if method.merged:
        at_work = any(" ran on " in note and note.endswith(" tokens") for note in notes)
    elif method.eight_bits or method.eight_bit_decoder:
        at_work = any(" layers multiply in " in note and ": 0 layers " not in note for note in notes)
    else:
        at_work = any(note.endswith("drawn by the small decoder") for note in notes)
        at_work = at_work and not any(" decodes by the VAE's own decoder" in note for note in notes)
    if at_work:
        return None
    # What says that it is approximated says what was asked for.
    said = "; ".join(note for note in notes if "is approximated" not in note and "merged (as given)" not in note)
    return without_folders(said) or "the report does not say that it was at work"


def timed_alone(
    seconds: Callable[[Approximation], Sequence[float]],
    why_not: Callable[[Approximation], str | None],
    facts: Arch,
) -> list[Method]:
    """Of all methods, timed once. `seconds`: what some pictures took with it; `why_not`: asked after that, why nothing
    came of it.
    """
    reasons = {method: reason for method in METHODS if (reason := why_not_here(method, facts)) is not None}
    exact: list[float] = []
    taken: dict[Approximation, list[float]] = {method: [] for method in METHODS}
    for number in range(_ROUNDS):
        # Of so few timings the interval is what their extremes allow: one that reaches 1 stays there.
        left = [one for one in METHODS if one not in reasons and (not number or _is_faster(taken[one], exact))]
        if not left:
            break
        for one in [*reversed(left), None] if number % 2 else [None, *left]:
            if one is None:
                exact += seconds(Approximation())
                continue
            try:
                taken[one] += seconds(one)
            except Exception as error:  # noqa: BLE001 -- whatever it is, the others are tried
                reasons[one] = failure_line(error)
                continue
            reason = why_not(one)
            if reason is not None:
                reasons[one] = reason
    return [_judged(method, taken[method], exact, reasons.get(method)) for method in METHODS]


def _is_faster(ours: Sequence[float], exact: Sequence[float]) -> bool:
    return measuring.interval(ours, exact)[0] > 1


def _judged(method: Approximation, ours: Sequence[float], exact: Sequence[float], reason: str | None) -> Method:
    if reason is not None or not ours:
        return Method(method, None, reason or "it was not timed")
    speedup = statistics.median(exact) / statistics.median(ours), *measuring.interval(ours, exact)
    return Method(method, speedup, None if speedup[1] > 1 else "it is not faster beyond doubt")


def combinations(shares: Mapping[Approximation, float]) -> Iterator[tuple[Callable[[float], float], Approximation]]:
    """Each set of methods that can be had together, nothing among them, and what a picture takes with it that takes so
    much without. `shares`: of an exact picture's time, by method alone. Merged tokens and eight bits make steps
    cheaper, by a factor; another decoder saves the same whatever steps leave out. It is reckoned to put them into an
    order; what is taken is timed.
    """
    merged = [one for one in shares if one.merged]
    eight_bits = [one for one in shares if one.eight_bits]
    decoders = [one for one in shares if _decodes(one)]
    for chosen in itertools.product((None, *merged), (None, *eight_bits), (None, *decoders)):
        methods = [one for one in chosen if one is not None]
        together = Approximation()
        factor, saved = 1.0, 0.0
        for one in methods:
            together = replace(together, **{name: value for name, value in one.to_dict().items() if name != "skipping"})
            if _decodes(one):
                saved = 1 - shares[one]
            else:
                factor *= shares[one]
        yield _cost(factor, saved), together


def _decodes(method: Approximation) -> bool:
    """Whether it is about the decoder, of which there is one."""
    return method.small_decoder or method.eight_bit_decoder is not None


def _cost(factor: float, saved: float) -> Callable[[float], float]:
    return lambda cost: max(cost * factor - saved, _LEAST_COST)


def parts(approximation: Approximation) -> list[Approximation]:
    """Each of its methods by itself, where it has more than one."""
    methods = approximation.to_dict().keys() - {"skipping"}
    alone = [
        Approximation(approximation.skipping),
        *(Approximation(**{name: getattr(approximation, name)}) for name in sorted(methods)),
    ]
    alone = [one for one in alone if not one.is_exact]
    return alone if len(alone) > 1 else []


def is_part(one: Approximation, other: Approximation) -> bool:
    """Whether `other` leaves out all that `one` does."""
    return (
        one.skipping in {Skipping(), other.skipping}
        and one.merged <= other.merged
        and one.eight_bits in {None, other.eight_bits}
        and one.eight_bit_decoder in {None, other.eight_bit_decoder}
        and one.small_decoder <= other.small_decoder
    )
