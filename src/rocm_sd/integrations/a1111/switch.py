"""What is on: the host's model with its blocks replaced, and the way back.

There is one for the whole host, as the host has one model at work. `settle` is called before each job; it changes
something only where the wish, the model or what the model is allowed has changed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ref

import rocm_sd
from rocm_sd.engine import convolutions, count_replaced, free_memory
from rocm_sd.engine.capture import graphs_wanted, start_compiling
from rocm_sd.integrations.a1111 import host, messages
from rocm_sd.integrations.a1111.a1111_policy import CAPTURED_RULES, RULES, LoraNetworks, why_not_layers
from rocm_sd.integrations.a1111.approximated_steps import DENOISER, ApproximatedUnet
from rocm_sd.integrations.a1111.permission import PERMISSION
from rocm_sd.integrations.a1111.unet_graphs import UnetGraphs
from rocm_sd.integrations.ldm import settings_for
from rocm_sd.rewrite.apply import Change, apply, undo

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    from rocm_sd.engine import Installed

__all__ = ["SWITCH", "Switch", "UnetGraphs", "Wish", "why_not_model"]

# Level auto captures where so much is free: chosen, not measured. Graphs keep to half of what is free in any case.
_ROOM_FOR_GRAPHS = 2 * 2**30
_KINDS = ("UNetModel",)
# What a setting may say and only the host can do: where it does.
_HOSTS_OWN_WAYS = {
    "guidance": "Settings > Optimizations > Negative Guidance minimum sigma skips some",
    "merged": "Settings > Optimizations > Token merging ratio does",
    "eight_bits": "Settings > Optimizations > FP8 weight keeps weights in fp8",
    "small_decoder": "Settings > VAE > VAE type for decode has TAESD",
}


@dataclass(frozen=True)
class Wish:
    """What the user has chosen on the panel."""

    level: str = "auto"
    quality: str = "exact"
    vae: bool = True


def why_not_model(sd_model: Any) -> str | None:
    """Why this model is skipped, in words; None where it can be optimised."""
    unet = getattr(getattr(sd_model, "model", None), "diffusion_model", None)
    if unet is None:
        return "no model is loaded"
    kind = type(unet)
    if kind.__name__ not in _KINDS or kind.__module__.partition(".")[0] not in ("ldm", "sgm"):
        return f"a model of kind {kind.__name__} is none that it knows: it takes SD 1, SD 2 and SDXL"
    if getattr(sd_model, "lowvram", False):
        return "--medvram or --lowvram moves the model's parts in and out while it works; start without it"
    devices = host.module("devices")
    if getattr(devices, "unet_needs_upcast", False):
        return "--upcast-sampling gives each layer a dtype of its own; start without it"
    if getattr(devices, "fp8", False):
        return "weights in FP8 are cast around each layer; switch FP8 off in Settings > Optimizations"
    return why_not_layers()


class _OptimizedModel:
    """One model with its blocks replaced."""

    def __init__(self, sd_model: Any, wish: Wish) -> None:
        self.wish = wish
        self.model = ref(sd_model)
        unet: nn.Module = sd_model.model.diffusion_model
        self.unet = ref(unet)
        self.device = next(unet.parameters()).device
        self.changes: list[Change] = []
        self._installed: list[Installed] = []
        self._hook: Any = None
        self.library = convolutions.choose_library(self.device)
        self.graphs: UnetGraphs | None = None
        self.approximated: ApproximatedUnet | None = None
        self.why_exact: str | None = None
        self._lora = LoraNetworks(unet)
        try:
            self._install(unet, [unet, sd_model.first_stage_model] if wish.vae else [unet])
        except BaseException:
            self.restore()
            raise

    def _install(self, unet: nn.Module, parts: list[nn.Module]) -> None:
        captures = _may_capture(self.wish.level, self.device) and graphs_wanted(self.device)
        if captures:
            start_compiling(self.device)
            self.graphs = UnetGraphs(unet)
        settings, self.why_exact = settings_for(unet, self.wish.quality, _HOSTS_OWN_WAYS)
        if settings:
            self.approximated = ApproximatedUnet(settings, self.graphs)
        layout = convolutions.choose_layout(
            self.device, next(filter(None, map(convolutions.convolution_dtype, parts)), None)
        )
        reason: str | None = f"its convolutions keep their layout ({layout.why})"
        if layout.implementation == convolutions.CHANNELS_LAST:
            reason = None
            self._installed.append(convolutions.lay_out(parts, layout.why))
        rules = (*RULES, *(CAPTURED_RULES if captures else ()))
        rules = tuple(rule for rule in rules if rule.on_cpu or self.device.type != "cpu")
        for part in parts:
            self.changes += apply(part, rules, not_channels_last=reason)
        # The host calls the UNet through `call`, and the VAE's halves directly.
        halves = [
            half for part in parts[1:] for half in convolutions.convolving_models(part, self.library, is_vae=True)
        ]
        self._installed.append(convolutions.install_library(halves, self.library, has_vae=len(parts) > 1))
        self._hook = unet.register_forward_pre_hook(lambda _module, _args: self._before_call())

    def _before_call(self) -> None:
        """Around every call of the UNet, by the host or by ControlNet's forward in its place."""
        if self.approximated is not None:
            self.approximated.called += 1
        try:
            shared, devices = host.module("shared"), host.module("devices")
            reason = why_not_layers() or self._lora.bring_in()
            if reason is None and getattr(devices, "unet_needs_upcast", False):
                reason = "--upcast-sampling is on"
            PERMISSION.unet = reason
            PERMISSION.attention = not shared.loaded_hypernetworks and not shared.opts.upcast_attn
        except Exception as error:  # noqa: BLE001 -- the host's own forward runs in any case
            PERMISSION.fail("Looking at the host's state", error)
            return
        if reason is not None:
            messages.say(f"the UNet runs as the host has it: {reason}")

    def call(self, original: Callable[..., Any], unet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The UNet's own forward, from a graph where one fits, with the library that was measured to be faster."""
        graphs = self.graphs if self._captures_now() else None

        def exact() -> Any:
            return original(unet, *args, **kwargs) if graphs is None else graphs(original, args, kwargs)

        with self.library.in_force(unet, args, kwargs):
            if self.approximated is None:
                return exact()
            return self.approximated.call(original, unet, args, kwargs, exact, captures=graphs is not None)

    def _captures_now(self) -> bool:
        if PERMISSION.unet is not None or PERMISSION.broken is not None or not PERMISSION.attention:
            return False
        return not getattr(self.model(), "applied_token_merged_ratio", 0)

    def restore(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        if self.graphs is not None:
            self.graphs.calls.clear()
        if self.approximated is not None:
            self.approximated.steps.clear()
        undo(self.changes)
        for installed in reversed(self._installed):
            installed.restore()


def _may_capture(level: str, device: torch.device) -> bool:
    if level != "auto":
        return level == "performance"
    free = free_memory(device)
    return free is None or free >= _ROOM_FOR_GRAPHS


class Switch:
    """Off, or on for one model."""

    def __init__(self) -> None:
        self._on: _OptimizedModel | None = None
        self._wish: Wish | None = None

    def is_on(self, sd_model: Any) -> bool:
        return self._on is not None and self._on.model() is sd_model

    def settle(self, sd_model: Any, wish: Wish | None) -> str | None:
        """Make it so; why it is not, in words, where it cannot be."""
        if wish != self._wish:
            # Off and on again is the user's way to try once more.
            PERMISSION.reset()
        self._wish = wish
        if wish is None:
            self.restore()
            return None
        reason = PERMISSION.broken or why_not_model(sd_model)
        if reason is not None:
            self.restore()
            return reason
        unet = sd_model.model.diffusion_model
        on = self._on
        # A model that was moved, or whose weights were loaded anew in another dtype, is optimised for where it is.
        if on is None or on.model() is not sd_model or on.wish != wish or on.device != next(unet.parameters()).device:
            self.restore()
            PERMISSION.reset()
            self._on = _OptimizedModel(sd_model, wish)
        return None

    def again(self, sd_model: Any) -> str | None:
        """After the host has loaded a model: as the user wished."""
        if self._wish is None:
            return None
        self.restore()
        PERMISSION.reset()
        return self.settle(sd_model, self._wish)

    def restore(self) -> None:
        if self._on is not None:
            self._on.restore()
            self._on = None

    def call(self, original: Callable[..., Any], unet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the host's UNet gives, by `original`, its own forward."""
        on = self._on
        if on is None or on.unet() is not unet:
            return original(unet, *args, **kwargs)
        return on.call(original, unet, args, kwargs)

    def forget_graphs(self) -> None:
        if self._on is not None and self._on.graphs is not None:
            self._on.graphs.calls.clear()

    def forget_features(self) -> None:
        """Once a job is done: they are of no use to the next one."""
        DENOISER.leave()
        if self._on is not None and self._on.approximated is not None:
            self._on.approximated.steps.clear()

    def infotext(self) -> str:
        """For the picture's own metadata: version, level, how many blocks."""
        on = self._on
        if on is None:
            return "off"
        blocks = sum(change.replaced for change in on.changes)
        wish = on.wish
        return f"{rocm_sd.__version__}, level {wish.level}, quality {wish.quality}, {blocks} blocks"

    def report(self) -> list[str]:
        """How many blocks were replaced; then what was replaced and what was skipped, a sentence for each kind."""
        on = self._on
        if on is None:
            return ["off: everything is the host's own"]
        changes = list(map(Change.now, on.changes))
        replaced, blocks = count_replaced(changes)
        counted = Counter((change.kind, change.why_skipped) for change in changes)
        lines = [f"{replaced} of {blocks} blocks replaced, level {on.wish.level}, quality {on.wish.quality}"]
        lines += [
            f"{count} {kind}: replaced" if why is None else f"{count} {kind}: skipped, because {why}"
            for (kind, why), count in counted.items()
        ]
        lines += [*on.library.notes(on.unet()), *(on.library.notes_of_a_vae() if on.wish.vae else ())]
        if PERMISSION.unet is not None:
            lines.append(f"the UNet runs as the host has it: {PERMISSION.unet}")
        if on.why_exact is not None:
            lines.append(f"the UNet: {on.why_exact}")
        if on.approximated is not None:
            lines += on.approximated.notes()
        return lines if on.graphs is None else [*lines, *on.graphs.calls.notes()]


SWITCH = Switch()
