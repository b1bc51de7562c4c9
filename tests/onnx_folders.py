"""Folders of ONNX models that are made by hand in milliseconds: each part computes something simple of its inputs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import diffusers
import numpy as np

import onnx
from onnx import TensorProto, helper, numpy_helper
from pipelines import tiny_tokenizer
from rocm_sd.onnx import layout

if TYPE_CHECKING:
    from pathlib import Path

TEXT = 32
_FLOAT, _INT = TensorProto.FLOAT, TensorProto.INT64
_UNET = {
    "in_channels": 4, "out_channels": 4, "sample_size": 8, "cross_attention_dim": TEXT, "time_cond_proj_dim": None,
    "block_out_channels": [32, 64], "addition_embed_type": None, "_diffusers_version": "0.42.1",
}  # fmt: skip
_VAE = {
    "block_out_channels": [32, 32], "latent_channels": 4, "scaling_factor": 0.18215, "force_upcast": False,
    "in_channels": 3, "sample_size": 16,
}  # fmt: skip
_CLIP = {"hidden_size": TEXT, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16}


def value(name: str, kind: int, *shape: int | str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, list(shape))


def save_model(folder: Path, inputs: list, outputs: list, nodes: list, weights: dict, opset: int = 18) -> None:
    """Its weights lie beside it, as those of an export do."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = [_kept(name, array) for name, array in weights.items()]
    graph = helper.make_graph(nodes, folder.name, inputs, outputs, kept)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    options = {"save_as_external_data": True, "location": layout.DATA, "size_threshold": 0}
    (folder / layout.DATA).unlink(missing_ok=True)
    onnx.save(model, folder / layout.MODEL, **(options if weights else {}))


def _kept(name: str, array: np.ndarray) -> onnx.TensorProto:
    """Weights lie outside; axes and sizes inside, where shape inference reads them."""
    if name in {"scale", "spread", "ten_thousand"}:
        return numpy_helper.from_array(array, name)
    return helper.make_tensor(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape, array.tolist())


def unet(folder: Path, *, opset: int = 18, timestep: tuple[int, str | int | None] = (_FLOAT, None)) -> None:
    """out = 0.1 * sample + timestep / 10000 + the mean of the text, of each picture."""
    kind, size = timestep
    inputs = [
        value("sample", _FLOAT, "batch", 4, "height", "width"),
        value("timestep", kind, *([] if size is None else [size])),
        value("encoder_hidden_states", _FLOAT, "batch", "sequence", TEXT),
    ]
    nodes = [
        helper.make_node("Mul", ["sample", "scale"], ["scaled"]),
        helper.make_node("Cast", ["timestep"], ["time"], to=_FLOAT),
        helper.make_node("ReduceMax", ["time"], ["when"], keepdims=0),
        helper.make_node("Div", ["when", "ten_thousand"], ["late"]),
        helper.make_node("Add", ["scaled", "late"], ["timed"]),
        helper.make_node("ReduceMean", ["encoder_hidden_states", "axes"], ["mean"], keepdims=1),
        helper.make_node("Unsqueeze", ["mean", "last"], ["text"]),
        helper.make_node("Add", ["timed", "text"], ["out_sample"]),
    ]
    weights = {
        "scale": np.float32(0.1).reshape(1), "ten_thousand": np.float32(1e4).reshape(1),
        "axes": np.array([1, 2], np.int64), "last": np.array([3], np.int64),
    }  # fmt: skip
    outputs = [value("out_sample", _FLOAT, "batch", 4, "height", "width")]
    save_model(folder / "unet", inputs, outputs, nodes, weights, opset)
    (folder / "unet" / "config.json").write_text(json.dumps(_UNET))


def made_by_hand(folder: Path, tokens: Path, *, manifest: bool = True) -> Path:
    """A whole export of a model that is no model: text as its token numbers, pictures as the latents' channels."""
    folder.mkdir(parents=True, exist_ok=True)
    unet(folder)
    ids = [value("input_ids", _INT, "batch", "sequence")]
    text = [
        helper.make_node("Cast", ["input_ids"], ["numbers"], to=_FLOAT),
        helper.make_node("Unsqueeze", ["numbers", "last"], ["deep"]),
        helper.make_node("Mul", ["deep", "spread"], ["last_hidden_state"]),
        helper.make_node("ReduceMax", ["last_hidden_state", "middle"], ["pooler_output"], keepdims=0),
    ]
    weights = {
        "last": np.array([2], np.int64), "middle": np.array([1], np.int64),
        "spread": np.linspace(0, 0.01, TEXT, dtype=np.float32),
    }  # fmt: skip
    states = [
        value("last_hidden_state", _FLOAT, "batch", "sequence", TEXT),
        value("pooler_output", _FLOAT, "batch", TEXT),
    ]
    save_model(folder / "text_encoder", ids, states, text, weights)
    (folder / "text_encoder" / "config.json").write_text(json.dumps(_CLIP))
    latent = [value("latent_sample", _FLOAT, "batch", 4, "height", "width")]
    larger = [
        helper.make_node("Slice", ["latent_sample", "zero", "three", "one"], ["colours"]),
        helper.make_node("Resize", ["colours", "", "scales"], ["sample"], mode="nearest"),
    ]
    weights = {
        "zero": np.array([0], np.int64), "three": np.array([3], np.int64), "one": np.array([1], np.int64),
        "scales": np.array([1, 1, 2, 2], np.float32),
    }  # fmt: skip
    save_model(folder / "vae_decoder", latent, [value("sample", _FLOAT, "batch", 3, "h", "w")], larger, weights)
    (folder / "vae_decoder" / "config.json").write_text(json.dumps(_VAE))
    diffusers.DDIMScheduler(clip_sample=False, steps_offset=1).save_pretrained(folder / "scheduler")
    tiny_tokenizer(tokens).save_pretrained(folder / "tokenizer")
    index = {
        "_class_name": "StableDiffusionPipeline", "requires_safety_checker": False,
        "unet": ["diffusers", "UNet2DConditionModel"], "vae": ["diffusers", "AutoencoderKL"],
        "text_encoder": ["transformers", "CLIPTextModel"], "tokenizer": ["transformers", "CLIPTokenizer"],
        "scheduler": ["diffusers", "DDIMScheduler"], "safety_checker": [None, None],
        "feature_extractor": [None, None],
    }  # fmt: skip
    (folder / "model_index.json").write_text(json.dumps(index))
    if manifest:
        parts = ("text_encoder", "unet", "vae_decoder")
        told = layout.Manifest("by-hand", "StableDiffusionPipeline", {"rocm-sd": "0.1.0"})
        for name in parts:
            told = told.with_part(layout.described(name, folder / name))
        told.save(folder)
    return folder
