"""The walls of `agents.confinement`, raised by the process itself before it imports what it is to run."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import struct
import traceback
from contextlib import suppress
from errno import EINVAL, ENOSYS, EPERM
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocm_sd.errors import RocmSdError, first_line

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["WALLS", "held", "serve"]


def serve(asked: int, answering: int) -> None:
    """What it runs: one function, behind the walls. The two numbers are those of its open files."""
    with os.fdopen(asked, "rb") as file:
        order = json.load(file)
    os.set_inheritable(answering, False)
    try:
        _raise_walls(order)
    except OSError as error:
        # Without it nothing is run.
        answer = json.dumps({"raised": f"a wall of this system could not be raised: {error}"}).encode()
    else:
        answer = _call(order["function"], order["job"])
    with os.fdopen(answering, "wb") as pipe:
        pipe.write(answer)
    # Neither threads that the function left behind nor what is registered for the end of Python may hold it up.
    os._exit(0)


def _call(function: str, job: dict[str, Any]) -> bytes:
    module, _, name = function.partition(":")
    try:
        return json.dumps({"answer": getattr(import_module(module), name)(job)}).encode()
    except RocmSdError as error:
        found: dict[str, Any] = {"error": {"message": error.message, "hint": error.hint}}
    except MemoryError:
        found = {"memory": True}
    except BaseException as error:  # noqa: BLE001 -- also SystemExit: it is no answer
        traceback.print_exc()
        name, text = type(error).__name__, first_line(error)
        found = {"raised": name if text == name else f"{name}: {text}"}
    return json.dumps(found).encode()


def _raise_walls(order: dict[str, Any]) -> None:
    """In this order: namespaces take rights, which go next; without any, Landlock and the filter want the promise that
    no program that is started gets some back.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    abi = _landlock(libc, _LANDLOCK_CREATE, None, 0, 1)
    # Systems may refuse these to users; the filter of calls then keeps it from the network alone.
    own_user = libc.unshare(_NEW_USER | _NEW_NETWORK | _NEW_IPC) == 0
    if not own_user:
        libc.unshare(_NEW_NETWORK | _NEW_IPC)
    _done(libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL), "its end with the one that started it")
    if os.getppid() != order["parent"]:
        os._exit(1)
    _limit(order["limits"], device=order["device"], processes=own_user and abi >= _LANDLOCK_LEAST)
    # Root's rights, and those that a namespace of its own gives: an empty set of them, of version 3.
    _done(libc.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24)), "no rights (capset)")
    _done(libc.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no new rights (prctl)")
    if abi >= _LANDLOCK_LEAST:
        _restrict_files(libc, abi, order)
    _filter_calls(libc, device=order["device"], signals=abi < _LANDLOCK_SIGNALS)


def _done(result: int, what: str) -> None:
    """Raises OSError for what this system has, and refused."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _limit(limits: dict[str, Any], *, device: bool, processes: bool) -> None:
    # Python ignores this signal, and the function would be told of a file that is too large as of any other fault.
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    wanted = {
        resource.RLIMIT_CPU: limits["cpu_seconds"],
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 1024,
    }
    if limits["memory_bytes"] is not None and not device:
        wanted[resource.RLIMIT_AS] = limits["memory_bytes"]
    if processes:
        # Counted within its own namespace since Linux 5.14, but before that and without one all that the user runs.
        wanted[resource.RLIMIT_NPROC] = 512
    for kind, value in wanted.items():
        hard = resource.getrlimit(kind)[1]
        # One second more, so that the signal of the lower limit comes first and says what happened.
        most = value + (kind == resource.RLIMIT_CPU)
        resource.setrlimit(
            kind, (value, most) if hard == resource.RLIM_INFINITY else (min(value, hard), min(most, hard))
        )


_NEW_USER, _NEW_NETWORK, _NEW_IPC = 0x10000000, 0x40000000, 0x08000000
_SET_PARENT_DEATH_SIGNAL, _SET_SECCOMP, _SET_NO_NEW_PRIVILEGES = 1, 22, 38

# Landlock, as in linux/landlock.h. Its first version lets no file move into another folder, which Triton's cache needs.
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT, _LANDLOCK_LEAST = 444, 445, 446, 2
_LANDLOCK_SIGNALS = 6
_READ = 0b1101  # execute, read a file, read a folder
_OF_FILES = 0xC007  # execute, write, read, truncate, talk to a device
_SYSTEM = ("usr", "lib*", "bin", "sbin", "nix/store", "opt/rocm*", "opt/amdgpu*", "etc/ld.so.*", "proc", "sys")
_DEVICES = ("dev/null", "dev/zero", "dev/full", "dev/random", "dev/urandom")
_CARDS = ("dev/kfd", "dev/dri", "dev/nvidia*", "dev/dxg")


def _landlock(libc: ctypes.CDLL, number: int, *arguments: bytes | int | None) -> int:
    values = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return int(libc.syscall(ctypes.c_long(number), *values))


def _restrict_files(libc: ctypes.CDLL, abi: int, order: dict[str, Any]) -> None:
    everything = (1 << (14 if abi < 3 else 15 if abi < 5 else 16)) - 1
    # TCP since version 4; since 6 also signals, and sockets without a file, to whom is outside.
    handled = struct.pack("=QQQ", everything, 3, 3)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    rules = _landlock(libc, _LANDLOCK_CREATE, handled, len(handled), 0)
    _done(rules, "Landlock's rules")
    readable = [*map(Path, order["readable"]), *_matching(_SYSTEM)]
    devices, writable = _matching(_DEVICES), [Path(order["folder"])]
    if order["device"]:
        named = os.pathsep.join(os.environ.get(name, "") for name in ("ROCM_PATH", "LD_LIBRARY_PATH"))
        readable += [Path(place) for place in named.split(os.pathsep) if place]
        devices += _matching(_CARDS)
        writable += _matching(("dev/shm",))  # ROCm's processes meet there
    for places, rights in ((readable, _READ), (devices, _OF_FILES | _READ), (writable, everything)):
        for place in places:
            with suppress(OSError):
                descriptor = os.open(place, os.O_PATH | os.O_CLOEXEC)
                allowed = rights & everything & (-1 if place.is_dir() else _OF_FILES)
                # One that is not added opens nothing.
                _landlock(libc, _LANDLOCK_ADD, rules, 1, struct.pack("=Qi", allowed, descriptor), 0)
                os.close(descriptor)
    _done(_landlock(libc, _LANDLOCK_RESTRICT, rules, 0), "Landlock's walls")
    os.close(rules)


def _matching(patterns: Iterable[str]) -> list[Path]:
    return [place for pattern in patterns for place in Path("/").glob(pattern)]


# System calls by their numbers on x86-64 and ARM. Sockets lead to the network, and to programs of this machine that do
# what they are asked. A process that left its group would live on, as shared memory does; memory in files is counted by
# no limit. What is emptied by its path is no write to Landlock before Linux 6.2.
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_REFUSED = {
    "socket": (41, 198), "io_uring_setup": (425, 425), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "setsid": (112, 157), "setpgid": (109, 154), "unshare": (272, 97),
    "setns": (308, 268), "shmget": (29, 194), "msgget": (68, 186), "mq_open": (240, 180), "truncate": (76, 45),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
}  # fmt: skip
_REFUSED_WITHOUT_DEVICE = {"memfd_create": (319, 279)}  # ROCm keeps its code in one
# Landlock does not know modes. Who copies a file sets them, and must not fail.
_PRETENDED = {"chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53)}
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
# Refused for the values of the first argument: new users and siblings, all processes or a whole group, the limits of
# others, and a process that wants to outlive the one that started it.
_REFUSED_WITH = {
    "clone": ((56, 220), _IF_ANY_BIT, 0x10008000), "kill": ((62, 129), _IF_AT_LEAST, 2**31),
    "prlimit64": ((302, 261), _IF_AT_LEAST, 1), "prctl": ((157, 167), _IF_EQUAL, _SET_PARENT_DEATH_SIGNAL),
}  # fmt: skip
# Where Landlock keeps no signal back: all but those to its own group and to itself. Who ends a program that it started
# is refused, too, and the program ends with the first process.
_SIGNALS = {"kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131)}
_REFUSED_SIGNALS = {
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424),
}  # fmt: skip
# Its flags are where no filter can look; C libraries then do without it, as on an old system.
_MISSING = {"clone3": (435, 435)}
_NEWER = 452  # from here on calls are unknown to this table, and as good as missing
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000


def _filter_calls(libc: ctypes.CDLL, *, device: bool, signals: bool) -> None:
    """`signals`: also of those to others."""
    column, architecture = _MACHINES.get(os.uname().machine, (0, 0))
    if not architecture:
        return
    lines = [(_LOAD, 0, 0, 4), (_IF_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    lines += [(_IF_AT_LEAST, 0, 1, _NEWER), (_RETURN, 0, 0, _ERROR | ENOSYS)]
    refused = _REFUSED if device else {**_REFUSED, **_REFUSED_WITHOUT_DEVICE}
    if signals:
        refused = {**refused, **_REFUSED_SIGNALS}
        for name, both in _SIGNALS.items():
            # A thread is known by a number of its own, and no other has that of this first one.
            own = [os.getpid(), *([0] if name == "kill" else [])]
            lines += [(_IF_EQUAL, 0, len(own) + 3, both[column]), (_LOAD, 0, 0, 16)]
            lines += [(_IF_EQUAL, len(own) - at, 0, pid) for at, pid in enumerate(own)]
            lines += [(_RETURN, 0, 0, _ERROR | EPERM), (_RETURN, 0, 0, _ALLOW)]
    for table, answer in ((refused, EPERM), (_PRETENDED, 0), (_MISSING, ENOSYS)):
        for numbers in table.values():
            if (number := numbers[column]) is not None:
                lines += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | answer)]
    for numbers, test, value in _REFUSED_WITH.values():
        lines += [(_IF_EQUAL, 0, 4, numbers[column]), (_LOAD, 0, 0, 16), (test, 0, 1, value)]
        lines += [(_RETURN, 0, 0, _ERROR | EPERM), (_RETURN, 0, 0, _ALLOW)]
    lines.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
    result = libc.prctl(_SET_SECCOMP, 2, struct.pack("@HP", len(lines), ctypes.addressof(code)))
    if result == 0 or ctypes.get_errno() != EINVAL:  # which says that this kernel has no filters
        _done(result, "the filter of system calls")


WALLS = {
    "network": "no network",
    "sockets": "no sockets of other programs",
    "reads": "reads only what Python and the drivers need",
    "writes": "writes into its own folder alone",
    "signals": "signals to its own processes alone",
    "processes": "no process outlives it",
    "rights": "no rights of an administrator",
    "limits": "limits of memory, of processor time and of the size of files",
}


def held(job: dict[str, Any]) -> dict[str, bool]:
    folder = Path(job["outside"])
    outside = folder / "outside"

    def leave() -> None:
        # The first process leads a session, and may start no other in any case.
        if (child := os.fork()) == 0:
            os._exit(_are_refused(os.setsid))
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            raise PermissionError

    reads = (outside.read_text, lambda: next(folder.iterdir()), Path(f"/proc/{os.getppid()}/environ").read_bytes)
    writes = (lambda: os.truncate(outside, 0), lambda: outside.open("a"), (folder / "new").touch, outside.unlink)
    limited = (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE)
    return {
        "network": _are_refused(_connect),
        "sockets": _are_refused(lambda: socket.socket(socket.AF_UNIX)),
        "reads": _are_refused(*reads),
        "writes": _are_refused(*writes),
        "signals": _are_refused(lambda: os.kill(os.getppid(), 0)),
        "processes": _are_refused(leave),
        "rights": "CapEff:\t0000000000000000" in Path("/proc/self/status").read_text(encoding="utf-8"),
        "limits": all(resource.getrlimit(each)[0] != resource.RLIM_INFINITY for each in limited),
    }


def _connect() -> None:
    with suppress(ConnectionRefusedError), socket.socket() as tried:  # refused by this machine: it was reached
        tried.connect(("127.0.0.1", 9))


def _are_refused(*trials: Callable[[], object]) -> bool:
    """All of them, whatever it is that does so."""
    for trial in trials:
        try:
            trial()
        except OSError:
            continue
        return False
    return True
