"""Every block of a real ComfyUI's UNet and VAE that a rule replaces, against the host's own and against float64."""

from __future__ import annotations

import copy

import comfyui_in_process
import pytest
import torch

from rocm_sd import numerics
from rocm_sd.integrations.comfyui.attention import OPTION, override_for
from rocm_sd.integrations.comfyui.channels_last import ChannelsLast
from rocm_sd.integrations.comfyui.comfyui_policy import MODEL_RULES, VAE_RULES, ComfyUIPolicy, find, fused
from rocm_sd.integrations.comfyui.host import PatchReport
from rocm_sd.ops import OPS

NAMED = ",".join(f"{name}=torch" for name in OPS)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def host(monkeypatch):
    comfyui_in_process.need()
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", NAMED)
    with torch.no_grad():
        yield


class Laid:
    """The part of a ModelPatcher that a layout asks."""

    load_device = torch.device("cpu")

    def __init__(self, model):
        self.model = model


def calls_of(model, modules, run):
    """The arguments that each module is called with in a run of the whole."""
    seen = {}

    def note(module, args, kwargs):
        seen[module] = (args, kwargs)

    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
    run()
    for hook in hooks:
        hook.remove()
    return seen


def doubled(value):
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        return type(value)(doubled(one) for one in value)
    return value


def check_all(model, rules, run):
    """Compare each replaced module on the inputs that it has in the model; returns the names of the rules that ran."""
    report, layout = PatchReport("model", "cpu", "auto"), ChannelsLast(lambda whole: whole, "for the test")
    policy = ComfyUIPolicy(report)
    found = list(find(model, rules, policy, {}, {}))
    assert all(change.replaced for _, _, change in found), [c for _, _, c in found if not c.replaced]
    calls = calls_of(model, [module for _, module, _ in found], run)
    for rule, module, change in found:
        args, kwargs = calls[module]
        if "transformer_options" in kwargs or rule.name == "spatial_transformer":
            kwargs = {name: value for name, value in kwargs.items() if name != "transformer_options"}
            args = args[:2] if rule.name == "spatial_transformer" else args
        stock = type(module).forward(module, *args, **kwargs)
        exact = copy.deepcopy(module).double()
        expected = exact(*doubled(args), **{name: doubled(value) for name, value in kwargs.items()})
        if "transformer" in rule.name:
            kwargs["transformer_options"] = {OPTION: override_for(report)}
        patcher = Laid(module)
        layout.inject(patcher)
        args = tuple(a.contiguous(memory_format=torch.channels_last) if _is_map(a) else a for a in args)
        with fused():
            direct = rule.forward(policy, module, *args, **kwargs)
            ours = rule.replacement(policy).stand_in(module, *args, **kwargs)
        layout.eject(patcher)
        assert direct is not None, f"{change.path}: fallback to the host"
        assert ours.dtype == stock.dtype
        numerics.require(change.path, ours, expected, stock)
        again = type(module).forward(module, *calls[module][0], **calls[module][1])
        assert torch.equal(again, stock), f"{change.path} is not as it was"
    assert not report.failed
    return {rule.name for rule, _, _ in found}


def _is_map(value):
    return isinstance(value, torch.Tensor) and value.dim() == 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", comfyui_in_process.KINDS)
def test_each_block_of_a_unet_is_as_exact_as_the_hosts(kind, dtype):
    unet = comfyui_in_process.base_model(kind, dtype).diffusion_model
    generator = torch.Generator().manual_seed(1)
    x, context = (torch.randn(size, generator=generator).to(dtype) for size in ((2, 4, 8, 10), (2, 7, 24)))
    vector = torch.randn(2, 2816, generator=generator).to(dtype) if kind == "sdxl" else None
    ran = check_all(unet, MODEL_RULES, lambda: unet(x, torch.tensor([7.0, 400.0]), context, vector))
    assert ran == {"resblock", "upsample", "downsample", "norm_out", "spatial_transformer", "transformer"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_block_of_a_vae_is_as_exact_as_the_hosts(dtype):
    model = comfyui_in_process.vae(dtype).first_stage_model
    picture = torch.randn(1, 3, 32, 40, generator=torch.Generator().manual_seed(1)).to(dtype)

    def run():
        model.decode(model.encode(picture))

    ran = check_all(model, VAE_RULES, run)
    assert ran == {"vae_resblock", "vae_attention", "vae_upsample", "vae_downsample"}


def test_a_picture_of_odd_size_is_enlarged_by_the_host():
    unet = comfyui_in_process.base_model().diffusion_model
    (block,) = [module for module in unet.modules() if type(module).__name__ == "Upsample"]
    x = torch.randn(1, block.channels, 4, 4)
    patcher = Laid(block)
    ChannelsLast(lambda whole: whole, "for the test").inject(patcher)
    rule = next(rule for rule in MODEL_RULES if rule.name == "upsample")
    policy = ComfyUIPolicy(PatchReport("model", "cpu", "auto"))
    assert rule.forward(policy, block, x, output_shape=[1, 1, 8, 8]) is not None
    assert rule.forward(policy, block, x, output_shape=[1, 1, 7, 8]) is None
    ours = rule.replacement(policy).stand_in(block, x, output_shape=[1, 1, 7, 8])
    assert ours.shape[2:] == (7, 8)


def test_what_casts_its_weights_or_has_functions_is_called_itself():
    import comfy.ops

    is_plain = ComfyUIPolicy(PatchReport("model", "cpu", "auto")).is_plain
    x = torch.randn(1, 8)
    layer = comfy.ops.disable_weight_init.Linear(8, 8)
    assert is_plain(layer, x)
    assert not is_plain(comfy.ops.manual_cast.Linear(8, 8), x)
    assert not is_plain(layer, x.half())
    layer.weight_function = [lambda weight: weight]
    assert not is_plain(layer, x)
    layer.weight_function = []
    layer.comfy_cast_weights = True
    assert not is_plain(layer, x)


def test_video_models_blocks_are_skipped_with_the_reason():
    from comfy.ldm.modules.diffusionmodules import openaimodel

    block = openaimodel.VideoResBlock(64, 32, 0.0, video_kernel_size=[3, 1, 1])
    policy = ComfyUIPolicy(PatchReport("model", "cpu", "auto"))
    changes = [change for _, _, change in find(block, MODEL_RULES, policy, {}, {})]
    assert [(change.kind, change.replaced) for change in changes] == [("ResBlock", False)]
    assert "two dimensions" in changes[0].why_skipped or "time embedding" in changes[0].why_skipped
