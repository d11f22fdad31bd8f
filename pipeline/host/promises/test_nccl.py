"""NCCL's settings and, where it applies, the patched library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.host.facts import HostFacts
from pipeline.host.fleet.promised import NcclPromise
from pipeline.host.known import Unknown
from pipeline.host.promises.answers import Unsure, moot, require, require_none
from pipeline.host.promises.look import Host, require_gone, require_same_file, text_of

_CONF, _ENV = "/etc/nccl.conf", "/etc/sm120/nccl.env"
_OURS = "# Written by the role nccl"
_ZEN_5 = 26


def require_settings(host: Host, path: str, want: dict[str, Any]) -> None:
    """Exactly these lines, in any order."""
    lines = [x for x in text_of(host, path).splitlines() if x and not x.startswith("#")]
    said = {name: value for name, _, value in (x.partition("=") for x in lines)}
    wanted = {name: str(value) for name, value in want.items()}
    wrong = [
        f"{n}={said.get(n, '(none)')}"
        for n in sorted({*said, *wanted})
        if said.get(n) != wanted.get(n)
    ]
    require_none(wrong, f"{path} says")


def test_programs_on_the_host_get_the_settings(host: Host, wanted: NcclPromise) -> None:
    """By the file that NCCL itself reads; none where no profile is chosen."""
    if wanted.container_settings:
        return require_settings(host, _CONF, wanted.settings)
    said = host.run(f"head -n 1 {_CONF} 2>/dev/null").stdout
    require(_OURS not in said, f"{_CONF} of an earlier profile is still there")


def test_containers_get_the_settings(host: Host, wanted: NcclPromise) -> None:
    """By the file that they are started with."""
    if not wanted.container_settings:
        return require_gone(host, [_ENV])
    require_settings(host, _ENV, wanted.container_settings)


def test_the_patched_library_is_ours_or_none(host: Host, wanted: NcclPromise) -> None:
    """Byte for byte."""
    if not wanted.patched:
        return require_gone(host, [wanted.patched_at])
    require_same_file(host, wanted.patched_at, Path(wanted.patched))


def test_the_patched_library_is_only_where_it_works(facts: HostFacts, wanted: NcclPromise) -> None:
    """Elsewhere its first all_reduce hangs."""
    if not wanted.patched:
        moot("no patched library is asked for")
    cpu, gpus = facts.cpu, facts.gpus
    if isinstance(gpus, Unknown):
        raise Unsure(gpus.unknown)
    good = cpu.vendor == "AuthenticAMD" and cpu.family == _ZEN_5 and len(gpus) == 8
    cure = "Leave nccl_patched_library out for this host and run the playbook again."
    require(good, f"{cpu.vendor} family {cpu.family} with {len(gpus)} GPUs", cure)
