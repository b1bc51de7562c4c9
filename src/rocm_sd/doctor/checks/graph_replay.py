"""Does a replayed graph compute what the plain calls compute?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rocm_sd.doctor.check import CannotRun, Finding, Fix, Probe, fine, flag, measured_check, problem, rows, text
from rocm_sd.doctor.probing.common import Place, random
from rocm_sd.doctor.probing.isolated import isolated_on

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from rocm_sd.doctor.facts import Facts

__all__ = ["graph_replay"]

_LIMIT_S = 18.0
_SWITCH = "ROCM_SD_STEP_GRAPH"
# Without graphs the same kernels run, launched one by one: safe.
_FIX = Fix(f"Set {_SWITCH}=0: rocm-sd then captures no graphs.", env={_SWITCH: "0"}, safe=True)


def measure(*, device: str | None = None, quick: bool = False) -> dict[str, Any]:
    """`captured`, then `replays`: {"ok", "largest_error", "allowed"} each; `error` where it raised or crashed."""
    plain = isolated_on(device, _without_a_graph, limit_s=_LIMIT_S)
    here = plain.required("what is to be captured does not run without a graph either")["device"]
    if here["kind"] == "cpu":
        raise CannotRun("there is no GPU, and nothing else captures graphs")
    outcome = isolated_on(device, _capture_and_replay, 16 if quick else 32, limit_s=_LIMIT_S)
    if outcome.answer is None:
        return {"device": here, "captured": False, "replays": [], "error": outcome.failed}
    return {"device": here, "captured": True, "replays": outcome.answer["replays"], "error": ""}


def _without_a_graph(where: Place) -> dict[str, Any]:
    """Where kernels are missing, graphs are not to blame."""
    if where.is_gpu:
        _block(random(where, 1, 64, 16, 16), _weights(where)).cpu()
    return {}


def _capture_and_replay(where: Place, size: int) -> dict[str, Any]:
    import torch  # noqa: PLC0415 -- in the process that needs it

    weights = _weights(where)
    with torch.cuda.device(where.device):
        held = random(where, 1, 64, size, size)
        # Libraries choose and allocate at their first calls, which must not be captured.
        warm = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):
            for _ in range(3):
                _block(held, weights)
        torch.cuda.current_stream().wait_stream(warm)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = _block(held, weights)
        return {"replays": [_replay(graph, held, result, weights, where, seed) for seed in (11, 12)]}


def _replay(
    graph: torch.cuda.CUDAGraph,
    held: torch.Tensor,
    result: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
    where: Place,
    seed: int,
) -> dict[str, Any]:
    from rocm_sd.numerics import compare  # noqa: PLC0415 -- imports torch

    changed = random(where, *held.shape, seed=seed)
    held.copy_(changed)
    # What was there before must not pass for a result.
    result.fill_(float("nan"))
    graph.replay()
    replayed = result.cpu()
    exact = _block(changed.cpu().double(), {name: tensor.cpu().double() for name, tensor in weights.items()})
    found = compare(replayed, exact, _block(changed, weights).cpu())
    return {"ok": found.ok, "largest_error": found.largest, "allowed": found.allowed_largest}


def _weights(where: Place) -> dict[str, torch.Tensor]:
    return {
        "kernel": random(where, 64, 64, 3, 3, seed=1) / 24,
        "scale": random(where, 64, seed=2),
        "shift": random(where, 64, seed=3),
        "projection": random(where, 64, 64, seed=4) / 8,
    }


def _block(x: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A convolution, a norm, a linear layer and attention: one of each kind of kernel in a UNet."""
    from torch.nn import functional  # noqa: PLC0415 -- as above

    x = functional.silu(functional.group_norm(x, 8, weights["scale"], weights["shift"]))
    x = functional.conv2d(x, weights["kernel"], padding=1)
    rows = functional.linear(x.flatten(2).transpose(1, 2), weights["projection"]).unsqueeze(1)
    return functional.scaled_dot_product_attention(rows, rows, rows)


@measured_check(
    measures="a norm, a convolution, a linear layer and attention, captured once and replayed twice with new inputs",
    reports="pytorch/pytorch#155684 pytorch/pytorch#185074 pytorch/pytorch#155720",
    probe=Probe("graph_capture", measure),
)
def graph_replay(_facts: Facts, answer: Mapping[str, Any]) -> Finding:
    measured = {name: answer[name] for name in ("captured", "replays", "error")}
    if not flag(answer, "captured"):
        says = f"A graph of one block could not be captured and replayed: {text(answer, 'error')}."
        means = "Programs that use graphs, torch.compile in its reduce-overhead mode among them, fail or crash."
        return problem(says, means, _FIX, measured)
    replays = rows(answer, "replays")
    wrong = [row for row in replays if not flag(row, "ok")]
    if wrong:
        error = wrong[0]["largest_error"]
        how = "it is not a number" if error is None else f"error {error:.3g}, allowed {wrong[0]['allowed']:.3g}"
        says = f"{len(wrong)} of {len(replays)} replays with new inputs are wrong: {how}."
        return problem(says, "Pictures are wrong without an error where graphs are used.", _FIX, measured)
    return fine(f"{len(replays)} replays with new inputs are right.", measured=measured)
