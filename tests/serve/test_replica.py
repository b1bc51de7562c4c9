"""Replicas of two ranks on the CPU: pictures of one process, and what follows when a rank is gone."""

from __future__ import annotations

import base64
import io
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from multiprocessing import Pipe
from pathlib import Path
from threading import Lock, Thread
from types import SimpleNamespace

import fakes
import httpx
import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image
from safetensors.torch import save_file

from pipelines import tiny_pipeline
from rocm_sd.cli import main
from rocm_sd.cli.pictures import difference
from rocm_sd.errors import CorruptModel, JobFailed, RocmSdError, Unsupported
from rocm_sd.integrations.diffusers import Drawing
from rocm_sd.serve import Limits, ServeConfig, create_app, replica
from rocm_sd.serve.drawers import LocalDrawer
from rocm_sd.serve.jobs import TooLate
from rocm_sd.serve.metrics import Metrics
from rocm_sd.serve.replica_drawer import ReplicaDrawer
from tiny_models import lora_of

# Two ranks import torch first, on cores that others use, too.
SECONDS = 120
# What a user waits for at most until a server that lost a rank has said so, and is gone.
QUICKLY = 30


def children(pid):
    """The processes that one has started, and theirs."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True).stdout
    parents = {int(line.split()[0]): int(line.split()[1]) for line in listed.splitlines()[1:]}
    found, fresh = [], [pid]
    while fresh:
        fresh = [child for child, parent in parents.items() if parent in fresh]
        found += fresh
    return found


def is_running(pid):
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    return False


def ranks_of(pid):
    """By their numbers."""
    found = {}
    for child in children(pid):
        with suppress(OSError):
            environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            rank = [part for part in environment if part.startswith(b"RANK=")]
            if rank:
                found[int(rank[0][5:])] = child
    return found


class Started:
    """A server of two ranks, in a process of its own."""

    def __init__(self, *options, cache):
        command = [sys.executable, "-m", "rocm_sd.cli.main", "serve", "--port", "0", "--device", "cpu", *options]
        environment = os.environ | {"ROCM_SD_CACHE": str(cache), "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [*command, "--gpus-per-replica", "2"], stderr=subprocess.PIPE, text=True, env=environment
        )
        self.lines = []
        self.url = re.search(r"http://127\.0\.0\.1:\d+", self.process.stderr.readline())[0]
        self.reader = Thread(target=lambda: self.lines.extend(self.process.stderr), daemon=True)
        self.reader.start()
        until = time.monotonic() + SECONDS
        while httpx.get(f"{self.url}/readyz").status_code != 200:
            assert time.monotonic() < until, self.lines
            time.sleep(0.2)

    @property
    def ranks(self):
        return ranks_of(self.process.pid)

    def said(self):
        self.reader.join(10)
        return " ".join("".join(self.lines).split())

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def draw(url, **asked):
    return httpx.post(f"{url}/v1/images/generations", json={"prompt": "a red apple", **asked}, timeout=SECONDS)


def shown(answer):
    return Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"])))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    started = Started(cache=tmp_path_factory.mktemp("cache"))
    yield started
    started.close()


# By turns: other steps, sizes (odd rows of latents), guidance (one sample and two), schedulers.
MIXED = [
    {"steps": 3, "size": "64x64", "seed": 1, "guidance": 3.0},
    {"steps": 2, "size": "64x64", "seed": 2, "guidance": 5.0, "scheduler": "euler"},
    {"steps": 4, "size": "64x64", "seed": 3, "guidance": 1.0},
    {"steps": 2, "size": "64x72", "seed": 4, "guidance": 3.0, "scheduler": "dpm++2m"},
    {"steps": 3, "size": "64x64", "seed": 5, "guidance": 3.0, "negative_prompt": "a worm"},
]


@pytest.mark.slow
def test_two_ranks_answer_as_one_process_does(server, tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path))
    with ThreadPoolExecutor(len(MIXED)) as threads:
        answers = list(threads.map(lambda asked: draw(server.url, **asked), MIXED))
    alone = LocalDrawer(ServeConfig(device="cpu"), Metrics())
    for asked, answer in zip(MIXED, answers, strict=True):
        assert answer.status_code == 200, answer.text
        width, height = map(int, asked["size"].split("x"))
        drawing = Drawing(
            "a red apple", asked.get("negative_prompt", ""), asked["steps"], asked["guidance"], asked["seed"], 1,
            width, height, asked.get("scheduler"),
        )  # fmt: skip
        mine = alone.draw("emoji-sd", drawing, lambda *_: None, lambda: None)
        assert difference(mine, shown(answer))[1] <= 1
    alone.close()
    metrics = httpx.get(f"{server.url}/metrics").text
    assert float(re.search(r"rocm_sd_step_seconds_count{.*} ([\d.]+)", metrics)[1]) >= max(
        asked["steps"] for asked in MIXED
    )
    assert "cfg=2 (2 ranks), because pictures that are drawn at once share a call" in " ".join(server.lines)


@pytest.mark.slow
def test_previews_pictures_from_pictures_and_deadlines_are_those_of_one_gpu(server):
    asked = {"prompt": "a frog", "steps": 4, "size": "64x64", "stream": True, "partial_images": 1}
    with httpx.stream("POST", f"{server.url}/v1/images/generations", json=asked, timeout=SECONDS) as answer:
        kinds = [line for line in answer.iter_lines() if line.startswith("event: ")]
    assert kinds == ["event: image_generation.partial_image", "event: image_generation.completed"]
    source = base64.b64decode(draw(server.url, steps=2, size="64x64").json()["data"][0]["b64_json"])
    edited = httpx.post(
        f"{server.url}/v1/images/edits",
        files={"image": ("a.png", source, "image/png")},
        data={"prompt": "a green apple", "steps": "3", "size": "64x64"},
        timeout=SECONDS,
    )
    assert edited.status_code == 200, edited.text
    refused = draw(server.url, steps=2, size="64x64", quality="low")
    assert refused.status_code == 400
    assert "exact" in refused.json()["error"]["message"]


@pytest.mark.slow
def test_ctrl_c_lets_what_was_begun_come_to_its_end(server):
    ranks, answers = server.ranks, []
    assert sorted(ranks) == [0, 1]
    waiting = Thread(target=lambda: answers.append(draw(server.url, steps=8, size="64x64")))
    waiting.start()
    time.sleep(0.5)
    began = time.monotonic()
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(SECONDS) == 0
    waiting.join()
    assert [answer.status_code for answer in answers] == [200]
    assert time.monotonic() - began < QUICKLY
    assert not any(map(is_running, ranks.values()))
    assert "Traceback" not in server.said()


@pytest.mark.slow
@pytest.mark.parametrize("killed", [1, 0])
def test_a_rank_that_is_killed_ends_the_server_after_its_answers(tmp_path, killed):
    server = Started("--in-flight", "2", cache=tmp_path)
    try:
        ranks, answers = server.ranks, []
        threads = [
            Thread(target=lambda seed=seed: answers.append(draw(server.url, steps=150, size="64x64", seed=seed)))
            for seed in range(4)
        ]
        for thread in threads:
            thread.start()
        # Two are drawn and two wait.
        time.sleep(1.5)
        began = time.monotonic()
        os.kill(ranks[killed], signal.SIGKILL)
        for thread in threads:
            thread.join()
        assert [answer.status_code for answer in answers] == [503] * 4
        why = f"Rank {killed}: The process was ended by SIGKILL."
        assert all(why in answer.json()["error"]["message"] for answer in answers)
        assert server.process.wait(QUICKLY) == JobFailed.exit_code
        assert time.monotonic() - began < QUICKLY
        assert why in server.said()
        assert not any(map(is_running, ranks.values()))
    finally:
        server.close()


@pytest.mark.slow
def test_ranks_end_with_a_server_that_is_killed(tmp_path):
    server = Started(cache=tmp_path)
    ranks = server.ranks
    server.close()
    until = time.monotonic() + QUICKLY
    while any(map(is_running, ranks.values())):
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("models") / "tiny"
    pipe = tiny_pipeline(tmp_path_factory.mktemp("tokens"))
    pipe.save_pretrained(place)
    save_file(lora_of(pipe.unet, "unet", ("to_q", "to_v", "conv1"), seed=1), place.parent / "style.safetensors")
    return place


def drawing(seed=0, steps=3, side=16, loras=(), guidance=3.0):
    return Drawing("a frog", steps=steps, guidance=guidance, seed=seed, width=side, height=side, loras=loras)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["cfg", "patch", "tensor", "pipeline"])
def test_every_plan_draws_the_pictures_of_one_gpu(folder, tmp_path, monkeypatch, plan):
    """With a LoRA and without; once more after a pause that is longer than ranks have patience for each other."""
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path))
    loras = (("style", str(folder.parent / "style.safetensors")),)
    config = ServeConfig(
        models=(str(folder),), device="cpu", limits=Limits(in_flight=3), loras=loras, gpus_per_replica=2, parallel=plan
    )
    asked = [
        drawing(1), drawing(2, loras=(("style", 1.0),)), drawing(3, 2, 24), drawing(4, guidance=1.0),
        drawing(2, loras=(("style", 0.5),)),
    ]  # fmt: skip
    # They have to find each other within it, too, on cores that others use.
    patience = timedelta(seconds=15 if plan == "cfg" else 600)
    replica = ReplicaDrawer(config, Metrics(), patience=patience)
    try:
        assert replica.models()["tiny"].loras == ("style",)
        assert replica.models()["tiny"].qualities == ("exact",)

        def draw(one):
            return replica.draw("tiny", one, lambda *_: None, lambda: None)

        with ThreadPoolExecutor(len(asked)) as threads:
            drawn = list(threads.map(draw, asked))
        time.sleep(18 if plan == "cfg" else 0)
        drawn.append(draw(asked[0]))
    finally:
        replica.close()
    alone = LocalDrawer(config, Metrics())
    for one, picture in zip([*asked, asked[0]], drawn, strict=True):
        assert difference(alone.draw("tiny", one, lambda *_: None, lambda: None), picture)[1] <= 1
    alone.close()
    assert difference(drawn[1], drawn[4])[1] > 0


@pytest.mark.slow
def test_several_models_errors_and_deadlines_of_one_replica(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path))
    config = ServeConfig(models=(str(folder), "emoji-sd"), device="cpu", gpus_per_replica=2, parallel="patch")
    lost, steps = [], []
    replica = ReplicaDrawer(config, Metrics())
    try:
        replica.when_lost(lost.append)
        assert list(replica.models()) == ["tiny", "emoji-sd"]

        def draw(model, one, stop=lambda: None):
            return replica.draw(model, one, lambda step, _preview: steps.append(step), stop)

        assert draw("tiny", drawing()).size == (16, 16)
        assert draw("emoji-sd", drawing(steps=2, side=64)).size == (64, 64)
        assert steps == [1, 2, 3, 1, 2]
        # What is wrong with one picture is said of that one.
        with pytest.raises(RocmSdError):
            draw("tiny", drawing(side=12))
        with pytest.raises(TooLate):
            draw("tiny", drawing(steps=900), lambda: TooLate() if len(steps) > 8 else None)
        assert draw("tiny", drawing()).size == (16, 16)
        assert not lost
    finally:
        replica.close()
    assert not lost
    assert not ranks_of(os.getpid())


@pytest.mark.slow
def test_a_model_that_a_rank_cannot_load_is_the_replicas_error(tmp_path):
    folder = tmp_path / "broken"
    (folder / "unet").mkdir(parents=True)
    (folder / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "X"]}')
    save_file({"x": torch.zeros(1)}, folder / "unet" / "diffusion_pytorch_model.safetensors")
    with pytest.raises(CorruptModel, match=r"Rank [01]: "):
        ReplicaDrawer(ServeConfig(models=(str(folder),), device="cpu", gpus_per_replica=2), Metrics())
    assert not ranks_of(os.getpid())


class LostDrawer(fakes.FakeDrawer):
    """Its models are gone as soon as `lose` is called."""

    def when_lost(self, tell):
        self.tell = tell

    def lose(self, error):
        self.tell(error)
        self.fail = lambda *_: True
        self.held.clear()


def test_whoever_waits_is_answered_and_the_server_is_not_ready_any_more():
    drawer, failed, answers = LostDrawer(), [], []
    error = JobFailed("Rank 1: The process was ended by SIGKILL.")
    config = ServeConfig(limits=Limits(in_flight=1))
    with TestClient(
        create_app(config, lambda *_: drawer, on_failure=failed.append), "http://127.0.0.1", client=("127.0.0.1", 50000)
    ) as client:
        while client.get("/readyz").status_code != 200:
            time.sleep(0.01)
        drawer.held.set()
        body = {"prompt": "a frog", "steps": 2}
        threads = [
            Thread(target=lambda: answers.append(client.post("/v1/images/generations", json=body))) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        while client.app.state.server.service.queued < 2:
            time.sleep(0.01)
        drawer.lose(error)
        for thread in threads:
            thread.join()
        # One was drawn, two were waiting, and one comes later.
        answers.append(client.post("/v1/images/generations", json=body))
        assert [answer.status_code for answer in answers] == [503] * 4
        assert all("Rank 1: " in answer.json()["error"]["message"] for answer in answers)
        assert all(answer.headers["retry-after"] == "5" for answer in answers)
        ready = client.get("/readyz")
        assert (ready.status_code, ready.json()) == (503, {"status": "failed"})
        assert client.get("/healthz").status_code == 200
    assert failed == [error]


def test_a_picture_that_is_stopped_after_its_end_leaves_nothing_behind():
    rank = object.__new__(replica._Rank0)
    here, rank._wire = Pipe()
    hears, _fails = Pipe(duplex=False)
    rank._leader, rank._drawer, rank._lock, rank._stops = SimpleNamespace(failed=None), fakes.FakeDrawer(), Lock(), {}
    rank._threads = ThreadPoolExecutor(2)
    serving = Thread(target=rank.serve, args=(hears,))
    serving.start()
    drawing = Drawing("x", steps=1, width=8, height=8)
    here.send(replica.Draw(1, "small", drawing))
    assert isinstance(here.recv(), replica.Step)
    assert isinstance(here.recv(), replica.Drawn)
    rank._drawer.held.set()
    for message in (replica.Stop(1), replica.Draw(2, "small", drawing)):
        here.send(message)
    # What has not begun at the end of all is never drawn, and nobody asks for it again.
    ends = time.monotonic() + 60
    while len(rank._drawer.drawings) < 2 and time.monotonic() < ends:
        time.sleep(0.01)
    for message in (replica.Stop(2), None):
        here.send(message)
    serving.join(60)
    assert not serving.is_alive()
    assert rank._stops == {}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--gpus-per-replica", "2"), 6, "--gpus-per-replica 2 needs 2 GPUs, and torch sees 0."),
        (("--gpus-per-replica", "0"), 2, "It takes 1 or more"),
        (("--parallel", "cfg"), 3, "Add --gpus-per-replica 2, or more."),
        (("--gpus-per-replica", "2", "--device", "cpu", "--parallel", "magic"), 2, "Use auto, one of"),
        (("--gpus-per-replica", "2", "--device", "cpu", "--parallel", "cfg=2,patch=2"), 3, "are to be 2."),
        (("--gpus-per-replica", "2", "--device", "cpu", "--parallel", "data"), 3, "--ray --replicas 2"),
    ],
)
def test_a_wrong_option_is_said_before_a_process_starts(capsys, monkeypatch, arguments, code, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(SystemExit) as ended:
        main.run(["serve", "--port", "0", *arguments])
    assert int(ended.value.code or 0) == code
    assert words in " ".join(capsys.readouterr().err.split())


def test_loras_of_several_models_are_refused():
    given = {"models": ("emoji-sd", "owner/name"), "loras": (("a", "a.safetensors"),), "device": "cpu"}
    with pytest.raises(Unsupported, match="several models"):
        ReplicaDrawer(ServeConfig(**given, gpus_per_replica=2), Metrics())


def test_the_help_says_how(capsys):
    with pytest.raises(SystemExit):
        main.run(["serve", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "rocm-sd serve ./sdxl --gpus-per-replica 2" in said
    assert "--parallel" in said
