"""What nobody should type, and some do: each ends with one sentence and an exit code, and never with a traceback."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import subprocess
import sys
import textwrap

import pytest
from PIL import Image

from pipelines import tiny_pipeline
from rocm_sd import errors
from rocm_sd.cli import main

FULL = "/dev/full"
needs_full = pytest.mark.skipif(not os.path.exists(FULL), reason="needs /dev/full")  # noqa: PTH110


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_pipeline(tmp_path_factory.mktemp("tokenizer")).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def ends(capsys):
    """(exit code, standard output, standard error) of a command line; the error has no traceback in it."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main.run(list(arguments))
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        return int(ended.value.code or 0), shown.out, shown.err

    return run


def drawn(ends, model, out, *more, prompt="a frog"):
    common = ("--model", model, "--size", "16x16", "--steps", "2", "--out", str(out), "--device", "cpu")
    return ends("generate", prompt, *common, *more)


@pytest.mark.parametrize("prompt", ["a [/b] frog", "a [bold]frog[/bold]", "[", "[link=x]", "[/]"])
def test_markup_in_a_prompt_and_a_path_is_text(ends, model, tmp_path, prompt):
    out = tmp_path / "[red]out[" / "x]"
    code, shown, _ = drawn(ends, model, out, "--compare", prompt=prompt)
    assert code == 0
    assert f"wrote {out}" in shown
    (picture,) = (file for file in out.iterdir() if not file.name.startswith("compare"))
    assert Image.open(picture).info["prompt"] == prompt


def test_markup_in_the_names_of_folders_that_are_compared(ends, tmp_path):
    pytest.importorskip("skimage")
    folders = [tmp_path / "a[red]b[", tmp_path / "c[bold]d"]
    for folder in folders:
        folder.mkdir()
        for name in ("1.png", "2.png"):
            Image.new("RGB", (16, 16), "red").save(folder / name)
    code, shown, _ = ends("quality", *map(str, folders), "--out", str(tmp_path / "[out]"))
    assert code == 0
    assert f"wrote {tmp_path / '[out]' / 'quality.png'}" in shown
    for folder in folders:
        folder.joinpath("2.png").unlink()
    code, _, said = ends("quality", *map(str, folders), "--out", str(tmp_path / "out"))
    assert code == 4
    assert str(folders[0]) in said


@pytest.mark.parametrize(
    ("options", "expected", "words"),
    [
        (("--guidance", "inf"), 2, "guidance inf is not known. It takes a finite number"),
        (("--guidance", "nan"), 2, "guidance nan is not known"),
        (("--guidance=-inf",), 2, "guidance -inf is not known"),
        (("--seed", str(2**64)), 2, "It takes a whole number from"),
        (("--seed", str(2**64 - 1), "--batch", "2"), 2, "each further picture takes the next"),
        ((f"--seed={-(2**63) - 1}",), 2, "It takes a whole number from"),
        (("--seed", "9" * 5000), 2, "Invalid value for '--seed'"),
        (("--device", "tpu"), 2, "--device 'tpu' is not known. Use one of: cuda, cpu."),
        (("--device", "meta"), 6, "torch cannot use meta here"),
        (("--device", "[/x]"), 2, "--device '[/x]' is not known"),
        (("--scheduler", "lcm", "--steps", "60"), 3, "60 steps: LCMScheduler takes 50 at most"),
        (("--size", "8000000x8000000"), 3, "a multiple of 8, 65536 at most"),
        (("--size", "9" * 5000 + "x8"), 3, "it takes WIDTHxHEIGHT"),
        (("--batch", str(10**12)), 3, "4096 at most"),
        (("--negative", "\udcff"), 2, "negative '\\udcff' is not known. It is not UTF-8"),
        (("--model", "\udcff"), 4, "There is no model at \\udcff"),
        (("--model", "[/b]"), 4, "There is no model at [/b]"),
        (("--model", "x\0y"), 4, "There is no model at"),
    ],
    ids=lambda value: repr(value)[:50],
)
def test_an_option_without_sense_is_one_sentence(ends, model, tmp_path, options, expected, words):
    code, _, said = drawn(ends, model, tmp_path / "out", *options)
    assert code == expected
    assert " ".join(words.split()) in " ".join(said.split())
    assert not list(tmp_path.rglob("*.png"))


def test_a_prompt_that_is_not_text_is_one_sentence(ends, model, tmp_path):
    code, _, said = drawn(ends, model, tmp_path, prompt="a \udce9 frog")
    assert code == 2
    assert "It is not UTF-8" in said


def test_settings_of_a_comparison_are_held_to_the_same(ends, tmp_path):
    code, _, said = ends("quality", "guidance=nan", "stock", "--prompts", "2", "--out", str(tmp_path))
    assert code == 2
    assert "guidance nan is not known" in said


@pytest.mark.parametrize(
    "text",
    [
        "[]", "3", "null", '"unet"', "{", "[" * 100_000, '{"unet": "\\ud800"}', '{"unet": []}',
        '{"unet": [null, 5], "_class_name": 7}', "1" * 400, '{"_class_name": ' + "1" * 400 + "}",
    ],
    ids=lambda text: text[:20],
)  # fmt: skip
@pytest.mark.parametrize("verb", ["generate", "export"])
def test_an_index_that_is_no_index(ends, tmp_path, text, verb):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model_index.json").write_text(text)
    arguments = {"generate": ("a frog", "--out", str(tmp_path)), "export": ("--out", str(tmp_path / "x.safetensors"))}
    code, _, said = ends(verb, *arguments[verb], "--model", str(folder))
    assert code in {3, 4}
    assert said.startswith("error: ")


@pytest.mark.parametrize("content", [b"[]", b'{"layers_per_block": 1}', b'{"in_channels": ' + b"1" * 400 + b"}"])
def test_a_config_that_is_no_config(ends, model, tmp_path, content):
    import shutil

    folder = tmp_path / "copy"
    shutil.copytree(model, folder)
    (folder / "unet" / "config.json").write_bytes(content)
    code, _, said = ends("generate", "a frog", "--model", str(folder), "--out", str(tmp_path))
    assert code == 4
    assert "could not be loaded" in said


@pytest.mark.parametrize("size", [(1, 1), (6, 64)])
def test_pictures_too_small_to_compare(ends, tmp_path, size):
    pytest.importorskip("skimage")
    for side in ("a", "b"):
        (tmp_path / side).mkdir()
        for name in ("1.png", "2.png"):
            Image.new("RGB", size).save(tmp_path / side / name)
    code, _, said = ends("quality", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "out"))
    assert code == 3
    assert "SSIM looks at 7x7 pixels at once" in said


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n" + b"\0" * 100, b"PNG"])
def test_a_picture_that_is_none(ends, tmp_path, content):
    for side in ("a", "b"):
        (tmp_path / side).mkdir()
        (tmp_path / side / "1.png").write_bytes(content)
    code, _, said = ends("quality", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "out"))
    assert code == 3
    assert "it is not a readable picture" in said


def test_exporting_to_nothing(ends, tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    code, _, said = ends("tune", "--export", "")
    assert code == 2
    assert "It cannot be written" in said
    assert [file.name for file in tmp_path.iterdir()] in ([], ["cache"])


@needs_full
@pytest.mark.parametrize("verb", ["tune", "profile", "report"])
def test_a_full_device_ends_with_five(ends, tmp_path, monkeypatch, verb):
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path / "cache"))
    trace = tmp_path / "kernels.csv"
    trace.write_text(
        '"Kind","Kernel_Name","Correlation_Id","Start_Timestamp","End_Timestamp"\n"KERNEL_DISPATCH","k",1,10,20\n'
    )
    picture = tmp_path / "p.png"
    Image.new("RGB", (8, 8)).save(picture)
    arguments = {
        "tune": ("--export", FULL),
        "profile": ("--rocprof", str(trace), "--flame", FULL),
        "report": ("--picture", str(picture), "--out", FULL),
    }
    monkeypatch.chdir(tmp_path)
    code, _, said = ends(verb, *arguments[verb])
    assert (code, "There is no space left to write /dev/full" in said) == (5, True)


@pytest.mark.parametrize("verb", ["bench", "doctor"])
def test_a_full_disk_ends_with_five_and_leaves_nothing(ends, tmp_path, monkeypatch, verb):
    from pathlib import Path

    from rocm_sd import files

    disk = tmp_path / "disk"
    real = files.tempfile.mkstemp

    def full(dir=None, **options):  # noqa: A002 -- its name
        if dir is not None and disk in (Path(dir), *Path(dir).parents):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(dir=dir, **options)

    monkeypatch.setattr(files.tempfile, "mkstemp", full)
    arguments = {
        "bench": ("op:geglu", "--repeats", "1", "--out", str(disk), "--device", "cpu"),
        "doctor": ("bf16", "--record", str(disk), "--quick"),
    }
    code, _, said = ends(verb, *arguments[verb])
    assert (code, "There is no space left to write" in said) == (5, True)
    assert [file for file in disk.rglob("*") if file.is_file()] == []


@pytest.mark.parametrize("fault", ["raise ZeroDivisionError('mine')", "import sys; sys.exit(0)", "raise SystemExit"])
def test_a_plug_in_that_raises_or_leaves_is_skipped_with_a_warning(monkeypatch, caplog, fault):
    from rocm_sd import plugging

    class Point:
        name = value = "mine"

        def load(self):
            exec(fault)

    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_group: [Point()])
    assert plugging.by_name("rocm_sd.engines", str, "engine", ()) == {}
    assert "the engine mine is skipped" in caplog.text


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ZeroDivisionError("mine"), 1, "an error that rocm-sd does not know: ZeroDivisionError: mine"),
        (KeyError("[/b]"), 1, "KeyError: '[/b]'"),
        (RuntimeError(), 1, "RuntimeError: RuntimeError"),
        (MemoryError(), 1, "There is not enough memory for this"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), 1, "There is not enough memory"),
        (OSError(errno.ENOSPC, "No space left", "x"), 5, "There is no space left to write x"),
        (PermissionError(errno.EACCES, "Permission denied", "x"), 1, "x: Permission denied."),
        (UnicodeEncodeError("utf-8", "\udcff", 0, 1, "no"), 1, "UnicodeEncodeError"),
    ],
)
def test_any_error_becomes_a_sentence(ends, monkeypatch, error, code, words):
    def raising(*_arguments):
        raise error

    monkeypatch.setattr(main, "app", raising)
    ended, _, said = ends("info")
    assert ended == code == errors.explained(error).exit_code
    assert words in said


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ImportError("half a module")])
def test_ctrl_c_during_imports_ends_with_130(ends, monkeypatch, error):
    def raising(*_arguments):
        error.__context__ = KeyboardInterrupt()  # as a module raises it that was interrupted
        raise error

    monkeypatch.setattr(main, "app", raising)
    assert ends("info") == (130, "", "")


def test_ctrl_c_while_the_command_line_is_imported_ends_with_130(tmp_path):
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    program = "import rocm_sd.cli.entry as e; e.run()"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_bytes_of_a_command_line_that_are_no_text(tmp_path):
    program = textwrap.dedent("""
        import sys
        from rocm_sd.cli.main import run
        run(["generate", "a " + sys.argv[1] + " frog"])
    """)
    ended = subprocess.run([sys.executable, "-c", program, b"\xff\xfe"], capture_output=True, check=False, cwd=tmp_path)
    assert ended.returncode == 2
    assert b"It is not UTF-8" in ended.stderr
    assert b"Traceback" not in ended.stderr
