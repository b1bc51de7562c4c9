"""Is torch's attention right at every head size?"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

from rocm_sd.doctor.check import CannotRun, Finding, Fix, Probe, fine, flag, measured_check, number, problem, rows, text
from rocm_sd.doctor.probing.attention import FUSED, attention, says_it_can
from rocm_sd.doctor.probing.common import Place, random
from rocm_sd.doctor.probing.isolated import isolated_on

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from rocm_sd.doctor.facts import Facts

__all__ = ["sdpa_numerics"]

_HEADS = (40, 64, 80, 128, 160, 384, 512)
_KEYS = (77, 1024)
_HEADS_QUICK, _KEYS_QUICK = (64, 160, 512), (77, 256)
_LIMIT_S = 15.0
# Plain math itself is judged by what rounding can do: its products and its softmax round a few times each.
_ROUNDINGS_OF_MATH = 16
_FIX = Fix(
    "rocm-sd tests attention before it uses it, and needs nothing. Elsewhere: in ComfyUI start with "
    "--use-split-cross-attention; in your own code wrap the VAE in torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
)
_MEANS = "Pictures come out black, grey or as noise, without an error. The VAE of SD and SDXL has a head of 512."


def measure(*, device: str | None = None, quick: bool = False) -> dict[str, Any]:
    """`rows`: one for each backend, head, number of keys and dtype that the backend says it can run.

    `failed`: backends that crashed or hung, with the reason and whether time ran out. Each has a process of its own.
    """
    rows: list[dict[str, Any]] = []
    failed: dict[str, dict[str, Any]] = {}
    where: dict[str, str] | None = None
    for backend in FUSED:
        outcome = isolated_on(device, _cases, backend, quick, limit_s=_LIMIT_S)
        if outcome.answer is None:
            failed[backend] = {"reason": outcome.failed, "exceeded": outcome.exceeded}
            continue
        where = outcome.answer["device"]
        rows += outcome.answer["rows"]
    if where is None:
        raise CannotRun(f"no attention ran at all: {failed[FUSED[0]]['reason']}")
    return {"device": where, "rows": _without_repeated_math(rows), "failed": failed}


def _without_repeated_math(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every process computes plain math for its comparisons; one row of each case is kept."""
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        kept.setdefault(tuple(row[name] for name in ("backend", "head", "keys", "dtype")), row)
    return list(kept.values())


def _cases(where: Place, backend: str, quick: bool) -> dict[str, Any]:
    import torch  # noqa: PLC0415 -- in the process that needs it

    dtypes = (torch.float16, torch.bfloat16) if where.is_gpu else (torch.float32, torch.bfloat16)
    heads, keys = (_HEADS_QUICK, _KEYS_QUICK) if quick else (_HEADS, _KEYS)
    rows = []
    for head, length in product(heads, keys):
        # As in a picture: many queries, which look at each other or at the 77 tokens of the prompt.
        plain = [
            random(where, 1, 2, max(keys) if n == 0 else length, head, dtype=torch.float32, seed=n) for n in (0, 1, 2)
        ]
        for dtype in dtypes:
            inputs = [tensor.to(dtype) for tensor in plain]
            case = {"head": head, "keys": length, "dtype": str(dtype).removeprefix("torch.")}
            rows += [case | row for row in _compare(backend, where, inputs)]
    return {"rows": rows}


def _compare(backend: str, where: Place, inputs: list[torch.Tensor]) -> list[dict[str, Any]]:
    import torch  # noqa: PLC0415 -- as above

    exact = attention([tensor.cpu().double() for tensor in inputs], "math")
    rounding = float(exact.abs().max()) * torch.finfo(inputs[0].dtype).eps
    by_math = _largest_error(attention(inputs, "math"), exact)
    rows = [_judged("math", by_math, by_math, _ROUNDINGS_OF_MATH * rounding)]
    if says_it_can(backend, where, inputs):
        try:
            result = attention(inputs, backend)
        except RuntimeError as error:
            rows.append(
                {"backend": backend, "ok": False, "error": None, "math_error": by_math, "reason": str(error)[:200]}
            )
        else:
            rows.append(_judged(backend, _largest_error(result, exact), by_math, 2 * by_math + rounding))
    return rows


def _judged(backend: str, error: float, math_error: float, allowed: float) -> dict[str, Any]:
    # NaN compares false, and so is not ok.
    return {"backend": backend, "ok": error <= allowed, "error": error, "math_error": math_error, "allowed": allowed}


def _largest_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result.cpu().double() - exact).abs().max())


@measured_check(
    measures="the error against float64 of every backend of scaled_dot_product_attention that says it can run, for "
    "heads of 40 to 512, 77 and 1024 keys, float16 and bfloat16, compared with that of plain math",
    reports="pytorch/pytorch#189849 ROCm/TheRock#6561 vllm-project/vllm-omni#7484 ROCm/aotriton#210 ROCm/TheRock#1315",
    probe=Probe("sdpa_numerics", measure),
    also_on_cpu=True,
)
def sdpa_numerics(_facts: Facts, answer: Mapping[str, Any]) -> Finding:
    """The probe's own gate: an error of at most twice that of plain math in the same dtype, plus one rounding."""
    table = rows(answer)
    wrong = [row for row in table if not flag(row, "ok")]
    failed = answer["failed"]
    crashed = {name: text(why, "reason") for name, why in failed.items() if not flag(why, "exceeded")}
    measured = {"cases": len(table), "wrong": [_case(row) for row in wrong], "failed": dict(failed)}
    if wrong:
        worst = _worst(wrong)
        says = f"{len(wrong)} of {len(table)} cases are wrong, among them {_case(worst)}: {_error(worst)}."
        return problem(says, _MEANS, _FIX, measured)
    if crashed:
        crashes = "; ".join(f"{name}: {why}" for name, why in crashed.items())
        means = "A program that takes this backend ends in the middle of a picture."
        return problem(f"An attention backend does not survive its test. {crashes}.", means, _FIX, measured)
    if failed:
        raise CannotRun(f"{' and '.join(failed)} did not end in time")
    heads = sorted({int(number(row, "head")) for row in table})
    backends = sorted({text(row, "backend") for row in table})
    says = f"All {len(table)} cases are right, heads {heads[0]} to {heads[-1]} by {', '.join(backends)}."
    return fine(says, measured=measured)


def _worst(wrong: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    """No number at all is worse than any."""
    return max(wrong, key=lambda row: float("inf") if row["error"] is None else number(row, "error"))


def _case(row: Mapping[str, Any]) -> str:
    return f"{text(row, 'backend')} with heads of {row['head']}, {row['keys']} keys, {text(row, 'dtype')}"


def _error(row: Mapping[str, Any]) -> str:
    if row["error"] is None:
        return str(row.get("reason") or "the result is not a number")
    by_math = row["math_error"]
    compared = "gives no number" if by_math is None else f"has {by_math:.2g}"
    return f"error {number(row, 'error'):.2g}, where plain math {compared}"
