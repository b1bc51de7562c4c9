"""Checks are found, run in order, and never pass by failing; probes that crash, hang or babble give a reason."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from rocm_sd.doctor import checks as checks_package
from rocm_sd.doctor.check import CannotRun, Check, Finding, Status
from rocm_sd.doctor.examination import all_checks, chosen_checks, examine
from rocm_sd.doctor.facts import Facts
from rocm_sd.doctor.probes import LiveProbes, RecordedProbes
from rocm_sd.errors import InvalidOption

FACTS = Facts("Linux", "3.12.3")


def check(name, run):
    return Check(name, "?", "nothing", (), run)


def test_every_check_is_found_and_explains_itself():
    found = all_checks()
    assert len(found) >= 12
    assert [each.name for each in found] == sorted(each.name for each in found)
    for each in found:
        assert each.question.endswith("?"), each.name
        assert each.measures, each.name
        assert each.links, each.name
        assert all(link.startswith("https://github.com/") for link in each.links), each.name


def test_every_check_is_explained_in_the_document():
    page = (Path(__file__).parents[2] / "docs/doctor.md").read_text(encoding="utf-8")
    tables = page[page.index("## Versions and settings") :]
    explained = re.findall(r"^\| `(\w+)` \|", tables, flags=re.MULTILINE)
    assert sorted(explained) == [each.name for each in all_checks()]


def test_the_file_is_named_for_its_check():
    from importlib import import_module

    for each in all_checks():
        assert getattr(import_module(f"rocm_sd.doctor.checks.{each.name}"), each.name) is each


def test_a_module_that_does_not_load_is_unknown(tmp_path, monkeypatch):
    (tmp_path / "aaa_broken.py").write_text("raise RuntimeError('half installed')\n")
    (tmp_path / "aab_strange.py").write_text("aab_strange = 5\n")
    monkeypatch.setattr(checks_package, "__path__", [*checks_package.__path__, str(tmp_path)])
    broken, strange, *others = all_checks()
    assert (broken.name, strange.name) == ("aaa_broken", "aab_strange")
    assert others
    for examined in examine(FACTS, RecordedProbes({}), [broken, strange]):
        assert examined.finding.status is Status.UNKNOWN
    assert "half installed" in examine(FACTS, RecordedProbes({}), [broken])[0].finding.says


def test_a_check_that_raises_is_unknown_and_the_next_one_runs():
    def cannot(facts, probes):
        raise CannotRun("no GPU")

    def faulty(facts, probes):
        return 1 / 0

    begun = []

    def leaving(facts, probes):
        sys.exit(0)

    fine = check("fine", lambda *_: Finding(Status.OK, "fine."))
    checks = [check("a", cannot), check("b", faulty), check("c", leaving), fine]
    examined = examine(FACTS, RecordedProbes({}), checks, begun.append)
    assert [each.finding.status for each in examined] == [*[Status.UNKNOWN] * 3, Status.OK]
    assert "no GPU" in examined[0].finding.says
    assert "ZeroDivisionError" in examined[1].finding.says
    assert "SystemExit" in examined[2].finding.says
    assert begun == ["a", "b", "c", "fine"]


def test_an_unknown_name_lists_the_known_ones():
    assert [each.name for each in chosen_checks(["two_tritons", "bf16", "bf16"])] == ["two_tritons", "bf16"]
    assert chosen_checks([]) == all_checks()
    with pytest.raises(InvalidOption, match="two_tritons"):
        chosen_checks(["three_tritons"])


@pytest.fixture
def probing(tmp_path, monkeypatch):
    """A module of probes that behave in every bad way."""
    (tmp_path / "bad_probes.py").write_text(
        """
import json, os, signal, sys, time
name, arguments = sys.argv[1], json.loads(sys.argv[2])
if name == "crash":
    os.kill(os.getpid(), signal.SIGSEGV)
if name == "hang":
    if os.fork() == 0:
        open(os.environ["BAD_PROBES_FILE"], "w").write(str(os.getpid()))
    time.sleep(600)
if name == "fail":
    sys.exit("out of luck")
if name == "nonsense":
    print("all is well")
if name == "list":
    print("[1]")
if name == "cannot":
    print(json.dumps({"cannot": "there is no GPU"}))
if name == "count":
    with open(os.environ["BAD_PROBES_FILE"], "a") as file:
        file.write("x")
    print("a driver's greeting")
    print(json.dumps({"ok": True, "quick": arguments.get("quick")}))
"""
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("BAD_PROBES_FILE", str(tmp_path / "written"))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("crash", "the probe crash was ended by SIGSEGV"),
        ("fail", "the probe fail ended with code 1: out of luck"),
        ("nonsense", "could not be read: 'all is well'"),
        ("list", "could not be read"),
        ("silence", "ended without an answer"),
        ("cannot", "there is no GPU"),
    ],
)
def test_a_bad_answer_is_a_reason(probing, name, reason):
    probes = LiveProbes(module="bad_probes")
    with pytest.raises(CannotRun) as raised:
        probes.ask(name)
    assert reason in str(raised.value)
    assert reason in probes.answers[name]["cannot"]


def test_a_probe_that_hangs_is_ended_with_all_its_children(probing):
    probes = LiveProbes(module="bad_probes", patience=1.0)
    started = time.monotonic()
    with pytest.raises(CannotRun, match="did not answer within 1 s"):
        probes.ask("hang")
    assert time.monotonic() - started < 10
    child = int((probing / "written").read_text())
    for _ in range(50):
        if not _runs(child):
            break
        time.sleep(0.1)
    assert not _runs(child)


def _runs(pid):
    try:
        state = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0]  # noqa: PTH123, SIM115
    except OSError:
        return False
    return state != "Z"


def test_a_probe_is_asked_once_and_asked_to_be_quick(probing):
    probes = LiveProbes(module="bad_probes", quick=True)
    assert probes.ask("count") == {"ok": True, "quick": True}
    assert probes.ask("count")["ok"]
    assert (probing / "written").stat().st_size == 1
    assert probes.answers == {"count": {"ok": True, "quick": True}}


def test_a_recorded_machine_answers_what_was_recorded():
    probes = RecordedProbes({"smoke": {"ok": 1}, "other": {"cannot": "no GPU"}, "odd": 5})
    assert probes.ask("smoke") == {"ok": 1}
    for name, reason in (("absent", "was not recorded"), ("other", "no GPU"), ("odd", "is not an object")):
        with pytest.raises(CannotRun, match=reason):
            probes.ask(name)


def test_a_real_probe_answers_here():
    assert sys.executable
    answer = LiveProbes(quick=True).ask("smoke")
    assert answer["gemm"] == {"ok": True, "error": ""}
