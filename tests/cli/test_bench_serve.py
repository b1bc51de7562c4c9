"""rocm-sd bench serve: the command, what it writes, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import pytest

from bench.test_serving import served
from rocm_sd.bench import serving_capacity, serving_load
from rocm_sd.bench.serving import ANSWERED, LOST, OPEN, ServingRecord
from rocm_sd.cli import main
from rocm_sd.serve.keys import add_key


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def bench(*arguments) -> int:
    with pytest.raises(SystemExit) as ended:
        main.run(["bench", "serve", *map(str, arguments)])
    return int(ended.value.code or 0)


def of(server, tmp_path, *more):
    return (
        "--url",
        server.client.url,
        "--rate",
        "20",
        "--seconds",
        "1",
        "--steps",
        "2",
        "--out",
        tmp_path / "out",
        *more,
    )


def test_it_writes_a_record_that_the_report_takes_and_says_a_verdict(tmp_path, capsys):
    with served() as server:
        assert bench(*of(server, tmp_path, "--seed", "3", "--size", "32x40")) == 0
        url = server.client.url
    record = ServingRecord.load(tmp_path / "out" / "serve.json")
    assert record.command == (
        f"rocm-sd bench serve --url {url} --rate 20 --seconds 1 --steps 2 --size 32x40 --seed 3"
    )  # fmt: skip
    assert str(tmp_path) not in (tmp_path / "out" / "serve.json").read_text()
    assert record.complete
    assert record.machine.versions["torch"]
    assert record.count(ANSWERED) == len(record.requests) > 8
    assert (record.setting.width, record.setting.height, record.setting.prompts) == (32, 40, 64)
    shown = capsys.readouterr().out
    for words in ("emoji-sd under 20.0 requests/s", "latency p95, s", "throughput, pictures/s", "pictures a step"):
        assert words in shown
    assert f"All {len(record.requests)} requests were answered, half within" in shown
    assert "wrote" in shown
    with pytest.raises(SystemExit) as ended:
        main.run(["report", str(tmp_path / "out" / "serve.json"), "--out", str(tmp_path / "r.html")])
    assert not ended.value.code
    html = (tmp_path / "r.html").read_text()
    assert "A server under load" in html
    assert html.count('class="dot ours"') == len(record.requests)


def test_a_share_of_the_capacity_is_measured_first(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(serving_capacity, "_SECONDS", 0.5)
    with served(seconds=0.04, limits={"in_flight": 2}) as server:
        assert bench(*of(server, tmp_path, "--rate", "0.5x", "--json")) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["server"]["drawn_at_once"] == 2
    assert 5 < values["server"]["capacity"] < 52
    assert values["setting"]["rate"] == pytest.approx(0.5 * values["server"]["capacity"])
    assert values["setting"]["asked"] == "0.5x"


def test_a_lost_request_is_an_error_and_the_record_is_there(tmp_path, capsys):
    with served(small=(2,)) as server:
        assert bench(*of(server, tmp_path)) == 1
    assert "1 were lost and 0 failed" in capsys.readouterr().err
    record = ServingRecord.load(tmp_path / "out" / "serve.json")
    assert record.complete
    assert record.count(LOST) == 1


def test_a_server_that_dies_ends_the_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(serving_load, "_BETWEEN_S", 0.1)
    with served(seconds=0.4) as server:

        def die_at_the_fifth():
            while server.app.state.server.service.in_flight + server.drawer.drawn < 6:
                time.sleep(0.02)
            server.die()

        threading.Thread(target=die_at_the_fifth, daemon=True).start()
        assert bench(*of(server, tmp_path, "--seconds", "300")) == 1
    printed = capsys.readouterr()
    assert "The server was gone after" in printed.out
    assert "were lost and" in printed.err
    record = ServingRecord.load(tmp_path / "out" / "serve.json")
    assert not record.complete
    assert record.count(LOST) > 0


def test_ctrl_c_keeps_what_is_done(tmp_path, capsys):
    with served(seconds=0.05, limits={"in_flight": 1}) as server:

        def interrupt():
            while server.drawer.drawn < 6:
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        assert bench(*of(server, tmp_path, "--rate", "40", "--seconds", "300")) == 130
    printed = capsys.readouterr()
    assert "Interrupted. What became of" in printed.err
    assert "The run was interrupted: " in printed.out
    record = ServingRecord.load(tmp_path / "out" / "serve.json")
    assert not record.complete
    assert record.count(ANSWERED) >= 4
    assert record.count(OPEN) >= 1
    assert record.count(ANSWERED) + record.count(OPEN) == len(record.requests)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["serve.json"]


def test_ctrl_c_before_the_first_request_writes_nothing(tmp_path, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(serving_load, "first_picture", interrupted)
    with served() as server:
        assert bench(*of(server, tmp_path)) == 130
    assert "nothing was written" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


def test_a_key_is_read_from_a_file_and_kept_nowhere(tmp_path, capsys):
    key = add_key(tmp_path / "keys.txt", "load")
    (tmp_path / "key").write_text(f"{key}\n")
    (tmp_path / "wrong").write_text("another\n")
    with served(keys=tmp_path / "keys.txt") as server:
        assert bench(*of(server, tmp_path)) == 1
        assert "does not let this client in (401)" in capsys.readouterr().err
        assert bench(*of(server, tmp_path, "--key-file", tmp_path / "wrong")) == 1
        assert not list((tmp_path / "out").iterdir())
        assert bench(*of(server, tmp_path, "--key-file", tmp_path / "key")) == 0
    text = (tmp_path / "out" / "serve.json").read_text()
    assert key not in text
    assert "--key-file FILE" in text


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("--rate", "fast"), 2, "--rate 'fast' is not known"),
        (("--rate", "-1"), 2, "--rate '-1'"),
        (("--rate", "nanx"), 2, "--rate 'nanx'"),
        (("--rate", "1000", "--seconds", "1000"), 2, "send for a shorter time"),
        (("--seconds", "0"), 2, "It takes 1 to 86400"),
        (("--seconds", "nan"), 2, "It takes 1 to 86400"),
        (("--size", "512"), 2, "It takes WIDTHxHEIGHT"),
        (("--size", "0x8"), 2, "It takes WIDTHxHEIGHT"),
        (("--url", "127.0.0.1:7860"), 2, "It takes an address such as"),
        (("--url", "http://me:secret@host"), 2, "--key-file FILE"),
        (("--url", "http://127.0.0.1:1", "--model", "x"), 3, "does not support --model"),
        (("--key-file", "key"), 3, "--key-file without --url"),
        (("--url", "http://127.0.0.1:1"), 1, "There is no server at http://127.0.0.1:1"),
        (("--url", "http://127.0.0.1:1", "--key-file", "/nowhere"), 2, "No such file"),
        (("--prompts", "/nowhere.txt"), 2, "one prompt a line"),
        (("--batch", "8"), 3, "bench serve does not support --batch"),
        (("--pareto",), 3, "bench serve does not support --pareto"),
        (("--against", "x.json"), 3, "bench serve does not support --against"),
        (("--csv",), 3, "bench serve does not support --csv"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_sent(tmp_path, capsys, arguments, code, sentence):
    assert bench(*arguments, "--out", tmp_path) == code
    printed = capsys.readouterr().err
    assert sentence in printed
    assert "Traceback" not in printed
    assert "secret" not in printed
    assert not list(tmp_path.iterdir())


def test_other_benchmarks_take_no_options_of_a_load(capsys):
    with pytest.raises(SystemExit) as ended:
        main.run(["bench", "emoji", "--rate", "2"])
    assert ended.value.code == 3
    assert "--rate without serve" in capsys.readouterr().err


def test_help_and_list_name_it(capsys):
    assert bench("--help") == 0
    shown = capsys.readouterr().out
    assert "rocm-sd bench serve --url http://127.0.0.1:7860 --rate 0.8x --seconds 60" in shown
    assert "--key-file" in shown
    assert bench("--list") == 0
    assert "a server under load" in capsys.readouterr().out
