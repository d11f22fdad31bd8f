"""What people write about serving a model: the cards, the engine's flags, and who says so."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    RootModel,
    StringConstraints,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from pipeline.core.model import (
    Frozen,
    HubRepository,
    Line,
    Name,
    Port,
    RelativePath,
    Stamp,
    Variable,
    Word,
)
from pipeline.serving.recipe.flags import Flags, LlamaFlags, SglangFlags, VllmFlags

Setting = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f]*$", max_length=2000)]
# What a recipe rests on; each is worth more than the one before it.
Backing: TypeAlias = Literal["unproved", "stated", "reported", "proved"]
Address = Annotated[str, StringConstraints(pattern=r"^[0-9a-f.:]+$", max_length=45)]
# What a user may change for one start, by the names of the documents' scripts.
Override: TypeAlias = Literal[
    "MODEL_PATH",
    "SERVED_MODEL_NAME",
    "MAX_MODEL_LEN",
    "GPU_MEMORY_UTILIZATION",
    "PORT",
    "ENABLE_EAGLE3",
    "EAGLE3_MODEL",
]


class RecipeSource(Frozen):
    """Who says so: a document, a report of users, an engine's own files, or this project."""

    kind: Literal["document", "report", "engine", "ours"]
    title: Line
    link: Line | None = None
    why: Line | None = None

    @model_validator(mode="after")
    def _has_what_its_kind_needs(self) -> RecipeSource:
        if self.kind == "report" and self.link is None:
            raise ValueError("a report needs its `link`")
        if self.kind == "ours" and self.why is None:
            raise ValueError("a choice of ours needs its `why`")
        return self


class RecipeCard(Frozen):
    """The machine that a recipe is written for."""

    cards: Annotated[int, Field(ge=0, le=64)]  # of each machine, where `nodes` are several
    card: Literal["rtx-pro-6000", "rtx-5090", "gb10", "b200", "h200"] | None = None
    memory_gib: Annotated[int, Field(ge=1)] | None = None  # of each card
    host_memory_gib: Annotated[int, Field(ge=1)] | None = None
    numa_nodes: Annotated[int, Field(ge=1)] | None = None
    same_numa_node: bool = False  # all cards hang on one node
    peer_to_peer: bool = False  # cards reach each other's memory
    hugepages_gib: Annotated[int, Field(ge=1)] | None = None  # free ones, set aside at boot
    cpu: Line | None = None
    # what the image's code was made for; the text above is for people
    processor: Literal["amd-zen-5"] | None = Field(default=None, exclude_if=lambda v: v is None)

    @model_validator(mode="after")
    def _names_its_cards(self) -> RecipeCard:
        if bool(self.cards) != (self.card is not None):
            raise ValueError("`card` names the cards, where there are some")
        return self


class ModelSpec(Frozen):
    """The model: where its weights come from, and the name that clients ask for."""

    repository: HubRepository | None = None
    weights: Name | None = None  # a spec of lockfiles/weights
    tiny: bool = False  # made on the spot, for machines without any weights
    file: RelativePath | None = None  # of a GGUF model: the file, or its first part
    # of a GGUF model whose number of parts is not known: the folder with all of them
    folder: RelativePath | None = None
    name: Word

    @model_validator(mode="after")
    def _comes_from_one_place(self) -> ModelSpec:
        if self.tiny == bool(self.repository):
            raise ValueError("needs a `repository`, or `tiny: true`")
        if self.file and self.folder:
            raise ValueError("`file` names the first part, so `folder` says nothing more")
        return self


class Speculation(Frozen):
    """A draft model; off until somebody turns it on."""

    method: Word
    repository: HubRepository | None = None  # none: the checkpoint has its own draft layers
    weights: Name | None = None
    tokens: Annotated[int, Field(ge=1, le=32)]
    settings: dict[Word, bool | int | Word] = {}  # further ones, as the engine names them
    enabled: bool = False
    source: Name


class CommandChange(Frozen):
    """Where a recipe leaves its document, and why: words of the two commands, or `nothing`."""

    document: Line
    here: Line
    why: Line


class LogLine(Frozen):
    """A line of the engine's log that must be there, or must not."""

    pattern: Line
    why: Line

    @field_validator("pattern")
    @classmethod
    def _is_regular(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
        return pattern


class ContraryReport(Frozen):
    """A published report that speaks against what a recipe does, and what that means for users."""

    link: Annotated[str, StringConstraints(pattern=r"^https://\S+$", max_length=300)]
    what: Line


class Expectations(Frozen):
    """What a start must show: no silent fallback to another backend."""

    log: list[LogLine] = []
    never: list[LogLine] = []


class SmokeSpec(Frozen):
    """How far the smoke ladder goes."""

    tools: bool = True
    reasoning: bool = False
    vision: bool = False
    streams: list[Annotated[int, Field(ge=1, le=4096)]] = [1, 2, 8, 16, 64, 128]
    contexts: list[Annotated[int, Field(ge=256)]] = []


class ContainerSpec(Frozen):
    """What a container gets beside the cards and the weights."""

    capabilities: list[Word] = []
    ipc: Literal["host", "private"] = "host"
    memory_locked: bool = True
    # Rendered as its document runs it: for all addresses, with the capabilities that are usual.
    # left out where it is not set: an unused field must not change a recipe's digest
    as_documented: bool = Field(default=False, exclude_if=lambda value: not value)


class _Recipe(Frozen):
    name: Name
    summary: Line
    backing: Backing
    sources: Annotated[dict[Name, RecipeSource], Field(min_length=1)]
    image: Name | None = None  # none: the engine of this machine, without a container
    model: ModelSpec
    hardware: RecipeCard
    # machines that share the model, each with this hardware
    nodes: Annotated[int, Field(ge=1, le=64)] = Field(default=1, exclude_if=lambda n: n == 1)
    # both by the source that names them
    flags: Mapping[Name, Flags] = {}
    environment: dict[Name, dict[Variable, Setting]] = {}
    port: Port
    # the address to listen on, where a document names it; the images' own is the same
    host: Address | None = None
    container: ContainerSpec = ContainerSpec()
    speculation: Speculation | None = None
    # the variables that take the place of a field, as the documents' scripts have them
    overrides: list[Override] = []
    changes: list[CommandChange] = []
    contrary: list[ContraryReport] = Field(default=[], exclude_if=lambda value: not value)
    # patches of the image, by file, without which the engine dies with these flags
    needs_patches: list[RelativePath] = Field(default=[], exclude_if=lambda value: not value)
    expect: Expectations = Expectations()
    smoke: SmokeSpec = SmokeSpec()
    bench: list[Name] = []
    fallback: Name | None = None
    reviewed: Stamp | None = None

    @model_validator(mode="after")
    def _every_source_is_there(self) -> _Recipe:
        named = {*self.flags, *self.environment}
        if self.speculation:
            named.add(self.speculation.source)
        if missing := sorted(named - set(self.sources)):
            raise ValueError(f"{missing[0]!r} is not among its `sources`")
        for table in (self.flags.values(), self.environment.values()):
            seen: set[str] = set()
            for group in table:
                fields = set(group.given()) if isinstance(group, Flags) else set(group)
                if doubled := sorted(seen & fields):
                    raise ValueError(f"{doubled[0]} is set by two sources")
                seen |= fields
        if self.needs_patches and self.image is None:
            raise ValueError("`needs_patches` are patches of its `image`, and it names none")
        kinds = {source.kind for source in self.sources.values()}
        if self.backing == "reported" and "report" not in kinds:
            raise ValueError("`reported` needs a source that is a report")
        if self.backing == "stated" and "document" not in kinds:
            raise ValueError("`stated` needs a source that is a document")
        return self

    def variables(self) -> dict[str, str]:
        """The environment as one table."""
        return {k: v for group in self.environment.values() for k, v in group.items()}


class VllmRecipe(_Recipe):
    """A model served by vLLM."""

    engine: Literal["vllm"]
    flags: Mapping[Name, VllmFlags] = {}


class SglangRecipe(_Recipe):
    """A model served by SGLang."""

    engine: Literal["sglang"]
    flags: Mapping[Name, SglangFlags] = {}


class LlamaRecipe(_Recipe):
    """A GGUF model served by ik_llama.cpp or by mainline llama.cpp."""

    engine: Literal["ik-llama", "llama-cpp"]
    flags: Mapping[Name, LlamaFlags] = {}

    @model_validator(mode="after")
    def _names_its_file(self) -> LlamaRecipe:
        if not (self.model.file or self.model.folder):
            raise ValueError("a GGUF model needs its `file`, or the `folder` of its parts")
        if self.nodes > 1:
            raise ValueError(
                "`nodes`: llama.cpp has no ranks; other machines reach it through rpc-server"
                " alone, which is not started here. Leave it out, or name vLLM or SGLang"
            )
        return self


Recipe: TypeAlias = VllmRecipe | SglangRecipe | LlamaRecipe


class RecipeFile(RootModel[Annotated[Recipe, Discriminator("engine")]]):
    """A file of `recipes/`, after `extends` is resolved."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """For editors: a whole recipe, or some of its fields and the recipe that has the others."""
        kinds: tuple[type[_Recipe], ...] = (VllmRecipe, SglangRecipe, LlamaRecipe)
        fields = {name for kind in kinds for name in kind.model_fields}
        child = {
            "type": "object",
            # only the schema of a whole recipe says what a field may hold
            "properties": {**{name: {} for name in sorted(fields)}, "extends": {"type": "string"}},
            "required": ["extends", "name"],
            "additionalProperties": False,
        }
        return {"type": "object", "anyOf": [handler(schema), child]}


def merged_flags(recipe: Recipe) -> Flags:
    """The flags of all sources as one value."""
    values: dict[str, Any] = {}
    extra: list[str] = []
    for group in recipe.flags.values():
        values |= group.given()
        extra += group.extra
    return _KINDS[recipe.engine](**values, extra=extra)


_KINDS: dict[str, type[Flags]] = {
    "vllm": VllmFlags,
    "sglang": SglangFlags,
    "ik-llama": LlamaFlags,
    "llama-cpp": LlamaFlags,
}
