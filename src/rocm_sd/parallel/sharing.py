"""`data`: pictures over ranks. Each takes the next one when it is done, so a slow card gets fewer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from torch import distributed as dist

from rocm_sd.parallel.ranks import Ranks, Traffic

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["everybody", "share_out"]

R = TypeVar("R")
_jobs = [0]


def share_out(count: int, draw: Callable[[int], R], picture: Ranks | None = None) -> list[R]:
    """Have `draw(index)` called once for each index, by whoever is free, and all results on every rank, in order.

    Every rank calls this at the same time. `picture`: the ranks that draw one together, and take it together. Results
    travel between processes of one job: pictures, numbers and words.
    """
    together = everybody()
    if together.size == 1:
        return [draw(index) for index in range(count)]
    # Every rank counts its calls alike, so that each of them has a counter of its own.
    _jobs[0] += 1
    counter = f"rocm-sd/{_jobs[0]}"
    store: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001 -- the job's own; another one needs a port

    def taken() -> int:
        index: int = store.add(counter, 1) - 1 if picture is None or picture.rank == 0 else count
        return index if picture is None else int(picture.agree(index)[0])

    drawn: dict[int, R] = {}
    while (index := taken()) < count:
        drawn[index] = draw(index)
    everything: dict[int, R] = {}
    for part in together.agree(drawn):
        everything |= part
    return [everything[index] for index in range(count)]


def everybody() -> Ranks:
    """All ranks of the job."""
    return Ranks("data", dist.group.WORLD if dist.is_initialized() else None, Traffic())
