"""What is rounded to 8 bits by a pass of its own, and not by the norm or gate before it."""

from __future__ import annotations

from rocm_sd.arch import CPU, Arch


def passes_that_round(monkeypatch, module):
    """The shapes of what the module's own `quantize_rows` gets from now on."""
    calls, own = [], module.quantize_rows

    def noted(x, *rest):
        calls.append(tuple(x.shape))
        return own(x, *rest)

    monkeypatch.setattr(module, "quantize_rows", noted)
    return calls


def as_if_the_cpu_multiplied_fp8(monkeypatch):
    """So that what comes into layers in fp8 is rounded there, too."""
    own = Arch.multiplies
    monkeypatch.setattr(Arch, "multiplies", lambda here, to: own(here, to) or (here is CPU and to == "float8_e4m3fn"))
