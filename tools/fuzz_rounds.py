"""What a worker process of `fuzz_ops.py` does: so many drawn calls, each by several implementations and configs.

Every result lies in memory that was NaN, between guards of NaN, as its arguments do: what is left unwritten, read from
beside an argument or written beside a result is seen. It must be as close to float64 as stock torch is, of stock's
dtype and layout, and the kernels of this project must give the same bits twice.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch

from fuzz_calls import CALLS, Drawn, Limits
from rocm_sd.kernels import triton as triton_kernels
from rocm_sd.numerics import compare, in_float64, outputs
from rocm_sd.ops import OPS
from rocm_sd.ops.trials import is_noted
from rocm_sd.tuning.search.candidates import Candidate, candidates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rocm_sd.ops.registry import Op

__all__ = ["Round", "Row", "run_round"]

# Kernels of a draw are compiled for these many kinds of call of each op; sizes are drawn anew for each call.
KINDS = 24
# The products have the most configs and the most ways to be wrong.
ROTATION = (
    *("attention", "conv2d", "linear_residual", "group_norm_silu", "upsample_conv2d", "linear_geglu"),
    *("attention", "conv2d", "layer_norm_residual", "geglu", "upsample", "guided_step"),
    *("attention", "conv2d", "linear_residual", "layout_copy", "group_norm_silu", "transformer_block"),
    *("linear_8bit", "quantize_rows", "conv2d_8bit", "layer_norm_8bit", "geglu_8bit"),
)
GUARD = 256  # elements: what follows stays aligned
# Of the size of the exact result: no rounding of any dtype in use errs so much, so stock is no yardstick then.
_IMPLAUSIBLE = 0.1
_SIZES = {
    "attention": "t", "conv2d": "pixels", "conv2d_8bit": "pixels", "upsample_conv2d": "pixels",
    "group_norm_silu": "hw", "upsample": "hw",
}  # fmt: skip

Row = tuple[str, str, str, str]  # op, implementation, config, variant


@dataclass
class Round:
    """Of each row, calls and failures; `residues` are those of the size that kernels cut into tiles."""

    calls: dict[Row, int] = field(default_factory=dict)
    failures: dict[Row, int] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    residues: dict[str, set[int]] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    compiled: int = 0
    samples: int = 0
    broken: bool = False

    def skip(self, why: str) -> None:
        self.skipped[why] = self.skipped.get(why, 0) + 1


@dataclass(frozen=True)
class _Case:
    number: int
    kind: int
    op: Op
    drawn: Drawn

    def arguments(self, device: torch.device, *, filled: bool = True) -> tuple[Any, ...]:
        return self.drawn.sample.make(device, filled=filled, seed=self.number)


def _case(seed: int, number: int, limits: Limits, only: tuple[str, ...]) -> _Case:
    rotation = [name for name in ROTATION if not only or name in only]
    place = number % len(rotation)
    name = rotation[place]
    kind = (number // len(rotation) * rotation.count(name) + rotation[:place].count(name)) % KINDS
    fixed, free = Random(f"{seed} {name} {kind}"), Random(f"{seed} {name} {number}")  # noqa: S311 -- no secrets
    return _Case(number, kind, OPS[name], CALLS[name](fixed, free, limits))


def _chosen(case: _Case, problem: Any, device: torch.device) -> list[Candidate]:
    """Of each kernel's space two configs in turn, and one library: over the kinds every config has its turn."""
    op = case.op
    found: dict[str, list[Candidate]] = {}
    for each in candidates(op, problem, device)[1:]:
        found.setdefault(each.implementation, []).append(each)
    for made in op.implementations[1:]:
        if made.name not in found and made.default and made.why_not(problem, device) is None:
            found[made.name] = [Candidate(made.name, made.default)]
    libraries = [several[0] for several in found.values() if len(several) == 1 and not several[0].config]
    chosen = [libraries[case.number // len(ROTATION) % len(libraries)]] if libraries else []
    for several in found.values():
        if several[0].config:
            chosen += dict.fromkeys(several[(2 * case.kind + step) % len(several)] for step in range(2))
    return chosen


def run_round(seed: int, first: int, count: int, device: str, small: bool, only: tuple[str, ...], begun: str) -> Round:
    """`begun`: the file that names the call under way, for whoever finds this process dead."""
    at = torch.device(device)
    limits = Limits(work=2**16, elements=2**9, narrow=16) if small else Limits()
    done, under_way = Round(), Path(begun)
    with torch.no_grad():
        cases = [_case(seed, number, limits, only) for number in range(first, first + count)]
        plans = []
        for case in cases:
            verification = case.op.verification
            assert verification is not None
            plans.append((case, _chosen(case, verification.problem(*case.arguments(at, filled=False)), at)))
        done.compiled = _compile(plans, at, under_way)
        for case, chosen in plans:
            _try(case, chosen, at, done, under_way)
            if done.broken:
                break
    under_way.unlink(missing_ok=True)
    return done


def _compile(plans: list[tuple[_Case, list[Candidate]]], device: torch.device, under_way: Path) -> int:
    """All kernels that the calls launch, side by side; what is compiled already runs on whatever lies in memory."""
    if device.type != "cuda" or triton_kernels.why_not(device) is not None:
        return 0
    from rocm_sd.kernels.triton import precompile  # noqa: PLC0415 -- needs Triton

    with precompile.precompiling() as compiled:
        for case, chosen in plans:
            arguments = case.arguments(device, filled=False)
            for candidate in chosen:
                if is_noted(case.op, candidate.implementation):
                    under_way.write_text(f"{case.number} {candidate}", encoding="utf-8")
                    case.op.implementation(candidate.implementation)(*arguments, config=candidate.config)
    return compiled.compiled


def _try(case: _Case, chosen: list[Candidate], device: torch.device, done: Round, under_way: Path) -> None:
    op, verification = case.op, case.op.verification
    assert verification is not None
    if not chosen:
        done.skip(f"{op.name}: no implementation but stock")
        return
    arguments = case.arguments(device)
    problem = verification.problem(*arguments)
    try:
        exact = outputs(verification.reference(*in_float64(arguments)))
        stock = outputs(op.implementations[0](*arguments))
    except torch.OutOfMemoryError:
        done.skip(f"{op.name}: no memory for float64")
        return
    if not all(_plausible(*each) for each in zip(stock, exact, strict=True)):
        stock = outputs(verification.reference(*arguments))
    done.samples += 1
    size = next(int(problem[name]) for name in (_SIZES.get(op.name, ""), "m", "n") if name in problem)
    done.residues.setdefault(op.name, set()).add(size % 128)
    for candidate in chosen:
        made = op.implementation(candidate.implementation)
        variant = made.variant(problem, candidate.config, device) if made.variant and candidate.config else ""
        said = ", ".join(text for text in (str(problem["dtype"]), variant, case.drawn.said) if text)
        row = (op.name, candidate.implementation, str(candidate.config), said)
        under_way.write_text(f"{case.number} {candidate}", encoding="utf-8")
        done.calls[row] = done.calls.get(row, 0) + 1
        try:
            reason = _why_wrong(
                partial(made, config=candidate.config), arguments, exact, stock, twice=bool(candidate.config)
            )
        except Exception as error:  # noqa: BLE001 -- whatever a candidate raises is what was looked for
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
            done.broken = _is_broken(device)
        if reason is not None:
            done.failures[row] = done.failures.get(row, 0) + 1
            done.reasons.append(f"{case.number}: {case.drawn.sample.name}: {candidate}: {reason}")
        if done.broken:
            return


def _plausible(stock: torch.Tensor, exact: torch.Tensor) -> bool:
    if not exact.numel():
        return True
    exact = exact.double()
    error = (stock.double() - exact).square().mean().sqrt()
    return bool(error <= _IMPLAUSIBLE * exact.square().mean().sqrt())


def _is_broken(device: torch.device) -> bool:
    try:
        torch.zeros(8, device=device).sum().item()
    except RuntimeError:
        return True
    return False


def _why_wrong(
    run: Callable[..., Any],
    arguments: tuple[Any, ...],
    exact: tuple[torch.Tensor, ...],
    stock: tuple[torch.Tensor, ...],
    *,
    twice: bool,
) -> str | None:
    guarded, buffers = _guarded(arguments)
    before: tuple[torch.Tensor, ...] | None = None
    for _ in range(1 + twice):
        with _poisoned(arguments[0].device) as allocated:
            results = outputs(run(*guarded))
        reason = _why_not_same(results, exact, stock) if before is None else _why_other_bits(results, before)
        reason = reason or _why_touched(buffers, allocated)
        if reason is not None:
            return reason
        before = tuple(y.clone() for y in results)
    return None


def _why_not_same(
    results: tuple[torch.Tensor, ...], exact: tuple[torch.Tensor, ...], stock: tuple[torch.Tensor, ...]
) -> str | None:
    for ours, right, theirs in zip(results, exact, stock, strict=True):
        if ours.dtype != theirs.dtype or _layout(ours) != _layout(theirs):
            return f"{ours.dtype} of strides {ours.stride()} and not {theirs.dtype} of {theirs.stride()}"
        compared = compare(ours, right, theirs)
        if not compared.ok:
            return str(compared)
    return None


def _layout(y: torch.Tensor) -> list[tuple[int, int]]:
    """Sides and strides; that of a side of one says nothing."""
    return [(side, step) for side, step in zip(y.shape, y.stride(), strict=True) if side > 1]


def _why_other_bits(results: tuple[torch.Tensor, ...], before: tuple[torch.Tensor, ...]) -> str | None:
    same = all(torch.equal(_bits(now), _bits(first)) for now, first in zip(results, before, strict=True))
    return None if same else "other bits the second time"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Of fp8 torch has no comparisons."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _can_be_guarded(tensor: torch.Tensor) -> bool:
    """Whether it has a NaN that torch can look for."""
    return tensor.is_floating_point() and tensor.element_size() > 1 and tensor.numel() > 0


Buffer = tuple[torch.Tensor, torch.Tensor | None, int]  # with guards, what lies between them if it must stay, its size


def _guarded(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Buffer]]:
    """The same call on copies with NaN before and after each storage."""
    buffers: dict[int, Buffer] = {}
    given: list[Any] = []
    for argument in arguments:
        if not isinstance(argument, torch.Tensor) or not _can_be_guarded(argument):
            given.append(argument)
            continue
        place = argument.untyped_storage().data_ptr()
        if place not in buffers:
            size = argument.untyped_storage().nbytes() // argument.element_size()
            inner = argument.as_strided((size,), (1,), 0)
            buffer = torch.full((size + 2 * GUARD,), float("nan"), dtype=argument.dtype, device=argument.device)
            buffer[GUARD : GUARD + size] = inner
            buffers[place] = (buffer, inner, size)
        start = GUARD + argument.storage_offset()
        given.append(buffers[place][0].as_strided(argument.shape, argument.stride(), start))
    return tuple(given), list(buffers.values())


def _why_touched(arguments: list[Buffer], allocated: list[Buffer]) -> str | None:
    for buffer, inner, size in (*arguments, *allocated):
        intact = buffer[:GUARD].isnan().all() & buffer[GUARD + size :].isnan().all()
        if inner is not None:
            intact &= (buffer[GUARD : GUARD + size] == inner).all()
        if not bool(intact):
            return f"memory was written beside {'a result' if inner is None else 'or in an argument'}"
    return None


@contextmanager
def _poisoned(device: torch.device) -> Iterator[list[Buffer]]:
    """What `torch.empty` and its kin hand out is NaN, with guards around it."""
    allocated: list[Buffer] = []

    def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrapped(*given: Any, **named: Any) -> torch.Tensor:
            tensor = allocate(*given, **named)
            if not _can_be_guarded(tensor) or tensor.device.type != device.type:
                return tensor
            size = tensor.untyped_storage().nbytes() // tensor.element_size()
            buffer = torch.full((size + 2 * GUARD,), float("nan"), dtype=tensor.dtype, device=tensor.device)
            allocated.append((buffer, None, size))
            return buffer.as_strided(tensor.shape, tensor.stride(), GUARD)

        return wrapped

    names = ("empty", "empty_like", "empty_strided")
    kept = {name: getattr(torch, name) for name in names}
    new_empty = torch.Tensor.new_empty
    for name in names:
        setattr(torch, name, poisoned(kept[name]))
    torch.Tensor.new_empty = poisoned(new_empty)  # type: ignore[method-assign,assignment]
    try:
        yield allocated
    finally:
        for name in names:
            setattr(torch, name, kept[name])
        torch.Tensor.new_empty = new_empty  # type: ignore[method-assign]
