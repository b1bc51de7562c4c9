"""What in a model is replaced by which op: a file per rule. Instances are touched, never classes; all can be undone.

Every rule that a file of this package has is found, and listed nowhere.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from rocm_sd.rewrite.apply import Change, Rule, apply, undo

__all__ = ["RULES", "RULES_FOR_GRAPHS", "Change", "Rule", "apply", "undo"]


def _rules(*, for_graphs: bool) -> tuple[Rule, ...]:
    """In the order of the files' names."""
    modules = (import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__))
    found = (value for module in modules for value in vars(module).values() if isinstance(value, Rule))
    return tuple({rule.name: rule for rule in found if rule.for_graphs is for_graphs}.values())


RULES = _rules(for_graphs=False)
RULES_FOR_GRAPHS = _rules(for_graphs=True)
