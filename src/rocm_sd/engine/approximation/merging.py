"""Self-attention of a UNet's outermost blocks on fewer tokens: alike ones are averaged before it, and share its result.

Token merging (ToMe for Stable Diffusion, arXiv 2303.17604). Of each window of 2x2 tokens the first is a destination and
the others are sources. The share of sources that are most similar to a destination, by the cosine of what attention
reads, is averaged into it. Nothing is drawn at random and nothing is added up by atomics: the same input gives the same
bits. Which share a call has goes from outside of the graphs to the inside in an argument, so that each has a graph of
its own; how the tokens lie in rows and columns is known to the block's spatial transformer.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch.nn.functional import normalize

from rocm_sd.engine.approximation.shipped import costs, of_steps
from rocm_sd.engine.denoisers import MERGED
from rocm_sd.engine.installed import Approximated, Installed
from rocm_sd.rewrite import forwards, transformer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from rocm_sd.engine.approximation.shipped import Setting
    from rocm_sd.engine.schedule import ScheduleRun

    Inner = Callable[..., Any]

__all__ = ["MergedTokens", "Merging", "merge", "merged_count", "outermost"]

# Of sources and destinations: 268 MB of similarities in float16. Pictures of SD 1.5 reach it at 1300x1300.
_MOST_PAIRS = 2**27


@dataclass(frozen=True)
class MergedTokens:
    """`tokens`: [B, N - r, C], the sources that are left and then the destinations. `rows`: [B, N], which of them each
    token's result is.
    """

    tokens: torch.Tensor
    rows: torch.Tensor

    def spread(self, results: torch.Tensor) -> torch.Tensor:
        """[B, N - r, D] -> [B, N, D]."""
        return results.gather(1, self.rows[..., None].expand(-1, -1, results.shape[-1]))


def merged_count(tokens: int, share: float) -> int:
    """How many sources of so many tokens are merged."""
    return int(share * (tokens - tokens // 4))


def merge(x: torch.Tensor, height: int, width: int, share: float) -> MergedTokens:
    """x: [B, N, C], row after row; N = height * width, both even. r = int(share * 3/4 N) sources are merged.

    A destination d with the sources s_1..s_n becomes d + sum_i (s_i - d) / (n + 1), their mean: written so, equal
    tokens stay as they are, and a sum of many cannot leave float16's range.
    """
    batch, count, channels = x.shape
    windows = x.reshape(batch, height // 2, 2, width // 2, 2, channels)
    corners = [windows[:, :, row, :, column].flatten(1, 2) for row in (0, 1) for column in (0, 1)]
    into, sources = corners[0], torch.cat(corners[1:], 1)
    merged, places = merged_count(count, share), count // 4
    similarity, nearest = torch.bmm(normalize(sources, dim=-1), normalize(into, dim=-1).transpose(1, 2)).max(-1)
    # Stable: of equal ones, the first.
    order = similarity.argsort(dim=-1, descending=True, stable=True)
    taken, left = order[:, :merged], order[:, merged:]
    place = nearest.gather(1, taken)
    # By a product: adding up at places that come several times would be in any order.
    members = place[:, None, :] == torch.arange(places, device=x.device)[:, None]
    shares = members * (1 / (members.sum(-1, keepdim=True) + 1)).to(x.dtype)
    difference = _rows(sources, taken) - _rows(into, place)
    mean = into + torch.bmm(shares, difference)
    rank = order.argsort(dim=-1)
    kept = sources.shape[1] - merged
    of_sources = torch.where(rank < merged, kept + nearest, rank - merged)
    of_places = torch.arange(kept, kept + places, device=x.device).expand(batch, -1)
    by_corner = torch.cat([of_places, of_sources], 1).reshape(batch, 2, 2, height // 2, width // 2)
    return MergedTokens(torch.cat([_rows(sources, left), mean], 1), by_corner.permute(0, 3, 1, 4, 2).flatten(1))


def _rows(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    return x.gather(1, numbers[..., None].expand(-1, -1, x.shape[-1]))


def outermost(unet: Any) -> list[Any]:
    """The spatial transformers where there are the most tokens: of the first block on the way down that has any, and of
    its counterpart on the way up.
    """
    down = list(getattr(unet, "down_blocks", ()))
    number = next((number for number, block in enumerate(down) if _transformers(block)), None)
    if number is None or len(unet.up_blocks) != len(down):
        return []
    return [*_transformers(down[number]), *_transformers(unet.up_blocks[len(down) - 1 - number])]


def _transformers(block: Any) -> list[Any]:
    found = getattr(block, "attentions", None) or ()
    return [each for each in found if type(each).__name__ == "Transformer2DModel"]


@dataclass(frozen=True)
class _Now:
    """What a call has: the share, and inside of a spatial transformer the rows and columns of its tokens."""

    share: float
    size: tuple[int, int] | None = None


_NOW: ContextVar[_Now | None] = ContextVar("rocm_sd_merging", default=None)


@contextmanager
def _during(now: _Now) -> Iterator[None]:
    token = _NOW.set(now)
    try:
        yield
    finally:
        _NOW.reset(token)


@dataclass
class Merging:
    """Of one UNet. `settings`: what is approximated, by the number of steps."""

    unet: ref[Any]
    settings: list[Setting]
    exact_because: Counter[str] = field(default_factory=Counter)
    # Of captured calls what was so when they were captured.
    tokens: dict[tuple[int, int], None] = field(default_factory=dict)
    blocks_exact_because: dict[str, None] = field(default_factory=dict)
    _at_work: bool = True

    @classmethod
    def of(cls, unet: Any, settings: list[Setting]) -> Merging | None:
        """None where no setting merges."""
        return cls(ref(unet), settings) if any(setting.approximation.merged for setting in settings) else None

    def install_inside(self) -> Installed:
        """What merges, for the calls that the graphs are made of."""
        unet = self.unet()
        spatial = outermost(unet)
        if not spatial:
            self._at_work = False
            self.blocks_exact_because[f"a {type(unet).__name__} has no such blocks that are known"] = None
            return Installed(tuple, lambda: None)
        blocks = [block for each in spatial for block in each.transformer_blocks]
        restores = [forwards.surround(unet, _take_share)]
        restores += [forwards.surround(each, _note_size) for each in spatial]
        restores += [forwards.surround(block.attn1, self._attention(ref(block))) for block in blocks]

        def restore() -> None:
            for one in reversed(restores):
                one()

        return Installed(tuple, restore)

    def install_outside(self, run_of: Callable[[], ScheduleRun | None]) -> Installed:
        """What says which share a call has, before a graph for it is looked for."""

        def answer(_unet: nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            share = self._share(run_of, kwargs.get("timestep", args[1] if len(args) > 1 else None))
            # Another pipeline with the same UNet may have given one.
            return inner(*args, **(kwargs | {MERGED: share} if share else kwargs))

        take_off = forwards.surround(self.unet(), answer)

        def restore() -> None:
            # A wrapper by somebody else may outlive it.
            self._at_work = False
            take_off()

        return Installed(lambda: tuple(self._notes()), restore, approximated=lambda: (self._approximated(),))

    def _share(self, run_of: Callable[[], ScheduleRun | None], timestep: object) -> float:
        if not self._at_work:
            return 0.0
        run = run_of()
        if torch.is_grad_enabled():
            reason = "gradients may be wanted"
        elif run is None or run.number_of(timestep) is None:
            reason = "the step is not one of a schedule that is known"
        else:
            setting = of_steps(self.settings, len(run.timesteps))
            if setting.approximation.merged:
                return setting.approximation.merged
            reason = setting.why
        self.exact_because[reason] += 1
        return 0.0

    def _attention(self, held: ref[Any]) -> Callable[..., Any]:
        """Around a block's attention to its own tokens."""

        def answer(attn: Any, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            now, block = _NOW.get(), held()
            if block is None or block.attn1 is not attn:
                return inner(*args, **kwargs)
            x = args[0] if args else kwargs.get("hidden_states")
            others = [*args[1:], *(value for name, value in kwargs.items() if name != "hidden_states")]
            if not isinstance(x, torch.Tensor) or any(value is not None for value in others):
                if now is not None:
                    self.blocks_exact_because["it is given a mask or other arguments"] = None
                return inner(*args, **kwargs)
            reason = "" if now is None else _why_not(block, x, now)
            if reason is not None or now is None or now.size is None:
                self.blocks_exact_because |= {reason: None} if reason else {}
                return _attended(block, inner, x)
            found = merge(x, *now.size, now.share)
            self.tokens[x.shape[1], found.tokens.shape[1]] = None
            return found.spread(_attended(block, inner, found.tokens))

        return answer

    def _approximated(self) -> Approximated:
        reasons = () if self.tokens else (*self.exact_because, *self.blocks_exact_because)
        return Approximated("merged tokens", costs(self.settings), next(iter(reasons), None))

    def _notes(self) -> Iterator[str]:
        kind = type(self.unet()).__name__
        for setting in self.settings:
            share = setting.approximation.merged
            if share and self.unet() is not None and outermost(self.unet()):
                since = f" from {setting.from_steps} steps on" if setting.from_steps > 1 else ""
                yield f"{kind}: {share:.0%} of three in four outermost tokens are merged{since} ({setting.why})"
        if self.tokens:
            said = ", ".join(f"{after} of {before}" for before, after in self.tokens)
            yield f"{kind}: self-attention of its outermost blocks ran on {said} tokens"
        for reason, calls in self.exact_because.items():
            yield f"{kind}: {calls} calls merge no tokens, because {reason}"
        for reason in self.blocks_exact_because:
            yield f"{kind}: self-attention of outermost blocks merges no tokens, because {reason}"


def _take_share(_unet: nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    share = kwargs.pop(MERGED, 0.0)
    if not share:
        return inner(*args, **kwargs)
    with _during(_Now(share)):
        return inner(*args, **kwargs)


def _note_size(_transformer: nn.Module, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    now, x = _NOW.get(), args[0] if args else kwargs.get("hidden_states")
    if now is None or not isinstance(x, torch.Tensor) or x.dim() != 4:
        return inner(*args, **kwargs)
    with _during(_Now(now.share, (x.shape[2], x.shape[3]))):
        return inner(*args, **kwargs)


def _attended(block: Any, inner: Inner, x: torch.Tensor) -> torch.Tensor:
    attended = transformer.self_attention(block, x)
    answer: torch.Tensor = inner(x) if attended is None else attended
    return answer


def _why_not(block: Any, x: torch.Tensor, now: _Now) -> str | None:
    """Why the block's own tokens attend to each other unmerged, in words."""
    if now.size is None or x.dim() != 3:
        return "how its tokens lie is not known"
    height, width = now.size
    if height % 2 or width % 2 or x.shape[1] != height * width:
        return f"{height}x{width} tokens do not make windows of 2x2"
    if 3 * (x.shape[1] // 4) ** 2 > _MOST_PAIRS:
        return f"the similarities of {height}x{width} tokens would take too much memory"
    if not merged_count(x.shape[1], now.share):
        return f"{now.share:.0%} of {height}x{width} tokens is less than one"
    for attn in (block.attn1, block.attn2):
        if attn is not None and not transformer.has_stock_processor(attn):
            return f"{type(attn.processor).__name__} computes attention"
    return None
