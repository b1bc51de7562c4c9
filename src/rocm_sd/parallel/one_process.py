"""Several devices from one process: pictures or heads over them, without a job. The founding documents' names.

A process has one interpreter, so launches of several devices take turns: a job (`rocm-sd generate --gpus 2`) is faster.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.nn import functional as F

from rocm_sd.errors import Unsupported
from rocm_sd.parallel.rows import shares

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["ModelParallelAttention", "MultiGPUCoordinator"]

R = TypeVar("R")
Device = int | str | torch.device


def _devices(device_ids: Sequence[Device] | None) -> list[torch.device]:
    """As given, or all that there are; the CPU alone where there is no card."""
    if device_ids is None:
        cards = range(torch.cuda.device_count())
        return [torch.device("cuda", card) for card in cards] or [torch.device("cpu")]
    if not device_ids:
        raise Unsupported("device_ids", "an empty list", hint="Leave it out to use every GPU.")
    found = [torch.device("cuda", each) if isinstance(each, int) else torch.device(each) for each in device_ids]
    for device in found:
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise Unsupported(
                "device_ids", f"{device}: {torch.cuda.device_count()} are there", hint="rocm-sd info lists them."
            )
    return found


class MultiGPUCoordinator:
    """Which devices there are, how fast each is, and work shared out among them.

    >>> coordinator = MultiGPUCoordinator()
    >>> models = coordinator.replicate(lambda device: load(device))
    >>> pictures = coordinator.run(models, prompts, lambda model, prompt: model(prompt))
    """

    def __init__(self, device_ids: Sequence[Device] | None = None) -> None:
        self.devices = _devices(device_ids)

    @property
    def num_gpus(self) -> int:
        return sum(device.type == "cuda" for device in self.devices)

    def replicate(self, load: Callable[[torch.device], R]) -> list[R]:
        """One model for each device, loaded one after the other."""
        return [load(device) for device in self.devices]

    def speeds(self, size: int = 1024) -> list[float]:
        """How fast each multiplies two matrices, against the fastest."""
        times = []
        for device in self.devices:
            a = torch.randn(size, size, device=device)
            took = []
            for _ in range(5):
                started = time.perf_counter()
                # To the host: that waits for the device.
                (a @ a)[0, 0].item()
                took.append(time.perf_counter() - started)
            times.append(sorted(took)[2])
        return [min(times) / each for each in times]

    def split(self, batch: torch.Tensor, weights: Sequence[float] | None = None) -> list[torch.Tensor]:
        """A batch in parts, each on its device, by weight; a device may get none."""
        counts = shares(len(batch), weights or [1.0] * len(self.devices))
        parts = torch.split(batch, list(counts))
        return [part.to(device) for part, device in zip(parts, self.devices, strict=True)]

    def run(self, models: Sequence[Any], work: Sequence[Any], draw: Callable[[Any, Any], R]) -> list[R]:
        """`draw(model, item)` for each item, by whichever model is free; results in the order of the items."""
        if len(models) != len(self.devices):
            raise Unsupported("MultiGPUCoordinator.run", f"{len(models)} models for {len(self.devices)} devices")
        waiting = list(enumerate(work))[::-1]
        done: dict[int, R] = {}

        def one_after_the_other(model: Any) -> None:
            while True:
                try:
                    # A list's pop is one step: no two threads get the same.
                    place, item = waiting.pop()
                except IndexError:
                    return
                try:
                    done[place] = draw(model, item)
                except BaseException:
                    # The others end with what they are at: nobody would get what they draw after that.
                    waiting.clear()
                    raise

        with ThreadPoolExecutor(len(models)) as pool:
            for finished in [pool.submit(one_after_the_other, model) for model in models]:
                finished.result()
        return [done[place] for place in range(len(work))]


class ModelParallelAttention(nn.Module):
    """Attention whose heads are on several devices. `forward(x)` takes and returns [batch, tokens, d_model].

    Each device projects its own heads and multiplies them with its columns of the output's weight; the first adds up.
    """

    def __init__(self, d_model: int, num_heads: int, device_ids: Sequence[Device] | None = None) -> None:
        super().__init__()
        if d_model % num_heads:
            raise Unsupported(
                "ModelParallelAttention", f"d_model {d_model} with {num_heads} heads: one divides the other"
            )
        devices = _devices(device_ids)[:num_heads]
        self.d_model, self.num_heads, self.head_dim = d_model, num_heads, d_model // num_heads
        self.heads = shares(num_heads, [1.0] * len(devices))
        self.devices = devices
        whole = {name: nn.Linear(d_model, d_model) for name in ("q", "k", "v", "out")}
        self.parts = nn.ModuleList()
        borders = [count * self.head_dim for count in accumulate(self.heads, initial=0)]
        for begin, end, device in zip(borders, borders[1:], devices, strict=False):
            part = nn.ModuleDict({name: nn.Linear(d_model, end - begin) for name in ("q", "k", "v")})
            part["out"] = nn.Linear(end - begin, d_model, bias=False)
            for name in ("q", "k", "v"):
                part[name].weight.data = whole[name].weight.data[begin:end].clone()
                part[name].bias.data = whole[name].bias.data[begin:end].clone()
            part["out"].weight.data = whole["out"].weight.data[:, begin:end].clone()
            self.parts.append(part.to(device))
        self.bias = nn.Parameter(whole["out"].bias.data.clone().to(devices[0]))

    def forward(
        self, x: torch.Tensor, context: torch.Tensor | None = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        total: torch.Tensor | None = None
        # Launched on every device before the first sum waits for one.
        products = [
            self._product(part, count, device, x, x if context is None else context, mask)
            for part, count, device in zip(self.parts, self.heads, self.devices, strict=True)
        ]
        for product in products:
            there = product.to(self.devices[0])
            total = there if total is None else total + there
        assert total is not None
        return (total + self.bias).to(x.device)

    def _product(
        self, part: Any, heads: int, device: torch.device, x: torch.Tensor, context: torch.Tensor, mask: Any
    ) -> torch.Tensor:
        def split(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.view(*tensor.shape[:-1], heads, self.head_dim).transpose(1, 2)

        here, there = x.to(device), context.to(device)
        query, key, value = split(part["q"](here)), split(part["k"](there)), split(part["v"](there))
        mask = mask.to(device) if mask is not None else None
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        answer: torch.Tensor = part["out"](seen.transpose(1, 2).flatten(2))
        return answer
