"""Run the HIP kernels that need no matrix unit on an NVIDIA card: are they right on real hardware?

python benchmarks/hip_numerics.py --prepare FOLDER --arch sm_90        where clang is: needs no card
python benchmarks/hip_numerics.py --prepared FOLDER --out FILE.json    where the card is: needs no clang
python benchmarks/hip_numerics.py --out FILE.json                      where both are

The same sources as for AMD, through nvidia.hpp. Every small sample of every op runs twice, on memory that is NaN where
a kernel leaves it unwritten; the results must be as close to float64 as stock torch's are, and the same bits both
times. FILE.json has the machine, the versions, and a row for each sample. The exit code is 1 where anything fails.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rocm_sd import arch as archs
from rocm_sd.bench.machine import machine
from rocm_sd.kernels.hip import group_norm_silu, layer_norm_residual, layout_copy, toolchain, upsample
from rocm_sd.ops import OPS
from rocm_sd.ops.numerics import compare, in_float64, outputs

MANIFEST = "manifest.json"
_ENTRY = re.compile(r"\.entry (?P<name>\w+)\([^)]*\)\s*\.maxntid (?P<threads>\d+), 1, 1")


class WrongFolder(Exception):
    """A prepared folder that does not have what this run needs."""


def _layout_copy(launcher, x, channels_last):
    out = torch.empty_like(x, memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    layout_copy.launch(x, out, channels_last, launcher)
    return out


def _rows(x):
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _layer_norm_residual(launcher, x, residual, weight, bias, eps):
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    added, total = (None, None) if residual is None else (_rows(residual), torch.empty_like(y))
    C = x.shape[-1]
    layer_norm_residual.launch(
        _rows(x), added, y.view(-1, C), None if total is None else total.view(-1, C), weight, bias, eps,
        layer_norm_residual.LayerNormResidualConfig(), launcher,
    )  # fmt: skip
    return y, x if total is None else total


def _group_norm_silu(launcher, x, groups, weight, bias, add, eps, silu):
    out = torch.empty_like(x, memory_format=torch.channels_last)
    config, units = group_norm_silu.GroupNormSiluConfig(), launcher.arch.compute_units
    group_norm_silu.launch(x, out, groups, weight, bias, add, eps, silu, config, units, launcher)
    return out


def _upsample(launcher, x, scale, mode):
    N, C, H, W = x.shape
    out = x.new_empty((N, scale * H, scale * W, C)).permute(0, 3, 1, 2)
    upsample.launch(x, out, scale, mode, launcher)
    return out


RUN = {
    "layout_copy": _layout_copy,
    "layer_norm_residual": _layer_norm_residual,
    "group_norm_silu": _group_norm_silu,
    "upsample": _upsample,
}


def samples():
    return [(name, sample) for name in RUN for sample in OPS[name].verification.small]


def text_digest():
    """Of every source and header: PTX of other texts proves nothing about these."""
    digest = hashlib.sha256()
    for path in sorted([*toolchain.INCLUDE.rglob("*.hpp"), *toolchain.SOURCES.glob("*.hip")]):
        text = path.read_bytes()
        digest.update(path.name.encode() + len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()


def file_name(kernel):
    words = [kernel.source, *(f"{name}-{value}" for name, value in sorted(kernel.parameters))]
    return "_".join(words) + ".ptx"


class Collecting:
    """A `Launcher` that compiles what it is asked to run, on the CPU's tensors, and runs nothing."""

    def __init__(self, arch):
        self.arch = archs.get(arch)
        self.ptx = {}

    def launch(self, kernel, grid, arguments):  # noqa: ARG002 -- a launcher's signature
        name = file_name(kernel)
        if name not in self.ptx:
            self.ptx[name] = toolchain.compile_source(kernel.source, self.arch, dict(kernel.parameters)).elf.decode()


def compiled(arch, chosen):
    """PTX by file name for every kernel that the samples launch."""
    launcher = Collecting(arch)
    for name, sample in chosen:
        RUN[name](launcher, *sample.make(filled=False))
    return launcher.ptx


def prepare(folder, arch, chosen):
    ptx = compiled(arch, chosen)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in ptx.items():
        (folder / name).write_text(text)
    manifest = {
        "arch": arch,
        "compiler": toolchain.find_compiler().version.splitlines()[0],
        "sources": text_digest(),
        "files": sorted(ptx),
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


def read_prepared(folder):
    """(PTX by file name, the compiler that made it); refused where the texts here are others, or for another card."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError:
        raise WrongFolder(f"{folder} has no {MANIFEST}. Make it with --prepare {folder}.") from None
    if manifest["sources"] != text_digest():
        raise WrongFolder(f"{folder} was compiled from other sources. Make it anew with --prepare {folder}.")
    return {name: (folder / name).read_text() for name in manifest["files"]}, manifest


def threads_of(ptx, name):
    """The size of the workgroup, which is part of the kernel."""
    found = {match["name"]: int(match["threads"]) for match in _ENTRY.finditer(ptx)}
    return found[name]


def packed(arguments):
    """As the driver wants them: a place for each value. A tensor or None is a pointer."""
    values = []
    for argument in arguments:
        if argument is None or isinstance(argument, torch.Tensor):
            values.append(ctypes.c_void_p(None if argument is None else argument.data_ptr()))
        else:
            values.append(ctypes.c_int(argument) if isinstance(argument, int) else ctypes.c_float(argument))
    return values


class CudaLauncher:
    """A `Launcher` on torch's current device and stream, through NVIDIA's driver."""

    def __init__(self, ptx, arch):
        self.arch, self.launched = arch, []
        self._ptx, self._functions = ptx, {}
        self._driver = ctypes.CDLL("libcuda.so.1")
        # torch makes the device's context and keeps it current on this thread.
        torch.zeros(1, device="cuda")

    def _check(self, code, doing):
        if code:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"{doing}: {(text.value or b'unknown error').decode()} ({code})")

    def _function(self, kernel):
        key = (file_name(kernel), kernel.name)
        if key not in self._functions:
            if key[0] not in self._ptx:
                raise WrongFolder(f"{key[0]} was not prepared: the samples here are others. Prepare them anew.")
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            text = self._ptx[key[0]]
            image = text.encode() + b"\0"
            self._check(self._driver.cuModuleLoadData(ctypes.byref(module), image), f"loading {key[0]}")
            self._check(
                self._driver.cuModuleGetFunction(ctypes.byref(function), module, kernel.name.encode()), kernel.name
            )
            self._functions[key] = function, threads_of(text, kernel.name)
        return self._functions[key]

    def launch(self, kernel, grid, arguments):
        function, threads = self._function(kernel)
        values = packed(arguments)
        places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        code = self._driver.cuLaunchKernel(function, *grid, threads, 1, 1, 0, stream, places, None)
        self._check(code, f"launching {kernel.name}")
        self.launched.append(kernel.name)


class Poisoned(TorchDispatchMode):
    """What torch.empty and its kin hand out is NaN."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name  # noqa: SLF001 -- torch has no public name for it
        if "empty" in name and isinstance(result, torch.Tensor) and result.is_floating_point():
            result.fill_(float("nan"))
        return result


def same_bits(a, b):
    # As whole numbers: zero and minus zero are not the same.
    bits = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.view(bits), b.view(bits))


def try_sample(name, sample, launcher, device="cuda"):
    """One row: errors against float64 beside stock torch's, for each output."""
    op, arguments = OPS[name], sample.make(device)
    exact = [each.cpu() for each in outputs(op.verification.reference(*in_float64(arguments)))]
    stock = [each.cpu() for each in outputs(op.implementations[0].run(*arguments, config={}))]
    launcher.launched = []
    with Poisoned():
        first, second = (outputs(RUN[name](launcher, *arguments)) for _ in range(2))
    again = all(same_bits(a, b) for a, b in zip(first, second, strict=True))
    errors = [compare(a.cpu(), e, s) for a, e, s in zip(first, exact, stock, strict=True)]
    kernels = sorted(set(launcher.launched))
    told = [{**asdict(error), "allowed": error.allowed_largest, "allowed_rms": error.allowed_rms} for error in errors]
    good = again and all(error.ok for error in errors)
    return {"op": name, "sample": sample.name, "kernels": kernels, "errors": told, "same_bits": again, "ok": good}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="compile into this folder, and run nothing")
    parser.add_argument("--prepared", type=Path, metavar="FOLDER", help="run what was compiled into this folder")
    parser.add_argument("--arch", default="sm_90", choices=toolchain.NVIDIA_TARGETS, help="what --prepare compiles for")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results go")
    parser.add_argument("--op", action="append", choices=sorted(RUN), help="this one only; may be given again")
    options = parser.parse_args(arguments)
    chosen = [(name, sample) for name, sample in samples() if not options.op or name in options.op]
    if options.prepare:
        manifest = prepare(options.prepare, options.arch, chosen)
        print(
            f"{len(manifest['files'])} files of PTX for {options.arch} in {options.prepare}, by {manifest['compiler']}"
        )
        return 0
    if not torch.cuda.is_available() or torch.version.hip:
        print("There is no NVIDIA card that torch can use. Without one: --prepare FOLDER", file=sys.stderr)
        return 2
    here = archs.detect()
    try:
        if options.prepared:
            ptx, manifest = read_prepared(options.prepared)
        else:
            ptx = compiled(here.name, chosen)
            manifest = {"arch": here.name, "compiler": toolchain.find_compiler().version.splitlines()[0]}
        launcher = CudaLauncher(ptx, here)
        rows = [try_sample(name, sample, launcher) for name, sample in chosen]
    except WrongFolder as error:
        print(error, file=sys.stderr)
        return 2
    for row in rows:
        worst = max(row["errors"], key=lambda error: error["largest"] - error["allowed"])
        told = f"error {worst['largest']:.3g} of {worst['allowed']:.3g} allowed"
        told += "" if row["same_bits"] else ", other bits the second time"
        print(f"{'PASSED' if row['ok'] else 'FAILED'}  {row['op']}: {row['sample']}  {told}")
    if options.out:
        record = {
            "machine": asdict(machine(torch.device("cuda"))),
            "command": "python benchmarks/hip_numerics.py --prepared FOLDER --out FILE",
            "compiled_for": manifest["arch"],
            "compiler": manifest["compiler"],
            "sources": text_digest(),
            "rows": rows,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=2) + "\n")
    failed = sum(not row["ok"] for row in rows)
    print(f"{len(rows) - failed} of {len(rows)} passed on {torch.cuda.get_device_name()}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
