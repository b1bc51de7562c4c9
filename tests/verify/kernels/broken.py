"""Kernels with one mistake each, as people make them; what is right stands in add.py and layernorm.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def index_off_by_one(x, y, z, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(z + at, tl.load(x + at + 1, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


@triton.jit
def negative_index(x, y, z, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(z + at, tl.load(x + at, mask=inside) + tl.load(y + at - 1, mask=inside), mask=inside)


@triton.jit
def no_mask(x, y, z, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(z + at, tl.load(x + at) + tl.load(y + at))


@triton.jit
def unwritten_tail(x, y, z, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n - 1
    tl.store(z + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


@triton.jit
def sum_into_empty_memory(x, y, z, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(z + at, tl.load(z + at, mask=inside) + tl.load(x + at, mask=inside), mask=inside)


@triton.jit
def endless_loop(x, y, z, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.zeros([BLOCK], tl.float32)
    step = 0
    while step < n:
        total += tl.load(x + at, mask=inside, other=0.0)
        step = step * 1
    tl.store(z + at, total, mask=inside)


@triton.jit
def lost_update(x, y, z, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(z + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)
    tl.store(y, tl.load(y) + 1)


@triton.jit
def blocks_that_overlap(x, y, z, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * (BLOCK - 1) + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(z + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


@triton.jit
def reads_what_another_program_writes(x, y, z, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    before = tl.load(x + at - BLOCK, mask=inside & (at >= BLOCK), other=0.0)
    tl.store(x + at, before + tl.load(y + at, mask=inside), mask=inside)
