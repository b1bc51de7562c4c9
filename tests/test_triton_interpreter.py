"""What triton_interpreter.py leaves out of the interpreter is not missed, and is really left out."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

if torch.cuda.is_available():
    pytest.skip("kernels are compiled for the GPU", allow_module_level=True)

SIZE = 64


@triton.jit
def _and_more(x, more):
    return x + more


@triton.jit
def _doubled(x):
    # A function that calls another, and one of the library, whose language is another module.
    return _and_more(x, x) + tl.sum(x * 0, axis=0)


@triton.jit
def _kernel(x, y, size: tl.constexpr):
    place = tl.arange(0, size)
    tl.store(y + place, _doubled(tl.load(x + place)))


def test_functions_that_a_kernel_calls_compute_and_the_language_comes_back():
    before = tl.static_print, tl.load, tl.tensor.__add__
    x = torch.arange(SIZE, dtype=torch.int32)
    for _ in range(2):
        y = torch.full_like(x, -1)
        _kernel[(1,)](x, y, SIZE)
        assert torch.equal(y, 2 * x)
        assert (tl.static_print, tl.load, tl.tensor.__add__) == before


def test_no_overflow_is_computed_for_an_assertion_that_is_not_made():
    from triton.runtime.interpreter import interpreter_builder

    assert interpreter_builder.options.debug or not interpreter_builder.options.sanitize_overflow


def test_the_language_is_patched_once_a_launch(monkeypatch):
    from triton.runtime import interpreter

    patched = []
    patch = interpreter._patch_builtin

    def counted(package, *arguments):
        patched.append(package)
        return patch(package, *arguments)

    monkeypatch.setattr(interpreter, "_patch_builtin", counted)
    x = torch.arange(SIZE, dtype=torch.int32)
    _kernel[(3,)](x, torch.empty_like(x), SIZE)
    assert patched.count(tl) == 1
