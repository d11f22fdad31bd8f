"""Cases: `gates/parsers.yaml`, and the formats and truths that images share.

A truth is what a model means to say: reasoning, content, tool calls. A format is how a family of
models writes it. A case is a truth in the format of one family, with the parsers that recipes set
for it. All of it is data; a worker is given the text, and what it means.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from string import Template
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, RootModel, StringConstraints

from pipeline.core.errors import GateInvalid, there_are
from pipeline.core.model import Frozen, Name
from pipeline.core.yaml_file import read_yaml
from pipeline.images.gate.files import Module, parser_files
from pipeline.images.gate.smem.cases import Reason, Upstream
from pipeline.images.spec.checkout import Checkout

# A family has thousands of streams for each truth, and takes seconds.
MOST_CASES = 2000
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
Mode = Literal["required", "named", "thinking-off", "messages", "responses"]


class MarkerSpec(Frozen):
    """One token of a model that its format is made of."""

    special: bool = Field(description="whether the model's tokenizer lists it as a special token")


class ThinkingSwitch(Frozen):
    """How a request turns thinking off, and what the template then puts before the answer."""

    kwarg: Literal["enable_thinking", "thinking"] = Field(description="is false then")
    prompt: Text = Field(description="what ends the prompt in place of the opening marker")
    source: Upstream


class GrammarText(Frozen):
    """Where the grammar that engines have for a format differs from what a model writes alone."""

    before: Text = Field(default="", description="what it puts before the calls")
    no_arguments: Text = Field(default="", description="what it puts in a call without any")
    one_call: bool = Field(default=False, description="whether it ends an answer after one call")
    source: Upstream | None = None


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
    empty_thought: bool = Field(
        default=True, description="whether the markers stand around a thought that is empty"
    )
    switch: ThinkingSwitch | None = Field(
        default=None, description="none: these models always think, or no request decides it"
    )
    grammar: GrammarText | None = None
    content: Text = "$content"
    preamble: Text | None = Field(default=None, description="of content that calls follow")
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
    ends: list[Marker] | None = Field(
        default=None,
        min_length=2,
        max_length=2,
        description="what stops an answer, and one with calls; none: a token of no meaning",
    )
    vocabulary: Literal["", "openai_harmony"] = Field(
        default="", description="the package whose tokens an engine reads, by their own ids"
    )


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


class ModeSpec(Frozen):
    """Another way to ask for the same truths: a choice of tools, no thinking, another endpoint."""

    truths: list[Name] = Field(min_length=1)
    every_cut: list[Name] = Field(
        default=[], description="truths that are also cut in two everywhere; others in few ways"
    )


class TruthsFile(Frozen):
    """Truths that images share, and the tools that they call."""

    schema_name: ClassVar[str] = "truths"

    tools: dict[ToolName, dict[str, JsonType]]
    truths: dict[Name, TruthSpec]
    conversations: dict[Name, ConversationSpec] = {}
    modes: dict[Mode, ModeSpec] = {}


class FamilySpec(Frozen):
    """A family of models, and the parsers that recipes set for it."""

    format: Name
    stands_for: list[str] = Field(min_length=1)
    parsers: dict[Literal["tool_call_parser", "reasoning_parser"], ParserName]
    model_type: ParserName = Field(
        default="other", description="`model_type` of the model's config.json"
    )
    always_thinks: Reason | None = Field(
        default=None, description="why the format's switch is not there in these models' template"
    )


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
    no_endpoint: dict[Literal["messages", "responses"], Reason] = Field(
        default={}, description="endpoints that this version of the engine does not have"
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
    endpoint: Literal["chat", "messages", "responses"] = "chat"
    tool_choice: Literal["auto", "required", "named"] = "auto"
    template_kwargs: dict[str, bool] = {"thinking": True, "enable_thinking": True}
    every_cut: bool = True
    thought: str = ""  # how the answer begins, before anything that a grammar can hold
    # the answer where a grammar holds it: to the format, or to JSON of calls or of arguments
    forms: dict[Literal["native", "calls", "arguments"], str] = {}
    # how the model's template writes calls of earlier turns: engines find a parser by it
    template: str = ""
    end: str = ""  # the token that stops the answer, where the format has one
    vocabulary: str = ""
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

    def check_markers(self, family: str, added: Mapping[str, bool], where: str) -> None:
        """Compares a family's markers with the tokens that a model's tokenizer adds: one that is
        special there and not here would be lost, or shown."""
        families = {case.family: case.markers for case in self.cases}
        if not families.get(family):
            known = there_are(family, [name for name in families if families[name]])
            raise GateInvalid(f"--weights {family}: no such family of models ({known})")
        words = {True: "special", False: "not special", None: "no token of its own"}
        for marker, special in families[family].items():
            if added.get(marker) is not special:
                raise GateInvalid(
                    f"{where}: {family}: its tokenizer has {marker!r} as"
                    f" {words[added.get(marker)]}, formats.yaml as {words[special]}",
                    "Correct `special` in images/common/gates/parsers/formats.yaml.",
                )


def read_parser_gates(checkout: Checkout, image: str) -> ParserGates:
    """Reads an image's cases; an image without parsers.yaml has none, which is an error."""
    files = {path.name: path for path in parser_files(checkout, image).values()}
    if "parsers.yaml" not in files:
        raise GateInvalid(
            f"{image}: has no parsers to judge (its gates/ holds no parsers.yaml)",
            "`sm120 gate run sglang-k2 --only parsers` has some.",
        )
    try:
        file = read_yaml(files["parsers.yaml"], ParsersFile, GateInvalid)
        formats = read_yaml(files["formats.yaml"], FormatsFile, GateInvalid).root
        truths = read_yaml(files["truths.yaml"], TruthsFile, GateInvalid)
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
        # one case is enough to tell of a missing endpoint
        absent: dict[str, list[str]] = {
            each: [c.name for c in cases if c.endpoint == each][:1] for each in file.no_endpoint
        }
        cases = [c for c in cases if c.name in absent.get(c.endpoint, (c.name,))]
    except KeyError as error:
        raise GateInvalid(f"images/common/gates/parsers: {error} is missing") from error
    if not cases or len(cases) > MOST_CASES:
        where = files["parsers.yaml"]
        raise GateInvalid(f"{where}: {len(cases)} cases; between 1 and {MOST_CASES} are allowed")
    # a pattern that fits no case would accept nothing
    for accepted in file.accepted:
        if not any(fnmatchcase(case.name, accepted.case) for case in cases):
            raise GateInvalid(f"{files['parsers.yaml']}: accepted: no case is {accepted.case!r}")
    return ParserGates(file=file, cases=cases)


def whole_format(name: str, formats: dict[str, FormatSpec]) -> FormatSpec:
    """Takes what a format does not set from the one that it is like."""
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
                    # a grammar takes a list without `items` for an empty one
                    "properties": {
                        key: {"type": kind, **({"items": {}} if kind == "array" else {})}
                        for key, kind in keys.items()
                    },
                },
            },
        }
        for tool, keys in truths.tools.items()
    ]


def _cases(name: str, family: FamilySpec, form: FormatSpec, truths: TruthsFile) -> list[ParserCase]:
    tools = _offered(truths)
    for title, truth in truths.truths.items():
        for called in truth.calls:
            if called.name not in truths.tools:
                raise GateInvalid(f"truths.yaml: {title}: there is no tool {called.name!r}")
    known = {title: truth for title, truth in truths.truths.items() if title not in form.leaves_out}
    cases = []
    for title, truth in known.items():
        whole = _case(f"{name}/{title}", family, form, truth, tools)
        cases.append(whole)
        if truth.cut_off:
            named = f"{whole.name}/{CUT_OFF}"
            cases.append(whole.model_copy(update={"name": named, "cut_off": True}))
    for mode, spec in truths.modes.items():
        if mode == "thinking-off" and (form.switch is None or family.always_thinks):
            continue
        for title in (*spec.truths, *spec.every_cut):
            if title not in truths.truths:
                raise GateInvalid(f"truths.yaml: modes: {mode}: there is no truth {title!r}")
        one_call = mode == "required" and form.grammar is not None and form.grammar.one_call
        for title in spec.truths:
            if title in known and not (one_call and len(known[title].calls) > 1):
                named = f"{name}/{title}/{mode}"
                case = _case(named, family, form, known[title], tools, mode)
                every_cut = {"every_cut": title in spec.every_cut}
                cases.append(case.model_copy(update=every_cut))
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
            endpoint="messages",
            conversation={"system": spec.system, "messages": spec.messages, "template": template},
        )
        for name, template in spec.templates.items()
    ]


def _case(
    name: str,
    family: FamilySpec,
    form: FormatSpec,
    truth: TruthSpec,
    tools: list[dict[str, Any]],
    mode: Mode | None = None,
) -> ParserCase:
    """A truth in a family's format, as a request of this kind gets it."""
    is_held = mode in ("required", "named")
    if is_held and (not truth.calls or (mode == "named" and len(truth.calls) > 1)):
        raise GateInvalid(f"truths.yaml: modes: {name}: {mode} needs a call")
    off = form.switch if mode == "thinking-off" else None
    # a grammar lets nothing but calls through after the thought
    unsaid = {"content": ""} if is_held else {"reasoning": ""} if off else {}
    truth = truth.model_copy(update=unsaid)
    begun, text = thought(form, truth), written(form, truth)
    changed: dict[str, Any] = {"thought": begun, "text": text}
    if off is not None:
        # the template has closed the thought
        changed = {"text": text.removeprefix(begun), "template_kwargs": {off.kwarg: False}}
    elif is_held:
        indent = 2 if truth.pretty else None
        calls = [{"name": call.name, "parameters": call.arguments} for call in truth.calls]
        held: dict[str, Any] = {"calls": calls, "arguments": truth.calls[0].arguments}
        forms = {
            key: begun + json.dumps(value, ensure_ascii=False, indent=indent)
            for key, value in held.items()
        }
        forms["native"] = written(form, truth, by_grammar=True)
        changed |= {"tool_choice": mode, "forms": forms}
    elif mode is not None:
        changed |= {"endpoint": mode}
    opened = form.opened_by == "template"
    finish = {"finish": ["tool_calls", "stop"]} if mode == "named" else {}
    return ParserCase(
        name=name,
        family=name.partition("/")[0],
        stands_for=family.stands_for,
        parsers={str(flag): parser for flag, parser in family.parsers.items()},
        model_type=family.model_type,
        markers={
            **{text: marker.special for text, marker in form.markers.items()},
            **dict.fromkeys(form.turns, True),
        },
        prompt=_USER + (off.prompt if off else form.thinking[0] if opened else ""),
        opened=opened and off is None,
        truth={**truth.model_dump(include={"reasoning", "content", "calls"}), **finish},
        tools=tools,
        cut_off=False,
        template=form.call + (form.argument or ""),
        end=form.ends[bool(truth.calls)] if form.ends else "",
        vocabulary=form.vocabulary,
        **changed,
    )


def thought(form: FormatSpec, truth: TruthSpec) -> str:
    """What a model writes before content and calls; one that does not think closes it at once."""
    if not truth.reasoning and not form.empty_thought:
        return ""
    opening, closing = form.thinking
    return ("" if form.opened_by == "template" else opening) + truth.reasoning + closing


def written(form: FormatSpec, truth: TruthSpec, *, by_grammar: bool = False) -> str:
    """A truth as a model of this format writes it, alone or held by an engine's grammar."""
    text = thought(form, truth)
    if truth.content:
        is_preamble = bool(truth.calls) and form.preamble is not None
        shown = form.preamble if is_preamble else form.content
        text += Template(shown or "").substitute(content=truth.content)
    held = form.grammar if by_grammar and form.grammar else GrammarText()
    text += held.before
    if not truth.calls:
        return text
    calls = []
    for index, call in enumerate(truth.calls):
        arguments = json.dumps(
            call.arguments, ensure_ascii=False, indent=2 if truth.pretty else None
        )
        if form.argument is not None:
            arguments = "".join(_element(form, k, v) for k, v in call.arguments.items())
        arguments = arguments or held.no_arguments
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
