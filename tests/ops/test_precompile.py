"""Compiling ahead, on a driver that compiles for a real GPU and counts launches instead of making them.

Each scenario is a process of its own: in this one, Triton may be interpreting kernels.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

WIDTHS = (64, 128, 256)


class CountingDriver:
    """Two gfx1100 on which every launch is noted by the kernel's name and the device."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("hip", "gfx1100", 32)
        self.utils = self
        self.launched: list[tuple[str, int]] = []
        self.launchers = 0
        self.here = threading.local()

    def get_current_device(self):
        return getattr(self.here, "device", 0)

    def set_current_device(self, device):
        self.here.device = device

    def get_current_stream(self, _device):
        return 0

    def get_current_target(self):
        return self.target

    def get_device_properties(self, _device):
        return {"max_shared_mem": 65536}

    def load_binary(self, *_):
        return object(), 1, 32, 0, 1024

    def unload_module(self, module):
        pass

    def launcher_cls(self, src, _metadata):
        self.launchers += 1
        return lambda *_: self.launched.append((src.fn.__name__, self.get_current_device()))


def prepared():
    from triton import knobs
    from triton.runtime import driver

    from rocm_sd.kernels.triton import precompile

    counting = CountingDriver()
    driver.set_active(counting)
    precompile._cores = lambda: 2
    compiled_here = []
    knobs.compilation.listener = lambda *, cache_hit, src, **_: cache_hit or compiled_here.append(src.name)
    return precompile, knobs, counting, compiled_here


def model(widths=WIDTHS):
    """Launches `_geglu` twice for each width: a variant each."""
    import torch

    from rocm_sd.kernels.configs.geglu import GegluConfig
    from rocm_sd.kernels.triton.geglu import launch

    for width in (*widths, *widths):
        x, y = torch.empty((4, 2 * width), dtype=torch.half), torch.empty((4, width), dtype=torch.half)
        launch(x, y, None, None, 0, GegluConfig(block_f=width, rows=1, warps=1))


def impossible():
    """A tile of 3: the compiler refuses it."""
    import torch

    from rocm_sd.kernels.triton.attention import _softmax_rows

    x = torch.empty((1, 3))
    _softmax_rows[(1,)](x, x, x, 3, 1.0, BLOCK=3, WHOLE=True)


def scenario_processes():
    precompile, _, driver, compiled_here = prepared()
    precompile.start()
    driver.set_current_device(1)
    with precompile.precompiling() as done:
        model()
        inside = list(driver.launched)
    built = driver.launchers
    again = []
    with precompile.precompiling() as nothing:
        model()
        again = list(driver.launched)
    return {
        "done": vars(done),
        "launched inside": inside,
        "launched again": again,
        "compiled again": nothing.compiled,
        "compiled here": compiled_here,
        "launchers": built,
        "said": str(done),
    }


def scenario_without_process():
    precompile, _, driver, compiled_here = prepared()
    sys.executable = "/nowhere/python"
    with precompile.precompiling(2) as done:
        model()
    model()
    return {"done": vars(done), "compiled here": compiled_here, "launched": len(driver.launched)}


def scenario_dying_process():
    precompile, _, _, compiled_here = prepared()
    precompile.start()
    with precompile.precompiling(2) as done:
        model(WIDTHS[:1])
        precompile._process._process.kill()
        model(WIDTHS)
    return {"done": vars(done), "compiled here": len(compiled_here)}


def ending(how):
    """For the compiling process: its fork ends like that where the variant is the one of 128."""
    from triton.runtime.jit import JITFunction

    from rocm_sd.kernels.triton import compiling_process

    compile_it = JITFunction.preload

    def preload(self, variant):
        if 128 not in json.loads(variant)["constant_vals"]:
            return compile_it(self, variant)
        os.write(2, b"#blocked = #ttg.blocked<{}>\n")
        if how == "raises":
            raise ValueError("no such layout\nmodule {")
        if how == "killed once":
            here = Path(os.environ["TRITON_CACHE_DIR"]) / "killed"
            if here.exists():
                return compile_it(self, variant)
            here.write_text("")
        os.kill(os.getpid(), signal.SIGABRT if how == "crashes" else signal.SIGKILL)
        return None

    JITFunction.preload = preload
    compiling_process.serve()


def raised_at(width):
    try:
        model((width,))
    except Exception as error:  # noqa: BLE001 -- its name is the result
        return type(error).__name__, str(error)
    return None


def every_error():
    return [[width, *error] for width in WIDTHS if (error := raised_at(width))]


def scenario_ending(how):
    from rocm_sd.kernels.triton import compiling_process

    precompile, knobs, driver, compiled_here = prepared()
    logged = []
    precompile.log = SimpleNamespace(debug=lambda form, *values: logged.append(form % values))
    serve = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import test_precompile; test_precompile."
    compiling_process._SERVE = f"{serve}ending({how!r})"
    with precompile.precompiling(2) as done:
        model()
        model()
    raised = every_error()
    with precompile.precompiling(2) as again:
        model()
    assert raised == every_error()
    return {
        "done": vars(done),
        "again": [again.compiled, again.failed],
        "compiled here": compiled_here,
        "raised": raised,
        "launched": len(driver.launched),
        "hook stays": knobs.runtime.jit_cache_hook is not None,
        "logged": any("#ttg.blocked" in line for line in logged),
    }


def scenario_crashes():
    return scenario_ending("crashes")


def scenario_raises():
    return scenario_ending("raises")


def scenario_killed():
    return scenario_ending("killed")


def scenario_killed_once():
    return scenario_ending("killed once")


def scenario_no_cache():
    precompile, _, _, _ = prepared()
    with precompile.precompiling(2) as done:
        model()
    return vars(done)


def asked_in_a_thread(question):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(question()))
    thread.start()
    thread.join()
    return answers[0]


def scenario_threads_and_hooks():
    from rocm_sd.kernels import triton as triton_kernels

    precompile, knobs, driver, _ = prepared()
    precompile.start = lambda: None
    asked = []

    def theirs(*, fn, **_):
        asked.append((fn.name, threading.current_thread().name))
        return False

    knobs.runtime.jit_cache_hook = theirs
    found = {}
    with precompile.precompiling(2) as done:
        other = threading.Thread(target=model, args=(WIDTHS[:1],), name="other")
        other.start()
        other.join()
        found["of another thread"] = len(driver.launched)
        found["their hook was asked"] = ("_geglu", "other") in asked
        found["skips launches"] = [triton_kernels.skips_launches(), asked_in_a_thread(triton_kernels.skips_launches)]
        with precompile.precompiling(2) as inner:
            model(WIDTHS[1:2])
        found["in the inner block"] = inner.compiled
        model(WIDTHS[2:])
        impossible()
    found["in the outer block"] = done.compiled
    found["skips launches after it"] = triton_kernels.skips_launches()
    found["failed"] = done.failed
    found["hook is back"] = knobs.runtime.jit_cache_hook is theirs
    try:
        impossible()
    except Exception as error:  # noqa: BLE001 -- its name is the result
        found["the launch says"] = type(error).__name__
    with suppress(KeyError), precompile.precompiling(2):
        raise KeyError
    found["hook is back after an error"] = knobs.runtime.jit_cache_hook is theirs
    with precompile.precompiling(1) as serial:
        model((512,))
    found["one worker"] = [serial.compiled, len(driver.launched)]
    knobs.runtime.jit_cache_hook = None
    found["two blocks"] = two_blocks(precompile)
    found["hook is off"] = knobs.runtime.jit_cache_hook is None
    return found


def two_blocks(precompile):
    """Blocks of two threads, the first of which ends while the second is open: each has its own variants."""
    first_open, second_open = threading.Event(), threading.Event()
    counts = {}

    def first():
        with precompile.precompiling(2) as done:
            first_open.set()
            second_open.wait()
            model((1024,))
        counts["first"] = done.compiled

    thread = threading.Thread(target=first)
    thread.start()
    first_open.wait()
    with precompile.precompiling(2) as done:
        second_open.set()
        thread.join()
        model((32,))
    counts["second"] = done.compiled
    return counts


def last_block_of_all(precompile):
    """It takes the hook off."""
    with precompile.noting():
        pass


def scenario_launching():
    """Inside a block that notes, what must run is launched; after it, launches are noted again."""
    from rocm_sd.kernels import triton as triton_kernels

    precompile, knobs, driver, _ = prepared()
    counts = []
    with precompile.noting() as questions:
        with triton_kernels.launching():
            counts.append(triton_kernels.skips_launches())
            model(WIDTHS[:1])
            asked_in_a_thread(lambda: last_block_of_all(precompile))
        counts.append(triton_kernels.skips_launches())
        model(WIDTHS[1:])
    return {
        "skips within and after": counts,
        "launched": [name for name, _ in driver.launched],
        "noted": len({question["variant"] for question in questions}),
        "hook is off": knobs.runtime.jit_cache_hook is None,
    }


def scenario_beside():
    """Four configs of a call, of which the compiler refuses one: a process compiles the others."""
    import time

    import torch

    from rocm_sd.kernels.configs.geglu import GegluConfig
    from rocm_sd.ops import OPS
    from rocm_sd.tuning.search.beside import CompilingBeside
    from rocm_sd.tuning.search.calls import describe
    from rocm_sd.tuning.search.candidates import Candidate

    precompile, _, driver, compiled_here = prepared()
    asked = []
    ask = precompile._ask
    precompile._ask = lambda question: asked.append(json.loads(question["variant"])["constant_vals"]) or ask(question)
    widths = (*WIDTHS, 3)
    calls, wanted = [], []
    for rows in (4, 8):
        given = (torch.empty((rows, 1024), dtype=torch.half), None)
        call = describe("geglu", OPS["geglu"].verification.problem(*given), given)
        configs = [Candidate("triton", GegluConfig(block_f=width, rows=1, warps=1)) for width in widths]
        # The second problem has one config alone, and a picture spends more on it.
        wanted.append((call, configs if rows == 4 else configs[1:2], float(rows)))
        calls.append(call)
    begun = time.monotonic()
    with CompilingBeside(wanted, torch.device("cpu"), 200.0) as compiling:
        while not compiling.is_over and time.monotonic() - begun < 200:
            time.sleep(0.05)
        configs = wanted[0][1]
        ready = [compiling.is_ready(calls[0], each) for each in configs]
        failed = [compiling.has_failed(calls[0], each) for each in configs]
        unknown = compiling.is_ready(calls[1], configs[0])
    return {
        "ready": ready,
        "failed": failed,
        "unknown": unknown,
        "first": [next(width for width in widths if width in values) for values in asked],
        "launchers": driver.launchers,
        "compiled here": compiled_here,
    }


def scenario_foreign_kernel():
    import torch
    import triton

    precompile, _, driver, _ = prepared()
    precompile.start = lambda: None
    kernel = triton.jit(_foreign)
    with precompile.precompiling(2) as done:
        kernel[(1,)](torch.empty(1))
    return {"launched": driver.launched, "compiled": done.compiled}


def _foreign(x):
    pass


def play(name: str, cache: Path) -> dict:
    code = f"import json, test_precompile; print(json.dumps(test_precompile.scenario_{name}()))"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(paths)}
    environment |= {"OMP_NUM_THREADS": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "#ttg" not in ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_a_block_compiles_every_variant_in_processes_and_launches_none(tmp_path):
    found = play("processes", tmp_path)
    assert found["launched inside"] == []
    done = found["done"]
    assert (done["compiled"], done["in_process"], done["failed"]) == (len(WIDTHS), len(WIDTHS), 0)
    # The signature is one for all widths.
    assert found["launchers"] == 1
    # What follows is launched, on the GPU that was current, and nothing is compiled for it.
    assert found["launched again"] == [["_geglu", 1]] * (2 * len(WIDTHS))
    assert found["compiled again"] == 0
    assert found["compiled here"] == []
    assert found["said"].startswith("3 kernel variants compiled in ")


def test_threads_compile_where_no_process_can_be_started(tmp_path):
    found = play("without_process", tmp_path)
    done = found["done"]
    assert (done["compiled"], done["in_process"], done["failed"]) == (len(WIDTHS), 0, 0)
    assert found["compiled here"] == ["_geglu"] * len(WIDTHS)
    assert found["launched"] == 2 * len(WIDTHS)


def test_another_process_compiles_what_a_dying_one_leaves(tmp_path):
    found = play("dying_process", tmp_path)
    done = found["done"]
    assert (done["compiled"], done["in_process"], done["failed"]) == (len(WIDTHS), len(WIDTHS), 0)
    assert found["compiled here"] == 0


@pytest.mark.parametrize(
    ("how", "error", "reason"),
    [
        ("crashes", "CompilerCrashed", "its compiler crashed (_geglu: SIGABRT)."),
        ("raises", "CompilerFailed", "its compiler failed (_geglu: ValueError: no such layout)."),
        ("killed", "CompilerFailed", "the process that compiles it was ended twice (_geglu: SIGKILL)."),
    ],
)
def test_what_a_fork_could_not_compile_is_never_compiled_here(tmp_path, how, error, reason):
    found = play(how, tmp_path)
    done = found["done"]
    assert (done["compiled"], done["in_process"], done["failed"]) == (2, 2, 1)
    assert found["again"] == [0, 0]
    assert found["compiled here"] == []
    # The launch of that variant says why, and those of the others run.
    assert found["raised"] == [[128, error, reason]]
    assert found["launched"] == 12
    assert found["hook stays"]
    # What the compiler wrote is for those who ask for it.
    assert found["logged"]


def test_a_fork_that_was_killed_from_outside_is_no_proof(tmp_path):
    found = play("killed_once", tmp_path)
    done = found["done"]
    assert (done["compiled"], done["in_process"], done["failed"]) == (len(WIDTHS), len(WIDTHS), 0)
    assert (found["raised"], found["compiled here"], found["launched"]) == ([], [], 18)
    assert not found["hook stays"]


def test_a_cache_that_cannot_be_written_is_counted_not_raised(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    done = play("no_cache", blocked / "cache")
    assert (done["compiled"], done["in_process"], done["failed"]) == (0, 0, len(WIDTHS))


def test_only_the_blocks_own_thread_is_held_back_and_the_hook_before_it_comes_back(tmp_path):
    assert play("threads_and_hooks", tmp_path) == {
        "of another thread": 2,
        "their hook was asked": True,
        "skips launches": [True, False],
        "skips launches after it": False,
        "in the inner block": 1,
        "in the outer block": 1,
        "failed": 1,
        "hook is back": True,
        "the launch says": "CompilationError",
        "hook is back after an error": True,
        "one worker": [0, 4],
        "two blocks": {"first": 1, "second": 1},
        "hook is off": True,
    }


def test_kernels_of_other_projects_are_launched_as_ever(tmp_path):
    # An autotuner among them would take the time of launches that never were.
    assert play("foreign_kernel", tmp_path) == {"launched": [["_foreign", 0]], "compiled": 0}


def test_what_must_run_inside_a_block_is_launched(tmp_path):
    found = play("launching", tmp_path)
    assert found["skips within and after"] == [False, True]
    assert found["launched"] == ["_geglu", "_geglu"]
    assert found["noted"] == 2
    assert found["hook is off"]


def test_candidates_are_compiled_beside_a_search_those_first_that_a_picture_needs_most(tmp_path):
    found = play("beside", tmp_path)
    assert found["ready"] == [True, True, True, False]
    assert found["failed"] == [False, False, False, True]
    assert not found["unknown"]
    # One for each problem, the one that costs more before the other; then the rest in their order.
    assert found["first"][:3] == [128, 64, 256]
    assert found["compiled here"] == []
