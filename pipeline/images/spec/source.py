"""`images/sources/<name>/source.yaml`: a source that is compiled here, and how."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, StringConstraints, model_validator

from pipeline.core.model import (
    Digest,
    Frozen,
    Name,
    Platform,
    RelativePath,
    canonical_json,
    sha256_of,
)
from pipeline.images.spec.image import Architecture, EnvName, FileSpec, ImagePath

Reason = Annotated[str, StringConstraints(min_length=10)]
# As /proc/cpuinfo names them, so that a start script can compare without a table.
CpuFeature = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]{2,20}$")]


class SdistSpec(Frozen):
    """The source archive of a project on the Python package index."""

    project: Name
    # exact, unlike a requirement: a source has one archive
    version: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9.+!_-]+$")]


class DebianSourceSpec(Frozen):
    """The upstream archive of a Debian source package."""

    package: Name
    suite: Name
    component: Name = "main"
    version: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9.+~:-]+$")] | None = Field(
        default=None, description="Debian's version; without it, the newest of the suite"
    )


class ArchiveSpec(Frozen):
    """Where a source's files come from: exactly one kind of place.

    A lock names the archive by hash and its files by one digest, so that the same files from
    another place, such as a git export of one's own, are the same source.
    """

    sdist: SdistSpec | None = None
    debian: DebianSourceSpec | None = None
    file: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+~-]*$")] | None = (
        Field(default=None, description="an archive of one's own, found in a folder or mirror")
    )
    below: RelativePath | None = Field(
        default=None, description="the folder in the archive that is the source; else its only one"
    )
    leave_out: list[RelativePath] = Field(
        default=[], description="files and folders that the build does not need"
    )

    @model_validator(mode="after")
    def _has_one_place(self) -> ArchiveSpec:
        if sum(x is not None for x in (self.sdist, self.debian, self.file)) != 1:
            raise ValueError("name exactly one of `sdist`, `debian` and `file`")
        return self


class UpstreamSpec(Frozen):
    """What the files are, for people: nothing is fetched from there."""

    repository: str
    commit: str


class SourcePatchedFile(Frozen):
    """A file that a source patch changes, by its bytes before and after."""

    path: RelativePath
    before: Digest | None = None
    after: Digest | None = None


class SourcePatch(Frozen):
    """One patch of a source: why it is there, and what it must turn into what."""

    file: RelativePath
    why: Annotated[str, StringConstraints(min_length=20)]
    upstream: Annotated[list[str], Field(min_length=1)]
    files: Annotated[list[SourcePatchedFile], Field(min_length=1)]


class StepSpec(Frozen):
    """One program that is run, in the build's folder; `{jobs}` is how many may run at once."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z -]{0,30}$")]
    # words, which no shell reads
    run: Annotated[list[str], Field(min_length=1)]


class OutputSpec(Frozen):
    """A file that the build leaves, and where it lies in the compiled tree."""

    source: Annotated[RelativePath, Field(alias="from", description="below the build's folder")]
    to: RelativePath
    executable: bool = False


class BuildSpec(Frozen):
    """One way to compile a source."""

    toolchain: Name = Field(description="the image of this checkout that it is compiled in")
    to: ImagePath = Field(description="the folder of an image that its outputs lie in")
    platforms: Annotated[list[Platform], Field(min_length=1, description="what the result is for")]
    toolchain_platform: Platform | None = Field(
        default=None,
        description="what the toolchain runs on, where that is not what the result is for",
    )
    env: dict[EnvName, str] = {}
    steps: Annotated[list[StepSpec], Field(min_length=1)]
    outputs: list[OutputSpec] = Field(
        default=[], description="what this build leaves beside the outputs of all builds"
    )
    cpu_minutes: Annotated[
        int, Field(gt=0, description="measured, with no object kept from before")
    ]
    job_memory_mb: Annotated[int, Field(gt=0)] = 1500
    silent_minutes: Annotated[int, Field(gt=0)] = Field(
        default=30, description="a step that prints nothing for so long is taken to hang"
    )
    architectures: list[Architecture] = Field(
        default=[], description="GPU machine code that the result must hold, and no other"
    )
    cpu: list[CpuFeature] = Field(
        default=[], description="instruction sets beyond the platform's own that the result uses"
    )
    cpu_checked: dict[CpuFeature, Reason] = Field(
        default={}, description="others that it uses only after asking the processor, and where"
    )
    version: list[str] = Field(
        default=[], description="a command of the result that prints its version"
    )
    may_differ: dict[RelativePath, Reason] = Field(
        default={}, description="outputs that a rebuild may give other bytes, each with the reason"
    )


class SourceSpec(Frozen):
    """One source: where it comes from, what is changed in it, and how it is compiled."""

    schema_name: ClassVar[str] = "source"

    name: Name
    summary: Annotated[str, StringConstraints(min_length=10, max_length=200)]
    licence: str
    archive: ArchiveSpec
    upstream: UpstreamSpec
    files: list[FileSpec] = Field(default=[], description="our own files, put into the source")
    patches: list[SourcePatch] = []
    outputs: Annotated[list[OutputSpec], Field(min_length=1)]
    builds: Annotated[dict[Name, BuildSpec], Field(min_length=1)]

    def lock_digest(self) -> str:
        """The digest that a lock of this source records: change the archive, and it is stale."""
        # builds, files and patches may change without a new lock
        wanted: dict[str, Any] = self.archive.model_dump(mode="json")
        return sha256_of(canonical_json(wanted))
