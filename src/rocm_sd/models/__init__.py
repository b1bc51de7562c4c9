"""The embedded text-to-image model, and finding the one that a user names."""

from rocm_sd.models.source import EMBEDDED, ModelKind, ModelSource, resolve

__all__ = ["EMBEDDED", "ModelKind", "ModelSource", "resolve"]
