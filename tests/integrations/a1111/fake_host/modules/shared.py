"""The host's state: its settings and its model."""

from __future__ import annotations

from types import SimpleNamespace


class OptionInfo:
    def __init__(self, default=None, label="", component=None, component_args=None):
        self.default, self.label = default, label
        self.component, self.component_args = component, component_args
        self.section, self.comment_after = None, ""

    def info(self, info):
        self.comment_after += info
        return self


class Options:
    def __init__(self):
        self.data_labels = {}
        self.sd_unet, self.upcast_attn, self.lora_functional = "Automatic", False, False
        self.batch_cond_uncond = True

    def add_option(self, key, info):
        self.data_labels[key] = info
        if not hasattr(self, key):
            setattr(self, key, info.default)


opts = Options()
loaded_hypernetworks: list = []
sd_model = None
state = SimpleNamespace(sampling_step=0, sampling_steps=0)
