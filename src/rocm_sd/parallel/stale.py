"""`patch` without waiting: a step computes with what the other ranks sent a step before.

Rows of a picture change little from one step to the next, so what lies beside a rank's own rows may be a step old: rows
at its border, statistics of norms, keys and values. A rank's own rows, and the answer that all of them give together,
are of this step. The first steps of a picture wait, since much changes there. It is lossy, and known as
`Approximation(stale_after=4)`; the idea is that of DistriFusion (arXiv 2402.19481).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rocm_sd.parallel.ranks import Ranks

__all__ = ["Exchanges", "StaleExchanges"]


class Exchanges(Protocol):
    """What a call has of other ranks: `Ranks` themselves, or what these sent before."""

    def gather(self, part: torch.Tensor, sizes: Sequence[int], dim: int) -> torch.Tensor: ...

    def hand_over(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None: ...


class StaleExchanges:
    """Of one model, from call to call. Every call exchanges the same in the same order; one that does not waits again.

    `begin` comes before each call, alike on every rank. A call keeps what has come for the one after it, unless that is
    the last of a picture.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        # By their place in the call, of the call before and of this one: what is exchanged, and what waits for it.
        self._before: list[tuple[Any, Callable[[], Any]]] = []
        self._now: list[tuple[Any, Callable[[], Any]]] = []
        self._is_late = self._is_last = False
        self.late_calls = 0

    def begin(self, *, late: bool, last: bool) -> None:
        """`late`: with what came before. `last`: nobody will ask for what comes in this call."""
        # What an earlier call left unread, because it ended in an error, say.
        _settle(self._before)
        self._before, self._now = self._now, []
        self._is_late, self._is_last = late, last
        if late:
            self.late_calls += 1
        else:
            self.forget()

    def forget(self) -> None:
        """Wait for what is on its way, and keep nothing."""
        _settle([*self._before, *self._now])
        self._before, self._now = [], []

    def gather(self, part: torch.Tensor, sizes: Sequence[int], dim: int) -> torch.Tensor:
        kind = "gather", part.shape, part.dtype, tuple(sizes), dim
        arrived = self._arrived(kind)
        if arrived is None:
            pieces = self._ranks.start_gather(part, sizes, dim)()
            self._keep(kind, lambda: pieces)
            return torch.cat(pieces).movedim(0, dim)
        if not self._is_last:
            self._keep(kind, self._ranks.start_gather(part, sizes, dim))
        pieces = arrived()
        # A rank's own are of this call.
        pieces[self._ranks.rank] = part.movedim(dim, 0)
        return torch.cat(pieces).movedim(0, dim)

    def hand_over(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None:
        kind = "hand over", *({rank: tensor.shape for rank, tensor in each.items()} for each in (outgoing, incoming))
        arrived = self._arrived(kind)
        if arrived is None:
            self._ranks.hand_over(outgoing, incoming)
            kept = dict(incoming)
            self._keep(kind, lambda: kept)
            return
        if not self._is_last:
            landing = {rank: torch.empty_like(tensor) for rank, tensor in incoming.items()}
            wait = self._ranks.start_hand_over(outgoing, landing)
            self._keep(kind, lambda: (wait(), landing)[1])
        for rank, tensor in arrived().items():
            incoming[rank].copy_(tensor)

    def _arrived(self, kind: Any) -> Callable[[], Any] | None:
        """What waits for the same of the call before; None where this call waits for its own."""
        if not self._is_late:
            return None
        if not self._before or self._before[0][0] != kind:
            # The model computes something else than before: on every rank, since all of them run the same.
            self._is_late = False
            _settle(self._before)
            self._before = []
            return None
        return self._before.pop(0)[1]

    def _keep(self, kind: Any, wait: Callable[[], Any]) -> None:
        if not self._is_last:
            self._now.append((kind, wait))


def _settle(exchanges: list[tuple[Any, Callable[[], Any]]]) -> None:
    for _, wait in exchanges:
        wait()
