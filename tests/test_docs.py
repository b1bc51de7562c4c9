"""The documents say what the code and the data say."""

from __future__ import annotations

import json
import re
from functools import partialmethod
from pathlib import Path
from statistics import median

import diffusers
import pytest

import docs_site
import docs_tables
import page_names
from pipelines import tiny_pipeline
from rocm_sd.verify.proofs import RUNGS, Proof

ROOT = Path(__file__).parents[1]
PAGES = sorted(ROOT.glob("*.md"))
PAGES += sorted((ROOT / "docs").rglob("*.md"))
FENCE = re.compile(
    r"^```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)


def page_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def excerpts() -> list[tuple[str, str]]:
    """(file, lines) of every titled code block; a line of three dots parts what is not adjacent in the file."""
    found = []
    for page in PAGES:
        for fence in FENCE.finditer(page.read_text(encoding="utf-8")):
            if fence["title"]:
                found += [(fence["title"], part) for part in re.split(r"^\.\.\.\n", fence["code"], flags=re.MULTILINE)]
    return found


def test_every_table_is_what_the_data_says():
    assert [page_id(path) for path in docs_tables.stale()] == [], "type: python tools/docs_tables.py"


def test_every_table_stands_in_a_document():
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in docs_tables.DOCUMENTS]
    placed = {name for text in texts for name in re.findall(r"<!-- table: ([\w-]+) -->", text)}
    assert placed == set(docs_tables.TABLES)


def test_a_stale_table_is_seen_and_filled():
    stale = "before\n<!-- table: settings -->\nyesterday\n<!-- end of table -->\nafter\n"
    filled = docs_tables.fill(stale)
    assert "yesterday" not in filled
    assert "`ROCM_SD_LOG`" in filled
    assert filled.startswith("before\n")
    assert filled.endswith("\nafter\n")
    assert docs_tables.fill(filled) == filled


def test_every_rung_and_every_error_has_its_words():
    assert set(docs_tables.RUNG_MEANINGS) == set(RUNGS)
    assert set(docs_tables.EXIT_MEANINGS) == set(docs_tables.error_names())


def test_amd_counts_as_run_only_where_a_card_was():
    compiled = Proof("group_norm_silu", "triton", "gfx1100", "compiled", "")
    nvidia = Proof("group_norm_silu", "triton", "sm_90", "tested", "")
    amd = Proof("group_norm_silu", "triton", "gfx1100", "tested", "")
    assert "Nothing has run on AMD silicon" in docs_tables._on_amd([compiled, nvidia])
    assert docs_tables._on_amd([compiled, nvidia, amd]).startswith("Run on AMD silicon: gfx1100.")


def test_a_run_on_a_card_is_shown_with_the_card_and_its_speed(monkeypatch, tmp_path):
    rows = [{"against_stock": {"ratio": ratio}} for ratio in (0.9, 2.5)]
    record = {"machine": {"gpu": "NVIDIA H200"}, "geomean": {"against_stock": 1.5}, "rows": rows}
    (tmp_path / "run.json").write_text(json.dumps(record))
    monkeypatch.setattr(docs_tables, "ROOT", tmp_path)
    assert docs_tables._measured("run.json") == "NVIDIA H200, 1.50 times stock torch (2 shapes, 0.90 to 2.50)"
    assert docs_tables._measured("test_some_code.py") == ""


@pytest.mark.parametrize("file", sorted({file for file, _ in excerpts()}))
def test_excerpts_are_the_code_itself(file):
    source = (ROOT / file).read_text(encoding="utf-8")
    for title, lines in excerpts():
        if title == file:
            assert lines in source, f"not in {file}:\n{lines}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_to_files(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s#]+)[^)]*\)", text):
        if "://" not in target and target != docs_site.RECORDED_RUNS:  # made with the site
            assert (page.parent / target).exists(), target


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub and MkDocs make them; a second one of a name has a number."""
    text = re.sub(r"^```.*?^```$", "", docs_site.included(page.read_text("utf-8")), flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
        names = (slug, *(f"{slug}{mark}{number}" for number in range(1, 9) for mark in "-_"))
        found.add(next(name for name in names if name not in found))
    return found


def dead_anchors(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    dead = []
    for file, anchor in re.findall(r"\]\(([^)\s#:]*)#([^)\s]+)\)", text):
        target = page.parent / file if file else page
        if target.suffix == ".md" and anchor not in anchors(target):
            dead.append(f"{file}#{anchor}")
    return dead


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_into_a_page_lead_to_a_heading(page):
    assert dead_anchors(page) == []


def test_a_link_to_a_heading_that_is_not_there_is_seen(tmp_path):
    (tmp_path / "there.md").write_text("# The `code`, and [a link](x.md)\n## Twice\n## Twice\n```\n# not one\n```\n")
    page = tmp_path / "page.md"
    good = "[a](there.md#the-code-and-a-link) [b](there.md#twice) [c](#here)\n## Here\n"
    page.write_text(f"{good}[d](there.md#not-one) [e](there.md#gone) [f](#gone)\n")
    assert dead_anchors(page) == ["there.md#not-one", "there.md#gone", "#gone"]


# A reference is looked things up in, and a record is kept as it was measured: nobody reads them from end to end.
REFERENCES = {"cli.md", "settings.md", "api.md", "gpus.md", "operators.md"}
RECORDS = {"benchmarks.md", "changelog.md", "projection.md", "hip-figures.md"}
MOST_WORDS = 1200
SITE = sorted((ROOT / "docs").rglob("*.md"))


def words(page: Path) -> int:
    """Of the page as it is read: with the file that it includes, its tables and its code."""
    return len(docs_site.included(page.read_text(encoding="utf-8")).split())


@pytest.mark.parametrize("page", [page for page in SITE if page.name not in REFERENCES | RECORDS], ids=page_id)
def test_a_page_is_short(page):
    assert words(page) <= MOST_WORDS, "say it in fewer words, or give each of its readers a page"


# The first page that anybody sees; what is folded away counts, too.
MOST_WORDS_OF_README = 1500


def test_the_readme_is_short():
    assert words(ROOT / "README.md") <= MOST_WORDS_OF_README, "give it a line, and a page under docs/"


def test_what_may_be_long_is_there_and_a_long_page_is_seen(tmp_path):
    assert {page.name for page in SITE} >= REFERENCES | RECORDS
    long = tmp_path / "long.md"
    long.write_text("<!-- include: BENCHMARKS.md -->\n")
    assert words(long) > MOST_WORDS


def pages_of(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for item in (nav.values() if isinstance(nav, dict) else nav) for page in pages_of(item)]


def test_every_page_is_in_the_navigation_once():
    yaml = pytest.importorskip("yaml", reason="MkDocs brings it")
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(pages_of(nav)) == [str(page.relative_to(ROOT / "docs")) for page in SITE]


# What has changed may name what was there before.
CURRENT_PAGES = [page for page in PAGES if page.name not in {"CHANGELOG.md", "changelog.md"}]


@pytest.mark.parametrize("page", CURRENT_PAGES, ids=page_id)
def test_what_a_page_names_exists(page):
    text = page.read_text(encoding="utf-8")
    wrong = [
        f"{' '.join(each)}: {why}" for each in page_names.commands(text) if (why := page_names.why_no_command(each))
    ]
    wrong += [path for path in page_names.paths(text) if not page_names.exists(path)]
    wrong += [why for name in page_names.modules(text) if (why := page_names.why_no_module(name))]
    assert wrong == []


@pytest.mark.parametrize(
    ("planted", "why"),
    [
        ("```sh\nrocm-sd dance     # now\n```\n", "no verb dance"),
        ("Type `rocm-sd tune --everything`.", "no option --everything"),
        ("Type `FOO=1 make pancakes`.", "no target pancakes"),
        ("Type `.venv/bin/python benchmarks/gone.py --out x`.", "benchmarks/gone.py does not exist"),
        ("```sh\ncd x && python benchmarks/ops.py --gone\n```\n", "no option --gone"),
        ("```sh\npython -m training.emoji_sd.gone\n```\n", "no module"),
        ("Type `python -m pytest tests/gone`.", "tests/gone does not exist"),
    ],
)
def test_a_command_that_does_not_exist_is_seen(planted, why):
    (words,) = page_names.commands(planted)
    assert why in page_names.why_no_command(words)


def test_paths_and_modules_that_do_not_exist_are_seen():
    planted = "`src/rocm_sd/gone.py` `engine/gone/` `tuning/data/<gfx>/gone.json` `/dev/kfd` `out/`, `engine/capture/`"
    named = page_names.paths(planted)
    assert [path for path in named if not page_names.exists(path)] == named[:3]
    assert [
        page_names.why_no_module(name) for name in page_names.modules("`rocm_sd.ops.gone` `rocm_sd.arch.ARCHS`")
    ] == [
        "rocm_sd.ops has no gone",
        None,
    ]
    assert page_names.why_no_module("rocm_sd.candidates") is None  # a group of entry points


def test_included_pages_link_to_pages(tmp_path):
    (tmp_path / "GUIDE.md").write_text("[a](docs/cli.md#exit-codes) [b](INSTALL.md) [`c`](tools/x.py) [d](https://e.f)")
    shown = docs_site.included("# Guide\n<!-- include: GUIDE.md -->\n", tmp_path)
    assert shown == "# Guide\n[a](cli.md#exit-codes) [b](install.md) `c` [d](https://e.f)\n"


def test_the_sample_of_the_readme_runs(monkeypatch, tmp_path):
    """As it stands there, but with a small model in place of the hub's, on the CPU, and in two steps."""
    pipe = tiny_pipeline(tmp_path)
    draw = partialmethod(diffusers.StableDiffusionPipeline.__call__, num_inference_steps=2)
    monkeypatch.setattr(diffusers.StableDiffusionPipeline, "__call__", draw)
    asked = []

    def from_pretrained(name, **options):
        asked.append((name, options))
        return pipe

    monkeypatch.setattr(diffusers.StableDiffusionPipeline, "from_pretrained", from_pretrained)
    monkeypatch.setattr(pipe, "to", lambda _device: pipe)
    monkeypatch.chdir(tmp_path)
    samples = [f["code"] for f in FENCE.finditer((ROOT / "README.md").read_text("utf-8")) if f["language"] == "python"]
    assert len(samples) == 1
    exec(compile(samples[0], "README.md", "exec"), {})
    assert len(asked) == 1
    assert (tmp_path / "lighthouse.png").is_file()
    assert "forward" not in pipe.unet.mid_block.resnets[0].__dict__


def test_the_demo_s_figures_are_those_of_its_records():
    page = (ROOT / "docs" / "quality.md").read_text(encoding="utf-8")
    verdict = page.split("**")[1]
    for steps in (20, 50):
        seconds = json.loads((ROOT / "benchmarks" / "demo-cpu" / f"steps-{steps}.json").read_text())["seconds"]
        for engine in ("high", "balanced"):
            assert f"{median(seconds['stock']) / median(seconds[engine]):.2f}" in verdict
    for engine, found in seconds.items():
        assert re.search(rf"^\| `?{engine}`? \| {median(found):.2f} s \|", page, re.MULTILINE), engine
