"""Speed against quality: what every setting of the approximations takes, and how far its pictures are from exact ones.

Stock, exact and each setting draw the same prompts in turns, in changing order. Each picture is timed and scored, so
that a turn is a prompt: its times are compared within the turn, and its pictures with the exact one. A setting whose
numerics are not those of its definition (lossy.py) is not timed, and one that cannot be had is listed with the reason.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rocm_sd import measuring
from rocm_sd.bench import lossy, subjects, verdict
from rocm_sd.bench.engines import ours, stock
from rocm_sd.bench.gate import PictureGate, free_memory
from rocm_sd.bench.machine import PeakMemory, machine
from rocm_sd.bench.pareto_points import EXACT
from rocm_sd.bench.quality_search import approximated_model, candidates
from rocm_sd.bench.records import STOCK, Measurement, Record, WorkloadFacts, continued, now, record_file
from rocm_sd.bench.turns import Failed, Pipelines, failure_line, is_short, without_folders
from rocm_sd.bench.workloads import Recipe, Workload
from rocm_sd.engine import Approximation, is_out_of_memory, optimize, report
from rocm_sd.engine.approximation import has_halves
from rocm_sd.errors import DeviceUnavailable, NumericsFailure, RocmSdError, Unsupported
from rocm_sd.integrations.diffusers import load_pipeline
from rocm_sd.integrations.diffusers.loading import default_dtype
from rocm_sd.models import EMBEDDED, ModelKind
from rocm_sd.quality.budget import BUDGETS, Scores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from PIL.Image import Image

    from rocm_sd.bench.subjects import Subjects
    from rocm_sd.bench.turns import Progress
    from rocm_sd.models import ModelSource

__all__ = ["NOT_HERE", "Choice", "Survey", "choices", "short", "workload_of"]

# What the reason starts with where a setting cannot be had.
NOT_HERE = "not available here"
# The share of a whole step that a shallow one takes, by depth: about what it is on a CPU and on a GPU. It only spreads
# the settings from cheap to dear; what they take is measured.
_SHALLOW = {1: 0.25, 3: 0.6}
# Of a transformer's first block, in the same way: what a picture may take by how much that block may have changed.
_FIRST_BLOCK = {0.05: 0.8, 0.12: 0.6, 0.3: 0.4}
# What `Approximation` has beside the steps that are left out, each by itself.
_FURTHER = (
    Approximation(merged=0.5),
    Approximation(eight_bits="int8"),
    Approximation(eight_bits="fp8"),
    Approximation(eight_bit_decoder="int8"),
    Approximation(small_decoder=True),
)
_SAVE_EVERY_S = 5.0
# Parameters of a denoiser: that of Stable Diffusion 1.5 has 860 millions, and takes many minutes a picture there.
_MOST_ON_A_CPU = 100e6


@dataclass(frozen=True)
class Choice:
    """`quality`: the budget that it claims, or "given"."""

    name: str
    approximation: Approximation
    quality: str = verdict.GIVEN


def short(approximation: Approximation) -> str:
    """A few characters for a label: "1/4 eg d3" computes one step of 4 whole, extrapolates, has guidance as often, and
    depth 3; g2 is guidance in every second step, "5 whole" has a schedule of its own with so many whole steps.
    """
    steps = approximation.skipping
    said = [f"first block {steps.first_block:g}" if steps.first_block else ""]
    if steps.whole:
        said += [f"{len(steps.whole)} whole", ("e" if steps.order else "") + ("g" if steps.guided_every > 1 else "")]
        said.append(f"d{steps.depth}" if steps.depth != 1 else "")
    elif steps.caches and steps.every > 1:
        guided = {1: "", steps.every: "g"}.get(steps.guided_every, f"g{steps.guided_every}")
        said += [f"1/{steps.every}", ("e" if steps.order else "") + guided]
        said.append(f"d{steps.depth}" if steps.depth != 1 else "")
    elif steps.guided_every > 1:
        said.append(f"g{steps.guided_every}")
    said += [f"no g after {steps.guidance_end:.0%}" if steps.guidance_end < 1 else ""]
    said += [f"merged {approximation.merged:.0%}" if approximation.merged else "", approximation.eight_bits or ""]
    said.append(f"decoder {approximation.eight_bit_decoder}" if approximation.eight_bit_decoder else "")
    said.append("small decoder" if approximation.small_decoder else "")
    return " ".join(filter(None, said)) or EXACT


def choices(pipe: Any, steps: int, count: int) -> list[Choice]:
    """The qualities that are known for such pictures, `count` of the search's candidates from cheap to dear, and what
    else there is to approximate.
    """
    named = {name: lossy.approximation_of(pipe, name, steps) for name in BUDGETS}
    found = {one: Choice(name, one, name) for name, one in named.items() if not one.is_exact}
    first_block = {} if getattr(pipe, "unet", None) is not None else _FIRST_BLOCK
    tried = [one for _, one in candidates(steps, _SHALLOW, first_block, halves=has_halves(pipe))]
    wanted = min(count, len(tried))
    spread = [tried[round(place * (len(tried) - 1) / max(wanted - 1, 1))] for place in range(wanted)]
    taken = [choice.name for choice in found.values()]
    for one in (*spread, *_FURTHER):
        # A quality of a name may be the same setting: it stands there with its claim.
        if one not in found:
            name = short(one)
            found[one] = Choice(name if name not in taken else f"{name} ({taken.count(name) + 1})", one)
            taken.append(name)
    return list(found.values())


def workload_of(source: ModelSource, device: torch.device, steps: int) -> Workload:
    """A model at its own size, with the scheduler that it comes with."""
    dtype = default_dtype(device)
    pipe = load_pipeline(source, torch.device("cpu"), dtype)
    model = approximated_model(pipe)
    if model is None or hasattr(pipe, "_pack_latents"):
        kinds = "a UNet of SD or SDXL, or the transformer of SD3"
        raise Unsupported("bench --pareto", f"a {type(pipe).__name__}: it takes a pipeline with {kinds}")
    if device.type == "cpu" and model.num_parameters() > _MOST_ON_A_CPU:
        raise DeviceUnavailable(
            "This model needs a GPU: on a CPU one picture takes many minutes, and torch sees no GPU.",
            hint=f"Measure the built-in model: rocm-sd bench {EMBEDDED} --pareto",
        )
    if getattr(pipe, "safety_checker", None) is not None:
        pipe.safety_checker = None
    size = model.config.sample_size
    height, width = (
        side * pipe.vae_scale_factor for side in (size if isinstance(size, (tuple, list)) else (size, size))
    )
    scheduler = type(pipe.scheduler).__name__
    name = source.name if source.kind in {ModelKind.EMBEDDED, ModelKind.HUB} else Path(source.location).resolve().name
    recipe = Recipe(name.replace("/", "-"), "", "model", height, steps, scheduler, source.guidance)
    facts = WorkloadFacts(
        recipe.name, name, name, height, width, steps, scheduler, source.guidance, str(dtype).removeprefix("torch.")
    )
    return Workload(recipe, pipe, facts, device, dtype)


class Survey:
    """One run. `record` is what it has so far; Ctrl-C leaves the turns that are whole."""

    def __init__(
        self,
        workload: Workload,
        subject: Subjects,
        settings: Sequence[Choice],
        *,
        out: Path,
        command: str = "",
        progress: Progress | None = None,
    ) -> None:
        self.workload, self.subject, self._progress = workload, subject, progress
        self._choices = {choice.name: choice for choice in settings}
        # On a GPU the first picture captures, and the second replays.
        self._warm_up = 1 if workload.device.type == "cpu" else 2
        self.names = (STOCK, EXACT, *self._choices)
        self.file = record_file(out, workload.name, "pareto")
        # A turn's pictures, and about as much for making a setting ready and comparing it.
        self._total = float(len(self.names) * (len(subject.texts) + self._warm_up + 2))
        self._done = 0.0
        self._stopwatch = measuring.Stopwatch(workload.device)
        self._pipelines = Pipelines(self._made)
        self._warm: dict[str, bytes] = {}
        self._measured: dict[str, Measurement] = {}
        self._images: dict[str, list[Image]] = {name: [] for name in self.names}
        self._near: dict[str, list[Scores]] = {name: [] for name in self.names}
        self._saved_at = 0.0
        extra = {
            "prompts": list(subject.texts),
            "settings": {choice.name: choice.approximation.to_dict() for choice in settings},
        }
        facts = machine(workload.device)
        self.record = Record("pareto", workload.facts, facts, command, now(), (), complete=False, extra=extra)

    def go(self) -> Record:
        # Pictures are no part of a record, so that a run cannot be resumed: an older one is kept aside.
        with continued(self.file, self.record, resume=False):
            try:
                for name in self.names:
                    self._prepare(name)
                    self._save()
                for number, text in enumerate(self.subject.texts):
                    self._turn(number, text)
                self._finish(complete=True)
            except KeyboardInterrupt:
                self._finish(complete=False)
                raise
        return self.record

    @property
    def turns(self) -> int:
        return len(self._images[EXACT])

    def _advance(self, by: float, what: str) -> None:
        self._done = min(self._done + by, self._total)
        if self._progress:
            self._progress(self._done, self._total, what)

    def _made(self, name: str) -> Any:
        """A pipeline of the setting, warm."""
        pipe = self.workload.pipeline()
        if name == EXACT:
            optimize(pipe)
        elif name != STOCK:
            optimize(pipe, quality=self._choices[name].approximation)
        for _ in range(self._warm_up):
            image = lossy.draw(self.workload, pipe, self.subject.texts[0], 0)
        self._warm[name] = image.tobytes()
        return pipe

    def _prepare(self, name: str) -> None:
        """Made ready and compared; it takes turns then, or its measurement says why not."""
        self._advance(0, f"{name}: made ready")
        like = stock if name == STOCK else ours
        measurement = Measurement(name, like.version(), like.provider, 1, (), self.workload.facts.steps)
        if name in self._choices:
            choice = self._choices[name]
            measurement = replace(measurement, quality=verdict.Quality(choice.quality, str(choice.approximation)))
        self._measured[name] = measurement
        memory = PeakMemory(self.workload.device)
        try:
            pipe = self._with_room(name)
            self._advance(self._warm_up, f"{name}: compared with its definition")
            self._measured[name] = self._judged(name, pipe, measurement)
        except Exception as error:
            if name not in self._choices:
                raise
            self._leave_out(name, f"{NOT_HERE}: {failure_line(error)}")
        else:
            if self._measured[name].left_out is None:
                self._pipelines.add(name, pipe)
        self._advance(2, name)
        free_memory()
        if not self._pipelines.one_at_a_time and is_short(self.workload.device, memory.mib()):
            self._one_at_a_time()

    def _with_room(self, name: str) -> Any:
        if self._pipelines.one_at_a_time:
            self._pipelines.give_up()
        try:
            return self._made(name)
        except Exception as error:
            if not is_out_of_memory(error) or not self._pipelines.kept:
                raise
        self._one_at_a_time()
        return self._made(name)

    def _one_at_a_time(self) -> None:
        self._pipelines.one_at_a_time = True
        self._pipelines.give_up()
        note = "too little memory for all settings at once; each was made ready anew for its turns"
        self.record = replace(self.record, notes=tuple(dict.fromkeys((*self.record.notes, note))))

    def _judged(self, name: str, pipe: Any, measurement: Measurement) -> Measurement:
        if name == STOCK:
            return measurement
        if name == EXACT:
            gate = self._exact_gate
            found = gate.check(pipe)
            if found.wrong:
                raise NumericsFailure(
                    f"rocm-sd itself gives a {found.wrong}: there are no exact pictures to compare with.",
                    hint="Please report it with what this prints: rocm-sd info",
                )
            return replace(measurement, error=found.error, stock_error=gate.stock_error)
        approximation = self._choices[name].approximation
        if self._is_exact(name, pipe, approximation):
            # What says that it is approximated says what was asked for.
            said = "; ".join(note for note in report(pipe).approximations if "is approximated" not in note)
            why = f"{NOT_HERE}: its pictures are as exact as rocm-sd's" + (
                f" ({without_folders(said)})" if said else ""
            )
            return replace(measurement, left_out=why)
        defined = lossy.definition_of(approximation)
        if defined is None:
            return replace(measurement, notes=(lossy.NO_DEFINITION,))
        # Enough for two rounds of whole steps, guidance and what lies between them.
        span = max(approximation.skipping.every, approximation.skipping.guided_every)
        # A schedule of its own is that of all steps.
        steps = self.workload.facts.steps if approximation.skipping.whole else 2 * span + 2
        compared = lossy.numerics(self.workload, 1, pipe, defined, steps=steps, seeds=(0,))
        error = compared.error if math.isfinite(compared.error) else None
        return replace(measurement, error=error, stock_error=compared.stock_error, left_out=compared.wrong)

    def _is_exact(self, name: str, pipe: Any, approximation: Approximation) -> bool:
        """Whether nothing came of what was asked for. Where no step is left out, two steps show it."""
        if self._warm[name] == self._warm[EXACT]:
            return True
        return approximation.skipping.is_exact and self._exact_gate.check(pipe).wrong is None

    @cached_property
    def _exact_gate(self) -> PictureGate:
        return PictureGate(self.workload, 1)

    def _leave_out(self, name: str, why: str) -> None:
        self._measured[name] = replace(self._measured[name], ms=(), left_out=why)

    def _turn(self, number: int, text: str) -> None:
        """All of it or nothing: what is timed in it is compared within it."""
        taken: dict[str, tuple[float, Image]] = {}
        for name in measuring.turn(self._pipelines.names, number):
            self._advance(0, f"{name}: {text}")
            try:
                taken[name] = self._drawn(name, text, number)
            except Failed as failed:
                if name not in self._choices:
                    raise RocmSdError(f"{name} failed in its turn: {failed.why}.") from failed
                self._pipelines.remove(name)
                self._leave_out(name, failed.why)
            self._advance(1, f"{name}: {text}")
        exact = taken[EXACT][1]
        for name, (ms, image) in taken.items():
            self._measured[name] = replace(self._measured[name], ms=(*self._measured[name].ms, ms))
            self._images[name].append(image)
            self._near[name].append(subjects.scores([image], [exact], None))
        if time.perf_counter() - self._saved_at > _SAVE_EVERY_S:
            self._save()

    def _drawn(self, name: str, text: str, number: int) -> tuple[float, Image]:
        images: list[Image] = []

        def call() -> None:
            images.append(lossy.draw(self.workload, self._pipelines.of(name), text, number))

        try:
            self._pipelines.of(name)
            ms = self._stopwatch.milliseconds(call)
        except Exception as error:
            is_short_of_memory = is_out_of_memory(error) and len(self._pipelines.kept) > 1
            if not is_short_of_memory:
                raise Failed(name, error) from error
        else:
            return ms, images[-1]
        self._one_at_a_time()
        return self._drawn(name, text, number)

    def _scored(self, name: str, *, with_match: bool) -> Measurement:
        measurement = self._measured[name]
        if name not in self._choices or not measurement.ms:
            return measurement
        near = self._near[name]
        match = None
        if with_match and self.subject.match is not None and len(near) >= verdict.LEAST_PROMPTS:
            match = self.subject.match(self._images[name], self._images[EXACT][: len(near)])
        scores = Scores([each.psnr[0] for each in near], [each.ssim[0] for each in near], match)
        return replace(
            measurement, quality=verdict.measured(measurement.quality.name, measurement.quality.setting, scores)
        )

    def _save(self, *, complete: bool = False, with_match: bool = False) -> None:
        measurements = tuple(self._scored(name, with_match=with_match) for name in self.names if name in self._measured)
        timed = {one.engine: one.ms for one in measurements if one.ms}
        comparisons = tuple(
            measuring.compare(name, against, 1, timed[name], timed[against])
            for against in (STOCK, EXACT)
            for name in timed
            if against in timed and name not in {STOCK, against}
        )
        near = {STOCK: [min(each.psnr[0], verdict.EQUAL_DB) for each in self._near[STOCK]]}
        extra = {**self.record.extra, "near_exact_db": near}
        self.record = replace(
            self.record, measurements=measurements, comparisons=comparisons, complete=complete, extra=extra
        )
        self.record.save(self.file)
        self._saved_at = time.perf_counter()

    def _finish(self, *, complete: bool) -> None:
        if complete:
            self._advance(self._total - self._done, "done")
        self._save(complete=complete, with_match=True)
