"""From a source's lock and a toolchain to a layer: unpack, patch, run the steps, keep outputs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from pipeline import log, proc
from pipeline.assemble.entry import Entry, Slice, with_parents
from pipeline.assemble.image import Built
from pipeline.assemble.layer import write_layer
from pipeline.assemble.plan import TreePlan
from pipeline.errors import (
    DigestMismatch,
    DiskFull,
    LayerRefused,
    SandboxUnavailable,
    StepFailed,
    StoreDamaged,
    UnknownSource,
)
from pipeline.files import os_errors_explained
from pipeline.model import Digest, Frozen
from pipeline.oci import docker
from pipeline.oci.record import Kind, LayerRecord, WrittenLayer
from pipeline.source.archive import unpack
from pipeline.source.box import Box, Limits, Way, run_step
from pipeline.source.objects import (
    ObjectCounts,
    cache_settings,
    count_objects,
    kept_objects,
    objects_folder,
    replaced_objects,
)
from pipeline.source.outputs import MachineCode, declared_outputs, judge_outputs
from pipeline.source.patched import add_files, apply_patches
from pipeline.source.progress import NINJA_STATUS, NinjaProgress
from pipeline.source.toolchain import NOT_HERE, unpacked_root
from pipeline.spec.checkout import Checkout
from pipeline.store.store import Store, read_own

if TYPE_CHECKING:
    from pipeline.fetch.inputs import Fetcher

# Where a build finds its folders. Compilers write paths into what they make, so these never change.
SOURCE, BUILD, OBJECTS, TEMPORARY = "/src", "/build", "/objects", "/tmp"  # noqa: S108
# How long a build may take in all: so many times its measured CPU time, and never less than this.
SLOWEST_MACHINE = 20.0
SHORTEST_LIMIT_S = 3600.0
MINUTE_S = 60.0
# How much of a failed step's output is part of the error; the log has all of it.
_SHOWN_LINES = 40
_NO_SPACE = "No space left on device"
# How compilers, linkers and shells say why; the first such line is the reason.
_REASONS = (_NO_SPACE, "error:", "rror: ", "Killed", "memory exhausted", "allocate memory")
# 1980-01-01: the oldest date that zip files can hold, and what layers have for every file.
_EPOCH = "315532800"


class TakenLayer(Frozen):
    """Whose word stands for a layer that was compiled on another machine."""

    statement: Digest  # of the signed bytes
    signed_by: list[Digest]  # the trusted keys


class CompiledTree(Frozen):
    """What is remembered of a compiled tree beside its layer."""

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
        """As the store keeps it."""
        return self.model_dump_json(exclude_none=True).encode()


@dataclass(frozen=True)
class Compiler:
    """What compiling needs beside the plan."""

    checkout: Checkout
    store: Store
    make_fetcher: Callable[[], Fetcher]
    build_toolchain: Callable[[TreePlan], Built]
    way: Way
    jobs: int = 0  # 0: as many as cores and memory allow
    memory_bytes: int = 0  # 0: nearly all there is


def compile_tree(compiler: Compiler, plan: TreePlan) -> LayerRecord:
    """The layer of a compiled tree, made unless the store has it."""
    store = compiler.store
    with store.locked(f"tree-{plan.key.removeprefix('sha256:')}"):
        if known := store.layer(plan.key):
            return known
        toolchain = compiler.build_toolchain(plan)
        with store.scratch() as scratch:
            return _compile(compiler, plan, toolchain, scratch)


def _compile(compiler: Compiler, plan: TreePlan, toolchain: Built, scratch: Path) -> LayerRecord:
    store, start = compiler.store, time.monotonic()
    title = f"{plan.source.name} ({plan.name})"
    folders = {name: scratch / name.strip("/") for name in (SOURCE, BUILD, TEMPORARY)}
    for folder in folders.values():
        folder.mkdir()
    _bring_source(compiler, plan, folders[SOURCE], title)
    box = _box(compiler, plan, toolchain, folders, scratch)
    if compiler.way.kind == "docker":
        docker.load(store, toolchain.name, toolchain.digest, [box.image])
    _require_runs(compiler.way, box, plan)
    begun, kept = time.time(), kept_objects(store)
    logs = store.root / "logs"
    logs.mkdir(exist_ok=True)
    log_path = logs / f"{plan.source.name}-{plan.name}.log"
    with (
        log.step(f"Compiling {title}, {_expected(plan, box)}"),
        log_path.open("w", buffering=1) as out,
    ):
        for step in plan.build.steps:
            _run(compiler.way, box, plan, step.name, _command(step.run, box), out, log_path)
    if damaged := replaced_objects(store, kept):
        text = log.count(damaged, "kept object was", "kept objects were")
        log.say(f"  {text} damaged, and compiled again")
    outputs = declared_outputs(plan, folders[BUILD])
    code = judge_outputs(compiler.way, box, plan, outputs)
    written = write_outputs(store, plan, outputs)
    tree = CompiledTree(
        key=plan.key,
        source=plan.source.name,
        build=plan.name,
        platform=plan.platform,
        toolchain=toolchain.digest,
        layer=written.record.digest,
        sandbox=compiler.way.kind,
        seconds=round(time.monotonic() - start, 1),
        objects=count_objects(store, folders[TEMPORARY], begun),
        version=_version(compiler.way, box, plan),
        code=code,
    )
    # before the layer gets its key: a tree that is there always says how it was made
    store.write(tree_path(store, plan.key), tree.dump())
    record = store.keep_layer(plan.key, written)
    log.say(f"  {objects_text(tree.objects)}")
    return record


def objects_text(objects: ObjectCounts) -> str:
    """Where a tree's objects came from, for people."""
    text = f"{log.count(objects.compiled, 'object')} compiled, {objects.kept} kept from before"
    return f"{text}, {objects.imported} imported" if objects.imported else text


def tree_path(store: Store, key: str) -> Path:
    """Where the store remembers a compiled tree."""
    return store.root / "trees" / f"{key.removeprefix('sha256:')}.json"


def compiled_layer(store: Store, plan: TreePlan) -> LayerRecord:
    """The layer of a tree that this store holds."""
    record = store.layer(plan.key)
    if record is None:
        compile_it = f"`sm120 source build {plan.source.name} {plan.name}` does it."
        raise UnknownSource(f"{plan.title} is not compiled", compile_it)
    return record


def _bring_source(compiler: Compiler, plan: TreePlan, folder: Path, title: str) -> None:
    pin = plan.lock.archive
    with log.progress("fetched", pin.size_bytes) as bar:
        archive = compiler.make_fetcher().fetch(pin, bar)
    with log.step(f"Unpacking {pin.file}"):
        unpacked = unpack(archive, plan.source.archive, folder, pin.file)
    if unpacked.tree != plan.lock.tree:
        raise DigestMismatch(
            f"{title}: its files are {unpacked.tree}, locked as {plan.lock.tree}",
            "Nothing was compiled. `sm120 source lock SOURCE` locks what is there now.",
        )
    own = compiler.checkout.source_folder(plan.source.name)
    add_files(plan.source, own, folder)
    apply_patches(plan.source, own, folder)


def _box(
    compiler: Compiler,
    plan: TreePlan,
    toolchain: Built,
    folders: Mapping[str, Path],
    scratch: Path,
) -> Box:
    store = compiler.store
    objects = objects_folder(store)
    objects.mkdir(parents=True, exist_ok=True)
    base = {k: v for p in plan.toolchain.chain() for k, v in p.spec.env.items()}
    env = {
        **base,
        "HOME": BUILD,
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "SOURCE_DATE_EPOCH": _EPOCH,
        "NINJA_STATUS": NINJA_STATUS,
        **cache_settings(OBJECTS, TEMPORARY),
        **plan.build.env,
    }
    return Box(
        root=unpacked_root(store, toolchain),
        image=docker.default_tag(toolchain.name, toolchain.digest),
        mounts={**folders, OBJECTS: objects},
        env=env,
        limits=_limits(compiler, plan),
        scratch=scratch,
    )


def _require_runs(way: Way, box: Box, plan: TreePlan) -> None:
    """Try the toolchain: it may be for another processor than this machine's."""
    lines: list[str] = []
    if run_step(way, box, ["true"], lines.append):
        toolchain = f"{plan.toolchain.spec.name} for {plan.toolchain.platform}"
        raise SandboxUnavailable(
            f"{plan.title}: this machine does not run its toolchain, {toolchain}"
            f" ({lines[-1].strip()[:200] if lines else 'no reason given'})",
            NOT_HERE,
        )


def _limits(compiler: Compiler, plan: TreePlan) -> Limits:
    """As many jobs as there are cores, and fewer where memory would not hold them."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory_bytes = compiler.memory_bytes or int(total * 0.95)
    by_memory = max(1, int(memory_bytes * 0.95) // (plan.build.job_memory_mb << 20))
    jobs = compiler.jobs or min(len(os.sched_getaffinity(0)), by_memory)
    longest_s = SLOWEST_MACHINE * plan.build.cpu_minutes * MINUTE_S
    return Limits(
        cpus=jobs,
        memory_bytes=memory_bytes,
        silent_s=plan.build.silent_minutes * MINUTE_S,
        most_s=max(SHORTEST_LIMIT_S, longest_s),
    )


def _command(run: list[str], box: Box) -> list[str]:
    return [part.replace("{jobs}", str(box.limits.cpus)) for part in run]


def _expected(plan: TreePlan, box: Box) -> str:
    minutes = plan.build.cpu_minutes / box.limits.cpus
    return f"about {log.seconds(minutes * 60)} with {log.count(box.limits.cpus, 'job')}"


def _run(
    way: Way, box: Box, plan: TreePlan, name: str, command: list[str], out: TextIO, log_path: Path
) -> None:
    progress, shown = NinjaProgress(f"{plan.source.name} {name}"), list[str]()

    def see(line: str) -> None:
        out.write(line + "\n")
        progress.see(line)
        shown.append(line)
        del shown[:-_SHOWN_LINES]

    out.write(f"$ {' '.join(command)}\n")
    label = f"{plan.source.name} ({plan.name}): {name}"
    try:
        code = run_step(way, box, command, see)
    except StepFailed as error:
        raise StepFailed(f"{label}: {error}; log: {log_path}") from error
    if code:
        reason = next((x for x in shown if _is_reason(x)), proc.last_line("\n".join(shown)))
        text = f"{label} ended with {code}: {reason.strip()[:300]}; log: {log_path}"
        if _NO_SPACE in reason:
            raise DiskFull(text)
        raise StepFailed(text)


def _is_reason(line: str) -> bool:
    return any(part in line for part in _REASONS)


def read_tree(store: Store, plan: TreePlan) -> CompiledTree:
    """What the store remembers of a compiled tree."""
    try:
        return CompiledTree.model_validate_json(read_own(tree_path(store, plan.key)))
    except FileNotFoundError as error:
        raise UnknownSource(f"{plan.title} is not compiled") from error
    except ValueError as error:
        raise StoreDamaged(f"{plan.title}: the record of how it was compiled is damaged") from error


def write_outputs(
    store: Store, plan: TreePlan, files: Mapping[str, Path], must_be: str = ""
) -> WrittenLayer:
    """The declared outputs as a layer; what is not declared stays out.

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
            raise LayerRefused(
                f"{plan.title}: {must_be} holds more than the files of this tree, or packs them"
                f" otherwise: they give {written.record.digest}"
            )
        blob.keep(written.record.digest)
    return written


def _version(way: Way, box: Box, plan: TreePlan) -> str:
    """What the result says of itself, run in the toolchain; nothing where it cannot run there."""
    if not plan.build.version:
        return ""
    lines: list[str] = []
    code = run_step(way, box, plan.build.version, lines.append)
    return "\n".join(lines[:20]) if not code else f"ended with {code}"
