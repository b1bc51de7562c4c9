"""ComfyUI's own sampling with a model as the host runs it and as it is optimised, in turns on the user's card.

Numbers are compared first: a speed is reported only where the pictures agree.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from rocm_sd.errors import NumericsFailure, Unsupported
from rocm_sd.integrations.comfyui import patching
from rocm_sd.integrations.comfyui.host import is_comfy, the

__all__ = ["Measured", "Sampling", "compare", "measure"]

# Of the result's norm, in units of the dtype's rounding: as for a graph, see engine/capture/captured.py.
_ROUNDINGS = 32.0
_TOKENS = 77
_POOLED = 1280


@dataclass(frozen=True)
class Sampling:
    """One picture's worth of random inputs for a UNet of Stable Diffusion, and the host's sampler over them."""

    width: int
    height: int

    def run(self, patcher: Any, steps: int, cfg: float = 7.5) -> tuple[torch.Tensor, float]:
        """(latents, seconds a step): the first step is not timed, which loads what is not loaded."""
        device = patcher.load_device
        started = 0.0

        def stepped(step: int, *_pictures: Any) -> None:
            nonlocal started
            if step == 0:
                _wait_for(device)
                started = time.perf_counter()

        latent = torch.zeros(1, 4, self.height // 8, self.width // 8)
        noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(0))
        latents: torch.Tensor = the("comfy.sample").sample(
            patcher, noise, steps, cfg, "euler", "normal",
            self._prompt(patcher, 1), self._prompt(patcher, 2), latent, callback=stepped, disable_pbar=True, seed=0,
        )  # fmt: skip
        _wait_for(device)
        return latents, (time.perf_counter() - started) / max(steps - 1, 1)

    @staticmethod
    def _prompt(patcher: Any, seed: int) -> list[Any]:
        width = patcher.model.model_config.unet_config["context_dim"]
        generator = torch.Generator().manual_seed(seed)
        text = torch.randn(1, _TOKENS, width, generator=generator)
        return [[text, {"pooled_output": torch.randn(1, _POOLED, generator=generator)}]]


@dataclass
class Measured:
    """Seconds a step of each run, in turns; `distance` of the two results after one step, of the norm."""

    device: str
    steps: int
    distance: float
    allowed: float
    stock: list[float] = field(default_factory=list)
    optimized: list[float] = field(default_factory=list)
    report: list[str] = field(default_factory=list)

    @property
    def speedup(self) -> float:
        return statistics.median(self.stock) / statistics.median(self.optimized)

    def lines(self) -> list[str]:
        lines = [
            f"{self.device}: {self.speedup:.2f} times as fast as stock",
            f"  results differ by {self.distance:.1e} of their norm after one step; {self.allowed:.1e} is allowed",
        ]
        for name, times in (("stock", self.stock), ("optimised", self.optimized)):
            low, mid, high = (1e3 * pick(times) for pick in (min, statistics.median, max))
            lines.append(f"  {name}: {mid:.2f} ms a step (median of {len(times)} runs, {low:.2f} to {high:.2f})")
        return lines + self.report


def measure(patcher: Any, steps: int, repeats: int, width: int, height: int, level: str) -> Measured:
    """Of a UNet of Stable Diffusion; raises NumericsFailure where the two do not agree."""
    unet = getattr(patcher.model, "diffusion_model", None)
    kind: type = type(unet)
    if unet is None or not is_comfy(kind, "UNetModel", "ldm.modules.diffusionmodules.openaimodel"):
        raise Unsupported("The benchmark", f"a {kind.__name__}", hint="It measures UNets of SD 1.5, SD 2 and SDXL.")
    sampling = Sampling(width, height)
    stock = patching.stock_clone(patcher)
    optimized = patching.optimize_model(patcher, level, "exact")
    distance, allowed = compare(stock, optimized, sampling)
    device = patcher.load_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    measured = Measured(name, steps, distance, allowed)
    for one in (stock, optimized, optimized):
        sampling.run(one, max(steps, 3))
    for _ in range(repeats):
        measured.stock.append(sampling.run(stock, steps)[1])
        measured.optimized.append(sampling.run(optimized, steps)[1])
    report = patching.report_of(optimized)
    measured.report = [] if report is None else report.lines()
    return measured


def compare(stock: Any, optimized: Any, sampling: Sampling) -> tuple[float, float]:
    """(distance, allowed) of one step without guidance, which would show differences many times as large."""
    expected = sampling.run(stock, 1, cfg=1.0)[0].double()
    # The first run of a kind is no graph's yet, the second is captured, the third is its replay.
    for _ in range(3):
        got = sampling.run(optimized, 1, cfg=1.0)[0].double()
    dtype = stock.model.manual_cast_dtype or stock.model.get_dtype()
    eps = torch.finfo(dtype).eps
    if stock.load_device.type == "cuda" and torch.backends.cudnn.allow_tf32:
        # Convolutions of float32 may be computed so.
        eps = max(eps, 2.0**-10)
    distance = float((got - expected).norm() / expected.norm().clamp_min(1e-30))
    allowed = _ROUNDINGS * eps
    if not distance <= allowed:
        raise NumericsFailure(
            f"The optimised model differs by {distance:.1e} of the norm after one step, and {allowed:.1e} is allowed.",
            hint="No speed is reported. Please report it with the text of the report node.",
        )
    return distance, allowed


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
