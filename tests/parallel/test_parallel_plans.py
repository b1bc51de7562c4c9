"""Plans by name, as a mesh, and by what is there; rows and blocks dealt out to ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rocm_sd.errors import InvalidOption, Unsupported
from rocm_sd.parallel import choose, join, parse
from rocm_sd.parallel.plans import Facts
from rocm_sd.parallel.rows import deal, shares
from rocm_sd.parallel.stages import ranges

GB = 10**9
FITS = Facts(2, 5 * GB, 20 * GB, 50e9, is_unet=True)
DIVIDED = {"weights": 18 * GB, "by_tensor": 12 * GB, "by_pipeline": 10 * GB}


@pytest.mark.parametrize(
    ("text", "ranks", "dims"),
    [
        ("patch", 4, {"patch": 4}),
        ("patch=2,cfg=2", 4, {"cfg": 2, "patch": 2}),
        ("cfg=2,patch", 8, {"cfg": 2, "patch": 4}),
        ("cfg x patch=2", 4, {"cfg": 2, "patch": 2}),
        ("data=2,cfg=1,tensor=2", 4, {"data": 2, "tensor": 2}),
        ("cfg", 1, {}),
    ],
)
def test_a_plan_in_words(text, ranks, dims):
    plan = parse(text, ranks)
    assert plan.dims == dims
    assert list(plan.dims) == [name for name in ("data", "cfg", "pipeline", "patch", "tensor") if name in dims]


@pytest.mark.parametrize("text", ["", "rows", "cfg=x", "cfg=0", "cfg=2,cfg=2", "cfg=-2", "cfg=²", f"cfg={10**50}"])
def test_what_is_no_plan(text):
    with pytest.raises(InvalidOption, match="cfg=2,patch=2"):
        parse(text, 4)


@pytest.mark.parametrize("text", ["cfg=2", "cfg=3,patch", "cfg,patch", "cfg=2,patch=4"])
def test_a_plan_for_another_number_of_ranks(text):
    with pytest.raises(Unsupported, match="multiplied, are to be 4"):
        parse(text, 4)


@pytest.mark.parametrize(
    ("facts", "plan", "why"),
    [
        ({"ranks": 1}, "one rank alone", "one rank"),
        ({}, "cfg=2", "half of guidance"),
        ({"ranks": 4}, "data=2,cfg=2", "one answer a step"),
        ({"ranks": 4, "link": None}, "data=2,cfg=2", "one answer a step"),
        ({"ranks": 3}, "cfg=3", "no third part"),
        ({"ranks": 3, "pictures": 2}, "data=3", "nothing else"),
        ({"guided": False}, "patch=2", "no parts but its rows"),
        ({"guided": False, "ranks": 3}, "patch=3", "no parts but its rows"),
        ({"guided": False, "pictures": 2}, "data=2", "2 pictures"),
        ({"guided": False, "is_unet": False}, "data=2", "nothing else"),
        ({"ranks": 4, "pictures": 8}, "data=4", "8 pictures"),
        ({"is_unet": False}, "data=2", "nothing else"),
        ({"weights": 18 * GB}, "tensor=2", "18.0 GB of weights do not fit"),
        ({"weights": 18 * GB, "link": 8e9}, "pipeline=2", "with 8.0 GB/s is no fast one"),
        ({"weights": 18 * GB, "link": None}, "pipeline=2", "whose speed is not known is no fast one"),
        (DIVIDED, "tensor=2", "is fast; the fullest rank has 12.0 GB by tensor"),
        (DIVIDED | {"link": 8e9}, "pipeline=2", "is no fast one; the fullest rank has 10.0 GB by pipeline"),
        (DIVIDED | {"by_tensor": 17 * GB}, "pipeline=2", "10.0 GB by pipeline, and by tensor it has more"),
        (DIVIDED | {"link": 8e9, "by_pipeline": 17 * GB}, "tensor=2", "12.0 GB by tensor, and by pipeline it has more"),
        (DIVIDED | {"link": 8e9, "by_pipeline": None}, "tensor=2", "12.0 GB by tensor, and by pipeline it cannot be"),
        (DIVIDED | {"by_tensor": 18 * GB, "by_pipeline": 17 * GB}, "pipeline=2", "may not fit either: take more GPUs"),
        (DIVIDED | {"weights": 16 * GB}, "cfg=2", "half of guidance"),
    ],
)
def test_auto(facts, plan, why):
    chosen = choose(Facts(**vars(FITS) | facts))
    assert str(chosen) == plan
    assert why in chosen.why


@given(count=st.integers(0, 60), weights=st.lists(st.floats(0.05, 20), min_size=1, max_size=9))
def test_shares(count, weights):
    given_out = shares(count, weights)
    assert sum(given_out) == count
    assert min(given_out) >= (count >= len(weights))


@given(height=st.integers(1, 70), depth=st.integers(0, 4), weights=st.lists(st.floats(0.1, 9), min_size=1, max_size=6))
def test_rows_at_every_level(height, depth, weights):
    rows = deal(height, depth, weights)
    expected = height
    for level in range(depth + 1):
        assert rows.height == expected
        assert all(count >= 0 for count in rows.counts)
        # Whoever works has rows at every level.
        assert [count > 0 for count in rows.counts] == [count > 0 for count in deal(height, depth, weights).counts]
        if level < depth:
            assert rows.coarser.finer.borders == rows.borders
            rows, expected = rows.coarser, (expected + 1) // 2


@given(
    costs=st.lists(st.floats(0.1, 100), min_size=1, max_size=20),
    weights=st.lists(st.floats(0.1, 9), min_size=1, max_size=6),
)
def test_ranges_of_blocks(costs, weights):
    owners = ranges(costs, weights)
    assert len(owners) == len(costs)
    assert owners == sorted(owners)
    assert len(costs) < len(weights) or set(owners) == set(range(len(weights)))


def test_a_process_of_no_job_is_told_what_to_type(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(Unsupported, match="--gpus 2"):
        join(torch.device("cpu"))
