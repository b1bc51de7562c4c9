"""Every error a user can meet: one sentence that says what happened and why, and a hint: what to type next."""

from __future__ import annotations

import errno
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "FULL",
    "INTERRUPTED",
    "CorruptModel",
    "DeviceUnavailable",
    "InvalidCodeObject",
    "InvalidOption",
    "JobFailed",
    "MissingDependency",
    "ModelNotFound",
    "NoDiskSpace",
    "NumericsFailure",
    "RocmSdError",
    "Unsupported",
    "explained",
    "first_line",
    "optional_module",
    "require_known",
    "require_one_of",
]

INTERRUPTED = 130  # what a shell returns for a program that Ctrl-C ended
# What the system says where a disk is full, or a quota used up.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class RocmSdError(Exception):
    """Base of all; `exit_code` is what the command line returns for it (docs/cli.md lists them)."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Pickled as it is: subclasses make their message of other arguments.
        return self.__class__.__new__, (self.__class__, *self.args), self.__dict__


class InvalidOption(RocmSdError):
    """A value the user gave is not one that is known: InvalidOption("level", "fast", ["auto", "memory"])."""

    exit_code = 2

    def __init__(self, option: str, value: object, choices: list[str], *, hint: str | None = None) -> None:
        listed = ", ".join(choices)
        super().__init__(f"{option} {value!r} is not known.", hint=hint or f"Use one of: {listed}.")
        self.option = option
        self.value = value
        self.choices = choices


def require_one_of(option: str, value: str, choices: Iterable[str]) -> None:
    """Raises InvalidOption."""
    require_known(option, (value,), choices)


def require_known(option: str, values: Iterable[str], choices: Iterable[str]) -> None:
    """Raises InvalidOption for the first value that is not among the choices."""
    known = list(choices)
    for value in values:
        if value not in known:
            raise InvalidOption(option, value, known)


class Unsupported(RocmSdError):
    """An implementation asked for by name cannot do this: Unsupported("conv2d", "groups=2")."""

    exit_code = 3

    def __init__(self, what: str, reason: str, *, hint: str | None = None) -> None:
        super().__init__(f"{what} does not support {reason}.", hint=hint)
        self.what = what
        self.reason = reason


class ModelNotFound(RocmSdError):
    exit_code = 4


class CorruptModel(RocmSdError):
    exit_code = 4


class NoDiskSpace(RocmSdError):
    exit_code = 5

    def __init__(self, path: object, *, needed: int | None = None, free: int | None = None) -> None:
        sizes = f" ({needed / 1e6:.1f} MB needed, {free / 1e6:.1f} MB free)" if needed and free is not None else ""
        super().__init__(
            f"There is no space left to write {path}{sizes}.", hint="Free some, or choose another place with --out."
        )


class DeviceUnavailable(RocmSdError):
    exit_code = 6


class NumericsFailure(RocmSdError):
    """A fast path and the reference disagree: the result is withheld."""

    exit_code = 7


class MissingDependency(RocmSdError):
    """An optional package is needed: MissingDependency("scikit-image", "quality")."""

    exit_code = 8

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed.", hint=f"Type: pip install 'rocm-sd[{extra}]'")


def optional_module(name: str, package: str, extra: str) -> Any:
    """The module of an optional package, or MissingDependency with what to type."""
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingDependency(package, extra) from error


class InvalidCodeObject(RocmSdError):
    """Bytes that should be machine code for an AMD GPU are not, or belong to another GPU."""

    exit_code = 9

    def __init__(self, reason: str, *, hint: str | None = None) -> None:
        super().__init__(f"The code object cannot be read: {reason}.", hint=hint or "Compile the kernel again.")
        self.reason = reason


class JobFailed(RocmSdError):
    """A process of a job on several GPUs is gone, could not be reached, or runs something else."""

    exit_code = 10


def first_line(error: BaseException) -> str:
    """Of what it says, so much as fits into a sentence; its class where it says nothing."""
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__


def explained(error: Exception) -> RocmSdError:
    """Any error as one of ours: of the system, of memory that ran out, of a plug-in, or of a fault in rocm-sd."""
    if isinstance(error, RocmSdError):
        return error
    if isinstance(error, OSError) and error.errno in FULL:
        return NoDiskSpace(error.filename or "a temporary file")
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename is not None else ""
        return RocmSdError(f"{where}{error.strerror}.", hint="Check the path, and whose it is.")
    # torch has a class for a GPU's memory, and says it in words of a CPU's.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "allocate memory" in str(error):
        hint = "Try a smaller size or batch, or --level memory."
        return RocmSdError(f"There is not enough memory for this ({first_line(error)}).", hint=hint)
    return RocmSdError(
        f"This ended with an error that rocm-sd does not know: {type(error).__name__}: {first_line(error)}.",
        hint="--debug, before the verb, shows where it arose. If no plug-in is at fault, please report it with that.",
    )
