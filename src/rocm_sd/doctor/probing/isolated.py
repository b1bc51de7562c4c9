"""Work that may crash or never end, in a process of its own: the caller gets its answer, or the reason for none."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rocm_sd.doctor.check import CannotRun
from rocm_sd.doctor.probing.common import place

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.connection import Connection

__all__ = ["ProcessOutcome", "ending", "isolated", "isolated_on", "one_by_one"]

# A fork saves the seconds that importing torch takes. It is sound as long as the parent has neither opened the GPU nor
# computed anything, and the parent only waits. Windows and macOS start afresh.
_START = "fork" if sys.platform == "linux" else "spawn"
_LONGEST_REASON = 400


@dataclass(frozen=True)
class ProcessOutcome:
    """`answer`, or None with the reason in `failed`; `exceeded` where it was ended for taking too long."""

    answer: dict[str, Any] | None
    failed: str = ""
    exceeded: bool = False

    def required(self, otherwise: str) -> dict[str, Any]:
        """The answer; where there is none, the probe cannot run, and says so in these words with the reason."""
        if self.answer is None:
            raise CannotRun(f"{otherwise}: {self.failed}")
        return self.answer


def isolated(work: Callable[..., dict[str, Any]], *arguments: Any, limit_s: float) -> ProcessOutcome:
    """work(*arguments) in another process. `work` is a function of a module, and so are its arguments plain values.

    What it cannot do, the caller cannot: that one reason is raised here again.
    """
    if _START == "fork":
        _import_beforehand()
    context: Any = multiprocessing.get_context(_START)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(theirs, work, arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(limit_s):
            return ProcessOutcome(None, f"it did not end within {limit_s:g} s", exceeded=True)
        kind, value = ours.recv()
    except EOFError:
        process.join(5)
        return ProcessOutcome(None, f"its process {ending(process.exitcode)}")
    finally:
        ours.close()
        # What hangs in the driver cannot even be killed: no waiting for it.
        process.kill()
        process.join(1)
    if kind == "cannot":
        raise CannotRun(value)
    return ProcessOutcome(value) if kind == "answer" else ProcessOutcome(None, str(value))


def isolated_on(
    device: str | None, work: Callable[..., dict[str, Any]], *arguments: Any, limit_s: float
) -> ProcessOutcome:
    """work(place, *arguments) in another process, which opens the device; the answer says as "device" where it ran."""
    return isolated(_placed, device, work, arguments, limit_s=limit_s)


def _placed(device: str | None, work: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> dict[str, Any]:
    where = place(device)
    import torch  # noqa: PLC0415 -- in the process that needs it

    with torch.no_grad():
        return {"device": where.to_dict(), **work(where, *arguments)}


def one_by_one(
    device: str | None,
    work: Callable[..., dict[str, Any]],
    calls: Mapping[str, tuple[Any, ...]],
    failed: Mapping[str, Any],
    limits: Mapping[str, float],
) -> dict[str, Any]:
    """work(place, *arguments) of each name in a process of its own: its answer, or `failed` with the reason as "error".

    "device" is where the last one ran that lived to say it, or None.
    """
    answers: dict[str, Any] = {"device": None}
    for name, arguments in calls.items():
        outcome = isolated_on(device, work, *arguments, limit_s=limits[name])
        if outcome.answer is None:
            answers[name] = {**failed, "error": outcome.failed}
        else:
            answers["device"] = outcome.answer.pop("device")
            answers[name] = outcome.answer
    return answers


def _import_beforehand() -> None:
    """Importing opens no GPU and computes nothing; a process that is forked afterwards need not do it again."""
    with suppress(ImportError):
        import rocm_sd.measuring  # noqa: F401, PLC0415 -- as above


def _send(connection: Connection, work: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> None:
    try:
        answer = work(*arguments)
    except CannotRun as reason:
        connection.send(("cannot", str(reason)))
    except Exception as error:  # noqa: BLE001 -- the reason is the answer
        traceback.print_exc()
        connection.send(("failed", f"{type(error).__name__}: {str(error).strip()[:_LONGEST_REASON]}"))
    else:
        connection.send(("answer", answer))
    connection.close()


def ending(code: int | None) -> str:
    if code is None:
        return "ended without a word"
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
