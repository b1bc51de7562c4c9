"""Graphs in ComfyUI's API format, for the tests: emoji-sd with and without rocm-sd's nodes."""

from __future__ import annotations

LOADER, SAMPLER, DECODER, SAVER = "1", "5", "6", "7"


def emoji(
    *, seed=1, steps=8, size=128, prompt="a frog on a pink background", cfg=3.0, checkpoint="emoji-sd.safetensors"
):
    return {
        "1": {"class_type": "ROCmEmojiCheckpointLoader", "inputs": {"ckpt_name": checkpoint}},
        "2": {"class_type": "CLIPTextEncode", "inputs": {"text": prompt, "clip": ["1", 1]}},
        "3": {"class_type": "CLIPTextEncode", "inputs": {"text": "", "clip": ["1", 1]}},
        "4": {"class_type": "ROCmEmojiEmptyLatent", "inputs": {"width": size, "height": size, "batch_size": 1}},
        "5": {
            "class_type": "KSampler",
            "inputs": {
                "model": ["1", 0],
                "positive": ["2", 0],
                "negative": ["3", 0],
                "latent_image": ["4", 0],
                "seed": seed,
                "steps": steps,
                "cfg": cfg,
                "sampler_name": "euler",
                "scheduler": "sgm_uniform",
                "denoise": 1.0,
            },
        },
        "6": {"class_type": "VAEDecode", "inputs": {"samples": ["5", 0], "vae": ["1", 2]}},
        "7": {"class_type": "SaveImage", "inputs": {"images": ["6", 0], "filename_prefix": "test"}},
    }


def optimized(graph, *, model="ROCmOptimizedModel", level="auto", report=False):
    """The same graph with rocm-sd's nodes between the loader and what uses its model and its VAE."""
    inputs = {"model": ["1", 0], "optimization_level": level}
    if model == "ROCmOptimizedModel":
        inputs["quality"] = "exact"
    added = {
        "20": {"class_type": model, "inputs": inputs},
        "21": {"class_type": "ROCmOptimizedVAE", "inputs": {"vae": ["1", 2], "optimization_level": level}},
    }
    if report:
        added["22"] = {
            "class_type": "ROCmOptimizationReport",
            "inputs": {"model": ["20", 0], "vae": ["21", 0], "after": ["6", 0]},
        }
    changed = {name: {**node, "inputs": dict(node["inputs"])} for name, node in graph.items()}
    changed[SAMPLER]["inputs"]["model"] = ["20", 0]
    changed[DECODER]["inputs"]["vae"] = ["21", 0]
    return changed | added
