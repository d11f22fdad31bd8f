"""The argument parser of an engine, read by running its own code in a sandbox.

For images that take hours to compile, the flags of mainline llama.cpp come from its source:
`common/arg.cpp` is a list of `add_opt(common_arg(…))` with the names, those with the opposite
meaning, a hint for each value, and a handler whose parameters say what the value is.
"""

from __future__ import annotations

import re
import shutil
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from pipeline.artifacts.containers.backend import (
    SandboxBackend,
    StepContainer,
    StepLimits,
    run_step,
)
from pipeline.artifacts.containers.docker import default_tag
from pipeline.artifacts.containers.sandbox import find_sandbox
from pipeline.artifacts.store.store import Store
from pipeline.core import log
from pipeline.core.errors import ParserUnreadable, SpecInvalid
from pipeline.core.files import read_at_most, sha256_of_file
from pipeline.core.foreign_json import JsonInvalid, read_json
from pipeline.core.model import Engine
from pipeline.images.assemble.image import Built
from pipeline.images.assemble.plan import ImagePlan, TreePlan, plan_image
from pipeline.images.engine.parser_flags import ParserFlags
from pipeline.images.source.toolchain import unpacked
from pipeline.images.spec.checkout import Checkout

SCRIPT = Path(__file__).with_name("print_flags.py")
_HOME = "/build"  # the one writable folder of a sandbox
_RESULT = "flags.json"
_SHOWN_LINES = 5
# Imports of an engine take half a minute, and half an hour in an emulator.
_LIMITS = StepLimits(cpus=2, memory_bytes=64 << 30, silent_s=3600.0, most_s=7200.0)
TABLE = "common/arg.cpp"
_MOST_BYTES = 4 << 20
_ENTRY = "add_opt(common_arg("
_OF_SERVER = {"LLAMA_EXAMPLE_SERVER", "LLAMA_EXAMPLE_COMMON"}
_NAMES = re.compile(r'\{((?:\s*"-[^"]+"\s*,?)+)\}\s*,\s*')
_HINT = re.compile(r'"((?:[^"\\]|\\.)*)"\s*,\s*')
_HANDLER = re.compile(r"\[[^\]]*\]\s*\(common_params &\s*\w*\s*(?:, ([^)]*))?\)")
_REMOVED = re.compile(r'arg_removed\("([^"]*)"\)')
_COMMENT = re.compile(r"/\*.*?\*/|^\s*//[^\n]*\n", re.DOTALL | re.MULTILINE)
_EXAMPLES = re.compile(r"set_examples\(\{([^}]*)\}\)")
_VARIABLE = re.compile(r'set_env\("(\w+)"\)')
_LISTED = re.compile(r"^[\[{(]?([\w-]+(?:[|,][\w-]+)+)[\]})]?$")
_REPEATED = re.compile(r"be repeated|repeat to|multiple times|push_back|parse_tensor_buffer_over")


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


def read_flags(store: Store, image: Built, backend: SandboxBackend) -> ParserFlags:
    """Reads what the parser of a built image accepts."""
    parser, engines = find_parser(image.plan), ("xllamacpp", "vllm", "sglang")
    with _sandboxed(store, image) as container:
        described = _described(backend, container, parser)
    # the version by the lock, for parsers that do not name one
    pins = [pin for pin in image.plan.lock.wheels if pin.name in engines]
    version = pins[0].version if pins else "unknown"
    if pins and pins[0].name == "xllamacpp":
        version = f"of {pins[0].name} {version}"
    return as_parser_flags(
        {"version": version}
        | {name: value for name, value in described.items() if value not in ("", None)},
        engine=parser.engine,
        image=image.name,
        platform=image.platform,
        digest=image.digest,
        read_from="the image, by running its own code",
    )


def read_wheel_flags(
    store: Store, plan: ImagePlan, wheel: Path, inside: Built, backend: SandboxBackend
) -> ParserFlags:
    """Reads them from an engine's own wheel, with what it imports from another image.

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
    with _sandboxed(store, inside) as container:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(container.mounts[_HOME] / "wheel")  # noqa: S202 -- a locked zip
        first = {**container.env, "PYTHONPATH": f"{_HOME}/wheel"}
        described = _described(backend, replace(container, env=first), parser)
    if (version := described.get("version")) != pin.version:
        message = f"{inside.name}: the version read is {version!r}, not {pin.version}"
        raise ParserUnreadable(message)
    return as_parser_flags(
        described,
        engine=parser.engine,
        image=plan.spec.name,
        wheel=digest,
        read_from=f"the wheel {pin.name} {pin.version}, with what it imports from {inside.name}"
        f" for {inside.platform}",
    )


def read_program_flags(checkout: Checkout, image: str, program: Path) -> ParserFlags:
    """Reads them from a program that was compiled outside the image, from its locked source."""
    plan = plan_image(checkout, image, checkout.spec(image).platforms[0])
    parser, tree = find_parser(plan), _engine_tree(plan)
    if tree is None:
        raise SpecInvalid(f"{image}: compiles no engine", "Leave --program out.")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / _RESULT
        words = ["program", str(result), str(program.parent), str(program)]
        done = find_sandbox().run(
            # `-I`: no variable and no folder of the user changes what Python imports
            [sys.executable, "-I", str(SCRIPT), *words],
            read=[SCRIPT, program.parent, Path(sys.prefix), Path(sys.base_prefix)],
            write=[Path(folder)],  # the program was compiled from foreign source
            env={"LD_LIBRARY_PATH": str(program.parent)},
            timeout_s=_LIMITS.most_s,
        )
        lines = done.stderr.decode(errors="replace").splitlines()
        described = _read_result(str(program), done.returncode, result, lines)
    version, commit = str(described.get("version", "")), tree.source.upstream.commit
    if not version or not commit.startswith(version):
        message = f"{program}: is of commit {version!r}, not of {commit}"
        raise ParserUnreadable(message, "Compile the locked source.")
    return as_parser_flags(
        described,
        engine=parser.engine,
        image=image,
        tree=tree.lock.tree,
        read_from="a program compiled from the locked source, outside the image",
    )


def read_source_flags(checkout: Checkout, image: str, archive: Path) -> ParserFlags:
    """Reads them from the table in the locked source of mainline llama.cpp."""
    tree = _engine_tree(plan_image(checkout, image, checkout.spec(image).platforms[0]))
    if tree is None or tree.source.name != "llama-cpp":
        raise SpecInvalid(f"{image}: does not compile llama.cpp", "Leave --archive out.")
    pin, name = tree.lock.archive, f"{tree.source.archive.below}/{TABLE}"
    if sha256_of_file(archive) != f"sha256:{pin.sha256}":
        raise SpecInvalid(
            f"{archive}: is not the archive that {tree.source.name} is locked to",
            f"Name {pin.file} as the lock has it.",
        )
    with tarfile.open(archive) as opened:
        member = opened.extractfile(name)
        text = member.read(_MOST_BYTES).decode("utf-8", "replace") if member else ""
    described = read_llama_flags(text)
    # a table in another form would be an image without flags
    if not described["flags"]:
        raise ParserUnreadable(f"{archive}: {name} holds no table of flags", "")
    return as_parser_flags(
        {**described, "version": tree.source.upstream.commit[:8]},
        engine="llama-cpp",
        image=image,
        tree=tree.lock.tree,
        read_from=f"{TABLE} of the locked source, without compiling it",
    )


def as_parser_flags(described: Mapping[str, Any], **about: str) -> ParserFlags:
    """The script's result as a closed model: engine code has run, so nothing is believed."""
    body = {**described, **about}
    try:
        return ParserFlags.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ParserUnreadable(
            f"{body['image']}: its parser says {field}: {first['msg']}"
        ) from error


@contextmanager
def _sandboxed(store: Store, image: Built) -> Iterator[StepContainer]:
    """A built image as a sandbox, unpacked for as long as the block lasts."""
    own = image.plan.variables
    home = own.get("HOME", "/home/engine")
    # its own home is on the read-only image
    env = {k: _HOME + v.removeprefix(home) if v.startswith(home) else v for k, v in own.items()}
    with (
        unpacked(store, image) as root,
        store.scratch() as scratch,
        log.step(f"Reading an argument parser in {image.name}"),
    ):
        work = scratch / "work"
        work.mkdir()
        shutil.copy(SCRIPT, work / SCRIPT.name)
        yield StepContainer(
            root=root,
            image=default_tag(image.name, image.digest),
            mounts={_HOME: work},
            env={**env, "HOME": _HOME, "LC_ALL": "C.UTF-8", "TZ": "UTC"},
            limits=_LIMITS,
            scratch=scratch,
        )


def _described(backend: SandboxBackend, container: StepContainer, parser: Parser) -> dict[str, Any]:
    lines: list[str] = []
    kind, *rest = parser.arguments
    command = [parser.python, f"{_HOME}/{SCRIPT.name}", kind, f"{_HOME}/{_RESULT}", *rest]
    code = run_step(backend, container, command, lines.append)
    return _read_result(container.image, code, container.mounts[_HOME] / _RESULT, lines)


def _read_result(name: str, code: int, path: Path, lines: Sequence[str]) -> dict[str, Any]:
    data = read_at_most(path, _MOST_BYTES) if code == 0 and path.is_file() else None
    if data is None:
        # an import that fails says why in its last lines
        last = " ".join(lines[-_SHOWN_LINES:])[-600:] or f"exit code {code}"
        raise ParserUnreadable(f"{name}: its argument parser could not be read: {last}")
    try:
        described = read_json(data, most_bytes=_MOST_BYTES)
    except JsonInvalid as error:
        raise ParserUnreadable(f"{name}: what was read of its parser {error}") from error
    return described if isinstance(described, dict) else {}


def read_llama_flags(text: str) -> dict[str, Any]:
    """The flags of `llama-server` in the text of `common/arg.cpp`."""
    flags: dict[str, Any] = {}
    variables: set[str] = set()
    for entry in _COMMENT.sub("", text).split(_ENTRY)[1:]:
        variables.update(_VARIABLE.findall(entry))
        programs = _EXAMPLES.search(entry)
        if programs and not _OF_SERVER & set(re.findall(r"\w+", programs[1])):
            continue
        names = _NAMES.match(entry.lstrip())
        if names is None:
            continue
        (own, *aliases), rest, off = _spellings(names), entry.lstrip()[names.end() :], list[str]()
        if opposite := _NAMES.match(rest):
            off, rest = _spellings(opposite), rest[opposite.end() :]
        handler = _HANDLER.search(rest)
        values = [v for v in ((handler and handler[1]) or "").split(",") if v and "bool" not in v]
        takes = ("none", "one", "many")[min(len(values), 2)]
        flag: dict[str, Any] = {"aliases": aliases, "takes": takes, "off": off}
        flag["repeats"] = bool(_REPEATED.search(rest))
        if removed := _REMOVED.search(rest):
            flag["retired"] = removed[1]
        elif len(values) == 1:
            if values[0].split()[0] == "int":
                flag["type"] = "integer"
            elif "json::parse(value)" in rest:
                flag["type"] = "json"
            hint = _HINT.match(rest)
            # `[on|off|auto]`; in `{a,b}` too, but `N0,N1,N2` are no values
            if hint and (listed := _LISTED.match(hint[1])) and hint[1][0] in "[{(":
                words = re.split(r"[|,]", listed[1])
                # llama.cpp takes more words for on and off than it names
                if not {"on", "off"} <= set(words):
                    flag["choices"] = words
        flags[own] = flag
    return {
        "flags": flags,
        "syntax": "llama",
        "prefixes": ["LLAMA_ARG_"],
        "variables": sorted(name for name in variables if name.startswith("LLAMA_ARG_")),
    }


def _spellings(match: re.Match[str]) -> list[str]:
    """Long names first, as in the other engines' files."""
    found = re.findall(r'"([^"]+)"', match[1])
    return sorted(found, key=lambda name: not name.startswith("--"))
