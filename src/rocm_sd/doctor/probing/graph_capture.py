"""Does a captured graph compute what it was captured from: replayed twice, with changed inputs, beside plain calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rocm_sd.doctor.probing.common import Cannot, Place, place, random
from rocm_sd.doctor.probing.isolated import isolated

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = ["answer"]

_LIMIT_S = 18.0


def answer(*, device: str | None = None, quick: bool = False) -> dict[str, Any]:
    """`captured`, then `replays`: {"ok", "largest_error", "allowed"} each; `error` where it raised or crashed."""
    here = isolated(_without_a_graph, device, limit_s=_LIMIT_S)
    if here.answer is None:
        raise Cannot(f"what is to be captured does not run without a graph either: {here.failed}")
    if here.answer["kind"] == "cpu":
        raise Cannot("there is no GPU, and nothing else captures graphs")
    outcome = isolated(_capture_and_replay, device, 16 if quick else 32, limit_s=_LIMIT_S)
    if outcome.answer is None:
        return {"device": here.answer, "captured": False, "replays": [], "error": outcome.failed}
    return {"device": here.answer, "captured": True, "replays": outcome.answer["replays"], "error": ""}


def _without_a_graph(device: str | None) -> dict[str, Any]:
    """Where kernels are missing, graphs are not to blame."""
    where = place(device)
    if where.is_gpu:
        _block(random(where, 1, 64, 16, 16), _weights(where)).cpu()
    return {**where.told()}


def _capture_and_replay(device: str | None, size: int) -> dict[str, Any]:
    import torch  # noqa: PLC0415 -- in the process that needs it

    where = place(device)
    weights = _weights(where)
    with torch.no_grad(), torch.cuda.device(where.device):
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
