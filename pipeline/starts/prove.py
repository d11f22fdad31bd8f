"""Start an image without a GPU, in namespaces, Docker or Podman, and keep what it showed."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from pipeline import __version__, log
from pipeline.assemble.image import Built
from pipeline.errors import StepFailed
from pipeline.evidence.runs import Run, RunTest
from pipeline.files import sha256_of_file
from pipeline.foreign_json import JsonInvalid, read_json
from pipeline.model import Frozen, sha256_of
from pipeline.oci.config import ImageConfig, read_config
from pipeline.recipe.parser_flags import ParserFlags
from pipeline.serve.container_engine import ContainerEngine
from pipeline.serve.facts import ImageFacts, require_same
from pipeline.serve.find_engine import find_engine
from pipeline.serve.read_flags import SCRIPT as FLAGS_SCRIPT
from pipeline.source.box import Box, Limits, Way, run_step
from pipeline.source.toolchain import unpacked
from pipeline.starts.bytecode import VARIABLE, compile_bytecode
from pipeline.starts.expected import Wanted, engine_of, wanted_of
from pipeline.starts.inside.check import CHECKS, MARK
from pipeline.starts.owners import give_owners, judge_owners, read_owners
from pipeline.store.store import Store

_INSIDE = Path(__file__).with_name("inside")
_SCRIPTS = (_INSIDE / "check.py", _INSIDE / "libraries.py", FLAGS_SCRIPT)
_PLACE = "/sm120-start"  # of the scripts, in the image
_BYTECODE = "/sm120-bytecode"
_MOST_LINE_BYTES = 1 << 16
_SHOWN_LINES = 5
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
# Imports of an engine take half a minute, and half an hour in an emulator.
_LIMITS = Limits(cpus=os.cpu_count() or 1, memory_bytes=64 << 30, silent_s=7200.0, most_s=14400.0)
_BINFMT = Path("/proc/sys/fs/binfmt_misc")


class _Line(Frozen):
    """A verdict, as the script in the image prints it."""

    check: str
    test: RunTest


def prove_start(
    store: Store, image: Built, way: Way, flags: ParserFlags | None, flags_file: Path | None = None
) -> Run:
    """A verdict for each thing that an image needs when it starts."""
    emulator = emulator_for(image.platform)
    config = read_config(store.read_blob(image.record.config))
    wanted = wanted_of(image.plan, config, flags, emulated=bool(emulator))
    tests = [unrunnable(image.platform)]
    if emulator is not None:
        tests = _proved(store, image, way, config, wanted, is_emulated=bool(emulator))
    inputs = {}
    if wanted.parser and wanted.parser.file and flags_file:
        inputs[wanted.parser.file] = sha256_of_file(flags_file)
    return Run(
        kind="start",
        inputs=inputs,
        machine={
            "sandbox": way.kind,
            "processor": platform.machine(),
            "emulator": emulator or "none",
        },
        made_by={"sm120-pipeline": __version__, "checks": scripts_digest()},
        tests=tests,
    )


def scripts_digest() -> str:
    """The digest of the scripts that judge."""
    return sha256_of(b"".join(path.read_bytes() for path in _SCRIPTS))


def emulator_for(image_platform: str, registered: Path = _BINFMT) -> str | None:
    """What runs the programs of a platform here: empty for the processor itself, else an emulator.

    None where there is neither.
    """
    machine = _MACHINES[image_platform.partition("/")[2]]
    if machine == platform.machine():
        return ""
    entry = registered / f"qemu-{machine}"
    try:
        # F: the kernel holds the emulator open, so that it works where its file is not
        lines = entry.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    flags = next((line for line in lines if line.startswith("flags:")), "")
    return entry.name if lines[:1] == ["enabled"] and "F" in flags else None


def unrunnable(image_platform: str) -> RunTest:
    """The verdict on an image for another processor, where nothing emulates it."""
    message = (
        f"{image_platform} cannot run on {platform.machine()}, and no emulator is registered"
        " (qemu-user-static with binfmt-support registers one)"
    )
    return RunTest(name="processor", verdict="unknown", message=message)


def _proved(
    store: Store,
    image: Built,
    way: Way,
    config: ImageConfig,
    wanted: Wanted,
    *,
    is_emulated: bool,
) -> list[RunTest]:
    owners = read_owners(store, image, wanted.folders)
    with store.scratch() as scratch, _box(store, image, way, config, scratch) as box:
        if box.user is None:
            message = f"the config names {config.runs.user}, whom /etc/passwd does not know"
            return [RunTest(name="user", verdict="failed", message=message)]
        tests = [judge_owners(owners, wanted.folders, *box.user)]
        if way.kind == "namespaces" and os.geteuid() == 0:
            give_owners(box.root, owners)
        _write_scripts(box.mounts[_PLACE], wanted)
        if is_emulated and way.kind == "namespaces":
            box = _with_bytecode(box)
        with log.step(f"Starting {image.name} without a GPU"):
            return [*tests, *_run(way, box, image, wanted)]


@contextmanager
def _box(store: Store, image: Built, way: Way, config: ImageConfig, scratch: Path) -> Iterator[Box]:
    """The image as a container would run it, with the scripts in a folder of their own."""
    scripts = scratch / "scripts"
    scripts.mkdir()
    with _files(store, image, way) as (root, reference):
        accounts = read_passwd(root / "etc/passwd") if root else {}
        user = find_user(config.runs.user or "0:0", accounts)
        homes = {account.uid: account.home for account in accounts.values()}
        yield Box(
            root=root or scratch,
            image=reference,
            mounts={_PLACE: scripts},
            # container engines, too, give it the home of its account
            env={"HOME": homes.get(user[0], "/") if user else "/", **config.variables()},
            limits=_LIMITS,
            scratch=scratch,
            user=user,
            workdir=config.runs.workdir or "/",
        )


def _with_bytecode(box: Box) -> Box:
    folder = compile_bytecode(box.root, box.scratch / "bytecode")
    if folder is None:
        return box
    return replace(
        box,
        mounts={**box.mounts, _BYTECODE: folder},
        env={**box.env, VARIABLE: _BYTECODE},
    )


@contextmanager
def _files(store: Store, image: Built, way: Way) -> Iterator[tuple[Path | None, str]]:
    """The image's files: unpacked for namespaces, else by its id in the container engine."""
    if way.kind == "namespaces":
        with unpacked(store, image) as root:
            yield root, ""
        return
    with closing(find_engine(way.kind)) as engine:
        loaded = _loaded(engine, image)
        if loaded is None:
            engine.load(store, image.name, image.digest)
            loaded = _loaded(engine, image)
    require_same(image.name, image.record, loaded)
    # by id: a tag can be moved
    yield None, loaded.id if loaded else ""


def _loaded(engine: ContainerEngine, image: Built) -> ImageFacts | None:
    return engine.image(image.record.config) or engine.image(image.digest)


class Passwd(NamedTuple):
    """An account of an image."""

    uid: int
    gid: int
    home: str


def read_passwd(path: Path) -> dict[str, Passwd]:
    """The accounts of an image by name; lines that cannot be read are passed over."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    entries = [line.split(":") for line in lines]
    sound = [e for e in entries if len(e) == 7 and e[2].isdigit() and e[3].isdigit()]
    return {e[0]: Passwd(int(e[2]), int(e[3]), e[5]) for e in sound}


def find_user(user: str, accounts: Mapping[str, Passwd]) -> tuple[int, int] | None:
    """The numbers of a config's user, whom it names by number or by the name of an account."""
    first, _, second = user.partition(":")
    if first.isdigit():
        return int(first), int(second) if second.isdigit() else 0
    account = accounts.get(first)
    return (account.uid, account.gid) if account else None


def _write_scripts(folder: Path, wanted: Wanted) -> None:
    for script in _SCRIPTS:
        shutil.copy(script, folder / script.name)
    (folder / "wanted.json").write_text(wanted.model_dump_json(), encoding="utf-8")
    # another user reads them
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)


def _run(way: Way, box: Box, image: Built, wanted: Wanted) -> list[RunTest]:
    """All checks in the image; what was not reached is said so."""
    parser = engine_of(image.plan)
    python = parser.python if parser else "/usr/bin/python3"
    command = [python, f"{_PLACE}/check.py", f"{_PLACE}/wanted.json"]
    results, rest = list[_Line](), list[str]()

    def on_line(text: str) -> None:
        line = _read_line(text)
        if line is None:
            rest.append(text)
            return
        results.append(line)
        log.say(f"  {line.test.verdict:8} {line.test.name}: {line.test.message[:120]}")

    try:
        code = run_step(way, box, command, on_line)
        ending = f"exit code {code}"
    except StepFailed as error:
        ending = str(error)
    reached = {line.check for line in results}
    last = " ".join(rest[-_SHOWN_LINES:])[-400:]
    missed = [
        RunTest(name=CHECKS[check][0], verdict="failed", message=f"was not run: {ending}: {last}")
        for check in wanted.checks
        if check not in reached
    ]
    return [*(line.test for line in results), *missed]


def _read_line(text: str) -> _Line | None:
    """A line of the script; engine code prints between them."""
    if not text.startswith(MARK):
        return None
    try:
        value = read_json(text.removeprefix(MARK).encode(), most_bytes=_MOST_LINE_BYTES)
        check = value.pop("check")
        return _Line(check=check, test=RunTest.model_validate(value))
    except (JsonInvalid, ValidationError, AttributeError, KeyError, TypeError):
        return None
