"""A model's calls as graphs: captured once for each kind of call, looked at before each replay.

`CapturedCalls` is one state machine for every host program; what a host decides is a `Policy`.
"""

from rocm_sd.engine.capture.captured import CapturedCalls, graphs_wanted
from rocm_sd.engine.capture.foreign import has_foreign_forward, moves_weights, why_foreign, why_foreign_layer
from rocm_sd.engine.capture.hoisting import PreparedCall
from rocm_sd.engine.capture.policy import HostCall, Policy
from rocm_sd.engine.capture.randomness import DRAWS_NUMBERS, Drawn
from rocm_sd.engine.capture.segments import BetweenExchanges, Exchanged, capture_between, exchange, no_exchange
from rocm_sd.engine.capture.snapshot import FlatCall, Snapshot, flatten
from rocm_sd.engine.capture.trial import NotAdopted, Trial, why_different
from rocm_sd.engine.capture.turns import capturing, running
from rocm_sd.engine.capture.warmup import compile_kernels, start_compiling

__all__ = [
    "DRAWS_NUMBERS", "BetweenExchanges", "CapturedCalls", "Drawn", "Exchanged", "FlatCall", "HostCall", "NotAdopted",
    "Policy", "PreparedCall", "Snapshot", "Trial", "capture_between", "capturing", "compile_kernels", "exchange",
    "flatten", "graphs_wanted", "has_foreign_forward", "moves_weights", "no_exchange", "running", "start_compiling",
    "why_different", "why_foreign", "why_foreign_layer",
]  # fmt: skip
