"""Putting rocm-sd into ComfyUI and Automatic1111, and taking it out again."""

from rocm_sd.integrations.installing.hosts import HOSTS, Host, NotAHost, recognise
from rocm_sd.integrations.installing.interpreters import HostNotReady, PythonFacts, examine, host_python, what_to_type
from rocm_sd.integrations.installing.placing import Placed, Removed, place, remove

__all__ = [
    "HOSTS", "Host", "HostNotReady", "NotAHost", "Placed", "PythonFacts", "Removed", "examine", "host_python", "place",
    "recognise", "remove", "what_to_type",
]  # fmt: skip
