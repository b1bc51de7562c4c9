"""agents.yaml: what is read, and that each fault is a sentence with the field and what to type."""

from __future__ import annotations

import json
import os
import random
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from rocm_sd import settings
from rocm_sd.agents import roster as module
from rocm_sd.agents.roster import ROLES, Agent, InvalidRoster, find_roster, read_roster
from rocm_sd.errors import InvalidOption, MissingDependency, RocmSdError
from rocm_sd.ops import OPS

EXAMPLE = Path(__file__).parents[2] / "config" / "agents.yaml"
COORDINATORS = (
    "meaningful_work", "implementation", "vae_optimization", "advanced_optimization", "final_integration",
)  # fmt: skip
LEAST = {"endpoint": "http://127.0.0.1:8000/v1", "model": "qwen2.5-coder", "role": "kernel_writer"}


@pytest.fixture
def read(tmp_path):
    """Of a text, or of fields that are added to an agent's or, where they are None, left out."""

    def read(text=None, **changed):
        if text is None:
            entry = {name: value for name, value in {**LEAST, **changed}.items() if value is not None}
            text = json.dumps({"agents": {"local": entry}}, ensure_ascii=False)
        path = tmp_path / "agents.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_roster(path)

    return read


@pytest.fixture
def fault(read):
    """What is said of it, on one line, with the file."""

    def fault(text=None, **changed):
        with pytest.raises(InvalidRoster) as caught:
            read(text, **changed)
        said = str(caught.value)
        assert "agents.yaml: " in said
        assert "\n" not in said
        assert caught.value.hint
        assert caught.value.exit_code == 2
        return said

    return fault


def test_the_example_is_read():
    roster = read_roster(EXAMPLE)
    assert [each.name for each in roster.agents] == ["local", "elsewhere", *COORDINATORS]
    assert all(roster.agent(name).role == name for name in COORDINATORS)
    assert roster.path == EXAMPLE
    local = roster.agent("local")
    assert local.duty is ROLES["kernel_writer"]
    assert local.is_here
    assert not roster.agent("elsewhere").is_here
    assert roster.agent("elsewhere").key_variable == "MY_KEY"
    assert roster.agent("elsewhere").cost(1_000_000, 2_000_000) == 3.5
    assert roster.agent("vae_optimization").duty.ops == ("group_norm_silu", "upsample", "upsample_conv2d", "conv2d")


def test_the_example_shows_every_field_but_the_one_that_weakens():
    shown = EXAMPLE.read_text(encoding="utf-8")
    assert all(f"{each.name}:" in shown for each in fields(Agent) if each.name != "name")
    assert not any(each.insecure for each in read_roster(EXAMPLE).agents)


def test_an_agent_needs_three_fields(read):
    agent = read().agent("local")
    assert agent == Agent("local", **LEAST)
    assert agent.temperature is None
    assert agent.key_variable is None
    assert agent.most_money is None


def test_an_agent_that_is_not_there_is_told_with_those_that_are(read):
    with pytest.raises(InvalidOption, match=r"agent 'nosuch' is not known\. Use one of: local\."):
        read().agent("nosuch")


@pytest.mark.parametrize("role", ROLES.values(), ids=lambda role: role.name)
def test_a_role_is_told_what_it_does_and_has_ops_there_are(role):
    assert role.work in {"analyst", "kernel_writer", "reviewer"}
    assert role.system.endswith(".")
    assert "\n" not in role.system
    assert set(role.ops) <= set(OPS)
    assert role.takes("conv2d") is (not role.ops or "conv2d" in role.ops)
    assert ("```json" in role.system) is (role.work == "kernel_writer")


def test_the_founding_coordinators_are_roles():
    works = {name: ROLES[name].work for name in ROLES}
    assert works == {
        "analyst": "analyst", "kernel_writer": "kernel_writer", "reviewer": "reviewer", "meaningful_work": "analyst",
        "implementation": "kernel_writer", "vae_optimization": "kernel_writer",
        "advanced_optimization": "kernel_writer", "final_integration": "reviewer",
    }  # fmt: skip
    assert ROLES["vae_optimization"].takes("upsample")
    assert not ROLES["vae_optimization"].takes("attention")
    assert ROLES["advanced_optimization"].takes("attention")
    assert not ROLES["advanced_optimization"].takes("conv2d")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model": None}, "agents.local has no model. Type, for example: model: "),
        ({"endpoint": None}, "agents.local has no endpoint. Type, for example: endpoint: "),
        ({"role": "king"}, "agents.local.role should be one of ['analyst', 'kernel_writer'"),
        ({"role": ["analyst"]}, "agents.local.role should be string. Type, for example: role: "),
        ({"model": 7}, "agents.local.model should be string. Type, for example: model: "),
        ({"model": ""}, "agents.local.model is '', which is not of the form"),
        ({"temperature": "warm"}, "temperature should be number or null. Type, for example: temperature: 0.4"),
        ({"temperature": -1}, "agents.local.temperature is below 0"),
        ({"temperature": 3}, "agents.local.temperature is above 2"),
        ({"timeout_s": 0}, "agents.local.timeout_s is not above 0"),
        ({"timeout_s": True}, "agents.local.timeout_s should be number. Type, for example: timeout_s: 120"),
        ({"most_tokens": -5}, "agents.local.most_tokens is below 1"),
        ({"most_tokens": 1.5}, "agents.local.most_tokens should be integer"),
        ({"most_answer_tokens": 0}, "agents.local.most_answer_tokens is below 1"),
        ({"most_money": -1, "price_per_million_in": 1}, "agents.local.most_money is below 0"),
        ({"most_money": 1}, "agents.local.most_money limits nothing without prices. Type, for example: price_per"),
        ({"price_per_million_out": -0.5}, "agents.local.price_per_million_out is below 0"),
        ({"insecure": "yes"}, "agents.local.insecure should be boolean"),
        ({"key_variable": 5}, "agents.local.key_variable should be string or null"),
        ({"colour": "red"}, "agents.local.colour is not known. An agent has a name, and the fields endpoint, model, "),
        ({"name": "other"}, "agents.local.name is not known. The name is 'local' already."),
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_field_is_told_with_what_to_type(fault, changed, said):
    assert said in fault(**changed)


@pytest.mark.parametrize("number", [".nan", ".inf", "-.inf", "1e999"])
@pytest.mark.parametrize(
    "name", ["temperature", "timeout_s", "most_tokens", "price_per_million_in", "price_per_million_out", "most_money"]
)
def test_what_is_no_number_limits_nothing(fault, name, number):
    priced = "price_per_million_in: 1, " if name == "most_money" else ""
    text = f"agents: {{local: {{endpoint: http://localhost/v1, model: m, role: analyst, {priced}{name}: {number}}}}}"
    assert f"agents.local.{name} should be " in fault(text)


SECRET = "sk-proj-Very5ecret"


@pytest.mark.parametrize(
    "changed",
    [
        {"key_variable": SECRET},
        {"key_variable": "hf_Very5ecret"},
        {"key_variable": ""},
        {"key": SECRET},
        {"api_key": SECRET},
        {"API-Key": SECRET},
        {"OPENAI_API_KEY": SECRET},
        {"token": SECRET},
        {"password": SECRET},
        {"endpoint": f"https://me:{SECRET}@models.example.com/v1"},
        {"endpoint": f"https://{SECRET}@models.example.com/v1"},
    ],
    ids=lambda changed: next(iter(changed.items())),
)
def test_a_key_in_the_file_is_refused_and_not_repeated(fault, changed):
    said = fault(**changed)
    assert "5ecret" not in said
    assert "Type: export MY_KEY=..., and in the file key_variable: MY_KEY" in said


@pytest.mark.parametrize(
    "text", [f"agents: {{local: {{key: {SECRET}", f"agents:\n\tkey: {SECRET}", f"- a\n{SECRET}: : x"]
)
def test_a_line_that_is_no_yaml_is_named_and_not_repeated(fault, text):
    said = fault(text)
    assert "it is no YAML in line " in said
    assert "5ecret" not in said


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8000/v1",
        "http://localhost/v1/",
        "http://[::1]:11434/v1",
        "http://127.8.9.10",
        "https://models.example.com/v1",
        "https://10.0.0.7:8443/openai/v1",
    ],
)
def test_an_address_is_taken(read, url):
    assert read(endpoint=url).agent("local").endpoint == url


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("127.0.0.1:8000/v1", "is no address that begins with http:// or https://"),
        ("ftp://127.0.0.1/v1", "is no address that begins with http:// or https://"),
        ("file:///etc/passwd", "is no address that begins with http:// or https://"),
        ("http://", "is no address that begins"),
        ("http://127.0.0.1:99999/v1", "is no address that begins"),
        ("http://127.0.0.1:0/v1", "is no address that begins"),
        ("http://127.0.0.1/v1?key=1", "is no address that begins"),
        ("http://127.0.0.1/v1#a", "is no address that begins"),
        ("http://127.0.0.1\\.example.com/v1", "is no address that begins"),
        ("http://127.0.0.1 /v1", "is no address that begins"),
        ("http://127.0.0.1/v1\n", "is no address that begins"),
        ("https://ex\u00e4mple.com/v1", "is no address that begins"),
        ("https://a.example/" + "v" * 600, "is no address that begins"),
        ("http://127.0.0.1/v1/chat/completions", "/chat/completions. Type: endpoint: http://127.0.0.1/v1"),
        ("http://a.example.com/v1", "as plain text. Type: endpoint: https://a.example.com/v1, or add insecure: true"),
        ("http://192.168.0.7:8000/v1", "as plain text"),
        ("http://0.0.0.0:8000/v1", "as plain text"),
        ("http://127.0.0.1.example.com/v1", "as plain text"),
        ("http://localhost.example.com/v1", "as plain text"),
    ],
)  # fmt: skip
def test_an_address_is_refused(fault, url, said):
    found = fault(endpoint=url)
    assert said in found
    assert "agents.local.endpoint " in found


def test_plain_http_elsewhere_is_taken_where_it_is_asked_for(read, fault):
    agent = read(endpoint="http://192.168.0.7:8000/v1", insecure=True).agent("local")
    assert agent.insecure
    assert not agent.is_here
    assert "as plain text" in fault(endpoint="http://192.168.0.7:8000/v1", insecure=False)


BOMB = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=False))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "line 1 has an anchor or an alias"),
        ("agents: {a: *b}", "has an anchor or an alias"),
        ("agents: !!python/object/apply:os.system [ls]", "line 1 has a tag"),
        ("agents: !!binary aGVsbG8=", "line 1 has a tag"),
        ("agents:\n  a: {model: x}\n  a: {model: y}", "line 3 has a name that stands there twice"),
        ("agents: {a: {model: x, model: y}}", "line 1 has a name that stands there twice"),
        ("agents: {[a]: b}", "or is no text"),
        ("agents: {a: {2024-01-01: b}}", "keys must be str"),
        ("agents: {a: {model: 2024-02-31}}", "day is out of range"),
        (f"agents: {{a: {{most_tokens: {'9' * 5000}}}}}", "5000 digits"),
        (f"agents: {{a: {{most_tokens: 0x{'f' * 400}}}}}", "it has a number of 482 digits"),
        ('agents: {a: {"\\ud800": 1}}', "half of a surrogate pair"),
        ("[" * 500, "levels"),
        ("agents: [" + "a, " * 11_000 + "]", "entries"),
        ("#" * (2**20 + 1), "it is larger than 1 MiB"),
        (b"agents: \xff", "can't decode byte 0xff"),
        ("agents: \x00", "it is no YAML"),
        ("a: 1\n---\nb: 2", "it is no YAML"),
        ("", "agents should name at least one agent"),
        ("[]", "agents should name at least one agent"),
        ("agents:", "agents should name at least one agent"),
        ("agents: {}", "agents should name at least one agent"),
        ("agents: {local: }", "agents.local should be object"),
        ("agents: {local: [1]}", "agents.local should be object"),
        ("agents: {a b: {}}", "the name agents.a b is 'a b', which is not of the form"),
        (f"agents: {{{'a' * 90}: {{}}}}", "which is not of the form"),
        ("agents: {a: {endpoint: http://localhost/v1, model: m, role: analyst}}\nmore: 1", "more is not known"),
    ],
    ids=lambda value: value[:24],
)  # fmt: skip
def test_a_file_that_is_none_of_agents_is_refused(fault, text, said):
    assert said in fault(text)


def test_a_file_that_is_not_there_is_told_with_one_that_is_enough(tmp_path, read):
    with pytest.raises(InvalidRoster, match=r"there is no such file\. Type: echo '.*' > agents.yaml") as caught:
        read_roster(tmp_path / "agents.yaml")
    assert read(caught.value.hint.partition("'")[2].rpartition("'")[0]).agent("local").duty.work == "kernel_writer"


def test_what_is_no_file_is_told(tmp_path):
    with pytest.raises(InvalidRoster, match="it cannot be read"):
        read_roster(tmp_path)
    with pytest.raises(InvalidRoster, match="null"):
        read_roster(Path("a\0b"))
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(InvalidRoster, match="it is no file"):
            read_roster(tmp_path / "pipe")


def test_whatever_stands_there_is_read_or_told(read):
    """Bytes of the example, cut, doubled and changed."""
    rng, whole = random.Random(7), EXAMPLE.read_bytes()
    for _ in range(100):
        raw = bytearray(whole)
        for _ in range(rng.randint(1, 6)):
            at, length = rng.randrange(len(raw) + 1), rng.randrange(12)
            new = [b"", rng.randbytes(3), b"{", b": ", b"- ", b"'", b"\n", b"&a ", b"!x ", b"9" * 9]
            raw[at : at + length] = rng.choice(new)
        try:
            assert read(bytes(raw)).agents
        except RocmSdError as error:
            assert str(error)  # noqa: PT017 -- both ways are right


def test_yaml_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(MissingDependency, match=r"pyyaml is not installed. Type: pip install 'rocm-sd\[agents\]'"):
        read_roster(EXAMPLE)


def test_the_first_of_three_places_is_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROCM_SD_CACHE", str(tmp_path / "cache"))
    assert settings.current().cache_dir == tmp_path / "cache"
    assert find_roster() is None
    for place in (tmp_path / "cache" / "agents.yaml", Path("config", "agents.yaml"), Path("agents.yaml")):
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(EXAMPLE.read_bytes())
        assert find_roster() == place
        assert read_roster(place).agents


def test_every_field_has_a_line_to_type():
    assert all(module._line(each.name).partition(": ")[2] for each in fields(Agent))
    assert module._RULES.keys() <= {"_File.agents", *(f"Agent.{each.name}" for each in fields(Agent))}
