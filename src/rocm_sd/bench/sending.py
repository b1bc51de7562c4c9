"""Where the file of a contribution goes: one place, which every page, the report and the command name in these words.

PLACE           in words; PAGE has how, for who has no address
repository()    the repository's address, as pip or git know it of this copy; None where neither does
"""

from __future__ import annotations

import json
import re
import subprocess
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from importlib.metadata import Distribution

__all__ = ["PAGE", "PLACE", "TEMPLATE", "TITLE", "form", "is_github", "of_remote", "repository", "ways", "web_address"]

TEMPLATE, TITLE = "card_report.yml", "Results from a card"
PLACE = f'an issue of the kind "{TITLE}"'
PAGE = "docs/contribute.md#send-it"
_CALLED = ("repository", "source", "homepage")
# Whoever works on a fork has the project as "upstream".
_REMOTES = ("upstream", "origin")
_CHECKOUT = Path(__file__).parents[3]
_LIKE_SSH = re.compile(r"(?:[\w.-]+@)?(?P<host>[\w-]+\.[\w.-]+):(?P<path>[^/].*)")
_GIT_WAITS_S = 10.0


def repository(package: str = "rocm-sd", checkout: Path = _CHECKOUT) -> str | None:
    """Of `project.urls`; else where pip had it from; else of the checkout's remote."""
    try:
        known = distribution(package)
    except PackageNotFoundError:
        return of_remote(checkout)
    return _of_metadata(known) or _of_installation(known) or of_remote(checkout)


def _of_metadata(known: Distribution) -> str | None:
    given = known.metadata.get_all("Project-URL") or []
    urls = {name.strip().lower(): url.strip() for name, _, url in (each.partition(",") for each in given)}
    return next((urls[name].rstrip("/") for name in _CALLED if urls.get(name)), None)


def _of_installation(known: Distribution) -> str | None:
    """pip writes down the address or the folder that it was asked for (PEP 610)."""
    try:
        asked = json.loads(known.read_text("direct_url.json") or "{}")
    except ValueError:
        return None
    url = str(asked.get("url", ""))
    if "vcs_info" in asked:
        return web_address(url)
    return of_remote(Path(unquote(urlsplit(url).path))) if url.startswith("file:") else None


def of_remote(checkout: Path) -> str | None:
    """The web address of what the checkout was cloned from."""
    if not (checkout / ".git").exists():
        return None
    for remote in _REMOTES:
        asked = ["git", "-C", str(checkout), "config", "--get", f"remote.{remote}.url"]
        try:
            answer = subprocess.run(asked, capture_output=True, text=True, timeout=_GIT_WAITS_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        found = web_address(answer.stdout.strip())
        if found is not None:
            return found
    return None


def web_address(remote: str) -> str | None:
    """Of what git calls a remote, without names and passwords; None of a folder."""
    like_ssh = _LIKE_SSH.fullmatch(remote)
    if like_ssh is not None:
        host, path = like_ssh["host"], like_ssh["path"]
    else:
        parts = urlsplit(remote.removeprefix("git+"))
        if parts.scheme not in {"http", "https", "ssh", "git"} or not parts.hostname:
            return None
        host, path = parts.hostname, parts.path
    path = path.strip("/").removesuffix(".git")
    return f"https://{host}/{path}" if path else None


def form(address: str) -> str:
    """Where such an issue is begun; elsewhere than on GitHub the forms have addresses of other shapes."""
    return f"{address}/issues/new?template={TEMPLATE}" if is_github(address) else address


def is_github(address: str) -> bool:
    return (urlsplit(address).hostname or "").startswith("github.")


def ways(arch: str, address: str | None) -> tuple[str, str]:
    """Two, as sentences: either is enough."""
    where = form(address) if address else f"in the repository that this copy is from ({PAGE})"
    place = address or "that repository"
    return (
        f"attach it to {PLACE}: {where}",
        f"or open a pull request that puts it into contributions/{arch}/ of {place}",
    )
