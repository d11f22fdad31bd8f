"""Every role reports what it promises, something checks it, and fleets are treated with care."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.app.hosts import ROLES
from pipeline.hosts.fleet.promised import Roles
from pipeline.hosts.promises.owned import FILES
from pipeline.hosts.promises.run import MODULES, checks_in
from tests.testbed.playbook import PLAYBOOK, ROOT
from tests.unit.ansible.test_roles import PUBLIC

ASKS = [ROOT / "ansible" / name for name in ("promises.yml", "connection.yml")]


def yaml_of(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def play_of(path: Path) -> Any:
    """A play, with the tasks of the files that it imports."""
    (play,) = yaml_of(path)
    tasks: list[Any] = []
    for task in play["tasks"]:
        imported = task.get("ansible.builtin.import_tasks")
        tasks += yaml_of(path.parent / imported) if imported else [task]
    return {**play, "tasks": tasks}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_role_says_what_it_promises_in_the_very_fields_that_are_proved(name: str) -> None:
    (task,) = yaml_of(ROOT / "ansible" / "roles" / name / "tasks" / "promises.yml")
    output = task["ansible.builtin.set_fact"][f"{name}_promises"]
    kind = next(k for k in Roles.model_fields[name].annotation.__args__ if k is not type(None))  # type: ignore[union-attr]
    assert set(output) == set(kind.model_fields)
    assert checks_in(MODULES[name])
    assert FILES[name].left


def test_no_role_is_left_out() -> None:
    assert set(Roles.model_fields) == set(PUBLIC)


@pytest.mark.parametrize("asks", ASKS)
def test_secrets_that_roles_hand_on_are_not_logged(asks: Path) -> None:
    play = play_of(asks)
    secret = [task for task in play["tasks"] if "sm120_promised" in str(task)]
    assert len(secret) == 2
    for task in secret:
        assert task["no_log"], task["name"]


@pytest.mark.parametrize("asks", ASKS)
def test_asking_changes_no_host(asks: Path) -> None:
    play = play_of(asks)
    assert play["become"] is False
    allowed = {"setup", "include_role", "set_fact", "copy"}
    for task in play["tasks"]:
        kind = next(k.rpartition(".")[2] for k in task if k.startswith("ansible.builtin."))
        assert kind in allowed
        assert kind != "copy" or task["delegate_to"] == "localhost"


def test_a_canary_goes_first_and_one_failure_stops_the_rest() -> None:
    (play,) = yaml_of(PLAYBOOK)
    assert play["serial"] == "{{ sm120_batches | default([1, '25%']) }}"
    assert play["max_fail_percentage"] == "{{ sm120_max_fail_percentage | default(0) }}"


def test_what_a_host_is_is_recorded_before_anything_and_after_all() -> None:
    (play,) = yaml_of(PLAYBOOK)
    assert play["pre_tasks"][-1]["vars"]["sm120_moment"] == "before"
    assert play["tasks"][-1]["vars"]["sm120_moment"] == "after"


def test_the_command_knows_the_roles_of_the_playbook() -> None:
    assert set(ROLES) == set(PUBLIC)


def test_what_a_run_of_one_role_includes_at_its_end_runs_by_that_roles_tag() -> None:
    (play,) = yaml_of(PLAYBOOK)
    included = [t for t in play["tasks"] if "ansible.builtin.include_role" in t]
    assert included
    for task in included:
        assert [task["ansible.builtin.include_role"]["apply"]["tags"]] == task["tags"], task["name"]
