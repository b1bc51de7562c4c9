"""What torch says of itself, as JSON on standard output: run in a process of its own, which a bad driver may end.

python -m rocm_sd.doctor.torch_facts
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import suppress
from importlib import import_module, metadata
from typing import Any

from rocm_sd.arch import host

__all__ = ["facts_of_torch"]


def facts_of_torch() -> dict[str, Any]:
    try:
        torch = import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return {}
    facts: dict[str, Any] = {
        "version": torch.__version__,
        "hip": torch.version.hip,
        "cuda": torch.version.cuda,
        "wants_triton": _wanted_triton(),
        # That of HIP, which every ROCm build has, counts in another way.
        "rocm": getattr(torch.version, "rocm", None),
        "miopen": None,
        "arch_list": [],
        "devices": [],
    }
    if torch.version.hip is not None:
        number = torch.backends.cudnn.version()
        facts["miopen"] = None if number is None else host.convolution_library(int(number), on_rocm=True)
    if torch.cuda.is_available():
        facts["arch_list"] = list(torch.cuda.get_arch_list())
        facts["devices"] = [_device(torch, index) for index in range(torch.cuda.device_count())]
    elif torch.version.hip is not None:
        # get_arch_list is empty where no GPU is seen; the flags the build was made with are not.
        facts["arch_list"] = (torch._C._cuda_getArchFlags() or "").split()  # noqa: SLF001 -- the only place that has it
    return facts


def _device(torch: Any, index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    free = total = None
    # A GPU that cannot be opened is still listed: its memory is then not known.
    with suppress(RuntimeError):
        free, total = torch.cuda.mem_get_info(index)
    on_amd = torch.version.hip is not None
    return {
        "name": properties.name,
        "gfx": properties.gcnArchName.split(":")[0] if on_amd else None,
        "integrated": bool(getattr(properties, "is_integrated", False)),
        "total": total,
        "free": free,
        "pci_address": host.pci_address(properties) if hasattr(properties, "pci_domain_id") else None,
    }


def _wanted_triton() -> str | None:
    """The Triton that torch's package asks for, as "name==version"."""
    with suppress(metadata.PackageNotFoundError):
        for requirement in metadata.requires("torch") or ():
            wanted = re.match(r"((?:pytorch-)?triton(?:-rocm|-windows)?)\s*\(?==\s*([\w.+]+)", requirement)
            if wanted:
                return f"{wanted[1]}=={wanted[2]}"
    return None


if __name__ == "__main__":
    # On a line of its own: a driver may have printed before it.
    sys.stdout.write(f"\n{json.dumps(facts_of_torch())}\n")
