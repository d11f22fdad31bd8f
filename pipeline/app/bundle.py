"""A plan with all that its stages need in one folder, for a machine without network.

    bundle.json          every file: path, size, sha256, what it is for; signed beside it
    plan/                the plan, and the files of its folder that its stages name
    checkout.tar         the checkout as committed, with its locks
    mirror/              wheels, .debs and sources, for --mirror; in tool/ those of this tool
    images/ store/       images that are built, each an OCI layout, and what the store keeps of them
    weights/             locked sets
    hosts/ system/       packages of hosts, locked ones and those of the system's own archive: for
                         each system a part of a repository, with that repository's signed index
    keys/                public keys and the trust file

`write_bundle` composes what other commands do; `unbundle` believes nothing before the signature
and every byte are checked.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple
from urllib.parse import quote

from pydantic import AfterValidator, Field, RootModel, StringConstraints, ValidationError

from pipeline import __version__
from pipeline.app.deliver import collect_images, collect_own_tool, export_image, inputs_of
from pipeline.app.run_plan import RunPlan, Stage, read_stages
from pipeline.app.signing import signer_of, trust_files, trust_of
from pipeline.app.statements import sign_file
from pipeline.app.workspace import Workspace, host_platform, named_platform, platforms_of
from pipeline.artifacts.attest.envelope import SUFFIX
from pipeline.artifacts.attest.keys import public_pem
from pipeline.artifacts.attest.names import BUNDLE
from pipeline.artifacts.attest.trust import with_named_keys
from pipeline.artifacts.oci.document import Descriptor
from pipeline.artifacts.store.store import read_image_record
from pipeline.bootstrap import FOLDER
from pipeline.core import log, proc
from pipeline.core.errors import (
    BundleDamaged,
    BundleInvalid,
    EvidenceUnsigned,
    KeyInvalid,
    LockStale,
    NoCheckout,
    SpecInvalid,
    StoreUnwritable,
)
from pipeline.core.files import (
    files_below,
    is_whole,
    link_or_copy,
    need_space_for_copies,
    on_all_cores,
    os_errors_explained,
    read_limited,
    remove_tree,
    sha256_of_file,
    sync,
    write_bytes,
)
from pipeline.core.model import (
    FILE_VERSION,
    Count,
    Digest,
    Frozen,
    Name,
    Platform,
    Sha1,
    canonical_json,
    sha256_of,
    stays_below,
)
from pipeline.core.net.http import NetClient
from pipeline.core.net.settings import read_settings
from pipeline.core.yaml_file import mistakes, read_yaml
from pipeline.evidence.statements.evidence_set import evidence_folder
from pipeline.evidence.verify.artifact import Artifact
from pipeline.evidence.verify.evidence import gather_envelopes
from pipeline.evidence.verify.verdict import verdict_error
from pipeline.evidence.verify.walk import walk_evidence
from pipeline.images.assemble.image import Built, find_built
from pipeline.images.assemble.plan import plan_image
from pipeline.images.fetch.base_settings import BaseSettings
from pipeline.images.fetch.inputs import Fetcher, collect
from pipeline.images.fetch.sources import DebianMirror, Sources, debian_mirror, read_below
from pipeline.images.lock.debian import resolve_closure
from pipeline.images.lock.model import DebPin
from pipeline.images.lock.release import DEBIAN_12_KEYRING
from pipeline.weights.sign.record import weights_record_path

if TYPE_CHECKING:
    from pipeline.app.weights_hub import ServedHub
    from pipeline.weights.serve.http import Request, Response

MANIFEST = "bundle.json"
_SIGNED = f"{MANIFEST}{SUFFIX}"
_CHECKOUT = "checkout.tar"
_MOST_BYTES = 256 << 20  # of a manifest: a million files
# Larger files are wheels, layers and weights, which are packed; a key is a small text.
_MOST_SCANNED_BYTES = 64 << 20
_PRIVATE = re.compile(rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY-----\s+[A-Za-z0-9+/=:,\s-]{40}")
# What roles install that no lock names, in the checkout.
SYSTEM_PACKAGES = "ansible/vars/system_packages.yml"
# Of each system the suite with all its packages and their fixes up to its last point release. Those
# of later fixes are signed for a week only, and apt refuses them after that.
_SUITES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "debian-12": ("bookworm", ("main",)),
    "debian-13": ("trixie", ("main",)),
    "ubuntu-24.04": ("noble", ("main", "universe")),
}
# Commands that build images for every platform that they have, unless one is named.
_BUILDS = (["build"], ["plan"], ["image", "build"], ["image", "plan"])

Place = Annotated[
    str,
    StringConstraints(pattern=r"^[^\x00-\x1f\\]+$", max_length=1000),
    AfterValidator(stays_below),
]
Purpose = Annotated[str, StringConstraints(min_length=1, max_length=400)]


class BundleFile(Frozen):
    """One file, and what it is for."""

    path: Place
    size_bytes: Count
    sha256: Digest
    what: Purpose


class BundleManifest(Frozen):
    """The file `bundle.json`."""

    format: Annotated[Literal[1], FILE_VERSION] = 1
    plan: Place  # below the bundle
    platform: Platform  # of the machine that it is for
    commit: Sha1
    # what a stage needs and the bundle does not hold, each with its reason
    left_out: list[Purpose]
    files: Annotated[list[BundleFile], Field(min_length=1)]


class RolePackages(RootModel[dict[str, list[Name]]]):
    """Which packages a role installs from the archive of a host's own system."""


class BundlePart(NamedTuple):
    """A part of a bundle, and its size; none where only writing it shows the size."""

    what: str
    files: int | None
    size_bytes: int | None


@dataclass(frozen=True)
class BundleRequest:
    """Which plan, for which machine, and where its parts come from."""

    path: Path
    folder: Path
    platform: str | None = None
    python: str | None = None  # that the tool will run with
    weights: bool = True
    neighbours: tuple[str, ...] = ()  # folders and servers to take weights from
    mirrors: tuple[str, ...] = ()
    # of the hosts' packages: system → address
    repositories: Mapping[str, str] = field(default_factory=dict)
    keyring: Path | None = None
    # of the system's own packages: whether they are brought, and where it is not Debian's
    archive: bool = True
    archives: Mapping[str, str] = field(default_factory=dict)
    archive_keyring: Path | None = None
    roles: tuple[str, ...] = ()  # whose packages the hosts need from there; none: all
    packages: tuple[str, ...] = ()  # and more of them
    key_path: Path | None = None
    bases: BaseSettings | None = None


@dataclass(frozen=True)
class _Needs:
    """What the stages of a plan need, by the words of their commands."""

    stages: Sequence[Stage]
    images: Sequence[tuple[str, str | None]]
    sets: Sequence[tuple[str, Sequence[Path]]]  # weights, and where a run here has put them
    files: dict[str, Path]  # of the plan's folder
    has_hosts: bool
    left_out: Sequence[str]


class _AptPart(NamedTuple):
    """A part of a repository: some packages, and the signed index that lists all."""

    what: str
    bases: tuple[str, ...]  # where the repository is
    pins: Sequence[DebPin]
    files: Mapping[str, bytes]  # the index and, for a vendor's repository, its key


class Bundled(NamedTuple):
    """A bundle, written or only planned."""

    manifest: BundleManifest | None
    parts: list[BundlePart]
    left_out: Sequence[str]
    signed_by: str


def _needs(workspace: Workspace, request: BundleRequest, platform: str) -> _Needs:
    from pipeline.app.recipes import recipes_of

    checkout, home = workspace.checkout(), request.path.resolve().parent
    stages = read_stages(workspace, request.path)
    specs = read_yaml(request.path, RunPlan).stages
    recipes = recipes_of(workspace, ())
    known, recipe_names = checkout.images(), recipes.names()
    images: dict[tuple[str, str | None], None] = {}
    sets: dict[str, Sequence[Path]] = {}
    found: dict[str, Path] = {}
    left_out: list[str] = []
    written = {place for stage in stages for place in stage.outputs}
    for stage in stages:
        # `--option=value` is two words
        words = [w for x in stage.words for w in (x.split("=", 1) if x[:2] == "--" else [x])]
        named = [w for w in words if w in known]
        served = [recipes.read(w).image for w in words if w in recipe_names and w not in known]
        named += [image for image in served if image]
        is_build = any(words[: len(verb)] == verb for verb in _BUILDS)
        at = words.index("--platform") + 1 if "--platform" in words[:-1] else None
        chosen = words[at] if at else None if is_build else platform
        chosen = platform if chosen == "host" else chosen
        images |= {(name, chosen): None for name in named or (known if is_build else ())}
        if words[:2] == ["weights", "fetch"] and len(words) > 2:
            sets[words[2]] = [place for place in stage.outputs if place.is_dir()]
        for word in [*words, *specs[stage.name].inputs]:
            place = Path(os.path.normpath(home / word))
            # the target makes again what another stage writes
            is_made = any(out == place or out in place.parents for out in written)
            if word not in stage.inputs or is_made or place == request.path.resolve():
                continue
            if place == home or home not in place.parents:
                left_out.append(f"{word} of stage {stage.name}: is not below the plan's folder")
            else:
                below = [Path(e.path) for e in files_below(place)] if place.is_dir() else [place]
                found |= {str(each.relative_to(home)): each for each in below}
    has_hosts = any(list(stage.words[:2]) == ["host", "provision"] for stage in stages)
    return _Needs(stages, list(images), list(sets.items()), found, has_hosts, left_out)


def write_bundle(workspace: Workspace, request: BundleRequest, *, dry_run: bool = False) -> Bundled:
    """Bring all that a plan needs into a folder, list it and sign the list.

    Parts that are already right stay, so that the same command goes on after an interruption.
    """
    from pipeline.app.weights_hub import FetchRequest, fetch, plan_set

    # first of all: without a signature, hours of downloads are worthless
    signer = signer_of(request.key_path)
    platform = named_platform(request.platform) or host_platform()
    folder = Path(os.path.abspath(request.folder))  # noqa: PTH100 -- links stay as they are
    needs = _needs(workspace, request, platform)
    checkout, store, left_out = workspace.checkout(), workspace.store_to_read(), [*needs.left_out]
    git = [proc.find_tool("git", "A bundle holds the checkout as committed."), "-C"]
    git.append(str(checkout.root))
    commit = proc.read([*git, "rev-parse", "HEAD"]).stdout.decode().strip()
    if not commit:
        raise NoCheckout(f"{checkout.root}: has no commit", "Commit the checkout: `git init` …")
    changed = proc.read([*git, "status", "--porcelain", "-z"]).stdout.decode().split("\0")
    if edited := [line[3:] for line in changed if line and not line.startswith("??")]:
        message = f"{edited[0]}: is changed and not committed"
        raise SpecInvalid(message, "A bundle holds the checkout as committed: commit, or stash.")
    for name in (line[3:] for line in changed if line):
        new = checkout.root / name
        if not {new, *new.parents} & {folder} and new not in folder.parents:
            left_out.append(f"{name}: is in the checkout, and nobody committed it")
    plans = [
        plan_image(checkout, name, each)
        for name, chosen in needs.images
        for each in platforms_of(checkout.spec(name), chosen)
    ]
    built = {f"{p.spec.name}.{p.architecture}": b for p in plans if (b := find_built(store, p))}
    pins, foreign = inputs_of(workspace, needs.images)
    # a file, or a folder: what each part is for, and that nothing else lies there
    wanted = {f"mirror/{pin.file}": "inputs of images" for pin in pins.values()}
    wanted |= {"mirror/sha256": "foreign base images"} if foreign else {}
    wanted |= {f"mirror/{FOLDER}": "wheels of the tool", "keys": "public keys"}
    wanted |= {"plan": "the plan and its files", _CHECKOUT: f"checkout at {commit[:12]}"}
    wanted |= {f"images/{name}": f"image {name}" for name in built}
    wanted |= {"store": "what the store keeps of images"} if built else {}
    fetches: dict[str, FetchRequest] = {}
    for name, near in needs.sets:
        if request.weights:
            place = f"weights/{name.replace('/', '--')}"
            wanted[place] = f"weights {name}"
            neighbours = (*map(str, near), *request.neighbours)
            fetches[name] = FetchRequest(name, folder / place, neighbours=neighbours)
        else:
            left_out.append(f"weights {name}: --no-weights")
    repositories = _repositories(workspace, request, left_out) if needs.has_hosts else {}
    wanted |= {place: part.what for place, part in repositories.items()}
    if dry_run:
        sizes = [p.size_bytes for p in pins.values()]
        sizes += [b.size_bytes for base in foreign.values() for b in base.blobs]
        parts = [BundlePart("inputs of images", len(sizes), sum(sizes))]
        # known only to pip
        parts.append(BundlePart("wheels of the tool", None, None))
        for name, image in built.items():
            blobs = len(image.record.digests)
            parts.append(BundlePart(f"image {name}", blobs, image.record.size_bytes))
        for name, each in fetches.items():
            planned = [file.size_bytes for file in plan_set(workspace, each).files]
            parts.append(BundlePart(f"weights {name}", len(planned), sum(planned)))
        for part in repositories.values():
            sizes = [pin.size_bytes for pin in part.pins] + [len(x) for x in part.files.values()]
            parts.append(BundlePart(part.what, len(sizes), sum(sizes)))
        return Bundled(None, parts, left_out, signer.key_id)
    _files(folder, wanted)
    for name, chosen in needs.images:
        given = {"mirrors": request.mirrors, "bases": request.bases}
        collect_images(workspace, [name], folder / "mirror", chosen, **given)  # type: ignore[arg-type]
    collect_own_tool(workspace, folder / "mirror", platform, request.python)
    for image in built.values():
        _image(workspace, image, folder)
    for each in fetches.values():
        done = fetch(workspace, each)
        # a receipt holds for one disk, and what is no part of a set is no part of the bundle
        own_files = {done.place.lock_file, weights_record_path(done.place)}
        for entry in files_below(done.place.state):
            if Path(entry.path) not in own_files:
                Path(entry.path).unlink()
    for place, part in repositories.items():
        store, client = workspace.store(), NetClient(read_settings(request.mirrors))
        sources = Sources(client, partial(DebianMirror, part.bases, ()))
        fetcher = Fetcher(store, client, sources, offline=False)
        with store.in_use():
            collect(store, fetcher, part.pins, folder / place, as_archive=True)
        for name, data in part.files.items():
            write_bytes(folder / place / name, data)
    with os_errors_explained(folder):
        for name, path in {**needs.files, request.path.name: request.path}.items():
            write_bytes(folder / "plan" / name, path.read_bytes())
        for number, path in enumerate(trust_files(workspace)):
            write_bytes(folder / "keys" / f"trust{number or ''}.yaml", path.read_bytes())
        write_bytes(folder / "keys" / "bundle.pub", public_pem(signer.public).encode())
        # the same bytes for the same commit, whatever git is set to; nobody else may write files
        pack = ["-c", "tar.umask=0022", "archive", "--format=tar", commit]
        archived = proc.read([*git, *pack])
        if archived.returncode:
            raise NoCheckout(f"{checkout.root}: {proc.last_line(archived.stderr.decode())}")
        write_bytes(folder / _CHECKOUT, archived.stdout)
    files = _files(folder, wanted, is_read=True)
    manifest = BundleManifest(
        plan=f"plan/{request.path.name}",
        platform=platform,
        commit=commit,
        left_out=[log.printable(each)[:400] for each in left_out],
        files=files,
    )
    write_bytes(folder / MANIFEST, canonical_json(manifest.model_dump()) + b"\n")
    about = {
        "plan": sha256_of(request.path.read_bytes()),
        "platform": platform,
        "commit": commit,
        "files": len(files),
        "size_bytes": sum(file.size_bytes for file in files),
        "tool": {"name": "sm120-pipeline", "version": __version__},
    }
    sign_file(folder / MANIFEST, "bundle", about, signer)
    parts = []
    for what in dict.fromkeys(file.what for file in files):
        some = [file.size_bytes for file in files if file.what == what]
        parts.append(BundlePart(what, len(some), sum(some)))
    return Bundled(manifest, parts, left_out, signer.key_id)


def _repositories(
    workspace: Workspace, request: BundleRequest, left_out: list[str]
) -> dict[str, _AptPart]:
    """Map places in the bundle to each system's locked packages and its own archive's.

    Indexes stay as they were signed, so that apt on a host judges them as it judges the original.
    """
    from pipeline.app.hosts import check_lock
    from pipeline.hosts.lock import PackageIndex, read_package_index

    client, parts = NetClient(read_settings()), dict[str, _AptPart]()

    def read(
        bases: Sequence[str], keyring: Path, architecture: str, *suite: Any
    ) -> tuple[PackageIndex, dict[str, bytes]]:
        files: dict[str, bytes] = {}

        def read_and_keep(path: str, most_bytes: int) -> bytes:
            files[path] = read_below(client, bases, path, most_bytes)
            return files[path]

        return read_package_index(read_and_keep, keyring, architecture, *suite), files

    for name, target in check_lock(workspace).targets.items():
        if name not in request.repositories or not request.keyring:
            left_out.append(f"packages of {name}: --repository {name}=ADDRESS and --keyring FILE")
            continue
        (system, _, architecture), base = name.partition("/"), (request.repositories[name],)
        index, files = read(base, request.keyring, architecture)
        pins = list({pin.sha256: pin for pin in target.pins().values()}.values())
        for pin in pins:
            if pin.sha256 not in {each.get("SHA256") for each in index.stanzas.get(pin.name, ())}:
                raise LockStale(
                    f"{pin.file}: the repository of {name} no longer lists it",
                    "Lock again (`sm120 host lock`), or name a mirror of that day.",
                )
        folder = name.replace("/", "-")
        files |= {"keyring": request.keyring.read_bytes()}
        parts[f"hosts/{folder}"] = _AptPart(f"packages of {name}", base, pins, files)
        named, what = request.archives.get(name), f"packages of the own archive of {name}"
        if not request.archive:
            left_out.append(f"{what}: --no-archive")
            continue
        keyring = request.archive_keyring or (DEBIAN_12_KEYRING if system == "debian-12" else None)
        if keyring is None or not (named or system.startswith("debian-")):
            left_out.append(f"{what}: --archive {name}=ADDRESS and --archive-keyring FILE")
            continue
        bases = (named,) if named else debian_mirror().main
        index, files = read(bases, keyring, architecture, *_SUITES[system])
        by_role = read_yaml(workspace.checkout().root / SYSTEM_PACKAGES, RolePackages).root
        if unknown := sorted({*request.roles} - by_role.keys()):
            hint = f"Roles that do: {', '.join(by_role)}."
            raise SpecInvalid(f"{unknown[0]}: is no role that installs such packages", hint)
        chosen = {p for role in request.roles or by_role for p in by_role[role]}
        # a role names a package that only some systems have; who names one himself wants it
        missing = sorted(chosen - index.stanzas.keys())
        left_out += [f"{each}: the archive of {name} has no such package" for each in missing]
        wanted = {*chosen, *request.packages} - {*missing}
        offered = [stanza for versions in index.stanzas.values() for stanza in versions]
        pins = resolve_closure([offered], wanted, architecture)
        parts[f"system/{folder}"] = _AptPart(what, bases, pins, files)
        if not any(each.startswith("linux-headers-") for each in wanted):
            kernel = "headers of the hosts' kernel, which compile the driver"
            left_out.append(f"{kernel}: --package linux-headers-VERSION")
    return parts


def _image(workspace: Workspace, built: Built, folder: Path) -> None:
    """Write a built image as `image export` does, and next to it the store's records."""
    store, plan, record = workspace.store_to_read(), built.plan, built.record
    place = folder / "images" / f"{built.name}.{plan.architecture}"
    index = place / "index.json"
    # of an earlier run, maybe of another build
    if not index.is_file() or built.digest.encode() not in index.read_bytes():
        remove_tree(place)
        export_image(workspace, built.name, place, built.platform)
    home, root = store.image_folder(built.name, built.platform), store.root
    write_bytes(folder / "store" / home.relative_to(root) / "image.json", record.dump())
    names = [f"contents/{x.record.digest[7:]}*.json" for x in record.layers]
    # so that other images on the same base take these layers as they are
    keys = [*(x.key for x in plan.all_layers()), *(x.key for x in plan.all_trees())]
    names += [f"layers/{key[7:]}.json" for key in keys]
    for path in (path for name in names for path in root.glob(name)):
        write_bytes(folder / "store" / path.relative_to(root), path.read_bytes())


def _files(folder: Path, wanted: Mapping[str, str], *, is_read: bool = False) -> list[BundleFile]:
    """List a bundle's files, hashed if `is_read`; refuse any that should not be there."""
    found: dict[Path, str] = {}
    for entry in files_below(folder):
        path = Path(entry.path)
        name = path.relative_to(folder).as_posix()
        # a killed run left it
        if path.name.startswith(".new-") or re.fullmatch(r"\..*\.partial", path.name):
            path.unlink()
            continue
        parents = [name, *(str(p) for p in Path(name).parents)]
        what = next((wanted[each] for each in parents if each in wanted), "")
        # a set's own state may lie there until the set is whole
        is_ours = what or name in (MANIFEST, _SIGNED)
        if not is_ours or not entry.is_file(follow_symlinks=False):
            fault = "is not a plain file" if is_ours else "is nothing that this plan needs"
            raise StoreUnwritable(f"{path}: {fault}", "Move it, or name a new folder.")
        if what:
            found[path] = what
    if not is_read:
        return []
    sizes = {path: path.stat().st_size for path in found}
    total = sum(sizes.values())
    title = f"Reading {log.count(len(found), 'file')}, {log.size(total)}"
    with log.step(title), log.progress("read", total) as bar, os_errors_explained(folder):

        def listed(path: Path) -> BundleFile:
            require_no_private_key(path, sizes[path])
            digest = sha256_of_file(path)
            bar.advance(sizes[path])
            name = path.relative_to(folder).as_posix()
            return BundleFile(path=name, size_bytes=sizes[path], sha256=digest, what=found[path])

        return on_all_cores(listed, sorted(found))


def require_no_private_key(path: Path, size_bytes: int) -> None:
    """Refuse a file that holds a private key: many people would carry and read it."""
    if size_bytes <= _MOST_SCANNED_BYTES and _PRIVATE.search(path.read_bytes()):
        raise KeyInvalid(
            f"{path}: holds a private key, and a bundle never does",
            "Take it out of the plan's folder or the checkout; a bundle needs public keys only.",
        )


class Unbundled(NamedTuple):
    """A bundle with every byte checked, and what was made from it."""

    manifest: BundleManifest
    folder: Path  # where its parts lie now
    source: Path  # the bundle itself, which keeps the images
    images: list[str]  # that are in the store now
    signed_by: str


def unbundle(
    workspace: Workspace,
    folder: Path,
    output: Path | None = None,
    *,
    platform: str | None = None,
    trust_path: Path | None = None,
    key_paths: tuple[Path, ...] = (),
) -> Unbundled:
    """Check the signature and every byte of a bundle; then lay out what other commands use."""
    path = folder / MANIFEST
    if not folder.is_dir() or not os.path.lexists(path):
        raise BundleInvalid(f"{folder}: holds no {MANIFEST}")
    for each in (path, folder / _SIGNED):
        if not os.path.lexists(each):
            raise EvidenceUnsigned(f"{each}: is missing, so nobody vouches for the bundle", _AGAIN)
        if not stat.S_ISREG(each.lstat().st_mode):
            raise BundleDamaged(f"{each}: is not a plain file")
    data = read_limited(path, _MOST_BYTES, BundleDamaged)
    trust = with_named_keys(trust_of(workspace, trust_path), key_paths)
    artifact = Artifact(str(path), sha256_of(data), size_bytes=len(data))
    items = gather_envelopes([folder / _SIGNED])
    judged = walk_evidence(artifact, items, trust, None, datetime.now(UTC), only=BUNDLE)
    if error := verdict_error(judged.node):
        # the key must not come with what it vouches for
        if not isinstance(error, EvidenceUnsigned):
            error.hint = f"Nothing was used. {_TRUSTED}"
        raise error
    # nothing in it was trusted before this
    try:
        manifest = BundleManifest.model_validate_json(data)
    except ValidationError as wrong:
        raise BundleInvalid(f"{path}: {mistakes(wrong)}") from wrong
    here = named_platform(platform) or host_platform()
    if manifest.platform != here:
        raise BundleInvalid(
            f"{folder}: is for {manifest.platform}, and this machine is {here}",
            f"Take it to such a machine, or name it: --for {manifest.platform}.",
        )
    _check(folder, manifest)
    place = folder
    if output is not None:
        place = Path(os.path.abspath(output))  # noqa: PTH100 -- links stay as they are
        whole = Path(os.path.abspath(folder))  # noqa: PTH100
        if {place, *place.parents} & {whole}:
            raise StoreUnwritable(f"{place}: is in the bundle itself", "Name another folder.")
        packed = next(file for file in manifest.files if file.path == _CHECKOUT)
        is_there = is_whole(place / _CHECKOUT, packed.sha256, packed.size_bytes)
        if (place / "checkout").exists() and not is_there:
            # whoever works in it would lose that, or find two commits mixed
            fault = f"{place / 'checkout'}: is not of this bundle"
            raise StoreUnwritable(fault, "Name a new folder.")
        total = sum(file.size_bytes for file in manifest.files)
        need_space_for_copies(folder, place, total)
        with log.step(f"Writing {place}"), log.progress("written", total) as bar:
            for file in manifest.files:
                target = place / file.path
                # images are in the store
                if file.path.startswith(("images/", "store/")):
                    continue
                if not is_whole(target, file.sha256, file.size_bytes):
                    with os_errors_explained(target):
                        target.parent.mkdir(parents=True, exist_ok=True)
                        partial_ = target.with_name(f".{target.name}.partial")
                        partial_.unlink(missing_ok=True)
                        link_or_copy(folder / file.path, partial_)
                        if sha256_of_file(partial_) != file.sha256:
                            raise BundleDamaged(f"{folder / file.path}: changed while it was read")
                        os.replace(partial_, target)
                bar.advance(file.size_bytes)
        if not (place / "checkout").exists():
            half = place / ".checkout.partial"
            remove_tree(half)
            half.mkdir()
            tar = proc.find_tool("tar", "It unpacks the checkout.")
            words = ["--extract", "--no-same-owner", "--file", str(place / _CHECKOUT)]
            done = proc.read([tar, *words, "--directory", str(half)])
            if done.returncode:
                reason = proc.last_line(done.stderr.decode(errors="replace"))
                raise StoreUnwritable(f"{place / _CHECKOUT}: {reason}")
            # a power cut must not leave a checkout of empty files, which the next run would believe
            with os_errors_explained(half):
                for entry in files_below(half):
                    if entry.is_file(follow_symlinks=False):
                        sync(Path(entry.path))
            half.rename(place / "checkout")
    names = _keep(workspace, folder)
    signers = {key.name for opened in judged.believed for key in opened.keys}
    return Unbundled(manifest, place, folder, names, ", ".join(sorted(signers)))


_TRUSTED = (
    "The public key of who made it, as you got it another way than with the bundle: --key FILE.pub."
)
_AGAIN = "Copy the bundle again from where it was made."


def _check(folder: Path, manifest: BundleManifest) -> None:
    """Check that exactly the listed files are there: names first, then sizes, then bytes."""
    listed = {file.path: file for file in manifest.files}
    if len(listed) != len(manifest.files):
        raise BundleInvalid(f"{folder / MANIFEST}: names a file twice")
    present = set()
    for entry in files_below(folder):
        name = Path(entry.path).relative_to(folder).as_posix()
        if name in (MANIFEST, _SIGNED):
            continue
        if not entry.is_file(follow_symlinks=False):
            raise BundleDamaged(f"{entry.path}: is a link or a device, not a plain file")
        if name not in listed:
            raise BundleDamaged(f"{entry.path}: is not listed in {MANIFEST}", _EXTRA)
        present.add(name)
    if missing := sorted(listed.keys() - present):
        more = f", and {len(missing) - 1} more" if missing[1:] else ""
        raise BundleDamaged(f"{folder / missing[0]}: is missing{more}")
    total = sum(file.size_bytes for file in manifest.files)
    title = f"Checking {log.count(len(listed), 'file')}, {log.size(total)}"
    with log.step(title), log.progress("read", total) as bar, os_errors_explained(folder):

        def check(file: BundleFile) -> None:
            path = folder / file.path
            size = path.stat().st_size
            if size != file.size_bytes:
                raise BundleDamaged(f"{path}: has {size} bytes, not {file.size_bytes}")
            if (digest := sha256_of_file(path)) != file.sha256:
                raise BundleDamaged(f"{path}: has {digest}, not {file.sha256}")
            require_no_private_key(path, size)
            bar.advance(size)

        on_all_cores(check, manifest.files)


_EXTRA = "Nothing was used. Move it away if you put it there; else do not use the bundle."


def _keep(workspace: Workspace, folder: Path) -> list[str]:
    """Bring the images of a checked bundle into the store, with their evidence."""
    names = []
    records = sorted((folder / "store" / "images").glob("*/*/image.json"))
    store = workspace.store() if records else None
    for path in records:
        assert store is not None  # there are records
        record, name = read_image_record(path), path.parts[-3]
        platform = path.parts[-2].replace("-", "/", 1)
        layout = folder / "images" / f"{name}.{platform.rpartition('/')[2]}"
        with store.in_use(), log.step(f"Keeping {name} for {platform}"):
            for digest in sorted(record.digests):
                source = layout / "blobs" / "sha256" / digest[7:]
                # the documents of a foreign base are no part of a layout
                if source.is_file() and not store.blob_path(digest).is_file():
                    with store.new_blob() as blob:
                        link_or_copy(source, blob.path)
                        blob.keep(digest)
            for entry in (
                e
                for part in ("contents", "layers")
                for e in (folder / "store" / part).glob("*.json")
            ):
                store.write(store.root / entry.relative_to(folder / "store"), entry.read_bytes())
            statements_place = evidence_folder(store, name, platform, record.digest)
            for statement in sorted((layout / "records").glob(f"*{SUFFIX}")):
                store.write(statements_place / statement.name, statement.read_bytes())
            # last: where it exists, the whole image does
            store.keep_image(name, platform, record)
        names.append(f"{name} for {platform}")
    return names


def serve_bundle(
    workspace: Workspace, done: Unbundled, *, host: str, port: int
) -> AbstractContextManager[ServedHub]:
    """Serve a checked bundle at one address: index, mirror, apt repositories, registry, Hub.

    `simple/` is an index for pip and uv, `mirror/` goes with --mirror, `hosts/` and `system/` with
    apt, `v2/` is a registry to read from, and all else is the Hub's, for the sets of weights.
    """
    from pipeline.app.weights_hub import serve_hub
    from pipeline.weights.disk.hashing import identity_of
    from pipeline.weights.serve.http import FilePart, Response

    own = ("mirror/", "hosts/", "system/")
    served = {f.path: f for f in done.manifest.files if f.path.startswith(own)}
    blobs = {f.path: f for f in done.manifest.files if f.path.startswith("images/")}
    tags: dict[str, dict[str, Descriptor]] = {}  # of each image, by its processor
    for path in (done.source / "store" / "images").glob("*/*/image.json"):
        processor = path.parts[-2].partition("-")[2]
        tags.setdefault(path.parts[-3], {})[processor] = read_image_record(path).descriptor
    projects: dict[str, list[BundleFile]] = {}
    for file in served.values():
        if file.path.endswith(".whl"):
            name = file.path.rpartition("/")[2].partition("-")[0]
            # as indexes spell names: https://peps.python.org/pep-0503/#normalized-names
            projects.setdefault(re.sub(r"[-_.]+", "-", name).lower(), []).append(file)

    def page(links: Mapping[str, str]) -> Response:
        rows = [f'<a href="{escape(to)}">{escape(text)}</a><br>' for text, to in links.items()]
        body = "<!DOCTYPE html><html><body>\n" + "\n".join(rows) + "\n</body></html>\n"
        return Response(200, {"Content-Type": "text/html; charset=utf-8"}, body.encode())

    def answer(request: Request) -> Response | None:
        # apt asks for the index of a flat repository at `./InRelease`
        parts = [part for part in request.split()[0] if part != "."] or [""]
        if request.method not in ("GET", "HEAD"):
            return None
        if parts[0] == "simple" and [*filter(None, parts)][1:] == []:
            return page({name: f"/simple/{name}/" for name in sorted(projects)})
        if parts[0] == "simple" and (wheels := projects.get(parts[1])):
            where = {f.path: f"/{quote(f.path)}#sha256={f.sha256[7:]}" for f in wheels}
            return page({path.rpartition("/")[2]: to for path, to in where.items()})
        if parts == ["mirror", FOLDER, ""]:
            # for --find-links, without an index: the tool alone, for hosts that have no Internet
            wheels = [f for f in served.values() if f.path.startswith(f"mirror/{FOLDER}/")]
            return page({f.path.rpartition("/")[2]: f"/{quote(f.path)}" for f in wheels})
        folder, file = done.folder, served.get("/".join(parts))
        headers = {"Content-Type": "application/octet-stream"}
        # https://github.com/opencontainers/distribution-spec/blob/main/spec.md, as far as it reads
        if parts in (["v2"], ["v2", ""]):
            return Response(200, {"Content-Type": "application/json"}, b"{}")
        if parts[0] == "v2" and len(parts) == 4 and (images := tags.get(parts[1])):
            _, name, kind, reference = parts
            if (kind, reference) == ("tags", "list"):
                body = canonical_json({"name": name, "tags": sorted(images)})
                return Response(200, {"Content-Type": "application/json"}, body)
            if kind == "manifests":
                found = [d for t, d in images.items() if reference in (t, d.digest)]
                reference = found[0].digest if found else ""
                headers = {"Content-Type": found[0].media_type} if found else {}
            headers["Docker-Content-Digest"] = reference
            place = f"blobs/sha256/{reference.removeprefix('sha256:')}"
            folder = done.source
            blobs_of_images = (blobs.get(f"images/{name}.{each}/{place}") for each in images)
            file = next(filter(None, blobs_of_images), None)
        if file is None:
            return None
        # does not follow a link that was put there since
        handle = os.open(folder / file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        part = FilePart(handle, 0, file.size_bytes, identity_of(os.fstat(handle)))
        return Response(200, headers, part=part)

    folders = sorted(path for path in (done.folder / "weights").glob("*") if path.is_dir())
    return serve_hub(workspace, folders, host=host, port=port, answer_first=answer)
