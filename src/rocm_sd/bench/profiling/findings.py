"""Slow paths in words. Each has a threshold with its reason, and says what to type next."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocm_sd.bench.profiling.families import ATTENTION, CONVOLUTION, COPIES, GEMM, IDLE, NORM, OTHER, TRANSFERS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rocm_sd.bench.profiling.analysis import Analysis, TimePart

__all__ = ["SlowPath", "findings"]

# A compiled or captured model keeps a GPU busy nine tenths of the time; eager SD 1.5 on an H200 is idle three quarters.
_IDLE = 0.2
# A tenth of the whole is what a user would notice; below that the sentence costs more than the cure gives.
_PART_OF_ALL = 0.1
# Stock VAEs were measured with a quarter (SD 1.5) to a third (SDXL) of their time in layout copies, and half in norms.
_COPIES, _NORMS = 0.15, 0.25
_OTHER, _TRANSFERS = 0.05, 0.05
# Libraries reach half of the peak and more on the shapes of Stable Diffusion; a fifth means a wrong kernel.
_OF_PEAK = 20.0
_FLOAT32 = 0.25
_NAIVE = 0.01


@dataclass(frozen=True)
class SlowPath:
    """`share`: of the whole time, what it is about."""

    share: float
    sentence: str
    next: str


def findings(analysis: Analysis, engine: str | None = None) -> tuple[SlowPath, ...]:
    """The largest first. `engine` is what ran, so that the advice is not what the user already does."""
    ours = engine == "rocm-sd"
    found = [
        *_idle(analysis, ours=ours),
        *_named_kernels(analysis),
        *_components(analysis, ours=ours),
        *_families(analysis),
    ]
    return tuple(sorted(found, key=lambda each: -each.share))


def _idle(analysis: Analysis, *, ours: bool) -> Iterator[SlowPath]:
    idle = analysis.family(IDLE)
    if idle is None or idle.share < _IDLE:
        return
    if not analysis.on_gpu:
        sentence = f"{idle.share:.0%} of the time is spent outside of torch's ops: Python and the host program"
        yield SlowPath(idle.share, sentence, "Draw several pictures at once: rocm-sd generate PROMPT --batch 4")
        return
    cause = "it waits for the host"
    if analysis.graph_share < 0.5 and analysis.sees_host:
        cause = "launches come from Python"
    if analysis.graph_share >= 0.5:
        cause = "it waits for the host between graphs"
        advice = "What a picture takes the host is the same for more: rocm-sd profile --steps 20, or --batch 4"
    elif ours:
        advice = "See why no graph was captured: print(rocm_sd.report(pipe))"
    else:
        advice = "Capture the steps as graphs: rocm_sd.optimize(pipe), or rocm-sd profile --engine rocm-sd"
    yield SlowPath(idle.share, f"the GPU is idle {idle.share:.0%} of the time: {cause}", advice)


def _named_kernels(analysis: Analysis) -> Iterator[SlowPath]:
    for pattern, least, sentence, advice in (
        (r"naive_conv", _NAIVE, "naive_conv kernels take {share}: MIOpen has no tuned convolution for this shape",
         "Let MIOpen search once, it keeps what it finds: MIOPEN_FIND_ENFORCE=3 rocm-sd profile"),
        (r"slow_conv2d", _PART_OF_ALL, "{share} of the time in torch's fallback convolution: no library takes this one",
         "Give the layer's input a layout that the library takes: rocm_sd.optimize(pipe)"),
        (r"batched_transpose|nchw.?to.?nhwc|nhwc.?to.?nchw", _PART_OF_ALL,
         "{share} of the time in transposes that the convolution library adds: it wants the other layout",
         "Run the model channels-last: rocm_sd.optimize(pipe)"),
    ):  # fmt: skip
        hit = [part for part in analysis.kernels if re.search(pattern, part.name, re.IGNORECASE)]
        share = sum(part.share for part in hit)
        if hit and share >= least:
            yield SlowPath(share, sentence.format(share=f"{share:.0%}"), advice)


def _components(analysis: Analysis, *, ours: bool) -> Iterator[SlowPath]:
    """Shares within a component: a VAE that is a tenth of the picture does not vanish in the whole."""
    for part in analysis.modules:
        if "." in part.name or part.share < _PART_OF_ALL / 2:
            continue
        for family, least, words, advice in (
            (COPIES, _COPIES, "in layout copies", "Keep one layout throughout: rocm_sd.optimize(pipe)"),
            (NORM, _NORMS, "in norms", "Fuse the norm with its activation: rocm_sd.optimize(pipe)"),
        ):
            share = part.families.get(family, 0.0) / part.ms if part.ms else 0.0
            if share >= least:
                cure = "See what was skipped, and why: print(rocm_sd.report(pipe))" if ours else advice
                yield SlowPath(share * part.share, f"{_title(part)}: {share:.0%} of the time {words}", cure)


def _families(analysis: Analysis) -> Iterator[SlowPath]:
    for part in analysis.families:
        if part.name in (OTHER, TRANSFERS) and part.share >= (_OTHER if part.name == OTHER else _TRANSFERS):
            yield _plain_family(analysis, part)
        percent = part.percent
        if percent is not None and percent < _OF_PEAK and part.share >= _PART_OF_ALL and part.bound == "compute":
            sentence = f"{part.name} reaches {percent:.0f}% of what this card can do, in {part.share:.0%} of the time"
            yield SlowPath(part.share, sentence, f"See which shapes are slow: rocm-sd profile --json, {part.name}")
    softmax = sum(p.share for p in analysis.kernels if "softmax" in p.name.lower() and ATTENTION in p.families)
    if analysis.on_gpu and softmax >= _PART_OF_ALL / 2:
        sentence = f"{softmax:.0%} of the time in a softmax of its own: attention runs unfused"
        yield SlowPath(softmax, sentence, "See which attention is used here: rocm-sd info")
    if analysis.on_gpu and analysis.float32_share >= _FLOAT32:
        sentence = f"{analysis.float32_share:.0%} of the time in convolutions and products is in float32"
        share = analysis.float32_share * sum(p.share for p in analysis.families if p.name in (CONVOLUTION, GEMM))
        yield SlowPath(share, sentence, "Load the pipeline in half precision: torch_dtype=torch.float16")


def _plain_family(analysis: Analysis, part: TimePart) -> SlowPath:
    if part.name == TRANSFERS:
        sentence = f"{part.share:.0%} of the time in copies between host and GPU"
        return SlowPath(
            part.share, sentence, "Keep the weights on the GPU: rocm_sd.optimize(pipe, level='performance')"
        )
    names = ", ".join(each.name[:60] for each in analysis.unknown[:3])
    sentence = f"{part.share:.0%} of the time in kernels that no rule knows: {names}"
    return SlowPath(part.share, sentence, "All of them by name: rocm-sd profile --json")


def _title(part: TimePart) -> str:
    return {"vae": "VAE", "unet": "UNet", "text_encoder": "text encoder"}.get(part.name, part.name)
