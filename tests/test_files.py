"""The one writer of files: whole or not at all, through links, and into what is no regular file."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest

from rocm_sd.errors import InvalidOption, NoDiskSpace
from rocm_sd.files import text_of, whole, write_text, write_texts
from rocm_sd.plain_json import read_json

FULL_DEVICE = Path("/dev/full")
needs_fifos = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")


def listed(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path):
    (tmp_path / "real").mkdir()
    for name, target in (("there", "real/old.txt"), ("dangling", "real/new.txt"), ("twice", "there")):
        (tmp_path / name).symlink_to(target)
    (tmp_path / "real" / "old.txt").write_text("old")
    for name in ("there", "dangling", "twice"):
        write_text(tmp_path / name, name)
        assert (tmp_path / name).is_symlink()
    assert (tmp_path / "real" / "old.txt").read_text() == "twice"
    assert (tmp_path / "real" / "new.txt").read_text() == "dangling"
    assert listed(tmp_path) == ["dangling", "real", "there", "twice"]
    assert listed(tmp_path / "real") == ["new.txt", "old.txt"]


@needs_fifos
def test_a_fifo_is_written_into_and_stays(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to("pipe")
    for path in (pipe, tmp_path / "link"):
        reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
        reader.start()
        write_text(path, "a frog\n" * 9999)
        reader.join(10)
        assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert read == ["a frog\n" * 9999] * 2
    assert listed(tmp_path) == ["link", "pipe"]


@needs_fifos
def test_a_fifo_gets_nothing_of_what_was_broken_off(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def broken_off():
        with whole(pipe) as unfinished:
            unfinished.write_text("half")
            raise RuntimeError("broken off")

    with pytest.raises(RuntimeError, match="broken off"):
        broken_off()
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_device_is_written_into_and_stays():
    write_text(Path(os.devnull), "nothing")
    assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)


@pytest.mark.skipif(not FULL_DEVICE.exists(), reason="needs /dev/full")
def test_a_full_device_is_a_sentence():
    with pytest.raises(NoDiskSpace, match="no space left to write /dev/full"):
        write_text(FULL_DEVICE, "a frog")
    assert stat.S_ISCHR(FULL_DEVICE.stat().st_mode)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_a_sentence_in_the_words_of_another_language_too(tmp_path, code):
    """safetensors writes in Rust: of the system's error it has the text."""

    def written():
        with whole(tmp_path / "file") as unfinished:
            unfinished.write_text("half")
            raise RuntimeError(f"I/O error: {os.strerror(code)} (os error {code})")

    with pytest.raises(NoDiskSpace, match="no space left to write"):
        written()
    assert listed(tmp_path) == []


def test_a_text_that_cannot_be_had_is_a_sentence(tmp_path):
    for name, content, words in (
        ("none", None, "there is no such file"),
        ("bytes", b"a \xff frog", "byte 2 is no UTF-8"),
        ("long", b"a" * 101, "it is larger than 0 MiB"),
        ("no\0name", None, "null"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(InvalidOption, match=words):
            text_of(tmp_path / name, lambda why: InvalidOption("--prompts", "it", [], hint=why), most=100)
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbfa frog")
    assert text_of(tmp_path / "marked", ValueError) == "a frog"


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero")
def test_a_device_without_an_end_is_not_read_for_ever():
    with pytest.raises(ValueError, match="it is larger than 1 MiB"):
        text_of(Path("/dev/zero"), ValueError, most=2**20)


def test_a_file_keeps_who_may_read_it(tmp_path):
    file = tmp_path / "mine"
    write_text(file, "first")
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    file.chmod(0o600)
    write_text(file, "second")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_name_as_long_as_names_may_be(tmp_path):
    write_text(tmp_path / ("n" * 255), "a frog")
    assert listed(tmp_path) == ["n" * 255]


def test_a_folder_is_not_written_over(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_text(tmp_path / "folder", "a frog")
    assert listed(tmp_path) == ["folder"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("broken", ["mkstemp", "write"])
def test_a_full_disk_is_a_sentence_and_leaves_what_was_there(tmp_path, monkeypatch, code, broken):
    file = tmp_path / "file"
    file.write_text("mine")

    def full(*_arguments, **_named):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(*{"mkstemp": (tempfile, "mkstemp"), "write": (Path, "write_text")}[broken], full)
    with pytest.raises(NoDiskSpace):
        write_text(file, "a frog")
    assert listed(tmp_path) == ["file"]
    assert file.read_text() == "mine"


def test_of_files_that_belong_together_none_is_left_where_one_cannot_be_written(tmp_path):
    (tmp_path / "folder" / "d").mkdir(parents=True)
    (tmp_path / "folder" / "before").write_text("mine")
    texts = {Path("before"): "new", Path("a"): "a", Path("b/c"): "c", Path("d"): "a folder is there"}
    with pytest.raises(OSError, match="directory"):
        write_texts(tmp_path / "folder", texts)
    left = [path.name for path in (tmp_path / "folder").rglob("*") if path.is_file()]
    assert left == ["before"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 16 KiB, which needs root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("cannot mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full(small_disk):
    write_text(small_disk / "file", "mine")
    with pytest.raises(NoDiskSpace):
        write_text(small_disk / "file", "a frog" * 10000)
    with pytest.raises(NoDiskSpace):
        write_texts(small_disk / "record", {Path("a"): "a", Path("b"): "b" * 20000})
    assert [path.name for path in small_disk.rglob("*") if path.is_file()] == ["file"]
    assert (small_disk / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "it is not an object, but a list"),
        ("null", "it is not an object, but a number or null"),
        ("[" * 100_000, "nested more than 64 levels"),
        ('{"a": "\\ud83d"}', "half of a surrogate pair"),
        ('{"a": ' + "1" * 5000 + "}", "digits"),
        ("{", "Expecting"),
    ],
    ids=lambda text: text[:20],
)
def test_json_that_cannot_be_used_has_a_reason(tmp_path, text, reason):
    (tmp_path / "file").write_text(text)
    with pytest.raises(ValueError, match=reason):
        read_json(tmp_path / "file", ValueError, of=dict)


def test_a_whole_character_in_two_halves_is_read(tmp_path):
    (tmp_path / "file").write_text('{"a": "\\ud83d\\ude00"}')
    assert read_json(tmp_path / "file", ValueError, of=dict) == {"a": "\U0001f600"}
