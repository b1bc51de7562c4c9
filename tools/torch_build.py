"""Which build of torch fits the GPU of this machine: one table, one choice, one sentence that says why.

Nothing here was tried on AMD hardware by this project. The table follows what was public in November 2026:
  AMD's index and its torch[device-gfxNNNN] extras (ROCm 10.0.0, torch 2.13.0):
    https://rocm.docs.amd.com/projects/ai-ecosystem/en/latest/frameworks/pytorch/install.html
    the older targets (gfx1010 to gfx1012, gfx1031 to gfx1036): easydiffusion/torchruntime#34
  PyTorch's own ROCm wheels: https://pytorch.org/get-started/locally/, their targets: pytorch/pytorch,
    .ci/docker/manywheel/build.sh; gfx1103 and gfx1031 to gfx1036 are absent up to 2.12 (unslothai/unsloth#9829),
    gfx1150 and gfx1151 were not found by an earlier one (mudler/LocalAI#10997)
"""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from rocm_sd.errors import InvalidOption

TORCH_VERSION = "2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
AMD_INDEX = "https://stable.repo.amd.com/rocm/whl-next"
PYTORCH_ROCM_INDEX = "https://download.pytorch.org/whl/rocm7.2"
# AMD publishes wheels for 3.11 and later, PyTorch for 3.10 and later.
AMD_OLDEST_PYTHON = (3, 11)

# Who publishes a wheel for which GPU. AMD's comes first: it holds one GPU's kernels (2 GB to download, against an
# environment of 15 GB), and ROCm is past 7.14 in it, from where on MIOpen's search no longer takes minutes for each
# new resolution (ROCm/TheRock#2591).
ROCM_WHEELS = {
    "gfx908": ("amd", "pytorch"),
    "gfx90a": ("amd", "pytorch"),
    "gfx942": ("amd", "pytorch"),
    "gfx950": ("amd", "pytorch"),
    "gfx1010": ("amd",),
    "gfx1011": ("amd",),
    "gfx1012": ("amd",),
    "gfx1030": ("amd", "pytorch"),
    "gfx1031": ("amd",),
    "gfx1032": ("amd",),
    "gfx1034": ("amd",),
    "gfx1035": ("amd",),
    "gfx1036": ("amd",),
    "gfx1100": ("amd", "pytorch"),
    "gfx1101": ("amd", "pytorch"),
    "gfx1102": ("amd", "pytorch"),
    "gfx1103": ("amd",),
    "gfx1150": ("amd",),
    "gfx1151": ("amd",),
    "gfx1152": ("amd",),
    "gfx1153": ("amd",),
    "gfx1200": ("amd", "pytorch"),
    "gfx1201": ("amd", "pytorch"),
}
# Wheels exist, and are worse than the CPU.
REFUSED = {
    "gfx906": "ROCm dropped its matrix kernels for gfx906 in 6.4 (ROCm/ROCm#4625)",
    "gfx1033": "gradients came out wrong on gfx1033 with every ROCm build that was tried (unslothai/unsloth#8412)",
}


@dataclass(frozen=True)
class Gpu:
    """What set-up needs to know of a GPU; `name` is the gfx id on AMD, and empty where no driver tells it."""

    vendor: str
    name: str = ""
    integrated: bool = False


@dataclass(frozen=True)
class Source:
    """One place torch can be installed from; `index` None is whatever pip is configured to use."""

    index: str | None
    requirement: str

    def pip_arguments(self) -> list[str]:
        return [*(["--index-url", self.index] if self.index else []), self.requirement]

    def typed_by_hand(self) -> str:
        index = f"--index-url {self.index} " if self.index else ""
        return f'.venv/bin/pip install {index}"{self.requirement}"'


PIP_DEFAULT = Source(None, f"torch=={TORCH_VERSION}")


@dataclass(frozen=True)
class TorchBuild:
    """The choice: `kind` is rocm, cuda, cpu or custom; `sources` are tried in order; `reason` ends a sentence."""

    kind: str
    sources: tuple[Source, ...]
    reason: str

    @property
    def key(self) -> str:
        """Changes whenever torch has to be installed anew."""
        return " ".join([self.kind, *(f"{source.index} {source.requirement}" for source in self.sources)])


CPU = (Source(CPU_INDEX, f"torch=={TORCH_VERSION}"), PIP_DEFAULT)


def rocm_sources(gfx_ids: tuple[str, ...], python: tuple[int, int]) -> tuple[Source, ...]:
    """Where one torch for all of these GPUs can be had, best first."""
    sources = []
    if python >= AMD_OLDEST_PYTHON and all("amd" in ROCM_WHEELS.get(gfx, ()) for gfx in gfx_ids):
        extras = ",".join(f"device-{gfx}" for gfx in gfx_ids)
        sources.append(Source(AMD_INDEX, f"torch[{extras}]=={TORCH_VERSION}+rocm10.0.0"))
    if all("pytorch" in ROCM_WHEELS.get(gfx, ()) for gfx in gfx_ids):
        sources.append(Source(PYTORCH_ROCM_INDEX, f"torch=={TORCH_VERSION}+rocm7.2"))
    return tuple(sources)


def choose(gpus: tuple[Gpu, ...], wanted: str, python: tuple[int, int]) -> TorchBuild:
    """The build for these GPUs, or the one that was asked for: auto, rocm, cuda, cpu, a gfx id or an index URL."""
    if wanted == "cpu":
        return TorchBuild("cpu", CPU, "it was asked for")
    if wanted == "cuda":
        return TorchBuild("cuda", (PIP_DEFAULT,), "it was asked for")
    if wanted.startswith(("https://", "http://", "file://")):
        return TorchBuild("custom", (Source(wanted.rstrip("/"), "torch>=2.11"),), "this index was asked for")
    if re.fullmatch(r"gfx[0-9a-f]{3,4}", wanted):
        return _asked_for_gfx(wanted, python)
    amd = _usable_amd(gpus)
    if wanted == "rocm":
        if not amd:
            hint = "Name the GPU instead, for example ROCM_SD_TORCH=gfx1100 (INSTALL.md lists them)."
            raise InvalidOption("torch build", "rocm (no AMD GPU was found)", [], hint=hint)
        return _asked_for_gfx(amd[0].name, python)
    if wanted != "auto":
        raise InvalidOption(
            "torch build", wanted, ["auto", "rocm", "cuda", "cpu", "gfx1100 and the like", "an index URL"]
        )
    return _automatic(gpus, amd, python)


def _automatic(gpus: tuple[Gpu, ...], amd: tuple[Gpu, ...], python: tuple[int, int]) -> TorchBuild:
    nvidia = [gpu for gpu in gpus if gpu.vendor == "nvidia"]
    driven = [gpu for gpu in nvidia if gpu.name]
    names = tuple(dict.fromkeys(gpu.name for gpu in amd))
    served = tuple(gfx for gfx in names if gfx not in REFUSED and rocm_sources((gfx,), python))
    if driven and (not served or all(gpu.integrated for gpu in amd)):
        return TorchBuild("cuda", (PIP_DEFAULT,), f"an NVIDIA GPU was found ({driven[0].name})")
    if served:
        also = " beside an NVIDIA one; ROCM_SD_TORCH=cuda takes that" if driven else ""
        left = [gfx or "another" for gfx in names if gfx not in served]
        unserved = f"; {', '.join(left)} has no wheel and stays unused" if left else ""
        reason = f"an AMD GPU was found ({', '.join(served)}){also}{unserved}"
        return TorchBuild("rocm", rocm_sources(served, python), reason)
    if amd:
        return TorchBuild("cpu", CPU, _why_not_rocm(names[0], python))
    if nvidia:
        return TorchBuild("cpu", CPU, "an NVIDIA GPU is there, but NVIDIA's driver is not loaded")
    return TorchBuild("cpu", CPU, "no AMD or NVIDIA GPU was found")


def _usable_amd(gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """Cards before integrated GPUs: the processor's own must not choose the wheel of the card beside it."""
    amd = tuple(gpu for gpu in gpus if gpu.vendor == "amd")
    return tuple(gpu for gpu in amd if not gpu.integrated) or amd


def _asked_for_gfx(gfx: str, python: tuple[int, int]) -> TorchBuild:
    sources = rocm_sources((gfx,), python)
    if gfx in REFUSED:
        return TorchBuild(
            "rocm", (Source(AMD_INDEX, f"torch[device-{gfx}]"),), f"{gfx} was asked for, though {REFUSED[gfx]}"
        )
    if not sources:
        hint = "Name an index that has a wheel for it: ROCM_SD_TORCH=https://..."
        raise InvalidOption("torch build", gfx, [], hint=f"{_why_not_rocm(gfx, python).capitalize()}. {hint}")
    return TorchBuild("rocm", sources, f"{gfx} was asked for")


def _why_not_rocm(gfx: str, python: tuple[int, int]) -> str:
    if gfx in REFUSED:
        return f"{REFUSED[gfx]}; ROCM_SD_TORCH={gfx} takes ROCm all the same"
    if gfx in ROCM_WHEELS:
        return f"the wheels for {gfx} need Python 3.11 or later, and this is {python[0]}.{python[1]}"
    if not gfx:
        return "an AMD GPU is there, but the kernel's compute driver does not list it (INSTALL.md: /dev/kfd)"
    return f"neither PyTorch nor AMD is known to publish a wheel for {gfx}"


def find_gpus(root: Path = Path("/")) -> tuple[Gpu, ...]:
    """AMD's from the kernel's KFD topology, NVIDIA's from its driver; no program is run and torch is not needed."""
    from rocm_sd.arch import Vendor, kfd  # noqa: PLC0415  Python's version is checked before the package is read

    gpus = []
    for found in kfd.find_gpus(root):
        is_amd = found.vendor is Vendor.AMD
        name = found.arch_name if is_amd else found.name
        gpus.append(Gpu("amd" if is_amd else "nvidia", name or "", bool(found.integrated)))
    if not gpus and (root / "usr/lib/wsl/lib/nvidia-smi").exists():
        gpus.append(Gpu("nvidia", "through WSL2"))
    return tuple(gpus)


def is_wsl_bridge_alone(root: Path = Path("/")) -> bool:
    """WSL2 shows GPUs through /dev/dxg, which tells neither vendor nor gfx id to a program without a driver."""
    return (root / "dev/dxg").exists() and not (root / "dev/kfd").exists()


def unreachable(index: str, timeout: float = 5.0) -> str | None:
    """Why the index cannot be used, or None where it answers. Two tries: one lost packet must not cost the GPU."""
    if index.startswith("file://"):
        return None if Path(index[len("file://") :]).is_dir() else "there is no such folder"
    return _ask(index, timeout) and _ask(index, timeout)


def _ask(index: str, timeout: float) -> str | None:
    try:
        with urllib.request.urlopen(f"{index}/torch/", timeout=timeout) as answer:
            answer.read(1)
    except urllib.error.HTTPError as error:
        return f"it answers {error.code}"
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))
    return None
