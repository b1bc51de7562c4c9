"""Triton's interpreter, with the same results in half the time."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any


def quicken() -> None:
    """Raises ImportError without Triton, and AttributeError or TypeError with one that is made otherwise."""
    from triton import language
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        # Every sum and product of integers is computed once more in 64 bits, for an assertion that is made in debug
        # mode alone: half of the interpreter's time, and nothing is done with it.
        builder.options = replace(builder.options, sanitize_overflow=False)
    patch, nothing_changed = interpreter._patch_lang, interpreter._LangPatchScope

    @functools.cache
    def seen_by(fn: Any) -> tuple[Any, ...]:
        return tuple(each for each in fn.__globals__.values() if each is language or each is language.core)

    def patch_once(fn: Any) -> Any:
        """A function that a kernel calls finds the language as the launch has changed it: not again for each call."""
        seen = seen_by(fn)
        if seen and all(each.static_print is print for each in seen):
            return nothing_changed()
        return patch(fn)

    interpreter._patch_lang = patch_once
