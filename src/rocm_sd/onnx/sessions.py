"""Session(file, provider): a model of ONNX Runtime that takes torch's tensors and gives them.

On a GPU inputs and outputs are bound where they lie, and with graphs a call is captured once for each of its sizes.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rocm_sd.errors import CorruptModel, DeviceUnavailable, Unsupported, first_line
from rocm_sd.onnx.providers import ERRORS_ALONE, PROVIDERS, runtime

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rocm_sd.onnx.providers import Provider

__all__ = ["Session"]

log = logging.getLogger("rocm_sd")
_DTYPES = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(double)": torch.float64,
    "tensor(int64)": torch.int64,
    "tensor(int32)": torch.int32,
    "tensor(bool)": torch.bool,
}
_NUMPY = {
    torch.float32: np.float32, torch.float16: np.float16, torch.float64: np.float64, torch.int64: np.int64,
    torch.int32: np.int32, torch.bool: np.bool_,
}  # fmt: skip
_NO_GRAPH = "-1"
_OPSET = re.compile(r"opset \d+", re.IGNORECASE)

Tensors = dict[str, torch.Tensor]


@dataclass
class _Bound:
    """Of calls of one size: where inputs are copied to, where outputs appear, and the graph's number."""

    inputs: Tensors
    outputs: Tensors
    binding: Any
    options: Any


class Session:
    """Calls with `inputs` by name; of the model's inputs none may be missing, and what it has not is left out.

    `bound`: inputs and outputs are bound, as they are on a GPU.
    """

    def __init__(self, file: Path, provider: Provider, *, bound: bool | None = None, threads: int = 0) -> None:
        self.provider, self.device = provider, provider.device
        self._session = _opened(file, provider, threads)
        self._bound = self.device.type != "cpu" if bound is None else bound
        self.inputs = {each.name: each for each in self._session.get_inputs()}
        self.outputs = {each.name: each for each in self._session.get_outputs()}
        self._sizes: dict[Any, _Bound] = {}
        self._shapes: dict[Any, dict[str, tuple[int, ...]]] = {}

    @property
    def dtype(self) -> torch.dtype:
        """Of the first floating output: what the part computes in."""
        found = (_DTYPES.get(each.type) for each in self.outputs.values())
        return next(each for each in found if each is not None and each.is_floating_point)

    def __call__(self, inputs: Mapping[str, torch.Tensor], outputs: Sequence[str]) -> Tensors:
        given = {name: self._fitting(name, inputs) for name in self.inputs}
        if not self._bound:
            found = self._session.run(list(outputs), {name: value.numpy() for name, value in given.items()})
            return {name: torch.from_numpy(one) for name, one in zip(outputs, found, strict=True)}
        key = (tuple(tuple(value.shape) for value in given.values()), tuple(outputs))
        if key not in self._shapes:
            return self._first(key, given, outputs)
        return self._replayed(key, given, outputs) if self.provider.graphs else self._directly(key, given, outputs)

    def _fitting(self, name: str, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        wanted = self.inputs[name]
        if name not in inputs:
            raise Unsupported("This model", f"a call without {name}", hint="It was exported for another pipeline.")
        value = inputs[name].detach().to(self.device, _DTYPES[wanted.type])
        # A timestep is a scalar in some exports, and a vector of one or of the batch in others.
        if len(wanted.shape) == 1 and value.dim() == 0:
            whole = next((len(v) for k, v in inputs.items() if k != name and v.dim()), 1)
            value = value.expand(1 if wanted.shape[0] == 1 else whole)
        elif value.dim() == 1 and len(value) != 1 and wanted.shape in ([], [1]):
            # On a card this waits for it; Diffusers' own pipelines give one timestep.
            if not bool((value == value[0]).all()):
                raise Unsupported("This model", f"a {name} for each picture", hint="Give all pictures one.")
            value = value[:1]
        return (value.reshape([]) if not wanted.shape and value.numel() == 1 else value).contiguous()

    def _first(self, key: Any, given: Tensors, outputs: Sequence[str]) -> Tensors:
        """Outputs by way of the host: how large they are is known afterwards."""
        binding = self._session.io_binding()
        self._bind_inputs(binding, given)
        for name in outputs:
            binding.bind_output(name, "cpu")
        self._run(binding, self._options(_NO_GRAPH))
        found = dict(zip(outputs, map(torch.from_numpy, binding.copy_outputs_to_cpu()), strict=True))
        self._shapes[key] = {name: tuple(one.shape) for name, one in found.items()}
        return {name: one.to(self.device) for name, one in found.items()}

    def _directly(self, key: Any, given: Tensors, outputs: Sequence[str]) -> Tensors:
        binding = self._session.io_binding()
        self._bind_inputs(binding, given)
        made = self._bind_outputs(binding, key, outputs)
        self._run(binding, None)
        return made

    def _replayed(self, key: Any, given: Tensors, outputs: Sequence[str]) -> Tensors:
        """A graph reads and writes where it was captured, so inputs are copied there, and outputs from there."""
        if key not in self._sizes:
            binding = self._session.io_binding()
            inputs = {name: value.clone() for name, value in given.items()}
            self._bind_inputs(binding, inputs)
            made = self._bind_outputs(binding, key, outputs)
            # Numbers from 1: a run without a number has 0.
            self._sizes[key] = _Bound(inputs, made, binding, self._options(str(len(self._sizes) + 1)))
        kept = self._sizes[key]
        for name, value in given.items():
            kept.inputs[name].copy_(value)
        self._run(kept.binding, kept.options)
        return {name: one.clone() for name, one in kept.outputs.items()}

    def _bind_inputs(self, binding: Any, given: Tensors) -> None:
        for name, value in given.items():
            binding.bind_input(name, **self._place(value))

    def _bind_outputs(self, binding: Any, key: Any, outputs: Sequence[str]) -> Tensors:
        made = {}
        for name in outputs:
            shape, dtype = self._shapes[key][name], _DTYPES[self.outputs[name].type]
            made[name] = torch.empty(shape, dtype=dtype, device=self.device)
            binding.bind_output(name, **self._place(made[name]))
        return made

    def _place(self, value: torch.Tensor) -> dict[str, Any]:
        return {
            "device_type": self.provider.binding_device,
            "device_id": self.device.index or 0,
            "element_type": _NUMPY[value.dtype],
            "shape": tuple(value.shape),
            "buffer_ptr": value.data_ptr(),
        }

    def _options(self, graph: str) -> Any:
        if not self.provider.graphs:
            return None
        options = runtime().RunOptions()
        options.add_run_config_entry("gpu_graph_id", graph)
        return options

    def _run(self, binding: Any, options: Any) -> None:
        # ONNX Runtime has a stream of its own, and waits for it before it returns; torch's is waited for here.
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._session.run_with_iobinding(binding, options)


def _opened(file: Path, provider: Provider, threads: int) -> Any:
    module = runtime()
    options = module.SessionOptions()
    options.log_severity_level = ERRORS_ALONE
    options.intra_op_num_threads = threads
    # A session's threads wait for its next run by spinning, on the cores that the next part's session needs: emoji-sd's
    # UNet takes 106 ms on two cores beside another session whose threads spin, and 71 beside one whose threads stop.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    wanted = [(provider.runtime_name, provider.options)]
    if provider.is_gpu:
        wanted.append((PROVIDERS["cpu"], {}))
    try:
        session = module.InferenceSession(str(file), options, providers=wanted)
    except Exception as error:
        raise _explained(file, provider, error) from error
    if provider.runtime_name not in session.get_providers():
        raise DeviceUnavailable(
            f"onnxruntime has the provider {provider.name} and cannot use it here: {file.parent.name} would run on "
            "the CPU.",
            hint="Type: rocm-sd doctor, to see the card and its driver; or give provider cpu.",
        )
    return session


def _explained(file: Path, provider: Provider, error: Exception) -> Exception:
    """ONNX Runtime's errors are of one class a cause, in a module of its own; what they say names the cause, too."""
    told = str(error)
    again = f"Export the model again: rocm-sd onnx export MODEL {file.parent.parent}"
    if "opset" in told.lower():
        # What it says begins with its own sources, and is cut before the reason.
        opset = _OPSET.search(told)
        what = f"{opset[0].lower()}, which {file} has" if opset else f"the operators of {file} ({first_line(error)})"
        return Unsupported(f"onnxruntime {runtime().__version__}", what, hint=f"Install a newer onnxruntime. {again}")
    if "External" in told:
        return CorruptModel(f"The weights beside {file} are missing or cut off.", hint=f"Copy them again. Or: {again}")
    if "memory" in told.lower() and "alloc" in told.lower():
        return error
    is_provider = provider.is_gpu and ("CUDA" in told or "HIP" in told or "MIGraphX" in told or "TensorRT" in told)
    if is_provider:
        return DeviceUnavailable(
            f"The provider {provider.name} cannot be used ({first_line(error)}).", hint="Give provider cpu, or auto."
        )
    return CorruptModel(f"{file} cannot be loaded ({first_line(error)}).", hint=again)
