"""The gate sees: a sound engine passes every conversation, and every planted defect is caught."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeline.artifacts.store.store import open_store
from pipeline.images.gate.parsers.cases import FamilySpec, ParsersFile
from pipeline.images.gate.smem.engine import EngineTree
from pipeline.images.gate.templates.cases import Conversation, conversations
from pipeline.images.gate.templates.files import ModelText
from pipeline.images.gate.templates.judge import TEMPLATE_WORKER, RenderedCase, TemplateGate
from pipeline.images.gate.templates.renderer import ChatTemplate
from pipeline.images.gate.templates.sources import (
    AcceptedRendering,
    SourcesFile,
    TemplateFamily,
    TemplateGates,
    TemplatesFile,
)
from tests.unit.gate.smem.test_run import FACTS, ThisPython
from tests.unit.gate.templates.little_engines import DEFECTS, TEMPLATE, write_engines

# one that the template refuses
REFUSED = Conversation("refused", [{"role": "forbidden", "content": "Hi"}])
TALKS = [*conversations(), REFUSED]
SOURCE: dict[str, Any] = {
    **{"archive": "none", "source": "https://example.com", "pictures": True},
    **{"path": "a", "digest": f"sha256:{'0' * 64}"},
}
PIN = {"name": "none", "version": "1", "file": "none-1-py3-none-any.whl", "size_bytes": 1}
WHY = "upstream is about to mend it, and nobody is hurt by it"


@dataclass(frozen=True)
class WithSite(ThisPython):
    """This Python, with a transformers of our own."""

    @property
    def readable(self) -> list[Path]:
        return [*super().readable, self.folder]

    def variables(self) -> dict[str, str]:
        return {"PYTHONPATH": str(self.folder)}


def gate_of(folder: Path, names: list[str], **changed: Any) -> TemplateGate:
    """A gate with a family for each name, whose parser is called so."""
    write_engines(folder)
    parsers = {"tool_call_parser": "sound"}
    spec = FamilySpec(format="none", stands_for=["a model"], parsers=cast(Any, parsers))
    known = {
        name: spec.model_copy(update={"parsers": {"tool_call_parser": name}}) for name in names
    }
    family = TemplateFamily(template="one", architecture="BoatForPictures")
    gates = TemplateGates(
        file=TemplatesFile(wheels=[], families=dict.fromkeys(names, family), **changed),
        sources=SourcesFile.model_validate(
            {"archives": {"none": {**PIN, "sha256": "0" * 64}}, "templates": {"one": SOURCE}}
        ),
        parsers=ParsersFile(wheels=[], bare=["sglang"], families=known),
        formats={},
    )
    template = ChatTemplate(TEMPLATE, {"bos_token": "<s>"})
    opened = SimpleNamespace(
        gates=gates,
        context=SimpleNamespace(store=open_store(folder / "store")),
        environment=WithSite(folder / "site", FACTS, ("torch",)),
    )
    texts = dict.fromkeys(names, ModelText(template, template))
    return TemplateGate(cast(Any, opened), texts, {}, {})


def judged(
    folder: Path, engine: str, talks: dict[str, list[Conversation]], **changed: Any
) -> dict[str, RenderedCase]:
    gate = gate_of(folder, list(talks), **changed)
    tree = EngineTree(folder / "engine", engine, "1", f"sha256:{'1' * 64}")
    return {result.name: result for result in gate.judge(tree, talks)}


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_sound_engine_passes_and_every_planted_defect_is_caught(
    tmp_path: Path, engine: str
) -> None:
    talks = {talk.slug: talk for talk in TALKS}
    found = judged(
        tmp_path,
        engine,
        {"sound": TALKS, **{name: [talks[shown]] for name, shown in DEFECTS.items()}},
    )
    sound = [result for name, result in found.items() if name.startswith("sound/")]
    assert [(r.name, r.message) for r in sound if r.verdict != "passed"] == []
    # the image's own code was called, with a stand-in for torch at most
    assert {route.partition("/")[0] for r in sound if (route := r.route)} == {engine}
    planted = {f"{name}/{shown}" for name, shown in DEFECTS.items()}
    assert {name for name in planted if found[name].verdict != "failed"} == set()
    assert len(planted) >= 2 * 10


def test_a_difference_is_shown_from_where_the_texts_differ(tmp_path: Path) -> None:
    (talk,) = [talk for talk in TALKS if talk.slug == "late-system-turn"]
    found = judged(tmp_path, "sglang", {"late-system-dropped": [talk], "breaks": [TALKS[0]]})
    result = found["late-system-dropped/late-system-turn"]
    assert result.difference is not None
    assert result.difference.before.endswith("Yes, at nine.<")
    assert result.difference.want.startswith("system>You are a harbour master.")
    assert result.difference.got.startswith("user>And back?")
    assert "'user>And back?<assistant>' instead of 'system>You are" in result.message
    # answers are kept by everything that decides them
    again = judged(tmp_path, "sglang", {"late-system-dropped": [talk]})
    assert again[result.name].cached
    assert not result.cached


@pytest.mark.parametrize(
    ("defect", "change", "verdict"),
    [
        ("field-added", {"tool": {"defer_loading": None}}, "accepted"),
        ("bare-tools", {"bare": True}, "accepted"),
        # another change than the one that is known
        ("field-added", {"tool": {"defer_loading": False}}, "failed"),
        ("field-added", {"bare": True}, "failed"),
        ("tools-missing", {"tool": {"defer_loading": None}}, "failed"),
        ("sorted-tools", {"order": ["name", "description"]}, "failed"),
    ],
)
def test_only_what_the_known_change_explains_exactly_is_accepted(
    tmp_path: Path, defect: str, change: dict[str, Any], verdict: str
) -> None:
    (talk,) = [talk for talk in TALKS if talk.slug == "tools-and-system"]
    known = {"case": "*/tool*", "as_if": change, "reason": WHY, "upstream": ["https://a.example"]}
    accepted = [AcceptedRendering.model_validate(known)]
    found = judged(tmp_path, "sglang", {defect: [talk]}, accepted=accepted)
    assert found[f"{defect}/tools-and-system"].verdict == verdict


def test_an_engine_that_cannot_be_imported_is_unknown(tmp_path: Path) -> None:
    gate = gate_of(tmp_path, ["sound"])
    (tmp_path / "engine/sglang/srt/entrypoints/openai/serving_chat.py").write_text("import nothing")
    tree = EngineTree(tmp_path / "engine", "sglang", "1", f"sha256:{'1' * 64}")
    (result,) = gate.judge(tree, {"sound": TALKS[:1]})
    assert result.verdict == "unknown"
    assert "No module named 'nothing'" in result.message


def test_a_worker_that_dies_is_unknown(tmp_path: Path) -> None:
    gate = gate_of(tmp_path, ["sound"])
    died = "import os\nos._exit(3)\n"
    (tmp_path / "engine/sglang/srt/entrypoints/openai/serving_chat.py").write_text(died)
    tree = EngineTree(tmp_path / "engine", "sglang", "1", f"sha256:{'1' * 64}")
    (result,) = gate.judge(tree, {"sound": TALKS[:1]})
    assert (result.verdict, "died" in result.message) == ("unknown", True)


def test_the_worker_runs_without_this_package() -> None:
    texts = [path.read_text(encoding="utf-8") for path in TEMPLATE_WORKER.glob("*.py")]
    assert len(texts) == 4
    assert not any("from pipeline" in text or "import pipeline" in text for text in texts)
