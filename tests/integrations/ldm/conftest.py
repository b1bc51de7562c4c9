"""The fakes of both hosts, and everything of ours as new for each test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent.parent / host) for host in ("a1111", "comfyui")]


@pytest.fixture
def as_new():
    from a1111_world import fresh

    with fresh():
        yield
