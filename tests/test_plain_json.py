"""JSON of strangers: each way to be wrong is one sentence."""

from __future__ import annotations

import pytest

from rocm_sd.plain_json import MOST_BYTES, NotPlain, parsed, read_json


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"[" * 100_000, "nested more than 64 levels deep"),
        (b"[" * 65 + b"]" * 65, "nested more than 64 levels deep"),
        (b'{"a":' * 500 + b"1" + b"}" * 500, "nested more than 64 levels deep"),
        (b"[1" + b"0" * 400 + b"]", "it has a number of 401 digits"),
        (b"[1" + b"0" * 9000 + b"]", "thousands of digits"),
        (b"[1e999]", "a number beyond all floats"),
        (b"[NaN]", "it has NaN, which is no number"),
        (b"[-Infinity]", "it has -Infinity, which is no number"),
        (b'{"a": "\\ud800"}', "half of a surrogate pair"),
        (b'{"\\udfff": 1}', "half of a surrogate pair"),
        (b'["\xff"]', "byte 2 is no UTF-8"),
        (b"", "it is no JSON"),
        (b'{"a": 1', "it is no JSON"),
        (b"\xef\xbb\xbf{}", "it is no JSON"),
    ],
    ids=lambda given: given[:12] if isinstance(given, bytes) else given,
)
def test_what_is_not_plain_is_one_sentence(tmp_path, raw, why):
    with pytest.raises(NotPlain, match=why):
        parsed(raw)
    (tmp_path / "file.json").write_bytes(raw)
    with pytest.raises(LookupError, match=why):
        read_json(tmp_path / "file.json", LookupError)


def test_what_is_plain_comes_back():
    assert parsed(b'{"a": [1, 2.5, null, true, "\xc3\xa9", 18446744073709551615]}') == {
        "a": [1, 2.5, None, True, "é", 2**64 - 1]
    }
    assert parsed("[" * 64 + "]" * 64)
    assert parsed("[Infinity]", finite=False) == [float("inf")]


def test_no_more_is_read_than_a_record_may_have(tmp_path):
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(LookupError, match="larger than 128 MiB"):
        read_json(huge, LookupError)
    for path, why in ((tmp_path / "none", "there is no such file"), (tmp_path, "directory"), (tmp_path / "\0", "null")):
        with pytest.raises(LookupError, match=why):
            read_json(path, LookupError)
