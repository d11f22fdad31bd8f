"""From a weights spec to its lock: what the Hub lists at one commit, checked for contradictions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import ValidationError

from pipeline.errors import DigestMismatch, HubBroken, RevisionMoved, SpecInvalid
from pipeline.foreign_json import JsonInvalid, read_json
from pipeline.model import Frozen
from pipeline.weights.hub import Hub
from pipeline.weights.model import COMMIT, FilePin, WeightsLock, WeightsSpec, sealed

MOST_INDEX_BYTES = 200 << 20  # some 100 for each tensor, of which Kimi K2.5 has 208,550
_INDEX = ".safetensors.index.json"
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<at>\d{5})-of-(?P<of>\d{5})(?P<end>\.\w+)")
Fetch = Callable[[FilePin, str], bytes]


class LockResult(Frozen):
    """A new lock, and what the user should know before using it."""

    lock: WeightsLock
    warnings: list[str]


class LockChange(Frozen):
    """One file that a new lock would add, drop or change."""

    kind: Literal["added", "removed", "changed", "commit"]
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
    warnings = [w for pin in wanted for w in _index_warnings(pin, commit, listed, wanted, fetch)]
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


def _index_warnings(
    pin: FilePin, commit: str, listed: Sequence[FilePin], wanted: Sequence[FilePin], fetch: Fetch
) -> list[str]:
    """Whether every shard that an index names is there, and part of the set."""
    # only a warning hangs on it, so an index that is too large is passed over
    if not pin.path.endswith(_INDEX) or pin.size_bytes > MOST_INDEX_BYTES:
        return []
    folder = pin.path.rpartition("/")[0]
    named = {
        f"{folder}/{s}" if folder else s for s in _shards(pin, checked(pin, fetch(pin, commit)))
    }
    return [
        f"{pin.path}: names {len(lacking)} shards that {who} ({', '.join(sorted(lacking)[:3])})"
        for lacking, who in (
            (named - {p.path for p in listed}, "the repository lacks"),
            (named & {p.path for p in listed} - {p.path for p in wanted}, "the spec leaves out"),
        )
        if lacking
    ]


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
    try:
        shards = set(read_json(data, most_bytes=MOST_INDEX_BYTES)["weight_map"].values())
    except (JsonInvalid, KeyError, TypeError, AttributeError) as error:
        raise HubBroken(f"{pin.path}: is not an index of safetensors shards") from error
    if not all(isinstance(shard, str) for shard in shards):
        raise HubBroken(f"{pin.path}: is not an index of safetensors shards")
    return shards


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
    rows = (_move(path, before.get(path), after.get(path)) for path in {**before, **after})
    moves = sorted((move for move in rows if move), key=lambda move: move.path)
    if old is None or old.commit != new.commit:
        head = LockChange(
            kind="commit", path="", before=old.commit if old else None, after=new.commit
        )
        return [head, *moves]
    return moves


def _move(path: str, old: FilePin | None, new: FilePin | None) -> LockChange | None:
    if old == new:
        return None
    kind: Literal["added", "removed", "changed"] = "changed"
    if old is None or new is None:
        kind = "added" if old is None else "removed"
    return LockChange(
        kind=kind,
        path=path,
        before=old.want if old else None,
        after=new.want if new else None,
        before_bytes=old.size_bytes if old else None,
        after_bytes=new.size_bytes if new else None,
    )
