"""Jobs of a host with the extension: on, off, and with what else the host's users do."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from a1111_world import SdModel
from torch import nn

import rocm_sd_ops
import unified_sd_optimization
from rocm_sd.errors import InvalidOption, Unsupported
from rocm_sd.integrations.a1111 import script as script_module
from rocm_sd.integrations.a1111.permission import PERMISSION
from rocm_sd.integrations.a1111.switch import SWITCH

ON = (True, "auto", "exact")
OFF = (False, "auto", "exact")
HIRES = ((8, 8), (12, 16))


@pytest.fixture(autouse=True)
def ops_are_asked(monkeypatch):
    ops = ("conv2d", "group_norm_silu", "upsample_conv2d", "upsample")
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", ",".join(f"{op}=torch" for op in ops))


@pytest.fixture
def capturing(monkeypatch):
    """On a CPU calls are captured where it is asked for."""
    monkeypatch.setenv("ROCM_SD_STEP_GRAPH", "1")


def job(host, script, args, **more):
    p = host.processing.StableDiffusionProcessing()
    return p, host.processing.process_images(p, script, args, **more)


def pictures(host, script, args, **more):
    return job(host, script, args, **more)[1].images


def assert_equal(ones, others):
    assert all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def assert_near(ones, others, allowed=1e-5):
    for one, other in zip(ones, others, strict=True):
        assert float((one - other).norm() / other.norm()) <= allowed


def assert_stock(sd_model):
    """Nothing of ours is left in the model."""
    for module in sd_model.modules():
        assert "forward" not in module.__dict__
        assert not module._forward_pre_hooks
    for layer in sd_model.modules():
        if isinstance(layer, nn.Conv2d):
            assert layer.weight.is_contiguous()
    parameters = [p for p in sd_model.parameters() if p.dim() > 1]
    assert len({p.untyped_storage().data_ptr() for p in parameters}) == len(parameters)


def test_the_panel_and_the_settings(host, script):
    assert script.title() == "ROCm SD Optimization"
    assert script.show(False) is host.scripts.AlwaysVisible
    for add in host.script_callbacks.callbacks["ui_settings"]:
        add()
    options = host.shared.opts.data_labels
    names = ("enabled", "level", "quality", "quality_in_numbers", "vae")
    assert {f"rocm_sd_{name}" for name in names} == options.keys()
    assert all(option.section == ("rocm_sd", "ROCm SD") for option in options.values())
    enabled, level, quality, in_numbers = script.ui(False)
    assert enabled.value is True
    assert (level.value, quality.value, in_numbers.value) == ("auto", "exact", "")
    assert tuple(level.choices) == ("auto", "performance", "memory")
    assert [field for field, _ in script.infotext_fields] == [enabled, level, quality, in_numbers]


def test_off_is_the_host_bit_for_bit(host, script, capturing):
    unet = host.shared.sd_model.model.diffusion_model
    stock = pictures(host, script, OFF, sizes=HIRES)
    assert_stock(host.shared.sd_model)
    on = pictures(host, script, ON, sizes=HIRES)
    assert any("forward" in module.__dict__ for module in unet.modules())
    assert_near(on, stock)
    assert_equal(pictures(host, script, OFF, sizes=HIRES), stock)
    assert_stock(host.shared.sd_model)
    assert host.sd_unet.current_unet is None


def test_whole_calls_are_replayed_at_each_size(host, script, capturing):
    stock = pictures(host, script, OFF, sizes=HIRES, steps=5)
    on = pictures(host, script, ON, sizes=HIRES, steps=5)
    assert_near(on, stock)
    assert host.sd_unet.current_unet_option.label == "ROCm SD"
    # Of five steps the first is as it is, the second is captured.
    assert SWITCH._on.graphs.calls.replays == 6
    again = pictures(host, script, ON, sizes=HIRES, steps=5)
    assert_near(again, stock)
    assert SWITCH._on.graphs.calls.replays == 16
    assert any("2 graphs of its forward" in line for line in SWITCH.report())
    assert re.fullmatch(r"\d+ of \d+ blocks replaced, level auto, quality exact", SWITCH.report()[0])


def test_level_memory_captures_nothing_and_replaces_the_same(host, script, capturing):
    stock = pictures(host, script, OFF)
    assert_near(pictures(host, script, (True, "memory", "exact")), stock)
    assert SWITCH._on.graphs is None
    assert host.sd_unet.current_unet_option.label == "ROCm SD"


def test_a_picture_records_what_was_on(host, script):
    p, _ = job(host, script, ON)
    text = p.extra_generation_params["ROCm SD"]
    assert text.startswith("0.1.0, level auto, quality exact, ")
    assert int(text.split(", ")[3].split()[0]) >= 8
    assert script_module.pasted({"ROCm SD": text}, "enabled") is True
    assert script_module.pasted({"ROCm SD": text.replace("auto", "memory")}, "level") == "memory"
    assert script_module.pasted({"ROCm SD": text}, "quality") == "exact"
    assert script_module.pasted({"ROCm SD": "level sideways"}, "level") is None
    assert script_module.pasted({}, "enabled") is None
    p, _ = job(host, script, OFF)
    assert "ROCm SD" not in p.extra_generation_params


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda host: setattr(host.shared.sd_model, "lowvram", True), "--medvram"),
        (lambda host: setattr(host.devices, "unet_needs_upcast", True), "--upcast-sampling"),
        (lambda host: setattr(host.devices, "fp8", True), "FP8"),
        (lambda host: setattr(type(host.shared.sd_model.model.diffusion_model), "__name__", "MMDiT"), "MMDiT"),
    ],
    ids=["medvram", "upcast", "fp8", "sd3"],
)
def test_what_cannot_be_optimised_is_skipped_and_said(host, script, capsys, change, message):
    stock = pictures(host, script, OFF)
    change(host)
    capsys.readouterr()
    p, processed = job(host, script, ON)
    assert_equal(processed.images, stock)
    assert message in capsys.readouterr().out
    assert message in next(iter(p.comments))
    assert "ROCm SD" not in p.extra_generation_params
    assert_stock(host.shared.sd_model)
    job(host, script, ON)
    assert not capsys.readouterr().out, "said twice"


def test_an_unknown_level_of_an_api_call_is_said(host, script, capsys):
    p, _ = job(host, script, (True, "sideways", "exact"))
    assert "sideways" in next(iter(p.comments))
    assert "ROCm SD" not in p.extra_generation_params


class Lora:
    """The host's LoRA extension: a layer's forward, on its class, brings the layer's weights up to date first."""

    def __init__(self, monkeypatch, host):
        self.loaded = []
        names = {
            "loaded_networks": self.loaded, "shared": host.shared, "nn": nn,
            "originals": SimpleNamespace(), "calls": [],
        }  # fmt: skip
        # In globals of their own, as those of the extension are: it is by them that it is known.
        exec(
            "def network_apply_weights(layer):\n"
            "    name = getattr(layer, 'network_layer_name', None)\n"
            "    wanted = tuple((n.name, n.te_multiplier, n.unet_multiplier, n.dyn_dim) for n in loaded_networks)\n"
            "    if name is None or getattr(layer, 'network_current_names', ()) == wanted:\n"
            "        return\n"
            "    if getattr(layer, 'network_weights_backup', None) is None:\n"
            "        layer.network_weights_backup = layer.weight.detach().clone()\n"
            "    layer.weight.data.copy_(layer.network_weights_backup)\n"
            "    for network in loaded_networks:\n"
            "        layer.weight.data.mul_(1 + 0.1 * network.unet_multiplier)\n"
            "    layer.network_current_names = wanted\n"
            "def forward(kind):\n"
            "    def network_forward(self, input):\n"
            "        calls.append(self)\n"
            "        network_apply_weights(self)\n"
            "        return getattr(originals, kind + '_forward')(self, input)\n"
            "    return network_forward\n",
            names,
        )
        names["__name__"] = "networks"
        self.calls = names["calls"]
        for kind in (nn.Linear, nn.Conv2d, nn.GroupNorm, nn.LayerNorm):
            setattr(names["originals"], f"{kind.__name__}_forward", kind.forward)
            monkeypatch.setattr(kind, "forward", names["forward"](kind.__name__))
        for path, layer in host.shared.sd_model.model.named_modules():
            if isinstance(layer, (nn.Linear, nn.Conv2d)):
                layer.network_layer_name = path

    def use(self, *strengths):
        self.loaded[:] = [SimpleNamespace(name=f"lora-{s}", te_multiplier=s, unet_multiplier=s, dyn_dim=None)
                          for s in strengths]  # fmt: skip


def test_loras_come_and_go(host, script, capturing, monkeypatch):
    lora = Lora(monkeypatch, host)
    plans = ((), (0.7,), (0.7, 0.2), (), (0.3,))
    stock = []
    for plan in plans:
        lora.use(*plan)
        stock.append(pictures(host, script, OFF, steps=4))
    assert float((stock[0][0] - stock[1][0]).norm()) > 0.1
    for plan, expected in zip(plans, stock, strict=True):
        lora.use(*plan)
        assert_near(pictures(host, script, ON, steps=4), expected)
    assert SWITCH._on.graphs.calls.replays >= 8
    lora.use()
    assert_near(pictures(host, script, OFF, steps=4), stock[0], allowed=0.0)


def test_a_lora_that_changes_within_a_job(host, script, capturing, monkeypatch):
    lora = Lora(monkeypatch, host)
    lora.use(0.5)
    more = {"steps": 6, "between": lambda step: lora.use(*((0.5,) if step < 4 else ()))}
    stock = pictures(host, script, OFF, **more)
    assert_near(pictures(host, script, ON, **more), stock)


def test_the_older_way_of_loras_is_the_hosts(host, script, capturing, monkeypatch, capsys):
    lora = Lora(monkeypatch, host)
    lora.use(0.5)
    host.shared.opts.lora_functional = True
    unet = host.shared.sd_model.model.diffusion_model
    lora.calls.clear()
    pictures(host, script, ON, steps=1)
    called = set(map(id, lora.calls))
    assert all(id(m) in called for m in unet.modules() if isinstance(m, (nn.Linear, nn.Conv2d)))
    assert "LoRA as in older versions" in capsys.readouterr().out


def test_layers_with_a_foreign_forward_are_called(host, script, capturing, monkeypatch, capsys):
    """--precision of some cards gives every layer's class another forward while the UNet runs."""
    stock = pictures(host, script, OFF)
    pictures(host, script, ON)
    original = nn.Linear.forward
    calls = []

    def manual_cast(self, x):
        calls.append(self)
        return original(self, x)

    monkeypatch.setattr(nn.Linear, "forward", manual_cast)
    # Begun while it was on: looked at before each call.
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        x, text = torch.randn(2, 4, 8, 8, generator=generator), torch.randn(2, 7, 24, generator=generator)
        ours = host.shared.sd_model.model(x, torch.full((2,), 900.0), text)
    linears = [m for m in host.shared.sd_model.model.modules() if isinstance(m, nn.Linear)]
    assert {id(m) for m in linears} <= {id(m) for m in calls}
    assert torch.isfinite(ours).all()
    assert_equal(pictures(host, script, ON), stock)
    assert "Linear.forward was replaced" in capsys.readouterr().out


def test_controlnet_puts_a_forward_of_its_own_in_the_unets_place(host, script, capturing):
    unet = host.shared.sd_model.model.diffusion_model
    original = host.sd_hijack.ldm_original_forward

    def controlled(self, x, timesteps=None, context=None, **kwargs):
        return original(self, x, timesteps, context, **kwargs) + 0.25

    def with_control(args):
        def hook(step):
            if step == 1:
                unet._original_forward = unet.forward
                unet.forward = controlled.__get__(unet)
            if step == 4:
                unet.forward = unet._original_forward
                del unet._original_forward

        result = pictures(host, script, args, steps=7, between=hook)
        unet.__dict__.pop("forward", None)
        return result

    stock = with_control(OFF)
    assert_near(with_control(ON), stock)
    assert_near(pictures(host, script, ON), pictures(host, script, OFF))


@pytest.mark.parametrize("what", ["hypernetwork", "upcast", "token-merging"])
def test_what_is_not_to_be_captured_is_not(host, script, capturing, what):
    sd_model = host.shared.sd_model
    if what == "hypernetwork":
        host.shared.loaded_hypernetworks.append(lambda keys, values: (keys, values))
    if what == "upcast":
        host.shared.opts.upcast_attn = True
    if what == "token-merging":
        sd_model.applied_token_merged_ratio = 0.5
    stock = pictures(host, script, OFF, steps=5)
    assert_near(pictures(host, script, ON, steps=5), stock)
    assert SWITCH._on.graphs.calls.replays == 0


def test_tiling_that_is_switched_between_jobs_counts(host, script, capturing):
    """A graph has the padding baked in."""

    def tile(mode):
        for layer in host.shared.sd_model.modules():
            if type(layer) is nn.Conv2d:
                layer.padding_mode = mode

    def both(args):
        results = []
        for mode in ("zeros", "circular", "zeros"):
            tile(mode)
            results += pictures(host, script, args, steps=4)
        return results

    stock = both(OFF)
    assert float((stock[0] - stock[1]).norm()) > 0.1
    assert_near(both(ON), stock)
    assert SWITCH._on.graphs.calls.replays >= 4


def test_an_extension_that_wraps_attention_after_a_capture_is_called(host, script, capturing):
    pictures(host, script, ON, steps=4)
    replays = SWITCH._on.graphs.calls.replays
    attn = host.shared.sd_model.model.diffusion_model.middle_block[1].transformer_blocks[0].attn1
    plain, seen = attn.forward, []

    def tiled(*args, **kwargs):
        seen.append(1)
        return plain(*args, **kwargs)

    attn.forward = tiled
    pictures(host, script, ON, steps=4)
    assert len(seen) == 4
    assert SWITCH._on.graphs.calls.replays == replays
    del attn.forward


def test_a_result_stays_what_it_was_when_the_next_step_is_replayed(host, script, capturing):
    pictures(host, script, ON, steps=4)
    with torch.no_grad():
        x, text = torch.randn(2, 4, 8, 8), torch.randn(2, 7, 24)
        first = host.shared.sd_model.model(x, torch.full((2,), 900.0), text)
        kept = first.clone()
        second = host.shared.sd_model.model(2 * x, torch.full((2,), 100.0), text)
    assert torch.equal(first, kept)
    assert not torch.equal(first, second)


def test_a_graph_that_differs_from_the_call_is_not_used(host, script, capturing, monkeypatch, capsys):
    from rocm_sd.engine.capture import captured

    stock = pictures(host, script, OFF, steps=4)
    original = captured.capture_graph

    def wrong(function, device):
        found = original(function, device)
        found.outputs[0].add_(1)
        return captured.Graph(found.outputs, lambda: None)

    # In blocks, which come next, it is as wrong.
    monkeypatch.setattr(captured, "capture_graph", wrong)
    monkeypatch.setattr(captured, "capture_blocks", wrong)
    assert_near(pictures(host, script, ON, steps=4), stock)
    assert SWITCH._on.graphs.calls.replays == 0
    assert "differs" in capsys.readouterr().out


def test_another_model_is_optimised_when_it_is_loaded(host, script, capturing):
    stock = pictures(host, script, OFF)
    pictures(host, script, ON)
    first = host.shared.sd_model
    host.sd_unet.apply_unet("None")
    # So the host gives the memory of a model back that it does not keep.
    first.to("meta")
    second = SdModel(host.ldm)
    second.sd_checkpoint_info = SimpleNamespace(model_name="another")
    host.script_callbacks.model_loaded_callback(second)
    host.shared.sd_model = second
    host.sd_unet.apply_unet()
    assert not any("forward" in module.__dict__ for module in first.modules())
    assert host.sd_unet.current_unet_option.label == "ROCm SD"
    assert_near(pictures(host, script, ON), stock)
    host.script_callbacks.callbacks["script_unloaded"][0]()
    assert_stock(second)


def test_another_unet_that_the_user_chose_is_kept(host, script, capturing):
    host.shared.opts.sd_unet = "None"
    stock = pictures(host, script, OFF)
    assert_near(pictures(host, script, ON), stock)
    assert host.sd_unet.current_unet is None
    host.shared.opts.sd_unet = "ROCm SD"
    assert_equal(pictures(host, script, OFF), stock)
    assert_stock(host.shared.sd_model)


def test_a_failure_within_a_job_is_said_under_the_picture(host, script, monkeypatch, capsys):
    from rocm_sd.integrations.ldm import blocks

    stock = pictures(host, script, OFF)

    def fail(*_arguments, **_named):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(blocks, "plain_norm_silu", fail)
    p, processed = job(host, script, ON)
    assert_near(processed.images, stock)
    assert "no such kernel" in processed.comments
    assert capsys.readouterr().out.count("no such kernel") == 1
    p, processed = job(host, script, ON)
    assert_equal(processed.images, stock)
    assert "ROCm SD" not in p.extra_generation_params
    monkeypatch.undo()
    job(host, script, OFF)
    p, _ = job(host, script, ON)
    assert "ROCm SD" in p.extra_generation_params, "off and on again tries once more"


def test_a_model_that_cannot_be_changed_stays_whole(host, script, monkeypatch, capsys):
    from rocm_sd.integrations.a1111 import switch

    stock = pictures(host, script, OFF)
    monkeypatch.setattr(switch, "apply", lambda *_a, **_n: 1 / 0)
    p, processed = job(host, script, ON)
    assert_equal(processed.images, stock)
    assert "ZeroDivisionError" in next(iter(p.comments))
    assert_stock(host.shared.sd_model)


def test_autocast_of_the_host(host, script, capturing):
    """Half precision weights under autocast, as the host runs by default; on a CPU that is bfloat16."""
    sd_model = host.shared.sd_model
    exact = pictures(host, script, OFF, steps=4)
    sd_model.model.to(torch.bfloat16)
    for module in sd_model.model.modules():
        if isinstance(module, nn.GroupNorm):
            # A GPU's autocast takes their weights to float32; a CPU's leaves them, and torch refuses the mixture.
            module.float()
    with torch.autocast("cpu", torch.bfloat16):
        stock = pictures(host, script, OFF, steps=4)
        ours = pictures(host, script, ON, steps=4)
    assert SWITCH._on.graphs.calls.replays == 2
    error = [float((one[0] - exact[0]).norm() / exact[0].norm()) for one in (stock, ours)]
    assert error[1] <= 2 * error[0] + 1e-3


def test_the_attention_is_listed_and_gives_what_the_hosts_gives(host, script, monkeypatch):
    (ours,) = host.script_callbacks.list_optimizers_callback()
    assert ours.title().startswith("ROCm SD - ")
    assert ours.priority < 10, "Automatic would take it"
    stock = pictures(host, script, OFF)
    kinds = (host.ldm.attention.CrossAttention, host.ldm.vae.AttnBlock)
    for kind in kinds:
        monkeypatch.setattr(kind, "forward", kind.forward)
    from a1111_world import FAKE_LDM, place_package

    place_package("sgm", FAKE_LDM)
    ours.apply()
    assert all(kind.forward.__module__.startswith("rocm_sd.") for kind in kinds)
    assert_near(pictures(host, script, OFF), stock)
    host.shared.opts.upcast_attn = True
    assert_near(pictures(host, script, OFF), stock)
    host.shared.loaded_hypernetworks.append(lambda keys, values: (2 * keys, values))
    changed = pictures(host, script, OFF)
    assert float((changed[0] - stock[0]).norm()) > 1e-3
    assert PERMISSION.broken is None


def test_the_unified_call_optimises_the_hosts_model_in_place(host, script, capturing):
    model = host.shared.sd_model
    assert unified_sd_optimization.integration_of(model).value == "automatic1111"
    assert rocm_sd_ops.optimize_sd_model(model, "Performance") is model
    assert SWITCH.is_on(model)
    assert "level performance" in SWITCH.infotext()
    model.lowvram = True
    with pytest.raises(Unsupported, match="--medvram or --lowvram"):
        unified_sd_optimization.optimize(model)
    with pytest.raises(InvalidOption, match="quality"):
        unified_sd_optimization.optimize(model, quality="best")
