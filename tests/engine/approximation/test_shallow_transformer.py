"""The parts of a transformer have the bits of its own forward together, and a shallow pass is what it says."""

from __future__ import annotations

import pytest
import torch

import rocm_sd
from joint_models import MODELS, given, is_flux, model
from pipelines import small_blocks_too
from rocm_sd.engine.approximation import shallow_transformer as parts
from rocm_sd.engine.approximation.branches import by_name

each = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(params=[False, True], ids=["stock", "rewritten"])
def build(request, monkeypatch):
    """A model, as it is or with its blocks rewritten."""

    def built(name, **options):
        found = model(name, **options)
        if request.param:
            small_blocks_too(monkeypatch, "0")
            rocm_sd.optimize(found)
        return found

    return built


def named(transformer, arguments):
    return by_name(transformer, (), arguments)


def controls(name, count, single=None):
    """What a ControlNet would add, `count` times, to tokens of the pictures that `given` has."""
    torch.manual_seed(5)
    if not is_flux(name):
        return {"block_controlnet_hidden_states": [torch.randn(2, 24, 32) for _ in range(count)]}
    found = {"controlnet_block_samples": [torch.randn(2, 24, 32) for _ in range(count)]}
    return found | {"controlnet_single_block_samples": single and [torch.randn(2, 24, 32) for _ in range(single)]}


@torch.no_grad()
def check_bits(transformer, arguments):
    expected = transformer(**arguments)[0]
    bound = named(transformer, arguments)
    for depth in range(1, len(parts._blocks(transformer))):
        assert parts.why_not(transformer, depth) is None
        answer, features = parts.run(transformer, depth, None, bound)
        assert torch.equal(answer, expected)
        state, added = parts.head(transformer, depth, bound)
        after = named(transformer, parts.after_head(transformer, bound))
        answer, again = parts.rest(transformer, depth, state, after)
        assert torch.equal(answer, expected)
        assert torch.equal(again, features)
        # The sum is rounded once more than the blocks round it.
        (answer,) = parts.tail(transformer, state, features, after)
        assert torch.equal(parts.run(transformer, depth, features, bound)[0], answer)
        torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-5)
        assert added.shape == features.shape == state[0].shape
        assert added.abs().max() > 0


@each
def test_the_parts_have_the_forwards_bits(build, name):
    transformer = build(name)
    check_bits(transformer, given(name))
    check_bits(transformer, given(name, batch=1))


@pytest.mark.parametrize(
    ("name", "count", "single", "more"),
    [
        ("SD3", 3, None, {}),
        ("SD3.5", 2, None, {}),
        ("SD3", 1, None, {}),
        ("Flux dev", 3, 3, {}),
        ("Flux dev", 2, 2, {}),
        ("Flux dev", 1, None, {}),
        ("Flux schnell", 2, None, {"controlnet_blocks_repeat": True}),
    ],
)
def test_a_controlnet_says_its_part_where_stock_hears_it(build, name, count, single, more):
    transformer, arguments = build(name), given(name)
    with torch.no_grad():
        alone = transformer(**arguments)[0]
    arguments |= controls(name, count, single) | more
    with torch.no_grad():
        assert not torch.equal(transformer(**arguments)[0], alone)
    check_bits(transformer, arguments)
    bound = named(transformer, arguments)
    assert parts.why_not_call(transformer, bound) is None
    assert any(parts.controlled(transformer, bound))
    assert not any(parts.controlled(transformer, named(transformer, given(name))))


@each
def test_only_the_first_blocks_are_computed(name):
    """Later blocks of NaN are not noticed, and the first one is."""
    transformer = model(name)
    bound = named(transformer, given(name))
    with torch.no_grad():
        _, features = parts.run(transformer, 1, None, bound)
        later = parts._blocks(transformer)[1:]
        for parameter in (parameter for block in later for parameter in block.parameters()):
            parameter.fill_(float("nan"))
        assert parts.run(transformer, 1, features, bound)[0].isfinite().all()
        assert parts.run(transformer, 1, None, bound)[0].isnan().any()
        next(iter(transformer.transformer_blocks[0].ff.parameters())).fill_(float("nan"))
        assert parts.run(transformer, 1, features, bound)[0].isnan().any()


@each
def test_which_modules_each_part_runs(name):
    """Each that is named is called, and no other has parameters that are read."""
    transformer = model(name)
    bound = named(transformer, given(name))
    called = []
    for module in transformer.modules():
        module.register_forward_pre_hook(lambda module, _: called.append(module))

    def runs(what, part, *arguments):
        called.clear()
        with torch.no_grad():
            answer = part(transformer, *arguments)
        reached = {module for module in called if any(True for _ in module.parameters(recurse=False))}
        told = parts.used(transformer, what)
        assert {*told} <= {*called}
        assert reached <= {inside for module in told for inside in module.modules()}
        return answer

    after = parts.after_head(transformer, bound)
    for depth in range(1, len(parts._blocks(transformer))):
        state, _ = runs(("head", depth), parts.head, depth, bound)
        _, features = runs(("rest", depth, state), parts.rest, depth, state, after)
        runs(("tail", state, features), parts.tail, state, features, after)
        runs((depth, features), parts.run, depth, features, bound)


def test_in_float16_nothing_of_flux_overflows():
    """Its blocks clip at the largest value; the difference of two such would be infinite."""
    flux = model("Flux dev")
    wide = torch.full((1, 2, 3), 65504.0, dtype=torch.float16)
    assert parts._clipped(flux, wide - -wide).isfinite().all()
    assert (wide - -wide).isinf().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_how_much_changed(dtype):
    before = torch.tensor([1.0, -2.0, 3.0, -4.0], dtype=dtype)
    assert parts.changed_by(before, before) == 0
    assert parts.changed_by(before * 1.5, before) == 0.5
    assert parts.changed_by(-before, before) == 2
    nothing = torch.zeros(4, dtype=dtype)
    # Neither is less than any threshold.
    assert not parts.changed_by(nothing, nothing) < 1e30
    assert not parts.changed_by(before, nothing) < 1e30
    # Many large values of float16 have a sum that it cannot hold.
    many = torch.full((1000, 1000), 1000.0).to(dtype)
    assert parts.changed_by(many * 2, many) == 1


def test_what_has_no_parts_says_why():
    sd3, flux = model("SD3"), model("Flux dev")
    assert "3 blocks" in parts.why_not(sd3, 3)
    assert parts.why_not(sd3, 2) is None
    assert "6 blocks" in parts.why_not(flux, 6)
    sd3.enable_gradient_checkpointing()
    assert "gradient checkpointing" in parts.why_not(sd3, 1)
    sd3.disable_gradient_checkpointing()
    hook = sd3.transformer_blocks[1].register_forward_hook(lambda *_: None)
    assert "hook" in parts.why_not_inside(sd3)
    hook.remove()
    assert parts.why_not_inside(sd3) is None
    kind = type(sd3.transformer_blocks[1])
    sd3.transformer_blocks[1].__class__ = type("Own", (kind,), {"__module__": kind.__module__})
    assert "Own" in parts.why_not(sd3, 1)
    sd3.transformer_blocks[1].__class__ = type(kind.__name__, (kind,), {"__module__": "elsewhere"})
    assert "elsewhere" in parts.why_not(sd3, 1)


def test_layers_offloaded_in_groups(tmp_path):
    """Prefetched, each group is brought in by the one before it in a whole pass."""
    sd3 = model("SD3")
    sd3.enable_group_offload(
        onload_device=torch.device("cpu"), offload_type="block_level", num_blocks_per_group=1,
        offload_to_disk_path=str(tmp_path),
    )  # fmt: skip
    assert "groups" in parts.why_not_inside(sd3)


@pytest.mark.parametrize(
    ("name", "more", "why"),
    [
        ("SD3", {"skip_layers": [1]}, "skip_layers"),
        ("SD3", {"joint_attention_kwargs": {"ip_adapter_image_embeds": 1}}, "ip_adapter_image_embeds"),
        ("Flux dev", {"joint_attention_kwargs": {"ip_hidden_states": 1}}, "ip_hidden_states"),
        ("Flux dev", {"joint_attention_kwargs": {"scale": 0.5}}, "scale"),
        ("Flux dev", {"joint_attention_kwargs": {"scale": 1.0}}, None),
        ("Flux dev", {"joint_attention_kwargs": {}}, None),
        ("SD3", {"pooled_projections": None}, "pooled_projections"),
        ("Flux dev", {"img_ids": None}, "img_ids"),
        ("Flux dev", {"txt_ids": torch.zeros(1, 5, 3)}, "positions"),
        ("SD3", {}, None),
    ],
    ids=str,
)
def test_calls_that_are_not_known(name, more, why):
    transformer = model(name)
    found = parts.why_not_call(transformer, named(transformer, given(name) | more))
    assert (found is None) if why is None else (why in found)


def test_an_argument_of_a_later_diffusers_is_not_known():
    transformer = model("SD3")
    bound = named(transformer, given("SD3"))
    assert parts.why_not_call(transformer, bound | {"more": None}) is None
    assert "more" in parts.why_not_call(transformer, bound | {"more": 1})
