"""Shallow steps of Automatic1111's UNet: which step a call is, by the counters of the host's denoiser.

The host's denoiser tells scripts before each of its calls, and after; between the two it calls the UNet for the rows of
one batch, at once or in parts. Its own counter is held against the number of steps that the sampler has reported: where
the two do not go together, the sampler does not call once a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from rocm_sd.engine.capture import why_foreign_layer
from rocm_sd.integrations.a1111.a1111_policy import PACKAGES
from rocm_sd.integrations.a1111.permission import PERMISSION
from rocm_sd.integrations.ldm import HostPasses, ShallowSteps, Told, run_pass

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rocm_sd.integrations.a1111.unet_graphs import UnetGraphs
    from rocm_sd.integrations.ldm import HostSetting

__all__ = ["DENOISER", "ApproximatedUnet"]

_UNTOLD = "the host does not say which step it is"
_NOT_ONE = "the sampler does not call it once a step"
_IN_PARTS = "an extension calls it for parts of the picture"
# Samplers by timesteps make a step or two less than they announce.
_FEWER = 2


class DenoiserSteps:
    """Where the host's denoiser is; the host makes one picture at a time, so there is one of these."""

    def __init__(self) -> None:
        self.leave()

    def leave(self) -> None:
        """No picture is being made."""
        self._why: str | None = _UNTOLD
        self._denoiser: Any = None
        self._in_parts: ref[Any] | None = None
        self._number = self._count = self._calls = self._rows = self._rows_in_all = 0
        self._size: Any = None

    def begins(self, params: Any) -> None:
        """The host's callback before the UNet is called for a step. Never raises."""
        try:
            self._begins(params)
        except (AttributeError, TypeError, IndexError):
            self._why = _UNTOLD

    def _begins(self, params: Any) -> None:
        denoiser = params.denoiser
        self._number, self._count, calls = denoiser.step, denoiser.steps, denoiser.total_steps
        self._denoiser, self._calls, self._rows = ref(denoiser), 0, 0
        self._rows_in_all, self._size = params.x.shape[0], params.x.shape[2:]
        # The sampler reports a step once it is made.
        once = calls == self._count and params.sampling_step == max(0, self._number - 1) and self._number < self._count
        self._why = None if once else _NOT_ONE

    def ends(self, _params: Any) -> None:
        """The host's callback after it."""
        self._why = _UNTOLD

    def told(self, x: Any, context: Any, y: Any) -> tuple[Told | None, str | None]:
        """Which step a call is that comes now, or why that cannot be told."""
        denoiser = None if self._denoiser is None else self._denoiser()
        if self._why is not None or denoiser is None:
            return None, self._why or _UNTOLD
        if type(x) is not torch.Tensor or type(context) is not torch.Tensor:
            return None, "it is called in another form than the host's samplers call it"
        call, self._calls, self._rows = self._calls, self._calls + 1, self._rows + x.shape[0]
        if self._rows > self._rows_in_all or x.shape[2:] != self._size:
            self._in_parts = ref(denoiser)
        if self._in_parts is not None and self._in_parts() is denoiser:
            return None, _IN_PARTS
        form = (tuple(x.shape), x.dtype, x.device, tuple(context.shape), None if y is None else tuple(y.shape))
        fewer = 0 if type(denoiser).__name__ == "CFGDenoiserKDiffusion" else _FEWER
        # A prompt may change from step to step: [from:to:when].
        return Told(denoiser, self._number, self._count, call, form, context, fewer), None


DENOISER = DenoiserSteps()


class ApproximatedUnet:
    """`graphs`: those that calls are replayed from, or None."""

    def __init__(self, settings: Sequence[HostSetting], graphs: UnetGraphs | None) -> None:
        # Whatever goes wrong, the host's own forward can say it, or do without.
        self.steps = ShallowSteps(settings, lambda _error: False)
        self._graphs = graphs
        self.called = self.answered = 0

    def call(
        self,
        original: Callable[..., Any],
        unet: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        exact: Callable[[], Any],
        *,
        captures: bool,
    ) -> Any:
        """`exact`: as without approximations; `captures`: whether graphs may be used now."""
        self.answered += 1
        x, _, context, *more = (*args, None, None, None)[: max(4, len(args))]
        told, reason = DENOISER.told(x, context, kwargs.get("y", more[0]))
        reason = reason or _why_exact(original, unet, args, kwargs)

        def plain(depth: int, features: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            return run_pass(original, unet, depth, features, *args, **kwargs)

        def branch(depth: int, features: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            graphs = self._graphs if captures else None
            return plain(depth, features) if graphs is None else graphs.branch(original, depth, features, args, kwargs)

        def stock() -> Any:
            return original(unet, *args, **kwargs)

        def why_not() -> str | None:
            return why_foreign_layer(unet, PACKAGES, methods=("forward", "_forward"))

        return self.steps.answer(unet, told, reason, HostPasses(exact, stock, branch, plain, why_not))

    def notes(self) -> list[str]:
        others = self.called - self.answered
        around = "Settings > Stable Diffusion > SD Unet names another, or an extension calls its blocks itself"
        more = [f"the UNet: {others} calls are exact, because they do not come this way: {around}"] if others else []
        return [*self.steps.notes(), *more]


def _why_exact(original: Any, unet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    reason = PERMISSION.broken or PERMISSION.unet
    if reason is not None:
        return reason
    given = [name for name, value in kwargs.items() if value is not None and name != "y"]
    if given or len(args) > 4:
        return f"it is called with {given[0] if given else 'more than the samplers give'}"
    kind: type = type(unet)
    if getattr(original, "__module__", None) != kind.__module__ or getattr(original, "__name__", None) != "forward":
        return "its forward is not its class's own"
    return None if _joins_plainly(original) else "an extension changes what its blocks join, as FreeU does"


def _joins_plainly(original: Any) -> bool:
    """The host has an object in place of torch there, whose `cat` brings both parts to one size."""
    joins = getattr(original, "__globals__", {}).get("th")
    if joins is torch:
        return True
    join = getattr(type(joins), "cat", None)
    hosts_own = type(joins).__module__ == getattr(join, "__module__", None) == "modules.sd_hijack_unet"
    return hosts_own and "cat" not in vars(joins)
