"""Trees like those that AMD's compute driver has in sysfs."""

from __future__ import annotations

GIB = 1024**3


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def node(root, index, name="", banks=(), **properties):
    folder = root / "sys/class/kfd/kfd/topology/nodes" / str(index)
    write(folder / "properties", "".join(f"{key} {value}\n" for key, value in properties.items()))
    write(folder / "name", f"{name}\n")
    for number, (heap, size) in enumerate(banks):
        write(folder / "mem_banks" / str(number) / "properties", f"heap_type {heap}\nsize_in_bytes {size}\nflags 0\n")


def cpu_node(root, index=0):
    node(root, index, cpu_cores_count=16, simd_count=0, gfx_target_version=0, banks=[(0, 64 * GIB)])
