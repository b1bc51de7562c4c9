"""Jobs of several processes on the CPU, which stay for as long as a module's tests run: starting one takes seconds."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from multiprocessing import get_context
from pathlib import Path

_TESTS = Path(__file__).resolve().parent.parent
_LONGEST_S = 240


def free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


def _rank(rank, size, port, pipe, environment):
    sys.path[:0] = [str(_TESTS), str(_TESTS / "parallel")]
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", **environment,
    }  # fmt: skip
    import torch

    torch.set_num_threads(1)
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
    """`call(function, *args)`: on every rank at once; what each returned, in their order."""

    def __init__(self, size: int, **environment: str) -> None:
        spawn, port = get_context("spawn"), free_port()
        self.size, self.pipes, self.processes = size, [], []
        for rank in range(size):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_rank, args=(rank, size, port, theirs, environment), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def start(self, function, *args) -> None:
        for pipe in self.pipes:
            pipe.send((function, args))

    def answers(self):
        """(True, result), (False, (name, text, traceback)) or (False, ("Killed", ...)) of each."""
        return [_answer(pipe) for pipe in self.pipes]

    def call(self, function, *args):
        self.start(function, *args)
        answers = self.answers()
        wrong = [text for right, text in answers if not right]
        assert not wrong, "\n".join(each[2] or each[1] for each in wrong)
        return [result for _, result in answers]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
