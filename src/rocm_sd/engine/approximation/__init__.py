"""Steps that leave work out, within a budget of quality: what, when, and by which settings."""

from rocm_sd.engine.approximation.branches import can_be_approximated
from rocm_sd.engine.approximation.combined import Approximation
from rocm_sd.engine.approximation.eight_bits import install as install_eight_bits
from rocm_sd.engine.approximation.installing import has_halves, install_inside, install_outside
from rocm_sd.engine.approximation.measured import known, remember
from rocm_sd.engine.approximation.merging import Merging
from rocm_sd.engine.approximation.shipped import Setting, are_about_steps, shipped
from rocm_sd.engine.approximation.skipping import EXACT, Skipping
from rocm_sd.engine.approximation.small_decoder import install as install_small_decoder
from rocm_sd.engine.approximation.small_decoder import preview
from rocm_sd.engine.approximation.small_decoder import wanted as wants_small_decoder

__all__ = [
    "EXACT",
    "Approximation",
    "Merging",
    "Setting",
    "Skipping",
    "are_about_steps",
    "can_be_approximated",
    "has_halves",
    "install_eight_bits",
    "install_inside",
    "install_outside",
    "install_small_decoder",
    "known",
    "preview",
    "remember",
    "shipped",
    "wants_small_decoder",
]
