"""`images/<name>/image.yaml`: what an image should be, before anything is looked up."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, StringConstraints, WithJsonSchema, model_validator

from pipeline.core.model import (
    REPOSITORY,
    Digest,
    Frozen,
    Justification,
    Name,
    Platform,
    RelativePath,
    RepositoryPath,
    canonical_json,
    sha256_of,
    stays_below,
)

# No slash and no @: a name of ours can never be taken for an image from elsewhere.
_OWN = r"[a-z0-9][a-z0-9.+-]{0,79}"
_TAG = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
_DIGEST = r"sha256:[0-9a-f]{64}"
_FOREIGN = re.compile(rf"({REPOSITORY})(?::{_TAG})?@({_DIGEST})")
_LONGEST_REPOSITORY = 200  # names with their registry have 255 characters at most
_PATTERN = rf"^{_OWN}$|^{REPOSITORY}(?::{_TAG})?@{_DIGEST}$"


class ForeignBase(Frozen):
    """An OCI image: the name is for people and registries, the digest is what is used."""

    repository: RepositoryPath
    digest: Digest

    def __str__(self) -> str:
        return f"{self.repository}@{self.digest}"


def parse_foreign(text: str) -> ForeignBase | None:
    """The image from elsewhere that a spec's `base` names; none where it is one of ours."""
    match = _FOREIGN.fullmatch(text)
    return ForeignBase(repository=match[1], digest=match[2]) if match else None


def _is_base(text: str) -> str:
    if re.fullmatch(_OWN, text):
        return text
    name, at, digest = text.partition("@")
    # a registry in the spec would make the image depend on where it is built
    first, slash, _ = name.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        raise ValueError(
            f"{first!r} names a registry; write REPOSITORY@sha256:…, and name the registry with"
            " --base-registry or SM120_BASE_REGISTRIES"
        )
    if not at:
        raise ValueError(
            f"{text!r} is not an image of this checkout, and no digest is given; a tag can move, so"
            " write REPOSITORY@sha256:… (`sm120 registry tags` shows the digest of a tag)"
        )
    if not re.fullmatch(_DIGEST, digest):
        raise ValueError(f"{digest!r} is not a sha256 digest")
    if not _FOREIGN.fullmatch(text) or len(name) > _LONGEST_REPOSITORY:
        raise ValueError(
            f"{name!r} is not a repository name (lower case, digits and . _ - / between)"
        )
    return text


# An image of this checkout by name, or `REPOSITORY@sha256:…`.
BaseText = Annotated[
    str, AfterValidator(_is_base), WithJsonSchema({"type": "string", "pattern": _PATTERN})
]


def _stays_inside(path: str) -> str:
    stays_below(path.removeprefix("/"))
    if "/.wh." in path:
        raise ValueError("names that begin with .wh. delete files when a layer is unpacked")
    return path


def _is_requirement(text: str) -> str:
    # slow to load, and commands about weights, which know a checkout too, need none of it
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        wanted = Requirement(text)
    except InvalidRequirement as error:
        raise ValueError(f"{text!r} is not a requirement") from error
    # what lies at an address can change, and a mirror would not have it
    if wanted.url:
        raise ValueError(f"{text!r} names a location; give a version instead")
    return text


ImagePath = Annotated[
    str, StringConstraints(pattern=r"^/[A-Za-z0-9._+@/-]+$"), AfterValidator(_stays_inside)
]
RequirementText = Annotated[str, AfterValidator(_is_requirement)]
EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
# Nothing with setuid, setgid or sticky: no image of ours needs it.
Mode = Annotated[str, StringConstraints(pattern=r"^0[0-7]{3}$")]
# As nvcc names them; `a` and `f` mark code for one chip or one family alone.
Architecture = Annotated[str, StringConstraints(pattern=r"^sm_\d{2,3}[af]?$")]
# Of paths as a wheel has them; a star also stands for slashes.
FilePattern = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._+*/-]+$", max_length=200)]
CasePattern = Annotated[str, StringConstraints(pattern=r"^[a-z0-9.*-]+$", max_length=80)]
# FlashInfer names a module's folder and file by it: parts of it are the types it is compiled for.
ModuleName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_]{2,230}$")]
ArgumentName = Annotated[str, StringConstraints(pattern=r"^[a-z_][a-z0-9_]*$")]
Library = Literal["FlashInfer", "CuTe DSL", "DeepGEMM"]
Summary = Annotated[str, StringConstraints(min_length=10, max_length=200)]


class Account(Frozen):
    """A user that exists in the image, so that nothing has to run as root."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]{0,30}$")]
    # not root; the numbers above are reserved by Debian:
    # https://www.debian.org/doc/debian-policy/ch-opersys.html#uid-and-gid-classes
    uid: Annotated[int, Field(ge=1, le=60000)]
    gid: Annotated[int, Field(ge=1, le=60000)]
    home: Annotated[str, StringConstraints(pattern=r"^(/[A-Za-z0-9_][A-Za-z0-9_.-]*)+$")]


class DebianSpec(Frozen):
    """The Debian release a root image is made of."""

    suite: Name = "bookworm"
    components: list[Name] = ["main"]
    # Security updates are newer, but Debian's mirror drops each one when the next comes out: a
    # lock made with them may stop being fetchable from an ordinary mirror within weeks.
    security: bool = False
    exclude: dict[Name, str] = Field(
        default={}, description="dependencies left out on purpose, each with the reason"
    )


Reason = Annotated[str, StringConstraints(min_length=10)]


# As PEP 825 allows them; its file name ends with it.
VariantLabel = Annotated[str, StringConstraints(pattern=r"^[0-9a-z._]{1,16}$")]


def _is_unset(value: object) -> bool:
    # newer fields count in hashes of specs only where they are used: no lock may become stale
    return not value


class PythonSpec(Frozen):
    """The wheels of an image."""

    # bookworm's own Python: it comes as .debs, not from elsewhere
    version: Annotated[str, StringConstraints(pattern=r"^3\.\d+$")] = "3.11"
    requirements: Annotated[list[RequirementText], Field(min_length=1)]
    prefer: list[Name] = Field(
        default=[], description="projects whose files win where two wheels write one path"
    )
    rewrite_record: dict[Name, str] = Field(
        default={}, description="wheels published with a wrong RECORD; it is written anew"
    )
    omit: dict[Name, str] = Field(
        default={}, description="projects left out of the closure on purpose, with the reason"
    )
    override: dict[RequirementText, Reason] = Field(
        default={},
        exclude_if=_is_unset,
        description="what is locked of a project whatever other wheels require, with the reason",
    )
    variants: dict[Name, VariantLabel] = Field(
        default={},
        exclude_if=_is_unset,
        description="the wheel variant (PEP 825) that is locked of a project, by its label",
    )


# The card of an image whose spec promises none.
DEFAULT_ARCH = "sm_120"


class CudaSpec(Frozen):
    """A CUDA home made of links into NVIDIA's wheels, and the machine code the image promises."""

    home: ImagePath = "/usr/local/cuda"
    sources: Annotated[list[RelativePath], Field(alias="from", min_length=1)]
    architectures: list[Architecture] = []


class FileSpec(Frozen):
    """A file of our own, from the image's folder."""

    source: Annotated[RelativePath, Field(alias="from")]
    to: ImagePath
    mode: Mode = "0644"


class CompiledSpec(Frozen):
    """A source compiled here; its build says where its files lie in the image."""

    source: Name
    build: Name


class AcceptedAdvisory(Frozen):
    """A known vulnerability of the image that is accepted, why, and until when."""

    id: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{2,99}$")]
    package: Name | None = Field(default=None, description="only of this package [any]")
    reason: Reason
    until: Annotated[date, Field(description="the last day on which it is accepted")]
    justification: Justification | None = Field(
        default=None, description="why it does no harm, by OpenVEX; else it is an accepted risk"
    )


class ModuleSpec(Frozen):
    """A module that FlashInfer compiles when an engine first calls it, and who calls it."""

    name: ModuleName = Field(description="FlashInfer's own name, of its folder and file")
    make: Annotated[
        str,
        StringConstraints(pattern=r"^flashinfer(\.[a-z0-9_]+)+:gen_[a-z0-9_]+$"),
        Field(description="FlashInfer's own function that describes the module"),
    ]
    arguments: dict[ArgumentName, bool | int | str | None] = Field(
        default={}, description="what it is called with; `torch.bfloat16` names a type of torch"
    )
    recipes: Annotated[list[CasePattern], Field(min_length=1)] = Field(
        description="recipes whose engine calls it, by patterns of their names"
    )
    left_out: Reason | None = Field(
        default=None, description="why the layer does not have it [it has it]"
    )

    def serves(self, recipe: str) -> bool:
        """Whether a recipe's engine calls it."""
        return any(fnmatchcase(recipe, pattern) for pattern in self.recipes)


def _each_once(modules: list[ModuleSpec]) -> list[ModuleSpec]:
    names = [each.name for each in modules]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{min(twice)} is listed twice")
    return modules


class LibraryFinding(Frozen):
    """What is known of a library's kernels for some recipes, and from which file of upstream."""

    library: Library
    recipes: Annotated[list[CasePattern], Field(min_length=1)]
    state: Literal["none needed", "missing", "all listed"] = Field(
        description="`all listed`: the engine calls no module beside those that are listed"
    )
    reason: Reason
    source: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_./-]+$")]


class WarmSpec(Frozen):
    """Kernels that the image brings compiled, so that its first requests wait for no compiler.

    They are those that the cases of its base's shared-memory gate reach. `recipes` says which of
    these cases a recipe's engine calls, by patterns of their names. `modules` are those of
    FlashInfer, by its own names; `findings` is what is known of what no case and no module covers.
    """

    recipes: dict[Name, Annotated[list[CasePattern], Field(min_length=1)]] = Field(
        default={}, description="recipes, and the cases that stand for what each calls"
    )
    modules: Annotated[list[ModuleSpec], AfterValidator(_each_once)] = []
    findings: list[LibraryFinding] = []


class SlimSpec(Frozen):
    """What a warm image does without where all that its recipes need is compiled: IMAGE-slim.

    Everything comes from the same locks. `files` are for wheels whose layer is written anew in any
    case: a layer that keeps all of its files is shared with the whole image.
    """

    debs: list[Name] = Field(default=[], description="Debian packages that are left out")
    wheels: list[Name] = Field(default=[], description="wheels that are left out")
    files: dict[Name, Annotated[list[FilePattern], Field(min_length=1)]] = Field(
        default={}, description="of other wheels, the files that match: `include/*`, `*.a`"
    )


# The end of the name of such a variant.
SLIM = "-slim"


def required_results(
    gates: Sequence[str], archs: Sequence[str], *, patched: bool
) -> list[tuple[str, str]]:
    """Each gate of an image with the card that it must be judged for.

    Machine code is judged for every card that the image promises; kernels are compiled for the
    first, whichever variant of its machine code is promised.
    """
    # patches are proved together with the shared-memory gate
    wanted = [*gates, *(["patches"] if patched and "smem" in gates else [])]
    main = archs[0].rstrip("af")
    return [(gate, card) for gate in wanted for card in (archs if gate == "arch" else [main])]


class ImageSpec(Frozen):
    """One image: its base, what is put on it, and how it runs."""

    name: Name
    summary: Summary
    base: BaseText | None = Field(
        default=None, description="an image of this checkout, or REPOSITORY@sha256:…"
    )
    debian: DebianSpec | None = None
    accounts: list[Account] = []
    platforms: Annotated[list[Platform], Field(min_length=1)]
    debs: list[Name] = []  # names alone: the lock has versions and files
    python: PythonSpec | None = None
    cuda: CudaSpec | None = None
    compiled: list[CompiledSpec] = []
    warm: WarmSpec | None = Field(
        default=None, description="kernels of its base's engine, compiled here without a card"
    )
    slim: SlimSpec | None = Field(
        default=None, description="what its variant IMAGE-slim leaves out, which compiles nothing"
    )
    files: list[FileSpec] = []  # their digests are among the inputs of the image
    patches: RelativePath | None = None
    entrypoint: list[str] = []
    command: list[str] = []
    env: dict[EnvName, str] = {}
    workdir: ImagePath | None = None
    user: Name | None = None  # the image's config has its numbers
    ports: list[Annotated[int, Field(ge=1, le=65535)]] = []  # TCP
    gates: list[Name] = []
    labels: dict[str, str] = {}  # annotations of the manifest, too
    # about the image, not in it: `sm120 evidence audit --attest` signs them
    advisories: list[AcceptedAdvisory] = []

    @model_validator(mode="after")
    def _has_one_root(self) -> ImageSpec:
        if (self.base is None) == (self.debian is None):
            raise ValueError("an image has either `base` (another image) or `debian`, not both")
        # /etc/passwd is written once, with the root's first layer
        if self.base is not None and self.accounts:
            raise ValueError("`accounts` belong to the root image that has `debian`")
        if self.warm is not None and (self.parent is None or self.python is not None):
            raise ValueError(
                "`warm` belongs to an image that adds no wheels to one of this checkout"
            )
        # its cases, card, code and variables are those of the image below: another variable or
        # card, and nothing in the layer would be found
        others = [name for name in ("env", "cuda", "patches", "compiled") if getattr(self, name)]
        if self.warm is not None and others:
            raise ValueError(
                f"`{others[0]}` belongs to the image below: kernels are compiled as that one is"
            )
        if self.slim is not None and self.warm is None:
            raise ValueError("`slim` belongs to an image with `warm`: without it, all is compiled")
        return self

    @property
    def is_slim(self) -> bool:
        """Whether it is the variant that leaves out what `slim` names."""
        return self.slim is not None and self.name.endswith(SLIM)

    def dumped(self) -> dict[str, Any]:
        """All of the spec, as hashes cover it; newer fields count only where they are used."""
        later = {name for name in ("compiled", "warm") if not getattr(self, name)}
        # accepting an advisory must not make anyone build and publish the same bytes again
        # the whole image stays as it is whatever its variant leaves out
        later |= set() if self.is_slim else {"slim"}
        return self.model_dump(mode="json", by_alias=True, exclude={*later, "advisories"})

    @property
    def foreign(self) -> ForeignBase | None:
        """The image from elsewhere that it stands on, if it does."""
        return parse_foreign(self.base) if self.base else None

    @property
    def parent(self) -> str | None:
        """The image of this checkout that it stands on, if it does."""
        return None if self.foreign else self.base

    @property
    def promised_archs(self) -> list[str]:
        """The cards it is for."""
        return (list(self.cuda.architectures) if self.cuda else []) or [DEFAULT_ARCH]

    @property
    def main_arch(self) -> str:
        """The card that its kernels are compiled for: the first that it names."""
        return self.promised_archs[0].rstrip("af")

    def lock_digest(self) -> str:
        """The digest a lock of this spec records: change the spec, and the lock is stale."""
        # what only decides how files are laid out leaves a lock valid
        layout = {"prefer", "rewrite_record"}
        python = self.python.model_dump(exclude=layout) if self.python else None
        debian = self.debian.model_dump() if self.debian else None
        wanted = {"base": self.base, "debian": debian, "debs": sorted(self.debs), "python": python}
        return sha256_of(canonical_json(wanted))


class PythonOverride(Frozen):
    """Wheels of one platform; a list takes the place of the list for all platforms."""

    requirements: Annotated[list[RequirementText], Field(min_length=1)] | None = None
    prefer: list[Name] | None = None
    rewrite_record: dict[Name, str] | None = None
    omit: dict[Name, str] | None = None
    override: dict[RequirementText, Reason] | None = None


class CudaOverride(Frozen):
    """The machine code that one platform promises, and where its CUDA home comes from."""

    sources: Annotated[list[RelativePath], Field(min_length=1)] | None = Field(
        default=None, alias="from"
    )
    architectures: list[Architecture] | None = None


class PlatformOverride(Frozen):
    """How an image differs on one platform: mappings are merged, all else takes its place."""

    summary: Summary | None = None
    debs: list[Name] | None = None
    python: PythonOverride | None = None
    cuda: CudaOverride | None = None
    compiled: list[CompiledSpec] | None = None
    env: dict[EnvName, str] | None = None


class ImageFile(ImageSpec):
    """`image.yaml` as it is written: one spec, and where it differs on a platform.

    Everything that is hashed is an `ImageSpec` of a platform. So the platform that gets
    overrides leaves the digests of the others as they are.
    """

    schema_name: ClassVar[str] = "image"

    overrides: dict[Platform, PlatformOverride] = Field(
        default={}, description="what differs on one of the platforms"
    )

    @model_validator(mode="after")
    def _fits_its_platforms(self) -> ImageFile:
        for platform, override in self.overrides.items():
            if platform not in self.platforms:
                raise ValueError(f"`overrides` has {platform}, which is not in `platforms`")
            for field in ("python", "cuda"):
                if getattr(override, field) is not None and getattr(self, field) is None:
                    raise ValueError(f"`overrides` changes `{field}`, which the image has not")
        return self

    def on(self, platform: str) -> ImageSpec:
        """The spec for a platform: its own where it has overrides, else that of all the others."""
        own = self.overrides.get(platform)
        body = self.model_dump(by_alias=True, exclude={"overrides"})
        others = [each for each in self.platforms if each not in self.overrides]
        # platforms without overrides share one spec, and so its digest
        body["platforms"] = [platform] if own else others or self.platforms
        return ImageSpec.model_validate(
            _merged(body, own.model_dump(by_alias=True, exclude_none=True)) if own else body
        )


def _merged(body: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    # only mappings are merged; a list replaces a list
    inner = {
        key: _merged(body[key], value)
        for key, value in own.items()
        if isinstance(value, dict) and isinstance(body.get(key), dict)
    }
    return {**body, **own, **inner}


class PatchedFile(Frozen):
    """A file a patch changes, by its bytes before and after."""

    path: RelativePath
    before: Digest | None = Field(
        default=None, description="written by `sm120 build IMAGE --accept` where it is left out"
    )
    after: Digest | None = Field(default=None, description="written by --accept, too")


class PatchSpec(Frozen):
    """One patch: why it is there, for which versions, and what it must turn into what."""

    file: RelativePath
    why: Annotated[str, StringConstraints(min_length=20)]
    upstream: list[str] = Field(default=[], description="where upstream has it or talks about it")
    no_upstream: Reason | None = Field(
        default=None, exclude_if=_is_unset, description="or why it is nothing for upstream"
    )
    applies_to: str
    gate: Name | None = Field(default=None, description="the case file that fails without it")
    no_gate: Reason | None = Field(
        default=None, exclude_if=_is_unset, description="or why no gate can judge it"
    )
    files: Annotated[list[PatchedFile], Field(min_length=1)]

    @property
    def made_for(self) -> str:
        """The version of the engine that it was made for; empty where none is named."""
        return self.applies_to.partition("==")[2]

    @model_validator(mode="after")
    def _has_reasons(self) -> PatchSpec:
        unclear = [
            f"give either `{field}`, or under `no_{field}` why there is none"
            for field in ("upstream", "gate")
            if bool(getattr(self, field)) == bool(getattr(self, f"no_{field}"))
        ]
        if unclear:
            raise ValueError("; ".join(unclear))
        return self


class PatchSeries(Frozen):
    """`patches/series.yaml`, in the order they are applied."""

    schema_name: ClassVar[str] = "series"

    patches: list[PatchSpec]
