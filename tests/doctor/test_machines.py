"""Every recorded machine gives the diagnosis of its pain, with the fix, and no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rocm_sd.doctor.check import Status
from rocm_sd.doctor.examination import all_checks, examine
from rocm_sd.doctor.facts import WATCHED
from rocm_sd.doctor.probes import RecordedProbes
from rocm_sd.doctor.recording import load, read_probes
from rocm_sd.doctor.treatment import treatment_for

MACHINES = Path(__file__).parent / "machines"
CARD_ALONE = {"HIP_VISIBLE_DEVICES": "1"}
OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"

# For each machine, the checks that report a problem, each with its fix: variables that are set (a mapping), variables
# that are unset (a tuple), or words of the advice or of the command (a string).
DIAGNOSES = {
    "rx7900xtx-nhwc": {
        "miopen_settings": {"PYTORCH_MIOPEN_SUGGEST_NHWC": "0"},
        "convolution_layout": {"PYTORCH_MIOPEN_SUGGEST_NHWC": "0"},
    },
    "strix-halo-sd3-vae": {"sdpa_numerics": "--use-split-cross-attention"},
    "rx6700xt-no-override": {
        "torch_build": "torch[device-gfx1031]",
        "gfx_override": {OVERRIDE: "10.3.0"},
        "kernels_present": "torch[device-gfx1031]",
        "bf16": "float16",
        "aotriton_settings": "--opt-sub-quad-attention",
    },
    "rx9070xt-stale-override": {"gfx_override": (OVERRIDE,), "kernels_present": (OVERRIDE,)},
    "igpu-first": {"integrated_gpu": CARD_ALONE, "apu_memory": CARD_ALONE, "kernels_present": CARD_ALONE},
    "rx7800xt-cuda-triton": {
        "two_tritons": '--index-url https://download.pytorch.org/whl/rocm6.4 "pytorch-triton-rocm==3.5.1"',
        "allocator_settings": ("PYTORCH_HIP_ALLOC_CONF",),
        "triton_works": "two_tritons",
    },
    "mi300x-graphs-fp8": {"graph_replay": {"ROCM_SD_STEP_GRAPH": "0"}, "fp8_format": "float8_e4m3fnuz"},
    "rx7900xt-mmap": {"mapped_weights": {"GPU_PINNED_MIN_XFER_SIZE": "1048576"}},
    "r9700-first-run": {
        "first_run_stall": {"MIOPEN_FIND_MODE": "FAST"},
        "convolution_library": "torch.backends.cudnn.flags(enabled=False)",
    },
    "strix-point-gemm": {"gemm_library": {"TORCH_BLAS_PREFER_HIPBLASLT": "0"}},
}
# Where no kernel runs at all nothing can be measured, and nothing may pass for measured.
NOTHING_RUNS = {"rx6700xt-no-override", "rx9070xt-stale-override", "igpu-first"}


def examined(name):
    folder = MACHINES / name
    return examine(load(folder), RecordedProbes(read_probes(folder)), all_checks())


def test_every_folder_has_its_diagnosis():
    assert {folder.name for folder in MACHINES.iterdir()} == set(DIAGNOSES)


@pytest.mark.parametrize("name", DIAGNOSES)
def test_the_diagnosis_is_that_of_the_pain_and_no_other(name):
    findings = {each.check.name: each.finding for each in examined(name)}
    problems = {check: found for check, found in findings.items() if found.status is Status.PROBLEM}
    assert set(problems) == set(DIAGNOSES[name])
    for check, fix in DIAGNOSES[name].items():
        found = problems[check]
        assert found.says, check
        assert found.means, check
        if isinstance(fix, dict):
            assert found.fix.env == fix, check
        elif isinstance(fix, tuple):
            assert found.fix.unset == fix, check
        else:
            assert fix in "\n".join([found.fix.summary, *found.fix.commands]), check
    unknown = {check for check, found in findings.items() if found.status is Status.UNKNOWN}
    assert bool(unknown) == (name in NOTHING_RUNS), unknown


@pytest.mark.parametrize("name", DIAGNOSES)
def test_the_fixes_of_a_machine_do_not_contradict_each_other(name):
    treatment = treatment_for(examined(name))
    assert not any("want different values" in reason for _, reason in treatment.left)
    assert not set(treatment.env) & set(treatment.unset)


@pytest.mark.parametrize("name", DIAGNOSES)
def test_without_its_measurements_no_measuring_check_passes(name):
    """The same machine with nothing measured: what needed a probe is unknown, and never a pass."""
    facts = load(MACHINES / name)
    asked = []

    class Watched(RecordedProbes):
        def ask(self, probe):
            asked.append(probe)
            return super().ask(probe)

    for check in all_checks():
        asked.clear()
        ((_, finding),) = [(each.check, each.finding) for each in examine(facts, Watched({}), [check])]
        if asked:
            assert finding.status is Status.UNKNOWN, check.name


@pytest.mark.parametrize("name", DIAGNOSES)
def test_the_facts_say_where_they_come_from(name):
    record = json.loads((MACHINES / name / "facts.json").read_text())
    assert record["described_by"]
    assert all(link.startswith("https://github.com/") for link in record["described_by"])
    assert set(record["environment"]) <= set(WATCHED)
    facts = load(MACHINES / name)
    assert facts.meant.gfx
    assert facts.meant.vram_total
