"""python -m rocm_sd.onnx.optimize_pipeline -i IN -o OUT --float16: `rocm-sd onnx optimize`, by ONNX Runtime's flags."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from rocm_sd.errors import INTERRUPTED, explained
from rocm_sd.onnx.fusions.results import table_of
from rocm_sd.onnx.optimizing import optimize_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rocm_sd.onnx.optimize_pipeline",
        description="Fuse the graphs of a Stable Diffusion pipeline in ONNX.",
        epilog="Example: python -m rocm_sd.onnx.optimize_pipeline -i sd15-onnx -o sd15-fp16 --float16",
    )
    parser.add_argument("-i", "--input", required=True, type=Path, help="The folder of an exported pipeline.")
    parser.add_argument("-o", "--output", required=True, type=Path, help="The folder to write.")
    parser.add_argument("--float16", action="store_true", help="Half precision, but for what overflows in it.")
    parser.add_argument("--overwrite", action="store_true", help="Replace a folder that is there.")
    parser.add_argument(
        "-e", "--use_external_data_format", action="store_true", help="Always so: weights lie beside the graph."
    )
    parser.add_argument(
        "--provider", default="auto", help="cpu, migraphx, rocm, cuda or auto: the best that is installed."
    )
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """The exit code is that of `rocm-sd`."""
    options = _arguments(given)
    errors = Console(stderr=True)
    try:
        result = optimize_folder(
            options.input,
            options.output,
            float16=options.float16,
            provider=options.provider,
            overwrite=options.overwrite,
            progress=lambda done, total, what: errors.print(f"{done}/{total} {what}", highlight=False, markup=False),
        )
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 -- the end of a program: every error is one sentence and a code
        said = explained(error)
        errors.print(f"Error: {said}", highlight=False, markup=False, soft_wrap=True)
        return said.exit_code
    Console().print(table_of(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
