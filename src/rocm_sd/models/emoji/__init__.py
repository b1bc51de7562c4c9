"""What emoji-sd knows: its emoji, colours, caption grammar, held-out combinations and fixed prompt sets.

Torch-free: training, evaluation and the command line all read this one description.
"""

from __future__ import annotations

from pathlib import Path

from rocm_sd.models.emoji.captions import POSITIONS, RELATIONS, SIZES, Scene, caption, phrases, plain_caption
from rocm_sd.models.emoji.colours import COLOUR_JITTER, COLOURS, DEFAULT_COLOUR, nearest_colour
from rocm_sd.models.emoji.prompts import (
    DEMO_PROMPTS,
    Prompt,
    held_out_pair_prompts,
    held_out_prompts,
    trained_prompts,
)
from rocm_sd.models.emoji.records import EMOJI, Emoji, find_emoji
from rocm_sd.models.emoji.split import is_held_out, is_held_out_pair

__all__ = [
    "COLOURS",
    "COLOUR_JITTER",
    "DEFAULT_COLOUR",
    "DEMO_PROMPTS",
    "EMBEDDING_FILE",
    "EMOJI",
    "MODEL_FOLDER",
    "POSITIONS",
    "RELATIONS",
    "SIZES",
    "Emoji",
    "Prompt",
    "Scene",
    "caption",
    "find_emoji",
    "held_out_pair_prompts",
    "held_out_prompts",
    "is_held_out",
    "is_held_out_pair",
    "nearest_colour",
    "phrases",
    "plain_caption",
    "trained_prompts",
]

# The Diffusers folder and the image embedding that ship with the package.
MODEL_FOLDER = Path(__file__).parent / "emoji-sd"
EMBEDDING_FILE = Path(__file__).parent / "embedding.safetensors"
