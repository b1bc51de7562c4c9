"""The definition of an approximated pipeline, by stock's own forward: all is computed, and some of it put aside.

A shallow step is a whole one in which what comes into one layer of the way up is taken from an earlier step. A step
without guidance of its own is one in which the half without the prompt is the other half less an earlier difference.
"""

from __future__ import annotations

import torch

from rocm_sd.arch import CPU, Arch


class Definition:
    """On a stock pipeline: `skipping` as the engine takes it."""

    def __init__(self, pipe, skipping):
        self.pipe, self.skipping = pipe, skipping
        self.timesteps = None
        self.features, self.difference = [], None
        resnets = [resnet for block in pipe.unet.up_blocks for resnet in block.resnets]
        if skipping.caches:
            resnets[-skipping.depth].register_forward_pre_hook(self.exchange)
            self.skip_channels = self._channels(pipe.unet)[skipping.depth - 1]
        self.own = pipe.unet.forward
        pipe.unet.forward = self.forward

    @staticmethod
    def _channels(unet):
        """Of each skip connection, in the order in which they are left."""
        found = [unet.conv_in.out_channels]
        for block in unet.down_blocks:
            width = block.resnets[0].out_channels
            found += [width] * (len(block.resnets) + (block.downsamplers is not None))
        return found

    def exchange(self, _module, args):
        joined, *others = args
        hidden, skip = joined.split([joined.shape[1] - self.skip_channels, self.skip_channels], dim=1)
        if self.step.whole:
            kept = hidden
            if not self.step.guided and self.features and self.halves:
                kept = torch.cat([self.features[-1][1][: len(hidden) // 2], hidden[len(hidden) // 2 :]])
            self.features = [*(self.features[-1:] if self.skipping.order else []), (self.number, kept)]
            return None
        (at, last), hidden = self.features[-1], self.features[-1][1]
        if len(self.features) == 2:
            before, earlier = self.features[0]
            hidden = earlier + (last - earlier) * (self.number - before) / (at - before)
        return (torch.cat([hidden, skip], dim=1), *others)

    def forward(self, sample, timestep, *args, **kwargs):
        timesteps = self.pipe.scheduler.timesteps
        # A picture's own: a schedule that names one timestep twice is told by the order of its calls.
        if timesteps is not self.timesteps:
            self.timesteps, self.features, self.difference = timesteps, [], None
            self.first = self.number = timesteps.tolist().index(float(timestep))
        else:
            self.number += 1
        self.halves = self.pipe.do_classifier_free_guidance and self.skipping.skips_guidance
        self.step = self.skipping.step(self.number, self.first, len(timesteps))
        answer = self.own(sample, timestep, *args, **kwargs)[0]
        if not self.halves:
            return (answer,)
        without, with_prompt = answer.chunk(2)
        if self.step.guided:
            self.difference = with_prompt - without
            return (answer,)
        return (torch.cat([with_prompt - (self.difference if self.step.difference else 0), with_prompt]),)


def as_if_the_cpu_multiplied_fp8(monkeypatch):
    """So that what comes into layers in fp8 is rounded there, too."""
    own = Arch.multiplies
    monkeypatch.setattr(Arch, "multiplies", lambda here, to: own(here, to) or (here is CPU and to == "float8_e4m3fn"))
