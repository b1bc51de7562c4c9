"""A drawer without a model, and a client of an app with it."""

from __future__ import annotations

import base64
import io
import threading
import time
from contextlib import contextmanager

from fastapi.testclient import TestClient
from PIL import Image

from rocm_sd.serve import ServeConfig, create_app
from rocm_sd.serve.service import ModelFacts

__all__ = ["FakeDrawer", "as_base64", "client", "drawn", "png"]


class FakeDrawer:
    """A picture is of one colour, by its seed. `step_s`: of a step; while `held` is set, no step ends."""

    def __init__(self, step_s=0.0, fail=None):
        self.step_s, self.fail = step_s, fail
        self.drawings, self.closed = [], False
        self.held = threading.Event()
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()

    def models(self):
        return {
            "small": ModelFacts("small", 64, 64, 3.0, ("exact", "high")),
            "other": ModelFacts("other", 128, 64, 7.5, ("exact",), ("style",)),
        }

    def draw(self, model, drawing, on_step, stop):
        with self._lock:
            self.drawings.append((model, drawing))
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            for step in range(1, drawing.steps + 1):
                time.sleep(self.step_s)
                while self.held.is_set() and stop() is None:
                    time.sleep(0.002)
                error = stop()
                if error is not None:
                    raise error
                if self.fail is not None and self.fail(drawing, step):
                    raise RuntimeError("the card fell out")
                on_step(step, lambda: Image.new("RGB", (8, 8), "grey"))
            return Image.new("RGB", (drawing.width, drawing.height), (drawing.seed % 256, 0, 0))
        finally:
            with self._lock:
                self.at_once -= 1

    def close(self):
        self.closed = True


@contextmanager
def client(drawer=None, *, raises=True, peer="127.0.0.1", loaded=True, **config):
    """A client of an app that is ready, and its drawer as `.drawer`."""
    drawer = drawer or FakeDrawer()
    given = {"hosts": ("testserver",), **config}
    app = create_app(ServeConfig(**given), lambda _config, _metrics: drawer, drain_s=5)
    with TestClient(app, raise_server_exceptions=raises, client=(peer, 50000)) as made:
        ends = time.monotonic() + 10
        while loaded and made.get("/readyz").status_code != 200 and time.monotonic() < ends:
            time.sleep(0.005)
        made.drawer, made.server = drawer, app.state.server
        yield made


def drawn(text):
    """The picture of base64."""
    return Image.open(io.BytesIO(base64.b64decode(text)))


def png(image):
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def as_base64(image):
    return base64.b64encode(png(image)).decode()
