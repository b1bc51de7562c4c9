"""The nodes against stand-ins of ComfyUI's interfaces; test_comfyui_interfaces.py holds these against a real one."""

from __future__ import annotations

import copy
import gc
import inspect
import logging
import pickle
import re
import subprocess
import sys
from types import SimpleNamespace
from weakref import ref

import fake_comfyui
import pytest
import torch

import rocm_sd_ops
import unified_sd_optimization
from rocm_sd import numerics
from rocm_sd.errors import InvalidOption
from rocm_sd.integrations.comfyui import (
    NODE_CLASS_MAPPINGS,
    NODE_DISPLAY_NAME_MAPPINGS,
    WEB_DIRECTORY,
    host,
    patching,
)
from rocm_sd.integrations.comfyui.attention import OPTION, is_our_override, override_for
from rocm_sd.integrations.comfyui.comfyui_policy import compiled_ahead, fused
from rocm_sd.integrations.comfyui.host import PatchReport
from rocm_sd.integrations.comfyui.nodes import (
    ROCmBenchmark,
    ROCmOptimizationReport,
    ROCmOptimizedAttention,
    ROCmOptimizedModel,
    ROCmOptimizedVAE,
)
from rocm_sd.integrations.ldm import blocks
from rocm_sd.ops import OPS
from rocm_sd.rewrite.forwards import is_ours

NAMED = ",".join(f"{name}=torch" for name in OPS)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    fake_comfyui.install(monkeypatch)
    host._SAID.clear()
    with torch.no_grad():
        yield


@pytest.fixture
def ops(monkeypatch):
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", NAMED)
    monkeypatch.setenv("ROCM_SD_STEP_GRAPH", "1")


def graph_of(patched):
    (wrapper,) = patched.get_wrappers("diffusion_model", host.KEY)
    return wrapper.__self__.calls


def notes(patched):
    return "\n".join(patching.report_of(patched).lines())


def near(ours, stock):
    assert torch.allclose(ours, stock, rtol=2e-5, atol=2e-5), float((ours - stock).abs().max())


def test_importing_the_nodes_imports_no_host():
    code = (
        "import sys, rocm_sd.integrations.comfyui as nodes;"
        "assert not any(name.partition('.')[0] == 'comfy' for name in sys.modules);"
        "print(len(nodes.NODE_CLASS_MAPPINGS))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "5"


def test_every_node_says_what_the_host_asks_for():
    assert NODE_CLASS_MAPPINGS.keys() == NODE_DISPLAY_NAME_MAPPINGS.keys()
    for node in NODE_CLASS_MAPPINGS.values():
        inputs = node.INPUT_TYPES()
        given = {**inputs["required"], **inputs.get("optional", {})}
        accepted = inspect.signature(getattr(node, node.FUNCTION)).parameters
        assert given.keys() <= accepted.keys()
        assert node.CATEGORY == "ROCm Optimizations"
        assert node.DESCRIPTION
        assert len(node.RETURN_TYPES) == len(node.OUTPUT_TOOLTIPS)
    level = ROCmOptimizedModel.INPUT_TYPES()["required"]["optimization_level"]
    assert level[0] == ["auto", "performance", "memory"]
    assert level[1]["default"] == "auto"


def test_the_script_for_the_canvas_lies_in_the_package():
    from pathlib import Path

    (script,) = Path(WEB_DIRECTORY).glob("*.js")
    text = script.read_text()
    for node in (ROCmOptimizationReport, ROCmBenchmark):
        assert f'"{node.__name__}"' in text


def test_steps_are_the_same_replayed_and_taken_back(ops):
    stock = fake_comfyui.patcher()
    expected = fake_comfyui.run(stock)
    (ours,) = ROCmOptimizedModel().optimize_model(stock)
    near(fake_comfyui.run(ours), expected)
    assert graph_of(ours).replays == 2
    near(fake_comfyui.run(ours), expected)
    assert graph_of(ours).replays == 6
    assert torch.equal(fake_comfyui.run(stock), expected)
    near(fake_comfyui.run(ours, batch=1), fake_comfyui.run(stock, batch=1))
    for words in (
        "1 x ResBlock: replaced by resblock",
        "1 x BasicTransformerBlock",
        "6 convolutions run channels-last",
    ):
        assert words in notes(ours)
    # The verdict comes first.
    replaced, of = re.match(
        r"model on cpu: (\d+) of (\d+) blocks replaced, level auto, quality exact\n", notes(ours)
    ).groups()
    assert 0 < int(replaced) <= int(of)


def test_the_promised_function_takes_what_the_host_hands_a_node(ops):
    stock = fake_comfyui.patcher()
    assert unified_sd_optimization.integration_of(stock).value == "comfyui"
    expected = fake_comfyui.run(stock)
    ours = rocm_sd_ops.optimize_sd_model(stock, "Auto")
    assert ours is not stock
    assert patching.report_of(stock) is None
    assert patching.report_of(ours).level == "auto"
    near(fake_comfyui.run(ours), expected)
    shallow = rocm_sd_ops.optimize_sd_model(stock, "Memory", quality="depth=1,every=2")
    assert (patching.report_of(shallow).level, patching.report_of(shallow).quality) == ("memory", "depth=1,every=2")


def test_the_promised_function_takes_a_vae_of_the_host(monkeypatch):
    monkeypatch.setattr(patching, "_VAES", (("Model", "fake"),))
    monkeypatch.setattr(patching, "is_comfy", lambda kind, name, _module: kind.__name__ == name)
    vae = SimpleNamespace(patcher=fake_comfyui.patcher())
    assert unified_sd_optimization.integration_of(vae).value == "comfyui"
    ours = rocm_sd_ops.optimize_sd_model(vae, "Performance")
    assert ours is not vae
    assert ours.patcher.model is vae.patcher.model
    assert patching.report_of(ours).what == "VAE"
    with pytest.raises(InvalidOption, match="quality"):
        rocm_sd_ops.optimize_sd_model(vae, quality="best")


@pytest.mark.parametrize("node", [ROCmOptimizedAttention, ROCmOptimizedModel, ROCmOptimizedVAE])
def test_the_host_calls_the_promised_function_of_a_node(node):
    assert (node.FUNCTION, node.CATEGORY) == ("optimize_model", "ROCm Optimizations")
    target, level = list(node.INPUT_TYPES()["required"])[:2]
    assert target == ("vae" if node is ROCmOptimizedVAE else "model")
    assert level == "optimization_level"
    assert list(inspect.signature(node().optimize_model).parameters)[:2] == [target, level]


def test_on_a_cpu_no_block_is_said_to_be_replaced(monkeypatch):
    (ours,) = ROCmOptimizedModel().optimize_model(fake_comfyui.patcher())
    assert "each call is ComfyUI's own" in notes(ours)
    assert ": replaced" not in notes(ours)
    assert re.match(r"model on cpu: 0 of \d+ blocks replaced, level", notes(ours))
    assert "1 x ResBlock: skipped, because the ops are stock torch on a CPU" in notes(ours)
    # The settings may name other implementations at any time.
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", NAMED)
    assert "1 x ResBlock: replaced by resblock" in notes(ours)


def test_blocks_of_convolutions_that_keep_their_layout_are_the_hosts(ops, monkeypatch):
    kept = SimpleNamespace(implementation="torch", why="as it came")
    monkeypatch.setattr(patching, "choose_layout", lambda *_: kept)
    stock = fake_comfyui.patcher()
    (ours,) = ROCmOptimizedModel().optimize_model(stock)
    near(fake_comfyui.run(ours), fake_comfyui.run(stock))
    assert "1 x ResBlock: skipped, because convolutions keep their layout" in notes(ours)
    assert "1 x BasicTransformerBlock: replaced" in notes(ours)
    assert not any("res" in name for name in ours.object_patches)


class Decoding(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = size

    def decode(self, x):
        return x * self.size


def test_a_method_on_the_vae_does_not_keep_it_alive_and_a_copy_has_its_own():
    report = PatchReport("VAE", "cpu", "auto")
    library = SimpleNamespace(serves_a_vae=False)
    vae = Decoding(2.0)
    vae.decode = compiled_ahead(vae, "decode", report, library)
    assert is_ours(vae.decode)
    other = copy.deepcopy(vae)
    other.size = 3.0
    x = torch.ones(1)
    assert (float(vae.decode(x)), float(other.decode(x))) == (2.0, 3.0)
    assert float(pickle.loads(pickle.dumps(vae)).decode(x)) == 2.0
    held = ref(vae)
    gc.disable()
    try:
        del vae
        assert held() is None
    finally:
        gc.enable()


# The kernels themselves, in Triton's interpreter where there is no GPU.
TRITON = "attention=triton,group_norm_silu=triton,layer_norm_residual=triton,linear_geglu=triton,linear_residual=triton"


@pytest.mark.parametrize("named", [NAMED, TRITON], ids=["torch", "triton"])
def test_the_whole_unet_is_as_exact_as_stock_in_half_precision(ops, monkeypatch, named):
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", named)
    stock = fake_comfyui.patcher()
    unet = stock.model.diffusion_model
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(2, 4, 8, 8, generator=generator), torch.tensor([0.5, 0.25]), None]
    inputs[2] = torch.randn(2, 5, 16, generator=generator)
    exact = copy.deepcopy(unet).double()(*(t.double() for t in inputs), transformer_options={})
    unet.half()
    half = [t.half() for t in inputs]
    expected = unet(*half, transformer_options={})
    # Kernels in the interpreter are no torch operations, which a graph on a CPU is made of.
    captured = named == NAMED
    ours = patching.optimize_model(stock, "auto" if captured else "memory", "exact")
    ours.patch_model()
    for _ in range(3 if captured else 1):
        options = {**ours.model_options["transformer_options"], "wrappers": ours.wrappers}
        with fused():
            got = unet(*half, transformer_options=options)
        numerics.require("UNet", got, exact, expected)
    assert not patching.report_of(ours).failed
    assert not captured or graph_of(ours).replays == 1


def test_a_controlnets_tensors_are_copied_in_at_each_replay(ops):
    stock = fake_comfyui.patcher()
    control = torch.randn(2, 64, 8, 8, generator=torch.Generator().manual_seed(5))
    ours = patching.optimize_model(stock, "auto", "exact")
    near(fake_comfyui.run(ours, control=control), fake_comfyui.run(stock, control=control))
    assert graph_of(ours).replays == 2


def test_a_patch_of_another_node_is_called_in_every_step(ops):
    stock = fake_comfyui.patcher()
    calls = []

    def patch(h, skip, _options):
        calls.append(1)
        return h * 0.9, skip

    stock.model_options["transformer_options"]["patches"] = {"output_block_patch": [patch]}
    expected = fake_comfyui.run(stock)
    ours = patching.optimize_model(stock, "auto", "exact")
    near(fake_comfyui.run(ours), expected)
    assert len(calls) == 8
    assert "another node patches it (output_block_patch)" in notes(ours)


@pytest.mark.parametrize(
    ("options", "kwargs", "reason"),
    [
        ({"easycache": object()}, {}, "its options have easycache"),
        ({}, {"num_video_frames": 3}, "it is called with num_video_frames"),
        ({OPTION: lambda func, *args, **kwargs: func(*args, **kwargs)}, {}, "another node computes its attention"),
    ],
)
def test_what_is_not_known_is_not_captured(ops, options, kwargs, reason):
    ours = patching.optimize_model(fake_comfyui.patcher(), "auto", "exact")
    unet = ours.patch_model().diffusion_model
    x, text = torch.randn(1, 4, 8, 8), torch.randn(1, 5, 16)
    known = {**ours.model_options["transformer_options"], "wrappers": ours.wrappers}
    for _ in range(3):
        unet(x, torch.ones(1), context=text, transformer_options={**known, **options}, **kwargs)
    assert graph_of(ours).replays == 0
    assert f"3 calls without a graph, because {reason}" in notes(ours)


def test_weights_that_change_in_place_are_read_and_those_that_are_replaced_are_captured_anew(ops):
    stock = fake_comfyui.patcher()
    ours = patching.optimize_model(stock, "auto", "exact")
    fake_comfyui.run(ours)
    layer = stock.model.diffusion_model.input_blocks[1].in_layers[2]
    layer.weight.data.mul_(1.5)
    near(fake_comfyui.run(ours), fake_comfyui.run(stock))
    assert graph_of(ours).replays == 6
    layer.weight = torch.nn.Parameter(layer.weight.data * 0.5, requires_grad=False)
    near(fake_comfyui.run(ours), fake_comfyui.run(stock))
    assert graph_of(ours).replays == 8
    assert "last captured anew" in notes(ours)


def test_a_graph_that_differs_is_not_used(ops, monkeypatch):
    def wrong(h, weight, _bias):
        return torch.zeros(*h.shape[:-1], weight.shape[0] // 2)

    monkeypatch.setattr(blocks, "linear_geglu", wrong)
    stock = fake_comfyui.patcher()
    ours = patching.optimize_model(stock, "auto", "exact")
    unet = ours.patch_model().diffusion_model
    x, text, options = torch.randn(1, 4, 8, 8), torch.randn(1, 5, 16), ours.model_options["transformer_options"]
    results = [
        unet(x, torch.ones(1), context=text, transformer_options={**options, "wrappers": ours.wrappers})
        for _ in range(3)
    ]
    ours.detach()
    expected = stock.patch_model().diffusion_model(x, torch.ones(1), context=text, transformer_options={})
    near(results[1], expected)
    near(results[2], expected)
    assert graph_of(ours).replays == 0
    assert "its replay differs from the model's forward by" in notes(ours)


def test_an_interrupt_while_capturing_reaches_the_host(ops):
    class InterruptProcessingException(Exception):
        pass

    ours = patching.optimize_model(fake_comfyui.patcher(), "auto", "exact")
    unet = ours.patch_model().diffusion_model
    pending = [InterruptProcessingException()]
    whole = unet.time_embed.forward

    def interrupted(x):
        if pending:
            raise pending.pop()
        return whole(x)

    unet.time_embed.__class__ = type("Linear", (type(unet.time_embed),), {"forward": lambda _self, x: interrupted(x)})
    unet.time_embed.__class__.__module__ = "comfy.ops"
    arguments = (torch.randn(1, 4, 8, 8), torch.ones(1), torch.randn(1, 5, 16))
    options = {**ours.model_options["transformer_options"], "wrappers": ours.wrappers}
    with pytest.raises(InterruptProcessingException):
        unet(*arguments, transformer_options=dict(options))
    for _ in range(3):
        unet(*arguments, transformer_options=dict(options))
    assert graph_of(ours).replays == 1


def test_a_compiled_model_is_the_hosts_own(ops):
    stock = fake_comfyui.patcher()
    arguments = (torch.randn(1, 4, 8, 8), torch.ones(1), torch.randn(1, 5, 16))
    expected = stock.model.diffusion_model(*arguments, transformer_options={})
    ours = patching.optimize_model(stock, "auto", "exact")
    unet = torch.compile(ours.patch_model().diffusion_model, backend="eager")
    options = {**ours.model_options["transformer_options"], "wrappers": ours.wrappers}
    for _ in range(2):
        near(unet(*arguments, transformer_options=dict(options)), expected)
    assert not patching.report_of(ours).failed


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("joined", [True, False])
def test_attention_in_every_shape_that_the_host_has(ops, split, joined):
    report = PatchReport("attention", "cpu", "auto")
    override, calls = override_for(report), []

    def func(*args, **kwargs):
        calls.append(1)
        return fake_comfyui.plain_attention(*args, **kwargs)

    shape = (2, 3, 7, 8) if split else (2, 7, 24)
    q, k, v = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    options = {"skip_reshape": split, "skip_output_reshape": not joined, "transformer_options": {}}
    ours = override(func, q, k, v, 3, **options, _inside_attn_wrapper=True)
    assert not calls
    expected = func(q, k, v, 3, **options)
    near(ours, expected)
    assert ours.shape == expected.shape
    # What the op does not take goes to the host's function as it came.
    mask = torch.zeros(7, 7).masked_fill(torch.ones(7, 7).triu(1).bool(), float("-inf"))
    assert torch.equal(override(func, q, k, v, 3, mask, **options), func(q, k, v, 3, mask=mask, **options))
    assert torch.equal(override(func, q, k, v, 3, low_precision_attention=True, **options), expected)
    assert len(calls) == 4
    assert not report.failed


def test_attention_that_fails_is_the_hosts_from_then_on(ops, monkeypatch, caplog):
    from rocm_sd.integrations.comfyui import attention

    def fails(*_args):
        raise ValueError("the kernel is broken")

    monkeypatch.setattr(attention, "attention", fails)
    report = PatchReport("attention", "cpu", "auto")
    q = torch.randn(1, 5, 8)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            override_for(report)(fake_comfyui.plain_attention, q, q, q, 2)
    assert len(caplog.messages) == 1
    assert "the kernel is broken" in report.lines()[-1]


def test_the_attention_node_changes_a_copy_alone():
    stock = fake_comfyui.patcher()
    (ours,) = ROCmOptimizedAttention().optimize_model(stock, "memory")
    assert ours is not stock
    assert OPTION not in stock.model_options["transformer_options"]
    assert is_our_override(ours.clone().model_options["transformer_options"][OPTION])
    assert torch.equal(fake_comfyui.run(ours), fake_comfyui.run(stock))


@pytest.mark.parametrize("missing", ["add_wrapper_with_key", "set_injections"])
def test_a_host_that_is_too_old_keeps_its_model(missing, monkeypatch, caplog):
    stock = fake_comfyui.patcher()
    monkeypatch.setattr(type(stock), missing, None)
    with caplog.at_level(logging.WARNING):
        assert ROCmOptimizedModel().optimize_model(stock)[0] is stock
        assert ROCmOptimizedModel().optimize_model(stock)[0] is stock
    (message,) = caplog.messages
    assert missing in message
    assert "Update ComfyUI" in message
    text = ROCmOptimizationReport().report(model=stock)["result"][0]
    assert "not optimised" in text


def test_a_host_without_wrappers_or_an_old_torch_is_reported(monkeypatch, caplog):
    stock = fake_comfyui.patcher()
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.delattr(sys.modules["comfy.patcher_extension"], "PatcherInjection")
        assert ROCmOptimizedModel().optimize_model(stock)[0] is stock
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(torch, "__version__", "2.1.0+rocm5.6")
        assert ROCmOptimizedModel().optimize_model(stock)[0] is stock
    assert "has no PatcherInjection" in caplog.messages[0]
    assert "torch 2.1.0" in caplog.messages[1]


def test_what_is_no_vae_of_stable_diffusion_is_handed_on(caplog):
    class Taesd:
        patcher = fake_comfyui.patcher()

    vae = Taesd()
    with caplog.at_level(logging.WARNING):
        assert ROCmOptimizedVAE().optimize_model(vae)[0] is vae
    assert "a VAE that is a Model" in caplog.messages[0]


def test_what_is_no_unet_is_not_measured(caplog):
    stock = fake_comfyui.patcher()
    stock.model.diffusion_model = torch.nn.Linear(4, 4)
    with caplog.at_level(logging.WARNING):
        (text,) = ROCmBenchmark().measure(stock, steps=2, repeats=1, width=64, height=64)["result"]
    assert text.startswith("Nothing was measured. The benchmark does not support a Linear.")
    assert text in caplog.messages[0]


def test_a_level_that_is_not_known_is_reported(caplog):
    stock = fake_comfyui.patcher()
    with caplog.at_level(logging.WARNING):
        assert ROCmOptimizedModel().optimize_model(stock, "fastest")[0] is stock
    assert "auto, performance, memory" in caplog.messages[0]
