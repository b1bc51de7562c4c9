"""Pictures larger than a model's own size, denoised in tiles that overlap: `tile(pipe)`, and `untile(pipe)`.

Each step of the pipeline's own loop calls the UNet once. That call is answered by calls for tiles of the model's own
size, and what they predict is blended: noise(p) = sum_t w_t(p) noise_t(p) / sum_t w_t(p), where w_t falls linearly to
the border of tile t within its overlap. A UNet sees what it was trained for, in the memory of one tile; what is far
apart in the picture is no longer seen together, so it approximates. Where one tile covers all, the call goes through as
it is. ControlNets are called for the whole picture, and each tile gets its part of what they say.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.utils import _pytree as pytree

from rocm_sd.engine.denoisers import denoiser
from rocm_sd.errors import InvalidOption, Unsupported
from rocm_sd.rewrite import forwards

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

__all__ = ["Tiles", "is_tiled", "move_outside", "put_tiles", "tile_notes", "tiles_of", "untile"]

Target = TypeVar("Target")
# Maps, in latents' points or with one for several of them: each tile gets its part. All other arguments are for all.
_MAPS = ("sample", "down_block_additional_residuals", "mid_block_additional_residual")
_MAPS_INSIDE = "down_intrablock_additional_residuals"


@dataclass(frozen=True)
class Tiles:
    """`side` and `overlap` in points of the latents; `aligned`: what a UNet halves its maps by, all in all."""

    side: int
    overlap: int
    aligned: int
    scale: int

    def starts(self, total: int) -> list[int]:
        """Where tiles begin along a side of so many points: evenly, the last one at the end."""
        if total <= self.side:
            return [0]
        room = total - self.side
        count = -(-room // (self.side - self.overlap)) + 1
        even = [round(number * room / (count - 1) / self.aligned) * self.aligned for number in range(count - 1)]
        return sorted({*(start for start in even if start < room), room})

    def boxes(self, height: int, width: int) -> list[tuple[slice, slice]]:
        rows, columns = (
            [slice(start, min(start + self.side, total)) for start in self.starts(total)] for total in (height, width)
        )
        return [(row, column) for row in rows for column in columns]

    def borders(self, pixels: int) -> list[int]:
        """Where tiles begin or end along a side of so many pixels, but for the picture's own borders."""
        total = -(-pixels // self.scale)
        edges = {edge for start in self.starts(total) for edge in (start, min(start + self.side, total))}
        return [edge * self.scale for edge in sorted(edges - {0, total})]

    def weight(self, box: tuple[slice, slice], height: int, width: int, device: torch.device) -> torch.Tensor:
        """[h, w] of a tile: 1 inside, and falling to its borders but where the picture ends."""
        rows, columns = (self._ramp(part, total, device) for part, total in zip(box, (height, width), strict=True))
        return rows[:, None] * columns[None, :]

    def _ramp(self, part: slice, total: int, device: torch.device) -> torch.Tensor:
        place = torch.arange(part.stop - part.start, dtype=torch.float32, device=device)
        reach = float(self.overlap + 1)
        rising = torch.ones_like(place) if part.start == 0 else (place + 1) / reach
        falling = torch.ones_like(place) if part.stop == total else (len(place) - place) / reach
        return torch.minimum(rising, falling).clamp(max=1)


@dataclass
class _State:
    tiles: Tiles
    take_off: Callable[[], None] = field(default=lambda: None)
    whole: int = 0
    calls: int = 0
    most: int = 0


_TILED: WeakKeyDictionary[nn.Module, _State] = WeakKeyDictionary()


def put_tiles(pipe: Target, size: int | None, overlap: float) -> Target:
    unet = _unet(pipe)
    scale, aligned = _scales(pipe, unet)
    if not 0 <= overlap <= 0.5:
        raise InvalidOption("overlap", overlap, [], hint="It takes a share from 0 to 0.5, such as 0.25.")
    own = getattr(unet.config, "sample_size", None)
    if size is None and not isinstance(own, int):
        raise Unsupported(
            "tile", "a model whose own size is not known", hint="Give the side in pixels: tile(pipe, 512)."
        )
    unit = scale * aligned
    pixels = own * scale if size is None and isinstance(own, int) else size
    if not isinstance(pixels, int) or pixels < unit or pixels % unit:
        raise InvalidOption("size", pixels, [], hint=f"It takes a multiple of {unit} pixels.")
    side = pixels // scale
    # Whole steps of what the UNet halves by, so that every tile begins where its maps do.
    common = min(round(overlap * side / aligned) * aligned, side // 2)
    untile(pipe)
    state = _TILED[unet] = _State(Tiles(side, common, aligned, scale))
    _put_on(unet, state)
    return pipe


def untile(pipe: Target) -> Target:
    """Take the tiles off; a pipeline that has none is left as it is."""
    unet = getattr(pipe, "unet", None)
    state = _TILED.pop(unet, None) if unet is not None else None
    if state is not None:
        state.take_off()
    return pipe


def is_tiled(pipe: Any) -> bool:
    return _state_of(pipe) is not None


def _state_of(pipe: Any) -> _State | None:
    unet = getattr(pipe, "unet", None)
    return None if unet is None else _TILED.get(unet)


def tiles_of(pipe: Any) -> Tiles:
    return _TILED[pipe.unet].tiles


def move_outside(pipe: Any) -> None:
    """Around all that was put on the UNet since: tiles are what is captured, and not the whole of them."""
    state = _state_of(pipe)
    if state is not None:
        state.take_off()
        _put_on(pipe.unet, state)


def tile_notes(pipe: Any) -> list[str]:
    state = _state_of(pipe)
    if state is None:
        return []
    tiles, kind = state.tiles, type(pipe.unet).__name__
    side, common = tiles.side * tiles.scale, tiles.overlap * tiles.scale
    found = [f"{kind} approximates pictures above {side} pixels a side: in tiles that share {common} pixels, blended"]
    if state.calls:
        found.append(f"{kind}: {state.calls} calls in tiles, {state.most} of them at most; {state.whole} calls whole")
    return found


def _unet(pipe: Any) -> Any:
    unet = getattr(pipe, "unet", None)
    known = denoiser(unet)
    if known is None or not known.is_unet:
        what = type(getattr(pipe, "transformer", None) or pipe).__name__
        raise Unsupported("tile", f"a {what}: it takes pipelines with a UNet of Stable Diffusion or SDXL")
    return unet


def _scales(pipe: Any, unet: Any) -> tuple[int, int]:
    """Pixels a point of the latents, and points of them a point of the UNet's smallest map."""
    scale = getattr(pipe, "vae_scale_factor", None)
    if not isinstance(scale, int):
        raise Unsupported("tile", f"a {type(pipe).__name__}, which does not say what its VAE enlarges by")
    return scale, 2 ** (len(unet.config.block_out_channels) - 1)


def _put_on(unet: Any, state: _State) -> None:
    def answer(model: Any, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A copy of the model, or one whose wrapper by somebody else outlived `untile`, has no tiles.
        if _TILED.get(model) is not state:
            return inner(*args, **kwargs)
        return _in_tiles(state, inner, args, kwargs)

    state.take_off = forwards.surround(unet, answer)


def _in_tiles(state: _State, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    sample = kwargs.get("sample", args[0] if args else None)
    if not isinstance(sample, torch.Tensor) or sample.dim() != 4:
        return inner(*args, **kwargs)
    height, width = sample.shape[-2:]
    boxes = state.tiles.boxes(height, width)
    if len(boxes) == 1:
        state.whole += 1
        return inner(*args, **kwargs)
    state.calls, state.most = state.calls + 1, max(state.most, len(boxes))
    summed: torch.Tensor | None = None
    weights = torch.zeros(height, width, dtype=torch.float32, device=sample.device)
    for box in boxes:
        given = {name: _part(name, value, box, (height, width)) for name, value in kwargs.items()}
        first = (_crop(args[0], box, (height, width)), *args[1:]) if args else ()
        (predicted,), tree = _tensors(inner(*first, **given))
        if summed is None:
            wide = torch.promote_types(predicted.dtype, torch.float32)
            summed = torch.zeros((*predicted.shape[:2], height, width), dtype=wide, device=predicted.device)
            dtype, made = predicted.dtype, tree
        weight = state.tiles.weight(box, height, width, sample.device)
        summed[..., box[0], box[1]] += predicted * weight
        weights[box] += weight
    assert summed is not None
    return pytree.tree_unflatten([(summed / weights).to(dtype)], made)


def _tensors(result: Any) -> tuple[list[torch.Tensor], pytree.TreeSpec]:
    leaves, tree = pytree.tree_flatten(result)
    if len(leaves) != 1 or not isinstance(leaves[0], torch.Tensor):
        raise Unsupported("tile", f"a UNet that answers with {len(leaves)} values", hint="Call rocm_sd.untile(pipe).")
    return leaves, tree


def _part(name: str, value: Any, box: tuple[slice, slice], whole: tuple[int, int]) -> Any:
    """Of an argument that holds maps the tile's part."""
    if name == _MAPS_INSIDE and value is not None:
        raise Unsupported("tile", "a T2I adapter", hint="Call rocm_sd.untile(pipe) first.")
    if name not in _MAPS or value is None:
        return value
    return (
        type(value)(_crop(each, box, whole) for each in value)
        if isinstance(value, (list, tuple))
        else _crop(value, box, whole)
    )


def _crop(map_: torch.Tensor, box: tuple[slice, slice], whole: tuple[int, int]) -> torch.Tensor:
    """[B, C, h, w]: the part of a map, of which one point stands for `by` by `by` of the latents."""
    by = whole[0] // map_.shape[-2]
    edges = [edge for part in box for edge in (part.start, part.stop)]
    if tuple(side * by for side in map_.shape[-2:]) != whole or any(edge % by for edge in edges):
        raise Unsupported(
            "tile", f"maps of {tuple(map_.shape[-2:])} beside latents of {whole}",
            hint="Choose a size of the picture that is a multiple of 64.",
        )  # fmt: skip
    rows, columns = (slice(part.start // by, part.stop // by) for part in box)
    return map_[..., rows, columns].contiguous(memory_format=_layout(map_))


def _layout(map_: torch.Tensor) -> torch.memory_format:
    plain = map_.is_contiguous() or not map_.is_contiguous(memory_format=torch.channels_last)
    return torch.contiguous_format if plain else torch.channels_last
