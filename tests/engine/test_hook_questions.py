"""What Diffusers asks all modules is answered without a walk, and never from what they were before."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import rocm_sd
from pipelines import tiny_pipeline, tiny_unet
from rocm_sd.engine import hook_questions
from rocm_sd.rewrite import forwards

CPU = torch.device("cpu")


class Walked(nn.Identity):
    """Counts how often somebody walks over it."""

    walks = 0

    def named_modules(self, *given, **named):
        type(self).walks += 1
        yield from super().named_modules(*given, **named)


@pytest.fixture
def unet():
    unet = tiny_unet()
    unet.mid_block.attentions[0].watched = Walked()
    Walked.walks = 0
    return rocm_sd.optimize(unet)


def walks_of(ask):
    before = Walked.walks
    return ask(), Walked.walks - before


def test_diffusers_own_questions_need_no_walk(unet):
    """Fails where Diffusers asks with other code: read it, and bring `hook_questions._ASKING` up to date."""
    assert walks_of(lambda: unet.dtype) == (torch.float32, 0)
    assert walks_of(lambda: unet.device) == (CPU, 0)


def test_a_pipeline_finds_its_device_with_no_walk(tmp_path):
    pipe = tiny_pipeline(tmp_path)
    pipe.unet.mid_block.watched = Walked()
    rocm_sd.optimize(pipe)
    assert walks_of(lambda: pipe._execution_device) == (CPU, 0)
    rocm_sd.restore(pipe)
    assert walks_of(lambda: pipe._execution_device) == (CPU, 2)
    assert not [part for part in (pipe.unet, pipe.vae, pipe.text_encoder) if "named_modules" in vars(part)]


def test_everyone_else_walks_over_all_modules(unet):
    paths = [path for path, _ in tiny_unet().named_modules()]
    assert [path for path, module in unet.named_modules() if not isinstance(module, Walked)] == paths
    assert len(list(unet.modules())) == len(paths) + 1
    assert {name for name, _ in unet.named_parameters()} == {name for name, _ in tiny_unet().named_parameters()}
    assert sum(isinstance(module, nn.Conv2d) for module in unet.modules()) > 0


def test_a_dtype_that_a_hook_computes_in_is_seen(unet):
    assert unet.dtype is torch.float32
    unet.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    assert unet.dtype is torch.bfloat16


def hooked():
    layer = nn.Identity()
    layer._diffusers_hook = Registry()
    return layer


class Registry:
    """Of hooks that compute in another dtype, and on another device."""

    compute_dtype, config = torch.float64, SimpleNamespace(onload_device=torch.device("meta"))

    def get_hook(self, name):
        return self if name in {"layerwise_casting", "group_offloading"} else None


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda unet: setattr(unet.mid_block, "more", hooked()), id="a block has one more"),
        pytest.param(lambda unet: setattr(unet, "more", hooked()), id="the model has one more"),
        pytest.param(lambda unet: setattr(unet.conv_in, "more", hooked()), id="a leaf has one"),
        pytest.param(
            lambda unet: setattr(unet.up_blocks[0].resnets[0], "nonlinearity", hooked()), id="one is replaced"
        ),
        pytest.param(lambda unet: unet.down_blocks.append(hooked()), id="a list has one more"),
        pytest.param(lambda unet: unet.down_blocks.__setitem__(0, hooked()), id="one of a list is replaced"),
        pytest.param(lambda unet: setattr(unet.conv_out, "_diffusers_hook", Registry()), id="a leaf is hooked"),
        pytest.param(lambda unet: setattr(unet, "_diffusers_hook", Registry()), id="the model is hooked"),
        pytest.param(lambda unet: vars(unet.mid_block).update(_modules={"own": hooked()}), id="all children at once"),
    ],
)
def test_whatever_comes_with_a_hook_is_asked(unet, change):
    assert (unet.dtype, unet.device) == (torch.float32, CPU)
    change(unet)
    assert (unet.dtype, unet.device) == (torch.float64, torch.device("meta"))


def test_a_list_that_was_made_anew_is_not_the_one_that_was_known(unet):
    layers = unet.mid_block.resnets
    del layers[1]
    assert unet.dtype is torch.float32
    layers.append(hooked())
    assert unet.dtype is torch.float64


def test_a_copy_answers_for_itself(unet):
    for twin in (copy.deepcopy(unet), pickle.loads(pickle.dumps(unet))):
        twin.conv_out._diffusers_hook = Registry()
        assert twin.dtype is torch.float64
        rocm_sd.restore(twin)
        assert not forwards.is_ours(vars(twin).get("named_modules"))
    assert unet.dtype is torch.float32


def test_code_that_uses_other_names_is_given_every_module(unet, monkeypatch):
    changed = {key: names - {"get_hook"} for key, names in hook_questions._ASKING.items()}
    monkeypatch.setattr(hook_questions, "_ASKING", changed)
    assert walks_of(lambda: unet.dtype) == (torch.float32, 1)


def test_a_model_that_two_pipelines_share_keeps_its_answers_until_both_are_restored(tmp_path):
    one = tiny_pipeline(tmp_path)
    two = type(one)(**one.components, requires_safety_checker=False)
    rocm_sd.optimize(one)
    rocm_sd.optimize(two)
    rocm_sd.restore(one)
    assert "named_modules" in vars(two.unet)
    rocm_sd.restore(two)
    assert "named_modules" not in vars(two.unet)


def test_no_model_is_kept_alive():
    unet = rocm_sd.optimize(tiny_unet())
    assert unet.dtype is torch.float32
    gone = weakref.ref(unet)
    del unet
    gc.collect()
    assert gone() is None


def test_after_restore_nothing_keeps_a_layer_that_was_replaced(unet):
    assert unet.dtype == torch.float32
    layer = unet.conv_in
    gone = weakref.ref(layer)
    unet.conv_in = copy.deepcopy(layer)
    rocm_sd.restore(unet)
    del layer
    gc.collect()
    assert gone() is None
