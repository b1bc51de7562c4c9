"""Random sequences of what users do between two pictures: each picture is stock's, whatever came before it."""

from __future__ import annotations

import random
from inspect import signature

import pytest
import torch

import rocm_sd
from pipelines import (
    CASES,
    POOLED,
    SCHEDULERS,
    TEXT,
    Twins,
    embeddings_of,
    mask_of,
    picture_of,
    scheduler_of,
    small_blocks_too,
)
from tiny_models import copied, lora_of

# As many operations as 50 sequences of 4 have, with fewer models to build and longer ways to go wrong.
SEQUENCES = 30
OPERATIONS = 7
PROMPTS = ("a frog", "two cats on a mat", "x")
TARGETS = {
    "unet": ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "proj_in", "conv1"),
    "transformer": ("to_q", "to_k", "to_v", "to_out.0", "add_k_proj"),
}
# Every family, and of each kind of pipeline one: what differs between the others is not touched by operations.
KINDS = (
    "sd15", "sdxl", "flux-dev", "sd15-img2img", "sd21", "sd3", "sdxl-controlnet", "sd15-inpaint9", "lcm-sd15", "turbo",
)  # fmt: skip
DYNAMIC = ("sd15", "sd21", "sdxl")


class Walk:
    """Three pipelines of the same weights and what their user has chosen by now."""

    def __init__(self, name, folder, seed):
        self.random = random.Random(seed)
        self.name, self.case, self.folder = name, CASES[name], folder
        self.twins = Twins(self.case, folder)
        self.part = "unet" if hasattr(self.twins.stock, "unet") else "transformer"
        fresh = getattr(self.twins.stock, self.part)
        self.files = {file: lora_of(fresh, self.part, TARGETS[self.part], seed=file) for file in (1, 2)}
        self.takes = signature(type(self.twins.stock).__call__).parameters
        self.tensor_inputs = self.twins.stock._callback_tensor_inputs
        self.adapter = None
        self.fused = False
        self.size = (16, 16)
        self.prompts = PROMPTS[:1]
        self.tokens = None
        self.callback = None
        self.options = {"num_inference_steps": 3}
        self.done = []

    def operate(self):
        operation = self.random.choice(OPERATIONS_OF_A_USER)
        self.done.append(operation.__name__)
        operation(self)

    def guided(self):
        return self.options.get("guidance_scale", 5.0) > 1

    def arguments(self):
        height, width = self.size
        batch = len(self.prompts)
        given = dict(self.case.arguments)
        for number, key in enumerate(("image", "control_image")):
            if key in given:
                given[key] = picture_of(number, height, width, batch)
        if "mask_image" in given:
            given["mask_image"] = mask_of(height, width, batch)
        if "height" in given:
            given |= {"height": height, "width": width}
        if "prompt" in given:
            given["prompt"] = list(self.prompts)
        given |= self.options | self.embedded(batch)
        images = batch * given.get("num_images_per_prompt", 1)
        if self.random.random() < 0.3:
            given["generator"] = lambda: [torch.Generator().manual_seed(number) for number in range(images)]
        if self.callback is not None:
            given |= {"callback_on_step_end": self.callback, "callback_on_step_end_tensor_inputs": self.tensor_inputs}
        return given

    def embedded(self, batch):
        """The prompt as tensors where it is longer than a text encoder takes, or where there is none."""
        if self.part == "transformer":
            wide, pooled = (2 * TEXT, 2 * POOLED) if self.name == "sd3" else (TEXT, POOLED)
        else:
            wide, pooled = self.twins.stock.unet.config.cross_attention_dim, POOLED
        tokens = self.tokens or (12 if "prompt" not in self.case.arguments else None)
        if tokens is None:
            return {}
        parts = {"prompt_embeds": embeddings_of(tokens, batch, tokens, wide)}
        if "pooled_prompt_embeds" in self.takes:
            parts["pooled_prompt_embeds"] = embeddings_of(3, batch, pooled)
        if ("negative_prompt_embeds" in self.takes and self.part == "unet") or self.name == "sd3":
            parts |= {f"negative_{key}": value.flip(-1) for key, value in list(parts.items())}
        return parts | ({"prompt": None} if "prompt" in self.case.arguments else {})

    def look(self):
        self.twins.check(self.random.randrange(3), **self.arguments())


def another_size(walk):
    # Odd numbers of latents too: the samplers of a UNet then give the size to each other.
    walk.size = walk.random.choice([(16, 16), (24, 16), (16, 32)])


def another_batch(walk):
    walk.prompts = PROMPTS[: walk.random.choice([1, 2, 3])]


def several_images_per_prompt(walk):
    walk.options["num_images_per_prompt"] = walk.random.choice([1, 2])


def another_prompt(walk):
    walk.prompts = tuple(walk.random.sample(PROMPTS, len(walk.prompts)))


def another_length(walk):
    walk.tokens = walk.random.choice([None, 16, 154])


def another_number_of_steps(walk):
    walk.options["num_inference_steps"] = walk.random.choice([2, 3, 4])


def another_scheduler(walk):
    if walk.part == "unet" and walk.name not in ("lcm-sd15", "turbo"):
        name = walk.random.choice(list(SCHEDULERS))
        options = walk.case.scheduler_options
        walk.twins.each(lambda pipe: setattr(pipe, "scheduler", scheduler_of(name, **options)))


def the_scheduler_of_another_config(walk):
    """As users write it: a class of the same family, with this one's options."""
    if walk.part == "unet":
        kind = type(scheduler_of(walk.random.choice(["euler", "dpm++"])))
        walk.twins.each(lambda pipe: setattr(pipe, "scheduler", kind.from_config(pipe.scheduler.config)))


def another_guidance(walk):
    walk.options["guidance_scale"] = walk.random.choice([1.0, 3.0, 7.5])
    if walk.callback in (change_guidance, fade_guidance):
        walk.callback = None


def another_rescale(walk):
    if "guidance_rescale" in walk.takes:
        walk.options["guidance_rescale"] = walk.random.choice([0.0, 0.7])


def another_eta(walk):
    if "eta" in walk.takes:
        walk.options["eta"] = walk.random.choice([0.0, 0.5])


def change_latents(pipe, step, timestep, given):
    return {"latents": given["latents"] * 0.9} if step == 0 else {}


def change_latents_in_place(pipe, step, timestep, given):
    if step == 0:
        given["latents"].mul_(0.9)
    return {}


def change_the_prompt(pipe, step, timestep, given):
    return {"prompt_embeds": given["prompt_embeds"].flip(-1)} if step == 0 else {}


def change_the_prompt_in_place(pipe, step, timestep, given):
    if step == 0:
        given["prompt_embeds"].mul_(0.5)
    return {}


def interrupt(pipe, step, timestep, given):
    pipe._interrupt = step >= 1
    return {}


def change_guidance(pipe, step, timestep, given):
    pipe._guidance_scale = 2.0 + step
    return {}


def fade_guidance(pipe, step, timestep, given):
    """Diffusers' own example of a callback: no guidance after some of the steps."""
    if step != 0:
        return {}
    pipe._guidance_scale = 0.0
    halved = [name for name in ("prompt_embeds", "add_text_embeds", "add_time_ids") if name in given]
    return {name: given[name].chunk(2)[-1] for name in halved}


def another_callback(walk):
    choice = [None, change_latents, change_latents_in_place, interrupt]
    if "prompt_embeds" in walk.tensor_inputs:
        choice += [change_the_prompt, change_the_prompt_in_place]
    if walk.name in DYNAMIC and walk.guided():
        choice += [change_guidance, fade_guidance]
    walk.callback = walk.random.choice(choice)


def load_lora(walk):
    if walk.adapter is None:
        file = walk.random.choice([1, 2])
        walk.twins.each(lambda pipe: pipe.load_lora_weights(copied(walk.files[file]), adapter_name="a"))
        walk.adapter, walk.fused = file, False
    else:
        unload_lora(walk)


def unload_lora(walk):
    """Of a fused one the weights stay changed."""
    walk.twins.each(lambda pipe: pipe.unload_lora_weights())
    walk.adapter, walk.fused = None, False


def scale_lora(walk):
    if walk.adapter is None:
        load_lora(walk)
    elif not walk.fused:
        weight = walk.random.choice([0.0, 0.4, 1.3])
        walk.twins.each(lambda pipe: pipe.set_adapters(["a"], [weight]))


def fuse_lora(walk):
    if walk.adapter is None:
        load_lora(walk)
    elif walk.fused:
        walk.twins.each(lambda pipe: pipe.unfuse_lora(components=[walk.part]))
        walk.fused = False
    else:
        walk.twins.each(lambda pipe: pipe.fuse_lora(components=[walk.part]))
        walk.fused = True


def swap_lora(walk):
    if walk.adapter is None or walk.fused:
        load_lora(walk)
    else:
        walk.adapter = 3 - walk.adapter
        tensors = walk.files[walk.adapter]
        walk.twins.each(lambda pipe: pipe.load_lora_weights(copied(tensors), adapter_name="a", hotswap=True))


def restore_and_optimize(walk):
    rocm_sd.restore(walk.twins.ours)
    if walk.random.random() < 0.5:
        walk.look()
    rocm_sd.optimize(walk.twins.ours, level=walk.random.choice(["auto", "performance", "memory"]))


OPERATIONS_OF_A_USER = (
    another_size, another_batch, several_images_per_prompt, another_prompt, another_length, another_number_of_steps,
    another_scheduler, the_scheduler_of_another_config, another_guidance, another_rescale, another_eta,
    another_callback, load_lora, scale_lora, fuse_lora, swap_lora, unload_lora, restore_and_optimize,
)  # fmt: skip


@pytest.mark.parametrize("seed", range(SEQUENCES))
def test_a_random_sequence_of_operations(tmp_path, monkeypatch, seed):
    small_blocks_too(monkeypatch, "0" if seed >= SEQUENCES - len(KINDS) else "1")
    walk = Walk(KINDS[seed % len(KINDS)], tmp_path, seed)
    walk.look()
    for _ in range(OPERATIONS):
        walk.operate()
        try:
            walk.look()
        except AssertionError as error:
            raise AssertionError(f"{walk.name} after {', '.join(walk.done)}: {error}") from error
    rocm_sd.restore(walk.twins.ours)
    assert walk.twins.are_equal(**walk.arguments())


CALLBACKS = (
    change_latents, change_latents_in_place, change_the_prompt, change_the_prompt_in_place, change_guidance,
    fade_guidance, interrupt,
)  # fmt: skip


@pytest.mark.parametrize("step_graph", ["0", "1"], ids=["stepwise", "captured"])
@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_every_callback_by_itself(tmp_path, monkeypatch, name, step_graph):
    small_blocks_too(monkeypatch, step_graph)
    twins = Twins(CASES[name], tmp_path)
    plain = twins.check()
    inputs = twins.stock._callback_tensor_inputs
    for callback in CALLBACKS:
        called = {"callback_on_step_end": callback, "callback_on_step_end_tensor_inputs": inputs}
        changed = twins.check(**called)
        assert (changed - plain).norm() > 1e-3 * plain.norm(), callback.__name__
        # A callback's changes end with its run.
        assert (twins.drawn(twins.ours) - plain).norm() < 1e-4 * plain.norm(), callback.__name__
