"""Automatic1111: an extension whose folder holds no logic; all of it lies here. Importable without the host.

`register()` is what the extension's script calls. It looks at the host first, and imports the rest only where it can
run.
"""

from __future__ import annotations

from typing import Any

__all__ = ["register"]


def register() -> Any:
    """The class of the host's script, or of one that shows why there is none; None where not even that is possible.

    Never raises: whatever goes wrong here, the host starts as it would without the extension.
    """
    from rocm_sd.integrations.a1111 import host, messages  # noqa: PLC0415 -- nothing heavy before it is asked for

    try:
        reason = host.why_not()
        if reason is None:
            from rocm_sd.integrations.a1111 import script  # noqa: PLC0415 -- needs torch

            return script.hook_in()
    except Exception as error:  # noqa: BLE001 -- the host must start
        reason = f"it could not be set up ({type(error).__name__}: {error}). The host runs as without it."
    messages.say(reason)
    return messages.notice_class(reason)
