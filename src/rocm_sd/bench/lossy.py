"""Engines that approximate: held to their own definition in numerics, and scored by their pictures.

The definition of an approximation that leaves out steps is the same setting on a stock pipeline: which steps compute
what is decided by their numbers alone, so that float64 decides the same. That of layers in 8 bits is their rounding, of
stock's weights and of what comes in, around stock's products (eight_bit_definition.py). An engine's error against the
definition in float64 is at most twice that of the definition in the workload's own dtype, with stock's ops, in as many
steps as are timed. Where what was computed decides what is left out (tokens merged by their nearness, blocks left out
by how much the first one changed), float64 would take other decisions: there is no such definition, the record says so,
and the pictures alone decide.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rocm_sd.bench import subjects, verdict
from rocm_sd.bench.eight_bit_definition import EightBitDefinition
from rocm_sd.bench.gate import SEEDS, WRONG, PictureGate, free_memory
from rocm_sd.bench.quality_search import approximated_model
from rocm_sd.engine import Approximation, Parts, Skipping, optimize_with
from rocm_sd.engine.approximation import known
from rocm_sd.integrations import diffusers as host

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from PIL.Image import Image

    from rocm_sd.bench.subjects import Subjects
    from rocm_sd.bench.workloads import Workload

__all__ = [
    "NO_DEFINITION", "TIMES", "Judged", "Lossy", "LossyJudge", "approximation_of", "by_definition", "claiming",
    "definition_of", "draw", "numerics",
]  # fmt: skip

# Of the definition's own error in the same dtype, over all steps: errors of many steps differ by chance more than those
# of the two that exact engines are compared in.
TIMES = 2.0
NO_DEFINITION = "not compared with a definition in float64, which would decide otherwise: its pictures alone were"
# Nothing of the engine but what leaves out steps.
_STOCK_OPS = Parts(rules=frozenset(), convolution_library=False, hoisted=False, captured=False, calibrated=False)


@dataclass(frozen=True)
class Lossy:
    """What an engine that approximates says of itself. `quality`: whose budget it claims.

    `setting(pipe, steps)`: in words what is left out of pictures of so many steps, "" for nothing. `definition(pipe,
    steps)`: gets a stock pipeline of any dtype and returns it with the same approximation and stock's ops; None where
    there is no such definition. Layers in 8 bits are no part of it: they are found in the engine's pipeline.
    """

    quality: str
    setting: Callable[[Any, int], str]
    definition: Callable[[Any, int], Any | None]


def approximation_of(pipe: Any, quality: str, steps: int) -> Approximation:
    """What `optimize(pipe, quality=...)` approximates in pictures of so many steps."""
    model = approximated_model(pipe)
    settings = [] if model is None else known(model, quality)
    fitting = [setting for setting in settings if setting.from_steps <= steps]
    return fitting[-1].approximation if fitting else Approximation()


def by_definition(pipe: Any, approximation: Approximation) -> Any:
    return optimize_with(pipe, "performance", approximation, _STOCK_OPS)


def definition_of(approximation: Approximation) -> Callable[[Any], Any] | None:
    """Of a stock pipeline, but for layers in 8 bits; None where what was computed decides, or another model draws."""
    wide = replace(approximation, eight_bits=None, eight_bit_decoder=None, eight_bit_encoder=None)
    if not replace(wide, skipping=Skipping()).is_exact or wide.skipping.first_block:
        return None
    return partial(by_definition, approximation=wide)


@dataclass(frozen=True)
class Numerics:
    """Errors as in a measurement; `wrong`: why the engine is not what it is defined to be, or None."""

    error: float
    stock_error: float
    wrong: str | None


def numerics(
    workload: Workload,
    batch: int,
    pipe: Any,
    defined: Callable[[Any], Any],
    *,
    steps: int,
    seeds: Sequence[int] = SEEDS,
) -> Numerics:
    """Of an engine's pipeline, which has drawn a picture. `defined`: as a definition, see `Lossy`."""
    in_eight_bits = EightBitDefinition(pipe, workload.dtype)

    def whole(stock: Any) -> Any:
        return defined(in_eight_bits.define(stock))

    gate = PictureGate(workload, batch, defined=whole, steps=steps, seeds=seeds, times=TIMES)
    found = gate.check(pipe)
    reason = in_eight_bits.why_wrong()
    return Numerics(found.error, gate.stock_error, found.wrong if reason is None else f"{WRONG}: {reason}")


def claiming(quality: str) -> Lossy:
    """`rocm_sd.optimize(pipe, quality=...)` as an engine."""

    def setting(pipe: Any, steps: int) -> str:
        found = approximation_of(pipe, quality, steps)
        return "" if found.is_exact else str(found)

    def definition(pipe: Any, steps: int) -> Any | None:
        defined = definition_of(approximation_of(pipe, quality, steps))
        return None if defined is None else defined(pipe)

    return Lossy(quality, setting, definition)


def draw(workload: Workload, pipe: Any, text: str, seed: int) -> Image:
    facts = workload.facts
    request = host.Request(
        text, workload.recipe.negative, facts.steps, facts.guidance, seed, width=facts.width, height=facts.height
    )
    image: Image = host.generate(pipe, request).images[0]
    return image


@dataclass(frozen=True)
class Judged:
    """`error` and `stock_error` as in a measurement; `why_not`: the reason that it is not timed, or None."""

    error: float | None = None
    stock_error: float | None = None
    why_not: str | None = None
    quality: verdict.Quality = verdict.EXACT
    notes: tuple[str, ...] = ()


class LossyJudge:
    """Of one workload. Stock's pictures are drawn once, with the first engine that needs them, and so is each score: a
    setting's pictures do not depend on the batch size that it is timed at.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._exact: list[Image] = []
        self._scored: dict[str, verdict.Quality] = {}
        self._subjects: Subjects | None = None

    def judge(self, name: str, lossy: Lossy, pipe: Any, batch: int, say: Callable[[str], object]) -> Judged:
        facts = self._workload.facts
        if facts.weights == "random":
            return Judged(why_not="random weights show nothing of quality: give --model, or take the workload emoji")
        setting = lossy.setting(pipe, facts.steps)
        if not setting:
            tune = f"rocm-sd tune --quality MODEL --steps {facts.steps}"
            return Judged(
                why_not=f"{lossy.quality} leaves nothing out of pictures of {facts.steps} steps of this model: "
                f"nothing was measured for them; give more --steps, or type: {tune}"
            )
        say("compared with its definition")
        error, stock_error, wrong, notes = self._numerics(lossy, pipe, batch)
        if wrong:
            return Judged(error, stock_error, wrong)
        if name not in self._scored:
            self._scored[name] = self._score(lossy.quality, setting, pipe, say)
        return Judged(error, stock_error, None, self._scored[name], notes)

    def _numerics(
        self, lossy: Lossy, pipe: Any, batch: int
    ) -> tuple[float | None, float | None, str | None, tuple[str, ...]]:
        steps = self._workload.facts.steps
        # Asked of a pipeline that is thrown away: what it says does not depend on the dtype.
        if lossy.definition(self._workload.pipeline(), steps) is None:
            return None, None, None, (NO_DEFINITION,)
        found = numerics(self._workload, batch, pipe, lambda stock: lossy.definition(stock, steps), steps=steps)
        return found.error, found.stock_error, found.wrong, ()

    def _score(self, quality: str, setting: str, pipe: Any, say: Callable[[str], object]) -> verdict.Quality:
        if self._subjects is None:
            name = self._workload.facts.weights
            self._subjects = subjects.of_model(name, subjects.default_count(self._workload.device))
        if not self._exact:
            self._exact = self._pictures(self._workload.pipeline(), self._subjects.texts, "stock", say)
            free_memory()
        ours = self._pictures(pipe, self._subjects.texts, "its own", say)
        scored = subjects.scores(ours, self._exact, self._subjects.match)
        return verdict.measured(quality, setting, scored)

    def _pictures(self, pipe: Any, texts: Sequence[str], whose: str, say: Callable[[str], object]) -> list[Image]:
        images = []
        for number, text in enumerate(texts):
            say(f"pictures to score, {whose}, {number + 1} of {len(texts)}")
            images.append(draw(self._workload, pipe, text, number))
        return images
