"""Why the processes of a job have not met, in words that say what to type next.

| what torch says | what was wrong |
|---|---|
| nothing: it was not asked | a process was started by itself, or not told where rank 0 is |
| address already in use | another program has rank 0's port |
| 1/2 clients joined | rank 0 has waited for the others |
| the client socket has timed out | a rank has waited for rank 0 |
| Unable to find address | the network interface that was named is not there |
| an error of NCCL or RCCL | the cards cannot exchange anything |
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocm_sd.errors import JobFailed, RocmSdError, Unsupported, first_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["require_told", "why_cards_are_apart", "why_not_met", "why_unlike_versions"]

_RANK, _MEETING = ("RANK", "WORLD_SIZE"), ("MASTER_ADDR", "MASTER_PORT")
_PYTORCH_INDEX = "https://download.pytorch.org/whl"


def require_told(environment: Mapping[str, str]) -> None:
    """Raises what is missing of a rank, its job and the place where they meet, as launchers tell it."""
    if any(name not in environment for name in _RANK):
        hint = f'Type: rocm-sd generate --gpus 2 "a frog", or start your script with: {_started(2)}'
        raise Unsupported("parallelize", "a process that belongs to no job", hint=hint)
    missing = [name for name in _MEETING if name not in environment]
    if missing:
        raise JobFailed(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set: this rank does not know where "
            "rank 0 is.",
            hint=f"Start all ranks with: {_started(environment['WORLD_SIZE'])}. By hand, for every one of them: "
            "export MASTER_ADDR=127.0.0.1 MASTER_PORT=29500",
        )
    port = environment["MASTER_PORT"]
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) >= 1 << 16:
        raise JobFailed(f"MASTER_PORT is {port!r}, which is no port.", hint="Type: export MASTER_PORT=29500")


def why_not_met(error: Exception, environment: Mapping[str, str] = os.environ) -> JobFailed:
    """Of an error of torch where ranks meet."""
    said, ranks = str(error), environment["WORLD_SIZE"]
    host, port = environment["MASTER_ADDR"], environment["MASTER_PORT"]
    come = re.search(r"(\d+)/(\d+) clients joined", said)
    interface = re.search(r"Unable to find address for: (\S+)", said)
    if "EADDRINUSE" in said or "address already in use" in said.lower():
        another = 1024 + (int(port) - 1023) % 64512
        return JobFailed(
            f"Port {port} of {host} is taken, by another job or program.",
            hint=f"A free one is found by: {_started(ranks)}. By hand, for every rank: export MASTER_PORT={another}",
        )
    if interface is not None:
        return JobFailed(
            f"This machine has no network interface {interface[1]!r}.",
            hint="Type: ip -brief address, to see their names, and export GLOO_SOCKET_IFNAME with one of them; or: "
            "unset GLOO_SOCKET_IFNAME",
        )
    if come is not None:
        return JobFailed(
            f"{come[1]} of {come[2]} processes have come to {host}:{port}, and nobody else did.",
            hint=f"Look at what the others say. Start all of them at once: {_started(ranks)}. Where they run on other "
            f"machines, type there: nc -vz {host} {port}, to see whether a firewall is between.",
        )
    if "client socket" in said:
        return JobFailed(
            f"Rank {environment['RANK']} does not reach rank 0 at {host}:{port}.",
            hint=f"Has rank 0 been started, and does MASTER_ADDR name its machine? Type here: nc -vz {host} {port}, to "
            "see whether a firewall is between.",
        )
    return JobFailed(
        f"The processes of this job did not find each other at {host}:{port} ({first_line(error)}).",
        hint=f"Look at what the others say: one may have ended. Start all of them again: {_started(ranks)}",
    )


def why_cards_are_apart(error: RocmSdError) -> JobFailed:
    """Where the first thing that ranks say through NCCL or RCCL does not arrive."""
    return JobFailed(
        f"The GPUs of this job cannot reach each other: {error.message}",
        hint="Another rank's error comes first, if there is one. The link that fails is named by: "
        "export NCCL_DEBUG=INFO. Around a link between cards, through the host's memory: export NCCL_P2P_DISABLE=1",
    )


def why_unlike_versions(said: Sequence[Mapping[str, Any]]) -> JobFailed | None:
    """`said`: by rank, the version of each package; rank 0's are the ones to have."""
    for rank, versions in enumerate(said):
        for name, version in versions.items():
            if version != said[0][name]:
                return JobFailed(
                    f"Rank {rank} has {name} {version}, and rank 0 has {said[0][name]}: pictures would differ.",
                    hint=f"Where rank {rank} runs, type: {_install(name, str(said[0][name]))}",
                )
    return None


def _install(name: str, version: str) -> str:
    public, _, build = version.partition("+")
    # Without its index, a build for AMD would be replaced by one for NVIDIA.
    index = f" --index-url {_PYTORCH_INDEX}/{build}" if name == "torch" and build else ""
    return f"pip install {name}=={public}{index}"


def _started(ranks: object) -> str:
    """How to start this script in that many processes; the port is one that is free."""
    script = Path(sys.argv[0]).name
    script = script if script.endswith(".py") and script != "__main__.py" else "draw.py"
    return f"torchrun --standalone --nproc-per-node {ranks} {script}"
