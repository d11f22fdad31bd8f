"""`host deploy` without a host: batches, outcomes, how hosts get weights, its smoke test."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.app import deploy
from pipeline.app.hosts import Fleet, PlayMode, Secrets
from pipeline.app.recipes import recipes_of
from pipeline.app.workspace import Workspace
from pipeline.core import errors
from pipeline.hosts.fleet.playbook import Played
from pipeline.serving.recipe.launch import Overrides
from tests.unit.hosts.test_engine_promises import RECORD
from tests.unit.support import ROOT, Command

OK = Played(0, [], [], [])


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(ROOT, tmp_path / "store")


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    (tmp_path / "hosts.yml").touch()
    return Fleet((str(tmp_path / "hosts.yml"),), user="ops", vault_ids=("site@x",))


def played(monkeypatch: pytest.MonkeyPatch, *ends: Played) -> list[list[str]]:
    """The arguments of each run of the play, which end as given."""
    asked: list[list[str]] = []

    def play(checkout: object, name: str, arguments: list[str], output: int) -> Played:
        assert (name, output) == ("deploy.yml", 2)
        asked.append(arguments)
        return ends[len(asked) - 1]

    monkeypatch.setattr(deploy, "stream_playbook", play)
    return asked


def absent(workspace: Workspace, fleet: Fleet, **more: Any) -> deploy.DeployResult:
    request = deploy.DeployRequest("tiny-cpu", absent=True, **more)
    return deploy.deploy(workspace, fleet, PlayMode(), request)


def batches_of(arguments: list[str]) -> Any:
    return json.loads(arguments[-1])["sm120_batches"]


def test_a_canary_goes_alone_and_the_rest_in_batches(
    workspace: Workspace, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = played(monkeypatch, OK)
    assert absent(workspace, fleet, batch="3").error is None
    assert batches_of(asked[0]) == ["1", "3"]


def test_behind_a_batch_of_dead_hosts_the_others_go_on(
    workspace: Workspace, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = Played(4, ["n2"], ["n1"], ["n3", "n4"], ["n2"])
    asked = played(monkeypatch, dead, OK)
    done = absent(workspace, fleet, batch="1")
    assert batches_of(asked[1]) == ["1"]
    assert asked[1][asked[1].index("--limit") + 1] == "n3,n4"
    assert {host.host: host.outcome for host in done.hosts} == {"n2": "not reached"}
    assert isinstance(done.error, errors.HostUnreached)


@pytest.mark.parametrize(
    "ended",
    [
        Played(4, ["n1"], [], ["n2"], ["n1"]),  # a dead canary
        Played(2, ["n1"], [], ["n2"]),  # one on which it failed
        Played(2, ["n2", "n3"], ["n1"], ["n4"]),  # a whole batch on which it failed
    ],
)
def test_a_failed_canary_or_batch_stops_the_rest(
    workspace: Workspace, fleet: Fleet, monkeypatch: pytest.MonkeyPatch, ended: Played
) -> None:
    asked = played(monkeypatch, ended)
    done = absent(workspace, fleet)
    assert len(asked) == 1
    assert done.hosts[-1].outcome == "not touched"
    assert f"not touched: {ended.untouched[0]}" in str(done.error)


def outcome(folder: Path, host: str, what: str, **more: str) -> None:
    body = {"host": host, "outcome": what, "why": "", "back_to": "", "step": "", **more}
    (folder / f"{host}.json").write_text(json.dumps(body))


def test_a_rollback_names_the_host_the_reason_and_the_version(tmp_path: Path) -> None:
    outcome(tmp_path, "n1", "deployed")
    why = "ask it, rung by rung: first: one answer: it is empty"
    outcome(tmp_path, "n2", "rolled back", why=why, back_to=RECORD.image_digest)
    done = deploy.judge_outcomes(tmp_path, Played(2, ["n2"], ["n1"], []))
    assert isinstance(done.error, errors.RolledBack)
    assert str(done.error) == f"rolled back to {RECORD.image_digest[:19]}: n2 ({why})"


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        ("Compare the image with the signed evidence", errors.ImageDiffers),
        ("Stop where the host is not fit for the recipe", errors.PreflightFailed),
    ],
)
def test_a_refused_host_ends_with_the_code_of_its_reason(
    tmp_path: Path, step: str, kind: type[errors.PipelineError]
) -> None:
    outcome(tmp_path, "n1", "refused", step=step, why="because")
    done = deploy.judge_outcomes(tmp_path, Played(2, ["n1"], [], []))
    assert type(done.error) is kind
    assert "n1 (because)" in str(done.error)


def test_what_the_play_did_not_say_is_not_taken_for_good(tmp_path: Path) -> None:
    done = deploy.judge_outcomes(tmp_path, Played(2, ["n1"], [], []))
    assert [host.outcome for host in done.hosts] == ["failed"]
    (tmp_path / "n1.json").write_text("{}")
    with pytest.raises(errors.FleetUnready, match="its outcome cannot be read"):
        deploy.judge_outcomes(tmp_path, OK)


def test_a_tiny_model_is_sent_and_a_locked_set_is_brought_by_the_host(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = SimpleNamespace(seal="sha256:seal")
    monkeypatch.setattr(deploy, "current_weights_lock", lambda checkout, name: lock)
    request = deploy.DeployRequest("x", weights_from=("http://n1:8000",))
    recipes = recipes_of(workspace, ())
    tiny = deploy.weights_on_hosts(workspace, recipes.read("tiny-cpu"), request)
    assert str(tiny.folder).startswith("/models/sm120-tiny/")
    assert Path(tiny.values["engine_model_file"]).is_file()
    named = next(r for r in map(recipes.read, recipes.names()) if r.model.weights)
    found = deploy.weights_on_hosts(workspace, named, request)
    assert (str(found.folder), found.seal) == (f"/models/{named.model.weights}", "sha256:seal")
    assert found.values["engine_weights_from"] == ["http://n1:8000"]
    assert found.values["engine_weights_lock"].endswith(f"/{named.model.weights}.lock.yaml")
    other = deploy.DeployRequest("x", overrides=Overrides(model_path="org/model"))
    assert deploy.weights_on_hosts(workspace, named, other) == deploy.HostWeights(None)


def test_weights_that_nothing_names_are_refused(workspace: Workspace) -> None:
    recipe = recipes_of(workspace, ()).read("tiny-cpu")
    model = recipe.model.model_copy(update={"tiny": False})
    bare = recipe.model_copy(update={"model": model})
    with pytest.raises(errors.WeightsUnknown, match="nothing says where its weights are"):
        deploy.weights_on_hosts(workspace, bare, deploy.DeployRequest("x"))
    with pytest.raises(errors.RecipeInvalid, match="where its image was published"):
        deploy.plan_deploy(workspace, deploy.DeployRequest("tiny-cpu"))


def test_the_smoke_test_reaches_hosts_as_the_play_does(
    workspace: Workspace, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SM120_API_KEY", "secret")
    monkeypatch.setenv("UNRELATED", "x")
    request = deploy.DeployRequest("tiny")
    typed = ["--vault-password-file", "/tmp/typed"]
    values = deploy.smoke_values(workspace, fleet, request, RECORD, typed)
    words, environment = values["engine_smoke"], values["engine_smoke_environment"]
    assert words[words.index("smoke") + 1] == "http://127.0.0.1:8080"
    assert words[words.index("--on") + 1] == "INVENTORY_HOSTNAME"
    assert words[-3:] == ["--quick", "--up-to", "answers"]
    assert environment["ANSIBLE_VAULT_PASSWORD_FILE"] == "/tmp/typed"
    assert (environment["ANSIBLE_REMOTE_USER"], environment["SM120_API_KEY"]) == ("ops", "secret")
    assert "UNRELATED" not in environment
    assert "secret" not in " ".join(words)
    assert os.environ["UNRELATED"] == "x"
    whole = deploy.DeployRequest("tiny", smoke="whole")
    assert "--quick" not in deploy.smoke_values(workspace, fleet, whole, RECORD, [])["engine_smoke"]
    none = deploy.DeployRequest("tiny", smoke="none")
    assert deploy.smoke_values(workspace, fleet, none, RECORD, []) == {}


def test_a_typed_ssh_password_is_refused_before_any_host_is_asked(
    workspace: Workspace, fleet: Fleet
) -> None:
    typed = Fleet(fleet.inventories, secrets=Secrets(ssh="x"))
    with pytest.raises(errors.FleetUnready, match="a typed SSH password does not reach it"):
        absent(workspace, typed)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--batch", "0"), 2),
        (("--batch", "150%"), 2),
        (("--remove-weights",), 2),
        (("--metrics", "somewhere"), 2),
        ((), errors.RecipeInvalid.exit_code),
    ],
)
def test_words_that_make_no_sense_touch_nothing(
    sm120: Command, tmp_path: Path, words: tuple[str, ...], code: int
) -> None:
    (tmp_path / "hosts.yml").touch()
    asked = ("--checkout", ROOT, "host", "deploy", "tiny-cpu", "-i", tmp_path / "hosts.yml")
    ended = sm120(*asked, *words)
    assert ended.code == code
    assert "PLAY" not in ended.err
