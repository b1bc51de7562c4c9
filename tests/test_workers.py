"""Real processes that answer, raise, crash, hang, and outlive nobody."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from rocm_sd import workers
from rocm_sd.errors import InvalidOption, MissingDependency, RocmSdError
from rocm_sd.workers import (
    OutOfTime,
    Pool,
    Worker,
    WorkerCannotStart,
    WorkerFailed,
    WorkerLost,
    cancelling,
    shared,
    start_shared,
)


def process() -> int:
    return os.getpid()


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def crash() -> None:
    sys.stderr.write("the last words\n")
    sys.stderr.flush()
    os._exit(3)


def abort() -> None:
    os.abort()


def refuse() -> None:
    raise MissingDependency("triton", "verify")


def refuse_option() -> None:
    raise InvalidOption("level", "fast", ["auto"])


def variables() -> dict[str, str | None]:
    names = ("TRITON_INTERPRET", "ROCM_SD_CACHE", "MY_FOLDER", "OMP_NUM_THREADS")
    return {name: os.environ.get(name) for name in names}


def noise() -> str:
    os.write(1, b'{"value": "not an answer"}\n')
    sys.stdout.write("nor is this\n")
    sys.stdout.flush()
    return "answer"


def unsendable() -> object:
    return lambda: 1


def is_inside() -> bool:
    return workers.inside()


@pytest.fixture
def worker():
    with Worker() as made:
        yield made


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def gone(pid: int) -> bool:
    end = time.monotonic() + 20
    while lives(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not lives(pid)


def test_a_process_that_hangs_or_crashes_is_replaced_and_one_that_raised_is_not(worker):
    first = worker.call(process, timeout=60)
    with pytest.raises(WorkerLost, match=r"^hung: stopped after 0\.5 s without an answer$"):
        worker.call(sleep, 30, timeout=0.5)
    second = worker.call(process, timeout=60)
    with pytest.raises(WorkerLost, match=r"^crashed with exit status 3; it last said: the last words$"):
        worker.call(crash, timeout=60)
    with pytest.raises(WorkerLost, match=f"^crashed by signal {signal.SIGABRT.value}"):
        worker.call(abort, timeout=60)
    third = worker.call(process, timeout=60)
    with pytest.raises(WorkerFailed, match="TypeError"):
        worker.call(sleep, "many", timeout=60)
    assert third == worker.call(process, timeout=60)
    assert len({first, second, third, os.getpid()}) == 4
    assert not lives(first)
    assert not lives(second)


def test_a_process_that_dies_between_two_calls_is_replaced(worker):
    pid = worker.call(process, timeout=60)
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)
    assert worker.call(process, timeout=60) != pid


def test_errors_of_the_project_are_raised_as_they_are(worker):
    with pytest.raises(MissingDependency, match="triton") as raised:
        worker.call(refuse, timeout=60)
    assert "verify" in raised.value.hint
    with pytest.raises(InvalidOption, match="fast") as refused:
        worker.call(refuse_option, timeout=60)
    assert (refused.value.choices, refused.value.exit_code) == (["auto"], 2)


def test_functions_and_values_that_cannot_be_sent_are_refused(worker):
    with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
        worker.call(lambda: 1, timeout=60)
    with pytest.raises(WorkerFailed, match="pickle"):
        worker.call(unsendable, timeout=60)
    assert worker.call(process, timeout=60) != os.getpid()


def test_the_callers_time_is_not_held_against_the_function(worker):
    # The start of a process counts for the caller, and not for the function.
    with pytest.raises(OutOfTime):
        worker.call(process, timeout=60, within=0.001)
    worker.call(sleep, 0, timeout=0.5, within=60)
    with pytest.raises(OutOfTime):
        worker.call(sleep, 30, timeout=60, within=0.3)
    assert not isinstance(OutOfTime(), RocmSdError)


def test_a_process_that_cannot_start_says_its_last_line(tmp_path, monkeypatch):
    source = "import os, sys\nfrom rocm_sd import workers\nif workers.inside():\n    {}\ndef function(): pass\n"
    (tmp_path / "crashing_module.py").write_text(source.format("sys.stderr.write('no library'); os._exit(5)"))
    (tmp_path / "raising_module.py").write_text(source.format("import no_such_module"))
    monkeypatch.syspath_prepend(str(tmp_path))
    import crashing_module
    import raising_module

    with Worker() as worker:
        with pytest.raises(WorkerCannotStart, match=r"^crashed with exit status 5; it last said: no library$"):
            worker.call(crashing_module.function, timeout=60)
        with pytest.raises(WorkerFailed, match="ModuleNotFoundError: No module named 'no_such_module'"):
            worker.call(raising_module.function, timeout=60)


def test_the_environment_is_the_workers_own_but_for_this_projects_settings(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("ROCM_SD_CACHE", "before")
    with Worker({"TRITON_INTERPRET": None, "OMP_NUM_THREADS": "7"}, folder="MY_FOLDER") as worker:
        seen = worker.call(variables, timeout=60)
        folder = Path(seen.pop("MY_FOLDER"))
        assert seen == {"TRITON_INTERPRET": None, "ROCM_SD_CACHE": "before", "OMP_NUM_THREADS": "7"}
        assert folder.is_dir()
        monkeypatch.setenv("ROCM_SD_CACHE", "after")
        assert worker.call(variables, timeout=60)["ROCM_SD_CACHE"] == "after"
        monkeypatch.delenv("ROCM_SD_CACHE")
        assert worker.call(variables, timeout=60)["ROCM_SD_CACHE"] is None
    assert not folder.exists()


def test_what_is_printed_is_no_answer(worker):
    assert worker.call(noise, timeout=60) == "answer"
    assert worker.call(noise, timeout=60) == "answer"


def test_a_function_knows_that_it_is_in_a_worker(worker):
    assert not workers.inside()
    assert worker.call(is_inside, timeout=60)


def test_ctrl_c_is_for_the_process_that_asks(worker):
    pid = worker.call(process, timeout=60)
    os.kill(pid, signal.SIGINT)
    assert worker.call(process, timeout=60) == pid


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for it")
def test_a_process_that_hangs_dies_with_its_parent(tmp_path):
    (tmp_path / "hanging.py").write_text(
        textwrap.dedent("""
            import os, time

            def process():
                return os.getpid()

            def hang():
                time.sleep(1000)
        """)
    )
    script = """
import hanging
from rocm_sd.workers import Worker
worker = Worker()
print(worker.call(hanging.process, timeout=60), flush=True)
worker.call(hanging.hang, timeout=1000)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment)
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert lives(pid)
        parent.kill()
    assert gone(pid)


def test_a_pool_starts_no_more_processes_than_it_may_and_reuses_them():
    with Pool(2) as pool:
        pids = {pool.submit(process, timeout=60).result() for _ in range(3)}
        assert len(pids) == 1, "one at a time needs one process"
        many = [pool.submit(process, timeout=60) for _ in range(12)]
        pids |= {future.result() for future in many}
        assert len(pids) <= 2
        with pytest.raises(WorkerLost, match="exit status 3"):
            pool.submit(crash, timeout=60).result()
        assert pool.submit(process, timeout=60).result() != os.getpid()
    assert all(gone(pid) for pid in pids)


def test_several_calls_of_one_job_are_answered_by_one_process():
    with Pool(2) as pool:
        jobs = [pool.lend(lambda worker: {worker.call(process, timeout=60) for _ in range(3)}) for _ in range(4)]
        assert all(len(job.result()) == 1 for job in jobs)


def test_a_pool_that_is_closed_ends_what_hangs_at_once_and_cancels_what_waits():
    with Pool(1) as pool:
        pid = pool.submit(process, timeout=60).result()
        hanging = pool.lend(lambda worker: [worker.call(sleep, 1000, timeout=2000) for _ in range(2)])
        waiting = pool.submit(process, timeout=60)
        while not hanging.running():
            time.sleep(0.01)
        began = time.monotonic()
    assert time.monotonic() - began < 4
    with pytest.raises(WorkerLost):
        hanging.result(5)
    with pytest.raises(CancelledError):
        waiting.result(5)
    assert gone(pid)
    with pytest.raises(WorkerLost, match="closed"):
        pool.submit(process, timeout=60)


def test_a_caller_that_stops_early_cancels_what_has_not_begun():
    with Pool(1) as pool:
        futures = [pool.submit(sleep, 0.2, timeout=60) for _ in range(5)]
        with pytest.raises(KeyboardInterrupt), cancelling(futures):
            raise KeyboardInterrupt
        assert futures[-1].cancelled()
        assert pool.submit(process, timeout=60).result() != os.getpid()


@pytest.fixture
def alone():
    """The shared worker as a new process finds it, and nothing of it after the test."""
    end_shared()
    yield
    end_shared()


def end_shared() -> None:
    if workers._keeper is not None:
        workers._keeper.worker.end()
        workers._keeper.ended = True


def shared_process() -> int:
    with shared() as worker:
        return worker.call(process, timeout=60)


@pytest.mark.usefixtures("alone")
def test_all_that_is_tried_shares_one_worker_also_from_other_threads():
    first = shared_process()
    found = []
    threads = [threading.Thread(target=lambda: found.append(shared_process())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Nor does it die with a thread that has used it.
    assert {first, shared_process(), *found} == {first}
    with shared() as worker, shared() as again:
        assert worker is again
        with pytest.raises(WorkerLost, match=r"^crashed with exit status 3"):
            worker.call(crash, timeout=60)
    assert shared_process() != first


@pytest.mark.usefixtures("alone")
def test_one_thread_at_a_time_has_the_shared_worker():
    order = []

    def other() -> None:
        with shared() as worker:
            worker.call(process, timeout=60)
            order.append("other")

    with shared() as worker:
        thread = threading.Thread(target=other)
        thread.start()
        worker.call(sleep, 0.5, timeout=60)
        order.append("first")
    thread.join()
    assert order == ["first", "other"]


@pytest.mark.usefixtures("alone")
def test_the_shared_worker_ends_when_nobody_asks(monkeypatch):
    monkeypatch.setattr(workers, "_IDLE_S", 0.5)
    pid = shared_process()
    assert gone(pid)
    with shared() as worker:
        pid = worker.call(process, timeout=60)
        time.sleep(1.5)
        assert worker.call(process, timeout=60) == pid, "it was in use"
    assert gone(pid)


@pytest.mark.usefixtures("alone")
def test_the_shared_worker_can_be_started_ahead(tmp_path):
    start_shared(Path.touch, tmp_path / "ready")
    end = time.monotonic() + 60
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    assert lives(shared_process())


def uses_shared() -> None:
    with shared():
        pass


@pytest.mark.usefixtures("alone")
def test_a_worker_has_no_shared_worker():
    with shared() as worker, pytest.raises(WorkerCannotStart, match="a worker starts no other"):
        worker.call(uses_shared, timeout=60)


@pytest.mark.usefixtures("alone")
def test_the_shared_worker_ends_with_the_process(tmp_path):
    (tmp_path / "asked.py").write_text("import os\n\ndef process():\n    return os.getpid()\n")
    script = """
import asked
from rocm_sd.workers import shared
with shared() as worker:
    print(worker.call(asked.process, timeout=60), flush=True)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment, timeout=60, check=True, text=True
    )
    assert gone(int(done.stdout))


def test_what_cannot_be_started_says_why(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(workers.subprocess, "Popen", no_memory)
        with (
            Worker() as worker,
            pytest.raises(WorkerCannotStart, match=r"no process could be started.*Cannot allocate"),
        ):
            worker.call(process, timeout=60)
    monkeypatch.setattr(sys, "executable", "")
    with Worker() as worker, pytest.raises(WorkerCannotStart, match="frozen"):
        worker.call(process, timeout=60)


def no_memory(*_given, **_named):
    raise OSError(12, "Cannot allocate memory")
