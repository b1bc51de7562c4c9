"""The site as it is built: read from a folder, in a real Chromium."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import docs_site
from bench.report import chromium

pytest.importorskip("material", reason="the theme of the site")
pytest.importorskip("mkdocstrings", reason="it writes the API reference")

from mkdocs.commands.build import build
from mkdocs.config import load_config

ROOT = Path(__file__).parents[2]
PROGRAM = chromium.find()
PHONE, DESK = 390, 1280
SEARCH = """
    document.querySelector('[data-md-toggle=search]').click();
    const field = document.querySelector('.md-search__input');
    field.focus();
    field.value = '%s';
    field.dispatchEvent(new Event('keyup', {bubbles: true}));
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True)
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if PROGRAM is None:
        pytest.skip("no Chromium: set CHROMIUM, or install one (apt install chromium)")
    with chromium.Chromium(PROGRAM, tmp_path_factory.mktemp("chromium")) as started:
        yield started


def test_the_report_of_the_recorded_runs_is_part_of_the_site(site):
    report = (site / docs_site.RECORDED_RUNS).read_text(encoding="utf-8")
    assert "sd15-512 on NVIDIA H200" in report
    home = (site / "index.html").read_text(encoding="utf-8")
    assert home.count(f'href="{docs_site.RECORDED_RUNS}"') >= 2  # in the text, and in the navigation


def test_pages_ask_no_other_host_for_anything(site, browser):
    browser.show(site / "index.html", width=DESK)
    assert browser.complaints() == []
    assert [url for url in browser.requests() if not url.startswith(("file://", "data:"))] == []


def found(browser, word: str, seconds: float = 20.0) -> list[str]:
    browser.value(SEARCH % word)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        links = browser.value("[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)")
        if links:
            return links
        time.sleep(0.1)
    return []


def test_search_works_in_a_folder_on_disk(site, browser):
    browser.show(site / "index.html", width=DESK)
    assert any("memory.html" in link for link in found(browser, "seams"))
    assert browser.complaints() == []


def test_without_the_frame_a_browser_refuses_the_search(site, browser):
    """So that the test above cannot pass for nothing."""
    page = site / "without-frame.html"
    text = (site / "index.html").read_text(encoding="utf-8")
    page.write_text(text.replace('<script src="javascripts/iframe-worker.js"></script>', ""), encoding="utf-8")
    browser.show(page, width=DESK)
    assert found(browser, "seams", seconds=3) == []


@pytest.mark.parametrize("page", ["index", "comfyui", "performance-guide", "gpus", "cli", "benchmarks"])
def test_no_page_scrolls_sideways_on_a_phone(site, browser, page):
    browser.show(site / f"{page}.html", width=PHONE)
    assert browser.value("document.documentElement.scrollWidth") <= PHONE
