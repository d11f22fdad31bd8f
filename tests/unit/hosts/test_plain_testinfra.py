"""Promises run by plain pytest-testinfra, on this machine itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.hosts.fleet.promised import Promised, Roles
from tests.testbed.playbook import ROOT
from tests.unit.hosts.fake_host import LOCAL
from tests.unit.hosts.good_host import NCCL

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="Promises are judged as root.")


def judged(tmp_path: Path, roles: Roles, chosen: str, host: str = "local") -> tuple[int, str]:
    promised = Promised(host=host, connection=LOCAL, roles=roles)
    (tmp_path / "local.json").write_text(promised.model_dump_json())
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"),
            *("--hosts=local://", "--promises", str(tmp_path), "-k", chosen),
            "pipeline/hosts/promises",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def nccl(tmp_path: Path, **changes: object) -> Roles:
    place = str(tmp_path / "libnccl.so.2")
    return Roles(nccl=NCCL.model_copy(update={"patched_at": place, **changes}))


def test_a_kept_promise_passes_and_roles_that_were_not_chosen_are_skipped(tmp_path: Path) -> None:
    roles = nccl(tmp_path)
    code, text = judged(tmp_path, roles, "patched_library_is_ours or nouveau_is_kept")
    assert (code, "1 passed, 1 skipped" in text) == (0, True), text
    assert "the role nvidia_driver is not chosen for this host" in text


def test_a_broken_promise_fails_with_its_reason_and_without_a_traceback(tmp_path: Path) -> None:
    roles = nccl(tmp_path, patched_at=str(tmp_path))
    code, text = judged(tmp_path, roles, "patched_library_is_ours")
    assert code == 1
    assert f"failed: is still there: {tmp_path}" in text
    assert "Traceback" not in text
    assert not re.search(r"^E ", text, re.M)


def test_a_host_to_which_nothing_was_promised_does_not_pass(tmp_path: Path) -> None:
    code, text = judged(tmp_path, nccl(tmp_path), "patched_library_is_ours", host="another")
    assert (code, "nothing was promised to local" in text) == (1, True), text


def test_what_cannot_be_decided_does_not_pass_either(tmp_path: Path) -> None:
    roles = nccl(tmp_path, patched="/nowhere/libnccl.so.2")
    code, text = judged(tmp_path, roles, "patched_library_is_ours")
    assert code == 1
    assert "unknown: /nowhere/libnccl.so.2 is not on this controller" in text
