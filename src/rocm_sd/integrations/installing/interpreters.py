"""The Python that runs a host: which it is, what torch it has, whether it finds rocm-sd, and what to type if not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rocm_sd
from rocm_sd.errors import RocmSdError

if TYPE_CHECKING:
    from rocm_sd.integrations.installing.hosts import Host

__all__ = ["OLDEST_TORCH", "HostNotReady", "PythonFacts", "examine", "host_python", "what_to_type"]

OLDEST_TORCH = (2, 11)  # as in pyproject.toml
_OLDEST_PYTHON = (3, 10)
_PATIENCE_S = 180.0
# Runs in the host's Python, which may be of any version: plain words, and one line of JSON at the end.
_QUESTION = """
import json, sys
facts = {"python": list(sys.version_info[:3]), "torch": None, "build": None, "rocm_sd": None}
try:
    import torch
    facts["torch"] = str(torch.__version__)
    facts["build"] = "rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"
except Exception as error:
    facts["torch_error"] = "%s: %s" % (type(error).__name__, error)
try:
    import rocm_sd
    facts["rocm_sd"] = rocm_sd.__version__
except Exception as error:
    facts["rocm_sd_error"] = "%s: %s" % (type(error).__name__, error)
print()
print(json.dumps(facts))
"""


class HostNotReady(RocmSdError):
    """The host's Python lacks what rocm-sd needs."""

    exit_code = 8


@dataclass(frozen=True)
class PythonFacts:
    executable: Path
    python: tuple[int, ...]
    torch: str | None = None
    build: str | None = None
    rocm_sd: str | None = None
    torch_error: str | None = None
    rocm_sd_error: str | None = None

    @property
    def described(self) -> str:
        version = ".".join(map(str, self.python))
        torch = f"torch {self.torch} ({self.build})" if self.torch else "no torch"
        ours = f"rocm-sd {self.rocm_sd}" if self.rocm_sd else "no rocm-sd"
        return f"Python {version}, {torch}, {ours}: {self.executable}"


def host_python(host: Host, asked_for: Path | None = None) -> tuple[Path, bool]:
    """The Python that runs the host, and whether it is the host's own. Without one: the Python that runs this."""
    if asked_for is not None:
        python = asked_for.expanduser()
        if not python.is_file():
            raise HostNotReady(f"There is no Python at {python}.", hint="Give --python the path of python itself.")
        return python.absolute(), True  # not resolved: the path of its link is what makes it a virtual environment
    for python in host.pythons:
        if python.is_file():
            return python, True
    return Path(sys.executable), False


def examine(python: Path, root: Path) -> PythonFacts:
    """Ask that Python, from the host's own folder, where the host starts it."""
    hint = "Give another one with --python."
    try:
        answer = subprocess.run(  # noqa: PLW1510 -- the exit code is read below
            [str(python), "-c", _QUESTION], cwd=root, capture_output=True, text=True, timeout=_PATIENCE_S
        )
        facts: dict[str, Any] = json.loads(answer.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired as error:
        raise HostNotReady(f"{python} did not answer within {_PATIENCE_S:.0f} s.", hint=hint) from error
    except OSError as error:
        raise HostNotReady(f"{python} cannot be run ({error}).", hint=hint) from error
    except (IndexError, ValueError) as error:
        last = (answer.stderr.strip().splitlines() or ["no answer"])[-1]
        raise HostNotReady(f"{python} cannot be asked ({last}).", hint=hint) from error
    return PythonFacts(executable=python, **(facts | {"python": tuple(facts["python"])}))


def what_to_type(facts: PythonFacts) -> list[str]:
    """What this Python lacks, each with the command that fixes it; empty when all is there."""
    pip = f'"{facts.executable}" -m pip install'
    if facts.python[:2] < _OLDEST_PYTHON:
        return [f"Its Python {'.'.join(map(str, facts.python))} is too old: rocm-sd needs 3.10 or newer."]
    missing = []
    oldest = ".".join(map(str, OLDEST_TORCH))
    if facts.torch is None:
        missing.append(
            f"It has no working torch ({facts.torch_error}). Type: {pip} torch, "
            "with the index that rocm-sd doctor names for your GPU."
        )
    elif _numbers(facts.torch) < OLDEST_TORCH:
        missing.append(
            f"Its torch {facts.torch} is older than {oldest}. Type: {pip} --upgrade torch torchvision torchaudio, "
            "with the index that rocm-sd doctor names for your GPU."
        )
    if facts.rocm_sd is None:
        reason = "" if "No module named 'rocm_sd'" in (facts.rocm_sd_error or "") else f" ({facts.rocm_sd_error})"
        missing.append(f"It does not find rocm-sd{reason}. Type: {pip} {_ourselves()}")
    return missing


def _ourselves() -> str:
    """How pip gets this very rocm-sd: from the checkout that it runs from, or by its name and version."""
    checkout = Path(rocm_sd.__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file():
        return f'-e "{checkout}"'
    return f"rocm-sd=={rocm_sd.__version__}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
