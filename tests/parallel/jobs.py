"""Jobs of several processes on the CPU, which stay for as long as a module's tests run: starting one takes seconds."""

from __future__ import annotations

import os
import sys
import traceback
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

from torch.distributed import TCPStore

_TESTS = Path(__file__).resolve().parent.parent
_LONGEST_S = 240
# What a rank waits for another: its own error comes before the test gives it up.
_PATIENCE = timedelta(seconds=180)


def _rank(rank, size, port, pipe, environment):
    sys.path[:0] = [str(_TESTS), str(_TESTS / "parallel")]
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", **environment,
        # The job has the store, as a launcher has; no rank has to open a port that was free a while ago.
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    import torch

    from rocm_sd.parallel import join

    torch.set_num_threads(1)
    join.__kwdefaults__["patience"] = _PATIENCE
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(*args)))
        except BaseException as error:  # noqa: BLE001 -- told to the test
            pipe.send((False, (type(error).__name__, str(error), traceback.format_exc())))


def _answer(pipe):
    try:
        return pipe.recv() if pipe.poll(_LONGEST_S) else (False, ("Hang", "no answer", ""))
    except EOFError:
        return False, ("Killed", "it is gone", "")


class Job:
    """`call(function, *args)`: on every rank at once; what each returned, in their order.

    Ranks that did not all answer alike are not asked again: one may still wait for another, and an answer that comes
    late would be taken for that of the next call. New ones take their place.
    """

    def __init__(self, size: int, **environment: str) -> None:
        self.size, self._environment = size, environment
        self.pipes, self.processes = [], []
        self._begin()

    def _begin(self) -> None:
        spawn = get_context("spawn")
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.size):
            ours, theirs = spawn.Pipe()
            args = (rank, self.size, self._store.port, theirs, self._environment)
            process = spawn.Process(target=_rank, args=args, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def start(self, function, *args) -> None:
        if not self.processes:
            self._begin()
        for pipe in self.pipes:
            pipe.send((function, args))

    def answer_of(self, rank):
        return _answer(self.pipes[rank])

    def answers(self):
        """(True, result), (False, (name, text, traceback)) or (False, ("Killed", ...)) of each."""
        answers = [self.answer_of(rank) for rank in range(self.size)]
        alike = len({right for right, _ in answers}) == 1
        if not alike or any(not right and text[0] in {"Hang", "Killed"} for right, text in answers):
            self.close(0)
        return answers

    def call(self, function, *args):
        self.start(function, *args)
        answers = self.answers()
        wrong = [text for right, text in answers if not right]
        if wrong:
            self.close(0)
        assert not wrong, "\n".join(each[2] or each[1] for each in wrong)
        return [result for _, result in answers]

    def close(self, patience_s: float = 5) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(patience_s)
            if process.is_alive():
                process.kill()
                process.join()
        self.pipes, self.processes, self._store = [], [], None
