"""The models that this user draws with, as data: their configs and the shapes of their calls, for `rocm-sd tune`.

One small JSON file for each kind of call, beside the database: two processes write two files. Nothing of a picture is
kept, neither a prompt nor a weight; what tuning needs are shapes.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.errors import RocmSdError
from rocm_sd.files import write_text
from rocm_sd.ops.samples import dtype_name
from rocm_sd.plain_json import read_json
from rocm_sd.tuning.entries import now
from rocm_sd.tuning.location import default_path

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import nn

__all__ = ["DrawnCall", "note", "noted", "with_tensors"]

log = logging.getLogger("rocm_sd")

_MOST = 32  # kinds of calls, the newest; each is a few kilobytes
_PLAIN = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class DrawnCall:
    """A model by its class and config, `part` of it where only that is called, and a call: tensors as their shapes."""

    model: str
    part: str
    config: dict[str, Any]
    dtype: str
    args: list[Any]
    kwargs: dict[str, Any]
    times: int
    when: str


def note(owner: nn.Module, part: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], times: int) -> None:
    """Keep a call of `owner`, or of its `part`; `times` a picture. What no JSON can hold is not kept."""
    config: Any = getattr(owner, "config", None)
    parameter = next(owner.parameters(), None)
    if parameter is None or not hasattr(config, "items"):
        return
    facts = {name: value for name, value in config.items() if not name.startswith("_")}
    try:
        given = (_as_data(args), _as_data(dict(kwargs)))
        made = DrawnCall(type(owner).__name__, part, facts, dtype_name(parameter.dtype), *given, times, now())
        text = json.dumps(asdict(made), indent=1, allow_nan=False)
        same = json.dumps({**asdict(made), "when": ""}, sort_keys=True)
        folder = _folder()
        write_text(folder / f"{hashlib.sha256(same.encode()).hexdigest()[:16]}.json", text)
        for old in sorted(folder.glob("*.json"), key=_changed, reverse=True)[_MOST:]:
            old.unlink(missing_ok=True)
    except (TypeError, ValueError, OSError, RocmSdError) as error:
        log.info("%s is not noted for rocm-sd tune: %s", type(owner).__name__, error)


def noted() -> list[DrawnCall]:
    """What was drawn with here, the newest first; a file that cannot be read is passed over."""
    found = [_read(path) for path in _folder().glob("*.json")]
    return sorted((call for call in found if call is not None), key=lambda call: call.when, reverse=True)


def with_tensors(value: Any, device: torch.device) -> Any:
    """The arguments of a call again: empty tensors of the noted shapes."""
    if isinstance(value, dict) and value.keys() == {"shape", "dtype"}:
        return torch.empty(value["shape"], dtype=getattr(torch, value["dtype"]), device=device)
    if isinstance(value, dict):
        return {name: with_tensors(each, device) for name, each in value.items()}
    return [with_tensors(each, device) for each in value] if isinstance(value, list) else value


def _folder() -> Path:
    return default_path().with_name("drawn")


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another process removed it
        return 0.0


def _as_data(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {"shape": list(value.shape), "dtype": dtype_name(value.dtype)}
    if isinstance(value, dict):
        return {str(name): _as_data(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_data(each) for each in value]
    if not isinstance(value, _PLAIN):
        raise TypeError(f"a {type(value).__name__} among its arguments")
    return value


def _read(path: Path) -> DrawnCall | None:
    try:
        call = DrawnCall(**read_json(path, ValueError, of=dict))
        for name, kind in (("model", str), ("part", str), ("config", dict), ("args", list), ("kwargs", dict)):
            if not isinstance(getattr(call, name), kind):
                raise TypeError(f"{name} is no {kind.__name__}")  # noqa: TRY301 -- one way out for all that is wrong
        with_tensors([call.args, call.kwargs, {"shape": [call.times], "dtype": call.dtype}], torch.device("meta"))
        return replace(call, when=str(call.when))
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        log.warning("%s is passed over: %s", path, error)
        return None
