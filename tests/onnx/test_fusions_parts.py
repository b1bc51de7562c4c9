"""Every site that the torch model has is found in its graph, and the fused graph computes as exactly as torch does."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import onnx_ir as ir
import pytest
import torch
from fused_parts import exported, outputs, torch_outputs, torch_part

from rocm_sd import numerics
from rocm_sd.onnx.fusions.editing import Editor
from rocm_sd.onnx.fusions.float16 import to_half, widen_attention
from rocm_sd.onnx.fusions.fusing import fuse
from rocm_sd.onnx.fusions.providers import PROVIDERS, Ops
from rocm_sd.onnx.fusions.sites import sites_of
from rocm_sd.onnx.providers import Provider
from rocm_sd.onnx.sessions import Session

PARTS = (
    "sd15",
    # What it has is in the others, too: linear projections and heads of 64 in SDXL.
    pytest.param("sd21", marks=pytest.mark.slow),
    "sdxl",
    "vae_decoder",
    "vae_encoder",
    "text_encoder",
)
# The graph that CUDA gets, with functions in place of kernels that a CPU has not; and that of ROCm.
EVERYWHERE = replace(PROVIDERS["cuda"], native=frozenset({"MultiHeadAttention"}))
LIKE_ROCM = replace(PROVIDERS["rocm"], native=frozenset({"MultiHeadAttention"}))


def _sites(name: str) -> dict[str, int]:
    return sites_of(name if name in {"vae_decoder", "vae_encoder", "text_encoder"} else "unet", torch_part(name)[3])


def _expected(name: str, ops: Ops) -> dict[str, int]:
    return {kind: n for kind, n in _sites(name).items() if not ops.why_not(kind, name)}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("ops", [PROVIDERS["cpu"], PROVIDERS["migraphx"], EVERYWHERE], ids=["cpu", "migraphx", "nhwc"])
def test_all_sites_are_found_and_computed_as_exactly(name, ops, tmp_path):
    model = exported(name)
    found = fuse(model, ops)
    assert found == _expected(name, ops)
    actual = outputs(model, torch_part(name)[1], tmp_path)
    exact, stock = torch_outputs(name, torch.float64), torch_outputs(name, torch.float32)
    for ours, true, theirs in zip(actual, exact, stock, strict=True):
        numerics.require(name, ours, true, theirs)


@pytest.mark.parametrize(
    ("name", "ops"),
    [*((each, EVERYWHERE) for each in PARTS if isinstance(each, str)),
     pytest.param("sd21", EVERYWHERE, marks=pytest.mark.slow),
     # The graph that a CPU gets: in two products, with what halves of guidance share computed once.
     ("sd15", PROVIDERS["cpu"])],
)  # fmt: skip
def test_half_precision_is_as_exact_as_torchs(name, ops, tmp_path):
    model = exported(name)
    editor = Editor(model, ops, half=True)
    fuse(model, ops, half=True)
    to_half(editor)
    actual = outputs(model, torch_part(name)[1], tmp_path)
    assert {each.dtype for each in actual} == {torch.float16}
    exact, stock = torch_outputs(name, torch.float64), torch_outputs(name, torch.float16)
    for ours, true, theirs in zip(actual, exact, stock, strict=True):
        numerics.require(name, ours, true, theirs)


@pytest.mark.parametrize("name", [pytest.param("sd21", marks=pytest.mark.slow), "vae_decoder", "text_encoder"])
def test_an_export_in_half_precision_has_the_same_sites(name, tmp_path):
    model = exported(name, torch.float16)
    ops = replace(EVERYWHERE, packed=False)
    assert fuse(model, ops, half=True) == _expected(name, ops)
    assert widen_attention(Editor(model, ops, half=True)) == _sites(name)["Attention"]
    actual = outputs(model, torch_part(name)[1], tmp_path)
    exact, stock = torch_outputs(name, torch.float64), torch_outputs(name, torch.float16)
    for ours, true, theirs in zip(actual, exact, stock, strict=True):
        numerics.require(name, ours, true, theirs)


def test_with_the_channels_last_only_the_ends_are_transposed():
    model = exported("sd15")
    fuse(model, EVERYWHERE, half=True)
    ops = Counter(node.op_type for node in model.graph)
    assert ops["Transpose"] == 2
    assert ops["PackedQKV"] == ops["PackedKV"] == _sites("sd15")["Attention"] // 2


@pytest.mark.parametrize("provider", ["rocm", "cuda"])
def test_gpus_get_the_ops_of_onnx_runtime(provider):
    model = exported("sd15")
    fuse(model, PROVIDERS[provider], half=True)
    used = {node.op_type for node in model.graph if node.domain == "com.microsoft"}
    assert used == {"MultiHeadAttention", "SkipLayerNormalization", "GroupNorm", "SkipGroupNorm", "NhwcConv"}
    # Widths of 80 and 160, which the kernels of these two refuse.
    assert {"BiasSplitGelu", "BiasAdd", "UpsampleConvNhwc"} == {
        node.op_type for node in model.graph if node.domain == "rocm_sd"
    }


def test_no_shape_is_computed_for_attention():
    model = exported("text_encoder")
    fuse(model, PROVIDERS["cpu"])
    attends = [node for node in model.graph if node.op_type == "MultiHeadAttention"]
    assert {node.attributes["unidirectional"].as_int() for node in attends} == {1}
    assert not [node for node in model.graph if node.op_type in {"Softmax", "Where", "IsNaN"}]


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("provider", ["migraphx", "rocm"])
def test_a_mask_that_a_provider_would_lose_stays_in_the_graph(provider, half):
    """Neither reads `unidirectional`, and MIGraphX scales an attention bias as it scales the scores."""
    model = exported("text_encoder")
    found = fuse(model, PROVIDERS[provider], half=half)
    assert "Attention" not in found
    assert not [node for node in model.graph if "unidirectional" in node.attributes]
    assert Counter(node.op_type for node in model.graph)["Softmax"] == _sites("text_encoder")["Attention"]
    assert "mask of a text encoder" in PROVIDERS[provider].why_not("Attention", "text_encoder_2")
    assert not PROVIDERS[provider].why_not("Attention", "unet")


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", ["sd15", "vae_decoder"])
def test_rocms_attention_is_given_no_biases(name, half):
    """Its kernel refuses them. The decoder's attention has some, which are added before."""
    model = exported(name)
    assert fuse(model, PROVIDERS["rocm"], half=half)["Attention"] == _sites(name)["Attention"]
    attends = [node for node in model.graph if node.op_type == "MultiHeadAttention"]
    assert len(attends) == _sites(name)["Attention"]
    assert not [node for node in attends if len(node.inputs) > 3 and node.inputs[3] is not None]


def test_the_biases_that_rocm_has_added_before_are_computed_as_exactly(tmp_path):
    model = exported("vae_decoder")
    assert fuse(model, LIKE_ROCM) == _expected("vae_decoder", LIKE_ROCM)
    (actual,) = outputs(model, torch_part("vae_decoder")[1], tmp_path)
    (exact,), (stock,) = (torch_outputs("vae_decoder", dtype) for dtype in (torch.float64, torch.float32))
    numerics.require("vae_decoder", actual, exact, stock)


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_what_halves_of_guidance_share_is_computed_once_to_the_same_bits(name, tmp_path):
    """Half of a doubled sample gives what the whole gives; one picture and three, and a batch without guidance."""
    model, inputs = exported(name), torch_part(name)[1]
    assert fuse(model, PROVIDERS["cpu"])["SharedGuidance"] == 1
    for pictures in (1, 3):
        random = torch.Generator().manual_seed(pictures)
        sample = torch.randn(pictures, 4, 16, 8, generator=random)
        conditions = {
            key: torch.randn(2 * pictures, *value.shape[1:], generator=random)
            for key, value in inputs.items()
            if key not in {"sample", "timestep"}
        }
        given = {"sample": sample, "timestep": inputs["timestep"], **conditions}
        (half,) = outputs(model, given, tmp_path)
        (whole,) = outputs(model, {**given, "sample": torch.cat([sample, sample])}, tmp_path)
        assert torch.equal(half, whole)
        first = {key: value[:pictures] for key, value in conditions.items()}
        (alone,) = outputs(model, {**given, **first}, tmp_path)
        torch.testing.assert_close(alone, whole[:pictures], rtol=1e-5, atol=1e-5)


def test_only_what_guidance_doubled_is_halved(tmp_path):
    """The pipeline's call: halves that differ, or a timestep of each row, go to the model as they come."""
    from rocm_sd.onnx.adapters import UNetPart

    _, inputs, _, config = torch_part("sd15")
    model = exported("sd15")
    fuse(model, PROVIDERS["cpu"])
    ir.save(model, tmp_path / "model.onnx")
    session = Session(tmp_path / "model.onnx", Provider("cpu", {}))
    rows = []

    def noted(given, wanted):
        rows.append(len(given["sample"]))
        return dict(zip(wanted, session(given, list(session.outputs)).values(), strict=True))

    part = UNetPart(SimpleNamespace(inputs=session.inputs), config)
    part.session = noted
    one, text = inputs["sample"][:1], inputs["encoder_hidden_states"]
    doubled = torch.cat([one, one])
    found = part(doubled, inputs["timestep"], text, return_dict=False)[0]
    apart = torch.cat([one, one + 1e-6])
    part(apart, inputs["timestep"], text)
    part(one, inputs["timestep"], text[:1])
    part(doubled, inputs["timestep"].expand(2), text)
    assert rows == [1, 2, 1, 2]
    exact, stock = (
        torch_part("sd15")[0].to(dtype)(doubled.to(dtype), inputs["timestep"], text.to(dtype)).detach()
        for dtype in (torch.float64, torch.float32)
    )
    numerics.require("a doubled sample", found, exact, stock)
