"""`patch`: each rank has some rows of every picture, and computes what follows from them.

What a model needs from other ranks is decided by the operation alone, so this knows no model:

| operation on rows | what is sent | why |
|---|---|---|
| convolution of k rows | the k // 2 rows beside the border, to the neighbours | halos |
| group norm | mean and sum of squares of each group, to all | its statistics are of the whole picture |
| attention | keys and values of own rows, to all | every query looks at every pixel |
| upsampling | rows beside the border, where heights are odd | nearest rows may be a neighbour's |
| linear, layer norm, activation, sum | nothing | each pixel by itself |

It is torch's function mode: it sees each operation of the model before it runs, and which tensors are rows of something
larger follows from operation to operation. An operation that it cannot prove harmless is refused, never guessed.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ref

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree

from rocm_sd.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_sd.parallel.ranks import Ranks
    from rocm_sd.parallel.rows import Rows
    from rocm_sd.parallel.stale import Exchanges

__all__ = ["PatchMode"]

R = TypeVar("R")

# Each pixel by itself, or another view of the same pixels: rows in, rows out.
# A sum over ranks of another dimension of the mesh is one: all of them have the same rows.
_BY_PIXEL = frozenset({
    "__add__", "__getitem__", "__iadd__", "__imul__", "__mul__", "__neg__", "__radd__", "__rmul__", "__rsub__",
    "__sub__", "__truediv__", "add", "add_", "addcmul", "all_reduce", "bfloat16", "cat", "chunk", "clamp", "clip",
    "clone", "concat", "contiguous", "copy_", "cpu", "cuda", "detach", "div", "div_", "double", "dropout",
    "empty_like", "exp", "expand", "expand_as", "flatten", "float", "gelu", "gelu_", "half", "layer_norm", "lerp",
    "linear", "mish", "movedim", "mul", "mul_", "nan_to_num", "neg", "new_empty", "new_zeros", "ones_like",
    "permute", "pow", "relu", "relu_", "requires_grad_", "reshape", "rms_norm", "rsqrt", "sigmoid", "silu", "silu_",
    "split", "sqrt", "squeeze", "sub", "sub_", "tanh", "to", "transpose", "type", "type_as", "unflatten",
    "unsqueeze", "view", "view_as", "where", "zeros_like",
})  # fmt: skip
# Read, and nothing is computed.
_ASKED = frozenset({
    "data_ptr", "dim", "element_size", "is_contiguous", "is_floating_point", "numel", "size", "storage_offset",
    "stride",
})  # fmt: skip


class PatchMode(TorchFunctionMode):
    """In force around one call of a model. `rows`: of the call's pictures. `exchanges`: what it has of other ranks."""

    def __init__(self, ranks: Ranks, rows: Rows, exchanges: Exchanges | None = None) -> None:
        super().__init__()
        self._ranks, self.rows = ranks, rows
        self._exchanges = ranks if exchanges is None else exchanges
        # By identity: a tensor's own equality is elementwise.
        self._known: dict[int, tuple[Any, Rows]] = {}

    def own(self, whole: torch.Tensor, rows: Rows | None = None) -> torch.Tensor:
        """Of [N, C, H, W], the rows of this rank."""
        rows = rows or self.rows
        begin, end = rows.of(self._ranks.rank)
        part = whole[:, :, begin:end]
        last = (
            torch.channels_last if whole.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format
        )
        return self._note(part.contiguous(memory_format=last), rows)

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """All rows of [N, C, h, W], on every rank."""
        return self._ranks.gather(part, self.of(part).counts, 2)

    def of(self, tensor: torch.Tensor) -> Rows:
        rows = self._rows_of(tensor)
        assert rows is not None, "a tensor that is no part of a picture"
        return rows

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = [rows for leaf in pytree.tree_leaves((args, kwargs)) if (rows := self._rows_of(leaf)) is not None]
        if not found:
            return function(*args, **kwargs)
        name = (resolve_name(function) or getattr(function, "__name__", str(function))).rsplit(".", 1)[-1]
        if name == "__get__" or name in _ASKED:
            result = function(*args, **kwargs)
            # x.T and x.mT are tensors, too.
            return self._note(result, found[0]) if isinstance(result, torch.Tensor) else result
        if name in _RULES:
            return _RULES[name](self, *args, **kwargs)
        if name not in _BY_PIXEL or not _keeps_rows(name, args, kwargs):
            raise _refused(name)
        if any(rows.borders != found[0].borders for rows in found):
            raise _refused(f"{name} of rows at two levels")
        return self._note(function(*args, **kwargs), found[0])

    # What is known of tensors.

    def _rows_of(self, leaf: Any) -> Rows | None:
        if not isinstance(leaf, torch.Tensor):
            return None
        held, rows = self._known.get(id(leaf), (None, None))
        return rows if held is not None and held() is leaf else None

    def _note(self, result: R, rows: Rows) -> R:
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._known[id(leaf)] = (ref(leaf), rows)
        return result

    # Rules: one for each kind of operation that looks beyond its own rows.

    def _fetched(self, x: torch.Tensor, rows: Rows, wanted: Callable[[int], tuple[int, int]]) -> torch.Tensor:
        """Rows [begin, end) of [N, C, H, W] as `wanted(rank)` says: own ones, and what others send."""
        me, (begin, end) = self._ranks.rank, rows.of(self._ranks.rank)
        first, last = wanted(me)
        outgoing, incoming = {}, {}
        for rank in range(self._ranks.size):
            if rank == me or not rows.counts[rank] or not rows.counts[me]:
                continue
            low, high = wanted(rank)
            low, high = max(low, begin), min(high, end)
            if low < high:
                outgoing[rank] = x[:, :, low - begin : high - begin]
            low, high = max(first, rows.of(rank)[0]), min(last, rows.of(rank)[1])
            if low < high:
                incoming[rank] = x.new_empty(x.shape[0], x.shape[1], high - low, x.shape[3])
        self._exchanges.hand_over(outgoing, incoming)
        mine = x[:, :, max(first, begin) - begin : min(last, end) - begin]
        pieces = [incoming[rank] if rank != me else mine for rank in range(self._ranks.size)
                  if rank == me or rank in incoming]  # fmt: skip
        return torch.cat(pieces, dim=2) if len(pieces) > 1 else mine

    def conv2d(
        self, x: torch.Tensor, weight: torch.Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1,
    ) -> torch.Tensor:  # fmt: skip
        rows = self.of(x)
        if isinstance(padding, str):
            raise _refused(f"conv2d with padding {padding}")
        steps, pads, spread = _pair(stride), _pair(padding), _pair(dilation)
        kernel = spread[0] * (weight.shape[2] - 1) + 1
        height = (rows.height + 2 * pads[0] - kernel) // steps[0] + 1
        result = rows if steps[0] == 1 else rows.coarser if steps[0] == 2 else None
        if result is None or height != result.height:
            raise _refused(f"conv2d of {kernel} rows, every {steps[0]}, with {pads[0]} beside them")
        first, last = rows.needed(self._ranks.rank, result, steps[0], kernel, pads[0])
        if kernel > 1 or steps[0] > 1:
            fetched = self._fetched(x, rows, lambda rank: rows.needed(rank, result, steps[0], kernel, pads[0]))
        else:
            fetched = x
        begin, end = result.of(self._ranks.rank)
        above = first - (begin * steps[0] - pads[0])
        below = (end - 1) * steps[0] - pads[0] + kernel - last
        if above or below:
            fetched = F.pad(fetched, (0, 0, above, below))
        return self._note(F.conv2d(fetched, weight, bias, stride, (0, pads[1]), dilation, groups), result)

    def group_norm(
        self, x: torch.Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
    ) -> torch.Tensor:
        rows = self.of(x)
        wide = x.double() if x.dtype is torch.float64 else x.float()
        grouped = wide.reshape(x.shape[0], num_groups, -1)
        mean = grouped.mean(-1)
        spread = (grouped - mean[..., None]).square().sum(-1)
        count = torch.full_like(mean, grouped.shape[-1])
        # Of each rank, each picture and each group.
        said = self._exchanges.gather(torch.stack([mean, spread, count])[None], [1] * self._ranks.size, 0)
        means, spreads, counts = said.unbind(1)
        whole = counts.sum(0)
        middle = (means * counts).sum(0) / whole
        variance = (spreads + (means - middle).square() * counts).sum(0) / whole
        normed = (grouped - middle[..., None]) * torch.rsqrt(variance + eps)[..., None]
        normed = normed.reshape(x.shape)
        shape = (1, -1, *[1] * (x.dim() - 2))
        if weight is not None:
            normed = normed * weight.to(normed.dtype).reshape(shape)
        if bias is not None:
            normed = normed + bias.to(normed.dtype).reshape(shape)
        last = torch.channels_last if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) else None
        normed = normed.to(x.dtype)
        normed = normed.contiguous(memory_format=last) if last else normed
        return self._note(normed, rows)

    def scaled_dot_product_attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any = None, *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        rows = self.of(query)
        with_rows = self._rows_of(key)
        if (with_rows is None) != (self._rows_of(value) is None) or (with_rows is not None and attn_mask is not None):
            raise _refused("attention with a mask over the pixels")
        if with_rows is not None:
            width = key.shape[-2] // with_rows.counts[self._ranks.rank]
            sizes = [count * width for count in with_rows.counts]
            both = self._exchanges.gather(torch.stack([key, value]), sizes, key.dim() - 1)
            key, value = both.unbind(0)
        answer = F.scaled_dot_product_attention(query, key, value, attn_mask, *args, **kwargs)
        return self._note(answer, rows)

    def interpolate(
        self, x: torch.Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest", *_: Any, **__: Any
    ) -> torch.Tensor:
        rows = self.of(x)
        result = rows.finer
        if mode != "nearest" or x.dim() != 4 or (scale_factor is not None and _pair(scale_factor) != (2, 2)):
            raise _refused(f"interpolation {mode} by {scale_factor}")
        width = 2 * x.shape[3] if size is None else _pair(size)[1]

        def source(row: int) -> int:
            return min(rows.height - 1, row * rows.height // result.height)

        def wanted(rank: int) -> tuple[int, int]:
            begin, end = result.of(rank)
            return (source(begin), source(end - 1) + 1) if begin < end else (0, 0)

        fetched = self._fetched(x, rows, wanted)
        first, (begin, end) = wanted(self._ranks.rank)[0], result.of(self._ranks.rank)
        places = _places(tuple(source(row) - first for row in range(begin, end)), x.device)
        tall = fetched.index_select(2, places)
        columns = torch.arange(width, device=x.device) * x.shape[3] // width
        return self._note(tall.index_select(3, columns), result)

    def entries_set(self, x: torch.Tensor, index: Any, value: Any) -> None:
        """Halves of a batch that were computed one after the other, put together."""
        rows = self._rows_of(value)
        if not isinstance(index, slice) or rows is None:
            raise _refused("__setitem__")
        x[index] = value
        self._note(x, rows)


_RULES: dict[str, Callable[..., Any]] = {
    "conv2d": PatchMode.conv2d,
    "group_norm": PatchMode.group_norm,
    "scaled_dot_product_attention": PatchMode.scaled_dot_product_attention,
    "interpolate": PatchMode.interpolate,
    "__setitem__": PatchMode.entries_set,
}


@lru_cache(maxsize=64)
def _places(rows: tuple[int, ...], device: torch.device) -> torch.Tensor:
    # Kept: a graph can copy nothing from the host's memory.
    return torch.tensor(rows, device=device)


def _pair(value: Any) -> tuple[Any, Any]:
    return (value, value) if isinstance(value, int | float) else (value[0], value[1])


def _keeps_rows(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether what is cut, looked up or joined leaves every row where it is: in [N, C, H, W], and in [N, pixels, C]."""
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return all(each is None or each is Ellipsis or each == slice(None) for each in index[1:])
    if name in {"cat", "concat"}:
        tensors, dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else 0)
        return len({len(tensor.shape) for tensor in tensors}) == 1 and _is_beside_rows(dim, tensors[0].dim())
    if name in {"chunk", "split"}:
        return _is_beside_rows(kwargs.get("dim", args[2] if len(args) > 2 else 0), args[0].dim())
    return True


def _is_beside_rows(dim: int, dims: int) -> bool:
    return dim % dims in ({0, 1} if dims == 4 else {0, dims - 1})


def _refused(what: str) -> Unsupported:
    return Unsupported("parallelize", f"{what} on rows of a picture", hint="Use another plan, such as cfg or data.")
