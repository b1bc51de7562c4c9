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
