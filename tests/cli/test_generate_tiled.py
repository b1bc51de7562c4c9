"""rocm-sd generate --tiled: a picture above the model's own size, and what is said of it."""

from __future__ import annotations

import pytest
from PIL import Image

from rocm_sd.cli import main


def rocm_sd(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main.run(["generate", *arguments])
    return int(ended.value.code or 0)


def test_a_large_picture_says_that_it_approximates_and_how_its_seams_are(tmp_path, capsys):
    asked = ("a red apple", "--steps", "1", "--device", "cpu", "--out", str(tmp_path), "--tiled")
    assert rocm_sd(*asked, "--size", "192x128") == 0
    printed = capsys.readouterr().out
    assert "tiled: UNet2DConditionModel approximates pictures above 128 pixels a side" in printed
    assert "tiled: gradients across the borders of tiles are " in printed
    (picture,) = tmp_path.glob("*.png")
    assert Image.open(picture).size == (192, 128)
    assert rocm_sd(*asked) == 0
    assert "tiled: one tile covers the picture: it is exact" in capsys.readouterr().out


@pytest.mark.parametrize("other", [("--quality", "high"), ("--gpus", "2", "--device", "cpu")])
def test_what_does_not_go_with_it_is_said(tmp_path, capsys, other):
    assert rocm_sd("a frog", "--tiled", "--out", str(tmp_path), *other) == 3
    assert "--tiled does not support" in " ".join(capsys.readouterr().err.split())
