"""From a weights spec to its lock: what the Hub lists at one commit, checked for contradictions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import ValidationError

from pipeline.core.errors import DigestMismatch, HubBroken, RevisionMoved, SpecInvalid
from pipeline.core.foreign_json import JsonInvalid, read_json
from pipeline.core.model import Frozen
from pipeline.weights.hub import Hub
from pipeline.weights.model import COMMIT, FilePin, WeightsLock, WeightsSpec, sealed

MOST_INDEX_BYTES = 200 << 20  # some 100 for each tensor, of which Kimi K2.5 has 208,550
_INDEX = ".safetensors.index.json"
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<at>\d{5})-of-(?P<of>\d{5})(?P<end>\.\w+)")
Fetch = Callable[[FilePin, str], bytes]
Kind = Literal["added", "removed", "changed", "commit"]


class LockResult(Frozen):
    """A new lock, and what the user should know before using it."""

    lock: WeightsLock
    warnings: list[str]


class LockChange(Frozen):
    """One file that a new lock would add, drop or change."""

    kind: Kind
    path: str
    before: str | None = None
    after: str | None = None
    before_bytes: int | None = None
    after_bytes: int | None = None


def look_up(spec: WeightsSpec, hub: Hub, fetch: Fetch) -> LockResult:
    """The lock that answers a spec today; `fetch` reads a small file at a commit, as it comes."""
    commit = hub.commit_of(spec.repository, spec.revision)
    # a mirror that answers another commit than the one it was asked for serves other files
    if COMMIT.fullmatch(spec.revision) and commit != spec.revision:
        raise HubBroken(
            f"{spec.repository}: the Hub answers commit {commit} when asked for {spec.revision}"
        )
    listed = hub.files(spec.repository, commit)
    wanted = [pin for pin in listed if spec.wants(pin.path)]
    if not wanted:
        raise SpecInvalid(
            f"{spec.name}: include and exclude leave out all of {len(listed)} files",
            f"Correct them, in lockfiles/weights/{spec.name}.yaml if they stand there.",
        )
    listed_paths, wanted_paths = {pin.path for pin in listed}, {pin.path for pin in wanted}
    warnings = []
    for pin in wanted:
        # only a warning hangs on it, so an index that is too large is passed over
        if pin.path.endswith(_INDEX) and pin.size_bytes <= MOST_INDEX_BYTES:
            named = _shards(pin, checked(pin, fetch(pin, commit)))
            lacking, excluded = named - listed_paths, named & listed_paths - wanted_paths
            for paths, who in (
                (lacking, "the repository lacks"),
                (excluded, "the spec leaves out"),
            ):
                some = ", ".join(sorted(paths)[:3])
                if paths:
                    warnings.append(f"{pin.path}: names {len(paths)} shards that {who} ({some})")
    warnings += _split_warnings(wanted)
    # asked again at the end: what was read in between belongs together only if the branch stood
    now = hub.commit_of(spec.repository, spec.revision)
    if now != commit:
        raise RevisionMoved(
            f"{spec.repository}: {spec.revision} moved from {commit} to {now} while it was read",
            "Nothing was written. Lock again; or name a commit as the spec's revision.",
        )
    try:
        return LockResult(lock=sealed(spec, commit, wanted), warnings=warnings)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise HubBroken(
            f"{spec.repository}: its files cannot lie in one folder: {reason}"
        ) from error


def checked(pin: FilePin, data: bytes) -> bytes:
    """The bytes, if they are the pin's."""
    hasher = pin.new_hash()
    hasher.update(data)
    if len(data) != pin.size_bytes or hasher.hexdigest() != pin.want:
        raise DigestMismatch(
            f"{pin.path}: listed as {pin.want}, received {hasher.hexdigest()}",
            "Nothing was written. Try again, or another HF_ENDPOINT.",
        )
    return data


def _shards(pin: FilePin, data: bytes) -> set[str]:
    """The paths of all shards that an index names."""
    try:
        shards = set(read_json(data, most_bytes=MOST_INDEX_BYTES)["weight_map"].values())
        return {pin.path[: pin.path.rfind("/") + 1] + shard for shard in shards}
    except (JsonInvalid, KeyError, TypeError, AttributeError) as error:
        raise HubBroken(f"{pin.path}: is not an index of safetensors shards") from error


def _split_warnings(wanted: Sequence[FilePin]) -> list[str]:
    """Files named `x-00001-of-00003` of which not all are there."""
    sets: dict[tuple[str, str, str], set[int]] = {}
    for pin in wanted:
        if part := _SPLIT.fullmatch(pin.path):
            key = (part["stem"], part["of"], part["end"])
            sets.setdefault(key, set()).add(int(part["at"]))
    return [
        f"{stem}-*-of-{of}{end}: only {len(parts)} of {int(of)} parts"
        for (stem, of, end), parts in sorted(sets.items())
        # not by their number: a part beyond the last must not stand in for a missing one
        if parts != set(range(1, int(of) + 1))
    ]


def diff_locks(old: WeightsLock | None, new: WeightsLock) -> list[LockChange]:
    """What moves from one lock to the next."""
    before = {pin.path: pin for pin in old.files} if old else {}
    after = {pin.path: pin for pin in new.files}
    changes = []
    if old is None or old.commit != new.commit:
        commit = old.commit if old else None
        changes.append(LockChange(kind="commit", path="", before=commit, after=new.commit))
    for path in sorted({**before, **after}):
        was, now = before.get(path), after.get(path)
        if was != now:
            kind: Kind = "changed" if was and now else "added" if now else "removed"
            change = LockChange(
                kind=kind,
                path=path,
                before=was.want if was else None,
                after=now.want if now else None,
                before_bytes=was.size_bytes if was else None,
                after_bytes=now.size_bytes if now else None,
            )
            changes.append(change)
    return changes
