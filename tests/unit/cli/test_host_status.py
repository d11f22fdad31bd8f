"""`sm120 host status`: a table of hosts, in which a dead one is a row. No host is asked here."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from pipeline.app import host_status as status_module
from pipeline.artifacts.store.store import Store
from pipeline.core.errors import DockerUnavailable, HostUnfit, HostUnreached
from pipeline.core.known import Known, unknown
from pipeline.hosts.facts.gather import gather_facts
from pipeline.hosts.facts.model import HostFacts
from pipeline.hosts.fleet.playbook import ansible_program, promises_of
from pipeline.hosts.fleet.promised import HostConnection, Promised
from pipeline.images.spec.checkout import Checkout
from pipeline.serving.serve.attempts import AttemptList, Begun, Ended, Outcome
from pipeline.serving.serve.run import ServedStatus
from tests.unit.bench.example_run import write_example
from tests.unit.hosts.machines import changed, h200
from tests.unit.support import ROOT, Command
from tests.unit.support import Ended as Done

DIGEST = "sha256:" + "7" * 64
SECRET = "correct-horse-battery"


def served(**changes: Any) -> ServedStatus:
    values: dict[str, Any] = {
        "recipe": "kimi",
        "container": "sm120-kimi",
        "status": "running",
        "healthy": True,
        "port": 8000,
        "model": "kimi",
        "image": "vllm",
        "digest": DIGEST,
        "built": "same",
        "why": "",
        "attempt": "",
        "started_at": "2026-11-16T07:15:35Z",
    }
    return ServedStatus(**{**values, **changes})


@dataclass
class Rack:
    """Hosts by name: what each serves, or the error with which it ends."""

    sm120: Command
    tmp: Path
    hosts: dict[str, Any] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    facts: Known[HostFacts] = field(default_factory=lambda: gather_facts(h200(), "n1"))
    opened: list[str] = field(default_factory=list)
    together: threading.Barrier | None = None

    def status(self, *words: str) -> Done:
        (self.tmp / "hosts.yml").write_text("all: {}\n")
        return self.sm120("host", "status", "-i", str(self.tmp / "hosts.yml"), *words)

    def rows(self, *words: str) -> dict[str, Any]:
        return {row["host"]: row for row in json.loads(self.status("--json", *words).out)}

    def record(self, capture: Any) -> None:
        folder = self.tmp / "records"
        folder.mkdir(exist_ok=True)
        (folder / "n1.json").write_text(gather_facts(capture, "n1").model_dump_json())

    def smoke(self, outcome: Outcome, host: str = "n1", recipe: str = "kimi") -> None:
        store = Path(self.sm120("store", "show", "--json").json["root"])
        Store(store).prepare()
        known, name = AttemptList(store / "attempts"), "20261116T120000-abcdef"
        at = "2026-11-16T12:00:00Z"
        known.add(
            Begun(id=name, kind="smoke", recipe=recipe, recipe_digest=DIGEST, host=host, at=at)
        )
        known.add(Ended(id=name, outcome=outcome, seconds=1, at=at))


@pytest.fixture
def rack(
    sm120: Command, checkout: Checkout, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Rack:
    rack = Rack(sm120, tmp_path)

    @contextmanager
    def promised(*given: object) -> Iterator[list[Promised]]:
        yield [
            Promised(
                host=name,
                connection=HostConnection(
                    address=rack.addresses.get(name, name), password=SECRET, become_password=SECRET
                ),
            )
            for name in rack.hosts
        ]

    @contextmanager
    def opened(to: HostConnection) -> Iterator[str]:
        rack.opened.append(to.address)
        if rack.together:
            rack.together.wait(timeout=20)
        name = next(n for n in rack.hosts if rack.addresses.get(n, n) == to.address)
        if isinstance(rack.hosts[name], HostUnreached):
            raise rack.hosts[name]
        yield name

    def site(tunnel: str, name: str, wanted: str) -> tuple[None, Sequence[ServedStatus]]:
        if isinstance(rack.hosts[name], DockerUnavailable):
            raise rack.hosts[name]
        return None, rack.hosts[name]

    monkeypatch.setattr(status_module, "promises_of", promised)
    monkeypatch.setattr(status_module, "open_tunnel", opened)
    monkeypatch.setattr(status_module, "find_remote_site", site)
    monkeypatch.setattr(status_module, "captured_facts", lambda host, run: rack.facts)
    monkeypatch.setattr(status_module, "status_of", lambda engine, store, site: engine)
    return rack


def test_every_host_is_a_row_and_all_are_asked_at_the_same_time(rack: Rack) -> None:
    rack.hosts = {name: [served()] for name in ("n1", "n2", "n3")}
    rack.together = threading.Barrier(3)
    done = rack.status()
    assert done.code == 0, done.err
    assert sorted(rack.opened) == ["n1", "n2", "n3"]
    lines = done.out.splitlines()
    assert lines[0].split() == [
        *("host", "driver", "recipe", "image", "health", "last", "smoke", "last", "number"),
        "drift",
    ]
    assert lines[2].split()[:5] == ["n1", "580.159.04", "kimi", f"vllm@{DIGEST[:19]}", "answers"]


def test_a_dead_host_is_a_row_and_not_the_end(rack: Rack) -> None:
    gone = HostUnreached("n2: no route to host")
    rack.hosts = {"n1": [served()], "n2": gone, "n3": []}
    done = rack.status()
    assert done.error == "HostUnreached"
    assert [line.split()[0] for line in done.out.splitlines()[2:5]] == ["n1", "n2", "n3"]
    assert "n2: is not reached: no route to host" in done.out


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"healthy": False, "status": "exited"}, "ServerGone", "kimi: is exited, with no answer"),
        ({"built": "other", "why": "layer 2 differs"}, "ImageDiffers", "kimi: layer 2 differs"),
    ],
)
def test_what_is_served_wrongly_decides_the_exit_code(
    rack: Rack, changes: dict[str, Any], error: str, message: str
) -> None:
    # also beside a host that is down
    rack.hosts = {"n1": HostUnreached("n1: down"), "n2": [served(**changes)]}
    done = rack.status()
    assert done.error == error
    assert f"n2: {message}" in done.err


def test_a_host_without_a_container_engine_says_why_and_has_its_facts(rack: Rack) -> None:
    rack.hosts = {"n1": DockerUnavailable("n1: neither Docker nor Podman answers this login")}
    row = rack.rows()["n1"]
    assert row["driver"] == "580.159.04"
    assert row["problems"] == [
        {"kind": "unknown", "why": "neither Docker nor Podman answers this login"}
    ]
    assert rack.status().error == "HostUnknown"


def test_facts_that_cannot_be_read_are_said(rack: Rack) -> None:
    rack.hosts, rack.facts = {"n1": [served()]}, unknown("python3 is not installed")
    row = rack.rows()["n1"]
    assert (row["driver"], row["drift"]) == (None, None)
    assert row["problems"][0]["why"] == "python3 is not installed"


def test_two_names_of_one_address_are_found_and_asked_once(rack: Rack) -> None:
    rack.hosts = {"n1": [served()], "n2": [served()], "n3": [served()]}
    rack.addresses = {"n2": "n1"}
    done = rack.status()
    assert done.error == "FleetUnready"
    assert sorted(rack.opened) == ["n1", "n3"]
    assert "n2: has the address of n1, and was not asked" in done.out
    assert "ansible_host" in done.err


def test_a_secret_of_the_inventory_is_in_no_output(rack: Rack, tmp_path: Path) -> None:
    rack.hosts = {"n1": [served()], "n2": HostUnreached("n2: Permission denied")}
    page = tmp_path / "status.html"
    for words in ((), ("--json",), ("--html", str(page))):
        done = rack.status(*words)
        assert SECRET not in done.out + done.err
    assert SECRET not in page.read_text()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hosts.ini", f"n1 ansible_password=x {SECRET}\n"),
        ("hosts.ini", f"[all]\nn1 ansible_become_pass=y {SECRET} z\n"),
        ("hosts.yml", f"all:\n  hosts:\n    n1:\n      ansible_password: [{SECRET}\n"),
    ],
)
def test_a_line_that_ansible_cannot_read_does_not_show_its_secret(
    tmp_path: Path, sm120: Command, name: str, text: str
) -> None:
    ansible_program("ansible-playbook")
    (tmp_path / name).write_text(text)
    done = sm120("--checkout", str(ROOT), "host", "status", "-i", str(tmp_path / name))
    assert done.error == "FleetUnready"
    assert SECRET not in done.out + done.err


def test_what_changed_since_the_record_is_drift(rack: Rack) -> None:
    rack.hosts = {"n1": [served()]}
    assert rack.rows()["n1"]["drift"] is None
    rack.record(h200())
    assert rack.rows()["n1"]["drift"] == []
    rack.record(changed(h200(), files={"/proc/sys/kernel/osrelease": "6.1.0-before\n"}))
    done = rack.status()
    assert done.error == "HostDrifted"
    assert "1 fact changed since it was recorded, such as kernel.release" in done.out


@pytest.mark.parametrize(
    ("outcome", "error"),
    [("passed", ""), ("failed", "SmokeFailed"), ("interrupted", "SmokeFailed")],
)
def test_the_last_smoke_test_of_a_host_is_shown(rack: Rack, outcome: Outcome, error: str) -> None:
    rack.hosts = {"n1": [served()]}
    rack.smoke(outcome)
    done = rack.status()
    assert done.error == error
    assert f"{outcome}, 2026-11-16" in done.out


@pytest.mark.parametrize(("host", "recipe"), [("n2", "kimi"), ("n1", "other")])
def test_tests_of_other_hosts_and_recipes_are_not(rack: Rack, host: str, recipe: str) -> None:
    rack.hosts = {"n1": [served()]}
    rack.smoke("failed", host, recipe)
    assert rack.rows()["n1"]["served"][0]["smoke"] is None


@pytest.mark.parametrize(
    ("host", "image", "same"), [("n1", DIGEST, True), ("n1", None, False), ("n2", DIGEST, None)]
)
def test_the_last_number_is_that_of_the_host_and_says_of_which_image(
    rack: Rack, host: str, image: str | None, same: bool | None
) -> None:
    folder = rack.tmp / "results" / "rig" / "quick"
    folder.mkdir(parents=True)
    run = write_example(folder).model_dump(mode="json")
    run["inputs"] |= {"host_name": host, "recipe_name": "kimi", "image": image}
    (folder / "bench.json").write_text(json.dumps(run))
    rack.hosts = {"n1": [served()]}
    number = rack.rows("--bench", str(rack.tmp / "results"))["n1"]["served"][0]["number"]
    if same is None:
        assert number is None
        return
    means = [c["intervals"]["output_tok_s"]["mean"] for c in run["cells"] if c["state"] == "good"]
    assert (number["output_tok_s"], number["same_image"]) == (max(means), same)


def test_a_result_that_cannot_be_read_is_said_and_left_out(rack: Rack) -> None:
    rack.hosts = {"n1": [served()]}
    (rack.tmp / "bench").mkdir()
    (rack.tmp / "bench" / "bench.json").write_text("{}")
    done = rack.status("--bench", str(rack.tmp / "bench"))
    assert done.code == 0
    assert "it is left out" in done.err


def test_the_page_is_one_file_that_escapes_what_hosts_say(rack: Rack, tmp_path: Path) -> None:
    rack.hosts = {"n1": HostUnreached("n1: <script>alert(1)</script>"), "n2": [served()]}
    page = tmp_path / "status.html"
    assert rack.status("--html", str(page)).error == "HostUnreached"
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "default-src &#x27;none&#x27;" in text
    assert "To look at" in text


def test_a_rank_that_answers_no_clients_is_well_while_it_runs(rack: Rack) -> None:
    rack.hosts = {"n1": [served(rank="0/2")], "n2": [served(rank="1/2")]}
    done = rack.status()
    assert done.code == 0
    assert "kimi (1/2)" in done.out


def test_an_inventory_is_asked_for(sm120: Command) -> None:
    done = sm120("host", "status")
    assert done.code == 2
    assert "--inventory" in done.err


def test_the_play_that_names_connections_asks_no_host(tmp_path: Path) -> None:
    ansible_program("ansible-playbook")
    (tmp_path / "hosts.yml").write_text(
        f"all: {{hosts: {{n1: {{ansible_host: 192.0.2.1, ansible_password: {SECRET}}}}}}}\n"
    )
    arguments = ["--inventory", str(tmp_path / "hosts.yml")]
    with promises_of(cast(Any, Checkout(ROOT)), arguments, "connection.yml") as hosts:
        assert [(each.host, each.connection.address) for each in hosts] == [("n1", "192.0.2.1")]


def test_the_name_of_a_variable_that_is_missing_is_shown(tmp_path: Path, sm120: Command) -> None:
    ansible_program("ansible-playbook")
    text = 'all: {hosts: {n1: {ansible_password: "{{ vaulted_word }}"}}}\n'
    (tmp_path / "hosts.yml").write_text(text)
    done = sm120("--checkout", str(ROOT), "host", "status", "-i", str(tmp_path / "hosts.yml"))
    assert done.error == "FleetUnready"
    assert "(hidden)" not in done.err


def test_a_host_out_of_service_is_named_with_its_reason(rack: Rack) -> None:
    why = "Xid 79 at 0000:c1:00: the GPU has fallen off the bus (RESTART_BM)"
    out = changed(h200(), files={"/run/sm120/out-of-service": f"{why}\n"})
    rack.hosts = {"n1": [served()], "n2": []}
    rack.facts = gather_facts(out, "n1")
    done = rack.status()
    assert done.code == HostUnfit.exit_code
    assert f"n1: is out of service: {why}" in done.err
    assert "sm120-health return" in done.err
    assert done.out.count("out of service") >= 2
    rows = rack.rows()
    assert rows["n1"]["out_of_service"] == why
    assert rows["n2"]["problems"][0]["kind"] == "service"
