"""The README says what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from pipeline.cli.main import cli
from pipeline.errors import error_families, error_kinds
from pipeline.host.probes.runner import NCCL_LIBRARY, NCCL_SETTINGS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def exit_code_table() -> str:
    """The table as the README must have it: each family, then its kinds."""
    lines = ["| code | name | what happened | what to try |", "|---|---|---|---|"]
    for family in error_families():
        kinds = error_kinds(family)
        if kinds != [family]:
            lines.append(f"| {family.exit_code} | **{family.__name__}** | {family.meaning} | |")
        for kind in kinds:
            code = f"{kind.exit_code}" if kind is family else ""
            lines.append(f"| {code} | {kind.__name__} | {kind.meaning} | {kind.hint} |")
    return "\n".join(lines)


def section(name: str) -> str:
    found = re.search(rf"<!-- {name} -->\n(.*?)\n?<!-- end -->", README, re.S)
    assert found, f"README has no section {name!r}"
    return found[1]


def test_the_exit_codes_in_the_readme_are_those_of_the_code() -> None:
    assert section("exit codes") == exit_code_table()


def test_the_digests_in_the_readme_are_the_golden_ones() -> None:
    golden = yaml.safe_load((ROOT / "lockfiles" / "golden.yaml").read_text(encoding="utf-8"))
    block = section("output: build")
    for name in ("sglang-k2", "sglang", "vllm"):
        assert golden["images"][f"{name}.amd64"]["digest"] in block


def test_the_docker_tag_in_the_readme_is_the_digest_it_stands_for() -> None:
    golden = yaml.safe_load((ROOT / "lockfiles" / "golden.yaml").read_text(encoding="utf-8"))
    tag = re.search(r"sm120/sglang-k2:([0-9a-f]{12})", README)
    assert tag
    assert tag[1] == golden["images"]["sglang-k2.amd64"]["digest"][7:19]


@pytest.mark.parametrize("room", ["spec", "lock", "store", "fetch", "build", "ship", "cli"])
def test_the_map_names_every_room(room: str) -> None:
    assert (ROOT / "pipeline" / room).is_dir()
    assert f"`pipeline/{room}`" in README


def test_every_room_is_on_the_map() -> None:
    rooms = [p.parent.name for p in (ROOT / "pipeline").glob("*/__init__.py")]
    assert [r for r in rooms if f"`pipeline/{r}`" not in README] == []


def test_the_fit_in_the_readme_is_what_the_command_says() -> None:
    block = section("output: fit").removeprefix("```\n$ sm120 ").removesuffix("\n```")
    command, _, said = block.partition("\n")
    found = CliRunner().invoke(cli, command.split(), obj={})
    assert found.stdout.rstrip() == said


def test_an_engine_is_started_with_the_hosts_nccl_settings_and_library() -> None:
    (block,) = [b for b in re.findall(r"```sh\n(.*?)```", README, re.S) if "docker run" in b]
    settings, library = map(str, (NCCL_SETTINGS, NCCL_LIBRARY))
    assert f"--env-file {settings}" in block
    assert f"-v {library}:{library}:ro" in block
    assert '"${nccl[@]}"' in block.partition("docker run")[2]
    role = yaml.safe_load((ROOT / "ansible/roles/nccl/vars/main.yml").read_text(encoding="utf-8"))
    assert str(Path(role["nccl_library"]).parent) == library
    assert settings in (ROOT / "ansible/roles/nccl/tasks/present.yml").read_text(encoding="utf-8")
