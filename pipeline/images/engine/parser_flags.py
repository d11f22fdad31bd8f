"""What an engine's argument parser accepts, as it was read out of an image, and its file.

`lockfiles/flags/` holds these, so that a recipe is checked on machines that have no image.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import StringConstraints, model_validator

from pipeline.core.errors import RecipeInvalid
from pipeline.core.files import write_bytes
from pipeline.core.model import Digest, Engine, Frozen, Line, Name, Platform, Variable
from pipeline.core.yaml_file import read_yaml
from pipeline.images.spec.checkout import Checkout

FlagName = Annotated[str, StringConstraints(pattern=r"^--?[A-Za-z0-9][A-Za-z0-9_.+-]*$")]
Takes: TypeAlias = Literal["none", "one", "many", "optional"]
# A size is an integer that may end in k, M, g and the like.
ValueType: TypeAlias = Literal["text", "integer", "number", "size", "json", "json-or-text"]
# How the words of a command line become flags and values: as Python's argparse reads them, as
# vLLM does on top of that, or as llama.cpp does.
Syntax: TypeAlias = Literal["argparse", "vllm", "llama"]

_HEAD = "# Written by `sm120 recipe flags IMAGE --accept`: what the engine's own parser accepts.\n"


class FlagSpec(Frozen):
    """One flag: how many values follow it, and which."""

    takes: Takes
    type: ValueType = "text"
    choices: list[str] | None = None
    any_case: bool = False  # of its choices
    opened_by: FlagName | None = None  # with this flag there are more choices than are known
    words: list[str] = []  # accepted beside its type, as `auto`
    fields: list[str] = []  # names in its JSON, as dotted paths; `*` stands for any
    aliases: list[FlagName] = []
    off: list[FlagName] = []  # its names with the opposite meaning, as `--no-…`
    repeats: bool = False  # each one counts, not only the last
    retired: Line | None = None  # the parser knows it only to refuse it, in these words


class ParserFlags(Frozen):
    """The parser of one image's engine."""

    engine: Engine
    version: Line
    image: Name
    also: list[Name] = []  # images with the same engine, version and patches
    platform: Platform | None = None
    digest: Digest | None = None  # of the image that it was read from
    # where no image was at hand: of the source that was compiled, or of the engine's own wheel
    tree: Digest | None = None
    wheel: Digest | None = None
    read_from: Line
    syntax: Syntax
    plain_words: int = 0  # how many words without a flag it takes, as vLLM takes the model
    flags: dict[FlagName, FlagSpec]
    exclusive: list[list[FlagName]] = []
    prefixes: list[str] = []  # of the engine's own variables
    variables: list[Variable] = []

    @model_validator(mode="after")
    def _says_what_it_was_read_from(self) -> ParserFlags:
        if sum(each is not None for each in (self.digest, self.tree, self.wheel)) != 1:
            raise ValueError("needs one of `digest` of an image, `tree` of a source, and `wheel`")
        return self

    @cached_property
    def spellings(self) -> dict[str, str]:
        """Every name of every flag, and the flag's first name."""
        return {
            spelling: name
            for name, flag in self.flags.items()
            for spelling in (name, *flag.aliases, *flag.off)
        }

    @property
    def title(self) -> str:
        """The engine as people call it."""
        names = {"vllm": "vLLM", "sglang": "SGLang", "ik-llama": "ik_llama.cpp"}
        return f"{names.get(self.engine, 'llama.cpp')} {self.version}"


def flags_folder(checkout: Checkout) -> Path:
    """Where the committed files are."""
    return checkout.root / "lockfiles" / "flags"


def find_parser_flags(folder: Path, engine: Engine, image: str | None) -> ParserFlags:
    """What an image's parser accepts; without an image, that of the engine's first image."""
    wanted = image or engine
    for path in sorted(folder.glob("*.yaml"), key=lambda path: path.stem != wanted):
        flags = read_yaml(path, ParserFlags)
        if wanted == flags.image or wanted in flags.also:
            return flags
    raise RecipeInvalid(
        f"{folder}: no file says which flags {wanted} accepts",
        f"`sm120 recipe flags {wanted} --accept` reads them out of the built image.",
    )


def write_parser_flags(folder: Path, flags: ParserFlags) -> Path:
    """Writes a parser's file, a line for each flag, so that a diff shows only what moved."""
    body = flags.model_dump(exclude_defaults=True, exclude={"flags", "variables"})
    # JSON is YAML too, and has one form for each value
    lines = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in body.items()]
    lines.append("flags:")
    for name in sorted(flags.flags, key=lambda name: (name.lstrip("-"), name)):
        flag = flags.flags[name].model_dump(exclude_defaults=True)
        lines.append(f"  {name}: {json.dumps(flag, ensure_ascii=False)}")
    lines.append("variables:" if flags.variables else "variables: []")
    lines += [f"- {name}" for name in sorted(flags.variables)]
    path = folder / f"{flags.image}.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    write_bytes(path, (_HEAD + "\n".join(lines) + "\n").encode())
    return path
