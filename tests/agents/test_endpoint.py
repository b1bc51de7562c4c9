"""A model's server is a stranger: what it answers, how slowly and how much, ends in a reply or in one sentence."""

from __future__ import annotations

import gzip
import json
import logging
import math
import pickle
import sys
import time
import traceback
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_endpoint import (
    Dripping,
    Dropped,
    Hang,
    Huge,
    NotJson,
    Raw,
    Status,
    Truncated,
    WithoutUsage,
    completion,
    scripted,
    words,
)

from rocm_sd.agents import endpoint as module
from rocm_sd.agents.endpoint import Endpoint, EndpointFailed, LimitReached, Message, Reply, Spent
from rocm_sd.agents.roster import Agent
from rocm_sd.errors import MissingDependency

QUESTION = [Message("system", "You write kernels."), Message("user", "Make this one faster, please.")]
ASKED = sum(words(each.content) for each in QUESTION)
GUESSED = sum(math.ceil(len(each.content) / 3) for each in QUESTION)
SECRET = "sk-Very5ecret-0123456789"


def agent(server, **changed):
    return replace(Agent("local", server.url, "scripted", "kernel_writer", 0.25, timeout_s=20.0), **changed)


def asked(answers, spent=None, **changed):
    with scripted(answers) as server:
        return Endpoint(agent(server, **changed), spent or Spent()).ask(QUESTION)


def failure(answers, spent=None, **changed):
    """What is said where there is no answer: on one line, with the agent and what to type."""
    with pytest.raises(EndpointFailed) as caught:
        asked(answers, spent, **changed)
    said = str(caught.value)
    assert "agent local" in said
    assert "\n" not in said
    assert "ype" in caught.value.hint
    assert caught.value.__cause__ is None
    return said


def test_a_question_is_sent_and_its_answer_is_counted():
    spent = Spent()
    with scripted(["Use fewer registers."]) as server:
        reply = Endpoint(agent(server, price_per_million_in=1000.0, price_per_million_out=2000.0), spent).ask(QUESTION)
    cost = (ASKED * 1000 + 3 * 2000) / 1e6
    assert reply == Reply("Use fewer registers.", ASKED, 3, pytest.approx(cost), truncated=False)
    assert (spent.tokens_in, spent.tokens_out, spent.tokens) == (ASKED, 3, ASKED + 3)
    assert spent.money == pytest.approx(cost)
    assert server.asked == [
        {
            "model": "scripted",
            "messages": [
                {"role": "system", "content": "You write kernels."},
                {"role": "user", "content": "Make this one faster, please."},
            ],
            "max_tokens": 8192,
            "temperature": 0.25,
        }
    ]


def test_a_temperature_that_is_the_servers_is_not_sent():
    with scripted(["yes"]) as server:
        Endpoint(agent(server, temperature=None), Spent()).ask(QUESTION)
    assert "temperature" not in server.asked[0]


def test_the_end_of_the_tokens_is_told():
    reply = asked([Truncated("Use fewer")])
    assert reply.truncated
    assert reply.text == "Use fewer"


def test_what_the_server_does_not_count_is_estimated():
    reply = asked([WithoutUsage("abcdefg")])
    assert (reply.tokens_in, reply.tokens_out) == (GUESSED, 3)


@pytest.mark.parametrize("count", [-5, "many", 1.5, True, None])
def test_a_count_that_is_none_is_estimated(count):
    def answer(question):
        return Raw({**completion("abcdefg", question), "usage": {"prompt_tokens": count, "completion_tokens": count}})

    reply = asked([answer])
    assert (reply.tokens_in, reply.tokens_out) == (GUESSED, 3)


def test_half_of_a_surrogate_pair_is_sent_as_a_question_mark():
    with scripted(["yes"]) as server:
        Endpoint(agent(server), Spent()).ask([Message("user", "a\ud800b \u00e4")])
    assert server.asked[0]["messages"][0]["content"] == "a?b \u00e4"


def test_an_answer_may_be_made_of_the_question():
    with scripted([lambda question: question["messages"][-1]["content"].upper()], models=["a", "b"]) as server:
        assert Endpoint(agent(server), Spent()).ask(QUESTION).text == "MAKE THIS ONE FASTER, PLEASE."
        with urllib.request.urlopen(f"{server.url}/models") as page:
            assert [each["id"] for each in json.load(page)["data"]] == ["a", "b"]


# Limits.


def test_the_answer_may_have_what_is_left():
    with scripted(["one two three", "four"]) as server:
        spent = Spent(tokens_in=500, tokens_out=400)
        endpoint = Endpoint(agent(server, most_tokens=1000), spent)
        endpoint.ask(QUESTION)
        endpoint.ask(QUESTION)
    assert [each["max_tokens"] for each in server.asked] == [100 - GUESSED, 100 - ASKED - 3 - GUESSED]
    assert spent.tokens == 900 + ASKED + 3 + ASKED + 1


def test_the_answer_may_have_what_is_left_of_the_money():
    spent = Spent(money=1.5)
    with scripted(["yes"]) as server:
        priced = agent(server, most_money=2.0, price_per_million_in=100.0, price_per_million_out=1000.0)
        Endpoint(priced, spent).ask(QUESTION)
    assert server.asked[0]["max_tokens"] == int((0.5 - GUESSED * 100 / 1e6) / 1000 * 1e6)
    assert spent.money == pytest.approx(1.5 + ASKED * 100 / 1e6 + 1000 / 1e6)


@pytest.mark.parametrize(
    ("spent", "changed", "said"),
    [
        (Spent(1000, 0), {"most_tokens": 1000}, "most_tokens"),
        (Spent(0, 999), {"most_tokens": 1000}, "most_tokens"),
        (Spent(10**9, 10**9), {}, "most_tokens"),
        (Spent(), {"most_tokens": GUESSED}, "most_tokens"),
        (Spent(money=2.0), {"most_money": 2.0, "price_per_million_out": 1.0}, "most_money"),
        (Spent(money=3.0), {"most_money": 2.0, "price_per_million_in": 1.0}, "most_money"),
        (Spent(), {"most_money": 0.0, "price_per_million_out": 1.0}, "most_money"),
        (Spent(money=1.0), {"most_money": 1.0 + 1e-9, "price_per_million_out": 1.0}, "most_money"),
    ],
)
def test_nothing_is_asked_where_nothing_is_left(spent, changed, said):
    with scripted(["yes"]) as server:
        with pytest.raises(LimitReached, match=f"Type a larger {said} for it in agents.yaml") as caught:
            Endpoint(agent(server, **changed), spent).ask(QUESTION)
        assert "Agent local has used " in str(caught.value)
        assert not server.asked


def test_what_costs_nothing_is_not_limited_by_money():
    assert asked(["yes"], Spent(money=5.0), most_money=0.0).text == "yes"


def test_a_price_of_almost_nothing_overflows_nothing():
    assert asked(["yes"], most_money=1e9, price_per_million_out=1e-300).text == "yes"


# What is tried again, and what is not.


@pytest.mark.parametrize("bad", [Status(429, "slowly"), Status(500), Status(503), Dropped()], ids=str)
def test_it_is_tried_again(bad):
    assert asked([bad, "yes"]).text == "yes"


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (Status(429, "slowly"), "is asked too much (HTTP 429: slowly). Wait, and type the same command again."),
        (Status(500, "out of memory"), "refused the question (HTTP 500: out of memory). To see what it offers, type: "),
        (Dropped(), "was not reached, or hung up. To see whether it runs, type: curl "),
    ],
    ids=str,
)
def test_it_is_tried_three_times_and_no_more(bad, said):
    spent = Spent()
    with scripted([bad, bad, bad, "too late"]) as server, pytest.raises(EndpointFailed) as caught:
        Endpoint(agent(server), spent).ask(QUESTION)
    assert len(server.asked) == 3
    assert said in str(caught.value)
    assert spent == Spent()


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (Status(404, "model 'x' not found,\ntry pulling it"), "(HTTP 404: model 'x' not found, try pulling it)"),
        (Status(400), "refused the question (HTTP 400)."),
        (Status(401, "who?"), "does not let this agent in (HTTP 401: who?). Type key_variable: MY_KEY for it in "),
        (Status(418, "a" * 5000), f"(HTTP 418: {'a' * 300}...)"),
    ],
    ids=lambda value: str(value)[:24],
)  # fmt: skip
def test_a_refusal_is_told_at_once(bad, said):
    with scripted([bad, "too late"]) as server, pytest.raises(EndpointFailed) as caught:
        Endpoint(agent(server), Spent()).ask(QUESTION)
    assert len(server.asked) == 1
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "body", [{"error": "no such\nmodel"}, {"detail": "no such model"}, {"message": "no such model"}, "no such model"]
)
def test_words_of_other_servers_are_shown(body):
    assert "(HTTP 404: no such model)" in failure([Status(404, body=body)])


@pytest.mark.parametrize("body", [{"error": {"message": ["a"]}}, {"error": 5}, [], 7, None, "[" * 9000])
def test_words_that_are_none_are_left_out(body):
    assert "refused the question (HTTP 404" in failure([Status(404, body=body)])


def test_a_redirect_is_not_followed():
    with scripted(["not here"]) as other:
        moved = Status(307, headers=(("location", f"{other.url}/chat/completions"),))
        assert "sends the question elsewhere (HTTP 307), which is not followed" in failure([moved])
        assert not other.asked


def test_the_other_name_of_the_limit_is_tried():
    says = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
    with scripted([Status(400, says), "yes"]) as server:
        assert Endpoint(agent(server), Spent()).ask(QUESTION).text == "yes"
        assert "max_tokens" not in server.asked[1]
        assert server.asked[1]["max_completion_tokens"] == 8192
    assert "HTTP 400: Unsupported" in failure([Status(400, says), Status(400, says)])


def test_a_server_that_is_not_there(monkeypatch):
    monkeypatch.setattr(module, "_RETRIES", 0)
    with scripted([]) as server:
        pass
    with pytest.raises(EndpointFailed, match=rf"was not reached.* type: curl {server.url}/models"):
        Endpoint(agent(server), Spent()).ask(QUESTION)


# Answers that are none.


def message(**changed):
    def answer(question):
        body = completion("yes", question)
        body["choices"][0]["message"].update(changed)
        return Raw(body)

    return answer


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (NotJson(), "gave an answer that cannot be read: it is no JSON"),
        (NotJson(""), "gave an answer that cannot be read: it is no JSON"),
        (NotJson('{"a": "\\ud800"}'), "half of a surrogate pair"),
        (NotJson("[" * 10_000), "gave an answer that cannot be read: it is nested"),
        (NotJson('{"usage": NaN}'), "NaN, which is no number"),
        (Raw([]), "gave an answer without text"),
        (Raw({}), "gave an answer without text"),
        (Raw({"choices": []}), "gave an answer without text"),
        (Raw({"choices": {"0": 1}}), "gave an answer without text"),
        (Raw({"choices": [{"message": "yes"}]}), "gave an answer without text"),
        (message(content=None), "gave an answer without text"),
        (message(content=" \n"), "gave an answer without text"),
        (message(content=["yes"]), "gave an answer without text"),
        (message(tool_calls=[{"id": "1"}]), "wants to call a tool, and was given none"),
        (message(function_call={"name": "rm"}), "wants to call a tool, and was given none"),
        (Truncated(""), "gave an answer without text. Type a larger most_answer_tokens"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_an_answer_that_is_none(bad, said):
    spent = Spent()
    assert said in failure([bad, "too late"], spent)
    # It was worked for all the same.
    assert spent.tokens_in in {ASKED, GUESSED}


def test_an_answer_that_breaks_off():
    spent = Spent()
    assert "broke its answer off (" in failure([Dropped(midway=True), "too late"], spent)
    assert spent.tokens == GUESSED


def buffers():
    """The most bytes that this system keeps between the two ends of a connection."""
    files = [Path(f"/proc/sys/net/ipv4/{each}") for each in ("tcp_rmem", "tcp_wmem")]
    return sum(int(file.read_text(encoding="utf-8").split()[2]) if file.exists() else 8 * 2**20 for file in files)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("status", [200, 400])
def test_a_huge_answer_is_not_read(told, status):
    held = buffers()
    huge = Huge(2 * held + 64 * 2**20, told=told, status=status)
    with scripted([huge, "too late"]) as server, pytest.raises(EndpointFailed) as caught:
        Endpoint(agent(server), Spent()).ask(QUESTION)
    assert ("it is larger than 1 MiB" if status == 200 else "(HTTP 400)") in str(caught.value)
    # What lies in the buffers of two sockets was sent, and not read.
    assert server.sent < held + 8 * 2**20


def test_an_answer_of_just_under_a_mebibyte_is_read():
    assert len(asked(["x" * (2**20 - 1000)]).text) == 2**20 - 1000


def test_a_packed_answer_is_not_unpacked():
    packed = gzip.compress(b" " * 2**26)
    with scripted([Raw(packed, (("content-encoding", "gzip"),))]) as server, pytest.raises(EndpointFailed) as caught:
        Endpoint(agent(server), Spent()).ask(QUESTION)
    assert "packed its answer" in str(caught.value)
    assert server.headers[0]["accept-encoding"] == "identity"


@pytest.mark.parametrize("slow", [Hang(600), Dripping(), Dripping(head=True)], ids=str)
def test_what_does_not_end_in_time_is_given_up(slow):
    spent = Spent()
    with scripted([slow, "too late"]) as server:
        # Long enough for a busy machine to send the question, and nothing beside what the answer would take.
        endpoint = Endpoint(agent(server, timeout_s=3.0), spent)
        begun = time.monotonic()
        with pytest.raises(EndpointFailed, match=r"gave no whole answer in 3 s\. Type a larger timeout_s\."):
            endpoint.ask(QUESTION)
        assert time.monotonic() - begun < 60
        assert spent.tokens == GUESSED
        if isinstance(slow, Hang):
            # The client would try again after half a second, behind the back of who asks.
            time.sleep(0.7)
        assert len(server.asked) == 1
        endpoint.agent = replace(endpoint.agent, timeout_s=60.0)
        assert endpoint.ask(QUESTION).text == "too late"


# Keys, and what else the environment holds.


def everything_said(caught, capture, endpoint):
    """Of an error, the logs of all libraries and what is printed of the objects."""
    error = caught.value
    return "\n".join(
        [
            str(error), repr(error), repr(error.__dict__), repr(pickle.dumps(error)), repr(endpoint),
            *traceback.format_exception(type(error), error, error.__traceback__), capture.text,
            *traceback.format_exception(type(error.__context__), error.__context__, None),
        ]
    )  # fmt: skip


@pytest.mark.parametrize(
    "bad",
    [
        Status(401, "Incorrect API key provided: {key}."),
        Status(400, "Bearer {key}"),
        Status(500, "{key}"),
        NotJson(SECRET),
        Dropped(),
        Dropped(midway=True),
        Hang(600),
    ],
    ids=str,
)
def test_a_key_is_sent_and_never_shown(bad, monkeypatch, caplog):
    monkeypatch.setenv("MY_KEY", f"{SECRET}\n")
    for name in ("openai", "httpx", "httpx2", "httpcore", "httpcore2"):
        monkeypatch.setattr(logging.getLogger(name), "level", logging.DEBUG)
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(module, "_RETRIES", 1 if isinstance(bad, Status) else 0)
    with scripted([bad] * 3) as server:
        endpoint = Endpoint(
            agent(server, key_variable="MY_KEY", timeout_s=3.0 if isinstance(bad, Hang) else 20.0), Spent()
        )
        with pytest.raises(EndpointFailed) as caught:
            endpoint.ask(QUESTION)
    assert server.headers[0]["authorization"] == f"Bearer {SECRET}"
    assert "5ecret" not in everything_said(caught, caplog, endpoint)
    assert SECRET not in repr(endpoint.agent)
    if not isinstance(bad, (Hang, Status)) or bad == Status(500, "{key}"):
        assert f'curl -H "Authorization: Bearer $MY_KEY" {server.url}/models' in str(caught.value)


def test_a_key_that_is_wrong_is_told_with_its_variable(monkeypatch):
    monkeypatch.setenv("MY_KEY", SECRET)
    said = failure([Status(403)], key_variable="MY_KEY")
    assert "does not let this agent in (HTTP 403). Type: export MY_KEY=..." in said


@pytest.mark.parametrize("key", [None, "", " ", f"{SECRET} and more", f"{SECRET}\nx: y", f"{SECRET}\u00e4"])
def test_a_variable_without_a_key_is_told_before_anything_is_asked(key, monkeypatch):
    if key is None:
        monkeypatch.delenv("MY_KEY", raising=False)
    else:
        monkeypatch.setenv("MY_KEY", key)
    with scripted([]) as server, pytest.raises(EndpointFailed, match="Agent local needs a key, and MY_KEY ") as caught:
        Endpoint(agent(server, key_variable="MY_KEY"), Spent())
    assert "Type: export MY_KEY=..." in str(caught.value)
    assert "5ecret" not in str(caught.value)


def test_nothing_of_the_environment_is_sent(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    monkeypatch.setenv("OPENAI_ADMIN_KEY", SECRET)
    monkeypatch.setenv("OPENAI_ORG_ID", SECRET)
    monkeypatch.setenv("OPENAI_PROJECT_ID", SECRET)
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", f"x-own: {SECRET}\nAuthorization: Bearer {SECRET}")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1/v1")
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with scripted(["yes"]) as server:
        assert Endpoint(agent(server), Spent()).ask(QUESTION).text == "yes"
    sent = server.headers[0]
    assert SECRET not in str(sent)
    assert sent["authorization"] == "Bearer none"
    assert [name for name in sent if name.startswith(("x-", "openai"))] == ["x-stainless-raw-response"]


def test_the_client_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with scripted([]) as server, pytest.raises(MissingDependency, match=r"pip install 'rocm-sd\[agents\]'"):
        Endpoint(agent(server), Spent())
