"""emoji-sd inside ComfyUI: a model configuration for its detection, a loader, and an empty latent of the right size.

The host tells models apart by the shapes of their weights. It takes emoji-sd's UNet as it is once the configuration
is registered. The text encoder has a vocabulary of its own, and the VAE normalises in 16 groups where the host's own
loader always builds 32, so the loader here builds both. No host module is changed: its list of models grows by one.
"""

from __future__ import annotations

import json
import logging
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from rocm_sd.models import EMBEDDED
from rocm_sd.models.emoji import MODEL_FOLDER
from rocm_sd.models.single_file import checkpoint_weights, read_part

if TYPE_CHECKING:
    import torch

__all__ = [
    "BUILT_IN", "NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS", "ROCmEmojiCheckpointLoader",
    "ROCmEmojiEmptyLatent", "register",
]  # fmt: skip

BUILT_IN = f"{EMBEDDED} (built in)"
_CATEGORY = "ROCm Optimizations/emoji-sd"
_LOG = logging.getLogger(__name__)
# Least squares over 24 pictures of trained prompts, R2 0.91: latents to RGB, for the host's previews between steps.
_LATENT_TO_RGB = [
    [-0.3641, -0.6587, 0.0097],
    [-0.0971, -0.1410, 0.5901],
    [-0.2678, -0.2093, -0.6312],
    [-0.4947, 0.1937, -0.5699],
]
_LATENT_TO_RGB_BIAS = [-0.0707, 0.0397, -0.1417]


def register() -> bool:
    """Let the host's detection know emoji-sd. Safe to call again; what goes wrong is one line in the console."""
    try:
        import comfy.supported_models  # noqa: PLC0415 -- only the host has it

        known = comfy.supported_models.models
        if _configuration() not in known:
            known.append(_configuration())
    except Exception as error:  # noqa: BLE001 -- the host must start whatever its version lacks
        _LOG.warning("rocm-sd: this ComfyUI cannot be taught emoji-sd (%s: %s).", type(error).__name__, error)
        return False
    return True


class ROCmEmojiCheckpointLoader:
    """emoji-sd as MODEL, CLIP and VAE of the host, from the package itself or from an exported file."""

    RETURN_TYPES = ("MODEL", "CLIP", "VAE")
    FUNCTION = "load_checkpoint"
    CATEGORY = _CATEGORY
    DESCRIPTION = (
        "Loads emoji-sd, the small text-to-image model that comes with rocm-sd: built in, or a file written by "
        "'rocm-sd export'. It draws emoji at 128x128 within seconds, on a CPU too."
    )
    OUTPUT_TOOLTIPS = ("The denoiser.", "The text encoder.", "The autoencoder: 4 pixels to a latent pixel, not 8.")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802 -- the host's name
        import folder_paths  # noqa: PLC0415 -- only the host has it

        names = [BUILT_IN, *folder_paths.get_filename_list("checkpoints")]
        tooltip = "Built in, or a file written by: rocm-sd export --out emoji-sd.safetensors"
        return {"required": {"ckpt_name": (names, {"default": BUILT_IN, "tooltip": tooltip})}}

    def load_checkpoint(self, ckpt_name: str) -> tuple[Any, Any, Any]:
        import comfy.sd  # noqa: PLC0415 -- only the host has it
        import folder_paths  # noqa: PLC0415

        if not register():
            raise RuntimeError("This ComfyUI is too old or too new for emoji-sd. The console says what it lacks.")
        weights = _weights(ckpt_name)
        _refuse_others(ckpt_name, weights)
        vae_weights = {
            name.removeprefix("first_stage_model."): tensor
            for name, tensor in weights.items()
            if name.startswith("first_stage_model.")
        }
        model, clip, *_ = comfy.sd.load_state_dict_guess_config(
            weights, output_vae=False, embedding_directory=folder_paths.get_folder_paths("embeddings")
        )
        return model, clip, _vae(vae_weights)


class ROCmEmojiEmptyLatent:
    """EmptyLatentImage for a VAE of 4 pixels to a latent pixel: the sizes asked for are those that come out."""

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "generate"
    CATEGORY = _CATEGORY
    DESCRIPTION = "An empty latent for emoji-sd. The host's own node counts 8 pixels to a latent pixel; emoji-sd has 4."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802 -- the host's name
        # Three halvings inside the UNet after two in the VAE: sizes in steps of 32.
        side = {"default": 128, "min": 64, "max": 512, "step": 32, "tooltip": "Pixels. It was trained at 128x128."}
        batch = {"default": 1, "min": 1, "max": 64, "tooltip": "Pictures at a time."}
        return {"required": {"width": ("INT", side), "height": ("INT", side), "batch_size": ("INT", batch)}}

    def generate(self, width: int, height: int, batch_size: int = 1) -> tuple[dict[str, torch.Tensor]]:
        import torch  # noqa: PLC0415 -- the host has loaded it by the time a node runs

        factor, channels = _pixels_per_latent(), _config("vae")["latent_channels"]
        return ({"samples": torch.zeros(batch_size, channels, height // factor, width // factor)},)


NODE_CLASS_MAPPINGS: dict[str, type] = {
    "ROCmEmojiCheckpointLoader": ROCmEmojiCheckpointLoader,
    "ROCmEmojiEmptyLatent": ROCmEmojiEmptyLatent,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "ROCmEmojiCheckpointLoader": "emoji-sd Loader (ROCm)",
    "ROCmEmojiEmptyLatent": "emoji-sd Empty Latent (ROCm)",
}


@cache
def _config(part: str) -> dict[str, Any]:
    name = "scheduler_config.json" if part == "scheduler" else "config.json"
    read: dict[str, Any] = json.loads((MODEL_FOLDER / part / name).read_text(encoding="utf-8"))
    return read


def _pixels_per_latent() -> int:
    return int(2 ** (len(_config("vae")["block_out_channels"]) - 1))


def _weights(ckpt_name: str) -> dict[str, torch.Tensor]:
    if ckpt_name == BUILT_IN:
        return checkpoint_weights(*(read_part(MODEL_FOLDER, part) for part in ("unet", "vae", "text_encoder")))
    import comfy.utils  # noqa: PLC0415 -- only the host has it
    import folder_paths  # noqa: PLC0415

    path = folder_paths.get_full_path_or_raise("checkpoints", ckpt_name)
    weights: dict[str, torch.Tensor] = comfy.utils.load_torch_file(path, safe_load=True)
    return weights


def _refuse_others(ckpt_name: str, weights: dict[str, torch.Tensor]) -> None:
    import comfy.model_detection  # noqa: PLC0415 -- only the host has it

    found = comfy.model_detection.detect_unet_config(weights, "model.diffusion_model.")
    if found is None or not _configuration().matches(found, weights):
        raise ValueError(f"{ckpt_name} is not emoji-sd. Load it with the node Load Checkpoint.")


def _vae(weights: dict[str, torch.Tensor]) -> Any:
    import comfy.sd  # noqa: PLC0415 -- only the host has it
    from torch import nn  # noqa: PLC0415

    config = _config("vae")
    widths = config["block_out_channels"]
    layout = {
        "double_z": True,
        "z_channels": config["latent_channels"],
        "resolution": 256,
        "in_channels": config["in_channels"],
        "out_ch": config["out_channels"],
        "ch": widths[0],
        "ch_mult": [width // widths[0] for width in widths],
        "num_res_blocks": config["layers_per_block"],
        "attn_resolutions": [],
        "dropout": 0.0,
    }
    vae = comfy.sd.VAE(sd=weights, config={"params": {"ddconfig": layout, "embed_dim": config["latent_channels"]}})
    for module in vae.first_stage_model.modules():
        if isinstance(module, nn.GroupNorm):
            module.num_groups = config["norm_num_groups"]
    vae.downscale_ratio = vae.upscale_ratio = _pixels_per_latent()
    return vae


@cache
def _configuration() -> Any:
    """The host's description of a model, for emoji-sd: made once, since the host compares by identity."""
    import comfy.latent_formats  # noqa: PLC0415 -- only the host has them
    import comfy.model_base  # noqa: PLC0415
    import comfy.supported_models  # noqa: PLC0415
    import comfy.supported_models_base  # noqa: PLC0415

    unet, scheduler = _config("unet"), _config("scheduler")

    class EmojiLatents(comfy.latent_formats.LatentFormat):  # type: ignore[misc]
        scale_factor = _config("vae")["scaling_factor"]
        latent_rgb_factors = _LATENT_TO_RGB
        latent_rgb_factors_bias = _LATENT_TO_RGB_BIAS

    class EmojiSD(comfy.supported_models.SD15):  # type: ignore[misc]
        unet_config: ClassVar[dict[str, Any]] = {
            "context_dim": unet["cross_attention_dim"],
            "model_channels": unet["block_out_channels"][0],
            "channel_mult": [width // unet["block_out_channels"][0] for width in unet["block_out_channels"]],
            "num_res_blocks": [unet["layers_per_block"]] * len(unet["block_out_channels"]),
            "use_linear_in_transformer": False,
            "adm_in_channels": None,
            "use_temporal_attention": False,
        }
        unet_extra_config: ClassVar[dict[str, Any]] = {
            "num_heads": unet["attention_head_dim"],
            "num_head_channels": -1,
        }
        sampling_settings: ClassVar[dict[str, Any]] = {
            # What the host calls linear is linear in the square roots, which Diffusers calls scaled_linear.
            "beta_schedule": "linear",
            "linear_start": scheduler["beta_start"],
            "linear_end": scheduler["beta_end"],
        }
        latent_format = EmojiLatents

        def model_type(self, state_dict: Any, prefix: str = "") -> Any:  # noqa: ARG002
            return comfy.model_base.ModelType.V_PREDICTION

        def process_vae_state_dict(self, state_dict: Any) -> Any:  # noqa: ARG002
            # Only the host's own loader comes here. A VAE of 32 groups would decode other colours without a word.
            _LOG.warning('rocm-sd: for the VAE of emoji-sd, load it with the node "emoji-sd Loader (ROCm)".')
            return {}

        def clip_target(self, state_dict: Any = None) -> Any:  # noqa: ARG002
            return comfy.supported_models_base.ClipTarget(*_text_classes())

    return EmojiSD


@cache
def _text_classes() -> tuple[type, type]:
    """The host's tokenizer and text encoder with emoji-sd's vocabulary."""
    import comfy.clip_model  # noqa: PLC0415 -- only the host has them
    import comfy.sd1_clip  # noqa: PLC0415

    config = _config("text_encoder")
    special = {"start": config["bos_token_id"], "end": config["eos_token_id"], "pad": config["pad_token_id"]}

    class EmojiTextModel(comfy.clip_model.CLIPTextModel):  # type: ignore[misc]
        def __init__(self, config_dict: Any, dtype: Any, device: Any, operations: Any) -> None:
            super().__init__(config_dict, dtype, device, operations)
            width = config_dict["hidden_size"]
            self.set_input_embeddings(operations.Embedding(config["vocab_size"], width, dtype=dtype, device=device))

    class EmojiClip(comfy.sd1_clip.SDClipModel):  # type: ignore[misc]
        def __init__(self, device: Any = "cpu", dtype: Any = None, model_options: Any = None) -> None:
            super().__init__(
                device=device,
                dtype=dtype,
                max_length=config["max_position_embeddings"],
                textmodel_json_config=dict(config),
                model_class=EmojiTextModel,
                special_tokens=special,
                return_projected_pooled=False,
                model_options=model_options or {},
            )

    class EmojiTextEncoder(comfy.sd1_clip.SD1ClipModel):  # type: ignore[misc]
        def __init__(self, device: Any = "cpu", dtype: Any = None, model_options: Any = None) -> None:
            super().__init__(device=device, dtype=dtype, model_options=model_options or {}, clip_model=EmojiClip)

    class EmojiWords(comfy.sd1_clip.SDTokenizer):  # type: ignore[misc]
        def __init__(self, embedding_directory: Any = None, tokenizer_data: Any = None) -> None:
            super().__init__(
                tokenizer_path=str(MODEL_FOLDER / "tokenizer"),
                max_length=config["max_position_embeddings"],
                embedding_directory=embedding_directory,
                embedding_size=config["hidden_size"],
                tokenizer_data=tokenizer_data or {},
            )

    class EmojiTokenizer(comfy.sd1_clip.SD1Tokenizer):  # type: ignore[misc]
        def __init__(self, embedding_directory: Any = None, tokenizer_data: Any = None) -> None:
            super().__init__(embedding_directory, tokenizer_data or {}, tokenizer=EmojiWords)

    return EmojiTokenizer, EmojiTextEncoder
