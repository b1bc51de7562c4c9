"""Steps that leave work out, within a budget of quality: what, when, and by which settings."""

from rocm_sd.engine.approximation.branches import can_be_approximated
from rocm_sd.engine.approximation.changes import evenly_changed, feature_changes
from rocm_sd.engine.approximation.choosing import chosen
from rocm_sd.engine.approximation.combined import Approximation
from rocm_sd.engine.approximation.eight_bit_files import load_eight_bits, save_eight_bits
from rocm_sd.engine.approximation.eight_bits import Tried, eight_bit_layers, is_copied_in_eight_bits
from rocm_sd.engine.approximation.installing import has_halves, install_eight_bits, install_inside, install_outside
from rocm_sd.engine.approximation.measured import known, known_with_plan, remember
from rocm_sd.engine.approximation.merging import Merging
from rocm_sd.engine.approximation.observing import observe
from rocm_sd.engine.approximation.picture_steps import PictureStep, PictureSteps
from rocm_sd.engine.approximation.shipped import (
    Setting,
    are_about_steps,
    as_given,
    costs,
    of_steps,
    shipped,
    why_none,
)
from rocm_sd.engine.approximation.skipping import EXACT, Skipping
from rocm_sd.engine.approximation.small_decoder import has_small_decoder, preview
from rocm_sd.engine.approximation.small_decoder import install as install_small_decoder
from rocm_sd.engine.approximation.small_decoder import wanted as wants_small_decoder

__all__ = [
    "EXACT",
    "Approximation",
    "Merging",
    "PictureStep",
    "PictureSteps",
    "Setting",
    "Skipping",
    "Tried",
    "are_about_steps",
    "as_given",
    "can_be_approximated",
    "chosen",
    "costs",
    "eight_bit_layers",
    "evenly_changed",
    "feature_changes",
    "has_halves",
    "has_small_decoder",
    "install_eight_bits",
    "install_inside",
    "install_outside",
    "install_small_decoder",
    "is_copied_in_eight_bits",
    "known",
    "known_with_plan",
    "load_eight_bits",
    "observe",
    "of_steps",
    "preview",
    "remember",
    "save_eight_bits",
    "shipped",
    "wants_small_decoder",
    "why_none",
]
