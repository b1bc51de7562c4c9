"""The card's own time: the union of what ran on it, after all turns, and never in place of them."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch
from profiling.traces import GpuTrace
from torch.profiler import ProfilerActivity

from rocm_sd.bench import ablation, runner
from rocm_sd.bench.engines import Engine
from rocm_sd.bench.machine import machine
from rocm_sd.bench.profiling import recording as profiling
from rocm_sd.bench.profiling.recording import Recording, busy_ms, card_ms
from rocm_sd.bench.records import Measurement, Record, record_file
from rocm_sd.bench.runner import run
from rocm_sd.bench.workloads import make

CPU = torch.device("cpu")


def recorded(*kernels, region=None):
    """A trace with kernels at these times, in microseconds, each on a stream of its own."""
    trace = GpuTrace(region)
    for number, (start, end) in enumerate(kernels):
        trace.kernel("a kernel", 0, start, end, stream=number)
    return trace.values


@pytest.mark.parametrize(
    ("kernels", "busy"),
    [
        ([(0, 1000)], 1.0),
        ([(0, 1000), (5000, 7000)], 3.0),  # a gap is not work
        ([(0, 1000), (500, 2000)], 2.0),  # two streams at a time are one card
        ([(0, 4000), (1000, 2000), (3000, 3500)], 4.0),
        ([(5000, 6000), (0, 1000), (500, 1500)], 2.5),  # in any order
    ],
)
def test_busy_time_is_the_union(kernels, busy):
    assert busy_ms(recorded(*kernels)) == pytest.approx(busy)


def test_copies_and_fills_count_and_the_host_does_not():
    trace = GpuTrace(None)
    trace.kernel("a kernel", 0, 1000, 2000)
    trace.kernel("Memcpy DtoD", 0, 3000, 3500, cat="gpu_memcpy")
    trace.kernel("Memset", 0, 4000, 4250, cat="gpu_memset")
    trace.host("aten::conv2d", 0, 90_000)
    # What torch draws on the device's rows for a range of the host spans gaps.
    trace.host("a range", 0, 90_000, cat="gpu_user_annotation")
    assert busy_ms(trace.values) == pytest.approx(1.75)


def test_nothing_of_a_device_is_none_and_not_zero():
    trace = GpuTrace((0, 1000))
    trace.host("aten::conv2d", 0, 500)
    assert busy_ms(trace.values) is None
    assert busy_ms({"traceEvents": []}) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device is there, and records something")
def test_a_cpu_has_no_card_time():
    drawn = []
    assert card_ms(lambda: drawn.append(torch.ones(8, 8) @ torch.ones(8, 8))) is None
    assert len(drawn) == 1


@pytest.mark.gpu
def test_a_card_is_busy_for_a_part_of_the_time():
    a = torch.ones(4096, 4096, device="cuda")
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def draw():
        begin.record()
        for _ in range(10):
            a @ a
        end.record()

    draw()
    busy = card_ms(draw)
    assert 0 < busy <= 1.05 * begin.elapsed_time(end)


@pytest.mark.parametrize(
    ("there", "host", "wanted"),
    [
        (True, False, [ProfilerActivity.CUDA]),
        (True, True, [ProfilerActivity.CPU, ProfilerActivity.CUDA]),
        (False, False, [ProfilerActivity.CPU]),
    ],
)
def test_only_the_device_is_recorded(monkeypatch, there, host, wanted):
    asked = []
    real = profiling.profile

    def profile(*, activities, record_shapes):
        asked.append((activities, record_shapes))
        return real(activities=[ProfilerActivity.CPU], record_shapes=record_shapes)

    monkeypatch.setattr(profiling, "profile", profile)
    monkeypatch.setattr(profiling, "synchronize", lambda: None)
    monkeypatch.setattr(profiling.torch.cuda, "is_available", lambda: there)
    with Recording(host=host) as recording:
        torch.ones(2) + 1
    assert asked == [(wanted, host)]
    assert any(event.get("name") == profiling.REGION for event in recording.trace["traceEvents"]) is host


def test_after_ctrl_c_no_trace_is_written_and_the_profiler_is_off():
    recording = Recording(host=False)
    with pytest.raises(KeyboardInterrupt), recording:
        raise KeyboardInterrupt
    assert recording.trace is None
    assert not recording.is_running
    assert not torch.autograd.profiler._is_profiler_enabled


def test_a_record_without_the_field_is_read(work, tmp_path):
    plain = run_of_nothing(work, tmp_path)
    values = json.loads(plain.read_text())
    del values["measurements"][0]["card_ms"]
    plain.write_text(json.dumps(values))
    assert Record.load(plain).measurements[0].card_ms is None


def run_of_nothing(work, folder):
    measured = Measurement("a", "1", "it", 1, (1.0,), 1, card_ms=0.5)
    file = folder / "record.json"
    Record("ablation", work.facts, machine(CPU), "", "2026-01-01", (measured,)).save(file)
    assert Record.load(file).measurements[0].card_ms == 0.5
    return file


# In a run.


def engine(name, prepare=lambda pipe: pipe):
    return Engine(name, "a test", prepare, lambda _device: None, lambda: "1")


class Profiler:
    """In place of torch's, which finds no device here: it plays traces in which a card was busy for 1, 2, ... ms."""

    def __init__(self, monkeypatch, *, kernels=True):
        events, busy = [], itertools.count(1)
        self.events = events

        class Played:
            trace = None

            def __init__(self, *, host):
                assert not host

            def __enter__(self):
                return self

            def __exit__(self, kind, *_):
                if kind is None:
                    events.append("recorded")
                    us = next(busy) * 1000
                    self.trace = recorded((0, us), (0, us / 2)) if kernels else recorded()

        monkeypatch.setattr(profiling, "Recording", Played)
        real = runner.interleaved

        def noted(calls, watch, *, on_turn, **options):
            def heard(name, ms):
                events.append("turn")
                on_turn(name, ms)

            return real(calls, watch, on_turn=heard, **options)

        monkeypatch.setattr(runner, "interleaved", noted)


TWO = (engine("a"), engine("b"))


def measure(work, folder, engines=TWO, batches=(1,), **more):
    given = {"repeats": 2, "against": "a", "kind": "ablation", "card_times": True} | more
    return run(work, engines, batches, out=folder, **given)


def test_it_is_measured_once_a_row_after_every_turn(work, tmp_path, quick, monkeypatch):
    profiler, seen = Profiler(monkeypatch), []
    record = measure(work, tmp_path, batches=(1, 2), progress=lambda *step: seen.append(step))
    assert profiler.events == ["turn"] * 8 + ["recorded"] * 4
    # The last batch size comes first: its pipelines are warm.
    assert {(m.engine, m.batch): m.card_ms for m in record.measurements} == {
        ("a", 2): 1.0, ("b", 2): 2.0, ("a", 1): 3.0, ("b", 1): 4.0,
    }  # fmt: skip
    assert all(len(m.ms) == 2 and m.notes == () for m in record.measurements)
    assert Record.load(record_file(tmp_path, work.name, "ablation")) == record
    done = [each[0] for each in seen]
    assert done == sorted(done)
    assert seen[-1][0] == pytest.approx(seen[-1][1])
    # The bar is not full before the last of them.
    assert [each[0] < each[1] for each in seen if "own time" in each[2]][:-1] == [True] * 7


def test_it_is_not_measured_unless_asked_for(work, tmp_path, quick, monkeypatch):
    profiler = Profiler(monkeypatch)
    record = measure(work, tmp_path, card_times=False)
    assert "recorded" not in profiler.events
    assert [m.card_ms for m in record.measurements] == [None, None]


@pytest.mark.parametrize(("device", "wanted"), [("cpu", False), ("cuda", True)])
def test_an_ablation_on_a_gpu_asks_for_it(tmp_path, monkeypatch, work, device, wanted):
    asked = {}
    monkeypatch.setattr(runner, "run", lambda *_, **options: asked.update(options))
    on_device = make("sd15-512", CPU, tiny=True, steps=1)
    on_device.device = torch.device(device)
    ablation.run(on_device, [1], out=tmp_path)
    assert asked["card_times"] is wanted


@pytest.mark.parametrize("batches", [(1,), (1, 2)])
def test_a_resumed_run_fills_in_what_is_missing_and_times_nothing_again(work, tmp_path, quick, monkeypatch, batches):
    whole = measure(work, tmp_path, batches=batches, card_times=False)
    known = replace(whole.measurements[1], card_ms=77.0, engine="b")
    half = replace(whole, complete=False, measurements=(whole.measurements[0], known, *whole.measurements[2:]))
    half.save(record_file(tmp_path, work.name, "ablation"))
    profiler = Profiler(monkeypatch)
    monkeypatch.setattr(runner, "PictureGate", lambda *_: pytest.fail("it passed the gate before"))
    prepared = []
    engines = [engine(name, lambda pipe, name=name: prepared.append(name) or pipe) for name in "ab"]
    again = measure(work, tmp_path, engines, batches)
    missing = 2 * len(batches) - 1
    assert profiler.events == ["recorded"] * missing
    assert sorted(prepared) == sorted("ab" * len(batches))[:-1]
    assert again.complete
    assert again.measurement("b", 1).card_ms == 77.0
    assert again.measurement("a", 1).card_ms == 1.0
    assert [replace(m, card_ms=None) for m in again.measurements] == list(whole.measurements)
    assert again.comparisons == whole.comparisons


def test_where_no_later_batch_has_turns_left_the_warm_pipelines_are_recorded(work, tmp_path, quick, monkeypatch):
    whole = measure(work, tmp_path, batches=(1, 2), card_times=False)
    kept = tuple(m for m in whole.measurements if m.batch == 2)
    replace(whole, complete=False, measurements=kept).save(record_file(tmp_path, work.name, "ablation"))
    profiler, prepared = Profiler(monkeypatch), []
    engines = [engine(name, lambda pipe, name=name: prepared.append(name) or pipe) for name in "ab"]
    again = measure(work, tmp_path, engines, (1, 2))
    assert profiler.events == ["turn"] * 4 + ["recorded"] * 4
    # Once for the turns and the record of the first batch size, once for the record of the second.
    assert prepared == ["a", "b", "a", "b"]
    assert {(m.engine, m.batch): m.card_ms for m in again.measurements} == {
        ("a", 1): 1.0, ("b", 1): 2.0, ("a", 2): 3.0, ("b", 2): 4.0,
    }  # fmt: skip


def test_ctrl_c_keeps_the_turns_and_what_the_card_had_given(work, tmp_path, quick, monkeypatch):
    profiler = Profiler(monkeypatch)
    with monkeypatch.context() as patch:
        # The first is recorded, the second interrupted.
        calls = iter([card_ms])

        def interrupted(draw):
            try:
                return next(calls)(draw)
            except StopIteration:
                # On disk at once: a run that is killed here keeps it, too.
                assert Record.load(record_file(tmp_path, work.name, "ablation")).measurements[0].card_ms == 1.0
                raise KeyboardInterrupt from None

        patch.setattr(runner, "card_ms", interrupted)
        with pytest.raises(KeyboardInterrupt):
            measure(work, tmp_path)
    half = Record.load(record_file(tmp_path, work.name, "ablation"))
    assert not half.complete
    assert [(len(m.ms), m.card_ms) for m in half.measurements] == [(2, 1.0), (2, None)]
    whole = measure(work, tmp_path)
    assert whole.complete
    assert [m.card_ms for m in whole.measurements] == [1.0, 2.0]
    assert [m.ms for m in whole.measurements] == [m.ms for m in half.measurements]
    assert profiler.events == ["turn"] * 4 + ["recorded"] * 2


def test_what_fails_under_the_profiler_keeps_its_turns_and_says_why(work, tmp_path, quick, monkeypatch, caplog):
    Profiler(monkeypatch)
    with monkeypatch.context() as patch:

        def fails(_draw):
            raise RuntimeError("no counters for /home/someone/x")

        patch.setattr(runner, "card_ms", fails)
        record = measure(work, tmp_path)
    assert all(len(m.ms) == 2 and m.left_out is None and m.card_ms is None for m in record.measurements)
    assert record.measurements[0].notes == ("no card time: RuntimeError: no counters for x",)
    assert "no card time" in caplog.text
    # Another try that succeeds takes the note away.
    replace(record, complete=False).save(record_file(tmp_path, work.name, "ablation"))
    again = measure(work, tmp_path)
    assert [(m.card_ms, m.notes) for m in again.measurements] == [(1.0, ()), (2.0, ())]


def test_a_device_of_which_nothing_was_recorded_has_no_time_and_a_note(work, tmp_path, quick, monkeypatch):
    Profiler(monkeypatch, kernels=False)
    record = measure(work, tmp_path)
    assert [m.card_ms for m in record.measurements] == [None, None]
    assert record.measurements[0].notes == ("no card time: torch.profiler recorded nothing of a device",)
