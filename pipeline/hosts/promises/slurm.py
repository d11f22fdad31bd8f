"""A cluster's queue and its nodes: one key, settings of the head alone, processes in cgroups."""

from __future__ import annotations

import re

from pipeline.core.proc import last_line
from pipeline.hosts.fleet.promised import SlurmPromise
from pipeline.hosts.promises import checks
from pipeline.hosts.promises.checks import Host, require, require_none, skip_unless

_KEY = "/etc/munge/munge.key"
_DROP_IN = "/etc/systemd/system/slurmd.service.d/sm120.conf"
_SETTINGS = "/etc/slurm/slurm.conf"
# what a node that takes work is, as `sinfo` writes it; a star stands for one that does not answer
_WORKING = ("idle", "mixed", "allocated", "completing", "reserved")
_LOOK = "systemctl status munge slurmd; tail /var/log/slurm/slurmd.log"


def test_its_units_run_and_start_at_boot(host: Host, wanted: SlurmPromise) -> None:
    """The system's own, with no change but our drop-in."""
    parts = {"munge": True, "slurmctld": wanted.is_head, "slurmd": wanted.is_node}
    for name in [name for name, is_wanted in parts.items() if is_wanted]:
        checks.require_unit(host, name)
        checks.require_untouched_unit(host, f"{name}.service", ours=[_DROP_IN])


def test_the_key_is_the_clusters_and_munges_alone(host: Host, wanted: SlurmPromise) -> None:
    """Compared by digest: who has it can run jobs as anybody."""
    file = host.file(_KEY)
    require(file.exists, f"{_KEY} is missing")
    fix = "Run the playbook. Debian's package makes a key for each host when it is installed."
    require(file.sha256sum == wanted.key_sha256, f"{_KEY} is another key than the inventory's", fix)
    mode = file.mode
    fix = f"chmod 400 {_KEY}, then a new key for the whole cluster."
    require(mode & 0o377 == 0, f"{_KEY} is open to others ({mode:04o})", fix)
    require(file.user == "munge", f"{_KEY} belongs to {file.user}", f"chown munge: {_KEY}")


def test_the_queue_answers_this_host(host: Host, wanted: SlurmPromise) -> None:
    """By its key, and with the settings on which `--on slurm` relies."""
    done = host.run("scontrol show config")
    require(done.rc == 0, f"the head does not answer: {last_line(done.stderr)}", _LOOK)
    rows = re.findall(r"^(\w+)\s*= (.*)$", done.stdout, re.M)
    have = {name: value.strip() for name, value in rows}
    # linuxproc leaves processes behind; arguments of jobs are nobody else's
    meant = {"ClusterName": wanted.cluster, "ProctrackType": "proctrack/cgroup"}
    meant |= {"PrivateData": "jobs", "AuthType": "auth/munge", "TaskPlugin": "task/cgroup"}
    wrong = [f"{n} is {have.get(n)}, not {v}" for n, v in meant.items() if have.get(n) != v]
    require_none(wrong, "the queue has other settings", "Run the playbook on the head.")


def test_only_the_head_has_settings(host: Host, wanted: SlurmPromise) -> None:
    """A node's own would differ one day, which Slurm only logs."""
    if wanted.is_head:
        text = checks.text_of(host, _SETTINGS)
        nodes = len(re.findall(r"^NodeName=", text, re.M))
        require(nodes == wanted.nodes, f"{_SETTINGS} has {nodes} nodes, not {wanted.nodes}")
        named = f"PartitionName={wanted.partition} " in text
        return require(named, f"{_SETTINGS} has no partition {wanted.partition}")
    checks.require_gone(host, [_SETTINGS, "/etc/slurm/gres.conf", "/etc/slurm/cgroup.conf"])
    # it would count the same cards
    fix = "systemctl disable --now slurmctld, or name the host as slurm_head."
    require(not host.service("slurmctld").is_running, "the host runs a queue of its own", fix)


def test_the_node_takes_work(host: Host, wanted: SlurmPromise) -> None:
    """As the head has it."""
    skip_unless(wanted.is_node, "the host is no node")
    state = checks.output_of(
        host,
        "the head cannot be asked",
        'sinfo --noheader --nodes="$(hostname -s)" --format=%T',
    ).strip()
    fix = f"{_LOOK}; then `scontrol update nodename=NAME state=resume`."
    require(state in _WORKING, f"the node is {state or 'unknown to the head'}", fix)


def test_every_card_is_one_that_jobs_can_ask_for(host: Host, wanted: SlurmPromise) -> None:
    """As many as have a device."""
    skip_unless(wanted.is_node, "the host is no node")
    found = host.run("find /dev -maxdepth 1 -type c -name 'nvidia[0-9]*'").stdout.split()
    text = checks.output_of(host, "the head cannot be asked", 'scontrol show node "$(hostname -s)"')
    counted = re.search(r"^\s*Gres=gpu:\w+:(\d+)", text, re.M)
    number = int(counted[1]) if counted else 0
    fix = "Run the playbook on the head; `nvidia-smi` shows cards that fell off the bus."
    require(number == len(found), f"{len(found)} cards have a device, the queue has {number}", fix)
