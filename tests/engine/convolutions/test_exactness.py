"""Every stock operation that another layout redirects is held against float64, on every kind of CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rocm_sd.engine.convolutions import exactness

CPU = torch.device("cpu")
# Asked anew each time, whatever was found in this process.
why_less_exact = exactness.why_less_exact.__wrapped__
OPERATIONS = ["_convolved", "_normalized", "_averaged"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TESTS = Path(__file__).resolve().parents[2]
# As torch has it in each: of its own kernels, and of oneDNN's.
LEVELS = {"default": "SSE41", "avx2": "AVX2", "avx512": "ALL"}


@pytest.fixture
def alike(monkeypatch):
    """alike(change): operations that are the same in both layouts, but for the one of that name."""
    own = {name: getattr(exactness, name) for name in OPERATIONS}

    def set_up(**changes):
        for name, operation in own.items():
            change = changes.get(name, lambda y: y)

            def changed(*tensors, operation=operation, change=change):
                y = operation(*(tensor.contiguous() for tensor in tensors))
                exact, contiguous = y.dtype is torch.float64, tensors[0].is_contiguous()
                return y if exact or contiguous else change(y)

            monkeypatch.setattr(exactness, name, changed)

    return set_up


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_that_are_alike_are_as_exact(alike, dtype):
    alike()
    assert why_less_exact(CPU, dtype) is None


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_operation_that_is_worse_is_noted_with_how_much(alike, operation, dtype):
    def worse(y):
        noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)) * 40 * torch.finfo(y.dtype).eps
        return y + noise.to(y.dtype)

    alike(**{operation: worse})
    reason = why_less_exact(CPU, dtype)
    if operation == "_convolved" and dtype is not torch.float32:
        assert reason is None
        return
    kind = {"_convolved": "convolutions", "_normalized": "group norms", "_averaged": "averages"}[operation]
    assert kind in reason
    assert str(dtype).removeprefix("torch.") in reason
    assert float(reason.split(" are ")[1].split(" times")[0]) > 3


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("value", [float("nan"), 0.0])
def test_a_result_that_is_no_result_is_worse(alike, operation, value):
    alike(**{operation: lambda y: y * 0 + value})
    assert why_less_exact(CPU, torch.float32) is not None


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_worse_gradient_is_worse(alike, operation):
    """Gradients of samplers that steer a picture go through the same layout."""

    def worse(y):
        y.register_hook(lambda gradient: gradient * (1 + 1e-5))
        return y

    alike(**{operation: worse})
    assert why_less_exact(CPU, torch.float32) is not None


def test_it_is_measured_in_any_mode():
    with torch.inference_mode():
        first = why_less_exact(CPU, torch.float32)
    with torch.no_grad():
        assert why_less_exact(CPU, torch.float32) == first


def test_random_numbers_of_the_program_stay():
    state = torch.random.get_rng_state()
    why_less_exact(CPU, torch.float32)
    assert torch.equal(torch.random.get_rng_state(), state)


# Run by an interpreter of its own: torch asks once which instructions to use.
SCRIPT = """
import json, os, torch
import rocm_sd
from rocm_sd import numerics
from rocm_sd.engine import convolutions
from tiny_models import vae_of

torch.manual_seed(0)
random = torch.Generator().manual_seed(1)
found = {"level": torch.backends.cpu.get_cpu_capability(), "worst": 0.0}

def compare(name, ours, exact, stock):
    compared = numerics.compare(ours, exact, stock)
    found["worst"] = max(found["worst"], compared.rms / max(compared.stock_rms, compared.floor))
    if not compared.ok:
        found.setdefault("wrong", []).append(f"{name}: {compared}")

def norm():
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Conv2d(32, 32, 1, bias=False), torch.nn.GroupNorm(16, 32)).eval()

with torch.no_grad():
    for dtype in (torch.float32, torch.bfloat16):
        models = {"norm": [norm(), norm(), norm()]}
        torch.manual_seed(3); weights = vae_of().state_dict()
        models["vae"] = [vae_of(), vae_of(), vae_of()]
        for model in models["vae"]:
            model.load_state_dict(weights)
        for name, (ours, stock, exact) in models.items():
            ours, stock = (model.to(dtype) for model in (ours, stock))
            exact.load_state_dict(stock.state_dict())
            exact.double()
            # The convolution hands its input on.
            if name == "norm":
                for model in (ours, stock, exact):
                    model[0].weight.copy_(torch.eye(32)[:, :, None, None])
            rocm_sd.optimize(ours)
            for mean in (0.0, 1.0, 10.0, 100.0, 1000.0):
                x = torch.randn(2, 32 if name == "norm" else 3, 16, 16, generator=random)
                x = (x * 0.01 if mean <= 100 else x * 0.001) + mean * (0.01 if mean <= 100 else 0.001)
                x = x.to(dtype)
                run = (lambda m, x: m.encode(x).latent_dist.mean) if name == "vae" else (lambda m, x: m(x))
                compare(f"{name} {dtype} mean {mean}", run(ours, x), run(exact, x.double()), run(stock, x))
            if name == "vae":
                grey = torch.full((1, 3, 16, 16), 0.5).to(dtype)
                compare(f"grey {dtype}", run(ours, grey), run(exact, grey.double()), run(stock, grey))
print(json.dumps(found))
"""


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("step_graph", ["0", "1"], ids=["one by one", "recorded"])
def test_norms_and_encoders_are_as_exact_as_stock_far_from_zero(level, step_graph):
    # Torch takes what it is told to, and a processor that does not have it ends the process.
    if level != "default" and not getattr(torch.cpu, f"_is_{level}_supported")():
        pytest.skip(f"this processor has no {level}")
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": level, "ONEDNN_MAX_CPU_ISA": LEVELS[level]}
    environment |= {"ROCM_SD_STEP_GRAPH": step_graph, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, env=environment, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert "wrong" not in found, found
    assert found["worst"] <= 2, found
