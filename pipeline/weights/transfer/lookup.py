"""Asking the Hub that this machine uses for a model's lock, and for its small files."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from pydantic import ValidationError

from pipeline.core import log
from pipeline.core.errors import (
    DigestMismatch,
    HubBroken,
    OfflineMiss,
    RevisionMoved,
    SourceUnreachable,
    SpecInvalid,
)
from pipeline.core.foreign_json import JsonInvalid, read_json
from pipeline.core.model import Frozen
from pipeline.core.net.http import NetClient
from pipeline.core.net.settings import plain_settings
from pipeline.core.net.timing import HttpLimits
from pipeline.weights.hub import Hub, endpoint, is_offline, saved_token
from pipeline.weights.model import COMMIT, FilePin, WeightsLock, WeightsSpec, sealed_weights_lock
from pipeline.weights.transfer.fetch import fetch_range
from pipeline.weights.transfer.sources import HttpRoute, HubRepository

_SHORT_CONNECT_S = 5.0  # behind a firewall that answers nothing, each try takes as long

_ELSEWHERE = "A machine without network takes a lock that was made elsewhere (docs/air-gap.md)."

# the bytes of a file, of a repository at a commit
ReadFile = Callable[[str, str, FilePin], bytes]


def open_hub(*, patient: bool = True) -> tuple[Hub, ReadFile]:
    """Open the Hub that this machine uses, with a reader for small files.

    Unless `patient`, gives up an unreachable Hub after two short tries.
    """
    settings = plain_settings()
    attempts, limits = (None, None) if patient else (2, HttpLimits(connect_s=_SHORT_CONNECT_S))
    hub = Hub(settings, endpoint=endpoint(), token=saved_token(), limits=limits, attempts=attempts)
    client = NetClient(settings)

    def read(repository: str, commit: str, pin: FilePin) -> bytes:
        source = HubRepository(hub.endpoint, repository, commit, hub.token)
        routes = [HttpRoute(client, source, "plain HTTP")]
        return b"".join(fetch_range(routes, pin, 0, pin.size_bytes, client=client))

    return hub, read


def look_up_now(spec: WeightsSpec, *, offline: bool = False) -> LockResult:
    """The lock that answers a spec today."""
    # huggingface_hub's own switch: users who set it expect every tool to obey it
    if offline or is_offline():
        why = "--offline is given" if offline else "HF_HUB_OFFLINE is set"
        raise OfflineMiss(
            f"{spec.repository}: {why}, and only the Hub knows the files of {spec.revision}",
            _ELSEWHERE,
        )
    hub, read = open_hub()
    try:
        with log.step(f"Looking up {spec.name}: {spec.repository} at {spec.revision}"):
            return look_up(spec, hub, lambda pin, commit: read(spec.repository, commit, pin))
    except SourceUnreachable as error:
        raise SourceUnreachable(str(error), f"{error.hint} {_ELSEWHERE}") from error


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
    """Make today's lock for a spec; `fetch` reads a small file at a commit, as it comes."""
    commit = hub.commit_of(spec.repository, spec.revision)
    # a mirror that answers with another commit serves other files
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
    # shards that an index names and the set lacks, and `x-00001-of-00003` without all parts
    listed_paths, wanted_paths = {pin.path for pin in listed}, {pin.path for pin in wanted}
    warnings, sets = [], dict[tuple[str, str, str], set[int]]()
    for pin in wanted:
        if part := _SPLIT.fullmatch(pin.path):
            key = (part["stem"], part["of"], part["end"])
            sets.setdefault(key, set()).add(int(part["at"]))
        # only a warning depends on it, so it skips an index that is too large
        if not pin.path.endswith(_INDEX) or pin.size_bytes > MOST_INDEX_BYTES:
            continue
        folder, data = pin.path[: pin.path.rfind("/") + 1], pinned_bytes(pin, fetch(pin, commit))
        try:
            shards = read_json(data, most_bytes=MOST_INDEX_BYTES)["weight_map"].values()
            named = {folder + shard for shard in shards}
        except (JsonInvalid, KeyError, TypeError, AttributeError) as error:
            raise HubBroken(f"{pin.path}: is not an index of safetensors shards") from error
        lacking, excluded = named - listed_paths, named & listed_paths - wanted_paths
        for paths, who in ((lacking, "the repository lacks"), (excluded, "the spec leaves out")):
            some = ", ".join(sorted(paths)[:3])
            if paths:
                warnings.append(f"{pin.path}: names {len(paths)} shards that {who} ({some})")
    warnings += [
        f"{stem}-*-of-{of}{end}: only {len(parts)} of {int(of)} parts"
        for (stem, of, end), parts in sorted(sets.items())
        # not by their number: a part beyond the last must not stand in for a missing one
        if parts != set(range(1, int(of) + 1))
    ]
    # asks again at the end: the answers belong together only if the branch did not move
    now = hub.commit_of(spec.repository, spec.revision)
    if now != commit:
        raise RevisionMoved(
            f"{spec.repository}: {spec.revision} moved from {commit} to {now} while it was read",
            "Nothing was written. Lock again; or name a commit as the spec's revision.",
        )
    try:
        return LockResult(lock=sealed_weights_lock(spec, commit, wanted), warnings=warnings)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise HubBroken(
            f"{spec.repository}: its files cannot lie in one folder: {reason}"
        ) from error


def pinned_bytes(pin: FilePin, data: bytes) -> bytes:
    """Return the bytes if they are the pin's."""
    hasher = pin.new_hash()
    hasher.update(data)
    if len(data) != pin.size_bytes or hasher.hexdigest() != pin.want:
        raise DigestMismatch(
            f"{pin.path}: listed as {pin.want}, received {hasher.hexdigest()}",
            "Nothing was written. Try again, or another HF_ENDPOINT.",
        )
    return data


def diff_weights_locks(old: WeightsLock | None, new: WeightsLock) -> list[LockChange]:
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
            old_pin = {"before": was.want, "before_bytes": was.size_bytes} if was else {}
            new_pin = {"after": now.want, "after_bytes": now.size_bytes} if now else {}
            change = {"kind": kind, "path": path, **old_pin, **new_pin}
            changes.append(LockChange.model_validate(change))
    return changes
