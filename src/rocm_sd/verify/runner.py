"""Run an op's own Python launcher for an architecture that is not there.

    with emulated("rocm_sd.kernels.triton.group_norm_silu", "gfx1100") as run:
        y = op.implementation("triton").run(*arguments, config=config)     # torch tensors on the CPU
    run.require_written(y)

Inside, each kernel of the module is compiled for the architecture with the specialisation that Triton itself would
choose for these arguments, and executed by the emulator on the tensors' memory. Memory that torch.empty and its kin
hand out counts as unwritten until a kernel, or torch, writes it. `emulated_hip` does the same for an op's HIP
implementation, whose kernels clang compiles.
"""

from __future__ import annotations

import ctypes
import importlib
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rocm_sd import arch as archs
from rocm_sd.errors import Unsupported, optional_module
from rocm_sd.kernels import hip as hip_kernels
from rocm_sd.kernels.hip import toolchain
from rocm_sd.verify.code_object import CodeObject
from rocm_sd.verify.compiler import KernelConfig, compile_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import ModuleType

    from numpy.typing import NDArray

    from rocm_sd.arch import Arch
    from rocm_sd.kernels.hip.launch import Argument, Kernel
    from rocm_sd.verify.emulator import Buffer, Counters

    # The kernel, the grid, positional and named arguments.
    Launch = Callable[[Any, Any, tuple[Any, ...], Mapping[str, Any]], None]

__all__ = [
    "Call", "EmulatedLauncher", "ModuleKernels", "Run", "emulated", "emulated_hip", "facts_of", "grid_of", "hip_code",
    "memory_of", "scaled", "specialise", "total",
]  # fmt: skip

BUDGET = 50_000_000  # wave instructions a launch; 16 waves in an endless loop are given up after 20 s
_ALLOCATES = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided")
_OPTIONS = ("num_stages", "waves_per_eu", "matrix_instr_nonkdim", "kpack", "wgp_cu_mode", "enable_fp_fusion")


class _StandIn:
    """Stands where a triton.jit function stood: `kernel[grid](...)` goes to `launch`."""

    def __init__(self, kernel: Any, launch: Launch) -> None:
        self._kernel, self._launch = kernel, launch

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *positional, **named: self._launch(self._kernel, grid, positional, named)


class ModuleKernels:
    """The functions of `kind` in a module, by name."""

    def __init__(self, module: str | ModuleType, kind: type) -> None:
        self._module = importlib.import_module(module) if isinstance(module, str) else module
        self.kernels = {name: value for name, value in vars(self._module).items() if isinstance(value, kind)}

    @contextmanager
    def launched_by(self, launch: Launch) -> Iterator[None]:
        """Within, the module's own launchers call `launch`."""
        with self._with({name: _StandIn(kernel, launch) for name, kernel in self.kernels.items()}):
            yield

    @contextmanager
    def as_they_were(self) -> Iterator[None]:
        """Within, the module has its own kernels: they call one another through it, and compilers read them there."""
        with self._with(self.kernels):
            yield

    @contextmanager
    def _with(self, others: Mapping[str, Any]) -> Iterator[None]:
        before = {name: getattr(self._module, name) for name in self.kernels}
        vars(self._module).update(others)
        try:
            yield
        finally:
            vars(self._module).update(before)


@contextmanager
def facts_of(arch: Arch) -> Iterator[None]:
    """Within, `arch.device_facts` is that of the architecture's product."""
    facts = archs.DeviceFacts(arch.product or arch.name, arch, arch.compute_units, None, None)
    original = archs.device_facts

    def device_facts(device: object = None) -> archs.DeviceFacts:  # noqa: ARG001 -- the signature it stands for
        return facts

    archs.device_facts = device_facts
    try:
        yield
    finally:
        archs.device_facts = original


@dataclass(frozen=True)
class Call:
    """One launch of one kernel; `counters` is None where it was compiled only."""

    kernel: str
    grid: tuple[int, int, int]
    config: KernelConfig
    code: CodeObject
    counters: Counters | None


@dataclass(frozen=True)
class _Argument:
    name: str
    type: str
    value: Any


@cache
def _declared(function: Any) -> Any:
    """Triton's own reading of the function's parameters, whether or not this process interprets kernels."""
    from triton.runtime.jit import JITFunction  # noqa: PLC0415 -- optional

    return JITFunction(function)


def specialise(
    kernel: Any, positional: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[KernelConfig, list[_Argument]]:
    """By Triton's own code: 1 and None become constants; multiples of 16 and aligned pointers are marked."""
    from triton._C.libtriton import native_specialize_impl  # noqa: PLC0415 -- optional
    from triton.backends.amd.compiler import HIPBackend  # noqa: PLC0415

    declared = _declared(getattr(kernel, "fn", kernel))
    names = set(declared.arg_names)
    options = {name: value for name, value in named.items() if name not in names}
    warps = options.pop("num_warps", 4)
    stages = options.pop("num_stages", 2)
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise Unsupported(f"An emulated launch of {declared.__name__}", f"the option {', '.join(unknown)}")
    bound = declared.signature.bind(*positional, **{name: value for name, value in named.items() if name in names})
    bound.apply_defaults()
    signature, constants, attributes, arguments = {}, {}, {}, []
    for parameter in declared.params:
        name, value = parameter.name, bound.arguments[parameter.name]
        if parameter.is_constexpr:
            constants[name] = _constant(name, value)
            continue
        type_, known = native_specialize_impl(
            HIPBackend,
            value,
            parameter.is_const,
            not parameter.do_not_specialize,
            not parameter.do_not_specialize_on_alignment,
        )
        if parameter.annotation_type:
            type_ = parameter.annotation_type
        if type_ == "constexpr":
            constants[name] = known
            continue
        signature[name] = type_
        if known:
            attributes[name] = known
        arguments.append(_Argument(name, type_, value))
    config = KernelConfig(
        tuple(signature.items()),
        tuple(constants.items()),
        tuple(attributes.items()),
        warps,
        stages,
        tuple(options.items()),
    )
    return config, arguments


def _constant(name: str, value: Any) -> Any:
    plain = getattr(value, "value", value)
    if plain is not None and not isinstance(plain, (bool, int, float, str)):
        raise Unsupported("An emulated launch", f"the constant {name} of type {type(plain).__name__}")
    return plain


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Which bytes of which storage hold a value: none after torch.empty, all after any other operation of torch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known: dict[int, NDArray[np.bool_]] = {}
        # A storage that is freed would hand its address, and so its record, to another.
        self.alive: list[torch.UntypedStorage] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name  # noqa: SLF001 -- torch has no public name for it
        if name in _ALLOCATES and isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            self.alive.append(storage)
            self.known[storage.data_ptr()] = np.zeros(storage.nbytes(), bool)
        for place, argument in enumerate(func._schema.arguments):  # noqa: SLF001
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._mark(args[place] if place < len(args) else (kwargs or {}).get(argument.name))
        return result

    def _mark(self, tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() in self.known:
            start, end = _extent(tensor)
            self.known[tensor.untyped_storage().data_ptr()][start:end] = True

    def of(self, tensor: torch.Tensor) -> NDArray[np.bool_] | None:
        """The record of the bytes that the tensor spans, shared with every tensor on that storage; None: all known."""
        record = self.known.get(tensor.untyped_storage().data_ptr())
        start, end = _extent(tensor)
        return None if record is None else record[start:end]


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last byte, the latter excluded, that the tensor spans in its storage."""
    start = int(tensor.storage_offset())
    last = start + sum((int(size) - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start * tensor.element_size(), (last + 1) * tensor.element_size() if tensor.numel() else 0


def memory_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """The tensor's memory, not a copy of it."""
    start, end = _extent(tensor)
    # Through the address: any function of torch that makes a view would count as a write here.
    first = ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_uint8))
    array: NDArray[np.uint8] = np.ctypeslib.as_array(first, (end - start,))
    return array


@dataclass
class Run:
    """What was launched inside an `emulated` block."""

    arch: Arch
    execute: bool
    edit: Callable[[CodeObject], CodeObject] | None = None
    budget: int = BUDGET
    calls: list[Call] = field(default_factory=list)
    _allocations: _Allocations = field(default_factory=_Allocations)
    _kernels: ModuleKernels | None = None

    def launch(self, kernel: Any, grid: Any, positional: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        config, arguments = specialise(kernel, positional, named)
        with self._kernels.as_they_were() if self._kernels else nullcontext():
            code = compile_for(self.arch, kernel, config)
        code = self.edit(code) if self.edit else code
        size = grid_of(grid, dict(config.constants) | {a.name: a.value for a in arguments})
        self._record(code, size, config, arguments)

    def launch_code(self, code: CodeObject, grid: tuple[int, int, int], values: Sequence[Any]) -> None:
        """As `launch`, of machine code that is there: of another language than Triton's."""
        self._record(self.edit(code) if self.edit else code, grid, KernelConfig(()), self.named(values))

    @staticmethod
    def named(values: Sequence[Any]) -> list[_Argument]:
        """Arguments of a kernel that has no names for them."""
        return [_Argument(f"argument {place}", "", value) for place, value in enumerate(values)]

    def _record(
        self, code: CodeObject, grid: tuple[int, int, int], config: KernelConfig, arguments: list[_Argument]
    ) -> None:
        counters = self.executed(code, grid, arguments) if self.execute else None
        self.calls.append(Call(code.name, grid, config, code, counters))

    def executed(
        self, code: CodeObject, grid: tuple[int, int, int], arguments: list[_Argument], only: range | None = None
    ) -> Counters:
        """On the tensors' memory; `only`: these workgroups of the grid, by default all."""
        from rocm_sd.verify.emulator import launch  # noqa: PLC0415 -- needs tinygrad

        buffers: dict[tuple[int, int], Buffer] = {}
        values = [self._value(argument, buffers) for argument in arguments]
        # Triton appends pointers to scratch memory that a kernel without device-side tensor maps does not use.
        visible = sum(not argument.is_hidden for argument in code.arguments)
        values += [0] * (visible - len(values))
        return launch(code, grid, values, budget=self.budget, only=only)

    def _value(self, argument: _Argument, buffers: dict[tuple[int, int], Buffer]) -> Any:
        from rocm_sd.verify.emulator import Buffer  # noqa: PLC0415 -- needs tinygrad

        if not isinstance(argument.value, torch.Tensor):
            return argument.value
        tensor = argument.value
        key = (tensor.data_ptr(), _extent(tensor)[1] - _extent(tensor)[0])
        if key not in buffers:
            buffers[key] = Buffer(memory_of(tensor), argument.name, known=self._allocations.of(tensor))
        return buffers[key]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within, it is known which memory was written, and `arch.device_facts` is that of the product."""
        with facts_of(self.arch), self._allocations:
            yield

    def require_written(self, *outputs: torch.Tensor) -> None:
        """Raise where a result has bytes that no kernel wrote."""
        from rocm_sd.verify.emulator import UnwrittenOutput  # noqa: PLC0415 -- needs tinygrad

        for number, tensor in enumerate(outputs):
            known = self._allocations.of(tensor)
            if known is not None and not known.all():
                missing = np.flatnonzero(~known)
                raise UnwrittenOutput(
                    f"{len(missing)} of {known.size} bytes of output {number} were never written, the first at offset "
                    f"{int(missing[0])}.",
                    hint="Look for a mask or a grid that misses the tail.",
                )


def grid_of(grid: Any, constants: Mapping[str, Any]) -> tuple[int, int, int]:
    sizes = grid(constants) if callable(grid) else grid
    x, y, z = (*((sizes,) if isinstance(sizes, int) else sizes), 1, 1)[:3]
    return int(x), int(y), int(z)


def scaled(counters: Counters, times: int) -> Counters:
    """What so many workgroups like the counted ones would count."""
    made = replace(counters)
    for entry in fields(made):
        value = getattr(made, entry.name)
        if isinstance(value, dict):
            setattr(made, entry.name, {name: count * times for name, count in value.items()})
        elif isinstance(value, int) and entry.name != "wave_size":
            setattr(made, entry.name, value * times)
    return made


def total(counters: Iterable[Counters]) -> Counters:
    """The counts of several launches on one architecture, added up."""
    first, *rest = counters
    sums = replace(first, by_class=dict(first.by_class), by_name=dict(first.by_name))
    for each in rest:
        for entry in fields(sums):
            value, more = getattr(sums, entry.name), getattr(each, entry.name)
            if isinstance(value, dict):
                for name, count in more.items():
                    value[name] = value.get(name, 0) + count
            elif isinstance(value, (int, float)) and entry.name != "wave_size":
                setattr(sums, entry.name, value + more)
    return sums


@contextmanager
def emulated(
    module: str | ModuleType,
    arch: Arch | str,
    *,
    execute: bool = True,
    edit: Callable[[CodeObject], CodeObject] | None = None,
    budget: int = BUDGET,
) -> Iterator[Run]:
    """For the duration, the module's kernels run for `arch`, and `arch.device_facts` is that of its product.

    With `execute=False` they are compiled and listed only: outputs stay unwritten. `edit` changes the machine code
    after it is compiled, which is how it is shown that the emulator notices. `budget` is wave instructions a launch.
    """
    kernels = ModuleKernels(module, optional_module("triton.runtime.jit", "triton", "verify").KernelInterface)
    run = Run(archs.get(arch) if isinstance(arch, str) else arch, execute, edit, budget, _kernels=kernels)
    with kernels.launched_by(run.launch), run.watching():
        yield run


class EmulatedLauncher:
    """A `Launcher` that compiles for any architecture, and executes on the tensors' memory; `run` has the calls."""

    def __init__(self, arch: Arch | str, *, execute: bool = True, budget: int = BUDGET) -> None:
        self.arch = archs.get(arch) if isinstance(arch, str) else arch
        self.run = Run(self.arch, execute, budget=budget)

    def launch(self, kernel: Kernel, grid: tuple[int, int, int], arguments: Sequence[Argument]) -> None:
        self.run.launch_code(hip_code(kernel, self.arch), grid, arguments)


def hip_code(kernel: Kernel, arch: Arch) -> CodeObject:
    compiled = toolchain.compile_source(kernel.source, arch, dict(kernel.parameters))
    return _code_object(compiled.elf, compiled.assembly, kernel.name)


_code_object = lru_cache(maxsize=64)(CodeObject.from_elf)


@contextmanager
def emulated_hip(arch: Arch | str, *, execute: bool = True, budget: int = BUDGET) -> Iterator[Run]:
    """For the duration, HIP kernels run for `arch`. With `execute=False` they are compiled and listed only."""
    launcher = EmulatedLauncher(arch, execute=execute, budget=budget)
    with hip_kernels.launched_by(launcher), launcher.run.watching():
        yield launcher.run
