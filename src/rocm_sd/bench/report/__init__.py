"""One self-contained HTML page from recorded results: `render(page(read(files)))`."""

from __future__ import annotations

from rocm_sd.bench.report.page import page, render
from rocm_sd.bench.report.reading import Inputs, newest, read, read_ladder

__all__ = ["Inputs", "newest", "page", "read", "read_ladder", "render"]
