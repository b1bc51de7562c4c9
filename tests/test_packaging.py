"""The wheel and the sdist have every file, say what they need, and draw with no checkout.

The wheel is built from the sdist, as pip would build it. Nothing is downloaded: the environment it is installed in is
fresh but for the packages that it requires, which are the running environment's.
"""

from __future__ import annotations

import configparser
import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from PIL import Image

import rocm_sd
import test_deploy
from rocm_sd.bench import sending

pytest.importorskip("build")
pytest.importorskip("hatchling")
tomllib = pytest.importorskip("tomllib")  # Python 3.10 has none
long_description = pytest.importorskip("long_description")  # of tools/, and built upon hatchling

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
pytestmark = pytest.mark.slow


def environment(**more):
    """That of a user: no PYTHONPATH, no switches of these tests."""
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "PATH", "TMPDIR") if name in os.environ}
    return {**kept, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"), **more}


def built(source, out, *kinds):
    words = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), *kinds, str(source)]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    return built(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def wheel(dist):
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def sdist(dist):
    (found,) = dist.glob("*.tar.gz")
    return found


def names_in(wheel):
    with zipfile.ZipFile(wheel) as opened:
        return set(opened.namelist())


def own_names(wheel):
    return {name for name in names_in(wheel) if not name.split("/")[0].endswith(".dist-info")}


def record(wheel, name):
    with zipfile.ZipFile(wheel) as opened:
        (found,) = (each for each in opened.namelist() if each.endswith(f".dist-info/{name}"))
        return opened.read(found).decode()


def tracked(*under):
    """By git, now or with the next commit; in an unpacked sdist, which has no git, what lies in these folders."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *under]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
    if not under:
        pytest.skip("there is no git here")
    files = [file for start in under for file in (ROOT / start, *(ROOT / start).rglob("*")) if file.is_file()]
    return {str(file.relative_to(ROOT)) for file in files if "__pycache__" not in file.parts}


def test_the_wheel_is_all_of_src(wheel):
    assert own_names(wheel) == {name.removeprefix("src/") for name in tracked("src")}


@pytest.mark.parametrize(
    "pattern",
    [
        r"rocm_sd/py\.typed",
        r"rocm_sd_ops\.py",
        r"multi_gpu_coordinator\.py",
        r"rocm_sd/tuning/data/gfx1100/attention\.json",
        r"rocm_sd/models/emoji/decoder\.safetensors",
        r"rocm_sd/models/emoji/emoji-sd/unet/.*\.safetensors",
        r"rocm_sd/kernels/hip/sources/attention\.hip",
        r"rocm_sd/kernels/hip/include/.*\.hpp",
        r"rocm_sd/kernels/hip/CMakeLists\.txt",
        r"rocm_sd/bench/report/templates/page\.html",
        r"rocm_sd/serve/page/index\.html",
        r"rocm_sd/integrations/comfyui/web/.*\.js",
        r"rocm_sd/integrations/installing/custom_node/__init__\.py",
        r"rocm_sd/integrations/a1111/extension/metadata\.ini",
        r"rocm_sd/verify/proofs\.json",
    ],
)
def test_what_is_no_module_is_in_the_wheel(wheel, pattern):
    assert any(re.fullmatch(pattern, name) for name in names_in(wheel))


def test_the_sdist_is_what_git_tracks(sdist):
    with tarfile.open(sdist) as opened:
        names = {member.name.partition("/")[2] for member in opened if member.isfile()}
    assert names - {"PKG-INFO"} == tracked() - {"PKG-INFO"}


def test_the_wheel_says_what_it_is(wheel):
    said = email.message_from_string(record(wheel, "METADATA"))
    assert (said["Name"], said["Version"]) == ("rocm-sd", rocm_sd.__version__)
    assert said["License-Expression"] == "MIT"
    assert said["Description-Content-Type"] == "text/markdown"
    needed = [each for each in said.get_all("Requires-Dist") if "extra ==" not in each]
    assert sorted(needed) == sorted(PROJECT["dependencies"])
    # ROCm's torch brings its own.
    assert not any(each.startswith("triton") for each in needed)
    assert set(said.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    commands = configparser.ConfigParser()
    commands.read_string(record(wheel, "entry_points.txt"))
    assert dict(commands["console_scripts"]) == PROJECT["scripts"]
    assert {"py3-none-any"} == {
        line.split()[1] for line in record(wheel, "WHEEL").splitlines() if line.startswith("Tag")
    }


def test_the_addresses_and_the_links_are_those_of_the_checkout(wheel):
    """An address that is not the project's own would send people to somebody else's page: none is written down."""
    assert "urls" not in PROJECT
    address = sending.of_remote(ROOT)
    said = email.message_from_string(record(wheel, "METADATA"))
    urls = dict(each.split(", ", 1) for each in said.get_all("Project-URL") or [])
    assert urls == long_description.urls(address, rocm_sd.__version__)
    shown = long_description.described((ROOT / "README.md").read_text("utf-8"), address, rocm_sd.__version__)
    assert said.get_payload().strip() == shown.strip()


def test_a_clone_of_a_public_repository_names_it(tmp_path):
    """With what a wheel is built from, and a remote."""
    needed = ("pyproject.toml", "README.md", "LICENSE", "tools/long_description.py", "src/rocm_sd/bench/sending.py")
    for name in (*needed, "src/rocm_sd/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run(["git", "-C", str(tmp_path), "remote", "add", "origin", "git@github.com:x/y.git"], check=True)
    (small,) = built(tmp_path, tmp_path / "dist", "--wheel").glob("*.whl")
    said = email.message_from_string(record(small, "METADATA"))
    assert "Repository, https://github.com/x/y" in said.get_all("Project-URL")
    assert f"https://github.com/x/y/blob/v{rocm_sd.__version__}/BENCHMARKS.md" in said.get_payload()


@pytest.mark.parametrize("kind", ["cpu", "rocm"])
def test_an_image_is_built_from_the_same_files(wheel, tmp_path, kind):
    """What the Dockerfile copies is enough to build the wheel, and makes the same one."""
    found = test_deploy.instructions((ROOT / f"deploy/Dockerfile.{kind}").read_text(encoding="utf-8"))
    for name, rest in found:
        if name == "COPY" and "--from" not in rest:
            for path in rest.split()[:-1]:
                for each in tracked(path):
                    (tmp_path / each).parent.mkdir(parents=True, exist_ok=True)
                    (tmp_path / each).symlink_to(ROOT / each)
    (again,) = built(tmp_path, tmp_path / "dist", "--wheel").glob("*.whl")
    assert names_in(again) == names_in(wheel)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A fresh environment with the wheel in it; what it requires is found where it lies, behind its own."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin/python"
    words = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*words, str(wheel)], env=environment(), check=True)
    asked = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = subprocess.run([python, "-c", asked], env=environment(), capture_output=True, text=True, check=True)
    # Path files inside of these folders are not followed: a checkout that is installed there in place stays out.
    required = [path for path in sys.path if path.endswith("-packages")]
    (Path(site.stdout.strip()) / "required.pth").write_text("\n".join(required) + "\n", encoding="utf-8")
    return folder


def typed(installed, folder, *words):
    given = environment(HOME=str(installed), COLUMNS="120")
    command = [str(installed / "bin" / words[0]), *words[1:]]
    done = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_is_the_installed_one_that_runs(installed, tmp_path):
    for module in ("rocm_sd", "rocm_sd_ops", "multi_gpu_coordinator"):
        path = typed(installed, tmp_path, "python", "-c", f"import {module}; print({module}.__file__)").strip()
        assert Path(path).is_relative_to(installed)


def test_the_demo_draws_from_an_empty_folder(installed, tmp_path):
    typed(installed, tmp_path, "rocm-sd", "demo", "--steps", "2", "--device", "cpu")
    for name in ("demo.png", "compare.png"):
        with Image.open(tmp_path / "out" / name) as picture:
            assert any(high > low for low, high in picture.convert("RGB").getextrema())


def test_it_is_put_into_comfyui(installed, tmp_path):
    """A folder that is laid out as the desktop app's; the nodes' own file comes from the wheel."""
    host = tmp_path / "ComfyUI"
    for folder in ("custom_nodes", "models", "user"):
        (host / folder).mkdir(parents=True)
    python = str(installed / "bin/python")
    typed(installed, tmp_path, "rocm-sd", "install", "comfyui", str(host), "--copy", "--python", python, "--force")
    (copied,) = host.glob("custom_nodes/*/__init__.py")
    assert "NODE_CLASS_MAPPINGS" in copied.read_text(encoding="utf-8")
