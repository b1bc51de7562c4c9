"""A host for each test, and everything of ours as new."""

from __future__ import annotations

import pytest
from a1111_world import fresh, start_host


@pytest.fixture
def as_new():
    with fresh():
        yield


@pytest.fixture
def host(as_new):
    return start_host()


@pytest.fixture
def script(host):
    """The script of a host that has loaded the extension."""
    from rocm_sd.integrations import a1111

    kind = a1111.register()
    host.sd_unet.list_unets()
    return kind()
