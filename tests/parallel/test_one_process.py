"""Several devices from one process; the CPU stands for each of them."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch.nn import functional as F

import multi_gpu_coordinator
from rocm_sd.errors import Unsupported
from rocm_sd.numerics import compare
from rocm_sd.parallel import ModelParallelAttention, MultiGPUCoordinator


def whole(layer, x, context, mask):
    """The same weights, put together, in one dtype."""

    def joined(name):
        return torch.cat([part[name].weight for part in layer.parts]), torch.cat(
            [part[name].bias for part in layer.parts]
        )

    def heads(tensor):
        return tensor.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)

    weights = {name: [each.to(x.dtype) for each in joined(name)] for name in "qkv"}
    query, key, value = (
        heads(F.linear(source, *weights[name])) for name, source in (("q", x), ("k", context), ("v", context))
    )
    seen = F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2).flatten(2)
    out = torch.cat([part["out"].weight for part in layer.parts], dim=1).to(x.dtype)
    return F.linear(seen, out, layer.bias.to(x.dtype))


@pytest.mark.parametrize("devices", [1, 2, 3, 5])
@pytest.mark.parametrize("cross", [False, True])
def test_heads_over_devices(devices, cross):
    torch.manual_seed(devices)
    layer = ModelParallelAttention(64, 4, ["cpu"] * devices)
    x = torch.randn(2, 9, 64)
    context = torch.randn(2, 5, 64) if cross else None
    mask = torch.rand(2, 1, 9, 5) > 0.3 if cross else None
    found = layer(x, context, mask)
    source = x if context is None else context
    right = whole(layer, x.double(), source.double(), mask)
    result = compare(found.detach(), right.detach(), whole(layer, x, source, mask).detach())
    assert result.ok, str(result)
    assert sum(layer.heads) == 4
    # With more devices than heads, some have nothing to do.
    assert len(layer.parts) == min(devices, 4)


def test_gradients_reach_every_part():
    layer = ModelParallelAttention(16, 2, ["cpu", "cpu"])
    layer(torch.randn(1, 3, 16)).sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_work_goes_to_whoever_is_free():
    coordinator = MultiGPUCoordinator(["cpu", "cpu"])
    wanted = iter([0.2, 0.01])
    pauses = coordinator.replicate(lambda _device: next(wanted))
    done = coordinator.run(pauses, range(10), lambda pause, item: (time.sleep(pause), pause, item)[1:])
    assert [item for _, item in done] == list(range(10))
    assert sum(pause == 0.01 for pause, _ in done) >= 7


def test_an_error_of_one_is_raised():
    def draw(_model, item):
        raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match="item"):
        MultiGPUCoordinator(["cpu"]).run([None], [1], draw)


def test_what_there_is():
    coordinator = MultiGPUCoordinator(["cpu", "cpu"])
    assert coordinator.num_gpus == 0
    assert max(coordinator.speeds(64)) == 1.0
    parts = coordinator.split(torch.arange(7), [1.0, 3.0])
    assert [len(part) for part in parts] == [2, 5] or [len(part) for part in parts] == [1, 6]
    assert torch.equal(torch.cat(parts), torch.arange(7))
    assert multi_gpu_coordinator.MultiGPUCoordinator is MultiGPUCoordinator
    assert multi_gpu_coordinator.ModelParallelAttention is ModelParallelAttention


@pytest.mark.parametrize("device_ids", [[], [99], ["cuda:99"]])
def test_devices_that_are_not_there(device_ids):
    with pytest.raises(Unsupported, match="device_ids"):
        MultiGPUCoordinator(device_ids)


def test_heads_that_do_not_divide():
    with pytest.raises(Unsupported, match="d_model 10 with 4 heads"):
        ModelParallelAttention(10, 4, ["cpu"])


def test_an_error_leaves_what_waits_undrawn():
    begun, failed = [], threading.Event()

    def draw(model, item):
        begun.append(item)
        if model == "broken":
            failed.set()
            raise ValueError("it does not fit")
        failed.wait(10)
        # The other's error is on its way.
        time.sleep(0.2)

    with pytest.raises(ValueError, match="does not fit"):
        MultiGPUCoordinator(["cpu", "cpu"]).run(["broken", "right"], range(50), draw)
    assert len(begun) <= 3
