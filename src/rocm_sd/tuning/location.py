"""Where the user's database of measurements is."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from rocm_sd import settings

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["default_path"]


def default_path() -> Path:
    """Where the user's database is, or will be: in the folder of ROCM_SD_CACHE, else of the system's caches."""
    return _path(settings.current().cache_dir)


@lru_cache(maxsize=8)
def _path(chosen: Path | None) -> Path:
    if chosen is None:
        import platformdirs  # noqa: PLC0415 -- needed here alone

        chosen = platformdirs.user_cache_path("rocm-sd", appauthor=False)
    return chosen / "tuning.sqlite3"
