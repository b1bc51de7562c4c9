"""Every reader of files that a user or a stranger hands over: what is wrong is one sentence, and nothing is lost.

pytest tests/test_fuzz_readers.py                               a hundred files for each reader
pytest -v tests/test_fuzz_readers.py --hypothesis-profile=fuzz  ten thousand, others every time
"""

from __future__ import annotations

import json
import logging
import shutil
import sqlite3
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import contributions_page
from fuzzed_files import broken, broken_bytes, evil, sentence
from rocm_sd import arch, models
from rocm_sd.bench import (
    card_report,
    contributions,
    profiling,
    publishing,
    report,
    several_gpus_tables,
    submission,
    tables,
)
from rocm_sd.bench.card_report import CardReport, Item, Part
from rocm_sd.bench.kpis import kpis
from rocm_sd.bench.records import Comparison, Machine, Measurement, Record, WorkloadFacts, continued
from rocm_sd.bench.regressions import regressions
from rocm_sd.bench.report import other_cards
from rocm_sd.bench.several_gpus_record import TOGETHER, GpusRecord, Way
from rocm_sd.contribution import keeping
from rocm_sd.doctor import recording
from rocm_sd.doctor.check import Status
from rocm_sd.doctor.examination import all_checks, examine
from rocm_sd.doctor.probes import RecordedProbes
from rocm_sd.errors import RocmSdError
from rocm_sd.integrations.installing import placing
from rocm_sd.plain_json import NotPlain, parsed
from rocm_sd.tuning import database_file
from rocm_sd.tuning.database import Database, Entry
from rocm_sd.tuning.environment import Environment
from rocm_sd.tuning.resolve import preferred

HERE = Path(__file__).parent
COUNTS: Counter[tuple[str, str]] = Counter()


def measured(engine: str, ms: float, **more) -> Measurement:
    turns = tuple(ms * (1 + wobble / 100) for wobble in (0, 1, -1, 2, 0, 1, 3, 2))
    given = {
        "first_picture_s": 9.0,
        "warm_up_s": 12.0,
        "first_run_mib": 5e3,
        "second_run_mib": 4e3,
        "power_watt": 300.0,
    }
    given |= {"clock_mhz": 2e3, "temperature_c": 60.0, "error": 1.4e-3, "stock_error": 2.2e-3, "floor_ms": 90.0}
    return Measurement(engine, "1.0", "torch", 1, turns, 50, **{**given, **more})


RECORD = Record(
    "engines",
    WorkloadFacts("sd15-512", "sd15", "random", 512, 512, 50, "DDIMScheduler", 7.5, "float16", flops=8.3e13),
    Machine("AMD Radeon RX 7900 XTX", "gfx1100", 96, 24560, "6.12", "Linux 6.8", {"torch": "2.11.0+rocm7"}),
    "rocm-sd bench sd15-512 --out results",
    "2026-11-15T12:00:00+00:00",
    (measured("stock", 4000.0), measured("rocm-sd", 1600.0, card_ms=1500.0, notes=("a note",))),
    (Comparison("rocm-sd", "stock", 1, 2.5, 2.4, 2.6, "faster"),),
    extra={"planned": {"engines": {"stock": "1", "rocm-sd": "1"}, "batches": [1], "repeats": 8, "cold": False},
           "memory_over_time": {"rocm-sd": [[0.0, 1.0], [0.5, 900.0]]}},
)  # fmt: skip
OP = replace(
    RECORD, kind="op", workload=replace(RECORD.workload, name="op:geglu", height=0, width=0, steps=1, flops=None),
    op_cases=("geglu 512x5120, float16",), extra={},
)  # fmt: skip
OLD_OP = {
    "op": "geglu", "command": "python benchmarks/ops.py", "machine": {"gpu": "NVIDIA H200", "arch": "sm_90"},
    "rows": [{"implementation": "triton", "call": "512x5120, float16", "problem": {"m": 512, "dtype": "float16"},
              "us": {"triton": 8.6, "stock": 34.7}}],
}  # fmt: skip
LADDER = [
    {"op": "geglu", "arch": "gfx1100", "rung": rung, "state": "passed", "sentence": "fine", "seconds": 1.0,
     "figures": {"vgprs": 96, "lds": 4096, "waves_per_simd": 8, "largest_error": 1e-3, "allowed": 2e-3,
                 "kernels": {"k": {"waves_per_simd": 8, "limited_by": "VGPRs"}}}}
    for rung in ("reference", "compiled", "emulated")
]  # fmt: skip
GPUS = GpusRecord(
    RECORD.workload, RECORD.machine, "rocm-sd bench sd15-512 --gpus 2", RECORD.when, ("RX 7900 XTX",) * 2, "cfg=2",
    "it was asked for", 24e9, 1,
    (Way("stock", 1, (4000.0, 4010.0, 4020.0, 4005.0), 1e-3, 1e-3), Way("rocm-sd", 1, (1600.0, 1610.0, 1590.0, 1605.0)),
     Way(TOGETHER, 2, (900.0, 910.0, 905.0, 903.0), 9e-4, 1e-3)),
    {"cfg": 3.2e4},
)  # fmt: skip
CARD = Environment("gfx1100", 96, "amdgpu 6.10.5", "rocm 7.1.0", "2.11.0+rocm7.1", "3.6.0", "3005001")
ENTRIES = tuple(
    Entry("conv2d", {"n": 2, "dtype": "float16"}, CARD, "0123456789abcdef", name, {"rows": number}, 9.0 + number, 8.0,
          12.0, 20.0, "ok", "2026-01-01T00:00:00+00:00")
    for number, name in enumerate(("triton", "hip", "torch"))
)  # fmt: skip
MACHINE = HERE / "doctor/machines/rx7900xtx-nhwc"


def count(name: str, *, taken: bool) -> None:
    COUNTS[name, "taken" if taken else "refused"] += 1


@pytest.fixture(scope="module", autouse=True)
def _counted(request):
    logging.getLogger("rocm_sd").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("rocm_sd").setLevel(logging.NOTSET)
    writer = request.config.get_terminal_writer()
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        for name in sorted({name for name, _ in COUNTS} if request.config.get_verbosity() > 0 else ()):
            taken, refused = COUNTS[name, "taken"], COUNTS[name, "refused"]
            writer.line(f"\n{name}: {taken + refused} files, {refused} refused, {taken} taken")
        writer.flush()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@given(raw=broken_bytes([RECORD.to_dict(), {"a": [1, 2.5, None, "x"]}]) | st.binary(max_size=40))
def test_plain_json(raw):
    try:
        values = parsed(raw)
    except NotPlain as error:
        sentence(error)
        count("plain_json", taken=False)
        return
    json.dumps(values, allow_nan=False).encode()
    count("plain_json", taken=True)


@given(raw=broken_bytes(RECORD.to_dict()))
def test_bench_records(folder, raw):
    path = folder / "records/sd15-512.json"
    shutil.rmtree(path.parent, ignore_errors=True)
    path.parent.mkdir()
    path.write_bytes(raw)
    try:
        before = Record.load(path)
    except RocmSdError as error:
        sentence(error)
        count("bench record", taken=False)
    else:
        with suppress(RocmSdError):
            list(map(str, regressions(before, RECORD)))
            list(map(str, regressions(RECORD, before)))
        assert Record.from_dict(json.loads(json.dumps(before.to_dict())), path) == before
        count("bench record", taken=True)
        if all(one.ms or one.left_out for one in before.measurements):
            tables.csv_text(before)
            tables.markdown(before)
            kpis(before)
    # A run that finds it continues it or puts it aside: what it held is there in either case.
    with continued(path, replace(RECORD, complete=False), resume=True) as begun:
        begun.save(path)
    assert [each for each in path.parent.iterdir() if each.read_bytes() == raw] or begun.measurements
    assert not [each for each in path.parent.iterdir() if each.suffix == ".lock"]


@given(raw=broken_bytes(RECORD.to_dict()) | broken_bytes(OP.to_dict()) | broken_bytes(OLD_OP))
def test_report(folder, raw):
    path = folder / "report.json"
    path.write_bytes(raw)
    try:
        inputs = report.read([path])
    except RocmSdError as error:
        sentence(error)
        count("report", taken=False)
        return
    html = report.render(report.page(inputs))
    assert "<script>alert" not in html
    html.encode()
    count("report", taken=True)


@given(raw=broken_bytes(GPUS.to_dict()))
def test_records_of_several_gpus(folder, raw):
    path = folder / "sd15-512-2-gpus.json"
    path.write_bytes(raw)
    try:
        inputs = report.read([path])
        found = GpusRecord.load(path)
    except RocmSdError as error:
        sentence(error)
        count("several GPUs", taken=False)
        return
    assert inputs.split == (found,)
    assert GpusRecord.from_dict(json.loads(json.dumps(found.to_dict())), path) == found
    several_gpus_tables.rich_tables(found)
    html = report.render(report.page(inputs))
    assert "<script>alert" not in html
    html.encode()
    count("several GPUs", taken=True)


@given(raw=broken_bytes(LADDER))
def test_ladder(folder, raw):
    path = folder / "ladder.json"
    path.write_bytes(raw)
    try:
        outcomes = report.read_ladder(path)
    except RocmSdError as error:
        sentence(error)
        count("ladder", taken=False)
        return
    other_cards.ladder(outcomes)
    count("ladder", taken=True)


def _signed(values):
    """Hashed again, as somebody would who means it."""
    with suppress(TypeError, ValueError, KeyError, AttributeError):
        values["sha256"] = publishing.digest(values)
    return values


@given(raw=broken_bytes(submission._body(RECORD), _signed))
def test_contributions(folder, raw):
    root = folder / "root"
    place = root / "contributions/gfx1100"
    shutil.rmtree(root, ignore_errors=True)
    place.mkdir(parents=True)
    path = place / "x.json"
    with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        named = submission._named(json.loads(raw))
        # No disk holds a file of a longer name.
        path = place / named if len(named.encode()) < 256 else path
    path.write_bytes(raw)
    wrong = submission.validate(path)
    for each in wrong:
        sentence(each)
    with suppress(RocmSdError):
        submission.load(path)
    page = contributions_page.listed(root)
    assert "<" not in page.replace("<!--", "")
    assert "javascript:" not in page
    count("contribution", taken=not wrong)


_ITEMS = (
    Item("attention hip", "failed", "crashed by signal 11", 2.0, {"samples": 5}),
    Item("geglu triton", "passed", "", 1.5, {"us": 8.6, "stock_us": 34.7, "timed": "512x5120, float16"}),
)
CARD_REPORT = card_report.publishable(CardReport(
    RECORD.machine, "rocm-sd contribute --budget 10m", RECORD.when, 480.0,
    (
        Part("verify", "failed", "1 of 2 passed", _ITEMS, 3.5, data={"tracebacks": {"attention hip": ["a line"]}}),
        Part("bench", "passed", "sd15-512: 2.5 times", (Item("sd15-512", "passed", "x"),), 90.0, (RECORD.to_dict(),)),
    ),
))  # fmt: skip


@given(raw=broken_bytes(CARD_REPORT, _signed))
def test_card_reports(folder, raw):
    root = folder / "cards"
    place = root / "contributions/gfx1100"
    shutil.rmtree(root, ignore_errors=True)
    place.mkdir(parents=True)
    path = place / "x.json"
    with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError):
        path = place / card_report.file_name(json.loads(raw))
        path.touch()
    path.write_bytes(raw)
    wrong = contributions.validate(path)
    for each in wrong:
        sentence(each)
    page = contributions_page.listed(root)
    assert "<" not in page.replace("<!--", "")
    assert "javascript:" not in page
    try:
        inputs = report.read([path])
    except RocmSdError as error:
        sentence(error)
        # What can be listed can be shown.
        assert wrong
    else:
        html = report.render(report.page(inputs))
        assert "<script>alert" not in html
        html.encode()
    count("card report", taken=not wrong)


@given(raw=broken_bytes({
    "format": keeping.FORMAT, "begun": RECORD.when,
    "units": [{"part": "verify", "name": "geglu triton", "tries": 1, "seconds": 1.5,
               "found": [{"items": [{"name": "x", "state": "passed"}], "records": [], "data": {"a": 1}}]}],
}))  # fmt: skip
def test_kept_contributions(folder, raw):
    place = folder / "kept"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    (place / "state.json").write_bytes(raw)
    kept = keeping.Kept(place)
    kept.begin("verify", "geglu triton")
    kept.finish("verify", "geglu triton", keeping.Found(_ITEMS), 1.0)
    assert keeping.Kept(place).found("verify", "geglu triton") == keeping.Found(_ITEMS)
    count("kept contribution", taken=kept.done > 1)


def _exported(folder: Path) -> dict:
    path = folder / "good.json"
    if not path.exists():
        source = Database(folder / "source.sqlite3")
        source.put(ENTRIES)
        source.quarantine("conv2d", "hip", CARD, "", "NaN")
        source.export_json(path)
        source.close()
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def database(folder):
    opened = Database(folder / "kept.sqlite3")
    opened.put(ENTRIES)
    yield opened
    opened.close()


@given(data=st.data())
def test_exports(folder, database, data):
    path = folder / "export.json"
    raw = data.draw(broken_bytes(_exported(folder)))
    path.write_bytes(raw)
    before = {entry.key(): entry for entry in database.all()}
    try:
        database.import_json(path)
    except RocmSdError as error:
        sentence(error)
        assert {entry.key(): entry for entry in database.all()} == before
        count("export", taken=False)
    else:
        after = {entry.key(): entry for entry in database.all()}
        assert before.keys() <= after.keys()
        assert all(entry.when <= after[key].when for key, entry in before.items())
        count("export", taken=True)
        database._write("DELETE FROM measurements", [()])
        database.put(ENTRIES)
    assert database.why_lost() is None
    assert path.read_bytes() == raw
    # A backup is as it was, or has all that it had.
    with suppress(RocmSdError):
        database.export_json(path)


_COLUMNS = ("op", "problem", "environment", "kernel_hash", "candidate", "config", "median_us", "numerics", "taken")
_cells = (
    evil.filter(lambda value: not isinstance(value, (list, dict, int))) | st.binary(max_size=4) | st.integers(-9, 9)
)


@given(
    column=st.sampled_from(_COLUMNS),
    cell=_cells,
    cut=st.none() | st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=40)),
)
def test_performance_data(folder, column, cell, cut):
    """A value that was never written so in a column, and bytes of the file overwritten."""
    place = folder / "performance"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    path, good = place / "tuning.sqlite3", folder / "whole.sqlite3"
    if not good.exists():
        made = Database(good)
        made.put(replace(entry, problem={"turn": turn}) for entry in ENTRIES for turn in range(40))
        made.quarantine("conv2d", "hip", CARD, "", "NaN")
        made.close()
    shutil.copyfile(good, path)
    database_file._say_once.cache_clear()
    if cut is None:
        with suppress(sqlite3.Error, UnicodeEncodeError), sqlite3.connect(path) as connection:
            for table in ("measurements", "quarantine"):
                with suppress(sqlite3.OperationalError):
                    connection.execute(f"UPDATE OR IGNORE {table} SET {column} = ?", (cell,))
        connection.close()
    else:
        content = bytearray(path.read_bytes())
        begin = int(cut[0] * len(content))
        content[begin : begin + len(cut[1])] = cut[1]
        path.write_bytes(content)
    content = path.read_bytes()
    backup = folder / "backup.json"
    backup.write_text("{}")
    opened = Database(path)
    found = opened.all()
    for entry in found[:3]:
        preferred(entry, ENTRIES[0])
    opened.best("conv2d", {"turn": 1}, CARD, "0123456789abcdef")
    try:
        opened.export_json(backup)
    except RocmSdError as error:
        sentence(error)
        assert backup.read_text() == "{}"
        # Nothing that was there is gone: it has another name, or its own.
        assert [each for each in place.iterdir() if each.read_bytes() == content]
        count("performance data", taken=False)
    else:
        count("performance data", taken=True)
    opened.put(ENTRIES)
    assert {entry.key() for entry in ENTRIES} <= {entry.key() for entry in opened.all()}
    opened.close()


FACTS, PROBES = (json.loads((MACHINE / name).read_text()) for name in (recording.FACTS, recording.PROBES))


@given(facts=broken_bytes(FACTS) | st.just(json.dumps(FACTS).encode()), probes=broken_bytes(PROBES))
def test_machines(folder, facts, probes):
    place = folder / "machine"
    place.mkdir(exist_ok=True)
    (place / recording.FACTS).write_bytes(facts)
    (place / recording.PROBES).write_bytes(probes)
    try:
        machine, answers = recording.load(place), recording.read_probes(place)
    except RocmSdError as error:
        sentence(error)
        count("doctor's machine", taken=False)
        return
    for each in examine(machine, RecordedProbes(answers), all_checks()):
        # A card may have a long name; a reason may not be the whole file.
        each.finding.says.encode()
        assert each.finding.status is not Status.UNKNOWN or len(each.finding.says) < 10_000
        assert "The check itself failed" not in each.finding.says
    count("doctor's machine", taken=True)


LIST = {
    "folder": "rocm_sd", "mode": "copy", "version": "0.1", "target": None,
    "files": {"__init__.py": "0" * 64, "nodes/a.py": "1" * 64},
}  # fmt: skip


@given(raw=broken_bytes(LIST))
def test_install_lists(folder, raw):
    root = folder / "host"
    shutil.rmtree(root, ignore_errors=True)
    destination = root / "custom_nodes/rocm_sd"
    (destination / "nodes").mkdir(parents=True)
    kept = {root / "main.py": b"x", destination / "nodes/mine.py": b"y", destination / "__init__.py": b"changed"}
    for file, content in kept.items():
        file.write_bytes(content)
    (destination.parent / placing.LIST_NAME).write_bytes(raw)
    host = SimpleNamespace(root=root, kind="comfyui", destination=destination, title="ComfyUI")
    try:
        placing.remove(host)
    except RocmSdError as error:
        sentence(error)
        count("install list", taken=False)
    else:
        count("install list", taken=True)
    assert all(file.read_bytes() == content for file, content in kept.items())


ROCPROF = {
    "rocprofiler-sdk-tool": [
        {"kernel_symbols": [{"kernel_id": 1, "formatted_kernel_name": "gemm"}, {"kernel_id": 2, "kernel_name": "x.kd"}],
         "buffer_records": {"kernel_dispatch": [
             {"start_timestamp": 1000 * at, "end_timestamp": 1000 * at + 700,
              "dispatch_info": {"kernel_id": 1 + at % 2, "agent_id": {"handle": 2**64 - 1}, "queue_id": {"handle": 1}}}
             for at in range(4)]}}
    ]
}  # fmt: skip
ROWS = [
    ["Kernel_Name", "Start_Timestamp", "End_Timestamp", "Agent_Id"],
    ["gemm", 1000, 1700, 1],
    ["copy", 2000, 2500, 1],
]


def _as_csv(values):
    rows = values if isinstance(values, list) else [values]
    return "\n".join(",".join(map(str, row)) if isinstance(row, list) else str(row) for row in rows)


@given(raw=broken_bytes(ROCPROF) | broken(ROWS).map(_as_csv).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_rocprof(folder, raw):
    path = folder / "rocprof"
    path.write_bytes(raw)
    try:
        found = profiling.read_rocprof(path)
    except RocmSdError as error:
        sentence(error)
        count("rocprofv3", taken=False)
        return
    profiling.findings(profiling.analyse(found, arch.unknown("gfx")))
    count("rocprofv3", taken=True)


INDEX = {
    "_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"], "safety_checker": [None, None],
}  # fmt: skip


@given(raw=broken_bytes(INDEX))
def test_model_indexes(folder, raw):
    place = folder / "model"
    for part in ("unet", "vae"):
        (place / part).mkdir(parents=True, exist_ok=True)
    (place / "model_index.json").write_bytes(raw)
    try:
        models.resolve(place)
    except RocmSdError as error:
        sentence(error)
        count("model index", taken=False)
    else:
        count("model index", taken=True)


def test_the_good_files_are_taken(folder, database):
    """What is broken above is whole before that: none of the readers refuses everything."""
    path = folder / "good"
    for values, read in (
        (RECORD.to_dict(), Record.load),
        (RECORD.to_dict(), lambda path: report.page(report.read([path]))),
        (OP.to_dict(), lambda path: report.page(report.read([path]))),
        (OLD_OP, lambda path: report.page(report.read([path]))),
        (LADDER, lambda path: other_cards.ladder(report.read_ladder(path))),
        (_exported(folder), database.import_json),
    ):
        path.write_text(json.dumps(values))
        assert read(path)
    assert submission.validate(submission.write(RECORD, folder / "contribution")) == ()
    assert recording.load(MACHINE)
    assert recording.read_probes(MACHINE)
