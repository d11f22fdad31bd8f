"""Architectures that are public, shipped so that `fit` answers before a byte was fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from pipeline.fit.config import architecture_of
from pipeline.fit.shape import Architecture
from pipeline.model import Frozen
from pipeline.yaml_file import read_yaml

_FOLDER = Path(__file__).parent / "facts"


class Rule(Frozen):
    """Tensors whose name is matched are stored in this type; the first rule that matches counts."""

    names: str
    type: str


class Recipe(Frozen):
    """How a GGUF of this architecture was quantised."""

    repository: str
    quant: str
    types: list[Rule] = Field(min_length=1)
    source: Annotated[str, StringConstraints(min_length=20)]


class Fact(Frozen):
    """An excerpt of a config.json, whose it is, and where it was read."""

    repositories: list[str] = Field(min_length=1)
    source: Annotated[str, StringConstraints(min_length=20)]
    config: dict[str, Any]
    gguf: list[Recipe] = []

    def architecture(self) -> Architecture:
        return architecture_of(self.config)


def all_facts() -> list[Fact]:
    """Everything that is shipped."""
    return [read_yaml(path, Fact) for path in sorted(_FOLDER.glob("*.yaml"))]


def fact_of(repository: str) -> Fact | None:
    """The architecture of a repository in a checkpoint's own format."""
    return next((f for f in all_facts() if repository in f.repositories), None)


def recipe_of(repository: str, quant: str) -> tuple[Fact, Recipe] | None:
    """The architecture and the types of a repository of GGUF files."""
    found = ((f, r) for f in all_facts() for r in f.gguf)
    return next(((f, r) for f, r in found if (r.repository, r.quant) == (repository, quant)), None)
