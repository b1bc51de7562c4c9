"""What a package index shows of README.md: rendered as the index renders it, with no link that leads nowhere."""

from __future__ import annotations

import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("hatchling")

import long_description

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ADDRESS, VERSION = "https://github.com/x/y", "1.2.3"
KNOWN = long_description.described(README, ADDRESS, VERSION)
UNKNOWN = long_description.described(README, None, VERSION)


class Shown(HTMLParser):
    """Where links and pictures lead, and all that is read."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.pictures: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        # Each heading has a link to itself.
        if tag == "a" and not values["href"].startswith("#user-content-"):
            self.links.append(values["href"])
        elif tag == "img":
            self.pictures.append(values["src"])

    def handle_data(self, data):
        self.text += data


def shown(description: str) -> Shown:
    """As PyPI does it; None would be a description that it refuses."""
    markdown = pytest.importorskip("readme_renderer.markdown")
    html = markdown.render(description)
    assert html is not None
    return Shown(html)


def targets(markdown: str) -> set[str]:
    """Files of the repository that the README links to or shows."""
    found = re.findall(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$|src(?:set)?=\"([^\"]+)\"", markdown, re.MULTILINE)
    return {target for each in found for target in each if target and "://" not in target}


def test_the_readme_has_links_and_pictures_to_change():
    assert {"docs/assets/speed-light.svg", "docs/assets/demo.png", "BENCHMARKS.md", "examples"} <= targets(README)
    assert targets(KNOWN) == set()


def test_with_an_address_every_link_and_every_picture_is_a_file_of_the_release():
    page = shown(KNOWN)
    begin = re.compile(rf"{ADDRESS}/(blob|tree|raw)/v{VERSION}/([^#]+)(#.+)?")
    for url in (*page.links, *page.pictures):
        found = begin.fullmatch(url)
        assert found, url
        assert (ROOT / found[2]).exists(), url
        assert (ROOT / found[2]).is_dir() == (found[1] == "tree"), url
    assert all(begin.fullmatch(url)[1] == "raw" for url in page.pictures)
    # Besides the shades of a chart, whatever the README shows and links to is there.
    reached = {begin.fullmatch(url)[2] for url in (*page.links, *page.pictures)}
    assert {name.partition("#")[0] for name in targets(README) if "-dark" not in name} == reached


def test_without_an_address_no_link_leads_nowhere_and_no_word_is_lost():
    page = shown(UNKNOWN)
    assert page.links == page.pictures == []
    assert "](" not in page.text
    assert page.text.split() == shown(re.sub(r"!\[[^\]]*\]\([^)]*\)", "", KNOWN)).text.replace(
        ADDRESS, "<the address of this repository>"
    ).split()  # fmt: skip


@pytest.mark.parametrize("description", [KNOWN, UNKNOWN], ids=["known", "unknown"])
def test_the_box_the_tables_and_the_folded_part_are_shown_as_such(description):
    html = pytest.importorskip("readme_renderer.markdown").render(description)
    assert "[!NOTE]" not in html
    assert "<!--" not in html
    assert "&lt;details" not in html
    assert html.count("<table") == len(re.findall(r"^\| --- \|", README, re.MULTILINE))


def test_code_is_as_it_stands_in_the_readme():
    fences = re.findall(r"^```.*?^```$", README, re.MULTILINE | re.DOTALL)
    assert fences
    assert all(fence in UNKNOWN for fence in fences)
    code = "```md\n[a](b.md) <!-- c -->\n```"
    assert long_description.described(f"[a](BENCHMARKS.md)\n{code}\n", None, VERSION) == f"a\n{code}\n"


def test_an_address_of_another_kind_is_named_and_makes_no_links():
    elsewhere = "https://example.org/x/y"
    assert long_description.described(README, elsewhere, VERSION) == UNKNOWN.replace(
        "<the address of this repository>", elsewhere
    )
    assert long_description.urls(elsewhere, VERSION) == {"Repository": elsewhere}


def test_the_addresses_of_the_project_are_those_of_the_checkout():
    found = long_description.urls(ADDRESS, VERSION)
    assert found["Repository"] == ADDRESS
    for name, path in long_description.PAGES.items():
        assert found[name].endswith(path)
        assert (ROOT / path).is_file()
    assert long_description.urls(None, VERSION) == {}


def test_the_hook_changes_nothing_that_an_sdist_has_already(monkeypatch):
    class Given:
        def of_remote(self, _root):
            return ADDRESS

        def is_github(self, _address):
            return True

    monkeypatch.setattr(long_description, "_sending", Given)
    hook = long_description.Hook(str(ROOT), {})
    fresh: dict = {}
    hook.update(fresh)
    assert fresh["urls"]["Repository"] == ADDRESS
    assert f"{ADDRESS}/blob/v" in fresh["readme"]["text"]
    of_sdist = {"readme": "from PKG-INFO", "urls": {"Repository": "https://example.org"}}
    kept = dict(of_sdist)
    hook.update(of_sdist)
    assert of_sdist == kept


def test_the_command_prints_it(capsys):
    long_description.main(["--repository", ADDRESS])
    printed = capsys.readouterr().out
    assert f"git clone {ADDRESS} rocm-sd" in printed
    assert subprocess.run(["git", "check-ignore", "-q", "tools/long_description.py"], cwd=ROOT, check=False).returncode
