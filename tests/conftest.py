"""Options for the whole test run, and what of it stays together when it is shared out."""

from __future__ import annotations

import gc
import json
import signal
import subprocess
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import pytest

from tests import side_by_side
from tests.testbed.packages import CannotHave

Thing = TypeVar("Thing")
# Seconds of the parts of a run that take longest, on two busy cores; they only set the order.
DURATIONS = Path(__file__).with_name("durations.json")
# Files with real parts that take about as long: a run takes one of each row, by the commit.
IN_TURN = [
    tuple(f"tests/integration/{name}.py" for name in row.split())
    for row in (
        "test_serve_on_host test_image_starts test_publish test_foreign_base",
        "test_publish_stopped test_evidence_chain test_compiled_image test_serve_recipe",
        "test_interruptions test_reproducible test_agent_clients test_obstacles",
        "test_weights_serve test_weights_fetch test_air_gap test_bump_engine",
        "test_bench_beside test_bench_client test_gate_small test_weights_verify",
        "processes/test_source_bad roles/test_fleet_order test_weights_signing test_render_tools",
        "processes/test_limits processes/test_source_ways test_shared_objects test_report_browser",
        "test_provision_driver roles/test_registry_role roles/test_engine_role",
        "test_tree_equals_pip test_offline_bootstrap test_bench_pull test_render_run",
        "test_chaos_quick test_perf_rack",
    )
]


def pytest_configure() -> None:
    """Let Ctrl-C stop children, also in the background, and let tests ask servers directly."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # most that tests make goes with its last reference; looking for the rest costs one twentieth
    gc.set_threshold(50_000, 20, 50)
    # urlopen keeps the proxy of its first call: a unit test's closed door would stay shut for all
    urllib.request.install_opener(urllib.request.build_opener(urllib.request.ProxyHandler({})))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    """What this machine cannot have, it does not test; the reason is said."""
    with _skipped():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Also where a test finds out by itself."""
    with _skipped():
        return (yield)


@pytest.fixture(autouse=True)
def _signals_stay() -> Iterator[None]:
    """A test that leaves SIGTERM ignored makes a later test's child immortal."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    left = [signal.getsignal(number) for number in numbers]
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    assert left == before, "this test left a signal handler behind"
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()), "this test left a signal blocked"


@contextmanager
def _skipped() -> Iterator[None]:
    try:
        yield
    except CannotHave as why:
        pytest.skip(str(why))


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--big`: also the tests that need the engine images, and more of what is done by chance."""
    words = "test the engine images too (gigabytes), and kill twenty times where four must do"
    parser.addoption("--big", action="store_true", help=words)
    side_by_side.add_option(parser)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files first, so that no process works alone at the end.

    Tests marked `big` run with `--big` only; without it not even their fixtures are set up. Of
    tests marked `share(n)` a run takes n, and with each commit others, so that all have their turn.
    """
    seconds = json.loads(DURATIONS.read_text(encoding="utf-8"))
    items.sort(key=lambda item: -seconds.get(part_of(item.nodeid), 0))
    if config.getoption("--big"):
        return
    skip = pytest.mark.skip(reason="Whole runs one after the other take minutes: run with --big.")
    shared: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("big"):
            item.add_marker(skip)
        elif mark := next(item.iter_markers_with_node("share"), None):
            # a module's mark counts for all its tests, a function's for all that it is given
            node, (most, *group) = mark[0], mark[1].args
            name = item.nodeid.partition("[")[0] if node is item else node.nodeid
            shared[group[0] if group else name, most].append(item)
    if any(word.partition("::")[0].endswith(".py") for word in config.args):
        return  # who names a file wants it
    later = {part for row in IN_TURN for part in a_share(row, len(row), str)[1:]}
    others = [item for item in items if item.nodeid.partition("::")[0] in later]
    for (_, most), alike in shared.items():
        others += a_share(alike, len(alike), lambda i: i.nodeid)[most:]
    for item in others:
        item.add_marker(pytest.mark.skip(reason="With another commit, or with --big."))


def a_share(things: Iterable[Thing], most: int, name: Callable[[Thing], str]) -> list[Thing]:
    """So many of them, in an order that the commit decides."""
    commit = _commit()
    return sorted(things, key=lambda t: sha256(commit + name(t).encode()).digest())[:most]


@cache
def _commit() -> bytes:
    git = ["git", "-C", str(DURATIONS.parent), "rev-parse", "HEAD"]
    return subprocess.run(git, capture_output=True, check=False).stdout


def pytest_collection_finish() -> None:
    """What was collected stays to the end: the garbage collector need not look at it each time."""
    gc.freeze()


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Share out parts, in the order of a run in one process: the long ones come first."""
    return side_by_side.run_loop(session, part_of)


def part_of(node: str) -> str:
    """What one process runs in one go: a file, whose tests share what its fixtures made.

    The files about provisioning share two hosts: minutes of Ansible would be twice as many.
    """
    file = node.partition("::")[0]
    return "hosts" if "integration/test_provision" in file else file
