"""compile_for(arch, kernel, config) -> CodeObject: AMD machine code on a box with no AMD GPU and no ROCm.

Kernels are compiled by the Triton of the `verify` extra, in worker processes. What was compiled once is kept under the
cache folder, by content: the kernel's source with all that it calls, the architecture, the types and the options.
ROCM_SD_CACHE names another folder. HIP sources have a compiler of their own: `kernels.hip.toolchain`.
"""

from __future__ import annotations

import atexit
import base64
import hashlib
import importlib
import importlib.util
import sys
import tempfile
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocm_sd import arch as archs
from rocm_sd import workers
from rocm_sd.errors import RocmSdError, Unsupported, optional_module
from rocm_sd.kernels import code_cache
from rocm_sd.verify.code_object import CodeObject

if TYPE_CHECKING:
    from types import FunctionType, ModuleType

    from rocm_sd.arch import Arch

__all__ = ["CompilationFailed", "KernelConfig", "assemble", "compile_for", "pool", "targets"]

TIMEOUT_S = 180.0  # the slowest kernel met, head size 512 with 1023 spills, took 9 s on one core

Constant = int | float | str | None


class CompilationFailed(RocmSdError):
    """The compiler refused the kernel, crashed, or did not end: this candidate is lost, the others are not."""


@dataclass(frozen=True)
class KernelConfig:
    """What Triton compiles for: the type of each argument, the constants, and what is known of the values.

    `signature`: name to "*fp16", "i32", "fp32" ... for each argument that is not a constant.
    `attributes`: name to Triton's letters, D (divisible by 16) and S (a tensor below 2 GB: buffer instructions).
    """

    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Constant], ...] = ()
    attributes: tuple[tuple[str, str], ...] = ()
    num_warps: int = 4
    num_stages: int = 2
    options: tuple[tuple[str, Constant], ...] = ()


@dataclass(frozen=True)
class _Request:
    """A kernel by name, so that a process in which it is not an interpreted function can import it."""

    arch: str
    module: str
    file: str
    function: str
    config: KernelConfig
    cache: str = field(default_factory=lambda: str(code_cache.folder()))


@cache
def pool(*, interpret: bool, size: int | None = None) -> workers.Pool:
    """The pool of this process that compiles for AMD GPUs, or the one that runs Triton's interpreter: never both.

    It has as many workers as there are cores, or as are asked for.
    """
    environment = {
        "TRITON_INTERPRET": "1" if interpret else None,
        # Workers on all cores: threads inside them would only wait for one another.
        "OMP_NUM_THREADS": "1",
        "TRITON_DEFAULT_FP_FUSION": "1",
        "TRITON_ALWAYS_COMPILE": "1",
    }
    made = workers.Pool(size, environment, folder="TRITON_CACHE_DIR")
    atexit.register(made.close)
    return made


def targets() -> tuple[Arch, ...]:
    """Every AMD architecture of the table that Triton accepts."""
    return tuple(a for a in archs.ARCHS.values() if a.vendor is archs.Vendor.AMD and a.triton_supported)


def compile_for(arch: Arch | str, kernel: Any, config: KernelConfig) -> CodeObject:
    """Machine code of a triton.jit function (compiled or interpreted in this process: its source is what counts)."""
    request = _named(arch, kernel, config)
    try:
        if workers.inside():
            return _loaded(Path(compile_request(request)))
        return _loaded(Path(pool(interpret=False).submit(compile_request, request, timeout=TIMEOUT_S).result()))
    except workers.WorkerFailed as error:
        reason = f"Compiling {request.function} of {Path(request.file).name} for {request.arch}: {error.message}."
        raise CompilationFailed(reason, hint="Try a smaller tile, fewer stages or more warps.") from None


def _named(arch: Arch | str, kernel: Any, config: KernelConfig) -> _Request:
    known = archs.get(arch) if isinstance(arch, str) else arch
    if known not in targets():
        names = ", ".join(a.name for a in targets())
        raise Unsupported("The cross-compiler", f"{known.name}", hint=f"Triton accepts: {names}.")
    function: FunctionType = getattr(kernel, "fn", kernel)
    return _Request(known.name, function.__module__, function.__code__.co_filename, function.__qualname__, config)


def compile_request(request: _Request) -> str:
    """Compile in this process, or find the entry that an earlier compilation left."""
    triton = optional_module("triton", "triton", "verify")
    kernel = getattr(_module(request), request.function)
    if not hasattr(kernel, "cache_key"):
        raise Unsupported("The cross-compiler", f"{request.function}, which is not a triton.jit function here")
    from triton._C.libtriton import get_cache_invalidating_env_vars  # noqa: PLC0415

    # Triton's own switches, e.g. AMDGCN_USE_BUFFER_OPS, change the code too.
    switches = repr(sorted(get_cache_invalidating_env_vars().items()))
    parts = (triton.__version__, switches, kernel.cache_key, request.arch, repr(request.config))
    entry = code_cache.entry(parts, of=Path(request.cache))
    code_cache.kept(entry, lambda: _triton(request, kernel))
    return str(entry)


def _module(request: _Request) -> ModuleType:
    try:
        module = importlib.import_module(request.module)
        if getattr(module, "__file__", None) and Path(module.__file__ or "").samefile(request.file):
            return module
    except ImportError:
        pass  # a script or a test file: taken by its path below
    name = "_rocm_sd_kernels_" + hashlib.sha256(request.file.encode()).hexdigest()[:16]
    if name not in sys.modules:
        specification = importlib.util.spec_from_file_location(name, request.file)
        assert specification is not None
        assert specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


def _triton(request: _Request, kernel: Any) -> dict[str, Any]:
    import triton  # noqa: PLC0415 -- optional, and slow to import
    from triton.backends.amd.compiler import HIPBackend  # noqa: PLC0415
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    config, names = request.config, list(kernel.arg_names)
    signature, constants = dict(config.signature), dict(config.constants)
    missing = [name for name in names if name not in signature and name not in constants]
    if missing:
        raise Unsupported(request.function, f"a call without {', '.join(missing)}")
    source = ASTSource(
        kernel,
        signature={name: "constexpr" if name in constants else signature[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): HIPBackend.parse_attr(letters) for name, letters in config.attributes},
    )
    target = GPUTarget("hip", request.arch, archs.get(request.arch).wave_size)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, **dict(config.options)}
    compiled = triton.compile(source, target=target, options=options)
    elf = base64.b64encode(compiled.asm["hsaco"]).decode()
    return {"elf": elf, "assembly": compiled.asm["amdgcn"], "shared": compiled.metadata.shared}


def _loaded(entry: Path) -> CodeObject:
    body = code_cache.read(entry)
    if body is None:
        raise CompilationFailed(f"{entry} was removed or damaged while it was used.", hint="Run the command again.")
    code = CodeObject.from_elf(base64.b64decode(body["elf"]), body["assembly"])
    # Triton asks for its LDS at launch, so the code object's own figure is 0.
    return replace(code, lds=max(code.lds, body["shared"]))


def assemble(arch: Arch | str, assembly: str, *, lds: int = 0) -> CodeObject:
    """A code object of assembly text, e.g. of a kernel that was changed by hand."""
    amd = optional_module("triton._C.libtriton", "triton", "verify").amd
    assemble_amdgcn = optional_module("triton.backends.amd.compiler", "triton", "verify").assemble_amdgcn
    name = arch if isinstance(arch, str) else arch.name
    try:
        relocatable = assemble_amdgcn(assembly, name, "")
    except RuntimeError as error:
        raise CompilationFailed(f"The assembler refused the text for {name}: {error}.") from None
    with tempfile.TemporaryDirectory() as folder:
        source, linked = Path(folder) / "code.o", Path(folder) / "code.hsaco"
        source.write_bytes(relocatable)
        amd.link_hsaco(str(source), str(linked))
        code = CodeObject.from_elf(linked.read_bytes(), assembly)
    return replace(code, lds=max(code.lds, lds))
