"""A command starts fast when it loads only what it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest

from pipeline.cli.main import as_ours, cli, require_own_code
from pipeline.cli.verbs import GROUPS, Verb, VerbGroup
from pipeline.core.errors import MissingTool
from pipeline.images.spec.checkout import Checkout
from tests.testbed.locked_set import SMALL, make_set
from tests.unit.support import ROOT, Command, build_tiny

SLOW = {
    *("cryptography", "docker", "huggingface_hub", "packaging", "pydantic"),
    *("pypi_simple", "requests", "rich", "urllib3", "yaml"),
}
CODE = """
import sys
from pipeline.cli.main import cli
try:
    cli(sys.argv[1:], prog_name="sm120")
finally:
    print(*sys.modules, file=sys.stderr)
"""


def modules_of(*args: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", CODE, *args], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stderr.splitlines()[-1].split())


def loaded_by(*args: str) -> set[str]:
    return SLOW & {name.partition(".")[0] for name in modules_of(*args)}


@pytest.mark.parametrize("args", ["--version", "--help", "weights --help", "completion bash"])
def test_what_only_speaks_of_commands_loads_none_of_their_libraries(args: str) -> None:
    assert loaded_by(*args.split()) == set()


def test_a_verify_of_weights_loads_its_own_libraries_alone(tmp_path: Path) -> None:
    make_set(tmp_path, SMALL, {"model.safetensors": b"weights" * 1000})
    assert loaded_by("weights", "verify", str(tmp_path)) == {"pydantic", "yaml"}


def test_a_verify_of_weights_loads_neither_specs_nor_facts_of_hosts(tmp_path: Path) -> None:
    make_set(tmp_path, SMALL, {"model.safetensors": b"weights" * 1000})
    loaded = modules_of("weights", "verify", str(tmp_path))
    assert "pipeline.images.spec.checkout" in loaded
    assert loaded.isdisjoint({"pipeline.images.spec.image", "pipeline.hosts.facts.model"})


def test_a_second_verify_of_weights_reads_the_record_of_the_first_without_the_code_of_images(
    tmp_path: Path,
) -> None:
    make_set(tmp_path, SMALL, {"model.safetensors": b"weights" * 1000})
    modules_of("weights", "verify", str(tmp_path))
    assert list(tmp_path.rglob("record.dsse.json"))
    loaded = modules_of("weights", "verify", str(tmp_path))
    assert "pipeline.evidence.verify.weights_backing" in loaded
    # half of the CPU of such a command was their import
    assert loaded.isdisjoint(
        {"pipeline.evidence.verify.chain", "pipeline.images.assemble.image", "urllib3"}
    )


def test_a_build_with_nothing_to_do_loads_neither_gates_nor_recipes_nor_http(
    sm120: Command, checkout: Checkout
) -> None:
    assert build_tiny(sm120, "--accept").code == 0
    loaded = modules_of("--checkout", str(checkout.root), "build", "tiny")
    assert "pipeline.images.assemble.image" in loaded
    assert loaded.isdisjoint({"pipeline.serving.recipe.model", "urllib3", "cryptography"})
    gates = {name for name in loaded if name.startswith("pipeline.images.gate.")}
    assert gates <= {"pipeline.images.gate.runs"}  # what running the image proved; it loads no gate


@pytest.mark.parametrize("module", ["verify", "weights", "hosts"])
def test_what_is_no_benchmark_is_checked_without_the_packages_of_benchmarks(module: str) -> None:
    code = f"import sys, pipeline.app.{module}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert "pipeline.artifacts.attest.envelope" in loaded
    assert loaded.isdisjoint({"pipeline.serving.bench.model", "pipeline.serving.report.model"})


@pytest.mark.parametrize("group", [cli, *GROUPS], ids=lambda group: group.name)
def test_a_command_goes_by_the_name_it_is_listed_under(group: VerbGroup) -> None:
    names = group.list_commands(click.Context(group))
    commands = [group.get_command(click.Context(group), name) for name in names]
    assert [command.name for command in commands if command] == names


def test_a_command_is_loaded_once_and_an_unknown_one_not_at_all() -> None:
    group = VerbGroup(
        "weights", verbs={"verify": Verb("weights:weights_verify_command", "Check files.")}
    )
    context = click.Context(group)
    assert group.commands == {}
    assert group.get_command(context, "verify") is group.get_command(context, "verify")
    assert group.get_command(context, "build") is None


def test_a_place_that_cannot_be_made_is_named_without_the_name_of_a_class() -> None:
    error = as_ours(FileNotFoundError(2, "No such file or directory", "/proc/x"))
    assert str(error) == "/proc/x: No such file or directory"
    assert "path" in error.hint


def test_a_program_of_a_copied_checkout_says_whose_code_it_would_run(tmp_path: Path) -> None:
    program = tmp_path / "copy/.nox/run/bin/sm120"
    program.parent.mkdir(parents=True)
    with pytest.raises(MissingTool, match=f"would run the code of {tmp_path}/original") as refused:
        require_own_code(program, tmp_path / "original/.nox/run")
    assert "noxfile.py" in refused.value.hint
    # its own program, a link to it, and one that is in no checkout
    program.touch()
    (tmp_path / "sm120").symlink_to(program)
    for own in (program, tmp_path / "sm120"):
        require_own_code(own, tmp_path / "copy/.nox/run")
    require_own_code(Path("/usr/local/bin/sm120"), Path("/usr"))
