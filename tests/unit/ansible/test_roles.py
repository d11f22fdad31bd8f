"""Roles say what they take, take nothing dangerous by default, and their READMEs are true."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from pipeline import __version__
from pipeline.hosts.rules.judge import DRIVER_OF_CUDA, POWER_RANGES_W
from tests.testbed.playbook import PLAYBOOK, ROOT, ansible_environment, ansible_program

ROLES = sorted((ROOT / "ansible" / "roles").iterdir())
PLAYBOOKS = [
    *("ansible/site.yml", "ansible/promises.yml", "ansible/rollback.yml"),
    *("ansible/connection.yml", "ansible/deploy.yml"),
]
NAMES = [role.name for role in ROLES]
PUBLIC = [
    *("nvidia_repository", "nvidia_driver", "cuda", "pcie", "nccl", "container_runtime"),
    *("host_tuning", "weights", "registry", "slurm", "engine", "metrics", "health"),
]


def load_writer() -> ModuleType:
    path = ROOT / "ansible" / "role_readme.py"
    spec = importlib.util.spec_from_file_location("role_readme", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def specs_of(role: Path) -> dict[str, Any]:
    result: dict[str, Any] = load_writer().read_specs(role)
    return result


def yaml_of(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}


def texts_of(role: Path) -> str:
    return "\n".join(p.read_text(encoding="utf-8") for p in sorted(role.rglob("*")) if p.is_file())


@pytest.mark.parametrize("role", ROLES, ids=NAMES)
def test_a_readme_is_what_the_argument_specs_say(role: Path) -> None:
    written = (role / "README.md").read_text(encoding="utf-8")
    assert written == load_writer().readme(role), "run `python ansible/role_readme.py`"


@pytest.mark.parametrize("role", ROLES, ids=NAMES)
def test_defaults_and_argument_specs_agree(role: Path) -> None:
    options = specs_of(role)["options"]
    promised = {name: o["default"] for name, o in options.items() if "default" in o}
    assert (yaml_of(role / "defaults" / "main.yml") or {}) == promised


@pytest.mark.parametrize("role", ROLES, ids=NAMES)
def test_every_variable_carries_the_name_of_its_role(role: Path) -> None:
    own = {*specs_of(role)["options"], *(yaml_of(role / "vars" / "main.yml") or {})}
    registered = set(re.findall(r"register: (\w+)", texts_of(role)))
    assert [n for n in own | registered if not n.startswith(f"{role.name}_")] == []


@pytest.mark.parametrize("role", ROLES, ids=NAMES)
def test_pins_are_required_and_have_no_default(role: Path) -> None:
    for name, option in specs_of(role)["options"].items():
        if name.endswith(("_pins", "_packages", "_url", "_key_file")):
            assert option.get("required"), name
            assert "default" not in option


@pytest.mark.parametrize("name", PUBLIC)
def test_the_playbook_has_the_role_with_a_tag_of_its_own_and_it_can_be_undone(name: str) -> None:
    # an engine is deployed by a command of its own, after hosts are provisioned
    path = PLAYBOOK.with_name("deploy.yml") if name == "engine" else PLAYBOOK
    (play,) = yaml_of(path)
    listed = {r["role"]: r.get("tags", [name]) for r in play["roles"]}
    for task in play.get("tasks", []):
        asked = task.get("ansible.builtin.include_role", {})
        if asked and "tasks_from" not in asked:
            # an include passes its tags on only where it says so
            assert asked["apply"] == {"tags": asked["name"]}
            listed[asked["name"]] = task["tags"]
    assert listed[name] == [name]
    state = specs_of(ROOT / "ansible" / "roles" / name)["options"][f"{name}_state"]
    assert state["choices"] == ["present", "absent"]
    assert state["default"] == "present"


def test_the_risky_settings_are_off_until_a_profile_is_chosen() -> None:
    profiles = yaml_of(ROOT / "ansible" / "roles" / "pcie" / "vars" / "main.yml")["pcie_profiles"]
    options = specs_of(ROOT / "ansible" / "roles" / "pcie")["options"]
    assert options["pcie_profile"]["default"] == "keep"
    assert set(profiles["keep"].values()) == {"keep", False}
    assert set(profiles) == set(options["pcie_profile"]["choices"])


def test_only_the_words_that_refuse_it_speak_of_mitigations_off() -> None:
    files = [p for role in ROLES for p in sorted(role.rglob("*")) if p.is_file()]
    speaking = [p for p in files if "mitigations=off" in p.read_text(encoding="utf-8")]
    assert {str(p.relative_to(ROOT / "ansible" / "roles")) for p in speaking} == {
        "pcie/README.md",
        "pcie/meta/argument_specs.yml",
    }


@pytest.mark.parametrize("role", ROLES, ids=NAMES)
def test_every_assertion_says_what_is_wrong_and_what_to_do(role: Path) -> None:
    for path in sorted(role.glob("tasks/*.yml")):
        for task in yaml_of(path) or []:
            check = task.get("ansible.builtin.assert")
            if check is None:
                continue
            message = check["fail_msg"]
            if "item.cause" in message:
                assert all(item["cause"] and item["fix"] for item in task["loop"]), task["name"]
            else:
                # cause and fix are two sentences, or named by variables of their own
                assert len(re.findall(r"[.;:] ", message)) >= 1 or "{{" in message, task["name"]


@pytest.mark.parametrize(
    "script",
    sorted(
        p
        for p in (ROOT / "ansible").rglob("*")
        if p.is_file() and p.read_bytes()[:9] == b"#!/bin/sh"
    ),
    ids=lambda p: p.name,
)
def test_a_script_is_one_that_sh_can_read(script: Path) -> None:
    done = subprocess.run(
        ["/bin/sh", "-n", str(script)], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""


@pytest.mark.share(2)
@pytest.mark.parametrize("playbook", PLAYBOOKS)
def test_a_playbook_passes_the_syntax_check(playbook: str) -> None:
    check = [ansible_program("ansible-playbook"), "--syntax-check", "-i", "localhost,"]
    done = subprocess.run(
        [*check, str(ROOT / playbook)],
        env=ansible_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_roles_and_rules_know_the_same_power_ranges_and_driver_branches() -> None:
    ranges = yaml_of(ROOT / "ansible/roles/host_tuning/vars/main.yml")["host_tuning_ranges_w"]
    rules = {name.lower(): list(limits) for name, limits in POWER_RANGES_W.items()}
    assert {**rules, "none": [0, 0]} == ranges
    spec = yaml_of(ROOT / "lockfiles" / "host.yaml")
    assert spec["cuda"]["oldest_branches"] == DRIVER_OF_CUDA


def used_entries() -> set[tuple[str, str]]:
    """Role and entry point of every include in our playbooks and roles."""
    files = [
        *sorted((ROOT / "ansible").glob("*.yml")),
        *sorted((ROOT / "ansible").glob("roles/*/tasks/*.yml")),
    ]
    form = re.compile(r"name: (\S+)\n\s+tasks_from: (\w+)")
    found = {pair for path in files for pair in form.findall(path.read_text(encoding="utf-8"))}
    return {(n, e) for n, e in found if n in NAMES} | {(n, "promises") for n in PUBLIC}


def test_every_entry_point_that_is_used_has_argument_specs() -> None:
    specs = {role.name: load_writer().entry_points(role) for role in ROLES}
    used = used_entries()
    assert ("reboot", "note") in used
    assert [pair for pair in sorted(used) if pair[1] not in specs[pair[0]]] == []
    named = [(n, e) for n, points in specs.items() for e in points]
    lost = [p for p in named if not (ROOT / f"ansible/roles/{p[0]}/tasks/{p[1]}.yml").is_file()]
    assert lost == []


@pytest.mark.parametrize("role", ROLES, ids=NAMES)
def test_a_role_says_who_it_is_for(role: Path) -> None:
    info = yaml_of(role / "meta" / "main.yml")["galaxy_info"]
    assert info["license"] == "Apache-2.0"
    assert {p["name"] for p in info["platforms"]} == {"Debian", "Ubuntu"}
    short = load_writer().plain(specs_of(role)["short_description"])
    assert info["description"] == short.replace("`", "")


@pytest.fixture(scope="module")
def collections(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the built collection was installed, without a network."""
    place = tmp_path_factory.mktemp("collections")
    galaxy = [ansible_program("ansible-galaxy"), "collection"]
    env = ansible_environment()
    for words in (
        ["build", str(ROOT / "ansible"), "--output-path", str(place)],
        ["install", "--offline", "-p", str(place), str(place / "sm120-hosts-0.1.0.tar.gz")],
    ):
        done = subprocess.run(
            [*galaxy, *words], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    return place


def test_the_collection_installs_and_its_roles_are_those_of_the_checkout(collections: Path) -> None:
    installed = collections / "ansible_collections" / "sm120" / "hosts"
    ours = {
        p.relative_to(ROOT / "ansible"): p.read_bytes()
        for r in ROLES
        for p in r.rglob("*")
        if p.is_file()
    }
    theirs = {
        p.relative_to(installed): p.read_bytes()
        for p in (installed / "roles").rglob("*")
        if p.is_file()
    }
    assert theirs == ours
    assert not (installed / "site.yml").exists()
    assert yaml_of(ROOT / "ansible" / "galaxy.yml")["version"] == __version__


@pytest.mark.parametrize("name", ["the checkout's role", "the collection's role"])
def test_the_example_of_each_readme_passes_the_syntax_check(
    name: str, collections: Path, tmp_path: Path
) -> None:
    plays = []
    for role in ROLES:
        (play,) = yaml.safe_load(load_writer().example(role))
        assert (
            yaml.safe_dump([play], sort_keys=False, width=200) in (role / "README.md").read_text()
        )
        if name.startswith("the collection"):
            play["roles"][0]["role"] = f"sm120.hosts.{role.name}"
        assert None not in play["roles"][0].get("vars", {}).values(), role.name
        plays.append(play)
    book = tmp_path / "plays.yml"
    book.write_text(yaml.safe_dump(plays))
    env = {**ansible_environment(), "ANSIBLE_COLLECTIONS_PATH": str(collections)}
    done = subprocess.run(
        [ansible_program("ansible-playbook"), "--syntax-check", "-i", "gpus,", str(book)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
