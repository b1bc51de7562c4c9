"""rocm-sd serve: pictures over HTTP."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rocm_sd.cli.terminal import Device, parts, say
from rocm_sd.errors import InvalidOption, RocmSdError, Unsupported, optional_module, require_known, require_one_of

if TYPE_CHECKING:
    from rocm_sd.serve import ServeConfig

__all__ = ["serve"]

_LOGS = ("text", "json", "none")


def serve(
    model: Annotated[
        list[str] | None,
        typer.Argument(help="Diffusers folders, .safetensors checkpoints or hub ids. [default: (emoji-sd, built in)]"),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen at. One that other machines reach needs --keys.")] = (
        "127.0.0.1"
    ),
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port to listen at; 0 takes one that is free.")
    ] = 7860,
    keys: Annotated[
        Path | None, typer.Option(help="The file of hashed API keys. Without it, all on this machine may draw.")
    ] = None,
    new_key: Annotated[str | None, typer.Option(help="Make an API key of this name, show it once, and exit.")] = None,
    in_flight: Annotated[int, typer.Option(min=1, max=64, help="How many pictures are drawn at once.")] = 8,
    queue: Annotated[
        int, typer.Option(min=1, max=10000, help="How many pictures may wait; more are rejected (429).")
    ] = 64,
    max_pictures: Annotated[int, typer.Option(min=1, max=64, help="The most pictures of one request.")] = 8,
    max_steps: Annotated[int, typer.Option(min=1, max=999, help="The most steps of one picture.")] = 150,
    max_side: Annotated[
        int,
        typer.Option(min=64, max=8192, help="The longest side of a square picture; others may have as many pixels."),
    ] = (2048),
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which a request has failed.")] = 600,
    quality: Annotated[str, typer.Option(help="The qualities that a request may ask for.")] = ("exact,high,balanced"),
    lora: Annotated[
        list[str] | None, typer.Option(help="A LoRA that requests may name: NAME=FILE.safetensors. May be given again.")
    ] = None,
    level: Annotated[
        str, typer.Option(help="Speed against memory: auto or performance. The picture stays the same.")
    ] = "auto",
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="The origin of a web page that may call the server. May be given again.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Another host name of the server. May be given again.")
    ] = None,
    no_metadata: Annotated[bool, typer.Option("--no-metadata", help="Do not write prompts into pictures.")] = False,
    log: Annotated[str, typer.Option(help="How requests are logged: text, json or none.")] = "text",
    device: Device = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Serve with Ray Serve: a replica for each GPU, on this machine or others.")
    ] = False,
    replicas: Annotated[str, typer.Option(help="With --ray: how many replicas, or a range such as 1-4.")] = "1",
    gpus_per_replica: Annotated[int, typer.Option(help="How many GPUs of a machine draw each picture together.")] = 1,
    parallel: Annotated[
        str,
        typer.Option(
            help="With --gpus-per-replica, how work is split: auto, cfg, tensor, pipeline, patch, or cfg=2,patch=2."
        ),
    ] = "auto",
) -> None:
    """Draw pictures for others: a page, OpenAI's Images API and Automatic1111's API.

    rocm-sd serve

    rocm-sd serve ./sdxl --port 8000 --in-flight 8

    rocm-sd serve --new-key alice --keys keys.txt

    rocm-sd serve ./sdxl --host 0.0.0.0 --keys keys.txt --log json

    rocm-sd serve ./sdxl --ray --replicas 1-4

    rocm-sd serve ./sdxl --gpus-per-replica 2

    Pictures that are drawn at the same time share each step. Ctrl-C takes nothing new, lets pictures that were begun
    come to their end for 30 s, and ends.
    """
    console = Console(stderr=True)
    if new_key is not None:
        _make_key(keys, new_key)
        return
    for module in ("fastapi", "uvicorn", "prometheus_client", "python_multipart"):
        optional_module(module, module, "serve")
    from rocm_sd.engine import LEVELS, QUALITIES
    from rocm_sd.serve.config import Limits, ServeConfig
    from rocm_sd.serve.logs import start
    from rocm_sd.serve.replica_drawer import require_replica

    require_one_of("log", log, _LOGS)
    require_one_of("level", level, LEVELS)
    qualities = tuple(parts(quality))
    require_known("quality", qualities, QUALITIES)
    if "exact" not in qualities:
        raise Unsupported("--quality", "a list without exact")
    config = ServeConfig(
        models=tuple(model or ()), host=host, port=port, device=device, level=level, qualities=qualities,
        loras=tuple(_lora(each) for each in lora or ()), keys=keys, origins=tuple(allow_origin or ()),
        hosts=tuple(allow_host or ()), metadata=not no_metadata, gpus_per_replica=gpus_per_replica, parallel=parallel,
        limits=Limits(
            pictures=max_pictures, steps=max_steps, pixels=max_side * max_side, queue=queue, in_flight=in_flight,
            seconds=timeout,
        ),
    )  # fmt: skip
    require_replica(config, here=not ray)
    if log != "none":
        start(log)
    if ray:
        optional_module("ray", "ray", "ray")
        from rocm_sd.serve.ray_app import run as run_on_ray

        run_on_ray(config, replicas, lambda line: say(console, line))
        return
    _run(config, console, None if log == "none" else log)


def _make_key(file: Path | None, name: str) -> None:
    from rocm_sd.serve.keys import add_key

    if file is None:
        raise InvalidOption("--keys", None, [], hint="Type: rocm-sd serve --new-key NAME --keys keys.txt")
    key = add_key(file, name)
    out = Console()
    say(out, key)
    say(Console(stderr=True), f"This is the only time that it is shown. Its hash is in {file}.")


def _lora(text: str) -> tuple[str, str]:
    name, is_there, path = text.partition("=")
    if not is_there or not name or not Path(path).is_file() or Path(path).suffix != ".safetensors":
        raise InvalidOption("--lora", text, [], hint="It takes NAME=FILE.safetensors.")
    return name, path


def _run(config: ServeConfig, console: Console, log: str | None) -> None:
    import uvicorn

    from rocm_sd.serve import create_app
    from rocm_sd.serve.drawers import sources
    from rocm_sd.serve.replica_drawer import drawer_of

    # What can be wrong with a model's name or the port is said before the server is there.
    named = sources(config.models)
    failed: list[BaseException] = []

    def end(error: BaseException) -> None:
        failed.append(error)
        server.should_exit = True

    app = create_app(config, drawer_of(config, log), on_failure=end)
    options = uvicorn.Config(
        app, log_config=None, access_log=False, server_header=False, timeout_keep_alive=30,
        timeout_graceful_shutdown=40,
    )  # fmt: skip
    server = uvicorn.Server(options)
    with _listening(config.host, config.port) as listening, suppress(KeyboardInterrupt):
        host = f"[{config.host}]" if ":" in config.host else config.host
        address = f"http://{host}:{listening.getsockname()[1]}"
        say(console, f"{address} is a page, and the address for clients; loading {', '.join(named)} ...")
        server.run(sockets=[listening])
    if failed:
        raise failed[0]


def _listening(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise RocmSdError(
            f"{host}:{port} cannot be listened at ({error.strerror}).", hint="Choose another port: --port 7861."
        ) from error
