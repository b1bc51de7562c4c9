"""Pictures on an emulated card, a tiny model in emoji-sd's place: what is kept, what is counted, what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("tinygrad", reason="the emulator decodes by tinygrad's tables")
pytest.importorskip("triton", reason="AMD code is compiled by Triton")

from PIL import Image

from pipelines import tiny_pipeline
from rocm_sd.bench import emulated_picture
from rocm_sd.bench.emulated_picture import PictureRequest, draw
from rocm_sd.cli import main
from rocm_sd.errors import NumericsFailure
from rocm_sd.verify import compiler

REQUEST = PictureRequest("gfx1100", "a frog", steps=2)


@pytest.fixture(autouse=True, scope="module")
def tiny(tmp_path_factory):
    tokenizer, threads = tmp_path_factory.mktemp("tokenizer"), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulated_picture, "load_pipeline", lambda _, __, dtype: tiny_pipeline(tokenizer).to(dtype))
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """The folder of a picture that was given up at the first launch of its second step, and launches by part."""
    folder, launches = tmp_path_factory.mktemp("drawn"), []

    def note(part, _launch):
        launches.append(part)
        if part == "step 2":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        draw(REQUEST, folder, note)
    return folder, launches


@pytest.fixture(scope="module")
def drawn(interrupted):
    """The picture, gone on with; the folder; and what was launched for it."""
    folder, launches = interrupted[0], []
    return draw(REQUEST, folder, lambda part, _: launches.append(part)), folder, launches


def test_what_was_drawn_is_not_drawn_again(interrupted, drawn):
    picture, folder, launches = drawn
    assert interrupted[1].count("step 2") == 1
    assert set(launches) == {"step 2", "decode"}
    once = interrupted[1].count("step 1")
    assert launches.count("step 2") == once == picture.parts["step 1"].total.launches
    again = draw(REQUEST, folder, lambda part, _: pytest.fail(f"{part} was drawn again"))
    assert np.array_equal(np.asarray(again.image), np.asarray(picture.image))
    assert again.parts == picture.parts


def test_what_decides_a_picture_decides_its_place(tmp_path):
    pipe, other = (tiny_pipeline(tmp_path, seed) for seed in (0, 1))
    assert REQUEST.key(pipe) == replace(REQUEST).key(tiny_pipeline(tmp_path, 0))
    others = (replace(REQUEST, seed=1), pipe), (replace(REQUEST, arch="gfx942"), pipe), (REQUEST, other)
    assert len({REQUEST.key(pipe), *(request.key(model) for request, model in others)}) == 4


def test_what_is_damaged_is_drawn_anew(drawn, tmp_path):
    shutil.copytree(drawn[1], tmp_path, dirs_exist_ok=True)
    (file,) = tmp_path.rglob("decode.safetensors")
    file.write_bytes(b"no tensors")
    launches = []
    draw(REQUEST, tmp_path, lambda part, _: launches.append(part))
    assert set(launches) == {"decode"}


def test_the_work_is_counted_and_the_gate_asked(drawn):
    picture = drawn[0]
    assert list(picture.parts) == ["step 1", "step 2", "decode"]
    step = picture.parts["step 1"]
    assert step.total.launches == sum(row.launches for row in step.rows)
    assert {"_conv2d", "_attend", "_product"} <= {row.kernel for row in step.rows}
    assert all(row.variants <= row.launches for row in step.rows)
    assert all(row.modelled_us > 0 and row.wave_instructions > 0 and row.bytes > 0 for row in step.rows)
    # The first and the last convolution, of 4 channels, and the embedding of the time are stock's.
    assert 0 < step.stock_calls < 120
    assert "allowed" in step.gate
    assert "allowed" in picture.parts["decode"].gate
    assert picture.parts["step 2"].gate is None
    assert picture.image.size == picture.stock_image.size
    assert picture.shows == picture.stock_shows


def test_as_shipped_fewer_kernels_are_ours(drawn, tmp_path):
    ours = drawn[0].parts["step 1"]
    theirs = draw(PictureRequest("gfx1100", "a frog", 1, plan="shipped"), tmp_path).parts["step 1"]
    assert theirs.total.launches < ours.total.launches
    assert theirs.stock_calls > ours.stock_calls


def test_wrong_numbers_are_an_error_and_are_not_kept(tmp_path):
    def edit(code):
        changed = code.assembly.replace("v_wmma_f32_16x16x16_f16", "v_wmma_f32_16x16x16_bf16")
        return compiler.assemble(code.arch, changed, lds=code.lds)

    with pytest.raises(NumericsFailure, match="The UNet differs from float64"):
        draw(REQUEST, tmp_path, edit=edit)
    assert not list(tmp_path.rglob("step-1*"))


def rocm_sd(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main.run(["verify", "--picture", *arguments])
    return int(ended.value.code or 0)


def test_the_command_writes_a_picture_and_its_counts(tmp_path, capsys):
    asked = ("--arch", "gfx1201", "--steps", "1", "--prompt", "a frog", "--out", str(tmp_path))
    assert rocm_sd(*asked) == 0
    shown = capsys.readouterr().out
    assert "modelled, never measured" in shown
    assert "step 1: ours" in shown
    record = json.loads((tmp_path / "gfx1201-every-1-steps.json").read_text(encoding="utf-8"))
    assert record["request"]["arch"] == "gfx1201"
    assert record["parts"]["decode"]["total"]["launches"] > 0
    with Image.open(tmp_path / "gfx1201-every-1-steps.png") as picture:
        assert picture.width > 600
    assert rocm_sd(*asked, "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["parts"] == record["parts"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--arch", "gfx1030"), "gfx1030"),
        (("--plan", "none"), "every"),
        (("--steps", "0"), "steps"),
        (("conv2d",), "ops by name"),
    ],
)
def test_what_it_cannot_draw_is_said(arguments, said, capsys):
    assert rocm_sd(*arguments) in {2, 3}
    assert said in capsys.readouterr().err
