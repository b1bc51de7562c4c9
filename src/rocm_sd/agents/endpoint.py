"""Asking a language model: any server that speaks OpenAI's chat completions, as agents.yaml names it.

    endpoint = Endpoint(agent, Spent())
    reply = endpoint.ask([Message("system", agent.duty.system), Message("user", "...")])   # or one of two errors

EndpointFailed: the server gave no answer that can be used. LimitReached: the run may spend no more. An answer is a
stranger's: it is bounded in time and size, read strictly, and never a reason to follow a redirect or to call a tool.
"""

from __future__ import annotations

import math
import os
import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rocm_sd.errors import RocmSdError, optional_module
from rocm_sd.plain_json import NotPlain, parsed, shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rocm_sd.agents.roster import Agent

__all__ = ["Endpoint", "EndpointFailed", "LimitReached", "Message", "Reply", "Spent"]

_MOST_BYTES, _MOST_WORDS = 2**20, 2**16
_CONNECT_S, _RETRIES = 10.0, 2
# English has four characters a token, code three: with three, too much is counted rather than too little.
_CHARACTERS = 3
# The client would tell of the system and of accounts that the environment names, and add headers that it holds. The
# last of these is its own note of how the answer is read.
_HEADERS = {
    "accept", "authorization", "connection", "content-length", "content-type", "host", "idempotency-key", "user-agent",
    "x-stainless-raw-response",
}  # fmt: skip
_NO_KEY = "none"


class EndpointFailed(RocmSdError):
    """A model's server was not reached, refused, or gave an answer that cannot be used."""


class LimitReached(RocmSdError):
    """A run has spent what its agent may spend."""


@dataclass(frozen=True)
class Message:
    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True)
class Reply:
    """`cost` in the currency of the agent's prices. `truncated`: the answer ended where its tokens did."""

    text: str
    tokens_in: int
    tokens_out: int
    cost: float
    truncated: bool


@dataclass
class Spent:
    """Of a run so far; a run that goes on begins with the numbers that were kept."""

    tokens_in: int = 0
    tokens_out: int = 0
    money: float = 0.0

    @property
    def tokens(self) -> int:
        return self.tokens_in + self.tokens_out

    def add(self, tokens_in: int, tokens_out: int, money: float) -> None:
        self.tokens_in += tokens_in
        self.tokens_out += tokens_out
        self.money += money


class Endpoint:
    """One question at a time: what is left to spend is counted between them."""

    def __init__(self, agent: Agent, spent: Spent) -> None:
        self.agent = agent
        self.spent = spent
        self._openai = optional_module("openai", "openai", "agents")
        self._key = self._key_of_environment()
        self._began = False  # whether there was an answer, good or bad, that is no refusal

    def ask(self, messages: Sequence[Message]) -> Reply:
        """Raises LimitReached before anything is sent, or EndpointFailed; of a server that may have worked for it, the
        question is counted all the same.
        """
        # Half of a surrogate pair, as a file name may hold, cannot be sent.
        sent = [{"role": each.role, "content": each.content.encode("utf-8", "replace").decode()} for each in messages]
        prompt = sum(_estimated(each["content"]) for each in sent)
        request: dict[str, Any] = {"model": self.agent.model, "messages": sent, "max_tokens": self._room(prompt)}
        if self.agent.temperature is not None:
            request["temperature"] = self.agent.temperature
        client, self._began = self._client(), False
        try:
            answer = _within(self.agent.timeout_s, lambda: self._answer(client, request))
        finally:
            # It ends what still waits, too: nothing is tried again for a question that was given up.
            client.close()
        if answer is None or (isinstance(answer, EndpointFailed) and self._began):
            self._count(prompt, 0)
        if answer is None:
            raise self._failed(f"gave no whole answer in {self.agent.timeout_s:g} s", "Type a larger timeout_s.")
        if isinstance(answer, EndpointFailed):
            raise answer
        return self._reply(answer, prompt)

    def _room(self, prompt: int) -> int:
        """How many tokens the answer may have, after a prompt of so many."""
        agent = self.agent
        tokens = agent.most_tokens - self.spent.tokens - prompt
        if tokens < 1:
            used = f"{self.spent.tokens} of its {agent.most_tokens} tokens, and a prompt of about {prompt} is too much"
            raise self._limit(used, "most_tokens")
        room: float = min(tokens, agent.most_answer_tokens)
        if agent.most_money is not None and agent.cost(1, 1) > 0:
            left = agent.most_money - self.spent.money - agent.cost(prompt, 0)
            price = agent.cost(0, 1)
            room = min(room, left / price) if price else room
            if left <= 0 or room < 1:
                used = f"{self.spent.money:.4g} of its {agent.most_money:.4g} of money, and the rest is too little"
                raise self._limit(used, "most_money")
        return int(room)

    def _limit(self, used: str, name: str) -> LimitReached:
        hint = f"Type a larger {name} for it in agents.yaml, and the same command again."
        return LimitReached(f"Agent {self.agent.name} has used {used}.", hint=hint)

    def _count(self, tokens_in: int, tokens_out: int) -> float:
        cost = self.agent.cost(tokens_in, tokens_out)
        self.spent.add(tokens_in, tokens_out, cost)
        return cost

    def _key_of_environment(self) -> str:
        name = self.agent.key_variable
        if name is None:
            return _NO_KEY
        key = os.environ.get(name, "").strip()
        # Not repeated: what is wrong with it may be one character of a secret.
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            why = "holds more than a key" if key else "is not set"
            raise EndpointFailed(
                f"Agent {self.agent.name} needs a key, and {name} {why}.", hint=f"Type: export {name}=..."
            )
        return key

    def _client(self) -> Any:
        """A new one for each question, since one that was given up is closed."""
        openai, agent = self._openai, self.agent
        http = openai.DefaultHttpxClient(
            follow_redirects=False,
            # A proxy that the environment names is for hosts elsewhere.
            trust_env=not agent.is_here,
            event_hooks={"request": [self._only_what_is_asked], "response": [self._bounded]},
        )
        return openai.OpenAI(
            api_key=self._key, base_url=agent.endpoint, max_retries=_RETRIES, http_client=http,
            timeout=openai.Timeout(agent.timeout_s, connect=min(_CONNECT_S, agent.timeout_s)),
        )  # fmt: skip

    def _only_what_is_asked(self, request: Any) -> None:
        for name in set(request.headers.keys()) - _HEADERS:
            del request.headers[name]
        request.headers["authorization"] = f"Bearer {self._key}"
        # What is packed may unpack to a thousand times its size.
        request.headers["accept-encoding"] = "identity"

    def _bounded(self, response: Any) -> None:
        """Before anything of it is read: the client reads the body of an error whole, unless it was closed."""
        if response.status_code < 300:
            self._began = True
            return
        length = response.headers.get("content-length", "")
        plain = not {"content-encoding", "transfer-encoding"} & set(response.headers.keys())
        if plain and length.isdecimal() and len(length) < 9 and int(length) <= _MOST_WORDS:
            response.read()
        else:
            response.close()

    def _answer(self, client: Any, request: dict[str, Any]) -> bytes | EndpointFailed:
        """The body of an answer. Errors are returned, without those they come from: these hold the key."""
        openai = self._openai
        try:
            return self._body(client, request)
        except openai.APIStatusError as error:
            # Newer models of OpenAI's own take the limit by another name alone, and say so.
            if error.status_code == 400 and "max_completion_tokens" in self._words(error) and "max_tokens" in request:
                other = {("max_completion_tokens" if name == "max_tokens" else name): request[name] for name in request}
                return self._answer(client, other)
            return self._refused(error.status_code, self._words(error))
        except openai.APIConnectionError:
            return self._failed("was not reached, or hung up", self._look("To see whether it runs"))
        except EndpointFailed as error:
            return error
        except Exception as error:  # noqa: BLE001 -- of httpx, or of httpx2, by the version of openai
            return self._failed(f"broke its answer off ({type(error).__name__})")

    def _body(self, client: Any, request: Mapping[str, Any]) -> bytes:
        found = bytearray()
        with client.chat.completions.with_streaming_response.create(**request) as response:
            # Not told by a hook, whose errors the client takes for those of a connection.
            if response.headers.get("content-encoding", "identity") != "identity":
                raise self._failed("packed its answer, which it was asked not to")
            for part in response.iter_bytes():
                found += part
                if len(found) > _MOST_BYTES:  # the rest is not read, and this is refused
                    break
        return bytes(found)

    def _reply(self, raw: bytes, prompt: int) -> Reply:
        try:
            values = parsed(raw, most=_MOST_BYTES)
        except NotPlain as error:
            self._count(prompt, _estimated(raw))
            raise self._failed(f"gave an answer that cannot be read: {error}") from None
        choice = _of(_of(values, "choices", list)[:1], 0, dict)
        message, usage = _of(choice, "message", dict), _of(values, "usage", dict)
        text = _of(message, "content", str)
        tokens_in = _counted(usage.get("prompt_tokens"), prompt)
        tokens_out = _counted(usage.get("completion_tokens"), _estimated(text or raw))
        cost = self._count(tokens_in, tokens_out)
        truncated = choice.get("finish_reason") == "length"
        if message.get("tool_calls") or message.get("function_call"):
            raise self._failed("wants to call a tool, and was given none", "Type another model: for it in agents.yaml.")
        if not text.strip():
            hint = "Type a larger most_answer_tokens: it was used up before the first word." if truncated else None
            raise self._failed("gave an answer without text", hint)
        return Reply(text, tokens_in, tokens_out, cost, truncated)

    def _words(self, error: Any) -> str:
        """What the server says of its refusal, on one line, and without the key, which some repeat."""
        said = error.body
        if isinstance(said, dict):
            said = said.get("message") or said.get("detail")
        text = said if isinstance(said, str) else ""
        text = text.replace(self._key, "...") if self.agent.key_variable else text
        return shortened(" ".join("".join(c if c.isprintable() else " " for c in text).split()), 300)

    def _refused(self, status: int, words: str) -> EndpointFailed:
        said = f": {words}" if words else ""
        name = self.agent.key_variable
        if status in {401, 403}:
            hint = f"Type: export {name}=..." if name else "Type key_variable: MY_KEY for it in agents.yaml."
            return self._failed(f"does not let this agent in (HTTP {status}{said})", hint)
        if 300 <= status < 400:
            return self._failed(f"sends the question elsewhere (HTTP {status}), which is not followed")
        if status == 429:
            return self._failed(f"is asked too much (HTTP 429{said})", "Wait, and type the same command again.")
        return self._failed(f"refused the question (HTTP {status}{said})")

    def _failed(self, what: str, hint: str | None = None) -> EndpointFailed:
        return EndpointFailed(
            f"The endpoint of agent {self.agent.name} {what}.", hint=hint or self._look("To see what it offers")
        )

    def _look(self, before: str) -> str:
        key = f'-H "Authorization: Bearer ${self.agent.key_variable}" ' if self.agent.key_variable else ""
        return f"{before}, type: curl {key}{self.agent.endpoint.rstrip('/')}/models"


def _within(seconds: float, work: Callable[[], Any]) -> Any:
    """What it returns; None where it takes longer. A client's own limits are of each read, and a drop a second never
    ends. The thread is left to itself, since nothing can end one.
    """
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=lambda: done.put(work()), name="rocm-sd agent", daemon=True).start()
    try:
        return done.get(timeout=seconds)
    except queue.Empty:
        return None


def _of(values: Any, name: Any, kind: type) -> Any:
    """An entry of that type, or an empty one."""
    try:
        found = values[name]
    except (KeyError, IndexError, TypeError):
        return kind()
    return found if isinstance(found, kind) else kind()


def _estimated(text: str | bytes) -> int:
    return math.ceil(len(text) / _CHARACTERS)


def _counted(given: object, otherwise: int) -> int:
    """A number of tokens by the server, where it is one."""
    return given if isinstance(given, int) and not isinstance(given, bool) and given >= 0 else otherwise
