"""Are convolutions with the channels last as fast as with the channels first?"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from rocm_sd.doctor.check import Finding, Fix, Probe, fine, measured_check, number, problem, rows, text
from rocm_sd.doctor.probing.convolutions import LIMIT_S, timed
from rocm_sd.doctor.probing.isolated import isolated_on

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from rocm_sd.doctor.facts import Facts
    from rocm_sd.doctor.probing.common import Place

__all__ = ["convolution_layout"]

# Converting there and back costs less than half of such a convolution again; the regression cost 3 to 44 times.
_HARM = 2.0
# As long as a launch: less is no pain.
_LEAST_MS = 0.05
_SUGGEST = "PYTORCH_MIOPEN_SUGGEST_NHWC"


def measure(*, device: str | None = None, quick: bool = False) -> dict[str, Any]:
    outcome = isolated_on(device, timed, _both_layouts, quick, limit_s=LIMIT_S)
    return outcome.required("the convolutions could not be timed")


def _both_layouts(_where: Place, first: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Callable[[], Any]]:
    import torch  # noqa: PLC0415 -- in the process that needs it

    last = tuple(tensor.contiguous(memory_format=torch.channels_last) for tensor in first)
    convolve = torch.nn.functional.conv2d
    return {"nchw": partial(convolve, *first, padding=1), "nhwc": partial(convolve, *last, padding=1)}


@measured_check(
    measures="four convolutions of UNet and VAE in NHWC and in NCHW",
    reports="pytorch/pytorch#170764 ROCm/TheRock#2485 Comfy-Org/ComfyUI#11381 pytorch/pytorch#187600",
    probe=Probe("convolution_layout", measure),
)
def convolution_layout(facts: Facts, answer: Mapping[str, Any]) -> Finding:
    times = [(text(row, "name"), number(row, "nchw_ms"), number(row, "nhwc_ms")) for row in rows(answer)]
    measured = {name: {"nchw_ms": first, "nhwc_ms": last} for name, first, last in times}
    harmed = [(b / a, name, a, b) for name, a, b in times if b > _HARM * a and b - a > _LEAST_MS]
    if harmed:
        ratio, name, first, last = max(harmed)
        says = (
            f"With the channels last {name} takes {last:.3g} ms, with the channels first {first:.3g} ms: {ratio:.1f} "
            f"times as long ({len(harmed)} of {len(times)} convolutions)."
        )
        means = "Programs that ask for channels_last, or get it unasked, take many times as long, above all in the VAE."
        return problem(says, means, _fix(facts), measured)
    total = sum(first for _, first, _ in times) / sum(last for _, _, last in times)
    better = f"{total:.2g} times as fast as" if total >= 1 else f"at {total:.2g} of the speed of"
    return fine(f"Channels last run {better} channels first over all of them.", measured=measured)


def _fix(facts: Facts) -> Fix:
    if facts.amd and facts.environment.get(_SUGGEST) != "0":
        # torch then converts to channels first by itself: right either way, so it is safe.
        summary = f"Set {_SUGGEST}=0: torch then gives MIOpen channels first. Later builds of torch do so again."
        return Fix(summary, env={_SUGGEST: "0"}, safe=True)
    return Fix(
        "Do not ask for channels_last. rocm-sd tune measures the layouts and keeps the faster.",
        commands=("rocm-sd tune",),
    )
