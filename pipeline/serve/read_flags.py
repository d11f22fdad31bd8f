"""The argument parser of a built image, read by running the engine's own code in a sandbox."""

from __future__ import annotations

import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from pipeline import log
from pipeline.assemble.image import Built
from pipeline.assemble.plan import ImagePlan, TreePlan, plan_image
from pipeline.errors import ParserUnreadable, SpecInvalid
from pipeline.files import read_at_most, sha256_of_file
from pipeline.foreign_json import JsonInvalid, read_json
from pipeline.oci import docker
from pipeline.recipe.model import Engine
from pipeline.recipe.parser_flags import ParserFlags
from pipeline.sandbox.sandbox import find_sandbox
from pipeline.serve.llama_source import TABLE, read_source
from pipeline.source.box import Box, Limits, Way, run_step
from pipeline.source.toolchain import unpacked
from pipeline.spec.checkout import Checkout
from pipeline.store.store import Store

SCRIPT = Path(__file__).with_name("print_flags.py")
_HOME = "/build"  # where a box has its one writable folder
_RESULT = "flags.json"
_MOST_BYTES = 4 << 20
_SHOWN_LINES = 5
# Imports of an engine take half a minute, and half an hour in an emulator.
_LIMITS = Limits(cpus=2, memory_bytes=64 << 30, silent_s=3600.0, most_s=7200.0)


class Parser(NamedTuple):
    """Where an image has its parser, and how the script finds it."""

    engine: Engine
    python: str
    arguments: list[str]  # of the script, with the result after the first


def find_parser(plan: ImagePlan) -> Parser:
    """The engine that an image starts, known by its entrypoint."""
    entry = plan.entrypoint
    if entry[:1] == ["/opt/venv/bin/vllm"]:
        return Parser("vllm", "/opt/venv/bin/python", ["vllm"])
    if "sglang.launch_server" in entry:
        return Parser("sglang", "/opt/venv/bin/python", ["sglang"])
    if entry[-1:] == ["/opt/sm120/serve.py"]:
        return Parser("llama-cpp", entry[0], ["script", entry[-1]])
    if tree := _engine_tree(plan):
        engine: Engine = "ik-llama" if tree.source.name == "ik-llama" else "llama-cpp"
        arguments = ["program", tree.build.to, *entry, "llama-server"]
        return Parser(engine, "/usr/bin/python3", arguments)
    raise SpecInvalid(
        f"{plan.spec.name}: starts no engine whose flags are known here",
        "Name an image that starts vLLM, SGLang, llama.cpp or ik_llama.cpp.",
    )


def _engine_tree(plan: ImagePlan) -> TreePlan | None:
    trees = (tree for tree in plan.all_trees() if tree.source.name in ("ik-llama", "llama-cpp"))
    return next(trees, None)


def read_flags(store: Store, image: Built, way: Way) -> ParserFlags:
    """What the parser of a built image accepts."""
    parser = find_parser(image.plan)
    with _boxed(store, image) as box:
        described = _described(way, box, parser)
    body = {
        "version": _engine_version(image.plan),
        **{name: value for name, value in described.items() if value not in ("", None)},
        "engine": parser.engine,
        "image": image.name,
        "platform": image.platform,
        "digest": image.digest,
        "read_from": "the image, by running its own code",
    }
    return as_parser_flags(body)


def read_wheel_flags(
    store: Store, plan: ImagePlan, wheel: Path, inside: Built, way: Way
) -> ParserFlags:
    """The same of an engine's own wheel, with what it imports from another image.

    For an image of another platform: in an emulator the imports alone take the better part of an
    hour. Values that depend on other packages may be those of the other image.
    """
    parser, digest = find_parser(plan), sha256_of_file(wheel)
    pin = next((pin for pin in plan.lock.wheels if f"sha256:{pin.sha256}" == digest), None)
    if pin is None or pin.name != parser.engine:
        raise SpecInvalid(
            f"{wheel}: is not the wheel of {parser.engine} that {plan.spec.name} is locked to",
            "Name the file that the lock names.",
        )
    with _boxed(store, inside) as box:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(box.mounts[_HOME] / "wheel")
        first = {**box.env, "PYTHONPATH": f"{_HOME}/wheel"}
        described = _described(way, replace(box, env=first), parser)
    body = {
        **described,
        "engine": parser.engine,
        "image": plan.spec.name,
        "wheel": digest,
        "read_from": f"the wheel {pin.name} {pin.version}, with what it imports from {inside.name}"
        f" for {inside.platform}",
    }
    if body.get("version") != pin.version:
        message = f"{inside.name}: the version read is {body.get('version')!r}, not {pin.version}"
        raise ParserUnreadable(message)
    return as_parser_flags(body)


def read_program_flags(checkout: Checkout, image: str, program: Path) -> ParserFlags:
    """The same of a program that was compiled from an image's locked source, outside of it."""
    plan = plan_image(checkout, image, checkout.spec(image).platforms[0])
    parser, tree = find_parser(plan), _engine_tree(plan)
    if tree is None:
        raise SpecInvalid(f"{image}: compiles no engine", "Leave --program out.")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / _RESULT
        done = find_sandbox().run(
            [
                *(sys.executable, "-I", str(SCRIPT), "program", str(result)),
                *(str(program.parent), str(program)),
            ],
            read=[SCRIPT, program.parent, Path(sys.prefix), Path(sys.base_prefix)],
            write=[Path(folder)],
            env={"LD_LIBRARY_PATH": str(program.parent)},
            timeout_s=_LIMITS.most_s,
        )
        described = _read_result(str(program), done.returncode, result, _tail(done.stderr))
    version = str(described.get("version", ""))
    if not version or not tree.source.upstream.commit.startswith(version):
        message = f"{program}: is of commit {version!r}, not of {tree.source.upstream.commit}"
        raise ParserUnreadable(message, "Compile the locked source.")
    body = {
        **described,
        "engine": parser.engine,
        "image": image,
        "tree": tree.lock.tree,
        "read_from": "a program compiled from the locked source, outside the image",
    }
    return as_parser_flags(body)


def read_source_flags(checkout: Checkout, image: str, archive: Path) -> ParserFlags:
    """The same from the table in the locked source of mainline llama.cpp."""
    tree = _engine_tree(plan_image(checkout, image, checkout.spec(image).platforms[0]))
    if tree is None or tree.source.name != "llama-cpp":
        raise SpecInvalid(f"{image}: does not compile llama.cpp", "Leave --archive out.")
    body = {
        **read_source(archive, tree),
        "engine": "llama-cpp",
        "image": image,
        "tree": tree.lock.tree,
        "read_from": f"{TABLE} of the locked source, without compiling it",
    }
    return as_parser_flags(body)


def as_parser_flags(body: dict[str, Any]) -> ParserFlags:
    """What the script wrote, as a closed model: engine code has run, so nothing is believed."""
    try:
        return ParserFlags.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ParserUnreadable(
            f"{body['image']}: its parser says {field}: {first['msg']}"
        ) from error


@contextmanager
def _boxed(store: Store, image: Built) -> Iterator[Box]:
    """A built image as a box, unpacked for as long as the block lasts."""
    with (
        unpacked(store, image) as root,
        store.scratch() as scratch,
        log.step(f"Reading an argument parser in {image.name}"),
    ):
        yield _box(image, root, scratch)


def _box(image: Built, root: Path, scratch: Path) -> Box:
    work = scratch / "work"
    work.mkdir()
    shutil.copy(SCRIPT, work / SCRIPT.name)
    own = {k: v for plan in image.plan.chain() for k, v in plan.spec.env.items()}
    home = own.get("HOME", "/home/engine")
    # its own home is on the read-only image
    env = {k: _HOME + v.removeprefix(home) if v.startswith(home) else v for k, v in own.items()}
    return Box(
        root=root,
        image=docker.default_tag(image.name, image.digest),
        mounts={_HOME: work},
        env={**env, "HOME": _HOME, "LC_ALL": "C.UTF-8", "TZ": "UTC"},
        limits=_LIMITS,
        scratch=scratch,
    )


def _described(way: Way, box: Box, parser: Parser) -> dict[str, Any]:
    lines: list[str] = []
    kind, *rest = parser.arguments
    command = [parser.python, f"{_HOME}/{SCRIPT.name}", kind, f"{_HOME}/{_RESULT}", *rest]
    code = run_step(way, box, command, lines.append)
    return _read_result(box.image, code, box.mounts[_HOME] / _RESULT, lines)


def _read_result(name: str, code: int, path: Path, lines: Sequence[str]) -> dict[str, Any]:
    data = read_at_most(path, _MOST_BYTES) if code == 0 and path.is_file() else None
    if data is None:
        last = " ".join(lines[-_SHOWN_LINES:])[-600:] or f"exit code {code}"
        raise ParserUnreadable(f"{name}: its argument parser could not be read: {last}")
    try:
        described = read_json(data, most_bytes=_MOST_BYTES)
    except JsonInvalid as error:
        raise ParserUnreadable(f"{name}: what was read of its parser {error}") from error
    return described if isinstance(described, dict) else {}


def _tail(output: bytes) -> list[str]:
    return output.decode(errors="replace").splitlines()


def _engine_version(plan: ImagePlan) -> str:
    """The version by the lock, for parsers that do not name one."""
    engines = ("xllamacpp", "vllm", "sglang")
    for wheel in plan.lock.wheels:
        if wheel.name in engines:
            return f"of {wheel.name} {wheel.version}" if wheel.name == engines[0] else wheel.version
    return "unknown"
