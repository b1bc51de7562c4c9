"""rocm-sd quality: two folders of pictures, or two settings of the built-in model."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from rocm_sd.cli import main
from rocm_sd.cli.quality import parse_settings
from rocm_sd.errors import InvalidOption


def quality(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main.run(["quality", *map(str, arguments)])
    return int(ended.value.code or 0)


def folder_of(path, names=("one", "two", "three"), *, noise=0.0, size=32):
    """Pictures that depend on their names; `noise` is the deviation of what is added, in steps of 1/255."""
    path.mkdir()
    for number, name in enumerate(names):
        rng = np.random.default_rng(number)
        # Away from 0 and 255, so that nothing of the noise is cut off.
        clean = rng.uniform(80, 170, (size, size, 3))
        noisy = clean + noise * rng.standard_normal(clean.shape)
        Image.fromarray(noisy.clip(0, 255).round().astype(np.uint8)).save(path / f"{name}.png")
    return path


def test_two_folders_are_compared_by_the_names_they_share(tmp_path, capsys):
    before = folder_of(tmp_path / "before", ("one", "two", "three"))
    after = folder_of(tmp_path / "after", ("one", "two", "four"), noise=10)
    assert quality(before, after, "--out", tmp_path / "out") == 0
    result = json.loads((tmp_path / "out" / "quality.json").read_text())
    assert result["pictures"] == 2
    assert result["equal"] == 0
    # 10 / 255: 20 log10(25.5) = 28.1 dB.
    assert result["worst_psnr_db"] == pytest.approx(28.1, abs=0.3)
    assert 0.5 < result["mean_ssim"] < 0.999
    assert result["frechet_distance"] > 0
    # Nobody knows what the pictures of a folder should show.
    assert "prompt_match" not in result
    with Image.open(tmp_path / "out" / "quality.png") as image:
        assert image.info["first"] == str(before)
        assert image.info["second"] == str(after)
    printed = capsys.readouterr().out
    assert "worst PSNR of a pair" in printed
    assert "28." in printed


def test_equal_folders_are_said_to_be_equal(tmp_path, capsys):
    first, second = folder_of(tmp_path / "a"), folder_of(tmp_path / "b")
    assert quality(first, second, "--out", tmp_path / "out") == 0
    result = json.loads((tmp_path / "out" / "quality.json").read_text())
    assert result["equal"] == result["pictures"] == 3
    assert result["worst_psnr_db"] is None
    assert result["mean_ssim"] == pytest.approx(1)
    assert result["frechet_distance"] == pytest.approx(0, abs=1e-4)
    assert "all pictures are equal" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("{a}", "stock"), 3, "a folder against settings"),
        (("stock", "{a}"), 3, "Give two folders, or two settings."),
        (("stock", "speed=9"), 2, "setting 'speed=9' is not known."),
        (("stock", "/no/such/folder"), 2, "Use one of: a folder, stock, rocm-sd, engine=..."),
        (("stock", "steps=many"), 2, "It takes a number."),
        (("stock", "engine=magic"), 2, "Use one of: stock, rocm-sd."),
        (("stock", "rocm-sd", "--prompts", "1"), 3, "1 prompts: it takes 2 or more"),
        (("{a}", "{others}"), 4, "give folders whose files are named alike"),
        (("{a}", "{empty}"), 4, "share 0 pictures of the same name"),
        (("{a}", "{larger}"), 3, "pictures of different shapes"),
        (("{a}", "{mixed}"), 3, "pictures of different sizes"),
        (("{a}", "{broken}"), 3, "two.png: it is not a readable picture"),
        (("{a}", "{a}", "--clip", "{empty}"), 3, "--clip with folders"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence_and_an_exit_code(tmp_path, capsys, arguments, code, sentence):
    places = {
        "a": folder_of(tmp_path / "a"),
        "others": folder_of(tmp_path / "others", ("four", "five")),
        "larger": folder_of(tmp_path / "larger", size=48),
        "mixed": folder_of(tmp_path / "mixed"),
        "broken": folder_of(tmp_path / "broken"),
        "empty": tmp_path / "empty",
    }
    places["empty"].mkdir()
    Image.new("RGB", (8, 8)).save(places["mixed"] / "two.png")
    whole = (places["broken"] / "two.png").read_bytes()
    (places["broken"] / "two.png").write_bytes(whole[: len(whole) // 2])
    given = [argument.format(**places) for argument in arguments]
    assert quality(*given, "--out", tmp_path / "out") == code
    printed = " ".join(capsys.readouterr().err.split())
    assert sentence in printed
    assert "Traceback" not in printed
    assert not list((tmp_path / "out").glob("*"))


def test_settings_are_read_in_any_order():
    assert parse_settings("steps=2,stock") == parse_settings("stock,steps=2")
    assert parse_settings("steps=2,stock")["engine"] == "stock"
    assert parse_settings("rocm-sd")["engine"] == "rocm-sd"
    assert parse_settings("level=memory,guidance=2.5,scheduler=euler") == parse_settings("rocm-sd") | {
        "level": "memory",
        "guidance": 2.5,
        "scheduler": "euler",
    }
    with pytest.raises(InvalidOption, match="steps="):
        parse_settings("steps=")


def test_two_settings_of_the_built_in_model(tmp_path, capsys):
    options = ("--prompts", 2, "--seed", 3, "--device", "cpu", "--out", tmp_path)
    assert quality("steps=2,stock", "steps=2,rocm-sd", *options) == 0
    result = json.loads((tmp_path / "quality.json").read_text())
    assert result["pictures"] == 2
    # The same seeds and an exact level: nothing but rounding may differ.
    assert result["worst_psnr_db"] is None or result["worst_psnr_db"] > 40
    assert [side["setting"] for side in result["prompt_match"]] == ["steps=2,stock", "steps=2,rocm-sd"]
    for side in result["prompt_match"]:
        for measure in ("top-1", "top-5", "colour"):
            value, low, high = side[measure]
            assert 0 <= low <= value <= high <= 1
    assert "prompt match, top-5" in capsys.readouterr().out


def test_fewer_steps_give_other_pictures(tmp_path):
    options = ("--prompts", 2, "--device", "cpu", "--out", tmp_path)
    assert quality("steps=1,stock", "steps=2,stock", *options) == 0
    result = json.loads((tmp_path / "quality.json").read_text())
    assert result["equal"] == 0
    assert result["worst_psnr_db"] < 35
