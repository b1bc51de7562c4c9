"""What a page names: commands to type, paths in the repository and modules; and why one of them does not exist."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
from pathlib import Path

import typer

from rocm_sd.cli.main import app

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^ *```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^ *```$", re.MULTILINE | re.DOTALL)
SHELLS = {"sh", "bash", "console"}
# A page may give a path from the root, or from where the code or the tests begin.
STARTS = (ROOT, ROOT / "src" / "rocm_sd", ROOT / "tests", *(each for each in (ROOT / "src" / "rocm_sd").iterdir()))
# Folders of the repository: a path that begins with one of them, in a command too, is a path in the repository.
FOLDERS = ("src", "tests", "docs", "tools", "benchmarks", "examples", "training", ".ci", ".github")
# Commands write them, in the repository or where they are called.
WRITTEN = re.compile(r"(\.venv|out|site|runs|results|build|dist|contributions/gfx\w+)(/|$)|host-packages")
PLACEHOLDER = re.compile(r"<\w+>|\b(GFX|OP)\b")
MODULE = re.compile(r"rocm_sd(\.\w+)+")


def commands(text: str) -> list[list[str]]:
    """Each command of a page in words, without variables before it and comments behind it."""
    lines = []
    for fence in FENCE.finditer(text):
        if fence["language"] in SHELLS:
            lines += fence["code"].replace("\\\n", " ").splitlines()
    found = []
    for line in lines + inline_code(text):
        for part in re.split(r"&&|\||(?<!\S)&(?!\S)|(?<!\S)>(?!\S)", line):
            try:
                words = shlex.split(part, comments=True)
            except ValueError:  # prose in code's letters: an open quote
                continue
            while words and re.fullmatch(r"\w+=.*", words[0]):
                words.pop(0)
            if words and Path(words[0]).name in _CHECKS:
                found.append(words)
    return found


def paths(text: str) -> list[str]:
    """Of the repository, in code's letters; those of a user's machine are passed over."""
    candidates = [code for code in inline_code(text) if "/" in code and re.fullmatch(r"[\w./<>*-]+", code)]
    return [code for code in candidates if not code.startswith("/") and not WRITTEN.match(code)]


def modules(text: str) -> list[str]:
    return [code for code in inline_code(text) if MODULE.fullmatch(code)]


def inline_code(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", text))


def why_no_command(words: list[str]) -> str | None:
    """The reason that a command cannot be typed: a verb, an option, a target or a file that does not exist."""
    for word in words:
        if word.split("/")[0] in FOLDERS and "/" in word and not exists(word):
            return f"{word} does not exist"
    return _CHECKS[Path(words[0]).name](words[1:])


def exists(path: str) -> bool:
    pattern = PLACEHOLDER.sub("*", path).rstrip("/")
    return any(next(start.glob(pattern), None) is not None for start in STARTS if start.is_dir())


def why_no_module(name: str) -> str | None:
    """A module, what it has, or a group of entry points that the code asks for."""
    if any(f'"{name}"' in each.read_text(encoding="utf-8") for each in (ROOT / "src").rglob("*.py")):
        return None
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        try:
            if importlib.util.find_spec(module) is None:
                continue
        except ModuleNotFoundError:
            continue
        found = importlib.import_module(module)
        missing = [part for part in parts[length:] if not hasattr(found, part)]
        return f"{module} has no {missing[0]}" if missing else None
    return f"there is no module {name}"


def _why_no_rocm_sd(words: list[str]) -> str | None:
    command = typer.main.get_command(app)
    verbs = command.commands  # type: ignore[attr-defined] -- of a group
    if words and not words[0].startswith("-") and not words[0].isupper() and words[0] != "...":
        if words[0] not in verbs:
            return f"rocm-sd has no verb {words[0]}"
        command = verbs[words.pop(0)]
        inner = getattr(command, "commands", None)
        if inner is not None and words and not words[0].startswith("-"):
            if words[0] not in inner:
                return f"rocm-sd {command.name} has no verb {words[0]}"
            command = inner[words.pop(0)]
    # What follows two dashes is another program's.
    own = words[: words.index("--")] if "--" in words else words
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    known |= {"--help"}
    for word in own:
        if word.startswith("--") and word.partition("=")[0] not in known:
            return f"rocm-sd {command.name} has no option {word}"
    return None


def _why_no_make(words: list[str]) -> str | None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    wanted = [word for word in words if "=" not in word]
    return next((f"make has no target {word}" for word in wanted if word not in targets), None)


def _why_no_python(words: list[str]) -> str | None:
    if words[:1] == ["-m"]:
        if importlib.util.find_spec(words[1]) is None:
            return f"there is no module {words[1]}"
        # Modules of a package share options.
        sources = list((ROOT / words[1].replace(".", "/")).parent.glob("*.py"))
    elif words and words[0].endswith(".py") and "/" in words[0]:
        sources = [ROOT / words[0]]  # that it exists was asked before
    else:
        return None
    text = "".join(each.read_text(encoding="utf-8") for each in sources)
    options = [word.partition("=")[0] for word in words if word.startswith("--")] if text else []
    return next((f"{' '.join(words[:2])} has no option {each}" for each in options if f'"{each}"' not in text), None)


_CHECKS = {
    "rocm-sd": _why_no_rocm_sd,
    "make": _why_no_make,
    "python": _why_no_python,
    "python3": _why_no_python,
    "cmake": lambda _words: None,
    ".ci/run": lambda _words: None,
}
