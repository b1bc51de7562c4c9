"""Where a contribution goes: every page, the report and the command name one place, and its address is found."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from rocm_sd.bench import sending
from rocm_sd.bench.report import Inputs, page, render

ROOT = Path(__file__).parents[2]
FORMS = ROOT / ".github" / "ISSUE_TEMPLATE"
NAMING = ("README.md", "CONTRIBUTING.md", "BENCHMARKS.md", "contributions/README.md", "docs/index.md",
          "docs/performance-guide.md")  # fmt: skip


def text_of(name: str) -> str:
    return " ".join((ROOT / name).read_text(encoding="utf-8").replace("\n> ", "\n").split())


@pytest.mark.parametrize("name", NAMING)
def test_a_page_for_owners_of_cards_names_the_command_and_leads_to_the_one_place(name):
    text = text_of(name)
    assert "rocm-sd contribute" in text
    (target,) = re.findall(rf"\[{re.escape(sending.PLACE)}\]\(([^)]+)\)", text)
    file, _, anchor = target.partition("#")
    wanted, _, heading = sending.PAGE.partition("#")
    assert ((ROOT / name).parent / file).resolve() == ROOT / wanted
    assert anchor == heading


def test_the_one_place_is_a_heading_and_a_form_that_are_there():
    file, _, heading = sending.PAGE.partition("#")
    anchors = [
        line.removeprefix("## ").lower().replace(" ", "-")
        for line in (ROOT / file).read_text(encoding="utf-8").splitlines()
        if line.startswith("## ")
    ]
    assert heading in anchors
    assert sending.PLACE in text_of(file)
    assert f"name: {sending.TITLE}\n" in (FORMS / sending.TEMPLATE).read_text(encoding="utf-8")
    # No other kind of issue asks for the file.
    assert [each.name for each in FORMS.glob("*.yml") if "id: file" in each.read_text("utf-8")] == [sending.TEMPLATE]


def test_the_report_and_the_command_name_the_same_place():
    assert sending.PLACE in render(page(Inputs((), (), ()))).replace("&#34;", '"')
    for address in ("https://github.com/x/y", None):
        assert sending.PLACE in sending.ways("gfx1100", address)[0]


def test_on_github_the_form_itself_is_named_and_elsewhere_the_repository():
    issue, pull = sending.ways("gfx1100", "https://github.com/x/y")
    assert issue.endswith("https://github.com/x/y/issues/new?template=card_report.yml")
    assert pull.endswith("contributions/gfx1100/ of https://github.com/x/y")
    assert sending.ways("gfx1100", "https://example.org/x/y")[0].endswith(": https://example.org/x/y")
    assert sending.PAGE in sending.ways("gfx1100", None)[0]


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://github.com/x/y.git", "https://github.com/x/y"),
        ("https://somebody:secret@github.com/x/y", "https://github.com/x/y"),
        ("git@github.com:x/y.git", "https://github.com/x/y"),
        ("ssh://git@example.org:2222/x/y.git/", "https://example.org/x/y"),
        ("git+https://github.com/x/y", "https://github.com/x/y"),
        ("/srv/git/rocm-sd.git", None),
        ("file:///srv/git/rocm-sd.git", None),
        ("../rocm-sd", None),
        ("C:/code/rocm-sd", None),
        ("https://github.com/", None),
        ("", None),
    ],
)
def test_a_remote_becomes_an_address_without_names_and_passwords(remote, address):
    assert sending.web_address(remote) == address


class Installed:
    """What pip wrote down of a package."""

    def __init__(self, urls: tuple[str, ...] = (), direct: object = None) -> None:
        self.urls, self.direct, self.metadata = urls, direct, self

    def get_all(self, _name: str) -> list[str]:
        return list(self.urls)

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self.direct if isinstance(self.direct, str) or self.direct is None else json.dumps(self.direct)


@pytest.fixture
def checkout(tmp_path):
    """checkout(upstream=..., origin=...): a repository with these remotes."""

    def make(**remotes: str) -> Path:
        subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
        for name, url in remotes.items():
            subprocess.run(["git", "-C", str(tmp_path), "remote", "add", name, url], check=True)
        return tmp_path

    return make


def test_the_package_s_own_address_comes_first(monkeypatch, checkout):
    known = Installed(("Issues, https://example.org/x/issues", "Repository, https://example.org/x/"))
    monkeypatch.setattr(sending, "distribution", lambda _name: known)
    assert sending.repository(checkout=checkout(origin="https://github.com/a/b")) == "https://example.org/x"


def test_what_pip_installed_from_git_is_from_there(monkeypatch, tmp_path):
    known = Installed(direct={"url": "https://github.com/x/y.git", "vcs_info": {"vcs": "git"}})
    monkeypatch.setattr(sending, "distribution", lambda _name: known)
    assert sending.repository(checkout=tmp_path) == "https://github.com/x/y"


@pytest.mark.parametrize("direct", [None, "no JSON", {"url": "https://example.org/rocm_sd.whl", "archive_info": {}}])
def test_a_checkout_has_the_address_of_its_remote_and_upstream_before_a_fork(monkeypatch, checkout, direct):
    monkeypatch.setattr(sending, "distribution", lambda _name: Installed(direct=direct))
    here = checkout(origin="git@github.com:fork/y.git")
    assert sending.repository(checkout=here) == "https://github.com/fork/y"
    assert sending.repository(checkout=checkout(upstream="https://github.com/x/y")) == "https://github.com/x/y"


def test_an_editable_install_has_the_address_of_its_folder(monkeypatch, checkout, tmp_path):
    here = checkout(origin="https://github.com/x/y")
    known = Installed(direct={"url": here.as_uri(), "dir_info": {"editable": True}})
    monkeypatch.setattr(sending, "distribution", lambda _name: known)
    assert sending.repository(checkout=tmp_path / "elsewhere") == "https://github.com/x/y"


def test_where_nobody_knows_it_nothing_is_invented(checkout, tmp_path):
    assert sending.repository("no-such-package-here", checkout()) is None
    assert sending.repository("no-such-package-here", tmp_path / "elsewhere") is None
