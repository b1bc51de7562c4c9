"""With a GPU, Triton kernels are compiled for it; without one, they run in Triton's interpreter."""

from __future__ import annotations

import gc
import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

import hypothesis
import pytest
import torch

import triton_interpreter

if TYPE_CHECKING:
    from collections.abc import Iterator

# The same examples on every run: a failure is a change in the code, never a change in luck or in the machine's load.
hypothesis.settings.register_profile(
    "project",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile("project")
# pytest --hypothesis-profile=fuzz: a hundred times as many, and others on every run.
hypothesis.settings.register_profile(
    "fuzz", parent=hypothesis.settings.get_profile("project"), derandomize=False, max_examples=10_000, print_blob=True
)

# All that imports and collection make stays until the end: to look through it again and again for garbage is in vain.
gc.disable()

# A shell that runs the suite in the background has it ignore Ctrl-C, and so would all processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same kernels of torch and oneDNN on every machine, here and in processes that tests start; both ask at their first
# use, and sum in another order with AVX-512.
os.environ.setdefault("ATEN_CPU_CAPABILITY", "avx2")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

HAS_GPU = torch.cuda.is_available()
if "PYTEST_XDIST_WORKER" in os.environ:
    # One worker a core: with two threads in each of two workers, every barrier waits for a thread that is not running.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
if not HAS_GPU:
    # Read by Triton when a kernel is decorated, so it must stand before the first import of a kernel.
    os.environ["TRITON_INTERPRET"] = "1"
    with suppress(ImportError, AttributeError, TypeError):
        triton_interpreter.quicken()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))


def pytest_collection_finish() -> None:
    """Three quarters of a million objects are left out of every collection from here on, and young ones live longer."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


def pytest_sessionfinish() -> None:
    # Extension modules look at the exit for what of theirs was never let go.
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _laid_out_on_a_cpu() -> Iterator[None]:
    """No CPU is as exact channels-last as stock is (test_exactness.py), and rules that need it would go untested."""
    from rocm_sd.engine.convolutions import layout

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "why_less_exact", lambda *_: None)
        yield


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture
def poison_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `torch.empty` and its kin hand out is NaN, so an output that a kernel leaves unwritten is seen."""

    def poisoned(allocate):
        def wrapped(*arguments, **named):
            tensor = allocate(*arguments, **named)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return wrapped

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
