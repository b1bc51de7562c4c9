"""Where the time goes: `rocm-sd profile`, and `ROCmSDProfiler` for any program; see docs/performance-analysis.md."""

from rocm_sd.bench.profiling.analysis import Analysis, TimePart, analyse
from rocm_sd.bench.profiling.findings import SlowPath, findings
from rocm_sd.bench.profiling.session import Profiled, ROCmSDProfiler, profile_picture, profiler
from rocm_sd.bench.profiling.trace import Trace, UnreadableTrace, load, read, read_rocprof

__all__ = [
    "Analysis", "Profiled", "ROCmSDProfiler", "SlowPath", "TimePart", "Trace", "UnreadableTrace", "analyse", "findings",
    "load", "profile_picture", "profiler", "read", "read_rocprof",
]  # fmt: skip
