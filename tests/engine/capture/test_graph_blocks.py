"""One function as several graphs, against the same function."""

from __future__ import annotations

import pytest
import torch

from rocm_sd.engine.capture import blocks
from rocm_sd.engine.capture.blocks import TooSmall, capture_blocks
from rocm_sd.engine.capture.graph import capture_graph


def chain(x, others, log=None):
    """20 additions; what each needs of an earlier one crosses the blocks. Views are no nodes."""

    def run():
        if log is not None:
            log.append(1)
        kept, y = [], x
        for other in others:
            y = y.view(2, -1).view_as(y) + other
            kept.append(y)
        return [kept[-1], kept[3] * 2]

    return run


@pytest.fixture
def given(device):
    random = torch.Generator().manual_seed(0)
    x = torch.randn(4, 6, generator=random).to(device)
    return x, [torch.randn(4, 6, generator=random).to(device) for _ in range(20)]


def test_blocks_give_the_bits_of_the_function_on_changed_inputs(given, monkeypatch):
    monkeypatch.setattr(blocks, "MOST_NODES", 6)
    x, others = given
    run = chain(x, others)
    run()
    graph = capture_blocks(run, x.device)
    assert graph.blocks == 4
    for number in range(5):
        x.copy_(torch.full_like(x, number))
        others[10].fill_(-number)
        graph.replay()
        assert all(map(torch.equal, graph.outputs, run()))


def test_they_and_one_graph_run_the_function_once(given, monkeypatch):
    monkeypatch.setattr(blocks, "MOST_NODES", 6)
    ran = []
    run = chain(*given, ran)
    capture_graph(run, given[0].device).replay()
    capture_blocks(run, given[0].device).replay()
    assert len(ran) == 2


def test_what_is_one_block_is_not_cut(given):
    with pytest.raises(TooSmall, match="it has less than 150 nodes, too few to be cut into blocks"):
        capture_blocks(chain(*given), given[0].device)


def test_a_function_that_fails_leaves_nothing_behind(given, monkeypatch):
    monkeypatch.setattr(blocks, "MOST_NODES", 6)
    x, others = given
    run = chain(x, others)

    def fails():
        run()
        raise ValueError("too many pictures")

    with pytest.raises(ValueError, match="too many pictures"):
        capture_blocks(fails, x.device)
    capture_blocks(run, x.device).replay()


@pytest.mark.gpu
def test_an_operation_of_many_launches_is_counted_by_its_nodes(given, monkeypatch):
    """A product with bias and a cut inner dimension, softmax and sums: what is one operation may be several nodes."""
    assert blocks._node_counter() is not None
    monkeypatch.setattr(blocks, "MOST_NODES", 5)
    x = given[0]

    def run():
        y = x
        for _ in range(12):
            parts = torch._foreach_add([y, y, y, y[:2], y[2:]], 1.0)
            y = parts[0] + torch.cat([parts[3], parts[4]])
        return [y]

    run()
    graph = capture_blocks(run, x.device)
    x.fill_(3.0)
    graph.replay()
    assert torch.equal(graph.outputs[0], run()[0])


@pytest.mark.gpu
def test_where_nodes_cannot_be_counted_operations_are(given, monkeypatch):
    monkeypatch.setattr(blocks, "_node_counter", lambda: None)
    monkeypatch.setattr(blocks, "MOST_NODES", 6)
    x, others = given
    run = chain(x, others)
    graph = capture_blocks(run, x.device)
    assert graph.blocks == 11
    x.fill_(3.0)
    graph.replay()
    assert all(map(torch.equal, graph.outputs, run()))
