"""Everything that this machine is configured with, put together: for resolving, for fetching."""

from __future__ import annotations

from pipeline.artifacts.store.store import Store
from pipeline.core.errors import SourceUnreachable
from pipeline.core.net.http import Client
from pipeline.core.net.settings import Settings, default_index, read_settings, with_login
from pipeline.images.fetch.base_settings import BaseSettings
from pipeline.images.fetch.inputs import Fetcher
from pipeline.images.fetch.sources import Sources, debian_mirror, read_below
from pipeline.images.lock.make import Transport
from pipeline.images.lock.wheels import SizeFinder


def make_fetcher(
    store: Store, mirrors: tuple[str, ...], offline: bool, bases: BaseSettings | None = None
) -> Fetcher:
    """A fetcher over everything that this machine is configured with."""
    client = Client(read_settings(mirrors))
    return Fetcher(store, client, Sources(client), offline=offline, bases=bases)


def make_transport() -> Transport:
    """How a lock reaches the configured index and mirror."""
    settings = read_settings()
    client = Client(settings)

    def debian(path: str, most_bytes: int) -> bytes:
        return read_below(client, debian_mirror().main, path, most_bytes)

    def security(path: str, most_bytes: int) -> bytes:
        return read_below(client, debian_mirror().security, path, most_bytes)

    # without an index at all, uv would ask the default one
    args = [] if settings.indexes else ["--no-index"]
    return Transport(debian, security, size_finder(client), args, uv_environment(settings))


def uv_environment(settings: Settings) -> dict[str, str]:
    """Our settings as uv's variables: arguments, with a password, would be open to all users."""
    env = {}
    if settings.indexes and settings.indexes[0] != default_index():
        env["UV_DEFAULT_INDEX"] = settings.indexes[0]
    if settings.indexes[1:]:
        env["UV_INDEX"] = " ".join(settings.indexes[1:])
    if folders := [str(f) for f in settings.folders if f.is_dir()]:
        env["UV_FIND_LINKS"] = ",".join(folders)
    if settings.ca_file:
        env["SSL_CERT_FILE"] = settings.ca_file
    if settings.proxy:
        env |= {"HTTP_PROXY": settings.proxy, "HTTPS_PROXY": settings.proxy}
    return env


def size_finder(client: Client) -> SizeFinder:
    """A file's size from the folder it is in, from the index, or else from the file server."""
    from pipeline.images.fetch.index import find_file  # slow to import, and only a new lock asks

    def size_of(project: str, filename: str, sha256: str) -> int:
        # the lock holds sizes, so that a plan can say what a build will fetch
        for folder in client.settings.folders:
            if (folder / filename).is_file():
                return (folder / filename).stat().st_size
        for index in client.settings.indexes:
            for package in find_file(client, index, project, filename):
                if package.digests.get("sha256") == sha256:
                    return package.size or client.size_of(with_login(package.url, index))
        raise SourceUnreachable(f"{filename}: resolved, but no index lists it")

    return size_of
