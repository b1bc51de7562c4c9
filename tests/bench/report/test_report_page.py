from __future__ import annotations

import base64
import io
import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import made_up
import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from rocm_sd.bench.records import INTERVALS
from rocm_sd.bench.report import Inputs, page, read, render
from rocm_sd.bench.report.pictures import UnreadablePicture
from rocm_sd.bench.report.pictures import read as read_picture
from rocm_sd.errors import MissingDependency
from rocm_sd.verify.ladder import Outcome

ROOT = Path(__file__).parents[3]
SECTIONS = ("speed", "ablation", "roofline", "memory", "ladder", "pictures")
SPITE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&"

LADDER = [
    Outcome("geglu", "cpu", "reference", "passed", "fine"),
    Outcome("geglu", "cpu", "interpreted", "passed", "fine"),
    Outcome("geglu", "gfx1100", "compiled", "passed", "fine", figures={"vgprs": 96, "lds": 512, "waves_per_simd": 8}),
    Outcome("geglu", "gfx942", "compiled", "failed", "3 spills", figures={"vgprs": 200, "lds": 0, "waves_per_simd": 2}),
    Outcome("geglu", "gfx1100", "tested", "skipped", "never ran there"),
]


class Shape(HTMLParser):
    """Elements that are open at the end, tags that close nothing, ids, links within the page, and tables."""

    VOID = frozenset({"meta", "img", "link", "br", "hr", "input"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open, self.wrong, self.ids, self.links, self.tags = [], [], [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.tags.append((tag, values))
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values["href"][1:]] if values.get("href", "").startswith("#") else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def html_of(*records, outcomes=(), **more) -> str:
    return render(page(Inputs(records), [o.to_dict() for o in outcomes], **more))


def section(html: str, name: str) -> str:
    return html.split(f'<section id="{name}">')[1].split("</section>", maxsplit=1)[0]


def test_the_page_is_well_formed_and_its_links_lead_somewhere():
    shape = Shape(html_of(made_up.engines(), made_up.ablation(), outcomes=LADDER))
    assert shape.open == []
    assert shape.wrong == []
    assert set(shape.links) <= set(shape.ids)
    assert len(shape.ids) == len(set(shape.ids))
    assert set(SECTIONS) <= set(shape.ids)


def test_two_records_of_one_workload_differ_by_their_days():
    html = html_of(made_up.ablation(), replace(made_up.ablation(), when="2026-03-04T05:06:07"))
    assert section(html, "ablation").count("; 2026-01-02.") == section(html, "ablation").count("; 2026-03-04.") > 0


def test_nothing_is_loaded_from_anywhere():
    html = html_of(made_up.engines(), made_up.ablation(), outcomes=LADDER)
    for tag, values in Shape(html).tags:
        for name in ("src", "href", "action", "data", "poster", "srcset", "xlink:href"):
            assert not values.get(name) or values[name].startswith(("#", "data:image/png")), (tag, values)
        assert "style" not in values, "the policy refuses style attributes"
        assert not [name for name in values if name.startswith("on")]
    assert "url(" not in html
    assert "@import" not in html
    assert "default-src &#39;none&#39;" in html or "default-src 'none'" in html


def test_headlines_are_ratios_with_their_intervals_in_words():
    html = section(html_of(made_up.engines()), "summary")
    comparison = next(c for c in made_up.engines().comparisons if (c.engine, c.against) == ("rocm-sd", "stock"))
    assert f"rocm-sd is {comparison.ratio:.2f} times as fast as stock, one picture." in html
    assert f"95% interval {comparison.low:.2f} to {comparison.high:.2f}." in html
    assert "Weights are random" in html
    assert "2.13.0" in html


def few_turns(record):
    """The same with seven turns, one fewer than an interval of 95% is drawn from."""
    return replace(record, measurements=tuple(replace(m, ms=m.ms[:7]) for m in record.measurements))


def test_extremes_of_few_turns_are_not_called_an_interval_of_95_percent():
    html = section(html_of(few_turns(made_up.engines())), "summary")
    assert "95% interval" not in html
    assert "Extremes of fewer than eight turns: " in html
    assert "Extremes of" not in section(html_of(made_up.engines()), "summary")
    for name, record in (("speed", made_up.engines()), ("ablation", made_up.ablation())):
        shown = section(html_of(few_turns(record)), name)
        assert ">interval</th>" in shown
        assert "95% interval" not in shown
        assert INTERVALS in shown
    assert "intervals are 95%" not in html_of()


def test_a_difference_inside_the_spread_is_called_none():
    record = made_up.engines(batches=(1,))
    ours = replace(record.comparisons[2], ratio=1.01, low=0.98, high=1.04, verdict="no difference")
    html = html_of(replace(record, comparisons=(ours,)))
    assert "No difference between rocm-sd and stock beyond the spread, one picture." in html
    assert "as fast as stock, one" not in html
    assert "headline undecided" in html


def test_slower_is_said_and_an_interval_near_one_has_three_places():
    record = made_up.engines(batches=(1,))
    ours = replace(record.comparisons[2], ratio=0.91, low=0.90, high=0.92, verdict="slower")
    beside = replace(ours, ratio=1.011, low=1.0032, high=1.021, verdict="faster")
    html = html_of(replace(record, comparisons=(ours,)))
    assert "rocm-sd is slower than stock: 0.91 times its speed, one picture." in html
    assert 'class="headline slower"' in html
    assert "95% interval 1.003 to 1.021." in html_of(replace(record, comparisons=(beside,)))


def test_a_wrong_result_has_a_reason_and_no_speed():
    html = section(html_of(made_up.engines()), "speed")
    assert "xformers: its latents are 9 times as far from float32 as stock&#39;s." in html
    row = re.search(r"<tr><th scope=\"row\">xformers</th>.*?</tr>", html)
    assert row
    assert re.findall(r'<td class="right">([^<]+)</td>', row[0]) == []


def test_every_figure_has_its_table_and_the_command_that_repeats_it():
    html = html_of(made_up.engines(), made_up.ablation(), outcomes=LADDER)
    for name, command in (
        ("speed", "rocm-sd bench sd15-512 --batch 1,8"),
        ("ablation", "rocm-sd bench sd15-512 --ablation"),
        ("memory", "rocm-sd bench sd15-512 --batch 1,8"),
        ("ladder", "rocm-sd verify geglu --arch gfx1100,gfx942 --json &gt; ladder.json"),
    ):
        shown = section(html, name)
        assert f"<code>{command}</code>" in shown
        assert shown.count("<table>") == shown.count("<figure>") - ("What failed" in shown)
    assert 'class="chart"' in section(html, "ablation")


def test_ablation_rows_are_compared_with_the_row_above():
    html = section(html_of(made_up.ablation()), "ablation")
    row = re.search(r"<tr><th scope=\"row\">channels-last</th>(.*?)</tr>", html)
    assert row
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", row[1])
    assert cells[0] == "1401"
    assert cells[1] == "1.21"
    assert "GroupNorm: 1405 ms · no difference" in html


@pytest.mark.parametrize("name", SECTIONS)
def test_what_has_no_data_is_a_sentence(name):
    html = section(html_of(), name)
    assert 'class="missing"' in html
    assert "<figure" not in html
    assert "Type: rocm-sd" in html or name == "memory"


def test_an_engine_beside_the_ablation_is_no_row_of_it():
    html = section(html_of(made_up.ablation()), "ablation")
    row = re.search(r"<tr><th scope=\"row\">compile</th>(.*?)</tr>", html)
    assert row
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", row[1])
    # A time, and how it stands to the first row; nothing about the row above, which it does not build on.
    assert cells[:4] == ["407", "", "", "4.16"]
    assert "step graph: 281 ms · 5.10" in html
    assert "compile: 407 ms" in html
    assert "compile: 407 ms ·" not in html
    # One bar, from zero: no other stands at its end for what was gained or lost.
    assert len(re.findall(r"<title>step graph: 281 ms", html)) == 2
    assert len(re.findall(r"<title>compile: 407 ms", html)) == 1
    assert "compile is no such row" in html


def test_the_card_s_own_time_has_a_waterfall_where_it_was_measured():
    record = made_up.ablation()
    without = section(html_of(record), "ablation")
    assert "own time" not in without
    assert "card ms" not in without
    card = {"stock": 400.0, "channels-last": 320.0, "GroupNorm": 250.0, "GEGLU": 260.0, "compile": 300.0}
    measured = tuple(replace(m, card_ms=card.get(m.engine) if m.batch == 1 else None) for m in record.measurements)
    html = section(html_of(replace(record, measurements=measured)), "ablation")
    assert html.count("<figure") == without.count("<figure") + 1, "batch 8 has none"
    assert "The card&#39;s own time: sd15-512, batch 1, on Test Card" in html
    assert "torch.profiler" in html
    drawn = html.split("The card&#39;s own time: sd15-512, batch 1", maxsplit=1)[1]
    assert "channels-last: 320 ms · 1.25" in drawn
    row = re.search(r"<tr><th scope=\"row\">GroupNorm</th>(.*?)</tr>", drawn)
    assert row
    assert re.findall(r"<td[^>]*>([^<]*)</td>", row[1])[:3] == ["250", "1.28", "1.60"]
    # A row for which it is not known is not drawn, and compile has no row above it.
    assert "step graph" not in drawn.split("</figure>")[0]
    assert "compile: 300 ms ·" not in drawn


def test_an_interrupted_run_says_so():
    assert "The run was interrupted; this is what it has." in html_of(made_up.engines(complete=False))


def test_registers_lds_and_occupancy_per_gfx():
    html = section(html_of(outcomes=LADDER), "ladder")
    assert "gfx1100, Radeon RX 7900 XTX" in html
    row = re.search(r"gfx1100, Radeon.*?<tr><th scope=\"row\">geglu</th>(.*?)</tr>", html, re.DOTALL)
    assert row
    assert re.findall(r"<td[^>]*>([^<]*)</td>", row[1])[:5] == ["1 2 3 · ·", "96", "512", "8", "50%"]
    assert "1 2 3 FAILED · ·" in html
    assert "geglu on gfx942, compiled: 3 spills" in html


def test_what_is_modelled_says_so_in_every_row():
    rows = [{"arch": "gfx942", "ms": 210.3, "deviation": {"as_used": -3.0}}, {"arch": "gfx1100", "ms": 900.0}]
    html = section(html_of(made_up.engines(extra={"projection": rows})), "projection")
    assert "Modelled, not measured" in html
    assert html.count("<td>modelled</td>") == 2
    assert "-3.00% on the card that was timed" in html


def test_a_workload_that_was_counted_is_projected():
    html = section(html_of(made_up.engines()), "projection")
    assert html.count("<td>modelled</td>") == 8
    assert html.count("<td>shipped</td>") == html.count("<td>every</td>") == 4
    for card in ("gfx942", "gfx1100", "gfx1200", "gfx1201"):
        assert card in html


def test_memory_over_time_keeps_its_peak():
    points = [[n / 100, 1000.0] for n in range(5000)]
    points[2345][1] = 1777.0
    html = section(html_of(made_up.engines(extra={"memory_over_time": points})), "memory")
    assert "highest 1777 MiB" in html
    assert html.count('class="trace ours"') < 500


@pytest.mark.parametrize("extra", [{"memory_over_time": 3}, {"memory_over_time": [["a", 1]]}, {"projection": "soon"}])
def test_extras_of_another_shape_are_ignored(extra):
    assert html_of(made_up.engines(extra=extra))


def test_ops_stand_under_the_roof_of_their_card(tmp_path):
    made_up.op().save(tmp_path / "op.json")
    inputs = read([tmp_path / "op.json", *sorted((ROOT / "benchmarks/ops-h200").glob("*.json"))])
    html = section(render(page(inputs)), "roofline")
    assert "float16 and bfloat16 on NVIDIA H200" in html
    assert "Roof: H200 SXM by the table of architectures, 989 TFLOP/s and 4800 GB/s." in html
    rows = sum(len(json.loads(f.read_text())["rows"]) for f in (ROOT / "benchmarks/ops-h200").glob("*.json"))
    assert html.count('class="dot ours"') > 0.8 * rows
    assert re.search(r"conv2d</th><td>2x320x64x64 to 4, 3x3, bias add residual, float16</td><td>triton \(exact\)", html)


def test_a_hostile_record_is_text_and_nothing_else():
    record = made_up.engines(batches=(1,), command=SPITE, notes=(SPITE,), extra={"projection": [{SPITE: SPITE}]})
    spiteful = replace(
        record,
        workload=replace(record.workload, name=SPITE, weights=SPITE, scheduler=SPITE),
        machine=replace(record.machine, device=SPITE, system=SPITE, versions={SPITE: SPITE}),
        measurements=tuple(replace(m, engine=SPITE, version=SPITE, notes=(SPITE,)) for m in record.measurements[:1]),
    )
    outcome = Outcome(SPITE, SPITE, "compiled", "failed", SPITE)
    html = html_of(spiteful, outcomes=[outcome])
    assert "<script>alert" not in html
    assert "<img src=x" not in html
    shape = Shape(html)
    assert [tag for tag, _ in shape.tags].count("script") == 1
    assert [tag for tag, _ in shape.tags].count("img") == 0
    assert shape.open == []
    assert shape.wrong == []


def test_of_a_picture_only_its_pixels_and_its_prompt_are_published(tmp_path):
    text = PngInfo()
    text.add_text("prompt", "a frog")
    text.add_text("Author", "somebody")
    path = tmp_path / "p.png"
    Image.fromarray(np.full((4, 6, 3), 7, np.uint8)).save(path, pnginfo=text)
    picture = read_picture(path)
    assert (picture.caption, picture.width, picture.height) == ("a frog", 6, 4)
    html = html_of(given=[picture])
    assert "somebody" not in html
    assert picture.data in html
    with Image.open(io.BytesIO(base64.b64decode(picture.data.split(",")[1]))) as published:
        assert published.info == {}
        assert (np.asarray(published) == 7).all()


@pytest.mark.parametrize("content", [None, b"", b"<svg/>", b"\x89PNG\r\n\x1a\n broken"])
def test_a_broken_picture_is_named(tmp_path, content):
    path = tmp_path / "p.png"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UnreadablePicture) as failed:
        read_picture(path)
    assert str(path) in failed.value.message


def test_without_jinja2_the_error_says_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingDependency) as failed:
        html_of()
    assert failed.value.hint == "Type: pip install 'rocm-sd[report]'"
