"""What is known of .venv without starting it: the stamp of the last finished set-up, the lock, the torch inside."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rocm_sd.errors import RocmSdError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

STAMP_NAME = ".rocm-sd-setup.json"
# Raised when the meaning of a finished set-up changes, so that older environments are brought up to date.
SETUP_VERSION = 1


@dataclass(frozen=True)
class Stamp:
    """Written last, removed first: an interrupted set-up leaves none. `note` is repeated at every later start."""

    digest: str
    extras: tuple[str, ...]
    note: str = ""

    def covers(self, digest: str, extras: tuple[str, ...]) -> bool:
        return self.digest == digest and set(extras) <= set(self.extras)


def digest(root: Path, build_key: str) -> str:
    """Of all that decides what is installed, and of the place: an environment cannot be moved."""
    total = hashlib.sha256()
    for part in (SETUP_VERSION, sys.version_info[:3], root.resolve(), build_key):
        total.update(f"{part}\n".encode())
    for name in ("pyproject.toml", "constraints.txt"):
        total.update((root / name).read_bytes())
    return total.hexdigest()


def read_stamp(venv: Path) -> Stamp | None:
    try:
        fields = json.loads((venv / STAMP_NAME).read_text(encoding="utf-8"))
        stamp = Stamp(fields["digest"], tuple(fields["extras"]), fields["note"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # Files are deleted by hand; a stamp beside a missing interpreter or command proves nothing.
    return stamp if (venv / "bin/python").exists() and (venv / "bin/rocm-sd").exists() else None


def write_stamp(venv: Path, stamp: Stamp) -> None:
    whole = venv / f"{STAMP_NAME}.part"
    whole.write_text(json.dumps(asdict(stamp), indent=1) + "\n", encoding="utf-8")
    whole.replace(venv / STAMP_NAME)


def remove_stamp(venv: Path) -> None:
    (venv / STAMP_NAME).unlink(missing_ok=True)


@contextmanager
def lock(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """One set-up at a time. The kernel drops the lock with its holder, so a killed set-up blocks nobody."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = path.open("a+", encoding="utf-8")
    except OSError as error:
        hint = "Copy the checkout to a folder you own, or correct its permissions."
        raise RocmSdError(f"The lock {path} cannot be written: {error.strerror}.", hint=hint) from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            holder = handle.read().strip() or "unknown"
            say(f"[set-up] another set-up works on this folder (process {holder}); waiting for it. Ctrl-C to give up.")
            fcntl.flock(handle, fcntl.LOCK_EX)
        handle.seek(0)
        handle.truncate()
        handle.write(f"{os.getpid()}, started {time.strftime('%H:%M:%S')}")
        handle.flush()
        yield
        handle.seek(0)
        handle.truncate()


def why_unusable(venv: Path) -> str | None:
    """Why .venv has to be made anew: another Python, another place, or a creation that was cut short."""
    config = venv / "pyvenv.cfg"
    pip = venv / "bin/pip"
    if not config.exists():
        return "it holds no environment" if venv.exists() and any(venv.iterdir()) else None
    found = re.search(r"^version(?:_info)?\s*=\s*(\d+\.\d+)", config.read_text(encoding="utf-8"), re.MULTILINE)
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if found is None or found[1] != here:
        return f"it was made by Python {found[1] if found else '?'}, and this is {here}"
    if not pip.exists() or not (venv / "bin/python").exists():
        return "its creation was cut short"
    if str(venv) not in pip.read_text(encoding="utf-8", errors="replace").splitlines()[0]:
        return "it was moved here from another folder"
    return None


@dataclass(frozen=True)
class InstalledTorch:
    version: str
    kind: str


def installed_torch(venv: Path) -> InstalledTorch | None:
    """Read from files: importing torch takes seconds, and may fail where a driver is missing."""
    for record in venv.glob("lib/python3.*/site-packages/torch-*.dist-info"):
        source = record.parent / "torch/version.py"
        if not source.exists():
            continue
        text = source.read_text(encoding="utf-8")
        # The wheel's own version, not __version__: PyPI's CUDA build calls itself +cu130 there and not in its name.
        version = record.name[len("torch-") : -len(".dist-info")]
        for kind, name in (("rocm", "hip"), ("cuda", "cuda")):
            if re.search(rf"^{name}\b[^=]*= '", text, re.MULTILINE):
                return InstalledTorch(version, kind)
        return InstalledTorch(version, "cpu")
    return None


def constraints_for(text: str, torch: InstalledTorch) -> str:
    """The pins that fit the torch that is there: a ROCm or CUDA one brings its own Triton, and a second breaks it."""
    lines = []
    for line in text.splitlines():
        name = re.split(r"[=<>!~;\s\[]", line.strip(), maxsplit=1)[0].lower()
        if name == "torch" or (name == "triton" and torch.kind != "cpu"):
            continue
        lines.append(line)
    return "\n".join([*lines, f"torch=={torch.version}", ""])
