"""A short run of the fuzzer, and properties that hold for any text. `python -m tests.fuzz 600`."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.artifacts.attest.envelope import read_envelope
from pipeline.artifacts.attest.strict import plain, read_base64, read_signed_json
from pipeline.core.errors import RecordInvalid
from pipeline.core.model import canonical_json
from tests.fuzz import Fuzzer
from tests.unit.verify.world import World

FEW = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
PLAIN_TEXT = st.text(st.characters(codec="utf-8")).map(plain)
KEYS = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | PLAIN_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)


def test_a_few_hundred_mutations_do_not_get_through(world: World, tmp_path: Path) -> None:
    fuzzer = Fuzzer(world, tmp_path, seed=120)
    for _ in range(25):
        fuzzer.once()
    assert fuzzer.tally.total == 25 * 10


@FEW
@given(VALUES)
def test_what_we_write_we_read_back(value: Any) -> None:
    assert read_signed_json(canonical_json(value), "it") == value


@FEW
@given(st.binary(max_size=200))
def test_any_bytes_are_read_as_everybody_reads_them_or_refused(data: bytes) -> None:
    try:
        value = read_signed_json(data, "it")
    except RecordInvalid:
        return
    assert value == json.loads(data)


@FEW
@given(st.text())
def test_any_text_can_be_made_plain(text: str) -> None:
    assert read_signed_json(canonical_json(plain(text)), "it") == plain(text)
    assert plain(plain(text)) == plain(text)


@FEW
@given(st.text(alphabet="QUJDREVG+/=-_ \n", max_size=20))
def test_base64_has_one_spelling(text: str) -> None:
    try:
        data = read_base64(text, "it")
    except RecordInvalid:
        return
    assert base64.b64encode(data).decode() == text


@FEW
@given(st.dictionaries(st.sampled_from(["payload", "payloadType", "signatures"]), VALUES))
def test_no_object_makes_the_envelope_reader_stumble(body: Any) -> None:
    try:
        read_envelope(canonical_json(body), "it")
    except RecordInvalid:
        return
    raise AssertionError("random values are no envelope")
