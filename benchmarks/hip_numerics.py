"""Run the HIP kernels that need no matrix unit on an NVIDIA card: are they right on real hardware?

python benchmarks/hip_numerics.py --prepare FOLDER --arch sm_90        where clang is: needs no card
python benchmarks/hip_numerics.py --prepared FOLDER --out FILE.json    where the card is: needs no clang
python benchmarks/hip_numerics.py --out FILE.json                      where both are

The same sources as for AMD, through nvidia.hpp, by the same loader, CUDA's driver in place of HIP's. Every small sample
of every op runs twice, on memory that is NaN where a kernel leaves it unwritten; the results must be as close to
float64 as stock torch's are, and the same bits both times. FILE.json has the machine, the versions, and a row for each
sample. The exit code is 1 where anything fails.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rocm_sd import arch as archs
from rocm_sd.bench.machine import machine
from rocm_sd.kernels import hip as hip_kernels
from rocm_sd.kernels.hip import conv2d_finish, row_moments, toolchain
from rocm_sd.kernels.hip.driver import CUDA, driver_for
from rocm_sd.kernels.hip.runtime import DeviceLauncher, TorchCard
from rocm_sd.numerics import compare, in_float64, outputs
from rocm_sd.ops import OPS
from rocm_sd.ops.samples import Sample, dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable

MANIFEST = "manifest.json"
# What multiplies no matrices; a case for each small sample and each config that takes another kernel.
OPS_WITHOUT_MATRICES = ("layout_copy", "layer_norm_residual", "group_norm_silu", "upsample")
NAMES = (*OPS_WITHOUT_MATRICES, "conv2d_finish", "row_moments")


class WrongFolder(Exception):
    """A prepared folder that does not have what this run needs."""


@dataclass(frozen=True)
class Case:
    """One call of a HIP kernel, its definition, and how stock torch does it. `run` asks dispatch for its launcher."""

    op: str
    sample: Sample
    run: Callable[..., Any]
    reference: Callable[..., Any]
    stock: Callable[..., Any]
    suffix: str = ""

    @property
    def name(self):
        return self.sample.name + self.suffix


def _of_op(name):
    op = OPS[name]
    hip = op.implementation("hip")
    for config in (hip.default, *hip.kernels.small_configs):
        suffix = "" if config == hip.default else f" with {config.to_dict()}"
        for sample in op.verification.small:
            run, stock = partial(hip, config=config), op.implementations[0]
            yield Case(name, sample, run, op.verification.reference, stock, suffix)


def _finish(parts, like, bias, add, residual):
    out = torch.empty_like(like, memory_format=torch.channels_last)
    conv2d_finish.launch(parts, out, bias, add, residual, out.shape[0], hip_kernels.launcher_for(like.device))
    return out


def _sum(parts, like, bias, add, residual):
    N, C, H, W = like.shape
    total = parts.sum(dim=0).view(N, H, W, C).permute(0, 3, 1, 2)
    for part in (None if bias is None else bias[:, None, None], None if add is None else add[:, :, None, None]):
        total = total if part is None else total + part
    return (total if residual is None else total + residual).to(like.dtype)


def _of_finish():
    """The second kernel of conv2d in parts: its first multiplies matrices."""
    for splits, shape, added, dtype in (
        (3, (2, 72, 5, 9), True, torch.float16),
        (2, (1, 17, 3, 4), True, torch.bfloat16),
        (16, (1, 64, 8, 8), False, torch.float16),
    ):

        def build(draw, splits=splits, shape=shape, added=added):
            N, C, H, W = shape
            rest = (draw(C), draw(N, C), draw.image(*shape)) if added else (None, None, None)
            return draw(splits, N * H * W, C, dtype=torch.float32), draw.image(*shape), *rest

        terms = "bias add residual" if added else "bare"
        name = f"{splits} parts of {'x'.join(map(str, shape))}, {terms}, {dtype_name(dtype)}"
        yield Case("conv2d_finish", Sample(name, dtype, build), _finish, _sum, _sum)


def _moments(x):
    found = row_moments.allocate(x, x.shape[1])
    row_moments.launch(x, found, hip_kernels.launcher_for(x.device))
    return found.data[:, 0].unbind(1)


def _mean_and_squares(x):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = wide.mean(dim=1)
    return mean, (wide - mean[:, None]).square().sum(dim=1)


def _of_moments():
    """What the transformer block knows of its input's rows."""
    for rows, columns, dtype in ((37, 320, torch.float16), (5, 77, torch.bfloat16), (3, 1280, torch.float16)):

        def build(draw, rows=rows, columns=columns):
            return (draw(rows, columns, mean=0.7, std=2.0),)

        name = f"{rows} rows of {columns}, {dtype_name(dtype)}"
        yield Case("row_moments", Sample(name, dtype, build), _moments, _mean_and_squares, _mean_and_squares)


def cases(names=NAMES):
    several = {name: partial(_of_op, name) for name in OPS_WITHOUT_MATRICES}
    several |= {"conv2d_finish": _of_finish, "row_moments": _of_moments}
    return [case for name in names for case in several[name]()]


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
    """PTX by file name for every kernel that the cases launch."""
    launcher = Collecting(arch)
    with hip_kernels.launched_by(launcher):
        for case in chosen:
            case.run(*case.sample.make(filled=False))
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


class Recording:
    """The loader, and the names of the kernels that it launched."""

    def __init__(self, launcher):
        self.arch, self.launched = launcher.arch, []
        self._launcher = launcher

    def launch(self, kernel, grid, arguments):
        self._launcher.launch(kernel, grid, arguments)
        self.launched.append(kernel.name)


def loader(ptx, arch, card, driver):
    """The project's own loader, with prepared PTX in place of its compilers."""

    def prepared(kernel, _arch):
        name = file_name(kernel)
        if name not in ptx:
            raise WrongFolder(f"{name} was not prepared: the samples here are others. Prepare them anew.")
        return ptx[name].encode()

    return Recording(DeviceLauncher(arch, card, driver, prepared))


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


def try_case(case, launcher, device="cuda"):
    """One row: errors against float64 beside stock torch's, for each output."""
    arguments = case.sample.make(device)
    exact = [each.cpu() for each in outputs(case.reference(*in_float64(arguments)))]
    stock = [each.cpu() for each in outputs(case.stock(*arguments))]
    launcher.launched = []
    with hip_kernels.launched_by(launcher), Poisoned():
        first, second = (outputs(case.run(*arguments)) for _ in range(2))
    again = all(same_bits(a, b) for a, b in zip(first, second, strict=True))
    errors = [compare(a.cpu(), e, s) for a, e, s in zip(first, exact, stock, strict=True)]
    kernels = sorted(set(launcher.launched))
    rows = [{**asdict(error), "allowed": error.allowed_largest, "allowed_rms": error.allowed_rms} for error in errors]
    good = again and all(error.ok for error in errors)
    return {"op": case.op, "sample": case.name, "kernels": kernels, "errors": rows, "same_bits": again, "ok": good}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="compile into this folder, and run nothing")
    parser.add_argument("--prepared", type=Path, metavar="FOLDER", help="run what was compiled into this folder")
    parser.add_argument("--arch", default="sm_90", choices=toolchain.NVIDIA_TARGETS, help="what --prepare compiles for")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results go")
    parser.add_argument("--op", action="append", choices=NAMES, help="this one only; may be given again")
    options = parser.parse_args(arguments)
    chosen = cases(options.op or NAMES)
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
        launcher = loader(ptx, here, TorchCard(torch.cuda.current_device()), driver_for(CUDA))
        rows = [try_case(case, launcher) for case in chosen]
    except WrongFolder as error:
        print(error, file=sys.stderr)
        return 2
    for row in rows:
        worst = max(row["errors"], key=lambda error: error["largest"] - error["allowed"])
        line = f"error {worst['largest']:.3g} of {worst['allowed']:.3g} allowed"
        line += "" if row["same_bits"] else ", other bits the second time"
        print(f"{'PASSED' if row['ok'] else 'FAILED'}  {row['op']}: {row['sample']}  {line}")
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
