"""Attention by AOTriton and by Composable Kernel, the libraries of a ROCm build of torch: the switch is observed."""

from __future__ import annotations

import pytest
import torch
from test_attention import HALVES, check, dtype_id, inputs

from rocm_sd.errors import Unsupported
from rocm_sd.ops import attention
from rocm_sd.ops.attention import libraries
from rocm_sd.ops.attention import op as attention_op
from rocm_sd.ops.attention.op import OP

AOTRITON, CK = libraries.LIBRARIES
GPU = torch.device("cuda")


@pytest.fixture
def rocm(monkeypatch):
    """A ROCm build of torch on a card: as far as the switch goes, every build has it."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.backends.cuda, "is_ck_sdpa_available", lambda: True)
    before = torch.backends.cuda.preferred_rocm_fa_library()
    libraries._refusal.cache_clear()
    attention_op._library_takes.cache_clear()
    yield
    libraries._refusal.cache_clear()
    attention_op._library_takes.cache_clear()
    assert torch.backends.cuda.preferred_rocm_fa_library() == before


@pytest.mark.parametrize("library", libraries.LIBRARIES, ids=lambda each: each.name)
def test_a_library_of_attention_is_named_where_it_is_not_to_be_had(library, rocm, monkeypatch):
    assert libraries.why_not(library, GPU) is None
    assert libraries.why_not(library, torch.device("cpu")) == f"a tensor on cpu: {library.title} runs on a GPU"
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", None)
    q = torch.zeros(1, 4, 2, 64, dtype=torch.float16)
    with pytest.raises(Unsupported, match=f"{library.title}, a library of ROCm, in a CPU build of torch"):
        attention(q, q, q, implementation=library.name)


def test_a_build_without_composable_kernel_and_a_card_without_it_say_so(rocm, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_ck_sdpa_available", lambda: False)
    assert libraries.why_not(CK, GPU) == "Composable Kernel: this torch was built without its attention"
    assert libraries.why_not(AOTRITON, GPU) is None
    libraries._refusal.cache_clear()
    monkeypatch.setattr(torch.backends.cuda, "is_ck_sdpa_available", lambda: True)
    switch = torch.backends.cuda.preferred_rocm_fa_library
    # As torch does on a card that Composable Kernel has no code for: it warns, and stays with the other.
    monkeypatch.setattr(
        torch.backends.cuda, "preferred_rocm_fa_library", lambda to=None: switch("aotriton" if to == "ck" else to)
    )
    assert libraries.why_not(CK, GPU) == "Composable Kernel on this card: torch takes aotriton instead"
    libraries._refusal.cache_clear()
    monkeypatch.delattr(torch.backends.cuda, "preferred_rocm_fa_library")
    assert "has no switch between libraries" in libraries.why_not(AOTRITON, GPU)
    monkeypatch.undo()


@pytest.mark.parametrize("library", libraries.LIBRARIES, ids=lambda each: each.name)
def test_a_call_is_made_with_its_library_and_flash_alone_and_both_are_put_back(library, rocm, monkeypatch):
    q, k, v = (torch.randn(1, 6, 2, 64).half() for _ in range(3))
    real, seen = torch.nn.functional.scaled_dot_product_attention, []

    def observed(*given, **named):
        cuda = torch.backends.cuda
        enabled = (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled())
        seen.append((cuda.preferred_rocm_fa_library().name.lower(), enabled))
        with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
            return real(*given, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", observed)
    before = torch.backends.cuda.preferred_rocm_fa_library()
    y = OP.implementation(library.name)(q, k, v, None)
    assert seen == [(library.switch, (True, False, False))]
    assert torch.backends.cuda.preferred_rocm_fa_library() == before
    assert torch.backends.cuda.math_sdp_enabled()
    torch.testing.assert_close(y, OP.implementation("torch")(q, k, v, None))

    def failing(*_given, **_named):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", failing)
    with pytest.raises(RuntimeError, match="no kernel"):
        OP.implementation(library.name)(q, k, v, None)
    assert torch.backends.cuda.preferred_rocm_fa_library() == before


@pytest.mark.parametrize("library", libraries.LIBRARIES, ids=lambda each: each.name)
def test_torch_is_asked_with_the_library_that_would_be_used(library, rocm, monkeypatch):
    asked = []

    def can_use(_parameters, _debug):
        asked.append(torch.backends.cuda.preferred_rocm_fa_library().name.lower())
        return library is AOTRITON

    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", can_use)
    monkeypatch.setattr(torch.backends.cuda, "SDPAParams", lambda *given: given)
    monkeypatch.setattr(libraries, "why_not", lambda *_: None)
    problem = {"b": 1, "s": 6, "t": 6, "h": 2, "d": 64, "dtype": "float16"}
    why_not = OP.implementation(library.name).why_not
    reasons = [why_not(problem, torch.device("cpu")) for _ in range(2)]
    assert asked == [library.switch], "torch is asked once for each problem"
    expected = None if library is AOTRITON else "Composable Kernel has no kernel for it on this GPU"
    assert all(reason is expected or expected in reason for reason in reasons)


@pytest.mark.gpu
@pytest.mark.parametrize("library", libraries.LIBRARIES, ids=lambda each: each.name)
@pytest.mark.parametrize("dtype", HALVES, ids=dtype_id)
def test_a_library_of_attention_is_as_accurate_as_stock_also_in_a_graph(library, dtype, device):
    q, k, v = inputs((2, 256, 256, 4, 64), dtype, device)
    reason = OP.implementation(library.name).why_not(OP.verification.problem(q, k), device)
    if reason:
        pytest.skip(reason)
    expected = check(q, k, v, library.name)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = attention(q, k, v, implementation=library.name)
    y.zero_()
    graph.replay()
    torch.testing.assert_close(y, expected)
