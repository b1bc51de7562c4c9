from __future__ import annotations

import gc
import itertools
import json
import logging
import sys
import weakref
from collections import Counter
from dataclasses import replace

import pytest
import torch

from rocm_sd.bench import runner, turns
from rocm_sd.bench.engines import Engine, engines, stock
from rocm_sd.bench.gate import WRONG, PictureGate
from rocm_sd.bench.machine import PeakMemory
from rocm_sd.bench.records import Measurement, Record, keep_older, record_file
from rocm_sd.bench.runner import run
from rocm_sd.bench.sensors import Readings

CPU = torch.device("cpu")


def engine(name, prepare=lambda pipe: pipe, version="1"):
    return Engine(name, "a test", prepare, lambda _device: None, lambda: version)


def spoiled(pipe):
    with torch.no_grad():
        pipe.unet.conv_out.weight.mul_(1.001)
    return pipe


def spoiled_vae(pipe):
    with torch.no_grad():
        pipe.vae.decoder.conv_out.weight.mul_(1.01)
    return pipe


def broken_after(left, error):
    """Pipelines that draw together as many pictures as the count `left` goes down to, of every length, and no more."""

    def prepare(pipe):
        forward = pipe.vae.decode

        def decode(*arguments, **named):
            if next(left) <= 0:
                raise error
            return forward(*arguments, **named)

        pipe.vae.decode = decode
        return pipe

    return prepare


def test_engines_side_by_side(work, tmp_path, quick):
    seen = []
    ours = engines()["rocm-sd"]
    record = run(
        work, [stock, ours], [1, 2], out=tmp_path, repeats=4, command="rocm-sd bench it",
        progress=lambda *step: seen.append(step),
    )  # fmt: skip
    assert record.complete
    assert [(m.engine, m.batch) for m in record.measurements] == [
        ("stock", 1), ("rocm-sd", 1), ("stock", 2), ("rocm-sd", 2),
    ]  # fmt: skip
    for one in record.measurements:
        assert len(one.ms) == 4
        assert one.warm_up_s is not None
        assert one.warm_up_s > 0
        assert one.error is not None
        assert one.error <= 1.5 * one.stock_error + 1.2e-7
        assert one.floor_ms is None, "the arithmetic rate of a CPU is not known"
        assert (one.left_out, one.steps) == (None, 1)
    assert [(c.engine, c.against, c.batch) for c in record.comparisons] == [
        ("rocm-sd", "stock", 1), ("rocm-sd", "stock", 2),
    ]  # fmt: skip
    assert Record.load(record_file(tmp_path, work.name)) == record
    assert set(record.extra["memory_over_time"]) <= {"stock", "rocm-sd"}
    # The bar never goes back, ends full, and says what is under way.
    done = [each[0] for each in seen]
    assert done == sorted(done)
    assert seen[-1][0] == pytest.approx(seen[-1][1])
    assert any("stock, first picture" in what for *_, what in seen)


def test_ours_is_compared_with_every_other(work, tmp_path, quick):
    record = run(work, [stock, engine("other"), engine("rocm-sd")], [1], out=tmp_path, repeats=1)
    assert [(c.engine, c.against) for c in record.comparisons] == [
        ("other", "stock"), ("rocm-sd", "stock"), ("rocm-sd", "other"),
    ]  # fmt: skip


def test_turns_are_interleaved(work, tmp_path, quick, monkeypatch):
    order, real = [], runner.interleaved

    def noted(calls, watch, **options):
        named = {name: lambda name=name, call=call: (order.append(name), call()) for name, call in calls.items()}
        return real(named, watch, **options)

    monkeypatch.setattr(runner, "interleaved", noted)
    run(work, [engine("a"), engine("b")], [1], out=tmp_path, repeats=4, against="a")
    assert sorted(order) == ["a"] * 4 + ["b"] * 4
    assert all(set(order[turn : turn + 2]) == {"a", "b"} for turn in range(0, 8, 2))
    assert order[:4] != ["a", "b"] * 2, "the same one is not always first"


@pytest.mark.parametrize(("spoil", "words"), [(spoiled, "of the latents"), (spoiled_vae, "of the picture")])
def test_a_wrong_result_is_never_timed(work, tmp_path, quick, caplog, spoil, words):
    record = run(work, [stock, engine("fast but wrong", spoil)], [1], out=tmp_path, repeats=2)
    right, wrong = record.measurements
    assert len(right.ms) == 2
    assert wrong.ms == ()
    assert wrong.left_out is not None
    assert wrong.left_out.startswith(WRONG)
    assert words in wrong.left_out
    assert wrong.warm_up_s is None
    assert record.comparisons == ()
    assert record.complete
    assert "fast but wrong is skipped at batch 1" in caplog.text


def test_nothing_that_is_not_a_number_passes_the_gate(work, tmp_path, quick):
    def poisoned(pipe):
        with torch.no_grad():
            pipe.unet.conv_out.bias.fill_(float("nan"))
        return pipe

    record = run(work, [stock, engine("nan", poisoned)], [1], out=tmp_path, repeats=1)
    assert record.measurements[1].left_out is not None
    assert "NaN" not in record_file(tmp_path, work.name).read_text()


def test_the_gate_compares_with_stock_even_where_stock_is_not_timed(work, tmp_path, quick):
    record = run(work, [engine("wrong", spoiled)], [1], out=tmp_path, repeats=1)
    assert record.measurements[0].left_out.startswith(WRONG)
    assert record.measurements[0].stock_error > 0


def test_an_engine_in_a_finer_dtype_passes(work, tmp_path, quick):
    record = run(work, [engine("double", lambda pipe: pipe.to(torch.float64))], [1], out=tmp_path, repeats=1)
    assert record.measurements[0].error == 0
    assert record.measurements[0].ms


def test_a_crash_of_one_engine_leaves_the_others(work, tmp_path, quick):
    def crashing(_pipe):
        raise RuntimeError("no kernel in /home/someone/cache/kernel.so for this card\nand more")

    record = run(work, [engine("bad", crashing), stock], [1], out=tmp_path, repeats=2)
    bad, good = record.measurements
    # One line, and no folder of a person's.
    assert bad.left_out == "RuntimeError: no kernel in kernel.so for this card"
    assert len(good.ms) == 2


def test_an_engine_of_a_plug_in_that_calls_exit_leaves_the_others(work, tmp_path, quick):
    record = run(work, [engine("bad", lambda _pipe: sys.exit(0)), stock], [1], out=tmp_path, repeats=2)
    bad, good = record.measurements
    assert bad.left_out == "SystemExit: 0"
    assert len(good.ms) == 2


def test_out_of_memory_in_the_middle_leaves_the_others(work, tmp_path, quick):
    # The first, the second, the gate's and the warm-up's pictures go well, and then none, alone or not.
    left = itertools.count(4, -1)
    tired = engine("tired", broken_after(left, torch.OutOfMemoryError("tried to allocate 2 GiB")))
    record = run(work, [stock, tired], [1], out=tmp_path, repeats=3)
    good, bad = record.measurements
    assert bad.left_out == "out of memory: tried to allocate 2 GiB"
    assert bad.ms == ()
    assert len(good.ms) == 3
    assert record.comparisons == ()


class SmallCard:
    """Has room for so many pipelines. The next one cannot be made, or where `drawing`, cannot draw.

    `compiled` keeps pipelines, as compiled code does until it is forgotten, where it is a list.
    """

    def __init__(self, room, *, drawing=False, compiled=None):
        self.room, self.drawing, self.compiled = room, drawing, compiled
        self.alive, self.made, self.refused = weakref.WeakSet(), Counter(), 0

    def engine(self, name):
        def prepare(pipe):
            self.made[name] += 1
            self.alive.add(pipe.unet)
            if self.compiled is not None:
                self.compiled.append(pipe)
            if not self.drawing:
                self.check()
                return pipe
            decode = pipe.vae.decode
            pipe.vae.decode = lambda *arguments, **named: (self.check(), decode(*arguments, **named))[1]
            return pipe

        return engine(name, prepare)

    def check(self):
        gc.collect()
        if len(self.alive) > self.room:
            self.refused += 1
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")


SHORT = "batch 1: too little memory for all engines at once; each was made ready anew for its turns"


def test_engines_that_do_not_fit_at_once_have_the_memory_one_at_a_time(work, tmp_path, quick, caplog, monkeypatch):
    card, seen = SmallCard(1, compiled=[]), []
    for module in (turns, runner):
        monkeypatch.setattr(module, "forget_compiled", card.compiled.clear)
    engines_there = [card.engine(name) for name in ("stock", "b", "rocm-sd")]
    options = {"progress": lambda *step: seen.append(step), "card_times": True}
    record = run(work, engines_there, [1], out=tmp_path, repeats=4, **options)
    assert [len(m.ms) for m in record.measurements] == [4, 4, 4]
    assert record.complete
    assert record.notes == (SHORT,)
    assert SHORT in caplog.text
    assert card.refused == 1, "after the first refusal there is never more than one"
    assert len(record.comparisons) == 3
    # The bar never goes back, is not full too early, and ends full.
    assert [done for done, *_ in seen] == sorted(done for done, *_ in seen)
    assert seen[-1][0] == pytest.approx(seen[-1][1])
    assert all(done < total for done, total, what in seen if "made ready again" in what)


def test_memory_that_is_short_is_seen_before_it_runs_out(work, tmp_path, quick, monkeypatch):
    monkeypatch.setattr(turns.engine, "free_memory", lambda _device: 2**20)
    card = SmallCard(1)
    record = run(work, [card.engine("stock"), card.engine("b")], [1], out=tmp_path, repeats=2)
    assert record.notes == (SHORT,)
    assert card.refused == 0
    # Made ready once, and then before its turns: the second turn begins with the one that the first ended with.
    assert card.made == {"stock": 3, "b": 2}


def test_engines_that_run_out_of_memory_in_their_turns_go_on_one_at_a_time(work, tmp_path, quick, monkeypatch):
    card = SmallCard(2, drawing=True)
    real = runner.interleaved

    def crowded(*arguments, **named):
        card.room = 1
        return real(*arguments, **named)

    monkeypatch.setattr(runner, "interleaved", crowded)
    record = run(work, [card.engine("stock"), card.engine("b")], [1], out=tmp_path, repeats=3)
    assert [len(m.ms) for m in record.measurements] == [3, 3]
    assert [m.left_out for m in record.measurements] == [None, None]
    assert (record.notes, card.refused) == ((SHORT,), 1)


def test_one_that_does_not_fit_alone_costs_the_others_no_turns(work, tmp_path, quick):
    def huge(_pipe):
        raise torch.OutOfMemoryError("tried to allocate 2 TiB")

    card = SmallCard(2)
    engines_there = [card.engine("stock"), engine("huge", huge), card.engine("b")]
    record = run(work, engines_there, [1], out=tmp_path, repeats=3)
    first, bad, last = record.measurements
    assert bad.left_out == "out of memory: tried to allocate 2 TiB"
    assert (len(first.ms), len(last.ms)) == (3, 3)
    assert record.notes == ()
    assert card.made == {"stock": 2, "b": 1}, "the first made room, and came back"


def interrupt(monkeypatch, at):
    """Ctrl-C after so many timings."""
    real = runner.interleaved

    def interrupted(calls, watch, *, on_turn, **options):
        left = itertools.count(at, -1)

        def heard(name, ms):
            on_turn(name, ms)
            if next(left) <= 1:
                raise KeyboardInterrupt

        return real(calls, watch, on_turn=heard, **options)

    monkeypatch.setattr(runner, "interleaved", interrupted)


def test_ctrl_c_keeps_the_turns_and_the_next_run_goes_on(work, tmp_path, quick, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt(patch, at=3)
        with pytest.raises(KeyboardInterrupt):
            run(work, [stock, engine("b")], [1], out=tmp_path, repeats=4)
    file = record_file(tmp_path, work.name)
    half = Record.load(file)
    assert not half.complete
    assert [len(m.ms) for m in half.measurements] == [1, 2]
    whole = run(work, [stock, engine("b")], [1], out=tmp_path, repeats=4)
    assert whole.complete
    assert whole.when == half.when
    for before, after in zip(half.measurements, whole.measurements, strict=True):
        assert after.ms[: len(before.ms)] == before.ms
        assert len(after.ms) == 4
        # Warm by now: only the first run's warm-up is the true one.
        assert after.warm_up_s == before.warm_up_s
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_a_resumed_run_measures_only_what_is_missing(work, tmp_path, quick):
    record = run(work, [stock], [1], out=tmp_path, repeats=2)
    file = record_file(tmp_path, work.name)
    replace(record, complete=False).save(file)

    def untouched(_pipe):
        raise AssertionError("it has all its turns")

    again = run(work, [replace(stock, prepare=untouched)], [1], out=tmp_path, repeats=2)
    assert again.measurements == record.measurements


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"engines": [engine("stock", version="other")]}, "engines"),
        ({"batches": [2]}, "batches"),
        ({"cold": True}, "cold"),
    ],
)
def test_another_run_is_not_continued_and_not_lost(work, tmp_path, quick, caplog, change, words):
    options = {"engines": [engine("stock")], "batches": [1], "cold": False}
    file = record_file(tmp_path, work.name)
    first = run(work, out=tmp_path, repeats=1, **options)
    marked = replace(first.measurements[0], ms=(123456.0,))
    replace(first, complete=False, measurements=(marked,)).save(file)
    with caplog.at_level(logging.WARNING, "rocm_sd"):
        second = run(work, out=tmp_path, repeats=1, **options | change)
    assert f"is of another run, with {words}" in caplog.text
    assert second.measurements[0].ms != (123456.0,)
    (aside,) = [path for path in tmp_path.iterdir() if path != file]
    assert Record.load(aside).measurements[0].ms == (123456.0,)


def test_fresh_starts_anew(work, tmp_path, quick):
    file = record_file(tmp_path, work.name)
    first = run(work, [stock], [1], out=tmp_path, repeats=1)
    replace(first, complete=False, measurements=(replace(first.measurements[0], ms=(9e9,)),)).save(file)
    assert run(work, [stock], [1], out=tmp_path, repeats=1, resume=False).measurements[0].ms != (9e9,)


def test_an_older_record_is_renamed_after_its_time(tmp_path):
    file = tmp_path / "x.json"
    for text in ("{}", "{}"):
        file.write_text(text)
        keep_older(file, Record.load)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x-unreadable-2.json", "x-unreadable.json"]


def test_sensors_are_read_for_each_engine_alone(work, tmp_path, quick, monkeypatch):
    from contextlib import contextmanager

    # Warm-ups that are too short to tell, the question whether anybody tells at all, and the engines.
    powers = iter([1.0, 2.0, 3.0, 50.0, 60.0])

    @contextmanager
    def watch(_device):
        yield Readings(next(powers), 2000.0, 55.0)

    monkeypatch.setattr(runner, "watch", watch)
    monkeypatch.setattr(runner, "settled", lambda *_, **__: [])
    monkeypatch.setattr(runner, "_SENSED_S", 0.05)
    record = run(work, [stock, engine("b")], [1], out=tmp_path, repeats=1)
    assert [m.power_watt for m in record.measurements] == [50.0, 60.0]
    assert record.measurements[0].energy_joule == pytest.approx(50 * record.measurements[0].p50_ms / 1e3)


def test_sensors_are_read_in_a_warm_up_that_is_long_enough(work, tmp_path, quick, monkeypatch):
    from contextlib import contextmanager

    powers = iter([50.0, 60.0, 1.0])

    @contextmanager
    def watch(_device):
        yield Readings(next(powers), 2000.0, 55.0)

    monkeypatch.setattr(runner, "watch", watch)
    monkeypatch.setattr(runner, "_SENSED_S", 0.0)
    record = run(work, [stock, engine("b")], [1], out=tmp_path, repeats=1)
    assert [m.power_watt for m in record.measurements] == [50.0, 60.0]


def test_the_floor_is_the_arithmetic_over_the_peak(work, tmp_path, quick, monkeypatch):
    from rocm_sd import arch

    monkeypatch.setattr(arch, "detect", lambda _device: replace(arch.CPU, peak_tflops=(("float32", 2.0),)))
    record = run(work, [stock], [2], out=tmp_path, repeats=1)
    assert record.measurements[0].floor_ms == pytest.approx(2 * work.facts.flops / 2e12 * 1e3)


def test_no_reference_no_timing(work, tmp_path, quick, monkeypatch):
    def no_room(*_):
        raise torch.OutOfMemoryError("10 GiB")

    monkeypatch.setattr(runner, "PictureGate", no_room)
    record = run(work, [stock], [1], out=tmp_path, repeats=1)
    assert record.measurements[0].left_out == "nothing to compare it with: out of memory: 10 GiB"


def test_memory_is_what_was_added():
    memory = PeakMemory(CPU)
    held = torch.ones(64 * 2**20, dtype=torch.uint8)
    first = memory.mib()
    del held
    second = memory.mib()
    if first is None:
        pytest.skip("this system does not tell")
    assert 60 < first < 200
    # The peak starts again from what is there.
    assert second is not None


def test_a_record_of_a_run_is_plain_json(work, tmp_path, quick):
    run(work, [stock], [1], out=tmp_path, repeats=1, command="rocm-sd bench x")
    values = json.loads(record_file(tmp_path, work.name).read_text())
    assert values["command"] == "rocm-sd bench x"
    assert values["extra"]["planned"]["engines"] == {"stock": stock.version()}
    assert Measurement(**values["measurements"][0])


def test_the_gate_has_a_reference_finer_than_the_workload(work):
    gate = PictureGate(work, 1)
    assert 0 < gate.stock_error < 1e-4
    assert gate.check(work.pipeline()).wrong is None
