"""Try every implementation and config of every op on thousands of calls: python tools/fuzz_ops.py [--calls 20000]

Calls have sizes that pictures have: maps of 64 to 2048 pixels in steps of 8, batches with guidance, texts, tails of
every residue, views of packed projections, parts that are there or not. Each result is held to float64 (see
fuzz_rounds.py). A worker process runs them, so that a crash or a hang costs one call. The record has a row for each
op, implementation, config and variant; Ctrl-C keeps what was done, and the same command goes on from there. The exit
code is 7 where a call failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fuzz_calls import CALLS
from fuzz_rounds import Round, run_round
from rocm_sd.bench.machine import machine
from rocm_sd.cli.terminal import bar, parts
from rocm_sd.errors import InvalidOption, NumericsFailure, RocmSdError
from rocm_sd.files import write_text
from rocm_sd.plain_json import read_json
from rocm_sd.workers import Worker, WorkerFailed, WorkerLost

__all__ = ["fuzz"]

FORMAT = "rocm-sd fuzz of ops"
SAMPLES_A_ROUND = 180
# Beyond the compilation of hundreds of kernels on a few cores: such a round hangs.
ROUND_S = 600.0
REASONS = 200


def fuzz(
    *,
    calls: int,
    seed: int,
    seconds: float,
    out: Path,
    ops: str | None = None,
    device: str | None = None,
    small: bool | None = None,
    samples: int = SAMPLES_A_ROUND,
) -> None:
    """`samples`: drawn calls of one round. `small`: tiny calls, as on a CPU."""
    only = tuple(parts(ops))
    for name in only:
        if name not in CALLS:
            raise InvalidOption("op", name, list(CALLS))
    where = device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    tiny = where == "cpu" if small is None else small
    record = _opened(out, {"seed": seed, "ops": list(only), "small": tiny})
    began = time.monotonic() - record["seconds"]
    with tempfile.TemporaryDirectory() as folder, Worker() as worker, bar("calls", calls) as update:
        begun = Path(folder) / "begun"
        try:
            while record["calls"] < calls and time.monotonic() - began < seconds:
                update(completed=min(record["calls"], calls), description=f"{record['failures']} failures")
                found = _round(worker, record, (seed, samples, where, tiny, only), begun)
                if found.broken:
                    worker.stop()
                _add(record, found, samples)
                record["seconds"] = round(time.monotonic() - began, 1)
                record["machine"] = asdict(machine(torch.device(where)))
                write_text(out, _text(record))
        except KeyboardInterrupt:
            Console(stderr=True).print(f"Stopped. {out} has what was done; the same command goes on from there.")
    _say(record, out)
    if record["failures"]:
        raise NumericsFailure(f"{record['failures']} of {record['calls']} calls failed.", hint=f"{out} names them.")


def _opened(out: Path, drawn: dict[str, Any]) -> dict[str, Any]:
    new = {"format": FORMAT, **drawn, "samples": 0, "next": 0, "calls": 0, "failures": 0, "seconds": 0.0, "compiled": 0}
    new |= {"residues": {}, "skipped": {}, "reasons": [], "table": {}}
    if not out.exists():
        return new
    before: dict[str, Any] = read_json(out, lambda why: RocmSdError(f"{out} is no record of a fuzz: {why}."))
    if before.get("format") != FORMAT or any(before.get(name) != value for name, value in drawn.items()):
        raise InvalidOption("--out", str(out), [], hint="It is the record of other draws: name another file.")
    before["table"] = {tuple(row[:4]): row[4:] for row in before["table"]}
    return before


def _round(worker: Worker, record: dict[str, Any], drawn: tuple[Any, ...], begun: Path) -> Round:
    seed, samples, where, tiny, only = drawn
    try:
        return worker.call(run_round, seed, record["next"], samples, where, tiny, only, str(begun), timeout=ROUND_S)
    except WorkerLost as lost:
        # The calls of the round before it are not known to be right, and are not counted.
        call = begun.read_text(encoding="utf-8") if begun.exists() else "a call"
        row = ("", call, "", "")
        return Round(calls={row: 1}, failures={row: 1}, reasons=[f"{call}: {lost.message}"])
    except WorkerFailed as failed:
        raise RocmSdError(f"The calls could not be run: {failed.message}") from failed


def _add(record: dict[str, Any], found: Round, samples: int) -> None:
    for row, count in found.calls.items():
        before = record["table"].get(row, [0, 0])
        record["table"][row] = [before[0] + count, before[1] + found.failures.get(row, 0)]
    record["calls"] += sum(found.calls.values())
    record["failures"] += sum(found.failures.values())
    record["samples"] += found.samples
    record["compiled"] += found.compiled
    record["next"] += samples
    record["reasons"] = [*record["reasons"], *found.reasons][:REASONS]
    for op, seen in found.residues.items():
        record["residues"][op] = sorted({*record["residues"].get(op, ()), *seen})
    for why, count in found.skipped.items():
        record["skipped"][why] = record["skipped"].get(why, 0) + count


def _text(record: dict[str, Any]) -> str:
    """A line for each row of the table, so that records can be compared."""
    table = ",\n  ".join(json.dumps([*row, *counts]) for row, counts in sorted(record["table"].items()))
    rest = json.dumps({name: value for name, value in record.items() if name != "table"}, indent=1)
    return f'{rest[:-2]},\n "table": [\n  {table}\n ]\n}}\n'


def _say(record: dict[str, Any], out: Path) -> None:
    console = Console()
    by_op: dict[tuple[str, str], list[int]] = {}
    for (op, implementation, *_), (count, failed) in record["table"].items():
        found = by_op.setdefault((op, implementation), [0, 0, 0])
        found[:] = found[0] + count, found[1] + failed, found[2] + 1
    for (op, implementation), (count, failed, rows) in sorted(by_op.items()):
        console.print(f"{op} {implementation}: {count} calls in {rows} variants, {failed} failures", soft_wrap=True)
    for reason in record["reasons"][:20]:
        console.print(reason, markup=False, soft_wrap=True)
    console.print(
        f"{record['calls']} calls of {record['samples']} draws, {record['failures']} failures, "
        f"{record['compiled']} kernels compiled, {record['seconds']:.0f} s: {out}",
        soft_wrap=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--calls", type=int, default=20_000, help="how many, over all ops")
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same calls")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin nothing new after this long")
    parser.add_argument("--out", type=Path, default=Path("fuzz.json"), help="the record, and where to go on")
    parser.add_argument("--ops", help="by name, e.g. attention,conv2d (default: all)")
    parser.add_argument("--device", help="cuda:0 or cpu (default: what is there)")
    parser.add_argument("--small", action=argparse.BooleanOptionalAction, help="tiny calls (default: on a CPU)")
    parser.add_argument("--samples", type=int, default=SAMPLES_A_ROUND, help="drawn calls of one round")
    try:
        fuzz(**vars(parser.parse_args()))
    except RocmSdError as error:
        Console(stderr=True).print(f"{error.message} {error.hint or ''}".strip(), markup=False)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
