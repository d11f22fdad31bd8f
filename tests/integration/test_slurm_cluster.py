"""Gates over a cluster that the role slurm made of two nodes: Debian's own Slurm and munge.

Real, beside what tests/integration/cluster.py lists: the gates of parsers and of kernels of
sglang-k2 in their sandbox, a node that loses its power.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster import GPUS, KEY, PYTHON, STORE, Cluster, Judged, two_nodes
from tests.integration.host_command import verify
from tests.testbed.debian import BOOKWORM, TRIXIE
from tests.testbed.dockerd import DockerDaemon
from tests.testbed.forked import run_forked
from tests.testbed.nodes import USER
from tests.testbed.playbook import ROOT

pytestmark = [pytest.mark.big, pytest.mark.timeout(3600)]
PARSERS, KERNELS = Judged("parsers", "kimi-k2/*/*", 6), Judged("smem", "decode-*", 4)
IMAGE = "llama-cpp-cpu"
both_gates = pytest.mark.parametrize("judged", [PARSERS, KERNELS], ids=lambda each: each.gate)


def findings(result: dict[str, Any]) -> str:
    """All that was found, without times and whether it was kept."""
    text = json.dumps(result, sort_keys=True, indent=1)
    return re.sub(r'^\s*"(seconds|cached)": .*$', "", text, flags=re.M)


@pytest.fixture(scope="module", params=[BOOKWORM, TRIXIE], ids=["debian-12", "debian-13"])
def cluster(
    request: pytest.FixtureRequest,
    docker_daemon: DockerDaemon,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cluster]:
    """Two fresh nodes, to which the first test gives the role."""
    if not (STORE / "gate" / "environments").is_dir():
        pytest.skip("No parser gate was run here: `sm120 gate run sglang-k2 --only parsers`.")
    with ExitStack() as stack:
        tmp = tmp_path_factory.mktemp(request.param.suite)
        yield stack.enter_context(two_nodes(docker_daemon, tmp, request.param))


def test_the_role_makes_a_cluster_and_its_second_run_changes_nothing(cluster: Cluster) -> None:
    site = cluster.site
    only = ("--tags", "slurm")
    site.run("--check", "--diff", *only).require_good()
    assert "slurm" not in cluster.head.shell("ls /etc")
    first = site.run(*only).require_good()
    print(f"{site.system.target}: {first.tasks} tasks, {first.seconds:.0f} s")
    assert KEY not in first.text
    assert site.run(*only).require_good().count("changed") == 0
    states = cluster.head.shell("sinfo --noheader --Node --format='%N %T %G'")
    assert states.splitlines() == [f"n{i} idle gpu:sm120:{GPUS}" for i in (1, 2)]
    # the second has no settings of its own
    assert "slurm.conf" not in site.second.shell("ls /etc/slurm")
    see = "srun --nodelist=n2 --gpus=1 printenv CUDA_VISIBLE_DEVICES"
    assert cluster.head.shell(see).strip() == "0"
    proved = verify(site)
    rows = proved.rows("n1", "passed") & proved.rows("n2", "passed")
    assert "slurm: the queue answers this host" in rows
    assert {r for n in ("n1", "n2") for r in proved.rows(n, "failed") if "slurm" in r} == set()


@both_gates
def test_chunks_over_nodes_find_what_one_machine_finds_and_a_second_run_submits_nothing(
    cluster: Cluster, judged: Judged
) -> None:
    before = len(cluster.jobs())
    alone = cluster.serial(judged, "/srv/serial")
    together, said = cluster.chunked(judged, "/srv/chunked")
    print(said)
    assert findings(together) == findings(alone)
    assert len(together["cases"]) > 10
    assert cluster.answers("/srv/chunked") == cluster.answers("/srv/serial")
    jobs = cluster.jobs()[before:]
    assert len(jobs) == -(-len(together["cases"]) // judged.chunk)
    assert all("JobState=COMPLETED" in job for job in jobs), jobs
    assert {n for n in ("n1", "n2") if any(f"NodeList={n}" in j for j in jobs)} == {"n1", "n2"}
    again, said = cluster.chunked(judged, "/srv/chunked")
    assert "to Slurm" not in said
    assert findings(again) == findings(alone)
    assert all(case["cached"] for case in again["cases"])
    assert len(cluster.jobs()) == before + len(jobs)


def test_nodes_build_an_image_again_with_equal_bytes_and_are_not_asked_twice(
    cluster: Cluster, tmp_path: Path
) -> None:
    if not (STORE / "images" / IMAGE / "linux-amd64").is_dir():
        pytest.skip(f"The store has no {IMAGE}: `sm120 build {IMAGE}`.")
    collect = ("--store", str(STORE), "image", "collect", IMAGE, "--platform", "linux/amd64")
    run_forked(*collect, "--output", str(tmp_path / "mirror")).check_returncode()
    for node in cluster.site.fleet.nodes:
        node.put(tmp_path / "mirror", "/srv/mirror")
    # it has the first build, read-only; the node's own store has none
    cluster.head.shell(
        "cp /srv/store/store.json /srv/rebuilt &&"
        f" chown {USER}: /srv/rebuilt /srv/rebuilt/store.json"
    )
    node_command = "/usr/bin/env SM120_MIRRORS=/srv/mirror /usr/local/bin/sm120-node"
    words = ("image", "rebuild", IMAGE, "--platform", "linux/amd64", "--offline", "--on", "slurm")
    line = f"{PYTHON} --store /srv/rebuilt {' '.join(words)} --node-command '{node_command}'"
    before = len(cluster.jobs())
    said = cluster.head.shell(f"cd {ROOT} && su {USER} -c {json.dumps(line)}")
    print(said)
    assert re.search(rf"^{IMAGE} for linux/amd64: identical on n[12], sha256:", said, re.M)
    again = cluster.head.shell(f"cd {ROOT} && su {USER} -c {json.dumps(line)}")
    assert re.search(r"identical on n[12], as kept, sha256:", again)
    assert len(cluster.jobs()) == before + 1


def test_what_slurm_adds_to_a_chunk_is_measured(cluster: Cluster) -> None:
    line = f"SM120_STORE=/srv/sm120 PYTHONPATH={ROOT} {sys.executable} -m tests.perf --only-slurm"
    text = cluster.head.shell(f"cd {ROOT} && su {USER} -c {json.dumps(line)}")
    print(text, Path("/proc/loadavg").read_text(encoding="utf-8"))
    assert re.search(r"what Slurm adds to a chunk: \d", text), text


@both_gates
def test_a_node_that_loses_its_power_loses_and_doubles_nothing(
    cluster: Cluster, judged: Judged
) -> None:
    # the answers that the nodes themselves have would end the chunks at once
    for node in cluster.site.fleet.nodes:
        node.shell("rm -rf /srv/sm120/gate/answers /srv/killed/gate/answers")

    def pull() -> None:
        deadline = time.monotonic() + 120
        while not cluster.work_on("n2") and time.monotonic() < deadline:
            time.sleep(0.1)
        cluster.site.second.stop()

    thread = threading.Thread(target=pull)
    thread.start()
    result, said = cluster.chunked(judged, "/srv/killed")
    thread.join()
    print(said)
    assert "asked again" in said
    kept, _ = cluster.chunked(judged, "/srv/chunked")
    assert findings(result) == findings(kept)
    answers = cluster.answers("/srv/killed")
    assert {*answers} <= {*cluster.answers("/srv/chunked")}
    assert len(answers) == len(result["cases"])
    cluster.site.second.start()
    assert cluster.state_of("n2", "idle") == "idle"


def test_a_job_that_hangs_ends_at_its_limit_and_is_named(cluster: Cluster) -> None:
    words = ("--node-command", "/usr/local/bin/hangs", "--time-limit", "1m", "--chunk", "100")
    result, _ = cluster.chunked(PARSERS, "/srv/hung", *words)
    assert {case["verdict"] for case in result["cases"]} == {"unknown"}
    message = result["cases"][0]["message"]
    assert "ended on here by its limit of 1 min, or was cancelled or killed" in message, message
    left = [n.shell("ps ax | grep -c '[/]hangs' || :").strip() for n in cluster.site.fleet.nodes]
    assert left == ["0", "0"]


def test_a_node_with_another_key_is_named(cluster: Cluster) -> None:
    cluster.site.host_values["n2"] = {"slurm_munge_key": KEY[::-1]}
    run = cluster.site.run("--tags", "slurm", "--limit", "n2")
    assert run.code != 0
    assert "Both need the same slurm_munge_key" in run.text
    assert KEY[::-1] not in run.text
    # whoever asks from there gets a line, too
    line = f"{PYTHON} --store /srv/hung {' '.join(map(repr, PARSERS.words))} --on slurm"
    said = cluster.site.second.shell(f"cd {ROOT}; su {USER} -c {json.dumps(line)} 2>&1; echo $?")
    # of a command that prints JSON errors are JSON, too
    assert "Slurm started no chunk: srun" in said, said
    print(said)
    assert said.splitlines()[-1] == "42"
    del cluster.site.host_values["n2"]
    cluster.site.run("--tags", "slurm").require_good()
    assert cluster.state_of("n2", "idle") == "idle"


def test_a_node_with_another_processor_by_a_stand_in_for_uname_is_named(cluster: Cluster) -> None:
    place = "/usr/local/sbin/uname"
    cluster.site.second.shell(f"printf '#!/bin/sh\\necho riscv64\\n' >{place}; chmod 755 {place}")
    before = cluster.head.shell("cat /etc/slurm/slurm.conf")
    run = cluster.site.run("--tags", "slurm")
    assert run.code != 0
    assert "n2 has riscv64. What one answers says nothing of the other." in run.text
    assert "Make a cluster for each kind." in run.text
    assert cluster.head.shell("cat /etc/slurm/slurm.conf") == before
    cluster.site.second.shell(f"rm {place}")


def test_two_controllers_are_refused_before_anything_changes(cluster: Cluster) -> None:
    site, only = cluster.site, ("--tags", "slurm")
    # hosts that disagree
    site.host_values["n2"] = {"slurm_head": "n2"}
    run = site.run(*only)
    assert run.code != 0
    assert "The hosts name different heads: n1 names n1, n2 names n2." in run.text
    # hosts that agree on another one than before, which still has its queue
    del site.host_values["n2"]
    run = site.run(*only, slurm_head="n2")
    assert run.code != 0
    assert "n1 runs a queue (slurmctld), and slurm_head is n2." in run.text
    assert "slurmctld" not in site.second.shell("ls /usr/sbin")
    assert site.run(*only).require_good().count("changed") == 0


def test_the_role_can_be_undone_on_a_node_and_then_on_all(cluster: Cluster) -> None:
    site, only, gone = cluster.site, ("--tags", "slurm"), {"slurm_state": "absent"}
    left = "ls -d /etc/slurm/*.conf /etc/munge/munge.key /usr/sbin/slurm* 2>/dev/null || :"
    site.run("--check", *only, "--limit", "n2", **gone).require_good()
    assert "/usr/sbin/slurmd" in site.second.shell(left)
    site.run(*only, "--limit", "n2", **gone).require_good()
    assert site.second.shell(left) == ""
    # the head forgets it
    site.run(*only, "--limit", "n1", slurm_nodes=["n1"]).require_good()
    assert cluster.head.shell("sinfo --noheader --Node --format='%N %T'").split() == ["n1", "idle"]
    site.run(*only, **gone).require_good()
    assert [node.shell(left) for node in site.fleet.nodes] == ["", ""]
    assert site.run(*only, **gone).require_good().count("changed") == 0
