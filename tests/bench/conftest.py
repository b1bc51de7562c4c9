"""A small workload and runs that waste no time on it, for all that measure in turns."""

from __future__ import annotations

import functools
import gc

import pytest
import torch

from rocm_sd.bench import runner
from rocm_sd.bench.gate import PictureGate
from rocm_sd.bench.workloads import make

gate_of = functools.cache(PictureGate)


@pytest.fixture(scope="session")
def work():
    return make("sd15-512", torch.device("cpu"), tiny=True, steps=1)


@pytest.fixture
def quick(monkeypatch):
    """The warm-up of a model this small says nothing: one picture will do, and exact latents are made once for all."""
    real = runner.settled
    monkeypatch.setattr(runner, "settled", lambda call, watch, **_: real(call, watch, least=1, most=1))
    monkeypatch.setattr(runner, "PictureGate", gate_of)
    monkeypatch.setattr(runner, "free_memory", lambda: None)
    # A run collects garbage again and again, and half of its time went into modules that were imported by then.
    gc.collect()
    gc.freeze()
