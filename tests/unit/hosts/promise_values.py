"""Promises that name files of the controller, and hosts on which a unit was changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.hosts.fleet.promised import WeightsPromise
from tests.unit.hosts.fake_host import FakeHost
from tests.unit.hosts.good_host import saying, shown


def weights_with(key: Path) -> WeightsPromise:
    return WeightsPromise(
        state="present",
        root="/models",
        home="/opt/sm120",
        command="/opt/sm120/venv/bin/sm120",
        wheel=str(key),
        requirements=str(key),
        locks=str(key.parent),
        sets=["tiny"],
        device="LABEL=models",
        scrub_days=30,
        scrub_at="daily",
    )


def keyed(promise: Any, key: Path) -> Any:
    """A promise that names the controller's file."""
    fields = {"key", "registry_ca"} & set(type(promise).model_fields)
    return promise.model_copy(update=dict.fromkeys(fields, str(key)))


def changed_unit(name: str, fragment: str = "/usr/lib/systemd/system") -> list[FakeHost]:
    """Hosts on which a unit is not as it was shipped."""
    asked = f"systemctl show {name} --property=FragmentPath"
    drop_in = f"/etc/systemd/system/{name}.d/x.conf"
    return [
        saying(asked, shown(name, drop_in, fragment=fragment)),
        # files that systemd has not read yet
        saying(asked, shown(name, fragment=fragment).replace("=no", "=yes")),
        saying(asked, shown(name, fragment="/etc/systemd/system")),
        saying(asked, "FragmentPath=\n"),
    ]
