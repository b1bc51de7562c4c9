"""Messages for the user: each sentence once in the console, and all of them on the script's panel, which says why the
optimisation is not there where it cannot be. Needs nothing of the host but scripts and gradio, and no torch.
"""

from __future__ import annotations

import html
from importlib import import_module
from typing import Any

__all__ = ["TITLE", "as_html", "forget", "latest", "notice_class", "say"]

TITLE = "ROCm SD Optimization"
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


def notice_class(sentence: str) -> Any:
    """A script that shows the sentence; None where the host has no such thing."""
    try:
        scripts = import_module("modules.scripts")
        base: Any = scripts.Script
        always: Any = scripts.AlwaysVisible
        gradio = import_module("gradio")
    except (ImportError, AttributeError):
        return None

    class ROCmSDNotice(base):  # type: ignore[misc]  # the host's class has no types
        def title(self) -> str:
            return TITLE

        def show(self, is_img2img: bool) -> Any:  # noqa: ARG002 -- the host's signature
            return always

        def ui(self, is_img2img: bool) -> list[Any]:  # noqa: ARG002 -- the host's signature
            with gradio.Accordion(f"{TITLE} (off)", open=False):
                gradio.HTML(as_html([sentence]))
            return []

    return ROCmSDNotice
