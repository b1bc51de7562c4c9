"""Records of several GPUs on the page: a table of the ways, and measured points beside the modelled line."""

from __future__ import annotations

import re
from dataclasses import replace

import made_up

from rocm_sd.bench.records import OURS
from rocm_sd.bench.report import Inputs, page, read, render
from rocm_sd.bench.report.several_gpus import several_gpus
from rocm_sd.bench.several_gpus_record import TOGETHER, Way

SPITE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


def cells(figure, heading):
    place = figure.table.headings.index(heading)
    return [row[place] for row in figure.table.rows]


def test_there_is_no_section_without_records():
    assert several_gpus(()) is None


def test_a_record_is_a_table_with_what_it_gains_and_sends(tmp_path):
    path = tmp_path / "sd15-512-2-gpus.json"
    made_up.gpus(2).save(path)
    inputs = read([path])
    section = several_gpus(inputs.split)
    figure = section.figures[-1]
    assert cells(figure, "drawn by") == ["stock", "rocm-sd", "rocm-sd, all ranks"]
    assert cells(figure, "ms a picture")[2] == "175"
    assert all(" to " in cell for cell in cells(figure, "interval"))
    assert cells(figure, "pictures/s")[2] == "5.71"
    assert cells(figure, "times stock")[2].endswith(": faster")
    assert cells(figure, "times one rank")[:2] == ["", ""]
    assert cells(figure, "times one rank")[2].startswith("1.6")
    assert cells(figure, "efficiency")[2] == "0.80"
    assert cells(figure, "sent a picture")[2] == "32.0 kB for cfg, 1.5 MB for vae"
    assert section.commands == ("rocm-sd bench sd15-512 --gpus 2",)
    html = render(page(inputs))
    assert "More than one GPU, measured" in html
    assert "Weights are random" in html


def test_measured_points_stand_beside_the_modelled_line():
    """Records that differ in their ranks alone are one figure, and the line is of the card's own architecture."""
    figures = several_gpus([made_up.gpus(ranks, f"patch={ranks}") for ranks in (2, 4)]).figures
    assert len(figures) == 1 + 2
    kinds = cells(figures[0], "kind")
    assert kinds.count("measured") == 2
    assert any(kind.startswith("modelled, ") and "7900 XTX" in kind for kind in kinds)
    assert len(re.findall('class="dot ours"', figures[0].chart)) == 2 + 1
    assert "measured: 0.80 on 4" in figures[0].chart
    assert "modelled: " in figures[0].chart


def test_where_nothing_is_modelled_it_is_said():
    facts = replace(made_up.WORKLOAD, name="emoji")
    (curve, _) = several_gpus([replace(made_up.gpus(), workload=facts)]).figures
    assert "modelled" not in curve.chart
    assert curve.notes == ("Nothing is modelled for emoji by cfg on gfx1100.",)
    cpu = replace(made_up.CARD, arch="cpu")
    (curve, _) = several_gpus([replace(made_up.gpus(), machine=cpu)]).figures
    assert "Processes of one CPU share its cores" in curve.notes[1]


def test_several_pictures_a_turn_are_counted_as_such():
    figure = several_gpus([made_up.gpus(2, "data=2", pictures=2)]).figures[-1]
    assert "ms a turn" in figure.table.headings
    assert cells(figure, "pictures/s")[2] == "11.4"


def test_a_wrong_result_has_a_reason_and_no_speed():
    record = made_up.gpus()
    wrong = Way(TOGETHER, 2, (), 0.5, 1e-3, left_out="rank 1 is far from float64")
    (figure,) = several_gpus([replace(record, ways=(*record.ways[:2], wrong))]).figures
    assert cells(figure, "note")[2] == "no speed: rank 1 is far from float64"
    assert cells(figure, "ms a picture")[2] == ""
    assert several_gpus([replace(record, ways=(record.way(OURS),))]).figures


def test_a_hostile_record_is_text_and_nothing_else():
    record = made_up.gpus(
        command=SPITE, plan=SPITE, why=SPITE, cards=(SPITE, SPITE), sent={SPITE: 1.0},
    )  # fmt: skip
    record = replace(
        record,
        workload=replace(record.workload, name=SPITE, scheduler=SPITE),
        machine=replace(record.machine, device=SPITE, arch=SPITE, versions={SPITE: SPITE}),
    )
    html = render(page(Inputs(records=(record,))))
    assert "<script>alert" not in html
    assert "<img src=x" not in html
