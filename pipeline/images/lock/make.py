"""The only step that may ask "what is newest": a spec in, a lock out."""

from __future__ import annotations

import os
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from pipeline.core import log, proc
from pipeline.core.errors import BaseUnplaced, ResolveFailed
from pipeline.images.lock.debs import Get, resolve_debs
from pipeline.images.lock.model import (
    BasePin,
    DebPin,
    ImageLock,
    WheelPin,
    read_lock,
    sealed_lock,
    split_variant,
)
from pipeline.images.lock.release import DEBIAN_12_KEYRING
from pipeline.images.spec.checkout import Checkout
from pipeline.images.spec.image import ForeignBase, PythonSpec

FindBase = Callable[[ForeignBase, str], BasePin]


@dataclass(frozen=True)
class Transport:
    """How a lock reaches the outside; configuration says where that is."""

    debian: Get
    debian_security: Get
    wheel_size: SizeFinder
    index_args: Sequence[str] = ()
    index_env: Mapping[str, str] = field(default_factory=dict)
    keyring: Path = DEBIAN_12_KEYRING
    find_base: FindBase | None = None


def make_lock(
    checkout: Checkout,
    name: str,
    platform: str,
    ask: Transport,
    fresh: Mapping[str, ImageLock] | None = None,
) -> ImageLock:
    """Resolve one image for one platform. What it stands on is locked already, or `fresh`."""
    chain = checkout.chain(name, platform)
    spec = chain[-1]
    # a base that is locked in the same run is not in its file yet
    below = [
        (fresh or {}).get(link.name) or read_lock(checkout.lock_path(link.name, platform))
        for link in chain[:-1]
    ]
    wheels = list[WheelPin]()
    if spec.python:
        needs_cuda = any(link.cuda for link in chain)
        wheels = resolve_wheels(spec.python, platform, ask, needs_cuda=needs_cuda)
    base_seal = below[-1].seal if below else None
    base = None
    if spec.foreign is not None:
        if ask.find_base is None:
            raise BaseUnplaced(f"{spec.foreign}: the base of {spec.name} cannot be looked up")
        base = ask.find_base(spec.foreign, platform)
    debian, debs = chain[0].debian, list[DebPin]()
    if spec.debs and debian is not None:
        in_base = {pin.name for lock in below for pin in lock.debs}
        suites = [(debian.suite, ask.debian)]
        if debian.security:
            suites.append((f"{debian.suite}-security", ask.debian_security))
        # resolved together with what the base has: its packages may already satisfy a dependency
        wanted, exclude = sorted({*spec.debs, *in_base}), list(debian.exclude)
        architecture = platform.partition("/")[2]
        pins = resolve_debs(wanted, exclude, suites, debian.components, architecture, ask.keyring)
        debs = [pin for pin in pins if pin.name not in in_base]
    return sealed_lock(name, platform, spec.lock_digest(), base_seal, wheels, debs, base)


# Debian 12's glibc.
GLIBC_MINOR = 36
_MACHINES = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}
# As PyTorch's own indexes name builds for other machines; CUDA's are `cu130` and the like.
_NO_CUDA = ("cpu", "rocm", "xpu", "hpu")
# PEP 600: what the older names of manylinux mean in glibc versions.
_LEGACY = {"manylinux2014": 17, "manylinux2010": 12, "manylinux1": 5}


class SizeFinder(Protocol):
    """Says how large a file of a project is."""

    def __call__(self, project: str, filename: str, sha256: str) -> int: ...


def resolve_wheels(
    spec: PythonSpec, platform: str, ask: Transport, *, needs_cuda: bool = False
) -> list[WheelPin]:
    """Ask uv for the closure and pick, for each project, the wheel an installer would.

    With `needs_cuda`, it passes over builds that say they are for something else: `2.13.0+cpu`
    is newer than `2.13.0` by the rules of versions, and a folder of such wheels is easily at hand.
    """
    refused: list[str] = []
    while True:
        lock = _ask_uv(spec, platform, ask, refused)
        # releases whose local version names another kind of machine, as requirements write them
        without = [
            f"{canonicalize_name(package['name'])}=={package['version']}"
            for package in (lock.get("packages", []) if needs_cuda else ())
            if str(package.get("version", "")).partition("+")[2].lower().startswith(_NO_CUDA)
        ]
        if not without:
            break
        # a pin such as `torch==2.13.0+cpu` leaves uv no other choice
        if set(without) & set(refused):
            raise ResolveFailed(
                f"{without[0]}: has no CUDA, and uv offers no other build",
                "Use an index that has one; `sm120 image sources` shows which are asked.",
            )
        log.say(f"skipped, because the image needs CUDA: {', '.join(without)}")
        refused += without
    ranks = tag_ranks(spec.version, platform)
    chosen: list[tuple[str, str, str, str]] = []  # name, version, file and sha256
    for package in lock.get("packages", []):
        name = str(canonicalize_name(package["name"]))
        # left out only after resolving: what it demands of others still counts
        if name in spec.omit:
            continue
        fitting = []
        labels: set[str] = set()
        for wheel in package.get("wheels", []):
            url = str(wheel.get("url") or wheel.get("path")).rpartition("/")[2]
            file = unquote(str(wheel.get("name") or url))
            label = split_variant(file)[1]
            labels |= {label} - {""}
            # nothing here knows what the label of a variant demands of a machine: a person names it
            if label == spec.variants.get(name, "") and wheel_rank(file, ranks) < len(ranks):
                fitting.append((file, wheel.get("hashes", {})))
        if not fitting:
            named = ", ".join(sorted(labels)) or "none"
            wanted = f" of the variant {spec.variants[name]!r}" if name in spec.variants else ""
            hint = f"`python: variants: {{{name}: LABEL}}` names one." if labels else ""
            variants = f" (variants: {named})" if labels or wanted else ""
            message = f"{name} {package.get('version')}: no wheel{wanted} for {platform}{variants}"
            raise ResolveFailed(message, hint) if hint else ResolveFailed(message)
        file, hashes = min(fitting, key=lambda wheel: wheel_order(wheel[0], ranks))
        if "sha256" not in hashes:
            raise ResolveFailed(
                f"{file}: the index gives no sha256 for it",
                "Use an index that gives hashes: `sm120 image sources` shows which are asked.",
            )
        chosen.append((name, str(package["version"]), file, str(hashes["sha256"])))
    # one question of an index for each wheel: the wait is theirs, not ours
    with ThreadPoolExecutor(8) as pool:
        sizes = list(pool.map(lambda c: ask.wheel_size(c[0], c[2], c[3]), chosen))
    return [
        WheelPin(name=name, version=version, file=file, sha256=sha256, size_bytes=size)
        for (name, version, file, sha256), size in zip(chosen, sizes, strict=True)
    ]


def _ask_uv(
    spec: PythonSpec, platform: str, ask: Transport, refused: Sequence[str]
) -> dict[str, Any]:
    # uv gets its own settings and the way through a proxy; tokens of other programs stay here
    prefixes = ("UV_", "SSL_", "http_", "https_", "HTTP", "all_proxy", "ALL_PROXY", "no_", "NO_")
    names = [n for n in os.environ if n.startswith(prefixes)]
    unwanted = [release.replace("==", "!=") for release in refused]
    # it reads its requirements from files and writes its answer to one
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("requirements.in", "overrides.txt", "refused.txt")]
        for path, lines in zip(files, (spec.requirements, spec.override, unwanted), strict=True):
            path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        wanted, overrides, constraints = map(str, files)
        answer = Path(folder, "pylock.image.toml")
        args = [
            *(sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-progress"),
            # no sdist: building one would run foreign code, and give other bytes on every machine
            *("--format", "pylock.toml", "--only-binary", ":all:", "--no-annotate"),
            *("--python-version", spec.version),
            *("--python-platform", f"{_MACHINES[platform]}-manylinux_2_{GLIBC_MINOR}"),
            *ask.index_args,
            *("--constraint", constraints, "--override", overrides),
            *(wanted, "--output-file", str(answer)),
        ]
        result = proc.read(args, env=proc.child_environment(*names, **ask.index_env))
        if result.returncode == 0 and answer.exists():
            return tomllib.loads(answer.read_text(encoding="utf-8"))
    # uv draws its reasons as a tree over many lines
    reason = " ".join(result.stderr.decode(errors="replace").split())
    without = f" without {', '.join(refused)}" if refused else ""
    raise ResolveFailed(
        f"uv found no set of wheels{without}: {reason[:600]}",
        "Correct the requirement; what another wheel asks for, `python: override:` replaces.",
    )


def wheel_rank(file: str, ranks: dict[Tag, int]) -> int:
    """The rank of a wheel's best tag; the number of ranks where the wheel does not run."""
    try:
        tags = parse_wheel_filename(split_variant(file)[0])[3]
    except InvalidWheelFilename:
        return len(ranks)
    return min((ranks.get(t, len(ranks)) for t in tags), default=len(ranks))


def wheel_order(file: str, ranks: dict[Tag, int]) -> tuple[int, int, str]:
    """pip's order: the best tag, then the highest build number."""
    build = parse_wheel_filename(split_variant(file)[0])[2]
    return wheel_rank(file, ranks), -build[0] if build else 0, file


@cache
def tag_ranks(python: str, platform: str) -> dict[Tag, int]:
    """Every tag that runs in the image, best first, as pip would rank them there."""
    major, minor = (int(p) for p in python.split("."))
    version, machine = (major, minor), _MACHINES[platform]
    # manylinux1 is glibc 2.5; for aarch64 manylinux2014 (2.17) is the first, PEP 599
    lowest = 5 if machine == "x86_64" else 17
    platforms = []
    for glibc in range(GLIBC_MINOR, lowest - 1, -1):
        platforms.append(f"manylinux_2_{glibc}_{machine}")
        platforms += [f"{old}_{machine}" for old, at in _LEGACY.items() if at == glibc]
    # wheels that one builds oneself; pip, too, ranks them last
    platforms.append(f"linux_{machine}")
    tags = [
        *cpython_tags(version, platforms=platforms),
        *compatible_tags(version, f"cp{major}{minor}", platforms=platforms),
    ]
    return {tag: rank for rank, tag in reversed(list(enumerate(tags)))}
