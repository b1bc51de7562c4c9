"""Stand-ins for a forward: found, handed on and taken off, whoever else has done what to the module meanwhile."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from itertools import permutations

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import nn

from rocm_sd.rewrite import forwards

X = torch.ones(1, 2)


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return nn.Linear(2, 2).requires_grad_(False)


def adding(number):
    def answer(_module, inner, args, kwargs):
        return inner(*args, **kwargs) + number

    return answer


def stock(layer):
    return type(layer).forward(layer, X)


def near(ours, expected):
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_one_around_the_other_and_taken_off_in_any_order(layer, order):
    restores = [forwards.surround(layer, adding(10**number)) for number in range(3)]
    near(layer(X), stock(layer) + 111)
    left = 111
    for number in order:
        restores[number]()
        left -= 10**number
        near(layer(X), stock(layer) + left)
    assert "forward" not in layer.__dict__
    for restore in restores:
        restore()
    assert torch.equal(layer(X), stock(layer))


def test_a_forward_that_was_on_the_instance_comes_back(layer):
    def mine(x):
        return nn.Linear.forward(layer, x) * 2

    layer.forward = mine
    restore = forwards.surround(layer, adding(1))
    near(layer(X), stock(layer) * 2 + 1)
    restore()
    assert layer.forward is mine


def test_a_stand_in_is_known_by_its_mark_and_a_wrapper_of_it_is_not(layer):
    forwards.surround(layer, adding(1))
    ours = layer.forward
    assert forwards.is_ours(ours)
    assert forwards.is_ours(ours.__func__)
    assert not forwards.is_rule(ours)

    # What copies the names of a function, and its attributes, copies no mark.
    @functools.wraps(ours)
    def wrapper(*args):
        return ours(*args)

    assert not forwards.is_ours(wrapper)
    assert not forwards.is_ours(functools.update_wrapper(functools.partial(ours), ours))
    assert not forwards.is_ours(nn.Linear.forward)
    assert not forwards.is_ours(None)
    # An object that can neither be hashed nor be referred to weakly.
    assert not forwards.is_ours([])


def test_a_rules_forward_is_known_as_one(layer):
    def rule(self, x):
        return type(self).forward(self, x)

    assert forwards.is_rule(forwards.mark(rule, rule=True))
    forwards.replace(layer, rule)
    assert forwards.is_rule(forwards.on_instance(layer))
    add_hook_to_module(layer, ModelHook())
    assert not forwards.is_ours(layer.__dict__["forward"])
    assert forwards.is_rule(forwards.on_instance(layer))


@pytest.mark.parametrize("removed", ["never", "before", "after"])
@pytest.mark.parametrize("added", ["before", "after"])
def test_hooks_of_accelerate_come_and_go(layer, added, removed):
    if added == "before":
        add_hook_to_module(layer, ModelHook())
    restore = forwards.surround(layer, adding(1))
    if added == "after":
        add_hook_to_module(layer, ModelHook())
    near(layer(X), stock(layer) + 1)
    if removed == "before":
        remove_hook_from_module(layer)
        near(layer(X), stock(layer) + 1)
    restore()
    assert torch.equal(layer(X), stock(layer))
    if removed == "after":
        remove_hook_from_module(layer)
    assert torch.equal(layer(X), stock(layer))
    assert hasattr(layer, "_hf_hook") == (removed == "never")


def test_what_a_wrapper_of_another_program_still_calls_hands_every_call_on(layer):
    calls = []
    active = [True]

    def answer(_module, inner, args, kwargs):
        calls.append(1)
        return inner(*args, **kwargs) + active[0]

    layer.forward = functools.partial(nn.Linear.forward, layer)
    restore = forwards.surround(layer, answer)
    ours = layer.forward
    layer.forward = lambda x: ours(x) * 3
    active[0] = False
    restore()
    near(layer(X), stock(layer) * 3)
    assert calls == [1]
    # A later one around the wrapper calls the first, and not itself.
    again = forwards.surround(layer, adding(1))
    near(layer(X), stock(layer) * 3 + 1)
    again()
    near(layer(X), stock(layer) * 3)


def test_a_copy_has_its_own_weights_and_nothing_to_take_off(layer):
    restore = forwards.surround(layer, adding(1))
    twin = copy.deepcopy(layer)
    layer.bias.add_(5)
    near(twin(X), stock(twin) + 1)
    assert not forwards.is_placed(twin, twin.forward)
    restore()
    near(twin(X), stock(twin) + 1)
    # What it has of the other is nobody's: a new one takes its place.
    forwards.surround(twin, adding(10))()
    assert "forward" not in twin.__dict__


def test_a_pickle_has_its_classs_own(layer):
    forwards.surround(layer, adding(1))
    again = pickle.loads(pickle.dumps(layer))
    assert torch.equal(again(X), stock(layer))
    assert not forwards.is_ours(again.__dict__.get("forward"))


def test_the_same_function_twice_on_one_submodule_is_there_once(layer):
    def rule(self, x):
        return type(self).forward(self, x) + 1

    forwards.mark(rule, rule=True)
    first, second = forwards.replace(layer, rule), forwards.replace(layer, rule)
    near(layer(X), stock(layer) + 1)
    first()
    second()
    assert "forward" not in layer.__dict__


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_who_shares_a_module_gets_it_back_after_the_last_one(layer, order):
    installed = []

    def install():
        installed.append(1)
        return forwards.surround(layer, adding(1))

    restores = [forwards.share(layer, "key", install) for _ in range(2)]
    assert len(installed) == 1
    restores[order[0]]()
    assert forwards.is_shared(layer, "key")
    near(layer(X), stock(layer) + 1)
    restores[order[1]]()
    assert not forwards.is_shared(layer, "key")
    assert "forward" not in layer.__dict__


def test_a_compiler_sees_the_forward_alone(layer):
    def refuse(*_arguments):
        raise AssertionError("asked by a compiler")

    forwards.surround(layer, refuse)
    compiled = torch.compile(layer, backend="eager", fullgraph=False)
    near(compiled(X), stock(layer))


def test_nothing_keeps_the_module_alive():
    layer = nn.Linear(2, 2)
    kept = []

    def answer(_module, inner, args, kwargs):
        kept.append(inner)
        return inner(*args, **kwargs)

    layer.forward = layer.forward  # as accelerate leaves it
    restore = forwards.share(layer, "key", functools.partial(forwards.surround, layer, answer))
    layer(X)
    gone = weakref.ref(layer)
    del layer
    gc.collect()
    assert kept
    assert gone() is None
    restore()
