"""Is there one Triton, and the one that torch wants?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_sd.arch.host import TRITON_PACKAGES
from rocm_sd.doctor.check import Finding, Fix, Probes, Status, check, fine, problem

if TYPE_CHECKING:
    from rocm_sd.doctor.facts import Facts

__all__ = ["two_tritons"]

_PYTORCH_INDEX = "https://download.pytorch.org/whl"


@check(
    measures="every installed package that has Triton, against the one that torch's own package asks for",
    reports="ROCm/ROCm#3060 pytorch/pytorch#113623",
)
def two_tritons(facts: Facts, _probes: Probes) -> Finding:
    # All of them install one folder: the last one wins, file by file.
    found = {name: facts.packages[name] for name in TRITON_PACKAGES if name in facts.packages}
    installed = ", ".join(f"{name} {version}" for name, version in found.items())
    wanted = facts.torch.wants_triton
    name, _, version = (wanted or "").partition("==")
    if len(found) > 1:
        says = f"{len(found)} packages install Triton into the same folder: {installed}."
        means = "Files of both are mixed. torch.compile and Triton kernels fail, or are built for another GPU."
    elif wanted is None:
        return Finding(Status.OK if found else Status.NOT_HERE, f"Triton: {installed or 'none'}; torch asks for none.")
    elif not found:
        means = "torch.compile and Triton kernels cannot run; stock torch can."
        return problem(f"torch asks for {wanted}, and no Triton is installed.", means, _one((), wanted, facts))
    elif found.get(name) != version:
        says = f"torch {facts.torch.version} asks for {wanted}, and {installed} is installed."
        means = "A Triton of another version or for another vendor fails when torch compiles."
    else:
        return fine(f"There is one Triton, {installed}, and torch asks for it.")
    return problem(says, means, _one(tuple(found), wanted, facts), {"installed": found, "wanted": wanted})


def _one(installed: tuple[str, ...], wanted: str | None, facts: Facts) -> Fix:
    commands: tuple[str, ...] = (f"pip uninstall -y {' '.join(installed)}",) if installed else ()
    if wanted is not None:
        commands += (f'pip install --no-deps {_index(wanted, facts)}"{wanted}"',)
    return Fix("Remove them all, and install the one that torch asks for.", commands=commands)


def _index(wanted: str, facts: Facts) -> str:
    """PyPI has the name triton alone; a ROCm build stands in the index that torch came from."""
    build = (facts.torch.version or "").partition("+")[2]
    if wanted.startswith("triton==") and "+" not in wanted:
        return ""
    # PyTorch's own wheels name ROCm by two numbers, AMD's by three: of those the index is not known from the version.
    return (
        f"--index-url {_PYTORCH_INDEX}/{build} " if build.count(".") == 1 else "--index-url <the index of your torch> "
    )
