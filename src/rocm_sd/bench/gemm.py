"""The matrix products of Stable Diffusion 1.5 and SDXL by shape: each candidate's rate, and its share of the peak.

Shapes are counted by running the models' own code on tensors without memory. Every implementation of `linear_residual`
that can run here is a candidate: stock torch, the libraries by name, this project's kernels, and what dispatch picks.
Each is compared with float64 first, and what is wrong is not timed. A CPU computes the first rows of each product.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import rocm_sd
from rocm_sd import arch
from rocm_sd.bench import architectures, ops
from rocm_sd.bench.gate import WRONG, free_memory
from rocm_sd.bench.machine import machine
from rocm_sd.bench.records import OURS, STOCK, Measurement, Record, WorkloadFacts, continued, now, record_file
from rocm_sd.bench.turns import failure_line
from rocm_sd.errors import NumericsFailure
from rocm_sd.integrations.diffusers.loading import default_dtype
from rocm_sd.measuring import Stopwatch, compare, interleaved
from rocm_sd.ops import OPS
from rocm_sd.ops.samples import Sample, dtype_name
from rocm_sd.tuning.choice import STOCK as TORCH
from rocm_sd.typed_json import Misfit, read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from rocm_sd.bench.turns import Progress
    from rocm_sd.ops.samples import Draw

__all__ = ["FAMILIES", "NAME", "Product", "products", "run", "table"]

NAME = "gemm"
# With the side of a picture's latents; a step with guidance has two of them in its batch.
FAMILIES = {"sd15": 64, "sdxl": 128}
_BATCH = 2
_OP = "linear_residual"
# Together they are a hundredth of a step's products: embeddings of the time step, and little else.
_LEAST_SHARE = 1e-3
# A CPU of two cores takes a second for all rows of one product.
_ROWS_ON_A_CPU = 512
_RULES = {f"Product.{name}": {"minimum": 1, "maximum": 2**31} for name in ("m", "n", "k", "calls")}


@dataclass(frozen=True)
class Product:
    """y = x @ weight.T: m rows of k, n outputs; `calls`: in one step of the model, with guidance."""

    model: str
    m: int
    n: int
    k: int
    bias: bool
    calls: int

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k

    def of_rows(self, most: int | None) -> Product:
        """The same with no more rows than these."""
        return self if most is None else replace(self, m=min(self.m, most))

    @property
    def words(self) -> str:
        return f"{self.m}x{self.k} @ {self.k}x{self.n}{' + bias' if self.bias else ''}"


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Which products are computed inside of it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[tuple[int, int, int, bool]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}:
            left, right = args[-2:]
            self.found[left.shape[0], right.shape[1], left.shape[1], len(args) > 2] += 1
        return func(*args, **(kwargs or {}))


def products(family: str) -> tuple[Product, ...]:
    """Of one step of a UNet, those with the most work first. Attention's own products are not among them."""
    pipe = architectures.random_pipeline(family, "ddim", "epsilon", torch.device("meta"), torch.float16)
    side = FAMILIES[family]
    with torch.device("meta"), torch.no_grad(), _Counting() as counted:
        pipe.unet(**architectures.unet_inputs(pipe.unet.config, _BATCH, side, side, torch.float16))
    found = [Product(family, m, n, k, bias, calls) for (m, n, k, bias), calls in counted.found.items()]
    least = _LEAST_SHARE * sum(product.flops * product.calls for product in found)
    kept = [product for product in found if product.flops * product.calls >= least]
    return tuple(sorted(kept, key=lambda product: -product.flops * product.calls))


def _sample(product: Product, dtype: torch.dtype) -> Sample:
    def build(draw: Draw) -> tuple[Any, ...]:
        m, n, k = product.m, product.n, product.k
        return draw(m, k), draw(n, k, std=k**-0.5), draw(n) if product.bias else None, None

    return Sample(f"{product.words}, {dtype_name(dtype)}", dtype, build)


def run(
    device: torch.device,
    *,
    out: Path,
    repeats: int | None = None,
    resume: bool = True,
    cold: bool | None = None,
    command: str = "",
    progress: Progress | None = None,
    every: Sequence[Product] | None = None,
) -> Record:
    """A record of kind "op" whose engines are the candidates; `every`: the products, or None for those of both models.

    Caches are flushed before each call unless `cold` is False, as for single ops.
    """
    on_cpu = device.type == "cpu"
    repeats = repeats or (5 if on_cpu else 31)
    cold = not on_cpu if cold is None else cold
    dtype = default_dtype(device)
    if every is None:
        every = [product for family in FAMILIES for product in products(family)]
    most = _ROWS_ON_A_CPU if on_cpu else None
    samples = [_sample(product.of_rows(most), dtype) for product in every]
    calls = tuple({sample.name: sample for sample in samples}.values())
    candidates = {OURS: rocm_sd.__version__, **{each.name: "" for each in OPS[_OP].implementations[1:]}}
    models = ", ".join(dict.fromkeys(product.model for product in every))
    notes = (f"a CPU computes at most {_ROWS_ON_A_CPU} rows of each product",) if on_cpu else ()
    record = Record(
        "op", WorkloadFacts(NAME, models, "random", 0, 0, 1, "", 0.0, dtype_name(dtype)), machine(device), command,
        now(), (), complete=False, op_cases=tuple(f"{_OP} {sample.name}" for sample in calls), notes=notes,
        extra={"planned": {"engines": candidates, "repeats": repeats, "cold": cold},
               "products": [asdict(product) for product in every], "most_rows": most},
    )  # fmt: skip
    file = record_file(out, NAME)
    stopwatch = Stopwatch(device, cold=cold, queued=True)
    with continued(file, record, resume=resume) as begun:
        record = begun
        try:
            for number, sample in enumerate(calls, start=1):
                if progress:
                    progress(number - 1, len(calls), sample.name)
                if number not in record.batches:
                    record = _with(record, _measured(sample, number, stopwatch, repeats))
                    free_memory()
                    record.save(file)
        except KeyboardInterrupt:
            record.save(file)
            raise
        record = replace(record, complete=True)
        record.save(file)
    if progress:
        progress(len(calls), len(calls), "done")
    return record


def _with(record: Record, measured: Sequence[Measurement]) -> Record:
    stock = next(one for one in measured if one.engine == STOCK)
    rivals = [one for one in measured if one.ms and stock.ms and one.engine != STOCK]
    compared = tuple(compare(one.engine, STOCK, one.batch, one.ms, stock.ms) for one in rivals)
    return replace(record, measurements=(*record.measurements, *measured), comparisons=(*record.comparisons, *compared))


def _measured(sample: Sample, number: int, stopwatch: Stopwatch, repeats: int) -> list[Measurement]:
    """Of all candidates that can run here; what dispatch picks is one more, by the name of this project."""
    op, device = OPS[_OP], stopwatch.device
    arguments = sample.make(device)
    assert op.verification is not None
    problem = op.verification.problem(*arguments)
    choice = op.choose(problem, device)
    calls: dict[str, Callable[[], Any]] = {
        OURS: partial(op.implementation(choice.implementation), *arguments, config=choice.config)
    }
    providers = {OURS: f"{choice.implementation} ({choice.source})"}
    for each in op.implementations:
        name = STOCK if each.name == TORCH else each.name
        if each.why_not(problem, device) is None:
            calls[name], providers[name] = partial(each, *arguments), each.name
    tried = {name: _tried(sample, arguments, call, device) for name, call in calls.items()}
    ready = {name: one.call for name, one in tried.items() if one.call is not None}
    interleaved(ready, stopwatch, repeats=1)
    times = interleaved(ready, stopwatch, repeats=repeats)
    floor = ops.floor_ms(op, sample, arguments, device)
    return [
        Measurement(
            name, f"rocm-sd {rocm_sd.__version__}" if name == OURS else f"torch {torch.__version__}", providers[name],
            number, tuple(times.get(name, ())), 1, floor_ms=floor if name in times else None, error=tried[name].error,
            stock_error=tried[name].stock_error, left_out=tried[name].why_not,
        )
        for name in sorted(calls, key=lambda name: (name != STOCK, name != OURS))
    ]  # fmt: skip


@dataclass(frozen=True)
class _Tried:
    """A candidate that is right, ready to be timed; or why it is not."""

    call: Callable[[], Any] | None = None
    error: float | None = None
    stock_error: float | None = None
    why_not: str | None = None


def _tried(sample: Sample, arguments: Sequence[Any], call: Callable[[], Any], device: torch.device) -> _Tried:
    try:
        error, stock_error = ops.errors(OPS[_OP], sample, arguments, call)
        return _Tried(ops.prepared(call, device), error, stock_error)
    except NumericsFailure as failure:
        return _Tried(why_not=f"{WRONG}: {failure.message}")
    except Exception as failure:  # noqa: BLE001 -- one candidate that cannot run: the others go on
        return _Tried(why_not=failure_line(failure))


def table(record: Record) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings and rows: a product, how often a step computes it, and "TFLOP/s (% of peak)" of each candidate.

    The fastest has a star.
    """
    candidates = record.engines
    cases = {case.removeprefix(f"{_OP} "): number for number, case in enumerate(record.op_cases, start=1)}
    peak = arch.get(record.machine.arch).peak(record.workload.dtype)
    rows, most = [], record.extra.get("most_rows")
    every = list(_products(record))
    work = Counter[str]()
    for product in every:
        work[product.model] += round(product.flops * product.calls)
    for product in every:
        timed_one = product.of_rows(most if isinstance(most, int) and most > 0 else None)
        number = cases.get(f"{timed_one.words}, {record.workload.dtype}")
        found = {name: record.measurement(name, number) for name in candidates} if number else {}
        timed = {name: one.p50_ms for name, one in found.items() if one is not None and one.ms}
        share = product.flops * product.calls / work[product.model]
        cells = [_cell(timed_one.flops, timed, name, peak) for name in candidates]
        rows.append((product.model, product.words, str(product.calls), f"{share:.0%}", *cells))
    return ("model", "product", "calls a step", "of the work", *candidates), rows


def _products(record: Record) -> Iterable[Product]:
    """What a file says of them: a record may come from anywhere."""
    listed = record.extra.get("products")
    return filter(None, map(_product, listed if isinstance(listed, list) else []))


def _product(values: Any) -> Product | None:
    try:
        return read(Product, values, _RULES)
    except Misfit:
        return None


def _cell(flops: float, timed: dict[str, float], name: str, peak: float | None) -> str:
    if name not in timed:
        return ""
    rate = flops / timed[name] / 1e9
    star = "*" if timed[name] == min(timed.values()) else ""
    return f"{rate:.3g}{'' if peak is None else f' ({rate / peak:.0%})'}{star}"
