"""Who is timed: each engine makes a stock pipeline ready, in its own way. Others join by an entry point.

A package adds an engine by naming an `Engine`, or a function that returns one, in its pyproject.toml:

    [project.entry-points."rocm_sd.bench_engines"]
    my-engine = "my_package.bench:engine"
"""

from __future__ import annotations

import importlib.metadata
import tempfile
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import rocm_sd
from rocm_sd import plugging
from rocm_sd.bench.lossy import Lossy, claiming
from rocm_sd.bench.verdict import LOSSY_ENGINES
from rocm_sd.errors import Unsupported, require_one_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["BUILT_IN", "ENTRY_POINTS", "Engine", "chosen", "default_names", "engines", "ours", "stock"]

ENTRY_POINTS = "rocm_sd.bench_engines"


@dataclass(frozen=True)
class Engine:
    """`prepare` takes a pipeline of its own and returns it ready; compiling may come with the first picture.

    `why_not(device)` gives the reason that it cannot run there, or None. `provider` is who computes. `lossy`: of one
    that approximates; without it an engine is exact, and is held to that.
    """

    name: str
    provider: str
    prepare: Callable[[Any], Any]
    why_not: Callable[[torch.device], str | None]
    version: Callable[[], str]
    lossy: Lossy | None = None


def _anywhere(_device: torch.device) -> str | None:
    return None


def _torch_version() -> str:
    return f"torch {torch.__version__}"


def _as_it_is(pipe: Any) -> Any:
    return pipe


def _channels_last(pipe: Any) -> Any:
    pipe.unet.to(memory_format=torch.channels_last)
    pipe.vae.to(memory_format=torch.channels_last)
    return pipe


def _compiled(mode: str) -> Callable[[Any], Any]:
    def prepare(pipe: Any) -> Any:
        _channels_last(pipe)
        # The modes differ in graphs and in searches that are a GPU's; a CPU has the default.
        chosen_mode = None if pipe.unet.device.type == "cpu" else mode
        pipe.unet.forward = torch.compile(pipe.unet.forward, mode=chosen_mode, fullgraph=True)
        pipe.vae.decode = torch.compile(pipe.vae.decode, mode=chosen_mode, fullgraph=True)
        return pipe

    return prepare


def _optimized(pipe: Any, quality: str = "exact") -> Any:
    return rocm_sd.optimize(pipe, quality=quality)


def _our_version() -> str:
    return f"rocm-sd {rocm_sd.__version__}"


def _xformers(pipe: Any) -> Any:
    pipe.enable_xformers_memory_efficient_attention()
    return pipe


def _xformers_why_not(device: torch.device) -> str | None:
    if find_spec("xformers") is None:
        return "xformers is not installed: pip install xformers"
    return "xformers needs a GPU" if device.type == "cpu" else None


def _onnxruntime(pipe: Any, *, fused: bool = False) -> Any:
    """Exported as it is, and run by the provider that fits the device; the numerics gate compares it with torch."""
    # Diffusers is slow to import, and most runs need none of this.
    from rocm_sd.onnx.exporting import export_pipeline  # noqa: PLC0415
    from rocm_sd.onnx.optimizing import optimize_folder  # noqa: PLC0415
    from rocm_sd.onnx.pipeline import ROCmOnnxPipeline  # noqa: PLC0415

    on_gpu = pipe.unet.device.type != "cpu"
    provider = "auto" if on_gpu else "cpu"
    with tempfile.TemporaryDirectory(prefix="rocm-sd-onnx-") as place:
        folder = Path(place) / "plain"
        export_pipeline(pipe, folder, source="bench", check=False)
        if fused:
            plain, folder = folder, Path(place) / "fused"
            optimize_folder(plain, folder, provider=provider)
        # Of torch nothing more is needed, and a card has its memory to itself again.
        for part in (pipe.unet, pipe.vae):
            part.to("meta")
        exported = ROCmOnnxPipeline.from_pretrained(folder, provider)
    if on_gpu and not exported.provider.is_gpu:
        # Installed, and unable to use the card: a comparison would be of a GPU with a CPU.
        raise Unsupported("onnxruntime", "this card", hint="Type: rocm-sd doctor, to see the card and its driver.")
    exported.set_progress_bar_config(disable=True)
    return exported


def _onnxruntime_why_not(device: torch.device) -> str | None:
    missing = [name for name in ("onnx", "onnxruntime", "onnxscript") if find_spec(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed: pip install 'rocm-sd[onnx]'"
    if device.type == "cpu":
        return None
    from rocm_sd.onnx.providers import automatic  # noqa: PLC0415

    if set(automatic()) - {"cpu"}:
        return None
    return (
        "the installed onnxruntime computes on the CPU alone: install AMD's onnxruntime-migraphx for your ROCm, or "
        "onnxruntime-gpu for CUDA"
    )


def _version_of(package: str) -> Callable[[], str]:
    return lambda: f"{package} {importlib.metadata.version(package)}"


stock = Engine("stock", "torch", _as_it_is, _anywhere, _torch_version)
ours = Engine("rocm-sd", "rocm-sd", _optimized, _anywhere, _our_version)
BUILT_IN: tuple[Engine, ...] = (
    stock,
    Engine("channels_last", "torch", _channels_last, _anywhere, _torch_version),
    Engine("compile", "inductor", _compiled("reduce-overhead"), _anywhere, _torch_version),
    Engine("compile_max", "inductor", _compiled("max-autotune"), _anywhere, _torch_version),
    ours,
    *(
        Engine(name, "rocm-sd", partial(_optimized, quality=quality), _anywhere, _our_version, claiming(quality))
        for name, quality in LOSSY_ENGINES.items()
    ),
    Engine("xformers", "xformers", _xformers, _xformers_why_not, _version_of("xformers")),
    Engine("onnxruntime", "onnxruntime", _onnxruntime, _onnxruntime_why_not, _version_of("onnxruntime")),
    Engine(
        "onnxruntime_fused",
        "onnxruntime",
        partial(_onnxruntime, fused=True),
        _onnxruntime_why_not,
        _version_of("onnxruntime"),
    ),
)


def engines() -> dict[str, Engine]:
    """All that are built in or installed, by name. One that cannot be loaded is skipped, with a warning."""
    return plugging.by_name(ENTRY_POINTS, Engine, "engine", BUILT_IN)


def default_names(device: torch.device) -> tuple[str, ...]:
    """compile_max is only run when asked for: it may compile for ten minutes. On a CPU compiling takes longer, too."""
    return ("stock", "rocm-sd") if device.type == "cpu" else ("stock", "channels_last", "compile", "rocm-sd")


def chosen(names: Sequence[str], device: torch.device) -> tuple[Engine, ...]:
    """Engines by name, in that order; one that was asked for and cannot run here is an error with the reason."""
    there = engines()
    selected = []
    for name in dict.fromkeys(names):
        require_one_of("engine", name, there)
        reason = there[name].why_not(device)
        if reason:
            raise Unsupported(f"The engine {name}", f"this machine: {reason}", hint="Type: rocm-sd bench --list")
        selected.append(there[name])
    return tuple(selected)
