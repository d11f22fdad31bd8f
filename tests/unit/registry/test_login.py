from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.oci.reference import parse_reference
from pipeline.artifacts.registry.auth import Login, find_login
from pipeline.core.errors import MissingTool, RegistryRefused
from tests.unit.registry.support import keep_login

HERE = parse_reference("reg.example:5000/app")
AUTH = base64.b64encode(b"ann:se:cret").decode()


@pytest.fixture
def login_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def find(config: dict[str, Any], reference: Any = HERE) -> Login | None:
        keep_login(monkeypatch, tmp_path / "docker", config)
        return find_login(reference)

    return find


def add_helper(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / f"docker-credential-{name}"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_no_configuration_means_no_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "nowhere"))
    assert find_login(HERE) is None


def test_a_kept_login_is_found_with_colons_in_its_password(login_for: Any) -> None:
    assert login_for({"auths": {"reg.example:5000": {"auth": AUTH}}}) == Login("ann", "se:cret")


def test_a_login_kept_under_an_address_is_found(login_for: Any) -> None:
    config = {"auths": {"https://reg.example:5000/v1/": {"auth": AUTH}}}
    assert login_for(config) == Login("ann", "se:cret")


@pytest.mark.parametrize(
    "key", ["reg.example", "reg.example:5001", "xreg.example:5000", "reg.example:5000.evil.example"]
)
def test_another_registrys_login_is_not_taken(login_for: Any, key: str) -> None:
    assert login_for({"auths": {key: {"auth": AUTH}}}) is None


def test_dockers_own_registry_has_its_old_name_in_the_configuration(login_for: Any) -> None:
    config = {"auths": {"https://index.docker.io/v1/": {"auth": AUTH}}}
    assert login_for(config, parse_reference("docker.io/team/app")) == Login("ann", "se:cret")


def test_a_helper_is_asked_for_its_registry(
    login_for: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = 'read host; echo "{\\"Username\\": \\"$1\\", \\"Secret\\": \\"$host\\"}"'
    add_helper(monkeypatch, tmp_path / "bin", "desk", script)
    config = {"credHelpers": {"reg.example:5000": "desk"}}
    assert login_for(config) == Login("get", "reg.example:5000")


def test_a_helpers_token_is_an_identity_token(
    login_for: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answer = json.dumps({"Username": "<token>", "Secret": "tok"})
    add_helper(monkeypatch, tmp_path / "bin", "desk", f"echo '{answer}'")
    assert login_for({"credsStore": "desk"}) == Login(identity_token="tok")


def test_a_helper_that_knows_nothing_leaves_the_kept_logins(
    login_for: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = 'echo "credentials not found in native keychain"; exit 1'
    add_helper(monkeypatch, tmp_path / "bin", "desk", script)
    config = {"credsStore": "desk", "auths": {"reg.example:5000": {"auth": AUTH}}}
    assert login_for(config) == Login("ann", "se:cret")


@pytest.mark.parametrize("script", ["echo locked; exit 1", "echo no-json", 'echo "[1]"'])
def test_a_helper_that_fails_is_an_error_not_an_anonymous_try(
    login_for: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str
) -> None:
    add_helper(monkeypatch, tmp_path / "bin", "desk", script)
    with pytest.raises(RegistryRefused):
        login_for({"credsStore": "desk"})


def test_a_helper_that_is_not_installed_is_named(login_for: Any) -> None:
    with pytest.raises(MissingTool, match="docker-credential-desk"):
        login_for({"credsStore": "desk"})


@pytest.mark.parametrize("name", ["../x", "a/b", "a b", "x;y"])
def test_a_helpers_name_cannot_be_a_path(login_for: Any, name: str) -> None:
    with pytest.raises(RegistryRefused):
        login_for({"credsStore": name})


@pytest.mark.parametrize("auth", ["%%%", "/////w=="])
def test_a_login_that_cannot_be_read_is_an_error(login_for: Any, auth: str) -> None:
    with pytest.raises(RegistryRefused):
        login_for({"auths": {"reg.example:5000": {"auth": auth}}})


@pytest.mark.parametrize("text", ["{", "[" * 100_000], ids=["cut off", "deep"])
def test_a_damaged_configuration_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    (tmp_path / "config.json").write_text(text)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with pytest.raises(RegistryRefused):
        find_login(HERE)


def test_a_login_does_not_show_its_secrets() -> None:
    shown = repr(Login("ann", "hidden-word", "hidden-token"))
    assert "ann" in shown
    assert "hidden" not in shown
