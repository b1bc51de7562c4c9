"""Writes the folder that ComfyUI's registry takes, from which ComfyUI-Manager installs: nodes, pyproject.toml, README.

python tools/comfyui_registry.py --repository https://example.org/rocm-sd --publisher me --out dist-comfyui
cd dist-comfyui && comfy node publish      with comfy-cli, and the key of that publisher

The version is the package's own. Who publishes, and where the code lies, is not known here and has to be given.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools")]

# src/ and tools/ are on the path only now.
import release  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

NODES = ROOT / "src/rocm_sd/integrations/installing/custom_node/__init__.py"
HOSTS = ROOT / "src/rocm_sd/integrations/installing/hosts.py"
README = """\
# ROCm Optimizations: the nodes of rocm-sd

They make ComfyUI's own models faster on AMD and NVIDIA GPUs, with the same pictures: UNets and VAEs of SD 1.5, SD 2.x
and SDXL, and attention of any model. A node hands on a copy of its input; bypass it, and the stock model is back.

The nodes need torch 2.11 or newer in ComfyUI's Python. **Look before you install** (`python -c "import torch;
print(torch.__version__)"`): where torch is older, pip would fetch another one from PyPI, which is not a ROCm build.

{address}
"""


def quoted(text: str) -> str:
    """A basic string of TOML: JSON's strings are."""
    return json.dumps(text, ensure_ascii=False)


def oldest_comfyui() -> str:
    """Read, not imported: this runs before anything is installed."""
    found = re.search(r"^OLDEST_COMFYUI_TRIED = \((\d+), (\d+), (\d+)\)$", HOSTS.read_text("utf-8"), re.MULTILINE)
    if found is None:
        raise SystemExit(f"error: {HOSTS} names no oldest ComfyUI")
    return ".".join(found.groups())


def described(version: str, repository: str, publisher: str) -> str:
    return f"""\
[project]
name = "rocm-sd"
version = {quoted(version)}
description = "Nodes that make ComfyUI's own models faster on AMD GPUs, with the same pictures."
license = {{ file = "LICENSE" }}
requires-python = ">=3.10,<3.14"
classifiers = [
  "Operating System :: POSIX :: Linux",
  "Environment :: GPU :: AMD ROCm",
  "Environment :: GPU :: NVIDIA CUDA",
]
dependencies = [{quoted(f"rocm-sd=={version}")}]

[project.urls]
Repository = {quoted(repository)}

[tool.comfy]
PublisherId = {quoted(publisher)}
DisplayName = "ROCm Optimizations (rocm-sd)"
requires-comfyui = {quoted(f">={oldest_comfyui()}")}
"""


def write(folder: Path, repository: str, publisher: str) -> None:
    version = release.written_version(ROOT)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(NODES, folder / "__init__.py")
    shutil.copyfile(ROOT / "LICENSE", folder / "LICENSE")
    (folder / "pyproject.toml").write_text(described(version, repository, publisher), encoding="utf-8")
    # ComfyUI-Manager installs from this file.
    (folder / "requirements.txt").write_text(f"rocm-sd=={version}\n", encoding="utf-8")
    (folder / "README.md").write_text(README.format(address=repository), encoding="utf-8")


def address(text: str) -> str:
    if not re.fullmatch(r"https://[\w.-]+(/[\w.~-]+)+", text):
        raise argparse.ArgumentTypeError(f"{text} is no address: it takes https://HOST/PATH")
    return text.removesuffix(".git")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repository", type=address, required=True, help="where the code lies, https://...")
    parser.add_argument("--publisher", default="", help="the publisher's id at the registry (default: left empty)")
    parser.add_argument("--out", type=Path, default=Path("dist-comfyui"), help="the folder (default: dist-comfyui)")
    options = parser.parse_args(words)
    write(options.out, options.repository, options.publisher)
    print(f"wrote {options.out}")
    if not options.publisher:
        print("PublisherId is empty: fill it in before `comfy node publish`", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
