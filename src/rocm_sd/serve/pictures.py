"""Pictures that clients send, read within limits; pictures that they get, with what they were drawn from."""

from __future__ import annotations

import base64
import binascii
import io
import json
import secrets
import threading
import time
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageOps, PngImagePlugin, UnidentifiedImageError

from rocm_sd.errors import RocmSdError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rocm_sd.serve.config import Limits

__all__ = ["FORMATS", "BadPicture", "Kept", "encode", "from_base64", "read"]

FORMATS = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}
_READ = ("PNG", "JPEG", "WEBP")


class BadPicture(RocmSdError):
    """What a client sent cannot be read."""


def read(raw: bytes, limits: Limits) -> Image.Image:
    """The picture of a file; its size is known before a pixel is read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            opened = Image.open(io.BytesIO(raw), formats=_READ)
            if opened.width * opened.height > limits.input_pixels or min(opened.size) < 8:
                wanted = f"from 8x8 to {limits.input_pixels} pixels"
                raise BadPicture(f"A picture of {opened.width}x{opened.height} was sent: it takes {wanted}.")
            opened.load()
            return ImageOps.exif_transpose(opened)
    except (
        UnidentifiedImageError,
        Image.DecompressionBombError,
        Image.DecompressionBombWarning,
        OSError,
        ValueError,
        SyntaxError,
        EOFError,
        ArithmeticError,
        LookupError,
        TypeError,
        MemoryError,
    ) as error:
        raise BadPicture(
            "What was sent cannot be read as a picture.", hint="It takes PNG, JPEG and WebP files."
        ) from error


def from_base64(text: str, limits: Limits) -> Image.Image:
    """Of base64, with or without `data:image/png;base64,` before it. An address is never opened."""
    if text.startswith("data:"):
        text = text.partition(",")[2]
    if "://" in text[:16]:
        raise BadPicture("An address was sent in place of a picture.", hint="Send the picture itself, as base64.")
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadPicture("What was sent is not base64.", hint="Send the picture as base64.") from error
    return read(raw, limits)


def encode(image: Image.Image, kind: str = "png", facts: Mapping[str, Any] | None = None, quality: int = 90) -> bytes:
    """A file of it. `facts`: what it was drawn from, as text inside of a PNG."""
    out = io.BytesIO()
    if kind == "png":
        info = PngImagePlugin.PngInfo()
        if facts is not None:
            info.add_text("parameters", json.dumps(dict(facts), ensure_ascii=True))
        image.save(out, "PNG", pnginfo=info, compress_level=4)
    else:
        image.convert("RGB").save(out, kind.upper(), quality=max(1, quality))
    return out.getvalue()


@dataclass(frozen=True)
class _One:
    raw: bytes
    media: str
    until: float


class Kept:
    """Pictures by a name that nobody guesses, for some time, and bounded in their number and their bytes."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._kept: OrderedDict[str, _One] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def put(self, raw: bytes, kind: str = "png") -> str:
        name = f"{secrets.token_urlsafe(16)}.{kind}"
        limits = self._limits
        with self._lock:
            self._drop_expired()
            self._kept[name] = _One(raw, FORMATS[kind], time.monotonic() + limits.kept_seconds)
            self._bytes += len(raw)
            # The one that just came is given out now, however large it is.
            while len(self._kept) > limits.kept or (self._bytes > limits.kept_bytes and len(self._kept) > 1):
                self._drop_oldest()
        return name

    def get(self, name: str) -> tuple[bytes, str] | None:
        with self._lock:
            self._drop_expired()
            found = self._kept.get(name)
        return None if found is None else (found.raw, found.media)

    def _drop_expired(self) -> None:
        """All are kept for as long, so that the oldest ones are first."""
        while self._kept and time.monotonic() > next(iter(self._kept.values())).until:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._bytes -= len(self._kept.popitem(last=False)[1].raw)
