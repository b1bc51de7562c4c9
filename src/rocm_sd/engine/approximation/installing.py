"""Put a pipeline's approximation on its models. Of a denoiser's steps in two parts: what picks a branch goes outside of
its graphs, what computes one inside of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import ref

from rocm_sd.engine.approximation import eight_bits
from rocm_sd.engine.approximation.branches import Branches, answer_branch
from rocm_sd.engine.approximation.shipped import are_about_steps, costs
from rocm_sd.engine.denoisers import denoiser
from rocm_sd.engine.installed import Approximated, Installed
from rocm_sd.rewrite import forwards

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import torch
    from torch import nn

    from rocm_sd.engine.approximation.shipped import Setting
    from rocm_sd.engine.schedule import ScheduleRun

__all__ = ["has_halves", "install_eight_bits", "install_inside", "install_outside"]

# Pipelines whose batches are two halves, without the prompt and with it, in this order.
_KINDS = ("", "Img2Img", "Inpaint", "ControlNet", "ControlNetImg2Img", "ControlNetInpaint", "ControlNetInpainting")
_HALVES = tuple(
    f"{family}{kind}Pipeline"
    for family in ("StableDiffusion", "StableDiffusionXL", "StableDiffusion3")
    for kind in _KINDS
)


# What the names of their layers begin with, the decoder's first.
_HALVES_OF_VAE = ("decoder.", "encoder.")


def has_halves(target: Any) -> bool:
    """Whether it is known which half of a guided batch of a pipeline has the prompt."""
    return any(kind.__name__ in _HALVES for kind in type(target).__mro__)


def install_inside(model: nn.Module) -> Installed:
    return Installed(tuple, forwards.surround(model, answer_branch))


def install_outside(
    target: Any, model: nn.Module, settings: list[Setting], run_of: Callable[[], ScheduleRun | None]
) -> Installed:
    held = ref(target)
    known = has_halves(target)

    def is_guided() -> bool:
        return known and bool(getattr(held(), "do_classifier_free_guidance", False))

    def scheduler_of() -> Any:
        return getattr(held(), "scheduler", None)

    branches = Branches(settings, run_of, scheduler_of, is_guided)
    at_work = [True]

    def answer(model: nn.Module, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A wrapper by somebody else may outlive `restore`.
        return branches.answer(model, inner, args, kwargs) if at_work[0] else inner(*args, **kwargs)

    take_off = forwards.surround(model, answer)

    def restore() -> None:
        at_work[0] = False
        branches.clear()
        take_off()

    kind, one_sample = type(model).__name__, getattr(denoiser(model), "samples", 2) == 1
    why = "it is inside of the model" if one_sample else "which half of a batch has the prompt is not known here"
    return Installed(
        lambda: tuple(_notes(kind, settings, branches, None if known else why)),
        restore,
        approximated=lambda: (_approximated(settings, branches),),
    )


def _approximated(settings: list[Setting], branches: Branches) -> Approximated:
    cost = costs(settings if branches.last is None else [branches.last])
    if all(setting.approximation.is_exact for setting in settings):
        return Approximated("steps", cost, settings[0].why)
    left_out = sum(branches.counts[name] for name in ("shallow", "guidance reused", "no guidance"))
    if left_out or not branches.whole_because:
        return Approximated("steps", cost)
    ((reason, _),) = branches.whole_because.most_common(1)
    return Approximated("steps", cost, reason)


def _notes(kind: str, settings: list[Setting], branches: Branches, why_guided: str | None) -> Iterator[str]:
    """`why_guided`: why guidance is computed in every step, if it is."""
    counts = branches.counts
    # Of the pictures so far; before the first one, of each number of steps.
    for setting in settings if branches.last is None else [branches.last]:
        if not setting.approximation.is_exact:
            yield _said(kind, setting, since=branches.last is None)
    if why_guided is not None and any(setting.skipping.skips_guidance for setting in settings):
        yield f"{kind}: guidance is computed in every step: {why_guided}"
    if counts:
        names = ("whole", "shallow", "guidance reused", "no guidance")
        yield f"{kind}: calls so far: {', '.join(f'{counts[name]} {name}' for name in names if counts[name])}"
    for reason, calls in list(branches.whole_because.items()):
        yield f"{kind}: {calls} calls are exact, because {reason}"


def install_eight_bits(
    target: Any,
    models: Iterable[nn.Module],
    approximated: Mapping[nn.Module, list[Setting]],
    device: torch.device,
    tried: eight_bits.Tried,
) -> tuple[list[Installed], list[str]]:
    """Of each model that was in 8 bits before, or where all its settings agree on it; and in words why one is not.
    `device`: where they compute.
    """
    found: list[Installed] = []
    try:
        return found, list(_install_eight_bits(target, models, approximated, device, tried, found))
    except BaseException:
        for installed in reversed(found):
            installed.restore()
        raise


def _install_eight_bits(
    target: Any,
    models: Iterable[nn.Module],
    approximated: Mapping[nn.Module, list[Setting]],
    device: torch.device,
    tried: eight_bits.Tried,
    found: list[Installed],
) -> Iterator[str]:
    vae: Any = getattr(target, "vae", None)
    first = next(iter(approximated.values()), [])
    for model in models:
        decodes = getattr(vae, "decoder", None) is model
        known: nn.Module = vae if decodes else model
        loaded = eight_bits.ready(known)
        if loaded is not None:
            found.append(loaded)
            continue
        # A VAE goes by the settings of the denoiser whose latents it decodes.
        settings = first if decodes else approximated.get(model, [])
        asked = {
            one.from_steps: (one.approximation.eight_bit_decoder, one.approximation.eight_bit_encoder)
            if decodes
            else (one.approximation.eight_bits,)
            for one in settings
        }
        kind, formats = type(known).__name__, set(asked.values())
        agreed = formats.pop() if len(formats) == 1 else ()
        to = next((one for one in agreed if one is not None), None)
        parts = tuple(part for part, one in zip(_HALVES_OF_VAE, agreed, strict=False) if one) if decodes else ("",)
        if len(formats) > 1:
            # Weights are the same for every number of steps.
            each = ", ".join(
                f"{' and '.join(one or 'none' for one in several)} from {steps} on" for steps, several in asked.items()
            )
            search = "measure one of these numbers of steps again: rocm-sd tune --quality MODEL --steps ..."
            yield f"{kind} keeps its dtype: settings differ in eight bits ({each}); {search}"
        if to is None:
            continue
        installed, reason = eight_bits.install(target, known, to, device, tried, parts)
        # Of settings about steps, what is installed for these says where they were measured.
        found.append(
            installed if reason is not None or are_about_steps(settings) else _measured(installed, kind, settings)
        )
        if reason is not None:
            yield reason
        elif min(asked) > 1:
            yield f"{kind}: pictures of fewer than {min(asked)} steps are in {to}, too: not measured"


def _measured(installed: Installed, kind: str, settings: list[Setting]) -> Installed:
    """With where the settings were measured, and at what cost."""
    notes = tuple(_said(kind, setting) for setting in settings if not setting.approximation.is_exact)
    return replace(
        installed,
        notes=lambda: (*installed.notes(), *notes),
        approximated=lambda: [replace(one, cost=costs(settings)) for one in installed.approximated()],
    )


def _said(kind: str, setting: Setting, *, since: bool = True) -> str:
    since_then = f" from {setting.from_steps} steps on" if since and setting.from_steps > 1 else ""
    return f"{kind} is approximated{since_then}: {setting.approximation} ({setting.why})"
