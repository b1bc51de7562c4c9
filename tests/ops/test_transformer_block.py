"""transformer_block, beyond the contract: its stock is what the rule runs, and the rule calls it where it is chosen."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.transformers.transformer_2d import Transformer2DModel

from rocm_sd import ops
from rocm_sd.errors import Unsupported
from rocm_sd.kernels import hip
from rocm_sd.kernels.hip import toolchain
from rocm_sd.ops import OPS, registry, self_test
from rocm_sd.rewrite import apply
from rocm_sd.tuning.database import Entry
from rocm_sd.tuning.environment import current
from rocm_sd.tuning.resolve import user_database
from rocm_sd.tuning.search.candidates import candidates
from rocm_sd.tuning.search.tuner import Tuner, TunerOptions
from rocm_sd.tuning.search.watching import Watched, watched
from transformer_blocks import RULES, draw

CPU = torch.device("cpu")
OP = OPS["transformer_block"]
WIDTH, HEADS, TEXT = 64, 1, 48
STEPS = [
    "layer_norm_residual", "linear_residual", "attention", "linear_residual",
    "layer_norm_residual", "linear_residual", "attention", "linear_residual",
    "layer_norm_residual", "linear_geglu", "linear_residual",
]  # fmt: skip


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path / "cache"))
    registry.forget_choices()
    yield
    registry.forget_choices()
    self_test.forget()


def block(dtype=torch.float16, **options):
    torch.manual_seed(0)
    module = BasicTransformerBlock(WIDTH, HEADS, WIDTH, **{"cross_attention_dim": TEXT} | options).eval().to(dtype)
    apply(module, RULES)
    return module


def given(dtype=torch.float16, batch=1):
    return draw(batch, 9, WIDTH, dtype=dtype), draw(batch, 5, TEXT, seed=2, dtype=dtype)


class Launches:
    """A `Launcher` that runs nothing."""

    def __init__(self):
        self.arch, self.names = registry.arch.get("gfx1100"), []

    def launch(self, kernel, _grid, _arguments):
        self.names.append(kernel.name)


def measured(x, text, median):
    """A database in which the kernels in HIP took `median` us for this call, and stock torch 20."""
    problem = {"b": len(x), "s": x.shape[1], "t": text.shape[1], "c": WIDTH, "h": HEADS, "f": 4 * WIDTH}
    config = OP.implementation("hip").default.to_dict()
    user_database().put(
        [
            Entry(
                OP.name, {**problem, "dtype": "float16"}, current("cpu"), OP.kernel_hash("hip"), "hip", config,
                median, median, median, 20.0, "ok", "2026-05-04T03:02:01+00:00",
            )
        ]
    )  # fmt: skip
    registry.forget_choices()


@pytest.fixture
def called(monkeypatch):
    """The names of the ops, in the order of their calls."""
    names, run = [], registry.Op.run

    def noted(op, *arguments):
        names.append(op.name)
        return run(op, *arguments)

    monkeypatch.setattr(registry.Op, "run", noted)
    # Every call is to be run, and none to be found as one of before.
    monkeypatch.setattr(registry.Op, "bound", lambda *_: None)
    monkeypatch.setattr(registry.Op, "bind", lambda *_: None)
    return names


@torch.no_grad()
def test_stock_is_what_the_rule_runs_step_by_step_and_bit_by_bit(called):
    module, (x, text) = block(torch.float32), given(torch.float32)
    attn, attn2, (gate, _, ff) = module.attn1, module.attn2, module.ff.net
    by_rule = module(x, encoder_hidden_states=text)
    # The text's keys and values come between the queries and their attention.
    assert called == [*STEPS[:6], "linear_residual", *STEPS[6:]]
    called.clear()
    weight = torch.cat([attn.to_q.weight, attn.to_k.weight, attn.to_v.weight])
    keys, values = (layer(text).unflatten(2, (HEADS, -1)) for layer in (attn2.to_k, attn2.to_v))
    (out, _), (out2, _) = attn.to_out, attn2.to_out
    parts = [
        module.norm1.weight, module.norm1.bias, weight, out.weight, out.bias,
        module.norm2.weight, module.norm2.bias, attn2.to_q.weight, out2.weight, out2.bias,
        module.norm3.weight, module.norm3.bias, gate.proj.weight, gate.proj.bias, ff.weight, ff.bias,
    ]  # fmt: skip
    y = ops.transformer_block(x, keys, values, *parts, module.norm1.eps)
    assert called == [OP.name, *STEPS]
    assert torch.equal(y, by_rule)


@torch.no_grad()
@pytest.mark.parametrize("faster", [True, False])
def test_a_measurement_decides_whether_the_rule_takes_the_kernels_in_hip(called, faster):
    module, (x, text) = block(), given()
    measured(x, text, 5.0 if faster else 30.0)
    launches = Launches()
    with hip.launched_by(launches):
        module(x, encoder_hidden_states=text)
    assert (OP.name in called) is faster
    assert ("attend" in launches.names) is faster
    assert launches.names.count("linear_moments") == 3 * faster
    assert called.count("attention") == 2 * (not faster)


@torch.no_grad()
def test_of_a_chain_every_block_is_one_op_and_what_is_pending_is_added_first(called, monkeypatch):
    torch.manual_seed(0)
    options = {"in_channels": WIDTH, "norm_num_groups": 8, "cross_attention_dim": TEXT, "num_layers": 3}
    module = Transformer2DModel(HEADS, WIDTH, **options).eval().half()
    apply(module, RULES)
    picture, text = draw(1, WIDTH, 3, 3, dtype=torch.float16), draw(1, 5, TEXT, seed=2, dtype=torch.float16)
    expected = module(picture, encoder_hidden_states=text).sample
    called.clear()
    measured(picture.flatten(2).mT, text, 5.0)
    # As stock computes it, the middle one step by step: what it leaves to add is in the sum that the third reads.
    stock = OP.own["torch"].run

    def computed(*arguments, config):
        assert config == OP.own["hip"].default
        return stock(*arguments)

    monkeypatch.setitem(OP.own["hip"].__dict__, "run", computed)
    module.transformer_blocks[1].ff.register_forward_hook(lambda *_: None)
    with hip.launched_by(Launches()):
        y = module(picture, encoder_hidden_states=text).sample
    assert called.count(OP.name) == 2
    torch.testing.assert_close(y, expected, atol=4e-3, rtol=4e-3)


def unchanged(module):
    return module


def with_a_hook(module):
    module.attn2.to_q.register_forward_hook(lambda *_: None)
    return module


def with_another_scale(module):
    from diffusers.models.attention_processor import AttnProcessor

    module.attn1.set_processor(AttnProcessor())
    module.attn1.scale *= 2
    return module


def in_training(module):
    module.ff.net[1].p = 0.5
    return module.train()


@pytest.mark.parametrize(
    ("change", "options", "grad"),
    [
        (unchanged, {}, True),
        (with_a_hook, {}, False),
        (with_another_scale, {}, False),
        (in_training, {}, False),
        (unchanged, {"attention_bias": True}, False),
        (unchanged, {"norm_eps": 1e-4, "cross_attention_dim": None}, False),
    ],
    ids=["gradients", "hook", "scale", "dropout", "biases", "no_text"],
)
def test_what_the_op_does_not_compute_is_left_to_the_steps(called, change, options, grad):
    module, (x, text) = change(block(**options)), given()
    measured(x, text, 5.0)
    with hip.launched_by(Launches()), torch.set_grad_enabled(grad):
        module(x, encoder_hidden_states=text)
    assert OP.name not in called


@torch.no_grad()
def test_a_search_sees_the_block_and_every_step_of_it_and_tries_what_folds_which_norm(monkeypatch):
    module, (x, text) = block(), given()
    gfx1100 = registry.arch.get("gfx1100")
    monkeypatch.setattr(registry.arch, "detect", lambda _device: gfx1100)
    seen = Watched()
    with hip.launched_by(Launches()), watched(seen, answer_stock=False):
        module(x, encoder_hidden_states=text)
        (call,) = (each.call for each in seen.traced() if each.call.op == OP.name)
        problem = dict(call.problem)
        found = [each for each in candidates(OP, problem, CPU) if each.implementation == "hip"]
    # And what an implementation of one of the steps would call.
    assert {each.call.op for each in seen.traced()} == {OP.name, *STEPS, "geglu"}
    assert [each.config for each in found] == list(OP.implementation("hip").kernels.space(problem, gfx1100))
    assert len(found) >= 2
    # Matrices are drawn as weights: of ones as large as the tokens a block's values would pass those of float16.
    assert all(spec.std == spec.shape[1] ** -0.5 for spec in call.arguments[3:-1] if len(spec.shape) == 2)
    with watched(only_steps := Watched(), answer_stock=True):
        module(x, encoder_hidden_states=text)
    assert {each.call.op for each in only_steps.traced()} == {*STEPS, "geglu"}


def test_the_space_has_what_the_model_folds_all_norms_and_none():
    hip_kernels = OP.implementation("hip").kernels
    for gfx in toolchain.TARGETS:
        for sample in OP.tuning.timed:
            problem = OP.verification.problem(*sample.make(filled=False))
            configs = list(hip_kernels.space(problem, registry.arch.get(gfx)))
            assert configs[0] == OP.implementation("hip").default
            assert 2 <= len(configs) <= 3


def test_what_is_composed_is_searched_after_its_steps(tmp_path):
    from rocm_sd.tuning.database import Database
    from rocm_sd.tuning.search.calls import Traced, describe

    calls = [describe(op.name, op.verification.problem(*(s := op.verification.small[0].make())), s) for op in
             (OP, OPS["layer_norm_residual"])]  # fmt: skip
    tuner = Tuner(CPU, Database(tmp_path / "t.sqlite3"), TunerOptions(budget_s=60.0))
    order = [search.op.name for search in tuner._searches([Traced(call, 1) for call in calls])]
    assert order == ["layer_norm_residual", OP.name]


def test_shapes_that_do_not_fit_are_refused_by_name():
    arguments = list(OP.verification.tiny[0].make())
    for place, argument in enumerate(OP.signature.arguments[:-1]):
        wrong = [*arguments]
        wrong[place] = arguments[place][..., :1]
        with pytest.raises(Unsupported, match=f"{'keys' if argument.name == 'x' else argument.name} of shape"):
            ops.transformer_block(*wrong)


def test_hip_takes_heads_and_hidden_values_that_it_has_kernels_for():
    with hip.launched_by(Launches()):
        why_not = OP.implementation("hip").why_not
        fitting = {"b": 1, "s": 9, "t": 5, "c": 64, "h": 1, "f": 256, "dtype": "float16"}
        assert why_not(fitting, CPU) is None
        assert "heads of 32: there are kernels for 40" in why_not({**fitting, "h": 2}, CPU)
        assert "36 hidden values" in why_not({**fitting, "f": 36}, CPU)
        assert why_not({**fitting, "dtype": "float32"}, CPU) == "dtype float32"
