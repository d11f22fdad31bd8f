"""The same playbook on the other systems: Debian 13, Ubuntu 24.04, and arm64 under emulation.

Their own packages make the nodes; NVIDIA's are stand-ins, as in test_provision. Where Ubuntu's
archive cannot be reached, a Debian node with Ubuntu's os-release shows what follows from the facts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from pipeline.core.errors import PromiseBroken
from tests.integration.host_command import verify
from tests.integration.site import LEFT, Site, new_site
from tests.testbed.apt_repository import DRIVER, NEW_DRIVER
from tests.testbed.debian import NOBLE, TRIXIE, UBUNTU_LIKE, System
from tests.testbed.dockerd import DockerDaemon
from tests.testbed.playbook import Run
from tests.testbed.signer import new_old_signer
from tests.testbed.snapshot import differences, snapshot

pytestmark = pytest.mark.timeout(3600)
# the driver's package and version by the system's way of naming
NAMES = {
    "debian-13": f"nvidia-open {DRIVER}-1",
    "ubuntu-24.04": f"nvidia-driver-580-open {NEW_DRIVER}-0ubuntu1",
}
SOURCE = ("--tags", "nvidia_repository")
PARTS = ("nvidia_repository", "nvidia_driver", "pcie", "nccl", "container_runtime", "host_tuning")


@pytest.fixture(
    scope="module",
    params=[TRIXIE, NOBLE, UBUNTU_LIKE],
    ids=["debian-13", "ubuntu-24.04", "ubuntu-like"],
)
def elsewhere(
    request: pytest.FixtureRequest,
    docker_daemon: DockerDaemon,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Site, list[str]]]:
    """One fresh node of another system, and what it was."""
    if not request.config.getoption("--big"):
        pytest.skip("Nodes of other systems take minutes: run with --big.")
    system: System = request.param
    with ExitStack() as stack:
        tmp = tmp_path_factory.mktemp(system.suite)
        site = stack.enter_context(new_site(docker_daemon, tmp, ["n1"], system))
        # some of systemd's services run at the very first boot only
        site.first.stop()
        site.first.start()
        yield site, snapshot(site.first)


def test_a_fresh_node_is_planned_provisioned_left_alone_and_given_back_on_stand_ins(
    elsewhere: tuple[Site, list[str]],
) -> None:
    site, before = elsewhere
    site.run("--check", "--diff").require_good()
    assert differences(before, snapshot(site.first), ()) == []
    run = site.run().require_good()
    print(f"{site.system.target}: {run.tasks} tasks, {run.seconds:.0f} s, {run.recap}")
    package, _, version = NAMES[site.system.name].partition(" ")
    query = f"dpkg-query -W -f '${{Version}} ${{db:Status-Want}}' {package}"
    assert site.first.shell(query) == f"{version} hold"
    assert version.partition("-")[0] in site.first.shell("cat /proc/driver/nvidia/version")
    assert site.first.shell("command -v docker") == "/usr/bin/docker\n"
    assert site.run().require_good().count("changed") == 0
    proved = verify(site)
    assert proved.code == 0, proved.out
    assert proved.rows("n1", "failed", "unknown") == set()
    assert promises_broken_by(site, "mv /usr/bin/docker /root", "mv /root/docker /usr/bin") == {
        "container_runtime: the engines command is there"
    }
    gone = {f"{name}_state": "absent" for name in PARTS}
    site.run(**gone).require_good()
    assert differences(before, snapshot(site.first), LEFT) == []
    assert site.run(**gone).require_good().count("changed") == 0


def promises_broken_by(site: Site, harm: str, undo: str) -> set[str]:
    """What the engine's role does not keep any more once that was done to its node."""
    site.first.shell(harm)
    result = verify(site, "--role", "container_runtime")
    site.first.shell(undo)
    assert result.code == PromiseBroken.exit_code, result.out
    return result.rows("n1", "failed", "unknown")


def test_a_key_bound_by_sha1_is_refused_by_debian_13s_own_apt_and_the_reason_is_told(
    elsewhere: tuple[Site, list[str]],
) -> None:
    site, _ = elsewhere
    if site.system.suite != "trixie":
        pytest.skip("Only Debian 13's apt verifies with Sequoia.")
    run = run_with_an_old_key(site)
    assert run.count("failed") == 1
    output = " ".join(run.text.split())
    assert "it is bound by SHA-1 only" in output
    assert "was REFUSED" not in output
    site.run(*SOURCE).require_good()
    site.run(*SOURCE, nvidia_repository_state="absent").require_good()


def test_a_key_bound_by_sha1_is_taken_where_apt_verifies_with_gpg(
    elsewhere: tuple[Site, list[str]],
) -> None:
    site, _ = elsewhere
    if site.system.suite == "trixie":
        pytest.skip("Debian 13's apt verifies with Sequoia.")
    run_with_an_old_key(site).require_good()
    site.run(*SOURCE, nvidia_repository_state="absent").require_good()


def run_with_an_old_key(site: Site) -> Run:
    """The repository as signed by such a key, given to the node with it."""
    with new_old_signer("old") as old:
        kept = site.repository.signer
        site.repository.signer = old
        site.repository.publish()
        try:
            return site.run(*SOURCE, nvidia_repository_key=str(old.keyring))
        finally:
            site.repository.signer = kept
            site.repository.publish()
