"""How long a pipeline takes to load: what is timed, what is put out of memory first, and where it is shown."""

from __future__ import annotations

import csv
import io
import json
import os
from dataclasses import replace
from pathlib import Path
from time import sleep

import pytest
import torch

from rocm_sd.bench import loading, tables
from rocm_sd.bench.records import NOT_LOADED, LoadTimes, Record
from rocm_sd.bench.workloads import make
from rocm_sd.models import ModelKind, ModelSource, resolve
from rocm_sd.models.emoji import MODEL_FOLDER

CPU = torch.device("cpu")
RECORDS = Path(__file__).parents[2] / "benchmarks/engine-h200"


def test_each_load_is_timed_by_itself(tmp_path):
    taken = iter((0.05, 0.01))

    def load():
        sleep(next(taken))
        return object()

    _, times = loading.timed_loads(ModelSource(ModelKind.FOLDER, str(tmp_path)), load)
    assert times.cold_s >= 0.05
    assert 0.01 <= times.warm_s < times.cold_s
    assert not times.from_disk, "there was no file to forget"


def test_the_first_pipeline_is_given_up_before_the_second_is_loaded():
    alive = []

    class Pipe:
        def __init__(self):
            assert not alive, "a card may have room for one"
            alive.append(self)

    def load():
        alive.clear()
        return Pipe()

    pipe, _ = loading.timed_loads(resolve(), load)
    assert alive == [pipe]


def test_files_of_a_model_are_its_weights():
    names = {file.relative_to(MODEL_FOLDER).parts[0] for file in loading.model_files(resolve())}
    assert {"unet", "vae", "text_encoder"} <= names
    weights = next(iter(MODEL_FOLDER.glob("unet/*.safetensors")))
    assert loading.model_files(ModelSource(ModelKind.FILE, str(weights))) == (weights,)
    assert loading.model_files(ModelSource(ModelKind.HUB, "nobody/has-this")) == ()


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="Linux alone tells whether a page is in memory")
def test_what_is_forgotten_was_seen_to_be_out_of_memory(tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(b"x" * (4 << 20))
    forgotten = loading.forget_files([file])
    opened = os.open(file, os.O_RDONLY)
    try:
        # Not where it was probed: asking for a page has the system read it.
        os.preadv(opened, [bytearray(1)], 3 << 20, os.RWF_NOWAIT)
        in_memory = True
    except BlockingIOError:
        in_memory = False
    except OSError:  # this file system cannot tell, and then nothing is claimed
        in_memory = True
    finally:
        os.close(opened)
    assert forgotten is not in_memory
    assert file.read_bytes() == b"x" * (4 << 20)
    assert not loading.forget_files([])


def test_a_workload_with_weights_of_its_own_says_how_long_they_took():
    work = make("emoji", CPU, time_loading=True)
    assert work.loading.cold_s > 0
    assert work.loading.warm_s > 0
    assert make("emoji", CPU).loading == NOT_LOADED
    assert make("sd15-512", CPU, tiny=True, time_loading=True).loading == NOT_LOADED


def test_records_of_before_are_read_and_new_ones_come_back(tmp_path):
    older = RECORDS / "sd15-512.json"
    assert "loading" not in json.loads(older.read_text())
    record = Record.load(older)
    assert record.loading == NOT_LOADED
    timed = replace(record, loading=LoadTimes(4.25, 1.5, from_disk=True))
    timed.save(tmp_path / "timed.json")
    assert Record.load(tmp_path / "timed.json") == timed


def test_tables_say_it_once_and_the_csv_in_each_row():
    record = replace(Record.load(RECORDS / "sd15-512.json"), loading=LoadTimes(4.25, 1.5, from_disk=True))
    sentence = "The pipeline loads in 4.2 s from the disk, and in 1.5 s again."
    assert tables.markdown(record).count(sentence) == 1
    rows = list(csv.DictReader(io.StringIO(tables.csv_text(record))))
    assert {(row["load s"], row["load again s"]) for row in rows} == {("4.25", "1.50")}
    assert "loads in" not in tables.markdown(replace(record, loading=NOT_LOADED))
    assert "at first" in str(LoadTimes(2.0, 1.0))
