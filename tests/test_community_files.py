"""Files that hosts and readers of a repository look for by name have what these expect."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))


def test_the_citation_has_what_its_format_requires():
    """CFF 1.2.0: these four, of which an author may be an entity; licences by their SPDX name."""
    assert CITATION["cff-version"] == "1.2.0"
    assert CITATION["message"]
    assert CITATION["title"].startswith("rocm-sd")
    assert CITATION["authors"]
    assert all(author.get("name") or author.get("family-names") for author in CITATION["authors"])
    assert CITATION["type"] == "software"
    assert CITATION["license"] == "MIT"


def test_the_citation_names_who_the_licence_names():
    holder = re.search(r"Copyright \(c\) \d{4} (.+)", (ROOT / "LICENSE").read_text(encoding="utf-8"))
    assert [author["name"] for author in CITATION["authors"]] == [holder[1]]


def test_no_second_version_and_no_address_is_written_down():
    """The version stands in the package; the address is not known."""
    assert not {"version", "date-released", "url", "repository-code", "doi"} & CITATION.keys()


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("SECURITY.md", "docs/security.md"),
        ("CODE_OF_CONDUCT.md", "SECURITY.md"),
        ("ROADMAP.md", "CHANGELOG.md"),
        ("COMMUNITY_INTEGRATION.md", "docs/upstream.md"),
        ("CONTRIBUTING.md", "CODE_OF_CONDUCT.md"),
    ],
)
def test_each_leads_on(name, target):
    assert f"]({target})" in (ROOT / name).read_text(encoding="utf-8")


def rows(text):
    """[cells] of each row of a table, without heads."""
    lines = [line for line in text.splitlines() if line.startswith("| [")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_upstream_links_are_what_they_are_called():
    """owner/name#number or name#number, at that number of that repository."""
    text = (ROOT / "docs/upstream.md").read_text(encoding="utf-8")
    links = re.findall(r"\[([\w./-]*)#(\d+)\]\(https://github\.com/([\w.-]+)/([\w.-]+)/(?:issues|pull)/(\d+)\)", text)
    assert len(links) == text.count("](https://github.com/")
    for called, number, owner, name, linked in links:
        assert number == linked
        assert called in {"", name, f"{owner}/{name}"} or called.split("/")[-1].lower() == name.lower()


def test_every_upstream_row_says_what_is_done_about_it():
    found = rows((ROOT / "docs/upstream.md").read_text(encoding="utf-8"))
    assert len(found) > 20
    assert [cells for cells in found if len(cells) != 3 or not all(cells)] == []


def test_checks_that_upstream_names_exist():
    checks = {file.stem for file in (ROOT / "src/rocm_sd/doctor/checks").glob("*.py")}
    third = " ".join(cells[2] for cells in rows((ROOT / "docs/upstream.md").read_text(encoding="utf-8")))
    named = set(re.findall(r"`([a-z]+(?:_[a-z0-9]+)+)`", third))
    # An op and a backend have names of the same form.
    assert named - checks == {"group_norm_silu", "rocm_sd"}
