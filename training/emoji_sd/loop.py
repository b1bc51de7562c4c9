"""What every training stage shares: the clock that drives the learning rate, checkpoints, logs, stopping, EMA."""

from __future__ import annotations

import json
import math
import pickle
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from rocm_sd.errors import CorruptModel, NumericsFailure

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

__all__ = [
    "Averages",
    "Budget",
    "Run",
    "Stage",
    "add_common_options",
    "autocast",
    "compiled_or_plain",
    "pick_device",
    "prefetched",
    "resumed",
    "train",
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
    parser.add_argument("--checkpoint-every", type=float, default=2.0, metavar="MINUTES")
    parser.add_argument("--log-every", type=int, default=100, metavar="STEPS")


def pick_device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
    return device


def autocast(device: torch.device) -> torch.autocast:
    # On a CPU float32 throughout: tests compare runs bit by bit, and small CPUs have no fast bfloat16.
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


class Budget:
    """How far a stage is, 0..1, by time or by steps; time is counted over all resumes."""

    def __init__(self, minutes: float, steps: int | None) -> None:
        self.seconds = minutes * 60
        self.steps = steps
        self._before = 0.0
        self._start = time.monotonic()

    def add(self, seconds: float) -> None:
        """Counts what earlier runs of the stage have spent."""
        self._before += seconds

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
            self.log_file.unlink(missing_ok=True)
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
        except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
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


def compiled_or_plain(function: Callable[..., Any], trial: Callable[[Callable[..., Any]], Any]) -> Any:
    """torch.compile(function) where `trial` runs on it, else `function` itself, with the reason printed."""
    begin = time.monotonic()
    compiled = torch.compile(function)
    try:
        trial(compiled)
    except Exception as error:  # noqa: BLE001 # whatever the compiler raises, training goes on without it
        print(f"torch.compile is not used: {type(error).__name__}: {str(error)[:400]}", flush=True)
        return function
    print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    return compiled


class Stage(Protocol):
    """What `train` drives: a step is made on the CPU ahead of time, then taken on the device."""

    device: torch.device

    def make(self, step: int) -> Any: ...

    def step(self, step: int, made: Any, lr: float) -> torch.Tensor: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


def resumed(stage: Stage, run: Run) -> tuple[int, float]:
    """(next step, seconds spent) of the stage's checkpoint, which is loaded; (0, 0) where there is none."""
    saved = run.load()
    if saved is None:
        return 0, 0.0
    stage.restore(saved["stage"])
    print(f"{run.stage}: resumed at step {saved['step']}, {saved['elapsed'] / 60:.2f} minutes spent", flush=True)
    return saved["step"], saved["elapsed"]


def train(
    stage: Stage,
    run: Run,
    options: argparse.Namespace,
    budget: Budget,
    first: int,
    after_step: Callable[[int], None] | None = None,
) -> int:
    """Steps until the budget is spent or the run must stop; saves; returns the next step's number."""
    lr, step, started = options.lr, first, time.monotonic()
    queued: list[torch.cuda.Event] = []
    for step, made in prefetched(stage.make, first):
        if budget.fraction(step) >= 1 or run.must_stop:
            break
        loss = stage.step(step, made, lr * budget.lr_factor(step, options.warmup))
        if stage.device.type == "cuda":
            # At most two steps are queued ahead: the clock that drives the schedule then tells the truth.
            queued.append(torch.cuda.Event())
            queued[-1].record()
            if len(queued) > 2:
                queued.pop(0).synchronize()
        if step % options.log_every == 0:
            value = loss.item()
            rate = (step - first + 1) * options.batch / (time.monotonic() - started)
            run.log(step=step, minutes=budget.elapsed / 60, loss=value, images_per_second=round(rate))
            if not math.isfinite(value):
                lr = _back_to_checkpoint(stage, run, lr)
        if run.save_is_due and loss.isfinite().item():
            run.save({"stage": stage.state(), "step": step + 1, "elapsed": budget.elapsed})
        if after_step is not None:
            after_step(step)
    run.save({"stage": stage.state(), "step": step, "elapsed": budget.elapsed})
    state = "finished" if budget.fraction(step) >= 1 else "stopped early (the same command resumes)"
    print(f"{run.stage}: {state} at step {step}, {budget.elapsed / 60:.2f} minutes spent", flush=True)
    return step


def _back_to_checkpoint(stage: Stage, run: Run, lr: float) -> float:
    saved = run.load()
    if saved is None:
        raise NumericsFailure("The loss is not a number, and there is no checkpoint yet.", hint="Lower --lr.")
    stage.restore(saved["stage"])
    print(f"{run.stage}: the loss is not a number; back to the checkpoint, with lr {lr / 2:g}", flush=True)
    return lr / 2
