"""A job of the host, in the order in which it asks scripts, chooses its UNet, samples and decodes."""

from __future__ import annotations

import torch

from modules import sd_unet, shared


class StableDiffusionProcessing:
    def __init__(self):
        self.extra_generation_params, self.comments = {}, {}

    def comment(self, text):
        self.comments[text] = 1


class Processed:
    def __init__(self, p, images_list):
        self.images, self.comments = images_list, "".join(f"{comment}\n" for comment in p.comments)


def process_images(p, script, args, sizes=((8, 8),), steps=3, between=None):
    """`sizes`: of one job; with hires fix there are two. `between(step)` is what others do at that step."""
    script.process(p, *args)
    with torch.no_grad():
        sd_unet.apply_unet()
        pictures = []
        for size in sizes:
            generator = torch.Generator().manual_seed(1)
            x = torch.randn(2, 4, *size, generator=generator)
            text = torch.randn(2, 7, 24, generator=generator)
            for step in range(steps):
                if between is not None:
                    between(step)
                t = torch.full((2,), 900.0 - 100 * step)
                x = x - 0.1 * shared.sd_model.model(x, t, text)
            pictures.append(shared.sd_model.first_stage_model(x))
    processed = Processed(p, pictures)
    script.postprocess(p, processed, *args)
    return processed
