"""Somebody else's config: what is used of it is sound, or it is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.artifacts.oci.config import read_image_config
from pipeline.core.errors import BaseUnusable

DIGEST = "sha256:" + "a" * 64
GOOD: dict[str, Any] = {
    "os": "linux",
    "architecture": "amd64",
    "config": {
        "Env": ["PATH=/bin", "A=1", "EMPTY=", "A=2=3"],
        "User": "app:app",
        "WorkingDir": "/srv/app",
        "ExposedPorts": {"80/tcp": {}, "9000-9010": {}},
        "Volumes": {"/data": {}},
        "StopSignal": "SIGRTMIN+3",
    },
    "rootfs": {"type": "layers", "diff_ids": [DIGEST]},
    "history": [{"created_by": "one"}, {"created_by": "two", "empty_layer": True}],
}


def read(**changes: Any) -> Any:
    return read_image_config(json.dumps({**GOOD, **changes}).encode())


def test_a_good_config_is_read_and_the_last_of_two_variables_counts() -> None:
    config = read()
    assert config.platform == "linux/amd64"
    assert config.variables() == {"PATH": "/bin", "A": "2=3", "EMPTY": ""}
    assert config.runs.user == "app:app"
    assert config.runs.workdir == "/srv/app"


@pytest.mark.parametrize("missing", [None, {}])
def test_a_config_may_say_nothing_of_how_it_runs(missing: Any) -> None:
    config = read(config=missing)
    assert config.variables() == {}
    assert (config.runs.user, config.runs.command) == (None, None)


def test_a_history_counts_where_it_tells_of_exactly_the_layers() -> None:
    steps = [{"created_by": "one"}, {"created_by": "two", "empty_layer": True}]
    assert read().past() == steps
    assert read(rootfs={"type": "layers", "diff_ids": [DIGEST, DIGEST]}).past() is None
    assert read(history=[{"created_by": "one"}, {"created_by": "two"}]).past() is None
    assert read(history=None).past() is None


@pytest.mark.parametrize(
    "settings",
    [
        {"Env": ["PATH"]},
        {"Env": ["=value"]},
        {"Env": ["A\x1b[2J=1"]},
        {"Env": ["A=\0"]},
        {"Env": "A=1"},
        {"Env": [1]},
        {"User": "root; rm"},
        {"WorkingDir": "srv"},
        {"WorkingDir": "/srv/../etc"},
        {"WorkingDir": "/srv\n"},
        {"Volumes": {"data": {}}},
        {"Volumes": {"/a/../b": {}}},
        {"ExposedPorts": {"http": {}}},
        {"ExposedPorts": {"80/icmp": {}}},
        {"StopSignal": "sigterm"},
        {"Cmd": ["a\0b"]},
        {"Entrypoint": "sh -c"},
    ],
)
def test_a_setting_that_is_not_sound_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(BaseUnusable, match=next(iter(settings))):
        read(config=settings)


@pytest.mark.parametrize(
    "change",
    [
        {"os": None},
        {"architecture": 1},
        {"rootfs": None},
        {"rootfs": {"type": "layers", "diff_ids": []}},
        {"rootfs": {"type": "other", "diff_ids": [DIGEST]}},
        {"rootfs": {"type": "layers", "diff_ids": ["latest"]}},
        {"history": [{"created_by": "a\0"}]},
        {"config": []},
    ],
)
def test_a_config_that_is_not_sound_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BaseUnusable, match=next(iter(change))):
        read(**change)
