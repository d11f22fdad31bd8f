"""Where a locked set lies on disk: a plain folder, or the Hub's own cache layout.

Beside the files stands `.sm120/` with a copy of the lock, so that a folder can be verified on a
machine that has neither network nor checkout, the partial files of a fetch, and the receipt.

In the Hub's layout a repository is `models--org--name` with `blobs/HASH` and, for each commit,
`snapshots/COMMIT` full of links to them. `hf download` prints the path of a snapshot, people also
name the cache or a repository: all three are accepted.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.core.errors import LockEdited, LockStale, StoreUnwritable, WeightsUnknown
from pipeline.core.sealed import read_or_none
from pipeline.weights.model import (
    COMMIT,
    FilePin,
    WeightsLock,
    WeightsSpec,
    read_weights_lock,
    write_weights_lock,
)

STATE = ".sm120"
_MODELS = "models--"
_LOCK, _BEGUN = "lock.yaml", "begun.lock.yaml"
_SNAPSHOTS, _BLOBS = "snapshots", "blobs"


def require_no_links(*folders: Path) -> None:
    """Refuse folders of this tool that are links: it would write into another folder."""
    if link := next((folder for folder in folders if folder.is_symlink()), None):
        raise StoreUnwritable(
            f"{link}: is a link; this tool writes only into folders of its own",
            "Remove the link, or replace it by the folder that it leads to.",
        )


@dataclass(frozen=True)
class LockedFolder:
    """A folder that holds, or is going to hold, one locked set."""

    root: Path  # of the files, or in the Hub's layout of the repository's cache
    lock: WeightsLock
    hub_cache: bool = False

    @property
    def state(self) -> Path:
        """This tool's folder next to the files; one cache may hold several sets."""
        # not in the snapshot: engines and the Hub's client list that folder
        return self.root / STATE / self.lock.name if self.hub_cache else self.root / STATE

    def require_own_state(self) -> None:
        """Refuse a link among this tool's own folders: it would have us write into another's."""
        require_no_links(self.root / STATE, self.state, self.partial_folder, self.aside_folder)

    @property
    def lock_file(self) -> Path:
        return self.state / _LOCK

    @property
    def begun_file(self) -> Path:
        """The lock of a fetch that has begun; `lock_file` shows that the set is complete."""
        return self.state / _BEGUN

    @property
    def receipt_file(self) -> Path:
        return self.state / "receipt.json"

    @property
    def partial_folder(self) -> Path:
        return self.state / "partial"

    @property
    def aside_folder(self) -> Path:
        """The folder for what was in a file's place, for a person to look at."""
        return self.state / "aside"

    @property
    def snapshot(self) -> Path:
        """Where engines find the files by their names."""
        return self.root / _SNAPSHOTS / self.lock.commit if self.hub_cache else self.root

    def file(self, pin: FilePin) -> Path:
        """Where a file's bytes are."""
        if not self.hub_cache or self.is_without_link(pin):
            return self.name(pin)
        return self.root / _BLOBS / pin.want

    def is_without_link(self, pin: FilePin) -> bool:
        """Whether a disk without links made the Hub's client store the file under its name."""
        name, blob = self.name(pin), self.root / _BLOBS / pin.want
        return not os.path.lexists(blob) and name.is_file() and not name.is_symlink()

    def name(self, pin: FilePin) -> Path:
        """What an engine opens: the file itself, or a link to its blob."""
        return self.snapshot / pin.path

    def keep_lock(self, *, is_begun: bool = False) -> None:
        """Write the lock next to the files; for a fetch that `is_begun`, for the next run."""
        self.require_own_state()
        # a branch may move during a fetch, so the lock comes before the files
        write_weights_lock(self.begun_file if is_begun else self.lock_file, self.lock)
        if not is_begun:
            self.begun_file.unlink(missing_ok=True)


@dataclass(frozen=True)
class CachePath:
    """A repository in a Hub cache, and the snapshot that the user named."""

    root: Path
    commit: str = ""

    @property
    def repository(self) -> str:
        """Its name on the Hub."""
        # only the first: an id has one slash, between owner and name
        return self.root.resolve().name.removeprefix(_MODELS).replace("--", "/", 1)


def in_hub_cache(folder: Path) -> CachePath | None:
    """Recognise a snapshot or a repository of a Hub cache; None for any other folder."""
    real = folder.resolve()  # for `.`, and for links that users make to a snapshot
    repository = real.parent.parent
    is_cache = repository.name.startswith(_MODELS) or (repository / _BLOBS).is_dir()
    if real.parent.name == _SNAPSHOTS and COMMIT.fullmatch(real.name) and is_cache:
        return CachePath(repository, real.name)
    # a plain folder may happen to have one of the two names; both, or the prefix, are a cache
    has = [(folder / name).is_dir() for name in (_BLOBS, _SNAPSHOTS)]
    if all(has) or (any(has) and real.name.startswith(_MODELS)):
        return CachePath(folder)
    return None


def cache_name(model: WeightsLock | WeightsSpec) -> str:
    """A repository's folder in a Hub cache."""
    return f"{_MODELS}{model.repository.replace('/', '--')}"


def user_cache() -> Path:
    """Where the Hub's own client keeps its files."""
    if named := os.environ.get("HF_HUB_CACHE"):
        return Path(named)
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    return Path(home) / "hub"


def kept_lock(folder: Path, spec: WeightsSpec) -> WeightsLock | None:
    """Find the lock of a spec's fetch to a folder, complete or begun."""
    cached = in_hub_cache(folder)
    roots = [cached.root] if cached else [folder, folder / cache_name(spec)]
    states = [state for root in roots for state in (root / STATE, root / STATE / spec.name)]
    for path in (state / name for state in states for name in (_BEGUN, _LOCK)):
        lock = read_or_none(read_weights_lock, path)
        if lock and (lock.repository, lock.spec) == (spec.repository, spec.lock_digest()):
            return lock
    return None


def offered_place(folders: Sequence[Path], spec: WeightsSpec) -> LockedFolder | None:
    """Find the set of a spec among the folders that its files should come from.

    None if there is no lock at all; refuses one that is damaged or of something else.
    """
    places: list[LockedFolder] = []
    for folder in folders:
        try:
            places += _beside(folder, in_hub_cache(folder))
        except LockEdited as error:
            hint = "Copy the folder again from the machine that fetched it."
            raise LockEdited(f"{folder}: {error}", hint) from error
    for place in places:
        if (place.lock.repository, place.lock.spec) == (spec.repository, spec.lock_digest()):
            return place
    for place in places:
        # the name is right, so what the spec asks for has changed
        if (place.lock.name, place.lock.repository) == (spec.name, spec.repository):
            raise LockStale(
                f"{place.lock_file}: was made for another spec than the {spec.name} that is here",
                "Bring that spec along, or lock and fetch again where the Hub can be reached.",
            )
    if places:
        found = ", ".join(f"{p.root} has {p.lock.name} of {p.lock.repository}" for p in places)
        raise WeightsUnknown(
            f"no lock of {spec.name} ({spec.repository} at {spec.revision}): {found}",
            "Name the folder of this set with --from, or fetch what is there by its own name.",
        )
    return None


def new_place(folder: Path, lock: WeightsLock, *, hub_cache: bool) -> LockedFolder:
    """Choose the place for a set at a folder; in the Hub's layout, its cache folder.

    A folder that already is a part of a Hub cache is used as that: a plain file in the place of a
    link would take the bytes from under the other snapshots.
    """
    wanted, cached = cache_name(lock), in_hub_cache(folder)
    if cached is None:
        if not hub_cache:
            return LockedFolder(folder, lock)
        return LockedFolder(
            folder if folder.name == wanted else folder / wanted, lock, hub_cache=True
        )
    name = cached.root.resolve().name
    if name.startswith(_MODELS) and name != wanted:
        raise WeightsUnknown(
            f"{cached.root}: is the cache of {cached.repository}, the lock {lock.name} is of"
            f" {lock.repository}",
            f"Name the folder {wanted}, or the lock of the set that is here.",
        )
    if cached.commit not in ("", lock.commit):
        raise WeightsUnknown(
            f"{cached.root}: the snapshot is {cached.commit}, the lock {lock.name} is of"
            f" {lock.commit}",
            f"Name {_SNAPSHOTS}/{lock.commit}, or the lock of the revision that is here.",
        )
    return LockedFolder(cached.root, lock, hub_cache=True)


def lock_place(folder: Path, lock: WeightsLock) -> LockedFolder:
    """Find the place of a lock's files in a folder, in either layout."""
    for cache in (folder, folder / "hub"):  # HF_HOME keeps its cache in `hub`
        if (cache / cache_name(lock)).is_dir():
            return new_place(cache, lock, hub_cache=True)
    return new_place(folder, lock, hub_cache=False)


def find_places(folder: Path, known: Collection[WeightsLock] = ()) -> list[LockedFolder]:
    """Find every locked set in a folder: its own, or those of a Hub cache.

    If no lock is next to the files, as in a cache that the Hub's own client made, it is one of
    the `known` locks, by repository and commit.
    """
    cached = in_hub_cache(folder)
    beside = list({(p.root, p.lock.name): p for p in _beside(folder, cached)}.values())
    fitting = (
        place
        for root in _repositories(folder, cached)
        for place in (LockedFolder(root, lock, hub_cache=True) for lock in known)
        if root.resolve().name == cache_name(place.lock) and place.snapshot.is_dir()
    )
    both: tuple[Iterable[LockedFolder], ...] = (beside, fitting)
    for places in both:
        # the user named a snapshot: ignore the sets of the cache's other commits
        if meant := [p for p in places if not cached or cached.commit in ("", p.lock.commit)]:
            return meant
    if beside:
        others = ", ".join(f"{p.lock.name} at {p.lock.commit}" for p in beside)
        raise WeightsUnknown(
            f"{folder}: no lock is of this snapshot (there are: {others})",
            f"Name {_SNAPSHOTS}/{beside[0].lock.commit}.",
        )
    hint = (
        "Name the folder that `sm120 weights fetch --output` made, or lock your own files:"
        f" `sm120 weights lock {folder.resolve()}`."
    )
    if above := next(filter(None, map(in_hub_cache, folder.resolve().parents)), None):
        named = above.root / _SNAPSHOTS / above.commit if above.commit else above.root
        hint = f"It lies in a Hub cache: name {named}."
    raise WeightsUnknown(f"{folder}: has no locked weights ({STATE}/lock.yaml is missing)", hint)


def _beside(folder: Path, cached: CachePath | None) -> Iterator[LockedFolder]:
    if (folder / STATE / _LOCK).is_file():
        lock = read_kept_lock(folder / STATE / _LOCK)
        # a lock that lies in a snapshot: its files are links, so the place is the cache around it
        is_snapshot = cached is not None and cached.commit == lock.commit
        yield (
            new_place(folder, lock, hub_cache=False) if is_snapshot else LockedFolder(folder, lock)
        )
    for root in _repositories(folder, cached):
        for path in sorted(p for p in (root / STATE).glob(f"*/{_LOCK}") if p.is_file()):
            yield LockedFolder(root, read_kept_lock(path), hub_cache=True)


def read_kept_lock(path: Path) -> WeightsLock:
    """Read the lock next to the files; a fetch writes it."""
    hint = f"Remove {path} and fetch the set again: files that are right are kept."
    return read_weights_lock(path, edited=hint)


def _repositories(folder: Path, cached: CachePath | None) -> list[Path]:
    """The repositories that a folder is or holds."""
    if cached:
        return [cached.root]
    return [folder, *sorted(folder.glob(f"{_MODELS}*")), *sorted(folder.glob(f"hub/{_MODELS}*"))]


def snapshots_in(folder: Path) -> list[Path]:
    """The snapshots of a cache or of one of its repositories, locked or not."""
    roots = _repositories(folder, in_hub_cache(folder))
    return [p for root in roots for p in sorted(root.glob(f"{_SNAPSHOTS}/*")) if p.is_dir()]
