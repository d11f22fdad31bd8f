"""The exact, closed values that travel between packages."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    StringConstraints,
    ValidationError,
    ValidatorFunctionWrapHandler,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
Hex = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
NAME = r"[a-z0-9][a-z0-9.+-]*"
Name = Annotated[str, StringConstraints(pattern=rf"^{NAME}$", max_length=80)]
# A file name, never a path: no separator, no leading dot.
FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+~!%:-]*$")]
# Identities are plain ASCII: letters of other scripts can look the same.
Identity = Annotated[str, StringConstraints(pattern=r"^[!-~]+( [!-~]+)*$", max_length=400)]
Stamp = Annotated[str, StringConstraints(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]
Count = Annotated[int, Field(ge=0)]
Platform = Annotated[str, StringConstraints(pattern=r"^linux/(amd64|arm64)$")]
_PART = r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
# A name below a registry, as registries allow them; the registry itself is no part of it.
REPOSITORY = rf"{_PART}(?:/{_PART})*"
RepositoryPath = Annotated[str, StringConstraints(pattern=rf"^{REPOSITORY}$", max_length=200)]
_HUB_PART = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
HUB_REPOSITORY = f"{_HUB_PART}/{_HUB_PART}"
# `organisation/model`, as the Hugging Face Hub names repositories of weights.
HubRepository = Annotated[str, StringConstraints(pattern=f"^{HUB_REPOSITORY}$", max_length=200)]
Word = Annotated[str, StringConstraints(pattern=r"^[^\s\x00-\x1f]+$", max_length=500)]
Line = Annotated[str, StringConstraints(pattern=r"^\S(.*\S)?$", max_length=1000)]
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]*$", max_length=80)]
Port = Annotated[int, Field(ge=1, le=65535)]
# The inference engines that images hold.
Engine: TypeAlias = Literal["vllm", "sglang", "ik-llama", "llama-cpp"]
# Why a vulnerable package does no harm, as OpenVEX names the reasons: github.com/openvex/spec
Justification: TypeAlias = Literal[
    "component_not_present",
    "vulnerable_code_not_present",
    "vulnerable_code_not_in_execute_path",
    "vulnerable_code_cannot_be_controlled_by_adversary",
    "inline_mitigations_already_exist",
]
Sha1 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]


def stays_below(path: str) -> str:
    """A relative path without empty, `.` or `..` parts."""
    if any(part in ("", ".", "..") for part in path.split("/")):
        raise ValueError("must be a plain relative path")
    return path


RelativePath = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9._+~%:@/-]+$"), AfterValidator(stays_below)
]


class _FileVersion:
    """Marks the field by which a file says in which form it is written."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        def check(value: Any, known: ValidatorFunctionWrapHandler) -> Any:
            try:
                return known(value)
            except ValidationError as error:
                # a later release may have written it: what it means there is not guessed
                wanted = error.errors()[0].get("ctx", {}).get("expected", "another one")
                details = {"given": repr(value)[:60], "wanted": wanted}
                message = "is {given}, and this version of sm120 reads {wanted}: take a newer one"
                raise PydanticCustomError("file_version", message, details) from error

        return core_schema.no_info_wrap_validator_function(check, handler(source))


FILE_VERSION = _FileVersion()


class Frozen(BaseModel):
    """A value that cannot change and cannot hold an undeclared field."""

    # frozen: hashes are taken of these values; closed: a misspelled field must not be ignored
    model_config = ConfigDict(frozen=True, extra="forbid")


class ForeignModel(BaseModel):
    """Part of a format that others define and extend: unknown fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


def canonical_json(value: Any) -> bytes:
    """One byte string per value, whatever order it was built in."""
    # seals of locks and keys of layers are hashes of these bytes: none of them may ever change
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode()


def sha256_of(data: bytes) -> str:
    """The digest as every file of ours writes it."""
    return "sha256:" + hashlib.sha256(data).hexdigest()
