"""The apt source, believed by its key only."""

from __future__ import annotations

from pathlib import Path

from pipeline.host.fleet.promised import RepositoryPromise
from pipeline.host.promises.answers import require
from pipeline.host.promises.look import Host, require_same_file, text_of

_SOURCE = "/etc/apt/sources.list.d/sm120-nvidia.sources"


def test_the_source_is_the_one_of_the_inventory(host: Host, wanted: RepositoryPromise) -> None:
    """Address, suite and components."""
    lines = [x for x in text_of(host, _SOURCE).splitlines() if x and not x.startswith("#")]
    said = {key: value.strip() for key, _, value in (x.partition(":") for x in lines)}
    want = {"Types": "deb", "URIs": wanted.url, "Suites": wanted.suite}
    want["Signed-By"] = wanted.key_place
    if wanted.components:
        want["Components"] = " ".join(wanted.components)
    require(said == want, f"{_SOURCE} says {said}")


def test_the_source_is_believed_by_its_own_key_only(host: Host, wanted: RepositoryPromise) -> None:
    """The key on the host is the controller's."""
    require_same_file(host, wanted.key_place, Path(wanted.key))


def test_what_the_host_had_before_is_noted(host: Host) -> None:
    """Without it `state: absent` would not know what to leave."""
    require(text_of(host, "/var/lib/sm120/before/packages").strip(), "the note is empty")
