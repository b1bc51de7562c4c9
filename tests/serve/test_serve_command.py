"""rocm-sd serve as a user starts it: a real model, the official clients, Ctrl-C, and what can be wrong."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from threading import Thread

import httpx
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from rocm_sd.cli import main


class Started:
    """A server in a process of its own, on a port that was free."""

    def __init__(self, *options, cache):
        command = [sys.executable, "-m", "rocm_sd.cli.main", "serve", "--port", "0", "--device", "cpu", *options]
        environment = os.environ | {"ROCM_SD_CACHE": str(cache), "PYTHONUNBUFFERED": "1"}
        self.began = time.monotonic()
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        line = self.process.stderr.readline()
        self.url = re.search(r"http://127\.0\.0\.1:\d+", line)[0]
        self.lines = []
        Thread(target=lambda: self.lines.extend(self.process.stderr), daemon=True).start()
        while httpx.get(f"{self.url}/readyz").status_code != 200:
            assert time.monotonic() - self.began < 120
            time.sleep(0.2)

    def end(self):
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    started = Started("--log", "json", cache=tmp_path_factory.mktemp("cache"))
    yield started
    if started.process.poll() is None:
        started.process.kill()
        started.process.wait()


def shown(text):
    return Image.open(io.BytesIO(base64.b64decode(text)))


def test_openais_own_client_draws(server):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    given = {"prompt": "a frog on a pink background", "size": "128x128", "extra_body": {"steps": 3, "seed": 4}}
    made = client.images.generate(n=2, **given)
    assert [shown(one.b64_json).size for one in made.data] == [(128, 128)] * 2
    assert made.data[0].b64_json != made.data[1].b64_json
    again = client.images.generate(**given)
    first, second = (shown(one.data[0].b64_json) for one in (made, again))
    assert max(abs(a - b) for a, b in zip(first.tobytes(), second.tobytes(), strict=True)) <= 1
    kinds = [event.type for event in client.images.generate(stream=True, partial_images=1, **given)]
    assert kinds == ["image_generation.partial_image", "image_generation.completed"]
    source = io.BytesIO(base64.b64decode(made.data[0].b64_json))
    source.name = "frog.png"
    edited = client.images.edit(image=source, prompt="a green frog", size="128x128", extra_body={"steps": 3})
    assert shown(edited.data[0].b64_json).size == (128, 128)
    with pytest.raises(openai.BadRequestError, match="multiple of 8"):
        client.images.generate(prompt="a frog", size="9x9")
    assert [model.id for model in client.models.list()] == ["emoji-sd"]


def test_a_client_of_automatic1111_draws(server):
    webuiapi = pytest.importorskip("webuiapi")
    client = webuiapi.WebUIApi(baseurl=f"{server.url}/sdapi/v1", sampler="Euler a", steps=3)
    made = client.txt2img(prompt="a red apple", seed=5, width=128, height=128, cfg_scale=3)
    assert made.image.size == (128, 128)
    assert made.info["seed"] == 5
    changed = client.img2img(images=[made.image], prompt="a green apple", width=128, height=128, denoising_strength=0.7)
    assert changed.image.size == (128, 128)
    assert "Euler a" in {one["name"] for one in client.get_samplers()}
    assert client.get_progress()["progress"] == 0


def test_pictures_at_once_share_their_steps(server):
    answers = []

    def go(number):
        body = {"prompt": f"a {number}", "steps": 4, "size": "128x128", "seed": number}
        answers.append(httpx.post(f"{server.url}/v1/images/generations", json=body, timeout=60).status_code)

    threads = [Thread(target=go, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * 6
    metrics = httpx.get(f"{server.url}/metrics").text
    several = {
        float(bound): float(count)
        for bound, count in re.findall(r'rocm_sd_batch_pictures_bucket{le="([\d.]+)".*?} ([\d.]+)', metrics)
    }
    assert several[1.0] < max(several.values()), "some steps had more than one picture"


def test_the_end_is_quick_and_every_line_is_json(server):
    assert server.end() == 0
    facts = [json.loads(line) for line in server.lines]
    assert sum(fact["event"] == "ready" for fact in facts) == 1
    answered = [fact for fact in facts if fact["event"] == "answered"]
    assert all({"request", "status", "seconds", "path"} <= fact.keys() for fact in answered)
    assert not any("frog" in json.dumps(fact) for fact in facts), "no prompt is in the log"


def run(*arguments):
    with pytest.raises(SystemExit) as ended:
        main.run([*map(str, arguments)])
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--host", "0.0.0.0"), 3, "--new-key"),
        (("--log", "xml"), 2, "text, json, none"),
        (("--quality", "best"), 2, "balanced"),
        (("--quality", "high"), 3, "without exact"),
        (("--new-key", "ann"), 2, "--keys keys.txt"),
        (("./no-such-model",), 4, "no model at"),
        (("--lora", "style"), 2, "NAME=FILE.safetensors"),
        (("--keys", "nosuch.txt"), 1, "cannot be read"),
        (("--in-flight", "0"), 2, "in-flight"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_loaded(capsys, arguments, code, words):
    assert run("serve", *arguments) == code
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path, capsys):
    """So that whoever started it, a person or a service manager, hears of it."""
    folder = tmp_path / "broken"
    (folder / "unet").mkdir(parents=True)
    (folder / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "X"]}')
    save_file({"x": torch.zeros(1)}, folder / "unet" / "diffusion_pytorch_model.safetensors")
    assert run("serve", folder, "--port", "0", "--log", "none", "--device", "cpu") == 4
    assert "could not be loaded" in " ".join(capsys.readouterr().err.split())


def test_a_key_is_shown_once(tmp_path, capsys):
    assert run("serve", "--new-key", "ann", "--keys", tmp_path / "keys.txt") == 0
    key = capsys.readouterr().out.strip()
    assert key.startswith("rsd-")
    assert key not in (tmp_path / "keys.txt").read_text()


def test_a_port_that_is_taken_is_said(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert run("serve", "--port", taken.getsockname()[1], "--log", "none") == 1
    assert "Choose another port" in " ".join(capsys.readouterr().err.split())
