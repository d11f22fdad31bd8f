"""`host verify`, `host provision` and `host record`, as a user runs them without any host."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest

from pipeline.cli.hosts import fleet_of
from pipeline.hosts.fleet.playbook import Played, ansible_program
from pipeline.hosts.fleet.promised import Promised
from pipeline.images.spec.checkout import Checkout
from tests.testbed.playbook import NO_OPTIONS
from tests.unit.hosts.fake_host import LOCAL, program
from tests.unit.hosts.machines import blackwell, facts
from tests.unit.support import ROOT, Command


def test_what_the_user_says_reaches_ansible_word_by_word(tmp_path: Path) -> None:
    given = {**NO_OPTIONS, "inventories": ("a", "b"), "limit": "gpu", "extra_vars": ("x=1 y=2",)}
    arguments = fleet_of(given).arguments()
    assert arguments == [
        *("--inventory", "a", "--inventory", "b", "--extra-vars", "x=1 y=2", "--limit", "gpu")
    ]


def test_the_inventorys_own_words_win_over_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("from file\n")
    given = {**NO_OPTIONS, "inventories": ("a",), "user": "me", "become_password_file": file}
    fleet = fleet_of(given)
    bare = fleet.reach(Promised(host="n", connection=LOCAL)).connection
    assert (bare.user, bare.become_password) == ("me", "from file")
    own = LOCAL.model_copy(update={"user": "ops", "become_password": "own"})
    kept = fleet.reach(Promised(host="n", connection=own)).connection
    assert (kept.user, kept.become_password) == ("ops", "own")


def test_the_password_for_ansible_lies_in_a_closed_file_and_is_gone_after(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("from file\n")
    fleet = fleet_of({**NO_OPTIONS, "inventories": ("a",), "become_password_file": file})
    with fleet.password_files() as arguments:
        path = Path(arguments[1])
        assert arguments[0] == "--become-password-file"
        assert path.stat().st_mode & 0o077 == 0
        assert path.read_text() == "from file\n"
    assert not path.exists()


def test_every_password_that_is_typed_reaches_ansible_and_our_own_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(click, "prompt", lambda text, **_: f"typed {text}")
    asked = dict.fromkeys(("ask_become_pass", "ask_pass", "ask_vault_pass"), True)
    fleet = fleet_of({**NO_OPTIONS, **asked, "inventories": ("a",), "vault_ids": ("site@x",)})
    assert fleet.arguments()[-2:] == ["--vault-id", "site@x"]
    assert "typed" not in repr(fleet)
    with fleet.password_files() as arguments:
        passwords = {
            n: Path(p).read_text() for n, p in zip(arguments[::2], arguments[1::2], strict=True)
        }
    assert passwords == {
        "--connection-password-file": "typed SSH password\n",
        "--become-password-file": "typed sudo password\n",
        "--vault-password-file": "typed Vault password\n",
    }
    to = fleet.reach(Promised(host="n", connection=LOCAL)).connection
    assert (to.password, to.become_password) == ("typed SSH password", "typed sudo password")


@pytest.mark.parametrize(("body", "code"), [("echo secret", 0), ("exit 3", 2)])
def test_a_program_may_stand_in_the_place_of_a_password_file(
    sm120: Command, tmp_path: Path, body: str, code: int
) -> None:
    program(tmp_path, "ask", body)
    given = {**NO_OPTIONS, "inventories": ("a",), "connection_password_file": tmp_path / "ask"}
    if code == 0:
        assert fleet_of(given).secrets.ssh == "secret"
        return
    ended = sm120("host", "verify", "-i", "a", "--connection-password-file", tmp_path / "ask")
    assert ended.code == code
    assert "no password can be read: the program failed" in ended.err


@pytest.mark.parametrize("mode", [0o600, 0o700])
def test_a_password_file_that_is_no_text_is_refused_in_one_line(
    sm120: Command, tmp_path: Path, mode: int
) -> None:
    (tmp_path / "ask").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "ask").chmod(mode)
    ended = sm120("host", "verify", "-i", "a", "--become-password-file", tmp_path / "ask")
    assert ended.code == 2
    assert "no password can be read" in ended.err
    assert "Traceback" not in ended.err


def test_records_lie_beside_the_inventory_and_never_inside_one(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "hosts.yml").touch()
    for inventory, name in (("site", "site-records"), ("hosts.yml", "records")):
        given = {**NO_OPTIONS, "inventories": (str(tmp_path / inventory),)}
        assert fleet_of(given).records_folder == tmp_path / name


def test_an_inventory_is_required(sm120: Command) -> None:
    assert sm120("host", "verify").code == 2
    assert sm120("host", "provision").code == 2
    assert sm120("host", "rollback").code == 2


@pytest.mark.parametrize("text", [None, "all: {hosts: {}}"])
def test_an_inventory_without_hosts_is_an_ending_of_its_own(
    sm120: Command, tmp_path: Path, text: str | None
) -> None:
    ansible_program("ansible-playbook")
    path = tmp_path / "hosts.yml"
    if text is not None:
        path.write_text(text)
    ended = sm120("--checkout", ROOT, "host", "verify", "-i", path, "--json")
    assert ended.error == "FleetUnready"
    assert ended.out == ""


def test_without_a_lock_nothing_is_provisioned(sm120: Command, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "lockfiles").mkdir()
    spec = (ROOT / "lockfiles" / "host.yaml").read_text()
    (tmp_path / "lockfiles" / "host.yaml").write_text(spec)
    ended = sm120("--checkout", tmp_path, "host", "provision", "-i", "localhost,")
    assert ended.error == "LockMissing"
    assert "PLAY" not in ended.out


def test_a_rollback_plays_its_own_playbook_and_says_what_the_next_provision_does(
    sm120: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[list[str]] = []

    def play(checkout: object, name: str, arguments: list[str]) -> Played:
        played.append([name, *arguments])
        return Played(0 if len(played) < 3 else 2, ["n1"], [], ["n2", "n3"])

    monkeypatch.setattr("pipeline.app.hosts.stream_playbook", play)
    inventory = tmp_path / "hosts.yml"
    inventory.touch()
    asked = ("--checkout", ROOT, "host", "rollback", "-i", inventory)
    back = sm120(*asked, "--limit", "n1", "-vv")
    assert back.code == 0
    assert "next provision installs its driver again" in back.err
    assert played[0][0] == "rollback.yml"
    assert {"n1", "-vv"} <= set(played[0])
    assert "--check" not in played[0]
    plan = sm120(*asked, "--check")
    assert plan.code == 0
    assert "--check" in played[1]
    assert "next provision" not in plan.err
    stopped = sm120(*asked)
    assert stopped.error == "ProvisionFailed"
    assert "failed: n1; not touched: n2, n3" in stopped.err


@pytest.fixture
def key(sm120: Command, tmp_path: Path) -> Path:
    """A key, known to a trust file beside it."""
    entry = sm120("evidence", "new-key", "fleet", "--output", tmp_path / "keys").out
    (tmp_path / "trust.yaml").write_text(f"format: 1\nkeys:\n{entry}")
    return tmp_path / "keys" / "fleet.pem"


def test_a_host_record_can_be_signed_and_a_changed_one_is_found_out(
    sm120: Command, tmp_path: Path, key: Path
) -> None:
    record, trust = tmp_path / "n1.json", tmp_path / "trust.yaml"
    record.write_text(facts(blackwell(2), name="n1").model_dump_json())
    ended = sm120("host", "attest", record, "--key", key)
    assert ended.code == 0, ended.err
    assert Path(ended.out.strip()) == tmp_path / "n1.json.dsse.json"
    assert sm120("host", "drift", record, record).code == 0
    assert sm120("verify", record, "--trust", trust).code == 0
    record.write_text(record.read_text().replace("n1", "n2", 1))
    assert sm120("verify", record, "--trust", trust).error in ("EvidenceBroken", "EvidenceUnsigned")


def test_what_is_no_record_is_not_signed(sm120: Command, tmp_path: Path, key: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}")
    assert sm120("host", "attest", path, "--key", key).error == "FactsUnreadable"
    assert sm120("host", "attest", path).error == "SigningFailed"


@pytest.mark.parametrize("busy", [True, False])
def test_work_on_the_gpus_is_ended_only_where_the_user_says_so(
    sm120: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    seen: list[str] = []

    def stream(checkout: Checkout, name: str, arguments: list[str]) -> Played:
        seen.extend(arguments)
        return Played(2, ["n1"], [], [])

    monkeypatch.setattr("pipeline.app.hosts.stream_playbook", stream)
    monkeypatch.setattr("pipeline.hosts.lock_model.current_host_lock", lambda path, spec: None)
    (tmp_path / "hosts.yml").touch()
    options = ["--even-if-busy"] if busy else []
    ended = sm120("--checkout", ROOT, "host", "provision", "-i", tmp_path / "hosts.yml", *options)
    assert ended.error == "ProvisionFailed"
    variables = [json.loads(x) for x in seen if x.startswith("{")]
    assert [v.get("reboot_even_if_busy") for v in variables] == ["true" if busy else None]
