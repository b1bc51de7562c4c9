"""The models of a server: loaded, measured and captured before the first request, and never in one."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipelines import small_blocks_too, tiny_pipeline
from rocm_sd.engine import calibration, optimization
from rocm_sd.errors import InvalidOption, ModelNotFound, Unsupported
from rocm_sd.integrations.diffusers import Drawing
from rocm_sd.serve import Limits, ServeConfig, drawers
from rocm_sd.serve.drawers import LocalDrawer, sources
from rocm_sd.serve.metrics import Metrics


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("models") / "tiny"
    tiny_pipeline(tmp_path_factory.mktemp("tokens")).save_pretrained(place)
    return place


@pytest.fixture
def loaded(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path / "cache"))
    made = []

    def load(**options):
        config = ServeConfig(**{"models": (str(folder),), "device": "cpu", "limits": Limits(in_flight=2), **options})
        metrics = Metrics()
        made.append(LocalDrawer(config, metrics))
        made[-1].metrics = metrics
        return made[-1]

    yield load
    for one in made:
        one.close()


def at_once(drawer, count, steps=3, side=16):
    drawings = [Drawing("a frog", steps=steps, guidance=3.0, seed=i, width=side, height=side) for i in range(count)]
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(lambda one: drawer.draw("tiny", one, lambda *_: None, lambda: None), drawings))


def test_what_is_told_of_a_model(loaded):
    drawer = loaded()
    facts = drawer.models()["tiny"]
    assert (facts.width, facts.height, facts.guidance, facts.qualities) == (16, 16, 7.5, ("exact",))
    assert all(picture.size == (16, 16) for picture in at_once(drawer, 3))
    assert 'model="tiny"' in drawer.metrics.text().decode()
    assert drawer.approximations("tiny", "high") == ()


def test_graphs_are_captured_before_the_first_request(loaded, monkeypatch):
    small_blocks_too(monkeypatch, "1")
    warmed = []
    own = drawers.SharedPipeline.draw

    def draw(shared, drawing, *rest):
        warmed.append(drawing.prompt)
        return own(shared, drawing, *rest)

    monkeypatch.setattr(drawers.SharedPipeline, "draw", draw)
    drawer = loaded()
    assert len(warmed) == 1 + 2
    at_once(drawer, 2)
    notes = optimization.report(drawer._shared["tiny"].pipe).notes
    assert any("UNet2DConditionModel" in note and "graphs of its forward" in note for note in notes), notes


def test_a_model_is_measured_once_and_not_for_every_number_of_pictures(loaded, monkeypatch):
    small_blocks_too(monkeypatch, "1")
    monkeypatch.setenv("ROCM_SD_CALIBRATE", "1")
    measured = []

    def measure(subjects, *_rest, **_named):
        measured.append(type(subjects[0].model).__name__)
        raise calibration.NotMeasured("for the test")

    monkeypatch.setattr(calibration, "measure_with_progress", measure)
    monkeypatch.setattr(optimization, "unmeasured", {})
    drawer = loaded()
    assert "UNet2DConditionModel" in measured
    before = len(measured)
    for count, side in ((1, 16), (2, 16), (3, 16), (2, 24)):
        at_once(drawer, count, side=side)
    assert len(measured) == before


def test_names_are_no_paths(folder, tmp_path, monkeypatch):
    assert list(sources(())) == ["emoji-sd"]
    assert list(sources((str(folder), "emoji-sd", "owner/name"))) == ["tiny", "emoji-sd", "owner/name"]
    monkeypatch.chdir(folder)
    assert list(sources((".",))) == ["tiny"]
    with pytest.raises(ModelNotFound):
        sources(("./nosuch",))
    other = tmp_path / "tiny"
    shutil.copytree(folder, other)
    with pytest.raises(InvalidOption, match="rename a folder"):
        sources((str(folder), str(other)))


def test_what_cannot_be_served_is_said(folder, tmp_path, monkeypatch):
    given = {"models": (str(folder), "emoji-sd"), "device": "cpu", "loras": (("a", "a.safetensors"),)}
    with pytest.raises(Unsupported, match="several models"):
        LocalDrawer(ServeConfig(**given), Metrics())
    monkeypatch.setattr(drawers, "moves_weights", lambda _model: True)
    with pytest.raises(Unsupported, match="no room for all of its weights"):
        LocalDrawer(ServeConfig(models=(str(folder),), device="cpu"), Metrics())
