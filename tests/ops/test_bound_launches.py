"""Launches that are bound, on a driver that compiles for a real GPU and notes what a launch would hand to it.

Each scenario is a process of its own: in this one, Triton may be interpreting kernels.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

pytest.importorskip("triton")


class NotingDriver:
    """Two gfx1100, on which every launch is noted with all that the launcher is given."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("hip", "gfx1100", 32)
        self.utils = self
        self.launched: list[tuple] = []
        self.streams = {0: 100, 1: 101}
        self.loaded = 0
        self.here = threading.local()

    def get_current_device(self):
        return getattr(self.here, "device", 0)

    def set_current_device(self, device):
        self.here.device = device

    def get_current_stream(self, device):
        return self.streams[device]

    def get_current_target(self):
        return self.target

    def get_device_properties(self, _device):
        return {"max_shared_mem": 65536}

    def load_binary(self, *_):
        self.loaded += 1
        return object(), self.loaded, 32, 0, 1024

    def unload_module(self, module):
        pass

    def launcher_cls(self, src, _metadata):
        def launch(x, y, z, stream, function, metadata, launch_metadata, entered, left, *arguments):
            # A tensor is what Triton hands over, an address what was bound.
            by = "triton" if any(hasattr(each, "data_ptr") for each in arguments) else "bound"
            addresses = [each.data_ptr() if hasattr(each, "data_ptr") else each for each in arguments]
            for hook in (entered, left):
                if hook is not None:
                    hook(launch_metadata)
            self.launched.append((by, (src.fn.__name__, (x, y, z), stream, function, metadata, addresses)))

        return launch

    def taken(self):
        """Of each launch since the last question: by whom, and everything else."""
        noted, self.launched = self.launched, []
        return noted

    def by(self):
        return [by for by, _ in self.taken()]


def prepared():
    from triton.runtime import driver

    noting = NotingDriver()
    driver.set_active(noting)
    return noting


def image(*shape):
    import torch

    return torch.empty(shape, dtype=torch.half).to(memory_format=torch.channels_last)


def calls():
    """(op, arguments, config): every launcher that binds, in as many kernels as it has."""
    import torch

    from rocm_sd.kernels.configs.conv2d import Conv2dConfig
    from rocm_sd.kernels.configs.group_norm_silu import GroupNormSiluConfig
    from rocm_sd.kernels.configs.linear_residual import LinearResidualConfig
    from rocm_sd.ops import OPS

    def half(*shape):
        return torch.empty(shape, dtype=torch.half)

    x, bias, two_passes = image(1, 64, 8, 8), half(64), GroupNormSiluConfig(whole_elements=0)
    norm = (x, 8, half(128), half(128), half(1, 128), 1e-5, True, image(1, 64, 8, 8))
    alone = (x, 8, bias, None, None, 1e-5, False, None)
    conv2d = (x, image(64, 64, 3, 3), bias, half(1, 64), image(1, 64, 8, 8), 1, 1, None)
    shortcut = (x, image(64, 128, 1, 1), bias, None, None, 1, 0, image(1, 64, 8, 8))
    given = [
        ("geglu", (half(4, 256), half(256)), None),
        ("layer_norm_residual", (half(4, 64), half(4, 64), bias, bias, 1e-5), None),
        ("layer_norm_residual", (half(4, 64), None, bias, None, 1e-5), None),
        ("group_norm_silu", norm, two_passes),
        ("group_norm_silu", alone, None),
        ("linear_geglu", (half(32, 64), half(256, 64), half(256)), None),
        ("linear_residual", (half(32, 64), half(64, 64), bias, half(32, 64)), LinearResidualConfig(split_k=2)),
        ("conv2d", conv2d, Conv2dConfig(split_k=2)),
        ("conv2d", shortcut, None),
        ("upsample", (x, 2, "nearest"), None),
        ("upsample_conv2d", (x, half(64, 64, 3, 3), bias, None), None),
    ]
    return [(name, arguments, config or OPS[name].own["triton"].default) for name, arguments, config in given]


def scenario_arguments():
    """Each launch twice, of the same tensors: the second must hand over what Triton does."""
    from rocm_sd.kernels.triton.bound import Bound
    from rocm_sd.ops import OPS

    noting, once = prepared(), Bound.__call__

    def twice(bound, *tensors):
        once(bound, *tensors)
        once(bound, *tensors)

    Bound.__call__ = twice
    found = []
    for name, arguments, config in calls():
        OPS[name].own["triton"].bind(*arguments, config=config)(*arguments)
        noted = noting.taken()
        first, second = noted[::2], noted[1::2]
        kernels = [rest[0] for _, rest in first]
        by = sorted({by for by, _ in first}), sorted({by for by, _ in second})
        found.append((name, kernels, *by, [rest for _, rest in first] == [rest for _, rest in second]))
    return found


def scenario_kept():
    """By op: how many of the first call's tensors somebody still has, and whether the variant is still loaded."""
    import torch

    from rocm_sd.kernels.triton import geglu
    from rocm_sd.ops import OPS

    noting, found = prepared(), []
    unloaded = []
    noting.unload_module = unloaded.append
    held = []
    for number in range(len(calls())):
        name, arguments, config = calls()[number]
        bound = OPS[name].own["triton"].bind(*arguments, config=config)
        bound(*arguments)
        bound(*arguments)
        held.append(bound)
        refs = [weakref.ref(each) for each in arguments if isinstance(each, torch.Tensor)]
        del arguments
        gc.collect()
        found.append((name, sum(each() is not None for each in refs)))
    geglu._geglu.device_caches.clear()
    gc.collect()
    return {"tensors": found, "unloaded": len(unloaded)}


def bound_geglu():
    import torch

    from rocm_sd.kernels.configs.geglu import GegluConfig
    from rocm_sd.kernels.triton.geglu import bind

    x, y = torch.empty((4, 256), dtype=torch.half), torch.empty((4, 128), dtype=torch.half)
    return bind(x, None, 0, GegluConfig(block_f=128, rows=1, warps=1)), (x, None, None, y)


def scenario_unusual():
    import torch
    from triton import knobs

    from rocm_sd.kernels.triton import geglu

    noting, found = prepared(), {}
    launch, given = bound_geglu()
    launch(*given)
    launch(*given)
    _, (_, (*_, function, _, _)) = noting.launched
    found["usual"] = noting.by()
    apart = torch.empty(4 * 256 + 1, dtype=torch.half)[1:].view(4, 256)
    launch(apart, *given[1:])
    launch(apart, *given[1:])
    (_, (*_, other, _, _)), _ = noting.launched
    found["not aligned"] = [*noting.by(), other == function]
    heard = []
    knobs.runtime.launch_enter_hook.add(heard.append)
    launch(*given)
    knobs.runtime.launch_enter_hook.remove(heard.append)
    knobs.runtime.launch_exit_hook.add(heard.append)
    launch(*given)
    knobs.runtime.launch_exit_hook.remove(heard.append)
    before = geglu._geglu.pre_run_hooks
    before.append(lambda *_, **__: heard.append("before"))
    launch(*given)
    before.clear()
    launch(*given)
    found["hooks"] = [*noting.by(), len(heard)]
    noting.streams[0] = 200
    launch(*given)
    found["another stream"] = [(by, rest[2]) for by, rest in noting.taken()]

    def on_the_other_device():
        noting.set_current_device(1)
        launch(*given)
        launch(*given)

    thread = threading.Thread(target=on_the_other_device)
    thread.start()
    thread.join()
    found["another device"] = [(by, rest[2], rest[3] == function) for by, rest in noting.taken()]
    launch(*given)
    found["and back"] = [(by, rest[2], rest[3] == function) for by, rest in noting.taken()]
    return found


def scenario_precompiled():
    from rocm_sd.kernels.triton import precompile

    noting, found = prepared(), {}
    precompile._cores = lambda: 2
    precompile.start = lambda: None
    launch, given = bound_geglu()
    with precompile.precompiling(2) as done:
        launch(*given)
        launch(*given)
        found["inside"] = noting.by()
    found["compiled"] = done.compiled
    launch(*given)
    launch(*given)
    found["after"] = noting.by()
    with precompile.precompiling(2):
        launch(*given)
    found["inside again"] = noting.by()
    return found


def scenario_another_triton():
    from rocm_sd.kernels import triton as kernels
    from rocm_sd.kernels.triton import bound

    noting = prepared()
    bound._LAUNCH = "kernel.run(grid, everything)"
    bound._is_known.cache_clear()
    launch, given = bound_geglu()
    for _ in range(3):
        launch(*given)
    return {"by": noting.by(), "bound": kernels.bind_op("geglu", given[0], None, 0, None) is not None}


class Launcher:
    """As those of Triton 3.4 to 3.6: a part in Python, and one in C that is handed more."""

    profile_scratch_size = 0

    def __init__(self, noted):
        self.launch = lambda *given: noted.append(given)
        self.cooperative = "cooperative"
        self.calls = 0

    def __call__(self, x, y, z, stream, function, *rest):
        self.calls += 1
        self.launch(self.cooperative, x, y, z, stream, function, "scratch", *rest)


class Scratch(Launcher):
    profile_scratch_size = 16


class Nested(Launcher):
    def __call__(self, x, y, z, stream, function, metadata, *rest):
        self.calls += 1
        self.launch(x, y, z, stream, function, metadata, rest)


class Curious(Launcher):
    def __call__(self, x, y, z, stream, *rest):
        self.calls += 1
        self.launch(x, y, z, int(stream), *rest)


def scenario_launchers():
    """By class: how often its part in Python was called in five launches, and whether all came out alike."""
    from rocm_sd.kernels.triton import geglu

    noting, found = prepared(), {}
    for kind in (Launcher, Scratch, Nested, Curious):
        noted, made = [], []

        def launcher_cls(_src, _metadata, kind=kind, noted=noted, made=made):
            made.append(kind(noted))
            return made[-1]

        noting.launcher_cls = launcher_cls
        geglu._geglu.device_caches.clear()
        launch, given = bound_geglu()
        for _ in range(5):
            launch(*given)
        handed_on = [numbers_of(one) for one in noted]
        reached = {given[0].data_ptr(), given[3].data_ptr()} <= set(handed_on[0])
        found[kind.__name__] = (made[0].calls, len(noted), reached and all(one == handed_on[0] for one in handed_on))
    return found


def numbers_of(given):
    """Numbers, words and addresses, in order: not the hooks and the metadata for them, which Triton alone hands on."""
    inside = [each for one in given for each in (one if isinstance(one, tuple) else (one,))]
    addresses = [each.data_ptr() if hasattr(each, "data_ptr") else each for each in inside]
    return [each for each in addresses if isinstance(each, (int, float, str))]


def play(name: str, cache: Path):
    code = f"import json, test_bound_launches as own; print(json.dumps(own.scenario_{name}()))"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_a_bound_launch_hands_over_what_triton_does(tmp_path):
    found = play("arguments", tmp_path)
    kernels = [kernel for _, names, *_ in found for kernel in names]
    # In several kernels where the op has them, and every kernel that is ever bound.
    assert {"_moments", "_fold", "_apply", "_whole", "_product", "_conv2d", "_finish"} <= set(kernels)
    assert kernels.count("_apply") == kernels.count("_moments") == 2
    for op, names, first, second, same in found:
        assert names, op
        assert (first, second, same) == (["triton"], ["bound"], True), op


def test_no_tensor_is_kept_and_the_variant_is(tmp_path):
    found = play("kept", tmp_path)
    assert [name for name, kept in found["tensors"] if kept] == []
    assert len(found["tensors"]) > 8
    assert found["unloaded"] == 0


def test_triton_launches_what_is_unusual(tmp_path):
    found = play("unusual", tmp_path)
    assert found["usual"] == ["triton", "bound"]
    # Its variant is another one.
    assert found["not aligned"] == ["triton", "triton", False]
    # Heard of once each; the launch after them is bound again.
    assert found["hooks"] == ["triton", "triton", "triton", "bound", 3]
    assert found["another stream"] == [["bound", 200]]
    # Of a launch that was bound on the first device nothing is used on the second, nor the other way round.
    assert found["another device"] == [["triton", 101, False]] * 2
    assert found["and back"] == [["bound", 200, True]]


def test_what_is_only_noted_is_not_launched_and_not_bound(tmp_path):
    found = play("precompiled", tmp_path)
    assert (found["inside"], found["compiled"]) == ([], 1)
    assert found["after"] == ["triton", "bound"]
    assert found["inside again"] == ["bound"]


def test_a_triton_whose_launchers_are_not_known_launches_for_itself(tmp_path):
    assert play("another_triton", tmp_path) == {"by": ["triton"] * 3, "bound": False}


def test_the_part_in_python_of_a_launcher_is_left_out_where_it_only_hands_on(tmp_path):
    # The first launch is Triton's own; of the others none goes through Python where that is known to do nothing.
    assert play("launchers", tmp_path) == {
        "Launcher": [1, 5, True],
        "Scratch": [5, 5, True],
        "Nested": [5, 5, True],
        "Curious": [5, 5, True],
    }
