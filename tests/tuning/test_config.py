from __future__ import annotations

from dataclasses import dataclass, fields

import pytest

from rocm_sd.kernels.config import NO_CONFIG, Config, OpenConfig
from rocm_sd.ops import OPS
from rocm_sd.ops.definition import Implementation


@dataclass(frozen=True)
class Tile(Config):
    rows: int = 4
    warps: int = 2


def test_a_config_is_read_and_written_by_the_names_of_its_fields():
    assert Tile.fitting({"warps": 8, "rows": 1}) == Tile(rows=1, warps=8)
    assert list(Tile(1, 8).to_dict().items()) == [("rows", 1), ("warps", 8)]
    assert str(Tile(1, 8)) == "rows=1 warps=8"


@pytest.mark.parametrize(
    "values", [{}, {"rows": 1}, {"rows": 1, "warps": 2, "stages": 1}, {"rows": 1, "warp": 2}, {"rows": "1", "warps": 2}]
)
def test_what_does_not_fit_is_none(values):
    assert Tile.fitting(values) is None


def test_nothing_to_configure_is_false_and_is_not_handed_over():
    assert not NO_CONFIG
    assert not OpenConfig()
    assert Tile()
    assert NO_CONFIG.fitting({}) == NO_CONFIG
    assert NO_CONFIG.fitting({"rows": 1}) is None
    assert Implementation("stock", lambda *given, **named: (given, named))(1, 2, config=Tile()) == ((1, 2), {})


def test_an_implementation_gets_its_default_where_there_is_no_config():
    tiled = Implementation("tiled", lambda *given, **named: (given, named), default=Tile())
    assert tiled(1) == ((1,), {"config": Tile()})
    assert tiled(1, config=Tile(9, 9)) == ((1,), {"config": Tile(9, 9)})
    assert tiled.config_from({"rows": 9, "warps": 9}) == Tile(9, 9)
    assert tiled.config_from({}) == Tile()
    with pytest.raises(ValueError, match="tiled has no config of"):
        tiled.config_from({"rows": 9})


def test_an_open_config_has_any_names_in_any_order():
    assert OpenConfig.fitting({"b": 1, "a": 2}) == OpenConfig.fitting({"a": 2, "b": 1})
    assert OpenConfig.fitting({"b": 1, "a": 2}).to_dict() == {"a": 2, "b": 1}


@pytest.mark.parametrize("op", OPS)
def test_every_config_of_an_op_is_of_whole_numbers_and_hashable(op):
    for implementation in OPS[op].implementations:
        default = implementation.default
        assert {each.type for each in fields(default)} <= {"int"}
        assert type(default).fitting(default.to_dict()) == default
        assert hash(default) == hash(type(default).fitting(default.to_dict()))
