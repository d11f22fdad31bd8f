"""Host records on the controller: the facts of each host as of its last provisioning run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pipeline.files import write_bytes
from pipeline.host.facts.drift import Difference, compare, read_facts
from pipeline.host.facts.gather import gather
from pipeline.host.facts.model import HostFacts
from pipeline.host.facts.source import read_capture
from pipeline.host.probes.runner import ProbeRow
from pipeline.model import Frozen

CAPTURES = "captures"


class HostChanges(Frozen):
    """One host and what a run changed on it; empty where nothing was captured before the run."""

    host: str
    changes: list[Difference]


def record_path(folder: Path, host: str) -> Path:
    """The file of a host's record."""
    return folder / f"{host}.json"


def recorded(folder: Path | None, host: str) -> HostFacts | None:
    """A host's record, where there is one."""
    path = record_path(folder, host) if folder else None
    return read_facts(path) if path and path.exists() else None


def keep_records(folder: Path) -> list[HostChanges]:
    """Turn the captures of a play into records and delete them; returns the changes of each host.

    A host whose run did not finish keeps the record of the run before.
    """
    hosts = []
    for after in sorted((folder / CAPTURES).glob("*.after.json")):
        host = after.name.removesuffix(".after.json")
        now = gather(read_capture(after), host)
        write_bytes(record_path(folder, host), _text(now))
        before = after.with_name(f"{host}.before.json")
        changes = compare(gather(read_capture(before), host), now) if before.exists() else []
        hosts.append(HostChanges(host=host, changes=changes))
        # a capture that stayed would be taken for one of the next run
        after.unlink()
        before.unlink(missing_ok=True)
    return hosts


def save_facts(folder: Path, facts: HostFacts, functions: Sequence[ProbeRow]) -> None:
    """Keep facts and function tests of a host for `host drift` and `host outliers`."""
    write_bytes(record_path(folder, facts.host), _text(facts))
    if functions:
        rows = [r.model_dump(mode="json") for r in functions]
        text = json.dumps({"functions": {"rows": rows}}, indent=2, sort_keys=True) + "\n"
        write_bytes(folder / "checks" / f"{facts.host}.json", text.encode())


def _text(facts: HostFacts) -> bytes:
    return (facts.model_dump_json(indent=2) + "\n").encode()
