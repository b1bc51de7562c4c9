"""The server on Ray: pictures by two replicas, one of which is killed while it draws."""

from __future__ import annotations

import base64
import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import fakes
import httpx
import pytest
from PIL import Image

from rocm_sd.errors import InvalidOption
from rocm_sd.serve import Limits, ServeConfig

ray = pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve")
ray_app = pytest.importorskip("rocm_sd.serve.ray_app")

REPLICA = "painter emoji-sd"


class SlowDrawer(fakes.FakeDrawer):
    """In a replica: of one model. A seed of 13 ends the process that draws it."""

    def __init__(self, _config, _metrics):
        super().__init__(step_s=0.05)

    def models(self):
        return {"small": super().models()["small"]}

    def draw(self, model, drawing, on_step, stop):
        if drawing.seed == 13:
            os.kill(os.getpid(), signal.SIGKILL)
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
    return httpx.post(f"{url}/v1/images/generations", json=body, timeout=60)


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
    assert "13" not in httpx.get(f"{url}/api/info").text


def test_a_replica_that_is_killed_is_replaced_and_its_pictures_are_drawn_again(url):
    before, answers = replicas(), {}
    assert len(before) == 2
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
