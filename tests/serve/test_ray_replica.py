"""A replica of two ranks on Ray: it draws, and is replaced where one of its ranks is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from rocm_sd.errors import DeviceUnavailable
from rocm_sd.serve import Limits, ServeConfig

ray = pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve")
ray_app = pytest.importorskip("rocm_sd.serve.ray_app")

CONFIG = ServeConfig(device="cpu", limits=Limits(in_flight=2), hosts=("127.0.0.1",), gpus_per_replica=2)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = str(tmp_path_factory.mktemp("r"))
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, _temp_dir=place, logging_level="ERROR")
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "ERROR"})
    serve.run(ray_app.application(CONFIG, "1"), name=ray_app.APP, route_prefix="/")
    address = f"http://127.0.0.1:{port}"
    ends = time.monotonic() + 120
    while httpx.get(f"{address}/readyz").status_code != 200:
        assert time.monotonic() < ends
        time.sleep(0.1)
    yield address
    serve.shutdown()
    ray.shutdown()


def ranks():
    """Of the replica that is there, by their numbers."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    processes = [line.split(None, 2) for line in listed.splitlines()[1:] if len(line.split(None, 2)) == 3]
    replicas = {pid for pid, _, name in processes if "ServeReplica" in name and "painter" in name}
    found = {}
    for pid, parent, _ in processes:
        with suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if parent in replicas else []
            found |= {int(part[5:]): int(pid) for part in environment if part.startswith(b"RANK=")}
    return found


def draw(url, steps):
    body = {"prompt": "a frog", "steps": steps, "seed": 1, "size": "64x64"}
    return httpx.post(f"{url}/v1/images/generations", json=body, timeout=180)


@pytest.mark.slow
def test_a_replica_that_loses_a_rank_is_replaced_and_its_picture_is_drawn_again(url):
    assert draw(url, 2).status_code == 200
    before, answers = ranks(), []
    assert sorted(before) == [0, 1]
    drawing = threading.Thread(target=lambda: answers.append(draw(url, 40)))
    drawing.start()
    time.sleep(1.0)
    os.kill(before[1], signal.SIGKILL)
    drawing.join()
    assert [answer.status_code for answer in answers] == [200], answers[0].text
    after = ranks()
    assert sorted(after) == [0, 1]
    assert not set(after.values()) & set(before.values())


@pytest.mark.slow
@pytest.mark.usefixtures("url")
def test_more_than_the_machine_has_is_said():
    many = ServeConfig(device="cpu", gpus_per_replica=4)
    with pytest.raises(DeviceUnavailable, match="A replica of 4 needs as many CPUs, and Ray sees 3"):
        ray_app._require_room(many)
