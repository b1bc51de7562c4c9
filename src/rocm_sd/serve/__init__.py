"""Pictures over HTTP: a queue, a step batcher for each device, and the APIs that clients already speak."""

from rocm_sd.serve.app import create_app
from rocm_sd.serve.config import Limits, ServeConfig
from rocm_sd.serve.jobs import Busy, Cancelled, Job, TooLate
from rocm_sd.serve.service import Service

__all__ = ["Busy", "Cancelled", "Job", "Limits", "ServeConfig", "Service", "TooLate", "create_app"]
