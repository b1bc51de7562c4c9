"""Lists of functions that the host calls."""

from __future__ import annotations

callbacks: dict[str, list] = {}


def _add(kind, callback):
    callbacks.setdefault(kind, []).append(callback)


def on_ui_settings(callback, *, name=None):
    _add("ui_settings", callback)


def on_model_loaded(callback, *, name=None):
    _add("model_loaded", callback)


def on_list_optimizers(callback, *, name=None):
    _add("list_optimizers", callback)


def on_list_unets(callback, *, name=None):
    _add("list_unets", callback)


def on_script_unloaded(callback, *, name=None):
    _add("script_unloaded", callback)


def on_cfg_denoiser(callback, *, name=None):
    _add("cfg_denoiser", callback)


def on_cfg_denoised(callback, *, name=None):
    _add("cfg_denoised", callback)


class CFGDenoiserParams:
    def __init__(
        self, x, image_cond, sigma, sampling_step, total_sampling_steps, text_cond, text_uncond, denoiser=None
    ):
        self.x, self.image_cond, self.sigma, self.denoiser = x, image_cond, sigma, denoiser
        self.sampling_step, self.total_sampling_steps = sampling_step, total_sampling_steps
        self.text_cond, self.text_uncond = text_cond, text_uncond


def cfg_denoiser_callback(params):
    for callback in callbacks.get("cfg_denoiser", []):
        callback(params)


def cfg_denoised_callback(params):
    for callback in callbacks.get("cfg_denoised", []):
        callback(params)


def model_loaded_callback(sd_model):
    for callback in callbacks.get("model_loaded", []):
        callback(sd_model)


def list_unets_callback():
    found = []
    for callback in callbacks.get("list_unets", []):
        callback(found)
    return found


def list_optimizers_callback():
    found = []
    for callback in callbacks.get("list_optimizers", []):
        callback(found)
    return found
