"""Run Diffusers' own pipeline tests stock and optimised: python tools/diffusers_tests.py CHECKOUT [FOLDER ...]

CHECKOUT is a folder with Diffusers' `tests/`; what is tested is the Diffusers that is installed. Each test runs twice,
with pipelines as they come and with every one passed through `optimize`, steps captured. What differs is printed. A
test that fails both ways says nothing of this project: the checkout may be of another version, and tests that load
models need the hub. Without `--hub`, small tokenizers and text models stand in for those that most tests load; fixed
expected values are then wrong both ways. The exit code is 1 where a test fails optimised only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from rocm_sd.cli.terminal import bar, say
from rocm_sd.errors import InvalidOption, RocmSdError
from rocm_sd.files import write_text
from rocm_sd.ops import OPS

__all__ = ["Outcomes", "difference", "run_tests"]

FOLDERS = (
    *("stable_diffusion", "stable_diffusion_xl", "stable_diffusion_3", "flux"),
    *("controlnet", "controlnet_sd3", "controlnet_flux"),
)
EXAMPLES = """examples:
  pip install parameterized requests_mock    # what Diffusers' tests import besides
  git clone --depth 1 https://github.com/huggingface/diffusers /tmp/diffusers
  python tools/diffusers_tests.py /tmp/diffusers                     # Stable Diffusion, SDXL, SD3, Flux, ControlNets
  python tools/diffusers_tests.py /tmp/diffusers flux --when called  # optimised just before its first call
  python tools/diffusers_tests.py /tmp/diffusers pag -k callback --out outcomes.json
"""
_TOOLS = Path(__file__).resolve().parent
# A test of a tiny model takes seconds; one that hangs must not stop the rest of its folder.
_SILENCE_S = 600.0


@dataclass
class Outcomes:
    """Of one run of pytest: `by_test` has passed, failed or skipped, `why` the first line of an error."""

    by_test: dict[str, str] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    broken: str | None = None

    @property
    def failed(self) -> set[str]:
        return {test for test, outcome in self.by_test.items() if outcome == "failed"}

    def counts(self) -> dict[str, int]:
        return dict(sorted(Counter(self.by_test.values()).items()))

    def take(self, line: dict[str, Any]) -> None:
        test, outcome = line["test"], line["outcome"]
        # What breaks after a test that passed makes it one that failed.
        if self.by_test.get(test) != "failed":
            self.by_test[test], self.why[test] = outcome, line["why"]


def difference(stock: Outcomes, ours: Outcomes) -> tuple[list[str], list[str]]:
    """Tests that fail optimised only, or did not come to an end there; and those that fail stock only."""
    lost = {test for test in stock.by_test if test not in ours.by_test}
    return sorted((ours.failed | lost) - stock.failed), sorted(stock.failed - ours.failed - lost)


def stand_ins(folder: Path) -> None:
    """A cache of the hub in this folder, with the small tokenizers and text models that most tests ask it for."""
    from transformers import CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer  # noqa: PLC0415 -- takes seconds

    letters = [chr(code) for code in range(33, 127)]
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    clip = CLIPTokenizer(vocab={word: number for number, word in enumerate(words)}, merges=[], model_max_length=77)
    clip.save_pretrained(_placed(folder, "hf-internal-testing/tiny-random-clip"))
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), ("▁", -2.0), *((letter, -3.0) for letter in letters)]
    t5 = _placed(folder, "hf-internal-testing/tiny-random-t5")
    T5Tokenizer(vocab=pieces, extra_ids=0).save_pretrained(t5)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 5, "num_heads": 4, "relative_attention_num_buckets": 8}
    T5EncoderModel(T5Config(vocab_size=1103, **sizes)).save_pretrained(t5)


def _placed(folder: Path, name: str) -> Path:
    """Where the hub's cache has the one version of a repository."""
    repository, version = folder / "hub" / f"models--{name.replace('/', '--')}", "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(version, encoding="utf-8")
    return repository / "snapshots" / version


def run_tests(checkout: Path, tests: str, when: str, *, only: str = "", hub: Path | None = None) -> Outcomes:
    """One run of pytest. `when`: never, created or called (diffusers_plugin.py). `hub`: a cache to use offline."""
    done = Outcomes()
    with tempfile.TemporaryDirectory() as folder, bar(f"{tests}, {_NAMES[when]}") as update:
        noted, said = Path(folder) / "noted", Path(folder) / "said"
        noted.touch()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "diffusers_plugin"]
        command += [f"tests/pipelines/{tests}", *(["-k", only] if only else [])]
        with said.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(
                command, cwd=checkout, env=_environment(noted, when, hub), stdout=output, stderr=output
            )
            try:
                done.broken = _followed(process, noted, done, update)
            finally:
                process.kill()
                process.wait()
        # Where a file cannot be imported, pytest runs no test at all.
        unread = next((test for test in done.by_test if "::" not in test), None)
        if unread is not None:
            done.broken = f"no test ran, because {unread} cannot be imported: {done.why[unread]}"
        if not done.by_test or done.broken is not None:
            done.broken = done.broken or "\n".join(said.read_text(encoding="utf-8").splitlines()[-5:])
    return done


_NAMES = {"never": "stock", "created": "optimised when created", "called": "optimised when called"}


def _environment(noted: Path, when: str, hub: Path | None) -> dict[str, str]:
    paths = [str(_TOOLS), str(_TOOLS.parent / "src"), os.environ.get("PYTHONPATH", "")]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    found |= {"ROCM_SD_TESTS_NOTED": str(noted), "ROCM_SD_TESTS_WHEN": when, "ROCM_SD_STEP_GRAPH": "1"}
    # Models this small would be left to stock inside of every block.
    found.setdefault("ROCM_SD_IMPLEMENTATION", ",".join(f"{op}=torch" for op in OPS))
    return found if hub is None else found | {"HF_HOME": str(hub), "HF_HUB_OFFLINE": "1"}


def _followed(process: subprocess.Popen[bytes], noted: Path, done: Outcomes, update: Any) -> str | None:
    """Read what is noted until the process is over; why it was not, where it was given up."""
    heard, line = time.monotonic(), ""
    with noted.open(encoding="utf-8") as lines:
        while True:
            # A line may be read while it is being written: the rest of it comes later.
            over, line = process.poll() is not None, line + lines.readline()
            if line.endswith("\n"):
                heard, what, line = time.monotonic(), json.loads(line), ""
                if "count" in what:
                    update(total=what["count"])
                else:
                    done.take(what)
                    update(completed=len(done.by_test))
            elif over:
                return None
            elif time.monotonic() - heard > _SILENCE_S:
                return f"no test came to an end for {_SILENCE_S:.0f} s after {list(done.by_test)[-1:]}"
            else:
                time.sleep(0.1)


def compare(checkout: Path, folders: list[str], *, when: str, only: str, hub: bool, out: Path | None) -> bool:
    """Whether nothing fails optimised only."""
    console, record, fine = Console(), {}, True
    if not (checkout / "tests" / "pipelines").is_dir():
        raise InvalidOption("CHECKOUT", checkout, [], hint="It takes a checkout of Diffusers, with tests/pipelines.")
    with tempfile.TemporaryDirectory() as folder:
        if not hub:
            stand_ins(Path(folder))
        for tests in folders or FOLDERS:
            stock, ours = (
                run_tests(checkout, tests, way, only=only, hub=None if hub else Path(folder)) for way in ("never", when)
            )
            lost, won = difference(stock, ours)
            fine = fine and not lost and ours.broken is None
            record[tests] = {"stock": stock.counts(), when: ours.counts(), "only_optimised": lost, "only_stock": won}
            say(console, f"{tests}: stock {_words(stock)}; {_NAMES[when]} {_words(ours)}; {len(lost)} only optimised")
            for test in lost:
                say(console, f"  fails optimised only: {test}: {ours.why.get(test, 'it did not come to its end')}")
            for test in won:
                say(console, f"  fails stock only: {test}: {stock.why[test]}")
            if out is not None:
                write_text(out, json.dumps(record, indent=1) + "\n")
    return fine


def _words(outcomes: Outcomes) -> str:
    counted = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.counts().items()) or "no test"
    return counted if outcomes.broken is None else f"{counted} ({outcomes.broken})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="a checkout of Diffusers")
    parser.add_argument("folders", nargs="*", help=f"of tests/pipelines (default: {' '.join(FOLDERS)})")
    parser.add_argument("--when", choices=("created", "called"), default="created", help="when it is optimised")
    parser.add_argument("-k", dest="only", default="", help="of these the tests that fit, as pytest's -k")
    parser.add_argument("--hub", action="store_true", help="load models from the hub, and use no stand-ins")
    parser.add_argument("--out", type=Path, help="write the counts and the names there as JSON")
    given = vars(parser.parse_args())
    try:
        fine = compare(given.pop("checkout"), given.pop("folders"), **given)
    except RocmSdError as error:
        Console(stderr=True).print(f"{error.message} {error.hint or ''}".strip(), markup=False)
        sys.exit(error.exit_code)
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
