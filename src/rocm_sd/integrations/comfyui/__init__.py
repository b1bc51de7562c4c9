"""Nodes for ComfyUI, category "ROCm Optimizations". The host imports these three names from its custom_nodes folder."""

from __future__ import annotations

from pathlib import Path

from rocm_sd.integrations.comfyui.nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS", "WEB_DIRECTORY"]

# The text of a report is put on the canvas by a small script.
WEB_DIRECTORY = str(Path(__file__).parent / "web")
