"""How convolutions run: the layout of their weights, and the setting of the vendor's library around a model's call."""

from rocm_sd.engine.convolutions.layout import CHANNELS_LAST, choose_layout, convolution_dtype, lay_out
from rocm_sd.engine.convolutions.library import (
    ChosenLibrary,
    choose_library,
    convolving_models,
    flags_set_by_hand,
    install_library,
)  # fmt: skip
from rocm_sd.engine.convolutions.strides import answers_channels_last

__all__ = [
    "CHANNELS_LAST", "ChosenLibrary", "answers_channels_last", "choose_layout", "choose_library", "convolution_dtype",
    "convolving_models", "flags_set_by_hand", "install_library", "lay_out",
]  # fmt: skip
