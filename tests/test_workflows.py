"""Workflows can be run: they parse, their jobs fit together, and what they type exists.

Nothing is run. Each check is a function from a workflow's text to what is wrong with it, so that faults that are
planted can be seen to be found.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

import page_names

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".github/workflows"
WORKFLOWS = sorted(FOLDER.glob("*.yml"))
NAMES = [path.name for path in WORKFLOWS]
# What each event must not be able to write to: a pull request may be anybody's.
OUTSIDERS = {"pull_request", "pull_request_target", "issue_comment"}
ACTION = re.compile(r"[\w.-]+/[\w./-]+@(v\d+(\.\d+)*|release/v\d+|[0-9a-f]{40})")
EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")
CONTEXTS = ("env", "github", "inputs", "job", "matrix", "needs", "runner", "secrets", "steps", "strategy", "vars")
# A person's words, or a pull request's: in a script they would be run.
OUTSIDE_WORDS = re.compile(r"inputs\.|github\.(event|head_ref|ref_name)\b|github\.event\.")


class Loader(yaml.SafeLoader):
    """YAML 1.2's words for truth, as GitHub reads them: `on` is a key, not True."""


Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$"), list("tf"))


def read(text):
    return yaml.load(text, Loader)  # a SafeLoader


def events(workflow):
    return set(workflow["on"]) if isinstance(workflow["on"], (dict, list)) else {workflow["on"]}


def steps(workflow):
    return [(name, step) for name, job in workflow["jobs"].items() for step in job["steps"]]


def wrong_with_jobs(workflow):
    wrong = []
    for name, job in workflow["jobs"].items():
        needs = job.get("needs", [])
        needs = [needs] if isinstance(needs, str) else needs
        wrong += [f"{name} needs {each}, which is no job" for each in needs if each not in workflow["jobs"]]
        if "timeout-minutes" not in job:
            wrong.append(f"{name} may run for hours")
        if "self-hosted" in job["runs-on"] and events(workflow) & OUTSIDERS:
            wrong.append(f"{name}: anybody's code would run on a machine of one's own")
        wrong += [f"{name}: {each}" for each in wrong_with_matrix(job)]
    return wrong


def wrong_with_matrix(job):
    given = job.get("strategy", {}).get("matrix", {}).keys()
    return [f"no matrix.{each}" for each in set(re.findall(r"matrix\.(\w+)", yaml.dump(job))) - set(given)]


def wrong_with_rights(workflow):
    if workflow.get("permissions") != {"contents": "read"}:
        return ["it begins with more rights than reading"]
    if not events(workflow) & OUTSIDERS:
        return []
    return [
        f"{name} may write" for name, job in workflow["jobs"].items() if "write" in job.get("permissions", {}).values()
    ]


def wrong_with_steps(workflow):
    wrong = []
    for name, step in steps(workflow):
        if ("uses" in step) == ("run" in step):
            wrong.append(f"{name}: a step either uses or runs")
        elif "uses" in step:
            wrong += [] if ACTION.fullmatch(step["uses"]) else [f"{name}: {step['uses']} has no fixed version"]
        else:
            wrong += [f"{name}: {each}" for each in wrong_with_script(step["run"])]
    return wrong


def wrong_with_script(script):
    outside = [each for each in EXPRESSION.findall(script) if OUTSIDE_WORDS.search(each)]
    wrong = [f"{each} would be run as a command: hand it over in env" for each in outside]
    plain = EXPRESSION.sub("x", script)
    if shutil.which("bash"):
        parsed = subprocess.run(["bash", "-n"], input=plain, text=True, capture_output=True, check=False)
        wrong += parsed.stderr.splitlines()
    found = page_names.commands(f"```sh\n{plain}\n```\n")
    return wrong + [why for words in found if (why := page_names.why_no_command(words))]


def wrong_with_expressions(text, workflow):
    wrong = ["a bracket is open"] if text.count("${{") != text.count("}}") else []
    conditions = [str(job["if"]) for job in workflow["jobs"].values() if "if" in job]
    conditions += [str(step["if"]) for _, step in steps(workflow) if "if" in step]
    for inside in (*EXPRESSION.findall(text), *conditions):
        for word in re.findall(r"(?<![\w.'\"/])([a-z]+)\.", re.sub(r"'[^']*'", "", inside)):
            wrong += [] if word in CONTEXTS else [f"there is no {word}"]
    return wrong


def wrong_with_inputs(text, workflow):
    started = workflow["on"].get("workflow_dispatch") if isinstance(workflow["on"], dict) else None
    known = (started or {}).get("inputs", {})
    return [f"no input {each}" for each in re.findall(r"\binputs\.(\w+)", text) if each not in known]


def wrong_with(text):
    workflow = read(text)
    return [
        *wrong_with_jobs(workflow),
        *wrong_with_rights(workflow),
        *wrong_with_steps(workflow),
        *wrong_with_expressions(text, workflow),
        *wrong_with_inputs(text, workflow),
    ]


@pytest.mark.parametrize("path", WORKFLOWS, ids=NAMES)
def test_nothing_is_wrong(path):
    assert wrong_with(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("name", "old", "new", "why"),
    [
        ("ci.yml", "make check", "make pancakes", "no target pancakes"),
        ("ci.yml", "checkout@v4", "checkout@main", "no fixed version"),
        ("ci.yml", "    timeout-minutes: 20\n", "", "may run for hours"),
        ("ci.yml", "contents: read", "contents: write", "more rights than reading"),
        ("ci.yml", "matrix.python", "matrix.snake", "no matrix.snake"),
        ("ci.yml", "ubuntu-latest", "self-hosted", "anybody's code"),
        ("release.yml", "needs: build", "needs: bild", "needs bild"),
        ("release.yml", "tools/release.py", "tools/releases.py", "tools/releases.py does not exist"),
        ("release.yml", "--notes notes.md", "--note notes.md", "no option --note"),
        ("release.yml", "rocm-sd info", "rocm-sd inform", "no verb inform"),
        ("release.yml", '"$VERSION" --notes', '"${{ inputs.version }}" --notes', "would be run as a command"),
        ("release.yml", "inputs.version }}", "inputs.number }}", "no input number"),
        ("release.yml", "tests/test_packaging.py", "tests/test_packing.py", "does not exist"),
        ("release.yml", "release/v1", "master", "no fixed version"),
        ("release.yml", "github.ref ==", "git.ref ==", "there is no git"),
        ("nightly-performance.yml", "--against", "--compared", "no option --compared"),
        ("nightly-performance.yml", "          fi\n", "", "syntax error"),
        ("nightly-performance.yml", "on:\n", "on:\n  pull_request:\n", "anybody's code"),
        ("site.yml", "vars.PUBLISH_SITE ==", "variables.PUBLISH_SITE ==", "there is no variables"),
        ("site.yml", "      - run: make docs", "      - run: make docs\n        uses: a/b@v1", "either uses or runs"),
    ],
)
def test_a_planted_fault_is_found(name, old, new, why):
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert old in text, "the fault could not be planted"
    assert why in "\n".join(wrong_with(text.replace(old, new, 1)))


def test_a_release_publishes_what_was_checked_built_and_drawn_with():
    """In this order, by no token, and only by hand."""
    workflow = read((FOLDER / "release.yml").read_text(encoding="utf-8"))
    assert events(workflow) == {"workflow_dispatch"}
    jobs = workflow["jobs"]
    scripts = [step.get("run", "") for step in jobs["build"]["steps"]]
    first = {
        word: next(n for n, script in enumerate(scripts) if word in script) for word in ("release.py", "make wheel")
    }
    assert first["release.py"] < first["make wheel"]
    assert jobs["draw"]["needs"] == "build"
    assert not any("checkout" in step.get("uses", "") for step in jobs["draw"]["steps"])
    assert jobs["publish"]["needs"] == ["build", "test", "draw"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in (FOLDER / "release.yml").read_text(encoding="utf-8")
    assert jobs["page"]["needs"] == "publish"


def pythons_tested_before(workflow, name):
    """Versions on which the whole suite must have passed before that job begins."""
    needs = workflow["jobs"][name].get("needs", [])
    found = set()
    for each in [needs] if isinstance(needs, str) else needs:
        job = workflow["jobs"][each]
        binding = "continue-on-error" not in job and "always()" not in str(workflow["jobs"][name].get("if", ""))
        if binding and {"run": "make test"} in job["steps"]:
            found |= set(job["strategy"]["matrix"]["python"])
        found |= pythons_tested_before(workflow, each)
    return found


PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
PYTHONS = set(re.findall(r"Programming Language :: Python :: (\d\.\d+)", PROJECT))


def test_nothing_is_published_before_the_whole_suite_passed_on_every_python():
    workflow = read((FOLDER / "release.yml").read_text(encoding="utf-8"))
    assert pythons_tested_before(workflow, "publish") == PYTHONS
    assert pythons_tested_before(workflow, "page") == PYTHONS
    assert pythons_tested_before(workflow, "build") == set()


@pytest.mark.parametrize(
    ("old", "new", "left"),
    [
        ("[build, test, draw]", "[build, draw]", set()),
        ("- run: make test", "- run: make test || true", set()),
        ("    needs: [build, test, draw]\n", "    needs: [build, test, draw]\n    if: always()\n", set()),
        ("  test:\n", "  test:\n    continue-on-error: true\n", set()),
        ('"3.11", "3.12", "3.13"]', '"3.13"]', {"3.10", "3.13"}),
    ],
)
def test_a_release_that_does_not_wait_for_the_suite_is_seen(old, new, left):
    text = (FOLDER / "release.yml").read_text(encoding="utf-8")
    assert old in text, "the fault could not be planted"
    assert pythons_tested_before(read(text.replace(old, new, 1)), "publish") == left


def test_the_night_fails_on_a_regression_and_keeps_only_what_passed():
    workflow = read((FOLDER / "nightly-performance.yml").read_text(encoding="utf-8"))
    night = workflow["jobs"]["bench"]["steps"]
    timed, kept, saved, shown = (
        next(n for n, step in enumerate(night) if word in f"{step.get('run', '')}{step.get('uses', '')}")
        for word in ("rocm-sd bench", "cp ", "cache/save", "upload-artifact")
    )
    assert timed < kept < saved
    assert "continue-on-error" not in night[timed]
    assert not any("if" in night[each] for each in (timed, kept, saved))
    assert night[shown]["if"] == "always()"


def test_every_workflow_runs_the_torch_that_the_project_pins():
    import torch_build

    pinned = {each for path in WORKFLOWS for each in re.findall(r"torch==([\d.]+)", path.read_text(encoding="utf-8"))}
    assert pinned == {torch_build.TORCH_VERSION}


FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


@pytest.mark.parametrize("path", [each for each in FORMS if each.name != "config.yml"], ids=lambda path: path.name)
def test_issue_forms_have_what_github_asks_for(path):
    form = read(path.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= form.keys()
    fields = [each for each in form["body"] if each["type"] != "markdown"]
    assert len({each["id"] for each in fields}) == len(fields) > 0
    assert all(each["attributes"]["label"] for each in fields)
    assert {each["type"] for each in form["body"]} <= {"checkboxes", "dropdown", "input", "markdown", "textarea"}
    text = path.read_text(encoding="utf-8")
    assert [why for words in page_names.commands(text) if (why := page_names.why_no_command(words))] == []
