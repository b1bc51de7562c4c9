"""`pipeline`: text encoders, parts of the UNet and the VAE, each on one rank; entries of a batch are in flight.

| part | who computes it | what is sent |
|---|---|---|
| text encoder, VAE | one rank | its answer, to all |
| blocks of the UNet, in their order | by ranges of blocks | the sample at the end of a range, to the next range |
| what down blocks keep for up blocks | | to the rank whose up block reads it |
| the UNet's answer | the rank of the last block | to all |

Every rank runs the model's own forward. A block that is another rank's is not computed there: what this rank needs of
it is received, and the rest is a tensor of the right shape that nothing reads. A batch goes through in entries: while
one rank has the second, the next has the first. Blocks that are not a rank's own wait in the host's memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from rocm_sd.engine import Installed, divide
from rocm_sd.errors import Unsupported
from rocm_sd.parallel.answers import Kind, device_of, hand_on, kinds
from rocm_sd.parallel.homes import send_home, size_of
from rocm_sd.rewrite import forwards

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from rocm_sd.parallel.ranks import Ranks

__all__ = ["blocks_of", "install_owned", "install_stages", "owned_parts", "owners_of", "ranges"]


def ranges(costs: Sequence[float], weights: Sequence[float]) -> list[int]:
    """Which rank has which block: ranges in order, whose costs are as near to the weights as whole blocks allow."""
    ranks, whole, spent, rank = len(weights), sum(costs), 0.0, 0
    owners: list[int] = []
    ends = [sum(weights[: rank + 1]) / sum(weights) * whole for rank in range(ranks)]
    for place, cost in enumerate(costs):
        # A border inside of a block goes to its nearer side.
        while rank < ranks - 1 and rank in owners and spent + cost / 2 > ends[rank]:
            rank += 1
        # Every rank has a block, as long as there are enough.
        rank = max(rank, ranks - (len(costs) - place))
        owners.append(rank)
        spent += cost
    return owners


def install_owned(module: nn.Module, method: str, owner: int, unread: nn.Module, ranks: Ranks) -> Installed:
    """One rank computes what the method returns, and all have it. The arguments are the same everywhere. `unread`: what
    of the module the others do not need for anything else.
    """
    name = type(module).__name__ if method == "forward" else f"{method} of {type(module).__name__}"

    def answer(_: nn.Module, whole: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        others = [rank for rank in range(ranks.size) if rank != owner]
        own = whole(*args, **kwargs) if ranks.rank == owner else None
        return hand_on(ranks, own, owner, others, device_of((args, kwargs)))

    take_off = forwards.surround(module, answer, name=method)
    home = send_home(unread) if ranks.rank != owner else (lambda: None)

    def restore() -> None:
        take_off()
        home()

    return Installed(lambda: (f"{name} is on rank {owner} of {ranks.size}",), restore)


def blocks_of(unet: Any, ranks: int) -> list[nn.Module]:
    """In the order of the forward. Raises Unsupported where they cannot be shared out among so many."""
    kind = type(unet).__name__
    if kind != "UNet2DConditionModel":
        raise Unsupported("pipeline", f"{kind}: its blocks are not known", hint="Use data, or cfg.")
    blocks = [*unet.down_blocks, *([unet.mid_block] if unet.mid_block is not None else []), *unet.up_blocks]
    if len(blocks) < ranks:
        hint = f"Use {len(blocks)} GPUs or fewer, or another plan."
        raise Unsupported("pipeline", f"{ranks} ranks for {len(blocks)} blocks of {kind}", hint=hint)
    return blocks


def owners_of(blocks: Sequence[nn.Module], weights: Sequence[float]) -> list[int]:
    """Before any of them is split otherwise: all ranks have to find the same."""
    return ranges([size_of(block.parameters()) for block in blocks], weights)


def owned_parts(pipe: Any, ranks: int) -> Iterator[tuple[nn.Module, str, int, nn.Module]]:
    """Text encoders are the first rank's, and the VAE is the last one's: each with the method that it computes, its
    owner and what of it others do not need.
    """
    for name in ("text_encoder", "text_encoder_2", "text_encoder_3"):
        module = getattr(pipe, name, None)
        if module is not None:
            yield module, "forward", 0, module
    vae = getattr(pipe, "vae", None)
    if vae is not None and hasattr(vae, "decoder"):
        # And not the decoder's forward: how a picture is decoded goes by the memory that is free.
        yield vae, "decode", ranks - 1, vae.decoder


@dataclass
class _Stages:
    """Of one UNet. `owners`: of each block, in the order of the forward; `readers`: who needs what a block keeps."""

    ranks: Ranks
    owners: list[int]
    readers: dict[int, list[int]]
    shapes: dict[Any, tuple[list[Any], Any]] = field(default_factory=dict)
    call: Any = None
    sent: list[Any] = field(default_factory=list)

    def run(self, place: int, whole: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A block's answer: computed, received, or of the right shape."""
        owner, me = self.owners[place], self.ranks.rank
        found: list[Any] = []
        tree = None
        if owner == me:
            found, tree = pytree.tree_flatten(whole(*args, **kwargs))
        key = (self.call, place)
        if key not in self.shapes:
            self.shapes[key] = self.ranks.agree((kinds(found), tree) if owner == me else None)[owner]
        said, tree = self.shapes[key]
        got, here = list(found), device_of((args, kwargs))
        for number, kind in enumerate(said):
            wanted = self._wanted(place, number)
            if owner == me:
                self.sent += [self.ranks.send(found[number], rank) for rank in wanted]
            elif isinstance(kind, Kind):
                got.append(self.ranks.receive(kind.empty(here), owner) if me in wanted else kind.unread(here))
            else:
                got.append(kind)
        return pytree.tree_unflatten(got, tree)

    def _wanted(self, place: int, number: int) -> list[int]:
        """Which other ranks need the n-th tensor of a block: the sample is the first, what it keeps comes after it."""
        owner = self.owners[place]
        if number == 0:
            after = self.owners[place + 1] if place + 1 < len(self.owners) else owner
            return [after] if after != owner else []
        reader = self.readers[place][number - 1]
        return [reader] if reader != owner else []

    def settle(self) -> None:
        for request in self.sent:
            request()
        self.sent.clear()


def install_stages(unet: Any, ranks: Ranks, weights: Sequence[float]) -> Installed:
    """Give each rank a range of the UNet's blocks."""
    kind, blocks = type(unet).__name__, blocks_of(unet, ranks.size)
    owners = owners_of(blocks, weights)
    stages = _Stages(ranks, owners, _readers(unet, owners))
    undo = [_stand_in(block, place, stages) for place, block in enumerate(blocks)]
    undo += [send_home(block) for place, block in enumerate(blocks) if owners[place] != ranks.rank]
    flights = [0]

    def answer(model: Any, whole: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        divided = divide(model, args, kwargs)
        entries: list[slice | None] = [None]
        if divided.reason is None:
            entries = [slice(number, number + 1) for number in range(divided.batch)]
        flights[0] += len(entries)
        answers = []
        for entry in entries:
            stages.call = tuple(kinds(pytree.tree_leaves((args, kwargs)))), entry is None
            whole_answer = whole(*args, **kwargs) if entry is None else divided.run(whole, entry)  # type: ignore[union-attr]
            answers.append(pytree.tree_flatten(whole_answer))
        leaves = [
            torch.cat(parts) if isinstance(parts[0], torch.Tensor) else parts[0]
            for parts in zip(*(leaves for leaves, _ in answers), strict=True)
        ]
        stages.settle()
        return pytree.tree_unflatten([_from(owners[-1], leaf, ranks) for leaf in leaves], answers[0][1])

    take_off = forwards.surround(unet, answer)

    def restore() -> None:
        take_off()
        for each in reversed(undo):
            each()

    def notes() -> Iterator[str]:
        by_rank = ", ".join(f"{owners.count(rank)} on rank {rank}" for rank in range(ranks.size))
        yield f"{kind} has its {len(blocks)} blocks on {ranks.size} ranks ({by_rank}): {flights[0]} entries so far"

    return Installed(lambda: tuple(notes()), restore)


def _from(owner: int, leaf: Any, ranks: Ranks) -> Any:
    """The answer of the last block's rank, on all."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if ranks.rank == owner:
        ranks.hand_over(dict.fromkeys([rank for rank in range(ranks.size) if rank != owner], leaf), {})
        return leaf
    got = torch.empty_like(leaf, memory_format=torch.contiguous_format)
    ranks.hand_over({}, {owner: got})
    return got


def _readers(unet: Any, owners: list[int]) -> dict[int, list[int]]:
    """By down block: which rank reads each of the tensors that it keeps. Up blocks take them from the end."""
    # The first one is the sample before the first block, which every rank has.
    kept = [(-1, 0)]
    for place, block in enumerate(unet.down_blocks):
        count = len(block.resnets) + len(block.downsamplers or ())
        kept += [(place, number) for number in range(count)]
    readers: dict[int, dict[int, int]] = {place: {} for place in range(-1, len(unet.down_blocks))}
    first_up = len(owners) - len(unet.up_blocks)
    for number, block in enumerate(unet.up_blocks):
        for _ in block.resnets:
            place, which = kept.pop()
            readers[place][which] = owners[first_up + number]
    return {place: [each[number] for number in sorted(each)] for place, each in readers.items() if place >= 0}


def _stand_in(block: nn.Module, place: int, stages: _Stages) -> Callable[[], None]:
    def answer(_: nn.Module, whole: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return stages.run(place, whole, args, kwargs)

    return forwards.surround(block, answer)
