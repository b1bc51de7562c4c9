"""The performance guides have a section for each family of AMD GPUs, and say of it what the tables of arch/ say."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import docs_guide
from rocm_sd import arch
from rocm_sd.verify.proofs import Proof, proofs

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "docs" / name for name in ("performance-guide.md", "performance-guide-instinct.md")]
# Founding documents promise no guide for cards before CDNA.
LEFT_OUT = {"gcn5"}


def of_family(family: str) -> list[arch.Arch]:
    return [gpu for gpu in arch.ARCHS.values() if gpu.family in docs_guide.FAMILIES[family]]


def test_every_family_of_amd_gpus_has_its_section_once():
    amd = {gpu.family for gpu in arch.ARCHS.values() if gpu.vendor is arch.Vendor.AMD} - LEFT_OUT
    assert {each for families in docs_guide.FAMILIES.values() for each in families} == amd
    placed = [name for page in PAGES for name in re.findall(r"<!-- table: guide-(\w+) -->", page.read_text("utf-8"))]
    assert sorted(placed) == sorted(docs_guide.FAMILIES)


@pytest.mark.parametrize("family", docs_guide.FAMILIES)
def test_a_section_names_every_gpu_and_the_rung_that_it_reached(family):
    text = docs_guide.facts(family)
    proven = next(line for line in text.splitlines() if line.startswith("- **Proven:**"))
    for gpu in of_family(family):
        assert f"{gpu.product} (`{gpu.name}`)" in text
        for rung in {proof.rung for proof in proofs() if proof.arch == gpu.name}:
            assert rung in proven
    assert "tested" not in proven


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_section_ends_with_what_to_type(page):
    sections = re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    guides = [section for section in sections if "<!-- table: guide-" in section]
    assert guides
    assert all("**Type first:**" in section and "**Use**" in section for section in guides)


def test_what_runs_untimed_is_what_dispatch_takes_there():
    for gpu in of_family("rdna3") + of_family("cdna3") + of_family("rdna2"):
        line = docs_guide._untimed(gpu)
        for path in (docs_guide.DATA / gpu.name).glob("*.json"):
            data = json.loads(path.read_text(encoding="utf-8"))
            taken = {each["implementation"] for each in (data["static"], *data.get("bucket", []))}
            if data["op"] in docs_guide._NOT_OF_EXACT or "8bit" in data["op"]:
                assert f"`{data['op']}`" not in line
            else:
                assert (f"`{data['op']}`" in line) == bool(taken & {"triton", "hip"}), (gpu.name, data["op"])


def test_values_that_differ_within_a_family_are_told_apart_and_equal_ones_said_once():
    first, second = of_family("rdna4")
    assert docs_guide._together([first, second], lambda gpu: str(gpu.wave_size)) == "32"
    assert docs_guide._together([first, second], lambda gpu: gpu.name) == "gfx1200 (`gfx1200`); gfx1201 (`gfx1201`)"
    assert docs_guide._together([first, second], lambda gpu: "x" if gpu is first else "") == "x (`gfx1200`)"
    assert docs_guide._together([first, second], lambda _gpu: "") == ""


def test_the_matrix_unit_and_the_8_bits_are_the_card_s_own(monkeypatch):
    gfx = arch.get("gfx1100")
    assert docs_guide._eight_bits(gfx) == "int8"
    with_fp8 = replace(gfx, fp8=arch.Fp8.OCP, matrix_dtypes=frozenset({"float8", "float16"}))
    assert docs_guide._eight_bits(with_fp8) == "fp8 OCP (to 448)"
    assert docs_guide._matrix_unit(with_fp8) == "WMMA of gfx11, for f16 f8"
    assert set(docs_guide._UNITS) == {gpu.matrix_unit for family in docs_guide.FAMILIES for gpu in of_family(family)}


def test_a_run_on_silicon_would_be_shown(monkeypatch):
    monkeypatch.setattr(docs_guide, "proofs", lambda: [Proof("geglu", "triton", "gfx1100", "tested", "")])
    assert docs_guide._proven(arch.get("gfx1100")) == "1 Triton kernels tested"
    assert docs_guide._proven(arch.get("gfx942")) == "nothing yet"
