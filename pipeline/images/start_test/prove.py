"""Starts an image without a GPU, in namespaces, Docker or Podman, and keeps what it showed."""

from __future__ import annotations

import os
import platform
import posixpath
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from pipeline import __version__
from pipeline.artifacts.containers.backend import (
    SandboxBackend,
    StepContainer,
    StepLimits,
    run_step,
)
from pipeline.artifacts.containers.container_engine import find_engine
from pipeline.artifacts.containers.facts import require_same
from pipeline.artifacts.oci.config import ImageConfig, read_image_config
from pipeline.artifacts.oci.record import FileRow, Kind
from pipeline.artifacts.oci.tar_reader import open_layer
from pipeline.artifacts.store.store import Store
from pipeline.core import log, proc
from pipeline.core.errors import StartFails, StartUnknown, StepFailed
from pipeline.core.files import sha256_of_file
from pipeline.core.foreign_json import JsonInvalid, read_json
from pipeline.core.model import sha256_of
from pipeline.images.assemble.image import Built
from pipeline.images.assemble.layer import parents
from pipeline.images.engine.parser_flags import ParserFlags
from pipeline.images.engine.read_flags import SCRIPT as FLAGS_SCRIPT
from pipeline.images.gate.runs import ImageRun, RunTest
from pipeline.images.source.toolchain import unpacked
from pipeline.images.start_test.expected import StartExpectations, engine_of, wanted_of
from pipeline.images.start_test.inside.check import CHECKS, MARK

_INSIDE = Path(__file__).with_name("inside")
_SCRIPTS = (_INSIDE / "check.py", _INSIDE / "libraries.py", FLAGS_SCRIPT)
# The scripts and the bytecode have paths of their own: they hide nothing of the image.
_PLACE = "/sm120-start"
_BYTECODE = "/sm120-bytecode"
BYTECODE_VARIABLE = "PYTHONPYCACHEPREFIX"
_PYTHON_FOLDERS = ("usr/lib", "opt/venv/lib")
_DEEPEST = 30  # of folders below one another
_MOST_LINE_BYTES = 1 << 16
_SHOWN_LINES = 5
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
# Imports of an engine take half a minute, and half an hour in an emulator.
_LIMITS = StepLimits(
    cpus=os.cpu_count() or 1, memory_bytes=64 << 30, silent_s=7200.0, most_s=14400.0
)
_BINFMT = Path("/proc/sys/fs/binfmt_misc")
_WRITE_AND_ENTER = 0o3  # to make files in a folder a user must be able to write and to enter it


def prove_start(
    store: Store,
    image: Built,
    backend: SandboxBackend,
    flags: ParserFlags | None,
    flags_file: Path | None = None,
) -> ImageRun:
    """Gives a verdict on each thing that an image needs when it starts."""
    # what runs its programs: empty for this processor, else an emulator; none where neither can
    emulator: str | None = ""
    if (machine := _MACHINES[image.platform.partition("/")[2]]) != platform.machine():
        entry, lines = _BINFMT / f"qemu-{machine}", list[str]()
        with suppress(OSError):
            lines = entry.read_text(encoding="utf-8").splitlines()
        # F: the kernel holds the emulator open, so that it works where its file is not
        flags_line = next((line for line in lines if line.startswith("flags:")), "")
        emulator = entry.name if lines[:1] == ["enabled"] and "F" in flags_line else None
    config = read_image_config(store.read_blob(image.record.config))
    wanted = wanted_of(image.plan, config, flags, emulated=bool(emulator))
    if emulator is None:
        message = (
            f"{image.platform} cannot run on {platform.machine()}, and no emulator is registered"
            " (qemu-user-static with binfmt-support registers one)"
        )
        tests = [RunTest(name="processor", verdict="unknown", message=message)]
    else:
        tests = _run_checks(store, image, backend, config, wanted, is_emulated=bool(emulator))
    inputs = {}
    if wanted.parser and wanted.parser.file and flags_file:
        inputs[wanted.parser.file] = sha256_of_file(flags_file)
    # the same scripts give the same verdicts
    checks = sha256_of(b"".join(path.read_bytes() for path in _SCRIPTS))
    return ImageRun(
        kind="start",
        inputs=inputs,
        machine={
            "sandbox": backend.kind,
            "processor": platform.machine(),
            "emulator": emulator or "none",
        },
        made_by={"sm120-pipeline": __version__, "checks": checks},
        tests=tests,
    )


def require_libraries(store: Store, image: Built, backend: SandboxBackend) -> None:
    """Every library that a file of the image asks for is in it, or the driver's."""
    config = read_image_config(store.read_blob(image.record.config))
    wanted = wanted_of(image.plan, config, None).model_copy(update={"checks": ["libraries"]})
    tests = _run_checks(store, image, backend, config, wanted, is_emulated=False)
    for test in (test for test in tests if test.verdict in ("failed", "unknown")):
        message = f"{image.name} for {image.platform}: {test.name}: {test.message}"
        if test.verdict == "unknown":
            raise StartUnknown(message)
        raise StartFails(message, "Keep the package that brings it: `slim` leaves out too much.")


def _run_checks(
    store: Store,
    image: Built,
    backend: SandboxBackend,
    config: ImageConfig,
    wanted: StartExpectations,
    *,
    is_emulated: bool,
) -> list[RunTest]:
    """Runs all checks in the image; a check that the run did not reach has failed."""
    owners = read_owners(store, image, wanted.folders)
    results: list[tuple[str, RunTest]] = []
    rest: list[str] = []

    def on_line(text: str) -> None:
        # engine code prints other lines between the verdicts
        data = text.removeprefix(MARK).encode() if text.startswith(MARK) else b""
        try:
            value = read_json(data, most_bytes=_MOST_LINE_BYTES)
            check, test = str(value.pop("check")), RunTest.model_validate(value)
        except (JsonInvalid, ValidationError, AttributeError, KeyError, TypeError):
            rest.append(text)
            return
        results.append((check, test))
        log.say(f"  {test.verdict:8} {test.name}: {test.message[:120]}")

    with (
        store.scratch() as scratch,
        _container(store, image, backend, config, scratch) as container,
    ):
        if container.user is None:
            message = f"the config names {config.runs.user}, whom /etc/passwd does not know"
            return [RunTest(name="user", verdict="failed", message=message)]
        judged = judge_owners(owners, wanted.folders, *container.user)
        if backend.kind == "namespaces" and os.geteuid() == 0:
            # an unpacked image's folders get the owners that its layers name; only root can
            for name, row in owners.items():
                place = container.root / name
                if row.kind == Kind.DIR and place.is_dir() and not place.is_symlink():
                    os.chown(place, row.uid, row.gid)
                    place.chmod(row.mode)
        folder = container.mounts[_PLACE]
        for script in _SCRIPTS:
            shutil.copy(script, folder / script.name)
        (folder / "wanted.json").write_text(wanted.model_dump_json(), encoding="utf-8")
        # another user reads them
        folder.chmod(0o755)
        for path in folder.iterdir():
            path.chmod(0o644)
        if is_emulated and backend.kind == "namespaces":
            made = compile_bytecode(container.root, container.scratch / "bytecode")
            if made:
                env = {**container.env, BYTECODE_VARIABLE: _BYTECODE}
                container = replace(
                    container, mounts={**container.mounts, _BYTECODE: made}, env=env
                )
        parser = engine_of(image.plan)
        python = parser.python if parser else "/usr/bin/python3"
        command = [python, f"{_PLACE}/check.py", f"{_PLACE}/wanted.json"]
        with log.step(f"Starting {image.name} without a GPU"):
            try:
                ending = f"exit code {run_step(backend, container, command, on_line)}"
            except StepFailed as error:
                ending = str(error)
    reached = {check for check, _ in results}
    last = " ".join(rest[-_SHOWN_LINES:])[-400:]
    missed = [
        RunTest(name=CHECKS[check][0], verdict="failed", message=f"was not run: {ending}: {last}")
        for check in wanted.checks
        if check not in reached
    ]
    return [judged, *(test for _, test in results), *missed]


@contextmanager
def _container(
    store: Store, image: Built, backend: SandboxBackend, config: ImageConfig, scratch: Path
) -> Iterator[StepContainer]:
    """Makes the image a container as it would be served, with a folder for the scripts.

    Namespaces run its unpacked files, container engines the image that they loaded.
    """
    scripts = scratch / "scripts"
    scripts.mkdir()
    root, reference = None, ""
    with ExitStack() as stack:
        if backend.kind == "namespaces":
            root = stack.enter_context(unpacked(store, image))
        else:
            engine = stack.enter_context(closing(find_engine(backend.kind)))
            loaded = engine.image(image.record.config) or engine.image(image.digest)
            if loaded is None:
                engine.load(store, image.name, image.digest)
                loaded = engine.image(image.record.config) or engine.image(image.digest)
            require_same(image.name, image.record, loaded)
            # by id: a tag can be moved
            reference = loaded.id if loaded else ""
        lines = list[str]()
        with suppress(OSError):
            passwd = (root or scratch) / "etc/passwd"
            lines = passwd.read_text(encoding="utf-8", errors="replace").splitlines()
        entries = [line.split(":") for line in lines]
        # skip lines that cannot be read
        sound = [e for e in entries if len(e) == 7 and e[2].isdigit() and e[3].isdigit()]
        accounts = {e[0]: (int(e[2]), int(e[3]), e[5]) for e in sound}
        # a config's user is a number or the name of an account
        first, _, second = (config.runs.user or "0:0").partition(":")
        user = accounts.get(first)
        if first.isdigit():
            homes = {uid: home for uid, _, home in accounts.values()}
            gid = int(second) if second.isdigit() else 0
            user = (int(first), gid, homes.get(int(first), "/"))
        yield StepContainer(
            root=root or scratch,
            image=reference,
            mounts={_PLACE: scripts},
            # container engines, too, give it the home of its account
            env={"HOME": user[2] if user else "/", **config.variables()},
            limits=_LIMITS,
            scratch=scratch,
            user=user and user[:2],
            workdir=config.runs.workdir or "/",
        )


def compile_bytecode(root: Path, to: Path) -> Path | None:
    """Makes a folder for BYTECODE_VARIABLE; none where the image's Python has another version.

    Images hold sources alone, and bytecode is the same on every processor: an emulator takes
    minutes to compile what one package imports, and the processor itself seconds.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    folders = [root / place / version for place in _PYTHON_FOLDERS]
    folders = [folder for folder in folders if folder.is_dir()]
    if not folders:
        return None
    command = [
        *(sys.executable, "-m", "compileall", "-qq"),
        *("-j", str(len(os.sched_getaffinity(0))), "-r", str(_DEEPEST)),
        # the files' times differ in each unpacked copy
        *("--invalidation-mode", "unchecked-hash", "-s", str(root), "-p", "/"),
        *map(str, folders),
    ]
    with log.step("Compiling its Python files for the emulator"):
        # Some files are templates or for other versions: Python compiles them inside, if at all.
        # A variable, not -X: the workers of compileall inherit no -X option since Python 3.12.
        proc.read(command, env=proc.child_environment(**{BYTECODE_VARIABLE: str(to)}))
    # below the prefix comes the whole path of each file
    return to / root.resolve().relative_to("/")


def read_owners(store: Store, image: Built, folders: Iterable[str]) -> dict[str, FileRow]:
    """Reads the entries of folders and of all above them, by path; the topmost layer decides.

    From the layers themselves: the store's own tables have no owners.
    """
    paths = {path.strip("/") for path in folders} - {""}
    wanted = paths | {above for path in paths for above in parents(path)}
    found: dict[str, FileRow] = {}
    for layer in image.layers:
        record = layer.record
        # a name may be there twice: then the later entry counts
        left = Counter(row.path for row in store.contents(record) if row.path in wanted)
        if not left:
            continue
        with open_layer(store.blob_path(record.digest), record.media_type) as stream:
            for row in stream.entries():
                if row.path in left:
                    found[row.path] = row
                    left[row.path] -= 1
                # most of a layer lies below /usr, after what is asked for here
                if not left.total():
                    break
    return found


def judge_owners(
    rows: Mapping[str, FileRow], folders: Sequence[str], uid: int, gid: int
) -> RunTest:
    """Whether a user may make files in every folder, or make the folder itself."""
    wrong = []
    for folder in folders:
        path = folder.strip("/")
        while path and path not in rows:
            path = posixpath.dirname(path)
        row = rows.get(path)
        if row is None:
            wrong.append(f"{folder}: there is nothing above it but the root")
            continue
        # as the kernel does: the owner's bits count for the owner alone
        shift = 6 if row.uid == uid else 3 if row.gid == gid else 0
        if uid and row.mode >> shift & _WRITE_AND_ENTER != _WRITE_AND_ENTER:
            owner = f"{row.uid}:{row.gid}, mode {row.mode & 0o7777:04o}"
            who = f"{uid}:{gid} may not write there"
            wrong.append(f"{folder}: /{path} belongs to {owner}, and {who}")
    if wrong:
        return RunTest(name="owners", verdict="failed", message="; ".join(dict.fromkeys(wrong)))
    message = f"{uid}:{gid} may write to {', '.join(folders)}"
    return RunTest(name="owners", verdict="passed", message=message)
