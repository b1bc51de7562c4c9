"""Speed against quality: which settings are tried, what is kept of a run, the front and its plot."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch

from pipelines import tiny_pipeline
from rocm_sd import models
from rocm_sd.bench import pareto, pareto_tables, report
from rocm_sd.bench.gate import WRONG
from rocm_sd.bench.pareto import Choice, Survey, choices, short, workload_of
from rocm_sd.bench.pareto_points import Point, front, points
from rocm_sd.bench.records import Record
from rocm_sd.bench.report import pareto_plot
from rocm_sd.bench.report.pareto import scatter
from rocm_sd.bench.report.pareto_plot import Box, frame, place
from rocm_sd.bench.subjects import Subjects, from_file, of_model
from rocm_sd.engine import Approximation, Skipping
from rocm_sd.engine.approximation import remember
from rocm_sd.errors import NumericsFailure, Unsupported

HALF = Approximation(Skipping(depth=1, every=2))
THIRD = Approximation(Skipping(depth=1, every=3, guided_every=3))
PROMPTS = Subjects(("a frog", "a dog", "a cat", "a fox"))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_pipeline(folder).save_pretrained(folder / "tiny")
    return models.resolve(str(folder / "tiny"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def work(source):
    return workload_of(source, torch.device("cpu"), 6)


def survey(work, tmp_path, *approximations, subject=PROMPTS, **options) -> Survey:
    return Survey(work, subject, [Choice(short(one), one) for one in approximations], out=tmp_path, **options)


@pytest.mark.parametrize(
    ("approximation", "label"),
    [
        (Approximation(Skipping(1, 4)), "1/4"),
        (Approximation(Skipping(1, 4, order=1, guided_every=4)), "1/4 eg"),
        (Approximation(Skipping(3, 4, guided_every=2)), "1/4 g2 d3"),
        (Approximation(Skipping(guided_every=3, guidance_end=0.5)), "g3 no g after 50%"),
        (Approximation(merged=0.5, eight_bits="int8", small_decoder=True), "merged 50% int8 small decoder"),
        (Approximation(Skipping(first_block=0.1)), "first block 0.1"),
        (Approximation(Skipping(3, whole=(0, 0.2, 0.5), order=1, guided_every=2)), "3 whole eg d3"),
        (Approximation(), "exact"),
    ],
)
def test_short_names(approximation, label):
    assert short(approximation) == label


def test_choices_are_spread_named_first_and_each_once(work):
    pipe = work.pipeline()
    everything = [one for _, one in pareto.candidates(20, pareto._SHALLOW)]
    found = choices(pipe, 20, 5)
    given = [choice.approximation for choice in found if choice.approximation in everything]
    assert len(given) == 5
    assert given[0] == everything[0]
    assert given[-1] == everything[-1]
    further = ["merged 50%", "int8", "fp8", "decoder int8", "small decoder"]
    assert [choice.name for choice in found[-5:]] == further
    # A quality that is one of them stands there once, with what it claims.
    remember(pipe.unet, "balanced", 20, everything[0], "for the test", {})
    again = choices(pipe, 20, 5)
    assert (again[0].name, again[0].quality, again[0].approximation) == ("balanced", "balanced", everything[0])
    assert len({choice.approximation for choice in again}) == len(again) == len(found)
    assert len({choice.name for choice in again}) == len(again)
    assert len(choices(pipe, 20, 1000)) == len(everything) + 5
    assert [choice.name for choice in choices(pipe, 1, 5)] == further


def test_a_survey_times_and_scores_each_setting(work, tmp_path):
    seen = []
    run = survey(work, tmp_path, HALF, THIRD, command="rocm-sd bench it", progress=lambda *step: seen.append(step))
    record = run.go()
    assert record.complete
    assert record.engines == ("stock", "exact", "1/2", "1/3 g")
    assert all(len(one.ms) == len(PROMPTS.texts) for one in record.measurements)
    for one in record.measurements[2:]:
        assert one.quality.prompts == 4
        assert one.quality.setting
        assert max(one.quality.psnr_db) < 200, "it does leave something out"
        assert one.error <= 2 * one.stock_error + torch.finfo(torch.float32).eps
    assert {(c.engine, c.against) for c in record.comparisons} == {
        ("exact", "stock"), ("1/2", "stock"), ("1/3 g", "stock"), ("1/2", "exact"), ("1/3 g", "exact"),
    }  # fmt: skip
    assert Record.load(run.file) == record
    assert record.measurements[0].version.startswith("torch ")
    assert record.measurements[1].version.startswith("rocm-sd ")
    assert record.extra["settings"]["1/2"] == HALF.to_dict()
    assert record.extra["prompts"] == list(PROMPTS.texts)
    assert str(tmp_path) not in run.file.read_text()
    done = [step[0] for step in seen]
    assert done == sorted(done)
    assert seen[-1][0] == pytest.approx(seen[-1][1])


def test_scores_are_of_the_same_prompt_and_seed(work, tmp_path, monkeypatch):
    """A setting that draws what exact draws scores as equal in every turn, whatever the order of the turns is."""
    monkeypatch.setattr(pareto.Survey, "_is_exact", lambda *_: False)
    record = survey(work, tmp_path, Approximation(Skipping(depth=1, every=2, whole_first=6))).go()
    assert record.measurements[2].left_out is None
    assert min(record.measurements[2].quality.psnr_db) > 80


def test_what_comes_to_nothing_is_not_available(work, tmp_path):
    record = survey(work, tmp_path, Approximation(Skipping(depth=1, every=2, whole_first=6))).go()
    (found,) = record.measurements[2:]
    assert found.left_out.startswith(pareto.NOT_HERE)
    assert found.ms == ()
    assert record.complete
    assert found.left_out in " ".join(pareto_tables.notes(record))


def test_what_optimize_refuses_is_named_with_the_reason(work, tmp_path, monkeypatch):
    real = pareto.optimize

    def refusing(pipe, **options):
        if options.get("quality") == THIRD:
            raise Unsupported("this card", "products in int8, see /home/someone/x.so")
        return real(pipe, **options)

    monkeypatch.setattr(pareto, "optimize", refusing)
    record = survey(work, tmp_path, HALF, THIRD).go()
    kept, refused = record.measurements[2:]
    assert len(kept.ms) == 4
    assert refused.left_out.startswith(f"{pareto.NOT_HERE}: Unsupported: ")
    assert "products in int8" in refused.left_out
    assert "someone" not in refused.left_out
    assert [point.name for point in points(record)] == ["stock", "exact", "1/2"]


def spoil(pipe):
    with torch.no_grad():
        pipe.unet.conv_out.weight.mul_(1.001)


@pytest.mark.parametrize("whose", ["setting", "exact"])
def test_wrong_numerics_are_never_timed(work, tmp_path, monkeypatch, whose):
    real = pareto.optimize

    def spoiling(pipe, **options):
        real(pipe, **options)
        if (whose == "exact") == (not options):
            spoil(pipe)

    monkeypatch.setattr(pareto, "optimize", spoiling)
    if whose == "exact":
        with pytest.raises(NumericsFailure, match="no exact pictures to compare with"):
            survey(work, tmp_path, HALF).go()
    else:
        record = survey(work, tmp_path, HALF).go()
        assert record.measurements[2].left_out.startswith(WRONG)
        assert record.measurements[2].ms == ()


def test_one_that_fails_in_its_turns_leaves_the_others(work, tmp_path, monkeypatch):
    real = pareto.lossy.draw

    def tired(workload, pipe, text, seed):
        if seed == 2 and current == ["1/3 g"]:
            raise RuntimeError("no more")
        return real(workload, pipe, text, seed)

    current = []
    run = survey(work, tmp_path, HALF, THIRD)
    drawn = run._drawn

    def noted(name, *rest):
        current[:] = [name]
        return drawn(name, *rest)

    monkeypatch.setattr(run, "_drawn", noted)
    monkeypatch.setattr(pareto.lossy, "draw", tired)
    record = run.go()
    assert [len(one.ms) for one in record.measurements] == [4, 4, 4, 0]
    assert record.measurements[3].left_out == "RuntimeError: no more"


def test_ctrl_c_keeps_whole_turns(work, tmp_path, monkeypatch):
    # Three are warmed up, and then draw in turns of three.
    real, left = pareto.lossy.draw, [3 + 3 * 2 + 1]

    def interrupted(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return real(*arguments)

    run = survey(work, tmp_path, HALF)
    monkeypatch.setattr(pareto.lossy, "draw", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.go()
    kept = Record.load(run.file)
    assert not kept.complete
    assert [len(one.ms) for one in kept.measurements] == [2, 2, 2]
    assert kept.measurements[2].quality.prompts == 2
    assert len(points(kept)) == 3
    assert "2 of 4 prompts" in pareto_tables.title(kept)[1]
    assert any("interrupted" in note for note in pareto_tables.notes(kept))
    # The next run starts anew, and this record stays.
    monkeypatch.setattr(pareto.lossy, "draw", real)
    assert survey(work, tmp_path, HALF).go().complete
    assert len(list(tmp_path.glob("tiny-pareto-*.json"))) == 1


def test_too_little_memory_for_all_is_one_at_a_time(work, tmp_path, monkeypatch):
    made = []
    real = Survey._made

    def counted(self, name):
        made.append(name)
        if len(self._pipelines.kept) >= 2:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        return real(self, name)

    monkeypatch.setattr(Survey, "_made", counted)
    run = survey(work, tmp_path, HALF, subject=Subjects(PROMPTS.texts[:2]))
    run._pipelines._make = lambda name: counted(run, name)
    record = run.go()
    assert [len(one.ms) for one in record.measurements] == [2, 2, 2]
    assert any("too little memory" in note for note in record.notes)
    assert made.count("1/2") > 2, "it was made again for its turns"


def point(name, ratio, psnr, verdict="within high", spread=0.1) -> Point:
    return Point(name, ratio, ratio - spread, ratio + spread, psnr, verdict)


def test_the_front_is_what_nothing_beats_in_both():
    found = [
        point("stock", 9.0, math.inf), point("exact", 1.1, math.inf), point("a", 2.0, 40.0), point("b", 2.0, 39.0),
        point("c", 1.5, 40.0), point("d", 3.0, 30.0), point("e", 2.5, 29.0), point("f", 1.0, math.inf),
    ]  # fmt: skip
    assert [each.name for each in front(found)] == ["d", "a", "exact"]
    assert front([]) == []


def crowd() -> list[Point]:
    near = [point(f"1/{n} eg d3", 2 + 0.02 * n, 40 + 0.3 * n) for n in range(2, 9)]
    low = [point("1/8 g", 4.0, 20.0, "outside of both"), point("1/6 e d3", 3.8, 24.2, "within balanced")]
    return [point("stock", 1.0, math.inf, "stock"), point("exact", 1.03, math.inf, "exact"), *near, *low]


def test_no_label_lies_on_another_or_on_a_point():
    found = crowd()
    area = Box(86, 116, 1160, 652)
    placing = frame(found, area)
    anchors = [placing.at(each) for each in found]
    dots = [Box(x - 9, y - 9, x + 9, y + 9) for x, y in anchors]
    boxes = place(anchors, [(9.0 * len(each.name), 18.0) for each in found], area, dots, 11)
    for number, box in enumerate(boxes):
        assert box.inside(area)
        assert not any(box.overlap(other) for other in (*boxes[:number], *boxes[number + 1 :], *dots))


def test_points_lie_where_their_figures_say():
    found = crowd()
    placing = frame(found, Box(86, 116, 1160, 652))
    places = {each.name: placing.at(each) for each in found}
    assert places["1/8 g"][0] > places["1/6 e d3"][0] > places["exact"][0] > places["stock"][0]
    assert places["1/8 g"][1] > places["1/6 e d3"][1] > places["1/2 eg d3"][1] > places["exact"][1]
    assert places["exact"][1] == places["stock"][1] == placing.equal
    assert all(86 <= x <= 1160 and 116 <= y <= 652 for x, y in places.values())


def test_a_wide_interval_is_cut_at_the_edge():
    found = [
        point("exact", 1.0, math.inf, "exact"),
        point("a", 2.0, 40.0, spread=1.9),
        replace(point("b", 3.0, 30.0), high=90),
    ]
    placing = frame(found, Box(86, 116, 1160, 652))
    assert placing.whisker(found[2])[1] == 1160
    assert 86 <= placing.whisker(found[1])[0] < placing.at(found[1])[0] < placing.whisker(found[1])[1] < 1160
    assert placing.at(found[2])[0] < 900


def test_the_plot_shows_points_in_the_colour_of_their_verdict():
    found = [replace(each, on_front=True) for each in crowd()]
    drawn = pareto_plot.draw(found, "a model: speed against quality", "20 steps")
    assert drawn.size == (1200, 760)
    placing = frame(found, Box(86, 116, 1160, 652))
    for name, colour in (("1/8 g", (179, 38, 30)), ("1/6 e d3", (176, 122, 6))):
        x, y = placing.at(next(each for each in found if each.name == name))
        seen = drawn.getpixel((round(x), round(y)))
        assert max(abs(a - b) for a, b in zip(seen, colour, strict=True)) < 24


def test_the_page_has_the_section_only_where_there_is_a_survey(work, tmp_path):
    record = survey(work, tmp_path, HALF, THIRD, command="rocm-sd bench tiny --pareto").go()
    record.save(tmp_path / "it.json")
    html = report.render(report.page(report.read([tmp_path / "it.json"])))
    assert 'id="pareto"' in html
    assert html.count('<circle cx="') >= 4
    assert "rocm-sd bench tiny --pareto" in html
    assert "1/3 g" in html
    plain = report.page(report.Inputs())
    assert "pareto" not in {section.id for section in plain.sections}
    svg = scatter("it", points(record))
    assert len(re.findall("<circle", svg)) == 4
    page = pareto_tables.markdown(record, "it.png")
    assert "](it.png)" in page
    assert page.count("\n| ") == 5


@pytest.mark.parametrize("extra", [{}, {"near_exact_db": 3, "prompts": 4}, {"near_exact_db": {"stock": ["x", None]}}])
def test_what_a_record_may_hold_besides_breaks_nothing(work, tmp_path, extra):
    record = replace(survey(work, tmp_path, HALF).go(), extra=extra, complete=False)
    assert points(record)[0].psnr == math.inf
    assert pareto_tables.markdown(record, None)


def test_prompts_of_models_and_files(tmp_path):
    assert of_model("emoji-sd", 5).match is not None
    assert len(of_model("emoji-sd", 5).texts) == 5
    assert of_model("someone/model", 3).match is None
    file = tmp_path / "prompts.txt"
    file.write_text("a frog\n\n a dog \n")
    assert from_file(file).texts == ("a frog", "a dog")


def test_match_takes_the_first_pictures_of_an_interrupted_run():
    from PIL import Image

    subject = of_model("emoji-sd", 5)
    pictures = [Image.new("RGB", (128, 128), "white")] * 2
    assert subject.match(pictures, pictures).value == 0
