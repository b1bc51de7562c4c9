"""Which program this is, and what keeps the extension from running in it. Imports neither torch nor the host's own
heavy modules: it must be able to say that torch is too old.
"""

from __future__ import annotations

import importlib
import re
import sys
from importlib import metadata, util
from pathlib import Path
from typing import Any

__all__ = ["LEAST_TORCH", "kind", "module", "torch_problem", "why_not"]

# What pyproject.toml asks for. The operators use torch.library.custom_op and per-device autocast.
LEAST_TORCH = (2, 11)

_NEW_TORCH = (
    "Set TORCH_COMMAND in webui-user.sh to the pip command that pytorch.org gives for your ROCm or CUDA, "
    "and start once with --reinstall-torch."
)
_NEEDED = {
    "scripts": ("Script", "AlwaysVisible"),
    "script_callbacks": ("on_ui_settings", "on_model_loaded", "on_list_optimizers", "on_list_unets",
                         "on_script_unloaded"),
    "sd_unet": ("SdUnet", "SdUnetOption"),
    "sd_hijack_optimizations": ("SdOptimization",),
}  # fmt: skip
_ELSEWHERE = {
    "Forge": (
        "this is Forge, which has model classes and a memory manager of its own that the extension does not know. "
        "Nothing was changed. Use Automatic1111, ComfyUI with the ROCm nodes, or Diffusers with rocm_sd.optimize(pipe)."
    ),
    "SD.Next": (
        "this is SD.Next, whose pipelines are Diffusers': the extension's hooks do not exist there. Nothing was "
        "changed. Its pipeline can be optimised with rocm_sd.optimize(pipe); for a web page use Automatic1111."
    ),
}


def module(name: str) -> Any:
    """A module of the host, by its name inside the package `modules`."""
    return importlib.import_module(f"modules.{name}")


def kind() -> str:
    """Automatic1111, Forge or SD.Next: they share the layout of an extension, not that of a model."""
    if util.find_spec("modules_forge") is not None:
        return "Forge"
    shared = sys.modules.get("modules.shared")
    backend = any(hasattr(shared, name) for name in ("backend", "native"))
    # PyPI has a package of that name: only a file beside the host's own package tells.
    return "SD.Next" if backend or (_folder() / "installer.py").is_file() else "Automatic1111"


def _folder() -> Path:
    found = util.find_spec("modules")
    places = [] if found is None else list(found.submodule_search_locations or [])
    return Path(places[0]).parent if places else Path()


def torch_problem(version: str | None = None) -> str | None:
    """Why this torch is none that the project runs on, with what to type; `version` is looked up if not given."""
    try:
        found = version or metadata.version("torch")
    except metadata.PackageNotFoundError:
        return f"torch is not installed in {sys.executable}. {_NEW_TORCH}"
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if numbers >= LEAST_TORCH:
        return None
    least = ".".join(map(str, LEAST_TORCH))
    return f"it needs torch {least} or newer, and the host has {found}. Everything runs as without it. {_NEW_TORCH}"


def why_not() -> str | None:
    """One sentence for the user; None where the extension can run."""
    other = _ELSEWHERE.get(kind())
    if other is not None:
        return other
    problem = torch_problem()
    if problem is not None:
        return problem
    for name, attributes in _NEEDED.items():
        try:
            found = module(name)
        except ImportError as error:
            return f"the host has no modules.{name} ({error}). It needs Automatic1111 1.5 or newer: update it."
        missing = [attribute for attribute in attributes if not hasattr(found, attribute)]
        if missing:
            names = ", ".join(f"modules.{name}.{attribute}" for attribute in missing)
            return f"the host has no {names}. It needs Automatic1111 1.5 or newer: update it with git pull."
    return None
