"""A load test counts right whatever a server does: answers, rejects, fails, loses or dies."""

from __future__ import annotations

import base64
import io
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
import uvicorn
from hypothesis import given
from PIL import Image

from fuzzed_files import broken_bytes
from rocm_sd.bench import report, serving_capacity, serving_load, serving_server, serving_tables
from rocm_sd.bench.records import Machine, UnreadableRecord
from rocm_sd.bench.serving import (
    ANSWERED,
    FAILED,
    LOST,
    OPEN,
    REJECTED,
    MemoryAt,
    Request,
    Seen,
    ServerFacts,
    ServingRecord,
    Setting,
    keep_older,
    percentile,
)
from rocm_sd.bench.serving_http import (
    Answer,
    Client,
    models,
    read_key,
    require_url,
    seen,
    wait_until_ready,
    why_no_picture,
)
from rocm_sd.bench.serving_load import Load, arrivals, first_picture
from rocm_sd.bench.serving_memory import MemoryWatch
from rocm_sd.errors import InvalidOption, RocmSdError
from rocm_sd.serve import create_app
from rocm_sd.serve.config import Limits, ServeConfig
from rocm_sd.serve.service import ModelFacts

SIDE = 64
MACHINE = Machine("Test Card", "gfx1100", 96, 24576, None, "Linux", {"rocm-sd": "0.1.0"})
SETTING = Setting(30.0, "30", 0.5, 2, SIDE, SIDE, "emoji-sd", 2)
PROMPTS = ("a frog", "a dog")


class FakeDrawer:
    """Pictures that take some `seconds`; of some seeds they have the wrong size, or fail."""

    def __init__(self, metrics, seconds=0.02, small=(), failing=()):
        self.metrics, self.seconds, self.small, self.failing = metrics, seconds, small, failing
        self.drawn = 0

    def models(self):
        return {"emoji-sd": ModelFacts("emoji-sd", SIDE, SIDE, 3.0, ("exact",))}

    def draw(self, model, drawing, on_step, stop):  # noqa: ARG002 -- as a Drawer
        until = time.monotonic() + self.seconds
        while (left := until - time.monotonic()) > 0:
            if (error := stop()) is not None:
                raise error
            time.sleep(min(left, 0.05))
        if drawing.seed in self.failing:
            raise RuntimeError("the card is gone")
        self.drawn += 1
        self.metrics.batches.labels(model).observe(2)
        return Image.new("RGB", (32, 32) if drawing.seed in self.small else (drawing.width, drawing.height), "green")

    def close(self):
        pass


@dataclass
class Served:
    client: Client
    app: object
    server: uvicorn.Server

    @property
    def drawer(self) -> FakeDrawer:
        return self.app.state.server.service.drawer

    @property
    def refused(self) -> float:
        return self.app.state.server.metrics.refused._value.get()

    def die(self):
        """As a process that is killed: it listens no more, and who waits hears nothing further."""

        def gone():
            for listening in self.server.servers:
                listening.close()
            for connection in list(self.server.server_state.connections):
                connection.transport.abort()

        self.server.servers[0].get_loop().call_soon_threadsafe(gone)


@contextmanager
def served(*, keys=None, limits=None, **drawing):
    """The real app with a fake drawer, on a free port."""
    config = ServeConfig(hosts=("127.0.0.1",), keys=keys, limits=Limits(**(limits or {})))
    app = create_app(config, lambda _config, metrics: FakeDrawer(metrics, **drawing), drain_s=0)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        client = Client(f"http://127.0.0.1:{listening.getsockname()[1]}")
        wait_until_ready(client, lambda: None)
        try:
            yield Served(client, app, server)
        finally:
            server.should_exit = True
            thread.join(10)


def loaded(client, progress=lambda *_: None, **changes) -> tuple[Load, ServingRecord]:
    setting = replace(SETTING, **changes)
    before = seen(client)
    load = Load(client, setting, PROMPTS, progress)
    load.run()
    facts = ServerFacts("0.1.0", own=False)
    return load, ServingRecord(
        MACHINE, "rocm-sd bench serve", "2026-01-02T03:04:05+00:00", setting, facts, load.requests, load.sent_for_s,
        before, seen(client),
    )  # fmt: skip


def counts(record) -> tuple[int, ...]:
    return tuple(record.count(outcome) for outcome in (ANSWERED, REJECTED, FAILED, LOST, OPEN))


def test_arrivals_are_a_poisson_process_of_the_seed():
    times = arrivals(50, 100, 7)
    assert times[0] == 0
    assert times == sorted(times)
    assert max(times) < 100
    assert times == arrivals(50, 100, 7) != arrivals(50, 100, 8)
    assert len(times) == pytest.approx(5000, rel=0.05)
    between = [after - before for before, after in pairwise(times)]
    mean = sum(between) / len(between)
    spread = (sum((each - mean) ** 2 for each in between) / len(between)) ** 0.5
    assert spread == pytest.approx(mean, rel=0.1)  # as of exponential times, and not of equal ones
    assert arrivals(0.01, 1, 0) == [0.0]


def test_every_request_is_answered_and_the_server_says_the_same():
    with served() as server:
        load, record = loaded(server.client)
        assert server.drawer.drawn == load.planned
    assert counts(record) == (load.planned, 0, 0, 0, 0)
    assert [request.start_s for request in record.requests] == pytest.approx(arrivals(30, 0.5, 0), abs=1e-5)
    assert all(request.status == 200 and request.seconds >= 0.02 for request in record.requests)
    assert record.pictures_a_step == 2
    assert record.after.host_bytes > 2**20
    assert 0.5 <= record.sent_for_s < 2
    assert serving_tables.wrong(record) is None
    assert serving_tables.verdict(record).startswith(f"All {load.planned} requests were answered, half within ")


def test_memory_is_asked_for_while_the_server_draws(monkeypatch):
    monkeypatch.setattr("rocm_sd.bench.serving_memory._LEAST_S", 0.05)
    with served() as server:
        with MemoryWatch(server.client, 0.5) as watch:
            loaded(server.client)
        found = watch.found
        time.sleep(0.2)
        assert watch.found == found
    assert len(found) > 4
    assert [each.at_s for each in found] == sorted(each.at_s for each in found)
    assert all(each.host_bytes > 50e6 for each in found)


def test_a_server_that_is_gone_has_no_memory(monkeypatch):
    monkeypatch.setattr("rocm_sd.bench.serving_memory._LEAST_S", 0.05)
    with MemoryWatch(Client("http://127.0.0.1:1"), 0.5) as watch:
        time.sleep(0.3)
    assert watch.found == ()


def test_a_full_queue_rejects_and_says_when_to_come_again():
    with served(seconds=0.2, limits={"queue": 2, "in_flight": 1}) as server:
        load, record = loaded(server.client)
        assert server.drawer.drawn == record.count(ANSWERED) > 2
        assert server.refused == record.count(REJECTED) > 2
    assert sum(counts(record)) == counts(record)[0] + counts(record)[1] == load.planned
    assert all(request.retry_after_s >= 1 and request.status == 429 for request in record.of(REJECTED))
    assert "were told to come later" in serving_tables.verdict(record)
    assert not any("Retry-After" in note for note in serving_tables.notes(record))


def test_a_slow_server_does_not_set_the_pace():
    """Requests begin when they are due, and one that waits for others has waited."""
    with served(seconds=0.1, limits={"in_flight": 1}) as server:
        load, record = loaded(server.client)
    assert record.count(ANSWERED) == load.planned
    assert max(request.late_s for request in record.requests) < 1.0
    # The last one waits for nearly all of the others.
    assert max(record.latencies) > 0.1 * load.planned - 0.6 > 0.5


def test_a_broken_answer_is_lost_and_an_error_has_failed():
    with served(small=(3,), failing=(5, 6)) as server:
        load, record = loaded(server.client)
    assert counts(record) == (load.planned - 3, 0, 2, 1, 0)
    assert record.requests[3].why == "the picture has 32x32 pixels"
    assert record.requests[5].status == 500
    assert "the card is gone" in record.requests[5].why
    words = serving_tables.wrong(record)
    assert words.startswith(f"Of {load.planned} requests 1 were lost and 2 failed, 2 of them with: ")


def test_a_server_that_dies_half_way_has_lost_what_it_took(monkeypatch):
    monkeypatch.setattr(serving_load, "_BETWEEN_S", 0.2)
    with served(seconds=5.0) as server:
        done = []

        def progress(elapsed, _seconds, _what):
            if elapsed > 0.6 and not done:
                done.append(elapsed)
                server.die()

        load, record = loaded(server.client, progress, rate=15.0, seconds=60.0)
    assert 0.6 < load.gone_s < 10
    assert record.count(LOST) >= 5
    assert record.count(FAILED) >= 1
    assert counts(record)[2] + counts(record)[3] == len(record.requests) < load.planned
    assert {request.why for request in record.of(FAILED)} == {"no connection: connection refused"}
    assert record.after == Seen()
    assert record.pictures_a_step is None


def test_capacity_is_what_the_server_does_with_all_its_places_taken(monkeypatch):
    monkeypatch.setattr(serving_capacity, "_SECONDS", 0.5)
    with served(seconds=0.1, limits={"in_flight": 4}) as server:
        found = serving_capacity.capacity(server.client, SETTING, PROMPTS, lambda *_: None)
    assert found.drawn_at_once == 4
    assert 10 < found.pictures_per_s < 42


def test_capacity_is_not_measured_of_a_server_that_fails(monkeypatch):
    with served(failing=tuple(range(100))) as server, pytest.raises(RocmSdError, match="the card is gone"):
        serving_capacity.capacity(server.client, SETTING, PROMPTS, lambda *_: None)


def test_what_the_server_refuses_is_said_before_the_run(tmp_path):
    with served(small=(0,), limits={"steps": 4}) as server:
        assert models(server.client)[1][0].name == "emoji-sd"
        with pytest.raises(RocmSdError, match=r"draws no such picture: The request has 9 steps: this server takes 4"):
            first_picture(server.client, replace(SETTING, steps=9), PROMPTS)
        with pytest.raises(RocmSdError, match="first picture is wrong: the picture has 32x32"):
            first_picture(server.client, SETTING, PROMPTS)
        first_picture(server.client, replace(SETTING, seed=1), PROMPTS)


def answer(raw: bytes | str) -> Answer:
    text = base64.b64encode(raw).decode() if isinstance(raw, bytes) else raw
    return Answer(200, {}, json.dumps({"data": [{"b64_json": text}]}).encode())


def png(side=SIDE, kind="png") -> bytes:
    held = io.BytesIO()
    Image.effect_noise((side, side), 50).save(held, kind)
    return held.getvalue()


@pytest.mark.parametrize(
    ("given_answer", "why"),
    [
        (answer(png()), None),
        (answer(png(32)), "32x32"),
        (answer(png()[:-900]), "cannot be read"),
        (answer(png(kind="jpeg")), "cannot be read"),
        (answer(b""), "cannot be read"),
        (answer("%%%"), "no picture"),
        (Answer(200, {}, b"{"), "no picture"),
        (Answer(200, {}, b'{"data": []}'), "no picture"),
        (Answer(200, {}, b"[1]"), "no picture"),
    ],
)
def test_what_a_picture_is(given_answer, why):
    found = why_no_picture(given_answer, SIDE, SIDE)
    assert found is None if why is None else why in found


@pytest.mark.parametrize(
    "url", ["", "7860", "ftp://a", "http://", "http://a b", "http://a:99999", "http://a/?q=1", "http://é", "http://a\n"]
)
def test_what_is_no_address(url):
    with pytest.raises(InvalidOption):
        require_url(url)


def test_a_key_comes_from_a_file_and_never_from_the_command(tmp_path):
    with pytest.raises(InvalidOption, match="key-file") as refused:
        require_url("http://me:secret@host")
    assert "secret" not in str(refused.value)
    (tmp_path / "key").write_text("abc-123\nmore\n")
    assert read_key(tmp_path / "key") == "abc-123"
    assert "abc" not in repr(Client("http://a", "abc-123"))
    for content in (b"", b"\n", b"two words", b"\xff\xfe", b"a\x00b"):
        (tmp_path / "key").write_bytes(content)
        with pytest.raises(InvalidOption):
            read_key(tmp_path / "key")
    with pytest.raises(InvalidOption, match="No such file"):
        read_key(tmp_path / "none")


# A server of this run's own, in place of rocm-sd serve: it says its address, and is ready at its third call.
STAND_IN = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    calls = 0
    def do_GET(self):
        Handler.calls += 1
        self.send_response(200 if Handler.calls > 2 else 503)
        self.end_headers()
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(f"http://127.0.0.1:{server.server_port} is a page, and the address for clients", file=sys.stderr, flush=True)
server.serve_forever()
"""


def test_a_server_of_its_own_ends_with_the_run(monkeypatch):
    started, real = [], subprocess.Popen
    monkeypatch.setattr(serving_server, "_BEGIN", STAND_IN)
    monkeypatch.setattr(subprocess, "Popen", lambda *given, **more: started.append(real(*given, **more)) or started[-1])

    def run():
        with serving_server.own_server(["--device", "cpu"]) as client:
            assert client.ask("GET", "/readyz").status == 200
            assert started[0].poll() is None
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert started[0].poll() is not None
    assert started[0].args[:2] == [sys.executable, "-c"]
    assert started[0].args[3:] == ["serve", "--device", "cpu", "--port", "0", "--log", "none"]


def test_a_server_that_ends_at_once_says_why(monkeypatch):
    last = "import sys; sys.exit('error: fastapi is not installed.\\nType: pip install')"
    monkeypatch.setattr(serving_server, "_BEGIN", last)
    with (
        pytest.raises(RocmSdError, match=r"before it was ready: fastapi is not installed\. Type: pip install"),
        serving_server.own_server(),
    ):
        pass


def test_no_server_and_no_server_of_ours():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        client = Client(f"http://127.0.0.1:{closed.getsockname()[1]}")
    with pytest.raises(RocmSdError, match="There is no server at http://127"):
        wait_until_ready(client)


def request(number: int, seconds: float = 1.0, outcome: str = ANSWERED, **more) -> Request:
    status = {ANSWERED: 200, REJECTED: 429, FAILED: 500}.get(outcome)
    return Request(float(number), outcome, None if outcome == OPEN else seconds, status, **more)


def made_up(*requests, **more) -> ServingRecord:
    given = {"sent_for_s": 60.0, "before": Seen(10, 5, 2**30, 2**31), "after": Seen(100, 35, 2**30, 2**31)} | more
    facts = ServerFacts("0.1.0", own=True, capacity=2.5, drawn_at_once=8)
    setting = replace(SETTING, rate=2.0, asked="0.8x", seconds=60.0)
    when = "2026-01-02T03:04:05+00:00"
    return ServingRecord(MACHINE, "rocm-sd bench serve --rate 0.8x", when, setting, facts, requests, **given)


MIXED = made_up(
    *(request(number, 1 + number / 100) for number in range(40)),
    request(40, 0.01, REJECTED, retry_after_s=3.0), request(41, 0.1, FAILED, why="<script>alert(1)</script>"),
    request(42, 2.0, LOST, why="no answer: connection reset by peer"), request(43, 0, OPEN),
    memory=(MemoryAt(0.0, 2**30, 2**31), MemoryAt(1.0, 2**30 + 2**28, 2**31)),
)  # fmt: skip


def test_figures_are_those_of_the_requests():
    assert counts(MIXED) == (40, 1, 1, 1, 1)
    assert percentile(MIXED.latencies, 0.5) == pytest.approx(1.19)
    assert percentile(MIXED.latencies, 0.95) == pytest.approx(1.37)
    assert percentile(MIXED.latencies, 1.0) == max(MIXED.latencies)
    assert percentile([5.0], 0.99) == 5.0
    low, high = MIXED.latency_interval(0.5)
    assert low < 1.19 < high
    assert MIXED.span_s == pytest.approx(39 + 1.39)
    assert MIXED.throughput == pytest.approx(40 / 40.39)
    low, high = MIXED.throughput_interval
    assert low <= MIXED.throughput <= high
    assert MIXED.pictures_a_step == 3
    shown = {name: (value, interval) for name, value, interval in serving_tables.rows(MIXED)}
    assert shown["requests sent"] == ("44", "")
    assert shown["open at the end"] == ("1", "")
    assert shown["rate asked for, requests/s"] == ("2.00 (0.8x of 2.50)", "")
    assert shown["latency p95, s"][1].startswith("1.3")
    assert shown["server's memory, MiB"] == ("1024 before, 1024 after, 1280 at most", "")
    few = made_up(*(request(number) for number in range(7)))
    assert few.latency_interval(0.5) is None
    assert few.throughput_interval is None
    assert made_up().throughput is None
    assert serving_tables.verdict(made_up()) == "No request was answered of 0 that were sent."


def test_neighbours_that_are_late_together_widen_the_interval():
    """The same latencies, in an order of luck and as a queue that fills and empties has them."""
    mixed = [float(number * 37 % 100) for number in range(100)]
    low, high = made_up(*(request(n, s) for n, s in enumerate(mixed))).latency_interval(0.5)
    least, most = made_up(*(request(n, s) for n, s in enumerate(sorted(mixed)))).latency_interval(0.5)
    assert most - least > 1.5 * (high - low)


def test_what_a_reader_should_know_is_said():
    grown = made_up(*(request(number, 1 + number / 10) for number in range(40)))
    assert any(note.startswith("The server fell behind") for note in serving_tables.notes(grown))
    late = made_up(*(request(number, late_s=0.5) for number in range(40)))
    assert any("0.500 s after they were due" in note for note in serving_tables.notes(late))
    rude = made_up(request(0), request(1, 0.1, REJECTED))
    assert any("Retry-After" in note for note in serving_tables.notes(rude))
    assert serving_tables.notes(made_up(*(request(number) for number in range(40)), notes=("gone",))) == ("gone",)


@pytest.mark.parametrize(
    ("mib", "words"),
    [
        ([500, 700, *[900] * 14], None),  # ready for its work in the first quarter
        ([700] * 8 + [720] * 8, None),  # pictures of the moment
        ([700] * 8 + [760] * 8, "memory grew: half of the second quarter it held 700 MiB at most, of the last 760"),
        ([700, 2000] * 3, None),  # too few
    ],
    ids=["at its start", "a little", "grown", "few"],
)
def test_memory_that_grows_is_said(mib, words):
    record = made_up(memory=tuple(MemoryAt(float(n), each * 2**20) for n, each in enumerate(mib)))
    said = [note for note in serving_tables.notes(record) if "memory" in note]
    assert (len(said), words or "") == (words is not None, words or "")
    assert not words or words in said[0]


def test_a_record_from_before_memory_was_looked_at_is_read(tmp_path):
    values = MIXED.to_dict()
    del values["memory"]
    (tmp_path / "serve.json").write_text(json.dumps(values))
    assert ServingRecord.load(tmp_path / "serve.json") == replace(MIXED, memory=())


def test_a_record_is_read_as_it_was_written(tmp_path):
    MIXED.save(tmp_path / "serve.json")
    assert ServingRecord.load(tmp_path / "serve.json") == MIXED
    assert [path.name for path in tmp_path.iterdir()] == ["serve.json"]
    keep_older(tmp_path / "serve.json")
    MIXED.save(tmp_path / "serve.json")
    keep_older(tmp_path / "serve.json")
    (tmp_path / "serve.json").write_text("{")
    keep_older(tmp_path / "serve.json")
    stamp = "serve-20260102T030405"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{stamp}-2.json", f"{stamp}.json", "serve-unreadable.json",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda v: v.update(format="rocm-sd-bench/1"), "its format is not rocm-sd-bench-serve/1"),
        (lambda v: v["requests"][3].update(seconds=-1), r"requests\[3\].seconds is below 0"),
        (lambda v: v["requests"][3].update(seconds=float("nan")), r"requests\[3\].seconds should be number or null"),
        (lambda v: v["requests"][3].update(seconds=None), r"requests\[3\] was answered and has no end"),
        (lambda v: v["requests"][3].update(status=500), r"requests\[3\] was answered with status 500"),
        (lambda v: v["requests"][43].update(seconds=1.0), r"requests\[43\] is open and has an end"),
        (lambda v: v["requests"][3].update(outcome="fine"), r"requests\[3\].outcome should be one of"),
        (lambda v: v["setting"].update(rate=0), "setting.rate is not above 0"),
        (lambda v: v.update(sent_for_s="x"), "sent_for_s should be number"),
        (lambda v: v.pop("machine"), "the file has no machine"),
        (lambda v: v["server"].update(secret=1), "server.secret is not known"),
        (lambda v: v["memory"][1].update(host_bytes=-1), r"memory\[1\].host_bytes is below 0"),
    ],
)
def test_a_damaged_record_is_refused_with_a_sentence(tmp_path, change, sentence):
    values = json.loads(json.dumps(MIXED.to_dict()))
    change(values)
    path = tmp_path / "serve.json"
    path.write_text(json.dumps(values))
    with pytest.raises(UnreadableRecord, match=f"is not a benchmark record: .*{sentence}"):
        ServingRecord.load(path)
    with pytest.raises(UnreadableRecord):
        report.read([path])


@given(raw=broken_bytes(MIXED.to_dict()))
def test_whatever_is_read_can_be_shown(raw):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "serve.json"
        path.write_bytes(raw)
        try:
            inputs = report.read([path])
        except RocmSdError:
            return
    html = report.render(report.page(inputs))
    assert "<script>alert" not in html
    html.encode()


def test_the_report_has_a_section_with_a_plot(tmp_path):
    MIXED.save(tmp_path / "serve.json")
    inputs = report.read([tmp_path])
    assert (inputs.timed, inputs.served) == ((), (MIXED,))
    html = report.render(report.page(inputs))
    section = html.split('<section id="serving">')[1].split("</section>", maxsplit=1)[0]
    assert section.count('class="dot ours"') == 40
    assert section.count('class="dot other"') == 3
    assert "Of 44 requests 1 were lost and 1 failed" in section
    assert "latency p95, s" in section
    assert section.count('class="trace ours"') == 2  # from the first look to the second, and beside its name
    assert "Memory of the server" in section
    assert "1280" in section
    assert "rocm-sd bench serve --rate 0.8x" in section
    assert "<script>alert" not in html
    assert "Test Card" in html
    many = made_up(*(request(number, 1 + number % 7) for number in range(5000)))
    drawn = report.render(report.page(report.Inputs((many,))))
    assert 300 < drawn.count('class="dot ours"') <= 600
    assert 'id="serving"' not in report.render(report.page(report.Inputs()))
    unanswered = report.render(report.page(report.Inputs((made_up(request(0, outcome=REJECTED)),))))
    assert "No request was answered" in unanswered
