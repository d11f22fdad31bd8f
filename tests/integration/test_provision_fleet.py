"""Forty nodes: the whole playbook with forks, seconds a node, and what the controller takes.

Nodes and controller share this machine, so the seconds are an upper bound: on a real fleet each
node pays for itself. Memory and CPU are the controller's own.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.integration.site import Site, new_site
from tests.testbed.dockerd import DockerDaemon
from tests.testbed.memory import Peak, peak_memory
from tests.testbed.playbook import Run

pytestmark = pytest.mark.timeout(7200)
NODES = 40
# every systemd takes a handful, and all nodes' root is this machine's root
INOTIFY = Path("/proc/sys/fs/inotify/max_user_instances")
INOTIFY_WANTED = 2048
MAX_RSS_BYTES = 6 << 30


@contextmanager
def room_for_systemds() -> Iterator[None]:
    """Let one user have more inotify instances while inside."""
    was = INOTIFY.read_text()
    if int(was) < INOTIFY_WANTED:
        INOTIFY.write_text(str(INOTIFY_WANTED))
    try:
        yield
    finally:
        INOTIFY.write_text(was)


@pytest.fixture(scope="module")
def forty(
    request: pytest.FixtureRequest,
    docker_daemon: DockerDaemon,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Site]:
    if not request.config.getoption("--big"):
        pytest.skip("Forty nodes take half an hour: run with --big.")
    with ExitStack() as stack:
        stack.enter_context(room_for_systemds())
        names = [f"n{number:02}" for number in range(NODES)]
        site = new_site(docker_daemon, tmp_path_factory.mktemp("forty"), names)
        yield stack.enter_context(site)


def measured(site: Site, what: str, forks: int, *args: str) -> tuple[Run, Peak]:
    """A run with its figures printed: wall seconds, the controller's CPU and memory."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with peak_memory(str(site.tmp / "inventory.json")) as peak:
        run = site.run("--forks", str(forks), *args)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(
        f"{what}, {forks} forks: {run.tasks} tasks, {run.seconds:.0f} s,"
        f" {run.seconds / NODES:.1f} s a node; controller {cpu_s:.0f} s of CPU,"
        f" {peak.processes} processes, RSS {peak.rss_bytes >> 20} MiB,"
        f" PSS {peak.pss_bytes >> 20} MiB"
    )
    return run, peak


@pytest.mark.parametrize("forks", [5, 10, 20, 40])
def test_more_forks_cost_memory_that_stays_within_bounds(forty: Site, forks: int) -> None:
    # check mode, so that every number of forks finds the same fresh nodes
    only = ("--check", "--tags", "nvidia_repository")
    run, peak = measured(forty, "plan of one role", forks, *only)
    run.require_good()
    assert len(run.recap) == NODES
    assert forks < peak.processes <= forks + 3
    assert peak.rss_bytes < MAX_RSS_BYTES


def test_forty_fresh_nodes_are_provisioned_in_one_run_and_the_next_changes_nothing(
    forty: Site,
) -> None:
    run, peak = measured(forty, "first run", 20)
    run.require_good()
    assert len(run.recap) == NODES
    assert all(counts["changed"] > 10 for counts in run.recap.values())
    assert peak.rss_bytes < MAX_RSS_BYTES
    again, _ = measured(forty, "second run", 20)
    assert again.require_good().count("changed") == 0
    assert len(again.recap) == NODES
