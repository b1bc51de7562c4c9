"""Does each kind of kernel run on the GPU, and give the right numbers?"""

from __future__ import annotations

from typing import Any

from rocm_sd.doctor.check import CannotRun, Finding, Fix, Probe, Probes, check, fine, not_here, problem
from rocm_sd.doctor.facts import Facts, numbers
from rocm_sd.doctor.probing.common import Place, random
from rocm_sd.doctor.probing.isolated import one_by_one
from rocm_sd.doctor.wheels import pip_line

__all__ = ["kernels_present"]

# A convolution may be searched for first.
_LIMITS_S = {"elementwise": 15.0, "gemm": 15.0, "conv": 30.0, "sdpa": 15.0}
# Sums of up to 576 products in float16: one part in a hundred is far above rounding, and far below a wrong kernel.
_ALLOWED = 0.01
_KINDS = {"elementwise": "elementwise", "gemm": "matrix product", "conv": "convolution", "sdpa": "attention"}
_OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"


def measure(*, device: str | None = None, quick: bool = False) -> dict[str, Any]:
    """A missing kernel is an error of its process, a wrong one may be a fault that ends it: each has its own.

    `device` is None where no process lived to say it.
    """
    calls = {kind: (kind, 64 if quick else 256) for kind in _KINDS}
    return one_by_one(device, _run, calls, {"ok": False}, _LIMITS_S)


def _run(where: Place, kind: str, size: int) -> dict[str, Any]:
    inputs = _inputs(kind, where, size)
    # .cpu() waits for the kernel, and raises what it met.
    result = _call(kind, inputs).cpu().double()
    exact = _call(kind, [tensor.cpu().double() for tensor in inputs])
    error = float((result - exact).abs().max() / exact.abs().max())
    ok = error <= _ALLOWED
    sentence = "" if ok else f"the result is wrong: largest error {error:.3g} of the largest value"
    return {"ok": ok, "error": sentence}


def _inputs(kind: str, where: Place, size: int) -> list[Any]:
    shapes: dict[str, list[tuple[int, ...]]] = {
        "elementwise": [(size, size), (size, size)],
        "gemm": [(size, 320), (320, size)],
        "conv": [(1, 64, size // 4, size // 4), (64, 64, 3, 3)],
        "sdpa": [(1, 2, size, 64)] * 3,
    }
    return [random(where, *shape, seed=number) for number, shape in enumerate(shapes[kind])]


def _call(kind: str, inputs: list[Any]) -> Any:
    import torch  # noqa: PLC0415 -- in the process that needs it
    from torch.nn import functional  # noqa: PLC0415 -- as above

    if kind == "elementwise":
        return torch.add(*inputs) * 0.5
    if kind == "gemm":
        return torch.mm(*inputs)
    if kind == "conv":
        return functional.conv2d(inputs[0], inputs[1], padding=1)
    return functional.scaled_dot_product_attention(*inputs)


@check(
    measures="one small call of each kind, each in a process of its own, against the CPU in float64",
    reports="ROCm/TheRock#7839 pytorch/pytorch#194498 patientx-cfz/comfyui-rocm#71",
    probe=Probe("smoke", measure),
)
def kernels_present(facts: Facts, probes: Probes) -> Finding:
    if facts.torch.version is None:
        return not_here("torch is not installed.")
    answers = probes.ask("smoke")
    failed: dict[str, str] = {}
    for kind, name in _KINDS.items():
        answer = answers.get(kind)
        if not isinstance(answer, dict) or not isinstance(answer.get("ok"), bool):
            raise CannotRun(f"the answer on the {name} kernel could not be read: {answer!r}")
        if not answer["ok"]:
            failed[kind] = str(answer.get("error") or "no reason was given")
    where = answers.get("device")
    kind_of_device = where.get("kind") if isinstance(where, dict) else None
    if facts.gpus and kind_of_device == "cpu":
        raise CannotRun("torch sees no GPU, so the kernels ran on the CPU")
    place = "on the CPU" if kind_of_device == "cpu" else "on the GPU"
    if not failed:
        return fine(f"Elementwise, matrix product, convolution and attention run {place}.")
    reasons = "; ".join(f"{_KINDS[kind]}: {reason}" for kind, reason in failed.items())
    return problem(
        f"{len(failed)} of {len(_KINDS)} kinds of kernel fail {place}: {reasons}.",
        "Kernels for this GPU are missing or broken, and pictures fail where they are needed.",
        _fix(facts),
        {"failed": failed},
    )


def _fix(facts: Facts) -> Fix:
    """The nearest cause first: another GPU than the one that is meant, then another name for it, then the wheel."""
    meant, gfx = facts.meant, facts.meant.gfx if facts.meant else None
    if meant is not None and facts.cards and facts.used is not None and facts.used.integrated:
        index = str(meant.index)
        return Fix(
            f"Use the card: HIP_VISIBLE_DEVICES={index}; integrated_gpu says more.",
            env={"HIP_VISIBLE_DEVICES": index},
            safe=True,
        )
    if _OVERRIDE in facts.environment and gfx in facts.torch.arch_list and facts.torch.devices:
        return Fix(f"Unset {_OVERRIDE}; gfx_override says more.", unset=(_OVERRIDE,), safe=True)
    line = pip_line((gfx,), numbers(facts.python)) if gfx else None
    if line is None:
        return Fix("Install a torch that is built for this GPU; gfx_override and torch_build say more.")
    return Fix("Install the torch that has its kernels; gfx_override may know a shorter way.", commands=(line,))
