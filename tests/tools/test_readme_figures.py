"""The charts and figures of README.md are what the records say, and a chart that is not is found."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

import readme_figures

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_charts_are_what_the_records_say():
    assert readme_figures.stale() == []


def test_a_chart_that_was_changed_by_hand_is_found(monkeypatch, tmp_path):
    changed = tmp_path / "speed-light.svg"
    real = readme_figures.figures()
    first = next(iter(real))
    changed.write_text(real[first].replace("282 ms", "182 ms"))
    monkeypatch.setattr(readme_figures, "ROOT", tmp_path)
    monkeypatch.setattr(readme_figures, "figures", lambda: {changed: real[first]})
    assert readme_figures.stale() == ["speed-light.svg"]


@pytest.mark.parametrize("name", readme_figures.ENGINES)
@pytest.mark.parametrize("shade", ["light", "dark"])
def test_a_bar_is_as_long_as_its_time(name, shade):
    record = json.loads((ROOT / name).read_text())
    times = {
        one["engine"]: statistics.median(one["ms"])
        for one in record["measurements"]
        if one["batch"] == 1 and one["engine"] in {"stock", "compile", "rocm-sd"}
    }
    drawn = ET.parse(ROOT / f"docs/assets/speed-{shade}.svg").getroot()
    texts = [each.text or "" for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    bars = [float(each.get("width")) for each in drawn.iter("{http://www.w3.org/2000/svg}rect")]
    begin = 3 * readme_figures.ENGINES.index(name)
    longest = bars[begin]
    for bar, ms in zip(bars[begin : begin + 3], times.values(), strict=True):
        assert any(re.fullmatch(rf"{ms:.0f} ms(, [0-9.]+x)?", text) for text in texts)
        assert bar / longest == pytest.approx(ms / times["stock"], rel=0.01)


def test_the_status_counts_what_was_proven():
    from rocm_sd import arch
    from rocm_sd.verify.proofs import proofs

    amd = {
        p.arch for p in proofs() if arch.get(p.arch).vendor is arch.Vendor.AMD and p.rung in {"compiled", "emulated"}
    }
    words = readme_figures.status().replace("\n> ", " ")
    assert f"compiled for {len(amd)} AMD GPU targets" in words
    assert "Not yet run on AMD silicon" in words
