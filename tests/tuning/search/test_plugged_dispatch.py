"""Ops run what another package brings, where it was measured as the fastest; a package at fault stops nothing."""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from misbehaving import CANDIDATES

from rocm_sd import workers
from rocm_sd.cli import main
from rocm_sd.errors import InvalidOption, Unsupported
from rocm_sd.ops import OPS, attention, geglu, group_norm_silu, plugins, registry, self_test
from rocm_sd.tuning.database import Database, Entry
from rocm_sd.tuning.environment import current
from rocm_sd.tuning.resolve import user_database
from rocm_sd.tuning.search.candidates import Candidate, plug_ins
from rocm_sd.tuning.search.tuner import Tuner, TunerOptions

CPU = torch.device("cpu")
POINTS = {"rocm_sd.candidates": {"mine": "tuner_plugin:candidates"}}
# Implementations that note their calls; unless asked otherwise, they are stock by another name.
SOURCE = """
    import torch
    import torch.nn.functional as F
    from rocm_sd.ops import OPS
    from rocm_sd.ops.plugins import Extra
    from rocm_sd.ops.registry import Implementation

    calls, kept = [], []

    def of(op, name="mine", run=None, why_not=lambda problem, device: None, configs=({},), version="1"):
        def noted(*arguments, config):
            calls.append((op, tuple(arguments[0].shape), dict(config)))
            return run(*arguments, config=config) if run else OPS[op].implementations[0](*arguments)

        return Extra(op, Implementation(name, noted, why_not), lambda problem, arch: configs, version)

    def keeps(x, bias, *, config):
        if not kept or kept[0] is not x or kept[1] is not bias:
            kept[:] = x, bias, OPS["geglu"].implementations[0](x, bias)
        return kept[2].clone()

    def greedy(x, bias, *, config):
        if kept:
            raise MemoryError
        return OPS["geglu"].implementations[0](x, bias)

    def stumbles(problem, device):
        raise KeyError("no such size")

    def viewed(x, bias, *, config):
        return OPS["geglu"].implementations[0](x.view(-1, x.shape[-1]), bias).view(*x.shape[:-1], -1)

    def turned(x, bias, *, config):
        return OPS["geglu"].implementations[0](x, bias).t().contiguous().t()
"""


@pytest.fixture(autouse=True)
def card(tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ROCM_SD_IMPLEMENTATION", raising=False)
    # The commands look for a GPU; all that is measured here is a CPU's.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # Calls are counted, so what is tested at first use is tested in place (test_self_test_worker.py has the worker).
    monkeypatch.setattr(workers, "_inside", True)
    new_process()
    yield
    new_process()


def new_process() -> None:
    registry._say_once.cache_clear()
    registry.forget_choices()
    self_test.forget()


@pytest.fixture
def plugged(installed):
    """plugged(expression): the package has the candidates of this list, and nothing is known of it yet."""

    def bring(expression: str, source: str = SOURCE) -> None:
        installed(source + f"\n    def candidates():\n        return {expression}\n", POINTS)
        new_process()

    return bring


def calls() -> list[tuple[str, tuple[int, ...], dict[str, int]]]:
    return sys.modules["tuner_plugin"].calls if "tuner_plugin" in sys.modules else []


def measured(op: str, arguments: tuple, name: str = "mine", median: float = 5.0, **named) -> Entry:
    given = {
        "kernel_hash": "1", "config": {}, "low_us": median, "high_us": median, "stock_us": 20.0, "numerics": "ok",
        "when": "2026-05-04",
    }  # fmt: skip
    problem = OPS[op].verification.problem(*arguments)
    entry = Entry(
        op=op, problem=problem, environment=current(CPU), candidate=name, median_us=median, **{**given, **named}
    )
    user_database().put([entry])
    registry.forget_choices()
    return entry


def chosen(op: str, arguments: tuple) -> registry.Choice:
    return OPS[op].choose(OPS[op].verification.problem(*arguments), CPU)


def halves(rows: int = 6, columns: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 2 * columns), torch.randn(2 * columns)


def test_what_a_tuner_finds_fastest_is_what_the_op_runs(plugged, geglu_call):
    plugged("[of('geglu', 'keeps', keeps)]")
    traced = geglu_call(1024, 512)
    (outcome,) = Tuner(CPU, user_database(), TunerOptions(30)).run([traced])
    assert outcome.chosen == Candidate("keeps")
    plugged("[of('geglu', 'keeps', keeps)]")
    x, bias = halves(1024, 512)
    y = geglu(x, bias)
    assert torch.equal(y, OPS["geglu"].implementation("torch")(x, bias))
    found = chosen("geglu", (x, bias))
    assert (found.implementation, found.config.to_dict(), found.source) == ("keeps", {}, "measured here")
    # Two calls of the test at first use, and this one; further ones are the op's alone.
    assert [shape for _, shape, _ in calls()][-1] == (1024, 1024)
    assert len(calls()) == 3
    geglu(x, bias)
    assert len(calls()) == 4
    # It passed for good: another process does not test again.
    plugged("[of('geglu', 'keeps', keeps)]")
    geglu(x, bias)
    assert len(calls()) == 1


def test_it_runs_with_the_config_that_was_measured_and_no_other_problem_has_it(plugged):
    plugged("[of('group_norm_silu', configs=({'rows': 1}, {'rows': 2}))]")
    x = torch.randn(2, 8, 4, 4)
    measured("group_norm_silu", (x, 4), config={"rows": 2})
    expected = OPS["group_norm_silu"].implementation("torch")(x, 4, None, None, None, 1e-5, True)
    assert torch.equal(group_norm_silu(x, 4), expected)
    assert calls()[-1] == ("group_norm_silu", (2, 8, 4, 4), {"rows": 2})
    # The test at first use is of other sizes, which have the first config of the space.
    assert all(config == {"rows": 1} for _, _, config in calls()[:-1])
    count = len(calls())
    group_norm_silu(torch.randn(2, 8, 4, 5), 4)
    assert len(calls()) == count


def test_a_call_with_gradients_runs_it_and_goes_back_by_the_ops_own_way(plugged):
    plugged("[of('geglu')]")
    x, bias = halves()
    measured("geglu", (x, bias))
    x.requires_grad_()
    bias.requires_grad_()
    geglu(x, bias).square().sum().backward()
    assert calls()[-1] == ("geglu", (6, 16), {})
    again, offset = (t.detach().double().requires_grad_() for t in (x, bias))
    OPS["geglu"].verification.reference(again, offset).square().sum().backward()
    torch.testing.assert_close(x.grad.double(), again.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(bias.grad.double(), offset.grad, rtol=1e-4, atol=1e-4)


def test_by_name_it_is_found_and_among_the_names(plugged, monkeypatch):
    plugged("[of('geglu', configs=({'rows': 3}, {'rows': 4})), of('attention', 'other', why_not=stumbles)]")
    x, bias = halves()
    expected = OPS["geglu"].implementation("torch")(x, bias)
    assert torch.equal(geglu(x, bias, implementation="mine"), expected)
    # By name nothing is tested, and where nothing was measured the first config of its space is taken.
    assert calls() == [("geglu", (6, 16), {"rows": 3})]
    measured("geglu", (x, bias), config={"rows": 4})
    monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", "geglu=mine")
    geglu(x, bias)
    assert calls()[-1] == ("geglu", (6, 16), {"rows": 4})
    with pytest.raises(InvalidOption, match=r"Use one of: torch, triton, mine"):
        geglu(x, bias, implementation="mime")
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(Unsupported, match="raised KeyError"):
        attention(q, q, q, implementation="other")


FAULTS = {
    "gone": (None, "mine was faster than stock torch here, and no package that is installed has it"),
    "broken": ("1 / 0", "the plug-in mine is skipped: ZeroDivisionError"),
    "stumbles": ("[of('attention', why_not=stumbles)]", "not used: its why_not or its space raised KeyError"),
    "refuses": ("[of('attention', why_not=lambda problem, device: 'a Monday')]", "and is not used: a Monday"),
    "changed": ("[of('attention', version='2')]", "mine was measured in another version than is installed"),
    "no config": ("[of('attention', configs=())]", "and is not used: it has no config for this problem"),
}


@pytest.mark.parametrize("next_best", [False, True], ids=["stock", "the next best"])
@pytest.mark.parametrize("fault", FAULTS)
def test_one_that_cannot_be_had_costs_a_sentence(plugged, tmp_path, caplog, fault, next_best):
    expression, sentence = FAULTS[fault]
    plugged(expression or "[]")
    if fault == "gone":
        shutil.rmtree(tmp_path / "site" / "tuner_plugin-1.0.dist-info")
        plugins.installed.cache_clear()
    given = [(torch.randn(1, tokens, 2, 8),) * 2 for tokens in (4, 5, 6)]
    for arguments in given:
        measured("attention", arguments)
        if next_best:
            measured("attention", arguments, "sdpa_math", 10.0, kernel_hash="")
    with caplog.at_level(logging.WARNING, "rocm_sd"):
        for q, k in given:
            found = chosen("attention", (q, k))
            assert found.implementation == ("sdpa_math" if next_best else "torch")
            assert attention(q, k, k).shape == q.shape
    assert calls() == []
    assert len(caplog.records) == 1
    assert sentence in caplog.text


def test_a_slow_one_that_is_gone_is_nothing_to_tell(caplog):
    arguments = halves()
    measured("geglu", arguments, high_us=25.0)
    measured("geglu", arguments, "wrong", numerics="wrong: nan")
    assert chosen("geglu", arguments).implementation == "torch"
    assert not caplog.records


def test_a_measurement_counts_for_its_own_version_alone(plugged, caplog):
    plugged("[of('geglu', version='2'), of('geglu', 'other', version='1'), of('geglu', 'third', version='3')]")
    arguments = halves()
    for version in ("", "1"):  # what has no kernel of its own, and what another package has now
        measured("geglu", arguments, "mine", 1.0, kernel_hash=version)
    measured("geglu", arguments, "other", 9.0, kernel_hash="1")
    measured("geglu", arguments, "third", 8.0, kernel_hash="3", stock_us=8.0)
    assert chosen("geglu", arguments).implementation == "other"
    assert "mine was measured in another version" in caplog.text
    # Measured now, and slower: there is nothing to tell any more.
    measured("geglu", arguments, "mine", 30.0, kernel_hash="2")
    caplog.clear()
    new_process()
    assert chosen("geglu", arguments).implementation == "other"
    assert not caplog.records


def test_what_the_op_has_itself_is_chosen_where_it_is_faster(plugged):
    plugged("[of('attention')]")
    q = torch.randn(1, 4, 2, 8)
    measured("attention", (q, q))
    measured("attention", (q, q), "sdpa_math", 4.0, kernel_hash="")
    assert chosen("attention", (q, q)).implementation == "sdpa_math"
    assert calls() == []


def test_a_wrong_one_is_set_aside_at_its_first_use_and_info_says_so(plugged, caplog, capsys, monkeypatch):
    # As fast as can be, and right at the call that it was measured at: it gives the same answer always.
    source = "[of('remembers', remembers)]"
    plugged(source, CANDIDATES)
    op = OPS["geglu"]
    typical = op.tuning.buckets[0].sample.make()
    measured("geglu", typical, "remembers")
    with caplog.at_level(logging.WARNING, "rocm_sd"):
        for _ in range(2):
            assert chosen("geglu", typical).implementation == "torch"
    assert len(caplog.records) == 1
    assert "remembers is set aside" in caplog.text
    (kept,) = user_database().quarantined()
    assert (kept.op, kept.candidate, kept.kernel_hash) == ("geglu", "remembers", "1")
    monkeypatch.setenv("COLUMNS", "200")
    assert "geglu never runs as remembers here" in rocm_sd(capsys, "info")
    listed = json.loads(rocm_sd(capsys, "tune", "--list", "--json", "--device", "cpu"))
    assert [row["chosen"] for row in listed] == ["torch"]
    # Another process knows it from the database.
    plugged(source, CANDIDATES)
    assert chosen("geglu", typical).implementation == "torch"
    assert sys.modules["tuner_plugin"].kept == {}


def test_the_next_best_runs_where_one_is_set_aside(plugged):
    plugged("[of('attention')]")
    q = torch.randn(1, 4, 2, 8)
    for version in ("1", "2"):
        measured("attention", (q, q), kernel_hash=version)
    measured("attention", (q, q), "sdpa_math", 10.0, kernel_hash="")
    user_database().quarantine("attention", "mine", current(CPU), "1", "NaN")
    assert chosen("attention", (q, q)).implementation == "sdpa_math"
    user_database().release("attention", "mine")
    new_process()
    assert chosen("attention", (q, q)).implementation == "mine"


def test_another_layout_than_stocks_is_wrong(plugged, caplog):
    plugged("[of('geglu', run=turned)]")
    arguments = halves()
    measured("geglu", arguments)
    assert chosen("geglu", arguments).implementation == "torch"
    assert "strides" in caplog.text


def test_one_that_raises_in_a_picture_gives_way_to_stock(plugged, caplog):
    plugged("[of('geglu', run=viewed)]")
    x, bias = halves()
    measured("geglu", (x, bias))
    assert chosen("geglu", (x, bias)).implementation == "mine"
    strided = torch.empty(3, 2, 16).transpose(0, 1).copy_(x.view(2, 3, 16))
    with caplog.at_level(logging.WARNING, "rocm_sd"):
        for _ in range(2):
            torch.testing.assert_close(geglu(strided, bias).view(6, 8), geglu(x, bias))
    assert len(caplog.records) == 1
    assert "geglu: stock torch on cpu, because mine raised RuntimeError: view size" in caplog.text
    with pytest.raises(RuntimeError, match="view size"):
        geglu(strided, bias, implementation="mine")


def test_too_little_memory_is_raised_to_whoever_can_ask_for_less(plugged):
    plugged("[of('geglu', run=greedy)]")
    x, bias = halves()
    measured("geglu", (x, bias))
    assert chosen("geglu", (x, bias)).implementation == "mine"
    sys.modules["tuner_plugin"].kept.append("all memory")
    with pytest.raises(MemoryError):
        geglu(x, bias)


def test_the_example_of_the_documents_passes_its_test_though_it_takes_large_calls_alone(installed):
    page = (Path(__file__).parents[3] / "docs" / "plug-ins.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    installed(source, POINTS)
    arguments = halves(300, 8)
    measured("geglu", arguments, "in_pieces", config={"rows": 256})
    found = chosen("geglu", arguments)
    assert (found.implementation, found.config.to_dict()) == ("in_pieces", {"rows": 256})
    assert torch.equal(geglu(*arguments), OPS["geglu"].implementation("torch")(*arguments))


def test_what_is_no_implementation_is_skipped(plugged, caplog):
    plugged("[Extra('geglu', None), of('geglu')]")
    assert [extra.implementation.name for extra in plugins.of_op("geglu")] == ["mine"]
    assert "it has a NoneType" in caplog.text


def test_a_problem_is_asked_for_once_and_where_nothing_is_named_nobody_looks_for_packages(tmp_path, monkeypatch):
    asked = []
    by_others = Database.by_others
    monkeypatch.setattr(Database, "by_others", lambda *given: asked.append(given) or by_others(*given))
    x, bias = halves()
    measured("geglu", (x, bias), "torch", 20.0, kernel_hash="")
    for _ in range(3):
        geglu(x, bias)
    assert len(asked) == 1
    # In a process of its own, since this one has looked.
    code = (
        "import importlib.metadata as m; asked = []; real = m.entry_points\n"
        "m.entry_points = lambda **named: asked.append(named.get('group')) or real(**named)\n"
        "import torch, rocm_sd, rocm_sd_ops, rocm_sd.ops as ops\n"
        "ops.geglu(torch.zeros(6, 16), torch.zeros(16))\n"
        "assert ops.registry.resolve.has_database() and 'rocm_sd.candidates' not in asked, asked\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_info_list_and_tune_name_it(plugged, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    plugged("[of('geglu'), of('memory_format', 'odd')]")
    typical = OPS["geglu"].tuning.buckets[0].sample.make(filled=False)
    measured("geglu", typical)
    facts = json.loads(rocm_sd(capsys, "info", "--json"))
    (op,) = (op for op in facts["ops"] if op["name"] == "geglu")
    (mine,) = (each for each in op["implementations"] if each["plug_in"])
    assert (mine["name"], mine["chosen_here"], op["source"]) == ("mine", True, "measured here")
    assert "mine (plug-in)" in rocm_sd(capsys, "info")
    (row,) = json.loads(rocm_sd(capsys, "tune", "--list", "--json", "--device", "cpu"))
    assert (row["chosen"], row["us"]) == ("mine", 5.0)
    plugged("[of('geglu', version='2'), of('memory_format', 'odd')]")
    (row,) = json.loads(rocm_sd(capsys, "tune", "--list", "--json", "--device", "cpu"))
    assert (row["chosen"], row["us"]) == ("torch", 20.0)

    from rich.console import Console

    from rocm_sd.cli.tune_tables import show_outcomes
    from rocm_sd.tuning.search.tuner import TuningResult

    assert {each.op for each in plug_ins()} == {"geglu", "memory_format"}
    outcomes = [
        TuningResult(op, {}, 1, Candidate(name), 5.0, 10.0, 2, 2, 2, True, ())
        for op, name in (("geglu", "mine"), ("memory_format", "odd"))
    ]
    show_outcomes(Console(width=200), outcomes, 1.0, on_cpu=False)
    shown = capsys.readouterr().out
    assert "geglu mine: of a plug-in. Pictures use it after a test of its own" in shown
    assert "memory_format odd: of a plug-in. It is stored and listed" in shown


def rocm_sd(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main.run(list(arguments))
    assert not ended.value.code
    return capsys.readouterr().out
