"""The checks, found and run one after the other. A check that raises is unknown, with the reason: never a pass."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from rocm_sd import plugging
from rocm_sd.doctor import checks as checks_package
from rocm_sd.doctor.check import CannotRun, Check, Finding, Probe, Probes, unknown
from rocm_sd.errors import require_one_of
from rocm_sd.plain_json import shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rocm_sd.doctor.facts import Facts

__all__ = ["Examined", "all_checks", "all_probes", "chosen_checks", "examine"]


_LONGEST = 1000


@dataclass(frozen=True)
class Examined:
    check: Check
    finding: Finding


def all_checks() -> tuple[Check, ...]:
    """Every module in doctor/checks/, by name. One that cannot be imported is a check that says so."""
    return tuple(
        _check(name) for name in sorted(module.name for module in pkgutil.iter_modules(checks_package.__path__))
    )


def all_probes() -> dict[str, Probe]:
    """What the checks measure, by name."""
    return {check.probe.name: check.probe for check in all_checks() if check.probe is not None}


def chosen_checks(names: Sequence[str]) -> tuple[Check, ...]:
    every = all_checks()
    by_name = {check.name: check for check in every}
    for name in names:
        require_one_of("check", name, sorted(by_name))
    return tuple(by_name[name] for name in dict.fromkeys(names)) or every


def examine(
    facts: Facts, probes: Probes, checks: Sequence[Check], progress: Callable[[str], None] | None = None
) -> tuple[Examined, ...]:
    """Run the checks in their order; `progress` gets the name of each before it is run."""
    examined = []
    for check in checks:
        if progress is not None:
            progress(check.name)
        examined.append(Examined(check, _run(check, facts, probes)))
    return tuple(examined)


def _run(check: Check, facts: Facts, probes: Probes) -> Finding:
    try:
        return check.run(facts, probes)
    except CannotRun as reason:
        # A recorded machine's answer may be as long as a file.
        return unknown(f"It could not be run: {shortened(str(reason).rstrip('.'), _LONGEST)}.")
    except plugging.FAULTS as error:  # of one check must not end the others, nor pass for health
        return unknown(f"The check itself failed: {type(error).__name__}: {shortened(str(error), _LONGEST)}.")


def _check(name: str) -> Check:
    try:
        found = getattr(import_module(f"{checks_package.__name__}.{name}"), name)
    except plugging.FAULTS as error:  # whatever a broken module raises, the others are still wanted
        return _broken(name, f"{type(error).__name__}: {error}")
    return found if isinstance(found, Check) else _broken(name, f"its {name} is no check")


def _broken(name: str, reason: str) -> Check:
    def run(_facts: Facts, _probes: Probes) -> Finding:
        raise CannotRun(f"the check could not be loaded ({reason})")

    return Check(name, f"Does the check {name} load?", "nothing: it did not load", (), run)
