"""The error of a kernel that cannot be had, whatever language it is in."""

from __future__ import annotations

from typing import ClassVar

from rocm_sd.errors import RocmSdError

__all__ = ["KernelUnavailable"]


class KernelUnavailable(RocmSdError):
    """A kernel could not be compiled or loaded, so nothing of it has run: another implementation can take the call.

    `lasting`: it will not be otherwise at the next call. `reported`: a user is to hear of it. `crashed`: its compiler
    does not live through it, so no process may try it again.
    """

    lasting: ClassVar[bool] = True
    reported: ClassVar[bool] = True
    crashed: ClassVar[bool] = False
