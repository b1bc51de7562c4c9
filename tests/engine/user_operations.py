"""Operations of a user: pictures, schedulers, LoRA, where the weights are and what they are."""

from __future__ import annotations

from typing import Any

import diffusers
import test_sequences
import torch
from diffusers.hooks import HookRegistry
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from user_sessions import MODES, Session, has_unet, one_of, operation

import rocm_sd
from pipelines import DEVICE, SCHEDULERS, scheduler_of
from tiny_models import copied

PROMPTS = ("a frog", "two cats on a mat", "")

# Pictures.


@operation()
def a_picture(session):
    """Of another seed, and nothing else: hypothesis takes what sorts first most often, and this costs least."""


@operation(size=one_of([(16, 16), (24, 16), (16, 32)]))
def another_size(session, size):
    session.size = size


@operation(prompts=st.lists(one_of(PROMPTS), min_size=1, max_size=2))
def other_prompts(session, prompts):
    session.prompts = tuple(prompts)


@operation(images=one_of([1, 2]))
def several_images_per_prompt(session, images):
    session.options["num_images_per_prompt"] = images


@operation(guidance=one_of([1.0, 3.0, 7.5]))
def another_guidance(session, guidance):
    session.options["guidance_scale"] = guidance
    if session.callback in (test_sequences.change_guidance, test_sequences.fade_guidance):
        session.callback = None


@operation(steps=one_of([1, 2, 3]))
def another_number_of_steps(session, steps):
    session.options["num_inference_steps"] = steps


@operation(lambda session: "prompt" in session.case.arguments, negative=one_of(["a dog", "", None]))
def negative_prompt(session, negative):
    session.options["negative_prompt"] = negative


@operation(tokens=one_of([None, 16, 40]))
def embeddings_given(session, tokens):
    session.tokens = tokens
    session.options.pop("negative_prompt", None)


@operation(decoded=st.booleans())
def decoded_or_latents(session, decoded):
    session.decoded = decoded


@operation(mode=one_of(list(MODES)))
def grad_mode(session, mode):
    session.mode = mode


def change_the_prompts_data(pipe, step, timestep, given):
    if step == 0:
        given["prompt_embeds"].data.mul_(0.5)
    return {}


_CALLBACKS = {"none": None, "prompt-data": change_the_prompts_data} | {
    function.__name__: function for function in test_sequences.CALLBACKS
}


@operation(name=one_of(list(_CALLBACKS)))
def callback(session, name):
    guides = name in ("change_guidance", "fade_guidance")
    if guides and not (session.name in test_sequences.DYNAMIC and session.guided()):
        return
    session.callback = _CALLBACKS[name]


# Schedulers.


def _flow(name: str) -> Any:
    shift = {"euler": 1.0, "dpm++": 3.0}.get(name)
    if shift is None:
        return diffusers.FlowMatchHeunDiscreteScheduler()
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)


@operation(name=one_of(list(SCHEDULERS)))
def another_scheduler(session, name):
    make = scheduler_of if has_unet(session) else _flow
    session.each(lambda pipe: setattr(pipe, "scheduler", make(name)))
    session.steps = []


@operation(has_unet, name=one_of(["ddim", "euler", "dpm++", "unipc", "ancestral", "pndm"]))
def scheduler_from_config(session, name):
    kind = type(scheduler_of(name))
    session.each(lambda pipe: setattr(pipe, "scheduler", kind.from_config(pipe.scheduler.config)))
    session.steps = []


@operation(
    option=one_of(
        [{"timestep_spacing": "trailing"}, {"timestep_spacing": "linspace"}, {"rescale_betas_zero_snr": True}]
    ),
    when=has_unet,
)
def scheduler_with_another_option(session, option):
    session.each(
        lambda pipe: setattr(pipe, "scheduler", type(pipe.scheduler).from_config(pipe.scheduler.config, **option))
    )
    session.steps = []


def _dimmed(inner):
    def step(*args, **kwargs):
        given = inner(*args, **kwargs)
        return (given[0] * 0.9, *given[1:]) if isinstance(given, tuple) else given

    return step


@operation(lambda session: len(session.steps) < 2, before=st.booleans())
def wrap_the_step(session, before):
    """`before` optimize."""
    again = before and session.optimised
    if again:
        rocm_sd.restore(session.twins.ours)

    def wrap(pipe):
        inner = pipe.scheduler.step
        pipe.scheduler.step = _dimmed(inner)
        return pipe.scheduler, inner

    session.steps.append(session.each(wrap))
    if again:
        rocm_sd.optimize(session.twins.ours)


@operation(lambda session: bool(session.steps), deleted=st.booleans())
def unwrap_the_step(session, deleted):
    wrapped = session.steps.pop()
    for scheduler, inner in wrapped:
        if not deleted:
            scheduler.step = inner
        elif "step" in vars(scheduler):
            del scheduler.step
    if deleted:
        session.steps = []


# LoRA.


@operation(
    lambda session: session.adapter is None and not session.changes and not session.forwards,
    file=one_of([1, 2]),
    saved=st.booleans(),
)
def load_lora(session, file, saved):
    tensors = session.files[file]
    if saved:
        save_file(tensors, session.folder / "lora.safetensors")
    given = {"weight_name": "lora.safetensors"} if saved else {}
    session.each(
        lambda pipe: pipe.load_lora_weights(
            str(session.folder) if saved else copied(tensors), adapter_name="a", **given
        )
    )
    # It comes in float32.
    session.each(lambda pipe: pipe.to(session.twins.dtype))
    session.adapter, session.fused = file, False


def _has_lora(session: Session) -> bool:
    return session.adapter is not None


@operation(lambda session: _has_lora(session) and not session.fused, weight=one_of([0.0, 0.4, 1.3, -0.5]))
def scale_lora(session, weight):
    session.each(lambda pipe: pipe.set_adapters(["a"], [weight]))


@operation(lambda session: _has_lora(session) and not session.fused)
def fuse_lora(session):
    session.each(lambda pipe: pipe.fuse_lora(components=[session.part]))
    session.fused = True


@operation(lambda session: _has_lora(session) and session.fused)
def unfuse_lora(session):
    session.each(lambda pipe: pipe.unfuse_lora(components=[session.part]))
    session.fused = False


@operation(lambda session: _has_lora(session) and not session.fused, off=st.booleans())
def disable_lora(session, off):
    session.each(lambda pipe: pipe.disable_lora() if off else pipe.enable_lora())


@operation(_has_lora)
def unload_lora(session):
    session.each(lambda pipe: pipe.unload_lora_weights())
    session.adapter, session.fused = None, False


# Placement, dtypes and weights.


@operation(lambda session: session.offloaded is None, way=one_of(["model", "leaf_level", "block_level"]))
def offload(session, way):
    """Sequential offload of Accelerate needs another device than a CPU."""

    def enable(pipe):
        if way == "model":
            return pipe.enable_model_cpu_offload(device=DEVICE)
        blocks = {"num_blocks_per_group": 1} if way == "block_level" else {}
        cpu = torch.device("cpu")
        return session.model(pipe).enable_group_offload(DEVICE, cpu, offload_type=way, **blocks)

    session.each(enable)
    session.offloaded = way


@operation(lambda session: session.offloaded is not None)
def offload_off(session):
    def disable(pipe):
        if session.offloaded == "model":
            pipe.remove_all_hooks()
            return
        for module in session.model(pipe).modules():
            if hasattr(module, "_diffusers_hook"):
                registry = HookRegistry.check_if_exists_or_initialize(module)
                for name in list(registry.hooks):
                    registry.remove_hook(name, recurse=False)

    session.each(disable)
    session.each(lambda pipe: pipe.to(DEVICE))
    session.offloaded = None


# Groups keep the weights that they were made with.
@operation(lambda session: session.offloaded in (None, "model"), dtype=one_of([torch.float32, torch.bfloat16]))
def another_dtype(session, dtype):
    session.twins.dtype = dtype
    session.each(lambda pipe: pipe.to(dtype))


@operation(lambda session: session.offloaded is None)
def to_device(session):
    session.each(lambda pipe: pipe.to(DEVICE))


WEIGHTS = ("to_k.weight", "linear_1.weight", "time_emb_proj.weight", "conv1.weight", "norm1.weight", "proj_out.weight")


@operation(
    ending=one_of([*WEIGHTS, "bias"]),
    way=one_of(["in place", "inference", "data", "elsewhere", "parameter", "loaded", "assigned"]),
    factor=one_of([1.2, 0.7]),
)
def edit_weights(session, ending, way, factor):
    def change(pipe):
        model = session.model(pipe)
        changed = {}
        for name, weight in list(model.named_parameters()):
            if not name.endswith(ending) or "lora" in name:
                continue
            if way in ("in place", "inference"):
                with torch.inference_mode() if way == "inference" else torch.no_grad():
                    weight.mul_(factor)
            elif way == "data":
                weight.data.mul_(factor)
            elif way == "elsewhere":
                weight.data = weight.data * factor
            elif way == "parameter":
                owner, _, own = name.rpartition(".")
                setattr(model.get_submodule(owner), own, nn.Parameter(weight.detach() * factor, requires_grad=False))
            changed[name] = weight.detach() * factor
        if way in ("loaded", "assigned"):
            model.load_state_dict(changed, strict=False, assign=way == "assigned")

    session.each(change)
