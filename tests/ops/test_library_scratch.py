from __future__ import annotations

import gc

import pytest
import torch

from rocm_sd.engine.capture.graph import capture_graph
from rocm_sd.ops import library_scratch


@pytest.fixture
def cleared(monkeypatch):
    """How often torch was asked to give scratch back."""
    times = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: times.append(1), raising=False)
    return times


def test_nothing_is_given_back_but_around_captures(cleared):
    library_scratch.give_back()
    assert not cleared
    with library_scratch.given_back():
        assert len(cleared) == 1
        library_scratch.give_back()
        assert len(cleared) == 2
    assert len(cleared) == 3
    library_scratch.give_back()
    assert len(cleared) == 3


def test_within_another_the_outer_one_stays_in_force(cleared):
    with library_scratch.given_back():
        with pytest.raises(RuntimeError), library_scratch.given_back():
            raise RuntimeError
        before = len(cleared)
        library_scratch.give_back()
        assert len(cleared) == before + 1


def test_without_a_gpu_or_such_a_function_nothing_happens(monkeypatch):
    monkeypatch.delattr(torch._C, "_cuda_clearCublasWorkspaces", raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    ran = []
    with library_scratch.given_back():
        library_scratch.give_back()
        ran.append(1)
    assert ran


@pytest.mark.gpu
@torch.no_grad()
def test_a_graph_outlives_the_one_before_it(device):
    x = torch.randn(512, 2048, device=device, dtype=torch.float16)
    weight = torch.randn(2048, 2048, device=device, dtype=torch.float16) / 45
    expected = x @ weight
    first, second = (capture_graph(lambda: [x @ weight], device) for _ in range(2))
    first.replay()
    del first
    gc.collect()
    torch.cuda.empty_cache()
    # Whoever gets the memory of the first one's scratch must not be written to.
    others = [torch.full((2**22,), 7, device=device, dtype=torch.int32) for _ in range(64)]
    second.replay()
    assert torch.equal(second.outputs[0], expected)
    assert all(bool((other == 7).all()) for other in others)


@pytest.mark.gpu
@torch.no_grad()
def test_scratch_does_not_stay(device):
    x = torch.randn(512, 512, device=device, dtype=torch.float16)
    x @ x
    before = torch.cuda.memory_allocated()
    graph = capture_graph(lambda: [x @ x], device)
    assert torch.cuda.memory_allocated() <= before + graph.outputs[0].nbytes
