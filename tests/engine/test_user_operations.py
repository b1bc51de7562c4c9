"""Any sequence of what a user does to a pipeline gives stock's pictures, and `restore` its bits: hypothesis looks for
one that does not, and makes it short.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest
import user_changes  # noqa: F401 -- registers operations
import user_operations  # noqa: F401 -- likewise
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from user_sessions import COUNTS, KINDS, OPERATIONS, Session, every_rule

LONG = settings.default.max_examples > 100
# Of 70 examples hypothesis makes about a hundred sequences; of the profile `fuzz` these are 2,000.
SEQUENCES, LENGTH = (settings.default.max_examples // 5, 60) if LONG else (70, 3)


class Run:
    """One sequence: what the machine does, and what `replay` does again."""

    def __init__(self, kind, step_graph, folder):
        self.patch = pytest.MonkeyPatch()
        every_rule(self.patch, step_graph)
        self.session = Session(kind, folder)
        # What is recorded is there when the first operation comes.
        self.session.drawn(self.session.twins.ours, self.session.case, 0, self.session.arguments())
        self.seen = False
        COUNTS["sequences"] += 1

    def operate(self, name, arguments, seed):
        """`seed` of the picture after it; None for none."""
        COUNTS["operations"] += 1
        COUNTS[f"operation {name}"] += 1
        self.session.done.append((name, arguments))
        OPERATIONS[name].run(self.session, **arguments)
        self.seen = seed is not None
        if seed is not None:
            self.session.look(seed)

    def end(self):
        try:
            if not self.seen:
                self.session.look(0)
            if self.session.optimised:
                OPERATIONS["restore"].run(self.session, backwards=True)
                self.session.look(0)
        finally:
            self.patch.undo()


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.begun = None

    @initialize(kind=st.sampled_from(sorted(KINDS)), step_graph=st.sampled_from(["1", "0"]))
    def begin(self, kind, step_graph):
        self.begun = Run(kind, step_graph, Path(self.folder.name))

    def teardown(self):
        try:
            if self.begun is not None:
                self.begun.end()
        finally:
            self.folder.cleanup()


def _add(name, operation):
    def run(self, seed, **arguments):
        self.begun.operate(name, arguments, seed)

    run.__name__ = name
    when = precondition(lambda self: self.begun is not None and operation.when(self.begun.session))
    pictures = st.sampled_from([0, 1, None])
    setattr(Machine, name, when(rule(seed=pictures, **operation.arguments)(run)))


for _name, _operation in OPERATIONS.items():
    _add(_name, _operation)

Machine.TestCase.settings = settings(max_examples=SEQUENCES, stateful_step_count=LENGTH)
TestAnySequence = Machine.TestCase


def replay(folder, kind, step_graph, operations):
    """How many pictures were held against stock's."""
    before = COUNTS["pictures"]
    run = Run(kind, step_graph, folder)
    try:
        for name, arguments, seed in operations:
            assert OPERATIONS[name].when(run.session), name
            run.operate(name, arguments, seed)
        run.end()
    finally:
        run.patch.undo()
    return COUNTS["pictures"] - before


# Sequences that were found, and what was wrong after them.
FOUND = {
    # What a pipeline that is gone had installed stayed on the parts that it shared.
    "a pipeline that shared the parts is gone": [
        ("share_with_img2img", {"optimised": True}, 1),
        ("drop_img2img", {}, 0),
    ],
    # The rule of a VAE's attention asked a stranger in the place of a dropout for its probability.
    "a VAE changed before optimize": [
        ("change_the_vae", {"name": "attn-dropout"}, 1),
        ("wrap_the_step", {"before": True}, 0),
    ],
}
# Of a copy, the stand-ins inside of Diffusers' hooks were not found, and its layout stayed.
COPIED = [
    ("offload", {"way": "model"}, 0),
    ("offload_off", {}, 1),
    ("deep_copy", {"again": False}, None),
    ("offload", {"way": "block_level"}, None),
]


@pytest.mark.parametrize("step_graph", ["0", "1"], ids=["stepwise", "captured"])
@pytest.mark.parametrize("name", FOUND)
def test_a_sequence_that_went_wrong_once(tmp_path, name, step_graph):
    assert replay(tmp_path, "sdxl", step_graph, FOUND[name]) >= 2


@pytest.mark.parametrize("step_graph", ["0", "1"], ids=["stepwise", "captured"])
def test_a_copy_that_is_offloaded_is_restored(tmp_path, step_graph):
    assert replay(tmp_path, "sd3", step_graph, COPIED) >= 2


def teardown_module():
    """pytest -s shows it."""
    sys.stderr.write(f"\n{dict(COUNTS.most_common())}\n")
