"""optimize(pipe) and restore(pipe): works on a Diffusers pipeline or on one of its modules."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary, finalize, ref

import torch
from torch import nn

from rocm_sd import arch, settings
from rocm_sd.engine import approximation, calibration, convolutions, denoising, hook_questions, levels, vae
from rocm_sd.engine.approximation import Approximation, Setting, Skipping
from rocm_sd.engine.capture import graphs_wanted, start_compiling
from rocm_sd.engine.denoisers import denoiser
from rocm_sd.engine.encoders import captured_encoders, encoder_notes
from rocm_sd.engine.installed import Approximated, Installed
from rocm_sd.engine.levels import LEVELS
from rocm_sd.engine.model_ways import is_vae, standing, subjects, unmeasured, way_of
from rocm_sd.engine.parts import EVERYTHING, Parts
from rocm_sd.engine.reporting import Report
from rocm_sd.engine.tiling import is_tiled, move_outside, put_tiles, tile_notes
from rocm_sd.engine.verdict_facts import facts_of
from rocm_sd.errors import Unsupported, require_one_of
from rocm_sd.ops.registry import require_named
from rocm_sd.quality.budget import parse_budget
from rocm_sd.rewrite import Change, apply, forwards, undo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from rocm_sd.engine.calibration import Plan
    from rocm_sd.engine.model_ways import ModelWay

__all__ = ["QUALITIES", "optimize", "optimize_with", "prepare_plan", "report", "require_quality", "restore", "tile"]

log = logging.getLogger("rocm_sd")

QUALITIES = ("exact", "high", "balanced")
_STEPS = 20  # of a picture, roughly: what runs at each of them is searched before what runs once

Target = TypeVar("Target")
Quality: TypeAlias = str | Skipping | Approximation


@dataclass(frozen=True)
class _State:
    report: Report
    device: torch.device
    # In the order in which they were installed; taken back in the opposite one.
    installed: tuple[Installed, ...]
    # Of them, what leaves something out.
    lossy: tuple[Installed, ...]
    on_end: finalize[Any, Any]


# Kept beside the user's objects, not on them: nothing to pickle, nothing that outlives them.
_OPTIMIZED: WeakKeyDictionary[Any, _State] = WeakKeyDictionary()
# By module: what a pipeline that is gone had installed on it. Its modules may live on in others, and nobody else could
# take that back.
_LEFT: WeakKeyDictionary[nn.Module, list[tuple[Installed, ...]]] = WeakKeyDictionary()


def optimize(target: Target, level: str = "auto", quality: Quality = "exact") -> Target:
    """Make a pipeline, a UNet or a VAE faster in place, and return it. A second call with other options starts afresh.

    `level` trades memory for speed and never changes the picture. `quality` sets how far approximations may go: `exact`
    allows none; `high`, `balanced` and a budget in numbers (`psnr=32,ssim=0.97`) what was measured for such a model
    (`rocm-sd tune --quality`); a `Skipping` or an `Approximation` what it says.
    """
    return optimize_with(target, level, quality, EVERYTHING)


def require_quality(quality: Quality) -> None:
    """It is a name that is known, a budget in numbers, or a setting."""
    if isinstance(quality, Skipping | Approximation):
        return
    if "=" in quality:
        parse_budget(quality)
    else:
        require_one_of("quality", quality, QUALITIES)


def optimize_with(
    target: Target, level: str, quality: Quality, parts: Parts, tried: approximation.Tried | None = None
) -> Target:
    """`optimize` with some of its parts. What they leave to stock inside an op or a block is so within
    `parts.in_force()` only. `tried`: what an `optimize` with the same options has found out by drawing.
    """
    _require_fitting(target, level, quality)
    if settings.current().emulate is not None:
        from rocm_sd.verify import device as emulated_device  # noqa: PLC0415 -- needs Triton and tinygrad

        emulated_device.start_if_asked()
    modules = _modules(target)
    restore(target)
    tried = approximation.Tried() if tried is None else tried
    installed: list[Installed] = []
    try:
        _OPTIMIZED[target] = _installed_on(target, modules, level, quality, parts, tried, installed)
    except BaseException:
        # Nobody else could: without a state, `restore` knows of nothing.
        _take_back(installed)
        raise
    _OPTIMIZED[target].on_end.atexit = False
    move_outside(target)
    return target


def _installed_on(
    target: Any,
    modules: dict[str, nn.Module],
    level: str,
    quality: Quality,
    parts: Parts,
    tried: approximation.Tried,
    installed: list[Installed],
) -> _State:
    """`installed`: what has been put on the target so far, one by one: it counts where this fails half-way, too."""
    decision = levels.decide(target, level)
    device = decision.device
    architecture = arch.detect(device)
    graphs = (parts.captured or parts.hoisted) and graphs_wanted(device, allowed=decision.graphs)
    if graphs:
        start_compiling(device, tests=not calibration.wanted(device, graphs=graphs))
    models = denoising.captured_models(target)
    approximated, left_exact = approximation.chosen(target, models, quality, in_halves=decision.sequential_guidance)
    # Before any rule looks at a layer.
    coarse, not_coarse = approximation.install_eight_bits(target, models, approximated, device, tried)
    installed += coarse
    left_exact += not_coarse
    ways = {name: way_of(name, module, device, parts, graphs=graphs) for name, module in modules.items()}
    changes: list[Change] = []
    installed.append(Installed(tuple, lambda: undo(changes)))
    for name, module in modules.items():
        changes += apply(module, ways[name].rules, prefix=name, not_channels_last=ways[name].why_layout_is_kept)
    installed += _relaid((module, ways[name]) for name, module in modules.items())
    if parts.convolution_library:
        installed.append(_convolution_library(modules, device))
    skipped = {model: settings for model, settings in approximated.items() if approximation.are_about_steps(settings)}
    installed += (approximation.install_inside(model) for model in skipped)
    mergings = [found for found in map(approximation.Merging.of, approximated, approximated.values()) if found]
    installed += (merging.install_inside() for merging in mergings)
    as_they_are = {model for name, module in modules.items() if not ways[name].captured for model in subjects(module)}
    replayed = [model for model in models if model not in as_they_are]
    installed += _replayed(target, replayed, parts, device, graphs=graphs)
    so_far = len(installed)
    installed += (_following(target, merging.install_outside) for merging in mergings)
    installed += (_left_out(target, model, settings) for model, settings in skipped.items())
    lossy = [*installed[so_far:], *coarse]
    if parts.calibrated and parts.plan is None and parts.rules is None and calibration.counts(device):
        keys = (calibration.model_key(model) for model in models)
        had = {key: standing(key, device, graphs=graphs) for key in keys}
        again = _Again(ref(target), level, quality, parts, device, graphs, had, tried)
        installed.append(calibration.install(models, device, again.first_call))
    notes = [*left_exact, *dict.fromkeys(note for way in ways.values() for note in way.notes)]
    if parts.hook_questions:
        installed.append(hook_questions.install(modules.values()))
    installed.append(levels.install(target, decision))
    installed += (_planned_vae(module, decision.level) for name, module in modules.items() if is_vae(name, module))
    small = _small_decoder(target, approximated, device, parts if graphs else None)
    installed += small
    lossy += small[:1]
    facts = facts_of(decision, ways.values(), parts, approximated.values(), graphs=graphs)
    return _State(
        Report(architecture.name, level, quality, tuple(changes), tuple(notes), tuple(left_exact), facts),
        device,
        tuple(installed),
        tuple(lossy),
        finalize(target, _leave, [ref(module) for module in modules.values()], tuple(installed)),
    )


def _require_fitting(target: Any, level: str, quality: Quality) -> None:
    require_one_of("level", level, LEVELS)
    require_quality(quality)
    require_named()
    if is_tiled(target) and quality != "exact":
        hint = 'Take quality="exact", or call rocm_sd.untile(pipe) first.'
        raise Unsupported(f"quality {quality}", "a pipeline that is drawn in tiles", hint=hint)


def tile(pipe: Target, size: int | None = None, overlap: float = 0.25) -> Target:
    """Denoise pictures that are larger than `size` pixels a side (the model's own) in tiles; `overlap`: their share
    that neighbours have in common, 0 to 0.5. In place; `untile` takes it off. It approximates: nothing does it unasked.
    """
    state = _OPTIMIZED.get(pipe) if _weakly_held(pipe) else None
    if state is not None and state.lossy:
        hint = "A step that is left out would take another tile's: call rocm_sd.optimize(pipe) first."
        raise Unsupported("tile", f"a pipeline of quality {state.report.quality}", hint=hint)
    return put_tiles(pipe, size, overlap)


def restore(target: Target) -> Target:
    """Bring back what `optimize` found; a target that was not optimised is left as it is. A copy of one that was is
    made stock's, but for layers in 8 bits, whose 16 bits were not copied: a warning says so.
    """
    state = _OPTIMIZED.pop(target, None) if _weakly_held(target) else None
    if state is not None:
        state.on_end.detach()
        _take_back(state.installed)
    _take_back_what_was_left(target)
    if state is None:
        _discard_copies(target)
    return target


def _take_back(several: Sequence[Installed]) -> None:
    for installed in reversed(several):
        installed.restore()


def _leave(modules: list[ref[nn.Module]], several: tuple[Installed, ...]) -> None:
    for held in modules:
        module = held()
        if module is not None:
            _LEFT.setdefault(module, []).append(several)


def _take_back_what_was_left(target: Any) -> None:
    if not _weakly_held(target) or not (isinstance(target, nn.Module) or isinstance(target.components, dict)):
        return
    left = [several for module in levels.modules_of(target).values() for several in _LEFT.pop(module, ())]
    for several in {id(several): several for several in left}.values():
        _take_back(several)
        for module in [module for module, known in _LEFT.items() if any(one is several for one in known)]:
            _LEFT[module] = [one for one in _LEFT[module] if one is not several]


def _discard_copies(target: Any) -> None:
    """A copy of an optimised pipeline has its forwards and its layout, and nobody who would take them back."""
    if not _weakly_held(target) or (not isinstance(target, nn.Module) and not isinstance(target.components, dict)):
        return
    for module in levels.modules_of(target).values():
        if approximation.is_copied_in_eight_bits(module):
            kind = type(module).__name__
            log.warning("this copy of a %s stays in 8 bits: call rocm_sd.restore(pipe) before copying pipe", kind)
        if not sum(forwards.discard(part) for part in module.modules()):
            continue
        for layer in module.modules():
            if isinstance(layer, nn.Conv2d) and not layer.weight.is_contiguous():
                layer.weight.data = layer.weight.data.contiguous()
    scheduler = getattr(target, "scheduler", None)
    if hasattr(scheduler, "__dict__"):
        forwards.discard(scheduler)


def report(target: Any, *, verbose: bool = False) -> Report:
    """What `optimize` did to this pipeline, and what has become of it: print it. `verbose`: with the table of all
    modules and every note.
    """
    state = _OPTIMIZED.get(target) if _weakly_held(target) else None
    if state is None:
        raise Unsupported("report", "a pipeline that was not optimised", hint="Call rocm_sd.optimize(pipe) first.")
    notes = [note for installed in state.installed for note in installed.notes()]
    device = levels.placement(target).device
    if device != state.device:
        notes.append(f"its weights are on {device} now, and it was optimised for {state.device}: call optimize again")
    before = state.report
    # What has changed since then may run as stock does.
    changes = tuple(change.now() for change in before.changes)
    tiled = tile_notes(target)
    approximated = [one for installed in state.lossy for one in installed.approximated()]
    facts = replace(
        before.facts,
        graphs=tuple(one for installed in state.installed for one in installed.graphs()),
        approximated=tuple([Approximated("the whole picture by tiles")] if tiled else []) + tuple(approximated),
        fell_back=tuple(now for was, now in zip(before.changes, changes, strict=True) if was.replaced > now.replaced),
        moved_to=str(device) if device != state.device else None,
    )
    left_out = (*before.approximations, *tiled, *(note for installed in state.lossy for note in installed.notes()))
    return replace(
        before,
        changes=changes,
        notes=(*tiled, *notes, *before.notes),
        approximations=left_out,
        facts=facts,
        verbose=verbose,
    )


def prepare_plan(model: nn.Module, plan: Plan, mode: str) -> Callable[[], None] | None:
    """Have a model run by one plan, in a worker that measures it; the answer takes it off again.

    None, and the model as it was, where a plan is all about rules and none of them fits.
    """
    parts = Parts(plan=plan.name, captured=mode == "captured", hoisted=mode != "none", convolution_library=False)
    optimize_with(model, "performance", "exact", parts)
    if plan.rules and not report(model).replaced:
        restore(model)
        return None
    return partial(_restored, model)


def _restored(model: nn.Module) -> None:
    restore(model)


@dataclass(frozen=True)
class _Again:
    """Measure a model whose call comes in new shapes, and optimise the target anew where another plan is better than
    the one that its models `had`: it may have been measured for another target, too.
    """

    target: ref[Any]
    level: str
    quality: Quality
    parts: Parts
    device: torch.device
    graphs: bool
    had: Mapping[str, str | None]
    tried: approximation.Tried

    def first_call(self, model: nn.Module, call: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Note it, and measure it where that is wanted. Whether the target was optimised anew."""
        known = denoiser(model)
        subject = calibration.Subject(model, args, kwargs, _STEPS if known is not None and known.every_step else 1)
        self._note(subject)
        key = subject.key
        plan = calibration.measured(key, self.device, graphs=self.graphs, call=call)
        if plan is None and key not in unmeasured and calibration.wanted(self.device, graphs=self.graphs):
            self._measure(subject)
        target = self.target()
        if target is None or standing(key, self.device, graphs=self.graphs) == self.had.get(key):
            return False
        optimize_with(target, self.level, self.quality, self.parts, self.tried)
        return True

    def _note(self, subject: calibration.Subject) -> None:
        """For `rocm-sd tune`, which tunes what was drawn with."""
        target = self.target()
        for owner in () if target is None else levels.modules_of(target).values():
            part = next((name for name in ("", "decoder") if getattr(owner, name, owner) is subject.model), None)
            if part is not None:
                calibration.note(owner, part, subject.args, subject.kwargs, subject.times)
                return

    def _measure(self, subject: calibration.Subject) -> None:
        model, key = subject.model, subject.key
        subjects = [subject, *self._others(model, subject.args, subject.kwargs)]
        try:
            done = calibration.measure_with_progress(subjects, self.device, prepare_plan, graphs=self.graphs)
        except calibration.NotMeasured as reason:
            alike = subjects[:1] if isinstance(reason, calibration.CannotBeRebuilt) else subjects
            unmeasured.update({subject.key: str(reason) for subject in alike})
            log.warning("%s is not measured here, and runs as the shipped data say: %s", type(model).__name__, reason)
        else:
            unmeasured.update(done.left_out)
            if done.interrupted:
                raise KeyboardInterrupt
        if calibration.measured(key, self.device, graphs=self.graphs) is None:
            # Another process may have removed the file: a model that waits for its plan would be measured for ever.
            unmeasured.setdefault(key, "what was measured is not there any more")

    def _others(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[calibration.Subject]:
        """The VAE's decoder, which a pipeline calls last: measured with the first model, it is ready by then."""
        target, known = self.target(), denoiser(model)
        vae: Any = getattr(target, "vae", None)
        decoder = getattr(vae, "decoder", None)
        if known is None or not known.is_unet or decoder is None or denoiser(decoder) is None:
            return []
        sample = kwargs.get("sample", args[0] if args else None)
        weight = next(decoder.parameters())
        # Such a VAE is turned to float32 for the decoding.
        upcast = getattr(vae.config, "force_upcast", False) and weight.dtype is torch.float16
        key = calibration.model_key(decoder)
        if upcast or not isinstance(sample, torch.Tensor) or sample.dim() != 4 or key in unmeasured:
            return []
        count = sample.shape[0] // (2 if getattr(target, "do_classifier_free_guidance", False) else 1)
        shape = (max(1, count), vae.config.latent_channels, *sample.shape[2:])
        subject = calibration.Subject(decoder, (torch.zeros(shape, dtype=weight.dtype, device=self.device),), {})
        known_here = calibration.measured(key, self.device, graphs=self.graphs, call=subject.call)
        return [] if known_here is not None else [subject]


def _replayed(
    target: Any, models: list[nn.Module], parts: Parts, device: torch.device, *, graphs: bool
) -> Iterator[Installed]:
    """The models and the encoders of a pipeline from graphs, where there are any; the report names the encoders."""
    wanted = graphs and parts.captured and parts.encoders
    coding = captured_encoders(target, device) if wanted else {}
    if graphs:
        yield denoising.install(target, models, parts, coding)
    elsewhere = "its weights lie elsewhere between its calls" if wanted else "nothing is captured here"
    yield Installed(encoder_notes(target, coding, elsewhere), lambda: None)


def _left_out(target: Any, unet: nn.Module, settings: list[Setting]) -> Installed:
    return _following(target, partial(approximation.install_outside, target, unet, settings))


def _following(target: Any, install: Callable[[Callable[[], Any]], Installed]) -> Installed:
    """What asks which schedule the pipeline runs, for as long as it is installed."""
    run_of, stop = denoising.follow_schedule(target)
    try:
        installed = install(run_of)
    except BaseException:
        stop()
        raise

    def restore() -> None:
        installed.restore()
        stop()

    return replace(installed, restore=restore)


def _small_decoder(
    target: Any, approximated: Mapping[nn.Module, list[Setting]], device: torch.device, parts: Parts | None
) -> list[Installed]:
    """`parts`: of what captures it, or None where nothing is captured."""
    settings = next(iter(approximated.values()), [])
    if not approximation.wants_small_decoder(settings):
        return []
    installed, models = approximation.install_small_decoder(target, settings, device)
    return [installed, *([denoising.install(target, models, parts)] if parts is not None and models else [])]


def _weakly_held(target: Any) -> bool:
    return isinstance(target, nn.Module) or hasattr(target, "components")


def _modules(target: Any) -> dict[str, nn.Module]:
    if not isinstance(target, nn.Module) and not isinstance(getattr(target, "components", None), dict):
        raise Unsupported(
            "optimize",
            f"a {type(target).__name__}: it takes a Diffusers pipeline or a torch module",
            hint="Load one with diffusers.StableDiffusionPipeline.from_pretrained(...).",
        )
    return levels.modules_of(target)


def _relaid(models: Iterable[tuple[nn.Module, ModelWay]]) -> Iterator[Installed]:
    """One for each reason; most pipelines have one."""
    by_reason: dict[str, list[nn.Module]] = {}
    for model, way in models:
        if way.why_layout_is_kept is None:
            by_reason.setdefault(way.layout.why, []).append(model)
    for why, modules in by_reason.items():
        yield convolutions.lay_out(modules, why)


def _convolution_library(modules: dict[str, nn.Module], device: torch.device) -> Installed:
    library = convolutions.choose_library(device)
    vaes = {name: is_vae(name, module) for name, module in modules.items()}
    models = [
        model for name in vaes for model in convolutions.convolving_models(modules[name], library, is_vae=vaes[name])
    ]
    return convolutions.install_library(models, library, has_vae=any(vaes.values()))


def _planned_vae(module: Any, level: str) -> Installed:
    held = ref(module)

    def ready(z: torch.Tensor) -> bool:
        decoder = getattr(held(), "decoder", None)
        return decoder is not None and denoising.holds(decoder, z)

    return vae.install(module, level, ready=ready)
