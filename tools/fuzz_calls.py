"""Calls of every op at sizes that pictures have, drawn at random: what `fuzz_ops.py` tries.

Each function takes two sources of random numbers. `fixed` gives what a kernel is compiled for (dtype, channels, which
parts there are, how they lie in memory), a few dozen times; `free` gives sizes and everything else, for each call anew.
So thousands of calls share a few hundred compiled kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd.ops.eight_bits import LIMITS, drawn
from rocm_sd.ops.samples import Draw, Sample, dtype_name
from rocm_sd.ops.upsample_conv2d.parity import parity_weights

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

__all__ = ["CALLS", "Drawn", "Limits"]

HALVES = (torch.float16, torch.bfloat16)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
UNET = (320, 640, 1280)
BATCHES = (1, 1, 2, 2, 2, 3, 4, 6, 8, 16)
TEXTS = (77, 154, 231)
# fp8 that NVIDIA and RDNA4 multiply; FNUZ is for the emulator.
_FORMATS = ("int8", "float8_e4m3fn")


@dataclass(frozen=True)
class Limits:
    """`work` is multiplications or elements of one call; `narrow` divides channels, where a CPU interprets kernels."""

    work: int = 2**31
    elements: int = 2**21
    narrow: int = 1

    def channels(self, count: int) -> int:
        return max(4, count // self.narrow) if count > 8 else count


@dataclass(frozen=True)
class Drawn:
    """A call, and what is to be said of it beside its problem: its parts, and how they lie."""

    sample: Sample
    said: str = ""


def _side(free: Random) -> int:
    """Of a latent, from a picture of 64 to 2048 pixels in steps of 8; small ones are the more frequent."""
    return round(8 * 2 ** (5 * free.random() ** 2))


def _map(free: Random, most: int, levels: int = 4) -> tuple[int, int]:
    """Height and width at a level of the UNet, at most so many pixels in all."""
    level = free.randrange(levels)
    height, width = (math.ceil(_side(free) / 2**level) for _ in range(2))
    while height * width > max(1, most):
        height, width = math.ceil(height / 2), width // 2 or 1
        if height * width <= 1:
            break
    return height, width


def _batch(free: Random, most: int) -> int:
    return max(1, min(free.choice(BATCHES), most))


def _rows(free: Random, most: int) -> int:
    """Tokens of a batch: of pictures, of texts, and of any number, so that every tail comes."""
    kind = free.random()
    if kind < 0.5:
        height, width = _map(free, most)
        return max(1, min(most, _batch(free, most) * height * width))
    if kind < 0.6:
        return max(1, min(most, _batch(free, most) * free.choice(TEXTS)))
    return free.randint(1, max(1, min(most, free.choice((64, 512, 4500)))))


def _parts(fixed: Random, *names: str) -> set[str]:
    return {name for name in names if fixed.random() < 0.5}


def _named(op: str, dtype: torch.dtype, text: str, build: Callable[[Draw], tuple[Any, ...]], *said: str) -> Drawn:
    lying = ", ".join(word for word in said if word)
    return Drawn(Sample(f"{op} {text}, {dtype_name(dtype)}{f', {lying}' if lying else ''}", dtype, build), lying)


def _image(draw: Draw, layout: str, *shape: int, std: float = 1.0) -> torch.Tensor:
    """[N, C, H, W] in one of three ways to lie in memory."""
    N, C, H, W = shape
    if layout == "contiguous":
        return draw(*shape, std=std)
    if layout == "every other picture":
        return draw.image(2 * N, C, H, W, std=std)[::2]
    return draw.image(*shape, std=std)


LAYOUTS = ("channels-last", "channels-last", "channels-last", "contiguous", "every other picture")


def _matrix(draw: Draw, layout: str, rows: int, columns: int, **drawn: float) -> torch.Tensor:
    """Rows that follow one another, or that are the first columns of longer ones."""
    if layout == "rows apart":
        return draw(rows, columns + 8, **drawn)[:, :columns]
    return draw(rows, columns, **drawn)


ROWS = ("dense", "dense", "rows apart")


def attention(fixed: Random, free: Random, limits: Limits) -> Drawn:
    D = fixed.choice((40, 40, 48, 64, 64, 72, 80, 80, 96, 104, 128, 160, 160, 512))
    dtype, heads = fixed.choice((*HALVES, *HALVES, torch.float32)), fixed.choice((1, 2, 5, 8, 10, 20))
    lying = fixed.choice(("packed", "packed", "packed keys", "apart", "heads first", "cut from wider"))
    # Enough keys that there is a loop and a tail after it, or those of a text.
    text = fixed.random() < 0.3
    heads = 1 if limits.narrow > 1 or D == 512 else heads
    D = limits.channels(D)
    # Scores are float64 in the reference.
    scores = min(limits.work, 2**25 if free.random() < 0.05 else 2**23)
    B = _batch(free, 4)
    if text:
        T = free.choice((*TEXTS, free.randint(1, 300)))
    else:
        height, width = _map(free, min(16384, scores), levels=2)
        T = free.choice((height * width, height * width, free.randint(1, min(5000, scores))))
    S = max(1, min(T if not text else _rows(free, 4096), scores // (B * heads * T)))
    scale = fixed.choice((None, None, None, 0.3))

    def build(draw: Draw) -> tuple[Any, ...]:
        if lying == "packed":
            q, k, v = draw(B, max(S, T), 3, heads, D).unbind(2)
            return q[:, :S], k[:, :T], v[:, :T], scale
        if lying == "packed keys":
            return draw(B, S, heads, D), *draw(B, T, 2, heads, D).unbind(2), scale
        if lying == "heads first":
            q, k, v = (draw(B, heads, rows, D).transpose(1, 2) for rows in (S, T, T))
            return q, k, v, scale
        more = 4 if lying == "cut from wider" else 0
        q, k, v = (draw(B, rows, heads, D + more)[..., :D] for rows in (S, T, T))
        return q, k, v, scale

    return _named("attention", dtype, f"{B}x{S}x{heads}x{D} to {T}", build, lying)


_CONVOLUTIONS = (
    (4, 320, 3, 1), (320, 4, 3, 1), (320, 320, 3, 1), (640, 640, 3, 1), (1280, 1280, 3, 1), (2560, 1280, 3, 1),
    (960, 320, 3, 1), (1920, 640, 3, 1), (320, 320, 3, 2), (640, 640, 3, 2), (960, 320, 1, 1), (2560, 1280, 1, 1),
    (320, 320, 1, 1), (512, 512, 3, 1), (256, 256, 3, 1), (128, 128, 3, 1), (128, 3, 3, 1), (512, 256, 1, 1),
    (4, 4, 1, 1), (8, 8, 1, 1), (9, 320, 3, 1), (3, 128, 3, 1), (100, 72, 3, 1),
)  # fmt: skip


def conv2d(fixed: Random, free: Random, limits: Limits) -> Drawn:
    cin, cout, kernel, stride = fixed.choice(_CONVOLUTIONS)
    cin, cout = limits.channels(cin), limits.channels(cout)
    dtype, parts = fixed.choice((*HALVES, *HALVES, *HALVES, torch.float32)), _parts(fixed, "bias", "add", "residual")
    lying = fixed.choice(LAYOUTS)
    concat = cin // 3 if kernel == 1 and cin > 8 and fixed.random() < 0.6 else 0
    padding = kernel // 2 if fixed.random() < 0.9 else 0
    pixels = max(1, min(limits.work // (cin * cout * kernel**2), limits.elements // max(cin, cout)))
    height, width = _map(free, pixels)
    height, width = max(height, kernel), max(width, kernel)
    N = _batch(free, pixels // (height * width))

    def build(draw: Draw) -> tuple[Any, ...]:
        x = _image(draw, lying, N, cin - concat, height, width)
        weight = draw.image(cout, cin, kernel, kernel, std=(cin * kernel * kernel) ** -0.5)
        size = ((side + 2 * padding - kernel) // stride + 1 for side in (height, width))
        residual = draw.image(N, cout, *size) if "residual" in parts else None
        bias, add = draw(cout) if "bias" in parts else None, draw(N, cout) if "add" in parts else None
        given = x, weight, bias, add, residual, stride, padding
        return (*given, _image(draw, lying, N, concat, height, width)) if concat else given

    text = f"{N}x{cin}x{height}x{width} to {cout}, {kernel}x{kernel}, stride {stride}, padding {padding}"
    return _named("conv2d", dtype, text, build, lying, " ".join(sorted(parts)), "concat" if concat else "")


def conv2d_8bit(fixed: Random, free: Random, limits: Limits) -> Drawn:
    cin, cout, kernel, stride = fixed.choice(_CONVOLUTIONS)
    cin, cout = limits.channels(cin), limits.channels(cout)
    of, dtype, parts = fixed.choice(_FORMATS), fixed.choice(DTYPES), _parts(fixed, "bias", "add", "residual")
    by_channel, limit, depth = fixed.random() < 0.5, LIMITS[of], cin * kernel * kernel
    pixels = max(1, min(limits.work // (depth * cout), limits.elements // max(cin, cout)))
    height, width = (max(side, kernel) for side in _map(free, pixels))
    N = _batch(free, pixels // (height * width))

    def scales(draw: Draw, count: int) -> torch.Tensor:
        return draw(count, mean=4 / limit * depth**-0.25, std=0.5 / limit * depth**-0.25, dtype=torch.float32)

    def build(draw: Draw) -> tuple[Any, ...]:
        size = ((side + kernel // 2 * 2 - kernel) // stride + 1 for side in (height, width))
        return (
            drawn(draw, of, N, height, width, cin).permute(0, 3, 1, 2), scales(draw, 1)[0],
            drawn(draw, of, cout, kernel, kernel, cin).permute(0, 3, 1, 2),
            scales(draw, cout) if by_channel else scales(draw, 1)[0],
            draw(cout) if "bias" in parts else None, draw(N, cout) if "add" in parts else None,
            draw.image(N, cout, *size) if "residual" in parts else None, stride, kernel // 2, dtype_name(draw.dtype),
        )  # fmt: skip

    text = f"{N}x{cin}x{height}x{width} to {cout}, {kernel}x{kernel}, stride {stride}, {of}"
    said = " ".join(sorted(parts)), "by channel" if by_channel else ""
    return _named("conv2d_8bit", dtype, text, build, "channels-last", *said)


def upsample_conv2d(fixed: Random, free: Random, limits: Limits) -> Drawn:
    cin, cout = fixed.choice(((1280, 1280), (640, 640), (512, 512), (256, 256), (128, 128), (72, 40)))
    cin, cout = limits.channels(cin), limits.channels(cout)
    dtype, bias = fixed.choice((*HALVES, *HALVES, torch.float32)), fixed.random() < 0.7
    lying, kept = fixed.choice(LAYOUTS), fixed.random() < 0.5
    pixels = max(1, min(limits.work // (cin * cout * 16), limits.elements // (4 * cout)))
    height, width = _map(free, pixels)
    N = _batch(free, pixels // (height * width))

    def build(draw: Draw) -> tuple[Any, ...]:
        weight = draw.image(cout, cin, 3, 3, std=(cin * 9) ** -0.5)
        sums = parity_weights(weight) if kept else None
        return _image(draw, lying, N, cin, height, width), weight, draw(cout) if bias else None, sums

    text = f"{N}x{cin}x{height}x{width} to {cout}"
    return _named("upsample_conv2d", dtype, text, build, lying, "bias" if bias else "", "sums kept" if kept else "")


def group_norm_silu(fixed: Random, free: Random, limits: Limits) -> Drawn:
    C = limits.channels(fixed.choice((320, 640, 960, 1280, 1920, 2560, 128, 256, 512)))
    groups = 32 if C % 32 == 0 else 4
    dtype, lying = fixed.choice(DTYPES), fixed.choice(LAYOUTS)
    affine, add, silu = (fixed.random() < share for share in (0.8, 0.5, 0.7))
    concat = C // 4 if fixed.random() < 0.3 else 0
    height, width = _map(free, limits.elements // C)
    N = _batch(free, limits.elements // (C * height * width))

    def build(draw: Draw) -> tuple[Any, ...]:
        x = _image(draw, lying, N, C - concat, height, width, std=2.0)
        weight, bias = (draw(C), draw(C)) if affine else (None, None)
        given = x, groups, weight, bias, draw(N, C) if add else None, 1e-5, silu
        return (*given, _image(draw, lying, N, concat, height, width, std=3.0)) if concat else given

    said = ("affine" if affine else "", "add" if add else "", "silu" if silu else "", "concat" if concat else "")
    return _named("group_norm_silu", dtype, f"{N}x{C}x{height}x{width} in {groups}", build, lying, *said)


def layer_norm_residual(fixed: Random, free: Random, limits: Limits) -> Drawn:
    C = fixed.choice((*UNET, *UNET, 768, 1024, 2048, 77, 1536))
    C = limits.channels(C)
    dtype, lying = fixed.choice(DTYPES), fixed.choice(ROWS)
    affine, residual = (fixed.random() < share for share in (0.8, 0.6))
    to = fixed.choice(_FORMATS) if fixed.random() < 0.25 else None
    M = _rows(free, limits.elements // C)

    def build(draw: Draw) -> tuple[Any, ...]:
        x = _matrix(draw, lying, M, C, mean=0.7, std=2.0)
        added = _matrix(draw, lying, M, C) if residual else None
        parts = (draw(C, mean=1.0, std=0.3), draw(C)) if affine else (None, None)
        return x, added, *parts, 1e-5, _scale(draw, to, 2.0), to

    said = ("affine" if affine else "", "residual" if residual else "", f"to {to}" if to else "")
    return _named("layer_norm_residual", dtype, f"{M}x{C}", build, lying, *said)


def geglu(fixed: Random, free: Random, limits: Limits) -> Drawn:
    F = limits.channels(fixed.choice((1280, 2560, 5120, 320, 77)))
    dtype, lying, bias = fixed.choice(DTYPES), fixed.choice(ROWS), fixed.random() < 0.6
    to = fixed.choice(_FORMATS) if fixed.random() < 0.25 else None
    M = _rows(free, limits.elements // (2 * F))

    def build(draw: Draw) -> tuple[Any, ...]:
        x = _matrix(draw, lying, M, 2 * F, std=2.0)
        return x, draw(2 * F) if bias else None, _scale(draw, to, 6.0), to

    said = ("bias" if bias else "", f"to {to}" if to else "")
    return _named("geglu", dtype, f"{M}x{F}", build, lying, *said)


def layer_norm_8bit(fixed: Random, free: Random, limits: Limits) -> Drawn:
    C = limits.channels(fixed.choice((*UNET, 768, 2048, 77)))
    to, dtype, lying = fixed.choice(_FORMATS), fixed.choice(DTYPES), fixed.choice(ROWS)
    affine, residual = (fixed.random() < share for share in (0.8, 0.6))
    M = _rows(free, limits.elements // C)

    def build(draw: Draw) -> tuple[Any, ...]:
        x = _matrix(draw, lying, M, C, mean=0.7, std=2.0)
        added = _matrix(draw, lying, M, C) if residual else None
        return x, added, *((draw(C, mean=1.0, std=0.3), draw(C)) if affine else (None, None)), 1e-5, to

    said = ("affine" if affine else "", "residual" if residual else "")
    return _named("layer_norm_8bit", dtype, f"{M}x{C} to {to}", build, lying, *said)


def geglu_8bit(fixed: Random, free: Random, limits: Limits) -> Drawn:
    F = limits.channels(fixed.choice((1280, 2560, 5120, 320, 77)))
    to, dtype, lying = fixed.choice(_FORMATS), fixed.choice(DTYPES), fixed.choice(ROWS)
    M = _rows(free, limits.elements // (2 * F))

    def build(draw: Draw) -> tuple[Any, ...]:
        return _matrix(draw, lying, M, 2 * F, std=2.0), to

    return _named("geglu_8bit", dtype, f"{M}x{F} to {to}", build, lying)


def _scale(draw: Draw, to: str | None, largest: float) -> torch.Tensor | None:
    """Of a result in 8 bits, so that some values are beyond the limit."""
    return None if to is None else draw(1, mean=largest / LIMITS[to], std=0.0, dtype=torch.float32)


_LINEARS = (
    (320, 320), (960, 320), (2560, 320), (320, 1280), (640, 640), (1920, 640), (640, 2560), (1280, 1280),
    (3840, 1280), (1280, 5120), (320, 768), (640, 2048), (1280, 2048), (72, 100), (40, 24),
)  # fmt: skip


def linear_residual(fixed: Random, free: Random, limits: Limits) -> Drawn:
    N, K = (limits.channels(side) for side in fixed.choice(_LINEARS))
    dtype, lying = fixed.choice((*HALVES, *HALVES, torch.float32)), fixed.choice((*ROWS, "tokens of a longer row"))
    parts = _parts(fixed, "bias", "residual")
    M = _rows(free, min(limits.work // (N * K), limits.elements // max(N, K)))

    def build(draw: Draw) -> tuple[Any, ...]:
        weight, bias = draw(N, K, std=K**-0.5), draw(N) if "bias" in parts else None
        if lying == "tokens of a longer row":
            x, lead = draw(2, M + 3, K)[:, :M], (2, M)
        else:
            x, lead = _matrix(draw, lying, M, K), (M,)
        return x, weight, bias, draw(*lead, N) if "residual" in parts else None

    return _named("linear_residual", dtype, f"{M}x{K} to {N}", build, lying, " ".join(sorted(parts)))


def quantize_rows(fixed: Random, free: Random, limits: Limits) -> Drawn:
    K = limits.channels(fixed.choice((*UNET, 2560, 5120, 77)))
    to, dtype, lying, given = fixed.choice(_FORMATS), fixed.choice(DTYPES), fixed.choice(ROWS), fixed.random() < 0.4
    M = _rows(free, limits.elements // K)

    def build(draw: Draw) -> tuple[Any, ...]:
        return _matrix(draw, lying, M, K, std=3.0), to, _scale(draw, to, 2.5) if given else None

    return _named("quantize_rows", dtype, f"{M}x{K} to {to}", build, lying, "given scale" if given else "")


def linear_8bit(fixed: Random, free: Random, limits: Limits) -> Drawn:
    N, K = (limits.channels(side) for side in fixed.choice(_LINEARS))
    of, dtype, by_row, by_column = fixed.choice(_FORMATS), fixed.choice(DTYPES), *(fixed.random() < 0.5 for _ in "xw")
    parts = _parts(fixed, "bias", "residual")
    M, limit = _rows(free, min(limits.work // (N * K), limits.elements // max(N, K))), LIMITS[of]

    def scales(draw: Draw, count: int, *, several: bool) -> torch.Tensor:
        made = draw(count, mean=4 / limit * K**-0.25, std=0.5 / limit * K**-0.25, dtype=torch.float32)
        return made if several else made[:1].sum()

    def build(draw: Draw) -> tuple[Any, ...]:
        return (
            drawn(draw, of, M, K), scales(draw, M, several=by_row), drawn(draw, of, N, K),
            scales(draw, N, several=by_column), draw(N) if "bias" in parts else None,
            draw(M, N) if "residual" in parts else None, dtype_name(draw.dtype),
        )  # fmt: skip

    said = " ".join(sorted(parts | {name for name, has in (("by row", by_row), ("by column", by_column)) if has}))
    return _named("linear_8bit", dtype, f"{M}x{K} to {N}, {of}", build, "dense", said)


def linear_geglu(fixed: Random, free: Random, limits: Limits) -> Drawn:
    K = limits.channels(fixed.choice((*UNET, 72)))
    F = 4 * K
    dtype, lying, bias = fixed.choice((*HALVES, *HALVES, torch.float32)), fixed.choice(ROWS), fixed.random() < 0.7
    M = _rows(free, min(limits.work // (2 * F * K), limits.elements // (2 * F)))

    def build(draw: Draw) -> tuple[Any, ...]:
        return _matrix(draw, lying, M, K), draw(2 * F, K, std=2 * K**-0.5), draw(2 * F) if bias else None

    return _named("linear_geglu", dtype, f"{M}x{K} to {F}", build, lying, "bias" if bias else "")


def guided_step(fixed: Random, free: Random, limits: Limits) -> Drawn:
    dtype, states = fixed.choice(DTYPES), fixed.choice((1, 2, 3, 4, 5))
    guidance, noise = fixed.choice(("number", "one", "each", "none")), fixed.random() < 0.4
    channels_last, kept = fixed.random() < 0.6, fixed.choice((None, torch.float16, torch.float32))
    C = fixed.choice((4, 4, 16))
    height, width = _map(free, limits.elements // (C * 8), levels=1)
    B = free.randint(1, 8)

    def build(draw: Draw) -> tuple[Any, ...]:
        model = (B if guidance == "none" else 2 * B, C, height, width)
        prediction = draw.image(*model) if channels_last else draw(*model)
        state = kept or torch.float32
        if channels_last:
            known = draw(states, B, height, width, C, dtype=state).permute(0, 1, 4, 2, 3)
        else:
            known = draw(states, B, C, height, width, dtype=state)
        table = draw(3, states + 1, states + 2, dtype=torch.float32)
        step = torch.full((), 1, dtype=torch.int64, device=draw.device)
        scale: torch.Tensor | float | None = 7.5 if guidance == "number" else None
        if guidance in {"one", "each"}:
            scale = draw(*(() if guidance == "one" else (B,)), mean=7.5, dtype=torch.float32)
        other = draw(B, C, height, width, dtype=torch.float32) if noise else None
        return prediction, known, table, step, scale, other

    said = ("channels-last" if channels_last else "contiguous", f"guidance {guidance}", "noise" if noise else "")
    return _named("guided_step", dtype, f"{B}x{C}x{height}x{width}, {states} states", build, *said)


def layout_copy(fixed: Random, free: Random, limits: Limits) -> Drawn:
    C = limits.channels(fixed.choice((3, 4, 320, 640, 1280, 128, 512, 77)))
    dtype, channels_last = fixed.choice(DTYPES), fixed.random() < 0.5
    height, width = _map(free, limits.elements // C)
    N = _batch(free, limits.elements // (C * height * width))

    def build(draw: Draw) -> tuple[Any, ...]:
        x = draw(N, C, height, width) if channels_last else draw.image(N, C, height, width)
        return x, channels_last

    said = "to channels-last" if channels_last else "to contiguous"
    return _named("layout_copy", dtype, f"{N}x{C}x{height}x{width}", build, said)


def upsample(fixed: Random, free: Random, limits: Limits) -> Drawn:
    C = limits.channels(fixed.choice((320, 640, 1280, 512, 256, 4, 77)))
    dtype, lying = fixed.choice(DTYPES), fixed.choice(LAYOUTS)
    mode, scale = fixed.choice(("nearest", "bilinear")), fixed.choice((2, 2, 2, 3))
    height, width = _map(free, limits.elements // (C * scale * scale))
    N = _batch(free, limits.elements // (C * height * width * scale * scale))

    def build(draw: Draw) -> tuple[Any, ...]:
        return _image(draw, lying, N, C, height, width), scale, mode

    return _named("upsample", dtype, f"{N}x{C}x{height}x{width} by {scale}", build, lying, mode)


def transformer_block(fixed: Random, free: Random, limits: Limits) -> Drawn:
    C, D = fixed.choice(((320, 40), (640, 80), (640, 64), (1280, 64), (1280, 160)))
    dtype = fixed.choice(HALVES)
    C = max(2 * 16, C // limits.narrow // 16 * 16)
    heads = max(1, C // D)
    F = 4 * C
    S = max(1, min(_rows(free, 2048), limits.work // (C * C * 24)))
    B, T = _batch(free, 2), free.choice(TEXTS)

    def build(draw: Draw) -> tuple[Any, ...]:
        def matrix(rows: int, columns: int) -> torch.Tensor:
            return draw(rows, columns, std=columns**-0.5)

        def norm() -> tuple[torch.Tensor, torch.Tensor]:
            return draw(C, mean=1.0, std=0.2), draw(C, std=0.2)

        text = (draw(B, T, heads, C // heads) for _ in range(2))
        itself = (*norm(), matrix(3 * C, C), matrix(C, C), draw(C, std=0.1))
        to_text = (*norm(), matrix(C, C), matrix(C, C), draw(C, std=0.1))
        feed = (*norm(), matrix(2 * F, C), draw(2 * F, std=0.1), matrix(C, F), draw(C, std=0.1))
        return draw(B, S, C), *text, *itself, *to_text, *feed, 1e-5

    return _named("transformer_block", dtype, f"{B}x{S}x{C}, {heads} heads, {T} of text", build)


CALLS: dict[str, Callable[[Random, Random, Limits], Drawn]] = {
    each.__name__: each
    for each in (
        attention, conv2d, upsample_conv2d, group_norm_silu, layer_norm_residual, geglu, linear_residual, linear_geglu,
        quantize_rows, layer_norm_8bit, geglu_8bit, linear_8bit, conv2d_8bit,
        guided_step, layout_copy, upsample, transformer_block,
    )
}  # fmt: skip
