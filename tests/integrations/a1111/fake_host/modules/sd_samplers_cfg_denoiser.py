"""The host's denoiser: it counts its calls, tells scripts of each, and calls the model for both prompts."""

# ruff: noqa: ARG002 -- the signatures are the host's
from __future__ import annotations

import torch

from modules import shared
from modules.script_callbacks import CFGDenoiserParams, cfg_denoised_callback, cfg_denoiser_callback


class CFGDenoiser(torch.nn.Module):
    def __init__(self, sampler):
        super().__init__()
        self.sampler, self.step, self.steps, self.total_steps = sampler, 0, None, None

    @property
    def inner_model(self):
        raise NotImplementedError

    def forward(self, x, sigma, uncond, cond, cond_scale, s_min_uncond, image_cond):
        text, without = cond(self.step), uncond(self.step)
        state, s_in = shared.state, torch.cat([sigma, sigma])
        params = CFGDenoiserParams(
            torch.cat([x, x]), image_cond, s_in, state.sampling_step, state.sampling_steps, text, without, self
        )
        cfg_denoiser_callback(params)
        if shared.opts.batch_cond_uncond and text.shape == without.shape:
            out = self.inner_model(params.x, params.sigma, cond=torch.cat([text, without]))
        else:
            out = torch.cat([self.inner_model(x, sigma, cond=one) for one in (text, without)])
        cfg_denoised_callback(params)
        with_prompt, without_it = out.chunk(2)
        self.step += 1
        return without_it + cond_scale * (with_prompt - without_it)
