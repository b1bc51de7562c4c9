"""choose(...) -> Choice: what was measured on this card first, then the data that is shipped, else stock torch.

A measurement counts for its own problem, in its own environment, with its own kernel source; nothing is inferred from
it for a neighbour. Where no database is, none is made for asking.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from rocm_sd.tuning.choice import STOCK, Choice, Problem, lookup
from rocm_sd.tuning.location import default_path

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from rocm_sd.tuning.database import Database, Entry
    from rocm_sd.tuning.environment import Environment

__all__ = ["choose", "forget", "has_database", "preferred", "user_database"]


def user_database() -> Database:
    """The user's own, at its default path; one for each path and process."""
    return _database(default_path())


def has_database() -> bool:
    """As of the first time that it was asked: a file system may take longer to answer than a kernel to run."""
    return _exists(default_path())


def forget() -> None:
    """Look again whether there is a database."""
    _exists.cache_clear()


def choose(
    op: str,
    arch_name: str,
    problem: Problem,
    environment: Environment,
    kernel_hash: str | Collection[str],
    among: Collection[str] | None = None,
    others: Sequence[Entry] = (),
) -> Choice:
    """Of candidates whose kernels have one of these hashes, or that have none.

    `among`: the candidates that the op has; a measurement of another is passed over. `others`: measurements of
    plug-ins, which compete with them as they are.
    """
    shipped = lookup(op, arch_name, problem)
    if not has_database():
        return shipped
    database = user_database()
    own = database.best(op, problem, environment, kernel_hash, among)
    found = [entry for entry in (own, *others) if entry is not None]
    if not found:
        return shipped
    best = min(found, key=lambda entry: entry.median_us)
    configs = (shipped.config, {}) if shipped.config else ({},)
    known = (database.find(op, problem, environment, kernel_hash, shipped.implementation, each) for each in configs)
    chosen = preferred(best, next((entry for entry in known if entry is not None), None))
    measured = _measured(chosen, shipped)
    # One without a config has none: those of the data are for the op's own.
    return replace(measured, config=chosen.config) if any(chosen is entry for entry in others) else measured


def preferred(best: Entry, shipped: Entry | None) -> Entry:
    """The fastest, unless what the shipped data name may be as fast: of many that are, the fastest was the luckiest.

    Each was timed beside stock, at another moment: shares of stock's time are what can be compared. One that is not
    faster than stock beyond doubt stands back, whoever named it.
    """
    if shipped is None or shipped.stock_us is None or not shipped.clearly_faster or best.stock_us is None:
        return best
    beyond_doubt = best.high_us / best.stock_us < shipped.low_us / shipped.stock_us
    return best if beyond_doubt else shipped


def _measured(best: Entry, shipped: Choice) -> Choice:
    day = best.when[:10]
    if best.candidate == STOCK:
        # Its config is the kernel's, for when it is asked for by name.
        why = f"{best.median_us:.1f} us, the fastest here on {day}"
        return replace(shipped, implementation=STOCK, source="measured here", why=why)
    if best.stock_us is None:
        # Faster than other candidates is not faster than stock.
        return shipped
    if best.stock_us <= best.high_us:
        # Faster within its interval only is not known to be faster.
        why = f"{best.stock_us:.1f} us, and the next {best.median_us:.1f} us, measured here on {day}"
        return replace(shipped, implementation=STOCK, source="measured here", why=why)
    why = f"{best.median_us:.1f} us, stock torch {best.stock_us:.1f} us, measured here on {day}"
    config = best.config or shipped.config_for(best.candidate)
    return Choice(best.candidate, config, "measured here", why, shipped.others)


@lru_cache(maxsize=8)
def _exists(path: Path) -> bool:
    return path.exists()


@lru_cache(maxsize=8)
def _database(path: Path) -> Database:
    from rocm_sd.tuning.database import Database  # noqa: PLC0415 -- where there is none, SQLite is not imported

    return Database(path)
