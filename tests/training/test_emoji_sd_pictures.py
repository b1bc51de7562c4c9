"""Drawing: the font's glyphs, the glyph file, composition, and the embedding's reading of a background."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from training.emoji_sd.compose import Composer
from training.emoji_sd.glyphs import pack_glyphs, read_glyphs
from training.emoji_sd.render import FONT, draw, open_font
from training.emoji_sd.scenes import SceneSampler, arrays_of, random_layers

from rocm_sd.errors import CorruptModel, ModelNotFound
from rocm_sd.models.emoji import COLOURS, EMOJI
from rocm_sd.quality.embedding import EmojiEmbedding, background_colour, load_embedding


def test_the_glyph_file_gives_back_the_glyphs(glyphs, tmp_path):
    path = tmp_path / "glyphs.bin"
    path.write_bytes(pack_glyphs(glyphs, preset=0))
    assert np.array_equal(read_glyphs(path), glyphs)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CorruptModel, match="render"):
        read_glyphs(path)
    with pytest.raises(ModelNotFound, match="render"):
        read_glyphs(tmp_path / "none.bin")


@pytest.mark.skipif(not FONT.exists(), reason="fonts-noto-color-emoji is not installed")
def test_the_font_draws_joined_emoji_and_admits_what_it_lacks():
    font = open_font(FONT)
    advance = font.getlength("\N{RED APPLE}")
    apple, astronaut = draw(font, "\N{RED APPLE}", advance), draw(font, "👩‍🚀", advance)
    assert apple.shape == astronaut.shape == (128, 128, 4)
    # Premultiplied: no colour above its alpha.
    assert (apple[..., :3] <= apple[..., 3:]).all()
    red, green, blue = apple[60:100, 40:90, :3].reshape(-1, 3).mean(0)
    assert red > 2 * green
    assert red > 2 * blue
    assert draw(font, "\N{RED APPLE}\N{RED APPLE}", advance) is None
    assert draw(font, "\U0010ffff", advance) is None


def test_backgrounds_reach_the_border_and_objects_stay_inside(glyphs):
    composer = Composer(glyphs, "cpu")
    pictures = SceneSampler(0, list(range(len(glyphs)))).batch(0, 96)
    images = composer.compose(*arrays_of(pictures))
    assert images.shape == (96, 3, 128, 128)
    for image, picture in zip(images, pictures, strict=True):
        rgb = torch.tensor(picture.rgb)[:, None, None]
        if len(picture.layers) == 1:
            layer = picture.layers[0]
            disc = torch.from_numpy(glyphs[layer.emoji, 64, 64, :3] / 255.0)
            channel = int((disc - rgb[:, 0, 0]).abs().argmax())
            area = ((image - rgb) / (disc[:, None, None] - rgb))[channel].sum()
            # The disc is wholly in the frame exactly when all its area is there.
            assert area == pytest.approx(np.pi * (60 * layer.scale) ** 2, rel=0.02)
        if picture.scene.colour:
            assert background_colour(image) == picture.scene.colour
        else:
            assert background_colour(image) == "white"
        corners = image[:, [0, 0, -1, -1], [0, -1, 0, -1]]
        assert torch.allclose(corners, rgb[..., 0].expand(3, 4), atol=0.02)


def test_left_and_above_are_where_they_should_be(glyphs):
    composer = Composer(glyphs, "cpu")
    pictures = [p for p in SceneSampler(5, list(range(len(glyphs)))).batch(0, 400) if p.scene.relation]
    assert {p.scene.relation for p in pictures} == {"and", "next to", "above"}
    for picture, image in zip(pictures, composer.compose(*arrays_of(pictures)), strict=True):
        first = torch.from_numpy(glyphs[picture.scene.objects[0], 64, 64, :3] / 255.0).float()
        place = (32, 64) if picture.scene.relation == "above" else (64, 32)
        assert torch.allclose(image[:, place[0], place[1]], first, atol=0.02)


def test_random_pictures_depend_on_seed_and_step_alone(glyphs):
    composer = Composer(glyphs, "cpu")
    emoji = np.arange(len(glyphs))
    first, again, other = (composer.compose(*random_layers(1, step, 12, emoji, 0.25)) for step in (4, 4, 5))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("colour", list(COLOURS))
def test_background_colour_ignores_the_object(colour):
    image = (torch.tensor(COLOURS[colour]) / 255)[:, None, None].repeat(1, 128, 128)
    image[:, 8:120, 8:120] = torch.rand(3, 1, 1)
    assert background_colour(image) == colour


def test_the_embedding_is_small_and_survives_saving(tmp_path):
    from training.emoji_sd.train_embedding import save_embedding

    torch.manual_seed(0)
    model = EmojiEmbedding().eval()
    path = tmp_path / "embedding.safetensors"
    save_embedding(model, path)
    assert path.stat().st_size < 5_000_000
    loaded = load_embedding(path)
    images = torch.rand(3, 3, 128, 128)
    vectors = loaded.embed(images)
    assert torch.allclose(vectors.norm(dim=1), torch.ones(3), atol=1e-5)
    assert torch.allclose(vectors, model.embed(images), atol=5e-3)
    found = loaded.retrieve(images, 5)
    assert found.shape == (3, 5)
    assert all(EMOJI[index].look == index for index in found.flatten().tolist())
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CorruptModel):
        load_embedding(path)
    with pytest.raises(ModelNotFound):
        load_embedding(tmp_path / "none.safetensors")
