"""What is rounded to 8 bits by a pass of its own, and not by the norm or gate before it."""

from __future__ import annotations


def passes_that_round(monkeypatch, module):
    """The shapes of what the module's own `quantize_rows` gets from now on."""
    calls, own = [], module.quantize_rows

    def noted(x, *rest):
        calls.append(tuple(x.shape))
        return own(x, *rest)

    monkeypatch.setattr(module, "quantize_rows", noted)
    return calls
