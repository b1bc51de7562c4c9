"""export_pipeline(pipe, out) -> Manifest: a Diffusers pipeline as ONNX models, each checked against torch.

A part is written beside its place and renamed when it is right; the manifest then has its digests. So an export that is
interrupted keeps its finished parts, and the same call goes on after them.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import tempfile
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from rocm_sd.arch import host
from rocm_sd.errors import CorruptModel, NoDiskSpace, RocmSdError, first_line, optional_module
from rocm_sd.files import told_when_full
from rocm_sd.onnx import layout
from rocm_sd.onnx.checking import require_same
from rocm_sd.onnx.modules import ExportedModule, Sizes, exported_modules, flavour
from rocm_sd.plain_json import shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Progress = Callable[[int, int, str], None]

__all__ = ["FINAL_NORM", "OPSET", "STEPS_OF_A_PART", "export_pipeline"]

log = logging.getLogger("rocm_sd")
# What torch exports without a conversion, and every runtime since 2023 reads.
OPSET = 18
_GRAPH_BYTES = 16 * 2**20
# Tracing, writing, checking and digesting.
STEPS_OF_A_PART = 4
# A picture's text with clip_skip is normalised once more, in torch: Diffusers asks for this layer by name.
FINAL_NORM = "final_layer_norm.safetensors"
_UNFINISHED = ".unfinished-"
_VERSIONS = ("torch", "diffusers", "transformers", "onnx", "onnxscript")
# None of its sizes is 1, which would be taken for fixed, and none is another.
_TRACED = Sizes(batch=2, height=2, width=3, tokens=77)
_SAMPLED = 64


def export_pipeline(
    pipe: Any,
    out: Path,
    *,
    source: str,
    force: bool = False,
    check: bool = True,
    progress: Progress | None = None,
) -> layout.Manifest:
    """Its parts in the dtypes that they have, on the CPU. `source`: what the model is called in the manifest.

    `force`: over another model's export. `check`: a part is kept only where ONNX Runtime is as exact as torch.
    """
    for module, name in (("onnx", "onnx"), ("onnxscript", "onnxscript"), ("onnxruntime", "onnxruntime")):
        optional_module(module, name, "onnx")
    _as_diffusers_runs_it(pipe, flavour(pipe))
    modules = exported_modules(pipe)
    export = _Export(out, check, progress or (lambda *_: None), len(modules) * STEPS_OF_A_PART)
    wanted = layout.Manifest(source, type(pipe).__name__, _made_by(), extra={"made_of": {}})
    manifest, done = _begun(out, wanted, modules, force=force)
    missing = [each for each in modules.values() if each.name not in done]
    _require_no_others(out, missing)
    _require_room(out, missing)
    export.advance(STEPS_OF_A_PART * len(done), "starting")
    with told_when_full(out):
        out.mkdir(parents=True, exist_ok=True)
        _clear(out, done)
        manifest.save(out)
        _write_the_rest(pipe, out)
        for each in missing:
            part = export.part(each)
            made_of = {**manifest.extra["made_of"], each.name: _made_of(each)}
            manifest = replace(manifest.with_part(part), extra={**manifest.extra, "made_of": made_of})
            manifest.save(out)
    return manifest


def _as_diffusers_runs_it(pipe: Any, family: str) -> None:
    # Module by module: a pipeline warns that float16 will not run on a CPU, where it is only traced.
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.to("cpu")
    if family == "sdxl" and pipe.vae.dtype is torch.float16 and pipe.vae.config.force_upcast:
        # SDXL's own VAE overflows in float16: Diffusers computes it in float32. Others have that option by default, and
        # their pipelines heed it not.
        pipe.vae.float()


@dataclass
class _Export:
    out: Path
    check: bool
    progress: Progress
    total: int
    done: int = 0

    def advance(self, steps: int, what: str) -> None:
        self.done += steps
        self.progress(self.done, self.total, what)

    def part(self, each: ExportedModule) -> layout.Part:
        onnx = optional_module("onnx", "onnx", "onnx")
        unfinished = Path(tempfile.mkdtemp(dir=self.out, prefix=f"{_UNFINISHED}{each.name}-"))
        try:
            self.advance(0, f"{each.name}: tracing")
            program = _traced(each)
            self.advance(1, f"{each.name}: writing {each.size / 1e6:.0f} MB")
            program.save(str(unfinished / layout.MODEL), external_data=True)
            del program
            _save_config(each, unfinished)
            onnx.checker.check_model(str(unfinished / layout.MODEL))
            self.advance(1, f"{each.name}: compared with torch")
            if self.check:
                require_same(each, unfinished / layout.MODEL)
            self.advance(1, f"{each.name}: digested")
            part = layout.described(each.name, unfinished)
            _put(unfinished, self.out / each.name)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        self.advance(1, f"{each.name} is done")
        return part


def _traced(each: ExportedModule) -> Any:
    inputs = each.inputs(_TRACED)
    with _quietly(), torch.no_grad():
        try:
            program: Any = torch.onnx.export(
                each.module.eval(), (), kwargs=inputs, dynamic_shapes=each.dims, input_names=list(inputs),
                output_names=list(each.outputs), opset_version=OPSET, dynamo=True, verbose=False,
            )  # fmt: skip
        except torch.onnx.OnnxExporterError as error:
            raise RocmSdError(
                f"torch {torch.__version__} cannot export the {each.name} ({first_line(error)}).",
                hint="--debug, before the verb, shows where. Another torch or another model may do.",
            ) from error
    _forget_origins(program.model, each.name)
    return program


@contextmanager
def _quietly() -> Iterator[None]:
    """torch.onnx says of a machine without torchvision that it has none, and of names of axes that they are one."""
    speaker = logging.getLogger("torch.onnx")
    before = speaker.level
    speaker.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        speaker.setLevel(before)


def _forget_origins(model: Any, name: str) -> None:
    """Each node carries lines of source with the paths of a person's folders. What is left is its module's name."""
    kept = "namespace"
    model.graph.name, model.producer_version = name, torch.__version__
    for owner in (model, model.graph):
        owner.metadata_props.clear()
    for node in model.graph.all_nodes():
        scope = node.metadata_props.get(kept)
        node.metadata_props.clear()
        if scope:
            node.metadata_props[kept] = scope
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()


def _save_config(each: ExportedModule, folder: Path) -> None:
    if hasattr(each.owner, "save_config"):
        each.owner.save_config(folder)
    else:
        each.owner.config.save_pretrained(folder)
    # As stock: a name of it is the last part of a layer's.
    norm = next((m for name, m in each.owner.named_modules() if name.endswith("final_layer_norm")), None)
    if norm is not None:
        save_file({"weight": norm.weight.detach().clone(), "bias": norm.bias.detach().clone()}, folder / FINAL_NORM)


def _write_the_rest(pipe: Any, out: Path) -> None:
    """model_index.json, the scheduler, tokenizers and the feature extractor, each whole or not at all."""
    unfinished = Path(tempfile.mkdtemp(dir=out, prefix=f"{_UNFINISHED}rest-"))
    try:
        for name in ("scheduler", "tokenizer", "tokenizer_2", "feature_extractor"):
            if getattr(pipe, name, None) is not None:
                getattr(pipe, name).save_pretrained(unfinished / name)
                _put(unfinished / name, out / name)
        pipe.save_config(unfinished)
        (unfinished / "model_index.json").replace(out / "model_index.json")
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _put(made: Path, place: Path) -> None:
    made.chmod(0o755)
    if place.exists():
        aside = Path(tempfile.mkdtemp(dir=place.parent, prefix=f"{_UNFINISHED}old-")) / place.name
        place.rename(aside)
        made.rename(place)
        shutil.rmtree(aside.parent, ignore_errors=True)
    else:
        made.rename(place)


def _clear(out: Path, done: set[str]) -> None:
    """What an export that was killed left there, and parts that are not `done`: they are damaged, or another model's.

    They are gone before the manifest stops to list them, which is the way in which no old part is taken for a new one.
    """
    for left in out.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)
    for name, model in layout.found_parts(out).items():
        if name not in done:
            shutil.rmtree(model.parent)


def _begun(
    out: Path, wanted: layout.Manifest, modules: dict[str, ExportedModule], *, force: bool
) -> tuple[layout.Manifest, set[str]]:
    """The manifest to go on with, and the parts that are there already, whole and of the same weights."""
    if out.exists() and not out.is_dir():
        raise RocmSdError(f"{out} is a file.", hint="Give the name of a folder.")
    if not out.is_dir() or not any(out.iterdir()):
        return wanted, set()
    other = f"Give another folder, or --force to export {wanted.source} into this one."
    try:
        found = layout.Manifest.load(out)
    except CorruptModel as error:
        if force:
            return wanted, set()
        if (out / layout.MANIFEST).exists():
            raise CorruptModel(error.message, hint=other) from error
        raise RocmSdError(f"{out} is there already, and holds something else.", hint=other) from error
    if found.whole is not None:
        raise RocmSdError(f"{out} holds {shortened(found.source)} as one model.", hint="Give another folder.")
    same = (found.source, found.pipeline, found.optimized, found.made_by)
    if same != (wanted.source, wanted.pipeline, None, wanted.made_by):
        if force:
            return wanted, set()
        raise RocmSdError(f"{out} holds {_said(found)}, exported in another way or by other versions.", hint=other)
    recorded = found.extra.get("made_of", {})
    done = {each.name for each in modules.values() if _is_there(out, found, each, recorded.get(each.name))}
    changed = [n for n, each in modules.items() if n in recorded and recorded[n] != _made_of(each)]
    if changed and not force:
        raise RocmSdError(f"{out} holds other weights of {changed[0]}, or of another dtype.", hint=other)
    return replace(found, parts=tuple(part for part in found.parts if part.name in done)), done


def _require_no_others(out: Path, missing: list[ExportedModule]) -> None:
    """Forced or not: a folder of that name that holds no part of an export, a stock model's weights say, is kept."""
    for each in missing:
        place = out / each.name
        if place.is_dir() and not (place / layout.MODEL).is_file() and any(place.iterdir()):
            raise RocmSdError(f"{place} holds something else than ONNX.", hint="Give a new folder for the export.")


def _said(found: layout.Manifest) -> str:
    return f"{shortened(found.source)}, optimized" if found.optimized else shortened(found.source)


def _is_there(out: Path, found: layout.Manifest, each: ExportedModule, made_of: str | None) -> bool:
    if found.part(each.name) is None or made_of != _made_of(each):
        return False
    try:
        layout.require_digests(out, found, each.name)
    except CorruptModel as error:
        log.warning("%s It is exported again.", error.message)
        return False
    return True


def _made_of(each: ExportedModule) -> str:
    """A digest of names, shapes, dtypes and some values of its weights: another model's differ in all of them."""
    told = hashlib.sha256()
    for name, tensor in sorted(each.module.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // _SAMPLED)].double()
        told.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        told.update(some.numpy().tobytes())
    return told.hexdigest()


def _require_room(out: Path, missing: list[ExportedModule]) -> None:
    needed = sum(each.size + _GRAPH_BYTES for each in missing)
    place = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if missing and free < needed:
        error = NoDiskSpace(out, needed=needed, free=free)
        error.hint = "Free some, or give a folder on another disk. --float16 halves it."
        raise error


def _made_by() -> dict[str, str]:
    found = {name: host.installed(name) for name in ("rocm-sd", *_VERSIONS)}
    return {name: version for name, version in found.items() if version is not None}
