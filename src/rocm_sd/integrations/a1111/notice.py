"""A panel that says why the optimisation is not there. It needs nothing of the host but scripts and gradio."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from rocm_sd.integrations.a1111 import messages

__all__ = ["TITLE", "script_class"]

TITLE = "ROCm SD Optimization"


def script_class(sentence: str) -> Any:
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
                gradio.HTML(messages.as_html([sentence]))
            return []

    return ROCmSDNotice
