"""A headless Chromium, driven by the DevTools protocol over a pair of pipes: no package and no port is needed.

CHROMIUM names the program; without it, the usual names are looked for in PATH.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

# Chromium reads commands from descriptor 3 and writes to 4. The copies are made high first: either may be 3 or 4.
_LAUNCH = """
import fcntl, os, sys
copies = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 20) for number in sys.argv[1:3]]
for target, copy in zip((3, 4), copies):
    os.dup2(copy, target)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find() -> str | None:
    named = os.environ.get("CHROMIUM")
    return named or next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None
    )


class Chromium:
    """`with Chromium(path, folder) as browser:`; everything it keeps is in the folder."""

    def __init__(self, program: str, folder: Path, timeout: float = 60.0) -> None:
        self.timeout = timeout
        self.events: list[dict[str, Any]] = []
        self._number, self._pending = 0, b""
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        for ours in (self._in, self._out):
            fcntl.fcntl(ours, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
        options = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe",
            f"--user-data-dir={folder}", "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, str(theirs_in), str(theirs_out), program, *options],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)

    def __enter__(self):
        try:
            target = self.send("Target.createTarget", url="about:blank")["targetId"]
            self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.send(f"{domain}.enable")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)

    session: str | None = None

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self.session and not method.startswith("Target."):
            message["sessionId"] = self.session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + self.timeout
        while True:
            answer = self._message(until)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _message(self, until: float) -> dict[str, Any]:
        """The next one; those that answer nothing are kept as events."""
        while b"\0" not in self._pending:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            assert ready, "Chromium did not answer in time"
            more = os.read(self._in, 1 << 20)
            assert more, "Chromium has ended"
            self._pending += more
        raw, self._pending = self._pending.split(b"\0", 1)
        message: dict[str, Any] = json.loads(raw)
        if "method" in message:
            self.events.append(message)
        return message

    def show(self, page: Path, *, width: int, height: int = 900, dark: bool = False, scale: float = 1.0) -> None:
        self.events.clear()
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=scheme)
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        self.send("Page.navigate", url=page.resolve().as_uri())
        until = time.monotonic() + self.timeout
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._message(until)

    def value(self, expression: str) -> Any:
        """Of a JavaScript expression in the page; the page's own policy does not apply to it."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def complaints(self) -> list[str]:
        """Everything in the console: errors, warnings, what a policy refused, what a script threw."""
        return [
            json.dumps(event["params"])
            for event in self.events
            if event["method"] in {"Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"}
        ]

    def requests(self) -> list[str]:
        return [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        picture = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture["data"]))
