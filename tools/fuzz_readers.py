"""Fuzz a reader of files with Atheris, guided by what its code covers: python tools/fuzz_readers.py READER

The readers are those of tests/test_fuzz_readers.py and its like, which break good files by rules of their own: here
bytes are changed by whatever reaches new code. It starts from a good file, ends at the first failure with exit code 77,
and leaves the bytes that did it as `crash-...` in the folder that it is started in.

Needs: pip install atheris (Linux, x86_64).
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["READERS", "reader"]

ROOT = Path(__file__).resolve().parent.parent
# What reads: the rest of what these import is not looked at, and is not slowed down.
_READING = (
    *("rocm_sd.plain_json", "rocm_sd.typed_json", "rocm_sd.bench", "rocm_sd.doctor", "rocm_sd.tuning"),
    "rocm_sd.contribution",
    "rocm_sd.agents.keeping",
    "rocm_sd.models.single_file",
    "rocm_sd.ops.accepted",
    "rocm_sd.engine.approximation.eight_bit_files",
)
# The tests whose module is not test_fuzz_readers.
_MORE = ("improvements", "accepted_kernels", "indexes_of_weights", "accuracy_records")
_ELSEWHERE = {
    "eight_bit_headers": "engine/approximation/test_fuzz_eight_bits",
    **dict.fromkeys(_MORE, "test_fuzz_more_readers"),
}
# A good file of each, from the module of its tests.
_GOOD: dict[str, Callable[[Any], Any]] = {
    "plain_json": lambda cases: cases.RECORD.to_dict(),
    "bench_records": lambda cases: cases.RECORD.to_dict(),
    "report": lambda cases: cases.OP.to_dict(),
    "ladder": lambda cases: cases.LADDER,
    "contributions": lambda cases: cases.submission._body(cases.RECORD),  # noqa: SLF001 -- as the test
    "card_reports": lambda cases: cases.CARD_REPORT,
    "install_lists": lambda cases: cases.LIST,
    "rocprof": lambda cases: cases.ROCPROF,
    "model_indexes": lambda cases: cases.INDEX,
    "machines": lambda cases: cases.FACTS,
    "eight_bit_headers": lambda cases: cases.EIGHT_BITS,
    "improvements": lambda cases: cases.IMPROVEMENT,
    "accepted_kernels": lambda cases: cases.asdict(cases.ACCEPTED) | {"digest": cases.ACCEPTED.hashed()},
    "indexes_of_weights": lambda _cases: {"metadata": {"total_size": 8}, "weight_map": {"a": "part-1.safetensors"}},
    "accuracy_records": lambda cases: cases.ACCURACY.to_dict(),
}
READERS = tuple(_GOOD)
EXAMPLES = """examples:
  python tools/fuzz_readers.py plain_json --runs 100000
  python tools/fuzz_readers.py contributions --seconds 600
  python tools/fuzz_readers.py ladder --again crash-da39a3ee...   # a failure once more
"""


def reader(name: str, cases: Any, folder: Path) -> tuple[Callable[[bytes], None], bytes]:
    """What a test of the module `cases` does with the bytes of a file, and a good one."""

    def once(raw: bytes) -> None:
        given: dict[str, Any] = {} if name == "plain_json" else {"folder": folder}
        given |= {"facts": raw, "probes": json.dumps(cases.PROBES).encode()} if name == "machines" else {"raw": raw}
        getattr(cases, f"test_{name}").hypothesis.inner_test(**given)

    return once, json.dumps(_GOOD[name](cases)).encode()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reader", choices=READERS)
    parser.add_argument("--seconds", type=int, default=60, help="stop after so many (default: 60)")
    parser.add_argument("--runs", type=int, default=-1, help="stop after so many files (default: no limit)")
    parser.add_argument("--again", type=Path, help="read this file once, instead")
    options = parser.parse_args()
    try:
        import atheris  # noqa: PLC0415 -- says how to get it
    except ImportError:
        sys.exit("Atheris is missing. Type: pip install atheris")
    place, _, module = _ELSEWHERE.get(options.reader, "test_fuzz_readers").rpartition("/")
    sys.path[:0] = [str(ROOT / "tests" / place), str(ROOT / "tests"), str(ROOT / "tools")]
    with atheris.instrument_imports(include=list(_READING)):
        cases = importlib.import_module(module)
    logging.getLogger("rocm_sd").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as place:
        once, good = reader(options.reader, cases, Path(place))
        if options.again is not None:
            once(options.again.read_bytes())
            return
        corpus = Path(place) / "corpus"
        corpus.mkdir()
        (corpus / "good").write_bytes(good)
        limits = [f"-runs={options.runs}", f"-max_total_time={options.seconds}", f"-max_len={4 * len(good)}"]
        # It ends the process, and would leave the folder behind.
        child = os.fork()
        if not child:
            atheris.Setup([sys.argv[0], *limits, str(corpus)], once)
            atheris.Fuzz()
        _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
