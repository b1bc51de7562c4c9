"""What torch carries through plain calls is seen, and nothing is where it carries nothing."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from rocm_sd import transforms


def test_nothing_is_carried_by_plain_tensors():
    assert not transforms.at_hand()
    assert not transforms.carry([torch.ones(2, requires_grad=True), 3, None])


def test_a_derivative_of_forward_mode_is_carried_by_its_tensor_alone():
    x = torch.ones(2)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        assert transforms.at_hand()
        assert transforms.derivatives([None, dual])
        assert transforms.carry([dual])
        assert not transforms.carry([x, torch.zeros(3)])
    assert not transforms.at_hand()


def test_transforms_of_torch_func_are_seen():
    seen = []

    def function(x):
        seen.append((transforms.carry([x]), transforms.derivatives([x])))
        return x * 2

    x = torch.ones(2)
    torch.vmap(function)(x)
    torch.func.jvp(function, (x,), (x,))
    torch.func.grad(lambda x: function(x).sum())(x)
    assert seen == [(True, False), (True, True), (True, False)]
    assert not transforms.at_hand()
