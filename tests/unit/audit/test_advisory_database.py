"""Databases of advisories as they are published, and hostile ones."""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import DatabaseInvalid
from pipeline.evidence.audit import database as subject
from pipeline.evidence.audit.database import AdvisoryDatabase, read_database
from tests.unit.audit.advisory_files import NOW, affected, record, write_records

ADVISORIES = Path(__file__).resolve().parents[2] / "fixtures" / "advisories"
THING = ("PyPI", "thing")


def read(folder: Path, *wanted: tuple[str, str]) -> AdvisoryDatabase:
    return read_database(folder, wanted or (THING,), NOW)


@pytest.mark.parametrize("zipped", [False, True])
def test_records_are_read_from_files_and_archives(tmp_path: Path, zipped: bool) -> None:
    other = record("TEST-2", affected=[affected(name="other")])
    found = read(write_records(tmp_path / "db", record(), other, zipped=zipped))
    assert (found.records, found.files) == (2, 1 if zipped else 2)
    assert [a.id for a, _ in found.about[THING]] == ["TEST-1"]
    assert found.newest == datetime(2026, 5, 30, tzinfo=UTC)


def test_the_real_records_are_read_with_the_trackers_dump() -> None:
    now = datetime.now(UTC) + timedelta(days=1)
    found = read_database(ADVISORIES, [("PyPI", "aiohttp"), ("Debian", "expat")], now)
    assert (found.records, found.files) == (761 + 113, 2)
    names = {a.id for a, _ in found.about["PyPI", "aiohttp"]}
    assert {"PYSEC-2024-24", "GHSA-v6wp-4m6f-gcjg"} <= names
    # each CVE of expat by both
    assert len(found.about["Debian", "expat"]) == 2 * 39


def test_names_of_python_packages_are_compared_in_their_normal_form(tmp_path: Path) -> None:
    folder = write_records(tmp_path, record(affected=[affected(name="Big_Thing.x")]))
    assert read(folder, ("PyPI", "big-thing-x")).about


def test_a_withdrawn_record_counts_for_nothing(tmp_path: Path) -> None:
    folder = write_records(tmp_path, record(withdrawn="2026-05-20T00:00:00Z"))
    found = read(folder)
    assert (found.records, found.about) == (1, {})


def test_of_two_downloads_the_later_record_counts(tmp_path: Path) -> None:
    write_records(tmp_path / "a", record(modified="2026-05-02T00:00:00Z"), zipped=True)
    later = record(modified="2026-05-03T00:00:00Z", affected=[affected(fixed="3.0")])
    write_records(tmp_path / "b", later, zipped=True)
    write_records(tmp_path / "c", later)
    (only,) = read(tmp_path).about[THING]
    assert only[1].fixed == ["3.0"]


def test_the_tracker_names_releases_and_what_was_never_in_them(tmp_path: Path) -> None:
    states = {
        "bookworm": {"status": "resolved", "fixed_version": "1.2-1", "urgency": "high"},
        "trixie": {"status": "open", "urgency": "unimportant"},
        "bullseye": {"status": "resolved", "fixed_version": "0"},
        "sid": {"status": "undetermined"},
    }
    (tmp_path / "json.json").write_text(
        json.dumps({"lib": {"CVE-2026-0001": {"releases": states}}})
    )
    found = read(tmp_path, ("Debian", "lib")).about["Debian", "lib"]
    assert [(x.release, x.fixed) for _, x in found] == [("12", ["1.2-1"]), ("13", [])]
    assert found[0][0].severity == "high"
    assert found[0][0].published is None


def test_files_of_other_kinds_and_hidden_ones_are_left_alone(tmp_path: Path) -> None:
    write_records(tmp_path, record())
    (tmp_path / "README.md").write_text("{")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x.json").write_text("{")
    assert read(tmp_path).files == 1


def test_a_database_is_known_by_the_bytes_of_its_files(tmp_path: Path) -> None:
    one = read(write_records(tmp_path / "a", record())).digest
    assert read(write_records(tmp_path / "b", record())).digest == one
    assert read(write_records(tmp_path / "c", record(summary="another"))).digest != one


Write = Callable[[Path], Any]


def file(text: str | bytes, name: str = "TEST-1.json") -> Write:
    data = text.encode() if isinstance(text, str) else text
    return lambda folder: (folder / name).write_bytes(data)


def osv(**changes: Any) -> Write:
    return lambda folder: write_records(folder, record(**changes))


def events(*pairs: dict[str, Any], kind: str = "ECOSYSTEM") -> Write:
    about = affected()
    about["ranges"] = [{"type": kind, "events": list(pairs)}]
    return osv(affected=[about])


def archive(*members: tuple[str, str | bytes], **settings: Any) -> Write:
    def write(folder: Path) -> None:
        with zipfile.ZipFile(folder / "all.zip", "w", zipfile.ZIP_DEFLATED) as made:
            for name, text in members:
                made.writestr(name, text)
        if change := settings.get("change"):
            path = folder / "all.zip"
            path.write_bytes(change(path.read_bytes()))

    return write


def tracker(body: Any) -> Write:
    return file(json.dumps(body), "tracker.json")


def issue(**state: Any) -> Write:
    return tracker({"lib": {"CVE-2026-0001": {"releases": {"bookworm": state}}}})


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    """Another byte in the first member: its checksum no longer holds."""
    at = data.index(b"TEST-1.json") + 20
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


def encrypted(data: bytes) -> bytes:
    """The flag for a password, in the local header and in the directory."""
    central = data.index(b"PK\x01\x02")
    made = bytearray(data)
    made[6] |= 1
    made[central + 8] |= 1
    return bytes(made)


def packed_otherwise(data: bytes) -> bytes:
    """A method of compression that nobody has."""
    central, made = data.index(b"PK\x01\x02"), bytearray(data)
    made[8:10] = made[central + 10 : central + 12] = struct.pack("<H", 77)
    return bytes(made)


GOOD = json.dumps(record())
DEEP = (
    '{"id": "TEST-1", "modified": "2026-05-30T00:00:00Z", "details": ' + "[" * 90 + "]" * 90 + "}"
)
HOSTILE: dict[str, tuple[Write, str]] = {
    # files
    "empty folder": (lambda folder: None, "holds no advisory"),
    "empty file": (file(""), "is not JSON"),
    "cut short": (file(GOOD[:-9]), "is not JSON"),
    "not UTF-8": (file(b'{"id": "TEST-1\xff"}'), "is not UTF-8"),
    "byte order mark": (file(b"\xef\xbb\xbf" + GOOD.encode()), "byte order mark"),
    "a key twice": (file(GOOD[:-1] + ', "id": "TEST-2"}'), "appears twice"),
    "too deep": (file(DEEP), "levels deep"),
    "NaN": (file(GOOD[:-1] + ', "x": NaN}'), "is not a number"),
    "a huge number": (file(GOOD[:-1] + f', "x": {"9" * 40}}}'), "too large a number"),
    "half a character": (file(GOOD[:-1] + ', "x": "\\ud800"}'), "half a character"),
    "a list": (file("[]"), "is no JSON object"),
    "a link": (lambda f: (f / "TEST-1.json").symlink_to("/etc/hostname"), "is a link"),
    "a pipe": (lambda f: os.mkfifo(f / "TEST-1.json"), "no plain file"),
    "another name": (file(GOOD, "TEST-9.json"), "TEST-1, and is not named after it"),
    # records
    "no id": (file("{}"), "is no text"),
    "an id that is a path": (file(GOOD.replace("TEST-1", "../TEST-1")), "not the id"),
    "an id with a line end": (file(GOOD.replace("TEST-1", "TEST\\n1")), "cannot be seen"),
    "another schema": (osv(schema_version="2.0.0"), "1.x is read here"),
    "no time": (osv(modified=None), "is not a time"),
    "an impossible time": (osv(modified="2026-02-30T00:00:00Z"), "is not a time"),
    "the future": (osv(modified="2027-01-01T00:00:00Z"), "in the future"),
    "affected is text": (osv(affected="thing"), "is no list"),
    "a package without a name": (osv(affected=[{"package": {"ecosystem": "PyPI"}}]), "name: is no"),
    "a name of 10,000 letters": (osv(affected=[affected(name="x" * 10_000)]), "at most 300"),
    "hidden letters": (osv(affected=[affected(name="th\u202eing")]), "cannot be seen"),
    "an unknown range": (events({"introduced": "0"}, kind="MAGIC"), "unknown type"),
    "an unknown event": (events({"introduced": "0"}, {"repaired": "1"}), "is not one of"),
    "two events in one": (events({"introduced": "0", "fixed": "1"}), "is not one of"),
    "nothing introduced": (events({"fixed": "1.0"}), "nothing is introduced"),
    "events are missing": (
        osv(affected=[{"package": affected()["package"], "ranges": [{"type": "SEMVER"}]}]),
        "events: is no list",
    ),
    "a version that is a number": (events({"introduced": 0}), "is no text"),
    "versions that are numbers": (osv(affected=[affected(versions=[1, 2])]), "is no text"),
    "a wrong vector": (
        osv(severity=[{"type": "CVSS_V3", "score": "CVSS:3.1/AV:N"}]),
        "is not a CVSS vector",
    ),
    "a vector of another version": (
        osv(severity=[{"type": "CVSS_V3", "score": "CVSS:9/AV:N/AC:L/PR:N/UI:N/S:U/C:H/I:H/A:H"}]),
        "is not a CVSS 3 vector",
    ),
    "withdrawn at no time": (osv(withdrawn="yes"), "withdrawn: is not a time"),
    "aliases that are a table": (osv(aliases={"a": 1}), "is no list"),
    "one id, two contents": (
        lambda f: (
            write_records(f / "a", record()),
            write_records(f / "b", record(summary="another")),
        ),
        "is there twice",
    ),
    # archives
    "no archive": (file("PK", "all.zip"), "cannot be read"),
    "an archive cut short": (archive(("TEST-1.json", GOOD), change=cut), "cannot be read"),
    "a flipped byte": (archive(("TEST-1.json", GOOD), change=flipped), "all.zip"),
    "encrypted": (archive(("TEST-1.json", GOOD), change=encrypted), "is encrypted"),
    "an unknown compression": (
        archive(("TEST-1.json", GOOD), change=packed_otherwise),
        "is a damaged archive",
    ),
    "a bomb": (archive(("TEST-1.json", b" " * (8 << 20))), "unpacks to"),
    "a member that is no record": (archive(("run.sh", "echo")), "is no record"),
    "a member under another name": (
        archive(("../../TEST-7.json", GOOD)),
        "holds the record TEST-1",
    ),
    "nothing inside": (archive(), "holds no advisory"),
    # the tracker
    "a tracker of lists": (tracker({"lib": []}), "is no JSON object"),
    "an issue without releases": (tracker({"lib": {"CVE-2026-0001": {}}}), "is no JSON object"),
    "an issue that is no id": (tracker({"lib": {"x y": {"releases": {}}}}), "not the id"),
    "an unknown status": (issue(status="fine"), "unknown status"),
    "a status that is missing": (issue(urgency="low"), "unknown status"),
    "a fix that is a number": (issue(status="resolved", fixed_version=3), "is no text"),
    "a description that is a list": (
        tracker({"lib": {"CVE-2026-0001": {"releases": {}, "description": [1]}}}),
        "is no text",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_damaged_or_hostile_database_is_refused_with_its_reason(
    name: str, tmp_path: Path
) -> None:
    write, reason = HOSTILE[name]
    write(tmp_path)
    with pytest.raises(DatabaseInvalid) as refused:
        read(tmp_path)
    assert reason in str(refused.value)
    assert "Fetch the database again" in refused.value.hint


def test_forty_hostile_databases_are_tried() -> None:
    assert len(HOSTILE) >= 40


def test_one_bad_record_refuses_the_whole_database(tmp_path: Path) -> None:
    write_records(tmp_path / "good", record("TEST-2"), zipped=True)
    file(GOOD[:-3])(tmp_path)
    with pytest.raises(DatabaseInvalid, match=r"TEST-1\.json"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("limit", "reason"),
    [("_MOST_RECORDS", "more than 1 records"), ("_MOST_TOTAL_BYTES", "is larger than 1 bytes")],
)
def test_what_is_too_much_is_refused(
    limit: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, limit, 1)
    with pytest.raises(DatabaseInvalid, match=reason):
        read(write_records(tmp_path, record(), record("TEST-2"), zipped=True))


def test_a_member_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as made:
        made.writestr("TEST-1.json", GOOD)
        with pytest.warns(UserWarning, match="Duplicate"):
            made.writestr("TEST-1.json", GOOD)
    (tmp_path / "all.zip").write_bytes(held.getvalue())
    with pytest.raises(DatabaseInvalid, match="is there twice"):
        read(tmp_path)
