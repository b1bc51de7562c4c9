"""The contract of every op, of whatever is in `OPS`: a new one is held to it by being there.

With a GPU the kernels are compiled for it; without one they run in Triton's interpreter. An implementation is tried on
what it says that it takes. Kernels in HIP are executed by the emulator, in tests/verify/test_hip_ladder.py.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from op_checks import call, changed, check, floats, gate, layout
from rocm_sd.errors import InvalidOption, Unsupported
from rocm_sd.numerics import in_float64, outputs, require
from rocm_sd.ops import OPS

CPU = torch.device("cpu")
DIFFERENTIABLE = [name for name, op in OPS.items() if op.differentiable]


def kernel_of(op):
    """The implementation in Triton; stock where the op has none."""
    return op.verification.implementation if op.verification.kernels else op.implementations[0].name


def takers(op, arguments):
    """The implementations that take this call where its tensors are; the op's kernel, if it is one, comes last."""
    problem = op.verification.problem(*arguments)
    found = [each.name for each in op.implementations if each.why_not(problem, arguments[0].device) is None]
    return sorted(found, key=kernel_of(op).__eq__)


def calls(op, samples, device):
    """(implementation, arguments) of all that takes one of the samples."""
    made = [sample.make(device) for sample in samples]
    found = [(name, arguments) for arguments in made for name in takers(op, arguments)]
    assert {op.implementations[0].name, kernel_of(op)} <= {name for name, _ in found}
    return found


def first_calls(op, device):
    """With the first small sample, and with that of each implementation that has samples of its own."""
    return calls(op, [op.verification.small[0], *(each.small[0] for each in op.verification.also)], device)


def for_kernel(op, sample, device):
    """The sample in float32, or in half precision where the kernel takes nothing wider."""
    wide, half = (replace(sample, dtype=dtype).make(device) for dtype in (torch.float32, torch.float16))
    return wide if kernel_of(op) in takers(op, wide) else half


def wanting(op, arguments):
    """The arguments, of which every floating tensor wants a gradient, where there is one."""
    if not op.differentiable:
        return arguments
    places = floats(op, arguments)
    return changed(arguments, places, [arguments[place].detach().clone().requires_grad_() for place in places])


def at_once(op, arguments):
    return op.at_once(*arguments, *[None] * (len(op.signature.arguments) - len(arguments)))


def reaches_torch(op, arguments):
    """An operator of torch returns nothing that it was given, and has no arguments that are for eager calls alone."""
    given = [value for value in arguments if isinstance(value, torch.Tensor)]
    returned = outputs(call(op, arguments))
    alone = any(value is not None for value in arguments[len(op.signature.dispatched) :])
    return not alone and not any(result is value for result in returned for value in given)


# Numbers.


@pytest.mark.parametrize("op", OPS)
@pytest.mark.usefixtures("poison_memory")
def test_as_near_to_float64_as_stock(op, device):
    op = OPS[op]
    first = [replace(op.verification.small[0], dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    for name, arguments in calls(op, [*first, *(sample for _, sample in op.verification.calls())], device):
        check(op, arguments, name)


@pytest.mark.parametrize("op", OPS)
def test_every_kernel_takes_half_precision(op, device):
    op = OPS[op]
    for implementation, sample in op.verification.calls() if op.verification.kernels else ():
        for dtype in (torch.float16, torch.bfloat16):
            assert implementation in takers(op, replace(sample, dtype=dtype).make(device))


def every_other(t):
    dim = min(1, t.dim() - 1)
    doubled = torch.stack([t, t], dim + 1).flatten(dim, dim + 1)
    return doubled[(*[slice(None)] * dim, slice(None, None, 2))]


def turned_round(t):
    axes = tuple(reversed(range(t.dim())))
    return t.permute(axes).contiguous().permute(axes)


def swapped(t):
    """Of [batch, sequence, heads, columns], heads before the sequence."""
    axes = (1, 2) if t.dim() > 2 else (0, t.dim() - 1)
    return t.transpose(*axes).contiguous().transpose(*axes)


STRIDES = {
    "contiguous": torch.Tensor.contiguous,
    "columns_apart": lambda t: torch.stack([t, t], dim=-1)[..., 0],
    "every_other": every_other,
    "inside_a_larger_one": lambda t: F.pad(t, (1, 2))[..., 1:-2],
    "swapped": swapped,
    "turned_round": turned_round,
    "expanded": lambda t: t[:1].expand(t.shape),
}


@pytest.mark.parametrize("kind", STRIDES)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.usefixtures("poison_memory")
def test_inputs_of_any_strides(op, kind, device):
    op = OPS[op]
    for name, arguments in first_calls(op, device):
        strided = [STRIDES[kind](a) if isinstance(a, torch.Tensor) and a.dim() else a for a in arguments]
        for place, argument in enumerate(op.signature.arguments):
            if argument.name in op.derived and strided[place] is not None:
                strided[place] = STRIDES[kind](op.derived[argument.name](*strided)) if kind != "expanded" else None
        check(op, tuple(strided), name)


@pytest.mark.parametrize("op", OPS)
def test_parts_of_another_dtype_are_taken_or_refused_in_a_sentence(op, device):
    op = OPS[op]
    for name, arguments in first_calls(op, device):
        for place in floats(op, arguments)[1:]:
            mixed = changed(arguments, [place], [arguments[place].float()])
            part = op.signature.arguments[place].name
            try:
                result = call(op, mixed, name)
            except Unsupported as refusal:
                assert f"of torch.float16 with {part} of torch.float32" in str(refusal)  # noqa: PT017 -- or is taken
            else:
                gate(op, mixed, result, name)


@pytest.mark.parametrize("op", OPS)
def test_nothing_to_compute_is_an_empty_result(op, device):
    op = OPS[op]
    assert op.verification.empty
    for sample in op.verification.empty:
        arguments = sample.make(device)
        expected = outputs(op.implementations[0](*arguments))
        for name in takers(op, arguments):
            results = outputs(call(op, arguments, name))
            assert [y.shape for y in results] == [y.shape for y in expected]
            assert [y.numel() for y in results] == [0] * len(results)


@pytest.mark.parametrize("op", OPS)
def test_the_same_input_gives_the_same_bits_and_stays_as_it_was(op, device):
    op = OPS[op]
    for name, arguments in calls(op, [op.verification.small[0], op.verification.small[-1]], device):
        before = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
        first, second = (outputs(call(op, arguments, name)) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        tensors = [(a, b) for a, b in zip(arguments, before, strict=True) if isinstance(a, torch.Tensor)]
        assert all(torch.equal(a, b) for a, b in tensors)


# torch.


@pytest.mark.parametrize("op", OPS)
def test_called_directly_and_through_torchs_dispatcher_the_bits_are_the_same(op, device):
    op = OPS[op]
    through_torch = getattr(torch.ops.rocm_sd, op.name)
    for name, arguments in first_calls(op, device):
        assert at_once(op, arguments)
        direct = outputs(call(op, arguments, name))
        dispatched = outputs(through_torch(*op.signature.spread(arguments), name))
        for a, b in zip(direct, dispatched, strict=True):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_gradients_and_traced_tensors_go_through_the_dispatcher(op):
    op = OPS[op]
    sample = op.verification.tiny[0]
    plain = sample.make()
    assert at_once(op, plain)
    for place in floats(op, plain):
        wanted = changed(plain, [place], [plain[place].detach().clone().requires_grad_()])
        assert not at_once(op, wanted)
        with torch.no_grad():
            assert at_once(op, wanted)
    with FakeTensorMode():
        assert not at_once(op, sample.make(filled=False))


@pytest.mark.parametrize("op", OPS)
def test_torch_traces_the_layout_that_is_computed(op, device):
    op = OPS[op]
    for sample in (*op.verification.tiny, op.verification.small[0]):
        arguments = replace(sample, dtype=torch.float32).make(device)
        if reaches_torch(op, arguments):
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                fake = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
                traced = outputs(call(op, fake))
            computed = outputs(call(op, arguments))
            assert [(y.dtype, layout(y)) for y in traced] == [(y.dtype, layout(y)) for y in computed]


@pytest.mark.parametrize("op", OPS)
def test_opcheck(op, device):
    op = OPS[op]
    # With every optional part, and without.
    made = [for_kernel(op, sample, device) for sample in op.verification.tiny]
    reaching = [arguments for arguments in made if reaches_torch(op, arguments)]
    for arguments in [reaching[0], *reaching[1:][-1:]]:
        # In half precision the two ways of summing a gradient may differ by a rounding. What the compiler makes of the
        # kernel is seen below.
        close = {"atol": 2e-2, "rtol": 2e-2} if arguments[0].dtype is torch.float16 else {}
        quick = ("test_schema", "test_faketensor", "test_autograd_registration")
        for name, checks in (
            (op.implementations[0].name, (*quick, "test_aot_dispatch_dynamic")),
            (kernel_of(op), quick),
        ):
            given = (*op.signature.spread(wanting(op, arguments)), name)
            torch.library.opcheck(getattr(torch.ops.rocm_sd, op.name).default, given, test_utils=checks, **close)


@pytest.mark.parametrize("trained", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("op", OPS)
def test_compiles_as_one_graph(op, trained, device):
    torch.compiler.reset()
    op = OPS[op]
    sample = op.verification.tiny[0]
    # By name the op's kernel, else what is chosen here; fullgraph raises at the first graph break.
    named = for_kernel(op, sample, device), kernel_of(op)
    for arguments, name in ((replace(sample, dtype=torch.float32).make(device), None), named):
        if trained and not op.differentiable:
            return
        given = wanting(op, arguments) if trained else arguments
        places = floats(op, given)

        def block(*values, given=given, places=places, name=name):
            results = outputs(call(op, changed(given, places, [values[0] * 2, *values[1:]]), name))
            return [result + 1 for result in results]

        values = [given[place] for place in places]
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
        ours, expected = compiled(*values), block(*values)
        torch.testing.assert_close(ours, expected)
        if trained:
            both = (torch.autograd.grad([y.square().sum() for y in results], values) for results in (ours, expected))
            for a, b in zip(*both, strict=True):
                torch.testing.assert_close(
                    a, b, **({} if b.dtype is not torch.float16 else {"atol": 0.1, "rtol": 0.01})
                )


# Gradients.


def tiny_functions(op):
    """(a function of the floating tensors, these tensors) of each tiny sample, in float64."""
    assert op.verification.tiny
    for sample in op.verification.tiny:
        arguments = wanting(op, sample.make())
        places = floats(op, arguments)
        assert arguments[0].dtype is torch.float64

        def function(*values, arguments=arguments, places=places):
            results = outputs(call(op, changed(arguments, places, values)))
            return tuple(y for y in results if not any(y is value for value in values))

        yield function, [arguments[place] for place in places]


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_gradcheck(op):
    for function, values in tiny_functions(OPS[op]):
        assert torch.autograd.gradcheck(function, values, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_second_order_gradients(op):
    """Against finite differences of the first, in a random direction: a backward that detaches has none, silently."""
    for function, values in tiny_functions(OPS[op]):
        torch.manual_seed(0)
        assert torch.autograd.gradgradcheck(function, values, rtol=1e-5, atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_half_precision_gradients_follow_float64(op, device):
    """As near as those of the definition in half precision, which computes in float32 and rounds once."""
    op = OPS[op]
    arguments = replace(op.verification.small[0], dtype=torch.float16).make(device)
    places = floats(op, arguments)
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(y.shape, generator=generator).to(y) for y in outputs(call(op, arguments))]

    def gradients(function, arguments, given):
        wanted = wanting(op, arguments)
        return torch.autograd.grad(outputs(function(*wanted)), [wanted[place] for place in places], given)

    reference = op.verification.reference
    exact = gradients(reference, tuple(in_float64(arguments)), [g.double() for g in given])
    theirs = gradients(reference, arguments, given)
    for name in (None, kernel_of(op)):
        ours = gradients(lambda *values, name=name: call(op, values, name), arguments, given)
        for place, a, e, s in zip(places, ours, exact, theirs, strict=True):
            assert a.dtype == arguments[place].dtype
            require(f"gradient of {op.signature.arguments[place].name}", a, e, s)


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_a_gradient_is_for_those_who_want_it(op, device):
    op = OPS[op]
    arguments = replace(op.verification.tiny[0], dtype=torch.float32).make(device)
    for wanted in floats(op, arguments):
        given = changed(arguments, [wanted], [arguments[wanted].detach().clone().requires_grad_()])
        sum(y.square().sum() for y in outputs(call(op, given))).backward()
        has = [place for place in floats(op, given) if given[place].grad is not None]
        assert has == [wanted]


@pytest.mark.parametrize("op", OPS)
def test_a_kernel_never_drops_a_derivative_in_forward_mode(op, device):
    """It sees values alone: what is not named gives way to the definition, and what is named is refused."""
    op = OPS[op]
    arguments = for_kernel(op, op.verification.tiny[0], device)
    place = floats(op, arguments)[0]
    tangent = torch.randn(arguments[place].shape).to(arguments[place])
    named = [name for name in takers(op, arguments) if name != op.implementations[0].name]
    # A call that was made before is found by its layouts alone.
    for name in named:
        call(op, arguments, name)
    with forward_ad.dual_level():
        carrying = changed(arguments, [place], [forward_ad.make_dual(arguments[place], tangent)])
        for name in named:
            with pytest.raises(Unsupported, match="in forward mode"):
                call(op, carrying, name)
        if not op.differentiable:
            with pytest.raises(Unsupported, match="a derivative in forward mode: it has none"):
                call(op, carrying)
        # Within the level, what carries nothing is computed as ever.
        for name in named:
            call(op, arguments, name)


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_derivatives_in_forward_mode_are_those_of_the_definition(op):
    for function, wanting_gradients in tiny_functions(OPS[op]):
        values = [value.detach() for value in wanting_gradients]
        torch.manual_seed(0)
        tangents = tuple(torch.randn_like(value) for value in values)
        # On a CPU the fused kernel of torch's attention has none, and says so.
        with sdpa_kernel(SDPBackend.MATH):
            _, forward = torch.func.jvp(function, tuple(values), tangents)
            ours, expected = forward, _differences(function, values, tangents)
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def _differences(function, values, tangents, by=1e-6):
    ahead, behind = (function(*(v + way * by * t for v, t in zip(values, tangents, strict=True))) for way in (1, -1))
    return [(a - b) / (2 * by) for a, b in zip(ahead, behind, strict=True)]


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_torch_func_differentiates_an_op(op):
    function, values = next(iter(tiny_functions(OPS[op])))
    loss = lambda *values: sum(y.square().sum() for y in function(*values))  # noqa: E731 -- it is differentiated twice
    expected = torch.autograd.grad(loss(*values), values)
    ours = torch.func.grad(loss, argnums=tuple(range(len(values))))(*(value.detach() for value in values))
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b)


# Refusals.


@pytest.mark.parametrize("op", sorted(OPS.keys() - set(DIFFERENTIABLE)))
def test_a_gradient_that_there_is_not_is_refused_in_a_sentence(op):
    op = OPS[op]
    arguments = op.verification.small[0].make()
    place = floats(op, arguments)[0]
    wanted = changed(arguments, [place], [arguments[place].detach().clone().requires_grad_()])
    with pytest.raises(Unsupported, match=f"{op.signature.arguments[place].name} that wants a gradient"):
        call(op, wanted)
    with torch.no_grad():
        gate(op, arguments, call(op, wanted))


@pytest.mark.parametrize("op", OPS)
def test_tensors_that_no_op_takes_are_refused_in_a_sentence(op):
    op = OPS[op]
    arguments = replace(op.verification.tiny[0], dtype=torch.float32).make()
    whole = changed(arguments, floats(op, arguments), [arguments[p].int() for p in floats(op, arguments)])
    with pytest.raises(Unsupported, match=r"torch\.int32"):
        call(op, whole)
    for place, argument in enumerate(arguments[1:], 1):
        if isinstance(argument, torch.Tensor):
            elsewhere = changed(arguments, [place], [argument.to("meta")])
            with pytest.raises(Unsupported, match=f"{op.signature.arguments[place].name} on meta"):
                call(op, elsewhere)


@pytest.mark.parametrize("op", OPS)
def test_an_implementation_asked_for_by_name_never_falls_back(op, monkeypatch):
    op = OPS[op]
    wide = replace(op.verification.small[0], dtype=torch.float64).make()
    problem = op.verification.problem(*wide)
    refused = {each.name: each.why_not(problem, CPU) for each in op.implementations}
    assert refused[op.implementations[0].name] is None
    assert refused[op.verification.implementation] == "dtype float64"
    with pytest.raises(InvalidOption, match=", ".join(op.own)):
        call(op, wide, "no_such_implementation")
    for name, reason in refused.items():
        monkeypatch.setenv("ROCM_SD_IMPLEMENTATION", f"{op.name}={name}")
        if reason is None:
            assert op.choose(problem, CPU).implementation == name
            continue
        with pytest.raises(Unsupported, match=re.escape(reason)):
            call(op, wide, name)
        with pytest.raises(Unsupported, match=re.escape(reason)):
            call(op, wide)


@pytest.mark.parametrize("op", OPS)
def test_a_cpu_tensor_gets_stock_torch(op):
    op = OPS[op]
    choice = op.choose(op.verification.problem(*op.verification.small[0].make()), CPU)
    assert (choice.implementation, choice.source) == ("torch", "stock")
