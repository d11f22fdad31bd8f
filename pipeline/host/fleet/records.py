"""Host records on the controller: what each host was before and after the last provisioning run."""

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


class Move(Frozen):
    """One host, and what of it moved in a run; without a `before` there is nothing to compare."""

    host: str
    moved: list[Difference]


def record_path(folder: Path, host: str) -> Path:
    """Where a host's record lies: its facts as of the end of the last run."""
    return folder / f"{host}.json"


def recorded(folder: Path | None, host: str) -> HostFacts | None:
    """A host's record, where there is one."""
    path = record_path(folder, host) if folder else None
    return read_facts(path) if path and path.exists() else None


def keep_records(folder: Path) -> list[Move]:
    """Turn what the playbook captured into records; what moved on each host. Captures are used up.

    A host whose run did not come to its end keeps the record of the run before.
    """
    moves = []
    for after in sorted((folder / CAPTURES).glob("*.after.json")):
        host = after.name.removesuffix(".after.json")
        now = gather(read_capture(after), host)
        write_bytes(record_path(folder, host), _text(now))
        before = after.with_name(f"{host}.before.json")
        moved = compare(gather(read_capture(before), host), now) if before.exists() else []
        moves.append(Move(host=host, moved=moved))
        after.unlink()
        before.unlink(missing_ok=True)
    return moves


def save_look(folder: Path, facts: HostFacts, functions: Sequence[ProbeRow]) -> None:
    """What a look at one host saw, as `sm120 host drift` and `sm120 host outliers` read it."""
    write_bytes(record_path(folder, facts.host), _text(facts))
    if functions:
        rows = [r.model_dump(mode="json") for r in functions]
        text = json.dumps({"functions": {"rows": rows}}, indent=2, sort_keys=True) + "\n"
        write_bytes(folder / "checks" / f"{facts.host}.json", text.encode())


def _text(facts: HostFacts) -> bytes:
    return (facts.model_dump_json(indent=2) + "\n").encode()
