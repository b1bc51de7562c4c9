"""How a load test speaks to a server: HTTP by Python's own client, a connection for each request, nothing of ours.

A connection is never used twice: requests are those of many clients, and one that the server closes meanwhile would
look like a request that it lost. No proxy is asked either.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import io
import json
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from PIL import Image, UnidentifiedImageError

from rocm_sd.bench.serving import Seen
from rocm_sd.errors import InvalidOption, RocmSdError
from rocm_sd.plain_json import NotPlain, parsed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

__all__ = [
    "PATIENCE_S", "Answer", "Client", "Model", "NoAnswer", "Refused", "is_here", "models", "read_key", "require_url",
    "said", "seen", "wait_until_ready", "why_no_picture",
]  # fmt: skip

# A server ends a request of its own accord after 600 s, if it is not told otherwise.
PATIENCE_S = 660.0
_CONNECT_S, _SHORT_S, _LOADING_S, _LOOK_S = 10.0, 30.0, 1200.0, 0.2
_MOST_BYTES = 256 * 2**20
_LOCAL = {"localhost", "127.0.0.1", "::1"}
_METRIC = re.compile(r"^(rocm_sd_\w+)(?:\{[^}]*\})? ([0-9.]+(?:e[+-]?[0-9]+)?)$", re.MULTILINE)


class Refused(Exception):
    """There was no connection: nothing was sent."""


class NoAnswer(Exception):
    """What was sent has no answer, or half of one."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Raises NotPlain."""
        return parsed(self.body, most=_MOST_BYTES)


@dataclass(frozen=True)
class Model:
    """A model of the server, and the size that is its own."""

    name: str
    width: int
    height: int


@dataclass(frozen=True)
class Client:
    url: str
    key: str | None = field(default=None, repr=False)

    def connection(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        return kind(parts.hostname or "", parts.port, timeout=_CONNECT_S)

    def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout: float = _SHORT_S,
        through: http.client.HTTPConnection | None = None,
    ) -> Answer:
        """Raises Refused or NoAnswer. `through`: a new connection, which somebody else may close meanwhile."""
        connection = through or self.connection()
        headers = {"accept": "application/json", "connection": "close"}
        headers |= {"authorization": f"Bearer {self.key}"} if self.key else {}
        headers |= {"content-type": "application/json"} if body is not None else {}
        try:
            try:
                connection.connect()
                connection.sock.settimeout(timeout)
            except (OSError, AttributeError) as error:  # it has no socket any more where it was closed meanwhile
                raise Refused(_words(error)) from error
            try:
                sent = None if body is None else json.dumps(body)
                connection.request(method, urlsplit(self.url).path.rstrip("/") + path, sent, headers)
                response = connection.getresponse()
                raw = response.read(_MOST_BYTES + 1)
                whole = {name.lower(): value for name, value in response.getheaders()}
            except (OSError, AttributeError, http.client.HTTPException) as error:
                raise NoAnswer(_words(error)) from error
            wanted = whole.get("content-length", "")
            if wanted.isdecimal() and len(raw) < int(wanted):
                raise NoAnswer("the answer broke off")
            return Answer(response.status, whole, raw)
        finally:
            connection.close()


def _words(error: Exception) -> str:
    """Of a record, which names no host: what happened, and not where."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return "the connection was closed" if isinstance(error, http.client.HTTPException) else type(error).__name__


def require_url(url: str) -> str:
    """The server's address, without a last slash."""
    try:
        parts = urlsplit(url)
        fits = parts.scheme in {"http", "https"} and parts.hostname and (parts.port or 1) > 0
    except ValueError:
        fits = False
    if not fits or not url.isascii() or not url.isprintable() or " " in url or parts.query or parts.fragment:
        raise InvalidOption("--url", url, [], hint="It takes an address such as http://127.0.0.1:7860")
    if parts.username is not None or parts.password is not None:
        # Not repeated: it is a secret.
        hint = "Anybody on the machine sees a command. Put the key into a file, and give --key-file FILE."
        raise InvalidOption("--url", "with a password", [], hint=hint)
    return url.rstrip("/")


def is_here(url: str) -> bool:
    return urlsplit(url).hostname in _LOCAL


def read_key(file: Path) -> str:
    """The API key in the first line of a file."""
    try:
        with file.open(encoding="utf-8") as opened:
            key = opened.readline(4096).strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise InvalidOption("--key-file", str(file), [], hint=f"It cannot be read ({reason}).") from error
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise InvalidOption("--key-file", str(file), [], hint="Its first line is to be the key, and nothing else.")
    return key


def wait_until_ready(client: Client, ended: Callable[[], str | None] | None = None) -> None:
    """Until it has loaded its models. `ended`: why that will never be, of one that was just started: it names its
    address a little before it listens there.
    """
    until = time.monotonic() + _LOADING_S
    while time.monotonic() < until:
        why = ended() if ended else None
        if why is not None:
            raise RocmSdError(f"The server ended before it was ready: {why}", hint="To see it, type: rocm-sd serve")
        try:
            answer = client.ask("GET", "/readyz")
        except (Refused, NoAnswer) as error:
            if ended:
                time.sleep(_LOOK_S)
                continue
            raise RocmSdError(
                f"There is no server at {client.url} ({error}).",
                hint="Type: rocm-sd serve; or leave out --url, and one is started for the run.",
            ) from error
        if answer.status == 200:
            return
        if answer.status != 503:
            raise RocmSdError(
                f"{client.url} is no server of rocm-sd's: it answers {answer.status} when asked whether it is ready.",
                hint="Type: rocm-sd serve",
            )
        if b'"failed"' in answer.body:
            raise RocmSdError(
                f"The server at {client.url} could not load a model.", hint="Its log has why. Start it again."
            )
        time.sleep(_LOOK_S)
    raise RocmSdError(f"The server at {client.url} was not ready in {_LOADING_S / 60:.0f} minutes.")


def said(client: Client, path: str) -> dict[str, Any]:
    """What it answers there, an object; raises RocmSdError."""
    try:
        answer = client.ask("GET", path)
        values = answer.json() if answer.status == 200 else None
    except (Refused, NoAnswer, NotPlain) as error:
        raise RocmSdError(f"The server has no {path}: {error}.") from error
    if answer.status in {401, 403}:
        hint = "Give --key-file FILE, with one of its keys in the first line."
        raise RocmSdError(f"The server does not let this client in ({answer.status}).", hint=hint)
    if not isinstance(values, dict):
        raise RocmSdError(f"{client.url} is no server of rocm-sd's: it has no {path}.", hint="Type: rocm-sd serve")
    return values


def models(client: Client) -> tuple[str, tuple[Model, ...]]:
    """The server's version and its models; the first is drawn where none is named."""
    values = said(client, "/api/info")
    try:
        found = tuple(Model(str(m["name"]), int(m["width"]), int(m["height"])) for m in values["models"])
        return str(values["version"]), found
    except (KeyError, TypeError, ValueError) as error:
        raise RocmSdError(f"{client.url} is no server of rocm-sd's: /api/info is another.") from error


def seen(client: Client) -> Seen:
    """By /metrics; nothing where it cannot be asked."""
    try:
        answer = client.ask("GET", "/metrics")
    except (Refused, NoAnswer):
        return Seen()
    if answer.status != 200:
        return Seen()
    found: dict[str, float] = {}
    for name, value in _METRIC.findall(answer.body.decode("utf-8", "replace")):
        # Of all models together.
        found[name] = found.get(name, 0.0) + float(value)
    # Before its first step a model has no line.
    steps = 0.0 if found else None
    return Seen(
        found.get("rocm_sd_batch_pictures_sum", steps), found.get("rocm_sd_batch_pictures_count", steps),
        found.get("rocm_sd_host_memory_bytes"), found.get("rocm_sd_device_memory_bytes"),
    )  # fmt: skip


def why_no_picture(answer: Answer, width: int, height: int) -> str | None:
    """What is wrong with an answer that should be one PNG of this size as base64."""
    try:
        raw = base64.b64decode(answer.json()["data"][0]["b64_json"], validate=True)
    except (NotPlain, KeyError, IndexError, TypeError, ValueError, binascii.Error):
        return "the answer holds no picture"
    try:
        with Image.open(io.BytesIO(raw), formats=["PNG"]) as image:
            # Before a pixel is read: nothing larger than what was asked for is.
            if image.size != (width, height):
                return f"the picture has {image.width}x{image.height} pixels"
            image.load()
    except (
        UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError, EOFError,
        ArithmeticError, LookupError, TypeError, MemoryError,
    ):  # fmt: skip
        return "the picture cannot be read"
    return None
