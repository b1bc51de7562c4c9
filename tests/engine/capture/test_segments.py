"""Graphs of what lies between exchanges: on a GPU as launches, elsewhere as a trace."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from rocm_sd.engine.capture import Exchanged, NotAdopted, capture_between, exchange, no_exchange

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Split:
    """Two convolutions with an exchange between them and one after; what is sent is counted."""

    def __init__(self, device):
        chance = torch.Generator().manual_seed(0)
        self.device = torch.device(device)
        self.weights = [torch.randn(8, 8, 3, 3, generator=chance).to(device) for _ in range(2)]
        self.x = torch.randn(1, 8, 9, 7, generator=chance).to(device)
        self.sent = 0

    def _doubled(self, tensor):
        self.sent += 1
        return [tensor * 2, tensor.sum(1, keepdim=True)]

    def run(self):
        y = F.conv2d(self.x, self.weights[0], padding=1)
        doubled, summed = exchange(self._doubled, [y])
        # In place: what came is the model's own.
        z = F.conv2d(doubled.add_(summed), self.weights[1], padding=1).relu_()
        (again, _) = exchange(self._doubled, [z])
        return [again + self.x]


@pytest.fixture(params=DEVICES)
def split(request):
    return Split(request.param)


def captured(split):
    with torch.no_grad():
        split.run()
        exchanged = Exchanged()
        with exchanged.written_down():
            right = split.run()
        return right, exchanged, capture_between(split.run, split.device, exchanged)


def test_a_capture_sends_nothing(split):
    right, exchanged, graph = captured(split)
    assert split.sent == 4
    assert graph.graph.blocks == 3
    graph.replay_alone(exchanged)
    assert split.sent == 4
    assert torch.equal(graph.graph.outputs[0], right[0])


def test_a_replay_exchanges_what_is_there_now(split):
    _, exchanged, graph = captured(split)
    for _ in range(3):
        split.x.add_(0.5)
        sent = split.sent
        graph.graph.replay()
        assert split.sent == sent + 2
        with torch.no_grad():
            right = split.run()
        assert torch.equal(graph.graph.outputs[0], right[0])
    # With what came before, what is there now makes half of it.
    graph.replay_alone(exchanged)
    assert not torch.equal(graph.graph.outputs[0], right[0])


def test_an_eager_run_with_what_came_before(split):
    right, exchanged, _ = captured(split)
    sent = split.sent
    with torch.no_grad(), exchanged.in_place_of_sending():
        alone = split.run()
    assert split.sent == sent
    assert torch.equal(alone[0], right[0])


def test_what_is_sent_otherwise_is_told_and_refused(split):
    def run():
        no_exchange("somebody is asked")
        return split.run()

    exchanged = Exchanged()
    with torch.no_grad(), exchanged.written_down():
        run()
    assert exchanged.why_not == "somebody is asked between its exchanges"
    sent = split.sent
    with torch.no_grad(), pytest.raises(NotAdopted, match="somebody is asked"):
        capture_between(run, split.device, exchanged)
    assert split.sent == sent


def test_more_exchanges_than_before_are_refused(split):
    _, exchanged, _ = captured(split)
    exchanged.answers.pop()
    with torch.no_grad(), exchanged.in_place_of_sending(), pytest.raises(NotAdopted, match="exchanges more"):
        split.run()
    with torch.no_grad(), pytest.raises(NotAdopted, match="exchanges more"):
        capture_between(split.run, split.device, exchanged)
