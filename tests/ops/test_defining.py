"""What `define` makes of a signature. What it makes of each op is seen by the contract suite."""

from __future__ import annotations

import pytest
import torch

from rocm_sd.ops import OPS
from rocm_sd.ops.defining import Saved, Signature


def function(
    x: torch.Tensor,
    size: int,
    by: torch.Tensor | float | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    mode: str = "nearest",
    silu: bool = True,
    implementation: str | None = None,
    concat: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    raise NotImplementedError


def test_the_schema_is_the_signature():
    signature = Signature.of(function, ("concat",))
    assert signature.schema == (
        "(Tensor x, int size, float? by=None, Tensor? by_tensor=None, Tensor? bias=None, float eps=1e-05, "
        'str mode="nearest", bool silu=True, str? implementation=None) -> (Tensor, Tensor)'
    )
    assert [each.name for each in signature.arguments][-1] == "concat"


@pytest.mark.parametrize("by", [None, 2.5, torch.ones(2)], ids=["none", "number", "tensor"])
def test_what_is_a_number_or_a_tensor_comes_through_torchs_op_as_it_was(by):
    signature = Signature.of(function, ("concat",))
    given = (torch.zeros(3), 4, by, None, 1e-3, "bilinear", False, None)
    spread = signature.spread(given)
    assert len(spread) == len(signature.schema_names()) == 8
    arguments, implementation = signature.gathered((*spread, "triton"), {})
    assert implementation == "triton"
    assert arguments[1:2] + arguments[3:] == [4, None, 1e-3, "bilinear", False]
    assert arguments[2] is by
    # torch hands over no more than it has to.
    short, _ = signature.gathered((given[0], 4), {"silu": False})
    assert short[1:] == [4, None, None, 1e-5, "nearest", False]


def test_what_never_reaches_torch_comes_last():
    with pytest.raises(AssertionError, match="must be the last of function"):
        Signature.of(function, ("bias",))


def test_a_backward_pass_that_reads_what_was_not_saved_says_so():
    saved = Saved({"x": 1}, {"x"})
    assert saved.x == 1
    with pytest.raises(AttributeError, match="weight was not saved"):
        _ = saved.weight


def test_every_schema_names_the_implementation_last():
    for name in OPS:
        arguments = getattr(torch.ops.rocm_sd, name).default._schema.arguments
        assert [each.name for each in arguments][-1] == "implementation"
