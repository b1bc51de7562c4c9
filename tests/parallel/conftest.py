"""Jobs that the tests of a module share."""

from __future__ import annotations

import pytest
from jobs import Job


@pytest.fixture(scope="module")
def two():
    job = Job(2)
    yield job
    job.close()


@pytest.fixture(scope="module")
def four():
    job = Job(4)
    yield job
    job.close()
