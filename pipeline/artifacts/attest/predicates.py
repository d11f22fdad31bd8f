"""Predicates of our own, small and versioned. A field without a value has the reason."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, StringConstraints, model_validator

from pipeline.artifacts.attest import names
from pipeline.artifacts.attest.statement import RECORDED
from pipeline.artifacts.attest.strict import as_model
from pipeline.core.known import Known
from pipeline.core.model import (
    Count,
    Digest,
    Frozen,
    HubRepository,
    Identity,
    Justification,
    Name,
    Platform,
    Sha1,
    Stamp,
)

Text = Annotated[str, StringConstraints(min_length=1, max_length=4000)]


class DeclaredDifference(Frozen):
    """A file that a compiled tree's build says may have other bytes, and why."""

    path: Text  # in the image
    reason: Text  # as the build's `may_differ` has it


_Differences = Annotated[list[DeclaredDifference], Field(min_length=1, max_length=1000)]


class Rebuild(Frozen):
    """A second build from the same lock, in an empty store, compared byte for byte."""

    image: Identity
    platform: Platform
    identical: bool
    # what differed first; a reason why there is none
    difference: Known[Text]
    inputs: Digest  # the digest of all that decides the image
    builder: Identity
    builder_version: Identity
    builder_code: Digest
    rebuilt_by: Digest  # the key that vouches for it
    claims: Literal["SLSA Build L1; a rebuild on one's own machine is no hosted builder"]
    # not identical, but every difference is declared; left out where there is none
    equivalent: _Differences | None = None
    # the processor that it was built on, such as x86_64; older statements have none
    machine: Identity | None = None


class WeightsLockName(Frozen):
    """Which lock, and which spec it answers."""

    name: Identity
    seal: Digest
    spec: Digest


class WeightsVerification(Frozen):
    """Whether the files on disk are the locked ones; `unknown` and `damaged` say why."""

    result: Literal["verified", "damaged", "unknown"]
    how: Literal["full", "receipt"]
    at: Stamp
    files_read: Count
    files_by_receipt: Count
    why: list[str]


class Tool(Frozen):
    """The program that made the statement."""

    name: Literal["sm120-pipeline"]
    version: Identity


class Weights(Frozen):
    """A set of model files, as locked and as they are on a disk."""

    lock: WeightsLockName
    repository: HubRepository
    commit: Sha1
    files: Count
    size_bytes: Count
    layout: Literal["plain", "hub-cache"]
    verification: WeightsVerification
    tool: Tool


class GpuSummary(Frozen):
    """One card as its driver reports it."""

    name: Known[Text]
    uuid: Known[Identity]
    compute_capability: Known[Identity]
    memory_bytes: Known[Count]
    bar1_bytes: Known[Count]
    vbios: Known[Identity]
    power_limit_w: Known[float]
    pcie_generation: Known[Count]
    pcie_width: Known[Count]


class HostSummary(Frozen):
    """A machine at one time: what a number measured on it depends on."""

    host: Identity  # a name chosen for it, or a digest of its machine id
    os: Known[Text]
    kernel: Known[Text]
    kernel_command_line: Known[Text]
    cpu: Known[Text]
    cpu_sockets: Known[Count]
    cpu_cores: Known[Count]
    cpu_microcode: Known[Identity]
    memory_bytes: Known[Count]
    driver: Known[Identity]
    driver_is_open: Known[bool]
    cuda_driver: Known[Identity]
    container_runtime: Known[Text]
    iommu: Known[Text]
    acs_redirect: Known[bool]
    aspm: Known[Text]
    peer_to_peer: Known[Text]
    nccl: Known[Text]
    gpus: Known[list[GpuSummary]]


class BenchmarkRun(Frozen):
    """A measurement and what it depends on; its subjects are the result and the raw requests."""

    image: Known[Digest]
    weights: Known[Digest]
    recipe: Known[Digest]
    host_facts: Known[Digest]
    client: Digest  # of the code that measured
    workload: Digest
    outcome: Literal["complete", "partial"]
    # Copies of the result's values: statements of 0.1 have them, and no verifier needs them.
    fields: dict[str, Any] = {}
    lines: dict[str, Any] = {}


class Report(Frozen):
    """A document with numbers, and the runs they came from; its subject is the page."""

    title: Text
    runs: list[Digest]  # of the files of the runs
    data: Digest
    fields: dict[str, Any] = {}  # as in BenchmarkRun


class CompiledFile(Frozen):
    """A file that `sm120 source export` wrote: of which source, compiled how, from what."""

    source: Name
    build: Name
    platform: Platform
    inputs: Digest  # of all that decides the compiled tree
    layer: Digest  # that images have the tree in
    tool: Tool


class Bundle(Frozen):
    """A folder for a machine without network; its subject is the manifest of all its files."""

    plan: Digest
    platform: Platform
    commit: Sha1
    files: Count
    size_bytes: Count
    tool: Tool


class Ungated(Frozen):
    """An image that was published although its gates had not passed, and why."""

    image: Identity
    platform: Platform
    reference: Identity  # where it was published
    gates: Text  # what was wrong with them
    reason: Text


Severity = Literal["unrated", "none", "low", "medium", "high", "critical"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)  # from the least to the worst
Day = Annotated[str, StringConstraints(pattern=r"^\d{4}-\d\d-\d\d$")]


class AcceptedRisk(Frozen):
    """Why somebody accepts a known vulnerability, and until when."""

    reason: Text
    until: Day
    justification: Justification | None = None  # none: it is affected, and that is accepted


class KnownVulnerability(Frozen):
    """A package of an image that an advisory is about."""

    id: Identity
    aliases: list[Identity]
    package: Identity
    version: Identity
    purl: Identity
    via: Identity | None  # the package that it is inside
    severity: Severity
    published: Stamp | None
    fixed: list[Identity]  # versions without it, as far as the advisory names them
    accepted: AcceptedRisk | None

    def is_open(self, today: date) -> bool:
        """Whether nobody accepts it, or the acceptance has ended."""
        return self.accepted is None or self.accepted.until < today.isoformat()


class AuditDatabase(Frozen):
    """The advisories that an audit went by."""

    digest: Digest
    files: Count
    records: Count
    newest: Stamp


class Audit(Frozen):
    """The known vulnerabilities of an image, by one database of advisories."""

    image: Identity
    platform: Platform
    database: AuditDatabase
    packages: Count  # that were compared
    unmatched: Count  # of kinds whose versions or advisories nothing here knows
    undecided: Annotated[list[Text], Field(max_length=10_000)]  # neither affected nor not
    findings: Annotated[list[KnownVulnerability], Field(max_length=10_000)]
    tool: Tool


# 0 also stands for an engine's `False`
_Sizes = Annotated[dict[Identity, Annotated[int, Field(ge=0, le=1024)]], Field(max_length=16)]
_Positive = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]


class TunedSize(Frozen):
    """A kernel's configuration for one number of tokens, timed beside the engine's own."""

    tokens: Annotated[int, Field(ge=1, le=1 << 20)]
    config: _Sizes  # the engine's own, where nothing was faster
    default: _Sizes
    default_us: _Positive
    us: _Positive
    # of the times, tuned to default, with 95 % confidence; none where nothing was faster
    ratio: Annotated[list[_Positive], Field(min_length=2, max_length=2)] | None
    trials: Count
    failed: Count


class TunedCard(Frozen):
    """The card that times were measured on, as its driver reports it."""

    name: Identity
    compute_capability: Identity
    driver: Identity
    power_limit_w: Identity | None
    clock_mhz: Identity | None
    most_clock_mhz: Identity | None


class KernelTable(Frozen):
    """Configurations of an engine's kernel that are faster for one recipe, image and card."""

    image: Identity
    platform: Platform
    recipe: Name
    recipe_digest: Digest
    engine: Identity
    kernel: Identity
    # the engine's own name for the table of this shape, which is in it
    file: Annotated[str, StringConstraints(pattern=r"^[\w=,.\[\] -]{1,200}\.json$")]
    element_bytes: Annotated[int, Field(ge=1, le=2)]  # of weights
    card: TunedCard
    torch: Identity
    triton: Annotated[str, StringConstraints(pattern=r"^\d+(\.\w+){1,3}$")]
    sizes: Annotated[list[TunedSize], Field(min_length=1, max_length=100)]
    tool: Tool

    @model_validator(mode="after")
    def _has_each_number_once(self) -> KernelTable:
        tokens = [size.tokens for size in self.sizes]
        if len(tokens) != len({*tokens}):
            raise ValueError("one number of tokens is there twice")
        return self


MOST_STATEMENTS = 1000


class Committed(Frozen):
    """One statement of a set: its exact bytes and, where it holds a verdict, that verdict."""

    predicate_type: Identity
    payload: Digest  # of the signed bytes, so that a second signature changes nothing
    about: Identity | None = None  # a gate and its card, or who rebuilt it
    verdict: Identity | None = None

    @property
    def title(self) -> str:
        verdict = f", {self.verdict}" if self.verdict else ""
        about = f" {self.about}" if self.about else ""
        return f"{names.predicate_kind(self.predicate_type)}{about}{verdict}"


class EvidenceSet(Frozen):
    """Every statement there is of an image, so that one taken away or added is noticed."""

    image: Identity
    platform: Platform
    statements: Annotated[list[Committed], Field(max_length=MOST_STATEMENTS)]
    ungated: Text | None  # why it was published although its gates had not passed

    @model_validator(mode="after")
    def _names_each_once(self) -> EvidenceSet:
        payloads = [x.payload for x in self.statements]
        if len(payloads) != len(set(payloads)):
            raise ValueError("one statement is named twice")
        return self


MODELS: dict[str, type[Frozen]] = {
    names.REBUILD: Rebuild,
    names.WEIGHTS: Weights,
    names.HOST_FACTS: HostSummary,
    names.BENCHMARK_RUN: BenchmarkRun,
    names.REPORT: Report,
    names.UNGATED: Ungated,
    names.AUDIT: Audit,
    names.KERNEL_TABLE: KernelTable,
    names.COMPILED_FILE: CompiledFile,
    names.EVIDENCE_SET: EvidenceSet,
    names.BUNDLE: Bundle,
}


def check_predicate(predicate_type: str, predicate: dict[str, Any]) -> Frozen | None:
    """Checks a predicate of our own; refuses one that is not what its type promises."""
    model = MODELS.get(predicate_type)
    if model is None:
        return None
    # the time is checked with the statement
    body = {k: v for k, v in predicate.items() if k != RECORDED}
    # JSON has no bool that is an int: each value must be of its own kind
    return as_model(model, body, predicate_type, "the predicate", strict=True)
