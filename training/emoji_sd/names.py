"""Readable English names for emoji, from the PyPI package `emoji`."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

import emoji

__all__ = ["fully_qualified", "unique_names"]

_TONE = re.compile(r"\b(light|medium-light|medium|medium-dark|dark) skin tone\b")
_LOOKS_LIKE_A_CODE = re.compile(r"\d|^.{0,1}$")


def fully_qualified() -> list[str]:
    """Every fully qualified emoji of the package, by release and code points: an order that new releases append to."""
    wanted = emoji.STATUS["fully_qualified"]
    texts = [text for text, data in emoji.EMOJI_DATA.items() if data["status"] == wanted]
    return sorted(texts, key=lambda text: (emoji.EMOJI_DATA[text]["E"], text))


def _words(code: str) -> str:
    """From ":red_apple:" to "red apple"; accents and typographic marks become what a keyboard has."""
    text = code.strip(":").replace("_", " ").replace("&", "and").replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"\s+", " ", re.sub(r'[()"!.,]', "", text)).strip()


def _tone_last(name: str) -> str:
    """From "man dark skin tone beard" to "man beard with dark skin tone"; two tones are joined by "and"."""
    tones = _TONE.findall(name)
    if not tones:
        return name
    base = re.sub(r"\s+", " ", _TONE.sub("", name)).strip()
    return f"{base} with {' and '.join(tones)} skin tone"


def _is_flag(text: str) -> bool:
    # Two regional indicators, or a black flag with tag letters (England, Scotland, Wales).
    return 0x1F1E6 <= ord(text[0]) <= 0x1F1FF or (text[0] == "\U0001f3f4" and "\U000e007f" in text)


def _main_name(text: str) -> str:
    name = _tone_last(_words(emoji.EMOJI_DATA[text]["en"]))
    return f"flag of {name}" if _is_flag(text) else name


def _other_names(text: str, main: str) -> list[str]:
    found = [_tone_last(_words(code)).lower() for code in emoji.EMOJI_DATA[text].get("alias", [])]
    found = [name for name in found if not _LOOKS_LIKE_A_CODE.search(name) and not name.startswith("flag for ")]
    if _is_flag(text):
        country = main.removeprefix("flag of ")
        # Two-letter country codes and bare country names are dropped: "turkey" is the bird, "georgia" no picture.
        found = [f"{country} flag", f"flag for {country}"]
    return [name for name in dict.fromkeys(found) if name != main.lower()]


def unique_names(texts: list[str]) -> list[tuple[str, list[str]]]:
    """(name, aliases) for each emoji; no name or alias stands for two emoji (such aliases are dropped)."""
    mains = [_main_name(text) for text in texts]
    twice = [name for name, times in Counter(name.lower() for name in mains).items() if times > 1]
    if twice:
        raise ValueError(f"these names stand for more than one emoji: {', '.join(twice)}")
    others = [_other_names(text, main) for text, main in zip(texts, mains, strict=True)]
    uses = Counter(name for names in others for name in set(names))
    taken = {name.lower() for name in mains}
    return [
        (main, [name for name in names if uses[name] == 1 and name not in taken])
        for main, names in zip(mains, others, strict=True)
    ]
