"""Hosts that the extension cannot run in, and what the fakes claim about the one that it can."""

from __future__ import annotations

import ast
import configparser
import inspect
import runpy
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from a1111_world import FAKE_HOST, host_or_skip, start_host

import rocm_sd.integrations.a1111 as package
from rocm_sd.integrations.a1111 import host as host_module
from rocm_sd.integrations.a1111.switch import SWITCH

EXTENSION = Path(package.__file__).parent / "extension"


def shown_on(panel, host, monkeypatch):
    """The text of the panel that the class shows."""
    shown = []
    monkeypatch.setattr(host.gradio, "HTML", lambda value="", **_named: shown.append(value))
    assert panel().ui(False) == []
    return " ".join(shown)


def nothing_was_hooked(host):
    return not host.script_callbacks.callbacks


def test_forge_is_distinguished_from_the_host(host, tmp_path, monkeypatch, capsys):
    (tmp_path / "modules_forge.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    panel = package.register()
    text = capsys.readouterr().out
    assert "Forge" in text
    assert text.count("\n") == 1
    assert "Nothing was changed" in text
    assert nothing_was_hooked(host)
    assert "Forge" in shown_on(panel, host, monkeypatch)


def test_sd_next_is_distinguished_from_the_host(host, monkeypatch, capsys):
    host.shared.backend = "diffusers"
    panel = package.register()
    assert "SD.Next" in capsys.readouterr().out
    assert nothing_was_hooked(host)
    assert "rocm_sd.optimize(pipe)" in shown_on(panel, host, monkeypatch)


@pytest.mark.parametrize("version", ["2.1.2+rocm5.6", "1.13.1", "2.10.0a0+git1"])
def test_a_torch_that_is_too_old_is_said_with_what_to_do(host, monkeypatch, capsys, version):
    monkeypatch.setattr(metadata, "version", lambda _name: version)
    panel = package.register()
    text = capsys.readouterr().out
    assert version in text
    assert "2.11" in text
    assert "--reinstall-torch" in text
    assert nothing_was_hooked(host)
    assert version in shown_on(panel, host, monkeypatch)


def test_a_torch_that_is_new_enough_is_taken():
    assert host_module.torch_problem("2.11.0") is None
    assert host_module.torch_problem("2.13.0+rocm7.1") is None
    assert host_module.torch_problem("3.0") is None
    project = (Path(package.__file__).parents[4] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"torch>={".".join(map(str, host_module.LEAST_TORCH))}"' in project


def test_a_host_that_is_too_old_is_said(host, monkeypatch, capsys):
    monkeypatch.delattr(host.script_callbacks, "on_list_unets")
    package.register()
    text = capsys.readouterr().out
    assert "modules.script_callbacks.on_list_unets" in text
    assert "git pull" in text
    assert nothing_was_hooked(host)


def test_without_triton_it_runs_and_says_so(host, monkeypatch, capsys):
    from rocm_sd.integrations.a1111 import script

    monkeypatch.setattr(script.util, "find_spec", lambda _name: None)
    assert script.hook_in() is not None
    assert "triton is not installed" in capsys.readouterr().out


def test_whatever_fails_at_the_start_the_host_starts(host, monkeypatch, capsys):
    monkeypatch.setattr(host_module, "why_not", lambda: 1 / 0)
    assert package.register() is not None
    assert "ZeroDivisionError" in capsys.readouterr().out


def test_importing_the_package_needs_no_host_and_no_torch():
    code = (
        "import sys, rocm_sd.integrations.a1111 as a\n"
        "from rocm_sd.integrations.a1111 import host, messages, permission\n"
        "assert 'torch' not in sys.modules and 'modules' not in sys.modules\n"
        "print(a.register())"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.splitlines()[-1] == "None"
    assert "modules.scripts" in ran.stdout


def test_it_needs_nothing_that_the_host_pins_another_version_of():
    """install.py brings no requirements: what is imported must be there without them."""
    code = (
        "import sys\n"
        "for name in ('diffusers', 'transformers', 'accelerate', 'typer', 'PIL', 'safetensors'):\n"
        "    sys.modules[name] = None\n"
        "from rocm_sd.integrations.a1111 import script\n"
        "print('imported')"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert ran.stdout == "imported\n", ran.stderr


def test_the_extensions_script_gives_the_host_a_class(host):
    found = runpy.run_path(str(EXTENSION / "scripts" / "rocm_sd_optimization.py"))
    classes = [value for value in found.values() if inspect.isclass(value) and issubclass(value, host.scripts.Script)]
    assert [kind.__name__ for kind in classes] == ["ROCmSDOptimization"]


def test_without_the_package_the_script_says_what_to_type(host, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rocm_sd.integrations.a1111", None)
    found = runpy.run_path(str(EXTENSION / "scripts" / "rocm_sd_optimization.py"))
    text = capsys.readouterr().out
    assert f"{sys.executable} -m pip install --no-deps rocm-sd" in text
    assert not any(inspect.isclass(value) for name, value in found.items() if not name.startswith("__"))
    assert nothing_was_hooked(host)


def install(capsys):
    runpy.run_path(str(EXTENSION / "install.py"), run_name="__main__")
    return capsys.readouterr().out


def test_install_brings_what_is_missing_and_no_more(host, monkeypatch, capsys):
    monkeypatch.setattr(host.launch, "installed", {"rich"})
    monkeypatch.setattr(host.launch, "commands", [])
    assert install(capsys) == ""
    # With its requirements it would replace the versions that the host pins.
    assert host.launch.commands == ["install --no-deps rocm-sd", "install --no-deps platformdirs"]
    assert install(capsys) == ""
    assert len(host.launch.commands) == 2


def test_install_that_fails_says_what_to_type(host, monkeypatch, capsys):
    monkeypatch.setattr(host.launch, "installed", set())
    monkeypatch.setattr(host.launch, "fails", "no network\nat all")
    text = install(capsys)
    assert "no network" in text
    assert "at all" not in text
    assert "-m pip install --no-deps rocm-sd" in text


def test_install_leaves_a_host_with_an_old_torch_alone(host, monkeypatch, capsys):
    monkeypatch.setattr(host.launch, "installed", set())
    monkeypatch.setattr(host.launch, "commands", [])
    monkeypatch.setattr(metadata, "version", lambda _name: "2.1.2")
    assert "--reinstall-torch" in install(capsys)
    assert host.launch.commands == []


def test_install_outside_of_the_host_ends_well(as_new, capsys):
    assert "ModuleNotFoundError" in install(capsys)


def test_the_extensions_metadata_can_be_read():
    parsed = configparser.ConfigParser()
    parsed.read(EXTENSION / "metadata.ini")
    assert parsed.get("Extension", "Name") == "rocm-sd"


# What the fakes leave out, or have for themselves.
_OWN = {
    "processing.process_images", "processing._sampled", "sd_hijack.hijack", "script_callbacks._add", "shared.Options",
}  # fmt: skip
_MOVED = {"shared.OptionInfo": "options.OptionInfo", "shared.Options": "options.Options"}


def functions(path):
    """Every function and method of a file by name, and its names of arguments; classes with what they define."""
    found = {}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = _arguments(node)
        if isinstance(node, ast.ClassDef):
            found[node.name] = None
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    found[f"{node.name}.{inner.name}"] = _arguments(inner)
                targets = getattr(inner, "targets", [getattr(inner, "target", None)])
                found.update({f"{node.name}.{t.id}": None for t in targets if isinstance(t, ast.Name)})
    return found


def _arguments(node):
    given = node.args
    return [
        a.arg for a in (*given.args, *filter(None, (given.vararg,)), *given.kwonlyargs, *filter(None, (given.kwarg,)))
    ]


def fake_modules():
    return sorted(path.relative_to(FAKE_HOST) for path in FAKE_HOST.rglob("*.py") if path.stat().st_size)


@pytest.mark.parametrize("path", [p for p in fake_modules() if p.parts[0] == "modules"], ids=str)
def test_the_fakes_have_the_names_and_arguments_of_the_real_host(path):
    folder = host_or_skip()
    stem = path.stem
    for name, arguments in functions(FAKE_HOST / path).items():
        full = f"{stem}.{name}"
        if any(full == own or full.startswith(f"{own}.") for own in _OWN) or name.endswith("__init__"):
            continue
        place = path
        for fake, real in _MOVED.items():
            if full == fake or full.startswith(f"{fake}."):
                place = path.with_name(f"{real.split('.')[0]}.py")
        theirs = functions(folder / place)
        assert name in theirs, f"{place} has no {name}"
        assert arguments is None or theirs[name] == arguments, f"{place}: {name}"


# Attributes of the host that the extension reads and that no fake defines by a def or a class.
_READ = {
    "modules/shared.py": ("loaded_hypernetworks", "opts", "sd_model", "OptionInfo"),
    "modules/devices.py": ("unet_needs_upcast", "fp8", "device"),
    "modules/sd_hijack.py": ("ldm_original_forward", "sgm_original_forward"),
    "modules/sd_unet.py": ("original_forward", "current_unet"),
    "modules/lowvram.py": ("sd_model.lowvram",),
    "modules/sd_models.py": ("applied_token_merged_ratio", "sd_checkpoint_info"),
    "modules/processing.py": ("extra_generation_params", "def comment(self, text)", "p.scripts.process(p)"),
    "modules/shared_options.py": ('"upcast_attn"', '"sd_unet"', '"batch_cond_uncond"'),
    "modules/sd_samplers_cfg_denoiser.py": ("self.step += 1", "CFGDenoiserParams(x_in, image_cond_in, sigma_in,"),
    "modules/sd_samplers_common.py": ("state.sampling_step = step", "self.model_wrap_cfg.steps = steps",
                                      "self.model_wrap_cfg.total_steps = self.config.total_steps(steps)",
                                      "self.model_wrap_cfg.step = 0"),
    "modules/sd_hijack_unet.py": ("class TorchHijackForUnet", "def cat(self, tensors", "th = TorchHijackForUnet()"),
    "modules/launch_utils.py": ("def is_installed(package)", "def run_pip(command, desc=None"),
    "launch.py": ("is_installed", "run_pip"),
    "extensions-builtin/Lora/networks.py": ("loaded_networks", "def network_apply_weights(", "originals",
                                             "network_layer_name", "network_current_names", "lora_functional"),
    "extensions-builtin/Lora/lora_patches.py": ("Linear_forward", "Conv2d_forward", "GroupNorm_forward",
                                                 "LayerNorm_forward"),
}  # fmt: skip


@pytest.mark.parametrize("path", _READ)
def test_the_real_host_has_what_is_read_of_it(path):
    text = (host_or_skip() / path).read_text(encoding="utf-8")
    assert [name for name in _READ[path] if name not in text] == []


def test_the_real_host_asks_scripts_before_it_chooses_its_unet():
    text = (host_or_skip() / "modules" / "processing.py").read_text(encoding="utf-8")
    body = text[text.index("def process_images_inner(") :]
    assert body.index("p.scripts.process(p)") < body.index("sd_unet.apply_unet()") < body.index("p.sample(")


def test_the_real_host_tells_of_a_step_around_the_calls_of_its_unet():
    text = (host_or_skip() / "modules" / "sd_samplers_cfg_denoiser.py").read_text(encoding="utf-8")
    body = text[text.index("def forward(self, x, sigma") :]
    before, after = body.index("cfg_denoiser_callback("), body.index("cfg_denoised_callback(")
    first, last = body.index("self.inner_model(x_in"), body.rindex("self.inner_model(x_in")
    assert before < first < last < after < body.index("self.step += 1")


def test_jobs_with_the_unets_of_the_real_host(as_new, monkeypatch):
    """Its own file for them, which is what decides whose UNet is called."""
    monkeypatch.setenv("ROCM_SD_STEP_GRAPH", "1")
    host = start_host(real=("sd_unet",))
    script = package.register()()
    host.sd_unet.list_unets()

    def pictures(*args):
        job = host.processing.StableDiffusionProcessing()
        return host.processing.process_images(job, script, args, steps=5).images[0]

    stock = pictures(False, "auto", "exact")
    ours = pictures(True, "auto", "exact")
    assert type(host.sd_unet.current_unet).__name__ == "ROCmSdUnet"
    assert SWITCH._on.graphs.calls.replays == 3
    assert float((ours - stock).norm() / stock.norm()) < 1e-5
    assert torch.equal(pictures(False, "auto", "exact"), stock)
    assert host.sd_unet.current_unet is None


# In a process of its own: it gives torch's layers other forwards.
_LORA = """
import sys, types, torch
from importlib.util import module_from_spec, spec_from_file_location

host, networks_folder = sys.argv[1:3]
sys.path.insert(0, networks_folder)

class Rest(types.ModuleType):
    # What the extension imports and this test does not come to.
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})

names = ["gradio", "lora_logger", "modules", *(f"modules.{name}" for name in (
    "shared", "devices", "sd_models", "errors", "scripts", "sd_hijack", "cache", "hashes", "sd_models_config",
    "textual_inversion", "textual_inversion.textual_inversion", "models", "models.sd3", "models.sd3.mmdit"))]
for name in names:
    sys.modules[name] = Rest(name)
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, sys.modules[name])
spec = spec_from_file_location("modules.patches", host + "/modules/patches.py")
patches = sys.modules["modules.patches"] = sys.modules["modules"].patches = module_from_spec(spec)
spec.loader.exec_module(patches)
shared, devices = sys.modules["modules.shared"], sys.modules["modules.devices"]
shared.opts = types.SimpleNamespace(lora_functional=False)
shared.cmd_opts = types.SimpleNamespace(lora_dir=networks_folder, lyco_dir_backcompat=networks_folder)
shared.walk_files = lambda *_a, **_n: []
devices.cpu = torch.device("cpu")

import networks
import lora_patches

networks.originals = lora_patches.LoraPatches()

from rocm_sd.integrations.a1111.a1111_policy import LoraNetworks, why_not_layers

assert torch.nn.Linear.forward.__module__ == "networks"
assert why_not_layers() is None
layer = torch.nn.Linear(4, 4)
layer.network_layer_name = "layer"
before = layer.weight.detach().clone()
change = types.SimpleNamespace(calc_updown=lambda weight: (torch.ones_like(weight), None))
lora = types.SimpleNamespace(
    name="one", te_multiplier=1.0, unet_multiplier=0.5, dyn_dim=None, modules={"layer": change})
ours = LoraNetworks(torch.nn.Sequential(layer))
with torch.no_grad():
    assert ours.bring_in() is None
    assert torch.equal(layer.weight, before)
    networks.loaded_networks.append(lora)
    assert ours.bring_in() is None
    assert torch.equal(layer.weight, before + 1)
    layer(torch.ones(1, 4))
    assert torch.equal(layer.weight, before + 1)
    networks.loaded_networks.clear()
    assert ours.bring_in() is None
    assert torch.equal(layer.weight, before)
    networks.loaded_networks.append(lora)
    shared.opts.lora_functional = True
    assert "older" in ours.bring_in()
print("as expected")
"""


def test_the_lora_extension_of_the_real_host():
    pytest.importorskip("einops")
    folder = host_or_skip()
    arguments = [sys.executable, "-c", _LORA, str(folder), str(folder / "extensions-builtin" / "Lora")]
    ran = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=120)
    assert "as expected" in ran.stdout, ran.stderr
