"""An entry in the host's list of UNets (Settings > Stable Diffusion > SD Unet): its own UNet, called from graphs.

"Automatic", which is the host's default, takes the entry whose model name is that of the checkpoint at work. Ours has
that name while the optimisation is on, so that nobody has to choose it, and no file of the host is touched.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from rocm_sd.integrations.a1111 import host
from rocm_sd.integrations.a1111.switch import SWITCH

__all__ = ["LABEL", "list_into"]

LABEL = "ROCm SD"


def _original_forward(unet: Any) -> Any:
    """The forward that the host has put its own question for another UNet around."""
    package = type(unet).__module__.partition(".")[0]
    original = getattr(host.module("sd_hijack"), f"{package}_original_forward", None)
    return original or host.module("sd_unet").original_forward


def list_into(found: list[Any]) -> None:
    """The host's callback: adds ours to its list of UNets."""
    found.append(_option(host.module("sd_unet")))


@lru_cache(maxsize=1)
def _option(sd_unet: Any) -> Any:
    """One and the same whenever the list is made anew: the host would take another one for another UNet."""
    unet_base: Any = sd_unet.SdUnet
    option_base: Any = sd_unet.SdUnetOption

    class ROCmSdUnet(unet_base):  # type: ignore[misc]  # the host's class has no types
        def forward(self, x: Any, timesteps: Any, context: Any, *args: Any, **kwargs: Any) -> Any:
            unet = host.module("shared").sd_model.model.diffusion_model
            return SWITCH.call(_original_forward(unet), unet, (x, timesteps, context, *args), kwargs)

        def activate(self) -> None:
            # The host makes room for another UNet; this one is its own.
            shared, devices = host.module("shared"), host.module("devices")
            if not getattr(shared.sd_model, "lowvram", False):
                shared.sd_model.model.diffusion_model.to(devices.device)

        def deactivate(self) -> None:
            SWITCH.forget_graphs()

    class ROCmSdUnetOption(option_base):  # type: ignore[misc]  # the host's class has no types
        label = LABEL

        @property
        def model_name(self) -> str | None:
            sd_model = host.module("shared").sd_model
            if not SWITCH.is_on(sd_model) or _original_forward(sd_model.model.diffusion_model) is None:
                return None
            return str(sd_model.sd_checkpoint_info.model_name)

        def create_unet(self) -> Any:
            return ROCmSdUnet()

    return ROCmSdUnetOption()
