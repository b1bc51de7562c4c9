"""Parts of small pipelines as ONNX graphs, exported once a run, and how they run before and after their fusion."""

from __future__ import annotations

import copy
import logging
import warnings
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel

from tiny_models import unet_of, vae_of

if TYPE_CHECKING:
    from pathlib import Path

# Heads of 40 and 80 as in SD 1.5, and of 64 as in SD 2.1 and SDXL.
_SHAPES = {
    "sd15": {"block_out_channels": (80, 160), "attention_head_dim": 2},
    "sd21": {"block_out_channels": (64, 128), "attention_head_dim": (1, 2), "upcast_attention": True},
    "sdxl": {"block_out_channels": (64, 128), "attention_head_dim": (1, 2), "transformer_layers_per_block": (1, 2)},
}


class _UNet(nn.Module):
    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.unet = unet

    def forward(self, sample, timestep, encoder_hidden_states, text_embeds=None, time_ids=None):
        added = None if text_embeds is None else {"text_embeds": text_embeds, "time_ids": time_ids}
        return self.unet(sample, timestep, encoder_hidden_states, added_cond_kwargs=added, return_dict=False)[0]


class _Decoder(nn.Module):
    def __init__(self, vae: nn.Module) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, latent_sample):
        return self.vae.decode(latent_sample, return_dict=False)[0]


class _Encoder(nn.Module):
    def __init__(self, vae: nn.Module) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, sample):
        return self.vae.quant_conv(self.vae.encoder(sample))


class _Text(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids):
        found = self.encoder(input_ids, output_hidden_states=True)
        return (found.last_hidden_state, *(each.clone() for each in found.hidden_states))


@cache
def torch_part(name: str) -> tuple[nn.Module, dict[str, Any], dict[str, dict[int, str]], dict[str, Any]]:
    """The module, the arguments of a call, which of their sizes vary, and its config."""
    torch.manual_seed(0)
    if name in _SHAPES:
        unet = unet_of(name, **_SHAPES[name])
        inputs = {
            "sample": torch.randn(2, 4, 8, 12),
            "timestep": torch.tensor(501.0),
            "encoder_hidden_states": torch.randn(2, 7, unet.config.cross_attention_dim),
        }
        dims = {
            "sample": {0: "batch", 2: "height", 3: "width"},
            "timestep": {},
            "encoder_hidden_states": {0: "batch", 1: "sequence"},
        }
        if name == "sdxl":
            inputs |= {"text_embeds": torch.randn(2, 32), "time_ids": torch.randint(0, 99, (2, 6)).float()}
            dims |= {"text_embeds": {0: "batch"}, "time_ids": {0: "batch"}}
        return _UNet(unet).eval(), inputs, dims, dict(unet.config)
    if name in {"vae_decoder", "vae_encoder"}:
        vae = vae_of()
        key, channels, kind = ("latent_sample", 4, _Decoder) if name == "vae_decoder" else ("sample", 3, _Encoder)
        inputs = {key: torch.randn(2, channels, 8, 12)}
        return kind(vae).eval(), inputs, {key: {0: "batch", 2: "height", 3: "width"}}, dict(vae.config)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 3}
    config = CLIPTextConfig(vocab_size=99, eos_token_id=98, max_position_embeddings=77, **sizes)
    ids = torch.randint(0, 98, (2, 77))
    return (
        _Text(CLIPTextModel(config)).eval(),
        {"input_ids": ids},
        {"input_ids": {0: "batch", 1: "sequence"}},
        config.to_dict(),
    )


@cache
def _exported(name: str, dtype: torch.dtype) -> ir.Model:
    module, inputs, dims, _ = torch_part(name)
    if dtype is not torch.float32:
        module = copy.deepcopy(module).to(dtype)
        inputs = in_dtype(inputs, dtype)
    # pytest listens to every logger: torch would write down each of its steps for it.
    logging.getLogger("torch.__trace").disabled = True
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module, (), kwargs=inputs, dynamic_shapes=dims, input_names=list(inputs),
            opset_version=18, dynamo=True, verbose=False,
        )  # fmt: skip
    return program.model


def exported(name: str, dtype: torch.dtype = torch.float32) -> ir.Model:
    """A copy, to be changed."""
    return _exported(name, dtype).clone()


def in_dtype(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A timestep stays float32, which is what Diffusers computes its sines in."""
    return {k: v.to(dtype) if v.is_floating_point() and k != "timestep" else v for k, v in inputs.items()}


@cache
def torch_outputs(name: str, dtype: torch.dtype) -> list[torch.Tensor]:
    module, inputs, _, _ = torch_part(name)
    with torch.no_grad():
        found = copy.deepcopy(module).to(dtype)(**in_dtype(inputs, dtype))
    return list(found) if isinstance(found, tuple) else [found]


def outputs(model: ir.Model, inputs: dict[str, Any], folder: Path) -> list[torch.Tensor]:
    """Of ONNX Runtime on the CPU, the inputs in the dtypes that the model asks for."""
    ir.save(model, folder / "model.onnx", external_data="model.onnx.data")
    return file_outputs(folder / "model.onnx", inputs)


def file_outputs(file: Path, inputs: dict[str, Any]) -> list[torch.Tensor]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    wanted = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}
    feeds = {each.name: inputs[each.name].numpy().astype(wanted[each.type]) for each in session.get_inputs()}
    return [torch.from_numpy(each) for each in session.run(None, feeds)]
