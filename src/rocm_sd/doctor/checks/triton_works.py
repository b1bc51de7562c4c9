"""Does Triton compile and run on this GPU?"""

from __future__ import annotations

import os
import tempfile
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rocm_sd.arch import host
from rocm_sd.doctor.check import (
    CannotRun,
    Finding,
    Fix,
    Probe,
    Probes,
    Status,
    check,
    fine,
    flag,
    not_here,
    on_the_gpu,
    problem,
    text,
)
from rocm_sd.doctor.facts import Facts, known_as
from rocm_sd.doctor.probing.common import Place, random
from rocm_sd.doctor.probing.isolated import one_by_one

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["triton_works"]

_LIMIT_S = 15.0
# `--quick` skips the last.
_KERNELS = {
    "add_float32": "a sum in float32",
    "multiply_float16": "a product in float16",
    "multiply_bfloat16": "a product in bfloat16",
}


def measure(*, device: str | None = None, quick: bool = False) -> dict[str, Any]:
    """{"version", "add_float32": {"ok", "error"}, ...}; `quick` skips bfloat16.

    Each has a process of its own: on cards without bfloat16 the compiler does not refuse, it aborts the process.
    `device` is None where no process lived to say it.
    """
    if find_spec("triton") is None:
        raise CannotRun("Triton is not installed")
    calls = {name: (name,) for name in list(_KERNELS)[: 2 if quick else None]}
    answers = one_by_one(device, _compiled, calls, {"ok": False}, dict.fromkeys(calls, _LIMIT_S))
    return {"version": _version(), **answers}


def _version() -> str | None:
    found = ((package, host.installed(package)) for package in host.TRITON_PACKAGES)
    return next((f"{package} {version}" for package, version in found if version), None)


def _compiled(where: Place, name: str) -> dict[str, Any]:
    if not where.is_gpu:
        raise CannotRun("there is no GPU, and Triton compiles for nothing else")
    # In a new folder nothing was compiled before: what is found there would prove nothing. Triton reads it at import.
    with tempfile.TemporaryDirectory(prefix="rocm-sd-probe-", ignore_cleanup_errors=True) as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        return _add(where) if name.startswith("add") else _multiply(name, where)


def _add(where: Place) -> dict[str, Any]:
    import torch  # noqa: PLC0415 -- in the process that needs it

    from rocm_sd.doctor.probing.tiny_kernel import add  # noqa: PLC0415 -- importing it needs Triton

    x, y = (random(where, 1000, dtype=torch.float32, seed=seed) for seed in (0, 1))
    result = torch.empty_like(x)
    with torch.cuda.device(where.device):
        add[(4,)](x, y, result, 1000, BLOCK=256)
    ok = torch.equal(result.cpu(), x.cpu() + y.cpu())
    return {"ok": ok, "error": "" if ok else "the sum is wrong"}


def _multiply(name: str, where: Place) -> dict[str, Any]:
    import torch  # noqa: PLC0415 -- as above

    from rocm_sd.doctor.probing.tiny_kernel import multiply  # noqa: PLC0415 -- importing it needs Triton

    dtype = getattr(torch, name.removeprefix("multiply_"))
    x, y = (random(where, 32, 32, dtype=dtype, seed=seed) for seed in (0, 1))
    result = torch.empty(32, 32, device=where.device)
    with torch.cuda.device(where.device):
        multiply[(1,)](x, y, result, SIZE=32)
    exact = x.cpu().double() @ y.cpu().double()
    # Products of two such numbers are exact in float32, and so but for a few roundings are their sums.
    error = float((result.cpu().double() - exact).abs().max())
    ok = error <= 1e-4
    return {"ok": ok, "error": "" if ok else f"the product is wrong by {error:.3g}"}


def judge(facts: Facts, answer: Mapping[str, Any]) -> Finding:
    tried = {name: answer[name] for name in _KERNELS if name in answer}
    # A probe that tried nothing has no pass to give.
    failed = [name for name in ("add_float32", "multiply_float16") if not flag(answer[name], "ok")]
    measured = {"version": answer["version"], **tried}
    if failed and _is_unsupported(facts):
        gfx = facts.meant.gfx if facts.meant else None
        says = f"Triton does not compile for {gfx}: {text(tried[failed[0]], 'error')}."
        return not_here(says, "rocm-sd uses stock torch; do without torch.compile.", measured=measured)
    if failed:
        failures = "; ".join(f"{_KERNELS[name]}: {text(tried[name], 'error')}" for name in failed)
        means = "torch.compile fails or crashes. rocm-sd uses stock torch where Triton does not work, and is slower."
        return problem(f"Triton does not work here: {failures}.", means, _reinstall(facts), measured)
    if "multiply_bfloat16" in tried and not flag(tried["multiply_bfloat16"], "ok"):
        says = f"Triton works, but not in bfloat16: {text(tried['multiply_bfloat16'], 'error')}."
        means = "torch.compile and Triton kernels may end the program when a model is in bfloat16."
        return problem(says, means, Fix("Load models in float16."), measured)
    return fine(f"{len(tried)} small kernels compile, run and are right.", measured=measured)


def _is_unsupported(facts: Facts) -> bool:
    """Whether the table of architectures says that Triton has no support: no other Triton would help."""
    gfx = facts.meant.gfx if facts.meant else None
    return gfx is not None and known_as(gfx).triton_supported is False


def _reinstall(facts: Facts) -> Fix:
    wanted = facts.torch.wants_triton
    if wanted is None:
        return Fix("Install torch again, with the Triton of its own build. The check two_tritons says which are there.")
    return Fix(
        f"torch asks for {wanted}. The check two_tritons says which are there and what to type.",
        commands=("rocm-sd doctor two_tritons",),
    )


PROBE = Probe("triton_compile", measure)


@check(
    measures="a sum and products in float16 and bfloat16, compiled anew, each in a process of its own",
    reports="ROCm/ROCm#3060 CS1o/Stable-Diffusion-Info#68 Comfy-Org/ComfyUI#14868 unslothai/unsloth#7682 "
    "ROCm/TheRock#6467",
    probe=PROBE,
)
def triton_works(facts: Facts, probes: Probes) -> Finding:
    if not any("triton" in name for name in facts.packages):
        return not_here("Triton is not installed; rocm-sd does without it.")
    found = on_the_gpu(PROBE, judge)(facts, probes)
    if found.status is Status.PROBLEM and not _torch_runs(probes):
        raise CannotRun(f"torch's own kernels fail on this GPU as well, see kernels_present. {found.says}")
    return found


def _torch_runs(probes: Probes) -> bool:
    """Where torch's own kernels fail, Triton is not to blame; where that is not known, it may be."""
    try:
        smoke = probes.ask("smoke").get("elementwise")
    except CannotRun:
        return True
    return not isinstance(smoke, dict) or smoke.get("ok") is not False
