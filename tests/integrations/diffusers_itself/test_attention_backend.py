"""The backend "rocm_sd" in Diffusers' own dispatcher: the same answers, and what it does not take goes to native."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend, dispatch_attention_fn

from model_inputs import flux_inputs
from rocm_sd import numerics
from rocm_sd.errors import Unsupported
from rocm_sd.integrations.diffusers import attention_backend as ours
from tiny_models import flux_transformer

REGISTRY = attention_dispatch._AttentionBackendRegistry


@pytest.fixture(autouse=True)
def registered():
    """Diffusers makes a model's backend the default of all others, too."""
    before = REGISTRY._active_backend
    ours.register()
    yield
    REGISTRY.set_active_backend(before)


@pytest.fixture
def asked(monkeypatch):
    """How often the op was asked."""
    calls = []
    op = ours.attention
    monkeypatch.setattr(ours, "attention", lambda *given: (calls.append(given), op(*given))[1])
    return calls


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def heads(tokens=16, keys=12, count=4, of_keys=4, dtype=torch.float32):
    q, k, v = (drawn(2, *shape, 8, seed=seed) for seed, shape in enumerate([(tokens, count), *[(keys, of_keys)] * 2]))
    return q.to(dtype), k.to(dtype), v.to(dtype)


def by(backend, *given, **options):
    return dispatch_attention_fn(*given, backend=AttentionBackendName(backend), **options)


def test_a_second_time_changes_nothing():
    functions, names = dict(REGISTRY._backends), list(AttentionBackendName)
    ours.register()
    assert functions == REGISTRY._backends
    assert names == list(AttentionBackendName)


def test_the_name_is_a_member_like_the_others():
    member = AttentionBackendName("rocm_sd")
    assert AttentionBackendName["ROCM_SD"] is member
    assert list(AttentionBackendName).count(member) == 1
    assert (member.name, member.value, isinstance(member, AttentionBackendName)) == ("ROCM_SD", "rocm_sd", True)
    assert copy.deepcopy(member) is member
    assert pickle.loads(pickle.dumps(member)) is member
    assert AttentionBackendName("native") is AttentionBackendName.NATIVE
    with pytest.raises(ValueError, match="not a valid"):
        AttentionBackendName("rocm")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [None, 0.25])
def test_plain_attention_is_the_ops_and_has_natives_bits(asked, dtype, scale):
    q, k, v = heads(dtype=dtype)
    assert torch.equal(by("rocm_sd", q, k, v, scale=scale), by("native", q, k, v, scale=scale))
    assert len(asked) == 1


def test_with_a_kernel_it_is_as_exact_as_native(monkeypatch, asked):
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", "attention=triton")
    q, k, v = heads(dtype=torch.float16)
    exact = by("native", *(t.double() for t in (q, k, v)))
    compared = numerics.compare(by("rocm_sd", q, k, v), exact, by("native", q, k, v))
    assert compared.rms <= 2 * compared.stock_rms + compared.floor, str(compared)
    assert len(asked) == 1


MASKS = {
    "of keys": lambda: torch.arange(12).expand(2, 12) < torch.tensor([[5], [12]]),
    "of pairs": lambda: drawn(16, 12) > 0,
    "added": lambda: drawn(2, 1, 16, 12),
}
NATIVE = {
    **{f"mask {name}": lambda make=make: (heads(), {"attn_mask": make()}) for name, make in MASKS.items()},
    "causal": lambda: (heads(keys=16), {"is_causal": True}),
    "fewer heads of keys": lambda: (heads(of_keys=2), {"enable_gqa": True}),
    "wider values": lambda: ((*heads()[:2], drawn(2, 12, 4, 16)), {}),
    "gradients": lambda: (tuple(t.requires_grad_() for t in heads()), {}),
}


@pytest.mark.parametrize("case", NATIVE)
def test_what_the_op_does_not_take_is_natives(asked, case):
    given, options = NATIVE[case]()
    out = by("rocm_sd", *given, **options)
    assert torch.equal(out, by("native", *given, **options))
    assert out.requires_grad == (case == "gradients")
    assert not asked


def test_heads_that_may_be_fewer_and_are_not_are_the_ops(asked):
    q, k, v = heads()
    assert torch.equal(by("rocm_sd", q, k, v, enable_gqa=True), by("native", q, k, v))
    assert asked


def test_autocast_decides_about_the_dtype(asked):
    q, k, v = heads()
    with torch.autocast("cpu", torch.bfloat16):
        out, native = by("rocm_sd", q, k, v), by("native", q, k, v)
    assert out.dtype == native.dtype == torch.bfloat16
    assert torch.equal(out, native)
    assert not asked


def test_dropout_is_natives_with_its_own_numbers(asked):
    given = heads()
    pictures = []
    for backend in ("rocm_sd", "native"):
        torch.manual_seed(0)
        pictures.append(by(backend, *given, dropout_p=0.5))
    assert torch.equal(*pictures)
    assert not asked


ERRORS = {
    "logarithms of sums": (heads, {"attention_kwargs": {"return_lse": True}}),
    "other heads": (lambda: heads(of_keys=3), {}),
    "other dtypes": (lambda: (heads()[0].double(), *heads()[1:]), {}),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_native_refuses_is_refused_in_its_words(case):
    make, options = ERRORS[case]
    refusals = []
    for backend in ("native", "rocm_sd"):
        with pytest.raises((ValueError, RuntimeError)) as refusal:
            by(backend, *make(), **options)
        refusals.append((refusal.type, str(refusal.value)))
    assert refusals[0] == refusals[1]


def test_gradients_are_natives():
    found = []
    for backend in ("rocm_sd", "native"):
        given = [t.requires_grad_() for t in heads()]
        by(backend, *given).square().sum().backward()
        found.append([t.grad for t in given])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_the_reason_is_reported_once(caplog):
    ours._note.cache_clear()
    with caplog.at_level(logging.INFO, logger="rocm_sd"):
        for _ in range(2):
            by("rocm_sd", *heads(keys=16), is_causal=True)
    assert [record.message for record in caplog.records] == [
        "The attention backend rocm_sd: attention falls back to stock torch (a mask)."
    ]


def test_it_compiles_as_one_graph():
    q, k, v = heads()
    compiled = torch.compile(lambda *given: by("rocm_sd", *given), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), by("native", q, k, v))


@torch.no_grad()
@pytest.mark.parametrize("how", ["set", "within"])
def test_a_transformer_uses_it(asked, how):
    torch.manual_seed(0)
    model = flux_transformer(guidance_embeds=True).double()
    wanted = model(**flux_inputs()).sample
    if how == "set":
        model.set_attention_backend("rocm_sd")
        found = model(**flux_inputs()).sample
    else:
        with attention_backend("rocm_sd"):
            found = model(**flux_inputs()).sample
    # One attention in each of the two blocks.
    assert len(asked) == 2
    assert torch.equal(found, wanted)
    model.set_attention_backend("native")
    assert torch.equal(model(**flux_inputs()).sample, wanted)
    assert len(asked) == 2


def test_checks_that_diffusers_can_be_asked_to_make_are_made(monkeypatch):
    monkeypatch.setattr(REGISTRY, "_checks_enabled", True)
    q, k, v = heads()
    by("rocm_sd", q, k, v)
    with pytest.raises(ValueError, match="same dtype"):
        by("rocm_sd", q.double(), k, v)


@pytest.mark.parametrize("gone", ["_backends", "_supported_arg_names"])
def test_a_diffusers_that_has_changed_is_reported_and_left_as_it_is(monkeypatch, gone):
    class Changed:
        """Without one of the things that are read."""

    for name in (*ours._OF_REGISTRY,):
        if name != gone:
            setattr(Changed, name, getattr(REGISTRY, name))
    names = list(AttentionBackendName)
    monkeypatch.setattr(attention_dispatch, "_AttentionBackendRegistry", Changed)
    with pytest.raises(Unsupported, match=f"has no {gone}") as refusal:
        ours.register()
    assert "rocm_sd.optimize(pipe)" in refusal.value.hint
    assert names == list(AttentionBackendName)


def test_an_older_native_attention_is_reported(monkeypatch):
    short = {AttentionBackendName.NATIVE: {"query", "key", "value"}}
    monkeypatch.setattr(REGISTRY, "_supported_arg_names", short)
    with pytest.raises(Unsupported, match="native attention takes no _parallel_config, attn_mask"):
        ours.register()


def test_without_a_dispatcher_it_is_reported(monkeypatch):
    monkeypatch.setattr(ours, "_DISPATCH", "diffusers.models.no_such_module")
    with pytest.raises(Unsupported, match="no attention dispatcher"):
        ours.register()
