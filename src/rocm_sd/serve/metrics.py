"""What Prometheus reads: the queue, batches, steps, pictures and memory of a server."""

from __future__ import annotations

import resource
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rocm_sd.engine.batching import BatchDone
    from rocm_sd.serve.service import Service

__all__ = ["TELLS_EVERY_S", "Metrics"]

_STEP_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_PICTURE_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
# What a process that draws for another server knows better than that server.
_OF_A_REPLICA = frozenset({
    "rocm_sd_step_seconds", "rocm_sd_batch_pictures", "rocm_sd_padded_samples", "rocm_sd_host_memory_bytes",
    "rocm_sd_device_memory_bytes",
})  # fmt: skip
# A replica tells its figures so often. One that was not heard of for so long is gone, and its figures with it.
TELLS_EVERY_S, _GONE_S = 2.0, 10.0


class Metrics:
    """Of one server: names and help texts are what an operator sees."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        given: Any = {"registry": self.registry}
        self.requests = Counter("rocm_sd_requests", "Requests that came to their end.", ["api", "state"], **given)
        self.refused = Counter("rocm_sd_refused", "Requests that the queue had no room for.", **given)
        self.pictures = Counter("rocm_sd_pictures", "Pictures that were drawn.", ["model"], **given)
        self.latency = Histogram(
            "rocm_sd_request_seconds", "From a request to its last picture.", ["model"], buckets=_PICTURE_S, **given
        )
        self.waited = Histogram("rocm_sd_queue_seconds", "From a request to its start.", buckets=_PICTURE_S, **given)
        self.steps = Histogram("rocm_sd_step_seconds", "A shared step.", ["model"], buckets=_STEP_S, **given)
        self.batches = Histogram("rocm_sd_batch_pictures", "Pictures of a step.", ["model"], buckets=_SIZES, **given)
        self.padded = Counter("rocm_sd_padded_samples", "Samples that were computed for nothing.", ["model"], **given)
        self.last_batch = 0
        # By replica: its figures, and when they came.
        self._replicas: dict[str, tuple[Sequence[Metric], float]] = {}
        self._lock = threading.Lock()

    def watch(self, service: Service) -> None:
        for name, text, read in (
            ("rocm_sd_queue_pictures", "Pictures that wait.", lambda: service.queued),
            ("rocm_sd_in_flight_pictures", "Pictures that are drawn now.", lambda: service.in_flight),
        ):
            Gauge(name, text, registry=self.registry).set_function(read)
        self.watch_memory()

    def watch_memory(self) -> None:
        for name, text, read in (
            ("rocm_sd_host_memory_bytes", "Memory that the process has now.", _host_bytes),
            ("rocm_sd_device_memory_bytes", "Of the GPU, what torch holds.", _device_bytes),
        ):
            Gauge(name, text, registry=self.registry).set_function(read)

    def batch(self, done: BatchDone) -> None:
        self.steps.labels(done.model).observe(done.seconds)
        self.batches.labels(done.model).observe(done.pictures)
        self.padded.labels(done.model).inc(done.padded)
        self.last_batch = done.pictures

    def of_a_replica(self) -> tuple[Metric, ...]:
        """What `replica` of another process takes."""
        return tuple(metric for metric in self.registry.collect() if metric.name in _OF_A_REPLICA)

    def replica(self, name: str, figures: Sequence[Metric]) -> None:
        """The latest figures of a replica."""
        with self._lock:
            self._replicas[name] = figures, time.monotonic()

    def collect(self) -> Iterator[Metric]:
        """The server's own figures, and beside each those of the replicas, by their names."""
        with self._lock:
            gone = [name for name, (_, when) in self._replicas.items() if time.monotonic() - when > _GONE_S]
            for name in gone:
                del self._replicas[name]
            told = {name: figures for name, (figures, _) in self._replicas.items()}
        for metric in self.registry.collect():
            for name, figures in told.items():
                for sample in (sample for other in figures if other.name == metric.name for sample in other.samples):
                    metric.samples.append(sample._replace(labels={**sample.labels, "replica": name}))
            yield metric

    def text(self) -> bytes:
        collected: Any = self
        found: bytes = generate_latest(collected)
        return found


def _host_bytes() -> float:
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        # Elsewhere the most that it had is known.
        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    return float(pages * resource.getpagesize())


def _device_bytes() -> float:
    return float(torch.cuda.memory_reserved()) if torch.cuda.is_available() else 0.0
