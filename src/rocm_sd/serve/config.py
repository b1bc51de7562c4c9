"""What a server is told at its start."""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import TYPE_CHECKING

from rocm_sd.errors import InvalidOption, Unsupported

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Limits", "ServeConfig", "is_loopback"]


@dataclass(frozen=True)
class Limits:
    """Of one request: `pictures`, `steps`, `pixels` of a picture, characters of a `prompt`, `body_bytes` and
    `input_pixels` of what is sent. Of the server: `queue`, pictures that wait; `in_flight`, pictures that are drawn at
    once; `seconds`, after which a request has failed; `kept`, pictures whose address is given out, for `kept_seconds`;
    `kept_bytes`, of their files, and as much of pictures that nobody has fetched yet.
    """

    pictures: int = 8
    steps: int = 150
    pixels: int = 2048 * 2048
    prompt: int = 4000
    body_bytes: int = 32 * 2**20
    input_pixels: int = 4096 * 4096
    queue: int = 64
    in_flight: int = 8
    seconds: float = 600.0
    kept: int = 256
    kept_seconds: float = 3600.0
    kept_bytes: int = 256 * 2**20

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise InvalidOption(name, value, [], hint="It takes more than 0.")


@dataclass(frozen=True)
class ServeConfig:
    """`models` as they are named on the command line; none is emoji-sd. `qualities`: which a request may ask for.
    `keys`: the file with hashed API keys. `origins`: pages elsewhere that may call the server. `hosts`: names by which
    it may be called, beside its own. `metadata`: whether a picture says what it was drawn from. `gpus_per_replica`: how
    many draw each picture together, by the plan `parallel`.
    """

    models: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 7860
    device: str | None = None
    level: str = "auto"
    qualities: tuple[str, ...] = ("exact", "high", "balanced")
    loras: tuple[tuple[str, str], ...] = ()
    limits: Limits = field(default_factory=Limits)
    keys: Path | None = None
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    metadata: bool = True
    gpus_per_replica: int = 1
    parallel: str = "auto"

    def __post_init__(self) -> None:
        if self.keys is None and not is_loopback(self.host):
            raise Unsupported(
                "A server that others reach",
                f"{self.host} with no API key",
                hint="Type: rocm-sd serve --new-key NAME --keys keys.txt, then give --keys keys.txt.",
            )


def is_loopback(host: str) -> bool:
    """Whether nobody else reaches it."""
    if host in {"localhost", ""}:
        return host == "localhost"
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
