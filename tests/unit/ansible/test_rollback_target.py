"""Which recorded driver a rollback goes back to."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.testbed.packages import system_environment
from tests.testbed.playbook import ROOT

SCRIPT = ROOT / "ansible" / "roles" / "nvidia_driver" / "files" / "rollback_target.sh"
OLD, NEW, THIRD = ("580.82.07-1", "580.95.05-1", "590.48.01-1")


def chosen(tmp_path: Path, pinned: str | None, **records: str) -> str:
    """The version that comes back, with these records and these pins in apt's preferences."""
    folder, preferences = tmp_path / "kept", tmp_path / "driver.pref"
    folder.mkdir()
    for name, version in records.items():
        pins = [{"name": n, "version": version, "sha256": "0" * 64} for n in ("nvidia-open", "b")]
        (folder / f"{name}.json").write_text(json.dumps({"packages": ["b"], "pins": pins}))
    if pinned is not None:
        rows = [f"Package: {n}\nPin: version {pinned}\n" for n in ("nvidia-open", "b")]
        preferences.write_text("# ours\n\n" + "Pin-Priority: 1001\n\n".join([*rows, ""]))
    return output(folder, preferences)


def output(folder: Path, preferences: Path) -> str:
    done = subprocess.run(
        ["/bin/sh", "-c", SCRIPT.read_text(), "rollback_target.sh", str(folder), str(preferences)],
        env=system_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    return json.loads(done.stdout)["pins"][0]["version"] if done.stdout else ""


@pytest.mark.parametrize(
    ("pinned", "records", "version"),
    [
        (NEW, {"working": OLD}, OLD),
        (NEW, {"working": NEW, "before": OLD}, OLD),
        (THIRD, {"working": NEW, "before": OLD}, NEW),
        (OLD, {"working": NEW, "before": THIRD, "rollback": OLD}, OLD),
        (None, {"working": NEW}, NEW),
        (NEW, {"working": NEW}, ""),
        (NEW, {"before": OLD}, ""),
        (NEW, {}, ""),
    ],
    ids=[
        "a new one never worked",
        "the one before",
        "the last that worked",
        "a rollback that was cut off",
        "nothing pinned",
        "only the present one",
        "a record without its other half",
        "none",
    ],
)
def test_a_rollback_goes_to_the_last_driver_that_worked_and_is_not_the_present_one(
    tmp_path: Path, pinned: str | None, records: dict[str, str], version: str
) -> None:
    assert chosen(tmp_path, pinned, **records) == version


def test_without_a_folder_or_with_damaged_records_there_is_nothing_to_go_back_to(
    tmp_path: Path,
) -> None:
    assert output(tmp_path / "none", tmp_path / "none.pref") == ""
    (tmp_path / "working.json").write_text("{")
    assert output(tmp_path, tmp_path / "none.pref") == ""
