"""resolve("emoji-sd" | folder | file.safetensors | owner/name) -> ModelSource, checked before anything is loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rocm_sd.errors import CorruptModel, ModelNotFound
from rocm_sd.models.emoji import MODEL_FOLDER
from rocm_sd.plain_json import read_json, shortened

__all__ = ["EMBEDDED", "ModelKind", "ModelSource", "not_json", "resolve"]

EMBEDDED = "emoji-sd"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_PICKLES = {".ckpt", ".pt", ".pth", ".bin"}


class ModelKind(Enum):
    EMBEDDED = "embedded model"
    FOLDER = "Diffusers folder"
    FILE = "single-file checkpoint"
    HUB = "hub id"


@dataclass(frozen=True)
class ModelSource:
    kind: ModelKind
    location: str

    @property
    def guidance(self) -> float:
        """What suits the model: 3 scored best for emoji-sd (docs/emoji-sd.md); 7.5 is Stable Diffusion's default."""
        return 3.0 if self.kind is ModelKind.EMBEDDED else 7.5

    @property
    def name(self) -> str:
        return EMBEDDED if self.kind is ModelKind.EMBEDDED else self.location


def resolve(model: str | Path | None = None) -> ModelSource:
    """Decide what is meant; a local folder or file is checked whole: present, complete, readable, no pickles."""
    if model is None or str(model) == EMBEDDED:
        _check_folder(MODEL_FOLDER)
        return ModelSource(ModelKind.EMBEDDED, str(MODEL_FOLDER))
    path = Path(model).expanduser()
    if path.is_dir():
        _check_folder(path)
        return ModelSource(ModelKind.FOLDER, str(path))
    if path.is_file():
        _check_file(path)
        return ModelSource(ModelKind.FILE, str(path))
    is_file_name = path.suffix in {".safetensors", *_PICKLES}
    if is_file_name or str(model).startswith((".", "/", "~")) or not _HUB_ID.fullmatch(str(model)):
        raise ModelNotFound(
            f"There is no model at {model}.",
            hint=f"Give a Diffusers folder, a .safetensors file, a hub id such as owner/name, or {EMBEDDED}.",
        )
    return ModelSource(ModelKind.HUB, str(model))


def _check_folder(folder: Path) -> None:
    index = folder / "model_index.json"
    if not index.is_file():
        raise ModelNotFound(
            f"{folder} is not a Diffusers model: it has no model_index.json.",
            hint="Give the folder that contains model_index.json, unet/ and vae/.",
        )
    components = read_json(index, partial(not_json, index), of=dict, finite=False)
    for name, described in components.items():
        if name.startswith("_") or not isinstance(described, list) or described[:1] in ([], [None]):
            continue
        if not _is_folder(folder / name):
            raise CorruptModel(
                f"{folder} is incomplete: {shortened(name)}/ is missing.", hint="Download the model again."
            )
    weights = sorted(folder.rglob("*.safetensors"))
    for name in ("unet", "transformer", "vae"):
        if isinstance(components.get(name), list) and not any(folder / name in file.parents for file in weights):
            raise CorruptModel(
                f"{folder / name} has no .safetensors weights.",
                hint="Pickled weights are not loaded: download the safetensors variant of the model.",
            )
    for file in weights:
        _check_safetensors(file)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        # A name that no file system takes.
        return False


def not_json(file: Path, reason: str) -> CorruptModel:
    return CorruptModel(f"{file} is not readable JSON ({reason}).", hint="Download the model again.")


def _check_file(path: Path) -> None:
    if path.suffix in _PICKLES:
        raise CorruptModel(
            f"{path} is a pickled checkpoint, and loading one can run any code that is in it.",
            hint="Use the .safetensors version of the model.",
        )
    if path.suffix != ".safetensors":
        raise CorruptModel(f"{path} is not a checkpoint.", hint="A single-file checkpoint ends in .safetensors.")
    _check_safetensors(path)


def _check_safetensors(file: Path) -> None:
    """Opening reads the header and compares the sizes it promises with the file's own."""
    try:
        with safe_open(file, framework="pt") as opened:
            empty = not opened.keys()
    except (SafetensorError, OSError) as error:
        raise CorruptModel(f"{file} is damaged or incomplete ({error}).", hint="Copy or download it again.") from error
    if empty:
        raise CorruptModel(f"{file} holds no weights.", hint="Copy or download it again.")
