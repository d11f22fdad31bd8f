"""Cases: `gates/parsers.yaml`, and the formats and truths that images share.

A truth is what a model means to say: reasoning, content, tool calls. A format is how a family of
models writes it. A case is a truth in the format of one family, with the parsers that recipes set
for it. All of it is data; a worker is given the text, and what it means.
"""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from string import Template
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, RootModel, StringConstraints

from pipeline.core.errors import GateInvalid, SpecInvalid, there_are
from pipeline.core.model import Frozen, Name
from pipeline.core.yaml_file import read_yaml
from pipeline.images.gate.files import Module, parser_files
from pipeline.images.gate.smem.cases import Reason, Upstream
from pipeline.images.spec.checkout import Checkout

# A family has thousands of streams for each truth, and takes seconds.
MOST_CASES = 1000
CUT_OFF = "cut-off"  # the last part of the name of a case whose answer stops early
MESSAGES = "messages"  # the family of cases about what /v1/messages makes of a conversation
_USER = "<|user|>hi<|assistant|>"  # what stands before an answer; parsers look for markers in it

Marker = Annotated[str, StringConstraints(min_length=2, max_length=60)]
Text = Annotated[str, StringConstraints(max_length=400)]
TemplateText = Annotated[str, StringConstraints(max_length=2000)]
ParserName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,40}$")]
ToolName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
JsonType = Literal["string", "integer", "number", "boolean", "object", "array"]
Severity = Literal["token by token", "larger steps"]


class MarkerSpec(Frozen):
    """One token of a model that its format is made of."""

    special: bool = Field(description="whether the model's tokenizer lists it as a special token")


class FormatSpec(Frozen):
    """How a family of models writes reasoning, content and tool calls."""

    like: Name | None = Field(default=None, description="another format; what is set here differs")
    source: Upstream | None = Field(default=None, description="where the format is described")
    markers: dict[Marker, MarkerSpec] = {}
    turns: list[Marker] = Field(default=[], description="special tokens that stand around turns")
    thinking: list[Marker] = Field(default=["<think>", "</think>"], min_length=2, max_length=2)
    opened_by: Literal["model", "template"] = Field(
        default="template", description="who writes the marker that opens the reasoning"
    )
    calls: Text = "$calls"
    call: Text = ""
    argument: Text | None = Field(default=None, description="none: arguments are one JSON object")
    leaves_out: dict[Name, Reason] = Field(
        default={}, description="truths that this format cannot tell from others, and why"
    )
    nested: list[Text] | None = Field(
        default=None,
        min_length=2,
        max_length=2,
        description="an element of a value that holds others, and the name of a list's",
    )
    between: Text = ""


class FormatsFile(RootModel[dict[Name, FormatSpec]]):
    """Formats that images share, by name."""

    schema_name: ClassVar[str] = "formats"


class ToolCallSpec(Frozen):
    """A call that a model means to make."""

    name: ToolName
    arguments: dict[str, Any]


class TruthSpec(Frozen):
    """What a model means to say."""

    reasoning: Text = ""
    content: Text = ""
    calls: list[ToolCallSpec] = Field(default=[], max_length=8)
    pretty: bool = Field(
        default=False, description="arguments that are JSON stand on several lines"
    )
    cut_off: bool = Field(default=False, description="also judged where it stops after any token")


class ConversationSpec(Frozen):
    """What an agent sends over `/v1/messages`: one request more before each assistant's turn."""

    system: Text
    parsers: dict[Literal["reasoning_parser"], ParserName] = {}
    messages: list[dict[str, Any]] = Field(min_length=2, max_length=40)
    templates: dict[Name, TemplateText | None] = Field(
        min_length=1, description="chat templates that render it; null: the engine has its own code"
    )


class TruthsFile(Frozen):
    """Truths that images share, and the tools that they call."""

    schema_name: ClassVar[str] = "truths"

    tools: dict[ToolName, dict[str, JsonType]]
    truths: dict[Name, TruthSpec]
    conversations: dict[Name, ConversationSpec] = {}


class FamilySpec(Frozen):
    """A family of models, and the parsers that recipes set for it."""

    format: Name
    stands_for: list[str] = Field(min_length=1)
    parsers: dict[Literal["tool_call_parser", "reasoning_parser"], ParserName]
    model_type: Name = Field(default="other", description="`model_type` of the model's config.json")


class AcceptedAnswer(Frozen):
    """A case that is known to fail, with the reason and where it is being fixed."""

    case: str = Field(description="a case, or a pattern such as 'glm-4.7/less-than*'")
    faults: list[str] = Field(min_length=1, description="what may be wrong; anything else fails")
    only: Severity | None = Field(default=None, description="fails where it breaks more often")
    reason: Reason
    upstream: list[Upstream] = Field(min_length=1)


class ParsersFile(Frozen):
    """`gates/parsers.yaml`: which parsers recipes use, and how to import the chat endpoint."""

    schema_name: ClassVar[str] = "parsers"

    bare: list[Module] = Field(
        default=[],
        description="packages whose __init__.py is skipped, because it starts the whole engine",
    )
    left_out: list[Module] = Field(
        default=[], description="parts of the engine that parsers never call; stood in for"
    )
    wheels: list[Name] = Field(description="wheels that the chat endpoint imports")
    families: dict[Name, FamilySpec]
    conversations: list[Name] = Field(
        default=[], description="conversations that its `/v1/messages` is judged by"
    )
    accepted: list[AcceptedAnswer] = []
    not_judged: dict[ParserName, Reason] = Field(
        default={}, description="parsers of recipes that no case can judge, and why"
    )


class ParserCase(Frozen):
    """One truth in the format of one family, as a worker is given it."""

    name: str
    family: str
    stands_for: list[str]
    parsers: dict[str, str]
    model_type: str
    markers: dict[str, bool]
    prompt: str
    opened: bool  # the template has opened the reasoning
    text: str
    truth: dict[str, Any]
    tools: list[dict[str, Any]]
    cut_off: bool
    conversation: dict[str, Any] | None = None  # instead of a truth: what an agent sends
    timeout_s: int = 300


class ParserGates(Frozen):
    """An image's parsers.yaml, and the cases that it makes."""

    file: ParsersFile
    cases: list[ParserCase]

    def chosen(self, only: str | None) -> list[ParserCase]:
        """All cases, or those whose name fits a pattern such as `kimi-k2/*`."""
        chosen = [case for case in self.cases if only is None or fnmatchcase(case.name, only)]
        if not chosen:
            known = there_are(only or "", [case.name for case in self.cases])
            raise GateInvalid(
                f"{only}: matches no case ({known})", "Name one, or a pattern such as 'kimi-k2/*'."
            )
        return chosen


def read_parser_gates(checkout: Checkout, image: str) -> ParserGates:
    """Reads an image's cases; an image without parsers.yaml has none, which is an error."""
    files = {path.name: path for path in parser_files(checkout, image).values()}
    if "parsers.yaml" not in files:
        raise GateInvalid(
            f"{image}: has no parsers to judge (its gates/ holds no parsers.yaml)",
            "`sm120 gate run sglang-k2 --only parsers` has some.",
        )
    try:
        file = read_yaml(files["parsers.yaml"], ParsersFile)
        formats = read_yaml(files["formats.yaml"], FormatsFile).root
        truths = read_yaml(files["truths.yaml"], TruthsFile)
        cases = []
        for name, family in file.families.items():
            if family.format not in formats:
                known = there_are(family.format, formats)
                raise GateInvalid(f"{files['parsers.yaml']}: {name}: no such format ({known})")
            form = whole_format(family.format, formats)
            cases += _cases(name, family, form, truths)
        for title in file.conversations:
            if title not in truths.conversations:
                known = there_are(title, truths.conversations)
                raise GateInvalid(f"{files['parsers.yaml']}: no such conversation ({known})")
            cases += _conversation_cases(title, truths)
    except KeyError as error:
        raise GateInvalid(f"images/common/gates/parsers: {error} is missing") from error
    except SpecInvalid as error:
        raise GateInvalid(str(error), error.hint) from error
    if not cases or len(cases) > MOST_CASES:
        where = files["parsers.yaml"]
        raise GateInvalid(f"{where}: {len(cases)} cases; between 1 and {MOST_CASES} are allowed")
    # a pattern that fits no case would accept nothing
    for accepted in file.accepted:
        if not any(fnmatchcase(case.name, accepted.case) for case in cases):
            raise GateInvalid(f"{files['parsers.yaml']}: accepted: no case is {accepted.case!r}")
    return ParserGates(file=file, cases=cases)


def whole_format(name: str, formats: dict[str, FormatSpec]) -> FormatSpec:
    """A format with what it does not set taken from the one that it is like."""
    form = formats[name]
    if form.like is not None:
        other = formats.get(form.like)
        if other is None or other.like:
            raise GateInvalid(f"formats.yaml: {name}: there is no whole format {form.like!r}")
        changed = {key: getattr(form, key) for key in form.model_fields_set - {"like"}}
        form = other.model_copy(update=changed)
    unset = [key for key in ("source", "markers", "call") if not getattr(form, key)]
    if unset:
        raise GateInvalid(f"formats.yaml: {name}: {unset[0]} is missing")
    return form


def _offered(truths: TruthsFile) -> list[dict[str, Any]]:
    """The tools as a chat request has them."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool,
                "description": tool,
                "parameters": {
                    "type": "object",
                    "properties": {key: {"type": kind} for key, kind in keys.items()},
                },
            },
        }
        for tool, keys in truths.tools.items()
    ]


def _cases(name: str, family: FamilySpec, form: FormatSpec, truths: TruthsFile) -> list[ParserCase]:
    tools = _offered(truths)
    opened = form.opened_by == "template"
    cases = []
    for title, truth in truths.truths.items():
        if title in form.leaves_out:
            continue
        for called in truth.calls:
            if called.name not in truths.tools:
                raise GateInvalid(f"truths.yaml: {title}: there is no tool {called.name!r}")
        whole = ParserCase(
            name=f"{name}/{title}",
            family=name,
            stands_for=family.stands_for,
            parsers={str(flag): parser for flag, parser in family.parsers.items()},
            model_type=family.model_type,
            markers={
                **{text: marker.special for text, marker in form.markers.items()},
                **dict.fromkeys(form.turns, True),
            },
            prompt=_USER + (form.thinking[0] if opened else ""),
            opened=opened,
            text=written(form, truth),
            truth=truth.model_dump(include={"reasoning", "content", "calls"}),
            tools=tools,
            cut_off=False,
        )
        cases.append(whole)
        if truth.cut_off:
            named = f"{whole.name}/{CUT_OFF}"
            cases.append(whole.model_copy(update={"name": named, "cut_off": True}))
    return cases


def _conversation_cases(title: str, truths: TruthsFile) -> list[ParserCase]:
    spec, tools = truths.conversations[title], _offered(truths)
    return [
        ParserCase(
            name=f"{MESSAGES}/{title}/{name}",
            family=MESSAGES,
            stands_for=["agents such as Claude Code"],
            parsers={str(flag): parser for flag, parser in spec.parsers.items()},
            model_type="other",
            markers={},
            prompt="",
            opened=False,
            text="",
            truth={},
            tools=tools,
            cut_off=False,
            conversation={"system": spec.system, "messages": spec.messages, "template": template},
        )
        for name, template in spec.templates.items()
    ]


def written(form: FormatSpec, truth: TruthSpec) -> str:
    """A truth as a model of this format writes it."""
    opening, closing = form.thinking
    # a model that does not think closes the block at once
    text = ("" if form.opened_by == "template" else opening) + truth.reasoning + closing
    text += truth.content
    if not truth.calls:
        return text
    calls = []
    for index, call in enumerate(truth.calls):
        arguments = json.dumps(
            call.arguments, ensure_ascii=False, indent=2 if truth.pretty else None
        )
        if form.argument is not None:
            arguments = "".join(_element(form, k, v) for k, v in call.arguments.items())
        values = {"name": call.name, "index": index, "arguments": arguments}
        calls.append(Template(form.call).substitute(values))
    return text + Template(form.calls).substitute(calls=form.between.join(calls))


def _element(form: FormatSpec, key: str, value: Any, template: str | None = None) -> str:
    """One argument; formats with an element for each write strings as they are."""
    inner = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if form.nested and isinstance(value, dict | list):
        element, item = form.nested
        parts = value.items() if isinstance(value, dict) else ((item, each) for each in value)
        inner = "".join(_element(form, k, v, element) for k, v in parts)
    is_string = "true" if isinstance(value, str) else "false"
    filled = Template(template or form.argument or "")
    return filled.substitute(key=key, value=inner, is_string=is_string)
