"""The promises of the role slurm over a host of plain values: kept, and broken in each way."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest

from pipeline.hosts.fleet.promised import SlurmPromise
from pipeline.hosts.promises import slurm
from pipeline.hosts.promises.checks import Broken, NotApplicable, Outcome, Undecided
from tests.unit.hosts.fake_host import FakeHost
from tests.unit.hosts.good_host import shown

KEY = "0123456789abcdef" * 4
HEAD = SlurmPromise(
    state="present",
    is_head=True,
    is_node=True,
    cluster="sm120",
    partition="all",
    nodes=2,
    key_sha256=hashlib.sha256(KEY.encode()).hexdigest(),
)
NODE = HEAD.model_copy(update={"is_head": False})
ALONE = HEAD.model_copy(update={"is_node": False})
CONFIG = """Configuration data as of 2026-11-18T06:00:00
AuthType                = auth/munge
ClusterName             = sm120
PrivateData             = jobs
ProctrackType           = proctrack/cgroup
TaskPlugin              = task/cgroup
"""
SETTINGS = (
    "ClusterName=sm120\nNodeName=n1 CPUs=2\nNodeName=n2 CPUs=2\nPartitionName=all Nodes=n1,n2\n"
)
UNIT = "systemctl show slurmd.service --property=FragmentPath"
STATE = 'sinfo --noheader --nodes="$(hostname -s)"'
SHOW = 'scontrol show node "$(hostname -s)"'
GOOD = FakeHost(
    files={slurm._KEY: KEY, slurm._SETTINGS: SETTINGS},
    modes={slurm._KEY: 0o400},
    owners={slurm._KEY: "munge"},
    units=dict.fromkeys(("munge", "slurmctld", "slurmd"), (True, True)),
    outputs={
        "scontrol show config": (0, CONFIG),
        STATE: (0, "idle\n"),
        SHOW: (0, "NodeName=n1 Arch=x86_64\n   Gres=gpu:sm120:2\n"),
        "find /dev": (0, "/dev/nvidia0\n/dev/nvidia1\n"),
        **{
            f"systemctl show {name}.service --property=FragmentPath": (0, shown(f"{name}.service"))
            for name in ("munge", "slurmctld", "slurmd")
        },
    },
)
BARE = GOOD.but(files={slurm._SETTINGS: None}, units={"slurmctld": (False, False)})
Check = Callable[[FakeHost, SlurmPromise], None]
UNITS: Check = slurm.test_its_units_run_and_start_at_boot
MUNGE: Check = slurm.test_the_key_is_the_clusters_and_munges_alone
QUEUE: Check = slurm.test_the_queue_answers_this_host
FILES: Check = slurm.test_only_the_head_has_settings
WORKS: Check = slurm.test_the_node_takes_work
CARDS: Check = slurm.test_every_card_is_one_that_jobs_can_ask_for


def saying(command: str, text: str, rc: int = 0) -> FakeHost:
    return GOOD.but(outputs={command: (rc, text)})


@pytest.mark.parametrize("check", [UNITS, MUNGE, QUEUE, FILES, WORKS, CARDS])
def test_a_sound_host_keeps_every_promise(check: Check) -> None:
    for host, wanted in ((GOOD, HEAD), (BARE, NODE)):
        try:
            check(host, wanted)
        except Outcome as outcome:
            pytest.fail(f"{outcome.verdict}: {outcome.why}")


@pytest.mark.parametrize("check", [WORKS, CARDS])
def test_a_head_that_does_no_work_is_not_judged_as_a_node(check: Check) -> None:
    with pytest.raises(NotApplicable):
        check(GOOD, ALONE)


BROKEN: list[tuple[str, Check, FakeHost, SlurmPromise, str]] = [
    ("munge off", UNITS, GOOD.but(units={"munge": (True, False)}), NODE, "munge does not run"),
    ("at boot", UNITS, GOOD.but(units={"slurmd": (False, True)}), NODE, "does not start at boot"),
    ("no queue", UNITS, GOOD.but(units={"slurmctld": (True, False)}), HEAD, "slurmctld does not"),
    (
        "a drop-in of somebody's",
        *(UNITS, saying(UNIT, shown("slurmd.service", "/etc/x.conf"))),
        *(NODE, "slurmd.service is changed by: /etc/x.conf"),
    ),
    ("no key", MUNGE, GOOD.but(files={slurm._KEY: None}), NODE, "munge.key is missing"),
    ("Debian's own key", MUNGE, GOOD.but(files={slurm._KEY: "x"}), NODE, "is another key"),
    ("an open key", MUNGE, GOOD.but(modes={slurm._KEY: 0o440}), NODE, "open to others (0440)"),
    ("root's key", MUNGE, GOOD.but(owners={slurm._KEY: "root"}), NODE, "belongs to root"),
    ("a writable key", MUNGE, GOOD.but(modes={slurm._KEY: 0o600}), NODE, "(0600)"),
    (
        "another key on the head",
        *(QUEUE, saying("scontrol show config", "x\nProtocol authentication error\n", 1)),
        *(NODE, "the head does not answer: Protocol authentication error"),
    ),
    (
        "processes that leak",
        *(QUEUE, saying("scontrol show config", CONFIG.replace("k/cgroup", "k/linuxproc", 1))),
        *(NODE, "ProctrackType is proctrack/linuxproc, not proctrack/cgroup"),
    ),
    (
        "jobs that all can read",
        *(QUEUE, saying("scontrol show config", CONFIG.replace("jobs", "none"))),
        *(NODE, "PrivateData is none, not jobs"),
    ),
    (
        "another cluster",
        *(QUEUE, saying("scontrol show config", CONFIG.replace("= sm120", "= other"))),
        *(NODE, "ClusterName is other, not sm120"),
    ),
    ("settings of its own", FILES, GOOD, NODE, "is still there: /etc/slurm/slurm.conf"),
    (
        "a second queue",
        *(FILES, BARE.but(units={"slurmctld": (False, True)}), NODE),
        "the host runs a queue of its own",
    ),
    ("no settings", FILES, BARE, HEAD, "/etc/slurm/slurm.conf is missing"),
    (
        "a node forgotten",
        *(FILES, GOOD.but(files={slurm._SETTINGS: SETTINGS.replace("NodeName=n2", "#")})),
        *(HEAD, "has 1 nodes, not 2"),
    ),
    (
        "another partition",
        *(FILES, GOOD.but(files={slurm._SETTINGS: SETTINGS.replace("Name=all", "Name=gpu")})),
        *(HEAD, "has no partition all"),
    ),
    ("down", WORKS, saying(STATE, "down*\n"), NODE, "the node is down*"),
    ("drained", WORKS, saying(STATE, "drained\n"), NODE, "the node is drained"),
    ("idle, silent", WORKS, saying(STATE, "idle*\n"), NODE, "the node is idle*"),
    ("unknown", WORKS, saying(STATE, ""), NODE, "the node is unknown to the head"),
    ("a card lost", CARDS, saying("find /dev", "/dev/nvidia0\n"), NODE, "1 cards have a device"),
    ("no cards named", CARDS, saying(SHOW, "   Gres=(null)\n"), NODE, "the queue has 0"),
]


@pytest.mark.parametrize(
    ("check", "host", "wanted", "why"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN]
)
def test_each_break_is_noticed(
    check: Check, host: FakeHost, wanted: SlurmPromise, why: str
) -> None:
    with pytest.raises(Broken) as broken:
        check(host, wanted)
    assert why in broken.value.why


@pytest.mark.parametrize("check", [WORKS, CARDS])
def test_a_head_that_does_not_answer_leaves_a_nodes_state_undecided(check: Check) -> None:
    host = GOOD.but(outputs={STATE: (1, "Unable to contact"), SHOW: (1, "Unable to contact")})
    with pytest.raises(Undecided):
        check(host, NODE)
