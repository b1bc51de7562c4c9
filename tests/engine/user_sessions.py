"""What a user may do to a pipeline between two pictures, one operation at a time, and the picture after it.

A session holds three pipelines of the same weights (optimised, stock, stock in float64) and does everything to each.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import test_sequences
import torch
from hypothesis import strategies as st
from torch import nn

from pipelines import (
    CASES,
    call,
    exactly,
    require_as_exact_as_stock,
    small_blocks_too,
)
from rocm_sd import numerics
from rocm_sd.engine import model_ways
from rocm_sd.rewrite import RULES, RULES_FOR_GRAPHS, resblock, vae_attention

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import pytest

KINDS = {"sd15": "sd15-img2img", "sdxl": "sdxl-img2img", "sd3": "sd3-img2img", "flux-dev": "flux-img2img"}
MODES = {
    "": torch.no_grad,
    "grad": torch.enable_grad,
    "inference": torch.inference_mode,
}
# Before a picture is called wrong: over 256 values an error is by chance more than twice stock's, once in some
# thousand pictures. The rule is the same over more of them, and holds the first.
MORE_SEEDS = (11, 12, 13, 14, 15)

COUNTS: Counter[str] = Counter()


def every_rule(patch: pytest.MonkeyPatch, step_graph: str) -> None:
    """Rules that a CPU or a model this small would do without as well."""
    small_blocks_too(patch, step_graph)
    patch.setattr(resblock, "WORTH_IT_ON_CPU", 0)
    patch.setattr(vae_attention, "_WORTH_IT_ON_CPU", 0)
    every = tuple(rule if rule.on_cpu else replace(rule, on_cpu=True) for rule in (*RULES, *RULES_FOR_GRAPHS))
    patch.setattr(model_ways, "RULES", every)
    patch.setattr(model_ways, "RULES_FOR_GRAPHS", ())


class Session(test_sequences.Walk):
    """Of one user, with one kind of pipeline."""

    def __init__(self, kind: str, folder: Path) -> None:
        super().__init__(kind, folder, 0)
        self.options = {"num_inference_steps": 2}
        self.optimised = True
        self.mode = ""
        self.decoded = False
        self.changes: list[tuple[str, str]] = []
        self.forwards: list[list[tuple[nn.Module, Callable[..., Any]]]] = []
        self.steps: list[list[tuple[Any, Callable[..., Any]]]] = []
        self.offloaded: str | None = None
        # Of img2img, which share everything with the three; and all of them that were optimised.
        self.others: list[Any] | None = None
        self.also_optimised: list[Any] = []

    @property
    def pipes(self) -> list[Any]:
        return [self.twins.stock, self.twins.exact, self.twins.ours]

    def model(self, pipe: Any) -> nn.Module:
        return getattr(pipe, self.part)

    def each(self, operation: Callable[[Any], Any]) -> list[Any]:
        """What stock refuses, ours refuses in the same way. The weights of the exact one are stock's afterwards."""
        found = [asked(operation, pipe) for pipe in self.pipes]
        refused(found)
        self.twins.exact.to(torch.float64)
        for name, part in self.twins.stock.components.items():
            if isinstance(part, nn.Module):
                exact = getattr(self.twins.exact, name)
                for mine, stocks in zip(exact.parameters(), part.parameters(), strict=True):
                    mine.data.copy_(stocks.data)
        return found

    def become(self, stock: Any, exact: Any, ours: Any) -> None:
        self.twins.stock, self.twins.exact, self.twins.ours = stock, exact, ours
        for pipe in self.pipes:
            pipe.set_progress_bar_config(disable=True)
        self.others, self.also_optimised = None, []

    def is_plain(self) -> bool:
        """Whether a copy of the pipeline, or one that was saved, is the same pipeline."""
        return self.adapter is None and not (self.changes or self.forwards or self.steps or self.offloaded)

    def drawn(self, pipe: Any, case: Any, seed: int, options: dict[str, Any]) -> torch.Tensor:
        made = {name: value() if name == "generator" else value for name, value in options.items()}
        # A callback may write into what it was given, and the next pipeline is given the same.
        made |= {name: value.clone() for name, value in made.items() if isinstance(value, torch.Tensor)}
        # A step that was wrapped shows no argument for a generator, and is given none.
        torch.manual_seed(seed)
        with MODES[self.mode]():
            return call(pipe, case, seed, **made).clone()

    def drawn_exactly(self, draw: Callable[[int, int], torch.Tensor], index: int, seed: int) -> torch.Tensor:
        with exactly(self.twins.dtype):
            return draw(index, seed)

    def look(self, seed: int) -> None:
        self.random = random.Random(seed)
        options = self.arguments() | {"output_type": "pt" if self.decoded else "latent"}
        self.judge(lambda index, seed: self.drawn(self.pipes[index], self.case, seed, options), seed)

    def look_at_others(self, seed: int) -> None:
        case = CASES[KINDS[self.name]]
        options = {"num_inference_steps": 2}
        self.judge(lambda index, seed: self.drawn(self.others[index], case, seed, options), seed)

    def judge(self, draw: Callable[[int, int], torch.Tensor], seed: int) -> None:
        """`draw(index of a pipeline, seed)`. Stock's bits without `optimize`, and its exactness with it."""
        COUNTS["pictures"] += 1
        # Bits are compared with stock's alone.
        stock, exact, ours = (
            asked(self.drawn_exactly, draw, index, seed) if self.optimised or index != 1 else None for index in range(3)
        )
        if refused([stock, exact, ours]):
            return
        if not self.optimised:
            assert torch.equal(ours.isnan(), stock.isnan())
            assert torch.equal(ours.nan_to_num(), stock.nan_to_num()), "it is not optimised, and not stock's bits"
            return
        compared = numerics.compare(ours, exact, stock)
        if not compared.stock_rms < 0.2 * float(exact.std()):
            # Two wrong pictures tell nothing of each other, but for where there is none at all.
            COUNTS["unjudged"] += 1
            assert ours.shape == stock.shape
            assert bool(ours.isfinite().all()) or not bool(stock.isfinite().all())
            return
        if compared.rms <= 2 * compared.stock_rms + compared.floor:
            assert ours.dtype == stock.dtype
            return
        COUNTS["drawn again"] += 1
        with laid_out_as(self.twins.ours, self.twins.stock):
            several = [[self.drawn_exactly(draw, index, each) for index in range(3)] for each in (seed, *MORE_SEEDS)]
        # Of bfloat16 and a schedule of zero SNR, it hangs on a rounding whether there is a picture at all.
        finite = [pictures for pictures in several if bool(pictures[0].isfinite().all())]
        COUNTS["unjudged"] += len(several) - len(finite)
        assert finite, "stock has no picture at all in this layout"
        stocks, exacts, all_ours = zip(*finite, strict=True)
        require_as_exact_as_stock(list(all_ours), list(exacts), list(stocks), times=2)


@contextmanager
def laid_out_as(ours: Any, stock: Any) -> Iterator[None]:
    """The tests lay models out as no CPU is allowed to (conftest.py): torch's own kernels of that layout are further
    from exact, in gradients four times, and stock in the same layout is what ours may be twice as far off as.
    """
    changed = []
    for name, part in ours.components.items():
        if isinstance(part, nn.Module):
            for mine, stocks in zip(part.parameters(), getattr(stock, name).parameters(), strict=True):
                if mine.dim() == 4 and not mine.is_contiguous() and stocks.is_contiguous():
                    stocks.data = stocks.data.contiguous(memory_format=torch.channels_last)
                    changed.append(stocks)
    try:
        yield
    finally:
        for parameter in changed:
            parameter.data = parameter.data.contiguous()


def asked(operation: Callable[..., Any], *arguments: Any) -> Any:
    """Its answer, or its refusal."""
    try:
        return operation(*arguments)
    except Exception as error:  # noqa: BLE001 -- whatever stock says
        return error


def refused(answers: list[Any]) -> bool:
    """Whether stock refuses; the others then do so as well, and in the same way."""
    stock, exact, ours = (answer if isinstance(answer, Exception) else None for answer in answers)
    COUNTS["refused"] += stock is not None
    if type(stock) is not type(ours) or (stock is None and exact is not None):
        raise AssertionError(f"one refuses what another does: {stock!r}, {exact!r}, {ours!r}") from ours or exact
    return stock is not None


@dataclass(frozen=True)
class Operation:
    run: Callable[..., Any]
    arguments: dict[str, st.SearchStrategy[Any]]
    when: Callable[[Session], bool]


OPERATIONS: dict[str, Operation] = {}


def operation(when: Callable[[Session], bool] = lambda _session: True, **arguments):
    """`when` it makes sense, with which arguments."""

    def register(function):
        OPERATIONS[function.__name__] = Operation(function, arguments, when)
        return function

    return register


one_of = st.sampled_from


def has_unet(session: Session) -> bool:
    return session.part == "unet"
