"""recognise("comfyui", path) -> Host: is this folder the host that was named, which version, laid out how."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from rocm_sd.errors import RocmSdError, Unsupported, require_one_of

__all__ = ["HOSTS", "Host", "NotAHost", "recognise"]

_TITLES = {"comfyui": "ComfyUI", "a1111": "Automatic1111"}
HOSTS = tuple(_TITLES)
_LOOKED_FOR = {
    "comfyui": (
        "there is no main.py beside comfy/ and custom_nodes/, no ComfyUI/ inside (the portable package), "
        "and no custom_nodes/ beside models/ and user/ (the desktop app)."
    ),
    "a1111": "there is no webui.py beside modules/ and extensions/.",
}
# Programs that are laid out as Automatic1111, by what only they have.
_FORKS = {
    "modules_forge": ("Forge", "its models are not Automatic1111's"),
    "installer.py": ("SD.Next", "it runs Diffusers pipelines of its own"),
}
# The oldest that the tests were run against; an older one may do, and its nodes say what they miss.
OLDEST_COMFYUI_TRIED = (0, 3, 64)
_PACKAGE = Path(__file__).parent


class NotAHost(RocmSdError):
    """The folder is not the program that was named."""

    exit_code = 2


@dataclass(frozen=True)
class Host:
    """`root` is the folder that the program calls its own; `destination` is where rocm-sd goes, a copy of `source`."""

    kind: str
    title: str
    root: Path
    version: str | None
    layout: str
    source: Path
    destination: Path
    pythons: tuple[Path, ...]
    notes: tuple[str, ...] = ()

    @property
    def described(self) -> str:
        version = f" {self.version}" if self.version else ""
        return f"{self.title}{version} in {self.root} ({self.layout})"


def recognise(kind: str, path: Path) -> Host:
    """The host at `path`, symlinks resolved; an error says what was looked for, or which other program this is."""
    require_one_of("host", kind, HOSTS)
    given, hint = path.expanduser(), f"Give the folder that {_TITLES[kind]} was unpacked to."
    if not given.is_dir():
        raise NotAHost(f"There is no folder {given}.", hint=hint)
    root = given.resolve()
    found = _comfyui(root) or _a1111(root)
    if found is None:
        raise NotAHost(f"{root} is not {_TITLES[kind]}: {_LOOKED_FOR[kind]}", hint=hint)
    if found.kind != kind:
        raise NotAHost(f"{root} is {found.title}.", hint=f"Type: rocm-sd install {found.kind} {given}")
    return found


def _comfyui(given: Path) -> Host | None:
    for root, layout in ((given, "source"), (given / "ComfyUI", "portable")):
        if (root / "main.py").is_file() and (root / "comfy").is_dir() and (root / "nodes.py").is_file():
            inside_portable = (root.parent / "python_embeded").is_dir()
            return _comfyui_host(root.resolve(), "portable" if inside_portable else layout)
    # The desktop app keeps its code elsewhere; what the user chose is the folder of models and nodes.
    parts = ("custom_nodes", "models", "user")
    if all((given / part).is_dir() for part in parts) and not (given / "main.py").exists():
        return _comfyui_host(given, "desktop")
    return None


def _comfyui_host(root: Path, layout: str) -> Host:
    version = _matched(root / "comfyui_version.py", r"__version__\s*=\s*[\"']([^\"']+)")
    notes = []
    numbers = tuple(int(number) for number in re.findall(r"\d+", version or "")[:3])
    if numbers and numbers < OLDEST_COMFYUI_TRIED:
        oldest = ".".join(map(str, OLDEST_COMFYUI_TRIED))
        notes.append(
            f"ComfyUI {version} is older than {oldest}, the oldest that was tried: update it if a node is idle."
        )
    embedded = (root.parent / "python_embeded" / "python.exe", root.parent / "python_embeded" / "bin" / "python")
    return Host(
        kind="comfyui",
        title=_TITLES["comfyui"],
        root=root,
        version=version,
        layout=layout,
        source=_PACKAGE / "custom_node",
        destination=root / "custom_nodes" / "rocm_sd",
        pythons=(*embedded, *_virtual_environments(root), *_virtual_environments(root.parent)),
        notes=tuple(notes),
    )


def _a1111(root: Path) -> Host | None:
    if not ((root / "webui.py").is_file() and (root / "modules").is_dir()):
        return None
    for mark, (title, reason) in _FORKS.items():
        if (root / mark).exists():
            raise Unsupported(
                "rocm-sd install",
                f"{title}, which {root} is: {reason}",
                hint="Use rocm-sd with ComfyUI, Automatic1111 or Diffusers. Nothing was written.",
            )
    if not (root / "extensions").is_dir():
        return None
    return Host(
        kind="a1111",
        title=_TITLES["a1111"],
        root=root,
        version=_matched(root / "CHANGELOG.md", r"^## v?(\d[\w.]*)"),
        layout="source",
        source=_PACKAGE.parent / "a1111" / "extension",
        destination=root / "extensions" / "rocm-sd",
        pythons=_virtual_environments(root),
    )


def _virtual_environments(root: Path) -> tuple[Path, ...]:
    folders = (root / "venv", root / ".venv")
    return tuple(folder / inside for folder in folders for inside in (Path("bin/python"), Path("Scripts/python.exe")))


def _matched(file: Path, pattern: str) -> str | None:
    try:
        found = re.search(pattern, file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return found[1] if found else None
