"""The host's script "ROCm SD Optimization": its panel, its settings, and what it does around a job."""

from __future__ import annotations

import re
from importlib import import_module, util
from typing import Any

from rocm_sd.engine import LEVELS, QUALITIES
from rocm_sd.errors import InvalidOption
from rocm_sd.integrations.a1111 import host, host_lists, messages
from rocm_sd.integrations.a1111.approximated_steps import DENOISER
from rocm_sd.integrations.a1111.permission import PERMISSION
from rocm_sd.integrations.a1111.switch import SWITCH, Wish
from rocm_sd.integrations.ldm import in_words, quality_of

__all__ = ["INFOTEXT", "hook_in", "pasted"]

INFOTEXT = "ROCm SD"
_SECTION = ("rocm_sd", "ROCm SD")
_IN_NUMBERS = "Quality in numbers"
_WHAT_NUMBERS = (
    "in place of the above where it is not empty: a budget that was measured, such as psnr=32,ssim=0.97, or a setting "
    "to try, such as depth=1,every=3,order=1"
)


def hook_in() -> Any:
    """Hook into the host, and give it the class of its script."""
    callbacks = host.module("script_callbacks")
    callbacks.on_ui_settings(add_settings)
    callbacks.on_list_optimizers(host_lists.list_attention_into)
    callbacks.on_list_unets(host_lists.list_unet_into)
    callbacks.on_model_loaded(_model_loaded)
    callbacks.on_script_unloaded(SWITCH.restore)
    # Hosts without these are exact whatever the quality: they do not say which step it is.
    for name, follow in (("on_cfg_denoiser", DENOISER.begins), ("on_cfg_denoised", DENOISER.ends)):
        if hasattr(callbacks, name):
            getattr(callbacks, name)(follow)
    if util.find_spec("triton") is None:
        messages.say(
            "triton is not installed, so the fused kernels are not used and the ops are those of torch. The builds of "
            "torch for ROCm and CUDA bring it: reinstall torch with its dependencies."
        )
    return _script_class()


def add_settings() -> None:
    """Settings > ROCm SD: what the panel begins with."""
    shared = host.module("shared")
    gradio = import_module("gradio")
    options = {
        "rocm_sd_enabled": shared.OptionInfo(True, "Enable ROCm SD Optimization when the page is opened"),
        "rocm_sd_level": shared.OptionInfo("auto", "Level", gradio.Radio, {"choices": list(LEVELS)}).info(
            "performance captures whole steps, memory captures none, auto decides by what is free"
        ),
        "rocm_sd_quality": shared.OptionInfo("exact", "Quality", gradio.Radio, {"choices": list(QUALITIES)}).info(
            "exact approximates nothing; high and balanced leave out what was measured for the model "
            "(rocm-sd tune --quality), and nothing for others"
        ),
        "rocm_sd_quality_in_numbers": shared.OptionInfo("", _IN_NUMBERS).info(_WHAT_NUMBERS),
        "rocm_sd_vae": shared.OptionInfo(True, "Optimize the VAE, too"),
    }
    for name, option in options.items():
        option.section = _SECTION
        shared.opts.add_option(name, option)


def _setting(name: str, otherwise: Any) -> Any:
    """The scripts may be asked for their panels before the settings are there."""
    return getattr(host.module("shared").opts, name, otherwise)


def _model_loaded(sd_model: Any) -> None:
    """The host calls this for every model that it loads, for a refiner in the middle of a job as well."""
    try:
        reason = SWITCH.again(sd_model)
    except Exception as error:  # noqa: BLE001 -- the host has its model in any case
        SWITCH.restore()
        reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        messages.say(f"the model that was loaded is skipped: {reason}.")


def pasted(parameters: dict[str, Any], part: str) -> Any:
    """What a picture's own text says: enabled, level, quality or quality in numbers; None, which changes nothing, if it
    says nothing.
    """
    text = parameters.get(INFOTEXT)
    if text is None:
        return None
    if part == "enabled":
        return True
    # Numbers have commas in them, and no space after one.
    found = re.search(rf"\b{'level' if part == 'level' else 'quality'} (\S+?)(?:, |$)", str(text))
    said = found.group(1) if found else None
    if part != "quality in numbers":
        return said if said in {"level": LEVELS, "quality": QUALITIES}[part] else None
    if said is None or said in QUALITIES:
        return None if said is None else ""
    return said if _why_not_quality(said) is None else None


def _script_class() -> Any:
    scripts = host.module("scripts")
    gradio = import_module("gradio")
    base: Any = scripts.Script

    class ROCmSDOptimization(base):  # type: ignore[misc]  # the host's class has no types
        def title(self) -> str:
            return messages.TITLE

        def show(self, is_img2img: bool) -> Any:  # noqa: ARG002 -- the host's signature
            return scripts.AlwaysVisible

        def ui(self, is_img2img: bool) -> list[Any]:  # noqa: ARG002 -- the host's signature
            with gradio.Accordion(messages.TITLE, open=False):
                enabled = gradio.Checkbox(label="Enable", value=bool(_setting("rocm_sd_enabled", True)))
                level = gradio.Radio(list(LEVELS), label="Level", value=_setting("rocm_sd_level", "auto"))
                quality = gradio.Radio(list(QUALITIES), label="Quality", value=_setting("rocm_sd_quality", "exact"))
                in_numbers = gradio.Textbox(
                    label=_IN_NUMBERS, value=_setting("rocm_sd_quality_in_numbers", ""), placeholder=_WHAT_NUMBERS
                )
                shown = gradio.HTML(_panel())
                gradio.Button("What is replaced").click(fn=_panel, inputs=[], outputs=[shown])
            self.infotext_fields = [
                (enabled, lambda parameters: pasted(parameters, "enabled")),
                (level, lambda parameters: pasted(parameters, "level")),
                (quality, lambda parameters: pasted(parameters, "quality")),
                (in_numbers, lambda parameters: pasted(parameters, "quality in numbers")),
            ]
            self.paste_field_names = [INFOTEXT]
            return [enabled, level, quality, in_numbers]

        def process(
            self, p: Any, enabled: bool = False, level: str = "auto", quality: str = "exact", in_numbers: str = ""
        ) -> None:
            """Before each job, and before the host chooses its UNet for it."""
            chosen = in_words(quality, in_numbers)
            wish = Wish(level, chosen, bool(_setting("rocm_sd_vae", True))) if enabled else None
            try:
                reason = _why_not_wish(wish) or SWITCH.settle(host.module("shared").sd_model, wish)
            except Exception as error:  # noqa: BLE001 -- the job goes on as without the extension
                SWITCH.restore()
                reason = f"{type(error).__name__}: {error}"
            if reason is not None:
                _say(p, f"not used for this picture: {reason}")
            elif enabled:
                p.extra_generation_params[INFOTEXT] = SWITCH.infotext()

        def postprocess(self, p: Any, processed: Any, *args: Any) -> None:  # noqa: ARG002 -- the host's signature
            """What went wrong while the picture was made, under the picture."""
            SWITCH.forget_features()
            if PERMISSION.broken is not None:
                processed.comments = f"{processed.comments}\nROCm SD: {PERMISSION.broken}".strip()

    return ROCmSDOptimization


def _why_not_wish(wish: Wish | None) -> str | None:
    """An API's caller may send anything."""
    if wish is None:
        return None
    if wish.level not in LEVELS:
        return f"level {wish.level!r} is not known: {', '.join(LEVELS)}"
    return _why_not_quality(wish.quality)


def _why_not_quality(text: str) -> str | None:
    try:
        quality_of(text)
    except InvalidOption as error:
        return str(error)
    return None


def _say(p: Any, sentence: str) -> None:
    messages.say(sentence)
    # Shown under the picture; hosts before 1.6 have no place for it.
    comment = getattr(p, "comment", None)
    if comment is not None:
        comment(f"ROCm SD: {sentence}")


def _panel() -> str:
    return messages.as_html([*SWITCH.report(), *messages.latest()])
