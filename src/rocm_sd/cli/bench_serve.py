"""rocm-sd bench serve: a server under requests that come when they are due, as a table and a record."""

from __future__ import annotations

import json
import math
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from rocm_sd.cli.terminal import bar, name_report, say, status
from rocm_sd.errors import INTERRUPTED, InvalidOption, RocmSdError, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    import torch

    from rocm_sd.bench.serving import ServingRecord
    from rocm_sd.bench.serving_http import Client, Model
    from rocm_sd.bench.serving_load import Load

__all__ = ["SERVE", "Asked", "bench_serve", "require_serve_fitting"]

SERVE = "serve"
_RATE, _SECONDS, _STEPS = "0.8x", 60.0, 20
_OWN = {"--url", "--key-file", "--rate", "--seconds", "--size", "--seed"}
_SHARED = {"--prompts", "--model"}
# Beyond them the client is what is measured.
_MOST_RATE, _MOST_SHARE, _MOST_SECONDS, _MOST_REQUESTS = 1000.0, 100.0, 86400.0, 200_000
_PROMPTS = 64


@dataclass(frozen=True)
class Asked:
    """The options, None where they were not given."""

    url: str | None
    key_file: Path | None
    rate: str | None
    seconds: float | None
    steps: int | None
    size: str | None
    seed: int | None
    model: str | None
    prompts: Path | None
    device: str | None

    @property
    def command(self) -> str:
        """What to type to repeat it. It names no person's folder, and no host but this one."""
        from rocm_sd.bench.serving_http import is_here

        url = self.url if self.url is None or is_here(self.url) else "URL"
        options = {
            "--url": url, "--key-file": self.key_file and "FILE", "--rate": self.rate,
            "--seconds": None if self.seconds is None else f"{self.seconds:g}", "--steps": self.steps,
            "--size": self.size, "--seed": self.seed, "--model": self.model and self.model.rstrip("/").split("/")[-1],
            "--prompts": self.prompts and self.prompts.name, "--device": self.device,
        }  # fmt: skip
        words = [word for name, value in options.items() if value is not None for word in (name, str(value))]
        return " ".join(["rocm-sd", "bench", SERVE, *words])


def require_serve_fitting(given: Mapping[str, object], *, serve: bool) -> None:
    """`given`: options with their values, None where they are not. Some are for serve alone, others not for it."""
    for name in (name for name, value in given.items() if value is not None):
        if serve and name not in _OWN | _SHARED:
            raise Unsupported("bench serve", name, hint="It sends requests to a server: leave it out.")
        if not serve and name in _OWN:
            raise Unsupported("bench", f"{name} without serve", hint=f"Type: rocm-sd bench serve {name} ...")


def bench_serve(asked: Asked, out: Path, device: torch.device, *, as_json: bool) -> None:
    from rocm_sd.bench import serving, serving_tables
    from rocm_sd.cli.pictures import writable_folder

    plan = _Plan.of(asked)
    writable_folder(out)
    errors, file = Console(stderr=True), serving.record_file(out)
    record, interrupted = None, False
    try:
        with _server(asked, plan.key, errors) as client:
            run = _Run.of(asked, plan, client, device, errors)
            record, interrupted = run.go(errors)
            # Before the server is ended, which takes its time.
            serving.keep_older(file)
            record.save(file)
    except KeyboardInterrupt:
        interrupted = True
    if record is None:
        say(errors, "Interrupted before the first request: nothing was written.")
        raise typer.Exit(INTERRUPTED)
    if as_json:
        typer.echo(json.dumps(record.to_dict(), indent=2))
    else:
        console = Console()
        console.print(serving_tables.rich_table(record))
        for line in (serving_tables.verdict(record), *serving_tables.notes(record), f"wrote {file}"):
            say(console, line)
        name_report(console, file.parent)
    if interrupted:
        say(errors, f"Interrupted. What became of {len(record.requests)} requests is kept in {file}.")
        raise typer.Exit(INTERRUPTED)
    wrong = serving_tables.wrong(record)
    if wrong is not None:
        raise RocmSdError(wrong, hint=f"{file} has each of them. The server's log has more.")


@dataclass(frozen=True)
class _Plan:
    """The options, read: what is wrong with them is said before a server is started. `share`: `rate` is one of the
    server's capacity.
    """

    rate: float
    share: bool
    seconds: float
    size: tuple[int, int] | None
    key: str | None
    prompts: tuple[str, ...] | None

    @classmethod
    def of(cls, asked: Asked) -> _Plan:
        from rocm_sd.bench import subjects
        from rocm_sd.bench.serving_http import read_key, require_url

        if asked.url is not None:
            require_url(asked.url)
            for name in ("model", "device"):
                if getattr(asked, name) is not None:
                    hint = "A server that runs has its models: leave it out."
                    raise Unsupported("bench serve --url", f"--{name}", hint=hint)
        elif asked.key_file is not None:
            raise Unsupported("bench serve", "--key-file without --url", hint="Its own server asks for no key.")
        rate, share = _rate(asked.rate or _RATE)
        seconds = _SECONDS if asked.seconds is None else asked.seconds
        if not 1 <= seconds <= _MOST_SECONDS:
            raise InvalidOption("--seconds", seconds, [], hint=f"It takes 1 to {_MOST_SECONDS:.0f}.")
        if not share:
            _require_few(rate, seconds)
        key = None if asked.key_file is None else read_key(asked.key_file)
        prompts = None if asked.prompts is None else subjects.from_file(asked.prompts).texts
        return cls(rate, share, seconds, None if asked.size is None else _size(asked.size), key, prompts)


def _rate(text: str) -> tuple[float, bool]:
    share = text.endswith("x")
    try:
        value = float(text.removesuffix("x"))
    except ValueError:
        value = math.nan
    if not 0 < value <= (_MOST_SHARE if share else _MOST_RATE):
        hint = 'It takes requests a second, such as 2.5, or a share of what the server can do, such as "0.8x".'
        raise InvalidOption("--rate", text, [], hint=hint)
    return value, share


def _require_few(rate: float, seconds: float) -> None:
    if rate * seconds > _MOST_REQUESTS:
        hint = f"At {rate:.3g} requests/s they would be more than {_MOST_REQUESTS}: send for a shorter time."
        raise InvalidOption("--seconds", seconds, [], hint=hint)


def _size(text: str) -> tuple[int, int]:
    width, by, height = text.partition("x")
    if not by or not all(
        part.isascii() and part.isdecimal() and 0 < len(part) <= 5 and int(part) for part in (width, height)
    ):
        raise InvalidOption("--size", text, [], hint="It takes WIDTHxHEIGHT, such as 512x512.")
    return int(width), int(height)


@contextmanager
def _server(asked: Asked, key: str | None, errors: Console) -> Iterator[Client]:
    """The one that was named, or one of this run's own; ready."""
    from rocm_sd.bench.serving_http import Client, require_url, wait_until_ready
    from rocm_sd.bench.serving_server import own_server

    if asked.url is not None:
        client = Client(require_url(asked.url), key)
        with status(errors, f"Waiting for {client.url} ..."):
            wait_until_ready(client)
        yield client
        return
    options = [*([asked.model] if asked.model else []), *(["--device", asked.device] if asked.device else [])]
    # It goes on while the run lasts, and the spinner does not.
    waiting = status(errors, "Starting a server ...")
    waiting.start()
    try:
        with own_server(options) as client:
            waiting.stop()
            yield client
    finally:
        waiting.stop()


@dataclass(frozen=True)
class _Run:
    """A load, and the record without its requests."""

    client: Client
    prompts: tuple[str, ...]
    planned: ServingRecord

    @classmethod
    def of(cls, asked: Asked, plan: _Plan, client: Client, device: torch.device, errors: Console) -> _Run:
        """After a first picture and, where the rate is a share of it, the measurement of the capacity."""
        from rocm_sd.bench import serving_capacity, serving_http, serving_load
        from rocm_sd.bench.machine import machine
        from rocm_sd.bench.records import now
        from rocm_sd.bench.serving import ServerFacts, ServingRecord, Setting

        version, models = serving_http.models(client)
        if not models:
            raise RocmSdError("The server has no model.", hint="Type: rocm-sd serve")
        model = models[0]
        prompts = plan.prompts or _prompts(model)
        width, height = plan.size or (model.width, model.height)
        setting = Setting(
            plan.rate, asked.rate or _RATE, plan.seconds, asked.steps or _STEPS, width, height, model.name,
            len(prompts), asked.seed or 0,
        )  # fmt: skip
        facts = ServerFacts(version, asked.url is None)
        with status(errors, "Drawing a first picture ..."):
            serving_load.first_picture(client, setting, prompts)
        if plan.share:
            with _progress(errors) as progress:
                found = serving_capacity.capacity(client, setting, prompts, progress)
            facts = replace(facts, capacity=found.pictures_per_s, drawn_at_once=found.drawn_at_once)
            setting = replace(setting, rate=plan.rate * found.pictures_per_s)
            _require_few(setting.rate, setting.seconds)
        record = ServingRecord(machine(device), asked.command, now(), setting, facts, (), plan.seconds)
        return cls(client, prompts, record)

    def go(self, errors: Console) -> tuple[ServingRecord, bool]:
        """The record, and whether the run was interrupted."""
        from rocm_sd.bench.serving import Seen
        from rocm_sd.bench.serving_http import seen
        from rocm_sd.bench.serving_load import Load
        from rocm_sd.bench.serving_memory import MemoryWatch

        before, after, interrupted = seen(self.client), Seen(), False
        watch = MemoryWatch(self.client, self.planned.setting.seconds)
        with _progress(errors) as progress, watch:
            load = Load(self.client, self.planned.setting, self.prompts, progress)
            try:
                load.run()
                after = seen(self.client)
            except KeyboardInterrupt:
                interrupted = True
        record = replace(
            self.planned, requests=load.requests, sent_for_s=max(load.sent_for_s, 1e-3), before=before, after=after,
            complete=not interrupted and load.gone_s is None, notes=_cut_short(load, interrupted=interrupted),
            memory=watch.found,
        )  # fmt: skip
        return record, interrupted


def _cut_short(load: Load, *, interrupted: bool) -> tuple[str, ...]:
    left = f"{len(load.requests)} of {load.planned} requests were sent"
    if load.gone_s is not None:
        return (f"The server was gone after {load.gone_s:.1f} s: {left}.",)
    return (f"The run was interrupted: {left}.",) if interrupted else ()


def _prompts(model: Model) -> tuple[str, ...]:
    """Those that come with emoji-sd, or some for any model."""
    from rocm_sd.bench.subjects import PROMPTS
    from rocm_sd.models import EMBEDDED
    from rocm_sd.models.emoji import trained_prompts

    return tuple(prompt.text for prompt in trained_prompts(_PROMPTS)) if model.name == EMBEDDED else PROMPTS


@contextmanager
def _progress(errors: Console) -> Iterator[Callable[[float, float, str], None]]:
    with bar("starting", console=errors, share=True) as update:
        yield lambda done, total, what: update(completed=done, total=total, description=what)
