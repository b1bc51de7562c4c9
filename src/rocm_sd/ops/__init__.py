"""Level 3: the operators. Importing them needs no GPU and no Triton.

Every package in here is an op, and what it exports is a name of this one: a new op is found, and listed nowhere.
`__init__.pyi` has the names for type checkers; `python tools/docs_tables.py` writes it.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from rocm_sd.ops.registry import OPS

__all__ = ["OPS"]

for _module in iter_modules(__path__):
    if _module.ispkg:
        _package = import_module(f"{__name__}.{_module.name}")
        __all__ += _package.__all__
        globals().update({name: getattr(_package, name) for name in _package.__all__})
