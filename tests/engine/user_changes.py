"""Operations of a user: on a model's parts, with copies and pipelines that share them, and `optimize` and `restore`."""

from __future__ import annotations

import copy
import gc
import random
import threading
from typing import Any

import diffusers
import test_changes
import torch
from hypothesis import strategies as st
from torch import nn
from user_sessions import COUNTS, KINDS, Session, has_unet, one_of, operation

import rocm_sd
from pipelines import CASES, DEVICE, call, exactly

_BLOCK = "transformer_blocks.0"
JOINT = {
    "ff-hook": test_changes.hook(f"{_BLOCK}.ff.net.0"),
    "ff-class": test_changes.other_class(f"{_BLOCK}.ff"),
    "ff-out": test_changes.item(f"{_BLOCK}.ff.net", 2, test_changes.Doubled),
    "to-q-wrapped": test_changes.wrapped(f"{_BLOCK}.attn", "to_q"),
    "to-v-pre-hook": test_changes.pre_hook(f"{_BLOCK}.attn.to_v"),
    "norm-linear-hook": test_changes.hook(f"{_BLOCK}.norm1.linear"),
    "norm-silu": test_changes.put(f"{_BLOCK}.norm1", silu=nn.Mish),
    "norm-eps": test_changes.put(f"{_BLOCK}.norm1.norm", eps=0.5),
    "out-hook": test_changes.hook("norm_out.linear"),
    "out-forward": test_changes.own_forward("proj_out"),
}
# These closures keep the model that they were made on, which a copy then calls: stock's copies too.
_ANYWHERE = ("res-", "out-", "time-", "down-", "up-")
CHANGES = {
    "sd15": test_changes.UNET,
    "sdxl": {name: change for name, change in test_changes.UNET.items() if name.startswith(_ANYWHERE)},
    "sd3": JOINT,
    "flux-dev": JOINT,
}
# More of them, and a picture is all rounding.
MOST_CHANGES = 3
_FILES = iter(range(1_000_000))


# The model's parts.


def _may_change(session: Session) -> bool:
    return session.adapter is None and session.offloaded is None and len(session.changes) < MOST_CHANGES


@operation(_may_change, data=st.data())
def change_a_module(session, data):
    name = data if isinstance(data, str) else data.draw(one_of(sorted(CHANGES[session.name])), label="change")
    session.done[-1] = session.done[-1][0], {"data": name}
    if ("model", name) in session.changes:
        return
    session.each(lambda pipe: (CHANGES[session.name][name](session.model(pipe)), pipe.to(session.twins.dtype)))
    session.changes.append(("model", name))


@operation(_may_change, name=one_of(sorted(test_changes.VAE)))
def change_the_vae(session, name):
    if ("vae", name) in session.changes:
        return
    session.each(lambda pipe: (test_changes.VAE[name](pipe.vae), pipe.to(session.twins.dtype)))
    session.changes.append(("vae", name))
    session.decoded = True


@operation(lambda session: len(session.forwards) < 2, where=st.integers(0, 30))
def own_forward(session, where):
    def wrap(pipe):
        modules = [module for module in session.model(pipe).modules() if type(module) in (nn.Linear, nn.Conv2d)]
        module = modules[where % len(modules)]
        inner = module.forward
        module.forward = lambda *args, **kwargs: 1.1 * inner(*args, **kwargs)
        return module, inner

    session.forwards.append(session.each(wrap))


@operation(lambda session: bool(session.forwards), deleted=st.booleans())
def own_forward_off(session, deleted):
    for module, inner in session.forwards.pop():
        if not deleted:
            module.forward = inner
        elif "forward" in vars(module):
            del module.forward


@operation(has_unet, on=st.booleans())
def freeu(session, on):
    session.each(lambda pipe: pipe.enable_freeu(0.9, 0.2, 1.2, 1.4) if on else pipe.disable_freeu())


@operation(lambda session: has_unet(session) and not session.changes, on=st.booleans())
def attention_slicing(session, on):
    session.each(lambda pipe: pipe.enable_attention_slicing(1) if on else pipe.disable_attention_slicing())


@operation(on=st.booleans())
def vae_slicing(session, on):
    session.each(lambda pipe: pipe.vae.enable_slicing() if on else pipe.vae.disable_slicing())
    session.decoded = True


@operation(on=st.booleans())
def vae_tiling(session, on):
    def tile(pipe):
        pipe.vae.tile_sample_min_size, pipe.vae.tile_latent_min_size = 16, 8
        (pipe.vae.enable_tiling if on else pipe.vae.disable_tiling)()

    session.each(tile)
    session.decoded = True
    session.size = (16, 32)


# rocm-sd's own words.


@operation(level=one_of(["auto", "performance", "memory"]))
def optimize(session, level):
    rocm_sd.optimize(session.twins.ours, level=level)
    session.optimised = True


@operation(lambda session: session.optimised, backwards=st.booleans())
def restore(session, backwards):
    pipes = [session.twins.ours, *session.also_optimised]
    for pipe in pipes[::-1] if backwards else pipes:
        rocm_sd.restore(pipe)
    session.optimised, session.also_optimised = False, []


# Copies, files and what is shared.


@operation(lambda session: session.is_plain() or _only_copies(session), again=st.booleans())
def deep_copy(session, again):
    """The copy goes on."""
    session.become(*(copy.deepcopy(pipe) for pipe in session.pipes))
    if again and session.optimised:
        rocm_sd.optimize(session.twins.ours)
    elif not session.optimised:
        rocm_sd.restore(session.twins.ours)


def _only_copies(session: Session) -> bool:
    return session.adapter is not None and not (
        session.changes or session.forwards or session.steps or session.offloaded
    )


@operation(Session.is_plain)
def save_and_load(session):
    loaded = []
    for pipe in session.pipes:
        folder = session.folder / f"saved{next(_FILES)}"
        pipe.save_pretrained(folder)
        absent = {name: None for name, part in pipe.components.items() if part is None}
        loaded.append(type(pipe).from_pretrained(folder, dtype=pipe.dtype, **absent).to(DEVICE))
    session.become(*loaded)
    if session.optimised:
        rocm_sd.optimize(session.twins.ours)


@operation(lambda session: session.offloaded is None, optimised=st.booleans())
def share_with_img2img(session, optimised):
    kind = getattr(diffusers, CASES[KINDS[session.name]].kind)
    session.others = session.each(lambda pipe: kind.from_pipe(pipe, dtype=pipe.dtype))
    for pipe in session.others:
        pipe.set_progress_bar_config(disable=True)
    if optimised and session.optimised:
        session.also_optimised.append(rocm_sd.optimize(session.others[-1]))
    session.look_at_others(0)


@operation(lambda session: session.others is not None and session.offloaded is None)
def draw_with_img2img(session):
    session.look_at_others(1)


@operation(lambda session: session.others is not None)
def drop_img2img(session):
    """Nobody restores it, and its parts live on."""
    session.others, session.also_optimised = None, []
    gc.collect()


@operation(lambda session: not (session.offloaded or session.callback or session.adapter or session.steps))
def two_threads(session):
    """Two pipelines of the same parts, each with a scheduler of its own, which counts the steps of one picture."""
    session.random = random.Random(2)
    options = session.arguments() | {"output_type": "latent"}
    seconds = session.each(lambda pipe: type(pipe).from_pipe(pipe, dtype=pipe.dtype))
    for pipe, second in zip(session.pipes, seconds, strict=True):
        second.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
        second.set_progress_bar_config(disable=True)
    together = drawn_together(session, (session.twins.ours, seconds[-1]), options)
    for number in range(2):
        # Drawn again after all: by one thread.
        def draw(index, seed, number=number):
            if index == 2 and seed == number and together[number] is not None:
                picture, together[number] = together[number], None
                return picture
            return session.drawn((session.pipes, seconds)[number][index], session.case, seed, options)

        session.judge(draw, number)


def drawn_together(session: Session, pipes: tuple[Any, Any], options: dict[str, Any]) -> list[torch.Tensor | None]:
    found: list[torch.Tensor | None] = [None, None]
    start = threading.Barrier(2)

    def run(number):
        start.wait()
        try:
            found[number] = session.drawn(pipes[number], session.case, number, options)
        except Exception:  # noqa: BLE001 -- drawn once more by itself, which says the same or is wrong
            COUNTS["refused"] += 1

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@operation()
def gradient(session):
    """Of the latents, through a model that is called by itself."""
    asked: list[Any] = []

    def through(pipe):
        model = session.model(pipe)
        handle = model.register_forward_pre_hook(lambda *given: asked.append(given[1:]), with_kwargs=True)
        try:
            with exactly(session.twins.dtype):
                call(pipe, session.case, num_inference_steps=1)
        finally:
            handle.remove()
        args, named = (list(asked[-1][0]), dict(asked[-1][1]))
        given, place = (named, "hidden_states") if "hidden_states" in named else (args, 0)
        latents = given[place] = given[place].detach().clone().requires_grad_()
        with torch.enable_grad():
            answer = model(*args, **named)[0]
            return torch.autograd.grad(answer.square().sum(), latents)[0]

    session.judge(lambda index, _seed: through(session.pipes[index]), 0)
