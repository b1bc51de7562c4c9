"""Run ComfyUI's main.py beside a CPU build of torch: python launch_comfyui.py HOST [its arguments].

PyPI's torchvision and torchaudio are built for CUDA. Beside a CPU torch, torchvision cannot register two of its
operators and torchaudio cannot load its library; pictures need neither.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import runpy
import sys
from pathlib import Path
from types import ModuleType

import torch

_KEPT: list[torch.library.Library] = []


def _built_for_cuda(package: str) -> bool:
    """What the package says of itself, without running its __init__, which would fail."""
    found = None if package in sys.modules else importlib.util.find_spec(package)
    if found is None or found.origin is None:
        return False
    version = Path(found.origin).with_name("version.py")
    return version.is_file() and "+cu" in version.read_text(encoding="utf-8")


def _define_missing_operators() -> None:
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEPT.append(library)  # an operator lives as long as its library


class _Silent(ModuleType):
    """A module that can be imported and named from; using what it names fails, as it would on this machine."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Silent(f"{self.__name__}.{name}")


def _stand_in(package: str, *parts: str) -> None:
    for name in (package, *(f"{package}.{part}" for part in parts)):
        module = _Silent(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        sys.modules[name] = module


def put_stand_ins() -> None:
    if torch.version.cuda is None and _built_for_cuda("torchvision"):
        _define_missing_operators()
    try:
        importlib.import_module("torchaudio")
    except (ImportError, OSError, RuntimeError):
        _stand_in("torchaudio", "functional", "transforms")


def prepare(host: Path) -> None:
    """Make `import comfy` work, from `host`, on this machine."""
    put_stand_ins()
    sys.path.insert(0, str(host))


def main() -> None:
    host = Path(sys.argv[1])
    prepare(host)
    sys.argv = [str(host / "main.py"), *sys.argv[2:]]
    runpy.run_path(str(host / "main.py"), run_name="__main__")


if __name__ == "__main__":
    main()
