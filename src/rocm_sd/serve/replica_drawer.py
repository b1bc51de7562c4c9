"""A replica of several GPUs, as the server's process sees it: it starts a process for each, and hands pictures to them.

The server has no model and no GPU. Where a rank fails, all ranks end within seconds (`rocm_sd.parallel.launching`), and
the server is still there to say so: whoever waits is answered, and `when_lost` tells the rank's own error.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.engine.batching import BatchDone
from rocm_sd.errors import JobFailed, Unsupported
from rocm_sd.integrations.diffusers.loading import default_device
from rocm_sd.parallel import parse
from rocm_sd.parallel.launching import launch, require_ranks
from rocm_sd.parallel.leading import listen
from rocm_sd.serve.drawers import LocalDrawer, require_loras_of_one, sources
from rocm_sd.serve.logs import log
from rocm_sd.serve.replica import SERVER, Draw, Drawn, Failed, Ready, Replica, Step, Stop, run_rank

if TYPE_CHECKING:
    from collections.abc import Callable

    from PIL.Image import Image

    from rocm_sd.integrations.diffusers import Drawing
    from rocm_sd.serve.config import ServeConfig
    from rocm_sd.serve.metrics import Metrics
    from rocm_sd.serve.service import Drawer, ModelFacts

__all__ = ["ReplicaDrawer", "drawer_of", "require_replica"]

_OPTION = "--gpus-per-replica"
_PATIENCE = timedelta(minutes=10)
# How often whoever waits looks whether it is to go on, and how long ranks have to end by themselves.
_LOOK_S, _END_S = 0.5, 15.0


def require_replica(config: ServeConfig, *, here: bool = True) -> None:
    """Raises what is wrong with the replicas that were asked for. `here`: they are to be on this machine."""
    ranks, plan = config.gpus_per_replica, config.parallel
    if ranks == 1:
        if plan != "auto":
            raise Unsupported("--parallel", "one GPU", hint=f"Add {_OPTION} 2, or more.")
        return
    if here or config.device == "cpu" or ranks < 1:
        # Where there are no GPUs, several ranks on the CPU are for who asks for it.
        require_ranks(ranks, default_device(config.device) if config.device else torch.device("cuda"), _OPTION)
    if plan != "auto" and "data" in parse(plan, ranks).dims:
        raise Unsupported(
            "--parallel",
            "data in a replica, whose GPUs draw each picture together",
            hint=f"For more pictures at once: --ray --replicas {ranks}, and no {_OPTION}.",
        )
    require_loras_of_one(config)


def drawer_of(config: ServeConfig, log_kind: str | None) -> Callable[[ServeConfig, Metrics], Drawer]:
    """What draws in a replica of that config; rank 0 of several writes its log lines so."""
    return LocalDrawer if config.gpus_per_replica == 1 else partial(ReplicaDrawer, log_kind=log_kind)


class ReplicaDrawer:
    def __init__(
        self,
        config: ServeConfig,
        metrics: Metrics,
        *,
        log_kind: str | None = None,
        patience: timedelta = _PATIENCE,
    ) -> None:
        require_replica(config)
        # A name that is wrong is said here, and not by a rank.
        sources(config.models)
        self._metrics = metrics
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._pictures: dict[int, queue.SimpleQueue[Any]] = {}
        self._numbers = count(1)
        self._tell: Callable[[BaseException], None] | None = None
        self._error: BaseException | None = None
        self._closing = False
        self._pid = 0
        self._ready: queue.SimpleQueue[Ready | BaseException] = queue.SimpleQueue()
        self._folder = TemporaryDirectory(prefix="rocm-sd-replica-", ignore_cleanup_errors=True)
        replica = Replica(config, Path(self._folder.name), log_kind, patience)
        self._listening = listen(replica.folder / SERVER)
        # Its end is looked for: a rank that never comes is no reason to wait for ever.
        self._listening.settimeout(_LOOK_S)
        self._wire: Connection[Any, Any] | None = None
        device = default_device(config.device)
        # Not a pool's thread: the kernel ends the ranks with the thread that started them.
        self._launcher = threading.Thread(
            target=self._launch, args=(config.gpus_per_replica, replica, device), name="rocm-sd ranks", daemon=True
        )
        self._launcher.start()
        threading.Thread(target=self._hear, name="rocm-sd answers", daemon=True).start()
        ready = self._ready.get()
        if isinstance(ready, BaseException):
            raise ready
        self._pid, self._models = ready.pid, ready.models
        for name, said in ready.said.items():
            log.info("split", extra={"model": name, "plan": said.splitlines()[0]})

    def models(self) -> dict[str, ModelFacts]:
        return dict(self._models)

    def draw(
        self,
        model: str,
        drawing: Drawing,
        on_step: Callable[[int, Callable[[], Image]], None],
        stop: Callable[[], BaseException | None],
    ) -> Image:
        heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with self._lock:
            if self._error is not None:
                raise self._error
            picture = next(self._numbers)
            self._pictures[picture] = heard
        try:
            self._send(Draw(picture, model, drawing))
            while True:
                said = None
                with suppress(queue.Empty):
                    said = heard.get(timeout=_LOOK_S)
                if isinstance(said, Drawn):
                    return said.image
                if isinstance(said, Failed):
                    raise said.error
                error = stop()
                if error is not None:
                    self._send(Stop(picture))
                    raise error
                if isinstance(said, Step):
                    on_step(said.step, partial(_same, said.preview))
        finally:
            with self._lock:
                del self._pictures[picture]

    def when_lost(self, tell: Callable[[BaseException], None]) -> None:
        with self._lock:
            self._tell, error = tell, self._error
        if error is not None:
            tell(error)

    def close(self) -> None:
        # What draws has come to its end by now.
        self._closing = True
        if self._launcher.is_alive():
            self._send(None)
            self._launcher.join(_END_S)
        if self._launcher.is_alive():
            # Its launcher ends the others with it.
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)
            self._launcher.join()

    def _send(self, message: Any) -> None:
        # Ranks that are gone are the launcher's to tell of.
        with self._sending, suppress(OSError):
            if self._wire is not None:
                self._wire.send(message)

    def _launch(self, ranks: int, replica: Replica, device: torch.device) -> None:
        try:
            launch(ranks, run_rank, replica, device=device)
        except BaseException as error:  # noqa: BLE001 -- whoever waits is told
            self._lose(error)
        else:
            self._lose(JobFailed("The processes of this replica have ended.", hint="Start it again."))

    def _lose(self, error: BaseException) -> None:
        with self._lock:
            self._error, tell = error, self._tell
            waiting = list(self._pictures.items())
        # The ranks are gone, and whoever is told may end this process at once.
        self._folder.cleanup()
        self._ready.put(error)
        if tell is not None and not self._closing:
            tell(error)
        for picture, heard in waiting:
            heard.put(Failed(picture, error))

    def _hear(self) -> None:
        while self._error is None:
            with suppress(TimeoutError):
                self._wire = Connection(self._listening.accept()[0].detach())
                break
        self._listening.close()
        if self._wire is None:
            return
        # Until rank 0 is gone; why it is, the launcher says.
        with suppress(EOFError, OSError):
            while True:
                self._pass_on(self._wire.recv())

    def _pass_on(self, said: Any) -> None:
        if isinstance(said, Ready):
            self._ready.put(said)
        elif isinstance(said, BatchDone):
            self._metrics.batch(said)
        else:
            with self._lock:
                # One that was stopped has nobody who listens.
                heard = self._pictures.get(said.picture)
            if heard is not None:
                heard.put(said)


def _same(preview: Any) -> Any:
    return preview
