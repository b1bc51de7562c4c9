"""A host for each test, and everything of ours as new."""

from __future__ import annotations

import pytest
from a1111_world import clean_imports, start_host

from rocm_sd.integrations.a1111 import messages


@pytest.fixture
def as_new():
    """The host's packages can be imported within, and leave no trace."""
    from rocm_sd.integrations.a1111 import unet_option
    from rocm_sd.integrations.a1111.permission import PERMISSION
    from rocm_sd.integrations.a1111.switch import SWITCH

    def reset():
        SWITCH.restore()
        SWITCH._wish = None
        PERMISSION.mend()
        PERMISSION.whole = False
        messages.forget()
        unet_option._option.cache_clear()

    reset()
    with clean_imports():
        yield
    reset()


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
