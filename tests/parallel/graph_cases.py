"""Split models from graphs, as each rank of a test's job runs them. On a CPU a trace stands for a graph."""

from __future__ import annotations

import os

import torch
from cases import emoji, pipeline_case
from stale_cases import drawn

from rocm_sd.numerics import compare
from rocm_sd.parallel import graphs, parallel_report, parallelize, unparallelize

__all__ = ["pipeline_case"]


def emoji_case(plan, steps=4):
    """A picture that is captured, one that is replayed, one by a model that has changed; each beside stock's."""
    with torch.no_grad():
        exact = drawn(emoji(torch.float64), steps, seeds=[0])
        pipe = emoji()
        alone = drawn(pipe, steps, seeds=[0])
        parallelize(pipe, plan)
        pictures = [drawn(pipe, steps, seeds=[0]) for _ in range(2)]
        said, sent = str(parallel_report(pipe)), dict(parallel_report(pipe).traffic.sent)
        # What a graph has baked in.
        block = pipe.unet.mid_block.resnets[0]
        block.output_scale_factor = 2.0
        changed = drawn(pipe, steps, seeds=[0])
        unparallelize(pipe)
        changed_alone = drawn(pipe, steps, seeds=[0])
        block.output_scale_factor = 1.0
        again = drawn(pipe, steps, seeds=[0])
    return {
        "found": compare(pictures[1], exact, alone), "split": pictures[1], "same": torch.equal(*pictures), "said": said,
        "sent": sent, "restored": torch.equal(again, alone), "changed": changed, "changed_alone": changed_alone,
    }  # fmt: skip


def eager_case(plan, steps=4):
    os.environ["ROCM_SD_STEP_GRAPH"] = "0"
    try:
        with torch.no_grad():
            pipe = parallelize(emoji(), plan)
            pictures = [drawn(pipe, steps, seeds=[0]) for _ in range(2)]
            return {"split": pictures[1], "sent": dict(parallel_report(pipe).traffic.sent)}
    finally:
        os.environ["ROCM_SD_STEP_GRAPH"] = "1"


def spoiled_case(how):
    """One rank's graphs are wrong, or cannot be captured: that rank goes on without, the others with theirs."""
    kept = graphs.capture_between
    mine = os.environ["RANK"] == "0"

    def spoiled(run, device, exchanged):
        if how == "fails":
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        if how == "sends":
            from rocm_sd.parallel.sharing import everybody

            def run_and_send():
                everybody().agree("hello")
                return run()

            return kept(run_and_send, device, exchanged)
        graph = kept(run, device, exchanged)
        replay = graph.graph.replay

        def wrong():
            replay()
            graph.graph.outputs[0].mul_(1.5)

        object.__setattr__(graph.graph, "replay", wrong)
        return graph

    graphs.capture_between = spoiled if mine else kept
    try:
        with torch.no_grad():
            pipe = emoji()
            alone = drawn(pipe, 4, seeds=[0])
            parallelize(pipe, "patch")
            pictures = [drawn(pipe, 4, seeds=[0]) for _ in range(2)]
            return {"alone": alone, "pictures": pictures, "said": str(parallel_report(pipe))}
    finally:
        graphs.capture_between = kept
