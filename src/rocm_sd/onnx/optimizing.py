"""optimize_folder(exported, out) -> Optimized: the same pipeline with its graphs fused, and float16 where that is safe.

It is written beside its place, and renamed when all of it is there. A part's weights are read, changed and written one
after the other, so that a part of any size needs little memory.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import asdict, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocm_sd.errors import CorruptModel, NoDiskSpace, RocmSdError, Unsupported, first_line, optional_module
from rocm_sd.files import told_when_full
from rocm_sd.onnx import layout
from rocm_sd.onnx.fusions.results import Fused, Optimized, OptimizedPart
from rocm_sd.plain_json import read_json

if TYPE_CHECKING:
    from collections.abc import Callable

    import onnx_ir

    from rocm_sd.onnx.fusions.providers import Ops

    Progress = Callable[[int, int, str], None]

__all__ = ["optimize_folder"]

_GRAPH_BYTES = 16 * 2**20
_UNFINISHED = ".unfinished-"
_UNKNOWN_FORM = "in a form that no rule knows"


def optimize_folder(
    source: Path,
    out: Path,
    *,
    float16: bool = False,
    provider: str = "auto",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Optimized:
    """`source`: a folder that `rocm-sd onnx export` or Optimum wrote. `out`: a new folder, or with `overwrite` one of
    ours. Where it is a link, that stays.
    """
    optional_module("onnxruntime", "onnxruntime", "onnx")
    optional_module("onnx_ir", "onnx-ir", "onnx")
    # They need the packages that were asked for just now.
    from rocm_sd.onnx.fusions.providers import ops_of  # noqa: PLC0415

    ops = ops_of(provider)
    manifest, parts, index = _checked(source)
    _require_free(source, out, overwrite=overwrite)
    out = Path(os.path.realpath(out))
    _require_room(parts, out)
    tell = progress or (lambda *_: None)
    with told_when_full(out):
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=out.absolute().parent, prefix=f"{_UNFINISHED}{out.name[:60]}-"))
        try:
            _copy_rest(source, unfinished)
            made = []
            family = "sdxl" if layout.is_listed(index, "text_encoder_2") else "sd"
            for number, (name, model) in enumerate(parts.items()):
                tell(number, len(parts), name)
                part = _optimize_part(name, model, unfinished / name, ops, family=family, float16=float16)
                tell(number, len(parts), f"{name}: compared with the export")
                made.append(
                    replace(part, unchecked=_check(part, model, unfinished / name / layout.MODEL, ops, manifest))
                )
            tell(len(parts), len(parts), "done")
            result = Optimized(ops.name, float16, tuple(made))
            told = manifest or layout.Manifest(source.name, str(index.get("_class_name", "")), {})
            _manifest_of(told, unfinished, result).save(unfinished)
            unfinished.chmod(0o755)
            _put(unfinished, out)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return result


def _checked(source: Path) -> tuple[layout.Manifest | None, dict[str, Path], dict[str, Any]]:
    """The manifest, all parts, and model_index.json."""
    manifest = layout.require_export(source)
    if manifest is not None:
        layout.require_sizes(source, manifest)
        if manifest.whole is not None:
            raise Unsupported(
                "rocm-sd onnx optimize", f"{source}, which is one model", hint="Give an export without --single."
            )
        if manifest.optimized is not None:
            raise RocmSdError(f"{source} is optimized already.", hint="Give the folder that rocm-sd onnx export wrote.")
    index = _json(source / "model_index.json")
    return manifest, layout.require_parts(source, manifest, index, to_start_from_pictures=True), index


def _require_free(source: Path, out: Path, *, overwrite: bool) -> None:
    place, origin = Path(os.path.realpath(out)), Path(os.path.realpath(source))
    if place == origin or place in origin.parents or origin in place.parents:
        raise RocmSdError(f"{out} and {source} lie within one another.", hint="Give a new folder for the result.")
    if out.exists() and not out.is_dir():
        raise RocmSdError(f"{out} is a file.", hint="Give the name of a folder.")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise RocmSdError(f"{out} is there already.", hint="Give another folder, or --overwrite to replace it.")
    if out.is_dir() and any(out.iterdir()) and not (out / layout.MANIFEST).is_file():
        # All of it would go, and nobody could bring it back.
        raise RocmSdError(f"{out} is no export of rocm-sd, and is not replaced.", hint="Give another folder.")


def _require_room(parts: dict[str, Path], out: Path) -> None:
    """What is there now is the most that it can take: fusions add no weights but those of upsamplers."""
    needed = sum(file.stat().st_size for model in parts.values() for file in model.parent.iterdir() if file.is_file())
    place = next(folder for folder in out.absolute().parents if folder.exists())
    free = shutil.disk_usage(place).free
    if free < needed + _GRAPH_BYTES:
        raise NoDiskSpace(out, needed=needed + _GRAPH_BYTES, free=free)


def _copy_rest(source: Path, target: Path) -> None:
    """All but the models and the manifest: model_index.json, scheduler, tokenizers, configs."""
    for path in sorted(source.iterdir()):
        if path.name in layout.PARTS or path.name == layout.MANIFEST or path.name.startswith(_UNFINISHED):
            continue
        if path.is_dir():
            shutil.copytree(path, target / path.name)
        else:
            shutil.copyfile(path, target / path.name)


def _optimize_part(name: str, model: Path, target: Path, ops: Ops, *, family: str, float16: bool) -> OptimizedPart:
    import onnx_ir as ir  # noqa: PLC0415 -- optional, and asked for in optimize_folder

    from rocm_sd.onnx.fusions import float16 as precision  # noqa: PLC0415
    from rocm_sd.onnx.fusions.editing import Editor  # noqa: PLC0415
    from rocm_sd.onnx.fusions.fusing import fuse  # noqa: PLC0415
    from rocm_sd.onnx.fusions.sites import sites_of  # noqa: PLC0415

    config = _config(model.parent)
    loaded = _loaded(model)
    is_half = _weights_are_half(loaded)
    note = _why_wide(name, config, family) if float16 and not is_half else ""
    half = is_half or (float16 and not note)
    upcast = bool(config is not None and config.get("upcast_attention")) and half
    if upcast:
        # The packed kernels are of half precision only.
        ops = replace(ops, packed=False)
    found = fuse(loaded, ops, half=half)
    editor = Editor(loaded, ops, half)
    if half and not is_half:
        precision.to_half(editor)
    wide = precision.widen_attention(editor) if upcast else 0
    sites = sites_of(name, config) if config is not None else None
    target.mkdir()
    for file in sorted(model.parent.iterdir()):
        if file.is_file() and file.name not in {layout.MODEL, layout.DATA}:
            shutil.copyfile(file, target / file.name)
    loaded.producer_name, loaded.producer_version = "rocm-sd", metadata.version("rocm-sd")
    ir.save(loaded, target / layout.MODEL, external_data=layout.DATA)
    blocked = precision.BLOCKED if half and not is_half else ()
    return OptimizedPart(name, half, _compared(name, found, sites, ops), blocked, wide, note)


def _check(part: OptimizedPart, plain: Path, fused: Path, ops: Ops, manifest: layout.Manifest | None) -> str:
    """Raises where the fused part is no model, or computes something else; why it was not compared, or ""."""
    import onnx  # noqa: PLC0415
    from rocm_sd.onnx import comparing  # noqa: PLC0415
    from rocm_sd.onnx.fusions.providers import PROVIDERS  # noqa: PLC0415

    try:
        onnx.checker.check_model(str(fused))
    except onnx.checker.ValidationError as error:
        raise RocmSdError(
            f"The fused {part.name} is no model ({first_line(error)}).", hint="Please report it."
        ) from error
    if not PROVIDERS["cpu"].runs(ops):
        return f"a CPU has no kernels of {ops.name}"
    if manifest is None:
        return "the sizes that another exporter's model takes are not known"
    if part.name == "safety_checker":
        return "its answers are yes or no"
    short = comparing.short_of_memory(plain.parent)
    if short:
        return short
    comparing.require_as_plain(part.name, plain, fused)
    return ""


def _config(folder: Path) -> dict[str, Any] | None:
    file = folder / "config.json"
    return _json(file) if file.is_file() else None


def _json(file: Path) -> dict[str, Any]:
    def unreadable(reason: str) -> CorruptModel:
        return CorruptModel(f"{file} is not readable JSON ({reason}).", hint="Export the model again.")

    found: dict[str, Any] = read_json(file, partial(unreadable), of=dict, finite=False)
    return found


def _loaded(file: Path) -> onnx_ir.Model:
    import onnx_ir as ir  # noqa: PLC0415

    import onnx  # noqa: PLC0415 -- optional, as onnx_ir is
    from rocm_sd.onnx.fusions.functions import OPSETS  # noqa: PLC0415

    again = "Export the model again: rocm-sd onnx export"
    try:
        model = ir.load(file)
        opset, short = model.graph.opset_imports.get(""), _too_short(model)
        if opset in OPSETS and short is None:
            # A torn file may be read, and mean nothing.
            onnx.checker.check_model(str(file))
    except Exception as error:
        raise CorruptModel(f"{file} is no ONNX model that can be read ({first_line(error)}).", hint=again) from error
    if opset not in OPSETS:
        hint = f"Export it with one of {OPSETS[0]} to {OPSETS[-1]}: rocm-sd onnx export"
        raise Unsupported("rocm-sd onnx optimize", f"opset {opset}, which {file} has", hint=hint)
    if short is not None:
        raise CorruptModel(short, hint=again)
    return model


def _too_short(model: onnx_ir.Model) -> str | None:
    """Which file of weights is missing or too short, in words."""
    import onnx_ir as ir  # noqa: PLC0415

    for value in model.graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor):
            path = Path(tensor.path)
            size = path.stat().st_size if path.is_file() else None
            needed = (tensor.offset or 0) + (tensor.length or tensor.nbytes)
            if size is None or size < needed:
                what = "is missing" if size is None else f"has {size} bytes, and should have {needed} or more"
                return f"{path} {what}."
    return None


def _weights_are_half(model: onnx_ir.Model) -> bool:
    import onnx_ir as ir  # noqa: PLC0415

    sizes = {ir.DataType.FLOAT: 0, ir.DataType.FLOAT16: 0}
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.dtype in sizes:
            sizes[tensor.dtype] += tensor.size
    return sizes[ir.DataType.FLOAT16] > sizes[ir.DataType.FLOAT]


def _why_wide(name: str, config: dict[str, Any] | None, family: str) -> str:
    """Why a part stays float32 whatever was asked for; "" where it does not."""
    if name == "safety_checker":
        return "it compares scores at three decimals"
    # What Diffusers' pipelines of SDXL do, where its default is the config's. Those of others heed it not.
    if family == "sdxl" and name.startswith("vae") and (config is None or config.get("force_upcast", True)):
        return "force_upcast: activations of SDXL's VAE pass 65504"
    return ""


def _compared(part: str, found: dict[str, int], sites: dict[str, int] | None, ops: Ops) -> tuple[Fused, ...]:
    names = dict.fromkeys([*(sites or {}), *found])
    rows = []
    for name in names:
        count, known = found.get(name, 0), None if sites is None else sites.get(name, 0)
        reason = ""
        if known is not None and count != known:
            reason = ops.why_not(name, part) if count == 0 else ""
            reason = reason or f"{abs(known - count)} {_UNKNOWN_FORM}"
        rows.append(Fused(name, count, known, reason))
    return tuple(rows)


def _manifest_of(manifest: layout.Manifest, target: Path, result: Optimized) -> layout.Manifest:
    versions = {name: metadata.version(name) for name in ("rocm-sd", "onnx", "onnx-ir")}
    return replace(
        manifest,
        made_by={**manifest.made_by, **versions},
        parts=tuple(layout.described(part.name, target / part.name) for part in result.parts),
        optimized=asdict(result),
    )


def _put(made: Path, place: Path) -> None:
    if not place.exists():
        made.rename(place)
        return
    aside = Path(tempfile.mkdtemp(dir=place.absolute().parent, prefix=f"{_UNFINISHED}old-"))
    try:
        place.rename(aside / place.name)
        made.rename(place)
    except BaseException:
        if not place.exists() and (aside / place.name).exists():
            (aside / place.name).rename(place)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
