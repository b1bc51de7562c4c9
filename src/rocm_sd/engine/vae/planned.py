"""decode and encode of a VAE by plan: whole, one picture at a time, or in strips, chosen before memory can run out; and
a picture that float16 could not hold is computed again with a wider range where it overflowed.
"""

from __future__ import annotations

import sys
import weakref
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from rocm_sd import arch, transforms
from rocm_sd.arch.torch_libraries import why_not_fused
from rocm_sd.engine.installed import Installed
from rocm_sd.engine.memory import free_memory, is_capturing, is_out_of_memory, release
from rocm_sd.engine.vae.plan import MIB, VaePlan, Way, is_channels_last, plan, predicted_peak
from rocm_sd.engine.vae.steps import Kind, VaeStep, decoder_steps, encoder_steps, why_not_in_strips, why_unknown
from rocm_sd.engine.vae.tiles import Safety, Store, in_strips
from rocm_sd.rewrite import forwards

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

__all__ = ["decode_together", "decode_whole", "encode_whole", "install", "safe_dtype"]

# Sizes that sentences and predictions are kept of: a program that decodes ever new ones keeps the latest.
_KEPT = 32
# Those whose decoder's forward is one of several processes.
_TOGETHER: weakref.WeakSet[Any] = weakref.WeakSet()


def decode_whole(vae: Any, z: torch.Tensor) -> torch.Tensor:
    """What stock does with latents when nothing is sliced or tiled."""
    y: torch.Tensor = vae.decoder(z if vae.post_quant_conv is None else vae.post_quant_conv(z))
    return y


def encode_whole(vae: Any, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = vae.encoder(x)
    return y if vae.quant_conv is None else vae.quant_conv(y)


def decode_together(vae: Any) -> Callable[[], None]:
    """Have the decoder called as stock calls it, however little memory is free; how to end that.

    For processes that compute its forward together: one that went its own way would leave the others waiting.
    """
    _TOGETHER.add(vae)
    held = weakref.ref(vae)

    def end() -> None:
        if (alive := held()) is not None:
            _TOGETHER.discard(alive)

    return end


def safe_dtype(device: torch.device) -> torch.dtype:
    """A dtype with float32's range: bfloat16 where the GPU has it, as float32 has no matrix unit on most of them."""
    return torch.bfloat16 if arch.detect(device).has_bf16 else torch.float32


@dataclass(frozen=True)
class _Direction:
    """`whole` computes a batch at once; `ready` says whether its memory is set aside already, as a graph's is."""

    name: str
    steps: Callable[[Any], tuple[VaeStep, ...]]
    whole: Callable[[Any, torch.Tensor], torch.Tensor]
    ready: Callable[[torch.Tensor], bool]

    @property
    def encodes(self) -> bool:
        return self.steps is encoder_steps


@dataclass(frozen=True)
class _VaeCall:
    """One call of decode or encode."""

    vae: Any
    direction: _Direction
    x: torch.Tensor
    steps: tuple[VaeStep, ...]

    def why_no_strips(self) -> str | None:
        return why_not_in_strips(self.vae, self.steps, self.x.device)

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        with self._attention():
            return self.direction.whole(self.vae, x)

    def _attention(self) -> AbstractContextManager[Any]:
        """Where torch's fused kernels are known to be wrong for a head of this model, they are not to be chosen."""
        here = arch.detect(self.x.device)
        heads = (step.module.inner_dim // step.module.heads for step in self.steps if step.kind is Kind.ATTENTION)
        wrong = any(why_not_fused(here, head) for head in heads)
        return sdpa_kernel([SDPBackend.MATH]) if wrong else nullcontext()

    def in_strips(self, picture: torch.Tensor, budget: int | None, safety: Safety | None = None) -> torch.Tensor:
        store = Store(picture.device, budget or sys.maxsize, is_channels_last(self.steps[0].module))
        return in_strips(self.steps, picture, store, safety)


@dataclass
class _Engine:
    vae: weakref.ref[Any]
    level: str
    _notes: dict[tuple[str, ...], str] = field(default_factory=dict)
    # A prediction takes 2 ms where it asks each op for its choice; sizes come again.
    _predicted: dict[tuple[object, ...], int] = field(default_factory=dict)

    def takes(self, vae: Any, x: torch.Tensor) -> bool:
        # A copy of the VAE has weights of its own, and this engine the graphs of another.
        if self.vae() is not vae or _falls_back(vae, x):
            return False
        # Parts of it may have been exchanged since it was optimised.
        return why_unknown(vae) is None

    def run(self, direction: _Direction, x: torch.Tensor) -> torch.Tensor:
        vae = self.vae()
        _bring_weights(vae)
        call = _VaeCall(vae, direction, x, direction.steps(vae))
        if is_capturing(x.device):
            return call.whole(x)
        if direction.ready(x):
            y = call.whole(x)
        elif call.vae in _TOGETHER and not direction.encodes:
            y = _computed(call, VaePlan(Way.SLICED if call.vae.use_slicing else Way.WHOLE, 0, None))
        else:
            y = self._until_it_fits(call, self._plan(call), lambda chosen: _computed(call, chosen))
        if x.dtype is torch.float16 and not bool(torch.isfinite(y).all()):
            return self._with_wider_range(call, y)
        return y

    def _predict(self, call: _VaeCall, batch: int, dtype: torch.dtype) -> int:
        shape, device, encodes = (batch, *call.x.shape[1:]), call.x.device, call.direction.encodes
        key = (shape, dtype, device, encodes)
        if key not in self._predicted:
            if len(self._predicted) >= _KEPT:
                self._predicted.clear()
            self._predicted[key] = predicted_peak(call.vae, shape, dtype, device=device, encode=encodes)
        return self._predicted[key]

    def _plan(self, call: _VaeCall) -> VaePlan:
        batch, free = len(call.x), free_memory(call.x.device)
        try:
            whole, one = (self._predict(call, count, call.x.dtype) for count in (batch, 1))
        except AttributeError as error:
            # Somebody's own layer in place of a convolution.
            self._note(call, "plan", f"whole: its memory cannot be foreseen ({error})")
            return VaePlan(Way.WHOLE, 0, None)
        options: dict[str, Any] = {"batch": batch, "free": free, "level": self.level}
        options["slices"] = bool(call.vae.use_slicing)
        chosen = plan(whole, one, **options)
        why = ""
        if chosen.way is Way.TILED:
            reason = call.why_no_strips()
            if reason is not None:
                chosen = plan(whole, one, tiles=False, **options)
                why = f"; it cannot be tiled: {reason}"
        known = "" if free is None else f", {free // MIB} MiB are free"
        self._note(call, "plan", f"{chosen.way.value} ({whole / MIB:.0f} MiB if whole{known}){why}")
        return chosen

    def _until_it_fits(
        self, call: _VaeCall, chosen: VaePlan, compute: Callable[[VaePlan], torch.Tensor]
    ) -> torch.Tensor:
        while True:
            try:
                return compute(chosen)
            except Exception as error:
                smaller = None
                if is_out_of_memory(error):
                    smaller = chosen.smaller(len(call.x), tiles=call.why_no_strips() is None)
                if smaller is None:
                    raise
            # Outside of the handler, where the error and the frames in it no longer hold tensors.
            release(call.x.device)
            self._note(call, "memory", f"the {chosen.way.value} way ran out of memory; {smaller.way.value} was next")
            chosen = smaller

    def _with_wider_range(self, call: _VaeCall, y: torch.Tensor) -> torch.Tensor:
        """The pictures that are not finite, again: float16 where it is enough, the safe dtype where it is not."""
        reason = call.why_no_strips()
        if reason is None and not bool(torch.isfinite(call.x).all()):
            reason = "the input was not finite either"
        if reason is not None:
            self._note(call, "range", f"the result is not finite, and was left so: {reason}")
            return y
        safety = Safety(safe_dtype(call.x.device))
        needed = self._predict(call, 1, torch.float32)
        chosen = plan(needed, needed, batch=1, free=free_memory(call.x.device), level=self.level)

        def again(chosen: VaePlan) -> torch.Tensor:
            pictures = zip(torch.split(call.x, 1), torch.split(y, 1), strict=True)
            return torch.cat(
                [
                    result if bool(torch.isfinite(result).all()) else call.in_strips(picture, chosen.budget, safety)
                    for picture, result in pictures
                ]
            )

        wider = self._until_it_fits(call, replace(chosen, way=Way.TILED), again)
        where = ", ".join(dict.fromkeys(safety.widened)) or "no step"
        outcome = "finite" if bool(torch.isfinite(wider).all()) else "not finite either"
        dtype = str(safety.dtype).removeprefix("torch.")
        self._note(call, "range", f"float16 overflowed, and was {outcome} with {where} in {dtype}")
        return wider

    def _note(self, call: _VaeCall, kind: str, what: str) -> None:
        shape = "x".join(map(str, call.x.shape))
        key = (call.direction.name, shape, kind)
        self._notes.pop(key, None)
        self._notes[key] = f"VAE {call.direction.name} of {shape}: {what}"
        while len(self._notes) > _KEPT:
            del self._notes[next(iter(self._notes))]

    def notes(self) -> Sequence[str]:
        return tuple(self._notes.values())


def _computed(call: _VaeCall, chosen: VaePlan) -> torch.Tensor:
    if chosen.way is Way.WHOLE:
        return call.whole(call.x)
    pictures = torch.split(call.x, 1)
    if chosen.way is Way.SLICED:
        return torch.cat([call.whole(picture) for picture in pictures])
    return torch.cat([call.in_strips(picture, chosen.budget) for picture in pictures])


def install(vae: Any, level: str = "auto", *, ready: Callable[[torch.Tensor], bool] = lambda _z: False) -> Installed:
    """Have `decode` and `encode` of this VAE planned.

    `ready(z)` says whether the memory to decode a batch at once is held already, so that there is nothing to plan.
    """
    reason = why_unknown(vae)
    if reason is None and ("decode" in vae.__dict__ or "encode" in vae.__dict__):
        reason = "another program has replaced its decode or encode"
    if reason is not None:
        note = f"VAE: decodes as stock does, because {reason}"
        return Installed(lambda: (note,), lambda: None)
    engine = _Engine(weakref.ref(vae), level)
    decoding = _Direction("decode", decoder_steps, decode_whole, ready)
    encoding = _Direction("encode", encoder_steps, encode_whole, lambda _x: False)
    restores = [forwards.replace(vae, method) for method in (_decode(engine, decoding), _encode(engine, encoding))]

    def restore() -> None:
        for one in restores:
            one()

    return Installed(engine.notes, restore)


def _decode(engine: _Engine, direction: _Direction) -> Callable[..., Any]:
    def decode(self: Any, z: torch.Tensor, return_dict: bool = True, generator: Any = None) -> Any:
        if not engine.takes(self, z):
            return type(self).decode(self, z, return_dict, generator)
        y = engine.run(direction, z)
        return _class_beside(self, "DecoderOutput")(sample=y) if return_dict else (y,)

    return forwards.mark(decode, name="decode")


def _encode(engine: _Engine, direction: _Direction) -> Callable[..., Any]:
    def encode(self: Any, x: torch.Tensor, return_dict: bool = True) -> Any:
        if not engine.takes(self, x):
            return type(self).encode(self, x, return_dict)
        posterior = _class_beside(self, "DiagonalGaussianDistribution")(engine.run(direction, x))
        return _class_beside(self, "AutoencoderKLOutput")(latent_dist=posterior) if return_dict else (posterior,)

    return forwards.mark(encode, name="encode")


def _falls_back(vae: Any, x: torch.Tensor) -> bool:
    """Tiling that the user switched on is stock's own; so is what needs gradients, autocast or tracing."""
    if vae.use_tiling or type(x) is not torch.Tensor or x.dim() != 4 or not x.numel():
        return True
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type) or transforms.at_hand():
        return True
    return torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in vae.parameters()))


def _bring_weights(vae: Any) -> None:
    """As Diffusers does before its own decode: an offload hook of accelerate moves the weights to the device."""
    hook: Any = getattr(vae, "_hf_hook", None)
    if hook is not None and hasattr(hook, "pre_forward"):
        hook.pre_forward(vae)


def _class_beside(vae: Any, name: str) -> Any:
    """What the VAE's own module calls by that name: the host program is not imported here."""
    return getattr(sys.modules[type(vae).__module__], name)
