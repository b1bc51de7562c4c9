"""How a process joins a job: the card that it takes, and what it says where something is wrong."""

from __future__ import annotations

import re
import socket
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist

from rocm_sd.errors import JobFailed
from rocm_sd.parallel.meeting import why_not_met, why_unlike_versions
from rocm_sd.parallel.ranks import Ranks, Traffic, join


@pytest.fixture
def cards(monkeypatch):
    """Two cards and NCCL, as rank `LOCAL_RANK` of two would find them; what is done, in its order."""
    done, store = [], dist.HashStore()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
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


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        (0, r"^1 of 2 processes have come to 127.0.0.1:{port}.*Start all of them at once: torchrun .*nc -vz 127.0.0.1"),
        (1, r"^Rank 1 does not reach rank 0 at 127.0.0.1:{port}.*MASTER_ADDR.*nc -vz 127.0.0.1 {port}"),
    ],
    ids=["rank-0-waits", "rank-1-waits"],
)
def test_a_peer_that_does_not_come_is_said_when_patience_ends(by_itself, rank, words):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(JobFailed, match=words.format(port=port)):
        by_itself(rank, port)
    assert not dist.is_initialized()


def test_a_port_that_is_taken_is_said_with_the_way_to_another(by_itself):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(JobFailed, match=rf"^Port {port} of 127.0.0.1 is taken.*torchrun --standalone") as raised:
            by_itself(0, port)
    another = re.search(r"export MASTER_PORT=(\d+)$", str(raised.value))
    assert another
    assert 1024 <= int(another[1]) < 65536
    assert int(another[1]) != port


def test_a_network_interface_that_is_not_there_is_named(by_itself, monkeypatch):
    """Rank 0 meets rank 1 first, and then looks for its interface."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(JobFailed, match=r"no network interface 'nosuch0'.*ip -brief address.*unset GLOO_SOCKET_IFNAME"):
        by_itself(0, store.port)


@pytest.mark.parametrize(
    ("port", "words"),
    [(None, "MASTER_PORT is not set.*export MASTER_ADDR"), ("abc", "'abc', which is no port"), (70000, "is no port")],
)
def test_a_rank_that_was_not_told_where_to_meet_says_so(by_itself, monkeypatch, port, words):
    if port is None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.delenv("MASTER_PORT", raising=False)
        with pytest.raises(JobFailed, match=words):
            join(torch.device("cpu"))
        return
    with pytest.raises(JobFailed, match=words):
        by_itself(0, port)


def test_what_torch_says_in_other_words_is_passed_on():
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
    known = str(why_not_met(RuntimeError("something new\nand more"), environment))
    assert known.startswith("The processes of this job did not find each other at host:29500 (something new).")
    assert "torchrun --standalone --nproc-per-node 2" in known


def test_cards_that_do_not_reach_each_other_are_told_what_to_look_at(cards, monkeypatch):
    def fails(*_):
        raise JobFailed("Another process of this job cannot be reached any more (NCCL error, unhandled system error).")

    monkeypatch.setattr(Ranks, "__init__", lambda *_: None)
    monkeypatch.setattr(Ranks, "agree", fails)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    with pytest.raises(JobFailed, match=r"GPUs of this job cannot reach each other: .*NCCL_DEBUG=INFO.*P2P_DISABLE=1$"):
        cards(0, "cuda:0")


@pytest.mark.parametrize(
    ("name", "rank_0", "rank_1", "typed"),
    [
        ("rocm-sd", "0.1.0", "0.0.9", "pip install rocm-sd==0.1.0"),
        ("torch", "2.13.0", "2.12.0", "pip install torch==2.13.0"),
        (
            "torch",
            "2.13.0+rocm7.2",
            "2.13.0+cu130",
            "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/rocm7.2",
        ),
    ],
)
def test_unequal_versions_come_with_what_to_install_where(name, rank_0, rank_1, typed):
    unlike = why_unlike_versions([{name: rank_0}, {name: rank_0}, {name: rank_1}])
    assert str(unlike) == (
        f"Rank 2 has {name} {rank_1}, and rank 0 has {rank_0}: pictures would differ. Where rank 2 runs, type: {typed}"
    )
    assert why_unlike_versions([{name: rank_0}] * 2) is None


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
