"""A real ComfyUI server without a screen, from the folder in ROCM_SD_COMFYUI, spoken to over HTTP and websocket.

The host's folder is not written to: models, nodes, pictures and settings lie in a base directory of the test.
"""

from __future__ import annotations

import base64
import io
import json
import os
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

HOST = os.environ.get("ROCM_SD_COMFYUI", "")
LAUNCHER = Path(__file__).with_name("launch_comfyui.py")
START_S, PROMPT_S = 180, 300


def host_environment():
    # One thread keeps pictures equal from run to run; without bytecode the host's folder stays as it is.
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Failed(AssertionError):
    """The host refused a prompt, a node failed, or the server is gone; with the end of its log."""


class Server:
    def __init__(self, base, *arguments, environment=()):
        self.base = base
        self.port = free_port()
        self.log = base / "server.log"
        for folder in ("custom_nodes", "models/checkpoints", "input", "output", "user", "temp"):
            (base / folder).mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(LAUNCHER), HOST, "--cpu", "--port", str(self.port)]
        command += ["--base-directory", str(base), "--output-directory", str(base / "output")]
        command += ["--database-url", "sqlite:///:memory:", "--disable-api-nodes", *arguments]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=host_environment() | dict(environment),
                cwd=base,
            )

    def wait_until_ready(self):
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            try:
                return self.get("/system_stats")
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.3)
        raise Failed(f"The server did not start.\n{self.log_end()}")

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def log_end(self, lines=40):
        text = self.log.read_text(errors="replace").replace("\r", "\n")
        return "\n".join(text.splitlines()[-lines:])

    def get(self, path, **query):
        address = f"http://127.0.0.1:{self.port}{path}"
        if query:
            address += "?" + urllib.parse.urlencode(query)
        with urllib.request.urlopen(address, timeout=60) as answer:
            body = answer.read()
        return json.loads(body) if "json" in answer.headers.get("Content-Type", "") else body

    def post(self, path, data):
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(data).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                body = answer.read()
        except urllib.error.HTTPError as error:
            raise Failed(f"{path}: {error.read().decode()}\n{self.log_end()}") from error
        return json.loads(body) if body else {}

    def queue(self, graph, client_id=None):
        answer = self.post("/prompt", {"prompt": graph} | ({"client_id": client_id} if client_id else {}))
        assert not answer["node_errors"], answer["node_errors"]
        return answer["prompt_id"]

    def finished(self, prompt_id):
        """The history entry of a prompt that has run, well or not."""
        end = time.monotonic() + PROMPT_S
        while time.monotonic() < end:
            entry = self.get(f"/history/{prompt_id}").get(prompt_id)
            if entry:
                return entry
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        raise Failed(f"The prompt {prompt_id} did not end.\n{self.log_end()}")

    def run(self, graph):
        """Queue the graph and wait: the outputs by node id; a node that failed raises with the host's words."""
        entry = self.finished(self.queue(graph))
        if entry["status"]["status_str"] != "success":
            raise Failed(f"{json.dumps(entry['status'], indent=1)}\n{self.log_end()}")
        return entry["outputs"]

    def pictures(self, outputs):
        """Every saved picture of the outputs as uint8 [H, W, 3], fetched as the UI fetches it."""
        found = []
        for output in outputs.values():
            for image in output.get("images", ()):
                with Image.open(io.BytesIO(self.get("/view", **image))) as opened:
                    found.append(np.asarray(opened.convert("RGB")))
        return found

    def draw(self, graph):
        found = self.pictures(self.run(graph))
        if not found:
            raise Failed("The host has answered from its cache: queue another graph in between.")
        (picture,) = found
        return picture

    def wait_for_empty_queue(self):
        end = time.monotonic() + PROMPT_S
        while time.monotonic() < end:
            queue = self.get("/queue")
            if not queue["queue_running"] and not queue["queue_pending"]:
                return
            time.sleep(0.1)
        raise Failed(f"The queue did not empty: {self.get('/queue')}\n{self.log_end()}")


@contextmanager
def running(base, *arguments, environment=()):
    server = Server(base, *arguments, environment=environment)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


class Events:
    """The host's websocket, read only: what the UI hears. Text messages as dictionaries, pictures as bytes."""

    def __init__(self, server):
        self.client_id = uuid.uuid4().hex
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=PROMPT_S)
        key = base64.b64encode(os.urandom(16)).decode()
        self.socket.sendall(
            f"GET /ws?clientId={self.client_id} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += self._exactly(1)
        assert b" 101 " in head.split(b"\r\n", 1)[0], head

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def _exactly(self, count):
        data = b""
        while len(data) < count:
            more = self.socket.recv(count - len(data))
            if not more:
                raise Failed("The server closed the websocket.")
            data += more
        return data

    def next(self):
        message = b""
        while True:
            first, second = self._exactly(2)
            length = second & 0x7F  # a server does not mask
            if length == 126:
                (length,) = struct.unpack("!H", self._exactly(2))
            elif length == 127:
                (length,) = struct.unpack("!Q", self._exactly(8))
            payload, kind = self._exactly(length), first & 0x0F
            if kind in {8, 9, 10}:  # close, ping, pong
                continue
            message += payload
            if first & 0x80:
                return json.loads(message) if message[:1] == b"{" else message

    def until(self, prompt_id):
        """All that is heard of a prompt, up to its end."""
        heard = []
        while True:
            event = self.next()
            heard.append(event)
            if isinstance(event, dict) and event.get("data", {}).get("prompt_id") == prompt_id:
                ended = event["type"] in {"execution_error", "execution_interrupted", "execution_success"}
                if ended or (event["type"] == "executing" and event["data"]["node"] is None):
                    return heard
