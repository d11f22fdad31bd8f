"""The shipped specs, locks and schemas agree with each other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from pipeline.core.errors import LockEdited, LockStale
from pipeline.core.yaml_file import schema
from pipeline.images.assemble.plan import plan_image
from pipeline.images.gate.arch import ArchSpec
from pipeline.images.gate.files import EngineSetup
from pipeline.images.gate.numerics import NumericsFile
from pipeline.images.gate.parsers.cases import FormatsFile, ParsersFile, TruthsFile
from pipeline.images.gate.smem.cases import GateFile
from pipeline.images.gate.templates.sources import SourcesFile, TemplatesFile
from pipeline.images.lock.model import current_lock, current_source_lock
from pipeline.images.spec.checkout import Checkout
from pipeline.images.spec.image import ImageFile, PatchSeries
from pipeline.images.spec.source import SourceSpec
from tests.unit.spec.json_schema import problems

CHECKOUT = Checkout(Path(__file__).resolve().parents[3])
SHIPPED = [(n, p) for n in CHECKOUT.images() for p in CHECKOUT.spec(n).platforms]


@pytest.mark.parametrize(("name", "platform"), SHIPPED)
def test_a_shipped_lock_answers_its_spec(name: str, platform: str) -> None:
    spec = CHECKOUT.spec(name).on(platform)
    lock, made = current_lock(CHECKOUT, spec, platform), spec.compiled or spec.warm
    assert lock.pins or made or name == "debian-python"


@pytest.mark.parametrize(("name", "platform"), SHIPPED)
def test_a_shipped_image_stays_under_a_hundred_layers(name: str, platform: str) -> None:
    assert len(plan_image(CHECKOUT, name, platform).all_layers()) < 98


@pytest.mark.parametrize("path", sorted((CHECKOUT.root / "lockfiles").rglob("*.*")), ids=str)
def test_no_lock_names_a_place(path: Path) -> None:
    assert not re.search(r"://|index-url", path.read_text(encoding="utf-8"))


MODELS: dict[str, type[BaseModel]] = {
    "image": ImageFile,
    "series": PatchSeries,
    "gate": GateFile,
    "numerics": NumericsFile,
    "parsers": ParsersFile,
    "formats": FormatsFile,
    "truths": TruthsFile,
    "templates": TemplatesFile,
    "sources": SourcesFile,
    "engine": EngineSetup,
    "arch": ArchSpec,
    "source": SourceSpec,
}
SOURCES = sorted((CHECKOUT.root / "images" / "sources").glob("*/source.yaml"))
# libyaml reads the long files of gates ten times as fast; not every build of PyYAML has it
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
GATE_FILES = sorted((CHECKOUT.root / "images").glob("*/gates/**/*.yaml"))


def schema_of(path: Path) -> str:
    return "gate" if path.stem.startswith("smem-") else path.name.partition(".")[0]


@pytest.mark.parametrize("name", MODELS)
def test_the_schemas_for_editors_are_those_of_the_code(name: str) -> None:
    path = CHECKOUT.root / "images" / f"{name}.schema.json"
    assert path.read_text(encoding="utf-8") == schema(MODELS[name])


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.parent.name)
def test_a_source_names_its_schema_and_fits_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# yaml-language-server: $schema=../../source.schema.json\n")
    rules = json.loads(schema(SourceSpec))
    assert problems(yaml.safe_load(text), rules, rules) == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.parent.name)
def test_the_lock_of_a_source_answers_its_spec(path: Path) -> None:
    name = path.parent.name
    lock = current_source_lock(CHECKOUT.source_lock_path(name), CHECKOUT.source(name))
    assert lock.source == name


def test_the_lock_of_another_source_is_refused() -> None:
    one, other = (path.parent.name for path in SOURCES[:2])
    with pytest.raises(LockEdited, match=f"is the lock of {other}"):
        current_source_lock(CHECKOUT.source_lock_path(other), CHECKOUT.source(one))


def test_the_lock_of_a_source_that_changed_is_refused() -> None:
    name = SOURCES[0].parent.name
    spec = CHECKOUT.source(name)
    archive = spec.archive.model_copy(update={"leave_out": ["docs/more"]})
    changed = spec.model_copy(update={"archive": archive})
    with pytest.raises(LockStale, match="has changed since it was locked"):
        current_source_lock(CHECKOUT.source_lock_path(name), changed)


@pytest.mark.parametrize("path", GATE_FILES, ids=lambda p: f"{p.parts[-3]}-{p.stem}")
def test_a_gate_s_file_names_its_schema_and_fits_it(path: Path) -> None:
    text, kind = path.read_text(encoding="utf-8"), schema_of(path)
    up = "../" * len(path.parent.relative_to(CHECKOUT.root / "images").parts)
    assert text.startswith(f"# yaml-language-server: $schema={up}{kind}.schema.json\n")
    rules = json.loads(schema(MODELS[kind]))
    assert problems(yaml.load(text, Loader=LOADER), rules, rules) == []


TENSOR = {"shape": [4, "heads"], "dtype": "bfloat16"}


@pytest.mark.parametrize(
    "argument",
    [
        {"tensor": {**TENSOR, "dtype": "float4"}},
        {"tensor": {"shape": ["heads + 1"]}},
        {"tensor": TENSOR, "size": 4},
        {"code": "1 + 1"},
        {"call": {"function": "os.system"}},
        {},
        [1, 2],
    ],
)
def test_the_schema_refuses_an_argument_that_the_gate_refuses(argument: Any) -> None:
    case = {
        **{"name": "one", "stands_for": ["a model"], "function": ["engine.ops:f"]},
        **{"arguments": {"x": argument}, "kernels": ["k"]},
    }
    file = {"engine": "engine", "why": "because a test wants to see it", "cases": [case]}
    rules = json.loads(schema(GateFile))
    assert problems(file, rules, rules)
    with pytest.raises(ValidationError):
        GateFile.model_validate(file)


@pytest.mark.parametrize("argument", [None, 1, 0.5, True, "silu", {"tensor": TENSOR}, {"size": 4}])
def test_the_schema_accepts_short_and_long_arguments(argument: Any) -> None:
    rules = json.loads(schema(GateFile))
    assert problems(argument, rules["$defs"]["Argument"], rules) == []


def blocks_of(patch: str, head: int) -> Any:
    """What the branch for SM120 that a patch of sglang-k2 adds chooses for a size of head."""
    text = (CHECKOUT.folder("sglang-k2") / "patches" / patch).read_text(encoding="utf-8")
    added = [line[13:] for line in text.splitlines() if line.startswith("+            ")]
    chosen: dict[str, Any] = {"Lq": head}
    exec("\n".join(added), chosen)
    return chosen["BLOCK_M"], chosen["BLOCK_N"]


def test_the_first_published_fix_is_a_series_and_the_default_has_its_blocks_at_kimi_s_shape() -> (
    None
):
    published, ours = (
        "pr-17908-extend-attention-blocks.patch",
        "0001-extend-attention-sm120-blocks.patch",
    )
    series = CHECKOUT.other_series(CHECKOUT.spec("sglang-k2"))["pr-17908"]
    assert [patch.file for patch in series.patches] == [published]
    document = {64: (64, 64), 128: (64, 64), 192: (32, 64), 256: (32, 64), 576: (32, 32)}
    assert {head: blocks_of(published, head) for head in document} == document
    assert blocks_of(ours, 576) == document[576]
