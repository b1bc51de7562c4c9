"""The ASGI app: endpoints, the guard before them, and what becomes of errors."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.exceptions import HTTPException as StarletteHTTPException

from rocm_sd import __version__
from rocm_sd.errors import InvalidOption, RocmSdError, Unsupported
from rocm_sd.integrations.diffusers.batch_memory import TooLargeBatch
from rocm_sd.serve.a1111_api import router as a1111
from rocm_sd.serve.guard import Guard
from rocm_sd.serve.jobs import NotDrawn
from rocm_sd.serve.keys import Keys
from rocm_sd.serve.logs import log
from rocm_sd.serve.metrics import Metrics
from rocm_sd.serve.openai_api import router as openai
from rocm_sd.serve.page_api import router as page
from rocm_sd.serve.pictures import BadPicture, Kept
from rocm_sd.serve.requests import BeyondLimits, Server, server_of
from rocm_sd.serve.service import Losable, Service

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from rocm_sd.serve.config import ServeConfig
    from rocm_sd.serve.service import Drawer

__all__ = ["create_app"]

_PAGE = Path(__file__).parent / "page"
_MEDIA = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Asked for what is wrong, the client is told; all else is the server's.
_ASKED_WRONG = (InvalidOption, Unsupported, BadPicture, BeyondLimits, TooLargeBatch)


def create_app(
    config: ServeConfig,
    drawer: Callable[[ServeConfig, Metrics], Drawer],
    *,
    drain_s: float = 30.0,
    on_failure: Callable[[BaseException], None] = lambda _error: None,
) -> FastAPI:
    """`drawer` loads the models, beside the running server: it answers at once, and is ready when they are.
    `on_failure`: called where they cannot be loaded, or what draws is lost.
    """
    metrics = Metrics()
    server = Server(config, metrics, None if config.keys is None else Keys(config.keys), Kept(config.limits))

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        given = server, partial(drawer, config, metrics), on_failure
        loading = threading.Thread(target=_load, args=given, name="rocm-sd loading", daemon=True)
        loading.start()
        yield
        await asyncio.to_thread(loading.join)
        if server.service is not None:
            await asyncio.to_thread(server.service.close, drain_s)

    app = FastAPI(
        title="rocm-sd", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
        description="Pictures from text: OpenAI's Images API, Automatic1111's API, and a page.",
    )  # fmt: skip
    app.state.server = server
    for router in (openai, a1111, page):
        app.include_router(router)
    _add_own(app)
    _add_errors(app)
    app.add_middleware(Guard, server=server)
    return app


def _load(server: Server, drawer: Callable[[], Drawer], on_failure: Callable[[BaseException], None]) -> None:
    try:
        service = server.service = Service(drawer(), server.config.limits, server.metrics)
    except BaseException as error:  # noqa: BLE001 -- readiness says so, and so does the log
        server.failed = error
        log.critical("no model could be loaded", extra={"error": str(error)})
        on_failure(error)
        return
    log.info("ready", extra={"models": ", ".join(service.drawer.models())})

    def lost(error: BaseException) -> None:
        server.failed = error
        log.critical("nothing can be drawn any more", extra={"error": str(error)})
        service.lose(error)
        on_failure(error)

    if isinstance(service.drawer, Losable):
        service.drawer.when_lost(lost)


def _add_own(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def index() -> FileResponse:
        return FileResponse(_PAGE / "index.html", media_type="text/html")

    @app.get("/page/{name}", include_in_schema=False)
    async def page_part(name: str) -> FileResponse:
        known = {each.name: each for each in _PAGE.iterdir() if each.suffix in _MEDIA}
        if name not in known:
            raise HTTPException(404, "There is no such part of the page.")
        return FileResponse(known[name], media_type=_MEDIA[known[name].suffix])

    @app.get("/pictures/{name}", name="picture", tags=["pictures"], response_class=Response)
    async def picture(request: Request, name: str) -> Response:
        """A picture by the address that was given out for it, for some time."""
        found = server_of(request).kept.get(name)
        if found is None:
            raise HTTPException(404, "There is no such picture any more.")
        return Response(found[0], media_type=found[1], headers={"cache-control": "private, max-age=3600"})

    @app.get("/healthz", tags=["operation"])
    async def healthz() -> dict[str, str]:
        """The process is there."""
        return {"status": "ok"}

    @app.get("/readyz", tags=["operation"])
    async def readyz(request: Request) -> Response:
        """The models are loaded, and requests are taken."""
        server = server_of(request)
        is_ready = server.service is not None and not server.service.draining and server.failed is None
        said = "ready" if is_ready else "failed" if server.failed else "not ready"
        return JSONResponse({"status": said}, 200 if is_ready else 503)

    @app.get("/metrics", tags=["operation"], response_class=Response)
    async def metrics(request: Request) -> Response:
        """For Prometheus."""
        return Response(server_of(request).metrics.text(), media_type="text/plain; version=0.0.4")


def _add_errors(app: FastAPI) -> None:
    async def answer(request: Request, error: Exception) -> JSONResponse:
        status, kind, message, headers = _told(error)
        if request.url.path.startswith("/v1/") and status == 422:
            status = 400  # as their API has it
        if status == 500:
            facts = {"request": request.scope["rocm_sd_request"], "path": request.url.path}
            log.error("failed", extra=facts, exc_info=error)
        said = {"message": message, "type": kind, "code": status, "param": None}
        return JSONResponse({"error": said, "detail": message}, status, headers=headers)

    # What nobody foresaw is answered by the guard, with what every answer has on it.
    for kind in (RocmSdError, NotDrawn, StarletteHTTPException, RequestValidationError):
        app.add_exception_handler(kind, answer)


def _told(error: Exception) -> tuple[int, str, str, Mapping[str, str] | None]:
    """Status, kind, words and headers of the answer to a request that failed so."""
    if isinstance(error, StarletteHTTPException):
        return error.status_code, "invalid_request_error", str(error.detail), error.headers
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:]) or "the request"
        return 422, "invalid_request_error", f"{where}: {first['msg']}.", None
    if isinstance(error, NotDrawn):
        later = None if error.retry_after is None else {"retry-after": str(error.retry_after)}
        return error.status, error.kind, str(error), later
    if isinstance(error, _ASKED_WRONG):
        return 422, "invalid_request_error", str(error), None
    return 500, "server_error", str(error), None
