"""A policy for CI: what evidence must be there, by whom, how old, and how well gates must do."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from pipeline.artifacts.attest.names import PROVENANCE, Kind
from pipeline.core.errors import RecordInvalid, SpecInvalid, TrustInvalid
from pipeline.core.model import Digest, Frozen, Name
from pipeline.core.yaml_file import read_yaml
from pipeline.evidence.statements.provenance import read_provenance
from pipeline.evidence.verify.signature import Opened
from pipeline.evidence.verify.verdict import Node, broken
from pipeline.evidence.verify.walk import Walk

Least = Literal["passed", "accepted"]


class Policy(Frozen):
    """A policy file. It requires only the evidence that it names."""

    schema_name: ClassVar[str] = "policy"

    format: Literal[1] = 1
    require: list[Kind] = []
    keys: list[Digest] | None = Field(default=None, description="only these keys count")
    signatures: Annotated[int, Field(ge=1, le=16)] = 1
    # a hundred years; what a date can no longer hold would be no bound
    max_age_days: Annotated[int, Field(ge=1, le=36_500)] | None = None
    gates: dict[Name, Least] = {}


def read_policy(path: Path) -> Policy:
    """The policy file, or an error with the reason why it cannot be used."""
    try:
        return read_yaml(path, Policy)
    except SpecInvalid as error:
        raise TrustInvalid(str(error), error.hint) from error


def judge_policy(policy: Policy, walked: Walk, now: datetime) -> Node:
    """What the policy asks for and did not get; the walk's own verdict counts besides."""
    # a policy may ask for two people: signatures by the same key count once
    counted = [
        b
        for b in walked.believed
        if sum(policy.keys is None or key.id in policy.keys for key in b.keys) >= policy.signatures
    ]
    nodes = []
    for kind in policy.require:
        if any(b.kind == kind for b in counted):
            nodes.append(Node(f"{kind} is there"))
        else:
            why = "is required, but missing or without enough signatures"
            nodes.append(broken(kind, why))
    # the age that a statement claims: its signer's clock is all there is
    for each in counted if policy.max_age_days else ():
        title, made_at = f"age of {each.name}", each.statement.recorded
        days = policy.max_age_days or 0
        if made_at is None:
            nodes.append(broken(title, "it has no time"))
        elif now - made_at > timedelta(days=days):
            nodes.append(broken(title, f"made {made_at:%Y-%m-%d}, more than {days} days ago"))
        else:
            nodes.append(Node(title))
    nodes += [_gate(gate, least, counted) for gate, least in policy.gates.items()]
    return Node("policy", children=tuple(nodes))


def _gate(gate: str, least: Least, counted: list[Opened]) -> Node:
    # the cards that the image is for, by its provenance
    cards: list[str] | None = None
    for statement in (each.statement for each in counted):
        if cards is None and statement.predicate_type == PROVENANCE:
            with suppress(RecordInvalid):
                external = read_provenance(statement.predicate).definition.external
                cards = external.images[external.image].cards
    title, tests = f"gate {gate}", [b.test for b in counted if b.test and b.test.gate == gate]
    # a result for a card that the image is not for decides nothing
    results = [test for test in tests if cards is None or test.card in cards]
    enough = ("passed",) if least == "passed" else ("passed", "accepted")
    # every result counts: one that failed is not outweighed by one that passed
    for result in results:
        if result.verdict not in enough:
            message = f"{result.verdict} on {result.card}, {least} is required"
            return broken(title, message)
    if not results:
        others = ", ".join(sorted({t.card for t in tests}))
        other = f" (for another card: {others})" if tests else ""
        return broken(title, f"has no result that counts{other}")
    return Node(title, message=", ".join(f"{r.verdict} on {r.card}" for r in results))
