"""Rules for the model classes of latent diffusion (ldm), of which ComfyUI and Automatic1111 have forks.

A rule is written once, in blocks.py. What the hosts differ in is a policy: `HostPolicy` has the questions, and each
host's integration the answers.
"""

from rocm_sd.integrations.ldm.blocks import NORM_OUT, TRANSFORMER_RULES, UNET_RULES, VAE_RULES
from rocm_sd.integrations.ldm.rules import BlockRule, HostPolicy, is_ready

__all__ = ["NORM_OUT", "TRANSFORMER_RULES", "UNET_RULES", "VAE_RULES", "BlockRule", "HostPolicy", "is_ready"]
