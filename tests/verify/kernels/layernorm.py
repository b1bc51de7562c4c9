"""y = layer_norm(x) * weight + bias over the last axis, in a loop over blocks of columns; one row a program."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def layernorm(x, y, weight, bias, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        total += tl.load(x + row * columns + column, mask=column < columns, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / columns
    spread = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * columns + column, mask=column < columns, other=0.0).to(tl.float32)
        distance = tl.where(column < columns, value - mean, 0.0)
        spread += distance * distance
    rstd = 1.0 / tl.sqrt(tl.sum(spread, axis=0) / columns + eps)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        value = tl.load(x + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + row * columns + column, (value - mean) * rstd * scale + shift, mask=inside)


def launch(x, y, weight, bias, eps=1e-5, *, num_warps=4):
    rows, columns = x.shape
    layernorm[(rows,)](x, y, weight, bias, columns, eps, BLOCK=128, num_warps=num_warps)
