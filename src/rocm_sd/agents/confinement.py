"""A process of its own, within walls, in which a function of this project works on what a language model proposed.

    confined("rocm_sd.agents.trials:judge", {"op": "attention"}, files={"proposal.py": text})      # the answer, a dict
    walls()                                             # which walls this system has: ("no network", ...)
    missing()                                           # and which it lacks, for whoever is asked to go on without

What a proposal holds is read before it comes here; these walls are for what that reading overlooks. They are raised
before the function is imported, and hold for every process that it starts. A wall that the system lacks is left out,
and one that it has and that does not rise ends the process:

    an empty environment and folder     no keys, no settings, none of the user's caches
    limits of the system (setrlimit)    memory, processor time, the size of a file; its whole folder is watched
    namespaces                          no network, no shared memory, and no rights where root runs this
    Landlock                            files: read what Python imports and drivers need, write its own folder
    a filter of system calls (seccomp)  no socket, nothing that leaves the group of processes that is ended with it

So a function cannot start a session (`start_new_session`), nor change the modes of files: it seems to succeed.
What comes back is JSON that a stranger may have written: it is an object, and the caller looks at what is in it.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from errno import ENAMETOOLONG
from functools import cache, partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rocm_sd.agents.walls import WALLS
from rocm_sd.agents.walls import __name__ as WALLED
from rocm_sd.errors import RocmSdError
from rocm_sd.plain_json import NotPlain, parsed, shortened

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

__all__ = ["LIMITS", "Ended", "Limits", "confined", "missing", "walls"]


@dataclass(frozen=True)
class Limits:
    """What a process may use; each is of one process, `seconds` and what is said of all that the first one starts."""

    seconds: float = 180.0  # by the clock on the wall
    cpu_seconds: int = 240
    memory_bytes: int | None = 12 * 2**30  # of addresses. Drivers of GPUs reserve terabytes: with one it is not set.
    file_bytes: int = 256 * 2**20
    folder_bytes: int = 2 * 2**30  # of all files together, looked at while it runs
    said_bytes: int = 64 * 2**10  # the last ones are kept; who prints 64 times as much is ended
    answer_bytes: int = 4 * 2**20


LIMITS = Limits()
_SAID_AT_MOST = 64  # times what is kept of it
_LOOK_S, _LOOK_AT_FILES_S = 0.02, 1.0
_MOST_FILES = 100_000
_END_S = 5.0
_PIECE = 2**16
_NONE: Mapping[str, str] = MappingProxyType({})
# Before Python 3.11 the folder that the process runs in, which is not ours, comes first of all places to import from.
_SERVE = f"import sys; sys.path[:] = filter(None, sys.path); from {WALLED} import serve; serve(*map(int, sys.argv[1:]))"
_PROGRAMS = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
# The rest of the user's environment is none of a proposal's business; these say where the driver and the card are.
_OF_DEVICES = (
    "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "ROCM_PATH",
    "HSA_OVERRIDE_GFX_VERSION",
)  # fmt: skip


class Ended(RocmSdError):
    """The process did not answer: it crashed, raised, or reached a limit. `said`: the end of what it printed."""

    def __init__(self, reason: str, said: str = "") -> None:
        lines = said.strip().splitlines()
        super().__init__(f"{reason}; it last said: {_printable(lines[-1], 200)}" if lines else reason)
        self.said = said


class _Stopped(Exception):
    """A limit that this process watches was reached; its text is the reason."""


def confined(
    function: str,
    job: Mapping[str, Any],
    *,
    files: Mapping[str, str] = _NONE,
    environment: Mapping[str, str] = _NONE,
    limits: Limits = LIMITS,
    device: bool = False,
) -> dict[str, Any]:
    """What function(job) answers in a process of its own; `function` is "module:name", job and answer are JSON.

    `files`, by their names, lie in the folder that it runs in, which is removed afterwards with all else in it.
    `device`: it may use the GPU. Errors of this project come as RocmSdError with their text, all else as `Ended`.
    """
    if resource is None or not sys.executable or getattr(sys, "frozen", False):
        raise Ended("no process could be started: that takes Linux, and a Python that is not frozen into a program")
    for name in files:
        if name in {"", ".", ".."} or not name.isprintable() or "/" in name or "\\" in name:
            raise RocmSdError(f"{name!r} is no plain name of a file.", hint="Leave out its folder.")
    folder = Path(tempfile.mkdtemp(prefix="rocm-sd-confined-"))
    try:
        for name, text in files.items():
            # Half of a surrogate pair, which JSON can hold, is written, too: whoever reads the file refuses it.
            (folder / name).write_bytes(text.encode(errors="surrogatepass"))
        order = {
            "function": function, "job": dict(job), "limits": asdict(limits), "device": device, "folder": str(folder),
            "parent": os.getpid(), "readable": _readable(),
        }  # fmt: skip
        return _answer(json.dumps(order).encode(), folder, _environment(folder, environment, device=device), limits)
    finally:
        _remove(folder)


@cache
def walls() -> tuple[str, ...]:
    """Sentences: the walls that hold on this system, each found by running against it once."""
    with tempfile.TemporaryDirectory(prefix="rocm-sd-outside-") as folder:
        (Path(folder) / "outside").write_text("text", encoding="utf-8")
        held = confined(f"{WALLED}:held", {"outside": folder})
    return tuple(sentence for name, sentence in WALLS.items() if held.get(name) is True)


def missing() -> tuple[str, ...]:
    """Sentences: the walls that this system lacks. Raises Ended where no process can be started at all."""
    there = walls()
    return tuple(sentence for sentence in WALLS.values() if sentence not in there)


def _environment(folder: Path, more: Mapping[str, str], *, device: bool) -> dict[str, str]:
    passed = {name: os.environ[name] for name in _OF_DEVICES if name in os.environ} if device else {}
    caches = {name: str(folder / ".cache") for name in ("ROCM_SD_CACHE", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")}
    return {
        "PATH": _PROGRAMS,
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "LANG": "C.UTF-8",
        "LOGNAME": "nobody",  # torch asks for a name, and the list of users cannot be read
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(str(Path(place).absolute()) for place in sys.path if place),
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        **caches,
        **passed,
        **more,
    }


def _readable() -> list[str]:
    """What Python imports. A script in the user's home puts that on the path, with all the keys that lie there."""
    try:
        home = Path.home().resolve()
    except RuntimeError:  # a user who has none
        home = Path("/")
    places = [place for place in sys.path if place and not home.is_relative_to(Path(place).resolve())]
    places += [sys.prefix, sys.base_prefix, str(Path(__file__).parents[2])]
    return [str(Path(place).absolute()) for place in places]


def _answer(order: bytes, folder: Path, environment: Mapping[str, str], limits: Limits) -> dict[str, Any]:
    with ExitStack() as resources:
        asked = resources.enter_context(tempfile.TemporaryFile())
        asked.write(order)
        asked.seek(0)
        answers, answering = _pipe(resources, "answered with", limits.answer_bytes, limits.answer_bytes)
        prints, printing = _pipe(resources, "printed", limits.said_bytes, _SAID_AT_MOST * limits.said_bytes)
        with answering, printing:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-s", "-u", "-c", _SERVE, str(asked.fileno()), str(answering.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=printing,
                    stderr=printing,
                    cwd=folder,
                    env=environment,
                    pass_fds=(asked.fileno(), answering.fileno()),
                    start_new_session=True,
                )
            except OSError as error:
                raise Ended(f"no process could be started: {error}") from error
            resources.callback(_end, process)
        try:
            _listen(process, (answers, prints), limits.seconds, partial(_require_room, folder, limits.folder_bytes))
            # Also what it started: none of those can add to the answer any more.
            _end(process)
            for heard in (answers, prints):
                while heard.read():
                    pass
            reason = _fault(process.returncode, limits)
        except _Stopped as stopped:
            reason = str(stopped)
    said = prints.text.decode(errors="replace")
    if reason is not None:
        raise Ended(reason, said)
    return _opened(bytes(answers.text), limits, said)


@dataclass
class _Heard:
    """What the process says through one pipe: `most` bytes, of which the last `kept` ones are kept."""

    descriptor: int
    verb: str
    kept: int
    most: int
    count: int = 0
    text: bytearray = field(default_factory=bytearray)

    def read(self) -> bool:
        """False where there is nothing to read: at the end of all, or so far."""
        try:
            piece = os.read(self.descriptor, _PIECE)
        except BlockingIOError:
            return False
        self.text += piece
        del self.text[: -self.kept]
        self.count += len(piece)
        if self.count > self.most:
            raise _Stopped(f"{self.verb} more than {_size(self.most)} and was ended")
        return bool(piece)


def _pipe(resources: ExitStack, verb: str, kept: int, most: int) -> tuple[_Heard, Any]:
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    resources.callback(os.close, ours)
    return _Heard(ours, verb, kept, most), os.fdopen(theirs, "wb", buffering=0)


def _require_room(folder: Path, most: int) -> None:
    """Raises _Stopped. What is open and has no name any more is not counted."""
    size = files = 0
    left = [str(folder)]  # and no call for each of them: they may be nested deeper than Python's stack
    while left:
        for entry in _entries(left.pop()):
            files += 1
            with _reached():
                # Of a file with holes what it takes on the disk.
                size += entry.stat(follow_symlinks=False).st_blocks * 512
                if entry.is_dir(follow_symlinks=False):
                    left.append(entry.path)
            if size > most or files > _MOST_FILES:
                raise _Stopped(f"wrote more than {_size(most)} or {_MOST_FILES} files and was ended")


def _entries(place: str) -> list[os.DirEntry[str]]:
    found: list[os.DirEntry[str]] = []
    with _reached(), os.scandir(place) as entries:
        found += islice(entries, _MOST_FILES + 1)
    return found


@contextmanager
def _reached() -> Iterator[None]:
    """What is gone by now is none of its files; behind a name that is too long there could be any number."""
    try:
        yield
    except OSError as error:
        if error.errno == ENAMETOOLONG:
            raise _Stopped("wrote folders nested beyond all names and was ended") from None


def _listen(
    process: subprocess.Popen[bytes], pipes: Iterable[_Heard], seconds: float, look: Callable[[], None]
) -> None:
    """Until the first process ends; a pipe may stay open for longer, in one that it started."""
    end = time.monotonic() + seconds
    next_look = time.monotonic() + _LOOK_AT_FILES_S
    with selectors.DefaultSelector() as selector:
        for heard in pipes:
            selector.register(heard.descriptor, selectors.EVENT_READ, heard)
        while not _has_ended(process):
            left = end - time.monotonic()
            if left <= 0:
                raise _Stopped(f"took more than {seconds:.3g} s and was ended")
            if time.monotonic() >= next_look:
                look()
                next_look = time.monotonic() + _LOOK_AT_FILES_S
            for key, _ in selector.select(min(left, _LOOK_S)):
                if not key.data.read():
                    selector.unregister(key.fd)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Its number stays taken: only so is it sure, later on, that the group of that number is its own."""
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """Also what it started, which has its group; what is stopped or ignores signals ends by this one all the same."""
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        # What hangs in a driver cannot even be killed: nobody waits for it.
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)


def _fault(code: int | None, limits: Limits) -> str | None:
    if code == -signal.SIGXCPU:
        return f"used more than {limits.cpu_seconds} s of processor time and was ended"
    if code == -signal.SIGXFSZ:
        return f"wrote a file of more than {_size(limits.file_bytes)} and was ended"
    if code:
        return f"crashed {f'by signal {-code}' if code < 0 else f'with exit status {code}'}"
    return None


def _opened(raw: bytes, limits: Limits, said: str) -> dict[str, Any]:
    """The object in the answer, or the error that it tells of. Anyone may have written it."""
    if not raw:
        raise Ended("ended without an answer", said)
    try:
        answer = parsed(raw, most=limits.answer_bytes)
    except NotPlain as error:
        raise Ended(f"gave an answer that is not taken: {error}", said) from None
    kind, value = next(iter(answer.items()), ("", None)) if isinstance(answer, dict) else ("", None)
    if kind == "answer" and isinstance(value, dict):
        return value
    if kind == "error" and isinstance(value, dict):
        hint = value.get("hint")
        raise RocmSdError(_printable(value.get("message"), 2000), hint=None if hint is None else _printable(hint, 2000))
    if kind == "memory":
        used = "ran out" if limits.memory_bytes is None else f"used more than {_size(limits.memory_bytes)}"
        raise Ended(f"{used} of memory", said)
    if kind == "raised":
        # What it last said is the same: the end of the traceback.
        ended = Ended(f"raised {_printable(value, 300)}")
        ended.said = said
        raise ended
    raise Ended("gave an answer that is no object", said)


def _remove(folder: Path) -> None:
    """Whatever a stranger left in it: folders that nobody may open, or that are nested deeper than Python's stack."""
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):
        for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            with suppress(OSError):
                subprocess.run([*command, "--", folder], stderr=subprocess.DEVNULL, check=False)


def _printable(text: object, most: int) -> str:
    """On one line, and nothing that a terminal would obey."""
    return shortened("".join(each if each.isprintable() else " " for each in str(text)[: most + 1]), most)


def _size(count: int) -> str:
    return f"{count / 2**30:.3g} GiB" if count >= 2**30 else f"{count / 2**20:.3g} MiB"
