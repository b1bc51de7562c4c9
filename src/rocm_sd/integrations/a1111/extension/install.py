"""Run by the host at each start, before it imports torch. It installs what is missing, or says what to type.

`--no-deps`: the package's own requirements are for Diffusers, and would replace the versions that the host pins.
"""

# ruff: noqa: INP001, T201, BLE001 -- a script that the host runs, and whose output it shows

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
from typing import Any

LEAST_TORCH = (2, 11)
# What the extension imports besides torch.
PACKAGES = ("rocm-sd", "platformdirs", "rich")


def is_too_old(version: str) -> bool:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < LEAST_TORCH


def say(sentence: str) -> None:
    print(f"ROCm SD: {sentence}")


def install() -> None:
    launch: Any = importlib.import_module("launch")
    torch: str | None
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = None
    if torch is not None and is_too_old(torch):
        # The script says so on its panel, too, if the package is there.
        say(
            f"it needs torch {LEAST_TORCH[0]}.{LEAST_TORCH[1]} or newer, and the host has {torch}. Nothing is "
            "installed, and everything runs as without it. Set TORCH_COMMAND in webui-user.sh to the pip command "
            "that pytorch.org gives for your ROCm or CUDA, and start once with --reinstall-torch."
        )
        return
    for package in PACKAGES:
        # launch.is_installed takes the name of a distribution or of a module.
        if launch.is_installed(package) or launch.is_installed(package.replace("-", "_")):
            continue
        try:
            launch.run_pip(f"install --no-deps {package}", f"{package}, for ROCm SD Optimization")
        except Exception as error:  # a start without a network, a read-only environment
            say(
                f"{package} could not be installed ({str(error).splitlines()[0]}). Everything runs as without it. "
                f"Type: {sys.executable} -m pip install --no-deps {package}"
            )
            return


if __name__ == "__main__":
    try:
        install()
    except Exception as error:  # the host goes on without the extension
        say(f"its installation failed ({type(error).__name__}: {error}). Everything runs as without it.")
