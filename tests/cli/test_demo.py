"""rocm-sd demo: every engine's pictures, their times and how near they are to stock's."""

from __future__ import annotations

import json
import re

import pytest
from PIL import Image

from rocm_sd.cli import main
from rocm_sd.cli.demo import _rows, sentence


def test_it_draws_each_quality_beside_stock(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main.run(["demo", "--steps", "1", "--out", str(tmp_path)])
    assert not ended.value.code
    facts = json.loads((tmp_path / "timing.json").read_text())
    assert list(facts["seconds"]) == ["stock", "exact", "high", "balanced"]
    assert all(len(seconds) == 8 and min(seconds) > 0 for seconds in facts["seconds"].values())
    # For one step nothing was measured: all are exact, and it says so.
    assert facts["psnr_db"]["stock"] == [None] * 8
    assert all(psnr is None or psnr > 60 for several in facts["psnr_db"].values() for psnr in several)
    with Image.open(tmp_path / "compare.png") as picture:
        assert picture.height > picture.width
    text = " ".join(capsys.readouterr().out.split())
    assert "high: nothing was measured for 1 steps" in text
    assert "CPU: " in text
    # It ends with the verdict.
    assert re.search(r"8 prompts drawn on [^;]+; against stock, exact.*; exact draws [^;]+\.$", text)
    # No approximation is listed without its verdict.
    assert set(facts["pictures"]) == {"high", "balanced"}
    assert all(said == "within high: SSIM 1.000, 8 prompts" for said in facts["pictures"].values())
    assert "| balanced |" in (tmp_path / "timing.md").read_text()


def test_a_ratio_inside_the_spread_is_said_to_be_none():
    times = {"stock": [1.0, 1.1, 0.9, 1.0], "exact": [1.0, 0.9, 1.1, 1.0], "high": [0.5, 0.55, 0.45, 0.5]}
    near = {"stock": [float("inf")] * 4, "exact": [float("inf")] * 4, "high": [40.0, 41.0, 42.0, 43.0]}
    stock, exact, high = _rows(times, near, {"high": "within high: ..."})
    assert stock[3:] == ("1.00x", "", "")
    assert "no difference" in exact[3]
    assert exact[4] == "equal"
    assert high[3].startswith("2.00x")
    assert high[4:] == ("41.5 dB", "within high: ...")


def test_the_verdict_is_one_sentence_on_speed_and_sameness():
    inf = float("inf")
    stock = [1.0, 1.1, 0.9, 1.0]
    times = {
        "stock": stock,
        "exact": [1.0, 0.9, 1.1, 1.0],
        "high": [s / 2 for s in stock],
        "balanced": [s / 2 for s in stock],
    }
    near = {engine: [inf] * 4 for engine in times}
    assert sentence(times, near, "A card") == (
        "4 prompts drawn on A card; against stock, exact: no difference beyond the spread, "
        "high and balanced: 2.00 times as fast; exact draws the same pictures as stock."
    )
    near["exact"] = [inf, 52.4, 60.0, inf]
    assert sentence(times, near, "A card").endswith("; exact draws stock's pictures, to 52 dB or better.")
    # What no rounding does is not called the same.
    near["exact"] = [inf, 21.0, 60.0, inf]
    assert "exact is 21 dB from stock, more than rounding should be" in sentence(times, near, "A card")
    times["exact"] = [2 * s for s in stock]
    assert "exact: 0.50 times as fast" in sentence(times, near, "A card")
