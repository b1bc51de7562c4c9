"""Results of torch's TunableOp: which kernel of rocBLAS or hipBLASLt is the fastest for each product, by its timing.

TunableOp is a switch of the whole process: with it on, every product that it has a result for runs by that kernel, and
with its tuning on, every product that it has none for is tuned in the middle of a picture, for seconds. Here neither is
left on: `rocm-sd tune --tunable-op` tunes products once and writes this file. Where it has a result, the candidate
`tunable_op` of `linear_residual` is timed beside all others, and runs where it is faster.

The file is torch's own format: lines of "Validator,NAME,VERSION", and "OPERATOR,PARAMETERS,SOLUTION,MILLISECONDS".
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from rocm_sd.errors import RocmSdError
from rocm_sd.files import write_text
from rocm_sd.tuning.location import default_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

__all__ = [
    "DEFAULT", "TunableResults", "TunedProduct", "UnreadableResults", "parse", "read_results", "results_file",
    "results_here", "why_stale", "write_results",
]  # fmt: skip

# The solution that is torch's own choice.
DEFAULT = "Default"
_MOST_BYTES, _MOST_LINES = 2**24, 100_000
_DTYPES = {"float": "float32", "double": "float64", "Half": "float16", "BFloat16": "bfloat16"}
_OPERATOR = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,200}")
_PRODUCT = re.compile(r"GemmTunableOp_(?P<dtype>float|double|Half|BFloat16)_(?P<layout>[NT]{2})")
_SIZES = re.compile(r"(?P<layout>[nt]{2})_(\d{1,10})_(\d{1,10})_(\d{1,10})(?:_ld_(\d{1,10})_(\d{1,10})_(\d{1,10}))?")
# What steers a terminal is in no name and no version.
_PLAIN = re.compile(r"[\x20-\x7e]{0,300}")


class UnreadableResults(RocmSdError):
    """A file that is not TunableOp's."""

    def __init__(self, path: Path | str, why: str) -> None:
        super().__init__(
            f"{path} is no file of TunableOp's results: {why}.", hint="Remove it, then type: rocm-sd tune --tunable-op"
        )


@dataclass(frozen=True)
class TunedProduct:
    """`sizes`: (m, n, k) of y = x @ weight.T, x: [m, k], with dense rows; None of anything else. `ms` by torch."""

    operator: str
    parameters: str
    solution: str
    ms: float | None = None
    dtype: str | None = None
    sizes: tuple[int, int, int] | None = None

    @property
    def words(self) -> str:
        if self.sizes is None:
            return f"{self.operator} {self.parameters}"
        m, n, k = self.sizes
        return f"{m}x{k} @ {k}x{n}, {self.dtype}"


@dataclass(frozen=True)
class TunableResults:
    validators: Mapping[str, str]
    products: tuple[TunedProduct, ...]

    def of(self, m: int, n: int, k: int, dtype: str) -> TunedProduct | None:
        """What was found for a linear of these sizes."""
        return next((one for one in self.products if one.sizes == (m, n, k) and one.dtype == dtype), None)


def results_file() -> Path:
    """Beside the user's database of measurements."""
    return default_path().parent / "tunableop.csv"


def read_results(path: Path) -> TunableResults:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UnreadableResults(path, "it is larger than any")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableResults(path, str(error)) from error
    return parse(text, path)


def parse(text: str, path: Path | str = "the text") -> TunableResults:
    """Every line is understood, or the file is refused with the number of the first one that is not."""
    validators: dict[str, str] = {}
    products: list[TunedProduct] = []
    lines = text.splitlines()
    if len(lines) > _MOST_LINES:
        raise UnreadableResults(path, f"it has more than {_MOST_LINES} lines")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        cells = line.split(",")
        if not all(_PLAIN.fullmatch(cell) for cell in cells):
            raise UnreadableResults(path, f"line {number} has characters that no name has")
        if cells[0] == "Validator":
            if len(cells) < 3:
                raise UnreadableResults(path, f"line {number} is a validator without a version")
            validators[cells[1]] = ",".join(cells[2:])
            continue
        products.append(_product(cells, path, number))
    if not validators:
        raise UnreadableResults(path, "it names no versions (no line begins with Validator)")
    return TunableResults(validators, tuple(products))


def _product(cells: list[str], path: Path | str, number: int) -> TunedProduct:
    if not 3 <= len(cells) <= 4 or not _OPERATOR.fullmatch(cells[0]) or not cells[1] or not cells[2]:
        raise UnreadableResults(path, f"line {number} is not OPERATOR,PARAMETERS,SOLUTION,MILLISECONDS")
    ms = None
    if len(cells) == 4:
        try:
            ms = float(cells[3])
        except ValueError:
            ms = math.nan
        if not 0 <= ms < math.inf:
            raise UnreadableResults(path, f"line {number} has no time: {cells[3]!r}")
    operator, parameters, solution = cells[:3]
    dtype, sizes = _linear(operator, parameters)
    return TunedProduct(operator, parameters, solution, ms, dtype, sizes)


def _linear(operator: str, parameters: str) -> tuple[str | None, tuple[int, int, int] | None]:
    """The dtype and (m, n, k) of a linear layer's product; None for others.

    BLAS counts columns first: y = x @ weight.T of x [m, k] and weight [n, k] is its "tn" of n, m and k.
    """
    kind, sizes = _PRODUCT.fullmatch(operator), _SIZES.fullmatch(parameters)
    if kind is None or sizes is None or kind["layout"] != "TN" or sizes["layout"] != "tn":
        return None, None
    n, m, k = (int(each) for each in sizes.groups()[1:4])
    apart = sizes.groups()[4:]
    if apart[0] is not None and tuple(map(int, apart)) != (k, k, n):
        return None, None
    return _DTYPES[kind["dtype"]], (m, n, k)


def why_stale(results: TunableResults, gfx: str, torch_version: str) -> str | None:
    """Why torch would reject them here, as far as it can be told without a card: other versions, another card."""
    made_for = results.validators.get("GCN_ARCH_NAME", "").split(":")[0]
    if made_for and made_for != gfx:
        return f"they are of {made_for}, and this is {gfx}"
    made_by = results.validators.get("PT_VERSION")
    if made_by and _base(made_by) != _base(torch_version):
        return f"they are of torch {made_by}, and this is {torch_version}"
    return None


def _base(version: str) -> str:
    return re.split(r"[+a-z]", version, maxsplit=1)[0]


def results_here() -> TunableResults | None:
    """Of the user's file, read once for each state of it; None where there is none. Raises `UnreadableResults`."""
    path = results_file()
    try:
        stat = path.stat()
    except OSError:
        return None
    return _read(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=2)
def _read(path: Path, _changed: int, _size: int) -> TunableResults:
    return read_results(path)


def write_results(
    path: Path, validators: Iterable[tuple[str, str]], results: Iterable[tuple[str, str, str, float]]
) -> TunableResults:
    """What torch.cuda.tunable has, whole or not at all, in its own format; refused where it could not be read again."""
    lines = [f"Validator,{name},{version}" for name, version in validators]
    lines += [f"{operator},{parameters},{solution},{ms:.6g}" for operator, parameters, solution, ms in results]
    text = "\n".join(lines) + "\n"
    found = parse(text, path)
    write_text(path, text)
    return found
