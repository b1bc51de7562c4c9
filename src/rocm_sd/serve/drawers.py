"""The models of this process, loaded and optimised on one device: pictures that are drawn at once share their steps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd import models
from rocm_sd.engine import calibration, graphs_wanted, optimize, optimize_with
from rocm_sd.engine.batching import LADDER, StepBatcher
from rocm_sd.engine.capture import moves_weights
from rocm_sd.errors import InvalidOption, Unsupported
from rocm_sd.integrations.diffusers import Drawing, Request, SharedPipeline, generate, load_pipeline
from rocm_sd.integrations.diffusers.loading import default_device, hush
from rocm_sd.integrations.diffusers.shared import UNCALIBRATED
from rocm_sd.serve.logs import log
from rocm_sd.serve.service import ModelFacts

if TYPE_CHECKING:
    from collections.abc import Callable

    from PIL.Image import Image

    from rocm_sd.models import ModelSource
    from rocm_sd.serve.config import ServeConfig
    from rocm_sd.serve.metrics import Metrics

__all__ = ["LocalDrawer", "ReadyPipes", "measure", "require_loras_of_one", "sources"]

_WARM_UP, _WARM_UP_STEPS = "a picture to warm up", 4


def sources(given: tuple[str, ...]) -> dict[str, ModelSource]:
    """By the name that clients use, which is no path of this machine."""
    found: dict[str, ModelSource] = {}
    for model in given or (None,):
        source = models.resolve(model)
        is_local = source.kind in {models.ModelKind.FOLDER, models.ModelKind.FILE}
        name = Path(source.location).resolve().stem if is_local else source.name
        if name in found:
            raise InvalidOption("MODEL", model, [], hint=f"Two models would have the name {name}: rename a folder.")
        found[name] = source
    return found


def require_loras_of_one(config: ServeConfig) -> None:
    if config.loras and len(config.models) > 1:
        raise Unsupported("Serving", "LoRAs for several models at once", hint="Start a server for each.")


def _ready(pipe: Any, level: str) -> Any:
    """Optimised for good: what is measured at a model's first picture is measured now, not while somebody waits, and
    not again for each number of pictures that share a step.
    """
    if calibration.wanted(pipe.device, graphs=graphs_wanted(pipe.device)):
        measure(pipe, level)
    return optimize_with(pipe, level, "exact", UNCALIBRATED)


def measure(pipe: Any, level: str) -> None:
    """By a picture that nobody waits for."""
    log.info("measuring", extra={"model": type(pipe).__name__})
    generate(optimize(pipe, level=level), Request(_WARM_UP, steps=_WARM_UP_STEPS))


def _warm_up(shared: SharedPipeline, in_flight: int) -> None:
    """Each number of pictures is a graph, which takes seconds to capture: before the first request, not in it."""
    for count in (size for size in LADDER if size <= in_flight):
        log.info("capturing", extra={"pictures": count})
        with ThreadPoolExecutor(count) as threads:
            drawings = [Drawing(_WARM_UP, steps=_WARM_UP_STEPS, seed=number) for number in range(count)]
            list(threads.map(shared.draw, drawings))


@dataclass(frozen=True)
class ReadyPipes:
    """Pipelines that were made ready elsewhere, by name. `captured`: their calls are graphs. `on_loras(name, loras)`:
    called before the first call of one with these.
    """

    pipes: dict[str, Any]
    device: torch.device
    captured: bool
    on_loras: Callable[[str, Any], None]


class LocalDrawer:
    """`ready`: the pipelines, where they are not to be loaded here."""

    def __init__(self, config: ServeConfig, metrics: Metrics, ready: ReadyPipes | None = None) -> None:
        hush()
        device = default_device(config.device) if ready is None else ready.device
        named = sources(config.models)
        require_loras_of_one(config)
        self.device, self._ready = device, ready
        self._captured = graphs_wanted(device) if ready is None else ready.captured
        # Two samples a picture, where it has guidance. Each number of samples is a graph, where there are any.
        self._batcher = StepBatcher(
            device,
            most=2 * config.limits.in_flight,
            ladder=LADDER if self._captured else (),
            on_batch=metrics.batch,
        )
        self._shared: dict[str, SharedPipeline] = {}
        self._facts: dict[str, ModelFacts] = {}
        try:
            for name, source in named.items():
                self._load(name, source, config)
        except BaseException:
            self.close()
            raise

    def _load(self, name: str, source: ModelSource, config: ServeConfig) -> None:
        pipe, on_loras = self._pipe(name, source, config)
        if moves_weights(pipe.unet):
            reason = f"{name} on {self.device}, which has no room for all of its weights"
            raise Unsupported("Serving", reason, hint="Draw by: rocm-sd generate, or serve it on a larger card.")
        shared = SharedPipeline(pipe, self._batcher, dict(config.loras), config.qualities, on_loras, name)
        self._shared[name] = shared
        if self._captured:
            _warm_up(shared, config.limits.in_flight)
        side = pipe.unet.config.sample_size
        height, width = (side, side) if isinstance(side, int) else side
        size = width * pipe.vae_scale_factor, height * pipe.vae_scale_factor
        can = tuple(each for each in config.qualities if shared.why_not(each) is None)
        self._facts[name] = ModelFacts(name, *size, source.guidance, can, tuple(sorted(shared.loras)))

    def _pipe(
        self, name: str, source: ModelSource, config: ServeConfig
    ) -> tuple[Any, Callable[[tuple[tuple[str, float], ...]], None]]:
        if self._ready is None:
            return _ready(load_pipeline(source, self.device), config.level), lambda _loras: None
        return self._ready.pipes[name], partial(self._ready.on_loras, name)

    def models(self) -> dict[str, ModelFacts]:
        return dict(self._facts)

    def draw(
        self,
        model: str,
        drawing: Drawing,
        on_step: Callable[[int, Callable[[], Image]], None],
        stop: Callable[[], BaseException | None],
    ) -> Image:
        return self._shared[model].draw(drawing, on_step, stop)

    def lanes(self, _model: str, quality: str) -> int | None:
        """One that leaves steps out remembers the steps before."""
        return None if quality == "exact" else 1

    def approximations(self, model: str, quality: str) -> tuple[str, ...]:
        return self._shared[model].approximations(quality)

    def close(self) -> None:
        # What draws has come to its end by now.
        self._batcher.close()
        for shared in self._shared.values():
            shared.close()
        self._shared.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
