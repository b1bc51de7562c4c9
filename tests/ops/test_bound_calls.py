"""A call that was bound serves calls laid out alike, and nothing else: none after anything that may change it."""

from __future__ import annotations

import threading

import pytest
import torch

from rocm_sd import settings
from rocm_sd.errors import Unsupported
from rocm_sd.kernels.config import NO_CONFIG
from rocm_sd.kernels.hip.launch import HipRefused, HipUnavailable
from rocm_sd.ops import OPS, bound_calls, conv2d, geglu, layer_norm_residual, registry, upsample
from rocm_sd.ops.bound_calls import BoundCalls, key_of
from rocm_sd.ops.definition import Implementation
from rocm_sd.ops.registry import Op, forget_choices, observed
from rocm_sd.tuning.choice import STOCK, Choice

CPU = torch.device("cpu")
PROBLEM = {"size": 4, "dtype": "float32"}


@pytest.fixture(autouse=True)
def nothing_kept():
    forget_choices()
    yield
    forget_choices()


@pytest.fixture
def chosen(monkeypatch):
    """The ops that were run, with all questions asked, in order."""
    names, run = [], Op.run

    def noted(op, *given):
        names.append(op.name)
        return run(op, *given)

    monkeypatch.setattr(Op, "run", noted)
    return names


def given(rows=3, dtype=torch.float32):
    return torch.randn(rows, 8, dtype=dtype), torch.randn(8, dtype=dtype)


@torch.no_grad()
def test_calls_laid_out_alike_are_chosen_for_once(chosen):
    results = []
    for _ in range(3):
        x, bias = given()
        results.append((geglu(x, bias), geglu(x, bias, implementation=STOCK)))
    # Once by itself, once by name.
    assert chosen == ["geglu", "geglu"]
    assert all(torch.equal(ours, named) for ours, named in results)


def sliced():
    return torch.randn(3, 16)[:, ::2]


@torch.no_grad()
@pytest.mark.parametrize(
    "other",
    [
        lambda x, bias: (x[:2], bias),
        lambda x, bias: (x.double(), bias.double()),
        lambda x, bias: (x, bias.double()),
        lambda x, _: (x, None),
        lambda _, bias: (sliced(), bias),
        lambda x, bias: (x.view(1, 3, 8), bias),
        lambda x, bias: (x.to("meta"), bias.to("meta")),
    ],
    ids=["shape", "dtype", "dtype of a part", "no part", "strides", "dimensions", "device"],
)
def test_calls_laid_out_otherwise_are_chosen_for_anew(chosen, other):
    x, bias = given()
    geglu(x, bias)
    assert OPS["geglu"].bound(None, x, bias) is not None
    assert OPS["geglu"].bound(None, *other(x, bias)) is None
    geglu(*other(x, bias))
    assert len(chosen) == 2


@torch.no_grad()
def test_a_change_of_what_may_be_chosen_is_seen_by_the_next_call(monkeypatch):
    x, bias = given()
    geglu(x, bias)
    op, alike = OPS["geglu"], (None, x, bias)
    kept = op.bound(*alike)
    assert kept is not None
    with monkeypatch.context() as changed:
        changed.setenv("ROCM_SD_IMPLEMENTATION", "geglu=elsewhere")
        assert op.bound(*alike) is None
        with pytest.raises(Exception, match="elsewhere"):
            geglu(x, bias)
    assert op.bound(*alike) is kept
    with settings.stock_implementations(frozenset({"geglu"})):
        assert op.bound(*alike) is None
        geglu(x, bias)
        assert op.bound(*alike) is not None
    assert op.bound(*alike) is kept
    forget_choices()
    assert op.bound(*alike) is None


class Watcher:
    def __init__(self):
        self.heard = []

    def called(self, op, _problem, _arguments):
        self.heard.append(op.name)

    def chosen(self, _op, _problem, _device):
        return Choice(STOCK)


@torch.no_grad()
def test_an_observer_hears_of_calls_that_were_bound_before():
    x, bias = given()
    geglu(x, bias)
    watcher = Watcher()
    with observed(watcher):
        geglu(x, bias)
        # Nor is a call kept that stock torch answers meanwhile.
        geglu(*given(5))
    assert watcher.heard == ["geglu", "geglu"]
    assert OPS["geglu"].bound(None, *given(5)) is None


def test_gradients_and_tensors_of_other_classes_are_never_bound():
    class Own(torch.Tensor):
        pass

    x, bias = given()
    op = OPS["geglu"]
    geglu(x, bias)
    assert op.bound(None, x, bias) is not None
    wanted = x.clone().requires_grad_()
    assert op.bound(None, wanted, bias) is None
    geglu(wanted, bias).sum().backward()
    assert wanted.grad is not None
    with torch.no_grad():
        assert op.bound(None, wanted, bias) is not None
        assert op.bound(None, x.as_subclass(Own), bias) is None


def test_a_compiler_sees_the_op_and_no_call_of_before(monkeypatch):
    x, bias = given()
    geglu(x, bias)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert OPS["geglu"].bound(None, x, bias) is None


@torch.no_grad()
def test_what_an_op_refuses_it_refuses_beside_a_call_that_looks_like_it():
    x = torch.randn(1, 8, 4, 4)
    upsample(x, 2)
    with pytest.raises(Unsupported, match=r"scale 2\.0"):
        upsample(x, 2.0)
    weight = torch.randn(8, 8, 1, 1)
    conv2d(x, weight)
    # A list is no key, and no stride.
    with pytest.raises(TypeError):
        conv2d(x, weight, None, None, None, [1, 1])
    with pytest.raises(Unsupported, match="residual of shape"):
        layer_norm_residual(x, x[:, :4])


def op_of(*others: Implementation) -> Op:
    return Op("toy", "for these tests", (Implementation(STOCK, lambda x: x + 1), *others))


def choosing(monkeypatch, op: Op, choice: Choice, *, settled: bool = True) -> None:
    monkeypatch.setattr(Op, "_choose", lambda *_: (choice, settled))
    op._chosen.clear()


def test_a_choice_that_is_not_settled_is_asked_for_again(monkeypatch):
    op, x = op_of(), torch.zeros(4)
    choosing(monkeypatch, op, Choice(STOCK), settled=False)
    assert op.bind(PROBLEM, CPU, None, (x,)) is None
    assert op.bound(None, x) is None
    choosing(monkeypatch, op, Choice(STOCK))
    assert op.bind(PROBLEM, CPU, None, (x,)) is op.bound(None, x) is not None


def test_a_plug_in_is_found_anew_at_each_call(monkeypatch):
    op, x = op_of(), torch.zeros(4)
    choosing(monkeypatch, op, Choice("plugged:fast"))
    assert op.bind(PROBLEM, CPU, None, (x,)) is None


@pytest.mark.parametrize(
    ("error", "lasting"), [(HipUnavailable("no compiler."), True), (HipRefused("toy", "x"), False)]
)
def test_a_kernel_that_cannot_be_had_gives_way_in_a_bound_call_too(monkeypatch, error, lasting):
    def missing(_x):
        raise error

    op, x = op_of(Implementation("hip", missing)), torch.zeros(4)
    choosing(monkeypatch, op, Choice("hip", NO_CONFIG, "exact"))
    call = op.bind(PROBLEM, CPU, None, (x,))
    assert torch.equal(call(x), x + 1)
    # For good: the next call is bound to stock. For these tensors alone: the kernel is asked again.
    assert (op.bound(None, x) is None) is lasting
    assert (op.choose(PROBLEM, CPU).is_stock) is lasting


def test_a_kernel_that_is_asked_for_by_name_never_gives_way(monkeypatch):
    def missing(_x):
        raise HipUnavailable("no compiler.")

    op, x = op_of(Implementation("hip", missing)), torch.zeros(4)
    choosing(monkeypatch, op, Choice("hip", NO_CONFIG, "forced"))
    with pytest.raises(HipUnavailable, match="no compiler"):
        op.bind(PROBLEM, CPU, "hip", (x,))(x)


def test_an_implementation_binds_with_the_config_that_was_chosen():
    seen = []

    def bind(x, *, config):
        seen.append(config)
        return lambda y: y * 2 if y.shape == x.shape else None

    default = registry.OPS["geglu"].own["triton"].default
    able = Implementation("able", lambda x, **_: x, bind=bind, default=default)
    x = torch.ones(2)
    assert torch.equal(able.bound((x,), NO_CONFIG)(x), x * 2)
    assert seen == [default]
    # Where it cannot, `run` has the config.
    unable = Implementation("unable", lambda x, *, config: (x, config), bind=lambda *_, **__: None, default=default)
    assert unable.bound((x,), NO_CONFIG)(x) == (x, default)


def test_what_is_bound_while_all_is_forgotten_is_kept_for_nobody():
    calls, x = BoundCalls(), torch.zeros(4)
    keep = calls.keeper(None, (x,))
    calls.forget()
    keep(print)
    assert calls.by_key == {}
    calls.keeper(None, (x,))(print)
    assert calls.by_key == {key_of(None, (x,)): print}


def test_calls_of_ever_new_sizes_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(bound_calls, "_MOST", 8)
    calls = BoundCalls()
    for size in range(20):
        calls.keeper(None, (torch.empty(size),))(print)
        assert len(calls.by_key) <= 8


def test_threads_share_bound_calls_and_not_their_tensors():
    wrong = []

    def work(seed):
        random = torch.Generator().manual_seed(seed)
        for _ in range(200):
            x, bias = torch.randn(3, 8, generator=random), torch.randn(8, generator=random)
            h = x + bias
            if not torch.equal(geglu(x, bias), h[:, :4] * torch.nn.functional.gelu(h[:, 4:])):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        forget_choices()
    for thread in threads:
        thread.join()
    assert not wrong
