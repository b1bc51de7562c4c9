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
from rocm_sd.parallel.rows import shares

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rocm_sd.parallel.ranks import Ranks

__all__ = ["install_tensor"]

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


class _Columns(nn.Module):
    """Some outputs of a linear layer; of a gated one, as many of each half."""

    def __init__(self, layer: nn.Linear, pieces: _Pieces, halves: int = 1) -> None:
        super().__init__()
        weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
        parts = weight.chunk(halves)
        self.weight = nn.Parameter(torch.cat([part[pieces.own] for part in parts]), requires_grad=False)
        kept = None if bias is None else torch.cat([part[pieces.own] for part in bias.chunk(halves)])
        self.bias = None if kept is None else nn.Parameter(kept, requires_grad=False)

    def forward(self, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class _WholeThenCut(nn.Module):
    """The same of a layer that somebody has put something around."""

    def __init__(self, layer: nn.Module, pieces: _Pieces, halves: int = 1) -> None:
        super().__init__()
        self.layer, self._pieces, self._halves = layer, pieces, halves

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        whole = self.layer(x, *args, **kwargs)
        return torch.cat([part[..., self._pieces.own] for part in whole.chunk(self._halves, dim=-1)], dim=-1)


class _Summed(nn.Module):
    """A linear layer of which each rank has the columns that read its part of the input."""

    def __init__(self, layer: nn.Linear, pieces: _Pieces, ranks: Ranks) -> None:
        super().__init__()
        self.weight = nn.Parameter(layer.weight.detach()[:, pieces.own].contiguous(), requires_grad=False)
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach(), requires_grad=False)
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


def install_tensor(model: nn.Module, ranks: Ranks, weights: Sequence[float]) -> Installed:
    """Split every attention and feed-forward layer of the model that has a head or a column for each rank."""
    undo: list[Callable[[], None]] = []
    split, whole = 0, 0

    def restore() -> None:
        for each in reversed(undo):
            each()

    try:
        for module in list(model.modules()):
            kind = type(module).__name__
            if kind == "Attention":
                done = _split_attention(module, ranks, weights, undo)
            elif kind == "FeedForward":
                done = _split_feed_forward(module, ranks, weights, undo)
            else:
                continue
            split, whole = split + done, whole + (not done)
    except BaseException:
        restore()
        raise

    def notes() -> tuple[str, ...]:
        kept = f"; {whole} run whole: they have fewer heads than ranks, or are of another kind" if whole else ""
        return (f"{type(model).__name__} has parts of {split} layers on each of {ranks.size} ranks{kept}",)

    return Installed(notes, restore)


def _split_attention(layer: Any, ranks: Ranks, weights: Sequence[float], undo: list[Callable[[], None]]) -> bool:
    own = ("to_q", "to_k", "to_v")
    known = type(layer.processor).__name__ in _PROCESSORS and getattr(layer, "add_k_proj", None) is None
    if not known or layer.heads < ranks.size or any(getattr(layer, name, None) is None for name in (*own, "to_out")):
        return False
    heads = _Pieces(shares(layer.heads, weights), ranks.rank)
    columns = heads.scaled(_width(layer.to_q) // layer.heads)
    for name in own:
        _put(layer, name, _columns(getattr(layer, name), columns), undo)
    _put(layer.to_out, "0", _summed(layer.to_out[0], columns, ranks), undo)
    before, layer.heads = layer.heads, heads.counts[ranks.rank]
    undo.append(lambda: setattr(layer, "heads", before))
    return True


def _split_feed_forward(layer: Any, ranks: Ranks, weights: Sequence[float], undo: list[Callable[[], None]]) -> bool:
    first, last = layer.net[0], layer.net[-1]
    if len(layer.net) != 3 or not hasattr(first, "proj") or not isinstance(layer.net[1], nn.Dropout):
        return False
    halves = 2 if type(first).__name__ in {"GEGLU", "SwiGLU"} else 1
    if halves == 1 and type(first).__name__ not in {"GELU", "ApproximateGELU"}:
        return False
    width = _width(first.proj) // halves
    if width < ranks.size:
        return False
    columns = _Pieces(shares(width, weights), ranks.rank)
    _put(first, "proj", _columns(first.proj, columns, halves), undo)
    _put(layer.net, "2", _summed(last, columns, ranks), undo)
    return True


def _columns(layer: nn.Module, pieces: _Pieces, halves: int = 1) -> nn.Module:
    return (_Columns if type(layer) is nn.Linear else _WholeThenCut)(layer, pieces, halves)  # type: ignore[arg-type]


def _summed(layer: nn.Module, pieces: _Pieces, ranks: Ranks) -> nn.Module:
    return (_Summed if type(layer) is nn.Linear else _GatheredThenWhole)(layer, pieces, ranks)  # type: ignore[arg-type]


def _width(layer: Any) -> int:
    return int(getattr(layer, "base_layer", layer).out_features)


def _put(owner: nn.Module, name: str, layer: nn.Module, undo: list[Callable[[], None]]) -> None:
    before = owner.get_submodule(name)
    device = next(before.parameters()).device
    owner.register_module(name, layer)
    if type(before) is nn.Linear and device.type != "cpu":
        before.to("cpu")

    def back() -> None:
        owner.register_module(name, before.to(device))

    undo.append(back)
