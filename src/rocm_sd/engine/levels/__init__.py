"""Speed against memory: what a level means for a pipeline on its device, and how it is carried out."""

from rocm_sd.engine.levels.decision import (
    LEVELS,
    Decision,
    Placement,
    decide,
    install,
    modules_of,
    placement,
    reckon_with,
)

__all__ = ["LEVELS", "Decision", "Placement", "decide", "install", "modules_of", "placement", "reckon_with"]
