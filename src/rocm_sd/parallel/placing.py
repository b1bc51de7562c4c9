"""Each rank's part of a pipeline on its card, and never the whole first: what it computes with, and nothing else.

| plan | on the card of a rank | at home, in the host's memory |
|---|---|---|
| data, cfg, patch | everything | nothing |
| tensor | its heads and columns, and what is not split | the whole layers that they are parts of |
| pipeline | its blocks; text encoders on the first rank, the decoder on the last | the other ranks' |

Heads and columns come to the card when they are cut (`tensor`). Everything goes home again by `restore`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rocm_sd.engine import Installed, is_out_of_memory
from rocm_sd.engine.levels import placement
from rocm_sd.errors import DeviceUnavailable, RocmSdError, Unsupported, first_line
from rocm_sd.parallel.homes import called_alone, on_card, size_of, weights_of
from rocm_sd.parallel.stages import blocks_of, owned_parts, owners_of
from rocm_sd.parallel.tensor import Division, divisions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["SPLIT_WEIGHTS", "Part", "Seat", "fullest", "of_others", "part_of", "require_at_home", "whole_of"]

SPLIT_WEIGHTS = ("pipeline", "tensor")


@dataclass(frozen=True)
class Seat:
    """Of a rank among those of one strategy. `weights`: by which work is shared out."""

    rank: int
    weights: Sequence[float]

    @property
    def size(self) -> int:
        return len(self.weights)


@dataclass(frozen=True)
class Part:
    """What a rank computes with. `placed`: weights that are to be on its card; `cut`: layers of which it has a part."""

    placed: tuple[torch.Tensor, ...]
    cut: tuple[Division, ...]

    @property
    def bytes_cut(self) -> int:
        return sum(each.bytes_held for each in self.cut)

    @property
    def bytes_held(self) -> int:
        return size_of(self.placed) + self.bytes_cut

    def place(self, pipe: Any, device: torch.device) -> Installed:
        """One weight after the other; the memory of the host that each had is free then."""
        held, in_all = self.bytes_held, size_of(whole_of(pipe))
        modules = _modules(pipe)

        def notes() -> tuple[str, ...]:
            if held == in_all:
                return ()
            part = f"{_gb(held)} of {_gb(in_all)} of weights"
            return (f"this rank has {part} on {device}, the rest waits in the host's memory",)

        def restore() -> None:
            for weight in _weights(modules):
                weight.data = weight.data.to("cpu")

        try:
            for weight in self.placed:
                weight.data = on_card(weight.data, device)
        except BaseException as error:
            restore()
            if is_out_of_memory(error):
                raise _too_large(held, in_all, device, error) from error
            raise
        return Installed(notes, restore)


def part_of(pipe: Any, models: Sequence[nn.Module], seats: dict[str, Seat]) -> Part:
    """`models`: the denoiser, then ControlNets; `seats`: by strategy, of those that split weights."""
    away = set(of_others(pipe, models, seats))
    cut: list[Division] = []
    if "tensor" in seats:
        seat = seats["tensor"]
        for model in models:
            there = set(_walked([model], away))
            for layer, divided in divisions(model, seat.size, seat.rank, seat.weights):
                cut += [each for each in divided if layer in there and each.is_cut]
    away |= {each.layer for each in cut}
    alone = [part for module in away for part in called_alone(module)]
    placed = weights_of([*_walked(_modules(pipe), away), *alone])
    return Part(tuple(placed.values()), tuple(cut))


def fullest(pipe: Any, models: Sequence[Any], name: str, weights: Sequence[float]) -> int | None:
    """Bytes on the card of the rank with most of them, by one strategy alone; None where it has no such plan."""
    if models[0] is None:
        return None
    try:
        parts = [part_of(pipe, models, {name: Seat(rank, weights)}) for rank in range(len(weights))]
    except Unsupported:
        return None
    return max(part.bytes_held for part in parts)


def whole_of(pipe: Any) -> list[torch.Tensor]:
    return _weights(_modules(pipe))


def require_at_home(pipe: Any, device: torch.device) -> None:
    """Raises Unsupported where the pipeline is not in the host's memory, or something else moves its parts."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeviceUnavailable("torch sees no GPU.", hint='Type: rocm-sd info. To try it out: device="cpu".')
    found = placement(pipe)
    if found.by is not None or found.device.type != "cpu":
        what = f"a pipeline with {found.by}" if found.by is not None else f"a pipeline that is on {found.device}"
        hint = 'Call it before anything has moved the pipeline: no .to("cuda") and no offloading.'
        raise Unsupported(f"parallelize(pipe, device={str(device)!r})", what, hint=hint)


def _too_large(held: int, in_all: int, device: torch.device, error: BaseException) -> RocmSdError:
    hint = "Take more GPUs, or another model."
    if held == in_all:
        hint = "By another plan each GPU has a part of them: --parallel pipeline, or --parallel tensor."
    return RocmSdError(f"{_gb(held)} of weights do not fit on {device} ({first_line(error)}).", hint=hint)


def of_others(pipe: Any, models: Sequence[nn.Module], seats: dict[str, Seat]) -> Iterator[nn.Module]:
    """What other ranks compute, and this one never."""
    if "pipeline" not in seats:
        return
    seat = seats["pipeline"]
    blocks = blocks_of(models[0], seat.size)
    yield from (block for block, owner in zip(blocks, owners_of(blocks, seat.weights), strict=True)
                if owner != seat.rank)  # fmt: skip
    yield from (unread for _, _, owner, unread in owned_parts(pipe, seat.size) if owner != seat.rank)


def _walked(modules: Iterable[nn.Module], away: set[nn.Module]) -> Iterator[nn.Module]:
    """All modules in these, but for those that are away with what they have in them."""
    for module in modules:
        if module not in away:
            yield module
            yield from _walked(module.children(), away)


def _modules(pipe: Any) -> list[nn.Module]:
    return [part for part in pipe.components.values() if isinstance(part, nn.Module)]


def _weights(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    return list(weights_of(_walked(modules, set())).values())


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
