from __future__ import annotations

import pytest
import torch

from rocm_sd import arch
from rocm_sd.errors import Unsupported
from rocm_sd.verify.emulator import Counters, UninitialisedRead, UnwrittenOutput
from rocm_sd.verify.runner import emulated, specialise, total
from verify.kernels import add, matmul

pytest.importorskip("triton", reason="AMD code is compiled by Triton")


def specialised(*positional, **named):
    config, arguments = specialise(matmul.matmul, positional, named)
    return config, [a.name for a in arguments]


def test_arguments_are_specialised_as_triton_does():
    whole, shifted = torch.zeros(64, 64).half(), torch.zeros(65, 64).half().flatten()[1:4097].view(64, 64)
    tile = {"TILE_M": 32, "TILE_N": 32, "TILE_K": 32}
    config, names = specialised(whole, shifted, None, 48, 1, 7, **tile, num_warps=8, num_stages=1)
    assert dict(config.signature) == {"a": "*fp16", "b": "*fp16", "M": "i32", "K": "i32"}
    # None and 1 are constants; a pointer two bytes into an allocation is not marked as aligned.
    assert dict(config.constants) == {"c": None, "N": 1, **tile}
    assert dict(config.attributes) == {"a": "DS", "b": "S", "M": "D"}
    assert names == ["a", "b", "M", "K"]
    assert (config.num_warps, config.num_stages) == (8, 1)


@pytest.mark.parametrize(
    ("value", "type_"), [(2**31, "i64"), (2**31 - 1, "i32"), (-5, "i32"), (2**63, "u64"), (0.5, "fp32"), (True, "u1")]
)
def test_scalars_get_the_type_that_holds_them(value, type_):
    config, _ = specialise(add.add, (torch.zeros(4), torch.zeros(4), torch.zeros(4), value), {"BLOCK": 256})
    assert dict(config.signature)["n"] == type_


def test_an_unknown_option_and_a_strange_constant_are_refused():
    x = torch.zeros(4)
    with pytest.raises(Unsupported, match="num_ctas"):
        specialise(add.add, (x, x, x, 4), {"BLOCK": 256, "num_ctas": 2})
    with pytest.raises(Unsupported, match="constant BLOCK of type list"):
        specialise(add.add, (x, x, x, 4), {"BLOCK": [1]})
    with pytest.raises(TypeError, match="n"):
        specialise(add.add, (x, x, x), {"BLOCK": 256})


def test_compiled_only_lists_the_calls_and_puts_everything_back():
    before, facts = add.add, arch.device_facts
    x = torch.zeros(300)
    with emulated(add, "gfx942", execute=False) as run:
        assert arch.device_facts().compute_units == arch.get("gfx942").compute_units
        add.launch(x, x, torch.empty(300))
    (call,) = run.calls
    assert (call.kernel, call.grid, call.code.arch.name, call.counters) == ("add", (2, 1, 1), "gfx942", None)
    assert add.add is before
    assert arch.device_facts is facts


def test_the_kernels_are_put_back_after_an_error():
    before = add.add
    with pytest.raises(RuntimeError, match="of the launcher"), emulated(add, "gfx942", execute=False):
        raise RuntimeError("of the launcher")
    assert add.add is before


def test_counts_of_several_launches_are_added_up():
    first = Counters(arch.get("gfx1100"), 32, waves=4, bytes_loaded=100, by_name={"v_add_f32": 2})
    second = Counters(arch.get("gfx1100"), 32, waves=1, bytes_loaded=5, by_name={"v_add_f32": 1, "s_endpgm": 1})
    added = total([first, second])
    assert (added.waves, added.bytes_loaded, added.wave_size) == (5, 105, 32)
    assert added.by_name == {"v_add_f32": 3, "s_endpgm": 1}
    assert first.by_name == {"v_add_f32": 2}


def test_memory_nothing_wrote_may_not_be_read_across_kernels():
    """The second launch reads what the first left unwritten, in a view of one allocation."""
    x = torch.ones(100)
    with emulated(add, "gfx1100") as run:
        first, second = torch.empty(2, 100)
        add.launch(x, x, first)
        add.launch(first, x, second)
        run.require_written(first, second)
        third = torch.empty(100)
        with pytest.raises(UnwrittenOutput, match="400 of 400 bytes of output 1"):
            run.require_written(first, third)
        with pytest.raises(UninitialisedRead, match="byte 0 of x"):
            add.launch(third, x, first)
    assert torch.equal(second, torch.full((100,), 3.0))


def test_which_memory_holds_values_is_known_to_the_byte():
    given = torch.zeros(8)
    with emulated(add, "gfx1100", execute=False) as run:
        known = run._allocations.of
        assert known(given) is None
        fresh = torch.empty(2, 4)
        first, second = fresh
        assert not known(fresh).any()
        first.fill_(1.0)
        assert known(first).all()
        assert not known(second).any()
        assert known(fresh).sum() == 16
        assert known(torch.empty_like(given).copy_(given)).all()
        assert known(given.new_empty(3)).sum() == 0
        assert known(torch.zeros(3)) is None
        assert known(given[::2].contiguous()) is None
        assert known(torch.empty(2, 3, 4, 5, memory_format=torch.channels_last)).size == 480
