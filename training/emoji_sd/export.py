"""Stage 5: the Diffusers folder in fp16, checked by loading it back.

`--pack DIR` splits folder, embedding and logs into parts of at most 15 MiB; `export --unpack DIR` joins them again.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import tarfile
from pathlib import Path

import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel
from training.emoji_sd.architecture import noise_schedule
from training.emoji_sd.glyphs import CACHE
from transformers import CLIPTextModel, CLIPTokenizer

from rocm_sd.errors import CorruptModel, ModelNotFound, NumericsFailure, RocmSdError

__all__ = ["export", "folder_size", "main", "pack", "unpack"]

LARGEST = 40_000_000
PART = 15 * 1024 * 1024


def folder_size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def export(run: Path, tokenizer: Path, folder: Path) -> int:
    """Writes `folder` anew from the stages' results under `run` and returns its size in bytes."""
    for needed in (run / "unet", run / "text_encoder", run / "vae", tokenizer):
        if not needed.is_dir():
            raise ModelNotFound(
                f"{needed} is missing.", hint="Run the stages before this one first (docs/emoji-sd.md)."
            )
    pipe = StableDiffusionPipeline(
        vae=AutoencoderKL.from_pretrained(run / "vae"),
        text_encoder=CLIPTextModel.from_pretrained(run / "text_encoder"),
        tokenizer=CLIPTokenizer.from_pretrained(tokenizer),
        unet=UNet2DConditionModel.from_pretrained(run / "unet"),
        scheduler=noise_schedule(),
        safety_checker=None,
        feature_extractor=None,
        image_encoder=None,
        requires_safety_checker=False,
    )
    for module in (pipe.unet, pipe.vae, pipe.text_encoder):
        module.half()
        largest = max(p.detach().abs().max().item() for p in module.parameters())
        if not largest < 65504:
            raise NumericsFailure(f"A weight of {type(module).__name__} is {largest}: too large for fp16.")
    if folder.exists():
        shutil.rmtree(folder)
    pipe.save_pretrained(folder, safe_serialization=True)
    # CLIP's classic files beside tokenizer.json: older versions of transformers read only these.
    for name in ("vocab.json", "merges.txt"):
        if not (folder / "tokenizer" / name).exists():
            shutil.copy(tokenizer / name, folder / "tokenizer" / name)
    for file in folder.rglob("config.json"):
        _tidy_config(file)
    for file in folder.rglob("*.safetensors"):
        # Written for the owner alone, and a wheel keeps the mode.
        file.chmod(0o644)
    return folder_size(folder)


def _tidy_config(file: Path) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    # Where it was loaded from means nothing to anybody else.
    content.pop("_name_or_path", None)
    if "dtype" in content:
        # Asked for no type, Transformers takes the config's and Diffusers float32: they must agree, or a plain
        # from_pretrained gives a pipeline of two types that cannot run. The file itself stays fp16.
        content["dtype"] = "float32"
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def check(folder: Path, steps: int) -> None:
    """Loads the folder as anybody would and draws one picture with it."""
    pipe = StableDiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    image = pipe("a frog on a pink background", num_inference_steps=steps, output_type="pt").images
    if tuple(image.shape) != (1, 3, 128, 128) or not bool(torch.isfinite(image).all()):
        raise NumericsFailure(f"{folder} loads, but draws {tuple(image.shape)} with values that are not finite.")


def pack(folder: Path, run: Path, target: Path) -> list[Path]:
    """One tar of model, embedding, logs and metrics, cut into parts that pass through a 16 MiB limit."""
    target.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(folder, arcname="emoji-sd")
        for file in sorted([*run.glob("*.jsonl"), *run.glob("*.safetensors"), *run.glob("metrics*.json")]):
            tar.add(file, arcname=file.name)
    content = buffer.getvalue()
    parts = []
    for number, start in enumerate(range(0, len(content), PART)):
        parts.append(target / f"emoji-sd.tar.{number:02d}")
        parts[-1].write_bytes(content[start : start + PART])
    return parts


def unpack(source: Path, target: Path) -> None:
    """Joins what `pack` cut: target/emoji-sd, target/embedding.safetensors and the logs."""
    parts = sorted(source.glob("emoji-sd.tar.*"))
    if not parts:
        raise ModelNotFound(f"There are no parts named emoji-sd.tar.00 and on in {source}.")
    target.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(fileobj=io.BytesIO(b"".join(part.read_bytes() for part in parts))) as tar:
            tar.extractall(target, filter="data")
    except tarfile.TarError as error:
        raise CorruptModel(f"The parts in {source} do not make a whole ({error}).", hint="Copy them again.") from error


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m training.emoji_sd.export", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/emoji-sd"), help="where the stages left their results")
    parser.add_argument("--tokenizer", type=Path, default=CACHE / "tokenizer")
    parser.add_argument("--folder", type=Path, help="the Diffusers folder to write (default: OUT/emoji-sd)")
    parser.add_argument("--pack", type=Path, metavar="DIR", help="also write everything in parts to DIR")
    parser.add_argument("--pack-only", action="store_true", help="pack a folder that is exported already")
    parser.add_argument("--unpack", type=Path, metavar="DIR", help="join the parts of DIR into OUT, and nothing else")
    parser.add_argument("--check-steps", type=int, default=4)
    options = parser.parse_args(arguments)
    if options.unpack:
        unpack(options.unpack, options.out)
        print(f"unpacked into {options.out}")
        return
    folder = options.folder or options.out / "emoji-sd"
    if not options.pack_only:
        size = export(options.out, options.tokenizer, folder)
        if size > LARGEST:
            raise RocmSdError(f"{folder} takes {size / 1e6:.1f} MB, more than the 40 MB it may.")
        check(folder, options.check_steps)
        print(f"{folder}: {size / 1e6:.2f} MB, loads and draws")
    if options.pack:
        for part in pack(folder, options.out, options.pack):
            print(f"{part}: {part.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
