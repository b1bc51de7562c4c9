"""Is the vendor's convolution library faster than torch without it?

The library is MIOpen or cuDNN; without it torch convolves by its own GEMM.
"""

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

__all__ = ["convolution_library"]

# Reports of harm speak of five times. Below twice the user gains little by a switch that other shapes may need on.
_HARM = 2.0
# A launch alone takes about this long: what differs by less is no pain.
_LEAST_MS = 0.05


def measure(*, device: str | None = None, quick: bool = False) -> dict[str, Any]:
    outcome = isolated_on(device, _measured, quick, limit_s=LIMIT_S)
    return outcome.required("the convolutions could not be timed")


def _measured(where: Place, quick: bool) -> dict[str, Any]:
    library = ("miopen" if where.on_rocm else "cudnn") if where.is_gpu else "onednn"
    return {"library": library, **timed(where, _on_and_off, quick)}


def _on_and_off(where: Place, tensors: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Callable[[], Any]]:
    return {name: partial(_convolve, where, tensors, on=name == "on") for name in ("on", "off")}


def _convolve(where: Place, tensors: tuple[torch.Tensor, torch.Tensor], *, on: bool) -> torch.Tensor:
    import torch  # noqa: PLC0415 -- in the process that needs it

    # torch calls both vendors' library cudnn.
    backend: Any = torch.backends.cudnn if where.is_gpu else torch.backends.mkldnn
    # Not its flags(), which set all the others as well, and take as long as a small convolution. The process ends soon.
    backend.enabled = on
    return torch.nn.functional.conv2d(*tensors, padding=1)


@measured_check(
    measures="four convolutions of UNet and VAE with MIOpen (or cuDNN) on and off",
    reports="Comfy-Org/ComfyUI#14895 Comfy-Org/ComfyUI#10447 Comfy-Org/ComfyUI#11366 ROCm/ROCm#4729 ROCm/MIOpen#1621",
    probe=Probe("convolution_library", measure),
)
def convolution_library(_facts: Facts, answer: Mapping[str, Any]) -> Finding:
    library = {"miopen": "MIOpen", "cudnn": "cuDNN"}.get(text(answer, "library"), text(answer, "library"))
    times = [(text(row, "name"), number(row, "on_ms"), number(row, "off_ms")) for row in rows(answer)]
    measured = {name: {"on_ms": on, "off_ms": off} for name, on, off in times}
    harmed = [(on / off, name, on, off) for name, on, off in times if on > _HARM * off and on - off > _LEAST_MS]
    if harmed:
        ratio, name, on, off = max(harmed)
        says = (
            f"{library} takes {on:.3g} ms for {name}, torch without it {off:.3g} ms: {ratio:.1f} times as long "
            f"({len(harmed)} of {len(times)} convolutions)."
        )
        means = "Decoding a picture, and perhaps every step of it, takes longer than it must."
        fix = Fix(
            "rocm-sd tune measures the convolutions of a step both ways, and rocm-sd then uses the faster for the "
            "UNet. For the VAE, in your own code: with torch.backends.cudnn.flags(enabled=False) around the part "
            "that is slow, which needs more memory. In ComfyUI leave COMFYUI_ENABLE_MIOPEN unset.",
            commands=("rocm-sd tune",),
        )
        return problem(says, means, fix, measured)
    worst = max(on / off for _, on, off in times)
    return fine(f"{library} takes at most {worst:.2g} times as long as torch without it.", measured=measured)
