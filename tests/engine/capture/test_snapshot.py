"""What is compared before a replay, and what is kept of it while a host may change the model."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from rocm_sd.engine.capture.snapshot import DormantSnapshot, Snapshot, flatten


def model():
    return nn.Sequential(nn.Conv2d(4, 8, 3), nn.SiLU(), nn.Sequential(nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4)))


class Doubled(nn.Conv2d):
    def forward(self, x):
        return 2 * super().forward(x)


def test_what_has_changed_is_named():
    known = model()
    snapshot = Snapshot(known)
    assert snapshot.difference() is None
    known[0].padding_mode = "circular"
    assert snapshot.difference() == "0: padding_mode has changed"
    known[0].padding_mode = "zeros"
    assert snapshot.difference() is None
    known[2][0].register_forward_hook(lambda *_: None)
    assert snapshot.difference() == "2.0: _forward_hooks has changed"


def test_a_module_of_another_class_is_another_model():
    known = model()
    snapshot, dormant = Snapshot(known), DormantSnapshot(known)
    known[0].__class__ = Doubled
    assert snapshot.difference() == f"a Conv2d has become a Doubled of {__name__}"
    assert not dormant.is_of(known)
    known[0].__class__ = nn.Conv2d
    assert snapshot.difference() is None
    assert dormant.is_of(known)
    known.__class__ = type("Mine", (nn.Sequential,), {"__module__": "mine"})
    assert snapshot.difference() == "a Sequential has become a Mine of mine"


def test_values_may_change_and_addresses_may_not():
    known = model()
    snapshot = Snapshot(known)
    with torch.no_grad():
        known[0].weight.mul_(2)
        known[2][1].running_mean.add_(1)
    assert snapshot.difference() is None
    known[0].weight.data = known[0].weight.data.clone()
    assert snapshot.difference() == "0.weight has moved in memory"


def test_of_what_is_used_alone():
    known = model()
    snapshot = Snapshot(known, [known[2][0]])
    known[0].padding_mode = "circular"
    known[0].weight.data = known[0].weight.data.clone()
    known[2][1].eps = 1.0
    assert snapshot.difference() is None
    known[2].more = 1
    assert snapshot.difference() == "2: more has changed"
    del known[2].more
    assert snapshot.difference() is None
    known[2][0].weight.data = known[2][0].weight.data.clone()
    assert snapshot.difference() == "2.0.weight has moved in memory"


def test_a_model_that_is_gone_is_another_one():
    known = model()
    snapshot = Snapshot(known)
    del known
    gc.collect()
    assert snapshot.difference() == "the model is gone"


def test_what_is_remembered_between_two_uses_keeps_no_weights():
    known = model()
    asleep, layer = DormantSnapshot(known), known[0]
    assert asleep.is_of(known)
    layer.comfy_cast_weights = True
    assert not asleep.is_of(known)
    del layer.comfy_cast_weights
    assert asleep.is_of(known)
    old = weakref.ref(layer.weight)
    layer.weight = nn.Parameter(layer.weight.data.clone(), requires_grad=False)
    gc.collect()
    assert old() is None
    assert not asleep.is_of(known)


def test_a_changed_call_has_other_values_in_the_same_places():
    x, steps, time = torch.randn(2, 4, 3, 3), torch.tensor([3, 4]), torch.tensor(500.0)
    call = flatten((x.to(memory_format=torch.channels_last), time), {"also": [steps, None, 2]}, x.device)
    assert call is not None
    (given, when), named = (changed := call.changed(1)).with_tensors(changed.tensors)
    assert given.shape == x.shape
    assert not torch.equal(given, x)
    assert torch.equal(given.flatten().sort().values, x.flatten().sort().values)
    assert when is time
    assert named["also"][0] is steps
    assert named["also"][1:] == [None, 2]
