"""Where the time goes: `rocm-sd profile`, and `ROCmSDProfiler` for any program; see docs/profiling.md."""

from rocm_sd.bench.profiling.analysis import Analysis, Part, analyse
from rocm_sd.bench.profiling.findings import Finding, findings
from rocm_sd.bench.profiling.picture import Profiled, profile_picture
from rocm_sd.bench.profiling.rocprof import read_rocprof
from rocm_sd.bench.profiling.session import ROCmSDProfiler, profiler
from rocm_sd.bench.profiling.trace import Trace, UnreadableTrace, load, read

__all__ = [
    "Analysis",
    "Finding",
    "Part",
    "Profiled",
    "ROCmSDProfiler",
    "Trace",
    "UnreadableTrace",
    "analyse",
    "findings",
    "load",
    "profile_picture",
    "profiler",
    "read",
    "read_rocprof",
]
