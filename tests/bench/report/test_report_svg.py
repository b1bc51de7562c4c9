from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest

from rocm_sd.bench.report.charts import Bar, Dot, Scale, WaterfallRow, bars, lines, roof, tag, waterfall
from rocm_sd.bench.report.parts import shown, times


def elements(svg: str, name: str, class_: str | None = None):
    found = ET.fromstring(svg).iter(name)
    return [e for e in found if class_ is None or class_ in e.get("class", "").split()]


def percent(value: str) -> float:
    assert value.endswith("%")
    return float(value[:-1])


def test_text_and_attributes_are_escaped_and_markup_is_not():
    inner = tag("title", "<script>&")
    assert tag("rect", inner, class_='"><b') == (
        '<rect class="&quot;&gt;&lt;b"><title>&lt;script&gt;&amp;</title></rect>'
    )


@pytest.mark.parametrize(
    ("scale", "value", "place"),
    [
        (Scale(0, 10), 5, 50),
        (Scale(1, 100, log=True), 10, 50),
        (Scale(0, 10, 200, 0), 10, 0),
        (Scale(2, 4, 10, 100), 2, 10),
    ],
)
def test_scales(scale, value, place):
    assert scale(value) == pytest.approx(place)


@pytest.mark.parametrize("scale", [(3, 3), (4, 3), (float("nan"), 1)])
def test_a_scale_of_nothing_is_refused(scale):
    with pytest.raises(ValueError, match="no scale"):
        Scale(*scale)
    with pytest.raises(ValueError, match="no scale"):
        Scale(0, 1, log=True)


@pytest.mark.parametrize(
    ("scale", "ticks"),
    [
        (Scale(0, 10), (0, 2, 4, 6, 8, 10)),
        (Scale(0, 0.31), (0, 0.1, 0.2, 0.3)),
        (Scale(0, 8843), (0, 2000, 4000, 6000, 8000)),
        (Scale(0.5, 2000, log=True), (1, 10, 100, 1000)),
    ],
)
def test_ticks_are_round_and_inside(scale, ticks):
    assert scale.ticks() == pytest.approx(ticks)


def test_few_ticks_over_many_powers():
    assert 3 <= len(Scale(1e-9, 1e9, log=True).ticks()) <= 8


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1689.4, "1689"),
        (99.97, "100"),
        (41.94, "41.9"),
        (9.999, "10.0"),
        (8.174, "8.17"),
        (0.00142, "0.00142"),
        (1.42e-7, "1.42e-07"),
        (0, "0"),
        (None, ""),
        (float("nan"), ""),
    ],
)
def test_three_figures(value, text):
    assert shown(value) == text


def test_ratios_have_two_places():
    assert [times(ratio) for ratio in (0.9973, 6.014, 34.66)] == ["1.00\u00d7", "6.01\u00d7", "34.7\u00d7"]


def test_bars_are_as_long_as_their_values_and_whiskers_span_the_interval():
    svg = bars("t", [Bar("a", 50.0, "50"), Bar("b", 100.0, "100", 90.0, 110.0, "ours")], unit="x", mark=(50.0, "stock"))
    first, second = elements(svg, "rect", "bar")
    assert percent(second.get("width")) == pytest.approx(2 * percent(first.get("width")), rel=0.01)
    across = next(e for e in elements(svg, "line", "whisker") if e.get("x1") != e.get("x2"))
    whole = percent(second.get("width"))
    assert percent(across.get("x1")) == pytest.approx(0.9 * whole, rel=0.01)
    assert percent(across.get("x2")) == pytest.approx(1.1 * whole, rel=0.01)
    assert percent(across.get("x2")) <= 100


def test_what_was_not_measured_has_no_bar():
    svg = bars("t", [Bar("a", 1.0, "1"), Bar("wrong", None, "no speed")], unit="x")
    assert len(elements(svg, "rect", "bar")) == 1
    assert "no speed" in svg


def test_a_chart_tells_its_content_to_those_who_cannot_see_it():
    (svg,) = elements(bars("Speed", [Bar("a", 1.0, "1 ms")], unit="x"), "svg")
    assert svg.get("role") == "img"
    assert svg.get("aria-label") == "Speed. a: 1 ms"


def test_a_long_name_is_cut_in_the_chart_and_whole_in_its_title():
    name = "n" * 80
    svg = bars("t", [Bar(name, 1.0, "1")], unit="x")
    assert f"{name}: 1" in svg
    assert all(len(text) <= 30 for text in re.findall(r'class="name[^>]*>([^<]*)<', svg))


def test_a_waterfall_colours_what_each_row_took_away():
    steps = [
        WaterfallRow("stock", None, 100.0, ""),
        WaterfallRow("better", 100.0, 60.0, ""),
        WaterfallRow("noise", 60.0, 59.0, "", False),
    ]
    svg = waterfall("t", [*steps, WaterfallRow("worse", 59.0, 80.0, "")], unit="ms")
    (gain,), (pale,), (loss,) = (elements(svg, "rect", kind) for kind in ("ours", "undecided", "worse"))
    scale = Scale(0, 104.0)
    assert percent(gain.get("x")) == pytest.approx(scale(60), abs=0.01)
    assert percent(gain.get("width")) == pytest.approx(scale(40), abs=0.01)
    assert percent(pale.get("x")) == pytest.approx(scale(59), abs=0.01)
    assert percent(loss.get("x")) == pytest.approx(scale(59), abs=0.01)
    assert percent(loss.get("width")) == pytest.approx(scale(21), abs=0.01)


@pytest.mark.parametrize("intensities", [(0.5, 3000.0), (5000.0, 9000.0), (0.01, 0.02)])
def test_the_roof_passes_through_its_bend_and_stays_in_the_picture(intensities):
    dots = [Dot(intensity, 1.0, "ours", "") for intensity in intensities]
    svg = roof("t", dots, peak_tflops=100.0, bandwidth_gbps=1000.0)
    slope, flat = elements(svg, "line", "roof")
    assert (slope.get("x2"), slope.get("y2")) == (flat.get("x1"), flat.get("y1"))
    assert flat.get("y1") == flat.get("y2")
    places = [percent(e.get(name)) for e in (slope, flat) for name in ("x1", "x2")]
    assert 0 <= min(places) <= max(places) <= 100
    circles = elements(svg, "circle")
    assert all(0 <= percent(c.get("cx")) <= 100 for c in circles)


def test_a_point_on_the_roof_is_drawn_on_it():
    """1000 GB/s at 10 FLOP a byte is 10 TFLOP/s."""
    svg = roof(
        "t", [Dot(10.0, 10.0, "ours", ""), Dot(0.1, 0.01, "other", "")], peak_tflops=100.0, bandwidth_gbps=1000.0
    )
    slope, _ = elements(svg, "line", "roof")
    circle, _ = elements(svg, "circle")
    x1, x2 = percent(slope.get("x1")), percent(slope.get("x2"))
    y1, y2 = float(slope.get("y1")), float(slope.get("y2"))
    at = y1 + (percent(circle.get("cx")) - x1) / (x2 - x1) * (y2 - y1)
    assert float(circle.get("cy")) == pytest.approx(at, abs=0.2)


def test_without_a_roof_the_points_are_still_drawn():
    svg = roof("t", [Dot(1.0, 1.0, "ours", "")], peak_tflops=None, bandwidth_gbps=None)
    assert elements(svg, "circle")
    assert not elements(svg, "line", "roof")


def test_lines_have_their_highest_value_named():
    svg = lines("t", {"rocm-sd": [(0.0, 1.0), (1.0, 3.0), (2.0, 2.0)]}, unit="MiB")
    assert len(elements(svg, "line", "trace")) == 2 + 1  # and the one in the key
    assert "rocm-sd: highest 3.00 MiB" in svg


def test_no_line_runs_through_the_name_of_another():
    flat = {name: [(0.0, height), (1.0, height)] for name, height in (("stock", 93.0), ("rocm-sd", 100.0), ("c", 96.0))}
    svg = lines("t", flat, unit="MiB")
    traces = elements(svg, "line", "trace")
    names = [text for text in elements(svg, "text") if "highest" in (text.text or "")]
    assert len(names) == 3
    drawn = [float(trace.get("y1")) for trace in traces if percent(trace.get("x2")) > 50]
    assert len(drawn) == 3
    assert min(float(name.get("y")) for name in names) - 15 > max(drawn)
    places = sorted(float(name.get("y")) for name in names)
    assert min(b - a for a, b in pairwise(places)) >= 15
    assert places[-1] < float(elements(svg, "svg")[0].get("height"))
    assert len({trace.get("class") for trace in traces}) == 3
    assert elements(lines("t", {"a": [(0.0, 0.0)]}, unit="MiB"), "svg")
