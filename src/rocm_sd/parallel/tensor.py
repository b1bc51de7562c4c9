"""`tensor`: each rank has some heads of every attention, and some columns of every feed-forward layer.

| layer | what a rank has | what is sent |
|---|---|---|
| `to_q`, `to_k`, `to_v` | the rows of the weight that are its heads' | nothing |
| `to_out` | the columns of the weight that read its heads | the product, summed over all ranks |
| first linear of a feed-forward | its columns; with a gate, as many of the gate | nothing |
| last linear of a feed-forward | the columns of the weight that read them | the product, summed over all ranks |

Convolutions and norms are computed by every rank. Weights that are not a rank's own wait in the host's memory until
`restore`. A layer that is no plain linear, as with a LoRA that is not fused, runs whole, and its result is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from rocm_sd.engine import Installed
from rocm_sd.parallel.homes import computes_on, on_card, size_of
from rocm_sd.parallel.rows import shares

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from rocm_sd.parallel.ranks import Ranks

__all__ = ["Division", "divisions", "install_tensor"]

# They look at `heads` alone, and at no weights of their own.
_PROCESSORS = frozenset({"AttnProcessor", "AttnProcessor2_0"})


@dataclass(frozen=True)
class _Pieces:
    """`counts`: of what each rank has, along one dimension; `own`: this rank's places there."""

    counts: tuple[int, ...]
    rank: int

    def scaled(self, by: int) -> _Pieces:
        return _Pieces(tuple(count * by for count in self.counts), self.rank)

    @property
    def own(self) -> slice:
        borders = list(accumulate(self.counts, initial=0))
        return slice(borders[self.rank], borders[self.rank + 1])


@dataclass(frozen=True)
class Division:
    """Of one layer, which `owner` has by that name. `halves`: of a gated one; `summed`: by what it reads, and not by
    what it gives.
    """

    owner: nn.Module
    name: str
    pieces: _Pieces
    halves: int = 1
    summed: bool = False

    @property
    def layer(self) -> Any:
        return self.owner.get_submodule(self.name)

    @property
    def is_cut(self) -> bool:
        """Whether a rank has a part of its weights, and not all of them."""
        return type(self.layer) is nn.Linear

    @property
    def bytes_held(self) -> int:
        """By this rank, of its weights."""
        layer = self.layer
        if not self.is_cut:
            return size_of(layer.parameters())
        own = self.pieces.own
        weight = layer.weight.numel() * (own.stop - own.start) * self.halves // layer.weight.shape[int(self.summed)]
        bias = 0 if layer.bias is None else layer.bias.numel() if self.summed else (own.stop - own.start) * self.halves
        return int((weight + bias) * layer.weight.element_size())

    def made(self, ranks: Ranks, device: torch.device) -> nn.Module:
        """What is put in place of the layer."""
        if self.summed and self.is_cut:
            return _Summed(self.layer, self.pieces, ranks, device)
        if self.summed:
            return _GatheredThenWhole(self.layer.to(device), self.pieces, ranks)
        if self.is_cut:
            return _Columns(self.layer, self.pieces, self.halves, device)
        return _WholeThenCut(self.layer.to(device), self.pieces, self.halves)


def _held(piece: torch.Tensor, device: torch.device) -> nn.Parameter:
    return nn.Parameter(on_card(piece, device), requires_grad=False)


class _Columns(nn.Module):
    """Some outputs of a linear layer; of a gated one, as many of each half."""

    def __init__(self, layer: nn.Linear, pieces: _Pieces, halves: int, device: torch.device) -> None:
        super().__init__()
        parts = layer.weight.detach().chunk(halves)
        self.weight = _held(torch.cat([part[pieces.own] for part in parts]), device)
        bias = None if layer.bias is None else layer.bias.detach().chunk(halves)
        self.bias = None if bias is None else _held(torch.cat([part[pieces.own] for part in bias]), device)

    def forward(self, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class _WholeThenCut(nn.Module):
    """The same of a layer that somebody has put something around."""

    def __init__(self, layer: nn.Module, pieces: _Pieces, halves: int) -> None:
        super().__init__()
        self.layer, self._pieces, self._halves = layer, pieces, halves

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        whole = self.layer(x, *args, **kwargs)
        return torch.cat([part[..., self._pieces.own] for part in whole.chunk(self._halves, dim=-1)], dim=-1)


class _Summed(nn.Module):
    """A linear layer of which each rank has the columns that read its part of the input."""

    def __init__(self, layer: nn.Linear, pieces: _Pieces, ranks: Ranks, device: torch.device) -> None:
        super().__init__()
        self.weight = _held(layer.weight.detach()[:, pieces.own].contiguous(), device)
        self.bias = None if layer.bias is None else _held(layer.bias.detach(), device)
        self._ranks = ranks

    def forward(self, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        product = F.linear(x, self.weight)
        # Halves are summed as floats: each rank has rounded its own once, and the sum is rounded once more.
        summed = self._ranks.add(product.float() if product.dtype.itemsize < 4 else product)
        summed = summed if self.bias is None else summed + self.bias
        return summed.to(x.dtype)


class _GatheredThenWhole(nn.Module):
    """The same of a layer that somebody has put something around: it reads everything."""

    def __init__(self, layer: nn.Module, pieces: _Pieces, ranks: Ranks) -> None:
        super().__init__()
        self.layer, self._pieces, self._ranks = layer, pieces, ranks

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        whole = self._ranks.gather(x, self._pieces.counts, x.dim() - 1)
        answer: torch.Tensor = self.layer(whole, *args, **kwargs)
        return answer


def install_tensor(
    model: nn.Module, ranks: Ranks, weights: Sequence[float], away: Collection[nn.Module] = ()
) -> Installed:
    """Split every attention and feed-forward layer of the model that has a head or a column for each rank. Pieces go
    where the rest of their block is. `away`: blocks that this rank does not compute.
    """
    undo: list[Callable[[], None]] = []
    split, whole = 0, 0

    def restore() -> None:
        for each in reversed(undo):
            each()

    try:
        # Before any of them is in place of another.
        parts = [part for part in _parts(model) if part not in away]
        found = [list(divisions(part, ranks.size, ranks.rank, weights)) for part in parts]
        for part, layers in zip(parts, found, strict=True):
            of_layers = (each.layer for _, divided in layers for each in divided if each.is_cut)
            device = computes_on(part, model, {id(weight) for layer in of_layers for weight in layer.parameters()})
            for layer, divided in layers:
                for each in divided:
                    _put(each.owner, each.name, each.made(ranks, device), undo)
                if divided and hasattr(layer, "heads"):
                    _keep_heads(layer, shares(layer.heads, weights)[ranks.rank], undo)
                split, whole = split + bool(divided), whole + (not divided)
    except BaseException:
        restore()
        raise

    def notes() -> tuple[str, ...]:
        kept = f"; {whole} run whole: they have fewer heads than ranks, or are of another kind" if whole else ""
        return (f"{type(model).__name__} has parts of {split} layers on each of {ranks.size} ranks{kept}",)

    return Installed(notes, restore)


def divisions(model: nn.Module, size: int, rank: int, weights: Sequence[float]) -> Iterator[tuple[Any, list[Division]]]:
    """Every attention and feed-forward layer with what is divided of it for that rank; nothing where it runs whole."""
    for module in model.modules():
        kind = type(module).__name__
        if kind == "Attention":
            yield module, _of_attention(module, size, rank, weights)
        elif kind == "FeedForward":
            yield module, _of_feed_forward(module, size, rank, weights)


def _of_attention(layer: Any, size: int, rank: int, weights: Sequence[float]) -> list[Division]:
    own = ("to_q", "to_k", "to_v")
    known = type(layer.processor).__name__ in _PROCESSORS and getattr(layer, "add_k_proj", None) is None
    if not known or layer.heads < size or any(getattr(layer, name, None) is None for name in (*own, "to_out")):
        return []
    columns = _Pieces(shares(layer.heads, weights), rank).scaled(_width(layer.to_q) // layer.heads)
    return [*(Division(layer, name, columns) for name in own), Division(layer.to_out, "0", columns, summed=True)]


def _of_feed_forward(layer: Any, size: int, rank: int, weights: Sequence[float]) -> list[Division]:
    first = layer.net[0]
    if len(layer.net) != 3 or not hasattr(first, "proj") or not isinstance(layer.net[1], nn.Dropout):
        return []
    halves = 2 if type(first).__name__ in {"GEGLU", "SwiGLU"} else 1
    if halves == 1 and type(first).__name__ not in {"GELU", "ApproximateGELU"}:
        return []
    width = _width(first.proj) // halves
    if width < size:
        return []
    columns = _Pieces(shares(width, weights), rank)
    return [Division(first, "proj", columns, halves), Division(layer.net, "2", columns, summed=True)]


def _parts(model: nn.Module) -> list[nn.Module]:
    """What a rank of a pipeline has whole, or not at all."""
    found: list[nn.Module] = []
    for child in model.children():
        found += child if isinstance(child, nn.ModuleList) else [child]
    return found


def _width(layer: Any) -> int:
    return int(getattr(layer, "base_layer", layer).out_features)


def _keep_heads(layer: Any, heads: int, undo: list[Callable[[], None]]) -> None:
    before, layer.heads = layer.heads, heads
    undo.append(lambda: setattr(layer, "heads", before))


def _put(owner: nn.Module, name: str, layer: nn.Module, undo: list[Callable[[], None]]) -> None:
    before = owner.get_submodule(name)
    device = next(before.parameters()).device
    owner.register_module(name, layer)
    if type(before) is nn.Linear and device.type != "cpu":
        before.to("cpu")

    def back() -> None:
        owner.register_module(name, before.to(device))

    undo.append(back)
