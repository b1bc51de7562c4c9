"""Which blocks of keys after a loop does ptxas get wrong? Attention with heads in several pieces, on sm_90.

    python benchmarks/ptxas_wgmma.py --out results/ptxas-12.8.93.json
    TRITON_PTXAS_PATH=/usr/local/cuda/bin/ptxas python benchmarks/ptxas_wgmma.py --out results/ptxas-13.0.88.json

The kernel is launched as it is where no assembler is known to be wrong (benchmarks/ptxas-h200/README.md), and in the
masked loop that takes its place. Each row has the columns of the head that are further from float64 than the gate
allows. A worker process launches, since some calls end in an illegal access.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from rocm_sd.bench.machine import machine
from rocm_sd.files import write_text
from rocm_sd.kernels.configs.attention import AttentionConfig
from rocm_sd.kernels.triton import assembler
from rocm_sd.kernels.triton import attention as kernels
from rocm_sd.numerics import compare
from rocm_sd.ops.attention import reference
from rocm_sd.workers import Worker, WorkerFailed

CONFIGS = {
    40: (
        AttentionConfig(128, 64, 8, 3, programs_per_cu=0),
        AttentionConfig(128, 128, 8, 2, programs_per_cu=0),
        AttentionConfig(64, 128, 4, 2, programs_per_cu=0),
        AttentionConfig(64, 32, 4, 3, programs_per_cu=0),
        AttentionConfig(128, 64, 8, 3, pieces=1, programs_per_cu=0),
        AttentionConfig(128, 64, 8, 2, ahead=1, programs_per_cu=0),
    ),
    64: (AttentionConfig(128, 64, 8, 3, programs_per_cu=0),),
    80: (AttentionConfig(128, 64, 8, 2, programs_per_cu=0), AttentionConfig(64, 32, 4, 3, programs_per_cu=0)),
    104: (AttentionConfig(128, 64, 8, 2, programs_per_cu=0), AttentionConfig(64, 32, 4, 3, programs_per_cu=0)),
}
KEYS = (4096, 4095, 4080, 4064, 4048, 4033)
QUERIES = 128


def columns_wrong(head: int, config: AttentionConfig, keys: int, masked: bool) -> list[int]:
    """The first and the last that is wrong; nothing where all are right."""
    kernels.loses_last_block = lambda *_: masked
    device = torch.device("cuda", torch.cuda.current_device())
    random = torch.Generator(device).manual_seed(1)
    packed = torch.randn((1, keys, 3, 2, head), generator=random, device=device).half()
    q, k, v = packed.unbind(2)
    q = q[:, :QUERIES]
    out = torch.full(q.shape, float("nan"), dtype=q.dtype, device=device)
    units = torch.cuda.get_device_properties(device).multi_processor_count
    kernels.launch(q, k, v, out, head**-0.5, config, units)
    exact = reference.attention(q.double(), k.double(), v.double())
    stock = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
    allowed = compare(out, exact, stock.contiguous()).allowed_largest
    # Written so that NaN, which compares false, is wrong.
    wrong = ~((out.double() - exact).abs() <= allowed)
    found: list[int] = wrong.flatten(0, 2).any(0).nonzero().flatten().tolist()
    return [found[0], found[-1]] if found else []


def rows() -> list[dict[str, Any]]:
    import ptxas_wgmma  # noqa: PLC0415 -- a worker finds the function by this name, and not in __main__

    made: list[dict[str, Any]] = []
    with Worker() as worker:
        for head, configs in CONFIGS.items():
            for config in configs:
                for masked, keys in ((masked, keys) for masked in (False, True) for keys in KEYS):
                    row: dict[str, Any] = {"head": head, "config": config.to_dict(), "keys": keys, "masked": masked}
                    before = made[-1] if made else {}
                    if "ended" in before and all(before[each] == row[each] for each in ("head", "config", "masked")):
                        continue
                    try:
                        row["wrong"] = worker.call(ptxas_wgmma.columns_wrong, head, config, keys, masked, timeout=60)
                    except WorkerFailed as failed:
                        worker.stop()
                        row["ended"] = failed.message.splitlines()[0][:100]
                    made.append(row)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    found = rows()
    version = assembler.ptxas_version()
    record = {
        "ptxas": None if version is None else ".".join(map(str, version)),
        "machine": asdict(machine(torch.device("cuda"))),
        "rows": found,
    }
    lines = ",\n  ".join(json.dumps(row) for row in found)
    rest = json.dumps({name: value for name, value in record.items() if name != "rows"}, indent=1)
    write_text(out, f'{rest[:-2]},\n "rows": [\n  {lines}\n ]\n}}\n')
    bad = [row for row in found if row.get("wrong") or "ended" in row]
    print(f"ptxas {record['ptxas']}: {len(bad)} of {len(found)} calls wrong; {sum(r['masked'] for r in bad)} masked")


if __name__ == "__main__":
    main()
