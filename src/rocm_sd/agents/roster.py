"""Agents, as a user lists them in agents.yaml: which model is asked, for what work, and how much it may spend.

    roster = read_roster(path)      # or InvalidRoster: one sentence with the file, the field and what to type
    agent = roster.agent("local")   # or InvalidOption, with the names there are

A key is never in the file: an entry names the environment variable that holds it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rocm_sd.errors import RocmSdError, first_line, optional_module, require_one_of
from rocm_sd.files import is_special
from rocm_sd.plain_json import NotPlain, parsed, shortened
from rocm_sd.tuning.location import default_path
from rocm_sd.typed_json import Misfit, Rules, read

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = ["ROLES", "Agent", "InvalidRoster", "Role", "Roster", "find_roster", "read_roster"]

Work = Literal["analyst", "kernel_writer", "reviewer"]

_MOST_BYTES = 2**20
# Four hundred agents with all their fields. PyYAML takes 30 us for each, and a file of commas would take half a minute.
_MOST_ENTRIES, _MOST_DEEP = 10_000, 16
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
# Names of variables are in capitals, and hardly a key is.
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,63}")
_KEY_FIELDS = {"key", "apikey", "token", "authtoken", "accesstoken", "secret", "password", "bearer", "authorization"}
# Nothing that two readers of addresses could take for two different hosts.
_URL = re.compile(r"(https?)://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?(?:/[A-Za-z0-9._~/-]*)?")
_HERE = re.compile(r"localhost|127(\.[0-9]{1,3}){3}|\[::1\]")
_SMALLEST = "agents: {local: {endpoint: http://127.0.0.1:8000/v1, model: qwen2.5-coder, role: kernel_writer}}"


class InvalidRoster(RocmSdError):
    """What agents.yaml says cannot be followed."""

    exit_code: ClassVar[int] = 2

    def __init__(self, path: Path, what: str, hint: str) -> None:
        super().__init__(f"{path}: {what}.", hint=hint)


@dataclass(frozen=True)
class Role:
    """What an agent of this role does here: the kind of `work`, what it is told, and its ops (none: any)."""

    name: str
    work: Work
    system: str
    ops: tuple[str, ...] = ()

    def takes(self, op: str) -> bool:
        return not self.ops or op in self.ops


_GIVEN = (
    "You are given an op's definition, a kernel's source and config, figures of its machine code and the last finding."
)
_ANALYST = (
    f"You analyse kernels for AMD GPUs. {_GIVEN} Say what bounds the kernel's speed and which change to try first, "
    "with the figure that speaks for it. Invent no measurement: a figure that you were not given is unknown."
)
_WRITER = (
    f"You write kernels for AMD GPUs. {_GIVEN} Propose one change that makes the kernel faster and keeps its results "
    "within the definition's tolerance. It is compiled, checked against the definition and timed, and nothing else "
    "decides. Answer with exactly one fenced block that begins with ```json and holds the proposal as one object."
)
_REVIEWER = (
    f"You review kernels for AMD GPUs. {_GIVEN} You are given a proposal and what was measured of it, too. Say whether "
    "it computes what the definition says for every shape, whether the measurement bears out the gain, and what is to "
    "be tried next. Name the line that each objection is about."
)
_FELT = "Begin with whether a gain here would be felt in a whole picture at all."
_VAE = "Your ops are those of the VAE: large pictures with few channels, bound by memory."
_UNITS = "Your ops are attention and products of matrices, which live on the matrix units."
_TAKEN = "End with whether it may be taken into the library as it is."
_VAE_OPS = ("group_norm_silu", "upsample", "upsample_conv2d", "conv2d")
_PRODUCT_OPS = ("attention", "linear_residual", "linear_geglu", "linear_8bit")

# The first three are what there is to do; the rest are names of the founding documents' coordinators.
ROLES: Mapping[str, Role] = {
    each.name: each
    for each in (
        Role("analyst", "analyst", _ANALYST),
        Role("kernel_writer", "kernel_writer", _WRITER),
        Role("reviewer", "reviewer", _REVIEWER),
        Role("meaningful_work", "analyst", f"{_ANALYST} {_FELT}"),
        Role("implementation", "kernel_writer", _WRITER),
        Role("vae_optimization", "kernel_writer", f"{_WRITER} {_VAE}", _VAE_OPS),
        Role("advanced_optimization", "kernel_writer", f"{_WRITER} {_UNITS}", _PRODUCT_OPS),
        Role("final_integration", "reviewer", f"{_REVIEWER} {_TAKEN}"),
    )
}


@dataclass(frozen=True)
class Agent:
    """An entry of agents.yaml. `most_tokens` and `most_money` are of a whole run, prompts and answers together;
    `most_answer_tokens` of one answer, which must fit into the model's context; `timeout_s` of one answer, with all
    that is tried again for it. Prices are per million tokens, in the currency of `most_money`. A `temperature` of None
    is the server's own.
    """

    name: str
    endpoint: str
    model: str
    role: str
    temperature: float | None = None
    key_variable: str | None = None
    timeout_s: float = 120.0
    most_tokens: int = 200_000
    most_answer_tokens: int = 8192
    most_money: float | None = None
    price_per_million_in: float = 0.0
    price_per_million_out: float = 0.0
    insecure: bool = False

    @property
    def duty(self) -> Role:
        return ROLES[self.role]

    @property
    def is_here(self) -> bool:
        """Whether its endpoint is on this machine."""
        found = _URL.fullmatch(self.endpoint)
        return found is not None and _HERE.fullmatch(found[2]) is not None

    def cost(self, tokens_in: int, tokens_out: int) -> float:
        return (tokens_in * self.price_per_million_in + tokens_out * self.price_per_million_out) / 1e6


@dataclass(frozen=True)
class Roster:
    path: Path
    agents: tuple[Agent, ...]

    def agent(self, name: str) -> Agent:
        known = {each.name: each for each in self.agents}
        require_one_of("agent", name, known)
        return known[name]


@dataclass(frozen=True)
class _File:
    agents: dict[str, Agent]


_RULES: Rules = {
    "_File.agents": {"propertyNames": {"pattern": _NAME}},
    "Agent.model": {"pattern": "^[!-~][ -~]{0,199}$"},
    "Agent.role": {"enum": list(ROLES)},
    "Agent.temperature": {"minimum": 0, "maximum": 2},
    "Agent.timeout_s": {"exclusiveMinimum": 0, "maximum": 3600},
    "Agent.most_tokens": {"minimum": 1, "maximum": 10**12},
    "Agent.most_answer_tokens": {"minimum": 1, "maximum": 10**7},
    **{f"Agent.{each}": {"minimum": 0} for each in ("most_money", "price_per_million_in", "price_per_million_out")},
}
# What to type for a field that is missing or wrong.
_EXAMPLE = Agent(
    "local", "http://127.0.0.1:8000/v1", "qwen2.5-coder", "kernel_writer", 0.4, "MY_KEY", most_money=2.0,
    price_per_million_in=0.5, price_per_million_out=1.5,
)  # fmt: skip
_EXPORT = "Type: export MY_KEY=..., and in the file key_variable: MY_KEY"
_FIELD = re.compile(r"agents\..*(?:\.(\w+) (?:should|is|has)\b.*|has no (\w+))")


def find_roster() -> Path | None:
    """The first there is of ./agents.yaml, config/agents.yaml and that of the user's cache folder."""
    places = (Path("agents.yaml"), Path("config", "agents.yaml"), default_path().parent / "agents.yaml")
    return next((place for place in places if place.is_file()), None)


def read_roster(path: Path) -> Roster:
    """Raises InvalidRoster, whose sentence never repeats what may be a key."""
    values = _values(path)
    entries = values.get("agents") if isinstance(values, dict) else None
    if not isinstance(entries, dict) or not entries:
        raise InvalidRoster(path, "agents should name at least one agent", f"Type, for example: {_SMALLEST}")
    for name, entry in entries.items():
        if isinstance(entry, dict):
            _require_sound(path, f"agents.{shortened(name)}", entry)
    named = {name: {**each, "name": name} if isinstance(each, dict) else each for name, each in entries.items()}
    try:
        read(_File, {**values, "agents": named}, _RULES)
    except Misfit as error:
        raise InvalidRoster(path, str(error), _what_to_type(error.problems[0])) from error
    return Roster(path, tuple(Agent(**each) for each in named.values()))


def _what_to_type(problem: str) -> str:
    found = _FIELD.fullmatch(problem)
    name = (found[1] or found[2]) if found else ""
    known = [each.name for each in fields(Agent) if each.name != "name"]
    return _line(name) if name in known else f"An agent has a name, and the fields {', '.join(known)}."


def _line(name: str) -> str:
    return f"Type, for example: {name}: {json.dumps(getattr(_EXAMPLE, name))}"


def _require_sound(path: Path, place: str, entry: dict[str, Any]) -> None:
    """What a schema does not say, or would say by repeating a secret."""
    if "name" in entry:
        raise InvalidRoster(path, f"{place}.name is not known", f"The name is {place.partition('.')[2]!r} already.")
    for each in entry:
        if re.sub("[^a-z]|openai", "", each.lower()) in _KEY_FIELDS:
            raise InvalidRoster(path, f"{place}.{shortened(each)} would hold a key, and the file holds none", _EXPORT)
    variable = entry.get("key_variable")
    if isinstance(variable, str) and not _VARIABLE.fullmatch(variable):
        raise InvalidRoster(path, f"{place}.key_variable takes a variable's name in capitals, and no key", _EXPORT)
    endpoint = entry.get("endpoint")
    if isinstance(endpoint, str):
        _require_address(path, f"{place}.endpoint", endpoint, insecure=entry.get("insecure") is True)
    if entry.get("most_money") is not None and not {"price_per_million_in", "price_per_million_out"} & entry.keys():
        what = f"{place}.most_money limits nothing without prices"
        raise InvalidRoster(path, what, f"{_line('price_per_million_in')} beside it, or leave it out.")


def _require_address(path: Path, place: str, url: str, *, insecure: bool) -> None:
    found = _URL.fullmatch(url)
    if "@" in url:
        raise InvalidRoster(path, f"{place} has a user or a password in it", _EXPORT)
    if found is None or len(url) > 500 or not 0 < int(found[3] or 1) < 65536:
        what = f"{place} is no address that begins with http:// or https:// and holds a host, a port and a path"
        raise InvalidRoster(path, what, _line("endpoint"))
    before, way, _ = url.partition("/chat/completions")
    if way:
        raise InvalidRoster(path, f"{place} goes one step too far, to /chat/completions", f"Type: endpoint: {before}")
    if found[1] == "http" and not _HERE.fullmatch(found[2]) and not insecure:
        what = f"{place} would send sources and the key over the network as plain text"
        raise InvalidRoster(path, what, f"Type: endpoint: https{url[4:]}, or add insecure: true if they may be seen.")


def _values(path: Path) -> Any:
    """Of a YAML file, as plain values."""
    try:
        if is_special(path):
            raise InvalidRoster(path, "it is no file", "Give a file of agents.")
        with path.open("rb") as file:
            return _plain(file.read(_MOST_BYTES + 1))
    except FileNotFoundError:
        raise InvalidRoster(path, "there is no such file", f"Type: echo '{_SMALLEST}' > agents.yaml") from None
    except OSError as error:
        raise InvalidRoster(path, f"it cannot be read ({error.strerror})", "Check the path and its owner.") from error
    except (TypeError, ValueError) as error:  # no UTF-8, the 31st of February, a date as a name, or of `_plain`
        raise InvalidRoster(path, first_line(error), "Put that right, and type the command again.") from None


def _plain(raw: bytes) -> Any:
    """Raises ValueError."""
    yaml = optional_module("yaml", "pyyaml", "agents")
    if len(raw) > _MOST_BYTES:
        raise NotPlain("it is larger than 1 MiB")
    try:
        text = raw.decode("utf-8-sig")
        _require_simple(yaml.parse(text, Loader=yaml.SafeLoader))
        # JSON makes text of a date, and `parsed` refuses half of a surrogate pair and numbers beyond 64 bits.
        return parsed(json.dumps(yaml.safe_load(text), default=str), finite=False)
    except yaml.YAMLError as error:
        # Without the line itself, which PyYAML would show: a key may stand there.
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        why = shortened(str(getattr(error, "problem", None) or "a character that is not allowed"))
        raise NotPlain(f"it is no YAML{where} ({why})") from None


def _require_simple(events: Iterable[Any]) -> None:
    """Raises NotPlain: aliases make gigabytes of a few lines, and of a name that comes twice YAML keeps the last."""
    around: list[tuple[set[str], Iterator[bool]] | None] = []  # of a mapping its names, and whether the next is one
    for number, event in enumerate(events):
        kind, where = type(event).__name__, f"line {event.start_mark.line + 1}"
        if kind in {"MappingEndEvent", "SequenceEndEvent"}:
            around.pop()
        if getattr(event, "anchor", None) is not None:  # an alias has one, too
            raise NotPlain(f"{where} has an anchor or an alias, which are not taken")
        if getattr(event, "tag", None) is not None:
            raise NotPlain(f"{where} has a tag, which is not taken")
        if number > _MOST_ENTRIES or len(around) > _MOST_DEEP:
            raise NotPlain(f"{where} is beyond {_MOST_ENTRIES} entries or {_MOST_DEEP} levels")
        if kind not in {"ScalarEvent", "MappingStartEvent", "SequenceStartEvent"}:
            continue
        if around and around[-1] is not None and next(around[-1][1]):
            name = getattr(event, "value", None)
            if name is None or name in around[-1][0]:
                raise NotPlain(f"{where} has a name that stands there twice, or is no text")
            around[-1][0].add(name)
        if kind != "ScalarEvent":
            around.append((set(), cycle((True, False))) if kind == "MappingStartEvent" else None)
