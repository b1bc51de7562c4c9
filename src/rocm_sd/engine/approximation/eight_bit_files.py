"""A denoiser's 8-bit layers as one .safetensors file: saved once, loaded later with no calibration.

    rocm_sd.save_eight_bits(pipe, "sdxl-int8.safetensors")

    pipe = StableDiffusionXLPipeline.from_pretrained(...)              # in the host's memory
    rocm_sd.load_eight_bits(pipe, "sdxl-int8.safetensors").to("cuda")  # those weights of 16 bits stay off the GPU
    rocm_sd.optimize(pipe)

Tensors are `<layer>.weight` and `<layer>.weight_scale`, and where there are, `<input>.x_scale` and `<input>.smoothing`
of the first of the layers that share an input. All else is JSON in the metadata, by the dataclasses below.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard, TypeVar

import torch
from torch import nn

from rocm_sd import arch, files
from rocm_sd.arch import Fp8
from rocm_sd.engine.approximation.eight_bits import (
    KEPT,
    Group,
    Kept,
    Waiting,
    digest_of,
    eight_bit_layers,
    format_of,
    groups,
    in_eight_bits,
)
from rocm_sd.engine.approximation.fp8_formats import as_other_format
from rocm_sd.engine.approximation.measured import fingerprint
from rocm_sd.errors import CorruptModel, ModelNotFound, NoDiskSpace, RocmSdError, Unsupported, first_line
from rocm_sd.plain_json import NotPlain, parsed, shortened
from rocm_sd.rewrite.eight_bits import EightBitLayer, EightBitLinear, Origin, lay_together
from rocm_sd.rewrite.layers import is_plain
from rocm_sd.typed_json import Misfit, read

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

__all__ = ["FORMAT", "Header", "Layer", "load_eight_bits", "save_eight_bits"]

FORMAT = 1
_KEY = "rocm_sd_eight_bits"
_SIDES = {"linear": 2, "conv2d": 4}  # of the weight
_FORMATS = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn, "float8_e4m3fnuz": torch.float8_e4m3fnuz}
_MAKE = "rocm_sd.optimize(pipe, quality=rocm_sd.Approximation(eight_bits='int8'))"
Target = TypeVar("Target")


@dataclass(frozen=True)
class Layer:
    """`format`: what its values are, of `bits` each; `granularity`: what has a scale of its own, "tensor", "row" or a
    "group" of `group_size` values; `x_scale`: "static", or "dynamic" where each row of x gets its own; `input`,
    `digest`, `dtype` and `error` as in `Origin`.
    """

    kind: str
    bits: int
    format: str
    shape: tuple[int, ...]
    granularity: str
    group_size: int | None
    x_scale: str
    smoothing: bool
    input: str
    digest: str
    dtype: str
    error: float | None

    def why_not(self) -> str | None:
        """Why this version of rocm-sd cannot read it."""
        if self.bits != 8 or self.format not in _FORMATS:
            return f"{self.bits} bits of {shortened(self.format)}: it reads 8 bits of {', '.join(_FORMATS)}"
        known = self.granularity in {"tensor", "row"} and self.x_scale in {"static", "dynamic"}
        if self.kind == "conv2d":
            known = known and self.x_scale == "static" and not self.smoothing
        if not known or len(self.shape) != _SIDES.get(self.kind):
            return f"a {shortened(self.kind)} with a scale for each {shortened(self.granularity)}"
        return None

    def tensors(self, name: str) -> Iterator[tuple[str, torch.dtype | None, tuple[int, ...]]]:
        """Name, dtype where it has to be one, and shape of each that the layer is made of."""
        yield f"{name}.weight", _FORMATS[self.format], self.shape
        yield f"{name}.weight_scale", torch.float32, self.shape[:1] if self.granularity == "row" else ()
        if self.x_scale == "static":
            yield f"{self.input}.x_scale", torch.float32, ()
        if self.smoothing:
            yield f"{self.input}.smoothing", None, self.shape[1:]


@dataclass(frozen=True)
class Header:
    """`version`: of this format; `model`: the model's class, `fingerprint`: of its ends; `kept`: the layers that keep
    their dtype; `crc32`: of each tensor's bytes.
    """

    version: int
    model: str
    fingerprint: str | None
    layers: dict[str, Layer]
    kept: dict[str, Kept]
    crc32: dict[str, int]


def save_eight_bits(target: Any, path: str | os.PathLike[str]) -> Path:
    """Write the layers of a pipeline's denoiser, or of a model, that are in 8 bits to one .safetensors file.

    Not in it: other weights, biases, and LoRAs on top. It is there whole or not at all.
    """
    model = _in_eight_bits_now(target)
    tensors: dict[str, torch.Tensor] = {}
    layers: dict[str, Layer] = {}
    for name, layer in eight_bit_layers(model).items():
        if layer.origin is None:
            raise Unsupported("save_eight_bits", f"{name}, which was put into 8 bits by somebody else")
        layers[name] = _described(layer, layer.origin)
        own = {f"{name}.weight": layer.weight, f"{name}.weight_scale": layer.weight_scale}
        shared = {f"{layer.origin.input}.x_scale": layer.x_scale, f"{layer.origin.input}.smoothing": layer.smoothing}
        for key, value in (own | shared).items():
            if value is not None and key not in tensors:
                # A copy: weights that lie together are parts of one storage, which a file cannot have.
                tensors[key] = value.detach().to("cpu", copy=True).contiguous()
    crc32 = {name: _crc32(tensor) for name, tensor in tensors.items()}
    kept = dict(KEPT.get(model, {}))
    header = Header(FORMAT, type(model).__name__, fingerprint(model), layers, kept, crc32)
    _write(Path(path), tensors, header)
    return Path(path)


def load_eight_bits(target: Target, path: str | os.PathLike[str], device: str | torch.device | None = None) -> Target:
    """Put the layers of a file by `save_eight_bits` into a pipeline of the same model, for good, and return it.

    They go where the layers are that they replace: before `pipe.to("cuda")`, the weights of 16 bits never come to the
    GPU. Call `optimize` after that. `device`: which GPU the pipeline will run on, for the format of its fp8; without
    it, the one that it is on, or that torch sees. Where anything is wrong, an error says so, and nothing was changed.
    """
    file = Path(path)
    opened = _Opened(file)
    header = opened.header
    model = _fitting(target, header, file)
    found = {name: _layer_of(model, name, layer, file) for name, layer in header.layers.items()}
    _require_inputs(model, header, file)
    layers, tensors = opened.for_card(_destination(model, device))
    by_input: dict[str, list[str]] = {}
    for name, layer in layers.items():
        by_input.setdefault(layer.input, []).append(name)
    replaced: list[Waiting] = []
    try:
        for names in by_input.values():
            group = Group(tuple(names), tuple(found[name] for name in names))
            made = [_made(found[name], name, layers[name], tensors) for name in names]
            linears = [layer for layer in made if isinstance(layer, EightBitLinear)]
            if len(linears) > 1:
                lay_together(linears)
            waiting = Waiting(model, group)
            replaced.append(waiting)
            waiting.replace(made)
    except BaseException:
        for waiting in replaced:
            waiting.bring_back()
        raise
    KEPT[model] = dict(header.kept)
    return target


def _described(layer: EightBitLayer, origin: Origin) -> Layer:
    return Layer(
        kind="linear" if isinstance(layer, EightBitLinear) else "conv2d",
        bits=8,
        format=_name(layer.weight.dtype),
        shape=tuple(layer.weight.shape),
        granularity="row" if layer.weight_scale.dim() else "tensor",
        group_size=None,
        x_scale="dynamic" if layer.x_scale is None else "static",
        smoothing=layer.smoothing is not None,
        input=origin.input,
        digest=origin.digest,
        dtype=origin.dtype,
        error=origin.error,
    )


def _write(path: Path, tensors: Mapping[str, torch.Tensor], header: Header) -> None:
    from safetensors import SafetensorError  # noqa: PLC0415 -- whoever saves none may not have it
    from safetensors.torch import save_file  # noqa: PLC0415 -- as above

    metadata = {"format": "pt", _KEY: json.dumps(asdict(header), allow_nan=False)}
    with files.whole(path) as unfinished:
        try:
            save_file(dict(tensors), unfinished, metadata)
        except SafetensorError as error:
            # It has an error of the system as text alone.
            if "space left" in str(error) or "quota" in str(error).lower():
                raise NoDiskSpace(path) from error
            raise RocmSdError(
                f"{path} cannot be written ({first_line(error)}).", hint="Choose another place."
            ) from error


class _Opened:
    """A file that was saved by `save_eight_bits`, of which all is read and checked before anything is used."""

    def __init__(self, file: Path) -> None:
        from safetensors import SafetensorError, safe_open  # noqa: PLC0415 -- whoever loads none may not have it

        self._file = file
        if not file.is_file():
            raise ModelNotFound(f"There is no file {file}.", hint=f"Type: rocm_sd.save_eight_bits(pipe, {str(file)!r})")
        try:
            with safe_open(file, framework="pt") as opened:
                self.header = self._read((opened.metadata() or {}).get(_KEY))
                wanted = {key for name, layer in self.header.layers.items() for key, _, _ in layer.tensors(name)}
                missing = sorted(wanted.difference(opened.keys()))
                if missing:
                    self._torn(f"it has no {missing[0]}")
                # Copies: a file that is mapped must not change under a model, and is slow to copy from.
                self._tensors = {key: opened.get_tensor(key).clone() for key in wanted}
        except (SafetensorError, OSError) as error:
            self._torn(first_line(error))
        self._check()

    def _read(self, text: str | None) -> Header:
        if text is None:
            hint = f"Type: {_MAKE}, then rocm_sd.save_eight_bits(pipe, {str(self._file)!r})"
            raise Unsupported("load_eight_bits", f"{self._file}, which save_eight_bits did not write", hint=hint)
        try:
            said = parsed(text)
            version = said.get("version") if isinstance(said, dict) else None
            if isinstance(version, int) and version != FORMAT:
                self._too_new(f"version {version} of the format of {self._file}: it reads version {FORMAT}")
            header = read(Header, said, top="its header")
            # What is inside of objects by name is checked, and is left as JSON has it.
            layers = {name: read(Layer, layer) for name, layer in said["layers"].items()}
            header = replace(header, layers=layers, kept={name: Kept(**kept) for name, kept in said["kept"].items()})
        except (NotPlain, Misfit) as error:
            self._torn(str(error))
        for name, layer in header.layers.items():
            reason = layer.why_not()
            if reason is not None:
                self._too_new(f"{shortened(name)} of {self._file}, {reason}")
        return header

    def _check(self) -> None:
        for name, layer in self.header.layers.items():
            for key, dtype, shape in layer.tensors(name):
                tensor = self._tensors[key]
                is_right = tensor.dtype == dtype if dtype is not None else tensor.is_floating_point()
                if not is_right or tuple(tensor.shape) != shape:
                    self._torn(f"{key} is {_name(tensor.dtype)} of {tuple(tensor.shape)}")
                if _crc32(tensor) != self.header.crc32.get(key):
                    self._torn(f"the bytes of {key} are not those that were written")

    def for_card(self, device: torch.device) -> tuple[dict[str, Layer], dict[str, torch.Tensor]]:
        """In the format of fp8 that the device multiplies, whose products are the same; elsewhere as they are."""
        theirs, own = arch.detect(device), _name(format_of("fp8", device))
        layers, tensors = dict(self.header.layers), dict(self._tensors)
        if theirs.fp8 not in {Fp8.OCP, Fp8.FNUZ}:
            return layers, tensors
        for name, layer in layers.items():
            if layer.format in {"int8", own}:
                continue
            weight, scale, x = f"{name}.weight", f"{name}.weight_scale", f"{layer.input}.x_scale"
            other = as_other_format(tensors[weight], tensors[scale])
            if other is None:
                raise Unsupported(
                    "load_eight_bits",
                    f"{self._file} on {theirs.name}: {name} has values of {layer.format} that {own} has not",
                    hint=f"Make one here: {_MAKE.replace('int8', 'fp8')}, then rocm_sd.save_eight_bits(pipe, path)",
                )
            tensors[weight], tensors[scale] = other
            if x in tensors:
                # x is rounded to the same values then, but for those beyond what was seen.
                tensors[x] = self._tensors[x] * (2.0 if own.endswith("fnuz") else 0.5)
            layers[name] = replace(layer, format=own)
        return layers, tensors

    def _torn(self, reason: str) -> NoReturn:
        hint = f"Copy it anew, or save it again: rocm_sd.save_eight_bits(pipe, {str(self._file)!r})"
        raise CorruptModel(f"{self._file} cannot be read: {shortened(reason, 300)}.", hint=hint)

    def _too_new(self, what: str) -> NoReturn:
        hint = "Another version of rocm-sd wrote it; type: pip install --upgrade rocm-sd"
        raise Unsupported("load_eight_bits", what, hint=hint)


def _in_eight_bits_now(target: Any) -> nn.Module:
    found = [model for model in _models(target, "save_eight_bits") if eight_bit_layers(model)]
    if not found:
        hint = f"Type: {_MAKE}"
        raise Unsupported("save_eight_bits", f"a {type(target).__name__} with no layer in 8 bits", hint=hint)
    if len(found) > 1:
        hint = "Save them one by one: rocm_sd.save_eight_bits(pipe.unet, path)"
        raise Unsupported("save_eight_bits", f"{len(found)} models in 8 bits at once", hint=hint)
    return found[0]


def _fitting(target: Any, header: Header, file: Path) -> nn.Module:
    """The one model that the file was made from."""
    models = _models(target, "load_eight_bits")
    own = [model for model in models if type(model).__name__ == header.model]
    if not own:
        _other(file, f"it is of a {shortened(header.model)}, which a {type(target).__name__} does not have")
    for model in own:
        if eight_bit_layers(model):
            hint = "Call rocm_sd.restore(pipe) first; if it was loaded so, load the model anew."
            raise Unsupported("load_eight_bits", f"a {header.model} that is in 8 bits already", hint=hint)
    told = fingerprint(own[0])
    if header.fingerprint is not None and told is not None and told != header.fingerprint:
        _other(file, f"{_weights_of(header)} are not those of this {header.model}")
    return own[0]


def _layer_of(model: nn.Module, name: str, layer: Layer, file: Path) -> nn.Linear | nn.Conv2d:
    try:
        found = model.get_submodule(name)
    except AttributeError:
        return _other(file, f"this {type(model).__name__} has no {shortened(name)}")
    wanted = nn.Linear if layer.kind == "linear" else nn.Conv2d
    if not isinstance(found, wanted) or not is_plain(found):
        hint = "Load the 8 bits before a LoRA, an offload or another quantisation; pipe.unload_lora_weights() unloads."
        raise Unsupported("load_eight_bits", f"{name}, which is a {type(found).__name__} with more to it", hint=hint)
    if tuple(found.weight.shape) != layer.shape:
        _other(file, f"{name} has a weight of {tuple(found.weight.shape)} here and of {layer.shape} there")
    if digest_of(found.weight) != layer.digest:
        dtype = _name(found.weight.dtype)
        other = f" (it was made from {shortened(layer.dtype)}, and this is {dtype})" if layer.dtype != dtype else ""
        _other(file, f"{name} has other weights{other}")
    return found


def _require_inputs(model: nn.Module, header: Header, file: Path) -> None:
    """Layers that the model gives one input are rounded once: the file has to say the same of them."""
    for group in groups(model, _is_linear):
        if len({header.layers[name].input for name in group.names if name in header.layers}) > 1:
            _other(file, f"{', '.join(group.names)} share one input here")


def _is_linear(layer: Any) -> TypeGuard[nn.Linear | nn.Conv2d]:
    return isinstance(layer, nn.Linear)


def _made(place: nn.Linear | nn.Conv2d, name: str, layer: Layer, tensors: Mapping[str, torch.Tensor]) -> EightBitLayer:
    device = place.weight.device
    own = {key.rpartition(".")[2]: tensors[key].to(device) for key, _, _ in layer.tensors(name)}
    origin = Origin(layer.input, layer.digest, layer.dtype, layer.error)
    return in_eight_bits(
        place, own["weight"], own["weight_scale"], own.get("x_scale"), own.get("smoothing"), origin
    )  # fmt: skip


def _other(file: Path, reason: str) -> NoReturn:
    hint = (
        f"Load the model that it was made from, or make one of this: {_MAKE}, then rocm_sd.save_eight_bits(pipe, path)"
    )
    raise Unsupported("load_eight_bits", f"{file} here: {reason}", hint=hint)


def _weights_of(header: Header) -> str:
    dtypes = sorted({layer.dtype for layer in header.layers.values()})
    return f"the weights that it was made from, in {shortened(', '.join(dtypes))},"


def _models(target: Any, what: str) -> list[nn.Module]:
    if isinstance(target, nn.Module):
        return [target]
    parts = getattr(target, "components", None)
    if not isinstance(parts, dict):
        hint = "It takes a Diffusers pipeline, or its denoiser: pipe.unet or pipe.transformer."
        raise Unsupported(what, f"a {type(target).__name__}", hint=hint)
    return [part for part in parts.values() if isinstance(part, nn.Module)]


def _destination(model: nn.Module, device: str | torch.device | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    now = next(model.parameters()).device
    return torch.device("cuda") if now.type == "cpu" and torch.cuda.is_available() else now


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _crc32(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data)
