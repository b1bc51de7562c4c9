"""The processes that draw together: what they send each other, and how many bytes that is.

`Ranks` are those of one dimension of a mesh. Strategies are written in a few verbs: `gather` (everybody's parts), `add`
(the sum of everybody's), `hand_over` (at once, to whoever needs it), `send` and `receive` (while others go on),
`spread` (what one has, to all) and `agree` (small facts). `start_gather` and `start_hand_over` begin the same, and give
what waits for it. Each counts what this rank sends, by the name of the strategy that sends it.
"""

from __future__ import annotations

import os
import platform
import warnings
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from rocm_sd.arch.host import installed
from rocm_sd.engine import is_out_of_memory
from rocm_sd.engine.capture import exchange, no_exchange
from rocm_sd.errors import JobFailed, first_line
from rocm_sd.parallel.groups import forget_groups, group_by_its_members
from rocm_sd.parallel.meeting import require_told, why_cards_are_apart, why_not_met, why_unlike_versions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Ranks", "Traffic", "join", "leave", "own_card"]

_PATIENCE = timedelta(minutes=10)


@dataclass
class Traffic:
    """Bytes that this rank has sent, and how often, by what for. `exchanges`: one for each verb, with however many
    others.
    """

    sent: Counter[str] = field(default_factory=Counter)
    times: Counter[str] = field(default_factory=Counter)
    exchanges: int = 0

    def count(self, what: str, tensor: torch.Tensor, receivers: int = 1) -> None:
        if receivers:
            self.sent[what] += tensor.numel() * tensor.element_size() * receivers
            self.times[what] += 1


class Ranks:
    """`rank` of `size`, in one dimension of a mesh. One rank alone sends nothing."""

    def __init__(self, name: str, group: dist.ProcessGroup | None, traffic: Traffic) -> None:
        self.name, self._group, self.traffic = name, group, traffic
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        # gloo sends from the host's memory: tensors of a card pass through it.
        self._through_host = group is not None and dist.get_backend(group) == "gloo"

    @property
    def members(self) -> list[int]:
        """Their numbers in the whole job."""
        return [0] if self._group is None else dist.get_process_group_ranks(self._group)

    def gather(self, part: torch.Tensor, sizes: Sequence[int], dim: int) -> torch.Tensor:
        """Everybody's parts, one after the other along `dim`, of which each rank has so many."""
        if self.size == 1:
            return part

        def gathered(part: torch.Tensor) -> list[torch.Tensor]:
            return [torch.cat(self._begin_gather(part, sizes, dim)()).movedim(0, dim)]

        return exchange(gathered, [part])[0]

    def start_gather(self, part: torch.Tensor, sizes: Sequence[int], dim: int) -> Callable[[], list[torch.Tensor]]:
        """Everybody's parts, on their way while this rank goes on; what waits for them, `dim` first in each."""
        no_exchange("something is on its way")
        return self._begin_gather(part, sizes, dim)

    def _begin_gather(self, part: torch.Tensor, sizes: Sequence[int], dim: int) -> Callable[[], list[torch.Tensor]]:
        padded = _padded(part.movedim(dim, 0).contiguous(), max(sizes))
        self.traffic.exchanges += 1
        self.traffic.count(self.name, padded, self.size - 1)
        mine = self._sendable(padded)
        everybodys = [torch.empty_like(mine) for _ in range(self.size)]
        started = self._try(lambda: dist.all_gather(everybodys, mine, group=self._group, async_op=True))

        def wait() -> list[torch.Tensor]:
            self._try(lambda: started.wait())  # noqa: PLW0108 -- nothing is started where bytes are counted alone
            # Until then the memory is the sender's.
            mine.dim()
            return [each.to(part.device)[:size] for each, size in zip(everybodys, sizes, strict=True)]

        return wait

    def add(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of everybody's, the same bits on every rank."""
        return part if self.size == 1 else exchange(self._added, [part])[0]

    def _added(self, part: torch.Tensor) -> list[torch.Tensor]:
        # A ring hands on each piece of the sum 2 (n - 1) times, a rank 1 / n of it each time.
        self.traffic.sent[self.name] += 2 * (self.size - 1) * part.numel() * part.element_size() // self.size
        self.traffic.times[self.name] += 1
        self.traffic.exchanges += 1
        total = self._sendable(part.contiguous())
        total = total.clone() if total is part or total.data_ptr() == part.data_ptr() else total
        self._try(lambda: dist.all_reduce(total, group=self._group))
        return [total.to(part.device)]

    def hand_over(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None:
        """Send a tensor to some, and fill those that come from others. All at once: nobody waits for an order."""
        receivers, senders = list(outgoing), list(incoming)

        def handed(*tensors: torch.Tensor) -> list[torch.Tensor]:
            self._begin_hand_over(dict(zip(receivers, tensors, strict=True)), incoming)()
            return [incoming[rank] for rank in senders]

        if not outgoing and not incoming:
            return
        for rank, tensor in zip(senders, exchange(handed, list(outgoing.values())), strict=True):
            if tensor is not incoming[rank]:
                incoming[rank].copy_(tensor)

    def start_hand_over(
        self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]
    ) -> Callable[[], None]:
        """The same, on its way while this rank goes on; what waits until all have left, and all are filled."""
        no_exchange("something is on its way")
        return self._begin_hand_over(outgoing, incoming)

    def _begin_hand_over(
        self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]
    ) -> Callable[[], None]:
        if not outgoing and not incoming:
            return lambda: None
        self.traffic.exchanges += 1
        held = {rank: self._sendable(tensor.contiguous()) for rank, tensor in outgoing.items()}
        for tensor in held.values():
            self.traffic.count(self.name, tensor)
        landed = {rank: torch.empty_like(tensor, device="cpu") if self._through_host else tensor
                  for rank, tensor in incoming.items()}  # fmt: skip
        calls = [dist.P2POp(dist.isend, tensor, group=self._group, group_peer=rank) for rank, tensor in held.items()]
        calls += [dist.P2POp(dist.irecv, tensor, group=self._group, group_peer=rank) for rank, tensor in landed.items()]
        started = self._try(lambda: dist.batch_isend_irecv(calls))

        def wait() -> None:
            for request in started:
                self._try(request.wait)
            for rank, tensor in landed.items():
                if tensor is not incoming[rank]:
                    incoming[rank].copy_(tensor)
            # Until then the memory is the sender's.
            held.clear()

        return wait

    def send(self, tensor: torch.Tensor, to: int) -> Callable[[], None]:
        """On its way while this rank goes on; what waits until it has left."""
        no_exchange("something is on its way")
        self.traffic.exchanges += 1
        held = self._sendable(tensor.contiguous())
        self.traffic.count(self.name, held)
        started = self._try(lambda: dist.isend(held, group=self._group, group_dst=to))

        def wait() -> None:
            self._try(started.wait)
            # Until then the memory is the sender's.
            held.data_ptr()

        return wait

    def receive(self, into: torch.Tensor, sender: int) -> torch.Tensor:
        no_exchange("something is waited for")
        self.traffic.exchanges += 1
        landed = torch.empty_like(into, device="cpu") if self._through_host else into
        self._try(lambda: dist.recv(landed, group=self._group, group_src=sender))
        return landed if landed is into else into.copy_(landed)

    def spread(self, tensor: torch.Tensor, sender: int = 0) -> torch.Tensor:
        """What one rank has, on all of them; the others give a tensor of its shape, to be filled."""
        if self.size == 1 or not tensor.numel():
            return tensor
        no_exchange("one rank tells the others")
        self.traffic.exchanges += 1
        held = self._sendable(tensor.contiguous())
        self.traffic.count(self.name, held, self.size - 1 if self.rank == sender else 0)
        self._try(lambda: dist.broadcast(held, group=self._group, group_src=sender))
        return tensor if self.rank == sender else held.to(tensor.device)

    def first(self, count: int) -> Ranks | None:
        """The first of them, as ranks of their own; None for one that is not among them."""
        if count >= self.size:
            return self
        if self.rank >= count:
            return None
        if count == 1:
            return Ranks(self.name, None, self.traffic)
        # Other groups may have other pictures, and take no part in the making.
        return Ranks(self.name, group_by_its_members(self.members[:count]), self.traffic)

    def agree(self, mine: Any) -> list[Any]:
        """What everybody says, by rank: plain values, once in a while."""
        if self.size == 1:
            return [mine]
        no_exchange("ranks agree on something")
        self.traffic.exchanges += 1
        said: list[Any] = [None] * self.size
        with warnings.catch_warnings():
            # The shape of an answer goes with it, and torch 2.13 warns of a class of its own when it reads one.
            warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
            self._try(lambda: dist.all_gather_object(said, mine, group=self._group))
        return said

    def _sendable(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu() if self._through_host else tensor

    def _try(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (RuntimeError, dist.DistError) as error:
            # This rank's own fault, and a RuntimeError, too.
            if is_out_of_memory(error):
                raise
            raise JobFailed(
                f"Another process of this job cannot be reached any more ({first_line(error)}).",
                hint="Its own error is the one to look at; start the job again.",
            ) from error


def _padded(rows: torch.Tensor, longest: int) -> torch.Tensor:
    missing = longest - rows.shape[0]
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def join(device: torch.device, *, patience: timedelta = _PATIENCE) -> None:
    """Become part of the job that a launcher has described in the environment, as `torchrun` and `--gpus` do.

    Raises JobFailed where the others run other versions, have the same card, or do not come.
    """
    if device.type == "cuda":
        # What NCCL sends of objects, it sends from the current card: the first one, if nobody says otherwise.
        device = own_card(device)
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        require_told(os.environ)
        backend = _backend(device)
        try:
            dist.init_process_group(backend, timeout=patience)
        except (RuntimeError, ValueError, dist.DistError) as error:
            raise why_not_met(error) from error
        if backend == "nccl":
            _require_own_cards(device)
    everybody = Ranks("versions", dist.group.WORLD, Traffic())
    try:
        said = everybody.agree({"rocm-sd": installed("rocm-sd"), "torch": str(torch.__version__)})
    except JobFailed as error:
        if dist.get_backend() == "nccl":
            raise why_cards_are_apart(error) from error
        raise
    unlike = why_unlike_versions(said)
    if unlike is not None:
        raise unlike


def leave() -> None:
    forget_groups()
    if dist.is_initialized():
        dist.destroy_process_group()


def _backend(device: torch.device) -> str:
    """NCCL, which RCCL stands in for on AMD, wants a card for each rank; ranks that share one talk through the host."""
    if device.type == "cpu" or not dist.is_nccl_available():
        return "gloo"
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    return "nccl" if ranks_here <= torch.cuda.device_count() else "gloo"


def own_card(device: torch.device) -> torch.device:
    """The one that was named, or the one of this rank's number among those that it sees."""
    if device != torch.device("cuda"):
        return device
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % max(1, torch.cuda.device_count()))


def _require_own_cards(device: torch.device) -> None:
    """NCCL itself would end in an error of its own, or hang."""
    # Where a card has several names it is not found out here: those of two ranks with the same view are compared.
    seen = [os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")]
    store: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001 -- without a card: that is what is in doubt
    rank, names = dist.get_rank(), [f"rocm-sd/card/{rank}" for rank in range(dist.get_world_size())]
    store.set(names[rank], repr((platform.node(), seen, device.index)))
    cards = [store.get(name) for name in names]
    for other, card in enumerate(cards):
        first = cards.index(card)
        if first != other:
            dist.destroy_process_group()
            raise JobFailed(
                f"Ranks {first} and {other} have the same card.",
                hint="NCCL and RCCL want one for each: put the pipeline on f\"cuda:{os.environ['LOCAL_RANK']}\".",
            )


def along(mesh: DeviceMesh | None, name: str, traffic: Traffic) -> Ranks:
    """The ranks that share this strategy: those alone where the mesh does not have it."""
    has_it = mesh is not None and name in (mesh.mesh_dim_names or ())
    return Ranks(name, mesh.get_group(name) if mesh is not None and has_it else None, traffic)
