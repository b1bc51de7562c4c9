"""rocm-sd's nodes for ComfyUI: put here by `rocm-sd install comfyui PATH`, removed by `rocm-sd uninstall comfyui PATH`.

Whatever is missing, the host starts: then there are no nodes, and one line in the console says why.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS", "WEB_DIRECTORY"]

NODE_CLASS_MAPPINGS: dict[str, Any] = {}
NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {}
WEB_DIRECTORY: str | None = None
_LOG = logging.getLogger(__name__)

try:
    from rocm_sd.integrations import comfyui as _nodes

    NODE_CLASS_MAPPINGS |= _nodes.NODE_CLASS_MAPPINGS
    NODE_DISPLAY_NAME_MAPPINGS |= _nodes.NODE_DISPLAY_NAME_MAPPINGS
    if _nodes.WEB_DIRECTORY:
        # The host reads it from this folder on; the files lie in the package.
        WEB_DIRECTORY = str((Path(_nodes.__file__).parent / _nodes.WEB_DIRECTORY).resolve())
except ModuleNotFoundError as _error:
    _LOG.warning(
        'rocm-sd: its nodes are missing, since this Python has no %s. Type: "%s" -m pip install rocm-sd',
        _error.name,
        sys.executable,
    )
except Exception as _error:  # noqa: BLE001 -- the host must start whatever happened
    _LOG.warning("rocm-sd: its nodes are missing (%s: %s). Type: rocm-sd doctor", type(_error).__name__, _error)
else:
    try:
        from rocm_sd.integrations.comfyui import emoji as _emoji

        if _emoji.register():
            NODE_CLASS_MAPPINGS |= _emoji.NODE_CLASS_MAPPINGS
            NODE_DISPLAY_NAME_MAPPINGS |= _emoji.NODE_DISPLAY_NAME_MAPPINGS
    except Exception as _error:  # noqa: BLE001 -- the other nodes do not depend on the small model
        _LOG.warning("rocm-sd: the nodes of emoji-sd are missing (%s: %s).", type(_error).__name__, _error)
