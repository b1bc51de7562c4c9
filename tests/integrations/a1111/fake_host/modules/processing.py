"""A job of the host, in the order in which it asks scripts, chooses its UNet, samples and decodes."""

from __future__ import annotations

import torch

from modules import sd_samplers_kdiffusion, sd_unet, shared


class StableDiffusionProcessing:
    def __init__(self):
        self.extra_generation_params, self.comments = {}, {}

    def comment(self, text):
        self.comments[text] = 1


class Processed:
    def __init__(self, p, images_list):
        self.images, self.comments = images_list, "".join(f"{comment}\n" for comment in p.comments)


def process_images(p, script, args, sizes=((8, 8),), steps=3, between=None, sampler=None, texts=None):
    """`sizes`: of one job; with hires fix there are two. `between(step)` is what others do at that step. `sampler`: one
    of k-diffusion, which has `second_order` where it calls twice a step. `texts(step)`: with the prompt and without it.
    """
    script.process(p, *args)
    with torch.no_grad():
        sd_unet.apply_unet()
        pictures = []
        for size in sizes:
            generator = torch.Generator().manual_seed(1)
            x = torch.randn(2, 4, *size, generator=generator)
            text = torch.randn(2, 7, 24, generator=generator)
            if sampler is not None:
                given = texts or (lambda _step, text=text: (text, text.flip(0)))
                pictures.append(_sampled(sampler, x, given, steps, between))
                continue
            for step in range(steps):
                if between is not None:
                    between(step)
                t = torch.full((2,), 900.0 - 100 * step)
                x = x - 0.1 * shared.sd_model.model(x, t, text)
            pictures.append(shared.sd_model.first_stage_model(x))
    processed = Processed(p, pictures)
    script.postprocess(p, processed, *args)
    return processed


def _sampled(sampler, x, texts, steps, between):
    """As the host's KDiffusionSampler does it; the latents themselves."""
    denoiser, state = sd_samplers_kdiffusion.CFGDenoiserKDiffusion(None), shared.state
    denoiser.steps, denoiser.total_steps = steps, steps * (2 if getattr(sampler, "second_order", False) else 1)
    state.sampling_steps, state.sampling_step = steps, 0
    sigmas = torch.cat([torch.linspace(9.0, 0.5, steps), torch.zeros(1)])
    args = {
        "cond": lambda step: texts(step)[0], "uncond": lambda step: texts(step)[1], "cond_scale": 3.0,
        "s_min_uncond": 0.0, "image_cond": None,
    }  # fmt: skip

    def callback(done):
        state.sampling_step = done["i"]
        if between is not None:
            between(done["i"])

    return sampler(denoiser, x * sigmas[0], sigmas, extra_args=args, callback=callback)
