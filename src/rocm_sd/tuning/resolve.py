"""choose(...) -> Choice: what was measured on this card first, then the data that is shipped, else stock torch.

A measurement counts for its own problem, in its own environment, with its own kernel source; nothing is inferred from
it for a neighbour. Where no database is, none is made for asking.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from rocm_sd import arch
from rocm_sd.kernels.config import NO_CONFIG, OpenConfig
from rocm_sd.tuning.choice import STOCK, Choice, Problem, lookup
from rocm_sd.tuning.location import default_path

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from rocm_sd.kernels.config import Config
    from rocm_sd.tuning.database import Database, Entry
    from rocm_sd.tuning.environment import Environment

__all__ = ["choose", "forget", "has_database", "preferred", "user_database"]


def user_database() -> Database:
    """The user's own, at its default path; one for each path and process."""
    return _database(default_path())


def has_database() -> bool:
    """Whether there was one at the first question: a file system may take longer to answer than a kernel to run.

    Of a card that is emulated nothing was ever measured.
    """
    return arch.emulated() is None and _exists(default_path())


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
    plugged: Sequence[Entry] = (),
    defaults: Mapping[str, Config] | None = None,
) -> Choice:
    """Choose among candidates whose kernels have one of these hashes, or that have none.

    `among`: the candidates that the op has; a measurement of another is passed over. `plugged`: measurements of
    plug-ins, which compete with them as they are. `defaults`: as of `lookup`, those of plug-ins among them.
    """
    shipped = lookup(op, arch_name, problem, defaults)
    if not has_database():
        return shipped
    database = user_database()
    own = database.best(op, problem, environment, kernel_hash, among)
    found = [entry for entry in (own, *plugged) if entry is not None]
    if not found:
        return shipped
    best = min(found, key=lambda entry: entry.median_us)
    configs = (shipped.config.to_dict(), {}) if shipped.config else ({},)
    known = (database.find(op, problem, environment, kernel_hash, shipped.implementation, each) for each in configs)
    chosen = preferred(best, next((entry for entry in known if entry is not None), None))
    if chosen.config or any(chosen is entry for entry in plugged):
        config = (defaults or {}).get(chosen.candidate, OpenConfig()).fitting(chosen.config)
    else:
        # It was stored without one.
        config = shipped.config_for(chosen.candidate) or (defaults or {}).get(chosen.candidate, NO_CONFIG)
    return _measured(chosen, config, shipped)


def preferred(best: Entry, shipped: Entry | None) -> Entry:
    """The fastest, unless what the shipped data name may be as fast: of many that are, the fastest was the luckiest.

    Each was timed beside stock, at another moment: shares of stock's time are what can be compared. One that is not
    faster than stock beyond doubt stands back, whoever named it.
    """
    if shipped is None or shipped.stock_us is None or not shipped.clearly_faster or not best.stock_us:
        return best
    beyond_doubt = best.high_us / best.stock_us < shipped.low_us / shipped.stock_us
    return best if beyond_doubt else shipped


def _measured(best: Entry, config: Config | None, shipped: Choice) -> Choice:
    day = best.when[:10]
    if best.candidate == STOCK:
        return _stock(shipped, f"{best.median_us:.1f} us, the fastest here on {day}")
    if best.stock_us is None:
        # Faster than other candidates is not faster than stock.
        return shipped
    if best.stock_us <= best.high_us:
        # Faster within its interval only is not known to be faster.
        return _stock(shipped, f"{best.stock_us:.1f} us, and the next {best.median_us:.1f} us, measured here on {day}")
    if config is None:
        # It does not fit, so it is not from a tuner: a kernel would stop the picture with an error about its arguments.
        return shipped
    why = f"{best.median_us:.1f} us, stock torch {best.stock_us:.1f} us, measured here on {day}"
    return Choice(best.candidate, config, "measured here", why, _configs(shipped))


def _stock(shipped: Choice, why: str) -> Choice:
    return Choice(STOCK, source="measured here", why=why, others=_configs(shipped))


def _configs(choice: Choice) -> Mapping[str, Config]:
    return {**choice.others, choice.implementation: choice.config}


@lru_cache(maxsize=8)
def _exists(path: Path) -> bool:
    return path.exists()


@lru_cache(maxsize=8)
def _database(path: Path) -> Database:
    from rocm_sd.tuning.database import Database  # noqa: PLC0415 -- where there is none, SQLite is not imported

    return Database(path)
