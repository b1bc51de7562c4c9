"""What shallow steps of ldm's UNet are to give, stated without them: the host's forward computes all of it, and in
steps that are not whole, what came from the deep layers is put aside for what earlier steps had there.
"""

from __future__ import annotations

import copy

import torch
from torch import nn


def stated(unet, forward, calls, depth, order, whole, dtype):
    """The answers to `calls` (step number, args, kwargs) of one kind, in order. `whole`: the steps that compute all."""
    model = copy.deepcopy(unet).to(dtype)
    if hasattr(model, "dtype"):
        model.dtype = dtype
    for module in model.modules():
        if type(module).__name__ == "GroupNorm32":
            module.__class__ = nn.GroupNorm
    kept: dict[int, torch.Tensor] = {}
    now = {}

    def of_skip(_module, _args, made):
        now["skip"] = made.shape[1]

    def before(_module, args):
        x, *more = args
        deep, skip = x.split([x.shape[1] - now["skip"], now["skip"]], 1)
        if now["step"] in whole:
            kept[now["step"]] = deep
            return args
        at = max(kept)
        earlier = max((step for step in kept if step < at), default=None)
        put = kept[at]
        if order and earlier is not None:
            put = put + (kept[at] - kept[earlier]) * ((now["step"] - at) / (at - earlier))
        return (torch.cat([put, skip], 1), *more)

    model.input_blocks[depth - 1][-1].register_forward_hook(of_skip)
    model.output_blocks[-depth][0].register_forward_pre_hook(before)
    answers = []
    for step, args, kwargs in calls:
        now["step"] = step
        with torch.no_grad():
            answers.append(forward(model, *_in(args, dtype), **_in(kwargs, dtype)))
    return answers


def _in(value, dtype):
    if isinstance(value, torch.Tensor):
        return value.clone().to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: _in(one, dtype) for name, one in value.items()}
    return tuple(_in(one, dtype) for one in value) if isinstance(value, tuple) else value


def distance(ours, exact):
    return float((ours.double() - exact.double()).norm() / exact.double().norm())


def hold(answers, unet, forward, calls, depth, order, whole):
    """Each answer is at most twice as far from the statement in float64 as the same in the host's dtype, plus a floor.

    And each shallow one is far from what all layers would have given: something was left out.
    """
    dtype = answers[0].dtype
    exact = stated(unet, forward, calls, depth, order, whole, torch.float64)
    coarse = stated(unet, forward, calls, depth, order, whole, dtype)
    every = stated(unet, forward, calls, depth, order, {step for step, _, _ in calls}, torch.float64)
    assert len(answers) == len(calls) == len(exact)
    for (step, _, _), ours, right, same, full in zip(calls, answers, exact, coarse, every, strict=True):
        allowed = 2 * distance(same, right) + 4 * torch.finfo(dtype).eps
        assert distance(ours, right) <= allowed, (step, distance(ours, right), allowed)
        if step not in whole:
            assert distance(right, full) > 100 * allowed, step
