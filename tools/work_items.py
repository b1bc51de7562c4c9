"""What a picture is made of, op by op: counted on the real architecture with no weights and no GPU.

The stock model runs once on the meta device, where tensors have shapes and nothing else. Each layer that it passes is
written down as the op that rocm-sd replaces it by, with the op's own `problem` and `work`: three projections of one
attention are one product, keys and values of the text are of the picture and not of the step, a convolution after a
nearest 2x enlargement is the op of four small ones.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rocm_sd.bench import architectures
from rocm_sd.bench.projection import WorkItem
from rocm_sd.bench.workloads import WORKLOADS
from rocm_sd.ops import OPS
from rocm_sd.ops.definition import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["DTYPE", "PARTS", "count"]

DTYPE = torch.float16

# How often a part of a picture runs: "step" for every step, the others once.
PARTS = ("step", "prompt", "decode")


def count(workload: str, batch: int = 1) -> tuple[WorkItem, ...]:
    """Every call of one batch of pictures with classifier-free guidance; text encoders do not count."""
    recipe = WORKLOADS[workload]
    meta = torch.device("meta")
    pipe = architectures.random_pipeline(recipe.family, recipe.scheduler, recipe.prediction, meta, DTYPE)
    config = pipe.unet.config
    latents = (batch, config.in_channels, recipe.side // 8, recipe.side // 8)
    tally = _Tally()
    with meta, torch.no_grad():
        with tally.watching(pipe.unet, "step"):
            pipe.unet(**architectures.unet_inputs(config, 2 * batch, *latents[2:], DTYPE))
        tally.call("step", "guided_step", *_guided_step(latents))
        with tally.watching(pipe.vae, "decode"):
            pipe.vae.decode(torch.empty(latents, dtype=DTYPE))
    return tally.items()


def _guided_step(latents: tuple[int, ...]) -> tuple[Any, ...]:
    """One state, as DDIM and Euler keep; the table has a row for each of two outputs."""
    prediction = torch.empty(2 * latents[0], *latents[1:], dtype=DTYPE)
    states = torch.empty(1, *latents, dtype=torch.float32)
    return prediction, states, torch.empty(50, 2, 3), torch.empty(1), 7.5, None


class _Tally:
    """Counts calls while a model runs; layers that are part of another op count with their owner."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, tuple[tuple[str, int | str], ...]]] = Counter()
        self._work: dict[tuple[Any, ...], Work] = {}

    def call(self, part: str, op: str, *arguments: Any) -> None:
        known = OPS[op]
        if known.verification is None or known.tuning is None:
            raise ValueError(f"{op} says neither what its problem is nor what its work is")
        self._add(part, op, known.verification.problem(*arguments), known.tuning.work(*arguments))

    def _add(self, part: str, op: str, problem: Mapping[str, int | str], work: Work) -> None:
        key = (part, op, tuple(problem.items()))
        self._counts[key] += 1
        self._work[key] = work

    def passes(self, part: str, op: str, x: torch.Tensor, tensors: int) -> None:
        """Work that is no op of ours, and moves so many tensors of x's size."""
        problem: dict[str, int | str] = {"values": x.numel(), "dtype": str(x.dtype).removeprefix("torch.")}
        self._add(part, op, problem, Work(0.0, float(tensors * x.numel() * x.element_size())))

    def items(self) -> tuple[WorkItem, ...]:
        found = []
        for key, times in self._counts.items():
            part, op, problem = key
            work = self._work[key]
            found.append(WorkItem(part, op, dict(problem), times, work.flops, work.bytes))
        return tuple(sorted(found, key=lambda i: (PARTS.index(i.part), -i.count * i.flops, -i.count * i.bytes, i.op)))

    def watching(self, model: nn.Module, part: str) -> _Hooks:
        return _Hooks(self, model, part)


class _Hooks:
    """Hooks on every layer that counts, for as long as the block lasts."""

    def __init__(self, tally: _Tally, model: nn.Module, part: str) -> None:
        self.tally, self.model, self.part = tally, model, part
        self.handles: list[Any] = []

    def __enter__(self) -> None:
        for name, module in self.model.named_modules():
            hook = self._hook(name, module)
            if hook is not None:
                self.handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def __exit__(self, *_error: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _hook(self, name: str, module: Any) -> Callable[..., None] | None:
        taking: Callable[[str, Any, torch.Tensor], None] | None = {
            "Upsample2D": self._upsample,
            "Conv2d": self._convolution,
            "Linear": self._linear,
            "GroupNorm": self._group_norm,
            "LayerNorm": self._layer_norm,
            "GEGLU": self._geglu,
            "ResnetBlock2D": self._skip,
        }.get(type(module).__name__)
        if type(module).__name__ == "Attention":
            return self._attention
        if taking is None:
            return None

        def hook(layer: Any, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
            taking(name, layer, given[0] if given else named["hidden_states"])

        return hook

    def _upsample(self, _name: str, layer: Any, x: torch.Tensor) -> None:
        self.tally.call(self.part, "upsample_conv2d", x, layer.conv.weight, layer.conv.bias)

    def _convolution(self, name: str, layer: Any, x: torch.Tensor) -> None:
        if ".upsamplers." in name:
            return
        if name.endswith(("proj_in", "proj_out")):
            # In channels-last a 1x1 convolution is a product over the tokens as they lie.
            self._projection(name, layer, x.permute(0, 2, 3, 1).flatten(1, 2))
            return
        shape = (x.shape[0], layer.out_channels, *(side // layer.stride[0] for side in x.shape[2:]))
        add = x.new_empty(shape[:2]) if name.endswith("conv1") and self.part == "step" else None
        residual = x.new_empty(shape) if name.endswith("conv2") else None
        arguments = (x, layer.weight, layer.bias, add, residual, layer.stride[0], layer.padding[0])
        self.tally.call(self.part, "conv2d", *arguments)

    def _projection(self, name: str, layer: Any, tokens: torch.Tensor) -> None:
        weight = layer.weight.flatten(1)
        residual = tokens.new_empty(*tokens.shape[:-1], weight.shape[0]) if name.endswith("proj_out") else None
        self.tally.call(self.part, "linear_residual", tokens, weight, layer.bias, residual)

    def _linear(self, name: str, layer: Any, x: torch.Tensor) -> None:
        if name.startswith(("time_embedding", "add_embedding")) or name.endswith("time_emb_proj"):
            return  # for all steps in one small product, before the first
        if name.endswith(("proj_in", "proj_out")):
            self._projection(name, layer, x)
            return
        part, weight, residual = self.part, layer.weight, None
        in_transformer = ".transformer_blocks." in name
        if in_transformer and name.endswith(("attn1.to_k", "attn1.to_v", "attn2.to_v", "ff.net.0.proj")):
            return  # packed with the one before it, or part of its owner's op
        if name.endswith("attn1.to_q"):
            weight = weight.repeat(3, 1)
        elif name.endswith("attn2.to_k"):
            part, weight = "prompt", weight.repeat(2, 1)
        elif name.endswith("ff.net.2") or (not in_transformer and name.endswith("to_out.0")):
            residual = x.new_empty(*x.shape[:-1], weight.shape[0])
        self.tally.call(part, "linear_residual", x, weight, layer.bias, residual)

    def _group_norm(self, _name: str, layer: Any, x: torch.Tensor) -> None:
        self.tally.call(self.part, "group_norm_silu", x if x.dim() == 4 else x.unsqueeze(-1), layer.num_groups)

    def _layer_norm(self, name: str, _layer: Any, x: torch.Tensor) -> None:
        if name.endswith("transformer_blocks.0.norm1"):
            self.tally.passes(self.part, "layer_norm", x, 2)  # nothing to add yet
        else:
            self.tally.call(self.part, "layer_norm_residual", x)

    def _geglu(self, _name: str, layer: Any, x: torch.Tensor) -> None:
        self.tally.call(self.part, "linear_geglu", x, layer.proj.weight, layer.proj.bias)

    def _skip(self, name: str, _layer: Any, x: torch.Tensor) -> None:
        if name.startswith("up_blocks.") and self.part == "step":
            self.tally.passes(self.part, "concatenate", x, 2)

    def _attention(self, attn: Any, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        x = given[0]
        text = named.get("encoder_hidden_states")
        tokens = x.flatten(2).transpose(1, 2) if x.dim() == 4 else x
        keys = tokens if text is None else text
        head = attn.to_q.out_features // attn.heads
        q, k = (t.new_empty(*t.shape[:2], attn.heads, head) for t in (tokens, keys))
        self.tally.call(self.part, "attention", q, k, k)
