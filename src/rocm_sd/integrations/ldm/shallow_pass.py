"""A pass of ldm's UNet that hands out what its deep layers made, or takes it from an earlier step.

`input_blocks` each leave a skip connection, and as many `output_blocks` each take one, last left first taken. What
comes into the last `depth` of these is all that they need of the deeper layers. It is the host's own forward that runs,
on a view of the UNet: for a whole pass with one block that notes what it gave, for a shallow one with the first `depth`
blocks of the way down and the last `depth` of the way up, and in place of the middle what was kept. So embeddings,
joins and casts are the host's in every version of it, and a whole pass gives the host's bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

__all__ = ["deepest", "run", "why_no_pass"]

_BLOCK = "TimestepEmbedSequential"
# By name: the hosts have forks of these, with layers of their own. Those of video take more than these are given.
_LAYERS = frozenset({"Conv2d", "Downsample", "Identity", "ResBlock", "SpatialTransformer", "Upsample"})


def deepest(unet: Any) -> int:
    """How many blocks of the way up there are, but for the first one: with it, nothing would be left out."""
    return len(unet.output_blocks) - 1


def why_no_pass(unet: Any, depth: int) -> str | None:
    """Why the UNet has no shallow pass of that depth, in words."""
    parts: list[Any] = [getattr(unet, name, None) for name in ("input_blocks", "middle_block", "output_blocks")]
    if any(part is None for part in parts):
        return "it is built in another way than ldm's UNet"
    down, middle, up = parts
    if len(down) != len(up):
        return "it has not as many blocks on its way up as on its way down"
    for block in (*down, middle, *up):
        for part in [block, *(block if type(block).__name__ == _BLOCK else ())]:
            name = type(part).__name__
            if name not in _LAYERS and name != _BLOCK:
                return f"it has a {name}"
    return f"it has {deepest(unet)} layers to leave out" if depth > deepest(unet) else None


def run(
    forward: Callable[..., Any], unet: Any, depth: int, features: torch.Tensor | None, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The answer of `forward`, the UNet's own, and what came into the last `depth` blocks: `features`, where given."""
    if features is not None:
        down, up = unet.input_blocks[:depth], unet.output_blocks[-depth:]
        seen = _View(unet, input_blocks=down, middle_block=_Given(features), output_blocks=up)
        return forward(seen, *args, **kwargs), features
    blocks = list(unet.output_blocks)
    noting = blocks[-depth - 1] = _Noting(blocks[-depth - 1])
    answer = forward(_View(unet, output_blocks=blocks), *args, **kwargs)
    if len(noting.noted) != 1:
        raise RuntimeError("the host's forward does not call each block once")
    return answer, noting.noted[0]


class _View:
    """The UNet with some of its parts replaced: for the time of one call, and for nobody else."""

    def __init__(self, unet: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced)
        self.__dict__["_viewed"] = unet

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_viewed"], name)


class _Noting:
    """A block that notes what it gives. One host calls its blocks, the other one goes through their layers."""

    def __init__(self, block: Any) -> None:
        self._block = block
        self.noted: list[torch.Tensor] = []

    def _note(self, x: torch.Tensor) -> torch.Tensor:
        self.noted.append(x)
        return x

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._note(self._block(*args, **kwargs))

    def __iter__(self) -> Iterator[Any]:
        return iter((*self._block, self._note))


class _Given:
    """In place of the middle: what an earlier step kept, whatever comes from above."""

    def __init__(self, features: torch.Tensor) -> None:
        self._features = features

    def __call__(self, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return self._features

    def __iter__(self) -> Iterator[Any]:
        return iter((self,))
