"""The backend "rocm_sd" in Diffusers' own attention dispatcher, for models that go through it (Flux, Qwen, Wan, ...).

>>> rocm_sd.integrations.diffusers.register()
>>> pipe.transformer.set_attention_backend("rocm_sd")

Diffusers has a registry of backends, and the names that may be chosen in an enumeration of its own. It offers no way to
add a name, so one member is added to that enumeration: by the explicit call alone, and checked before it is kept.
`rocm_sd.optimize` needs none of this.

`attend` is for the processors: the same question which attention is the op's, and what is kept for stock.
"""

from __future__ import annotations

import logging
import math
from functools import lru_cache
from importlib import import_module
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from rocm_sd.errors import Unsupported
from rocm_sd.ops import attention

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["BACKEND", "attend", "register"]

log = logging.getLogger("rocm_sd")

BACKEND = "rocm_sd"
_MEMBER = "ROCM_SD"
_DISPATCH = "diffusers.models.attention_dispatch"
_HINT = "Use rocm_sd.optimize(pipe), which needs no backend, or install diffusers 0.42."
# What is read of the registry, and of the enumeration: where one is gone, Diffusers has changed.
_OF_REGISTRY = ("_backends", "_constraints", "_supported_arg_names", "_supports_context_parallel", "register")
_OF_NAMES = ("_member_names_", "_member_map_", "_value2member_map_")
_HANDED_OVER = {
    "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa", "return_lse",
    "_parallel_config",
}  # fmt: skip
_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_LOCK = Lock()


def register() -> None:
    """Make "rocm_sd" known to `model.set_attention_backend` and `diffusers.attention_backend`. Again: nothing happens.

    Diffusers makes a backend that was set for one model the default of all. `model.set_attention_backend("native")`
    takes that back; `model.reset_attention_backend()` leaves the default as it is.
    """
    with _LOCK:
        dispatch = _dispatcher()
        registry, names = dispatch._AttentionBackendRegistry, dispatch.AttentionBackendName  # noqa: SLF001
        if BACKEND in registry._backends:  # noqa: SLF001
            return
        native = registry._backends[names.NATIVE]  # noqa: SLF001
        member = _new_name(names)
        registry.register(
            member,
            constraints=list(registry._constraints[names.NATIVE]),  # noqa: SLF001
            supports_context_parallel=names.NATIVE.value in registry._supports_context_parallel,  # noqa: SLF001
        )(_backend_beside(native))


def _dispatcher() -> ModuleType:
    try:
        dispatch = import_module(_DISPATCH)
    except ImportError as error:
        raise _changed("it has no attention dispatcher") from error
    registry = getattr(dispatch, "_AttentionBackendRegistry", None)
    names = getattr(dispatch, "AttentionBackendName", None)
    missing = [name for name in _OF_REGISTRY if not hasattr(registry, name)]
    missing += [name for name in _OF_NAMES if not hasattr(names, name)]
    if missing or getattr(names, "NATIVE", None) is None:
        raise _changed(f"its attention dispatcher has no {', '.join(missing) or 'native backend'}")
    native = registry._supported_arg_names.get(names.NATIVE, set())  # type: ignore[union-attr]  # noqa: SLF001
    if not native >= _HANDED_OVER:
        raise _changed(f"its native attention takes no {', '.join(sorted(_HANDED_OVER - native))}")
    return dispatch


def _changed(reason: str) -> Unsupported:
    import diffusers  # noqa: PLC0415 -- for its version, in a message

    return Unsupported(f"The attention backend {BACKEND}", f"diffusers {diffusers.__version__}: {reason}", hint=_HINT)


def _new_name(names: Any) -> Any:
    """A member of an enumeration that has been made already; taken back where Python does not know it as one then."""
    member = str.__new__(names, BACKEND)
    member._name_, member._value_ = _MEMBER, BACKEND
    member.__objclass__ = names
    member._sort_order_ = len(names._member_names_)
    type.__setattr__(names, _MEMBER, member)
    names._member_names_.append(_MEMBER)
    names._member_map_[_MEMBER] = member
    names._value2member_map_[BACKEND] = member
    if not (names(BACKEND) is member and names[_MEMBER] is member and member in list(names) and member == BACKEND):
        names._member_names_.remove(_MEMBER)
        del names._member_map_[_MEMBER], names._value2member_map_[BACKEND]
        type.__delattr__(names, _MEMBER)
        raise _changed("no name can be added to its attention backends")
    return member


def _backend_beside(native: Any) -> Any:
    def rocm_sd_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any = None,
    ) -> torch.Tensor:
        """[B, S, H, D] like Diffusers' native backend, which is given what the op does not take."""
        if attn_mask is not None or is_causal:
            reason: str | None = "a mask"
        elif dropout_p:
            reason = "dropout"
        elif return_lse:
            reason = "the logarithms of the sums are wanted, too"
        else:
            reason = _why_stock(query, key, value) if _parallel_config is None else "context parallelism"
        if reason is None:
            return attention(query, key, value, _stock_scale(query) if scale is None else scale)
        _note_once(f"The attention backend {BACKEND}", reason)
        out: torch.Tensor = native(
            query,
            key,
            value,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            return_lse=return_lse,
            _parallel_config=_parallel_config,
        )
        return out

    return rocm_sd_attention


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """softmax(q k^T / sqrt(D) + mask) v; q: [B, S, H, D]; k, v: [B, T, H, D]; mask: [B, H, S or 1, T] or None.

    out: [B, S, H, D] in the dtype that stock answers in.
    """
    reason = "a mask" if mask is not None else _why_stock(q, k, v)
    if reason is None:
        return attention(q, k, v, _stock_scale(q))
    _note_once("An attention processor", reason)
    heads = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2)


def _stock_scale(q: torch.Tensor) -> float:
    """As torch computes it: D**-0.5 is another number in the last bit, which is seen in float64."""
    return 1 / math.sqrt(q.shape[-1])


def _why_stock(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """The reason that the op is not for these tensors, now; None: it is."""
    # Asked for each attention, and written to take 3 us.
    if not (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN):
        return "tensors that are sharded or quantised"
    reason = _unlike(q, k, v)
    if reason is None and torch.is_autocast_enabled(q.device.type):
        reason = "autocast, which decides about the dtype itself"
    # The op's backward computes attention once more, which stock's does not.
    if reason is None and torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        reason = "gradients"
    return reason


def _unlike(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    queries, keys = q.shape, k.shape
    if len(queries) != 4 or len(keys) != 4 or keys != v.shape or 0 in keys:
        return "keys and values of other shapes than [batch, tokens, heads, columns]"
    if keys[0] != queries[0] or keys[2:] != queries[2:]:
        return "keys of another batch, or of fewer heads than the queries"
    dtype, device = q.dtype, q.device
    if dtype not in _DTYPES or k.dtype != dtype or v.dtype != dtype:
        return f"a dtype of {dtype} with {k.dtype} and {v.dtype}"
    if k.device != device or v.device != device or device.type == "meta":
        return "tensors on several devices, or without data"
    return None


def _note_once(who: str, reason: str) -> None:
    # Inside of a traced graph a message would break it in two.
    if not torch.compiler.is_compiling():
        _note(who, reason)


@lru_cache(maxsize=256)
def _note(who: str, reason: str) -> None:
    log.info("%s: attention falls back to stock torch (%s).", who, reason)
