"""From a source's lock and a toolchain to a layer: unpack, patch, run the steps, keep outputs."""

from __future__ import annotations

import gzip
import os
import re
import shutil
import tarfile
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TextIO

from pipeline.artifacts.containers.backend import (
    SandboxBackend,
    StepContainer,
    StepLimits,
    run_step,
)
from pipeline.artifacts.containers.docker import Docker, default_tag
from pipeline.artifacts.oci.record import FileRow, Kind, LayerRecord, WrittenLayer
from pipeline.artifacts.store.store import Store, read_own
from pipeline.core import errors, log, proc
from pipeline.core.files import atomic_file, os_errors_explained
from pipeline.core.model import Digest, Frozen
from pipeline.images.assemble.golden import Golden
from pipeline.images.assemble.image import Built
from pipeline.images.assemble.layer import Entry, Slice, read_pieces, with_parents, write_layer
from pipeline.images.assemble.plan import TreePlan
from pipeline.images.source import objects as object_cache
from pipeline.images.source.archive import add_files, apply_patches, unpack_source
from pipeline.images.source.objects import ObjectCounts
from pipeline.images.source.outputs import MachineCode, declared_outputs, judge_outputs
from pipeline.images.source.toolchain import NOT_HERE, unpacked_root
from pipeline.images.spec.checkout import Checkout

if TYPE_CHECKING:
    from pipeline.images.fetch.inputs import Fetcher

# The folders of a build. Compilers write paths into what they make, so these never change.
SOURCE, BUILD, OBJECTS, TEMPORARY = "/src", "/build", "/objects", "/tmp"  # noqa: S108
SHARED = "/shared"  # objects of other machines, where a build takes such
# How long a build may take in all: so many times its measured CPU time, and never less than this.
SLOWEST_MACHINE = 20.0
SHORTEST_LIMIT_S = 3600.0
MINUTE_S = 60.0
# How much of a failed step's output is part of the error; the log has all of it.
_SHOWN_LINES = 40
_NO_SPACE = "No space left on device"
# How compilers, linkers and shells name the reason; the first such line is shown.
_REASONS = (_NO_SPACE, "error:", "rror: ", "Killed", "memory exhausted", "allocate memory")
# 1980-01-01: the oldest date that zip files can hold, and what layers have for every file.
_EPOCH = "315532800"
# Finished and total, in brackets that no compiler prints at a line's start.
_NINJA_STATUS = "[%f/%t] "
_NINJA_LINE = re.compile(r"^\[(\d+)/(\d+)\] ")


class TakenLayer(Frozen):
    """The signed statement about a layer that another machine compiled."""

    statement: Digest  # of the signed bytes
    signed_by: list[Digest]  # the trusted keys


class CompiledTree(Frozen):
    """The record that the store keeps of a compiled tree, besides its layer."""

    key: str
    source: str
    build: str
    platform: str
    toolchain: str  # the digest of its image
    layer: str
    sandbox: str
    seconds: float
    objects: ObjectCounts
    version: str
    code: MachineCode = MachineCode()
    taken: TakenLayer | None = None  # none: it was compiled in this store

    def dump(self) -> bytes:
        return self.model_dump_json(exclude_none=True).encode()


@dataclass(frozen=True)
class Compiler:
    """What compiling needs besides the plan."""

    checkout: Checkout
    store: Store
    make_fetcher: Callable[[], Fetcher]
    build_toolchain: Callable[[TreePlan], Built]
    backend: SandboxBackend
    jobs: int = 0  # 0: as many as cores and memory allow
    memory_bytes: int = 0  # 0: nearly all there is
    object_cache: str = ""  # the address of objects that other machines share


def compile_tree(compiler: Compiler, plan: TreePlan) -> LayerRecord:
    """Returns the layer of a compiled tree, and makes it unless the store has it."""
    store, backend = compiler.store, compiler.backend
    with store.locked(f"tree-{plan.key.removeprefix('sha256:')}"):
        shares = bool(compiler.object_cache)
        before_layer = store.layer(plan.key)
        # compile a tree with others' objects again without them: the bytes must be the same
        is_foreign = bool(before_layer) and not shares and is_imported(store, plan)
        if before_layer and not is_foreign:
            return before_layer
        toolchain = compiler.build_toolchain(plan)
        with store.scratch() as scratch:
            start, before = time.monotonic(), object_cache.kept_objects(store)
            folders = {name: scratch / name.strip("/") for name in (SOURCE, BUILD, TEMPORARY)}
            for folder in folders.values():
                folder.mkdir()
            _bring_source(compiler, plan, folders[SOURCE])
            # late: an HTTP client, which a build with nothing to compile need not load
            from pipeline.images.source.shared import SharedObjects

            shared = (
                SharedObjects(compiler.object_cache, scratch / "shared", plan) if shares else None
            )
            container = _container(compiler, plan, toolchain, folders, scratch)
            if shared:
                shared.bring(container.mounts[OBJECTS])
            if backend.kind == "docker":
                Docker().load(store, toolchain.name, toolchain.digest)
            _run_steps(store, backend, container, plan)
            if damaged := object_cache.replaced_objects(store, before):
                text = log.count(damaged, "kept object was", "kept objects were")
                log.say(f"  {text} damaged, and compiled again")
            outputs = declared_outputs(plan, folders[BUILD])
            code = judge_outputs(backend, container, plan, outputs)
            written = write_outputs(store, plan, outputs)
            version = ""
            if plan.build.version:
                # run in the toolchain, where a result for another processor may not start
                lines: list[str] = []
                failed = run_step(backend, container, plan.build.version, lines.append)
                version = f"ended with {failed}" if failed else "\n".join(lines[:20])
            tree = CompiledTree(
                key=plan.key,
                source=plan.source.name,
                build=plan.name,
                platform=plan.platform,
                toolchain=toolchain.digest,
                layer=written.record.digest,
                sandbox=backend.kind,
                seconds=round(time.monotonic() - start, 1),
                objects=object_cache.count_objects(folders[TEMPORARY], is_shared=shares),
                version=version,
                code=code,
            )
            log.say(f"  {objects_text(tree.objects)}")
            if shared:
                shared.send()
            if before_layer and before_layer.digest != written.record.digest:
                log.say(
                    f"  {plan.title}: with others' objects it was {before_layer.digest}, without"
                    f" them it is {written.record.digest}: a shared object is wrong"
                )
            return _keep(store, plan, tree, written)


def _keep(store: Store, plan: TreePlan, tree: CompiledTree, written: WrittenLayer) -> LayerRecord:
    # before the layer gets its key: every layer in the store has the record of how it was made
    store.write(tree_path(store, plan.key), tree.dump())
    return store.keep_layer(plan.key, written)


def objects_text(counts: ObjectCounts) -> str:
    """Says where a tree's objects came from."""
    others = f", {counts.imported} of other machines" if counts.imported else ""
    return (
        f"{log.count(counts.compiled, 'object')} compiled, {counts.kept} kept from before{others}"
    )


def is_imported(store: Store, plan: TreePlan) -> bool:
    """Whether a tree of this store was compiled with objects of other machines."""
    return tree_path(store, plan.key).exists() and read_tree(store, plan).objects.imported > 0


def require_decided(store: Store, golden: Golden, plan: TreePlan) -> None:
    """Refuse to sign what objects of other machines decided alone.

    Whoever may write to their folder chose those bytes. A golden digest, or a build without them,
    shows that they are what the source gives.
    """
    if not is_imported(store, plan):
        return
    layer = read_tree(store, plan).layer
    known = [image for image in golden.images.values() if image.layers.get(plan.title) == layer]
    if not any(plan.key in image.inputs.get("compiled", ()) for image in known):
        raise errors.GoldenMismatch(
            f"{plan.title}: was compiled with objects of other machines, and no golden digest has"
            f" its layer {layer}",
            f"`sm120 source build {plan.source.name} {plan.name}` compiles it without them.",
        )


def tree_path(store: Store, key: str) -> Path:
    """The file of the store that records a compiled tree."""
    return store.root / "trees" / f"{key.removeprefix('sha256:')}.json"


def compiled_layer(store: Store, plan: TreePlan) -> LayerRecord:
    """The layer of a tree that this store holds."""
    record = store.layer(plan.key)
    if record is None:
        compile_it = f"`sm120 source build {plan.source.name} {plan.name}` does it."
        raise errors.UnknownSource(f"{plan.title} is not compiled", compile_it)
    return record


def _bring_source(compiler: Compiler, plan: TreePlan, folder: Path) -> None:
    pin = plan.lock.archive
    with log.progress("fetched", pin.size_bytes) as bar:
        archive = compiler.make_fetcher().fetch(pin, bar)
    with log.step(f"Unpacking {pin.file}"):
        unpacked = unpack_source(archive, plan.source.archive, folder, pin.file)
    if unpacked.tree != plan.lock.tree:
        raise errors.DigestMismatch(
            f"{plan.title}: its files are {unpacked.tree}, locked as {plan.lock.tree}",
            "Nothing was compiled. `sm120 source lock SOURCE` locks what is there now.",
        )
    own = compiler.checkout.source_folder(plan.source.name)
    add_files(plan.source, own, folder)
    apply_patches(plan.source, own, folder)


def _container(
    compiler: Compiler, plan: TreePlan, toolchain: Built, folders: Mapping[str, Path], scratch: Path
) -> StepContainer:
    build, shares = plan.build, bool(compiler.object_cache)
    objects = object_cache.objects_folder(compiler.store, is_shared=shares)
    objects.mkdir(parents=True, exist_ok=True)
    remote = {}
    if shares:
        folders = {**folders, SHARED: scratch / "shared"}
        folders[SHARED].mkdir()
        remote["CCACHE_REMOTE_STORAGE"] = f"file:{SHARED}"
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory_bytes = compiler.memory_bytes or int(total * 0.95)
    # as many jobs as there are cores, and fewer where memory would not hold them
    by_memory = max(1, int(memory_bytes * 0.95) // (build.job_memory_mb << 20))
    return StepContainer(
        root=unpacked_root(compiler.store, toolchain),
        image=default_tag(toolchain.name, toolchain.digest),
        mounts={**folders, OBJECTS: objects},
        env={
            **plan.toolchain.variables,
            "HOME": BUILD,
            "LC_ALL": "C.UTF-8",
            "TZ": "UTC",
            "SOURCE_DATE_EPOCH": _EPOCH,
            "NINJA_STATUS": _NINJA_STATUS,
            # ccache: all that decides an object's bytes is part of its key
            **{f"CMAKE_{x}_COMPILER_LAUNCHER": "ccache" for x in ("C", "CXX", "CUDA")},
            "CCACHE_DIR": OBJECTS,
            "CCACHE_CONFIGPATH": f"{OBJECTS}/none",  # no settings but these
            "CCACHE_COMPILERCHECK": "content",
            "CCACHE_COMPRESSLEVEL": "5",
            "CCACHE_MAXSIZE": "30G",
            "CCACHE_STATSLOG": f"{TEMPORARY}/{object_cache.STATS}",
            "CCACHE_UMASK": "022",
            # with its own path in a preprocessed file, two equal trees would have different keys
            "CCACHE_NOHASHDIR": "1",
            **remote,
            **build.env,
        },
        limits=StepLimits(
            cpus=compiler.jobs or min(len(os.sched_getaffinity(0)), by_memory),
            memory_bytes=memory_bytes,
            silent_s=build.silent_minutes * MINUTE_S,
            most_s=max(SHORTEST_LIMIT_S, SLOWEST_MACHINE * build.cpu_minutes * MINUTE_S),
        ),
        scratch=scratch,
    )


def _run_steps(
    store: Store, backend: SandboxBackend, container: StepContainer, plan: TreePlan
) -> None:
    """Runs the steps, logs their output, and now and then says how far ninja is."""
    lines, jobs = list[str](), container.limits.cpus
    # the toolchain may be for another processor than this machine's
    if run_step(backend, container, ["true"], lines.append):
        toolchain = f"{plan.toolchain.spec.name} for {plan.toolchain.platform}"
        raise errors.SandboxUnavailable(
            f"{plan.title}: this machine does not run its toolchain, {toolchain}"
            f" ({lines[-1].strip()[:200] if lines else 'no reason given'})",
            NOT_HERE,
        )
    log_path = store.root / "logs" / f"{plan.source.name}-{plan.name}.log"
    log_path.parent.mkdir(exist_ok=True)
    expected = f"about {log.seconds(plan.build.cpu_minutes / jobs * 60)}"
    with (
        log.step(f"Compiling {plan.title}, {expected} with {log.count(jobs, 'job')}"),
        log_path.open("w", buffering=1) as out,
    ):
        for step in plan.build.steps:
            command = [part.replace("{jobs}", str(jobs)) for part in step.run]
            _run(backend, container, f"{plan.title}: {step.name}", command, out)


def _run(
    backend: SandboxBackend, container: StepContainer, label: str, command: list[str], out: TextIO
) -> None:
    shown = list[str]()
    start = printed_at = time.monotonic()

    def see(line: str) -> None:
        nonlocal printed_at
        out.write(line + "\n")
        shown.append(line)
        del shown[:-_SHOWN_LINES]
        now, match = time.monotonic(), _NINJA_LINE.match(line)
        done, total = map(int, match.groups()) if match else (0, 0)
        if done and now - printed_at >= log.QUIET_LINE_EVERY_S:
            printed_at = now
            rest = log.seconds((now - start) / done * (total - done))
            log.say(f"  {label}: {done} of {total}, {rest} left")

    out.write(f"$ {' '.join(command)}\n")
    try:
        code = run_step(backend, container, command, see)
    except errors.StepFailed as error:
        raise errors.StepFailed(f"{label}: {error}; log: {out.name}") from error
    if code:
        named = (line for line in shown if any(part in line for part in _REASONS))
        reason = next(named, proc.last_line("\n".join(shown)))
        text = f"{label} ended with {code}: {reason.strip()[:300]}; log: {out.name}"
        raise (errors.DiskFull if _NO_SPACE in reason else errors.StepFailed)(text)


def read_tree(store: Store, plan: TreePlan) -> CompiledTree:
    """The record of how a tree was compiled."""
    try:
        return CompiledTree.model_validate_json(read_own(tree_path(store, plan.key)))
    except FileNotFoundError as error:
        raise errors.UnknownSource(f"{plan.title} is not compiled") from error
    except ValueError as error:
        raise errors.StoreDamaged(
            f"{plan.title}: the record of how it was compiled is damaged"
        ) from error


def write_outputs(
    store: Store, plan: TreePlan, files: Mapping[str, Path], must_be: str = ""
) -> WrittenLayer:
    """Packs the declared outputs, and nothing else, as a layer.

    With `must_be`, a layer of another digest is an error, and is not kept.
    """
    entries = []
    for output in plan.outputs:
        path = files[output.source]
        mode = 0o755 if output.executable else 0o644
        content = Slice(str(path), 0, path.stat().st_size)
        place = f"{plan.build.to.strip('/')}/{output.to}"
        entries.append(Entry(place, Kind.FILE, mode, content, owner=plan.source.name))
    with store.new_blob() as blob:
        with os_errors_explained(blob.path), blob.path.open("wb") as out:
            written = write_layer(with_parents(entries), out)
        if must_be not in ("", written.record.digest):
            raise errors.LayerRefused(
                f"{plan.title}: {must_be} holds more than the files of this tree, or packs them"
                f" otherwise: they give {written.record.digest}"
            )
        blob.keep(written.record.digest)
    return written


def keep_taken(
    store: Store, plan: TreePlan, blob: Path, record: LayerRecord, tree: CompiledTree
) -> LayerRecord:
    """Unpacks the files that the spec declares, packs them again, and keeps an equal layer.

    Equal bytes prove that another machine's layer holds these files and nothing else, with the
    modes and in the order of one that this store compiled; and the table of contents is our own.
    """
    places = {f"{plan.build.to.strip('/')}/{x.to}": x.source for x in plan.outputs}
    files: dict[str, Path] = {}
    with store.scratch() as folder, log.step(f"Checking the files of {plan.title}"):
        try:
            with os_errors_explained(folder), tarfile.open(blob, "r:gz") as layer:
                for member in layer:
                    if member.name not in places or not member.isfile():
                        continue
                    content = layer.extractfile(member)
                    # a stated size that is not true must not fill the disk
                    if content is None or member.size > record.unpacked_bytes:
                        break
                    path = folder / str(len(files))
                    with path.open("wb") as out:
                        shutil.copyfileobj(content, out)
                    files[places[member.name]] = path
        except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
            message = f"{plan.title}: {record.digest} is no layer that can be read ({error})"
            raise errors.LayerRefused(message) from error
        if absent := sorted({*places.values()} - {*files}):
            raise errors.LayerRefused(f"{plan.title}: {record.digest} holds no {absent[0]}")
        written = write_outputs(store, plan, files, record.digest)
    return _keep(store, plan, tree, written)


def export_tree(store: Store, record: LayerRecord, below: str, folder: Path) -> dict[Path, FileRow]:
    """Writes a tree's files without the image's folders above them, each hashed again."""
    written = {}
    for row in store.contents(record):
        if row.kind != Kind.FILE:
            continue
        place = folder / PurePosixPath(row.path).relative_to(below.strip("/"))
        with os_errors_explained(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(place) as out:
                out.writelines(read_pieces(store.blob_path(record.digest), row))
            place.chmod(row.mode)
        written[place] = row
    return written
