"""Process groups, made once for a job and kept: each has connections and buffers of its own, and takes time to make.

A pipeline may be split anew many times, as a search for its quality does. All ranks that take part in the making of a
group ask for it alike, so each of them finds it here, or none does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["forget_groups", "group_by_its_members", "mesh_of", "neighbours"]

_KEPT: dict[Hashable, Any] = {}
# The job that they are of: somebody may have ended it, and begun another one.
_JOB: list[Any] = [None]


def mesh_of(kind: str, dims: Mapping[str, int]) -> DeviceMesh:
    """Every rank of the job calls this. `kind`: of the devices."""

    def make() -> DeviceMesh:
        return init_device_mesh(kind, tuple(dims.values()), mesh_dim_names=tuple(dims))

    mesh: DeviceMesh = _kept(("mesh", kind, *dims.items()), make)
    return mesh


def neighbours(count: int) -> dist.ProcessGroup | None:
    """Of the groups of so many ranks that follow one another, the one that this rank is in; None for one rank alone."""
    if count == 1:
        return None

    def make() -> list[dist.ProcessGroup]:
        # Every rank takes part in the making of every group.
        return [dist.new_group(list(range(first, first + count))) for first in range(0, dist.get_world_size(), count)]

    groups: list[dist.ProcessGroup] = _kept(("neighbours", count), make)
    return groups[dist.get_rank() // count]


def group_by_its_members(members: Sequence[int]) -> dist.ProcessGroup:
    """They alone take part in the making."""
    group: dist.ProcessGroup = _kept(
        ("members", *members), lambda: dist.new_group(list(members), use_local_synchronization=True)
    )
    return group


def forget_groups() -> None:
    _KEPT.clear()
    _JOB[0] = None


def _kept(key: Hashable, make: Callable[[], Any]) -> Any:
    if _JOB[0] is not dist.group.WORLD:
        forget_groups()
        _JOB[0] = dist.group.WORLD
    if key not in _KEPT:
        _KEPT[key] = make()
    return _KEPT[key]
