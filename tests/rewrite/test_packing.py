from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from rocm_sd.rewrite.packing import packed_linear, unpack


def linears(*sizes: int, k: int = 6, bias: bool = False) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(k, n, bias=bias) for n in sizes)


def storages(module: nn.Module) -> set[int]:
    return {p.untyped_storage().data_ptr() for p in module.parameters()}


def weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([layer.weight for layer in module])


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_weights_become_neighbours_and_stay_the_same_parameters(bias):
    layers = linears(4, 5, 3, bias=bias)
    parameters, state = list(layers.parameters()), copy.deepcopy(layers.state_dict())
    weight, packed_bias = packed_linear(*layers)
    x = torch.randn(2, 6)
    one = nn.functional.linear(x, weight, packed_bias)
    torch.testing.assert_close(one, torch.cat([layer(x) for layer in layers], dim=-1))
    assert (packed_bias is not None) is bias
    assert len(storages(layers)) == (2 if bias else 1)
    # Nothing is held twice: a view of the parameters' own memory, which is no larger than they are.
    assert weight.data_ptr() == layers[0].weight.data_ptr()
    assert weight.untyped_storage().nbytes() == 4 * 12 * 6
    assert all(a is b for a, b in zip(parameters, layers.parameters(), strict=True))
    assert all(p.requires_grad and p.is_leaf for p in parameters)
    torch.testing.assert_close(layers.state_dict(), state, rtol=0, atol=0)


@torch.no_grad()
def test_laid_together_once():
    layers = linears(4, 5, 3)
    first = packed_linear(*layers)[0]
    second = packed_linear(*layers)[0]
    assert first.data_ptr() == second.data_ptr()
    # Keys and values are still neighbours inside of QKV.
    pair = packed_linear(layers[1], layers[2])[0]
    assert pair.data_ptr() == layers[1].weight.data_ptr() == first[4:].data_ptr()


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [
        lambda m: m[1].weight.data.add_(1),
        lambda m: m[1].weight.copy_(torch.ones(5, 6)),
        lambda m: setattr(m[1].weight, "data", torch.ones(5, 6)),
        lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(4, 6))),
        lambda m: m.load_state_dict({k: torch.ones_like(v) for k, v in m.state_dict().items()}),
        lambda m: m.load_state_dict({k: torch.ones_like(v) for k, v in m.state_dict().items()}, assign=True),
        lambda m: m.double(),
        lambda m: m.half().float(),
        lambda m: setattr(m[1].weight, "data", torch.ones(6, 5).T),
    ],
    ids=["in place", "copy_", ".data=", "weight=", "load", "assign", "double", "half", "transposed"],
)
def test_every_change_of_a_weight_is_seen(change):
    layers = linears(4, 5, 3)
    packed_linear(*layers)
    change(layers)
    packed = packed_linear(*layers)[0]
    assert torch.equal(packed, weights(layers))
    assert packed.dtype == layers[0].weight.dtype
    assert len(storages(layers)) == 1


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 4, bias=False)]),
        lambda: nn.ModuleList([nn.Linear(6, 4, bias=False), nn.Linear(7, 4, bias=False)]),
        lambda: nn.ModuleList([nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False, dtype=torch.half)]),
        lambda: nn.ModuleList([nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False, device="meta")]),
        lambda: nn.ModuleList([nn.Linear(6, 4, bias=False)] * 2),
    ],
    ids=["one bias", "widths", "dtypes", "devices", "one layer twice"],
)
@torch.no_grad()
def test_what_cannot_be_one_is_left_as_it_is(build):
    layers = build()
    before = [p.data_ptr() for p in layers.parameters()]
    assert packed_linear(*layers) is None
    assert [p.data_ptr() for p in layers.parameters()] == before


def test_weights_that_learn_are_not_read_as_one():
    """A view into the first weight's memory would lead every gradient there."""
    layers = linears(4, 5)
    assert packed_linear(*layers) is None
    layers.requires_grad_(False)
    assert packed_linear(*layers) is not None


def test_packing_in_inference_mode_leaves_weights_that_can_learn():
    layers = linears(4, 5)
    with torch.inference_mode():
        assert packed_linear(*layers) is not None
    assert len(storages(layers)) == 1
    layers[1](torch.randn(2, 6)).sum().backward()
    assert layers[1].weight.grad is not None
    with torch.inference_mode():
        unpack(layers)
    assert len(storages(layers)) == 2
    layers[0](torch.randn(2, 6)).sum().backward()


@torch.no_grad()
def test_weights_made_in_inference_mode_are_not_packed():
    with torch.inference_mode():
        layers = linears(4, 5)
    assert packed_linear(*layers) is None


@torch.no_grad()
def test_memory_of_two_storages_that_touch_is_not_taken_for_one():
    memory = np.arange(48, dtype=np.float32)
    layers = linears(4, 4)
    for layer, part in zip(layers, (memory[:24], memory[24:]), strict=True):
        layer.weight.data = torch.from_numpy(part).view(4, 6)
    assert layers[0].weight.data_ptr() + 96 == layers[1].weight.data_ptr()
    assert torch.equal(packed_linear(*layers)[0], torch.from_numpy(memory).view(8, 6))


class Wrapper(nn.Module):
    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


@torch.no_grad()
def test_unpack_gives_each_its_own_memory_inside_of_wrappers_too():
    layers = linears(4, 5, 3, bias=True)
    expected = [p.clone() for p in layers.parameters()]
    packed_linear(*layers)
    wrapped = nn.ModuleList([layers[0], Wrapper(layers[1]), layers[2]])
    unpack(wrapped)
    assert len(storages(wrapped)) == 6
    for parameter, value in zip(layers.parameters(), expected, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.untyped_storage().nbytes() == value.nbytes
        assert parameter.requires_grad


@torch.no_grad()
def test_unpack_moves_nothing_that_was_not_packed():
    layers = linears(4, 5)
    layers.append(nn.Linear(6, 2, device="meta"))
    before = [p.data_ptr() for p in layers[:2].parameters()]
    unpack(layers)
    assert [p.data_ptr() for p in layers[:2].parameters()] == before


@torch.no_grad()
def test_packed_weights_are_saved_copied_and_loaded_as_any_others(tmp_path):
    layers = linears(64, 64, 64, k=64)
    expected = copy.deepcopy(layers.state_dict())
    sizes = []
    for _ in range(2):
        buffer = io.BytesIO()
        torch.save(layers.state_dict(), buffer)
        sizes.append(len(buffer.getvalue()))
        packed_linear(*layers)
    assert sizes[1] <= sizes[0]
    save_file(layers.state_dict(), tmp_path / "weights.safetensors")
    for state in (
        load_file(tmp_path / "weights.safetensors"),
        copy.deepcopy(layers).state_dict(),
        pickle.loads(pickle.dumps(layers)).state_dict(),
    ):
        torch.testing.assert_close(dict(state), dict(expected), rtol=0, atol=0)
