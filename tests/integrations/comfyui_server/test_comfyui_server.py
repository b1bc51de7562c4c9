"""A real ComfyUI on the CPU draws emoji-sd with and without rocm-sd's nodes. Needs ROCM_SD_COMFYUI."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import emoji_workflows as workflows
import numpy as np
import pytest
from PIL import Image
from real_comfyui import Events, host_environment, running

from rocm_sd.models.emoji import MODEL_FOLDER
from rocm_sd.models.single_file import write_checkpoint

NODES = {
    "ROCmBenchmark",
    "ROCmEmojiCheckpointLoader",
    "ROCmEmojiEmptyLatent",
    "ROCmOptimizationReport",
    "ROCmOptimizedAttention",
    "ROCmOptimizedModel",
    "ROCmOptimizedVAE",
}
STEPS = 6


def apart(first, second):
    """Mean and largest difference in steps of 1/255, and PSNR in dB."""
    difference = np.abs(first.astype(np.float64) - second.astype(np.float64))
    error = float((difference**2).mean())
    return (
        float(difference.mean()),
        float(difference.max()),
        math.inf if error == 0 else 10 * math.log10(255**2 / error),
    )


@pytest.fixture(scope="module")
def stock(server):
    """Drawn before any node of rocm-sd's optimisations has run in this server."""
    return server.draw(workflows.emoji(steps=STEPS))


def test_every_node_is_there_with_its_words(server):
    info = server.get("/object_info")
    assert set(info) >= NODES
    for name in NODES:
        assert info[name]["category"].startswith("ROCm Optimizations")
        assert info[name]["description"]
    assert "rocm-sd:" not in server.log_end(1000)  # no complaint at the start


def test_the_picture_is_a_frog_on_pink(stock):
    assert stock.shape == (128, 128, 3)
    corner = stock[:12, :12].reshape(-1, 3).mean(0)
    assert np.abs(corner - (255, 150, 200)).max() < 40
    middle = stock[40:90, 40:90].reshape(-1, 3).mean(0)
    assert middle[1] > middle[2] + 60  # green, not pink


def test_built_in_and_exported_are_the_same_model(server, stock):
    built_in = server.draw(workflows.emoji(steps=STEPS, checkpoint="emoji-sd (built in)"))
    assert np.array_equal(built_in, stock)


@pytest.mark.parametrize("model", ["ROCmOptimizedModel", "ROCmOptimizedAttention"])
@pytest.mark.parametrize("level", ["auto", "memory"])
def test_optimised_equals_stock(server, stock, model, level):
    # A seed of its own per case would hide nothing; the host caches by inputs, and these inputs differ.
    ours = server.draw(workflows.optimized(workflows.emoji(steps=STEPS), model=model, level=level))
    mean, _, psnr = apart(ours, stock)
    assert mean <= 1
    assert psnr >= 45, (mean, psnr)


def test_the_report_lists_what_was_done_to_each_block(server, stock):
    """On a CPU that is nothing: norms are less exact channels-last, and ops are stock torch."""
    outputs = server.run(workflows.optimized(workflows.emoji(steps=STEPS), report=True))
    text = "\n".join(outputs["22"]["text"])
    # emoji-sd: 4 levels of 1 and 2 residual blocks and 2 in the middle; transformers in 3 levels and the middle.
    assert "14 x ResBlock: skipped, because convolutions keep their layout" in text
    assert "10 x SpatialTransformer: skipped, because " in text
    assert re.search(r"\d+ x ResnetBlock: skipped, because convolutions keep their layout", text), text  # the VAE's
    assert ": replaced" not in text
    assert "not optimised" not in text


def test_our_own_implementations_equal_stock(base, server):
    """On a CPU the ops are stock torch unless named: here they are named, and kernels run in Triton's interpreter."""
    named = "conv2d=torch,upsample_conv2d=parity_library,attention=sdpa_math,linear_residual=addmm"
    named += ",group_norm_silu=triton,layer_norm_residual=triton,linear_geglu=library_geglu,geglu=triton"
    graph = workflows.emoji(steps=2, size=64)
    wanted = server.draw(graph)
    with running(base, environment={"ROCM_SD_IMPLEMENTATION": named, "TRITON_INTERPRET": "1"}) as interpreting:
        assert np.array_equal(interpreting.draw(graph), wanted)  # without our nodes no setting of ours is read
        outputs = interpreting.run(workflows.optimized(graph, report=True))
        (ours,) = interpreting.pictures(outputs)
        assert np.array_equal(interpreting.draw(graph), wanted)
    text = "\n".join(outputs["22"]["text"])
    assert "after an error" not in text, text
    mean, largest, psnr = apart(ours, wanted)
    assert largest > 0, "not one value is rounded otherwise: did our blocks run at all?"
    assert mean <= 1
    assert psnr >= 45, (mean, largest, psnr)


def test_a_failing_fast_path_leaves_the_hosts_own(base, server):
    """An implementation that cannot do the work: stock pictures, one line in the console and one in the report."""
    graph = workflows.emoji(steps=2, size=64, seed=12)
    with running(base, environment={"ROCM_SD_IMPLEMENTATION": "attention=triton"}) as failing:
        outputs = failing.run(workflows.optimized(graph, report=True))
        (ours,) = failing.pictures(outputs)
        lines = [line for line in failing.log_end(1000).splitlines() if "attention (triton)" in line]
    assert apart(ours, server.draw(graph))[0] <= 1
    assert "does not support" in "\n".join(outputs["22"]["text"])
    assert lines
    assert len(lines) == len(set(lines))  # each once


def test_without_the_nodes_pictures_are_as_before(server, stock):
    server.draw(workflows.optimized(workflows.emoji(steps=STEPS, seed=2)))
    # Another loader's inputs and back again, so that the host computes instead of answering from its cache.
    server.draw(workflows.emoji(steps=STEPS, seed=3))
    assert np.array_equal(server.draw(workflows.emoji(steps=STEPS)), stock)


def test_previews_and_progress_reach_the_canvas(server):
    with Events(server) as events:
        graph = workflows.optimized(workflows.emoji(steps=STEPS, seed=11))
        heard = events.until(server.queue(graph, events.client_id))
    assert heard[-1]["type"] in {"execution_success", "executing"}
    steps = [e["data"]["value"] for e in heard if isinstance(e, dict) and e["type"] == "progress"]
    assert steps.count(STEPS) >= 1
    assert any(isinstance(event, bytes) and b"JFIF" in event[:64] for event in heard)


def test_ten_prompts_with_an_interrupt_leave_it_healthy(server, stock):
    with Events(server) as events:
        graphs = [workflows.emoji(steps=30, size=64, seed=100 + number) for number in range(10)]
        graphs = [workflows.optimized(graph) if number % 2 else graph for number, graph in enumerate(graphs)]
        ids = [server.queue(graph, events.client_id) for graph in graphs]
        while True:  # in the middle of the sixth, which runs our nodes
            event = events.next()
            running_now = isinstance(event, dict) and event["type"] == "progress"
            if running_now and event["data"]["prompt_id"] == ids[5] and event["data"]["value"] >= 3:
                break
        server.post("/interrupt", {})
        server.wait_for_empty_queue()
    entries = [server.finished(prompt_id) for prompt_id in ids]
    ended = [entry["status"]["status_str"] for entry in entries]
    assert ended.count("success") == 9
    assert ended[5] == "error"  # the host's word for interrupted
    assert any(kind == "execution_interrupted" for kind, _ in entries[5]["status"]["messages"])
    again = server.draw(workflows.optimized(workflows.emoji(steps=STEPS, seed=4)))
    assert apart(again, server.draw(workflows.emoji(steps=STEPS, seed=4)))[0] <= 1


def test_image_to_image_encodes_through_our_vae(server, base, stock):
    Image.fromarray(stock).save(base / "input/frog.png")
    graph = workflows.emoji(steps=STEPS, seed=6, prompt="a cat face on a yellow background")
    graph["31"] = {"class_type": "LoadImage", "inputs": {"image": "frog.png"}}
    graph["32"] = {"class_type": "VAEEncode", "inputs": {"pixels": ["31", 0], "vae": ["1", 2]}}
    graph["5"]["inputs"] |= {"latent_image": ["32", 0], "denoise": 0.6}
    del graph["4"]
    wanted = server.draw(graph)
    ours = workflows.optimized(graph)
    ours["32"]["inputs"]["vae"] = ["21", 0]
    assert apart(server.draw(ours), wanted)[0] <= 1
    assert apart(wanted, stock)[0] > 1  # it drew something else than what it was given


def test_sizes_and_batches_may_change_from_prompt_to_prompt(server):
    for size, batch in ((64, 2), (96, 1), (64, 3)):
        graph = workflows.emoji(steps=3, size=size, seed=7)
        graph["4"]["inputs"]["batch_size"] = batch
        wanted = server.pictures(server.run(graph))
        ours = server.pictures(server.run(workflows.optimized(graph)))
        assert len(ours) == len(wanted) == batch
        assert all(apart(*pair)[0] <= 1 for pair in zip(ours, wanted, strict=True))


def test_the_benchmark_measures_and_leaves_the_model_alone(server, stock):
    graph = workflows.emoji(steps=STEPS, seed=8)
    before = server.draw(graph)
    inputs = {"model": ["1", 0], "steps": 2, "repeats": 1, "width": 64, "height": 64, "optimization_level": "auto"}
    measuring = {"1": graph["1"], "40": {"class_type": "ROCmBenchmark", "inputs": inputs}}
    text = "\n".join(server.run(measuring)["40"]["text"])
    assert "Nothing was measured" not in text
    assert re.search(r"\d+(\.\d+)? (m?s|x)\b", text), text
    server.draw(workflows.emoji(steps=STEPS, seed=9))  # the host answers a repeated prompt from its cache
    assert np.array_equal(server.draw(graph), before)


def test_a_lora_works_before_our_node(server, base):
    """The host patches weights when it loads the model: our node must draw what the host draws with that LoRA."""
    import torch
    from safetensors.torch import save_file

    (base / "models/loras").mkdir(exist_ok=True)
    random = torch.Generator().manual_seed(0)
    weights = {}
    for block in ("input_blocks_1_1", "output_blocks_7_1"):
        name = f"lora_unet_{_diffusers_name(block)}_transformer_blocks_0_attn1_to_q"
        weights[f"{name}.lora_up.weight"] = torch.randn(64, 4, generator=random) * 0.3
        weights[f"{name}.lora_down.weight"] = torch.randn(4, 64, generator=random) * 0.3
    save_file(weights, base / "models/loras/test.safetensors")
    graph = workflows.emoji(steps=STEPS, seed=5)
    plain = server.draw(graph)
    graph["30"] = {
        "class_type": "LoraLoaderModelOnly",
        "inputs": {"model": ["1", 0], "lora_name": "test.safetensors", "strength_model": 1.0},
    }
    graph["5"]["inputs"]["model"] = ["30", 0]
    with_lora = server.draw(graph)
    assert apart(with_lora, plain)[0] > 1  # it does something
    ours = workflows.optimized(graph)
    ours["20"]["inputs"]["model"] = ["30", 0]
    assert apart(server.draw(ours), with_lora)[0] <= 1
    assert np.array_equal(server.draw(workflows.emoji(steps=STEPS, seed=5)), plain)


def _diffusers_name(block):
    return {"input_blocks_1_1": "down_blocks_0_attentions_0", "output_blocks_7_1": "up_blocks_3_attentions_1"}[block]


def test_the_hosts_own_loader_says_what_to_use(server):
    graph = workflows.emoji(steps=2, size=64)
    graph["1"]["class_type"] = "CheckpointLoaderSimple"
    entry = server.finished(server.queue(graph))
    assert entry["status"]["status_str"] == "error"
    assert "VAE is invalid" in json.dumps(entry["status"])
    assert 'load it with the node "emoji-sd Loader (ROCm)"' in server.log_end(1000)


@pytest.mark.parametrize("broken", ["missing", "raising"])
def test_the_host_starts_without_rocm_sd(host, base, tmp_path, monkeypatch, broken):
    """A Python without the package, or with a broken one: one readable line, no nodes, and the host runs."""
    (tmp_path / "package").mkdir()
    reason = "import gone_missing" if broken == "missing" else "raise RuntimeError('torch is too old')"
    (tmp_path / "package/rocm_sd.py").write_text(reason)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'package'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "base/custom_nodes").mkdir(parents=True)
    (tmp_path / "base/custom_nodes/rocm_sd").symlink_to((base / "custom_nodes/rocm_sd").resolve())
    with running(tmp_path / "base") as alone:
        assert "KSampler" in alone.get("/object_info")
        assert not NODES & set(alone.get("/object_info"))
        lines = [line for line in alone.log_end(1000).splitlines() if line.startswith("rocm-sd:")]
    assert len(lines) == 1
    assert ("gone_missing" in lines[0] and "pip install rocm-sd" in lines[0]) or "torch is too old" in lines[0]


def components_apart(host, folder, file):
    script = Path(__file__).with_name("compare_components.py")
    answer = subprocess.run(
        [sys.executable, str(script), host, str(folder), str(file)],
        capture_output=True, text=True, check=False, timeout=600, env=host_environment(),
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert "clip missing" not in answer.stderr
    assert "Missing VAE keys" not in answer.stderr
    return json.loads(answer.stdout.strip().splitlines()[-1])


def test_emoji_sd_in_the_host_equals_diffusers(host):
    figures = components_apart(host, MODEL_FOLDER, "emoji-sd")
    assert max(figures.values()) < 1e-5, figures


def test_the_hosts_own_loader_reads_an_exported_sd15(host, tmp_path):
    """SD 1.5's widths, which the host knows it by, with fewer levels: random weights, a third of the size."""
    folder = sd15_shaped(tmp_path / "folder")
    file = write_checkpoint(folder, tmp_path / "model.safetensors", name="random").path
    figures = components_apart(host, folder, file)
    assert max(figures.values()) < 1e-4, figures


def sd15_shaped(folder):
    import torch
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=64,
        layers_per_block=1,
        block_out_channels=(320, 640),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=768,
        attention_head_dim=8,
    )
    vae = AutoencoderKL(
        block_out_channels=(128, 256, 512, 512),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
    )
    text = CLIPTextConfig(
        vocab_size=49408,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        bos_token_id=49406,
        eos_token_id=49407,
    )
    pipe = StableDiffusionPipeline(
        unet=unet,
        vae=vae,
        text_encoder=CLIPTextModel(text),
        tokenizer=CLIPTokenizer.from_pretrained(MODEL_FOLDER / "tokenizer"),  # not compared: ids are given
        scheduler=DDIMScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1, clip_sample=False
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    # The host keeps text encoders in float16: so must the file, or the two would not have the same weights.
    pipe.to(torch.float16).save_pretrained(folder)
    return folder


def test_switching_checkpoints_leaves_no_model_behind(base):
    """The host says so, and collects garbage, where a model outlives the node's copy of it."""
    folder = base / "models/checkpoints"
    other = folder / "emoji-other.safetensors"
    shutil.copy(folder / "emoji-sd.safetensors", other)
    try:
        with running(base) as server:
            for number, name in enumerate(("emoji-sd", "emoji-other") * 3):
                graph = workflows.emoji(seed=number, steps=2, checkpoint=f"{name}.safetensors")
                server.run(workflows.optimized(graph, report=True))
            said = server.log.read_text(errors="replace")
    finally:
        other.unlink()
    assert [line for line in said.splitlines() if "memory leak" in line] == []
