"""The pictures of docs/assets that show a page, in a headless Chromium: made anew when a page has another look.

python tools/screenshots.py                      writes docs/assets/report-light.png and report-dark.png
python tools/screenshots.py --all --out FOLDER   besides these the whole report, and the first page of a built site:
                                                 wide and as on a phone, light and dark, to be looked at
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests/bench/report"), str(ROOT / "tools")]

# The driver of Chromium lies with the tests.
import chromium  # noqa: E402

from rocm_sd.bench import report  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main", "of_the_report"]

DESK, PHONE = 1280, 390
TALL = 1250
SHADES = {"light": False, "dark": True}


def of_the_report(folder: Path) -> Path:
    """The page of the recorded runs."""
    page = folder / "report.html"
    page.write_text(report.render(report.page(report.read([ROOT / "benchmarks"]))), encoding="utf-8")
    return page


def _shown(browser: chromium.Chromium, page: Path, out: Path, *, whole: bool) -> None:
    for place, width, height in (("wide", DESK, TALL), ("phone", PHONE, 844)):
        for shade, dark in SHADES.items():
            browser.show(page, width=width, height=height, dark=dark)
            browser.screenshot(out / f"{page.stem}-{place}-{shade}.png", whole=whole)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="also the pages that no document shows")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/assets")
    asked = parser.parse_args(arguments)
    program = chromium.find()
    if program is None:
        sys.exit("error: there is no Chromium. Install one (apt install chromium), or name it: CHROMIUM=/path/to/it")
    asked.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as kept, chromium.Chromium(program, Path(kept) / "profile") as browser:
        browser.send("Emulation.setScrollbarsHidden", hidden=True)
        page = of_the_report(Path(kept))
        for shade, dark in SHADES.items():
            browser.show(page, width=DESK, height=TALL, dark=dark)
            browser.screenshot(asked.out / f"report-{shade}.png")
        if asked.all:
            _shown(browser, page, asked.out, whole=True)
            for built in filter(Path.is_file, (ROOT / "site/index.html",)):
                _shown(browser, built, asked.out, whole=False)


if __name__ == "__main__":
    main()
