"""What an export does to its folder: interrupted, resumed, refused; nothing half-written is left."""

from __future__ import annotations

import shutil

import pytest
import torch

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from pipelines import CASES, tiny_pipeline
from rocm_sd.cli import main
from rocm_sd.errors import CorruptModel, NoDiskSpace, RocmSdError, Unsupported
from rocm_sd.onnx import exporting, layout
from rocm_sd.onnx.exporting import export_pipeline


class Stopped(BaseException):
    """As Ctrl-C is, which pytest would take for its own."""


def export_up_to(what, pipe, out, **options):
    """What was under way until then; the UNet takes most of the time and is never traced here."""
    seen = []

    def progress(_done, _total, said):
        seen.append(said)
        if said.startswith(what):
            raise Stopped

    with pytest.raises(Stopped):
        export_pipeline(pipe, out, source="tiny", progress=progress, **options)
    return seen


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return tmp_path_factory.mktemp("tokens")


@pytest.fixture
def pipe(tokens):
    return tiny_pipeline(tokens)


@pytest.fixture(scope="module")
def half_done(tokens, tmp_path_factory):
    """Interrupted when the UNet was to be traced: the text encoder is done."""
    out = tmp_path_factory.mktemp("exports") / "tiny"
    export_up_to("unet: tracing", tiny_pipeline(tokens), out)
    return out


@pytest.fixture
def begun(half_done, tmp_path):
    return shutil.copytree(half_done, tmp_path / "begun")


def test_an_interrupted_export_keeps_its_finished_parts_and_nothing_half_written(begun):
    manifest = layout.Manifest.load(begun)
    assert [part.name for part in manifest.parts] == ["text_encoder"]
    layout.require_digests(begun, manifest)
    assert not [path for path in begun.iterdir() if path.name.startswith(".")]
    assert not (begun / "unet").exists()


def test_the_same_export_goes_on_after_the_finished_parts(begun, pipe):
    before = (begun / "text_encoder" / "model.onnx").stat().st_mtime_ns
    (begun / ".unfinished-unet-left-by-a-kill").mkdir()
    assert export_up_to("unet: tracing", pipe, begun) == ["starting", "unet: tracing"]
    assert (begun / "text_encoder" / "model.onnx").stat().st_mtime_ns == before
    assert not list(begun.glob(".unfinished-*"))


def test_a_damaged_part_is_exported_again(begun, pipe):
    data = begun / "text_encoder" / "model.onnx.data"
    raw = bytearray(data.read_bytes())
    raw[100] ^= 1
    data.write_bytes(raw)
    assert "text_encoder: tracing" in export_up_to("unet: tracing", pipe, begun)
    layout.require_digests(begun, layout.Manifest.load(begun))


@pytest.mark.parametrize("change", ["weights", "dtype", "source"])
def test_another_models_export_is_not_written_over(begun, pipe, change):
    options = {"source": "tiny"}
    if change == "weights":
        pipe.text_encoder.get_input_embeddings().weight.data.add_(0.1)
    if change == "dtype":
        pipe.to(torch.float16)
    if change == "source":
        options["source"] = "another"
    before = (begun / layout.MANIFEST).read_text()
    with pytest.raises(RocmSdError, match="--force"):
        export_pipeline(pipe, begun, **options)
    assert (begun / layout.MANIFEST).read_text() == before
    with pytest.raises(Stopped):
        export_pipeline(pipe, begun, force=True, progress=stop_at_once, **options)


def test_nothing_of_another_export_is_left_beside_what_is_written_over_it(begun, pipe):
    """Interrupted then, an old UNet would be run with a new text encoder, and an old safety checker with both."""
    for name in ("unet", "safety_checker"):
        shutil.copytree(begun / "text_encoder", begun / name)
    (begun / "unet" / "mine.txt").write_text("of this folder")
    pipe.text_encoder.get_input_embeddings().weight.data.add_(0.1)
    with pytest.raises(Stopped):
        export_pipeline(pipe, begun, source="tiny", force=True, progress=stop_at("text_encoder: tracing"))
    assert layout.found_parts(begun) == {}
    assert layout.Manifest.load(begun).parts == ()


def test_a_stock_models_weights_are_not_written_over_even_by_force(tmp_path, pipe):
    pipe.save_pretrained(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(RocmSdError, match="holds something else than ONNX"):
        export_pipeline(pipe, tmp_path, source="tiny", force=True, progress=stop_at_once)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def stop_at(what):
    def progress(_done, _total, said):
        if said.startswith(what):
            raise Stopped

    return progress


def test_a_damaged_part_is_gone_when_its_export_is_interrupted_again(begun, pipe):
    data = begun / "text_encoder" / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:-1])
    export_up_to("text_encoder: tracing", pipe, begun)
    assert layout.found_parts(begun) == {}


def stop_at_once(*_):
    raise Stopped


def test_a_folder_of_something_else_and_a_file_are_refused(pipe, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RocmSdError, match="holds something else"):
        export_pipeline(pipe, tmp_path, source="tiny")
    with pytest.raises(RocmSdError, match="is a file"):
        export_pipeline(pipe, tmp_path / "notes.txt", source="tiny")
    (tmp_path / layout.MANIFEST).write_text("{")
    with pytest.raises(CorruptModel, match="--force"):
        export_pipeline(pipe, tmp_path, source="tiny")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_full_disk_is_said_before_anything_is_written(pipe, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**30, 2**30 - 2**20, 2**20))
    with pytest.raises(NoDiskSpace, match=r"MB needed, 1\.0 MB free.*another disk"):
        export_pipeline(pipe, tmp_path / "out", source="tiny")
    assert not (tmp_path / "out").exists()


def test_a_part_that_differs_from_torch_is_not_kept(pipe, tmp_path, monkeypatch):
    def wrong(each, _file):
        raise exporting.RocmSdError(f"{each.name} differs")

    monkeypatch.setattr(exporting, "require_same", wrong)
    with pytest.raises(RocmSdError, match="text_encoder differs"):
        export_pipeline(pipe, tmp_path / "out", source="tiny")
    assert layout.Manifest.load(tmp_path / "out").parts == ()
    assert not (tmp_path / "out" / "text_encoder").exists()


def test_other_pipelines_are_refused_with_what_to_give(tokens, tmp_path):
    with pytest.raises(Unsupported, match=r"StableDiffusion3Pipeline.*or SDXL"):
        export_pipeline(CASES["sd3"].build(tokens), tmp_path / "out", source="sd3")
    with pytest.raises(Unsupported, match="StableDiffusionInpaintPipeline"):
        export_pipeline(CASES["sd15-inpaint9"].build(tokens), tmp_path / "out", source="inpaint")


def test_the_command_says_what_to_type(capsys, tmp_path):
    for arguments, words in (
        (["emoji", str(tmp_path)], "There is no model at emoji."),
        (["./nothing", str(tmp_path)], "emoji-sd"),
    ):
        with pytest.raises(SystemExit) as ended:
            main.run(["onnx", "export", *arguments])
        assert ended.value.code == 4
        assert words in capsys.readouterr().err


def test_an_export_is_not_exported_again(begun, capsys):
    with pytest.raises(SystemExit) as ended:
        main.run(["onnx", "export", str(begun), str(begun / "again")])
    assert ended.value.code == 1
    assert "is an export to ONNX already. Give the model itself." in " ".join(capsys.readouterr().err.split())


def test_ctrl_c_ends_the_command_with_130_and_says_how_to_go_on(monkeypatch, capsys, tmp_path):
    def interrupted(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(exporting, "export_pipeline", interrupted)
    with pytest.raises(SystemExit) as ended:
        main.run(["onnx", "export", "emoji-sd", str(tmp_path / "out")])
    assert ended.value.code == 130
    assert "type the same command again" in capsys.readouterr().err


@pytest.mark.parametrize("verb", [["onnx"], ["onnx", "export"], ["export"]])
def test_each_of_the_two_exports_names_the_other(verb, capsys):
    with pytest.raises(SystemExit):
        main.run([*verb, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "rocm-sd onnx export" in shown
    assert "rocm-sd export" in shown
