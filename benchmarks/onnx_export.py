"""Seconds and memory of an export to ONNX, part by part: Stable Diffusion 1.5, 2.1 and SDXL, real size, random weights.

python benchmarks/onnx_export.py sdxl --float16 --folder /path/sdxl --out benchmarks/onnx-cpu

`--upcast-attention`: the config of SD 2.1's own UNet, whose attention is computed in float32. `--for-fusions`: UNet and
VAE alone, not compared with torch, and no record: what benchmarks/onnx_fusions.py needs, in less memory and time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import torch
from diffusers.models.attention_processor import Attention
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
)

from rocm_sd.bench.architectures import random_pipeline
from rocm_sd.bench.machine import PeakMemory, machine
from rocm_sd.models import resolve
from rocm_sd.onnx.exporting import export_pipeline

CPU = torch.device("cpu")
_SD15_TEXT = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
_SD21_TEXT = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 23, "num_attention_heads": 16}
_BIG_TEXT = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20}
_VISION = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 14,
}


def text_encoder(tokenizer, kind=CLIPTextModel, **sizes):
    own = {"vocab_size": 49408, "projection_dim": sizes["hidden_size"], "eos_token_id": tokenizer.eos_token_id}
    return kind(CLIPTextConfig(**own, **sizes)).eval().requires_grad_(requires_grad=False)


def real_pipeline(family, dtype):
    """The tokenizer is emoji-sd's: of the models' own nothing but the number of tokens matters here."""
    pipe = random_pipeline(family, "euler" if family == "sdxl" else "ddim", "epsilon", CPU, dtype)
    tokenizer = CLIPTokenizer.from_pretrained(f"{resolve().location}/tokenizer", model_max_length=77)
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    parts = {"tokenizer": tokenizer}
    if family == "sd15":
        parts["text_encoder"] = text_encoder(tokenizer, **_SD15_TEXT)
        checker = StableDiffusionSafetyChecker(CLIPConfig(vision_config=_VISION, projection_dim=768))
        parts |= {"safety_checker": checker.eval(), "feature_extractor": CLIPImageProcessor()}
    elif family == "sd21":
        parts["text_encoder"] = text_encoder(tokenizer, **_SD21_TEXT)
    else:
        parts["text_encoder"] = text_encoder(tokenizer, **_SD15_TEXT)
        parts["text_encoder_2"] = text_encoder(tokenizer, CLIPTextModelWithProjection, **_BIG_TEXT)
        parts["tokenizer_2"] = tokenizer
    torch.set_default_dtype(torch.float32)
    return type(pipe)(**{**pipe.components, **parts})


def upcast_attention(unet):
    """What `upcast_attention` in its config makes of a UNet, of one that is there."""
    unet.register_to_config(upcast_attention=True)
    for module in unet.modules():
        if isinstance(module, Attention):
            module.upcast_attention = True


class Watch:
    """Seconds and the peak of resident memory of each part and step, told by the export's own progress."""

    def __init__(self):
        self.rows, self.started, self.step, self.memory = {}, time.perf_counter(), None, PeakMemory(CPU)

    def __call__(self, _done, _total, what):
        now, peak = time.perf_counter(), self.memory.mib()
        if self.step is not None:
            part, step = self.step
            row = self.rows.setdefault(part, {"peak_mib": 0.0})
            row[f"{step}_s"] = round(now - self.started, 1)
            row["peak_mib"] = round(max(row["peak_mib"], peak or 0.0), 0)
            print(f"{part}: {step} {now - self.started:.1f} s, {peak:.0f} MiB", flush=True)
        words = what.replace(":", "").split()
        self.step = (words[0], words[1]) if len(words) > 1 and words[1] != "is" else None
        self.started = now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=("sd15", "sd21", "sdxl"))
    parser.add_argument("--float16", action="store_true")
    parser.add_argument("--upcast-attention", action="store_true")
    parser.add_argument("--for-fusions", action="store_true")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/onnx-cpu"))
    asked = parser.parse_args()
    dtype = torch.float16 if asked.float16 else torch.float32
    resident = PeakMemory(CPU)
    alone = asked.for_fusions
    pipe = (
        random_pipeline(asked.family, "euler", "epsilon", CPU, dtype) if alone else real_pipeline(asked.family, dtype)
    )
    name = asked.family + ("-upcast" if asked.upcast_attention else "")
    if asked.upcast_attention:
        upcast_attention(pipe.unet)
    loaded = resident.mib()
    watch = Watch()
    if alone:
        export_pipeline(pipe, asked.folder, source=f"{name}-random", check=False, progress=watch)
        return
    started = time.perf_counter()
    manifest = export_pipeline(pipe, asked.folder, source=f"{name}-random", progress=watch)
    found = machine(CPU)
    versions = {**found.versions, **{name: metadata.version(name) for name in ("onnx", "onnxscript", "onnxruntime")}}
    record = {
        "what": f"export of {name} with random weights in real size to ONNX, checked against torch",
        "command": " ".join(
            [
                *("python", "benchmarks/onnx_export.py", asked.family),
                *(["--float16"] if asked.float16 else []),
                *(["--upcast-attention"] if asked.upcast_attention else []),
            ]
        ),
        "machine": {**asdict(found), "versions": versions, "cores": torch.get_num_threads()},
        "dtype": str(dtype).removeprefix("torch."),
        "seconds": round(time.perf_counter() - started, 1),
        "model_mib": round(loaded or 0.0),
        "parts": [
            {
                "part": part.name,
                "dtype": part.dtype,
                "bytes": sum(file.size for file in part.files),
                **watch.rows.get(part.name, {}),
            }
            for part in manifest.parts
        ],
    }
    asked.out.mkdir(parents=True, exist_ok=True)
    file = asked.out / f"{name}-{record['dtype']}.json"
    file.write_text(json.dumps(record, indent=2) + "\n")
    json.dump(record["parts"], sys.stdout, indent=1)


if __name__ == "__main__":
    main()
