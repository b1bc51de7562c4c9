"""On a CPU no op is tested by itself; here the CPU stands for a card, and implementations are wrong in one way each."""

from __future__ import annotations

import logging
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from rocm_sd import arch, workers
from rocm_sd.engine.capture import warmup
from rocm_sd.kernels import hip
from rocm_sd.kernels import triton as triton_kernels
from rocm_sd.kernels.config import Config
from rocm_sd.ops import registry, self_test, trials
from rocm_sd.ops.definition import Implementation, Verification
from rocm_sd.ops.registry import OPS, Op
from rocm_sd.ops.samples import Sample
from rocm_sd.tuning import choice, resolve
from rocm_sd.tuning.database import Entry
from rocm_sd.tuning.environment import current
from rocm_sd.tuning.resolve import user_database

CPU = torch.device("cpu")
PROBLEM = {"n": 4, "dtype": "float16"}
MILLION = 10**6


def _definition(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def _stock(x: torch.Tensor) -> torch.Tensor:
    return _definition(x)


def _sample(elements: int, dtype: torch.dtype = torch.float16) -> Sample:
    return Sample(f"{elements} elements", dtype, lambda draw: (draw(elements),))


def make_op(run, name: str = "silu") -> Op:
    calls = []

    def counted(x):
        calls.append((x.numel(), x.dtype))
        return run(x)

    op = Op(
        name,
        "x * sigmoid(x)",
        (
            Implementation("torch", _stock, lambda _problem, _device: None),
            Implementation("fast", counted, lambda _problem, _device: None),
        ),
        verification=Verification(
            implementation="fast",
            kernels="rocm_sd.kernels.triton.geglu",
            reference=_definition,
            problem=lambda x: {"n": x.numel(), "dtype": str(x.dtype).removeprefix("torch.")},
            small=(_sample(7), _sample(1000), _sample(5, torch.bfloat16)),
            real=(_sample(5 * MILLION), _sample(2 * MILLION), _sample(20)),
            promises={},
        ),
    )
    object.__setattr__(op, "calls", calls)
    return op


@pytest.fixture(autouse=True)
def card(tmp_path, monkeypatch):
    """A CPU whose data prefer `fast`, and on which self-tests are run."""
    table = {"static": {"implementation": "fast", "why": "shipped"}}
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path))
    monkeypatch.setattr(choice, "_table", lambda op, _arch: table if op == "silu" else None)
    monkeypatch.setattr(registry, "SELF_TESTED", frozenset({"cpu"}))
    # A worker finds ops by name, and these have none: they are tested in place, as inside a worker.
    monkeypatch.setattr(workers, "_inside", True)
    registry._say_once.cache_clear()
    registry.forget_choices()
    self_test.forget()
    yield
    registry.forget_choices()
    self_test.forget()


def new_process() -> None:
    """What another process would begin with: the database alone."""
    self_test.forget()
    registry._say_once.cache_clear()
    registry.forget_choices()


def test_a_right_one_is_tested_once_and_then_remembered():
    op = make_op(_definition)
    assert op.choose(PROBLEM, CPU).implementation == "fast"
    # One small call, the larger of its dtype, and one real call, the cheapest with a million elements.
    assert op.calls == [(1000, torch.float16), (2 * MILLION, torch.float16)]
    assert op.choose({**PROBLEM, "n": 5}, CPU).implementation == "fast"
    new_process()
    again = make_op(_definition)
    assert again.choose(PROBLEM, CPU).implementation == "fast"
    assert again.calls == []
    # Another dtype is other code: it is tested for itself, also at a size that is only listed in another.
    assert again.choose({**PROBLEM, "dtype": "bfloat16"}, CPU).implementation == "fast"
    assert again.calls == [(5, torch.bfloat16), (2 * MILLION, torch.bfloat16)]


def _nan(x):
    return torch.full_like(x, float("nan"))


def _one_nan(x):
    y = _definition(x)
    y.view(-1)[x.numel() // 2] = float("nan")
    return y


def _one_in_a_million(x):
    y = _definition(x)
    if y.numel() >= MILLION:
        y.view(-1)[MILLION - 1 :: MILLION] += 0.1
    return y


def _slightly_wrong_everywhere(x):
    return _definition(x) * 1.02


def _another_shape(x):
    return _definition(x)[:-1]


def _another_dtype(x):
    return _definition(x).float()


def _raises(_x):
    raise RuntimeError("HIP error: invalid device function\nCompile with TORCH_USE_HIP_DSA")


WRONG = {
    _nan: "largest error nan",
    _one_nan: "largest error nan",
    _one_in_a_million: "the worst of 2000000 elements",
    _slightly_wrong_everywhere: "largest error",
    _another_shape: "different shapes",
    _another_dtype: "torch.float32 and not torch.float16",
    _raises: "RuntimeError: HIP error: invalid device function",
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_a_wrong_one_is_set_aside_stock_runs_instead_and_it_is_said_once(wrong, caplog):
    op = make_op(wrong)
    with caplog.at_level(logging.WARNING, "rocm_sd"):
        for n in range(3):
            found = op.choose({**PROBLEM, "n": n}, CPU)
            assert found.implementation == "torch"
            assert WRONG[wrong] in found.why
    assert len(caplog.records) == 1
    assert WRONG[wrong] in caplog.text
    x = torch.randn(10).half()
    assert torch.equal(op.run(PROBLEM, CPU, None, x), _definition(x))
    (kept,) = resolve.user_database().quarantined(current(CPU))
    assert (kept.op, kept.candidate, kept.kernel_hash) == ("silu", "fast", op.kernel_hash("fast"))
    assert WRONG[wrong] in kept.reason
    new_process()
    again = make_op(wrong)
    assert again.choose(PROBLEM, CPU).implementation == "torch"
    assert again.calls == []
    # Asked for by name it runs: never silently replaced.
    assert again.choose(PROBLEM, CPU, "fast").implementation == "fast"


def test_a_measured_candidate_is_tested_too_since_its_measurement_may_have_been_imported():
    op = make_op(_nan)
    measured = Entry(
        "silu", PROBLEM, current(CPU), op.kernel_hash("fast"), "fast", {}, 1.0, 1.0, 1.0, 2.0, "ok", "2026-05-04"
    )
    resolve.user_database().put([measured])
    registry.forget_choices()
    assert "largest error nan" in op.choose(PROBLEM, CPU).why
    repaired = make_op(_definition)
    resolve.user_database().release("silu", "fast")
    new_process()
    assert repaired.choose(PROBLEM, CPU).source == "measured here"


def test_another_environment_is_tested_anew(monkeypatch):
    op = make_op(_nan)
    assert op.choose(PROBLEM, CPU).implementation == "torch"
    new_process()
    repaired = make_op(_definition)
    other = current(CPU).__class__(**{**vars(current(CPU)), "torch": "99"})
    monkeypatch.setattr(self_test, "current", lambda _device: other)
    assert repaired.choose(PROBLEM, CPU).implementation == "fast"


class Recording(TorchDispatchMode):
    def __torch_dispatch__(self, function, _types, arguments=(), named=None):
        return function(*arguments, **(named or {}))


def test_nothing_is_tested_while_calls_are_recorded_and_it_is_made_up_for_later(caplog):
    op = make_op(_definition)
    with Recording(), caplog.at_level(logging.WARNING, "rocm_sd"):
        assert op.choose(PROBLEM, CPU).implementation == "torch"
    assert op.calls == []
    assert caplog.records == []
    assert op.choose(PROBLEM, CPU).implementation == "fast"
    assert len(op.calls) == 2


def test_what_other_threads_have_recorded_keeps_nothing_from_its_test(monkeypatch):
    """Torch's flag is left set where one thread leaves its mode after another that entered before it."""
    monkeypatch.setattr(_python_dispatch, "_is_in_torch_dispatch_mode", True)
    assert make_op(_definition).choose(PROBLEM, CPU).implementation == "fast"


def test_where_launches_are_only_noted_it_is_used_and_tested_later(monkeypatch):
    skipped = []
    op = make_op(lambda x: _definition(x) if not skipped else torch.full_like(x, float("nan")))
    monkeypatch.setattr(triton_kernels, "skips_launches", lambda: bool(skipped))
    skipped.append(1)
    for _ in range(2):
        # Garbage, which must not be taken for a fault.
        assert op.choose(PROBLEM, CPU).implementation == "fast"
    # What the test will launch is launched once, so that it is compiled with the rest.
    assert op.calls == [(1000, torch.float16), (2 * MILLION, torch.float16)]
    assert user_database().quarantined() == ()
    skipped.clear()
    op.calls.clear()
    assert op.choose(PROBLEM, CPU).implementation == "fast"
    assert len(op.calls) == 2
    op.calls.clear()
    assert op.choose(PROBLEM, CPU).implementation == "fast"
    assert op.calls == []


def test_the_launches_of_a_test_can_be_noted_before_the_op_is_asked_for(monkeypatch):
    op = make_op(_definition)
    with monkeypatch.context() as patch:
        patch.setattr(triton_kernels, "skips_launches", lambda: True)
        for _ in range(2):
            self_test.note(op, "float16", CPU)
    assert op.calls == [(1000, torch.float16), (2 * MILLION, torch.float16)]
    assert op.choose(PROBLEM, CPU).implementation == "fast"
    assert len(op.calls) == 4
    # What has passed, in this process or in another before it, is not launched again.
    self_test.forget()
    self_test.note(op, "float16", CPU)
    assert len(op.calls) == 4


def test_one_that_was_only_noted_is_still_found_to_be_wrong(monkeypatch):
    op = make_op(_nan)
    with monkeypatch.context() as patch:
        patch.setattr(triton_kernels, "skips_launches", lambda: True)
        assert op.choose(PROBLEM, CPU).implementation == "fast"
    assert op.choose(PROBLEM, CPU).implementation == "torch"


def test_what_was_only_noted_can_be_tested_before_it_is_used_for_real(monkeypatch):
    op, unused = make_op(_definition), make_op(_definition, "not_asked_for")
    with monkeypatch.context() as patch:
        patch.setattr(triton_kernels, "skips_launches", lambda: True)
        op.choose(PROBLEM, CPU)
        self_test.note(unused, "float16", CPU)
        op.calls.clear()
        unused.calls.clear()
        # Still inside: nothing can be tested, and nothing is forgotten.
        self_test.catch_up()
        assert op.calls == []
    self_test.catch_up()
    assert op.calls == [(1000, torch.float16), (2 * MILLION, torch.float16)]
    # What no model has asked for is not run: it might not even come back.
    assert unused.calls == []
    self_test.catch_up()
    assert op.choose(PROBLEM, CPU).implementation == "fast"
    assert len(op.calls) == 2


def test_a_wrong_one_that_was_noted_is_set_aside_before_it_is_used(monkeypatch):
    op = make_op(_nan)
    with monkeypatch.context() as patch:
        patch.setattr(triton_kernels, "skips_launches", lambda: True)
        op.choose(PROBLEM, CPU)
    self_test.catch_up()
    assert [each.candidate for each in user_database().quarantined()] == ["fast"]
    assert op.choose(PROBLEM, CPU).implementation == "torch"


def test_kernels_compiled_ahead_are_tested_before_the_model_needs_its_memory(monkeypatch):
    precompile = pytest.importorskip("rocm_sd.kernels.triton.precompile")
    op, order = make_op(_definition), []
    monkeypatch.setattr(warmup, "_compiles", lambda _device: True)
    monkeypatch.setattr(precompile, "start", lambda: None)
    # Of all ops of the project, which the interpreter takes minutes for.
    monkeypatch.setattr(warmup, "note_self_tests", lambda *_: None)

    def passed():
        return user_database().has_passed("silu", "fast", current(CPU), op.kernel_hash("fast"), "float16")

    def run():
        order.append("noted")
        assert op.choose(PROBLEM, CPU).implementation == "fast"
        assert not passed()

    with monkeypatch.context() as patch:
        patch.setattr(precompile, "_cores", lambda: 2)
        warmup.compile_kernels(run, CPU, torch.float16)
    assert order == ["noted"]
    assert passed()


def test_a_worker_notes_no_tests_of_ops_that_it_will_not_run(monkeypatch):
    precompile = pytest.importorskip("rocm_sd.kernels.triton.precompile")
    noted = []
    monkeypatch.setattr(warmup, "_compiles", lambda _device: True)
    monkeypatch.setattr(precompile, "start", lambda: None)
    monkeypatch.setattr(warmup, "note_self_tests", lambda dtype, _device: noted.append(dtype))
    monkeypatch.setattr(workers, "_inside", False)
    warmup.compile_kernels(lambda: None, CPU, torch.float16)
    assert noted == ["float16"]
    monkeypatch.setattr(workers, "_inside", True)
    warmup.compile_kernels(lambda: None, CPU, torch.float16)
    assert noted == ["float16"]


def test_a_test_within_a_worker_is_run_though_launches_are_only_noted(monkeypatch):
    """What is made of other ops is not noted itself: with their launches left out it would be found to be wrong."""
    op, launched = make_op(_definition), []
    monkeypatch.setattr(workers, "_inside", True)
    monkeypatch.setattr(self_test.triton_kernels, "skips_launches", lambda: not launched)
    monkeypatch.setattr(self_test.trials, "is_noted", lambda *_: False)

    @contextmanager
    def launching():
        launched.append("begun")
        yield
        launched.append("ended")

    monkeypatch.setattr(self_test.triton_kernels, "launching", launching)
    judge = self_test.trials.judge
    monkeypatch.setattr(self_test.trials, "judge", lambda *given: launched.append("judged") or judge(*given))
    assert self_test.verdict(op, "fast", PROBLEM, CPU).state == "passed"
    assert launched == ["begun", "judged", "ended"]


def test_nothing_is_tested_while_a_call_is_traced():
    def call(x):
        return x + (2 if self_test._why_not_now(CPU) else 1)

    assert call(torch.zeros(1)) == 1
    assert torch.compile(call, backend="eager")(torch.zeros(1)) == 2


@pytest.mark.parametrize(
    "error", [ImportError("libtriton.so"), PermissionError("~/.triton"), RuntimeError("Failed to find C compiler.")]
)
def test_a_fault_of_the_set_up_holds_for_the_process_alone(error):
    def run(_x):
        raise error

    op = make_op(run)
    assert op.choose(PROBLEM, CPU).implementation == "torch"
    assert op.choose({**PROBLEM, "n": 9}, CPU).implementation == "torch"
    assert len(op.calls) == 1
    assert resolve.user_database().quarantined() == ()
    new_process()
    assert make_op(_definition).choose(PROBLEM, CPU).implementation == "fast"


def test_one_that_takes_no_sample_is_not_trusted():
    op = make_op(_definition)
    picky = Implementation(
        "fast", op.implementations[1].run, lambda problem, _device: "n" if problem["n"] > 4 else None
    )
    op = Op(op.name, op.summary, (op.implementations[0], picky), op.verification)
    assert "none of the calls" in op.choose({"n": 1, "dtype": "float16"}, CPU).why


@dataclass(frozen=True)
class _Block(Config):
    block: int = 4


def _with_variants(run) -> Op:
    """Code of its own for what a block does not divide."""
    op = make_op(_definition)
    calls = op.calls

    def counted(x, *, config):
        calls.append((x.numel(), config.block))
        return run(x, config)

    fast = Implementation(
        "fast",
        counted,
        lambda _problem, _device: None,
        default=_Block(),
        variant=lambda problem, config, _device: "tail" if problem["n"] % config.block else "whole",
    )
    verification = replace(op.verification, similar=lambda problem: [_sample(2**27), _sample(9), _sample(problem["n"])])
    made = Op(op.name, op.summary, (op.implementations[0], fast), verification)
    object.__setattr__(made, "calls", calls)
    return made


def _wrong_in_tails(x, config):
    # The samples of the op are whole: only a call of that variant shows it.
    return _nan(x) if x.numel() % config.block else _definition(x)


def test_each_variant_of_the_code_is_tested_for_itself():
    op = _with_variants(_wrong_in_tails)
    assert op.choose({**PROBLEM, "n": 8}, CPU).implementation == "fast"
    # The op's own samples, then the first call of the variant that is small enough.
    assert [n for n, _ in op.calls] == [1000, 2 * MILLION, 8]
    assert op.choose({**PROBLEM, "n": 16}, CPU).implementation == "fast"
    assert len(op.calls) == 3
    found = op.choose({**PROBLEM, "n": 7}, CPU)
    assert found.implementation == "torch"
    assert "at 9 elements: the worst of 9 elements is nan from stock torch" in found.why
    assert op.calls[3:] == [(9, 4)]
    (kept,) = user_database().quarantined()
    assert kept.candidate == "fast: float16 4 tail"
    new_process()
    again = _with_variants(_wrong_in_tails)
    assert again.choose({**PROBLEM, "n": 8}, CPU).implementation == "fast"
    assert again.choose({**PROBLEM, "n": 7}, CPU).implementation == "torch"
    assert again.calls == []
    assert user_database().release("silu", "fast") == 1
    new_process()
    repaired = _with_variants(lambda x, _config: _definition(x))
    assert repaired.choose({**PROBLEM, "n": 7}, CPU).implementation == "fast"
    assert repaired.calls == [(9, 4)]


def test_what_an_earlier_release_has_tested_counts_for_the_candidate_and_for_no_variant():
    op = _with_variants(lambda x, _config: _definition(x))
    user_database().passed("silu", "fast", current(CPU), op.kernel_hash("fast"), "float16")
    assert op.choose({**PROBLEM, "n": 8}, CPU).implementation == "fast"
    assert op.calls == [(8, 4)]


def test_a_variant_that_was_only_noted_is_tested_later(monkeypatch):
    op = _with_variants(_wrong_in_tails)
    with monkeypatch.context() as patch:
        patch.setattr(triton_kernels, "skips_launches", lambda: True)
        assert op.choose({**PROBLEM, "n": 7}, CPU).implementation == "fast"
        assert op.calls == [(1000, 4), (2 * MILLION, 4), (9, 4)]
    self_test.catch_up()
    assert op.choose({**PROBLEM, "n": 7}, CPU).implementation == "torch"


@pytest.mark.parametrize("name", OPS)
def test_a_variant_of_every_op_is_met_by_a_call_that_is_like_the_problem(name, device):
    op = OPS[name]
    samples = [each.sample for each in op.tuning.buckets] + list(op.tuning.timed)
    for implementation in op.implementations:
        space = implementation.kernels.space if implementation.kernels else op.tuning.space
        architecture = arch.get("gfx1100" if implementation.kernels else "sm_90")
        for sample in samples if implementation.variant else ():
            problem = op.verification.problem(*sample.make(filled=False))
            for config in list(space(problem, architecture))[:2]:
                variant = trials.variant_of(op, implementation.name, problem, config, device)
                trial = trials.Trial(
                    implementation.name, str(problem["dtype"]), device, variant, tuple(problem.items()), config
                )
                with hip.launched_by(None) if implementation.kernels else nullcontext():
                    assert any(trials._is_variant(op, trial, like) for like in op.verification.similar(problem))


def test_neither_autocast_nor_gradients_nor_the_random_numbers_of_the_picture_are_touched():
    op = make_op(_definition)
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert op.choose(PROBLEM, CPU).implementation == "fast"
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.randn(4), expected)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", OPS)
def test_every_op_has_a_sample_for_its_kernel_in_each_dtype(op, dtype, device):
    verification = OPS[op].verification
    # Kernels in HIP say that they run where something launches them.
    somewhere = nullcontext() if verification.kernels else hip.launched_by(None)
    for candidate in verification.proven:
        with somewhere:
            small = trials.sample(OPS[op], candidate, dtype, device, real=False)
            real = trials.sample(OPS[op], candidate, dtype, device, real=True)
        assert str(small.dtype) == str(real.dtype) == f"torch.{dtype}"
        made = [a for a in real.make(filled=False) if isinstance(a, torch.Tensor)]
        assert sum(a.numel() for a in made) <= trials.LARGEST
        # The latents of a picture are never that many.
        assert op == "guided_step" or made[0].numel() >= trials.MANY


@pytest.mark.parametrize("op", ["geglu", "layer_norm_residual", "guided_step", "upsample"])
def test_kernels_of_this_project_pass(op, device):
    trial = trials.Trial("triton", "float16", device)
    # The interpreter takes half a minute for a real sample.
    trials._ready[op, trial] = trials._calls(OPS[op], trial)[:1]
    assert trials.judge(OPS[op], trial).reason is None


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_every_candidate_passes_on_this_card(op, monkeypatch):
    monkeypatch.undo()
    device = torch.device("cuda", torch.cuda.current_device())
    for implementation in OPS[op].implementations[1:]:
        if trials.sample(OPS[op], implementation.name, "float16", device, real=False) is not None:
            trial = trials.Trial(implementation.name, "float16", device)
            assert trials.prepare(OPS[op], trial).reason is None
            assert trials.judge(OPS[op], trial).reason is None


@pytest.mark.gpu
def test_nothing_is_tested_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(registry, "SELF_TESTED", frozenset({"cuda"}))
    device = torch.device("cuda", torch.cuda.current_device())
    op = make_op(_definition)
    x = torch.randn(100, device=device).half()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert op.choose(PROBLEM, device).implementation == "torch"
        _definition(x)
    assert op.calls == []
    assert op.choose(PROBLEM, device).implementation == "fast"


def test_the_ladder_holds_kernels_to_the_same_gate():
    from rocm_sd.verify import ladder

    assert trials.compare is ladder.numerics.compare
    assert trials.in_float64 is ladder.in_float64
