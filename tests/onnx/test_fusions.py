"""Each fusion on a graph of a few nodes: what it takes, and what it leaves alone."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
import torch
from fused_parts import outputs
from torch.nn import functional as F

from rocm_sd.errors import InvalidOption
from rocm_sd.onnx import providers
from rocm_sd.onnx.fusions.editing import Editor
from rocm_sd.onnx.fusions.float16 import to_half, widen_attention
from rocm_sd.onnx.fusions.fusing import fuse
from rocm_sd.onnx.fusions.providers import PROVIDERS, ops_of, resolve
from rocm_sd.onnx.fusions.upsample_conv import parity_kernel

_HEAD = '<ir_version: 10, opset_import: ["": 18]>\n'


def _model(text: str, **weights: np.ndarray) -> ir.Model:
    model = ir.serde.deserialize_model(onnx.parser.parse_model(_HEAD + text))
    for name, values in weights.items():
        value = next(v for node in model.graph for v in node.inputs if v is not None and v.name == name)
        tensor = ir.tensor(values, name=name)
        value.const_value, value.shape, value.type = tensor, ir.Shape(values.shape), ir.TensorType(tensor.dtype)
        model.graph.inputs[:] = [each for each in model.graph.inputs if each.name != name]
        model.graph.register_initializer(value)
    return model


def _attention(dtype: str = "float", scale: float = 0.125) -> str:
    shape = "batch, tokens, 2, 64"
    turned = "batch, 2, tokens, 64"
    return f"""attend ({dtype}[batch,tokens,128] q, {dtype}[batch,tokens,128] k, {dtype}[batch,tokens,128] v)
    => ({dtype}[batch,tokens,128] y)
    <{dtype}[{shape}] q4, {dtype}[{shape}] k4, {dtype}[{shape}] v4, {dtype}[{turned}] qt, {dtype}[{turned}] kt,
     {dtype}[{turned}] vt, {dtype}[batch, 2, 64, tokens] kk, {dtype}[batch, 2, tokens, tokens] s,
     {dtype}[batch, 2, tokens, tokens] z, {dtype}[batch, 2, tokens, tokens] p, {dtype}[{turned}] o,
     {dtype}[{shape}] ot, {dtype} c = {{{scale}}}, int64[4] split = {{0, 0, 2, 64}}, int64[3] join = {{0, 0, 128}}> {{
    q4 = Reshape (q, split)
    k4 = Reshape (k, split)
    v4 = Reshape (v, split)
    qt = Transpose <perm = [0, 2, 1, 3]> (q4)
    kt = Transpose <perm = [0, 2, 1, 3]> (k4)
    vt = Transpose <perm = [0, 2, 1, 3]> (v4)
    kk = Transpose <perm = [0, 1, 3, 2]> (kt)
    s = MatMul (qt, kk)
    z = Mul (s, c)
    p = Softmax <axis = -1> (z)
    o = MatMul (p, vt)
    ot = Transpose <perm = [0, 2, 1, 3]> (o)
    y = Reshape (ot, join)
}}"""


def _in_heads(value: torch.Tensor) -> torch.Tensor:
    return value.unflatten(-1, (2, 64)).transpose(1, 2)


def _exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (_in_heads(each.double()) for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_attention_becomes_one_node(tmp_path):
    torch.manual_seed(1)
    inputs = {name: torch.randn(2, 5, 128) for name in "qkv"}
    model = _model(_attention())
    assert fuse(model, PROVIDERS["cpu"]) == {"Attention": 1}
    (node,) = model.graph
    assert (node.op_type, node.attributes["num_heads"].as_int()) == ("MultiHeadAttention", 2)
    (actual,) = outputs(model, inputs, tmp_path)
    torch.testing.assert_close(actual.double(), _exact(**inputs), rtol=1e-5, atol=1e-6)


def test_scores_that_overflow_half_precision_are_computed_in_float32(tmp_path):
    # Every number is exact in half; the products, of 2**20 and more, are not even finite there.
    torch.manual_seed(1)
    inputs = {
        "q": torch.full((1, 5, 128), 128.0),
        "k": torch.full((1, 5, 128), 128.0) + torch.tensor([0.0, 0.0, 1.0, 0.0, 1.0])[None, :, None] / 1024 * 128,
        "v": torch.randint(-8, 8, (1, 5, 128)).float(),
    }
    scores = (_in_heads(inputs["q"]) @ _in_heads(inputs["k"]).mT).half()
    assert scores.isinf().all()
    model = _model(_attention())
    editor = Editor(model, PROVIDERS["cpu"], half=True)
    fuse(model, PROVIDERS["cpu"], half=True)
    to_half(editor)
    assert widen_attention(editor) == 1
    (actual,) = outputs(model, inputs, tmp_path)
    assert actual.dtype is torch.float16
    torch.testing.assert_close(actual.double(), _exact(**inputs), rtol=2**-10, atol=1e-6)


@pytest.mark.parametrize("size", [(1, 1), (3, 5), (8, 8)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_an_enlarged_picture_is_convolved_while_it_is_small(size, channels_last, tmp_path):
    from test_fusions_parts import EVERYWHERE

    torch.manual_seed(2)
    kernel, bias = torch.randn(6, 4, 3, 3), torch.randn(6)
    model = _model(
        """enlarge (float[batch,4,h,w] x, float[6,4,3,3] kernel, float[6] bias) => (float[batch,6,2*h,2*w] y)
        <float[4] scales = {1, 1, 2, 2}, float[batch,4,2*h,2*w] large> {
        large = Resize <mode = "nearest", nearest_mode = "floor", coordinate_transformation_mode = "asymmetric">
            (x, , scales)
        y = Conv <pads = [1, 1, 1, 1], strides = [1, 1], dilations = [1, 1], kernel_shape = [3, 3]>
            (large, kernel, bias)
    }""".replace("2*h,2*w", "h2,w2"),
        kernel=kernel.numpy(),
        bias=bias.numpy(),
    )
    found = fuse(model, EVERYWHERE if channels_last else PROVIDERS["cpu"])
    assert found == {"UpsampleConv": 1}
    x = torch.randn(2, 4, *size)
    (actual,) = outputs(model, {"x": x}, tmp_path)
    exact = F.conv2d(F.interpolate(x.double(), scale_factor=2.0), kernel.double(), bias.double(), padding=1)
    torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=1e-5)


def test_the_kernels_of_the_parities_hold_all_weights_four_times():
    kernel = np.random.default_rng(0).standard_normal((2, 3, 3, 3)).astype(np.float32)
    parities = [parity_kernel(kernel, rows, columns) for rows in (0, 1) for columns in (0, 1)]
    assert {each.shape for each in parities} == {(2, 3, 2, 2)}
    for each in parities:
        np.testing.assert_allclose(each.sum((2, 3)), kernel.astype(np.float64).sum((2, 3)), rtol=1e-12)


@pytest.mark.parametrize("scales", ["1, 1, 3, 3", "1, 1, 2, 1"])
def test_other_enlargements_are_left_alone(scales):
    model = _model(
        f"""enlarge (float[batch,4,h,w] x, float[6,4,3,3] kernel, float[6] bias) => (float[batch,6,p,q] y)
        <float[4] scales = {{{scales}}}, float[batch,4,p,q] large> {{
        large = Resize <mode = "nearest", nearest_mode = "floor", coordinate_transformation_mode = "asymmetric">
            (x, , scales)
        y = Conv <pads = [1, 1, 1, 1], strides = [1, 1], dilations = [1, 1], kernel_shape = [3, 3]>
            (large, kernel, bias)
    }}""",
        kernel=np.zeros((6, 4, 3, 3), np.float32),
        bias=np.zeros(6, np.float32),
    )
    assert fuse(model, PROVIDERS["cpu"]) == {}


def test_a_sum_that_broadcasts_is_no_residual():
    model = _model(
        """embed (float[batch,7,8] tokens, float[1,7,8] places, float[8] gamma, float[8] beta)
        => (float[batch,7,8] y, float[batch,7,8] s) {
        s = Add (tokens, places)
        y = LayerNormalization <axis = -1> (s, gamma, beta)
    }""",
        gamma=np.ones(8, np.float32),
        beta=np.zeros(8, np.float32),
    )
    assert fuse(model, PROVIDERS["cuda"]) == {}


def test_a_timestep_keeps_its_digits_in_half_precision(tmp_path):
    model = _model(
        """time (float[1] timestep, float[1,4] frequencies, float[4,4] weights) => (float[1,4] y)
        <float[1,4] product, float[1,4] wave> {
        product = Mul (timestep, frequencies)
        wave = Sin (product)
        y = MatMul (wave, weights)
    }""",
        frequencies=np.asarray([[1.0, 0.7, 0.3, 0.1]], np.float32),
        weights=np.eye(4, dtype=np.float32),
    )
    to_half(Editor(model, PROVIDERS["cpu"], half=True))
    assert [str(each.dtype) for each in model.graph.inputs] == ["FLOAT"]
    (actual,) = outputs(model, {"timestep": torch.tensor([997.3])}, tmp_path)
    exact = torch.sin(torch.tensor([997.3]) * torch.tensor([[1.0, 0.7, 0.3, 0.1]]))
    torch.testing.assert_close(actual.float(), exact, rtol=2**-10, atol=2**-12)


def test_outputs_keep_their_names():
    model = _model(_attention())
    fuse(model, PROVIDERS["cpu"])
    assert [each.name for each in model.graph.outputs] == ["y"]
    assert Counter(node.op_type for node in model.graph) == {"MultiHeadAttention": 1}


def test_a_model_is_fused_for_the_provider_by_which_it_would_be_run(monkeypatch):
    """For each set of providers that may be installed; MIGraphX before the provider that ONNX Runtime has dropped."""
    names = [name for name in providers.PROVIDERS if name != "cpu"]
    for count in range(len(names) + 1):
        for some in combinations(names, count):
            there = [providers.PROVIDERS[name] for name in ("cpu", *some)]
            monkeypatch.setattr(providers.runtime(), "get_available_providers", lambda there=there: there)
            assert resolve("auto") == providers.automatic()[0]
            expected = next((name for name in ("migraphx", "rocm", "cuda") if name in some), "cpu")
            assert ops_of("auto").name == expected
    assert {ops.session_name for ops in PROVIDERS.values()} == {providers.PROVIDERS[name] for name in PROVIDERS}
    with pytest.raises(InvalidOption, match="tpu"):
        resolve("tpu")


@pytest.mark.parametrize(
    ("provider", "others"),
    [
        ("cpu", {"cpu", "cuda"}),
        ("migraphx", {"cpu", "migraphx", "cuda"}),
        ("rocm", {"rocm", "cuda"}),
        ("cuda", {"cuda"}),
    ],
)
def test_a_fused_model_runs_where_its_ops_have_kernels(provider, others):
    """MIGraphX and ROCm would lose the masks of what was fused for others; ROCm refuses biases."""
    assert {name for name, ops in PROVIDERS.items() if ops.runs(PROVIDERS[provider])} == others
