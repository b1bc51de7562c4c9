"""Whether the hub can be reached: asked once before a model is loaded, in place of its library's retries for 23 s."""

from __future__ import annotations

import logging
import socket
import warnings
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from huggingface_hub import constants

from rocm_sd.errors import first_line

__all__ = ["endpoint", "hush_hub", "why_unreachable"]

_SECONDS = 5


def endpoint() -> str:
    return str(constants.ENDPOINT)


def why_unreachable() -> str | None:
    """In words; None where it can be reached, or where a proxy stands between and only a request could tell."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    address = urlsplit(endpoint())
    host = address.hostname or ""
    if address.scheme in getproxies() and not proxy_bypass(host):
        return None
    try:
        port = address.port or {"http": 80}.get(address.scheme, 443)
        with socket.create_connection((host, port), timeout=_SECONDS):
            return None
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or first_line(error)


def hush_hub() -> None:
    """No retries, advice and deprecations on a terminal: an error says what went wrong. Bars of downloads stay."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="huggingface_hub")
