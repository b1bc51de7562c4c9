"""What every training stage shares: the clock that drives the learning rate, checkpoints, logs, stopping, EMA."""

from __future__ import annotations

import argparse
import json
import math
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rocm_sd.errors import CorruptModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "Averages",
    "Budget",
    "Run",
    "add_common_options",
    "autocast",
    "compiled_or_plain",
    "pick_device",
    "prefetched",
]

# Read as early as possible: --stop-after counts what the caller's clock counts, imports included.
_PROCESS_START = time.monotonic()


def add_common_options(parser: argparse.ArgumentParser, *, minutes: float, batch: int, lr: float) -> None:
    parser.add_argument("--minutes", type=float, default=minutes, help="time for the whole stage, over all resumes")
    parser.add_argument("--steps", type=int, help="a number of steps instead of --minutes")
    parser.add_argument("--stop-after", type=float, help="save and stop this many minutes after the process began")
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--lr", type=float, default=lr)
    parser.add_argument("--warmup", type=int, default=300, help="steps over which the learning rate rises")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/emoji-sd"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="torch.compile; falls back, and says why")
    parser.add_argument("--restart", action="store_true", help="ignore an earlier checkpoint of this stage")
    parser.add_argument("--checkpoint-every", type=float, default=3.0, metavar="MINUTES")


def pick_device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
    return device


def autocast(device: torch.device) -> torch.autocast:
    # On a CPU float32 throughout: tests compare runs bit by bit, and small CPUs have no fast bfloat16.
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


class Budget:
    """How far a stage is, 0..1, by time or by steps; time is counted over all resumes."""

    def __init__(self, minutes: float, steps: int | None, elapsed: float = 0.0) -> None:
        self.seconds = minutes * 60
        self.steps = steps
        self._before = elapsed
        self._start = time.monotonic()

    @property
    def elapsed(self) -> float:
        return self._before + time.monotonic() - self._start

    def fraction(self, step: int) -> float:
        done = step / self.steps if self.steps else self.elapsed / self.seconds
        return min(1.0, done)

    def lr_factor(self, step: int, warmup: int) -> float:
        """A linear rise over `warmup` steps, times a half cosine that ends at zero with the budget."""
        return min(1.0, (step + 1) / max(1, warmup)) * 0.5 * (1 + math.cos(math.pi * self.fraction(step)))


class Run:
    """One stage in the runs folder: its checkpoint, its JSONL log, and when to stop."""

    def __init__(self, stage: str, options: argparse.Namespace) -> None:
        self.stage = stage
        self.folder: Path = options.out
        self.folder.mkdir(parents=True, exist_ok=True)
        self.checkpoint = self.folder / f"{stage}.ckpt"
        self.log_file = self.folder / f"{stage}.jsonl"
        self._stop_after = options.stop_after
        self._every = options.checkpoint_every * 60
        self._saved = time.monotonic()
        self._signalled = False
        if options.restart:
            self.checkpoint.unlink(missing_ok=True)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: object) -> None:
        print(f"{self.stage}: signal {number}, saving after this step", flush=True)
        self._signalled = True

    def load(self) -> dict[str, Any] | None:
        if not self.checkpoint.exists():
            return None
        try:
            # weights_only: a checkpoint is data, and unpickling anything else could run code.
            return torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        except (RuntimeError, OSError, EOFError) as error:
            raise CorruptModel(
                f"{self.checkpoint} cannot be read ({error}).", hint="Add --restart to train this stage anew."
            ) from error

    def save(self, state: dict[str, Any]) -> None:
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.checkpoint)
        self._saved = time.monotonic()

    @property
    def save_is_due(self) -> bool:
        return time.monotonic() - self._saved > self._every

    @property
    def must_stop(self) -> bool:
        late = self._stop_after is not None and time.monotonic() - _PROCESS_START > self._stop_after * 60
        return late or self._signalled

    def log(self, **values: Any) -> None:
        rounded = {key: round(value, 6) if isinstance(value, float) else value for key, value in values.items()}
        with self.log_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(rounded) + "\n")
        print(f"{self.stage}: " + "  ".join(f"{key} {value}" for key, value in rounded.items()), flush=True)


class Averages:
    """Exponential moving averages of parameters and buffers; decay rises from 0 so that the random start is forgotten.

    a <- a + (1 - d) (p - a), d = min(decay, (1 + step) / (10 + step)).
    """

    def __init__(self, modules: list[nn.Module], decay: float) -> None:
        self.live = [p for module in modules for p in module.parameters()]
        self.decay = decay
        self.values = [p.detach().clone() for p in self.live]

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.values, [p.detach() for p in self.live], 1 - decay)  # no public name

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges averages and live weights; a second call changes them back."""
        for value, parameter in zip(self.values, self.live, strict=True):
            held = parameter.detach().clone()
            parameter.copy_(value)
            value.copy_(held)


def prefetched(make: Callable[[int], Any], first: int, ahead: int = 4) -> Iterator[tuple[int, Any]]:
    """(step, make(step)) for first, first + 1, ...; made in one background thread, a few steps ahead."""
    with ThreadPoolExecutor(1) as pool:
        waiting = [pool.submit(make, first + i) for i in range(ahead)]
        step = first
        try:
            while True:
                waiting.append(pool.submit(make, step + ahead))
                yield step, waiting.pop(0).result()
                step += 1
        finally:
            for future in waiting:
                future.cancel()


def compiled_or_plain(function: Callable[..., Any], trial: Callable[[Callable[..., Any]], Any], wanted: bool) -> Any:
    """torch.compile(function) where `trial` runs on it, else `function` itself, with the reason printed."""
    if not wanted:
        return function
    begin = time.monotonic()
    compiled = torch.compile(function)
    try:
        trial(compiled)
    except Exception as error:  # noqa: BLE001 # whatever the compiler raises, training goes on without it
        print(f"torch.compile is not used: {type(error).__name__}: {str(error)[:400]}", flush=True)
        return function
    print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    return compiled
