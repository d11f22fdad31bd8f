"""The trust file is closed, and a key is what it says."""

from __future__ import annotations

import textwrap
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

from pipeline.artifacts.attest.keys import key_id, make_private_key, public_pem
from pipeline.artifacts.attest.names import HOST_FACTS, PROVENANCE
from pipeline.artifacts.attest.statement import CLOCKS_APART
from pipeline.artifacts.attest.trust import (
    OwnKeys,
    Trust,
    add_entry,
    both,
    judges_strangers,
    key_name,
    read_trust,
    remove_entry,
    trust_entry,
    with_named_keys,
    with_own_keys,
)
from pipeline.core.errors import TrustInvalid

KEY = make_private_key().public_key()
ENTRY = trust_entry("builder", public_pem(KEY), key_id(KEY), datetime(2026, 1, 1, tzinfo=UTC))
FILE = f"format: 1\nkeys:\n{ENTRY}\n"


def read(tmp_path: Path, text: str) -> Trust:
    path = tmp_path / "trust.yaml"
    path.write_text(text)
    return read_trust(path)


def test_the_entry_that_keys_show_prints_can_be_pasted(tmp_path: Path) -> None:
    (key,) = read(tmp_path, FILE).keys
    assert key.name == "builder"
    assert key.until == datetime(2027, 1, 1, tzinfo=UTC)
    now = datetime(2026, 6, 1, tzinfo=UTC)
    assert key.objection(PROVENANCE, None, now) == ""
    assert read(tmp_path, FILE).find(key.id) == [key]
    assert read(tmp_path, FILE).find("sha256:" + "0" * 64) == []


def test_an_empty_trust_file_trusts_nobody(tmp_path: Path) -> None:
    assert read(tmp_path, "keys: []").keys == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FILE.replace("format: 1", "format: 2"), "format"),
        (FILE + "  level: 3\n", "level: Extra inputs"),
        (FILE.replace("id: sha256:", "id: sha256:0")[:-1], "id"),
        (FILE.replace(key_id(KEY), "sha256:" + "0" * 64), "its public key is sha256:"),
        (FILE.replace("BEGIN PUBLIC", "BEGIN OTHER"), "not a public key"),
        (FILE.replace("for: [", "for: [everything, "), "no such kind of evidence"),
        (FILE.replace("until: 2027", "until: 2025"), "is not after"),
        (FILE.replace("until: 2027-01-01T00:00:00Z", "until: 2027-01-01"), "until"),
        (FILE.replace("until: 2027-01-01T00:00:00Z", "until: never"), "until"),
        (FILE + ENTRY + "\n", "two keys share one id"),
        (FILE + "  revoked: {since: 2026-01-02T00:00:00Z}\n", "revoked"),
        (FILE.replace("  until: 2027-01-01T00:00:00Z", ""), "until: Field required"),
        (FILE.replace("name: builder", "name: Bu\u0456lder"), "name"),
        ("keys: [*a]", "not valid YAML"),
        ("[" * 100, "levels deep"),
    ],
)
def test_a_bad_trust_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TrustInvalid, match=message):
        read(tmp_path, text)


def test_two_keys_of_one_name_are_refused(tmp_path: Path) -> None:
    other = make_private_key().public_key()
    entry = trust_entry("builder", public_pem(other), key_id(other), datetime.now(UTC))
    with pytest.raises(TrustInvalid, match="share one name"):
        read(tmp_path, f"{FILE}{entry}\n")


def test_a_missing_trust_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(TrustInvalid, match="no such trust file"):
        read_trust(tmp_path / "none.yaml")


def test_the_window_bounds_are_inside(tmp_path: Path) -> None:
    (key,) = read(tmp_path, FILE).keys
    now = datetime(2028, 1, 1, tzinfo=UTC)
    assert key.objection(HOST_FACTS, key.until, now) == ""
    assert key.objection(HOST_FACTS, key.not_before, now) == ""
    assert "expired" in key.objection(HOST_FACTS, None, now)


REVOKED = FILE + "  revoked: {since: 2026-03-01T00:00:00Z, reason: laptop lost"


@pytest.mark.parametrize(
    ("compromised", "month", "is_revoked"),
    [("false", 2, False), ("false", 3, True), ("false", 4, True), ("true", 2, True)],
)
def test_a_revoked_key_is_not_believed_from_then_on_or_never(
    tmp_path: Path, compromised: str, month: int, is_revoked: bool
) -> None:
    (key,) = read(tmp_path, f"{REVOKED}, compromised: {compromised}}}\n").keys
    made_at, now = datetime(2026, month, 1, tzinfo=UTC), datetime(2026, 6, 1, tzinfo=UTC)
    want = "the key builder is revoked: laptop lost" if is_revoked else ""
    assert key.objection(PROVENANCE, made_at, now) == want


def test_clocks_may_be_a_little_apart_and_no_more(tmp_path: Path) -> None:
    (key,) = read(tmp_path, FILE).keys
    now = datetime(2026, 6, 1, tzinfo=UTC)
    assert key.objection(HOST_FACTS, now + CLOCKS_APART, now) == ""
    for ahead in (CLOCKS_APART + timedelta(seconds=1), timedelta(days=1)):
        assert "in the future" in key.objection(HOST_FACTS, now + ahead, now)


SECOND = make_private_key().public_key()
MORE = trust_entry("second", public_pem(SECOND), key_id(SECOND), datetime(2026, 1, 1, tzinfo=UTC))


@pytest.mark.parametrize(
    "text",
    [
        None,
        FILE,
        "format: 1\nkeys: []  # nobody yet\n",
        f"keys:\n# reviewed in May\n\n{textwrap.indent(ENTRY, '  ')}\n",
        f"{FILE}bases:\n  sha256:{'0' * 64}: used by everybody\n",
    ],
)
def test_an_entry_is_added_and_all_else_stays(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "new" / "trust.yaml"
    if text is not None:
        path.parent.mkdir()
        path.write_text(text)
    before = read_trust(path) if text else Trust()
    add_entry(path, MORE, key_id(SECOND))
    after = read_trust(path)
    assert {k.id for k in after.keys} == {k.id for k in before.keys} | {key_id(SECOND)}
    assert after.bases == before.bases
    kept = path.read_text().splitlines()
    assert all(line in kept for line in (text or "").splitlines() if not line.startswith("keys:"))


@pytest.mark.parametrize(
    "text",
    ["format: 1\n", "format: 2\nkeys:\n", "keys: {}\n", FILE.replace("builder", "second"), "["],
)
def test_a_trust_file_that_an_entry_does_not_fit_into_is_left_as_it_is(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "trust.yaml"
    path.write_text(text)
    with pytest.raises(TrustInvalid):
        add_entry(path, MORE, key_id(SECOND))
    assert path.read_text() == text
    assert [p.name for p in tmp_path.iterdir()] == ["trust.yaml"]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (FILE, "format: 1\nkeys: []\n"),
        (FILE.rstrip(), "format: 1\nkeys: []\n"),
        (f"keys:  # ours\n{ENTRY}\n", "keys: []  # ours\n"),
        (f"format: 1\nkeys:\n{ENTRY}\n\n# hers\n{MORE}\n", f"format: 1\nkeys:\n\n# hers\n{MORE}\n"),
        (f"format: 1\nkeys:\n# hers\n{MORE}\n# his\n{ENTRY}\n", None),
        (f"keys:\n{ENTRY}\n{MORE}\nformat: 1\n", f"keys:\n{MORE}\nformat: 1\n"),
        (
            f"keys:\n{textwrap.indent(ENTRY, '  ')}\n  # hers\n{textwrap.indent(MORE, '  ')}\n",
            f"keys:\n  # hers\n{textwrap.indent(MORE, '  ')}\n",
        ),
    ],
)
def test_an_entry_is_taken_out_and_all_other_lines_stay(
    tmp_path: Path, text: str, left: str | None
) -> None:
    path = tmp_path / "trust.yaml"
    path.write_text(text)
    before = read_trust(path)
    remove_entry(path, key_id(KEY))
    assert read_trust(path).keys == [key for key in before.keys if key.id != key_id(KEY)]
    assert path.read_text() == (left or text.replace(f"{ENTRY}\n", ""))
    # and it can come back
    add_entry(path, ENTRY, key_id(KEY))
    assert {k.id for k in read_trust(path).keys} == {k.id for k in before.keys}


@pytest.mark.parametrize("before", ["", "format: 1\n"])
def test_an_entry_that_cannot_be_cut_out_by_its_lines_stays(tmp_path: Path, before: str) -> None:
    path = tmp_path / "trust.yaml"
    entry = yaml.safe_dump(yaml.safe_load(ENTRY), default_flow_style=True, width=10_000)
    path.write_text(f"{before}keys: {entry}")
    text = path.read_text()
    with pytest.raises(TrustInvalid) as caught:
        remove_entry(path, key_id(KEY))
    assert "by hand" in caught.value.hint
    assert path.read_text() == text


def test_a_trust_file_without_keys_chooses_nobody() -> None:
    base = {f"sha256:{'0' * 64}": "as published"}
    assert with_own_keys(Trust(), []) is None
    assert with_own_keys(Trust(bases=base), []) == OwnKeys(bases=base)
    assert not judges_strangers(Trust())
    assert judges_strangers(Trust.model_validate(yaml.safe_load(FILE)))


def test_of_two_trust_files_the_first_has_the_last_word(tmp_path: Path) -> None:
    gone = "  revoked: {since: 2026-01-01T00:00:00Z, reason: was stolen, compromised: true}\n"
    strict, loose = read(tmp_path, FILE + gone), read(tmp_path, FILE + MORE + "\n")
    joined = both(strict, loose)
    assert joined
    assert [(k.name, bool(k.revoked)) for k in joined.keys] == [
        ("builder", True),
        ("second", False),
    ]
    assert both(None, loose) == loose
    assert both(strict, None) == strict


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("builder.pub", "builder"),
        ("My Key.pub", "my-key"),
        ("Ключ.pub", "key"),
        ("a_b.x.pub", "a-b.x"),
    ],
)
def test_a_key_is_named_after_its_file(file: str, name: str) -> None:
    assert key_name(Path(file)) == name


STOLEN = "  revoked: {since: 2026-03-01T00:00:00Z, reason: was stolen, compromised: true}\n"


def test_a_key_that_either_file_revokes_is_revoked(tmp_path: Path) -> None:
    believing, revoking = read(tmp_path, FILE), read(tmp_path, FILE + STOLEN)
    now = datetime(2026, 6, 1, tzinfo=UTC)
    for pair in ((believing, revoking), (revoking, believing)):
        joined = both(*pair)
        assert joined
        (key,) = joined.keys
        assert "is revoked: was stolen" in key.objection(PROVENANCE, now, now)
    replaced = STOLEN.replace("true", "false").replace("2026-03", "2026-02")
    joined = both(read(tmp_path, FILE + replaced), revoking)
    assert joined
    assert joined.keys[0].revoked
    assert joined.keys[0].revoked.compromised


@pytest.mark.parametrize("text", ["'no'", "'true'", "0", "1.0"])
def test_whether_a_key_was_stolen_is_no_text_and_no_number(tmp_path: Path, text: str) -> None:
    with pytest.raises(TrustInvalid, match=r"revoked\.compromised"):
        read(tmp_path, FILE + STOLEN.replace("true", text))


def test_of_keys_with_one_name_none_is_dropped(tmp_path: Path) -> None:
    publics = [make_private_key().public_key() for _ in range(4)]
    paths = []
    for number, public in enumerate(publics):
        paths.append(tmp_path / str(number) / "builder.pub")
        paths[-1].parent.mkdir()
        paths[-1].write_text(public_pem(public))
    joined = with_named_keys(read(tmp_path, FILE), paths)
    assert joined
    assert {key.id for key in joined.keys} == {key_id(KEY), *map(key_id, publics)}
    names = ["builder", "builder-own", "builder-own-2", "builder-own-3", "builder-own-4"]
    assert [key.name for key in joined.keys] == names
