"""What stood behind a run: its image, weights, recipe, host and client, each by its digest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from pipeline.attest.envelope import SUFFIX
from pipeline.attest.names import HOST_FACTS
from pipeline.bench.model import Run
from pipeline.errors import EvidenceBroken, PipelineError, StoreDamaged, WeightsUnknown
from pipeline.evidence.evidence_set import kept
from pipeline.files import sha256_of_file
from pipeline.model import sha256_of
from pipeline.recipe import tiny
from pipeline.recipe.find import Recipes
from pipeline.serve.run import recipe_digest
from pipeline.store.store import Store, read_image_record
from pipeline.verify.artifact import open_file, open_image, open_layout, read_index
from pipeline.verify.chain import Judge, judge_attached
from pipeline.verify.evidence import attached_in, beside, gather
from pipeline.verify.host_facts import HOST
from pipeline.verify.verdict import Code, Node, Verdict
from pipeline.verify.walk import Walk, walk
from pipeline.verify.weights import judge_weights
from pipeline.weights.model import WeightsLock, kept_locks
from pipeline.weights.place import find_places
from pipeline.weights.sign.record import record_path

# facts of a host are some hundred kilobytes; a folder that was named may hold anything
_MOST_FACTS_BYTES = 64 << 20
_MOST_FILES = 10_000


@dataclass(frozen=True)
class Behind:
    """Where to look for what a run names: a store, and folders of anything else."""

    store: Store | None
    folders: Sequence[Path] = ()


def judge_behind(run: Run, behind: Behind, judge: Judge) -> list[Walk]:
    """Each thing that the run names; what is not here is missing, and never valid."""
    client = f"{run.client.name} {run.client.version} {run.client.digest}"
    parts = {
        "image": _image(run.inputs.image, behind, judge),
        "weights": _weights(run.inputs.weights, behind, judge),
        "recipe": _leaf(_recipe(run, behind, judge)),
        HOST: _host(run.inputs.host, behind, judge),
        "client": _leaf(Node("client", message=client)),
    }
    return [replace(w, node=replace(w.node, part=part)) for part, w in parts.items()]


def _leaf(node: Node) -> Walk:
    return Walk(node, ())


def _missing(title: str, message: str) -> Walk:
    return _leaf(Node(title, Verdict.INCOMPLETE, message))


def _image(digest: str | None, behind: Behind, judge: Judge) -> Walk:
    if digest is None:
        return _missing("image", "the run does not say which image served")
    walked = _stored_image(digest, behind.store, judge) or _image_in(digest, behind, judge)
    if walked is None:
        message = f"{digest} is not in the store here, nor in a layout that --look-in names"
        return _missing("image", message)
    return replace(walked, node=replace(walked.node, title=f"image {walked.node.title}"))


def _stored_image(digest: str, store: Store | None, judge: Judge) -> Walk | None:
    if store is None:
        return None
    for path in store.image_paths():
        try:
            if read_image_record(path).digest != digest:
                continue
        # `store check` reports it
        except (StoreDamaged, FileNotFoundError):
            continue
        name, platform = path.parts[-3], path.parts[-2].replace("-", "/", 1)
        try:
            with store.in_use():
                items = gather(kept(store, name, platform, digest))
                opened = open_image(store.blob_path(digest).parent, digest, f"{name} {platform}")
        except PipelineError as error:
            return _leaf(Node(f"{name} {platform} {digest}", Verdict.BROKEN, str(error)))
        given = (judge.trust, judge.checkout, judge.now)
        return walk(opened, items, *given, gates_may_wait=True)
    return None


def _image_in(digest: str, behind: Behind, judge: Judge) -> Walk | None:
    """An OCI layout that somebody pulled or exported."""
    for folder in (f for f in behind.folders if (f / "index.json").is_file()):
        try:
            opened = open_layout(folder)
        except PipelineError as error:
            # a layout of the image that is damaged, and not merely one of another
            if not _lists(folder, digest):
                continue
            return _leaf(Node(f"{folder.name} {digest}", Verdict.BROKEN, str(error)))
        if opened.digest == digest:
            attached = attached_in(folder, digest)
            attached.items += gather(beside(folder))
            return judge_attached(opened, attached, judge)
    return None


def _lists(folder: Path, digest: str) -> bool:
    with suppress(PipelineError):
        return any(each.digest == digest for each in read_index(folder).manifests)
    return False


def _weights(digest: str | None, behind: Behind, judge: Judge) -> Walk:
    if digest is None:
        return _missing("weights", "the run does not say which weights were served")
    if digest == _tiny_digest():
        return _leaf(Node("weights", message="the tiny model, which this code makes"))
    locks = kept_locks(judge.checkout) if judge.checkout else []
    if (walked := _weights_in(digest, behind, locks, judge)) is not None:
        return replace(walked, node=replace(walked.node, title=f"weights {walked.node.title}"))
    lock = next((lock for lock in locks if lock.seal == digest), None)
    if lock is None:
        return _missing("weights", f"no lock here has the seal {digest}")
    files = f"{len(lock.files)} files of {lock.repository} at {lock.commit[:12]}"
    message = f"the lock names {files}, which are not here (--look-in DIR)"
    return _missing(f"weights {lock.name}", message)


@cache
def _tiny_digest() -> str:
    return sha256_of(tiny.tiny_gguf())


def _weights_in(
    digest: str, behind: Behind, locks: Sequence[WeightsLock], judge: Judge
) -> Walk | None:
    for folder in behind.folders:
        try:
            places = find_places(folder, locks)
        except WeightsUnknown:
            continue
        for place in places:
            if place.lock.seal == digest:
                record = record_path(place)
                items = gather([record] if record.exists() else [])
                return judge_weights(place, places, items, judge)
    return None


def _recipe(run: Run, behind: Behind, judge: Judge) -> Node:
    name, digest = run.inputs.recipe_name, run.inputs.recipe
    if name is None or digest is None:
        return Node("recipe", Verdict.INCOMPLETE, "the run was not served from a recipe")
    own = [judge.checkout.root / "recipes"] if judge.checkout else []
    title = f"recipe {name}"
    try:
        now = recipe_digest(Recipes([*behind.folders, *own]).read(name))
    except PipelineError as error:
        return Node(title, Verdict.INCOMPLETE, f"{digest} cannot be compared: {error}")
    if now != digest:
        return Node(title, Verdict.STALE, f"has changed since: it is {now}, the run had {digest}")
    return Node(title, message=digest)


def _host(digest: str | None, behind: Behind, judge: Judge) -> Walk:
    if digest is None:
        message = "no facts of the host were given"
        return _leaf(Node(HOST, Verdict.INCOMPLETE, message, code=Code.FACTS_NOT_GIVEN))
    path = next((p for p in _facts_files(behind, judge) if sha256_of_file(p) == digest), None)
    if path is None:
        for other in _facts_files(behind, judge):
            # a statement of those facts, beside a file that is another one by now
            about = other.with_name(other.name.removesuffix(SUFFIX))
            (item,) = gather([other]) if about != other and about.is_file() else (None,)
            if item and item.envelope and item.envelope.statement.is_about(digest):
                message = f"has {sha256_of_file(about)}, the run names {digest}"
                return _leaf(Node(f"{HOST} {about.name}", Verdict.CHANGED, message))
        message = f"{digest} is in none of the folders here (--look-in DIR)"
        return _missing(HOST, message)
    # facts may be named by their statement, which is proof of itself
    about = path.with_name(path.name.removesuffix(SUFFIX))
    if not about.is_file():
        return _missing(f"{HOST} {path.name}", "the facts are not beside their statement")
    given = (judge.trust, judge.checkout, judge.now)
    walked = walk(open_file(about), gather(beside(about)), *given, only=HOST_FACTS)
    node = replace(walked.node, title=f"{HOST} {walked.node.title}", subject=str(about))
    return replace(walked, node=node)


def _facts_files(behind: Behind, judge: Judge) -> Iterator[Path]:
    own = [judge.checkout.root / "records"] if judge.checkout else []
    seen = 0
    for folder in (*behind.folders, *own):
        for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
            seen += 1
            if seen > _MOST_FILES:
                raise EvidenceBroken(f"{folder}: more than {_MOST_FILES} files")
            if path.is_file() and path.stat().st_size <= _MOST_FACTS_BYTES:
                yield path
