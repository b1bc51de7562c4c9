"""The host's samplers of k-diffusion, as far as their denoiser goes."""

from __future__ import annotations

from modules import sd_samplers_cfg_denoiser, shared


class CFGDenoiserKDiffusion(sd_samplers_cfg_denoiser.CFGDenoiser):
    @property
    def inner_model(self):
        def denoised(x, sigma, cond):
            noise = shared.sd_model.model(x / (1 + sigma[:, None, None, None] ** 2) ** 0.5, 100 * sigma, cond)
            return x - sigma[:, None, None, None] * noise

        return denoised
