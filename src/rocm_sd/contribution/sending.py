"""Where the file of a contribution goes. The repository's address is what the package itself says of it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, metadata

__all__ = ["TEMPLATE", "TITLE", "repository", "ways"]

TEMPLATE, TITLE = "card_report.yml", "Results from a card"
_CALLED = ("repository", "source", "homepage")


def repository(package: str = "rocm-sd") -> str | None:
    """Of `project.urls` in pyproject.toml; None where there is none."""
    try:
        given = metadata(package).get_all("Project-URL") or []
    except PackageNotFoundError:
        return None
    urls = {name.strip().lower(): url.strip() for name, _, url in (each.partition(",") for each in given)}
    return next((urls[name].rstrip("/") for name in _CALLED if urls.get(name)), None)


def ways(arch: str, address: str | None) -> tuple[str, str]:
    """Two, as sentences: either is enough."""
    page = f"{address}/issues/new?template={TEMPLATE}" if address else "the repository's issue page"
    place = address or "the repository"
    return (
        f'attach it to an issue of the kind "{TITLE}": {page}',
        f"or open a pull request that puts it into contributions/{arch}/ of {place}",
    )
