"""The base of the host's scripts."""

from __future__ import annotations

AlwaysVisible = object()


class Script:
    infotext_fields = None
    paste_field_names = None

    def title(self):
        raise NotImplementedError

    def ui(self, is_img2img):
        pass

    def show(self, is_img2img):  # noqa: ARG002 -- the host's signature
        return True

    def process(self, p, *args):
        pass

    def postprocess(self, p, processed, *args):
        pass
