"""The server on Ray: pictures by two replicas, one of which is killed while it draws."""

from __future__ import annotations

import base64
import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import fakes
import httpx
import pytest
from fastapi.testclient import TestClient
from PIL import Image

from rocm_sd.engine.batching import BatchDone
from rocm_sd.errors import InvalidOption
from rocm_sd.serve import Limits, ServeConfig, TooLate

ray = pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve")
ray_app = pytest.importorskip("rocm_sd.serve.ray_app")

REPLICA = "painter emoji-sd"


class SlowDrawer(fakes.FakeDrawer):
    """In a replica: of one model. A seed of 13 ends the process that draws it."""

    def __init__(self, _config, metrics):
        super().__init__(step_s=0.05)
        self._metrics = metrics

    def models(self):
        return {"small": super().models()["small"]}

    def draw(self, model, drawing, on_step, stop):
        if drawing.seed == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        self._metrics.batch(BatchDone("small", 1, 2, 0, 0.05))
        return super().draw(model, drawing, on_step, stop)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    # Replicas are other processes, which cannot import the tests.
    for module in (fakes, sys.modules[__name__]):
        ray.cloudpickle.register_pickle_by_value(module)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = str(tmp_path_factory.mktemp("r"))
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, _temp_dir=place, logging_level="ERROR")
    config = ServeConfig(device="cpu", limits=Limits(in_flight=4), hosts=("127.0.0.1",))
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "ERROR"})
    serve.run(ray_app.application(config, "2", SlowDrawer), name=ray_app.APP, route_prefix="/")
    address = f"http://127.0.0.1:{port}"
    until(lambda: httpx.get(f"{address}/readyz").status_code == 200)
    yield address
    serve.shutdown()
    ray.shutdown()


def until(true, seconds=60):
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.1)


def replicas():
    """The processes of the drawing replicas."""
    listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return {int(line.split()[0]) for line in listed.splitlines() if "ServeReplica" in line and REPLICA in line}


def draw(url, seed, steps=4, **more):
    body = {"prompt": "a frog", "steps": steps, "seed": seed, "size": "64x64", **more}
    # A replica imports torch before it draws, on cores that others use, too.
    return httpx.post(f"{url}/v1/images/generations", json=body, timeout=180)


def red(answer):
    picture = Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"])))
    return picture.getpixel((0, 0))[0]


def test_pictures_steps_and_errors_come_through(url):
    assert red(draw(url, 7)) == 7
    with httpx.stream(
        "POST",
        f"{url}/v1/images/generations",
        json={"prompt": "a frog", "steps": 6, "stream": True, "partial_images": 2},
        timeout=60,
    ) as answer:
        kinds = [line for line in answer.iter_lines() if line.startswith("event: ")]
    assert kinds == ["event: image_generation.partial_image"] * 2 + ["event: image_generation.completed"]
    assert draw(url, 1, size="9x9").status_code == 400
    info = httpx.get(f"{url}/api/info").json()
    assert [model["name"] for model in info["models"]] == ["small"]


def told(url):
    """By replica: the steps that the ingress's metrics have of it, and its memory."""
    text = httpx.get(f"{url}/metrics").text
    steps = dict(re.findall(r'rocm_sd_step_seconds_count{model="small",replica="(.+?)"} (.+)', text))
    bytes_ = dict(re.findall(r'rocm_sd_host_memory_bytes{replica="(.+?)"} (.+)', text))
    return {name: (float(steps.get(name, 0)), float(memory)) for name, memory in bytes_.items()}


def test_the_ingress_has_the_figures_of_each_replica_that_lives(url):
    until(lambda: len(told(url)) == 2)
    before = told(url)
    assert all(memory > 1e7 for _, memory in before.values())
    for seed in range(4):
        assert draw(url, seed).status_code == 200
    drawn = sum(steps for steps, _ in before.values())
    until(lambda: sum(steps for steps, _ in told(url).values()) >= drawn + 4)
    os.kill(min(replicas()), signal.SIGKILL)
    until(lambda: len(told(url).keys() & before.keys()) == 1)
    until(lambda: len(told(url)) == 2 and told(url).keys() != before.keys())


def test_a_replica_that_is_killed_is_replaced_and_its_pictures_are_drawn_again(url):
    until(lambda: len(replicas()) == 2)
    before, answers = replicas(), {}
    threads = [
        threading.Thread(target=lambda seed=seed: answers.update({seed: draw(url, seed, steps=60)}))
        for seed in range(6)
    ]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    os.kill(min(before), signal.SIGKILL)
    for thread in threads:
        thread.join(90)
    assert {seed: (answer.status_code, red(answer)) for seed, answer in answers.items()} == {
        seed: (200, seed) for seed in range(6)
    }
    until(lambda: len(replicas()) == 2)
    assert min(before) not in replicas()
    assert draw(url, 9).status_code == 200


def test_a_picture_that_kills_two_replicas_is_answered_with_an_error(url):
    until(lambda: len(replicas()) == 2)
    answer = draw(url, 13)
    assert answer.status_code == 500
    assert "Two replicas" in answer.json()["error"]["message"]
    until(lambda: len(replicas()) == 2)
    until(lambda: draw(url, 5).status_code == 200)


def test_where_it_is_called_is_what_serve_was_started_with(url):
    assert url.endswith(":".join(map(str, ray_app._listens_at())))


class Handle:
    """Of a replica that answers when it is told to."""

    def __init__(self, answers=()):
        self.facts = self.draw = self
        self.answers, self.cancelled = answers, threading.Event()

    def options(self, **_options):
        return self

    def remote(self, *_drawing):
        return self

    def result(self, **_options):
        return fakes.FakeDrawer().models()["small"]

    def cancel(self):
        self.cancelled.set()

    def __iter__(self):
        yield from self.answers
        assert self.cancelled.wait(30)


@pytest.mark.parametrize("answers", [(), ((1, None),)], ids=["not begun", "begun"])
def test_a_deadline_holds_where_no_replica_answers(answers):
    handle = Handle(answers)
    drawer, steps = ray_app.RayDrawer({"small": handle}), []
    ends = time.monotonic() + 0.3
    stop = lambda: TooLate() if time.monotonic() > ends else None  # noqa: E731 -- as short as it can be said
    with pytest.raises(TooLate):
        drawer.draw("small", None, lambda step, _preview: steps.append(step), stop)
    assert time.monotonic() - ends < 5
    assert handle.cancelled.is_set()
    assert steps == [step for step, _ in answers]


def test_an_ingress_that_hears_of_no_model_is_replaced(monkeypatch):
    ended = []
    monkeypatch.setattr(ray_app, "_end", ended.append)
    monkeypatch.setattr(Handle, "result", lambda *_, **__: 1 / 0)
    app = ray_app.Ingress(ServeConfig(), ["small"], Handle()).__serve_build_asgi_app__()
    with TestClient(app):
        until(lambda: ended)
    assert isinstance(ended[0], ZeroDivisionError)


@pytest.mark.parametrize("is_there", [True, False], ids=["a cluster of others", "its own"])
def test_the_end_is_of_its_own_application_alone(monkeypatch, is_there):
    done, said = [], []

    def init(address=None, **_options):
        if address == "auto" and not is_there:
            raise ConnectionError

    monkeypatch.setattr(ray_app.ray, "init", init)
    monkeypatch.setattr(ray_app.ray, "shutdown", lambda: done.append("leave"))
    for name in ("start", "run"):
        monkeypatch.setattr(ray_app.serve, name, lambda *_, **__: None)
    monkeypatch.setattr(ray_app.serve, "delete", lambda name: done.append(f"delete {name}"))
    monkeypatch.setattr(ray_app.serve, "shutdown", lambda: done.append("shutdown"))
    monkeypatch.setattr(ray_app, "_require_room", lambda _config: None)
    monkeypatch.setattr(ray_app, "_listens_at", lambda: ("10.0.0.1", 8000) if is_there else ("127.0.0.1", 7860))
    monkeypatch.setattr(ray_app.time, "sleep", lambda _seconds: signal.raise_signal(signal.SIGTERM))
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        ray_app.run(ServeConfig(), "1", said.append)
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)
    assert done == [f"delete {ray_app.APP}", *([] if is_there else ["shutdown"]), "leave"]
    assert any("http://10.0.0.1:8000 is a page" in line for line in said) is is_there
    assert any("--port" in line for line in said) is is_there


@pytest.mark.parametrize("replicas", ["0", "4-1", "many", "", "1-"])
def test_how_many_replicas_is_a_number_or_two(replicas):
    if replicas == "1-":
        assert ray_app._numbers(replicas) == (1, 1)
        return
    with pytest.raises(InvalidOption, match="--replicas"):
        ray_app._numbers(replicas)
    assert ray_app._numbers("1-4") == (1, 4)


def test_arguments_of_a_cluster_are_those_of_a_server():
    with pytest.raises(InvalidOption, match="nosuch"):
        ray_app.build({"nosuch": 1})
    assert ray_app.build({"replicas": "1-2", "limits": {"in_flight": 2}, "device": "cpu", "hosts": ["a"]}) is not None
