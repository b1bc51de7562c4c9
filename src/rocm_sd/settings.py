"""Every environment variable that is read, typed, in one place. `rocm-sd info --json` prints the values in force."""

from __future__ import annotations

import os
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from rocm_sd.errors import InvalidOption, require_known

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["VARIABLES", "Settings", "Variable", "current", "implementation_for", "note_op", "stock_implementations"]


@dataclass(frozen=True)
class Variable:
    """One environment variable: the field of `Settings` that it fills, how it is parsed, and what it does."""

    name: str
    field: str
    parse: Callable[[str], Any]
    effect: str


def _flag(text: str) -> bool:
    values = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in values:
        raise ValueError(text)
    return values[text.lower()]


def _log_level(text: str) -> str:
    if text.upper() not in {"DEBUG", "INFO", "WARNING", "ERROR"}:
        raise ValueError(text)
    return text.upper()


def _implementations(text: str) -> tuple[tuple[str, str], ...]:
    """`group_norm_silu=torch,attention=triton` as pairs; hashable, since `Settings` is."""
    pairs = [entry.split("=", 1) for entry in text.split(",") if entry]
    if any(len(pair) != 2 or not all(pair) for pair in pairs):
        raise ValueError(text)
    named = tuple((op.strip(), name.strip()) for op, name in pairs)
    # Not asked of the ops themselves, which need torch; whether an op has the implementation, `optimize` asks.
    require_known("ROCM_SD_IMPLEMENTATION op", (op for op, _ in named), _op_names())
    return named


@cache
def _op_names() -> dict[str, None]:
    """Every package in ops/ is an op, of its name; `note_op` adds what a program defines besides."""
    return {each.name: None for each in iter_modules([str(Path(__file__).parent / "ops")]) if each.ispkg}


def note_op(name: str) -> None:
    """There is an op of that name, for which ROCM_SD_IMPLEMENTATION may name an implementation."""
    _op_names()[name] = None


VARIABLES: tuple[Variable, ...] = (
    Variable("ROCM_SD_LOG", "log_level", _log_level, "DEBUG, INFO, WARNING (default) or ERROR."),
    Variable("ROCM_SD_DEBUG", "debug", _flag, "1 shows the traceback of an error, like --debug."),
    Variable(
        "ROCM_SD_IMPLEMENTATION",
        "implementations",
        _implementations,
        "Implementation per op by name, e.g. group_norm_silu=torch,attention=triton; never falls back.",
    ),
    Variable(
        "ROCM_SD_STEP_GRAPH",
        "step_graph",
        _flag,
        "0 captures no graphs and keeps schedulers stock; 1 captures calls on a CPU, too, which only tests need.",
    ),
    Variable(
        "ROCM_SD_CALIBRATE",
        "calibrate",
        _flag,
        "0 measures nothing at the first picture of a model on a card; 1 measures on any device.",
    ),
    Variable(
        "ROCM_SD_EMULATE",
        "emulate",
        str,
        "An AMD card that is not there, e.g. gfx1100: kernels run as its machine code on the CPU, very slowly.",
    ),
    Variable("ROCM_SD_CACHE", "cache_dir", Path, "Folder for compiled code and measurements."),
    Variable(
        "ROCM_SD_DATA",
        "data_dir",
        Path,
        "Folder of tuning data in place of the shipped ones; an empty one makes every card one that nobody has timed.",
    ),
    Variable(
        "ROCM_SD_TORCH", "torch_build", str, "Read by set-up only: auto, rocm, cuda, cpu, a gfx id or an index URL."
    ),
    Variable("TRITON_INTERPRET", "triton_interpret", _flag, "Triton's own: 1 runs its kernels on the CPU, slowly."),
    Variable("ROCM_PATH", "rocm_path", Path, "ROCm's own: where it is installed (default /opt/rocm)."),
    Variable(
        "HSA_OVERRIDE_GFX_VERSION",
        "hsa_override",
        str,
        "ROCm's own: pretends to another gfx; `rocm-sd info` shows it beside the real one.",
    ),
)


@dataclass(frozen=True)
class Settings:
    log_level: str = "WARNING"
    debug: bool = False
    implementations: tuple[tuple[str, str], ...] = ()
    step_graph: bool | None = None
    calibrate: bool | None = None
    emulate: str | None = None
    cache_dir: Path | None = None
    data_dir: Path | None = None
    torch_build: str | None = None
    triton_interpret: bool = False
    rocm_path: Path | None = None
    hsa_override: str | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        values: dict[str, Any] = {}
        for variable in VARIABLES:
            text = environment.get(variable.name, "")
            if not text:
                continue
            try:
                values[variable.field] = variable.parse(text)
            except ValueError:
                raise InvalidOption(variable.name, text, [], hint=f"Its meaning: {variable.effect}") from None
        return cls(**values)

    def implementation_for(self, op: str) -> str | None:
        return dict(self.implementations).get(op)

    def to_dict(self) -> dict[str, Any]:
        by_field = {variable.field: variable.name for variable in VARIABLES}
        return {by_field[f.name]: _plain(getattr(self, f.name)) for f in fields(self)}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return dict(value)
    if isinstance(value, Path):
        return str(value)
    return value


@lru_cache(maxsize=8)
def _parsed(texts: tuple[str, ...]) -> Settings:
    return Settings.from_environment({v.name: text for v, text in zip(VARIABLES, texts, strict=True)})


@lru_cache(maxsize=8)
def _named_by(text: str) -> Settings:
    return Settings.from_environment({"ROCM_SD_IMPLEMENTATION": text})


# What os.environ keeps, and the name as it is kept there: through its own methods, which encode and decode, a look
# takes 0.7 us, a third of all that finds the call of an op.
_ENVIRONMENT: Any = getattr(os.environ, "_data", os.environ)
_ENCODED: Any = getattr(os.environ, "encodekey", str)("ROCM_SD_IMPLEMENTATION")
_STOCK_OPS: ContextVar[frozenset[str]] = ContextVar("rocm_sd_stock_ops", default=frozenset())


@contextmanager
def stock_implementations(ops: frozenset[str]) -> Iterator[None]:
    """These ops run as stock torch within, whatever the environment or the tuning data say."""
    token = _STOCK_OPS.set(ops)
    try:
        yield
    finally:
        _STOCK_OPS.reset(token)


def implementation_for(op: str) -> str | None:
    """What `current()` has for an op, at a tenth of its cost: every call of an op asks."""
    if op in _STOCK_OPS.get():
        return "torch"
    if _ENCODED not in _ENVIRONMENT:
        return None
    text = os.environ.get("ROCM_SD_IMPLEMENTATION")
    return _named_by(text).implementation_for(op) if text else None


def current() -> Settings:
    """The settings in force now; parsed again only when a variable has changed."""
    return _parsed(tuple(os.environ.get(variable.name, "") for variable in VARIABLES))
