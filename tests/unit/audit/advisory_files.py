"""Small databases of advisories; ids that begin with TEST- are made up."""

from __future__ import annotations

import json
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

NOW = datetime(2026, 6, 1, 12, 0, tzinfo=UTC)


def record(identity: str = "TEST-1", **changes: Any) -> dict[str, Any]:
    """A good record about `thing` before 2.0, with some fields changed or (None) left out."""
    body = {
        "schema_version": "1.6.0",
        "id": identity,
        "modified": "2026-05-30T00:00:00Z",
        "published": "2026-05-01T00:00:00Z",
        "summary": "a made-up record",
        "affected": [affected()],
        **changes,
    }
    return {key: value for key, value in body.items() if value is not None}


def affected(
    ecosystem: str = "PyPI", name: str = "thing", fixed: str | None = "2.0", **more: Any
) -> dict[str, Any]:
    events = [{"introduced": "0"}, *([{"fixed": fixed}] if fixed else [])]
    ranges = [{"type": "ECOSYSTEM", "events": events}]
    return {"package": {"ecosystem": ecosystem, "name": name}, "ranges": ranges, **more}


def write_records(folder: Path, *records: dict[str, Any], zipped: bool = False) -> Path:
    """A database: an archive as OSV's bucket has it, or a file for each record."""
    folder.mkdir(parents=True, exist_ok=True)
    if not zipped:
        for each in records:
            (folder / f"{each['id']}.json").write_text(json.dumps(each))
        return folder
    with zipfile.ZipFile(folder / "all.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for each in records:
            archive.writestr(f"{each['id']}.json", json.dumps(each))
    return folder
