"""Diffusers' models from graphs; on a CPU from traces, which have baked in what a graph would have baked in."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque

import pytest
import torch
from peft import LoraConfig

import rocm_sd
from pipelines import CASES, call, tiny_pipeline, tiny_unet
from rocm_sd import numerics
from rocm_sd.engine import denoising
from rocm_sd.engine.capture import captured, hoisting
from rocm_sd.errors import Unsupported


@pytest.fixture(autouse=True)
def step_graph(monkeypatch):
    monkeypatch.setenv("ROCM_SD_STEP_GRAPH", "1")
    # On a GPU convolutions of float32 would keep 10 bits.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture
def unet(device):
    return tiny_unet().eval().to(device)


def inputs(unet, batch=2, size=8, tokens=7, seed=0):
    random = torch.Generator().manual_seed(seed)
    text = torch.randn(batch, tokens, unet.config.cross_attention_dim, generator=random)
    sample = torch.randn(batch, 4, size, size, generator=random)
    return sample.to(unet.device), torch.tensor(500 + seed, device=unet.device), text.to(unet.device)


@torch.no_grad()
def answer(unet, *given, **named):
    return unet(*given, return_dict=False, **named)[0]


def stock_answer(unet, *given, **named):
    """What the same weights give without any of it."""
    rocm_sd.restore(unet)
    stock = answer(unet, *given, **named)
    exact = answer(unet.double(), *(g.double() if g.is_floating_point() else g for g in given), **named)
    unet.float()
    return stock, exact


def capture(unet, *given, **named):
    for _ in range(3):
        result = answer(unet, *given, **named)
    assert graphs(unet).replays
    return result


def graphs(unet):
    return denoising._CAPTURED[unet][0]


def notes(unet):
    return " ".join(rocm_sd.report(unet).notes)


def test_every_call_of_a_kind_gives_the_same_bits_and_stocks_values(unet):
    given = inputs(unet)
    rocm_sd.optimize(unet)
    first, second, third = (answer(unet, *given) for _ in range(3))
    assert graphs(unet).replays == 1
    assert torch.equal(first, second)
    assert torch.equal(first, third)
    numerics.require("UNet", third, *reversed(stock_answer(unet, *given)))


def test_other_values_are_read_at_each_replay(unet):
    rocm_sd.optimize(unet)
    capture(unet, *inputs(unet))
    for seed in (1, 2):
        given = inputs(unet, seed=seed)
        ours = answer(unet, *given)
        stock, exact = stock_answer(unet, *given)
        numerics.require("UNet", ours, exact, stock)
        rocm_sd.optimize(unet)
        capture(unet, *inputs(unet))


def test_answers_stay_when_the_next_call_is_replayed(unet):
    rocm_sd.optimize(unet)
    one, other = inputs(unet), inputs(unet, seed=1)
    kept = capture(unet, *one)
    before = kept.clone()
    answer(unet, *other)
    assert torch.equal(kept, before)


@pytest.mark.parametrize("timestep", [500, 500.0, torch.tensor([500, 500])])
def test_timesteps_in_every_form_stock_takes(unet, timestep):
    x, _, text = inputs(unet)
    timestep = timestep.to(x.device) if isinstance(timestep, torch.Tensor) else timestep
    rocm_sd.optimize(unet)
    ours = capture(unet, x, timestep, text)
    rocm_sd.restore(unet)
    torch.testing.assert_close(ours, answer(unet, x, timestep, text), rtol=1e-4, atol=1e-4)


def test_a_number_as_timestep_is_not_baked_in(unet):
    x, _, text = inputs(unet)
    rocm_sd.optimize(unet)
    capture(unet, x, 500, text)
    ours = answer(unet, x, 20, text)
    assert len(graphs(unet)._entries) == 1
    rocm_sd.restore(unet)
    torch.testing.assert_close(ours, answer(unet, x, 20, text), rtol=1e-4, atol=1e-4)


def test_the_dict_that_stock_returns(unet):
    given = inputs(unet)
    rocm_sd.optimize(unet)
    with torch.no_grad():
        results = [unet(*given) for _ in range(3)]
    assert type(results[2]).__name__ == "UNet2DConditionOutput"
    assert torch.equal(results[0].sample, results[2].sample)


def changes():
    def scale(unet):
        unet.set_adapters(["style"], [0.25])

    def disable(unet):
        unet.disable_adapters()

    def fuse(unet):
        unet.fuse_lora(lora_scale=0.25)

    def raw_weights(unet):
        unet.mid_block.resnets[0].conv1.weight.data.mul_(1.5)

    def reassigned(unet):
        unet.conv_in.weight = torch.nn.Parameter(unet.conv_in.weight * 2, requires_grad=False)

    def seamless(unet):
        unet.conv_in.padding_mode = "circular"
        unet.conv_in._reversed_padding_repeated_twice = [1, 1, 1, 1]

    def free_u(unet):
        unet.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)

    def another_layer(unet):
        layer = torch.nn.Conv2d(unet.conv_out.in_channels, 4, 3, padding=1).requires_grad_(False)
        unet.conv_out = layer.to(unet.device)

    return [scale, disable, fuse, raw_weights, reassigned, seamless, free_u, another_layer]


@pytest.mark.parametrize("change", changes(), ids=lambda change: change.__name__)
def test_whatever_changes_in_the_model_is_in_the_next_answer(unet, change):
    torch.manual_seed(1)
    config = LoraConfig(r=2, target_modules=["to_k", "to_v", "time_emb_proj", "conv1"], init_lora_weights=False)
    unet.add_adapter(config, "style")
    unet.requires_grad_(False)
    given = inputs(unet)
    rocm_sd.optimize(unet)
    before = capture(unet, *given)
    change(unet)
    ours = answer(unet, *given)
    again = capture(unet, *given)
    stock, exact = stock_answer(unet, *given)
    assert not torch.allclose(before, stock, rtol=1e-3, atol=1e-3)
    numerics.require("UNet", ours, exact, stock)
    numerics.require("UNet", again, exact, stock)


def test_more_changes_than_a_model_that_keeps_changing_may_have(unet):
    unet.add_adapter(LoraConfig(r=2, target_modules=["to_k"], init_lora_weights=False), "style")
    unet.requires_grad_(False)
    given = inputs(unet)
    rocm_sd.optimize(unet)
    for number in range(8):
        unet.set_adapters(["style"], [0.1 * number])
        capture(unet, *given)
    assert "keeps changing" not in notes(unet)
    assert "scaling has changed" in notes(unet)


def test_a_model_that_changes_itself_is_not_captured(unet):
    class Counting(type(unet.conv_out)):
        def forward(self, x):
            self.calls = getattr(self, "calls", 0) + 1
            return super().forward(x)

    Counting.__module__ = "diffusers.models.counting"
    unet.conv_out.__class__ = Counting
    given = inputs(unet)
    rocm_sd.optimize(unet)
    results = [answer(unet, *given) for _ in range(8)]
    assert "conv_out: calls has changed" in notes(unet)
    assert not graphs(unet).replays
    assert all(torch.allclose(results[0], result, rtol=1e-4, atol=1e-4) for result in results)


def test_a_hook_inside_is_called_every_time_and_graphs_come_back_without_it(unet):
    given = inputs(unet)
    rocm_sd.optimize(unet)
    capture(unet, *given)
    seen = []
    handle = unet.mid_block.register_forward_hook(lambda *_: seen.append(1))
    for _ in range(4):
        answer(unet, *given)
    assert len(seen) == 4
    assert "has a hook" in notes(unet)
    handle.remove()
    before = graphs(unet).replays
    capture(unet, *given)
    assert graphs(unet).replays > before


def test_a_processor_of_the_users_own_is_called_every_time(unet):
    from diffusers.models.attention_processor import AttnProcessor2_0

    class Watching(AttnProcessor2_0):
        calls = 0

        def __call__(self, *args, **named):
            Watching.calls += 1
            return super().__call__(*args, **named)

    given = inputs(unet)
    rocm_sd.optimize(unet)
    capture(unet, *given)
    unet.set_attn_processor(Watching())
    answer(unet, *given)
    each = Watching.calls
    answer(unet, *given)
    answer(unet, *given)
    assert each
    assert Watching.calls == 3 * each


def test_a_replay_that_differs_is_not_used(unet, monkeypatch):
    given = inputs(unet)
    rocm_sd.optimize(unet)
    real = captured.capture_graph

    def broken(function, device):
        graph = real(function, device)
        return captured.Graph(graph.outputs, lambda: [o.add_(1) for o in graph.outputs])

    monkeypatch.setattr(captured, "capture_graph", broken)
    results = [answer(unet, *given) for _ in range(4)]
    assert "captured in blocks, because its replay differs from the model's forward" in notes(unet)
    assert graphs(unet).replays == 1
    assert all(torch.allclose(results[0], result, rtol=1e-4, atol=1e-4) for result in results)


def test_a_capture_that_fails_leaves_the_model_running(unet, monkeypatch):
    def failing(function, device):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    given = inputs(unet)
    stock = answer(unet, *given)
    rocm_sd.optimize(unet)
    monkeypatch.setattr(captured, "capture_graph", failing)
    monkeypatch.setattr(captured, "capture_blocks", failing)
    for _ in range(6):
        torch.testing.assert_close(answer(unet, *given), stock, rtol=1e-4, atol=1e-4)
    assert "a call is not captured, because RuntimeError: operation not permitted when stream is capturing" in notes(
        unet
    )


def test_a_wrong_replay_of_what_is_computed_once_a_picture_reaches_no_step(unet, monkeypatch):
    real, replays = hoisting.capture_graph, []

    def stale(function, device):
        graph = real(function, device)

        def replay():
            replays.append(1)
            if len(replays) != 3:
                graph.replay()

        return captured.Graph(graph.outputs, replay)

    monkeypatch.setattr(hoisting, "capture_graph", stale)
    rocm_sd.optimize(unet)
    ours = [answer(unet, *inputs(unet, seed=seed)) for seed in range(5)]
    assert graphs(unet).replays == 3
    assert len(replays) == 3, "and it is not replayed any more"
    assert "what is computed once a picture runs eagerly, because a graph of it differs by" in notes(unet)
    for seed, one in enumerate(ours):
        stock, exact = stock_answer(unet, *inputs(unet, seed=seed))
        numerics.require("UNet", one, exact, stock)


def test_a_graph_that_is_slower_is_given_up_with_that_of_what_is_computed_once(unet, monkeypatch):
    times = deque([5.1, 4.9] * 3)
    monkeypatch.setattr(captured, "_milliseconds", lambda call, _device: (call(), times.popleft())[1])
    rocm_sd.optimize(unet)
    ours = [answer(unet, *inputs(unet, seed=seed)) for seed in range(5)]
    (entry,) = graphs(unet)._entries
    assert entry.graph is None
    assert entry.prepared._graph is None
    assert "takes 5.1 ms and eager 4.9 ms: it runs eagerly" in notes(unet)
    for seed, one in enumerate(ours):
        stock, exact = stock_answer(unet, *inputs(unet, seed=seed))
        numerics.require("UNet", one, exact, stock)


def test_what_a_failed_capture_held_is_free_before_the_model_answers(unet, monkeypatch):
    held = []

    class Held:
        """As a tensor of the capture that ran out of memory."""

    def failing(function, device):
        tensor = Held()
        held.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError("out of memory")

    given = inputs(unet)
    rocm_sd.optimize(unet)
    answer(unet, *given)
    forward = type(unet).forward
    seen = []
    monkeypatch.setattr(captured, "capture_graph", failing)
    monkeypatch.setattr("rocm_sd.engine.capture.hoisting.capture_graph", failing)

    def watched(*args, **named):
        seen.append(held and held[-1]() is None)
        return forward(*args, **named)

    monkeypatch.setattr(type(unet), "forward", watched)
    answer(unet, *given)
    assert held
    assert seen[-1] is True
    assert "OutOfMemoryError: out of memory" in notes(unet)


def test_wrong_input_gets_an_error_that_names_the_shapes_and_the_next_call_is_right(unet):
    x, t, text = inputs(unet)
    rocm_sd.optimize(unet)
    with pytest.raises(Unsupported, match=r"weight of shape \(64, 32\): it takes \[N, 31\]"):
        answer(unet, x, t, text[..., :-1])
    with pytest.raises(RuntimeError, match="expected input"):
        answer(unet, x[:, :3], t, text)
    capture(unet, x, t, text)


def test_gradients_run_stock(unet):
    rocm_sd.optimize(unet)
    capture(unet, *inputs(unet))
    x, t, text = inputs(unet)
    unet(x.requires_grad_(), t, text).sample.sum().backward()
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())


def test_two_threads_at_once(unet):
    given = [inputs(unet, seed=seed) for seed in range(2)]
    expected = [answer(unet, *one) for one in given]
    rocm_sd.optimize(unet)
    for one in given:
        capture(unet, *one)
    right = []

    def work(number):
        results = [answer(unet, *given[number]) for _ in range(5)]
        right.extend(torch.allclose(result, expected[number], rtol=1e-3, atol=1e-4) for result in results)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 10


def test_restore_gives_back_forward_and_weights(unet):
    weights = {name: p.detach().clone() for name, p in unet.named_parameters()}
    given = inputs(unet)
    stock = answer(unet, *given)
    rocm_sd.optimize(unet)
    capture(unet, *given)
    rocm_sd.restore(unet)
    assert "forward" not in unet.__dict__
    assert torch.equal(answer(unet, *given), stock)
    storages = [p.untyped_storage().data_ptr() for p in unet.parameters()]
    assert len(set(storages)) == len(storages)
    assert all(torch.equal(weights[name], p) for name, p in unet.named_parameters())


def test_nothing_outlives_the_model(device):
    unet = rocm_sd.optimize(tiny_unet().eval().to(device))
    capture(unet, *inputs(unet))
    gone = weakref.ref(unet)
    del unet
    gc.collect()
    assert gone() is None


def test_pipelines_and_their_schedulers_can_be_collected(tmp_path, device):
    pipe = rocm_sd.optimize(tiny_pipeline(tmp_path).to(device))
    pipe.set_progress_bar_config(disable=True)
    for _ in range(2):
        pipe("a frog", num_inference_steps=2, height=16, width=16, output_type="latent")
    gone = [weakref.ref(part) for part in (pipe, pipe.unet, pipe.scheduler)]
    del pipe
    gc.collect()
    assert [part() for part in gone] == [None, None, None]


def test_a_model_with_hooks_of_diffusers_can_be_collected(tmp_path, monkeypatch):
    """Flux has a registry of hooks on its transformer, which holds the transformer."""
    monkeypatch.setenv("ROCM_SD_STEP_GRAPH", "1")
    case = CASES["flux-dev"]
    pipe = rocm_sd.optimize(case.build(tmp_path))
    for seed in range(2):
        call(pipe, case, seed)
    assert "1 graph of its forward" in " ".join(rocm_sd.report(pipe).notes)
    gone = weakref.ref(pipe.transformer)
    del pipe
    gc.collect()
    assert gone() is None
