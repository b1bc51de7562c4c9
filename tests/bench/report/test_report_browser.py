"""The page in a real Chromium: nothing in the console, nothing loaded, light and dark, no sideways scrolling."""

from __future__ import annotations

from pathlib import Path

import chromium
import made_up
import numpy as np
import pytest
from PIL import Image

from rocm_sd.bench.report import page, read, render
from rocm_sd.bench.report.pictures import read as read_picture
from rocm_sd.verify.ladder import Outcome

ROOT = Path(__file__).parents[3]
PROGRAM = chromium.find()
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="no Chromium: set CHROMIUM, or install one (apt install chromium)"
)

PHONE, DESK = 390, 1280


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium.Chromium(PROGRAM, tmp_path_factory.mktemp("chromium")) as started:
        yield started


@pytest.fixture(scope="module")
def full_page(tmp_path_factory) -> Path:
    """Every section with something in it, and names longer than a phone is wide."""
    folder = tmp_path_factory.mktemp("report")
    curve = {"stock": [[0, 1], [1, 9]], "rocm-sd": [[0, 1], [1, 5]]}
    rows = [{"arch": "gfx942", "product": "a product with a rather long name " * 3, "ms": 200.0}]
    long = made_up.engines(
        command="rocm-sd bench " + "x" * 200, notes=("W" * 120,), extra={"memory_over_time": curve, "projection": rows}
    )
    long.save(folder / "engines.json")
    made_up.ablation().save(folder / "ablation.json")
    made_up.op().save(folder / "op.json")
    for ranks in (2, 4, 8):
        made_up.gpus(ranks, f"patch={ranks}").save(folder / f"sd15-512-{ranks}-gpus.json")
    made_up.gpus(2, "W" * 80, why="x" * 200).save(folder / "long-2-gpus.json")
    Image.fromarray(np.full((32, 32, 3), 90, np.uint8)).save(folder / "p.png")
    outcomes = [
        Outcome(
            "a_long_name_of_an_op_" * 3,
            arch,
            "compiled",
            "passed",
            "",
            figures={"vgprs": 9, "lds": 9, "waves_per_simd": 8},
        ).to_dict()
        for arch in ("gfx1100", "gfx942", "gfx1201", "gfx90a", "gfx1030", "gfx1200", "gfx950")
    ]
    picture = read_picture(folder / "p.png")
    inputs = read([*sorted(folder.glob("*.json")), ROOT / "benchmarks/ops-h200"])
    path = folder / "report.html"
    path.write_text(render(page(inputs, outcomes, [picture], [(picture, picture)])), encoding="utf-8")
    return path


def background(browser) -> tuple[int, ...]:
    colour = browser.value("getComputedStyle(document.body).backgroundColor")
    return tuple(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_the_console_is_empty_and_nothing_is_requested(browser, full_page, width):
    browser.show(full_page, width=width)
    assert browser.complaints() == []
    first, *others = browser.requests()
    assert first.startswith("file://")
    assert [url[:40] for url in others if not url.startswith("data:image/png")] == []


def test_the_console_is_watched(browser, tmp_path):
    """A page that complains and asks for something is noticed: without this, the test above could pass for nothing."""
    path = tmp_path / "bad.html"
    path.write_text("<!doctype html><img src='file:///nowhere/at/all.png'><script>throw new Error('seen')</script>")
    browser.show(path, width=DESK)
    assert any("seen" in complaint for complaint in browser.complaints())
    assert any("nowhere" in url for url in browser.requests())


@pytest.mark.parametrize("width", [320, PHONE, 768, DESK])
@pytest.mark.parametrize("opened", [False, True], ids=["folded", "tables open"])
def test_the_page_never_scrolls_sideways(browser, full_page, width, opened):
    browser.show(full_page, width=width)
    if opened:
        browser.value("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    assert browser.value("document.documentElement.scrollWidth") <= width
    # What is wider than the page sits in a box that scrolls by itself, or nothing of it is seen.
    wide = """[...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1
        && !e.closest('.scroll') && !e.closest('pre')).map(e => e.outerHTML.slice(0, 80))"""
    assert browser.value(wide) == []


def test_names_and_values_do_not_meet_on_a_phone(browser, full_page):
    browser.show(full_page, width=PHONE)
    meeting = """[...document.querySelectorAll('#speed .chart, #ablation .chart, #memory .chart')].flatMap(chart => {
        const texts = [...chart.querySelectorAll('.name, .value')].map(e => [e.getBBox(), e.textContent]);
        return texts.flatMap(([a, s], i) => texts.slice(i + 1).filter(([b]) => Math.abs(a.y - b.y) < 4
            && a.x < b.x + b.width && b.x < a.x + a.width).map(([, t]) => s + ' | ' + t)); })"""
    assert browser.value(meeting) == []


def test_light_and_dark_follow_the_system_and_then_the_reader(browser, full_page):
    browser.show(full_page, width=DESK, dark=False)
    browser.value("localStorage.clear()")
    browser.show(full_page, width=DESK, dark=False)
    light = background(browser)
    assert min(light) > 230
    browser.show(full_page, width=DESK, dark=True)
    dark = background(browser)
    assert max(dark) < 40
    assert browser.value("document.getElementById('theme').getAttribute('aria-pressed')") == "true"
    browser.value("document.getElementById('theme').click()")
    assert background(browser) == light
    assert browser.value("document.getElementById('theme').getAttribute('aria-pressed')") == "false"
    browser.show(full_page, width=DESK, dark=True)
    assert background(browser) == light, "the choice is kept"
    browser.value("document.getElementById('theme').click()")
    assert background(browser) == dark
    browser.value("localStorage.clear()")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(
    "selector", ["h1", ".side p", ".figure", ".detail", ".note", "thead th", "pre", ".marked td", ".tag"]
)
def test_text_is_readable(browser, full_page, dark, selector):
    """WCAG AA: the contrast of text with what it stands on is at least 4.5."""
    browser.show(full_page, width=DESK, dark=dark)
    colours = browser.value(f"""(() => {{
        const e = document.querySelector('{selector}');
        let under = e;
        while (getComputedStyle(under).backgroundColor === 'rgba(0, 0, 0, 0)') under = under.parentElement;
        return [getComputedStyle(e).color, getComputedStyle(under).backgroundColor]; }})()""")
    lighter, darker = sorted((luminance(colour) for colour in colours), reverse=True)
    assert (lighter + 0.05) / (darker + 0.05) >= 4.5


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_it_reads_without_its_script(browser, full_page):
    browser.send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.show(full_page, width=DESK)
        browser.send("Emulation.setScriptExecutionDisabled", value=False)
        assert browser.value("document.querySelectorAll('#speed .bar.ours').length") == 2
        assert browser.value("document.getElementById('theme').hidden") is True
    finally:
        browser.send("Emulation.setScriptExecutionDisabled", value=False)
