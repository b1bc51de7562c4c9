"""export_single(pipe, out) -> Manifest: `rocm-sd onnx export --single`, a whole picture as one ONNX model.

Its parts are exported and compared with torch in OUT/parts, joined, and the result is compared with the pipeline of its
parts under Diffusers' own scheduler. Then the parts go.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
import torch

from rocm_sd.errors import CorruptModel, NoDiskSpace, RocmSdError, Unsupported, optional_module
from rocm_sd.files import told_when_full
from rocm_sd.onnx import comparing, layout
from rocm_sd.onnx.exporting import export_pipeline
from rocm_sd.onnx.modules import flavour
from rocm_sd.onnx.pipeline import ROCmOnnxPipeline

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_sd.onnx.joining import Drawing

    Progress = Callable[[int, int, str], None]

__all__ = ["PARTS_FOLDER", "export_single"]

PARTS_FOLDER = "parts"
_UNFINISHED = ".unfinished-"
# Of a picture alone: nothing of it encodes pictures or checks them.
_JOINED = ("text_encoder", "text_encoder_2", "unet", "vae_decoder")
# A protocol buffer holds 2 GiB, of which the graph itself takes some megabytes.
_MOST_IN_ONE_FILE = 2**31 - 64 * 2**20
_GUIDANCE = {"sd": 7.5, "sdxl": 5.0}
_CHECKED = {"num_inference_steps": 2, "guidance_scale": 3.0, "num_images_per_prompt": 2, "output_type": "pt"}


def export_single(
    pipe: Any, out: Path, *, source: str, force: bool = False, progress: Progress | None = None
) -> layout.Manifest:
    """Raises Unsupported before anything is written where the model has what one ONNX model has not."""
    optional_module("onnx_ir", "onnx-ir", "onnx")
    ddim, drawing = _drawing(pipe)
    tell = progress or (lambda *_: None)
    _require_place(out)
    parts = out / PARTS_FOLDER
    made = export_pipeline(pipe, parts, source=source, force=force, progress=tell)
    facts = _facts(pipe, drawing, made)
    tell(0, 2, "joining the parts")
    _require_room(parts)
    with told_when_full(out):
        unfinished = Path(tempfile.mkdtemp(dir=out, prefix=_UNFINISHED))
        try:
            _write(parts, unfinished, drawing)
            shutil.copytree(parts, unfinished, dirs_exist_ok=True, ignore=_models)
            whole = layout.described(layout.PICTURE, unfinished)
            manifest = replace(made, parts=(whole,), extra={"picture": facts, "unchecked": ""})
            manifest.save(unfinished)
            tell(1, 2, "compared with its parts")
            unchecked = comparing.short_of_memory(*(parts / name for name in _JOINED if (parts / name).is_dir()))
            if not unchecked:
                _require_as_parts(unfinished, parts, ddim, facts)
            manifest = replace(manifest, extra={"picture": facts, "unchecked": unchecked})
            (unfinished / layout.MANIFEST).unlink()
            for path in unfinished.iterdir():
                path.replace(out / path.name)
            # With it the folder is an export, and without it nothing is taken for one.
            manifest.save(out)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    shutil.rmtree(parts)
    tell(2, 2, "done")
    return manifest


def _drawing(pipe: Any) -> tuple[Any, Drawing]:
    from rocm_sd.onnx.joining import Ddim, Drawing  # noqa: PLC0415 -- it needs onnx-ir, which is optional

    family = flavour(pipe)
    for name in ("tokenizer", "text_encoder", *(("tokenizer_2", "text_encoder_2") if family == "sdxl" else ())):
        if getattr(pipe, name, None) is None:
            raise Unsupported("--single", f"a model without a {name}", hint="Leave it out.")
    if pipe.unet.config.time_cond_proj_dim is not None:
        raise Unsupported("--single", "a UNet that is told the guidance", hint="Leave it out.")
    vae = pipe.vae.config
    for name in ("latents_mean", "shift_factor"):
        if getattr(vae, name, None) is not None:
            raise Unsupported("--single", f"a VAE with {name}", hint="Leave it out.")
    ddim = diffusers.DDIMScheduler.from_config(pipe.scheduler.config)
    empty: tuple[int, ...] = ()
    if family == "sdxl" and pipe.config.force_zeros_for_empty_prompt:
        length = pipe.tokenizer.model_max_length
        empty = tuple(pipe.tokenizer("", padding="max_length", max_length=length).input_ids)
    scale = 2 ** (len(vae.block_out_channels) - 1)
    return ddim, Drawing(Ddim.of(ddim), vae.latent_channels, scale, vae.scaling_factor, empty)


def _facts(pipe: Any, drawing: Drawing, made: layout.Manifest) -> dict[str, Any]:
    unet = made.part("unet")
    assert unet is not None
    return {
        "channels": drawing.channels,
        "scale": drawing.scale,
        "side": int(pipe.unet.config.sample_size) * drawing.scale,
        "dtype": unet.dtype,
        "guidance": _GUIDANCE[flavour(pipe)],
        "train_steps": len(drawing.ddim.kept),
        "scheduler": "DDIM",
    }


def _require_place(out: Path) -> None:
    """A new folder, or one in which this was begun."""
    if out.exists() and not out.is_dir():
        raise RocmSdError(f"{out} is a file.", hint="Give the name of a folder.")
    if not out.is_dir():
        return
    for left in out.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)
    if not any(out.iterdir()):
        return
    if (out / layout.MANIFEST).is_file():
        try:
            held = layout.Manifest.load(out).source
        except CorruptModel as error:
            raise CorruptModel(error.message, hint="Give another folder.") from error
        raise RocmSdError(f"{out} holds an export of {held} already.", hint="Give another folder, or remove this one.")
    if not (out / PARTS_FOLDER / layout.MANIFEST).is_file():
        raise RocmSdError(f"{out} is there already, and holds something else.", hint="Give another folder.")


def _require_room(parts: Path) -> None:
    needed = sum(file.stat().st_size for name in _JOINED for file in (parts / name).glob("*"))
    free = shutil.disk_usage(parts).free
    if free < needed:
        raise NoDiskSpace(parts.parent, needed=needed, free=free)


def _write(parts: Path, folder: Path, drawing: Drawing) -> None:
    import onnx_ir as ir  # noqa: PLC0415 -- optional, and asked for before
    from onnx_ir import external_data  # noqa: PLC0415

    import onnx  # noqa: PLC0415
    from rocm_sd.onnx.joining import joined  # noqa: PLC0415

    files = {name: parts / name / layout.MODEL for name in _JOINED if (parts / name).is_dir()}
    model = joined(files, drawing)
    weights = sum((file.parent / layout.DATA).stat().st_size for file in files.values())
    if weights > _MOST_IN_ONE_FILE:
        ir.save(model, folder / layout.MODEL, external_data=layout.DATA)
    else:
        external_data.load_to_model(model)
        ir.save(model, folder / layout.MODEL)
    onnx.checker.check_model(str(folder / layout.MODEL))


def _models(_folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name in {*layout.PARTS, layout.MANIFEST}]


def _require_as_parts(folder: Path, parts: Path, ddim: Any, facts: dict[str, Any]) -> None:
    """Two steps of a small picture. One pipeline after the other: both need not fit in memory."""
    side = 8 * facts["scale"]

    def drawn(place: Path, scheduler: Any) -> Any:
        pipe = ROCmOnnxPipeline.from_pretrained(place, "cpu")
        if scheduler is not None:
            pipe.scheduler = scheduler
            if getattr(pipe, "safety_checker", None) is not None:
                pipe.safety_checker = None
        pipe.set_progress_bar_config(disable=True)
        seeded = torch.Generator().manual_seed(0)
        return pipe(
            "a frog", negative_prompt="a dog", height=side, width=2 * side, generator=seeded, **_CHECKED
        ).images.float()

    expected, actual = drawn(parts, ddim), drawn(folder, None)
    in_its_dtype = expected.to(getattr(torch, facts["dtype"])).numpy()
    comparing.require_alike("a picture of the one model", actual.numpy(), in_its_dtype)
