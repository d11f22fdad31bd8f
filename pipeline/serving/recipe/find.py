"""Recipes by name: those of the checkout, those of a user's own folders, and what extends what."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import RootModel, ValidationError

from pipeline.core.errors import RecipeInvalid, SpecInvalid, UnknownRecipe, there_are
from pipeline.core.files import read_limited
from pipeline.core.model import NAME
from pipeline.core.yaml_file import MAX_FILE_BYTES, mistakes, parse_yaml
from pipeline.serving.recipe.model import Recipe, RecipeFile

# Tables by source: a field of the child replaces the parent's, whoever named that one.
_BY_SOURCE = ("flags", "environment")
_LONGEST_CHAIN = 8


class _Body(RootModel[dict[str, Any]]):
    """A recipe as it is written: what it extends is not in it yet."""


@dataclass(frozen=True)
class Recipes:
    """Folders with recipes; an earlier one hides recipes of the same name in a later one."""

    folders: Sequence[Path]

    def names(self) -> list[str]:
        """All recipes, sorted."""
        return sorted(self._paths())

    def path(self, name: str) -> Path:
        """The file of a recipe."""
        # never a path: a recipe names others, and is not always one's own
        folders = self.folders if re.fullmatch(NAME, name) else ()
        for folder in folders:
            if (path := folder / f"{name}.yaml").is_file():
                return path
        if misnamed := self._paths().get(name):
            raise RecipeInvalid(
                f"{misnamed}: this is no name of a recipe",
                "Rename the file: a name has small letters, digits and . + - only.",
            )
        known = there_are(name, self.names())
        raise UnknownRecipe(f"there is no recipe {name!r} ({known})")

    def _paths(self) -> dict[str, Path]:
        """Every file by its name; leaves out editors' hidden files and links to nowhere."""
        return {
            path.stem: path
            for folder in self.folders
            for path in folder.glob("*.yaml")
            if not path.name.startswith(".") and path.is_file()
        }

    def files(self, name: str) -> list[Path]:
        """The file of a recipe, then those of all that it extends."""
        return [path for path, _ in self._chain(name)]

    def read(self, name: str) -> Recipe:
        """Reads a recipe with all that it extends."""
        (_, body), *children = reversed(self._chain(name))
        for path, child in children:
            if body.get("backing") == "proved":
                # the runs were of the parent, without these changes
                body["backing"] = "unproved"
            try:
                body = merge(body, child)
            except RecipeInvalid as error:
                raise RecipeInvalid(f"{path}: {error}") from error
        path = self.path(name)
        try:
            recipe = RecipeFile.model_validate(body).root
        except ValidationError as error:
            raise RecipeInvalid(f"{path}: {mistakes(error)}") from error
        if recipe.name != path.stem:
            raise RecipeInvalid(f"{path}: name: is {recipe.name!r}, the file is {path.name}")
        return recipe

    def _chain(self, name: str) -> list[tuple[Path, dict[str, Any]]]:
        """A recipe as it is written, then what it extends, up to the one that extends nothing."""
        path = self.path(name)
        names, found = [name], list[tuple[Path, dict[str, Any]]]()
        while True:
            data = read_limited(path, MAX_FILE_BYTES, RecipeInvalid)
            try:
                body = dict(parse_yaml(data, _Body, path).root)
            except SpecInvalid as error:
                raise RecipeInvalid(str(error)) from error
            parent = body.pop("extends", None)
            found.append((path, body))
            if parent is None:
                return found
            if not isinstance(parent, str):
                raise RecipeInvalid(f"{path}: extends: names one recipe")
            try:
                above = self.path(parent)
            except UnknownRecipe as error:
                raise UnknownRecipe(f"{path}: extends: {error}") from error
            if parent in names or len(names) > _LONGEST_CHAIN:
                chain = " → ".join((*names, parent))
                raise RecipeInvalid(f"{above}: extends: {chain} has no end")
            names.append(parent)
            path = above


def merge(parent: dict[str, Any], child: dict[str, Any]) -> dict[str, Any]:
    """Merges the child's fields into the parent: joins tables, replaces others; null removes."""
    result = dict(parent)
    for key, value in child.items():
        before = result.get(key)
        if value is None:
            result.pop(key, None)
        elif not (isinstance(before, dict) and isinstance(value, dict)):
            result[key] = value
        elif key not in _BY_SOURCE:
            result[key] = merge(before, value)
        else:
            for group in (*before.values(), *(v for v in value.values() if v is not None)):
                if not isinstance(group, dict):
                    message = f"flags and environment are tables by source, not {group!r}"
                    raise RecipeInvalid(message)
            fields = {field for group in value.values() for field in group or ()}
            groups: dict[str, Any] = {
                source: {k: v for k, v in group.items() if k not in fields}
                for source, group in before.items()
            }
            for source, group in value.items():
                given = {k: v for k, v in (group or {}).items() if v is not None}
                # a null source removes the parent's
                groups[source] = {} if group is None else {**groups.get(source, {}), **given}
            result[key] = {source: group for source, group in groups.items() if group}
    return result
