"""A hub that cannot be reached: one sentence at once, and what to type; a copy in its cache is loaded all the same."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest
import torch
from huggingface_hub import constants

from rocm_sd.errors import CorruptModel, ModelNotFound
from rocm_sd.integrations.diffusers import hub, loading
from rocm_sd.models import ModelKind, ModelSource

CPU = torch.device("cpu")


@pytest.fixture
def closed() -> str:
    """An address where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    return f"http://127.0.0.1:{port}"


@pytest.fixture
def unreachable(closed, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", closed)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "getproxies", dict)


def test_the_command_line_prints_one_error_and_nothing_else(closed, tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment |= {"HF_ENDPOINT": closed, "HF_HOME": str(tmp_path / "empty"), "HF_HUB_OFFLINE": "0", "COLUMNS": "80"}
    program = "import rocm_sd.cli.main as m; m.run()"
    asked = ["generate", "a frog", "--model", "nobody/nothing", "--device", "cpu", "--out", str(tmp_path / "out")]
    ended = subprocess.run(
        [sys.executable, "-c", program, *asked],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 4
    assert ended.stdout.strip() in {"", "Loading nobody/nothing ..."}
    assert ended.stderr.splitlines() == [
        f"error: nobody/nothing is not on this machine, and {closed} cannot be reached (Connection refused).",
        "Connect once, or give a local folder or a .safetensors file. emoji-sd is built in and needs no network.",
    ]


def test_it_is_asked_once_and_not_again_and_again(unreachable):
    started = time.monotonic()
    with pytest.raises(ModelNotFound, match="cannot be reached"):
        loading.load_pipeline(ModelSource(ModelKind.HUB, "nobody/nothing"), CPU)
    with pytest.raises(ModelNotFound, match="nobody/clip is not on this machine"):
        loading.load_clip("nobody/clip")
    # The retries of its library take 23 s for each file.
    assert time.monotonic() - started < 20


def test_what_is_in_the_cache_is_loaded_without_it(unreachable, monkeypatch):
    asked = {}

    class Kind:
        @staticmethod
        def from_pretrained(location, **options):
            asked.update(options, location=location)
            return torch.nn.Identity()

    loading.load_pipeline(ModelSource(ModelKind.HUB, "somebody/model"), CPU, kind=Kind)
    assert (asked["location"], asked["local_files_only"]) == ("somebody/model", True)
    # Of one that can be reached the newest version is asked for.
    monkeypatch.setattr(hub, "why_unreachable", lambda: None)
    asked.clear()
    loading.load_pipeline(ModelSource(ModelKind.HUB, "somebody/model"), CPU, kind=Kind)
    assert "local_files_only" not in asked


def test_a_damaged_checkpoint_is_not_put_down_to_the_network(unreachable, monkeypatch):
    class Kind:
        @staticmethod
        def from_single_file(*_arguments, **_options):
            raise ValueError("the shapes differ")

    monkeypatch.setattr(loading, "single_file_class", lambda _path: Kind)
    with pytest.raises(CorruptModel, match="the shapes differ"):
        loading.load_pipeline(ModelSource(ModelKind.FILE, "model.safetensors"), CPU)


def test_offline_is_said_by_its_name_and_a_proxy_is_trusted(closed, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", closed)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.why_unreachable() == "HF_HUB_OFFLINE is set"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "getproxies", dict)
    assert hub.why_unreachable() == "Connection refused"
    monkeypatch.setattr(hub, "getproxies", lambda: {"http": "http://127.0.0.1:1"})
    monkeypatch.setattr(hub, "proxy_bypass", lambda _host: False)
    assert hub.why_unreachable() is None
    monkeypatch.setattr(hub, "proxy_bypass", lambda _host: True)
    assert hub.why_unreachable() == "Connection refused"


def test_one_that_listens_is_reachable(monkeypatch):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub, "getproxies", dict)
        assert hub.why_unreachable() is None


def test_an_address_that_is_none_is_not_reached(monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:no-port")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "getproxies", dict)
    assert hub.why_unreachable()
