"""Schedulers by the short names that users know."""

from __future__ import annotations

from typing import Any

import diffusers

from rocm_sd.errors import require_one_of

__all__ = ["SCHEDULERS", "set_scheduler"]

SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddim": ("DDIMScheduler", {}),
    # Without its Runge-Kutta warm-up, as in Stable Diffusion's own config: that would need four steps at least.
    "pndm": ("PNDMScheduler", {"skip_prk_steps": True}),
    "euler": ("EulerDiscreteScheduler", {}),
    "euler-a": ("EulerAncestralDiscreteScheduler", {}),
    "dpm++2m": ("DPMSolverMultistepScheduler", {}),
    "dpm++2m-karras": ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}),
    "unipc": ("UniPCMultistepScheduler", {}),
    "lcm": ("LCMScheduler", {}),
}


def set_scheduler(pipe: Any, name: str) -> None:
    """Give the pipeline another scheduler with the noise schedule of its own."""
    require_one_of("scheduler", name, SCHEDULERS)
    class_name, options = SCHEDULERS[name]
    pipe.scheduler = getattr(diffusers, class_name).from_config(pipe.scheduler.config, **options)
