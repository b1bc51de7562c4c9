"""Compile beside a search: forks of a process without a card compile what candidates need, while others are measured.

Nobody waits for it: a config that is not compiled when its problem is searched is left out of that search.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from rocm_sd.tuning.search.workbench import variants_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rocm_sd.ops.registry import Op
    from rocm_sd.tuning.search.calls import OpCall
    from rocm_sd.tuning.search.candidates import Candidate
    from rocm_sd.tuning.search.problems import ProblemSearch

__all__ = ["CompilingBeside", "first_of_each", "heads", "is_compiled_apart", "is_composed", "is_plain"]

log = logging.getLogger("rocm_sd")


class CompilingBeside(AbstractContextManager["CompilingBeside"]):
    """A thread that first notes which variants of kernels the candidates of each call need, which takes a second or
    two, and then has them compiled for so many `seconds` in all, or until the block ends.

    `wanted`: (call, its candidates, the likely ones first, what a picture spends on it).
    """

    def __init__(
        self, wanted: Sequence[tuple[OpCall, Sequence[Candidate], float]], device: torch.device, seconds: float
    ) -> None:
        self._wanted = [each for each in wanted if each[1]]
        self._device, self._seconds = device, seconds
        self._needed: dict[tuple[OpCall, Candidate], list[str]] = {}
        self._compiled: set[str] = set()
        self._failed: set[str] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="rocm-sd-compiling-beside")
        if self._wanted:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        if self._wanted:
            self._thread.join()

    def is_ready(self, call: OpCall, candidate: Candidate) -> bool:
        """Whether all that it launches was compiled."""
        needed = self._needed.get((call, candidate))
        return needed is not None and self._compiled.issuperset(needed)

    def has_failed(self, call: OpCall, candidate: Candidate) -> bool:
        return not self._failed.isdisjoint(self._needed.get((call, candidate), ()))

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def _work(self) -> None:
        try:
            self._note_and_compile()
        except Exception as error:  # noqa: BLE001 -- a Triton with parts missing raises anything, and libraries remain
            log.info("nothing more is compiled ahead: %s", error)

    def _note_and_compile(self) -> None:
        from rocm_sd.kernels.triton import precompile  # noqa: PLC0415 -- needs Triton

        begun = time.monotonic()
        questions: dict[str, dict[str, object]] = {}
        use: defaultdict[str, float] = defaultdict(float)
        heads: set[str] = set()
        needed: dict[tuple[OpCall, Candidate], list[str]] = {}
        on_gpu = self._device.type == "cuda"
        # A new thread is on the first GPU, whichever the model is on.
        with torch.cuda.device(self._device) if on_gpu else nullcontext():
            found = variants_of([(call, candidates) for call, candidates, _ in self._wanted], self._device)
            device = torch.cuda.current_device() if on_gpu else 0
        for number, place, each in found:
            call, candidates, weight = self._wanted[number]
            texts = [json.dumps(question, sort_keys=True) for question in each]
            questions |= zip(texts, each, strict=True)
            needed[call, candidates[place]] = texts
            # The time ends before all are compiled: each problem has one first, and its third is worth more than its
            # tenth.
            if not candidates[place].config or not place or not candidates[place - 1].config:
                heads.update(texts)
            for text in texts:
                use[text] += weight / (1 + place)
        self._needed = needed
        noted = time.monotonic() - begun
        order = sorted(questions, key=lambda text: (text not in heads, -use[text]))

        def answered(number: int, compiled: bool) -> None:
            (self._compiled if compiled else self._failed).add(order[number])

        precompile.compile_variants(
            [questions[text] for text in order], self._seconds - noted, device,
            stopped=self._stopped, on_answer=answered,
        )  # fmt: skip
        ready = sum(self.is_ready(*each) for each in needed)
        counts = ready, len(needed), len(self._compiled), len(order)
        log.info(
            "%d of %d candidates, %d of %d variants compiled in %.1f s, noted in %.1f s",
            *counts, time.monotonic() - begun - noted, noted,
        )  # fmt: skip


def is_compiled_apart(op: Op, candidate: Candidate) -> bool:
    """Whether a process that has no card compiles it: what Triton compiles."""
    known = op.verification
    return known is not None and bool(known.kernels) and candidate.implementation in known.proven


def is_composed(op: Op, candidate: Candidate) -> bool:
    return op.has(candidate.implementation) and op.implementation(candidate.implementation).composed


def is_plain(op: Op, candidate: Candidate) -> bool:
    """A library's own, which can be tried at once."""
    return not candidate.config and not is_compiled_apart(op, candidate) and not is_composed(op, candidate)


def heads(search: ProblemSearch, compiling: CompilingBeside) -> list[Candidate]:
    """Of what is being compiled, what says most of a problem: all that has no config, and one that has."""
    could = [c for c in search.others if is_compiled_apart(search.op, c) and not compiling.has_failed(search.call, c)]
    configured = [c for c in could if c.config]
    tried = any(search.entry(c) is not None for c in configured)
    found = [*(c for c in could if not c.config), *([] if tried else configured[:1])]
    return [] if search.unchecked else [c for c in found if search.entry(c) is None]


def first_of_each(search: ProblemSearch) -> set[Candidate]:
    """Of implementations that are compiled where they run, one by one: the config that comes first."""
    found: dict[str, Candidate] = {}
    for candidate in search.others:
        if candidate.config and not is_compiled_apart(search.op, candidate):
            found.setdefault(candidate.implementation, candidate)
    return set(found.values())
