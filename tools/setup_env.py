"""Makes .venv and installs rocm-sd into it, with the torch that fits the GPU of this machine. No root is needed.

python3 tools/setup_env.py                          what `make demo` needs
python3 tools/setup_env.py --extras dev,verify      more
python3 tools/setup_env.py --dry-run                says what it would do, and does nothing
ROCM_SD_TORCH=gfx1100 python3 tools/setup_env.py    another torch than the one that would be chosen
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools")]

# src/ and tools/ are on the path only now.
import torch_build  # noqa: E402
import venv_state  # noqa: E402
from rocm_sd.errors import NoDiskSpace, RocmSdError  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

PYTHONS = ((3, 10), (3, 11), (3, 12), (3, 13))
# tinygrad 0.14 and triton 3.9, which the proof ladder is pinned to.
VERIFY_OLDEST_PYTHON = (3, 11)
# Installed size: measured for the CPU; reported for a ROCm torch 2.13 (6 GB for one GPU, 15 GB for all).
DISK_NEEDED = {"cpu": 3_500_000_000, "cuda": 12_000_000_000, "rocm": 16_000_000_000, "custom": 3_500_000_000}
HEARTBEAT_S = 15.0
TRITON_NAMES = ("triton", "triton-rocm", "pytorch-triton-rocm")


def say(line: str) -> None:
    print(line, flush=True)


def check_python() -> None:
    if sys.version_info[:2] in PYTHONS:
        return
    others = [name for name in (f"python3.{minor}" for minor in (13, 12, 11, 10)) if shutil.which(name)]
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    hint = (
        f"Type: make PYTHON={others[0]} demo"
        if others
        else "Install Python 3.12, then type: make PYTHON=python3.12 demo"
    )
    raise RocmSdError(f"Python 3.10 to 3.13 is needed, and this is {here}.", hint=hint)


def installable_extras(extras: Sequence[str], kind: str) -> tuple[list[str], list[str], list[str]]:
    """(extras as they are, single requirements in place of an extra, what to tell the user)."""
    if "verify" not in extras:
        return list(extras), [], []
    rest = [extra for extra in extras if extra != "verify"]
    if sys.version_info[:2] < VERIFY_OLDEST_PYTHON:
        return rest, [], ["The extra 'verify' needs Python 3.11 or later and is left out; its tests are skipped."]
    if kind == "cpu":
        return list(extras), [], []
    import tomllib  # noqa: PLC0415  Python 3.10 has none, and does not come here

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [line for line in project["optional-dependencies"]["verify"] if not line.startswith("triton")]
    return rest, wanted, [f"Triton is left as torch's {kind} build brought it: a second one breaks it."]


class Pip:
    """Runs pip inside .venv: its own progress bars on a terminal; elsewhere quiet, with a sign of life now and then."""

    def __init__(self, venv: Path, log: Path) -> None:
        self.python = venv / "bin/python"
        self.log = log
        self.on_terminal = sys.stdout.isatty()
        self.environment = {
            **{name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "PYTHONPATH")},
            "PIP_USER": "0",
            "PIP_NO_INPUT": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }

    def command(self, *arguments: str) -> list[str]:
        return [str(self.python), "-m", "pip", *arguments]

    def run(self, what: str, *arguments: str) -> bool:
        """Whether pip succeeded; the log holds its last output where no terminal showed it."""
        start = time.monotonic()
        say(f"[set-up] {what} ...")
        with self.log.open("wb") as log:
            output = None if self.on_terminal else log
            process = subprocess.Popen(
                self.command(*arguments),
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
            )
            try:
                self._wait(process, what, start)
            except BaseException:
                process.terminate()
                process.wait()
                raise
        done = process.returncode == 0
        say(f"[set-up] {what}: {'done' if done else 'failed'} after {time.monotonic() - start:.0f} s")
        return done

    def _wait(self, process: subprocess.Popen[bytes], what: str, start: float) -> None:
        while process.returncode is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(HEARTBEAT_S)
            if process.returncode is None and not self.on_terminal:
                say(f"[set-up] {what}: {time.monotonic() - start:.0f} s so far; pip says: {self.last_line()}")

    def last_line(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
        telling = (line.strip() for line in reversed(lines) if line.strip() and not line.startswith("WARNING"))
        return next((line[:70] for line in telling), "nothing yet")

    def failure(self, what: str, hint: str) -> RocmSdError:
        shown = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-15:]
        if shown:
            say("\n".join(f"    {line}" for line in shown))
        return RocmSdError(f"pip could not install {what}; its last lines are above.", hint=hint)


def make_venv(venv: Path) -> None:
    why = venv_state.why_unusable(venv)
    if why is None and (venv / "pyvenv.cfg").exists():
        return
    start = time.monotonic()
    say(f"[set-up] making {venv.name} with Python {sys.version.split()[0]}{f' anew: {why}' if why else ''} ...")
    # Debian keeps ensurepip in a package of its own (python3-venv); the pip that is there then serves.
    own_pip = importlib.util.find_spec("ensurepip") is not None
    command = [sys.executable, "-m", "venv", *([] if own_pip else ["--without-pip"]), "--clear", str(venv)]
    made = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if made.returncode == 0 and not own_pip:
        command = [sys.executable, "-m", "pip", "--python", str(venv / "bin/python"), "install", "--quiet", "pip"]
        made = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if made.returncode:
        say("\n".join(f"    {line}" for line in (made.stdout + made.stderr).strip().splitlines()[-8:]))
        hint = "On Debian and Ubuntu type: sudo apt install python3-venv    (or install pip 22.3 or later)"
        raise RocmSdError(f"The virtual environment {venv} could not be made; the lines above say why.", hint=hint)
    say(f"[set-up] {venv.name} made after {time.monotonic() - start:.0f} s")


def install_torch(pip: Pip, venv: Path, build: torch_build.TorchBuild) -> str:
    """Tries each source in turn; gives a note to be repeated where the GPU is left unused, else an empty string."""
    present = venv_state.installed_torch(venv)
    if present is not None and build.kind not in ("custom", present.kind):
        say(f"[set-up] torch {present.version} is a {present.kind} build; {build.kind} is needed")
        pip.run("removing the other torch", "uninstall", "--yes", "torch", *TRITON_NAMES)
    for source in build.sources:
        why = torch_build.unreachable(source.index) if source.index else None
        if why is None:
            # The CPU build's dependencies come with the project's, pinned; a ROCm build's are on its own index only.
            alone = ["--no-deps"] if build.kind == "cpu" else []
            if pip.run(f"installing {source.requirement}", "install", *alone, *source.pip_arguments()):
                return ""
            why = "pip could not install from it"
            if source is build.sources[-1] and build.kind != "rocm":
                raise pip.failure(source.requirement, f"To see all of it, type: {source.typed_by_hand()}")
        following = build.sources[build.sources.index(source) + 1 :]
        instead = f"; trying {following[0].index or 'the index pip is configured for'} instead" if following else ""
        say(f"[set-up] {source.index} cannot be used ({why}){instead}")
    if build.kind != "rocm":
        raise RocmSdError("No index with this torch could be used.", hint="Type: ROCM_SD_TORCH=auto make demo")
    later = "When it can be reached, type: make clean-venv demo"
    note = f"WARNING: the GPU will NOT be used: no index with a ROCm torch could be used. {later}"
    say(f"[set-up] {note}")
    fallback = torch_build.PIP_DEFAULT
    if not pip.run(f"installing {fallback.requirement} instead", "install", "--no-deps", *fallback.pip_arguments()):
        raise pip.failure(fallback.requirement, "Look at the network and pip's configuration: pip config list")
    return note


def install_project(pip: Pip, venv: Path, extras: tuple[str, ...]) -> None:
    torch = venv_state.installed_torch(venv)
    if torch is None:
        raise RocmSdError("pip reported success, yet torch is not in .venv.", hint="Type: make clean-venv demo")
    pins = venv / ".rocm-sd-constraints.txt"
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pins.write_text(venv_state.constraints_for(text, torch), encoding="utf-8")
    whole, single, remarks = installable_extras(extras, torch.kind)
    for remark in remarks:
        say(f"[set-up] {remark}")
    target = f".[{','.join(whole)}]" if whole else "."
    what = f"installing rocm-sd{target[1:]} and what it needs"
    if not pip.run(what, "install", "--constraint", str(pins), "--editable", target, *single):
        again = f".venv/bin/pip install -c {pins.relative_to(ROOT)} -e '{target}' {' '.join(single)}".strip()
        raise pip.failure("rocm-sd", f"To see all of it, type: {again}")


def check_disk(venv: Path, kind: str) -> None:
    free = shutil.disk_usage(ROOT).free
    if free < DISK_NEEDED[kind] and venv_state.installed_torch(venv) is None:
        raise NoDiskSpace(venv, needed=DISK_NEEDED[kind], free=free)


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--torch",
        default=os.environ.get("ROCM_SD_TORCH") or "auto",
        metavar="BUILD",
        help="auto, rocm, cuda, cpu, a gfx id such as gfx1100, or an index URL (default: ROCM_SD_TORCH, else auto)",
    )
    parser.add_argument("--extras", default="", help="extras of pyproject.toml, by commas: dev,verify,quality")
    parser.add_argument("--dry-run", action="store_true", help="print what would be chosen and run, and stop")
    return parser.parse_args(words)


def set_up(options: argparse.Namespace) -> None:
    start = time.monotonic()
    check_python()
    venv = ROOT / ".venv"
    extras = tuple(sorted({extra.strip() for extra in options.extras.split(",") if extra.strip()}))
    build = torch_build.choose(torch_build.find_gpus(), options.torch, sys.version_info[:2])
    chosen = f"torch: the {build.kind} build, because {build.reason}"
    if options.torch == "auto" and build.kind == "cpu" and torch_build.is_wsl_bridge_alone():
        chosen += "; WSL2 hides which GPU it has: for an AMD one name it, as in ROCM_SD_TORCH=gfx1100 make demo"
    wanted = venv_state.digest(ROOT, build.key)
    if options.dry_run:
        say(chosen)
        for source in build.sources:
            say(f"would run: {source.typed_by_hand()}")
        target = f".[{','.join(extras)}]" if extras else "."
        say(f"would run: .venv/bin/pip install -c constraints.txt -e '{target}'")
        return
    if up_to_date(venv, wanted, extras, chosen):
        return
    with venv_state.lock(ROOT / ".cache/setup.lock", say):
        if up_to_date(venv, wanted, extras, chosen):
            return
        say(f"[set-up] {chosen}")
        check_disk(venv, build.kind)
        before = venv_state.read_stamp(venv)
        venv_state.remove_stamp(venv)
        make_venv(venv)
        pip = Pip(venv, ROOT / ".cache/setup.log")
        # Adding extras to an environment that is otherwise current leaves its torch alone.
        current = before is not None and before.digest == wanted
        note = before.note if before is not None and current else install_torch(pip, venv, build)
        everything = tuple(sorted({*extras, *(before.extras if before is not None and current else ())}))
        install_project(pip, venv, everything)
        venv_state.write_stamp(venv, venv_state.Stamp(wanted, everything, note))
    torch = venv_state.installed_torch(venv)
    if torch is not None and build.kind in ("rocm", "cuda") and torch.kind != build.kind and not note:
        say(f"[set-up] WARNING: a {build.kind} torch was wanted and pip's configuration gave a {torch.kind} one")
    say(f"[set-up] ready in {time.monotonic() - start:.0f} s: {note or chosen}")


def up_to_date(venv: Path, wanted: str, extras: tuple[str, ...], chosen: str) -> bool:
    stamp = venv_state.read_stamp(venv)
    if stamp is None or not stamp.covers(wanted, extras):
        return False
    say(f"[set-up] up to date; {stamp.note or chosen}")
    return True


def main(words: Sequence[str] | None = None) -> int:
    try:
        set_up(arguments(words))
    except RocmSdError as error:
        print(f"[set-up] {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\n[set-up] interrupted; the same command goes on where this one stopped.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
