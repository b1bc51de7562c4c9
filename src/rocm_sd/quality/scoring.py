"""CLIP score and FID of pictures as they come, through torchmetrics; what it has summed up can be kept, to go on later.

    scorer = Scorer(clip=load, reference=read_statistics(file), inception=weights)
    scorer.add(images, prompts)         # [B, 3, H, W] in 0..1
    scorer.scores()                     # Accuracy(clip_score=31.7, fid=23.4)

The reference of an FID is the mean and the covariance of Inception features of real pictures, as an .npz with `mu` and
`sigma`: what pytorch-fid writes, and MLPerf ships for COCO.
"""

from __future__ import annotations

import json
import struct
import warnings
import zipfile
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rocm_sd.errors import InvalidOption, MissingDependency, RocmSdError, first_line
from rocm_sd.files import whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

__all__ = ["Accuracy", "Scorer", "Statistics", "read_statistics"]

# Of 2048 features in float64 a covariance takes 32 MiB.
_MOST_BYTES = 2**28
# Each of zipfile, zlib, struct and numpy has its own for what is torn, encrypted or packed in another way.
_TORN = (
    *(OSError, ValueError, EOFError, KeyError, TypeError, SyntaxError, ArithmeticError, MemoryError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error, struct.error),
)
# How many real pictures there were is not known, and does not count: their mean and covariance do.
_REAL = 2
_CLIP_STATES = ("score", "n_samples")
_FID_STATES = ("fake_features_sum", "fake_features_cov_sum", "fake_features_num_samples")


@dataclass(frozen=True)
class Accuracy:
    """None where it was not asked for, or there are too few pictures for it."""

    clip_score: float | None = None
    fid: float | None = None


@dataclass(frozen=True)
class Statistics:
    """mean: [D]; covariance: [D, D]; float64."""

    mean: Tensor
    covariance: Tensor


def read_statistics(file: Path) -> Statistics:
    """`mu` and `sigma` of an .npz; nothing in it is executed, and what is no covariance is refused."""

    def refused(why: str) -> InvalidOption:
        hint = f"It takes an .npz with mu [D] and sigma [D, D] of Inception features: {why}."
        return InvalidOption("--reference", file, [], hint=hint)

    try:
        with zipfile.ZipFile(file) as packed:
            if sum(entry.file_size for entry in packed.infolist()) > _MOST_BYTES:
                raise refused("this one is larger than any")
        with np.load(file, allow_pickle=False) as loaded:
            missing = {"mu", "sigma"} - set(loaded.files)
            if missing:
                raise refused(f"this one has no {' and no '.join(sorted(missing))}")
            mean, covariance = (np.asarray(loaded[name], dtype=np.float64) for name in ("mu", "sigma"))
    except _TORN as error:
        raise refused(first_line(error)) from error
    if mean.ndim != 1 or len(mean) < 1 or covariance.shape != (len(mean), len(mean)):
        raise refused(f"this one has shapes {mean.shape} and {covariance.shape}")
    if not np.isfinite(mean).all() or not np.isfinite(covariance).all():
        raise refused("some numbers of this one are not finite")
    if not np.allclose(covariance, covariance.T, rtol=1e-4, atol=1e-8) or (np.diagonal(covariance) < 0).any():
        raise refused("its sigma is no covariance")
    return Statistics(torch.from_numpy(mean), torch.from_numpy(covariance))


class Scorer:
    """`clip` gives a CLIP model and its processor; `inception`: the weights of torch-fidelity's network as a file, or a
    network of one's own that gives [B, D] features, with the side of the pictures that it takes.
    """

    def __init__(
        self,
        *,
        clip: Callable[[], tuple[Any, Any]] | None = None,
        reference: Statistics | None = None,
        inception: Path | tuple[nn.Module, int] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.pictures = 0
        self._device = torch.device(device)
        self._clip = None if clip is None else _clip_metric(clip).to(self._device)
        self._fid = None if reference is None else _fid_metric(reference, inception).to(self._device)

    def add(self, images: Tensor, prompts: Sequence[str]) -> None:
        """images: [B, 3, H, W] in 0..1, and the prompt of each."""
        given = images.detach().to(self._device, torch.float32).clamp(0, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self._clip is not None:
                self._clip.update((given * 255).round().to(torch.uint8), list(prompts))
            if self._fid is not None:
                self._fid.update(given, real=False)
        self.pictures += len(given)

    def scores(self) -> Accuracy:
        with warnings.catch_warnings():
            # Of states that were read from a file torchmetrics says that nothing was added.
            warnings.simplefilter("ignore")
            score = None if self._clip is None or not self.pictures else float(self._clip.compute())
            # A distance of nearly nothing comes out of the eigenvalues as small a number below zero.
            distance = self._fid.compute() if self._fid is not None and self.pictures > 1 else None
        fid = None if distance is None else max(0.0, float(distance))
        return Accuracy(score, fid)

    def save(self, file: Path, about: Mapping[str, Any]) -> None:
        """All that `add` has summed up; `about` is what it is of, in words of JSON."""
        from safetensors.torch import save_file  # noqa: PLC0415 -- only where a run is kept

        with whole(file) as unfinished:
            metadata = {"about": json.dumps(dict(about), sort_keys=True), "pictures": str(self.pictures)}
            save_file(
                {name: tensor.cpu().contiguous() for name, tensor in self._states().items()}, unfinished, metadata
            )

    def load(self, file: Path, about: Mapping[str, Any]) -> bool:
        """Go on with what was saved, if it is there, whole, and about the same."""
        from safetensors import SafetensorError, safe_open  # noqa: PLC0415 -- only where a run is kept

        try:
            with safe_open(file, framework="pt") as opened:
                metadata = opened.metadata() or {}
                found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 -- it is no mapping
        except (OSError, SafetensorError):
            return False
        wanted, count = self._states(), metadata.get("pictures", "")
        if metadata.get("about") != json.dumps(dict(about), sort_keys=True) or not count.isdecimal():
            return False
        if {n: (t.shape, t.dtype) for n, t in found.items()} != {n: (t.shape, t.dtype) for n, t in wanted.items()}:
            return False
        for name, tensor in found.items():
            metric, _, state = name.partition(".")
            setattr(self._clip if metric == "clip" else self._fid, state, tensor.to(self._device))
        self.pictures = int(count)
        return True

    def _states(self) -> dict[str, Tensor]:
        both = (("clip", self._clip, _CLIP_STATES), ("fid", self._fid, _FID_STATES))
        return {f"{n}.{state}": getattr(m, state) for n, m, states in both if m is not None for state in states}


def _clip_metric(load: Callable[[], tuple[Any, Any]]) -> Any:
    try:
        from torchmetrics.multimodal.clip_score import CLIPScore  # noqa: PLC0415 -- optional
    except ModuleNotFoundError as error:
        raise MissingDependency(error.name or "torchmetrics", "quality") from error
    return CLIPScore(model_name_or_path=load)


def _fid_metric(reference: Statistics, inception: Path | tuple[nn.Module, int] | None) -> Any:
    try:
        from torchmetrics.image.fid import FrechetInceptionDistance  # noqa: PLC0415 -- optional
    except ModuleNotFoundError as error:
        raise MissingDependency(error.name or "torchmetrics", "quality") from error
    if isinstance(inception, tuple):
        network, side = inception
        options: dict[str, Any] = {"feature": network, "input_img_size": (3, side, side)}
    else:
        options = {"feature": 2048, "feature_extractor_weights_path": None if inception is None else str(inception)}
    try:
        metric: Any = FrechetInceptionDistance(normalize=True, **options)
    except ModuleNotFoundError as error:
        raise RocmSdError(
            "torch-fidelity, which has the network of the FID, is not installed.",
            hint="Type: pip install torch-fidelity; or leave out --reference.",
        ) from error
    except (OSError, RuntimeError, ValueError) as error:
        raise InvalidOption(
            "--inception", inception, [], hint=f"It takes torch-fidelity's Inception weights ({first_line(error)})."
        ) from error
    mean, covariance = reference.mean, reference.covariance
    if metric.real_features_sum.shape != mean.shape:
        hint = f"It has {len(mean)} features, and the network gives {len(metric.real_features_sum)}."
        raise InvalidOption("--reference", f"statistics of {len(mean)} features", [], hint=hint)
    # torchmetrics keeps sums: of `_REAL` pictures with that mean and that covariance.
    metric.real_features_sum = _REAL * mean
    metric.real_features_cov_sum = (_REAL - 1) * covariance + _REAL * torch.outer(mean, mean)
    metric.real_features_num_samples = torch.tensor(_REAL)
    return metric
