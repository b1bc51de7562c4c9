"""What many callers ask of one model at once, run together: steps of pictures that come and go, texts, decodes."""

from rocm_sd.engine.batching.gathering import Closed, Gathering
from rocm_sd.engine.batching.merging import Merged, merged
from rocm_sd.engine.batching.step_batcher import LADDER, BatchDone, Member, StepBatcher

__all__ = ["LADDER", "BatchDone", "Closed", "Gathering", "Member", "Merged", "StepBatcher", "merged"]
