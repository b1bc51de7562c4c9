"""The bytes that formulas give are those that ranks count: for the real sizes without memory, and between processes."""

from __future__ import annotations

import pytest
import torch
from cases import STRATEGIES as INSTALL
from cases import inputs_of, mesh_of, model_of
from diffusers import AutoencoderKL, UNet2DConditionModel
from jobs import Job
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from rocm_sd.bench.architectures import _UNETS, _VAE, unet_inputs
from rocm_sd.errors import InvalidOption, Unsupported
from rocm_sd.parallel.answers import kinds
from rocm_sd.parallel.layers import decoder_call, unet_call
from rocm_sd.parallel.patch_models import install_patches
from rocm_sd.parallel.ranks import Traffic, along
from rocm_sd.parallel.stages import ranges
from rocm_sd.parallel.volume import STRATEGIES, CountedRanks, stages, volume
from tiny_models import vae_of

SIDES = {"sd15": 64, "sdxl": 128}
BLOCKS = {"sd15": 9, "sdxl": 7}


@pytest.fixture(scope="module", params=SIDES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def real(family):
    """The real UNet in halves, with shapes and no memory."""
    with torch.device("meta"):
        return UNet2DConditionModel(**_UNETS[family]).eval().half()


@pytest.fixture(autouse=True)
def _stays(monkeypatch):
    """Weights of others go to the host's memory, which those without memory cannot."""
    there = nn.Module.to

    def to(module, *args, **kwargs):
        device = next((each.device.type for each in module.parameters()), "")
        return module if device == "meta" else there(module, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "to", to)


def given_to(model, family, batch=2, height=None, width=None):
    side = SIDES[family]
    return unet_inputs(model.config, batch, height or side, width or side, torch.float16)


def answers_of_blocks(model, given):
    """What each block returns, as the ranks of a pipeline tell each other once."""
    found, undo = [], []
    blocks = [*model.down_blocks, model.mid_block, *model.up_blocks]
    for block in blocks:

        def seen(_, __, answer):
            leaves, tree = pytree.tree_flatten(answer)
            found.append((kinds(leaves), tree))

        undo.append(block.register_forward_hook(seen))
    model(**given)
    for each in undo:
        each.remove()
    return found


def counted(model, family, strategy, size, rank=0, **sizes):
    """(bytes, tensors) that this rank sends in one call of the real model."""
    with torch.device("meta"), torch.no_grad():
        said = (
            answers_of_blocks(model, given_to(model, family, **{**sizes, "batch": 1}))
            if strategy == "pipeline"
            else None
        )
        ranks = CountedRanks(strategy, size, rank, said and iter(said))
        installed = INSTALL[strategy](model, ranks, [1.0] * size)
        try:
            given = given_to(model, family, **sizes)
            assert model(**given).sample.shape == given["sample"].shape
        finally:
            installed.restore()
    return ranks.traffic.sent[strategy], ranks.traffic.times[strategy]


def formula(call, strategy, size, rank=0):
    found = volume(call, strategy, size, rank)
    return found.bytes, found.times


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("strategy", ["cfg", "patch", "tensor", "pipeline"])
def test_a_real_unet_sends_what_the_formula_says(real, family, strategy, size):
    call = unet_call(_UNETS[family], 2, SIDES[family], SIDES[family])
    if strategy == "pipeline" and size > BLOCKS[family]:
        pytest.skip("it has fewer blocks than ranks")
    # Those at the edges have one neighbour; of the larger model, which takes seconds, one in the middle.
    for rank in {0, 1, size - 1} if family == "sd15" else {1}:
        assert counted(real, family, strategy, size, rank) == formula(call, strategy, size, rank), rank


@pytest.fixture(scope="module")
def small():
    """SD 1.5's depth, with fewer and narrower layers: it takes a tenth of the time."""
    config = _UNETS["sd15"] | {"block_out_channels": (32, 64, 64, 64), "layers_per_block": (1, 2, 1, 1)}
    config |= {"attention_head_dim": (4, 8, 4, 8), "transformer_layers_per_block": (1, 2, 1, 1), "norm_num_groups": 8}
    with torch.device("meta"):
        return UNet2DConditionModel(**config).eval().half()


@pytest.mark.parametrize(
    ("strategy", "size", "batch", "height", "width"),
    [
        ("patch", 3, 2, 64, 48), ("patch", 5, 1, 72, 40), ("patch", 2, 2, 61, 35), ("patch", 12, 2, 64, 64),
        ("cfg", 4, 6, 64, 64), ("cfg", 2, 3, 64, 64), ("cfg", 4, 2, 64, 64), ("tensor", 6, 2, 24, 40),
        ("pipeline", 5, 3, 40, 24),
    ],
)  # fmt: skip
def test_so_do_uneven_sizes(small, strategy, size, batch, height, width):
    call = unet_call(small.config, batch, height, width)
    sizes = {"batch": batch, "height": height, "width": width}
    for rank in (0, 1, 4 % size):
        assert counted(small, "sd15", strategy, size, rank, **sizes) == formula(call, strategy, size, rank), rank


def test_ranks_without_rows_send_nothing(small):
    call = unet_call(small.config, 2, 64, 64)
    assert len(call.rows(12)[0].counts) == 8
    assert formula(call, "patch", 12, 8) == (0, 0)
    assert volume(call, "patch", 12).sent[-1].bytes == 4 * 2 * 4 * 64 * 64 * 2


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_real_decoder_sends_what_the_formula_says(size):
    with torch.device("meta"), torch.no_grad():
        vae = AutoencoderKL(**_VAE).eval().half()
        for rank in (0, size - 1):
            ranks = CountedRanks("patch", size, rank)
            installed = install_patches(vae.decoder, ranks, [1.0] * size)
            vae.decode(torch.empty(1, 4, 64, 64, dtype=torch.float16))
            installed.restore()
            call = decoder_call(_VAE, 1, 64, 64)
            assert (ranks.traffic.sent["patch"], ranks.traffic.times["patch"]) == formula(call, "patch", size, rank)


def test_layers_have_the_weights_and_the_products_of_the_model(real, family):
    call = unet_call(_UNETS[family], 2, SIDES[family], SIDES[family])
    named = dict(real.named_modules())
    for block, layers in call.blocks.items():
        assert sum(layer.parameters for layer in layers) == sum(each.numel() for each in named[block].parameters())
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as found:
        real(**given_to(real, family))
    assert sum(call.flops(layer) for layer in call.layers) == pytest.approx(found.get_total_flops(), rel=1e-4)


def test_blocks_belong_to_the_ranks_that_the_pipeline_gives_them(real, family):
    call = unet_call(_UNETS[family], 2, SIDES[family], SIDES[family])
    for size in (2, 4, 7):
        costs = [sum(each.numel() for each in dict(real.named_modules())[block].parameters()) for block in call.blocks]
        assert list(stages(call, size).values()) == ranges(costs, [1.0] * size)


def test_data_sends_nothing_and_neither_does_one_rank():
    call = unet_call(_UNETS["sd15"], 2, 64, 64)
    assert volume(call, "data", 1024).bytes == 0
    assert all(volume(call, strategy, 1).bytes == 0 for strategy in STRATEGIES)
    assert volume(unet_call(_UNETS["sd15"], 1, 64, 64), "cfg", 2).bytes == 0


def test_a_volume_says_what_for():
    found = volume(unet_call(_UNETS["sd15"], 2, 64, 64), "patch", 2).kinds
    assert list(found) == ["halo", "statistics", "keys and values", "answer"]
    # 61 group norms of 32 groups; five layers of each of three sizes and one of the coarsest, rows halved.
    assert found["statistics"] == 61 * 3 * 2 * 32 * 4
    tokens = 5 * (320 * 4096 + 640 * 1024 + 1280 * 256) + 1280 * 64
    assert found["keys and values"] == 2 * 2 * tokens // 2 * 2
    assert found["answer"] == 2 * 4 * 32 * 64 * 2


def test_unknown_blocks_and_strategies_are_refused():
    with pytest.raises(Unsupported, match="KDownBlock2D"):
        unet_call(_UNETS["sd15"] | {"down_block_types": ("KDownBlock2D",) * 4}, 2, 64, 64)
    with pytest.raises(InvalidOption, match="strategy"):
        volume(unet_call(_UNETS["sd15"], 2, 64, 64), "luck", 2)


# Between processes.


def run_unet(strategy, family, height, width, batch):
    ranks = along(mesh_of(**{strategy: 2}), strategy, Traffic())
    model = model_of(family)
    installed = INSTALL[strategy](model, ranks, [1.0, 1.0])
    with torch.no_grad():
        model(**inputs_of(family, height, width, batch))
    installed.restore()
    return ranks.rank, ranks.traffic.sent[strategy], ranks.traffic.times[strategy], dict(model.config)


def run_decoder(height, width):
    ranks = along(mesh_of(patch=2), "patch", Traffic())
    torch.manual_seed(3)
    vae = vae_of()
    install_patches(vae.decoder, ranks, [1.0, 1.0])
    with torch.no_grad():
        vae.decode(torch.randn(2, 4, height, width))
    return ranks.rank, ranks.traffic.sent["patch"], ranks.traffic.times["patch"], dict(vae.config)


@pytest.fixture(scope="module")
def job():
    job = Job(2)
    yield job
    job.close()


@pytest.mark.parametrize("strategy", ["cfg", "patch", "tensor", "pipeline"])
def test_two_processes_send_what_the_formula_says(job, family, strategy):
    for rank, sent, times, config in job.call(run_unet, strategy, family, 16, 8, 2):
        assert (sent, times) == formula(unet_call(config, 2, 16, 8, 4), strategy, 2, rank)


def test_two_processes_decode_with_what_the_formula_says(job):
    for rank, sent, times, config in job.call(run_decoder, 8, 8):
        assert (sent, times) == formula(decoder_call(config, 2, 8, 8, 4), "patch", 2, rank)
