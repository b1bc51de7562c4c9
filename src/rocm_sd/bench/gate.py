"""The numerics gate of whole pictures: no speed is given for a result that is further from exact than stock's is."""

from __future__ import annotations

import gc
import logging
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.engine import is_out_of_memory
from rocm_sd.errors import NumericsFailure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rocm_sd.bench.workloads import Workload

__all__ = ["PICTURES", "STEPS", "WRONG", "GateVerdict", "PictureGate", "free_memory"]

log = logging.getLogger("rocm_sd")
SEEDS = (0, 1)
# More steps only let random weights drift apart; a wrong kernel shows in the first, what is kept between steps in the
# second.
STEPS = 2
# So many are drawn of each engine: latents of every seed, and one picture with the VAE.
PICTURES = len(SEEDS) + 1
LATENTS_TIMES = 1.5
# One picture, whose error is by chance half as large again; of a wrong VAE it is hundreds of times.
PICTURE_TIMES = 2.0
# What the reason starts with where an engine is skipped for it.
WRONG = "wrong result"


@dataclass(frozen=True)
class GateVerdict:
    """`error` of the latents, relative to the exact ones' norm; `wrong` says why the engine is not timed, or None."""

    error: float
    wrong: str | None


class PictureGate:
    """Exact latents and one exact picture at one batch size, and how far stock is from them in the workload's dtype.

    `defined`: what makes a stock pipeline, of any dtype, the one that is compared with; an approximation is held to its
    own definition so. `times`: how many times stock's error the latents' may be.
    """

    def __init__(
        self,
        workload: Workload,
        batch: int,
        *,
        defined: Callable[[Any], Any] = lambda pipe: pipe,
        steps: int = STEPS,
        seeds: Sequence[int] = SEEDS,
        times: float = LATENTS_TIMES,
    ) -> None:
        self._workload, self._batch, self._defined, self._seeds, self._times = workload, batch, defined, seeds, times
        self.steps = min(steps, workload.facts.steps)
        # Float32 would be compared with itself.
        exact_dtype = torch.float64 if workload.dtype is torch.float32 else torch.float32
        with _full_precision():
            self._latents, self._picture = self._exact(exact_dtype)
        free_memory()
        self.stock_error, self._stock_picture_error = self._errors(defined(workload.pipeline()))
        free_memory()
        if not self.stock_error < float("inf"):
            raise NumericsFailure(
                f"Stock itself gives no finite result with {workload.name} in {workload.facts.dtype}, "
                "so there is nothing to compare with.",
                hint="Give other weights with --model.",
            )

    def check(self, pipe: Any) -> GateVerdict:
        error, picture_error = self._errors(pipe)
        rounding = torch.finfo(self._workload.dtype).eps
        for what, found, times, stock in (
            ("of the latents", error, self._times, self.stock_error),
            ("of the picture", picture_error, PICTURE_TIMES, self._stock_picture_error),
        ):
            # Written so that NaN, which compares false, fails.
            if not found <= times * stock + rounding:
                return GateVerdict(error, f"{WRONG}: the error {what} is {found:.3g}, stock's is {stock:.3g}")
        return GateVerdict(error, None)

    def _exact(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        # One by one: a library's kernel that is wrong for large batches must not be what others are held against.
        alone = range(self._batch)
        try:
            return self._drawn(self._defined(self._workload.pipeline(dtype)), alone)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        # A card with room for the model in half precision need not have it in float32. The roundings are the same.
        free_memory()
        log.warning("too little memory for the model in %s: its layers come to the card one by one", dtype)
        return self._drawn(self._defined(self._workload.pipeline(dtype, by_layers=True)), alone)

    def _drawn(self, pipe: Any, alone: Sequence[int | None] = (None,)) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents of every seed, and a picture of the first. `alone`: which of the batch, each by itself."""

        def draw(seed: int, output: str) -> torch.Tensor:
            each = [
                self._workload.picture(pipe, self._batch, seed=seed, steps=self.steps, output=output, only=number)
                for number in alone
            ]
            return torch.cat([drawn.detach().to("cpu", torch.float64) for drawn in each])

        return torch.stack([draw(seed, "latent") for seed in self._seeds]), draw(self._seeds[0], "pt")

    def _errors(self, pipe: Any) -> tuple[float, float]:
        drawn = self._drawn(pipe)
        if any(one.shape != exact.shape for one, exact in zip(drawn, (self._latents, self._picture), strict=True)):
            return float("nan"), float("nan")
        latents, picture = (
            float((one - exact).norm() / exact.norm())
            for one, exact in zip(drawn, (self._latents, self._picture), strict=True)
        )
        return latents, picture


@contextmanager
def _full_precision() -> Iterator[None]:
    """Convolutions and products of float32 keep all their bits: on a GPU the former keep 10 by default."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
