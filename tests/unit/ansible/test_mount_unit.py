"""The name of the mount that the weights lie on, as systemd wants it."""

from __future__ import annotations

import pytest
import yaml

from tests.testbed.playbook import ROOT

jinja2 = pytest.importorskip("jinja2", reason="ansible-core is not installed (group hosts).")


@pytest.mark.parametrize(
    ("root", "unit"),
    [
        ("/models", "models.mount"),
        ("/srv/models/", "srv-models.mount"),
        ("/srv/big-disk/models", r"srv-big\x2ddisk-models.mount"),
    ],
)
def test_a_path_becomes_the_unit_that_systemd_expects(root: str, unit: str) -> None:
    path = ROOT / "ansible" / "roles" / "weights" / "vars" / "main.yml"
    text = yaml.safe_load(path.read_text(encoding="utf-8"))["weights_mount_unit"]
    assert jinja2.Environment().from_string(text).render(weights_root=root) == unit
