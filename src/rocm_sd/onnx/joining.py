"""joined(parts, drawing) -> onnx_ir.Model: a whole picture as one model, of the models of its parts.

    text = text_encoder([negative_ids; input_ids])              both halves of guidance as one batch
    x = noise; for each of `steps` timesteps, by ONNX's Loop:
        u, c = unet([x; x], t, text);  m = u + max(guidance, 1) (c - u);  x = DDIM(x, m, t)
    images = clip(vae_decoder(x / scaling) / 2 + 1/2, 0, 1)

What stands between the parts is written in ONNX's own text, in float32. There a part is a node `part.NAME`, which is
then replaced by the part's nodes; its weights stay as they are, and belong to the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedNodesPass, RemoveUnusedOpsetsPass

import onnx
from rocm_sd.errors import Unsupported
from rocm_sd.onnx.fusions.editing import dims
from rocm_sd.onnx.layout import GUIDED_BATCH

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

__all__ = ["Ddim", "Drawing", "joined"]

_DOMAIN = "part"
_OPSET = 18
_IR_VERSION = 10
_INPUTS = {
    "text_encoder": ("input_ids",),
    "text_encoder_2": ("input_ids",),
    "unet": ("sample", "timestep", "encoder_hidden_states", "text_embeds", "time_ids"),
    "vae_decoder": ("latent_sample",),
}
# Timesteps from the last to the first. Those of "trailing" are numpy's arange, to the rounding of its step.
_TIMES = {
    "leading": """
    ratio = Div (train_steps, steps)
    past = Mul (left, ratio)
    times = Add (past, offset)""",
    "trailing": """
    all = Cast <to = 11> (train_steps)
    many = Cast <to = 11> (steps)
    ratio = Div (all, many)
    second = Sub (all, ratio)
    apart = Sub (second, all)
    place = Cast <to = 11> (index)
    past = Mul (place, apart)
    time = Add (all, past)
    rounded = Round (time)
    counted = Cast <to = 7> (rounded)
    times = Sub (counted, one)""",
    "linspace": """
    last = Sub (train_steps, one)
    span = Cast <to = 11> (last)
    fewer = Sub (steps, one)
    gaps = Max (fewer, one)
    gap = Cast <to = 11> (gaps)
    apart = Div (span, gap)
    place = Cast <to = 11> (left)
    time = Mul (place, apart)
    rounded = Round (time)
    times = Cast <to = 7> (rounded)""",
}
# The picture x0 and its noise e of a prediction m, with r = sqrt(a) and s = sqrt(1 - a).
_PREDICTED = {
    "epsilon": """
      sm = Mul (s, m)
      less = Sub (x, sm)
      x0 = Div (less, r)
      e = Identity (m)""",
    "v_prediction": """
      rx = Mul (r, x)
      sm = Mul (s, m)
      x0 = Sub (rx, sm)
      rm = Mul (r, m)
      sx = Mul (s, x)
      e = Add (rm, sx)""",
    "sample": """
      x0 = Identity (m)
      rm = Mul (r, m)
      less = Sub (x, rm)
      e = Div (less, s)""",
}
_ONE_TEXT = """
    text = part.text_encoder (ids)"""
# SDXL's, and the sizes that it is told: of a picture that is neither scaled nor cropped.
_TWO_TEXTS = """
    ids_2 = Concat <axis = 0> (negative_ids_2, input_ids_2)
    text_1 = part.text_encoder (ids)
    text_2, pooled_all = part.text_encoder_2 (ids_2)
    text_all = Concat <axis = -1> (text_1, text_2)
    sizes = Shape <start = 2, end = 4> (noise)
    pixels = Mul (sizes, scale)
    numbers = Concat <axis = 0> (pixels, corner, pixels)
    numbers_f = Cast <to = 1> (numbers)
    rows = Shape <start = 0, end = 1> (ids)
    rows_of_six = Concat <axis = 0> (rows, six)
    time_ids = Expand (numbers_f, rows_of_six)"""
_EMPTY_IS_A_TEXT = """
    pooled = Identity (pooled_all)
    text = Identity (text_all)"""
_EMPTY_IS_NONE = """
    alike = Equal (negative_ids, empty_ids)
    alike_n = Cast <to = 7> (alike)
    is_empty = ReduceMin <keepdims = 0> (alike_n, second_axis)
    is_text = Sub (one, is_empty)
    negative_kept = Cast <to = 1> (is_text)
    emptied = Sub (negative_kept, negative_kept)
    positive_kept = Add (emptied, one_f)
    kept_texts = Concat <axis = 0> (negative_kept, positive_kept)
    kept_rows = Unsqueeze (kept_texts, second_axis)
    pooled = Mul (pooled_all, kept_rows)
    kept_tables = Unsqueeze (kept_texts, last_axes)
    text = Mul (text_all, kept_tables)"""


@dataclass(frozen=True)
class Ddim:
    """x' = sqrt(a') x0 + sqrt(1 - a') e of a prediction m, without noise; a: `kept` at t, a' one step later.

    `final`: a' of the last step. `clipped`: the bound of x0, or None.
    """

    kept: tuple[float, ...]
    final: float
    prediction: str
    spacing: str
    offset: int
    clipped: float | None = None

    @classmethod
    def of(cls, scheduler: Any) -> Ddim:
        """What Diffusers' DDIMScheduler computes; raises Unsupported of what is not written here."""
        config = scheduler.config
        for name, known in (("prediction_type", _PREDICTED), ("timestep_spacing", _TIMES)):
            if config[name] not in known:
                raise Unsupported("--single", f"the {name} {config[name]}", hint="Leave it out.")
        if config["thresholding"]:
            raise Unsupported("--single", "dynamic thresholding", hint="Leave it out.")
        return cls(
            tuple(scheduler.alphas_cumprod.tolist()),
            float(scheduler.final_alpha_cumprod),
            config["prediction_type"],
            config["timestep_spacing"],
            int(config["steps_offset"]),
            float(config["clip_sample_range"]) if config["clip_sample"] else None,
        )


@dataclass(frozen=True)
class Drawing:
    """What stands between the parts. `scale`: pixels of a latent. `scaling`: of latents, before they are decoded.

    `empty`: the ids of an empty text, where a picture without a negative text has zeros in its place (SDXL).
    """

    ddim: Ddim
    channels: int
    scale: int
    scaling: float
    empty: tuple[int, ...] = ()


def joined(parts: Mapping[str, Path], drawing: Drawing) -> ir.Model:
    """`parts`: files by name, of an export or fused; their weights are read when the result is written."""
    models = {name: ir.load(parts[name]) for name in _INPUTS if name in parts}
    taken = _taken(models)
    whole = ir.from_proto(onnx.parser.parse_model(_text(models, drawing)))
    for node in [each for each in whole.graph.all_nodes() if each.domain == _DOMAIN]:
        _put_in(whole, node, models[node.op_type], taken[node.op_type])
    RemoveUnusedNodesPass()(whole)
    RemoveUnusedFunctionsPass()(whole)  # type: ignore[no-untyped-call]
    RemoveUnusedOpsetsPass()(whole)
    return whole


def _text(models: Mapping[str, ir.Model], drawing: Drawing) -> str:
    ddim, two = drawing.ddim, "text_encoder_2" in models
    latents = f"float[batch, {drawing.channels}, height, width]"
    ids = ["input_ids", "negative_ids", *(["input_ids_2", "negative_ids_2"] if two else [])]
    inputs = [*(f"int64[batch, tokens] {name}" for name in ids), f"{latents} noise", "int64 steps", "float guidance"]
    encoded = _ONE_TEXT if not two else _TWO_TEXTS + (_EMPTY_IS_NONE if drawing.empty else _EMPTY_IS_A_TEXT)
    # A fused UNet repeats what both halves of guidance share.
    doubled = "Identity (x)" if _shares_guidance(models["unet"]) else "Concat <axis = 0> (x, x)"
    bound = ddim.clipped or 0.0
    return f"""
<ir_version: {_IR_VERSION}, opset_import: ["" : {_OPSET}, "{_DOMAIN}" : 1]>
picture ({", ".join(inputs)}) => (float[batch, 3, picture_height, picture_width] images)
<
    float[{len(ddim.kept)}] kept_at = {_row(ddim.kept)}, float kept_last = {_row([ddim.final])},
    float scaling = {_row([drawing.scaling])}, float low = {_row([-bound])}, float high = {_row([bound])},
    float nothing = {{0.0}}, float half = {{0.5}}, float one_f = {{1.0}}, bool yes = {{1}},
    int64 zero = {{0}}, int64 one = {{1}}, int64 train_steps = {{{len(ddim.kept)}}}, int64 offset = {{{ddim.offset}}},
    int64[1] scale = {{{drawing.scale}}}, int64[2] corner = {{0, 0}}, int64[1] six = {{6}},
    int64[1] second_axis = {{1}}, int64[2] last_axes = {{1, 2}},
    int64[1, {len(drawing.empty)}] empty_ids = {_row(drawing.empty)}
>
{{
    ids = Concat <axis = 0> (negative_ids, input_ids){encoded}
    index = Range (zero, steps, one)
    highest = Sub (steps, one)
    left = Sub (highest, index){_TIMES[ddim.spacing]}
    stride = Div (train_steps, steps)
    next_times = Sub (times, stride)
    goes_on = GreaterOrEqual (next_times, zero)
    next_or_first = Max (next_times, zero)
    kept = Gather (kept_at, times)
    kept_next_or_first = Gather (kept_at, next_or_first)
    kept_next = Where (goes_on, kept_next_or_first, kept_last)
    times_f = Cast <to = 1> (times)
    guided = Max (guidance, one_f)
    drawn = Loop (steps, yes, noise) <body = step (int64 number, bool on, {latents} x) => (bool still, {latents} next)
    {{
      still = Identity (on)
      t = Gather (times_f, number)
      doubled = {doubled}
      both = part.unet (doubled, t, {"text, pooled, time_ids" if two else "text"})
      without, with = Split <axis = 0, num_outputs = 2> (both)
      toward = Sub (with, without)
      further = Mul (guided, toward)
      m = Add (without, further)
      a = Gather (kept, number)
      r = Sqrt (a)
      b = Sub (one_f, a)
      s = Sqrt (b){_PREDICTED[ddim.prediction]}
      bounded = {"Identity (x0)" if ddim.clipped is None else "Clip (x0, low, high)"}
      a_next = Gather (kept_next, number)
      r_next = Sqrt (a_next)
      b_next = Sub (one_f, a_next)
      s_next = Sqrt (b_next)
      picture_next = Mul (r_next, bounded)
      noise_next = Mul (s_next, e)
      next = Add (picture_next, noise_next)
    }}>
    latents = Div (drawn, scaling)
    decoded = part.vae_decoder (latents)
    halved = Mul (decoded, half)
    bright = Add (halved, half)
    images = Clip (bright, nothing, one_f)
}}
"""


def _row(numbers: Iterable[float]) -> str:
    return "{" + ", ".join(map(repr, numbers)) + "}"


def _shares_guidance(unet: ir.Model) -> bool:
    return any(dims(value)[:1] == [GUIDED_BATCH] for value in unet.graph.inputs)


def _taken(models: Mapping[str, ir.Model]) -> dict[str, list[str]]:
    """Of a text encoder alone the last state; of two the last but one of each, and what the second projects."""
    found = {name: [value.name or "" for value in model.graph.outputs] for name, model in models.items()}
    if "text_encoder_2" not in models:
        return found | {"text_encoder": ["last_hidden_state"]}
    states = {name: _last_but_one(found[name]) for name in ("text_encoder", "text_encoder_2")}
    return found | {
        "text_encoder": [states["text_encoder"]],
        "text_encoder_2": [states["text_encoder_2"], "text_embeds"],
    }


def _last_but_one(names: Iterable[str]) -> str:
    states = [name for name in names if name.startswith("hidden_states.")]
    return sorted(states, key=lambda name: int(name.rpartition(".")[2]))[-2]


def _put_in(whole: ir.Model, place: ir.Node, part: ir.Model, taken: Iterable[str]) -> None:
    """The part's nodes before `place`, which is gone then; its weights in the whole, wherever the place is."""
    name, graph, around = place.op_type, part.graph, place.graph
    assert isinstance(around, ir.Graph)
    inputs, outputs = ({value.name: value for value in each} for each in (graph.inputs, graph.outputs))
    for called, given in zip(_INPUTS[name], place.inputs, strict=False):
        value = inputs.pop(called)
        assert given is not None
        ir.convenience.replace_all_uses_with(value, _as(value.dtype, given, place))
    if inputs:
        raise Unsupported("--single", f"a {name} that takes {next(iter(inputs))}", hint="Leave it out.")
    graph.outputs.clear()
    _name_apart(part, name)
    weights = list(graph.initializers.values())
    graph.initializers.clear()
    for weight in weights:
        whole.graph.register_initializer(weight)
    nodes = list(graph)
    graph.remove(nodes)
    around.insert_before(place, nodes)
    for old, new in zip(place.outputs, (outputs[each] for each in taken), strict=True):
        ir.convenience.replace_all_uses_with(old, _as(ir.DataType.FLOAT, new, place))
    around.remove(place)
    whole.functions.update(part.functions)
    for domain, version in graph.opset_imports.items():
        whole.graph.opset_imports.setdefault(domain, version)


def _as(dtype: ir.DataType | None, value: ir.Value, before: ir.Node) -> ir.Value:
    """What stands between the parts is float32, or the numbers of tokens, whatever a part takes and gives."""
    if dtype is None or dtype == value.dtype:
        return value
    cast = ir.node("Cast", [value], {"to": int(dtype)}, name=f"{before.op_type}.cast.{value.name}")
    cast.outputs[0].name, cast.outputs[0].type = f"{cast.name}.out", ir.TensorType(dtype)
    assert before.graph is not None
    before.graph.insert_before(before, cast)
    return cast.outputs[0]


def _name_apart(part: ir.Model, name: str) -> None:
    """Values, sizes and functions of two parts may have one name, and mean two things."""
    values = [*part.graph.initializers.values(), *(value for node in part.graph for value in node.outputs)]
    for value in values:
        value.name = f"{name}.{value.name}"
        if value.shape is not None:
            value.shape = ir.Shape([_size_apart(size, name) for size in dims(value)])
    functions, part_functions = dict(part.functions), part.functions
    part_functions.clear()
    for function in functions.values():
        function.name = f"{name}.{function.name}"
        part_functions[function.identifier()] = function
    for graph in (part.graph, *functions.values()):
        for number, node in enumerate(graph):
            # A runtime refuses two nodes of one name, and some exporters give none.
            node.name = f"{name}.{node.name or number}"
            if node.op_identifier() in functions:
                node.op_type = f"{name}.{node.op_type}"


def _size_apart(size: int | str | None, name: str) -> int | str | None:
    """A size that is computed of others is known when the model runs."""
    return (
        f"{name}.{size}" if isinstance(size, str) and size.isidentifier() else size if isinstance(size, int) else None
    )
