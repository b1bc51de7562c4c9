"""require_as_plain(name, plain, fused): a fused part computes on the CPU what its export computes, but for rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rocm_sd.arch import host_memory
from rocm_sd.errors import NumericsFailure, first_line
from rocm_sd.onnx.providers import runtime, session_as_written

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["require_alike", "require_as_plain", "short_of_memory"]

# Of the weights, where they are float16: a CPU widens them, and SDXL's UNet of 4.8 GiB takes 18.6.
_TIMES_THE_WEIGHTS = 4
# Of the root mean square. Rounding of float32 comes to a millionth, of float16 to some thousandths after all layers; a
# fusion that is wrong changes values by their own size.
_ALLOWED = {np.dtype(np.float32): 2.0**-12, np.dtype(np.float16): 2.0**-4}
_BATCH, _TOKENS = 2, 7
# Of latents, which three levels of a UNet halve, and of pictures, which have three channels.
_SIDES, _SIDES_OF_PICTURES = (8, 16), (32, 64)
_TIMESTEP = 501
# Of token numbers, which the smallest vocabulary has.
_TOKEN_NUMBERS = 50
_DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}


def short_of_memory(*folders: Path) -> str:
    """Why parts are not compared here, or "". A process that takes what is not there is ended by the system."""
    sizes = (file.stat().st_size for folder in folders for file in folder.iterdir() if file.is_file())
    needed = _TIMES_THE_WEIGHTS * sum(sizes)
    free = host_memory.free()
    if free is None or needed <= free:
        return ""
    return f"it takes {needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} are free"


def require_as_plain(name: str, plain: Path, fused: Path) -> None:
    """Raises NumericsFailure with the output that differs. One session after the other: both need not fit in memory."""
    given: dict[str, NDArray[Any]] = {}
    expected, actual = _computed(plain, given), _computed(fused, given)
    for output, one in expected.items():
        if one.dtype.kind == "f":
            require_alike(f"{output} of the fused {name}", actual[output], one)


def require_alike(what: str, actual: NDArray[Any], expected: NDArray[Any]) -> None:
    """`expected`: in the dtype that it was computed in."""
    report = "Please report it with the model's name. The plain export is as it was, and runs."
    if actual.shape != expected.shape:
        raise NumericsFailure(f"{what} has the shape {actual.shape}, and the export's {expected.shape}.", hint=report)
    allowed = max(_ALLOWED.get(each.dtype, 0.0) for each in (actual, expected))
    wide = expected.astype(np.float64)
    error, size = _rms(actual - wide), _rms(wide)
    # Written so that NaN, which compares false, fails.
    if not error <= allowed * size:
        raise NumericsFailure(
            f"{what} is not the export's: errors of {error:.3g} (root mean square) in values of {size:.3g}.",
            hint=report,
        )


def _rms(values: NDArray[Any]) -> float:
    return float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0


def _computed(file: Path, given: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """All outputs for these inputs, which the first session chooses."""
    try:
        session = session_as_written(file)
        inputs = session.get_inputs()
        if not given:
            random = np.random.default_rng(0)
            given |= {each.name: _input(each, random) for each in inputs}
        found = session.run(None, {each.name: given[each.name].astype(_DTYPES[each.type]) for each in inputs})
    except Exception as error:
        # Of onnxruntime's own classes, one a cause.
        raise NumericsFailure(
            f"onnxruntime {runtime().__version__} cannot run {file.parent.name}/{file.name} ({first_line(error)}).",
            hint="Please report it with the model's name.",
        ) from error
    return {each.name: one for each, one in zip(session.get_outputs(), found, strict=True)}


def _input(told: Any, random: np.random.Generator) -> NDArray[Any]:
    if told.name == "timestep":
        return np.full([size if isinstance(size, int) else _BATCH for size in told.shape], _TIMESTEP)
    is_picture = len(told.shape) == 4 and told.shape[1] == 3
    free = (_BATCH, _TOKENS, *(_SIDES_OF_PICTURES if is_picture else _SIDES))
    shape = [size if isinstance(size, int) else free[place] for place, size in enumerate(told.shape)]
    if told.type == "tensor(int64)":
        return random.integers(0, _TOKEN_NUMBERS, shape)
    return random.standard_normal(shape)
