"""What an agent proposes for an op, and how it is read from an answer in words.

A proposal is one of four kinds:

- config: numbers that a kernel is launched with, for the problems of one bucket of the tuning data;
- space: values for each of those numbers, all of whose combinations are tried;
- kernel: functions of Triton in place of the op's own (`kernels.proposed` says what they may contain);
- hip: the text of one of the op's HIP sources.

Everything here treats a proposal as data: nothing of it runs.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

from rocm_sd.errors import RocmSdError
from rocm_sd.kernels.hip.toolchain import SOURCES
from rocm_sd.kernels.proposed import NotAllowed, checked, checked_hip, jit_functions, spliced
from rocm_sd.ops import OPS
from rocm_sd.ops.accepted import module_text
from rocm_sd.plain_json import NotPlain, parsed
from rocm_sd.tuning.search.halving import strategies
from rocm_sd.typed_json import Misfit, Rules, read

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rocm_sd.kernels.config import Config
    from rocm_sd.ops.registry import Op

__all__ = [
    "FORMAT", "KINDS", "MOST_CONFIGS", "RULES", "NoProposal", "Proposal", "from_answer", "functions_text", "module_of",
    "reference_text", "require_sense", "why_not_allowed",
]  # fmt: skip

KINDS = ("config", "space", "kernel", "hip")
MOST_CONFIGS = 64
RULES: Rules = {
    "Proposal.kind": {"enum": list(KINDS)},
    "Proposal.why": {"maxLength": 2000},
    "Proposal.bucket": {"maxLength": 200},
    "Proposal.source": {"maxLength": 100},
    "Proposal.strategy": {"maxLength": 100},
}
_FENCE = re.compile(r"```[ \t]*([\w+-]*)")
FORMAT = """\
Answer with one block of JSON, and for a kernel with one block of code:

```json
{"kind": "kernel", "why": "one sentence: what it changes, and what that should win"}
```

```python
@triton.jit
def _the_kernel(x, y, N, BLOCK: tl.constexpr):
    ...
```

The code is whole functions with the decorator @triton.jit. They replace the functions of the same name and keep their
parameters; others help them. Nothing but triton.language (as tl) may be used: no import, no print, no assembly, no
atomics. Other kinds need no code:

```json
{"kind": "config", "why": "...", "bucket": "512x5120, float16", "config": {"block_f": 512, "rows": 4, "warps": 4}}
{"kind": "space", "why": "...", "bucket": "512x5120, float16", "space": {"block_f": [256, 512], "rows": [2, 4, 8]}}
```

Of a HIP source, "kind" is "hip", "source" is its name, and the block of code is the whole file.
"""


class NoProposal(RocmSdError):
    """An answer that holds no proposal, or one that means nothing for the op: the sentence goes back to who gave it."""


@dataclass(frozen=True)
class Proposal:
    """`why` is in the proposer's words. `bucket`: the call that a config is for, of the op's tuning data.

    A kernel may bring its own config, for all problems. `source`: which HIP source `text` stands for. A space is
    `space` or, where it is no product, `listed`; on a card `strategy`, one of the tuner's, says what of it is timed.
    """

    kind: str
    why: str = ""
    text: str = ""
    config: dict[str, int] = field(default_factory=dict)
    space: dict[str, tuple[int, ...]] = field(default_factory=dict)
    bucket: str = ""
    source: str = ""
    listed: tuple[dict[str, int], ...] = ()
    strategy: str = ""

    @property
    def digest(self) -> str:
        """Of what it does, whatever reason is given for it."""
        values = {**asdict(self), "why": ""}
        # What was offered before there were these goes by the name that it had.
        values = {name: value for name, value in values.items() if value or name not in {"listed", "strategy"}}
        plain = json.dumps(values, sort_keys=True)
        return hashlib.sha256(plain.encode()).hexdigest()[:12]

    def configs(self) -> Iterator[dict[str, int]]:
        if self.listed:
            yield from self.listed
            return
        names = list(self.space)
        for values in product(*self.space.values()):
            yield {**self.config, **dict(zip(names, values, strict=True))}


def from_answer(answer: str) -> Proposal:
    """Of a language model's answer; raises NoProposal."""
    blocks = list(_blocks(answer))
    described = [body for language, body in blocks if language.lower() == "json"]
    code = [body for language, body in blocks if language.lower() in {"python", "py", "cpp", "c++", "hip"}]
    if len(described) != 1:
        raise NoProposal(f"The answer has {len(described)} blocks of JSON in place of one.", hint=FORMAT)
    if len(code) > 1:
        raise NoProposal(f"The answer has {len(code)} blocks of code in place of one.", hint=FORMAT)
    try:
        values = parsed(described[0])
        if not isinstance(values, dict):
            raise NoProposal("The block of JSON is not an object.", hint=FORMAT)
        if code:
            values["text"] = code[0]
        return read(Proposal, values, RULES, top="the proposal")
    except (NotPlain, Misfit) as error:
        raise NoProposal(f"The answer's JSON is not a proposal: {error}.", hint=FORMAT) from None


def _blocks(answer: str) -> Iterator[tuple[str, str]]:
    """(language, text) of each fenced block that ends. Line by line: the time grows as the answer does."""
    language = ""
    body: list[str] | None = None
    for line in answer.split("\n"):
        if not line.startswith("```"):
            if body is not None:
                body.append(line)
        elif body is None:
            found = _FENCE.match(line)
            assert found is not None
            language, body = found[1], []
        else:
            yield language, "".join(f"{each}\n" for each in body)
            body = None


def module_of(op: Op, proposal: Proposal) -> str:
    """The op's module with the proposal's functions: what is written to a file, and imported in a worker alone."""
    own = module_text(op)
    return spliced(own, checked(proposal.text, own))


def require_sense(op: Op, proposal: Proposal) -> None:
    """Whether it means something for the op; raises NotAllowed or NoProposal. This is the first rung."""
    verification, tuning = op.verification, op.tuning
    if verification is None or tuning is None or not verification.kernels:
        raise NoProposal(f"{op.name} has no kernel in Triton that could be improved.", hint=f"Use one of: {_known()}.")
    buckets = [bucket.sample.name for bucket in tuning.buckets]
    if proposal.kind in {"config", "space"}:
        if proposal.bucket not in buckets:
            raise NoProposal(f"There is no bucket {proposal.bucket!r}; there are: {'; '.join(buckets)}.")
        _require_configs(op, proposal)
        if proposal.strategy and proposal.strategy not in strategies():
            known = ", ".join(strategies())
            raise NoProposal(f"There is no search strategy {proposal.strategy!r}; there are: {known}.")
    elif proposal.kind == "kernel":
        module_of(op, proposal)
        if proposal.config:
            _require_configs(op, proposal)
    else:
        _require_hip(op, proposal)


def _known() -> str:
    return ", ".join(name for name, op in OPS.items() if op.verification is not None and op.verification.kernels)


def _require_configs(op: Op, proposal: Proposal) -> None:
    assert op.verification is not None
    implementation = op.implementation(op.verification.implementation)
    given = list(proposal.configs()) if proposal.kind == "space" else [proposal.config]
    if not given or len(given) > MOST_CONFIGS:
        raise NoProposal(f"A space may have 1 to {MOST_CONFIGS} configs, and this has {len(given)}.")
    for config in given:
        if implementation.default.fitting(config) is None:
            names = ", ".join(implementation.default.to_dict())
            raise NoProposal(f"A config of {op.name} has whole numbers named {names}, and this is {config}.")
        bad = {name: value for name, value in config.items() if not 0 <= value <= 2**20}
        if bad:
            raise NoProposal(f"Numbers of a config are between 0 and {2**20}, and this has {bad}.")


def config_of(op: Op, values: dict[str, int]) -> Config:
    assert op.verification is not None
    return op.implementation(op.verification.implementation).config_from(values)


def _require_hip(op: Op, proposal: Proposal) -> None:
    own = [each for each in op.implementations if each.kernels is not None]
    named = {path.stem for path in SOURCES.glob("*.hip")}
    if not own:
        raise NoProposal(f"{op.name} has no kernels in HIP.")
    if proposal.source not in named:
        raise NoProposal(f"There is no HIP source {proposal.source!r}; there are: {', '.join(sorted(named))}.")
    checked_hip(proposal.text, (SOURCES / f"{proposal.source}.hip").read_text(encoding="utf-8"))


def why_not_allowed(op: Op, proposal: Proposal) -> str | None:
    """The finding of the first rung, or None where it passed."""
    try:
        require_sense(op, proposal)
    except (NotAllowed, NoProposal) as error:
        return error.message
    return None


def as_dict(proposal: Proposal) -> dict[str, Any]:
    """Without what it leaves out."""
    return {name: value for name, value in asdict(proposal).items() if value or name == "kind"}


def functions_text(op: Op) -> str:
    """The op's own functions of Triton, as a proposal would have them."""
    module = module_text(op)
    lines = module.split("\n")
    return "\n\n\n".join(
        "\n".join(lines[each.decorator_list[0].lineno - 1 : each.end_lineno]) for each in jit_functions(module).values()
    )


def reference_text(op: Op) -> str:
    """The op's definition."""
    assert op.verification is not None
    return inspect.getsource(inspect.unwrap(op.verification.reference))
