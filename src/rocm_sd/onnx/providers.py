"""Who computes: ONNX Runtime's providers by our names, what is installed, and the options that each is given.

The options' names are those of ONNX Runtime's sources. Of MIGraphX they changed with 1.23, with which the provider for
ROCm left ONNX Runtime.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
import torch

from rocm_sd import arch, settings
from rocm_sd.errors import DeviceUnavailable, InvalidOption, optional_module
from rocm_sd.files import read_text

__all__ = [
    "AUTO",
    "AUTOMATIC",
    "CAPTURING",
    "ERRORS_ALONE",
    "PROVIDERS",
    "TUNABLE",
    "Provider",
    "automatic",
    "cache_folder",
    "named",
    "runtime",
    "session_as_written",
]

log = logging.getLogger("rocm_sd")
PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "migraphx": "MIGraphXExecutionProvider",
    "rocm": "ROCMExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
AUTO = "auto"
# For which models are fused, and by which they are run. TensorRT builds engines for minutes before a first picture: it
# is used when asked for.
AUTOMATIC = ("migraphx", "rocm", "cuda", "cpu")
_PACKAGES = {
    "cpu": "pip install onnxruntime",
    "migraphx": "install AMD's onnxruntime-migraphx for your ROCm",
    "rocm": "install an onnxruntime-rocm up to 1.22, or use provider migraphx",
    "cuda": "pip install onnxruntime-gpu",
    "tensorrt": "pip install onnxruntime-gpu tensorrt",
}
_MIGRAPHX_CACHES_FROM = (1, 23)
# Where ROCm's packages write theirs, for a torch that was built for something else.
_ROCM_VERSION = Path("/opt/rocm/.info/version")
# What captures calls as graphs, and the option by which it does.
CAPTURING = {"cuda": "enable_cuda_graph", "rocm": "enable_hip_graph", "tensorrt": "trt_cuda_graph_enable"}
TUNABLE = ("cuda", "rocm")
# Of ONNX Runtime's log_severity_level.
ERRORS_ALONE = 3


@dataclass(frozen=True)
class Provider:
    """`options`: as ONNX Runtime takes them. `graphs`: calls are captured, and later ones replay them.

    `card`: the number by which torch and ONNX Runtime know the GPU.
    """

    name: str
    options: dict[str, str]
    graphs: bool = False
    card: int = 0

    @property
    def runtime_name(self) -> str:
        return PROVIDERS[self.name]

    @property
    def is_gpu(self) -> bool:
        return self.name != "cpu"

    @property
    def device(self) -> torch.device:
        """Where its inputs and outputs lie: with a torch that sees no GPU they come from the host and go back."""
        return torch.device("cuda", self.card) if self.is_gpu and torch.cuda.is_available() else torch.device("cpu")

    @property
    def binding_device(self) -> str:
        """What ONNX Runtime calls that device; "cuda" means NVIDIA's alone since 1.23."""
        if self.device.type == "cpu":
            return "cpu"
        return "gpu" if self.name == "migraphx" and _version() >= _MIGRAPHX_CACHES_FROM else "cuda"


def runtime() -> Any:
    """The module onnxruntime, or MissingDependency."""
    return optional_module("onnxruntime", "onnxruntime", "onnx")


def session_as_written(file: Path) -> Any:
    """On the CPU, with nothing fused or folded by the runtime itself: what the file says, and no more memory than that.

    Folded constants of float16 would be held in float32, of which a CPU's kernels are: SDXL's take 10 GB then.
    """
    module = runtime()
    options = module.SessionOptions()
    options.graph_optimization_level = module.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = ERRORS_ALONE
    return module.InferenceSession(str(file), options, providers=[PROVIDERS["cpu"]])


def automatic() -> tuple[str, ...]:
    """Of AUTOMATIC what is installed, in that order: whether there is a card, too, is known when it is tried."""
    there = runtime().get_available_providers()
    return tuple(name for name in AUTOMATIC if PROVIDERS[name] in there)


def named(name: str, *, graphs: bool = False, tuning: bool = False) -> Provider:
    """The provider asked for by name, on torch's current GPU; raises where it is not known or not installed.

    `graphs` and `tuning`: raise where it cannot.
    """
    if name not in PROVIDERS:
        raise InvalidOption("provider", name, [AUTO, *PROVIDERS])
    there = runtime().get_available_providers()
    if PROVIDERS[name] not in there:
        ours = [each for each, theirs in PROVIDERS.items() if theirs in there]
        raise DeviceUnavailable(
            f"The installed onnxruntime has no provider {name}; it has {', '.join(ours)}.",
            hint=f"To have it, {_PACKAGES[name]}. Or give provider {AUTO}.",
        )
    if graphs and name not in CAPTURING:
        raise InvalidOption("graphs", "on", [], hint=f"{name} captures none: use one of {', '.join(CAPTURING)}.")
    if tuning and name not in TUNABLE:
        raise InvalidOption("tuning", "on", [], hint=f"{name} has no tunable ops: use one of {', '.join(TUNABLE)}.")
    options = _options(name, graphs=graphs, tuning=tuning)
    if name == "cpu" or not torch.cuda.is_available():
        return Provider(name, options, graphs)
    # Of the same card as torch's tensors: ONNX Runtime's own choice is the first.
    card = torch.cuda.current_device()
    return Provider(name, options | {"device_id": str(card)}, graphs, card)


def _options(name: str, *, graphs: bool, tuning: bool) -> dict[str, str]:
    """No provider is told to compute in float16: MIGraphX and TensorRT round whole models then.

    What is to be half precision has such weights. The rest is float32 with a reason: SDXL's VAE, the safety checker and
    the attention of SD 2.1 overflow, or lose their meaning.
    """
    options: dict[str, str] = {}
    if graphs:
        options[CAPTURING[name]] = "1"
    if tuning or name == "rocm":
        # ROCm's MultiHeadAttention raises without tunable ops; whether they are tuned is another option.
        options["tunable_op_enable"] = "1"
    if tuning:
        options["tunable_op_tuning_enable"] = "1"
    if name == "migraphx":
        options |= _migraphx()
    if name == "tensorrt":
        kept = str(_made(cache_folder("tensorrt")))
        options |= {"trt_engine_cache_enable": "1", "trt_engine_cache_path": kept}
        options |= {"trt_timing_cache_enable": "1", "trt_timing_cache_path": kept}
    return options


def _migraphx() -> dict[str, str]:
    """Compiling takes minutes a model and a size: what was compiled is kept, where this version can."""
    if _version() >= _MIGRAPHX_CACHES_FROM:
        return {"migraphx_model_cache_dir": str(_made(cache_folder("migraphx")))}
    log.warning("onnxruntime %s keeps no models that MIGraphX compiled: 1.23 does", runtime().__version__)
    return {}


def cache_folder(name: str) -> Path:
    """For what a provider compiles: another card or another version has another folder."""
    card = arch.detect(torch.device("cuda")).name if torch.cuda.is_available() else _cards_without_torch()
    libraries = torch.version.hip or torch.version.cuda or read_text(_ROCM_VERSION)
    versions = f"{runtime().__version__} {libraries}"
    chosen = settings.current().cache_dir or Path(platformdirs.user_cache_dir("rocm-sd", appauthor=False))
    return chosen / "onnx" / name / card / hashlib.sha256(versions.encode()).hexdigest()[:16]


def _cards_without_torch() -> str:
    """AMD's cards by the driver, in its order: which of them computes, is known to ONNX Runtime alone."""
    amd = sorted((gpu for gpu in arch.find_gpus() if gpu.arch_name), key=lambda gpu: gpu.node or 0)
    return "-".join(dict.fromkeys(str(gpu.arch_name) for gpu in amd)) or "unknown"


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in runtime().__version__.split(".")[:2])
