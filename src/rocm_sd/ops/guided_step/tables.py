"""Schedulers as tables for guided_step: what each step does to (e, noise, states), as coefficients.

Each function writes its scheduler's equations once, on unit vectors in place of tensors: what comes out of them is the
row of coefficients. The arithmetic is float64; a table is float32. The numbers that a function takes (alphas_cumprod,
timesteps, sigmas) are those of the scheduler as it will run, so spacing, Karras sigmas, a zero terminal SNR or a start
in the middle of the schedule are in them already.

A prediction is of the noise ("epsilon"), of the velocity ("v_prediction") or of the picture ("sample"). Clipping and
thresholding are not linear and have no table.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import expm1, inf, log, sqrt
from typing import TYPE_CHECKING, TypeAlias

import torch

from rocm_sd.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["PREDICTIONS", "StepTable", "ddim", "dpmpp_2m", "euler", "euler_ancestral", "lcm", "pndm", "unipc"]

PREDICTIONS = ("epsilon", "v_prediction", "sample")
Numbers: TypeAlias = "Sequence[float] | torch.Tensor"
Vector: TypeAlias = torch.Tensor


@dataclass(frozen=True)
class StepTable:
    """`coefficients`: float32 [steps, states + 1, states + 2], on the CPU.

    A run starts from `states` states, the sample first and zeros behind it, and from the model input
    `first_scale * sample`. Where `noisy`, each step takes standard normal noise. `pictures`: for each step the
    coefficients of e and of the sample in the picture that it goes towards, for schedulers which return that, too.
    """

    coefficients: torch.Tensor
    states: int
    first_scale: float = 1.0
    noisy: bool = False
    pictures: tuple[tuple[float, float], ...] | None = None


def _unit_vectors(states: int) -> tuple[Vector, Vector, list[Vector]]:
    """The prediction e, the noise and each state."""
    e, noise, *known = torch.eye(states + 2, dtype=torch.float64)
    return e, noise, known


def _table(
    steps: list[list[Vector]], first_scale: float = 1.0, noisy: bool = False, pictures: list[Vector] | None = None
) -> StepTable:
    coefficients = torch.stack([torch.stack(rows) for rows in steps]).to(torch.float32)
    known = None if pictures is None else tuple((float(picture[0]), float(picture[2])) for picture in pictures)
    return StepTable(coefficients, coefficients.shape[1] - 1, first_scale, noisy, known)


def _floats(values: Numbers) -> list[float]:
    return [float(value) for value in values]


def _known(prediction: str, allowed: tuple[str, ...] = PREDICTIONS) -> None:
    if prediction not in allowed:
        raise InvalidOption("prediction", prediction, list(allowed))


def _picture(prediction: str, e: Vector, x: Vector, alpha: float, sigma: float) -> Vector:
    """The predicted picture x0, where x = alpha * x0 + sigma * noise."""
    if prediction == "epsilon":
        return (x - sigma * e) / alpha
    return e if prediction == "sample" else alpha * x - sigma * e


def _noise(prediction: str, e: Vector, x: Vector, alpha: float, sigma: float) -> Vector:
    """The predicted noise, where x = alpha * x0 + sigma * noise."""
    if prediction == "epsilon":
        return e
    return (x - alpha * e) / sigma if prediction == "sample" else alpha * e + sigma * x


def ddim(
    alphas_cumprod: Numbers,
    timesteps: Numbers,
    stride: int,
    final_alpha_cumprod: float = 1.0,
    prediction: str = "epsilon",
    eta: float = 0.0,
) -> StepTable:
    """`stride`: training steps from one timestep to the next; `eta`: share of the noise that is drawn anew."""
    _known(prediction)
    alphas = _floats(alphas_cumprod)
    e, noise, (x,) = _unit_vectors(1)
    steps, pictures = [], []
    for t in map(int, timesteps):
        at, to = alphas[t], alphas[t - stride] if t >= stride else final_alpha_cumprod
        picture = _picture(prediction, e, x, sqrt(at), sqrt(1 - at))
        direction = _noise(prediction, e, x, sqrt(at), sqrt(1 - at))
        drawn = eta * sqrt((1 - to) / (1 - at) * (1 - at / to))
        new = sqrt(to) * picture + sqrt(1 - to - drawn**2) * direction + drawn * noise
        steps.append([new, new])
        pictures.append(picture)
    return _table(steps, noisy=eta > 0, pictures=pictures)


def pndm(
    alphas_cumprod: Numbers,
    timesteps: Numbers,
    stride: int,
    final_alpha_cumprod: float = 1.0,
    prediction: str = "epsilon",
) -> StepTable:
    """The linear multistep part alone (skip_prk_steps): the second of the timesteps stands there twice.

    The first two calls are one step of Heun's method: call 0 goes ahead, call 1 averages both predictions and starts
    again from the sample of call 0, which it finds where the third past prediction will be.
    """
    _known(prediction, PREDICTIONS[:2])
    alphas = _floats(alphas_cumprod)
    e, _, (x, e1, e2, e3) = _unit_vectors(4)
    weights = (e, (3 * e - e1) / 2, (23 * e - 16 * e1 + 5 * e2) / 12, (55 * e - 59 * e1 + 37 * e2 - 9 * e3) / 24)
    steps = []
    for call, now in enumerate(map(int, timesteps)):
        source, mixed, remembered = x, weights[min(max(call - 1, 0), 3)], [e, e1, e2]
        t = now
        if call == 0:
            remembered = [e, e2, x]
        elif call == 1:
            source, mixed, remembered, t = e3, (e + e1) / 2, [e1, e2, e3], now + stride
        at, to = alphas[t], alphas[t - stride] if t >= stride else final_alpha_cumprod
        direction = _noise(prediction, mixed, source, sqrt(at), sqrt(1 - at))
        new = sqrt(to / at) * source - (to - at) / (at * sqrt(1 - to) + sqrt(at * (1 - at) * to)) * direction
        steps.append([new, *remembered, new])
    return _table(steps)


def lcm(
    alphas_cumprod: Numbers,
    timesteps: Numbers,
    prediction: str = "epsilon",
    timestep_scaling: float = 10.0,
    sigma_data: float = 0.5,
) -> StepTable:
    """Latent consistency: each step goes to the picture and, except for the last, back to the next noise level."""
    _known(prediction)
    alphas, times = _floats(alphas_cumprod), [int(t) for t in timesteps]
    e, noise, (x,) = _unit_vectors(1)
    steps, pictures = [], []
    for t, after in zip(times, [*times[1:], None], strict=True):
        scaled = t * timestep_scaling
        skip, out = sigma_data**2 / (scaled**2 + sigma_data**2), scaled / sqrt(scaled**2 + sigma_data**2)
        new = out * _picture(prediction, e, x, sqrt(alphas[t]), sqrt(1 - alphas[t])) + skip * x
        pictures.append(new)
        if after is not None:
            new = sqrt(alphas[after]) * new + sqrt(1 - alphas[after]) * noise
        steps.append([new, new])
    return _table(steps, noisy=True, pictures=pictures)


def _input_scale(sigma: float) -> float:
    """What a model that was trained on alpha * x0 + sigma * noise is given for x0 + sigma * noise."""
    return 1 / sqrt(sigma * sigma + 1)


def _euler(sigmas: Numbers, prediction: str, ancestral: bool) -> StepTable:
    _known(prediction)
    levels = _floats(sigmas)
    e, noise, (x,) = _unit_vectors(1)
    steps, pictures = [], []
    for at, to in pairwise(levels):
        up = to * sqrt(at * at - to * to) / at if ancestral else 0.0
        alpha = _input_scale(at)
        picture = _picture(prediction, e, alpha * x, alpha, alpha * at)
        new = x + (x - picture) * ((sqrt(to * to - up * up) - at) / at) + up * noise
        steps.append([new, _input_scale(to) * new])
        pictures.append(picture)
    return _table(steps, _input_scale(levels[0]), ancestral, pictures)


def euler(sigmas: Numbers, prediction: str = "epsilon") -> StepTable:
    """`sigmas`: one a step and the last one's goal, mostly 0; x = x0 + sigma * noise."""
    return _euler(sigmas, prediction, ancestral=False)


def euler_ancestral(sigmas: Numbers, prediction: str = "epsilon") -> StepTable:
    """As `euler`, but part of each step's noise is drawn anew."""
    return _euler(sigmas, prediction, ancestral=True)


def dpmpp_2m(
    sigmas: Numbers, prediction: str = "epsilon", first_order_end: bool | None = None, sde: bool = False
) -> StepTable:
    """DPM-Solver++ (2M), midpoint; `sigmas` as for `euler`, though x = alpha * x0 + sigma * noise; `sde`: 2M SDE.

    The first step is of first order, and so is the last where it goes to 0 or, unless it is set, where there are
    fewer than 15.
    """
    _known(prediction)
    levels = _floats(sigmas)
    count = len(levels) - 1
    if first_order_end is None:
        first_order_end = count < 15
    e, noise, (x, before) = _unit_vectors(2)
    steps = []
    for step, (at, to) in enumerate(pairwise(levels)):
        alpha_at, alpha_to = _input_scale(at), _input_scale(to)
        picture = _picture(prediction, e, x, alpha_at, alpha_at * at)
        target = picture
        last = step == count - 1
        if step and not (last and (first_order_end or to == 0)):
            # Half of the picture's change over this step, if it goes on as over the one before.
            target = picture + 0.5 * (picture - before) * (log(at / to) / log(levels[step - 1] / at))
        # exp(-h), h the change of the logarithm of alpha / sigma; finite also where sigma becomes 0.
        shrink = to / at
        if sde:
            kept = shrink * shrink * alpha_to / alpha_at
            new = kept * x + alpha_to * (1 - shrink**2) * target + alpha_to * to * sqrt(1 - shrink**2) * noise
        else:
            new = shrink * alpha_to / alpha_at * x + alpha_to * (1 - shrink) * target
        steps.append([new, picture, new])
    return _table(steps, noisy=sde)


def unipc(
    sigmas: Numbers, prediction: str = "epsilon", lower_order_final: bool = True, uncorrected: Sequence[int] = ()
) -> StepTable:
    """UniPC of order 2 with B(h) = exp(h) - 1 ("bh2") on predicted pictures; `sigmas` as for `dpmpp_2m`.

    Each prediction first corrects the sample that it was made at, then takes the next step. `uncorrected`: the numbers
    of the steps whose result is left as predicted. States: the sample, the corrected one before it, and the last two
    pictures.
    """
    _known(prediction)
    levels = _floats(sigmas)
    count = len(levels) - 1
    e, _, (x, before, m1, m2) = _unit_vectors(4)

    def step_from(source: Vector, at: float, to: float) -> tuple[Vector, float, float]:
        """The first-order step without its picture, the factor of the picture, and hh."""
        alpha_at, alpha_to = _input_scale(at), _input_scale(to)
        hh = log(to / at) if to else -inf
        return to * alpha_to / (at * alpha_at) * source, -alpha_to * expm1(hh), hh

    def change(at: float, to: float, earlier: float) -> float:
        """The step before this one, in units of this one; negative."""
        return -log(earlier / at) / log(at / to)

    steps: list[list[Vector]] = []
    order = 0
    for step in range(count):
        at, to = levels[step], levels[step + 1]
        alpha = _input_scale(at)
        picture = _picture(prediction, e, x, alpha, alpha * at)
        sample = x
        if step and step - 1 not in uncorrected:
            rest, factor, hh = step_from(before, levels[step - 1], at)
            moved = 0.5 * (picture - m1)
            if order == 2:
                ratio = change(levels[step - 1], at, levels[step - 2])
                phi_1 = expm1(hh) / hh - 1
                phi_2 = phi_1 / hh - 0.5
                b1, b2 = phi_1 / expm1(hh), 2 * phi_2 / expm1(hh)
                older = (b1 - b2) / (1 - ratio)
                moved = older * (m2 - m1) / ratio + (b1 - older) * (picture - m1)
            sample = rest + factor * (m1 + moved)
        order = min(2, step + 1, count - step if lower_order_final else 2)
        rest, factor, _ = step_from(sample, at, to)
        target = picture
        if order == 2:
            target = picture + 0.5 * (m1 - picture) / change(at, to, levels[step - 1])
        new = rest + factor * target
        steps.append([new, sample, picture, m1, new])
    return _table(steps)
