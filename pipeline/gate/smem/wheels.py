"""Wheels outside an image's lock: another version of its engine, or this machine's platform."""

from __future__ import annotations

import zipfile
import zlib

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from pypi_simple import DistributionPackage

from pipeline.errors import CorruptArchive, ResolveFailed
from pipeline.fetch.http import Client
from pipeline.fetch.index import list_files
from pipeline.fetch.remote_zip import open_zip
from pipeline.fetch.settings import with_login
from pipeline.lock.model import WheelPin
from pipeline.lock.wheels import tag_ranks


class WheelFinder:
    """Asks the configured indexes for one wheel of an exact version."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._offers: dict[str, list[tuple[str, DistributionPackage]]] = {}

    def find(self, project: str, version: str, python: str, platform: str) -> WheelPin:
        """The wheel an installer would choose, by the hash that the index gives."""
        index, package = self._chosen(project, version, python, platform)
        return self._pinned(project, version, index, package)

    def read_member(
        self, project: str, version: str, python: str, platform: str, path: str
    ) -> bytes | None:
        """One file out of a wheel that stays where it is; none where it has no such file."""
        index, package = self._chosen(project, version, python, platform)
        with open_zip(self._client, with_login(package.url, index)) as wheel:
            try:
                return wheel.read(path)
            except KeyError:
                return None
            except (zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
                raise CorruptArchive(f"{package.filename}: {path}: {error}") from error

    def _chosen(
        self, project: str, version: str, python: str, platform: str
    ) -> tuple[str, DistributionPackage]:
        ranks = tag_ranks(python, platform)
        wanted = Version(version)
        fitting = []
        for index, package in self._listed(project):
            try:
                _, found, build, tags = parse_wheel_filename(package.filename)
            except InvalidWheelFilename:
                continue
            rank = min((ranks.get(tag, len(ranks)) for tag in tags), default=len(ranks))
            if found == wanted and rank < len(ranks):
                fitting.append((rank, -build[0] if build else 0, index, package))
        if not fitting:
            raise ResolveFailed(f"{project} {version}: no index has a wheel for {platform}")
        _, _, index, package = min(fitting, key=lambda x: x[:2])
        return index, package

    def _pinned(
        self, project: str, version: str, index: str, package: DistributionPackage
    ) -> WheelPin:
        sha256 = package.digests.get("sha256")
        if not sha256:
            raise ResolveFailed(f"{package.filename}: the index gives no sha256 for it")
        size = package.size or self._client.size_of(with_login(package.url, index))
        name = str(canonicalize_name(project))
        return WheelPin(
            name=name, version=version, file=package.filename, size_bytes=size, sha256=sha256
        )

    def offers(self, project: str, version: str) -> bool:
        """Whether some index has a wheel of a version, withdrawn or not."""
        wanted = Version(version)
        for _, package in self._listed(project):
            try:
                if package.package_type == "wheel" and Version(package.version or "") == wanted:
                    return True
            except InvalidVersion:
                continue
        return False

    def versions(self, project: str) -> list[Version]:
        """Every version that has a wheel and was not withdrawn, oldest first."""
        found = set()
        for _, package in self._listed(project):
            try:
                if package.package_type == "wheel" and package.version and not package.is_yanked:
                    found.add(Version(package.version))
            except InvalidVersion:
                continue
        return sorted(found)

    def _listed(self, project: str) -> list[tuple[str, DistributionPackage]]:
        if project not in self._offers:
            self._offers[project] = [
                (index, package)
                for index in self._client.settings.indexes
                for package in list_files(self._client, index, project)
            ]
        return self._offers[project]
