"""Pictures that clients send: read within limits, or refused in a sentence."""

from __future__ import annotations

import io
import time
import zlib
from contextlib import suppress

import pytest
from fakes import png
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from rocm_sd.serve import Limits
from rocm_sd.serve.pictures import BadPicture, Kept, encode, from_base64, read

LIMITS = Limits(input_pixels=64 * 64)
GOOD = {
    kind: encode(Image.new("RGB", (32, 16), "red"), kind, {"prompt": "x"} if kind == "png" else None)
    for kind in ("png", "jpeg", "webp")
}


def bomb(side=30_000):
    """A PNG of some kilobytes that would be gigabytes."""
    header = io.BytesIO()
    Image.new("L", (8, 8)).save(header, "PNG")
    raw = bytearray(header.getvalue())
    raw[16:24] = side.to_bytes(4, "big") * 2
    raw[29:33] = zlib.crc32(bytes(raw[12:29])).to_bytes(4, "big")
    return bytes(raw)


@pytest.mark.parametrize("kind", GOOD)
def test_pictures_are_read(kind):
    assert read(GOOD[kind], LIMITS).size == (32, 16)


def test_a_photograph_that_was_turned_is_upright():
    image = Image.new("RGB", (32, 16), "red")
    exif = Image.Exif()
    exif[0x0112] = 6
    out = io.BytesIO()
    image.save(out, "JPEG", exif=exif)
    assert read(out.getvalue(), LIMITS).size == (16, 32)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"x" * 100,
        bomb(),
        GOOD["png"][:60],
        png(Image.new("RGB", (65, 64))),
        png(Image.new("RGB", (4, 4))),
        b"GIF89a",
    ],
    ids=["nothing", "noise", "bomb", "torn", "large", "tiny", "gif"],
)
def test_what_is_none_is_refused_before_its_pixels_are_there(raw):
    began = time.monotonic()
    with pytest.raises(BadPicture):
        read(raw, LIMITS)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("text", ["http://example.org/x.png", "file:///etc/passwd", "data:text/html,x", "é", "===="])
def test_what_is_no_base64_is_never_opened(text):
    with pytest.raises(BadPicture):
        from_base64(text, LIMITS)


@given(kind=st.sampled_from(sorted(GOOD)), at=st.floats(0, 1), noise=st.binary(max_size=6), cut=st.booleans())
def test_damaged_files_are_read_or_refused(kind, at, noise, cut):
    raw = GOOD[kind]
    place = int(at * len(raw))
    damaged = raw[:place] + noise + (b"" if cut else raw[place + len(noise) :])
    with suppress(BadPicture):
        assert read(damaged, LIMITS).width <= 64 * 64


def test_kept_pictures_are_few_and_not_for_ever():
    kept = Kept(Limits(kept=3, kept_seconds=0.05))
    names = [kept.put(bytes([number])) for number in range(5)]
    assert len(set(names)) == 5
    assert [kept.get(name) for name in names[:2]] == [None, None]
    assert kept.get(names[4]) == (b"\x04", "image/png")
    time.sleep(0.06)
    assert kept.get(names[4]) is None
    assert kept.get("nosuch") is None


def test_kept_pictures_are_bounded_by_their_bytes_and_none_outlives_its_time():
    kept = Kept(Limits(kept=100, kept_bytes=10, kept_seconds=0.05))
    names = [kept.put(bytes(4)) for _ in range(3)]
    assert [kept.get(name) is not None for name in names] == [False, True, True]
    large = kept.put(bytes(50))
    assert kept.get(large) is not None, "it was given out a moment ago"
    time.sleep(0.06)
    kept.put(b"1")
    assert len(kept._kept) == 1
    assert kept._bytes == 1
