"""Time ComfyUI's own sampling, stock and with the ROCmOptimizedModel and ROCmOptimizedVAE nodes, numerics first.

ROCM_SD_COMFYUI=/path/to/ComfyUI python benchmarks/comfyui.py --model sd15 --out results [--repeats 10] [--tiny]

The host's code is taken from the folder that ROCM_SD_COMFYUI names. The weights are random, of the real architectures:
speed does not depend on them. Stock and optimised runs take turns in one process: euler, 20 steps, guidance 7.5, batch
1. Nothing is timed before one step of the UNet, and one decode of the VAE, were compared with a run in a wider dtype.
Of the host's packages those for sound and video may be missing: empty modules stand in for them.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
import types
from pathlib import Path

import torch

import rocm_sd
from rocm_sd import numerics
from rocm_sd.integrations.comfyui import benchmark, patching
from rocm_sd.integrations.comfyui.random_model import MODELS, fill, patcher

_NOT_NEEDED = (
    "torchaudio", "torchvision", "torchsde", "av", "kornia", "spandrel", "sentencepiece", "comfy_aimdo",
    "comfy_kitchen",
)  # fmt: skip
VAE = {
    "double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128,
    "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0,
}  # fmt: skip


class _StandIn(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn(f"{self.__name__}.{name}")

    def __call__(self, *_args, **_named):
        return self


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, _path=None, _target=None):
        known = name.partition(".")[0] in _NOT_NEEDED
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec):
        return _StandIn(spec.name)

    def exec_module(self, module):
        pass


def load_host(*, cpu: bool) -> str:
    """Import the host; returns its version."""
    folder = os.environ.get("ROCM_SD_COMFYUI")
    if not folder or not (Path(folder) / "comfy").is_dir():
        sys.exit("Set ROCM_SD_COMFYUI to the folder of a ComfyUI.")
    # At the ends: what is installed is found first.
    sys.path.append(folder)
    sys.meta_path.append(_StandIns())
    cli = importlib.import_module("comfy.cli_args")
    cli.args.cpu = cpu
    for name in ("comfy.sd", "comfy.sample", "comfy.model_patcher", "comfy.supported_models"):
        importlib.import_module(name)
    version = Path(folder) / "comfyui_version.py"
    found = [line for line in version.read_text().splitlines() if "=" in line] if version.is_file() else []
    return found[-1].split("=")[1].strip().strip('"') if found else "unknown"


def build_vae(*, tiny: bool):
    config = {**VAE, "ch": 32 if tiny else VAE["ch"]}
    kind = importlib.import_module("comfy.ldm.models.autoencoder").AutoencoderKL
    model = kind(ddconfig=config, embed_dim=4)
    fill(model)
    params = {"params": {"ddconfig": config, "embed_dim": 4}}
    return importlib.import_module("comfy.sd").VAE(sd=dict(model.state_dict()), config=params)


def check_unet(stock, optimized, size: int) -> dict[str, float]:
    """One step of each against a wider dtype, at the third call: from there on calls are replays."""
    management = importlib.import_module("comfy.model_management")
    device, unet = stock.load_device, stock.model.diffusion_model
    dtype, config = unet.dtype, stock.model.model_config.unet_config
    generator = torch.Generator().manual_seed(1)
    shapes = {"x": (2, 4, size // 8, size // 8), "context": (2, 77, config["context_dim"])}
    if config.get("adm_in_channels"):
        shapes["y"] = (2, config["adm_in_channels"])
    inputs = {name: torch.randn(shape, generator=generator).to(device, dtype) for name, shape in shapes.items()}
    time_of = torch.tensor([700.0, 700.0], device=device)

    def call(patcher):
        management.load_models_gpu([patcher])
        options = {**patcher.model_options["transformer_options"], "wrappers": patcher.wrappers}
        return patcher.model.diffusion_model(
            inputs["x"], time_of, context=inputs["context"], y=inputs.get("y"), transformer_options=options
        )

    expected = call(stock)
    with torch.inference_mode(mode=False), torch.no_grad():
        wide = copy.deepcopy(unet).to(_wider(dtype))
    wide.dtype = _wider(dtype)
    named = {name: tensor.to(wide.dtype) for name, tensor in inputs.items()}
    exact = wide(named["x"], time_of, context=named["context"], y=named.get("y"), transformer_options={})
    del wide
    for _ in range(3):
        got = call(optimized)
    return _judged("the UNet", got, exact, expected)


def check_vae(stock, optimized, latents: torch.Tensor) -> dict[str, float]:
    expected, got = stock.decode(latents), optimized.decode(latents)
    dtype = _wider(stock.vae_dtype)
    model = copy.deepcopy(stock.first_stage_model).to(stock.device, dtype)
    exact = stock.process_output(model.decode(latents.to(stock.device, dtype))).movedim(1, -1).to(expected.device)
    return _judged("the VAE", got, exact, expected)


def _wider(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float32 else torch.float32


def _judged(name: str, got, exact, expected) -> dict[str, float]:
    comparison = numerics.require(name, got, exact.double(), expected)
    print(f"{name}: {comparison}")
    scale = float(exact.double().norm())
    return {
        "error": float((got.double() - exact.double()).norm()) / scale,
        "error_of_stock": float((expected.double() - exact.double()).norm()) / scale,
    }


def timed(device: torch.device, run) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def in_turns(device, repeats: int, stock, optimized) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"stock": [], "optimized": []}
    for _ in range(repeats):
        times["stock"].append(timed(device, stock))
        times["optimized"].append(timed(device, optimized))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="sd15")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--size", type=int, default=None, help="pixels a side; the model's own if not given")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--level", default="auto")
    parser.add_argument("--tiny", action="store_true", help="a small model, to see the script work on a CPU")
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    version = load_host(cpu=not gpu)
    dtype = torch.float16 if gpu else torch.float32
    size = options.size or (64 if options.tiny else MODELS[options.model][2])
    with torch.inference_mode():
        result = measure(options, size, dtype)
    device = torch.device("cuda" if gpu else "cpu")
    result |= {
        "model": options.model, "size": size, "steps": options.steps, "dtype": str(dtype), "host": f"ComfyUI {version}",
        "device": torch.cuda.get_device_name(device) if gpu else platform.processor() or "cpu",
        "torch": torch.__version__, "rocm_sd": rocm_sd.__version__,
        "command": "python benchmarks/comfyui.py " + " ".join("results" if "/" in a else a for a in sys.argv[1:]),
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"comfyui-{options.model}-{size}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"written to {path}")


def measure(options, size: int, dtype: torch.dtype) -> dict:
    model = patcher(options.model, dtype, tiny=options.tiny)
    device, sampling = model.load_device, benchmark.Sampling(size, size)
    optimized = patching.optimize_model(model, options.level, "exact")
    result: dict = {"unet": check_unet(model, optimized, size)}

    def sample(patcher, steps=options.steps):
        return sampling.run(patcher, steps)

    sample(model)
    result["first_sampling_s"] = timed(device, lambda: sample(optimized))
    sample(optimized)
    times = in_turns(device, options.repeats, lambda: sample(model), lambda: sample(optimized))
    steps: dict[str, list[float]] = {"stock": [], "optimized": []}
    for _ in range(options.repeats):
        for name, one in (("stock", model), ("optimized", optimized)):
            steps[name].append(sample(one)[1])
    result["sampling_s"], result["step_s"] = _summary("sampling", times), _summary("a step", steps)
    print("\n".join(patching.report_of(optimized).lines()))
    vae = build_vae(tiny=options.tiny)
    fast = patching.optimize_vae(vae, options.level)
    latents = torch.randn(1, 4, size // 8, size // 8, generator=torch.Generator().manual_seed(2))
    result["vae"] = check_vae(vae, fast, latents)
    for _ in range(2):
        vae.decode(latents), fast.decode(latents)
    times = in_turns(device, options.repeats, lambda: vae.decode(latents), lambda: fast.decode(latents))
    result["decode_s"], result["vae_dtype"] = _summary("decode", times), str(vae.vae_dtype)
    print("\n".join(patching.report_of(fast).lines()))
    return result


def _summary(name: str, times: dict[str, list[float]]) -> dict:
    middle = {kind: statistics.median(values) for kind, values in times.items()}
    ratio = middle["stock"] / middle["optimized"]
    print(f"{name}: stock {1e3 * middle['stock']:.2f} ms, optimised {1e3 * middle['optimized']:.2f} ms: {ratio:.2f}x")
    return {**times, "median": middle, "speedup": ratio}


if __name__ == "__main__":
    main()
