"""Rules for the model classes of latent diffusion (ldm), of which ComfyUI and Automatic1111 have forks.

A rule is written once, in blocks.py. What the hosts differ in is a policy: `HostPolicy` has the questions, and each
host's integration the answers. So are steps that leave the UNet's deep layers out (shallow_pass.py, shallow_steps.py).
"""

from rocm_sd.integrations.ldm.blocks import NORM_OUT, TRANSFORMER_RULES, UNET_RULES, VAE_RULES
from rocm_sd.integrations.ldm.quality import HostSetting, in_words, quality_of, settings_for
from rocm_sd.integrations.ldm.rules import BlockRule, HostPolicy, is_ready
from rocm_sd.integrations.ldm.shallow_pass import run as run_pass
from rocm_sd.integrations.ldm.shallow_steps import HostPasses, ShallowSteps, Told, here

__all__ = [
    "NORM_OUT", "TRANSFORMER_RULES", "UNET_RULES", "VAE_RULES", "BlockRule", "HostPasses", "HostPolicy", "HostSetting",
    "ShallowSteps", "Told", "here", "in_words", "is_ready", "quality_of", "run_pass", "settings_for",
]  # fmt: skip
