"""From the hosts' spec to exact packages, through one signed index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.core.errors import ResolveFailed, UnknownPackage
from pipeline.hosts.lock_model import LockedPart, TargetLock
from pipeline.hosts.spec import HostSpec
from pipeline.images.lock.debian import (
    Alternatives,
    Stanza,
    dependency_text,
    pin_of,
    read_relations,
    version_key,
)
from pipeline.images.lock.debs import MAX_RELEASE_BYTES, Get, read_packages
from pipeline.images.lock.release import read_keyring, read_release, sha1_bound

Accepts = Callable[[str], bool]
# R590 dropped the branch from Ubuntu's package names; Debian's never had it.
_FIRST_WITHOUT_BRANCH = 590


@dataclass
class PackageIndex:
    """All versions of all packages, newest first."""

    date: str
    # the key that signed the index, where nothing stronger than SHA-1 binds it
    sha1_key: str = ""
    stanzas: dict[str, list[Stanza]] = field(default_factory=dict)
    providers: dict[str, list[str]] = field(default_factory=dict)

    def newest(self, name: str, accepts: Accepts) -> Stanza | None:
        """The newest version that is accepted."""
        return next((s for s in self.stanzas.get(name, ()) if accepts(s["Version"])), None)


def read_package_index(
    get: Get,
    keyring: Path,
    architecture: str,
    suite: str | None = None,
    components: Sequence[str] = ("main",),
) -> PackageIndex:
    """Read a repository's index for one architecture, if the keyring signed it.

    Without a suite it is flat, as NVIDIA's are; a mirror may have suites.
    """
    base = f"dists/{suite}" if suite else ""
    release = read_release(get(f"{base}/InRelease".lstrip("/"), MAX_RELEASE_BYTES), keyring=keyring)
    # a flat repository has one index, beside its Release file
    folders = [f"{c}/binary-{architecture}" for c in components] if base else [""]
    # weak only if SHA-1 binds every signer: apt needs just one key that it accepts
    weak = release.signers & sha1_bound(read_keyring(keyring))
    sha1_key = min(weak) if weak == release.signers else ""
    index = PackageIndex(f"{release.date:%Y-%m-%dT%H:%M:%SZ}", sha1_key)
    for folder in folders:
        for stanza in read_packages(get, base, release, folder):
            if stanza.get("Architecture") in (architecture, "all"):
                index.stanzas.setdefault(stanza["Package"], []).append(stanza)
                for (provided,) in read_relations(stanza.get("Provides", "")):
                    index.providers.setdefault(provided.name, []).append(stanza["Package"])
    for versions in index.stanzas.values():
        versions.sort(key=lambda s: version_key(s["Version"]), reverse=True)
    return index


def refused_key(target: str, index: PackageIndex) -> str:
    """The key that makes the target's apt refuse the repository; empty if it accepts.

    Debian 13's apt verifies with Sequoia, which rejects SHA-1 self-signatures since 2026-02-01
    (NVIDIA/cuda-repo-management#30, #34, #39).
    """
    return index.sha1_key if target.startswith("debian-13/") else ""


def lock_target(spec: HostSpec, target: str, index: PackageIndex) -> TargetLock:
    """Lock the exact packages of one system, one version of each for all parts."""
    release = spec.cuda.release
    # a branch alone means its newest driver
    driver = spec.driver.version or f"{spec.driver.branch}"
    # always the open kernel modules, the only ones that Blackwell runs with:
    # https://github.com/NVIDIA/open-gpu-kernel-modules/issues/872
    has_branch = target.startswith("ubuntu-") and spec.driver.branch < _FIRST_WITHOUT_BRANCH
    usual = f"nvidia-driver-{spec.driver.branch}-open" if has_branch else "nvidia-open"
    names = [usual] if spec.driver.packages is None else spec.driver.packages
    choice = _Choice(index)
    # the spec gives a lower bound only: the newest is taken
    oldest = version_key(spec.container_toolkit.at_least)
    return TargetLock(
        index_date=index.date,
        driver=choice.part(names, lambda v: _is_of(v, driver)),
        cuda=choice.part(
            [f"cuda-toolkit-{release.replace('.', '-')}"], lambda v: _is_of(v, release)
        ),
        container_toolkit=choice.part(
            ["nvidia-container-toolkit"], lambda v: version_key(v) >= oldest
        ),
        nccl=choice.part(
            # built once for each CUDA release, which its version ends with
            ["libnccl2"],
            lambda v: _is_of(v, spec.nccl.release) and v.endswith(f"+cuda{release}"),
        ),
    )


def _is_of(version: str, release: str) -> bool:
    """Whether a Debian version belongs to an upstream release: 13.0.2-1 to 13.0."""
    upstream = version.partition(":")[2] if ":" in version else version
    return upstream == release or upstream.startswith((f"{release}.", f"{release}-"))


@dataclass
class _Choice:
    """One version of each package that was needed so far."""

    index: PackageIndex
    chosen: dict[str, Stanza] = field(default_factory=dict)

    def part(self, names: Sequence[str], accepts: Accepts) -> LockedPart:
        reached: dict[str, Stanza] = {}
        todo: list[Stanza] = []
        for name in names:
            if (newest := self.index.newest(name, accepts)) is not None:
                todo.append(newest)
            elif offered := [s["Version"] for s in self.index.stanzas.get(name, ())]:
                raise ResolveFailed(
                    f"{name}: no version satisfies the spec (offered: {', '.join(offered[:5])})",
                    "Correct lockfiles/host.yaml, or name a repository that has such a version.",
                )
            else:
                message = f"the repository has no package {name}"
                raise UnknownPackage(message, "Check that it is the repository of this system.")
        while todo:
            stanza = todo.pop()
            name = stanza["Package"]
            if name in reached:
                continue
            reached[name] = known = self.chosen.setdefault(name, stanza)
            if known["Version"] != stanza["Version"]:
                raise ResolveFailed(
                    f"{name} is needed as {known['Version']} and as {stanza['Version']}"
                )
            for field_name in ("Pre-Depends", "Depends"):
                for group in read_relations(stanza.get(field_name, "")):
                    if (needed := self._resolve(group, stanza)) is not None:
                        todo.append(needed)
        # a flat repository writes ./name, a lock does not
        pins = [
            pin_of({**stanza, "Filename": stanza.get("Filename", "").removeprefix("./")})
            for _, stanza in sorted(reached.items())
        ]
        return LockedPart(packages=sorted(names), debs=pins)

    def _resolve(self, group: Alternatives, needed_by: Stanza) -> Stanza | None:
        """Find the repository's package for a dependency; None if the system's archive has it."""
        # prefer a chosen package: one version of each for all parts
        for relation in group:
            known = self.chosen.get(relation.name)
            if known is not None and relation.accepts(known["Version"]):
                return known
        first = group[0]
        name = first.name
        # a provider will do; any rule works, but two locks of one index must agree
        if name not in self.index.stanzas:
            name = min(self.index.providers.get(name, ()), default="")
        if not name:
            return None
        # packages of one source go together, also where the dependency is loose
        same = self.index.newest(name, lambda v: v == needed_by["Version"])
        if same is not None and (name != first.name or first.accepts(same["Version"])):
            return same
        newest = self.index.newest(name, first.accepts)
        if newest is None and len(group) == 1:
            raise ResolveFailed(
                f"{needed_by['Package']} needs {dependency_text(group)},"
                " which the repository does not offer"
            )
        return newest
