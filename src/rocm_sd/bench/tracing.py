"""What a search needs to know of pictures: the problems that they make, and the calls of their models.

A picture is drawn as it comes, and with every op watched (tuning/search/watching.py) by all rules in the layout that
they are made for, whichever of them are in use here today. Of models that were drawn with before, their noted calls are
made again, with random weights.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rocm_sd import settings
from rocm_sd.bench import workloads
from rocm_sd.bench.gate import free_memory
from rocm_sd.engine import Parts, calibration, captured_models, optimize_with
from rocm_sd.errors import DeviceUnavailable, InvalidOption, Unsupported
from rocm_sd.models.source import EMBEDDED
from rocm_sd.ops import OPS
from rocm_sd.rewrite import RULES, RULES_FOR_GRAPHS, apply
from rocm_sd.tuning.search.calls import OpCall, Traced, describe
from rocm_sd.tuning.search.pipeline_settings import convolution_calls
from rocm_sd.tuning.search.watching import Watched, watched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["Trace", "trace", "trace_models", "workload"]

_SIDE = 8  # what pipelines of Stable Diffusion ask of a side
Size = tuple[int, int]  # height and width of a picture


@dataclass(frozen=True)
class Trace:
    """`problems` of ops and of settings of the whole pipeline; `models`: the calls that whole plans are timed on."""

    problems: list[Traced]
    models: list[calibration.Outline] = field(default_factory=list)

    def of(self, ops: Iterable[str]) -> Trace:
        """Those ops alone; all, where none is named."""
        wanted = set(ops)
        return Trace([each for each in self.problems if not wanted or each.call.op in wanted], self.models)


def workload(model: str | None, device: torch.device) -> workloads.Workload:
    """emoji (the default), a workload of `rocm-sd bench` with random weights, or a folder, checkpoint or hub id."""
    if model is None or model in {"emoji", EMBEDDED}:
        return workloads.make("emoji", device)
    if model in workloads.WORKLOADS:
        try:
            return workloads.make(model, device)
        except DeviceUnavailable as error:
            hint = f"Try the command with a small model: rocm-sd tune {model}-tiny"
            raise DeviceUnavailable(error.message, hint=hint) from None
    tiny = model.removesuffix("-tiny")
    if tiny != model and tiny in workloads.WORKLOADS:
        return workloads.make(tiny, device, tiny=True)
    try:
        return workloads.make("sdxl-1024" if _looks_like_sdxl(model) else "sd15-512", device, model=model)
    except Unsupported as error:
        if _looks_like_sdxl(model) or "sdxl" not in (error.hint or ""):
            raise
        return workloads.make("sdxl-1024", device, model=model)


def _looks_like_sdxl(model: str) -> bool:
    index = Path(model) / "model_index.json"
    return index.is_file() and "StableDiffusionXL" in index.read_text(encoding="utf-8", errors="replace")


def trace(
    made: workloads.Workload,
    sizes: Sequence[Size] = (),
    batches: Sequence[int] = (1,),
    on_drawn: Callable[[str], object] = lambda _what: None,
) -> Trace:
    """Everything of pictures of these sizes and batches; no size means the workload's own."""
    sizes = list(sizes) or [(made.facts.height, made.facts.width)]
    for height, width in sizes:
        if height % _SIDE or width % _SIDE or min(height, width) < _SIDE:
            raise InvalidOption("--sizes", f"{width}x{height}", [], hint=f"Sides are multiples of {_SIDE}.")
    seen, facts, models = Watched(), made.facts, []
    try:
        for height, width in sizes:
            made.facts = replace(facts, height=height, width=width)
            for batch in batches:
                on_drawn(f"collecting the calls of {width}x{height}, batch {batch}")
                models += _draw_stock(made, batch, seen)
                free_memory()
                _draw_rewritten(made, batch, seen)
    finally:
        made.facts = facts
    return Trace(seen.traced(), models)


def trace_models(
    subjects: Iterable[calibration.Subject], on_called: Callable[[str], object] = lambda _what: None
) -> Trace:
    """Everything of calls of models. Each subject may be gone when the next is made."""
    seen, models = Watched(), []
    for subject in subjects:
        on_called(f"collecting the calls of {type(subject.model).__name__}")
        models.append(calibration.Outline.of(subject))
        seen.each = subject.times
        # What runs at every step, and not the VAE, decides on settings of the whole pipeline.
        with _convolutions_seen(subject.model, seen) if subject.times > 1 else nullcontext(), torch.no_grad():
            subject.model(*subject.args, **subject.kwargs)
        calibration.trace_call(subject.model, subject.args, subject.kwargs, seen)
        free_memory()
    return Trace(seen.traced(), models)


def _draw_stock(made: workloads.Workload, batch: int, seen: Watched) -> list[calibration.Outline]:
    """A picture as stock draws it; of its models the calls, and their convolutions of one step."""
    pipe = made.pipeline()
    models: dict[tuple[str, str], calibration.Outline] = {}

    def hear(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        outline = calibration.Outline.of(calibration.Subject(model, args, kwargs))
        models[outline.key, outline.call] = outline

    hooks = [
        model.register_forward_pre_hook(hear, with_kwargs=True)
        for model in captured_models(pipe)
        if calibration.counts(made.device)
    ]
    # The built-in model is so small that it says nothing of others' layouts on a GPU.
    is_small = made.recipe.family == "emoji" and made.device.type != "cpu"
    try:
        with nullcontext() if is_small else _convolutions_seen(pipe.unet, seen):
            made.picture(pipe, batch, steps=1)
    finally:
        for hook in hooks:
            hook.remove()
    return list(models.values())


@contextmanager
def _convolutions_seen(model: nn.Module, seen: Watched) -> Iterator[None]:
    """The convolutions as stock runs them: layout and library are settings of the whole pipeline."""
    called: Counter[OpCall] = Counter()

    def hear(layer: nn.Conv2d, given: tuple[Any, ...]) -> None:
        if isinstance(layer.padding, str) or layer.padding_mode != "zeros":
            return
        arguments = (given[0], layer.weight, layer.bias, layer.stride, layer.padding, layer.dilation, layer.groups)
        called[describe("conv", {}, arguments, ("x", "weight"))] += 1

    hooks = [m.register_forward_pre_hook(hear) for m in model.modules() if isinstance(m, nn.Conv2d)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for call in convolution_calls(called):
        seen.add(call)


def _draw_rewritten(made: workloads.Workload, batch: int, seen: Watched) -> None:
    on_cpu = made.device.type == "cpu"
    for answer_stock in (True,) if on_cpu else (False, True):
        pipe = made.pipeline()
        with watched(seen, answer_stock=answer_stock), torch.no_grad():
            if on_cpu:
                # There `optimize` skips ops, as they would be stock torch; with all of them named, rules use them.
                for part in (pipe.unet, pipe.vae):
                    # The rules leave convolutions of another layout to stock.
                    part.to(memory_format=torch.channels_last)
                    apply(part, (*RULES, *RULES_FOR_GRAPHS))
                _once_a_picture(pipe.vae, seen, made.facts.steps)
                with settings.stock_implementations(frozenset(OPS)):
                    made.picture(pipe, batch, steps=1)
            else:
                # By all rules, whatever plan is in use here today; no library is searched for what is thrown away.
                optimize_with(
                    pipe, "auto", "exact", Parts(plan=calibration.CHANNELS_LAST.name, convolution_library=False)
                )
                _once_a_picture(pipe.vae, seen, made.facts.steps)
                made.picture(pipe, batch, steps=2)
        seen.each = 1
        del pipe
        free_memory()


def _once_a_picture(vae: Any, seen: Watched, steps: int) -> None:
    """What is called counts for every step, and within the decoder once. The pipeline is thrown away afterwards."""
    decode, seen.each = vae.decode, steps

    def counted(*arguments: Any, **named: Any) -> Any:
        seen.each = 1
        try:
            return decode(*arguments, **named)
        finally:
            seen.each = steps

    vae.decode = counted
