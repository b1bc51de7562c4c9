"""A server on loopback that speaks OpenAI's chat completions, and says what a test has written.

    with scripted(["first answer", Status(429), "second"]) as server:
        ...                     # server.url ends in /v1; server.asked has the body of each question

An answer is text, one of the classes below, or a function that makes one of the question's body.
"""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__ = [
    "Dripping", "Dropped", "Hang", "Huge", "NotJson", "Raw", "Scripted", "Status", "Truncated", "WithoutUsage",
    "completion", "scripted", "words",
]  # fmt: skip


@dataclass(frozen=True)
class Status:
    """An HTTP error. `says`: in its body, which else is `body`; {key} is the key that the question came with."""

    code: int
    says: str = ""
    body: object = None
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Truncated:
    """The answer ends where its tokens did."""

    text: str


@dataclass(frozen=True)
class WithoutUsage:
    text: str


@dataclass(frozen=True)
class Hang:
    """Nothing for so long, and then the end."""

    seconds: float


@dataclass(frozen=True)
class Dropped:
    """The connection is closed; with `midway`, in the middle of an answer."""

    midway: bool = False


@dataclass(frozen=True)
class NotJson:
    text: str = "<html>It works!</html>"


@dataclass(frozen=True)
class Huge:
    """So many bytes of white space and an answer; `server.sent` says how many were taken."""

    size: int = 64 * 2**20
    status: int = 200
    told: bool = True  # by content-length


@dataclass(frozen=True)
class Dripping:
    """A byte every so often, for ever: of white space, or with `head` of what comes before an answer."""

    every_s: float = 0.02
    head: bool = False


@dataclass(frozen=True)
class Raw:
    """These bytes, or these values as JSON."""

    body: object
    headers: tuple[tuple[str, str], ...] = ()


@dataclass
class Scripted:
    """What a test sees of the server; `left` are the answers that nobody has asked for yet."""

    url: str
    left: list
    models: tuple[str, ...]
    asked: list = field(default_factory=list)
    headers: list = field(default_factory=list)
    sent: int = 0
    over: threading.Event = field(default_factory=threading.Event)


def words(text):
    """The tokens that this server counts."""
    return len(text.split())


def completion(text, question, *, finish="stop", usage=True):
    """The body of a normal answer."""
    counted = sum(words(each["content"]) for each in question["messages"])
    made = {
        "id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": question["model"],
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}],
        "usage": {"prompt_tokens": counted, "completion_tokens": words(text), "total_tokens": counted + words(text)},
    }  # fmt: skip
    return made if usage else {name: made[name] for name in made if name != "usage"}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_arguments):
        """Tests have nothing to read there."""

    def do_GET(self):
        if self.path == "/v1/models":
            self.send({"object": "list", "data": [{"id": each, "object": "model"} for each in self.server.said.models]})
        else:
            self.send({"error": {"message": f"no {self.path}"}}, 404)

    def do_POST(self):
        said, question = self.server.said, json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path != "/v1/chat/completions":
            return self.send({"error": {"message": f"no {self.path}"}}, 404)
        said.headers.append({name.lower(): value for name, value in self.headers.items()})
        said.asked.append(question)
        answer = said.left.pop(0) if said.left else Status(400, "the script has no further answer")
        # The other side may be gone, which is what some tests are about.
        with suppress(OSError):
            self.give(answer(question) if callable(answer) else answer, question)
        return None

    def give(self, answer, question):
        if isinstance(answer, str):
            self.send(completion(answer, question))
        elif isinstance(answer, Truncated):
            self.send(completion(answer.text, question, finish="length"))
        elif isinstance(answer, WithoutUsage):
            self.send(completion(answer.text, question, usage=False))
        elif isinstance(answer, NotJson):
            self.send(answer.text.encode())
        elif isinstance(answer, Raw):
            self.send(answer.body, 200, answer.headers)
        elif isinstance(answer, Status):
            key = (self.headers["authorization"] or "").removeprefix("Bearer ")
            # So that trying again takes no time.
            quick = (("retry-after-ms", "1"), *answer.headers)
            own = {"error": {"message": answer.says.replace("{key}", key)}}
            self.send(own if answer.body is None else answer.body, answer.code, quick)
        else:
            self.misbehave(answer, question)

    def misbehave(self, answer, question):
        self.close_connection = True
        if isinstance(answer, Huge):
            self.pour(answer, question)
        elif isinstance(answer, Hang):
            self.server.said.over.wait(answer.seconds)
        elif isinstance(answer, Dripping):
            if not answer.head:
                self.begin(200, (("connection", "close"),))
            while not self.server.said.over.wait(answer.every_s):
                self.wfile.write(b"HTTP/1.1 102 Processing\r\n\r\n" if answer.head else b" ")
        elif answer == Dropped(midway=True):
            self.begin(200, (("content-length", "1000"),))
            self.wfile.write(b'{"choices": [')
        elif answer != Dropped():
            raise TypeError(answer)

    def send(self, body, status=200, headers=()):
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.begin(status, (("content-length", str(len(raw))), *headers))
        self.wfile.write(raw)

    def begin(self, status, headers):
        self.send_response(status)
        for name, value in (("content-type", "application/json"), *headers):
            self.send_header(name, value)
        self.end_headers()

    def pour(self, answer, question):
        end = json.dumps(completion("far too late", question)).encode()
        told = (("content-length", str(answer.size + len(end))),) if answer.told else (("connection", "close"),)
        self.begin(answer.status, (("retry-after-ms", "1"), *told))
        for _ in range(answer.size // 2**16):
            self.wfile.write(b" " * 2**16)
            self.server.said.sent += 2**16
        self.wfile.write(end)


@contextmanager
def scripted(answers, *, models=("scripted",)):
    """Answers are given once each, in their order; what is asked beyond them is refused."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        said = server.said = Scripted(f"http://127.0.0.1:{server.server_address[1]}/v1", list(answers), tuple(models))
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield said
        finally:
            said.over.set()
            server.shutdown()
