"""What launching costs the host: each op, each rewritten block and whole pictures, with no graph captured.

    python benchmarks/launch_cost.py --out results [--workload sd15-512] [--batch 1,8] [--steps 20] [--turns 7]

1. Every call of every op that one step makes: microseconds of the host's time for rocm-sd's op as it is called from the
   second time on, for the same op where nothing is kept from call to call, and for stock torch. First all of them are
   compared: what is kept must give the same bits.
2. Every kind of block that is rewritten, against stock's own.
3. What is compared before rules and graphs do a model's work: milliseconds a step, and those of the step itself.
4. Whole pictures by the clock: stock, rocm-sd as it comes where graphs are off, and rocm-sd with every rule applied.

Variants take turns, a few calls each, and the card is idle before each turn, so that no launch waits for a full queue.
results/launch-cost-WORKLOAD.json has all of it. `--tiny` tries the command on a CPU, where an op's work is in its time.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
import sys
import time
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch

# Before optimize reads it: nothing here is captured.
os.environ["ROCM_SD_STEP_GRAPH"] = "0"

import rocm_sd.ops
from rocm_sd import measuring
from rocm_sd.bench import workloads
from rocm_sd.engine.capture.snapshot import Snapshot
from rocm_sd.engine.optimization import optimize, optimize_with
from rocm_sd.engine.parts import Parts
from rocm_sd.kernels import triton as triton_kernels
from rocm_sd.numerics import outputs
from rocm_sd.ops import OPS, registry
from rocm_sd.rewrite import RULES, RULES_FOR_GRAPHS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EVERY_RULE = Parts(rules=frozenset(rule.name for rule in (*RULES, *RULES_FOR_GRAPHS)), hoisted=False, captured=False)
BLOCKS = (
    "BasicTransformerBlock", "ResnetBlock2D", "Upsample2D", "Downsample2D", "Transformer2DModel", "CrossAttnUpBlock2D",
)  # fmt: skip
CALLS = 10


def synchronize():
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def host_us(call):
    """Of one call among a few, which an idle card's queue takes without a wait."""
    synchronize()
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    took = time.perf_counter() - began
    synchronize()
    return took * 1e6 / CALLS


def in_turns(variants, turns):
    """Medians by name; each was called before, so that nothing is compiled or chosen now."""
    times = {name: [] for name in variants}
    for number in range(turns):
        for name in measuring.turn(list(variants), number):
            times[name].append(host_us(variants[name]))
    return {name: round(median(taken), 2) for name, taken in times.items()}


@contextmanager
def unbound():
    """Within, ops work everything out anew at each call, and Triton launches."""
    bound, bind = registry.Op.bound, registry.Op.bind
    registry.Op.bound = registry.Op.bind = lambda *_: None
    try:
        yield
    finally:
        registry.Op.bound, registry.Op.bind = bound, bind


@contextmanager
def recorded():
    """The calls of all ops within: names and arguments."""
    calls, bound = [], registry.Op.bound

    def noted(op, implementation, *arguments):
        calls.append((op.name, arguments))
        return bound(op, implementation, *arguments)

    registry.Op.bound = noted
    try:
        yield calls
    finally:
        registry.Op.bound = bound


def described(value):
    if isinstance(value, torch.Tensor):
        shape = "x".join(map(str, value.shape))
        dense = value.is_contiguous() or (value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last))
        return shape if dense else f"{shape} by {value.stride()}"
    return str(value)


def as_called(name, arguments):
    """The op's public function with these arguments, as rules call it."""
    function = getattr(rocm_sd.ops, name)
    places = list(inspect.signature(function).parameters)
    before = places.index("implementation")
    named = {
        place: each for place, each in zip(places[before + 1 :], arguments[before:], strict=False) if each is not None
    }
    return lambda: function(*arguments[:before], **named)


def kernels_of(call):
    """How many kernels one call launches; None where no profiler sees them."""
    if DEVICE.type != "cuda":
        return None
    synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        call()
        synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profiled.events())


def ops_of_a_step(calls, turns):
    """A row for each distinct call, most frequent ones of an op first."""
    distinct = {}
    for name, arguments in calls:
        row = distinct.setdefault((name, *map(described, arguments)), [name, arguments, 0])
        row[2] += 1
    rows = []
    for (_, *given), (name, arguments, count) in sorted(distinct.items(), key=lambda item: item[0][0]):
        op, ours = OPS[name], as_called(name, arguments)
        problem = op.verification.problem(*arguments)
        choice = op.choose(problem, DEVICE)
        ours()
        kept = outputs(ours())
        with unbound():
            plain = outputs(ours())
        same = all(torch.equal(a, b) for a, b in zip(kept, plain, strict=True))

        def anew(ours=ours):
            with unbound():
                ours()

        stock = op.own["torch"]
        taken = in_turns({"bound": ours, "anew": anew, "stock": lambda a=arguments, s=stock: s(*a)}, turns)
        kernels = kernels_of(ours)
        rows.append(
            {"op": name, "arguments": given, "calls": count, "implementation": choice.implementation, "same bits": same,
             "kernels": kernels, **{f"{key} us": value for key, value in taken.items()}}
        )  # fmt: skip
    return rows


def inputs_of_blocks(unet, call):
    """By path: the kind of a block, and what it is called with."""
    found, handles = {}, []

    def note(path):
        def hook(module, positional, named):
            found.setdefault(path, (type(module).__name__, positional, dict(named)))

        return hook

    for path, module in unet.named_modules():
        if type(module).__name__ in BLOCKS:
            handles.append(module.register_forward_pre_hook(note(path), with_kwargs=True))
    call()
    for handle in handles:
        handle.remove()
    return found


def blocks_of(models, arguments, turns):
    """A row for the first block of each kind and each shape; each model's block has the input that it has there."""
    given = {
        name: inputs_of_blocks(unet, lambda u=unet: u(*arguments[0], **arguments[1])) for name, unet in models.items()
    }
    rows, seen = [], set()
    for path, (kind, positional, _) in given["stock"].items():
        shapes = tuple(tuple(each.shape) for each in positional if isinstance(each, torch.Tensor))
        if (kind, shapes) in seen:
            continue
        seen.add((kind, shapes))
        variants = {}
        for name, unet in models.items():
            _, args, kwargs = given[name][path]
            module = unet.get_submodule(path)
            variants[name] = lambda m=module, a=args, k=kwargs: m(*a, **k)

        def anew(call=variants["bound"]):
            with unbound():
                call()

        variants["anew"] = anew
        for variant in (*variants.values(), *variants.values()):
            variant()
        taken = in_turns(variants, turns)
        rows.append({"block": kind, "path": path, "input": shapes, **{f"{key} us": us for key, us in taken.items()}})
    return rows


def comparisons_of(unet, call, turns):
    """Of the UNet with every rule: all of its rules' comparisons, that before a replay, and a step without graphs.

    By the thread's own clock where only the host works: other programs of the machine are not in it.
    """
    guards = [guard for rule in (*RULES, *RULES_FOR_GRAPHS) for guard in rule.guards.values()]
    asked = [
        partial(guard.why, module)
        for module in unet.modules() for guard in guards
        if getattr(module.__dict__.get("forward"), "__func__", None) is guard.stand_in
    ]  # fmt: skip
    snapshot = Snapshot(unet)
    assert not any(ask() for ask in asked)
    assert snapshot.difference() is None
    variants = {"rules": lambda: [ask() for ask in asked], "replay": snapshot.difference}
    taken = {name: [] for name in variants}
    for _ in range(turns):
        for name, compare in variants.items():
            began = time.thread_time()
            compare()
            taken[name].append(time.thread_time() - began)
    call()
    steps = [host_us(call) / 1e3 for _ in range(3)]
    modules = len(list(unet.modules()))
    return {
        "modules": modules, "replaced": len(asked), **{f"{n} ms": round(median(t) * 1e3, 3) for n, t in taken.items()},
        "step ms": round(median(steps), 2), "of a step": round(median(taken["rules"]) * 1e3 / median(steps), 4),
    }  # fmt: skip


def pictures(made, engines, batch, turns):
    times = {name: [] for name in engines}
    for number in range(turns):
        for name in measuring.turn(list(engines), number):
            synchronize()
            began = time.perf_counter()
            made.picture(engines[name], batch)
            synchronize()
            times[name].append((time.perf_counter() - began) * 1e3)
    return {
        "batch": batch,
        **{f"{name} ms": round(median(taken), 1) for name, taken in times.items()},
        **{
            f"{name} times stock": told(measuring.compare(name, "stock", batch, taken, times["stock"]))
            for name, taken in times.items() if name != "stock"
        },
    }  # fmt: skip


def told(comparison):
    return f"{comparison.ratio:.3f} ({comparison.low:.3f} to {comparison.high:.3f}): {comparison.verdict}"


def unet_call(made, pipe, batch):
    """The UNet's arguments at the first step of a picture."""
    found = []

    def note(_module, positional, named):
        if not found:
            found.append((positional, dict(named)))

    handle = pipe.unet.register_forward_pre_hook(note, with_kwargs=True)
    made.picture(pipe, batch)
    handle.remove()
    return found[0]


def compiled_ahead(call):
    """Every kernel side by side, as the engine compiles them; a process would compile one after the other else."""
    if DEVICE.type != "cuda":
        return call()
    from rocm_sd.kernels.triton import precompile  # noqa: PLC0415 -- needs Triton

    for _ in range(2):
        with precompile.precompiling() as done:
            call()
        if not done.compiled:
            break
    return call()


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workload", default="sd15-512")
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--turns", type=int, default=7, help="of pictures; ops and blocks take three times as many")
    parser.add_argument("--skip", default="", help="parts to leave out: ops, blocks, comparisons, pictures")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    skipped = set(options.skip.split(","))
    batches = [int(each) for each in options.batch.split(",")]
    made = workloads.make(options.workload, DEVICE, steps=None if options.tiny else options.steps, tiny=options.tiny)
    engines = {
        "stock": made.pipeline(),
        "rocm-sd": optimize(made.pipeline()),
        "every rule": optimize_with(made.pipeline(), "auto", "exact", EVERY_RULE),
    }
    stock, ours = engines["stock"].unet, engines["every rule"].unet
    positional, named = unet_call(made, engines["stock"], batches[0])
    compiled_ahead(lambda: ours(*positional, **named))
    result = {
        "workload": made.facts.name,
        "steps": made.facts.steps,
        "command": " ".join(["launch_cost.py", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else platform.processor(),
        "torch": torch.__version__,
        "triton": version("triton") if triton_kernels.why_not(DEVICE) is None else None,
        "python": platform.python_version(),
    }
    if "ops" not in skipped:
        with recorded() as calls:
            ours(*positional, **named)
        result["ops"] = ops_of_a_step(calls, 3 * options.turns)
        for row in result["ops"]:
            print_row(row)
    if "blocks" not in skipped:
        result["blocks"] = blocks_of({"stock": stock, "bound": ours}, (positional, named), 3 * options.turns)
        for row in result["blocks"]:
            print_row(row)
    if "comparisons" not in skipped:
        call = partial(ours, *positional, **named)
        result["comparisons"] = comparisons_of(ours, call, 30 * options.turns)
        print_row(result["comparisons"])
    if "pictures" not in skipped:
        result["pictures"] = []
        for batch in batches:
            for pipe in engines.values():
                compiled_ahead(lambda pipe=pipe, batch=batch: made.picture(pipe, batch))
            result["pictures"].append(pictures(made, engines, batch, options.turns))
            print(result["pictures"][-1], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"launch-cost-{made.facts.name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    wrong = [row for row in result.get("ops", ()) if not row["same bits"]]
    return 1 if wrong else 0


def print_row(row):
    print("  ".join(str(value) for value in row.values()), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
