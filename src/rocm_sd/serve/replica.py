"""What each process of a replica of several GPUs runs: `run_rank`, started by `replica_drawer`.

All ranks load the models and split them by `parallelize`. Rank 0 has the step batcher, and draws what the server's
process asks for; where it calls a model that is split, the others call it, too (`rocm_sd.parallel.leading`).

| from the server | to the server |
|---|---|
| `Draw`, `Stop`, and None at the end | `Ready` once; `Step`, then `Drawn` or `Failed` of each picture; `BatchDone` |
"""

from __future__ import annotations

import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from torch import distributed as dist

from rocm_sd.engine import calibration, graphs_wanted
from rocm_sd.errors import RocmSdError, first_line
from rocm_sd.integrations.diffusers import load_pipeline
from rocm_sd.integrations.diffusers.loading import hush
from rocm_sd.integrations.diffusers.shared import load_loras, use_loras
from rocm_sd.parallel import join, parallel_report, parallelize, unparallelize
from rocm_sd.parallel.leading import Leader, connect, follow, listen
from rocm_sd.serve.drawers import LocalDrawer, ReadyPipes, measure, sources
from rocm_sd.serve.logs import start as start_logs
from rocm_sd.serve.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta
    from pathlib import Path

    import torch
    from PIL.Image import Image

    from rocm_sd.engine.batching import BatchDone
    from rocm_sd.integrations.diffusers import Drawing
    from rocm_sd.parallel import ParallelReport
    from rocm_sd.serve.config import ServeConfig
    from rocm_sd.serve.service import ModelFacts

__all__ = ["SERVER", "Draw", "Drawn", "Failed", "Ready", "Replica", "Step", "Stop", "run_rank"]

# Sockets in the replica's folder: the server's, and rank 0's for the others.
SERVER, _RANKS = "server", "ranks"
# Its graphs are of whole calls, so that batches are filled up to the sizes that have one.
_CAPTURED = frozenset({"cfg"})


@dataclass(frozen=True)
class Replica:
    """`folder`: with the server's socket. `log`: how rank 0 writes its lines, None for not at all. `patience`: how long
    ranks wait for each other within a call.
    """

    config: ServeConfig
    folder: Path
    log: str | None
    patience: timedelta


@dataclass(frozen=True)
class Draw:
    picture: int
    model: str
    drawing: Drawing


@dataclass(frozen=True)
class Stop:
    """At its next step; nobody waits for it any more."""

    picture: int


@dataclass(frozen=True)
class Ready:
    """`said`: by model, how it is split and why."""

    pid: int
    models: dict[str, ModelFacts]
    said: dict[str, str]


@dataclass(frozen=True)
class Step:
    picture: int
    step: int
    preview: Image | None


@dataclass(frozen=True)
class Drawn:
    picture: int
    image: Image


@dataclass(frozen=True)
class Failed:
    picture: int
    error: BaseException


class _Stopped(Exception):
    """Whoever asked for the picture has heard why."""


def run_rank(device: torch.device, replica: Replica) -> None:
    """Until the server says that it ends, or is gone."""
    config, rank = replica.config, int(os.environ["RANK"])
    if rank == 0 and replica.log is not None:
        start_logs(replica.log)
    hush()
    place = replica.folder / _RANKS
    # Before they meet: whoever has met it finds the socket there.
    listening = listen(place) if rank == 0 else None
    join(device, patience=replica.patience)
    named = sources(config.models)
    pipes = {name: _split(load_pipeline(source, device), config) for name, source in named.items()}
    reports = {name: parallel_report(pipe) for name, pipe in pipes.items()}
    modules = [module for report in reports.values() for module in report.split]
    traffics = [report.traffic for report in reports.values()]
    if listening is None:

        def told(value: tuple[str, Any]) -> None:
            name, loras = value
            use_loras(pipes[name].unet, loras)

        follow(modules, traffics, connect(place), device, told)
        return
    wires = [Connection(listening.accept()[0].detach()) for _ in range(dist.get_world_size() - 1)]
    hears, fails = Pipe(duplex=False)
    with closing(Leader(modules, traffics, wires, device, lambda: fails.send(None))) as leader:
        captured = graphs_wanted(device) and all(set(report.plan.dims) <= _CAPTURED for report in reports.values())
        ready = ReadyPipes(pipes, device, captured, lambda name, loras: leader.tell((name, loras)))
        _Rank0(replica, ready, leader, reports).serve(hears)


def _split(pipe: Any, config: ServeConfig) -> Any:
    """Ready for good: its LoRAs are there before layers are split, and nothing is measured while somebody waits."""
    load_loras(pipe, dict(config.loras))
    parallelize(pipe, config.parallel, config.level, served=True)
    dims = parallel_report(pipe).plan.dims
    if set(dims) <= _CAPTURED and calibration.wanted(pipe.device, graphs=graphs_wanted(pipe.device)):
        # By each rank for its own card.
        measure(unparallelize(pipe), config.level)
        parallelize(pipe, ",".join(f"{name}={size}" for name, size in dims.items()), config.level, served=True)
    return pipe


class _ToServer(Metrics):
    """Steps are counted where somebody asks for the counts."""

    def __init__(self, tell: Callable[[Any], None]) -> None:
        super().__init__()
        self._tell = tell

    def batch(self, done: BatchDone) -> None:
        self._tell(done)


class _Rank0:
    def __init__(self, replica: Replica, ready: ReadyPipes, leader: Leader, reports: dict[str, ParallelReport]) -> None:
        self._wire, self._leader = connect(replica.folder / SERVER), leader
        self._lock = threading.Lock()
        # By picture that is drawn, or waits for that: set where it is to stop.
        self._stops: dict[int, threading.Event] = {}
        # What leaves steps out decides in rank 0 what runs of a model, and the others would run all of it.
        config = replace(replica.config, qualities=("exact",))
        self._drawer = LocalDrawer(config, _ToServer(self._tell), ready)
        self._threads = ThreadPoolExecutor(config.limits.in_flight, "rocm-sd picture")
        said = {name: str(report) for name, report in reports.items()}
        self._tell(Ready(os.getpid(), self._drawer.models(), said))

    def serve(self, hears: Connection[Any, Any]) -> None:
        """Draw what is asked for. Raises the error that ends the job, where one does."""
        while True:
            heard = wait([self._wire, hears])
            if hears in heard and self._leader.failed is not None:
                raise self._leader.failed
            try:
                asked = self._wire.recv()
            except (EOFError, OSError):
                asked = None
            if asked is None:
                break
            if isinstance(asked, Stop):
                # It may come after the picture's end.
                stopped = self._stops.get(asked.picture)
                if stopped is not None:
                    stopped.set()
            else:
                self._stops[asked.picture] = threading.Event()
                self._threads.submit(self._draw, asked)
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._drawer.close()

    def _draw(self, asked: Draw) -> None:
        drawing, stopped = asked.drawing, self._stops[asked.picture]

        def on_step(step: int, preview: Callable[[], Image]) -> None:
            self._tell(Step(asked.picture, step, preview() if drawing.wants_preview(step) else None))

        def stop() -> BaseException | None:
            return _Stopped() if stopped.is_set() else None

        try:
            self._tell(Drawn(asked.picture, self._drawer.draw(asked.model, drawing, on_step, stop)))
        except _Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 -- it is raised where it was asked for
            # Where the job ends, its error is the one to answer with: the server has it from the launcher.
            if self._leader.failed is None:
                self._tell(Failed(asked.picture, _picklable(error)))
        finally:
            del self._stops[asked.picture]

    def _tell(self, message: Any) -> None:
        with self._lock:
            self._wire.send(message)


def _picklable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 -- its own
    except Exception:  # noqa: BLE001 -- whatever it holds, its words are plain
        return RocmSdError(f"The picture could not be drawn ({first_line(error)}).")
    return error
