"""What lies on the card of each rank. Processes of a CPU have none: what is carried to it is copied here, and counted.

Weights that were not carried are at home. They are made NaN before a picture is drawn: who reads one has no picture.
"""

from __future__ import annotations

import re
from contextlib import contextmanager

import torch
from cases import CPU, built, with_lora

from pipelines import CASES, call
from rocm_sd.errors import DeviceUnavailable, RocmSdError, Unsupported
from rocm_sd.parallel import parallel_report, parallelize, parallelizing, placing, tensor, unparallelize
from rocm_sd.parallel.homes import size_of
from rocm_sd.parallel.ranks import join
from rocm_sd.parallel.sharing import everybody


class Card:
    """`carried`: all bytes that ever came, so that no moment had more of them."""

    def __init__(self, room=None):
        self.carried, self._room, self._pieces = 0, room, []

    def take(self, weight, device):
        assert device == CPU
        piece = weight.clone()
        self.carried += size_of([piece])
        if self._room is not None and self.carried > self._room:
            raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2 GiB")
        # For as long as the card is there, nobody else gets their memory.
        self._pieces.append(piece)
        return piece

    def has(self, weight):
        return weight.data_ptr() in {piece.data_ptr() for piece in self._pieces}


@contextmanager
def card(room=None):
    found, kept = Card(room), placing.on_card
    placing.on_card = tensor.on_card = found.take
    try:
        yield found
    finally:
        placing.on_card = tensor.on_card = kept


def drawn(pipe, name):
    with torch.no_grad():
        return call(pipe, CASES[name], num_inference_steps=2, output_type="pt")


@contextmanager
def lost(weights):
    """While they are NaN."""
    kept = [weight.clone() for weight in weights]
    for weight in weights:
        weight.data.fill_(float("nan"))
    try:
        yield
    finally:
        for weight, before in zip(weights, kept, strict=True):
            weight.data.copy_(before)


# By the names that Diffusers gives them: what a rank has a part of, of each tensor as large a one.
_DIVIDED = re.compile(r"attn[12]\.(to_[qkv]|to_out\.0)\.weight|ff\.net\.(0\.proj\.(weight|bias)|2\.weight)")


def divided(models):
    named = (each for model in models for each in model.named_parameters())
    return size_of(weight for name, weight in named if _DIVIDED.search(name))


def card_case(name, plan, lora=False):
    join(CPU)
    pipe = built(name)
    pipe = with_lora(pipe) if lora else pipe
    whole, alone = size_of(placing.whole_of(pipe)), drawn(pipe, name)
    models, speeds = parallelizing._models(pipe), [1.0] * everybody().size
    layers = divided(models)
    expected = {each: placing.fullest(pipe, models, each, speeds) for each in placing.SPLIT_WEIGHTS}
    with card() as mine:
        parallelize(pipe, plan, device="cpu")
    there = placing.whole_of(pipe)
    at_home = [weight for weight in there if not mine.has(weight) and weight.is_floating_point()]
    on_card = size_of(weight for weight in there if mine.has(weight))
    with lost(at_home):
        split, said = drawn(pipe, name), str(parallel_report(pipe))
    unparallelize(pipe)
    return {
        "whole": whole, "carried": mine.carried, "on card": on_card, "expected": expected, "alone": alone,
        "split": split, "again": drawn(pipe, name), "said": said, "at home": len(at_home), "layers": layers,
    }  # fmt: skip


def full_case(plan, share):
    """A card with room for a share of the pipeline."""
    join(CPU)
    pipe = built("sd15")
    alone = drawn(pipe, "sd15")
    with card(int(share * size_of(placing.whole_of(pipe)))):
        try:
            parallelize(pipe, plan, device="cpu")
        except RocmSdError as error:
            return str(error), torch.equal(drawn(pipe, "sd15"), alone)
    return None, torch.allclose(drawn(pipe, "sd15"), alone, atol=1e-3)


def moved_case():
    """A pipeline whose parts something else moves."""
    pipe = built("sd15")
    pipe.enable_group_offload(CPU, offload_type="leaf_level")
    try:
        parallelize(pipe, "pipeline", device="cpu")
    except Unsupported as error:
        return str(error)
    return None


def no_gpu_case():
    try:
        parallelize(built("sd15"), "pipeline", device="cuda")
    except DeviceUnavailable as error:
        return str(error)
    return None
