"""How right an engine's pictures are by the scores that MLPerf asks for: CLIP score and FID over a user's own prompts.

Every engine draws a picture of each prompt, from the same noise. Sums are kept beside the record while a run is under
way, and the same command goes on with them. Pictures themselves are not kept: MLPerf's are 5000.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rocm_sd.bench.gate import free_memory
from rocm_sd.bench.machine import machine
from rocm_sd.bench.records import RULES as RECORD_RULES
from rocm_sd.bench.records import Machine, UnreadableRecord, WorkloadFacts, keep_older, now, read_record
from rocm_sd.errors import InvalidOption, Unsupported
from rocm_sd.files import text_of, write_text
from rocm_sd.plain_json import read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rocm_sd.bench.engines import Engine
    from rocm_sd.bench.turns import Progress
    from rocm_sd.bench.workloads import Workload
    from rocm_sd.quality.scoring import Scorer
    from rocm_sd.typed_json import Rules

__all__ = ["FORMAT", "MLPERF", "AccuracyRecord", "EngineAccuracy", "read_prompts", "record_file", "run", "verdict"]

FORMAT = "rocm-sd-accuracy/1"
# What a submission to MLPerf Inference has to score with SDXL over its 5000 captions of COCO.
MLPERF = {"clip_score": (31.68631873, 31.81331801), "fid": (23.01085758, 23.95007626)}
_MLPERF_PROMPTS = 5000
_FEWEST, _MOST = 2, 100_000
_KEPT_EVERY_S = 60.0
_COUNT, _NOT_NEGATIVE = {"minimum": 1, "maximum": 10**9}, {"minimum": 0, "maximum": 1e12}
RULES: Rules = {
    **{name: rule for name, rule in RECORD_RULES.items() if name.startswith(("Machine.", "WorkloadFacts."))},
    "AccuracyRecord.when": RECORD_RULES["Record.when"],
    "AccuracyRecord.prompts": _COUNT,
    "AccuracyRecord.prompts_sha256": {"pattern": "^[0-9a-f]{64}$"},
    "EngineAccuracy.pictures": _COUNT,
    **{f"EngineAccuracy.{name}": _NOT_NEGATIVE for name in ("clip_score", "fid", "seconds")},
}


@dataclass(frozen=True)
class EngineAccuracy:
    """`seconds`: of drawing alone; of an interrupted run, of its last part."""

    engine: str
    version: str
    pictures: int
    clip_score: float | None
    fid: float | None
    seconds: float


@dataclass(frozen=True)
class AccuracyRecord:
    """`clip` and `reference`: the last parts of their paths, or None where a score was not asked for."""

    workload: WorkloadFacts
    machine: Machine
    command: str
    when: str
    prompts: int
    prompts_sha256: str
    clip: str | None
    reference: str | None
    results: tuple[EngineAccuracy, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    def save(self, path: Path) -> None:
        """Measurements are never overwritten: an older record is renamed after its time."""
        keep_older(path, AccuracyRecord.load)
        write_text(path, json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> AccuracyRecord:
        values = read_json(path, partial(UnreadableRecord, path), finite=False)
        return read_record(cls, values, path, FORMAT, RULES)


def record_file(out: Path, workload: str) -> Path:
    return out / f"{workload}-accuracy.json"


def read_prompts(file: Path) -> tuple[str, ...]:
    """One a line; of a table (.tsv, as MLPerf has its captions) the column `caption`."""

    def refused(why: object) -> InvalidOption:
        hint = f"It takes a text file with one prompt a line, or a .tsv with a column named caption ({why})."
        return InvalidOption("--prompts", file, [], hint=hint)

    lines = io.StringIO(text_of(file, refused), newline="")
    try:
        texts = _captions(lines) if file.suffix == ".tsv" else list(lines)
    except (csv.Error, KeyError) as error:
        raise refused(error) from error
    found = tuple(text.strip() for text in texts if text.strip())
    if not _FEWEST <= len(found) <= _MOST:
        hint = f"It has {len(found)} prompts, and takes {_FEWEST} to {_MOST}."
        raise InvalidOption("--prompts", file, [], hint=hint)
    return found


def _captions(lines: Any) -> list[str]:
    return [row["caption"] or "" for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)]


def run(
    workload: Workload,
    engines: Sequence[Engine],
    prompts: Sequence[str],
    scorer: Callable[[], Scorer],
    *,
    out: Path,
    batch: int = 1,
    resume: bool = True,
    clip: str | None = None,
    reference: str | None = None,
    command: str = "",
    progress: Progress | None = None,
) -> AccuracyRecord:
    """`scorer` makes one for each engine. `clip` and `reference` name what it scores by."""
    if not workload.takes_prompts:
        raise Unsupported(
            f"bench {workload.name} --accuracy", "random weights, which show nothing", hint="Give a model with --model."
        )
    digest = hashlib.sha256("\n".join(prompts).encode()).hexdigest()
    here = machine(workload.device)
    results, kept = [], []
    for number, engine in enumerate(engines):
        file = out / f"{workload.name}-accuracy-{engine.name}.safetensors"
        about = {
            "workload": asdict(workload.facts), "machine": asdict(here), "engine": engine.version(), "batch": batch,
            "prompts": digest, "clip": clip, "reference": reference,
        }  # fmt: skip
        made = _EngineRun(workload, engine, prompts, batch, scorer(), file, about)
        results.append(made.go(resume, progress, number * len(prompts), len(engines) * len(prompts)))
        kept.append(file)
        free_memory()
    record = AccuracyRecord(
        workload.facts, here, command, now(), len(prompts), digest, clip, reference, tuple(results)
    )  # fmt: skip
    record.save(record_file(out, workload.name))
    for file in kept:
        file.unlink(missing_ok=True)
    return record


@dataclass
class _EngineRun:
    workload: Workload
    engine: Engine
    prompts: Sequence[str]
    batch: int
    scorer: Scorer
    file: Path
    about: dict[str, Any]
    seconds: float = 0.0

    def go(self, resume: bool, progress: Progress | None, before: int, total: int) -> EngineAccuracy:
        if resume:
            self.scorer.load(self.file, self.about)
        saved_at = time.perf_counter()
        pipe = None
        try:
            while self.scorer.pictures < len(self.prompts):
                pipe = self.engine.prepare(self.workload.pipeline()) if pipe is None else pipe
                if progress:
                    done = self.scorer.pictures
                    progress(before + done, total, f"{self.engine.name}: {self.prompts[done]}")
                self._draw(pipe)
                if time.perf_counter() - saved_at > _KEPT_EVERY_S:
                    self.scorer.save(self.file, self.about)
                    saved_at = time.perf_counter()
        finally:
            # Also after Ctrl-C, and where memory has run out: the same command goes on.
            self.scorer.save(self.file, self.about)
        found = self.scorer.scores()
        return EngineAccuracy(
            self.engine.name, self.engine.version(), self.scorer.pictures, found.clip_score, found.fid, self.seconds
        )

    def _draw(self, pipe: Any) -> None:
        first = self.scorer.pictures
        texts = self.prompts[first : first + self.batch]
        started = time.perf_counter()
        images = self.workload.pictures_of(pipe, texts, first).float().cpu()
        self.seconds += time.perf_counter() - started
        self.scorer.add(images, texts)


def verdict(record: AccuracyRecord, one: EngineAccuracy) -> str:
    """Whether it is within what MLPerf asks for; its own tools decide on a submission."""
    facts = record.workload
    if facts.name != "sdxl-mlperf" or facts.steps != 20 or record.prompts != _MLPERF_PROMPTS:
        return ""
    found = {name: getattr(one, name) for name in MLPERF}
    outside = [n for n, value in found.items() if value is not None and not MLPERF[n][0] <= value <= MLPERF[n][1]]
    if outside:
        return f"outside of MLPerf's bounds: {', '.join(outside)}"
    missing = [name for name, value in found.items() if value is None]
    return "within MLPerf's bounds" + (f", as far as it was measured (no {missing[0]})" if missing else "")
