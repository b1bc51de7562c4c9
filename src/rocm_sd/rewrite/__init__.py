"""What in a model is replaced by which op: a file per rule. Instances are touched, never classes; all can be undone."""

from rocm_sd.rewrite.apply import Change, Rule, apply, undo
from rocm_sd.rewrite.resblock import RULE as RESBLOCK

__all__ = ["RULES", "Change", "Rule", "apply", "undo"]

RULES: tuple[Rule, ...] = (RESBLOCK,)
