"""`sm120 host deploy` on nodes: systemd, sshd and a Docker of their own, a registry with TLS.

Real: Ansible, SSH, sudo, the units, the pull by digest, the engine, the smoke test. No node has a
card, so that what needs one is judged in the unit tests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import HostUnreached, ImageDiffers, RecipeInvalid, RolledBack, StartFailed
from tests.integration.rack import PORT, RECIPE, Rack, new_rack, outcomes
from tests.testbed.dockerd import DockerDaemon

pytestmark = [pytest.mark.big, pytest.mark.timeout(1800)]
UNIT = f"sm120-{RECIPE}"
STARTED = f"docker inspect --format '{{{{.State.StartedAt}}}} {{{{.Image}}}}' {UNIT}"
# says of every image that it is another one; all else is Docker's own
LIAR = """#!/bin/sh
if [ "$1 $2" = "image inspect" ]; then
    /usr/bin/docker "$@" | sed 's/"Id": "sha256:...../"Id": "sha256:00000/'
else
    exec /usr/bin/docker "$@"
fi
"""


@pytest.fixture(scope="module")
def rack(
    docker_daemon: DockerDaemon,
    lean_store: Path,
    keys: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Rack]:
    with ExitStack() as stack:
        tmp = tmp_path_factory.mktemp("rack")
        yield stack.enter_context(new_rack(docker_daemon, lean_store, keys, tmp, ["n1", "n2"]))


def error_of(stderr: str) -> str:
    """The line that says what failed; its hint is below it."""
    return next(line for line in stderr.splitlines() if line.startswith("sm120: "))


def record(rack: Rack, node: str) -> dict[str, Any]:
    text = rack.nodes[node].shell(f"cat /var/lib/sm120-engine/{RECIPE}/passed.json")
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_recipe_becomes_a_proved_service_and_a_second_run_changes_nothing(rack: Rack) -> None:
    rack.add()
    plan = rack.deploy("--check", "--diff")
    assert outcomes(plan) == {"n1": "planned", "n2": "planned"}, plan.stderr[-3000:]
    assert f"+ExecStart=/usr/bin/docker run --rm --name {UNIT}" in plan.stderr
    assert rack.nodes["n1"].shell(f"ls /etc/systemd/system/{UNIT}.service || :").count("No such")

    first = rack.deploy()
    assert first.returncode == 0, first.stderr[-4000:]
    assert outcomes(first) == {"n1": "deployed", "n2": "deployed"}
    before = {}
    for name, node in rack.nodes.items():
        found = record(rack, name)
        assert found["image"] == f"{rack.place}@{rack.image.digest}"
        assert (found["smoke"]["verdict"], found["smoke"]["last_good"]) == ("passed", "answers")
        assert node.shell(f"systemctl is-enabled {UNIT}").strip() == "enabled"
        before[name] = node.shell(STARTED)

    again = rack.deploy()
    assert outcomes(again) == {"n1": "unchanged", "n2": "unchanged"}
    assert again.stderr.count("changed=0") == 2
    assert {name: node.shell(STARTED) for name, node in rack.nodes.items()} == before

    status = rack.run("recipe", "status", "--on", "n1", "-i", str(rack.inventory), "--json")
    (row,) = json.loads(status.stdout)
    assert (row["recipe"], row["healthy"], row["built"]) == (RECIPE, True, "same")


def test_the_promises_of_a_deployed_engine_are_kept_and_broken_ones_are_named(rack: Rack) -> None:
    words = ("host", "verify", "-i", str(rack.inventory), "--role", "engine", "--json")
    rack.add()
    rack.deploy()

    def rows() -> dict[str, str]:
        done = rack.run(*words)
        (host,) = [h for h in json.loads(done.stdout)["hosts"] if h["host"] == "n1"]
        return {
            r["promise"]: r["verdict"] + ": " + r["why"]
            for r in host["rows"]
            if r["role"] == "engine"
        }

    good = rows()
    assert len(good) == 6
    assert {text.partition(":")[0] for text in good.values()} == {"passed"}
    node = rack.nodes["n1"]
    node.shell(f"systemctl stop {UNIT}")
    stopped = rows()
    assert "does not run" in stopped["each service starts at boot and runs"]
    assert "/health at 8080 says nothing" in stopped["each engine answers"]
    assert "no such container" in stopped["each container runs the image that passed"]
    # an engine that was stopped by hand is started and proved again
    assert outcomes(rack.deploy("--limit", "n1")) == {"n1": "deployed"}
    node.shell(f"echo '# mine' >> /etc/systemd/system/{UNIT}.service")
    assert "was changed" in rows()["each unit is as it was deployed"]
    assert outcomes(rack.deploy("--limit", "n1")) == {"n1": "deployed"}


def test_a_bad_image_is_rolled_back_on_the_canary_and_the_rest_is_not_touched(rack: Rack) -> None:
    rack.add()
    rack.deploy()
    good = {name: node.shell(STARTED).split()[1] for name, node in rack.nodes.items()}
    with rack.pretender():
        done = rack.deploy()
    assert outcomes(done) == {"n1": "rolled back", "n2": "not touched"}
    error = error_of(done.stderr)
    assert done.returncode == RolledBack.exit_code
    assert f"rolled back to {rack.image.digest[:19]}: n1 (ask it, rung by rung: " in error
    assert error.endswith("; not touched: n2")
    # the version that passed serves again, and the record still names it
    assert {name: node.shell(STARTED).split()[1] for name, node in rack.nodes.items()} == good
    assert record(rack, "n1")["image_digest"] == rack.image.digest
    assert outcomes(rack.deploy()) == {"n1": "unchanged", "n2": "unchanged"}


def test_an_engine_that_never_answers_is_rolled_back_or_removed(rack: Rack) -> None:
    rack.add()
    rack.deploy()
    rack.add(flags={"ours": {"ctx_size": 4096, "extra": ["--no-such-flag"]}})
    done = rack.deploy("--limit", "n1")
    # a flag that the engine refuses is found before any host is asked
    assert "--no-such-flag" in error_of(done.stderr)
    assert done.returncode == RecipeInvalid.exit_code
    # it ends before it answers, and systemd starts it again and again
    deaf = {"ours": {"ctx_size": 4096, "extra": ["--api-key-file", "/nowhere"]}}
    rack.add(flags=deaf)
    done = rack.deploy("--limit", "n1", "--timeout", "5")
    assert outcomes(done) == {"n1": "rolled back"}, done.stdout + done.stderr[-3000:]
    assert "wait until it answers: it did not answer within 5 s" in done.stdout
    rack.add("fresh", flags=deaf, port=PORT + 1)
    done = rack.deploy("--limit", "n2", "--timeout", "5", recipe="fresh")
    assert outcomes(done) == {"n2": "failed"}
    assert done.returncode == StartFailed.exit_code
    assert "nothing passed here before, so nothing is served" in done.stdout
    assert "fresh" not in rack.nodes["n2"].shell("ls /etc/systemd/system; docker ps --all")
    rack.add()
    assert outcomes(rack.deploy()) == {"n1": "unchanged", "n2": "unchanged"}


def test_a_host_that_reports_another_image_is_refused_and_serves_on(rack: Rack) -> None:
    rack.add()
    rack.deploy()
    node = rack.nodes["n1"]
    node.shell(f"systemctl stop {UNIT}")
    node.shell(f"cat > /usr/local/bin/docker <<'E'\n{LIAR}\nE\nchmod 755 /usr/local/bin/docker")
    try:
        done = rack.deploy("--limit", "n1")
    finally:
        node.shell("rm /usr/local/bin/docker")
    assert outcomes(done) == {"n1": "refused"}
    error = error_of(done.stderr)
    assert done.returncode == ImageDiffers.exit_code
    assert "the host reports the image sha256:00000" in error
    assert outcomes(rack.deploy("--limit", "n1")) == {"n1": "deployed"}


def test_a_dead_host_is_reported_and_the_others_go_on(rack: Rack) -> None:
    rack.add(flags={"ours": {"ctx_size": 2048, "parallel": 2, "threads": 1}})
    rack.nodes["n2"].stop()
    try:
        done = rack.deploy("--batch", "1")
    finally:
        rack.nodes["n2"].start()
    wanted = {"n1": "deployed", "n2": "not reached"}
    assert outcomes(done) == wanted, done.stdout + done.stderr[-3000:]
    assert done.returncode == HostUnreached.exit_code
    assert outcomes(rack.deploy()) == {"n1": "unchanged", "n2": "deployed"}


def test_absent_removes_all_but_the_weights(rack: Rack) -> None:
    rack.add()
    rack.deploy()
    assert outcomes(rack.deploy("--absent", "--check")) == {"n1": "removed", "n2": "removed"}
    assert RECIPE in rack.nodes["n1"].shell("docker ps")
    done = rack.deploy("--absent")
    assert outcomes(done) == {"n1": "removed", "n2": "removed"}, done.stderr[-2000:]
    for node in rack.nodes.values():
        assert UNIT not in node.shell("ls /etc/systemd/system; docker ps --all; ls /var/lib")
        assert "tiny.gguf" in node.shell("find /models")
    assert rack.deploy("--absent").stderr.count("changed=0") == 2
    rack.deploy("--absent", "--remove-weights")
    assert "tiny.gguf" not in rack.nodes["n1"].shell("find /models")
