"""lookup(op, arch, problem) -> Choice: exact shape first, then the bucket, then the static choice, else stock torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

from rocm_sd import settings
from rocm_sd.errors import RocmSdError
from rocm_sd.kernels.config import NO_CONFIG, Config, OpenConfig
from rocm_sd.plain_json import NotPlain, parsed

if TYPE_CHECKING:
    from importlib.abc import Traversable
    from pathlib import Path

__all__ = [
    "STOCK", "Choice", "Problem", "Source", "entries", "entries_with_figures", "lookup", "was_timed", "within",
]  # fmt: skip

Problem = Mapping[str, "int | str"]
Source = Literal["forced", "measured here", "exact", "bucket", "static", "stock"]

STOCK = "torch"  # the name of the stock implementation of every op


@dataclass(frozen=True)
class Choice:
    """An implementation by name with its config, where the choice came from, and why in one sentence.

    `others` has the configs of implementations that were not chosen, by name: what they run with when they are asked
    for by name.
    """

    implementation: str
    config: Config = NO_CONFIG
    source: Source = "stock"
    why: str = ""
    others: Mapping[str, Config] = field(default_factory=dict)

    @property
    def is_stock(self) -> bool:
        return self.implementation == STOCK

    def config_for(self, name: str) -> Config:
        """The config of an implementation, chosen or not."""
        return self.config if name == self.implementation else self.others.get(name, NO_CONFIG)


def _table(op: str, arch: str) -> Mapping[str, Any] | None:
    return _read(settings.current().data_dir, op, arch)


@cache
def _read(instead: Path | None, op: str, arch: str) -> Mapping[str, Any] | None:
    resource = _folder(instead, arch).joinpath(f"{op}.json")
    if not resource.is_file():
        return None
    try:
        table = parsed(resource.read_bytes())
    except (OSError, NotPlain) as error:
        raise _unreadable(resource, str(error)) from error
    if not isinstance(table, dict):
        raise _unreadable(resource, "it is not an object")
    return table


def _unreadable(resource: Traversable, why: str) -> RocmSdError:
    return RocmSdError(f"{resource} is no tuning data ({why}).", hint="Mend it, or unset ROCM_SD_DATA.")


def _folder(instead: Path | None, arch: str) -> Traversable:
    return files(__package__).joinpath(f"data/{arch}") if instead is None else instead / arch


def was_timed(arch: str) -> bool:
    """Whether the shipped data of an architecture were measured on a card of it, and not only modelled."""
    return _was_timed(settings.current().data_dir, arch)


@cache
def _was_timed(instead: Path | None, arch: str) -> bool:
    folder = _folder(instead, arch)
    names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
    tables = (_read(instead, name.removesuffix(".json"), arch) for name in names if name.endswith(".json"))
    return any(table is not None and table.get("source") == "measured" for table in tables)


def within(limits: Mapping[str, Any], problem: Problem) -> bool:
    """Each limit is a value that must be equal, or a [low, high] range, both ends included."""
    for name, limit in limits.items():
        value = problem.get(name)
        if value is None:
            return False
        if isinstance(limit, list):
            low, high = limit
            if not low <= value <= high:
                return False
        elif value != limit:
            return False
    return True


def lookup(op: str, arch: str, problem: Problem, defaults: Mapping[str, Config] | None = None) -> Choice:
    """An architecture without data inherits nothing from another: it gets stock torch.

    `defaults` are the configs that the op's implementations run with where nothing was tuned: each gets one of that
    very class, if the data have one that fits, and what is chosen has its default otherwise. Without them configs are
    as the data have them.
    """
    table = _table(op, arch)
    if table is None:
        return Choice(STOCK, why=f"no data for {op} on {arch}")
    source, entry = entry_for(table, problem)
    chosen = entry["implementation"]
    found = {name: entry_for(part, problem)[1].get("config") for name, part in table.get("others", {}).items()}
    # Where stock torch or a library is chosen, the entry has the config of the kernel that was searched.
    owner = chosen if defaults and defaults.get(chosen) else searched_kernel(table)
    found[owner] = entry.get("config")
    classes = dict.fromkeys(found, OpenConfig()) if defaults is None else defaults
    fitting = {name: classes[name].fitting(each) for name, each in found.items() if each and name in classes}
    configs = {name: config for name, config in fitting.items() if config is not None}
    config = configs.pop(chosen, classes.get(chosen, NO_CONFIG))
    return Choice(chosen, config, source, entry["why"], configs)


def entry_for(part: Mapping[str, Any], problem: Problem) -> tuple[Source, Mapping[str, Any]]:
    """The entry that fits, of a whole table or of the part that it has for another implementation."""
    sources: tuple[Source, ...] = ("exact", "bucket")
    for source in sources:
        for entry in part.get(source, ()):
            if within(entry["when"], problem):
                return source, entry
    return "static", part["static"]


def entries(op: str, arch: str, problem: Problem) -> dict[str, Mapping[str, Any]]:
    """The whole entry of each kernel that the data know there, by implementation: what `lookup` chooses from.

    Where stock torch or a library is chosen, the entry is that of the kernel that was searched, and is named after it.
    """
    found = {name: entry_for(part, problem)[1] for name, part in _parts(op, arch).items()}
    return {name: entry for name, entry in found.items() if "config" in entry}


def entries_with_figures(op: str, arch: str, implementation: str) -> list[Mapping[str, Any]]:
    """The entries of all buckets of one kernel."""
    part = _parts(op, arch).get(implementation, {})
    return [entry for entry in part.get("bucket", ()) if "config" in entry and "figures" in entry]


def _parts(op: str, arch: str) -> dict[str, Mapping[str, Any]]:
    table = _table(op, arch)
    if table is None:
        return {}
    return {searched_kernel(table): table, **table.get("others", {})}


def searched_kernel(table: Mapping[str, Any]) -> str:
    """The implementation whose configs the entries of a table have."""
    name: str = table.get("searched", {}).get("implementation", "triton")
    return name
