"""Which problems a picture makes: it is drawn with every op watched (tuning/search/watching.py), as it comes and with
all rules in the layout that they are made for, whichever of them are in use here today.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rocm_sd import settings
from rocm_sd.bench import workloads
from rocm_sd.bench.gate import free_memory
from rocm_sd.engine import Parts, optimize_with
from rocm_sd.errors import DeviceUnavailable, InvalidOption, Unsupported
from rocm_sd.models.source import EMBEDDED
from rocm_sd.ops import OPS
from rocm_sd.rewrite import RULES, RULES_FOR_GRAPHS, apply
from rocm_sd.tuning.search.calls import OpCall, Traced, describe
from rocm_sd.tuning.search.pipeline_settings import convolution_calls
from rocm_sd.tuning.search.watching import Watched, watched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["trace", "workload"]

_SIDE = 8  # what pipelines of Stable Diffusion ask of a side
Size = tuple[int, int]  # height and width of a picture


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
    ops: Iterable[str] = (),
    on_drawn: Callable[[str], object] = lambda _what: None,
) -> list[Traced]:
    """Every problem of pictures of these sizes and batches; no size means the workload's own."""
    sizes = list(sizes) or [(made.facts.height, made.facts.width)]
    for height, width in sizes:
        if height % _SIDE or width % _SIDE or min(height, width) < _SIDE:
            raise InvalidOption("--sizes", f"{width}x{height}", [], hint=f"Sides are multiples of {_SIDE}.")
    wanted = set(ops)
    seen, facts = Watched(), made.facts
    try:
        for height, width in sizes:
            made.facts = replace(facts, height=height, width=width)
            for batch in batches:
                on_drawn(f"collecting the calls of {width}x{height}, batch {batch}")
                _draw_stock(made, batch, seen)
                free_memory()
                _draw_rewritten(made, batch, seen)
    finally:
        made.facts = facts
    return [each for each in seen.traced() if not wanted or each.call.op in wanted]


def _draw_stock(made: workloads.Workload, batch: int, seen: Watched) -> None:
    """The convolutions of the UNet as stock runs them: layout and library are settings of the whole pipeline."""
    pipe = made.pipeline()
    called: Counter[OpCall] = Counter()

    def hear(layer: nn.Conv2d, given: tuple[Any, ...]) -> None:
        if isinstance(layer.padding, str) or layer.padding_mode != "zeros":
            return
        arguments = (given[0], layer.weight, layer.bias, layer.stride, layer.padding, layer.dilation, layer.groups)
        called[describe("conv", {}, arguments, ("x", "weight"))] += 1

    hooks = [m.register_forward_pre_hook(hear) for m in pipe.unet.modules() if isinstance(m, nn.Conv2d)]
    try:
        made.picture(pipe, batch, steps=1, output="latent")
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
                # The picture is thrown away: nothing is to be searched for it.
                optimize_with(pipe, "auto", "exact", Parts(convolution_library=False))
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
