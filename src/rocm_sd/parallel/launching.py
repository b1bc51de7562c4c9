"""launch(ranks, entry, *args, device=...): entry(device of the rank, *args), in a process for each, on this machine.

    require_ranks(2, device)
    launch(2, draw, request, device=device)

torch elastic starts the processes, watches them and tells each its rank, as `torchrun` does. They end together:

| what happens | what follows |
|---|---|
| a rank raises an error | the others are stopped, and `launch` raises that error, which names the rank |
| a rank is killed, or crashes | the others are stopped: JobFailed, with the signal |
| Ctrl-C | all ranks clean up and end; KeyboardInterrupt |
| the launcher itself is killed | the kernel kills the ranks |

Only rank 0 has the terminal. What others write is kept back; of the one that failed, the end of it is shown.
"""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from rocm_sd.engine import is_out_of_memory
from rocm_sd.errors import DeviceUnavailable, InvalidOption, JobFailed, RocmSdError, Unsupported, explained, first_line
from rocm_sd.parallel.ranks import leave

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["launch", "require_ranks", "run_rank"]

# A new interpreter and never a fork, which could not use a GPU that this process has opened; nor does it run the user's
# script again, as those of `multiprocessing` do. Packages are found where this process found them. A Ctrl-C that comes
# while torch is imported, for seconds, ends it without a traceback.
_RANK = f"""
import sys, os
folder = sys.argv[1]
sys.path[:] = os.fsdecode(open(os.path.join(folder, "places"), "rb").read()).split(chr(0))
import signal
if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
from {__name__} import run_rank
run_rank(folder)
"""
_LOOK_S = 0.1  # how often the launcher asks whether all ranks are there
_END_S = 3  # what a rank has to clean up in, before it is ended; torch itself would wait for 30 s
_SAME_TIME_S = 10  # torch counts in whole seconds, and what it kills itself it kills after 30
_LINES_SHOWN = 20
_RANKS_PER_CORE = 4
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_ELASTIC_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher", "torchelastic-events-null")


def require_ranks(count: int, device: torch.device, option: str = "--gpus") -> None:
    """Raises what is wrong with so many ranks on devices of this kind, before anything is started. `option`: by which
    they were asked for.
    """
    if count < 1:
        raise InvalidOption(option, count, [], hint=f"It takes 1 or more, e.g. {option} 2.")
    if count == 1:
        return
    if device.type == "cpu":
        most = (os.cpu_count() or 1) * _RANKS_PER_CORE
        if count > most:
            raise InvalidOption(option, count, [], hint=f"With --device cpu, this machine takes {most} at most.")
    elif device.type != "cuda":
        raise Unsupported(option, f"the device {device}", hint="Use --device cuda, or --device cpu to try it out.")
    elif device != torch.device("cuda"):
        raise Unsupported(
            option,
            f"one card by its number, {device}",
            hint="Use --device cuda, and name the cards with HIP_VISIBLE_DEVICES (AMD) or CUDA_VISIBLE_DEVICES.",
        )
    elif count > torch.cuda.device_count():
        there = torch.cuda.device_count()
        instead = f"Type: {option} {there}" if there > 1 else f"Leave out {option}"
        raise DeviceUnavailable(
            f"{option} {count} needs {count} GPUs, and torch sees {there}.",
            hint=f"{instead}, or rocm-sd info to see which are there. To try it out: --device cpu.",
        )


def launch(ranks: int, entry: Callable[..., None], *args: Any, device: torch.device) -> None:
    """Run entry(device of the rank, *args) on every rank, and return when all have returned.

    `entry` is a function of a module, and `args` can be pickled. A rank on a GPU has the card of its number. Raises the
    error of the rank whose fault it was, JobFailed where a process is gone, and KeyboardInterrupt.
    """
    ended_by: signal.Signals | None = None
    with tempfile.TemporaryDirectory(prefix="rocm-sd-job-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "places").write_bytes(os.fsencode("\0".join(place for place in sys.path if place)))
        (folder / "call").write_bytes(pickle.dumps((os.getpid(), ranks, device.type, entry, args)))
        try:
            with _quiet_elastic(), _signals_kept() as signals:
                elastic_launch(_config(ranks, folder, signals), sys.executable)("-c", _RANK, name)
        except ChildFailedError as failed:
            _raise_for(folder, failed.failures)
        except SignalException as ended:
            ended_by = ended.sigval
        except (OSError, RuntimeError, ValueError, RendezvousError) as error:
            raise JobFailed(
                f"The {ranks} processes of this job cannot be started ({first_line(error)}).",
                hint="Try fewer GPUs, or one.",
            ) from error
    if ended_by == signal.SIGINT:
        raise KeyboardInterrupt
    if ended_by is not None:
        # This process ends as it would have without ranks, now that they are gone.
        signal.raise_signal(ended_by)


def _config(ranks: int, folder: Path, signals: str) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        # Port 0: the system chooses one that is free. A name of this machine may not resolve; its loopback does.
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=_LOOK_S,
        signals_to_handle=signals,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs"), redirects=dict.fromkeys(range(1, ranks), Std.ALL)),
    )


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Tables of exit codes are torch's way to say what `launch` raises; ROCM_SD_LOG=DEBUG shows them, too."""
    if logging.getLogger("rocm_sd").isEnabledFor(logging.DEBUG):
        yield
        return
    loggers = [logging.getLogger(name) for name in _ELASTIC_LOGGERS]
    kept = [logger.propagate for logger in loggers]
    nowhere = logging.NullHandler()
    for logger in loggers:
        logger.addHandler(nowhere)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, kept, strict=True):
            logger.removeHandler(nowhere)
            logger.propagate = propagate


@contextmanager
def _signals_kept() -> Iterator[str]:
    """Those that elastic shall handle, in its words; it puts handlers in place for good, which are taken off after."""
    # One that is ignored stays so: `nohup` and a shell's background jobs mean it.
    handled = [each for each in _ENDING if signal.getsignal(each) not in {signal.SIG_IGN, None}]
    kept = {each: signal.getsignal(each) for each in handled}
    try:
        yield ",".join(each.name for each in handled)
    finally:
        os.environ.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", None)
        if threading.current_thread() is threading.main_thread():
            for each, handler in kept.items():
                signal.signal(each, handler)


@dataclass(frozen=True)
class _Told:
    """What a rank says of its end, in a file: the launcher reads it after the process is gone."""

    when: int
    error: RocmSdError
    trace: str = ""


class _OnRank(Exception):
    """Never raised: it is the cause of what is, and --debug shows the rank's own traceback in it."""


def _raise_for(folder: Path, failures: Mapping[int, ProcessFailure]) -> NoReturn:
    """The error of the rank whose fault it was: those that wait for it fail, too, a moment later."""
    first = min(failure.timestamp for failure in failures.values())
    found = []
    for rank, failure in failures.items():
        said = _told(folder, rank)
        order = _order(said, failure, is_early=failure.timestamp - first < _SAME_TIME_S)
        told = said or _Told(failure.timestamp * 10**9, _sudden(failure))
        found.append((order, told.when, rank, told))
    _, _, rank, told = min(found, key=lambda each: each[:3])
    if rank:
        _show_kept_back(folder, rank)
    error = told.error
    error.message = f"Rank {rank}: {error.message}"
    raise error from (_OnRank(told.trace) if told.trace else None)


def _order(said: _Told | None, failure: ProcessFailure, *, is_early: bool) -> int:
    """The lower, the likelier others failed because of it. Of those that could say something, the first is to blame."""
    if said is not None:
        return 1
    # NCCL's own watch aborts a process whose partner is gone, and elastic sends the others a signal to end.
    follows = {signal.SIGABRT, *_ENDING}
    return 0 if is_early and failure.exitcode < 0 and -failure.exitcode not in follows else 2


def _told(folder: Path, rank: int) -> _Told | None:
    # A process that was killed may have left half of it; a plug-in's error may be of a module that is found there only.
    with suppress(OSError, EOFError, pickle.UnpicklingError, ImportError, AttributeError):
        told = pickle.loads(_file_of(folder, rank).read_bytes())  # noqa: S301 -- of this user's own process
        return told if isinstance(told, _Told) else None
    return None


def _sudden(failure: ProcessFailure) -> JobFailed:
    return _exited(failure.exitcode) if failure.exitcode >= 0 else _ended_by(-failure.exitcode)


def _exited(code: int) -> JobFailed:
    return JobFailed(f"The process ended with exit status {code}.", hint="Start it again.")


def _ended_by(number: int) -> JobFailed:
    by = f"signal {number}"
    with suppress(ValueError):
        by = signal.Signals(number).name
    full = "The system does that when the host's memory is full: try a smaller size, or fewer ranks."
    return JobFailed(f"The process was ended by {by}.", hint=full if number == signal.SIGKILL else "Start it again.")


def _show_kept_back(folder: Path, rank: int) -> None:
    for log in folder.glob(f"logs/*/attempt_0/{rank}/stderr.log"):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        for line in lines[-_LINES_SHOWN:]:
            sys.stderr.write(f"[rank {rank}] {line}\n")


def _file_of(folder: Path, rank: int) -> Path:
    return folder / f"end-of-rank-{rank}"


def run_rank(name: str) -> NoReturn:
    """What each process runs."""
    folder, ended = Path(name), list[int]()
    end = _file_of(folder, int(os.environ["RANK"]))
    _end_on_signals(end, ended)
    try:
        launcher, ranks, kind, entry, args = pickle.loads((folder / "call").read_bytes())  # noqa: S301 -- the launcher's
        _end_with(launcher)
        entry(_settled(kind, ranks), *args)
        leave()
    except BaseException as error:  # noqa: BLE001 -- all that ends a rank is told to the launcher
        _fail(end, error, ended)
    sys.exit(0)


def _settled(kind: str, ranks: int) -> torch.device:
    """The rank's share of this machine."""
    # All of them are on one machine: nobody else needs to reach them.
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    if kind != "cuda":
        return torch.device(kind)
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def _end_with(launcher: int) -> None:
    """A launcher that is killed cannot end its ranks, and they would hold their cards: PR_SET_PDEATHSIG."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
    if prctl is not None:
        prctl(1, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(1)


def _end_on_signals(end: Path, ended: list[int]) -> None:
    """A signal ends this process as Ctrl-C does, with its clean-up; where it does not come to it, without.

    Python runs a handler between two of its own instructions: a rank that waits for one that is gone has none. What
    Python writes for a signal at once, a thread reads.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def handle(number: int, _frame: object) -> None:
        ended.append(number)
        # A second one, of an impatient user, would cut the clean-up short.
        for each in _ENDING:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    def watch() -> None:
        while (number := os.read(read, 1)[0]) not in _ENDING:
            pass
        _tell(end, _ended_by(number))
        time.sleep(_END_S)
        os._exit(128 + number)

    for each in _ENDING:
        if each == signal.SIGTERM or signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, handle)
    threading.Thread(target=watch, daemon=True, name="rocm-sd-end-of-rank").start()


def _fail(end: Path, error: BaseException, ended: list[int]) -> NoReturn:
    trace = ""
    if ended:
        known: RocmSdError = _ended_by(ended[0])
        code = 128 + ended[0]
    elif isinstance(error, Exception):
        known, trace = _known(error), traceback.format_exc()
        code = known.exit_code
    else:
        # Also where sys.exit() meant no failure: the others still count on this rank.
        code = (isinstance(error, SystemExit) and isinstance(error.code, int) and error.code) or 1
        known = _exited(code)
    _tell(end, known, trace)
    # Threads and destructors of a library may wait for ranks that are gone, and say so: it has been said.
    for stream in (sys.stdout, sys.stderr):
        # Nobody may read it any more, as in `rocm-sd generate ... | head -1`.
        with suppress(OSError):
            stream.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_END_S)
    sys.exit(code)


def _known(error: Exception) -> RocmSdError:
    """A rank has a way out that one GPU does not have."""
    known = explained(error)
    if known is not error and is_out_of_memory(error):
        known.hint = f"{known.hint} With --parallel pipeline, each GPU has a part of the model."
    return known


def _tell(end: Path, error: RocmSdError, trace: str = "") -> None:
    """The first is what counts: an error, or a signal."""
    try:
        told = pickle.dumps(_Told(time.monotonic_ns(), error, trace))
        pickle.loads(told)  # noqa: S301 -- an error of a plug-in may not come back from its pickle
    except Exception:  # noqa: BLE001 -- whatever it holds, its words are plain
        told = pickle.dumps(_Told(time.monotonic_ns(), RocmSdError(error.message, hint=error.hint), trace))
    with suppress(OSError), end.open("xb") as file:
        file.write(told)
