"""`sm120 bump` and the catalogue on an engine of one kernel, which the real Triton compiles.

As the gate's own small test, it runs where some gate has made an environment with Triton.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from pipeline.app import bump as bumps
from pipeline.app.bump import BumpRequest, bump_images
from pipeline.app.catalogue import CatalogueRequest, make_catalogue
from pipeline.app.workspace import Workspace, host_platform
from pipeline.artifacts.store.store import default_root
from pipeline.images.gate.runs import ImageRun, RunTest
from pipeline.images.gate.smem.environment import Environment, known_facts
from tests import makers
from tests.integration.test_gate_small import GATE, HERE
from tests.testbed.fault_server import FaultServer, fault_server
from tests.unit.support import AMD64, make_wheel

ENGINE = (HERE / "tinyengine" / "attention.py").read_text(encoding="utf-8")
FITS, OVER = "[0] == 12 else", "[0] == 13 else"
CURED = "block = 32 if torch.cuda.get_device_capability()[0] == 12 else 128"
VERSIONS = {
    "1.0": ENGINE.replace(FITS, OVER),
    "1.1": ENGINE.replace(FITS, OVER) + "\n",  # the same defect
    "1.2": ENGINE,  # upstream took the patch
    "1.3": ENGINE.replace(CURED, "block = 16"),  # upstream fixed it in another way
    "1.4": ENGINE.replace(CURED, "block = 128"),  # a kernel over the limit, which no patch fits
}


@pytest.fixture
def environment() -> Environment:
    """The environment with the newest Triton: older ones have no ptxas that knows sm_121."""
    found: dict[Version, Environment] = {}
    for facts in sorted((default_root() / "gate" / "environments").glob("*/facts.json")):
        report = known_facts(facts.parent)
        if report and report.platform == host_platform() and report.triton:
            found[Version(report.triton)] = Environment(facts.parent, report, ())
    if not found:
        reason = "No gate has made an environment with Triton here: run `sm120 gate run sglang-k2`."
        pytest.skip(reason)
    return found[max(found)]


@pytest.fixture
def served() -> Iterator[FaultServer]:
    with fault_server() as running:
        yield running


@pytest.fixture
def workspace(
    environment: Environment,
    served: FaultServer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Workspace:
    """A checkout whose engine needs a patch on SM120, and four newer versions of it."""
    for name, value in {"UV_DEFAULT_INDEX": served.index, "PIP_INDEX_URL": served.index}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))
    place = "pipeline.images.gate.smem.image_gate.make_environment"
    monkeypatch.setattr(place, lambda *_, **__: environment)
    monkeypatch.setattr("pipeline.app.gate.environment_work", lambda *_: None)
    monkeypatch.setattr("pipeline.images.assemble.locked_layers._workers", makers.threads)
    started = ImageRun(kind="start", tests=[RunTest(name="imports", verdict="passed")])
    monkeypatch.setattr(bumps, "prove_starts", lambda *_: {None: started})
    needs = ("torch", "triton", "nvidia-cuda-runtime")
    wheels = [make_wheel(tmp_path / "parts", name, "13.0") for name in needs]
    for version, code in VERSIONS.items():
        files = {"tinyengine/attention.py": code.encode()}
        more: dict[str, Any] = {"requires": needs, "files": files}
        wheels.append(make_wheel(tmp_path / "parts", "tinyengine", version, **more))
    for path in wheels:
        served.add(path.name, path.read_bytes())
    old, new = (text.encode() for text in (VERSIONS["1.0"], ENGINE))
    edit = makers.Edit("tinyengine/attention.py", old, new)
    spec = {
        **{"name": "tiny", "summary": "An engine of one kernel", "platforms": [AMD64]},
        **{"debian": {}, "python": {"requirements": ["tinyengine==1.0"]}, "gates": ["smem"]},
        "patches": "patches/series.yaml",
    }
    image = makers.Image(spec, wheels[:4])
    image.files |= makers.patch_files(edit, applies_to="tinyengine==1.0", gate="smem-tiny")
    image.files |= {
        "gates/engine.yaml": "package: tinyengine\n",
        "gates/smem-tiny.yaml": json.dumps(GATE),
    }
    root = makers.make_checkout(tmp_path, image).root
    return Workspace(root, tmp_path / "store")


def test_an_upstreamed_patch_and_a_kernel_over_the_limit_are_named(
    workspace: Workspace, tmp_path: Path
) -> None:
    to = tuple(f"tinyengine=={version}" for version in ("1.2", "1.4"))
    request = BumpRequest(("tiny",), to=to, output=tmp_path / "page")
    found = {each.version: each for each in bump_images(workspace, request)}
    states = {version: [v.state for v in each.patches] for version, each in found.items()}
    assert states == {"1.2": ["upstreamed"], "1.4": ["conflict"]}
    advice = {version: each.advice for version, each in found.items()}
    assert advice == {"1.2": "take", "1.4": "wait"}
    assert found["1.2"].sentence.endswith("Leave out 0001.patch: no longer needed.")
    # the kernel, what it needs and what the card has
    assert "smem on sm_120: failed" in found["1.4"].reasons[0]
    assert "_tiny_kernel needs 131072 bytes of 101376" in found["1.4"].reasons[0]
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "| 0001.patch | smem-tiny | upstreamed |" in page
    assert [each.is_kept for each in bump_images(workspace, request)] == [True] * 2


@pytest.mark.big
def test_a_catalogue_says_which_release_fits_and_with_which_patch(
    workspace: Workspace, tmp_path: Path
) -> None:
    request = CatalogueRequest(output=tmp_path / "catalogue")
    made, stated = make_catalogue(workspace, request)
    fits = {each.version: {card.arch: card.fit for card in each.cards} for each in made.releases}
    of = {"1.0": "fits with patches", "1.1": "fits with patches", "1.2": "fits", "1.3": "fits"}
    of["1.4"] = "does not fit"
    assert fits == {version: {"sm_120": fit, "sm_121": fit} for version, fit in of.items()}
    assert [Path(each.file).name for each in stated] == [
        f"catalogue.{ending}.dsse.json" for ending in ("json", "md", "html")
    ]
    page = (tmp_path / "catalogue.md").read_text(encoding="utf-8")
    assert "| tinyengine | 1.1 | fits with 0001.patch | fits with 0001.patch |" in page
    assert "does not fit: tiny: _tiny_kernel needs 131072 bytes" in page
    # a second run judges nothing, and rows of releases that nobody asks for now stay
    again, _ = make_catalogue(workspace, replace(request, engines=("tinyengine==1.4",)))
    assert again == made
    others = BumpRequest(("tiny",), to=("1.1", "1.3"), output=tmp_path / "page")
    needed, superseded = bump_images(workspace, others)
    assert needed.sentence.endswith("take it. With 0001.patch.")
    assert superseded.sentence.endswith("take it. Leave out 0001.patch: no longer needed.")
    assert [needed.patches[0].state, superseded.patches[0].state] == ["needed", "superseded"]
