"""How far a checkpoint inside ComfyUI is from its Diffusers folder: python compare_components.py HOST FOLDER FILE.

FILE is a checkpoint for the host's own loader, or "emoji-sd" for the loader node of rocm-sd. Both sides run in float32;
each figure is the largest difference divided by the largest value.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import launch_comfyui
import torch


def apart(ours, theirs):
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    return float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())


def loaded(file):
    import comfy.sd

    if file == "emoji-sd":
        from rocm_sd.integrations.comfyui.emoji import BUILT_IN, ROCmEmojiCheckpointLoader

        return ROCmEmojiCheckpointLoader().load_checkpoint(BUILT_IN)
    return comfy.sd.load_checkpoint_guess_config(file)[:3]


@torch.inference_mode()
def main():
    host, folder, file = sys.argv[1:]
    launch_comfyui.prepare(Path(host))
    sys.argv = ["comfyui", "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.model_management
    from diffusers import StableDiffusionPipeline

    pipe = StableDiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    model, clip, vae = loaded(file)
    random = torch.Generator().manual_seed(0)
    text = pipe.text_encoder.config
    end = text.eos_token_id
    words = torch.randint(3, min(text.vocab_size, 3000), (6,), generator=random).tolist()
    ids = [text.bos_token_id, *words, *[end] * (text.max_position_embeddings - 7)]
    encoded = clip.encode_from_tokens({"l": [[(token, 1.0) for token in ids]]})
    wanted = pipe.text_encoder(torch.tensor([ids]))[0]
    channels = pipe.unet.config.in_channels
    latents = torch.randn(2, channels, 16, 24, generator=random)
    context = torch.randn(2, 77, pipe.unet.config.cross_attention_dim, generator=random)
    times = torch.tensor([17.0, 803.0])
    comfy.model_management.load_models_gpu([model])
    denoised = model.model.diffusion_model(latents, timesteps=times, context=context)
    picture = vae.first_stage_model.decode(latents[:1])
    sigmas = ((1 - pipe.scheduler.alphas_cumprod) / pipe.scheduler.alphas_cumprod).sqrt()
    figures = {
        "text": apart(encoded, wanted),
        "unet": apart(denoised, pipe.unet(latents, times, context).sample),
        "vae": apart(picture, pipe.vae.decode(latents[:1]).sample),
        "vae_encode": apart(vae.first_stage_model.encode(picture), pipe.vae.encode(picture).latent_dist.mode()),
        "sigmas": apart(model.model.model_sampling.sigmas, sigmas),
        "scale": abs(model.model.latent_format.scale_factor / pipe.vae.config.scaling_factor - 1),
    }
    if file == "emoji-sd":
        prompt = "a frog on a pink background"
        theirs = pipe.tokenizer(prompt, padding="max_length", max_length=77)["input_ids"]
        figures["words"] = float([token for token, _ in clip.tokenize(prompt)["l"][0]] != theirs)
    sys.stdout.write(f"\n{json.dumps(figures)}\n")


if __name__ == "__main__":
    main()
