"""What a machine is: its GPUs, its torch, its packages and the environment variables that matter. No measurement.

Facts are read from the machine (`reading.gather`) or from a folder that another machine wrote (`recording.load`), and
the checks cannot tell which.
"""

from __future__ import annotations

import re
from collections.abc import Mapping  # noqa: TC003 -- read at run time, with the other types of the dataclasses
from dataclasses import dataclass, field

from rocm_sd import arch

__all__ = ["WATCHED", "Facts", "Gpu", "TorchDevice", "TorchFacts", "known_as", "numbers", "visible_to_torch"]

# The environment variables that a check looks at, and the only ones that are kept. None of them holds a path; of CC and
# PATH the name of a compiler is kept.
WATCHED = (
    "AMD_SERIALIZE_KERNEL",
    "CUDA_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "GPU_MAX_HW_QUEUES",
    "GPU_PINNED_MIN_XFER_SIZE",
    "HIPBLASLT_WORKSPACE_SIZE",
    "HIP_VISIBLE_DEVICES",
    "HSA_ENABLE_DXG_DETECTION",
    "HSA_ENABLE_SDMA",
    "HSA_OVERRIDE_GFX_VERSION",
    "HSA_XNACK",
    "MIOPEN_DEBUG_CONV_DIRECT_NAIVE_CONV_FWD",
    "MIOPEN_DEBUG_CONV_GEMM",
    "MIOPEN_DEBUG_CONV_WINOGRAD",
    "MIOPEN_DISABLE_CACHE",
    "MIOPEN_FIND_ENFORCE",
    "MIOPEN_FIND_MODE",
    "MIOPEN_NAIVE_DISABLE_IF_ALT",
    "MIOPEN_WORKSPACE_MAX",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_MIOPEN_SUGGEST_NHWC",
    "PYTORCH_MIOPEN_SUGGEST_NHWC_BATCHNORM",
    "PYTORCH_NO_HIP_MEMORY_CACHING",
    "PYTORCH_TUNABLEOP_ENABLED",
    "PYTORCH_TUNABLEOP_HIPBLASLT_ENABLED",
    "PYTORCH_TUNABLEOP_TUNING",
    "ROCR_VISIBLE_DEVICES",
    "TORCH_BLAS_PREFER_HIPBLASLT",
    "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL",
    "TRITON_INTERPRET",
)


@dataclass(frozen=True)
class Gpu:
    """A GPU as the kernel lists it. `index` is its place in that list, which HIP_VISIBLE_DEVICES counts in.

    `gfx` is the real one, whatever HSA_OVERRIDE_GFX_VERSION says; sizes are in bytes, and None is what is not known.
    """

    index: int
    vendor: str
    name: str | None = None
    gfx: str | None = None
    integrated: bool | None = None
    compute_units: int | None = None
    vram_total: int | None = None
    vram_free: int | None = None
    gtt_total: int | None = None
    pci_address: str | None = None


@dataclass(frozen=True)
class TorchDevice:
    """A GPU as torch lists it; `gfx` is what torch builds for, an override included, and None on NVIDIA."""

    name: str
    gfx: str | None = None
    integrated: bool | None = None
    total: int | None = None
    free: int | None = None
    pci_address: str | None = None


@dataclass(frozen=True)
class TorchFacts:
    """`version` None: torch is not installed. `error`: why torch could not be asked about its GPUs.

    `wants_triton` is the Triton that torch's own package asks for, as pip writes it: "pytorch-triton-rocm==3.5.1".
    """

    version: str | None = None
    hip: str | None = None
    cuda: str | None = None
    arch_list: tuple[str, ...] = ()
    devices: tuple[TorchDevice, ...] = ()
    wants_triton: str | None = None
    error: str | None = None

    @property
    def build(self) -> str:
        if self.version is None:
            return "none"
        return "rocm" if self.hip else "cuda" if self.cuda else "cpu"


@dataclass(frozen=True)
class Facts:
    """One machine. `described_by` are the reports that a recorded one was written from.

    `c_compiler` is the name of the one that Triton would take, "" where there is none; `python_header`: whether
    Python.h is there. None is what was not looked for.
    """

    system: str
    python: str
    kernel: str | None = None
    rocm: str | None = None
    miopen: str | None = None
    memory_total: int | None = None
    gpus: tuple[Gpu, ...] = ()
    torch: TorchFacts = field(default_factory=TorchFacts)
    packages: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    c_compiler: str | None = None
    python_header: bool | None = None
    described_by: tuple[str, ...] = ()

    @property
    def listed_amd(self) -> tuple[Gpu, ...]:
        """As the kernel lists them: nothing hides any of these."""
        return tuple(gpu for gpu in self.gpus if gpu.vendor == "amd")

    @property
    def amd(self) -> tuple[Gpu, ...]:
        """As the kernel lists them; where it lists none (WSL2, Windows), as torch does."""
        listed = self.torch.devices if self.torch.build == "rocm" else ()
        return self.listed_amd or tuple(_as_torch_lists(device, index) for index, device in enumerate(listed))

    @property
    def cards(self) -> tuple[Gpu, ...]:
        """AMD GPUs that are not part of the processor."""
        return tuple(gpu for gpu in self.amd if gpu.integrated is False)

    @property
    def used(self) -> Gpu | None:
        """The GPU that a program gets which asks for none by number; None where that is not known."""
        if self.torch.devices:
            return _as_the_kernel_lists(self.torch.devices[0], self)
        return next(iter(visible_to_torch(self) or self.amd), None)

    @property
    def meant(self) -> Gpu | None:
        """The AMD GPU that should draw: the card with the most compute units, or else the processor's own.

        None where an NVIDIA GPU draws, or should because the only AMD GPU is part of the processor.
        """
        nvidia = any(gpu.vendor == "nvidia" for gpu in self.gpus)
        if self.torch.build == "cuda" and self.torch.devices:
            return None
        if nvidia and not self.cards and self.torch.build != "rocm":
            return None
        return max(self.cards or self.amd, key=lambda gpu: gpu.compute_units or 0, default=None)

    def called(self, gpu: Gpu) -> str:
        """Its product name where torch has it; the kernel knows the chip's name alone."""
        of_torch = (
            each.name for each in self.torch.devices if each.pci_address and each.pci_address == gpu.pci_address
        )
        return next(of_torch, None) or gpu.name or gpu.gfx or f"the {gpu.vendor.upper()} GPU"

    @property
    def gfx(self) -> str | None:
        """The real gfx of the GPU in use."""
        return self.used.gfx if self.used else None

    @property
    def arch(self) -> arch.Arch | None:
        """The table's entry of the GPU in use: the kernel knows no names of NVIDIA's, so None there."""
        return arch.get(self.gfx) if self.gfx else None


def known_as(gfx: str) -> arch.Arch:
    """The table's entry. The rest of RDNA2 has the instructions of gfx1030, and no entry of its own."""
    return arch.get("gfx1030" if gfx.startswith("gfx103") else gfx)


def numbers(version: str | None) -> tuple[int, ...]:
    """The version 2.9.1+rocm7.1 as (2, 9, 1); what is not known is (), which is before every version."""
    found = re.match(r"\d+(?:\.\d+)*", version or "")
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def visible_to_torch(facts: Facts) -> tuple[Gpu, ...]:
    """What ROCR_VISIBLE_DEVICES and then HIP_VISIBLE_DEVICES leave of the AMD GPUs, in their order.

    ROCm reads CUDA_VISIBLE_DEVICES where HIP_VISIBLE_DEVICES is not set. A list ends at its first entry that names no
    GPU, as in the runtime itself. An entry that is no number is a GPU's serial number, which is never recorded.
    """
    left = facts.listed_amd
    environment = facts.environment
    for value in (
        environment.get("ROCR_VISIBLE_DEVICES"),
        environment.get("HIP_VISIBLE_DEVICES", environment.get("CUDA_VISIBLE_DEVICES")),
    ):
        if value is None:
            continue
        named = []
        for entry in value.split(","):
            if not entry.strip().isdecimal() or int(entry) >= len(left):
                break
            named.append(left[int(entry)])
        left = tuple(named)
    return left


def _as_the_kernel_lists(device: TorchDevice, facts: Facts) -> Gpu:
    """Find it by its place on the bus, else by gfx and kind, else by what is visible; else it is as torch lists it."""
    for gpu in facts.gpus:
        if device.pci_address is not None and gpu.pci_address == device.pci_address:
            return gpu
    if device.gfx is not None:
        kind = (device.gfx, bool(device.integrated))
        alike = (gpu for gpu in facts.listed_amd if (gpu.gfx, bool(gpu.integrated)) == kind)
        found = next(alike, None) or next(iter(visible_to_torch(facts)), None)
        if found is not None:
            return found
    return _as_torch_lists(device, 0)


def _as_torch_lists(device: TorchDevice, index: int) -> Gpu:
    return Gpu(
        index=index,
        vendor="amd" if device.gfx else "nvidia",
        name=device.name,
        gfx=device.gfx,
        integrated=device.integrated,
        vram_total=device.total,
        vram_free=device.free,
        pci_address=device.pci_address,
    )
