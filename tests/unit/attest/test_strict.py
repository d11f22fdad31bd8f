"""JSON and base64 have one meaning or none."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from pipeline.artifacts.attest import strict
from pipeline.artifacts.attest.strict import (
    MAX_DEPTH,
    as_model,
    plain,
    read_base64,
    read_signed_json,
)
from pipeline.core.errors import RecordInvalid
from pipeline.core.model import Frozen


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": [1, 2.5, true, null, "x"]}', {"a": [1, 2.5, True, None, "x"]}),
        ('"Grüße, 世界"', "Grüße, 世界"),
        ('"two\\nlines\\tand a tab"', "two\nlines\tand a tab"),
        ("9223372036854775807", 2**63 - 1),
        ('{"a]": "[[[{{{"}', {"a]": "[[[{{{"}),
        ('"a quote \\" and a backslash \\\\"', 'a quote " and a backslash \\'),
        ("[" * MAX_DEPTH + "]" * MAX_DEPTH, None),
    ],
)
def test_plain_json_is_read(text: str, value: Any) -> None:
    read = read_signed_json(text.encode(), "it")
    assert value is None or read == value


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"{'a': 1}", "is not JSON"),
        (b'{"a": 1,}', "is not JSON"),
        (b'"\x00"', "is not JSON"),
        (b'"a\\u0000b"', "U+0000"),
        (b'{"a": 1, "a": 1}', "appears twice"),
        (b'{"a": {"b": 1, "b": 2}}', "appears twice"),
        (b'{"\\u0061": 1, "a": 2}', "appears twice"),
        (b"[NaN]", "NaN is not a number"),
        (b"-Infinity", "-Infinity is not a number"),
        (b"1e400", "too large"),
        (b"-1e400", "too large"),
        (b"9223372036854775808", "too large"),
        (b"1" * 5000, "too large"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "levels deep"),
        (b'{"a":' * 100_000, "levels deep"),
        (b"\xff\xfe", "is not UTF-8"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        ('{"ключ": 1}'.encode(), "not plain ASCII"),
        (b'{"a\\n": 1}', "not plain ASCII"),
        (b'"\\u200b"', "U+200B"),
        (b'"\\u202e"', "U+202E"),
        (b'"\\ud800"', "U+D800"),
        (b'"\\ue000"', "U+E000"),
        (b'"\\u2028"', "U+2028"),
        (b'"\\u001b[31m"', "U+001B"),
        (b'"e\\u0301"', "normal form"),
    ],
)
def test_anything_with_a_second_meaning_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(RecordInvalid) as refused:
        read_signed_json(data, "it")
    assert str(refused.value).startswith("it: ")
    assert message in str(refused.value)


def test_a_text_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict, "MAX_STRING", 10)
    with pytest.raises(RecordInvalid, match="longer than 10 characters"):
        read_signed_json(b'["01234567890"]', "it")


def test_size_is_bounded() -> None:
    with pytest.raises(RecordInvalid, match="larger than 10 bytes"):
        read_signed_json(b'"0123456789"', "it", 10)


@pytest.mark.parametrize("unit", [b'\\"', b'"\\', b'["', b'{"a":"', b"\\"])
def test_hostile_text_takes_linear_time(unit: bytes) -> None:
    start = time.monotonic()
    with pytest.raises(RecordInvalid):
        read_signed_json(b'"' + unit * 500_000, "it")
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    ("value", "message"), [({"a": "x"}, "it: a: "), ([], "it: the list: "), ({}, "it: a: ")]
)
def test_what_fits_no_model_is_reported_by_field_or_as_a_whole(value: Any, message: str) -> None:
    class Number(Frozen):
        a: int

    with pytest.raises(RecordInvalid) as caught:
        as_model(Number, value, "it", "the list")
    assert str(caught.value).startswith(message)


def test_texts_of_others_are_made_plain() -> None:
    assert plain("e\u0301\r\n\u202eabc\x1b\ttab") == "é\n abc \ttab"
    read_signed_json(json.dumps(plain("".join(map(chr, range(0x3000))))).encode(), "it")


@pytest.mark.parametrize(
    ("text", "data"),
    [("", b""), ("QQ==", b"A"), ("QUI=", b"AB"), ("QUJD", b"ABC"), ("+/+/", b"\xfb\xff\xbf")],
)
def test_base64_is_read(text: str, data: bytes) -> None:
    assert read_base64(text, "it") == data


@pytest.mark.parametrize(
    "text", ["QQ", "QQ=", "QR==", "Q Q=", "QQ==\n", "-_-_", "Q", "====", "QQ==QQ==", "ＱＱ=="]
)
def test_other_spellings_of_base64_are_refused(text: str) -> None:
    with pytest.raises(RecordInvalid, match="base64"):
        read_base64(text, "it")
