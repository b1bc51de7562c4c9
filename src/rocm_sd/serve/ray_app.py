"""The same server on Ray Serve: a replica of a model for each GPU, or for several, on one machine or on more.

An ingress has the page, the APIs and the queue; it hands each picture to a replica, where pictures that are drawn at
once share their steps. Ray replaces a replica that dies, and its pictures are drawn once more by another one.

    serve run rocm_sd.serve.ray_app:build models='["./sdxl"]' replicas=1-4
"""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import threading
import time
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray import serve
from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError
from ray.serve.context import _get_global_client

from rocm_sd.errors import DeviceUnavailable, InvalidOption, RocmSdError, first_line
from rocm_sd.serve.app import create_app
from rocm_sd.serve.config import Limits, ServeConfig
from rocm_sd.serve.drawers import sources
from rocm_sd.serve.logs import log
from rocm_sd.serve.logs import start as start_logs
from rocm_sd.serve.metrics import TELLS_EVERY_S, Metrics
from rocm_sd.serve.replica_drawer import drawer_of, require_replica
from rocm_sd.serve.service import Losable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from fastapi import FastAPI
    from PIL.Image import Image
    from prometheus_client import Metric
    from ray.serve.handle import DeploymentHandle

    from rocm_sd.integrations.diffusers import Drawing
    from rocm_sd.serve.service import Drawer, ModelFacts

__all__ = ["RayDrawer", "ReplicaLost", "build", "run"]

APP, _INGRESS = "rocm-sd", "ingress"
# A replica loads its model and compiles kernels before it is there.
_START_S, _DRAIN_S = 900.0, 60.0
_LOOK_S = 0.2


class ReplicaLost(RocmSdError):
    """Two replicas died, one after the other, while they drew the same picture."""


def _numbers(replicas: str) -> tuple[int, int]:
    """At least and at most so many, of a text such as "2" or "1-4"."""
    least, _, most = replicas.partition("-")
    given = (least, most or least)
    if not all(part.isascii() and part.isdecimal() and len(part) < 5 for part in given):
        raise InvalidOption("--replicas", replicas, [], hint="It takes a number, or two: --replicas 1-4.")
    low, high = map(int, given)
    if not 1 <= low <= high:
        raise InvalidOption("--replicas", replicas, [], hint="It takes 1 or more, the smaller number first.")
    return low, high


class Painter:
    """A replica: one model, on one device or on several."""

    def __init__(self, config: ServeConfig, model: str, drawer: Callable[[ServeConfig, Metrics], Drawer]) -> None:
        start_logs("json")
        own = replace(config, models=(model,) if config.models else (), host="127.0.0.1", keys=None)
        metrics = Metrics()
        metrics.watch_memory()
        self._drawer = drawer(own, metrics)
        ((self._name, self._facts),) = self._drawer.models().items()
        if isinstance(self._drawer, Losable):
            self._drawer.when_lost(_end)
        threading.Thread(target=_tell_figures, args=(metrics,), name="rocm-sd figures", daemon=True).start()

    def __del__(self) -> None:
        """Ray calls it before it ends the process: processes of its own end in order."""
        drawer = getattr(self, "_drawer", None)
        if isinstance(drawer, Losable):
            drawer.close()

    def facts(self) -> ModelFacts:
        return self._facts

    async def draw(self, drawing: Drawing) -> AsyncIterator[tuple[int, Image | None] | Image]:
        """(step, its preview) after each step, then the picture. Where nobody listens any more, it stops."""
        loop = asyncio.get_running_loop()
        told: asyncio.Queue[Any] = asyncio.Queue()
        gone = threading.Event()

        def tell(value: Any) -> None:
            loop.call_soon_threadsafe(told.put_nowait, value)

        def on_step(step: int, preview: Callable[[], Image]) -> None:
            tell((step, preview() if drawing.wants_preview(step) else None))

        def stop() -> BaseException | None:
            return asyncio.CancelledError() if gone.is_set() else None

        def work() -> None:
            try:
                tell(self._drawer.draw(self._name, drawing, on_step, stop))
            except BaseException as error:  # noqa: BLE001 -- it is raised where it was asked for
                tell(error)

        threading.Thread(target=work, name="rocm-sd picture", daemon=True).start()
        try:
            while True:
                value = await told.get()
                if isinstance(value, BaseException):
                    raise value
                yield value
                if not isinstance(value, tuple):
                    return
        finally:
            gone.set()


def _tell_figures(metrics: Metrics) -> None:
    """Of this replica to the ingress, which is asked for all of them, for as long as this process lives."""
    context = serve.get_replica_context()
    ingress: Any = serve.get_deployment_handle(_INGRESS, context.app_name)
    was_heard = True
    while True:
        try:
            ingress.hear_figures.remote(context.replica_id.unique_id, metrics.of_a_replica()).result(timeout_s=_START_S)
            was_heard = True
        except Exception as error:  # noqa: BLE001 -- an ingress that is replaced is there again soon
            if was_heard:
                log.warning("the ingress does not hear this replica's figures", extra={"error": first_line(error)})
            was_heard = False
        time.sleep(TELLS_EVERY_S)


def _end(error: BaseException) -> None:
    """Ray replaces a replica whose process has ended, and its pictures are drawn by another one."""
    log.critical("nothing can be drawn any more", extra={"error": str(error)})
    os._exit(getattr(error, "exit_code", 1))


class RayDrawer:
    """Pictures by replicas; `handles` by the name of the model."""

    def __init__(self, handles: dict[str, DeploymentHandle[Any]]) -> None:
        self._handles = handles
        self._facts = {name: handle.facts.remote().result(timeout_s=_START_S) for name, handle in handles.items()}

    def models(self) -> dict[str, ModelFacts]:
        return dict(self._facts)

    def draw(
        self,
        model: str,
        drawing: Drawing,
        on_step: Callable[[int, Callable[[], Image]], None],
        stop: Callable[[], BaseException | None],
    ) -> Image:
        """Once more by another replica where one dies."""
        given = model, drawing, on_step, stop
        try:
            return self._draw(*given)
        except RayActorError:
            log.warning("a replica died, and another one draws", extra={"model": model})
        try:
            return self._draw(*given)
        except RayActorError as error:
            raise ReplicaLost(
                f"Two replicas of {model} died while they drew this picture.",
                hint="Ask for a smaller picture, or look at the log of the replicas.",
            ) from error

    def _draw(
        self,
        model: str,
        drawing: Drawing,
        on_step: Callable[[int, Callable[[], Image]], None],
        stop: Callable[[], BaseException | None],
    ) -> Image:
        answers: Any = self._handles[model].options(stream=True).draw.remote(drawing)
        heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # On a thread of its own: an answer may not come before a replica has started, or has room.
        threading.Thread(target=_hear, args=(answers, heard), name="rocm-sd answers", daemon=True).start()
        try:
            while True:
                value = None
                with suppress(queue.Empty):
                    value = heard.get(timeout=_LOOK_S)
                error = stop()
                if error is not None:
                    raise error
                if isinstance(value, _Ended):
                    break
                if isinstance(value, BaseException):
                    raise value
                if isinstance(value, tuple):
                    on_step(value[0], partial(_same, value[1]))
                elif value is not None:
                    image: Image = value
                    return image
        except RayTaskError as error:
            # As it was raised there, where it is one of ours.
            cause = error.cause
            if isinstance(cause, RocmSdError):
                raise cause from None
            raise
        except TaskCancelledError as error:
            raise stop() or error from None
        finally:
            answers.cancel()
        raise RocmSdError(f"A replica of {model} ended before its picture.", hint="Ask again.")

    def close(self) -> None:
        """The replicas are Ray's."""


class _Ended:
    """Nothing more comes."""


def _hear(answers: Any, heard: queue.SimpleQueue[Any]) -> None:
    try:
        for value in answers:
            heard.put(value)
        heard.put(_Ended())
    except BaseException as error:  # noqa: BLE001 -- it is raised where it was asked for
        heard.put(error)


def _same(preview: Image) -> Image:
    return preview


class Ingress:
    """The page, the APIs and the queue."""

    def __init__(self, config: ServeConfig, names: list[str], *handles: DeploymentHandle[Any]) -> None:
        start_logs("json")
        self._config, self._handles = config, dict(zip(names, handles, strict=True))
        self._metrics: Metrics | None = None

    def __serve_build_asgi_app__(self) -> FastAPI:
        # One that never hears of its models is replaced, as a replica is.
        app = create_app(self._config, lambda _config, _metrics: RayDrawer(self._handles), on_failure=_end)
        self._metrics = app.state.server.metrics
        return app

    def hear_figures(self, replica: str, figures: tuple[Metric, ...]) -> None:
        """Called by replicas; what /metrics says of them."""
        if self._metrics is not None:
            self._metrics.replica(replica, figures)


def application(
    config: ServeConfig, replicas: str, drawer: Callable[[ServeConfig, Metrics], Drawer] | None = None
) -> Any:
    """What `serve.run` takes. `drawer` draws in a replica."""
    least, most = _numbers(replicas)
    require_replica(config, here=False)
    limits = config.limits
    device: dict[str, Any] = {"num_gpus" if _on_gpu(config) else "num_cpus": config.gpus_per_replica}
    if "num_cpus" in device and config.gpus_per_replica > 1:
        # Ray would give each rank as many threads as all of them have cores.
        device["runtime_env"] = {"env_vars": {"OMP_NUM_THREADS": "1"}}
    given = config.models or ("",)
    painters = [
        serve.deployment(
            name=f"painter {name}",
            ray_actor_options=device,
            max_ongoing_requests=limits.in_flight,
            autoscaling_config={
                "min_replicas": least, "initial_replicas": least, "max_replicas": most,
                "target_ongoing_requests": max(1, limits.in_flight // 2),
            },
            graceful_shutdown_timeout_s=_DRAIN_S,
            health_check_period_s=5,
        )(Painter).bind(config, model, drawer or drawer_of(config, "json"))
        for name, model in zip(sources(config.models), given, strict=True)
    ]  # fmt: skip
    # As many pictures are handed on as all replicas take at once.
    own = replace(config, limits=replace(limits, in_flight=limits.in_flight * most * len(painters)))
    ingress = serve.deployment(
        name=_INGRESS,
        num_replicas=1,
        max_ongoing_requests=1000,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=_DRAIN_S,
    )(serve.ingress()(Ingress))
    return ingress.bind(own, list(sources(config.models)), *painters)


def _on_gpu(config: ServeConfig) -> bool:
    # Whoever asks for several GPUs has them in the cluster, if not here.
    asked = torch.cuda.is_available() or config.gpus_per_replica > 1
    return asked if config.device is None else config.device != "cpu"


def _require_room(config: ServeConfig) -> None:
    """In a cluster of this machine alone no other GPU will ever be there."""
    kind = "GPU" if _on_gpu(config) else "CPU"
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    there = max((int(node["Resources"].get(kind, 0)) for node in nodes if node["Alive"]), default=0)
    if there < config.gpus_per_replica:
        raise DeviceUnavailable(
            f"A replica of {config.gpus_per_replica} needs as many {kind}s, and Ray sees {there}.",
            hint="Give fewer: --gpus-per-replica, or start it in a cluster that has them.",
        )


def build(args: dict[str, Any]) -> Any:
    """For `serve run` and for KubeRay. `args`: fields of `ServeConfig`, `limits` as an object, and `replicas`."""
    given = dict(args)
    replicas = str(given.pop("replicas", "1"))
    limits = Limits(**given.pop("limits", {}))
    known = {field.name for field in fields(ServeConfig)}
    unknown = sorted(given.keys() - known)
    if unknown:
        raise InvalidOption("argument", unknown[0], sorted(known))
    named: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    if named.get("keys") is not None:
        named["keys"] = Path(named["keys"])
    return application(ServeConfig(limits=limits, **named), replicas)


def _listens_at() -> tuple[str, int]:
    """Where Ray Serve is called: what it was first started with, whoever did so."""
    client = _get_global_client()
    assert client is not None, "Serve was started"
    options = client.http_config
    return options.host, options.port


def run(config: ServeConfig, replicas: str, say: Callable[[str], None]) -> None:
    """Until Ctrl-C: in the cluster that this machine is part of, or in one of its own."""
    app = application(config, replicas)
    is_own = False
    try:
        ray.init(address="auto", log_to_driver=False)
    except ConnectionError:
        is_own = True
        ray.init(log_to_driver=False, include_dashboard=False)
        _require_room(config)
    serve.start(http_options={"host": config.host, "port": config.port})
    host, port = _listens_at()
    if (host, port) != (config.host, config.port):
        say(f"Ray Serve runs already, at {host}:{port}: --host and --port are left out")
    say(f"http://{host}:{port} is a page, and the address for clients; starting {replicas} ...")
    serve.run(app, name=APP, route_prefix="/", blocking=False)
    say("ready; Ctrl-C ends it")
    ended: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda got, _frame: ended.append(got))
    # Not an event: its lock may be held by what the signal interrupts.
    while not ended:
        time.sleep(_LOOK_S)
    say(f"what was begun comes to its end, for {_DRAIN_S:.0f} s at most ...")
    serve.delete(APP)
    if is_own:
        # In a cluster that others use, too, it would end their applications.
        serve.shutdown()  # type: ignore[no-untyped-call]
    ray.shutdown()
