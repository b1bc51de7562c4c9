"""A folder of ONNX models in Diffusers' layout, and its manifest: what each part is, and whether it is there whole.

    OUT/model_index.json, scheduler/, tokenizer/      as Diffusers has them
    OUT/unet/model.onnx, model.onnx.data, config.json     one folder a part; the weights are in the data
    OUT/rocm_sd_onnx.json                             the manifest
    OUT/model.onnx                                    with --single in place of all parts: a whole picture

Folders of Optimum have the same names of parts, inputs and outputs, and no manifest: they run, with fewer checks.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rocm_sd.errors import CorruptModel, ModelNotFound, optional_module
from rocm_sd.files import write_text
from rocm_sd.plain_json import read_json
from rocm_sd.typed_json import Misfit, read

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = [
    "DATA",
    "FORMAT",
    "GUIDED_BATCH",
    "MANIFEST",
    "MODEL",
    "PARTS",
    "PICTURE",
    "Manifest",
    "Part",
    "PartFile",
    "Tensor",
    "described",
    "file_facts",
    "found_parts",
    "is_listed",
    "require_digests",
    "require_export",
    "require_parts",
    "require_sizes",
]

MANIFEST = "rocm_sd_onnx.json"
FORMAT = "rocm-sd-onnx/1"
MODEL = "model.onnx"
DATA = "model.onnx.data"
# In the order in which a picture needs them.
PARTS = ("text_encoder", "text_encoder_2", "unet", "vae_decoder", "vae_encoder", "safety_checker")
# What is one model of all parts: it lies in the folder itself.
PICTURE = "picture"
# The batch of a UNet's text, where its sample may have half the rows: it repeats what halves of guidance share.
GUIDED_BATCH = "guided_batch"
_CHUNK = 8 * 2**20
_SHA256 = {"pattern": "^[0-9a-f]{64}$"}
# A file's name in its part's folder, and nothing that leads out of it.
_FILE_NAME = {"pattern": r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", "maxLength": 200}
_LONGEST_TYPED = 400
_RULES: dict[str, dict[str, Any]] = {
    "PartFile.sha256": _SHA256,
    "PartFile.name": _FILE_NAME,
    "PartFile.size": {"minimum": 0},
    "Part.name": {"enum": [*PARTS, PICTURE]},
    "Part.opset": {"minimum": 1},
}


@dataclass(frozen=True)
class PartFile:
    """A file of a part, by its name in the part's folder."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Tensor:
    """An input or an output; a dimension that may vary has a name in place of a number."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class Part:
    """`dtype`: of the weights, or of most of them. `opset`: of ONNX's own operators."""

    name: str
    dtype: str
    opset: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    files: tuple[PartFile, ...]


@dataclass(frozen=True)
class Manifest:
    """`made_by`: versions by package. `optimized`: None in a plain export; otherwise what was fused, and how often."""

    source: str
    pipeline: str
    made_by: dict[str, str]
    parts: tuple[Part, ...] = ()
    optimized: Any = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def to_type(self) -> str:
        """The model in a command; a stranger's text may be as long as a file."""
        return self.source if len(self.source) <= _LONGEST_TYPED else "MODEL"

    @property
    def whole(self) -> Part | None:
        """The one model of a folder that has no others."""
        return self.part(PICTURE)

    def files(self, folder: Path, *names: str) -> list[tuple[Path, PartFile]]:
        """Where each file of these parts is, or of all."""
        return [
            ((folder if part.name == PICTURE else folder / part.name) / each.name, each)
            for part in self.parts
            for each in part.files
            if not names or part.name in names
        ]

    def part(self, name: str) -> Part | None:
        return next((part for part in self.parts if part.name == name), None)

    def with_part(self, part: Part) -> Manifest:
        """The same with this part, in place of one of its name; in the order of PARTS."""
        parts = [part, *(other for other in self.parts if other.name != part.name)]
        return replace(self, parts=tuple(sorted(parts, key=lambda one: PARTS.index(one.name))))

    def save(self, folder: Path) -> None:
        write_text(folder / MANIFEST, json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Of a folder that has one; raises CorruptModel with what is wrong."""
        path = folder / MANIFEST
        values = read_json(path, partial(_unreadable, path), of=dict)
        if values.pop("format", None) != FORMAT:
            raise _unreadable(path, f"its format is not {FORMAT}")
        try:
            return read(cls, values, _RULES)
        except Misfit as error:
            raise _unreadable(path, str(error)) from error


def _unreadable(path: Path, reason: str) -> CorruptModel:
    return CorruptModel(f"{path} cannot be read: {reason}.", hint="Export the model again: rocm-sd onnx export")


def found_parts(folder: Path, manifest: Manifest | None = None) -> dict[str, Path]:
    """The parts whose model.onnx is there, in the order of PARTS; of those the ones that a manifest lists."""
    paths = {name: folder / name / MODEL for name in PARTS if manifest is None or manifest.part(name) is not None}
    return {name: path for name, path in paths.items() if path.is_file()}


def is_listed(index: Mapping[str, Any], name: str) -> bool:
    """Whether the pipeline of this model_index.json has such a component."""
    described = index.get(name)
    return isinstance(described, list) and described[:1] not in ([], [None])


def require_parts(
    folder: Path, manifest: Manifest | None, index: Mapping[str, Any], *, to_start_from_pictures: bool = False
) -> dict[str, Path]:
    """The parts, where all are there that model_index.json asks for; else ModelNotFound: an export was interrupted.

    Other exporters may leave the safety checker out; here a manifest without it is not finished.
    """
    parts = found_parts(folder, manifest)
    wanted = ["unet", "vae_decoder"] if "unet" in index else []
    wanted += [name for name in ("text_encoder", "text_encoder_2") if is_listed(index, name)]
    if manifest is not None:
        wanted += ["safety_checker"] if is_listed(index, "safety_checker") else []
        wanted += ["vae_encoder"] if to_start_from_pictures and is_listed(index, "vae") else []
    missing = [name for name in wanted if name not in parts]
    if missing:
        again = manifest.to_type if manifest is not None else "MODEL"
        raise ModelNotFound(
            f"{folder} is incomplete: {missing[0]}/{MODEL} is missing.",
            hint=f"To finish it, type: rocm-sd onnx export {again} {folder}",
        )
    return parts


def require_export(folder: Path) -> Manifest | None:
    """The manifest, or None of a folder that another exporter wrote. Raises ModelNotFound where it is no export."""
    if not folder.is_dir():
        raise ModelNotFound(
            f"There is no folder {folder}.",
            hint=f"Make one: rocm-sd onnx export MODEL {folder.name}-onnx, where MODEL is emoji-sd or another model.",
        )
    manifest = Manifest.load(folder) if (folder / MANIFEST).is_file() else None
    index = folder / "model_index.json"
    if not index.is_file() or (manifest is None and "unet" not in found_parts(folder)):
        lacking = f"unet/{MODEL}" if index.is_file() else index.name
        raise ModelNotFound(
            f"{folder} is not a model exported to ONNX: it has no {lacking}.",
            hint=f"Export one into a new folder: rocm-sd onnx export {folder} {folder}-onnx",
        )
    return manifest


def require_sizes(folder: Path, manifest: Manifest, *names: str) -> None:
    """Every file is there and as long as the manifest says; raises CorruptModel. Reads no weights."""
    for path, each in manifest.files(folder, *names):
        size = path.stat().st_size if path.is_file() else None
        if size != each.size:
            what = "is missing" if size is None else f"has {size} bytes, and should have {each.size}"
            raise _damaged(folder, manifest, path, what)


def require_digests(folder: Path, manifest: Manifest, *names: str) -> None:
    """The same with the digests of these parts, or of all: it reads every byte."""
    require_sizes(folder, manifest, *names)
    for path, each in manifest.files(folder, *names):
        if file_facts(path).sha256 != each.sha256:
            raise _damaged(folder, manifest, path, "is not what was exported: its digest is another")


def _damaged(folder: Path, manifest: Manifest, path: Path, what: str) -> CorruptModel:
    # What was exported from a person's own folder is known by its name alone.
    single = " --single" if manifest.whole is not None else ""
    return CorruptModel(
        f"{path} {what}.",
        hint=f"Copy the folder again, or type: rocm-sd onnx export {manifest.to_type} {folder}{single}",
    )


def file_facts(path: Path) -> PartFile:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return PartFile(path.name, path.stat().st_size, digest.hexdigest())


def described(name: str, folder: Path) -> Part:
    """The part whose model.onnx, and perhaps model.onnx.data, lie in `folder`: read, and digested."""
    onnx = optional_module("onnx", "onnx", "onnx")
    model = onnx.load(folder / MODEL, load_external_data=False)
    opset = next(each.version for each in model.opset_import if each.domain in {"", "ai.onnx"})
    files = tuple(file_facts(folder / each) for each in (MODEL, DATA) if (folder / each).is_file())
    inputs, outputs = (tuple(_tensor(onnx, one) for one in each) for each in (model.graph.input, model.graph.output))
    return Part(name, _weights_dtype(onnx, model), opset, inputs, outputs, files)


def _tensor(onnx: Any, value: Any) -> Tensor:
    of = value.type.tensor_type
    dims = tuple(dim.dim_param or dim.dim_value for dim in of.shape.dim)
    return Tensor(value.name, _dtype_name(onnx, of.elem_type), dims)


def _weights_dtype(onnx: Any, model: Any) -> str:
    elements: Counter[str] = Counter()
    for weight in model.graph.initializer:
        name = _dtype_name(onnx, weight.data_type)
        if "float" in name or name == "double":
            count = 1
            for dim in weight.dims:
                count *= dim
            elements[name] += count
    return elements.most_common(1)[0][0] if elements else "float32"


def _dtype_name(onnx: Any, number: int) -> str:
    """ONNX's FLOAT is float32, as everywhere else."""
    name = str(onnx.TensorProto.DataType.Name(number)).lower()
    return {"float": "float32", "double": "float64"}.get(name, name)
