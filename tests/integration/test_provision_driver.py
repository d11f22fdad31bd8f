"""A driver that changes: nothing goes before everything has come, and there is a way back.

Real: apt, dpkg, signatures, pins, holds, SSH, the order of a reboot. The packages are stand-ins.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.integration.host_command import Hosts
from tests.integration.site import Site
from tests.testbed.apt_repository import DRIVER, NEW_DRIVER, OLD_DRIVER
from tests.testbed.playbook import Run

# no share of these: one alone leaves the shared hosts with another driver
pytestmark = pytest.mark.timeout(1800)
ON_FIRST = ("--limit", "n1")
ONLY = ("--tags", "nvidia_repository,nvidia_driver", *ON_FIRST)
KEPT = "/var/lib/sm120/packages/driver"
NEW_NAMES: dict[str, Any] = {"packages": ["nvidia-driver-580-open"], "version": NEW_DRIVER}


@pytest.fixture(scope="module")
def site(hosts: Hosts) -> Iterator[Site]:
    """Its first node has the driver under the names without a branch, and has it again after."""
    assert hosts.first_run.code == 0, hosts.first_run.out[-3000:] + hosts.first_run.err
    yield hosts.site
    hosts.site.lock()


@pytest.fixture
def with_driver(site: Site) -> Site:
    """The same node, whatever an earlier test has left, with the locked driver again."""
    site.lock(packages=None, version=None)
    if drivers(site) != PLAIN:
        site.run(*ONLY).require_good()
    return site


@pytest.fixture
def with_new_driver(site: Site) -> Site:
    """The same node after its driver changed; the first test leaves it so."""
    site.lock(**NEW_NAMES)
    if drivers(site) != BRANCHED:
        site.run(*ONLY).require_good()
    return site


def drivers(site: Site) -> dict[str, str]:
    """What is installed of the driver, with its version and whether it is held."""
    form = "${Package} ${Version} ${db:Status-Abbrev}\\n"
    output = site.first.shell(f"dpkg-query -W -f '{form}' 'nvidia-*' 2>/dev/null", check=False)
    rows = [line.split() for line in output.splitlines()]
    return {
        name: f"{version} {state}"
        for name, version, state in rows
        if state != "un" and not name.startswith("nvidia-container-toolkit")
    }


PLAIN = dict.fromkeys(
    ("nvidia-open", "nvidia-kernel-open-dkms", "nvidia-driver-cuda"), f"{DRIVER}-1 hi"
)
BRANCHED = dict.fromkeys(
    (
        *("nvidia-driver-580-open", "nvidia-dkms-580-open"),
        *("nvidia-kernel-source-580-open", "nvidia-utils-580"),
    ),
    f"{NEW_DRIVER}-0ubuntu1 hi",
)


@contextmanager
def missing(site: Site, pattern: str) -> Iterator[None]:
    """A package that the index names and the server has not."""
    (deb,) = site.repository.root.glob(pattern)
    away = deb.rename(deb.with_suffix(".away"))
    try:
        yield
    finally:
        away.rename(deb)


@contextmanager
def no_repository(site: Site) -> Iterator[None]:
    """A repository that answers 404 to everything."""
    away = site.repository.root.rename(site.repository.root.with_name("away"))
    site.repository.root.mkdir()
    try:
        yield
    finally:
        site.repository.root.rmdir()
        away.rename(site.repository.root)


def flat(run: Run) -> str:
    return " ".join(run.text.split())


def loaded(site: Site) -> str:
    return site.first.shell("cat /proc/driver/nvidia/version")


def test_one_package_that_the_server_lacks_leaves_the_old_driver_as_it_was(
    with_driver: Site,
) -> None:
    site = with_driver
    before = site.first.shell("cat /etc/apt/preferences.d/sm120-driver.pref")
    site.lock(**NEW_NAMES)
    with missing(site, f"nvidia-utils-580_{NEW_DRIVER}*.deb"):
        run = site.run(*ONLY)
    assert run.count("failed") == 1
    assert "driver: nothing was removed or installed" in flat(run)
    assert "404" in run.text
    assert drivers(site) == PLAIN
    assert site.first.shell("cat /etc/apt/preferences.d/sm120-driver.pref") == before
    # and once the server has it, the change is made
    site.run(*ONLY).require_good()
    assert drivers(site) == BRANCHED


def test_the_driver_that_worked_comes_back_without_a_repository(
    with_new_driver: Site, is_long: bool
) -> None:
    site = with_new_driver
    assert NEW_DRIVER in loaded(site)
    with no_repository(site):
        if is_long:
            site.roll_back(*ON_FIRST, "--check").require_good()
            assert drivers(site) == BRANCHED
        site.roll_back(*ON_FIRST).require_good()
        assert drivers(site) == PLAIN
        assert DRIVER in loaded(site)


@pytest.mark.big
def test_a_second_rollback_returns_to_the_newer_driver(with_new_driver: Site) -> None:
    site = with_new_driver
    with no_repository(site):
        site.roll_back(*ON_FIRST).require_good()
        assert drivers(site) == PLAIN
        site.roll_back(*ON_FIRST).require_good()
        assert drivers(site) == BRANCHED
        assert NEW_DRIVER in loaded(site)


@pytest.mark.big
def test_other_bytes_on_the_server_leave_the_old_driver_as_it_was(with_driver: Site) -> None:
    site = with_driver
    site.lock(**NEW_NAMES)
    site.first.shell(f"rm -f {KEPT}/nvidia-utils-580_*.deb")
    (deb,) = site.repository.root.glob(f"nvidia-utils-580_{NEW_DRIVER}*.deb")
    kept = deb.read_bytes()
    deb.write_bytes(kept[:-20] + bytes(20))
    try:
        run = site.run(*ONLY)
    finally:
        deb.write_bytes(kept)
    assert run.count("failed") == 1
    assert "a package was REFUSED" in flat(run)
    assert drivers(site) == PLAIN


@pytest.mark.big
def test_a_second_run_downloads_and_changes_nothing(with_driver: Site) -> None:
    with_driver.run(*ONLY).require_good()
    assert with_driver.run(*ONLY).require_good().count("changed") == 0


@pytest.mark.big
def test_a_driver_that_was_installed_and_does_not_load_gives_way_to_the_last_that_did(
    with_driver: Site,
) -> None:
    site = with_driver
    site.lock(**NEW_NAMES)
    # the stand-in for a module that is not built: it never shows up as loaded
    site.first.shell(
        'printf \'[Service]\\nExecStart=/bin/sh -c "umount /proc/driver; exit 0"\\nType=oneshot\\n'
        "[Install]\\nWantedBy=multi-user.target\\n' > /etc/systemd/system/no-module.service"
        " && systemctl enable no-module"
    )
    run = site.run(*ONLY)
    site.first.shell("systemctl disable no-module; rm /etc/systemd/system/no-module.service")
    assert run.count("failed") == 1
    assert "sm120 host rollback -i INVENTORY --limit n1" in flat(run)
    assert drivers(site) == BRANCHED
    site.roll_back(*ON_FIRST).require_good()
    assert drivers(site) == PLAIN
    assert DRIVER in loaded(site)


@pytest.mark.big
def test_a_rollback_that_was_cut_off_is_finished_by_the_next(with_driver: Site) -> None:
    site = with_driver
    site.lock(**NEW_NAMES)
    site.run(*ONLY).require_good()
    site.roll_back(*ON_FIRST, cut_off_at="Install exactly the locked bytes")
    site.roll_back(*ON_FIRST).require_good()
    assert drivers(site) == PLAIN
    assert "rollback.json" not in site.first.shell(f"ls {KEPT}")


@pytest.mark.big
def test_the_packages_of_two_drivers_are_kept_and_no_more(with_driver: Site) -> None:
    site = with_driver
    for version in (OLD_DRIVER, NEW_DRIVER):
        site.lock(packages=["nvidia-driver-580-open"], version=version)
        site.run(*ONLY).require_good()
    kept = site.first.shell(f"ls {KEPT}").split()
    assert sorted(n for n in kept if n.endswith(".json")) == ["before.json", "working.json"]
    versions = {n.split("_")[1] for n in kept if n.endswith(".deb")}
    assert versions == {f"{v}-0ubuntu1" for v in (OLD_DRIVER, NEW_DRIVER)}
    assert site.first.shell(f"find {KEPT} ! -user root -o -perm /022") == ""
    working = json.loads(site.first.shell(f"cat {KEPT}/working.json"))
    assert {pin["version"] for pin in working["pins"]} == {f"{NEW_DRIVER}-0ubuntu1"}


@pytest.mark.big
@pytest.mark.parametrize(
    ("harm", "output"),
    [
        (f"rm {KEPT}/nvidia-open_*.deb", "does not have nvidia-open with the right bytes"),
        (f"echo x >> $(ls {KEPT}/nvidia-open_*.deb)", "does not have nvidia-open with the right"),
        (f"rm -r {KEPT}", "there is nothing to go back to"),
    ],
    ids=["a package is gone", "a package was changed", "nothing is kept"],
)
def test_a_way_back_that_is_damaged_is_named_and_nothing_is_removed(
    with_driver: Site, harm: str, output: str
) -> None:
    site = with_driver
    site.lock(**NEW_NAMES)
    site.run(*ONLY).require_good()
    site.first.shell(harm)
    run = site.roll_back(*ON_FIRST)
    assert run.count("failed") == 1
    assert output in flat(run)
    assert drivers(site) == BRANCHED
    site.first.shell(f"rm -rf {KEPT}")


@pytest.mark.big
def test_a_node_with_one_recorded_driver_has_nothing_to_go_back_to(with_driver: Site) -> None:
    with_driver.first.shell(f"rm -rf {KEPT}")
    with_driver.run(*ONLY).require_good()
    run = with_driver.roll_back(*ON_FIRST)
    assert run.count("failed") == 1
    assert "there is nothing to go back to" in flat(run)
    assert drivers(with_driver) == PLAIN
