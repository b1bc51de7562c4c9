"""What stands before every endpoint: who may call, how much may be sent, and what every answer has on it.

Without keys a server is open to this machine alone, and a page on some other site must not be able to use that: calls
by another host name, or from another site's pages, are refused.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import secrets
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from rocm_sd.serve.config import is_loopback
from rocm_sd.serve.logs import log

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from rocm_sd.serve.requests import Server

__all__ = ["Guard"]

_OPEN = re.compile(r"/|/healthz|/readyz|/openapi\.json|/page/[\w.-]+|/pictures/[\w.-]+|/favicon\.ico")
_ID = re.compile(r"[\w-]{1,64}")
_SAFE = {"GET", "HEAD", "OPTIONS"}
_LOCAL = ("localhost", "127.0.0.1", "[::1]")
_TOO_LARGE = "What was sent is larger than this server takes."
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class _Exchange:
    """A request and its answer: how much came, and what every answer has on it."""

    def __init__(self, receive: Receive, send: Send, headers: Headers, most: int) -> None:
        self._receive, self._send, self._left = receive, send, most
        given = headers.get("x-request-id", "")
        self.id = given if _ID.fullmatch(given) else secrets.token_urlsafe(9)
        self.since = time.monotonic()
        self.status = 500
        self.began = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise HTTPException(413, _TOO_LARGE)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.began = message["status"], True
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
            headers.setdefault("cache-control", "no-store")
            headers["x-request-id"] = self.id
        await self._send(message)


class Guard:
    """An ASGI middleware."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self._app, self._server = app, server
        self._inner: ASGIApp = self._let_in
        if origins := list(server.config.origins):
            # Before the key is looked for: a browser asks without it whether it may send the request that has it, and
            # reads no refusal without these headers.
            self._inner = CORSMiddleware(self._let_in, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        exchange = _Exchange(receive, send, headers, self._server.config.limits.body_bytes)
        scope["rocm_sd_request"] = exchange.id
        facts = {"request": exchange.id, "method": scope["method"], "path": scope["path"]}
        try:
            await self._inner(scope, exchange.receive, exchange.send)
        except ClientDisconnect:
            exchange.status = 499
        except Exception as error:
            log.error("failed", extra=facts, exc_info=error)
            if exchange.began:
                raise
            await _answer(exchange.send, 500, self._server.words_of(error), "server_error")
        finally:
            facts |= {"status": exchange.status, "client": scope.get("rocm_sd_client", "")}
            log.info("answered", extra=facts | {"seconds": round(time.monotonic() - exchange.since, 3)})

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope, Headers(scope=scope))
        if refusal is not None:
            await _answer(send, *refusal)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Headers) -> tuple[int, str] | None:
        config = self._server.config
        host, client = headers.get("host", ""), scope.get("client")
        stranger = None if self._server.keys is not None else self._stranger(host, client[0] if client else "")
        if stranger is not None:
            return 403, stranger
        origin = headers.get("origin")
        if origin is not None and scope["method"] not in _SAFE:
            own = _place(origin) == host and host
            if not own and origin not in config.origins:
                return 403, "Pages of other sites may not call this server. Start it with --allow-origin."
        if _length(headers) > config.limits.body_bytes:
            return 413, _TOO_LARGE
        scope["rocm_sd_client"] = client[0] if client else ""
        if self._server.keys is None or _OPEN.fullmatch(scope["path"]):
            return None
        owner = self._server.keys.name_of(_key(headers))
        if owner is None:
            return 401, "An API key is needed: send it as Authorization: Bearer KEY."
        scope["rocm_sd_client"] = owner
        return None

    def _stranger(self, host: str, peer: str) -> str | None:
        """Why a call does not count as one of this machine's own."""
        config = self._server.config
        if not is_loopback(peer):
            # Ray Serve listens where its cluster says, whatever this server was told.
            return "Without API keys this server is open to its own machine alone. Start it with --keys FILE."
        if _name(host) not in {*_LOCAL, config.host, *config.hosts}:
            return "This server does not go by that name. Start it with --allow-host NAME."
        return None


def _name(host: str) -> str:
    """Without the port."""
    return host.rpartition(":")[0] if re.search(r":\d+$", host) else host


def _place(origin: str) -> str:
    """Its host and port, or nothing where it is no address."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _length(headers: Headers) -> int:
    text = headers.get("content-length", "0")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else 0


def _key(headers: Headers) -> str:
    """As Bearer, as x-api-key, or as the password of Basic, which Automatic1111's clients send."""
    kind, _, value = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    if kind.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode("utf-8", "replace").partition(":")[2]
        except (binascii.Error, ValueError):
            return ""
    return headers.get("x-api-key", "")


async def _answer(send: Send, status: int, message: str, kind: str = "refused") -> None:
    body = json.dumps({"error": {"message": message, "type": kind, "code": status}, "detail": message}).encode()
    headers: list[Any] = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
