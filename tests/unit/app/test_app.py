"""The application works without a command line: requests in, typed results out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import app
from pipeline.app.workspace import Workspace, named_platform, pick_platform, platforms_of
from pipeline.cli.main import cli
from pipeline.core.errors import EvidenceUnsigned, SpecInvalid, UnknownImage
from pipeline.weights.transfer.workers import JOBS
from tests.unit.support import AMD64, ARM64, ROOT, make_checkout, make_wheel


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """A checkout with one image, `tiny`, and an empty store."""
    make_checkout(tmp_path, [make_wheel(tmp_path / "mirror", "thing")])
    return Workspace(tmp_path, tmp_path / "store")


@pytest.mark.usefixtures("no_slow_helpers")
def test_an_image_is_built_stated_and_verified_without_a_word_on_stdout(
    workspace: Workspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mirrors = (str(tmp_path / "mirror"),)
    request = app.build.BuildRequest(("tiny",), mirrors=mirrors, offline=True, accept=True)
    done = app.build.build_images(workspace, request)
    (image,) = done.built
    assert done.statements[image].stated.statements
    assert app.build.plan_build(workspace, request).work.missing == ()
    verified = app.verify.verify_artifact(workspace, app.verify.VerifyRequest("tiny"))
    with pytest.raises(EvidenceUnsigned):
        verified.require_valid()
    assert capsys.readouterr().out == ""


def test_an_image_that_is_not_built_is_an_error_with_a_fix(workspace: Workspace) -> None:
    checkout, store = workspace.checkout(), workspace.store()
    with pytest.raises(UnknownImage, match="is not built") as refused:
        app.images.find_image(checkout, store, "tiny", None)
    assert "sm120 build tiny" in refused.value.hint


def test_a_module_of_the_application_is_loaded_when_it_is_named() -> None:
    code = (
        "import sys; from pipeline import app; assert 'pipeline.app.workspace' not in sys.modules;"
        " app.workspace; assert 'pipeline.app.workspace' in sys.modules;"
        " print('pydantic' in sys.modules, hasattr(app, 'no_such_module'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False False\n"


def test_a_platform_is_the_chosen_one_or_that_of_this_machine(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.app.workspace.host_platform", lambda: ARM64)
    spec = workspace.checkout().spec("tiny")
    assert platforms_of(spec, None) == list(spec.platforms)
    assert named_platform("host") == ARM64
    assert pick_platform(spec, None) in spec.platforms
    assert pick_platform(spec, AMD64) == AMD64
    with pytest.raises(SpecInvalid, match="is not for linux/riscv64"):
        platforms_of(spec, "linux/riscv64")


def test_a_workspace_outside_a_checkout_has_none(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, tmp_path / "store")
    assert workspace.checkout_or_none() is None
    assert workspace.store_root() == tmp_path / "store"
    assert not (tmp_path / "store").exists()


def test_options_repeat_the_defaults_of_modules_that_they_do_not_load() -> None:
    context = cli.make_context("sm120", ["weights", "list"])
    weights = cli.get_command(context, "weights")
    assert weights is not None
    fetch = weights.get_command(context, "fetch")  # type: ignore[attr-defined]
    assert next(p.default for p in fetch.params if p.name == "jobs") == JOBS
