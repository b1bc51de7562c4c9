"""A release is refused unless version, changelog and tag agree."""

from __future__ import annotations

import subprocess

import pytest

import release
import rocm_sd

CHANGELOG = """\
# Changelog

## [Unreleased]

## [1.2.0] - 2026-11-30

### Added

- A thing.

## [1.1.0] - 2026-10-01

- An older thing.
"""


def git(folder, *words):
    own = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *own, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "src/rocm_sd").mkdir(parents=True)
    (tmp_path / "src/rocm_sd/__init__.py").write_text('"""Words."""\n\n__version__ = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    return tmp_path


def test_the_version_stands_in_one_place():
    assert release.written_version(release.ROOT) == rocm_sd.__version__
    assert f'"{rocm_sd.__version__}"' not in (release.ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_what_agrees_is_released_with_its_notes(checkout, capsys):
    assert release.main(["1.2.0", "--notes", str(checkout / "notes.md")], checkout) == 0
    assert (checkout / "notes.md").read_text() == "### Added\n\n- A thing.\n"
    assert "1.2.0 can be released" in capsys.readouterr().out


def test_a_release_that_broke_off_can_be_started_again(checkout):
    git(checkout, "tag", "v1.2.0")
    assert release.wrong_with_release(checkout, "1.2.0") == []


@pytest.mark.parametrize(
    ("version", "file", "old", "new", "why"),
    [
        ("1.3.0", "CHANGELOG.md", "", "", "says 1.2.0, not 1.3.0"),
        ("1.2.0", "src/rocm_sd/__init__.py", '"1.2.0"', '"1.2.1"', "says 1.2.1, not 1.2.0"),
        ("1.2.0", "src/rocm_sd/__init__.py", "__version__", "version", "says nothing, not 1.2.0"),
        ("1.2.0", "CHANGELOG.md", "[1.2.0]", "[1.2.1]", "no section [1.2.0]"),
        ("1.2.0", "CHANGELOG.md", " - 2026-11-30", "", "no date"),
        ("1.2.0", "CHANGELOG.md", "### Added\n\n- A thing.\n", "", "says nothing"),
        ("1.2.0", "CHANGELOG.md", "## [Unreleased]\n", "## [Unreleased]\n\n- More.\n", "entries under Unreleased"),
        ("v1.2.0", "CHANGELOG.md", "", "", "is no version"),
        ("1.2", "CHANGELOG.md", "", "", "is no version"),
    ],
)
def test_what_disagrees_is_refused(checkout, capsys, version, file, old, new, why):
    text = (checkout / file).read_text()
    assert old in text
    (checkout / file).write_text(text.replace(old, new, 1))
    assert release.main([version, "--notes", str(checkout / "notes.md")], checkout) == 1
    assert why in capsys.readouterr().err
    assert not (checkout / "notes.md").exists()


def test_a_tag_of_another_commit_is_refused(checkout):
    git(checkout, "tag", "v1.2.0")
    git(checkout, "commit", "--quiet", "--allow-empty", "--message", "second")
    assert "exists, at another commit" in "\n".join(release.wrong_with_release(checkout, "1.2.0"))
