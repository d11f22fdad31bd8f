from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.core.errors import StartFailed
from pipeline.serving.recipe.launch import Overrides, plan_launch
from pipeline.serving.serve.host_nccl import with_host_nccl
from tests.unit.serve.recipes import recipe

LAUNCH = plan_launch(
    recipe(environment={"ours": {"NCCL_PROTO": "LL"}}), Overrides(), weights="/data"
)


def test_the_host_s_settings_are_taken_and_those_of_the_recipe_stay(tmp_path: Path) -> None:
    settings = tmp_path / "nccl.env"
    settings.write_text("# by the role\nNCCL_P2P_LEVEL=SYS\n\nNCCL_PROTO=Simple\nLD_PRELOAD=/a=b\n")
    launch = with_host_nccl(LAUNCH, "settings", settings=settings)
    assert launch.environment == {
        "NCCL_P2P_LEVEL": "SYS",
        "NCCL_PROTO": "LL",
        "LD_PRELOAD": "/a=b",
    }
    assert launch.mounts == LAUNCH.mounts


def test_the_patched_library_is_mounted_read_only_under_its_own_path(tmp_path: Path) -> None:
    (tmp_path / "nccl.env").write_text("")
    launch = with_host_nccl(LAUNCH, "patched", settings=tmp_path / "nccl.env", library=tmp_path)
    last = launch.mounts[-1]
    assert (last.host, last.inside, last.read_only) == (str(tmp_path), str(tmp_path), True)


def test_a_host_without_them_is_said_to_have_none(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match="cannot be read"):
        with_host_nccl(LAUNCH, "settings", settings=tmp_path / "none")
    (tmp_path / "nccl.env").write_text("export A=1")
    with pytest.raises(StartFailed, match="is not the name of a variable"):
        with_host_nccl(LAUNCH, "settings", settings=tmp_path / "nccl.env")
    (tmp_path / "nccl.env").write_text("")
    with pytest.raises(StartFailed, match="has no NCCL of its own"):
        with_host_nccl(LAUNCH, "patched", settings=tmp_path / "nccl.env", library=tmp_path / "none")
