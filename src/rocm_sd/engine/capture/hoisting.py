"""What of a UNet's work is done once per prompt or once per schedule, and not in every step.

The embedding of a timestep and its projection in every block depend on the timestep; the keys and values of the text
depend on the prompt. Both are computed here by the model's own layers, whatever a LoRA has made of them, and handed to
the blocks through rewrite/conditioning.py. A graph takes them in place of the prompt and the timestep: filled once per
run, and once per step.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from inspect import Signature, signature
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import nn

from rocm_sd.engine.capture.graph import Graph, capture_graph
from rocm_sd.engine.capture.trial import CHECKED_REPLAYS, why_different
from rocm_sd.engine.denoisers import OURS, denoiser
from rocm_sd.ops.upsample_conv2d import parity_weights
from rocm_sd.rewrite import conditioning, forwards, resblock, transformer
from rocm_sd.rewrite.conditioning import Conditioning, TimeAdd
from rocm_sd.rewrite.convolutions import of_kind, unusual
from rocm_sd.rewrite.layers import is_plain, untouched
from rocm_sd.rewrite.packing import packed_linear, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rocm_sd.engine.schedule import ScheduleRun

    RunOf = Callable[[torch.Tensor], ScheduleRun | None]

__all__ = ["Hoist", "PreparedCall"]

_EMBEDDINGS = (None, "text_time")


def _time_tensors(named: Mapping[str, Any]) -> list[torch.Tensor]:
    """What the time embedding of a call with these arguments is made of, besides the timestep."""
    given = (named["timestep_cond"], *(named["added_cond_kwargs"] or {}).values())
    return [value for value in given if isinstance(value, torch.Tensor)]


class Hoist:
    """For one UNet as it stands now: `find` says whether it can be done at all."""

    def __init__(self, unet: Any, blocks: list[Any], attentions: list[nn.Module]) -> None:
        # Held weakly, or the model would live as long as its graphs.
        self._unet = ref(unet)
        self.blocks = blocks
        self.attentions = attentions
        # Convolutions after nearest 2x that asked for their summed weights.
        self.upsamplers: list[Any] = []

    @property
    def unet(self) -> Any:
        return self._unet()

    @classmethod
    def find(cls, unet: Any, arguments: Mapping[str, Any]) -> Hoist | None:
        """None where a call with these arguments has to compute them itself."""
        if not getattr(denoiser(unet), "is_unet", False) or unet.config.addition_embed_type not in _EMBEDDINGS:
            return None
        # A scale in these is put on the LoRA's layers inside of the forward only.
        if arguments.get("cross_attention_kwargs") or not isinstance(
            arguments.get("encoder_hidden_states"), torch.Tensor
        ):
            return None
        more = (unet.class_embedding, unet.encoder_hid_proj, unet.time_embed_act)
        if any(part is not None for part in more) or not untouched(unet.time_embedding):
            return None
        own = unet.__dict__
        if any(name in own for name in ("get_time_embed", "get_aug_embed", "get_class_embed")):
            return None
        modules = list(unet.modules())
        blocks = [module for module in modules if resblock.hoistable(module)]
        attentions = [attn for attn in map(transformer.hoistable, modules) if attn is not None]
        return cls(unet, blocks, attentions) if blocks or attentions else None

    def time_rows(self, timesteps: torch.Tensor, named: Mapping[str, Any]) -> torch.Tensor:
        """[T, width]: for each of T timesteps the embedding and every block's add, for the whole batch, in one row.

        timesteps: [T], each for the whole batch. named: the other arguments of a call.
        """
        sample, condition = named["sample"], named["timestep_cond"]
        count, batch = len(timesteps), sample.shape[0]
        # Of the sample the embedding only asks how many there are, of which kind.
        like = torch.empty((count * batch, 0), dtype=sample.dtype, device=sample.device)
        times = timesteps.to(sample.device).repeat_interleave(batch)
        condition = None if condition is None else condition.repeat(count, 1)
        emb = self.unet.time_embedding(self.unet.get_time_embed(sample=like, timestep=times), condition)
        text, added = named["encoder_hidden_states"], named["added_cond_kwargs"]
        more = self.unet.get_aug_embed(emb=emb, encoder_hidden_states=text, added_cond_kwargs=added)
        if more is not None:
            emb = emb + more.repeat(count, 1)
        pieces = [emb, *self._adds(F.silu(emb))]
        return torch.cat([piece.reshape(count, -1) for piece in pieces], dim=1)

    def _adds(self, activated: torch.Tensor) -> Sequence[torch.Tensor]:
        projections = [block.time_emb_proj for block in self.blocks]
        biases: list[Any] = [block.conv1.bias if self._bias_in_add(block) else None for block in self.blocks]
        if projections and all(map(is_plain, projections)) and all(bias is not None for bias in biases):
            packed = packed_linear(*projections)
            if packed is not None and packed[1] is not None:
                # One product for all blocks; a bias of the convolution is one more for every row.
                rows = F.linear(activated, packed[0], packed[1] + torch.cat(biases))
                return torch.split(rows, [layer.weight.shape[0] for layer in projections], dim=1)
        adds = [layer(activated) for layer in projections]
        return [add if bias is None else add + bias for add, bias in zip(adds, biases, strict=True)]

    @staticmethod
    def _bias_in_add(block: Any) -> bool:
        layer = block.conv1
        plain = type(layer) is nn.Conv2d and is_plain(layer) and unusual(layer) is None
        if not plain or layer.bias is None or "_conv_forward" in layer.__dict__:
            return False
        return of_kind(layer.bias, block.time_emb_proj.weight)

    def conditioning(self, row: torch.Tensor, batch: int, of_the_run: Sequence[torch.Tensor]) -> Conditioning:
        """Views of a row of `time_rows`, and what `of_the_run` gave."""
        adds, at = {}, self.embedding(row, batch).numel()
        for block in self.blocks:
            channels = block.out_channels
            value = row[at : at + batch * channels].view(batch, channels)
            adds[block] = TimeAdd(value, with_bias=self._bias_in_add(block))
            at += batch * channels
        keys_values = of_the_run[: 2 * len(self.attentions)]
        pairs = zip(keys_values[::2], keys_values[1::2], strict=True)
        weights = dict(zip(self.upsamplers, of_the_run[len(keys_values) :], strict=True))
        return Conditioning(adds, dict(zip(self.attentions, pairs, strict=True)), weights)

    def embedding(self, row: torch.Tensor, batch: int) -> torch.Tensor:
        width = row.numel() - batch * sum(block.out_channels for block in self.blocks)
        return row[:width].view(batch, -1)

    def of_the_run(self, text: torch.Tensor) -> list[torch.Tensor]:
        """What changes with the prompt and the weights only: keys and values, then summed weights."""
        keys_values = [tensor for attn in self.attentions for tensor in transformer.keys_values(attn, text)]
        return [*keys_values, *(parity_weights(layer.weight) for layer in self.upsamplers)]

    @contextmanager
    def substituted(self, embedding: torch.Tensor) -> Iterator[None]:
        """Within, and on this thread, the UNet takes this time embedding in place of computing one."""
        unet, thread = self.unet, threading.get_ident()

        def giving(value: torch.Tensor | None) -> Callable[..., Any]:
            def answer(_owner: Any, inner: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
                return value if threading.get_ident() == thread else inner(*args, **named)

            return answer

        restores = [
            forwards.surround(unet, giving(embedding), "get_time_embed"),
            forwards.surround(unet, giving(None), "get_aug_embed"),
            forwards.surround(unet.time_embedding, giving(embedding)),
        ]
        try:
            yield
        finally:
            for restore in restores:
                restore()

    def unpack(self) -> None:
        unpack(nn.ModuleList([block.time_emb_proj for block in self.blocks]))


@dataclass(frozen=True, eq=False)
class _Identity:
    """Tensors as they were at a time of a run. `values`: copies of those that lie on the host.

    Writes through `.data` or numpy are counted nowhere. On the host the values themselves are compared; on a GPU that
    would mean to wait for it in every step (docs/engine.md says what to do there).
    """

    run: ScheduleRun
    tensors: tuple[ref[torch.Tensor], ...]
    states: tuple[tuple[int, int], ...]
    values: tuple[torch.Tensor | None, ...]

    @classmethod
    def of(cls, run: ScheduleRun | None, *tensors: torch.Tensor) -> _Identity | None:
        """None outside of a run, and where a tensor keeps no count of its changes."""
        if run is None or any(tensor.is_inference() for tensor in tensors):
            return None
        states = tuple((tensor._version, tensor.data_ptr()) for tensor in tensors)  # noqa: SLF001
        values = tuple(tensor.detach().clone() if tensor.device.type == "cpu" else None for tensor in tensors)
        return cls(run, tuple(map(ref, tensors)), states, values)

    def same_as(self, other: _Identity | None) -> bool:
        if other is None or self.run is not other.run or self.states != other.states:
            return False
        # A tensor has one weak reference, and a dead tensor's is no other tensor's.
        if not all(mine is theirs for mine, theirs in zip(self.tensors, other.tensors, strict=True)):
            return False
        pairs = zip(self.values, other.values, strict=True)
        return all(mine is None or theirs is None or torch.equal(mine, theirs) for mine, theirs in pairs)


class PreparedCall:
    """Of one kind of call. Within a run weights do not change: what was made for the same tensors is kept."""

    def __init__(self, hoist: Hoist, row: torch.Tensor, text: torch.Tensor, batch: int, run_of: RunOf) -> None:
        self.hoist = hoist
        self._run_of = run_of
        self._row = row
        self._text = text
        self._batch = batch
        self._of_the_run = hoist.of_the_run(text)
        self._graph: Graph | None = None
        self._unchecked = 0
        # Its graph's replay, where that was found to be.
        self.wrong: str | None = None
        self._prompt: _Identity | None = None
        self._table: torch.Tensor | None = None
        self._table_of: _Identity | None = None

    @classmethod
    def of(cls, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run_of: RunOf) -> PreparedCall | None:
        """None where a call with these arguments has to compute everything itself. `run_of`: of a timestep."""
        named = _by_name(model, args, kwargs)
        hoist = Hoist.find(model, named) if named else None
        # One timestep for each picture is a row of its own for each.
        if hoist is None or named["timestep"].numel() != 1:
            return None
        row = hoist.time_rows(named["timestep"].reshape(1), named)[0].clone()
        return cls(hoist, row, named["encoder_hidden_states"].detach().clone(), named["sample"].shape[0], run_of)

    @property
    def memory(self) -> int:
        tables = [] if self._table is None else [self._table]
        return sum(tensor.nbytes for tensor in (self._row, self._text, *self._of_the_run, *tables))

    def capture(self, device: torch.device) -> None:
        if self._graph is None:
            self._graph = capture_graph(partial(self.hoist.of_the_run, self._text), device)
            self._of_the_run, self._unchecked = self._graph.outputs, CHECKED_REPLAYS
            self._replay(self._graph)

    def give_up_graph(self) -> None:
        """Compute what changes with the prompt without one from now on: the model's graph does not read it any more."""
        if self._graph is not None:
            self._graph, self._of_the_run = None, self.hoist.of_the_run(self._text)

    def _replay(self, graph: Graph) -> None:
        """The first ones are held against the same layers' answers: a step in which this is wrong is wrong throughout.

        A graph that was found to be wrong is not replayed: what it would have filled is where the model's graph reads.
        """
        if self.wrong is None:
            graph.replay()
        if self.wrong is None and not self._unchecked:
            return
        self._unchecked -= 1
        right = self.hoist.of_the_run(self._text)
        self.wrong = self.wrong or why_different(graph.outputs, right)
        if self.wrong is not None:
            for held, value in zip(graph.outputs, right, strict=True):
                held.copy_(value)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within, the model takes what is prepared. What else its layers ask for is prepared from then on."""
        hoist = self.hoist
        ready = hoist.conditioning(self._row, self._batch, self._of_the_run)
        with conditioning.given(ready), hoist.substituted(hoist.embedding(self._row, self._batch)):
            yield
        if self._graph is None and ready.asked_for:
            hoist.upsamplers += ready.asked_for
            self._of_the_run = hoist.of_the_run(self._text)

    def fill(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = _by_name(self.hoist.unet, args, kwargs)
        timestep = named["timestep"]
        run = self._run_of(timestep)
        self._fill_for_prompt(run, named["encoder_hidden_states"])
        number = None if run is None else run.number_of(timestep)
        made_of = _Identity.of(run, *_time_tensors(named))
        if run is None or number is None or made_of is None:
            self._row.copy_(self.hoist.time_rows(timestep.reshape(1), named)[0])
            return
        if self._table is None or not made_of.same_as(self._table_of):
            self._table, self._table_of = self.hoist.time_rows(run.timesteps, named), made_of
        self._row.copy_(self._table[number])

    def _fill_for_prompt(self, run: ScheduleRun | None, text: torch.Tensor) -> None:
        prompt = _Identity.of(run, text)
        if prompt is not None and prompt.same_as(self._prompt):
            return
        self._text.copy_(text)
        if self._graph is None:
            self._of_the_run = self.hoist.of_the_run(self._text)
        else:
            self._replay(self._graph)
        self._prompt = prompt


@lru_cache(maxsize=64)
def _signature(kind: Any) -> Signature:
    return signature(kind.forward)


def _by_name(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call; empty where they do not fit the forward, which will say so itself."""
    kind: Any = type(model)
    try:
        arguments = _signature(kind).bind(model, *args, **{name: kwargs[name] for name in kwargs if name not in OURS})
    except TypeError:
        return {}
    arguments.apply_defaults()
    return arguments.arguments
