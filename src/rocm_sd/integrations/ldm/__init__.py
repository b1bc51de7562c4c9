"""Rules for the model classes of latent diffusion (ldm), of which ComfyUI and Automatic1111 have forks.

A rule is written once, in the file of its block. What the hosts differ in is a policy: `HostPolicy` has the questions,
and each host's integration the answers.
"""

from rocm_sd.integrations.ldm.attention_blocks import TRANSFORMER_RULES, VAE_ATTENTION
from rocm_sd.integrations.ldm.convolutional_blocks import NORM_OUT, UNET_RULES, VAE_CONVOLUTIONAL_RULES
from rocm_sd.integrations.ldm.policy import HostPolicy, is_ready
from rocm_sd.integrations.ldm.rules import BlockRule, is_replacement, mark_replacement

__all__ = [
    "NORM_OUT",
    "TRANSFORMER_RULES",
    "UNET_RULES",
    "VAE_RULES",
    "BlockRule",
    "HostPolicy",
    "is_ready",
    "is_replacement",
    "mark_replacement",
]

VAE_RULES = (*VAE_CONVOLUTIONAL_RULES, VAE_ATTENTION)
