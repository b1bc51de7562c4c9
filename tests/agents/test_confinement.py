"""Real processes within their walls: they answer, raise, crash, hang, lie, and neither get out nor leave anything."""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import os
import resource
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from rocm_sd.agents import confinement
from rocm_sd.agents.confinement import LIMITS, Ended, confined, missing, walls
from rocm_sd.agents.walls import WALLS
from rocm_sd.errors import MissingDependency, RocmSdError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for it")

KERNEL = """
import triton
import triton.language as tl


@triton.jit
def double(x, y, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y + at, 2 * tl.load(x + at))
"""


# What the processes do.


def echo(job):
    return {"job": job}


def surroundings(job):
    return {
        "environment": dict(os.environ),
        "files": {path.name: path.read_text() for path in Path.cwd().iterdir()},
        "folder": str(Path.cwd()),
        "temporary": tempfile.gettempdir(),
        "stdin": sys.stdin.read(),
        "path": [place for place in sys.path if place in {"", os.curdir, str(Path.cwd())}],
        "descriptors": sorted(int(each.name) for each in Path("/proc/self/fd").iterdir()),
    }


def faults(job):
    """For each of some trials, which error it met; None where it did what it wanted."""
    outside, parent = Path(job["outside"]), os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    trials = {
        "connects": lambda: socket.create_connection(("127.0.0.1", job["port"]), timeout=2),
        "asks a name": lambda: socket.getaddrinfo("localhost.localdomain", 80),
        "opens a socket of a program": lambda: socket.socket(socket.AF_UNIX).connect(job["unix"]),
        "reads": outside.read_text,
        "lists": lambda: next(outside.parent.iterdir()),
        "lists the home": lambda: next(Path(job["home"]).iterdir()),
        "reads the environment of the parent": Path(f"/proc/{parent}/environ").read_bytes,
        "reads the memory of the parent": Path(f"/proc/{parent}/mem").open,
        "reads users": Path("/etc/passwd").read_text,
        "reads what is on the screen": Path("/dev/tty").open,
        "writes": lambda: outside.write_text("changed"),
        "empties": lambda: os.truncate(outside, 0),
        "removes": outside.unlink,
        "renames": lambda: outside.rename("mine"),
        "links": lambda: os.link(outside, "mine"),
        "makes": (outside.parent / "new").mkdir,
        "makes in the temporary folder": Path("/tmp/rocm-sd-test").touch,
        "makes in the package": Path(confinement.__file__).with_name("rocm-sd-test").touch,
        "makes in shared memory": Path("/dev/shm/rocm-sd-test").touch,
        "writes by a link": lambda: written_by_link(outside),
        "signals": lambda: os.kill(parent, 0),
        "signals all": lambda: os.kill(-1, 0),
        "limits the parent": lambda: resource.prlimit(parent, resource.RLIMIT_CPU),
        "raises its limits": lambda: resource.setrlimit(resource.RLIMIT_CPU, (10**6, 10**6)),
        "leaves the group": lambda: os.setpgid(0, os.getppid()),
        "is another user": lambda: os.setuid(12345),
        "traces": lambda: called(libc.ptrace(16, parent, 0, 0)),
        "has a user namespace": lambda: called(libc.unshare(0x10000000)),
        "has memory that no limit counts": lambda: os.memfd_create("mine"),
        "mounts": lambda: called(libc.mount(b"none", str(Path.cwd()).encode(), b"tmpfs", 0, None)),
        "does not die with the parent": lambda: called(libc.prctl(1, 0)),
        "works": lambda: works_as_it_should(outside),
    }
    return {name: fault_of(trial) for name, trial in trials.items()}


def written_by_link(outside):
    Path("link").symlink_to(outside)
    Path("link").write_text("changed")


def called(result):
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def fault_of(trial):
    try:
        trial()
    except Exception as error:  # noqa: BLE001 -- whatever it is that holds
        return f"{type(error).__name__}: {error}"
    return None


def works_as_it_should(outside):
    """What functions of the project do with files, and with programs that they start."""
    Path("one").mkdir()
    made = Path("one", "made")
    made.write_text("made")
    made.chmod(0o600)
    Path("two").mkdir()
    made.replace("two/made")
    Path("touched").touch()
    assert Path("touched").exists()
    outside.chmod(0o777)  # seems to succeed; the test looks at it afterwards
    with tempfile.TemporaryDirectory() as folder:
        assert Path(folder).parent == Path.cwd()
    landlock = ctypes.CDLL(None).syscall(444, None, 0, 1)
    if landlock >= 6:  # else all signals to others are refused, also to what it started
        with subprocess.Popen(["sleep", "1000"]) as started:
            started.kill()
        assert started.returncode == -signal.SIGKILL
    done = subprocess.run([sys.executable, "-c", "print(1)"], stdout=subprocess.PIPE, check=True, text=True)
    assert done.stdout == "1\n"
    Path("/dev/null").write_text("nothing")
    ours, theirs = socket.socketpair()
    ours.close()
    theirs.close()


def sleep(job):
    if job.get("deaf"):
        for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGXCPU):
            signal.signal(each, signal.SIG_IGN)
    sys.stdout.write("falling asleep\n")
    time.sleep(1000)


def begin():
    """Told at once: from here on a test counts the time."""
    os.write(1, b"begun\n")


def loop(job):
    begin()
    while True:
        pass


def prints(job):
    while True:
        os.write(1, b"and so on\n" * 1000)


def allocate(job):
    return {"size": len(bytearray(2 * 2**30))}


def write_a_giant(job):
    with Path("giant").open("wb") as file:
        while True:
            file.write(bytes(2**20))


def write_many(job):
    for number in range(10**6):
        Path(f"file-{number}").write_bytes(bytes(2**20))


def nest_and_sleep(job):
    for _ in range(2500):
        Path("a").mkdir()
        os.chdir("a")
    time.sleep(1000)


def leave_behind(job):
    pid = os.fork()
    if pid == 0:
        if job["new_session"]:
            with suppress(PermissionError):
                os.setsid()
        time.sleep(1000)
    return {"pid": pid}


def leave_a_thread(job):
    import threading

    threading.Thread(target=time.sleep, args=(1000,)).start()
    return {}


def leave(job):
    sys.stdout.write("\x1b[31mthe last\twords")
    os._exit(job["status"])


def crash(job):
    ctypes.string_at(0)


def stop(job):
    begin()
    os.kill(os.getpid(), signal.SIGSTOP)


def processes_are_limited(job):
    return {"limited": resource.getrlimit(resource.RLIMIT_NPROC)[0] <= 512}


def fork_endlessly(job):
    begin()
    while True:
        with suppress(OSError):
            os.fork()


def say(job):
    """Past the function's own answer: straight into the pipe."""
    os.write(int(sys.argv[2]), job["said"].encode())
    os._exit(0)


def say_endlessly(job):
    while True:
        os.write(int(sys.argv[2]), bytes(2**16))


def close_all_and_sleep(job):
    begin()
    os.closerange(0, 100)
    time.sleep(1000)


def no_number(job):
    return {"value": math.nan}


def nested(job):
    found = []
    for _ in range(100):
        found = [found]
    return {"value": found}


def no_json(job):
    return {"value": lambda: 1}


def no_object(job):
    return [1]


def fail(job):
    raise ValueError(job.get("text", "the first line\nthe second"))


def leave_python(job):
    raise SystemExit(3)


def refuse(job):
    raise MissingDependency("triton", "verify")


def shut_and_nested(job):
    """A folder that nobody may open, one with a link to what is outside, and folders deeper than Python's stack."""
    Path("shut").mkdir()
    Path("shut", "file").touch()
    Path("shut", "link").symlink_to(job["outside"])
    for _ in range(400):
        Path("deep").mkdir()
        os.chdir("deep")
    return {}


def compute(job):
    sys.path.insert(0, str(Path.cwd()))
    import kernels
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(kernels.double, {"x": "*fp32", "y": "*fp32", "SIZE": "constexpr"}, {"SIZE": 64})
    compiled = triton.compile(source, target=GPUTarget("hip", "gfx1100", 32))
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.reload(kernels)
    x, y = torch.arange(8.0), torch.zeros(8)
    kernels.double[(1,)](x, y, SIZE=8)
    return {"y": y.tolist(), "bytes": len(compiled.asm["hsaco"])}


# What the tests do with them.

FAST = replace(LIMITS, seconds=180)
LONG = replace(LIMITS, seconds=900, cpu_seconds=900)


def run(function, job=None, **named):
    return confined(f"{__name__}:{function.__name__}", job or {}, **{"limits": FAST, **named})


def limited(**limits):
    return replace(FAST, **limits)


def lives(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def gone(pid):
    end = time.monotonic() + 20
    while lives(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not lives(pid)


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Where processes get their folders: nothing is left there."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert not list(folder.iterdir())


def test_a_function_answers_what_json_can_hold():
    job = {"text": "ö\ud800", "numbers": [1, 2.5, None, True], "large": "x" * 10**6}
    answer = run(echo, {**job, "text": "ö"})
    assert answer == {"job": {**job, "text": "ö"}}
    with pytest.raises(Ended, match="surrogate"):
        run(echo, job)


def test_environment_and_folder_are_its_own(monkeypatch, temporary):
    monkeypatch.setenv("MY_KEY", "secret")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/secret")
    monkeypatch.setenv("ROCM_SD_CACHE", "/secret")
    found = run(surroundings, files={"os.py": "raise SystemExit('imported')"}, environment={"TRITON_INTERPRET": "1"})
    environment = found["environment"]
    assert "secret" not in json.dumps(environment)
    assert environment["TRITON_INTERPRET"] == "1"
    assert found["files"] == {"os.py": "raise SystemExit('imported')"}
    folder = Path(found["folder"])
    assert folder.parent == temporary
    assert not folder.exists()
    own = ("HOME", "TMPDIR", "ROCM_SD_CACHE", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")
    assert all(Path(environment[name]).is_relative_to(folder) for name in own)
    assert found["temporary"] == str(folder)
    assert (found["stdin"], found["path"]) == ("", [])
    # The three of every process, the pipe for the answer, and that for looking at this list.
    assert len(found["descriptors"]) == 5


def test_with_a_device_it_knows_where_the_driver_and_the_card_are(monkeypatch):
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/rocm/lib")
    monkeypatch.setenv("MY_KEY", "secret")
    environment = run(surroundings, device=True)["environment"]
    assert (environment["HIP_VISIBLE_DEVICES"], environment["LD_LIBRARY_PATH"]) == ("1", "/opt/rocm/lib")
    assert "MY_KEY" not in environment


@pytest.mark.parametrize("name", ["", ".", "..", "../up", "/etc/new", "a/b", "a\\b", "a\0b", "a\nb"])
def test_files_have_plain_names(name):
    with pytest.raises(RocmSdError, match="is no plain name of a file") as raised:
        run(echo, files={name: "text"})
    assert not isinstance(raised.value, Ended)


NEEDED = {
    "no network": ("connects", "asks a name"),
    "no sockets of other programs": (
        "opens a socket of a program", "leaves the group", "has a user namespace", "has memory that no limit counts",
        "does not die with the parent", "signals all", "limits the parent", "traces",
    ),
    "reads only what Python and the drivers need": (
        "reads", "lists", "lists the home", "reads the environment of the parent", "reads the memory of the parent",
        "reads users", "reads what is on the screen",
    ),
    "writes into its own folder alone": (
        "writes", "empties", "removes", "renames", "links", "makes", "makes in the temporary folder",
        "makes in the package", "makes in shared memory", "writes by a link", "mounts",
    ),
    "signals to its own processes alone": ("signals",),
    "no rights of an administrator": ("is another user", "mounts"),
    "limits of memory, of processor time and of the size of files": ("raises its limits",),
}  # fmt: skip


@pytest.mark.parametrize("device", [False, True])
def test_what_walls_says_holds(tmp_path, device):
    outside = tmp_path / "outside"
    outside.write_text("as it was")
    outside.chmod(0o640)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "unix"))
        unix.listen()
        job = {"outside": str(outside), "port": server.getsockname()[1], "unix": str(tmp_path / "unix")}
        # Where a resolver is reached, one that has no answer is not waited for.
        quick = {"RES_OPTIONS": "timeout:1 attempts:1"}
        found = run(faults, {**job, "home": str(Path.home())}, device=device, environment=quick, limits=LONG)
    assert found.pop("works") is None, "the walls are no hindrance to what is allowed"
    free = {"has memory that no limit counts", "makes in shared memory"} if device else set()
    for wall in walls():
        for name in NEEDED.get(wall, ()):
            assert name in free or found[name] is not None, f"{wall}, but it {name}"
    if "writes into its own folder alone" in walls():
        assert outside.read_text() == "as it was"
    if "no sockets of other programs" in walls():
        assert stat.S_IMODE(outside.stat().st_mode) == 0o640
    for folder in (Path("/tmp"), Path("/dev/shm"), Path(confinement.__file__).parent):
        (folder / "rocm-sd-test").unlink(missing_ok=True)


def test_walls_are_found_once_and_said_in_words():
    assert set(walls()) <= set(WALLS.values())
    assert "limits of memory, of processor time and of the size of files" in walls()
    assert walls() is walls()
    assert set(missing()) == set(WALLS.values()) - set(walls())


@pytest.fixture
def patient(monkeypatch):
    """A process has begun before its seconds are counted: a busy machine takes many to start Python. Since when."""
    began, listen = [], confinement._listen

    def once_it_speaks(process, pipes, seconds, look):
        _answers, prints = pipes
        assert select.select([prints.descriptor], [], [], 180)[0]
        began.append(time.monotonic())
        listen(process, pipes, seconds, look)

    monkeypatch.setattr(confinement, "_listen", once_it_speaks)
    return began


@pytest.mark.parametrize("deaf", [False, True])
def test_what_sleeps_is_ended(deaf, patient):
    with pytest.raises(Ended, match=r"^took more than 1\.5 s and was ended; it last said: falling asleep$") as raised:
        run(sleep, {"deaf": deaf}, limits=limited(seconds=1.5))
    assert raised.value.said == "falling asleep\n"
    assert time.monotonic() - patient[0] < 60


@pytest.mark.parametrize("function", [loop, stop, close_all_and_sleep, fork_endlessly])
def test_what_never_answers_is_ended(function, patient):
    if function is fork_endlessly:
        limited_here = confined(f"{__name__}:processes_are_limited", {}, limits=FAST)["limited"]
        if not limited_here:
            pytest.skip("this system does not limit how many processes there may be")
    patient.clear()
    with pytest.raises(Ended, match=r"^took more than 1 s and was ended; it last said: begun$"):
        run(function, limits=limited(seconds=1.0))
    assert time.monotonic() - patient[0] < 60


def test_what_computes_too_long_is_ended():
    with pytest.raises(Ended, match=r"^used more than 1 s of processor time and was ended(; it last said: begun)?$"):
        run(loop, limits=limited(cpu_seconds=1))


def test_what_prints_without_end_is_ended():
    with pytest.raises(Ended, match=r"^printed more than 4 MiB and was ended; it last said: [a-z ]+$") as raised:
        run(prints)
    assert len(raised.value.said) == LIMITS.said_bytes


def test_memory_is_limited():
    with pytest.raises(Ended, match=r"^used more than 1\.5 GiB of memory"):
        run(allocate, limits=limited(memory_bytes=3 * 2**29))


def test_a_file_is_limited():
    with pytest.raises(Ended, match=r"^wrote a file of more than 8 MiB and was ended"):
        run(write_a_giant, limits=limited(file_bytes=2**23))


def test_all_files_together_are_limited(monkeypatch):
    with pytest.raises(Ended, match=r"^wrote more than 16 MiB or 100000 files and was ended"):
        run(write_many, limits=limited(folder_bytes=2**24))
    with pytest.raises(Ended, match=r"^wrote folders nested beyond all names and was ended"):
        run(nest_and_sleep)
    monkeypatch.setattr(confinement, "_MOST_FILES", 5)
    with pytest.raises(Ended, match=r"^wrote more than 2 GiB or 5 files and was ended"):
        run(write_many)


@pytest.mark.parametrize("wall", ["capset", "Landlock's walls", "the filter of system calls"])
def test_a_wall_that_does_not_rise_ends_the_process(wall, monkeypatch):
    if wall != "capset" and len(walls()) < len(WALLS):
        pytest.skip("this system may lack it, and then it is left out")
    served = "from rocm_sd.agents.walls import serve"
    failing = f"w._done = lambda result, what, done=w._done: done(-1 if {wall!r} in what else result, what)"
    broken = confinement._SERVE.replace(served, f"import rocm_sd.agents.walls as w; {failing}; {served}")
    assert broken != confinement._SERVE
    monkeypatch.setattr(confinement, "_SERVE", broken)
    # The function would answer.
    with pytest.raises(Ended, match=rf"^raised a wall of this system could not be raised: .*{wall}"):
        run(echo)


def test_without_landlocks_own_wall_signals_to_others_are_refused():
    script = """
import ctypes, os, signal, sys
from rocm_sd.agents import walls
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(38, 1, 0, 0, 0)
walls._filter_calls(libc, device=False, signals=True)
refused = []
for pid in (os.getppid(), 1, -1):
    try:
        os.kill(pid, 0)
    except PermissionError:
        refused.append(pid)
assert refused == [os.getppid(), 1, -1], refused
os.kill(os.getpid(), 0)
os.kill(0, 0)
for number in (walls._SIGNALS["tgkill"], walls._REFUSED_SIGNALS["rt_sigqueueinfo"]):
    column = walls._MACHINES[os.uname().machine][0]
    assert libc.syscall(number[column], os.getppid(), os.getppid(), 0) == -1
    assert ctypes.get_errno() == 1
signal.raise_signal(signal.SIGUSR1)
"""
    if os.uname().machine not in ("x86_64", "aarch64"):
        pytest.skip("calls are filtered on x86-64 and ARM")
    places = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": places}, capture_output=True, text=True,
        check=False, start_new_session=True,
    )  # fmt: skip
    assert done.returncode == -signal.SIGUSR1, done.stderr


def test_no_process_is_left_behind():
    new_session = "no process outlives it" in walls()
    assert gone(run(leave_behind, {"new_session": new_session})["pid"])
    assert run(leave_a_thread) == {}


def test_a_crash_says_how():
    with pytest.raises(Ended, match=f"^crashed by signal {signal.SIGSEGV.value}"):
        run(crash)
    with pytest.raises(Ended, match=r"^crashed with exit status 3; it last said:  \[31mthe last words$"):
        run(leave, {"status": 3})
    with pytest.raises(Ended, match=r"^ended without an answer; it last said: "):
        run(leave, {"status": 0})


def test_errors_come_as_text():
    with pytest.raises(Ended, match=r"^raised ValueError: the first line$") as raised:
        run(fail)
    assert "in fail" in raised.value.said
    with pytest.raises(Ended, match=r"^raised SystemExit: 3$"):
        run(leave_python)
    with pytest.raises(Ended, match=r"^raised ModuleNotFoundError: No module named 'no_such_module'$"):
        confined("no_such_module:function", {}, limits=FAST)
    with pytest.raises(Ended, match=r"^raised AttributeError: .*no_such_function"):
        confined(f"{__name__}:no_such_function", {}, limits=FAST)
    with pytest.raises(RocmSdError, match=r"^triton is not installed\. Type: pip install") as refused:
        run(refuse)
    assert not isinstance(refused.value, Ended)
    assert (refused.value.message, refused.value.hint[:4]) == ("triton is not installed.", "Type")


def test_an_answer_that_is_none_is_refused():
    with pytest.raises(Ended, match=r"^gave an answer that is not taken: it has NaN, which is no number$"):
        run(no_number)
    with pytest.raises(Ended, match="nested more than 64 levels deep"):
        run(nested)
    with pytest.raises(Ended, match="raised TypeError: Object of type function is not JSON serializable"):
        run(no_json)
    with pytest.raises(Ended, match="gave an answer that is no object"):
        run(no_object)
    with pytest.raises(Ended, match="answered with more than 4 MiB and was ended"):
        run(say_endlessly)
    with pytest.raises(Ended, match="gave an answer that is not taken: it is no JSON"):
        run(say, {"said": '{"answer": {"value'})


@pytest.mark.parametrize(
    "raw",
    [
        b"\x80\x04]\x94.", b"\xff", b"{", b"[" * 10**6, b"null", b"[]", b"{}", b'{"answer": []}', b'{"answer": 1e999}',
        b'{"raised": {"a": []}}', b'{"error": 3}', b'{"other": {}}', b'{"memory": []}', b"1" * 10**5,
    ],
)  # fmt: skip
def test_whatever_a_stranger_answers_ends_in_one_error(raw):
    with pytest.raises(Ended):
        confinement._opened(raw, LIMITS, "")


def test_a_strangers_error_is_one_line_that_no_terminal_obeys():
    error = {"message": "\x1b[2Jgone\n" + "x" * 10**5, "hint": ["\x07"]}
    with pytest.raises(RocmSdError) as raised:
        confinement._opened(json.dumps({"error": error}).encode(), LIMITS, "")
    assert str(raised.value).isprintable()
    assert len(raised.value.message) < 2100
    with pytest.raises(RocmSdError, match="None"):
        confinement._opened(b'{"error": {}}', LIMITS, "")


def test_whatever_a_stranger_leaves_is_removed_and_what_it_links_to_stays(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("as it was")
    outside.chmod(0o640)
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(400)  # a thousand folders within one another take `rm` seconds
    try:
        run(shut_and_nested, {"outside": str(outside)})
    finally:
        sys.setrecursionlimit(before)
    assert (outside.read_text(), stat.S_IMODE(outside.stat().st_mode)) == ("as it was", 0o640)


def test_ctrl_c_leaves_neither_process_nor_folder(monkeypatch):
    seen = []

    def interrupted(process):
        seen.append(process.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(confinement, "_has_ended", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(sleep)
    assert gone(seen[0])


def test_it_dies_with_the_process_that_started_it(tmp_path):
    (tmp_path / "hanging.py").write_text(
        textwrap.dedent("""
            import os, time

            def hang(job):
                os.write(1, b"hangs")
                time.sleep(1000)
        """)
    )
    script = """
from rocm_sd.agents import confinement
read = confinement._Heard.read
def tell(heard):
    print(process[0].pid, flush=True)
    return read(heard)
process, has_ended = [], confinement._has_ended
def remember(started):
    process[:] = [started]
    return has_ended(started)
confinement._Heard.read, confinement._has_ended = tell, remember
confinement.confined("hanging:hang", {})
"""
    places = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": places, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment)
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert lives(pid)
        parent.kill()
    assert gone(pid)


def test_what_cannot_be_started_says_why(monkeypatch):
    def no_memory(*_given, **_named):
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(confinement.subprocess, "Popen", no_memory)
        with pytest.raises(Ended, match=r"no process could be started.*Cannot allocate"):
            run(echo)
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(Ended, match="frozen"):
        run(echo)


def test_torch_and_triton_work_within_the_walls():
    pytest.importorskip("triton")
    found = run(compute, files={"kernels.py": KERNEL}, limits=LONG)
    assert found["y"] == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]
    assert found["bytes"] > 0
