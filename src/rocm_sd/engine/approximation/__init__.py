"""Steps that leave work out, within a budget of quality: what, when, and by which settings."""

from rocm_sd.engine.approximation.branches import can_be_approximated
from rocm_sd.engine.approximation.combined import Approximation
from rocm_sd.engine.approximation.installing import has_halves, install_inside, install_outside
from rocm_sd.engine.approximation.measured import known, remember
from rocm_sd.engine.approximation.shipped import Setting, shipped
from rocm_sd.engine.approximation.skipping import EXACT, Skipping

__all__ = [
    "EXACT",
    "Approximation",
    "Setting",
    "Skipping",
    "can_be_approximated",
    "has_halves",
    "install_inside",
    "install_outside",
    "known",
    "remember",
    "shipped",
]
