"""Is every attention backend of torch right at every head size: errors against float64, beside those of plain math."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

from rocm_sd.doctor.probing.attention import FUSED, attention, says_it_can
from rocm_sd.doctor.probing.common import Cannot, Place, place, random
from rocm_sd.doctor.probing.isolated import isolated

if TYPE_CHECKING:
    import torch

__all__ = ["answer"]

_HEADS = (40, 64, 80, 128, 160, 384, 512)
_KEYS = (77, 1024)
_HEADS_QUICK, _KEYS_QUICK = (64, 160, 512), (77, 256)
_LIMIT_S = 15.0
# Plain math itself is judged by what rounding can do: its products and its softmax round a few times each.
_ROUNDINGS_OF_MATH = 16


def answer(*, device: str | None = None, quick: bool = False) -> dict[str, Any]:
    """`rows`: one for each backend, head, number of keys and dtype that the backend says it can run.

    `failed`: backends that crashed or hung, with the reason and whether time ran out. Each has a process of its own.
    """
    rows: list[dict[str, Any]] = []
    failed: dict[str, dict[str, Any]] = {}
    told: dict[str, str] | None = None
    for backend in FUSED:
        outcome = isolated(_rows, backend, device, quick, limit_s=_LIMIT_S)
        if outcome.answer is None:
            failed[backend] = {"reason": outcome.failed, "exceeded": outcome.exceeded}
            continue
        told = outcome.answer["device"]
        rows += outcome.answer["rows"]
    if told is None:
        raise Cannot(f"no attention ran at all: {failed[FUSED[0]]['reason']}")
    return {"device": told, "rows": _without_repeated_math(rows), "failed": failed}


def _without_repeated_math(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every process computes plain math for its comparisons; one of them tells it."""
    seen: set[tuple[Any, ...]] = set()
    kept = []
    for row in rows:
        key = tuple(row[name] for name in ("backend", "head", "keys", "dtype"))
        if key not in seen:
            seen.add(key)
            kept.append(row)
    return kept


def _rows(backend: str, device: str | None, quick: bool) -> dict[str, Any]:
    import torch  # noqa: PLC0415 -- in the process that needs it

    where = place(device)
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
    return {"device": where.told(), "rows": rows}


def _compare(backend: str, where: Place, inputs: list[torch.Tensor]) -> list[dict[str, Any]]:
    import torch  # noqa: PLC0415 -- as above

    exact = attention([tensor.cpu().double() for tensor in inputs], "math")
    rounding = float(exact.abs().max()) * torch.finfo(inputs[0].dtype).eps
    by_math = _error(attention(inputs, "math"), exact)
    rows = [_judged("math", by_math, by_math, _ROUNDINGS_OF_MATH * rounding)]
    if says_it_can(backend, where, inputs):
        try:
            result = attention(inputs, backend)
        except RuntimeError as error:
            rows.append(
                {"backend": backend, "ok": False, "error": None, "math_error": by_math, "reason": str(error)[:200]}
            )
        else:
            rows.append(_judged(backend, _error(result, exact), by_math, 2 * by_math + rounding))
    return rows


def _judged(backend: str, error: float, math_error: float, allowed: float) -> dict[str, Any]:
    # NaN compares false, and so is not ok.
    return {"backend": backend, "ok": error <= allowed, "error": error, "math_error": math_error, "allowed": allowed}


def _error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result.cpu().double() - exact).abs().max())
