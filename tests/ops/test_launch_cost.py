"""What a launch of an op costs the host, on a GPU: benchmarks/launch_cost.py has every call of a step."""

from __future__ import annotations

import time
from statistics import median

import pytest
import torch

from rocm_sd.ops import OPS, conv2d, geglu, group_norm_silu, layer_norm_residual, linear_geglu, upsample

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")

MOST_US = 10.0
CALLS, TURNS = 10, 60


def host_us(call) -> float:
    """Of one among a few calls, which the queue of an idle card takes without a wait."""
    times = []
    for _ in range(TURNS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - began) * 1e6 / CALLS)
    torch.cuda.synchronize()
    return median(times)


def calls():
    """(op, its function, its arguments): one kernel each, at small maps of SD 1.5."""

    def half(*shape):
        return torch.randn(shape, dtype=torch.half, device="cuda")

    def image(*shape):
        return half(*shape).to(memory_format=torch.channels_last)

    x, bias = image(2, 1280, 8, 8), half(1280)
    tokens = half(2, 64, 1280)
    return [
        ("geglu", geglu, (half(2, 64, 10240), half(10240))),
        ("layer_norm_residual", layer_norm_residual, (tokens, tokens, bias, bias)),
        ("group_norm_silu", group_norm_silu, (x, 32, bias, bias)),
        ("linear_geglu", linear_geglu, (tokens, half(2560, 1280), half(2560))),
        ("conv2d", conv2d, (x, image(64, 1280, 1, 1), half(64))),
        ("upsample", upsample, (x,)),
    ]


@torch.no_grad()
def test_a_launch_costs_the_host_no_more_than_10_us_or_one_of_torchs_own(monkeypatch):
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", ",".join(f"{name}=triton" for name, _, _ in calls()))
    tokens = torch.randn(2, 64, 1280, dtype=torch.half, device="cuda")
    found = {}
    for name, function, arguments in calls():
        for _ in range(3):
            function(*arguments)
        bound = OPS[name]._bound.by_key
        assert bound, f"{name} was not bound"
        # On a slow host nothing is launched in 10 us: an add of torch's is dispatched, given memory and launched, too.
        one = host_us(lambda: tokens + tokens)
        found[name] = (host_us(lambda f=function, a=arguments: f(*a)), one)
    slow = {name: both for name, both in found.items() if both[0] > max(MOST_US, 1.5 * both[1])}
    assert not slow, f"us, and those of one of torch's own: {slow}"
