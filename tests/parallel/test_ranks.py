"""How a process joins a job: the card that it takes, and what it says where something is wrong."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist

from rocm_sd.errors import JobFailed
from rocm_sd.parallel.ranks import Ranks, Traffic, join


@pytest.fixture
def cards(monkeypatch):
    """Two cards and NCCL, as rank `LOCAL_RANK` of two would find them; what is done, in its order."""
    done, store = [], dist.HashStore()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(f"set {device}"))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: done.append(backend))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: done.append("destroyed"))
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)

    def joins(rank, device):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        # Those that come later are not waited for.
        monkeypatch.setattr(dist, "get_world_size", lambda: rank + 1)
        done.clear()
        join(torch.device(device))
        return done

    return joins


@pytest.mark.parametrize(("device", "taken"), [("cuda", "cuda:1"), ("cuda:0", "cuda:0")], ids=["its-own", "the-named"])
def test_a_rank_takes_its_card_before_it_meets_the_others(cards, device, taken):
    cards(0, "cuda:1" if device == "cuda:0" else "cuda")
    assert cards(1, device) == [f"set {taken}", "nccl"]


def test_two_ranks_with_one_card_are_told_so(cards):
    done = cards(0, "cuda:0")
    with pytest.raises(JobFailed, match=r"Ranks 0 and 1 have the same card.*LOCAL_RANK"):
        cards(1, "cuda:0")
    assert done == ["set cuda:0", "nccl", "destroyed"]


@pytest.fixture
def by_itself(monkeypatch):
    """joins(rank): as that rank of two, of which the other does not come."""
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")

    def joins(rank, port):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("MASTER_PORT", str(port))
        join(torch.device("cpu"), patience=timedelta(seconds=1))

    return joins


@pytest.mark.parametrize("rank", [0, 1])
def test_a_peer_that_does_not_come_is_said_when_patience_ends(by_itself, rank):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(JobFailed, match=rf"did not find each other at 127.0.0.1:{port} .*MASTER_PORT"):
        by_itself(rank, port)
    assert not dist.is_initialized()


def test_a_port_that_is_taken_is_said(by_itself):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(JobFailed, match=rf"did not find each other at 127.0.0.1:{port} .*Is the port free"):
            by_itself(0, port)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2 GiB"), torch.OutOfMemoryError),
        (RuntimeError("Connection closed by peer"), JobFailed),
    ],
    ids=["out-of-memory", "peer-gone"],
)
def test_a_rank_that_has_no_memory_left_blames_nobody_else(error, kind):
    def fails():
        raise error

    with pytest.raises(kind):
        Ranks("patch", None, Traffic())._try(fails)
