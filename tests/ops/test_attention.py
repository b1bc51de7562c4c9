from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import op_checks
from op_checks import dtype_id, shape_id
from rocm_sd import arch, numerics
from rocm_sd.errors import Unsupported
from rocm_sd.kernels.configs.attention import AttentionConfig, pieces
from rocm_sd.ops import attention
from rocm_sd.ops.attention import op as attention_op
from rocm_sd.ops.attention import reference
from rocm_sd.ops.attention.op import OP

# B, S, T, H, D: edge, odd, and the heads of Stable Diffusion with short sequences (the interpreter is slow).
SHAPES = [
    (1, 1, 1, 1, 16),
    (1, 1, 77, 1, 40),
    (2, 33, 33, 3, 20),
    (1, 7, 31, 1, 9),
    (2, 35, 77, 2, 40),
    (1, 20, 64, 2, 64),
    (1, 33, 40, 2, 80),
    (1, 9, 50, 1, 112),
    (1, 20, 33, 1, 128),
    (1, 17, 70, 1, 160),
    (1, 10, 37, 1, 512),
]
# What the GPU is given, too: the real lengths.
REAL = [(2, 4096, 4096, 8, 40), (2, 1024, 77, 8, 80), (2, 256, 256, 8, 160), (1, 4096, 4096, 1, 512)]
HALVES = [torch.float16, torch.bfloat16]
IMPLEMENTATIONS = ["torch", "triton", "sdpa_math"]
GPU_ONLY = ["sdpa_flash", "sdpa_efficient", "sdpa_cudnn"]


def inputs(shape, dtype, device, *, seed=0):
    B, S, T, H, D = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = ((B, S, H, D), (B, T, H, D), (B, T, H, D))
    return [torch.randn(size, generator=generator).to(device, dtype) for size in sizes]


def check(q, k, v, implementation, scale=None, config=None):
    return op_checks.check(OP, (q, k, v, scale), implementation, config)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", HALVES, ids=dtype_id)
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
@pytest.mark.usefixtures("poison_memory")
def test_as_accurate_as_stock(shape, dtype, implementation, device):
    check(*inputs(shape, dtype, device), implementation)


@pytest.mark.parametrize("dtype", HALVES, ids=dtype_id)
@pytest.mark.parametrize("shape", [(1, 10, 37, 1, 512), (2, 33, 70, 2, 256), (1, 2, 17000, 1, 256)], ids=shape_id)
@pytest.mark.usefixtures("poison_memory")
def test_products_of_the_library_with_a_softmax_between(shape, dtype, device, monkeypatch):
    """Queries in turns of a few, the last one shorter, and keys of which a row does not fit one block."""
    monkeypatch.setattr(attention_op, "_SCORES", 256)
    q, k, v = inputs(shape, dtype, device)
    for scale in (None, -0.5, 0.0):
        check(q, k, v, "gemm_softmax", scale)
    packed = torch.stack([k, v], dim=2)
    check(q, packed[:, :, 0], packed[:, :, 1], "gemm_softmax")
    loud = check(q * 200, k * 200, v, "gemm_softmax")
    assert loud.isfinite().all()


def test_narrow_heads_have_no_scores_in_memory():
    q = torch.zeros(1, 4, 1, 40, dtype=torch.float16)
    with pytest.raises(Unsupported, match="scores would be written to memory for nothing"):
        attention(q, q, q, implementation="gemm_softmax")


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["triton", *GPU_ONLY])
@pytest.mark.parametrize("dtype", HALVES, ids=dtype_id)
@pytest.mark.parametrize("shape", REAL, ids=shape_id)
def test_as_accurate_as_stock_at_real_sizes(shape, dtype, implementation, device):
    B, S, T, H, D = shape
    problem = {"b": B, "s": S, "t": T, "h": H, "d": D, "dtype": dtype_id(dtype)}
    reason = OP.implementation(implementation).why_not(problem, device)
    if reason:
        pytest.skip(reason)
    q, k, v = inputs(shape, dtype, device)
    y = attention(q, k, v, implementation=implementation)
    # Some queries of each head: the float64 scores of all would take gigabytes.
    rows = slice(None, None, max(1, S // 64))
    exact = reference.attention(q[:, rows].double(), k.double(), v.double())
    numerics.require(implementation, y[:, rows], exact, attention(q, k, v, implementation="torch")[:, rows])


CONFIGS = {
    "plain": {},
    "padded": {"pieces": 1},
    "two_pieces": {"pieces": 2},
    "ahead": {"ahead": 1, "block_n": 16},
    "ahead_padded": {"ahead": 1, "pieces": 1},
    "wide": {"chunk": 32, "columns": 32},
    "wide_whole": {"chunk": 64, "columns": 256},
    "divided": {"programs_per_cu": 1000, "block_n": 16},
    "divided_ahead": {"programs_per_cu": 1000, "block_n": 16, "ahead": 1},
    "divided_wide": {"programs_per_cu": 1000, "block_n": 16, "chunk": 32, "columns": 64},
}


@pytest.mark.parametrize("change", CONFIGS.values(), ids=CONFIGS)
# Nine blocks of 16 keys and one more key: a masked tail after whole blocks; 128: no tail; 40: few blocks and a part.
@pytest.mark.parametrize("keys", [145, 128, 40])
@pytest.mark.usefixtures("poison_memory")
def test_every_way_to_cut_the_work(keys, change, device):
    q, k, v = inputs((1, 18, keys, 2, 40), torch.float16, device)
    check(q, k, v, "triton", config=op_checks.configured(OP, **change))


@pytest.mark.parametrize("head", [16, 24, 40, 48, 64, 72, 80, 96, 112, 128, 160, 176, 240, 256, 512])
def test_a_head_is_cut_into_powers_of_two_that_cover_it(head):
    for most in (1, 2, 3):
        cut = [size for size in pieces(head, most) if size]
        assert all(size >= 16 and size & (size - 1) == 0 for size in cut)
        assert cut == sorted(cut, reverse=True)
        assert len(cut) <= most
        assert sum(cut[:-1]) < head <= sum(cut)
    assert pieces(40, 3) == (32, 16, 0)
    assert pieces(80, 3) == (64, 16, 0)
    assert pieces(160, 3) == (128, 32, 0)
    assert pieces(160, 1) == (256, 0, 0)


def packed(shape, device):
    B, S, H, D = shape
    return torch.randn((B, S, 3, H, D), generator=torch.Generator().manual_seed(0)).to(device, torch.float16)


def test_packed_projections_are_read_in_place(device, monkeypatch):
    pytest.importorskip("triton")
    from rocm_sd.kernels.triton import attention as kernels

    seen = []
    original = kernels.launch
    monkeypatch.setattr(kernels, "launch", lambda *given: (seen.extend(given[:3]), original(*given)))
    q, k, v = packed((1, 8, 2, 40), device).unbind(2)
    attention(q, k, v, implementation="triton")
    assert [t.data_ptr() for t in seen] == [q.data_ptr(), k.data_ptr(), v.data_ptr()]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("scale", [0.0, 1.7, -0.4])
def test_any_scale(scale, implementation, device):
    check(*inputs((1, 9, 37, 2, 24), torch.float16, device), implementation, scale)


@pytest.mark.parametrize("shape", [(1, 17, 40, 2, 40), (1, 5, 300, 1, 512)], ids=shape_id)
def test_large_half_precision_values_stay_finite(shape, device):
    """The products of these pass the largest float16 by far; the scores are float32, of 1e11."""
    q, k, v = inputs(shape, torch.float16, device)
    q, k, v = (t.clamp(-4, 4) * 15000 for t in (q, k, v))
    y = attention(q, k, v, implementation="triton")
    assert y.isfinite().all()
    exact = reference.attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(y.double(), exact, rtol=2**-10, atol=0)


def test_one_key_far_above_the_others_and_all_the_same(device):
    q, k, v = inputs((1, 5, 70, 1, 40), torch.float16, device)
    k[:, 50] = 8 * q[:, 0]
    check(q, k, v, "triton")
    check(q, k[:, :1].expand(-1, 70, -1, -1), v, "triton")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 4, 16)}, "q of 3 dimensions"),
        ({"v": torch.zeros(2, 5, 16)}, "v of 3 dimensions"),
        ({"k": torch.zeros(2, 5, 2, 16, dtype=torch.float16)}, "q of torch.float32 with k of torch.float16"),
        ({"k": torch.zeros(2, 6, 2, 16)}, "with k of"),
        ({"q": torch.zeros(2, 4, 3, 16)}, "q of shape"),
        ({"q": torch.zeros(1, 4, 2, 16)}, "q of shape"),
        ({"k": torch.zeros(2, 0, 2, 16), "v": torch.zeros(2, 0, 2, 16)}, "no keys"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(change, message):
    arguments = {"q": torch.zeros(2, 4, 2, 16), "k": torch.zeros(2, 5, 2, 16), "v": torch.zeros(2, 5, 2, 16)} | change
    with pytest.raises(Unsupported, match=message):
        attention(**arguments)


@pytest.mark.gpu
def test_a_backend_says_which_heads_it_cannot_take(device):
    problem = {"b": 1, "s": 64, "t": 64, "h": 1, "d": 512, "dtype": "float16"}
    assert "d=512" in OP.implementation("sdpa_flash").why_not(problem, device)


def cut_from_wider(shape, dtype, device):
    """Rows of 8 bytes more than they have: every other one begins between two vectors of 16."""
    more = 8 // dtype.itemsize
    return [t[..., : shape[-1]] for t in inputs((*shape[:-1], shape[-1] + more), dtype, device)]


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["triton", *GPU_ONLY])
@pytest.mark.parametrize("shape", [(2, 40, 40, 10, 160), (4, 134, 779, 20, 48), (2, 77, 300, 8, 64)], ids=shape_id)
@pytest.mark.usefixtures("poison_memory")
def test_rows_between_two_vectors(shape, implementation, device):
    """cuDNN's own answer is wrong by the size of the result, and the efficient kernel is not found."""
    check(*cut_from_wider(shape, torch.bfloat16, device), implementation)


def test_no_fused_kernel_of_torch_is_given_rows_between_two_vectors(monkeypatch):
    given = []

    def attend(*heads, scale):
        given.extend(heads)
        return heads[0]

    monkeypatch.setattr(attention_op.F, "scaled_dot_product_attention", attend)
    wide = cut_from_wider((1, 3, 5, 2, 16), torch.float16, "cpu")
    whole = inputs((1, 3, 5, 2, 16), torch.float16, "cpu")
    for heads in (wide, whole):
        for name in GPU_ONLY:
            OP.implementation(name).run(*heads, None)
    for t in given:
        assert t.data_ptr() % 16 == 0
        assert not any(stride * t.element_size() % 16 for stride in t.stride()[:3])
    # What lies well is read where it is.
    assert [t.data_ptr() for t in given[-3:]] == [t.data_ptr() for t in whole]


def test_unfused_attention_in_float32_is_less_exact_than_a_fused_kernel(monkeypatch):
    asked = {"b": 4, "s": 103, "t": 10101, "h": 2, "d": 64, "dtype": "float32"}
    why_not = OP.implementation("sdpa_math").why_not
    monkeypatch.setattr(attention_op, "_is_fused", lambda *_sizes, **_named: True)
    assert "more than twice" in why_not(asked, HOPPER)
    assert why_not(asked | {"dtype": "float16"}, HOPPER) is None
    # Where there is no fused kernel it is what stock runs.
    monkeypatch.setattr(attention_op, "_is_fused", lambda *_sizes, **_named: False)
    assert why_not(asked, HOPPER) is None


HOPPER = torch.device("cuda", 7)
SPLIT_HEAD = AttentionConfig(128, 64, 8, 3, programs_per_cu=0)


@pytest.fixture
def launched(monkeypatch):
    """launched(ptxas, ...): how the kernel goes over its keys on an H200 whose Triton has that assembler."""
    pytest.importorskip("triton")
    from rocm_sd.kernels.triton import assembler
    from rocm_sd.kernels.triton import attention as kernels

    seen = []

    class Launch:
        def __getitem__(self, _grid):
            return lambda *_given, **named: seen.append((named["MASKED"], named["TAIL"], named["AHEAD"]))

    def launch(version, keys=4095, head=40, config=SPLIT_HEAD, on="sm_90"):
        monkeypatch.setattr(assembler, "ptxas_version", lambda: version)
        monkeypatch.setattr(assembler.arch, "detect", lambda _device: arch.get(on))
        monkeypatch.setattr(kernels, "_attend", Launch())
        monkeypatch.setattr(kernels, "_merge", Launch())
        assembler._is_affected.cache_clear()
        q, k = torch.empty(1, 128, 2, head), torch.empty(1, keys, 2, head)
        kernels.launch(q, k, k, torch.empty_like(q), 0.1, config, 132)
        return seen.pop()

    yield launch
    assembler._is_affected.cache_clear()


MASKED, TAIL, WHOLE, AHEAD = (True, False, False), (False, True, False), (False, False, False), (False, False, True)


def test_no_wgmma_follows_the_loop_where_the_assembler_gets_it_wrong(launched):
    # The version that Triton 3.6 brings, and one that cannot be asked.
    for version in ((12, 8, 93), None):
        assert launched(version) == MASKED
        assert launched(version, head=104, config=replace(SPLIT_HEAD, block_m=64, block_n=32, warps=4)) == MASKED
        assert launched(version, keys=4096, config=replace(SPLIT_HEAD, ahead=1)) == WHOLE
        assert launched(version, config=replace(SPLIT_HEAD, ahead=1)) == MASKED


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"version": (12, 9, 86)}, TAIL),
        ({"version": (13, 0, 88)}, TAIL),
        # It has no wgmma.
        ({"on": "sm_89"}, TAIL),
        ({"on": "gfx942"}, TAIL),
        ({"keys": 4096}, WHOLE),
        ({"head": 64}, TAIL),
        ({"config": replace(SPLIT_HEAD, pieces=1)}, TAIL),
        ({"config": replace(SPLIT_HEAD, pieces=1, ahead=1), "keys": 4096}, AHEAD),
        # Too few queries for a wgmma, and too few warps.
        ({"config": replace(SPLIT_HEAD, block_m=32, warps=4)}, TAIL),
        ({"config": replace(SPLIT_HEAD, warps=2)}, TAIL),
    ],
)
def test_everything_else_keeps_its_loop(change, expected, launched):
    assert launched(**{"version": (12, 8, 93), **change}) == expected


def test_the_assembler_is_asked_what_it_is(monkeypatch):
    compiler = pytest.importorskip("triton.backends.nvidia.compiler")
    from rocm_sd.kernels.triton import assembler

    said = "Cuda compilation tools, release 12.8, V12.8.93\nBuild cuda_12.8.r12.8/compiler.35583870_0"
    monkeypatch.setattr(compiler, "get_ptxas_version", lambda _arch: said)
    assert assembler.ptxas_version() == (12, 8, 93)
    monkeypatch.setattr(compiler, "get_ptxas_version", lambda _arch: "nothing of use")
    assert assembler.ptxas_version() is None
    monkeypatch.setattr(compiler, "get_ptxas_version", lambda: said)
    assert assembler.ptxas_version() is None


@pytest.mark.gpu
@pytest.mark.parametrize("head", [40, 48, 72, 80, 104])
@pytest.mark.usefixtures("poison_memory")
def test_every_tail_of_a_head_in_pieces(head, device):
    """A picture of 504x520 has 4095 keys: ptxas 12.8 was wrong there in the last piece of the head."""
    config = SPLIT_HEAD if head < 64 else replace(SPLIT_HEAD, stages=2)
    packed = inputs((1, 4096, 4096, 2, head), torch.float16, device)
    for keys in (*range(4033, 4097), 4064 - 64, 3969):
        q, k, v = packed[0][:, :128], packed[1][:, :keys], packed[2][:, :keys]
        check(q, k, v, "triton", config=config)
        if keys % 16 in (0, 15):
            check(q, k, v, "triton", config=replace(config, block_m=64, block_n=32, warps=4))


@pytest.mark.parametrize("scale", [None, 0.7, 0.0, -0.3])
@pytest.mark.parametrize("order", [1, 2])
def test_gradients_where_one_tensor_is_queries_keys_and_values(order, scale):
    x = inputs((2, 3, 3, 2, 4), torch.float64, "cpu")[0].requires_grad_()

    def gradient(function):
        (found,) = torch.autograd.grad(function(x, x, x, scale).square().sum(), x, create_graph=order == 2)
        return found if order == 1 else torch.autograd.grad(found.square().sum(), x)[0]

    torch.testing.assert_close(gradient(attention), gradient(reference.attention))
