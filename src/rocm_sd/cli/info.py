"""rocm-sd info: the device, the versions, and for each op which implementations exist and how each is proven."""

from __future__ import annotations

import json
import platform
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rocm_sd import __version__, settings
from rocm_sd.arch import host

if TYPE_CHECKING:
    import torch

__all__ = ["info"]

PACKAGES = ("torch", "triton", "diffusers", "transformers", "accelerate", "safetensors", "tinygrad")


def info(
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable, for bug reports and scripts.")] = False,
) -> None:
    """Show the device, the versions, and which implementation of each op is used here.

    rocm-sd info

    rocm-sd info --json > info.json
    """
    facts = gather()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        _show(facts)


def gather() -> dict[str, Any]:
    import torch

    from rocm_sd import arch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    architecture, facts = arch.detect(device), arch.device_facts(device)
    return {
        "rocm_sd": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "versions": {name: host.installed(name) for name in PACKAGES},
        "torch_build": {"hip": torch.version.hip, "cuda": torch.version.cuda},
        "device": {
            "type": device.type,
            "name": facts.name,
            "arch": architecture.name,
            "known": architecture.known,
            "compute_units": facts.compute_units,
            "memory_bytes": facts.memory_bytes,
        },
        "arch": _arch(architecture),
        "gpus_in_system": [
            {"name": gpu.name, "arch": gpu.arch_name, "vendor": gpu.vendor.value, "integrated": gpu.integrated}
            for gpu in arch.find_gpus()
        ],
        "settings": settings.current().to_dict(),
        "tuning_database": _database(device),
        "tunable_op": _tunable_op(architecture.name),
        "ops": _ops(device),
    }


def _tunable_op(arch_name: str) -> dict[str, Any]:
    """What torch's TunableOp found before, and why it is not used, where it is not."""
    import torch

    from rocm_sd.errors import RocmSdError
    from rocm_sd.tuning import tunable_op

    facts: dict[str, Any] = {"path": str(tunable_op.results_file()), "products": 0, "why_not_used": None}
    try:
        results = tunable_op.results_here()
    except RocmSdError as error:
        return {**facts, "why_not_used": error.message}
    if results is None:
        return {**facts, "why_not_used": "nothing was tuned by it: rocm-sd tune --tunable-op, on ROCm"}
    stale = tunable_op.why_stale(results, arch_name, torch.__version__)
    return {**facts, "products": len(results.products), "why_not_used": stale}


def _database(device: torch.device) -> dict[str, Any]:
    """What was measured, and what is set aside: here, and by the same file for other cards and versions."""
    from rocm_sd.tuning.environment import current
    from rocm_sd.tuning.location import default_path
    from rocm_sd.tuning.resolve import user_database

    facts: dict[str, Any] = {"path": str(default_path()), "exists": default_path().exists()}
    if not facts["exists"]:
        return {**facts, "why_not_kept": None, "measurements": 0, "measurements_here": 0, "quarantined": []}
    database, here = user_database(), current(device)
    quarantined = [
        {"op": q.op, "candidate": q.candidate, "reason": q.reason, "when": q.when, "here": q.environment == here}
        | {"environment": vars(q.environment), "kernel_hash": q.kernel_hash}
        for q in database.quarantined()
    ]
    return {
        **facts,
        "why_not_kept": database.why_not_kept(),
        "measurements": database.count(),
        "measurements_here": database.count(here),
        "quarantined": quarantined,
    }


def _arch(architecture: Any) -> dict[str, Any]:
    fields = (
        "family", "product", "wave_size", "lds_per_workgroup", "vgprs_per_wave", "compute_units", "l2_bytes",
        "bandwidth_gbps",
    )  # fmt: skip
    facts: dict[str, Any] = {name: getattr(architecture, name) for name in fields}
    facts["matrix_unit"] = architecture.matrix_unit.value if architecture.matrix_unit else None
    facts["fp8"] = architecture.fp8.value if architecture.fp8 else None
    facts["peak_tflops"] = dict(architecture.peak_tflops)
    return facts


def _ops(device: torch.device) -> list[dict[str, Any]]:
    from rocm_sd.ops import OPS, plugins
    from rocm_sd.tuning.environment import current
    from rocm_sd.tuning.location import default_path
    from rocm_sd.tuning.resolve import user_database
    from rocm_sd.verify.proofs import proofs

    here = current(device)
    aside = {}
    if default_path().exists():
        found = user_database().quarantined(here)
        aside = {(q.op, q.candidate, q.kernel_hash): q.reason for q in found}
    rows = []
    for op in OPS.values():
        assert op.tuning is not None
        assert op.verification is not None
        typical = op.tuning.buckets[0].sample if op.tuning.buckets else op.tuning.timed[0]
        problem = op.verification.problem(*typical.make(filled=False))
        plugged = [plug_in.implementation for plug_in in plugins.of_op(op.name)]
        choice = op.named(problem, device)
        names = [each.name for each in (*op.implementations, *plugged)]
        set_aside = {name: aside.get((op.name, name, op.kernel_hash(name))) for name in names}
        used = op.implementations[0].name if set_aside[choice.implementation] else choice.implementation
        implementations = []
        for implementation in (*op.implementations, *plugged):
            proven = [p for p in proofs() if (p.op, p.implementation) == (op.name, implementation.name)]
            implementations.append(
                {
                    "name": implementation.name,
                    "plug_in": implementation in plugged,
                    "why_not_here": implementation.why_not(problem, device),
                    "quarantined": set_aside[implementation.name],
                    "chosen_here": implementation.name == used,
                    "proven": [{"arch": p.arch, "rung": p.rung, "evidence": p.evidence} for p in proven],
                }
            )
        rows.append(
            {
                "name": op.name,
                "summary": op.summary,
                "typical_call": typical.name,
                "source": choice.source,
                "why": choice.why,
                "implementations": implementations,
            }
        )
    return rows


def _show(facts: dict[str, Any]) -> None:
    console = Console()
    machine = Table(title=f"rocm-sd {facts['rocm_sd']}", title_justify="left", show_header=False)
    device, build = facts["device"], facts["torch_build"]
    memory = f", {device['memory_bytes'] / 2**30:.1f} GiB" if device["memory_bytes"] else ""
    units = f", {device['compute_units']} compute units" if device["compute_units"] else ""
    machine.add_row("device", f"{device['name']} ({device['arch']}{units}{memory})")
    if not device["known"] and device["type"] != "cpu":
        machine.add_row("", f"{device['arch']} is not in the table: every op runs as stock torch")
    kind = f"ROCm {build['hip']}" if build["hip"] else f"CUDA {build['cuda']}" if build["cuda"] else "CPU only"
    machine.add_row("torch", f"{facts['versions']['torch']} ({kind})")
    others = (f"{name} {number or 'absent'}" for name, number in facts["versions"].items() if name != "torch")
    machine.add_row("packages", ", ".join(others))
    machine.add_row("python", f"{facts['python']} on {facts['system']}")
    for gpu in facts["gpus_in_system"]:
        machine.add_row(
            "GPU in system", f"{gpu['name']} ({gpu['arch']})" + (", integrated" if gpu["integrated"] else "")
        )
    if device["type"] == "cpu" and facts["gpus_in_system"]:
        machine.add_row("", "torch does not see it: see INSTALL.md for the torch build that does")
    database = facts["tuning_database"]
    machine.add_row("measured here", _measured(database))
    machine.add_row("database", Text(database["path"]))
    tuned = facts["tunable_op"]
    if tuned["products"]:
        unused = f"; not used: {tuned['why_not_used']}" if tuned["why_not_used"] else ""
        machine.add_row("TunableOp", f"{tuned['products']} products tuned{unused}")
    console.print(machine)

    ops = Table("op", "used here", "others", "proven here", title="Ops", title_justify="left")
    for op in facts["ops"]:
        known = op["implementations"]
        used = next(_named(i) for i in known if i["chosen_here"])
        available = [_named(i) for i in known if not (i["chosen_here"] or i["why_not_here"] or i["quarantined"])]
        proven = [p["rung"] for i in known for p in i["proven"] if p["arch"] == device["arch"]]
        ops.add_row(op["name"], used, ", ".join(available) or "nothing", ", ".join(proven) or "no")
    console.print(ops)
    console.print(
        "At a typical call of each; --json has every implementation, with the reason that it cannot run here."
    )
    for one in database["quarantined"]:
        if one["here"]:
            # As text: a reason may hold what a console takes for markup.
            console.print(Text(f"{one['op']} never runs as {one['candidate']} here: {one['reason']}", style="yellow"))


def _named(implementation: dict[str, Any]) -> str:
    return f"{implementation['name']} (plug-in)" if implementation["plug_in"] else str(implementation["name"])


def _measured(database: dict[str, Any]) -> str:
    if not database["exists"]:
        return "nothing yet; type: rocm-sd tune"
    aside = sum(one["here"] for one in database["quarantined"])
    others = database["measurements"] - database["measurements_here"]
    counts = f"{database['measurements_here']} configs timed, {aside} candidates set aside"
    counts += f"; {others} configs for other cards or versions" if others else ""
    return counts if database["why_not_kept"] is None else f"{counts}; not written to: {database['why_not_kept']}"
