"""Renderings, judged by the tools they are for: what a recipe says is what an engine gets."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.containers.arguments import Mount
from pipeline.serving.recipe.container import LaunchTarget
from pipeline.serving.recipe.launch import Launch
from pipeline.serving.recipe.render.formats import client_settings, render_env, render_launch
from tests.testbed.packages import CannotHave, find_program, system_environment
from tests.testbed.unit_file import settings, words
from tests.unit.recipe.render.launches import (
    HOSTILE,
    IMAGE,
    QUADLET_HOSTILE,
    TARGET,
    VARIABLES,
    hostile_launch,
    small_launch,
)

VALIDATOR = "kubernetes-validate==1.37.0"
# the oldest and the newest that it has schemas of
KUBERNETES = ("1.25", "1.37")
NOBODY = "65534"


def asked(*command: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)),
        env=system_environment(**env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="session")
def quadlet(trixie: Callable[[str], Path]) -> Path:
    """Podman's generator; Podman itself needs libraries of Debian 13, its generator none."""
    return trixie("podman").parents[1] / "libexec" / "podman" / "quadlet"


@pytest.fixture(scope="session")
def compose(trixie: Callable[[str], Path]) -> Path:
    """Docker's Compose."""
    return trixie("docker-compose")


@pytest.fixture(scope="session")
def kubernetes_validate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a validator that brings the schemas of Kubernetes' API, unless it is here."""
    folder = tmp_path_factory.mktemp("validator")
    if find_spec("kubernetes_validate"):
        return folder
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", folder, VALIDATOR]
    # pip finds its index by the settings of this user
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CannotHave(f"{VALIDATOR} cannot be installed here.")
    return folder


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may read: systemd's test mode does not run as root."""
    folder = Path(tempfile.mkdtemp(prefix="sm120-units-"))
    folder.chmod(0o755)
    home = folder / "home"
    home.mkdir(mode=0o777)
    home.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def read_by_systemd(folder: Path, unit: str) -> list[str]:
    """The words of ExecStart= as systemd itself reads them; variables come later."""
    # what the unit starts and needs is not here; what it says is judged
    text = re.sub(r"/usr/bin/(docker|podman)", "/bin/true", unit)
    text = re.sub(r"(?m)^(Requires|RequiresMountsFor)=.*\n", "", text)
    (folder / "engine.service").write_text(text)
    home = str(folder / "home")
    drop = ["setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", "--"]
    systemd = shutil.which("systemd", path="/lib/systemd:/usr/lib/systemd:/usr/bin")
    if systemd is None:
        raise CannotHave("The program systemd is not installed.")
    done = asked(
        *(drop if os.geteuid() == 0 else []),
        *(systemd, "--user", "--test", "--unit=engine.service"),
        HOME=home,
        XDG_RUNTIME_DIR=home,
        SYSTEMD_UNIT_PATH=f"{folder}:",
    )
    start = r"-> Unit engine\.service:.*?-> ExecStart:\s+Command Line: (.*?)\n"
    shown = re.search(start, done.stdout, re.DOTALL)
    assert shown, done.stderr
    # no other blank stands between words
    found = re.findall(r'"((?:\\.|[^"\\])*)"|([^ ]+)', shown[1])
    return [re.sub(r"\\(.)", r"\1", quoted) or plain for quoted, plain in found]


def generated(quadlet: Path, folder: Path, launch: Launch, target: LaunchTarget = TARGET) -> str:
    """The unit that Podman's generator makes of a quadlet."""
    (folder / "engine.container").write_text(render_launch(launch, target, "quadlet"))
    done = asked(quadlet, "--dryrun", QUADLET_UNIT_DIRS=str(folder))
    assert done.returncode == 0, done.stderr
    # a key that it does not know is a warning in some versions
    assert "nsupported" not in done.stderr
    return done.stdout


def values_after(found: list[str], flag: str) -> list[str]:
    return [found[at + 1] for at, word in enumerate(found) if word == flag]


def test_podmans_generator_makes_the_unit_of_a_quadlet(quadlet: Path, tmp_path: Path) -> None:
    launch = hostile_launch("quadlet")
    unit = generated(quadlet, tmp_path, launch, LaunchTarget(image=IMAGE, nccl="patched"))
    start = dict(settings(unit, "Service"))["ExecStart"]
    # specifiers of the generator's own
    found = words(start.replace("systemd-%N", "N").replace("%t/%N", "N"))
    assert found[-len(QUADLET_HOSTILE) :] == QUADLET_HOSTILE
    assert sorted(values_after(found, "--env")) == sorted(VARIABLES)
    assert values_after(found, "--device") == ["nvidia.com/gpu=all"]
    assert values_after(found, "--env-file") == ["/etc/sm120/nccl.env"]
    assert values_after(found, "-v") == [
        "/data/small:/models:ro,Z",
        "/usr/local/lib/sm120:/usr/local/lib/sm120:ro",
        "sm120-small-2x-0123456789ab:/home/engine:U",
    ]
    assert {"--ipc=host", "--ulimit=memlock=-1:-1", IMAGE} <= set(found)
    # only this machine connects, and the engine has no rights beside the recipe's
    assert (values_after(found, "--cap-drop"), values_after(found, "--cap-add")) == (
        ["all"],
        ["sys_nice"],
    )
    assert "--security-opt=no-new-privileges" in found
    assert values_after(found, "--publish") == ["127.0.0.1:8000:8000"]
    assert ("Restart", "on-failure") in settings(unit, "Service")


def test_podmans_generator_refuses_what_is_no_quadlet(quadlet: Path, tmp_path: Path) -> None:
    good = render_launch(small_launch(), TARGET, "quadlet")
    for bad in (good.replace("Volume=", "Volumes="), good.replace("Image=", "#")):
        (tmp_path / "engine.container").write_text(bad)
        done = asked(quadlet, "--dryrun", QUADLET_UNIT_DIRS=str(tmp_path))
        assert done.returncode != 0 or "nsupported" in done.stderr


def test_systemd_reads_the_unit_of_a_quadlet(
    quadlet: Path, tmp_path: Path, open_folder: Path
) -> None:
    mount = Mount(host="/data/50%", inside="/models")
    launch = hostile_launch("quadlet").model_copy(update={"mounts": [mount]})
    unit = generated(quadlet, tmp_path, launch).partition("---\n")[2]
    found = [word.replace("$$", "$") for word in read_by_systemd(open_folder, unit)]
    assert found[-len(QUADLET_HOSTILE) :] == QUADLET_HOSTILE
    assert "/data/50%:/models:ro,Z" in found


@pytest.mark.parametrize("runner", ["docker", "podman"])
def test_systemd_reads_our_unit(open_folder: Path, runner: Any) -> None:
    unit = render_launch(hostile_launch(), LaunchTarget(image=IMAGE, runner=runner), "systemd")
    found = [word.replace("$$", "$") for word in read_by_systemd(open_folder, unit)]
    assert found[-len(HOSTILE) :] == HOSTILE
    assert values_after(found, "-e") == VARIABLES


def test_systemd_finds_no_fault_in_our_unit(tmp_path: Path) -> None:
    path = tmp_path / "engine.service"
    good = render_launch(hostile_launch(), TARGET, "systemd").replace(
        "/usr/bin/docker", "/bin/true"
    )
    good = good.replace("Requires=docker.service\n", "")
    analyze = find_program("systemd-analyze")
    path.write_text(good)
    done = asked(analyze, "verify", "--man=no", path)
    assert (done.returncode, done.stderr) == (0, "")
    for fault in (good.replace("50%%h", "50%Q"), good.replace("Restart=on-failure", "Restart=x")):
        path.write_text(fault)
        assert asked(analyze, "verify", "--man=no", path).stderr != ""


def test_compose_gives_the_engine_what_the_recipe_says(compose: Path, tmp_path: Path) -> None:
    path = tmp_path / "compose.yaml"
    path.write_text(
        render_launch(hostile_launch(), LaunchTarget(image=IMAGE, gpus=[0, 1]), "compose")
    )
    done = asked(compose, "-f", path, "config", "--format", "json")
    assert done.returncode == 0, done.stderr
    engine = json.loads(done.stdout)["services"]["engine"]
    # it writes every `$` twice, as it wants to read it
    plain = json.loads(json.dumps(engine).replace("$$", "$"))
    assert plain["command"][1:] == HOSTILE
    assert {f"{name}={value}" for name, value in plain["environment"].items()} == set(VARIABLES)
    device = engine["deploy"]["resources"]["reservations"]["devices"][0]
    assert device["driver"] == "cdi"
    assert device["device_ids"] == ["nvidia.com/gpu=0", "nvidia.com/gpu=1"]
    assert engine["volumes"][0]["read_only"] is True
    assert (engine["cap_drop"], engine["security_opt"]) == (["ALL"], ["no-new-privileges"])
    assert engine["ports"][0]["host_ip"] == "127.0.0.1"
    assert (engine["ipc"], engine["ulimits"]) == ("host", {"memlock": -1})


def test_compose_refuses_what_is_no_compose_file(compose: Path, tmp_path: Path) -> None:
    path = tmp_path / "compose.yaml"
    good = render_launch(small_launch(), TARGET, "compose")
    for bad in (good.replace("command:", "commands:"), good.replace("driver: cdi", "driver: [1]")):
        path.write_text(bad)
        assert asked(compose, "-f", path, "config", "--quiet").returncode != 0


@pytest.mark.big  # 108 MB of schemas
@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_schema_accepts_our_objects(
    kubernetes_validate: Path, tmp_path: Path, version: str
) -> None:
    target = LaunchTarget(image=IMAGE, nccl="patched", claim="weights")
    if version == KUBERNETES[-1]:
        weights = f"registry.lan/weights@sha256:{'a' * 64}"
        target = LaunchTarget(image=IMAGE, nccl="patched", weights_image=weights)
    path = tmp_path / "good.yaml"
    path.write_text(render_launch(hostile_launch(), target, "kubernetes"))
    name = "sm120-small-2x against version"
    assert verdicts(kubernetes_validate, path, version) == [
        f"INFO passed for resource deployment/{name} {version}",
        f"INFO passed for resource service/{name} {version}",
    ]


@pytest.mark.big
@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("containerPort: 8000", "containerPort: http", "'http' is not of type"),
        ("runAsNonRoot", "runAsNoRoot", "'runAsNoRoot' was unexpected"),
        ("value: SYS", "value: 1", "1 is not of type"),
    ],
)
def test_kubernetes_schema_refuses_what_is_wrong(
    kubernetes_validate: Path, tmp_path: Path, right: str, wrong: str, message: str
) -> None:
    good = render_launch(small_launch(), TARGET, "kubernetes")
    assert right in good
    path = tmp_path / "bad.yaml"
    path.write_text(good.partition("---")[0].replace(right, wrong))
    (verdict,) = verdicts(kubernetes_validate, path, KUBERNETES[1])
    assert verdict.startswith("ERROR did not validate")
    assert message in verdict


def verdicts(folder: Path, path: Path, version: str) -> list[str]:
    """What the validator says of each object, without its name for the file."""
    check = (sys.executable, "-m", "kubernetes_validate", "--strict", "-k", version)
    done = asked(*check, path, PYTHONPATH=str(folder))
    lines = (done.stdout + done.stderr).replace(str(path), "").splitlines()
    return [" ".join(line.split()) for line in lines]


@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize(("format_name", "program"), [("shell", "vllm"), ("docker", "docker")])
def test_a_shell_starts_what_the_recipe_says(
    tmp_path: Path, shell: str, format_name: str, program: str
) -> None:
    fake = tmp_path / program
    fake.write_text('#!/bin/sh\nprintf "%s\\0" "$HOSTILE_4" "$@"\n')
    fake.chmod(0o755)
    script = tmp_path / "script"
    script.write_text(render_launch(hostile_launch(), TARGET, format_name))
    assert asked(shell, "-n", script).stderr == ""
    done = asked(shell, script, PATH=f"{tmp_path}:/usr/bin:/bin")
    variable, *found = done.stdout.split("\0")[:-1]
    if format_name == "shell":
        assert variable == HOSTILE[4]
        assert found[-2:] == ["--host", "0.0.0.0"]
        assert found[2:-2] == HOSTILE
    else:
        assert found[-len(HOSTILE) :] == HOSTILE
        assert values_after(found, "-e") == VARIABLES


def test_a_shell_takes_the_settings_of_clients(tmp_path: Path) -> None:
    script = tmp_path / "env"
    script.write_text(render_env(client_settings("it's $HOME", 8000, "fd00::7")))
    line = f'. {script}; printf "%s\\0" "$OPENAI_MODEL" "$ANTHROPIC_BASE_URL"'
    done = asked("sh", "-c", line)
    assert done.stdout.split("\0")[:-1] == ["it's $HOME", "http://[fd00::7]:8000"]
