"""Jobs of real processes on the CPU: how they start, how they end, and what is said then."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from rocm_sd.errors import DeviceUnavailable, InvalidOption, JobFailed, RocmSdError, Unsupported
from rocm_sd.parallel import launching
from rocm_sd.parallel.launching import launch, require_ranks
from rocm_sd.parallel.ranks import join

CPU = torch.device("cpu")
# Two processes import torch first, on cores that others use, too.
SECONDS = 60


def rank() -> int:
    return int(os.environ["RANK"])


# What the ranks run. Where one fails, the other waits for it in a collective, outside of Python.


def meet(device, folder, pauses=(0, 0)):
    join(device)
    time.sleep(pauses[rank()])
    total = torch.ones(1)
    dist.all_reduce(total)
    (folder / str(rank())).write_text(f"{total.item():.0f} {device} {os.environ['MASTER_PORT']}")
    sys.stdout.write(f"rank {rank()} was here\n")
    sys.stderr.write(f"rank {rank()} was warned\n")


def raise_on_rank_1(device, error):
    join(device)
    if rank() == 1:
        sys.stderr.write("the last words of rank 1\n")
        raise error
    dist.barrier()


def end_rank_1(device, how):
    join(device)
    if rank() == 1:
        how()
    dist.barrier()


def kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)


def leave_early():
    sys.exit(3)


def sleep(device, folder):
    join(device)
    with tempfile.TemporaryDirectory(dir=folder):
        (folder / f"pid-{rank()}").write_text(str(os.getpid()))
        time.sleep(10 * SECONDS)


def hang(device, folder):
    """Each waits for the other, where Python runs no handler."""
    join(device)
    (folder / f"pid-{rank()}").write_text(str(os.getpid()))
    dist.recv(torch.zeros(1), src=1 - rank())


def test_all_ranks_run_and_rank_0_alone_is_heard(tmp_path, capfd):
    launch(2, meet, tmp_path, device=CPU)
    shown = capfd.readouterr()
    assert shown.out == "rank 0 was here\n"
    assert shown.err == "rank 0 was warned\n"
    assert [(tmp_path / name).read_text().split()[:2] for name in "01"] == [["2", "cpu"]] * 2


def test_a_slow_rank_is_waited_for(tmp_path):
    launch(2, meet, tmp_path, (0.2, 2), device=CPU)
    assert (tmp_path / "0").read_text().startswith("2 ")


def test_a_port_that_is_taken_is_not_asked_for(tmp_path, monkeypatch):
    with ExitStack() as taken:
        for port in (29400, 29500):
            # Somebody else may have it, which is as good.
            with suppress(OSError):
                taken.enter_context(socket.create_server(("", port)))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", "29500")
        launch(2, meet, tmp_path, device=CPU)
    chosen = {(tmp_path / name).read_text().split()[2] for name in "01"}
    assert len(chosen) == 1
    assert not chosen & {"29400", "29500"}


class OfAPlugin(RocmSdError):
    """One that cannot be pickled."""

    exit_code = 77

    def __init__(self):
        super().__init__("The plug-in is broken.", hint="Mend it.")

    def __reduce__(self):
        if "RANK" in os.environ:
            raise TypeError("it holds a lock")
        return OfAPlugin, ()


@pytest.mark.parametrize(
    ("error", "kind", "code", "sentence"),
    [
        (InvalidOption("level", "x", ["auto"]), InvalidOption, 2, "Rank 1: level 'x' is not known. Use one of: auto."),
        (
            torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2 GiB"),
            RocmSdError,
            1,
            "Rank 1: There is not enough memory for this (HIP out of memory. Tried to allocate 2 GiB). Try a smaller",
        ),
        (OfAPlugin(), RocmSdError, 1, "Rank 1: The plug-in is broken. Mend it."),
    ],
    ids=["ours", "out-of-memory", "not-picklable"],
)
def test_the_error_of_a_rank_is_raised_here(capfd, error, kind, code, sentence):
    began = time.monotonic()
    with pytest.raises(RocmSdError) as raised:
        launch(2, raise_on_rank_1, error, device=CPU)
    assert time.monotonic() - began < SECONDS
    assert type(raised.value) is kind
    assert raised.value.exit_code == code
    assert str(raised.value).startswith(sentence)
    # --debug shows where on the rank it arose.
    assert "in raise_on_rank_1" in str(raised.value.__cause__)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert shown.err == "[rank 1] the last words of rank 1\n"


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        (kill_itself, "Rank 1: The process was ended by SIGKILL. The system does that when the host's memory is full"),
        (leave_early, "Rank 1: The process ended with exit status 3."),
    ],
    ids=["killed", "exit"],
)
def test_a_rank_that_is_gone_ends_the_job_and_is_named(capfd, how, sentence):
    began = time.monotonic()
    with pytest.raises(JobFailed) as raised:
        launch(2, end_rank_1, how, device=CPU)
    assert time.monotonic() - began < SECONDS
    assert str(raised.value).startswith(sentence)
    assert raised.value.exit_code == 10
    assert capfd.readouterr() == ("", "")


OWN, GONE = RocmSdError("own"), JobFailed("another one is gone")


@pytest.mark.parametrize(
    ("ends", "blamed"),
    [
        ([(GONE, 10, 2), (OWN, 1, 1)], 1),
        ([(OWN, 1, 1), (None, -signal.SIGTERM, 0)], 0),
        ([(None, -signal.SIGTERM, 0), (OWN, 1, 1)], 1),
        ([(OWN, 1, 1), (None, -signal.SIGSEGV, 0)], 1),
        ([(None, -signal.SIGABRT, 0), (OWN, 1, 1)], 1),
        ([(OWN, 1, 1), (None, -signal.SIGKILL, 30)], 0),
        ([(GONE, 10, 1), (GONE, 10, 2)], 0),
    ],
    ids=[
        "the-other-noticed", "stopped-while-it-started", "likewise-rank-0", "crashed", "aborted-by-nccl",
        "killed-because-it-hung", "both-alike",
    ],
)  # fmt: skip
def test_the_first_to_fail_is_blamed(tmp_path, ends, blamed):
    failures = {}
    for number, (error, code, when) in enumerate(ends):
        if error is not None:
            launching._file_of(tmp_path, number).write_bytes(pickle.dumps(launching._Told(when, error, "trace")))
        failures[number] = ProcessFailure(number, 1, code, "")
        failures[number].timestamp += 0 if error is not None else when
    with pytest.raises(RocmSdError, match=f"^Rank {blamed}: "):
        launching._raise_for(tmp_path, failures)


def test_what_elastic_changes_here_is_as_before_after_it(tmp_path):
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    environment = dict(os.environ)
    launch(1, meet, tmp_path, device=CPU)
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers
    assert dict(os.environ) == environment


# A launcher of its own, for signals. A shell's background jobs ignore Ctrl-C, and their children inherit that.
LAUNCHER = """
import pathlib, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path[:0] = [sys.argv[1]]
import test_launching
from rocm_sd.errors import INTERRUPTED
from rocm_sd.parallel.launching import launch
try:
    launch(2, getattr(test_launching, sys.argv[3]), pathlib.Path(sys.argv[2]), device=test_launching.CPU)
except KeyboardInterrupt:
    sys.exit(INTERRUPTED)
"""


def is_running(pid: int) -> bool:
    """One that has ended stays in the table of processes until its parent asks for it, which here may be nobody."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    return False


def wait_until(is_so, seconds=SECONDS) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it did not come to it"
        time.sleep(0.05)


@pytest.fixture
def waiting(tmp_path, request):
    """A launcher whose two ranks sleep or hang, with their process ids; and the folder that it runs in."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(Path(__file__).parent), str(tmp_path), request.param.__name__],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    files = [tmp_path / f"pid-{number}" for number in range(2)]
    try:
        wait_until(lambda: launcher.poll() is not None or all(file.exists() and file.read_text() for file in files))
        # They wait by then.
        time.sleep(0.5)
        assert launcher.poll() is None, launcher.stdout.read()
        yield launcher, [int(file.read_text()) for file in files], tmp_path
    finally:
        launcher.kill()
        launcher.wait()
        launcher.stdout.close()


@pytest.mark.parametrize(
    ("waiting", "number", "code"),
    [(sleep, signal.SIGINT, 130), (hang, signal.SIGINT, 130), (hang, signal.SIGTERM, -signal.SIGTERM)],
    ids=["ctrl-c", "ctrl-c-while-it-hangs", "terminated-while-it-hangs"],
    indirect=["waiting"],
)
def test_a_signal_ends_all_ranks_without_a_word(waiting, number, code):
    launcher, ranks, folder = waiting
    launcher.send_signal(number)
    assert launcher.wait(timeout=25) == code
    assert launcher.stdout.read() == b""
    assert not any(is_running(pid) for pid in ranks)
    # What ranks and the launcher had for a while is gone with them.
    assert sorted(path.name for path in folder.iterdir()) == ["pid-0", "pid-1", "temporary"]
    assert not list((folder / "temporary").glob("rocm-sd-job-*"))


@pytest.mark.parametrize("waiting", [hang], indirect=True)
def test_ranks_end_with_a_launcher_that_is_killed(waiting):
    launcher, ranks, _ = waiting
    launcher.kill()
    wait_until(lambda: not any(is_running(pid) for pid in ranks), 5)


@pytest.mark.parametrize("waiting", [hang], indirect=True)
def test_a_rank_that_somebody_ends_is_named(waiting):
    launcher, ranks, _ = waiting
    os.kill(ranks[0], signal.SIGTERM)
    assert launcher.wait(timeout=25) == 1
    assert b"JobFailed: Rank 0: The process was ended by SIGTERM." in launcher.stdout.read()
    assert not any(is_running(pid) for pid in ranks)


def test_one_rank_is_always_there():
    require_ranks(1, CPU)
    require_ranks(1, torch.device("cuda"))
    require_ranks(2 * (os.cpu_count() or 1), CPU)


@pytest.mark.parametrize(
    ("count", "device", "kind", "sentence"),
    [
        (0, "cpu", InvalidOption, "--gpus 0 is not known. It takes 1 or more, e.g. --gpus 2."),
        (10**6, "cpu", InvalidOption, "With --device cpu, this machine takes"),
        (4, "cuda", DeviceUnavailable, "--gpus 4 needs 4 GPUs, and torch sees 3. Type: --gpus 3, or rocm-sd info"),
        (2, "cuda:1", Unsupported, "one card by its number, cuda:1. Use --device cuda, and name the cards with HIP_"),
        (2, "meta", Unsupported, "Use --device cuda, or --device cpu to try it out."),
    ],
)
def test_too_many_ranks_are_refused_with_what_to_type(monkeypatch, count, device, kind, sentence):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    require_ranks(3, torch.device("cuda"))
    with pytest.raises(kind) as raised:
        require_ranks(count, torch.device(device))
    assert sentence in str(raised.value)


def rocm_sd(*arguments: str) -> int:
    from rocm_sd.cli import main

    with pytest.raises(SystemExit) as ended:
        main.run(list(arguments))
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (("--gpus", "2"), 6, "--gpus 2 needs 2 GPUs, and torch sees 0."),
        (("--gpus", "0"), 2, "It takes 1 or more"),
        (("--parallel", "cfg"), 3, "Add --gpus 2, or more."),
        (("--gpus", "2", "--device", "cpu", "--parallel", "magic"), 2, "Use auto, one of data, cfg,"),
        (("--gpus", "2", "--device", "cpu", "--parallel", "cfg=2,patch=2"), 3, "are to be 2."),
        (("--gpus", "2", "--device", "cpu", "--compare"), 3, "--compare does not support --gpus 2."),
    ],
)
def test_a_wrong_option_is_said_before_a_process_starts(tmp_path, capsys, monkeypatch, options, code, sentence):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert rocm_sd("generate", "a red apple", "--out", str(tmp_path), *options) == code
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_two_ranks_draw_the_picture_of_one(tmp_path, capfd):
    from PIL import Image

    from rocm_sd.cli.pictures import difference

    common = ("generate", "a red apple", "--device", "cpu", "--steps", "2", "--size", "64x64")
    assert rocm_sd(*common, "--out", str(tmp_path / "one")) == 0
    capfd.readouterr()
    assert rocm_sd(*common, "--gpus", "2", "--parallel", "cfg", "--out", str(tmp_path / "two")) == 0
    assert capfd.readouterr().out.count("wrote ") == 1
    assert [path.name for path in (tmp_path / "two").iterdir()] == ["a-red-apple-0.png"]
    one, two = (Image.open(tmp_path / folder / "a-red-apple-0.png") for folder in ("one", "two"))
    assert difference(one, two)[1] <= 1
