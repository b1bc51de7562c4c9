from __future__ import annotations

from pathlib import Path

import pytest

from rocm_sd import settings
from rocm_sd.errors import InvalidOption


def test_nothing_set_gives_the_defaults():
    assert settings.Settings.from_environment({}) == settings.Settings()


def test_each_variable_is_parsed_to_its_type():
    read = settings.Settings.from_environment(
        {
            "ROCM_SD_LOG": "debug",
            "ROCM_SD_DEBUG": "yes",
            "ROCM_SD_IMPLEMENTATION": "group_norm_silu=torch, attention=triton",
            "ROCM_SD_CACHE": "/tmp/rocm-sd",
            "ROCM_SD_TORCH": "cpu",
            "TRITON_INTERPRET": "0",
            "HSA_OVERRIDE_GFX_VERSION": "11.0.0",
        }
    )
    assert (read.log_level, read.debug, read.triton_interpret) == ("DEBUG", True, False)
    assert read.cache_dir == Path("/tmp/rocm-sd")
    assert read.to_dict()["ROCM_SD_CACHE"] == "/tmp/rocm-sd"
    assert read.implementation_for("attention") == "triton"
    assert read.implementation_for("conv2d") is None
    assert read.to_dict()["ROCM_SD_IMPLEMENTATION"] == {"group_norm_silu": "torch", "attention": "triton"}


@pytest.mark.parametrize(
    ("name", "value"),
    [("ROCM_SD_DEBUG", "maybe"), ("ROCM_SD_LOG", "loud"), ("ROCM_SD_IMPLEMENTATION", "torch")],
)
def test_a_value_without_meaning_is_refused_with_the_meaning(name, value):
    with pytest.raises(InvalidOption, match=f"{name} '{value}' is not known. Its meaning: "):
        settings.Settings.from_environment({name: value})


def test_an_op_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(InvalidOption, match=r"ROCM_SD_IMPLEMENTATION op 'nosuch' is not known.*attention, conv2d"):
        settings.Settings.from_environment({"ROCM_SD_IMPLEMENTATION": "attention=torch,nosuch=torch"})


def test_a_change_of_the_environment_is_seen(monkeypatch):
    monkeypatch.setenv("ROCM_SD_LOG", "ERROR")
    assert settings.current().log_level == "ERROR"
    monkeypatch.setenv("ROCM_SD_LOG", "INFO")
    assert settings.current().log_level == "INFO"


def test_every_variable_fills_a_field_and_every_field_has_one():
    assert {v.field for v in settings.VARIABLES} == set(settings.Settings.__dataclass_fields__)
