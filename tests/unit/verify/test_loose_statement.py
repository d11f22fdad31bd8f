"""A statement without what it is about: its signature and form are judged, never the rest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.attest.envelope import enclose
from pipeline.artifacts.attest.keys import LocalSigner, make_private_key
from pipeline.artifacts.attest.names import CYCLONEDX, PROVENANCE, REBUILD, SPDX, TEST_RESULT
from pipeline.artifacts.attest.statement import make_statement
from pipeline.evidence.verify.chain import VerifyContext, judge_statement
from pipeline.evidence.verify.evidence import EvidenceItem, read_item
from pipeline.evidence.verify.verdict import Verdict
from tests.unit.verify.world import NOW, World, make_world, trust_in, trusted

KEY = make_private_key()
BY = VerifyContext(trust_in(trusted(KEY)), None, NOW)
DIGEST = "sha256:" + "a" * 64


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("loose"))


def of(world: World, name: str) -> EvidenceItem:
    return read_item(f"{name}.dsse.json", world.signed(name, KEY).dump())


@pytest.mark.parametrize("name", ["provenance", "sbom-cyclonedx", "gate-smem-sm_120", "rebuild"])
def test_a_good_statement_is_incomplete_for_want_of_its_subject(world: World, name: str) -> None:
    walked = judge_statement(of(world, name), BY)
    assert walked.node.verdict is Verdict.INCOMPLETE
    nodes = {node.title: node for node in walked.node.children}
    assert nodes["subject"].own is Verdict.INCOMPLETE
    assert nodes["subject"].message.startswith(f"engine {world.built.digest} is not here")
    assert len(nodes) == 3
    assert walked.node.title.endswith(f"({name}.dsse.json)")
    (believed,) = walked.believed
    assert believed.name == f"{name}.dsse.json"
    assert believed.statement == world.statements[name]


def test_nobody_believes_a_statement_of_an_unknown_key(world: World) -> None:
    outsider = replace(BY, trust=trust_in(trusted(make_private_key())))
    walked = judge_statement(of(world, "provenance"), outsider)
    assert walked.believed == ()
    assert walked.node.verdict in (Verdict.BROKEN, Verdict.UNSIGNED)


def test_what_is_no_envelope_is_broken(tmp_path: Path) -> None:
    walked = judge_statement(read_item("it", b"no envelope"), BY)
    assert (walked.node.title, walked.node.verdict) == ("it", Verdict.BROKEN)
    assert walked.believed == ()


@pytest.mark.parametrize(
    ("kind", "predicate"),
    [
        (PROVENANCE, {"buildDefinition": {}}),
        (TEST_RESULT, {"result": "PASSED"}),
        (CYCLONEDX, {"bomFormat": "other"}),
        (SPDX, {"spdxVersion": "SPDX-1.0"}),
        (REBUILD, {"identical": "yes"}),
    ],
)
def test_a_predicate_that_is_not_what_its_kind_promises_is_broken(
    kind: str, predicate: dict[str, Any]
) -> None:
    envelope = enclose(make_statement("x", DIGEST, kind, predicate), [LocalSigner(KEY)])
    walked = judge_statement(read_item("it", envelope.dump()), BY)
    assert walked.node.verdict is Verdict.BROKEN
