"""Messages for the user: each sentence once in the console, and all of them on the script's panel."""

from __future__ import annotations

import html

__all__ = ["as_html", "forget", "latest", "say"]

_SAID: dict[str, None] = {}


def say(sentence: str) -> None:
    """Hosts show what is printed; many of them swallow log records."""
    if sentence not in _SAID:
        _SAID[sentence] = None
        print(f"ROCm SD: {sentence}", flush=True)  # noqa: T201 -- the host's console is where its users look


def latest() -> list[str]:
    return list(_SAID)


def forget() -> None:
    _SAID.clear()


def as_html(sentences: list[str]) -> str:
    return "<br>".join(html.escape(sentence) for sentence in sentences)
