"""Products by the kernels that torch's TunableOp found: a candidate on ROCm, where there is a result for the product.

It is on around one call and put back, as the libraries are (library_switch.py); its tuning is off but in `tune`.
Written for torch.cuda.tunable of torch 2.6 and later, and not run on a card yet.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd import arch
from rocm_sd.errors import RocmSdError, Unsupported
from rocm_sd.ops.library_switch import why_not_built
from rocm_sd.tuning import tunable_op

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from rocm_sd.tuning import Problem

__all__ = ["NAME", "in_use", "require_here", "tune", "why_not"]

NAME = "tunable_op"
# Of one kernel of the library: as torch has it by default, and enough to tell kernels apart.
_LONGEST_MS, _MOST_RUNS = 30, 100


def _tunable() -> Any:
    from torch.cuda import tunable  # noqa: PLC0415 -- only where it is used

    return tunable


def why_not(problem: Problem, device: torch.device) -> str | None:
    """Cheap: it is asked at every new problem."""
    reason = why_not_built("TunableOp", "ROCm", device)
    if reason is not None:
        return reason
    try:
        results = tunable_op.results_here()
    except RocmSdError as error:
        return f"TunableOp's results: {error.message}"
    if results is None:
        return "a product that TunableOp has not tuned: rocm-sd tune --tunable-op does"
    stale = tunable_op.why_stale(results, arch.detect(device).name, torch.__version__)
    if stale is not None:
        return f"TunableOp's results: {stale}"
    return _why_no_kernel(results, problem) or _refusal(tunable_op.results_file())


def _why_no_kernel(results: tunable_op.TunableResults, problem: Problem) -> str | None:
    m, n, k = (int(problem[name]) for name in ("m", "n", "k"))
    found = results.of(m, n, k, str(problem["dtype"]))
    if found is None:
        return f"{m}x{k} @ {k}x{n} in {problem['dtype']}, which TunableOp has not tuned"
    if found.solution == tunable_op.DEFAULT:
        return "a product for which TunableOp found nothing faster than torch's own choice"
    return None


@cache
def _refusal(path: Path) -> str | None:
    """Why this process cannot use it: asked once, since torch reads the file once."""
    tunable = _tunable()
    if tunable.is_enabled():
        return "TunableOp on for the whole process: stock torch has its kernels, too"
    tunable.set_filename(str(path))
    tunable.tuning_enable(False)
    tunable.enable(True)
    try:
        if not tunable.is_enabled():
            return "TunableOp that the environment keeps off"
        # torch's own validators: it refuses results of other versions or of another card.
        return None if tunable.read_file(str(path)) else "TunableOp's results, which torch rejects here"
    finally:
        tunable.enable(False)


@contextmanager
def in_use(*, tuning: bool = False) -> Iterator[None]:
    """TunableOp is on inside, and as it was after it."""
    tunable = _tunable()
    before = tunable.is_enabled(), tunable.tuning_is_enabled()
    tunable.tuning_enable(tuning)
    tunable.enable(True)
    try:
        yield
    finally:
        tunable.enable(before[0])
        tunable.tuning_enable(before[1])


def require_here(device: torch.device) -> None:
    """Raises `Unsupported` where there is nothing to tune."""
    reason = why_not_built("TunableOp", "ROCm", device)
    if reason is not None:
        raise Unsupported("tune --tunable-op", reason, hint="It needs an AMD GPU and a ROCm build of torch.")


def tune(
    products: Sequence[tuple[int, int, int, str]],
    device: torch.device,
    *,
    go_on: Callable[[], bool] = lambda: True,
    progress: Callable[[int, str], object] = lambda _number, _what: None,
) -> tunable_op.TunableResults:
    """Have torch time every kernel of both libraries for each (m, n, k, dtype), as long as `go_on` says so.

    The user's file has what was found after each of them, with what was in it before.
    """
    require_here(device)
    path, tunable = tunable_op.results_file(), _tunable()
    if tunable.is_enabled() and not _can_be_switched(tunable):
        hint = "Unset PYTORCH_TUNABLEOP_ENABLED and PYTORCH_TUNABLEOP_TUNING, and type it again."
        raise Unsupported("tune --tunable-op", "TunableOp that the environment has set", hint=hint)
    tunable.set_filename(str(path))
    tunable.set_max_tuning_duration(_LONGEST_MS)
    tunable.set_max_tuning_iterations(_MOST_RUNS)
    if path.exists():
        # What was found before is kept, unless torch rejects it: then all of it is found anew.
        tunable.read_file(str(path))
    for number, (m, n, k, dtype) in enumerate(products):
        if not go_on():
            break
        progress(number, f"{m}x{k} @ {k}x{n}, {dtype}")
        kind = getattr(torch, dtype)
        x, weight = (torch.randn(rows, k, device=device).to(kind) for rows in (m, n))
        with in_use(tuning=True):
            torch.mm(x, weight.T)
        torch.cuda.synchronize(device)
        tunable_op.write_results(path, tunable.get_validators(), _results(tunable.get_results()))
    found = tunable_op.results_here()
    return found if found is not None else tunable_op.TunableResults({}, ())


def _can_be_switched(tunable: Any) -> bool:
    tunable.enable(False)
    return not tunable.is_enabled()


def _results(listed: Iterable[Sequence[Any]]) -> Iterator[tuple[str, str, str, float]]:
    for operator, parameters, solution, ms, *_ in listed:
        yield str(operator), str(parameters), str(solution), max(0.0, float(ms))
